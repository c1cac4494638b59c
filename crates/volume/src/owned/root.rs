//! The payload of a volume's signed root block. In an encrypted volume the payload is sealed
//! ([`sealed_root`](super::sealed_root)).
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 4 | magic `ATVR` |
//! | 4 | 1 | layout, 1 |
//! | 5 | 1 | size of data blocks the publisher chose, as a power of two: 12 to 20 |
//! | 6 | 2 | mode of the root directory |
//! | 8 | 12 | time of its modification: seconds, nanoseconds |
//! | 20 | 8 | when this was published, milliseconds since 1970 |
//! | 28 | 8 × 4 | regular files, directories (with the root), symbolic links, bytes of all files |
//! | 60 | 16 | entries of the root directory, how many of them are directories |
//! | 76 | 0 or 32 | hash of its top block, unless it is empty |
//! | … | 0 or more | fields: 1 tag, 2 length, value; tags strictly ascending |
//!
//! Fields: tag 1 the volume's label (UTF-8, 1 to 255 bytes), tag 2 the hash of the root
//! directory's xattr block. A reader skips an unknown tag below 128 and refuses the volume
//! for one of 128 or above, so that later versions can add what may be ignored and what
//! may not.
//!
//! The totals are the publisher's word; nothing is allocated by them.

use atoll_key::BlockHash;
use atoll_vfs::FileTime;
use bytes::Bytes;

use crate::format::cursor::{Cursor, put_header, put_mode, put_time, put_u64};
use crate::format::directory::{
    Content, DirectoryEntry, DirectoryRef, put_directory, take_directory,
};
use crate::format::{FormatError, check_block_size};

pub(super) const MAGIC: &[u8; 4] = b"ATVR";
const NAME: &str = "volume root";

const TAG_LABEL: u8 = 1;
const TAG_XATTRS: u8 = 2;
const FIRST_REQUIRED_TAG: u8 = 128;

/// The longest label, bytes.
pub const MAX_LABEL_BYTES: usize = 255;

/// What a publisher signs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Root {
    /// Size of data blocks, as a power of two. Each inode block names its own.
    pub block_size_log2: u8,
    /// Mode of the root directory.
    pub mode: u32,
    /// When the root directory changed.
    pub mtime: FileTime,
    /// When this version was published, milliseconds since 1970.
    pub published_unix_ms: u64,
    /// Regular files in the tree.
    pub files: u64,
    /// Directories in the tree, the root included.
    pub dirs: u64,
    /// Symbolic links in the tree.
    pub symlinks: u64,
    /// Lengths of all regular files.
    pub bytes: u64,
    /// The root directory.
    pub directory: DirectoryRef,
    /// A name for people.
    pub label: Option<String>,
    /// The root directory's extended attributes.
    pub xattrs: Option<BlockHash>,
}

impl Root {
    /// The payload's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(160);
        put_header(&mut out, MAGIC);
        out.push(self.block_size_log2);
        put_mode(&mut out, self.mode);
        put_time(&mut out, self.mtime);
        for number in [self.published_unix_ms, self.files, self.dirs, self.symlinks, self.bytes] {
            put_u64(&mut out, number);
        }
        put_directory(&mut out, &self.directory);
        if let Some(label) = &self.label {
            put_field(&mut out, TAG_LABEL, label.as_bytes());
        }
        if let Some(hash) = &self.xattrs {
            put_field(&mut out, TAG_XATTRS, &hash.0);
        }
        out
    }

    /// Reads a payload.
    pub fn decode(payload: &Bytes) -> Result<Root, FormatError> {
        let mut cursor = Cursor::header(payload, MAGIC, NAME)?;
        let block_size_log2 = cursor.u8()?;
        check_block_size(block_size_log2)?;
        let mut root = Root {
            block_size_log2,
            mode: cursor.mode()?,
            mtime: cursor.time()?,
            published_unix_ms: cursor.u64()?,
            files: cursor.u64()?,
            dirs: cursor.u64()?,
            symlinks: cursor.u64()?,
            bytes: cursor.u64()?,
            directory: take_directory(&mut cursor)?,
            label: None,
            xattrs: None,
        };
        let mut last_tag = 0;
        while cursor.len() > 0 {
            let tag = cursor.u8()?;
            let len = usize::from(cursor.u16()?);
            let value = cursor.take(len)?;
            if tag <= last_tag {
                return Err(FormatError::BadReference("the root's fields are out of order"));
            }
            last_tag = tag;
            root.take_field(tag, &value)?;
        }
        Ok(root)
    }

    fn take_field(&mut self, tag: u8, value: &Bytes) -> Result<(), FormatError> {
        match tag {
            TAG_LABEL => {
                let text = std::str::from_utf8(value)
                    .map_err(|_| FormatError::BadReference("the label is not text"))?;
                if text.is_empty() || text.len() > MAX_LABEL_BYTES {
                    return Err(FormatError::BadReference("the label is empty or too long"));
                }
                self.label = Some(text.to_string());
            }
            TAG_XATTRS => {
                let hash = value[..]
                    .try_into()
                    .map_err(|_| FormatError::BadReference("the xattr reference is no hash"))?;
                if hash == [0; 32] {
                    return Err(FormatError::BadReference("the hash of the xattr block is zero"));
                }
                self.xattrs = Some(BlockHash(hash));
            }
            FIRST_REQUIRED_TAG.. => return Err(FormatError::UnknownFeature(tag)),
            _ => {}
        }
        Ok(())
    }

    /// The root directory as an entry with an empty name.
    pub fn entry(&self) -> DirectoryEntry {
        DirectoryEntry {
            name: Bytes::new(),
            mode: self.mode,
            mtime: self.mtime,
            content: Content::Directory(self.directory),
            xattrs: self.xattrs,
        }
    }
}

fn put_field(out: &mut Vec<u8>, tag: u8, value: &[u8]) {
    out.push(tag);
    out.extend_from_slice(&(value.len() as u16).to_be_bytes());
    out.extend_from_slice(value);
}
