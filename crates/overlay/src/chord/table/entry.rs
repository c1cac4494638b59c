//! One node as the table keeps it, and how long ago something was, in one byte.

use std::net::{IpAddr, SocketAddr};

use atoll_key::{Key, PeerId};
use atoll_net::Peer;

use crate::{Node, VirtualServerId};

/// A node is given this much life before it is first heard of, so that a newcomer does not
/// count as dead soon after, nor everybody on a ring that has just begun. Few sessions are
/// shorter: one in fifty of Overnet's (`Overnet03`, see [`super`]).
pub(super) const PRIOR_SECS: u32 = 600;

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

/// What is known of a node and from which peer; 72 bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    id: PeerId,
    ip: IpAddr,
    port: u16,
    virtual_server: VirtualServerId,
    /// Second in which it was last known to live.
    pub heard: u32,
    /// Second since which it lives without a break, as far as known.
    pub since: u32,
    /// Whether somebody has said since when; otherwise it is since we know of it.
    pub is_dated: bool,
    /// The peer that named it first, shortened; of no meaning once it is `sure`.
    pub teller: u32,
    /// The peer that said it was dead, shortened; 0 for none.
    pub doubter: u32,
    /// Second in which it was dead by that word; of no meaning without a doubter.
    pub doubted: u32,
    /// Heard first-hand, named by two peers, or taken from a ring neighbour.
    pub sure: bool,
}

impl Entry {
    pub(super) fn new(node: &Node, heard: u32, since: Option<u32>) -> Entry {
        Entry {
            id: node.peer.id,
            ip: node.peer.addr.ip(),
            port: node.peer.addr.port(),
            virtual_server: node.virtual_server,
            heard,
            since: since.unwrap_or(heard).min(heard),
            is_dated: since.is_some(),
            teller: 0,
            doubter: 0,
            doubted: 0,
            sure: false,
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

    /// Since when it lives, if anybody has said so.
    pub(super) fn dated(&self) -> Option<u32> {
        self.is_dated.then_some(self.since)
    }

    /// How long it was known to live.
    pub(super) fn up_secs(&self) -> u32 {
        self.heard - self.since
    }

    pub(super) fn age_secs(&self, now: u32) -> u32 {
        now.saturating_sub(self.heard)
    }

    /// Accordion §3.3: with Pareto lifetimes (α = 1) a node known to have lived for
    /// t_alive and not heard of for t_since lives with probability
    /// t_alive / (t_alive + t_since).
    pub(super) fn p_alive(&self, now: u32) -> f64 {
        let alive = f64::from(self.up_secs().saturating_add(PRIOR_SECS));
        alive / (alive + f64::from(self.age_secs(now)))
    }
}

/// A number of seconds as one byte: exact below 16, then three bits after the leading
/// one, so at most an eighth too small.
pub(crate) fn to_code(secs: u32) -> u8 {
    if secs < 16 {
        return secs as u8;
    }
    let exponent = 31 - secs.leading_zeros();
    let mantissa = (secs >> (exponent - 3)) & 7;
    (8 * (exponent - 2) + mantissa) as u8
}

/// As [`to_code`], but not too small.
pub(crate) fn to_code_up(secs: u32) -> u8 {
    let code = to_code(secs);
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
        fn a_coded_time_is_off_by_an_eighth_at_most(secs in any::<u32>()) {
            let down = from_code(to_code(secs));
            prop_assert!(down <= secs && secs - down <= secs / 8);
            let up = from_code(to_code_up(secs));
            prop_assert!(up >= secs && up - secs <= secs / 8 + 1);
        }
    }

    #[test]
    fn any_code_is_a_time() {
        let times: Vec<u32> = (0..=255).map(from_code).collect();
        assert!(times.is_sorted());
        assert_eq!(times[15], 15);
        assert_eq!(times[16], 16);
        assert_eq!(times[255], u32::MAX);
    }

    #[test]
    fn an_entry_is_the_node_it_was_made_of_and_stays_small() {
        let addr = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 4001);
        let server = VirtualServerId { index: 7, ..VirtualServerId::default() };
        let node = Node::at(Peer { id: PeerId([9; 32]), addr }, server);
        let entry = Entry::new(&node, 100, Some(40));
        assert_eq!(entry.node(), node);
        assert_eq!(entry.up_secs(), 60);
        assert!(size_of::<Entry>() <= 80, "{}", size_of::<Entry>());
    }

    #[test]
    fn the_longer_it_lived_the_longer_it_is_believed_in() {
        let addr = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 4001);
        let node = Node::of(Peer { id: PeerId([9; 32]), addr });
        let old = Entry::new(&node, 10_000, Some(0));
        let young = Entry::new(&node, 10_000, Some(9_900));
        assert!((old.p_alive(10_000) - 1.0).abs() < 1e-9);
        assert!(old.p_alive(10_500) > 0.95 && young.p_alive(10_500) < 0.6);
    }
}
