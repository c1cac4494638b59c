//! How much is held for each owner: sums over blocks, by publisher, by address, and by both.
//!
//! Kept with every change of what is held, so that asking costs a look into a table. There
//! is an entry for each owner of at least one block, so the tables are never longer than
//! the store has blocks.

use std::collections::BTreeMap;

use crate::Owner;

/// Blocks held for one owner.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Holding {
    /// Sum of their lengths, bytes.
    pub block_bytes: u64,
    /// How many.
    pub blocks: u64,
}

/// Blocks held for a publisher, from all addresses, and for an address, of all publishers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OwnerUsage {
    /// For the publisher.
    pub publisher: Holding,
    /// For the address.
    pub ip: Holding,
}

/// The owners of the most bytes, each list with the largest first.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Owners {
    /// By publisher.
    pub publishers: Vec<([u8; 16], Holding)>,
    /// By address.
    pub ips: Vec<([u8; 16], Holding)>,
}

/// The sums.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Holdings {
    owners: BTreeMap<Owner, Holding>,
    publishers: BTreeMap<[u8; 16], Holding>,
    ips: BTreeMap<[u8; 16], Holding>,
}

fn raise<K: Ord>(table: &mut BTreeMap<K, Holding>, key: K, by: Holding) {
    let held = table.entry(key).or_default();
    // Sums read from a disk may be anything.
    held.blocks = held.blocks.saturating_add(by.blocks);
    held.block_bytes = held.block_bytes.saturating_add(by.block_bytes);
}

fn lower<K: Ord>(table: &mut BTreeMap<K, Holding>, key: &K, len_bytes: u32) {
    let Some(held) = table.get_mut(key) else { return };
    held.blocks = held.blocks.saturating_sub(1);
    held.block_bytes = held.block_bytes.saturating_sub(u64::from(len_bytes));
    if held.blocks == 0 {
        table.remove(key);
    }
}

fn largest(table: &BTreeMap<[u8; 16], Holding>, limit: usize) -> Vec<([u8; 16], Holding)> {
    let mut all: Vec<_> = table.iter().map(|(key, held)| (*key, *held)).collect();
    all.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(&b.0)));
    all.truncate(limit);
    all
}

impl Holdings {
    /// Sums over what is held for each owner.
    pub(crate) fn of(owners: BTreeMap<Owner, Holding>) -> Holdings {
        let mut holdings = Holdings::default();
        for (owner, held) in &owners {
            raise(&mut holdings.publishers, owner.publisher, *held);
            raise(&mut holdings.ips, owner.ip, *held);
        }
        holdings.owners = owners;
        holdings
    }

    /// A block more for `owner`.
    pub(crate) fn add(&mut self, owner: &Owner, len_bytes: u32) {
        let one = Holding { blocks: 1, block_bytes: u64::from(len_bytes) };
        raise(&mut self.owners, *owner, one);
        raise(&mut self.publishers, owner.publisher, one);
        raise(&mut self.ips, owner.ip, one);
    }

    /// A block less for `owner`.
    pub(crate) fn take(&mut self, owner: &Owner, len_bytes: u32) {
        lower(&mut self.owners, owner, len_bytes);
        lower(&mut self.publishers, &owner.publisher, len_bytes);
        lower(&mut self.ips, &owner.ip, len_bytes);
    }

    /// What is held for this publisher from this address.
    pub(crate) fn held(&self, owner: &Owner) -> Holding {
        self.owners.get(owner).copied().unwrap_or_default()
    }

    /// What is held for the publisher and for the address.
    pub(crate) fn usage_of(&self, owner: &Owner) -> OwnerUsage {
        OwnerUsage {
            publisher: self.publishers.get(&owner.publisher).copied().unwrap_or_default(),
            ip: self.ips.get(&owner.ip).copied().unwrap_or_default(),
        }
    }

    /// The owners of the most bytes, `limit` of each kind.
    pub(crate) fn largest(&self, limit: usize) -> Owners {
        Owners { publishers: largest(&self.publishers, limit), ips: largest(&self.ips, limit) }
    }

    /// Checks what always holds.
    ///
    /// # Panics
    /// If it does not hold.
    pub(crate) fn check_invariants(&self, blocks: u64, block_bytes: u64) {
        assert_eq!(*self, Holdings::of(self.owners.clone()), "the sums contradict each other");
        let sum = |part: fn(&Holding) -> u64| self.owners.values().map(part).sum::<u64>();
        assert_eq!(sum(|held| held.blocks), blocks, "blocks of all owners");
        assert_eq!(sum(|held| held.block_bytes), block_bytes, "bytes of all owners");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(publisher: u8, ip: u8) -> Owner {
        Owner { publisher: [publisher; 16], ip: [ip; 16] }
    }

    #[test]
    fn keys_of_one_address_and_addresses_of_one_key_are_summed() {
        let mut holdings = Holdings::default();
        for (publisher, ip, len) in [(1, 1, 10), (2, 1, 20), (1, 2, 30)] {
            holdings.add(&owner(publisher, ip), len);
        }
        let usage = holdings.usage_of(&owner(1, 1));
        assert_eq!(usage.publisher, Holding { blocks: 2, block_bytes: 40 });
        assert_eq!(usage.ip, Holding { blocks: 2, block_bytes: 30 });
        let Owners { publishers, ips } = holdings.largest(1);
        assert_eq!(publishers, [([1; 16], Holding { blocks: 2, block_bytes: 40 })]);
        assert_eq!(ips, [([1; 16], Holding { blocks: 2, block_bytes: 30 })]);
        holdings.check_invariants(3, 60);
        holdings.take(&owner(1, 1), 10);
        holdings.take(&owner(2, 1), 20);
        assert_eq!(holdings.usage_of(&owner(9, 1)), OwnerUsage::default());
        holdings.take(&owner(1, 2), 30);
        assert_eq!(holdings, Holdings::default(), "an owner of no block has no entry");
    }
}
