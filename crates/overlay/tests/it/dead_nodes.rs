//! CFS §7.2.5: walks where nodes have just died and are still named by others.

use std::sync::Arc;
use std::time::Duration;

use atoll_env::Instant;
use atoll_overlay::Mechanisms;
use atoll_overlay::peer_book::{PeerBook, Standing};
use atoll_overlay::walk::{Said, Step, WalkError, WalkLimits};

use crate::walking::{Script, asked, back, closer, done, root, run, run_timed, start_at};

/// How long a call to a dead node takes in these scripts.
const DEAD: Duration = Duration::from_secs(10);

/// Has these nodes leave a call unanswered.
fn silence(script: &Script, nodes: &[usize]) {
    for node in nodes {
        script.peer_book.silent(&script.nodes[*node].peer, Instant::default());
    }
}

fn hedged() -> WalkLimits {
    WalkLimits { hedge: true, ..WalkLimits::default() }
}

/// "it does not use that server again until it has been stabilized" (CFS §7.2.5).
#[test]
fn a_node_that_left_a_call_unanswered_is_not_asked_again_because_others_name_it() {
    let script = Script::new(start_at(&[5, 3]))
        .on(3, false, |n| closer(n, &[8, 7]))
        .on(7, false, |n| root(n, &[10, 11]))
        .on(10, true, done);
    silence(&script, &[5, 8]);
    let script = Arc::new(script);
    let found = run(&script, WalkLimits::default()).unwrap();
    assert_eq!(asked(&script), [(3, false), (7, false), (10, true)]);
    assert_eq!((found.trace.calls(), found.trace.failures()), (3, 0));
}

#[test]
fn a_silent_node_is_asked_when_no_other_is_left() {
    let script = Script::new(start_at(&[5])).on(5, false, |n| root(n, &[10])).on(10, true, done);
    silence(&script, &[5, 10]);
    let script = Arc::new(script);
    assert!(run(&script, WalkLimits::default()).is_ok());
    assert_eq!(asked(&script), [(5, false), (10, true)]);
}

#[test]
fn a_node_that_returned_is_asked_again_after_a_while() {
    let book = PeerBook::with(Duration::ZERO, Mechanisms::default());
    let mut script =
        Script::new(start_at(&[8, 5])).on(8, false, |n| root(n, &[10])).on(10, true, done);
    script.peer_book = book;
    silence(&script, &[8]);
    let script = Arc::new(script);
    assert!(run(&script, WalkLimits::default()).is_ok());
    assert_eq!(asked(&script), [(8, false), (10, true)]);
}

/// The first live successor stands in for a root that is known to be silent, and
/// the trace says that the silent one may have the block.
#[test]
fn a_silent_root_is_passed_over_and_the_trace_says_so() {
    let mut script = Script::new(start_at(&[8])).on(8, false, |n| root(n, &[10, 11, 12, 13, 14]));
    script = script.on(11, true, |n| back(n, 10));
    for at in 12..15 {
        script = script.on(at, true, move |n| back(n, at - 1));
    }
    silence(&script, &[10]);
    let script = Arc::new(script);
    let error = run(&script, WalkLimits { replicas: 3, ..WalkLimits::default() }).unwrap_err();
    assert!(!asked(&script).contains(&(10, true)));
    let WalkError::Absent { roots, trace, .. } = error else { panic!("{error}") };
    assert_eq!(roots[0], script.nodes[11]);
    assert_eq!(trace.failures(), 0);
    assert!(!trace.all_answered());
    let silent: Vec<_> = trace.0.iter().filter(|a| a.said == Said::Silent).collect();
    assert!(silent.len() == 1 && silent[0].node == script.nodes[10], "{trace}");
}

/// A dead node on the way cost two seconds at least, and a lookup gives up after twenty.
#[test]
fn a_walk_hedges_an_overdue_question_and_follows_the_first_answer() {
    let script = Script::new(start_at(&[8, 5]))
        .taking(8, DEAD)
        .taking(9, DEAD)
        .on(5, false, |n| closer(n, &[9, 7]))
        .on(7, false, |n| root(n, &[10, 11]))
        .on(10, true, done);
    let script = Arc::new(script);
    let (found, took) = run_timed(&script, hedged());
    assert_eq!(found.unwrap().at, script.nodes[10]);
    assert_eq!(asked(&script), [(8, false), (5, false), (9, false), (7, false), (10, true)]);
    assert!(took < Duration::from_secs(2), "{took:?}");
    // Other walks are not to wait for them either.
    let standing = |n: usize| script.peer_book.standing(&script.nodes[n].peer, Instant::default());
    assert_eq!([8, 9, 5].map(standing), [Standing::Late, Standing::Late, Standing::Answers]);
}

#[test]
fn an_answer_that_comes_late_is_still_taken() {
    let script = Script::new(start_at(&[8, 5]))
        .taking(8, Duration::from_secs(1))
        .taking(5, DEAD)
        .on(8, false, |n| root(n, &[10, 11]))
        .on(10, true, done);
    let script = Arc::new(script);
    let (found, took) = run_timed(&script, hedged());
    assert!(found.is_ok() && took < Duration::from_secs(2), "{took:?}");
    assert_eq!(asked(&script), [(8, false), (5, false), (10, true)]);
}

#[test]
fn hedging_adds_no_questions_while_all_answers_come_in_time() {
    let script = || {
        let script = Script::new(start_at(&[5, 3]))
            .on(5, false, |n| closer(n, &[8, 7]))
            .on(8, false, |n| root(n, &[10, 11]))
            .on(10, true, |n| Ok(Step::Absent(vec![n[11], n[12]])))
            .on(11, true, |n| back(n, 10))
            .on(12, true, done);
        Arc::new(script)
    };
    let (plain, quick) = (script(), script());
    run(&plain, WalkLimits::default()).unwrap();
    run(&quick, hedged()).unwrap();
    assert_eq!(asked(&plain), asked(&quick));
    assert_eq!(quick.most_waited_for(), 1);
}

/// A slow network must not be asked ever more.
#[test]
fn questions_that_are_waited_for_are_bounded() {
    let mut script = Script::new(start_at(&[9, 8, 7, 6, 5, 4, 3, 2]));
    for node in 2..10 {
        script = script.taking(node, DEAD);
    }
    let script = Arc::new(script);
    assert!(run(&script, hedged()).is_err());
    assert_eq!(script.most_waited_for(), 4);
    assert_eq!(asked(&script).len(), 8, "each of them once");
    let plain = Arc::new(Script::new(start_at(&[9, 8])).taking(9, DEAD).taking(8, DEAD));
    let limits = WalkLimits { deadline: DEAD * 9, ..WalkLimits::default() };
    assert!(run(&plain, limits).is_err());
    assert_eq!(plain.most_waited_for(), 1, "one at a time where nothing is hedged");
}

/// A second node could not answer for the root.
#[test]
fn a_walk_that_looks_for_the_root_waits_for_a_slow_root() {
    let script = Script::new(start_at(&[8]))
        .taking(10, Duration::from_secs(3))
        .on(8, false, |n| root(n, &[10, 11]))
        .on(10, true, done)
        .on(11, true, |n| back(n, 10));
    let script = Arc::new(script);
    let found = run(&script, WalkLimits { replicas: 0, ..hedged() }).unwrap();
    assert_eq!(found.at, script.nodes[10]);
    assert!(!asked(&script).contains(&(11, true)));
}

/// A guess that is dead costs the time of an answer, not the time to notice a death: its
/// successor, the next guess, has the block as well.
#[test]
fn a_guessed_root_that_is_dead_is_not_waited_for() {
    let script =
        Script::new(start_at(&[8])).guessing(&[10, 11]).taking(10, DEAD).on(11, true, done);
    let script = Arc::new(script);
    let (found, took) = run_timed(&script, hedged());
    assert_eq!(found.unwrap().at, script.nodes[11]);
    assert!(took < Duration::from_secs(1), "{took:?}");
}

/// The node before a guessed root being dead does not make that one the root: others may live
/// before the dead one. A newcomer took a successor beyond them for its own.
#[test]
fn a_guess_behind_a_dead_node_is_not_taken_for_the_root() {
    let guessing = |node_before: usize| {
        Script::new(start_at(&[8]))
            .guessing(&[node_before + 1])
            .on(node_before + 1, true, move |n| back(n, node_before))
            .on(8, false, |n| root(n, &[10, 11, 12]))
            .on(10, true, done)
    };
    let script = Arc::new(guessing(11));
    assert_eq!(run(&script, WalkLimits::default()).unwrap().at, script.nodes[10]);
    assert_eq!(asked(&script), [(12, true), (11, true), (8, false), (10, true)]);
    let script = guessing(11);
    silence(&script, &[11]);
    let script = Arc::new(script);
    assert_eq!(run(&script, WalkLimits::default()).unwrap().at, script.nodes[10]);
    // If no node lives before it, it is the root.
    let script = guessing(10);
    silence(&script, &[10]);
    let script = Arc::new(script);
    let limits = WalkLimits { replicas: 0, ..WalkLimits::default() };
    let error = run(&script, limits).unwrap_err();
    let WalkError::Absent { roots, .. } = error else { panic!("{error}") };
    assert_eq!(roots[0], script.nodes[11]);
    assert_eq!(asked(&script), [(11, true), (8, false)]);
}

/// A table that lacks all the nodes between the key and the guess led back by one of them
/// with each question, up to twenty times.
#[test]
fn after_a_bad_guess_the_way_is_asked_for() {
    let mut script = Script::new(start_at(&[8])).guessing(&[14]);
    for at in 11..15 {
        script = script.on(at, true, move |n| back(n, at - 1));
    }
    script = script.on(8, false, |n| root(n, &[10, 11])).on(10, true, done);
    let script = Arc::new(script);
    run(&script, WalkLimits::default()).unwrap();
    assert_eq!(asked(&script), [(14, true), (13, true), (12, true), (8, false), (10, true)]);
}
