//! A router in user space: packets between sites, with delays, rates and queues.
//!
//! Each site has an access line of a rate either way with a queue that drops what does
//! not fit, and each ordered pair of sites a delay:
//!
//! ```text
//! site a ─► uplink of a ─► delay a→b ─► downlink of b ─► site b
//! ```
//!
//! One thread reads each interface; one delivers all packets when they are due. The
//! times of a packet follow from when it was read and what is ahead of it, not from when
//! a thread got round to it, so the threads' wake-ups add to single packets and not up.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::io::{Read, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// The interfaces' MTU, Ethernet's.
pub(crate) const MTU: usize = 1500;
/// Most packets in the router; more are dropped, which only a broken sender reaches.
const MAX_PACKETS: usize = 1 << 20;

/// What the network does to packets.
#[derive(Clone, Debug)]
pub(crate) struct Lines {
    /// One way, from row to column.
    pub delays: Vec<Vec<Duration>>,
    /// Of each access line, either way.
    pub rate_bytes_per_sec: f64,
    /// What may wait at each end of an access line.
    pub queue_bytes: f64,
}

/// What went through.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Traffic {
    pub packets: u64,
    pub bytes: u64,
    pub dropped: u64,
    /// The latest that a packet left after it was due, and the sum over all.
    pub worst_late: Duration,
    pub total_late: Duration,
}

pub(crate) struct Router {
    shared: Arc<Shared>,
}

struct Shared {
    lines: Lines,
    state: Mutex<State>,
    /// Something is due earlier than what was waited for.
    earlier: Condvar,
    interfaces: Vec<File>,
}

#[derive(Default)]
struct State {
    /// Seconds since the start, in nanoseconds, when each line is free.
    up_free_at: Vec<u64>,
    down_free_at: Vec<u64>,
    due: BinaryHeap<Reverse<Due>>,
    next_serial: u64,
    traffic: Traffic,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Due {
    at: u64,
    serial: u64,
    to: usize,
    /// At the receiver's line, or through it.
    is_through: bool,
    packet: Vec<u8>,
}

impl Router {
    /// Carries packets between interfaces; number i is site i, with an address that ends
    /// in i + 1. Its threads run as long as the process.
    pub(crate) fn start(interfaces: Vec<File>, lines: Lines) -> Router {
        let count = interfaces.len();
        let state =
            State { up_free_at: vec![0; count], down_free_at: vec![0; count], ..State::default() };
        let shared = Arc::new(Shared {
            lines,
            state: Mutex::new(state),
            earlier: Condvar::new(),
            interfaces,
        });
        let start = Instant::now();
        for from in 0..count {
            let shared = shared.clone();
            std::thread::spawn(move || shared.read(from, start));
        }
        let delivering = shared.clone();
        std::thread::spawn(move || delivering.deliver(start));
        Router { shared }
    }

    /// What went through since this was asked last.
    pub(crate) fn take_traffic(&self) -> Traffic {
        std::mem::take(&mut self.shared.state().traffic)
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread of the router panics")
    }

    /// Passes a packet through a line that is free at `free_at`; when it is through,
    /// unless the queue is full.
    fn through(&self, free_at: &mut u64, now: u64, len_bytes: usize) -> Option<u64> {
        let begins = now.max(*free_at);
        let waiting = (begins - now) as f64 * self.lines.rate_bytes_per_sec / 1e9;
        if begins > now && waiting + len_bytes as f64 > self.lines.queue_bytes {
            return None;
        }
        let takes = len_bytes as f64 * 1e9 / self.lines.rate_bytes_per_sec;
        *free_at = begins + takes as u64;
        Some(*free_at)
    }

    fn read(&self, from: usize, start: Instant) {
        let mut buffer = [0; MTU + 100];
        loop {
            let Ok(len) = (&self.interfaces[from]).read(&mut buffer) else { return };
            let now = nanos(start.elapsed());
            let packet = &buffer[..len];
            // IPv4 only; the last byte of the destination names the site.
            if len < 20 || packet[0] >> 4 != 4 {
                continue;
            }
            let to = usize::from(packet[19]).wrapping_sub(1);
            if to >= self.interfaces.len() || to == from {
                continue;
            }
            self.accept(from, to, packet, now);
        }
    }

    fn accept(&self, from: usize, to: usize, packet: &[u8], now: u64) {
        let mut state = self.state();
        let state = &mut *state;
        let sent = self.through(&mut state.up_free_at[from], now, packet.len());
        let Some(sent) = sent.filter(|_| state.due.len() < MAX_PACKETS) else {
            state.traffic.dropped += 1;
            return;
        };
        let at = sent + nanos(self.lines.delays[from][to]);
        let is_first = state.due.peek().is_none_or(|Reverse(first)| at < first.at);
        state.push(at, to, false, packet.to_vec());
        if is_first {
            self.earlier.notify_one();
        }
    }

    fn deliver(&self, start: Instant) {
        let mut ready = Vec::new();
        let mut state = self.state();
        loop {
            let now = nanos(start.elapsed());
            while let Some(Reverse(first)) = state.due.peek()
                && first.at <= now
            {
                let Reverse(due) = state.due.pop().expect("it was just seen");
                if due.is_through {
                    let late = Duration::from_nanos(now - due.at);
                    state.traffic.packets += 1;
                    state.traffic.bytes += due.packet.len() as u64;
                    state.traffic.worst_late = state.traffic.worst_late.max(late);
                    state.traffic.total_late += late;
                    ready.push(due);
                } else {
                    self.arrive(&mut state, due);
                }
            }
            if !ready.is_empty() {
                drop(state);
                for due in ready.drain(..) {
                    // An interface that is full, or whose site is gone, drops packets.
                    let _ = (&self.interfaces[due.to]).write(&due.packet);
                }
                state = self.state();
                continue;
            }
            let wait = state.due.peek().map(|Reverse(first)| first.at - now);
            let wait = Duration::from_nanos(wait.unwrap_or(1_000_000_000));
            state = self.earlier.wait_timeout(state, wait).expect("no thread panics").0;
        }
    }

    /// A packet is at the receiver's line.
    fn arrive(&self, state: &mut State, due: Due) {
        match self.through(&mut state.down_free_at[due.to], due.at, due.packet.len()) {
            Some(at) => state.push(at, due.to, true, due.packet),
            None => state.traffic.dropped += 1,
        }
    }
}

impl State {
    fn push(&mut self, at: u64, to: usize, is_through: bool, packet: Vec<u8>) {
        let serial = self.next_serial;
        self.next_serial += 1;
        self.due.push(Reverse(Due { at, serial, to, is_through, packet }));
    }
}
