//! How the first group of a pool divides each limit among the groups, so that they can refuse what exceeds it without asking.
//!
//! Each group has a *share* of a limit, and uses no more. A share is lowered before another one is raised by that: the shares that
//! groups have, or may have since an answer is missing, never come to more than the limit, unless the groups use more already. A group whose
//! primary has not answered yet may have any share: then none is raised.
//!
//! What is left of a limit is divided evenly, or, if some groups wanted more than their shares, among these, but for a part of an eighth.
//! Shares stay as they are as long as each group can use a fourth of that.
//!
//! **It does not know** how groups are asked, nor when.

use std::collections::BTreeMap;

use minicbor::{Decode, Encode};

use super::{GrantNumber, QuotaAmount, QuotaSubject};
use crate::layout::GroupNumber;

/// How a group stands to a limit, as it says.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Encode, Decode)]
pub(crate) struct GroupUse {
    /// What it may use.
    #[n(0)]
    pub(crate) share: QuotaAmount,
    /// What it uses.
    #[n(1)]
    pub(crate) used: QuotaAmount,
    /// Whether it wanted more than its share.
    #[n(2)]
    pub(crate) wants_more: bool,
}

/// What a group is told of a limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) struct QuotaGrant {
    #[n(0)]
    pub(crate) subject: QuotaSubject,
    #[n(1)]
    pub(crate) limit: QuotaAmount,
    #[n(2)]
    pub(crate) share: QuotaAmount,
    /// What all other groups use.
    #[n(3)]
    pub(crate) elsewhere: QuotaAmount,
}

type GroupUses = BTreeMap<QuotaSubject, GroupUse>;

/// What the first group's primary knows of all groups.
#[derive(Default, Debug)]
pub(crate) struct QuotaShares {
    groups: BTreeMap<GroupNumber, GroupUses>,
    last: GrantNumber,
}

impl QuotaShares {
    /// The number of the next grants, by a primary of this epoch.
    pub(crate) fn next_number(&mut self, epoch: u64) -> GrantNumber {
        let count = if self.last.epoch == epoch { self.last.count + 1 } else { 1 };
        self.last = GrantNumber { epoch, count };
        self.last
    }

    /// Whether a group has said how it stands.
    pub(crate) fn knows(&self, group: GroupNumber) -> bool {
        self.groups.contains_key(&group)
    }

    /// Whether no group has heard of any limit.
    pub(crate) fn are_empty(&self) -> bool {
        self.groups.values().all(BTreeMap::is_empty)
    }

    /// A group has said how it stands to all limits that it knows.
    pub(crate) fn note(
        &mut self,
        group: GroupNumber,
        uses: impl IntoIterator<Item = (QuotaSubject, GroupUse)>,
    ) {
        self.groups.insert(group, uses.into_iter().collect());
    }

    /// A group was sent these, and has not answered: it may have either share.
    pub(crate) fn note_unanswered(&mut self, group: GroupNumber, grants: &[QuotaGrant]) {
        let Some(uses) = self.groups.get_mut(&group) else { return };
        for grant in grants {
            let known = uses.entry(grant.subject).or_default();
            known.share = known.share.at_least(grant.share);
        }
    }

    /// What each of these groups is to be told of these limits; nothing is told to one that has not said how it stands.
    pub(crate) fn grants(
        &self,
        limits: &[(QuotaSubject, QuotaAmount)],
        groups: &[GroupNumber],
    ) -> BTreeMap<GroupNumber, Vec<QuotaGrant>> {
        let known: Vec<(GroupNumber, &GroupUses)> =
            groups.iter().filter_map(|group| Some((*group, self.groups.get(group)?))).collect();
        let are_all = known.len() == groups.len();
        let mut told: BTreeMap<GroupNumber, Vec<QuotaGrant>> = BTreeMap::new();
        for (subject, limit) in limits {
            let uses: Vec<GroupUse> = known
                .iter()
                .map(|(_, uses)| uses.get(subject).copied().unwrap_or_default())
                .collect();
            let of = |pick: fn(&QuotaAmount) -> u64| {
                let uses: Vec<AmountUse> = uses
                    .iter()
                    .map(|GroupUse { share, used, wants_more }| AmountUse {
                        share: pick(share),
                        used: pick(used),
                        wants_more: *wants_more,
                    })
                    .collect();
                divided(pick(limit), &uses, are_all)
            };
            let (bytes, files) = (of(|amount| amount.bytes), of(|amount| amount.files));
            let all = uses.iter().fold(QuotaAmount::default(), |sum, group| sum.plus(group.used));
            for (at, (group, _)) in known.iter().enumerate() {
                let share = QuotaAmount { bytes: bytes[at], files: files[at] };
                let elsewhere = all.minus(uses[at].used);
                let grant = QuotaGrant { subject: *subject, limit: *limit, share, elsewhere };
                told.entry(*group).or_default().push(grant);
            }
        }
        told
    }
}

/// How a group stands to a limit of bytes, or of files.
#[derive(Clone, Copy, Debug)]
struct AmountUse {
    share: u64,
    used: u64,
    wants_more: bool,
}

/// The shares that groups are told, of which more may have to be lowered before others are raised.
fn divided(limit: u64, groups: &[AmountUse], are_all: bool) -> Vec<u64> {
    if limit == u64::MAX {
        return vec![u64::MAX; groups.len()];
    }
    let count = (groups.len() as u64).max(1);
    let sum = |of: fn(&AmountUse) -> u64| {
        groups.iter().fold(0u64, |sum, one| sum.saturating_add(of(one)))
    };
    let (used, shared) = (sum(|one| one.used), sum(|one| one.share));
    let left = limit.saturating_sub(used);
    let wanting = groups.iter().filter(|one| one.wants_more).count() as u64;
    let can_use_enough = |one: &AmountUse| {
        !one.wants_more && one.share.saturating_sub(one.used) >= left / (4 * count)
    };
    if shared <= limit && groups.iter().all(can_use_enough) {
        return groups.iter().map(|one| one.share).collect();
    }
    let for_others = left / (8 * count);
    let wished = |one: &AmountUse| match (wanting, one.wants_more) {
        (0, _) => one.used.saturating_add(left / count),
        (_, false) => one.used.saturating_add(for_others),
        (_, true) => one.used.saturating_add((left - for_others * (count - wanting)) / wanting),
    };
    let mut to_give = if are_all { limit.saturating_sub(shared) } else { 0 };
    groups
        .iter()
        .map(|one| {
            let wished = wished(one);
            if wished <= one.share {
                return wished;
            }
            let given = (wished - one.share).min(to_give);
            to_give -= given;
            one.share + given
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANN: QuotaSubject = QuotaSubject::User(7);

    fn bytes(bytes: u64) -> QuotaAmount {
        QuotaAmount { bytes, files: u64::MAX }
    }

    fn group(number: u8) -> GroupNumber {
        GroupNumber::new(number).expect("a small number")
    }

    fn random(seed: &mut u64) -> u64 {
        *seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        *seed >> 33
    }

    /// Groups that use what they may, messages that are lost both ways, a primary that dies and begins to ask.
    #[test]
    fn groups_never_use_more_than_the_limit_together() {
        for mut seed in 0..200u64 {
            let limit = 100_000 + random(&mut seed) % 1000;
            let groups: Vec<GroupNumber> = (0..4).map(group).collect();
            let mut real = [GroupUse::default(); 4];
            let (mut refused, mut epoch) = (0, 1);
            let mut shares = QuotaShares::default();
            for round in 0..400 {
                if random(&mut seed).is_multiple_of(50) {
                    shares = QuotaShares::default();
                    epoch += 1;
                }
                for one in &mut real {
                    let more = random(&mut seed) % 2000;
                    let less = random(&mut seed) % 1500;
                    match one.used.bytes + more <= one.share.bytes {
                        _ if random(&mut seed).is_multiple_of(3) => {
                            one.used.bytes = one.used.bytes.saturating_sub(less);
                        }
                        true => one.used.bytes += more,
                        false => {
                            one.wants_more = true;
                            refused += 1;
                        }
                    }
                }
                let all: u64 = real.iter().map(|one| one.used.bytes).sum();
                assert!(all <= limit, "seed {seed}, round {round}: {all} of {limit}");
                let grants = shares.grants(&[(ANN, bytes(limit))], &groups);
                assert!(shares.next_number(epoch).epoch == epoch);
                for (at, number) in groups.iter().enumerate() {
                    let arrives = !random(&mut seed).is_multiple_of(5);
                    let is_answered = arrives && !random(&mut seed).is_multiple_of(5);
                    let of_group = grants.get(number).cloned().unwrap_or_default();
                    if arrives {
                        for grant in &of_group {
                            real[at].share = grant.share.at_least(real[at].used);
                        }
                    }
                    match is_answered {
                        true => {
                            shares.note(*number, [(ANN, real[at])]);
                            real[at].wants_more = false;
                        }
                        false => shares.note_unanswered(*number, &of_group),
                    }
                }
            }
            assert!(refused > 0);
        }
    }

    #[test]
    fn one_group_that_wants_it_gets_nearly_all() {
        let groups: Vec<GroupNumber> = (0..3).map(group).collect();
        let mut shares = QuotaShares::default();
        let mut real = [GroupUse::default(); 3];
        groups.iter().for_each(|group| shares.note(*group, []));
        for round in 0..4 {
            let grants = shares.grants(&[(ANN, bytes(24_000))], &groups);
            for (at, number) in groups.iter().enumerate() {
                real[at].share = grants[number][0].share;
                real[at].wants_more = round > 0 && at == 2;
                shares.note(*number, [(ANN, real[at])]);
            }
            if round == 0 {
                assert!(real.iter().all(|one| one.share.bytes == 8000), "{real:?}");
            }
        }
        assert_eq!(real[2].share.bytes, 22_000, "{real:?}");
    }

    #[test]
    fn a_lower_limit_takes_shares_back_and_none_is_raised_unless_all_are_known() {
        let groups: Vec<GroupNumber> = (0..2).map(group).collect();
        let mut shares = QuotaShares::default();
        let has =
            |share, used| GroupUse { share: bytes(share), used: bytes(used), wants_more: false };
        shares.note(groups[0], [(ANN, has(1000, 900))]);
        let grants = shares.grants(&[(ANN, bytes(4000))], &groups);
        assert_eq!(grants[&groups[0]][0].share.bytes, 1000);
        assert!(!grants.contains_key(&groups[1]), "it is asked first");
        shares.note(groups[1], [(ANN, has(5000, 100))]);
        let grants = shares.grants(&[(ANN, bytes(1100))], &groups);
        assert_eq!(grants[&groups[0]][0].share.bytes, 950);
        assert_eq!(grants[&groups[1]][0].share.bytes, 150);
        assert_eq!(grants[&groups[1]][0].elsewhere.bytes, 900);
    }
}
