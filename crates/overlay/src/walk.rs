//! The iterative lookup: one node asks its way around the ring, with backtracking.
//!
//! CFS Figure 3 (`find_predecessor`) and Figure 5 (`lookup`), generic over the question: `dht` asks
//! for blocks on the way, [`Overlay::find_root`] only for the way. [`walk`] drives a [`Search`],
//! which is plain state and returns the next action: ask a node, send a failure report, or end.
//! [`route`] is one route to the root, [`agreement`] the decision whether several routes agree,
//! [`memory`] their shared state.
//!
//! Departures from Figure 5:
//! - The path is a sorted set instead of a stack. The previous hop is alerted only when all nodes
//!   that it named are dead and so are the next best: its list usually holds a live node.
//! - A node asked *as the root* that knows a node nearer to the key says so (`NotRoot`). Figure 5
//!   calls that state an error; here a new node is found at once.
//! - When the root fails, the next node of the list is asked as the root, and is taken for it even
//!   if it still believes in its dead predecessor: it is the first live successor.
//! - A node that left an earlier call of this node unanswered is asked only when no other is left
//!   ([`Standing`](crate::peer_book::Standing)). Of many nodes that died at once each then costs
//!   one timeout, not one for each lookup that is led there. The walk goes on as if the node had
//!   failed, and its trace says where that may matter.
//! - In a *hedged* walk ([`WalkLimits::hedge`]) the next best node is asked as well when an answer
//!   is overdue. The first answer moves the walk, and the late answer still counts. A dead node
//!   then costs twice the time of its answers, not the time after which it is given up. At most one
//!   question is waited for that is not overdue, so a ring in which all nodes answer sees no more
//!   calls.
//! - The next hop may be chosen by latency ([`Selection::Cost`], CFS §4.3).
//! - A root that may be false is not believed at once ([`WalkLimits::routes`]; CFS §4.2 and §8
//!   leave this to future work). A peer that is caught lying is recorded in the [peer
//!   book](crate::peer_book) and asked last for a while.
//!
//! Invariants: no node is asked the same question twice (twice only after it has been told of dead
//! nodes it had named); at most [`WalkLimits::asks`] questions; the walk ends, whatever the nodes
//! answer.
//!
//! The walk knows neither the question nor any message. Node IDs cannot be made up: they are
//! derived from the peers' keys on receipt.

mod agreement;
mod memory;
mod route;
mod trace;

use std::time::Duration;

use atoll_env::{BoxFuture, Instant, Runtime, sleep, timeout};
use atoll_key::Key;
use atoll_net::{CallError, Peer};
use futures_util::StreamExt;
use futures_util::future::{Either, select};
use futures_util::stream::FuturesUnordered;

use crate::{Node, Overlay, Route};
use agreement::Search;
use memory::Memory;
use route::{End, Next, Question};

pub use route::selection::Selection;
pub use trace::{Asked, Said, Trace, WalkError};

/// Bounds of a walk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WalkLimits {
    /// The most questions asked. CFS lookups take ½·log2 N; the rest is for failures.
    pub asks: usize,
    /// How many of the root's successors are asked as well when the root says that it
    /// should have it and does not.
    pub replicas: usize,
    /// The longest the whole walk may take.
    pub deadline: Duration,
    /// How the next hop is chosen.
    pub selection: Selection,
    /// The most routes tried, each through other nodes, while the key is not found or the root is
    /// doubtful. One, as in the paper, trusts all nodes.
    pub routes: usize,
    /// With several routes, how many of them have to end at the same root before it is
    /// believed that a block that this root lacks does not exist.
    pub confirm: usize,
    /// Whether another node is asked as well when an answer is overdue
    /// ([`PeerBook::late_after`](crate::peer_book::PeerBook::late_after)).
    pub hedge: bool,
    /// Whether nodes that are only guessed to be the root are asked as such. One that has
    /// just lost its predecessor says that it is the root, although others live before it. A lookup
    /// finds that out; a node that looks for its own position would skip those nodes.
    pub guess: bool,
    /// Whether roots and lists too sparse for the ring's density are doubted.
    pub density: bool,
    /// Whether the previous hop is told of dead nodes that it named (CFS Figure 5, `alert`).
    pub failure_reports: bool,
}

/// The most questions and failure reports of a hedged walk that are waited for at a time. A guess:
/// of dead nodes, more are hardly ever met within the time one is waited for.
const MAX_WAITED_FOR: usize = 4;

impl Default for WalkLimits {
    fn default() -> WalkLimits {
        WalkLimits {
            asks: 64,
            replicas: 3,
            deadline: Duration::from_secs(30),
            selection: Selection::NearestKey,
            routes: 1,
            confirm: 1,
            hedge: false,
            guess: true,
            density: true,
            failure_reports: true,
        }
    }
}

/// A node's answer to one question of a walk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step<T> {
    /// Here it is.
    Done(T),
    /// The node is the key's root, should have it, and does not; its successors.
    Absent(Vec<Node>),
    /// The node does not have it; where to ask next.
    Route(Route),
}

/// The outcome of one question.
pub type Answer<T> = Result<Step<T>, CallError>;

/// How a walk succeeded.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found<T> {
    /// The last node's answer.
    pub value: T,
    /// The node that answered.
    pub at: Node,
    /// The questions and answers, in order.
    pub trace: Trace,
}

/// Walks from this node towards `key` until `step` is done.
///
/// `step(node, as_root)` asks one node one question, within its own time limit. It is
/// called with this node itself when this node is the key's root, and should then answer
/// without the network. A root that does not have the block may answer
/// `Step::Absent` or `Step::Route(Route::Root([itself, …]))`: both mean the same. A
/// question that is overdue when the walk ends is heard to its end in the background.
///
/// Cancel-safe: dropping the future ends all questions.
///
/// # Errors
/// See [`WalkError`]; it names the nodes asked and their answers.
pub async fn walk<T: Send + 'static>(
    env: &dyn Runtime,
    overlay: &dyn Overlay,
    key: &Key,
    limits: WalkLimits,
    step: impl Fn(Node, bool) -> BoxFuture<'static, Answer<T>>,
) -> Result<Found<T>, WalkError> {
    walk_from(Start::OwnTables, env, overlay, key, limits, step).await
}

/// Whether `list` may be the nodes that follow `key`: on a ring as dense as this node's
/// surroundings. One that is not may be of liars alone.
pub fn may_follow(overlay: &dyn Overlay, key: &Key, list: &[Node]) -> bool {
    Memory::new(*key, overlay, WalkLimits::default()).may_follow(list)
}

/// Where a walk begins.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Start<'a> {
    /// In this node's own tables.
    OwnTables,
    /// At nodes that need not be on this node's ring. The walk never asks or finds this node: how a
    /// node joins, and how rings that lost sight of each other meet.
    Elsewhere(&'a [Node]),
    /// At a root known from before, which is asked first, as the root.
    LikelyRoot(Node),
}

/// As [`walk`], from any start.
pub(crate) async fn walk_from<T: Send + 'static>(
    start: Start<'_>,
    env: &dyn Runtime,
    overlay: &dyn Overlay,
    key: &Key,
    limits: WalkLimits,
    step: impl Fn(Node, bool) -> BoxFuture<'static, Answer<T>>,
) -> Result<Found<T>, WalkError> {
    let mut search = Search::new(*key, overlay, limits).at(env.now());
    match start {
        Start::OwnTables => {
            let route = overlay.route(key, false);
            if route == Route::Nowhere {
                return Err(WalkError::NotJoined);
            }
            search.start_here(&route);
            if matches!(route, Route::Closer(_)) {
                search.guess_roots(&overlay.likely_roots(key));
            }
        }
        Start::Elsewhere(nodes) => search.start_elsewhere(nodes),
        Start::LikelyRoot(node) => search.start_at_root(node),
    }
    let calls = FuturesUnordered::new();
    let mut walker = Walker { env, overlay, search, limits, step, calls, in_time: None };
    let end = timeout(env, limits.deadline, walker.go()).await.unwrap_or(Err(End::GaveUp));
    let Walker { mut search, calls, .. } = walker;
    finish(env, calls);
    search.set_time(env.now());
    let found = end.as_ref().ok().map(|(_, at, as_root)| (*at, *as_root));
    for (peer, misdeed) in search.misdeeds(found) {
        overlay.peer_book().lied(&peer, misdeed, env.now());
    }
    match end {
        Ok((value, at, _)) => Ok(Found { value, at, trace: search.into_trace() }),
        Err(end) => Err(search.into_error(end)),
    }
}

/// Awaits overdue answers although the walk is over: the peer book records whether they come, and
/// when.
fn finish<T: Send + 'static>(env: &dyn Runtime, calls: Calls<T>) {
    for call in calls {
        env.spawn(Box::pin(async move { drop(call.await) }));
    }
}

type Calls<T> = FuturesUnordered<BoxFuture<'static, Event<T>>>;

/// An event that a walk waits for.
enum Event<T> {
    Answered(Question, Instant, Answer<T>),
    /// Whether a node that was told of failures can be asked again.
    Reported(Node, bool),
}

/// A walk under way.
struct Walker<'w, T, S> {
    env: &'w dyn Runtime,
    overlay: &'w dyn Overlay,
    search: Search<'w>,
    limits: WalkLimits,
    step: S,
    calls: Calls<T>,
    /// The question whose answer is not overdue, and when it will be, if that matters.
    in_time: Option<(Question, Option<Instant>)>,
}

impl<T, S> Walker<'_, T, S>
where
    T: Send + 'static,
    S: Fn(Node, bool) -> BoxFuture<'static, Answer<T>>,
{
    /// Asks until the search ends; returns the value, the node that had it, and whether that node
    /// was asked as the root.
    async fn go(&mut self) -> Result<(T, Node, bool), End> {
        loop {
            self.search.set_time(self.env.now());
            match self.due_question() {
                Some(Next::Ask(question)) => self.ask(question),
                Some(Next::ReportFailures(node, failed)) => self.report_failures(node, failed),
                Some(Next::End(end)) => return Err(end),
                None => {
                    if let Some(event) = self.wait().await
                        && let Some(found) = self.happened(event)
                    {
                        return Ok(found);
                    }
                }
            }
        }
    }

    /// The next question, if it is time for one.
    fn due_question(&mut self) -> Option<Next> {
        if self.calls.is_empty() {
            return Some(self.search.next());
        }
        let may = self.limits.hedge && self.in_time.is_none() && self.calls.len() < MAX_WAITED_FOR;
        if may { self.search.another() } else { None }
    }

    fn ask(&mut self, question: Question) {
        let start = self.env.now();
        let late_after = self.overlay.peer_book().late_after(&question.node.peer.id);
        self.in_time = Some((question, question.hedged.then(|| start + late_after)));
        let answer = (self.step)(question.node, question.as_root);
        self.calls.push(Box::pin(async move { Event::Answered(question, start, answer.await) }));
    }

    fn report_failures(&mut self, node: Node, failed: Vec<Peer>) {
        let answer = self.overlay.send_failure_report(&node.peer, failed);
        self.calls.push(Box::pin(async move { Event::Reported(node, answer.await) }));
    }

    /// The next event; none when an answer is overdue.
    async fn wait(&mut self) -> Option<Event<T>> {
        let Some((question, Some(late_at))) = self.in_time else {
            return self.calls.next().await;
        };
        let pause = sleep(self.env, late_at.since(self.env.now()));
        match select(self.calls.next(), pause).await {
            Either::Left((event, _)) => event,
            Either::Right(_) => {
                self.overlay.peer_book().late(&question.node.peer, self.env.now());
                self.in_time = None;
                None
            }
        }
    }

    fn happened(&mut self, event: Event<T>) -> Option<(T, Node, bool)> {
        let now = self.env.now();
        self.search.set_time(now);
        let (question, start, answer) = match event {
            Event::Answered(question, start, answer) => (question, start, answer),
            Event::Reported(node, can_be_asked_again) => {
                if can_be_asked_again {
                    self.search.allow_asking_again(node);
                }
                return None;
            }
        };
        if self.in_time.is_some_and(|(waited_for, _)| waited_for == question) {
            self.in_time = None;
        }
        let Question { node, as_root, .. } = question;
        match &answer {
            Err(error) if error.is_failure_of_peer() => {
                self.overlay.record_no_answer(&node.peer, start);
            }
            Ok(_) if self.search.is_on_own_ring() => self.overlay.record_answer(&node),
            _ => {}
        }
        let value = self.search.answered(node, as_root, answer)?;
        Some((value, node, as_root))
    }
}
