//! Keeping the [lease clock](crate::lease_clock) going and durable, and extending all leases when
//! its reading is lost.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use atoll_env::{Instant, sleep};
use atoll_key::{Key, KeyRange};
use atoll_store::{BlockStore, Owner, StoreError};

use crate::context::Context;

/// How often the clock looks whether the node reaches others.
const TICK: Duration = Duration::from_secs(10);
/// How often it is saved.
const SAVE_EVERY: Duration = Duration::from_secs(60);
/// How long to wait when leases could not be extended.
const EXTEND_AGAIN: Duration = Duration::from_secs(60);

/// Blocks whose leases are extended at once.
const LEASES_AT_ONCE: usize = 1024;

/// Keeps the clock going, for ever.
pub(crate) async fn run(context: Arc<impl Deref<Target = Context>>) {
    while context.clock.must_extend() {
        match extend_leases(&context).await {
            Ok(0) => {}
            Ok(count) => tracing::warn!(count, "the lease clock is new; all leases begin again"),
            Err(error) => {
                tracing::error!(%error, "leases could not be extended; none ends until they are");
                sleep(&*context.env, EXTEND_AGAIN).await;
            }
        }
    }
    let mut saved: Option<(Instant, bool)> = None;
    loop {
        let now = context.env.now();
        let ticked = context.clock.tick(now, !context.overlay.is_alone());
        // The first neighbour is remembered at once: a node that forgets it would take the next
        // outage for a ring of one.
        let is_due = saved.is_none_or(|(at, met)| {
            now.since(at) >= SAVE_EVERY && ticked.is_running || met != ticked.has_met
        });
        if is_due {
            match context.clock.save(&*context.durable, now).await {
                Ok(()) => saved = Some((now, ticked.has_met)),
                Err(error) => tracing::error!(%error, "the lease clock could not be saved"),
            }
        }
        sleep(&*context.env, TICK).await;
    }
}

/// Gives every block held, and every record of one that another node keeps for this one or it
/// for another, at least one whole lease from now on; says how many blocks are held. A crash
/// before that is durable leaves a record by which the next start does it.
pub(crate) async fn extend_leases(context: &Context) -> Result<u64, StoreError> {
    context.clock.set_must_extend(true);
    save_clock(context).await?;
    let expiry = context.expiry(context.config.lease.as_secs());
    let pointers = context.durable.pointers();
    let extended = extend_all(&*context.store, expiry)?;
    extend_all(&*pointers, expiry)?;
    context.store.flush().await?;
    pointers.flush().await?;
    context.clock.set_must_extend(false);
    save_clock(context).await?;
    Ok(extended)
}

async fn save_clock(context: &Context) -> Result<(), StoreError> {
    let saved = context.clock.save(&*context.durable, context.env.now()).await;
    saved.map_err(StoreError::Io)
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
