//! What other processes may ask a mounted file system: attributes that no file has and every
//! file answers, so that `atoll tfs stat` and `map` need no way to the mount but the mount
//! itself.
//!
//! | attribute | value |
//! |---|---|
//! | `user.tfs.usage` | [`Usage`] as lines of a name, a space and a number |
//! | `user.tfs.trouble` | what is wrong, in words: a line `refused` with the reason if nothing can be changed any more, and lines `met` with what calls were answered `EIO` for |
//! | `user.tfs.target_loss` | β (§3.3), bytes a second, in decimal; can be set |
//! | `user.tfs.clean` | lines `files` and `blocks`: what the last cleaning on request removed; setting it, to anything, runs the cleaner (§3.1) |
//! | `user.tfs.map.CELLS.FIRST` | of a [`BlockMap`] of so many cells those from FIRST on: a head of 20 bytes (size of a block, blocks, blocks of a cell, cells in all, number of the first cell here; 4 each, little-endian), then 20 bytes for each cell (free, allocated, transparent, allocated and overwritten, free and overwritten) |

use atoll_vfs::{Caller, Errno, InodeNumber};
use bytes::Bytes;

use crate::ext2::StateCounts;
use crate::format::{put_u32, u32_at};
use crate::fs::{Cleaned, Tfs, Usage, met};
use crate::map::{BlockMap, MAX_CELLS};

/// The attribute that tells the numbers.
pub const USAGE_XATTR: &str = "user.tfs.usage";
/// The attribute that tells what is wrong.
pub const TROUBLE_XATTR: &str = "user.tfs.trouble";
/// The attribute that is the target loss rate.
pub const TARGET_LOSS_XATTR: &str = "user.tfs.target_loss";
/// The attribute that runs the cleaner when it is set, and tells what it did.
pub const CLEAN_XATTR: &str = "user.tfs.clean";
/// How the attributes begin that tell the map.
pub const MAP_XATTR: &str = "user.tfs.map";
/// Cells in one attribute: Linux allows 64 KiB.
pub const CELLS_AN_XATTR: u32 = 3000;

const HEAD_BYTES: usize = 20;
const CELL_BYTES: usize = 20;

impl Tfs {
    /// The value of an attribute that no file has, if it is one.
    pub(crate) fn told(&self, name: &[u8]) -> Option<Result<Bytes, Errno>> {
        let name = std::str::from_utf8(name).ok()?;
        if name == USAGE_XATTR {
            return Some(self.usage().map(|usage| Bytes::from(usage.to_lines())));
        }
        if name == TROUBLE_XATTR {
            return Some(Ok(Bytes::from(self.trouble().to_lines())));
        }
        if name == TARGET_LOSS_XATTR {
            let told = self.avoidance();
            return Some(told.map(|told| Bytes::from(told.target_bytes_per_sec.to_string())));
        }
        if name == CLEAN_XATTR {
            let Cleaned { files, blocks } = self.last_cleaned();
            return Some(Ok(Bytes::from(format!("files {files}\nblocks {blocks}\n"))));
        }
        let (cells, first) = name.strip_prefix(MAP_XATTR)?.strip_prefix('.')?.split_once('.')?;
        let (cells, first) = (cells.parse().ok()?, first.parse().ok()?);
        Some(self.block_map(cells).map(|map| map.part(first)))
    }
}

impl Tfs {
    /// Changes what an attribute tells that no file has, if it is one that can be changed: by
    /// root or the owner of the topmost directory, on that directory.
    pub(crate) fn change_told(
        &self,
        caller: Caller,
        inode: InodeNumber,
        name: &[u8],
        value: &[u8],
    ) -> Option<Result<(), Errno>> {
        let is = |xattr: &str| name == xattr.as_bytes();
        if is(USAGE_XATTR) || is(TROUBLE_XATTR) || name.starts_with(MAP_XATTR.as_bytes()) {
            return Some(Err(Errno::EPERM));
        }
        if !is(TARGET_LOSS_XATTR) && !is(CLEAN_XATTR) {
            return None;
        }
        Some(self.check_administrator(caller, inode).and_then(|()| {
            if is(CLEAN_XATTR) {
                return self.clean().map(drop);
            }
            let rate = std::str::from_utf8(value).ok().and_then(|text| text.trim().parse().ok());
            self.set_target_loss(rate.ok_or(Errno::EINVAL)?)?;
            self.choose_avoided().map(drop)
        }))
    }

    /// What is wrong with it, as far as it was met.
    pub fn trouble(&self) -> Trouble {
        Trouble { refused: self.failure().map(str::to_owned), met: met() }
    }
}

/// What is wrong with a file system, in words.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Trouble {
    /// Why nothing can be changed any more.
    pub refused: Option<String>,
    /// What calls were answered `EIO` for, the last ones.
    pub met: Vec<String>,
}

impl Trouble {
    /// As lines, for another process.
    pub fn to_lines(&self) -> String {
        let refused = self.refused.iter().map(|why| ("refused", why));
        let lines = refused.chain(self.met.iter().map(|what| ("met", what)));
        lines.map(|(name, text)| format!("{name} {}\n", text.replace('\n', " "))).collect()
    }

    /// From lines; those with other names are passed over.
    pub fn from_lines(lines: &str) -> Trouble {
        let mut trouble = Trouble::default();
        for (name, text) in lines.lines().filter_map(|line| line.split_once(' ')) {
            match name {
                "refused" => trouble.refused = Some(text.to_owned()),
                "met" => trouble.met.push(text.to_owned()),
                _ => {}
            }
        }
        trouble
    }
}

/// The name of the attribute with the cells from `first` on.
pub fn map_xattr(cells: u32, first: u32) -> String {
    format!("{MAP_XATTR}.{cells}.{first}")
}

macro_rules! usage_lines {
    ($($name:literal $($field:ident).+;)*) => {
        impl Usage {
            /// As lines, for another process.
            pub fn to_lines(&self) -> String {
                let mut lines = String::new();
                $(
                    lines.push_str(&format!("{} {}\n", $name, self.$($field).+));
                )*
                lines
            }

            /// From lines; none if a number is missing. Lines with other names are passed
            /// over.
            pub fn from_lines(lines: &str) -> Option<Usage> {
                let mut usage = Usage::default();
                $(
                    let value = lines.lines().find_map(|line| {
                        line.split_once(' ').filter(|(name, _)| *name == $name)
                    });
                    usage.$($field).+ = value?.1.parse().ok()?;
                )*
                Some(usage)
            }
        }
    };
}

usage_lines! {
    "block_bytes" block_bytes;
    "blocks" blocks;
    "free_blocks" free_blocks;
    "reserved_blocks" reserved_blocks;
    "records_blocks" records_blocks;
    "transparent_blocks" transparent_blocks;
    "overwritten_blocks" overwritten_blocks;
    "avoided_free_blocks" avoided_free_blocks;
    "transparent_room_blocks" transparent_room_blocks;
    "pinned_blocks" pinned_blocks;
    "inodes" inodes;
    "free_inodes" free_inodes;
    "transparent_files" transparent_files;
    "transparent_directories" transparent_directories;
    "groups" groups;
    "rate_bytes_per_sec" avoidance.rate_bytes_per_sec;
    "target_bytes_per_sec" avoidance.target_bytes_per_sec;
    "share" avoidance.share;
    "observed_secs" avoidance.observed_secs;
    "avoided_chunks" avoidance.avoided_chunks;
    "chunks" avoidance.chunks;
}

impl Usage {
    /// Blocks that ordinary files and the file system itself take; records not counted.
    pub fn ordinary_blocks(&self) -> u64 {
        self.blocks.saturating_sub(self.free_blocks).saturating_sub(self.records_blocks)
    }
}

fn counts(cell: &StateCounts) -> [u64; 5] {
    [
        cell.free,
        cell.allocated,
        cell.transparent,
        cell.allocated_and_overwritten,
        cell.free_and_overwritten,
    ]
}

impl BlockMap {
    /// Cells from `first` on, as many as fit into an attribute.
    fn part(&self, first: u32) -> Bytes {
        let start = (first as usize).min(self.cells.len());
        let end = (start + CELLS_AN_XATTR as usize).min(self.cells.len());
        let cells = &self.cells[start..end];
        let mut bytes = vec![0; HEAD_BYTES + CELL_BYTES * cells.len()];
        // Block numbers of ext2 have 32 bits.
        let head = [
            self.block_bytes,
            self.blocks as u32,
            self.cell_blocks,
            self.cells.len() as u32,
            first,
        ];
        for (i, number) in head.into_iter().enumerate() {
            put_u32(&mut bytes, 4 * i, number);
        }
        for (i, count) in cells.iter().flat_map(counts).enumerate() {
            put_u32(&mut bytes, HEAD_BYTES + 4 * i, count as u32);
        }
        Bytes::from(bytes)
    }

    /// Adds a part to a map that is not yet whole (in the beginning: none); false if the
    /// bytes are none, or do not go on where the map ends.
    pub fn add_part(map: &mut Option<BlockMap>, bytes: &[u8]) -> bool {
        if bytes.len() < HEAD_BYTES || !(bytes.len() - HEAD_BYTES).is_multiple_of(CELL_BYTES) {
            return false;
        }
        let head: [u32; 5] = std::array::from_fn(|i| u32_at(bytes, 4 * i));
        let [block_bytes, blocks, cell_blocks, _, first] = head;
        let map = map.get_or_insert_with(|| BlockMap {
            block_bytes,
            blocks: u64::from(blocks),
            cell_blocks,
            cells: Vec::new(),
        });
        if first as usize != map.cells.len() || map.cells.len() >= MAX_CELLS as usize {
            return false;
        }
        let cells = bytes[HEAD_BYTES..].chunks_exact(CELL_BYTES);
        map.cells.extend(cells.map(|cell| {
            let count = |i: usize| u64::from(u32_at(cell, 4 * i));
            StateCounts {
                free: count(0),
                allocated: count(1),
                transparent: count(2),
                allocated_and_overwritten: count(3),
                free_and_overwritten: count(4),
            }
        }));
        true
    }

    /// Whether all parts have been added.
    pub fn is_whole(&self) -> bool {
        self.cells.len() as u64 >= self.blocks.div_ceil(u64::from(self.cell_blocks.max(1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_survive_being_told() {
        let mut usage = Usage { blocks: 1 << 31, free_blocks: 7, groups: 3, ..Usage::default() };
        usage.avoidance.share = 0.123_456_789;
        usage.avoidance.rate_bytes_per_sec = 1e-9;
        let lines = usage.to_lines();
        assert_eq!(Usage::from_lines(&format!("of_tomorrow 1\n{lines}")), Some(usage));
        assert_eq!(Usage::from_lines(&lines.replace("share ", "")), None);
        assert_eq!(Usage::from_lines(""), None);
    }

    #[test]
    fn what_is_wrong_survives_being_told() {
        let trouble = Trouble {
            refused: Some("no room\nat all".into()),
            met: vec!["inode 7: a pointer".into(), "inode 8".into()],
        };
        let lines = trouble.to_lines();
        let back = Trouble::from_lines(&format!("of_tomorrow 1\n{lines}"));
        assert_eq!(back.refused.as_deref(), Some("no room at all"));
        assert_eq!(back.met, trouble.met);
        assert_eq!(Trouble::from_lines(""), Trouble::default());
    }

    #[test]
    fn a_map_is_told_in_parts() {
        let cell = |n: u64| StateCounts { free: n, transparent: 2 * n, ..StateCounts::default() };
        let cells: Vec<StateCounts> = (0..7001).map(cell).collect();
        let map = BlockMap { block_bytes: 4096, blocks: 70_010, cell_blocks: 10, cells };
        let mut told = None;
        let mut parts = 0;
        while !told.as_ref().is_some_and(BlockMap::is_whole) {
            let first = told.as_ref().map_or(0, |map: &BlockMap| map.cells.len());
            assert!(BlockMap::add_part(&mut told, &map.part(first as u32)));
            parts += 1;
        }
        assert_eq!((told.as_ref(), parts), (Some(&map), 3));
        assert!(!BlockMap::add_part(&mut told, &map.part(0)), "it does not go on there");
        assert!(!BlockMap::add_part(&mut told, &[0; 21]));
    }
}
