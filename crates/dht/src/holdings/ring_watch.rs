//! Noting each change of this node's surroundings: for lock leases, which nodes belong to its
//! replica sets, and how many nodes there are, and now and then that nothing has changed; for puts, how many nodes hold a
//! block together. A node that had neighbours only for a moment, such as one that has just joined a ring whose nodes are
//! slow to answer, must not take itself for a ring of one.

use std::sync::Arc;
use std::time::Duration;

use atoll_env::sleep;
use futures_util::future::select;

use super::Holdings;
use crate::placement::expected_replicas;

/// How often it is noted that nothing has changed. A guess: several times in the time for which a root may
/// be away (`set_history`).
const LOOK_EVERY: Duration = Duration::from_secs(3);

/// Notes changes, for ever.
pub(crate) async fn run(holdings: Arc<Holdings>) {
    loop {
        let epoch = holdings.overlay.epoch();
        holdings.note_ring();
        expected_replicas(&holdings);
        // A failure is told in the log; no lock is granted and no put acknowledged before it is mended.
        holdings.most_peers.remember(&*holdings.durable).await;
        holdings.expected.remember(&*holdings.durable).await;
        select(holdings.overlay.changed(epoch), sleep(&*holdings.env, LOOK_EVERY)).await;
    }
}
