//! The adaptive table in a running node: what updates it, what reads it, and the task that explores
//! with the budget that is left. The table itself is plain data ([`crate::chord::table`]).
//!
//! It is updated, at no cost in messages, by answers to calls of any layer, by callers, by the
//! successor lists and by checks.
//! The budget pays for every message of this family sent or received, but for `ROUTE`, which serves
//! lookups. Each call of a walk that maintenance makes counts twice, since other nodes' walks ask
//! this one as often.
//!
//! A node whose successor lists hold the whole ring explores nothing.

use std::sync::{Arc, Weak};
use std::time::Duration;

use atoll_env::{Runtime, jittered, sleep};
use atoll_key::{IdProfile, Key};
use atoll_net::{Peer, Refusal};
use bytes::Bytes;

use crate::chord::messages::{self, NOT_JOINED};
use crate::chord::ring::state::ChordState;
use crate::chord::table::budget::{Budget, MESSAGE_OVERHEAD_BYTES};
use crate::chord::table::learn::{LEARN, Learn, Learned, Question};
use crate::chord::table::sweep::Wish;
use crate::chord::table::{Evidence, MAX_ENTRIES, Table, Trust, secs};
use crate::chord::{Chord, ChordConfig, Inner};
use crate::walk::Trace;
use crate::{MAX_CLOSER, MAX_GUESSES, Node, Route, VirtualServerId};

/// Which table a node keeps beside its successor lists.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum TablePolicy {
    /// Chord's fingers (CFS §4.2), found by lookups and verified in turn.
    Fingers,
    /// As many nodes as the budget keeps fresh ([`crate::chord::table`]).
    #[default]
    Adaptive,
}

/// What a table of nodes has come to, for people.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TableReport {
    /// Nodes in it.
    pub entries: usize,
    /// Those known by one peer's word only.
    pub unsure: usize,
    /// The bits of distance that tell its slots apart.
    pub bits: u32,
    /// The share of live nodes that it was found to know.
    pub coverage: f64,
    /// How old its evidence may become.
    pub acceptable_staleness: Duration,
    /// Bytes of upkeep sent and received so far.
    pub upkeep_bytes: u64,
}

/// One in so many bytes of upkeep is not counted: the walks of those who join, which look like
/// lookups, checks on fresh connections, what newcomers ask in advance, and part of the walks of
/// upkeep. Simulated: a fifteenth with 2,048 nodes; the rest is a margin.
const UNCOUNTED_SHARE: u64 = 6;
/// The least time between two questions.
const LEAST_PAUSE: Duration = Duration::from_millis(250);
/// The longest pause of a node that has neither budget nor anything to do.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// The longest pause while something is left to ask and the budget is used up: so much a
/// node learns on any budget. A call a minute is 10 bytes a second.
const LONGEST_WAIT: Duration = Duration::from_secs(60);
/// How often a node looks whether there is anything to explore.
const IDLE_PAUSE: Duration = Duration::from_secs(5);
/// Bytes of one question of a walk and its answer: 74 and about 300, twice the overhead.
const WALK_CALL_BYTES: usize = 374 + MESSAGE_OVERHEAD_BYTES;
/// How many nodes of the table other routes of a walk may begin at.
const MAX_SAMPLE: usize = 32;

/// The adaptive table and the budget it lives on.
pub(in crate::chord) struct Explorer {
    policy: TablePolicy,
    pub(in crate::chord) table: Table,
    budget: Budget,
    /// The epoch of the neighbourhoods that the table has seen, and when.
    seen: Option<(u64, u32)>,
}

impl Explorer {
    pub(in crate::chord) fn new(
        config: &ChordConfig,
        me: Node,
        now: atoll_env::Instant,
    ) -> Explorer {
        let trust = match config.profile {
            IdProfile::Identity => Trust::TwoPeers,
            IdProfile::Address => Trust::OwnChecks,
        };
        let allowed = config.table_budget_bytes_per_sec;
        let counted = allowed - allowed / UNCOUNTED_SHARE;
        Explorer {
            policy: config.table,
            table: Table::new(me, MAX_ENTRIES, secs(now)).trusting(trust),
            budget: Budget::new(counted, now),
            seen: None,
        }
    }

    fn is_adaptive(&self) -> bool {
        self.policy == TablePolicy::Adaptive
    }
}

impl Inner {
    /// Shows the table this node's neighbourhoods if they changed, or were last seen to
    /// stand a second ago.
    fn show_neighbours(&mut self, now: atoll_env::Instant) {
        let (epoch, second) = (self.servers.epoch(), secs(now));
        if self.explorer.seen == Some((epoch, second)) {
            return;
        }
        let is_first = self.explorer.seen.replace((epoch, second)).is_none();
        let me = self.servers.position(0).peer.id;
        let own: Vec<(Node, Vec<Node>)> = self
            .servers
            .states()
            .filter(|state| state.joined())
            .map(|state| (state.me(), state.successors().to_vec()))
            .collect();
        if own.is_empty() {
            return;
        }
        self.explorer.table.set_own(&own, me, second);
        if is_first {
            // A ring that was started at rest: its fingers count as checked.
            let fingers = self.servers.states().flat_map(|state| state.fingers());
            for (_, finger) in fingers.filter(|(_, finger)| finger.peer.id != me) {
                self.explorer.table.heard(&finger, second);
            }
        }
    }
}

impl Inner {
    fn guess_roots(&self, key: &Key, now: atoll_env::Instant) -> Vec<Node> {
        let ring_size = self.servers.estimated_nodes();
        let mut nodes = self.explorer.table.likely_roots(key, ring_size, secs(now));
        nodes.retain(|node| !self.servers.admission.is_suspected(node, now));
        nodes
    }
}

impl Chord {
    fn is_adaptive(&self) -> bool {
        self.config.table == TablePolicy::Adaptive
    }

    /// What the adaptive table has come to.
    pub fn table_report(&self) -> TableReport {
        let inner = self.lock();
        let table = &inner.explorer.table;
        TableReport {
            entries: table.len(),
            unsure: table.unsure_count(),
            bits: table.bits(),
            coverage: table.coverage(),
            acceptable_staleness: Duration::from_secs(table.acceptable_staleness_secs().into()),
            upkeep_bytes: inner.explorer.budget.spent_bytes(),
        }
    }

    /// A copy of the adaptive table, for checkers and for people.
    pub fn table(&self) -> Table {
        self.lock().explorer.table.clone()
    }

    /// Gives the adaptive table what it would have learnt in time, to start large rings
    /// at rest: `known` is believed, this node runs since `since`, and its slots are told
    /// apart by `bits`. Seconds are those of [`secs`].
    pub fn prefill(&self, known: impl Iterator<Item = Evidence>, since: u32, bits: u32) {
        let now = self.env.now();
        let mut inner = self.lock();
        inner.show_neighbours(now);
        inner.explorer.table.prefill(known, since, bits, secs(now));
        inner.explorer.budget.forgo_advance();
    }

    // --- what feeds it ----------------------------------------------------------------

    /// A message of this family was sent or received.
    pub(in crate::chord) fn spent(&self, method: u16, header_bytes: usize) {
        if method != messages::ROUTE {
            let now = self.env.now();
            self.lock().explorer.budget.spend(header_bytes, now);
        }
    }

    /// Upkeep has walked.
    pub(in crate::chord) fn spent_on_walk(&self, trace: &Trace) {
        let now = self.env.now();
        let mut inner = self.lock();
        for _ in 0..2 * trace.calls() {
            inner.explorer.budget.spend(WALK_CALL_BYTES, now);
        }
    }

    /// An audit has asked the way. As others ask us as often, it counts twice.
    pub(in crate::chord) fn spent_asking(&self, asked_bytes: usize, answered_bytes: usize) {
        let now = self.env.now();
        let budget = &mut self.lock().explorer.budget;
        for bytes in [asked_bytes, answered_bytes, asked_bytes, answered_bytes] {
            budget.spend(bytes, now);
        }
    }

    /// The node has answered a call that only members of a ring answer: it may enter.
    fn table_heard(&self, node: &Node) {
        if !self.is_adaptive() || self.owns(node) {
            return;
        }
        let now = self.env.now();
        let mut inner = self.lock();
        // An answer proves the key. Where the position follows from the address, that has
        // to be checked as well.
        let is_proven = match self.config.profile {
            IdProfile::Identity => true,
            IdProfile::Address => inner.servers.admission.was_checked(&node.peer),
        };
        let table = &mut inner.explorer.table;
        if is_proven { table.heard(node, secs(now)) } else { table.called(node, secs(now)) }
    }

    /// The node has answered a call of this family.
    pub(in crate::chord) fn table_answered(&self, node: &Node, method: u16) {
        match method {
            messages::NOTIFY | messages::NEIGHBOURS | LEARN => self.table_heard(node),
            _ => self.table_refreshed(node),
        }
    }

    /// The node lives, member or not.
    pub(in crate::chord) fn table_refreshed(&self, node: &Node) {
        if self.is_adaptive() && !self.owns(node) {
            let now = self.env.now();
            self.lock().explorer.table.refreshed(node, secs(now));
        }
    }

    /// The peer has called this node: it lives. A stranger enters as unsure, for anybody may
    /// call: others have to name it, or this node to check it. Where positions follow from
    /// addresses it does not enter at all, or each stranger would cost a check.
    pub(in crate::chord) fn table_called(&self, from: &Peer) {
        let node = Node::at(*from, VirtualServerId { profile: self.config.profile, index: 0 });
        if self.config.profile == IdProfile::Address {
            self.table_refreshed(&node);
        } else if self.is_adaptive() && !self.owns(&node) {
            let now = self.env.now();
            self.lock().explorer.table.called(&node, secs(now));
        }
    }

    /// The peer is dead.
    pub(in crate::chord) fn table_failed(&self, peer: &Peer) {
        let now = self.env.now();
        self.lock().explorer.table.failed(&peer.id, secs(now));
    }

    // --- who reads it -----------------------------------------------------------------

    /// Adds the table's nodes before the key to those that a route names, and its guesses at
    /// the root.
    pub(in crate::chord) fn with_table(&self, key: &Key, route: Route) -> Route {
        if !self.is_adaptive() || !matches!(route, Route::Closer(_)) {
            return route;
        }
        let now = self.env.now();
        let mut inner = self.lock();
        inner.show_neighbours(now);
        let me = self.transport.local().id;
        let own: Vec<Key> = inner.servers.states().map(|s| *s.me().id.key()).collect();
        let before = own.iter().min_by_key(|own| key.distance_from(own));
        let Some(after) = before.copied() else { return route };
        let mut nodes = inner.explorer.table.before(key, secs(now));
        nodes.extend(route.nodes());
        nodes.retain(|node| {
            node.peer.id != me
                && node.id.key().strictly_between(&after, key)
                && !inner.servers.admission.is_suspected(node, now)
        });
        nodes.sort_by_cached_key(|node| key.distance_from(node.id.key()));
        nodes.dedup_by_key(|node| node.id);
        nodes.truncate(MAX_CLOSER);
        if nodes.is_empty() {
            return route;
        }
        if self.config.mechanisms.guesses {
            nodes.extend(inner.guess_roots(key, now).into_iter().take(MAX_GUESSES));
        }
        Route::closer(nodes)
    }

    /// See [`crate::Overlay::likely_roots`].
    pub(in crate::chord) fn guess_roots(&self, key: &Key) -> Vec<Node> {
        if !self.is_adaptive() || !self.config.mechanisms.guesses {
            return Vec::new();
        }
        let now = self.env.now();
        self.lock().guess_roots(key, now)
    }

    /// Nodes of the table all over the ring.
    pub(in crate::chord) fn table_sample(&self) -> Vec<Node> {
        if !self.is_adaptive() {
            return Vec::new();
        }
        let inner = self.lock();
        let table = &inner.explorer.table;
        table.sample(MAX_SAMPLE)
    }

    /// Sure nodes of the table, if a virtual server of ours has lost all its successors.
    pub(in crate::chord) fn table_for_the_lost(&self) -> Vec<Node> {
        let inner = self.lock();
        let is_lost = |s: &ChordState| s.joined() && s.successors().is_empty();
        if !inner.explorer.is_adaptive() || !inner.servers.states().any(is_lost) {
            return Vec::new();
        }
        inner.explorer.table.followers()
    }

    /// Whether the table knows somebody who serves as this finger.
    pub(in crate::chord) fn table_has_finger(&self, index: u16, exponent: u32) -> bool {
        if !self.is_adaptive() {
            return false;
        }
        let inner = self.lock();
        let Some(state) = inner.servers.state(index) else { return true };
        let start = state.finger_start(exponent);
        let end = start.wrapping_add(&Key::power_of_two(exponent)).previous();
        inner.explorer.table.knows_within(&start, &end)
    }

    /// Answers [`LEARN`].
    pub(in crate::chord) fn answer_learn(&self, header: &[u8]) -> Result<Bytes, Refusal> {
        let learn: Learn = messages::decode(header)?;
        let now = self.env.now();
        let mut inner = self.lock();
        if !inner.explorer.is_adaptive() || inner.explorer.budget.is_exhausted(now) {
            return Err(Refusal::new(Refusal::OVERLOADED, "the upkeep's budget is used up"));
        }
        if !inner.servers.joined() {
            return Err(Refusal::new(NOT_JOINED, "this node is not on a ring"));
        }
        inner.show_neighbours(now);
        Ok(messages::encode(&inner.explorer.table.answer(&learn, secs(now))))
    }

    // --- exploration ------------------------------------------------------------------

    /// What can be done now; how long to wait then. On whatever budget something is done
    /// after the longest wait.
    async fn explore(&self, has_waited: bool) -> Duration {
        let (wish, nodes) = {
            let now = self.env.now();
            let mut inner = self.lock();
            let knows_all = inner.servers.states().all(|state| state.knows_whole_ring());
            if !inner.servers.joined() || knows_all || !self.config.mechanisms.exploration {
                return IDLE_PAUSE;
            }
            let wait = inner.explorer.budget.wait_for(Table::QUESTION_BYTES, now, LONGEST_WAIT);
            if wait > LEAST_PAUSE && !(has_waited && wait == LONGEST_WAIT) {
                return wait;
            }
            inner.show_neighbours(now);
            let nodes = inner.servers.estimated_nodes();
            (inner.explorer.table.next_question(nodes, secs(now)), nodes)
        };
        match wish {
            Wish::Rest(secs) => Duration::from_secs(secs.into()).clamp(LEAST_PAUSE, LONGEST_PAUSE),
            Wish::Check(node) => {
                self.verify_entry(&node).await;
                LEAST_PAUSE
            }
            Wish::Ask(question) => {
                self.learn(&question, nodes).await;
                LEAST_PAUSE
            }
        }
    }

    async fn verify_entry(&self, node: &Node) {
        // A node that a check or a call finds dead is buried by that.
        let is_borne_out =
            self.ensure_checked(node).await && matches!(self.call_ping(node).await, Ok(true));
        let now = self.env.now();
        let mut inner = self.lock();
        if is_borne_out {
            inner.explorer.table.heard(node, secs(now));
        } else {
            inner.explorer.table.not_borne_out(node);
        }
    }

    async fn learn(&self, question: &Question, nodes: f64) {
        let header = messages::encode(&question.learn);
        let answer = self.call::<Learned>(&question.to, LEARN, header).await;
        let now = self.env.now();
        match answer {
            Ok(mut answer) => {
                if !self.config.mechanisms.told_deaths {
                    answer.leave_out_deaths();
                }
                let mut inner = self.lock();
                answer.leave_out(|node| !inner.servers.admission.is_possible(node));
                inner.show_neighbours(now);
                inner.explorer.table.take_in(question, &answer, nodes, secs(now));
            }
            Err(error) if crate::chord::calls::is_no_neighbour(&error) => {
                let is_neighbour = self.lock().servers.known().contains(&question.to);
                if is_neighbour {
                    self.forget_if_useless(&question.to, &error);
                }
                self.lock().explorer.table.record_no_answer(question, secs(now));
            }
            Err(_) => self.lock().explorer.table.refused(question, secs(now)),
        }
    }
}

/// Explores as long as the node exists.
pub(in crate::chord) async fn explore(chord: Weak<Chord>, env: Arc<dyn Runtime>) {
    let mut pause = LEAST_PAUSE;
    loop {
        sleep(&*env, jittered(&*env, pause)).await;
        let Some(strong) = chord.upgrade() else { return };
        pause = strong.explore(pause >= LONGEST_WAIT).await;
    }
}
