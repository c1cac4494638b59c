//! Transactions on a device that loses power.

use super::*;
use crate::device::FaultyDevice;

const BLOCK: usize = 1024;
const BLOCKS: u32 = 256;
/// Blocks 0..100 are metadata; the areas stand apart, and not in one run.
const AREA: usize = 24;

fn journal(device: &FaultyDevice) -> Journal {
    let areas = [(100..100 + AREA as u32).collect(), (200..200 + AREA as u32).rev().collect()];
    Journal::new(Arc::new(device.clone()), BLOCK, BLOCKS, areas)
}

fn meta(device: &FaultyDevice, journal: &Journal, after: u64) -> Meta {
    Meta::new(Arc::new(device.clone()), BLOCKS, journal, 8, after)
}

fn commit(meta: &mut Meta, journal: &Journal) -> io::Result<()> {
    meta.take().write(journal)?;
    meta.finish();
    Ok(())
}

/// Each transaction writes its number into some blocks; then the model of what stands.
fn run(device: &FaultyDevice, history: &mut Vec<Vec<u8>>, from: u64) -> io::Result<()> {
    let journal = journal(device);
    let mut meta = meta(device, &journal, from);
    let mut state = history.last().cloned().unwrap_or_else(|| vec![0; 100]);
    for number in from + 1..from + 12 {
        for i in 0..1 + number % 13 {
            let block = (number * 31 + i * 17) % 100;
            meta.change(block as u32, Part::Ordinary).unwrap().fill(number as u8);
            state[block as usize] = number as u8;
        }
        history.push(state.clone());
        commit(&mut meta, &journal)?;
        if number % 3 == 0 {
            // With nothing to write: the areas must be used in turn all the same.
            commit(&mut meta, &journal)?;
        }
    }
    Ok(())
}

fn blocks_of(device: &FaultyDevice) -> Vec<u8> {
    let bytes = device.bytes();
    (0..100)
        .map(|block| {
            let block = &bytes[block * BLOCK..][..BLOCK];
            assert!(block.iter().all(|byte| *byte == block[0]), "a block of one transaction");
            block[0]
        })
        .collect()
}

#[test]
fn after_a_crash_at_any_operation_exactly_the_committed_transactions_are_there() {
    let sound = FaultyDevice::new(BLOCKS as usize * BLOCK, 0);
    run(&sound, &mut vec![vec![0; 100]], 0).unwrap();
    let operations = sound.operations();
    assert!(operations > 50, "{operations}");
    for at in 0..operations {
        for seed in 0..8 {
            let device = FaultyDevice::new(BLOCKS as usize * BLOCK, seed ^ at << 8);
            let mut history = vec![vec![0; 100]];
            device.cut_power_at(at);
            run(&device, &mut history, 0).expect_err("the power goes");
            device.power_cycle();
            let number = journal(&device).recover(0).unwrap();
            let begun = history.len() as u64 - 1;
            assert!(number == begun || number + 1 == begun, "{number} of {begun} at {at}");
            assert_eq!(blocks_of(&device), history[number as usize], "cut at {at}, seed {seed}");
            // Once more changes nothing, and work goes on from there.
            assert_eq!(journal(&device).recover(0).unwrap(), number);
            history.truncate(number as usize + 1);
            run(&device, &mut history, number).unwrap();
            assert_eq!(journal(&device).recover(0).unwrap(), number + 11);
            assert_eq!(blocks_of(&device), *history.last().unwrap());
        }
    }
}

#[test]
fn settled_transactions_are_not_brought_home_again() {
    let device = FaultyDevice::new(BLOCKS as usize * BLOCK, 1);
    run(&device, &mut Vec::new(), 0).unwrap();
    device.write_at(0, &vec![99; 100 * BLOCK]).unwrap();
    assert_eq!(journal(&device).recover(11).unwrap(), 11);
    assert_eq!(blocks_of(&device), vec![99; 100]);
}

#[test]
fn a_damaged_transaction_is_none() {
    for byte in [0, 8, 16, 24, BLOCK, 3 * BLOCK - 1] {
        let device = FaultyDevice::new(BLOCKS as usize * BLOCK, 1);
        let journal = journal(&device);
        let mut meta = meta(&device, &journal, 1);
        meta.change(7, Part::Ordinary).unwrap().fill(1);
        commit(&mut meta, &journal).unwrap();
        let at = 100 * BLOCK as u64 + byte as u64;
        let mut old = [0];
        device.read_at(at, &mut old).unwrap();
        device.write_at(at, &[old[0] ^ 0x40]).unwrap();
        let expected = if byte == 3 * BLOCK - 1 { 2 } else { 0 };
        assert_eq!(journal.recover(0).unwrap(), expected, "byte {byte}");
    }
}

#[test]
fn a_freed_block_rests_until_its_commit_and_its_changes_are_dropped() {
    let device = FaultyDevice::new(BLOCKS as usize * BLOCK, 1);
    let journal = journal(&device);
    let mut meta = meta(&device, &journal, 0);
    meta.change(7, Part::Ordinary).unwrap().fill(1);
    meta.change(8, Part::Records).unwrap().fill(1);
    meta.free(7, 1);
    assert!(meta.is_resting(7) && !meta.is_resting(8));
    let taken = meta.take();
    assert!(meta.is_resting(7), "until the commit is done");
    meta.free(20, 2);
    taken.write(&journal).unwrap();
    meta.finish();
    assert!(!meta.is_resting(7));
    assert!(meta.is_resting(21), "of the next transaction");
    assert_eq!(device.bytes()[7 * BLOCK], 0, "never written");
    assert_eq!(device.bytes()[8 * BLOCK], 1);
}

#[test]
fn what_is_being_committed_is_seen_and_may_change_again() {
    let device = FaultyDevice::new(BLOCKS as usize * BLOCK, 1);
    let journal = journal(&device);
    let mut meta = meta(&device, &journal, 0);
    meta.change(7, Part::Ordinary).unwrap().fill(1);
    let taken = meta.take();
    // Read so many others that block 7 would be dropped from memory.
    for block in 30..90 {
        meta.read(block).unwrap();
    }
    assert_eq!(meta.read(7).unwrap()[0], 1);
    meta.change(7, Part::Ordinary).unwrap().fill(2);
    taken.write(&journal).unwrap();
    meta.finish();
    assert_eq!(device.bytes()[7 * BLOCK], 1);
    for block in 30..90 {
        meta.read(block).unwrap();
    }
    assert_eq!(meta.read(7).unwrap()[0], 2, "changed blocks stay in memory");
    assert!(matches!(meta.read(BLOCKS), Err(MetaError::OutOfRange(_))));
    assert!(matches!(meta.blank(BLOCKS, Part::Ordinary), Err(MetaError::OutOfRange(_))));
}
