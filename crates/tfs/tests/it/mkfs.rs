//! File systems made by TFS, as other tools see them.

use std::sync::Arc;

use atoll_tfs::device::{Device, FaultyDevice};
use atoll_tfs::mkfs::{MkfsOptions, mkfs};

use crate::e2fsck::assert_clean;

pub fn options(block_bytes: u32) -> MkfsOptions {
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
