//! Calls that are made once ([`crate::calls`]): a call that was done before is answered from what its files are by now.
//!
//! Whether a call was done is asked before it begins, and again when it has failed: the attempt before may have come to its end
//! meanwhile. In between, [`PoolMember::change`](crate::member::PoolMember::change) asks under the locks of the names.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use atoll_vfs::{
    Attr, Caller, Entry, Errno, FileKind, FileSystem, FileTime, Handle, OpenFlags, Opened,
};

use super::PoolFs;
use crate::calls::{CallOrigin, DoneCall, RemembersCalls};
use crate::disk::{Disk, DiskResult};
use crate::layout::FileId;

impl<D: Disk> RemembersCalls for PoolFs<D> {
    fn for_call(&self, origin: CallOrigin) -> Arc<dyn FileSystem> {
        Arc::new(PoolFs { origin: Some(origin), kept: None, ..self.clone() })
    }

    fn keeping(&self, kept: Arc<dyn Any + Send + Sync>) -> Arc<dyn FileSystem> {
        Arc::new(PoolFs { origin: None, kept: Some(kept), ..self.clone() })
    }

    fn has_ended(&self) -> bool {
        self.member.is_closed()
    }
}

impl<D: Disk> PoolFs<D> {
    /// What this file system's call has done before.
    fn done_before(&self) -> DiskResult<Option<DoneCall>> {
        match self.origin {
            Some(origin) => self.member.find_call(origin.id()),
            None => Ok(None),
        }
    }

    /// The answer of a call's work, or what the call has done before.
    async fn work_once<T>(
        &self,
        work: impl Future<Output = DiskResult<T>> + Send,
    ) -> DiskResult<Result<T, DoneCall>> {
        if let Some(done) = self.done_before()? {
            return Ok(Err(done));
        }
        match work.await {
            Ok(answer) => Ok(Ok(answer)),
            Err(errno) => self.done_before()?.map(Err).ok_or(errno),
        }
    }

    /// A call that answers nothing.
    pub(super) async fn once(
        &self,
        work: impl Future<Output = DiskResult<()>> + Send,
    ) -> DiskResult<()> {
        self.work_once(work).await.map(|_| ())
    }

    /// A call that answers the file which it made, or gave a name.
    pub(super) async fn entry_once(
        &self,
        work: impl Future<Output = DiskResult<Entry>> + Send,
    ) -> DiskResult<Entry> {
        match self.work_once(work).await? {
            Ok(entry) => Ok(entry),
            Err(done) => Ok(self.entry_of_done(done).await?.0),
        }
    }

    /// The file that a call made, as it is now, and whether it is still there.
    async fn entry_of_done(&self, done: DoneCall) -> DiskResult<(Entry, bool)> {
        // Its client has given the number of another call to this one.
        let (id, kind) = done.file.ok_or(Errno::EIO)?;
        if self.siblings().is_some() && id.group() != self.group() {
            return Ok((entry_elsewhere(id, kind), true));
        }
        match self.stat(id).await {
            Ok(stat) => Ok((self.entry(id, &stat)?, true)),
            Err(Errno::ESTALE | Errno::ENOENT) => {
                self.member.held().look_up(id);
                Ok((entry_of_gone(id, kind), false))
            }
            Err(errno) => Err(errno),
        }
    }

    /// Creates a file if there is none, and opens it.
    pub(super) async fn create_once(
        &self,
        caller: Caller,
        parent: FileId,
        name: &[u8],
        mode: u32,
        flags: OpenFlags,
    ) -> DiskResult<(Entry, Opened)> {
        let work = self.create_and_open(caller, parent, name, mode, flags);
        let done = match self.work_once(work).await? {
            Ok(created) => return Ok(created),
            Err(done) => done,
        };
        let (entry, is_there) = self.entry_of_done(done).await?;
        let gone = Opened { handle: Handle::NONE, keep_cache: false, direct_io: false };
        if !is_there {
            return Ok((entry, gone));
        }
        // It was made empty, and others may have written since.
        let flags = OpenFlags(flags.0 & !OpenFlags::TRUNCATE);
        match self.open_file(entry.attr.inode.into(), flags).await {
            Ok(opened) => Ok((entry, opened)),
            Err(Errno::ESTALE | Errno::ENOENT) => Ok((entry, gone)),
            Err(errno) => {
                self.member.held().forget(entry.attr.inode.into(), 1);
                Err(errno)
            }
        }
    }
}

/// A file of another group, which knows all else: the caller asks there.
pub(super) fn entry_elsewhere(file: FileId, kind: FileKind) -> Entry {
    entry_of_gone(file, kind)
}

/// A file that was made, and removed since: as one that is open without a name, of which nothing else is known.
fn entry_of_gone(id: FileId, kind: FileKind) -> Entry {
    let attr = Attr {
        inode: id.inode(),
        kind,
        mode: 0,
        nlink: 0,
        uid: 0,
        gid: 0,
        rdev: 0,
        size_bytes: 0,
        blocks_512: 0,
        block_size_bytes: 4096,
        atime: FileTime::default(),
        mtime: FileTime::default(),
        ctime: FileTime::default(),
    };
    Entry { attr, generation: 0, name_ttl: Duration::ZERO, attr_ttl: Duration::ZERO }
}
