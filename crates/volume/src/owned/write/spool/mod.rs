//! What a mount has written and the ring does not have yet, on this machine's disk.
//!
//! Each change is a [`Record`]. Records are numbered for as long as the spool's directory is there,
//! and lie in *segments*, files that are named by the number of their first record; a flush begins a
//! new one, and so does one that is long. The root on the ring says how many records of which spools
//! it has ([`MountState::merged`]): when a mount begins, older segments are removed, and the records
//! of the others are made again, on the very version that they followed.
//!
//! | file | what it holds |
//! |---|---|
//! | `id` | 16 random bytes that name the spool |
//! | `base` | the newest root that this mount has put: what the first segment follows |
//! | `NNNNNNNNNNNNNNNNNNNN.records` | a segment ([`segment`]) |
//!
//! Beside that, changed bytes that are too many for the memory are in a file that dies with the mount
//! ([`swap`]).
//!
//! Promises:
//!
//! - When [`Spool::synced`] has returned, the records before it survive a crash of the machine.
//! - Records are made again in order, from the first that the root does not have; after a crash the
//!   last ones may be missing, none in between.
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

mod directory;
mod segment;
mod swap;

use std::collections::BTreeMap;
use std::io;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use atoll_env::{Env, Notify, sleep};
use atoll_key::{SignedBlock, VolumeCipher};
use bytes::Bytes;
use futures_channel::oneshot;
use futures_util::future::select;

pub use self::directory::SpoolDirectory;
use self::swap::Swap;
use super::tree::Record;

/// A segment ends when it has more bytes: a mount reads it as a whole.
const SEGMENT_BYTES: u64 = 32 << 20;

/// Bytes of records that wait for the disk; then writers wait.
const MAX_QUEUED_BYTES: usize = 16 << 20;

/// How long what nobody waits for is only in the memory of the system.
const SYNC_EVERY: Duration = Duration::from_secs(1);

/// How often the task looks whether its mount is gone.
const LOOK_EVERY: Duration = Duration::from_secs(10);

const ID: &str = "id";
const BASE: &str = "base";
const SUFFIX: &str = ".records";

/// See the module.
pub(super) struct Spool {
    id: [u8; 16],
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
    /// Segments with records, and their bytes.
    segments: BTreeMap<u64, u64>,
    queue: Vec<Work>,
    queued_bytes: usize,
    /// Records below are durable here, or on the ring.
    durable: u64,
    waiters: Vec<(u64, oneshot::Sender<()>)>,
    failure: Option<String>,
}

enum Work {
    /// Appends to a segment records from a number on.
    Append { segment: u64, first: u64, records: Vec<Record> },
    /// The ring has all records before a number, by this root.
    Merged { records: u64, root: SignedBlock },
    /// Says that everything before is done.
    Say(oneshot::Sender<()>),
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
        let id = match names.iter().any(|name| name == ID) {
            true => directory.read(ID.into()).await?[..].try_into().ok(),
            false => None,
        };
        let id = match id {
            Some(id) => id,
            None => {
                let id = super::random_id(env);
                directory.replace(ID.into(), Bytes::copy_from_slice(&id)).await?;
                id
            }
        };
        // Their sizes count once they are read.
        let segments = names.iter().filter_map(|name| Some((first_of(name)?, 0))).collect();
        let state = Mutex::new(State { segments, ..State::default() });
        Ok(Spool { id, directory, cipher, state, wake: Arc::default(), swap: Swap::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }

    /// Names the spool in roots.
    pub(super) fn id(&self) -> [u8; 16] {
        self.id
    }

    /// Whether there are segments with records from `merged` on.
    pub(super) fn has_more_than(&self, merged: u64) -> bool {
        self.state().segments.keys().any(|first| *first >= merged)
    }

    /// The root that the first segment follows, if it is known.
    pub(super) async fn base(&self) -> Result<SignedBlock, SpoolError> {
        let bytes = self.directory.read(BASE.into()).await?;
        SignedBlock::decode(&bytes).map_err(|error| SpoolError::Damaged(error.to_string()))
    }

    /// Moves all segments and `base` into a directory of their own; returns its name.
    pub(super) async fn set_aside(&self) -> Result<String, SpoolError> {
        let first: Vec<u64> = std::mem::take(&mut self.state().segments).into_keys().collect();
        let mut names: Vec<String> = first.into_iter().map(name_of).collect();
        names.push(BASE.into());
        Ok(self.directory.set_aside(names).await?)
    }

    /// Begins after so many records, which the ring has.
    pub(super) fn begin_at(&self, merged: u64) {
        let mut state = self.state();
        state.segments.retain(|first, _| *first >= merged);
        (state.next, state.segment, state.durable) = (merged, merged, merged);
    }

    /// The records of the next segment. All before have been made again, and count from now on.
    pub(super) async fn read_next(&self) -> Result<Option<Vec<Record>>, SpoolError> {
        let next = self.state().next;
        let first = self.state().segments.range(next..).next().map(|(first, _)| *first);
        let Some(first) = first else { return Ok(None) };
        if first != next {
            return Err(SpoolError::Damaged(format!("records {next} to {first} are missing")));
        }
        let bytes = self.directory.read(name_of(first)).await?;
        // Later segments are of no use without it.
        self.directory.sync(name_of(first)).await?;
        let len = bytes.len() as u64;
        let (records, left) = segment::decode(first, &bytes, self.cipher.as_ref());
        if left > 0 {
            tracing::warn!(
                "the last {left} bytes of a segment of the spool were not written whole"
            );
        }
        if records.is_empty() {
            let is_last = self.state().segments.keys().next_back() == Some(&first);
            let damaged = || SpoolError::Damaged(format!("segment {first} cannot be read"));
            return if is_last { Ok(None) } else { Err(damaged()) };
        }
        self.state().segments.insert(first, len);
        Ok(Some(records))
    }

    /// Removes the segment that nothing was read of: the next record has its name.
    pub(super) async fn end_reading(&self) -> Result<(), SpoolError> {
        let next = self.state().next;
        if self.state().segments.remove(&next).is_some() {
            self.directory.remove(name_of(next)).await?;
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
        let bytes = state.segments.entry(segment).or_default();
        *bytes += len as u64;
        let is_full = *bytes >= SEGMENT_BYTES;
        state.queue.push(Work::Append { segment, first, records });
        if is_full {
            state.segment = state.next;
        }
        drop(state);
        self.wake.notify();
        is_full
    }

    /// How many records there are so far; later ones go to another segment.
    pub(super) fn cut(&self) -> u64 {
        let mut state = self.state();
        state.segment = state.next;
        state.next
    }

    /// The ring has so many records, by this root.
    pub(super) fn merged(&self, records: u64, root: SignedBlock) {
        let mut state = self.state();
        state.durable = state.durable.max(records);
        state.segments.retain(|first, _| *first >= records);
        if state.failure.is_none() {
            state.queue.push(Work::Merged { records, root });
        }
        drop(state);
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
            state.queue.push(Work::Say(sender));
        }
        self.wake.notify();
        let _ = receiver.await;
    }

    /// Bytes on disk: records that the ring does not have, and what is swapped out.
    pub(super) fn bytes(&self) -> u64 {
        self.state().segments.values().sum::<u64>() + self.swap.bytes()
    }

    /// Why nothing is written here any more.
    pub(super) fn failure(&self) -> Option<String> {
        self.state().failure.clone()
    }

    /// Resolves when not too much waits for the disk.
    pub(super) async fn room(&self) {
        if self.state().queued_bytes > MAX_QUEUED_BYTES {
            // If the disk has failed, nothing waits for it.
            let _ = self.synced().await;
        }
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

    /// Writes what is queued; notes the segment that is not synced yet, and how many records are
    /// written.
    async fn write(&self, unsynced: &mut Option<u64>, written: &mut u64) -> io::Result<()> {
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
                            Work::Merged { .. } | Work::Say(_) => false,
                        })
                    {
                        records.extend(more);
                    }
                    // No segment is read beyond a gap in the one before.
                    if unsynced.is_some_and(|other| other != segment) {
                        self.sync(unsynced).await?;
                    }
                    let bytes = segment::encode(segment, first, &records, self.cipher.as_ref());
                    *unsynced = Some(segment);
                    self.directory.append(name_of(segment), bytes.into()).await?;
                    *written = first + records.len() as u64;
                }
                Work::Merged { records, root } => {
                    self.directory.replace(BASE.into(), root.bytes().clone()).await?;
                    for name in self.directory.list().await? {
                        if first_of(&name).is_some_and(|first| first < records) {
                            self.directory.remove(name).await?;
                        }
                    }
                    *unsynced = unsynced.filter(|segment| *segment >= records);
                    *written = records.max(*written);
                }
                // Whoever waited may have given up.
                Work::Say(done) => drop(done.send(())),
            }
        }
        Ok(())
    }

    async fn sync(&self, unsynced: &mut Option<u64>) -> io::Result<()> {
        match unsynced.take() {
            Some(segment) => self.directory.sync(name_of(segment)).await,
            None => Ok(()),
        }
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
        tracing::error!("the spool cannot be written: {error}");
        let mut state = self.state();
        state.failure = Some(error.to_string());
        state.queue.clear();
        state.queued_bytes = 0;
        state.waiters.clear();
    }
}

/// Writes a spool until its mount is gone.
pub(super) async fn run(env: Env, spool: Weak<Spool>) {
    let mut unsynced = None;
    let mut written = 0;
    let mut due = env.now();
    loop {
        let Some(wake) = spool.upgrade().map(|spool| spool.wake.clone()) else { return };
        let pause = if unsynced.is_some() { due.since(env.now()) } else { LOOK_EVERY };
        select(pin!(wake.notified()), sleep(&*env, pause)).await;
        let Some(spool) = spool.upgrade() else { return };
        if unsynced.is_none() {
            due = env.now() + SYNC_EVERY;
        }
        let work = async {
            spool.write(&mut unsynced, &mut written).await?;
            let is_awaited = !spool.state().waiters.is_empty();
            if is_awaited || env.now() >= due {
                spool.sync(&mut unsynced).await?;
                spool.answer(written);
            }
            Ok(())
        };
        if let Err(error) = work.await {
            spool.fail(&error);
            return;
        }
    }
}

fn name_of(first: u64) -> String {
    format!("{first:020}{SUFFIX}")
}

fn first_of(name: &str) -> Option<u64> {
    let digits = name.strip_suffix(SUFFIX).filter(|digits| digits.len() == 20)?;
    digits.parse().ok()
}
