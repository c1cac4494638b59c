//! Threads for blocking work: making, writing and renaming files of this machine. The runtime's
//! workers never wait for a disk.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use futures_channel::oneshot;

use super::GetTreeError;

type Job = Box<dyn FnOnce() + Send>;

/// The threads; they end when this is dropped and the queue is empty.
pub(super) struct Pool {
    shared: Arc<PoolShared>,
}

/// The queue, for those who may add to it while the pool lives.
pub(super) struct PoolShared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
    /// Queued or running.
    outstanding: usize,
    closed: bool,
    idle: Vec<oneshot::Sender<()>>,
    error: Option<GetTreeError>,
}

impl Pool {
    pub(super) fn start(threads: usize) -> std::io::Result<Pool> {
        let shared = Arc::new(PoolShared { state: Mutex::default(), changed: Condvar::new() });
        let pool = Pool { shared: shared.clone() };
        for index in 0..threads {
            let shared = shared.clone();
            let name = format!("get-write-{index}");
            std::thread::Builder::new().name(name).spawn(move || shared.work())?;
        }
        Ok(pool)
    }

    pub(super) fn shared(&self) -> &Arc<PoolShared> {
        &self.shared
    }

    /// Runs `job` on one of the threads. It runs even if the answer is not waited for.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> Result<T, GetTreeError> + Send + 'static,
    ) -> Result<T, GetTreeError> {
        let (answer, answered) = oneshot::channel();
        self.shared.push(Box::new(move || {
            let _ = answer.send(job());
        }));
        answered.await.unwrap_or(Err(GetTreeError::Stopped))
    }

    /// Waits until nothing is queued or running; an error of a job that was not waited for.
    pub(super) async fn idle(&self) -> Result<(), GetTreeError> {
        let waiting = {
            let mut state = self.shared.state();
            let (sender, receiver) = oneshot::channel();
            if state.outstanding > 0 {
                state.idle.push(sender);
            } else {
                let _ = sender.send(());
            }
            receiver
        };
        waiting.await.map_err(|_| GetTreeError::Stopped)?;
        self.shared.state().error.take().map_or(Ok(()), Err)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.state().closed = true;
        self.shared.changed.notify_all();
    }
}

impl PoolShared {
    pub(super) fn push(&self, job: Job) {
        let mut state = self.state();
        state.outstanding += 1;
        state.queue.push_back(job);
        drop(state);
        self.changed.notify_one();
    }

    /// Keeps the first error of jobs that are not waited for.
    pub(super) fn note(&self, error: GetTreeError) {
        self.state().error.get_or_insert(error);
    }

    fn work(&self) {
        loop {
            let job = {
                let mut state = self.state();
                loop {
                    if let Some(job) = state.queue.pop_front() {
                        break job;
                    }
                    if state.closed && state.outstanding == 0 {
                        return;
                    }
                    state = self.changed.wait(state).expect("no holder of this lock panics");
                }
            };
            let _done = Done(self);
            job();
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }
}

/// Counts a job as done, also if it panics.
struct Done<'a>(&'a PoolShared);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.outstanding -= 1;
        if state.outstanding == 0 {
            for waiting in std::mem::take(&mut state.idle) {
                let _ = waiting.send(());
            }
            self.0.changed.notify_all();
        }
    }
}
