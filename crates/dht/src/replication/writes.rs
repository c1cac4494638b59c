//! Batches on their way into the store, with the room reserved for them and the guard that keeps
//! them from being removed meanwhile.
//!
//! A caller may cancel a request at any time, and its handler is dropped then. The store may have
//! the batch in its queue already and keep it. If the reservation ended at once, a publisher that
//! puts and cancels again and again would fill more than its share (CFS §5.4). So a background task
//! keeps the reservation until the store has decided.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use atoll_env::{BoxFuture, Env};
use atoll_store::StoreError;

use crate::accounting::quota::Reservation;
use crate::holdings::pending_removals::Arriving;

/// Batches that a background task waits for after their callers gave up. Beyond so many they are
/// forgotten, as far as it is not in the store's queue: their bytes are in memory. A guess.
const MAX_ABANDONED: usize = 32;

/// What is kept until the store has decided.
type Guards = (Option<Reservation>, Arriving);

/// Counts batches whose callers have given up.
#[derive(Debug, Default)]
pub(crate) struct Writes {
    abandoned: Arc<AtomicUsize>,
}

impl Writes {
    /// Waits for `put`, a batch that the store takes into `room`. Dropped before it
    /// resolves, the batch may be stored or not; the room is kept until that is decided.
    pub(super) fn write(
        &self,
        env: &Env,
        put: BoxFuture<'static, Result<(), StoreError>>,
        room: Guards,
    ) -> impl Future<Output = Result<(), StoreError>> + Send + 'static {
        Write { env: env.clone(), abandoned: self.abandoned.clone(), put: Some((put, room)) }
    }
}

struct Write {
    env: Env,
    abandoned: Arc<AtomicUsize>,
    put: Option<(BoxFuture<'static, Result<(), StoreError>>, Guards)>,
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
        let abandoned = self.abandoned.clone();
        if abandoned.fetch_add(1, Ordering::Relaxed) >= MAX_ABANDONED {
            abandoned.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        self.env.spawn(Box::pin(async move {
            if let Err(error) = put.await {
                tracing::info!(%error, "blocks that nobody waits for any more were not stored");
            }
            drop(room);
            abandoned.fetch_sub(1, Ordering::Relaxed);
        }));
    }
}
