//! Directory blocks.
use atoll_key::BlockHash;
use atoll_vfs::{FileKind, FileTime};
use bytes::Bytes;

/// Where a directory's entries are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DirectoryRef {
    /// How many entries.
    pub entries: u64,
    /// How many of them are directories.
    pub subdirectories: u64,
    /// The top directory block; none if empty.
    pub hash: Option<BlockHash>,
}

/// What a directory says about one name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    /// The name.
    pub name: Bytes,
    /// Permission bits, `0o7777` at most.
    pub mode: u32,
    /// Last change of contents.
    pub mtime: FileTime,
    /// What it is and where its contents are.
    pub content: Content,
    /// The block of its extended attributes, if it has any.
    pub xattrs: Option<BlockHash>,
}

/// What an entry stands for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Content {
    /// A regular file.
    Regular {
        /// Length.
        size_bytes: u64,
        /// Space its data takes, in units of 512 bytes.
        blocks_512: u64,
        /// Its inode block; none if the file is empty.
        inode: Option<BlockHash>,
    },
    /// A directory.
    Directory(DirectoryRef),
    /// A symbolic link and its target.
    Symlink(Bytes),
}

impl Entry {
    /// What kind of file it is.
    pub fn kind(&self) -> FileKind {
        match self.content {
            Content::Regular { .. } => FileKind::Regular,
            Content::Directory(_) => FileKind::Directory,
            Content::Symlink(_) => FileKind::Symlink,
        }
    }

    /// Length of a file, or of a link's target; for a directory its number of entries.
    pub fn size_bytes(&self) -> u64 {
        match &self.content {
            Content::Regular { size_bytes, .. } => *size_bytes,
            Content::Directory(directory) => directory.entries,
            Content::Symlink(target) => target.len() as u64,
        }
    }
}
