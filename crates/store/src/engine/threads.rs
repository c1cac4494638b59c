//! The thread that changes a store, and the threads that read for it.
//!
//! A store has one [`Writer`]. Async callers hand it jobs through a bounded queue and never
//! wait for the disk themselves; the writer's thread takes all jobs that wait as one group, so
//! that one sync can answer for many. Reads that may wait for the disk go to reader threads.
//!
//! An *inline* engine has no threads: each call does its work when its future is first polled.
//! That is how simulated nodes use a store, and a run stays deterministic.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_channel::oneshot;

use super::queue::Queue;
use super::shared::Shared;
use crate::StoreError;

/// What the one thread that changes a store does.
pub(crate) trait Writer: Send + 'static {
    /// Prepares for a group of jobs.
    fn begin_group(&mut self);

    /// Ends a group of jobs: makes durable what must be, answers callers that wait for it, and
    /// commits the index if there is much to commit.
    fn end_group(&mut self);

    /// Whether the index lacks anything.
    fn has_uncommitted(&self) -> bool;

    /// Commits to the index all that it lacks.
    fn commit_all(&mut self) -> Result<(), StoreError>;

    /// Does a step of work without a request; returns how long to rest before the next
    /// step, `None` if there is nothing more to do for now.
    fn background_step(&mut self) -> Option<Duration> {
        None
    }
}

/// Where the answer to a job goes.
pub(crate) type Reply<T> = oneshot::Sender<Result<T, StoreError>>;

type WriteJob<W> = Box<dyn FnOnce(&mut W) + Send>;
type ReadJob = Box<dyn FnOnce() + Send>;

/// Jobs in one group.
const MAX_GROUP: usize = 64;

/// Reads that may wait for a reader thread.
const MAX_QUEUED_READS: usize = 256;

/// Weight of a job beside its blocks, so that small ones are bounded as well.
const JOB_BYTES: usize = 1 << 10;

/// Uncommitted changes at which renewals wait for a commit, as a multiple of `commit_entries`:
/// bounds the memory of mass renewals.
const RENEW_BACKLOG: usize = 4;

/// A store's writer and its readers.
pub(crate) struct Engine<W> {
    pub(crate) shared: Arc<Shared>,
    mode: Mode<W>,
    threads: Mutex<Vec<std::thread::JoinHandle<()>>>,
}

enum Mode<W> {
    Threads { writes: Arc<Queue<WriteJob<W>>>, reads: Arc<Queue<ReadJob>> },
    Inline(Box<Mutex<W>>),
}

impl<W: Writer> Engine<W> {
    /// Starts the threads, whose names begin with `name`.
    pub(crate) fn start(name: &str, shared: Arc<Shared>, writer: W) -> io::Result<Engine<W>> {
        let writes = Arc::new(Queue::new(shared.config.queue_bytes));
        let reads: Arc<Queue<ReadJob>> = Arc::new(Queue::new(MAX_QUEUED_READS));
        let thread = |part| std::thread::Builder::new().name(format!("{name}-{part}"));
        let (queue, interval) = (writes.clone(), shared.config.commit_interval);
        let write = move || write_loop(writer, &queue, interval);
        let mut threads = vec![thread("writer").spawn(write)?];
        for _ in 0..shared.config.reader_threads.max(1) {
            let queue = reads.clone();
            threads.push(thread("reader").spawn(move || read_loop(&queue))?);
        }
        let mode = Mode::Threads { writes, reads };
        Ok(Engine { shared, mode, threads: Mutex::new(threads) })
    }

    /// An engine without threads. Its index is committed by amount of work only, not by time.
    pub(crate) fn inline(shared: Arc<Shared>, writer: W) -> Engine<W> {
        let mode = Mode::Inline(Box::new(Mutex::new(writer)));
        Engine { shared, mode, threads: Mutex::default() }
    }

    /// Takes no more jobs, and waits until what is queued has been done.
    pub(crate) fn stop(&self) {
        if let Mode::Threads { writes, reads } = &self.mode {
            writes.close();
            reads.close();
        }
        let mut threads = self.threads.lock().expect("no panic while the lock is held");
        for thread in threads.drain(..) {
            let _ = thread.join();
        }
    }

    /// Has the writer do `job`, which weighs `weight_bytes` while it waits, and waits for the
    /// answer that the job, or the end of its group, gives to the reply.
    pub(crate) async fn ask<T: Send + 'static>(
        &self,
        weight_bytes: usize,
        job: impl FnOnce(&mut W, Reply<T>) + Send + 'static,
    ) -> Result<T, StoreError> {
        let (reply, answer) = oneshot::channel();
        match &self.mode {
            Mode::Inline(writer) => run_inline(writer, |writer| job(writer, reply)),
            Mode::Threads { writes, .. } => {
                let job: WriteJob<W> = Box::new(move |writer| job(writer, reply));
                let pushed = writes.push(job, weight_bytes + JOB_BYTES).await;
                pushed.map_err(|_closed| stopped())?;
            }
        }
        answer.await.unwrap_or_else(|_canceled| Err(stopped()))
    }

    /// The same for a job whose answer is what it returns.
    pub(crate) async fn write<T: Send + 'static>(
        &self,
        weight_bytes: usize,
        job: impl FnOnce(&mut W) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let answered = move |writer: &mut W, reply: Reply<T>| {
            let _ = reply.send(job(writer));
        };
        self.ask(weight_bytes, answered).await
    }

    /// Has the writer do `job` some time; an engine that has been stopped does not.
    pub(crate) fn write_soon(&self, job: impl FnOnce(&mut W) + Send + 'static) {
        match &self.mode {
            Mode::Inline(writer) => run_inline(writer, job),
            Mode::Threads { writes, .. } => drop(writes.push_now(Box::new(job))),
        }
    }

    /// Does work that may wait for the disk on a reader thread.
    pub(crate) async fn read<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, StoreError> {
        let Mode::Threads { reads, .. } = &self.mode else { return Ok(work()) };
        let (reply, answer) = oneshot::channel();
        let job: ReadJob = Box::new(move || {
            let _ = reply.send(work());
        });
        reads.push(job, 1).await.map_err(|_closed| stopped())?;
        answer.await.map_err(|_canceled| stopped())
    }

    /// Blocks until the index has been committed if there is far too much to commit.
    pub(super) fn bound_backlog(&self) {
        let limit = self.shared.config.commit_entries.saturating_mul(RENEW_BACKLOG);
        if self.shared.catalog.uncommitted() < limit {
            return;
        }
        let (reply, answer) = std::sync::mpsc::sync_channel(1);
        self.write_soon(move |writer| {
            let _ = writer.commit_all();
            let _ = reply.send(());
        });
        // Whether it worked or the writer has ended: there is no more to wait for.
        let _ = answer.recv();
    }
}

fn run_inline<W: Writer>(writer: &Mutex<W>, job: impl FnOnce(&mut W)) {
    let mut writer = writer.lock().expect("no panic while the lock is held");
    writer.begin_group();
    job(&mut writer);
    writer.end_group();
}

fn stopped() -> StoreError {
    StoreError::Io("the store has been closed".to_owned())
}

/// Serves jobs until the queue is closed. The clock decides only when the index is committed
/// and when background work goes on, which no caller can see but by crashing.
#[allow(clippy::disallowed_methods)]
fn write_loop<W: Writer>(mut writer: W, writes: &Queue<WriteJob<W>>, interval: Duration) {
    let _close = CloseAtEnd(writes);
    let mut committed_at = Instant::now();
    // When to go on with background work, if there is any.
    let mut background_at: Option<Instant> = None;
    loop {
        let idle = if writer.has_uncommitted() { interval } else { interval * 4 };
        let rest = background_at.map(|at| at.saturating_duration_since(Instant::now()));
        let patience = rest.map_or(idle, |rest| rest.min(idle));
        let Some(group) = writes.pop(MAX_GROUP, patience) else { break };
        writer.begin_group();
        group.into_iter().for_each(|job| job(&mut writer));
        writer.end_group();
        let now = Instant::now();
        if now.duration_since(committed_at) >= interval {
            if writer.has_uncommitted() {
                let _ = writer.commit_all();
            }
            committed_at = now;
            background_at = background_at.or(Some(now));
        }
        if background_at.is_some_and(|at| now >= at) {
            background_at = writer.background_step().map(|rest| Instant::now() + rest);
        }
    }
}

fn read_loop(reads: &Queue<ReadJob>) {
    let _close = CloseAtEnd(reads);
    // Waking up for nothing now and then does no harm.
    while let Some(jobs) = reads.pop(1, Duration::from_secs(3600)) {
        jobs.into_iter().for_each(|job| job());
    }
}

/// Closes a queue when the thread that serves it ends, also by a panic: callers that wait for
/// an answer then get an error instead of waiting forever.
struct CloseAtEnd<'a, T>(&'a Queue<T>);

impl<T> Drop for CloseAtEnd<'_, T> {
    fn drop(&mut self) {
        self.0.close();
        while self.0.pop(MAX_GROUP, Duration::ZERO).is_some() {}
    }
}
