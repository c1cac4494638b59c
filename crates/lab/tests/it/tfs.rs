//! What the TFS paper found, as bounds on the quick form of each experiment.

use crate::points::{Row, quick, rows};

fn number(rows: &[Row], column: &str, pick: impl Fn(&Row) -> bool) -> f64 {
    let mut picked = rows.iter().filter(|row| pick(row));
    let found = picked.next().expect("such a row").number(column);
    assert!(picked.next().is_none(), "one row only");
    found
}

/// TFS §3.3: "there is a great deal of locality"; "By using block avoidance, TFS provides more
/// storage to contributory applications without increasing the rate at which data is lost."
/// §5: "TFS provides 40% more storage than dynamic watermarking".
#[test]
fn avoiding_hot_places_loses_little_and_leaves_almost_all() {
    let outcomes = quick(&["tfs-fig4", "tfs-fig5", "tfs-fig6", "tfs-fig7"]);
    let histogram = rows(&outcomes[0]);
    for machine in ["machine 1", "machine 2"] {
        // Rows go up to all of the disk.
        let of = |share: f64| {
            let mut of_machine = histogram.iter().filter(|row| row.text("machine") == machine);
            let row = of_machine.find(|row| row.number("share_of_disk") >= share);
            row.expect("the curve ends at all of it").number("allocated_bytes_per_sec")
        };
        assert_eq!(of(0.7), 0.0, "{machine}: 70 % were never allocated");
        assert!(of(0.9) < 0.7 * of(1.0), "{machine}: a tenth takes most");
    }
    let avoidance = rows(&outcomes[1]);
    for machine in ["machine 1", "machine 2"] {
        let fixed: Vec<&Row> = avoidance
            .iter()
            .filter(|row| row.text("setting") == "paper" && row.text("machine") == machine)
            .collect();
        assert!(fixed.len() > 5);
        for pair in fixed.windows(2) {
            for column in ["usable_share", "loss_bytes_per_sec"] {
                assert!(pair[1].number(column) <= pair[0].number(column) + 1e-9, "{column}");
            }
        }
        assert_eq!(fixed[0].number("usable_share"), 1.0);
        let all = fixed[0].number("loss_bytes_per_sec");
        let aimed = |column| {
            number(&avoidance, column, |row| {
                row.text("machine") == machine && row.text("target_bytes_per_sec") == "100"
            })
        };
        assert!(aimed("usable_share") > 0.8 && aimed("loss_bytes_per_sec") < 0.8 * all);
    }
    for outcome in &outcomes[2..] {
        let curves = rows(outcome);
        for setting in ["paper", "default"] {
            let plenty = |method: &str| {
                let row = curves.iter().find(|row| {
                    row.text("setting") == setting
                        && row.text("method") == method
                        && row.number("bandwidth_kb_per_sec") >= 1000.0
                });
                row.expect("on the curve").number("stored_gb")
            };
            let more = plenty("TFS") / plenty("dynamic 35 %");
            assert!((1.2..1.45).contains(&more), "{}: {more}", outcome.name);
        }
    }
}

/// TFS §5.2.1: "Both the small contribution and TFS are nearly equal in performance to the case
/// of no contribution"; "the time that TFS takes to complete the benchmark is unchanged by
/// aging"; §5.3: "both Ext2 with 0% contribution, and TFS show very little fragmentation".
#[test]
fn contributing_everything_costs_ordinary_files_nothing() {
    let outcomes = quick(&["tfs-fig1", "tfs-fig8", "tfs-fig9", "tfs-fig10"]);
    let copy = rows(&outcomes[0]);
    let without = number(&copy, "copy_secs", |row| row.number("share") == 0.0);
    for row in copy.iter().filter(|row| row.text("system") == "tfs") {
        let times = row.number("copy_secs") / without;
        assert!((0.98..1.02).contains(&times), "{} %: {times}", row.text("share"));
    }
    for outcome in &outcomes[1..3] {
        let phases = rows(outcome);
        let total = |system: &str| -> f64 {
            let of = phases.iter().filter(|row| row.text("system") == system);
            of.map(|row| row.number("secs")).sum()
        };
        let times = total("TFS all free space") / total("no contribution");
        assert!((0.95..1.05).contains(&times), "{}: {times}", outcome.name);
    }
    let aged = rows(&outcomes[2]);
    let total = |system: &str| -> f64 {
        aged.iter().filter(|row| row.text("system") == system).map(|row| row.number("secs")).sum()
    };
    assert!(total("ext2 35 %") > 1.1 * total("no contribution"), "ageing spoils ext2's places");
    let cells = rows(&outcomes[3]);
    let used = |system: &str, aged: &str| {
        let of = cells.iter().filter(|row| row.text("system") == system);
        of.filter(|row| row.text("aged") == aged && row.number("blocks") > 0.0).count()
    };
    for aged in ["false", "true"] {
        assert!(used("TFS all free space", aged) <= used("no contribution", "false") + 1);
    }
}
