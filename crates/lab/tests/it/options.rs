//! What a run takes, refuses and repeats.

use std::sync::Arc;

use atoll_lab::{Availability, LabError, Options, Silent, check, experiments, run};
use atoll_sim::RttMatrix;

use crate::points::rows;

#[test]
fn one_seed_gives_the_same_bytes() {
    let of_seed = |seed| {
        let options = Options { quick: true, seed, nodes: Some(64), ..Options::default() };
        run(&["cfs-fig9"], &options, &Silent).expect("it runs").remove(0)
    };
    let [first, again, other] = [7, 7, 8].map(of_seed);
    assert_eq!(first.csv.text(), again.csv.text());
    assert_eq!(first.chart.to_svg(), again.chart.to_svg());
    assert_ne!(first.csv.text(), other.csv.text());
    assert_eq!(other.seeds, [8]);
}

#[test]
fn every_name_is_listed_once_and_says_where_it_is_from() {
    let mut names: Vec<&str> = experiments().map(|experiment| experiment.name).collect();
    assert!(names.contains(&"cfs-fig6") && names.contains(&"cfs-fig15"));
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count);
    assert!(experiments().all(|e| !e.title.is_empty() && !e.source.is_empty()));
}

#[test]
fn what_does_not_fit_is_refused_before_anything_runs() {
    let options = |nodes, runs| Options { nodes, runs, ..Options::default() };
    let refused = |names: &[&str], options: &Options| check(names, options).expect_err("refused");
    let unknown = refused(&["cfs-fig99"], &Options::default());
    assert_eq!(unknown, LabError::Unknown("cfs-fig99".into()));
    for (nodes, runs) in [(Some(0), None), (Some(10_000_000), None), (None, Some(0))] {
        let error = refused(&["cfs-fig9"], &options(nodes, runs));
        assert!(matches!(error, LabError::Options(_)), "{error}");
    }
    let fixed = refused(&["cfs-fig12"], &options(Some(9), None)).to_string();
    assert!(fixed.contains("cfs-fig12") && fixed.contains("the paper's"), "{fixed}");
    // Of several experiments, those that can take it do.
    assert_eq!(check(&["cfs-fig9", "cfs-fig12"], &options(Some(64), None)), Ok(()));
}

#[test]
fn a_latency_file_with_too_few_hosts_is_refused() {
    let latency = RttMatrix::parse(b"0 9\n9 0\n", 0).expect("a matrix");
    let options = Options { quick: true, latency: Some(Arc::new(latency)), ..Options::default() };
    let error = run(&["cfs-fig6"], &options, &Silent).expect_err("12 sites are needed");
    assert!(error.to_string().contains("2 hosts"), "{error}");
}

#[test]
fn nodes_follow_an_availability_file() {
    // Every host is up for 1,000 s and down for 100 s, in turn.
    let mut text = String::from("host,start_s,end_s\n");
    for host in 0..60 {
        for session in 0..40 {
            let start = session * 1100 + host * 13;
            text += &format!("{host},{start},{}\n", start + 1000);
        }
    }
    let availability = Availability::parse(&text).expect("valid");
    let options = Options {
        quick: true,
        nodes: Some(40),
        availability: Some(Arc::new(availability)),
        ..Options::default()
    };
    let outcome = run(&["lookup-budget"], &options, &Silent).expect("it runs").remove(0);
    assert!(outcome.setup.contains("the file"), "{}", outcome.setup);
    for row in rows(&outcome) {
        assert!((30.0..50.0).contains(&row.number("nodes_up")), "{}", row.text("nodes_up"));
    }
}
