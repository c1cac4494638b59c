//! The adaptive table in a running node: its updates, its readers, and the task that explores with
//! the budget that is left. The table itself is plain data ([`crate::chord::table`]).
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
use crate::{MAX_CLOSER, MAX_GUESSES, Node, Route};

/// Which table a node keeps beside its successor lists.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum TablePolicy {
    /// Chord's fingers (CFS §4.2), found by lookups and verified in turn.
    Fingers,
    /// As many nodes as the budget keeps fresh ([`crate::chord::table`]).
    #[default]
    Adaptive,
}

/// One in so many bytes of upkeep is not counted: the walks of joining nodes, which look like
/// lookups, checks on fresh connections, the advance of newcomers, and part of the walks of
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
            table: Table::new(me, MAX_ENTRIES, secs(now)).trusting(trust),
            budget: Budget::new(counted, now),
            seen: None,
        }
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
        self.explorer.seen = Some((epoch, second));
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
    }

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

    /// How many nodes are in the adaptive table.
    pub fn table_entries(&self) -> usize {
        self.lock().explorer.table.len()
    }

    /// Fills the adaptive table with the nodes that it would have learnt in time, to start large
    /// rings at rest: `known` is believed, and its slots are told apart by `bits`. Seconds are
    /// those of [`secs`].
    pub fn prefill(&self, known: impl Iterator<Item = Evidence>, bits: u32) {
        let now = self.env.now();
        let mut inner = self.lock();
        inner.show_neighbours(now);
        inner.explorer.table.prefill(known, bits, secs(now));
        inner.explorer.budget.forgo_advance();
    }

    // --- updates ----------------------------------------------------------------------

    /// A message of this family was sent or received.
    pub(in crate::chord) fn spent(&self, method: u16, header_bytes: usize) {
        if method != messages::ROUTE {
            let now = self.env.now();
            self.lock().explorer.budget.spend(header_bytes, now);
        }
    }

    /// Upkeep has asked the way, so many calls long. As others ask us as often, it counts twice.
    pub(in crate::chord) fn spent_on_the_way(&self, calls: usize) {
        let now = self.env.now();
        let budget = &mut self.lock().explorer.budget;
        (0..2 * calls).for_each(|_| budget.spend(WALK_CALL_BYTES, now));
    }

    /// The node has answered a call of this family. Those that only members answer let it enter:
    /// an answer proves the key. Where the position follows from the address, that has to be
    /// checked as well.
    pub(in crate::chord) fn table_answered(&self, node: &Node, method: u16) {
        let is_member = matches!(method, messages::NOTIFY | messages::NEIGHBOURS | LEARN);
        let is_proven = self.config.profile == IdProfile::Identity
            || self.lock().servers.admission.was_checked(&node.peer);
        self.with_table_of(node, |table, now| {
            if is_member && is_proven {
                table.heard(node, now);
            } else {
                table.refreshed(node, now);
            }
        });
    }

    /// The node lives, member or not.
    pub(in crate::chord) fn table_refreshed(&self, node: &Node) {
        self.with_table_of(node, |table, now| {
            table.refreshed(node, now);
        });
    }

    /// The peer has called this node: it lives. A stranger enters as unsure: others have to name
    /// it, or this node to check it.
    pub(in crate::chord) fn table_called(&self, from: &Peer) {
        let node = self.place(*from, 0);
        self.with_table_of(&node, |table, now| table.called(&node, now));
    }

    /// Tells the adaptive table of another node.
    fn with_table_of(&self, node: &Node, tell: impl FnOnce(&mut Table, u32)) {
        if self.is_adaptive() && !self.owns(node) {
            let now = self.env.now();
            tell(&mut self.lock().explorer.table, secs(now));
        }
    }

    /// The peer is dead.
    pub(in crate::chord) fn table_failed(&self, peer: &Peer) {
        let now = self.env.now();
        self.lock().explorer.table.failed(&peer.id, secs(now));
    }

    // --- readers ----------------------------------------------------------------------

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
        self.lock().explorer.table.sample(MAX_SAMPLE)
    }

    /// Sure nodes of the table, if a virtual server of ours has lost all its successors.
    pub(in crate::chord) fn table_for_the_lost(&self) -> Vec<Node> {
        let inner = self.lock();
        let is_lost = |s: &ChordState| s.joined() && s.successors().is_empty();
        if !self.is_adaptive() || !inner.servers.states().any(is_lost) {
            return Vec::new();
        }
        inner.explorer.table.followers()
    }

    /// Answers [`LEARN`].
    pub(in crate::chord) fn answer_learn(&self, header: &[u8]) -> Result<Bytes, Refusal> {
        let learn: Learn = messages::decode(header)?;
        let now = self.env.now();
        let mut inner = self.lock();
        if !self.is_adaptive() || inner.explorer.budget.is_exhausted(now) {
            return Err(Refusal::new(Refusal::OVERLOADED, "the upkeep's budget is used up"));
        }
        if !inner.servers.joined() {
            return Err(Refusal::new(NOT_JOINED, "this node is not on a ring"));
        }
        inner.show_neighbours(now);
        Ok(messages::encode(&inner.explorer.table.answer(&learn, secs(now))))
    }

    // --- exploration ------------------------------------------------------------------

    /// Takes the next action if the budget allows it; returns how long to wait then. After the
    /// longest wait it takes one on any budget.
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
        // A check or a call that finds the node dead drops it.
        let is_genuine =
            self.ensure_checked(node).await && matches!(self.call_ping(node).await, Ok(true));
        let now = self.env.now();
        let mut inner = self.lock();
        if is_genuine {
            inner.explorer.table.heard(node, secs(now));
        } else {
            inner.explorer.table.drop_unsure(node);
        }
    }

    async fn learn(&self, question: &Question, nodes: f64) {
        let header = messages::encode(&question.learn);
        let answer = self.call::<Learned>(&question.to, LEARN, header).await;
        let now = self.env.now();
        match answer {
            Ok(answer) => {
                let mut guard = self.lock();
                guard.show_neighbours(now);
                let Inner { explorer, servers, .. } = &mut *guard;
                let is_possible = |node: &Node| servers.admission.is_possible(node);
                explorer.table.take_in(question, &answer, nodes, is_possible, secs(now));
            }
            Err(error) if crate::chord::calls::is_no_neighbour(&error) => {
                let is_neighbour = self.lock().servers.known().contains(&question.to);
                if is_neighbour {
                    self.forget_if_useless(&question.to, &error);
                }
                self.lock().explorer.table.failed(&question.to.peer.id, secs(now));
            }
            // Its budget is used up: another node will be asked.
            Err(_) => {}
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
