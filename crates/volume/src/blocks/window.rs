//! How much to have on its way at once: a prefetch window that adapts as congestion
//! control does, which CFS leaves to the future (§6.3, §8) and sets by hand (§7.1: "Large
//! amounts of pre-fetch are counter-productive, since they can congest the client server's
//! network connection").
//!
//! Blocks come from many nodes, some next door and some on another continent, and some from
//! this node's own disk. So a single block's delay says little; the window measures the rate
//! at which bytes arrive during a *round*. A round ends when a whole window's worth has come, and
//! nearly all blocks that were outstanding when it began. (Otherwise near nodes would count for
//! more: their blocks come first.) The mean delay follows from Little's law: the mean number of
//! outstanding bytes divided by the rate.
//!
//! - **Climb:** the window doubles each round while the rate grows nearly as much as the
//!   window did, and grows by a quarter while the rate grows somewhat. When the rate twice does
//!   not grow, the path is full, and the window is halved for as long as the rate stays: the
//!   bytes beyond that only waited in queues.
//! - **Cruise:** by Little's law, outstanding bytes that are not on the path are in a queue; the
//!   window is kept such that the queue is between one block and a fifth of it (TCP Vegas' idea).
//!   Now and then a larger window is tried: if it is faster, the path became wider, and the
//!   window climbs again. A halved one is tried as well, which empties the queue and shows the
//!   delay of the path without it; at once when delays have become long, as the cause is either
//!   a queue or another path.
//! - A block that **times out** halves the window, at most once a round.
//!
//! Several readers on one full path do not outbid each other: a reader that has half of it and
//! tries a larger window gains too little. With many readers queues do grow, up to the windows'
//! limits.
//!
//! A round in which no fetch was refused says nothing of the path and changes nothing.
//!
//! A pure data structure: time is an argument, and no task is woken here.

use std::time::Duration;

use atoll_env::Instant;

/// Bounds of a [`Window`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// It begins with so many blocks...
    pub first_blocks: u64,
    /// ... but with no more than this, bytes.
    pub first_bytes: u64,
    /// It never shrinks below this, bytes.
    pub min_bytes: u64,
    /// It never grows above this, bytes.
    pub max_bytes: u64,
    /// Blocks on their way at once, however small.
    pub max_blocks: usize,
}

impl Default for Limits {
    /// First: 16 blocks, about one for each of the nodes that are asked, whose TCP begins
    /// with 14 KiB however much is asked for; CFS had 5 blocks of 8 KiB by hand on the
    /// networks of 2001. But 512 KiB: a second of 4 Mbit/s. Least: 128 KiB, two usual data
    /// blocks. Most: 32 MiB, which fills 1 Gbit/s at a delay of 250 ms. Guesses all, the
    /// first borne out by `atoll lab run cfs-fig6`.
    fn default() -> Limits {
        Limits {
            first_blocks: 16,
            first_bytes: 512 << 10,
            min_bytes: 128 << 10,
            max_bytes: 32 << 20,
            max_blocks: 512,
        }
    }
}

/// A block counts as no less than this: its lookup and its headers cost something too.
const MIN_COST_BYTES: u64 = 2 << 10;

/// A round has at least so many blocks, or its rate would be chance.
const MIN_ROUND_BLOCKS: u64 = 8;

/// One in so many blocks may be late without holding up the end of a round.
const STRAGGLERS: usize = 8;

/// Rounds of a climb that may gain nothing, in a row.
const MAX_FLAT: u32 = 1;

/// The rate grew by this share of what the window grew by: nothing is in the way yet. (Who
/// has the share *s* of a full path and doubles its window gains (1 − s) / (1 + s) of that,
/// so this is only for who has less than a seventh: two readers do not outbid each other.)
const FREE_GAIN: f64 = 0.75;

/// It grew by this share: there is more to be had. On a full path, for who has less than
/// 0.44 of it and grows by a quarter.
const SOME_GAIN: f64 = 0.5;

/// Halving the window cost less than this share of the rate: it was all in queues.
const QUEUED_LOSS: f64 = 0.25;

/// How much larger a window is tried in cruise (as BBR does).
const PROBE_UP: f64 = 1.25;

/// Of that many looks around, one is at a smaller window and the others at larger ones.
const LOOKS_UP_PER_DOWN: u32 = 3;

/// The share of the window that may wait in queues.
const QUEUED_SHARE: f64 = 0.2;

/// By how much the path's delay is believed to grow from one look to the next while there
/// is a queue, which may be others'.
const MAX_LENGTHENING: f64 = 1.1;

/// A mean delay this many times the shortest is a queue, or another path.
const QUEUE_RATIO: f64 = 2.2;

/// After the window was halved: the rate fell by nearly as much, so there was no queue.
const NO_QUEUE_LOSS: f64 = 0.85;

/// By how much it is believed to grow when halving the window halved the rate, beyond
/// [`SHORT_DELAY_SECS`].
const MAX_STEP: f64 = 1.5;

/// Queues this short disturb no other traffic, seconds.
const SHORT_DELAY_SECS: f64 = 0.02;

/// No path is that long, seconds: a delay like this is a queue.
const LONGEST_PATH_SECS: f64 = 1.5;

/// Rounds of cruise between two looks around.
const STEADY_ROUNDS: u32 = 8;

/// What the window is doing.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    /// Grown by `factor`; so many rounds in a row gained nothing.
    Climb { factor: f64, flat: u32 },
    /// As it should be; so many rounds so far.
    Steady { rounds: u32 },
    /// A window larger by `factor` is tried, for so many rounds.
    Up { factor: f64, rounds: u32 },
    /// Half the window is tried; `alarmed` because delays are long.
    Half { alarmed: bool, rounds: u32 },
}

const FIRST_PHASE: Phase = Phase::Climb { factor: 1.0, flat: 0 };

/// What is being measured.
#[derive(Clone, Copy, Debug, Default)]
struct Round {
    began: Instant,
    /// The round ends with so many bytes.
    need_bytes: u64,
    bytes: u64,
    blocks: u64,
    /// Of the blocks that were on their way when it began: all, and those that still are.
    old_blocks: usize,
    old_blocks_left: usize,
    /// Of the latter, those asked for at the moment when it began.
    tied: usize,
    /// Bytes on their way, times seconds.
    byte_secs: f64,
    measured_upto: Instant,
    /// A caller had to wait.
    limited: bool,
    halved: bool,
}

/// How much may be on its way at once. See the module.
#[derive(Clone, Debug)]
pub struct Window {
    limits: Limits,
    window_bytes: f64,
    in_flight_blocks: usize,
    in_flight_bytes: u64,
    phase: Phase,
    round: Round,
    /// Bytes of a block, on average.
    block_bytes: f64,
    /// Bytes a second in the last round of full use.
    rate: f64,
    /// Before the change that is being tried: window, and bytes a second.
    reference_window: f64,
    reference_rate: f64,
    /// The shortest mean delay of a round since the last climb began, seconds.
    base_delay: f64,
    /// How often another window was tried in cruise.
    looks: u32,
    /// When a block was last asked for, and how many were at that moment.
    last_start: Instant,
    started_then: usize,
}

impl Window {
    /// A window that begins to climb.
    ///
    /// # Panics
    /// Unless `min_bytes <= first_bytes <= max_bytes`, and a block may be on its way.
    pub fn new(limits: Limits) -> Window {
        let ordered = limits.min_bytes <= limits.first_bytes;
        assert!(ordered && limits.first_bytes <= limits.max_bytes && limits.max_blocks > 0);
        assert!(limits.first_blocks > 0);
        Window {
            limits,
            window_bytes: limits.first_bytes as f64,
            in_flight_blocks: 0,
            in_flight_bytes: 0,
            phase: FIRST_PHASE,
            round: Round::default(),
            block_bytes: 0.0,
            rate: 0.0,
            reference_window: 0.0,
            reference_rate: 0.0,
            base_delay: f64::INFINITY,
            looks: 0,
            last_start: Instant::default(),
            started_then: 0,
        }
    }

    /// Its present size, bytes.
    pub fn bytes(&self) -> u64 {
        self.window_bytes as u64
    }

    /// What is on its way: blocks, and bytes as they were announced.
    pub fn in_flight(&self) -> (usize, u64) {
        (self.in_flight_blocks, self.in_flight_bytes)
    }

    /// Answers whether a block of about `bytes` may be fetched now, and notes a refusal. One block
    /// is always admitted. A caller that is refused waits until a fetch has ended.
    pub fn may_start(&mut self, bytes: u64) -> bool {
        let fits = self.in_flight_blocks < self.limits.max_blocks
            && self.in_flight_bytes.saturating_add(cost(bytes)) <= self.bytes();
        let may = fits || self.in_flight_blocks == 0;
        if !may {
            self.round.limited = true;
        }
        may
    }

    /// How large it begins is known when blocks are asked for: so many like the largest.
    fn begin(&mut self, bytes: u64) {
        let first = cost(bytes).saturating_mul(self.limits.first_blocks);
        let first = first.min(self.limits.first_bytes) as f64;
        if self.in_flight_blocks == 0 || first > self.window_bytes {
            self.resize(first);
        }
    }

    /// A fetch of about `bytes` begins. It need not have been admitted: a block that a reader
    /// waits for is fetched at once, and counted.
    pub fn started(&mut self, bytes: u64, now: Instant) {
        if self.phase == FIRST_PHASE {
            self.begin(bytes);
        }
        if self.in_flight_blocks == 0 {
            // No call was made for a while; that is not the path's rate.
            self.begin_round(now);
        }
        self.measure(now);
        let others = if self.last_start == now { self.started_then } else { 0 };
        (self.last_start, self.started_then) = (now, others + 1);
        self.in_flight_blocks += 1;
        self.in_flight_bytes += cost(bytes);
    }

    /// A block announced as `announced` bytes came after `took`, and has `bytes`.
    pub fn completed(&mut self, announced: u64, bytes: u64, took: Duration, now: Instant) {
        self.ended(announced, now);
        let bytes = cost(bytes);
        let mean = if self.block_bytes == 0.0 { bytes as f64 } else { self.block_bytes };
        self.block_bytes = mean + (bytes as f64 - mean) / 16.0;
        self.round.bytes += bytes;
        self.round.blocks += 1;
        let round = &mut self.round;
        let age = now.since(round.began);
        let is_tied = took == age && round.tied > 0;
        round.tied -= usize::from(is_tied);
        if took > age || is_tied {
            round.old_blocks_left = round.old_blocks_left.saturating_sub(1);
        }
        let turned = round.old_blocks_left <= round.old_blocks / STRAGGLERS;
        if turned && round.bytes >= round.need_bytes && round.blocks >= MIN_ROUND_BLOCKS {
            self.end_round(now);
        }
    }

    /// A block announced as `announced` bytes is not to be had, or is not wanted any more.
    /// That says nothing of the path.
    pub fn failed(&mut self, announced: u64, now: Instant) {
        self.ended(announced, now);
        self.round.old_blocks_left = self.round.old_blocks_left.saturating_sub(1);
    }

    /// A block announced as `announced` bytes did not come in time.
    pub fn timed_out(&mut self, announced: u64, now: Instant) {
        self.failed(announced, now);
        if !self.round.halved {
            self.resize(self.window_bytes / 2.0);
            self.phase = Phase::Steady { rounds: 0 };
            self.begin_round(now);
            self.round.halved = true;
        }
    }

    /// Panics if an invariant does not hold.
    pub fn check_invariants(&self) {
        let Limits { min_bytes, max_bytes, .. } = self.limits;
        assert!((min_bytes as f64..=max_bytes as f64).contains(&self.window_bytes));
        assert_eq!(self.in_flight_blocks == 0, self.in_flight_bytes == 0);
    }

    fn measure(&mut self, now: Instant) {
        let secs = now.since(self.round.measured_upto).as_secs_f64();
        self.round.byte_secs += secs * self.in_flight_bytes as f64;
        self.round.measured_upto = now;
    }

    fn ended(&mut self, announced: u64, now: Instant) {
        self.measure(now);
        assert!(self.in_flight_blocks > 0, "only what was started ends");
        self.in_flight_blocks -= 1;
        self.in_flight_bytes -= cost(announced);
    }

    fn begin_round(&mut self, now: Instant) {
        let tied = if self.last_start == now { self.started_then } else { 0 };
        self.round = Round {
            began: now,
            measured_upto: now,
            need_bytes: self.bytes(),
            old_blocks: self.in_flight_blocks,
            old_blocks_left: self.in_flight_blocks,
            tied: tied.min(self.in_flight_blocks),
            ..Round::default()
        };
    }

    fn end_round(&mut self, now: Instant) {
        let round = self.round;
        let secs = now.since(round.began).as_secs_f64();
        if round.limited && secs > 0.0 {
            let rate = round.bytes as f64 / secs;
            let delay = round.byte_secs / round.bytes as f64;
            self.learn(rate, delay);
        }
        self.begin_round(now);
    }

    /// What a round of full use says.
    fn learn(&mut self, rate: f64, delay: f64) {
        self.rate = rate;
        match self.phase {
            Phase::Climb { factor, flat } => self.climb(factor, flat, rate, delay),
            Phase::Steady { rounds } => self.steady(rounds, rate, delay),
            Phase::Up { factor, rounds } => self.up(factor, rounds, rate, delay),
            Phase::Half { alarmed, rounds } => self.half(alarmed, rounds, rate, delay),
        }
    }

    fn climb(&mut self, factor: f64, flat: u32, rate: f64, delay: f64) {
        let gain = match factor > 1.0 {
            true => (rate / self.reference_rate - 1.0) / (factor - 1.0),
            // Its first round has nothing to compare with.
            false => 1.0,
        };
        self.reference_window = self.window_bytes;
        self.reference_rate = rate;
        let queue = delay > self.base_delay * QUEUE_RATIO;
        let flat = if gain >= SOME_GAIN { 0 } else { flat + 1 };
        if flat <= MAX_FLAT && !queue {
            self.resize(self.window_bytes * if gain >= FREE_GAIN { 2.0 } else { PROBE_UP });
            let factor = self.window_bytes / self.reference_window;
            if factor > 1.01 {
                self.phase = Phase::Climb { factor, flat };
                return;
            }
        }
        // The path is full. How much of that waits in queues is seen by halving it.
        self.looks = 0;
        self.halve(false);
    }

    fn cruise(&mut self) {
        self.phase = Phase::Steady { rounds: 0 };
    }

    /// Keeps between one block and a fifth of the window in queues (as TCP Vegas keeps one
    /// to three packets there), by Little's law: bytes that are not on the path are in a queue.
    fn steady(&mut self, rounds: u32, rate: f64, delay: f64) {
        // The first round still has the blocks of the window before.
        if rounds == 0 {
            self.reference_rate = 0.0;
            self.phase = Phase::Steady { rounds: 1 };
            return;
        }
        // One round's delay is chance, where some nodes are near and some are far.
        self.base_delay -= (self.base_delay - delay).max(0.0) / 8.0;
        self.reference_rate += (rate - self.reference_rate) / f64::from(rounds);
        let long = delay > (self.base_delay * QUEUE_RATIO).max(SHORT_DELAY_SECS);
        if long && self.window_bytes > self.floor() {
            self.reference_rate = rate;
            return self.halve(true);
        }
        let queued = self.window_bytes * (1.0 - self.base_delay / delay);
        let most = self.window_bytes * QUEUED_SHARE + 2.0 * self.block_bytes;
        if queued < self.block_bytes {
            self.resize(self.window_bytes + self.block_bytes);
        } else if queued > most {
            self.shrink(self.window_bytes - (queued - most) / 2.0);
        }
        self.phase = Phase::Steady { rounds: rounds + 1 };
        if rounds == STEADY_ROUNDS {
            self.look_around();
        }
    }

    /// Tries another window.
    fn look_around(&mut self) {
        self.looks += 1;
        if self.looks.is_multiple_of(LOOKS_UP_PER_DOWN) {
            return self.halve(false);
        }
        self.reference_window = self.window_bytes;
        self.resize((self.window_bytes * PROBE_UP).max(self.window_bytes + self.block_bytes));
        let factor = self.window_bytes / self.reference_window;
        if factor > 1.01 { self.phase = Phase::Up { factor, rounds: 0 } } else { self.cruise() }
    }

    fn up(&mut self, factor: f64, rounds: u32, rate: f64, delay: f64) {
        if rounds == 0 {
            self.phase = Phase::Up { factor, rounds: 1 };
        } else if (rate / self.reference_rate - 1.0) / (factor - 1.0) >= SOME_GAIN {
            self.climb(factor, 0, rate, delay);
        } else {
            self.resize(self.reference_window);
            self.cruise();
        }
    }

    fn halve(&mut self, alarmed: bool) {
        self.reference_window = self.window_bytes;
        self.shrink(self.window_bytes / 2.0);
        self.phase = Phase::Half { alarmed, rounds: 0 };
    }

    fn half(&mut self, alarmed: bool, rounds: u32, rate: f64, delay: f64) {
        if rounds == 0 {
            self.phase = Phase::Half { alarmed, rounds: 1 };
            return;
        }
        let shrunk = 1.0 - self.window_bytes / self.reference_window;
        let lost = if shrunk > 0.0 { (1.0 - rate / self.reference_rate) / shrunk } else { 1.0 };
        if lost >= NO_QUEUE_LOSS && delay < LONGEST_PATH_SECS {
            // No queue, or hardly any of it is ours: this is the path's delay now. In steps,
            // since chance and other readers can make it look so.
            self.base_delay = delay.min((self.base_delay * MAX_STEP).max(SHORT_DELAY_SECS));
            self.resize(self.reference_window);
        } else if lost >= QUEUED_LOSS {
            // The queue is empty now, or it is others'.
            self.base_delay = delay.min(self.base_delay * MAX_LENGTHENING);
            self.resize(self.reference_window * if alarmed { 0.75 } else { 1.0 });
        } else if lost < QUEUED_LOSS && self.window_bytes > self.floor() {
            // As fast with half of it: all the rest was in queues, and perhaps more.
            self.base_delay = self.base_delay.min(delay);
            return self.halve(alarmed);
        }
        self.cruise();
    }

    /// The least window that makes sense: two blocks, but within the limits.
    fn floor(&self) -> f64 {
        let Limits { min_bytes, max_bytes, .. } = self.limits;
        (2.0 * self.block_bytes).clamp(min_bytes as f64, max_bytes as f64)
    }

    /// Makes the window smaller, but not so that it would be worth less than
    /// [`SHORT_DELAY_SECS`]: that much in queues disturbs no other traffic, and near nodes do
    /// better with many requests at once than the rate of a round can tell.
    fn shrink(&mut self, wished: f64) {
        let short = self.window_bytes.min(self.rate * SHORT_DELAY_SECS);
        self.resize(wished.max(short));
    }

    fn resize(&mut self, wished: f64) {
        self.window_bytes = wished.clamp(self.floor(), self.limits.max_bytes as f64);
    }
}

/// What a block of `bytes` takes of the window.
fn cost(bytes: u64) -> u64 {
    bytes.max(MIN_COST_BYTES)
}
