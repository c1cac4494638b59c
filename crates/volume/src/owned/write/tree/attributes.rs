//! Attributes of files, and extended ones.

use std::sync::Arc;

use atoll_vfs::{Errno, FileTime, SetAttr, SetTime, XattrFlags};
use bytes::Bytes;

use super::journal::{Record, Value};
use super::{Body, Loaded, NodeXattrs, Stop, Tree, Xattrs};
use crate::format::xattrs;

impl NodeXattrs {
    /// Bytes in memory that are not stored yet.
    pub(super) fn held_bytes(&self) -> u64 {
        match self {
            NodeXattrs::Stored(_) => 0,
            NodeXattrs::Changed(all) => all.iter().map(|(n, v)| (n.len() + v.len()) as u64).sum(),
        }
    }
}

impl Tree {
    /// Changes attributes, and the length of a file.
    pub(in crate::owned::write) fn set(
        &mut self,
        inode: u64,
        changes: SetAttr,
        now: FileTime,
        loaded: &Loaded,
    ) -> Result<(), Stop> {
        if changes.size_bytes.is_some() {
            match self.node(inode)?.body {
                Body::File(_) => {}
                Body::Directory(_) => return Err(Errno::EISDIR.into()),
                _ => return Err(Errno::EINVAL.into()),
            }
        }
        let is_recorded = self.note_place(inode);
        if let Some(size_bytes) = changes.size_bytes {
            self.change_content(inode, |content| content.resize(size_bytes, &loaded.content))?;
        }
        let chosen = |time| match time {
            SetTime::Now => now,
            SetTime::To(time) => time,
        };
        let SetAttr { mode, uid, gid, size_bytes, .. } = changes;
        let (atime, mtime) = (changes.atime.map(chosen), changes.mtime.map(chosen));
        let node = self.node_mut(inode)?;
        if changes == SetAttr::default() {
            return Ok(());
        }
        if changes.size_bytes.is_some() {
            node.mtime = now;
        }
        node.mode = mode.map_or(node.mode, |mode| mode & 0o7777);
        node.uid = uid.unwrap_or(node.uid);
        node.gid = gid.unwrap_or(node.gid);
        node.atime = atime.unwrap_or(node.atime);
        node.mtime = mtime.unwrap_or(node.mtime);
        node.ctime = now;
        self.touch(inode);
        self.record(is_recorded, || {
            let (atime, mtime) = (atime.map(Into::into), mtime.map(Into::into));
            Record::Set { inode, mode, uid, gid, size_bytes, atime, mtime, now: now.into() }
        });
        if size_bytes == Some(0) {
            self.note_emptied(inode);
        }
        Ok(())
    }

    /// All extended attributes.
    pub(in crate::owned::write) fn xattrs(
        &self,
        inode: u64,
        loaded: &Loaded,
    ) -> Result<Arc<Xattrs>, Stop> {
        match &self.node(inode)?.xattrs {
            NodeXattrs::Changed(xattrs) => Ok(xattrs.clone()),
            NodeXattrs::Stored(None) => Ok(Arc::default()),
            NodeXattrs::Stored(Some(hash)) => Ok(Arc::new(loaded.xattrs(*hash)?.clone())),
        }
    }

    /// Sets an extended attribute.
    pub(in crate::owned::write) fn set_xattr(
        &mut self,
        inode: u64,
        name: &[u8],
        value: Bytes,
        flags: XattrFlags,
        now: FileTime,
        loaded: &Loaded,
    ) -> Result<(), Stop> {
        xattrs::check_name(name).map_err(|_| Errno::EOPNOTSUPP)?;
        if name.len() > atoll_vfs::MAX_NAME_BYTES {
            return Err(Errno::ERANGE.into());
        }
        let mut all = self.xattrs(inode, loaded)?;
        match all.contains_key(name) {
            true if flags.create => return Err(Errno::EEXIST.into()),
            false if flags.replace => return Err(Errno::ENODATA.into()),
            _ => {}
        }
        let changed = Arc::make_mut(&mut all);
        changed.insert(Bytes::copy_from_slice(name), value.clone());
        let sorted: Vec<_> = changed.iter().map(|(n, v)| (n.clone(), v.clone())).collect();
        if xattrs::encode(&sorted).is_none() {
            return Err(Errno::ENOSPC.into());
        }
        self.put_xattrs(inode, all, (name, Some(value)), now)
    }

    /// Removes an extended attribute.
    pub(in crate::owned::write) fn remove_xattr(
        &mut self,
        inode: u64,
        name: &[u8],
        now: FileTime,
        loaded: &Loaded,
    ) -> Result<(), Stop> {
        let mut all = self.xattrs(inode, loaded)?;
        Arc::make_mut(&mut all).remove(name).ok_or(Errno::ENODATA)?;
        self.put_xattrs(inode, all, (name, None), now)
    }

    fn put_xattrs(
        &mut self,
        inode: u64,
        all: Arc<Xattrs>,
        (name, value): (&[u8], Option<Bytes>),
        now: FileTime,
    ) -> Result<(), Stop> {
        let is_recorded = self.note_place(inode);
        let node = self.node_mut(inode)?;
        let before = std::mem::replace(&mut node.xattrs, NodeXattrs::Changed(all));
        let held = node.xattrs.held_bytes();
        node.ctime = now;
        self.held_bytes = self.held_bytes - before.held_bytes() + held;
        self.touch(inode);
        self.record(is_recorded, || {
            let (name, value) = (Bytes::copy_from_slice(name), value.map(Value::new));
            Record::SetXattr { inode, name, value, now: now.into() }
        });
        Ok(())
    }
}
