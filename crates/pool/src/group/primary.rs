//! The primary's links to its backups: begun when a backup is reached, watched by beats, begun anew when it was restarted.
//!
//! A backup that may have lost bytes, for its machine stopped, or of which an earlier run of the primary may have known more, gets
//! all marked ranges again.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use atoll_env::{Env, jittered, sleep};
use atoll_key::PeerId;
use atoll_net::{CallError, Peer, Request, Transport};
use bytes::Bytes;
use futures_util::future::{join_all, select};

use super::MemberStatus;
use crate::backups::{BackupLink, Backups, Item};
use crate::change::PoolChange;
use crate::disk::Disk;
use crate::member::PoolMember;
use crate::messages::{self, BEGIN, BeginSession, GroupSession, HELLO, HelloReply, ItemKind};
use crate::routing::{PoolId, addressed};

/// Between beats.
const BEAT_EVERY: Duration = Duration::from_millis(250);
/// Between attempts to reach a backup; a guess.
const RETRY_EVERY: Duration = Duration::from_millis(250);
const HELLO_LIMIT: Duration = Duration::from_secs(2);
/// A backup makes the changes of its journal again meanwhile; one that is not done by then is asked again.
const BEGIN_LIMIT: Duration = Duration::from_secs(5);

/// See the module.
pub(super) struct Primary<D: Disk> {
    pub(super) member: Arc<PoolMember<D>>,
    backups: Arc<Backups>,
    transport: Arc<dyn Transport>,
    pool: PoolId,
    /// Random bits.
    run: u64,
    /// Backups that have all changes of earlier runs.
    has_all: Mutex<BTreeSet<PeerId>>,
}

impl<D: Disk> Primary<D> {
    /// Begins to work with a member's disk on which all changes of the journal are made.
    pub(super) fn start(
        env: &Env,
        transport: &Arc<dyn Transport>,
        member: Arc<PoolMember<D>>,
        peers: &[Peer],
    ) -> Arc<Primary<D>> {
        let backups = Arc::new(Backups::new(
            env,
            transport,
            (member.settings.pool, peers),
            member.changes_so_far(),
        ));
        // The member is new, and has none.
        let _ = member.backups.set(backups.clone());
        let primary = Arc::new(Primary {
            pool: member.settings.pool,
            run: env.random_u64(),
            transport: transport.clone(),
            has_all: Mutex::default(),
            member,
            backups,
        });
        for link in &primary.backups.links {
            let (primary, link, env) = (Arc::downgrade(&primary), link.clone(), env.clone());
            env.clone().spawn(Box::pin(keep_link(primary, link, env)));
        }
        primary
    }

    pub(super) fn status(&self) -> Vec<MemberStatus> {
        let own = MemberStatus {
            peer: self.transport.local(),
            problem: None,
            applied: self.backups.released(),
            free_bytes: None,
            files_to_mend: 0,
        };
        let backups = self.backups.links.iter().map(|link| MemberStatus {
            peer: link.peer,
            problem: link.problem(),
            applied: link.report().map_or(0, |report| report.applied),
            free_bytes: link.report().map(|report| report.free_bytes),
            files_to_mend: link.files_to_mend(),
        });
        std::iter::once(own).chain(backups).collect()
    }

    /// Begins a session with a backup.
    async fn begin(self: &Arc<Self>, link: &Arc<BackupLink>) -> Result<(), String> {
        let reply = self.call(link.peer, HELLO, Bytes::new(), HELLO_LIMIT).await?;
        let stands: HelloReply =
            messages::decode(&reply).ok_or_else(|| "its answer cannot be read".to_owned())?;
        // No change that is decided from here on is on its way: the link is down.
        let (last, released) = (self.member.changes_so_far(), self.backups.released());
        if stands.applied > last {
            return Err(
                "it has made changes that this disk does not know: this disk was set back \
                 to an older state"
                    .into(),
            );
        }
        let has = stands.last.min(last);
        let lacks = self.changes_after(link, has);
        if lacks.range(..=last).count() as u64 != last - has {
            return Err(
                "it lacks changes that it had: its disk was set back to an older state".into()
            );
        }
        let epoch = stands.epoch.saturating_add(1);
        let session = GroupSession { epoch, primary_run: self.run, backup_run: stands.run };
        let withdrawn = lacks.values().filter_map(|change| match change {
            PoolChange::Withdrawn { order } if *order <= has => Some(*order),
            _ => None,
        });
        let withdrawn = withdrawn.collect();
        let begin = messages::encode(&BeginSession { session, last, released, withdrawn });
        self.call(link.peer, BEGIN, begin, BEGIN_LIMIT).await?;
        let missing: Vec<_> = {
            let retained = self.member.retained();
            let missing = retained.iter().filter(|(order, _)| **order > has);
            missing.map(|(order, change)| (*order, change.encode())).collect()
        };
        if link.may_have_lost(stands.run) {
            link.begin_mend(self.member.marks().all());
        }
        link.resume(session, has);
        let (primary, link) = (Arc::downgrade(self), link.clone());
        self.member.env.spawn(Box::pin(async move {
            let items = missing.into_iter().map(|(order, change)| {
                Arc::new(Item { what: ItemKind::Append { order, change }, bytes: Bytes::new() })
            });
            let handed = join_all(items.map(|item| link.hand(item))).await;
            if handed.iter().all(Result::is_ok)
                && let Some(primary) = primary.upgrade()
            {
                primary.note_has_all(link.peer.id);
            }
        }));
        Ok(())
    }

    /// The changes after `has` that a backup can get: those of earlier runs, and those in its queue.
    fn changes_after(&self, link: &BackupLink, has: u64) -> BTreeMap<u64, PoolChange> {
        let mut changes = self.member.retained().clone();
        let queued = link.queued_changes().into_iter();
        changes.extend(
            queued.filter_map(|(order, change)| Some((order, PoolChange::decode(&change)?))),
        );
        changes.split_off(&(has + 1))
    }

    /// A backup has all changes of earlier runs. When all have, nobody needs them any more.
    fn note_has_all(&self, backup: PeerId) {
        let mut has_all = self.has_all.lock().expect("no holder of this lock panics");
        has_all.insert(backup);
        if has_all.len() == self.backups.links.len() {
            self.member.retained().clear();
        }
    }

    async fn call(
        &self,
        peer: Peer,
        method: u16,
        header: Bytes,
        limit: Duration,
    ) -> Result<Bytes, String> {
        let header = addressed(&self.pool, &header);
        let request = Request { method, header, parts: Vec::new() };
        match self.transport.call(peer, request, limit).await {
            Ok(reply) => Ok(reply.header),
            Err(CallError::Refused(refusal)) => Err(refusal.text),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// Begins sessions with a backup, as long as the primary is at work.
async fn keep_link<D: Disk>(primary: Weak<Primary<D>>, link: Arc<BackupLink>, env: Env) {
    loop {
        let began = match primary.upgrade() {
            None => return,
            Some(primary) => primary.begin(&link).await,
        };
        if let Err(problem) = began {
            link.note_problem(problem);
            sleep(&*env, jittered(&*env, RETRY_EVERY)).await;
            continue;
        }
        if let Some(primary) = primary.upgrade() {
            let (member, link) = (primary.member.clone(), link.clone());
            env.spawn(Box::pin(async move {
                for id in link.all_to_mend() {
                    if let Err(errno) = member.mend(&link, id).await {
                        tracing::warn!("file {id} is not handed over again: {errno}");
                    }
                }
            }));
        }
        while link.session().is_some() {
            if primary.strong_count() == 0 {
                return;
            }
            link.beat();
            let beat = sleep(&*env, BEAT_EVERY);
            select(pin!(link.went_down.notified()), beat).await;
        }
    }
}
