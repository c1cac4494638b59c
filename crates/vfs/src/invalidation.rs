//! What a front end must no longer believe: changes that come from below, made by another node
//! or through another mount, and not by a call of this front end.
//!
//! The file system pushes an [`Invalidation`] after the change can be seen by calls; one front
//! end takes them and drops what it (for FUSE: the kernel) has cached. An invalidation says "ask
//! again", so several about one file or one name are merged, and their order means nothing. The
//! queue therefore holds at most one for each file and one for each name.
//!
//! A file system that must not answer before the front end has dropped something waits for it
//! ([`InvalidationQueue::settled`]). What was taken counts as dropped when the front end asks for
//! the next and there is none.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use atoll_env::Notify;
use bytes::Bytes;

use crate::types::InodeNumber;

/// Something that may have changed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Invalidation {
    /// The attributes of a file.
    Attributes(InodeNumber),
    /// Bytes of a file, and its attributes.
    Data {
        /// Which file.
        inode: InodeNumber,
        /// Which bytes; `u64::MAX` ends those to the end of the file.
        bytes: Range<u64>,
    },
    /// What a name stands for, if anything.
    Name {
        /// The directory.
        parent: InodeNumber,
        /// The name in it.
        name: Bytes,
    },
    /// As `Name`: it stood for this file, whose last name it was. Programs that watch the file
    /// are told that it is gone.
    Deleted {
        /// The directory.
        parent: InodeNumber,
        /// The name in it.
        name: Bytes,
        /// The file.
        inode: InodeNumber,
    },
}

/// Invalidations that a front end has not taken yet. See the module.
#[derive(Debug, Default)]
pub struct InvalidationQueue {
    pending: Mutex<Pending>,
    pushed: Notify,
}

#[derive(Debug, Default)]
struct Pending {
    /// By file: the bytes, none for the attributes alone.
    files: BTreeMap<InodeNumber, Option<Range<u64>>>,
    /// By name: the file whose last name it was.
    names: BTreeMap<(InodeNumber, Bytes), Option<InodeNumber>>,
    /// Whether a front end takes what is pushed.
    is_served: bool,
    /// Whether something was pushed since the front end last found nothing.
    is_busy: bool,
    /// Notified, and forgotten, when it finds nothing.
    waiting: Vec<Arc<Notify>>,
}

impl Pending {
    fn add(&mut self, invalidation: Invalidation) {
        match invalidation {
            Invalidation::Attributes(inode) => {
                self.files.entry(inode).or_default();
            }
            Invalidation::Data { inode, bytes } => {
                let all = self.files.entry(inode).or_default();
                *all = Some(match all {
                    Some(all) => all.start.min(bytes.start)..all.end.max(bytes.end),
                    None => bytes,
                });
            }
            Invalidation::Name { parent, name } => {
                self.names.entry((parent, name)).or_default();
            }
            Invalidation::Deleted { parent, name, inode } => {
                self.names.insert((parent, name), Some(inode));
            }
        }
    }

    fn take(&mut self) -> Option<Invalidation> {
        let next = self.pop();
        if next.is_none() {
            self.is_busy = false;
            self.waiting.drain(..).for_each(|waiting| waiting.notify());
        }
        next
    }

    fn pop(&mut self) -> Option<Invalidation> {
        if let Some((inode, bytes)) = self.files.pop_first() {
            return Some(match bytes {
                Some(bytes) => Invalidation::Data { inode, bytes },
                None => Invalidation::Attributes(inode),
            });
        }
        let ((parent, name), deleted) = self.names.pop_first()?;
        Some(match deleted {
            Some(inode) => Invalidation::Deleted { parent, name, inode },
            None => Invalidation::Name { parent, name },
        })
    }
}

impl InvalidationQueue {
    /// Adds one, merged with those that are about the same file or name.
    pub fn push(&self, invalidation: Invalidation) {
        {
            let mut pending = self.pending();
            pending.add(invalidation);
            pending.is_busy = true;
        }
        self.pushed.notify();
    }

    /// Waits until the front end has dropped what was pushed before, if one is there. Cancel-safe.
    pub async fn settled(&self) {
        let settled = {
            let mut pending = self.pending();
            if !pending.is_served || !pending.is_busy {
                return;
            }
            let settled = Arc::new(Notify::default());
            pending.waiting.push(settled.clone());
            settled
        };
        settled.notified().await;
    }

    /// Whether a front end takes what is pushed.
    pub fn is_served(&self) -> bool {
        self.pending().is_served
    }

    /// No front end takes anything any more.
    pub fn unserved(&self) {
        let mut pending = self.pending();
        pending.is_served = false;
        pending.waiting.drain(..).for_each(|waiting| waiting.notify());
    }

    /// Takes the next one, without waiting.
    pub fn try_next(&self) -> Option<Invalidation> {
        self.pending().take()
    }

    /// Waits for the next one. One front end at a time. Cancel-safe.
    pub async fn next(&self) -> Invalidation {
        self.pending().is_served = true;
        loop {
            if let Some(invalidation) = self.try_next() {
                return invalidation;
            }
            self.pushed.notified().await;
        }
    }

    fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().expect("no holder of this lock panics")
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn what_was_pushed_is_waited_for_until_the_front_end_asks_for_more() {
        let queue = InvalidationQueue::default();
        let push = |n| queue.push(Invalidation::Attributes(InodeNumber(n)));
        push(1);
        assert!(queue.settled().now_or_never().is_some(), "nothing is served");
        assert!(queue.next().now_or_never().is_some());
        push(2);
        let mut settled = Box::pin(queue.settled());
        assert!((&mut settled).now_or_never().is_none());
        assert!(queue.next().now_or_never().is_some());
        assert!((&mut settled).now_or_never().is_none(), "it is still being dropped");
        assert!(queue.next().now_or_never().is_none());
        assert!(settled.now_or_never().is_some());
        push(3);
        let mut settled = Box::pin(queue.settled());
        assert!((&mut settled).now_or_never().is_none());
        queue.unserved();
        assert!(settled.now_or_never().is_some());
    }

    #[test]
    fn invalidations_of_one_file_or_name_are_merged() {
        let queue = InvalidationQueue::default();
        let (inode, parent) = (InodeNumber(7), InodeNumber::ROOT);
        let name = Bytes::from_static(b"name");
        assert_eq!(queue.next().now_or_never(), None);
        queue.push(Invalidation::Data { inode, bytes: 10..20 });
        queue.push(Invalidation::Attributes(inode));
        queue.push(Invalidation::Data { inode, bytes: 30..40 });
        queue.push(Invalidation::Attributes(parent));
        queue.push(Invalidation::Deleted { parent, name: name.clone(), inode });
        queue.push(Invalidation::Name { parent, name: name.clone() });
        let all: Vec<_> = std::iter::from_fn(|| queue.next().now_or_never()).collect();
        assert_eq!(
            all,
            [
                Invalidation::Attributes(parent),
                Invalidation::Data { inode, bytes: 10..40 },
                Invalidation::Deleted { parent, name, inode },
            ]
        );
    }
}
