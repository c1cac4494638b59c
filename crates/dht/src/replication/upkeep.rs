//! What a node does for its own store: dropping blocks whose lease has ended (CFS §5.5:
//! "a server may delete blocks that have not been refreshed recently"), looking for rot,
//! giving back disk space.

use std::sync::Arc;
use std::time::Duration;

use atoll_env::{jittered, sleep};
use atoll_key::Key;

use crate::replication::Replication;
use crate::stats::add;

/// How many bytes a second the scrubber reads: more in a store so large that reading it once would
/// take weeks. A guess: it must not be noticed.
const SCRUB_BYTES_PER_SEC: u64 = 1 << 20;
/// How much one step of the scrubber reads at least.
const SCRUB_STEP_BYTES: u64 = 4 << 20;
/// How long reading everything once may take: with the rest that follows, and the time for which
/// a step waits for the disk, less than two weeks, whatever the size.
const SCRUB_PASS: Duration = Duration::from_secs(10 * 24 * 3600);
/// How long the scrubber rests between two passes.
const SCRUB_REST: Duration = Duration::from_secs(24 * 3600);
/// How much one step of compaction may copy: the store writes nothing else meanwhile.
const RECLAIM_STEP_BYTES: u64 = 16 << 20;
/// The most steps in a round of compaction.
const RECLAIM_STEPS: usize = 64;

/// Drops expired blocks, for ever. Blocks are kept for a grace period beyond their lease, by the
/// lease clock. Where that clock is new, each block gets a whole lease first.
pub(crate) async fn expire(replication: Arc<Replication>) {
    loop {
        sleep(&*replication.env, jittered(&*replication.env, replication.config.expire_every))
            .await;
        if !replication.clock.must_extend() {
            drop_expired(&replication).await;
        }
        reclaim(&replication).await;
    }
}

async fn drop_expired(replication: &Replication) {
    let ended_before =
        replication.lease_now().saturating_sub(replication.config.expire_grace.as_secs());
    match replication.store.remove_expired(ended_before).await {
        Ok(0) => {}
        Ok(count) => {
            tracing::info!(count, "dropped blocks whose lease has ended");
            add(&replication.counters.expired_blocks, count);
        }
        Err(error) => tracing::error!(%error, "expired blocks could not be dropped"),
    }
    if let Err(error) = replication.pointers.forget_expired(ended_before).await {
        tracing::error!(%error, "expired pointers could not be dropped");
    }
    if let Err(error) = replication.releases.forget_expired(ended_before).await {
        tracing::error!(%error, "old releases could not be dropped");
    }
}

/// Gives back disk space, step by step, until there is little left to gain.
pub(super) async fn reclaim(replication: &Replication) {
    for _ in 0..RECLAIM_STEPS {
        match replication.store.reclaim(RECLAIM_STEP_BYTES).await {
            Ok(0) => return,
            Ok(freed_bytes) => tracing::debug!(freed_bytes, "gave back disk space"),
            Err(error) => {
                tracing::error!(%error, "disk space could not be given back");
                return;
            }
        }
    }
}

/// How many bytes a second the scrubber reads in a store of `block_bytes`.
fn scrub_rate(block_bytes: u64) -> u64 {
    SCRUB_BYTES_PER_SEC.max(block_bytes / SCRUB_PASS.as_secs())
}

/// Where the scrubber would be now had it never stopped: a machine that runs for an hour a day
/// comes to all of its blocks as well.
fn scrub_start(unix_secs: u64) -> Key {
    let passed = u128::from(unix_secs % SCRUB_PASS.as_secs());
    let share = (passed << 64) / u128::from(SCRUB_PASS.as_secs());
    let mut key = Key::MIN;
    key.0[..8].copy_from_slice(&u64::try_from(share).expect("less than all of it").to_be_bytes());
    key
}

/// Reads all blocks again and again, slowly; a damaged one counts as missing, so that
/// repair fetches it from a replica.
pub(crate) async fn scrub(replication: Arc<Replication>) {
    let mut from = Some(scrub_start(replication.env.unix_ms() / 1000));
    loop {
        let rate = scrub_rate(replication.store.usage().block_bytes);
        let began = replication.env.now();
        let (next, rest) = match replication.store.scrub(from, SCRUB_STEP_BYTES.max(rate)).await {
            Ok(step) => {
                for key in &step.damaged {
                    tracing::error!(%key, "a block has rotted on disk; it will be fetched again");
                    replication.requests.refetch(*key);
                }
                add(&replication.counters.damaged_blocks, step.damaged.len() as u64);
                let pace = Duration::from_secs_f64(step.checked_bytes as f64 / rate as f64);
                (step.next, pace.saturating_sub(replication.env.now().since(began)))
            }
            Err(error) => {
                tracing::error!(%error, "the scrubber could not read");
                (None, Duration::ZERO)
            }
        };
        let rest = if next.is_none() { SCRUB_REST } else { rest };
        from = next;
        sleep(&*replication.env, jittered(&*replication.env, rest)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_is_read_within_two_weeks_whatever_the_size() {
        for block_bytes in (20..58).map(|power| (1u64 << power) + 12_345) {
            let rate = scrub_rate(block_bytes);
            let pass = Duration::from_secs(block_bytes.div_ceil(rate)) + SCRUB_REST;
            assert!(pass < Duration::from_secs(14 * 24 * 3600), "{block_bytes}: {pass:?}");
            assert!(
                rate == SCRUB_BYTES_PER_SEC || pass > SCRUB_PASS,
                "{block_bytes}: no faster than need be"
            );
        }
    }

    #[test]
    fn a_node_that_is_seldom_up_begins_elsewhere_each_time() {
        let day = 24 * 3600;
        let starts: Vec<f64> =
            (0..10).map(|days| scrub_start(20_000 * day + days * day).as_fraction()).collect();
        for (days, start) in starts.iter().enumerate() {
            assert!((start - days as f64 / 10.0).abs() < 1e-6, "{starts:?}");
        }
    }
}
