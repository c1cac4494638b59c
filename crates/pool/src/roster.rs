//! The *roster* of a pool: which groups it has beside the first one, and which machines are to go. Plain data, part of the first group's map
//! ([`crate::pool_map`]); only there it is not empty.
//!
//! A group's own map says who its members are. What the roster says of them is a **hint**, by which others find the group; its primary
//! corrects it. A group is **open** when it had all its copies once: from then on directories are made in it, and it is a part of the pool
//! for ever. One that is not open holds nothing.
//!
//! A machine that is **to go** is given no more copies; the primaries of its groups let others take its place ([`crate::machine`]).
//!
//! On disk it is text, after the members of a map:
//!
//! ```text
//! copies 3
//! group 1 open
//! KEY ADDRESS
//! group 2
//! KEY ADDRESS
//! to go KEY
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::iter::Peekable;

use atoll_key::PeerId;
use atoll_net::Peer;
use data_encoding::HEXLOWER;
use minicbor::encode::{Error as EncodeError, Write};
use minicbor::{Decode, Decoder, Encode, Encoder};

use crate::layout::GroupNumber;
use crate::members::{PoolMembers, peer_keys};

/// The most copies of a file, one on each member of its group.
pub const MAX_COPIES: u8 = 5;
/// How many copies a pool has unless somebody says otherwise. (The paper's K counts replicas beside the first one: 2.)
pub const USUAL_COPIES: u8 = 3;
/// The most groups beside the first one: so that a map fits into a message.
const MAX_GROUPS: usize = 15;
/// Of so many members of a group the roster knows at most; a group gets no more by itself.
pub(crate) const MAX_HINTS: usize = 8;

/// What the roster says of a group.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct RosterGroup {
    /// Its members, as far as its primary has said. The first one of a group that is not open makes it.
    #[n(0)]
    pub members: PoolMembers,
    /// Whether directories are made in it.
    #[n(1)]
    pub is_open: bool,
}

/// See the module.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PoolRoster {
    copies: u8,
    groups: BTreeMap<GroupNumber, RosterGroup>,
    to_go: BTreeSet<PeerId>,
}

/// A change of a roster.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub enum RosterEdit {
    /// A machine makes another group, unless it is a member of one. It is not to go.
    #[n(0)]
    Begin(#[cbor(n(0), with = "crate::members::peer")] Peer),
    /// What a group's primary says of its group.
    #[n(1)]
    Set(#[n(0)] GroupNumber, #[n(1)] RosterGroup),
    /// A group that was never open is given up.
    #[n(2)]
    Drop(#[n(0)] GroupNumber),
    /// Whether a machine is to go.
    #[n(3)]
    ToGo(#[cbor(n(0), with = "crate::members::peer_key")] PeerId, #[n(1)] bool),
    /// How many copies files have from now on.
    #[n(4)]
    Copies(#[n(0)] u8),
}

impl Default for PoolRoster {
    fn default() -> PoolRoster {
        PoolRoster { copies: USUAL_COPIES, groups: BTreeMap::new(), to_go: BTreeSet::new() }
    }
}

impl RosterGroup {
    /// What a roster keeps of a group with these members.
    pub fn new(members: &PoolMembers, is_open: bool) -> RosterGroup {
        let some = members.peers().iter().take(MAX_HINTS).copied().collect();
        RosterGroup { members: PoolMembers::new(some).expect("a part of a sound list"), is_open }
    }

    fn is_sound(&self) -> bool {
        self.members.peers().len() <= MAX_HINTS
    }
}

impl PoolRoster {
    /// On how many machines each file is to be.
    pub fn copies(&self) -> usize {
        usize::from(self.copies)
    }

    /// The groups beside the first one.
    pub fn groups(&self) -> &BTreeMap<GroupNumber, RosterGroup> {
        &self.groups
    }

    /// The machines that are to go.
    pub fn to_go(&self) -> &BTreeSet<PeerId> {
        &self.to_go
    }

    /// Whether a machine is a member of a group beside the first one, as far as the roster says.
    pub(crate) fn lists(&self, id: PeerId) -> bool {
        self.groups.values().any(|group| group.members.contains(id))
    }

    /// The roster after a change, also if that changes nothing.
    ///
    /// # Errors
    /// Why that change is not made, for people.
    pub fn with(&self, edit: &RosterEdit) -> Result<PoolRoster, &'static str> {
        let mut next = self.clone();
        match edit {
            RosterEdit::Begin(peer) => {
                next.to_go.remove(&peer.id);
                if !self.lists(peer.id) {
                    let free = (1..=MAX_GROUPS as u8)
                        .filter_map(GroupNumber::new)
                        .find(|number| !self.groups.contains_key(number));
                    let number = free.ok_or("the pool has as many groups as it can have")?;
                    let members = PoolMembers::new(vec![*peer]).expect("one is enough");
                    next.groups.insert(number, RosterGroup { members, is_open: false });
                }
            }
            RosterEdit::Set(number, group) => {
                let known = next.groups.get_mut(number).ok_or("the pool has no such group")?;
                if !group.is_sound() {
                    return Err("a roster knows no so many members of a group");
                }
                let is_open = known.is_open || group.is_open;
                *known = RosterGroup { is_open, ..group.clone() };
            }
            RosterEdit::Drop(number) => match self.groups.get(number) {
                Some(group) if group.is_open => return Err("that group is in use"),
                Some(_) | None => drop(next.groups.remove(number)),
            },
            RosterEdit::ToGo(id, true) => {
                next.to_go.insert(*id);
                if next.to_go.len() > PoolMembers::MAX {
                    return Err("too many machines are to go");
                }
            }
            RosterEdit::ToGo(id, false) => drop(next.to_go.remove(id)),
            RosterEdit::Copies(copies) => {
                if !(1..=MAX_COPIES).contains(copies) {
                    return Err("a pool has 1 to 5 copies");
                }
                next.copies = *copies;
            }
        }
        Ok(next)
    }

    /// The lines of its text.
    pub(crate) fn to_text(&self) -> String {
        let key = |id: &PeerId| HEXLOWER.encode(&id.0);
        let mut text = format!("copies {}\n", self.copies);
        for (number, RosterGroup { members, is_open }) in &self.groups {
            let open = if *is_open { " open" } else { "" };
            text.push_str(&format!("group {number}{open}\n"));
            for Peer { id, addr } in members.peers() {
                text.push_str(&format!("{} {addr}\n", key(id)));
            }
        }
        for id in &self.to_go {
            text.push_str(&format!("to go {}\n", key(id)));
        }
        text
    }

    /// The roster of these lines. A map that was written before there were rosters has none.
    pub(crate) fn from_lines<'t>(lines: impl Iterator<Item = &'t str>) -> Option<PoolRoster> {
        let mut lines = lines.peekable();
        let mut roster = PoolRoster::default();
        let Some(copies) = lines.next() else { return Some(roster) };
        roster.copies = copies.strip_prefix("copies ")?.parse().ok()?;
        while let Some(line) = lines.next() {
            if let Some(group) = line.strip_prefix("group ") {
                let (number, is_open) = match group.strip_suffix(" open") {
                    Some(number) => (number, true),
                    None => (group, false),
                };
                let number = GroupNumber::new(number.parse().ok()?)?;
                let members = PoolMembers::new(peers_of_lines(&mut lines)?)?;
                let is_new =
                    roster.groups.insert(number, RosterGroup { members, is_open }).is_none();
                is_new.then_some(())?;
            } else {
                let is_new = roster.to_go.insert(key_of(line.strip_prefix("to go ")?)?);
                is_new.then_some(())?;
            }
        }
        roster.is_sound().then_some(roster)
    }

    /// Whether it can be a roster at all.
    pub(crate) fn is_sound(&self) -> bool {
        (1..=MAX_COPIES).contains(&self.copies)
            && self.groups.len() <= MAX_GROUPS
            && self.to_go.len() <= PoolMembers::MAX
            && !self.groups.contains_key(&GroupNumber::FIRST)
            && self.groups.values().all(RosterGroup::is_sound)
    }
}

fn key_of(text: &str) -> Option<PeerId> {
    HEXLOWER.decode(text.as_bytes()).ok()?.try_into().ok().map(PeerId)
}

/// The nodes of the lines up to one that is none.
fn peers_of_lines<'t>(lines: &mut Peekable<impl Iterator<Item = &'t str>>) -> Option<Vec<Peer>> {
    let mut peers = Vec::new();
    let is_other = |line: &&str| line.starts_with("group ") || line.starts_with("to go ");
    while let Some(line) = lines.next_if(|line| !is_other(line)) {
        let (id, addr) = line.split_once(' ')?;
        peers.push(Peer { id: key_of(id)?, addr: addr.parse().ok()? });
        if peers.len() > MAX_HINTS {
            return None;
        }
    }
    Some(peers)
}

/// An array: copies, groups as pairs, machines that are to go.
impl<C> Encode<C> for PoolRoster {
    fn encode<W: Write>(
        &self,
        encoder: &mut Encoder<W>,
        context: &mut C,
    ) -> Result<(), EncodeError<W::Error>> {
        encoder.array(3)?.u8(self.copies)?.array(self.groups.len() as u64)?;
        for (number, group) in &self.groups {
            encoder.array(2)?.u8(number.number())?.encode_with(group, context)?;
        }
        peer_keys::encode(&self.to_go, encoder, context)
    }
}

impl<'b, C> Decode<'b, C> for PoolRoster {
    fn decode(decoder: &mut Decoder<'b>, context: &mut C) -> Result<Self, minicbor::decode::Error> {
        let wrong = minicbor::decode::Error::message;
        if decoder.array()? != Some(3) {
            return Err(wrong("a roster has three parts"));
        }
        let copies = decoder.u8()?;
        let count = decoder.array()?.ok_or_else(|| wrong("a list of groups says its length"))?;
        if count > MAX_GROUPS as u64 {
            return Err(wrong("more groups than a pool has"));
        }
        let mut groups = BTreeMap::new();
        for _ in 0..count {
            if decoder.array()? != Some(2) {
                return Err(wrong("a group is a number and what is known of it"));
            }
            let number: GroupNumber = decoder.decode_with(context)?;
            if groups.keys().next_back().is_some_and(|last| *last >= number) {
                return Err(wrong("groups are in ascending order"));
            }
            groups.insert(number, decoder.decode_with(context)?);
        }
        let to_go = peer_keys::decode(decoder, context)?;
        let roster = PoolRoster { copies, groups, to_go };
        roster.is_sound().then_some(roster).ok_or_else(|| wrong("no roster"))
    }
}

/// As large as one can be.
#[cfg(test)]
pub(crate) fn largest() -> PoolRoster {
    let peer =
        |number: u8| Peer { id: PeerId([number; 32]), addr: ([10, 0, 0, number], 4711).into() };
    let group = |number| {
        let members = (100..100 + MAX_HINTS as u8 - 1).map(peer);
        let members = PoolMembers::new([peer(number)].into_iter().chain(members).collect());
        RosterGroup { members: members.expect("a list of members"), is_open: true }
    };
    let groups = (1..=MAX_GROUPS as u8).filter_map(GroupNumber::new);
    PoolRoster {
        copies: MAX_COPIES,
        groups: groups.map(|number| (number, group(number.number()))).collect(),
        to_go: (0..PoolMembers::MAX as u8).map(|at| peer(at).id).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::{decode, encode};

    fn peer(number: u8) -> Peer {
        Peer { id: PeerId([number; 32]), addr: ([10, 0, 0, number], 4711).into() }
    }

    fn group(numbers: &[u8], is_open: bool) -> RosterGroup {
        let members = numbers.iter().map(|number| peer(*number)).collect();
        RosterGroup::new(&PoolMembers::new(members).unwrap(), is_open)
    }

    fn number(number: u8) -> GroupNumber {
        GroupNumber::new(number).unwrap()
    }

    fn with(roster: &PoolRoster, edits: &[RosterEdit]) -> PoolRoster {
        edits.iter().fold(roster.clone(), |roster, edit| roster.with(edit).unwrap())
    }

    #[test]
    fn groups_begin_with_one_machine_and_are_open_for_ever_once_they_were() {
        let roster = with(
            &PoolRoster::default(),
            &[RosterEdit::Begin(peer(4)), RosterEdit::Begin(peer(5)), RosterEdit::Begin(peer(4))],
        );
        assert_eq!(roster.copies(), 3);
        let expected = [(number(1), group(&[4], false)), (number(2), group(&[5], false))];
        assert_eq!(roster.groups(), &BTreeMap::from(expected), "nobody begins two");
        let set = |members: &[u8], is_open| RosterEdit::Set(number(1), group(members, is_open));
        let roster = with(&roster, &[set(&[4, 1, 2], true), set(&[1, 2], false)]);
        assert_eq!(roster.groups()[&number(1)], group(&[1, 2], true));
        assert!(roster.with(&RosterEdit::Drop(number(1))).is_err(), "it may hold files");
        let roster = with(&roster, &[RosterEdit::Drop(number(2)), RosterEdit::Drop(number(2))]);
        assert_eq!(roster.groups().len(), 1);
        assert!(roster.with(&RosterEdit::Set(number(2), group(&[5], true))).is_err());
        let roster = with(&roster, &[RosterEdit::ToGo(peer(5).id, true)]);
        assert!(roster.to_go().contains(&peer(5).id));
        let roster = with(&roster, &[RosterEdit::Begin(peer(5))]);
        assert_eq!(roster.groups()[&number(2)], group(&[5], false), "the lowest free number");
        assert!(roster.to_go().is_empty(), "it has come again");
    }

    #[test]
    fn a_roster_has_limits() {
        let full = largest();
        assert!(full.with(&RosterEdit::Begin(peer(200))).is_err());
        assert!(full.with(&RosterEdit::ToGo(peer(200).id, true)).is_err());
        for copies in [0, 6] {
            assert!(full.with(&RosterEdit::Copies(copies)).is_err());
        }
        let nine = PoolMembers::new((1..10).map(peer).collect()).unwrap();
        assert_eq!(RosterGroup::new(&nine, true).members.peers().len(), 8);
        let hostile = RosterGroup { members: nine, is_open: true };
        assert!(full.with(&RosterEdit::Set(number(1), hostile)).is_err());
    }

    #[test]
    fn rosters_read_back_and_damaged_ones_are_none() {
        let some = with(
            &PoolRoster::default(),
            &[RosterEdit::Begin(peer(4)), RosterEdit::ToGo(peer(1).id, true)],
        );
        for roster in [PoolRoster::default(), some, largest()] {
            let bytes = encode(&roster);
            assert_eq!(decode(&bytes), Some(roster.clone()));
            for len in 0..bytes.len() {
                assert_eq!(decode::<PoolRoster>(&bytes[..len]), None);
            }
            let text = roster.to_text();
            assert_eq!(PoolRoster::from_lines(text.lines()), Some(roster));
        }
        assert_eq!(PoolRoster::from_lines("".lines()), Some(PoolRoster::default()));
        for text in [
            "copies 0",
            "copies 6",
            "copies",
            "group 1",
            "copies 3\ngroup 0\n",
            "copies 3\ngroup 1",
            "copies 3\ngroup 99 open",
            "copies 3\nto go 00",
            "copies 3\nelse",
        ] {
            assert_eq!(PoolRoster::from_lines(text.lines()), None, "{text}");
        }
    }
}
