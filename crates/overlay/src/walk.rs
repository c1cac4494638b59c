//! The iterative lookup: one node asks its way around the ring, with backtracking.
//!
//! CFS Figure 3 (`find_predecessor`) and Figure 5 (`lookup`), generic over what is asked:
//! `dht` asks for blocks on the way, [`Overlay::find_root`] only for the way. The walker
//! keeps every node it was ever told of and always asks the best one it has not asked:
//! first those said to be the key's root, nearest after the key first, then those before
//! the key, nearest first. A dead or useless node therefore costs one question, and
//! backtracking is simply taking the next best.
//!
//! Departures from Figure 5:
//! - The path is a sorted set instead of a stack. The previous hop is alerted only when
//!   all it named are dead and so are the next best: its list usually holds a live node.
//! - A node asked *as the root* that knows a node nearer to the key says so (`Back`).
//!   Figure 5 calls that state an error; here a newcomer is found at once.
//! - When the root fails, the next node of the list is asked as the root, and is taken
//!   for it even if it still believes in its dead predecessor: it is the first live
//!   successor.
//!
//! - The next hop may be chosen by latency ([`Selection::Cost`], CFS §4.3).
//! - A root that may be false is not believed at once ([`WalkLimits::routes`]; CFS §4.2
//!   and §8 leave this to future work; [`plan`] explains). Who is caught lying gets a
//!   page in the [peer book](crate::peer_book) and is asked last for a while.
//!
//! Invariants: no node is asked the same question twice (twice only after it has been
//! warned of dead nodes it had named); at most [`WalkLimits::asks`] questions; the walk
//! ends, whatever the nodes answer. Who is found is never decided by what is said of
//! latencies, only who is asked first.
//!
//! It does not know what is asked, nor any message. Node IDs cannot be made up: they are
//! derived from the peers' keys on receipt.

mod density;
mod plan;
mod selection;
mod trace;

use std::time::Duration;

use atoll_env::{BoxFuture, Runtime, timeout};
use atoll_key::Key;
use atoll_net::CallError;

use crate::{Node, Overlay, Route};
use plan::{End, Next, Plan};
use selection::check_report;

pub use selection::Selection;
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
    /// The most routes tried, each through other nodes, while what was looked for is not
    /// found or the root is doubtful. One is what the paper does, and trusts everybody.
    pub routes: usize,
    /// With several routes, how many of them have to end at the same root before it is
    /// believed that what that root does not have does not exist.
    pub confirm: usize,
}

impl Default for WalkLimits {
    fn default() -> WalkLimits {
        WalkLimits {
            asks: 64,
            replicas: 3,
            deadline: Duration::from_secs(30),
            selection: Selection::NearestKey,
            routes: 1,
            confirm: 1,
        }
    }
}

/// What a node answered to one question of a walk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step<T> {
    /// Here it is.
    Done(T),
    /// The node is the key's root, should have it, and does not; its successors.
    Absent(Vec<Node>),
    /// The node does not have it; where to ask next.
    Route(Route),
}

/// How a walk succeeded.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found<T> {
    /// What the last node answered.
    pub value: T,
    /// Who that was.
    pub at: Node,
    /// All that was asked, in order.
    pub trace: Trace,
}

/// Walks from this node towards `key` until `step` is done.
///
/// `step(node, as_root)` asks one node one question, within its own time limit. It is
/// called with this node itself when this node is the key's root, and should then answer
/// without the network. A root that does not have what is wanted may answer
/// `Step::Absent` or `Step::Route(Route::Root([itself, …]))`: both mean the same.
///
/// Cancel-safe: dropping the future asks nobody anything more.
///
/// # Errors
/// See [`WalkError`]; it says who was asked and what each said.
pub async fn walk<'a, T>(
    env: &dyn Runtime,
    overlay: &dyn Overlay,
    key: &Key,
    limits: WalkLimits,
    step: impl Fn(Node, bool) -> BoxFuture<'a, Result<Step<T>, CallError>>,
) -> Result<Found<T>, WalkError> {
    let route = overlay.route(key, false);
    if route == Route::Nowhere {
        return Err(WalkError::NotJoined);
    }
    let mut plan = Plan::new(*key, overlay, limits);
    plan.start_here(&route);
    if matches!(route, Route::Closer(_)) {
        plan.guess_roots(&overlay.likely_roots(key));
    }
    run(env, overlay, plan, limits, step).await
}

/// Whether `list` may be the nodes that follow `key`: on a ring as dense as this node's
/// surroundings. One that is not may be of liars alone.
pub fn may_follow(overlay: &dyn Overlay, key: &Key, list: &[Node]) -> bool {
    Plan::new(*key, overlay, WalkLimits::default()).may_follow(list)
}

/// As [`walk`], but starting at nodes that need not be on this node's ring, and never
/// asking or finding this node: how a node joins, and how rings that lost sight of each
/// other meet.
pub(crate) async fn walk_from<'a, T>(
    env: &dyn Runtime,
    overlay: &dyn Overlay,
    start: &[Node],
    key: &Key,
    limits: WalkLimits,
    step: impl Fn(Node, bool) -> BoxFuture<'a, Result<Step<T>, CallError>>,
) -> Result<Found<T>, WalkError> {
    let mut plan = Plan::new(*key, overlay, limits);
    plan.start_elsewhere(start);
    run(env, overlay, plan, limits, step).await
}

/// Verifies a root known from before: asks `likely` first, as the root.
pub(crate) async fn walk_to_likely<'a, T>(
    env: &dyn Runtime,
    overlay: &dyn Overlay,
    likely: Node,
    key: &Key,
    limits: WalkLimits,
    step: impl Fn(Node, bool) -> BoxFuture<'a, Result<Step<T>, CallError>>,
) -> Result<Found<T>, WalkError> {
    let mut plan = Plan::new(*key, overlay, limits);
    plan.start_at_root(likely);
    run(env, overlay, plan, limits, step).await
}

async fn run<'a, T>(
    env: &dyn Runtime,
    overlay: &dyn Overlay,
    mut plan: Plan,
    limits: WalkLimits,
    step: impl Fn(Node, bool) -> BoxFuture<'a, Result<Step<T>, CallError>>,
) -> Result<Found<T>, WalkError> {
    let steps = async {
        loop {
            match plan.next(overlay, env.now()) {
                Next::Ask(node, as_root, report) => {
                    let start = env.now();
                    let answer = step(node, as_root).await;
                    match (&answer, report) {
                        (Err(error), _) if error.is_failure_of_peer() => {
                            overlay.alert(&node.peer);
                        }
                        (_, Some(report)) => {
                            let now = env.now();
                            check_report(overlay.peer_book(), report, now.since(start), now);
                        }
                        _ => {}
                    }
                    if let Some(value) = plan.answered(node, as_root, answer) {
                        return Ok((value, node, as_root));
                    }
                }
                Next::Warn(node, failed) => {
                    if overlay.warn(&node.peer, failed).await {
                        plan.may_ask_again(node);
                    }
                }
                Next::End(error) => return Err(error),
            }
        }
    };
    let end = timeout(env, limits.deadline, steps).await.unwrap_or(Err(End::GaveUp));
    let found = end.as_ref().ok().map(|(_, at, as_root)| (*at, *as_root));
    for (peer, misdeed) in plan.misdeeds(found) {
        overlay.peer_book().lied(&peer, misdeed, env.now());
    }
    match end {
        Ok((value, at, _)) => Ok(Found { value, at, trace: plan.into_trace() }),
        Err(end) => Err(plan.into_error(end)),
    }
}
