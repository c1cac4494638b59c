//! Why a store could not be opened, and its index not be used.

use std::any::Any;
use std::io;

use crate::disk::Disk;

/// Why a store could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another process has it open.
    #[error("the store is in use: {0}")]
    Locked(String),
    /// Written by another version of this program, which alone should touch it.
    #[error(
        "{name} was written by another version of Atoll (layout {layout}): use that version, \
         or begin with an empty directory"
    )]
    OtherLayout {
        /// The file.
        name: String,
        /// Its layout.
        layout: u64,
    },
    /// The disk failed.
    #[error("cannot open the store: {0}")]
    Io(#[from] io::Error),
    /// The index could not be opened, nor a new one be made.
    #[error("cannot open the store: {0}")]
    Index(IndexFailure),
}

/// What was wrong with the index.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct IndexFailure(pub(crate) IndexError);

impl From<IndexError> for OpenError {
    fn from(error: IndexError) -> OpenError {
        match error {
            IndexError::OtherLayout { name, layout } => {
                OpenError::OtherLayout { name: name.to_owned(), layout }
            }
            error => OpenError::Index(IndexFailure(error)),
        }
    }
}

/// Takes a store's directory for this process, until the guard is dropped.
pub(crate) fn lock(disk: &dyn Disk) -> Result<Box<dyn Any + Send + Sync>, OpenError> {
    disk.lock().map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => OpenError::Locked(error.to_string()),
        _ => OpenError::Io(error),
    })
}

/// Why the index could not be read or written; the log knows everything it held.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum IndexError {
    /// What is in it makes no sense: it must be made again.
    #[error("the index is damaged: {0}")]
    Damaged(String),
    /// Written by another version of this program.
    #[error("{name} has layout {layout}")]
    OtherLayout { name: &'static str, layout: u64 },
    /// The disk failed; the index may be fine.
    #[error("the index cannot be reached: {0}")]
    Io(String),
}

impl From<io::Error> for IndexError {
    fn from(error: io::Error) -> IndexError {
        match error.kind() {
            io::ErrorKind::InvalidData
            | io::ErrorKind::InvalidInput
            | io::ErrorKind::UnexpectedEof => IndexError::Damaged(error.to_string()),
            _ => IndexError::Io(error.to_string()),
        }
    }
}

impl From<redb::Error> for IndexError {
    fn from(error: redb::Error) -> IndexError {
        match error {
            redb::Error::Io(error) => error.into(),
            redb::Error::PreviousIo | redb::Error::DatabaseClosed => {
                IndexError::Io(error.to_string())
            }
            _ => IndexError::Damaged(error.to_string()),
        }
    }
}

macro_rules! index_error_from {
    ($($error:ty),*) => { $(
        impl From<$error> for IndexError {
            fn from(error: $error) -> IndexError {
                redb::Error::from(error).into()
            }
        }
    )* };
}

index_error_from!(
    redb::CommitError,
    redb::DatabaseError,
    redb::StorageError,
    redb::TableError,
    redb::TransactionError
);
