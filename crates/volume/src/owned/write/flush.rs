//! Changes become blocks, and then the volume's next root.
//!
//! The order makes every flush a consistent version of the whole tree: data, then what points to
//! it, then directories from the bottom up, and when the ring has acknowledged all of that, the
//! root (CFS §3.1). Readers see the old tree or the new one.
//!
//! One task writes, so that flushes do not overlap. It begins when a caller waits for it
//! (`fsync`), when much is changed, and otherwise every [`FLUSH_EVERY`]. A flush that fails is
//! undone in memory and tried again.
//!
//! Where the ring has no room for all, or has lost a block of which a part is to be kept, the files are
//! written one by one, and those that cannot be are *left out*: everything else is written, and their entries
//! keep the contents that are stored. They are tried again after [`TRY_AGAIN_AFTER`], and when a caller
//! waits for them. The spool gets their contents once more before the root is put, since the root counts
//! all records as merged. Nothing is written while a file that is left out stands under the name of
//! another that is stored: the ring would lose that one.
//!
//! The root is put with the version after the one that this mount has put or read, and no other:
//! where a second writer has put one, the ring refuses, and this mount is *fenced*: it changes
//! nothing any more. While it is not known whether the ring has a root, the same bytes are put again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::Duration;

use atoll_dht::{GetError, PutError};
use atoll_env::sleep;
use atoll_key::SignedBlock;
use futures_util::future::{Either, select};

use super::tree::{DirectoryPlan, FilePlan, Flushed, Plan};
use super::{FlushError, Head, LeftOut, Shared, Waiter};
use crate::blocks::content::Stored;
use crate::blocks::directory;
use crate::blocks::edit_directory::{Changes, edit_directory};
use crate::blocks::edit_file::{FileEdit, edit_file};
use crate::blocks::error::EditError;
use crate::blocks::file::File;
use crate::blocks::outbox::Outbox;
use crate::format::build::Sink;
use crate::format::{Content, DirectoryRef, xattrs};
use crate::owned::root::{MountState, Root, Writer};
use crate::owned::sealed_root;

/// How long a change waits for others at most. The paper on D2 writes back after 30 s; an editor's
/// save should be seen by readers sooner. Guess.
pub(super) const FLUSH_EVERY: Duration = Duration::from_secs(10);

/// How long a mount may be silent before another one may write: it then takes part in no flush
/// for so long that it must be gone, or cut off.
pub(super) const WRITER_LEASE: Duration = Duration::from_secs(120);

/// How long after a failure the root is put again.
const RETRY_AFTER: Duration = Duration::from_secs(2);

/// How long files are left out before they are tried again. Guess.
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(30);

/// Runs until the mount ends.
pub(super) async fn run(shared: Weak<Shared>) {
    loop {
        let Some(mount) = shared.upgrade() else { return };
        let (env, wake) = (mount.env.clone(), mount.wake.clone());
        let waiters = mount.take_waiters();
        let due = mount.writer_is_due(&*mount.head.lock().await);
        let tries_again = mount.tries_again(&waiters);
        if !waiters.is_empty() || due || tries_again || mount.tree().is_changed() {
            let outcome = mount.flush(tries_again).await;
            mount.note(&outcome);
            mount.flush_ends.lock().expect("no holder of this lock panics").clear();
            for waiter in waiters {
                let outcome = outcome.clone().and_then(|()| mount.check_left_out(waiter.about));
                // Those that waited may have given up.
                let _ = waiter.sender.send(outcome);
            }
            if outcome.is_err() {
                drop(mount);
                sleep(&*env, RETRY_AFTER).await;
                continue;
            }
        }
        if mount.has_waiters() {
            continue;
        }
        drop(mount);
        let woken = std::pin::pin!(wake.notified());
        select(woken, sleep(&*env, FLUSH_EVERY)).await;
    }
}

impl Shared {
    /// Writes all changes, but the contents of files that find no room or that the ring has lost in part;
    /// when it returns, the ring has them.
    pub(super) async fn flush(&self, tries_again: bool) -> Result<(), FlushError> {
        self.check_fence()?;
        let mut head = self.head.lock().await;
        let before = self.left_out_now();
        let left_out = if tries_again { BTreeMap::new() } else { before };
        let error = match self.flush_without(&left_out, tries_again, &mut head).await {
            Err(error) if error.leaves_others() => error,
            flushed => {
                if flushed.is_ok() && left_out.is_empty() {
                    *self.left_out() = None;
                }
                return flushed;
            }
        };
        let files = self.find_unstorable(tries_again, &mut head).await?;
        if files.is_empty() {
            return Err(error);
        }
        if self.tree().is_changed() {
            self.flush_without(&files, false, &mut head).await?;
        }
        *self.left_out() = Some(LeftOut { files, since: self.env.now() });
        Ok(())
    }

    /// Writes all changes but the contents of these files.
    async fn flush_without(
        &self,
        left_out: &BTreeMap<u64, FlushError>,
        tries_again: bool,
        head: &mut Head,
    ) -> Result<(), FlushError> {
        let (plan, records, restated) = {
            let mut tree = self.tree();
            // What has changed until now, and nothing later, is in the records until now.
            let plan = tree.begin_flush(&left_out.keys().copied().collect(), tries_again);
            let spool = self.spool.as_ref().filter(|_| plan.is_some());
            let restated: Vec<_> = match spool {
                Some(_) => left_out.keys().filter_map(|inode| tree.restated(*inode)).collect(),
                None => Vec::new(),
            };
            (plan, spool.map_or(0, |spool| spool.cut()), restated)
        };
        let Some(mut plan) = plan else {
            if head.unsure.is_none() && !self.writer_is_due(head) {
                return Ok(());
            }
            let root = self.marked(head.root.clone(), true);
            return self.put_root(head, root).await;
        };
        let is_news = plan.is_news;
        let planned = std::mem::take(&mut plan.xattrs);
        let old = head.root.clone();
        let write = async {
            self.check_replaces_nothing(&plan, left_out).await?;
            let written = self.write(plan, &planned, &old).await?;
            if let Some(spool) = self.spool.as_ref().filter(|_| !restated.is_empty()) {
                let unkept = |why| format!("what is left out cannot be kept in the spool: {why}");
                let kept = spool.restate(records, &restated).await;
                kept.map_err(|why| PutError::Full(unkept(why)))?;
            }
            Ok(written)
        };
        let put = match self.write_as_writer(write, head).await {
            Ok((mut root, flushed)) => {
                root.mounted.merge(self.spool_id, records);
                self.put_root(head, self.marked(root, true)).await.map(|()| flushed)
            }
            Err(error) => Err(error),
        };
        let flushed = put.inspect_err(|_| self.tree().undo_flush(is_news))?;
        self.releases.note_kept();
        self.tree().end_flush(&flushed, &planned);
        if let Some(spool) = &self.spool {
            spool.merged(records, head.block.clone(), left_out.is_empty());
            if !left_out.is_empty() {
                // They would make each writer wait. A disk that fails has been said.
                let _ = self.swap_out(spool).await;
            }
        }
        self.clear_swap().await;
        Ok(())
    }

    /// The files whose contents cannot be stored, and why: all are written one by one, small changes first.
    async fn find_unstorable(
        &self,
        tries_again: bool,
        head: &mut Head,
    ) -> Result<BTreeMap<u64, FlushError>, FlushError> {
        let plan = self.tree().begin_flush(&BTreeSet::new(), tries_again);
        let Some(mut plan) = plan else { return Ok(BTreeMap::new()) };
        plan.files.sort_by_key(|file| (file.new.len(), file.inode));
        let (is_news, files) = (plan.is_news, std::mem::take(&mut plan.files));
        let write = async {
            let mut unstorable = BTreeMap::new();
            for file in files {
                let (inode, mut outbox) = (file.inode, self.outbox());
                let written = async {
                    self.write_file(file, &mut outbox).await?;
                    Ok::<_, FlushError>(outbox.finish().await?)
                };
                match written.await {
                    Err(error) if error.leaves_others() => drop(unstorable.insert(inode, error)),
                    written => written?,
                }
            }
            Ok(unstorable)
        };
        let found = self.write_as_writer(write, head).await;
        self.tree().undo_flush(is_news);
        found
    }

    /// That no file which is left out stands under the name of another that is stored, with contents.
    async fn check_replaces_nothing(
        &self,
        plan: &Plan,
        left_out: &BTreeMap<u64, FlushError>,
    ) -> Result<(), FlushError> {
        for (parent, stored, inode, entry) in plan.entries_left_out() {
            if stored.hash.is_none() {
                continue;
            }
            let found = directory::find(&self.cache, &stored, &entry.name).await;
            let Some(old) = found.map_err(EditError::Read)? else { continue };
            let is_empty = matches!(old.content, Content::Regular { size_bytes: 0, .. });
            if !is_empty && !self.tree().is_entry_of(inode, parent, &old) {
                let name = String::from_utf8_lossy(&entry.name);
                let what = format!("{name}, which would replace a file that is stored,");
                let error = left_out.get(&inode).expect("the plan leaves out these files");
                return Err(FlushError::LeftOut { what, error: Box::new(error.clone()) });
            }
        }
        Ok(())
    }

    /// The files that the last flush has left out and that still have such contents.
    fn left_out_now(&self) -> BTreeMap<u64, FlushError> {
        let mut left_out = self.left_out();
        let Some(before) = &mut *left_out else { return BTreeMap::new() };
        let tree = self.tree();
        before.files.retain(|inode, _| tree.has_changed_content(*inode));
        let files = before.files.clone();
        if files.is_empty() {
            *left_out = None;
        }
        files
    }

    /// Whether what former flushes have left out is to be tried: a caller waits for it, or it is time.
    fn tries_again(&self, waiters: &[Waiter]) -> bool {
        if self.left_out_now().is_empty() {
            return false;
        }
        let is_awaited = waiters.iter().any(|w| self.check_left_out(w.about).is_err());
        let left_out = self.left_out();
        let is_due = left_out
            .as_ref()
            .is_some_and(|left_out| self.env.now().since(left_out.since) >= TRY_AGAIN_AFTER);
        is_awaited || is_due && !self.has_ended()
    }

    /// Ends this mount's time as the writer, so that another one need not wait. If it `leaves` something in the
    /// spool, the root goes on naming it, so that the next writer keeps what that follows.
    pub(super) async fn resign(&self, leaves: bool) -> Result<(), FlushError> {
        self.check_fence()?;
        let mut head = self.head.lock().await;
        let mut root = self.marked(head.root.clone(), false);
        root.mounted.writer = leaves.then_some(Writer { spool: self.spool_id, until_unix_ms: 0 });
        self.put_root(&mut head, root).await
    }

    /// `root` with this mount as the writer, or with none.
    pub(super) fn marked(&self, mut root: Root, writes: bool) -> Root {
        let lease_ms = WRITER_LEASE.as_millis() as u64;
        let until_unix_ms = self.env.unix_ms().saturating_add(lease_ms);
        root.mounted.writer = writes.then_some(Writer { spool: self.spool_id, until_unix_ms });
        let records = root.mounted.records_of(&[self.spool_id]);
        root.mounted.merge(self.spool_id, records);
        root
    }

    /// Whether this mount has ended its time as the writer, with nothing left to write.
    pub(super) async fn has_resigned(&self) -> bool {
        let head = self.head.lock().await;
        head.unsure.is_none() && head.root.mounted.writer.is_none() && !self.tree().is_changed()
    }

    /// Whether the root must say again that this mount writes.
    fn writer_is_due(&self, head: &Head) -> bool {
        let writer = head.root.mounted.writer.filter(|writer| writer.until_unix_ms > 0);
        let Some(writer) = writer else { return false };
        let left = writer.until_unix_ms.saturating_sub(self.env.unix_ms());
        left < WRITER_LEASE.as_millis() as u64 / 2 && self.check_fence().is_ok()
    }

    /// Puts the next root. Resolves when the ring has it or has refused it, or when the mount has
    /// ended and the ring does not answer.
    pub(super) async fn put_root(&self, head: &mut Head, root: Root) -> Result<(), FlushError> {
        if let Some((block, root)) = head.unsure.clone() {
            self.settle_root(head, block, root).await?;
        }
        let payload = sealed_root::encode(&root, self.cipher.as_ref());
        let version = head.block.version + 1;
        let block = SignedBlock::sign(&self.secret, b"", version, &payload);
        self.settle_root(head, block, root).await
    }

    /// Puts a root until it is known what has become of it, or no call is served.
    async fn settle_root(
        &self,
        head: &mut Head,
        block: SignedBlock,
        root: Root,
    ) -> Result<(), FlushError> {
        head.unsure = Some((block.clone(), root.clone()));
        loop {
            let error = match self.blocks.put_signed(block.clone()).await {
                Ok(()) => break,
                Err(PutError::Superseded { held, .. }) => match self.is_on_ring(&block).await {
                    Ok(true) => break,
                    Ok(false) => return Err(self.fence(held)),
                    Err(error) => error.into(),
                },
                Err(error) => FlushError::Put(error),
            };
            // The ring may have it or not: another root of this version would be a rival.
            tracing::warn!("the volume's root is put again: {error}");
            self.fail_waiters(&error);
            if self.has_ended() {
                return Err(error);
            }
            sleep(&*self.env, RETRY_AFTER).await;
        }
        *head = Head { block, root, unsure: None };
        Ok(())
    }

    /// Writes, however long it takes, and says meanwhile that this mount is the writer.
    async fn write_as_writer<T>(
        &self,
        write: impl Future<Output = Result<T, FlushError>>,
        head: &mut Head,
    ) -> Result<T, FlushError> {
        let mut write = std::pin::pin!(write);
        loop {
            match select(write.as_mut(), sleep(&*self.env, FLUSH_EVERY)).await {
                Either::Left((written, _)) => return written,
                Either::Right(_) if self.writer_is_due(head) => {
                    let root = self.marked(head.root.clone(), true);
                    self.put_root(head, root).await?;
                }
                Either::Right(_) => {}
            }
        }
    }

    pub(super) async fn is_on_ring(&self, block: &SignedBlock) -> Result<bool, GetError> {
        match self.blocks.get_signed(self.secret.volume_id().root_key()).await {
            Ok(found) => Ok(found == *block),
            Err(GetError::Removed { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Writes all blocks but the root.
    async fn write(
        &self,
        plan: Plan,
        xattrs: &[(u64, Arc<super::tree::Xattrs>)],
        old: &Root,
    ) -> Result<(Root, Flushed), FlushError> {
        let mut outbox = self.outbox();
        let now = self.env.unix_ms();
        let mut flushed = Flushed { left_out: plan.left_out, ..Flushed::default() };
        for file in plan.files {
            let inode = file.inode;
            let stored = self.write_file(file, &mut outbox).await?;
            flushed.files.insert(inode, stored);
            outbox.advance().await?;
        }
        for (inode, all) in xattrs {
            let sorted: Vec<_> = all.iter().map(|(n, v)| (n.clone(), v.clone())).collect();
            let hash = match xattrs::encode(&sorted).filter(|_| !sorted.is_empty()) {
                Some(block) => Some(Sink::<EditError>::emit(&mut outbox, block)?),
                None => None,
            };
            flushed.xattrs.insert(*inode, hash);
        }
        flushed.links = self.write_directory(plan.links, &flushed, &mut outbox).await?;
        for directory in plan.directories {
            let inode = directory.inode;
            let stored = self.write_directory(directory, &flushed, &mut outbox).await?;
            flushed.directories.insert(inode, stored);
            outbox.advance().await?;
        }
        let history = self.next_history(old, now, &mut outbox).await?;
        let replaced = self.next_replaced(old, now, &mut outbox).await?;
        outbox.finish().await?;
        let top = flushed.complete(plan.root);
        let Content::Directory(directory) = top.content else {
            unreachable!("the root is a directory")
        };
        let root = Root {
            mode: top.mode,
            mtime: top.mtime,
            published_unix_ms: now,
            xattrs: top.xattrs,
            directory,
            files: plan.totals.files,
            dirs: plan.totals.dirs,
            symlinks: plan.totals.symlinks,
            bytes: plan.totals.bytes,
            mounted: MountState {
                owner: top.owner,
                next_inode: plan.next_inode,
                links: flushed.links,
                writer: None,
                merged: old.mounted.merged.clone(),
                history,
                keep: old.mounted.keep,
                replaced,
                has_own_blocks: old.mounted.has_own_blocks,
            },
            ..old.clone()
        };
        Ok((root, flushed))
    }

    async fn write_file(
        &self,
        plan: FilePlan,
        outbox: &mut Outbox<'_>,
    ) -> Result<Stored, FlushError> {
        let Some(shape) = plan.shape else { return Ok(Stored::default()) };
        let Stored { inode, size_bytes, blocks_512 } = plan.stored;
        let edited = async {
            let old = File::open(&self.cache, inode, size_bytes).await?;
            let edit = FileEdit { old, cut: plan.cut, shape, new: plan.new, swap: self.swap() };
            edit_file(&edit, blocks_512, outbox).await
        };
        let written = match edited.await {
            Ok(written) => written,
            Err(EditError::Refused) => {
                outbox.advance().await?;
                return Err(EditError::Refused.into());
            }
            Err(EditError::Read(error)) => {
                let path = self.name_of(plan.inode);
                return Err(FlushError::Block(Box::new(error.at(path.as_bytes()))));
            }
            Err(error) => return Err(error.into()),
        };
        Ok(Stored {
            inode: Some(written.inode),
            size_bytes: shape.size_bytes,
            blocks_512: written.blocks_512,
        })
    }

    async fn write_directory(
        &self,
        plan: DirectoryPlan,
        flushed: &Flushed,
        outbox: &mut Outbox<'_>,
    ) -> Result<DirectoryRef, FlushError> {
        if plan.changes.is_empty() {
            return Ok(plan.stored);
        }
        let complete = |template| flushed.complete(template);
        let changes: Changes = plan
            .changes
            .into_iter()
            .map(|(name, template)| (name, template.map(complete)))
            .collect();
        Ok(edit_directory(&self.cache, &plan.stored, changes, outbox).await?)
    }
}

impl From<EditError> for FlushError {
    fn from(error: EditError) -> FlushError {
        match error {
            EditError::Read(error) => FlushError::Block(Box::new(error.at(b""))),
            EditError::Swap(error) => FlushError::Read(error),
            EditError::Refused => FlushError::Read("new blocks are not taken".into()),
            EditError::Format(error) => FlushError::Format(error.to_string()),
        }
    }
}

impl From<PutError> for FlushError {
    fn from(error: PutError) -> FlushError {
        FlushError::Put(error)
    }
}

impl From<GetError> for FlushError {
    fn from(error: GetError) -> FlushError {
        FlushError::Read(error.to_string())
    }
}
