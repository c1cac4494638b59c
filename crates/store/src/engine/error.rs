//! Why a store could not be opened.

use std::any::Any;
use std::io;

use super::index::{self, IndexError};
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
            IndexError::OtherLayout(layout) => {
                OpenError::OtherLayout { name: index::FILE_NAME.to_owned(), layout }
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
