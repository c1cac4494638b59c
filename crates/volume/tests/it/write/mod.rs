//! A volume mounted read-write.

mod churn;
mod contents;
mod crashes;
mod edges;
mod full_ring;
mod handles;
mod history;
pub(crate) mod model;
mod release;
mod restore;
pub(crate) mod spool;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use atoll_dht::{Blocks, MemoryBlocks, NewBlock, OverMemory, PutError};
use atoll_env::{BoxFuture, Env, TokioRuntime};
use atoll_key::{ReadKey, SecretKey, SignedBlock, VolumeCipher};
use atoll_vfs::kit::{self, Features, Subject, Tree, write_tree_to_fs};
use atoll_vfs::{Caller, Errno, FileKind, FileSystem, InodeNumber, OpenFlags, Writer};
use atoll_volume::SpoolDirectory;
use atoll_volume::owned::{
    NoLeaseKeeper, Volume, VolumeOptions, WritableFs, WriteError, WriteOptions, empty_root,
    sealed_root,
};
use bytes::Bytes;

const REGULAR: FileKind = FileKind::Regular;

fn secret() -> SecretKey {
    SecretKey::from_seed(&[7; 32])
}

fn env() -> Env {
    Arc::new(TokioRuntime::current())
}

async fn created(blocks: &Arc<dyn Blocks>, read_key: Option<&ReadKey>, block_size_log2: u8) {
    let cipher = read_key.map(|key| VolumeCipher::new(key, &secret().volume_id()));
    let root = empty_root(&env(), "test", (0, 0), block_size_log2);
    let payload = sealed_root::encode(&root, cipher.as_ref());
    let block = SignedBlock::sign(&secret(), b"", 1, &payload);
    blocks.put_signed(block).await.expect("memory takes it");
}

async fn mounted(
    blocks: &Arc<dyn Blocks>,
    options: WriteOptions,
) -> Result<WritableFs, WriteError> {
    mounted_with(blocks, options, None).await
}

async fn mounted_with(
    blocks: &Arc<dyn Blocks>,
    options: WriteOptions,
    spool: Option<Arc<dyn SpoolDirectory>>,
) -> Result<WritableFs, WriteError> {
    let keeper = Arc::new(NoLeaseKeeper);
    WritableFs::open(env(), blocks.clone(), secret(), options, keeper, spool).await
}

struct Owned {
    read_key: Option<ReadKey>,
    /// Write the tree, and mount what the ring has.
    remounts: bool,
}

impl Subject for Owned {
    fn name(&self) -> String {
        "a volume mounted read-write".into()
    }

    fn features(&self) -> Features {
        Features::FULL
    }

    fn env(&self) -> Env {
        env()
    }

    fn make(&self, tree: Arc<Tree>) -> BoxFuture<'_, Result<Arc<dyn FileSystem>, String>> {
        Box::pin(async move {
            let blocks: Arc<dyn Blocks> = Arc::new(MemoryBlocks::new());
            created(&blocks, self.read_key.as_ref(), 16).await;
            let options =
                WriteOptions { read_key: self.read_key.clone(), ..WriteOptions::default() };
            let open = || async {
                let fs = mounted(&blocks, options.clone()).await;
                fs.map_err(|error| error.to_string())
            };
            let mut fs = open().await?;
            write_tree_to_fs(&tree, &fs).await.map_err(|error| format!("{error:?}"))?;
            if self.remounts {
                fs.check_invariants();
                fs.end().await.map_err(|error| error.to_string())?;
                fs.check_invariants();
                fs = open().await?;
            }
            Ok(Arc::new(fs) as Arc<dyn FileSystem>)
        })
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_conforms() {
    let subject = Owned { read_key: None, remounts: false };
    kit::run_read_suite(&subject).await.assert_passes();
    kit::run_write_suite(&subject).await.assert_passes();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_conforms_after_a_remount() {
    let subject = Owned { read_key: None, remounts: true };
    kit::run_read_suite(&subject).await.assert_passes();
    kit::run_write_suite(&subject).await.assert_passes();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_conforms_encrypted() {
    let subject = Owned { read_key: Some(ReadKey::from_bytes([3; 32])), remounts: true };
    kit::run_read_suite(&subject).await.assert_passes();
    kit::run_write_suite(&subject).await.assert_passes();
}

/// A directory of many names is changed here and there: what is listed and found is what was made,
/// and a change writes few blocks.
#[tokio::test(start_paused = true)]
async fn a_change_in_a_directory_of_100_000_names_writes_few_blocks() {
    let memory = MemoryBlocks::new();
    let blocks: Arc<dyn Blocks> = Arc::new(memory.clone());
    created(&blocks, None, 16).await;
    let fs = mounted(&blocks, WriteOptions::default()).await.expect("mounts");
    let me = Caller::default();
    let mut names = BTreeSet::new();
    let name = |number: u64| format!("name-{:05}", number * 7919 % 100_000);
    for number in 0..100_000 {
        let entry = fs.mknod(me, InodeNumber::ROOT, name(number).as_bytes(), REGULAR, 0o644, 0);
        fs.forget(entry.await.expect("makes").attr.inode, 1);
        names.insert(name(number));
        if number % 15_000 == 0 {
            fs.sync().await.expect("flushes");
        }
    }
    fs.sync().await.expect("flushes");
    for round in 0..20 {
        let before = memory.counts().puts;
        for number in [round * 997, round * 17 + 1] {
            let name = name(number);
            if names.remove(&name) {
                fs.unlink(me, InodeNumber::ROOT, name.as_bytes()).await.expect("removes");
            }
        }
        fs.sync().await.expect("flushes");
        let puts = memory.counts().puts - before;
        assert!(puts <= 8, "{puts} blocks for two names");
    }
    // Most of them at once, so that blocks become small.
    for name in names.clone().into_iter().filter(|name| !name.ends_with('3')) {
        fs.unlink(me, InodeNumber::ROOT, name.as_bytes()).await.expect("removes");
        names.remove(&name);
    }
    fs.check_invariants();
    fs.end().await.expect("ends");
    let fs = mounted(&blocks, WriteOptions::default()).await.expect("mounts again");
    let handle = fs.opendir(me, InodeNumber::ROOT).await.expect("opens").handle;
    let mut listed = Vec::new();
    let mut cookie = 0;
    loop {
        let page = fs.readdir(InodeNumber::ROOT, handle, cookie, 100, false).await.expect("lists");
        let Some(last) = page.last() else { break };
        cookie = last.cookie;
        listed.extend(page.into_iter().map(|e| String::from_utf8_lossy(&e.name).into_owned()));
    }
    assert!(listed.iter().eq(names.iter()), "{} of {} names", listed.len(), names.len());
    for name in names.iter().step_by(50) {
        fs.lookup(me, InodeNumber::ROOT, name.as_bytes()).await.expect("finds");
    }
}

/// CFS §3.1: readers see the old tree or the new one, whenever the writer stops.
#[tokio::test(start_paused = true)]
async fn a_writer_that_dies_between_any_two_puts_leaves_a_whole_tree() {
    let mut versions = BTreeSet::new();
    for lives_for in 0.. {
        let ring =
            Arc::new(Mortal { blocks: MemoryBlocks::new(), puts_left: AtomicU64::new(1000) });
        let blocks: Arc<dyn Blocks> = ring.clone();
        created(&blocks, None, 12).await;
        let fs = mounted(&blocks, WriteOptions::default()).await.expect("mounts");
        fill(&fs, "old").await;
        fs.sync().await.expect("flushes");
        let old = tree_of(&ring.blocks).await;
        fill(&fs, "new").await;
        ring.puts_left.store(lives_for, Ordering::Relaxed);
        let flushed = fs.sync().await;
        let found = tree_of(&ring.blocks).await;
        if flushed.is_ok() {
            assert_ne!(found, old);
            assert!(versions.len() <= 1 && lives_for > 3, "it takes some puts");
            return;
        }
        assert_eq!(found, old, "after {lives_for} puts");
        versions.insert(format!("{found:?}"));
    }
}

/// Several files, among them one with two names and one with many blocks.
async fn fill(fs: &WritableFs, content: &str) {
    let me = Caller::default();
    let dir = fs.mkdir(me, InodeNumber::ROOT, content.as_bytes(), 0o755).await.expect("makes");
    for (name, len) in [("short", 10), ("long", 200_000), ("linked", 5_000)] {
        let made = fs.create(me, InodeNumber::ROOT, name.as_bytes(), 0o644, OpenFlags::READ_WRITE);
        let (entry, opened) = made.await.expect("opens");
        let bytes = Bytes::from(content.repeat(len / content.len()));
        let (inode, handle) = (entry.attr.inode, opened.handle);
        fs.write(Writer::At(me), inode, handle, 0, bytes).await.expect("writes");
        fs.close(inode, handle).await.expect("closes");
        if name == "linked" {
            fs.link(me, inode, dir.attr.inode, b"other").await.expect("links");
        }
    }
}

/// Everything that a reader of the volume sees.
async fn tree_of(blocks: &MemoryBlocks) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let blocks: Arc<dyn Blocks> = Arc::new(blocks.clone());
    let volume = Volume::open(env(), blocks, secret().volume_id(), VolumeOptions::default()).await;
    let snapshot = volume.expect("opens").snapshot().await;
    let mut tree = BTreeMap::new();
    let mut waiting = vec![snapshot.root()];
    while let Some(item) = waiting.pop() {
        match item.entry.kind() {
            FileKind::Directory => {
                let mut listing = snapshot.list(&item).expect("a directory");
                waiting.extend(listing.next_page(1000).await.expect("lists"));
                tree.insert(item.path.to_vec(), Vec::new());
            }
            _ => {
                let bytes = snapshot.read_range(&item, 0, 1 << 20).await.expect("reads");
                tree.insert(item.path.to_vec(), bytes.to_vec());
            }
        }
    }
    tree
}

/// Blocks in memory that take so many puts and no more.
struct Mortal {
    blocks: MemoryBlocks,
    puts_left: AtomicU64,
}

impl OverMemory for Mortal {
    fn memory(&self) -> &MemoryBlocks {
        &self.blocks
    }

    fn put_blocks(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        let mut outcomes = Vec::new();
        for block in blocks {
            let left = self.puts_left.load(Ordering::Relaxed);
            self.puts_left.store(left.saturating_sub(1), Ordering::Relaxed);
            outcomes.push(match left {
                0 => Err(PutError::Unavailable("the writer is dead".into())),
                _ => now(self.blocks.put_blocks(vec![block])).remove(0),
            });
        }
        Box::pin(async { outcomes })
    }
}

fn now<T>(future: BoxFuture<'_, T>) -> T {
    futures_util::FutureExt::now_or_never(future).expect("memory answers at once")
}

/// A second mount is refused while the first one lives. One that is let in by force fences the
/// first: what that one wrote later is not on the ring, and it says so.
#[tokio::test(start_paused = true)]
async fn of_two_mounts_one_writes() {
    let blocks: Arc<dyn Blocks> = Arc::new(MemoryBlocks::new());
    created(&blocks, None, 16).await;
    let me = Caller::default();
    let first = mounted(&blocks, WriteOptions::default()).await.expect("mounts");
    let refused = mounted(&blocks, WriteOptions::default()).await.err().expect("is refused");
    assert!(matches!(refused, WriteError::Busy { left_secs: 100..=120 }), "{refused}");
    first.mkdir(me, InodeNumber::ROOT, b"seen", 0o755).await.expect("makes");
    first.sync().await.expect("flushes");

    let by_force = WriteOptions { take_over: true, ..WriteOptions::default() };
    let second = mounted(&blocks, by_force).await.expect("takes over");
    second.lookup(me, InodeNumber::ROOT, b"seen").await.expect("is there");
    first.mkdir(me, InodeNumber::ROOT, b"lost", 0o755).await.expect("is not known to be fenced");
    assert_eq!(first.sync().await, Err(Errno::EROFS));
    assert_eq!(first.mkdir(me, InodeNumber::ROOT, b"no", 0o755).await, Err(Errno::EROFS));
    let status = first.getxattr(InodeNumber::ROOT, b"user.atoll.status").await.expect("is told");
    assert!(String::from_utf8_lossy(&status).contains("another writer"), "{status:?}");
    first.lookup(me, InodeNumber::ROOT, b"lost").await.expect("still reads");

    second.mkdir(me, InodeNumber::ROOT, b"kept", 0o755).await.expect("makes");
    second.end().await.expect("ends");
    let third = mounted(&blocks, WriteOptions::default()).await.expect("the second has ended");
    third.lookup(me, InodeNumber::ROOT, b"kept").await.expect("is there");
    assert_eq!(third.lookup(me, InodeNumber::ROOT, b"lost").await, Err(Errno::ENOENT));
}

/// Blocks in memory that keep a root and say that they did not, so many times.
struct Denying {
    blocks: MemoryBlocks,
    denials: AtomicU64,
}

impl OverMemory for Denying {
    fn memory(&self) -> &MemoryBlocks {
        &self.blocks
    }

    fn put_blocks(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        let is_root = blocks.iter().any(|block| block.id.kind.is_mutable());
        let stored = self.blocks.put_blocks(blocks);
        let left = self.denials.load(Ordering::Relaxed);
        if !is_root || left == 0 {
            return stored;
        }
        self.denials.store(left - 1, Ordering::Relaxed);
        drop(now(stored));
        Box::pin(async { vec![Err(PutError::Unavailable("a test".into()))] })
    }
}

/// A mount that ended while the ring was silent put another root of the same version afterwards,
/// and took its own former one for a rival's.
#[tokio::test(start_paused = true)]
async fn a_mount_is_not_its_own_rival() {
    let ring = Arc::new(Denying { blocks: MemoryBlocks::new(), denials: AtomicU64::new(0) });
    let blocks: Arc<dyn Blocks> = ring.clone();
    created(&blocks, None, 16).await;
    let fs = mounted(&blocks, WriteOptions::default()).await.expect("mounts");
    let me = Caller::default();
    fs.mkdir(me, InodeNumber::ROOT, b"kept", 0o755).await.expect("makes");
    ring.denials.store(3, Ordering::Relaxed);
    fs.end().await.expect_err("the ring is silent");
    // So that the next root is another one.
    fs.mkdir(me, InodeNumber::ROOT, b"late", 0o755).await.expect("makes");
    while ring.denials.load(Ordering::Relaxed) > 0 {
        let _ = fs.end().await;
    }
    fs.end().await.expect("the ring answers, and has no other writer's root");
    let again = mounted(&blocks, WriteOptions::default()).await.expect("mounts again");
    again.lookup(me, InodeNumber::ROOT, b"kept").await.expect("is there");
}

/// A root costs a signature and a put at every replica.
#[tokio::test(start_paused = true)]
async fn an_fsync_of_what_is_stored_puts_no_root() {
    let blocks: Arc<dyn Blocks> = Arc::new(MemoryBlocks::new());
    created(&blocks, None, 16).await;
    let fs = mounted(&blocks, WriteOptions::default()).await.expect("mounts");
    fs.mkdir(Caller::default(), InodeNumber::ROOT, b"new", 0o755).await.expect("makes");
    fs.sync().await.expect("flushes");
    let stored = fs.version().await;
    fs.sync().await.expect("has nothing to do");
    assert_eq!(fs.version().await, stored);
}
