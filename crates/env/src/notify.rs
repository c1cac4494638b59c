//! Wakes one waiting task: the smallest form of `tokio::sync::Notify`, without a runtime.
//!
//! A notification that comes while no task waits is kept, and the next wait ends at once. Several
//! that come before the task has woken count as one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;

use futures_util::task::AtomicWaker;

/// See the module.
#[derive(Debug, Default)]
pub struct Notify {
    is_notified: AtomicBool,
    waiter: AtomicWaker,
}

impl Notify {
    /// Wakes the task that waits, or ends the next wait at once.
    pub fn notify(&self) {
        self.is_notified.store(true, Ordering::Release);
        self.waiter.wake();
    }

    /// Resolves when notified since it last resolved. One task waits at a time. Cancel-safe.
    pub async fn notified(&self) {
        std::future::poll_fn(|context| {
            self.waiter.register(context.waker());
            if self.is_notified.swap(false, Ordering::AcqRel) {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        })
        .await;
    }
}
