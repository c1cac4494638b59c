//! Choosing among the replicas of a block (CFS §5.1: "the client then fetches the block
//! from the replica with the lowest reported latency"), and not waiting for a slow one.
//!
//! The walk ends at a node that names the root and its successors. The block is then requested from
//! the nearest member of its replica set, judged by the round trips that this node has measured
//! itself and by the blocks already requested from each ([`BlockTimes`](super::block_times));
//! replicas that are about equally near share the load at random.
//!
//! A replica that takes longer than it does 19 times of 20 is *hedged*: the next nearest is asked
//! as well, the first good answer counts, and the other call is dropped. Hedges are a small share
//! of all fetches, so a slow network does not get twice the load. A replica that is overdue has
//! probably died: the next one is asked whatever share that makes, and the overdue call runs to its
//! end, so that the peer book learns its outcome. Replicas that left an earlier call unanswered are
//! asked only when the walk finds no other.
//!
//! If the routing tables name the root, so that the walk begins there, they also name its
//! successors, and the choice is among these guessed replicas. Otherwise the roots of popular
//! blocks would serve nearly all readers, since there is no path on which a cache could help
//! (§5.2).
//!
//! A replica without the block costs one question. The root's own answer goes back into the walk,
//! which keeps account of failures and liars.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_env::{BoxFuture, Instant, random_below, sleep};
use atoll_key::{Key, PeerId};
use atoll_net::CallError;
use atoll_overlay::peer_book::Standing;
use atoll_overlay::walk::{Asked, Said, Step, may_follow};
use atoll_overlay::{Node, distinct_peers};
use futures_util::StreamExt;
use futures_util::future::{Either, select};
use futures_util::stream::FuturesUnordered;

use crate::client::Client;
use crate::client::ask::{Answer, ask};
use crate::config::ReplicaChoice;
use crate::rpc::Block;
use crate::stats::add;

/// Replicas expected to take times that differ by less than this share are equally near. A
/// guess.
const ABOUT_EQUAL: f64 = 1.05;
/// The most fetches in a hundred that ask a second replica, besides a short burst. A guess.
const HEDGE_PERCENT: u64 = 5;
/// So many hedges may come one after another. A guess.
const HEDGE_BURST: u64 = 8;
/// The most replicas of a block that are asked at a time.
const MAX_ASKED_AT_ONCE: usize = 3;
/// A hundred hundredths of a hedge.
const WHOLE_HEDGE: u64 = 100;

/// How many hedges may still be made, in hundredths.
#[derive(Debug)]
pub(crate) struct HedgeBudget(Mutex<u64>);

impl Default for HedgeBudget {
    fn default() -> HedgeBudget {
        HedgeBudget(Mutex::new(HEDGE_BURST * WHOLE_HEDGE))
    }
}

impl HedgeBudget {
    /// A fetch begins; each earns a share of a hedge.
    fn earn(&self) {
        let mut left = self.0.lock().expect("no holder of this lock panics");
        *left = (*left + HEDGE_PERCENT).min(HEDGE_BURST * WHOLE_HEDGE);
    }

    /// Takes one hedge out, if there is one.
    fn spend(&self) -> bool {
        let mut left = self.0.lock().expect("no holder of this lock panics");
        let may = *left >= WHOLE_HEDGE;
        *left -= if may { WHOLE_HEDGE } else { 0 };
        may
    }
}

/// What a fetch has learned of the key's replicas while it walked.
#[derive(Debug, Default)]
pub(crate) struct Replicas {
    /// The root and its successors, as last named.
    named: Vec<Node>,
    /// No node has named them yet: they are from this node's own tables.
    are_guessed: bool,
    /// What replicas answered before the walk asked them.
    answers: BTreeMap<PeerId, Result<Step<Block>, CallError>>,
    /// Those questions, as the walk's trace has them.
    pub asked: Vec<Asked>,
    /// The replicas asked in a race.
    raced: BTreeSet<PeerId>,
    /// The node that sent the block, if not the one that the walk asked.
    pub served_by: Option<Node>,
}

impl Replicas {
    /// Guessed from this node's own tables, until a node names them.
    pub(super) fn guessed(nodes: Vec<Node>) -> Replicas {
        Replicas { named: nodes, are_guessed: true, ..Replicas::default() }
    }

    /// A node has named the root and its successors, or this node knows them.
    pub(super) fn set_nodes(&mut self, named: Vec<Node>) {
        (self.named, self.are_guessed) = (named, false);
    }

    /// The replicas from which the question to `root`, which is one of them, may be answered.
    fn set_of(&self, root: &Node, count: usize) -> Option<Vec<Node>> {
        let mut set = distinct_peers(&self.named, count);
        set.retain(|node| !self.raced.contains(&node.peer.id));
        let belongs = set.iter().any(|node| node.id == root.id);
        (belongs && set.len() > 1).then_some(set)
    }

    /// What `node` has said already; the walk counts the question from now on.
    fn take_answer(&mut self, node: &Node) -> Option<Result<Step<Block>, CallError>> {
        let answer = self.answers.remove(&node.peer.id)?;
        self.asked.retain(|asked| asked.node.peer.id != node.peer.id);
        Some(answer)
    }

    fn note(&mut self, node: Node, answer: Result<Step<Block>, CallError>) {
        let said = match &answer {
            // Of those that were only guessed, some may have nothing to do with the key.
            Ok(Step::Route(_)) if self.are_guessed => Said::Nowhere,
            Ok(_) => Said::Absent,
            Err(error) => Said::Failed(error.clone()),
        };
        self.asked.push(Asked { node, as_root: true, local: false, said });
        self.answers.insert(node.peer.id, answer);
    }
}

/// Answers the walk's question to a node it takes for the root or a replica: from the
/// nearest replica that has the block, or else with the node's own answer.
pub(crate) async fn ask_root(
    client: Arc<Client>,
    root: Node,
    key: Key,
    known: Arc<Mutex<Replicas>>,
) -> Result<Step<Block>, CallError> {
    let lock = || known.lock().expect("no holder of this lock panics");
    if let Some(answer) = lock().take_answer(&root) {
        return answer;
    }
    let set = lock().set_of(&root, client.config.replicas);
    let choosing = client.config.replica_choice == ReplicaChoice::Nearest && !client.is_me(&root);
    // A list of liars is not worth k questions: the root alone is asked, and the walk doubts.
    let sound = || {
        let known = lock();
        let follows = |named| may_follow(&*client.overlay, &key, named);
        client.config.routes <= 1 || known.are_guessed || follows(&known.named)
    };
    let Some(mut set) = set.filter(|_| choosing && sound()) else {
        return ask(client, root, key, true, false).await.map(Answer::into_step);
    };
    let (book, now) = (client.overlay.peer_book(), client.env.now());
    set.retain(|n| n.id == root.id || book.standing(&n.peer, now) != Standing::Silent);
    lock().raced.extend(set.iter().map(|node| node.peer.id));
    let mut race = Race::new(client, key, set);
    while let Some((node, answer)) = race.next().await {
        match answer {
            Ok(Step::Done(block)) => {
                race.finish();
                let mut known = lock();
                known.served_by = Some(node);
                return Ok(Step::Done(block));
            }
            other => lock().note(node, other),
        }
    }
    let answer = lock().take_answer(&root);
    answer.unwrap_or(Err(CallError::TimedOut))
}

type Call = BoxFuture<'static, (Node, Result<Step<Block>, CallError>)>;

/// A question that is not overdue.
#[derive(Clone, Copy)]
struct Watched {
    node: Node,
    start: Instant,
    /// Whether it has taken long enough to be hedged.
    is_slow: bool,
}

/// Questions to the replicas of one block, the nearest first.
struct Race {
    client: Arc<Client>,
    key: Key,
    /// Those not asked yet, the nearest last.
    waiting: Vec<Node>,
    calls: FuturesUnordered<Call>,
    watched: Vec<Watched>,
    may_hedge: bool,
    /// The replica asked because another was slow; the slow one, and since when.
    hedge: Option<(Node, Watched)>,
    /// Whether an answer became overdue.
    is_late: bool,
}

impl Race {
    fn new(client: Arc<Client>, key: Key, set: Vec<Node>) -> Race {
        let waiting = by_nearness(&client, set);
        let may_hedge = client.config.mechanisms.hedged_fetches;
        client.hedges.earn();
        let (calls, watched) = (FuturesUnordered::new(), Vec::new());
        Race { client, key, waiting, calls, watched, may_hedge, hedge: None, is_late: false }
    }

    fn start(&mut self) -> Option<Node> {
        if self.calls.len() >= MAX_ASKED_AT_ONCE {
            return None;
        }
        let node = self.waiting.pop()?;
        let (client, key) = (self.client.clone(), self.key);
        let start = client.env.now();
        let under_way = client.fetch_times.asked(node.peer.id);
        if client.config.mechanisms.hedged_fetches {
            self.watched.push(Watched { node, start, is_slow: false });
        }
        self.calls.push(Box::pin(async move {
            let answer = ask(client.clone(), node, key, true, false).await.map(Answer::into_step);
            if matches!(answer, Ok(Step::Done(_))) {
                let now = client.env.now();
                client.fetch_times.answered(&node.peer.id, now.since(start), now);
            }
            drop(under_way);
            (node, answer)
        }));
        Some(node)
    }

    /// The next answer; `None` when all have answered.
    async fn next(&mut self) -> Option<(Node, Result<Step<Block>, CallError>)> {
        loop {
            // With hedging, one question is always under way that is not overdue.
            let hedges = self.client.config.mechanisms.hedged_fetches;
            let all_late = hedges && self.watched.is_empty();
            if self.calls.is_empty() || all_late {
                self.start();
            }
            let due = self.watched.iter().map(|watched| self.due(watched)).min();
            let answer = match due {
                None => self.calls.next().await?,
                Some(due) => {
                    let pause = sleep(&*self.client.env, due.since(self.client.env.now()));
                    match select(self.calls.next(), pause).await {
                        Either::Left((answer, _)) => answer?,
                        Either::Right(_) => {
                            self.take_due();
                            continue;
                        }
                    }
                }
            };
            self.answered(&answer);
            return Some(answer);
        }
    }

    /// When a question has taken long, or too long.
    fn due(&self, watched: &Watched) -> Instant {
        let (id, times) = (&watched.node.peer.id, &self.client.fetch_times);
        let short = self.client.overlay.peer_book();
        if !self.client.config.mechanisms.block_times {
            let late = if watched.is_slow { short.late_after(id) } else { short.p95(id) };
            return watched.start + late;
        }
        watched.start
            + match watched.is_slow {
                false => times.slow_after(id, short, watched.start),
                true => times.late_after(id, short, watched.start),
            }
    }

    /// Some question has taken long, or too long.
    fn take_due(&mut self) {
        let now = self.client.env.now();
        let is_due = |watched: &Watched| self.due(watched) <= now;
        let Some(at) = self.watched.iter().position(is_due) else { return };
        if self.watched[at].is_slow {
            let late = self.watched.remove(at);
            self.client.overlay.peer_book().late(&late.node.peer, now);
            self.is_late = true;
            return;
        }
        self.watched[at].is_slow = true;
        if self.may_hedge && !self.waiting.is_empty() && self.client.hedges.spend() {
            self.may_hedge = false;
            add(&self.client.counters.hedges, 1);
            let first = self.watched[at];
            self.hedge = self.start().map(|second| (second, first));
        }
    }

    fn answered(&mut self, (node, answer): &(Node, Result<Step<Block>, CallError>)) {
        self.watched.retain(|watched| watched.node.id != node.id);
        let Some((second, first)) = self.hedge else { return };
        if second.id != node.id || !matches!(answer, Ok(Step::Done(_))) {
            return;
        }
        add(&self.client.counters.hedges_won, 1);
        // The first would have taken longer still. Others are nearer until it is heard of
        // again; but if it is overdue, that is known and is not to be forgotten.
        let (now, overlay_book) = (self.client.env.now(), self.client.overlay.peer_book());
        let (id, took) = (&first.node.peer.id, now.since(first.start));
        self.client.fetch_times.answered(id, took, now);
        if overlay_book.standing(&first.node.peer, now) == Standing::Answers {
            overlay_book.answered(id, took, now);
        }
    }

    /// The block is there: overdue answers are still heard, others are not waited for.
    fn finish(self) {
        if self.is_late {
            let env = self.client.env.clone();
            for call in self.calls {
                env.spawn(Box::pin(async move { drop(call.await) }));
            }
        }
    }
}

/// The replicas, the nearest last. Those that did not answer of late come first, and then
/// known liars: they are asked last.
pub(super) fn by_nearness(client: &Client, mut set: Vec<Node>) -> Vec<Node> {
    let (book, now) = (client.overlay.peer_book(), client.env.now());
    set.retain(|node| !client.is_me(node));
    // Each is looked up once: other reads change what is expected of it at any moment.
    let rated = set.into_iter().map(|node| {
        let peer = &node.peer;
        let worth = (book.standing(peer, now), book.is_avoided(&peer.id, now));
        (worth, expected(client, &peer.id), node)
    });
    let spread = client.config.mechanisms.equal_replicas;
    let choose = |equal: usize| if spread { random_below(&*client.env, equal as u64) } else { 0 };
    nearest_last(rated.collect(), |equal| choose(equal) as usize)
}

/// By worth, the least first, and within it by what is expected, the shortest last. Of those
/// about equal to the last, never none, `choose` says which is the last.
fn nearest_last<W: Ord, N>(
    mut rated: Vec<(W, Duration, N)>,
    choose: impl FnOnce(usize) -> usize,
) -> Vec<N> {
    rated.sort_by(|a, b| (&b.0, b.1).cmp(&(&a.0, a.1)));
    if let Some((worth, nearest, _)) = rated.last() {
        let far = |(other, expected, _): &(W, Duration, N)| {
            other != worth || expected.as_secs_f64() > nearest.as_secs_f64() * ABOUT_EQUAL
        };
        let equal_from = rated.iter().rposition(far).map_or(0, |farther| farther + 1);
        let (chosen, end) = (equal_from + choose(rated.len() - equal_from), rated.len() - 1);
        rated.swap(chosen, end);
    }
    rated.into_iter().map(|(_, _, node)| node).collect()
}

/// How long a block from `peer` will take, compared with one from another.
fn expected(client: &Client, peer: &PeerId) -> Duration {
    let expected = client.overlay.peer_book().expected(peer);
    match client.config.mechanisms.busy_replicas {
        true => client.fetch_times.expected(peer, expected),
        false => expected,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn the_nearest_of_the_best_is_last_and_chance_decides_among_equals() {
        let rated =
            || vec![(0, MS * 100, 'a'), (0, MS * 300, 'b'), (1, MS, 'c'), (0, MS * 98, 'd')];
        for chosen in 0..2 {
            let order = nearest_last(rated(), |equal| {
                assert_eq!(equal, 2, "100 and 98 ms are about equal");
                chosen
            });
            assert_eq!(order[..2], ['c', 'b']);
            assert_eq!(order[3], ['a', 'd'][chosen]);
        }
    }

    /// One whose figures changed while it was looked at was taken for farther than itself, and
    /// the choice was among none.
    #[test]
    fn the_last_is_always_equal_to_itself() {
        for expected in [Duration::ZERO, MS, Duration::MAX] {
            let order = nearest_last(vec![((), expected, 7)], |equal| {
                assert_eq!(equal, 1);
                0
            });
            assert_eq!(order, [7]);
        }
        assert!(nearest_last(Vec::<((), Duration, u8)>::new(), |_| unreachable!()).is_empty());
    }

    #[test]
    fn hedges_are_a_share_of_fetches_and_a_burst() {
        let budget = HedgeBudget::default();
        let hedges = (0..1000)
            .filter(|_| {
                budget.earn();
                budget.spend()
            })
            .count();
        assert!((50..=50 + HEDGE_BURST as usize).contains(&hedges), "{hedges} of 1,000");
        let never = HedgeBudget::default();
        assert_eq!((0..100).filter(|_| never.spend()).count(), HEDGE_BURST as usize);
    }
}
