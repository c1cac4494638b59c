//! Changes over several groups ([`crate::crossings`]): how this group coordinates its own.
//!
//! ```text
//! plan      what such a change comes to, group by group
//! preparing this group's part of another one's
//! ```
//!
//! This group *plans* a change from what stands under its names, without locks. Then it holds the names and files of its own part, and
//! the other groups prepare theirs, in the order of their numbers. A group refuses its part if the plan is not true any more, or if another
//! change holds one of its names for too long. This group then lets go of everything, and plans the change again. So no group holds a
//! name for longer than [`PREPARE_LIMIT`] while it waits for another one to prepare.

mod plan;
mod preparing;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use atoll_env::sleep;
use atoll_net::Request;
use atoll_vfs::{Errno, FileKind};
use futures_util::future::{join, join_all};

use self::plan::CrossingPlan;
use super::{CALL_LIMIT, PoolFs};
use crate::change::{CrossingId, CrossingPart, PoolChange};
use crate::crossings::{HeldByCrossings, HoldingPart};
use crate::disk::{Disk, DiskResult};
use crate::layout::{FileId, GroupNumber, Referral};
use crate::member::HeldCrossing;
use crate::messages::{self, CROSSING, CrossingCall, CrossingReply};
use crate::siblings::SiblingGroups;

/// How long another group may take to prepare its part.
const PREPARE_LIMIT: Duration = Duration::from_secs(2);
/// How long another group is asked.
const ASK_LIMIT: Duration = Duration::from_secs(1);
/// Between attempts; a random part of it.
const RETRY_AFTER: Duration = Duration::from_millis(40);
const MAX_RETRY_AFTER: Duration = Duration::from_secs(2);
/// A change is tried for so long, less than a call waits.
const TRY_LIMIT: Duration = Duration::from_secs(CALL_LIMIT.as_secs() - 10);
/// More groups between a directory and the root than there are.
const MAX_HOPS: usize = 1 << 10;

impl<D: Disk> PoolFs<D> {
    /// The other groups, if there are any.
    pub(super) fn siblings(&self) -> Option<&Arc<dyn SiblingGroups>> {
        self.siblings.as_ref().filter(|siblings| siblings.are_several())
    }

    /// The group that has this file system.
    pub(super) fn group(&self) -> GroupNumber {
        self.member.settings.group
    }

    /// What a name of this group stands for, if for a file of another one.
    pub(super) fn referral(&self, id: FileId, kind: FileKind) -> DiskResult<Option<Referral>> {
        match kind {
            FileKind::Symlink => Ok(self.member.record(id)?.and_then(|record| record.referral(id))),
            _ => Ok(None),
        }
    }

    /// Asks the primary of a group: this one itself, if it is its own.
    async fn ask(&self, group: GroupNumber, call: CrossingCall) -> DiskResult<CrossingReply> {
        if group == self.group() {
            return Box::pin(self.answer_crossing(None, call)).await;
        }
        let limit = match call {
            CrossingCall::Prepare { .. } => PREPARE_LIMIT,
            _ => ASK_LIMIT,
        };
        let siblings = self.siblings.as_ref().ok_or(Errno::EIO)?;
        let header = messages::encode(&call);
        let request = Request { method: CROSSING, header, parts: Vec::new() };
        match siblings.call(group, request, limit).await {
            Ok(reply) => {
                let reply = messages::decode::<Result<CrossingReply, i32>>(&reply.header);
                reply.ok_or(Errno::EPROTO)?.map_err(Errno::from_number)
            }
            Err(error) => {
                tracing::debug!("group {group}: {error}");
                Err(Errno::EAGAIN)
            }
        }
    }

    /// Plans a change and makes it, again as long as somebody else is faster.
    pub(super) async fn cross<F>(&self, plan: impl Fn() -> F) -> DiskResult<()>
    where
        F: Future<Output = DiskResult<Option<CrossingPlan>>> + Send,
    {
        let env = self.member.env.clone();
        let until = env.now() + TRY_LIMIT;
        loop {
            let begun = env.now();
            let tried = async {
                match plan().await? {
                    Some(plan) => self.try_to_cross(plan).await,
                    None => Ok(()),
                }
            };
            match tried.await {
                Err(Errno::EAGAIN) if env.now() < until => {}
                done => return done,
            }
            // Those that have met differ by more than it took them to find that out.
            let within = (RETRY_AFTER + env.now().since(begun)).min(MAX_RETRY_AFTER);
            let part = env.random_u64() % within.as_nanos() as u64;
            sleep(&*env, Duration::from_nanos(part)).await;
        }
    }

    async fn try_to_cross(&self, plan: CrossingPlan) -> DiskResult<()> {
        let CrossingPlan { mut parts, moved } = plan;
        let env = &self.member.env;
        let crossing = CrossingId(env.random_u64(), env.random_u64());
        let changes = parts.remove(&self.group()).unwrap_or_default();
        let moves = !moved.is_empty();
        if moves && self.group() != GroupNumber::FIRST {
            // It puts all moves of directories in one order.
            parts.entry(GroupNumber::FIRST).or_default();
        }
        let hold = {
            let held = HeldByCrossings::of(&changes, moves);
            self.member.until_free(&held, PREPARE_LIMIT).await?;
            let _locked = self.lock_part(&changes).await?;
            self.check_part(&changes).await?;
            let coordinates = HoldingPart::Coordinates;
            self.member.hold_for(crossing, coordinates, held).ok_or(Errno::EAGAIN)?
        };
        let others: Vec<GroupNumber> = parts.keys().copied().collect();
        if let Err(errno) = self.prepare_all(crossing, parts, &moved).await {
            self.abandon(crossing, others, hold);
            return Err(errno);
        }
        let groups = others.clone();
        let decided = async {
            let _locked = self.lock_part(&changes).await?;
            // Members may have been left out while the others prepared their parts.
            self.member.check_copies()?;
            self.member.change(PoolChange::Decided { crossing, groups, changes }).await
        };
        match decided.await {
            Ok(_) => {
                drop(hold);
                self.tell_later(crossing, others);
                Ok(())
            }
            Err(errno) if self.member.has_failed() => {
                // It may be decided all the same: whoever is the primary next knows.
                hold.keep();
                Err(errno)
            }
            Err(errno) => {
                self.abandon(crossing, others, hold);
                Err(errno)
            }
        }
    }

    /// Has all other groups prepare their parts; then checks that none of the `moved` directories comes to lie below itself.
    async fn prepare_all(
        &self,
        crossing: CrossingId,
        parts: BTreeMap<GroupNumber, Vec<PoolChange>>,
        moved: &[(FileId, FileId)],
    ) -> DiskResult<()> {
        let moves = !moved.is_empty();
        for (group, changes) in parts {
            let part = CrossingPart { coordinator: self.group(), moves, changes };
            let prepared = self.ask(group, CrossingCall::Prepare { crossing, part }).await;
            if prepared == Err(Errno::ENOSPC)
                && let Some(siblings) = self.siblings()
            {
                siblings.note_full(group);
            }
            prepared?;
        }
        for (moved, into) in moved {
            if self.is_above(*moved, *into).await? {
                return Err(Errno::EINVAL);
            }
        }
        Ok(())
    }

    /// Whether a directory, or what it is known by in another group, lies above another one, or is it.
    async fn is_above(&self, moved: FileId, mut at: FileId) -> DiskResult<bool> {
        for _ in 0..MAX_HOPS {
            let (directories, via) = self.ask_above(at).await?;
            if directories.contains(&moved) || via == Some(moved) {
                return Ok(true);
            }
            match via {
                Some(referral) => at = referral,
                None => return Ok(false),
            }
        }
        Err(Errno::ELOOP)
    }

    /// The directories above a file in its own group, itself if it is one, and the referral that the last of them has in another group.
    async fn ask_above(&self, id: FileId) -> DiskResult<(Vec<FileId>, Option<FileId>)> {
        match self.ask(id.group(), CrossingCall::Above { id }).await {
            Ok(CrossingReply::Above { directories, via }) => Ok((directories, via)),
            Ok(_) => Err(Errno::EPROTO),
            // One that is just moved, by a change that is decided, is not where it was, nor where it will be.
            Err(Errno::ESTALE | Errno::ENOENT) => Err(Errno::EAGAIN),
            Err(errno) => Err(errno),
        }
    }

    /// Asks other groups what is above a file of this one, whose names are theirs.
    pub(crate) async fn learn_above(&self, id: FileId) -> DiskResult<()> {
        let above = self.above_in_other_groups(id).await?;
        self.member.note_above(id, above).await
    }

    /// The directories above a file in all groups but its own, as far as that goes without a way back.
    async fn above_in_other_groups(&self, directory: FileId) -> DiskResult<Vec<FileId>> {
        let (mut at, mut above) = (directory, Vec::new());
        for hop in 0..MAX_HOPS {
            let (directories, via) = self.ask_above(at).await?;
            if hop > 0 {
                above.extend(directories);
            }
            match via {
                Some(referral) => at = referral,
                None => return Ok(above),
            }
        }
        Err(Errno::ELOOP)
    }

    /// How deep a directory of any group lies; 255 if it lies deeper.
    async fn depth_anywhere(&self, directory: FileId) -> DiskResult<u8> {
        if directory.group() == self.group() {
            return self.member.depth(directory);
        }
        let (mut at, mut depth) = (directory, 0usize);
        for _ in 0..MAX_HOPS {
            let (directories, via) = self.ask_above(at).await?;
            depth += directories.len();
            match via {
                Some(referral) => at = referral,
                // The root lies at 0.
                None => return Ok(u8::try_from(depth.saturating_sub(1)).unwrap_or(u8::MAX)),
            }
        }
        Err(Errno::ELOOP)
    }

    /// Tells other groups that a change was not decided. They would find that out by asking, but later.
    fn abandon(&self, crossing: CrossingId, groups: Vec<GroupNumber>, hold: HeldCrossing<D>) {
        drop(hold);
        let fs = self.clone();
        self.member.env.spawn(Box::pin(async move {
            let outcome = CrossingCall::Outcome { crossing, is_made: false };
            join_all(groups.into_iter().map(|group| fs.ask(group, outcome.clone()))).await;
        }));
    }

    fn tell_later(&self, crossing: CrossingId, groups: Vec<GroupNumber>) {
        let fs = self.clone();
        self.member.env.spawn(Box::pin(async move {
            // Those that do not answer are told again, or ask.
            let _ = fs.tell(crossing, groups).await;
        }));
    }

    /// Has other groups make their parts of what was decided here.
    async fn tell(&self, crossing: CrossingId, groups: Vec<GroupNumber>) -> DiskResult<()> {
        let told = groups.into_iter().map(|group| async move {
            self.ask(group, CrossingCall::Outcome { crossing, is_made: true }).await
        });
        for told in join_all(told).await {
            told?;
        }
        let _changing = self.member.begin_change().await?;
        if self.member.crossings().decided().contains_key(&crossing) {
            self.member.change(PoolChange::Told { crossing }).await?;
        }
        Ok(())
    }

    /// Goes on with changes that were decided here and not told, and with parts whose outcome is not known.
    pub(crate) async fn resume_crossings(&self) {
        let (decided, prepared) = {
            let crossings = self.member.crossings();
            (crossings.decided().clone(), crossings.prepared().clone())
        };
        let mut of_coordinators: BTreeMap<GroupNumber, Vec<CrossingId>> = BTreeMap::new();
        for (crossing, part) in prepared {
            of_coordinators.entry(part.coordinator).or_default().push(crossing);
        }
        let asking = of_coordinators.into_iter().map(async |(coordinator, crossings)| {
            for crossing in crossings {
                match self.ask(coordinator, CrossingCall::Ask { crossing }).await {
                    Ok(CrossingReply::Outcome(Some(is_made))) => {
                        let _ = self.end_part(crossing, is_made).await;
                    }
                    Ok(_) => {}
                    // The next ones would wait as long.
                    Err(_) => return,
                }
                if self.member.has_failed() {
                    return;
                }
            }
        });
        let telling = decided.into_iter().map(async |(crossing, groups)| {
            let _ = self.tell(crossing, groups.into_iter().collect()).await;
        });
        join(join_all(asking), join_all(telling)).await;
    }
}
