//! Which group a new directory is made in, as a plain function (Kosha §3.1, §3.3).
//!
//! A directory that is to be spread goes to a group by *weighted rendezvous hashing* (the logarithmic method of Schindelhauer and
//! Schomaker, "Weighted distributed hash tables", SPAA 2005): each group draws a number from the directory's hash, and the first in the
//! order of `-log(draw) / size` has the directory. A group of twice the size so gets twice as many, and one that comes or grows takes
//! its share from all others.
//!
//! *Redirection*: a group that is nearly full is passed over for the next in that order, at any depth. The paper hashes the name again with a
//! salt until a node has room; the order is the same idea without a number of attempts that can run out.
//!
//! All numbers are integers, so that every machine that knows the same sizes finds the same group. A directory's number says where it was made:
//! the function is not asked again when sizes change, and two machines that know different sizes are both right.

use crate::layout::GroupNumber;

/// The room that a group has, in bytes: that of the member with the least, as every member has all files.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GroupRoom {
    /// Which group.
    pub group: GroupNumber,
    /// The size of its disk; 0 if it is not known.
    pub size: u64,
    /// How much of that is free.
    pub free: u64,
}

/// Of a group's size, one part in so many stays free of new directories: what grows in those that it has needs it. As much as ext4 keeps for root,
/// since disks that are fuller become slow. The paper names no share (§3.3: "the pre-specified utilization").
const KEPT_SHARE: u64 = 20;

/// And so many bytes: twice what a member keeps of its disk for its index, within which calls that take room begin to be refused.
const MIN_KEPT_BYTES: u64 = 64 << 20;

/// Bits behind the point of a logarithm.
const FRACTION_BITS: u32 = 48;

impl GroupRoom {
    /// Of a group that has not said what room it has: it counts as one of average size, with room.
    pub fn unknown(group: GroupNumber) -> GroupRoom {
        GroupRoom { group, size: 0, free: 0 }
    }

    pub(crate) fn is_known(&self) -> bool {
        self.size > 0
    }

    /// Whether new directories go elsewhere.
    fn is_full(&self) -> bool {
        self.is_known() && self.free < (self.size / KEPT_SHARE).max(MIN_KEPT_BYTES)
    }
}

/// In which group a directory is made that a directory of group `own` is to hold; `groups` has each group once. One that is to be *spread* goes by the hash
/// `seed`, another one stays; both go elsewhere when that group is full, and to the group with the most free room when all are.
pub fn group_for(
    groups: &[GroupRoom],
    own: GroupNumber,
    is_spread: bool,
    seed: u64,
) -> GroupNumber {
    let is_full = |group| groups.iter().any(|room| room.group == group && room.is_full());
    if !is_spread && !is_full(own) {
        return own;
    }
    let average = average_size(groups);
    let with_room = groups.iter().filter(|room| !room.is_full());
    let first = with_room.min_by(|one, other| {
        let (one_size, other_size) = (one.size_or(average), other.size_or(average));
        let (one_draw, other_draw) = (draw(seed, one.group), draw(seed, other.group));
        // One cost per size against the other, without a division.
        let (left, right) = (cost(one_draw) * other_size, cost(other_draw) * one_size);
        left.cmp(&right).then_with(|| (other_draw, one.group).cmp(&(one_draw, other.group)))
    });
    let most_free = || groups.iter().max_by_key(|room| (room.free, room.group == own, room.group));
    first.or_else(most_free).map_or(own, |room| room.group)
}

impl GroupRoom {
    fn size_or(&self, average: u128) -> u128 {
        if self.is_known() { u128::from(self.size) } else { average }
    }
}

/// The average size of the groups that are known; 1 if none is.
pub(crate) fn average_size(groups: &[GroupRoom]) -> u128 {
    let known = || groups.iter().filter(|room| room.is_known());
    let sum: u128 = known().map(|room| u128::from(room.size)).sum();
    sum.checked_div(known().count() as u128).unwrap_or(1)
}

/// A group's number for a directory, any of which is as likely.
fn draw(seed: u64, group: GroupNumber) -> u64 {
    let hash = blake3::hash(&[&seed.to_be_bytes()[..], &[group.number()]].concat());
    u64::from_be_bytes(*hash.as_bytes().first_chunk().expect("a hash has 32 bytes"))
}

/// `-log2` of a draw as a part of 2^64, with [`FRACTION_BITS`] bits behind the point.
fn cost(draw: u64) -> u128 {
    // Of 0 there is no logarithm.
    let draw = draw.max(1);
    let whole = u64::from(draw.ilog2());
    // The draw as a number from 1 to 2, in units of 2^-63. A square's logarithm is twice that of its root.
    let mut rest = draw << (63 - draw.ilog2());
    let mut log = whole;
    for _ in 0..FRACTION_BITS {
        let square = (u128::from(rest) * u128::from(rest)) >> 63;
        let is_past_two = square >> 64 != 0;
        rest = (square >> u32::from(is_past_two)) as u64;
        log = log << 1 | u64::from(is_past_two);
    }
    u128::from((64 << FRACTION_BITS) - log)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn number(number: u8) -> GroupNumber {
        GroupNumber::new(number).unwrap()
    }

    /// Groups of these sizes and free room, in GiB.
    fn rooms(of: &[(u64, u64)]) -> Vec<GroupRoom> {
        let numbered = of.iter().zip(0..);
        let room = |(&(size, free), group): (&(u64, u64), u8)| GroupRoom {
            group: number(group),
            size: size * GIB,
            free: free * GIB,
        };
        numbered.map(room).collect()
    }

    /// How many of so many directories each group gets.
    fn shares(groups: &[GroupRoom], directories: u64) -> Vec<u64> {
        let mut shares = vec![0; groups.len()];
        for seed in 0..directories {
            let group = group_for(groups, number(0), true, seed);
            shares[usize::from(group.number())] += 1;
        }
        shares
    }

    #[test]
    fn a_cost_is_the_negative_binary_logarithm() {
        for draw in [1, 2, 3, 1000, u64::MAX / 3, u64::MAX / 2, u64::MAX - (1 << 60), u64::MAX] {
            let found = cost(draw) as f64 / (1u64 << FRACTION_BITS) as f64;
            let expected = 64.0 - (draw as f64).log2();
            assert!((found - expected).abs() < 1e-9, "{draw}: {found}, not {expected}");
        }
        assert_eq!(cost(0), cost(1));
    }

    /// Kosha §3.1: "To achieve load balancing, Kosha employs hashing [...] and distributes directories [...] to multiple nodes." §3.3: "Because of
    /// the heterogeneity in the storage space contributed by nodes": a share of the directories is a share of the sizes.
    #[test]
    fn directories_are_shared_out_by_size() {
        for (sizes, expected) in [
            (vec![(100, 90); 4], vec![2500; 4]),
            (vec![(100, 90), (200, 90), (700, 90)], vec![1000, 2000, 7000]),
        ] {
            let found = shares(&rooms(&sizes), 10_000);
            for (found, expected) in found.iter().zip(&expected) {
                // Five standard deviations of a binomial distribution, at most.
                assert!(found.abs_diff(*expected) < 250, "{found} for {expected}");
            }
        }
    }

    /// A group that comes takes directories from others; none goes from one of the others to another.
    #[test]
    fn a_group_that_comes_or_grows_takes_its_share_and_nothing_else_changes() {
        let before = rooms(&[(100, 90), (200, 180), (50, 45)]);
        let with_another = rooms(&[(100, 90), (200, 180), (50, 45), (100, 90)]);
        let grown = rooms(&[(100, 90), (200, 180), (100, 45)]);
        for seed in 0..2000 {
            let of = |groups: &[GroupRoom]| group_for(groups, number(0), true, seed);
            let first = of(&before);
            assert!([first, number(3)].contains(&of(&with_another)));
            assert!([first, number(2)].contains(&of(&grown)));
        }
    }

    /// Kosha §3.3: "redirection is done for all newly created directories when the local disk space has exceeded the pre-specified
    /// utilization. When this happens, the directory is redirected and stored on a different node."
    #[test]
    fn a_full_group_is_passed_over_for_the_next_in_the_order() {
        let with_room = rooms(&[(100, 90), (100, 90), (100, 90)]);
        let one_full = rooms(&[(100, 90), (100, 4), (100, 90)]);
        let without = [with_room[0], with_room[2]];
        for seed in 0..1000 {
            let before = group_for(&with_room, number(0), true, seed);
            let after = group_for(&one_full, number(0), true, seed);
            if before == number(1) {
                assert_eq!(after, group_for(&without, number(0), true, seed));
            } else {
                assert_eq!(after, before);
            }
        }
        assert_eq!(shares(&one_full, 1000)[1], 0);
    }

    /// Kosha §3.2: deeper directories "are stored on the same node as the node on which their parent directory is stored"; §3.3: redirection
    /// is done "for all newly created directories".
    #[test]
    fn a_directory_stays_with_its_parent_until_its_group_is_full() {
        let mut groups = rooms(&[(100, 90), (100, 5), (100, 90)]);
        let stays = |groups: &[GroupRoom]| {
            (0..100).all(|seed| group_for(groups, number(1), false, seed) == number(1))
        };
        assert!(stays(&groups), "a twentieth is free");
        groups[1].free -= 1;
        assert!((0..100).all(|seed| group_for(&groups, number(1), false, seed) != number(1)));
        // Of a small disk, a number of bytes.
        groups[1] = GroupRoom { group: number(1), size: GIB, free: MIN_KEPT_BYTES };
        assert!(stays(&groups));
        groups[1].free -= 1;
        assert!(!stays(&groups));
    }

    /// Kosha §3.3: "the redirection process repeats till a node with enough disk space is found, or a pre-specified number of retries is
    /// exhausted."
    #[test]
    fn when_all_are_full_the_one_with_the_most_free_room_has_the_directory() {
        let groups = rooms(&[(100, 1), (1000, 3), (100, 2)]);
        for seed in 0..100 {
            for is_spread in [false, true] {
                assert_eq!(group_for(&groups, number(0), is_spread, seed), number(1));
            }
        }
        // Equally full ones leave a directory where it is.
        assert_eq!(group_for(&rooms(&[(100, 1), (100, 1)]), number(0), false, 7), number(0));
    }

    #[test]
    fn a_group_whose_room_is_not_known_counts_as_one_of_average_size_with_room() {
        let mut groups = rooms(&[(100, 90), (300, 90), (0, 0)]);
        let found = shares(&groups, 6000);
        for (found, expected) in found.iter().zip([1000u64, 3000, 2000]) {
            assert!(found.abs_diff(expected) < 200, "{found} for {expected}");
        }
        groups[0].free = 0;
        groups[1].free = 0;
        assert_eq!(group_for(&groups, number(0), true, 1), number(2));
        let all_unknown: Vec<GroupRoom> = (0..4).map(number).map(GroupRoom::unknown).collect();
        assert!(shares(&all_unknown, 4000).iter().all(|share| share.abs_diff(1000) < 150));
        assert_eq!(group_for(&[], number(5), true, 1), number(5));
    }
}
