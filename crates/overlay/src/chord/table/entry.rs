//! One node as the table keeps it, and how long ago something was, in one byte.

use std::net::{IpAddr, SocketAddr};

use atoll_key::{Key, PeerId};
use atoll_net::Peer;

use crate::{Node, VirtualServerId};

/// Where a key stands on the circle, to 64 bits: enough to tell billions of hashed IDs
/// apart. Two nodes at one place cannot both be in the table.
pub(crate) fn place_of(key: &Key) -> u64 {
    let (top, _) = key.0.split_first_chunk::<8>().expect("a key has 64 bytes");
    u64::from_be_bytes(*top)
}

/// Three bytes that tell a node from its neighbours in a question. A peer that makes
/// up keys with a wanted tag confuses only itself with a neighbour.
pub(crate) fn tag_of(node: &PeerId, server: VirtualServerId) -> [u8; 3] {
    let [.., a, b, c] = node.0;
    let [high, low] = server.index.to_be_bytes();
    [a, b ^ high, c ^ low]
}

/// A node and the evidence for it; 64 bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    id: PeerId,
    ip: IpAddr,
    port: u16,
    virtual_server: VirtualServerId,
    /// Second in which it was last known to live.
    pub heard: u32,
    /// The peer that named it first, shortened; of no meaning once it is `sure`.
    pub teller: u32,
    /// Heard first-hand, named by two peers, or taken from a ring neighbour.
    pub sure: bool,
}

impl Entry {
    /// One that is sure, or else rests on the word of `teller`.
    pub(super) fn new(node: &Node, heard: u32, teller: Option<u32>) -> Entry {
        Entry {
            id: node.peer.id,
            ip: node.peer.addr.ip(),
            port: node.peer.addr.port(),
            virtual_server: node.virtual_server,
            heard,
            teller: teller.unwrap_or_default(),
            sure: teller.is_none(),
        }
    }

    pub(super) fn peer(&self) -> Peer {
        Peer { id: self.id, addr: SocketAddr::new(self.ip, self.port) }
    }

    pub(super) fn peer_id(&self) -> &PeerId {
        &self.id
    }

    /// The node; its position is computed anew.
    pub(super) fn node(&self) -> Node {
        Node::at(self.peer(), self.virtual_server)
    }

    pub(super) fn tag(&self) -> [u8; 3] {
        tag_of(&self.id, self.virtual_server)
    }

    /// Takes over where the node listens now.
    pub(super) fn moved(&mut self, node: &Node) {
        (self.ip, self.port) = (node.peer.addr.ip(), node.peer.addr.port());
    }

    pub(super) fn age_secs(&self, now: u32) -> u32 {
        now.saturating_sub(self.heard)
    }
}

/// A number of seconds as one byte: exact below 16, then three bits after the leading
/// one, rounded up, so at most an eighth too large.
pub(crate) fn to_code(secs: u32) -> u8 {
    if secs < 16 {
        return secs as u8;
    }
    let exponent = 31 - secs.leading_zeros();
    let mantissa = (secs >> (exponent - 3)) & 7;
    let code = (8 * (exponent - 2) + mantissa) as u8;
    if from_code(code) < secs { code + 1 } else { code }
}

/// The seconds of a code; the largest number for codes that stand for none.
pub(crate) fn from_code(code: u8) -> u32 {
    let code = u32::from(code);
    if code < 16 {
        return code;
    }
    let (exponent, mantissa) = (code / 8 + 2, code % 8);
    if exponent > 31 { u32::MAX } else { (8 + mantissa) << (exponent - 3) }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_coded_time_is_at_most_an_eighth_too_large(secs in any::<u32>()) {
            let coded = from_code(to_code(secs));
            prop_assert!(coded >= secs && coded - secs <= secs / 8 + 1);
        }
    }

    #[test]
    fn any_code_is_a_time() {
        let times: Vec<u32> = (0..=255).map(from_code).collect();
        assert!(times.is_sorted());
        assert_eq!((times[15], times[16], times[255]), (15, 16, u32::MAX));
    }

    #[test]
    fn an_entry_is_the_node_it_was_made_of_and_stays_small() {
        let addr = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 4001);
        let server = VirtualServerId { index: 7, ..VirtualServerId::default() };
        let node = Node::at(Peer { id: PeerId([9; 32]), addr }, server);
        assert_eq!(Entry::new(&node, 100, None).node(), node);
        assert!(size_of::<Entry>() <= 72, "{}", size_of::<Entry>());
    }
}
