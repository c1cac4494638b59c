//! The calls of a mount; `listing` finds names, `handles` files by their handles.

mod handles;
mod listing;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use atoll_env::Env;
use atoll_vfs::{
    AttrReply, Caller, CreateVerifier, Entry, Errno, Handle, InodeNumber, OpenFlags, Opened,
    PersistentHandle, RenameFlags, SeekTo, SetAttr, StatFs, Writer, XattrFlags,
};
use bytes::Bytes;

use super::tree::{Loaded, MAX_LINKS, Stop, Tree};
use super::{FlushError, Shared, WriteOptions};
use crate::blocks::read_pieces::{Readers, seek_to};
use crate::counted::counted;
use crate::handle_table::GENERATION;
use crate::mount::{About, Birth, Engine, FOREVER, Found, Front, Listed, OpenId, Place};
use crate::owned::fault::Fault;
use crate::room;

/// How often a call fetches something stored before it is given up. A rename needs a name, its
/// place in the table of links and the same of the name it replaces; each may change meanwhile.
const MAX_LOADS: usize = 64;

/// Changed names kept in memory before a flush begins: each costs some hundred bytes.
const MAX_NAMES: u64 = 100_000;

/// A volume that this mount alone writes.
pub type WritableFs = Front<WritableEngine>;

/// See the module `write`.
pub struct WritableEngine {
    pub(super) shared: Arc<Shared>,
    readers: Readers,
}

impl From<FlushError> for Fault {
    fn from(error: FlushError) -> Fault {
        Fault::Errno(error.errno())
    }
}

impl WritableFs {
    pub(super) fn of(shared: Arc<Shared>) -> WritableFs {
        let WriteOptions { read_ahead_bytes, cache_bytes, .. } = shared.options;
        let readers = Readers::new(shared.cache.clone(), read_ahead_bytes, cache_bytes);
        Front::over(WritableEngine { shared, readers })
    }

    /// The names whose files differ from the ring's, by path, and whether they mean something now.
    pub async fn changed_names(&self) -> Result<Vec<(Vec<u8>, bool)>, Errno> {
        let (mut all, linked) = self.shared.tree().changed_names();
        if !linked.is_empty() {
            all.extend(self.names_of(&linked).await?.into_iter().map(|path| (path, true)));
        }
        all.sort();
        Ok(all)
    }
}

impl WritableEngine {
    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Flushes everything and lets another mount write. Called once no call is made any more. What
    /// cannot be flushed is in the spool.
    pub async fn end(&self) -> Result<(), FlushError> {
        self.shared.has_ended.store(true, Ordering::Release);
        let ended = self.write_and_resign().await;
        if let Some(spool) = &self.shared.spool {
            spool.finish().await;
        }
        ended
    }

    async fn write_and_resign(&self) -> Result<(), FlushError> {
        // Another mount may write as soon as this one has resigned.
        if self.shared.has_resigned().await {
            return self.shared.keep().await;
        }
        let flushed = self.shared.flushed(None).await;
        match &flushed {
            // The next mount tries again.
            Err(FlushError::LeftOut { .. }) if self.shared.has_spooled().await => {}
            _ => flushed.clone()?,
        }
        self.shared.resign(flushed.is_err()).await?;
        self.shared.keep().await.and(flushed)
    }

    /// Where changes lie that an earlier mount has left and that could not be made again, in the
    /// spool's directory.
    pub fn set_aside(&self) -> Option<String> {
        self.shared.set_aside.lock().expect("no holder of this lock panics").clone()
    }

    /// The newest version that this mount has put.
    pub async fn version(&self) -> u64 {
        self.shared.head.lock().await.block.version
    }

    /// Checks the state in memory.
    ///
    /// # Panics
    /// If it contradicts itself.
    pub fn check_invariants(&self) {
        self.shared.tree().check_invariants();
    }

    /// Changed bytes in memory.
    pub fn held_bytes(&self) -> u64 {
        self.shared.tree().held_bytes()
    }

    /// How many files and directories are in memory.
    pub fn files_in_memory(&self) -> usize {
        self.shared.tree().len()
    }

    /// Runs a call on the tree; what it needs is fetched.
    pub(super) async fn on_tree<T>(
        &self,
        mut call: impl FnMut(&mut Tree, &Loaded) -> Result<T, Stop>,
    ) -> Result<T, Fault> {
        let mut loaded = Loaded::default();
        for _ in 0..MAX_LOADS {
            let done = {
                let mut tree = self.shared.tree();
                let done = call(&mut tree, &loaded);
                tree.settle();
                self.shared.keep_records(&mut tree);
                self.keep_moved(&mut tree);
                done
            };
            match done {
                Ok(value) => return Ok(value),
                Err(Stop::Errno(errno)) => return Err(errno.into()),
                Err(Stop::Need(need)) => self.shared.load(need, &mut loaded).await?,
            }
        }
        tracing::warn!("a call needed more than {MAX_LOADS} blocks");
        Err(Errno::EIO.into())
    }

    /// Runs a call that changes something.
    async fn change<T>(
        &self,
        call: impl FnMut(&mut Tree, &Loaded) -> Result<T, Stop>,
    ) -> Result<T, Fault> {
        self.shared.check_fence()?;
        if self.is_full(1) {
            self.shared.free_spool().await;
        }
        match self.is_full(1) {
            true => self.shared.flushed_while(|| self.is_full(1)).await?,
            false => self.shared.make_room().await?,
        }
        self.take_away(call).await
    }

    /// Runs a call that brings no data. Where the ring has no room for what is held, removing and
    /// cutting files must not wait for room.
    async fn take_away<T>(
        &self,
        call: impl FnMut(&mut Tree, &Loaded) -> Result<T, Stop>,
    ) -> Result<T, Fault> {
        self.shared.check_fence()?;
        if let Some(spool) = &self.shared.spool {
            spool.room().await;
        }
        if self.is_full(2) {
            self.shared.flushed_while(|| self.is_full(2)).await?;
        }
        let done = self.on_tree(call).await?;
        if self.is_full(1) {
            self.shared.free_spool().await;
        }
        Ok(done)
    }

    /// A file that is left out takes no more data, until it can be stored. One of which a block is lost
    /// takes some, since that is mended by overwriting it; others keep room beside it.
    async fn check_left_out(&self, inode: u64) -> Result<(), Fault> {
        match self.shared.check_left_out(Some(inode)) {
            Err(error) if error.is_lost() && !self.is_full(1) && !self.shared.holds_half() => {
                Ok(())
            }
            Err(_) => Ok(self.shared.flushed(Some(inode)).await?),
            Ok(()) => Ok(()),
        }
    }

    /// Whether so many times as much waits for the ring as may, names in memory or records on disk.
    fn is_full(&self, times: u64) -> bool {
        let spooled = self.shared.spool.as_ref().map_or(0, |spool| spool.bytes());
        spooled >= self.shared.options.max_spool_bytes.saturating_mul(times)
            || self.shared.tree().unflushed_names() >= MAX_NAMES * times
    }

    /// The reply for a file of which a lookup was counted.
    fn entry(&self, tree: &Tree, inode: u64) -> Result<Entry, Stop> {
        let attr = tree.attr(inode)?;
        Ok(Entry { attr, generation: GENERATION, name_ttl: FOREVER, attr_ttl: FOREVER })
    }

    fn told_status(&self) -> String {
        if let Err(fenced) = self.shared.check_fence() {
            return fenced.to_string();
        }
        let (held, changes) = {
            let tree = self.shared.tree();
            (tree.held_bytes(), tree.changes())
        };
        let spooled = self.shared.spool.as_ref().and_then(|spool| spool.failure());
        let trouble = self.shared.trouble.lock().expect("no holder of this lock panics").clone();
        let mut status = match trouble {
            Some(error @ FlushError::LeftOut { .. }) if spooled.is_none() => {
                let mended = if error.is_lost() {
                    "Save the file as a whole, or cut or remove it".to_owned()
                } else {
                    let when = self.shared.when_room_is_back();
                    format!("Remove it or other files, or give nodes more disk: {when}")
                };
                format!(
                    "{error}; its new contents wait in the spool and are tried again every half \
                     minute, all else is on the ring. {mended}"
                )
            }
            trouble => waiting(held, changes, trouble.map(|trouble| trouble.to_string())),
        };
        if let Some(error) = spooled {
            status +=
                &format!("; nothing is spooled any more, close(2) waits for the ring: {error}");
        }
        if let Some(name) = self.set_aside() {
            status += &format!("; what an earlier mount had not written lies in {name}");
        }
        status
    }
}

impl Engine for WritableEngine {
    type Fault = Fault;
    /// The file that a name means now, unless the name is as it is stored.
    type File = Option<u64>;

    fn env(&self) -> &Env {
        &self.shared.env
    }

    async fn report(&self, _: About<'_>, fault: Fault) -> Errno {
        match fault {
            Fault::Errno(errno) => errno,
            Fault::Block(error) => {
                let error = error.at(b"");
                tracing::warn!("{error}");
                error.errno()
            }
        }
    }

    async fn status(&self) -> String {
        self.told_status()
    }

    fn missing_ttl(&self) -> Duration {
        FOREVER
    }

    async fn lookup(&self, (parent, name): Place<'_>) -> Result<Entry, Fault> {
        self.on_tree(|tree, loaded| {
            let inode = tree.lookup(parent, name, loaded)?;
            self.entry(tree, inode)
        })
        .await
    }

    async fn parent(&self, inode: u64) -> Result<Entry, Fault> {
        self.on_tree(|tree, _| {
            let parent = tree.parent(inode)?;
            self.entry(tree, parent)
        })
        .await
    }

    async fn handle_of(&self, inode: u64) -> Result<PersistentHandle, Fault> {
        self.handle(inode).await
    }

    async fn by_handle(&self, handle: &PersistentHandle) -> Result<Entry, Fault> {
        let (inode, generation) = handle.number()?;
        if generation != GENERATION {
            return Err(Errno::ESTALE.into());
        }
        self.hold_number(inode.0).await?;
        self.on_tree(|tree, _| self.entry(tree, inode.0)).await
    }

    fn forget(&self, inode: u64, count: u64) {
        self.shared.tree().forget(inode, count);
    }

    async fn getattr(&self, inode: u64, _: Option<u64>) -> Result<AttrReply, Fault> {
        let attr = self.on_tree(|tree, _| tree.attr(inode)).await?;
        Ok(AttrReply { attr, ttl: FOREVER })
    }

    async fn setattr(
        &self,
        inode: u64,
        _: Option<u64>,
        changes: SetAttr,
    ) -> Result<AttrReply, Fault> {
        let now = self.shared.now();
        let changed = self.take_away(|tree, loaded| {
            tree.set(inode, changes, now, loaded)?;
            tree.attr(inode)
        });
        Ok(AttrReply { attr: changed.await?, ttl: FOREVER })
    }

    async fn readlink(&self, inode: u64) -> Result<Bytes, Fault> {
        self.on_tree(|tree, _| tree.target(inode)).await
    }

    async fn make(
        &self,
        caller: Caller,
        (parent, name): Place<'_>,
        birth: Birth,
        mode: u32,
    ) -> Result<Entry, Fault> {
        let now = self.shared.now();
        self.change(|tree, loaded| {
            let inode = tree.make(caller, (parent, name), birth.clone(), mode, now, loaded)?;
            self.entry(tree, inode)
        })
        .await
    }

    async fn make_exclusive(
        &self,
        caller: Caller,
        (parent, name): Place<'_>,
        mode: u32,
        verifier: CreateVerifier,
    ) -> Result<Entry, Fault> {
        let now = self.shared.now();
        self.change(|tree, loaded| {
            let inode = match tree.make(caller, (parent, name), Birth::File, mode, now, loaded) {
                Ok(inode) => {
                    tree.set(inode, verifier.changes(), now, loaded)?;
                    inode
                }
                Err(Stop::Errno(Errno::EEXIST)) => {
                    let inode = tree.lookup(parent, name, loaded)?;
                    if !verifier.has_made(&tree.attr(inode)?) {
                        tree.forget(inode, 1);
                        return Err(Errno::EEXIST.into());
                    }
                    inode
                }
                Err(stop) => return Err(stop),
            };
            self.entry(tree, inode)
        })
        .await
    }

    async fn link(&self, inode: u64, (parent, name): Place<'_>) -> Result<Entry, Fault> {
        let now = self.shared.now();
        self.change(|tree, loaded| {
            tree.link(inode, (parent, name), now, loaded)?;
            self.entry(tree, inode)
        })
        .await
    }

    async fn remove(&self, (parent, name): Place<'_>, is_directory: bool) -> Result<(), Fault> {
        let now = self.shared.now();
        self.take_away(|tree, loaded| match is_directory {
            true => tree.rmdir(parent, name, now, loaded),
            false => tree.unlink(parent, name, now, loaded),
        })
        .await
    }

    async fn rename(
        &self,
        (parent, name): Place<'_>,
        (new_parent, new_name): Place<'_>,
        flags: RenameFlags,
    ) -> Result<(), Fault> {
        let now = self.shared.now();
        self.change(|tree, loaded| {
            tree.rename((parent, name), (new_parent, new_name), flags, now, loaded)
        })
        .await
    }

    async fn open(&self, _: Caller, inode: u64, flags: OpenFlags) -> Result<Opened, Fault> {
        let now = self.shared.now();
        let open = |tree: &mut Tree, loaded: &Loaded| tree.open_file(inode, flags, now, loaded);
        let handle = match flags.writes() || flags.has(OpenFlags::TRUNCATE) {
            true => self.change(open).await?,
            false => self.on_tree(open).await?,
        };
        Ok(opened(handle))
    }

    async fn create(
        &self,
        caller: Caller,
        (parent, name): Place<'_>,
        mode: u32,
        flags: OpenFlags,
    ) -> Result<(Entry, Opened), Fault> {
        let now = self.shared.now();
        self.change(|tree, loaded| {
            let inode = match tree.lookup(parent, name, loaded) {
                Ok(inode) if flags.has(OpenFlags::EXCLUSIVE) => {
                    tree.forget(inode, 1);
                    return Err(Errno::EEXIST.into());
                }
                Ok(inode) => inode,
                Err(Stop::Errno(Errno::ENOENT)) => {
                    tree.make(caller, (parent, name), Birth::File, mode, now, loaded)?
                }
                Err(stop) => return Err(stop),
            };
            let opening = tree.open_file(inode, flags, now, loaded);
            if opening.is_err() {
                // The call is made again, or fails.
                tree.forget(inode, 1);
            }
            let handle = opening?;
            Ok((self.entry(tree, inode)?, opened(handle)))
        })
        .await
    }

    async fn read(&self, (inode, handle): OpenId, offset: u64, len: u32) -> Result<Bytes, Fault> {
        for _ in 0..MAX_LOADS {
            let (pieces, stored) =
                self.on_tree(|tree, _| tree.read(inode, handle, offset, len)).await?;
            let swap = self.shared.swap();
            let found = self.readers.assemble(pieces, stored, handle, len, swap).await?;
            if let Some(bytes) = found {
                return Ok(bytes);
            }
        }
        Err(Errno::EIO.into())
    }

    async fn write(
        &self,
        writer: Writer,
        open: OpenId,
        offset: u64,
        data: &Bytes,
    ) -> Result<u32, Fault> {
        let now = self.shared.now();
        self.check_left_out(open.0).await?;
        self.change(|tree, loaded| tree.write(writer, open, offset, data, now, loaded)).await
    }

    async fn flush(&self, (inode, handle): OpenId) -> Result<(), Fault> {
        self.shared.check_fence()?;
        if self.on_tree(|tree, _| tree.is_writable(inode, handle)).await? {
            self.shared.kept(inode).await?;
        }
        Ok(())
    }

    async fn fsync(&self, (inode, _): OpenId) -> Result<(), Fault> {
        Ok(self.shared.flushed(Some(inode)).await?)
    }

    async fn fsyncdir(&self, inode: u64) -> Result<(), Fault> {
        Ok(self.shared.flushed(Some(inode)).await?)
    }

    async fn persist(&self, _: &[InodeNumber]) -> Result<(), Fault> {
        match &self.shared.spool {
            Some(spool) if spool.synced().await.is_ok() => Ok(()),
            _ => Ok(self.shared.flushed(None).await?),
        }
    }

    async fn sync(&self) -> Result<(), Fault> {
        Ok(self.shared.flushed(None).await?)
    }

    async fn seek(&self, (inode, handle): OpenId, offset: u64, to: SeekTo) -> Result<u64, Fault> {
        let layout = |at| self.on_tree(move |tree, _| tree.layout(inode, handle, at));
        seek_to(&self.shared.cache, offset, to, layout).await
    }

    async fn fallocate(&self, open: OpenId, range: (u64, u64), mode: i32) -> Result<(), Fault> {
        let now = self.shared.now();
        self.change(|tree, loaded| tree.fallocate(open, range, mode, now, loaded)).await
    }

    async fn close(&self, (inode, handle): OpenId) -> Result<(), Fault> {
        self.readers.close(handle);
        self.on_tree(|tree, _| tree.close(inode, handle)).await
    }

    async fn opendir(&self, inode: u64) -> Result<u64, Fault> {
        self.on_tree(|tree, _| tree.open_directory(inode)).await
    }

    async fn names(
        &self,
        (inode, handle): OpenId,
        cookie: u64,
        limit: usize,
    ) -> Result<Vec<Listed<Option<u64>>>, Fault> {
        let open = self.on_tree(|tree, _| match cookie {
            0 => tree.rewind_directory(inode, handle),
            _ => tree.opened_directory(inode, handle),
        });
        self.names_from(&open.await?, cookie, limit).await
    }

    async fn listed(
        &self,
        directory: u64,
        listed: &Listed<Option<u64>>,
        with_entry: bool,
    ) -> Found {
        let found = self.on_tree(|tree, loaded| {
            let child = tree.lookup(directory, &listed.name, loaded)?;
            let entry = self.entry(tree, child)?;
            if !with_entry {
                tree.forget(child, 1);
            }
            Ok(entry)
        });
        match found.await {
            Ok(entry) if with_entry => Found::Entry(entry),
            Ok(entry) => Found::Number(entry.attr.inode.0),
            Err(Fault::Errno(Errno::ENOENT | Errno::ESTALE)) if with_entry => Found::Gone,
            Err(_) => Found::Number(listed.file.unwrap_or(u64::MAX)),
        }
    }

    async fn statfs(&self) -> StatFs {
        let shared = &self.shared;
        let room = shared.last_room.ask(&shared.env, &*shared.blocks).await;
        let totals = shared.tree().totals();
        let files = totals.files.saturating_add(totals.dirs).saturating_add(totals.symlinks);
        StatFs {
            files: 1 << 40,
            files_free: (1u64 << 40).saturating_sub(files),
            max_links: MAX_LINKS,
            ..room::sizes(room, totals.bytes, 4096)
        }
    }

    async fn getxattr(&self, inode: u64, name: &Bytes) -> Result<Bytes, Fault> {
        let all = self.on_tree(|tree, loaded| tree.xattrs(inode, loaded)).await?;
        Ok(all.get(name).cloned().ok_or(Errno::ENODATA)?)
    }

    async fn listxattr(&self, inode: u64) -> Result<Vec<Bytes>, Fault> {
        let all = self.on_tree(|tree, loaded| tree.xattrs(inode, loaded)).await?;
        Ok(all.keys().cloned().collect())
    }

    async fn setxattr(
        &self,
        inode: u64,
        name: &Bytes,
        value: Option<Bytes>,
        flags: XattrFlags,
    ) -> Result<(), Fault> {
        let now = self.shared.now();
        self.change(|tree, loaded| match &value {
            Some(value) => tree.set_xattr(inode, name, value.clone(), flags, now, loaded),
            None => tree.remove_xattr(inode, name, now, loaded),
        })
        .await
    }
}

fn opened(handle: u64) -> Opened {
    Opened { handle: Handle(handle), keep_cache: true, direct_io: false }
}

/// What is not on the ring, and why, for the mount's status.
fn waiting(held_bytes: u64, changes: u64, trouble: Option<String>) -> String {
    let parts = [(held_bytes, "byte", "bytes"), (changes, "change", "changes")];
    let parts = parts.into_iter().filter(|(count, ..)| *count > 0);
    let parts = parts.map(|(count, one, many)| counted(count, one, many));
    let waits = parts.collect::<Vec<_>>().join(" and ");
    let verb = if held_bytes + changes == 1 { "waits" } else { "wait" };
    match (trouble, &waits[..]) {
        (None, "") => "ok".into(),
        (None, waits) => format!("ok; not on the ring yet: {waits}"),
        (Some(trouble), "") => format!("the ring could not be written last: {trouble}"),
        (Some(trouble), waits) => format!("{waits} {verb} for the ring: {trouble}"),
    }
}

#[cfg(test)]
mod tests {
    use super::waiting;

    #[test]
    fn a_status_counts_what_waits_as_people_do() {
        let trouble = || Some("no node".to_owned());
        assert_eq!(waiting(0, 0, None), "ok");
        assert_eq!(waiting(1, 0, None), "ok; not on the ring yet: 1 byte");
        assert_eq!(waiting(1, 0, trouble()), "1 byte waits for the ring: no node");
        assert_eq!(waiting(1, 1, trouble()), "1 byte and 1 change wait for the ring: no node");
        assert_eq!(waiting(9, 2, trouble()), "9 bytes and 2 changes wait for the ring: no node");
        assert_eq!(waiting(0, 0, trouble()), "the ring could not be written last: no node");
    }
}
