//! Means, spreads and distributions.

/// Of some numbers.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Summary {
    /// How many there are.
    pub count: usize,
    /// Their mean.
    pub mean: f64,
    /// Their standard deviation (of all of them, not of a sample).
    pub deviation: f64,
    /// The smallest.
    pub least: f64,
    /// The largest.
    pub most: f64,
}

/// Summarises numbers; of none, everything is zero.
pub(crate) fn summary(numbers: impl IntoIterator<Item = f64>) -> Summary {
    let numbers: Vec<f64> = numbers.into_iter().collect();
    if numbers.is_empty() {
        return Summary::default();
    }
    let count = numbers.len() as f64;
    let mean = numbers.iter().sum::<f64>() / count;
    let variance = numbers.iter().map(|n| (n - mean).powi(2)).sum::<f64>() / count;
    Summary {
        count: numbers.len(),
        mean,
        deviation: variance.sqrt(),
        least: numbers.iter().copied().fold(f64::INFINITY, f64::min),
        most: numbers.iter().copied().fold(f64::NEG_INFINITY, f64::max),
    }
}

/// The value below which the share `share` of the numbers lies, between neighbours in
/// proportion. `sorted` ascends and is not empty.
pub(crate) fn percentile(sorted: &[f64], share: f64) -> f64 {
    let at = share.clamp(0.0, 1.0) * (sorted.len() - 1) as f64;
    let (below, above) = (at.floor() as usize, at.ceil() as usize);
    sorted[below] + (sorted[above] - sorted[below]) * (at - below as f64)
}

/// A cumulative distribution as the corners of its steps: at each value, the share of
/// all that is at most so large. Where there are many values only every so manieth makes
/// a step.
pub(crate) fn steps(mut numbers: Vec<f64>) -> Vec<(f64, f64)> {
    numbers.sort_by(f64::total_cmp);
    let count = numbers.len();
    let every = count.div_ceil(MAX_STEPS).max(1);
    let mut corners = Vec::new();
    let mut reached = 0.0;
    for (at, number) in numbers.iter().enumerate() {
        if (at + 1).is_multiple_of(every) || at + 1 == count {
            let share = (at + 1) as f64 / count as f64;
            corners.extend([(*number, reached), (*number, share)]);
            reached = share;
        }
    }
    corners
}

/// The most steps of a distribution: finer than a plot shows.
const MAX_STEPS: usize = 200;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_is_what_a_calculator_says() {
        let found = summary([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]);
        assert_eq!((found.mean, found.deviation), (5.0, 2.0));
        assert_eq!((found.least, found.most, found.count), (2.0, 9.0, 8));
        assert_eq!(summary([]), Summary::default());
    }

    #[test]
    fn percentiles_lie_between_neighbours() {
        let sorted = [1.0, 2.0, 3.0, 4.0];
        assert_eq!(percentile(&sorted, 0.0), 1.0);
        assert_eq!(percentile(&sorted, 0.5), 2.5);
        assert_eq!(percentile(&sorted, 1.0), 4.0);
    }

    #[test]
    fn a_distribution_climbs_from_nothing_to_all() {
        let corners = steps(vec![3.0, 1.0]);
        assert_eq!(corners, [(1.0, 0.0), (1.0, 0.5), (3.0, 0.5), (3.0, 1.0)]);
        let many = steps((0..1000).map(f64::from).collect());
        assert!(many.len() <= 2 * MAX_STEPS + 2 && many.last() == Some(&(999.0, 1.0)));
        assert!(steps(Vec::new()).is_empty());
    }
}
