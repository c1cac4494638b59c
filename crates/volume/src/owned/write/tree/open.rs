//! What the kernel holds and has open, reading and writing.

use std::sync::Arc;

use atoll_vfs::{
    Errno, FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, FALLOC_ZERO_RANGE, FileKind, FileTime, OpenFlags,
    SetAttr, Writer,
};
use bytes::Bytes;

use super::journal::Record;
use super::{Body, Loaded, Place, ROOT, Stop, Tree};
use crate::blocks::content::{Layout, Piece, Stored};
use crate::format::{DirectoryRef, MAX_FILE_BYTES};

/// An open file, or directory.
#[derive(Clone, Debug)]
pub(super) enum Open {
    File(OpenFlags),
    Directory(OpenDirectory),
}

/// What a name means: a file and its kind, or that it is gone.
pub(in crate::owned::write) type Meaning = Option<(u64, FileKind)>;

/// A directory as it was when its listing began.
#[derive(Clone, Debug)]
pub(in crate::owned::write) struct OpenDirectory {
    pub(in crate::owned::write) stored: DirectoryRef,
    /// Names that differ from what is stored, in order: what they mean, or that they are gone.
    pub(in crate::owned::write) changes: Arc<Vec<(Bytes, Meaning)>>,
}

impl Tree {
    /// Counts a lookup.
    pub(in crate::owned::write) fn hold(&mut self, inode: u64) {
        self.nodes.look_up(inode);
    }

    /// Takes back lookups.
    pub(in crate::owned::write) fn forget(&mut self, inode: u64, count: u64) {
        let (nodes, left) = self.table();
        nodes.forget(inode, count, left);
    }

    /// The directory above one, counted as one lookup.
    pub(in crate::owned::write) fn parent(&mut self, inode: u64) -> Result<u64, Stop> {
        self.names(inode)?;
        let parent = match self.node(inode)?.place {
            Place::Named(parent, _) => parent,
            Place::Removed => return Err(Errno::ESTALE.into()),
            Place::Root | Place::Linked => ROOT,
        };
        self.hold(parent);
        Ok(parent)
    }

    /// The target of a symbolic link.
    pub(in crate::owned::write) fn target(&self, inode: u64) -> Result<Bytes, Stop> {
        match &self.node(inode)?.body {
            Body::Symlink(target) => Ok(target.clone()),
            _ => Err(Errno::EINVAL.into()),
        }
    }

    /// Opens a regular file.
    pub(in crate::owned::write) fn open_file(
        &mut self,
        inode: u64,
        flags: OpenFlags,
        now: FileTime,
        loaded: &Loaded,
    ) -> Result<u64, Stop> {
        match self.node(inode)?.body {
            Body::File(_) => {}
            Body::Directory(_) => return Err(Errno::EISDIR.into()),
            Body::Symlink(_) => return Err(Errno::ELOOP.into()),
            Body::Special(..) => return Err(Errno::ENXIO.into()),
        }
        if flags.has(OpenFlags::TRUNCATE) {
            let empty = SetAttr { size_bytes: Some(0), ..SetAttr::default() };
            self.set(inode, empty, now, loaded)?;
        }
        Ok(self.nodes.open(inode, Open::File(flags))?)
    }

    /// Opens a directory as it is now.
    pub(in crate::owned::write) fn open_directory(&mut self, inode: u64) -> Result<u64, Stop> {
        let open = self.directory_now(inode)?;
        Ok(self.nodes.open(inode, Open::Directory(open))?)
    }

    fn directory_now(&self, inode: u64) -> Result<OpenDirectory, Stop> {
        let names = self.names(inode)?;
        let meaning = |inode: u64| (inode, self.nodes[inode].kind());
        let changes = names.changes().into_iter();
        let changes = changes.map(|(name, slot)| (name, slot.map(meaning))).collect();
        Ok(OpenDirectory { stored: names.stored, changes: Arc::new(changes) })
    }

    /// Lists an open directory from its beginning: as it is now (POSIX, `rewinddir`).
    pub(in crate::owned::write) fn rewind_directory(
        &mut self,
        inode: u64,
        handle: u64,
    ) -> Result<OpenDirectory, Stop> {
        self.opened_directory(inode, handle)?;
        let now = self.directory_now(inode)?;
        *self.nodes.opened_mut(inode, handle)? = Open::Directory(now.clone());
        Ok(now)
    }

    /// The open directory of a handle.
    pub(in crate::owned::write) fn opened_directory(
        &self,
        inode: u64,
        handle: u64,
    ) -> Result<OpenDirectory, Stop> {
        match self.nodes.opened(inode, handle)? {
            Open::Directory(open) => Ok(open.clone()),
            Open::File(_) => Err(Errno::ENOTDIR.into()),
        }
    }

    fn opened(&self, inode: u64, handle: u64) -> Result<OpenFlags, Stop> {
        match self.nodes.opened(inode, handle)? {
            Open::File(flags) => Ok(*flags),
            Open::Directory(_) => Err(Errno::EBADF.into()),
        }
    }

    /// Whether a handle is of an open file that may be written.
    pub(in crate::owned::write) fn is_writable(
        &self,
        inode: u64,
        handle: u64,
    ) -> Result<bool, Stop> {
        Ok(self.opened(inode, handle)?.writes())
    }

    /// That a handle is of an open file that may be written.
    fn check_writes(&self, inode: u64, handle: u64) -> Result<(), Stop> {
        match self.opened(inode, handle)?.writes() {
            true => Ok(()),
            false => Err(Errno::EBADF.into()),
        }
    }

    /// Ends an open.
    pub(in crate::owned::write) fn close(&mut self, inode: u64, handle: u64) -> Result<(), Stop> {
        let (nodes, left) = self.table();
        nodes.close(inode, handle, left)?;
        Ok(())
    }

    /// Where the bytes of a read are, and what the stored file is.
    pub(in crate::owned::write) fn read(
        &self,
        inode: u64,
        handle: u64,
        offset: u64,
        len: u32,
    ) -> Result<(Vec<Piece>, Stored), Stop> {
        if !self.opened(inode, handle)?.reads() {
            return Err(Errno::EBADF.into());
        }
        let Body::File(content) = &self.node(inode)?.body else { return Err(Errno::EBADF.into()) };
        let end = offset.saturating_add(u64::from(len)).min(content.size_bytes);
        let pieces = if offset < end { content.pieces(offset..end) } else { Vec::new() };
        Ok((pieces, content.stored))
    }

    /// What a search for data or a hole needs at `offset`.
    pub(in crate::owned::write) fn layout(
        &self,
        inode: u64,
        handle: u64,
        offset: u64,
    ) -> Result<Layout, Stop> {
        self.opened(inode, handle)?;
        let Body::File(content) = &self.node(inode)?.body else { return Err(Errno::EINVAL.into()) };
        Ok(content.layout(offset))
    }

    /// Writes into a file; returns how many bytes were taken.
    pub(in crate::owned::write) fn write(
        &mut self,
        writer: Writer,
        (inode, handle): (u64, u64),
        offset: u64,
        data: &Bytes,
        now: FileTime,
        loaded: &Loaded,
    ) -> Result<u32, Stop> {
        self.check_writes(inode, handle)?;
        let offset = match (writer, &self.node(inode)?.body) {
            (Writer::AtEnd(_), Body::File(content)) => content.size_bytes,
            _ => offset,
        };
        self.write_at(inode, offset, data, now, loaded)?;
        Ok(u32::try_from(data.len()).expect("a write is below 4 GiB"))
    }

    /// Writes into a file, open or not.
    pub(super) fn write_at(
        &mut self,
        inode: u64,
        offset: u64,
        data: &Bytes,
        now: FileTime,
        loaded: &Loaded,
    ) -> Result<(), Stop> {
        let is_recorded = self.note_place(inode);
        self.change_content(inode, |content| content.write(offset, data, &loaded.content))?;
        self.wrote(inode, now)?;
        self.record(is_recorded, || Record::Write {
            inode,
            offset,
            data: data.clone(),
            now: now.into(),
        });
        Ok(())
    }

    fn wrote(&mut self, inode: u64, now: FileTime) -> Result<(), Stop> {
        let node = self.node_mut(inode)?;
        node.mtime = now;
        node.ctime = now;
        self.touch(inode);
        Ok(())
    }

    /// Makes holes or zeros, or lengthens a file. No space is reserved.
    pub(in crate::owned::write) fn fallocate(
        &mut self,
        (inode, handle): (u64, u64),
        range: (u64, u64),
        mode: i32,
        now: FileTime,
        loaded: &Loaded,
    ) -> Result<(), Stop> {
        let keeps_size = mode & FALLOC_KEEP_SIZE != 0;
        match mode & !FALLOC_KEEP_SIZE {
            0 | FALLOC_ZERO_RANGE => {}
            FALLOC_PUNCH_HOLE if keeps_size => {}
            _ => return Err(Errno::EOPNOTSUPP.into()),
        }
        self.check_writes(inode, handle)?;
        self.allocate(inode, range, mode, now, loaded)
    }

    /// As [`fallocate`](Self::fallocate), with a mode that is known, of a file that is open or not.
    pub(super) fn allocate(
        &mut self,
        inode: u64,
        (offset, len): (u64, u64),
        mode: i32,
        now: FileTime,
        loaded: &Loaded,
    ) -> Result<(), Stop> {
        let keeps_size = mode & FALLOC_KEEP_SIZE != 0;
        let end = offset.checked_add(len).filter(|_| len > 0).ok_or(Errno::EINVAL)?;
        if mode & FALLOC_PUNCH_HOLE == 0 && end > MAX_FILE_BYTES {
            return Err(Errno::EFBIG.into());
        }
        let is_recorded = self.note_place(inode);
        self.change_content(inode, |content| {
            if mode & !FALLOC_KEEP_SIZE != 0 {
                content.punch(offset..end, &loaded.content)?;
            }
            if !keeps_size && end > content.size_bytes {
                content.resize(end, &loaded.content)?;
            }
            Ok(())
        })?;
        self.wrote(inode, now)?;
        self.record(is_recorded, || Record::Allocate { inode, offset, len, mode, now: now.into() });
        Ok(())
    }
}
