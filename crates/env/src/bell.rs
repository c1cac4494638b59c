//! A bell that wakes one task, and stays rung until that task has heard it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;

use futures_util::task::AtomicWaker;

/// See the module.
#[derive(Debug, Default)]
pub struct Bell {
    rung: AtomicBool,
    listener: AtomicWaker,
}

impl Bell {
    /// Wakes the listener, now or when it next listens.
    pub fn ring(&self) {
        self.rung.store(true, Ordering::Release);
        self.listener.wake();
    }

    /// Resolves once the bell has been rung since it last resolved. One listener at a
    /// time. Cancel-safe.
    pub async fn rung(&self) {
        std::future::poll_fn(|context| {
            self.listener.register(context.waker());
            if self.rung.swap(false, Ordering::AcqRel) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
}
