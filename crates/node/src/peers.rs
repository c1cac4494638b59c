//! Lists of peers in files and join codes.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use atoll_key::PeerId;
use atoll_net::Peer;
use minicbor::decode::{Decode, Decoder, Error as DecodeError};
use minicbor::encode::{Encode, Encoder, Error as EncodeError, Write};

use crate::dir::{self, DirError, NodeDir};

/// The most peers a list may hold.
pub(crate) const MAX_PEERS: usize = 64;

/// At most [`MAX_PEERS`] address cards.
///
/// CBOR: an array of byte strings, each 32 bytes public key, 4 or 16 bytes IP address,
/// 2 bytes port, big-endian.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerList(Vec<Peer>);

impl PeerList {
    /// The first [`MAX_PEERS`] of `peers`, the first card of each node.
    pub fn new(peers: impl IntoIterator<Item = Peer>) -> PeerList {
        let mut seen = BTreeMap::new();
        let distinct = peers.into_iter().filter(|peer| seen.insert(peer.id, ()).is_none());
        PeerList(distinct.take(MAX_PEERS).collect())
    }

    /// The peers.
    pub fn as_slice(&self) -> &[Peer] {
        &self.0
    }

    pub(crate) fn load(dir: &NodeDir) -> Result<PeerList, DirError> {
        let path = dir.peers();
        let Some(bytes) = dir::read_small(&path)? else { return Ok(PeerList::default()) };
        minicbor::decode(&bytes).map_err(|error| DirError::damaged(path, error))
    }

    pub(crate) fn save(&self, dir: &NodeDir) -> Result<(), DirError> {
        let bytes = minicbor::to_vec(self).expect("a vector takes all that is written");
        dir::write_atomically(&dir.peers(), &bytes)
    }
}

pub(crate) fn peer_bytes(peer: &Peer) -> Vec<u8> {
    let mut out = peer.id.0.to_vec();
    match peer.addr.ip() {
        IpAddr::V4(ip) => out.extend_from_slice(&ip.octets()),
        IpAddr::V6(ip) => out.extend_from_slice(&ip.octets()),
    }
    out.extend_from_slice(&peer.addr.port().to_be_bytes());
    out
}

pub(crate) fn peer_from_bytes(bytes: &[u8]) -> Option<Peer> {
    let (id, rest) = bytes.split_first_chunk::<32>()?;
    let (ip, port) = rest.split_last_chunk::<2>()?;
    let ip = match ip.len() {
        4 => IpAddr::from(<[u8; 4]>::try_from(ip).ok()?),
        16 => IpAddr::from(<[u8; 16]>::try_from(ip).ok()?),
        _ => return None,
    };
    Some(Peer { id: PeerId(*id), addr: SocketAddr::new(ip, u16::from_be_bytes(*port)) })
}

impl<C> Encode<C> for PeerList {
    fn encode<W: Write>(&self, e: &mut Encoder<W>, _: &mut C) -> Result<(), EncodeError<W::Error>> {
        e.array(self.0.len() as u64)?;
        for peer in &self.0 {
            e.bytes(&peer_bytes(peer))?;
        }
        Ok(())
    }
}

impl<'b, C> Decode<'b, C> for PeerList {
    fn decode(d: &mut Decoder<'b>, _: &mut C) -> Result<Self, DecodeError> {
        let count = d.array()?.ok_or_else(|| DecodeError::message("a list without a length"))?;
        if count > MAX_PEERS as u64 {
            return Err(DecodeError::message("too many peers"));
        }
        let mut peers = Vec::new();
        for _ in 0..count {
            let peer = peer_from_bytes(d.bytes()?);
            peers.push(peer.ok_or_else(|| DecodeError::message("not a peer"))?);
        }
        Ok(PeerList::new(peers))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) fn peer(number: u8, addr: &str) -> Peer {
        Peer { id: PeerId([number; 32]), addr: addr.parse().expect("an address") }
    }

    #[test]
    fn lists_of_both_address_families_read_back() {
        let list = PeerList::new([peer(1, "10.1.2.3:7543"), peer(2, "[fe80::1]:9")]);
        let bytes = minicbor::to_vec(&list).expect("encode");
        assert_eq!(minicbor::decode::<PeerList>(&bytes).expect("decode"), list);
    }

    #[test]
    fn a_node_is_listed_once_and_a_list_is_short() {
        let many = (0..200).map(|i| peer(i as u8, "10.0.0.1:1"));
        assert_eq!(PeerList::new(many).as_slice().len(), MAX_PEERS);
        let twice = PeerList::new([peer(1, "10.0.0.1:1"), peer(1, "10.0.0.2:1")]);
        assert_eq!(twice.as_slice(), [peer(1, "10.0.0.1:1")]);
    }

    #[test]
    fn lists_that_lie_are_refused() {
        let cases: [&[u8]; 5] = [
            b"\x9b\xff\xff\xff\xff\xff\xff\xff\xff", // an array of 2^64 - 1
            b"\x18\x41",
            b"\x9f\xff", // no length
            b"\x81\x43abc",
            b"\x82\x40",
        ];
        for bytes in cases {
            assert!(minicbor::decode::<PeerList>(bytes).is_err(), "{bytes:02x?}");
        }
    }
}
