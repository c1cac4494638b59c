//! Opening, reading and writing files (Pastis §3.2).
//!
//! An open reads the inode, unless this mount has changes of the file that are not closed yet; until
//! the file is closed, that is what is read and written. A close writes the data blocks and then the
//! inode (Pastis §3.1), and returns when the ring has acknowledged both.

use std::sync::Arc;

use atoll_vfs::{
    Errno, FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, FALLOC_ZERO_RANGE, FileKind, Handle, OpenFlags,
    Opened, SeekTo, Writer,
};
use bytes::Bytes;

use super::{EndError, Freshness, Shared, Version};
use crate::blocks::content::{Content, ContentStop, LoadedContent, Stored};
use crate::blocks::edit_file::{FileEdit, NoSwap, edit_file};
use crate::blocks::error::EditError;
use crate::blocks::file::File;
use crate::blocks::outbox::{NewContent, Outbox};
use crate::blocks::read_pieces::seek_to;
use crate::format::build::Sink;
use crate::format::{InodeBlock, MAX_FILE_BYTES};
use crate::shared::fault::Fault;
use crate::shared::inline_blocks::Pin;
use crate::shared::inode::{Contents, FileData, Inode, InodeKey, MAX_INLINE_BYTES, Written};
use crate::shared::inodes::Base;
use crate::shared::table::View;

/// How often a call fetches something stored before it is given up.
const MAX_LOADS: usize = 64;

/// How often a file is written whose inode had other contents when it was.
const MAX_CONFLICTS: usize = 4;

/// How many paths a message names, and about how many bytes of them. Guesses.
const MAX_TOLD_PATHS: usize = 5;
const MAX_TOLD_BYTES: usize = 400;

impl Shared {
    fn pin(&self, block: Bytes) -> Arc<Pin> {
        Arc::new(self.inline.pin(block))
    }

    pub(super) fn view(&self, version: Arc<Version>) -> Result<View, Errno> {
        let inode = version.clone();
        self.view_of(version, inode.inode())
    }

    /// A file that shows another inode than that of the version on which its next one is based.
    pub(super) fn view_of(&self, base: Arc<Version>, inode: &Inode) -> Result<View, Errno> {
        let pin = |block: Vec<u8>| self.pin(block.into());
        View::of(base, inode, (self.block_size_log2, self.env.now()), pin)
    }

    /// Opens a regular file as it is now.
    pub(super) async fn open(
        &self,
        number: u64,
        flags: OpenFlags,
        pid: u32,
    ) -> Result<Opened, Fault> {
        let (key, turn) = {
            let table = self.table();
            let node = table.node(number)?;
            match node.kind {
                FileKind::Regular => {}
                FileKind::Directory => return Err(Errno::EISDIR.into()),
                FileKind::Symlink => return Err(Errno::ELOOP.into()),
                _ => return Err(Errno::ENXIO.into()),
            }
            (node.key, node.turn.clone())
        };
        let _turn = turn.lock().await;
        let is_changed = {
            let table = self.table();
            let node = table.node(number)?;
            node.orphan.is_some() || node.view.as_ref().is_some_and(View::has_changes)
        };
        let newest = match is_changed {
            true => None,
            false => Some(self.read_without_conflicts(key).await?),
        };
        let empties = flags.has(OpenFlags::TRUNCATE);
        if let Some(version) = newest.as_ref().filter(|_| flags.writes() || empties) {
            self.check_may_write(version).await?;
        }
        // From here on nothing is waited for: an open that is given up leaves no handle.
        let now = self.now();
        let mut table = self.table();
        let version = match newest {
            Some(version) => Some(version),
            // Its last name is gone, and it was not open.
            None => {
                let node = table.node(number)?;
                node.orphan.clone().filter(|_| node.view.is_none())
            }
        };
        if let Some(version) = version {
            table.set_view(number, self.view(version)?)?;
        }
        if empties {
            // Of a file that is emptied no block is needed.
            let emptied = |view: &mut View| {
                view.change(now, |content| content.resize(0, &LoadedContent::default()))
            };
            table.on_view(number, emptied)?.map_err(|_| Errno::EIO)?;
        }
        let handle = table.open_file(number, flags, pid)?;
        let stored = table.on_view(number, |view| view.content.stored)?;
        let before = table.node_mut(number)?.in_kernel.replace(stored);
        Ok(Opened { handle: Handle(handle), keep_cache: before == Some(stored), direct_io: false })
    }

    pub(super) async fn check_may_write(&self, version: &Version) -> Result<(), Fault> {
        Ok(self.inodes.credentials.check(version.block.groups()).await?)
    }

    pub(super) async fn read(
        &self,
        (number, handle): (u64, u64),
        offset: u64,
        len: u32,
    ) -> Result<Bytes, Fault> {
        let (pieces, stored, _pin) = {
            let mut table = self.table();
            if !table.flags(number, handle)?.reads() {
                return Err(Errno::EBADF.into());
            }
            table.see(number, handle);
            table.on_view(number, |view| {
                let end = offset.saturating_add(u64::from(len)).min(view.content.size_bytes);
                let pieces =
                    if offset < end { view.content.pieces(offset..end) } else { Vec::new() };
                (pieces, view.content.stored, view.pin.clone())
            })?
        };
        let found = self.readers.assemble(pieces, stored, handle, len, &NoSwap).await?;
        Ok(found.ok_or(Errno::EIO)?)
    }

    pub(super) async fn seek(
        &self,
        (number, handle): (u64, u64),
        offset: u64,
        to: SeekTo,
    ) -> Result<u64, Fault> {
        let _pin = {
            let mut table = self.table();
            table.flags(number, handle)?;
            table.on_view(number, |view| view.pin.clone())?
        };
        let layout = |at| {
            let layout = self.table().on_view(number, |view| view.content.layout(at));
            std::future::ready(layout.map_err(Fault::from))
        };
        seek_to(&self.cache, offset, to, layout).await
    }

    pub(super) async fn write(
        &self,
        writer: Writer,
        (number, handle): (u64, u64),
        offset: u64,
        data: &Bytes,
    ) -> Result<u32, Fault> {
        self.check_writes(number, handle)?;
        let is_append = matches!(writer, Writer::AtEnd(_));
        let overwrites = Some(handle).filter(|_| !is_append);
        self.change_content((number, overwrites), |content, loaded| {
            let offset = if is_append { content.size_bytes } else { offset };
            content.write(offset, data, loaded)
        })
        .await?;
        if self.table().held_bytes() >= self.options.max_changed_bytes {
            self.make_room(number).await?;
        }
        Ok(u32::try_from(data.len()).expect("a write is below 4 GiB"))
    }

    fn check_writes(&self, number: u64, handle: u64) -> Result<(), Errno> {
        let writes = self.table().flags(number, handle)?.writes();
        if !writes {
            return Err(Errno::EBADF);
        }
        self.check_lock(number, handle)
    }

    /// Makes holes or zeros, or lengthens a file. No space is reserved.
    pub(super) async fn fallocate(
        &self,
        (number, handle): (u64, u64),
        (offset, len): (u64, u64),
        mode: i32,
    ) -> Result<(), Fault> {
        let keeps_size = mode & FALLOC_KEEP_SIZE != 0;
        match mode & !FALLOC_KEEP_SIZE {
            0 | FALLOC_ZERO_RANGE => {}
            FALLOC_PUNCH_HOLE if keeps_size => {}
            _ => return Err(Errno::EOPNOTSUPP.into()),
        }
        self.check_writes(number, handle)?;
        let end = offset.checked_add(len).filter(|_| len > 0).ok_or(Errno::EINVAL)?;
        if mode & FALLOC_PUNCH_HOLE == 0 && end > MAX_FILE_BYTES {
            return Err(Errno::EFBIG.into());
        }
        let overwrites = Some(handle).filter(|_| mode & !FALLOC_KEEP_SIZE != 0);
        self.change_content((number, overwrites), |content, loaded| {
            if mode & !FALLOC_KEEP_SIZE != 0 {
                content.punch(offset..end, loaded)?;
            }
            if !keeps_size && end > content.size_bytes {
                content.resize(end, loaded)?;
            }
            Ok(())
        })
        .await
    }

    /// Changes the contents of an open file, in memory. `overwrites` is the handle by which that is done, `None` if it only adds
    /// to them.
    pub(super) async fn change_content(
        &self,
        (number, overwrites): (u64, Option<u64>),
        mut change: impl FnMut(&mut Content, &LoadedContent) -> Result<(), ContentStop>,
    ) -> Result<(), Fault> {
        let turn = self.table().node(number)?.turn.clone();
        let is_clean = self.table().on_view(number, |view| !view.has_changes())?;
        // The first change of a view waits until nothing replaces it by a newer version.
        let _turn = if is_clean { Some(turn.lock().await) } else { None };
        let mut loaded = LoadedContent::default();
        for _ in 0..MAX_LOADS {
            let now = self.now();
            let done = {
                let mut table = self.table();
                let done = table
                    .on_view(number, |view| view.change(now, |content| change(content, &loaded)))?;
                if let (Ok(()), Some(handle)) = (&done, overwrites) {
                    table.overwritten(number, handle);
                }
                done
            };
            match done {
                Ok(()) => return Ok(()),
                Err(ContentStop::Errno(errno)) => return Err(errno.into()),
                Err(ContentStop::Need(need)) => {
                    let _pin = self.table().on_view(number, |view| view.pin.clone())?;
                    loaded.load(need, &self.cache, &NoSwap).await?;
                }
            }
        }
        Err(Fault::new(Errno::EIO, format!("a call needed more than {MAX_LOADS} blocks")))
    }

    /// Ends an open. What was written is on the ring, or is tried again later.
    pub(super) async fn close(&self, number: u64, handle: u64) -> Result<(), Fault> {
        self.readers.close(handle);
        self.forget_open_file(handle);
        let is_last = {
            let table = self.table();
            table.flags(number, handle)?;
            table.opens(number) == 1
        };
        // Nobody hears of an error here: a close that could fail was a flush.
        if is_last && let Err(fault) = self.publish(number).await {
            self.note(Some(&fault));
        }
        Ok(self.table().close(number, handle)?)
    }

    pub(super) fn note(&self, fault: Option<&Fault>) {
        let why = fault.map(|fault| fault.why.clone().unwrap_or_else(|| fault.errno.to_string()));
        self.trouble.lock().expect("no holder of this lock panics").clone_from(&why);
        if let Some(why) = why {
            tracing::warn!("what was written is not on the ring yet: {why}");
        }
    }

    /// Writes everything that is in memory alone.
    pub(super) async fn store_all(&self) -> Result<(), Fault> {
        let removed = self.put_removals().await;
        self.publish_all(false).await.map_err(|error| Fault::new(Errno::EIO, error))?;
        removed
    }

    /// Files with changes in memory by their paths, for people; of many a few.
    pub(super) fn changed_paths(&self) -> String {
        let table = self.table();
        let changed = table.changed(false);
        let mut told = String::new();
        for (count, number) in changed.iter().enumerate() {
            let path = table.path_of(*number).unwrap_or_else(|| "one without a name".into());
            let path = path.replace(char::is_control, "?");
            if count == MAX_TOLD_PATHS || (count > 0 && told.len() + path.len() > MAX_TOLD_BYTES) {
                told += &format!(" and {} more", changed.len() - count);
                break;
            }
            told += if count == 0 { "" } else { ", " };
            told += &path;
        }
        if told.is_empty() { "removed names".into() } else { told }
    }

    /// Writes all files that have changes; if `abandoned`, of these such as are not open.
    pub(super) async fn publish_all(&self, abandoned: bool) -> Result<(), EndError> {
        let mut failed = None;
        let changed = self.table().changed(abandoned);
        for number in changed {
            match self.publish(number).await {
                Ok(()) => self.table().reap(number),
                Err(fault) => failed = Some(fault),
            }
        }
        // Another task may have stored meanwhile what failed here.
        let left = self.table().changed(abandoned).len();
        let failed = failed.filter(|_| left > 0);
        self.note(failed.as_ref());
        match failed {
            None => Ok(()),
            Some(fault) => Err(EndError::of((left, self.changed_paths()), fault)),
        }
    }

    /// Brings a file's changes to the ring: its data, then its inode.
    pub(super) async fn publish(&self, number: u64) -> Result<(), Fault> {
        self.note_loss(number);
        let (key, turn) = {
            let table = self.table();
            let node = table.node(number)?;
            if !node.view.as_ref().is_some_and(View::has_changes) {
                return Ok(());
            }
            (node.key, node.turn.clone())
        };
        let _turn = turn.lock().await;
        let had_alone = self.has_alone(number);
        // A change that comes while data is on its way is not in the inode which is put then: it stays to be published.
        // Who had the turn before may have stored everything, and its program may have closed the file.
        let Some(changes) = self.table().changes(number) else { return Ok(()) };
        let drops = self.table().node(number)?.drops;
        if self.table().node(number)?.orphan.is_none() {
            self.store_contents(number).await?;
        }
        let is_newborn = self.table().node(number)?.birthplace.is_some();
        let (base, attributes, file, unseen_since) = {
            let mut table = self.table();
            let is_orphan = table.node(number)?.orphan.is_some();
            let found = table.on_view(number, |view| {
                if is_orphan {
                    view.changes = 0;
                }
                let Stored { size_bytes, blocks_512, .. } = view.content.stored;
                let file = (size_bytes, blocks_512, view.data.clone());
                let seen = view.unseen_since.clone();
                let found = (view.version.clone(), view.attributes.clone(), file, seen);
                Some(found).filter(|_| view.has_changes())
            })?;
            let Some(found) = found else { return Ok(()) };
            found
        };
        self.check_reused(number, file.2.as_ref()).await?;
        let mut resolved = match unseen_since {
            // Written by others, and shown to other programs here: the caller has not seen it.
            Some(seen) => Some(self.keep_conflicts(key, Some(&seen)).await?),
            None => None,
        };
        for _ in 0..MAX_CONFLICTS {
            self.check_signs(number, had_alone)?;
            let over = match &resolved {
                None => Base::Version(&base),
                Some(newest) => Base::Version(newest),
            };
            let time_ms = self.env.unix_ms();
            let edit = |inode: &mut Inode, dot| {
                inode.attributes = attributes.clone();
                let (size_bytes, blocks_512, data) = file.clone();
                let written = Written { dot, time_ms };
                let contents = Contents::Regular { size_bytes, blocks_512, data, written };
                // Contents that are as they were stay those of their write.
                if !contents.is_same(&inode.contents) {
                    inode.contents = contents;
                }
                Ok(())
            };
            let together = match is_newborn && resolved.is_none() {
                true => self.store_and_name(number, (key, &base), edit).await?,
                false => None,
            };
            let published = match together {
                Some((version, named)) => Ok((version, Some(named))),
                None => {
                    let updated = self.inodes.update(key, over, edit).await;
                    updated.map(|((), version)| (version, None))
                }
            };
            match published {
                Ok((version, _)) if self.table().node(number)?.drops > drops => {
                    self.show_arrived(number, version)?;
                    return Err(Fault::new(Errno::EIO, "the lock was lost"));
                }
                Ok((version, named)) => {
                    let replaced = self.table().on_view(number, |view| {
                        view.version = version.clone();
                        view.unseen_since = None;
                        std::mem::take(&mut view.replaced)
                    })?;
                    // A file that keeps what was not seen may refer to the same blocks.
                    if resolved.is_none() {
                        self.releases.note_data(key, &version, replaced);
                    }
                    match named {
                        Some(named) => named?,
                        None => self.name_stored(number).await?,
                    }
                    let mut table = self.table();
                    let stored = table.on_view(number, |view| {
                        if view.changes == changes {
                            view.changes = 0;
                        }
                        view.content.stored
                    })?;
                    // The kernel has what was written through it.
                    let node = table.node_mut(number)?;
                    node.in_kernel = Some(stored);
                    node.is_nameless = false;
                    drop(table);
                    if !is_newborn {
                        self.note_written(number);
                    }
                    return Ok(());
                }
                // Others' contents become files of their own, and are covered then.
                Err(fault) if fault.is_conflict => {
                    resolved = Some(self.keep_conflicts(key, Some(&base)).await?);
                }
                Err(fault) => return Err(fault),
            }
        }
        Err(Fault::conflict())
    }

    /// Shows a version that was signed under a lock and has reached the ring after that was lost, unless a program has
    /// changed the file since. The caller has the file's turn.
    fn show_arrived(&self, number: u64, version: Arc<Version>) -> Result<(), Errno> {
        let mut table = self.table();
        if table.on_view(number, |view| view.has_changes()) == Ok(false) {
            table.set_view(number, self.view(version)?)?;
            self.drop_pages(&mut table, number)?;
        }
        Ok(())
    }

    /// Brings a file's changed data to the ring, not its inode. The caller has the file's turn.
    async fn store_contents(&self, number: u64) -> Result<(), Fault> {
        let plan = self.table().on_view(number, |view| {
            let content = &mut view.content;
            if !content.is_changed {
                return None;
            }
            content.begin_flush();
            let new = content.flushing.clone();
            Some((content.stored, content.flushing_cut, content.shape(), new, view.pin.clone()))
        })?;
        let Some((old, cut, shape, new, _pin)) = plan else { return Ok(()) };
        let undo = UndoFlush { shared: self, number };
        let key = self.table().node(number)?.key;
        let sealer = self.inodes.reading.sealer().await?;
        let content = sealer.of_inode(key);
        let outbox = Outbox::new(&self.blocks, &self.cache, Some(&content));
        let mut sink = InodeLast { outbox, last: None };
        let (stored, data, pin) = match shape {
            None => (Stored::default(), None, None),
            Some(shape) => {
                let file = File::open(&self.cache, old.inode, old.size_bytes).await?;
                let edit = FileEdit { old: file, cut, shape, new, swap: &NoSwap };
                let written = match edit_file(&edit, old.blocks_512, &mut sink).await {
                    Err(EditError::Refused) => {
                        sink.outbox.advance().await?;
                        return Err(EditError::Refused.into());
                    }
                    written => written?,
                };
                let block = sink.last.take().expect("a file's inode block is written last");
                let (inode, blocks_512) = (written.inode, written.blocks_512);
                let stored =
                    Stored { inode: Some(inode), size_bytes: shape.size_bytes, blocks_512 };
                if block.plain.len() <= MAX_INLINE_BYTES {
                    let data = FileData::Here(InodeBlock::decode(&block.plain)?);
                    let pin = self.pin(block.plain);
                    (Stored { inode: Some(pin.hash), ..stored }, Some(data), Some(pin))
                } else {
                    sink.outbox.push(block);
                    (stored, Some(FileData::Elsewhere(inode)), None)
                }
            }
        };
        sink.outbox.finish().await?;
        self.table().on_view(number, |view| {
            // Unless what was changed has been dropped meanwhile, with the lock of the file.
            if view.has_changes() {
                view.content.end_flush(stored);
                view.replaced.extend(view.data.take());
                view.data = data;
                view.pin = pin;
            }
        })?;
        std::mem::forget(undo);
        Ok(())
    }

    /// Makes room in memory: the data of this file goes to the ring, and if that is not enough, of others.
    async fn make_room(&self, number: u64) -> Result<(), Fault> {
        let others = self.table().changed(false);
        for number in std::iter::once(number).chain(others) {
            let turn = {
                let table = self.table();
                if table.held_bytes() < self.options.max_changed_bytes {
                    break;
                }
                table.node(number).map(|node| node.turn.clone())
            };
            let Ok(turn) = turn else { continue };
            let _turn = turn.lock().await;
            match self.store_contents(number).await {
                // It was closed meanwhile.
                Err(Fault { errno: Errno::ESTALE | Errno::EBADF, .. }) => {}
                done => done?,
            }
        }
        Ok(())
    }

    /// The newest version of a file, with one content.
    pub(super) async fn read_without_conflicts(
        &self,
        key: InodeKey,
    ) -> Result<Arc<Version>, Fault> {
        let version = self.inodes.read(key, Freshness::Newest).await?;
        if version.merged.conflicts.is_empty() {
            return Ok(version);
        }
        match self.keep_conflicts(key, None).await {
            Ok(version) => Ok(version),
            // Somebody who may write there does it another time.
            Err(fault) => {
                tracing::debug!("contents written at the same time stay in their inode: {fault:?}");
                Ok(version)
            }
        }
    }
}

/// Lookups and an open of a file that only this call knows: they end with it, also if it is given up.
pub(super) struct Held<'a> {
    pub(super) shared: &'a Shared,
    pub(super) number: u64,
    pub(super) lookups: u64,
    pub(super) handle: Option<u64>,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let mut table = self.shared.table();
        if let Some(handle) = self.handle {
            // It is open, since nobody else knows the handle.
            let _ = table.close(self.number, handle);
        }
        table.forget(self.number, self.lookups);
    }
}

/// Undoes a flush that has failed, or was given up.
struct UndoFlush<'a> {
    shared: &'a Shared,
    number: u64,
}

impl Drop for UndoFlush<'_> {
    fn drop(&mut self) {
        // A file that is not there any more has nothing to undo.
        let _ = self.shared.table().on_view(self.number, |view| view.content.undo_flush());
    }
}

/// Keeps the last block back: a file's inode block, which may go into its inode.
struct InodeLast<'a> {
    outbox: Outbox<'a>,
    last: Option<NewContent>,
}

impl Sink<EditError> for InodeLast<'_> {
    fn emit(&mut self, block: Vec<u8>) -> Result<atoll_key::BlockHash, EditError> {
        let block = self.outbox.seal(block);
        let hash = block.hash;
        if let Some(before) = self.last.replace(block) {
            self.outbox.push(before);
        }
        Ok(hash)
    }

    fn pace(&mut self) -> atoll_env::BoxFuture<'_, bool> {
        Sink::<EditError>::pace(&mut self.outbox)
    }
}
