//! Makes a file system: ext2 revision 1 as `mke2fs -t ext2` lays it out, and the room for
//! TFS's records.
//!
//! Each group holds, in this order: copies of the superblock and the descriptors (some
//! groups), block bitmap, inode bitmap, inode table, its part of the records. No blocks are
//! kept for growing (`resize_inode`); such file systems are accepted.
//!
//! A file system made elsewhere is given its records by [`establish_records`]. Until that is
//! done its superblock says that it was not unmounted, so that after a crash in the middle
//! e2fsck finds the blocks that were taken.

use std::io;
use std::sync::Arc;

use thiserror::Error;

use crate::device::Device;
use crate::ext2::{Ext2, Ext2Error, Goal, Records, RecordsError, Run};
use crate::format::DESCRIPTOR_BYTES;
use crate::format::features::{Features, RESIZE_INODE};
use crate::format::group::GroupDescriptor;
use crate::format::inode::{Inode, kind_bits};
use crate::format::superblock::{
    OLD_FIRST_INODE, RECORDS_INODE, ROOT_INODE, STATE_VALID, SUPERBLOCK_OFFSET, Superblock,
};
use crate::format::{put_u16, put_u32};
use crate::meta::Meta;
use crate::progress::Progress;
use crate::records::header::{Geometry, Header};
use crate::records::layout::{HEADER_COPIES, RecordsLayout};
use atoll_vfs::{FileKind, FileTime};

/// What to make.
#[derive(Clone, Debug)]
pub struct MkfsOptions {
    /// Size of a block, bytes: 1024, 2048 or 4096.
    pub block_bytes: u32,
    /// One inode for so many bytes.
    pub bytes_per_inode: u32,
    /// Share of the blocks kept for the administrator, percent.
    pub reserved_percent: u32,
    /// The volume's name, at most 16 bytes.
    pub label: String,
    /// Its UUID.
    pub uuid: [u8; 16],
    /// The key of tags and the seed of directory hashes: 48 random bytes.
    pub random: [u8; 48],
    /// Now, seconds since 1970.
    pub now_unix_secs: u32,
    /// Owner of the root directory.
    pub root_owner: (u32, u32),
    /// Everything on the device reads as zeros (a new image).
    pub is_blank: bool,
    /// Is told how far it has come.
    pub progress: Progress,
}

#[cfg(test)]
impl MkfsOptions {
    /// A file system that is the same each time, with small blocks and no reserve.
    pub(crate) fn for_tests() -> MkfsOptions {
        MkfsOptions {
            block_bytes: 1024,
            bytes_per_inode: 8192,
            reserved_percent: 0,
            label: String::new(),
            uuid: [7; 16],
            random: [9; 48],
            now_unix_secs: 1,
            root_owner: (0, 0),
            is_blank: true,
            progress: Progress::default(),
        }
    }
}

/// Why no file system could be made.
#[derive(Debug, Error)]
pub enum MkfsError {
    /// An option is out of bounds.
    #[error("{0}")]
    Options(String),
    /// The device is too small, or too large for 32-bit block numbers.
    #[error("{0}")]
    Size(String),
    /// No room for the records.
    #[error("no room for the records of transparent files: {0}")]
    Records(#[from] RecordsError),
    /// The device failed.
    #[error("{0}")]
    Io(#[from] io::Error),
}

impl From<Ext2Error> for MkfsError {
    fn from(error: Ext2Error) -> MkfsError {
        MkfsError::Records(RecordsError::Disk(error))
    }
}

/// Blocks a last group must have beyond its own metadata (as mke2fs).
const LEAST_DATA_BLOCKS: u32 = 50;
/// Blocks of memory for making a file system.
const CACHED_BLOCKS: usize = 1024;
/// Blocks of `lost+found` (as mke2fs: 16 KiB, so that e2fsck needs to allocate none).
const LOST_AND_FOUND_BYTES: u32 = 16 * 1024;

/// The superblock that `options` ask for on a device of this length.
///
/// # Errors
/// [`MkfsError::Options`], [`MkfsError::Size`].
pub fn plan(options: &MkfsOptions, device_len_bytes: u64) -> Result<Superblock, MkfsError> {
    let options_error = |text: &str| Err(MkfsError::Options(text.to_owned()));
    let log = match options.block_bytes {
        1024 => 0,
        2048 => 1,
        4096 => 2,
        _ => return options_error("the block size is 1024, 2048 or 4096 bytes"),
    };
    if options.bytes_per_inode < options.block_bytes || options.bytes_per_inode > 64 << 20 {
        return options_error("one inode for at least one block and at most 64 MiB");
    }
    if options.reserved_percent > 50 {
        return options_error("at most 50 % of the blocks can be reserved");
    }
    if options.label.len() > 16 || options.label.contains('\0') {
        return options_error("a label has at most 16 bytes and no NUL");
    }
    let blocks = device_len_bytes / u64::from(options.block_bytes);
    let Ok(mut blocks) = u32::try_from(blocks) else {
        let most = (u64::from(u32::MAX) * u64::from(options.block_bytes)) >> 30;
        return Err(MkfsError::Size(format!(
            "ext2 can have at most {most} GiB with this block size"
        )));
    };
    loop {
        if blocks < 8 + LEAST_DATA_BLOCKS {
            return Err(MkfsError::Size(format!(
                "{device_len_bytes} bytes are too few for a file system"
            )));
        }
        let superblock = geometry(options, blocks, log);
        let last = superblock.groups() - 1;
        let overhead = group_overhead(&superblock, last) + records_blocks(&superblock);
        let own = superblock.blocks_of_group(last);
        if own >= overhead + LEAST_DATA_BLOCKS {
            return Ok(superblock);
        }
        if last == 0 {
            return Err(MkfsError::Size(format!(
                "{device_len_bytes} bytes are too few for a file system with transparent files"
            )));
        }
        blocks -= own;
    }
}

/// The records' blocks that a single group must have room for.
fn records_blocks(superblock: &Superblock) -> u32 {
    let layout = new_layout(superblock).expect("within bounds by construction");
    if superblock.groups() == 1 { layout.blocks() + 16 } else { layout.region_blocks() + 16 }
}

fn geometry(options: &MkfsOptions, blocks: u32, log: u32) -> Superblock {
    let mut superblock = Superblock::blank();
    let block_bytes = options.block_bytes;
    let first = u32::from(log == 0);
    superblock.set_log_block_size(log);
    superblock.set_log_fragment_size(log);
    superblock.set_first_data_block(first);
    superblock.set_blocks(blocks);
    superblock.set_blocks_per_group(8 * block_bytes);
    superblock.set_fragments_per_group(8 * block_bytes);
    superblock.set_reserved_blocks(
        (u64::from(blocks) * u64::from(options.reserved_percent) / 100) as u32,
    );
    let groups = superblock.groups();
    let wanted = u64::from(blocks) * u64::from(block_bytes) / u64::from(options.bytes_per_inode);
    // Whole blocks of inodes, whole bytes of bitmap.
    let step = (block_bytes / 256).max(8);
    let each = (wanted.div_ceil(u64::from(groups)) as u32).max(16);
    let inodes_per_group = each.next_multiple_of(step).min(8 * block_bytes);
    superblock.set_inodes_per_group(inodes_per_group);
    superblock.set_inodes(inodes_per_group * groups);
    superblock.set_inode_size_field(256);
    superblock.set_first_inode_field(OLD_FIRST_INODE);
    superblock.set_min_extra_inode_bytes(32);
    superblock.set_want_extra_inode_bytes(32);
    let made = Features::MADE_BY_MKFS;
    superblock.set_features(Features { compatible: made.compatible & !RESIZE_INODE, ..made });
    superblock.set_uuid(options.uuid);
    superblock.set_label(options.label.as_bytes());
    let seed = options.random[32..].try_into().expect("sixteen bytes");
    superblock.set_directory_hash(seed, 1);
    superblock.set_flags(if cfg!(target_arch = "x86_64") { 1 } else { 2 });
    superblock.set_default_mount_options(0xc);
    superblock.set_made_time(options.now_unix_secs);
    superblock.set_write_time(options.now_unix_secs);
    superblock.set_last_check(options.now_unix_secs);
    superblock.set_max_mount_count(u16::MAX);
    superblock.set_state(STATE_VALID);
    superblock.set_errors(1);
    superblock
}

/// Blocks of a group's own metadata.
fn group_overhead(superblock: &Superblock, group: u32) -> u32 {
    superblock.copy_blocks_of_group(group) + 2 + superblock.inode_table_blocks()
}

/// Makes the file system and its records.
///
/// # Errors
/// [`MkfsError`]; the device then holds nothing usable.
pub fn mkfs(device: &Arc<dyn Device>, options: &MkfsOptions) -> Result<(), MkfsError> {
    let superblock = plan(options, device.len_bytes())?;
    let records_parts = records_parts(&superblock)?;
    let groups = u64::from(superblock.groups());
    options.progress.expect(groups * group_parts(&superblock, options.is_blank) + records_parts);
    let made = Maker { device: &**device, superblock, options }.write()?;
    let records = RecordsOptions {
        tag_key: options.random[..32].try_into().expect("thirty-two bytes"),
        is_blank: options.is_blank,
        now_unix_secs: options.now_unix_secs,
        progress: options.progress.clone(),
    };
    establish_records(device, made, &records)?;
    Ok(())
}

/// What a group counts for: its bitmaps, and its inodes unless they read as zeros.
fn group_parts(superblock: &Superblock, is_blank: bool) -> u64 {
    2 + if is_blank { 0 } else { u64::from(superblock.inode_table_blocks()) }
}

struct Maker<'a> {
    device: &'a dyn Device,
    superblock: Superblock,
    options: &'a MkfsOptions,
}

impl Maker<'_> {
    fn write_block(&self, block: u32, bytes: &[u8]) -> io::Result<()> {
        self.device.write_at(u64::from(block) * u64::from(self.superblock.block_bytes()), bytes)
    }

    fn zero(&self, block: u32, count: u32) -> io::Result<()> {
        if self.options.is_blank {
            return Ok(());
        }
        zero(self.device, self.superblock.block_bytes(), Run { start: block, len: count })
    }

    /// Everything but the records.
    fn write(mut self) -> Result<Superblock, MkfsError> {
        let block_bytes = self.superblock.block_bytes() as usize;
        let groups = self.superblock.groups();
        let root_blocks = 1;
        // Direct blocks only.
        let lost_blocks = (LOST_AND_FOUND_BYTES / block_bytes as u32).clamp(1, 12);
        let mut free_blocks = 0;
        let mut free_inodes = 0;
        let mut table = vec![0; self.superblock.descriptor_blocks() as usize * block_bytes];
        for group in 0..groups {
            let first = self.superblock.first_block_of_group(group);
            let overhead = group_overhead(&self.superblock, group);
            let bitmap_block = first + overhead - 2 - self.superblock.inode_table_blocks();
            let data = if group == 0 { root_blocks + lost_blocks } else { 0 };
            let (used_inodes, directories) = if group == 0 { (OLD_FIRST_INODE, 2) } else { (0, 0) };
            let own = self.superblock.blocks_of_group(group);
            let descriptor = GroupDescriptor {
                block_bitmap: bitmap_block,
                inode_bitmap: bitmap_block + 1,
                inode_table: bitmap_block + 2,
                free_blocks: (own - overhead - data) as u16,
                free_inodes: (self.superblock.inodes_per_group() - used_inodes) as u16,
                directories,
            };
            descriptor.encode(&mut table[group as usize * DESCRIPTOR_BYTES..]);
            free_blocks += u32::from(descriptor.free_blocks);
            free_inodes += u32::from(descriptor.free_inodes);
            let mut bits = vec![0; block_bytes];
            crate::bitmap::put(&mut bits, 0..(overhead + data) as usize, true);
            crate::bitmap::put(&mut bits, own as usize..8 * block_bytes, true);
            self.write_block(descriptor.block_bitmap, &bits)?;
            bits.fill(0);
            crate::bitmap::put(&mut bits, 0..used_inodes as usize, true);
            let inodes = self.superblock.inodes_per_group() as usize;
            crate::bitmap::put(&mut bits, inodes..8 * block_bytes, true);
            self.write_block(descriptor.inode_bitmap, &bits)?;
            self.zero(descriptor.inode_table, self.superblock.inode_table_blocks())?;
            self.options.progress.done(group_parts(&self.superblock, self.options.is_blank));
        }
        self.superblock.set_free_blocks(free_blocks);
        self.superblock.set_free_inodes(free_inodes);
        let first_data = self.superblock.first_data_block() + group_overhead(&self.superblock, 0);
        self.write_directories(first_data, lost_blocks)?;
        for group in (0..groups).rev().filter(|group| self.superblock.group_has_copy(*group)) {
            let first = self.superblock.first_block_of_group(group);
            self.write_block(first + 1, &table)?;
            let mut copy = self.superblock.clone();
            copy.set_group_of_copy(group as u16);
            // The first block of the disk belongs to the boot loader.
            let at = u64::from(first) * block_bytes as u64;
            let at = if group == 0 { SUPERBLOCK_OFFSET } else { at };
            self.device.write_at(at, copy.bytes())?;
        }
        self.device.sync()?;
        Ok(self.superblock)
    }

    fn write_directories(&self, first_data: u32, lost_blocks: u32) -> Result<(), MkfsError> {
        let block_bytes = self.superblock.block_bytes();
        let now = FileTime { secs: i64::from(self.options.now_unix_secs), nanos: 0 };
        let directory = |mode: u16, links, block: u32, count: u32| {
            let mut inode = Inode {
                mode: kind_bits(FileKind::Directory) | mode,
                links,
                size_bytes: u64::from(count * block_bytes),
                blocks_512: count * (block_bytes / 512),
                atime: now,
                ctime: now,
                mtime: now,
                crtime: now,
                ..Inode::blank()
            };
            (0..count).for_each(|i| inode.pointers[i as usize] = block + i);
            inode
        };
        let mut root = directory(0o755, 3, first_data, 1);
        (root.uid, root.gid) = self.options.root_owner;
        let lost = directory(0o700, 2, first_data + 1, lost_blocks);
        let table = self.superblock.first_data_block() + group_overhead(&self.superblock, 0)
            - self.superblock.inode_table_blocks();
        for (number, inode) in [(ROOT_INODE, &root), (OLD_FIRST_INODE, &lost)] {
            let mut bytes = [0; 256];
            Inode::clear(&mut bytes, 32);
            inode.encode(&mut bytes);
            let at = u64::from(table) * u64::from(block_bytes) + u64::from(number - 1) * 256;
            self.device.write_at(at, &bytes)?;
        }
        let mut block = vec![0; block_bytes as usize];
        let at = put_entry(&mut block, 0, ROOT_INODE, b".", 12);
        let at = put_entry(&mut block, at, ROOT_INODE, b"..", 12);
        put_entry(&mut block, at, OLD_FIRST_INODE, b"lost+found", block_bytes as usize - at);
        self.write_block(first_data, &block)?;
        for i in 0..lost_blocks {
            block.fill(0);
            if i == 0 {
                let at = put_entry(&mut block, 0, OLD_FIRST_INODE, b".", 12);
                put_entry(&mut block, at, ROOT_INODE, b"..", block_bytes as usize - at);
            } else {
                put_u16(&mut block, 4, block_bytes as u16);
            }
            self.write_block(first_data + 1 + i, &block)?;
        }
        Ok(())
    }
}

/// Writes a directory's entry for a directory and returns where the next begins.
fn put_entry(block: &mut [u8], at: usize, inode: u32, name: &[u8], len: usize) -> usize {
    put_u32(block, at, inode);
    put_u16(block, at + 4, len as u16);
    block[at + 6] = name.len() as u8;
    block[at + 7] = 2;
    block[at + 8..at + 8 + name.len()].copy_from_slice(name);
    at + len
}

fn zero(device: &dyn Device, block_bytes: u32, run: Run) -> io::Result<()> {
    const MOST_BLOCKS: u32 = 256;
    let zeros = vec![0; (MOST_BLOCKS.min(run.len) * block_bytes) as usize];
    let mut done = 0;
    while done < run.len {
        let count = MOST_BLOCKS.min(run.len - done);
        let at = u64::from(run.start + done) * u64::from(block_bytes);
        device.write_at(at, &zeros[..(count * block_bytes) as usize])?;
        done += count;
    }
    Ok(())
}

/// What the records need beside the file system.
#[derive(Clone, Debug)]
pub struct RecordsOptions {
    /// The key of tags, random.
    pub tag_key: [u8; 32],
    /// Everything that is free on the device reads as zeros.
    pub is_blank: bool,
    /// Now, seconds since 1970.
    pub now_unix_secs: u32,
    /// Is told how far it has come; its total is [`records_parts`].
    pub progress: Progress,
}

/// How records are laid out that are made anew.
fn new_layout(superblock: &Superblock) -> Result<RecordsLayout, RecordsError> {
    RecordsLayout::new(superblock, RecordsLayout::journal_blocks_for(superblock))
        .ok_or_else(|| RecordsError::Damaged("impossible journal".to_owned()))
}

/// The parts of work that making the records is.
///
/// # Errors
/// [`RecordsError::Damaged`]: there are none for such a file system.
pub(crate) fn records_parts(superblock: &Superblock) -> Result<u64, RecordsError> {
    Ok(u64::from(new_layout(superblock)?.blocks()) + u64::from(superblock.groups()))
}

/// Sets aside the room for the records of a file system that has none, and makes them.
///
/// # Errors
/// [`RecordsError`]: mostly that there is no room; the file system is then as before, but
/// for e2fsck's attention if the device failed.
pub fn establish_records(
    device: &Arc<dyn Device>,
    superblock: Superblock,
    options: &RecordsOptions,
) -> Result<(), RecordsError> {
    let journal_blocks = RecordsLayout::journal_blocks_for(&superblock);
    let layout = new_layout(&superblock)?;
    // One more for each block of pointers, and as much again is left to the user at least.
    let pointers = layout.blocks() / (superblock.block_bytes() / 4) + 4;
    if superblock.free_blocks() / 2 < layout.blocks() + pointers {
        return Err(RecordsError::Disk(Ext2Error::NoSpace));
    }
    let valid_state = superblock.state();
    let mut ext2 =
        Ext2::new(Meta::unjournaled(device.clone(), &superblock, CACHED_BLOCKS), superblock, None);
    ext2.change_superblock(|superblock| superblock.set_state(valid_state & !STATE_VALID))?;
    ext2.meta.flush()?;
    device.sync().map_err(device_error)?;

    let inode = reserve_records(&mut ext2, &layout, options, device)?;
    let mut records = new_records(&mut ext2, journal_blocks, &inode, options)?;
    ext2.meta.flush()?;
    device.sync().map_err(device_error)?;
    // The inode last: from here on the file system has records.
    ext2.put_inode(RECORDS_INODE, &inode)?;
    ext2.change_superblock(|superblock| superblock.set_state(valid_state))?;
    records.header_mut().mark_after = ext2.superblock().mark();
    let bytes = records.header().encode();
    for copy in 0..HEADER_COPIES {
        let block = records.disk_block(&mut ext2.meta, copy)?;
        let at = u64::from(block) * bytes.len() as u64;
        device.write_at(at, &bytes).map_err(device_error)?;
    }
    device.sync().map_err(device_error)?;
    ext2.meta.flush()?;
    device.sync().map_err(device_error)?;
    Ok(())
}

fn device_error(error: io::Error) -> RecordsError {
    RecordsError::Disk(Ext2Error::Meta(crate::meta::MetaError::Write(error)))
}

/// Allocates the blocks of the records, zeroed, and makes their inode; it is not written yet.
fn reserve_records(
    ext2: &mut Ext2,
    layout: &RecordsLayout,
    options: &RecordsOptions,
    device: &Arc<dyn Device>,
) -> Result<Inode, RecordsError> {
    let mut inode = Inode {
        mode: kind_bits(FileKind::Regular) | 0o600,
        links: 1,
        size_bytes: u64::from(layout.blocks()) * u64::from(ext2.superblock().block_bytes()),
        mtime: FileTime { secs: i64::from(options.now_unix_secs), nanos: 0 },
        ctime: FileTime { secs: i64::from(options.now_unix_secs), nanos: 0 },
        atime: FileTime { secs: i64::from(options.now_unix_secs), nanos: 0 },
        ..Inode::blank()
    };
    let mut logical = 0;
    while logical < layout.blocks() {
        let group = layout.group_of_record(logical);
        let goal = Goal {
            block: ext2.superblock().first_block_of_group(group),
            inode: RECORDS_INODE,
            grows: false,
            privileged: true,
        };
        ext2.make_way(&mut inode, logical, goal)?;
        // To the end of what one group's region, or one block of pointers, holds.
        let want = layout.record_run(logical).min(layout.blocks() - logical);
        let run = ext2.allocate(goal, want)?;
        for i in 0..run.len {
            ext2.make_way(&mut inode, logical + i, goal)?;
            ext2.put_block(&mut inode, logical + i, run.start + i)?;
        }
        inode.blocks_512 += run.len * (ext2.superblock().block_bytes() / 512);
        if !options.is_blank {
            zero(&**device, ext2.superblock().block_bytes(), run).map_err(device_error)?;
        }
        logical += run.len;
        ext2.meta.flush()?;
        options.progress.done(u64::from(run.len));
    }
    Ok(inode)
}

/// The records as they are at first: a header, and the checksum of each group's bitmap.
fn new_records(
    ext2: &mut Ext2,
    journal_blocks: u32,
    inode: &Inode,
    options: &RecordsOptions,
) -> Result<Records, RecordsError> {
    let superblock = ext2.superblock().clone();
    let header = Header {
        geometry: Geometry::of(&superblock),
        journal_blocks,
        tag_key: options.tag_key,
        seq: 1,
        epoch: 1,
        mounted: false,
        unverified: false,
        mark_before: [0; 32],
        mark_after: [0; 32],
        settled: 0,
        target_loss_bytes_per_sec: crate::records::header::DEFAULT_TARGET_LOSS_BYTES_PER_SEC,
        observed_secs: 0.0,
        chosen_unix_secs: 0,
    };
    let mut records = Records::new(&superblock, header, inode.pointers)?;
    for group in 0..superblock.groups() {
        let descriptor = ext2.descriptor(group)?;
        let bitmap = ext2.meta.read(descriptor.block_bitmap)?;
        let checksum = crc32fast::hash(&bitmap);
        records.change_summary(&mut ext2.meta, group, |s| s.bitmap_checksum = checksum)?;
        ext2.meta.flush()?;
        options.progress.done(1);
    }
    Ok(records)
}
