//! Attributes of files, and extended ones; and how an inode is changed beside a file's contents.

use atoll_vfs::{Errno, FileKind, OpenFlags, SetAttr, SetTime, XattrFlags};
use bytes::Bytes;

use super::files::Held;
use super::state::VirtualXattr;
use super::{Freshness, Shared};
use crate::blocks::content::{Content, LoadedContent};
use crate::format::xattrs;
use crate::shared::consistency;
use crate::shared::fault::Fault;
use crate::shared::inode::{Attributes, Inode, InodeKey};
use crate::shared::inodes::Base;
use atoll_key::kinds::certified::Dot;

impl Shared {
    /// Changes attributes, and the length of a file. If the caller has it open by a `handle`, a close will write what has
    /// changed.
    pub(super) async fn set(
        &self,
        number: u64,
        handle: Option<u64>,
        changes: SetAttr,
    ) -> Result<(), Fault> {
        if changes == SetAttr::default() {
            return Ok(());
        }
        if let Some(size_bytes) = changes.size_bytes {
            match self.table().node(number)?.kind {
                FileKind::Regular => {}
                FileKind::Directory => return Err(Errno::EISDIR.into()),
                _ => return Err(Errno::EINVAL.into()),
            }
            self.set_size(number, handle, size_bytes).await?;
        }
        let now = self.now();
        let chosen = |time| match time {
            SetTime::Now => now,
            SetTime::To(time) => time,
        };
        let SetAttr { mode, uid, gid, atime, mtime, .. } = changes;
        if changes == (SetAttr { size_bytes: changes.size_bytes, ..SetAttr::default() }) {
            return Ok(());
        }
        self.change_attributes(number, |attributes| {
            attributes.mode = mode.map_or(attributes.mode, |mode| mode & 0o7777);
            attributes.uid = uid.unwrap_or(attributes.uid);
            attributes.gid = gid.unwrap_or(attributes.gid);
            attributes.atime = atime.map_or(attributes.atime, chosen);
            attributes.mtime = mtime.map_or(attributes.mtime, chosen);
            attributes.ctime = now;
            Ok(())
        })
        .await
    }

    async fn set_size(
        &self,
        number: u64,
        handle: Option<u64>,
        size_bytes: u64,
    ) -> Result<(), Fault> {
        if handle.is_some() {
            let resize = |content: &mut Content, l: &LoadedContent| content.resize(size_bytes, l);
            return self.change_content((number, handle), resize).await;
        }
        let opened = self.open(number, OpenFlags::READ_WRITE, 0).await?;
        let _held = Held { shared: self, number, lookups: 0, handle: Some(opened.handle.0) };
        self.change_content((number, None), |content, l| content.resize(size_bytes, l)).await?;
        self.publish(number).await
    }

    /// Changes the attributes of a file: in memory if it has changes there, else on the ring.
    async fn change_attributes<T>(
        &self,
        number: u64,
        mut edit: impl FnMut(&mut Attributes) -> Result<T, Errno>,
    ) -> Result<T, Fault> {
        let in_memory = {
            let mut table = self.table();
            let node = table.node(number)?;
            let is_orphan = node.orphan.is_some();
            match &node.view {
                Some(view) if view.has_changes() || is_orphan => {
                    Some(table.on_view(number, |view| {
                        let done = edit(&mut view.attributes)?;
                        view.changes += u64::from(!is_orphan);
                        Ok(done)
                    })?)
                }
                _ if is_orphan => return Err(Errno::ESTALE.into()),
                _ => None,
            }
        };
        match in_memory {
            Some(done) => Ok(done.map_err(|errno: Errno| Fault::from(errno))?),
            None => {
                let key = self.table().node(number)?.key;
                self.change(key, |inode, _| edit(&mut inode.attributes)).await
            }
        }
    }

    /// Changes an inode on the ring, beside the contents of a file. A view of it is brought up to date,
    /// unless it has changes.
    pub(super) async fn change<T>(
        &self,
        key: InodeKey,
        mut edit: impl FnMut(&mut Inode, Dot) -> Result<T, Errno>,
    ) -> Result<T, Fault> {
        let known = {
            let table = self.table();
            let number = table.number_of(&key);
            number.and_then(|number| Some((number, table.node(number).ok()?.turn.clone())))
        };
        let _turn = match &known {
            Some((_, turn)) => Some(turn.lock().await),
            None => None,
        };
        let mut base = known.as_ref().and_then(|(number, _)| {
            let table = self.table();
            let view = table.node(*number).ok()?.view.as_ref()?;
            view.has_changes().then(|| view.version.clone())
        });
        // The newest version is changed. One beside it, of the contents that are written here, would keep a link that the newest
        // has replaced.
        if let Some(shown) = base.clone()
            && let Ok(newest) = self.inodes.read(key, Freshness::Newest).await
        {
            let is_same = newest.inode().contents.is_same(&shown.inode().contents);
            let kept = match is_same {
                true => Ok(newest),
                false => self.keep_conflicts(key, Some(&shown)).await,
            };
            // Contents that cannot be kept now stand beside those that are written here.
            base = Some(kept.unwrap_or(shown));
        }
        let changed = match self.inodes.update(key, Base::of(base.as_ref()), &mut edit).await {
            Err(fault) if fault.is_conflict => {
                base = Some(self.keep_conflicts(key, base.as_ref()).await?);
                self.inodes.update(key, Base::of(base.as_ref()), &mut edit).await
            }
            changed => changed,
        };
        let (value, version) = changed?;
        if let Some((number, _)) = known {
            let mut table = self.table();
            let changes = table.on_view(number, |view| {
                if view.has_changes() {
                    view.version = version.clone();
                }
                view.has_changes()
            });
            if changes == Ok(false) {
                table.set_view(number, self.view(version)?)?;
            }
        }
        Ok(value)
    }

    /// All extended attributes.
    pub(super) async fn xattrs(&self, number: u64) -> Result<Vec<(Bytes, Bytes)>, Fault> {
        let key = {
            let table = self.table();
            let node = table.node(number)?;
            match (&node.view, &node.orphan) {
                (Some(view), _) => return Ok(view.attributes.xattrs.clone()),
                (None, Some(orphan)) => return Ok(orphan.inode().attributes.xattrs.clone()),
                (None, None) => node.key,
            }
        };
        let version = self.inodes.read(key, self.names_age()).await?;
        Ok(version.inode().attributes.xattrs.clone())
    }

    pub(super) async fn set_xattr(
        &self,
        number: u64,
        name: &Bytes,
        value: Bytes,
        flags: XattrFlags,
    ) -> Result<(), Fault> {
        xattrs::check_name(name).map_err(|_| Errno::EOPNOTSUPP)?;
        if name.len() > atoll_vfs::MAX_NAME_BYTES {
            return Err(Errno::ERANGE.into());
        }
        if VirtualXattr::of(name).is_some() {
            return Err(Errno::EPERM.into());
        }
        consistency::check(name, &value)?;
        let now = self.now();
        self.change_attributes(number, |attributes| {
            let all = &mut attributes.xattrs;
            match all.binary_search_by(|(known, _)| known.cmp(name)) {
                Ok(_) if flags.create => return Err(Errno::EEXIST),
                Err(_) if flags.replace => return Err(Errno::ENODATA),
                Ok(at) => all[at].1 = value.clone(),
                Err(at) => all.insert(at, (name.clone(), value.clone())),
            }
            attributes.check_xattrs().map_err(|_| Errno::ENOSPC)?;
            attributes.ctime = now;
            Ok(())
        })
        .await
    }

    pub(super) async fn remove_xattr(&self, number: u64, name: &Bytes) -> Result<(), Fault> {
        let now = self.now();
        self.change_attributes(number, |attributes| {
            let found = attributes.xattrs.iter().position(|(known, _)| known == name);
            attributes.xattrs.remove(found.ok_or(Errno::ENODATA)?);
            attributes.ctime = now;
            Ok(())
        })
        .await
    }
}
