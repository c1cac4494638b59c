//! Batches on their way into the store, with the room reserved for them and the guard that keeps
//! them from being removed meanwhile.
//!
//! A caller may cancel a request at any time, and its handler is dropped then. The store may have
//! the batch in its queue already and keep it. If the reservation ended at once, a publisher that
//! puts and cancels again and again would fill more than its share (CFS §5.4). So a background task
//! keeps the reservation until the store has decided, and with it the turn of blocks that were joined
//! with what was held: the next ones are joined with the result.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use atoll_env::{BoxFuture, Env};
use atoll_store::{StoreError, StoredBlock};

use crate::accounting::quota::Reservation;
use crate::holdings::pending_removals::Arriving;
use crate::replication::Replication;
use crate::replication::joining::Turn;
use crate::rpc::Background;

/// Batches that a background task waits for after their callers gave up. Beyond so many they are
/// forgotten, as far as it is not in the store's queue: their bytes are in memory. A guess.
pub(super) const MAX_ABANDONED: usize = 32;

/// What is kept until the store has decided.
type Guards = (Option<Reservation>, Arriving, Option<Turn>);

/// A batch that the store takes into the room of its guards. Dropped before it resolves, the batch
/// may be stored or not; the guards are kept until that is decided.
pub(super) struct Write {
    env: Env,
    abandoned: Background,
    put: Option<(BoxFuture<'static, Result<(), StoreError>>, Guards)>,
}

impl Write {
    pub(super) fn new(replication: &Replication, batch: Vec<StoredBlock>, guards: Guards) -> Write {
        let put = Some((replication.store.put(batch), guards));
        Write { env: replication.env.clone(), abandoned: replication.abandoned.clone(), put }
    }
}

impl Future for Write {
    type Output = Result<(), StoreError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let (put, _) = self.put.as_mut().expect("a resolved future is not polled again");
        let result = std::task::ready!(put.as_mut().poll(context));
        self.put = None;
        Poll::Ready(result)
    }
}

impl Drop for Write {
    fn drop(&mut self) {
        let Some((put, room)) = self.put.take() else { return };
        self.abandoned.run(&self.env, async move {
            if let Err(error) = put.await {
                tracing::info!(%error, "blocks that nobody waits for any more were not stored");
            }
            drop(room);
        });
    }
}
