//! What a shared volume was: the directory `.atoll` in the root of a mount.
//!
//! ```text
//! .atoll/history/2026-11-24T05:00Z/…
//! ```
//!
//! `history` lists the times of the states that the volume's policy keeps; below each, the tree is as
//! it was just before. The root directory as it was then names inodes, these are shown as they were then, and so
//! on. Other times that are not too old can be looked up as well; for those a file is shown in its newest version
//! that was there then and is kept.
//!
//! A name whose inode is not kept, or cannot be read, is listed, and using it fails with `EIO`: leaving it out
//! would make copies of a state incomplete without anybody hearing of it.
//!
//! `.atoll` is not listed in the root, so that programs which walk through a volume do not walk
//! through all its past.
//!
//! Numbers of inodes and handles here have their highest bit set, and those of the present do not
//! ([`Table`](crate::shared::table::Table)).

mod log;
mod nodes;
mod times;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard};

use atoll_env::Env;
use atoll_vfs::{
    Attr, AttrReply, Caller, Entry, Errno, FileKind, FileTime, Handle, InodeNumber, OpenFlags,
    Opened, PersistentHandle, SeekTo, StatFs,
};
use bytes::Bytes;

pub(super) use self::log::LogOf;
pub(crate) use self::nodes::Place;
use self::nodes::{Name, Nodes, Opening};
use super::listing::READS_AT_ONCE;
use super::{Shared, entry, reply};
use crate::blocks::content::{Content, Stored};
use crate::blocks::edit_file::NoSwap;
use crate::blocks::read_pieces::seek_to;
use crate::mount::{self, About, Engine, Found, Front, Listed, OpenId};
use crate::shared::fault::Fault;
use crate::shared::inode::{Contents, FileData, InodeKey};
use crate::shared::inodes::PastInode;
use crate::shared::merged;
use crate::shared::table::{ROOT, attr_of};

/// The name of the directory.
pub(super) const NAME: &[u8] = b".atoll";
const HISTORY: &[u8] = b"history";

/// Whether a number is one of this module.
pub(super) fn is_past(inode: u64) -> bool {
    inode & nodes::PAST != 0
}

/// A shared volume as it was at a time, read-only.
pub type PastFs = Front<PastEngine>;

/// The past of a volume.
pub struct PastEngine {
    shared: Arc<Shared>,
    nodes: Mutex<Nodes>,
}

impl PastEngine {
    /// What is below `.atoll`.
    pub(super) fn of(shared: Arc<Shared>) -> PastEngine {
        PastEngine { shared, nodes: Mutex::default() }
    }

    /// The tree as it was just before `time_ms`, as a file system of its own.
    pub(super) async fn mounted_at(shared: Arc<Shared>, time_ms: u64) -> Result<PastEngine, Fault> {
        let past = PastEngine::of(shared);
        past.check_time(time_ms)?;
        let key = past.root_key();
        let found = past.shared.inodes.at(key, time_ms).await?.ok_or(Errno::ENOENT)?;
        let place = Place::Inode { time_ms, key };
        past.nodes().insert_root(place, found);
        Ok(past)
    }

    fn nodes(&self) -> MutexGuard<'_, Nodes> {
        self.nodes.lock().expect("no holder of this lock panics")
    }

    fn root_key(&self) -> InodeKey {
        self.shared.table().node(ROOT).expect("the root is always there").key
    }

    /// The times of the states that are kept now.
    pub(super) fn states(&self) -> BTreeSet<u64> {
        self.shared.keep.states(self.shared.created_unix_ms, self.shared.env.unix_ms())
    }

    /// The times that can be looked up.
    fn range(&self) -> Option<RangeInclusive<u64>> {
        let (now_ms, kept_secs) = (self.shared.env.unix_ms(), self.shared.keep.longest_secs());
        let oldest_ms = now_ms.saturating_sub(kept_secs * 1000).max(self.shared.created_unix_ms);
        (kept_secs > 0).then_some(oldest_ms..=now_ms.saturating_add(1000))
    }

    fn check_time(&self, time_ms: u64) -> Result<(), Errno> {
        match self.range().is_some_and(|range| range.contains(&time_ms)) {
            true => Ok(()),
            false => Err(Errno::ENOENT),
        }
    }

    /// The entry of `.atoll`, counted as one lookup.
    pub(super) async fn top(&self) -> Result<Entry, Fault> {
        self.hold(None, Place::Top).await
    }

    /// The entry of a place, counted as one lookup. [`Errno::ESTALE`] if it is not kept, or `EIO` where
    /// a directory names it.
    async fn hold(&self, parent: Option<Place>, place: Place) -> Result<Entry, Fault> {
        let held = self.nodes().held_again(&place);
        if let Some(number) = held {
            return Ok(entry(self.attr(number)?));
        }
        let found = match place {
            Place::Top | Place::History => None,
            Place::Inode { time_ms, key } => match self.shared.inodes.at(key, time_ms).await? {
                Some(found) => Some(found),
                None if parent.is_none() => return Err(Errno::ESTALE.into()),
                None => {
                    let why = "it is named in that state of the volume, and was not kept itself";
                    return Err(Fault::new(Errno::EIO, why));
                }
            },
        };
        let number = self.nodes().hold(parent, place, found);
        Ok(entry(self.attr(number)?))
    }

    fn attr(&self, number: u64) -> Result<Attr, Errno> {
        let (place, found) = {
            let nodes = self.nodes();
            let node = nodes.node(number)?;
            (node.place, node.found.clone())
        };
        if let Some(found) = found {
            return Ok(attr_of(number, &found.inode, self.shared.block_size_log2));
        }
        let root = self.shared.inodes.known(self.root_key());
        let (uid, gid) = root.map_or((0, 0), |root| {
            let attributes = &root.inode().attributes;
            (attributes.uid, attributes.gid)
        });
        let changed_ms = match place {
            Place::History => self.states().last().copied(),
            _ => None,
        };
        let time = FileTime::from_unix_ms(changed_ms.unwrap_or(self.shared.created_unix_ms));
        Ok(Attr {
            inode: InodeNumber(number),
            kind: FileKind::Directory,
            mode: 0o555,
            nlink: 2,
            uid,
            gid,
            rdev: 0,
            size_bytes: 0,
            blocks_512: 0,
            block_size_bytes: 1 << self.shared.block_size_log2,
            atime: time,
            mtime: time,
            ctime: time,
        })
    }

    fn found(&self, number: u64) -> Result<(Place, Option<Arc<PastInode>>), Errno> {
        let nodes = self.nodes();
        let node = nodes.node(number)?;
        Ok((node.place, node.found.clone()))
    }

    /// The names of a directory.
    fn listing(&self, number: u64) -> Result<Vec<Name>, Errno> {
        let directory = FileKind::Directory;
        match self.found(number)? {
            (Place::Top, _) => {
                let name = Bytes::from_static(HISTORY);
                Ok(vec![(name, directory, Place::History)])
            }
            (Place::History, _) => {
                let key = self.root_key();
                let states = self.states().into_iter();
                let listed = states.map(|time_ms| {
                    (times::name(time_ms).into(), directory, Place::Inode { time_ms, key })
                });
                Ok(listed.collect())
            }
            (Place::Inode { time_ms, .. }, found) => {
                let found = found.ok_or(Errno::EIO)?;
                let Contents::Directory(entries) = &found.inode.contents else {
                    return Err(Errno::ENOTDIR);
                };
                let names: BTreeMap<Bytes, _> = merged::names(entries);
                let listed = names.into_iter().map(|(name, entries)| {
                    let place = Place::Inode { time_ms, key: entries[0].inode };
                    (name, entries[0].file_kind(), place)
                });
                Ok(listed.collect())
            }
        }
    }

    /// What a place in a directory stands for.
    pub(super) async fn found_at(&self, directory: u64, place: Place, with_entry: bool) -> Found {
        if with_entry && let Ok((above, _)) = self.found(directory) {
            // What cannot be read is told when it is used.
            if let Ok(entry) = self.hold(Some(above), place).await {
                return Found::Entry(entry);
            }
        }
        Found::Number(self.nodes().number_of(&place))
    }
}

impl Engine for PastEngine {
    type Fault = Fault;
    type File = Place;

    const READS_AT_ONCE: usize = READS_AT_ONCE;

    fn env(&self) -> &Env {
        &self.shared.env
    }

    async fn report(&self, _: About<'_>, fault: Fault) -> Errno {
        fault.logged()
    }

    async fn status(&self) -> String {
        self.shared.status().await
    }

    async fn lookup(&self, (parent, name): mount::Place<'_>) -> Result<Entry, Fault> {
        let (above, found) = self.found(parent)?;
        let place = match (above, found) {
            (Place::Top, _) if name == HISTORY => Place::History,
            (Place::Top, _) => return Err(Errno::ENOENT.into()),
            (Place::History, _) => {
                let time_ms = times::parse(name).ok_or(Errno::ENOENT)?;
                self.check_time(time_ms)?;
                let place = Place::Inode { time_ms, key: self.root_key() };
                return match self.hold(Some(above), place).await {
                    Err(Fault { errno: Errno::EIO, .. }) => Err(Errno::ENOENT.into()),
                    held => held,
                };
            }
            (Place::Inode { time_ms, .. }, found) => {
                let found = found.ok_or(Errno::EIO)?;
                let Contents::Directory(entries) = &found.inode.contents else {
                    return Err(Errno::ENOTDIR.into());
                };
                let named = merged::named(entries, name).ok_or(Errno::ENOENT)?;
                Place::Inode { time_ms, key: named[0].inode }
            }
        };
        self.hold(Some(above), place).await
    }

    async fn parent(&self, number: u64) -> Result<Entry, Fault> {
        let (place, parent, found) = {
            let nodes = self.nodes();
            let node = nodes.node(number)?;
            (node.place, node.parent, node.found.clone())
        };
        let above = match place {
            _ if number == ROOT => place,
            Place::Top => {
                let age = self.shared.names_age();
                return self.shared.entry(self.root_key(), age).await;
            }
            Place::History => Place::Top,
            Place::Inode { key, .. } if key == self.root_key() => Place::History,
            Place::Inode { time_ms, .. } => match parent {
                Some(parent) => parent,
                None => {
                    let links = found.iter().flat_map(|found| &found.inode.links);
                    let key = links.map(|link| link.directory).next().ok_or(Errno::ESTALE)?;
                    Place::Inode { time_ms, key }
                }
            },
        };
        self.hold(None, above).await
    }

    async fn handle_of(&self, number: u64) -> Result<PersistentHandle, Fault> {
        Ok(self.nodes().node(number)?.place.handle()?)
    }

    async fn by_handle(&self, handle: &PersistentHandle) -> Result<Entry, Fault> {
        let place = Place::of_handle(handle)?;
        let own_ms = self.nodes().own_time_ms();
        let is_here = match place {
            Place::Top | Place::History => own_ms.is_none(),
            Place::Inode { time_ms, .. } => own_ms.is_none_or(|own| own == time_ms),
        };
        if !is_here {
            return Err(Errno::ESTALE.into());
        }
        if let Place::Inode { time_ms, .. } = place {
            self.check_time(time_ms).map_err(|_| Errno::ESTALE)?;
        }
        self.hold(None, place).await
    }

    fn forget(&self, number: u64, count: u64) {
        self.nodes().forget(number, count);
    }

    async fn getattr(&self, number: u64, _: Option<u64>) -> Result<AttrReply, Fault> {
        Ok(reply(self.attr(number)?))
    }

    async fn readlink(&self, number: u64) -> Result<Bytes, Fault> {
        match self.found(number)?.1.map(|found| found.inode.contents.clone()) {
            Some(Contents::Symlink(target)) => Ok(target),
            _ => Err(Errno::EINVAL.into()),
        }
    }

    async fn open(&self, _: Caller, number: u64, flags: OpenFlags) -> Result<Opened, Fault> {
        if flags.writes() || flags.has(OpenFlags::TRUNCATE) {
            return Err(Errno::EROFS.into());
        }
        let found = self.found(number)?.1.ok_or(Errno::EISDIR)?;
        let (data, size_bytes, blocks_512) = match &found.inode.contents {
            Contents::Regular { data, size_bytes, blocks_512, .. } => {
                (data, *size_bytes, *blocks_512)
            }
            Contents::Directory(_) | Contents::Unread { .. } => return Err(Errno::EISDIR.into()),
            Contents::Symlink(_) => return Err(Errno::ELOOP.into()),
            Contents::Special { .. } => return Err(Errno::ENXIO.into()),
        };
        let (inode, pin) = match data {
            None => (None, None),
            Some(FileData::Elsewhere(hash)) => (Some(*hash), None),
            Some(FileData::Here(block)) => {
                let pin = self.shared.inline.pin(block.encode().into());
                (Some(pin.hash), Some(Arc::new(pin)))
            }
        };
        let stored = Stored { inode, size_bytes, blocks_512 };
        let content = Arc::new(Content::of(stored, self.shared.block_size_log2));
        let handle = self.nodes().open(number, Opening::File { content, pin })?;
        // What a file was does not change.
        Ok(Opened { handle: Handle(handle), keep_cache: true, direct_io: false })
    }

    async fn read(&self, (number, handle): OpenId, offset: u64, len: u32) -> Result<Bytes, Fault> {
        let (content, _pin) = self.nodes().opened_file(number, handle)?;
        let end = offset.saturating_add(u64::from(len)).min(content.size_bytes);
        let pieces = if offset < end { content.pieces(offset..end) } else { Vec::new() };
        let readers = &self.shared.readers;
        let found = readers.assemble(pieces, content.stored, handle, len, &NoSwap).await?;
        Ok(found.ok_or(Errno::EIO)?)
    }

    /// Nothing was written. That there is nothing to flush would hold for all of the mount.
    async fn flush(&self, _: OpenId) -> Result<(), Fault> {
        Ok(())
    }

    async fn seek(&self, (number, handle): OpenId, offset: u64, to: SeekTo) -> Result<u64, Fault> {
        let (content, _pin) = self.nodes().opened_file(number, handle)?;
        let layout = |at| std::future::ready(Ok::<_, Fault>(content.layout(at)));
        seek_to(&self.shared.cache, offset, to, layout).await
    }

    async fn close(&self, (number, handle): OpenId) -> Result<(), Fault> {
        self.shared.readers.close(handle);
        Ok(self.nodes().close(number, handle)?)
    }

    async fn opendir(&self, number: u64) -> Result<u64, Fault> {
        let names = Arc::new(self.listing(number)?);
        Ok(self.nodes().open(number, Opening::Directory(names))?)
    }

    async fn names(
        &self,
        (number, handle): OpenId,
        cookie: u64,
        limit: usize,
    ) -> Result<Vec<Listed<Place>>, Fault> {
        let names = match self.nodes().opened(number, handle)? {
            Opening::Directory(names) => names.clone(),
            Opening::File { .. } => return Err(Errno::ENOTDIR.into()),
        };
        let from = usize::try_from(cookie).unwrap_or(usize::MAX);
        let page = names.iter().enumerate().skip(from).take(limit);
        let listed = |(at, (name, kind, file)): (usize, &Name)| Listed {
            name: name.clone(),
            kind: *kind,
            cookie: at as u64 + 1,
            file: *file,
        };
        Ok(page.map(listed).collect())
    }

    async fn listed(&self, directory: u64, listed: &Listed<Place>, with_entry: bool) -> Found {
        self.found_at(directory, listed.file, with_entry).await
    }

    async fn statfs(&self) -> StatFs {
        self.shared.sizes().await
    }

    async fn getxattr(&self, number: u64, name: &Bytes) -> Result<Bytes, Fault> {
        let (place, found) = self.found(number)?;
        if let Place::Inode { key, .. } = place
            && let Some(of) = LogOf::parse(name)
        {
            return self.shared.log(key, of).await;
        }
        let all = found.map(|found| found.inode.attributes.xattrs.clone()).unwrap_or_default();
        let value = all.into_iter().find(|(known, _)| known == name);
        Ok(value.ok_or(Errno::ENODATA)?.1)
    }

    async fn listxattr(&self, number: u64) -> Result<Vec<Bytes>, Fault> {
        let found = self.found(number)?.1;
        let all = found.map(|found| found.inode.attributes.xattrs.clone()).unwrap_or_default();
        Ok(all.into_iter().map(|(name, _)| name).collect())
    }
}
