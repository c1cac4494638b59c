//! What an experiment found: a table for people, points for other programs, a chart.

use std::fmt::Write as _;

use serde::Serialize;

use crate::chart::Chart;

/// What an experiment found.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The experiment.
    pub name: &'static str,
    /// What it measured.
    pub title: String,
    /// Where the paper says so.
    pub source: &'static str,
    /// The size of the ring and the work done, in words.
    pub setup: String,
    /// The seeds of the runs.
    pub seeds: Vec<u64>,
    /// Quantity by quantity.
    pub comparison: Vec<Comparison>,
    /// What a reader of the table should know.
    pub notes: Vec<String>,
    /// Every point.
    pub csv: Csv,
    /// The picture.
    pub chart: Chart,
}

/// One line of the table.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Comparison {
    /// What is compared.
    pub quantity: String,
    /// The paper's number.
    pub paper: String,
    /// Atoll's, with what Atoll adds to the paper switched off.
    pub paper_settings: String,
    /// Atoll's, as shipped.
    pub default_settings: String,
}

impl Comparison {
    /// A line of the table.
    pub fn new(
        quantity: impl Into<String>,
        paper: impl Into<String>,
        paper_settings: impl Into<String>,
        default_settings: impl Into<String>,
    ) -> Comparison {
        Comparison {
            quantity: quantity.into(),
            paper: paper.into(),
            paper_settings: paper_settings.into(),
            default_settings: default_settings.into(),
        }
    }
}

/// Points, one a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Csv {
    columns: usize,
    text: String,
}

impl Csv {
    /// No points yet; `header` names the columns.
    pub fn new(header: &[&str]) -> Csv {
        Csv { columns: header.len(), text: header.join(",") + "\n" }
    }

    /// Adds a point.
    ///
    /// # Panics
    /// If it does not have as many fields as there are columns.
    pub fn row(&mut self, fields: &[&dyn std::fmt::Display]) {
        assert_eq!(fields.len(), self.columns, "a row has as many fields as the header");
        for (i, field) in fields.iter().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            write!(self.text, "{comma}{field}").expect("a String takes everything");
        }
        self.text.push('\n');
    }

    /// The whole file.
    pub fn text(&self) -> &str {
        &self.text
    }
}

const HEADINGS: [&str; 4] = ["", "paper", "Atoll (paper's settings)", "Atoll (default settings)"];

impl Outcome {
    fn cells(&self) -> impl Iterator<Item = [&str; 4]> {
        self.comparison
            .iter()
            .map(|c| [&*c.quantity, &*c.paper, &*c.paper_settings, &*c.default_settings])
    }

    /// The table in plain text, its columns aligned.
    pub fn table(&self) -> String {
        let mut widths = HEADINGS.map(|heading| heading.chars().count());
        for row in self.cells() {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = (*width).max(cell.chars().count());
            }
        }
        let mut out = String::new();
        for row in std::iter::once(HEADINGS).chain(self.cells()) {
            let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}"));
            let line = cells.collect::<Vec<String>>().join("  ");
            out.push_str(line.trim_end());
            out.push('\n');
        }
        out
    }

    /// The table in Markdown.
    pub fn markdown(&self) -> String {
        let mut out = format!("| {} |\n|---|---|---|---|\n", HEADINGS.join(" | "));
        for row in self.cells() {
            writeln!(out, "| {} |", row.join(" | ")).expect("a String takes everything");
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chart::Axis;

    fn outcome() -> Outcome {
        Outcome {
            name: "x",
            title: "x".into(),
            source: "x",
            setup: "x".into(),
            seeds: vec![1],
            comparison: vec![
                Comparison::new("RPCs at 4,096", "6.7", "5.1", "1.9"),
                Comparison::new("most", "10", "9", "4"),
            ],
            notes: Vec::new(),
            csv: Csv::new(&["a"]),
            chart: Chart {
                title: String::new(),
                subtitle: String::new(),
                x: Axis::linear("x", 0.0, 1.0),
                y: Axis::linear("y", 0.0, 1.0),
                series: Vec::new(),
            },
        }
    }

    #[test]
    fn columns_are_aligned() {
        let table = outcome().table();
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines.len(), 3);
        let at = lines[0].find("Atoll (default").expect("a heading");
        assert_eq!(&lines[1][at..], "1.9");
        assert_eq!(&lines[2][at..], "4");
    }

    #[test]
    fn a_row_has_a_field_for_every_column() {
        let mut csv = Csv::new(&["nodes", "mean"]);
        csv.row(&[&16, &1.5]);
        assert_eq!(csv.text(), "nodes,mean\n16,1.5\n");
        let short = std::panic::catch_unwind(move || csv.row(&[&16]));
        assert!(short.is_err());
    }
}
