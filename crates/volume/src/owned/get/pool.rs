//! Threads for blocking work: making, writing and renaming files of this machine. The runtime's
//! workers never wait for a disk.
//!
//! Making and renaming a file takes the lock of its directory, and writing takes that of the file. So
//! the jobs of one directory or file run one after another: several threads would wait for each
//! other in the kernel.

use std::collections::VecDeque;
use std::collections::btree_map::{BTreeMap, Entry};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use futures_channel::oneshot;

use super::GetTreeError;

type Job = Box<dyn FnOnce() + Send>;

/// A directory or file, by its descriptor: its jobs run one after another.
type Lane = RawFd;

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
    queue: VecDeque<(Option<Lane>, Job)>,
    /// The directories and files with a job queued or running, and the jobs that wait for it.
    lanes: BTreeMap<Lane, VecDeque<Job>>,
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
        self.run_at(None, job).await
    }

    /// The same, after the jobs that were given for the same directory or file before.
    pub(super) async fn run_on<T: Send + 'static>(
        &self,
        fd: &OwnedFd,
        job: impl FnOnce() -> Result<T, GetTreeError> + Send + 'static,
    ) -> Result<T, GetTreeError> {
        self.run_at(Some(fd.as_raw_fd()), job).await
    }

    async fn run_at<T: Send + 'static>(
        &self,
        lane: Option<Lane>,
        job: impl FnOnce() -> Result<T, GetTreeError> + Send + 'static,
    ) -> Result<T, GetTreeError> {
        let (answer, answered) = oneshot::channel();
        let job = Box::new(move || {
            let _ = answer.send(job());
        });
        self.shared.push_at(lane, job);
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

impl State {
    /// A job has ended: the next of its directory or file is the first that a thread takes, in
    /// general the one that did the job before.
    fn end_in(&mut self, lane: Lane) {
        let waiting = self.lanes.get_mut(&lane).expect("it has a job");
        match waiting.pop_front() {
            Some(next) => self.queue.push_front((Some(lane), next)),
            None => drop(self.lanes.remove(&lane)),
        }
    }
}

impl PoolShared {
    pub(super) fn push(&self, job: Job) {
        self.push_at(None, job);
    }

    fn push_at(&self, lane: Option<Lane>, job: Job) {
        let mut state = self.state();
        state.outstanding += 1;
        if let Some(lane) = lane {
            match state.lanes.entry(lane) {
                Entry::Occupied(mut waiting) => {
                    waiting.get_mut().push_back(job);
                    return;
                }
                Entry::Vacant(free) => free.insert(VecDeque::new()),
            };
        }
        state.queue.push_back((lane, job));
        drop(state);
        self.changed.notify_one();
    }

    /// Keeps the first error of jobs that are not waited for.
    pub(super) fn note(&self, error: GetTreeError) {
        self.state().error.get_or_insert(error);
    }

    fn work(&self) {
        loop {
            let (lane, job) = {
                let mut state = self.state();
                loop {
                    if let Some(next) = state.queue.pop_front() {
                        break next;
                    }
                    if state.closed && state.outstanding == 0 {
                        return;
                    }
                    state = self.changed.wait(state).expect("no holder of this lock panics");
                }
            };
            let _done = Done { shared: self, lane };
            job();
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }
}

/// Counts a job as done, also if it panics.
struct Done<'a> {
    shared: &'a PoolShared,
    lane: Option<Lane>,
}

impl Drop for Done<'_> {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        state.outstanding -= 1;
        if let Some(lane) = self.lane {
            state.end_in(lane);
            // This thread ends, and another one does the next.
            if std::thread::panicking() {
                self.shared.changed.notify_one();
            }
        }
        if state.outstanding == 0 {
            for waiting in std::mem::take(&mut state.idle) {
                let _ = waiting.send(());
            }
            if state.closed {
                self.shared.changed.notify_all();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures_util::future::{join, join_all};

    use super::*;

    fn directory() -> OwnedFd {
        std::fs::File::open("/").expect("there is a root directory").into()
    }

    #[tokio::test]
    async fn jobs_of_one_directory_run_in_order_and_those_of_two_beside_each_other() {
        let pool = Pool::start(4).expect("threads");
        let (one, other) = (directory(), directory());
        // A job of each directory waits for one of the other.
        let barrier = Arc::new(Barrier::new(2));
        let done = Arc::new(AtomicUsize::new(0));
        let jobs_of = |dir, counts: bool| {
            let jobs = (0..100).map(move |number| (number, counts));
            let (pool, barrier, done) = (&pool, &barrier, &done);
            join_all(jobs.map(move |(number, counts)| {
                let (barrier, done) = (barrier.clone(), done.clone());
                pool.run_on(dir, move || {
                    barrier.wait();
                    if counts {
                        assert_eq!(done.fetch_add(1, Ordering::Relaxed), number);
                    }
                    Ok(())
                })
            }))
        };
        let (one, other) = join(jobs_of(&one, true), jobs_of(&other, false)).await;
        assert!(one.into_iter().chain(other).all(|ran| ran.is_ok()));
        assert_eq!(done.load(Ordering::Relaxed), 100);
        pool.idle().await.expect("no error");
    }

    #[tokio::test]
    async fn a_job_that_panics_does_not_hold_up_its_directory() {
        let pool = Pool::start(2).expect("threads");
        let dir = directory();
        let (broken, next) = join(
            pool.run_on(&dir, || -> Result<(), _> { panic!("a job of a test") }),
            pool.run_on(&dir, || Ok(7)),
        )
        .await;
        assert!(matches!(broken, Err(GetTreeError::Stopped)));
        assert_eq!(next.expect("it runs"), 7);
    }
}
