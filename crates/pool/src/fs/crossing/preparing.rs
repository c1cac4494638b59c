//! This group's part of changes over several groups: checked, prepared, made or abandoned.

use std::collections::BTreeMap;
use std::time::Duration;

use atoll_key::PeerId;
use atoll_vfs::{Errno, FileKind, check_name};

use crate::change::{CrossingId, CrossingPart, PoolChange, PoolPlace};
use crate::crossings::{HeldByCrossings, HoldingPart, MAX_PREPARED};
use crate::disk::{Disk, DiskResult, missing_is_none};
use crate::fs::PoolFs;
use crate::layout::{FileId, GroupNumber, Referral};
use crate::member::{Changing, FoundFile, HeldCrossing};
use crate::messages::{CrossingCall, CrossingReply, FoundName};
use crate::turns::Turn;

/// Fewer names than any disk allows a file that has names in several groups (ext4: 65,000).
const MAX_LINKS: u32 = 60_000;
/// How long a part waits for what another change holds, until it is refused.
const FREE_LIMIT: Duration = Duration::from_millis(500);

/// Locks of a part while it is checked or made.
pub(super) struct LockedPart {
    _moving: Option<Turn>,
    _changing: Changing,
    _turns: Vec<Turn>,
}

impl<D: Disk> PoolFs<D> {
    /// Answers what the primary of another group asks.
    pub(crate) async fn answer_crossing(
        &self,
        from: Option<PeerId>,
        call: CrossingCall,
    ) -> DiskResult<CrossingReply> {
        let may_decide = |coordinator: GroupNumber| {
            let is_of = |from: PeerId| {
                let siblings = self.siblings.as_ref();
                siblings.is_some_and(|siblings| siblings.is_member_of(coordinator, from))
            };
            match coordinator != self.group() && from.is_none_or(is_of) {
                true => Ok(()),
                false => Err(Errno::EPERM),
            }
        };
        match &call {
            CrossingCall::Prepare { part, .. } => may_decide(part.coordinator)?,
            CrossingCall::Outcome { crossing, .. } => {
                let part = self.member.crossings().prepared().get(crossing).cloned();
                part.map_or(Ok(()), |part| may_decide(part.coordinator))?;
            }
            _ => {}
        }
        match call {
            CrossingCall::Look { place } => {
                let found = self.look_here(&place).await?;
                let fresh = self.member.new_id(self.member.home(place.parent)?.slot)?;
                Ok(CrossingReply::Found { found, fresh })
            }
            CrossingCall::Number { parent } => {
                let slot = self.member.home(parent)?.slot;
                Ok(CrossingReply::Number(self.member.new_id(slot)?))
            }
            CrossingCall::Kind { id } => Ok(CrossingReply::Kind(self.stat(id).await?.kind)),
            CrossingCall::Above { id } => self.above(id).await,
            CrossingCall::Prepare { crossing, part } => {
                self.prepare(crossing, part).await.map(|()| CrossingReply::Done)
            }
            CrossingCall::Outcome { crossing, is_made } => {
                self.end_part(crossing, is_made).await.map(|()| CrossingReply::Done)
            }
            CrossingCall::Ask { crossing } => Ok(CrossingReply::Outcome(self.outcome(crossing))),
        }
    }

    /// Whether a change that this group coordinates is made; none if that is not decided.
    fn outcome(&self, crossing: CrossingId) -> Option<bool> {
        // In this order: it is decided before it is not coordinated any more.
        let is_open = self.member.coordinates(crossing);
        let is_decided = self.member.crossings().decided().contains_key(&crossing);
        match (is_decided, is_open) {
            (true, _) => Some(true),
            (false, true) => None,
            (false, false) => Some(false),
        }
    }

    /// What stands under a name of this group, as plans need it.
    pub(super) async fn look_here(&self, place: &PoolPlace) -> DiskResult<Option<FoundName>> {
        let turn = self.free_name(place, FREE_LIMIT).await?;
        self.look_with(turn, place).await
    }

    /// Holds a name of this group until what this returns is dropped, and looks what stands under it.
    pub(super) async fn look_and_hold(
        &self,
        place: &PoolPlace,
    ) -> DiskResult<(Option<FoundName>, HeldCrossing<D>)> {
        let held = HeldByCrossings::of_name(place);
        self.member.until_free(&held, FREE_LIMIT).await?;
        let env = &self.member.env;
        let crossing = CrossingId(env.random_u64(), env.random_u64());
        let held = self.member.hold_for(crossing, HoldingPart::Prepares, held);
        let held = held.ok_or(Errno::EAGAIN)?;
        let turn = self.member.turns.read(place.parent.0).await;
        Ok((self.look_with(turn, place).await?, held))
    }

    /// Looks what stands under a name, with the lock of its directory.
    async fn look_with(&self, _turn: Turn, place: &PoolPlace) -> DiskResult<Option<FoundName>> {
        check_name(&place.name)?;
        let (dir, _) = self.member.directory(place.parent).await?;
        let found = missing_is_none(self.member.find(place.parent, &dir, &place.name).await)?;
        let Some(FoundFile { id, stat, .. }) = found else { return Ok(None) };
        Ok(Some(FoundName::of(id, stat.kind, self.referral(id, stat.kind)?)))
    }

    /// The directories above a file, or what a directory lies in and those above it, up to the root or to one that another group has
    /// a name of.
    async fn above(&self, id: FileId) -> DiskResult<CrossingReply> {
        let mut directories = Vec::new();
        let mut at = id;
        let kind = self.member.record(id)?.ok_or(Errno::ESTALE)?.kind;
        if kind == FileKind::Directory {
            directories.push(id);
        }
        loop {
            if at.is_fixed() {
                return Ok(CrossingReply::Above { directories, via: None });
            }
            let mut places = self.member.places(at)?.into_iter();
            let place = places.find(|place| !place.is_open_name()).ok_or(Errno::ESTALE)?;
            if place.parent == FileId::outside(self.group()) {
                let referral = Referral::of_outside_name(&place.name);
                let via = Some(referral.ok_or(Errno::EIO)?.id);
                return Ok(CrossingReply::Above { directories, via });
            }
            at = place.parent;
            directories.push(at);
        }
    }

    /// The locks of all that changes name.
    pub(super) async fn lock_part(&self, changes: &[PoolChange]) -> DiskResult<LockedPart> {
        // Nothing is sought below a directory that moves.
        let moves = changes.iter().any(|change| match change {
            PoolChange::Rename { from, to, .. } | PoolChange::Exchange { from, to, .. } => {
                from.parent != to.parent
            }
            _ => false,
        });
        let moving = if moves { Some(self.member.move_turn().await) } else { None };
        let changing = self.member.begin_change().await?;
        let mut numbers = Vec::new();
        let mut directories = Vec::new();
        for change in changes {
            let (files, places) = change.needs();
            numbers.extend(files.iter().map(|id| id.0));
            numbers.extend(places.iter().map(|place| place.parent.0));
            directories.extend(places.iter().map(|place| place.parent));
        }
        let turns = self.member.turns.write_all(numbers).await;
        for directory in directories {
            self.member.held().forget_listing(directory);
        }
        Ok(LockedPart { _moving: moving, _changing: changing, _turns: turns })
    }

    /// Whether changes can be made one after the other, by who has their locks: [`Errno::EAGAIN`] if what stands under their names is
    /// not what they were planned from.
    pub(super) async fn check_part(&self, changes: &[PoolChange]) -> DiskResult<()> {
        self.member.check_copies()?;
        self.member.check_growth(changes).await?;
        // What earlier ones have put under names.
        let mut names: BTreeMap<PoolPlace, Option<FileId>> = BTreeMap::new();
        for change in changes {
            match change {
                PoolChange::Make { id, at, .. } => {
                    self.member.check_room()?;
                    self.check_stands(&mut names, at, None).await?;
                    if self.member.record(*id)?.is_some() || !self.member.was_given(*id) {
                        return Err(Errno::EAGAIN);
                    }
                    names.insert(at.clone(), Some(*id));
                }
                PoolChange::Link { id, at, .. } => {
                    self.member.check_room()?;
                    self.check_stands(&mut names, at, None).await?;
                    let stat = self.stat(*id).await?;
                    match (stat.kind, self.seen_links(*id, &stat)) {
                        (FileKind::Directory, _) => return Err(Errno::EPERM),
                        (_, 0) => return Err(Errno::ENOENT),
                        (_, MAX_LINKS..) => return Err(Errno::EMLINK),
                        _ => {}
                    }
                    names.insert(at.clone(), Some(*id));
                }
                PoolChange::Unlink { id, at, .. } => {
                    self.check_stands(&mut names, at, Some(*id)).await?;
                    if self.member.record(*id)?.is_some_and(|of| of.kind == FileKind::Directory) {
                        self.check_empty(*id).await?;
                    }
                    names.insert(at.clone(), None);
                }
                PoolChange::Rename { id, from, to, replaced, .. } => {
                    self.member.check_room()?;
                    self.check_stands(&mut names, from, Some(*id)).await?;
                    self.check_stands(&mut names, to, *replaced).await?;
                    names.insert(from.clone(), None);
                    names.insert(to.clone(), Some(*id));
                }
                PoolChange::Exchange { id, from, other, to, .. } => {
                    self.check_stands(&mut names, from, Some(*id)).await?;
                    self.check_stands(&mut names, to, Some(*other)).await?;
                    names.insert(from.clone(), Some(*other));
                    names.insert(to.clone(), Some(*id));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// That a name stands for this file, or for none.
    async fn check_stands(
        &self,
        names: &mut BTreeMap<PoolPlace, Option<FileId>>,
        place: &PoolPlace,
        expected: Option<FileId>,
    ) -> DiskResult<()> {
        check_name(&place.name)?;
        let (dir, dir_stat) = self.member.directory(place.parent).await?;
        let is_gone = dir_stat.nlink == 0 || self.member.held().is_nameless(place.parent);
        if is_gone {
            return Err(Errno::ENOENT);
        }
        let stands = match names.get(place) {
            Some(stands) => *stands,
            None => {
                let found = self.member.find(place.parent, &dir, &place.name).await;
                missing_is_none(found)?.map(|found| found.id)
            }
        };
        match stands == expected {
            true => Ok(()),
            false => Err(Errno::EAGAIN),
        }
    }

    /// Prepares this group's part. It is answered when all members have it durably; asked again, it is answered so, too.
    async fn prepare(&self, crossing: CrossingId, part: CrossingPart) -> DiskResult<()> {
        let CrossingPart { coordinator, moves, changes } = part;
        let held = HeldByCrossings::of(&changes, moves);
        self.member.until_free(&held, FREE_LIMIT).await?;
        let _locked = self.lock_part(&changes).await?;
        {
            let crossings = self.member.crossings();
            if crossings.prepared().contains_key(&crossing) {
                return Ok(());
            }
            if crossings.prepared().len() >= MAX_PREPARED || crossings.has_ended(crossing) {
                return Err(Errno::EAGAIN);
            }
        }
        // At once: another part without names has no locks that would keep this one out.
        let held = self.member.hold_for(crossing, HoldingPart::Prepares, held);
        let _held = held.ok_or(Errno::EAGAIN)?;
        self.check_part(&changes).await?;
        if changes.iter().any(PoolChange::takes_room) {
            let waiting = self.member.crossings().changes_waiting();
            self.member.check_room_to_prepare(changes.len(), waiting).await?;
        }
        let part = CrossingPart { coordinator, moves, changes };
        self.member.change(PoolChange::Prepared { crossing, part }).await.map(|_| ())
    }

    /// The outcome of a part is known. Told again, nothing happens.
    pub(super) async fn end_part(&self, crossing: CrossingId, is_made: bool) -> DiskResult<()> {
        let part = self.member.crossings().prepared().get(&crossing).cloned();
        let Some(CrossingPart { changes, .. }) = part else { return Ok(()) };
        let _locked = self.lock_part(&changes).await?;
        // The locks of an empty part keep nobody out.
        let _one = self.member.crossing_turn(crossing).await;
        if !self.member.crossings().prepared().contains_key(&crossing) {
            return Ok(());
        }
        let change = match is_made {
            true => PoolChange::PartMade { crossing, changes },
            false => PoolChange::Abandoned { crossing },
        };
        self.member.change(change).await.map(|_| ())
    }
}
