//! What a voter must not forget, on its disk: two files, written by turns, so that one is whole whenever the machine stops.
//!
//! | offset | bytes | |
//! |---|---|---|
//! | 0 | 8 | `atollvt1` |
//! | 8 | 8 | sequence number, big-endian: the greater is the newer |
//! | 16 | 4 | length of the state, big-endian |
//! | 20 | 4 | CRC-32 of sequence number, length and state, big-endian |
//! | 24 | | the state, CBOR |
//!
//! Both are made with the member's disk, at their full length, so that a save writes bytes and nothing of the file system. If the newer one cannot be
//! read, its writing was cut off before anything depended on it, and the older one counts. A voter that can read neither, or lacks
//! one, does not vote: it would not know whom it gave its vote.

use std::sync::Arc;

use atoll_vfs::Errno;

use super::consensus::DurableVotes;
use crate::disk::{Disk, DiskResult, Making};
use crate::members::PoolMembers;
use crate::messages::{decode, encode};

const MAGIC: &[u8; 8] = b"atollvt1";
const FRAME_BYTES: usize = 24;
/// Far more than a state takes: that of a pool of 16 has 34 maps of 600 bytes at most.
const FILE_BYTES: usize = 64 << 10;

/// The files in Atoll's own directory.
pub(crate) const NAMES: [&[u8]; 2] = [b"votes-0", b"votes-1"];

/// Why a voter does not vote.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum VoterError {
    /// It is not in the list of voters.
    #[error("this node is no voter of the pool")]
    NotAVoter,
    /// What it must not forget is gone.
    #[error("its votes are missing: it would not know whom it gave its vote, so it does not vote")]
    Missing,
    /// What it must not forget cannot be read.
    #[error("its votes are damaged: it would not know whom it gave its vote, so it does not vote")]
    Damaged,
    /// A call of the disk failed.
    #[error("its votes cannot be read or written: {0}")]
    Disk(#[from] Errno),
}

/// See the module.
pub(super) struct VoteStorage<D: Disk> {
    disk: Arc<D>,
    files: [D::File; 2],
    /// Which one is written next.
    next: usize,
    /// Of what is written next.
    sequence: u64,
}

/// Makes both files in Atoll's own directory, durably, for a voter that has not voted.
pub(crate) async fn make_votes<D: Disk>(
    disk: &D,
    own: &D::Node,
    founding: &PoolMembers,
) -> DiskResult<()> {
    for (name, sequence) in NAMES.into_iter().zip(1..) {
        disk.make(own, name, Making::File, 0o600).await?;
        let file = disk.open(&disk.node(own, name).await?).await?;
        let mut bytes = to_bytes(sequence, &DurableVotes::first(founding))?;
        bytes.resize(FILE_BYTES, 0);
        write(disk, &file, &bytes).await?;
        disk.sync_file(&file, false).await?;
    }
    Ok(())
}

impl<D: Disk> VoteStorage<D> {
    /// Opens both files, and reads the newer state.
    pub(super) async fn open(
        disk: Arc<D>,
        own: &D::Node,
        founding: &PoolMembers,
    ) -> Result<(VoteStorage<D>, DurableVotes), VoterError> {
        let mut files = Vec::new();
        let mut newest: Option<(u64, usize, DurableVotes)> = None;
        for (at, name) in NAMES.into_iter().enumerate() {
            let file = match disk.node(own, name).await {
                Err(Errno::ENOENT) => return Err(VoterError::Missing),
                Err(errno) => return Err(VoterError::Disk(errno)),
                Ok(node) => disk.open(&node).await?,
            };
            let bytes = disk.read(&file, 0, FILE_BYTES).await?;
            files.push(file);
            let found = from_bytes(&bytes).filter(|(_, votes)| votes.is_sound(founding));
            if let Some((sequence, votes)) = found
                && newest.as_ref().is_none_or(|(newest, ..)| *newest < sequence)
            {
                newest = Some((sequence, at, votes));
            }
        }
        let (sequence, at, votes) = newest.ok_or(VoterError::Damaged)?;
        let files = files.try_into().unwrap_or_else(|_| unreachable!("there are two names"));
        Ok((VoteStorage { disk, files, next: 1 - at, sequence: sequence + 1 }, votes))
    }

    /// Writes a state, durably. After an error it is not known what stands on the disk, and nothing may be saved any more.
    pub(super) async fn save(&mut self, votes: &DurableVotes) -> DiskResult<()> {
        let file = &self.files[self.next];
        write(&*self.disk, file, &to_bytes(self.sequence, votes)?).await?;
        self.disk.sync_file(file, true).await?;
        self.next = 1 - self.next;
        self.sequence += 1;
        Ok(())
    }
}

async fn write<D: Disk>(disk: &D, file: &D::File, bytes: &[u8]) -> DiskResult<()> {
    match disk.write(file, 0, bytes).await? == bytes.len() {
        true => Ok(()),
        false => Err(Errno::ENOSPC),
    }
}

fn to_bytes(sequence: u64, votes: &DurableVotes) -> DiskResult<Vec<u8>> {
    let state = encode(votes);
    if FRAME_BYTES + state.len() > FILE_BYTES {
        return Err(Errno::EFBIG);
    }
    let sequence = sequence.to_be_bytes();
    let len = (state.len() as u32).to_be_bytes();
    let crc = checksum(&sequence, &len, &state).to_be_bytes();
    Ok([MAGIC.as_slice(), &sequence, &len, &crc, &state].concat())
}

fn from_bytes(bytes: &[u8]) -> Option<(u64, DurableVotes)> {
    let (frame, rest) = bytes.split_first_chunk::<FRAME_BYTES>()?;
    let (magic, frame) = frame.split_first_chunk::<8>()?;
    let (sequence, frame) = frame.split_first_chunk::<8>()?;
    let (len, crc) = frame.split_first_chunk::<4>()?;
    let state = rest.get(..u32::from_be_bytes(*len) as usize)?;
    if magic != MAGIC || checksum(sequence, len, state).to_be_bytes() != crc {
        return None;
    }
    // A sequence number counts saves, so there is another after it.
    let sequence = Some(u64::from_be_bytes(*sequence)).filter(|sequence| *sequence < u64::MAX)?;
    Some((sequence, decode(state)?))
}

fn checksum(sequence: &[u8], len: &[u8], state: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    [sequence, len, state].into_iter().for_each(|bytes| hasher.update(bytes));
    hasher.finalize()
}
