//! Charts as data, and their pictures as SVG.
//!
//! A [`Chart`] says what is plotted; [`Chart::to_svg`] draws it: the data in one frame
//! with a light grid, the legend beside the frame where it can cover nothing (a series of
//! which nothing is to be seen has no entry). Colours
//! are those of M. Okabe and K. Ito, "Color Universal Design" (2008), and every series
//! has a mark or a dash of its own besides, so that a chart reads in grey as well.
//!
//! **Invariant:** equal charts give equal bytes.
//!
//! It does not know what the numbers mean.

mod axis;
mod draw;

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

impl Series {
    /// A series of these points.
    pub fn new(
        name: impl Into<String>,
        ink: Ink,
        mark: Mark,
        points: impl IntoIterator<Item = Point>,
    ) -> Series {
        Series { name: name.into(), ink, mark, points: points.into_iter().collect() }
    }
}

/// The highest point of all, error bars included; zero if there is none above it.
pub fn highest(series: &[Series]) -> f64 {
    let points = series.iter().flat_map(|series| &series.points);
    points.map(|point| point.spread.map_or(point.y, |(_, high)| high)).fold(0.0, f64::max)
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
    /// Bars from the lower end of the axis; of stacked ones the highest comes first.
    Bars,
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
    fn a_series_without_a_point_in_the_frame_is_not_in_the_legend() {
        let mut empty = chart();
        empty.series[0].points = vec![Point::new(1e9, 1.0)];
        let svg = empty.to_svg();
        assert!(!svg.contains(">\nline\n") && svg.contains(">\ncrosses\n"), "{svg}");
        assert!(chart().to_svg().contains(">\nline\n"));
    }

    #[test]
    fn the_highest_point_may_be_the_end_of_a_bar() {
        let mut series = chart().series;
        assert_eq!(highest(&series), 3.0);
        series[0].points.push(Point::spread(1.0, 2.5, 0.0, 4.5));
        assert_eq!(highest(&series), 4.5);
        assert_eq!(highest(&[]), 0.0);
    }

    #[test]
    fn bars_stand_over_their_names() {
        let mut bars = chart();
        bars.x = Axis::named("systems", &["ext2", "TFS"]);
        bars.series = vec![Series::new(
            "copy",
            Ink::Blue,
            Mark::Bars,
            [Point::new(1.0, 2.0), Point::new(2.0, 1.0)],
        )];
        let svg = bars.to_svg();
        assert!(svg.contains(">\next2\n") && svg.contains(">\nTFS\n"), "{svg}");
        let color = Ink::Blue.rgb();
        let fill = format!("fill=\"#{:02X}{:02X}{:02X}\"", color.0, color.1, color.2);
        assert_eq!(svg.matches(&fill).count(), 3, "two bars and the legend's");
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
