//! Manifests: which blocks of a volume this node keeps alive.
//!
//! A manifest is the list of a published version's content blocks, with its signed root,
//! in one file, so that the two can never disagree after a crash:
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 4 | magic `ATMF` |
//! | 4 | 4 | layout, 2, big-endian |
//! | 8 | 32·n | block hashes in ascending order, each once |
//! | 8 + 32·n | r | the signed root block |
//! | 8 + 32·n + r | 8 | n, big-endian |
//! | 16 + 32·n + r | 4 | r, big-endian |
//! | 20 + 32·n + r | 32 | BLAKE3 of all bytes before, derive-key context `atoll v1 manifest` |
//!
//! The order is that of the ring, so that blocks with the same root are renewed together.
//!
//! While a manifest is written its file is called `manifest.SESSION` and has only the magic, the
//! layout and the hashes, in the order in which they were added, repeats included. Each addition
//! says where it begins, so a repeated one changes nothing and a lost one is noticed. Nothing is
//! kept in memory between additions, so a publisher continues after a restart of the node. The
//! commit sorts the hashes: in memory if the hashes fit [`RUN_HASHES`], else as an external merge sort
//! through `manifest.SESSION.runs`; the result, `manifest.SESSION.sorted`, is renamed.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use atoll_key::{BlockHash, MAX_BLOCK_BYTES, SignedBlock};
use bytes::Bytes;

use crate::control::volume_error::{VolumeError, io_error};
use crate::dir::{self, DirError};

const MAGIC: &[u8; 8] = b"ATMF\0\0\0\x02";
const HASH_BYTES: u64 = 32;
const TRAILER_BYTES: u64 = 8 + 4 + 32;
/// Hashes sorted in memory at once: 32 MiB.
const RUN_HASHES: u64 = 1 << 20;
/// What is read at once from each run while runs are merged, bytes: 10 TB in blocks of 64 KiB
/// are 153 runs, and take 10 MiB then.
const MERGE_BUFFER_BYTES: usize = 64 << 10;

/// How long an abandoned session's file stays, in case its publisher comes back.
const ABANDONED_AFTER: Duration = Duration::from_secs(24 * 3600);

/// A finished manifest, open for reading. It stays readable when it is replaced.
#[derive(Debug)]
pub(crate) struct Manifest {
    file: File,
    path: PathBuf,
    count: u64,
    root: SignedBlock,
}

impl Manifest {
    /// Opens a manifest and reads its ends; `None` if there is none. The hashes are
    /// checked by [`Manifest::check`] or not at all.
    pub(crate) fn open(path: &Path) -> Result<Option<Manifest>, DirError> {
        let file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(DirError::io("cannot read", path)(error)),
        };
        Manifest::read(file, path).map(Some)
    }

    fn read(file: File, path: &Path) -> Result<Manifest, DirError> {
        let damaged = |what: &str| DirError::damaged(path, what);
        let io = || DirError::io("cannot read", path);
        let len_bytes = file.metadata().map_err(io())?.len();
        if len_bytes < MAGIC.len() as u64 + TRAILER_BYTES {
            return Err(damaged("it is cut short"));
        }
        let mut magic = [0; 8];
        file.read_exact_at(&mut magic, 0).map_err(io())?;
        if &magic != MAGIC {
            return Err(damaged("it does not begin like a manifest"));
        }
        let mut trailer = [0; TRAILER_BYTES as usize];
        file.read_exact_at(&mut trailer, len_bytes - TRAILER_BYTES).map_err(io())?;
        let count = u64::from_be_bytes(trailer[..8].try_into().expect("8 bytes"));
        let root_bytes = u32::from_be_bytes(trailer[8..12].try_into().expect("4 bytes"));
        let expected = count
            .checked_mul(HASH_BYTES)
            .and_then(|hashes| hashes.checked_add(u64::from(root_bytes)))
            .and_then(|body| body.checked_add(MAGIC.len() as u64 + TRAILER_BYTES));
        if expected != Some(len_bytes) || root_bytes as usize > MAX_BLOCK_BYTES {
            return Err(damaged("its length is not what it says"));
        }
        let mut root = vec![0; root_bytes as usize];
        file.read_exact_at(&mut root, MAGIC.len() as u64 + count * HASH_BYTES).map_err(io())?;
        let root = SignedBlock::decode(&Bytes::from(root))
            .map_err(|error| DirError::damaged(path, error))?;
        Ok(Manifest { file, path: path.to_owned(), count, root })
    }

    /// How many hashes it has.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// The signed root of the version.
    pub(crate) fn root(&self) -> &SignedBlock {
        &self.root
    }

    /// Up to `limit` hashes from number `from` on; empty at the end.
    pub(crate) fn hashes(&self, from: u64, limit: u64) -> Result<Vec<BlockHash>, DirError> {
        let count = self.count.saturating_sub(from).min(limit);
        let mut bytes = vec![0; (count * HASH_BYTES) as usize];
        self.file
            .read_exact_at(&mut bytes, MAGIC.len() as u64 + from * HASH_BYTES)
            .map_err(DirError::io("cannot read", &self.path))?;
        Ok(bytes.as_chunks::<32>().0.iter().map(|hash| BlockHash(*hash)).collect())
    }

    /// Compares the whole file with its checksum.
    pub(crate) fn check(&self) -> Result<(), DirError> {
        let io = || DirError::io("cannot read", &self.path);
        let mut file = &self.file;
        file.seek(SeekFrom::Start(0)).map_err(io())?;
        let len_bytes = file.metadata().map_err(io())?.len();
        let found = checksum(file, len_bytes - HASH_BYTES).map_err(io())?;
        let mut written = [0; 32];
        file.read_exact_at(&mut written, len_bytes - HASH_BYTES).map_err(io())?;
        if found != written {
            return Err(DirError::damaged(&self.path, "its checksum does not match"));
        }
        Ok(())
    }
}

fn checksum(file: &File, len_bytes: u64) -> io::Result<[u8; 32]> {
    let mut hasher = blake3::Hasher::new_derive_key("atoll v1 manifest");
    let mut reader = BufReader::with_capacity(64 << 10, file.take(len_bytes));
    io::copy(&mut reader, &mut hasher)?;
    Ok(*hasher.finalize().as_bytes())
}

/// Hashes `from..upto` of a file being added to, sorted, each once.
fn sorted_run(added: &File, from: u64, upto: u64) -> io::Result<Vec<[u8; 32]>> {
    let count = usize::try_from(upto - from).expect("a run fits memory");
    let mut hashes = vec![[0; 32]; count];
    let at = MAGIC.len() as u64 + from * HASH_BYTES;
    added.read_exact_at(hashes.as_flattened_mut(), at)?;
    hashes.sort_unstable();
    hashes.dedup();
    Ok(hashes)
}

/// Writes the first `count` hashes of `added` to `runs` as sorted runs of at most `run_hashes`;
/// returns where each begins and ends, in hashes.
fn write_runs(
    added: &File,
    count: u64,
    run_hashes: u64,
    mut runs: &File,
) -> io::Result<Vec<Range<u64>>> {
    let (mut places, mut end) = (Vec::new(), 0);
    for from in (0..count).step_by(usize::try_from(run_hashes).expect("it fits memory")) {
        let run = sorted_run(added, from, count.min(from + run_hashes))?;
        runs.write_all(run.as_flattened())?;
        places.push(end..end + run.len() as u64);
        end += run.len() as u64;
    }
    Ok(places)
}

/// Merges sorted runs into one without repeats; returns how many hashes that has.
fn merge(runs: &File, places: &[Range<u64>], out: &mut impl Write) -> io::Result<u64> {
    struct Run<'a> {
        file: &'a File,
        rest: Range<u64>,
        buffer: VecDeque<[u8; 32]>,
    }
    impl Run<'_> {
        fn next(&mut self) -> io::Result<Option<[u8; 32]>> {
            if self.buffer.is_empty() && !self.rest.is_empty() {
                let most = (MERGE_BUFFER_BYTES as u64) / HASH_BYTES;
                let count = most.min(self.rest.end - self.rest.start);
                let mut read = vec![[0; 32]; usize::try_from(count).expect("a buffer")];
                self.file.read_exact_at(read.as_flattened_mut(), self.rest.start * HASH_BYTES)?;
                self.rest.start += count;
                self.buffer = read.into();
            }
            Ok(self.buffer.pop_front())
        }
    }
    let run = |place: &Range<u64>| Run { file: runs, rest: place.clone(), buffer: VecDeque::new() };
    let mut runs: Vec<Run> = places.iter().map(run).collect();
    let mut heads = BinaryHeap::new();
    for (number, run) in runs.iter_mut().enumerate() {
        heads.extend(run.next()?.map(|hash| Reverse((hash, number))));
    }
    let (mut count, mut last) = (0, None);
    while let Some(Reverse((hash, number))) = heads.pop() {
        if last != Some(hash) {
            out.write_all(&hash)?;
            (count, last) = (count + 1, Some(hash));
        }
        heads.extend(runs[number].next()?.map(|hash| Reverse((hash, number))));
    }
    Ok(count)
}

/// A manifest being written.
#[derive(Debug)]
pub(crate) struct PartialManifest {
    path: PathBuf,
}

impl PartialManifest {
    /// The one that `session` writes in a volume's directory.
    pub(crate) fn at(volume_dir: &Path, session: u64) -> PartialManifest {
        PartialManifest { path: volume_dir.join(format!("manifest.{session:016x}")) }
    }

    /// Appends `hashes` (32 bytes each) behind the first `offset`; what stood there from an
    /// earlier attempt is overwritten.
    pub(crate) fn add(&self, offset: u64, hashes: &[u8]) -> Result<(), VolumeError> {
        self.add_io(offset, hashes).map_err(io_error(&self.path))?
    }

    fn add_io(&self, offset: u64, hashes: &[u8]) -> io::Result<Result<(), VolumeError>> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(offset == 0)
            .truncate(false)
            .mode(0o600)
            .open(&self.path);
        let file = match file {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(Err(VolumeError::Gap { has: 0, expected: offset }));
            }
            other => other?,
        };
        if offset == 0 {
            file.write_all_at(MAGIC, 0)?;
        }
        let has = self.hashes_in(&file)?;
        if has < offset {
            return Ok(Err(VolumeError::Gap { has, expected: offset }));
        }
        let at = MAGIC.len() as u64 + offset * HASH_BYTES;
        file.set_len(at)?;
        file.write_all_at(hashes, at)?;
        Ok(Ok(()))
    }

    /// Finishes the manifest and renames it to `target`, durably.
    pub(crate) fn commit(
        &self,
        count: u64,
        root: &SignedBlock,
        target: &Path,
    ) -> Result<(), VolumeError> {
        if count == 0 {
            self.add(0, &[])?;
        }
        self.commit_io(count, root, target).map_err(io_error(&self.path))?
    }

    fn commit_io(
        &self,
        count: u64,
        root: &SignedBlock,
        target: &Path,
    ) -> io::Result<Result<(), VolumeError>> {
        let file = match OpenOptions::new().read(true).write(true).open(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(Err(VolumeError::Gap { has: 0, expected: count }));
            }
            other => other?,
        };
        let has = self.hashes_in(&file)?;
        if has < count {
            return Ok(Err(VolumeError::Gap { has, expected: count }));
        }
        let sorted = self.beside("sorted");
        let made = self.write_sorted(&file, count, root, &sorted);
        let _ = fs::remove_file(self.beside("runs"));
        made?;
        fs::rename(&sorted, target)?;
        dir::sync_parent(target)?;
        self.discard();
        Ok(Ok(()))
    }

    /// Writes the whole manifest of the first `count` hashes of `added` to `path`, durably.
    fn write_sorted(
        &self,
        added: &File,
        count: u64,
        root: &SignedBlock,
        path: &Path,
    ) -> io::Result<()> {
        let file = dir::create_private_file(path)?;
        let mut writer = BufWriter::with_capacity(MERGE_BUFFER_BYTES, &file);
        writer.write_all(MAGIC)?;
        let count = if count <= RUN_HASHES {
            let hashes = sorted_run(added, 0, count)?;
            writer.write_all(hashes.as_flattened())?;
            hashes.len() as u64
        } else {
            let runs = dir::create_private_file(&self.beside("runs"))?;
            merge(&runs, &write_runs(added, count, RUN_HASHES, &runs)?, &mut writer)?
        };
        writer.write_all(root.bytes())?;
        writer.write_all(&count.to_be_bytes())?;
        let root_bytes = u32::try_from(root.bytes().len()).expect("a block is short");
        writer.write_all(&root_bytes.to_be_bytes())?;
        writer.flush()?;
        drop(writer);
        let len_bytes = (&file).stream_position()?;
        (&file).seek(SeekFrom::Start(0))?;
        let sum = checksum(&file, len_bytes)?;
        file.write_all_at(&sum, len_bytes)?;
        file.sync_all()
    }

    fn beside(&self, suffix: &str) -> PathBuf {
        let mut name = self.path.clone().into_os_string();
        name.push(format!(".{suffix}"));
        PathBuf::from(name)
    }

    /// Removes what was written.
    pub(crate) fn discard(&self) {
        let _ = fs::remove_file(&self.path);
    }

    /// Whole hashes in the file so far; 0 if it is shorter than its head.
    fn hashes_in(&self, file: &File) -> io::Result<u64> {
        Ok(file.metadata()?.len().saturating_sub(MAGIC.len() as u64) / HASH_BYTES)
    }

    /// Removes sessions of a volume's directory that have not been continued for a day.
    pub(crate) fn clear_old(volume_dir: &Path) {
        let Ok(entries) = fs::read_dir(volume_dir) else { return };
        for entry in entries.flatten() {
            let age = entry.metadata().and_then(|meta| meta.modified()).map(|at| at.elapsed());
            let old = matches!(age, Ok(Ok(age)) if age > ABANDONED_AFTER);
            if old && is_partial(&entry.file_name()) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }
}

/// Whether a file name is that of a manifest being written.
pub(super) fn is_partial(name: &OsStr) -> bool {
    name.as_bytes().starts_with(b"manifest.")
}

#[cfg(test)]
mod tests {
    use super::*;
    use atoll_key::SecretKey;

    fn root(version: u64) -> SignedBlock {
        SignedBlock::sign(&SecretKey::from_seed(&[1; 32]), b"", version, b"payload")
    }

    fn hashes(range: std::ops::Range<u8>) -> Vec<u8> {
        range.flat_map(|i| [i; 32]).collect()
    }

    fn written(dir: &Path) -> PathBuf {
        let partial = PartialManifest::at(dir, 7);
        partial.add(0, &hashes(0..5)).expect("add");
        partial.add(5, &hashes(5..9)).expect("add");
        partial.commit(9, &root(3), &dir.join("manifest")).expect("commit");
        dir.join("manifest")
    }

    #[test]
    fn a_manifest_reads_back_in_batches() {
        let temp = tempfile::tempdir().expect("temp");
        let manifest = Manifest::open(&written(temp.path())).expect("open").expect("exists");
        assert_eq!((manifest.count(), manifest.root()), (9, &root(3)));
        manifest.check().expect("whole");
        let batch = manifest.hashes(6, 2).expect("read");
        assert_eq!(batch, [BlockHash([6; 32]), BlockHash([7; 32])]);
        assert_eq!(manifest.hashes(8, 100).expect("read").len(), 1);
        assert_eq!(manifest.hashes(9, 100).expect("read").len(), 0);
        assert_eq!(fs::read_dir(temp.path()).expect("list").count(), 1, "no session is left");
    }

    /// Blocks of one root are renewed in one message only if they stand together.
    #[test]
    fn a_committed_manifest_is_in_ring_order_without_repeats() {
        let temp = tempfile::tempdir().expect("temp");
        let partial = PartialManifest::at(temp.path(), 8);
        let added: Vec<u8> = [5, 3, 9, 3, 1, 5].into_iter().flat_map(|i| [i; 32]).collect();
        partial.add(0, &added).expect("add");
        partial.commit(6, &root(1), &temp.path().join("manifest")).expect("commit");
        let manifest = Manifest::open(&temp.path().join("manifest")).expect("open").expect("there");
        manifest.check().expect("whole");
        let kept: Vec<u8> = manifest.hashes(0, 9).expect("read").iter().map(|h| h.0[0]).collect();
        assert_eq!((kept, manifest.count()), (vec![1, 3, 5, 9], 4));
        assert_eq!(fs::read_dir(temp.path()).expect("list").count(), 1, "nothing else is left");
    }

    #[test]
    fn runs_that_do_not_fit_memory_are_merged_to_the_same_order() {
        let temp = tempfile::tempdir().expect("temp");
        let hash = |i: u64| *blake3::hash(&(i % 700).to_le_bytes()).as_bytes();
        let hashes: Vec<[u8; 32]> = (0..1000).map(hash).collect();
        let partial = PartialManifest::at(temp.path(), 8);
        partial.add(0, hashes.as_flattened()).expect("add");
        let mut expected = hashes;
        expected.sort_unstable();
        expected.dedup();
        let added = File::open(&partial.path).expect("open");
        for run_hashes in [1, 7, 999, 1000, 4000] {
            let path = temp.path().join("runs");
            let runs = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(true)
                .open(&path)
                .expect("made");
            let places = write_runs(&added, 1000, run_hashes, &runs).expect("written");
            let mut merged = Vec::new();
            let count = merge(&runs, &places, &mut merged).expect("merged");
            assert_eq!((count, merged.as_slice()), (700, expected.as_flattened()));
        }
    }

    #[test]
    fn a_repeated_addition_changes_nothing() {
        let temp = tempfile::tempdir().expect("temp");
        let once = fs::read(written(temp.path())).expect("read");
        let partial = PartialManifest::at(temp.path(), 8);
        partial.add(0, &hashes(0..5)).expect("add");
        partial.add(0, &hashes(0..5)).expect("again");
        partial.add(5, &hashes(5..9)).expect("add");
        partial.add(5, &hashes(5..9)).expect("again");
        partial.commit(9, &root(3), &temp.path().join("twice")).expect("commit");
        assert_eq!(fs::read(temp.path().join("twice")).expect("read"), once);
    }

    #[test]
    fn lost_additions_are_noticed() {
        let temp = tempfile::tempdir().expect("temp");
        let partial = PartialManifest::at(temp.path(), 8);
        let gap = |has, expected| Err(VolumeError::Gap { has, expected });
        assert_eq!(partial.add(5, &hashes(5..9)), gap(0, 5));
        partial.add(0, &hashes(0..3)).expect("add");
        assert_eq!(partial.add(5, &hashes(5..9)), gap(3, 5));
        let target = temp.path().join("manifest");
        assert_eq!(partial.commit(9, &root(3), &target), gap(3, 9));
        assert!(!target.exists());
    }

    #[test]
    fn an_empty_manifest_is_one_too() {
        let temp = tempfile::tempdir().expect("temp");
        let target = temp.path().join("manifest");
        PartialManifest::at(temp.path(), 8).commit(0, &root(1), &target).expect("commit");
        let manifest = Manifest::open(&target).expect("open").expect("exists");
        assert_eq!(manifest.count(), 0);
    }

    #[test]
    fn every_changed_byte_and_every_cut_is_noticed() {
        let temp = tempfile::tempdir().expect("temp");
        let good = fs::read(written(temp.path())).expect("read");
        let path = temp.path().join("bad");
        let holds = |bytes: &[u8]| {
            fs::write(&path, bytes).expect("write");
            Manifest::open(&path).is_ok_and(|m| m.expect("exists").check().is_ok())
        };
        assert!(holds(&good));
        for at in 0..good.len() {
            let mut bytes = good.clone();
            bytes[at] ^= 0x11;
            assert!(!holds(&bytes), "byte {at}");
            assert!(!holds(&good[..at]), "cut at {at}");
        }
    }
}
