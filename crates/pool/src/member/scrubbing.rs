//! What a scrub does on one member's disk: it looks at copies, moves back and sets aside what people have moved or put there by hand, and
//! makes files again that are gone ([`crate::scrub`]; `group/scrub.rs` drives).
//!
//! ```text
//! D/.atoll/aside/PATH     a file that was changed or put at PATH by hand; PATH~2 is a later one
//! D/.atoll/restored       a file that is made again, until it has everything
//! ```
//!
//! The index says which names and inodes are the pool's: a member's own disk is compared with it, without the others. Bytes and attributes
//! are compared between members.
//!
//! **Invariants.** Nothing that somebody wrote by hand is lost: it is set aside before something takes its place. A file is made again
//! beside the tree, and gets its names when it has all its bytes, durably. Names are put right while no change is made.

use atoll_env::yield_now;
use atoll_vfs::{Errno, FileKind, RenameFlags, XattrFlags};
use bytes::Bytes;

use super::copied::{ignore_refusals, make_directory};
use super::{FileToCopy, PoolMember, whole, xattr_names};
use crate::change::{FileBirth, PoolPlace};
use crate::disk::{Disk, DiskResult, Making, Stat, TimeToSet, missing_is_none};
use crate::index::FileRecord;
use crate::layout::{FileId, Placeholder, Slot};
use crate::marks::MARK_BYTES;
use crate::messages::{NamesOutcome, RestoreStep, ScrubAsk, ScrubReply};
use crate::scrub::{ContentDigest, CopyLook, FileLook, LookAt, UNREADABLE, ZEROS, range_digest};
use crate::turns::Turn;

/// In `.atoll`: what was changed by hand, at the path that it had in the pool.
pub const ASIDE_DIRECTORY: &str = "aside";
/// A file that is made again.
const RESTORED: &[u8] = b"restored";
/// A longer file is not set aside, bytes: it would take as long and as much room again.
const MAX_ASIDE_BYTES: u64 = 1 << 30;
/// Of the disk's free room, what a copy that is set aside may take: one part of so many.
const ASIDE_SHARE: u64 = 4;
/// Directories that are open at a time in a walk through what somebody has put there.
const MAX_OPEN: usize = 512;
/// More names for one file that is set aside are not tried.
const MAX_ASIDE_NAMES: u32 = 100;
/// So that a number fits behind a name.
const MAX_ASIDE_NAME_BYTES: usize = 240;
/// Bytes that are copied at once.
const COPY_BYTES: u64 = 1 << 20;
/// Attributes that belong to a machine, not to a file.
const OF_MACHINES: [&[u8]; 3] = [b"security.selinux", b"security.ima", b"security.evm"];

/// What was found in a directory that the index does not have there.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
struct TidiedNames {
    /// Files of the pool that were moved by hand, and are where they belong again.
    moved_back: u32,
    /// Files that are none of the pool's.
    set_aside: u32,
    /// Names that the disk did not let be put right.
    refused: u32,
}

/// What stands under a name that the index has not.
enum Stranger {
    /// This file of the pool, which has no such name.
    Known(FileId),
    Unknown,
}

/// What a member has of a file that its index knows.
enum FoundCopy<D: Disk> {
    Unknown,
    Lost,
    There(D::Node, Stat),
}

impl<D: Disk> PoolMember<D> {
    /// No change is begun or made until these are dropped, and no checkpoint, whether this member decides changes or follows.
    async fn no_changes(&self) -> [Turn; 2] {
        // Whoever makes a change takes them in the same order.
        [self.whole.write(whole::MOVES).await, self.whole.write(whole::BARRIER).await]
    }

    /// Answers what a scrub asks; bytes go beside the answer.
    pub(crate) async fn answer_scrub(
        &self,
        ask: &ScrubAsk,
        bytes: &[u8],
    ) -> DiskResult<(ScrubReply, Bytes)> {
        let reply = match ask {
            ScrubAsk::Look(files) => {
                let mut looks = Vec::with_capacity(files.len());
                for at in files {
                    looks.push(self.look_at(*at).await?);
                }
                ScrubReply::Looks(looks)
            }
            ScrubAsk::Read { id, offset, len } => {
                let record = self.record(*id)?.ok_or(Errno::ESTALE)?;
                let FileToCopy { birth, node, .. } = self.file_to_copy(*id, record).await?;
                let node = node.ok_or(Errno::ESTALE)?;
                if record.kind != FileKind::Regular {
                    return Ok((ScrubReply::Bytes { size_bytes: 0, birth }, Bytes::new()));
                }
                let file = self.disk.open(&node).await?;
                let size_bytes = self.disk.stat_file(&file).await?.size_bytes;
                let bytes = self.disk.read(&file, *offset, *len as usize).await?;
                return Ok((ScrubReply::Bytes { size_bytes, birth }, bytes));
            }
            ScrubAsk::XattrNames(id) => {
                let names = xattr_names(&*self.disk, &self.node(*id).await?).await?;
                let list = names.iter().flat_map(|name| name.iter().chain(&[0]).copied());
                return Ok((ScrubReply::Attribute(true), list.collect()));
            }
            ScrubAsk::Xattr { id, name } => {
                return match self.disk.xattr(&self.node(*id).await?, name).await {
                    Ok(value) => Ok((ScrubReply::Attribute(true), value)),
                    Err(Errno::ENODATA) => Ok((ScrubReply::Attribute(false), Bytes::new())),
                    Err(errno) => Err(errno),
                };
            }
            ScrubAsk::MendNames(id) => ScrubReply::Names(self.mend_names(*id).await?),
            ScrubAsk::Tidy(id) => {
                let TidiedNames { moved_back, set_aside, refused } =
                    self.tidy_directory(*id).await?;
                ScrubReply::Tidied { moved_back, set_aside, refused }
            }
            ScrubAsk::SetAside(id) => ScrubReply::SetAside(self.set_copy_aside(*id).await?),
            ScrubAsk::Probe(id) => {
                self.probe(*id).await?;
                ScrubReply::Done
            }
            ScrubAsk::Restore { id, step } => {
                self.restore(*id, step, bytes).await?;
                ScrubReply::Done
            }
        };
        Ok((reply, Bytes::new()))
    }

    /// Keeps all directories where they are until this is dropped. A lock of a file is taken after it.
    pub(crate) async fn no_moves(&self) -> Turn {
        self.whole.read(whole::MOVES).await
    }

    /// What this member has of a file.
    async fn look_at(&self, at: LookAt) -> DiskResult<CopyLook> {
        let found = {
            let _still = self.no_moves().await;
            self.find_copy(at.id).await?
        };
        self.look_at_found(found, at).await
    }

    /// As [`PoolMember::look_at`], at names and attributes alone, while no directory moves.
    pub(crate) async fn look_still(&self, id: FileId) -> DiskResult<CopyLook> {
        let found = self.find_copy(id).await?;
        self.look_at_found(found, LookAt { id, first: 0, count: 0 }).await
    }

    async fn find_copy(&self, id: FileId) -> DiskResult<FoundCopy<D>> {
        let Some(record) = self.record(id)? else { return Ok(FoundCopy::Unknown) };
        if self.held().is_nameless(id) {
            return Ok(FoundCopy::Unknown);
        }
        let found = match self.under_all_names(id, record).await? {
            // Its names lead to another inode since a crash.
            None => match self.known_by_attribute(id, record).await? {
                Some(_) => {
                    self.held().drop_node(id);
                    let record = self.record(id)?.ok_or(Errno::ESTALE)?;
                    self.under_all_names(id, record).await?
                }
                None => None,
            },
            found => found,
        };
        match found {
            Some((node, stat)) if stat.kind == record.kind => Ok(FoundCopy::There(node, stat)),
            // It may have been removed just now.
            _ if self.record(id)?.is_none() => Ok(FoundCopy::Unknown),
            _ => {
                if record.kind == FileKind::Directory {
                    // So that what is below it is found to be gone, too.
                    self.held().drop_node(id);
                }
                Ok(FoundCopy::Lost)
            }
        }
    }

    async fn look_at_found(&self, found: FoundCopy<D>, at: LookAt) -> DiskResult<CopyLook> {
        let LookAt { first, count, .. } = at;
        let (node, stat) = match found {
            FoundCopy::Unknown => return Ok(CopyLook::Unknown),
            FoundCopy::Lost => return Ok(CopyLook::Lost),
            FoundCopy::There(node, stat) => (node, stat),
        };
        let digests = self.attribute_digests(&node, &stat).await?;
        let is_regular = stat.kind == FileKind::Regular;
        let size_bytes = if is_regular { stat.size_bytes } else { 0 };
        let mut look = FileLook::new(stat.kind, digests, size_bytes);
        if is_regular {
            look.recorded = self.index.digest(at.id).map_err(|error| self.index_failed(&error))?;
        }
        if is_regular && count > 0 {
            self.add_ranges(&mut look, &node, (first, count)).await?;
        }
        Ok(CopyLook::There(look))
    }

    /// The node of a file that stands under all names that the index has of it; none if one is missing, or another file's.
    async fn under_all_names(
        &self,
        id: FileId,
        record: FileRecord,
    ) -> DiskResult<Option<(D::Node, Stat)>> {
        let mut found = None;
        if let Some(slot) = record.slot {
            found = self.in_its_slot(id, slot, record).await?;
            if found.is_none() {
                return Ok(None);
            }
        }
        let places = self.places(id)?;
        for place in &places {
            match self.at_place(id, record, place).await? {
                Some(stands) => found = found.or(Some(stands)),
                None => return Ok(None),
            }
        }
        Ok(found)
    }

    async fn in_its_slot(
        &self,
        id: FileId,
        slot: Slot,
        record: FileRecord,
    ) -> DiskResult<Option<(D::Node, Stat)>> {
        let Some(dir) = missing_is_none(self.slot_node(slot).await)? else { return Ok(None) };
        let node = self.disk.node(&dir, id.to_string().as_bytes()).await;
        let Some(node) = missing_is_none(node)? else { return Ok(None) };
        let stat = self.disk.stat(&node).await?;
        Ok(is_inode(&stat, record).then_some((node, stat)))
    }

    /// What stands under a name, if it is the file or its placeholder.
    async fn at_place(
        &self,
        id: FileId,
        record: FileRecord,
        place: &PoolPlace,
    ) -> DiskResult<Option<(D::Node, Stat)>> {
        let dir = match self.directory_node(place.parent).await {
            Err(Errno::ESTALE | Errno::ENOENT | Errno::ENOTDIR) => return Ok(None),
            dir => dir?,
        };
        let Some(node) = missing_is_none(self.disk.node(&dir, &place.name).await)? else {
            return Ok(None);
        };
        let stat = self.disk.stat(&node).await?;
        let is_it = match record.slot {
            Some(slot) => {
                stat.kind == FileKind::Symlink
                    && Placeholder::parse(&self.disk.read_node(&node).await?)
                        == Some(Placeholder { slot, id })
            }
            None => is_inode(&stat, record),
        };
        if let (true, Some(slot)) = (is_it, record.slot) {
            return self.in_its_slot(id, slot, record).await;
        }
        Ok(is_it.then_some((node, stat)))
    }

    async fn attribute_digests(
        &self,
        node: &D::Node,
        stat: &Stat,
    ) -> DiskResult<(ContentDigest, Option<ContentDigest>)> {
        let mut hasher = blake3::Hasher::new();
        let mut add = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_be_bytes());
            hasher.update(bytes);
        };
        let is_link = stat.kind == FileKind::Symlink;
        let mode = if is_link { 0 } else { stat.mode & 0o7777 };
        [mode, stat.uid, stat.gid].iter().for_each(|number| add(&number.to_be_bytes()));
        if matches!(stat.kind, FileKind::CharDevice | FileKind::BlockDevice) {
            add(&stat.rdev.to_be_bytes());
        }
        if is_link {
            add(&self.read_link(node).await?);
        }
        let attributes = *hasher.finalize().as_bytes();
        let names = match self.disk.xattrs(node).await {
            Err(Errno::EOPNOTSUPP) => return Ok((attributes, None)),
            Err(errno) => return Err(errno),
            Ok(_) => xattr_names(&*self.disk, node).await?,
        };
        let mut names: Vec<_> =
            names.into_iter().filter(|name| !OF_MACHINES.contains(&&name[..])).collect();
        names.sort_unstable();
        let mut hasher = blake3::Hasher::new();
        for name in names {
            let value = match self.disk.xattr(node, &name).await {
                Err(Errno::ENODATA) => continue,
                value => value?,
            };
            for bytes in [&name, &value] {
                hasher.update(&(bytes.len() as u64).to_be_bytes());
                hasher.update(bytes);
            }
        }
        Ok((attributes, Some(*hasher.finalize().as_bytes())))
    }

    async fn add_ranges(
        &self,
        look: &mut FileLook,
        node: &D::Node,
        (first, count): (u64, u64),
    ) -> DiskResult<()> {
        let size_bytes = look.size_bytes;
        let file = self.disk.open(node).await?;
        let mut data = 0..0;
        for mark in first..first.saturating_add(count) {
            let start = mark.saturating_mul(MARK_BYTES);
            if start >= size_bytes {
                break;
            }
            let end = size_bytes.min(start + MARK_BYTES);
            if data.end <= start {
                data = match self.data_after(&file, start, size_bytes).await {
                    Ok(data) => data.unwrap_or(size_bytes..size_bytes),
                    Err(_) => start..end,
                };
            }
            let digest = if data.start >= end {
                ZEROS
            } else {
                match self.disk.read(&file, start, (end - start) as usize).await {
                    Ok(bytes) => range_digest(&bytes),
                    Err(Errno::EIO) => UNREADABLE,
                    Err(errno) => return Err(errno),
                }
            };
            look.add_range(&digest);
            // A real disk answers at once: the node has peers to answer, too.
            yield_now().await;
        }
        Ok(())
    }

    /// Moves back what was moved out of its place into a directory by hand, and sets aside what is none of the pool's.
    async fn tidy_directory(&self, id: FileId) -> DiskResult<TidiedNames> {
        let mut tidied = TidiedNames::default();
        let dir = match self.node(id).await {
            Err(Errno::ESTALE | Errno::ENOENT) => return Ok(tidied),
            dir => dir?,
        };
        let names = match self.disk.list(&dir).await {
            Err(Errno::ENOENT | Errno::ENOTDIR) => return Ok(tidied),
            names => names?,
        };
        for listed in names {
            let place = PoolPlace::new(id, &listed.name);
            if self.stranger(&dir, &place).await?.is_none() {
                continue;
            }
            if let Err(errno) = self.tidy_name(&dir, &place, &mut tidied).await {
                tracing::warn!("{} cannot be put right: {errno}", self.path(&place)?);
                tidied.refused += 1;
            }
        }
        if tidied != TidiedNames::default() {
            self.held().forget_listing(id);
        }
        Ok(tidied)
    }

    async fn tidy_name(
        &self,
        dir: &D::Node,
        place: &PoolPlace,
        tidied: &mut TidiedNames,
    ) -> DiskResult<()> {
        // A change may just have made it, or be about to remove it.
        let _alone = self.no_changes().await;
        match self.stranger(dir, place).await? {
            None => return Ok(()),
            Some(Stranger::Known(file)) if self.move_back(file, (dir, &place.name)).await? => {
                tidied.moved_back += 1;
                return Ok(());
            }
            Some(Stranger::Known(_) | Stranger::Unknown) => {}
        }
        // Somebody may have made a directory, and moved files of the pool into it.
        let node = self.disk.node(dir, &place.name).await?;
        if self.disk.stat(&node).await?.kind == FileKind::Directory {
            tidied.moved_back += self.move_all_back(node).await?;
        }
        self.set_name_aside(dir, place).await?;
        tidied.set_aside += 1;
        Ok(())
    }

    /// Moves files of the pool back that are somewhere below a directory that is none of it; returns how many.
    async fn move_all_back(&self, top: D::Node) -> DiskResult<u32> {
        let failed = |error| self.index_failed(&error);
        let (mut moved, mut directories) = (0, vec![top]);
        while let Some(dir) = directories.pop() {
            for listed in self.disk.list(&dir).await? {
                let Some(node) = missing_is_none(self.disk.node(&dir, &listed.name).await)? else {
                    continue;
                };
                let stat = self.disk.stat(&node).await?;
                if let Some(id) = self.index.by_inode(stat.ino).map_err(failed)?
                    && self.record(id)?.is_some_and(|record| is_inode(&stat, record))
                    && self.move_back(id, (&dir, &listed.name)).await?
                {
                    moved += 1;
                } else if stat.kind == FileKind::Directory && directories.len() < MAX_OPEN {
                    directories.push(node);
                }
            }
        }
        Ok(moved)
    }

    /// Whether a file can be changed; nothing is.
    async fn probe(&self, id: FileId) -> DiskResult<()> {
        let node = self.node(id).await?;
        let stat = self.disk.stat(&node).await?;
        match stat.kind {
            FileKind::Symlink => Ok(()),
            _ => self.disk.set_mode(&node, stat.mode & 0o7777).await,
        }
    }

    /// What stands under a name, if the index does not have it there.
    async fn stranger(&self, dir: &D::Node, place: &PoolPlace) -> DiskResult<Option<Stranger>> {
        let failed = |error| self.index_failed(&error);
        let Some(stat) = missing_is_none(self.disk.stat_at(dir, &place.name).await)? else {
            return Ok(None);
        };
        let has = |id| self.index.has_place(id, place).map_err(failed);
        if let Some(id) = self.index.by_inode(stat.ino).map_err(failed)?
            && let Some(record) = self.record(id)?
            && is_inode(&stat, record)
        {
            return Ok((!has(id)?).then_some(Stranger::Known(id)));
        }
        if stat.kind == FileKind::Symlink
            && let Some(Placeholder { slot, id }) =
                Placeholder::parse(&self.disk.read_link(dir, &place.name).await?)
            && self.record(id)?.is_some_and(|record| record.slot == Some(slot))
            && has(id)?
        {
            return Ok(None);
        }
        Ok(Some(Stranger::Unknown))
    }

    /// Moves a file from where somebody has moved it by hand to the name that it has lost; false if it has lost none.
    async fn move_back(&self, id: FileId, from: (&D::Node, &[u8])) -> DiskResult<bool> {
        let Some(record) = self.record(id)? else { return Ok(false) };
        let flags = RenameFlags::default();
        if let Some(slot) = record.slot {
            if self.in_its_slot(id, slot, record).await?.is_some() {
                return Ok(false);
            }
            let (to, name) = (self.slot_to_fill(slot).await?, id.to_string().into_bytes());
            if missing_is_none(self.disk.stat_at(&to, &name).await)?.is_some() {
                return Ok(false);
            }
            self.disk.rename(from, (&to, &name), flags).await?;
            self.held().drop_node(id);
            return Ok(true);
        }
        for place in self.places(id)? {
            if self.at_place(id, record, &place).await?.is_some() {
                continue;
            }
            let Ok(to) = self.directory_node(place.parent).await else { continue };
            if self.disk.stat_at(&to, &place.name).await.is_ok() {
                self.set_name_aside(&to, &place).await?;
            }
            self.disk.rename(from, (&to, &place.name), flags).await?;
            self.held().drop_node(id);
            return Ok(true);
        }
        // Another name for it, given by hand.
        if record.kind != FileKind::Directory {
            self.disk.unlink(from.0, from.1).await?;
            return Ok(true);
        }
        Ok(false)
    }

    /// Names of directories above a name, from the root on, and the name.
    async fn aside_directory(&self, names: &[Vec<u8>]) -> DiskResult<D::Node> {
        let own = self.own().await?;
        make_directory(&*self.disk, &own, ASIDE_DIRECTORY.as_bytes()).await?;
        let mut dir = self.disk.node(&own, ASIDE_DIRECTORY.as_bytes()).await?;
        for name in names {
            let mut found = None;
            for beside in aside_names(name) {
                make_directory(&*self.disk, &dir, &beside).await?;
                let node = self.disk.node(&dir, &beside).await?;
                if self.disk.stat(&node).await?.kind == FileKind::Directory {
                    found = Some(node);
                    break;
                }
            }
            dir = found.ok_or(Errno::EEXIST)?;
        }
        Ok(dir)
    }

    /// A directory beside the tree, and a free name there, for what is set aside from a place.
    async fn aside_place(&self, place: &PoolPlace) -> DiskResult<(D::Node, Vec<u8>)> {
        let names = self.path_names(place)?;
        let (name, above) = names.split_last().ok_or(Errno::EIO)?;
        let dir = self.aside_directory(above).await?;
        for beside in aside_names(name) {
            if missing_is_none(self.disk.stat_at(&dir, &beside).await)?.is_none() {
                return Ok((dir, beside));
            }
        }
        Err(Errno::EEXIST)
    }

    /// Moves what stands under a name to where nobody loses it.
    async fn set_name_aside(&self, dir: &D::Node, place: &PoolPlace) -> DiskResult<()> {
        let (aside, name) = self.aside_place(place).await?;
        tracing::warn!(
            "{} is not of the pool, and was put under .atoll/{ASIDE_DIRECTORY}",
            self.path(place)?
        );
        let flags = RenameFlags::default();
        self.disk.rename((dir, &place.name), (&aside, &name), flags).await
    }

    /// Copies a file to where nobody loses it, before other bytes take its place; false if it is too long, or the disk too full.
    async fn set_copy_aside(&self, id: FileId) -> DiskResult<bool> {
        let Some(place) = self.places(id)?.into_iter().next() else { return Err(Errno::ESTALE) };
        let node = self.node(id).await?;
        let file = self.disk.open(&node).await?;
        let stat = self.disk.stat_file(&file).await?;
        let free = self.free_bytes().await?;
        if stat.size_bytes > MAX_ASIDE_BYTES || stat.size_bytes > free / ASIDE_SHARE {
            return Ok(false);
        }
        let (dir, name) = match self.aside_place(&place).await {
            // As often as that on a disk that does not keep what is written to it.
            Err(Errno::EEXIST) => return Ok(false),
            found => found?,
        };
        match self.copy_here((&node, &file), &stat, (&dir, &name)).await {
            Ok(()) => Ok(true),
            Err(errno) => {
                tracing::warn!("a copy of {} cannot be set aside: {errno}", self.path(&place)?);
                match self.disk.unlink(&dir, &name).await {
                    Ok(()) | Err(Errno::ENOENT) => Ok(false),
                    Err(errno) => Err(errno),
                }
            }
        }
    }

    async fn copy_here(
        &self,
        (from_node, from): (&D::Node, &D::File),
        stat: &Stat,
        (dir, name): (&D::Node, &[u8]),
    ) -> DiskResult<()> {
        let disk = &self.disk;
        disk.make(dir, name, Making::File, 0o600).await?;
        let node = disk.node(dir, name).await?;
        let to = disk.open(&node).await?;
        disk.set_len(&to, stat.size_bytes).await?;
        let mut offset = 0;
        while let Some(data) = self.data_after(from, offset, stat.size_bytes).await? {
            offset = data.start;
            while offset < data.end {
                let len = (data.end - offset).min(COPY_BYTES);
                // What the disk does not read is left out: nobody has it.
                match disk.read(from, offset, len as usize).await {
                    Ok(bytes) => self.write_here(&to, offset, &bytes).await?,
                    Err(Errno::EIO) => {}
                    Err(errno) => return Err(errno),
                }
                offset += len;
                yield_now().await;
            }
        }
        for name in xattr_names(&**disk, from_node).await? {
            if let Ok(value) = disk.xattr(from_node, &name).await {
                let flags = XattrFlags::default();
                ignore_refusals(disk.set_xattr(&node, &name, &value, flags).await)?;
            }
        }
        disk.set_owner(&node, Some(stat.uid), Some(stat.gid)).await?;
        disk.set_mode(&node, stat.mode & 0o7777).await?;
        disk.set_times(&node, None, Some(TimeToSet::To(stat.mtime))).await?;
        disk.sync_file(&to, false).await
    }

    /// Puts the names of a file right that is under one of them, or in its slot.
    async fn mend_names(&self, id: FileId) -> DiskResult<NamesOutcome> {
        let _alone = self.no_changes().await;
        let Some(record) = self.record(id)? else { return Ok(NamesOutcome::Right) };
        if self.under_all_names(id, record).await?.is_some() {
            return Ok(NamesOutcome::Right);
        }
        let places = self.places(id)?;
        let mut found = None;
        if let Some(slot) = record.slot {
            found = self.in_its_slot(id, slot, record).await?;
        } else {
            for place in &places {
                found = found.or(self.at_place(id, record, place).await?);
            }
        }
        let Some((node, _)) = found else { return Ok(NamesOutcome::Nowhere) };
        self.give_names(id, record, &node, &places).await?;
        Ok(NamesOutcome::Mended)
    }

    /// Gives a file the names that it lacks.
    async fn give_names(
        &self,
        id: FileId,
        record: FileRecord,
        node: &D::Node,
        places: &[PoolPlace],
    ) -> DiskResult<()> {
        for place in places {
            if self.at_place(id, record, place).await?.is_some() {
                continue;
            }
            let dir = self.directory_node(place.parent).await?;
            if missing_is_none(self.disk.stat_at(&dir, &place.name).await)?.is_some() {
                self.set_name_aside(&dir, place).await?;
            }
            match record.slot {
                Some(slot) => {
                    let target = Placeholder { slot, id }.target(self.home(place.parent)?.steps);
                    self.disk.make(&dir, &place.name, Making::Symlink(&target), 0o777).await?;
                }
                None => self.disk.link(node, &dir, &place.name).await?,
            }
            self.held().forget_listing(place.parent);
        }
        Ok(())
    }

    /// A step of making a file again that is nowhere on this disk.
    async fn restore(&self, id: FileId, step: &RestoreStep, bytes: &[u8]) -> DiskResult<()> {
        let own = self.own().await?;
        let disk = &self.disk;
        match step {
            RestoreStep::Begin { birth, size_bytes } => {
                self.discard_restored(&own).await?;
                if self.free_bytes().await? / 10 * 9 < *size_bytes {
                    return Err(Errno::ENOSPC);
                }
                let Some(place) = self.places(id)?.into_iter().next() else { return Ok(()) };
                let steps = self.home(place.parent)?.steps;
                let stored = birth.what.stored_target(steps).ok_or(Errno::ENAMETOOLONG)?;
                let making = birth.what.making(&stored);
                self.make_at(&own, RESTORED, making, id, birth).await?;
            }
            RestoreStep::Bytes { offset } => {
                let file = disk.open(&disk.node(&own, RESTORED).await?).await?;
                self.write_here(&file, *offset, bytes).await?;
            }
            RestoreStep::Xattr { name } => {
                let node = disk.node(&own, RESTORED).await?;
                let flags = XattrFlags::default();
                ignore_refusals(disk.set_xattr(&node, name, bytes, flags).await)?;
            }
            RestoreStep::Finish { birth, size_bytes } => {
                let node = disk.node(&own, RESTORED).await?;
                self.finish_restored(&node, birth, *size_bytes).await?;
            }
            RestoreStep::End(birth) => {
                let node = disk.node(&own, RESTORED).await?;
                let _alone = self.no_changes().await;
                // Somebody may have written to it since, or has it open as it was.
                let is_quiet = !self.marks().has_any(id) && !self.held().is_open(id);
                let is_watched = self.backups().is_none() || self.marks().is_watched(id);
                let is_regular = birth.what.kind() == FileKind::Regular;
                if is_regular && !(is_quiet && is_watched) {
                    self.discard_restored(&own).await?;
                    return Err(Errno::EBUSY);
                }
                self.put_restored(id, &own, &node, birth).await?;
            }
            RestoreStep::GiveUp => self.discard_restored(&own).await?,
        }
        Ok(())
    }

    async fn free_bytes(&self) -> DiskResult<u64> {
        let found = self.disk.stat_fs().await?;
        Ok(found.blocks_available.saturating_mul(u64::from(found.block_size_bytes)))
    }

    async fn discard_restored(&self, own: &D::Node) -> DiskResult<()> {
        let removed = match missing_is_none(self.disk.stat_at(own, RESTORED).await)? {
            None => return Ok(()),
            Some(stat) if stat.kind == FileKind::Directory => self.disk.rmdir(own, RESTORED).await,
            Some(_) => self.disk.unlink(own, RESTORED).await,
        };
        missing_is_none(removed).map(|_| ())
    }

    async fn finish_restored(
        &self,
        node: &D::Node,
        birth: &FileBirth,
        size_bytes: u64,
    ) -> DiskResult<()> {
        let disk = &self.disk;
        let kind = birth.what.kind();
        // A list among the attributes may have set another mode.
        if kind != FileKind::Symlink {
            disk.set_mode(node, birth.mode).await?;
        }
        if kind == FileKind::Regular {
            let file = disk.open(node).await?;
            disk.set_len(&file, size_bytes).await?;
            if let Some((_, mtime)) = birth.times {
                disk.set_times(node, None, Some(TimeToSet::To(mtime.into()))).await?;
            }
            disk.sync_file(&file, false).await?;
        }
        Ok(())
    }

    /// Puts a file that has everything under its names.
    async fn put_restored(
        &self,
        id: FileId,
        own: &D::Node,
        node: &D::Node,
        birth: &FileBirth,
    ) -> DiskResult<()> {
        let failed = |error| self.index_failed(&error);
        let Some(before) = self.record(id)? else { return self.discard_restored(own).await };
        let places = self.places(id)?;
        let is_there = self.under_all_names(id, before).await?.is_some();
        let Some(first) = places.first().filter(|_| !is_there) else {
            return self.discard_restored(own).await;
        };
        let stat = self.disk.stat(node).await?;
        let flags = RenameFlags::default();
        if let Some(slot) = before.slot {
            let dir = self.slot_to_fill(slot).await?;
            let name = id.to_string().into_bytes();
            if missing_is_none(self.disk.stat_at(&dir, &name).await)?.is_some() {
                self.set_name_aside(&dir, &PoolPlace::new(FileId::ROOT, &name)).await?;
            }
            self.disk.rename((own, RESTORED), (&dir, &name), flags).await?;
        } else {
            let dir = self.directory_node(first.parent).await?;
            if missing_is_none(self.disk.stat_at(&dir, &first.name).await)?.is_some() {
                self.set_name_aside(&dir, first).await?;
            }
            self.disk.rename((own, RESTORED), (&dir, &first.name), flags).await?;
            self.held().forget_listing(first.parent);
        }
        let placeholders = if stat.kind == FileKind::Directory { before.placeholders } else { 0 };
        let record =
            FileRecord::of(&stat, before.slot, placeholders).with_form(birth.what.link_form());
        self.index.replace_inode(id, before, record).map_err(failed)?;
        self.held().drop_node(id);
        self.give_names(id, record, node, &places).await
    }
}

fn is_inode(stat: &Stat, record: FileRecord) -> bool {
    (stat.ino, stat.generation) == (record.ino, record.generation)
}

/// Names for what is set aside: its own, then with numbers behind it.
fn aside_names(name: &[u8]) -> impl Iterator<Item = Vec<u8>> {
    let name = name[..name.len().min(MAX_ASIDE_NAME_BYTES)].to_vec();
    let numbered = {
        let name = name.clone();
        (2..MAX_ASIDE_NAMES)
            .map(move |number| [&name[..], format!("~{number}").as_bytes()].concat())
    };
    std::iter::once(name).chain(numbered)
}
