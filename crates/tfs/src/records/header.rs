//! The header: two copies, of which the newer counts.

use thiserror::Error;

use super::layout::RecordsLayout;
use crate::format::superblock::Superblock;
use crate::format::{put_u32, put_u64, u32_at, u64_at};

/// Its length, bytes; the rest of its block is 0.
pub const HEADER_BYTES: usize = 512;
const MAGIC: &[u8; 8] = b"AtollTFS";
const VERSION: u32 = 1;
const MOUNTED: u32 = 1;
/// No header and no transaction has a higher number.
pub const MAX_NUMBER: u64 = u64::MAX >> 1;
const UNVERIFIED: u32 = 2;

/// The loss rate aimed at unless the user sets another, bytes a second: a tenth of a kilobyte, at
/// which 97 % of a disk could be given in the paper's worse trace (Figure 5).
pub const DEFAULT_TARGET_LOSS_BYTES_PER_SEC: f64 = 100.0;

/// The header, decoded.
#[derive(Clone, PartialEq, Debug)]
pub struct Header {
    /// What the records were made for.
    pub geometry: Geometry,
    /// Blocks of a journal area.
    pub journal_blocks: u32,
    /// The key of tags; random, never shown.
    pub tag_key: [u8; 32],
    /// Of two copies, the one with the higher counts.
    pub seq: u64,
    /// Counts the times others may have written.
    pub epoch: u32,
    /// Mounted, and not unmounted since.
    pub mounted: bool,
    /// Others have written, and the records were not yet gone through since.
    pub unverified: bool,
    /// The superblock's mark before the last mount or unmount.
    pub mark_before: [u8; 32],
    /// The superblock's mark after it.
    pub mark_after: [u8; 32],
    /// Transactions up to this one are at home; the journal's are void.
    pub settled: u64,
    /// Target loss rate β (§3.3), bytes a second.
    pub target_loss_bytes_per_sec: f64,
    /// Seconds of use the histograms cover.
    pub observed_secs: f64,
    /// When the avoided chunks were chosen, seconds since 1970.
    pub chosen_unix_secs: u64,
}

/// What of the file system the records depend on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Size of a block, bytes.
    pub block_bytes: u32,
    /// Blocks in all.
    pub blocks: u32,
    /// Blocks in a group.
    pub blocks_per_group: u32,
    /// Inodes in a group.
    pub inodes_per_group: u32,
    /// The file system's UUID.
    pub uuid: [u8; 16],
}

impl Geometry {
    /// Of a file system.
    pub fn of(superblock: &Superblock) -> Geometry {
        Geometry {
            block_bytes: superblock.block_bytes(),
            blocks: superblock.blocks(),
            blocks_per_group: superblock.blocks_per_group(),
            inodes_per_group: superblock.inodes_per_group(),
            uuid: superblock.uuid(),
        }
    }
}

/// Why records cannot be used; the file system can, as plain ext2.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum HeaderError {
    /// Neither copy is a header.
    #[error("the records of transparent files are damaged: no copy of their header is whole")]
    Damaged,
    /// Made by a later version.
    #[error("the records of transparent files are of version {0}, later than this program's")]
    Later(u32),
    /// Made for a file system of other size.
    #[error("the records of transparent files were made before the file system was resized")]
    Resized,
}

impl Header {
    /// The newer of two copies, if it is for `superblock`.
    ///
    /// # Errors
    /// [`HeaderError`].
    ///
    /// # Panics
    /// If a copy is shorter than [`HEADER_BYTES`].
    pub fn newest(copies: [&[u8]; 2], superblock: &Superblock) -> Result<Header, HeaderError> {
        let mut newest: Option<Header> = None;
        for copy in copies {
            let header = Header::decode(copy)?;
            newest = newest.into_iter().chain(header).max_by_key(|header| header.seq);
        }
        let header = newest.ok_or(HeaderError::Damaged)?;
        // Others may give it another UUID (`tune2fs -U`): then it is not recognised.
        let uuid = superblock.uuid();
        if (Geometry { uuid, ..header.geometry }) != Geometry::of(superblock) {
            return Err(HeaderError::Resized);
        }
        if RecordsLayout::new(superblock, header.journal_blocks).is_none() {
            return Err(HeaderError::Damaged);
        }
        Ok(header)
    }

    fn decode(bytes: &[u8]) -> Result<Option<Header>, HeaderError> {
        let bytes = &bytes[..HEADER_BYTES];
        if &bytes[..8] != MAGIC || crc32fast::hash(&bytes[..508]) != u32_at(bytes, 508) {
            return Ok(None);
        }
        if u32_at(bytes, 8) != VERSION {
            return Err(HeaderError::Later(u32_at(bytes, 8)));
        }
        // Numbers that only ever grow by one: these were never reached.
        if u64_at(bytes, 80) > MAX_NUMBER || u64_at(bytes, 184) > MAX_NUMBER {
            return Ok(None);
        }
        let finite = |at| Some(f64::from_bits(u64_at(bytes, at))).filter(|f| f.is_finite());
        let rate = |at| finite(at).map_or(0.0, |f| f.max(0.0));
        Ok(Some(Header {
            geometry: Geometry {
                block_bytes: u32_at(bytes, 12),
                blocks: u32_at(bytes, 16),
                blocks_per_group: u32_at(bytes, 20),
                inodes_per_group: u32_at(bytes, 24),
                uuid: bytes[32..48].try_into().expect("sixteen bytes"),
            },
            journal_blocks: u32_at(bytes, 28),
            tag_key: bytes[48..80].try_into().expect("thirty-two bytes"),
            seq: u64_at(bytes, 80),
            epoch: u32_at(bytes, 88),
            mounted: u32_at(bytes, 92) & MOUNTED != 0,
            unverified: u32_at(bytes, 92) & UNVERIFIED != 0,
            mark_before: bytes[96..128].try_into().expect("thirty-two bytes"),
            mark_after: bytes[128..160].try_into().expect("thirty-two bytes"),
            target_loss_bytes_per_sec: rate(160),
            observed_secs: rate(168),
            chosen_unix_secs: u64_at(bytes, 176),
            settled: u64_at(bytes, 184),
        }))
    }

    /// A whole block of it.
    pub fn encode(&self) -> Vec<u8> {
        let geometry = &self.geometry;
        let mut bytes = vec![0; geometry.block_bytes as usize];
        bytes[..8].copy_from_slice(MAGIC);
        put_u32(&mut bytes, 8, VERSION);
        put_u32(&mut bytes, 12, geometry.block_bytes);
        put_u32(&mut bytes, 16, geometry.blocks);
        put_u32(&mut bytes, 20, geometry.blocks_per_group);
        put_u32(&mut bytes, 24, geometry.inodes_per_group);
        put_u32(&mut bytes, 28, self.journal_blocks);
        bytes[32..48].copy_from_slice(&geometry.uuid);
        bytes[48..80].copy_from_slice(&self.tag_key);
        put_u64(&mut bytes, 80, self.seq);
        put_u32(&mut bytes, 88, self.epoch);
        let flag = |on: bool, bit: u32| if on { bit } else { 0 };
        let flags = flag(self.mounted, MOUNTED) | flag(self.unverified, UNVERIFIED);
        put_u32(&mut bytes, 92, flags);
        bytes[96..128].copy_from_slice(&self.mark_before);
        bytes[128..160].copy_from_slice(&self.mark_after);
        put_u64(&mut bytes, 160, self.target_loss_bytes_per_sec.to_bits());
        put_u64(&mut bytes, 168, self.observed_secs.to_bits());
        put_u64(&mut bytes, 176, self.chosen_unix_secs);
        put_u64(&mut bytes, 184, self.settled);
        let checksum = crc32fast::hash(&bytes[..508]);
        put_u32(&mut bytes, 508, checksum);
        bytes
    }

    /// Whether no other program has written since this header was.
    pub fn recognises(&self, superblock: &Superblock) -> bool {
        let mark = superblock.mark();
        self.geometry.uuid == superblock.uuid()
            && (mark == self.mark_after || mark == self.mark_before)
    }
}
