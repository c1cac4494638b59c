//! When a group of a pool serves, as machines come and go.
//!
//! The rules are those of `docs/design/pool.md`, and that a group which has too few members takes another machine of the pool; who votes is
//! decided by `atoll_pool::MapVoters` itself.
//!
//! - A group serves while most of its voters are up, and a *member of the epoch*: one that has everything. Those that are
//!   down are left out of the epoch then.
//! - A member that is back is one of the epoch again when it has caught up.
//! - A member that has been silent for ten minutes is replaced ([`Repair::dead_after_secs`]): another machine gets a copy of everything, and votes
//!   if the silent one did.
//! - Members that are too many go when all have everything.
//! - Nothing of that happens while the group does not serve.
//!
//! **Left out:** the second at most for which calls wait when a member dies; that machines which are switched off say so before; that
//! disks are lost; that a machine which comes is a member of other groups, too.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use atoll_env::Env;
use atoll_key::PeerId;
use atoll_net::Peer;
use atoll_pool::{MapVoters, PoolMap, PoolMembers};

use super::machines::Machines;

/// After so long a silent voter is replaced, as shipped: `DEAD_AFTER` of `atoll_pool`.
pub(super) const DEAD_AFTER_SECS: f64 = 600.0;
/// How long a member that was away catches up: a guess.
const CATCH_UP_SECS: f64 = 10.0;

/// What becomes of silent members.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Repair {
    /// On how many members everything is to be.
    pub copies: usize,
    /// After so long a member counts as dead.
    pub dead_after_secs: f64,
    /// Whether another machine takes the place of one that is dead.
    pub replaces: bool,
    /// How long that gets its copy.
    pub copy_secs: f64,
}

struct Member {
    machine: usize,
    /// Has everything: is one of the epoch.
    is_complete: bool,
    /// Had everything once.
    has_copy: bool,
    /// When it has everything, if it stays up.
    complete_at: Option<f64>,
    /// Since when it is down.
    down_since: Option<f64>,
}

/// See the module.
struct GroupLife<'a> {
    machines: &'a Machines,
    random: &'a Env,
    repair: Repair,
    members: Vec<Member>,
    voters: MapVoters,
    now: f64,
}

/// From when to when a group does not serve, seconds, in `0..length_secs`.
pub(super) fn outages(
    machines: &Machines,
    repair: Repair,
    length_secs: f64,
    random: &Env,
) -> Vec<(f64, f64)> {
    let mut outages: Vec<(f64, f64)> = Vec::new();
    let Some(mut life) = GroupLife::begin(machines, repair, random) else {
        return vec![(0.0, length_secs)];
    };
    while life.now < length_secs {
        let serves = life.settle();
        let next = life.next_event(serves).min(length_secs);
        if !serves {
            match outages.last_mut().filter(|(_, end)| *end == life.now) {
                Some((_, end)) => *end = next,
                None => outages.push((life.now, next)),
            }
        }
        life.now = next;
    }
    outages
}

fn id(machine: usize) -> PeerId {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&(machine as u64).to_be_bytes());
    PeerId(key)
}

fn peers(members: &[Member]) -> PoolMembers {
    let addr = SocketAddr::from(([127, 0, 0, 1], 1));
    let peers = members.iter().map(|member| Peer { id: id(member.machine), addr });
    PoolMembers::new(peers.collect()).expect("a group has from 1 to 16 members")
}

impl<'a> GroupLife<'a> {
    /// A group of machines that are up.
    fn begin(machines: &'a Machines, repair: Repair, random: &'a Env) -> Option<GroupLife<'a>> {
        let mut chosen = BTreeSet::new();
        let mut members = Vec::new();
        for _ in 0..repair.copies {
            let machine = machines.any_up(0.0, &chosen, random)?;
            chosen.insert(machine);
            members.push(Member::new(machine, true));
        }
        let voters = PoolMap::first(&peers(&members)).voters;
        Some(GroupLife { machines, random, repair, members, voters, now: 0.0 })
    }

    /// Whether the group serves now; if it does, its members and voters are brought up to date.
    fn settle(&mut self) -> bool {
        let now = self.now;
        for member in &mut self.members {
            let is_up = self.machines.is_up(member.machine, now);
            match (is_up, member.down_since) {
                (true, Some(_)) => member.down_since = None,
                (false, None) => (member.down_since, member.complete_at) = (Some(now), None),
                _ => {}
            }
        }
        let up = |member: &&Member| member.down_since.is_none();
        let voting = self.members.iter().filter(|m| self.voters.keys.contains(&id(m.machine)));
        let has_majority = 2 * voting.filter(up).count() > self.voters.keys.len();
        let serves = has_majority && self.members.iter().filter(up).any(|m| m.is_complete);
        if serves {
            while self.mend() {}
        }
        serves
    }

    /// Brings one thing up to date; false if all is.
    fn mend(&mut self) -> bool {
        let (now, repair) = (self.now, self.repair);
        let mut has_changed = false;
        for member in &mut self.members {
            let is_up = member.down_since.is_none();
            let is_complete =
                is_up && (member.is_complete || member.complete_at.is_some_and(|at| at <= now));
            has_changed |= is_complete != member.is_complete;
            member.is_complete = is_complete;
            member.has_copy |= is_complete;
            if is_up && !is_complete && member.complete_at.is_none() {
                let takes = if member.has_copy { CATCH_UP_SECS } else { repair.copy_secs };
                member.complete_at = Some(now + takes);
            }
        }
        let dead = |member: &Member| {
            member.down_since.is_some_and(|since| now - since >= repair.dead_after_secs)
        };
        let dead_ids: BTreeSet<PeerId> =
            self.members.iter().filter(|m| dead(m)).map(|m| id(m.machine)).collect();
        let staying = self.members.len() - dead_ids.len();
        if repair.replaces && staying < repair.copies && self.members.len() < PoolMembers::MAX {
            let known = self.members.iter().map(|member| member.machine).collect();
            if let Some(machine) = self.machines.any_up(now, &known, self.random) {
                self.members.push(Member::new(machine, false));
                return true;
            }
        }
        let is_whole = self.members.iter().all(|member| member.is_complete);
        if is_whole && self.members.len() > repair.copies {
            // Which one goes makes no difference here: all are up.
            self.members.pop();
            has_changed = true;
        }
        let complete: BTreeSet<PeerId> =
            self.members.iter().filter(|m| m.is_complete).map(|m| id(m.machine)).collect();
        let voters = self.voters.of_members(
            &peers(&self.members),
            |id| dead_ids.contains(&id),
            |id| complete.contains(&id),
        );
        has_changed |= voters != self.voters;
        self.voters = voters;
        has_changed
    }

    /// When something may change next.
    fn next_event(&self, serves: bool) -> f64 {
        let changes =
            self.members.iter().filter_map(|m| self.machines.next_change(m.machine, self.now));
        let timers = self.members.iter().filter(|_| serves).flat_map(|member| {
            [member.complete_at, member.down_since.map(|since| since + self.repair.dead_after_secs)]
        });
        changes.chain(timers.flatten()).filter(|at| *at > self.now).fold(f64::INFINITY, f64::min)
    }
}

impl Member {
    fn new(machine: usize, is_complete: bool) -> Member {
        Member { machine, is_complete, has_copy: is_complete, complete_at: None, down_since: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inputs::Availability;
    use crate::kosha::machines::{HOUR_SECS, HOURS};
    use crate::kosha::random;

    const END: f64 = HOURS as f64 * HOUR_SECS;

    /// So many machines that are always up, and the others with these sessions.
    fn machines(always: usize, others: &[&[(f64, f64)]]) -> Machines {
        let mut text = String::from("host,start_s,end_s\n");
        for host in 0..always {
            text += &format!("{host:04},0,{}\n", END + 1.0);
        }
        for (host, sessions) in others.iter().enumerate() {
            for (start, end) in *sessions {
                text += &format!("other-{host},{start},{end}\n");
            }
        }
        Machines::traced(&Availability::parse(&text).expect("valid")).expect("it fits")
    }

    fn life<'a>(
        machines: &'a Machines,
        members: &[usize],
        repair: Repair,
        random: &'a Env,
    ) -> GroupLife<'a> {
        let members: Vec<Member> = members.iter().map(|m| Member::new(*m, true)).collect();
        let voters = PoolMap::first(&peers(&members)).voters;
        GroupLife { machines, random, repair, members, voters, now: 0.0 }
    }

    /// Whether the group serves at these moments, all events before them being followed.
    fn served(mut life: GroupLife<'_>, moments: &[f64]) -> Vec<bool> {
        let mut served = Vec::new();
        for moment in moments {
            loop {
                let serves = life.settle();
                let next = life.next_event(serves);
                if next > *moment {
                    served.push(serves);
                    break;
                }
                life.now = next;
            }
        }
        served
    }

    const THREE: Repair =
        Repair { copies: 3, dead_after_secs: DEAD_AFTER_SECS, replaces: true, copy_secs: 100.0 };

    #[test]
    fn one_death_is_no_outage_and_two_at_once_are_one_until_a_voter_is_back() {
        let machines =
            machines(100, &[&[(0.0, 1000.0), (9000.0, END)], &[(0.0, 1000.0), (7000.0, END)]]);
        let random = random(1);
        let one = life(&machines, &[0, 1, 100], THREE, &random);
        assert_eq!(served(one, &[999.0, 1001.0, 8000.0, 9500.0]), [true; 4]);
        let two = life(&machines, &[0, 100, 101], THREE, &random);
        let moments = [999.0, 1001.0, 6999.0, 7001.0, 9500.0];
        assert_eq!(served(two, &moments), [true, false, false, true, true]);
    }

    #[test]
    fn a_silent_voter_is_replaced_after_ten_minutes_and_a_copy() {
        let second_at = |second: f64| {
            let machines = machines(100, &[&[(0.0, 1000.0)], &[(0.0, second)]]);
            let random = random(2);
            let life = |repair| life(&machines, &[0, 100, 101], repair, &random);
            let without = Repair { replaces: false, ..THREE };
            let after = [second + 1.0];
            [served(life(THREE), &after)[0], served(life(without), &after)[0]]
        };
        assert_eq!(second_at(1599.0), [false, false]);
        // From then on another machine copies, and votes when it has everything.
        assert_eq!(second_at(1690.0), [false, false]);
        assert_eq!(second_at(1710.0), [true, false]);
    }

    #[test]
    fn the_last_member_with_everything_is_waited_for() {
        // 102 is catching up when 100 dies, and 101 alone has everything when it dies, too.
        let machines = machines(
            100,
            &[
                &[(0.0, 995.0), (1200.0, END)],
                &[(0.0, 997.0), (5000.0, END)],
                &[(0.0, 900.0), (990.0, END)],
            ],
        );
        let random = random(3);
        let life = life(&machines, &[100, 101, 102], THREE, &random);
        let served = served(life, &[950.0, 994.0, 996.0, 998.0, 1300.0, 5001.0]);
        assert_eq!(served, [true, true, true, false, false, true]);
    }

    #[test]
    fn outages_are_within_the_time_asked_for_and_do_not_touch() {
        let machines = Machines::modelled(400, super::super::machines::Burst::Spread, &random(4));
        let random = random(5);
        let found = outages(&machines, Repair { copies: 1, ..THREE }, END, &random);
        assert!(!found.is_empty());
        assert!(found.windows(2).all(|two| two[0].1 < two[1].0), "{found:?}");
        assert!(found.iter().all(|(start, end)| start < end && *end <= END));
    }
}
