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
//! at least 2
//! level 2
//! group 1 open
//! KEY ADDRESS
//! group 2
//! KEY ADDRESS
//! to go KEY
//! ```
//!
//! The second and third line are there only where somebody has said so: how many members a group needs to take changes, and down to which level
//! directories are distributed that are made from then on.

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
/// The deepest distribution level.
const MAX_LEVEL: u8 = 16;
const AT_LEAST: &str = "at least ";
const LEVEL: &str = "level ";
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

/// What a roster says of the files of all groups.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RosterRules {
    /// A group with fewer members that have everything refuses changes.
    pub min_copies: u8,
    /// Directories down to this level are distributed; none for the one with which the pool was made.
    pub level: Option<u8>,
}

impl Default for RosterRules {
    fn default() -> RosterRules {
        RosterRules { min_copies: 1, level: None }
    }
}

/// See the module.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PoolRoster {
    copies: u8,
    rules: RosterRules,
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
    /// A group with fewer members that have everything refuses changes from now on.
    #[n(5)]
    MinCopies(#[n(0)] u8),
    /// Down to which level directories are distributed that are made from now on.
    #[n(6)]
    Level(#[n(0)] u8),
}

impl Default for PoolRoster {
    fn default() -> PoolRoster {
        let (groups, to_go) = (BTreeMap::new(), BTreeSet::new());
        PoolRoster { copies: USUAL_COPIES, rules: RosterRules::default(), groups, to_go }
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

    /// What it says of the files of all groups.
    pub fn rules(&self) -> RosterRules {
        self.rules
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
                if *copies < self.rules.min_copies {
                    return Err("there are to be at least as many copies as changes need");
                }
                next.copies = *copies;
            }
            RosterEdit::MinCopies(least) => {
                if !(1..=self.copies).contains(least) {
                    return Err("changes need 1 copy at least, and no more than files are to have");
                }
                next.rules.min_copies = *least;
            }
            RosterEdit::Level(level) => {
                if *level > MAX_LEVEL {
                    return Err("a distribution level is at most 16");
                }
                next.rules.level = Some(*level);
            }
        }
        Ok(next)
    }

    /// The lines of its text.
    pub(crate) fn to_text(&self) -> String {
        let key = |id: &PeerId| HEXLOWER.encode(&id.0);
        let mut text = format!("copies {}\n", self.copies);
        if self.rules.min_copies > 1 {
            text.push_str(&format!("{AT_LEAST}{}\n", self.rules.min_copies));
        }
        if let Some(level) = self.rules.level {
            text.push_str(&format!("{LEVEL}{level}\n"));
        }
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
        if let Some(line) = lines.next_if(|line| line.starts_with(AT_LEAST)) {
            roster.rules.min_copies = line.strip_prefix(AT_LEAST)?.parse().ok()?;
        }
        if let Some(line) = lines.next_if(|line| line.starts_with(LEVEL)) {
            roster.rules.level = Some(line.strip_prefix(LEVEL)?.parse().ok()?);
        }
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
            && (1..=self.copies).contains(&self.rules.min_copies)
            && self.rules.level.is_none_or(|level| level <= MAX_LEVEL)
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

/// An array: copies, groups as pairs, machines that are to go; where somebody has set one of them also the least number of copies, and the level.
impl<C> Encode<C> for PoolRoster {
    fn encode<W: Write>(
        &self,
        encoder: &mut Encoder<W>,
        context: &mut C,
    ) -> Result<(), EncodeError<W::Error>> {
        let has_rules = self.rules != RosterRules::default();
        encoder
            .array(if has_rules { 5 } else { 3 })?
            .u8(self.copies)?
            .array(self.groups.len() as u64)?;
        for (number, group) in &self.groups {
            encoder.array(2)?.u8(number.number())?.encode_with(group, context)?;
        }
        peer_keys::encode(&self.to_go, encoder, context)?;
        if has_rules {
            encoder.u8(self.rules.min_copies)?.encode_with(self.rules.level, context)?;
        }
        Ok(())
    }
}

impl<'b, C> Decode<'b, C> for PoolRoster {
    fn decode(decoder: &mut Decoder<'b>, context: &mut C) -> Result<Self, minicbor::decode::Error> {
        let wrong = minicbor::decode::Error::message;
        let has_rules = match decoder.array()? {
            Some(3) => false,
            Some(5) => true,
            _ => return Err(wrong("a roster has three parts, or five")),
        };
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
        let rules = match has_rules {
            true => {
                let min_copies = decoder.u8()?;
                RosterRules { min_copies, level: decoder.decode_with(context)? }
            }
            false => RosterRules::default(),
        };
        let roster = PoolRoster { copies, rules, groups, to_go };
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
        rules: RosterRules { min_copies: MAX_COPIES, level: Some(MAX_LEVEL) },
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
        for copies in [0, 4, 6] {
            assert!(full.with(&RosterEdit::Copies(copies)).is_err());
        }
        let fewer = [RosterEdit::MinCopies(2), RosterEdit::Copies(2), RosterEdit::Level(0)];
        assert_eq!(with(&full, &fewer).rules(), RosterRules { min_copies: 2, level: Some(0) });
        for edit in [RosterEdit::MinCopies(0), RosterEdit::MinCopies(6), RosterEdit::Level(17)] {
            assert!(full.with(&edit).is_err());
        }
        let nine = PoolMembers::new((1..10).map(peer).collect()).unwrap();
        assert_eq!(RosterGroup::new(&nine, true).members.peers().len(), 8);
        let hostile = RosterGroup { members: nine, is_open: true };
        assert!(full.with(&RosterEdit::Set(number(1), hostile)).is_err());
    }

    /// The array of earlier builds, and their text.
    #[test]
    fn a_roster_without_rules_has_the_usual_ones() {
        let before = [0x83, 0x02, 0x80, 0x80];
        let expected = with(&PoolRoster::default(), &[RosterEdit::Copies(2)]);
        assert_eq!(decode::<PoolRoster>(&before), Some(expected.clone()));
        assert_eq!(encode(&expected)[..], before);
        assert_eq!(expected.to_text(), "copies 2\n");
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
            "copies 3\nat least 4",
            "copies 3\nat least 0",
            "copies 3\nlevel 17",
            "copies 3\nlevel 2\nat least 2",
        ] {
            assert_eq!(PoolRoster::from_lines(text.lines()), None, "{text}");
        }
    }
}
