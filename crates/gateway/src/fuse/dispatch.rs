//! From the kernel's request to an answer: every request becomes a future of its own, so
//! that a slow one holds up no other.
//!
//! A future is first polled on the thread that read the request; one that is ready at
//! once (bytes in a cache, attributes) is answered there without a change of thread, which
//! a file system in memory shows to be worth it: 77,000 direct reads of 4 KiB a second
//! instead of 22,000 (two cores, Linux 6.18). One that is not goes on as a task of the
//! runtime. A request that waits for a disk as a rule (`fsync`) is not polled there at all: others
//! would wait for the thread until another takes its place. At most `max_requests` are under way;
//! beyond that the threads stop reading requests, and the kernel queues them.
//!
//! Whatever happens, a request is answered: a panic becomes `EIO` (in a process that does not end at
//! panics, as `atoll` does), and what takes longer than the limit `ETIMEDOUT`. (A process that waits for FUSE cannot be killed.) Only a lock that
//! other processes hold is waited for without a limit, until a signal comes (`locks`).

use std::any::Any;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use atoll_vfs::Errno;
use futures_util::FutureExt;
use tokio::runtime::Handle;

use super::leadership::{Leadership, Serving};

/// Runs requests.
pub(super) struct Dispatcher {
    handle: Handle,
    requests: Arc<Semaphore>,
    pub(super) leadership: Arc<Leadership>,
    limit: Duration,
}

/// A counting semaphore for threads.
struct Semaphore {
    state: Mutex<Permits>,
    freed: Condvar,
}

struct Permits {
    free: usize,
    /// How many threads wait: a wake-up is a system call even when none does.
    waiting: usize,
}

/// One of so many.
struct Permit(Arc<Semaphore>);

impl Semaphore {
    fn new(free: usize) -> Arc<Semaphore> {
        let state = Permits { free, waiting: 0 };
        Arc::new(Semaphore { state: Mutex::new(state), freed: Condvar::new() })
    }

    fn state(&self) -> MutexGuard<'_, Permits> {
        self.state.lock().expect("no holder of this lock panics")
    }

    fn acquire(self: &Arc<Semaphore>) -> Permit {
        let mut state = self.state();
        while state.free == 0 {
            state.waiting += 1;
            state = self.freed.wait(state).expect("no holder of this lock panics");
            state.waiting -= 1;
        }
        state.free -= 1;
        Permit(self.clone())
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.free += 1;
        if state.waiting > 0 {
            self.0.freed.notify_one();
        }
    }
}

impl Dispatcher {
    pub(super) fn new(handle: Handle, max_requests: usize, limit: Duration) -> Dispatcher {
        Dispatcher {
            handle,
            requests: Semaphore::new(max_requests.max(1)),
            leadership: Arc::default(),
            limit,
        }
    }

    /// Begins a part of a request; the thread goes on with the others afterwards.
    pub(super) fn begin_part(&self) -> Serving<'_> {
        self.leadership.begin_part()
    }

    /// Does what no request asked for.
    pub(super) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.handle.spawn(work);
    }

    /// Does `work` and gives its outcome to `reply`. `what` names the request in the log.
    pub(super) fn run<T: Send + 'static>(
        &self,
        what: &'static str,
        work: impl Future<Output = Result<T, Errno>> + Send + 'static,
        reply: impl FnOnce(Result<T, Errno>) + Send + 'static,
    ) {
        let _serving = self.leadership.begin();
        self.begin(self.task(what, work, reply));
    }

    /// As [`Dispatcher::run`], for work that waits for other processes, for as long as they like: it
    /// counts for no limit.
    pub(super) fn run_waiting<T: Send + 'static>(
        &self,
        what: &'static str,
        work: impl Future<Output = Result<T, Errno>> + Send + 'static,
        reply: impl FnOnce(Result<T, Errno>) + Send + 'static,
    ) {
        let _serving = self.leadership.begin();
        self.begin(async move { reply(caught(what, work).await) });
    }

    /// Polls a task on this thread, and gives it to the runtime if it is not done then.
    fn begin(&self, task: impl Future<Output = ()> + Send + 'static) {
        let _entered = self.handle.enter();
        let mut task = Box::pin(task);
        let first = task.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        if first == Poll::Pending {
            self.handle.spawn(task);
        }
    }

    /// As [`Dispatcher::run`], for work that may hold up its thread.
    pub(super) fn run_aside<T: Send + 'static>(
        &self,
        what: &'static str,
        work: impl Future<Output = Result<T, Errno>> + Send + 'static,
        reply: impl FnOnce(Result<T, Errno>) + Send + 'static,
    ) {
        let _serving = self.leadership.begin();
        let task = self.task(what, work, reply);
        let handle = self.handle.clone();
        self.handle.spawn_blocking(move || handle.block_on(task));
    }

    /// Work with its reply, once a request may begin.
    fn task<T: Send + 'static>(
        &self,
        what: &'static str,
        work: impl Future<Output = Result<T, Errno>> + Send + 'static,
        reply: impl FnOnce(Result<T, Errno>) + Send + 'static,
    ) -> impl Future<Output = ()> + Send + 'static {
        let permit = self.requests.acquire();
        let limit = self.limit;
        async move {
            let _permit = permit;
            let outcome = match tokio::time::timeout(limit, caught(what, work)).await {
                Ok(outcome) => outcome,
                Err(_) => {
                    tracing::warn!(what, ?limit, "a file system call did not answer");
                    Err(Errno::ETIMEDOUT)
                }
            };
            reply(outcome);
        }
    }
}

/// The outcome of work, also if it panics.
async fn caught<T>(
    what: &'static str,
    work: impl Future<Output = Result<T, Errno>>,
) -> Result<T, Errno> {
    AssertUnwindSafe(work).catch_unwind().await.unwrap_or_else(|panic| {
        tracing::error!(what, panic = text(&*panic), "a file system call panicked");
        Err(Errno::EIO)
    })
}

fn text(panic: &(dyn Any + Send)) -> &str {
    let owned = panic.downcast_ref::<String>().map(String::as_str);
    owned.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("(no text)")
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    fn outcome_of(
        limit: Duration,
        work: impl Future<Output = Result<u8, Errno>> + Send + 'static,
    ) -> Result<u8, Errno> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_time()
            .build()
            .unwrap();
        let (tell, told) = mpsc::channel();
        Dispatcher::new(runtime.handle().clone(), 1, limit)
            .run("test", work, move |outcome| tell.send(outcome).unwrap());
        told.recv().unwrap()
    }

    #[test]
    fn every_request_is_answered() {
        let long = Duration::from_secs(600);
        assert_eq!(outcome_of(long, async { Ok(3) }), Ok(3));
        let later = async {
            tokio::time::sleep(Duration::from_millis(1)).await;
            Ok(4)
        };
        assert_eq!(outcome_of(long, later), Ok(4));
        assert_eq!(outcome_of(long, async { panic!("at once") }), Err(Errno::EIO));
        let panics_later = async {
            tokio::task::yield_now().await;
            panic!("{}", "later")
        };
        assert_eq!(outcome_of(long, panics_later), Err(Errno::EIO));
        let never = std::future::pending();
        assert_eq!(outcome_of(Duration::from_millis(1), never), Err(Errno::ETIMEDOUT));
    }

    /// Otherwise this test waits for the work, which waits for this test.
    #[test]
    fn work_that_holds_up_its_thread_does_not_hold_up_this_one() {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_time().build().unwrap();
        let (go, gone) = mpsc::channel::<u8>();
        let (tell, told) = mpsc::channel();
        let dispatcher = Dispatcher::new(runtime.handle().clone(), 1, Duration::from_secs(600));
        let work = async move { gone.recv().map_err(|_| Errno::EIO) };
        dispatcher.run_aside("test", work, move |outcome| tell.send(outcome).unwrap());
        go.send(3).unwrap();
        assert_eq!(told.recv().unwrap(), Ok(3));
    }

    #[test]
    fn a_permit_that_is_dropped_lets_the_next_request_begin() {
        let requests = Semaphore::new(1);
        let first = requests.acquire();
        let (tell, told) = mpsc::channel();
        let waiting = requests.clone();
        let thread = std::thread::spawn(move || {
            let _second = waiting.acquire();
            tell.send(()).unwrap();
        });
        assert!(told.try_recv().is_err(), "there is one permit");
        drop(first);
        told.recv().unwrap();
        thread.join().unwrap();
        assert_eq!(requests.state().free, 1);
    }
}
