//! Drawing a chart with plotters.

mod legend;

use plotters::prelude::*;

use super::{Axis, Chart, Ink, Mark, Point, Series};

pub(super) const WIDTH: u32 = 920;
const HEIGHT: u32 = 500;
/// The legend's column.
pub(super) const LEGEND_WIDTH: u32 = 236;
const TITLE_HEIGHT: u32 = 74;

const TITLE_PX: u32 = 21;
const SUBTITLE_PX: u32 = 14;
const LABEL_PX: u32 = 16;
const TICK_PX: u32 = 14;
pub(super) const LEGEND_PX: u32 = 14;

const GRID: RGBColor = RGBColor(225, 225, 225);
const FRAME: RGBColor = RGBColor(90, 90, 90);
const TEXT: RGBColor = RGBColor(30, 30, 30);
const SUBTITLE: RGBColor = RGBColor(95, 95, 95);

/// Half of a mark's width, pixels.
const MARK_PX: i32 = 4;
/// Half of a bar's width along the axis.
const BAR: f64 = 0.28;
/// Half of the width of an error bar's end, pixels.
const CAP_PX: i32 = 4;

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;
/// The frame with its axes.
type Framed<'a> = ChartContext<'a, SVGBackend<'a>, Cartesian2d<Axis, Axis>>;

/// Writing into a `String` does not fail.
pub(super) const NO_FAILURE: &str = "a string takes every drawing";

impl Ink {
    pub(super) fn rgb(self) -> RGBColor {
        match self {
            Ink::Black => RGBColor(0, 0, 0),
            Ink::Grey => RGBColor(130, 130, 130),
            Ink::Blue => RGBColor(0, 114, 178),
            Ink::Vermilion => RGBColor(213, 94, 0),
            Ink::Green => RGBColor(0, 158, 115),
            Ink::Purple => RGBColor(204, 121, 167),
            Ink::Orange => RGBColor(230, 159, 0),
            Ink::Sky => RGBColor(86, 180, 233),
        }
    }
}

pub(super) fn font(px: u32, color: RGBColor) -> TextStyle<'static> {
    ("Helvetica, Arial, sans-serif", px).into_font().color(&color)
}

impl Chart {
    /// The chart's picture.
    pub fn to_svg(&self) -> String {
        let mut svg = String::new();
        {
            let root = SVGBackend::with_string(&mut svg, (WIDTH, HEIGHT)).into_drawing_area();
            root.fill(&WHITE).expect(NO_FAILURE);
            let (head, body) = root.split_vertically(TITLE_HEIGHT);
            self.draw_head(&head);
            let (frame, legend_area) = body.split_horizontally(WIDTH - LEGEND_WIDTH);
            self.draw_frame(&frame);
            let visible = self.series.iter().filter(|series| self.places(series).next().is_some());
            legend::draw(&legend_area, visible);
            root.present().expect(NO_FAILURE);
        }
        svg
    }

    fn draw_head(&self, area: &Area<'_>) {
        let title = font(TITLE_PX, TEXT);
        area.draw(&Text::new(self.title.clone(), (22, 16), title)).expect(NO_FAILURE);
        let subtitle = font(SUBTITLE_PX, SUBTITLE);
        area.draw(&Text::new(self.subtitle.clone(), (22, 45), subtitle)).expect(NO_FAILURE);
    }

    fn draw_frame(&self, area: &Area<'_>) {
        let mut chart = ChartBuilder::on(area)
            .margin_right(14)
            .margin_left(14)
            .margin_bottom(10)
            .x_label_area_size(52)
            .y_label_area_size(66)
            .build_cartesian_2d(self.x.clone(), self.y.clone())
            .expect(NO_FAILURE);
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(GRID)
            .axis_style(FRAME)
            .x_label_formatter(&|place| self.x.number(*place))
            .y_label_formatter(&|place| self.y.number(*place))
            .x_labels(self.x.ticks.len())
            .y_labels(self.y.ticks.len())
            .label_style(font(TICK_PX, TEXT))
            .axis_desc_style(font(LABEL_PX, TEXT))
            .x_desc(&self.x.label)
            .y_desc(&self.y.label)
            .draw()
            .expect(NO_FAILURE);
        for series in &self.series {
            self.draw_series(area, &chart, series);
        }
        // A bar drawn later would cover them.
        for series in self.series.iter().filter(|series| series.mark == Mark::Bars) {
            self.draw_spreads(area, &chart, series, TEXT);
        }
    }

    /// The points of a series that the axes reach.
    fn places<'a>(&'a self, series: &'a Series) -> impl Iterator<Item = (f64, f64)> + 'a {
        let points = series.points.iter().map(|point| (point.x, point.y));
        points.filter(|(x, y)| self.x.holds(*x) && self.y.holds(*y))
    }

    /// `area` is larger than the frame: half of a mark at its edge stands outside.
    fn draw_series(&self, area: &Area<'_>, chart: &Framed<'_>, series: &Series) {
        let color = series.ink.rgb();
        // In pixels, so that dashes are equally long everywhere.
        let pixels: Vec<(i32, i32)> =
            self.places(series).map(|place| chart.backend_coord(&place)).collect();
        let pixels = relative(area, &pixels);
        if series.mark.has_line() && pixels.len() > 1 {
            draw_line(area, &pixels, series.mark, color);
        }
        if series.mark == Mark::Bars {
            self.draw_bars(area, chart, series);
        } else {
            self.draw_spreads(area, chart, series, color);
        }
        for at in pixels {
            draw_mark(area, at, series.mark, color);
        }
    }

    fn draw_bars(&self, area: &Area<'_>, chart: &Framed<'_>, series: &Series) {
        for (x, y) in self.places(series) {
            let corners = [(x - BAR, y), (x + BAR, self.y.from)];
            let corners = relative(area, &corners.map(|corner| chart.backend_coord(&corner)));
            let bar = Rectangle::new([corners[0], corners[1]], series.ink.rgb().filled());
            area.draw(&bar).expect(NO_FAILURE);
        }
    }

    fn draw_spreads(&self, area: &Area<'_>, chart: &Framed<'_>, series: &Series, color: RGBColor) {
        for point in &series.points {
            self.draw_spread(area, chart, point, color);
        }
    }

    fn draw_spread(&self, area: &Area<'_>, chart: &Framed<'_>, point: &Point, color: RGBColor) {
        let Some((low, high)) = point.spread else { return };
        if !self.x.holds(point.x) || !self.y.holds(point.y) || low.is_nan() || high.is_nan() {
            return;
        }
        let ends = [low, high].map(|end| chart.backend_coord(&(point.x, end)));
        let ends = relative(area, &ends);
        let bar = PathElement::new(vec![ends[0], ends[1]], color.stroke_width(1));
        area.draw(&bar).expect(NO_FAILURE);
        for (x, y) in ends {
            let cap = vec![(x - CAP_PX, y), (x + CAP_PX, y)];
            area.draw(&PathElement::new(cap, color.stroke_width(1))).expect(NO_FAILURE);
        }
    }
}

/// Pixels of the whole picture as pixels of `area`.
fn relative(area: &Area<'_>, pixels: &[(i32, i32)]) -> Vec<(i32, i32)> {
    let (x0, y0) = area.get_base_pixel();
    pixels.iter().map(|(x, y)| (x - x0, y - y0)).collect()
}

impl Mark {
    pub(super) fn has_line(self) -> bool {
        !matches!(self, Mark::Crosses | Mark::Pluses | Mark::Bars)
    }

    /// Pixels drawn and left out in turn.
    fn dash(self) -> Option<(f64, f64)> {
        match self {
            Mark::Dashed => Some((9.0, 5.0)),
            Mark::Dotted => Some((2.0, 4.0)),
            _ => None,
        }
    }
}

pub(super) fn draw_line(area: &Area<'_>, pixels: &[(i32, i32)], mark: Mark, color: RGBColor) {
    let style = color.stroke_width(2);
    let paths = match mark.dash() {
        None => vec![pixels.to_vec()],
        Some((on, off)) => dashes(pixels, on, off),
    };
    for path in paths {
        area.draw(&PathElement::new(path, style)).expect(NO_FAILURE);
    }
}

/// The pieces of a dashed path.
fn dashes(path: &[(i32, i32)], on: f64, off: f64) -> Vec<Vec<(i32, i32)>> {
    let mut pieces = Vec::new();
    let (mut drawing, mut left) = (true, on);
    let mut piece = vec![path[0]];
    for ends in path.windows(2) {
        let [a, b] = [ends[0], ends[1]].map(|(x, y)| (f64::from(x), f64::from(y)));
        let length = (b.0 - a.0).hypot(b.1 - a.1);
        let mut at = 0.0;
        while length - at > left {
            at += left;
            let share = at / length;
            let here = (a.0 + (b.0 - a.0) * share, a.1 + (b.1 - a.1) * share);
            let here = (here.0.round() as i32, here.1.round() as i32);
            if drawing {
                piece.push(here);
                pieces.push(std::mem::take(&mut piece));
            } else {
                piece = vec![here];
            }
            drawing = !drawing;
            left = if drawing { on } else { off };
        }
        left -= length - at;
        if drawing {
            piece.push(ends[1]);
        }
    }
    if piece.len() > 1 {
        pieces.push(piece);
    }
    pieces
}

pub(super) fn draw_mark(area: &Area<'_>, (x, y): (i32, i32), mark: Mark, color: RGBColor) {
    let m = MARK_PX;
    let filled = color.filled();
    let line = color.stroke_width(2);
    let stroke = |from: (i32, i32), to: (i32, i32)| {
        area.draw(&PathElement::new(vec![from, to], line)).expect(NO_FAILURE);
    };
    match mark {
        Mark::Line | Mark::Dashed | Mark::Dotted | Mark::Bars => {}
        Mark::Discs => area.draw(&Circle::new((x, y), m, filled)).expect(NO_FAILURE),
        Mark::Squares => {
            let ends = [(x - m, y - m), (x + m, y + m)];
            area.draw(&Rectangle::new(ends, WHITE.filled())).expect(NO_FAILURE);
            area.draw(&Rectangle::new(ends, line)).expect(NO_FAILURE);
        }
        Mark::Triangles => {
            let m = m + 1;
            let corners = vec![(x, y - m), (x - m, y + m - 1), (x + m, y + m - 1)];
            area.draw(&Polygon::new(corners, filled)).expect(NO_FAILURE);
        }
        Mark::Crosses => {
            stroke((x - m, y - m), (x + m, y + m));
            stroke((x - m, y + m), (x + m, y - m));
        }
        Mark::Pluses => {
            stroke((x - m, y), (x + m, y));
            stroke((x, y - m), (x, y + m));
        }
    }
}
