//! What the primary of a group wants to be changed about who its members are. Plain functions: they are asked again and again, and want one
//! thing at a time.
//!
//! - A group has as many members as files are to have copies, of machines that are not to go. A machine that has been silent for
//!   [`crate::group::DEAD_AFTER`] does not count.
//! - Who comes is the machine with the fewest groups.
//! - A machine that is to go goes when the others have all copies, or all that can be. The last one that has everything stays.
//! - Nodes without files are listed in the maps of all groups as in that of the first one. They are no machines that could get files.
//! - Members that are too many go when all copies are there: first those with the most groups, and none from its *home*. That is one of its
//!   groups by a fixed order, so two primaries that decide at once never both take a machine's last groups from it.
//!
//! **Not known:** how much room a machine has; whether one that comes is there.

use std::collections::{BTreeMap, BTreeSet};

use atoll_key::PeerId;
use atoll_net::Peer;

use crate::layout::GroupNumber;
use crate::pool_map::PoolMap;
use crate::roster::{MAX_HINTS, RosterGroup};
use crate::witnesses::Witness;

/// What a primary knows of its group.
pub(super) struct GroupStand {
    pub(super) group: GroupNumber,
    pub(super) map: PoolMap,
    /// Members that have been silent for [`crate::group::DEAD_AFTER`].
    pub(super) dead: BTreeSet<PeerId>,
    /// Machines that were to go, and have been in no group for [`super::GONE_AFTER`].
    pub(super) gone: BTreeSet<PeerId>,
}

/// What is to be changed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Wanted {
    /// Another member of the group.
    Enrol(Peer),
    /// One less.
    Remove(PeerId),
    /// The group's map is to list this node without files, as the first group's does.
    Witness(Witness),
    /// The roster is to say this of the group.
    Report(RosterGroup),
    /// A machine has gone: it is forgotten that it was to.
    Gone(PeerId),
}

/// A machine of a pool, and in how many groups it is.
struct Machine {
    peer: Peer,
    groups: usize,
}

/// All machines of a pool, by the map of its first group.
fn machines(first: &PoolMap) -> BTreeMap<PeerId, Machine> {
    let mut machines: BTreeMap<PeerId, Machine> = BTreeMap::new();
    let others = first.roster.groups().values().map(|group| &group.members);
    for peer in others.chain([&first.enrolled]).flat_map(|members| members.peers()) {
        // The first group's own list is the newest.
        let machine = machines.entry(peer.id).or_insert(Machine { peer: *peer, groups: 0 });
        machine.peer = *peer;
        machine.groups += 1;
    }
    machines
}

/// How a machine's groups are ordered, and groups' machines.
fn rank(id: PeerId, group: GroupNumber) -> [u8; 32] {
    *blake3::hash(&[&id.0[..], &[group.number()]].concat()).as_bytes()
}

/// The group that a machine does not lose because it has too many members.
fn home(first: &PoolMap, id: PeerId) -> Option<GroupNumber> {
    let others = first.roster.groups().iter().map(|(number, group)| (*number, &group.members));
    let all = others.chain([(GroupNumber::FIRST, &first.enrolled)]);
    let own = all.filter(|(_, members)| members.contains(id));
    own.map(|(number, _)| number).max_by_key(|number| rank(id, *number))
}

/// In how many groups a pool with these machines is to be: one more for each machine beyond those of the first.
pub(super) fn groups_wanted(machines: usize, copies: usize) -> usize {
    machines.saturating_sub(copies) + 1
}

/// The machines of a pool that stay.
pub(super) fn staying(first: &PoolMap) -> BTreeSet<PeerId> {
    machines(first).into_keys().filter(|id| !first.roster.to_go().contains(id)).collect()
}

/// Whether a node is a machine of the pool.
pub(super) fn is_machine(first: &PoolMap, id: PeerId) -> bool {
    machines(first).contains_key(&id)
}

/// Whether a node belongs to the pool, with files or without.
pub(super) fn belongs(first: &PoolMap, id: PeerId) -> bool {
    is_machine(first, id) || first.witnesses.contains(id)
}

/// What the map of a group beside the first one is to say of nodes without files.
fn wanted_without_files(first: &PoolMap, map: &PoolMap) -> Option<Wanted> {
    // Those that are to go come first: the list may be full.
    let is_gone = |one: &&Witness| !first.witnesses.contains(one.peer.id);
    if let Some(one) = map.witnesses.all().iter().find(is_gone) {
        return Some(Wanted::Remove(one.peer.id));
    }
    let is_other = |one: &&Witness| {
        map.witnesses.get(one.peer.id) != Some(**one) && !map.enrolled.contains(one.peer.id)
    };
    first.witnesses.all().iter().find(is_other).map(|one| Wanted::Witness(*one))
}

/// The next thing that the primary of a group wants; `first` is the newest map of the first group that it knows.
pub(super) fn wanted(first: &PoolMap, stand: &GroupStand) -> Option<Wanted> {
    let GroupStand { group, map, dead, gone } = stand;
    let roster = &first.roster;
    let machines = machines(first);
    let stays = |id: &PeerId| !roster.to_go().contains(id) && !dead.contains(id);
    let all_stay = machines.keys().filter(|id| stays(id)).count();
    let complete = map.members.iter().filter(|id| stays(id)).count();
    let is_full = complete >= roster.copies().min(all_stay).max(1);
    if *group == GroupNumber::FIRST {
        if let Some(id) = roster.to_go().iter().find(|id| gone.contains(id)) {
            return Some(Wanted::Gone(*id));
        }
    } else {
        let known = roster.groups().get(group)?;
        let own = RosterGroup::new(&map.enrolled, known.is_open || is_full);
        if *known != own {
            return Some(Wanted::Report(own));
        }
        if let Some(wanted) = wanted_without_files(first, map) {
            return Some(wanted);
        }
    }
    let enrolled = || map.enrolled.peers().iter();
    let staying = enrolled().filter(|peer| stays(&peer.id)).count();
    if staying < roster.copies() && map.enrolled.peers().len() < MAX_HINTS {
        let fits =
            |machine: &&Machine| stays(&machine.peer.id) && !map.enrolled.contains(machine.peer.id);
        // Of equals it is another one for each group.
        let place = |machine: &&Machine| (machine.groups, rank(machine.peer.id, *group));
        if let Some(next) = machines.values().filter(fits).min_by_key(place) {
            return Some(Wanted::Enrol(next.peer));
        }
    }
    if !is_full {
        return None;
    }
    if let Some(to_go) = enrolled().find(|peer| roster.to_go().contains(&peer.id)) {
        return Some(Wanted::Remove(to_go.id));
    }
    let groups_of = |id: PeerId| machines.get(&id).map_or(0, |machine| machine.groups);
    let is_surplus = |peer: &&Peer| peer.id != map.primary && home(first, peer.id) != Some(*group);
    let surplus = enrolled().filter(is_surplus);
    let is_more = map.enrolled.peers().len() > roster.copies()
        && map.members.len() == map.enrolled.peers().len();
    let next = surplus.filter(|_| is_more).max_by_key(|peer| groups_of(peer.id))?;
    Some(Wanted::Remove(next.id))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::members::PoolMembers;
    use crate::roster::{PoolRoster, RosterEdit};

    fn peer(number: u8) -> Peer {
        Peer { id: PeerId([number; 32]), addr: ([10, 0, 0, number], 4711).into() }
    }

    fn members(numbers: &[u8]) -> PoolMembers {
        PoolMembers::new(numbers.iter().map(|number| peer(*number)).collect()).unwrap()
    }

    /// A map that enrols these members, of which so many of the first have everything.
    fn map(numbers: &[u8], complete: usize) -> PoolMap {
        let mut map = PoolMap::first(&members(numbers));
        map.members = numbers[..complete].iter().map(|number| peer(*number).id).collect();
        map
    }

    fn roster(edits: &[RosterEdit]) -> PoolRoster {
        let begin = PoolRoster::default();
        edits.iter().fold(begin, |roster, edit| roster.with(edit).expect("it is made"))
    }

    fn one() -> GroupNumber {
        GroupNumber::new(1).unwrap()
    }

    fn set(numbers: &[u8], is_open: bool) -> RosterEdit {
        RosterEdit::Set(one(), RosterGroup::new(&members(numbers), is_open))
    }

    fn wants(group: GroupNumber, first: &PoolMap, map: &PoolMap, dead: &[u8]) -> Option<Wanted> {
        let dead = dead.iter().map(|number| peer(*number).id).collect();
        let gone = first.roster.to_go().iter().filter(|id| !is_machine(first, **id)).copied();
        wanted(first, &GroupStand { group, map: map.clone(), dead, gone: gone.collect() })
    }

    #[test]
    fn a_new_group_gets_the_machines_with_the_fewest_groups_and_is_open_when_it_has_all_copies() {
        let begun = [RosterEdit::Begin(peer(4)), RosterEdit::Begin(peer(5))];
        let first = PoolMap { roster: roster(&begun), ..map(&[1, 2, 3], 3) };
        let own = map(&[4], 1);
        // All others are in one group; hashes decide.
        let next = wants(one(), &first, &own, &[]);
        assert!(matches!(next, Some(Wanted::Enrol(peer)) if peer.id != own.primary), "{next:?}");
        let own = map(&[4, 5, 1], 2);
        let said = RosterGroup::new(&members(&[4, 5, 1]), false);
        assert_eq!(wants(one(), &first, &own, &[]), Some(Wanted::Report(said)));
        let own = map(&[4, 5, 1], 3);
        let said = RosterGroup::new(&members(&[4, 5, 1]), true);
        assert_eq!(wants(one(), &first, &own, &[]), Some(Wanted::Report(said)));
        let roster = roster(&[begun[0].clone(), begun[1].clone(), set(&[4, 5, 1], true)]);
        let first = PoolMap { roster, ..first };
        assert_eq!(wants(one(), &first, &own, &[]), None);
        assert_eq!(wants(GroupNumber::FIRST, &first, &first, &[]), None);
        // Now 1, 4 and 5 are in two groups, or in the one that 5 has begun.
        let two = GroupNumber::new(2).unwrap();
        let next = wants(two, &first, &map(&[5], 1), &[]);
        let fewest = [peer(2), peer(3), peer(4)];
        assert!(matches!(next, Some(Wanted::Enrol(next)) if fewest.contains(&next)));
    }

    #[test]
    fn nodes_without_files_are_listed_by_all_groups_and_get_no_files() {
        let witness = |incarnation| Witness { peer: peer(9), incarnation };
        let listed =
            |incarnation| crate::witnesses::PoolWitnesses::new(vec![witness(incarnation)]).unwrap();
        let begun = [RosterEdit::Begin(peer(4)), set(&[4], false)];
        let first = PoolMap { roster: roster(&begun), witnesses: listed(1), ..map(&[1, 2], 2) };
        let own = PoolMap { witnesses: listed(1), ..map(&[4], 1) };
        assert_eq!(wants(one(), &first, &map(&[4], 1), &[]), Some(Wanted::Witness(witness(1))));
        let before = PoolMap { witnesses: listed(7), ..own.clone() };
        assert_eq!(wants(one(), &first, &before, &[]), Some(Wanted::Witness(witness(1))));
        let without = PoolMap { witnesses: Default::default(), ..first.clone() };
        assert_eq!(wants(one(), &without, &own, &[]), Some(Wanted::Remove(peer(9).id)));
        for (group, map) in [(GroupNumber::FIRST, &first), (one(), &own)] {
            let next = wants(group, &first, map, &[]);
            assert!(matches!(next, Some(Wanted::Enrol(next)) if next != peer(9)), "{next:?}");
        }
        assert!(belongs(&first, peer(9).id) && !is_machine(&first, peer(9).id));
        let alone = PoolMap { witnesses: listed(1), ..map(&[1, 2], 2) };
        assert_eq!(wants(GroupNumber::FIRST, &alone, &alone, &[]), None, "it lacks a copy");
    }

    #[test]
    fn a_pool_of_fewer_machines_than_copies_wants_nothing() {
        for count in 1..=3 {
            let first = map(&[1, 2, 3][..count], count);
            assert_eq!(wants(GroupNumber::FIRST, &first, &first, &[]), None);
        }
        let two = PoolMap { roster: roster(&[RosterEdit::Copies(1)]), ..map(&[1, 2], 2) };
        assert_eq!(wants(GroupNumber::FIRST, &two, &two, &[]), None, "its only group");
    }

    #[test]
    fn a_machine_that_is_to_go_is_replaced_before_it_goes_and_forgotten_afterwards() {
        let to_go = RosterEdit::ToGo(peer(1).id, true);
        let roster = roster(&[RosterEdit::Begin(peer(4)), set(&[4, 2, 3], true), to_go]);
        let first = PoolMap { roster, ..map(&[1, 2, 3], 3) };
        let next = wants(GroupNumber::FIRST, &first, &first, &[]);
        assert_eq!(next, Some(Wanted::Enrol(peer(4))));
        let copied =
            |complete| PoolMap { roster: first.roster.clone(), ..map(&[1, 2, 3, 4], complete) };
        let waits = copied(3);
        assert_eq!(wants(GroupNumber::FIRST, &waits, &waits, &[]), None, "4 lacks something");
        let whole = copied(4);
        let next = wants(GroupNumber::FIRST, &whole, &whole, &[]);
        assert_eq!(next, Some(Wanted::Remove(peer(1).id)));
        let gone = PoolMap { roster: first.roster.clone(), ..map(&[2, 3, 4], 3) };
        let next = wants(GroupNumber::FIRST, &gone, &gone, &[]);
        assert_eq!(next, Some(Wanted::Gone(peer(1).id)));
    }

    #[test]
    fn the_last_machines_go_without_being_replaced_but_for_the_last_one() {
        let to_go = RosterEdit::ToGo(peer(1).id, true);
        let pair = PoolMap { roster: roster(std::slice::from_ref(&to_go)), ..map(&[1, 2], 2) };
        let next = wants(GroupNumber::FIRST, &pair, &pair, &[]);
        assert_eq!(next, Some(Wanted::Remove(peer(1).id)));
        let lacks = PoolMap { roster: roster(std::slice::from_ref(&to_go)), ..map(&[1, 2], 1) };
        assert_eq!(wants(GroupNumber::FIRST, &lacks, &lacks, &[]), None, "it alone has everything");
        let alone = PoolMap { roster: roster(&[to_go]), ..map(&[1], 1) };
        assert_eq!(wants(GroupNumber::FIRST, &alone, &alone, &[]), None);
    }

    #[test]
    fn a_dead_machine_is_replaced_and_one_too_many_goes_when_it_is_back() {
        let begun = [RosterEdit::Begin(peer(4)), set(&[4, 1, 2], true)];
        let first = PoolMap { roster: roster(&begun), ..map(&[1, 2, 3], 2) };
        let next = wants(GroupNumber::FIRST, &first, &first, &[3]);
        assert_eq!(next, Some(Wanted::Enrol(peer(4))));
        let with_four =
            |complete| PoolMap { roster: first.roster.clone(), ..map(&[1, 2, 4, 3], complete) };
        let dead = with_four(3);
        assert_eq!(wants(GroupNumber::FIRST, &dead, &dead, &[3]), None, "it may come back");
        let back = with_four(4);
        let next = wants(GroupNumber::FIRST, &back, &back, &[]);
        // 3 has no other group, and 1 is the primary.
        let may_go = |id: &PeerId| *id != peer(3).id && *id != peer(1).id;
        assert!(next.is_none_or(|next| matches!(next, Wanted::Remove(id) if may_go(&id))));
    }

    #[test]
    fn two_primaries_never_both_take_a_machine_away_that_has_no_other_group() {
        for number in 1..100 {
            // Each has one more member than copies.
            let members_of = [number, 200, 201, 202];
            let begun = [RosterEdit::Begin(peer(number)), set(&members_of, true)];
            let first = PoolMap { roster: roster(&begun), ..map(&[203, number, 204, 205], 4) };
            let removes = |group, own: &PoolMap| {
                let next = wants(group, &first, own, &[]);
                usize::from(next == Some(Wanted::Remove(peer(number).id)))
            };
            let mut own = map(&members_of, 4);
            own.primary = peer(200).id;
            let both = removes(GroupNumber::FIRST, &first) + removes(one(), &own);
            assert_eq!(both, 1, "{number}");
        }
    }

    #[test]
    fn fewer_copies_take_members_away_and_more_bring_them() {
        let begun = [RosterEdit::Begin(peer(4)), set(&[4, 1, 2], true)];
        let with = |copies| {
            let edits = [&begun[..], &[RosterEdit::Copies(copies)]].concat();
            PoolMap { roster: roster(&edits), ..map(&[1, 2, 3], 3) }
        };
        let first = with(4);
        assert_eq!(wants(GroupNumber::FIRST, &first, &first, &[]), Some(Wanted::Enrol(peer(4))));
        let (first, own) = (with(2), map(&[4, 1, 2], 3));
        let fewer = [(GroupNumber::FIRST, &first), (one(), &own)];
        let gone = fewer.map(|(group, own)| wants(group, &first, own, &[])).into_iter().flatten();
        let gone: Vec<Wanted> = gone.collect();
        assert!(!gone.is_empty());
        let of_both = [Wanted::Remove(peer(1).id), Wanted::Remove(peer(2).id)];
        assert!(gone.iter().all(|gone| of_both.contains(gone)), "{gone:?}");
    }
}
