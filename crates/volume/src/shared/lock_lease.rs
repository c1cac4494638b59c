//! The lock leases of one mount: each is renewed for as long as it is held, and lost if that fails.
//!
//! A lease lasts [`LOCK_HOLD`] from before it was asked for. That time is measured by both clocks of
//! the machine ([`Moment`]). A lease that has run out stays lost, also if a renewal is granted later: another
//! mount may have had the lock in between.
//!
//! It does not know what is locked.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use atoll_dht::locks::{LOCK_HOLD, LOCK_RENEW_EVERY};
use atoll_dht::{Blocks, LockGrant, LockLease, LockMode, LockRefusal, LockStep};
use atoll_env::{Env, Moment, Notify, sleep, timeout};
use atoll_key::Key;

/// How soon a renewal that failed is made again.
const RENEW_AGAIN: Duration = Duration::from_secs(1);

/// Asks for leases.
#[derive(Clone)]
pub(super) struct Lessee {
    env: Env,
    blocks: Arc<dyn Blocks>,
    numbers: Arc<AtomicU64>,
}

/// A lease that this mount has; given back when it is dropped.
pub(super) struct Held {
    inner: Arc<Inner>,
}

struct Inner {
    lessee: Lessee,
    key: Key,
    holder: [u8; 16],
    state: Mutex<State>,
    /// Notified when the state changes.
    changed: Notify,
}

struct State {
    mode: LockMode,
    until: Moment,
    is_over: bool,
}

/// When a lease ends that is asked for now.
fn end_of_lease(env: &Env) -> Moment {
    Moment::now(&**env) + LOCK_HOLD
}

impl Lessee {
    pub(super) fn new(env: Env, blocks: Arc<dyn Blocks>) -> Lessee {
        Lessee { env, blocks, numbers: Arc::default() }
    }

    /// Asks for something. The request has its number from when this is called, whenever the answer
    /// is waited for: one that is made later must not be overtaken.
    fn ask(
        &self,
        (key, holder): (Key, [u8; 16]),
        step: LockStep,
        mode: LockMode,
    ) -> impl Future<Output = Result<LockGrant, LockRefusal>> + Send + use<> {
        // The numbers between are the node's, which asks twice if need be and undoes what was in vain.
        let number = 4 + self.numbers.fetch_add(4, Ordering::Relaxed);
        let (env, blocks) = (self.env.clone(), self.blocks.clone());
        async move {
            let asked = blocks.lock_lease(LockLease { key, holder, number, step, mode });
            let late = |_| LockRefusal::NoMajority("the node did not answer in time".into());
            timeout(&*env, LOCK_HOLD, asked).await.map_err(late)?
        }
    }

    /// Asks once. Dropped before it has answered, it leaves no lease.
    pub(super) async fn take(
        &self,
        key: Key,
        holder: [u8; 16],
        mode: LockMode,
    ) -> Result<Held, LockRefusal> {
        let lessee = self.clone();
        let until = end_of_lease(&self.env);
        let asked = self.ask((key, holder), LockStep::Take, mode);
        run(&self.env, async move {
            asked.await?;
            let state = Mutex::new(State { mode, until, is_over: false });
            let inner = Inner { lessee, key, holder, state, changed: Notify::default() };
            let held = Held { inner: Arc::new(inner) };
            let renewed = held.inner.clone();
            renewed.lessee.env.clone().spawn(Box::pin(renew(renewed)));
            Ok(held)
        })
        .await
    }
}

/// Does some work to its end, whether or not it is waited for.
async fn run<T: Send + 'static>(
    env: &Env,
    work: impl Future<Output = Result<T, LockRefusal>> + Send + 'static,
) -> Result<T, LockRefusal> {
    let (tell, told) = futures_channel::oneshot::channel();
    env.spawn(Box::pin(async move {
        // What nobody waits for any more is dropped.
        let _ = tell.send(work.await);
    }));
    told.await.unwrap_or_else(|_| Err(LockRefusal::NoMajority("the mount has ended".into())))
}

/// Renews a lease until it is given back or lost.
async fn renew(inner: Arc<Inner>) {
    let env = &inner.lessee.env;
    let mut pause = LOCK_RENEW_EVERY;
    loop {
        sleep(&**env, pause.min(inner.left())).await;
        let until = end_of_lease(env);
        let mode = inner.state().mode;
        if inner.left().is_zero() {
            inner.changed.notify();
            return;
        }
        let renewed = inner.lessee.ask((inner.key, inner.holder), LockStep::Renew, mode).await;
        pause = if renewed.is_ok() { LOCK_RENEW_EVERY } else { RENEW_AGAIN };
        if renewed.is_ok() && !inner.left().is_zero() {
            inner.state().until = until;
        }
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }

    /// How long the lease still lasts; a lease that was found to have run out stays so.
    fn left(&self) -> Duration {
        let mut state = self.state();
        let left = Moment::now(&*self.lessee.env).until(state.until);
        state.is_over |= left.is_zero();
        if state.is_over { Duration::ZERO } else { left }
    }
}

impl Held {
    /// How long the lease still lasts; zero for one that is lost.
    pub(super) fn left(&self) -> Duration {
        self.inner.left()
    }

    pub(super) fn mode(&self) -> LockMode {
        self.inner.state().mode
    }

    /// Resolves when the lease is lost. One task at a time.
    pub(super) async fn lost(&self) {
        while !self.left().is_zero() {
            self.inner.changed.notified().await;
        }
    }

    /// Asks once for another mode; refused, the lease is as it was.
    pub(super) fn changing(
        &self,
        mode: LockMode,
    ) -> impl Future<Output = Result<(), LockRefusal>> + Send + use<> {
        let inner = self.inner.clone();
        let env = inner.lessee.env.clone();
        let step = match mode {
            LockMode::Exclusive => LockStep::Upgrade,
            LockMode::Shared => LockStep::Renew,
        };
        let until = end_of_lease(&env);
        let asked = inner.lessee.ask((inner.key, inner.holder), step, mode);
        let change = async move {
            asked.await?;
            if inner.left().is_zero() {
                return Err(LockRefusal::NoMajority("the lease has run out meanwhile".into()));
            }
            let mut state = inner.state();
            (state.mode, state.until) = (mode, until);
            Ok(())
        };
        async move { run(&env, change).await }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.inner.state().is_over = true;
        let Inner { lessee, key, holder, .. } = &*self.inner;
        let asked = lessee.ask((*key, *holder), LockStep::Release, LockMode::Shared);
        // What does not arrive ends by itself.
        lessee.env.spawn(Box::pin(async move { drop(asked.await) }));
    }
}
