//! Which chunks of the disk transparent data keeps away from (§3.3).
//!
//! Ordinary files are allocated in few places, and there again and again: "TFS identifies and
//! avoids using the hot spots in the file system". A chunk is an eighth of a block group; a
//! histogram counts the blocks allocated to ordinary files in each. If they are allocated at a
//! rate α, and a share f of the allocations falls into avoided chunks, transparent data is
//! overwritten at a rate β = (1 − f)·α. Given the rate β that is wanted, f = 1 − β/α, and the
//! chunks to avoid are "the smallest set … responsible for a given fraction of the allocations".
//!
//! The paper does not say how long the past counts. Here counts and the time they cover are
//! halved whenever that time has reached two weeks ([`WINDOW_SECS`]): a place that was hot a
//! month ago is forgotten, and the rate α stays what it was.
//!
//! **Invariant:** with no allocations, or a target above their rate, nothing is avoided; with a
//! target of zero everything is that was ever allocated in.
//!
//! It knows nothing of disks: the file system counts, keeps the counts and asks again.

/// The histogram covers at most so much time.
pub const WINDOW_SECS: f64 = 14.0 * 86_400.0;

/// The share f of the allocations that avoided chunks must take, so that at an allocation
/// rate `rate` (α) no more than `target` (β) fall elsewhere; both in the same unit.
pub fn share_to_avoid(target: f64, rate: f64) -> f64 {
    if rate > 0.0 && target < rate { 1.0 - target.max(0.0) / rate } else { 0.0 }
}

/// The smallest set of chunks in which at least a share `share` of all allocations fell: for
/// each chunk, whether it is one of them. Of equal ones the first.
pub fn hottest(histogram: &[f32], share: f64) -> Vec<bool> {
    let mut avoided = vec![false; histogram.len()];
    let all: f64 = histogram.iter().map(|count| f64::from(*count)).sum();
    let wanted = share.min(1.0) * all;
    if share.is_nan() || wanted <= 0.0 {
        return avoided;
    }
    let mut chunks: Vec<usize> = (0..histogram.len()).filter(|at| histogram[*at] > 0.0).collect();
    chunks.sort_by(|a, b| histogram[*b].total_cmp(&histogram[*a]).then(a.cmp(b)));
    let mut taken = 0.0;
    for chunk in chunks {
        // Of all of them none may be left out because the sum was rounded.
        if taken >= wanted && share < 1.0 {
            break;
        }
        taken += f64::from(histogram[chunk]);
        avoided[chunk] = true;
    }
    avoided
}

/// By how much counts and the time they cover are to be multiplied now.
pub fn aging(observed_secs: f64) -> f64 {
    if observed_secs >= WINDOW_SECS { 0.5 } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(avoided: &[bool]) -> usize {
        avoided.iter().filter(|avoided| **avoided).count()
    }

    #[test]
    fn f_is_one_minus_beta_over_alpha() {
        assert_eq!(share_to_avoid(100.0, 1000.0), 0.9);
        // "If f is set to 0 … transparent data will be overwritten at a rate approximately
        // equal to α."
        assert_eq!(share_to_avoid(1000.0, 1000.0), 0.0);
        assert_eq!(share_to_avoid(2000.0, 1000.0), 0.0);
        assert_eq!(share_to_avoid(0.0, 1000.0), 1.0);
        assert_eq!(share_to_avoid(100.0, 0.0), 0.0, "nobody writes");
        assert_eq!(share_to_avoid(-5.0, 10.0), 1.0);
    }

    #[test]
    fn the_smallest_set_that_takes_the_share_is_avoided() {
        let histogram = [5.0, 0.0, 80.0, 10.0, 5.0];
        assert_eq!(hottest(&histogram, 0.0), [false; 5]);
        assert_eq!(hottest(&histogram, 0.5), [false, false, true, false, false]);
        assert_eq!(hottest(&histogram, 0.8), [false, false, true, false, false]);
        assert_eq!(hottest(&histogram, 0.81), [false, false, true, true, false]);
        assert_eq!(hottest(&histogram, 0.95), [true, false, true, true, false]);
        assert_eq!(hottest(&histogram, 1.0), [true, false, true, true, true]);
    }

    #[test]
    fn what_falls_elsewhere_is_within_the_target_and_one_chunk_less_would_not_be() {
        let histogram: Vec<f32> = (0..100u16).map(|n| f32::from(n % 17 * (n % 5))).collect();
        let all: f64 = histogram.iter().map(|n| f64::from(*n)).sum();
        for target in [1.0, 10.0, 100.0, 500.0] {
            let avoided = hottest(&histogram, share_to_avoid(target, all));
            let pairs = || histogram.iter().zip(&avoided);
            let outside: f64 =
                pairs().filter(|(_, avoided)| !**avoided).map(|(n, _)| f64::from(*n)).sum();
            assert!(outside <= target + 1e-6, "{outside} of {target}");
            let coldest = pairs().filter(|(_, avoided)| **avoided).map(|(n, _)| f64::from(*n));
            let coldest = coldest.fold(f64::INFINITY, f64::min);
            assert!(outside + coldest > target - 1e-6, "{outside} + {coldest} of {target}");
        }
    }

    #[test]
    fn strange_numbers_are_survived() {
        assert!(hottest(&[], 0.5).is_empty());
        assert_eq!(count(&hottest(&[0.0; 4], 1.0)), 0);
        assert_eq!(count(&hottest(&[1.0, 2.0], f64::NAN)), 0);
        assert_eq!(count(&hottest(&[1.0, 2.0], 7.0)), 2);
        assert_eq!(count(&hottest(&[f32::MAX; 3], 1.0)), 3);
    }

    #[test]
    fn the_past_is_forgotten_by_halves() {
        assert_eq!(aging(WINDOW_SECS - 1.0), 1.0);
        assert_eq!(aging(WINDOW_SECS), 0.5);
    }
}
