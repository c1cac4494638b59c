//! Tells the kernel what it must no longer believe.
//!
//! A notification waits within the kernel for requests under way: that of a name for its
//! directory's lock, that of bytes for reads of their pages and for changed ones to be written
//! back. So they are sent by a thread of their own, which holds no lock and serves no requests.

use std::ffi::OsStr;
use std::io;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use atoll_vfs::{InodeNumber, Invalidation, InvalidationQueue};
use fuser::{INodeNo, Notifier};
use tokio::runtime::Handle;
use tokio::sync::watch;

/// The offset by which `FUSE_NOTIFY_INVAL_INODE` leaves cached pages alone.
const ATTRIBUTES_ONLY: i64 = -1;

/// The kernel asks for an inode's attributes before it shows them again. Unlike other notifications this one
/// waits for nothing, so a request may send it before its caller goes on.
pub(super) fn forget_attributes(notifier: Option<&Notifier>, inode: InodeNumber) {
    if let Some(notifier) = notifier
        && let Err(error) = notifier.inval_inode(INodeNo(inode.0), ATTRIBUTES_ONLY, 0)
    {
        tracing::debug!(%error, "the kernel keeps old attributes");
    }
}

/// Forwards what comes from `queue`, until `ended` holds something.
pub(super) fn forward<T: Send + Sync + 'static>(
    queue: Arc<InvalidationQueue>,
    notifier: Notifier,
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
        if let Err(error) = notify(&notifier, &invalidation) {
            tracing::debug!(%error, ?invalidation, "the kernel did not take an invalidation");
        }
    };
    std::thread::Builder::new().name("fuse-invalidate".to_owned()).spawn(work).map(drop)
}

/// Sends one. An inode that the kernel does not know is no error.
fn notify(notifier: &Notifier, invalidation: &Invalidation) -> io::Result<()> {
    match invalidation {
        Invalidation::Attributes(inode) => {
            notifier.inval_inode(INodeNo(inode.0), ATTRIBUTES_ONLY, 0)
        }
        Invalidation::Data { inode, bytes } => {
            let (offset, len) = extent(bytes);
            notifier.inval_inode(INodeNo(inode.0), offset, len)
        }
        Invalidation::Name { parent, name } => {
            notifier.inval_entry(INodeNo(parent.0), OsStr::from_bytes(name))
        }
        Invalidation::Deleted { parent, name, inode } => {
            notifier.delete(INodeNo(parent.0), INodeNo(inode.0), OsStr::from_bytes(name))
        }
    }
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
