//! Tells the kernel what it must no longer believe.
//!
//! A notification waits within the kernel for requests under way: that of a name for its
//! directory's lock, that of bytes for reads of their pages and for changed ones to be written
//! back. So they are sent by a thread of their own, which holds no lock and serves no requests.
//!
//! A name is *expired*: the kernel asks what it stands for before it uses it again, and drops it if that is another file.
//! Dropped at once, as fuser's notification has it, a directory would have no path any more for programs that
//! work in it (`getcwd(2)` fails), although nothing happened to it. Linux before 6.2 does not know the difference.

use std::ffi::OsStr;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use atoll_vfs::{InodeNumber, Invalidation, InvalidationQueue};
use fuser::{INodeNo, Notifier};
use tokio::runtime::Handle;
use tokio::sync::watch;

/// The offset by which `FUSE_NOTIFY_INVAL_INODE` leaves cached pages alone.
const ATTRIBUTES_ONLY: i64 = -1;

/// Linux `include/uapi/linux/fuse.h`: `FUSE_NOTIFY_INVAL_ENTRY`.
const NAME_CHANGED: i32 = 3;
/// Its flag `FUSE_EXPIRE_ONLY`.
const EXPIRE_ONLY: u32 = 1;
/// Bytes of `struct fuse_out_header` and `struct fuse_notify_inval_entry_out`.
const NAME_HEADER_BYTES: usize = 16 + 16;

/// The kernel asks for an inode's attributes before it shows them again. Unlike other notifications this one
/// waits for nothing, so a request may send it before its caller goes on.
pub(super) fn forget_attributes(notifier: Option<&Notifier>, inode: InodeNumber) {
    if let Some(notifier) = notifier
        && let Err(error) = notifier.inval_inode(INodeNo(inode.0), ATTRIBUTES_ONLY, 0)
    {
        tracing::debug!(%error, "the kernel keeps old attributes");
    }
}

/// Forwards what comes from `queue` to the mount of `device`, until `ended` holds something.
pub(super) fn forward<T: Send + Sync + 'static>(
    queue: Arc<InvalidationQueue>,
    notifier: Notifier,
    device: OwnedFd,
    mut ended: watch::Receiver<Option<T>>,
    handle: Handle,
) -> io::Result<()> {
    let work = move || loop {
        let next = handle.block_on(async {
            tokio::select! {
                next = queue.next() => Some(next),
                _ = ended.wait_for(Option::is_some) => None,
            }
        });
        let Some(invalidation) = next else { return queue.unserved() };
        if let Err(error) = notify(&notifier, &device, &invalidation) {
            tracing::debug!(%error, ?invalidation, "the kernel did not take an invalidation");
        }
    };
    std::thread::Builder::new().name("fuse-invalidate".to_owned()).spawn(work).map(drop)
}

/// Sends one. An inode that the kernel does not know is no error.
fn notify(notifier: &Notifier, device: &OwnedFd, invalidation: &Invalidation) -> io::Result<()> {
    match invalidation {
        Invalidation::Attributes(inode) => {
            notifier.inval_inode(INodeNo(inode.0), ATTRIBUTES_ONLY, 0)
        }
        Invalidation::Data { inode, bytes } => {
            let (offset, len) = extent(bytes);
            notifier.inval_inode(INodeNo(inode.0), offset, len)
        }
        Invalidation::Name { parent, name } => {
            match rustix::io::write(device, &expired_name(*parent, name)) {
                Ok(_) | Err(rustix::io::Errno::NOENT) => Ok(()),
                Err(errno) => Err(errno.into()),
            }
        }
        Invalidation::Deleted { parent, name, inode } => {
            notifier.delete(INodeNo(parent.0), INodeNo(inode.0), OsStr::from_bytes(name))
        }
    }
}

/// The notification that a name is to be asked for again, which fuser 0.18 cannot send.
///
/// | offset | bytes | |
/// |---|---|---|
/// | 0 | 4 | length of all |
/// | 4 | 4 | what it notifies of |
/// | 8 | 8 | 0: no answer to a request |
/// | 16 | 8 | the directory |
/// | 24 | 4 | length of the name |
/// | 28 | 4 | flags |
/// | 32 | | the name, and a byte 0 |
fn expired_name(parent: InodeNumber, name: &[u8]) -> Vec<u8> {
    let len = u32::try_from(name.len()).expect("a name is short");
    let mut bytes = Vec::with_capacity(NAME_HEADER_BYTES + name.len() + 1);
    bytes.extend((NAME_HEADER_BYTES as u32 + len + 1).to_ne_bytes());
    bytes.extend(NAME_CHANGED.to_ne_bytes());
    bytes.extend(0u64.to_ne_bytes());
    bytes.extend(parent.0.to_ne_bytes());
    bytes.extend(len.to_ne_bytes());
    bytes.extend(EXPIRE_ONLY.to_ne_bytes());
    bytes.extend(name);
    bytes.push(0);
    bytes
}

/// Offset and length as the kernel takes them: no length means all that follows.
fn extent(bytes: &Range<u64>) -> (i64, i64) {
    let offset = i64::try_from(bytes.start).unwrap_or(i64::MAX);
    let len = bytes.end.saturating_sub(bytes.start);
    (offset, i64::try_from(len).ok().filter(|len| offset.checked_add(*len).is_some()).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_to_the_end_has_no_length() {
        assert_eq!(extent(&(10..25)), (10, 15));
        assert_eq!(extent(&(10..u64::MAX)), (10, 0));
        assert_eq!(extent(&(i64::MAX as u64 - 5..i64::MAX as u64 + 5)), (i64::MAX - 5, 0));
    }
}
