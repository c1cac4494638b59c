//! Whether nodes said to follow a key are near enough to it.
//!
//! Positions are hashes, so the nodes after a key lie as events of a Poisson process do:
//! the m-th at m/N on average, and hardly ever much farther. Liars can name each other,
//! but they cannot choose where they are (CFS §4.4): a list of liars alone, one in five of
//! all nodes, is five times as sparse as a true one.

/// A list is judged by so many of its nodes at most: enough that a fifth of the nodes
/// cannot look like all of them.
const JUDGED_BY: usize = 24;
/// However long the lists of this ring are, one of so many nodes is long enough to judge.
const MOST_WANTED: f64 = 16.0;

/// How strictly a list is judged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Doubt {
    /// A true list is accepted even if N is thought to be twice its true value.
    Least,
    /// A true list is refused once in a thousand times.
    Little,
    /// A true list is refused once in ten times, a false one hardly ever accepted.
    Much,
}

/// The size of a ring and of its lists.
#[derive(Clone, Copy, Debug)]
pub(super) struct Density {
    /// N, estimated from r nodes and thus known to about 1/√r.
    pub nodes: f64,
    /// The paper's r: how long successor lists are.
    pub list_length: f64,
    /// How many nodes are named at least when a node names a root.
    pub listed: f64,
}

impl Density {
    /// Whether nodes at these distances after a key, in order, each a fraction of the
    /// circle, may be all there are.
    pub(super) fn allows(&self, distances: &[f64], doubt: Doubt) -> bool {
        let enough = (self.nodes / 2.0).min(self.listed).min(MOST_WANTED) as usize;
        let judged = distances.len().min(JUDGED_BY);
        let Some(first) = distances.first() else { return false };
        judged >= enough
            && first * self.nodes <= self.farthest(1, doubt)
            && distances[judged - 1] * self.nodes <= self.farthest(judged, doubt)
    }

    /// The m-th of m events of a Poisson process of rate 1 comes at a time of the Gamma
    /// distribution of mean m and deviation √m; this is about its 99.9 % or 90 % quantile.
    fn farthest(&self, m: usize, doubt: Doubt) -> f64 {
        let m = m as f64;
        match doubt {
            Doubt::Least => (m * 2.5).max(self.farthest(1, Doubt::Little)),
            Doubt::Little => {
                (m + 3.0 * m.sqrt() + 3.0) * (1.0 + 1.0 / self.list_length.max(1.0).sqrt())
            }
            Doubt::Much => m + m.sqrt() + 2.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Distances of `count` nodes after a key, a `share` of which are named, on a ring of N.
    fn draw(state: &mut u64, count: usize, nodes: f64, share: f64) -> Vec<f64> {
        let mut unit = || {
            *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            ((*state >> 11) as f64 + 0.5) / (1u64 << 53) as f64
        };
        let mut at = 0.0;
        let mut gap = |at: &mut f64| {
            *at -= unit().ln() / (nodes * share);
            *at
        };
        (0..count).map(|_| gap(&mut at)).collect()
    }

    fn ring(nodes: f64) -> Density {
        Density { nodes, list_length: 16.0, listed: 8.0 }
    }

    fn accepted(count: usize, share: f64, doubt: Doubt) -> usize {
        let mut state = 7;
        (0..1000)
            .filter(|_| ring(1000.0).allows(&draw(&mut state, count, 1000.0, share), doubt))
            .count()
    }

    #[test]
    fn true_lists_are_plausible() {
        for count in [8, 11, 16, 17, 40] {
            let kept = accepted(count, 1.0, Doubt::Little);
            assert!(kept >= 998, "{count} nodes: {kept} of 1,000");
            let kept = accepted(count, 1.0, Doubt::Much);
            assert!(kept >= 850, "{count} nodes: {kept} of 1,000");
        }
    }

    #[test]
    fn lists_of_liars_alone_are_not_plausible() {
        let slipped = accepted(17, 0.2, Doubt::Little);
        assert!(slipped <= 20, "{slipped} of 1,000");
        let slipped = accepted(17, 0.2, Doubt::Much);
        assert!(slipped <= 2, "{slipped} of 1,000");
    }

    #[test]
    fn a_short_list_says_too_little_on_a_large_ring_and_enough_on_a_small_one() {
        assert!(!ring(1000.0).allows(&[0.000_1, 0.000_2], Doubt::Little));
        assert!(ring(3.0).allows(&[0.1, 0.5], Doubt::Little));
        assert!(!ring(1.0).allows(&[], Doubt::Little));
    }

    #[test]
    fn a_root_far_from_the_key_is_not_believed_however_dense_its_successors() {
        let far: Vec<f64> = (0..16).map(|n| 0.012 + 0.000_5 * f64::from(n)).collect();
        assert!(!ring(1000.0).allows(&far, Doubt::Little));
    }
}
