//! The legend: a column beside the frame.

use plotters::prelude::*;

use super::{LEGEND_PX, LEGEND_WIDTH, NO_FAILURE, draw_line, draw_mark, font};
use crate::chart::{Mark, Series};

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

const SAMPLE_PX: i32 = 34;
const LINE_PX: i32 = 18;
const GAP_PX: i32 = 9;
/// A character of the legend's font is about so wide, as a share of its size.
const CHARACTER_WIDTH: f64 = 0.53;

const TEXT: RGBColor = RGBColor(30, 30, 30);

pub(super) fn draw<'a>(area: &Area<'_>, series: impl Iterator<Item = &'a Series>) {
    let room = f64::from(LEGEND_WIDTH) - f64::from(SAMPLE_PX) - 18.0;
    let characters = (room / (f64::from(LEGEND_PX) * CHARACTER_WIDTH)) as usize;
    let mut y = 8;
    for entry in series {
        let color = entry.ink.rgb();
        let middle = y + LEGEND_PX as i32 / 2 - 1;
        if entry.mark == Mark::Bars {
            let ends = [(2, middle - 5), (2 + SAMPLE_PX - 8, middle + 6)];
            area.draw(&Rectangle::new(ends, color.filled())).expect(NO_FAILURE);
        }
        if entry.mark.has_line() {
            draw_line(area, &[(2, middle), (2 + SAMPLE_PX - 8, middle)], entry.mark, color);
        }
        draw_mark(area, (2 + (SAMPLE_PX - 8) / 2, middle), entry.mark, color);
        for line in wrap(&entry.name, characters) {
            let text = Text::new(line, (SAMPLE_PX + 4, y), font(LEGEND_PX, TEXT));
            area.draw(&text).expect(NO_FAILURE);
            y += LINE_PX;
        }
        y += GAP_PX;
    }
}

/// Breaks at blanks into lines of at most so many characters, where that is possible.
fn wrap(text: &str, characters: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= characters => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_break_at_blanks() {
        assert_eq!(wrap("one two three", 7), ["one two", "three"]);
        assert_eq!(wrap("extraordinary one", 7), ["extraordinary", "one"]);
        assert!(wrap("", 7).is_empty());
    }
}
