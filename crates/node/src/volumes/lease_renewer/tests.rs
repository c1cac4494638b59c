use super::*;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use atoll_dht::{LeaseRenewal, MemoryBlocks, NewBlock, OverMemory, Renewed};
use atoll_env::{BoxFuture, Instant, Runtime, Task, TokioRuntime};
use atoll_key::volume_secret::move_acceptance;
use atoll_key::{BlockId, ReadKey, SignedBlock, VolumeId};
use bytes::Bytes;

use crate::dir::NodeDir;

const DAY_LONG: Duration = Duration::from_secs(DAY);
const LEASE: Duration = Duration::from_secs(30 * 24 * 3600);
const START: u64 = 1_700_000_000;
const DAY: u64 = 24 * 3600;

/// Real tasks, a clock set by hand, and no waiting.
struct Clock {
    real: TokioRuntime,
    secs: AtomicU64,
}

impl Runtime for Clock {
    fn now(&self) -> Instant {
        Instant::default() + Duration::from_secs(self.secs.load(Ordering::Relaxed))
    }
    fn unix_ms(&self) -> u64 {
        self.secs.load(Ordering::Relaxed) * 1000
    }
    fn sleep_until(&self, _: Instant) -> BoxFuture<'static, ()> {
        Box::pin(async {})
    }
    fn spawn(&self, task: BoxFuture<'static, ()>) -> Task {
        self.real.spawn(task)
    }
    fn random_u64(&self) -> u64 {
        self.real.random_u64()
    }
}

/// A ring that counts renewals and can be down.
#[derive(Default)]
struct Ring {
    blocks: MemoryBlocks,
    renewed: AtomicU64,
    failures: AtomicU64,
    /// The lease that the last renewal asked for.
    lease_secs: Mutex<Option<u64>>,
    seen: Mutex<BTreeSet<BlockHash>>,
    /// Batches that begin with this hash or a later one are not answered.
    silent_from: Mutex<Option<BlockHash>>,
    /// No node answers for batches that begin in this range.
    dead: Mutex<Option<Range<BlockHash>>>,
    /// No node answers at all.
    is_away: AtomicBool,
}

impl Ring {
    fn fails<T: Clone + Send + 'static>(
        count: usize,
    ) -> BoxFuture<'static, Vec<Result<T, PutError>>> {
        let failed = Err(PutError::Unavailable("no answer".into()));
        Box::pin(async move { vec![failed; count] })
    }
}

impl OverMemory for Ring {
    fn memory(&self) -> &MemoryBlocks {
        &self.blocks
    }

    fn put_blocks(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        if self.is_away.load(Ordering::Relaxed) {
            return Ring::fails(blocks.len());
        }
        self.blocks.put_blocks(blocks)
    }

    fn renew_blocks(
        &self,
        renewal: LeaseRenewal,
    ) -> BoxFuture<'static, Vec<Result<Renewed, PutError>>> {
        let hash = |id: &BlockId| BlockHash(*id.key.0.first_chunk().expect("64 bytes"));
        let hashes: Vec<BlockHash> = renewal.ids.iter().map(hash).collect();
        let down = self
            .failures
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        let dead = self.dead.lock().expect("a lock").clone();
        let is_dead = dead.is_some_and(|range| range.contains(&hashes[0]));
        if down.is_ok() || is_dead || self.is_away.load(Ordering::Relaxed) {
            return Ring::fails(hashes.len());
        }
        if self.silent_from.lock().expect("a lock").is_some_and(|from| hashes[0] >= from) {
            return Box::pin(std::future::pending());
        }
        *self.lease_secs.lock().expect("a lock") = renewal.lease_secs;
        self.renewed.fetch_add(hashes.len() as u64, Ordering::Relaxed);
        self.seen.lock().expect("a lock").extend(&hashes);
        self.blocks.renew_blocks(renewal)
    }
}

struct Scene {
    _temp: tempfile::TempDir,
    ring: Arc<Ring>,
    clock: Arc<Clock>,
    renewer: LeaseRenewer,
    root: SignedBlock,
    hashes: Vec<BlockHash>,
}

/// A volume `docs` of `count` blocks, committed at `START`, published from a directory.
async fn scene(count: u32) -> Scene {
    scene_with(count, Some(Path::new("/docs")), None).await
}

/// Lists of blocks by the version of the root, and those that cannot be made.
#[derive(Debug, Default)]
struct Trees(Mutex<BTreeMap<u64, Result<Vec<BlockHash>, String>>>);

impl TreeWalk for Trees {
    fn blocks_below(
        &self,
        _: Env,
        _: Arc<dyn Blocks>,
        volume: VolumeId,
        root: SignedBlock,
        _: Option<ReadKey>,
    ) -> BoxFuture<'static, Result<Vec<BlockHash>, String>> {
        assert_eq!(volume.root_key(), root.key());
        let found = self.0.lock().expect("a lock")[&root.version].clone();
        Box::pin(async { found })
    }
}

async fn scene_with(count: u32, source: Option<&Path>, walk: Option<Arc<dyn TreeWalk>>) -> Scene {
    let temp = tempfile::tempdir().expect("temp");
    let dir = NodeDir::at(temp.path());
    dir.prepare().expect("fresh");
    let volumes = Arc::new(Volumes::open(&dir).expect("open"));
    let (key, _) = volumes.open_or_create("docs", source, START).expect("create");
    let ring = Arc::new(Ring::default());
    let blocks: Vec<(BlockHash, Bytes)> = (0..count)
        .map(|i| Bytes::copy_from_slice(&i.to_be_bytes()))
        .map(|bytes| (BlockHash::of(&bytes), bytes))
        .collect();
    let mut hashes: Vec<BlockHash> = blocks.iter().map(|(hash, _)| *hash).collect();
    ring.put(blocks).await.expect("put");
    let joined = crate::control::message::join_hashes(hashes.iter());
    volumes.keep_add("docs", 1, 0, &joined).expect("add");
    hashes.sort_unstable();
    let root = SignedBlock::sign(&key, b"", 4, b"root");
    volumes.keep_commit("docs", 1, u64::from(count), &root, START).expect("commit");
    let clock = Arc::new(Clock { real: TokioRuntime::current(), secs: AtomicU64::new(START) });
    let renewer = LeaseRenewer::new(clock.clone(), ring.clone(), volumes, LEASE, walk);
    Scene { _temp: temp, ring, clock, renewer, root, hashes }
}

impl Scene {
    async fn look_at(&self, secs: u64) -> Kept {
        self.clock.secs.store(secs, Ordering::Relaxed);
        self.renewer.look().await;
        self.renewer.volumes.kept("docs")
    }
}

/// CFS §3.1: "blocks are stored for an agreed-upon finite interval": the publisher's choice, if there is one.
#[tokio::test]
async fn a_chosen_lease_is_renewed_three_times_in_its_time() {
    let scene = scene(5).await;
    let renewed = || scene.ring.renewed.load(Ordering::Relaxed);
    // The node gives the new lease to all blocks at once. Publishing an unchanged tree does not put its root again.
    scene.renewer.volumes.set_lease("docs", 6 * DAY_LONG, START).expect("set");
    scene.look_at(START).await;
    assert_eq!(renewed(), 5);
    assert_eq!(*scene.ring.lease_secs.lock().expect("a lock"), Some(6 * DAY));
    scene.look_at(START + 2 * DAY - 1).await;
    assert_eq!(renewed(), 5);
    scene.look_at(START + 2 * DAY).await;
    assert_eq!(renewed(), 10);

    let later = START + 3 * DAY;
    scene.renewer.volumes.set_lease("docs", 60 * DAY_LONG, later).expect("set");
    scene.look_at(later).await;
    assert_eq!(renewed(), 15);
    assert_eq!(*scene.ring.lease_secs.lock().expect("a lock"), Some(60 * DAY));
    scene.look_at(later + 20 * DAY - 1).await;
    assert_eq!(renewed(), 15);
    let kept = scene.look_at(later + 20 * DAY).await;
    assert_eq!((renewed(), kept.refreshed_unix_secs), (20, later + 20 * DAY));
}

/// CFS §3.1: blocks live for an agreed-upon finite interval, which publishers extend.
#[tokio::test]
async fn leases_are_renewed_after_a_third_of_their_time_and_not_before() {
    let scene = scene(2500).await;
    scene.look_at(START + 9 * DAY).await;
    assert_eq!(scene.ring.renewed.load(Ordering::Relaxed), 0);
    let kept = scene.look_at(START + 10 * DAY).await;
    assert_eq!(scene.ring.renewed.load(Ordering::Relaxed), 2500);
    assert_eq!((kept.refreshed_unix_secs, kept.lost_blocks), (START + 10 * DAY, 0));
    let root = scene.ring.get_signed(scene.root.key()).await.expect("put again");
    assert_eq!(root, scene.root);
    scene.look_at(START + 11 * DAY).await;
    assert_eq!(scene.ring.renewed.load(Ordering::Relaxed), 2500, "not due again");
}

/// Until the new node has said that it renews the leases itself, this one does.
#[tokio::test]
async fn a_moved_volume_is_renewed_until_the_other_node_has_taken_over() {
    let scene = scene(5).await;
    let volumes = scene.renewer.volumes.clone();
    let token = volumes.set_moved("docs", true).expect("marks").expect("a token");
    scene.look_at(START + 11 * DAY).await;
    assert_eq!(scene.ring.renewed.load(Ordering::Relaxed), 5);
    let key = volumes.key("docs").expect("there");
    let acceptance = |token| move_acceptance(&key, token);
    scene.ring.put_signed(acceptance(&[7; 16])).await.expect("put");
    scene.look_at(START + 22 * DAY).await;
    assert_eq!(scene.ring.renewed.load(Ordering::Relaxed), 10, "that is another move's");
    scene.ring.put_signed(acceptance(&token)).await.expect("put");
    scene.look_at(START + 22 * DAY + 600).await;
    let gone = VolumeError::Unknown { name: "docs".into() };
    assert_eq!(scene.renewer.refresh("docs").await, Err(gone));
    assert_eq!(volumes.names().expect("list"), Vec::<String>::new());
}

#[tokio::test]
async fn lost_blocks_are_counted() {
    let scene = scene(1500).await;
    assert!(scene.ring.blocks.lose(&scene.hashes[3]));
    assert!(scene.ring.blocks.lose(&scene.hashes[1400]));
    assert_eq!(scene.look_at(START + 10 * DAY).await.lost_blocks, 2);
}

#[tokio::test]
async fn a_refresh_that_fails_is_told_and_tried_again_soon() {
    let scene = scene(10).await;
    scene.ring.failures.store(u64::from(ATTEMPTS), Ordering::Relaxed);
    let kept = scene.look_at(START + 10 * DAY).await;
    assert!(kept.trouble.is_some_and(|trouble| trouble.contains("no answer")));
    assert_eq!(kept.refreshed_unix_secs, START);
    let kept = scene.look_at(START + 10 * DAY + 3600).await;
    assert!(kept.trouble.is_some(), "not yet again");
    let kept = scene.look_at(START + 11 * DAY).await;
    assert_eq!((kept.trouble, kept.refreshed_unix_secs), (None, START + 11 * DAY));
}

/// One batch that failed, over quota or unanswered, ended the renewal of all batches after it.
#[tokio::test]
async fn what_cannot_be_renewed_does_not_keep_the_rest_from_it() {
    // Batches of one size: which of them fails depends on the disk's threads.
    let scene = scene(3 * BATCH as u32).await;
    scene.ring.failures.store(u64::from(ATTEMPTS), Ordering::Relaxed);
    let kept = scene.look_at(START + 10 * DAY).await;
    assert!(kept.trouble.is_some_and(|trouble| trouble.contains("no answer")));
    assert_eq!(kept.refreshed_unix_secs, START);
    assert_eq!(scene.ring.renewed.load(Ordering::Relaxed), 2 * BATCH, "all but one batch");
    let root = scene.ring.get_signed(scene.root.key()).await.expect("put again");
    assert_eq!(root, scene.root);
}

/// The renewer began with the first hash after each restart: on a machine that ran for
/// short times the last blocks were never renewed, and expired.
#[tokio::test]
async fn a_machine_that_runs_for_short_times_renews_the_last_block_too() {
    let Scene { _temp, ring, clock, renewer, hashes, .. } = scene(40 * BATCH as u32).await;
    let (volumes, mut renewer) = (renewer.volumes.clone(), renewer);
    let mut secs = START + 10 * DAY;
    for _ in 0..4 {
        let before = volumes.kept("docs").pass.map_or(0, |pass| pass.next);
        let upto = before + 12 * BATCH;
        *ring.silent_from.lock().expect("a lock") = hashes.get(upto as usize).copied();
        clock.secs.store(secs, Ordering::Relaxed);
        renewer.save_every = Duration::ZERO;
        // The machine is switched off when twelve batches are renewed, or all.
        let renewed = async {
            while volumes.kept("docs").pass.is_none_or(|pass| pass.next < upto) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::select! {
            () = renewer.look() => {}
            () = renewed => {}
        }
        secs += 60;
        renewer = LeaseRenewer::new(clock.clone(), ring.clone(), volumes.clone(), LEASE, None);
    }
    assert!(ring.seen.lock().expect("a lock").contains(hashes.last().expect("some")));
    assert_eq!(ring.seen.lock().expect("a lock").len(), hashes.len());
    assert_eq!(ring.renewed.load(Ordering::Relaxed), hashes.len() as u64, "each once");
    let kept = volumes.kept("docs");
    assert_eq!((kept.pass, kept.refreshed_unix_secs), (None, START + 10 * DAY), "its begin");
}

/// Each attempt began with the same eight batches, whose roots did not answer, and ended with
/// them: what stood behind them in the manifest expired.
#[tokio::test]
async fn a_part_of_the_ring_that_does_not_answer_keeps_no_other_from_renewal() {
    let scene = scene(40 * BATCH as u32).await;
    let at = |batch: u64| scene.hashes[(batch * BATCH) as usize];
    *scene.ring.dead.lock().expect("a lock") = Some(at(2)..at(22));
    let kept = scene.look_at(START + 10 * DAY).await;
    assert_eq!(scene.ring.renewed.load(Ordering::Relaxed), 20 * BATCH, "all others");
    let failed = format!("{} of {} blocks", 20 * BATCH, 40 * BATCH);
    assert!(kept.trouble.is_some_and(|trouble| trouble.contains(&failed)));
    assert_eq!((kept.pass, kept.refreshed_unix_secs), (None, START), "it begins anew");
    *scene.ring.dead.lock().expect("a lock") = None;
    let kept = scene.look_at(START + 11 * DAY).await;
    assert_eq!((kept.trouble, kept.refreshed_unix_secs), (None, START + 11 * DAY));
    assert_eq!(scene.ring.seen.lock().expect("a lock").len(), scene.hashes.len());
}

#[tokio::test]
async fn while_nobody_answers_a_pass_goes_on_behind_what_it_has_tried_and_wraps_round() {
    let scene = scene(40 * BATCH as u32).await;
    scene.ring.is_away.store(true, Ordering::Relaxed);
    for day in [10, 11] {
        let kept = scene.look_at(START + day * DAY).await;
        let tried = (day - 9) * u64::from(MAX_UNANSWERED) * BATCH;
        let pass = kept.pass.expect("it has not ended");
        assert_eq!((pass.next, pass.failed_blocks), (tried, tried));
        assert!(kept.trouble.is_some_and(|trouble| trouble.contains("no answer")));
    }
    scene.ring.is_away.store(false, Ordering::Relaxed);
    let kept = scene.look_at(START + 12 * DAY).await;
    assert_eq!(scene.ring.renewed.load(Ordering::Relaxed), 24 * BATCH, "the rest first");
    assert_eq!((kept.pass, kept.refreshed_unix_secs), (None, START));
    let kept = scene.look_at(START + 13 * DAY).await;
    assert_eq!((kept.trouble, kept.refreshed_unix_secs), (None, START + 13 * DAY));
    assert_eq!(scene.ring.seen.lock().expect("a lock").len(), scene.hashes.len());
}

#[tokio::test]
async fn a_newer_root_from_elsewhere_is_left_in_place() {
    // The renewer walks no tree of a volume that is published from a directory.
    let walk = Some(Arc::new(Trees::default()) as Arc<dyn TreeWalk>);
    let scene = scene_with(1, Some(Path::new("/docs")), walk).await;
    let key = scene.renewer.volumes.key("docs").expect("key");
    let newer = SignedBlock::sign(&key, b"", 9, b"newer");
    scene.ring.put_signed(newer.clone()).await.expect("put");
    let kept = scene.look_at(START + 10 * DAY).await;
    assert_eq!(kept.trouble, None);
    assert_eq!(scene.ring.get_signed(newer.key()).await, Ok(newer));
}

/// A mount gives a new list after each change and renews nothing itself: each new list put
/// the renewal off, and what a busy volume never changed expired.
#[tokio::test]
async fn a_volume_that_a_mount_changes_every_day_is_renewed() {
    let scene = scene_with(3, None, None).await;
    let key = scene.renewer.volumes.key("docs").expect("key");
    let mut renewed = Vec::new();
    for day in 1..=25 {
        let new = BlockHash([day as u8; 32]);
        let list = crate::control::message::join_hashes([scene.hashes[0], new].iter());
        let root = SignedBlock::sign(&key, b"", 4 + day, b"root");
        let volumes = &scene.renewer.volumes;
        volumes.keep_add("docs", day, 0, &list).expect("add");
        volumes.keep_commit("docs", day, 2, &root, START + day * DAY).expect("commit");
        scene.ring.seen.lock().expect("a lock").clear();
        scene.look_at(START + day * DAY + 60).await;
        if scene.ring.seen.lock().expect("a lock").contains(&scene.hashes[0]) {
            renewed.push(day);
        }
    }
    // The first list is of blocks that another node may have put long ago.
    assert_eq!(renewed, [1, 11, 21]);
}

/// A list that comes during a pass does not undo it.
#[tokio::test]
async fn a_pass_counts_for_the_list_that_a_mount_has_given_meanwhile() {
    let scene = scene_with(3, None, None).await;
    let volumes = scene.renewer.volumes.clone();
    let kept = Kept { refreshed_unix_secs: START + 10 * DAY, ..volumes.kept("docs") };
    let key = volumes.key("docs").expect("key");
    let root = SignedBlock::sign(&key, b"", 5, b"root");
    volumes.keep_add("docs", 9, 0, &[1; 32]).expect("add");
    volumes.keep_commit("docs", 9, 1, &root, START + 10 * DAY).expect("commit");
    let found = volumes.kept("docs");
    assert_eq!((found.refreshed_unix_secs, found.pass.is_some()), (START, true));
    let kept = Kept { pass: None, ..kept };
    volumes.set_kept("docs", &kept).expect("records");
    let found = volumes.kept("docs");
    assert_eq!((found.root_version, found.refreshed_unix_secs), (5, START + 10 * DAY));
    assert_eq!(found.pass, None);
}

/// A mount that was killed has put roots after the last list that it gave.
#[tokio::test]
async fn what_a_dead_mount_has_put_last_is_kept() {
    let trees = Arc::new(Trees::default());
    let scene = scene_with(2, None, Some(trees.clone())).await;
    let (volumes, ring) = (scene.renewer.volumes.clone(), &scene.ring);
    let key = volumes.key("docs").expect("key");
    let newest = SignedBlock::sign(&key, b"", 9, b"newest");
    ring.put_signed(newest.clone()).await.expect("put");
    let bytes = Bytes::from_static(b"written last");
    let last = BlockHash::of(&bytes);
    ring.put(vec![(last, bytes)]).await.expect("put");

    // A block of the newest tree cannot be read now: the former list is renewed.
    let set = |list| trees.0.lock().expect("a lock").insert(9, list);
    set(Err("a block is nowhere".into()));
    let kept = scene.look_at(START + 10 * DAY).await;
    let trouble = kept.trouble.expect("is told");
    assert!(trouble.contains("written last") && trouble.contains("nowhere"), "{trouble}");
    assert_eq!((kept.root_version, kept.refreshed_unix_secs), (4, START));
    assert!(scene.hashes.iter().all(|hash| ring.seen.lock().expect("a lock").contains(hash)));

    set(Ok(vec![last, scene.hashes[1], last]));
    ring.seen.lock().expect("a lock").clear();
    let kept = scene.look_at(START + 11 * DAY + 60).await;
    let now = START + 11 * DAY + 60;
    assert_eq!((kept.trouble, kept.root_version, kept.refreshed_unix_secs), (None, 9, now));
    let renewed = ring.seen.lock().expect("a lock").clone();
    assert_eq!(renewed, BTreeSet::from([last, scene.hashes[1]]));
    let manifest = volumes.manifest("docs").expect("opens").expect("is there");
    assert_eq!((manifest.root(), manifest.count()), (&newest, 2));
}

/// The one who unpublishes a volume does not wait for the renewer.
#[tokio::test]
async fn a_volume_given_up_meanwhile_stays_given_up() {
    let scene = scene_with(2, None, None).await;
    let volumes = &scene.renewer.volumes;
    let key = volumes.key("docs").expect("key");
    volumes.unpublish("docs").expect("unpublishes");
    let newest = SignedBlock::sign(&key, b"", 9, b"newest");
    let adopted = volumes.adopt("docs", 7, &newest, &scene.hashes, START);
    assert_eq!(adopted, Err(VolumeError::Unpublished { name: "docs".into() }));
    assert!(volumes.manifest("docs").expect("opens").is_none());
}

#[test]
fn a_clock_that_went_back_does_not_stop_renewal() {
    let kept = Kept { refreshed_unix_secs: START, ..Kept::default() };
    assert!(is_due(&kept, START - DAY, LEASE));
    assert!(!is_due(&kept, START + DAY, LEASE));
}
