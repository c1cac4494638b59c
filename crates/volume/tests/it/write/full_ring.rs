//! The ring has room for some files and not for others.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_dht::{Blocks, MemoryBlocks, NewBlock, OverMemory, PutError};
use atoll_env::BoxFuture;
use atoll_key::ReadKey;
use atoll_vfs::{
    Caller, Errno, FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, FileSystem, Handle, InodeNumber, OpenFlags,
    RenameFlags, SetAttr, Writer,
};
use atoll_volume::owned::{FlushError, WritableFs, WriteOptions};
use bytes::Bytes;

use super::spool::{Crashing, MemorySpool, load, noise, save};
use super::{created, env, mounted, mounted_with, secret, tree_of};

const ROOT: InodeNumber = InodeNumber::ROOT;

/// Blocks in memory that refuse large ones, if there is a `refusal`.
struct Crowded {
    blocks: MemoryBlocks,
    refusal: Mutex<Option<PutError>>,
}

/// A block of file data has more bytes than this, and none of names or of small files.
const LARGE: usize = 32 << 10;

impl OverMemory for Crowded {
    fn memory(&self) -> &MemoryBlocks {
        &self.blocks
    }

    fn put_blocks(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        let refusal = self.refusal.lock().expect("unpoisoned").clone();
        let puts: Vec<_> = blocks
            .into_iter()
            .map(|block| match &refusal {
                Some(error) if block.bytes.len() > LARGE => Err(error.clone()),
                _ => super::now(self.blocks.put_blocks(vec![block])).remove(0),
            })
            .collect();
        Box::pin(async { puts })
    }
}

struct Setting {
    ring: Arc<Crowded>,
    spool: MemorySpool,
    options: WriteOptions,
}

impl Setting {
    async fn new(options: WriteOptions) -> Setting {
        let ring = Arc::new(Crowded { blocks: MemoryBlocks::new(), refusal: Mutex::default() });
        let blocks: Arc<dyn Blocks> = ring.clone();
        created(&blocks, options.read_key.as_ref(), 16).await;
        Setting { ring, spool: MemorySpool::default(), options }
    }

    async fn mount(&self) -> (WritableFs, Arc<Crashing<Crowded>>) {
        let machine = Arc::new(Crashing::new(&self.ring, &self.spool));
        let blocks: Arc<dyn Blocks> = machine.clone();
        let spool = Some(machine.spool.clone());
        let fs = mounted_with(&blocks, self.options.clone(), spool).await.expect("mounts");
        (fs, machine)
    }

    fn is_full(&self, is_full: bool) {
        self.refuses(is_full.then(|| PutError::Full("a test".into())));
    }

    fn refuses(&self, refusal: Option<PutError>) {
        *self.ring.refusal.lock().expect("unpoisoned") = refusal;
    }

    /// What a reader of the volume finds under a name.
    async fn on_ring(&self, name: &str) -> Option<Vec<u8>> {
        tree_of(&self.ring.blocks).await.remove(name.as_bytes())
    }
}

async fn open(fs: &WritableFs, name: &str) -> (InodeNumber, Handle) {
    let found = fs.lookup(Caller::default(), ROOT, name.as_bytes()).await.expect("is there");
    let inode = found.attr.inode;
    let opened = fs.open(Caller::default(), inode, OpenFlags::READ_WRITE).await.expect("opens");
    (inode, opened.handle)
}

async fn fsync(fs: &WritableFs, name: &str) -> Result<(), Errno> {
    let (inode, handle) = open(fs, name).await;
    let synced = fs.fsync(inode, handle, false).await;
    fs.close(inode, handle).await.expect("closes");
    fs.forget(inode, 1);
    synced
}

async fn status(fs: &WritableFs) -> String {
    let status = fs.getxattr(ROOT, b"user.atoll.status").await.expect("is told");
    String::from_utf8_lossy(&status).into_owned()
}

/// After one file had found no room, each `fsync` and the end of the mount failed until it was removed.
#[tokio::test(start_paused = true)]
async fn one_file_that_finds_no_room_does_not_block_the_others() {
    for was_stored in [false, true] {
        let setting = Setting::new(WriteOptions::default()).await;
        let (fs, _machine) = setting.mount().await;
        let old = noise(100_000, 1);
        if was_stored {
            save(&fs, "big", &old).await.expect("closes");
            fs.sync().await.expect("flushes");
        }
        setting.is_full(true);
        save(&fs, "big", &noise(300_000, 2)).await.expect("is in the spool");
        save(&fs, "small", b"small").await.expect("closes");
        assert_eq!(fsync(&fs, "small").await, Ok(()));
        fs.check_invariants();
        assert_eq!(setting.on_ring("small").await, Some(b"small".to_vec()));
        // Readers see what the ring has of it.
        let stored = if was_stored { old } else { Vec::new() };
        assert!(setting.on_ring("big").await == Some(stored));
        assert!(load(&fs, "big").await == Ok(noise(300_000, 2).into()));

        assert_eq!(fsync(&fs, "big").await, Err(Errno::ENOSPC));
        assert_eq!(fs.sync().await, Err(Errno::ENOSPC), "not all is on the ring");
        let told = status(&fs).await;
        assert!(told.contains("big") && told.contains("wait in the spool"), "{told}");
        let (inode, handle) = open(&fs, "big").await;
        let more = Bytes::from_static(b"more");
        let written = fs.write(Writer::At(Caller::default()), inode, handle, 0, more).await;
        assert_eq!(written, Err(Errno::ENOSPC), "it takes no more");
        fs.close(inode, handle).await.expect("closes");
        save(&fs, "later", b"later").await.expect("closes");
        assert_eq!(fsync(&fs, "later").await, Ok(()));

        let version = fs.version().await;
        tokio::time::sleep(Duration::from_secs(50)).await;
        assert_eq!(fs.version().await, version, "what finds no room is no new version");
        if was_stored {
            fs.unlink(Caller::default(), ROOT, b"big").await.expect("removes");
        } else {
            setting.is_full(false);
            tokio::time::sleep(Duration::from_secs(50)).await;
            assert!(setting.on_ring("big").await == Some(noise(300_000, 2)), "it is tried again");
        }
        fs.sync().await.expect("flushes");
        fs.check_invariants();
        // What a removed file that is still open holds is not on the ring, and no trouble.
        assert!(status(&fs).await.starts_with("ok"), "{}", status(&fs).await);
        fs.end().await.expect("ends");
        assert_eq!(setting.spool.records(), Vec::<String>::new());
    }
}

/// What was closed survives a crash although the ring has the later changes of other files.
#[tokio::test(start_paused = true)]
async fn what_finds_no_room_survives_crashes() {
    for read_key in [None, Some(ReadKey::from_bytes([3; 32]))] {
        let options =
            WriteOptions { max_changed_bytes: 1 << 20, read_key, ..WriteOptions::default() };
        let setting = Setting::new(options).await;
        let (fs, machine) = setting.mount().await;
        let me = Caller::default();
        save(&fs, "changed", &noise(400_000, 1)).await.expect("closes");
        fs.sync().await.expect("flushes");
        setting.is_full(true);
        // Cut, lengthened, with a hole, written in the middle.
        let (inode, handle) = open(&fs, "changed").await;
        let size = |size_bytes| SetAttr { size_bytes: Some(size_bytes), ..SetAttr::default() };
        fs.setattr(me, inode, Some(handle), size(250_001)).await.expect("cuts");
        fs.setattr(me, inode, Some(handle), size(350_000)).await.expect("lengthens");
        let mode = FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE;
        fs.fallocate(me, inode, handle, 60_000, 80_000, mode).await.expect("punches");
        let part = Bytes::from(noise(70_000, 2));
        fs.write(Writer::At(me), inode, handle, 200_000, part).await.expect("writes");
        fs.flush(inode, handle).await.expect("is in the spool");
        fs.close(inode, handle).await.expect("closes");
        let mut expected = noise(400_000, 1);
        expected.truncate(250_001);
        expected.resize(350_000, 0);
        expected[60_000..140_000].fill(0);
        expected[200_000..270_000].copy_from_slice(&noise(70_000, 2));
        // More than the memory holds, written while the ring is silent, and in a directory that moves.
        setting.refuses(Some(PutError::Unavailable("a test".into())));
        fs.mkdir(me, ROOT, b"dir", 0o755).await.expect("makes");
        let dir = fs.lookup(me, ROOT, b"dir").await.expect("is there").attr.inode;
        save(&fs, "big", &noise(20 << 20, 3)).await.expect("closes");
        let flags = RenameFlags::default();
        setting.is_full(true);
        fs.rename(me, ROOT, b"big", dir, b"big", flags).await.expect("moves");
        save(&fs, "small", b"small").await.expect("closes");
        assert_eq!(fsync(&fs, "small").await, Ok(()));
        fs.rename(me, ROOT, b"dir", ROOT, b"moved", flags).await.expect("moves");
        save(&fs, "last", b"last").await.expect("closes");
        assert_eq!(fsync(&fs, "last").await, Ok(()));
        machine.crash(0);

        for round in 0..2 {
            let (again, machine) = setting.mount().await;
            assert!(load(&again, "changed").await == Ok(expected.clone().into()), "{round}");
            let moved = again.lookup(me, ROOT, b"moved").await.expect("is there").attr.inode;
            let big = again.lookup(me, moved, b"big").await.expect("is there").attr;
            assert_eq!(big.size_bytes, 20 << 20);
            let handle = again.open(me, big.inode, OpenFlags::READ).await.expect("opens").handle;
            let bytes = again.read(big.inode, handle, 0, 20 << 20).await.expect("reads");
            assert!(bytes == noise(20 << 20, 3), "{round}");
            again.close(big.inode, handle).await.expect("closes");
            assert_eq!(load(&again, "last").await, Ok(Bytes::from_static(b"last")));
            if round == 0 {
                // It resigns, and the next mount tries again.
                let ended = again.end().await;
                assert!(matches!(ended, Err(FlushError::LeftOut { .. })), "{ended:?}");
                machine.crash(0);
                setting.is_full(false);
            } else {
                again.check_invariants();
                again.end().await.expect("ends");
            }
        }
        assert_eq!(setting.spool.records(), Vec::<String>::new(), "all of it is on the ring");
    }
}

/// Whenever a mount dies whose ring is full, what was closed is whole.
#[tokio::test(start_paused = true)]
async fn a_crash_on_a_full_ring_loses_nothing() {
    for (lives_for, percent) in (0..).flat_map(|calls| [(calls, 0), (calls, 50), (calls, 100)]) {
        let setting = Setting::new(WriteOptions::default()).await;
        let (fs, machine) = setting.mount().await;
        save(&fs, "big", &noise(100_000, 1)).await.expect("closes");
        fs.sync().await.expect("flushes");
        setting.is_full(true);
        save(&fs, "big", &noise(150_000, 2)).await.expect("closes");
        save(&fs, "small", b"1").await.expect("closes");
        machine.lives_for(lives_for);
        let flushes = async {
            fsync(&fs, "small").await.expect("flushes");
            save(&fs, "more", b"2").await.expect("closes");
            fsync(&fs, "more").await.expect("flushes");
            tokio::time::sleep(Duration::from_secs(40)).await;
        };
        let flushed = tokio::time::timeout(Duration::from_secs(50), flushes).await;
        let is_over = flushed.is_ok() && !machine.has_crashed();
        machine.crash(percent);
        let (again, machine) = setting.mount().await;
        let found = load(&again, "big").await.expect("reads");
        assert!(found == noise(150_000, 2), "after {lives_for}, {percent} %");
        assert_eq!(load(&again, "small").await, Ok(Bytes::from_static(b"1")));
        if is_over {
            assert_eq!(load(&again, "more").await, Ok(Bytes::from_static(b"2")));
        }
        again.check_invariants();
        // And once more, before anything is flushed.
        machine.crash(percent);
        setting.is_full(false);
        let (again, _machine) = setting.mount().await;
        assert!(load(&again, "big").await.expect("reads") == noise(150_000, 2));
        again.end().await.expect("ends");
        assert!(setting.on_ring("big").await == Some(noise(150_000, 2)));
        if is_over && percent == 100 {
            assert!(lives_for > 10, "it takes some puts and calls of the disk");
            return;
        }
    }
}

/// A file that finds no room must not take the place of one that is stored: the ring would have neither.
#[tokio::test(start_paused = true)]
async fn a_file_that_finds_no_room_replaces_none_that_is_stored() {
    let setting = Setting::new(WriteOptions::default()).await;
    let (fs, _machine) = setting.mount().await;
    save(&fs, "doc", b"the old one").await.expect("closes");
    fs.sync().await.expect("flushes");
    setting.is_full(true);
    save(&fs, "doc.new", &noise(100_000, 1)).await.expect("closes");
    let flags = RenameFlags::default();
    fs.rename(Caller::default(), ROOT, b"doc.new", ROOT, b"doc", flags).await.expect("renames");
    save(&fs, "small", b"small").await.expect("closes");
    assert_eq!(fs.sync().await, Err(Errno::ENOSPC));
    assert_eq!(setting.on_ring("doc").await, Some(b"the old one".to_vec()));
    fs.check_invariants();
    assert!(load(&fs, "doc").await == Ok(noise(100_000, 1).into()), "the mount shows the new one");
    setting.is_full(false);
    fs.end().await.expect("ends");
    assert!(setting.on_ring("doc").await == Some(noise(100_000, 1)));
    assert_eq!(setting.on_ring("small").await, Some(b"small".to_vec()));
}

/// What was left out follows the last root of the mount, which ended in order: another writer keeps that for `recover`.
#[tokio::test(start_paused = true)]
async fn what_found_no_room_can_be_recovered_after_another_mount_has_removed_the_file() {
    let keep = Some("none".parse().expect("a policy"));
    let options = || WriteOptions { keep, cache_bytes: 0, ..WriteOptions::default() };
    let setting = Setting::new(options()).await;
    let (fs, machine) = setting.mount().await;
    save(&fs, "big", &noise(400_000, 1)).await.expect("closes");
    fs.sync().await.expect("flushes");
    setting.is_full(true);
    let (inode, handle) = open(&fs, "big").await;
    let part = Bytes::from(noise(70_000, 2));
    fs.write(Writer::At(Caller::default()), inode, handle, 200_000, part).await.expect("writes");
    fs.flush(inode, handle).await.expect("is in the spool");
    fs.close(inode, handle).await.expect("closes");
    save(&fs, "small", b"small").await.expect("closes");
    assert_eq!(fsync(&fs, "small").await, Ok(()));
    let ended = fs.end().await;
    assert!(matches!(ended, Err(FlushError::LeftOut { .. })), "{ended:?}");
    machine.crash(0);
    setting.is_full(false);

    let blocks: Arc<dyn Blocks> = setting.ring.clone();
    let other = mounted(&blocks, options()).await.expect("the first one has resigned");
    other.unlink(Caller::default(), ROOT, b"big").await.expect("removes");
    other.sync().await.expect("flushes");
    tokio::time::sleep(Duration::from_secs(65)).await;
    setting.ring.blocks.lose_released();
    other.end().await.expect("ends");
    setting.ring.blocks.lose_released();

    let (env_now, key) = (env(), secret());
    let disk = setting.spool.used_by(&env_now).0;
    let aside = WritableFs::set_aside_overtaken(&env_now, &blocks, &key, None, disk);
    let aside = aside.await.expect("reads").expect("was overtaken");
    let below = setting.spool.below(&aside).used_by(&env_now).0;
    let opened = WritableFs::open_set_aside(env(), blocks, secret(), options(), below).await;
    let (recovered, missing) = opened.expect("opens");
    assert_eq!(missing, None);
    let mut expected = noise(400_000, 1);
    expected[200_000..270_000].copy_from_slice(&noise(70_000, 2));
    assert!(load(&recovered, "big").await == Ok(expected.into()));
}
