//! What can go wrong while reading, and how the kernel is told.

use atoll_dht::GetError;
use atoll_key::BlockHash;
use atoll_vfs::Errno;

use crate::blocks::error::BlockError;
use crate::format::FormatError;
use crate::owned::sealed_root::RootError;

/// Why a volume could not be opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// No node has the root block: its lease has run out, or it never was on this ring.
    #[error("the volume's lease has run out or it was never published: {0}")]
    Gone(GetError),
    /// Its owner has removed it.
    #[error("the volume was removed by its owner")]
    Removed,
    /// The ring cannot be asked for the root.
    #[error("the volume's root: {0}")]
    Fetch(GetError),
    /// The root cannot be read: it is nonsense, or the read key is wrong or missing.
    #[error(transparent)]
    Root(#[from] RootError),
    /// A state was asked for that is older than all that are kept.
    #[error("no state that old is kept")]
    NotKept {
        /// When the oldest one that is kept was published, milliseconds since 1970.
        oldest_unix_ms: u64,
    },
    /// The old states cannot be read.
    #[error("the volume's history cannot be read: {0}")]
    History(ReadError),
}

impl From<GetError> for OpenError {
    fn from(error: GetError) -> OpenError {
        match error {
            GetError::NotFound { .. } => OpenError::Gone(error),
            GetError::Unavailable { .. } => OpenError::Fetch(error),
            GetError::Removed { .. } => OpenError::Removed,
        }
    }
}

/// Why something in a volume could not be read. Paths are relative to the volume's root.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// There is no such name.
    #[error("{path}: no such file or directory")]
    NoSuchEntry {
        /// Which.
        path: String,
    },
    /// Something other than a directory where one is needed.
    #[error("{path}: not a directory")]
    NotADirectory {
        /// Which.
        path: String,
    },
    /// Something other than a regular file where one is needed.
    #[error("{path}: not a regular file")]
    NotAFile {
        /// Which.
        path: String,
    },
    /// A path that says `..`.
    #[error("{path}: a path in a volume cannot go up")]
    GoesUp {
        /// Which.
        path: String,
    },
    /// The block cannot be fetched.
    #[error("{path}: {source}")]
    Fetch {
        /// What it belongs to.
        path: String,
        /// Which block, and what the ring said.
        source: GetError,
    },
    /// No node has the block, nor the volume's root any more: the volume's lease has run out
    /// (CFS §3.1).
    #[error(
        "{path}: the volume's lease has run out, and this was not read before; its publisher \
         brings it back with `atoll renew`: {source}"
    )]
    Expired {
        /// What it belongs to.
        path: String,
        /// Which block, and what the ring said.
        source: GetError,
    },
    /// The publisher signed nonsense.
    #[error("{path}: block {hash} is bad: {source}")]
    Bad {
        /// What it belongs to.
        path: String,
        /// Which block.
        hash: BlockHash,
        /// What is wrong with it.
        source: FormatError,
    },
}

impl ReadError {
    /// As the kernel understands it. A block that no node has, or that cannot be used, is an I/O
    /// error; one that some node could not be asked for may come back: `ETIMEDOUT`. A file that is
    /// gone because the whole volume has expired is `ESTALE` ("Stale file handle") rather than
    /// `EIO`, which people take for a broken disk: what the mount refers to is not there any more,
    /// as an NFS server says it. (The kernel then looks the path up once again, which costs a
    /// question and helps if the lease was renewed meanwhile.)
    pub fn errno(&self) -> Errno {
        match self {
            ReadError::NoSuchEntry { .. } => Errno::ENOENT,
            ReadError::NotADirectory { .. } => Errno::ENOTDIR,
            ReadError::NotAFile { .. } | ReadError::GoesUp { .. } => Errno::EINVAL,
            ReadError::Fetch { source, .. } => match source {
                GetError::Unavailable { .. } => Errno::ETIMEDOUT,
                GetError::NotFound { .. } | GetError::Removed { .. } => Errno::EIO,
            },
            ReadError::Expired { .. } => Errno::ESTALE,
            ReadError::Bad { source: FormatError::TooDeep, .. } => Errno::ELOOP,
            ReadError::Bad { .. } => Errno::EIO,
        }
    }
}

/// A path as messages and logs show it: `/` for the root; characters that would end a line or
/// control a terminal are escaped.
pub(crate) fn shown_path(path: &[u8]) -> String {
    let steers =
        |c: char| c.is_control() || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let mut shown = String::from("/");
    for c in String::from_utf8_lossy(path).chars() {
        if steers(c) { shown.extend(c.escape_default()) } else { shown.push(c) }
    }
    shown
}

impl BlockError {
    /// The same, said of `path`.
    pub(crate) fn at(self, path: &[u8]) -> ReadError {
        let path = shown_path(path);
        match self {
            BlockError::Fetch(source) => ReadError::Fetch { path, source },
            BlockError::Bad { hash, source } => ReadError::Bad { path, hash, source },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names are the publisher's choice, and these texts go into the logs of mounts.
    #[test]
    fn a_name_cannot_forge_a_line_of_a_log() {
        let shown = shown_path("a\n2026 ERROR forged\x1b[2J/\u{9b}b/\u{e9} \\".as_bytes());
        assert_eq!(shown, "/a\\n2026 ERROR forged\\u{1b}[2J/\\u{9b}b/\u{e9} \\");
    }
}
