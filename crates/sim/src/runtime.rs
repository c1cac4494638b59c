//! `env::Runtime` of one incarnation of a host.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use atoll_env::{BoxFuture, Instant, Runtime, Task};

use crate::tasks::Body;
use crate::world::Shared;

/// What a host's code asks for time, tasks and randomness. Of a dead incarnation: its
/// sleeps never end and what it spawns is dropped.
pub(crate) struct SimRuntime {
    pub(crate) shared: Arc<Shared>,
    pub(crate) host: u32,
    pub(crate) incarnation: u32,
}

impl Runtime for SimRuntime {
    fn now(&self) -> Instant {
        if !self.shared.clocks_differ() {
            return self.shared.now();
        }
        Instant(self.shared.with(|world| world.host(self.host).clock.shows(world.now)))
    }

    fn unix_ms(&self) -> u64 {
        self.shared.with(|world| {
            let host = world.host(self.host);
            let steady_ms = host.clock.shows(world.now) / 1_000_000;
            let unskewed_ms = world.config.unix_epoch_ms.saturating_add(steady_ms);
            unskewed_ms.saturating_add_signed(host.clock_skew_ms)
        })
    }

    fn sleep_until(&self, at: Instant) -> BoxFuture<'static, ()> {
        Box::pin(Sleep {
            shared: self.shared.clone(),
            host: self.host,
            incarnation: self.incarnation,
            at,
            timer: None,
        })
    }

    fn spawn(&self, task: BoxFuture<'static, ()>) -> Task {
        let body = Body::Plain(task);
        let id = self
            .shared
            .with(|world| world.spawn(&self.shared.ready, self.host, self.incarnation, body, None));
        let shared = self.shared.clone();
        Task::new(move || {
            if let Some(id) = id {
                shared.with(|world| world.end_task(id));
            }
        })
    }

    fn random_u64(&self) -> u64 {
        self.shared.with(|world| world.host_mut(self.host).random.next_u64())
    }
}

struct Sleep {
    shared: Arc<Shared>,
    host: u32,
    incarnation: u32,
    /// By the host's clock.
    at: Instant,
    /// Slot and number of the timer that runs for it.
    timer: Option<(u32, u64)>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        let (host, incarnation, at) = (this.host, this.incarnation, this.at.as_nanos());
        let timer = &mut this.timer;
        this.shared.with(|world| {
            if !world.is_current(host, incarnation) {
                return Poll::Pending;
            }
            let due = world.host(host).clock.when(at);
            if world.now >= due {
                return Poll::Ready(());
            }
            let is_running = timer.is_some_and(|timer| world.rewake_timer(timer, cx.waker()));
            if !is_running {
                *timer = Some(world.start_timer(host, due, cx.waker().clone()));
            }
            Poll::Pending
        })
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(timer) = self.timer {
            self.shared.with(|world| world.stop_timer(timer));
        }
    }
}
