//! Manifests: which blocks of a volume this node keeps alive.
//!
//! A manifest is the list of a published version's content blocks, with its signed root,
//! in one file, so that the two can never disagree after a crash:
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 4 | magic `ATMF` |
//! | 4 | 4 | layout, 1, big-endian |
//! | 8 | 32·n | block hashes, in the order they were added; repeats are allowed |
//! | 8 + 32·n | r | the signed root block |
//! | 8 + 32·n + r | 8 | n, big-endian |
//! | 16 + 32·n + r | 4 | r, big-endian |
//! | 20 + 32·n + r | 32 | BLAKE3 of all bytes before, derive-key context `atoll v1 manifest` |
//!
//! While it is written it lacks everything behind the hashes and is called
//! `manifest.SESSION`. Each addition says where it begins, so a repeated one changes
//! nothing and a lost one is noticed; no state is kept in memory between them, so a
//! publisher goes on after a restart of the node.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use atoll_key::{BlockHash, MAX_BLOCK_BYTES, SignedBlock};
use bytes::Bytes;

use crate::dir::{self, DirError};
use crate::volumes::{self, VolumeError};

const MAGIC: &[u8; 8] = b"ATMF\0\0\0\x01";
const HASH_BYTES: u64 = 32;
const TRAILER_BYTES: u64 = 8 + 4 + 32;

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
        self.add_io(offset, hashes).map_err(volumes::io_error(&self.path))?
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
        self.commit_io(count, root, target).map_err(volumes::io_error(&self.path))?
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
        let end = MAGIC.len() as u64 + count * HASH_BYTES;
        file.set_len(end)?;
        let mut writer = &file;
        writer.seek(SeekFrom::Start(end))?;
        writer.write_all(root.bytes())?;
        writer.write_all(&count.to_be_bytes())?;
        let root_bytes = u32::try_from(root.bytes().len()).expect("a block is short");
        writer.write_all(&root_bytes.to_be_bytes())?;
        let len_bytes = writer.stream_position()?;
        writer.seek(SeekFrom::Start(0))?;
        let sum = checksum(&file, len_bytes)?;
        file.write_all_at(&sum, len_bytes)?;
        file.sync_all()?;
        fs::rename(&self.path, target)?;
        dir::sync_parent(target)?;
        Ok(Ok(()))
    }

    /// Removes what was written.
    pub(crate) fn discard(&self) {
        let _ = fs::remove_file(&self.path);
    }

    /// Whole hashes in the file so far; 0 if it is shorter than its head.
    fn hashes_in(&self, file: &File) -> io::Result<u64> {
        Ok(file.metadata()?.len().saturating_sub(MAGIC.len() as u64) / HASH_BYTES)
    }

    /// Removes sessions of a volume's directory that nobody has continued for a day.
    pub(crate) fn clear_old(volume_dir: &Path) {
        let Ok(entries) = fs::read_dir(volume_dir) else { return };
        for entry in entries.flatten() {
            let age = entry.metadata().and_then(|meta| meta.modified()).map(|at| at.elapsed());
            let old = matches!(age, Ok(Ok(age)) if age > ABANDONED_AFTER);
            if old && volumes::is_partial(&entry.file_name()) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }
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
