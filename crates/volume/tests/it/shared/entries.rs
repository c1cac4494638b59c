//! Entries of directories: a set, however it is divided into leaves.

use std::collections::BTreeSet;

use atoll_key::BlockHash;
use atoll_volume::shared::entries::{Entries, Leaf};
use atoll_volume::shared::inode::{Contents, Entry, Inode};
use bytes::Bytes;
use proptest::prelude::*;

use super::{dot, entry, inode};

fn many(count: u64) -> Entries {
    (0..count).map(|number| entry(&format!("{number:06}"), 1, dot(1, number))).collect()
}

/// The leaves of a directory, as they are stored.
fn leaves(entries: &Entries) -> Vec<BlockHash> {
    let payload = inode(Contents::Directory(entries.clone())).encode().expect("some leaves");
    let stored = Inode::decode(&payload.into()).expect("an inode");
    let Contents::Unread { leaves, entries: count } = stored.contents else {
        panic!("they lie in the inode")
    };
    assert_eq!(count, entries.len());
    leaves
}

/// Volumes are found again by newer programs only if the bytes stay as they are.
#[test]
fn the_bytes_of_leaves_never_change() {
    let leaves = leaves(&many(1000));
    let all: Vec<u8> = leaves.iter().flat_map(|hash| hash.0).collect();
    assert_eq!((leaves.len(), BlockHash::of(&all).to_hex().as_str()), (36, GOLDEN));
}

const GOLDEN: &str = "4afdaba380a7dc8f0d20528f937e5658a3d45360508ce5cd2ff52e350dcb79d2";

#[test]
fn a_change_of_a_large_directory_makes_one_leaf_anew() {
    let before = many(100_000);
    let mut after = before.clone();
    after.insert(entry("050000-and-a-half", 2, dot(2, 1)));
    let (before, after): (BTreeSet<_>, BTreeSet<_>) =
        (leaves(&before).into_iter().collect(), leaves(&after).into_iter().collect());
    assert_eq!(after.difference(&before).count(), 1);
    assert_eq!(before.difference(&after).count(), 1);
}

#[test]
fn names_that_come_in_order_fill_their_leaves() {
    let mut entries = Entries::default();
    for number in 0..10_000 {
        entries.insert(entry(&format!("{number:06}"), 1, dot(1, number)));
    }
    // 72 bytes each, and no leaf has room for one more name than when it was left behind. The k-th
    // was left with 64 k bytes, or 4 KiB while there were fewer than 64.
    let full = |k: usize| (64 * k).clamp(4 << 10, 32 << 10) / 72;
    let (mut left, mut leaf) = (10_000_usize, 0);
    while left > 0 {
        leaf += 1;
        left = left.saturating_sub(full(leaf));
    }
    assert_eq!(leaves(&entries).len(), leaf);
}

#[test]
fn a_leaf_is_refused_unless_it_is_whole_and_in_order() {
    let entries = many(3);
    let block = Leaf::decode(&leaf_of(&entries)).expect("a leaf").encode();
    let block = Bytes::from(block);
    assert_eq!(block, leaf_of(&entries));
    for cut in 0..block.len() {
        assert!(Leaf::decode(&block.slice(..cut)).is_err(), "cut at {cut}");
    }
    assert!(Leaf::decode(&Bytes::from([&block[..], &[0]].concat())).is_err());
    let none = Bytes::from([&block[..5], &[0, 0]].concat());
    assert!(Leaf::decode(&none).is_err(), "a leaf without entries");
    let one = (block.len() - 7) / 3;
    let swapped =
        [&block[..7], &block[7 + one..7 + 2 * one], &block[7..7 + one], &block[7 + 2 * one..]];
    assert!(Leaf::decode(&Bytes::from(swapped.concat())).is_err(), "out of order");
}

/// A leaf of these entries, as it is stored.
fn leaf_of(entries: &Entries) -> Bytes {
    let mut block = b"ATSL\x01".to_vec();
    block.extend_from_slice(&(entries.len() as u16).to_be_bytes());
    let payload = inode(Contents::Directory(entries.clone())).encode().expect("short");
    let empty = inode(Contents::Directory(Entries::default())).encode().expect("short");
    block.extend_from_slice(&payload[empty.len()..]);
    block.into()
}

proptest! {
    #[test]
    fn entries_are_a_set(
        changes in proptest::collection::vec((any::<bool>(), 0u64..2000, 1u8..3), 0..1500)
    ) {
        let mut model: BTreeSet<Entry> = BTreeSet::new();
        let mut entries = Entries::default();
        for (adds, number, inode) in changes {
            // Long names, so that there are many leaves.
            let name = format!("{number:0200}");
            let entry = entry(&name, inode, dot(inode, number));
            if adds {
                entries.insert(entry.clone());
                model.insert(entry);
            } else {
                prop_assert_eq!(entries.remove(&entry), model.remove(&entry));
            }
        }
        prop_assert!(entries.iter().eq(&model));
        prop_assert_eq!(entries.len(), model.len());
        prop_assert_eq!(entries.is_empty(), model.is_empty());
        prop_assert_eq!(&entries, &model.into_iter().collect::<Entries>());
    }
}
