//! The few calls through which a store touches its disk.
//!
//! [`RealDisk`] is a directory of the operating system; [`FaultyDisk`] is a
//! deterministic double in memory that loses power, rots, fills up and fails. The
//! segment log and the redb index both go through here, so crash tests cover the two
//! together.
//!
//! What the store relies on, and all it relies on: a write is visible to reads at once;
//! it survives power loss only after `sync` of its file; before that any part of it may
//! or may not survive, in units of a 512-byte sector; a file's name survives only after
//! `sync_dir`; bytes never written read as zeros.

mod faulty;
mod real;

use std::any::Any;
use std::fmt::Debug;
use std::io::{self, IoSlice};
use std::sync::Arc;

pub use faulty::{FaultyDisk, Operation};
pub use real::RealDisk;

/// A directory of files.
pub trait Disk: Debug + Send + Sync + 'static {
    /// Takes the directory for this process, until the guard is dropped.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if another process holds it; the message says which.
    fn lock(&self) -> io::Result<Box<dyn Any + Send + Sync>>;

    /// Makes an empty file; fails if it exists.
    fn create(&self, name: &str) -> io::Result<Arc<dyn DiskFile>>;

    /// Opens a file for reading and writing; fails if it does not exist.
    fn open(&self, name: &str) -> io::Result<Arc<dyn DiskFile>>;

    /// Removes a file. Handles that are open stay readable.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Renames a file, replacing `to` if it exists.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// The names of all files, in order.
    fn list(&self) -> io::Result<Vec<String>>;

    /// Makes creations, removals and renamings durable.
    fn sync_dir(&self) -> io::Result<()>;

    /// Bytes that can still be written before the medium is full.
    fn free_bytes(&self) -> io::Result<u64>;

    /// 64 bits that cannot be guessed outside this machine (a double may draw them from its seed).
    fn random_u64(&self) -> io::Result<u64>;

    /// The time, seconds since 1970, for what people are told.
    fn unix_secs(&self) -> u64;
}

/// A file, usable from many threads at once.
// A file that is empty is no special case here.
#[allow(clippy::len_without_is_empty)]
pub trait DiskFile: Debug + Send + Sync + 'static {
    /// Its length, bytes.
    fn len(&self) -> io::Result<u64>;

    /// Writes `parts` one after another from `offset` on, all of them or fails; what is
    /// in the file's range after a failure is undefined.
    fn write_at(&self, offset: u64, parts: &mut [IoSlice<'_>]) -> io::Result<()>;

    /// Reads from `offset` until `buffer` is full or the file ends; returns how much.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize>;

    /// Fills `buffer` from `offset` if that needs no waiting for the medium; returns
    /// whether it did. `false` says nothing of the bytes: ask [`DiskFile::read_at`].
    fn read_cached(&self, offset: u64, buffer: &mut [u8]) -> io::Result<bool>;

    /// Drops what is cached of a range, so that the next read asks the medium. A hint.
    fn forget_cached(&self, offset: u64, len_bytes: u64);

    /// Cuts the file off or lengthens it with zeros.
    fn set_len(&self, len_bytes: u64) -> io::Result<()>;

    /// Makes everything written so far durable.
    fn sync(&self) -> io::Result<()>;
}

/// Whether `error` says that the medium is full.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge
    )
}
