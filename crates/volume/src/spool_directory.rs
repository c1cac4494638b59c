//! Where a spool keeps its files.

use std::io;

use atoll_env::BoxFuture;
use bytes::Bytes;

/// A directory of files on this machine's disk, which one spool uses at a time.
pub trait SpoolDirectory: Send + Sync + 'static {
    /// The names of all files.
    fn list(&self) -> BoxFuture<'static, io::Result<Vec<String>>>;

    /// A file as a whole.
    fn read(&self, name: String) -> BoxFuture<'static, io::Result<Bytes>>;

    /// Appends to a file, which is made if it is not there.
    fn append(&self, name: String, bytes: Bytes) -> BoxFuture<'static, io::Result<()>>;

    /// Resolves when what was appended survives a crash of the machine.
    fn sync(&self, name: String) -> BoxFuture<'static, io::Result<()>>;

    /// Replaces a file as a whole: after a crash it is the old one or the new one. Durable when
    /// it resolves.
    fn replace(&self, name: String, bytes: Bytes) -> BoxFuture<'static, io::Result<()>>;

    /// Removes a file, if it is there.
    fn remove(&self, name: String) -> BoxFuture<'static, io::Result<()>>;

    /// Appends to the swap file, which need not survive this process; returns where.
    fn swap_out(&self, bytes: Bytes) -> BoxFuture<'static, io::Result<u64>>;

    /// Reads from the swap file.
    fn swap_in(&self, offset: u64, len: u32) -> BoxFuture<'static, io::Result<Bytes>>;

    /// Empties the swap file.
    fn swap_clear(&self) -> BoxFuture<'static, io::Result<()>>;

    /// Moves files, those of them that are there, into a new directory of their own, durably; returns
    /// its name.
    fn set_aside(&self, names: Vec<String>) -> BoxFuture<'static, io::Result<String>>;
}
