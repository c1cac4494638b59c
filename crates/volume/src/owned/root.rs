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
//! directory's xattr block. Of a volume that is written through mounts also: tag 3 the root
//! directory's owner (as in a directory entry), tag 4 the next inode number (8 bytes), tag 5 who
//! writes now (16 bytes that name its spool, 8 until when, milliseconds since 1970), tag 6 the
//! [history](super::history) (as the root directory: 16 and 32 bytes), tag 7 what of it is kept (2
//! bytes each for minutes, hours, days and weeks; absent: the default), tag 8 what this version has
//! of each writer's spool, the newest writer first (16 bytes that name the spool, 8 how many of its
//! records; at most [`MAX_SPOOLS`]), tag 9 the roots that
//! writers have taken over (as the root directory: 16 and 32 bytes), tag 128 the table of links (as the root directory),
//! tag 129 (no value) that all blocks are content of the volume (`key::kinds`). A reader skips an unknown tag below 128 and refuses
//! the volume for one of 128 or above, so that later versions can add what may be ignored and what
//! may not.
//!
//! The totals are the publisher's word; nothing is allocated by them.

use atoll_key::{BlockHash, VolumeCipher, VolumeId};
use atoll_vfs::FileTime;
use bytes::Bytes;

use crate::blocks::form::BlockForm;
use crate::format::cursor::{
    Cursor, put_field, put_header, put_mode, put_time, put_u64, skip_field, whole,
};
use crate::format::directory::{
    Content, DirectoryEntry, DirectoryRef, Owner, put_directory, take_directory,
};
use crate::format::{FormatError, check_block_size};
use crate::keep::Keep;

pub(super) const MAGIC: &[u8; 4] = b"ATVR";
const NAME: &str = "volume root";

const TAG_LABEL: u8 = 1;
const TAG_XATTRS: u8 = 2;
const TAG_OWNER: u8 = 3;
const TAG_NEXT_INODE: u8 = 4;
const TAG_WRITER: u8 = 5;
const TAG_HISTORY: u8 = 6;
const TAG_KEEP: u8 = 7;
const TAG_MERGED: u8 = 8;
const TAG_REPLACED: u8 = 9;
const TAG_LINKS: u8 = 128;
const TAG_OWN_BLOCKS: u8 = 129;

/// The longest label, bytes.
pub const MAX_LABEL_BYTES: usize = 255;

/// The most writers of which a root says what it has.
pub const MAX_SPOOLS: usize = 16;

/// What a publisher signs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Root {
    /// Size of data blocks, as a power of two. Each inode block names its own.
    pub block_size_log2: u8,
    /// Mode of the root directory.
    pub mode: u32,
    /// When the root directory changed.
    pub mtime: FileTime,
    /// When this tree was published, milliseconds since 1970. A root that only says again who
    /// writes the volume leaves it.
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
    /// What a volume that is written through mounts has beside that.
    pub mounted: MountState,
}

/// What mounts that write a volume keep in its root.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct MountState {
    /// The root directory's owner.
    pub owner: Option<Owner>,
    /// The number of the next file that is made; 0 if none was made through a mount.
    pub next_inode: u64,
    /// The mount that writes the volume.
    pub writer: Option<Writer>,
    /// What this version has of each writer's spool; the newest writer is the first.
    pub merged: Vec<Merged>,
    /// The table of files with several names.
    pub links: DirectoryRef,
    /// The old states that are kept.
    pub history: DirectoryRef,
    /// Which old states are kept.
    pub keep: Keep,
    /// The roots of writers that others have taken over from, as states of a history: what those writers
    /// have in their spools follows them.
    pub replaced: DirectoryRef,
    /// Whether all blocks are content of this volume, which its owner can release; else they are plain content
    /// blocks, as those of published trees.
    pub has_own_blocks: bool,
}

/// The mount that writes a volume. Another one waits until it has ended, or `until_unix_ms` has
/// passed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Writer {
    /// Names its spool.
    pub spool: [u8; 16],
    /// Until when it writes unless it says so again, milliseconds since 1970.
    pub until_unix_ms: u64,
}

/// How much of a writer's spool a version has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Merged {
    /// Names the spool.
    pub spool: [u8; 16],
    /// How many of its records.
    pub records: u64,
}

/// No spool has ever had more records, whatever a root says; later numbers can be counted on.
const MAX_RECORDS: u64 = 1 << 62;

impl MountState {
    /// How many records of a spool, which has had these names, this version has.
    pub(super) fn records_of(&self, spool: &[[u8; 16]]) -> u64 {
        let found = self.merged.iter().filter(|merged| spool.contains(&merged.spool));
        found.map(|merged| merged.records.min(MAX_RECORDS)).max().unwrap_or(0)
    }

    /// Notes that a version has so many records of a spool, whose mount puts it.
    pub(super) fn merge(&mut self, spool: [u8; 16], records: u64) {
        self.merged.retain(|merged| merged.spool != spool);
        self.merged.insert(0, Merged { spool, records });
        self.merged.truncate(MAX_SPOOLS);
    }
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
        let MountState {
            owner, next_inode, writer, merged, links, history, keep, replaced, ..
        } = &self.mounted;
        if let Some(owner) = owner {
            put_field(&mut out, TAG_OWNER, &owner.to_bytes());
        }
        if *next_inode > 0 {
            put_field(&mut out, TAG_NEXT_INODE, &next_inode.to_be_bytes());
        }
        if let Some(writer) = writer {
            let value = [&writer.spool[..], &writer.until_unix_ms.to_be_bytes()].concat();
            put_field(&mut out, TAG_WRITER, &value);
        }
        put_directory_field(&mut out, TAG_HISTORY, history);
        if *keep != Keep::default() {
            put_field(&mut out, TAG_KEEP, &keep.to_bytes());
        }
        if !merged.is_empty() {
            let values = merged.iter().map(|m| [&m.spool[..], &m.records.to_be_bytes()].concat());
            put_field(&mut out, TAG_MERGED, &values.collect::<Vec<_>>().concat());
        }
        put_directory_field(&mut out, TAG_REPLACED, replaced);
        put_directory_field(&mut out, TAG_LINKS, links);
        if self.mounted.has_own_blocks {
            put_field(&mut out, TAG_OWN_BLOCKS, &[]);
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
            mounted: MountState::default(),
        };
        cursor.fields(|tag, value| root.take_field(tag, value))?;
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
            TAG_OWNER => self.mounted.owner = Some(whole(value, Owner::decode)?),
            TAG_NEXT_INODE => self.mounted.next_inode = whole(value, Cursor::u64)?,
            TAG_WRITER => self.mounted.writer = Some(whole(value, take_writer)?),
            TAG_HISTORY => self.mounted.history = whole(value, take_directory)?,
            TAG_KEEP => self.mounted.keep = whole(value, Keep::take)?,
            TAG_MERGED => self.mounted.merged = whole(value, take_merged)?,
            TAG_REPLACED => self.mounted.replaced = whole(value, take_directory)?,
            TAG_OWN_BLOCKS if value.is_empty() => self.mounted.has_own_blocks = true,
            TAG_LINKS => self.mounted.links = whole(value, take_directory)?,
            tag => return skip_field(tag),
        }
        Ok(())
    }

    /// How the ring has the blocks of this volume.
    pub(crate) fn form(&self, volume: VolumeId, cipher: Option<VolumeCipher>) -> BlockForm {
        match self.mounted.has_own_blocks {
            true => BlockForm::of_volume(volume, cipher),
            false => BlockForm::plain(cipher),
        }
    }

    /// The root directory as an entry with an empty name.
    pub fn entry(&self) -> DirectoryEntry {
        DirectoryEntry {
            name: Bytes::new(),
            mode: self.mode,
            mtime: self.mtime,
            content: Content::Directory(self.directory),
            xattrs: self.xattrs,
            owner: self.mounted.owner,
        }
    }
}

fn take_writer(cursor: &mut Cursor) -> Result<Writer, FormatError> {
    Ok(Writer { spool: take_spool(cursor)?, until_unix_ms: cursor.u64()? })
}

fn take_merged(cursor: &mut Cursor) -> Result<Vec<Merged>, FormatError> {
    let mut merged = Vec::new();
    while cursor.len() > 0 {
        if merged.len() == MAX_SPOOLS {
            return Err(FormatError::BadReference("the root names too many writers"));
        }
        merged.push(Merged { spool: take_spool(cursor)?, records: cursor.u64()? });
    }
    Ok(merged)
}

fn take_spool(cursor: &mut Cursor) -> Result<[u8; 16], FormatError> {
    Ok(cursor.take(16)?[..].try_into().expect("16 bytes were taken"))
}

/// Writes a field that refers to a directory, unless that is empty.
fn put_directory_field(out: &mut Vec<u8>, tag: u8, directory: &DirectoryRef) {
    if directory.entries > 0 {
        let mut value = Vec::new();
        put_directory(&mut value, directory);
        put_field(out, tag, &value);
    }
}
