//! The few calls through which TFS touches its disk.
//!
//! [`ImageDevice`] is an image file or a block device; [`FaultyDevice`] is a double in
//! memory that loses power and fails, the same way for the same seed.
//!
//! What TFS relies on, and all it relies on: a write is visible to reads at once; it
//! survives power loss only after [`Device::sync`]; before that any part of it may or may
//! not survive, in units of a 512-byte sector, and in any order with other writes.

mod faulty;
mod image;

use std::fmt::Debug;
use std::io;

pub use faulty::FaultyDevice;
pub use image::{ImageDevice, OpenDeviceError};

/// A row of bytes of fixed length, usable from many threads at once.
pub trait Device: Debug + Send + Sync + 'static {
    /// Its length, bytes.
    fn len_bytes(&self) -> u64;

    /// Fills `buffer` from `offset`; a range beyond the end fails.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()>;

    /// Writes all of `data` at `offset`; a range beyond the end fails.
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()>;

    /// Makes sure that writes to this range find room, where that is not certain by itself.
    fn reserve(&self, offset: u64, len: u64) -> io::Result<()> {
        check_range(self.len_bytes(), offset, usize::try_from(len).unwrap_or(usize::MAX))
    }

    /// Makes everything written so far durable.
    fn sync(&self) -> io::Result<()>;
}

/// Refuses a range that does not lie within the device.
fn check_range(device_len_bytes: u64, offset: u64, len: usize) -> io::Result<()> {
    match offset.checked_add(len as u64) {
        Some(end) if end <= device_len_bytes => Ok(()),
        _ => Err(io::Error::new(
            io::ErrorKind::UnexpectedEof,
            format!("{len} bytes at {offset} are beyond the device's {device_len_bytes}"),
        )),
    }
}
