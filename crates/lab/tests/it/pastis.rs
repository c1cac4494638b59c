//! What the Pastis paper found, as bounds on the quick form of each experiment.

use crate::points::{Row, quick, rows};

/// The only row with these texts in these columns.
fn one<'r>(rows: &'r [Row], texts: &[(&str, &str)]) -> &'r Row {
    let mut picked =
        rows.iter().filter(|row| texts.iter().all(|(column, text)| row.text(column) == *text));
    let found = picked.next().unwrap_or_else(|| panic!("no row with {texts:?}"));
    assert!(picked.next().is_none(), "one row only: {texts:?}");
    found
}

const SETTINGS: [&str; 2] = ["paper", "default"];
const PHASES: [&str; 5] = ["mkdir", "copy", "stat", "read", "make"];

/// Pastis §5.2: "the total execution time increases only by 13.5% between 16 … and 32 768 nodes". At
/// 16 nodes no block is looked up here; in the paper's settings each is at 256.
#[test]
fn a_larger_network_costs_lookups_and_no_more() {
    let rows = rows(&quick(&["pastis-fig4"]).remove(0));
    let total = |case, nodes: &str| {
        one(&rows, &[("case", case), ("nodes", nodes), ("phase", "total")]).number("mean_secs")
    };
    for (case, most) in [("paper", 3.2), ("default", 1.5), ("default-over-tcp", 2.0)] {
        let grown = total(case, "256") / total(case, "16");
        // Four runs of one case differ by a third, their means by a fifth.
        assert!((0.6..most).contains(&grown), "{case}: {grown}");
    }
    for nodes in ["16", "128", "256"] {
        assert!(total("default", nodes) < total("paper", nodes), "{nodes} nodes");
        let phase = |phase| {
            one(&rows, &[("case", "default"), ("nodes", nodes), ("phase", phase)])
                .number("mean_secs")
        };
        let sum: f64 = PHASES.iter().map(|name| phase(*name)).sum();
        assert!((sum - total("default", nodes)).abs() < 0.01, "{sum}");
    }
    assert!(total("paper-with-fingers", "256") > total("paper", "256"));
    // In smaller rings it makes more of a difference that inodes lie elsewhere in the two cases.
    assert!(total("default", "256") < total("default-over-tcp", "256"));
    // One put instead of a lookup and two.
    assert!(total("default", "256") < 0.5 * total("default-not-near", "256"));
}

/// Pastis §5.3: the nearest replica comes nearer with their number and the farthest goes away; so do
/// the times of reads and writes.
#[test]
fn more_replicas_are_nearer_and_farther() {
    let outcomes = quick(&["pastis-fig5", "pastis-fig6", "pastis-fig7"]);
    let [totals, phases, distances] = [0, 1, 2].map(|n| rows(&outcomes[n]));
    for setting in SETTINGS {
        let total = |replicas| {
            one(&totals, &[("setting", setting), ("replicas", replicas)]).number("mean_secs")
        };
        let grown = total("16") / total("2");
        assert!((1.0..2.0).contains(&grown), "{setting}: {grown}");
        let copy = |replicas| {
            one(&phases, &[("setting", setting), ("replicas", replicas), ("phase", "copy")])
                .number("mean_secs")
        };
        assert!(copy("16") > copy("2"), "{setting}: {} {}", copy("16"), copy("2"));
    }
    for kind in ["inodes", "keys everywhere"] {
        let of = |replicas, column| {
            one(&distances, &[("replicas", replicas), ("blocks", kind)]).number(column)
        };
        assert!(of("2", "nearest_ms") > of("16", "nearest_ms"), "{kind}");
        assert!(of("2", "farthest_ms") < of("16", "farthest_ms"), "{kind}");
        // A round trip over the sphere: between 0 and 600 ms, 300 in the mean.
        assert!(of("16", "farthest_ms") < 600.0 && of("2", "nearest_ms") < 300.0, "{kind}");
    }
    // A directory for the client and one for the copy, two below it; 26 files, what is compiled of 18 of
    // them, and a program.
    let inodes = one(&distances, &[("replicas", "2"), ("blocks", "inodes")]);
    assert!((49.0..51.0).contains(&inodes.number("count")), "{}", inodes.text("count"));
}

/// Pastis §5.4: "running 16 concurrent client produces only a 11.3% increase compared to a single
/// client"; Ivy's four take 70 % longer than one.
#[test]
fn clients_hardly_wait_for_each_other() {
    let rows = rows(&quick(&["pastis-fig8"]).remove(0));
    for setting in SETTINGS {
        let total = |clients| {
            one(&rows, &[("setting", setting), ("clients", clients), ("phase", "total")])
                .number("mean_secs")
        };
        for clients in ["4", "16"] {
            let grown = total(clients) / total("1");
            assert!((0.9..1.113).contains(&grown), "{setting}, {clients} clients: {grown}");
        }
    }
}

/// Pastis §5.5: "UCB read time decreases by 85% …, yielding a 33% increase in overall performance";
/// stale replicas cost 3 %. §5.6: remembering replica sets saves time.
#[test]
fn reading_ones_own_writes_is_faster_and_so_is_remembering_replica_sets() {
    let outcomes = quick(&["pastis-fig9", "pastis-fig10"]);
    let [models, sets] = [0, 1].map(|n| rows(&outcomes[n]));
    for setting in SETTINGS {
        let secs = |rows: &[Row], case: &str, work: &str| {
            let texts = [("setting", setting), ("case", case), ("phase", "total"), ("work", work)];
            one(rows, &texts).number("mean_secs")
        };
        let model = |case: &str, work: &str| secs(&models, case, work);
        let reading = "reading inodes";
        let less = model("read-your-writes", reading) / model("close-to-open", reading);
        // By default most opens ask nobody, whatever the model.
        let (most_reading, most) = if setting == "paper" { (0.6, 0.85) } else { (1.0, 1.0) };
        assert!(less < most_reading, "{setting}: reading inodes takes {less} of the time");
        assert!(model("read-your-writes", "all") < most * model("close-to-open", "all"));
        let stale = model("read-your-writes; 10 % stale", "all") / model("read-your-writes", "all");
        assert!((0.8..1.3).contains(&stale), "{setting}: {stale}");
        let works = ["content blocks", "writing inodes", reading];
        let sum: f64 = works.iter().map(|work| model("close-to-open", work)).sum();
        let all = model("close-to-open", "all");
        assert!((sum / all - 1.0).abs() < 0.02, "{setting}: {sum} of {all}: waiting for the ring");
        let of_sets = |case: &str| secs(&sets, case, "all");
        assert!(of_sets("sets remembered") < of_sets("sets looked up"), "{setting}");
        // By default hardly any set is used that the client has not looked up a moment ago.
        let costs_more = of_sets("sets remembered") < of_sets("10 % out of date");
        assert!(costs_more || setting == "default", "{setting}");
    }
}
