//! A publish does not read files that have not changed since an earlier one, and is never wrong
//! for it.

use std::collections::BTreeSet;
use std::fs;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_dht::{Blocks, LeaseRenewal, MemoryBlocks, OverMemory, PutError, Renewed};
use atoll_env::{BoxFuture, Env, Instant, Runtime, Task, TokioRuntime};
use atoll_key::{BlockHash, BlockId, ReadKey};
use atoll_volume::owned::{
    LeaseRecorder, NoLeaseRecorder, NoProgress, Phase, Progress, PublishError, PublishOptions,
    Published, SourceFilter, publish,
};

use crate::ring::{WatchedBlocks, secret, small_blocks, snapshot};
use crate::trees::{assert_same, in_volume, on_disk, patterned, set_mtime, variety};

/// The machine's own, an hour later: files that were just made have long been as they are.
struct Later(TokioRuntime);

impl Runtime for Later {
    fn now(&self) -> Instant {
        self.0.now()
    }

    fn unix_ms(&self) -> u64 {
        self.0.unix_ms() + 3_600_000
    }

    fn sleep_until(&self, at: Instant) -> BoxFuture<'static, ()> {
        self.0.sleep_until(at)
    }

    fn spawn(&self, task: BoxFuture<'static, ()>) -> Task {
        self.0.spawn(task)
    }

    fn random_u64(&self) -> u64 {
        self.0.random_u64()
    }
}

fn later() -> Env {
    Arc::new(Later(TokioRuntime::current()))
}

/// Whatever file system the tests run on.
#[derive(Debug)]
struct Trusting;

impl SourceFilter for Trusting {
    fn withholds(&self, _: BorrowedFd<'_>) -> Option<String> {
        None
    }

    fn withholds_mount(&self, _: u64) -> Option<String> {
        None
    }

    fn trusts_times(&self, _: BorrowedFd<'_>) -> bool {
        true
    }
}

/// A directory to publish, and the file that remembers it.
struct Source {
    dir: tempfile::TempDir,
    cache: PathBuf,
    _beside: tempfile::TempDir,
}

impl Source {
    fn new() -> Source {
        let (dir, beside) =
            (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("another"));
        Source { dir, cache: beside.path().join("files"), _beside: beside }
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        fs::write(self.path().join(name), bytes).expect("writes");
    }

    fn options(&self) -> PublishOptions {
        PublishOptions {
            stat_cache: Some(self.cache.clone()),
            filter: Arc::new(Trusting),
            ..small_blocks()
        }
    }

    async fn try_publish(
        &self,
        env: Env,
        blocks: &Arc<impl Blocks>,
        options: PublishOptions,
    ) -> Result<Published, PublishError> {
        let (blocks, progress): (Arc<dyn Blocks>, _) = (blocks.clone(), Arc::new(NoProgress));
        let recorder = Arc::new(NoLeaseRecorder);
        publish(env, blocks, self.path(), &secret(), options, progress, recorder).await
    }

    async fn publish(&self, blocks: &Arc<impl Blocks>) -> Published {
        self.try_publish(later(), blocks, self.options()).await.expect("publishes")
    }

    async fn assert_published(&self, blocks: &Arc<impl Blocks>) {
        assert_same(&in_volume(&*snapshot(blocks).await).await, &on_disk(self.path()));
    }
}

#[tokio::test]
async fn unchanged_files_are_not_read_again() {
    let source = Source::new();
    variety(source.path());
    let blocks = Arc::new(MemoryBlocks::new());
    let first = source.publish(&blocks).await;
    assert_eq!(first.unread_files, 0);
    let second = source.publish(&blocks).await;
    assert_eq!((second.unread_files, second.unchanged), (first.files, true));
    assert_eq!((second.bytes, second.blocks, second.new_blocks), (first.bytes, first.blocks, 0));
    source.write("one more", b"new");
    let third = source.publish(&blocks).await;
    assert_eq!((third.unread_files, third.files), (first.files, first.files + 1));
    source.assert_published(&blocks).await;
    let all = PublishOptions { checksum: true, ..source.options() };
    let fourth = source.try_publish(later(), &blocks, all).await.expect("publishes");
    assert_eq!((fourth.unread_files, fourth.unchanged), (0, true));
    assert_eq!(source.publish(&blocks).await.unread_files, third.files);
}

#[tokio::test]
async fn a_changed_file_is_read_though_its_length_and_time_are_the_same() {
    let source = Source::new();
    for name in ["written", "renamed", "same"] {
        source.write(name, &patterned(9000, 1));
        set_mtime(&source.path().join(name), 1_600_000_000, 5);
    }
    let blocks = Arc::new(MemoryBlocks::new());
    source.publish(&blocks).await;
    let written = fs::File::options().write(true).open(source.path().join("written"));
    written.expect("opens").write_all_at(b"changed", 5000).expect("writes");
    source.write("other", &patterned(9000, 2));
    fs::rename(source.path().join("other"), source.path().join("renamed")).expect("renames");
    for name in ["written", "renamed"] {
        set_mtime(&source.path().join(name), 1_600_000_000, 5);
    }
    assert_eq!(source.publish(&blocks).await.unread_files, 1);
    source.assert_published(&blocks).await;
}

#[tokio::test]
async fn a_file_that_changed_a_moment_ago_is_not_remembered() {
    let source = Source::new();
    source.write("file", b"bytes");
    let blocks = Arc::new(MemoryBlocks::new());
    for _ in 0..2 {
        let now: Env = Arc::new(TokioRuntime::current());
        let published = source.try_publish(now, &blocks, source.options()).await;
        assert_eq!(published.expect("publishes").unread_files, 0);
    }
}

/// CFS §3.1: what is published is stored until its lease ends, whether it was read or not.
#[tokio::test]
async fn a_file_of_which_the_ring_lacks_a_block_is_read_again() {
    let source = Source::new();
    variety(source.path());
    source.write("long", &patterned(4096 * 300, 1303));
    source.write("other", &patterned(4096 * 3, 1304));
    let blocks = Arc::new(MemoryBlocks::new());
    let first = source.publish(&blocks).await;
    let data = BlockHash::of(&patterned(4096 * 300, 1303)[4096 * 7..4096 * 8]);
    assert!(blocks.lose(&data));
    let second = source.publish(&blocks).await;
    assert_eq!((second.unread_files, second.new_blocks), (first.files - 1, 1));
    source.assert_published(&blocks).await;
    // Another ring has nothing.
    let other = Arc::new(MemoryBlocks::new());
    let third = source.publish(&other).await;
    assert_eq!((third.unread_files, third.new_blocks), (1, first.blocks), "one is empty");
    source.assert_published(&other).await;
}

#[tokio::test]
async fn what_an_interrupted_publish_has_read_is_remembered() {
    let source = Source::new();
    for i in 0..40 {
        source.write(&i.to_string(), &patterned(50_000, i));
    }
    let blocks = WatchedBlocks::new();
    blocks.0.cut_off.store(1, Ordering::Relaxed);
    let failed = source.try_publish(later(), &blocks, source.options()).await;
    assert!(matches!(failed, Err(PublishError::Put(_))), "{failed:?}");
    blocks.0.cut_off.store(0, Ordering::Relaxed);
    // The ring has none of it, so all that is remembered must be read again.
    let second = source.publish(&blocks).await;
    assert_eq!(second.new_blocks, second.blocks);
    source.assert_published(&blocks).await;
    assert_eq!(source.publish(&blocks).await.unread_files, 40);
}

#[tokio::test]
async fn records_of_another_key_or_block_size_are_not_used() {
    let source = Source::new();
    variety(source.path());
    let blocks = Arc::new(MemoryBlocks::new());
    source.publish(&blocks).await;
    let read_key = ReadKey::from_bytes([7; 32]);
    let sealed = PublishOptions { read_key: Some(read_key), convert: true, ..source.options() };
    let larger = PublishOptions { block_size_bytes: 8192, ..source.options() };
    for options in [sealed, PublishOptions { convert: true, ..larger }] {
        let published = source.try_publish(later(), &blocks, options.clone()).await;
        assert_eq!(published.expect("publishes").unread_files, 0);
        let again = source.try_publish(later(), &blocks, options).await.expect("publishes");
        assert_eq!(again.unread_files, again.files);
    }
    source.assert_published(&blocks).await;
}

#[tokio::test]
async fn a_damaged_file_of_records_costs_a_reading_and_nothing_else() {
    let source = Source::new();
    for i in 0..5 {
        source.write(&i.to_string(), &patterned(6000, i));
    }
    let blocks = Arc::new(MemoryBlocks::new());
    source.publish(&blocks).await;
    let whole = fs::read(&source.cache).expect("it was written");
    for at in (0..whole.len()).step_by(7) {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x10;
        for bytes in [&damaged[..], &whole[..at]] {
            fs::write(&source.cache, bytes).expect("writes");
            let published = source.publish(&blocks).await;
            assert!(published.unchanged && published.unread_files < 5, "damage at {at}");
        }
    }
    assert_eq!(source.publish(&blocks).await.unread_files, 5);
}

#[tokio::test]
async fn records_of_removed_files_do_not_stay_for_ever() {
    let source = Source::new();
    let blocks = Arc::new(MemoryBlocks::new());
    source.write("stays", b"bytes");
    source.write("large", &patterned(4096 * 2000, 0));
    source.publish(&blocks).await;
    let size = || fs::metadata(&source.cache).expect("there").len();
    let once = size();
    for version in 1..40 {
        source.write("large", &patterned(4096 * 2000, version));
        source.publish(&blocks).await;
        assert!(size() < 3 * once + (1 << 20), "{} bytes, {once} at first", size());
    }
    fs::remove_file(source.path().join("large")).expect("removes");
    for _ in 0..2 {
        assert_eq!(source.publish(&blocks).await.unread_files, 1);
    }
}

#[tokio::test]
async fn where_nothing_can_be_remembered_all_files_are_read() {
    let source = Source::new();
    variety(source.path());
    let blocks = Arc::new(MemoryBlocks::new());
    let options = PublishOptions { stat_cache: Some("/does/not/exist".into()), ..source.options() };
    for _ in 0..2 {
        let published = source.try_publish(later(), &blocks, options.clone()).await;
        assert_eq!(published.expect("publishes").unread_files, 0);
    }
    source.assert_published(&blocks).await;
}

/// A ring of which a node denies a block each time it is asked, and never the same.
#[derive(Default)]
struct Denying {
    blocks: MemoryBlocks,
    denied: Mutex<BTreeSet<BlockId>>,
}

impl OverMemory for Denying {
    fn memory(&self) -> &MemoryBlocks {
        &self.blocks
    }

    fn renew_blocks(
        &self,
        renewal: LeaseRenewal,
    ) -> BoxFuture<'static, Vec<Result<Renewed, PutError>>> {
        let mut denied = self.denied.lock().expect("unpoisoned");
        let one = renewal.ids.iter().position(|id| denied.insert(*id));
        let renewed = self.blocks.renew_blocks(renewal);
        Box::pin(async move {
            // Meanwhile many others are found that will be asked for at once.
            tokio::time::sleep(Duration::from_millis(10)).await;
            let mut renewed = renewed.await;
            if let Some(one) = one {
                renewed[one] = Ok(Renewed::Lacking);
            }
            renewed
        })
    }
}

/// Counts how often all of the source was read.
#[derive(Default)]
struct Passes(AtomicU64);

impl Progress for Passes {
    fn phase(&self, phase: Phase) {
        self.0.fetch_add(u64::from(phase == Phase::Flush), Ordering::Relaxed);
    }
}

#[tokio::test]
async fn a_node_that_denies_blocks_cannot_keep_a_publish_from_its_end() {
    let source = Source::new();
    for i in 0..400 {
        source.write(&i.to_string(), &patterned(50, i));
    }
    let memory = Arc::new(MemoryBlocks::new());
    source.publish(&memory).await;
    let denying = Denying { blocks: (*memory).clone(), ..Denying::default() };
    let (denying, passes) = (Arc::new(denying), Arc::new(Passes::default()));
    let (blocks, recorder): (Arc<dyn Blocks>, _) = (denying.clone(), Arc::new(NoLeaseRecorder));
    let path = source.path();
    let published =
        publish(later(), blocks, path, &secret(), source.options(), passes.clone(), recorder).await;
    assert_eq!(published.expect("publishes").unread_files, 0);
    assert_eq!(passes.0.load(Ordering::Relaxed), 4);
    source.assert_published(&denying).await;
}

/// As by somebody who may not read what its mode forbids.
fn unprivileged(
    blocks: &Arc<MemoryBlocks>,
    source: &Path,
    options: PublishOptions,
) -> Result<Published, PublishError> {
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
    let (blocks, source): (Arc<dyn Blocks>, _) = (blocks.clone(), source.to_path_buf());
    let work = move || {
        let mut sets = capabilities(None).expect("capabilities");
        sets.effective -= CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH;
        set_capabilities(None, sets).expect("fewer are always allowed");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("runs").block_on(async {
            let (progress, recorder) = (Arc::new(NoProgress), Arc::new(NoLeaseRecorder));
            publish(later(), blocks, &source, &secret(), options, progress, recorder).await
        })
    };
    std::thread::spawn(work).join().expect("no panic")
}

/// A block that a kept file and an unread one share is lacking: the unread one must be read.
#[tokio::test]
async fn what_an_unread_file_shares_with_a_kept_one_is_stored() {
    use std::os::unix::fs::PermissionsExt;
    let source = Source::new();
    source.write("a kept", &patterned(4096 * 3, 1));
    source.write("b readable", &patterned(4096 * 3, 1));
    let blocks = Arc::new(MemoryBlocks::new());
    source.publish(&blocks).await;
    let data = BlockHash::of(&patterned(4096 * 3, 1)[4096..4096 * 2]);
    assert!(blocks.lose(&data));
    let kept = source.path().join("a kept");
    fs::set_permissions(&kept, fs::Permissions::from_mode(0o000)).expect("sets");
    let options = PublishOptions { reader_threads: 1, skip_unreadable: true, ..source.options() };
    let published = unprivileged(&blocks, source.path(), options).expect("publishes");
    assert_eq!(published.omissions.kept.count, 1);
    let read = snapshot(&blocks).await;
    let item = read.resolve(b"b readable").await.expect("is there");
    let bytes = read.read_range(&item, 0, 4096 * 3).await;
    assert_eq!(bytes.expect("the file can be read, so the ring has it"), patterned(4096 * 3, 1));
}

/// One lacking block, of several files, must not make all others be read.
#[tokio::test]
async fn one_lacking_block_of_many_files_costs_the_reading_of_these_only() {
    let source = Source::new();
    let bytes = patterned(4096 * 4000, 1);
    for i in 0..6 {
        source.write(&format!("copy {i:02}"), &bytes);
    }
    for i in 0..200 {
        source.write(&format!("other {i}"), &patterned(5000, 100 + i));
    }
    let blocks = Arc::new(MemoryBlocks::new());
    source.publish(&blocks).await;
    assert!(blocks.lose(&BlockHash::of(&bytes[4096 * 3999..])));
    let passes = Arc::new(Passes::default());
    let (ring, recorder): (Arc<dyn Blocks>, _) = (blocks.clone(), Arc::new(NoLeaseRecorder));
    let (path, options) = (source.path(), source.options());
    let second = publish(later(), ring, path, &secret(), options, passes.clone(), recorder).await;
    let unread_files = second.expect("publishes").unread_files;
    source.assert_published(&blocks).await;
    let passes = passes.0.load(Ordering::Relaxed);
    assert!(passes <= 2, "{passes} passes, {unread_files} files were not read");
}

#[tokio::test]
async fn a_block_of_a_read_and_an_unread_file_counts_once() {
    let source = Source::new();
    source.write("a", &patterned(4096 * 20, 1));
    let blocks = Arc::new(MemoryBlocks::new());
    let first = source.publish(&blocks).await;
    source.write("b", &patterned(4096 * 20, 1));
    let options = PublishOptions { reader_threads: 1, ..source.options() };
    let second = source.try_publish(later(), &blocks, options).await.expect("publishes");
    assert_eq!(second.unread_files, 1);
    assert_eq!(second.blocks, first.blocks);
}

/// Removes a file when all of the source was walked once, and notes what was told.
struct Removes(PathBuf, Mutex<Vec<String>>, AtomicU64);

impl Progress for Removes {
    fn phase(&self, phase: Phase) {
        self.1.lock().expect("unpoisoned").push(format!("{phase:?}"));
        if phase == Phase::Flush {
            let _ = fs::remove_file(&self.0);
        }
    }

    fn done(&self, files: u64, _: u64) {
        self.2.fetch_add(files, Ordering::Relaxed);
    }
}

#[derive(Default)]
struct Recorded(Mutex<Vec<BlockHash>>);

impl LeaseRecorder for Recorded {
    fn record(&self, hashes: Vec<BlockHash>) -> BoxFuture<'static, Result<(), String>> {
        self.0.lock().expect("unpoisoned").extend(hashes);
        Box::pin(async { Ok(()) })
    }
}

/// The node renews what is recorded for as long as the volume is; it must be able to.
#[tokio::test]
async fn what_is_recorded_is_on_the_ring() {
    let source = Source::new();
    source.write("goes", &patterned(4096 * 3, 1));
    source.write("stays", &patterned(4096 * 3, 2));
    let blocks = Arc::new(MemoryBlocks::new());
    source.publish(&blocks).await;
    assert!(blocks.lose(&BlockHash::of(&patterned(4096 * 3, 1)[..4096])));
    let progress = Removes(source.path().join("goes"), Mutex::default(), AtomicU64::new(0));
    let (progress, recorder) = (Arc::new(progress), Arc::new(Recorded::default()));
    let (ring, path): (Arc<dyn Blocks>, _) = (blocks.clone(), source.path());
    let published =
        publish(later(), ring, path, &secret(), source.options(), progress, recorder.clone()).await;
    assert_eq!(published.expect("publishes").files, 1);
    let recorded = std::mem::take(&mut *recorder.0.lock().expect("unpoisoned"));
    assert_eq!(blocks.renew(recorded).await.expect("answers"), vec![], "recorded and lacking");
}

/// All batches may have ended before the last file is found.
#[tokio::test]
async fn all_that_is_stored_is_recorded_however_fast_the_ring_is() {
    let source = Source::new();
    source.write("file", &patterned(9000, 1));
    for _ in 0..200 {
        let (blocks, recorder) = (Arc::new(MemoryBlocks::new()), Arc::new(Recorded::default()));
        let (ring, path): (Arc<dyn Blocks>, _) = (blocks.clone(), source.path());
        let progress = Arc::new(NoProgress);
        publish(later(), ring, path, &secret(), small_blocks(), progress, recorder.clone())
            .await
            .expect("publishes");
        let recorded = recorder.0.lock().expect("unpoisoned").iter().collect::<BTreeSet<_>>().len();
        assert_eq!(recorded, blocks.len());
    }
}

/// Whoever waits is told that the source is read once more.
#[tokio::test]
async fn the_second_walk_is_told() {
    let source = Source::new();
    source.write("file", &patterned(4096 * 3, 1));
    let blocks = Arc::new(MemoryBlocks::new());
    source.publish(&blocks).await;
    assert!(blocks.lose(&BlockHash::of(&patterned(4096 * 3, 1)[..4096])));
    let progress = Arc::new(Removes("/none".into(), Mutex::default(), AtomicU64::new(0)));
    let (ring, path): (Arc<dyn Blocks>, _) = (blocks.clone(), source.path());
    let recorder = Arc::new(NoLeaseRecorder);
    publish(later(), ring, path, &secret(), source.options(), progress.clone(), recorder)
        .await
        .expect("publishes");
    let told = progress.1.lock().expect("unpoisoned").clone();
    assert_eq!(told, ["Upload", "Flush", "Upload", "Flush", "Root"]);
}

/// A write(2) moves the times when it begins and not when it ends, which may be minutes later
/// (1 GiB in place on a slow disk); so may be writes through a map where the kernel writes back late.
#[tokio::test]
async fn a_file_that_is_open_for_writing_is_not_remembered() {
    let source = Source::new();
    source.write("file", &patterned(9000, 1));
    let blocks = Arc::new(MemoryBlocks::new());
    let _open = fs::File::options().write(true).open(source.path().join("file")).expect("opens");
    for _ in 0..2 {
        assert_eq!(source.publish(&blocks).await.unread_files, 0);
    }
}
