//! Which members a primary waits for, and whether it may answer.
//!
//! A member that is silent, was restarted, or whose disk failed is left out of the next map; one that has everything is added. All
//! items wait for it before that is proposed, since the map may be decided without this member knowing; and until it is known whether a
//! proposal was decided, for those that it was to leave out, too.
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
use futures_util::future::select;

use super::primary::Primary;
use super::{ASK_LIMIT, GroupSeat};
use crate::backups::BackupLink;
use crate::disk::Disk;
use crate::map::PoolMap;

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
                    if !membership.adopt(&decided) {
                        return seat.end_lead(&primary, &decided);
                    }
                    seat.backup.note_map(&decided);
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
            && backups.map().members.len() == backups.links.len() + 1
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
        let map = backups.map();
        if self.primary.is_ready() {
            backups.links.iter().for_each(|link| link.require_if_complete());
        }
        let mut members: BTreeSet<PeerId> = [map.primary].into();
        let stay = backups.links.iter().filter(|link| link.is_member() && !link.is_gone());
        members.extend(stay.map(|link| link.peer.id));
        let is_required = |link: &&Arc<BackupLink>| link.is_member();
        let mut required = backups.links.iter().filter(is_required);
        let is_wanted = self.is_unresolved
            || members != map.members
            // It was to be a member, and is gone again: everything waits for it until the next map.
            || required.any(|link| !map.members.contains(&link.peer.id));
        let epoch = map.epoch.saturating_add(1);
        is_wanted.then_some(PoolMap { epoch, run: *run, members, ..map })
    }

    /// Whether another member may be the primary.
    fn is_in_doubt(&mut self) -> bool {
        let Primary { backups, env, .. } = &*self.primary;
        if backups.links.iter().any(|link| link.is_member() && link.knows_newer_map()) {
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

    /// Takes a map over that was decided; false if another member is the primary by it.
    fn adopt(&mut self, decided: &PoolMap) -> bool {
        let Primary { backups, run, .. } = &*self.primary;
        let map = backups.map();
        if (decided.primary, decided.run) != (map.primary, *run) {
            return false;
        }
        if decided.epoch > map.epoch {
            self.is_unresolved = false;
            backups.set_map(decided);
        }
        true
    }
}
