//! What the papers found, as bounds on the quick form of each experiment.

use std::collections::BTreeMap;

use atoll_lab::Options;

use crate::points::{Row, quick, quick_with, rows};

/// CFS §7.2.1: "The actual values are about ½ log2(N)".
#[test]
fn lookups_take_about_half_the_logarithm_of_the_ring() {
    let outcome = quick(&["cfs-fig9"]).remove(0);
    let rows = rows(&outcome);
    assert!(rows.len() >= 8);
    for row in rows {
        let half_log = row.number("servers").log2() / 2.0;
        let ratio = row.number("mean_rpcs") / half_log;
        match row.text("setting") {
            "paper" => assert!((0.6..1.05).contains(&ratio), "{ratio}: {}", row.text("servers")),
            _ => assert!((0.0..1.05).contains(&ratio), "{ratio}: {}", row.text("servers")),
        }
        assert!(row.number("most") <= 2.0 * half_log + 2.0, "{}", row.text("most"));
    }
}

/// The mean of a column over the rows that are picked.
fn mean(rows: &[Row], column: &str, pick: impl Fn(&Row) -> bool) -> f64 {
    let picked: Vec<f64> =
        rows.iter().filter(|row| pick(row)).map(|row| row.number(column)).collect();
    assert!(!picked.is_empty(), "no such row with {column}");
    picked.iter().sum::<f64>() / picked.len() as f64
}

/// CFS §7.2.5: "No lookups fail when fewer than 20 % of the servers fail …. All of the
/// lookup failures encountered in this experiment are due to all of a block's replicas
/// failing"; "lookups take about one RPC longer".
#[test]
fn lookups_survive_massive_failure() {
    let outcomes = quick(&["cfs-fig13", "cfs-fig14", "cfs-fig15"]);
    let [failures, rpcs, timeouts] = [0, 1, 2].map(|n| rows(&outcomes[n]));
    for row in &failures {
        let (failed, lost) = (row.number("failed_lookups"), row.number("lost"));
        let (setting, percent) = (row.text("setting"), row.number("failed_percent"));
        assert!(failed <= lost + 1e-9, "{setting}, {percent} % failed: {failed} of {lost}");
        if percent <= 20.0 && setting != "default" {
            assert_eq!(failed, 0.0, "six copies");
        }
    }
    let at = |rows: &[Row], setting, column, percent: f64| {
        mean(rows, column, |r| {
            r.text("setting") == setting && r.number("failed_percent") == percent
        })
    };
    for setting in ["paper", "default", "default-six-copies"] {
        let rpcs = |percent| at(&rpcs, setting, "rpcs", percent);
        let more = rpcs(50.0) - rpcs(0.0);
        assert!((-0.5..1.5).contains(&more), "{setting}: {more}");
        let timeouts = |percent| at(&timeouts, setting, "timeouts", percent);
        assert_eq!(timeouts(0.0), 0.0);
        // Of 120 lookups, the first ones meet all the dead; and as shipped one in nine looks
        // for a block that is lost, and does not believe it at once.
        let most = match setting {
            "paper" => 0.6,
            "default" => 1.8,
            _ => 1.2,
        };
        assert!(timeouts(20.0) < 0.4, "{setting}: {}", timeouts(20.0));
        assert!(timeouts(50.0) < most, "{setting}: {}", timeouts(50.0));
    }
}

/// CFS §7.2.2: "With multiple virtual servers per server, the sum of the parts of the ID
/// space … is more tightly clustered around the average."
#[test]
fn virtual_servers_even_out_the_load() {
    let outcome = quick(&["cfs-fig10"]).remove(0);
    let mut shares: BTreeMap<(String, u64), Vec<f64>> = BTreeMap::new();
    for row in rows(&outcome).iter().filter(|row| row.text("setting") == "paper") {
        let key = (row.text("of").to_owned(), row.number("virtual_servers") as u64);
        shares.entry(key).or_default().push(row.number("share"));
    }
    let deviation = |of: &str, virtual_servers| {
        let shares = &shares[&(of.to_owned(), virtual_servers)];
        let count = shares.len() as f64;
        let mean = shares.iter().sum::<f64>() / count;
        (shares.iter().map(|s| (s - mean).powi(2)).sum::<f64>() / count).sqrt() / mean
    };
    let space = [1, 6, 24].map(|virtual_servers| deviation("id_space", virtual_servers));
    // Of exponential gaps: 1, 1/√6, 1/√24.
    for (found, expected) in space.into_iter().zip([1.0, 0.41, 0.20]) {
        assert!((found / expected - 1.0).abs() < 0.35, "{space:?}");
    }
    let blocks = deviation("blocks", 6);
    assert!((blocks / space[1] - 1.0).abs() < 0.35, "{blocks}, {space:?}");
}

/// CFS §7.2.4: "the relationship of blocks to virtual servers is linear".
#[test]
fn a_server_stores_in_proportion_to_its_virtual_servers() {
    let outcome = quick(&["cfs-fig12"]).remove(0);
    let mut checked = 0;
    for row in rows(&outcome).iter().filter(|row| row.text("setting") == "paper") {
        if row.number("virtual_servers") >= 16.0 {
            let ratio = row.number("blocks") / row.number("expected");
            assert!((0.8..1.2).contains(&ratio), "{ratio}: {}", row.text("virtual_servers"));
            checked += 1;
        }
    }
    assert_eq!(checked, 4);
}

/// CFS §7.2.3: "the RPC counts decrease significantly after just a few lookups"; and nobody
/// has to answer them all (§5.2). As shipped there is nothing to decrease.
#[test]
fn a_popular_block_is_fetched_with_ever_fewer_calls_from_ever_more_servers() {
    let outcome = quick(&["cfs-fig11"]).remove(0);
    let rows = rows(&outcome);
    let at = |setting: &str, cache: &str, column: &str, fetches: f64| {
        mean(&rows, column, |row| {
            row.text("setting") == setting
                && row.text("cache") == cache
                && row.number("earlier_fetches") == fetches
        })
    };
    let [first, second, last] =
        [0.0, 10.0, 50.0].map(|fetches| at("paper", "on", "mean_rpcs", fetches));
    assert!(second < 0.8 * first && last < 0.6 * first, "{first} {second} {last}");
    let uncached = at("paper", "off", "mean_rpcs", 50.0);
    assert!(uncached > 1.5 * last, "{uncached} {last}");
    let [with, without] = ["on", "off"].map(|cache| at("paper", cache, "busiest_share", 0.0));
    assert!(with < 0.3 && without > 0.9, "{with} {without}");
    for fetches in [0.0, 10.0, 50.0] {
        let rpcs = at("default", "on", "mean_rpcs", fetches);
        assert!(rpcs < 1.3, "{fetches}: {rpcs}");
    }
}

/// Wanted: with a fifth of the nodes lying and six copies, 99.9 % of lookups succeed. That
/// takes more than six copies: without other routes many do not.
#[test]
fn lookups_survive_liars_by_other_routes() {
    let outcome = quick(&["malicious"]).remove(0);
    let rows = rows(&outcome);
    let failed = |setting: &str, percent: f64| {
        mean(&rows, "failed_lookups", |row| {
            row.text("setting") == setting && row.number("liars_percent") == percent
        })
    };
    assert_eq!(failed("paper", 0.0), 0.0);
    assert!(failed("default", 20.0) <= 0.001, "{}", failed("default", 20.0));
    assert!(failed("paper", 20.0) > 0.01, "{}", failed("paper", 20.0));
    assert!(failed("default", 40.0) < 0.5 * failed("paper", 40.0));
}

#[test]
fn lookups_succeed_while_nodes_come_and_go() {
    let outcomes = quick(&["lookup-budget", "lookup-cold"]);
    let rows = rows(&outcomes[0]);
    let rpcs = |tables: &str| mean(&rows, "mean_rpcs", |row| row.text("tables") == tables);
    assert!(rpcs("budget-1024") <= 1.3, "{}", rpcs("budget-1024"));
    assert!(rpcs("budget-2048") <= rpcs("budget-1024") + 0.1, "{}", rpcs("budget-2048"));
    assert!(rpcs("budget-32") <= rpcs("fingers"), "{}", rpcs("budget-32"));
    let cold = self::rows(&outcomes[1]);
    let after = |secs: &str| {
        let is_meant = |row: &Row| row.text("tables") == "budget-1024" && row.text("secs") == secs;
        mean(&cold, "mean_rpcs", is_meant)
    };
    assert!(after("30") <= 1.5 && after("240") <= 1.3, "{} {}", after("30"), after("240"));
    for row in rows {
        let half_log = row.number("nodes_up").log2() / 2.0;
        assert!(row.number("mean_rpcs") < half_log, "{}", row.text("mean_rpcs"));
        assert!(row.number("failed") <= 0.01 * row.number("lookups"), "{}", row.text("failed"));
        assert!((100.0..160.0).contains(&row.number("nodes_up")), "{}", row.text("nodes_up"));
    }
}

/// CFS §7.1: three blocks at a time are faster than one, and CFS is narrower than TCP.
#[test]
fn prefetching_speeds_downloads_up_and_evens_them_out() {
    let outcomes = quick(&["cfs-fig6", "cfs-fig8"]);
    let downloads = rows(&outcomes[0]);
    let speed = |setting: &str, window: &str| {
        mean(&downloads, "kib_per_sec", |row| {
            row.text("setting") == setting && row.text("window_blocks") == window
        })
    };
    for setting in ["paper", "default"] {
        let gain = speed(setting, "3") / speed(setting, "1");
        assert!((1.8..3.1).contains(&gain), "{setting}: {gain}");
    }
    // Of one seed in quick form this ratio says little: it was 0.67 to 0.85 over nine seeds before
    // puts were hedged, and 0.66 to 0.97 over fourteen since. Eight seeds together say more.
    let eight = Options { seed: 1, runs: Some(8), ..Options::default() };
    let eight = rows(&quick_with(&["cfs-fig6"], eight)[0]);
    let of_eight = |window: &str| {
        mean(&eight, "kib_per_sec", |row| {
            row.text("setting") == "default" && row.text("window_blocks") == window
        })
    };
    let best = ["1", "3", "5", "10", "24"].map(of_eight).into_iter().fold(0.0, f64::max);
    assert!(of_eight("adaptive") > 0.75 * best, "{} of {best}", of_eight("adaptive"));
    let spread = |mut speeds: Vec<f64>| {
        speeds.sort_by(f64::total_cmp);
        speeds[speeds.len() * 9 / 10] / speeds[speeds.len() / 10]
    };
    let of_cfs = downloads
        .iter()
        .filter(|row| row.text("setting") == "paper" && row.text("window_blocks") == "5")
        .map(|row| row.number("kib_per_sec"));
    let of_cfs = spread(of_cfs.collect());
    let transfers = rows(&outcomes[1]);
    for bytes in [8 << 10, 64 << 10, 1_100_000] {
        let of_tcp = transfers.iter().filter(|row| row.number("bytes") == f64::from(bytes));
        let of_tcp = spread(of_tcp.map(|row| row.number("kib_per_sec")).collect());
        assert!(of_tcp > 2.0 * of_cfs, "{bytes}: TCP {of_tcp}, CFS {of_cfs}");
    }
}

/// PAST §5.1, D2 §6: a full node diverts copies, so the ring is not as large as its smallest
/// member. The first copy without room is one of the last that any ring could take.
#[test]
fn diversion_makes_the_room_of_unequal_nodes_one() {
    let outcome = quick(&["capacity"]).remove(0);
    let rows = rows(&outcome);
    let first_missing = |diversion: &str| {
        let of_kind = rows.iter().filter(|row| row.text("diversion") == diversion);
        let first = of_kind.into_iter().find(|row| row.number("missing") > 0.0);
        first.expect("more is offered than there is room for").number("used")
    };
    assert!(first_missing("on") >= 0.93, "{}", first_missing("on"));
    assert!(first_missing("off") < 0.2, "{}", first_missing("off"));
}

/// Each mechanism that a quick run switches off buys what `docs/design/mechanisms.md` says.
#[test]
fn mechanisms_buy_what_they_cost() {
    let outcome = quick(&["mechanisms"]).remove(0);
    let rows = rows(&outcome);
    let of = |situation: &str, off: &str, quantity: &str| {
        mean(&rows, "mean", |row| {
            row.text("situation") == situation
                && row.text("off") == off
                && row.text("quantity") == quantity
        })
    };
    let times = |situation: &str, off: &str, quantity: &str| {
        of(situation, off, quantity) / of(situation, "all on", quantity)
    };
    let spared = times("rest", "adaptive-interval", "upkeep_bytes_per_sec");
    assert!(spared > 2.0, "{spared}");
    let exploration = times("cold tables", "exploration", "lookup_rpcs");
    assert!(exploration > 1.3, "{exploration}");
    let hedged_puts = times("30 % just died; puts first", "hedged-puts", "put_median_ms");
    assert!(hedged_puts > 1.5, "{hedged_puts}");
    for situation in ["rest", "cold tables", "20 % lie", "WAN", "popular block", "20 % stall"] {
        assert_eq!(of(situation, "all on", "failed_lookups"), 0.0, "{situation}");
        assert_eq!(of(situation, "all on", "failed_puts"), 0.0, "{situation}");
    }
}
