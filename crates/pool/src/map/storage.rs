//! What a voter must not forget, on its disk: two files, written by turns, so that one is whole whenever the machine stops.
//!
//! | offset | bytes | |
//! |---|---|---|
//! | 0 | 8 | `atollvt2` |
//! | 8 | 8 | sequence number, big-endian: the greater is the newer |
//! | 16 | 4 | length of the state, big-endian |
//! | 20 | 4 | CRC-32 of sequence number, length and state, big-endian |
//! | 24 | | the state, CBOR |
//!
//! Both are made at their full length, so that a save writes bytes and nothing of the file system. If the newer one cannot be
//! read, its writing was cut off before anything depended on it, and the older one counts. A voter that can read neither, or lacks
//! one, does not vote: it would not know whom it gave its vote.

use std::sync::Arc;

use atoll_vfs::Errno;

use super::consensus::DurableVotes;
use crate::disk::{Disk, DiskResult, Making, missing_is_none};
use crate::messages::{decode, encode};
use crate::pool_map::PoolMap;

const MAGIC: &[u8; 8] = b"atollvt2";
const FRAME_BYTES: usize = 24;
/// More than twice what a state takes: that of a pool of 16 groups has 18 maps of 10 KB at most.
const FILE_BYTES: usize = 512 << 10;

/// The files in Atoll's own directory.
pub(crate) const NAMES: [&[u8]; 2] = [b"votes-0", b"votes-1"];

/// Why a voter does not vote.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum VoterError {
    /// It is not in the list of voters.
    #[error("this node is no voter of the pool")]
    NotAVoter,
    /// What it must not forget is of voters before these.
    #[error("its votes are old: its disk was set back to an older state, so it does not vote")]
    SetBack,
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

/// Makes both files in Atoll's own directory, durably, for a voter that has not voted in the generation of voters that `map` names, nor in
/// a later one. What an earlier generation has left is written over.
pub(crate) async fn make_votes<D: Disk>(disk: &D, own: &D::Node, map: &PoolMap) -> DiskResult<()> {
    let votes = DurableVotes::first(map);
    let sequences =
        read_both(disk, own).await?.map(|read| read.map_or(0, |(sequence, _)| sequence));
    // The older one first: the other one counts until that is written.
    let mut names = NAMES;
    if sequences[1] < sequences[0] {
        names.reverse();
    }
    for (name, sequence) in names.into_iter().zip(sequences[0].max(sequences[1]) + 1..) {
        match disk.make(own, name, Making::File, 0o600).await {
            Ok(()) | Err(Errno::EEXIST) => {}
            Err(errno) => return Err(errno),
        }
        let file = disk.open(&disk.node(own, name).await?).await?;
        let mut bytes = to_bytes(sequence, &votes)?;
        bytes.resize(FILE_BYTES, 0);
        write(disk, &file, &bytes).await?;
        disk.sync_file(&file, false).await?;
    }
    Ok(())
}

/// What the newer file says; none if there is nothing that can be read.
pub(super) async fn read_votes<D: Disk>(
    disk: &D,
    own: &D::Node,
) -> DiskResult<Option<DurableVotes>> {
    let both = read_both(disk, own).await?.into_iter().flatten();
    Ok(both.max_by_key(|(sequence, _)| *sequence).map(|(_, votes)| votes))
}

/// What both files say, as far as they are there and can be read.
async fn read_both<D: Disk>(
    disk: &D,
    own: &D::Node,
) -> DiskResult<[Option<(u64, DurableVotes)>; 2]> {
    let mut both = [None, None];
    for (name, read) in NAMES.into_iter().zip(&mut both) {
        if let Some(node) = missing_is_none(disk.node(own, name).await)? {
            let bytes = disk.read(&disk.open(&node).await?, 0, FILE_BYTES).await?;
            *read = from_bytes(&bytes).filter(|(_, votes)| votes.is_sound());
        }
    }
    Ok(both)
}

impl<D: Disk> VoteStorage<D> {
    /// Opens both files, and reads the newer state.
    pub(super) async fn open(
        disk: Arc<D>,
        own: &D::Node,
    ) -> Result<(VoteStorage<D>, DurableVotes), VoterError> {
        let mut files = Vec::new();
        for name in NAMES {
            let node = missing_is_none(disk.node(own, name).await)?.ok_or(VoterError::Missing)?;
            files.push(disk.open(&node).await?);
        }
        let both = read_both(&*disk, own).await?.into_iter().enumerate();
        let readable =
            both.filter_map(|(at, read)| read.map(|(sequence, votes)| (sequence, at, votes)));
        let newest = readable.max_by_key(|(sequence, ..)| *sequence);
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

#[cfg(test)]
mod tests {
    use std::future::Future;

    use atoll_sim::{Sim, SimConfig};
    use futures_util::FutureExt;

    use super::super::tests::founding;
    use super::*;
    use crate::disk::simulated::{Loss, SimulatedDisk};
    use crate::pool_map::MapVoters;

    /// Calls of a disk without latency never wait.
    fn now<T>(work: impl Future<Output = T>) -> T {
        work.now_or_never().expect("nothing waits")
    }

    fn first() -> PoolMap {
        PoolMap::first(&founding(3))
    }

    fn new_disk() -> SimulatedDisk {
        let disk = SimulatedDisk::new(Sim::new(SimConfig::default()).outside());
        now(make_votes(&disk, &disk.top(), &first())).unwrap();
        now(disk.sync_all()).unwrap();
        disk
    }

    fn open(
        disk: &SimulatedDisk,
    ) -> Result<(VoteStorage<SimulatedDisk>, DurableVotes), VoterError> {
        now(VoteStorage::open(Arc::new(disk.clone()), &disk.top()))
    }

    fn votes(term: u64) -> DurableVotes {
        DurableVotes { term, vote: Some(term % 3), ..DurableVotes::first(&first()) }
    }

    fn damage(disk: &SimulatedDisk, name: &[u8], at: u64) {
        now(async {
            let file = disk.open(&disk.node(&disk.top(), name).await?).await?;
            let byte = disk.read(&file, at, 1).await?[0];
            disk.write(&file, at, &[byte ^ 1]).await
        })
        .unwrap();
    }

    #[test]
    fn what_was_saved_last_is_read_and_the_one_before_if_that_is_damaged() {
        let disk = new_disk();
        let (mut storage, found) = open(&disk).unwrap();
        assert_eq!(found, DurableVotes::first(&first()));
        for term in 1..=5 {
            now(storage.save(&votes(term))).unwrap();
            assert_eq!(open(&disk).unwrap().1, votes(term));
        }
        let len = to_bytes(7, &votes(5)).unwrap().len() as u64;
        for at in 0..len {
            damage(&disk, NAMES[0], at);
            assert_eq!(open(&disk).unwrap().1, votes(4), "byte {at}");
            damage(&disk, NAMES[0], at);
        }
        assert_eq!(open(&disk).unwrap().1, votes(5));
    }

    #[test]
    fn a_save_that_a_loss_of_power_cuts_off_leaves_the_one_before() {
        let mut outcomes = [0, 0];
        for seed in 0..200 {
            for loss in [Loss::Ordered, Loss::Arbitrary] {
                let disk = new_disk();
                let (mut storage, _) = open(&disk).unwrap();
                now(storage.save(&votes(1))).unwrap();
                // Written, and not synced.
                disk.stop_after(1);
                assert_eq!(now(storage.save(&votes(2))), Err(Errno::EIO));
                disk.crash_with(loss, seed);
                let (mut storage, found) = open(&disk.reopen()).unwrap();
                outcomes[found.term as usize - 1] += 1;
                assert_eq!(found, votes(found.term));
                now(storage.save(&votes(3))).unwrap();
                storage.disk.crash_with(loss, seed);
                assert_eq!(open(&disk.reopen()).unwrap().1, votes(3));
            }
        }
        assert!(outcomes.iter().all(|count| *count > 0), "{outcomes:?}");
    }

    #[test]
    fn votes_of_another_generation_take_the_place_of_those_before_wherever_that_is_cut_off() {
        let later =
            PoolMap { epoch: 9, voters: MapVoters { generation: 2, ..first().voters }, ..first() };
        let mut outcomes = [0, 0];
        for saves in 1..=2 {
            for calls in 0.. {
                let disk = new_disk();
                let (mut storage, _) = open(&disk).unwrap();
                (1..=saves).for_each(|term| now(storage.save(&votes(term))).unwrap());
                disk.stop_after(calls);
                let made = now(make_votes(&disk, &disk.top(), &later));
                disk.crash_with(Loss::Arbitrary, calls);
                let found = open(&disk.reopen()).unwrap().1;
                let is_later = found == DurableVotes::first(&later);
                assert!(is_later || found == votes(saves), "{found:?}");
                outcomes[usize::from(is_later)] += 1;
                if made.is_ok() {
                    assert!(is_later);
                    break;
                }
            }
        }
        assert!(outcomes.iter().all(|count| *count > 1), "{outcomes:?}");
    }

    #[test]
    fn a_voter_that_may_have_forgotten_its_vote_does_not_vote() {
        let disk = new_disk();
        for name in NAMES {
            damage(&disk, name, 30);
        }
        assert_eq!(open(&disk).err(), Some(VoterError::Damaged));
        for name in NAMES {
            let disk = new_disk();
            now(disk.unlink(&disk.top(), name)).unwrap();
            assert_eq!(open(&disk).err(), Some(VoterError::Missing));
        }
        let disk = new_disk();
        let mut other = votes(1);
        other.vote = Some(3);
        now(open(&disk).unwrap().0.save(&other)).unwrap();
        let (_, found) = open(&disk).unwrap();
        assert_eq!(found, DurableVotes::first(&first()), "a vote for nobody");
    }

    #[test]
    fn a_state_that_does_not_fit_is_refused_before_it_is_written() {
        let disk = new_disk();
        let (mut storage, first) = open(&disk).unwrap();
        let items = vec![super::super::wire::LogItem::Change(first.map.clone()); 4000];
        let long = DurableVotes { items, ..first.clone() };
        assert_eq!(now(storage.save(&long)), Err(Errno::EFBIG));
        assert_eq!(open(&disk).unwrap().1, first);
    }
}
