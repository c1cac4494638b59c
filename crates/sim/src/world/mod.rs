//! The world: hosts, tasks, timers, calls and links, as plain data behind one lock.
//!
//! Foreign code must not run under the lock, as it may come back here: what is to be
//! woken or dropped is put into `wakes` and `graves`, and [`Shared::with`] sees to it
//! once the lock is released. Graves wait longer, until no task is being polled: a task
//! that aborts another may hold a lock which the other's destructor wants. Tokio too
//! drops an aborted task later, on its own account.

mod frozen;
pub(crate) mod network;
pub(crate) mod streams;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Waker;

use atoll_env::Instant;
use atoll_key::PeerId;
use atoll_net::{CallError, Peer, Reply, Request, Service};

use self::frozen::Frozen;
use self::network::CallSlot;
use self::streams::{Chunk, Connection, Transfer};
use crate::HostId;
use crate::clock::HostClock;
use crate::config::{HostConfig, SimConfig, seed_of_round, seed_round};
use crate::latency::random_point;
use crate::random::Random;
use crate::report::{PendingCall, Stats, Stuck};
use crate::schedule::{Entry, Schedule, What};
use crate::slab::Slab;
use crate::tasks::{Body, Ready, Run, TaskId, TaskList, Tasks, lock};
use crate::trace::{EventKind, Trace, TraceEvent};

/// Most hosts of one simulation: their addresses are 10.0.0.1 and up.
const MAX_HOST_COUNT: usize = (1 << 24) - 2;

// Streams of random numbers; hosts' begin above these.
const STREAM_NETWORK: u64 = 0;
const STREAM_ORDER: u64 = 1;
const STREAM_PLACES: u64 = 2;
const STREAM_OUTSIDE: u64 = 3;
const STREAM_HOSTS: u64 = 1 << 32;

/// What is dropped once nothing else runs.
#[expect(dead_code, reason = "the fields are there to be dropped")]
pub(crate) enum Grave {
    Waker(Waker),
    Run(Run),
    Body(Body),
    Service(Arc<dyn Service>),
    Request(Request),
    Reply(Result<Reply, CallError>),
}

/// One machine. About 300 bytes.
pub(crate) struct Host {
    pub(crate) peer: Peer,
    /// Counts crashes and restarts.
    pub(crate) incarnation: u32,
    pub(crate) is_up: bool,
    /// A machine that is gone sends no resets.
    pub(crate) is_silent: bool,
    /// Its process is stopped.
    pub(crate) is_frozen: bool,
    /// Hosts in different groups cannot talk.
    pub(crate) group: u32,
    pub(crate) place: [f32; 3],
    pub(crate) access_delay_ns: u64,
    pub(crate) upload_bytes_per_sec: Option<u64>,
    pub(crate) download_bytes_per_sec: Option<u64>,
    /// When the uplink and the downlink have done what is queued at them.
    pub(crate) uplink_free_at: u64,
    pub(crate) downlink_free_at: u64,
    pub(crate) clock: HostClock,
    pub(crate) clock_skew_ms: i64,
    pub(crate) random: Random,
    pub(crate) tasks: TaskList,
    pub(crate) service: Option<Arc<dyn Service>>,
    /// Smoothed round trips in microseconds, sorted by host.
    pub(crate) round_trips: Vec<(u32, u32)>,
}

pub(crate) struct TimerSlot {
    /// The entry of the schedule that ends it.
    pub(crate) seq: u64,
    pub(crate) host: u32,
    pub(crate) waker: Waker,
}

pub(crate) struct World {
    pub(crate) config: SimConfig,
    pub(crate) now: u64,
    pub(crate) hosts: Vec<Host>,
    outside: Host,
    pub(crate) host_by_id: BTreeMap<PeerId, u32>,
    pub(crate) cuts: Vec<(BTreeSet<u32>, BTreeSet<u32>)>,
    pub(crate) tasks: Tasks,
    pub(crate) timers: Slab<TimerSlot>,
    pub(crate) calls: Slab<CallSlot>,
    pub(crate) schedule: Schedule,
    pub(crate) frozen: Frozen,
    pub(crate) connections: Slab<Connection>,
    /// The connection of two hosts' calls, the smaller number first.
    pub(crate) connection_of: BTreeMap<(u32, u32), u32>,
    pub(crate) chunks: Slab<Chunk>,
    pub(crate) transfers: Slab<Transfer>,
    pub(crate) network_random: Random,
    order_random: Random,
    places_random: Random,
    pub(crate) stats: Stats,
    pub(crate) trace: Trace,
    pub(crate) wakes: Vec<Waker>,
    pub(crate) graves: Vec<Grave>,
    /// A task, a service or the future of `block_on` is at work.
    pub(crate) is_polling: bool,
    steps_at_now: u64,
    is_shut_down: bool,
}

pub(crate) struct Shared {
    world: Mutex<World>,
    pub(crate) ready: Arc<Ready>,
    /// A copy of the world's time, read without the lock.
    now: AtomicU64,
    clocks_differ: AtomicBool,
    /// As the caller gave it.
    pub(crate) seed: u64,
}

impl Shared {
    pub(crate) fn new(mut config: SimConfig) -> Shared {
        let seed = config.seed;
        config.seed = seed_of_round(seed, seed_round());
        let world = Mutex::new(World::new(config));
        let (now, clocks_differ) = (AtomicU64::new(0), AtomicBool::new(false));
        Shared { world, ready: Arc::new(Ready::default()), now, clocks_differ, seed }
    }

    /// Works on the world, then wakes and drops what the work put aside.
    pub(crate) fn with<R>(&self, work: impl FnOnce(&mut World) -> R) -> R {
        let mut world = lock(&self.world);
        let result = work(&mut world);
        let wakes = std::mem::take(&mut world.wakes);
        let graves = if world.is_polling { Vec::new() } else { std::mem::take(&mut world.graves) };
        drop(world);
        wakes.into_iter().for_each(Waker::wake);
        drop(graves);
        result
    }

    pub(crate) fn now(&self) -> Instant {
        Instant(self.now.load(Ordering::Relaxed))
    }

    /// Whether some host's clock may not show virtual time.
    pub(crate) fn clocks_differ(&self) -> bool {
        self.clocks_differ.load(Ordering::Relaxed)
    }

    /// Sets by how many parts per million a host's clock is faster than virtual time from now on.
    pub(crate) fn set_clock_rate(&self, host: u32, ahead_ppm: i32) {
        self.clocks_differ.store(true, Ordering::Relaxed);
        self.with(|world| {
            let now = world.now;
            world.host_mut(host).clock.set_rate(now, ahead_ppm);
        });
    }

    pub(crate) fn publish_now(&self, now: u64) {
        self.now.store(now, Ordering::Relaxed);
    }
}

fn address(index: u32) -> SocketAddr {
    let [_, b, c, d] = (index + 1).to_be_bytes();
    SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, b, c, d)), 1)
}

/// The number of the host at an address, whether it exists or not.
pub(crate) fn host_at(addr: &SocketAddr) -> Option<u32> {
    match addr.ip() {
        IpAddr::V4(ip) if ip.octets()[0] == 10 && addr.port() == 1 => {
            let [_, b, c, d] = ip.octets();
            u32::from_be_bytes([0, b, c, d]).checked_sub(1)
        }
        _ => None,
    }
}

/// No key pair stands behind it: the simulated transport proves identity by construction.
fn peer_id(seed: u64, index: u32) -> PeerId {
    let mut hasher = blake3::Hasher::new_derive_key("atoll v1 simulated peer");
    hasher.update(&seed.to_be_bytes()).update(&index.to_be_bytes());
    PeerId(*hasher.finalize().as_bytes())
}

fn host_random(seed: u64, index: u32, incarnation: u32) -> Random {
    Random::new(seed ^ u64::from(incarnation) << 40, STREAM_HOSTS + u64::from(index))
}

fn nanos(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

fn host(seed: u64, index: u32, config: &HostConfig, place: [f32; 3]) -> Host {
    Host {
        peer: Peer {
            id: config.identity.unwrap_or_else(|| peer_id(seed, index)),
            addr: address(index),
        },
        incarnation: 0,
        is_up: true,
        is_silent: false,
        is_frozen: false,
        group: 0,
        place,
        access_delay_ns: nanos(config.access_delay),
        upload_bytes_per_sec: config.upload_bytes_per_sec,
        download_bytes_per_sec: config.download_bytes_per_sec,
        uplink_free_at: 0,
        downlink_free_at: 0,
        clock: HostClock::default(),
        clock_skew_ms: config.clock_skew_ms,
        random: host_random(seed, index, 0),
        tasks: TaskList::EMPTY,
        service: None,
        round_trips: Vec::new(),
    }
}

impl World {
    fn new(config: SimConfig) -> World {
        let seed = config.seed;
        let mut outside = host(seed, 0, &HostConfig::default(), [0.0; 3]);
        outside.random = Random::new(seed, STREAM_OUTSIDE);
        World {
            now: 0,
            hosts: Vec::new(),
            outside,
            host_by_id: BTreeMap::new(),
            cuts: Vec::new(),
            tasks: Tasks::new(),
            timers: Slab::new(),
            calls: Slab::new(),
            schedule: Schedule::new(),
            frozen: Frozen::default(),
            connections: Slab::new(),
            connection_of: BTreeMap::new(),
            chunks: Slab::new(),
            transfers: Slab::new(),
            network_random: Random::new(seed, STREAM_NETWORK),
            order_random: Random::new(seed, STREAM_ORDER),
            places_random: Random::new(seed, STREAM_PLACES),
            stats: Stats::default(),
            trace: Trace::new(seed, config.trace_last_count),
            wakes: Vec::new(),
            graves: Vec::new(),
            is_polling: false,
            steps_at_now: 0,
            is_shut_down: false,
            config,
        }
    }

    pub(crate) fn add_host(&mut self, config: &HostConfig) -> HostId {
        assert!(self.hosts.len() < MAX_HOST_COUNT, "a simulation has at most 2^24 - 2 hosts");
        let index = self.hosts.len() as u32;
        let place = random_point(&mut self.places_random);
        let host = host(self.config.seed, index, config, place);
        self.host_by_id.entry(host.peer.id).or_insert(index);
        self.hosts.push(host);
        HostId(index)
    }

    pub(crate) fn host(&self, index: u32) -> &Host {
        if index == HostId::OUTSIDE.0 { &self.outside } else { &self.hosts[index as usize] }
    }

    pub(crate) fn host_mut(&mut self, index: u32) -> &mut Host {
        if index == HostId::OUTSIDE.0 { &mut self.outside } else { &mut self.hosts[index as usize] }
    }

    /// Whether this incarnation of the host is the one that runs.
    pub(crate) fn is_current(&self, host: u32, incarnation: u32) -> bool {
        let host = self.host(host);
        host.is_up && host.incarnation == incarnation && !self.is_shut_down
    }

    pub(crate) fn record(&mut self, kind: EventKind, from: u32, to: u32, method: u16, len: usize) {
        self.trace.record(TraceEvent {
            at_ns: self.now,
            kind,
            from: HostId(from),
            to: HostId(to),
            method,
            len_bytes: u32::try_from(len).unwrap_or(u32::MAX),
        });
    }

    // ---- tasks ----

    pub(crate) fn spawn(
        &mut self,
        ready: &Arc<Ready>,
        host: u32,
        incarnation: u32,
        body: Body,
        call: Option<u32>,
    ) -> Option<TaskId> {
        if !self.is_current(host, incarnation) {
            self.graves.push(Grave::Body(body));
            return None;
        }
        let list = match host {
            u32::MAX => &mut self.outside.tasks,
            _ => &mut self.hosts[host as usize].tasks,
        };
        Some(self.tasks.add(ready, host, list, body, call))
    }

    /// Takes the next ready task for a poll.
    pub(crate) fn next_task(&mut self, ready: &Ready) -> Option<NextTask> {
        loop {
            let (shuffle, random) = (self.config.shuffle_tasks, &mut self.order_random);
            let id = ready.pop(|count| if shuffle { random.below(count) } else { 0 })?;
            if id == TaskId::DRIVER {
                return Some(NextTask::Driver);
            }
            if self.waits_task(id) {
                continue;
            }
            // Otherwise: the waker of a task that has ended.
            if let Some((run, host)) = self.tasks.check_out(id) {
                self.count_step();
                self.stats.poll_count += 1;
                self.is_polling = true;
                return Some(NextTask::Task(id, run, host));
            }
        }
    }

    /// Ends a task; returns the call it was answering.
    pub(crate) fn end_task(&mut self, id: TaskId) -> Option<u32> {
        let host = self.tasks.host_of(id)?;
        let list = match host {
            u32::MAX => &mut self.outside.tasks,
            _ => &mut self.hosts[host as usize].tasks,
        };
        let ended = self.tasks.remove(id, list)?;
        self.graves.extend(ended.run.map(Grave::Run));
        ended.call
    }

    fn drop_tasks_of(&mut self, host: u32) {
        let mut list = std::mem::replace(&mut self.host_mut(host).tasks, TaskList::EMPTY);
        while let Some(ended) = self.tasks.remove_first(&mut list) {
            self.graves.extend(ended.run.map(Grave::Run));
            if let Some(call) = ended.call {
                self.server_died(call);
            }
        }
    }

    // ---- timers ----

    pub(crate) fn start_timer(&mut self, host: u32, at: u64, waker: Waker) -> (u32, u64) {
        let slot = self.timers.insert(TimerSlot { seq: 0, host, waker });
        let seq = self.schedule.push(at.max(self.now), What::Timer(slot));
        self.timers.find_mut(slot).expect("it was just inserted").seq = seq;
        (slot, seq)
    }

    /// Gives a timer that still runs another waker; false if it has ended.
    pub(crate) fn rewake_timer(&mut self, (slot, seq): (u32, u64), waker: &Waker) -> bool {
        match self.timers.find_mut(slot) {
            Some(timer) if timer.seq == seq => {
                if !timer.waker.will_wake(waker) {
                    let old = std::mem::replace(&mut timer.waker, waker.clone());
                    self.graves.push(Grave::Waker(old));
                }
                true
            }
            _ => false,
        }
    }

    pub(crate) fn stop_timer(&mut self, (slot, seq): (u32, u64)) {
        if self.timers.find(slot).is_some_and(|timer| timer.seq == seq) {
            let timer = self.timers.remove(slot).expect("it was just found");
            self.graves.push(Grave::Waker(timer.waker));
            self.entry_cancelled();
        }
    }

    // ---- events ----

    fn is_live(timers: &Slab<TimerSlot>, calls: &Slab<CallSlot>, entry: &Entry) -> bool {
        match entry.what {
            What::Timer(slot) => timers.find(slot).is_some_and(|timer| timer.seq == entry.seq),
            What::Limit(slot) => calls.find(slot).is_some_and(|call| call.limit_seq == entry.seq),
            _ => true,
        }
    }

    /// Notes that a timer's or deadline's entry counts no more.
    pub(crate) fn entry_cancelled(&mut self) {
        if self.schedule.cancelled() {
            let (timers, calls) = (&self.timers, &self.calls);
            self.schedule.sweep(|entry| World::is_live(timers, calls, entry));
        }
    }

    /// When the next event is due.
    pub(crate) fn next_event_at(&mut self) -> Option<u64> {
        while let Some(entry) = self.schedule.peek() {
            if World::is_live(&self.timers, &self.calls, entry) {
                return Some(entry.at);
            }
            self.schedule.pop_dead();
        }
        None
    }

    /// Takes the next event, of those due by `limit`, and moves time to it.
    pub(crate) fn next_event(&mut self, limit: u64) -> Option<What> {
        loop {
            if self.next_event_at()? > limit {
                return None;
            }
            let entry = self.schedule.pop().expect("it was just seen");
            self.move_to(entry.at);
            if self.waits_event(entry) {
                continue;
            }
            self.count_step();
            return Some(entry.what);
        }
    }

    pub(crate) fn move_to(&mut self, at: u64) {
        assert!(at >= self.now, "virtual time never goes back");
        if at > self.now {
            self.steps_at_now = 0;
            self.now = at;
        }
    }

    fn count_step(&mut self) {
        self.steps_at_now += 1;
        assert!(
            self.steps_at_now <= self.config.max_steps_per_instant,
            "livelock: {} steps without virtual time moving on; the last events were {:#?}",
            self.steps_at_now,
            self.trace.last()
        );
    }

    pub(crate) fn timer_fired(&mut self, slot: u32) -> u32 {
        let timer = self.timers.remove(slot).expect("a live entry has its slot");
        self.stats.timer_count += 1;
        self.record(EventKind::Timer, timer.host, timer.host, 0, 0);
        self.wakes.push(timer.waker);
        timer.host
    }

    // ---- reports ----

    /// Why `block_on` did not finish.
    pub(crate) fn stuck(&mut self) -> Stuck {
        let is_idle = self.next_event_at().is_none();
        let mut pending_calls: Vec<PendingCall> = self.pending_calls();
        let pending_call_count = pending_calls.len();
        pending_calls.truncate(Stuck::MAX_LISTED);
        let mut tasks_by_host = self.tasks.count_by_host();
        tasks_by_host.sort_by_key(|(host, count)| (std::cmp::Reverse(*count), *host));
        tasks_by_host.truncate(Stuck::MAX_LISTED);
        Stuck {
            seed: self.config.seed,
            at: Instant(self.now),
            is_idle,
            pending_calls,
            pending_call_count,
            tasks_by_host: tasks_by_host.into_iter().map(|(h, n)| (HostId(h), n)).collect(),
            task_count: self.tasks.count(),
            scheduled_count: self.schedule.len(),
        }
    }

    pub(crate) fn pending_calls(&self) -> Vec<PendingCall> {
        let waiting = self.calls.iter().filter(|(_, call)| call.limit_seq != 0);
        let mut calls: Vec<PendingCall> = waiting
            .map(|(_, call)| PendingCall {
                from: HostId(call.from),
                to: HostId(call.to),
                method: call.method,
                started_at: Instant(call.started_at),
                is_being_served: call.server.is_some(),
            })
            .collect();
        calls.sort_by_key(|call| (call.started_at, call.from, call.to));
        calls
    }

    // ---- faults ----

    pub(crate) fn crash(&mut self, index: u32, is_silent: bool) {
        self.thaw(index);
        let host = &mut self.hosts[index as usize];
        host.is_silent = is_silent;
        if !host.is_up {
            return;
        }
        host.is_up = false;
        host.incarnation += 1;
        host.round_trips = Vec::new();
        let service = host.service.take();
        self.graves.extend(service.map(Grave::Service));
        self.record(EventKind::Crash, index, index, 0, usize::from(is_silent));
        self.drop_tasks_of(index);
        self.break_connections_of(index);
    }

    pub(crate) fn restart(&mut self, index: u32) {
        if self.hosts[index as usize].is_up {
            self.crash(index, false);
        }
        let (seed, now) = (self.config.seed, self.now);
        let host = &mut self.hosts[index as usize];
        host.incarnation += 1;
        host.is_up = true;
        host.is_silent = false;
        host.uplink_free_at = now;
        host.downlink_free_at = now;
        host.random = host_random(seed, index, host.incarnation);
        self.record(EventKind::Restart, index, index, 0, 0);
    }

    pub(crate) fn partition(&mut self, groups: &[&[HostId]]) {
        self.hosts.iter_mut().for_each(|host| host.group = 0);
        for (number, group) in groups.iter().enumerate() {
            for member in *group {
                self.hosts[member.0 as usize].group = number as u32 + 1;
                self.record(EventKind::Cut, member.0, number as u32 + 1, 0, 0);
            }
        }
    }

    pub(crate) fn cut(&mut self, from: &[HostId], to: &[HostId]) {
        let set = |ids: &[HostId]| ids.iter().map(|id| id.0).collect::<BTreeSet<u32>>();
        for (a, b) in from.iter().flat_map(|a| to.iter().map(move |b| (a.0, b.0))) {
            self.record(EventKind::Cut, a, b, 1, 0);
        }
        self.cuts.push((set(from), set(to)));
    }

    pub(crate) fn heal(&mut self) {
        self.hosts.iter_mut().for_each(|host| host.group = 0);
        self.cuts.clear();
        self.record(EventKind::Cut, HostId::OUTSIDE.0, HostId::OUTSIDE.0, 0, 0);
    }

    /// Ends every task and lets go of every service, so that nothing holds this world.
    pub(crate) fn shut_down(&mut self) {
        self.is_shut_down = true;
        // If it was left behind by a panic.
        self.is_polling = false;
        for index in (0..self.hosts.len() as u32).chain([HostId::OUTSIDE.0]) {
            self.drop_tasks_of(index);
            let service = self.host_mut(index).service.take();
            self.graves.extend(service.map(Grave::Service));
        }
    }
}

/// The task whose turn it is.
pub(crate) enum NextTask {
    /// The future given to `block_on`.
    Driver,
    /// A task of a host.
    Task(TaskId, Run, u32),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_costs_far_less_than_a_kibibyte() {
        // And its share of the table of identities: 36 bytes, twice for half-full nodes.
        assert!(size_of::<Host>() + 72 < 512, "{} bytes", size_of::<Host>());
    }

    #[test]
    fn addresses_name_their_hosts() {
        for index in [0, 254, 255, 65_535, MAX_HOST_COUNT as u32 - 1] {
            assert_eq!(host_at(&address(index)), Some(index));
        }
        assert_eq!(address(0).to_string(), "10.0.0.1:1");
        assert_eq!(host_at(&"10.0.0.0:1".parse().unwrap()), None);
    }
}
