//! File systems made by TFS, as other tools see them.

use std::sync::{Arc, Mutex};

use atoll_tfs::Progress;
use atoll_tfs::check::{CheckOptions, check};
use atoll_tfs::device::{Device, FaultyDevice};
use atoll_tfs::mkfs::{MkfsOptions, mkfs};

use crate::e2fsck::assert_clean;

pub(crate) fn options(block_bytes: u32) -> MkfsOptions {
    MkfsOptions {
        block_bytes,
        bytes_per_inode: 16384,
        reserved_percent: 5,
        label: "test".to_owned(),
        uuid: [7; 16],
        random: [9; 48],
        now_unix_secs: 1_700_000_000,
        root_owner: (0, 0),
        is_blank: true,
        progress: Progress::default(),
    }
}

#[test]
fn what_mkfs_makes_is_clean() {
    for (block_bytes, mib) in [(1024, 4), (1024, 40), (2048, 64), (4096, 32), (4096, 300)] {
        let device = FaultyDevice::new(mib << 20, 1);
        let shared: Arc<dyn Device> = Arc::new(device.clone());
        mkfs(&shared, &options(block_bytes)).unwrap();
        assert_clean(&device.bytes(), &format!("{mib} MiB in blocks of {block_bytes}"));
    }
}

#[test]
fn what_is_too_small_is_refused() {
    for block_bytes in [1024, 2048, 4096] {
        for len in [0, 512, 1024, 4096, 60 << 10, 100 << 10] {
            let shared: Arc<dyn Device> = Arc::new(FaultyDevice::new(len, 1));
            let error = mkfs(&shared, &options(block_bytes)).unwrap_err().to_string();
            assert!(error.contains("too few") || error.contains("no room"), "{len}: {error}");
        }
    }
}

/// Parts done and parts in all.
type Step = (u64, u64);

/// All that is told.
fn told() -> (Progress, Arc<Mutex<Vec<Step>>>) {
    let steps = Arc::new(Mutex::new(Vec::new()));
    let seen = steps.clone();
    (Progress::new(move |done, total| seen.lock().unwrap().push((done, total))), steps)
}

fn assert_complete(steps: &[Step], what: &str) {
    assert!(steps.len() > 10, "{what}: {steps:?}");
    assert!(steps.windows(2).all(|two| two[0].0 < two[1].0), "{what}: {steps:?}");
    let (done, total) = *steps.last().unwrap();
    assert_eq!(done, total, "{what}");
}

#[test]
fn work_on_a_whole_file_system_says_how_far_it_has_come() {
    for is_blank in [true, false] {
        let device: Arc<dyn Device> = Arc::new(FaultyDevice::new(100 << 20, 1));
        let (progress, steps) = told();
        let wanted = MkfsOptions { is_blank, progress, ..options(1024) };
        mkfs(&device, &wanted).unwrap();
        assert_complete(&steps.lock().unwrap(), "mkfs");

        let (progress, steps) = told();
        let options = CheckOptions { compare_tags: true, progress, ..CheckOptions::default() };
        assert!(check(&device, &options).unwrap().is_clean());
        assert_complete(&steps.lock().unwrap(), "check");
    }
}
