//! Counting the answers of a replica set to a renewal, where the root does not answer or is not
//! believed: a majority of the set decides.

use atoll_overlay::Node;

use crate::client::Client;
use crate::placement::size_of;
use crate::rpc::OverQuota;
use crate::rpc::{RenewReply, RenewStatus, is_majority};

/// See the module.
pub(crate) struct Votes {
    wanted: u32,
    /// How many have each block, and how many do not.
    said: Vec<(u32, u32)>,
    is_refused: Vec<bool>,
    /// Why some are refused.
    pub over: Option<OverQuota>,
}

impl Votes {
    /// On `count` blocks of one replica set.
    pub(super) fn new(client: &Client, set: &[Node], count: usize) -> Votes {
        Votes::of_set(size_of(client, set), count)
    }

    fn of_set(size: usize, count: usize) -> Votes {
        let wanted = u32::try_from(size).expect("k is small");
        Votes { wanted, said: vec![(0, 0); count], is_refused: vec![false; count], over: None }
    }

    /// Counts a member's answer about the blocks with these numbers.
    pub(super) fn count(&mut self, indices: Vec<usize>, reply: &RenewReply) {
        self.over = self.over.or(reply.over);
        for (index, status) in indices.into_iter().zip(&reply.statuses) {
            let (has, lacks) = &mut self.said[index];
            *(if *status == RenewStatus::Lacking { lacks } else { has }) += 1;
            self.is_refused[index] |= *status == RenewStatus::OverQuota;
        }
    }

    /// One more member lacks a block.
    pub(super) fn lacks(&mut self, index: usize) {
        self.said[index].1 += 1;
    }

    /// How many have a block, and how many do not.
    pub(super) fn of(&self, index: usize) -> (usize, usize) {
        let (has, lacks) = self.said[index];
        (has as usize, lacks as usize)
    }

    /// As a root would say it of a block: a majority has it, a majority lacks it, or neither is
    /// known.
    pub(super) fn status(&self, index: usize) -> RenewStatus {
        let (has, lacks) = self.said[index];
        match is_majority(has, self.wanted) {
            true if self.is_refused[index] => RenewStatus::OverQuota,
            true => RenewStatus::Held,
            false if is_majority(lacks, self.wanted) => RenewStatus::Lacking,
            false => RenewStatus::Undecided,
        }
    }

    /// As a root would answer.
    pub(super) fn result(&self) -> RenewReply {
        let statuses = (0..self.said.len()).map(|i| self.status(i)).collect();
        RenewReply { statuses, over: self.over }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_majority_decides_and_without_one_nothing_is_known() {
        use RenewStatus::{Held, Lacking, Undecided};
        // Members, who has it, who lacks it, what is said.
        for (size, has, lacks, status) in [
            (3, 2, 0, Held),
            (3, 2, 1, Held),
            (3, 1, 2, Lacking),
            (3, 0, 2, Lacking),
            (3, 1, 1, Undecided),
            (3, 0, 1, Undecided),
            (2, 1, 1, Undecided),
            (2, 0, 2, Lacking),
            (4, 2, 2, Undecided),
        ] {
            let mut votes = Votes::of_set(size, 1);
            for held in [vec![Held; has], vec![Lacking; lacks]].concat() {
                votes.count(vec![0], &RenewReply { statuses: vec![held], over: None });
            }
            assert_eq!(votes.status(0), status, "{size} {has} {lacks}");
        }
    }
}
