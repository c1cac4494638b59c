//! Old states: which are kept, what they show, and whose leases are renewed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use atoll_dht::{Blocks, GetError, HeldBlock, MemoryBlocks, OverMemory, Wanted};
use atoll_env::{BoxFuture, Env, Instant, Runtime, Task, TokioRuntime};
use atoll_key::{BlockHash, BlockId, ReadKey, SignedBlock};
use atoll_vfs::{Caller, FileKind, FileSystem, InodeNumber, OpenFlags, Writer, XattrFlags};
use atoll_volume::format::inode::{Data, Shape};
use atoll_volume::format::{
    Content, DirectoryBlock, DirectoryEntry, DirectoryRef, InodeBlock, Nodes,
};
use atoll_volume::owned::{
    LeaseKeeper, OpenError, Snapshot, Volume, VolumeFs, VolumeOptions, WritableFs, WriteOptions,
    blocks_below, empty_root, sealed_root,
};
use bytes::Bytes;

use super::{Mortal, secret};
use crate::ring::{put, root_of};

pub(super) const MINUTE: u64 = 60_000;
pub(super) const HOUR: u64 = 60 * MINUTE;
pub(super) const DAY: u64 = 24 * HOUR;
/// Monday, 2026-11-16, 00:00.
pub(super) const START: u64 = 1_794_787_200_000;

/// A wall clock set by hand.
struct Clock {
    real: TokioRuntime,
    unix_ms: AtomicU64,
}

impl Runtime for Clock {
    fn now(&self) -> Instant {
        self.real.now()
    }

    fn unix_ms(&self) -> u64 {
        self.unix_ms.load(Ordering::Relaxed)
    }

    fn sleep_until(&self, at: Instant) -> BoxFuture<'static, ()> {
        self.real.sleep_until(at)
    }

    fn spawn(&self, task: BoxFuture<'static, ()>) -> Task {
        self.real.spawn(task)
    }

    fn random_u64(&self) -> u64 {
        self.real.random_u64()
    }
}

/// Keeps the last list.
#[derive(Default)]
struct Lists(Mutex<BTreeSet<BlockHash>>);

impl LeaseKeeper for Lists {
    fn keep(
        &self,
        _: SignedBlock,
        blocks: Vec<BlockHash>,
    ) -> BoxFuture<'static, Result<(), String>> {
        *self.0.lock().expect("a lock") = blocks.into_iter().collect();
        Box::pin(async { Ok(()) })
    }
}

/// Blocks in memory that note which content blocks are read.
#[derive(Clone, Default)]
struct Noted {
    blocks: MemoryBlocks,
    read: Arc<Mutex<BTreeSet<BlockHash>>>,
}

impl OverMemory for Noted {
    fn memory(&self) -> &MemoryBlocks {
        &self.blocks
    }

    fn get_block(
        &self,
        id: BlockId,
        wanted: Wanted,
    ) -> BoxFuture<'static, Result<HeldBlock, GetError>> {
        if !id.kind.is_mutable() {
            let hash = BlockHash(*id.key.0.first_chunk().expect("64 bytes"));
            self.read.lock().expect("a lock").insert(hash);
        }
        self.blocks.get_block(id, wanted)
    }
}

/// What a reader sees, with extended attributes.
type Shown = BTreeMap<Vec<u8>, (Vec<u8>, Vec<(Bytes, Bytes)>)>;

pub(super) struct Scene {
    clock: Arc<Clock>,
    ring: Arc<dyn Blocks>,
    memory: MemoryBlocks,
    lists: Arc<Lists>,
    read_key: Option<ReadKey>,
    fs: Option<WritableFs>,
}

impl Scene {
    pub(super) async fn new(keep: &str) -> Scene {
        let memory = MemoryBlocks::new();
        Scene::on(Arc::new(memory.clone()), memory, keep, None).await
    }

    pub(super) async fn on(
        ring: Arc<dyn Blocks>,
        memory: MemoryBlocks,
        keep: &str,
        read_key: Option<ReadKey>,
    ) -> Scene {
        let clock =
            Arc::new(Clock { real: TokioRuntime::current(), unix_ms: AtomicU64::new(START) });
        let env: Env = clock.clone();
        let id = secret().volume_id();
        let cipher = read_key.as_ref().map(|key| atoll_key::VolumeCipher::new(key, &id));
        let payload = sealed_root::encode(&empty_root(&env, "test", (0, 0), 12), cipher.as_ref());
        ring.put_signed(SignedBlock::sign(&secret(), b"", 1, &payload)).await.expect("is put");
        let lists = Arc::new(Lists::default());
        let mut scene = Scene { clock, ring, memory, lists, read_key, fs: None };
        scene.mount(Some(keep)).await;
        scene
    }

    pub(super) async fn mount(&mut self, keep: Option<&str>) {
        if let Some(fs) = self.fs.take() {
            fs.end().await.expect("ends");
        }
        let options = WriteOptions {
            keep: keep.map(|keep| keep.parse().expect("a policy")),
            read_key: self.read_key.clone(),
            ..WriteOptions::default()
        };
        let (env, ring, lists) = (self.clock.clone(), self.ring.clone(), self.lists.clone());
        let fs = WritableFs::open(env, ring, secret(), options, lists, None).await;
        self.fs = Some(fs.expect("mounts"));
    }

    pub(super) fn memory(&self) -> &MemoryBlocks {
        &self.memory
    }

    pub(super) fn env(&self) -> Env {
        self.clock.clone()
    }

    pub(super) fn fs(&self) -> &WritableFs {
        self.fs.as_ref().expect("it is mounted")
    }

    pub(super) fn set_clock(&self, unix_ms: u64) {
        self.clock.unix_ms.store(unix_ms, Ordering::Relaxed);
    }

    /// Writes a file and flushes.
    pub(super) async fn write(&self, path: &str, content: &[u8]) {
        write(self.fs(), path, content).await;
        self.fs().sync().await.expect("flushes");
    }

    pub(super) async fn volume(&self, at_unix_ms: Option<u64>) -> Result<Arc<Volume>, OpenError> {
        let blocks: Arc<dyn Blocks> = Arc::new(self.memory.clone());
        self.volume_on(blocks, at_unix_ms).await
    }

    pub(super) async fn volume_on(
        &self,
        blocks: Arc<dyn Blocks>,
        at_unix_ms: Option<u64>,
    ) -> Result<Arc<Volume>, OpenError> {
        let read_key = self.read_key.clone();
        let options = VolumeOptions { at_unix_ms, read_key, ..VolumeOptions::default() };
        Volume::open(self.clock.clone(), blocks, secret().volume_id(), options).await
    }

    pub(super) async fn shown(&self, at_unix_ms: Option<u64>) -> Shown {
        shown(&*self.volume(at_unix_ms).await.expect("opens").snapshot().await).await
    }

    /// When the old states were, the oldest first.
    pub(super) async fn times(&self) -> Vec<u64> {
        let snapshot = self.volume(None).await.expect("opens").snapshot().await;
        let states = snapshot.history().await.expect("reads");
        states.iter().map(|state| state.unix_ms).collect()
    }

    /// The old state of a time, as a file system.
    pub(super) async fn old(&self, unix_ms: u64) -> VolumeFs {
        let volume = self.volume(Some(unix_ms)).await.expect("opens");
        VolumeFs::new(self.clock.clone(), volume, 0, 0)
    }
}

pub(super) async fn place<'a>(fs: &WritableFs, path: &'a str) -> (InodeNumber, &'a [u8]) {
    let (mut at, mut names) = (InodeNumber::ROOT, path.split('/'));
    let last = names.next_back().expect("a name");
    for name in names {
        let above = at;
        at = match fs.lookup(Caller::default(), at, name.as_bytes()).await {
            Ok(found) => found,
            Err(_) => fs.mkdir(Caller::default(), at, name.as_bytes(), 0o755).await.expect("makes"),
        }
        .attr
        .inode;
        fs.forget(above, 1);
    }
    (at, last.as_bytes())
}

pub(super) async fn write(fs: &WritableFs, path: &str, content: &[u8]) {
    let me = Caller::default();
    let (parent, name) = place(fs, path).await;
    let flags = OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::TRUNCATE);
    let (entry, opened) = fs.create(me, parent, name, 0o644, flags).await.expect("opens");
    let bytes = Bytes::copy_from_slice(content);
    let (inode, handle) = (entry.attr.inode, opened.handle);
    fs.write(Writer::At(me), inode, handle, 0, bytes).await.expect("writes");
    fs.close(inode, handle).await.expect("closes");
    // As the kernel does.
    fs.forget(inode, 1);
    fs.forget(parent, 1);
}

pub(super) async fn unlink(fs: &WritableFs, path: &str) {
    let (parent, name) = place(fs, path).await;
    fs.unlink(Caller::default(), parent, name).await.expect("removes");
    fs.forget(parent, 1);
}

async fn shown(snapshot: &Snapshot) -> Shown {
    let mut shown = Shown::new();
    let mut waiting = vec![snapshot.root()];
    while let Some(item) = waiting.pop() {
        let xattrs = snapshot.xattrs(&item).await.expect("reads");
        let bytes = match item.entry.kind() {
            FileKind::Directory => {
                let mut listing = snapshot.list(&item).expect("a directory");
                waiting.extend(listing.next_page(1000).await.expect("lists"));
                Bytes::new()
            }
            FileKind::Symlink => item.target().expect("a link").clone(),
            _ => snapshot.read_range(&item, 0, 4 << 20).await.expect("reads"),
        };
        shown.insert(item.path.to_vec(), (bytes.to_vec(), xattrs));
    }
    shown
}

/// A model: what is kept of all states that were the last ones of a minute, hour or day.
struct Model {
    /// Each state that was the last of its bucket.
    last: BTreeMap<u64, Shown>,
    present: (u64, Shown),
}

impl Model {
    fn flushed(&mut self, finest_ms: u64, now: u64, shown: Shown) {
        let (then, before) = std::mem::replace(&mut self.present, (now, shown));
        if then / finest_ms != now / finest_ms {
            self.last.insert(then, before);
        }
    }

    /// By the words of the policy: for each unit the last of each of the newest buckets.
    fn kept(&self, units: &[(u64, u64, usize)]) -> BTreeSet<u64> {
        let mut kept = BTreeSet::new();
        for (length_ms, shift_ms, count) in units {
            let bucket = |time: &u64| (time + shift_ms) / length_ms;
            let buckets: BTreeSet<u64> = self.last.keys().map(bucket).collect();
            for newest in buckets.into_iter().rev().take(*count) {
                kept.extend(self.last.keys().rfind(|time| bucket(time) == newest));
            }
        }
        kept
    }
}

struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (self.0 >> 33) % bound
    }
}

async fn change(scene: &Scene, dice: &mut Dice, step: u64) {
    let name = |dice: &mut Dice| format!("{}/{}", dice.below(3), dice.below(4));
    match dice.below(6) {
        0 => write(scene.fs(), "large", &noise(step, 300_000)).await,
        1 => {
            // One block of the large one.
            let found = scene.fs().lookup(Caller::default(), InodeNumber::ROOT, b"large").await;
            let Ok(entry) = found else { return };
            let (inode, me) = (entry.attr.inode, Caller::default());
            let handle = scene.fs().open(me, inode, OpenFlags::READ_WRITE).await.expect("opens");
            let at = dice.below(70) * 4096;
            let bytes = Bytes::from(noise(step, 4096));
            let write = scene.fs().write(Writer::At(me), inode, handle.handle, at, bytes);
            write.await.expect("writes");
            scene.fs().close(inode, handle.handle).await.expect("closes");
        }
        2 => {
            let value = Bytes::from(step.to_string());
            let flags = XattrFlags::default();
            let set = scene.fs().setxattr(
                Caller::default(),
                InodeNumber::ROOT,
                b"user.step",
                value,
                flags,
            );
            set.await.expect("sets");
        }
        _ => write(scene.fs(), &name(dice), &noise(step, 10 + dice.below(9000))).await,
    }
}

pub(super) fn noise(seed: u64, len: u64) -> Vec<u8> {
    let mut dice = Dice(seed);
    (0..len).map(|_| dice.below(256) as u8).collect()
}

async fn run(seed: u64, keep: &str, units: &[(u64, u64, usize)], read_key: Option<ReadKey>) {
    let mut dice = Dice(seed);
    let memory = MemoryBlocks::new();
    let mut scene = Scene::on(Arc::new(memory.clone()), memory, keep, read_key).await;
    let finest_ms = units[0].0;
    let mut model = Model { last: BTreeMap::new(), present: (START, scene.shown(None).await) };
    let mut now = START;
    for step in 0..220 {
        now += match dice.below(12) {
            0 => dice.below(3 * DAY),
            1..=3 => dice.below(5 * HOUR),
            _ => dice.below(30 * MINUTE),
        };
        scene.set_clock(now);
        change(&scene, &mut dice, step).await;
        scene.fs().sync().await.expect("flushes");
        // What neither the present nor a kept state needs is gone.
        tokio::time::sleep(std::time::Duration::from_secs(31)).await;
        scene.memory.lose_released();
        let present = scene.shown(None).await;
        if present != model.present.1 {
            model.flushed(finest_ms, now, present);
        }
        let kept = model.kept(units);
        assert!(scene.times().await.iter().eq(&kept), "seed {seed}, step {step}");
        if step % 20 != 19 {
            continue;
        }
        // The blocks that reading everything reads are those of the list.
        scene.mount(None).await;
        scene.memory.lose_released();
        let noted = Noted { blocks: scene.memory.clone(), read: Arc::default() };
        let blocks: Arc<dyn Blocks> = Arc::new(noted.clone());
        let volume = scene.volume_on(blocks.clone(), None).await.expect("opens");
        let present = volume.snapshot().await;
        assert_eq!(shown(&present).await, model.present.1, "seed {seed}, step {step}");
        present.history().await.expect("reads");
        for time in kept {
            // Until the next one was flushed.
            for at in [time, time + 1] {
                let volume = scene.volume_on(blocks.clone(), Some(at)).await.expect("opens");
                let found = shown(&*volume.snapshot().await).await;
                assert_eq!(found, model.last[&time], "seed {seed}, step {step}, {time}");
            }
        }
        let read = noted.read.lock().expect("a lock").clone();
        assert_eq!(*scene.lists.0.lock().expect("a lock"), read, "seed {seed}, step {step}");
        assert_eq!(scene.memory.len(), read.len(), "seed {seed}, step {step}: no other is held");
        // And of the list that the node makes itself.
        let (env, id) = (scene.clock.clone(), secret().volume_id());
        let root = blocks.get_signed(id.root_key()).await.expect("is there");
        let below = blocks_below(env, blocks, id, root, scene.read_key.clone()).await;
        let below: BTreeSet<BlockHash> = below.expect("walks").into_iter().collect();
        assert_eq!(below, read, "seed {seed}, step {step}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_the_policy_says_is_kept_shown_and_leased() {
    let days = (DAY, 0, 7);
    let weeks = (7 * DAY, 3 * DAY, 4);
    for seed in 1..=3 {
        run(seed, "24h/7d/4w", &[(HOUR, 0, 24), days, weeks], None).await;
        run(seed, "5m/3h", &[(MINUTE, 0, 5), (HOUR, 0, 3)], None).await;
    }
    run(9, "7d", &[days], Some(ReadKey::from_bytes([3; 32]))).await;
}

/// The state at twelve o'clock is the last root before, however long nothing was written.
#[tokio::test(start_paused = true)]
async fn a_time_names_the_last_state_before_it() {
    let scene = Scene::new("24h").await;
    for (minute, content) in [(70, "a"), (119, "b"), (320, "c"), (330, "d")] {
        scene.set_clock(START + minute * MINUTE);
        scene.write("file", content.as_bytes()).await;
    }
    let cases = [
        (START + 30 * MINUTE, None),
        (START + 119 * MINUTE, Some("b")),
        (START + 2 * HOUR, Some("b")),
        (START + 5 * HOUR, Some("b")),
        // Not the last one of its hour.
        (START + 325 * MINUTE, Some("b")),
        (START + 330 * MINUTE, Some("d")),
        (START + 30 * DAY, Some("d")),
    ];
    for (at, content) in cases {
        let shown = scene.shown(Some(at)).await;
        let found = shown.get(&b"file"[..]).map(|(bytes, _)| String::from_utf8_lossy(bytes));
        assert_eq!(found.as_deref(), content, "{}", (at - START) / MINUTE);
    }
    let error = scene.volume(Some(START - 1)).await.expect_err("is too early");
    assert_eq!(error, OpenError::NotKept { oldest_unix_ms: START });
    // What is written later does not change a volume that is open at a time.
    let volume = scene.volume(Some(START + 2 * HOUR)).await.expect("opens");
    scene.set_clock(START + 9 * HOUR);
    scene.write("file", b"e").await;
    tokio::time::sleep(std::time::Duration::from_secs(600)).await;
    assert_eq!(shown(&*volume.snapshot().await).await[&b"file"[..]].0, b"b");
}

#[tokio::test(start_paused = true)]
async fn a_clock_that_steps_back_neither_removes_nor_repeats_states() {
    let scene = Scene::new("3h").await;
    let mut written = BTreeMap::new();
    // Ahead for three hours, then right again.
    let hours = [0, 1, 100, 101, 102, 2, 3, 4];
    for (step, hour) in hours.into_iter().enumerate() {
        let now = START + hour * HOUR + 5 * MINUTE;
        scene.set_clock(now);
        scene.write("file", &[step as u8]).await;
        written.insert(now, step as u8);
    }
    let hour = |hour: u64| START + hour * HOUR + 5 * MINUTE;
    assert_eq!(scene.times().await, [1, 2, 3, 100, 101, 102].map(hour));
    for time in scene.times().await {
        let found = scene.shown(Some(time)).await;
        assert_eq!(found[&b"file"[..]].0, [written[&time]], "{}", (time - START) / HOUR);
    }
    // The same time again, with another tree.
    for (now, byte) in [(hour(3), 20), (hour(4), 21), (hour(3), 22), (hour(4), 23)] {
        scene.set_clock(now);
        scene.write("file", &[byte]).await;
    }
    let times = scene.times().await;
    assert!(times.contains(&hour(4)) && times.contains(&(hour(4) + 1)), "{times:?}");
    assert_eq!(scene.shown(Some(hour(4) + 1)).await[&b"file"[..]].0, [21]);
    // Once they have come, they are as the others.
    scene.set_clock(hour(104));
    scene.write("file", b"x").await;
    assert_eq!(scene.times().await.len(), 3);
}

#[tokio::test(start_paused = true)]
async fn another_policy_holds_at_once() {
    let mut scene = Scene::new("24h/7d/4w").await;
    for hour in 1..10 {
        scene.set_clock(START + hour * HOUR);
        scene.write("file", &[hour as u8]).await;
    }
    assert_eq!(scene.times().await.len(), 9);
    scene.mount(Some("2h")).await;
    assert_eq!(scene.times().await, [7, 8].map(|hour| START + hour * HOUR));
    scene.mount(None).await;
    let keep = |snapshot: Arc<Snapshot>| snapshot.info().mounted.keep;
    assert_eq!(keep(scene.volume(None).await.expect("opens").snapshot().await).to_string(), "2h");
    scene.mount(Some("none")).await;
    scene.set_clock(START + 11 * HOUR);
    scene.write("file", b"x").await;
    assert_eq!(scene.times().await, []);
    scene.mount(Some("24h/7d/4w")).await;
    scene.set_clock(START + 12 * HOUR);
    scene.write("file", b"y").await;
    assert_eq!(scene.times().await, [START + 11 * HOUR]);
    let keep = keep(scene.volume(None).await.expect("opens").snapshot().await);
    assert_eq!(keep.to_string(), "24h/7d/4w");
}

/// CFS §3.1: readers see the old tree or the new one, and so it is with the history.
#[tokio::test(start_paused = true)]
async fn a_writer_that_dies_between_any_two_puts_leaves_a_whole_history() {
    for lives_for in 0.. {
        let memory = MemoryBlocks::new();
        let ring = Arc::new(Mortal { blocks: memory.clone(), puts_left: AtomicU64::new(1000) });
        let scene = Scene::on(ring.clone(), memory, "2h", None).await;
        for hour in 1..5 {
            scene.set_clock(START + hour * HOUR);
            scene.write("dir/file", &noise(hour, 20_000)).await;
        }
        let (times, old) = (scene.times().await, scene.shown(None).await);
        scene.set_clock(START + 9 * HOUR);
        write(scene.fs(), "dir/file", &noise(9, 20_000)).await;
        ring.puts_left.store(lives_for, Ordering::Relaxed);
        let flushed = scene.fs().sync().await;
        for time in scene.times().await {
            scene.shown(Some(time)).await;
        }
        if flushed.is_ok() {
            assert_eq!(scene.times().await, [3, 4].map(|hour| START + hour * HOUR));
            assert_eq!(scene.shown(Some(START + 8 * HOUR)).await, old);
            assert!(lives_for > 5, "it takes some puts");
            return;
        }
        assert_eq!((scene.times().await, scene.shown(None).await), (times, old), "{lives_for}");
    }
}

/// What waits for the ring, and the leases of the present, do not depend on old states.
#[tokio::test(start_paused = true)]
async fn a_lost_block_of_the_history_harms_nothing_else() {
    let mut scene = Scene::new("24h").await;
    for hour in 1..4 {
        scene.set_clock(START + hour * HOUR);
        scene.write("file", &noise(hour, 20_000)).await;
    }
    let history = |snapshot: &Snapshot| snapshot.info().mounted.history.hash.expect("some");
    let snapshot = scene.volume(None).await.expect("opens").snapshot().await;
    assert!(scene.memory.lose_block(&history(&snapshot).volume_content_id()));
    // A mount that has it in memory no more.
    scene.fs.take().expect("is mounted").end().await.expect("ends");
    scene.mount(None).await;
    scene.set_clock(START + 4 * HOUR);
    scene.write("file", &noise(4, 20_000)).await;
    let error = scene.volume(Some(START + HOUR)).await.expect_err("it is lost");
    assert!(matches!(error, OpenError::History(_)), "{error}");
    scene.fs().end().await.expect("ends");
    let listed = scene.lists.0.lock().expect("a lock").clone();
    let snapshot = scene.volume(None).await.expect("opens").snapshot().await;
    assert!(listed.contains(&snapshot.info().directory.hash.expect("it has a file")));
    scene.mount(Some("none")).await;
    scene.mount(Some("24h")).await;
    scene.set_clock(START + 5 * HOUR);
    scene.write("file", b"x").await;
    assert_eq!(scene.times().await, [START + 4 * HOUR], "a new one has begun");
}

/// A history signed by somebody who means harm.
#[tokio::test(start_paused = true)]
async fn a_history_of_nonsense_is_an_error_that_says_so() {
    let blocks = MemoryBlocks::new();
    let block = |payload: &[u8]| {
        let shape = Shape::new(payload.len() as u64, 12).expect("allowed");
        InodeBlock { shape, data: Data::Inline(Bytes::copy_from_slice(payload)) }.encode()
    };
    let nonsense = put(&blocks, block(b"nonsense")).await;
    let whole = root_of(DirectoryRef::default()).encode();
    let state = put(&blocks, block(&whole)).await;
    let missing = BlockHash([9; 32]);
    let time = "00000000000000000007";
    let size_bytes = whole.len() as u64;
    let cases = [
        (time, 8, nonsense, 1, "is not a volume root"),
        (time, size_bytes + 1, state, 1, "not what it says"),
        (time, 5000, state, 1, "is no state"),
        ("0000000000000000000x", size_bytes, state, 1, "is no state"),
        ("7", size_bytes, state, 1, "is no state"),
        ("99999999999999999999", size_bytes, state, 1, "is no state"),
        (time, size_bytes, missing, 1, "nowhere"),
        (time, size_bytes, state, 1 << 60, "too many states"),
        (time, size_bytes, state, 2, "stated"),
    ];
    for (version, (name, size_bytes, inode, entries, expected)) in cases.into_iter().enumerate() {
        let entry = DirectoryEntry {
            name: Bytes::copy_from_slice(name.as_bytes()),
            mode: 0o444,
            mtime: Default::default(),
            content: Content::Regular { size_bytes, blocks_512: 1, inode: Some(inode) },
            xattrs: None,
            owner: None,
        };
        let leaf = DirectoryBlock { level: 0, nodes: Nodes::Leaf(vec![entry]) };
        let hash = Some(put(&blocks, leaf.encode()).await);
        let mut root = root_of(DirectoryRef::default());
        root.published_unix_ms = 1000;
        root.mounted.history = DirectoryRef { entries, subdirectories: 0, hash };
        crate::ring::put_root(&blocks, version as u64 + 1, &root.encode()).await;
        let ring: Arc<dyn Blocks> = Arc::new(blocks.clone());
        let open = async |at_unix_ms| {
            let options = VolumeOptions { at_unix_ms, ..VolumeOptions::default() };
            let id = crate::ring::secret().volume_id();
            Volume::open(crate::ring::env(), ring.clone(), id, options).await
        };
        let error = open(Some(500)).await.expect_err("it is bad").to_string();
        assert!(error.contains("history") && error.contains(expected), "{error}");
        let present = open(None).await.expect("the present is fine").snapshot().await;
        shown(&present).await;
        let error = present.history().await.expect_err("it is bad").to_string();
        assert!(error.contains(expected), "{error}");
    }
}
