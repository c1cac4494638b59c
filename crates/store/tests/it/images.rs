//! Damaged disks, one damage each: what is lost, what is reported, what goes on.

use std::sync::Arc;

use atoll_store::disk::{Disk, FaultyDisk, Operation};
use atoll_store::segment::{self, FIRST_RECORD_OFFSET, RECORD_HEADER_BYTES, SegmentHeader};
use atoll_store::{BlockStore, DiskStore, OpenError, OpenReport, StoreError};

use crate::fixture::{block, key, open_inline, small_config, wait};

const INDEX: &str = "index.redb";
const LEN: usize = 1000;
const RECORD: u64 = (RECORD_HEADER_BYTES + LEN) as u64;

/// A closed store of blocks `0..count`, written one by one from the start of segment 1.
fn image(count: u64) -> FaultyDisk {
    let disk = FaultyDisk::new(5);
    let store = open_inline(&disk);
    for n in 0..count {
        wait(store.put(vec![block(n, 0, LEN, 9)])).expect("kept");
    }
    drop(store);
    disk
}

fn held(store: &DiskStore, count: u64) -> Vec<u64> {
    (0..count).filter(|n| wait(store.get(&key(*n))) == Ok(Some(block(*n, 0, LEN, 9)))).collect()
}

fn all_but(missing: u64, count: u64) -> Vec<u64> {
    (0..count).filter(|n| *n != missing).collect()
}

fn segments(disk: &FaultyDisk) -> Vec<String> {
    let names = disk.list().expect("powered");
    names.into_iter().filter(|name| segment::parse_file_name(name).is_some()).collect()
}

/// Bit `bit` of record `n` in an image's first segment.
fn record_bit(n: u64, bit: u64) -> u64 {
    (FIRST_RECORD_OFFSET + n * RECORD) * 8 + bit
}

#[test]
fn every_flipped_bit_is_found_and_costs_one_block() {
    let disk = image(5);
    let first = segments(&disk).remove(0);
    let sound = disk.contents(&first).expect("there");
    // Magic, checksums, length, type, kind, sequence, version, lease, key, and the value.
    for bit in (0..RECORD * 8).step_by(37).chain(96..128) {
        disk.overwrite(&first, sound.clone());
        disk.overwrite(INDEX, Vec::new());
        drop(open_inline(&disk));
        disk.flip_bit(&first, record_bit(2, bit));
        let store = open_inline(&disk);
        let got = wait(store.get(&key(2)));
        assert_eq!(got, Err(StoreError::Corrupted { key: key(2) }), "bit {bit}");
        assert_eq!(wait(store.get(&key(2))), Ok(None), "set aside");
        assert_eq!(held(&store, 5), all_but(2, 5));
        wait(store.put(vec![block(2, 0, LEN, 9)])).expect("fetched again");
        assert_eq!(held(&store, 5).len(), 5);
    }
}

#[test]
fn a_scrub_finds_each_flipped_bit_and_sets_the_block_aside_durably() {
    for bit in (0..RECORD * 8).step_by(101) {
        let disk = image(5);
        disk.flip_bit(&segments(&disk)[0], record_bit(3, bit));
        let store = open_inline(&disk);
        let step = wait(store.scrub(None, u64::MAX)).expect("scrubbed");
        assert_eq!((step.damaged, step.checked, step.next), (vec![key(3)], 5, None), "bit {bit}");
        assert_eq!(wait(store.scrub(None, u64::MAX)).expect("scrubbed").damaged, vec![]);
        disk.power_cycle();
        let store = open_inline(&disk);
        assert_eq!(held(&store, 5), all_but(3, 5));
        assert_eq!(store.usage().blocks, 4);
    }
}

#[test]
fn a_sector_that_cannot_be_read_is_scrubbed_away_only_if_it_fails_twice() {
    let disk = image(3);
    let store = open_inline(&disk);
    disk.fail_next(Operation::Read, 1);
    assert!(matches!(wait(store.get(&key(1))), Err(StoreError::Io(_))), "may be transient");
    disk.fail_next(Operation::Read, 1);
    assert_eq!(wait(store.scrub(None, 1)).expect("scrubbed").damaged, vec![]);
    disk.fail_next(Operation::Read, 2);
    assert_eq!(wait(store.scrub(None, 1)).expect("scrubbed").damaged.len(), 1);
}

/// Without the index nothing but the log says where records begin: a flip anywhere in
/// one may cost that one and no other.
#[test]
fn a_flipped_bit_costs_one_block_also_when_the_index_is_lost() {
    let disk = image(5);
    let first = segments(&disk).remove(0);
    let sound = disk.contents(&first).expect("there");
    for bit in (0..RECORD * 8).step_by(53).chain(96..128) {
        disk.overwrite(&first, sound.clone());
        disk.flip_bit(&first, record_bit(2, bit));
        disk.remove(INDEX).expect("removed");
        let store = open_inline(&disk);
        assert_eq!(held(&store, 5), all_but(2, 5), "bit {bit}");
        assert!(store.report().rebuilt_index);
        assert_eq!(store.report().damaged_bytes, RECORD, "bit {bit}");
    }
}

#[test]
fn a_missing_index_is_made_again_from_the_log() {
    let disk = image(100);
    {
        let store = open_inline(&disk);
        wait(store.remove((0..50).map(key).collect())).expect("removed");
        wait(store.put((60..70).map(|n| block(n, 3, 500, 77)).collect())).expect("kept");
        wait(store.reclaim(1 << 20)).expect("reclaimed");
    }
    let before = open_inline(&disk).list(atoll_key::KeyRange::full(), 1000).expect("readable");
    disk.remove(INDEX).expect("removed");
    let store = open_inline(&disk);
    assert!(store.report().rebuilt_index);
    assert_eq!(store.list(atoll_key::KeyRange::full(), 1000), Ok(before));
    assert_eq!(wait(store.get(&key(65))), Ok(Some(block(65, 3, 500, 77))));
    store.check_invariants();
    drop(store);
    assert!(!open_inline(&disk).report().rebuilt_index, "once is enough");
}

#[test]
fn an_index_of_garbage_is_made_again_from_the_log() {
    let disk = image(30);
    let sound = disk.contents(INDEX).expect("there");
    let mut images = vec![vec![0xa5; 100_000], vec![0; 4096], b"redb".to_vec()];
    images.push(sound[..sound.len() / 2].to_vec());
    let mut no_magic = sound.clone();
    no_magic[..64].fill(0xff);
    images.push(no_magic);
    let mut wiped = sound;
    wiped[320..].fill(0x5a);
    images.push(wiped);
    for (i, image) in images.into_iter().enumerate() {
        disk.overwrite(INDEX, image);
        let store = open_inline(&disk);
        assert!(store.report().rebuilt_index, "image {i}");
        assert_eq!(held(&store, 30).len(), 30, "image {i}");
    }
}

/// Flips in the index must never lead to wrong bytes, a panic or a lost log.
#[test]
fn flipped_bits_in_the_index_never_yield_wrong_bytes() {
    let disk = image(30);
    let sound = disk.contents(INDEX).expect("there");
    for bit in (0..sound.len() as u64 * 8).step_by(1_009) {
        disk.overwrite(INDEX, sound.clone());
        disk.flip_bit(INDEX, bit);
        let opened = DiskStore::open_inline(Arc::new(disk.clone()), small_config());
        let Ok(store) = opened else { continue };
        for n in 0..30 {
            if let Ok(Some(found)) = wait(store.get(&key(n))) {
                assert_eq!(found.bytes, block(n, 0, LEN, 9).bytes, "bit {bit}");
            }
        }
        disk.kill_process();
    }
}

#[test]
fn a_truncated_segment_costs_what_was_cut_off() {
    let disk = image(60);
    let first = segments(&disk).remove(0);
    let whole = disk.contents(&first).expect("there");
    let kept = FIRST_RECORD_OFFSET + 10 * RECORD + 300;
    disk.overwrite(&first, whole[..kept as usize].to_vec());
    let cut_off = (whole.len() as u64 - kept).div_ceil(RECORD);
    let store = open_inline(&disk);
    assert!(!store.report().rebuilt_index, "one segment costs no replay of the others");
    assert_eq!(store.report().lost_blocks, cut_off);
    store.check_invariants();
    let lost: Vec<u64> = (10..10 + cut_off).collect();
    let expected: Vec<u64> = (0..60).filter(|n| !lost.contains(n)).collect();
    assert_eq!(held(&store, 60), expected);
    wait(store.put(vec![block(10, 0, LEN, 9)])).expect("goes on");
}

#[test]
fn a_missing_segment_costs_what_was_in_it() {
    let disk = image(60);
    let first = segments(&disk).remove(0);
    disk.remove(&first).expect("removed");
    let store = open_inline(&disk);
    let held = held(&store, 60);
    assert!(held.len() > 20 && held.len() < 40, "{}", held.len());
    assert_eq!(store.usage().blocks, held.len() as u64);
    assert!(!store.report().rebuilt_index, "one segment costs no replay of the others");
    assert_eq!(store.report().lost_blocks, 60 - held.len() as u64);
    store.check_invariants();
    drop(store);
    assert_eq!(*open_inline(&disk).report(), OpenReport::default(), "it is told once");
}

#[test]
fn a_damaged_segment_header_is_read_from_its_second_copy() {
    let disk = image(20);
    for bit in [0, 70, 130, 200, 260] {
        disk.flip_bit(&segments(&disk)[0], bit);
        let store = open_inline(&disk);
        assert_eq!(held(&store, 20).len(), 20);
        assert_eq!(store.report().damaged_segments, 0);
    }
}

/// The header of a full segment read as zeros, and the segment was deleted.
#[test]
fn a_segment_without_a_header_is_read_with_the_salt_that_the_index_knows() {
    let sound = image(60);
    for (number, name) in segments(&sound).into_iter().enumerate() {
        for damage in [0u8, 0xa5] {
            let disk = image(60);
            let mut bytes = disk.contents(&name).expect("there");
            bytes[..FIRST_RECORD_OFFSET as usize].fill(damage);
            disk.overwrite(&name, bytes);
            let store = open_inline(&disk);
            assert_eq!(held(&store, 60).len(), 60, "segment {number}");
            let expected = OpenReport { repaired_segments: 1, ..OpenReport::default() };
            assert_eq!(*store.report(), expected);
            drop(store);
            assert_eq!(disk.contents(&name), sound.contents(&name), "it has its header again");
            assert_eq!(*open_inline(&disk).report(), OpenReport::default());
        }
    }
}

#[test]
fn a_header_in_a_bad_sector_costs_nothing() {
    let disk = image(20);
    disk.fail_next(Operation::Read, 2);
    let opened = DiskStore::open_inline(Arc::new(disk.clone()), small_config());
    assert!(matches!(opened, Err(OpenError::Io(_))), "the only segment: does the disk fail?");
    let disk = image(60);
    disk.fail_next(Operation::Read, 2);
    let store = open_inline(&disk);
    assert_eq!((held(&store, 60).len(), store.report().repaired_segments), (60, 1));
}

/// Without an index nothing says what the salt was; a process may still read the file.
#[test]
fn a_segment_nobody_can_read_is_set_aside_byte_for_byte() {
    let disk = image(60);
    let names = segments(&disk);
    let first = &names[0];
    let mut bytes = disk.contents(first).expect("there");
    bytes[..FIRST_RECORD_OFFSET as usize].fill(0);
    disk.overwrite(first, bytes.clone());
    disk.overwrite(INDEX, vec![0xa5; 5000]);
    let store = open_inline(&disk);
    assert!(store.report().rebuilt_index);
    assert_eq!(store.report().damaged_segments, 1);
    let held_now = held(&store, 60).len();
    assert!(held_now > 20 && held_now < 40, "{held_now}");
    drop(store);
    assert_eq!(
        open_inline(&disk).report().damaged_segments,
        1,
        "it is told as long as it is there"
    );
    assert_eq!(disk.contents(&format!("{first}.damaged")), Some(bytes));
    assert_eq!(disk.contents(&format!("{INDEX}.damaged")), Some(vec![0xa5; 5000]));
    // All that is left is set aside as well: its numbers are not used again.
    let disk = image(3);
    disk.overwrite(&names[0], vec![7; 9000]);
    disk.remove(INDEX).expect("removed");
    let store = open_inline(&disk);
    wait(store.put(vec![block(1, 0, LEN, 9)])).expect("goes on");
    drop(store);
    assert_eq!(segments(&disk), [segment::file_name(2)]);
    assert_eq!(disk.contents(&format!("{first}.damaged")), Some(vec![7; 9000]));
}

#[test]
fn a_segment_of_another_layout_is_left_to_the_program_that_wrote_it() {
    for layout in [segment::LAYOUT - 1, segment::LAYOUT + 1] {
        let disk = image(3);
        let name = segment::file_name(2);
        let start = segment::encode_segment_start(&SegmentHeader { number: 2, salt: 1 });
        let mut bytes = start.to_vec();
        for at in [0, segment::SECOND_HEADER_OFFSET] {
            bytes[at + 8..at + 12].copy_from_slice(&layout.to_be_bytes());
            let crc = crc32fast::hash(&bytes[at..at + 32]);
            bytes[at + 32..at + 36].copy_from_slice(&crc.to_be_bytes());
        }
        disk.overwrite(&name, bytes.clone());
        let opened = DiskStore::open_inline(Arc::new(disk.clone()), small_config());
        let error = opened.expect_err("not ours");
        let expected = u64::from(layout);
        assert!(
            matches!(&error, OpenError::OtherLayout { name: file, layout } if *layout == expected && *file == name),
            "{error}"
        );
        assert_eq!(disk.contents(&name), Some(bytes), "untouched");
    }
}

/// The end of a log after power loss: zeros are cut off, anything else may have been a block
/// that was acknowledged, and stays.
#[test]
fn a_torn_tail_stays_where_it_is() {
    let disk = image(3);
    let name = segments(&disk).remove(0);
    let sound = disk.contents(&name).expect("there");
    let start = FIRST_RECORD_OFFSET as usize;
    let tails: [Vec<u8>; 4] = [
        vec![0; 5000],
        vec![0xff; 77],
        sound[start..start + 500].to_vec(),
        sound[start..start + RECORD_HEADER_BYTES].to_vec(),
    ];
    for tail in tails {
        let disk = image(3);
        let is_unwritten = tail.iter().all(|byte| *byte == 0);
        let mut bytes = sound.clone();
        bytes.extend_from_slice(&tail);
        disk.overwrite(&name, bytes.clone());
        let store = open_inline(&disk);
        assert_eq!(store.report().torn_bytes, tail.len() as u64);
        assert_eq!(store.report().damaged_bytes, 0);
        wait(store.put(vec![block(3, 0, LEN, 9)])).expect("goes on");
        assert_eq!(held(&store, 4).len(), 4);
        store.check_invariants();
        drop(store);
        assert_eq!(segments(&disk).len(), if is_unwritten { 1 } else { 2 });
        let now = disk.contents(&name).expect("there");
        assert!(now.starts_with(if is_unwritten { &sound } else { &bytes }));
        let store = open_inline(&disk);
        assert_eq!((store.report().torn_bytes, held(&store, 4).len()), (0, 4));
    }
}

/// A record that claims more than any block has, with all checksums right: nothing of
/// that size is allocated, and the record is skipped.
#[test]
fn a_length_that_lies_allocates_nothing() {
    let disk = image(3);
    let name = segments(&disk).remove(0);
    let mut bytes = disk.contents(&name).expect("there");
    let salt = segment::decode_segment_start(&bytes).expect("sound").salt;
    let at = (FIRST_RECORD_OFFSET + RECORD) as usize;
    bytes[at + 12..at + 16].copy_from_slice(&u32::MAX.to_be_bytes());
    let mut crc = crc32fast::Hasher::new();
    crc.update(&salt.to_be_bytes());
    crc.update(&bytes[at + 8..at + RECORD_HEADER_BYTES]);
    bytes[at + 4..at + 8].copy_from_slice(&crc.finalize().to_be_bytes());
    disk.overwrite(&name, bytes);
    disk.remove(INDEX).expect("removed");
    let store = open_inline(&disk);
    assert_eq!(held(&store, 3), [0, 2]);
}

/// A publisher stores a block that looks like log records; then the header before it rots.
/// The salt keeps its bytes from being taken for records.
#[test]
fn bytes_inside_a_block_never_pass_for_records() {
    let disk = FaultyDisk::new(8);
    let store = open_inline(&disk);
    wait(store.put(vec![block(1, 0, LEN, 9)])).expect("kept");
    drop(store);
    let name = segments(&disk).remove(0);
    let forged = {
        // The best an outsider can do: a removal with the checksum of a guessed salt.
        let body = segment::RecordBody::Removal { target_segment: 1 };
        let owner = atoll_store::Owner::NOBODY;
        let header = segment::RecordHeader { key: key(1), sequence: 1 << 40, owner, body };
        segment::encode_record_header(&header, 0).repeat(20)
    };
    let store = open_inline(&disk);
    let mut carrier = block(2, 0, forged.len(), 9);
    carrier.bytes = forged.into();
    wait(store.put(vec![carrier])).expect("kept");
    drop(store);
    disk.flip_bit(&name, record_bit(1, 200));
    disk.remove(INDEX).expect("removed");
    let store = open_inline(&disk);
    assert_eq!(wait(store.get(&key(1))), Ok(Some(block(1, 0, LEN, 9))));
}

#[test]
fn damage_met_while_compacting_costs_one_block_and_is_not_copied() {
    let disk = image(25);
    disk.flip_bit(&segments(&disk)[0], record_bit(4, 2000));
    let store = open_inline(&disk);
    wait(store.remove((10..25).map(key).collect())).expect("removed");
    wait(store.reclaim(1 << 20)).expect("reclaimed");
    assert_eq!(wait(store.get(&key(4))), Ok(None), "set aside");
    let expected: Vec<u64> = (0..10).filter(|n| *n != 4).collect();
    assert_eq!(held(&store, 25), expected);
    assert!(!segments(&disk).contains(&segment::file_name(1)), "the segment is gone");
}
