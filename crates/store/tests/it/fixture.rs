//! What the tests share: blocks made from numbers, a way to wait, small configurations.

use std::future::Future;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

use atoll_key::{BlockKind, Key, KeyRange};
use atoll_store::disk::FaultyDisk;
use atoll_store::{
    BlockInfo, BlockStore, DiskConfig, DiskStore, FileConfig, FileStore, FlagCheck, Holding, Owner,
    Owners, StoredBlock,
};
use bytes::Bytes;

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs a future on this thread.
pub(crate) fn wait<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        std::thread::park();
    }
}

/// A small seeded generator (SplitMix64).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }
}

/// Key number `n`; keys are spread over the ring but keep no order among themselves.
pub(crate) fn key(n: u64) -> Key {
    let mut bytes = [0; 64];
    bytes[..8].copy_from_slice(&Random(n).next().to_be_bytes());
    bytes[8..16].copy_from_slice(&n.to_be_bytes());
    Key(bytes)
}

/// The bytes of block `n` in version `version`.
pub(crate) fn contents(n: u64, version: u64, len_bytes: usize) -> Bytes {
    let mut random = Random(n ^ (version << 40));
    let mut bytes = Vec::with_capacity(len_bytes + 8);
    while bytes.len() < len_bytes {
        bytes.extend_from_slice(&random.next().to_be_bytes());
    }
    bytes.truncate(len_bytes);
    Bytes::from(bytes)
}

/// Owner number `n`; number 0 is no owner.
pub(crate) fn owner(n: u64) -> Owner {
    let [publisher, ip] = [n.div_ceil(2), n.div_ceil(3)].map(|n| [n as u8; 16]);
    Owner { publisher, ip }
}

/// Block `n` in a version (0 makes it content), of a length, charged to owner number 1.
pub(crate) fn block(n: u64, version: u64, len_bytes: usize, expires_unix_secs: u64) -> StoredBlock {
    let kind = if version == 0 { BlockKind::Content } else { BlockKind::Signed };
    let len = u32::try_from(len_bytes).expect("small");
    let info = BlockInfo {
        key: key(n),
        kind,
        version,
        expires_unix_secs,
        len_bytes: len,
        owner: owner(1),
    };
    StoredBlock { info, bytes: contents(n, version, len_bytes) }
}

/// Small segments and frequent commits, so that little work does all there is to do.
pub(crate) fn small_config() -> DiskConfig {
    DiskConfig {
        capacity_bytes: 64 << 20,
        segment_bytes: 32 << 10,
        index_cache_bytes: 1 << 20,
        free_reserve_bytes: 0,
        open_segments: 4,
        commit_entries: 16,
        commit_bytes: 64 << 10,
        ..DiskConfig::default()
    }
}

/// The same block charged to another owner.
pub(crate) fn owned(block: StoredBlock, owner: Owner) -> StoredBlock {
    StoredBlock { info: BlockInfo { owner, ..block.info }, ..block }
}

/// Compares the sums over owners with a recount of all blocks.
pub(crate) fn recount_owners(store: &dyn BlockStore) {
    let infos = store.list(KeyRange::full(), usize::MAX).expect("readable");
    let sum = |held: &dyn Fn(&BlockInfo) -> bool| {
        let held: Vec<_> = infos.iter().filter(|info| held(info)).collect();
        let block_bytes = held.iter().map(|info| u64::from(info.len_bytes)).sum();
        Holding { blocks: held.len() as u64, block_bytes }
    };
    for owner in infos.iter().map(|info| info.owner).chain((0..9).map(owner)) {
        let usage = store.usage_of(&owner);
        assert_eq!(usage.publisher, sum(&|info| info.owner.publisher == owner.publisher));
        assert_eq!(usage.ip, sum(&|info| info.owner.ip == owner.ip));
    }
    let Owners { publishers, ips } = store.owners(usize::MAX);
    for all in [publishers, ips] {
        assert!(all.is_sorted_by(|a, b| a.1 >= b.1), "{all:?}");
        let bytes: u64 = all.iter().map(|(_, held)| held.block_bytes).sum();
        assert_eq!(bytes, store.usage().block_bytes);
    }
}

pub(crate) fn open_inline(disk: &FaultyDisk) -> DiskStore {
    DiskStore::open_inline(Arc::new(disk.clone()), small_config()).expect("opens")
}

/// For a [`FileStore`] in an ordinary directory.
pub(crate) fn file_config() -> FileConfig {
    // Commits here are synced to a real disk.
    let disk = DiskConfig { commit_entries: 128, ..small_config() };
    FileConfig { flag: FlagCheck::Assumed, disk }
}

/// Opens, or makes, a store of files: index and blocks in two directories below `dir`.
pub(crate) fn open_files(dir: &Path) -> FileStore {
    let [index, blocks] = ["index", "blocks"].map(|name| dir.join(name));
    std::fs::create_dir_all(&blocks).expect("made");
    FileStore::open(&index, &blocks, file_config()).expect("opens")
}
