//! The background tasks of a node: stabilise, refresh fingers, find other rings.

use std::collections::BTreeSet;
use std::sync::{Arc, Weak};
use std::time::Duration;

use atoll_env::{Notify, Runtime, jittered, random_below, sleep};
use atoll_key::PeerId;
use futures_util::StreamExt;
use futures_util::future::select;
use futures_util::stream;

use crate::Node;
use crate::chord::Chord;
use crate::chord::membership::ring_merge::INTRODUCE_HOPS;
use crate::chord::ring::servers::{Servers, SuccessorAnswer};
use crate::chord::ring::state::{ChordState, Told};
use crate::chord::table::explore::{TablePolicy, explore};
use crate::chord::trust::admission::Verdict;
use crate::walk::Start;

/// The most fingers looked up at once.
const PARALLEL_FINGERS: usize = 3;
/// The most virtual servers stabilised at once.
const PARALLEL_SERVERS: usize = 16;
/// Prompt rounds keep this fraction of the period apart.
const PROMPT_FRACTION: u32 = 20;
/// The successor's list is fetched every so many rounds even if its epoch stands still,
/// while any node is suspected or was the last time: suspicions run out meanwhile.
const FULL_ROUND_EVERY: u64 = 8;
/// And every so many rounds in any case. A guess.
const FULL_ROUND_AT_REST: u64 = 64;

/// Which loop.
#[derive(Clone, Copy)]
enum Chore {
    Stabilize,
    Fingers,
    Merge,
    Audit,
}

impl Chord {
    /// Starts the upkeep, once. [`Chord::create`] and [`Chord::join`] do it.
    pub fn start(&self) {
        let mut inner = self.lock();
        if !inner.maintenance.tasks.is_empty() {
            return;
        }
        let unrung = Arc::default();
        let mut chores = vec![
            (Chore::Stabilize, self.config.stabilize_every, &self.stabilize_due),
            (Chore::Merge, self.config.merge_every, &self.merge_due),
            (Chore::Audit, self.config.audit_every, &unrung),
        ];
        match self.config.table {
            TablePolicy::Fingers => {
                chores.push((Chore::Fingers, self.config.fix_fingers_every, &self.fingers_due));
            }
            TablePolicy::Adaptive => {
                let work = explore(self.this.clone(), self.env.clone());
                inner.maintenance.tasks.push(self.env.spawn(Box::pin(work)));
            }
        }
        for (chore, period, notify) in chores {
            let work = repeat(self.this.clone(), self.env.clone(), chore, period, notify.clone());
            inner.maintenance.tasks.push(self.env.spawn(Box::pin(work)));
        }
        let alone = inner.servers.is_alone();
        drop(inner);
        self.fingers_due.notify();
        if alone {
            self.merge_due.notify();
        }
    }

    async fn chore(&self, chore: Chore, round: u64, notified: bool) {
        match chore {
            Chore::Stabilize if notified => {
                self.lock().maintenance.interval.reset();
                self.stabilize_pending().await;
            }
            Chore::Stabilize => {
                if round.is_multiple_of(FULL_ROUND_EVERY) {
                    self.refetch_lists(round.is_multiple_of(FULL_ROUND_AT_REST));
                    self.take_waiting();
                    self.probe_corroborated();
                }
                if round.is_multiple_of(FULL_ROUND_AT_REST) {
                    self.recheck_clocks();
                }
                self.start_checks();
                self.stabilize_all().await;
                self.join_the_rest().await;
                self.end_round();
            }
            Chore::Fingers if notified => self.fill_fingers().await,
            Chore::Fingers => self.verify_finger(round).await,
            Chore::Merge => {
                self.place_introduced().await;
                if !notified || self.is_alone() {
                    self.look_for_other_rings().await;
                }
            }
            Chore::Audit if self.config.check_nodes && self.config.mechanisms.audits => {
                self.audit_due().await
            }
            Chore::Audit => {}
        }
    }

    fn is_alone(&self) -> bool {
        self.lock().servers.is_alone()
    }

    // --- stabilise --------------------------------------------------------------------

    /// Records whether the round that ends found a change.
    fn end_round(&self) {
        let mut inner = self.lock();
        let doubts = inner.servers.admission.has_suspects()
            || !inner.trust.probing.is_empty()
            || !inner.servers.joined()
            || inner.servers.is_alone();
        let epoch = inner.servers.epoch();
        inner
            .maintenance
            .interval
            .record_round(epoch, doubts || !self.config.mechanisms.adaptive_interval);
    }

    /// Has all lists fetched again in this round, if there is or was reason to.
    fn refetch_lists(&self, anyway: bool) {
        let now = self.env.now();
        let mut inner = self.lock();
        inner.servers.admission.expire(now);
        let doubts = inner.servers.admission.has_suspects();
        let doubted = std::mem::replace(&mut inner.trust.doubted, doubts);
        if !(anyway || doubts || doubted) {
            return;
        }
        for index in 0..inner.servers.count() {
            if let Some(server) = inner.servers.server_mut(index) {
                server.seen = None;
            }
        }
    }

    /// Stabilises every virtual server.
    pub(in crate::chord) async fn stabilize_all(&self) {
        let all: BTreeSet<u16> = {
            let mut inner = self.lock();
            inner.maintenance.to_stabilize.clear();
            (0..inner.servers.count()).collect()
        };
        self.stabilize(all).await;
    }

    async fn stabilize_pending(&self) {
        let to_stabilize = std::mem::take(&mut self.lock().maintenance.to_stabilize);
        self.stabilize(to_stabilize).await;
    }

    async fn stabilize(&self, servers: BTreeSet<u16>) {
        let work = servers.into_iter().map(|index| self.stabilize_server(index));
        stream::iter(work).buffer_unordered(PARALLEL_SERVERS).collect::<()>().await;
    }

    /// Zave's *stabilize*, until the first successor answers and knows no node between it and
    /// this one; then pings the predecessor if it has been silent.
    pub(in crate::chord) async fn stabilize_server(&self, index: u16) {
        self.adopt_own(index);
        for _ in 0..self.config.successors * 2 {
            let head = self.lock().servers.state(index).and_then(|state| state.head());
            let Some(head) = head else { break };
            let seen = self.seen_epoch(index, &head);
            let answer = match self.call_notify(index, &head, seen).await {
                Ok(answer) => answer,
                Err(error) if self.forget_if_useless(&head, &error) => continue,
                Err(_) => break,
            };
            let Some(newer) = self.take_in(index, &head, answer) else { break };
            let adopted = self.adopt(index, &newer, Some(head.peer.id)).await;
            let now = self.env.now();
            if !adopted && self.lock().servers.judge(&newer, now) != Verdict::Suspected {
                break; // Its check has not ended.
            }
        }
        self.watch_predecessor(index).await;
    }

    /// Virtual servers of one node adopt each other without a call.
    fn adopt_own(&self, index: u16) {
        let now = self.env.now();
        let nearer = {
            let inner = self.lock();
            let Some(state) = inner.servers.state(index) else { return };
            let others = inner.servers.states().filter(|other| other.joined());
            others.map(ChordState::me).find(|node| state.would_adopt(&node.id))
        };
        if nearer.is_none() {
            return;
        }
        self.update(|servers, _| {
            let others: Vec<(Node, Told)> =
                servers.states().filter(|s| s.joined()).map(|s| (s.me(), s.told())).collect();
            servers.with(index, now, |state, judge| {
                for (node, told) in &others {
                    state.adopt(*node, told, judge);
                }
            });
        });
    }

    /// The epoch of `head` whose list ours still is.
    fn seen_epoch(&self, index: u16, head: &Node) -> Option<u64> {
        let inner = self.lock();
        let server = inner.servers.server(index)?;
        let (from, epoch, own) = server.seen?;
        (from == *head && own == server.state.epoch()).then_some(epoch)
    }

    /// Rebuilds our list from the successor's answer; returns a nearer successor to ask.
    fn take_in(&self, index: u16, head: &Node, answer: SuccessorAnswer) -> Option<Node> {
        let todo = self.update(|servers, now| servers.take_in(index, head, answer, now));
        self.check_claims(&todo.unknown, Some(head.peer.id));
        todo.newer
    }

    /// Asks a node that may be a nearer successor, and takes it if it lives and still is
    /// nearer. If it does not know the successor we had, it may be of another ring: it is
    /// told of that one. `source` has named it, if not this node itself. Returns whether it
    /// lives.
    pub(in crate::chord) async fn adopt(
        &self,
        index: u16,
        newer: &Node,
        source: Option<PeerId>,
    ) -> bool {
        if !self.ensure_checked_for(newer, source).await {
            return false;
        }
        let told = match self.call_neighbours(newer).await {
            Ok(told) => told,
            Err(error) => {
                self.forget_if_useless(newer, &error);
                return false;
            }
        };
        let (replaced, unknown) = self.update(|servers, now| {
            let replaced = servers.with(index, now, |state, judge| {
                let head = state.head();
                // It may have left meanwhile.
                let lives = judge(newer) == Verdict::Welcome;
                (lives && state.adopt(*newer, &told, judge)).then_some(head)
            });
            let unknown = match replaced {
                Some(Some(_)) => servers.keep_waiting(index, *newer, told.clone(), now),
                _ => Vec::new(),
            };
            (replaced.flatten().flatten(), unknown)
        });
        self.check_claims(&unknown, Some(newer.peer.id));
        if let Some(replaced) = replaced
            && !told.successors.iter().any(|node| node.id == replaced.id)
        {
            // If it does not arrive, the periodic search for other rings is left.
            let _ = self.call_introduce(newer, &replaced, INTRODUCE_HOPS).await;
        }
        true
    }

    /// Pings the predecessor if it has been silent: it calls us every period, which may be
    /// four times ours.
    async fn watch_predecessor(&self, index: u16) {
        let patience =
            self.config.stabilize_every * self.lock().maintenance.interval.factor() * 3 / 2;
        let watched = {
            let inner = self.lock();
            let server = inner.servers.server(index);
            server.and_then(|s| Some((s.state.predecessor()?, s.predecessor_heard)))
        };
        let Some((predecessor, heard)) = watched else { return };
        let is_silent = self.env.now().since(heard) > patience;
        if !self.owns(&predecessor) && is_silent && self.probe_node(&predecessor).await {
            let now = self.env.now();
            self.lock().servers.predecessor_lives(index, &predecessor, now);
        }
    }

    // --- fingers ----------------------------------------------------------------------

    /// Looks up the fingers that are missing.
    async fn fill_fingers(&self) {
        let missing: Vec<(u16, u32)> = {
            let inner = self.lock();
            let lacks = |(index, exponent): &(u16, u32)| {
                inner.servers.state(*index).is_some_and(|s| s.finger(*exponent).is_none())
            };
            wanted_fingers(&inner.servers).into_iter().filter(lacks).collect()
        };
        let lookups = missing.into_iter().map(|(index, exponent)| self.fix_finger(index, exponent));
        stream::iter(lookups).buffer_unordered(PARALLEL_FINGERS).collect::<()>().await;
    }

    /// Verifies one finger, in turn (CFS §4.2: found out "by periodic lookups").
    async fn verify_finger(&self, round: u64) {
        let wanted = {
            let mut inner = self.lock();
            for index in 0..inner.servers.count() {
                inner.servers.server_mut(index).into_iter().for_each(|s| s.state.prune_fingers());
            }
            wanted_fingers(&inner.servers)
        };
        if !wanted.is_empty() {
            let (index, exponent) = wanted[(round % wanted.len() as u64) as usize];
            self.fix_finger(index, exponent).await;
        }
    }

    async fn fix_finger(&self, index: u16, exponent: u32) {
        let of_server = self
            .lock()
            .servers
            .state(index)
            .map(|state| (state.finger_start(exponent), state.finger(exponent)));
        let Some((start, present)) = of_server else { return };
        let from = match present {
            Some(likely) if !self.owns(&likely) => Start::LikelyRoot(likely),
            _ => Start::OwnTables,
        };
        if let Ok(found) = self.walk_to_root(&start, from, self.root_limits()).await {
            self.spent_on_the_way(found.trace.calls());
            let node = found.value[0];
            self.ensure_checked(&node).await;
            self.update(|servers, now| {
                servers.with(index, now, |state, judge| {
                    if judge(&node) == Verdict::Welcome {
                        state.set_finger(exponent, node);
                    }
                })
            });
        }
    }
}

/// The fingers worth keeping, of all virtual servers.
fn wanted_fingers(servers: &Servers) -> Vec<(u16, u32)> {
    let of_state = |state: &ChordState| {
        let index = state.me().virtual_server.index;
        state.wanted_fingers().into_iter().map(move |exponent| (index, exponent))
    };
    servers.states().flat_map(of_state).collect()
}

/// Runs a chore every period and whenever it is notified, as long as the node exists.
async fn repeat(
    chord: Weak<Chord>,
    env: Arc<dyn Runtime>,
    chore: Chore,
    period: Duration,
    notify: Arc<Notify>,
) {
    let mut round = 0;
    let first = Duration::from_nanos(random_below(&*env, period.as_nanos().max(1) as u64));
    let mut due = env.now() + first;
    let Some(apart) = chord.upgrade().map(|c| c.config.stabilize_every / PROMPT_FRACTION) else {
        return;
    };
    loop {
        let notified = {
            let waiting = select(env.sleep_until(due), Box::pin(notify.notified())).await;
            matches!(waiting, futures_util::future::Either::Right(_))
        };
        let Some(strong) = chord.upgrade() else { return };
        strong.chore(chore, round, notified).await;
        let hurry = match chore {
            Chore::Merge => strong.is_alone(),
            Chore::Stabilize => strong.lock().maintenance.interval.factor() == 1,
            Chore::Fingers | Chore::Audit => false,
        };
        let soon = strong.config.stabilize_every;
        let period = match chore {
            Chore::Stabilize | Chore::Merge => period * strong.lock().maintenance.interval.factor(),
            Chore::Fingers | Chore::Audit => period,
        };
        drop(strong);
        if !notified {
            round += 1;
        }
        if !notified || env.now() >= due {
            due = env.now() + jittered(&*env, period);
        }
        if hurry {
            due = due.min(env.now() + jittered(&*env, soon));
        }
        sleep(&*env, apart).await;
    }
}
