//! Nodes that belong to a pool and have no files of it. Plain data, part of a group's map ([`crate::pool_map`]).
//!
//! A node that joins without a directory is listed here. It may mount and serve the pool, as members may. Where the members alone
//! are too few voters, some of these nodes vote, too: they are the group's *witnesses*. Another one becomes a witness when it is needed. No group
//! ever gives one of them files.
//!
//! Each keeps its votes in its own directory, and draws random bits when it makes that: its **incarnation**. If the directory is gone, or was set back
//! to an older state, the node may have forgotten whom it gave its vote. Then it draws others, and is listed anew, as a node that has never
//! voted ([`crate::map`]).
//!
//! On disk they are lines of the map's text, after its members. `votes` stands behind those that vote:
//!
//! ```text
//! witness KEY ADDRESS 0123456789abcdef votes
//! ```

use std::sync::Arc;

use atoll_key::PeerId;
use atoll_net::Peer;
use data_encoding::HEXLOWER;
use minicbor::encode::{Error as EncodeError, Write};
use minicbor::{Decode, Decoder, Encode, Encoder};

/// How a line of the text begins.
pub(crate) const LINE: &str = "witness ";

/// A node without files.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Witness {
    /// Which, and where it listens.
    #[cbor(n(0), with = "crate::members::peer")]
    pub peer: Peer,
    /// Random bits, others whenever its directory is made.
    #[n(1)]
    pub incarnation: u64,
}

impl Witness {
    /// Its line, without the end.
    pub(crate) fn to_line(self) -> String {
        let Witness { peer: Peer { id, addr }, incarnation } = self;
        format!("{LINE}{} {addr} {incarnation:016x}", HEXLOWER.encode(&id.0))
    }

    /// The node of a line, and the word behind it.
    pub(crate) fn from_line(line: &str) -> Option<(Witness, Option<&str>)> {
        let mut words = line.strip_prefix(LINE)?.split(' ');
        let id = HEXLOWER.decode(words.next()?.as_bytes()).ok()?.try_into().ok().map(PeerId)?;
        let addr = words.next()?.parse().ok()?;
        let incarnation = words.next().filter(|text| text.len() == 16)?;
        let incarnation = u64::from_str_radix(incarnation, 16).ok()?;
        let word = words.next();
        let witness = Witness { peer: Peer { id, addr }, incarnation };
        words.next().is_none().then_some((witness, word))
    }
}

/// The nodes of a group without files, in the order in which they joined.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct PoolWitnesses {
    /// Shared: a map is small where there are none, and is often copied.
    all: Arc<Vec<Witness>>,
}

impl PoolWitnesses {
    /// The most of them.
    pub const MAX: usize = 16;

    /// These; none if there are more than [`PoolWitnesses::MAX`], or one is named twice.
    pub fn new(all: Vec<Witness>) -> Option<PoolWitnesses> {
        let is_twice = |(at, witness): (usize, &Witness)| {
            all[..at].iter().any(|other| other.peer.id == witness.peer.id)
        };
        let is_sound = all.len() <= PoolWitnesses::MAX && !all.iter().enumerate().any(is_twice);
        is_sound.then(|| PoolWitnesses { all: Arc::new(all) })
    }

    /// All of them.
    pub fn all(&self) -> &[Witness] {
        &self.all
    }

    /// The one with this key.
    pub fn get(&self, id: PeerId) -> Option<Witness> {
        self.all.iter().find(|witness| witness.peer.id == id).copied()
    }

    /// Whether a node is one of them.
    pub fn contains(&self, id: PeerId) -> bool {
        self.get(id).is_some()
    }

    /// Whether a node is one of them in this incarnation.
    pub fn contains_incarnation(&self, witness: Witness) -> bool {
        self.get(witness.peer.id).is_some_and(|known| known.incarnation == witness.incarnation)
    }

    /// These and another one, or that one in another incarnation or at another address; none if there are too many.
    pub(crate) fn with(&self, witness: Witness) -> Option<PoolWitnesses> {
        let mut all = self.all.to_vec();
        match all.iter_mut().find(|other| other.peer.id == witness.peer.id) {
            Some(known) => *known = witness,
            None => all.push(witness),
        }
        PoolWitnesses::new(all)
    }

    /// These without one.
    pub(crate) fn without(&self, id: PeerId) -> PoolWitnesses {
        let others = self.all.iter().filter(|witness| witness.peer.id != id);
        PoolWitnesses { all: Arc::new(others.copied().collect()) }
    }
}

/// An array of them.
impl<C> Encode<C> for PoolWitnesses {
    fn encode<W: Write>(
        &self,
        encoder: &mut Encoder<W>,
        context: &mut C,
    ) -> Result<(), EncodeError<W::Error>> {
        encoder.array(self.all.len() as u64)?;
        self.all.iter().try_for_each(|witness| witness.encode(encoder, context))
    }
}

impl<'b, C> Decode<'b, C> for PoolWitnesses {
    fn decode(decoder: &mut Decoder<'b>, context: &mut C) -> Result<Self, minicbor::decode::Error> {
        let wrong = minicbor::decode::Error::message;
        let count = decoder.array()?.ok_or_else(|| wrong("a list of nodes says its length"))?;
        if count > PoolWitnesses::MAX as u64 {
            return Err(wrong("more nodes without files than a pool has"));
        }
        let all = (0..count).map(|_| decoder.decode_with(context)).collect::<Result<_, _>>()?;
        PoolWitnesses::new(all).ok_or_else(|| wrong("a node is named twice"))
    }
}

/// As many as there can be.
#[cfg(test)]
pub(crate) fn most() -> PoolWitnesses {
    let peer = |n: u8| Peer { id: PeerId([n; 32]), addr: ([10, 1, 0, n], 4711).into() };
    let all = (200..200 + PoolWitnesses::MAX as u8)
        .map(|n| Witness { peer: peer(n), incarnation: u64::MAX - u64::from(n) });
    PoolWitnesses::new(all.collect()).expect("a list of them")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::{decode, encode};

    #[test]
    fn lists_and_lines_read_back_and_damaged_ones_are_none() {
        let list = most();
        let bytes = encode(&list);
        assert_eq!(decode(&bytes), Some(list.clone()));
        for len in 0..bytes.len() {
            assert_eq!(decode::<PoolWitnesses>(&bytes[..len]), None, "{len}");
        }
        assert_eq!(decode::<PoolWitnesses>(&[0x9a, 0xff, 0xff, 0xff, 0xff]), None);
        let one = list.all()[0];
        let line = one.to_line();
        assert_eq!(Witness::from_line(&line), Some((one, None)));
        assert_eq!(Witness::from_line(&format!("{line} votes")), Some((one, Some("votes"))));
        assert_eq!(Witness::from_line(&format!("{line} votes x")), None);
        for len in 0..line.len() {
            assert_eq!(Witness::from_line(&line[..len]), None, "{len}");
        }
    }

    #[test]
    fn one_comes_again_in_another_incarnation_and_goes() {
        let list = most();
        let one = list.all()[3];
        let again = Witness { incarnation: 7, ..one };
        let next = list.with(again).unwrap();
        assert_eq!(next.all().len(), list.all().len());
        assert!(next.contains_incarnation(again) && !next.contains_incarnation(one));
        assert!(!next.without(one.peer.id).contains(one.peer.id));
        let stranger = Witness { peer: Peer { id: PeerId([1; 32]), ..one.peer }, ..one };
        assert_eq!(list.with(stranger), None, "there are as many as there can be");
    }
}
