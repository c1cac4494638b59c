//! Noting each change of this node's surroundings, for lock leases: which nodes belong to its
//! replica sets, and how many nodes there are.

use std::sync::Arc;

use super::Holdings;

/// Notes changes, for ever.
pub(crate) async fn run(holdings: Arc<Holdings>) {
    loop {
        let epoch = holdings.overlay.epoch();
        holdings.note_ring();
        // A failure is told in the log; a lock is not granted before it is mended.
        holdings.most_peers.remember(&*holdings.durable).await;
        holdings.overlay.changed(epoch).await;
    }
}
