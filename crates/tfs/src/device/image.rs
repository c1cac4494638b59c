//! An image file or a block device.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, FlockOperation, OFlags, fallocate, flock};
use rustix::io::Errno;
use thiserror::Error;

use super::{Device, check_range};

/// Why a device could not be opened.
#[derive(Debug, Error)]
pub enum OpenDeviceError {
    /// Another process has it.
    #[error("{} is in use: it is mounted, or another program works on it", path.display())]
    Busy {
        /// Which.
        path: PathBuf,
    },
    /// Neither a regular file nor a block device.
    #[error("{} is neither an image file nor a block device", path.display())]
    NotADevice {
        /// Which.
        path: PathBuf,
    },
    /// The operating system refused.
    #[error("{}: {error}", path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
}

/// An image file or a block device, held by this process alone: by an advisory lock, and
/// a block device by `O_EXCL`, which the kernel refuses for one that is mounted.
#[derive(Debug)]
pub struct ImageDevice {
    file: File,
    len_bytes: u64,
}

impl ImageDevice {
    /// Opens `path` for reading, and for writing unless `read_only`.
    ///
    /// # Errors
    /// [`OpenDeviceError`].
    pub fn open(path: &Path, read_only: bool) -> Result<ImageDevice, OpenDeviceError> {
        let failed = |error: io::Error| OpenDeviceError::Io { path: path.to_owned(), error };
        let busy = || OpenDeviceError::Busy { path: path.to_owned() };
        let kind = std::fs::metadata(path).map_err(failed)?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(OpenDeviceError::NotADevice { path: path.to_owned() });
        }
        let mut options = OpenOptions::new();
        options.read(true).write(!read_only);
        if kind.is_block_device() && !read_only {
            options.custom_flags(OFlags::EXCL.bits() as i32);
        }
        let mut file = options.open(path).map_err(|error| match error.raw_os_error() {
            Some(code) if code == Errno::BUSY.raw_os_error() => busy(),
            _ => failed(error),
        })?;
        let lock = if read_only {
            FlockOperation::NonBlockingLockShared
        } else {
            FlockOperation::NonBlockingLockExclusive
        };
        flock(&file, lock).map_err(|error| match error {
            Errno::WOULDBLOCK => busy(),
            error => failed(error.into()),
        })?;
        let len_bytes = file.seek(SeekFrom::End(0)).map_err(failed)?;
        Ok(ImageDevice { file, len_bytes })
    }
}

impl Device for ImageDevice {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        check_range(self.len_bytes, offset, buffer.len())?;
        self.file.read_exact_at(buffer, offset)
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        check_range(self.len_bytes, offset, data.len())?;
        self.file.write_all_at(data, offset)
    }

    fn reserve(&self, offset: u64, len: u64) -> io::Result<()> {
        match fallocate(&self.file, FallocateFlags::KEEP_SIZE, offset, len) {
            // A block device has no holes; another file system may have no such call.
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NODEV | Errno::NOSYS) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_writer_at_a_time_and_nothing_beyond_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        std::fs::write(&path, [7; 1024]).unwrap();
        let device = ImageDevice::open(&path, false).unwrap();
        assert!(matches!(ImageDevice::open(&path, false), Err(OpenDeviceError::Busy { .. })));
        assert!(matches!(ImageDevice::open(&path, true), Err(OpenDeviceError::Busy { .. })));
        device.write_at(1000, &[1; 24]).unwrap();
        assert!(device.write_at(1000, &[1; 25]).is_err());
        assert!(device.write_at(u64::MAX, &[1]).is_err());
        let mut bytes = [0; 2];
        device.read_at(999, &mut bytes).unwrap();
        assert_eq!(bytes, [7, 1]);
        assert!(device.read_at(1023, &mut bytes).is_err());
        drop(device);
        let shared = ImageDevice::open(&path, true).unwrap();
        ImageDevice::open(&path, true).unwrap();
        assert!(shared.write_at(0, &[1]).is_err(), "opened for reading only");
    }

    #[test]
    fn what_is_no_device_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(
            ImageDevice::open(dir.path(), true),
            Err(OpenDeviceError::NotADevice { .. })
        ));
        assert!(matches!(
            ImageDevice::open(&dir.path().join("none"), true),
            Err(OpenDeviceError::Io { .. })
        ));
    }

    /// Of a device that cannot make anything durable the system says so: the error is proof that it was asked.
    #[test]
    fn a_sync_asks_the_operating_system() {
        let file = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null").unwrap();
        let refused = ImageDevice { file, len_bytes: 0 }.sync();
        assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
}
