//! A directory of the operating system.

use std::any::Any;
use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{Advice, FlockOperation, fadvise, fdatasync, flock, statvfs};
use rustix::io::{Errno, ReadWriteFlags, preadv2, pwritev};

use super::{Disk, DiskFile};

const LOCK_NAME: &str = "lock";

/// Parts handed to the kernel in one call; Linux takes at most 1,024 (`UIO_MAXIOV`).
const MAX_PARTS: usize = 1024;

/// A directory of the operating system.
#[derive(Debug)]
pub struct RealDisk {
    dir: PathBuf,
}

impl RealDisk {
    /// Uses the directory `dir`, making it (mode 0700) if it does not exist.
    pub fn new(dir: &Path) -> io::Result<RealDisk> {
        use std::os::unix::fs::DirBuilderExt;
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        Ok(RealDisk { dir: dir.to_path_buf() })
    }

    fn open_with(&self, name: &str, options: &mut OpenOptions) -> io::Result<Arc<dyn DiskFile>> {
        let file = options.read(true).write(true).open(self.dir.join(name))?;
        Ok(Arc::new(RealFile { file, cached_reads: AtomicBool::new(true) }))
    }
}

impl Disk for RealDisk {
    fn lock(&self) -> io::Result<Box<dyn Any + Send + Sync>> {
        let path = self.dir.join(LOCK_NAME);
        let mut file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                let mut holder = String::new();
                let _ = (&file).take(32).read_to_string(&mut holder);
                let message = format!("held by process {}", holder.trim());
                return Err(io::Error::new(io::ErrorKind::WouldBlock, message));
            }
            Err(error) => return Err(error.into()),
        }
        file.set_len(0)?;
        writeln!(file, "{}", std::process::id())?;
        Ok(Box::new(file))
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        self.open_with(name, OpenOptions::new().create_new(true))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        self.open_with(name, &mut OpenOptions::new())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        std::fs::remove_file(self.dir.join(name))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        std::fs::rename(self.dir.join(from), self.dir.join(to))
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&self.dir)? {
            // A name that is not UTF-8 is none of ours.
            if let Ok(name) = entry?.file_name().into_string() {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }

    fn sync_dir(&self) -> io::Result<()> {
        File::open(&self.dir)?.sync_all()
    }

    fn free_bytes(&self) -> io::Result<u64> {
        let stat = statvfs(&self.dir)?;
        Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
    }

    fn random_u64(&self) -> io::Result<u64> {
        let mut bytes = [0; 8];
        File::open("/dev/urandom")?.read_exact(&mut bytes)?;
        Ok(u64::from_be_bytes(bytes))
    }

    #[allow(clippy::disallowed_methods)] // Nothing is decided by it.
    fn unix_secs(&self) -> u64 {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.map_or(0, |since| since.as_secs())
    }
}

#[derive(Debug)]
struct RealFile {
    file: File,
    /// Whether this file system knows reads that do not wait; found out by trying.
    cached_reads: AtomicBool,
}

impl DiskFile for RealFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    fn write_at(&self, mut offset: u64, mut parts: &mut [IoSlice<'_>]) -> io::Result<()> {
        IoSlice::advance_slices(&mut parts, 0);
        while !parts.is_empty() {
            match pwritev(&self.file, &parts[..parts.len().min(MAX_PARTS)], offset) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => {
                    offset += written as u64;
                    IoSlice::advance_slices(&mut parts, written);
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let mut filled = 0;
        while filled < buffer.len() {
            match self.file.read_at(&mut buffer[filled..], offset + filled as u64) {
                Ok(0) => break,
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(filled)
    }

    fn read_cached(&self, offset: u64, buffer: &mut [u8]) -> io::Result<bool> {
        if !self.cached_reads.load(Ordering::Relaxed) {
            return Ok(false);
        }
        let want = buffer.len();
        let parts = &mut [IoSliceMut::new(buffer)];
        match preadv2(&self.file, parts, offset, ReadWriteFlags::NOWAIT) {
            Ok(read) => Ok(read == want),
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
                self.cached_reads.store(false, Ordering::Relaxed);
                Ok(false)
            }
            // Not cached, interrupted or failing: the waiting read will tell.
            Err(_) => Ok(false),
        }
    }

    fn forget_cached(&self, offset: u64, len_bytes: u64) {
        let _ = fadvise(&self.file, offset, std::num::NonZeroU64::new(len_bytes), Advice::DontNeed);
    }

    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        self.file.set_len(len_bytes)
    }

    fn sync(&self) -> io::Result<()> {
        Ok(fdatasync(&self.file)?)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A disk that said `synced` without asking the system would pass all tests and lose acknowledged blocks with the
    /// machine's power. Of a device that cannot make anything durable the system says so: the error is proof of the call.
    #[test]
    fn a_sync_asks_the_operating_system() -> io::Result<()> {
        let place = tempfile::tempdir()?;
        let path = place.path().join("disk");
        let disk = RealDisk::new(&path)?;
        disk.create("file")?.sync()?;
        disk.sync_dir()?;
        symlink("/dev/null", path.join("device"))?;
        let refused = disk.open("device")?.sync();
        assert_eq!(refused.expect_err("fdatasync").kind(), io::ErrorKind::InvalidInput);
        std::fs::rename(&path, place.path().join("aside"))?;
        symlink("/dev/null", &path)?;
        let refused = disk.sync_dir();
        assert_eq!(refused.expect_err("fsync").kind(), io::ErrorKind::InvalidInput);
        Ok(())
    }
}
