//! The cost of lookups on a ring that changes, within a budget: the whole protocol on the
//! simulated network, every byte counted.
//!
//! Nodes live as long as Overnet's did: LogNormal with µ = 0.19, σ = 0.98 in hours, mean
//! 1.95 h (Javadi, Kondo, Iosup, Epema, "The Failure Trace Archive", JPDC 2013). Each that
//! dies does so without a word, and another joins in its place.

use std::time::Duration;

use atoll_overlay::Node;
use atoll_overlay::chord::ChordConfig;
use atoll_overlay::chord::table::{Evidence, secs};
use atoll_sim::{HostId, Latency, SimConfig};

use super::cluster::{Cluster, Dice, keys};

const MU: f64 = 0.19;
const SIGMA: f64 = 0.98;

fn unit(dice: &mut Dice) -> f64 {
    (dice.below(1 << 40) as f64 + 0.5) / (1u64 << 40) as f64
}

fn normal(dice: &mut Dice) -> f64 {
    let (u, v) = (unit(dice), unit(dice));
    (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
}

/// How long a session lasts, seconds.
fn session(dice: &mut Dice) -> f64 {
    (MU + SIGMA * normal(dice)).exp() * 3600.0
}

/// How long a node met at random has been up and will be: long sessions are met more often.
fn residual(dice: &mut Dice) -> (f64, f64) {
    let session = (MU + SIGMA * SIGMA + SIGMA * normal(dice)).exp() * 3600.0;
    let up = unit(dice) * session;
    (up, session - up)
}

struct Ring {
    cluster: Cluster,
    dice: Dice,
    /// When each host dies, seconds.
    dies: Vec<(f64, HostId)>,
    now: u64,
}

#[derive(Debug)]
struct Figures {
    calls: f64,
    /// Lookups that met a dead node.
    with_timeout: f64,
    wrong: usize,
    /// Bytes a second that a node sends and receives without lookups, overhead included.
    upkeep: f64,
    entries: f64,
}

impl Ring {
    /// At rest: tables as they are after a long time, if there is a budget for full ones.
    fn new(count: usize, config: ChordConfig, seed: u64, is_full: bool) -> Ring {
        let latency = Latency::Flat(Duration::from_millis(20));
        let sim = SimConfig { seed, latency, ..SimConfig::default() };
        let cluster = Cluster::perfect(sim, config, count, true);
        let mut ring = Ring { cluster, dice: Dice(seed), dies: Vec::new(), now: 0 };
        let hosts = ring.cluster.hosts();
        let begin = secs(ring.cluster.sim.now());
        let mut known = Vec::new();
        for host in &hosts {
            let (up, rest) = residual(&mut ring.dice);
            ring.dies.push((rest, *host));
            let node = Node::of(ring.cluster.peer(*host));
            let heard = begin - ring.dice.below(200) as u32;
            known.push(Evidence { node, heard: heard.max(begin - up as u32) });
        }
        if is_full {
            for host in &hosts {
                ring.cluster.chord(*host).prefill(known.iter().copied(), 17);
            }
        }
        ring
    }

    /// Seconds of churn.
    fn run(&mut self, secs: u64) {
        for _ in 0..secs {
            self.now += 1;
            let now = self.now as f64;
            let dead: Vec<HostId> =
                self.dies.iter().filter(|(at, _)| *at <= now).map(|(_, host)| *host).collect();
            self.dies.retain(|(at, _)| *at > now);
            for host in dead {
                self.cluster.crash_silently(host);
                let hosts = self.cluster.hosts();
                let via = hosts[self.dice.below(hosts.len())];
                let newcomer = self.cluster.add();
                self.cluster.join_in_background(newcomer, via);
                let lives = session(&mut self.dice);
                self.dies.push((now + lives, newcomer));
            }
            self.cluster.run_secs(1);
        }
    }

    /// Bytes a second that a node sends and receives.
    fn upkeep(&mut self, secs: u64) -> f64 {
        let before = self.cluster.sim.stats().sent_bytes;
        self.run(secs);
        let sent = self.cluster.sim.stats().sent_bytes - before;
        2.0 * sent as f64 / secs as f64 / self.dies.len() as f64
    }

    fn look_up(&mut self, lookups: u64, upkeep: f64) -> Figures {
        let (mut calls, mut with_timeout, mut wrong, mut found) = (0, 0, 0, 0u64);
        for (n, key) in keys(lookups).into_iter().enumerate() {
            let hosts = self.cluster.hosts();
            let host = hosts[self.dice.below(hosts.len())];
            if !self.cluster.chord(host).state().joined() {
                continue;
            }
            let Ok(answer) = self.cluster.find_root(host, key) else {
                wrong += 1;
                continue;
            };
            found += 1;
            calls += answer.trace.calls();
            with_timeout += usize::from(answer.trace.failures() > 0);
            wrong += usize::from(answer.value[0].id != self.cluster.root(&key));
            if n % 10 == 0 {
                self.run(1);
            }
        }
        let hosts = self.cluster.hosts();
        let entries: usize = hosts.iter().map(|h| self.cluster.chord(*h).table_entries()).sum();
        Figures {
            calls: calls as f64 / found as f64,
            with_timeout: with_timeout as f64 / found as f64,
            wrong,
            upkeep,
            entries: entries as f64 / hosts.len() as f64,
        }
    }
}

fn measure(count: usize, config: ChordConfig, seed: u64, is_full: bool, secs: u64) -> Figures {
    let budget = config.table_budget_bytes_per_sec;
    let mut ring = Ring::new(count, config, seed, is_full);
    ring.run(secs / 2);
    let upkeep = ring.upkeep(secs / 2);
    let figures = ring.look_up(if count > 2000 { 600 } else { 400 }, upkeep);
    println!("{count} nodes, {budget} bytes/s: {figures:?}");
    figures
}

fn adaptive(budget: u64) -> ChordConfig {
    ChordConfig { table_budget_bytes_per_sec: budget, ..ChordConfig::default() }
}

#[test]
fn cold_tables_fill_within_minutes() {
    let figures = measure(400, adaptive(1024), 1, false, 240);
    assert_eq!(figures.wrong, 0);
    assert!(figures.entries >= 320.0, "{figures:?}");
    assert!(figures.with_timeout <= 0.05, "{figures:?}");
    // Newcomers, which they all are, spend in advance.
    assert!(figures.upkeep <= 1.25 * 1024.0, "{figures:?}");
}

#[test]
fn a_full_table_stays_full_and_fresh() {
    let figures = measure(400, adaptive(1024), 2, true, 120);
    assert_eq!(figures.wrong, 0);
    assert!(figures.calls <= 1.5, "{figures:?}");
    assert!(figures.upkeep <= 1024.0, "{figures:?}");
    assert!(figures.with_timeout <= 0.05, "{figures:?}");
}

#[test]
fn on_no_budget_lookups_take_half_log_n_and_one() {
    let figures = measure(400, adaptive(1), 3, false, 120);
    assert_eq!(figures.wrong, 0);
    assert!(figures.calls <= 0.5 * 400f64.log2() + 1.0, "{figures:?}");
}
