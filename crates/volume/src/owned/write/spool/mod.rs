//! What a mount has written and the ring does not have yet, on this machine's disk.
//!
//! Each change is a [`Record`]. Records are numbered for as long as the spool's directory is there,
//! and lie in *segments*, files that are named by the number of their first record. A segment ends when
//! it is long, and when a flush begins, unless the last flush has failed: then there would be as many
//! files as failures. The root on the ring says how many records of which spools it has
//! ([`MountState::merged`]): when a mount begins, these are passed over, and the later ones are made
//! again, on the very version that they followed.
//!
//! | file | what it holds |
//! |---|---|
//! | `id` | names of the spool, 16 random bytes each, the newest last |
//! | `base` | a root that this mount has put: the records after those that it has follow it |
//! | `NNNNNNNNNNNNNNNNNNNN.records` | a segment ([`segment`]) |
//! | `NNNNNNNNNNNNNNNNNNNN-PPPP.records` | part P of the *restated* contents of files that the root which has N records has left out ([`segment`]) |
//!
//! Each mount draws a new name, under which its roots count the records. A copy of the directory
//! has the old name only: what it counts is never mistaken for what the original has. The new name is in `id`
//! before a root has it, beside the former one: the next mount finds one of the two in the newest
//! root.
//!
//! The data of a file that was removed or emptied is superfluous in the records before. Where the
//! spool is full, segments with much of it are written anew without it, once the removal is durable; the
//! numbers of their records stay.
//!
//! Beside that, changed bytes that are too many for the memory are in a file that dies with the mount
//! ([`swap`]).
//!
//! Promises:
//!
//! - When [`Spool::synced`] has returned, the records before it survive a crash of the machine.
//! - Records are made again in order, from the first that the root does not have; after a crash the
//!   last ones may be missing, none in between, and none that was durable: segments say in marks how
//!   many were. If one of these cannot be read, the spool is damaged.
//! - Where another writer has put a root meanwhile, nothing is made again: the segments and `base`
//!   are set aside, in a directory of their own.
//! - If the disk fails, no record is written any more; whoever would have waited for the spool waits
//!   for the ring.
//!
//! The paper on D2 (§7) keeps what is not written back in memory.
//!
//! It does not know what records mean.
//!
//! [`MountState::merged`]: crate::owned::root::MountState::merged

mod segment;
mod swap;

use std::collections::BTreeMap;
use std::io;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use atoll_env::{Env, Instant, Notify, sleep};
use atoll_key::{SignedBlock, VolumeCipher};
use bytes::Bytes;
use futures_channel::oneshot;
use futures_util::future::select;

use self::segment::Segment;
use self::swap::Swap;
use super::tree::{Record, Restated};
use crate::blocks::edit_file::{HeldBytes, SwapIn};
use crate::spool_directory::SpoolDirectory;

/// A segment ends when it has more bytes: a mount reads it as a whole.
const SEGMENT_BYTES: u64 = 32 << 20;

/// A segment is written anew when at least one part in so many is data of files that are gone. A guess:
/// each byte freed costs at most three written.
const SUPERFLUOUS_SHARE: u64 = 4;

/// A part of restated contents ends when it has more bytes of data.
const PART_BYTES: usize = 8 << 20;

/// Bytes of records that wait for the disk; then writers wait.
const MAX_QUEUED_BYTES: usize = 16 << 20;

/// How long what nobody waits for is only in the memory of the system.
const SYNC_EVERY: Duration = Duration::from_secs(1);

/// How often the task looks whether its mount is gone.
const LOOK_EVERY: Duration = Duration::from_secs(10);

const ID: &str = "id";

/// The file with the root that the records follow.
pub const SPOOL_BASE: &str = "base";

/// How the names of the files with records end.
pub const SPOOL_RECORDS: &str = ".records";

/// Names that a spool remembers. It gets one by each mount, and loses the older ones when a root has
/// it.
const MAX_NAMES: usize = 64;

/// Names a spool in roots.
type Id = [u8; 16];

/// See the module.
pub(super) struct Spool {
    /// Its names until now.
    former: Vec<Id>,
    /// Its name in the roots of this mount.
    id: Id,
    directory: Arc<dyn SpoolDirectory>,
    cipher: Option<VolumeCipher>,
    state: Mutex<State>,
    wake: Arc<Notify>,
    swap: Swap,
}

#[derive(Default)]
struct State {
    /// The number of the next record.
    next: u64,
    /// The first record of the segment that is written.
    segment: u64,
    /// Segments with records, by the first.
    segments: BTreeMap<u64, Extent>,
    /// The bytes of all of them.
    bytes: u64,
    /// A flush has begun since the ring took records the last time.
    is_cut: bool,
    queue: Vec<Work>,
    queued_bytes: usize,
    /// Records below are durable here, or on the ring.
    durable: u64,
    waiters: Vec<(u64, oneshot::Sender<()>)>,
    failure: Option<String>,
    /// Files with restated contents, by the number of records that the root has.
    restated: BTreeMap<u64, Vec<String>>,
    /// The newest of them whose root the ring has.
    restated_at: Option<u64>,
    /// Files that were removed or emptied: the data of records below these numbers is superfluous.
    emptied: BTreeMap<u64, u64>,
}

/// How far a segment goes.
#[derive(Clone, Default)]
struct Extent {
    /// The number after its last record; `None` before it is read.
    end: Option<u64>,
    bytes: u64,
    /// Bytes of data of each file that may be needed, and of the others.
    data: BTreeMap<u64, u64>,
    superfluous: u64,
}

impl Extent {
    /// A segment that an earlier mount has written.
    fn read(end: u64, bytes: u64) -> Extent {
        Extent { end: Some(end), bytes, ..Extent::default() }
    }

    fn add_data(&mut self, records: &[Record]) {
        for (inode, bytes) in records.iter().filter_map(Record::data_of) {
            *self.data.entry(inode).or_default() += bytes;
        }
    }
}

/// What the task has done on the disk.
#[derive(Default)]
struct Disk {
    /// Segments that were written to and are not durable, and since when.
    unsynced: BTreeMap<u64, Instant>,
    /// Records below are written.
    written: u64,
    /// The root that is to be the base, the files that are not needed with it, and since when.
    merged: Option<(SignedBlock, Vec<String>, Instant)>,
}

enum Work {
    /// Appends to a segment records from a number on.
    Append { segment: u64, first: u64, records: Vec<Record> },
    /// The ring has all records before a number, by this root, and thereby all of some segments; these
    /// files are not needed then.
    Merged { records: u64, root: SignedBlock, segments: Vec<u64>, files: Vec<String> },
    /// Drops from segments the data of files that were emptied, as the state says.
    Drop { segments: Vec<u64> },
    /// Says that everything before is written.
    Say(oneshot::Sender<()>),
    /// Says that everything before is written, and the base.
    Finish(oneshot::Sender<()>),
}

/// Why a spool cannot be read.
#[derive(Debug, thiserror::Error)]
pub(super) enum SpoolError {
    /// The disk has failed.
    #[error("the spool cannot be read: {0}")]
    Io(#[from] io::Error),
    /// A file does not hold what was written.
    #[error("the spool is damaged: {0}")]
    Damaged(String),
}

impl Spool {
    /// Opens the spool of a directory, of which this process is the only user.
    pub(super) async fn open(
        env: &Env,
        directory: Arc<dyn SpoolDirectory>,
        cipher: Option<VolumeCipher>,
    ) -> Result<Spool, SpoolError> {
        let names = directory.list().await?;
        let ids = match names.iter().any(|name| name == ID) {
            true => directory.read(ID.into()).await?,
            false => Bytes::new(),
        };
        let former = ids.as_chunks().0.to_vec();
        // Their sizes count once they are read.
        let segments = names.iter().filter_map(|name| Some((first_of(name)?, Extent::default())));
        let mut state = State { segments: segments.collect(), ..State::default() };
        for name in &names {
            if let Some(records) = restated_of(name) {
                state.restated.entry(records).or_default().push(name.clone());
            }
        }
        state.restated.values_mut().for_each(|parts| parts.sort());
        let state = Mutex::new(state);
        let (id, wake, swap) = (super::random_id(env), Arc::default(), Swap::default());
        Ok(Spool { former, id, directory, cipher, state, wake, swap })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }

    /// Names the spool in the roots of this mount.
    pub(super) fn id(&self) -> Id {
        self.id
    }

    /// Names the spool in the roots of earlier mounts.
    pub(super) fn former_ids(&self) -> &[Id] {
        &self.former
    }

    /// Makes sure that the next mount knows this one's name. `newest` is in the newest root. If the
    /// disk fails, and nothing has to be made again, the mount goes on without the spool.
    pub(super) async fn keep_id(
        &mut self,
        newest: Option<Id>,
        has_more: bool,
    ) -> Result<(), SpoolError> {
        let known = self.former.iter().position(|id| Some(*id) == newest);
        let mut ids = known.map_or(Vec::new(), |at| self.former[at..].to_vec());
        ids.push(self.id);
        while ids.len() > MAX_NAMES {
            // The first is in the newest root.
            ids.remove(1);
        }
        match self.directory.replace(ID.into(), ids.concat().into()).await {
            Err(error) if !has_more => {
                self.id = self.former.last().copied().unwrap_or(self.id);
                self.fail(&error);
                Ok(())
            }
            kept => Ok(kept?),
        }
    }

    /// The root that the records follow, if it is known.
    pub(super) async fn base(&self) -> Result<SignedBlock, SpoolError> {
        let bytes = self.directory.read(SPOOL_BASE.into()).await?;
        SignedBlock::decode(&bytes).map_err(|error| SpoolError::Damaged(error.to_string()))
    }

    /// Moves all segments and `base` into a directory of their own; returns its name.
    pub(super) async fn set_aside(&self) -> Result<String, SpoolError> {
        let (segments, restated) = {
            let mut state = self.state();
            (state.bytes, state.restated_at) = (0, None);
            (std::mem::take(&mut state.segments), std::mem::take(&mut state.restated))
        };
        let mut names: Vec<String> = segments.into_keys().map(name_of).collect();
        names.extend(restated.into_values().flatten());
        names.push(SPOOL_BASE.into());
        Ok(self.directory.set_aside(names).await?)
    }

    /// Begins after so many records, which the ring has; says whether there are more.
    pub(super) async fn begin_at(&self, merged: u64) -> bool {
        let segments: Vec<u64> = {
            let mut state = self.state();
            (state.next, state.segment, state.durable) = (merged, merged, merged);
            state.restated_at = state.restated.contains_key(&merged).then_some(merged);
            state.segments.keys().copied().collect()
        };
        let is_restated = self.state().restated_at.is_some();
        let Some(last) = segments.last() else { return is_restated };
        for (first, end) in segments.iter().zip(&segments[1..]) {
            self.state().segments.insert(*first, Extent::read(*end, 0));
        }
        if *last > merged {
            return true;
        }
        // If it cannot be read now, that is said when it is to be made again.
        let Ok(read) = self.read(*last).await else { return true };
        let end = last.saturating_add(read.records.len() as u64);
        if end > *last {
            self.state().segments.insert(*last, Extent::read(end, 0));
        }
        is_restated || end.max(read.durable) > merged
    }

    /// The files with the contents that the root has left out.
    pub(super) fn restated_parts(&self) -> Vec<String> {
        let state = self.state();
        let parts = state.restated_at.and_then(|records| state.restated.get(&records));
        parts.cloned().unwrap_or_default()
    }

    /// The records of a part.
    pub(super) async fn read_restated(&self, name: String) -> Result<Vec<Record>, SpoolError> {
        let damaged = || SpoolError::Damaged(format!("{name} cannot be read"));
        let records = restated_of(&name).ok_or_else(damaged)?;
        let parts = self.state().restated.get(&records).cloned().unwrap_or_default();
        let bytes = self.directory.read(name.clone()).await?;
        let read = segment::decode(records, &bytes, self.cipher.as_ref());
        // The last one, and no other, says how many there are.
        let count = if parts.last() == Some(&name) { parts.len() as u64 } else { 0 };
        match read.rest == 0 && read.durable == count {
            true => Ok(read.records),
            false => Err(damaged()),
        }
    }

    /// Writes down the contents of files that a root which has so many records leaves out. Durable when
    /// it resolves; an error is for people.
    pub(super) async fn restate(&self, records: u64, files: &[Restated]) -> Result<(), String> {
        if let Some(failure) = self.failure() {
            return Err(failure);
        }
        // Nothing was recorded since the ring has the root for which they were written.
        if self.state().restated_at == Some(records) {
            return Ok(());
        }
        let stale = self.state().restated.remove(&records).unwrap_or_default();
        self.write_restated(records, stale, files).await.inspect_err(|error| {
            tracing::warn!("the contents of files that find no room cannot be kept: {error}");
        })
    }

    async fn write_restated(
        &self,
        number: u64,
        stale: Vec<String>,
        files: &[Restated],
    ) -> Result<(), String> {
        let told = |error: io::Error| error.to_string();
        for name in stale {
            self.directory.remove(name).await.map_err(told)?;
        }
        let (mut names, mut records, mut len) = (Vec::new(), Vec::new(), 0);
        for file in files {
            records.extend(file.first.iter().cloned());
            for (offset, data) in &file.data {
                let data = match data {
                    HeldBytes::Data(data) => Bytes::copy_from_slice(data),
                    HeldBytes::Swapped(swapped) => match self.swap_in(*swapped).await? {
                        Some(data) => data,
                        // A later record replaces or removes it.
                        None => continue,
                    },
                };
                len += data.len();
                records.push(file.write(*offset, data));
                if len >= PART_BYTES {
                    let bytes = segment::encode(number, number, &records, self.cipher.as_ref());
                    let name = restated_name(number, names.len());
                    self.directory.replace(name.clone(), bytes.into()).await.map_err(told)?;
                    names.push(name);
                    records.clear();
                    len = 0;
                }
            }
            records.push(file.last.clone());
        }
        let mut bytes = segment::encode(number, number, &records, self.cipher.as_ref());
        let name = restated_name(number, names.len());
        bytes.extend(segment::mark(number, names.len() as u64 + 1));
        self.directory.replace(name.clone(), bytes.into()).await.map_err(told)?;
        names.push(name);
        self.state().restated.insert(number, names);
        Ok(())
    }

    async fn read(&self, first: u64) -> io::Result<Segment> {
        let bytes = self.directory.read(name_of(first)).await?;
        Ok(segment::decode(first, &bytes, self.cipher.as_ref()))
    }

    /// The records of the next segment that were not made again yet; `None` if there are no more.
    pub(super) async fn read_next(&self) -> Result<Option<Vec<Record>>, SpoolError> {
        let (next, segments) = {
            let state = self.state();
            (state.next, state.segments.keys().copied().collect::<Vec<u64>>())
        };
        let (upto, later) = segments.split_at(segments.partition_point(|first| *first <= next));
        let (mut durable, mut is_torn) = (0, !later.is_empty());
        if let Some(first) = upto.last() {
            let mut read = self.read(*first).await?;
            // What follows is of no use without it.
            self.directory.sync(name_of(*first)).await?;
            let done = usize::try_from(next - first).unwrap_or(usize::MAX);
            if read.records.len() > done {
                let mut extent = Extent::read(first + read.records.len() as u64, read.bytes);
                extent.add_data(&read.records);
                let mut state = self.state();
                state.bytes += extent.bytes;
                state.bytes -= state.segments.insert(*first, extent).map_or(0, |s| s.bytes);
                return Ok(Some(read.records.split_off(done)));
            }
            (durable, is_torn) = (read.durable, is_torn || read.rest > 0);
        }
        for first in later {
            durable = durable.max(self.read(*first).await?.durable);
        }
        if durable > next {
            let lost = format!("records {next} to {durable} were durable and cannot be read");
            return Err(SpoolError::Damaged(lost));
        }
        if is_torn {
            tracing::warn!("records from {next} on were not durable when the last mount ended");
        }
        Ok(None)
    }

    /// Removes segments that nothing was read of: the next records may have their names.
    pub(super) async fn end_reading(&self) -> Result<(), SpoolError> {
        let unread = {
            let mut state = self.state();
            let next = state.next;
            state.segments.split_off(&next)
        };
        for first in unread.into_keys() {
            self.directory.remove(name_of(first)).await?;
        }
        Ok(())
    }

    /// Counts the records that were made again.
    pub(super) fn advance(&self, records: usize) {
        let mut state = self.state();
        state.next += records as u64;
        (state.segment, state.durable) = (state.next, state.next);
    }

    /// Takes records, in the order of the changes. Whether later records are read without those
    /// before: a new segment begins.
    pub(super) fn append(&self, records: Vec<Record>) -> bool {
        let mut state = self.state();
        let (first, segment) = (state.next, state.segment);
        state.next += records.len() as u64;
        if state.failure.is_some() {
            return false;
        }
        let len: usize = records.iter().map(Record::len).sum();
        state.queued_bytes += len;
        state.bytes += len as u64;
        let next = state.next;
        let extent = state.segments.entry(segment).or_default();
        extent.end = Some(next);
        extent.add_data(&records);
        extent.bytes += len as u64;
        let is_full = extent.bytes >= SEGMENT_BYTES;
        state.queue.push(Work::Append { segment, first, records });
        if is_full {
            state.segment = state.next;
        }
        drop(state);
        self.wake.notify();
        is_full
    }

    /// How many records there are so far. Later ones go to another segment, unless the last flush has
    /// failed.
    pub(super) fn cut(&self) -> u64 {
        let mut state = self.state();
        if !state.is_cut {
            state.is_cut = true;
            state.segment = state.next;
        }
        state.next
    }

    /// Files were removed or emptied: the data of the records so far is superfluous.
    pub(super) fn note_emptied(&self, inodes: &[u64]) {
        let mut state = self.state();
        let next = state.next;
        for inode in inodes {
            state.emptied.insert(*inode, next);
            for extent in state.segments.values_mut() {
                extent.superfluous += extent.data.remove(inode).unwrap_or(0);
            }
        }
    }

    /// Drops data that is superfluous, from segments that have much of it.
    pub(super) async fn drop_emptied(&self) {
        let Some(dropped) = self.queue_drop() else { return };
        self.wake.notify();
        // If the disk has failed, nothing is freed.
        let _ = dropped.await;
    }

    fn queue_drop(&self) -> Option<oneshot::Receiver<()>> {
        let mut state = self.state();
        let mut due = Vec::new();
        for (first, extent) in &mut state.segments {
            if extent.superfluous > 0 && extent.superfluous * SUPERFLUOUS_SHARE >= extent.bytes {
                extent.superfluous = 0;
                due.push(*first);
            }
        }
        if due.is_empty() || state.failure.is_some() {
            return None;
        }
        let (sender, receiver) = oneshot::channel();
        state.queue.extend([Work::Drop { segments: due }, Work::Say(sender)]);
        Some(receiver)
    }

    /// The ring has so many records, by this root; if it `is_whole`, it leaves out no contents.
    pub(super) fn merged(&self, records: u64, root: SignedBlock, is_whole: bool) {
        let mut state = self.state();
        state.is_cut = false;
        let is_done = |extent: &Extent| extent.end.is_some_and(|end| end <= records);
        let done = state.segments.iter().filter(|(_, extent)| is_done(extent));
        let segments: Vec<u64> = done.map(|(first, _)| *first).collect();
        for first in &segments {
            state.bytes -= state.segments.remove(first).map_or(0, |extent| extent.bytes);
        }
        if segments.contains(&state.segment) {
            state.segment = state.next;
        }
        state.emptied.retain(|_, below| *below > records);
        let (needed, others): (BTreeMap<_, _>, BTreeMap<_, _>) =
            std::mem::take(&mut state.restated)
                .into_iter()
                .partition(|(number, _)| !is_whole && *number == records);
        state.restated_at = needed.contains_key(&records).then_some(records);
        state.restated = needed;
        if state.failure.is_none() {
            let mut files: Vec<String> = others.into_values().flatten().collect();
            files.extend(segments.iter().map(|first| name_of(*first)));
            state.queue.push(Work::Merged { records, root, segments, files });
        }
        drop(state);
        self.answer(records);
        self.wake.notify();
    }

    /// Resolves when everything is done that was asked for, and all records are durable.
    pub(super) async fn finish(&self) {
        // If the disk fails, nothing more is done.
        let _ = self.synced().await;
        let (sender, receiver) = oneshot::channel();
        {
            let mut state = self.state();
            if state.failure.is_some() {
                return;
            }
            state.queue.push(Work::Finish(sender));
        }
        self.wake.notify();
        let _ = receiver.await;
    }

    /// Bytes on disk: records that the ring does not have, and what is swapped out.
    pub(super) fn bytes(&self) -> u64 {
        self.state().bytes + self.swap.bytes()
    }

    /// Why nothing is written here any more.
    pub(super) fn failure(&self) -> Option<String> {
        self.state().failure.clone()
    }

    /// Resolves when not too much waits for the disk.
    pub(super) async fn room(&self) {
        let (sender, receiver) = oneshot::channel();
        {
            let mut state = self.state();
            if state.queued_bytes <= MAX_QUEUED_BYTES {
                return;
            }
            state.queue.push(Work::Say(sender));
        }
        // If the disk has failed, nothing waits for it.
        let _ = receiver.await;
    }

    /// Resolves when all records so far are durable; an error if the disk has failed.
    pub(super) async fn synced(&self) -> Result<(), ()> {
        let receiver = {
            let mut state = self.state();
            if state.failure.is_some() {
                return Err(());
            }
            if state.durable >= state.next {
                return Ok(());
            }
            let (sender, receiver) = oneshot::channel();
            let next = state.next;
            state.waiters.push((next, sender));
            receiver
        };
        self.wake.notify();
        receiver.await.map_err(drop)
    }

    /// Writes what is queued.
    async fn write(&self, disk: &mut Disk, now: Instant) -> io::Result<()> {
        let queue = {
            let mut state = self.state();
            state.queued_bytes = 0;
            std::mem::take(&mut state.queue)
        };
        let mut work = queue.into_iter().peekable();
        while let Some(next) = work.next() {
            match next {
                Work::Append { segment, first, mut records } => {
                    while let Some(Work::Append { records: more, .. }) =
                        work.next_if(|next| match next {
                            Work::Append { segment: other, .. } => *other == segment,
                            Work::Merged { .. }
                            | Work::Drop { .. }
                            | Work::Say(_)
                            | Work::Finish(_) => false,
                        })
                    {
                        records.extend(more);
                    }
                    let bytes = segment::encode(segment, first, &records, self.cipher.as_ref());
                    disk.unsynced.entry(segment).or_insert(now);
                    self.directory.append(name_of(segment), bytes.into()).await?;
                    disk.written = first + records.len() as u64;
                }
                Work::Merged { records, root, segments, mut files } => {
                    disk.unsynced.retain(|segment, _| !segments.contains(segment));
                    disk.written = disk.written.max(records);
                    let (more, since) = match disk.merged.take() {
                        Some((_, more, since)) => (more, since),
                        None => (Vec::new(), now),
                    };
                    files.extend(more);
                    disk.merged = Some((root, files, since));
                }
                Work::Drop { segments } => {
                    // A crash must not leave the file without the removal.
                    self.sync(disk).await?;
                    for segment in segments {
                        self.drop_data(segment, disk.written).await?;
                    }
                }
                Work::Say(done) => {
                    // Whoever waited may have given up.
                    let _ = done.send(());
                }
                Work::Finish(done) => {
                    self.replace_base(disk).await?;
                    // Whoever waited may have given up.
                    let _ = done.send(());
                }
            }
        }
        Ok(())
    }

    /// Writes a segment without the data of files that were emptied.
    async fn drop_data(&self, segment: u64, durable: u64) -> io::Result<()> {
        let (emptied, end) = {
            let state = self.state();
            // The ring may have all of it by now.
            let Some(extent) = state.segments.get(&segment) else { return Ok(()) };
            (state.emptied.clone(), extent.end)
        };
        let mut read = self.read(segment).await?;
        let written = durable.min(end.unwrap_or(0)).saturating_sub(segment);
        if read.records.len() as u64 != written {
            // What is damaged is found out, and said, by the mount that needs it.
            return Ok(());
        }
        let mut freed = 0;
        for (number, record) in (segment..).zip(&mut read.records) {
            let superfluous = record
                .data_of()
                .filter(|(inode, _)| emptied.get(inode).is_some_and(|below| number < *below));
            if let Some((_, bytes)) = superfluous {
                freed += bytes;
                *record = Record::Dropped;
            }
        }
        let mut bytes = segment::encode(segment, segment, &read.records, self.cipher.as_ref());
        bytes.extend(segment::mark(segment, durable));
        self.directory.replace(name_of(segment), bytes.into()).await?;
        let mut state = self.state();
        if let Some(extent) = state.segments.get_mut(&segment) {
            let freed = freed.min(extent.bytes);
            extent.bytes -= freed;
            state.bytes -= freed;
        }
        Ok(())
    }

    /// Makes what is written durable.
    async fn sync(&self, disk: &mut Disk) -> io::Result<()> {
        self.replace_base(disk).await?;
        let unsynced = std::mem::take(&mut disk.unsynced);
        for segment in unsynced.keys() {
            self.directory.sync(name_of(*segment)).await?;
        }
        if let Some((last, _)) = unsynced.last_key_value() {
            let mark = segment::mark(*last, disk.written);
            self.directory.append(name_of(*last), mark.into()).await?;
        }
        self.answer(disk.written);
        Ok(())
    }

    /// Writes the base, and removes what it has. Records that follow it count as durable only after
    /// this; most flushes are not worth the disk's time.
    async fn replace_base(&self, disk: &mut Disk) -> io::Result<()> {
        let Some((root, files, _)) = disk.merged.take() else { return Ok(()) };
        self.directory.replace(SPOOL_BASE.into(), root.bytes().clone()).await?;
        for file in files {
            self.directory.remove(file).await?;
        }
        Ok(())
    }

    /// Answers those that wait for records below `durable`.
    fn answer(&self, durable: u64) {
        let mut state = self.state();
        state.durable = state.durable.max(durable);
        let durable = state.durable;
        for (upto, waiter) in std::mem::take(&mut state.waiters) {
            match upto <= durable {
                // Those that waited may have given up.
                true => drop(waiter.send(())),
                false => state.waiters.push((upto, waiter)),
            }
        }
    }

    fn fail(&self, error: &io::Error) {
        {
            let mut state = self.state();
            state.failure = Some(error.to_string());
            state.queue.clear();
            state.queued_bytes = 0;
            state.waiters.clear();
        }
        tracing::error!("the spool cannot be written: {error}");
    }
}

impl Disk {
    /// When something has waited long enough for the disk: a segment to become durable, or a base.
    fn due(&self) -> (Option<Instant>, Option<Instant>) {
        let segment = self.unsynced.values().min().map(|since| *since + SYNC_EVERY);
        let base = self.merged.as_ref().map(|(_, _, since)| *since + SYNC_EVERY);
        (segment, base)
    }
}

/// Writes a spool until its mount is gone.
pub(super) async fn run(env: Env, spool: Weak<Spool>) {
    let mut disk = Disk::default();
    loop {
        let Some(wake) = spool.upgrade().map(|spool| spool.wake.clone()) else { return };
        let (segment, base) = disk.due();
        let due = [segment, base].into_iter().flatten().min();
        let pause = due.map_or(LOOK_EVERY, |due| due.since(env.now()));
        select(pin!(wake.notified()), sleep(&*env, pause)).await;
        let Some(spool) = spool.upgrade() else { return };
        let work = async {
            let now = env.now();
            spool.write(&mut disk, now).await?;
            let is_awaited = !spool.state().waiters.is_empty();
            let (segment, base) = disk.due();
            match segment {
                _ if is_awaited => spool.sync(&mut disk).await,
                Some(due) if due <= now => spool.sync(&mut disk).await,
                _ if base.is_some_and(|due| due <= now) => spool.replace_base(&mut disk).await,
                _ => Ok(()),
            }
        };
        if let Err(error) = work.await {
            spool.fail(&error);
            return;
        }
    }
}

fn name_of(first: u64) -> String {
    format!("{first:020}{SPOOL_RECORDS}")
}

/// The name of a part of restated contents.
fn restated_name(records: u64, part: usize) -> String {
    format!("{records:020}-{part:04}{SPOOL_RECORDS}")
}

/// How many records the root has that leaves out the contents in this file.
fn restated_of(name: &str) -> Option<u64> {
    let (records, part) = name.strip_suffix(SPOOL_RECORDS)?.split_once('-')?;
    let is_part = part.len() == 4 && part.parse::<u16>().is_ok();
    if is_part && records.len() == 20 { records.parse().ok() } else { None }
}

fn first_of(name: &str) -> Option<u64> {
    let digits = name.strip_suffix(SPOOL_RECORDS).filter(|digits| digits.len() == 20)?;
    digits.parse().ok()
}
