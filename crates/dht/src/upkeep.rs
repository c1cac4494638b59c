//! What a node does for its own store: dropping blocks whose lease has ended (CFS §5.5:
//! "a server may delete blocks that have not been refreshed recently"), looking for rot,
//! giving back disk space.

use std::sync::Arc;
use std::time::Duration;

use atoll_env::{jittered, sleep};

use crate::node::Inner;
use crate::stats::add;

/// Blocks are kept this long after their lease, so that a clock that is ahead, or a
/// publisher that is late, loses nothing.
pub(crate) const GRACE_SECS: u64 = 3600;
/// How much one step of the scrubber reads.
const SCRUB_STEP_BYTES: u64 = 4 << 20;
/// How long the scrubber rests between two passes.
const SCRUB_REST: Duration = Duration::from_secs(24 * 3600);
/// How much one round of compaction may copy.
const RECLAIM_BYTES: u64 = 256 << 20;

/// Drops expired blocks, for ever.
pub(crate) async fn expire(inner: Arc<Inner>) {
    loop {
        sleep(&*inner.env, jittered(&*inner.env, inner.config.expire_every)).await;
        let now = inner.env.unix_ms() / 1000;
        match inner.store.remove_expired(now.saturating_sub(GRACE_SECS)).await {
            Ok(0) => {}
            Ok(count) => {
                tracing::info!(count, "dropped blocks whose lease has ended");
                add(&inner.counters.expired_blocks, count);
            }
            Err(error) => tracing::error!(%error, "expired blocks could not be dropped"),
        }
        if let Err(error) = inner.store.reclaim(RECLAIM_BYTES).await {
            tracing::error!(%error, "disk space could not be given back");
        }
    }
}

/// Reads all blocks again and again, slowly; a damaged one counts as missing, so that
/// repair fetches it from a replica.
pub(crate) async fn scrub(inner: Arc<Inner>) {
    let mut from = None;
    loop {
        let (next, rest) = match inner.store.scrub(from, SCRUB_STEP_BYTES).await {
            Ok(step) => {
                for key in &step.damaged {
                    tracing::error!(%key, "a block has rotted on disk; it will be fetched again");
                    inner.repair.refetch(*key);
                }
                add(&inner.counters.damaged_blocks, step.damaged.len() as u64);
                let pace = step.checked_bytes as f64 / inner.config.scrub_bytes_per_sec as f64;
                (step.next, Duration::from_secs_f64(pace))
            }
            Err(error) => {
                tracing::error!(%error, "the scrubber could not read");
                (None, Duration::ZERO)
            }
        };
        let rest = if next.is_none() { SCRUB_REST } else { rest.max(Duration::from_secs(1)) };
        from = next;
        sleep(&*inner.env, jittered(&*inner.env, rest)).await;
    }
}
