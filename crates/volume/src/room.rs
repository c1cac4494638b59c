//! The sizes of a file system, as `df` shows them, from the room of the ring.
//!
//! A volume has no size of its own: it may take what the ring has left, or what the node's quota leaves
//! of that. Both are estimates (`atoll_dht::RingRoom`).

use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use atoll_dht::{Blocks, RingRoom};
use atoll_env::{Env, timeout};
use atoll_vfs::StatFs;

/// How long the ring may take to say it: `df` of all mounts waits for each in turn.
const LIMIT: Duration = Duration::from_secs(2);

/// What the ring has said last.
#[derive(Default)]
pub(crate) struct LastRoom(Mutex<Option<RingRoom>>);

impl LastRoom {
    fn lock(&self) -> MutexGuard<'_, Option<RingRoom>> {
        self.0.lock().expect("no holder of this lock panics")
    }

    /// Asks the ring; while it does not answer, what it said last; nothing if it never did.
    pub(crate) async fn ask(&self, env: &Env, blocks: &dyn Blocks) -> Option<RingRoom> {
        let said = timeout(&**env, LIMIT, blocks.room()).await.ok().flatten();
        let mut last = self.lock();
        *last = said.or(*last);
        *last
    }
}

/// The sizes to show of a volume that is known to hold `held_bytes`. All are 0 if the ring's room is
/// not known, as of file systems that have none.
pub(crate) fn sizes(room: Option<RingRoom>, held_bytes: u64, block_size_bytes: u32) -> StatFs {
    let block = u64::from(block_size_bytes);
    let RingRoom { total_bytes, free_bytes, available_bytes } = room.unwrap_or_default();
    // This node's store may hold less of the ring than the others': the volume itself is there.
    let total_bytes = match room {
        Some(_) => total_bytes.max(free_bytes.saturating_add(held_bytes)),
        None => 0,
    };
    let blocks_free = free_bytes / block;
    StatFs {
        block_size_bytes,
        blocks: (total_bytes / block).max(blocks_free),
        blocks_free,
        blocks_available: (available_bytes / block).min(blocks_free),
        ..StatFs::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_ring_and_what_is_left_that_of_the_quota() {
        let room = RingRoom { total_bytes: 1 << 30, free_bytes: 1 << 29, available_bytes: 1 << 20 };
        let shown = |held| {
            let sizes = sizes(Some(room), held, 4096);
            (sizes.blocks, sizes.blocks_free, sizes.blocks_available)
        };
        assert_eq!(shown(0), (1 << 18, 1 << 17, 1 << 8));
        assert_eq!(shown(3 << 29), (1 << 19, 1 << 17, 1 << 8), "at least what is known to be held");
        let unknown = sizes(None, 1 << 30, 4096);
        assert_eq!((unknown.blocks, unknown.blocks_free, unknown.blocks_available), (0, 0, 0));
    }
}
