//! Open files and directories.

use std::sync::Arc;

use atoll_vfs::{DirEntry, Errno, FileKind, Handle, OpenFlags, Opened, Writer};
use bytes::Bytes;

use super::PoolFs;
use crate::disk::{Disk, DiskResult, Listed, Stat};
use crate::held::{ContentsStamp, OpenInPool};
use crate::layout::FileId;

fn contents(stat: &Stat) -> ContentsStamp {
    (stat.size_bytes, stat.mtime, stat.ctime)
}

impl<D: Disk> PoolFs<D> {
    pub(super) async fn open_file(&self, id: FileId, flags: OpenFlags) -> DiskResult<Opened> {
        let node = self.member.node(id).await?;
        let stat = self.member.disk.stat(&node).await?;
        match stat.kind {
            FileKind::Regular => {}
            FileKind::Directory => return Err(Errno::EISDIR),
            FileKind::Symlink => return Err(Errno::ELOOP),
            _ => return Err(Errno::ENXIO),
        }
        self.check_not_removed(id, &stat)?;
        let file = self.member.disk.open(&node).await?;
        if flags.has(OpenFlags::TRUNCATE) {
            let _changing = self.member.begin_change().await?;
            let _turn = self.member.turns.write(id.0).await;
            self.member.check_copies()?;
            self.member.set_length(id, &file, 0).await?;
        }
        let mut held = self.member.held();
        let keep_cache = held.is_as_closed(id, contents(&stat)) && !flags.has(OpenFlags::TRUNCATE);
        let handle = held.open(id, OpenInPool::File(file, flags))?;
        drop(held);
        self.member.note_opened(id);
        Ok(Opened { handle, keep_cache, direct_io: false })
    }

    pub(super) fn opened_file(
        &self,
        id: FileId,
        handle: Handle,
    ) -> DiskResult<(D::File, OpenFlags)> {
        match self.member.held().opened(id, handle)? {
            OpenInPool::File(file, flags) => Ok((file, flags)),
            OpenInPool::Directory(_) => Err(Errno::EISDIR),
        }
    }

    pub(super) async fn read_file(
        &self,
        id: FileId,
        handle: Handle,
        offset: u64,
        len: u32,
    ) -> DiskResult<Bytes> {
        let (file, flags) = self.opened_file(id, handle)?;
        if !flags.reads() {
            return Err(Errno::EBADF);
        }
        let bytes = self.member.disk.read(&file, offset, len as usize).await;
        self.note_seen(id);
        bytes
    }

    pub(super) async fn write_file(
        &self,
        writer: Writer,
        id: FileId,
        handle: Handle,
        offset: u64,
        data: Bytes,
    ) -> DiskResult<u32> {
        let (file, flags) = self.opened_file(id, handle)?;
        if !flags.writes() {
            return Err(Errno::EBADF);
        }
        self.member.check_room()?;
        let member = &self.member;
        // An NFS client or the kernel keeps bytes whose write a program believes done. It sends them again after EAGAIN, and drops them after EROFS.
        let check_copies = || match (member.check_copies(), &writer) {
            (Err(Errno::EROFS), Writer::Mapping | Writer::Cached(_)) => Err(Errno::EAGAIN),
            (checked, _) => checked,
        };
        // Members write a file's bytes in one order.
        let _changing = match member.in_group || member.has_quotas() {
            true => Some(member.begin_change().await?),
            false => None,
        };
        let written = match &writer {
            Writer::AtEnd(_) => {
                let _turn = member.turns.write(id.0).await;
                check_copies()?;
                let end = member.disk.stat_file(&file).await?.size_bytes;
                member.write_bytes(id, &file, end, data.clone()).await?
            }
            Writer::At(_) | Writer::Cached(_) | Writer::Mapping => {
                let _turn = match member.in_group || member.has_quotas() {
                    true => member.turns.write(id.0).await,
                    false => member.turns.read(id.0).await,
                };
                check_copies()?;
                member.write_bytes(id, &file, offset, data.clone()).await?
            }
        };
        match written {
            0 if !data.is_empty() => Err(Errno::ENOSPC),
            written => u32::try_from(written).map_err(|_| Errno::EINVAL),
        }
    }

    pub(super) async fn sync_file(
        &self,
        id: FileId,
        handle: Handle,
        data_only: bool,
    ) -> DiskResult<()> {
        let (file, _) = self.opened_file(id, handle)?;
        self.member.sync_bytes(id, &file, data_only).await
    }

    pub(super) async fn allocate(
        &self,
        id: FileId,
        handle: Handle,
        offset: u64,
        len: u64,
        mode: i32,
    ) -> DiskResult<()> {
        let (file, flags) = self.opened_file(id, handle)?;
        if !flags.writes() {
            return Err(Errno::EBADF);
        }
        if len == 0 {
            return Err(Errno::EINVAL);
        }
        if mode & atoll_vfs::FALLOC_PUNCH_HOLE == 0 {
            self.member.check_room()?;
        }
        let _changing = self.member.begin_change().await?;
        let _turn = self.member.turns.write(id.0).await;
        self.member.check_copies()?;
        self.member.allocate_bytes(id, &file, mode, (offset, len)).await
    }

    pub(super) async fn close_file(&self, id: FileId, handle: Handle) -> DiskResult<()> {
        let (file, _) = self.opened_file(id, handle)?;
        let stat = self.member.disk.stat_file(&file).await;
        let closed = self.member.held().close(id, handle, stat.ok().as_ref().map(contents));
        self.member.end_unlinked_soon(id);
        closed
    }

    pub(super) async fn open_directory(&self, id: FileId) -> DiskResult<Opened> {
        let names = self.names_of(id).await?;
        let handle = self.member.held().open(id, OpenInPool::Directory(names))?;
        Ok(Opened { handle, keep_cache: false, direct_io: false })
    }

    async fn names_of(&self, id: FileId) -> DiskResult<Arc<Vec<Listed>>> {
        let _turn = self.member.turns.read(id.0).await;
        let (dir, stat) = self.member.directory(id).await?;
        // One copy for all who list a directory that does not change.
        let as_of = contents(&stat);
        if let Some(names) = self.member.held().listing(id, as_of) {
            return Ok(names);
        }
        let mut names = match self.member.disk.list(&dir).await {
            // A directory that was removed has no names.
            Err(Errno::ENOENT) => Vec::new(),
            names => names?,
        };
        names.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        let names = Arc::new(names);
        self.member.held().keep_listing(id, as_of, &names);
        Ok(names)
    }

    pub(super) async fn list(
        &self,
        id: FileId,
        handle: Handle,
        cookie: u64,
        limit: usize,
        with_entries: bool,
    ) -> DiskResult<Vec<DirEntry>> {
        let names = match self.member.held().opened(id, handle)? {
            OpenInPool::Directory(names) => names,
            OpenInPool::File(..) => return Err(Errno::ENOTDIR),
        };
        let dir = self.member.node(id).await?;
        let from = usize::try_from(cookie).unwrap_or(usize::MAX).min(names.len());
        let mut listed = Vec::new();
        for (position, name) in names.iter().enumerate().skip(from) {
            if listed.len() >= limit {
                break;
            }
            let cookie = position as u64 + 1;
            let found = {
                let _turn = self.member.turns.read(id.0).await;
                self.member.find(id, &dir, &name.name).await
            };
            let entry = match found {
                // Gone since it was listed.
                Err(Errno::ENOENT) => continue,
                // Its attributes cannot be read: it is listed all the same.
                Err(_) => DirEntry {
                    name: name.name.clone(),
                    kind: name.kind,
                    inode: FileId(u64::MAX).inode(),
                    cookie,
                    entry: None,
                },
                Ok(found) => {
                    let referral = self.referral(found.id, found.stat.kind)?;
                    DirEntry {
                        name: name.name.clone(),
                        kind: referral.map_or(found.stat.kind, |referral| referral.kind),
                        inode: referral.map_or(found.id, |referral| referral.file).inode(),
                        cookie,
                        entry: match with_entries && referral.is_none() {
                            true => Some(self.entry(found.id, &found.stat)?),
                            false => None,
                        },
                    }
                }
            };
            listed.push(entry);
        }
        self.member.keep_up();
        Ok(listed)
    }
}
