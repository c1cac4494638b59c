//! The *map* of a pool of several: which member is the primary, and which members have everything that was answered. Plain data;
//! [`crate::map`] decides it.

use std::collections::BTreeSet;

use atoll_key::PeerId;
use minicbor::encode::{Error as EncodeError, Write};
use minicbor::{Decode, Decoder, Encode, Encoder};

use crate::members::PoolMembers;

/// Who has what part in a pool, from one change of it to the next.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct PoolMap {
    /// Counts maps; the first is 1.
    #[n(0)]
    pub epoch: u64,
    /// The member that decides changes of files.
    #[cbor(n(1), with = "peer_key")]
    pub primary: PeerId,
    /// The run of its process that proposed the map: random bits, others at each start.
    #[n(3)]
    pub run: u64,
    /// The write verifier: another one than in the map before if bytes that were answered, and not synced, may have been lost.
    #[n(4)]
    pub verifier: u64,
    /// The members that have everything that was answered, the primary among them.
    #[cbor(n(2), with = "peer_keys")]
    pub members: BTreeSet<PeerId>,
}

impl PoolMap {
    /// The map with which a pool begins: the first of the list is primary, all are members.
    pub fn first(founding: &PoolMembers) -> PoolMap {
        let members = founding.peers().iter().map(|peer| peer.id).collect();
        PoolMap { epoch: 1, primary: founding.founder().id, run: 0, verifier: 0, members }
    }

    /// Whether it can be a map of this pool at all.
    pub fn is_sound(&self, founding: &PoolMembers) -> bool {
        self.epoch >= 1
            && self.members.contains(&self.primary)
            && self.members.iter().all(|member| founding.contains(*member))
    }

    /// Whether it may be decided when `current` holds: its proposer knew that one.
    pub fn follows(&self, current: &PoolMap) -> bool {
        current.epoch.checked_add(1) == Some(self.epoch)
    }
}

/// A node's key as 32 bytes.
mod peer_key {
    use super::*;

    pub(super) fn encode<C, W: Write>(
        peer: &PeerId,
        encoder: &mut Encoder<W>,
        _: &mut C,
    ) -> Result<(), EncodeError<W::Error>> {
        encoder.bytes(&peer.0)?.ok()
    }

    pub(super) fn decode<C>(
        decoder: &mut Decoder<'_>,
        _: &mut C,
    ) -> Result<PeerId, minicbor::decode::Error> {
        let key = <[u8; 32]>::try_from(decoder.bytes()?);
        key.map(PeerId).map_err(|_| minicbor::decode::Error::message("a key has 32 bytes"))
    }
}

/// Nodes' keys in ascending order, at most as many as a pool has members.
mod peer_keys {
    use super::*;

    pub(super) fn encode<C, W: Write>(
        peers: &BTreeSet<PeerId>,
        encoder: &mut Encoder<W>,
        context: &mut C,
    ) -> Result<(), EncodeError<W::Error>> {
        encoder.array(peers.len() as u64)?;
        peers.iter().try_for_each(|peer| peer_key::encode(peer, encoder, context))
    }

    pub(super) fn decode<C>(
        decoder: &mut Decoder<'_>,
        context: &mut C,
    ) -> Result<BTreeSet<PeerId>, minicbor::decode::Error> {
        let wrong = minicbor::decode::Error::message;
        let count = decoder.array()?.ok_or_else(|| wrong("a list of keys says its length"))?;
        if count > PoolMembers::MAX as u64 {
            return Err(wrong("more keys than a pool has members"));
        }
        let mut peers = BTreeSet::new();
        for _ in 0..count {
            let peer = peer_key::decode(decoder, context)?;
            if peers.last().is_some_and(|last| *last >= peer) {
                return Err(wrong("keys are in ascending order"));
            }
            peers.insert(peer);
        }
        Ok(peers)
    }
}

#[cfg(test)]
mod tests {
    use atoll_net::Peer;

    use super::*;
    use crate::messages::{decode, encode};

    fn founding(count: u8) -> PoolMembers {
        let peer = |n: u8| Peer { id: PeerId([n; 32]), addr: ([10, 0, 0, n], 4711).into() };
        PoolMembers::new((1..=count).map(peer).collect()).unwrap()
    }

    #[test]
    fn maps_read_back_and_damaged_ones_are_none() {
        let map = PoolMap::first(&founding(16));
        let bytes = encode(&map);
        assert_eq!(decode::<PoolMap>(&bytes), Some(map));
        for len in 0..bytes.len() {
            assert_eq!(decode::<PoolMap>(&bytes[..len]), None);
        }
        let key = |n: u8| [&[0x58, 0x20][..], &[n; 32]].concat();
        let with = |members: &[u8]| [&[0x85, 0x01][..], &key(1), members, &[0x05, 0x06]].concat();
        assert!(decode::<PoolMap>(&with(&[&[0x82][..], &key(1), &key(2)].concat())).is_some());
        let wrong = [
            [&[0x82][..], &key(2), &key(1)].concat(),
            [&[0x82][..], &key(1), &key(1)].concat(),
            [&[0x91][..], &(1..18).flat_map(key).collect::<Vec<_>>()].concat(),
            vec![0x9b, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff],
            [&[0x9f][..], &key(1), &[0xff]].concat(),
            [&[0x81, 0x58, 0x1f][..], &[1; 31]].concat(),
        ];
        for members in wrong {
            assert_eq!(decode::<PoolMap>(&with(&members)), None, "{members:x?}");
        }
    }

    #[test]
    fn a_map_names_founding_members_alone_with_the_primary_among_them() {
        let founding = founding(3);
        let map = |members: &[u8], primary: u8| PoolMap {
            epoch: 2,
            primary: PeerId([primary; 32]),
            run: 0,
            verifier: 0,
            members: members.iter().map(|n| PeerId([*n; 32])).collect(),
        };
        assert!(map(&[2, 3], 3).is_sound(&founding));
        assert!(!map(&[], 1).is_sound(&founding));
        assert!(!map(&[2, 3], 1).is_sound(&founding), "the primary is no member");
        assert!(!map(&[1, 4], 1).is_sound(&founding), "a stranger is one");
        assert!(!PoolMap { epoch: 0, ..map(&[1], 1) }.is_sound(&founding));
        let first = PoolMap::first(&founding);
        assert!(map(&[1], 1).follows(&first));
        assert!(!first.follows(&first));
        let last = PoolMap { epoch: u64::MAX, ..first.clone() };
        assert!(!PoolMap { epoch: 0, ..first }.follows(&last));
    }
}
