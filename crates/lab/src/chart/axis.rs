//! An axis: its label, its ends, its scale and where its ticks stand.

use std::ops::Range;

use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged};

/// How values are laid out along an axis.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scale {
    /// Evenly.
    Linear,
    /// By logarithm; values are positive.
    Log,
}

/// One axis of a chart.
#[derive(Clone, Debug)]
pub struct Axis {
    /// What it measures, with the unit.
    pub label: String,
    /// Its lower end.
    pub from: f64,
    /// Its upper end.
    pub to: f64,
    /// How values lie between.
    pub scale: Scale,
    /// The values with a tick, a number and a line of the grid.
    pub ticks: Vec<f64>,
    /// What stands at 1, 2, 3, … instead of numbers, if anything does.
    pub names: Vec<String>,
}

/// About so many ticks on an axis.
const TICKS: f64 = 6.0;

impl Axis {
    /// A linear axis with round ticks. Its ends stay where they are.
    pub fn linear(label: &str, from: f64, to: f64) -> Axis {
        let step = round_step((to - from) / TICKS);
        let first = (from / step).ceil() as i64;
        let last = (to / step + 1e-9).floor() as i64;
        let ticks = (first..=last).map(|n| n as f64 * step).collect();
        Axis { label: label.into(), from, to, scale: Scale::Linear, ticks, names: Vec::new() }
    }

    /// A linear axis from zero that holds `most`, ending at a tick.
    pub fn up_to(label: &str, most: f64) -> Axis {
        let most = if most > 0.0 { most } else { 1.0 };
        let step = round_step(most / TICKS);
        Axis::linear(label, 0.0, (most / step - 1e-9).ceil().max(1.0) * step)
    }

    /// An axis of things without numbers: the first stands at 1, the next at 2.
    pub fn named(label: &str, names: &[&str]) -> Axis {
        let ticks = (1..=names.len()).map(|n| n as f64).collect();
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let to = names.len() as f64 + 0.5;
        Axis { label: label.into(), from: 0.5, to, scale: Scale::Linear, ticks, names }
    }

    /// A logarithmic axis that is a little longer than `from..=to` at both ends, with
    /// these ticks.
    pub fn log(label: &str, from: f64, to: f64, ticks: Vec<f64>) -> Axis {
        let margin = (to / from).powf(0.03).max(1.05);
        let (from, to) = (from / margin, to * margin);
        Axis { label: label.into(), from, to, scale: Scale::Log, ticks, names: Vec::new() }
    }

    /// A logarithmic axis with ticks at 1, 2, 5, 10, … that holds `least` and `most`, ending
    /// at a tick.
    pub fn log_over(label: &str, least: f64, most: f64) -> Axis {
        let least = if least > 0.0 { least } else { 1.0 };
        let most = most.max(least * 2.0);
        let decades = least.log10().floor() as i32..=most.log10().ceil() as i32;
        let round: Vec<f64> =
            decades.flat_map(|n| [1.0, 2.0, 5.0].map(|first| first * 10f64.powi(n))).collect();
        let first = round.iter().rposition(|tick| *tick <= least * (1.0 + 1e-9)).unwrap_or(0);
        let last = round.iter().position(|tick| *tick >= most * (1.0 - 1e-9));
        let ticks = round[first..=last.unwrap_or(round.len() - 1)].to_vec();
        Axis::log(label, ticks[0], ticks[ticks.len() - 1], ticks.clone())
    }

    /// Whether the axis reaches this value.
    pub(super) fn holds(&self, value: f64) -> bool {
        value >= self.from && value <= self.to
    }

    /// How far along the axis a value stands, from 0 to 1.
    fn share(&self, value: f64) -> f64 {
        let place = |value: f64| match self.scale {
            Scale::Linear => value,
            Scale::Log => value.max(f64::MIN_POSITIVE).ln(),
        };
        (place(value) - place(self.from)) / (place(self.to) - place(self.from))
    }

    /// The number at a tick, or its name.
    pub(super) fn number(&self, value: f64) -> String {
        if !self.names.is_empty() {
            return self.names.get((value as usize).wrapping_sub(1)).cloned().unwrap_or_default();
        }
        let widest = self.ticks.iter().copied().fold(0.0, f64::max);
        let decimals = self.ticks.iter().map(|tick| decimals(*tick, widest)).max().unwrap_or(0);
        match self.scale {
            Scale::Linear => grouped(&format!("{value:.decimals$}")),
            Scale::Log => grouped(&format!("{value:.*}", self::decimals(value, value))),
        }
    }
}

impl Ranged for Axis {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        let length = f64::from(limit.1 - limit.0);
        limit.0 + (self.share(value.clamp(self.from, self.to)) * length).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        if hint.weight().allow_light_points() {
            return Vec::new();
        }
        self.ticks.iter().copied().filter(|tick| self.holds(*tick)).collect()
    }

    fn range(&self) -> Range<f64> {
        self.from..self.to
    }
}

/// How many decimals show `value` beside numbers as large as `widest`.
fn decimals(value: f64, widest: f64) -> usize {
    let unit = widest.max(1e-9) * 1e-4;
    (0..6)
        .find(|n| {
            let scale = 10f64.powi(*n as i32);
            ((value * scale).round() / scale - value).abs() < unit
        })
        .unwrap_or(6)
}

/// Thousands set apart.
fn grouped(number: &str) -> String {
    let (whole, rest) = number.split_at(number.find('.').unwrap_or(number.len()));
    let digits = whole.trim_start_matches('-');
    let mut out = String::from(&whole[..whole.len() - digits.len()]);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out + rest
}

/// The next of 1, 2, 5, 10, … that is at least about `step`.
fn round_step(step: f64) -> f64 {
    let power = 10f64.powf(step.log10().floor());
    let first = [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().find(|n| n * power >= step * 0.95);
    first.unwrap_or(10.0) * power
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_end_where_the_axis_does() {
        let axis = Axis::up_to("x", 6.7);
        assert_eq!((axis.to, axis.ticks.first(), axis.ticks.last()), (8.0, Some(&0.0), Some(&8.0)));
        let axis = Axis::up_to("x", 0.0163);
        assert_eq!(axis.to, 0.02);
        assert_eq!(axis.number(0.005), "0.005");
        assert_eq!(Axis::up_to("x", 0.0).to, 1.0);
    }

    #[test]
    fn a_logarithmic_axis_is_as_long_as_its_values() {
        let axis = Axis::log_over("x", 17.0, 1160.0);
        assert_eq!(axis.ticks, [10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0]);
        assert!(axis.holds(17.0) && axis.holds(1160.0));
        assert_eq!(Axis::log_over("x", 10.0, 100.0).ticks, [10.0, 20.0, 50.0, 100.0]);
        assert_eq!(Axis::log_over("x", 0.0, 0.0).ticks, [1.0, 2.0]);
        assert_eq!(Axis::log_over("x", 0.2, 0.3).ticks, [0.2, 0.5]);
    }

    #[test]
    fn numbers_are_short() {
        let axis = Axis::log("x", 16.0, 4096.0, vec![16.0, 64.0, 4096.0]);
        assert_eq!(axis.number(4096.0), "4,096");
        assert_eq!(axis.number(0.5), "0.5");
        assert_eq!(Axis::up_to("x", 5e6).number(1e6), "1,000,000");
    }

    #[test]
    fn a_value_outside_has_no_place() {
        let axis = Axis::log("x", 1.0, 100.0, vec![1.0, 10.0, 100.0]);
        assert!(!axis.holds(0.0) && !axis.holds(200.0) && !axis.holds(f64::NAN));
        assert_eq!(axis.map(&10.0, (0, 200)), 100);
        assert_eq!(axis.map(&0.0, (0, 200)), 0);
    }
}
