//! Range reconciliation: finding the difference of two sets of blocks by sending
//! little more than the difference.
//!
//! CFS §5.1 leaves open how a root keeps "all k of its successors" supplied; copying
//! lists of all keys would cost traffic in proportion to the data. Here two nodes
//! compare *summaries* of a key range and split only the parts that differ
//! (range-based set reconciliation, Meyer 2022, arXiv:2212.13567): a difference of d
//! blocks among n costs about d · log16(n / 64) exchanges of some hundred bytes, and
//! equal sets cost one.
//!
//! The store keeps the summaries (`atoll_store::Summary`), so that a comparison looks at what
//! has changed since the last one. Leases take no part: they may differ between replicas by
//! design.
//!
//! This module is plain data and pure functions; the exchange itself is in `exchange`.

use atoll_key::{Key, KeyRange};
use atoll_store::MAX_PARTS;

pub use crate::rpc::{Answer, Claim, Item, MAX_ITEMS, Summary};

/// A range with at most this many items is answered by the items themselves. A guess:
/// 64 items of 72 bytes are about as much as two levels of summaries.
pub const ITEMS_INSTEAD: usize = 64;

/// How to answer a claim, given the answerer's own summary of its range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Plan {
    /// [`Answer::Same`].
    Same,
    /// [`Answer::Items`], with all items; [`Answer::Some`] where there are more than
    /// [`MAX_ITEMS`].
    Items,
    /// [`Answer::Parts`], where the answerer's blocks lie.
    Parts,
}

/// Decides how to answer `claim`; a caller that has nothing is sent all items.
pub fn plan(claim: &Claim, own: Option<&Summary>) -> Plan {
    match own.filter(|_| claim.summary.count > 0) {
        Some(own) if *own == claim.summary => Plan::Same,
        Some(own) if own.count > ITEMS_INSTEAD as u64 => Plan::Parts,
        _ => Plan::Items,
    }
}

/// What one side must do after seeing the other's items.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Difference {
    /// Ours that the other lacks or has in a lower version.
    pub give: Vec<Item>,
    /// The other's that we lack or have in a lower version.
    pub take: Vec<Item>,
}

/// Compares all items of one range on both sides; each list sorted in ring order from
/// the same start, without two items of one key. `joins` says of which blocks that we hold the
/// versions are joined: both sides need the other's.
pub fn difference(
    range: KeyRange,
    ours: &[Item],
    theirs: &[Item],
    joins: impl Fn(&Key) -> bool,
) -> Difference {
    let place = |item: &Item| item.key.distance_from(&range.after.next());
    let mut found = Difference::default();
    let (mut i, mut j) = (0, 0);
    while i < ours.len() || j < theirs.len() {
        let order = match (ours.get(i), theirs.get(j)) {
            (Some(a), Some(b)) => place(a).cmp(&place(b)),
            (Some(_), None) => std::cmp::Ordering::Less,
            _ => std::cmp::Ordering::Greater,
        };
        match order {
            std::cmp::Ordering::Less => {
                found.give.push(ours[i]);
                i += 1;
            }
            std::cmp::Ordering::Greater => {
                found.take.push(theirs[j]);
                j += 1;
            }
            std::cmp::Ordering::Equal => {
                let (our, their) = (ours[i], theirs[j]);
                let both = our.version != their.version && joins(&our.key);
                if both || our.version < their.version {
                    found.take.push(their);
                }
                if both || our.version > their.version {
                    found.give.push(our);
                }
                i += 1;
                j += 1;
            }
        }
    }
    found
}

/// Whether an answer's items lie in `range`, in ring order, without repetition: what an
/// honest answerer sends.
pub fn well_formed_items(range: KeyRange, items: &[Item]) -> bool {
    let start = range.after.next();
    items.iter().all(|item| range.contains(&item.key))
        && items
            .windows(2)
            .all(|pair| pair[0].key.distance_from(&start) < pair[1].key.distance_from(&start))
}

/// Whether an answer's parts are consecutive and make up `range` exactly.
pub fn well_formed_parts(range: KeyRange, parts: &[Claim]) -> bool {
    if parts.len() < 2 || parts.len() > MAX_PARTS {
        return false;
    }
    let start = range.after.next();
    let ends_meet = parts[0].range.after == range.after
        && parts[parts.len() - 1].range.upto == range.upto
        && parts.windows(2).all(|pair| pair[0].range.upto == pair[1].range.after);
    let ends_grow = parts.windows(2).all(|pair| {
        pair[0].range.upto.distance_from(&start) < pair[1].range.upto.distance_from(&start)
    });
    ends_meet && ends_grow && parts.iter().all(|part| part.range.after != part.range.upto)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use atoll_key::BlockKind;
    use atoll_store::{BlockInfo, BlockStore, MemoryStore, Owner, StoredBlock};
    use bytes::Bytes;
    use futures_util::FutureExt;
    use proptest::prelude::*;

    use super::*;

    fn item(n: u32, version: u64) -> Item {
        Item { key: atoll_key::BlockHash::of(&n.to_be_bytes()).key(), version }
    }

    /// A side of an exchange.
    struct Side(MemoryStore);

    impl Side {
        fn new(set: &BTreeMap<Key, u64>) -> Side {
            let store = MemoryStore::new(1 << 30);
            let block = |(key, version): (&Key, &u64)| StoredBlock {
                info: BlockInfo {
                    key: *key,
                    kind: BlockKind::Signed,
                    version: *version,
                    expires_unix_secs: 1,
                    len_bytes: 0,
                    owner: Owner::NOBODY,
                },
                bytes: Bytes::new(),
            };
            let put = store.put(set.iter().map(block).collect()).now_or_never();
            put.expect("at once").expect("there is room");
            Side(store)
        }

        fn items(&self, range: KeyRange) -> Vec<Item> {
            let infos = self.0.list(range, usize::MAX).expect("memory");
            infos.iter().map(|info| Item { key: info.key, version: info.version }).collect()
        }

        fn claim(&self, range: KeyRange) -> Claim {
            let found = self.0.summaries(vec![range], 0).now_or_never();
            Claim { range, summary: found.expect("at once").expect("memory")[0] }
        }

        fn answer(&self, claim: &Claim) -> Answer {
            let mut items = self.items(claim.range);
            match plan(claim, Some(&self.claim(claim.range).summary)) {
                Plan::Same => Answer::Same,
                Plan::Items if items.len() <= MAX_ITEMS => Answer::Items(items),
                Plan::Items => {
                    items.truncate(MAX_ITEMS);
                    let upto = items[MAX_ITEMS - 1].key;
                    Answer::Some { items, upto }
                }
                Plan::Parts => {
                    let parts = self.0.cut(claim.range, 0).now_or_never();
                    Answer::Parts(parts.expect("at once").expect("memory"))
                }
            }
        }
    }

    /// Runs the whole exchange; returns the difference, and messages and items sent.
    fn reconcile(
        ours: &BTreeMap<Key, u64>,
        theirs: &BTreeMap<Key, u64>,
        range: KeyRange,
    ) -> (Difference, usize, usize) {
        let (ours, theirs) = (Side::new(ours), Side::new(theirs));
        let mut todo = vec![range];
        let (mut all, mut exchanges, mut sent) = (Difference::default(), 0, 0);
        while let Some(range) = todo.pop() {
            exchanges += 1;
            let mine = ours.items(range);
            match theirs.answer(&ours.claim(range)) {
                Answer::Same => {}
                Answer::Items(items) => {
                    assert!(well_formed_items(range, &items));
                    sent += items.len();
                    let d = difference(range, &mine, &items, |_| false);
                    all.give.extend(d.give);
                    all.take.extend(d.take);
                }
                Answer::Some { items, upto } => {
                    assert!(mine.is_empty());
                    sent += items.len();
                    all.take.extend(items);
                    if upto != range.upto {
                        todo.push(KeyRange::new(upto, range.upto));
                    }
                }
                Answer::Parts(parts) => {
                    assert!(well_formed_parts(range, &parts), "{range} {parts:?}");
                    let differing = parts.iter().filter(|part| ours.claim(part.range) != **part);
                    todo.extend(differing.map(|part| part.range));
                }
            }
        }
        (all, exchanges, sent)
    }

    fn set(numbers: impl IntoIterator<Item = u32>) -> BTreeMap<Key, u64> {
        numbers.into_iter().map(|n| (item(n, 0).key, 0)).collect()
    }

    #[test]
    fn equal_sets_cost_one_exchange() {
        let both = set(0..5000);
        let (found, exchanges, sent) = reconcile(&both, &both, KeyRange::full());
        assert_eq!((found, exchanges, sent), (Difference::default(), 1, 0));
    }

    #[test]
    fn traffic_grows_with_the_difference_and_not_with_the_data() {
        let full = set(0..50_000);
        let mut lacking = full.clone();
        for n in [3, 777, 40_000] {
            lacking.remove(&item(n, 0).key);
        }
        let (found, exchanges, sent) = reconcile(&full, &lacking, KeyRange::full());
        assert_eq!(found.give.len(), 3);
        assert!(found.take.is_empty());
        // Three differences, ⌈log16(50,000 / 64)⌉ = 3 levels, at most 64 items at each end.
        assert!(exchanges <= 3 * 4 && sent <= 3 * ITEMS_INSTEAD, "{exchanges} {sent}");
    }

    #[test]
    fn a_newcomer_learns_everything_in_pages() {
        let full = set(0..5000);
        let (found, exchanges, _) = reconcile(&BTreeMap::new(), &full, KeyRange::full());
        assert_eq!(found.take.len(), 5000);
        assert!(exchanges <= 4);
    }

    #[test]
    fn a_higher_version_flows_either_way() {
        let mut ours = set(0..100);
        let mut theirs = ours.clone();
        ours.insert(item(5, 0).key, 9);
        theirs.insert(item(6, 0).key, 4);
        let (found, _, _) = reconcile(&ours, &theirs, KeyRange::full());
        assert_eq!(found.give, vec![item(5, 9)]);
        assert_eq!(found.take, vec![item(6, 4)]);
    }

    #[test]
    fn ill_formed_answers_are_recognised() {
        let range =
            KeyRange::new(item(1, 0).key, item(1, 0).key.wrapping_add(&Key::power_of_two(300)));
        let inside = Item { key: range.after.next(), version: 0 };
        let outside = Item { key: range.upto.next(), version: 0 };
        assert!(well_formed_items(range, &[inside]));
        assert!(!well_formed_items(range, &[outside]));
        assert!(!well_formed_items(range, &[inside, inside]));
        let summary = Summary::EMPTY;
        let half = range.middle();
        let good = [
            Claim { range: KeyRange::new(range.after, half), summary },
            Claim { range: KeyRange::new(half, range.upto), summary },
        ];
        assert!(well_formed_parts(range, &good));
        assert!(!well_formed_parts(range, &good[..1]), "one part would go on for ever");
        assert!(!well_formed_parts(range, &[good[1], good[0]]));
        assert!(!well_formed_parts(range, &[]));
    }

    proptest! {
        #[test]
        fn reconciliation_finds_exactly_the_difference(
            ours in proptest::collection::btree_map(0u32..2000, 0u64..3, 0..800),
            theirs in proptest::collection::btree_map(0u32..2000, 0u64..3, 0..800),
            start in any::<u32>(),
        ) {
            let keyed = |set: &BTreeMap<u32, u64>| -> BTreeMap<Key, u64> {
                set.iter().map(|(n, v)| (item(*n, 0).key, *v)).collect()
            };
            let (mut a, mut b) = (keyed(&ours), keyed(&theirs));
            let point = item(start, 0).key;
            let (found, _, _) = reconcile(&a, &b, KeyRange::new(point, point));
            for item in &found.give { b.insert(item.key, item.version); }
            for item in &found.take { a.insert(item.key, item.version); }
            prop_assert_eq!(&a, &b);
            let want: usize = keyed(&ours).iter().filter(|(k, v)| a[*k] == **v && keyed(&theirs).get(*k) != Some(*v)).count();
            prop_assert_eq!(found.give.len(), want);
        }
    }
}
