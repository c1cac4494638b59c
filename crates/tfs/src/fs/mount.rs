//! Mounting and unmounting: the superblock, recovery, who wrote last.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, RwLock};

use atoll_env::Env;
use atoll_vfs::{Errno, FileKind};
use thiserror::Error;

use super::clean::Cleaned;
use super::held::HeldInodes;
use super::transparent::OpenMaps;
use super::{Core, Shared, Tfs};
use crate::device::Device;
use crate::ext2::{
    AllocationObserver, Ext2, Ext2Error, Records, RecordsError, VERIFY_STEP_BLOCKS, Verified,
    VerifyAt,
};
use crate::format::inode::POINTERS;
use crate::format::superblock::{
    RECORDS_INODE, ROOT_INODE, STATE_ERRORS, STATE_VALID, SUPERBLOCK_BYTES, SUPERBLOCK_OFFSET,
    Superblock, SuperblockError,
};
use crate::meta::{Journal, Meta};
use crate::mkfs::{RecordsOptions, establish_records};
use crate::progress::Progress;
use crate::records::header::{Geometry, HEADER_BYTES, Header};
use crate::records::layout::{HEADER_COPIES, RecordsLayout};

/// How to mount.
#[derive(Clone, Debug)]
pub struct MountOptions {
    /// Change nothing.
    pub read_only: bool,
    /// Let reads change no access times; otherwise they do as under Linux's `relatime`.
    pub no_access_times: bool,
    /// Memory for blocks of metadata, bytes.
    pub cache_bytes: usize,
    /// Commit, clean and choose avoided chunks from time to time; otherwise only when asked.
    pub background: bool,
    /// The observer of each allocation to ordinary files.
    pub observer: Option<AllocationObserver>,
}

impl Default for MountOptions {
    fn default() -> MountOptions {
        MountOptions {
            read_only: false,
            no_access_times: false,
            cache_bytes: 16 << 20,
            background: true,
            observer: None,
        }
    }
}

/// What a mount found.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct MountReport {
    /// It was not unmounted in order, and the journal made it whole.
    pub recovered: bool,
    /// Others have written since TFS did: the records were gone through, and each transparent
    /// file is compared with its tags when it is opened next.
    pub foreign: bool,
    /// The summary of a group was damaged: the records were gone through.
    pub damaged_summaries: bool,
    /// What going through the records put right, if that was done.
    pub verified: Option<Verified>,
    /// The records were made by this mount.
    pub established: bool,
}

/// Why a file system cannot be mounted.
#[derive(Debug, Error)]
pub enum MountError {
    /// Its superblock.
    #[error(transparent)]
    Superblock(#[from] SuperblockError),
    /// Other software left it without unmounting it, or found errors.
    #[error(
        "the file system was not unmounted in order by the software that used it last, or \
             has errors: run e2fsck on it first"
    )]
    NeedsCheck,
    /// TFS itself did not unmount it, and it is to be mounted read-only.
    #[error(
        "the file system was not unmounted in order: mount it once for writing, which makes \
             it whole"
    )]
    NeedsRecovery,
    /// Its records.
    #[error(transparent)]
    Records(#[from] RecordsError),
    /// The image has holes, and there is no room to fill those that every commit writes.
    #[error("the file system that holds the image has no room for the journal: {0}")]
    NoRoom(io::Error),
    /// The device failed.
    #[error("{0}")]
    Io(#[from] io::Error),
}

impl From<Ext2Error> for MountError {
    fn from(error: Ext2Error) -> MountError {
        MountError::Records(RecordsError::Disk(error))
    }
}

/// Reads the superblock of a device.
///
/// # Errors
/// [`MountError::Superblock`], [`MountError::Io`].
pub fn read_superblock(device: &dyn Device) -> Result<Superblock, MountError> {
    let mut bytes = [0; SUPERBLOCK_BYTES];
    if device.len_bytes() < SUPERBLOCK_OFFSET + SUPERBLOCK_BYTES as u64 {
        return Err(SuperblockError::NotExt2.into());
    }
    device.read_at(SUPERBLOCK_OFFSET, &mut bytes)?;
    Ok(Superblock::decode(&bytes, device.len_bytes())?)
}

/// The records' file of a file system: its pointers and header.
pub(crate) fn read_records(
    device: &Arc<dyn Device>,
    superblock: &Superblock,
) -> Result<(Header, [u32; POINTERS]), RecordsError> {
    let mut ext2 =
        Ext2::new(Meta::unjournaled(device.clone(), superblock, 16), superblock.clone(), None);
    let inode = ext2.inode(RECORDS_INODE)?;
    if inode.links == 0 || inode.size_bytes == 0 {
        return Err(RecordsError::None);
    }
    if inode.kind() != Ok(FileKind::Regular) {
        return Err(RecordsError::Damaged("their inode is no regular file".to_owned()));
    }
    let mut copies = [vec![0; HEADER_BYTES], vec![0; HEADER_BYTES]];
    for (copy, bytes) in (0..HEADER_COPIES).zip(&mut copies) {
        let block = ext2.block_of(&inode, copy)?;
        if block != 0 {
            bytes.copy_from_slice(&ext2.meta.read(block)?[..HEADER_BYTES]);
        }
    }
    let header = Header::newest([&copies[0], &copies[1]], superblock)?;
    let layout = RecordsLayout::new(superblock, header.journal_blocks)
        .ok_or_else(|| RecordsError::Damaged("impossible journal".to_owned()))?;
    let wanted = u64::from(layout.blocks()) * u64::from(superblock.block_bytes());
    if inode.size_bytes != wanted {
        let size = inode.size_bytes;
        return Err(RecordsError::Damaged(format!("{size} bytes where {wanted} are needed")));
    }
    Ok((header, inode.pointers))
}

fn journal_of(
    device: &Arc<dyn Device>,
    superblock: &Superblock,
    records: &mut Records,
) -> Result<Journal, RecordsError> {
    let mut meta = Meta::unjournaled(device.clone(), superblock, 16);
    let layout = *records.layout();
    let mut area = |number| {
        let first = layout.journal_area(number);
        (first..first + layout.journal_blocks())
            .map(|block| records.disk_block(&mut meta, block))
            .collect::<Result<Vec<u32>, Ext2Error>>()
    };
    let areas = [area(0)?, area(1)?];
    let block_bytes = superblock.block_bytes() as usize;
    Ok(Journal::new(device.clone(), block_bytes, superblock.blocks(), areas))
}

/// The records of a file system that is to be mounted; made, if it has none and may be
/// changed.
fn find_or_make_records(
    env: &Env,
    device: &Arc<dyn Device>,
    superblock: &mut Superblock,
    options: &MountOptions,
    report: &mut MountReport,
) -> Result<(Header, [u32; POINTERS]), MountError> {
    match read_records(device, superblock) {
        Err(RecordsError::None) if !options.read_only => {}
        found => return Ok(found?),
    }
    if superblock.state() != STATE_VALID {
        return Err(MountError::NeedsCheck);
    }
    let wanted = RecordsOptions {
        tag_key: std::array::from_fn(|_| env.random_u64() as u8),
        is_blank: false,
        now_unix_secs: (env.unix_ms() / 1000) as u32,
        progress: Progress::default(),
    };
    establish_records(device, superblock.clone(), &wanted)?;
    *superblock = read_superblock(&**device)?;
    report.established = true;
    Ok(read_records(device, superblock)?)
}

/// The last writer: TFS, which unmounted; TFS, which did not (the journal then makes it whole); or
/// another program.
fn settle(
    device: &Arc<dyn Device>,
    journal: &Journal,
    header: &mut Header,
    superblock: &mut Superblock,
    options: &MountOptions,
    report: &mut MountReport,
) -> Result<(), MountError> {
    if !header.recognises(superblock) {
        report.foreign = true;
        if superblock.state() & STATE_VALID == 0 {
            return Err(MountError::NeedsCheck);
        }
        // The journal is void, and what was TFS's is to be looked at before it is trusted.
        header.settled = journal.newest_number(header.settled)?;
    } else if header.mounted {
        if options.read_only {
            return Err(MountError::NeedsRecovery);
        }
        header.settled = journal.recover(header.settled)?;
        report.recovered = true;
        // Blocks may have been written whose tags were not, and the other way round.
        header.epoch = header.epoch.wrapping_add(1).max(1);
        *superblock = read_superblock(&**device)?;
        if Geometry::of(superblock) != header.geometry {
            let text = "their journal changes the size of the file system";
            return Err(RecordsError::Damaged(text.to_owned()).into());
        }
    }
    if superblock.state() & STATE_ERRORS != 0 {
        return Err(MountError::NeedsCheck);
    }
    header.geometry = Geometry::of(superblock);
    Ok(())
}

impl Tfs {
    /// Mounts the file system of `device`, which this process holds alone.
    ///
    /// # Errors
    /// [`MountError`]; nothing was changed then, but what recovery brought home.
    pub fn mount(
        env: Env,
        device: Arc<dyn Device>,
        options: &MountOptions,
    ) -> Result<(Tfs, MountReport), MountError> {
        let mut report = MountReport::default();
        let mut superblock = read_superblock(&*device)?;
        let (mut header, pointers) =
            find_or_make_records(&env, &device, &mut superblock, options, &mut report)?;
        let mut records = Records::new(&superblock, header.clone(), pointers)?;
        let journal = journal_of(&device, &superblock, &mut records)?;
        settle(&device, &journal, &mut header, &mut superblock, options, &mut report)?;
        let cached_blocks = options.cache_bytes / superblock.block_bytes() as usize;
        let meta = Meta::new(
            device.clone(),
            superblock.blocks(),
            &journal,
            cached_blocks.max(64),
            header.settled,
        );
        *records.header_mut() = header;
        if report.foreign {
            records.distrust();
        }
        let (groups, block_bytes) = (superblock.groups(), superblock.block_bytes());
        let mut ext2 = Ext2::new(meta, superblock, Some(records));
        ext2.observe_allocations(options.observer.clone());
        if ext2.inode(ROOT_INODE)?.kind() != Ok(FileKind::Directory) {
            return Err(Ext2Error::Damaged("the root is no directory".to_owned()).into());
        }
        let (records, meta) = ext2.records_and_meta().expect("they were given above");
        report.damaged_summaries = !records.add_up(meta, groups)?;
        records.header_mut().unverified |= report.damaged_summaries;
        let unverified = records.header().unverified;
        let chosen_at = env.now();
        let core = Core {
            ext2,
            held: HeldInodes::default(),
            maps: OpenMaps::default(),
            last_cleaned: Cleaned::default(),
            chosen_at,
        };
        let shared = Arc::new(Shared {
            env,
            device,
            journal,
            commit_barrier: RwLock::new(()),
            reserved_blocks: AtomicUsize::new(0),
            core: Mutex::new(core),
            committing: Mutex::new(()),
            commits_begun: AtomicU64::new(0),
            failed: OnceLock::new(),
            ended: AtomicBool::new(false),
            commit_due: Arc::default(),
            upkeep: OnceLock::new(),
            read_only: options.read_only,
            keeps_access_times: !options.read_only && !options.no_access_times,
            block_bytes,
        });
        if !options.read_only {
            shared.reserve()?;
            shared.sign_in_or_out(true)?;
            if unverified {
                report.verified = Some(shared.verify_records()?);
            }
            shared.end_orphans().map_err(|_| MountError::NeedsCheck)?;
            if options.background {
                shared.start_upkeep();
            }
        }
        Ok((Tfs { shared }, report))
    }

    /// Ends the mount: everything is at home, and the file system is marked as unmounted.
    /// Calls that change something fail from then on.
    ///
    /// # Errors
    /// `EIO` if the device failed; the next mount recovers.
    pub fn unmount(&self) -> Result<(), Errno> {
        let shared = &self.shared;
        if let Some(task) = shared.upkeep.get() {
            task.abort();
        }
        // From here no file without a name gets new blocks while it is given back.
        if shared.read_only || shared.ended.swap(true, Ordering::SeqCst) {
            return if shared.failed.get().is_some() { Err(Errno::EIO) } else { Ok(()) };
        }
        // Calls that had joined the transaction before are over once it was committed.
        shared.commit()?;
        shared.end_orphans()?;
        shared.commit()?;
        shared.sign_in_or_out(false).map_err(|error| shared.fail(&error))
    }
}

impl Shared {
    /// Marks the superblock as mounted or as unmounted, and the header with the marks before
    /// and after, so that a crash between the two is not taken for a stranger's work. No
    /// call is under way, and everything is at home.
    fn sign_in_or_out(&self, mounted: bool) -> Result<(), MountError> {
        self.device.sync()?;
        let now = (self.env.unix_ms() / 1000) as u32;
        let mut core = self.core();
        let mut superblock = core.ext2.superblock().clone();
        let before = superblock.mark();
        // A program that writes after TFS leaves another mark, within the same second too, and even
        // if it takes the time from the kernel's last tick, which may be in the second before.
        superblock.set_write_time(now.saturating_sub(2));
        if mounted {
            superblock.set_mount_time(now);
            superblock.set_mount_count(superblock.mount_count().saturating_add(1));
            superblock.set_state(superblock.state() & !STATE_VALID);
        } else {
            core.note_time(self.env.now());
            superblock.set_state(superblock.state() | STATE_VALID);
        }
        let last_number = core.ext2.meta.last_number();
        let (records, _) = core.ext2.records_and_meta().expect("a mount has records");
        let header = records.header_mut();
        header.mounted = mounted;
        header.mark_before = before;
        header.mark_after = superblock.mark();
        header.settled = last_number;
        self.write_header(&mut core)?;
        self.device.sync()?;
        // In memory it belongs to the next transaction, which the mark on the disk precedes.
        core.ext2.change_superblock(|current| *current = superblock)?;
        core.ext2.meta.flush().map_err(Ext2Error::from)?;
        self.device.sync()?;
        Ok(())
    }

    /// Makes sure that no commit is refused for want of room under an image with holes: the
    /// journal and the header have theirs. Blocks that go home later stand in the journal already.
    fn reserve(&self) -> Result<(), MountError> {
        self.journal.reserve().map_err(MountError::NoRoom)?;
        let mut core = self.core();
        let Some((records, meta)) = core.ext2.records_and_meta() else { return Ok(()) };
        for copy in 0..HEADER_COPIES {
            let block = records.disk_block(meta, copy)?;
            let block_bytes = u64::from(self.block_bytes);
            let at = u64::from(block) * block_bytes;
            self.device.reserve(at, block_bytes).map_err(MountError::NoRoom)?;
        }
        Ok(())
    }

    /// Writes the header as it is in memory, over the older copy. It is within one sector, so
    /// that a crash leaves a whole copy at all times.
    pub(super) fn write_header(&self, core: &mut Core) -> Result<(), MountError> {
        let Some((records, meta)) = core.ext2.records_and_meta() else { return Ok(()) };
        let bytes = records.next_header();
        let copy = (records.header().seq % u64::from(HEADER_COPIES)) as u32;
        let block = records.disk_block(meta, copy)?;
        self.device.write_at(u64::from(block) * bytes.len() as u64, &bytes)?;
        Ok(())
    }

    /// Goes through the records, because others may have changed what they speak of.
    fn verify_records(&self) -> Result<Verified, MountError> {
        let groups = self.core().ext2.superblock().groups();
        let mut verified = Verified::default();
        let io = |errno: Errno| io::Error::from_raw_os_error(errno.0);
        for group in 0..groups {
            let mut at = VerifyAt::start();
            while !at.is_done() {
                let _handle = self.join_transaction(VERIFY_STEP_BLOCKS).map_err(io)?;
                self.core().ext2.verify_maps(group, &mut at, &mut verified)?;
            }
        }
        for group in 0..groups {
            let _handle = self.join_transaction(VERIFY_STEP_BLOCKS).map_err(io)?;
            self.core().ext2.verify_blocks(group, &mut verified)?;
        }
        self.commit().map_err(io)?;
        let mut core = self.core();
        if let Some((records, _)) = core.ext2.records_and_meta() {
            records.header_mut().unverified = false;
        }
        self.write_header(&mut core)?;
        Ok(verified)
    }
}
