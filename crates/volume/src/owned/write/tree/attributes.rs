//! Attributes of files, and extended ones.

use std::sync::Arc;

use atoll_vfs::{Errno, FileTime, SetAttr, SetTime, XattrFlags};
use bytes::Bytes;

use super::{Body, Loaded, NodeXattrs, Stop, Tree, Xattrs};
use crate::format::xattrs;

impl Tree {
    /// Changes attributes, and the length of a file.
    pub(in crate::owned::write) fn set(
        &mut self,
        inode: u64,
        changes: SetAttr,
        now: FileTime,
        loaded: &Loaded,
    ) -> Result<(), Stop> {
        if let Some(size_bytes) = changes.size_bytes {
            match self.node(inode)?.body {
                Body::File(_) => {}
                Body::Directory(_) => return Err(Errno::EISDIR.into()),
                _ => return Err(Errno::EINVAL.into()),
            }
            self.change_content(inode, |content| content.resize(size_bytes, loaded))?;
        }
        let chosen = |time| match time {
            SetTime::Now => now,
            SetTime::To(time) => time,
        };
        let node = self.node_mut(inode)?;
        if changes == SetAttr::default() {
            return Ok(());
        }
        if changes.size_bytes.is_some() {
            node.mtime = now;
        }
        node.mode = changes.mode.map_or(node.mode, |mode| mode & 0o7777);
        node.uid = changes.uid.unwrap_or(node.uid);
        node.gid = changes.gid.unwrap_or(node.gid);
        node.atime = changes.atime.map_or(node.atime, chosen);
        node.mtime = changes.mtime.map_or(node.mtime, chosen);
        node.ctime = now;
        self.touch(inode);
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
        changed.insert(Bytes::copy_from_slice(name), value);
        let sorted: Vec<_> = changed.iter().map(|(n, v)| (n.clone(), v.clone())).collect();
        if xattrs::encode(&sorted).is_none() {
            return Err(Errno::ENOSPC.into());
        }
        self.put_xattrs(inode, all, now)
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
        self.put_xattrs(inode, all, now)
    }

    fn put_xattrs(&mut self, inode: u64, all: Arc<Xattrs>, now: FileTime) -> Result<(), Stop> {
        let node = self.node_mut(inode)?;
        node.xattrs = NodeXattrs::Changed(all);
        node.ctime = now;
        self.touch(inode);
        Ok(())
    }
}
