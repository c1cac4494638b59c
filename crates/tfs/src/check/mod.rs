//! Checks a file system that is not mounted: ext2's structure as far as TFS relies on it, and the
//! records of transparent files against it.
//!
//! It finds what e2fsck would call damage in what TFS uses (not in copies of the superblock, or in
//! the index of a directory), says each thing in a line, and leaves ext2 to e2fsck; the
//! records, which no other program knows, it repairs. They are redundant: bitmaps and counts follow
//! from the maps of the files, and a map that cannot be true is given up, which loses one
//! transparent file, as any ordinary write may.
//!
//! Passes, in this order: descriptors; inodes and their blocks ([`inodes`]); names, circles
//! and links ([`names`]); ext2's bitmaps and counts ([`bitmaps`]); records ([`records`]).
//! Memory: two bits for each block, some fifty bytes for each inode in use.
//!
//! It knows nothing of mounting: a file system whose journal must be brought home first is
//! refused.

mod bitmaps;
mod inodes;
mod names;
mod records;

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use atoll_vfs::FileKind;
use thiserror::Error;

use crate::bitmap;
use crate::device::Device;
use crate::ext2::{Ext2, Ext2Error, RecordsError};
use crate::format::group::GroupDescriptor;
use crate::format::superblock::{STATE_ERRORS, STATE_VALID, Superblock, SuperblockError};
use crate::fs::{MountError, read_superblock};
use crate::meta::{Meta, MetaError};
use crate::progress::Progress;

/// The most findings that are listed; the others are counted.
pub const MAX_FINDINGS: usize = 200;
/// Blocks of metadata in memory.
const CACHED_BLOCKS: usize = 4096;

/// So many inodes' maps count for one part of the work: they take a block, or four small ones.
const MAPS_A_PART: u32 = 128;

/// How to check.
#[derive(Clone, Debug, Default)]
pub struct CheckOptions {
    /// Repair the records where ext2 is sound.
    pub repair: bool,
    /// Also read all transparent data and compare it with its tags.
    pub compare_tags: bool,
    /// A new key of tags, random, for records that must be made anew.
    pub random: [u8; 32],
    /// Now, seconds since 1970.
    pub now_unix_secs: u32,
    /// Is told how far it has come.
    pub progress: Progress,
}

/// What a finding is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Damaged {
    /// ext2 itself: a matter for e2fsck.
    Ext2,
    /// TFS's records.
    Records,
}

/// Something that cannot be true.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// What it is about.
    pub damaged: Damaged,
    /// What was found, in a line.
    pub text: String,
    /// Whether it was put right.
    pub repaired: bool,
}

/// What a check found.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CheckReport {
    /// In the order of the passes, at most [`MAX_FINDINGS`].
    pub findings: Vec<Finding>,
    /// Findings beyond those.
    pub unlisted: u64,
    /// Files of all kinds but directories.
    pub files: u64,
    /// Directories.
    pub directories: u64,
    /// Transparent files among the files.
    pub transparent_files: u64,
    /// Those of them that have lost a block, or all: gone when they are opened next.
    pub lost_files: u64,
    /// Blocks in use, transparent ones not counted.
    pub used_blocks: u64,
    /// Whether there are records.
    pub has_records: bool,
    /// Whether other software has written since TFS did; the next mount takes account of it.
    pub foreign: bool,
}

impl CheckReport {
    /// Whether nothing was found.
    pub fn is_clean(&self) -> bool {
        self.findings.is_empty()
    }

    /// Whether ext2 is damaged: e2fsck can repair it.
    pub fn needs_e2fsck(&self) -> bool {
        self.findings.iter().any(|finding| finding.damaged == Damaged::Ext2)
    }

    /// Whether nothing that was found is left.
    pub fn is_sound(&self) -> bool {
        self.findings.iter().all(|finding| finding.repaired)
    }

    fn note(&mut self, damaged: Damaged, text: String) {
        if self.findings.len() < MAX_FINDINGS {
            self.findings.push(Finding { damaged, text, repaired: false });
        } else {
            self.unlisted += 1;
        }
    }
}

/// Why a file system cannot be checked.
#[derive(Debug, Error)]
pub enum CheckError {
    /// Its superblock cannot be used.
    #[error(transparent)]
    Superblock(SuperblockError),
    /// TFS itself did not unmount it.
    #[error(
        "the file system was not unmounted in order: mount it once for writing, which makes it \
         whole, then check it"
    )]
    NeedsRecovery,
    /// The device failed.
    #[error("{0}")]
    Io(io::Error),
}

impl From<MountError> for CheckError {
    fn from(error: MountError) -> CheckError {
        match error {
            MountError::Superblock(error) => CheckError::Superblock(error),
            MountError::Io(error) => CheckError::Io(error),
            other => CheckError::Io(io::Error::other(other.to_string())),
        }
    }
}

/// The device's own failures end a check; what cannot be true is a finding.
fn device_failure(error: Ext2Error) -> Result<String, CheckError> {
    match error {
        Ext2Error::Meta(MetaError::Read { error, .. } | MetaError::Write(error)) => {
            Err(CheckError::Io(error))
        }
        Ext2Error::Damaged(text) => Ok(text),
        other => Ok(other.to_string()),
    }
}

/// An inode in use.
#[derive(Clone, Debug)]
struct Known {
    /// None: of no kind.
    kind: Option<FileKind>,
    /// As the inode says.
    links: u16,
    /// As directories say, `.` and `..` among them.
    names: u32,
    generation: u32,
    /// A transparent file, or a directory whose new files are.
    transparent: bool,
    /// The directory that names it, 0: none yet.
    parent: u32,
    /// Of a directory: what its `..` says.
    up: u32,
}

/// A check under way.
struct Checker {
    device: Arc<dyn Device>,
    ext2: Ext2,
    superblock: Superblock,
    descriptors: Vec<GroupDescriptor>,
    report: CheckReport,
    /// Blocks that are metadata, or of ordinary files.
    used: Vec<u8>,
    known: BTreeMap<u32, Known>,
    /// Blocks of attributes: files that name them, files that the block says there are.
    xattr_blocks: BTreeMap<u32, (u32, u32)>,
    progress: Progress,
}

/// Checks the file system of `device`, which this process holds alone.
///
/// # Errors
/// [`CheckError`].
pub fn check(device: &Arc<dyn Device>, options: &CheckOptions) -> Result<CheckReport, CheckError> {
    let superblock = read_superblock(&**device)?;
    let found = records::find(device, &superblock);
    if found.as_ref().is_ok_and(|(header, _)| header.mounted && header.recognises(&superblock)) {
        return Err(CheckError::NeedsRecovery);
    }
    let mut checker = Checker::new(device.clone(), superblock, options.progress.clone());
    checker.check_state();
    if checker.read_descriptors()? {
        checker.expect_passes();
        checker.check_inodes()?;
        checker.check_names()?;
        checker.check_bitmaps()?;
        checker.check_records(found, options)?;
    }
    Ok(checker.report)
}

impl Checker {
    fn new(device: Arc<dyn Device>, superblock: Superblock, progress: Progress) -> Checker {
        let meta = Meta::unjournaled(device.clone(), &superblock, CACHED_BLOCKS);
        Checker {
            device,
            ext2: Ext2::new(meta, superblock.clone(), None),
            descriptors: Vec::new(),
            report: CheckReport::default(),
            used: vec![0; superblock.blocks().div_ceil(8) as usize],
            known: BTreeMap::new(),
            xattr_blocks: BTreeMap::new(),
            superblock,
            progress,
        }
    }

    /// Says how much there is to do, of records too, which may not be there: for each group its
    /// inodes, its bitmaps and its records, and the maps of all inodes.
    fn expect_passes(&self) {
        let each = u64::from(self.superblock.inode_table_blocks()) + 2;
        let maps = u64::from(self.superblock.inodes().div_ceil(MAPS_A_PART));
        self.progress.expect(each * u64::from(self.superblock.groups()) + maps);
    }

    /// Notes damage of ext2.
    fn found(&mut self, text: impl Into<String>) {
        self.report.note(Damaged::Ext2, text.into());
    }

    /// Makes what cannot be true a finding.
    fn noted<T>(&mut self, result: Result<T, Ext2Error>) -> Result<Option<T>, CheckError> {
        match result {
            Ok(value) => Ok(Some(value)),
            Err(error) => {
                let text = device_failure(error)?;
                self.found(text);
                Ok(None)
            }
        }
    }

    fn check_state(&mut self) {
        let state = self.superblock.state();
        if state & STATE_VALID == 0 {
            self.found("the file system was not unmounted in order");
        }
        if state & STATE_ERRORS != 0 {
            self.found("other software has found errors in the file system");
        }
        if self.superblock.last_orphan() != 0 {
            let orphan = self.superblock.last_orphan();
            self.found(format!("inode {orphan} heads a list of orphans that were not ended"));
        }
    }

    /// Reads all descriptors and marks what they name; false if one cannot be true, and the
    /// rest cannot be checked.
    fn read_descriptors(&mut self) -> Result<bool, CheckError> {
        let mut sound = true;
        for group in 0..self.superblock.groups() {
            let descriptor = self.ext2.descriptor(group);
            let Some(descriptor) = self.noted(descriptor)? else {
                sound = false;
                continue;
            };
            for (start, len) in descriptor.own_runs(&self.superblock, group) {
                bitmap::put(&mut self.used, start as usize..(start + len) as usize, true);
            }
            self.descriptors.push(descriptor);
        }
        Ok(sound)
    }
}

impl From<RecordsError> for CheckError {
    fn from(error: RecordsError) -> CheckError {
        CheckError::Io(io::Error::other(error.to_string()))
    }
}
