//! What was changed since the index was last written: a log of [`PoolChange`]s on the member's disk.
//!
//! Two files of a fixed length, filled with zeros when they are made, so that a sync writes bytes and nothing of the file system
//! under them. One is filled; when it is full, the other is begun, whose changes a *checkpoint* has made
//! unnecessary by then: all files were synced, and the index was written with the sequence number up to which it knows.
//!
//! | offset | bytes | |
//! |---|---|---|
//! | 0 | 8 | `atolljn1` |
//! | 8 | 8 | sequence number of the first record, big-endian |
//! | 16 | 8 | the *life*: random bits, others at each start |
//! | 24 | 4 | CRC-32 of the 24 bytes before, big-endian |
//! | 4096 | | records: length of the change (4 bytes), CRC-32 of life, sequence number, order and change (4), sequence number (8), order (8), the change |
//!
//! Sequence numbers are consecutive, and a life's checksums are its own, so a record that was left by an earlier use of the file
//! is never taken for one of this: after a crash numbers are given out again that were on the disk behind a gap. The first record
//! that is cut off, damaged or out of sequence is the end.
//!
//! A change's *order* is its number among all changes of the pool, the same on all members; 0 in records that are this member's own.
//!
//! It does not know what changes mean.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use atoll_vfs::Errno;
use futures_util::lock::Mutex;

use crate::change::{MAX_CHANGE_BYTES, PoolChange};
use crate::disk::{Disk, DiskResult, Making};

const MAGIC: &[u8; 8] = b"atolljn1";
const HEADER_BYTES: u64 = 4096;
const FRAME_BYTES: usize = 24;
/// Room that is kept for calls that have begun.
const RESERVED_BYTES: u64 = 2 << 20;

/// How long each of the two files is: about 60,000 changes.
pub(crate) const HALF_BYTES: u64 = 8 << 20;

const NAMES: [&[u8]; 2] = [b"journal-0", b"journal-1"];

/// See the module.
pub(crate) struct PoolJournal<D: Disk> {
    halves: [D::File; 2],
    half_bytes: u64,
    end: Mutex<JournalEnd>,
    /// The sequence number of the last record that was written.
    written: AtomicU64,
    /// The last change of the pool that is in it.
    order: AtomicU64,
    /// All records up to this are durable.
    synced: AtomicU64,
    /// All records up to this are in the index.
    checkpointed: AtomicU64,
    /// Bytes that can still be written until a checkpoint must have ended.
    room: AtomicU64,
    /// Held by the sync under way.
    syncing: Mutex<()>,
    failed: AtomicBool,
}

/// Where the next record goes.
struct JournalEnd {
    half: usize,
    offset: u64,
    /// Of the next record.
    sequence: u64,
    /// The last record of the other half.
    last_of_other: u64,
    life: u64,
}

/// Whose order a record has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RecordOrder {
    /// None: it is about this member alone.
    Own,
    /// The next one: this member decides.
    Next,
    /// This one: another member has decided.
    Given(u64),
}

/// Which record was written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct AppendedRecord {
    pub(crate) sequence: u64,
    pub(crate) order: u64,
}

/// A record as it was read.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct JournalRecord {
    pub(crate) sequence: u64,
    /// See the module.
    pub(crate) order: u64,
    pub(crate) change: PoolChange,
}

impl<D: Disk> PoolJournal<D> {
    /// Opens the journal in Atoll's own directory, and reads what is in it.
    pub(crate) async fn open(
        disk: &D,
        own: &D::Node,
        half_bytes: u64,
    ) -> DiskResult<(PoolJournal<D>, Vec<JournalRecord>)> {
        let mut read = Vec::new();
        let mut halves = Vec::new();
        for name in NAMES {
            match disk.make(own, name, Making::File, 0o600).await {
                Ok(()) | Err(Errno::EEXIST) => {}
                Err(errno) => return Err(errno),
            }
            let file = disk.open(&disk.node(own, name).await?).await?;
            if disk.stat_file(&file).await?.size_bytes < half_bytes {
                fill_with_zeros(disk, &file, half_bytes).await?;
            }
            read.push(read_half(disk, &file, half_bytes).await?);
            halves.push(file);
        }
        read.sort_by_key(|half| half.first().map_or(u64::MAX, |record| record.sequence));
        let mut records = std::mem::take(&mut read[0]);
        let follows = |last: &JournalRecord| {
            read[1].first().is_some_and(|next| next.sequence == last.sequence + 1)
        };
        if records.last().is_some_and(follows) {
            records.append(&mut read[1]);
        } else if let Some(next) = read[1].first()
            && records.last().is_none_or(|last| last.sequence < next.sequence)
        {
            // The older half was given up when the newer one was begun.
            records = std::mem::take(&mut read[1]);
        }
        let halves = halves.try_into().unwrap_or_else(|_| unreachable!("there are two names"));
        let journal = PoolJournal {
            halves,
            half_bytes,
            end: Mutex::new(JournalEnd {
                half: 0,
                offset: half_bytes,
                sequence: 0,
                last_of_other: 0,
                life: 0,
            }),
            written: AtomicU64::new(0),
            order: AtomicU64::new(0),
            synced: AtomicU64::new(0),
            checkpointed: AtomicU64::new(0),
            room: AtomicU64::new(0),
            syncing: Mutex::new(()),
            failed: AtomicBool::new(false),
        };
        Ok((journal, records))
    }

    /// Begins a life after record `sequence` and change `order`, which the index has, as everything before.
    pub(crate) async fn begin(
        &self,
        disk: &D,
        (sequence, order): (u64, u64),
        life: u64,
    ) -> DiskResult<()> {
        let mut end = self.end.lock().await;
        self.order.store(order, Ordering::SeqCst);
        *end = JournalEnd {
            half: 0,
            offset: self.half_bytes,
            sequence: sequence + 1,
            last_of_other: sequence,
            life,
        };
        self.written.store(sequence, Ordering::SeqCst);
        self.synced.store(sequence, Ordering::SeqCst);
        self.checkpointed.store(sequence, Ordering::SeqCst);
        self.switch(disk, &mut end).await
    }

    /// Whether a checkpoint should be made soon, for a half is full and the other is being filled; and whether nothing may be
    /// begun before it.
    pub(crate) fn wants_checkpoint(&self) -> (bool, bool) {
        let room = self.room.load(Ordering::SeqCst);
        let needed = self.written.load(Ordering::SeqCst) > self.checkpointed.load(Ordering::SeqCst);
        (
            needed && room < self.half_bytes / 2,
            needed && room < RESERVED_BYTES.min(self.half_bytes / 4),
        )
    }

    /// The sequence number of the last record.
    pub(crate) fn written(&self) -> u64 {
        self.written.load(Ordering::SeqCst)
    }

    /// The order of the last change.
    pub(crate) fn last_order(&self) -> u64 {
        self.order.load(Ordering::SeqCst)
    }

    /// The last change that was found when the journal was opened.
    pub(crate) fn set_last_order(&self, last: u64) {
        self.order.store(last, Ordering::SeqCst);
    }

    /// The orders after this one are given to other changes.
    pub(crate) fn forget_orders_after(&self, last: u64) {
        self.order.fetch_min(last, Ordering::SeqCst);
    }

    /// Writes a change. It survives the end of the process when this returns, and that of the machine after a [`PoolJournal::sync`].
    pub(crate) async fn append(
        &self,
        disk: &D,
        order: RecordOrder,
        change: &PoolChange,
    ) -> DiskResult<AppendedRecord> {
        self.check()?;
        let mut end = self.end.lock().await;
        let sequence = end.sequence;
        let order = match order {
            RecordOrder::Own => 0,
            RecordOrder::Next => self.last_order() + 1,
            RecordOrder::Given(order) => order,
        };
        let record = encode(end.life, sequence, order, change);
        if record.len() > FRAME_BYTES + MAX_CHANGE_BYTES {
            // It would be taken for the end of the journal.
            return Err(Errno::E2BIG);
        }
        if end.offset + record.len() as u64 > self.half_bytes {
            if end.last_of_other > self.checkpointed.load(Ordering::SeqCst) {
                return Err(Errno::ENOSPC);
            }
            self.switch(disk, &mut end).await?;
        }
        let written = disk.write(&self.halves[end.half], end.offset, &record).await;
        if written != Ok(record.len()) {
            return Err(self.fail());
        }
        end.offset += record.len() as u64;
        end.sequence += 1;
        self.written.store(sequence, Ordering::SeqCst);
        self.order.fetch_max(order, Ordering::SeqCst);
        self.count_room(&end);
        Ok(AppendedRecord { sequence, order })
    }

    fn count_room(&self, end: &JournalEnd) {
        let other = match end.last_of_other > self.checkpointed.load(Ordering::SeqCst) {
            true => 0,
            false => self.half_bytes - HEADER_BYTES,
        };
        self.room.store(self.half_bytes - end.offset + other, Ordering::SeqCst);
    }

    /// Begins the other half.
    async fn switch(&self, disk: &D, end: &mut JournalEnd) -> DiskResult<()> {
        if self.sync_half(disk, end).await.is_err() {
            return Err(self.fail());
        }
        let last = end.sequence - 1;
        self.synced.fetch_max(last, Ordering::SeqCst);
        let half = 1 - end.half;
        let mut header =
            [MAGIC.as_slice(), &end.sequence.to_be_bytes(), &end.life.to_be_bytes()].concat();
        header.extend(crc32fast::hash(&header).to_be_bytes());
        if disk.write(&self.halves[half], 0, &header).await != Ok(header.len()) {
            return Err(self.fail());
        }
        *end = JournalEnd { half, offset: HEADER_BYTES, last_of_other: last, ..*end };
        self.count_room(end);
        Ok(())
    }

    async fn sync_half(&self, disk: &D, end: &JournalEnd) -> DiskResult<()> {
        disk.sync_file(&self.halves[end.half], true).await
    }

    /// Makes everything durable that was written when this was called. Calls that wait at the same time share one sync.
    pub(crate) async fn sync(&self, disk: &D) -> DiskResult<()> {
        let wanted = self.written.load(Ordering::SeqCst);
        if self.synced.load(Ordering::SeqCst) >= wanted {
            return self.check();
        }
        let _syncing = self.syncing.lock().await;
        self.check()?;
        if self.synced.load(Ordering::SeqCst) >= wanted {
            return Ok(());
        }
        let (half, last) = {
            let end = self.end.lock().await;
            (end.half, end.sequence - 1)
        };
        // What the other half has was synced when this one was begun.
        if disk.sync_file(&self.halves[half], true).await.is_err() {
            return Err(self.fail());
        }
        self.synced.fetch_max(last, Ordering::SeqCst);
        Ok(())
    }

    /// The index has everything up to `sequence`, durably.
    pub(crate) async fn note_checkpoint(&self, sequence: u64) {
        let end = self.end.lock().await;
        self.checkpointed.fetch_max(sequence, Ordering::SeqCst);
        self.count_room(&end);
    }

    /// Refuses everything once a write or a sync has failed: it is not known what stands on the disk.
    pub(crate) fn check(&self) -> DiskResult<()> {
        match self.failed.load(Ordering::SeqCst) {
            true => Err(Errno::EIO),
            false => Ok(()),
        }
    }

    /// Has everything refused from now on.
    pub(crate) fn fail(&self) -> Errno {
        self.failed.store(true, Ordering::SeqCst);
        Errno::EIO
    }
}

fn encode(life: u64, sequence: u64, order: u64, change: &PoolChange) -> Vec<u8> {
    let change = change.encode();
    let mut record = Vec::with_capacity(FRAME_BYTES + change.len());
    record.extend((change.len() as u32).to_be_bytes());
    record.extend(checksum(life, sequence, order, &change).to_be_bytes());
    record.extend(sequence.to_be_bytes());
    record.extend(order.to_be_bytes());
    record.extend(change);
    record
}

fn checksum(life: u64, sequence: u64, order: u64, change: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&life.to_be_bytes());
    hasher.update(&sequence.to_be_bytes());
    hasher.update(&order.to_be_bytes());
    hasher.update(change);
    hasher.finalize()
}

fn decode(bytes: &[u8], life: u64, expected: u64) -> Option<(JournalRecord, usize)> {
    let (frame, rest) = bytes.split_at_checked(FRAME_BYTES)?;
    let word = |at: usize| u32::from_be_bytes(frame[at..at + 4].try_into().expect("four bytes"));
    let sequence = u64::from_be_bytes(frame[8..16].try_into().expect("eight bytes"));
    let order = u64::from_be_bytes(frame[16..].try_into().expect("eight bytes"));
    let len = word(0) as usize;
    if sequence != expected || len > MAX_CHANGE_BYTES {
        return None;
    }
    let change = rest.get(..len)?;
    if checksum(life, sequence, order, change) != word(4) {
        return None;
    }
    Some((
        JournalRecord { sequence, order, change: PoolChange::decode(change)? },
        FRAME_BYTES + len,
    ))
}

async fn read_half<D: Disk>(
    disk: &D,
    file: &D::File,
    half_bytes: u64,
) -> DiskResult<Vec<JournalRecord>> {
    let mut records = Vec::new();
    let header = disk.read(file, 0, 28).await?;
    if header.len() < 28
        || &header[..8] != MAGIC
        || crc32fast::hash(&header[..24]).to_be_bytes() != header[24..28]
    {
        return Ok(records);
    }
    let mut expected = u64::from_be_bytes(header[8..16].try_into().expect("eight bytes"));
    let life = u64::from_be_bytes(header[16..24].try_into().expect("eight bytes"));
    let len = usize::try_from(half_bytes - HEADER_BYTES).map_err(|_| Errno::EFBIG)?;
    let bytes = disk.read(file, HEADER_BYTES, len).await?;
    let mut rest = &bytes[..];
    while let Some((record, len)) = decode(rest, life, expected) {
        records.push(record);
        rest = &rest[len..];
        expected = expected.wrapping_add(1);
    }
    Ok(records)
}

async fn fill_with_zeros<D: Disk>(disk: &D, file: &D::File, half_bytes: u64) -> DiskResult<()> {
    let zeros = vec![0; 1 << 20];
    let mut offset = disk.stat_file(file).await?.size_bytes;
    while offset < half_bytes {
        let len = (half_bytes - offset).min(zeros.len() as u64) as usize;
        match disk.write(file, offset, &zeros[..len]).await? {
            0 => return Err(Errno::ENOSPC),
            written => offset += written as u64,
        }
    }
    disk.sync_file(file, false).await
}
