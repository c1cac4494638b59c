//! The paper's rule: "the selected node is the one whose identifier is numerically closest to the key value" (Kosha §3.1), copies
//! are on "the neighboring K nodes in the node-identifier space" (§4.2), and a name is hashed again with a random salt
//! where there is no room (§3.3).
//!
//! Identifiers and keys are random: hashes of names that differ, which is the best case of the paper's rule. They have 64 bits
//! instead of 128.

use atoll_env::Env;

/// The nodes by their identifiers, ascending.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct NodeIds {
    ids: Vec<u64>,
}

impl NodeIds {
    /// So many nodes with random identifiers.
    pub(super) fn new(nodes: usize, random: &Env) -> NodeIds {
        let mut ids: Vec<u64> = (0..nodes).map(|_| random.random_u64()).collect();
        ids.sort_unstable();
        NodeIds { ids }
    }

    /// The nodes from the closest one to a key on, by their distance.
    pub(super) fn closest(&self, key: u64) -> impl Iterator<Item = usize> + '_ {
        let count = self.ids.len();
        let first = self.ids.partition_point(|id| *id < key);
        let (mut above, mut below) = (0, 0);
        std::iter::from_fn(move || {
            if above + below == count {
                return None;
            }
            let up = (first + above) % count;
            let down = (first + 2 * count - 1 - below) % count;
            let is_up = self.ids[up].wrapping_sub(key) <= key.wrapping_sub(self.ids[down]);
            *(if is_up { &mut above } else { &mut below }) += 1;
            Some(if is_up { up } else { down })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_closest_node_comes_first_also_around_zero() {
        let nodes = NodeIds { ids: vec![10, 100, 200, u64::MAX - 5] };
        let order = |key| nodes.closest(key).collect::<Vec<usize>>();
        assert_eq!(order(90), [1, 0, 3, 2]);
        assert_eq!(order(1), [3, 0, 1, 2]);
        assert_eq!(order(u64::MAX), [3, 0, 1, 2]);
        assert_eq!(order(199), [2, 1, 0, 3]);
    }
}
