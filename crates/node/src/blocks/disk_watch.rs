//! Leaving the ring when the disk no longer takes blocks.
//!
//! A node that cannot write is no replica: it would point to other nodes for everything new, and
//! cannot repair what it has. So it leaves, as it does when it is stopped, and its neighbours
//! take over; what it holds stays on its disk. It says so in its log and in `status`, and comes
//! back when it is started again.

use std::sync::Arc;
use std::time::Duration;

use atoll_dht::Dht;
use atoll_env::{Env, sleep};

use crate::ring::Ring;

/// How often a failure is looked for.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// Waits until a write has failed, and leaves the ring.
pub(crate) async fn run(env: Env, dht: Arc<Dht>, ring: Arc<Ring>) {
    let why = loop {
        sleep(&*env, LOOK_EVERY).await;
        dht.check_disk();
        if let Some(why) = dht.disk_trouble() {
            break why;
        }
    };
    tracing::error!("the disk does not take blocks ({why}); leaving the ring");
    ring.leave().await;
}

/// What `status` says of it.
pub(crate) fn warning(why: &str) -> String {
    format!(
        "the disk does not take blocks ({why}): this node has left the ring; repair the disk, \
         then start the node again"
    )
}
