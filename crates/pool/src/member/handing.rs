//! Files as they are now, for a member that is given all of them (`group/copying/`). On the primary.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use atoll_env::sleep;
use atoll_vfs::{Errno, FileKind, SeekTo};
use bytes::Bytes;

use super::{PoolMember, xattr_names};
use crate::backups::{BackupLink, HandedItem};
use crate::change::{BirthKind, FileBirth, NewTime, PoolChange};
use crate::disk::{Disk, DiskResult};
use crate::index::FileRecord;
use crate::layout::FileId;
use crate::messages::ItemKind;

/// How often a file is sought whose names are just changed.
const MAX_LOOKS: usize = 1000;
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// What a file is to be made as.
pub(crate) struct FileToCopy<N> {
    pub(crate) birth: FileBirth,
    /// None if it is gone.
    pub(crate) node: Option<N>,
    /// How long a regular file is, holes left out.
    pub(crate) size_bytes: u64,
}

impl<D: Disk> PoolMember<D> {
    /// The node of a file; none if it is gone.
    pub(crate) async fn node_now(&self, id: FileId) -> DiskResult<Option<D::Node>> {
        for _ in 0..MAX_LOOKS {
            {
                // A rename takes these locks in the same order.
                let _still = self.whole.read(super::whole::MOVES).await;
                let _turn = self.turns.read(id.0).await;
                if self.record(id)?.is_none() {
                    return Ok(None);
                }
                match self.node(id).await {
                    // A directory above it is just renamed.
                    Err(Errno::ESTALE | Errno::ENOENT) => {}
                    node => return node.map(Some),
                }
            }
            sleep(&*self.env, LOOK_AGAIN).await;
        }
        Err(Errno::ESTALE)
    }

    /// What a file is to be made as that has this record at some change. Of one that is gone since, its kind is all that is known: a
    /// later change removes it.
    pub(crate) async fn file_to_copy(
        &self,
        id: FileId,
        record: FileRecord,
    ) -> DiskResult<FileToCopy<D::Node>> {
        let Some(node) = self.node_now(id).await? else {
            let what = birth_kind(id, record, b"gone".to_vec(), 0);
            let birth =
                FileBirth { what, uid: 0, gid: 0, mode: 0o600, is_listed: false, times: None };
            return Ok(FileToCopy { birth, node: None, size_bytes: 0 });
        };
        let stat = self.disk.stat(&node).await?;
        if stat.kind != record.kind {
            return Err(Errno::EIO);
        }
        let target = match record.kind {
            FileKind::Symlink => self.read_link(&node).await?.to_vec(),
            _ => Vec::new(),
        };
        let times =
            (stat.kind != FileKind::Directory).then(|| (stat.atime.into(), stat.mtime.into()));
        let (uid, gid, mode) = (stat.uid, stat.gid, stat.mode & 0o7777);
        let what = birth_kind(id, record, target, stat.rdev);
        let birth = FileBirth { what, uid, gid, mode, is_listed: false, times };
        let size_bytes = stat.size_bytes.min(stat.blocks_512.saturating_mul(512));
        Ok(FileToCopy { birth, node: Some(node), size_bytes })
    }

    /// A change that gives a directory its attributes, when all is made in it.
    pub(crate) async fn attributes_to_copy(
        &self,
        id: FileId,
        node: &D::Node,
    ) -> DiskResult<PoolChange> {
        let stat = self.disk.stat(node).await?;
        Ok(PoolChange::Attributes {
            id,
            mode: Some(stat.mode & 0o7777),
            uid: Some(stat.uid),
            gid: Some(stat.gid),
            atime: Some(NewTime::To(stat.atime.into())),
            mtime: Some(NewTime::To(stat.mtime.into())),
        })
    }

    /// The extended attributes of a file, but for Atoll's own.
    pub(crate) async fn xattr_names_of(&self, node: &D::Node) -> DiskResult<Vec<Bytes>> {
        xattr_names(&*self.disk, node).await
    }

    /// The next range of a file that is no hole; none if there is none before its end.
    pub(crate) async fn data_after(
        &self,
        file: &D::File,
        offset: u64,
        size_bytes: u64,
    ) -> DiskResult<Option<Range<u64>>> {
        if offset >= size_bytes {
            return Ok(None);
        }
        let start = match self.disk.seek(file, offset, SeekTo::Data).await {
            Ok(start) => start,
            Err(Errno::ENXIO) => return Ok(None),
            // This disk does not say.
            Err(Errno::EINVAL | Errno::EOPNOTSUPP) => return Ok(Some(offset..size_bytes)),
            Err(errno) => return Err(errno),
        };
        let end = match self.disk.seek(file, start, SeekTo::Hole).await {
            Ok(end) => end.min(size_bytes),
            // It was cut off meanwhile.
            Err(Errno::ENXIO) => return Ok(None),
            Err(errno) => return Err(errno),
        };
        Ok((start < end).then_some(start..end))
    }

    /// Gives a learner the attributes of a file, in order with all that changes them. One that is gone is passed over.
    pub(crate) async fn hand_state(&self, link: &Arc<BackupLink>, id: FileId) -> DiskResult<()> {
        let (_turn, node) = {
            let _still = self.whole.read(super::whole::MOVES).await;
            let turn = self.turns.read(id.0).await;
            if self.record(id)?.is_none() || self.held().is_nameless(id) {
                return Ok(());
            }
            match self.node(id).await {
                Ok(node) => (turn, node),
                // A directory above it is just renamed.
                Err(Errno::ESTALE | Errno::ENOENT) => {
                    drop((turn, _still));
                    let Some(node) = self.node_now(id).await? else { return Ok(()) };
                    (self.turns.read(id.0).await, node)
                }
                Err(errno) => return Err(errno),
            }
        };
        if self.record(id)?.is_none() {
            return Ok(());
        }
        // Whatever has changed the file is among these.
        let after = self.changes_so_far();
        let give = |what, bytes| link.give(HandedItem::new(what, bytes));
        let names = xattr_names(&*self.disk, &node).await?;
        let list = names.iter().flat_map(|name| name.iter().chain(&[0]).copied()).collect();
        give(ItemKind::XattrNames { id, after }, list).await?;
        for name in names {
            let value = match self.disk.xattr(&node, &name).await {
                Err(Errno::ENODATA) => continue,
                value => value?,
            };
            give(ItemKind::Xattr { id, after, name: name.to_vec() }, value).await?;
        }
        let stat = self.disk.stat(&node).await?;
        let (uid, gid, mode) = (stat.uid, stat.gid, stat.mode & 0o7777);
        let mtime = (stat.mtime.secs, stat.mtime.nanos);
        give(ItemKind::State { id, after, mode, uid, gid, mtime }, Bytes::new()).await
    }

    /// Room that its disk has used, bytes.
    pub(crate) async fn used_bytes(&self) -> DiskResult<u64> {
        let found = self.disk.stat_fs().await?;
        let blocks = found.blocks.saturating_sub(found.blocks_free);
        Ok(blocks.saturating_mul(u64::from(found.block_size_bytes)))
    }
}

fn birth_kind(id: FileId, record: FileRecord, target: Vec<u8>, rdev: u64) -> BirthKind {
    match (record.kind, record.slot) {
        (FileKind::Regular, _) => BirthKind::Regular,
        (FileKind::Directory, Some(slot)) => BirthKind::Distributed(slot),
        (FileKind::Directory, None) => BirthKind::Directory,
        (FileKind::Symlink, _) => match record.referral(id) {
            Some(referral) => BirthKind::Referral(referral),
            None => BirthKind::Symlink(target),
        },
        (FileKind::Fifo, _) => BirthKind::Fifo,
        (FileKind::Socket, _) => BirthKind::Socket,
        (FileKind::CharDevice, _) => BirthKind::CharDevice(rdev),
        (FileKind::BlockDevice, _) => BirthKind::BlockDevice(rdev),
    }
}
