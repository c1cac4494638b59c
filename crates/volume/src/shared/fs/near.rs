//! Numbers of new inodes that lie near their directories: on the same nodes (D2 §1: related blocks on few nodes).
//!
//! An inode's place on the ring follows from its number. So a mount tries numbers until the inode has the replica set
//! of its directory. Nothing is looked up for such an inode, and it is put together with its name, in one round trip
//! instead of two and a lookup.
//!
//! Directories lie anywhere, and so do files of a directory with more than [`MAX_NEAR`] names: a volume uses all
//! nodes' disks, and no directory more than some 64 MiB of a set's for its small files. (The content of larger files
//! lies anywhere, too.)
//!
//! **Not promised:** that the place of an inode is random. Whoever makes a file has a choice of numbers in any case, and
//! thereby of the nodes that hold it; each node bounds what a user may keep on it.
//!
//! It does not know what is put.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::{Instant, yield_now};
use atoll_key::{GroupId, Key, KeyRange};
use atoll_vfs::Errno;

use super::{Shared, Version};
use crate::shared::fault::Fault;
use crate::shared::inode::{Contents, InodeKey};

/// Files of larger directories lie anywhere. A guess.
const MAX_NEAR: usize = 4096;
/// Numbers that are tried. A directory's key and its root have a node's share of the ring between them in the mean:
/// 30,000 nodes take some 30,000 numbers.
const MAX_TRIED: u64 = 1 << 18;
/// Numbers that are tried before other tasks have their turn. A guess: some 0.1 ms.
const TRIED_AT_ONCE: u64 = 1 << 10;
/// How long it is believed which keys have a directory's replica set. A guess: less than a node remembers a set for.
const KEPT: Duration = Duration::from_secs(30);
/// Directories of which that is remembered. A guess: those that files are made in at one time.
const MAX_DIRECTORIES: usize = 64;

/// Which keys have the replica sets of directories.
#[derive(Default)]
pub(super) struct NearKeys {
    /// The last key, if it is known, and since when.
    until: Mutex<BTreeMap<InodeKey, (Option<Key>, Instant)>>,
}

/// How many numbers are tried in the mean until one has a key in the range.
fn tries(near: &KeyRange) -> f64 {
    near.fraction().recip()
}

/// The keys from that of a directory on that have its replica set, `until` being the last of them.
fn near_keys(directory: &Key, until: &Key) -> KeyRange {
    KeyRange::new(directory.previous(), *until)
}

/// Whether files of a directory with this key find a number as good as always.
pub(super) fn are_enough(directory: &Key, until: &Key) -> bool {
    tries(&near_keys(directory, until)) <= MAX_TRIED as f64 / 8.0
}

impl Shared {
    /// The number of a file's inode that is to be made in a directory, which `groups` may write.
    pub(super) async fn number_near(
        &self,
        directory: InodeKey,
        version: &Version,
        groups: &[GroupId],
    ) -> [u8; 16] {
        let names = match &version.inode().contents {
            Contents::Directory(entries) => entries.len(),
            _ => 0,
        };
        let first = u128::from_be_bytes(self.random_number());
        if names >= MAX_NEAR {
            return first.to_be_bytes();
        }
        let Some(until) = self.same_set_until(directory).await else {
            return first.to_be_bytes();
        };
        let near = near_keys(&directory.key(), &until);
        // A directory so close to its root is not worth the work.
        if tries(&near) > MAX_TRIED as f64 / 2.0 {
            return first.to_be_bytes();
        }
        let is_near = |number: &[u8; 16]| {
            self.inodes.block_of(groups, *number).is_some_and(|id| near.contains(&id.key))
        };
        for from in (0..MAX_TRIED).step_by(TRIED_AT_ONCE as usize) {
            let tried = from..from + TRIED_AT_ONCE;
            let mut numbers = tried.map(|n| first.wrapping_add(n.into()).to_be_bytes());
            if let Some(number) = numbers.find(is_near) {
                return number;
            }
            yield_now().await;
        }
        first.to_be_bytes()
    }

    /// An inode near a directory, or the directory, was not stored: if there is no room on these nodes, there may be
    /// elsewhere.
    pub(super) fn note_refused(&self, directory: InodeKey, fault: &Fault) {
        if matches!(fault.errno, Errno::ENOSPC | Errno::EDQUOT) {
            self.lie_anywhere(directory);
        }
    }

    /// For a while no number is tried for new files of a directory.
    fn lie_anywhere(&self, directory: InodeKey) {
        self.note_until(directory, None);
    }

    fn note_until(&self, directory: InodeKey, until: Option<Key>) {
        let (now, mut near) = (self.env.now(), self.until());
        near.retain(|_, (_, at)| now.since(*at) < KEPT);
        if near.len() < MAX_DIRECTORIES || near.contains_key(&directory) {
            near.insert(directory, (until, now));
        }
    }

    async fn same_set_until(&self, directory: InodeKey) -> Option<Key> {
        let now = self.env.now();
        if let Some((until, at)) = self.until().get(&directory)
            && now.since(*at) < KEPT
        {
            return *until;
        }
        let until = self.blocks.same_set_until(directory.key()).await;
        self.note_until(directory, until);
        until
    }

    fn until(&self) -> MutexGuard<'_, BTreeMap<InodeKey, (Option<Key>, Instant)>> {
        self.near.until.lock().expect("no holder of this lock panics")
    }
}
