//! Lists of peers in files and join codes.

use std::collections::BTreeMap;

use atoll_net::Peer;
use atoll_net::header::{Capped, WirePeer};
use minicbor::decode::{Decode, Decoder, Error as DecodeError};
use minicbor::encode::{Encode, Encoder, Error as EncodeError, Write};

use crate::dir::{self, DirError, NodeDir};

/// The most peers a list may hold.
pub(crate) const MAX_PEERS: usize = 64;

/// At most [`MAX_PEERS`] address cards.
///
/// CBOR: an array of [`WirePeer`]s.
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

impl<C> Encode<C> for PeerList {
    fn encode<W: Write>(&self, e: &mut Encoder<W>, c: &mut C) -> Result<(), EncodeError<W::Error>> {
        let cards = self.0.iter().map(|peer| WirePeer(*peer)).collect();
        Capped::<WirePeer, MAX_PEERS>(cards).encode(e, c)
    }
}

impl<'b, C> Decode<'b, C> for PeerList {
    fn decode(d: &mut Decoder<'b>, c: &mut C) -> Result<Self, DecodeError> {
        let Capped(cards) = Capped::<WirePeer, MAX_PEERS>::decode(d, c)?;
        Ok(PeerList::new(cards.into_iter().map(|card| card.0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) fn peer(number: u8, addr: &str) -> Peer {
        Peer { id: atoll_key::PeerId([number; 32]), addr: addr.parse().expect("an address") }
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
