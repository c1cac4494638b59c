//! Which members a primary waits for, and whether it may answer.
//!
//! A member that is silent, was restarted, or whose disk failed is left out of the next map; one that has everything is added. All
//! items wait for it before that is proposed, since the map may be decided without this member knowing; and until it is known whether a
//! proposal was decided, for those that it was to leave out, too.
//!
//! **Who the members are** changes by the same maps: a member that comes, goes, or listens elsewhere ([`PoolEdit`]) is in the next one that is
//! proposed. The last one that has everything cannot go; a primary that is to go leaves its part to another one first, and a voter is none
//! any more before it goes: whoever decides that it goes stays. With the members the
//! voters change ([`crate::pool_map::MapVoters`]); one that has been silent for [`DEAD_AFTER`] is replaced. Nodes without files come, go and
//! vote by the same maps ([`super::witnesses`]).
//!
//! A member that a map leaves out may have a read lease ([`crate::backups`]): before that map is taken over, the primary waits until it has
//! ended, but for a member that was restarted, or has said that its disk failed.
//!
//! A primary may answer as long as all members of its epoch have promised, until then at least, to follow nobody else
//! ([`crate::backups::LEASE`]): none of them can be the primary of the next epoch before. Alone it may always: nobody else proposes.

use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use atoll_env::{Instant, Moment, sleep};
use atoll_key::PeerId;
use futures_channel::oneshot;
use futures_util::future::select;

use super::primary::Primary;
use super::{ASK_LIMIT, GroupSeat};
use crate::backups::BackupLink;
use crate::disk::Disk;
use crate::layout::GroupNumber;
use crate::map::{PoolMap, VotersToBe, revival};
use crate::members::PoolMembers;
use crate::messages::PoolEdit;
use crate::roster::{PoolRoster, RosterEdit};
use crate::witnesses::PoolWitnesses;

/// For so long a member is silent until another one takes its place, as a voter and beside it (POOL: *repair*).
pub(crate) const DEAD_AFTER: Duration = Duration::from_secs(600);
/// How often a primary looks at its members.
const LOOK_EVERY: Duration = Duration::from_millis(25);
/// A primary that may not answer for so long asks whether it is the primary.
const ASK_AFTER: Duration = Duration::from_millis(500);
/// How long an answer is held back until it may be given.
const CONFIRM_LIMIT: Duration = Duration::from_secs(10);
/// Between looks whether it may.
const CONFIRM_EVERY: Duration = Duration::from_millis(5);
/// When all members have everything, their logs begin anew after so many changes.
const LOG_LENGTH: u64 = 1024;

impl<D: Disk> Primary<D> {
    /// Waits until this member may answer as the primary; fails if that takes too long, or it is the primary no more.
    pub(super) async fn confirm(&self) -> Result<(), ()> {
        let until = self.env.now() + CONFIRM_LIMIT;
        loop {
            if self.member.has_failed() || self.env.now() > until {
                return Err(());
            }
            if self.backups.has_leases(Moment::now(&*self.env)) {
                return Ok(());
            }
            sleep(&*self.env, CONFIRM_EVERY).await;
        }
    }
}

/// Why a member is not removed.
const ONLY_COPY: &str = "no other member has everything that the pool holds";

/// A change of who the members are, which is to be in the next map.
pub(super) struct AskedEdit {
    edit: PoolEdit,
    /// Gets the map that has it, or why it is not made.
    done: oneshot::Sender<Result<PoolMap, &'static str>>,
}

impl PoolEdit {
    /// Whether it says something else than an earlier one that is not made yet: that one is made no more, or it would be made afterwards.
    fn replaces(&self, earlier: &PoolEdit) -> bool {
        let subject = |edit: &PoolEdit| match edit {
            PoolEdit::Enrol(peer) => (0, Some(peer.id), None),
            PoolEdit::Remove(id) => (0, Some(*id), None),
            PoolEdit::Witness(witness) => (0, Some(witness.peer.id), None),
            PoolEdit::Roster(edit) => match edit {
                RosterEdit::Begin(peer) => (1, Some(peer.id), None),
                RosterEdit::ToGo(id, _) => (1, Some(*id), None),
                RosterEdit::Set(group, _) | RosterEdit::Drop(group) => (2, None, Some(*group)),
                RosterEdit::Copies(_) => (3, None, None),
                RosterEdit::MinCopies(_) => (4, None, None),
                RosterEdit::Level(_) => (5, None, None),
            },
        };
        self != earlier && subject(self) == subject(earlier)
    }
}

/// Who belongs to the pool: the parts of a map that people change.
#[derive(Clone, PartialEq, Eq)]
struct Belonging {
    enrolled: PoolMembers,
    witnesses: PoolWitnesses,
    roster: PoolRoster,
}

impl Belonging {
    fn of(map: &PoolMap) -> Belonging {
        let PoolMap { enrolled, witnesses, roster, .. } = map.clone();
        Belonging { enrolled, witnesses, roster }
    }

    /// These after an edit; why it is not made.
    fn with(&self, edit: &PoolEdit) -> Result<Belonging, &'static str> {
        let mut next = self.clone();
        match edit {
            PoolEdit::Enrol(peer) if self.witnesses.contains(peer.id) => {
                return Err("it belongs to the pool without files: it leaves first");
            }
            PoolEdit::Enrol(peer) => {
                let more = self.enrolled.with(*peer);
                next.enrolled = more.ok_or("the pool has as many members as it can have")?;
            }
            PoolEdit::Remove(id) if self.enrolled.contains(*id) => {
                let fewer = self.enrolled.without(*id);
                next.enrolled = fewer.ok_or(ONLY_COPY)?;
            }
            PoolEdit::Remove(id) => next.witnesses = self.witnesses.without(*id),
            PoolEdit::Witness(witness) if self.enrolled.contains(witness.peer.id) => {
                return Err("it has files of the pool");
            }
            PoolEdit::Witness(witness) => {
                let more = self.witnesses.with(*witness);
                next.witnesses =
                    more.ok_or("the pool has as many nodes without files as it can have")?;
            }
            PoolEdit::Roster(RosterEdit::Begin(peer)) if self.witnesses.contains(peer.id) => {
                return Err("it belongs to the pool without files: it leaves first");
            }
            PoolEdit::Roster(edit) => {
                next.roster = self.roster.with(edit)?;
                let goes = matches!(edit, RosterEdit::ToGo(_, true));
                if goes && machines(&next.enrolled, &next.roster).is_subset(next.roster.to_go()) {
                    return Err("no machine would stay: all others are to go, too");
                }
            }
        }
        Ok(next)
    }

    /// Whether nothing is left to be done for an edit.
    fn has(&self, edit: &PoolEdit) -> bool {
        self.with(edit).is_ok_and(|next| next == *self)
    }
}

/// All machines of a pool.
fn machines(enrolled: &PoolMembers, roster: &PoolRoster) -> BTreeSet<PeerId> {
    let others = roster.groups().values().map(|group| &group.members);
    others.chain([enrolled]).flat_map(|members| members.peers()).map(|peer| peer.id).collect()
}

/// Why an edit is not made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum NotEdited {
    /// For people.
    Refused(&'static str),
    /// Another member is to be the primary before.
    HandsOver,
    /// This one is the primary no more.
    Ended,
}

impl<D: Disk> Primary<D> {
    /// Has the next map say who the members are, and returns it when it is decided: also if they are so already, for this member may not be
    /// the primary any more.
    pub(super) async fn edit(&self, edit: PoolEdit) -> Result<PoolMap, NotEdited> {
        let map = self.backups.map();
        if let Err(why) = self.edited(&map).0.with(&edit) {
            return Err(NotEdited::Refused(why));
        }
        match edit {
            PoolEdit::Remove(id) if map.members.iter().all(|member| *member == id) => {
                return Err(NotEdited::Refused(ONLY_COPY));
            }
            PoolEdit::Remove(id) if id == map.primary => return Err(NotEdited::HandsOver),
            PoolEdit::Roster(_) if self.member.settings.group != GroupNumber::FIRST => {
                return Err(NotEdited::Refused("the first group alone knows the others"));
            }
            PoolEdit::Enrol(_)
            | PoolEdit::Remove(_)
            | PoolEdit::Roster(_)
            | PoolEdit::Witness(_) => {}
        }
        let (done, decided) = oneshot::channel();
        {
            let mut edits = self.edits();
            if self.member.is_closed() {
                return Err(NotEdited::Ended);
            }
            let (replaced, mut waiting): (Vec<_>, Vec<_>) = std::mem::take(&mut *edits)
                .into_iter()
                .partition(|asked: &AskedEdit| edit.replaces(&asked.edit));
            waiting.push(AskedEdit { edit, done });
            *edits = waiting;
            for asked in replaced {
                // Whoever asked may have given up.
                let _ = asked.done.send(Err("a later request says something else"));
            }
        }
        self.backups.has_news().notify();
        match decided.await {
            Ok(Ok(map)) => Ok(map),
            Ok(Err(why)) => Err(NotEdited::Refused(why)),
            Err(oneshot::Canceled) => Err(NotEdited::Ended),
        }
    }

    /// Who is to belong to the pool, and whether somebody has asked for a change of that.
    fn edited(&self, map: &PoolMap) -> (Belonging, bool) {
        let mut edits = self.edits();
        edits.retain(|asked| !asked.done.is_canceled());
        let edited = edits.iter().fold(Belonging::of(map), |belonging, AskedEdit { edit, .. }| {
            belonging.with(edit).unwrap_or(belonging)
        });
        (edited, !edits.is_empty())
    }

    /// A map is decided: answers those that asked for what it says.
    fn answer_edits(&self, decided: &PoolMap) {
        let mut edits = self.edits();
        let (done, waiting) = std::mem::take(&mut *edits)
            .into_iter()
            .partition(|AskedEdit { edit, .. }| Belonging::of(decided).has(edit));
        *edits = waiting;
        drop(edits);
        let done: Vec<AskedEdit> = done;
        for AskedEdit { done, .. } in done {
            // Whoever asked may have given up.
            let _ = done.send(Ok(decided.clone()));
        }
    }
}

/// What a primary knows of its members.
pub(super) struct EpochMembership<D: Disk> {
    primary: Arc<Primary<D>>,
    /// A proposal may have been decided, or may still be.
    is_unresolved: bool,
    /// Since when it may not answer.
    silenced: Option<Instant>,
    is_beginning_log: Arc<AtomicBool>,
}

impl<D: Disk> EpochMembership<D> {
    /// Looks after the members, as long as this one is the primary.
    pub(super) async fn keep(seat: Weak<GroupSeat<D>>, primary: Arc<Primary<D>>) {
        let mut membership = EpochMembership {
            primary: primary.clone(),
            is_unresolved: false,
            silenced: None,
            is_beginning_log: Arc::default(),
        };
        loop {
            let look = sleep(&*primary.env, LOOK_EVERY);
            select(pin!(primary.backups.has_news().notified()), look).await;
            let Some(seat) = seat.upgrade().filter(|_| !primary.member.has_failed()) else {
                return;
            };
            primary.member.set_rules(seat.rules());
            let heard = primary.heard_of_revival().unwrap_or_else(|| seat.backup.map());
            if revival(heard.epoch) > revival(primary.backups.map().epoch) {
                // People have made another copy the group, and this one's voters do not know.
                return seat.end_lead(&primary, &heard);
            }
            let asked = match membership.wanted() {
                Some(map) => {
                    membership.is_unresolved = true;
                    Some(seat.maps.propose(&map, ASK_LIMIT).await)
                }
                None if membership.is_in_doubt() => Some(seat.maps.ask(ASK_LIMIT).await),
                None => None,
            };
            match asked {
                Some(Ok(decided)) => {
                    membership.outwait_leases(&decided).await;
                    if !membership.adopt(&decided) {
                        return seat.end_lead(&primary, &decided);
                    }
                    seat.backup.note_map(&decided);
                    // The answer says that the rules hold.
                    primary.member.set_rules(seat.rules());
                    primary.answer_edits(&decided);
                }
                Some(Err(error)) => tracing::debug!("the pool's map: {error}"),
                None => {}
            }
            membership.begin_log();
        }
    }

    /// Has the log begin anew if it is long and all members have everything; beside this task, which may have to leave one of them out.
    fn begin_log(&self) {
        let Primary { backups, member, env, .. } = &*self.primary;
        let is_long = member.changes_so_far().saturating_sub(member.log().after) > LOG_LENGTH;
        let is_whole = self.primary.is_ready()
            && backups.map().is_whole()
            && backups.members_to_mend().is_empty();
        if !is_long || !is_whole || self.is_beginning_log.swap(true, Ordering::SeqCst) {
            return;
        }
        let (member, is_beginning) = (member.clone(), self.is_beginning_log.clone());
        env.spawn(Box::pin(async move {
            if let Err(errno) = member.begin_log().await {
                tracing::debug!("the log is not begun anew: {errno}");
            }
            is_beginning.store(false, Ordering::SeqCst);
        }));
    }

    /// The map that is to be proposed, if any.
    fn wanted(&self) -> Option<PoolMap> {
        let Primary { backups, run, .. } = &*self.primary;
        let (map, links) = (backups.map(), backups.links());
        let (edited, has_edits) = self.primary.edited(&map);
        let stays_voter = |key: &&PeerId| {
            let witness = map.witnesses.get(**key);
            edited.enrolled.contains(**key)
                || witness.is_some_and(|witness| edited.witnesses.contains_incarnation(witness))
        };
        let voting: BTreeSet<PeerId> =
            map.voters.keys.iter().filter(stays_voter).copied().collect();
        let is_voter_to_go = voting.len() < map.voters.keys.len();
        let (enrolled, witnesses) = match is_voter_to_go {
            true => (map.enrolled.clone(), map.witnesses.clone()),
            false => (edited.enrolled.clone(), edited.witnesses.clone()),
        };
        let roster = edited.roster.clone();
        let stays = |link: &&Arc<BackupLink>| enrolled.contains(link.id);
        if self.primary.is_ready() {
            links.iter().filter(stays).for_each(|link| link.require_if_complete());
        }
        let mut members: BTreeSet<PeerId> = [map.primary].into();
        let there = links.iter().filter(|link| link.is_member() && !link.is_gone()).filter(stays);
        members.extend(there.map(|link| link.id));
        for link in links.iter() {
            link.note_to_go(!members.contains(&link.id));
        }
        let silent: BTreeSet<PeerId> =
            links.iter().filter(|link| link.silence() > DEAD_AFTER).map(|link| link.id).collect();
        let now = self.primary.env.now();
        let watch = &self.primary.witnesses;
        let is_dead = |id: PeerId| {
            silent.contains(&id)
                || map.witnesses.contains(id) && watch.silence(id, now) > DEAD_AFTER
        };
        // A node without files is ready if it has answered in the incarnation that the map lists, and the next map lists it so, too.
        let mut ready = watch.ready(&map.witnesses, now);
        let stays_listed = |id: PeerId| {
            let listed = map.witnesses.get(id);
            listed.is_some_and(|witness| edited.witnesses.contains_incarnation(witness))
        };
        ready.retain(|id| stays_listed(*id));
        let to_be = VotersToBe {
            enrolled: &edited.enrolled,
            witnesses: &edited.witnesses,
            ready: &ready,
            voting: &voting,
        };
        let voters = map.voters.of(&to_be, is_dead, |id| members.contains(&id));
        let mut required = links.iter().filter(|link| link.is_member());
        let is_wanted = self.is_unresolved
            || has_edits
            || members != map.members
            || enrolled != map.enrolled
            || witnesses != map.witnesses
            || voters != map.voters
            || roster != map.roster
            // It was to be a member, and is gone again: everything waits for it until the next map.
            || required.any(|link| !map.members.contains(&link.id));
        let epoch = map.epoch.saturating_add(1);
        let run = *run;
        let next = PoolMap { epoch, run, members, enrolled, voters, roster, witnesses, ..map };
        is_wanted.then_some(next)
    }

    /// Whether another member may be the primary.
    fn is_in_doubt(&mut self) -> bool {
        let Primary { backups, env, .. } = &*self.primary;
        if backups.links().iter().any(|link| link.is_member() && link.knows_newer_map()) {
            return true;
        }
        if backups.has_leases(Moment::now(&**env)) {
            self.silenced = None;
            return false;
        }
        let now = env.now();
        let since = *self.silenced.get_or_insert(now);
        let is_due = now.since(since) > ASK_AFTER;
        if is_due {
            self.silenced = Some(now);
        }
        is_due
    }

    /// Waits until members that a map leaves out have no read leases any more: then changes are made without them.
    async fn outwait_leases(&self, decided: &PoolMap) {
        let Primary { backups, run, env, .. } = &*self.primary;
        let map = backups.map();
        if (decided.primary, decided.run) == (map.primary, *run) && decided.epoch > map.epoch {
            sleep(&**env, backups.end_leases(decided)).await;
        }
    }

    /// Takes a map over that was decided; false if another member is the primary by it.
    fn adopt(&mut self, decided: &PoolMap) -> bool {
        let Primary { backups, run, .. } = &*self.primary;
        let map = backups.map();
        if (decided.primary, decided.run) != (map.primary, *run) {
            return false;
        }
        if decided.epoch > map.epoch {
            self.is_unresolved = false;
            self.primary.set_map(decided);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use atoll_net::Peer;

    use super::*;

    #[test]
    fn a_request_replaces_those_about_the_same_that_say_something_else() {
        let peer =
            |number: u8| Peer { id: PeerId([number; 32]), addr: ([10, 0, 0, number], 1).into() };
        let goes = |number, goes| PoolEdit::Roster(RosterEdit::ToGo(peer(number).id, goes));
        assert!(goes(1, false).replaces(&goes(1, true)));
        assert!(!goes(1, true).replaces(&goes(1, true)), "both are answered");
        assert!(!goes(1, false).replaces(&goes(2, true)));
        assert!(PoolEdit::Roster(RosterEdit::Begin(peer(1))).replaces(&goes(1, true)));
        assert!(PoolEdit::Remove(peer(1).id).replaces(&PoolEdit::Enrol(peer(1))));
        assert!(!PoolEdit::Remove(peer(1).id).replaces(&goes(1, true)), "one is of a group");
        let copies = |copies| PoolEdit::Roster(RosterEdit::Copies(copies));
        assert!(copies(2).replaces(&copies(3)));
        let least = |copies| PoolEdit::Roster(RosterEdit::MinCopies(copies));
        assert!(least(2).replaces(&least(1)) && !least(2).replaces(&copies(2)));
    }
}
