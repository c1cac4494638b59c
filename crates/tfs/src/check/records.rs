//! The records of transparent files, against ext2 and against each other.
//!
//! What is repaired: a map that cannot be true is removed, so that its file is gone when it is
//! opened next; bitmaps and counts are made anew from the maps that are left; the header is
//! written again; records without a header, or of another size than the file system, are
//! made anew and empty.

use atoll_vfs::FileKind;

use super::{CheckError, CheckOptions, Checker, Damaged, MAPS_A_PART, device_failure};
use crate::bitmap;
use crate::device::Device;
use crate::ext2::{Ext2, Ext2Error, Extent, Map, Records, RecordsError};
use crate::format::inode::POINTERS;
use crate::format::superblock::{RECORDS_INODE, Superblock};
use crate::fs::{read_records, read_superblock};
use crate::meta::{Meta, MetaError, Part};
use crate::mkfs::{RecordsOptions, establish_records, records_parts};
use crate::records::header::{HEADER_BYTES, Header};
use crate::records::layout::{HEADER_COPIES, MAP_ENTRY_BYTES};
use crate::records::map::MapEntry;
use crate::records::tag::Belongs;
use std::sync::Arc;

/// The header and the pointers of the records' file, or why there are none.
pub(super) type FoundRecords = Result<(Header, [u32; POINTERS]), RecordsError>;

pub(super) fn find(device: &Arc<dyn Device>, superblock: &Superblock) -> FoundRecords {
    read_records(device, superblock)
}

/// What a repair does.
#[derive(Default)]
struct Repairs {
    /// Maps that go.
    drop: Vec<u32>,
    /// Files and the directories that name them.
    parents: Vec<(u32, u32)>,
    /// Blocks of the maps which stay.
    mapped: Vec<u8>,
}

impl Checker {
    fn found_in_records(&mut self, text: impl Into<String>) {
        self.report.note(Damaged::Records, text.into());
    }

    pub(super) fn check_records(
        &mut self,
        found: FoundRecords,
        options: &CheckOptions,
    ) -> Result<(), CheckError> {
        let (header, pointers) = match found {
            Ok(found) => found,
            Err(RecordsError::None) => return Ok(()),
            Err(RecordsError::Disk(error)) => {
                self.report.has_records = true;
                let text = device_failure(error)?;
                self.found_in_records(text);
                return self.remake(options);
            }
            Err(error) => {
                self.report.has_records = true;
                self.found_in_records(error.to_string());
                return self.remake(options);
            }
        };
        self.report.has_records = true;
        self.report.foreign = header.unverified || !header.recognises(&self.superblock);
        let foreign = self.report.foreign;
        let records = Records::new(&self.superblock, header, pointers)?;
        let meta = Meta::unjournaled(self.device.clone(), &self.superblock, super::CACHED_BLOCKS);
        let mut ext2 = Ext2::new(meta, self.superblock.clone(), Some(records));
        if !self.check_room(&mut ext2)? {
            return self.remake(options);
        }
        self.check_header_copies(&mut ext2)?;
        // After others have written, the next mount goes through the rest.
        let mut repairs = Repairs::default();
        if !foreign {
            repairs.mapped = vec![0; self.superblock.blocks().div_ceil(8) as usize];
            self.check_maps(&mut ext2, options, &mut repairs)?;
            for group in 0..self.superblock.groups() {
                self.check_group_records(&mut ext2, group, &repairs)?;
                self.progress.done(1);
            }
        }
        let any = self.report.findings.iter().any(|f| f.damaged == Damaged::Records);
        if options.repair && any && !self.report.needs_e2fsck() {
            self.repair(&mut ext2, &repairs, foreign)?;
        }
        Ok(())
    }

    /// Whether the records' file has all of its blocks.
    fn check_room(&mut self, ext2: &mut Ext2) -> Result<bool, CheckError> {
        let (records, meta) = own(ext2);
        for block in 0..records.layout().blocks() {
            if let Err(error) = records.disk_block(meta, block) {
                let text = device_failure(error)?;
                self.found_in_records(text);
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn check_header_copies(&mut self, ext2: &mut Ext2) -> Result<(), CheckError> {
        for copy in 0..HEADER_COPIES {
            let (records, meta) = own(ext2);
            let block = records.disk_block(meta, copy).map_err(failure)?;
            let bytes = meta.read(block).map_err(|error| failure(error.into()))?;
            let bytes = &bytes[..HEADER_BYTES];
            if Header::newest([bytes, bytes], &self.superblock).is_err() {
                self.found_in_records(format!("copy {copy} of the records' header is damaged"));
            }
        }
        Ok(())
    }

    fn check_maps(
        &mut self,
        ext2: &mut Ext2,
        options: &CheckOptions,
        repairs: &mut Repairs,
    ) -> Result<(), CheckError> {
        let longest = ext2.longest_file_bytes();
        if options.compare_tags {
            for group in 0..self.superblock.groups() {
                let (records, meta) = own(ext2);
                let summary = records.summary(meta, group).map_err(failure)?;
                self.progress.expect(u64::from(summary.transparent));
            }
        }
        for number in 1..=self.superblock.inodes() {
            if number % MAPS_A_PART == 1 {
                self.progress.done(1);
            }
            let known = self.known.get(&number).filter(|k| k.kind == Some(FileKind::Regular));
            let known = known.filter(|k| k.transparent).cloned();
            let (records, meta) = own(ext2);
            let place = records.layout().map_entry(number);
            let block = records.disk_block(meta, place.block).map_err(failure)?;
            let bytes = meta.read(block).map_err(|error| failure(error.into()))?;
            let bytes = &bytes[place.at..place.at + MAP_ENTRY_BYTES];
            if bytes.iter().all(|byte| *byte == 0) {
                self.report.lost_files += u64::from(known.is_some());
                continue;
            }
            let problem = match (MapEntry::decode(number, bytes), known) {
                (None, _) => Some("is damaged".to_owned()),
                (Some(_), None) => Some("is of a file that is not there".to_owned()),
                (Some(entry), Some(known)) if entry.generation != known.generation => {
                    Some("is of an older file of this number".to_owned())
                }
                (Some(entry), Some(_)) if entry.size_bytes > longest => {
                    Some(format!("has an impossible length of {}", entry.size_bytes))
                }
                (Some(entry), Some(known)) => {
                    // One that others gave more names is in several; one that was not opened
                    // by name since others wrote may have been moved by them.
                    let settled = known.names == 1 && entry.epoch == own(ext2).0.header().epoch;
                    if entry.parent != known.parent && settled {
                        let (said, is) = (entry.parent, known.parent);
                        self.found_in_records(format!(
                            "transparent file {number} is in directory {is}, its map says {said}"
                        ));
                        repairs.parents.push((number, is));
                    }
                    self.check_chain(ext2, number, options, repairs)?
                }
            };
            if let Some(problem) = problem {
                self.found_in_records(format!("the map of transparent file {number} {problem}"));
                repairs.drop.push(number);
            }
        }
        Ok(())
    }

    /// Notes the blocks of a map; what is wrong with it, if anything is.
    fn check_chain(
        &mut self,
        ext2: &mut Ext2,
        number: u32,
        options: &CheckOptions,
        repairs: &mut Repairs,
    ) -> Result<Option<String>, CheckError> {
        let recorded = ext2.recorded_map(number).map_err(failure)?;
        let Some((Map { entry, extents }, true)) = recorded else {
            return Ok(Some("leads to extents that cannot be".to_owned()));
        };
        let mut lost = 0;
        for extent in &extents {
            let range = extent.start as usize..(extent.start + extent.len) as usize;
            if bitmap::next(&repairs.mapped, range, true).is_some() {
                return Ok(Some(format!("has blocks of another at {}", extent.start)));
            }
            let (group, bit) = ext2.group_of_block(extent.start).map_err(failure)?;
            let (records, meta) = own(ext2);
            let transparent = records.transparent_bitmap(meta, group).map_err(failure)?;
            let overwritten = records.overwritten_bitmap(meta, group).map_err(failure)?;
            let bits = bit as usize..(bit + extent.len) as usize;
            if bitmap::next(&transparent, bits.clone(), false).is_some() {
                let at = extent.start;
                return Ok(Some(format!("has blocks at {at} that are not marked transparent")));
            }
            lost += bitmap::count(&overwritten, bits);
        }
        if lost > 0 {
            self.report.lost_files += 1;
        } else if options.compare_tags {
            let epoch = own(ext2).0.header().epoch;
            if entry.epoch == epoch && !self.tags_match(ext2, number, &entry, &extents)? {
                return Ok(Some("names blocks that hold other bytes than the file's".to_owned()));
            }
        }
        for extent in &extents {
            let range = extent.start as usize..(extent.start + extent.len) as usize;
            bitmap::put(&mut repairs.mapped, range, true);
        }
        Ok(None)
    }

    fn tags_match(
        &mut self,
        ext2: &mut Ext2,
        number: u32,
        entry: &MapEntry,
        extents: &[Extent],
    ) -> Result<bool, CheckError> {
        let block_bytes = self.superblock.block_bytes();
        let mut bytes = vec![0; block_bytes as usize];
        for extent in extents {
            for i in 0..extent.len {
                let block = extent.start + i;
                let at = u64::from(block) * u64::from(block_bytes);
                self.device.read_at(at, &mut bytes).map_err(CheckError::Io)?;
                let logical = extent.logical + i;
                let belongs = Belongs { inode: number, generation: entry.generation, logical };
                let tag = ext2.tag_of(belongs, &bytes);
                let (records, meta) = own(ext2);
                if records.tag(meta, block).map_err(failure)? != tag {
                    return Ok(false);
                }
            }
            self.progress.done(u64::from(extent.len));
        }
        Ok(true)
    }

    fn check_group_records(
        &mut self,
        ext2: &mut Ext2,
        group: u32,
        repairs: &Repairs,
    ) -> Result<(), CheckError> {
        let first = self.superblock.first_block_of_group(group) as usize;
        let blocks = self.superblock.blocks_of_group(group) as usize;
        let files = self.transparent_inodes(group);
        let (records, meta) = own(ext2);
        let transparent = records.transparent_bitmap(meta, group).map_err(failure)?;
        let overwritten = records.overwritten_bitmap(meta, group).map_err(failure)?;
        let has_summary = records.has_summary(meta, group).map_err(failure)?;
        let summary = records.summary(meta, group).map_err(failure)?;
        let (mut ownerless, mut unmarked, mut senseless) = (0u32, 0u32, 0u32);
        let (mut intact, mut lost) = (0u32, 0u32);
        for bit in 0..blocks {
            let is_transparent = bitmap::is_set(&transparent, bit);
            let is_overwritten = bitmap::is_set(&overwritten, bit);
            ownerless += u32::from(is_transparent && !bitmap::is_set(&repairs.mapped, first + bit));
            let is_used = bitmap::is_set(&self.used, first + bit);
            unmarked += u32::from(is_transparent && is_used && !is_overwritten);
            senseless += u32::from(is_overwritten && !is_transparent);
            intact += u32::from(is_transparent && !is_overwritten);
            lost += u32::from(is_transparent && is_overwritten);
        }
        for (count, what) in [
            (ownerless, "are marked transparent and of no file"),
            (unmarked, "are overwritten and not marked so"),
            (senseless, "are marked overwritten and are not transparent"),
        ] {
            if count > 0 {
                self.found_in_records(format!("group {group}: {count} blocks {what}"));
            }
        }
        if [&transparent, &overwritten]
            .into_iter()
            .any(|bits| bitmap::next(bits, blocks..8 * bits.len(), true).is_some())
        {
            self.found_in_records(format!("group {group}: a bitmap reaches beyond the group"));
        }
        if !has_summary {
            self.found_in_records(format!("the summary of group {group} is damaged"));
            return Ok(());
        }
        for (what, said, is) in [
            ("transparent blocks", summary.transparent, intact),
            ("overwritten blocks", summary.overwritten, lost),
            ("transparent inodes", summary.transparent_inodes, files.0),
            ("transparent directories", summary.transparent_directories, files.1),
        ] {
            if said != is {
                self.found_in_records(format!("group {group} says {said} {what}, it has {is}"));
            }
        }
        let allocated = self.descriptors[group as usize].block_bitmap;
        let allocated = self.ext2.meta.read(allocated).map_err(|error| failure(error.into()))?;
        if summary.bitmap_checksum != crc32fast::hash(&allocated) {
            self.found_in_records(format!(
                "the block bitmap of group {group} is not as TFS wrote it last"
            ));
        }
        Ok(())
    }

    /// Transparent inodes of a group, and the directories among them.
    fn transparent_inodes(&self, group: u32) -> (u32, u32) {
        let per_group = self.superblock.inodes_per_group();
        let first = group * per_group + 1;
        let of_group = self.known.range(first..first + per_group).map(|(_, known)| known);
        of_group.filter(|known| known.transparent).fold((0, 0), |(all, directories), known| {
            (all + 1, directories + u32::from(known.kind == Some(FileKind::Directory)))
        })
    }

    fn repair(
        &mut self,
        ext2: &mut Ext2,
        repairs: &Repairs,
        foreign: bool,
    ) -> Result<(), CheckError> {
        for (number, parent) in &repairs.parents {
            let (records, meta) = own(ext2);
            let entry = records.map_entry(meta, *number).map_err(failure)?;
            let entry = entry.map(|entry| MapEntry { parent: *parent, ..entry });
            records.put_map_entry(meta, *number, entry.as_ref()).map_err(failure)?;
        }
        for number in &repairs.drop {
            let (records, meta) = own(ext2);
            records.put_map_entry(meta, *number, None).map_err(failure)?;
        }
        if !foreign {
            for group in 0..self.superblock.groups() {
                self.remake_bitmaps(ext2, group, &repairs.mapped).map_err(failure)?;
                ext2.meta.flush().map_err(|error| failure(error.into()))?;
            }
        }
        let (records, meta) = own(ext2);
        records.header_mut().seq += 1;
        let bytes = records.header().encode();
        for copy in 0..HEADER_COPIES {
            let block = records.disk_block(meta, copy).map_err(failure)?;
            let to = meta.change(block, Part::Records).map_err(|error| failure(error.into()))?;
            to.copy_from_slice(&bytes);
        }
        meta.flush().map_err(|error| failure(error.into()))?;
        self.device.sync().map_err(CheckError::Io)?;
        self.note_repaired();
        Ok(())
    }

    fn note_repaired(&mut self) {
        let of_records = |f: &&mut super::Finding| f.damaged == Damaged::Records;
        self.report.findings.iter_mut().filter(of_records).for_each(|f| f.repaired = true);
    }

    /// Bitmaps and counts of a group, from what the maps have.
    fn remake_bitmaps(
        &mut self,
        ext2: &mut Ext2,
        group: u32,
        mapped: &[u8],
    ) -> Result<(), Ext2Error> {
        let first = self.superblock.first_block_of_group(group) as usize;
        let blocks = self.superblock.blocks_of_group(group) as usize;
        let (files, directories) = self.transparent_inodes(group);
        let allocated = self.ext2.meta.read(self.descriptors[group as usize].block_bitmap)?;
        let (records, meta) = own(ext2);
        let before = records.overwritten_bitmap(meta, group)?;
        let mut transparent = vec![0; before.len()];
        let mut overwritten = vec![0; before.len()];
        for bit in (0..blocks).filter(|bit| bitmap::is_set(mapped, first + bit)) {
            let is_lost = bitmap::is_set(&before, bit) || bitmap::is_set(&allocated, bit);
            bitmap::put(&mut transparent, bit..bit + 1, true);
            bitmap::put(&mut overwritten, bit..bit + 1, is_lost);
        }
        let layout = *records.layout();
        for (block, bits) in [
            (layout.transparent_bitmap(group), &transparent),
            (layout.overwritten_bitmap(group), &overwritten),
        ] {
            let block = records.disk_block(meta, block)?;
            meta.change(block, Part::Records)?.copy_from_slice(bits);
        }
        let (all, lost) =
            (bitmap::count(&transparent, 0..blocks), bitmap::count(&overwritten, 0..blocks));
        records.change_summary(meta, group, |summary| {
            summary.transparent = (all - lost) as u32;
            summary.overwritten = lost as u32;
            summary.transparent_inodes = files;
            summary.transparent_directories = directories;
            summary.bitmap_checksum = crc32fast::hash(&allocated);
        })
    }

    /// Gives back the records' file and makes empty records.
    fn remake(&mut self, options: &CheckOptions) -> Result<(), CheckError> {
        if !options.repair || self.report.needs_e2fsck() {
            return Ok(());
        }
        let inode = self.ext2.inode(RECORDS_INODE);
        let mut inode = inode.map_err(failure)?;
        while !self.ext2.cut_off(RECORDS_INODE, &mut inode, 0).map_err(failure)? {
            self.ext2.put_inode(RECORDS_INODE, &inode).map_err(failure)?;
        }
        inode.links = 0;
        inode.mode = 0;
        inode.size_bytes = 0;
        self.ext2.put_inode(RECORDS_INODE, &inode).map_err(failure)?;
        self.ext2.meta.flush().map_err(|error| failure(error.into()))?;
        let wanted = RecordsOptions {
            tag_key: options.random,
            is_blank: false,
            now_unix_secs: options.now_unix_secs,
            progress: self.progress.clone(),
        };
        self.progress.expect(records_parts(self.ext2.superblock())?);
        establish_records(&self.device, self.ext2.superblock().clone(), &wanted)?;
        // Transparent files are there still, by name: nothing of what they held.
        let superblock = read_superblock(&*self.device)?;
        let (header, pointers) = find(&self.device, &superblock)?;
        let records = Records::new(&superblock, header, pointers)?;
        let meta = Meta::unjournaled(self.device.clone(), &superblock, super::CACHED_BLOCKS);
        let mut ext2 = Ext2::new(meta, superblock, Some(records));
        for group in 0..self.superblock.groups() {
            let (files, directories) = self.transparent_inodes(group);
            let (records, meta) = own(&mut ext2);
            let change = records.change_summary(meta, group, |summary| {
                summary.transparent_inodes = files;
                summary.transparent_directories = directories;
            });
            change.map_err(failure)?;
            meta.flush().map_err(|error| failure(error.into()))?;
        }
        self.device.sync().map_err(CheckError::Io)?;
        self.note_repaired();
        Ok(())
    }
}

/// The records of an ext2 that was made with them.
fn own(ext2: &mut Ext2) -> (&mut Records, &mut Meta) {
    ext2.records_and_meta().expect("it was made with records")
}

/// Where records cannot be read any more after their room was checked, only the device is
/// left to blame.
fn failure(error: Ext2Error) -> CheckError {
    match error {
        Ext2Error::Meta(MetaError::Read { error, .. } | MetaError::Write(error)) => {
            CheckError::Io(error)
        }
        error => CheckError::Io(std::io::Error::other(error.to_string())),
    }
}
