//! The primary's side of *whole copying*: it gives all files to a member whose disk is new, or whose log ends before the primary's begins.
//!
//! **Names** are those of one change S: the primary makes a checkpoint, and goes through what the index has by it, whatever is changed
//! meanwhile. What else is known of a file is read from the file as it is by then, which is later than S: the log after S sets it
//! again. Each directory goes before what is in it. Extended attributes of directories go after all files, so that no file gets an
//! access control list from them. Then the member follows the log after S as one that was away.
//!
//! **Bytes** of all files go to it beside the log, without any lock, while nobody waits for it. What is written meanwhile has marks, which
//! are remembered as long as it is no member.
//!
//! **States.** When everything waits for it and it has the log and all remembered ranges, it gets the attributes of each file that a
//! change since S made or set, and of each that was written: a file may have got a list that its directory had only later.
//!
//! Memory: one page of the index, a batch that is filled and one on its way, directories that went before their turn, and bytes of
//! [`MAX_BYTES`].
//!
//! ```text
//! walk        the names in their order
//! ```
//!
//! The other side is `member/copied.rs`.

mod walk;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use atoll_env::{Instant, sleep, yield_now};
use atoll_net::{CallError, Refusal, Request};
use atoll_vfs::{Errno, FileKind};
use bytes::Bytes;
use futures_channel::oneshot;
use futures_util::stream::{FuturesUnordered, StreamExt};

use self::walk::{NamesWalk, PAGE};
use super::primary::{BEGIN_LIMIT, Primary, end_of_call};
use crate::backups::{BackupLink, CopyProgress, HandedItem, LinkEnd};
use crate::change::PoolChange;
use crate::disk::{Disk, DiskResult};
use crate::index::WrittenTables;
use crate::layout::FileId;
use crate::marks::MarkTable;
use crate::member::{FileToCopy, WrittenCheckpoint};
use crate::messages::{
    self, BeginCopy, COPY, COPY_BATCH, CopiedBytes, CopyAmount, CopyBatch, CopyHeader,
    GroupSession, ItemKind, MAX_BATCH_BYTES, MAX_ITEM_BYTES,
};
use crate::routing::addressed;

/// A call with a batch may take so long until it is made again.
const BATCH_LIMIT: Duration = Duration::from_secs(10);
/// A member that takes no batch for so long is given up; a guess.
const BATCH_PATIENCE: Duration = Duration::from_secs(60);
const RETRY_AFTER: Duration = Duration::from_millis(50);
/// Bytes of files on their way; while clients' bytes are, too, less.
const MAX_BYTES: usize = 8 << 20;
const MAX_BYTES_BESIDE_CLIENTS: usize = 1 << 20;
/// Items of small files on their way.
const MAX_ITEMS: usize = 64;
/// How often the member makes durable what it has. A guess: so much is copied again if it dies.
const NOTE_EVERY: Duration = Duration::from_secs(5);
/// Files whose attributes are on their way.
const MAX_STATES: usize = 16;
/// Marks in one entry of a batch.
const MAX_MARKS: usize = 4096;

/// Changes on their way into a batch.
#[derive(Default)]
struct BatchFill {
    changes: Vec<PoolChange>,
    bytes: usize,
}

impl BatchFill {
    /// Adds a change; returns a batch that is full without it.
    fn add(&mut self, change: PoolChange) -> Option<CopyBatch> {
        let bytes = change.encoded_at_most();
        let full = self.bytes + bytes > MAX_BATCH_BYTES && !self.changes.is_empty();
        let batch = full.then(|| self.take());
        self.bytes += bytes;
        self.changes.push(change);
        batch
    }

    fn take(&mut self) -> CopyBatch {
        self.bytes = 0;
        CopyBatch::Files(std::mem::take(&mut self.changes))
    }
}

/// A member's batches: while one is filled, the one before is on its way.
struct BatchSender<'a, D: Disk> {
    primary: &'a Arc<Primary<D>>,
    link: &'a Arc<BackupLink>,
    session: GroupSession,
    number: u64,
    fill: BatchFill,
    under_way: Option<oneshot::Receiver<Result<(), LinkEnd>>>,
}

impl<D: Disk> BatchSender<'_, D> {
    async fn add(&mut self, change: PoolChange) -> Result<(), LinkEnd> {
        match self.fill.add(change) {
            Some(batch) => self.send(batch).await,
            None => Ok(()),
        }
    }

    /// Sends what is left.
    async fn flush(&mut self) -> Result<(), LinkEnd> {
        let batch = self.fill.take();
        self.send(batch).await
    }

    /// Sends a batch when the one before has arrived.
    async fn send(&mut self, batch: CopyBatch) -> Result<(), LinkEnd> {
        self.arrive().await?;
        // Its disk is opened again only when nobody works with it.
        if self.primary.member.has_failed() || self.link.is_retired() {
            return Err(LinkEnd::Lost("it was given up".into()));
        }
        self.number += 1;
        let header = CopyHeader { session: self.session, number: self.number };
        let (primary, link) = (self.primary.clone(), self.link.clone());
        let (sender, arrived) = oneshot::channel();
        self.under_way = Some(arrived);
        self.primary.env.spawn(Box::pin(async move {
            let _ = sender.send(primary.send_batch(&link, header, messages::encode(&batch)).await);
        }));
        Ok(())
    }

    /// Waits until what was sent has arrived.
    async fn arrive(&mut self) -> Result<(), LinkEnd> {
        match self.under_way.take() {
            Some(arrived) => {
                arrived.await.unwrap_or_else(|_| Err(LinkEnd::Lost("it was given up".into())))
            }
            None => Ok(()),
        }
    }
}

/// This disk cannot give what it has.
fn failed(errno: Errno) -> LinkEnd {
    LinkEnd::CopyFailed(format!("the primary's disk: {errno}"))
}

/// This disk cannot give a file.
fn failed_at(id: FileId) -> impl Fn(Errno) -> LinkEnd {
    move |errno| LinkEnd::CopyFailed(format!("file {id} on the primary's disk: {errno}"))
}

impl<D: Disk> Primary<D> {
    /// Gives a member all names: then it follows.
    pub(super) async fn give_names(
        self: &Arc<Self>,
        link: &Arc<BackupLink>,
        session: GroupSession,
    ) -> Result<(), LinkEnd> {
        let given = self.try_give_names(link, session).await;
        link.note_copied(None);
        given.map_err(|end| match end {
            LinkEnd::DiskFailed(text) => LinkEnd::CopyFailed(text),
            end => end,
        })
    }

    async fn try_give_names(
        self: &Arc<Self>,
        link: &Arc<BackupLink>,
        session: GroupSession,
    ) -> Result<(), LinkEnd> {
        let written = self.member.write_checkpoint().await.map_err(failed)?;
        let WrittenCheckpoint { meta, group, tables } = written;
        let (order, next) = (meta.order, meta.next);
        let epoch = group.log.epochs.range(..=order).next_back();
        let epoch = epoch.map_or((0, 0), |(first, epoch)| (*first, *epoch));
        let used_bytes = self.member.used_bytes().await.map_err(failed)?;
        let map = self.backups.map();
        let begin = BeginCopy { session, map, order, epoch, next, used_bytes };
        link.note_end(LinkEnd::Lost("it is given the names of all files".into()));
        if let Err(end) = self.call(link.peer(), COPY, messages::encode(&begin), BEGIN_LIMIT).await
        {
            // A member that was at work is opened again to be copied.
            return Err(match end {
                LinkEnd::DiskFailed(text) => LinkEnd::Lost(text),
                end => end,
            });
        }
        tracing::info!("member {} is given all files", link.peer());
        let mut sender = BatchSender {
            primary: self,
            link,
            session,
            number: 0,
            fill: BatchFill::default(),
            under_way: None,
        };
        let all = self.give_files(&mut sender, tables.clone()).await?;
        self.give_directories(&mut sender, &tables).await?;
        drop(tables);
        sender.flush().await?;
        for marks in marks_in_batches(&group.marks) {
            sender.send(CopyBatch::Marks(marks)).await?;
        }
        for marks in marks_in_batches(&group.remembered) {
            sender.send(CopyBatch::Remembered(marks)).await?;
        }
        for (client, record) in group.calls.records() {
            sender.send(CopyBatch::Calls(client.to_vec(), record)).await?;
        }
        for record in group.crossings.records() {
            sender.send(CopyBatch::Crossing(record)).await?;
        }
        if !group.quotas.rows().is_empty() {
            sender.send(CopyBatch::Quotas(group.quotas)).await?;
        }
        sender.send(CopyBatch::End(all)).await?;
        sender.arrive().await
    }

    /// Gives all files, with all that they have but for bytes; of directories nothing that others get from them. Returns how many
    /// regular files there are.
    async fn give_files(
        self: &Arc<Self>,
        sender: &mut BatchSender<'_, D>,
        tables: Arc<WrittenTables>,
    ) -> Result<CopyAmount, LinkEnd> {
        let (mut all, mut names) = (CopyAmount::default(), 0u64);
        let mut walk = NamesWalk::new(tables);
        loop {
            let next = walk.next();
            let next = next.map_err(|error| failed(self.member.index_failed(&error)))?;
            let Some((id, record, places)) = next else { return Ok(all) };
            let found = self.member.file_to_copy(id, record).await.map_err(failed_at(id))?;
            let FileToCopy { birth, node, size_bytes } = found;
            let (at, others) = places.split_first().expect("a file is given with its names");
            sender.add(PoolChange::Make { id, at: at.clone(), birth, by: None }).await?;
            for at in others {
                sender.add(PoolChange::Link { id, at: at.clone(), by: None }).await?;
            }
            if let Some(node) = node.filter(|_| record.kind != FileKind::Directory) {
                self.give_xattrs(sender, id, &node).await?;
            }
            if record.kind == FileKind::Regular {
                all.files += 1;
                all.bytes = all.bytes.saturating_add(size_bytes);
            }
            names += 1;
            if names.is_multiple_of(PAGE as u64) {
                sender.link.note_copied(Some(CopyProgress { names, ..CopyProgress::default() }));
                yield_now().await;
            }
        }
    }

    async fn give_xattrs(
        &self,
        sender: &mut BatchSender<'_, D>,
        id: FileId,
        node: &D::Node,
    ) -> Result<(), LinkEnd> {
        for name in self.member.xattr_names_of(node).await.map_err(failed_at(id))? {
            let value = match self.member.disk.xattr(node, &name).await {
                // Gone since, by a change that comes later.
                Err(Errno::ENODATA) => continue,
                value => value.map_err(failed_at(id))?,
            };
            let (name, value) = (name.to_vec(), Some(value.to_vec()));
            sender.add(PoolChange::Extended { id, name, value, by: None }).await?;
        }
        Ok(())
    }

    /// Gives directories what they have.
    async fn give_directories(
        &self,
        sender: &mut BatchSender<'_, D>,
        tables: &WrittenTables,
    ) -> Result<(), LinkEnd> {
        let mut at = FileId(0);
        loop {
            let page = tables.files_after(at, PAGE);
            let page = page.map_err(|error| failed(self.member.index_failed(&error)))?;
            let Some((last, _)) = page.last() else { return Ok(()) };
            at = *last;
            for (id, record) in page.iter().filter(|(_, of)| of.kind == FileKind::Directory) {
                let has_name = id.is_fixed()
                    || !tables
                        .places(*id)
                        .map_err(|error| failed(self.member.index_failed(&error)))?
                        .is_empty();
                let found = self.member.file_to_copy(*id, *record).await.map_err(failed_at(*id))?;
                let Some(node) = found.node.filter(|_| has_name) else { continue };
                self.give_xattrs(sender, *id, &node).await?;
                sender
                    .add(self.member.attributes_to_copy(*id, &node).await.map_err(failed_at(*id))?)
                    .await?;
            }
            yield_now().await;
        }
    }

    /// Has a member take a batch, however many calls that takes.
    async fn send_batch(
        &self,
        link: &BackupLink,
        header: CopyHeader,
        batch: Bytes,
    ) -> Result<(), LinkEnd> {
        let until = self.env.now() + BATCH_PATIENCE;
        loop {
            let header = addressed(&self.pool, &messages::encode(&header));
            let request = Request { method: COPY_BATCH, header, parts: vec![batch.clone()] };
            let end = match self.transport.call(link.peer(), request, BATCH_LIMIT).await {
                Ok(_) => {
                    link.note_there();
                    return Ok(());
                }
                Err(CallError::Refused(refusal)) if refusal.code != Refusal::OVERLOADED => {
                    return Err(end_of_call(CallError::Refused(refusal)));
                }
                Err(error) => end_of_call(error),
            };
            if self.member.has_failed() || self.env.now() > until {
                return Err(end);
            }
            sleep(&*self.env, RETRY_AFTER).await;
        }
    }

    /// Gives a member that follows the bytes of all files that it has not.
    pub(super) async fn copy_bytes(
        &self,
        link: &Arc<BackupLink>,
        session: GroupSession,
        from: CopiedBytes,
    ) -> DiskResult<()> {
        let mut copy = BytesCopy {
            link,
            session,
            under_way: FuturesUnordered::new(),
            bytes: 0,
            amount: from.done,
            from,
            began: self.env.now(),
        };
        let mut at = FileId(from.upto);
        let mut noted = self.env.now();
        while at < FileId(u64::MAX) {
            let page = self.member.index.files_after(at, PAGE);
            let (upto, files) = page.map_err(|error| self.member.index_failed(&error))?;
            for (id, _) in files.iter().filter(|(_, of)| of.kind == FileKind::Regular) {
                self.copy_file(&mut copy, *id).await?;
                if self.env.now().since(noted) > NOTE_EVERY {
                    copy.note(*id).await?;
                    noted = self.env.now();
                }
            }
            at = upto;
            yield_now().await;
        }
        copy.note(at).await
    }

    async fn copy_file(&self, copy: &mut BytesCopy<'_>, id: FileId) -> DiskResult<()> {
        let Some(node) = self.member.node_now(id).await? else { return Ok(()) };
        let file = self.member.disk.open(&node).await?;
        let stat = self.member.disk.stat_file(&file).await?;
        let (size_bytes, mtime) = (stat.size_bytes, (stat.mtime.secs, stat.mtime.nanos));
        let (mut offset, mut given) = (0, 0);
        while let Some(data) = self.member.data_after(&file, offset, size_bytes).await? {
            offset = data.start;
            while offset < data.end {
                let len = (data.end - offset).min(MAX_ITEM_BYTES as u64) as usize;
                let bytes = self.member.disk.read(&file, offset, len).await?;
                if bytes.iter().any(|byte| *byte != 0) {
                    let what = ItemKind::Copy { id, offset, size_bytes, mtime };
                    given += 1;
                    copy.give(what, bytes, self.has_clients_at_work()).await?;
                }
                offset += len as u64;
            }
        }
        if given == 0 && size_bytes > 0 {
            let what = ItemKind::Copy { id, offset: size_bytes, size_bytes, mtime };
            copy.give(what, Bytes::new(), false).await?;
        }
        copy.amount.files += 1;
        copy.amount.bytes =
            copy.amount.bytes.saturating_add(size_bytes.min(stat.blocks_512.saturating_mul(512)));
        copy.link.note_copied(Some(copy.progress(self.env.now())));
        Ok(())
    }

    /// Whether clients wait for bytes to be on all members.
    fn has_clients_at_work(&self) -> bool {
        self.backups.links().iter().any(|link| link.is_member() && link.has_bytes_waiting())
    }

    /// Gives a learner the attributes of all files that changes after `since` made or set, and of those that were written. It has all
    /// changes, and all items from now on.
    pub(super) async fn hand_states(
        &self,
        link: &Arc<BackupLink>,
        session: GroupSession,
        since: u64,
        written: &MarkTable,
    ) -> DiskResult<()> {
        let mut files: BTreeSet<FileId> = written.keys().copied().collect();
        let (mut has, mut is_first) = (since, true);
        loop {
            let last = self.member.changes_so_far();
            // A file that is made in a directory which was not exact yet may not be exact.
            let unsure = if is_first { BTreeSet::new() } else { std::mem::take(&mut files) };
            while has < last {
                let changes = self.member.logged(has, last)?;
                let Some(upto) = changes.keys().next_back().copied() else {
                    if link.session() != Some(session) {
                        return Ok(());
                    }
                    sleep(&*self.env, RETRY_AFTER).await;
                    continue;
                };
                for change in changes.values().flat_map(PoolChange::parts) {
                    match change {
                        PoolChange::Make { id, at, .. } => {
                            let is_sure =
                                !unsure.contains(&at.parent) && !files.contains(&at.parent);
                            if is_first || !is_sure {
                                files.insert(*id);
                            }
                        }
                        PoolChange::Attributes { id, .. } | PoolChange::Extended { id, .. }
                            if is_first =>
                        {
                            files.insert(*id);
                        }
                        _ => {}
                    }
                }
                has = upto;
                yield_now().await;
            }
            if files.is_empty() {
                return Ok(());
            }
            let mut under_way = FuturesUnordered::new();
            for id in &files {
                if link.session() != Some(session) {
                    return Ok(());
                }
                while under_way.len() >= MAX_STATES
                    && let Some(handed) = under_way.next().await
                {
                    handed?;
                }
                under_way.push(self.member.hand_state(link, *id));
            }
            while let Some(handed) = under_way.next().await {
                handed?;
            }
            is_first = false;
        }
    }
}

/// Bytes on their way to a member that follows.
struct BytesCopy<'a> {
    link: &'a Arc<BackupLink>,
    session: GroupSession,
    under_way: FuturesUnordered<atoll_env::BoxFuture<'static, (usize, DiskResult<()>)>>,
    /// How many.
    bytes: usize,
    amount: CopyAmount,
    /// What the member had when this attempt began, and when: for the estimate of what is left.
    from: CopiedBytes,
    began: Instant,
}

impl BytesCopy<'_> {
    /// Gives bytes, when there is room for them on the way.
    async fn give(&mut self, what: ItemKind, bytes: Bytes, has_clients: bool) -> DiskResult<()> {
        let most = if has_clients { MAX_BYTES_BESIDE_CLIENTS } else { MAX_BYTES };
        let len = bytes.len();
        while self.bytes + len > most || self.under_way.len() >= MAX_ITEMS {
            if !self.one_arrives().await? {
                break;
            }
        }
        self.bytes += len;
        let item = HandedItem::new(what, bytes);
        let (link, session) = (self.link.clone(), self.session);
        let handed = async move { (len, link.hand_over(session, item).await) };
        self.under_way.push(Box::pin(handed));
        Ok(())
    }

    /// Waits for one item; false if none was on its way.
    async fn one_arrives(&mut self) -> DiskResult<bool> {
        let Some((len, handed)) = self.under_way.next().await else { return Ok(false) };
        self.bytes -= len;
        handed.map(|()| true)
    }

    /// Has the member make durable that it has all files up to this one.
    async fn note(&mut self, id: FileId) -> DiskResult<()> {
        while self.one_arrives().await? {}
        let what = ItemKind::CopiedUpto { id, done: self.amount };
        self.link.hand_over(self.session, HandedItem::new(what, Bytes::new())).await
    }

    fn progress(&self, now: Instant) -> CopyProgress {
        let CopyAmount { files: files_done, bytes: bytes_done } = self.amount;
        let CopyAmount { files, bytes } = self.from.all;
        let (files, bytes) = (files.max(files_done), bytes.max(bytes_done));
        // A file takes about as long as some bytes; a guess.
        let work = |files: u64, bytes: u64| bytes as f64 + 16_384.0 * files as f64;
        let before = self.from.done;
        let done = work(files_done - before.files, bytes_done - before.bytes);
        let left = work(files - files_done, bytes - bytes_done);
        let took = now.since(self.began).as_secs_f64();
        let left = (done > 0.0).then(|| Duration::try_from_secs_f64(took * left / done).ok());
        CopyProgress { names: 0, files_done, files, bytes_done, bytes, left: left.flatten() }
    }
}

/// Marks in batches that are not too long.
fn marks_in_batches(table: &MarkTable) -> Vec<Vec<(FileId, Vec<u64>)>> {
    let mut batches = vec![Vec::new()];
    let mut marks = 0;
    for (id, of_file) in table {
        let of_file: Vec<u64> = of_file.iter().copied().collect();
        for some in of_file.chunks(MAX_MARKS) {
            if marks + some.len() + 2 > 2 * MAX_MARKS {
                batches.push(Vec::new());
                marks = 0;
            }
            marks += some.len() + 2;
            batches.last_mut().expect("there is one").push((*id, some.to_vec()));
        }
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::change::{BirthKind, FileBirth, PoolPlace};

    #[test]
    fn batches_are_bounded_and_hold_everything_in_order() {
        let mut fill = BatchFill::default();
        let mut batches = Vec::new();
        let value = |len: usize| PoolChange::Extended {
            id: FileId(len as u64 + 2),
            name: vec![b'n'; 255],
            value: Some(vec![0xff; len]),
            by: None,
        };
        let link = PoolPlace::new(FileId(u64::MAX), &[b'n'; 255]);
        let (what, times) = (BirthKind::Symlink(vec![b't'; 4095]), None);
        let birth =
            FileBirth { what, uid: u32::MAX, gid: u32::MAX, mode: 0o777, is_listed: false, times };
        let make = PoolChange::Make { id: FileId(u64::MAX), at: link, birth, by: None };
        let mut given = Vec::new();
        for number in 0..2000 {
            let change = if number % 3 == 0 { value(number * 32) } else { make.clone() };
            given.push(change.clone());
            batches.extend(fill.add(change));
        }
        batches.push(fill.take());
        let mut arrived = Vec::new();
        for batch in batches {
            assert!(messages::encode(&batch).len() <= MAX_BATCH_BYTES && batch.is_sound());
            let CopyBatch::Files(changes) = batch else { panic!("files alone were added") };
            arrived.extend(changes);
        }
        assert_eq!(arrived, given);
    }

    #[test]
    fn marks_go_in_batches_whoever_has_many() {
        let mut table = MarkTable::new();
        table.insert(FileId(3), (0..3 * MAX_MARKS as u64).collect());
        table.extend((4..20_000).map(|id| (FileId(id), BTreeSet::from([0, u64::MAX]))));
        let mut again = MarkTable::new();
        for batch in marks_in_batches(&table) {
            let batch = CopyBatch::Marks(batch);
            assert!(messages::encode(&batch).len() <= MAX_BATCH_BYTES);
            let CopyBatch::Marks(marks) = batch else { unreachable!("these are marks") };
            marks.into_iter().for_each(|(id, marks)| again.entry(id).or_default().extend(marks));
        }
        assert_eq!(again, table);
    }
}
