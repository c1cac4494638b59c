//! What a node does in the background: stabilise, refresh fingers, meet other rings.

use std::sync::{Arc, Weak};
use std::time::Duration;

use atoll_env::{Runtime, jittered, random_below, sleep};
use futures_util::StreamExt;
use futures_util::future::{join_all, select};
use futures_util::stream;

use super::bell::Bell;
use super::calls::is_no_neighbour;
use super::{Chord, messages::Surroundings, state::Told};
use crate::Node;

/// How often an introduction is passed on towards its place: any lookup is shorter.
pub(super) const MEET_HOPS: u8 = 32;
/// How often a node looks again when its successor changed during an introduction.
const MEET_TRIES: usize = 4;
/// The most fingers looked up at once.
const PARALLEL_FINGERS: usize = 3;
/// The most reports of death checked at once.
const PARALLEL_CHECKS: usize = 8;
/// Prompt rounds keep this fraction of the period apart.
const PROMPT_FRACTION: u32 = 20;
/// The successor's list is fetched every so many rounds even if its epoch stands still:
/// suspicions run out meanwhile.
const FULL_ROUND_EVERY: u64 = 8;

/// Which loop.
#[derive(Clone, Copy)]
enum Chore {
    Stabilize,
    Fingers,
    Merge,
}

impl Chord {
    /// Starts the upkeep, once. [`Chord::create`] and [`Chord::join`] do it.
    pub fn start(&self) {
        let mut inner = self.lock();
        if !inner.tasks.is_empty() {
            return;
        }
        let chores = [
            (Chore::Stabilize, self.config.stabilize_every, &self.stabilize_bell),
            (Chore::Fingers, self.config.fix_fingers_every, &self.finger_bell),
            (Chore::Merge, self.config.merge_every, &self.meet_bell),
        ];
        for (chore, period, bell) in chores {
            let work = repeat(self.this.clone(), self.env.clone(), chore, period, bell.clone());
            inner.tasks.push(self.env.spawn(Box::pin(work)));
        }
        let alone = inner.state.head().is_none();
        drop(inner);
        self.finger_bell.ring();
        if alone {
            self.meet_bell.ring();
        }
    }

    async fn chore(&self, chore: Chore, round: u64, rung: bool) {
        match chore {
            Chore::Stabilize => {
                if round.is_multiple_of(FULL_ROUND_EVERY) {
                    self.lock().seen = None;
                }
                self.stabilize().await;
            }
            Chore::Fingers if rung => self.fill_fingers().await,
            Chore::Fingers => self.verify_finger(round).await,
            Chore::Merge => {
                self.meet_all().await;
                if !rung || self.is_alone() {
                    self.look_for_other_rings().await;
                }
            }
        }
    }

    fn is_alone(&self) -> bool {
        self.lock().state.head().is_none()
    }

    // --- stabilise --------------------------------------------------------------------

    /// Zave's *stabilize*, until the first successor answers and knows nobody between it
    /// and us; then a look at the predecessor.
    pub(super) async fn stabilize(&self) {
        self.check_reported().await;
        for _ in 0..self.config.successors * 2 {
            let Some(head) = self.lock().state.head() else { break };
            let seen = self.seen_epoch(&head);
            match self.call_notify(&head, seen).await {
                Ok(said) => match self.take_in(&head, said) {
                    Some(newer) => {
                        self.adopt(&newer).await;
                    }
                    None => break,
                },
                Err(error) if is_no_neighbour(&error) => self.found_dead(&head),
                Err(_) => break,
            }
        }
        self.watch_predecessor().await;
    }

    /// The epoch of `head` whose list ours still is.
    fn seen_epoch(&self, head: &Node) -> Option<u64> {
        let inner = self.lock();
        let (from, epoch, own) = inner.seen?;
        (from == head.id && own == inner.state.epoch()).then_some(epoch)
    }

    /// Rebuilds our list from the successor's answer; returns a nearer successor to ask.
    fn take_in(&self, head: &Node, said: Surroundings) -> Option<Node> {
        let predecessor = said.predecessor.map(|n| n.0);
        let Some(successors) = said.successors else {
            let inner = self.lock();
            return inner.state.newer_successor(predecessor, self.env.now());
        };
        let told = Told { predecessor, successors: successors.0 };
        let newer = self.update(|state, now| state.stabilize(head, &told, now));
        let mut inner = self.lock();
        inner.seen = Some((head.id, said.epoch, inner.state.epoch()));
        newer
    }

    /// Asks a node that may be a nearer successor, and takes it if it lives and still is
    /// nearer. If it does not know the successor we had, it may be of another ring: it is
    /// told of that one. Returns whether it lives.
    async fn adopt(&self, newer: &Node) -> bool {
        let told = match self.call_neighbours(newer).await {
            Ok(told) => told,
            Err(error) => {
                if is_no_neighbour(&error) {
                    self.found_dead(newer);
                }
                return false;
            }
        };
        let replaced = self.update(|state, now| {
            let head = state.head();
            if state.adopt(*newer, &told, now) { head } else { None }
        });
        if let Some(replaced) = replaced
            && !told.successors.iter().any(|node| node.id == replaced.id)
        {
            // If it does not arrive, the periodic search for other rings is left.
            let _ = self.call_meet(newer, &replaced, MEET_HOPS).await;
        }
        true
    }

    /// Pings the predecessor if it has been silent: it calls us every period.
    async fn watch_predecessor(&self) {
        let (predecessor, heard) = {
            let inner = self.lock();
            (inner.state.predecessor(), inner.predecessor_heard)
        };
        let Some(predecessor) = predecessor else { return };
        if self.env.now().since(heard) > self.config.stabilize_every * 3 / 2
            && self.check(&predecessor).await
        {
            self.lock().predecessor_heard = self.env.now();
        }
    }

    /// Pings those who were reported dead; who lives is welcome back.
    async fn check_reported(&self) {
        let mut reported = Vec::new();
        {
            let mut inner = self.lock();
            while reported.len() < PARALLEL_CHECKS
                && let Some((_, node)) = inner.to_check.pop_first()
            {
                reported.push(node);
            }
        }
        let alive = join_all(reported.iter().map(|node| self.check(node))).await;
        for (node, alive) in reported.iter().zip(alive) {
            if alive && self.lock().state.would_adopt(&node.id) {
                self.adopt(node).await;
            }
        }
        if !self.lock().to_check.is_empty() {
            self.stabilize_bell.ring();
        }
    }

    // --- fingers ----------------------------------------------------------------------

    /// Looks up the fingers that are missing.
    async fn fill_fingers(&self) {
        let missing: Vec<u32> = {
            let mut inner = self.lock();
            inner.state.prune_fingers();
            let wanted = inner.state.wanted_fingers();
            wanted.into_iter().filter(|i| inner.state.finger(*i).is_none()).collect()
        };
        let lookups = missing.into_iter().map(|exponent| self.fix_finger(exponent));
        stream::iter(lookups).buffer_unordered(PARALLEL_FINGERS).collect::<()>().await;
    }

    /// Verifies one finger, in turn (CFS §4.2: found out "by periodic lookups").
    async fn verify_finger(&self, round: u64) {
        let wanted = {
            let mut inner = self.lock();
            inner.state.prune_fingers();
            inner.state.wanted_fingers()
        };
        if !wanted.is_empty() {
            self.fix_finger(wanted[(round % wanted.len() as u64) as usize]).await;
        }
    }

    async fn fix_finger(&self, exponent: u32) {
        let (start, present) = {
            let inner = self.lock();
            (inner.state.finger_start(exponent), inner.state.finger(exponent))
        };
        let found = match present {
            Some(likely) => self.walk_to_likely_root(likely, &start).await,
            None => self.walk_to_root(&start).await,
        };
        if let Ok(found) = found {
            let node = found.value[0];
            self.update(|state, now| {
                if !state.is_suspected(&node.id, now) {
                    state.set_finger(exponent, node);
                }
            });
        }
    }

    // --- other rings ------------------------------------------------------------------

    /// Asks a remembered peer outside the neighbourhood who follows us. On our own ring
    /// the answer is our successor; on another it is somebody to meet.
    async fn look_for_other_rings(&self) {
        let Some(stranger) = self.choose_stranger() else { return };
        let key = self.me().id.key().next();
        let Ok(found) = self.walk_to_root_from(&[stranger], &key).await else { return };
        let successor = found.value[0];
        let known = self.lock().state.known();
        if !known.iter().any(|node| node.id == successor.id) {
            self.meet(&successor, MEET_HOPS).await;
        }
    }

    fn choose_stranger(&self) -> Option<Node> {
        let mut inner = self.lock();
        let known = inner.state.known();
        for node in &known {
            inner.remembered.add(node.peer, &*self.env);
        }
        let strangers: Vec<Node> = inner
            .remembered
            .iter()
            .map(Node::of)
            .filter(|node| !known.iter().any(|k| k.id == node.id))
            .collect();
        if strangers.is_empty() {
            return None;
        }
        Some(strangers[random_below(&*self.env, strangers.len() as u64) as usize])
    }

    async fn meet_all(&self) {
        while let Some((node, hops_left)) = {
            let mut inner = self.lock();
            inner.to_meet.pop_front()
        } {
            self.meet(&node, hops_left).await;
        }
    }

    /// Finds a stranger its place: before our successor, which it is then told of in
    /// turn, so that two rings close like a zipper; or farther on, whoever stands there.
    async fn meet(&self, stranger: &Node, hops_left: u8) {
        for _ in 0..MEET_TRIES {
            let (fits, head, next) = {
                let inner = self.lock();
                let state = &inner.state;
                let next = state.preceding(stranger.id.key());
                (state.would_adopt(&stranger.id), state.head(), next)
            };
            if head.is_some_and(|head| head.id == stranger.id) {
                return;
            }
            if !fits {
                if let Some(next) = next
                    && hops_left > 0
                {
                    let _ = self.call_meet(&next, stranger, hops_left - 1).await;
                }
                return;
            }
            if !self.adopt(stranger).await {
                return;
            }
            // Meanwhile somebody nearer may have come: then that one has to be told.
        }
    }
}

/// Runs a chore every period and whenever its bell rings, as long as the node exists.
async fn repeat(
    chord: Weak<Chord>,
    env: Arc<dyn Runtime>,
    chore: Chore,
    period: Duration,
    bell: Arc<Bell>,
) {
    let mut round = 0;
    let first = Duration::from_nanos(random_below(&*env, period.as_nanos().max(1) as u64));
    let mut due = env.now() + first;
    let Some(apart) = chord.upgrade().map(|c| c.config.stabilize_every / PROMPT_FRACTION) else {
        return;
    };
    loop {
        let rung = {
            let waiting = select(env.sleep_until(due), Box::pin(bell.rung())).await;
            matches!(waiting, futures_util::future::Either::Right(_))
        };
        let Some(strong) = chord.upgrade() else { return };
        strong.chore(chore, round, rung).await;
        let hurry = matches!(chore, Chore::Merge) && strong.is_alone();
        let soon = strong.config.stabilize_every;
        drop(strong);
        if !rung {
            round += 1;
        }
        if !rung || env.now() >= due {
            due = env.now() + jittered(&*env, period);
        }
        if hurry {
            due = due.min(env.now() + jittered(&*env, soon));
        }
        sleep(&*env, apart).await;
    }
}
