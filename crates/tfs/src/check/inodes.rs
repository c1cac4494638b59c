//! Inodes and the blocks that they use.

use atoll_vfs::FileKind;

use super::{CheckError, Checker, Known};
use crate::bitmap;
use crate::format::features::{DIR_INDEX, Features};
use crate::format::inode::{DIRECT, INDEXED, Inode, POINTERS, TRANSPARENT};
use crate::format::superblock::{RECORDS_INODE, RESIZE_INODE, ROOT_INODE};
use crate::format::{u16_at, u32_at};

/// The most findings about one inode's pointers.
const MAX_POINTER_FINDINGS: u32 = 5;
/// `EXT2_BAD_INO`: the list of blocks that the disk cannot keep.
const BAD_BLOCKS_INODE: u32 = 1;

/// `EXT4_EXTENTS_FL`.
const EXTENTS: u32 = 0x80000;
/// `EXT4_INLINE_DATA_FL`.
const INLINE_DATA: u32 = 0x1000_0000;

/// What the pointers of an inode lead to.
#[derive(Default)]
struct Walked {
    /// Blocks of data.
    data: u64,
    /// Blocks of pointers.
    indirect: u64,
    /// The last block within the file that is no hole.
    last: Option<u64>,
    findings: u32,
}

impl Checker {
    pub(super) fn check_inodes(&mut self) -> Result<(), CheckError> {
        let per_group = self.superblock.inodes_per_group();
        let inode_bytes = self.superblock.inode_bytes() as usize;
        let each = self.ext2.meta.block_bytes() / inode_bytes;
        for group in 0..self.superblock.groups() {
            let table = self.descriptors[group as usize].inode_table;
            for block in 0..self.superblock.inode_table_blocks() {
                let read = self.ext2.meta.read(table + block).map_err(Into::into);
                let Some(bytes) = self.noted(read)? else { continue };
                for (i, raw) in (0..).zip(bytes.chunks_exact(inode_bytes)) {
                    let number = group * per_group + block * each as u32 + i + 1;
                    self.check_inode(number, raw)?;
                }
            }
            self.progress.done(u64::from(self.superblock.inode_table_blocks()));
        }
        for (block, (users, said)) in std::mem::take(&mut self.xattr_blocks) {
            if users != said {
                let text = format!(
                    "attributes in block {block} say that {said} files have them, {users} do"
                );
                self.found(text);
            }
        }
        Ok(())
    }

    fn check_inode(&mut self, number: u32, raw: &[u8]) -> Result<(), CheckError> {
        let is_special = matches!(number, BAD_BLOCKS_INODE | RESIZE_INODE);
        let links = u16_at(raw, 26);
        if links == 0 && !is_special {
            // Deleted ones say when, but for the reserved, which were never made.
            let never_dated = u32_at(raw, 20) == 0 && u16_at(raw, 0) != 0;
            if never_dated && number >= self.superblock.first_inode() {
                self.found(format!("inode {number} has no name and was never deleted"));
            }
            return Ok(());
        }
        let inode = Inode::decode(raw);
        if is_special {
            let walked = self.walk(number, &inode)?;
            if number == RESIZE_INODE && links > 0 {
                self.check_count(number, &inode, walked.data + walked.indirect);
            }
            return Ok(());
        }
        let kind = inode.kind().ok();
        if kind.is_none() {
            self.found(format!("inode {number} is of no kind of file (mode {:#o})", inode.mode));
        }
        if inode.dtime != 0 {
            self.found(format!("inode {number} has a name and was deleted"));
        }
        if inode.kind() == Ok(FileKind::Directory) {
            self.report.directories += 1;
        } else if number >= self.superblock.first_inode() {
            self.report.files += 1;
            self.report.transparent_files += u64::from(inode.is_transparent_file());
        }
        self.check_features(number, &inode);
        self.check_fields(number, &inode, raw);
        self.check_contents(number, &inode)?;
        let known = Known {
            kind,
            links,
            names: 0,
            generation: inode.generation,
            transparent: inode.is_transparent_file()
                || (kind == Some(FileKind::Directory) && inode.flags & TRANSPARENT != 0),
            parent: if number == ROOT_INODE { ROOT_INODE } else { 0 },
            up: 0,
        };
        self.known.insert(number, known);
        Ok(())
    }

    /// What an inode has, the superblock must name.
    fn check_features(&mut self, number: u32, inode: &Inode) {
        let mut needed = Features::needed_by(inode);
        if inode.flags & INDEXED != 0 {
            needed.compatible |= DIR_INDEX;
        }
        for name in self.superblock.features().missing(needed) {
            self.found(format!("inode {number} needs feature {name}, which the superblock lacks"));
        }
    }

    /// What only features that TFS refuses give a meaning to.
    fn check_fields(&mut self, number: u32, inode: &Inode, raw: &[u8]) {
        let flagged = |flag: u32| inode.flags & flag != 0;
        let is_regular = inode.kind() == Ok(FileKind::Regular);
        let faults = [
            (flagged(EXTENTS), "has a tree of extents, which this file system has not"),
            (flagged(INLINE_DATA), "keeps its data in the inode, which this file system does not"),
            (flagged(INDEXED) && is_regular, "is no directory and has the flag of an index"),
            (u32_at(raw, 112) != 0, "has the address of a fragment"),
            (u16_at(raw, 116) != 0, "has the high half of a number of blocks"),
            (u16_at(raw, 118) != 0, "has the high half of a block of attributes"),
        ];
        for (_, what) in faults.into_iter().filter(|(is_wrong, _)| *is_wrong) {
            self.found(format!("inode {number} {what}"));
        }
        if raw.len() > 128 {
            let extra = usize::from(u16_at(raw, 128));
            if !extra.is_multiple_of(4) || extra > raw.len() - 128 {
                self.found(format!("inode {number} uses {extra} bytes beyond the first 128"));
            }
        }
    }

    /// A target ends at its first NUL, and the length says the same.
    fn check_target(&mut self, number: u32, inode: &Inode) -> Result<(), CheckError> {
        let read = self.ext2.target_place(number, inode);
        let Some(place) = self.noted(read)? else { return Ok(()) };
        let (size, len) = (inode.size_bytes, place.iter().position(|byte| *byte == 0));
        if size == 0 || len.map(|len| len as u64) != Some(size) {
            self.found(format!("symbolic link {number} of {size} bytes has an impossible target"));
        }
        Ok(())
    }

    fn check_contents(&mut self, number: u32, inode: &Inode) -> Result<(), CheckError> {
        let block_bytes = self.superblock.block_bytes();
        let mut blocks = self.check_xattrs(number, inode)?;
        let sizes = self.ext2.check_sizes(number, inode);
        if self.noted(sizes)?.is_none() {
            return Ok(());
        }
        match inode.kind() {
            Ok(FileKind::Regular) => {
                let walked = self.walk(number, inode)?;
                blocks += walked.data + walked.indirect;
                let last = walked.last.unwrap_or(0);
                if inode.size_bytes < last * u64::from(block_bytes) {
                    let size = inode.size_bytes;
                    self.found(format!("inode {number} of {size} bytes has blocks beyond its end"));
                }
            }
            Ok(FileKind::Directory) => {
                let walked = self.walk(number, inode)?;
                blocks += walked.data + walked.indirect;
                let wanted = inode.size_bytes / u64::from(block_bytes);
                let whole = inode.size_bytes.is_multiple_of(u64::from(block_bytes));
                let reach = walked.last.map_or(0, |last| last + 1);
                if !whole || wanted != reach || wanted != walked.data || wanted == 0 {
                    let (size, data) = (inode.size_bytes, walked.data);
                    self.found(format!("directory {number} of {size} bytes has {data} blocks"));
                }
            }
            Ok(FileKind::Symlink) => {
                if !inode.is_short_link(block_bytes) {
                    let walked = self.walk(number, inode)?;
                    blocks += walked.data + walked.indirect;
                }
                self.check_target(number, inode)?;
            }
            Ok(_) if inode.size_bytes != 0 => {
                let size = inode.size_bytes;
                self.found(format!("inode {number} is a special file of {size} bytes"));
            }
            _ => {}
        }
        self.check_count(number, inode, blocks);
        Ok(())
    }

    fn check_count(&mut self, number: u32, inode: &Inode, blocks: u64) {
        let units = blocks * u64::from(self.superblock.block_bytes() / 512);
        if units != u64::from(inode.blocks_512) {
            let said = inode.blocks_512;
            self.found(format!(
                "inode {number} says that it has {said} half kilobytes of blocks, it has {units}"
            ));
        }
    }

    /// Marks a file's block of attributes as used; how many blocks that is.
    fn check_xattrs(&mut self, number: u32, inode: &Inode) -> Result<u64, CheckError> {
        let xattrs = self.ext2.xattrs(number, inode);
        let readable = self.noted(xattrs)?.is_some();
        if inode.xattr_block == 0 {
            return Ok(0);
        }
        if let Some((users, _)) = self.xattr_blocks.get_mut(&inode.xattr_block) {
            *users += 1;
            return Ok(1);
        }
        if !readable || !self.mark_used(number, inode.xattr_block, &mut Walked::default()) {
            return Ok(1);
        }
        let read = self.ext2.meta.read(inode.xattr_block).map_err(Into::into);
        if let Some(bytes) = self.noted(read)? {
            self.xattr_blocks.insert(inode.xattr_block, (1, u32_at(&bytes, 4)));
        }
        Ok(1)
    }

    /// Marks a block as used; false if no inode may use it, or another one does.
    fn mark_used(&mut self, number: u32, block: u32, walked: &mut Walked) -> bool {
        let first = self.superblock.first_data_block();
        let exists = block >= first && block < self.superblock.blocks();
        if exists && !bitmap::is_set(&self.used, block as usize) {
            bitmap::put(&mut self.used, block as usize..block as usize + 1, true);
            self.report.used_blocks += 1;
            return true;
        }
        walked.findings += 1;
        if walked.findings <= MAX_POINTER_FINDINGS {
            let pointable = self.ext2.check_pointer(block);
            let why = match pointable {
                Err(_) if exists => "is metadata",
                Err(_) => "does not exist",
                Ok(()) => "is another file's, or twice its own",
            };
            self.found(format!("inode {number} points at block {block}, which {why}"));
        }
        false
    }

    /// Marks as used all that an inode's pointers lead to.
    fn walk(&mut self, number: u32, inode: &Inode) -> Result<Walked, CheckError> {
        let each = (self.ext2.meta.block_bytes() / 4) as u64;
        let mut walked = Walked::default();
        let mut first = 0;
        for (root, pointer) in inode.pointers.into_iter().enumerate() {
            let depth = root.saturating_sub(DIRECT - 1) as u32;
            debug_assert!(root < POINTERS && depth <= 3);
            self.walk_tree(number, pointer, depth, first, &mut walked)?;
            first += each.pow(depth);
        }
        Ok(walked)
    }

    fn walk_tree(
        &mut self,
        number: u32,
        block: u32,
        depth: u32,
        first: u64,
        walked: &mut Walked,
    ) -> Result<(), CheckError> {
        // A block that was mapped before is not followed: that would have no end.
        if block == 0 || !self.mark_used(number, block, walked) {
            return Ok(());
        }
        if depth == 0 {
            walked.data += 1;
            walked.last = Some(first);
            return Ok(());
        }
        walked.indirect += 1;
        let read = self.ext2.meta.read(block).map_err(Into::into);
        let Some(bytes) = self.noted(read)? else { return Ok(()) };
        let below = (bytes.len() as u64 / 4).pow(depth - 1);
        for (index, pointer) in (0..).zip(bytes.chunks_exact(4)) {
            self.walk_tree(number, u32_at(pointer, 0), depth - 1, first + index * below, walked)?;
        }
        Ok(())
    }

    /// Whether an inode needs no name.
    pub(super) fn is_nameless(&self, number: u32) -> bool {
        number == RECORDS_INODE || number < self.superblock.first_inode()
    }
}
