//! What the Kosha paper found, as bounds on the quick form of each experiment.

use crate::points::{Row, quick, rows};

/// The only row with these texts in these columns.
fn one<'r>(rows: &'r [Row], texts: &[(&str, &str)]) -> &'r Row {
    let mut picked =
        rows.iter().filter(|row| texts.iter().all(|(column, text)| row.text(column) == *text));
    let found = picked.next().unwrap_or_else(|| panic!("no row with {texts:?}"));
    assert!(picked.next().is_none(), "one row only: {texts:?}");
    found
}

/// Kosha §6.2: "as the distribution level is increased, the load balancing in terms of the number of files converges toward the upper
/// bound …. Using directory distribution with distribution level 4 or greater provides comparable load balancing to that of individually
/// hashing all files."
#[test]
fn deeper_distribution_is_more_even_and_groups_by_weight_are_most_even() {
    let rows = rows(&quick(&["kosha-fig5"]).remove(0));
    let deviation = |setting, of, level| {
        let row = one(&rows, &[("setting", setting), ("of", of), ("level", level)]);
        assert_eq!(row.number("mean"), 6.25, "sixteen nodes have all");
        row.number("deviation")
    };
    for setting in ["paper", "default"] {
        let files = |level| deviation(setting, "files", level);
        assert!(files("1") > files("4") && files("4") >= 0.9 * files("10"), "{setting}");
        assert!(deviation(setting, "bytes", "1") > deviation(setting, "bytes", "10"), "{setting}");
    }
    let paper = |level| deviation("paper", "files", level);
    assert!(paper("4") < 1.25 * paper("files"), "{} of {}", paper("4"), paper("files"));
    for level in ["1", "4", "10", "files"] {
        for of in ["files", "bytes"] {
            let [rule, shipped] = ["paper", "default"].map(|s| deviation(s, of, level));
            assert!(shipped < rule, "{of}, level {level}: {shipped}, by the paper's rule {rule}");
        }
    }
    assert!(deviation("default", "files", "files") < 0.25, "220,000 files are nearly even");
}

/// Kosha §6.2: "with 4 redirection attempts and distribution level 4, the failure ratio remains near 0 for utilization as high as 60%".
/// A pool's groups take nearly all there is if trees are copied; what is made before they are full grows beyond what they keep.
#[test]
fn redirection_fills_nodes_and_groups() {
    let rows = rows(&quick(&["kosha-fig6"]).remove(0));
    let failed = |case, order, percent: &str| {
        let texts = [("case", case), ("order", order), ("utilization_percent", percent)];
        one(&rows, &texts).number("failed_percent")
    };
    assert!(failed("paper-4", "tree", "60") < 0.1, "{}", failed("paper-4", "tree", "60"));
    assert!(failed("default", "tree", "95") < 0.01, "{}", failed("default", "tree", "95"));
    assert!(failed("default", "mixed", "60") < 0.1, "{}", failed("default", "mixed", "60"));
    for order in ["tree", "mixed"] {
        let of = |case| {
            rows.iter().filter(move |row| row.text("case") == case && row.text("order") == order)
        };
        for case in ["paper-4", "default"] {
            let last = of(case).next_back().expect("a row").number("utilization_percent");
            assert!(last >= 94.0, "{case}, {order}: {last} % filled");
        }
    }
}
