//! The adaptive table alone, on a ring that changes but costs nothing: no messages are
//! lost or late, neighbours are always right. What a table of a given budget becomes.

use std::collections::BTreeMap;

use atoll_key::{Key, PeerId};
use atoll_net::Peer;
use atoll_net::header::to_header;
use atoll_overlay::chord::table::learn::Question;
use atoll_overlay::chord::table::sweep::Wish;
use atoll_overlay::chord::table::{MAX_ENTRIES, Table};
use atoll_overlay::{MAX_GUESSES, Node};

use super::cluster::Dice;

const START: u32 = 1 << 20;
const SUCCESSORS: usize = 16;
const OVERHEAD_BYTES: usize = 96;
const CREDIT: f64 = 128.0 * 1024.0;

/// Sessions of Overnet's nodes, hours: LogNormal (Javadi, Kondo, Iosup, Epema, "The Failure
/// Trace Archive", JPDC 2013, `Overnet03`).
const MU: f64 = 0.19;
const SIGMA: f64 = 0.98;

fn unit(dice: &mut Dice) -> f64 {
    (dice.below(1 << 40) as f64 + 0.5) / (1u64 << 40) as f64
}

fn session_secs(dice: &mut Dice) -> f64 {
    let (u, v) = (unit(dice), unit(dice));
    let normal = (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos();
    (MU + SIGMA * normal).exp() * 3600.0
}

/// How long a node of a ring in equilibrium has been up and will stay: sessions are met in
/// proportion to their length.
fn residual(dice: &mut Dice) -> (f64, f64) {
    let (u, v) = (unit(dice), unit(dice));
    let normal = (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos();
    let session = (MU + SIGMA * SIGMA + SIGMA * normal).exp() * 3600.0;
    let up = unit(dice) * session;
    (up, session - up)
}

struct Member {
    table: Table,
    node: Node,
    dies: u32,
    tokens: f64,
}

struct Model {
    ring: BTreeMap<Key, Member>,
    dice: Dice,
    now: u32,
    serial: u64,
    /// Bytes a second, sent and received, that are left for exploration.
    rate: f64,
    bytes: u64,
}

impl Model {
    fn new(count: usize, rate: f64, seed: u64) -> Model {
        let mut model = Model {
            ring: BTreeMap::new(),
            dice: Dice(seed),
            now: START,
            serial: 0,
            rate,
            bytes: 0,
        };
        for _ in 0..count {
            let (up, rest) = residual(&mut model.dice);
            model.arrive(up as u32, rest as u32);
        }
        let keys: Vec<Key> = model.ring.keys().copied().collect();
        keys.iter().for_each(|key| model.give_fingers(key));
        model
    }

    /// Chord's fingers, which a node looks up when it joins.
    fn give_fingers(&mut self, key: &Key) {
        for exponent in 500..512 {
            let start = key.wrapping_add(&Key::power_of_two(exponent));
            let finger = self.ring.range(start..).next().or(self.ring.iter().next());
            let node = finger.unwrap().1.node;
            self.ring.get_mut(key).unwrap().table.heard(&node, self.now);
        }
    }

    fn arrive(&mut self, up: u32, rest: u32) -> Key {
        self.serial += 1;
        let mut id = [0; 32];
        for chunk in id.chunks_mut(8) {
            self.dice.below(2);
            chunk.copy_from_slice(&self.dice.0.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes());
        }
        id[..8].copy_from_slice(&self.serial.wrapping_mul(0xbf58_476d_1ce4_e5b9).to_be_bytes());
        let node = Node::of(Peer { id: PeerId(id), addr: "10.1.2.3:4000".parse().unwrap() });
        let table = Table::new(node, MAX_ENTRIES, self.now.saturating_sub(up));
        let dies = self.now + rest;
        self.ring.insert(node.id.0, Member { table, node, dies, tokens: CREDIT });
        node.id.0
    }

    fn successors(&self, key: &Key) -> Vec<Node> {
        let after = self.ring.range((std::ops::Bound::Excluded(*key), std::ops::Bound::Unbounded));
        after.chain(self.ring.range(..*key)).take(SUCCESSORS).map(|(_, m)| m.node).collect()
    }

    fn second(&mut self) {
        self.now += 1;
        let now = self.now;
        let dead: Vec<Key> =
            self.ring.iter().filter(|(_, m)| m.dies <= now).map(|(k, _)| *k).collect();
        for key in dead {
            self.ring.remove(&key);
            let session = session_secs(&mut self.dice);
            let key = self.arrive(0, session as u32);
            self.give_fingers(&key);
        }
        let keys: Vec<Key> = self.ring.keys().copied().collect();
        let nodes = keys.len() as f64;
        for key in keys {
            let member = self.ring.get_mut(&key).unwrap();
            if member.tokens < self.rate * 30.0 {
                member.tokens += self.rate;
            }
            if member.tokens < Table::QUESTION_BYTES as f64 {
                continue;
            }
            self.show_neighbours(&key);
            let member = self.ring.get_mut(&key).unwrap();
            match member.table.next_question(nodes, now) {
                Wish::Rest(_) => {}
                Wish::Check(node) => {
                    let lives = self.ring.contains_key(node.id.key());
                    let member = self.ring.get_mut(&key).unwrap();
                    member.tokens -= 195.0;
                    self.bytes += 195;
                    if lives {
                        member.table.heard(&node, now);
                        self.ring.get_mut(node.id.key()).unwrap().tokens -= 195.0;
                    } else {
                        member.table.failed(&node.peer.id, now);
                    }
                }
                Wish::Ask(question) => self.ask(&key, &question, nodes),
            }
        }
    }

    fn show_neighbours(&mut self, key: &Key) {
        let successors = self.successors(key);
        let now = self.now;
        let member = self.ring.get_mut(key).unwrap();
        let me = member.node.peer.id;
        member.table.set_own(&[(member.node, successors)], me, now);
    }

    fn ask(&mut self, key: &Key, question: &Question, nodes: f64) {
        let now = self.now;
        let mut bytes = to_header(&question.learn).len() + OVERHEAD_BYTES;
        let asked = question.to.id.0;
        let answer = self.ring.contains_key(&asked).then(|| {
            self.show_neighbours(&asked);
            self.ring[&asked].table.answer(&question.learn, now)
        });
        let me = self.ring.get_mut(key).unwrap();
        if let Some(answer) = answer {
            bytes += to_header(&answer).len() + OVERHEAD_BYTES;
            me.table.take_in(question, &answer, nodes, now);
            let me = me.node;
            let asked = self.ring.get_mut(&asked).unwrap();
            asked.table.heard(&me, now);
            asked.tokens -= bytes as f64;
        } else {
            me.table.record_no_answer(question, now);
        }
        self.bytes += bytes as u64;
        self.ring.get_mut(key).unwrap().tokens -= bytes as f64;
    }

    /// Calls a lookup takes and the dead nodes met, as `walk` would go about it.
    fn look_up(&mut self) -> (usize, usize) {
        let keys: Vec<Key> = self.ring.keys().copied().collect();
        let from = keys[self.dice.below(keys.len())];
        let key = atoll_key::BlockHash::of(&self.dice.below(1 << 50).to_be_bytes()).key();
        let root = self.ring.range(key..).next().or(self.ring.iter().next()).unwrap().1.node.id;
        let (mut calls, mut silent) = (0, 0);
        let mut tried = std::collections::BTreeSet::new();
        let mut at = from;
        self.show_neighbours(&at);
        let names_root = |model: &Model, at: &Key| {
            let list = model.successors(at);
            list[..9.min(list.len())].iter().any(|n| n.id == root)
        };
        if names_root(self, &at) {
            return (1, 0);
        }
        let guesses = self.ring[&at].table.likely_roots(&key, keys.len() as f64, self.now);
        for node in guesses {
            if !self.ring.contains_key(node.id.key()) {
                silent += 1;
                continue;
            }
            calls += 1;
            if node.id == root {
                return (calls, silent);
            }
            // Back, back, until the root.
            let mut back = *node.id.key();
            loop {
                let before = self.ring.range(..back).next_back().or(self.ring.iter().next_back());
                back = *before.unwrap().0;
                calls += 1;
                if back == root.0 {
                    return (calls, silent);
                }
            }
        }
        let mut list: Vec<Node> = Vec::new();
        loop {
            self.show_neighbours(&at);
            list.extend(self.ring[&at].table.before(&key, self.now));
            list.extend(self.successors(&at));
            list.retain(|n| n.id.key().strictly_between(&from, &key) && !tried.contains(&n.id));
            list.sort_by_key(|n| key.distance_from(n.id.key()));
            let Some(next) = list.first().copied() else { return (99, silent) };
            tried.insert(next.id);
            if !self.ring.contains_key(next.id.key()) {
                silent += 1;
                continue;
            }
            calls += 1;
            at = next.id.0;
            if names_root(self, &at) {
                return (calls + 1, silent);
            }
            // It guesses as well; after two steps back the way goes on.
            let guesses = self.ring[&at].table.likely_roots(&key, keys.len() as f64, self.now);
            for node in guesses.into_iter().take(MAX_GUESSES) {
                let Some(member) = self.ring.get(node.id.key()) else {
                    silent += 1;
                    continue;
                };
                let mut back = member.node.id;
                for step in 0..3 {
                    if step > 0 {
                        let before = self.ring.range(..back.0).next_back();
                        back = before.or(self.ring.iter().next_back()).unwrap().1.node.id;
                    }
                    calls += 1;
                    if back == root {
                        return (calls, silent);
                    }
                }
                break;
            }
        }
    }
}

/// What a budget makes of a ring of so many nodes, after so many seconds from empty tables.
struct Outcome {
    calls: f64,
    silent: f64,
    bytes_per_sec: f64,
    entries: f64,
}

fn outcome(count: usize, rate: f64, secs: u32, seed: u64) -> Outcome {
    const LOOKUPS: usize = 2000;
    let mut model = Model::new(count, rate, seed);
    for _ in 0..secs / 2 {
        model.second();
    }
    model.bytes = 0;
    for _ in 0..secs / 2 {
        model.second();
    }
    let nodes = model.ring.len() as f64;
    let bytes_per_sec = 2.0 * model.bytes as f64 / nodes / f64::from(secs / 2);
    let (mut calls, mut silent) = (0, 0);
    for _ in 0..LOOKUPS {
        let (asked, dead) = model.look_up();
        calls += asked;
        silent += dead;
    }
    for member in model.ring.values() {
        member.table.check_invariants();
    }
    let entries = model.ring.values().map(|m| m.table.len() as f64).sum::<f64>() / nodes;
    let outcome = Outcome {
        calls: calls as f64 / LOOKUPS as f64,
        silent: silent as f64 / LOOKUPS as f64,
        bytes_per_sec,
        entries,
    };
    println!(
        "{count} nodes, {rate} bytes/s: {:.2} calls, {:.3} unanswered a lookup, {:.0} entries, \
         {:.0} bytes/s spent",
        outcome.calls, outcome.silent, outcome.entries, outcome.bytes_per_sec
    );
    outcome
}

#[test]
fn with_a_budget_the_table_grows_to_hold_nearly_all_nodes_and_stays_fresh() {
    let found = outcome(256, 400.0, 600, 1);
    assert!(found.calls <= 1.5, "{}", found.calls);
    assert!(found.silent <= 0.05, "{}", found.silent);
    assert!(found.entries >= 220.0, "{}", found.entries);
    // The second half of the run still pays for what newcomers take in advance.
    assert!(found.bytes_per_sec <= 1.25 * 400.0, "{}", found.bytes_per_sec);
}

#[test]
fn without_a_budget_lookups_take_no_more_than_half_log_n_and_one() {
    let found = outcome(512, 5.0, 600, 2);
    assert!(found.calls <= 0.5 * 512f64.log2() + 1.0, "{}", found.calls);
}
