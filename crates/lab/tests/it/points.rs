//! The points of an outcome, read back from its CSV.

use std::sync::Mutex;

use atoll_lab::{Options, Outcome, Silent, run};

/// A line of a CSV file.
pub(crate) struct Row {
    header: Vec<String>,
    fields: Vec<String>,
}

impl Row {
    /// A field as text.
    #[track_caller]
    pub(crate) fn text(&self, column: &str) -> &str {
        let at = self.header.iter().position(|name| name == column);
        &self.fields[at.unwrap_or_else(|| panic!("no column {column} in {:?}", self.header))]
    }

    /// A field as a number.
    #[track_caller]
    pub(crate) fn number(&self, column: &str) -> f64 {
        let text = self.text(column);
        text.parse().unwrap_or_else(|_| panic!("{column} is {text:?}"))
    }
}

/// The lines of an outcome's CSV.
pub(crate) fn rows(outcome: &Outcome) -> Vec<Row> {
    let split = |line: &str| line.split(',').map(str::to_owned).collect::<Vec<_>>();
    let mut lines = outcome.csv.text().lines();
    let header = split(lines.next().expect("a header"));
    lines.map(|line| Row { header: header.clone(), fields: split(line) }).collect()
}

/// The quick form of some experiments, run one after another: each is parallel in itself.
pub(crate) fn quick(names: &[&str]) -> Vec<Outcome> {
    quick_with(names, Options::default())
}

/// The same with other seeds, or more of them.
pub(crate) fn quick_with(names: &[&str], options: Options) -> Vec<Outcome> {
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock();
    let options = Options { quick: true, ..options };
    let outcomes = run(names, &options, &Silent).expect("the experiments run");
    assert_eq!(outcomes.len(), names.len());
    outcomes
}
