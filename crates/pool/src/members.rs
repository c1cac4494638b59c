//! Which nodes are members of a pool, and where they listen.

use std::collections::BTreeSet;

use atoll_key::PeerId;
use atoll_net::Peer;
use minicbor::encode::{Error as EncodeError, Write};
use minicbor::{Decode, Decoder, Encode, Encoder};

/// The longest address as text, bytes: IPv6 with a scope and a port.
const MAX_ADDRESS_BYTES: usize = 64;

/// The members of a pool of several, in the order in which they joined: first the *founder*, on which the pool was made, while it is
/// one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PoolMembers {
    peers: Vec<Peer>,
}

impl PoolMembers {
    /// The most members.
    pub const MAX: usize = 16;

    /// These members; none if there are not between 1 and [`PoolMembers::MAX`], or one is named twice.
    pub fn new(peers: Vec<Peer>) -> Option<PoolMembers> {
        let is_twice =
            |(at, peer): (usize, &Peer)| peers[..at].iter().any(|other| other.id == peer.id);
        let is_sound = (1..=PoolMembers::MAX).contains(&peers.len());
        (is_sound && !peers.iter().enumerate().any(is_twice)).then_some(PoolMembers { peers })
    }

    /// The first: the node on which the pool was made, or the one that joined after it if that has left.
    pub fn founder(&self) -> Peer {
        self.peers[0]
    }

    /// All of them.
    pub fn peers(&self) -> &[Peer] {
        &self.peers
    }

    /// The member with this key.
    pub fn get(&self, id: PeerId) -> Option<Peer> {
        self.peers.iter().find(|peer| peer.id == id).copied()
    }

    /// Whether a node is one of them.
    pub fn contains(&self, id: PeerId) -> bool {
        self.peers.iter().any(|peer| peer.id == id)
    }

    /// These members and another one, or that one at another address; none if there are too many.
    pub(crate) fn with(&self, peer: Peer) -> Option<PoolMembers> {
        let mut peers = self.peers.clone();
        match peers.iter_mut().find(|other| other.id == peer.id) {
            Some(known) => *known = peer,
            None => peers.push(peer),
        }
        PoolMembers::new(peers)
    }

    /// These members without one; none if nobody is left.
    pub(crate) fn without(&self, id: PeerId) -> Option<PoolMembers> {
        PoolMembers::new(self.peers.iter().filter(|peer| peer.id != id).copied().collect())
    }
}

/// An array of members.
impl<C> Encode<C> for PoolMembers {
    fn encode<W: Write>(
        &self,
        encoder: &mut Encoder<W>,
        context: &mut C,
    ) -> Result<(), EncodeError<W::Error>> {
        encoder.array(self.peers.len() as u64)?;
        self.peers.iter().try_for_each(|member| peer::encode(member, encoder, context))
    }
}

impl<'b, C> Decode<'b, C> for PoolMembers {
    fn decode(decoder: &mut Decoder<'b>, context: &mut C) -> Result<Self, minicbor::decode::Error> {
        let wrong = minicbor::decode::Error::message;
        let count = decoder.array()?.ok_or_else(|| wrong("a list of members says its length"))?;
        if count > PoolMembers::MAX as u64 {
            return Err(wrong("more members than a pool has"));
        }
        let peers = (0..count).map(|_| peer::decode(decoder, context)).collect::<Result<_, _>>()?;
        PoolMembers::new(peers).ok_or_else(|| wrong("no list of members"))
    }
}

/// A node as its key, 32 bytes, and its address as text.
pub(crate) mod peer {
    use super::*;

    pub(crate) fn encode<C, W: Write>(
        peer: &Peer,
        encoder: &mut Encoder<W>,
        _: &mut C,
    ) -> Result<(), EncodeError<W::Error>> {
        encoder.array(2)?.bytes(&peer.id.0)?.str(&peer.addr.to_string())?.ok()
    }

    pub(crate) fn decode<C>(
        decoder: &mut Decoder<'_>,
        _: &mut C,
    ) -> Result<Peer, minicbor::decode::Error> {
        let wrong = minicbor::decode::Error::message;
        if decoder.array()? != Some(2) {
            return Err(wrong("a node is a key and an address"));
        }
        let key = <[u8; 32]>::try_from(decoder.bytes()?);
        let id = PeerId(key.map_err(|_| wrong("a key has 32 bytes"))?);
        let addr = decoder.str()?;
        let addr = (addr.len() <= MAX_ADDRESS_BYTES).then(|| addr.parse().ok()).flatten();
        Ok(Peer { id, addr: addr.ok_or_else(|| wrong("no address"))? })
    }
}

/// A node's key as 32 bytes.
pub(crate) mod peer_key {
    use super::*;

    pub(crate) fn encode<C, W: Write>(
        peer: &PeerId,
        encoder: &mut Encoder<W>,
        _: &mut C,
    ) -> Result<(), EncodeError<W::Error>> {
        encoder.bytes(&peer.0)?.ok()
    }

    pub(crate) fn decode<C>(
        decoder: &mut Decoder<'_>,
        _: &mut C,
    ) -> Result<PeerId, minicbor::decode::Error> {
        let key = <[u8; 32]>::try_from(decoder.bytes()?);
        key.map(PeerId).map_err(|_| minicbor::decode::Error::message("a key has 32 bytes"))
    }
}

/// Nodes' keys in ascending order, at most as many as a pool has members.
pub(crate) mod peer_keys {
    use super::*;

    pub(crate) fn encode<C, W: Write>(
        peers: &BTreeSet<PeerId>,
        encoder: &mut Encoder<W>,
        context: &mut C,
    ) -> Result<(), EncodeError<W::Error>> {
        encoder.array(peers.len() as u64)?;
        peers.iter().try_for_each(|peer| peer_key::encode(peer, encoder, context))
    }

    pub(crate) fn decode<C>(
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
    use super::*;
    use crate::messages::{decode, encode};

    fn peer(number: u8) -> Peer {
        Peer { id: PeerId([number; 32]), addr: ([10, 0, 0, number], 4711).into() }
    }

    #[test]
    fn a_list_reads_back_and_a_damaged_one_is_none() {
        let members = PoolMembers::new(vec![peer(1), peer(2), peer(255)]).unwrap();
        let bytes = encode(&members);
        assert_eq!(decode(&bytes), Some(members.clone()));
        for len in 0..bytes.len() {
            assert_eq!(decode::<PoolMembers>(&bytes[..len]), None, "{len}");
        }
        assert_eq!(PoolMembers::new(Vec::new()), None);
        assert_eq!(PoolMembers::new(vec![peer(1), peer(2), peer(1)]), None, "one is named twice");
        assert_eq!(PoolMembers::new((0..17).map(peer).collect()), None);
        assert_eq!(decode::<PoolMembers>(&[0x9a, 0xff, 0xff, 0xff, 0xff]), None);
    }

    #[test]
    fn members_come_and_go_and_change_their_addresses() {
        let two = PoolMembers::new(vec![peer(1), peer(2)]).unwrap();
        let moved = Peer { addr: ([10, 0, 0, 9], 1).into(), ..peer(1) };
        assert_eq!(two.with(peer(3)).unwrap().peers(), [peer(1), peer(2), peer(3)]);
        assert_eq!(two.with(moved).unwrap().peers(), [moved, peer(2)]);
        assert_eq!(two.without(peer(1).id).unwrap().founder(), peer(2));
        assert_eq!(two.without(peer(1).id).unwrap().without(peer(2).id), None);
        let full = PoolMembers::new((0..16).map(peer).collect()).unwrap();
        assert_eq!(full.with(peer(16)), None);
    }
}
