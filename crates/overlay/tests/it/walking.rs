//! The walk against nodes that fail, lie and go around in circles.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_env::BoxFuture;
use atoll_env::Instant;
use atoll_key::{Key, PeerId};
use atoll_net::{CallError, Peer, Refusal};
use atoll_overlay::peer_book::{Misdeed, PeerBook};
use atoll_overlay::walk::{Found, Said, Selection, Step, WalkError, WalkLimits, walk};
use atoll_overlay::{Neighbourhood, Node, Overlay, Route};
use atoll_sim::Sim;

use super::cluster::lan;

pub(crate) type Answer = Result<Step<&'static str>, CallError>;

/// A ring of scripted nodes: the answer of each when asked on the way and as the root.
pub(crate) struct Script {
    pub nodes: Vec<Node>,
    own: Route,
    answers: BTreeMap<(usize, bool), Answer>,
    asked: Mutex<Vec<(usize, bool)>>,
    alerts: Mutex<Vec<usize>>,
    pub peer_book: PeerBook,
    /// The nodes that take longer than the usual 10 ms to answer.
    slow: BTreeMap<usize, Duration>,
    /// The nodes guessed to be the root.
    guesses: Vec<usize>,
    /// How many questions are waited for, and how many were at most.
    waited_for: Mutex<(usize, usize)>,
    warnings: Mutex<Vec<(usize, Vec<usize>)>>,
    /// Answers that hold once a node has been warned.
    after_warning: BTreeMap<usize, Answer>,
    /// The nodes in this node's tables.
    known: Vec<usize>,
}

impl Script {
    pub(crate) fn new(own: impl FnOnce(&[Node]) -> Route) -> Script {
        let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
        let mut nodes: Vec<Node> =
            (0..20).map(|n| Node::of(Peer { id: PeerId([n; 32]), addr })).collect();
        nodes.sort_unstable_by_key(|n| n.id);
        let own = own(&nodes);
        Script {
            nodes,
            own,
            answers: BTreeMap::new(),
            asked: Mutex::default(),
            alerts: Mutex::default(),
            peer_book: PeerBook::default(),
            slow: BTreeMap::new(),
            guesses: Vec::new(),
            waited_for: Mutex::default(),
            warnings: Mutex::default(),
            after_warning: BTreeMap::new(),
            known: Vec::new(),
        }
    }

    fn knowing(mut self, known: &[usize]) -> Script {
        self.known = known.to_vec();
        self
    }

    pub(crate) fn taking(mut self, node: usize, time: Duration) -> Script {
        self.slow.insert(node, time);
        self
    }

    pub(crate) fn guessing(mut self, guesses: &[usize]) -> Script {
        self.guesses = guesses.to_vec();
        self
    }

    /// The most questions that were waited for at a time.
    pub(crate) fn most_waited_for(&self) -> usize {
        self.waited_for.lock().unwrap().1
    }

    pub(crate) fn on(
        mut self,
        node: usize,
        as_root: bool,
        answer: impl FnOnce(&[Node]) -> Answer,
    ) -> Script {
        let answer = answer(&self.nodes);
        self.answers.insert((node, as_root), answer);
        self
    }

    fn after_warning(mut self, node: usize, answer: impl FnOnce(&[Node]) -> Answer) -> Script {
        let answer = answer(&self.nodes);
        self.after_warning.insert(node, answer);
        self
    }

    fn begin(&self) {
        let mut waited_for = self.waited_for.lock().unwrap();
        waited_for.0 += 1;
        waited_for.1 = waited_for.1.max(waited_for.0);
    }

    fn index(&self, peer: &Peer) -> usize {
        self.nodes.iter().position(|n| n.peer == *peer).unwrap_or(usize::MAX)
    }

    fn warned(&self, node: usize) -> bool {
        self.warnings.lock().unwrap().iter().any(|(n, _)| *n == node)
    }

    fn answer(&self, node: &Node, as_root: bool) -> Answer {
        let at = self.index(&node.peer);
        self.asked.lock().unwrap().push((at, as_root));
        if !as_root && self.warned(at) {
            return self.after_warning[&at].clone();
        }
        self.answers.get(&(at, as_root)).cloned().unwrap_or(Err(CallError::TimedOut))
    }
}

impl Overlay for Script {
    fn neighbourhoods(&self) -> Vec<Neighbourhood> {
        vec![Neighbourhood {
            epoch: 0,
            me: self.nodes[0],
            predecessor: None,
            successors: self.nodes[1..17].to_vec(),
            joined: true,
        }]
    }

    fn epoch(&self) -> u64 {
        0
    }

    fn peer_book(&self) -> &PeerBook {
        &self.peer_book
    }

    fn route(&self, _: &Key, _: bool) -> Route {
        self.own.clone()
    }

    fn known_nodes(&self) -> Vec<Node> {
        self.known.iter().map(|n| self.nodes[*n]).collect()
    }

    fn likely_roots(&self, _: &Key) -> Vec<Node> {
        self.guesses.iter().map(|n| self.nodes[*n]).collect()
    }

    fn report_failure(&self, failed: &Peer) {
        self.alerts.lock().unwrap().push(self.index(failed));
    }

    fn send_failure_report(&self, at: &Peer, failed: Vec<Peer>) -> BoxFuture<'static, bool> {
        let failed = failed.iter().map(|peer| self.index(peer)).collect();
        let at = self.index(at);
        self.warnings.lock().unwrap().push((at, failed));
        Box::pin(std::future::ready(self.after_warning.contains_key(&at)))
    }

    fn find_root(&self, _: &Key) -> BoxFuture<'static, Result<Vec<Node>, WalkError>> {
        unreachable!("the walk is tested itself")
    }

    fn changed(&self, _: u64) -> BoxFuture<'static, u64> {
        Box::pin(std::future::pending())
    }

    fn estimated_nodes(&self) -> f64 {
        20.0
    }
}

/// Walks from node 0 towards the key just before node 10.
pub(crate) fn run(
    script: &Arc<Script>,
    limits: WalkLimits,
) -> Result<Found<&'static str>, WalkError> {
    run_timed(script, limits).0
}

/// As [`run`], and how long it took.
pub(crate) fn run_timed(
    script: &Arc<Script>,
    limits: WalkLimits,
) -> (Result<Found<&'static str>, WalkError>, Duration) {
    let sim = Sim::new(lan(1));
    let env = sim.outside();
    let key = script.nodes[10].id.key().previous();
    let step = |node: Node, as_root| -> BoxFuture<'static, Answer> {
        let answer = script.answer(&node, as_root);
        let usual = Duration::from_millis(10);
        let time = script.slow.get(&script.index(&node.peer)).copied().unwrap_or(usual);
        let (wait, script) = (atoll_env::sleep(&*env, time), script.clone());
        Box::pin(async move {
            script.begin();
            wait.await;
            script.waited_for.lock().unwrap().0 -= 1;
            answer
        })
    };
    let start = sim.now();
    let walk = walk(&*env, &**script, &key, limits, step);
    let result = sim.block_on(Duration::from_secs(3600), walk).expect("a walk ends");
    (result, sim.now().since(start))
}

pub(crate) fn closer(nodes: &[Node], at: &[usize]) -> Answer {
    Ok(Step::Route(Route::closer(at.iter().map(|n| nodes[*n]))))
}

pub(crate) fn root(nodes: &[Node], at: &[usize]) -> Answer {
    Ok(Step::Route(Route::Root(at.iter().map(|n| nodes[*n]).collect())))
}

pub(crate) fn back(nodes: &[Node], to: usize) -> Answer {
    Ok(Step::Route(Route::NotRoot(nodes[to])))
}

pub(crate) fn asked(script: &Script) -> Vec<(usize, bool)> {
    script.asked.lock().unwrap().clone()
}

pub(crate) fn done(_: &[Node]) -> Answer {
    Ok(Step::Done("here"))
}

pub(crate) fn start_at(at: &'static [usize]) -> impl FnOnce(&[Node]) -> Route {
    move |nodes| Route::closer(at.iter().map(|n| nodes[*n]))
}

/// A node that knows the surroundings of the key saves the question to the node before it.
#[test]
fn a_root_guessed_by_a_node_on_the_way_is_asked_at_once() {
    let script =
        Script::new(start_at(&[5])).on(5, false, |n| closer(n, &[8, 10])).on(10, true, done);
    let script = Arc::new(script);
    run(&script, WalkLimits::default()).unwrap();
    assert_eq!(asked(&script), [(5, false), (10, true)]);
}

#[test]
fn bad_guesses_of_a_node_on_the_way_cost_three_questions_and_do_not_change_the_root() {
    let mut script = Script::new(start_at(&[5])).on(5, false, |n| closer(n, &[8, 14]));
    for at in 11..15 {
        script = script.on(at, true, move |n| back(n, at - 1));
    }
    script = script.on(8, false, |n| root(n, &[10, 11])).on(10, true, done);
    let script = Arc::new(script);
    run(&script, WalkLimits::default()).unwrap();
    let three = [(14, true), (13, true), (12, true)];
    assert_eq!(asked(&script), [&[(5, false)][..], &three, &[(8, false), (10, true)]].concat());
}

#[test]
fn a_guess_far_from_the_key_is_dropped() {
    let script = Script::new(start_at(&[5]))
        .on(5, false, |n| closer(n, &[8, 2, 3]))
        .on(8, false, |n| root(n, &[10]))
        .on(10, true, done);
    let script = Arc::new(script);
    run(&script, WalkLimits::default()).unwrap();
    assert_eq!(asked(&script), [(5, false), (8, false), (10, true)]);
}

#[test]
fn a_walk_goes_by_nearer_nodes_to_the_root() {
    let script = Script::new(start_at(&[5, 3]))
        .on(5, false, |n| closer(n, &[8, 7]))
        .on(8, false, |n| root(n, &[10, 11]))
        .on(10, true, done);
    let script = Arc::new(script);
    let found = run(&script, WalkLimits::default()).unwrap();
    assert_eq!((found.value, found.at), ("here", script.nodes[10]));
    assert_eq!(asked(&script), [(5, false), (8, false), (10, true)]);
    assert_eq!((found.trace.calls(), found.trace.failures()), (3, 0));
}

#[test]
fn this_node_is_asked_too_when_it_is_the_root_and_that_is_no_call() {
    let script = Script::new(|n| Route::Root(vec![n[0], n[1]])).on(0, true, done);
    let found = run(&Arc::new(script), WalkLimits::default()).unwrap();
    assert_eq!(found.trace.calls(), 0);
}

#[test]
fn a_failed_node_is_reported_and_the_next_best_asked() {
    let script = Script::new(start_at(&[8, 5]))
        .on(5, false, |n| closer(n, &[9, 8, 7]))
        .on(7, false, |n| root(n, &[10, 11]))
        .on(10, true, done);
    let script = Arc::new(script);
    let found = run(&script, WalkLimits::default()).unwrap();
    // 8 and 9 do not answer; 8 is not asked again though 5 names it.
    assert_eq!(asked(&script), [(8, false), (5, false), (9, false), (7, false), (10, true)]);
    assert_eq!(*script.alerts.lock().unwrap(), [8, 9]);
    assert_eq!((found.trace.calls(), found.trace.failures()), (3, 2));
}

#[test]
fn a_node_that_refuses_is_not_reported_as_failed() {
    let refused = || Err(Refusal::new(Refusal::OVERLOADED, "busy").into());
    let script = Script::new(start_at(&[8, 5]))
        .on(8, false, |_| refused())
        .on(5, false, |n| root(n, &[10]))
        .on(10, true, done);
    let script = Arc::new(script);
    assert!(run(&script, WalkLimits::default()).is_ok());
    assert!(script.alerts.lock().unwrap().is_empty());
}

#[test]
fn the_first_live_successor_stands_in_for_a_failed_root() {
    // 11 still believes in its predecessor 10.
    let script =
        Script::new(start_at(&[8]))
            .on(8, false, |n| root(n, &[10, 11, 12]))
            .on(11, true, |n| back(n, 10));
    let script = Arc::new(script);
    let error = run(&script, WalkLimits { replicas: 0, ..WalkLimits::default() }).unwrap_err();
    let WalkError::Absent { roots, .. } = error else { panic!("{error}") };
    assert_eq!(roots, script.nodes[11..13]);
}

#[test]
fn replicas_are_asked_when_the_root_does_not_have_it() {
    let script = Script::new(start_at(&[8]))
        .on(8, false, |n| root(n, &[10, 11, 12]))
        .on(10, true, |n| Ok(Step::Absent(vec![n[11], n[12], n[13]])))
        .on(11, true, |n| back(n, 10))
        .on(12, true, done);
    let script = Arc::new(script);
    assert_eq!(run(&script, WalkLimits::default()).unwrap().at, script.nodes[12]);
}

#[test]
fn an_absent_block_is_reported_with_all_nodes_that_lack_it() {
    let mut script = Script::new(start_at(&[8])).on(8, false, |n| root(n, &[10, 11, 12, 13, 14]));
    for at in 10..15 {
        script = script.on(at, true, move |n| root(n, &[at, at + 1]));
    }
    let script = Arc::new(script);
    let error = run(&script, WalkLimits { replicas: 2, ..WalkLimits::default() }).unwrap_err();
    assert_eq!(asked(&script), [(8, false), (10, true), (11, true), (12, true)]);
    assert!(matches!(&error, WalkError::Absent { roots, .. } if roots[0] == script.nodes[10]));
    assert!(error.to_string().contains("should have it and does not"), "{error}");
}

#[test]
fn newcomers_before_a_supposed_root_are_found_backwards() {
    let script = Script::new(start_at(&[8]))
        .on(8, false, |n| root(n, &[14, 15]))
        .on(14, true, |n| back(n, 12))
        .on(12, true, |n| back(n, 11))
        .on(11, true, |n| back(n, 10))
        .on(10, true, done);
    assert_eq!(run(&Arc::new(script), WalkLimits::default()).unwrap().trace.calls(), 5);
}

#[test]
fn no_node_beyond_a_live_node_is_taken_for_the_root() {
    // 10 is dead, 12 lives and has a predecessor 11 that lives and points to dead 10.
    let script = Script::new(start_at(&[8]))
        .on(8, false, |n| root(n, &[10, 12, 13]))
        .on(12, true, |n| back(n, 11))
        .on(11, true, |n| back(n, 10))
        .on(13, true, |n| back(n, 12));
    let script = Arc::new(script);
    let error = run(&script, WalkLimits { replicas: 0, ..WalkLimits::default() }).unwrap_err();
    assert!(matches!(error, WalkError::Absent { roots, .. } if roots[0] == script.nodes[11]));
    assert!(!asked(&script).contains(&(13, true)));
}

#[test]
fn a_guide_whose_whole_answer_is_dead_is_warned_and_asked_again() {
    let script = Script::new(start_at(&[5]))
        .on(5, false, |n| closer(n, &[9, 8, 7]))
        .after_warning(5, |n| root(n, &[10]))
        .on(10, true, done);
    let script = Arc::new(script);
    assert!(run(&script, WalkLimits::default()).is_ok());
    assert_eq!(*script.warnings.lock().unwrap(), [(5, vec![9, 8, 7])]);
}

#[test]
fn circles_and_steps_backwards_end() {
    let script = Script::new(start_at(&[5, 3]))
        .on(5, false, |n| closer(n, &[3, 5, 0, 4, 12]))
        .on(3, false, |n| closer(n, &[5, 2]))
        .on(12, false, |n| closer(n, &[5]));
    let script = Arc::new(script);
    let error = run(&script, WalkLimits::default()).unwrap_err();
    // 3 → 5 leads nowhere new: 5 was asked, and the nodes it named lie behind it.
    assert_eq!(asked(&script), [(5, false), (3, false)]);
    assert!(matches!(error, WalkError::NoWay { .. }));
}

#[test]
fn two_nodes_that_each_name_the_other_as_predecessor_end_the_walk() {
    let script = Script::new(start_at(&[8]))
        .on(8, false, |n| root(n, &[12, 11]))
        .on(11, true, |n| back(n, 12))
        .on(12, true, |n| back(n, 11));
    let script = Arc::new(script);
    assert!(run(&script, WalkLimits::default()).is_err());
    assert!(asked(&script).len() <= 3, "{:?}", asked(&script));
}

#[test]
fn a_later_answer_does_not_lead_beyond_a_live_node_that_is_not_the_root() {
    // 11 talks nonsense, so the root is not found; that does not make it 13.
    let script = Script::new(start_at(&[8, 5]))
        .on(8, false, |n| root(n, &[12]))
        .on(12, true, |n| back(n, 11))
        .on(11, true, |n| back(n, 12))
        .on(5, false, |n| root(n, &[13, 14]))
        .on(13, true, done);
    let script = Arc::new(script);
    assert!(matches!(run(&script, WalkLimits::default()), Err(WalkError::NoWay { .. })));
    assert!(asked(&script).contains(&(5, false)) && !asked(&script).contains(&(13, true)));
}

#[test]
fn a_crowd_of_liars_is_asked_no_more_than_the_limit() {
    let mut script = Script::new(start_at(&[1]));
    for at in 1..10 {
        script = script.on(at, false, move |n| closer(n, &(at..10).collect::<Vec<_>>()));
    }
    let limits = WalkLimits { asks: 4, ..WalkLimits::default() };
    let script = Arc::new(script);
    let error = run(&script, limits).unwrap_err();
    assert!(matches!(error, WalkError::GaveUp { .. } | WalkError::NoWay { .. }), "{error}");
    assert!(asked(&script).len() <= 4);
}

#[test]
fn the_deadline_ends_a_walk_and_says_how_far_it_came() {
    let script = Script::new(start_at(&[5]))
        .on(5, false, |n| closer(n, &[8]))
        .on(8, false, |n| root(n, &[10]))
        .on(10, true, done);
    let limits = WalkLimits { deadline: Duration::from_millis(15), ..WalkLimits::default() };
    let error = run(&Arc::new(script), limits).unwrap_err();
    let WalkError::GaveUp { trace, .. } = &error else { panic!("{error}") };
    assert_eq!(trace.0.len(), 1);
    assert_eq!(trace.0[0].said, Said::Closer(1));
}

#[test]
fn an_error_names_all_nodes_asked_and_their_answers() {
    let script = Script::new(start_at(&[5]))
        .on(5, false, |_| Err(Refusal::new(Refusal::OVERLOADED, "too much at once").into()));
    let script = Arc::new(script);
    let text = run(&script, WalkLimits::default()).unwrap_err().to_string();
    assert!(text.contains(&format!("{:?}", script.nodes[5])), "{text}");
    assert!(text.contains("too much at once"), "{text}");
}

// --- several routes (CFS §8) ------------------------------------------------------------

/// As a careful lookup walks.
fn careful() -> WalkLimits {
    WalkLimits { replicas: 2, routes: 3, confirm: 2, ..WalkLimits::default() }
}

/// All from `first` on, around the ring, as a root and its successors.
fn list(nodes: &[Node], first: usize) -> Vec<Node> {
    (first..first + 10).map(|n| nodes[n % 20]).filter(|n| n.id != nodes[0].id).collect()
}

fn named_from(first: usize) -> impl FnOnce(&[Node]) -> Answer {
    move |nodes| Ok(Step::Route(Route::Root(list(nodes, first))))
}

fn denies(_: &[Node]) -> Answer {
    Ok(Step::Absent(Vec::new()))
}

fn trust(script: &Script, node: usize) -> f64 {
    script.peer_book.trust(&script.nodes[node].peer.id, Instant::default())
}

#[test]
fn absence_is_believed_when_two_disjoint_routes_agree() {
    let mut script = Script::new(start_at(&[8, 5]))
        .knowing(&[8, 5, 3])
        .on(8, false, named_from(10))
        .on(5, false, |n| closer(n, &[8, 7]))
        .on(7, false, named_from(10))
        .on(10, true, |n| Ok(Step::Absent(list(n, 11))));
    for at in 11..20 {
        script = script.on(at, true, move |n| back(n, at - 1));
    }
    let script = Arc::new(script);
    let error = run(&script, careful()).unwrap_err();
    assert!(matches!(&error, WalkError::Absent { roots, .. } if roots[0] == script.nodes[10]));
    let on_the_way: Vec<_> = asked(&script).into_iter().filter(|(_, root)| !root).collect();
    assert_eq!(on_the_way, [(8, false), (5, false), (7, false)]);
    let as_root: Vec<_> = asked(&script).into_iter().filter(|(_, root)| *root).collect();
    assert_eq!(as_root, [(10, true), (11, true), (12, true)], "once each, whatever the routes");
}

#[test]
fn a_route_that_knows_the_root_overrules_one_that_hides_it() {
    // 8 skips the true replica set, and those it names play along.
    let mut script = Script::new(start_at(&[8, 5]))
        .knowing(&[8, 5, 3])
        .on(8, false, named_from(13))
        .on(5, false, named_from(10))
        .on(10, true, done);
    for at in 13..20 {
        script = script.on(at, true, move |n| Ok(Step::Absent(list(n, at + 1))));
    }
    let script = Arc::new(script);
    let found = run(&script, careful()).unwrap();
    assert_eq!(found.at, script.nodes[10]);
    assert!(trust(&script, 13) < 1.0, "it claimed a key whose root is nearer");
    assert!((trust(&script, 10) - 1.0).abs() < 1e-9);
}

#[test]
fn a_list_too_sparse_for_the_ring_costs_one_question() {
    // 8 names only two nodes far behind the key, where seven would fit between.
    let script = Script::new(start_at(&[8, 5]))
        .knowing(&[8, 5])
        .on(8, false, |n| root(n, &[18, 19]))
        .on(18, true, denies)
        .on(5, false, named_from(10))
        .on(10, true, done);
    let script = Arc::new(script);
    assert!(run(&script, careful()).is_ok());
    assert_eq!(asked(&script), [(8, false), (18, true), (5, false), (10, true)]);
    assert!(trust(&script, 8) < 1.0 && trust(&script, 18) < 1.0);
}

#[test]
fn a_root_that_answers_nonsense_is_passed_over_as_a_dead_one_is() {
    let script = Script::new(start_at(&[8]))
        .on(8, false, named_from(10))
        .on(10, true, |n| back(n, 15))
        .on(11, true, |n| back(n, 10));
    let script = Arc::new(script);
    let limits = WalkLimits { replicas: 0, routes: 2, ..WalkLimits::default() };
    let error = run(&script, limits).unwrap_err();
    assert!(matches!(&error, WalkError::Absent { roots, .. } if roots[0] == script.nodes[11]));
    assert!(trust(&script, 10) < 1.0);
}

#[test]
fn a_false_address_does_not_stand_in_the_way_of_the_right_one() {
    let script = Script::new(start_at(&[8, 5]))
        .knowing(&[8, 5])
        .on(8, false, |n| {
            let mut false_card = n[10].peer;
            false_card.addr.set_port(9);
            Ok(Step::Route(Route::Root(vec![Node::of(false_card)])))
        })
        .on(5, false, named_from(10))
        .on(10, true, done);
    assert!(run(&Arc::new(script), careful()).is_ok());
}

#[test]
fn a_node_that_denies_a_block_another_has_is_scored_and_then_asked_last() {
    let script = || {
        Script::new(start_at(&[8]))
            .on(8, false, |n| root(n, &[10, 11, 12]))
            .on(10, true, denies)
            .on(11, true, done)
    };
    let first = Arc::new(script());
    assert_eq!(run(&first, careful()).unwrap().at, first.nodes[11]);
    assert!(trust(&first, 10) < 1.0);
    let second = script();
    let liar = second.nodes[10].peer.id;
    (0..5).for_each(|_| second.peer_book.lied(&liar, Misdeed::DeniedBlock, Instant::default()));
    let second = Arc::new(second);
    assert!(run(&second, careful()).is_ok());
    assert_eq!(asked(&second), [(8, false), (11, true)]);
}

#[test]
fn an_avoided_node_on_the_way_is_asked_only_when_no_other_is_left() {
    let script = Script::new(start_at(&[8, 5]))
        .on(5, false, |n| closer(n, &[8, 7]))
        .on(7, false, |n| closer(n, &[8]))
        .on(8, false, |n| root(n, &[10]))
        .on(10, true, done);
    script.peer_book.lied(&script.nodes[8].peer.id, Misdeed::BadBlock, Instant::default());
    let script = Arc::new(script);
    assert!(run(&script, WalkLimits::default()).is_ok());
    assert_eq!(asked(&script), [(5, false), (7, false), (8, false), (10, true)]);
}

// --- server selection (CFS §4.3) --------------------------------------------------------

#[test]
fn of_nodes_about_as_near_to_the_key_the_nearest_on_the_network_is_asked() {
    let ask = |selection| {
        let script = Script::new(start_at(&[9, 8, 7]))
            .on(9, false, |n| root(n, &[10]))
            .on(8, false, |n| root(n, &[10]))
            .on(7, false, |n| root(n, &[10]))
            .on(10, true, done);
        for (node, ms) in [(9, 300), (8, 20), (7, 300)] {
            let peer = script.nodes[node].peer.id;
            script.peer_book.answered(&peer, Duration::from_millis(ms), Instant::default());
        }
        let script = Arc::new(script);
        run(&script, WalkLimits { selection, ..WalkLimits::default() }).unwrap();
        asked(&script)[0].0
    };
    assert_eq!((ask(Selection::NearestKey), ask(Selection::Cost)), (9, 8));
}
