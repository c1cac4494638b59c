//! The prefetch window on modelled paths, in virtual time: a closed loop of readers,
//! windows, delays and one bottleneck.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;

use atoll_env::Instant;
use atoll_volume::blocks::window::{Limits, Window};
use proptest::prelude::*;

const BLOCK: u64 = 64 << 10;

/// Bytes a second.
const fn mbit(rate: u64) -> f64 {
    rate as f64 * 125_000.0
}

/// A bottleneck that all blocks pass, and senders at different distances behind it.
#[derive(Clone, Debug)]
struct Path {
    rate: f64,
    /// Delay of each sender, ms; a block comes from one of them at random.
    delays_ms: Vec<f64>,
    /// Of 100 blocks so many come from this machine, at once and past the bottleneck.
    local_percent: u64,
}

impl Path {
    fn of(rate: f64, delay_ms: f64) -> Path {
        Path { rate, delays_ms: vec![delay_ms], local_percent: 0 }
    }

    /// Bytes on their way when the path is just full.
    fn holds(&self) -> f64 {
        let mean = self.delays_ms.iter().sum::<f64>() / self.delays_ms.len() as f64;
        self.rate * mean / 1000.0
    }
}

impl Path {
    /// The unit of time on this path: its delay, or eight blocks if that is longer.
    fn trip(&self) -> f64 {
        (self.holds() / self.rate).max(8.0 * BLOCK as f64 / self.rate)
    }
}

struct Reader {
    window: Window,
    begins: f64,
    delivered: Vec<(f64, u64)>,
}

/// A block on its way: who wants it, when it was asked for, whether it is local.
#[derive(Clone, Copy)]
struct Block {
    reader: usize,
    asked: f64,
    local: bool,
}

struct Model {
    path: Path,
    now: f64,
    random: u64,
    readers: Vec<Reader>,
    blocks: Vec<Block>,
    /// Time in ns, and what: a block reaches the bottleneck, or the reader.
    events: BinaryHeap<Reverse<(u64, bool, usize)>>,
    queue: VecDeque<usize>,
    busy: bool,
    /// The longest time a block waited at the bottleneck since this was reset.
    longest_wait: f64,
    arrived_at: Vec<f64>,
}

impl Model {
    fn new(path: Path, seed: u64) -> Model {
        Model {
            path,
            now: 0.0,
            random: seed | 1,
            readers: Vec::new(),
            blocks: Vec::new(),
            events: BinaryHeap::new(),
            queue: VecDeque::new(),
            busy: false,
            longest_wait: 0.0,
            arrived_at: Vec::new(),
        }
    }

    fn with_reader(mut self, begins: f64) -> Model {
        let window = Window::new(Limits::default());
        self.readers.push(Reader { window, begins, delivered: Vec::new() });
        self
    }

    fn draw(&mut self, below: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % below
    }

    fn instant(&self) -> Instant {
        Instant((self.now * 1e9) as u64)
    }

    fn at(&mut self, secs: f64, at_reader: bool, block: usize) {
        self.events.push(Reverse(((secs * 1e9) as u64, at_reader, block)));
    }

    /// Asks for as much as the windows allow.
    fn ask(&mut self) {
        for reader in 0..self.readers.len() {
            while self.readers[reader].begins <= self.now
                && self.readers[reader].window.may_start(BLOCK)
            {
                let now = self.instant();
                self.readers[reader].window.started(BLOCK, now);
                let local = self.draw(100) < self.path.local_percent;
                let sender = self.draw(self.path.delays_ms.len() as u64) as usize;
                let jitter = 1.0 + self.draw(100) as f64 / 1000.0;
                let delay = if local { 0.3 } else { self.path.delays_ms[sender] * jitter } / 1000.0;
                let block = self.blocks.len();
                self.blocks.push(Block { reader, asked: self.now, local });
                self.arrived_at.push(0.0);
                self.at(self.now + delay, local, block);
            }
        }
    }

    fn serve(&mut self) {
        if let Some(block) = self.queue.pop_front() {
            self.busy = true;
            self.longest_wait = self.longest_wait.max(self.now - self.arrived_at[block]);
            self.at(self.now + BLOCK as f64 / self.path.rate, true, block);
        }
    }

    fn run_until(&mut self, end: f64) {
        self.ask();
        loop {
            let next = self.events.peek().map(|Reverse((at, ..))| *at as f64 / 1e9);
            let begin = self.readers.iter().map(|r| r.begins).filter(|b| *b > self.now);
            let next = begin.chain(next).fold(f64::INFINITY, f64::min);
            if next > end {
                self.now = end;
                return;
            }
            self.now = self.now.max(next);
            while let Some(Reverse((at, at_reader, block))) = self.events.peek().copied() {
                if at as f64 / 1e9 > self.now {
                    break;
                }
                self.events.pop();
                if at_reader {
                    self.arrive(block);
                } else {
                    self.arrived_at[block] = self.now;
                    self.queue.push_back(block);
                }
                if !self.busy {
                    self.serve();
                }
            }
            self.ask();
        }
    }

    fn arrive(&mut self, block: usize) {
        let Block { reader, asked, local } = self.blocks[block];
        let took = Duration::from_secs_f64(self.now - asked);
        let now = self.instant();
        let reader = &mut self.readers[reader];
        reader.window.completed(BLOCK, BLOCK, took, now);
        reader.window.check_invariants();
        if !local {
            reader.delivered.push((self.now, BLOCK));
            self.busy = false;
        }
    }

    /// Bytes a second that came to a reader through the bottleneck.
    fn rate(&self, reader: usize, from: f64, upto: f64) -> f64 {
        let delivered = self.readers[reader].delivered.iter();
        let bytes: u64 =
            delivered.filter(|(at, _)| *at > from && *at <= upto).map(|(_, bytes)| bytes).sum();
        bytes as f64 / (upto - from)
    }
}

fn paths() -> Vec<(&'static str, Path)> {
    let spread = vec![5.0, 20.0, 40.0, 80.0, 90.0, 120.0, 180.0, 250.0];
    vec![
        ("8 Mbit/s, 300 ms", Path::of(mbit(8), 300.0)),
        ("1 Gbit/s, 100 ms", Path::of(mbit(1000), 100.0)),
        ("100 Mbit/s, 5 ms", Path::of(mbit(100), 5.0)),
        ("100 Mbit/s, 100 ms", Path::of(mbit(100), 100.0)),
        ("10 Mbit/s, 20 ms", Path::of(mbit(10), 20.0)),
        ("1 Gbit/s, 1 ms", Path::of(mbit(1000), 1.0)),
        (
            "100 Mbit/s, 8 senders",
            Path { rate: mbit(100), delays_ms: spread.clone(), local_percent: 0 },
        ),
        (
            "100 Mbit/s, 8 senders, a third local",
            Path { rate: mbit(100), delays_ms: spread, local_percent: 33 },
        ),
    ]
}

/// What became of one reader on a path.
struct Outcome {
    /// Rate as a share of the path's, from the 10th to the 40th trip.
    early: f64,
    /// The same, from the 100th to the 400th.
    late: f64,
    /// The longest time that a block waited at the bottleneck, in trips.
    early_wait: f64,
    late_wait: f64,
}

fn outcome(path: &Path, seed: u64) -> Outcome {
    let trip = path.trip();
    let mut model = Model::new(path.clone(), seed).with_reader(0.0);
    model.run_until(40.0 * trip);
    let early_wait = model.longest_wait / trip;
    model.run_until(100.0 * trip);
    model.longest_wait = 0.0;
    model.run_until(400.0 * trip);
    Outcome {
        early: model.rate(0, 10.0 * trip, 40.0 * trip) / path.rate,
        late: model.rate(0, 100.0 * trip, 400.0 * trip) / path.rate,
        early_wait,
        late_wait: model.longest_wait / trip,
    }
}

const SEEDS: std::ops::Range<u64> = 1..5;

/// The claim of the module, on paths whose delay is one: nine tenths of the path soon and
/// for good, and no more than a few trips' worth in queues while it looks for the window,
/// less than one trip's (or 20 ms) afterwards.
#[test]
fn a_path_of_one_delay_is_filled_and_its_queue_stays_short() {
    for (name, path) in paths().into_iter().filter(|(_, path)| path.delays_ms.len() == 1) {
        for seed in SEEDS {
            let Outcome { early, late, early_wait, late_wait } = outcome(&path, seed * 7919);
            assert!(early >= 0.9, "{name}, seed {seed}: early {early:.2}");
            assert!(late >= 0.95, "{name}, seed {seed}: late {late:.2}");
            assert!(early_wait <= 3.0, "{name}, seed {seed}: early wait {early_wait:.1}");
            // Or what disturbs no other traffic.
            let most = (0.021 / path.trip()).max(1.0);
            assert!(late_wait <= most, "{name}, seed {seed}: late wait {late_wait:.1}");
        }
    }
}

/// Where some nodes are fifty times as far as others, and some blocks come from this
/// machine, a round's rate is half chance.
#[test]
fn senders_at_all_distances_fill_the_path_too() {
    for (name, path) in paths().into_iter().filter(|(_, path)| path.delays_ms.len() > 1) {
        let outcomes: Vec<Outcome> = SEEDS.map(|seed| outcome(&path, seed * 7919)).collect();
        let mean = outcomes.iter().map(|o| o.late).sum::<f64>() / outcomes.len() as f64;
        let least = outcomes.iter().map(|o| o.late).fold(f64::INFINITY, f64::min);
        let longest = outcomes.iter().map(|o| o.late_wait).fold(0.0, f64::max);
        assert!(mean >= 0.9 && least >= 0.6, "{name}: mean {mean:.2}, least {least:.2}");
        assert!(longest <= 6.0, "{name}: waits of {longest:.1} trips");
    }
}

/// One begins when the other has the path.
#[test]
fn two_windows_share_a_bottleneck() {
    for (name, path) in paths() {
        let trip = path.trip();
        for seed in SEEDS {
            let model = Model::new(path.clone(), seed * 7919);
            let mut model = model.with_reader(0.0).with_reader(50.0 * trip);
            model.run_until(600.0 * trip);
            let rate = |reader| model.rate(reader, 200.0 * trip, 600.0 * trip) / path.rate;
            let (one, two) = (rate(0), rate(1));
            assert!(one.min(two) >= 0.25, "{name}, seed {seed}: {one:.2} and {two:.2}");
            assert!(one + two >= 0.9, "{name}, seed {seed}: {one:.2} and {two:.2}");
        }
    }
}

#[test]
fn a_path_that_becomes_wider_narrower_or_longer_is_followed() {
    let change = |from: Path, to: Path| {
        let mut model = Model::new(from, 7919).with_reader(0.0);
        model.run_until(10.0);
        model.path = to.clone();
        model.run_until(40.0);
        model.longest_wait = 0.0;
        model.run_until(50.0);
        (model.rate(0, 40.0, 50.0) / to.rate, model.longest_wait / to.trip())
    };
    let wide = Path::of(mbit(200), 50.0);
    let narrow = Path::of(mbit(20), 50.0);
    let local = Path { local_percent: 100, ..Path::of(mbit(200), 50.0) };
    for (name, from, to) in [
        ("wider", narrow.clone(), wide.clone()),
        ("narrower", wide.clone(), narrow),
        ("longer", wide.clone(), Path::of(mbit(200), 250.0)),
        ("shorter", Path::of(mbit(200), 250.0), wide.clone()),
        ("no longer local", local, wide),
    ] {
        let (rate, wait) = change(from, to);
        assert!(rate >= 0.9, "{name}: {rate:.2}");
        assert!(wait <= 2.0, "{name}: waits of {wait:.1} trips");
    }
}

fn at(ms: u64) -> Instant {
    Instant(ms * 1_000_000)
}

#[test]
fn a_timeout_halves_the_window_once_a_round_and_not_below_its_limit() {
    let mut window = Window::new(Limits::default());
    for _ in 0..8 {
        window.started(BLOCK, at(0));
    }
    assert!(!window.may_start(BLOCK));
    for now in [100, 101, 102] {
        window.timed_out(BLOCK, at(now));
        assert_eq!(window.bytes(), Limits::default().first_bytes / 2);
    }
    for _ in 0..10 {
        // Each with a round between: one block alone is a beginning.
        while window.in_flight().0 > 0 {
            window.failed(BLOCK, at(200));
        }
        window.started(BLOCK, at(300));
        window.timed_out(BLOCK, at(400));
    }
    assert_eq!(window.bytes(), Limits::default().min_bytes);
}

#[test]
fn one_block_may_always_start_and_small_ones_are_counted() {
    let limits = Limits { max_blocks: 10, ..Limits::default() };
    let mut window = Window::new(limits);
    assert!(window.may_start(u64::MAX), "or a large block would never come");
    window.started(64 << 20, at(0));
    assert!(!window.may_start(1));
    window.failed(64 << 20, at(1));
    for _ in 0..10 {
        assert!(window.may_start(1));
        window.started(1, at(2));
    }
    assert!(!window.may_start(1), "ten are the limit");
}

/// Links that carry blocks of 8 KiB are not given half a mebibyte of them at once.
#[test]
fn a_window_begins_with_so_many_blocks_like_the_largest_within_its_limits() {
    let begun = |sizes: &[u64]| {
        let mut window = Window::new(Limits::default());
        sizes.iter().for_each(|bytes| window.started(*bytes, at(0)));
        window.bytes()
    };
    assert_eq!(begun(&[8 << 10]), 128 << 10);
    assert_eq!(begun(&[1 << 10]), Limits::default().min_bytes);
    assert_eq!(begun(&[4 << 10, 32 << 10]), 512 << 10);
    assert_eq!(begun(&[4 << 20]), Limits::default().first_bytes);
}

/// Blocks asked for at the very moment at which a round began were waited for and never
/// counted: the round never ended, and the window stayed as it was for the whole file.
#[test]
fn blocks_asked_for_at_the_moment_a_round_begins_do_not_keep_it_from_ending() {
    let mut window = Window::new(Limits::default());
    let mut now = 0;
    for _ in 0..20 {
        while window.may_start(BLOCK) {
            window.started(BLOCK, at(now));
        }
        now += 100;
        // All come at once, and as many are asked for in between.
        for _ in 0..window.in_flight().0 {
            window.completed(BLOCK, BLOCK, Duration::from_millis(100), at(now));
            if window.may_start(BLOCK) {
                window.started(BLOCK, at(now));
            }
        }
    }
    assert!(window.bytes() > 8 * Limits::default().first_bytes, "{} bytes", window.bytes());
}

/// A reader that does not ask for more than it gets learns nothing of the path.
#[test]
fn who_is_never_refused_keeps_the_window() {
    let mut window = Window::new(Limits::default());
    for i in 0..1000 {
        window.started(BLOCK, at(i * 10));
        window.completed(BLOCK, BLOCK, Duration::from_millis(5), at(i * 10 + 5));
    }
    assert_eq!(window.bytes(), Limits::default().first_bytes);
}

proptest! {
    /// Whatever happens, in whatever order: it stays within its limits.
    #[test]
    fn no_history_breaks_the_bounds(
        events in prop::collection::vec((0u8..5, 0u64..3 << 20, 0u64..2000), 0..400),
    ) {
        let limits = Limits { max_blocks: 20, max_bytes: 4 << 20, ..Limits::default() };
        let mut window = Window::new(limits);
        let mut under_way = std::collections::VecDeque::new();
        let mut now = 0;
        for (kind, bytes, ms) in events {
            now += ms;
            match (kind, under_way.pop_front()) {
                (0, Some((announced, began))) => {
                    let took = at(now).since(began);
                    window.completed(announced, bytes, took, at(now));
                }
                (1, Some((announced, _))) => window.failed(announced, at(now)),
                (2, Some((announced, _))) => window.timed_out(announced, at(now)),
                (_, ended) => {
                    under_way.extend(ended);
                    if window.may_start(bytes) {
                        window.started(bytes, at(now));
                        under_way.push_back((bytes, at(now)));
                    }
                }
            }
            window.check_invariants();
            let (blocks, in_flight) = window.in_flight();
            prop_assert_eq!(blocks, under_way.len());
            prop_assert!(blocks <= limits.max_blocks);
            prop_assert!(blocks <= 1 || in_flight <= limits.max_bytes + (3 << 20));
        }
    }
}
