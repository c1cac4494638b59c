//! How much room the ring has for what this node publishes: an estimate, for `df`.
//!
//! No node knows the ring's room. This one asks the nodes that it knows how much they have free, takes
//! their mean with its own for that of each of the estimated nodes, and divides by the number of
//! copies. Its own store and its publisher's account there stand for those of the others: what is
//! used, and how much of its quota the publisher has left. `docs/design/dht.md` says how far that
//! can be off.

use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::Instant;

use super::Client;
use crate::accounting::owner::owner_of;
use crate::accounting::quota::cost_bytes;
use crate::blocks::RingRoom;
use crate::diversion;

/// How long an estimate is good for: `df` asks in a row for each mount.
const LASTS: Duration = Duration::from_secs(10);

/// The last estimate.
#[derive(Default)]
pub(super) struct LastRoom(Mutex<Option<(Instant, RingRoom)>>);

impl LastRoom {
    fn lock(&self) -> MutexGuard<'_, Option<(Instant, RingRoom)>> {
        self.0.lock().expect("no holder of this lock panics")
    }
}

/// The ring's room; nothing if no other node answers on a ring of several.
pub(crate) async fn room(client: &Client) -> Option<RingRoom> {
    let now = client.env.now();
    if let Some((_, room)) = client.last_room.lock().filter(|(at, _)| now.since(*at) < LASTS) {
        return Some(room);
    }
    let peers = client.overlay.estimated_peers();
    let spares = diversion::ask_rooms(client).await;
    if spares.is_empty() && peers > 1.0 {
        return None;
    }
    let local = client.transport.local();
    let owner = owner_of(&local.id, local.addr.ip());
    let usage = client.store.usage();
    let room = Sample {
        free_bytes: client.headroom.free_bytes(usage),
        used_bytes: usage.block_bytes.saturating_add(usage.blocks.saturating_mul(cost_bytes(0))),
        capacity_bytes: usage.capacity_bytes,
        quota_left_bytes: client.quota.left_bytes(&*client.store, peers, &owner),
    }
    .extended(&spares, peers, client.config.replicas);
    *client.last_room.lock() = Some((now, room));
    Some(room)
}

/// This node, as a sample of all.
struct Sample {
    free_bytes: u64,
    used_bytes: u64,
    capacity_bytes: u64,
    /// What the publisher may still put here, if there is a limit.
    quota_left_bytes: Option<u64>,
}

impl Sample {
    /// The ring of about `peers` nodes, some of which have `spares` free.
    fn extended(&self, spares: &[u64], peers: f64, replicas: usize) -> RingRoom {
        let nodes = peers.max(1.0);
        // Stores of nodes for each copy of everything.
        let stores = nodes / (replicas as f64).min(nodes.round());
        let all = spares.iter().fold(self.free_bytes as f64, |sum, spare| sum + *spare as f64);
        let free = all / (spares.len() + 1) as f64 * stores;
        let used = self.used_bytes as f64 * stores;
        let left = match self.quota_left_bytes {
            Some(left) => {
                let part = left as f64 / self.capacity_bytes.max(1) as f64;
                (part * (used + free)).min(free)
            }
            None => free,
        };
        // The casts saturate.
        RingRoom {
            total_bytes: (used + free) as u64,
            free_bytes: free as u64,
            available_bytes: left as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn the_ring_has_what_its_nodes_have_divided_by_the_copies() {
        let sample = Sample {
            free_bytes: 3 * GIB,
            used_bytes: GIB,
            capacity_bytes: 4 * GIB,
            quota_left_bytes: None,
        };
        // Six nodes with 4 GiB each, a quarter used, hold everything three times.
        let room = sample.extended(&[3 * GIB; 5], 6.0, 3);
        let expected =
            RingRoom { total_bytes: 8 * GIB, free_bytes: 6 * GIB, available_bytes: 6 * GIB };
        assert_eq!(room, expected);
        // A ring of two holds two copies, one alone one.
        assert_eq!(sample.extended(&[3 * GIB], 2.0, 3).free_bytes, 3 * GIB);
        assert_eq!(sample.extended(&[], 1.0, 3).free_bytes, 3 * GIB);
        // Some are fuller.
        assert_eq!(sample.extended(&[0], 6.0, 3).free_bytes, 3 * GIB);
    }

    #[test]
    fn a_publisher_has_its_quota_and_no_more_than_is_free() {
        let sample = |quota_left_bytes| Sample {
            free_bytes: 3 * GIB,
            used_bytes: GIB,
            capacity_bytes: 4 * GIB,
            quota_left_bytes,
        };
        let left = |bytes| sample(Some(bytes)).extended(&[3 * GIB; 5], 6.0, 3).available_bytes;
        assert_eq!(left(GIB), 2 * GIB, "a quarter of each store");
        assert_eq!(left(0), 0);
        assert_eq!(left(4 * GIB), 6 * GIB);
    }
}
