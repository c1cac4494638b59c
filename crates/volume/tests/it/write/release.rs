//! What a volume does not need any more is released, and nothing else: here the ring loses what was released at once.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_dht::{Blocks, GetError, HeldBlock, MemoryBlocks, OverMemory, PutError, Wanted};
use atoll_env::{BoxFuture, Env};
use atoll_key::kinds::{Release, ReleaseEffect};
use atoll_key::{BlockId, NotAdmitted, ReadKey, SignedBlock};
use atoll_vfs::{Caller, FileSystem, InodeNumber, OpenFlags};
use atoll_volume::owned::{
    GetOptions, NoLeaseKeeper, NoProgress, WritableFs, WriteOptions, empty_root, get_newest,
    releasable_blocks, release_blocks, sealed_root,
};

use super::history::{HOUR, MINUTE, START, Scene, noise, unlink, write};
use super::spool::{Crashing, MemorySpool, load, save};
use super::{created, env, mounted, mounted_with, secret, tree_of};

const ME: fn() -> Caller = Caller::default;

/// As long as a mount needs to see what is not needed, and to say so.
async fn wait() {
    tokio::time::sleep(Duration::from_secs(65)).await;
}

/// Lets a mount release what it does not need, and the ring lose that; how many blocks are left.
async fn left(scene: &Scene) -> usize {
    wait().await;
    scene.memory().lose_released();
    scene.memory().len()
}

#[tokio::test(start_paused = true)]
async fn without_history_the_room_of_removed_files_is_back() {
    for read_key in [None, Some(ReadKey::from_bytes([3; 32]))] {
        let memory = MemoryBlocks::new();
        let scene = Scene::on(Arc::new(memory.clone()), memory, "none", read_key).await;
        scene.write("kept", &noise(1, 50_000)).await;
        let before = left(&scene).await;
        for n in 0..10 {
            scene.write(&format!("dir/{n}"), &noise(n, 100_000)).await;
        }
        assert!(left(&scene).await > before + 200);
        for n in 0..10 {
            unlink(scene.fs(), &format!("dir/{n}")).await;
        }
        scene.fs().rmdir(ME(), InodeNumber::ROOT, b"dir").await.expect("removes");
        scene.fs().sync().await.expect("flushes");
        assert_eq!(left(&scene).await, before);
        // A file that is written again and again takes no more room than once.
        for n in 0..20 {
            scene.write("kept", &noise(n, 50_000)).await;
        }
        assert_eq!(left(&scene).await, before);
        assert_eq!(scene.shown(None).await[&b"kept"[..]].0, noise(19, 50_000));
    }
}

/// Blocks of the version that a copy has begun with are gone minutes after a newer one.
#[tokio::test(start_paused = true)]
async fn a_copy_goes_on_from_the_newest_version() {
    let scene = Scene::new("none").await;
    for (name, seed) in [("kept", 1), ("rewritten", 2), ("removed", 3)] {
        scene.write(name, &noise(seed, 50_000)).await;
    }
    let volume = scene.volume(None).await.expect("opens");
    let begun = volume.snapshot().await;
    scene.write("rewritten", &noise(4, 50_000)).await;
    unlink(scene.fs(), "removed").await;
    scene.fs().sync().await.expect("flushes");
    left(&scene).await;

    let dir = tempfile::tempdir().expect("a directory");
    let dest = dir.path().join("copy");
    let told = Mutex::new(Vec::new());
    let tells = |version| told.lock().expect("unpoisoned").push(version);
    let from = (begun.clone(), begun.root());
    let progress = Arc::new(NoProgress);
    let copied = get_newest(&volume, from, &dest, GetOptions::default(), progress, &tells).await;
    let (copied, newest) = copied.expect("copies");
    assert!(newest.version() > begun.version());
    assert_eq!(*told.lock().expect("unpoisoned"), [newest.version()]);
    assert!(copied.unread.is_empty(), "{:?}", copied.unread);
    for (name, seed) in [("kept", 1), ("rewritten", 4)] {
        assert!(std::fs::read(dest.join(name)).expect("reads") == noise(seed, 50_000), "{name}");
    }
    assert!(!dest.join("removed").exists());
}

/// The mount ends at once: it has not walked since.
#[tokio::test(start_paused = true)]
async fn the_end_of_a_mount_releases_what_it_has_removed() {
    let mut scene = Scene::new("none").await;
    scene.write("file", &noise(1, 100_000)).await;
    scene.mount(None).await;
    unlink(scene.fs(), "file").await;
    scene.mount(None).await;
    scene.memory().lose_released();
    assert_eq!(scene.memory().len(), 0);
}

/// Equal contents are one block, which stays until the last file with it goes.
#[tokio::test(start_paused = true)]
async fn a_block_of_two_files_stays_with_either() {
    let scene = Scene::new("none").await;
    let content = noise(1, 100_000);
    for name in ["a", "b", "deep/down/c"] {
        scene.write(name, &content).await;
    }
    let all = left(&scene).await;
    for name in ["a", "b"] {
        unlink(scene.fs(), name).await;
        scene.fs().sync().await.expect("flushes");
        assert!(left(&scene).await >= all - 4, "only names are gone");
        assert_eq!(scene.shown(None).await[&b"deep/down/c"[..]].0, content);
    }
    unlink(scene.fs(), "deep/down/c").await;
    scene.fs().sync().await.expect("flushes");
    assert!(left(&scene).await < 10);
    // Removed, released, and written again.
    scene.write("again", &content).await;
    left(&scene).await;
    assert_eq!(scene.shown(None).await[&b"again"[..]].0, content);
}

#[tokio::test(start_paused = true)]
async fn what_a_kept_state_needs_stays_until_that_is_dropped() {
    let scene = Scene::new("3h").await;
    let content = noise(1, 100_000);
    scene.set_clock(START + MINUTE);
    scene.write("file", &content).await;
    for hour in 1..=3 {
        scene.set_clock(START + hour * HOUR + MINUTE);
        if hour == 1 {
            unlink(scene.fs(), "file").await;
        }
        scene.write("other", &noise(hour, 10_000)).await;
        assert!(left(&scene).await > 25);
        let shown = scene.shown(Some(START + HOUR)).await;
        assert_eq!(shown[&b"file"[..]].0, content, "hour {hour}");
    }
    scene.set_clock(START + 4 * HOUR + MINUTE);
    scene.write("other", &noise(9, 10_000)).await;
    assert!(left(&scene).await < 25, "its state is kept no more");
    assert!(scene.volume(Some(START + HOUR)).await.is_err());
}

/// A file without a name, and a directory as it was when it was opened, are shown as long as they are open.
#[tokio::test(start_paused = true)]
async fn what_is_open_stays_until_it_is_closed() {
    let memory = MemoryBlocks::new();
    let blocks: Arc<dyn Blocks> = Arc::new(memory.clone());
    created(&blocks, None, 12).await;
    // No block is in memory.
    let options = WriteOptions {
        cache_bytes: 0,
        keep: Some("none".parse().expect("a policy")),
        ..Default::default()
    };
    let fs = mounted(&blocks, options).await.expect("mounts");
    let content = noise(1, 100_000);
    write(&fs, "file", &content).await;
    for n in 0..500 {
        write(&fs, &format!("dir/name-{n}"), b"").await;
    }
    fs.sync().await.expect("flushes");
    let found = fs.lookup(ME(), InodeNumber::ROOT, b"file").await.expect("is there").attr.inode;
    let file = fs.open(ME(), found, OpenFlags::READ).await.expect("opens").handle;
    let dir = fs.lookup(ME(), InodeNumber::ROOT, b"dir").await.expect("is there").attr.inode;
    let listing = fs.opendir(ME(), dir).await.expect("opens").handle;
    let first = fs.readdir(dir, listing, 0, 100, false).await.expect("lists");
    let after = first.last().expect("names").cookie;
    unlink(&fs, "file").await;
    for n in 0..500 {
        unlink(&fs, &format!("dir/name-{n}")).await;
    }
    fs.sync().await.expect("flushes");
    for _ in 0..3 {
        wait().await;
        memory.lose_released();
        assert_eq!(fs.read(found, file, 0, 1 << 20).await.expect("reads"), content);
        let mut names = first.len();
        let mut cookie = after;
        loop {
            let page = fs.readdir(dir, listing, cookie, 100, false).await.expect("lists");
            let Some(last) = page.last() else { break };
            cookie = last.cookie;
            names += page.len();
        }
        assert!(names >= 500, "{names}");
    }
    fs.close(found, file).await.expect("closes");
    fs.closedir(dir, listing).await.expect("closes");
    fs.forget(found, 1);
    fs.forget(dir, 1);
    // It is looked at again after a while, although nothing is written.
    tokio::time::sleep(Duration::from_secs(700)).await;
    memory.lose_released();
    assert!(memory.len() < 10, "{}", memory.len());
}

/// The first mount is fenced, and does not know it yet. Its spool has what it did not flush, which follows the root
/// that the second one took over.
#[tokio::test(start_paused = true)]
async fn a_take_over_keeps_what_the_replaced_root_needs_and_a_fenced_mount_releases_nothing() {
    let memory = MemoryBlocks::new();
    let ring = Arc::new(Failing { memory: memory.clone(), is_full: AtomicBool::new(false) });
    let blocks: Arc<dyn Blocks> = ring.clone();
    created(&blocks, None, 12).await;
    let keep = || Some("none".parse().expect("a policy"));
    let options = || WriteOptions { keep: keep(), cache_bytes: 0, ..WriteOptions::default() };
    let spool = MemorySpool::default();
    let machine = Arc::new(Crashing::new(&ring, &spool));
    let its: Arc<dyn Blocks> = machine.clone();
    let first = mounted_with(&its, options(), Some(machine.spool.clone())).await.expect("mounts");
    let (old, new) = (noise(1, 60_000), noise(2, 60_000));
    let kept = noise(3, 60_000);
    save(&first, "old", &old).await.expect("closes");
    save(&first, "kept", &kept).await.expect("closes");
    first.sync().await.expect("flushes");
    wait().await;
    memory.lose_released();

    let by_force = WriteOptions { take_over: true, ..options() };
    let second = mounted(&blocks, by_force).await.expect("takes over");
    // It is in the spool when the first one hears that it is fenced.
    save(&first, "late", b"late").await.expect("closes");
    first.unlink(ME(), InodeNumber::ROOT, b"old").await.expect("is not fenced yet");
    save(&first, "later", b"later").await.expect("closes");
    first.sync().await.expect_err("is fenced");
    unlink(&second, "old").await;
    write(&second, "new", &new).await;
    second.sync().await.expect("flushes");
    wait().await;
    memory.lose_released();
    assert_eq!(tree_of(&memory).await[&b"new"[..]], new);

    // Also after the second one was mounted anew, which does not know whom it has taken over.
    second.end().await.expect("ends");
    let third = mounted(&blocks, options()).await.expect("mounts");
    unlink(&third, "new").await;
    unlink(&third, "kept").await;
    third.sync().await.expect("flushes");
    wait().await;
    assert!(memory.lose_released() > 10, "of its own blocks it releases what it does not need");
    third.end().await.expect("ends");
    machine.kill();
    let disk = spool.used_by(&env()).0;
    let (env_now, key) = (env(), secret());
    let aside = WritableFs::set_aside_overtaken(&env_now, &blocks, &key, None, disk);
    let aside = aside.await.expect("reads").expect("was overtaken");
    let below = spool.below(&aside).used_by(&env()).0;
    let opened =
        WritableFs::open_set_aside(env(), blocks.clone(), secret(), options(), below).await;
    let (recovered, missing) = opened.expect("opens");
    assert_eq!(missing, None);
    assert_eq!(load(&recovered, "late").await.expect("reads"), b"late"[..]);
    assert_eq!(load(&recovered, "later").await.expect("reads"), b"later"[..]);
    assert_eq!(load(&recovered, "kept").await.expect("reads"), kept);
}

/// Blocks of a published tree may be in other volumes.
#[tokio::test(start_paused = true)]
async fn of_a_volume_that_was_published_nothing_is_released() {
    let memory = MemoryBlocks::new();
    let blocks: Arc<dyn Blocks> = Arc::new(memory.clone());
    let mut root = empty_root(&env(), "test", (0, 0), 12);
    root.mounted.has_own_blocks = false;
    let payload = sealed_root::encode(&root, None);
    blocks.put_signed(SignedBlock::sign(&secret(), b"", 1, &payload)).await.expect("is put");
    let keep = Some("none".parse().expect("a policy"));
    let fs = mounted(&blocks, WriteOptions { keep, ..Default::default() }).await.expect("mounts");
    write(&fs, "file", &noise(1, 50_000)).await;
    fs.sync().await.expect("flushes");
    let held = memory.len();
    unlink(&fs, "file").await;
    fs.sync().await.expect("flushes");
    wait().await;
    fs.end().await.expect("ends");
    assert_eq!(memory.lose_released(), 0);
    assert!(memory.len() >= held);
    let newest = blocks.get_signed(secret().volume_id().root_key()).await.expect("is there");
    let all = releasable_blocks(env(), blocks, (newest, &root), &secret(), None).await;
    assert_eq!(all, Ok(None));
}

/// A node whose clock is behind this machine's, and that cannot reach all replicas at first.
struct Doubting {
    memory: MemoryBlocks,
    behind_ms: u64,
    misses: AtomicU64,
}

impl OverMemory for Doubting {
    fn memory(&self) -> &MemoryBlocks {
        &self.memory
    }

    fn release_blocks(&self, release: Release) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        let count = release.keys().len();
        let fails = move |error| -> BoxFuture<'static, Vec<Result<(), PutError>>> {
            Box::pin(async move { vec![Err(error); count] })
        };
        let ReleaseEffect::Removed { as_of_unix_secs } = release.effect() else {
            panic!("it is none of a volume's content");
        };
        let now_ms = env().unix_ms() - self.behind_ms;
        let time_ms = as_of_unix_secs * 1000;
        if time_ms > now_ms {
            return fails(NotAdmitted::Clock { time_ms, now_ms }.into());
        }
        if let Err(refused) = release.admit(now_ms) {
            return fails(PutError::Unavailable(refused.to_string()));
        }
        let left = self.misses.load(Ordering::Relaxed);
        self.misses.store(left.saturating_sub(1), Ordering::Relaxed);
        if left > 0 {
            return fails(PutError::Unavailable("one is away".into()));
        }
        self.memory.release_blocks(release)
    }
}

#[tokio::test(start_paused = true)]
async fn a_release_is_repeated_until_all_have_heard_of_it() {
    // Several releases are refused at once by a node whose clock is minutes behind.
    for (behind_ms, bytes) in [(0, 50_000), (5_000, 50_000), (180_000, 3_000_000)] {
        let memory = MemoryBlocks::new();
        let ring = Doubting { memory: memory.clone(), behind_ms, misses: AtomicU64::new(3) };
        let scene = Scene::on(Arc::new(ring), memory.clone(), "none", None).await;
        scene.set_clock(env().unix_ms());
        scene.write("file", &noise(1, bytes)).await;
        unlink(scene.fs(), "file").await;
        scene.fs().sync().await.expect("flushes");
        for _ in 0..10 {
            wait().await;
            scene.set_clock(env().unix_ms());
        }
        memory.lose_released();
        assert_eq!(memory.len(), 0, "{behind_ms} ms");
    }
}

/// A ring that fails some puts, so that flushes are undone.
struct Failing {
    memory: MemoryBlocks,
    is_full: AtomicBool,
}

impl OverMemory for Failing {
    fn memory(&self) -> &MemoryBlocks {
        &self.memory
    }

    fn put_blocks(
        &self,
        blocks: Vec<atoll_dht::NewBlock>,
    ) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        let is_full = self.is_full.load(Ordering::Relaxed);
        let count = blocks.len();
        let mut stored = super::now(self.memory.put_blocks(blocks));
        if is_full && count > 1 {
            // Others of the batch are stored.
            stored[0] = Err(PutError::Full("a test".into()));
        }
        Box::pin(async { stored })
    }
}

#[tokio::test(start_paused = true)]
async fn what_was_put_for_a_flush_that_failed_is_released_too() {
    let memory = MemoryBlocks::new();
    let ring = Arc::new(Failing { memory: memory.clone(), is_full: AtomicBool::new(false) });
    let scene = Scene::on(ring.clone(), memory.clone(), "none", None).await;
    scene.write("small", b"small").await;
    let before = left(&scene).await;
    ring.is_full.store(true, Ordering::Relaxed);
    write(scene.fs(), "large", &noise(1, 300_000)).await;
    scene.fs().sync().await.expect_err("finds no room");
    assert!(memory.len() > before + 20, "some of it was taken");
    unlink(scene.fs(), "large").await;
    scene.fs().sync().await.expect("flushes");
    assert_eq!(left(&scene).await, before);
    ring.is_full.store(false, Ordering::Relaxed);
    scene.write("large", &noise(1, 300_000)).await;
    left(&scene).await;
    assert_eq!(scene.shown(None).await[&b"large"[..]].0, noise(1, 300_000));
}

#[tokio::test(start_paused = true)]
async fn a_volume_that_is_removed_releases_all_of_its_states() {
    let mut scene = Scene::new("24h").await;
    for hour in 1..=5 {
        scene.set_clock(START + hour * HOUR);
        scene.write(&format!("{hour}"), &noise(hour, 30_000)).await;
    }
    scene.mount(None).await;
    scene.memory().lose_released();
    assert!(scene.memory().len() > 40);
    let blocks: Arc<dyn Blocks> = Arc::new(scene.memory().clone());
    let newest = blocks.get_signed(secret().volume_id().root_key()).await.expect("is there");
    let root = sealed_root::decode(&newest.payload, None).expect("reads");
    let version = newest.version;
    let all = releasable_blocks(env(), blocks.clone(), (newest, &root), &secret(), None).await;
    let all = all.expect("walks").expect("it has own blocks");
    let (count, told) = (all.len() as u64, AtomicU64::new(0));
    let note = |done| told.store(done, Ordering::Relaxed);
    // While it is there, or was made anew by another node, its blocks may be needed.
    assert_eq!(release_blocks(&env(), &blocks, &secret(), all.clone(), &note).await, count);
    assert_eq!(scene.memory().lose_released(), 0);
    let tombstone = SignedBlock::sign_tombstone(&secret(), b"", version + 1);
    let mut removed = blocks.remove_blocks(vec![tombstone.into()]).await;
    removed.pop().expect("one outcome").expect("is removed");
    assert_eq!(release_blocks(&env(), &blocks, &secret(), all, &note).await, 0);
    assert_eq!(told.load(Ordering::Relaxed), count);
    scene.memory().lose_released();
    assert_eq!(scene.memory().len(), 0);
}

/// A ring of which blocks come slowly.
struct Slow {
    memory: MemoryBlocks,
    env: Mutex<Env>,
    fetch_takes: Mutex<Duration>,
    /// When it was asked for the root last, milliseconds since 1970.
    asked_ms: AtomicU64,
    /// How many releases it has heard of, and those of a time after that.
    heard: AtomicU64,
    late: AtomicU64,
}

impl Slow {
    fn takes(&self, secs: u64) {
        *self.fetch_takes.lock().expect("unpoisoned") = Duration::from_secs(secs);
    }

    /// A volume on it, and a mount without blocks in memory, by the clock of the scene.
    async fn with_mount() -> (Arc<Slow>, Scene, WritableFs) {
        let memory = MemoryBlocks::new();
        let ring = Arc::new(Slow {
            memory: memory.clone(),
            env: Mutex::new(env()),
            fetch_takes: Mutex::default(),
            asked_ms: AtomicU64::new(0),
            heard: AtomicU64::new(0),
            late: AtomicU64::new(0),
        });
        let scene = Scene::on(ring.clone(), memory, "none", None).await;
        scene.fs().end().await.expect("ends");
        *ring.env.lock().expect("unpoisoned") = scene.env();
        let options = WriteOptions { cache_bytes: 0, ..WriteOptions::default() };
        let keeper = Arc::new(NoLeaseKeeper);
        let fs = WritableFs::open(scene.env(), ring.clone(), secret(), options, keeper, None);
        (ring, scene, fs.await.expect("mounts"))
    }
}

impl OverMemory for Slow {
    fn memory(&self) -> &MemoryBlocks {
        &self.memory
    }

    fn get_block(
        &self,
        id: BlockId,
        wanted: Wanted,
    ) -> BoxFuture<'static, Result<HeldBlock, GetError>> {
        let memory = self.memory.clone();
        if id.kind.is_mutable() {
            let now_ms = self.env.lock().expect("unpoisoned").unix_ms();
            self.asked_ms.store(now_ms, Ordering::Relaxed);
            return memory.get_block(id, wanted);
        }
        let takes = *self.fetch_takes.lock().expect("unpoisoned");
        Box::pin(async move {
            tokio::time::sleep(takes).await;
            memory.get_block(id, wanted).await
        })
    }

    fn release_blocks(&self, release: Release) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        let ReleaseEffect::Removed { as_of_unix_secs } = release.effect() else {
            panic!("it is none of a volume's content");
        };
        self.heard.fetch_add(1, Ordering::Relaxed);
        let is_late = as_of_unix_secs * 1000 > self.asked_ms.load(Ordering::Relaxed);
        self.late.fetch_add(is_late.into(), Ordering::Relaxed);
        self.memory.release_blocks(release)
    }
}

/// Another mount may have put a root a moment after the ring was asked, and blocks for the next one: a release must not
/// be of a later time, however long it takes to look at open files.
#[tokio::test(start_paused = true)]
async fn a_release_is_of_a_time_before_the_ring_was_asked_for_the_root() {
    let (ring, scene, fs) = Slow::with_mount().await;
    for name in ["open", "removed"] {
        write(&fs, name, &noise(name.len() as u64, 50_000)).await;
    }
    fs.sync().await.expect("flushes");
    let found = fs.lookup(ME(), InodeNumber::ROOT, b"open").await.expect("is there").attr.inode;
    fs.open(ME(), found, OpenFlags::READ).await.expect("opens");
    unlink(&fs, "open").await;
    unlink(&fs, "removed").await;
    fs.sync().await.expect("flushes");
    ring.takes(10);
    for second in 1..300 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        scene.set_clock(START + second * 1000);
    }
    assert!(ring.heard.load(Ordering::Relaxed) > 0);
    assert_eq!(ring.late.load(Ordering::Relaxed), 0);
}
