//! Charts as data, and their pictures as SVG.
//!
//! A [`Chart`] says what is plotted; [`Chart::to_svg`] draws it: the data in one frame
//! with a light grid, the legend beside the frame where it can cover nothing. Colours
//! are those of M. Okabe and K. Ito, "Color Universal Design" (2008), and every series
//! has a mark or a dash of its own besides, so that a chart reads in grey as well.
//!
//! **Invariant:** equal charts give equal bytes.
//!
//! It does not know what the numbers mean.

mod axis;
mod draw;
mod legend;

pub use axis::{Axis, Scale};

/// A picture of some series over two axes.
#[derive(Clone, Debug)]
pub struct Chart {
    /// Above the frame.
    pub title: String,
    /// Below the title: how it was measured.
    pub subtitle: String,
    /// Left to right.
    pub x: Axis,
    /// Upwards.
    pub y: Axis,
    /// In the order of the legend; later ones are drawn over earlier ones.
    pub series: Vec<Series>,
}

/// Some points that belong together.
#[derive(Clone, Debug)]
pub struct Series {
    /// What the legend says; long names are wrapped there.
    pub name: String,
    /// Its colour.
    pub ink: Ink,
    /// Its points or lines.
    pub mark: Mark,
    /// Left to right.
    pub points: Vec<Point>,
}

/// A value, perhaps with how far it spreads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Where.
    pub x: f64,
    /// How much.
    pub y: f64,
    /// The ends of the error bar.
    pub spread: Option<(f64, f64)>,
}

impl Point {
    /// A value without an error bar.
    pub fn new(x: f64, y: f64) -> Point {
        Point { x, y, spread: None }
    }

    /// A value with an error bar from `low` to `high`.
    pub fn spread(x: f64, y: f64, low: f64, high: f64) -> Point {
        Point { x, y, spread: Some((low, high)) }
    }
}

/// Colours that people with any kind of colour vision tell apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ink {
    /// What the paper says.
    Black,
    /// What theory expects.
    Grey,
    /// The paper's settings.
    Blue,
    /// The settings as shipped.
    Vermilion,
    /// A third setting.
    Green,
    /// A fourth.
    Purple,
    /// A fifth.
    Orange,
    /// A sixth.
    Sky,
}

/// How a series is drawn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mark {
    /// A line.
    Line,
    /// A dashed line.
    Dashed,
    /// A line of dots.
    Dotted,
    /// A line with discs.
    Discs,
    /// A line with open squares.
    Squares,
    /// A line with triangles.
    Triangles,
    /// Crosses alone, as for numbers read from a paper.
    Crosses,
    /// Plus signs alone.
    Pluses,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart() -> Chart {
        let points = |offset: f64| (1..9).map(|n| Point::new(f64::from(n), offset)).collect();
        let series = |name: &str, mark, offset| Series {
            name: name.into(),
            ink: Ink::Blue,
            mark,
            points: points(offset),
        };
        Chart {
            title: "Blocks & <servers>".into(),
            subtitle: "one run".into(),
            x: Axis::linear("servers", 0.0, 10.0),
            y: Axis::linear("blocks", 0.0, 5.0),
            series: vec![
                series("line", Mark::Line, 1.0),
                series("a name that is much too long for one line of it", Mark::Discs, 2.0),
                series("crosses", Mark::Crosses, 3.0),
            ],
        }
    }

    #[test]
    fn a_chart_is_well_formed_and_says_its_names() {
        let svg = chart().to_svg();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        for part in ["&lt;servers&gt;", "one run", "crosses", "much too"] {
            assert!(svg.contains(part), "{part}");
        }
        assert_eq!(svg.matches("<text").count(), svg.matches("</text>").count());
    }

    #[test]
    fn equal_charts_give_equal_bytes() {
        assert_eq!(chart().to_svg(), chart().to_svg());
    }

    #[test]
    fn points_outside_the_frame_are_not_drawn() {
        let mut wild = chart();
        wild.series[2].points = vec![Point::new(3.0, 1e9), Point::new(f64::NAN, 1.0)];
        let mut none = chart();
        none.series[2].points.clear();
        assert_eq!(wild.to_svg(), none.to_svg());
    }
}
