//! The simulation as tests and experiments drive it.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use atoll_env::{Env, Instant};
use atoll_key::PeerId;
use atoll_net::{Peer, Transport};

use crate::HostId;
use crate::config::{HostConfig, Loss, SEED_ROUND, SimConfig, seed_round};
use crate::report::{PendingCall, Stats, Stuck};
use crate::runtime::SimRuntime;
use crate::schedule::What;
use crate::tasks::{Body, Run, TaskId, TaskWaker, lock};
use crate::tcp::TcpModel;
use crate::trace::TraceEvent;
use crate::transport::SimTransport;
use crate::world::streams::Fetch;
use crate::world::{NextTask, Shared};

/// A simulation. Clones are handles to the same one; when the last is dropped, every
/// task is. Handles may be moved into tasks, which can then crash hosts and cut links
/// (a simulation that holds itself so lives until [`Sim::shut_down`]).
#[derive(Clone)]
pub struct Sim {
    owner: Arc<Owner>,
}

type Hook = Box<dyn FnMut(&Sim, Step) + Send>;

struct Owner {
    shared: Arc<Shared>,
    hooks: Mutex<Vec<Hook>>,
    has_hooks: AtomicBool,
    is_running: AtomicBool,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.shared.with(|world| world.shut_down());
    }
}

/// One step: a task was polled or an event happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// A task of this host ran.
    Polled(HostId),
    /// Something happened to this host: a message or a timer.
    Event(HostId),
}

/// Why a run stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RunEnd {
    /// Nothing is left to happen.
    Idle,
    /// The limit is reached.
    Limit,
}

enum Progress {
    Stepped(Step),
    Driver,
    Ended(RunEnd),
}

/// Marks the simulation as running; tells how to replay it if it panics.
struct Running<'a>(&'a Owner);

impl<'a> Running<'a> {
    fn enter(owner: &'a Owner) -> Running<'a> {
        let was_running = owner.is_running.swap(true, Ordering::SeqCst);
        assert!(!was_running, "a simulation is not run from within itself");
        Running(owner)
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.is_running.store(false, Ordering::SeqCst);
        if std::thread::panicking() {
            let Shared { seed, .. } = *self.0.shared;
            let at = Duration::from_nanos(self.0.shared.now().as_nanos());
            let round = match seed_round() {
                0 => String::new(),
                round => format!(" with {SEED_ROUND}={round}"),
            };
            eprintln!(
                "the simulation panicked at {at:?}; seed {seed}{round} replays it; last events:"
            );
            for event in self.0.shared.with(|world| world.trace.last()) {
                eprintln!("  {event}");
            }
        }
    }
}

impl Sim {
    /// An empty network at time zero.
    pub fn new(config: SimConfig) -> Sim {
        let shared = Arc::new(Shared::new(config));
        Sim {
            owner: Arc::new(Owner {
                shared,
                hooks: Mutex::new(Vec::new()),
                has_hooks: AtomicBool::new(false),
                is_running: AtomicBool::new(false),
            }),
        }
    }

    fn shared(&self) -> &Arc<Shared> {
        &self.owner.shared
    }

    // ---- hosts ----

    /// Adds a machine, up and without a service.
    pub fn add_host(&self, config: HostConfig) -> HostId {
        self.shared().with(|world| world.add_host(&config))
    }

    /// Adds many alike.
    pub fn add_hosts(&self, count: usize, config: &HostConfig) -> Vec<HostId> {
        self.shared().with(|world| (0..count).map(|_| world.add_host(config)).collect())
    }

    /// Time, tasks and randomness of a host's present incarnation.
    pub fn env(&self, host: HostId) -> Env {
        let incarnation = self.shared().with(|world| world.host(host.0).incarnation);
        Arc::new(SimRuntime { shared: self.shared().clone(), host: host.0, incarnation })
    }

    /// Time, tasks and randomness of the test itself: its tasks never crash.
    pub fn outside(&self) -> Env {
        self.env(HostId::OUTSIDE)
    }

    /// The network as a host's present incarnation sees it.
    pub fn transport(&self, host: HostId) -> Arc<dyn Transport> {
        let (incarnation, local) = self.shared().with(|world| {
            let known = &world.hosts[host.0 as usize];
            (known.incarnation, known.peer)
        });
        let shared = self.shared().clone();
        Arc::new(SimTransport { shared, host: host.0, incarnation, local })
    }

    /// A host's identity and address.
    pub fn peer(&self, host: HostId) -> Peer {
        self.shared().with(|world| world.hosts[host.0 as usize].peer)
    }

    /// The first host with that identity.
    pub fn host_of(&self, id: &PeerId) -> Option<HostId> {
        self.shared().with(|world| world.host_by_id.get(id).copied().map(HostId))
    }

    /// Whether a host is running.
    pub fn is_up(&self, host: HostId) -> bool {
        self.shared().with(|world| world.hosts[host.0 as usize].is_up)
    }

    /// One-way latency between two hosts, without queues and chance.
    pub fn latency(&self, from: HostId, to: HostId) -> Duration {
        self.shared().with(|world| Duration::from_nanos(world.base_latency_ns(from.0, to.0)))
    }

    /// Sends `len_bytes` from `server` to `client` over one TCP connection of its own,
    /// which the client opens, and says how long it took from the first segment of the
    /// handshake to the last byte: how FTP or a web server would send a file. It shares
    /// the hosts' links with all else that goes on, whatever the calls travel on. Nothing
    /// happens before the first poll; dropped, it stops to be waited for, not to be sent.
    /// Crashes and cuts do not touch it.
    pub fn transfer(
        &self,
        server: HostId,
        client: HostId,
        len_bytes: u64,
        model: &TcpModel,
    ) -> impl Future<Output = Duration> + Send + use<> {
        let wanted = Some((server.0, client.0, len_bytes, *model));
        Fetch { shared: self.shared().clone(), wanted, began: 0, transfer: 0 }
    }

    // ---- faults ----

    /// The process dies, its machine lives: callers learn it after one round trip.
    /// Its tasks are dropped at once, or as soon as the task that says so suspends.
    pub fn crash(&self, host: HostId) {
        self.shared().with(|world| world.crash(host.0, false));
    }

    /// The machine is gone: callers run into their deadlines.
    pub fn crash_silently(&self, host: HostId) {
        self.shared().with(|world| world.crash(host.0, true));
    }

    /// The process is stopped (SIGSTOP), its machine lives: connections stay open, and nobody answers.
    pub fn freeze(&self, host: HostId) {
        self.shared().with(|world| world.freeze(host.0));
    }

    /// A stopped process goes on (SIGCONT): with what has arrived for it meanwhile, and then with its timers that
    /// have become due.
    pub fn thaw(&self, host: HostId) {
        let shared = self.shared();
        let tasks = shared.with(|world| world.thaw(host.0));
        tasks.into_iter().for_each(|task| shared.ready.push(task));
    }

    /// Starts a host again (crashing it first if it runs): a new incarnation without
    /// service and memory, at the same address with the same identity.
    pub fn restart(&self, host: HostId) -> (Env, Arc<dyn Transport>) {
        self.shared().with(|world| world.restart(host.0));
        (self.env(host), self.transport(host))
    }

    /// Splits the network: hosts talk only inside their group; those in no group form
    /// one more. Replaces an earlier partition; messages under way across it are lost.
    pub fn partition(&self, groups: &[&[HostId]]) {
        self.shared().with(|world| world.partition(groups));
    }

    /// Loses everything sent from any of `from` to any of `to`, one way.
    pub fn cut(&self, from: &[HostId], to: &[HostId]) {
        self.shared().with(|world| world.cut(from, to));
    }

    /// Ends partitions and cuts.
    pub fn heal(&self) {
        self.shared().with(|world| world.heal());
    }

    /// Changes what becomes of messages from now on.
    pub fn set_loss(&self, loss: Loss) {
        self.shared().with(|world| world.config.loss = loss);
    }

    /// Sets how far a host's wall clock is off from now on; it jumps by the difference.
    pub fn set_clock_skew_ms(&self, host: HostId, skew_ms: i64) {
        self.shared().with(|world| world.host_mut(host.0).clock_skew_ms = skew_ms);
    }

    /// Sets by how many parts per million a host's clocks run faster than virtual time from now on, both the steady and the wall
    /// clock. Sleeps that have begun end as if the rate had not changed, or later.
    pub fn set_clock_rate_ppm(&self, host: HostId, ahead_ppm: i32) {
        self.shared().set_clock_rate(host.0, ahead_ppm);
    }

    // ---- running ----

    /// Virtual time.
    pub fn now(&self) -> Instant {
        self.shared().now()
    }

    /// Runs everything due by `until`, at which time then stands.
    pub fn run_until(&self, until: Instant) {
        self.run(until.as_nanos(), |_| false);
        self.shared().with(|world| {
            let to = world.now.max(until.as_nanos());
            world.move_to(to);
            self.shared().publish_now(to);
        });
    }

    /// Runs for a while of virtual time.
    pub fn run_for(&self, span: Duration) {
        self.run_until(self.now() + span);
    }

    /// Runs until nothing is left to happen, at most for `limit` of virtual time. With
    /// periodic tasks there is always something left.
    pub fn run_until_idle_or(&self, limit: Duration) -> RunEnd {
        let end = self.run((self.now() + limit).as_nanos(), |_| false);
        end.expect("only a stop by the closure has no end")
    }

    /// Runs until `is_reached`, asked after every step, or for `limit` of virtual time;
    /// says whether it was reached.
    pub fn run_until_true(
        &self,
        limit: Duration,
        mut is_reached: impl FnMut(&Sim) -> bool,
    ) -> bool {
        is_reached(self)
            || self.run((self.now() + limit).as_nanos(), |_| is_reached(self)).is_none()
    }

    /// Steps until the end or until `stop`, in which case there is no end.
    fn run(&self, limit: u64, mut stop: impl FnMut(Step) -> bool) -> Option<RunEnd> {
        let _running = Running::enter(&self.owner);
        loop {
            match self.step(limit) {
                Progress::Stepped(step) if stop(step) => return None,
                Progress::Stepped(_) | Progress::Driver => {}
                Progress::Ended(end) => return Some(end),
            }
        }
    }

    /// Runs the simulation until `work` is done, at most for `limit` of virtual time;
    /// otherwise reports which tasks are stuck. `work` belongs to no host.
    pub fn block_on<F: Future>(&self, limit: Duration, work: F) -> Result<F::Output, Stuck> {
        let _running = Running::enter(&self.owner);
        let limit = (self.now() + limit).as_nanos();
        let mut work = pin!(work);
        let flag = TaskWaker::new(self.shared().ready.clone(), TaskId::DRIVER, false);
        let waker = Waker::from(flag.clone());
        let mut is_due = true;
        loop {
            if std::mem::take(&mut is_due) {
                flag.rearm();
                self.shared().with(|world| world.is_polling = true);
                let result = work.as_mut().poll(&mut Context::from_waker(&waker));
                self.shared().with(|world| world.is_polling = false);
                if let Poll::Ready(output) = result {
                    return Ok(output);
                }
            }
            match self.step(limit) {
                Progress::Driver => is_due = true,
                Progress::Stepped(_) => {}
                Progress::Ended(_) => return Err(self.shared().with(|world| world.stuck())),
            }
        }
    }

    /// Polls one ready task or, if none is, lets the next event happen.
    fn step(&self, limit: u64) -> Progress {
        let shared = self.shared();
        let step = match shared.with(|world| world.next_task(&shared.ready)) {
            Some(NextTask::Driver) => return Progress::Driver,
            Some(NextTask::Task(id, run, host)) => {
                self.poll(id, run);
                Step::Polled(HostId(host))
            }
            None => {
                let Some(what) = shared.with(|world| {
                    let what = world.next_event(limit);
                    shared.publish_now(world.now);
                    what
                }) else {
                    return Progress::Ended(self.end_at(limit));
                };
                Step::Event(self.happen(what))
            }
        };
        if self.owner.has_hooks.load(Ordering::Relaxed) {
            self.call_hooks(step);
        }
        Progress::Stepped(step)
    }

    /// Nothing is due by `limit`: if something is due later, time moves up to it.
    fn end_at(&self, limit: u64) -> RunEnd {
        self.shared().with(|world| {
            if world.next_event_at().is_none() {
                return RunEnd::Idle;
            }
            let to = world.now.max(limit);
            world.move_to(to);
            self.shared().publish_now(to);
            RunEnd::Limit
        })
    }

    fn poll(&self, id: TaskId, mut run: Run) {
        let shared = self.shared();
        run.flag.rearm();
        let mut cx = Context::from_waker(&run.waker);
        let result = match &mut run.body {
            Body::Plain(work) => work.as_mut().poll(&mut cx).map(|()| None),
            Body::Serve(work) => work.as_mut().poll(&mut cx).map(Some),
        };
        match result {
            Poll::Pending => {
                // Given back if the task was ended meanwhile; dropped here, unlocked.
                let _ended = shared.with(|world| {
                    world.is_polling = false;
                    world.tasks.check_in(id, run)
                });
            }
            Poll::Ready(None) => shared.with(|world| {
                world.is_polling = false;
                world.end_task(id);
            }),
            Poll::Ready(Some(answer)) => shared.with(|world| {
                world.is_polling = false;
                world.finish_serving(id, answer);
            }),
        }
    }

    /// Lets an event happen; returns the host at which it happened.
    fn happen(&self, what: What) -> HostId {
        let shared = self.shared();
        match what {
            What::Timer(slot) => HostId(shared.with(|world| world.timer_fired(slot))),
            What::Limit(slot) => HostId(shared.with(|world| world.limit_passed(slot))),
            What::Send(slot, leg) => HostId(shared.with(|world| world.send_due(slot, leg))),
            What::Chunk(slot, hop) => HostId(shared.with(|world| world.chunk_is_at(slot, hop))),
            What::Pump(connection, side) => {
                HostId(shared.with(|world| world.pump_due(connection, side)))
            }
            What::Head(slot, leg) => shared.with(|world| {
                world.head_arrived(slot, leg);
                HostId(world.receiver(slot, leg))
            }),
            What::Arrive(slot, leg) => {
                let (to, arrival) = shared.with(|world| {
                    let to = world.receiver(slot, leg);
                    let arrival = world.arrived(slot, leg);
                    world.is_polling = arrival.is_some();
                    (to, arrival)
                });
                if let Some(arrival) = arrival {
                    let work = arrival.service.handle(arrival.from, arrival.request);
                    shared.with(|world| {
                        world.is_polling = false;
                        world.begin_serving(&shared.ready, arrival.call, work);
                    });
                }
                HostId(to)
            }
        }
    }

    // ---- watching ----

    /// Calls `hook` after every step, when no task runs and nothing is locked: the place
    /// for a checker to assert invariants. Hooks may crash hosts, but not run the
    /// simulation.
    pub fn step_hook(&self, hook: impl FnMut(&Sim, Step) + Send + 'static) {
        lock(&self.owner.hooks).push(Box::new(hook));
        self.owner.has_hooks.store(true, Ordering::Relaxed);
    }

    /// Drops all hooks.
    pub fn clear_hooks(&self) {
        self.owner.has_hooks.store(false, Ordering::Relaxed);
        let hooks = std::mem::take(&mut *lock(&self.owner.hooks));
        drop(hooks);
    }

    fn call_hooks(&self, step: Step) {
        let mut hooks = std::mem::take(&mut *lock(&self.owner.hooks));
        hooks.iter_mut().for_each(|hook| hook(self, step));
        // A hook may have added others, or cleared them all.
        if self.owner.has_hooks.load(Ordering::Relaxed) {
            let mut kept = lock(&self.owner.hooks);
            hooks.append(&mut kept);
            *kept = hooks;
        }
    }

    /// Demands progress: runs until `is_true`, asked after every step.
    ///
    /// # Panics
    /// With a report of the tasks that are stuck, if it has not come true after `limit`.
    pub fn eventually(&self, limit: Duration, claim: &str, is_true: impl FnMut(&Sim) -> bool) {
        if !self.run_until_true(limit, is_true) {
            let stuck = self.shared().with(|world| world.stuck());
            panic!("not within {limit:?}: {claim}; {stuck}");
        }
    }

    /// Asserts what must hold inside the simulator between two steps.
    ///
    /// # Panics
    /// If it does not.
    pub fn check_invariants(&self) {
        self.shared().with(|world| world.check_invariants());
    }

    /// Counts since the beginning.
    pub fn stats(&self) -> Stats {
        self.shared().with(|world| world.stats.clone())
    }

    /// Calls without an outcome, oldest first.
    pub fn pending_calls(&self) -> Vec<PendingCall> {
        self.shared().with(|world| world.pending_calls())
    }

    /// How many tasks live.
    pub fn task_count(&self) -> usize {
        self.shared().with(|world| world.tasks.count())
    }

    /// A hash over every event so far: equal for equal runs.
    pub fn trace_hash(&self) -> u128 {
        self.shared().with(|world| world.trace.hash())
    }

    /// How many events the hash covers.
    pub fn event_count(&self) -> u64 {
        self.shared().with(|world| world.trace.event_count())
    }

    /// The last events, oldest first, as many as the configuration keeps.
    pub fn trace(&self) -> Vec<TraceEvent> {
        self.shared().with(|world| world.trace.last())
    }

    /// The seed that replays this run.
    pub fn seed(&self) -> u64 {
        self.shared().seed
    }

    /// Drops every task and service for good.
    pub fn shut_down(&self) {
        self.clear_hooks();
        self.shared().with(|world| world.shut_down());
    }
}

impl std::fmt::Debug for Sim {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sim").field("seed", &self.seed()).field("now", &self.now()).finish()
    }
}
