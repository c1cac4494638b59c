//! Files and directories of an unmounted file system, against models.

use std::collections::BTreeMap;
use std::sync::Arc;

use atoll_vfs::FileKind;
use proptest::prelude::*;

use super::*;
use crate::device::{Device, FaultyDevice};
use crate::format::inode::kind_bits;
use crate::format::superblock::ROOT_INODE;
use crate::mkfs::{MkfsOptions, mkfs};

fn made(mib: usize) -> (FaultyDevice, Ext2) {
    let device = FaultyDevice::new(mib << 20, 1);
    let shared: Arc<dyn Device> = Arc::new(device.clone());
    mkfs(&shared, &MkfsOptions::for_tests()).unwrap();
    let superblock = crate::fs::read_superblock(&device).unwrap();
    let meta = Meta::unjournaled(shared, &superblock, 4096);
    (device, Ext2::new(meta, superblock, None))
}

fn file(ext2: &mut Ext2) -> (u32, Inode) {
    let new = NewInode { parent: ROOT_INODE, name: b"f", directory: false, transparent: false };
    let number = ext2.allocate_inode(new).unwrap();
    let inode = Inode { mode: kind_bits(FileKind::Regular) | 0o644, links: 1, ..Inode::blank() };
    (number, inode)
}

/// Every block of a file, by its number within it.
fn blocks(ext2: &mut Ext2, inode: &Inode, count: u32) -> BTreeMap<u32, u32> {
    let mut found = BTreeMap::new();
    for extent in ext2.extents(inode, 0, count).unwrap() {
        if extent.start != 0 {
            found.extend((0..extent.len).map(|i| (extent.logical + i, extent.start + i)));
        }
    }
    found
}

#[test]
fn a_file_that_grows_lies_in_one_piece_but_for_its_indirect_blocks() {
    let (_, mut ext2) = made(32);
    let (number, mut inode) = file(&mut ext2);
    let mut at = 0;
    while at < 3000 {
        let (_, done) = ext2.fill_holes(number, &mut inode, at, 3000 - at, true).unwrap();
        at += done;
        inode.size_bytes = u64::from(at) * 1024;
    }
    let extents = ext2.extents(&inode, 0, 3000).unwrap();
    assert!(extents.len() <= 2 + 3000 / 256 + 2, "{extents:?}");
    assert_eq!(inode.blocks_512, 2 * (3000 + 1 + 1 + 3000_u32.div_ceil(256) - 1));
}

#[test]
fn two_files_that_grow_by_turns_do_not_interleave_block_by_block() {
    let (_, mut ext2) = made(32);
    let mut files = [file(&mut ext2), file(&mut ext2)];
    for at in 0..200 {
        for (number, inode) in &mut files {
            ext2.fill_holes(*number, inode, at, 1, true).unwrap();
            inode.size_bytes += 1024;
        }
    }
    for (_, inode) in &files {
        let extents = ext2.extents(inode, 0, 200).unwrap();
        assert!(extents.len() < 20, "{}: {extents:?}", extents.len());
    }
}

/// An index grew with its directory, without end.
#[test]
fn indices_of_directories_stay_within_their_room() {
    let (_, mut ext2) = made(8);
    const MOST: usize = 600;
    *ext2.indexed_names().1 = MOST;
    let mut inode = ext2.inode(ROOT_INODE).unwrap();
    let mut largest = 0;
    let name = |n: u32| format!("name {n}").into_bytes();
    for n in 0..2000 {
        assert_eq!(ext2.find_entry(ROOT_INODE, &inode, &name(n)).unwrap(), None);
        let block = ext2.goal_of_inode(ROOT_INODE);
        let goal = Goal { block, inode: ROOT_INODE, grows: false, privileged: true };
        let file = (12 + n, FileKind::Regular);
        ext2.add_entry(ROOT_INODE, &mut inode, &name(n), file, goal).unwrap();
        largest = largest.max(ext2.indexed_names().0);
        assert!(ext2.indexed_names().0 <= MOST, "{n}");
    }
    assert!(largest > MOST / 2, "there was an index: {largest}");
    for n in 0..2000 {
        let found = ext2.find_entry(ROOT_INODE, &inode, &name(n)).unwrap();
        assert_eq!(found.map(|found| found.inode), Some(12 + n));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn filling_and_cutting_do_what_a_map_does(
        steps in proptest::collection::vec((any::<bool>(), 0u32..70_000, 1u32..600), 1..24),
    ) {
        let (_, mut ext2) = made(24);
        let free = ext2.superblock().free_blocks();
        let (number, mut inode) = file(&mut ext2);
        let mut model: BTreeMap<u32, u32> = BTreeMap::new();
        for (fill, at, count) in steps {
            // Places near the ends of the levels of pointers are the interesting ones.
            let at = if at % 3 == 0 { at } else { (at % 4) * 90 };
            if fill {
                let mut from = at;
                while from < at + count {
                    let (given, done) =
                        ext2.fill_holes(number, &mut inode, from, at + count - from, true).unwrap();
                    for extent in given {
                        for i in 0..extent.len {
                            let old = model.insert(extent.logical + i, extent.start + i);
                            prop_assert_eq!(old, None, "only holes are filled");
                        }
                    }
                    from += done;
                    inode.size_bytes = inode.size_bytes.max(u64::from(from) * 1024);
                }
            } else {
                let mut size = inode.size_bytes;
                while !ext2.cut_off(number, &mut inode, at).unwrap() {
                    prop_assert!(inode.size_bytes <= size);
                    size = inode.size_bytes;
                    let held = blocks(&mut ext2, &inode, 80_000);
                    let end = held.keys().next_back().map_or(0, |last| last + 1);
                    prop_assert!(u64::from(end) * 1024 <= size, "whole between steps");
                }
                model.retain(|logical, _| *logical < at);
            }
            prop_assert_eq!(&blocks(&mut ext2, &inode, 80_000), &model);
            let mut seen: Vec<u32> = model.values().copied().collect();
            seen.sort_unstable();
            seen.dedup();
            prop_assert_eq!(seen.len(), model.len(), "no block twice");
            prop_assert_eq!(free - ext2.superblock().free_blocks(), inode.blocks_512 / 2);
        }
        while !ext2.cut_off(number, &mut inode, 0).unwrap() {}
        prop_assert_eq!((inode.blocks_512, inode.size_bytes), (0, 0));
        prop_assert_eq!(ext2.superblock().free_blocks(), free);
    }

    #[test]
    fn a_directory_is_a_map_from_names(
        steps in proptest::collection::vec((0u32..400, any::<bool>()), 1..600),
    ) {
        let (_, mut ext2) = made(8);
        let number = ROOT_INODE;
        let mut inode = ext2.inode(number).unwrap();
        let mut model = BTreeMap::new();
        for (name, add) in steps {
            let text = format!("{name}{}", "x".repeat(name as usize % 200)).into_bytes();
            let found = ext2.find_entry(number, &inode, &text).unwrap();
            prop_assert_eq!(found.as_ref().map(|f| f.inode), model.get(&text).copied());
            match (add, found) {
                (true, None) => {
                    let goal = Goal {
                        block: ext2.goal_of_inode(number), inode: number, grows: false, privileged: true,
                    };
                    ext2.add_entry(number, &mut inode, &text, (12 + name, FileKind::Regular), goal).unwrap();
                    model.insert(text, 12 + name);
                }
                (false, Some(found)) => {
                    ext2.remove_entry(number, &mut inode, &text, found.at).unwrap();
                    model.remove(&text);
                }
                _ => {}
            }
        }
        let mut listed = BTreeMap::new();
        let mut from = 0;
        loop {
            let part = ext2.list_entries(number, &inode, from, 7).unwrap();
            let Some(last) = part.last() else { break };
            from = last.next;
            listed.extend(part.into_iter().map(|entry| (entry.name, entry.inode)));
        }
        for own in [&b"."[..], b"..", b"lost+found"] {
            prop_assert!(listed.remove(own).is_some());
        }
        prop_assert_eq!(listed, model);
    }
}
