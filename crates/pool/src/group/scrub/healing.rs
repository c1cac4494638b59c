//! Giving members what they lack, or have otherwise than it is right.

use atoll_env::timeout;
use atoll_vfs::{FileKind, FileTime};
use bytes::Bytes;
use futures_util::future::join_all;

use super::Scrub;
use super::asking::{LOCKED_LIMIT, MemberCopies, Passed, other_answer, there};
use crate::change::FileBirth;
use crate::disk::{Disk, DiskResult};
use crate::layout::FileId;
use crate::marks::MARK_BYTES;
use crate::messages::{ItemKind, NamesOutcome, RestoreStep, ScrubAsk, ScrubReply};
use crate::scrub::{ContentComparison, ContentDifference, CopyLook, FileLook, LookAt, majority};

impl<D: Disk> Scrub<'_, D> {
    /// Has members that lack a file, or names of it, get them.
    pub(super) async fn bring_back(
        &self,
        id: FileId,
        copies: &[MemberCopies<D>],
        looks: &[CopyLook],
    ) -> Result<Option<u64>, Passed> {
        let is_lost = |at: &usize| looks[*at] == CopyLook::Lost;
        let source = (0..copies.len()).find(|at| !is_lost(at));
        for at in (0..copies.len()).filter(is_lost) {
            let target = &copies[at];
            let name = self.name_of(target);
            self.bring_back_above(id, copies, at).await?;
            match self.mend_names(target, id).await? {
                NamesOutcome::Right => continue,
                NamesOutcome::Mended => {
                    let what = format!("names were gone on {name}, and are there again");
                    self.find(id, &what, |report| report.restored += 1);
                    continue;
                }
                NamesOutcome::Nowhere => {}
            }
            let Some(source) = source else {
                self.find(id, "it is gone on all members", |report| report.unhealed += 1);
                return Ok(Some(0));
            };
            self.restore(id, target, &copies[source]).await?;
            self.find(id, &format!("it was gone on {name}, and is there again"), |report| {
                report.restored += 1
            });
        }
        Ok(None)
    }

    /// Has a member get the directories above a file that it lacks.
    async fn bring_back_above(
        &self,
        id: FileId,
        copies: &[MemberCopies<D>],
        lacking: usize,
    ) -> Result<(), Passed> {
        let mut above = Vec::new();
        let mut at = id;
        while let Some(parent) = self.member.parent_of(at)? {
            above.push(parent);
            at = parent;
        }
        for directory in above.into_iter().rev() {
            let looks = self.look(copies, &[LookAt { id: directory, first: 0, count: 0 }]).await?;
            if looks[lacking][0] != CopyLook::Lost {
                continue;
            }
            if self.mend_names(&copies[lacking], directory).await? != NamesOutcome::Nowhere {
                continue;
            }
            let has_it = |at: &usize| matches!(looks[*at][0], CopyLook::There(_));
            let Some(source) = (0..copies.len()).find(has_it) else {
                return Err(Passed::InUse);
            };
            self.restore(directory, &copies[lacking], &copies[source]).await?;
        }
        Ok(())
    }

    /// Has a member make a file again that is nowhere on its disk, from another one's.
    async fn restore(
        &self,
        id: FileId,
        target: &MemberCopies<D>,
        source: &MemberCopies<D>,
    ) -> Result<(), Passed> {
        let restored = self.restore_from(id, target, source).await;
        if restored.is_err() {
            // What was written of it takes room.
            drop(self.restore_step(target, (id, 0), RestoreStep::GiveUp, Bytes::new()).await);
        }
        restored
    }

    async fn restore_from(
        &self,
        id: FileId,
        target: &MemberCopies<D>,
        source: &MemberCopies<D>,
    ) -> Result<(), Passed> {
        let (size_bytes, birth, _) = self.read(source, id, (0, 0)).await?;
        let is_regular = birth.what.kind() == FileKind::Regular;
        let is_own = matches!(target, MemberCopies::Own(_));
        let is_open = is_own && self.member.held().is_open(id);
        if is_regular && (is_open || !self.member.marks().watch(id)) {
            return Err(Passed::InUse);
        }
        let after = self.member.changes_so_far();
        let give = |step, bytes| self.restore_step(target, (id, after), step, bytes);
        give(RestoreStep::Begin { birth, size_bytes }, Bytes::new()).await?;
        for (name, value) in self.read_xattrs(source, id).await? {
            give(RestoreStep::Xattr { name }, value).await?;
        }
        let mut offset = 0;
        let (size_bytes, birth) = loop {
            let since = self.primary.env.now();
            let (size_bytes, birth, bytes) = self.read(source, id, (offset, MARK_BYTES)).await?;
            if bytes.iter().any(|byte| *byte != 0) {
                give(RestoreStep::Bytes { offset }, bytes).await?;
            }
            offset += MARK_BYTES;
            if offset >= size_bytes || !is_regular {
                break (size_bytes, birth);
            }
            self.pace(since).await?;
        };
        give(RestoreStep::Finish { birth: birth.clone(), size_bytes }, Bytes::new()).await?;
        // No byte is written to it before its names are there. On this member, its own locks see to that.
        let _turn = match is_own {
            true => None,
            false => Some(self.member.turns.write(id.0).await),
        };
        if is_regular && !self.member.marks().is_watched(id) {
            return Err(Passed::InUse);
        }
        let after = self.member.changes_so_far();
        self.restore_step(target, (id, after), RestoreStep::End(birth), Bytes::new()).await
    }

    /// Gives members that have other attributes of a file those that it should have.
    pub(super) async fn heal_attributes(
        &self,
        id: FileId,
        copies: &[MemberCopies<D>],
    ) -> Result<(), Passed> {
        let good = {
            // Nobody changes them meanwhile. A rename takes these locks in the same order.
            let _still = self.member.no_moves().await;
            let _turn = self.member.turns.write(id.0).await;
            let after = self.member.changes_so_far();
            let looks = copies.iter().map(|of| async {
                match of {
                    MemberCopies::Own(member) => Ok(member.look_still(id).await?),
                    MemberCopies::Other(..) => {
                        let ask = ScrubAsk::Look(vec![LookAt { id, first: 0, count: 0 }]);
                        match self.ask_locked(of, after, ask).await? {
                            (ScrubReply::Looks(looks), _) if looks.len() == 1 => {
                                Ok(looks[0].clone())
                            }
                            _ => Err(other_answer()),
                        }
                    }
                }
            });
            let looks: Result<Vec<CopyLook>, Passed> = join_all(looks).await.into_iter().collect();
            let looks = looks?;
            let looks: Vec<&FileLook> = looks.iter().filter_map(there).collect();
            if looks.len() != copies.len() || looks.iter().all(|look| look.is_alike(looks[0])) {
                return Ok(());
            }
            let stands = |look: &&FileLook| Some((look.kind, look.attributes, look.extended));
            let good = majority(looks.iter().map(stands)).unwrap_or(0);
            if good != 0 {
                self.take_attributes(id, &copies[good]).await?;
            }
            let is_other = |at: &usize| !looks[*at].is_alike(looks[good]);
            (0..copies.len()).filter(is_other).collect::<Vec<_>>()
        };
        for at in good {
            if let MemberCopies::Other(link, _) = &copies[at] {
                // An item that the disk refuses would end the member's part.
                self.probe(id, &copies[at]).await?;
                let handed = self.member.hand_state(link, id).await;
                handed.map_err(|_| Passed::Away("its session has ended".into()))?;
            }
            let what = format!(
                "its attributes were changed on {}, and set back",
                self.name_of(&copies[at])
            );
            self.find(id, &what, |report| report.healed += 1);
        }
        Ok(())
    }

    /// That a member can change its copy.
    async fn probe(&self, id: FileId, copies: &MemberCopies<D>) -> Result<(), Passed> {
        let after = self.primary.backups.released();
        match self.ask(copies, after, ScrubAsk::Probe(id)).await? {
            (ScrubReply::Done, _) => Ok(()),
            _ => Err(other_answer()),
        }
    }

    /// Gives this member the attributes of a file that another one has. The caller has the file's lock.
    async fn take_attributes(&self, id: FileId, source: &MemberCopies<D>) -> Result<(), Passed> {
        let member = self.member;
        let node = member.node(id).await?;
        let after = 0;
        let reads = async {
            let attributes = self.read_xattrs(source, id).await?;
            let (_, birth, _) = self.read(source, id, (0, 0)).await?;
            Ok::<_, Passed>((attributes, birth))
        };
        let read = timeout(&*self.primary.env, LOCKED_LIMIT, reads).await;
        let (attributes, birth) = read.map_err(|_| other_answer())??;
        let list: Vec<u8> =
            attributes.iter().flat_map(|(name, _)| name.iter().chain(&[0]).copied()).collect();
        member.set_state(&node, &ItemKind::XattrNames { id, after }, &list).await?;
        for (name, value) in attributes {
            member.set_state(&node, &ItemKind::Xattr { id, after, name }, &value).await?;
        }
        let FileBirth { uid, gid, mode, .. } = birth;
        let mtime = member.disk.stat(&node).await?.mtime;
        let mtime = (mtime.secs, mtime.nanos);
        let state = ItemKind::State { id, after, mode, uid, gid, mtime };
        Ok(member.set_state(&node, &state, &[]).await?)
    }

    /// Gives members that have other bytes of a file the right ones; false if one has no room to set its own aside.
    pub(super) async fn heal_contents(
        &self,
        id: FileId,
        copies: &[MemberCopies<D>],
        comparison: &ContentComparison,
        difference: &ContentDifference,
    ) -> Result<bool, Passed> {
        let mut kept = Vec::new();
        for at in &difference.wrong {
            if self.set_aside(&copies[*at], id).await? {
                kept.push(*at);
                self.note(|report| report.set_aside += 1);
            } else {
                let what = format!(
                    "its bytes are not right on {}, where no room is to set them aside",
                    self.name_of(&copies[*at])
                );
                self.find(id, &what, |report| report.unhealed += 1);
            }
        }
        // The others get the right bytes from this member.
        if difference.wrong.contains(&0) {
            if !kept.contains(&0) {
                return Ok(false);
            }
            self.heal_own(id, copies, comparison, difference).await?;
            self.found_wrong(id, &copies[0]);
        }
        for at in kept.iter().filter(|at| **at != 0) {
            let MemberCopies::Other(link, _) = &copies[*at] else { continue };
            self.probe(id, &copies[*at]).await?;
            let is_wrong = |(mark, good): (&u64, &usize)| {
                comparison.has_other(*mark, *good, *at).then_some(*mark)
            };
            let marks: Vec<u64> = difference.right.iter().filter_map(is_wrong).collect();
            // One that is too long, or too short by nothing but zeros.
            let marks = if marks.is_empty() { vec![0] } else { marks };
            for mark in marks {
                let mended = self.member.mend_range(link, id, mark).await;
                mended.map_err(|_| Passed::Away("its session has ended".into()))?;
            }
            self.found_wrong(id, &copies[*at]);
        }
        self.sync(id).await?;
        Ok(kept.len() == difference.wrong.len())
    }

    fn found_wrong(&self, id: FileId, copies: &MemberCopies<D>) {
        let name = self.name_of(copies);
        let what = format!("it had other bytes on {name}, which were set aside; it is healed");
        self.find(id, &what, |report| report.healed += 1);
    }

    /// Gives this member the right bytes of a file.
    async fn heal_own(
        &self,
        id: FileId,
        copies: &[MemberCopies<D>],
        comparison: &ContentComparison,
        difference: &ContentDifference,
    ) -> Result<(), Passed> {
        let ContentDifference { size_of, right, .. } = difference;
        let ranges = right.iter().filter(|(mark, good)| comparison.has_other(**mark, **good, 0));
        let mut ranges: Vec<(u64, usize)> = ranges.map(|(mark, good)| (*mark, *good)).collect();
        if ranges.is_empty() {
            ranges.push((0, *size_of));
        }
        for (mark, good) in ranges {
            // No write of the file is under way. A rename takes these locks in the same order.
            let _still = self.member.no_moves().await;
            let _turn = self.member.turns.write(id.0).await;
            if !self.member.marks().is_watched(id) {
                return Err(Passed::InUse);
            }
            let offset = mark.saturating_mul(MARK_BYTES);
            let ask = ScrubAsk::Read { id, offset, len: MARK_BYTES as u32 };
            let MemberCopies::Other(..) = &copies[good] else { continue };
            let (size_bytes, mtime, bytes) = match self.ask_locked(&copies[good], 0, ask).await? {
                (ScrubReply::Bytes { size_bytes, birth }, bytes) => {
                    let mtime: FileTime =
                        birth.times.map_or_else(Default::default, |(_, mtime)| mtime.into());
                    (size_bytes, (mtime.secs, mtime.nanos), bytes)
                }
                _ => return Err(other_answer()),
            };
            let node = self.member.node(id).await?;
            let file = self.member.disk.open(&node).await?;
            self.member
                .mend_here((&node, &file), (offset.min(size_bytes), size_bytes), mtime, &bytes)
                .await?;
        }
        Ok(())
    }

    /// Makes a file durable on all members.
    async fn sync(&self, id: FileId) -> DiskResult<()> {
        let member = self.member;
        let node = member.node(id).await?;
        let file = member.disk.open(&node).await?;
        let mtime = member.disk.stat_file(&file).await?.mtime;
        let after = self.primary.backups.needed_by(id);
        let what = ItemKind::Sync { id, after, mtime: (mtime.secs, mtime.nanos) };
        self.primary.backups.hand(what, Bytes::new()).await?;
        member.disk.sync_file(&file, false).await
    }
}
