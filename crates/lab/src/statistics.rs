//! Means, spreads and distributions.

/// Of some numbers.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Summary {
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
pub fn summary(numbers: impl IntoIterator<Item = f64>) -> Summary {
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
pub fn percentile(sorted: &[f64], share: f64) -> f64 {
    let at = share.clamp(0.0, 1.0) * (sorted.len() - 1) as f64;
    let (below, above) = (at.floor() as usize, at.ceil() as usize);
    sorted[below] + (sorted[above] - sorted[below]) * (at - below as f64)
}

/// The steps of a cumulative distribution: each value with the share of all that is at
/// most so large. At most `points` of them, evenly chosen.
pub fn distribution(mut numbers: Vec<f64>, points: usize) -> Vec<(f64, f64)> {
    numbers.sort_by(f64::total_cmp);
    let count = numbers.len();
    let step = count.div_ceil(points.max(1)).max(1);
    let last = count.saturating_sub(1);
    (0..count)
        .filter(|at| at.is_multiple_of(step) || *at == last)
        .map(|at| (numbers[at], (at + 1) as f64 / count as f64))
        .collect()
}

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
    fn a_distribution_ends_at_one() {
        let steps = distribution(vec![3.0, 1.0, 2.0, 2.0], 100);
        assert_eq!(steps, [(1.0, 0.25), (2.0, 0.5), (2.0, 0.75), (3.0, 1.0)]);
        let thinned = distribution((0..1000).map(f64::from).collect(), 10);
        assert!(thinned.len() <= 11 && thinned.last() == Some(&(999.0, 1.0)));
    }
}
