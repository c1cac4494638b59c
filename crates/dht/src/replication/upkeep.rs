//! What a node does for its own store: dropping blocks whose lease has ended (CFS §5.5:
//! "a server may delete blocks that have not been refreshed recently"), looking for rot,
//! giving back disk space.

use std::sync::Arc;
use std::time::Duration;

use atoll_env::{jittered, sleep};
use atoll_key::{Key, KeyRange};
use atoll_store::{BlockStore, Owner, StoreError};

use crate::inner::Inner;
use crate::lease_clock;
use crate::stats::add;

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
/// Blocks whose leases are extended at once.
const LEASES_AT_ONCE: usize = 1024;

/// Drops expired blocks, for ever. Blocks are kept for a grace period beyond their lease, by the
/// lease clock. Where that clock is new, each block gets a whole lease first.
pub(crate) async fn expire(inner: Arc<Inner>) {
    loop {
        sleep(&*inner.env, jittered(&*inner.env, inner.config.expire_every)).await;
        if !inner.clock.must_extend() {
            drop_expired(&inner).await;
        }
        reclaim(&inner).await;
    }
}

async fn drop_expired(inner: &Inner) {
    let ended_before = inner.lease_now().saturating_sub(inner.config.expire_grace.as_secs());
    match inner.store.remove_expired(ended_before).await {
        Ok(0) => {}
        Ok(count) => {
            tracing::info!(count, "dropped blocks whose lease has ended");
            add(&inner.counters.expired_blocks, count);
        }
        Err(error) => tracing::error!(%error, "expired blocks could not be dropped"),
    }
    if let Err(error) = inner.diversion.records.forget_expired(ended_before).await {
        tracing::error!(%error, "expired pointers could not be dropped");
    }
}

/// Gives back disk space, step by step, until there is little left to gain.
async fn reclaim(inner: &Inner) {
    for _ in 0..RECLAIM_STEPS {
        match inner.store.reclaim(RECLAIM_STEP_BYTES).await {
            Ok(0) => return,
            Ok(freed_bytes) => tracing::debug!(freed_bytes, "gave back disk space"),
            Err(error) => {
                tracing::error!(%error, "disk space could not be given back");
                return;
            }
        }
    }
}

/// Gives every block held, and every record of one that another node keeps for this one or it
/// for another, at least one whole lease from now on; says how many blocks are held. A crash
/// before that is durable leaves a record by which the next start does it.
pub(crate) async fn extend_leases(inner: &Inner) -> Result<u64, StoreError> {
    inner.clock.set_must_extend(true);
    save_clock(inner).await?;
    let expiry = inner.expiry(inner.config.lease.as_secs());
    let pointers = inner.durable.pointers();
    let extended = extend_all(&*inner.store, expiry)?;
    extend_all(&*pointers, expiry)?;
    inner.store.flush().await?;
    pointers.flush().await?;
    inner.clock.set_must_extend(false);
    save_clock(inner).await?;
    Ok(extended)
}

async fn save_clock(inner: &Inner) -> Result<(), StoreError> {
    lease_clock::save(inner).await.map_err(StoreError::Io)
}

/// Extends all leases in a store.
fn extend_all(store: &dyn BlockStore, expiry: u64) -> Result<u64, StoreError> {
    let (mut after, mut extended) = (Key::MAX, 0);
    loop {
        let infos = store.list(KeyRange::new(after, Key::MAX), LEASES_AT_ONCE)?;
        let keys: Vec<Key> = infos.iter().map(|info| info.key).collect();
        store.renew(&keys, expiry, Owner::NOBODY)?;
        extended += keys.len() as u64;
        match keys.last() {
            Some(last) if *last != Key::MAX && keys.len() == LEASES_AT_ONCE => after = *last,
            _ => return Ok(extended),
        }
    }
}

/// How many bytes a second the scrubber reads in a store of `block_bytes`.
fn scrub_rate(block_bytes: u64, least_bytes_per_sec: u64) -> u64 {
    least_bytes_per_sec.max(block_bytes / SCRUB_PASS.as_secs()).max(1)
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
pub(crate) async fn scrub(inner: Arc<Inner>) {
    let mut from = Some(scrub_start(inner.env.unix_ms() / 1000));
    loop {
        let rate = scrub_rate(inner.store.usage().block_bytes, inner.config.scrub_bytes_per_sec);
        let began = inner.env.now();
        let (next, rest) = match inner.store.scrub(from, SCRUB_STEP_BYTES.max(rate)).await {
            Ok(step) => {
                for key in &step.damaged {
                    tracing::error!(%key, "a block has rotted on disk; it will be fetched again");
                    inner.repair.refetch(*key);
                }
                add(&inner.counters.damaged_blocks, step.damaged.len() as u64);
                let pace = Duration::from_secs_f64(step.checked_bytes as f64 / rate as f64);
                (step.next, pace.saturating_sub(inner.env.now().since(began)))
            }
            Err(error) => {
                tracing::error!(%error, "the scrubber could not read");
                (None, Duration::ZERO)
            }
        };
        let rest = if next.is_none() { SCRUB_REST } else { rest };
        from = next;
        sleep(&*inner.env, jittered(&*inner.env, rest)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_is_read_within_two_weeks_whatever_the_size() {
        let least = 1 << 20;
        for block_bytes in (20..58).map(|power| (1u64 << power) + 12_345) {
            let rate = scrub_rate(block_bytes, least);
            let pass = Duration::from_secs(block_bytes.div_ceil(rate)) + SCRUB_REST;
            assert!(pass < Duration::from_secs(14 * 24 * 3600), "{block_bytes}: {pass:?}");
            assert!(rate == least || pass > SCRUB_PASS, "{block_bytes}: no faster than need be");
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
