//! Opens that the gateway keeps for clients: NFS reads and writes by handle, and says neither when it begins nor when it ends.
//!
//! A file is opened at its first READ, WRITE or COMMIT, and closed when nothing has used it for [`IDLE`], when its last name is
//! removed through this gateway, or when [`MAX_OPENS`] others are used more. Before it is closed it is flushed: what a client has
//! written is then seen by those who open the file elsewhere (close-to-open, with [`IDLE`] or a COMMIT for the close).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use atoll_vfs::{Attr, Caller, Errno, FileSystem, FileTime, Handle, InodeNumber, OpenFlags};

/// How long a file stays open after its last use.
pub(super) const IDLE: Duration = Duration::from_secs(2);
/// Most files that are kept open.
pub(super) const MAX_OPENS: usize = 1024;

/// What is told of a flush that failed: its bytes may be lost.
type Lost = Arc<dyn Fn() + Send + Sync>;

/// An open file. Closed when nobody has it.
pub(super) struct OpenFile {
    fs: Arc<dyn FileSystem>,
    inode: InodeNumber,
    pub(super) handle: Handle,
    writes: bool,
    lost: Lost,
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        let (fs, inode, handle, writes) = (self.fs.clone(), self.inode, self.handle, self.writes);
        let lost = self.lost.clone();
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        runtime.spawn(async move {
            if writes && let Err(error) = flush(&*fs, inode, handle).await {
                tracing::warn!(inode = inode.0, %error, "a file that a client wrote could not be flushed");
                lost();
            }
            let _ = fs.close(inode, handle).await;
        });
    }
}

/// Lets others see what was written.
pub(super) async fn flush(
    fs: &dyn FileSystem,
    inode: InodeNumber,
    handle: Handle,
) -> Result<(), Errno> {
    match fs.flush(inode, handle).await {
        Err(Errno::ENOSYS) => Ok(()),
        flushed => flushed,
    }
}

struct Kept {
    file: Arc<OpenFile>,
    used: Instant,
    /// Length and times of the file when it was opened.
    version: Version,
}

/// What tells that a file has changed.
type Version = (u64, FileTime, FileTime);

fn version(attr: &Attr) -> Version {
    (attr.size_bytes, attr.mtime, attr.ctime)
}

/// The opens of one gateway, by export and number.
pub(super) struct Opens {
    kept: Mutex<BTreeMap<(u64, InodeNumber), Kept>>,
    lost: Lost,
}

impl Opens {
    pub(super) fn new(lost: Lost) -> Opens {
        Opens { kept: Mutex::default(), lost }
    }

    fn locked(&self) -> MutexGuard<'_, BTreeMap<(u64, InodeNumber), Kept>> {
        self.kept.lock().expect("no holder of this lock panics")
    }

    /// The file, open for reading, and for writing if it `writes`. The caller holds the number, and has just found these
    /// attributes: one that was opened for reading alone may go on with what it was then, and is opened anew if it has changed.
    pub(super) async fn get(
        &self,
        export: u64,
        fs: &Arc<dyn FileSystem>,
        caller: Caller,
        attr: &Attr,
        writes: bool,
    ) -> Result<Arc<OpenFile>, Errno> {
        let (inode, version) = (attr.inode, version(attr));
        let is_current = |kept: &Kept| kept.file.writes || !writes && kept.version == version;
        if let Some(kept) = self.locked().get_mut(&(export, inode))
            && is_current(kept)
        {
            kept.used = Instant::now();
            return Ok(kept.file.clone());
        }
        let flags = if writes { OpenFlags::READ_WRITE } else { OpenFlags::READ };
        let opened = fs.open(caller, inode, flags).await?;
        let file = Arc::new(OpenFile {
            fs: fs.clone(),
            inode,
            handle: opened.handle,
            writes,
            lost: self.lost.clone(),
        });
        let mut kept = self.locked();
        // Another call may have opened it meanwhile; one that writes serves both.
        let entry = kept.entry((export, inode)).or_insert_with(|| Kept {
            file: file.clone(),
            used: Instant::now(),
            version,
        });
        let replaced = (!is_current(entry)).then(|| {
            entry.version = version;
            std::mem::replace(&mut entry.file, file.clone())
        });
        let file = if entry.file.writes || !writes { entry.file.clone() } else { file };
        let dropped = if kept.len() > MAX_OPENS {
            let oldest = kept.iter().min_by_key(|(_, kept)| kept.used).map(|(at, _)| *at);
            oldest.and_then(|oldest| kept.remove(&oldest))
        } else {
            None
        };
        drop(kept);
        drop((replaced, dropped));
        Ok(file)
    }

    /// Closes a file whose last name is gone.
    pub(super) fn forget(&self, export: u64, inode: InodeNumber) {
        let forgotten = self.locked().remove(&(export, inode));
        drop(forgotten);
    }

    /// Closes what has not been used for [`IDLE`]; all of it if `all`.
    pub(super) fn close_idle(&self, all: bool) {
        let now = Instant::now();
        let mut idle = Vec::new();
        self.locked().retain(|_, kept| {
            let stays = !all && now.duration_since(kept.used) < IDLE;
            if !stays {
                idle.push(kept.file.clone());
            }
            stays
        });
    }
}
