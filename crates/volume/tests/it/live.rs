//! Publishing a tree that changes meanwhile, or that cannot all be read: nothing goes from the
//! volume that is still in the tree.

use std::collections::BTreeSet;
use std::fs;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use atoll_dht::{Blocks, MemoryBlocks};
use atoll_env::BoxFuture;
use atoll_key::{BlockHash, ReadKey};
use atoll_volume::owned::{
    LeaseRecorder, NoLeaseRecorder, NoProgress, Progress, PublishError, PublishOptions, Published,
    SourceFilter, VolumeOptions, publish,
};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

use crate::ring::{WatchedBlocks, env, open_with, publish_with, secret, small_blocks, snapshot};
use crate::trees::{Tree, assert_same, in_volume, on_disk, patterned, variety};

/// Does something each time a part of a file was read; files are read one after the other.
struct Meddler<F>(F);

impl<F: Fn() + Send + Sync + 'static> Progress for Meddler<F> {
    fn done(&self, files: u64, _: u64) {
        if files == 0 {
            (self.0)();
        }
    }
}

async fn meddled(
    blocks: &Arc<impl Blocks>,
    source: &Path,
    meddle: impl Fn() + Send + Sync + 'static,
) -> Published {
    let blocks: Arc<dyn Blocks> = blocks.clone();
    let options = PublishOptions { reader_threads: 1, ..small_blocks() };
    let (progress, recorder) = (Arc::new(Meddler(meddle)), Arc::new(NoLeaseRecorder));
    publish(env(), blocks, source, &secret(), options, progress, recorder).await.expect("publishes")
}

fn append(file: &Path) {
    let file = fs::OpenOptions::new().append(true).open(file).expect("opens");
    std::io::Write::write_all(&mut &file, b"more").expect("writes");
}

async fn tree_of(blocks: &Arc<impl Blocks>) -> Tree {
    in_volume(&*snapshot(blocks).await).await
}

/// A file that was there when its directory was listed made the whole publish fail.
#[tokio::test]
async fn what_vanishes_before_it_is_read_is_not_there() {
    let source = tempfile::tempdir().expect("a directory");
    fs::write(source.path().join("a"), patterned(20_000, 1)).expect("writes");
    fs::write(source.path().join("b"), b"goes").expect("writes");
    fs::write(source.path().join("c"), b"stays").expect("writes");
    let blocks = Arc::new(MemoryBlocks::new());
    publish_with(&blocks, source.path(), small_blocks()).await;
    let gone = source.path().join("b");
    let published = meddled(&blocks, source.path(), move || drop(fs::remove_file(&gone))).await;
    assert!(published.omissions.is_complete(), "{:?}", published.omissions);
    assert_eq!(published.files, 2);
    let mut tree = tree_of(&blocks).await;
    // The directory's time is of when it was listed.
    tree.remove(&b""[..]);
    let mut disk = on_disk(source.path());
    disk.remove(&b""[..]);
    assert_same(&tree, &disk);
}

#[tokio::test]
async fn a_file_that_changes_once_while_it_is_read_is_read_again() {
    let source = tempfile::tempdir().expect("a directory");
    let file = source.path().join("file");
    fs::write(&file, patterned(50_000, 1)).expect("writes");
    let blocks = Arc::new(MemoryBlocks::new());
    let (changed, left) = (file.clone(), Mutex::new(1));
    let published = meddled(&blocks, source.path(), move || {
        let mut left = left.lock().expect("not poisoned");
        if *left > 0 {
            *left -= 1;
            append(&changed);
        }
    });
    assert!(published.await.omissions.is_complete());
    let tree = tree_of(&blocks).await;
    assert_same(&tree, &on_disk(source.path()));
    assert_eq!(tree[&b"file"[..]].bytes.len(), 50_004);
}

/// One log that is always written to made every publish of the tree fail.
#[tokio::test]
async fn a_file_that_never_stays_the_same_keeps_its_previous_version() {
    let source = tempfile::tempdir().expect("a directory");
    let busy = source.path().join("busy");
    let other = source.path().join("other");
    fs::write(&busy, patterned(50_000, 1)).expect("writes");
    fs::write(&other, b"old").expect("writes");
    let blocks = Arc::new(MemoryBlocks::new());
    publish_with(&blocks, source.path(), small_blocks()).await;
    let before = on_disk(source.path());
    fs::write(&other, b"newer").expect("writes");
    fs::write(source.path().join("new and busy"), patterned(50_000, 2)).expect("writes");
    let changing = [busy.clone(), source.path().join("new and busy")];
    let published = meddled(&blocks, source.path(), move || {
        changing.iter().for_each(|file| append(file));
    });
    let published = published.await;
    let (kept, left_out) = (&published.omissions.kept, &published.omissions.left_out);
    assert_eq!((kept.count, left_out.count, published.files), (1, 1, 2));
    assert_eq!(kept.listed[0].path, Path::new("busy"));
    assert_eq!(left_out.listed[0].path, Path::new("new and busy"));
    assert!(kept.listed[0].reason.contains("changed"), "{kept:?}");
    let tree = tree_of(&blocks).await;
    assert_eq!(tree[&b"other"[..]].bytes, b"newer");
    assert!(tree[&b"busy"[..]] == before[&b"busy"[..]], "the file as it was");
    assert_eq!(tree.len(), 3, "with the top directory");
}

/// Runs a publish in a thread that may not read everything, as root may.
fn unprivileged(
    blocks: &Arc<impl Blocks>,
    source: &Path,
    options: PublishOptions,
    recorder: Arc<dyn LeaseRecorder>,
) -> Result<Published, PublishError> {
    let (blocks, source): (Arc<dyn Blocks>, _) = (blocks.clone(), source.to_path_buf());
    let work = move || {
        let mut sets = capabilities(None).expect("capabilities");
        sets.effective -= CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH;
        set_capabilities(None, sets).expect("fewer are always allowed");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("runs").block_on(async {
            let progress = Arc::new(NoProgress);
            publish(env(), blocks, &source, &secret(), options, progress, recorder).await
        })
    };
    std::thread::spawn(work).join().expect("no panic")
}

fn skip_unreadable() -> PublishOptions {
    PublishOptions { skip_unreadable: true, ..small_blocks() }
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("sets");
}

/// A directory with a little of everything, a file of many blocks and one of holes.
fn precious(top: &Path) {
    fs::create_dir(top).expect("makes");
    variety(top);
    fs::write(top.join("a/large"), patterned(4096 * 300, 7)).expect("writes");
    let sparse = fs::File::create(top.join("a/sparse")).expect("makes");
    std::os::unix::fs::FileExt::write_all_at(&sparse, &patterned(5000, 8), 100 << 20)
        .expect("writes");
    for i in 0..600 {
        let name = format!("a/one of enough for several directory blocks {i}");
        fs::write(top.join(name), i.to_string()).expect("writes");
    }
}

#[derive(Default)]
struct Kept(Mutex<BTreeSet<BlockHash>>);

impl LeaseRecorder for Kept {
    fn record(&self, hashes: Vec<BlockHash>) -> BoxFuture<'static, Result<(), String>> {
        self.0.lock().expect("not poisoned").extend(hashes);
        Box::pin(async { Ok(()) })
    }
}

/// With `skip_unreadable` the volume lost what could not be read for a while, and with it the
/// only copy that others had.
#[tokio::test]
async fn what_cannot_be_read_any_more_keeps_its_previous_version_and_its_leases() {
    for read_key in [None, Some(ReadKey::from_bytes([9; 32]))] {
        let source = tempfile::tempdir().expect("a directory");
        let (dir, file) = (source.path().join("dir"), source.path().join("file"));
        precious(&dir);
        fs::write(&file, patterned(30_000, 3)).expect("writes");
        fs::write(source.path().join("readable"), b"old").expect("writes");
        let blocks = Arc::new(MemoryBlocks::new());
        let options = || PublishOptions { read_key: read_key.clone(), ..skip_unreadable() };
        let first_kept = Arc::new(Kept::default());
        let first = unprivileged(&blocks, source.path(), options(), first_kept.clone());
        let first = first.expect("publishes");
        let mut expected = on_disk(source.path());
        set_mode(&file, 0);
        set_mode(&dir, 0);
        fs::write(source.path().join("readable"), b"new").expect("writes");
        fs::write(source.path().join("never published"), b"x").expect("writes");
        set_mode(&source.path().join("never published"), 0);
        let kept = Arc::new(Kept::default());
        let second = unprivileged(&blocks, source.path(), options(), kept.clone());
        let second = second.expect("publishes");
        set_mode(&dir, 0o700);
        set_mode(&file, 0o600);

        let paths = |list: &[atoll_volume::owned::Omission]| {
            list.iter().map(|o| o.path.display().to_string()).collect::<BTreeSet<_>>()
        };
        let named = |names: &[&str]| names.iter().map(|n| n.to_string()).collect::<BTreeSet<_>>();
        assert_eq!(paths(&second.omissions.kept.listed), named(&["dir", "file"]));
        assert_eq!(paths(&second.omissions.left_out.listed), named(&["never published"]));
        assert_eq!(second.lost_blocks, 0);
        let totals = |p: &Published| (p.files, p.dirs, p.symlinks, p.bytes);
        assert_eq!(totals(&second), totals(&first), "what is kept counts");

        let volume = VolumeOptions { read_key: read_key.clone(), ..VolumeOptions::default() };
        let snapshot = open_with(&blocks, volume).await.snapshot().await;
        let mut tree = in_volume(&snapshot).await;
        for (path, bytes) in [(&b"readable"[..], b"new".to_vec()), (b"", vec![])] {
            assert_eq!(tree.remove(path).expect("is there").bytes, bytes);
            expected.remove(path);
        }
        assert_same(&tree, &expected);

        // Of the first version only the top directory and the old file are not wanted any more.
        let (first_kept, kept) = (first_kept.0.lock().unwrap(), kept.0.lock().unwrap());
        assert_eq!(first_kept.difference(&kept).count(), 2, "every block below is kept");
        assert_eq!(second.blocks, kept.len() as u64);
    }
}

#[tokio::test]
async fn an_unreadable_file_fails_the_publish_unless_it_may_be_skipped() {
    let source = tempfile::tempdir().expect("a directory");
    let file = source.path().join("file");
    fs::write(&file, b"x").expect("writes");
    let blocks = Arc::new(MemoryBlocks::new());
    publish_with(&blocks, source.path(), small_blocks()).await;
    set_mode(&file, 0);
    let result = unprivileged(&blocks, source.path(), small_blocks(), Arc::new(NoLeaseRecorder));
    match result {
        Err(PublishError::Source { path, .. }) => assert_eq!(path, file),
        other => panic!("{other:?}"),
    }
}

/// What the ring has lost of a kept version is counted; the rest of it stays.
#[tokio::test]
async fn blocks_that_the_ring_lost_of_a_kept_version_are_counted() {
    let source = tempfile::tempdir().expect("a directory");
    let (small, large) = (source.path().join("small"), source.path().join("large"));
    fs::write(&small, b"small").expect("writes");
    fs::write(&large, patterned(4096 * 10, 3)).expect("writes");
    let blocks = Arc::new(MemoryBlocks::new());
    publish_with(&blocks, source.path(), small_blocks()).await;
    blocks.lose(&BlockHash::of(&patterned(4096 * 10, 3)[4096 * 5..4096 * 6]));
    set_mode(&small, 0);
    set_mode(&large, 0);
    let published =
        unprivileged(&blocks, source.path(), skip_unreadable(), Arc::new(NoLeaseRecorder))
            .expect("some");
    assert_eq!((published.omissions.kept.count, published.lost_blocks), (2, 1));
    let kept = snapshot(&blocks).await.resolve(b"large").await.expect("is there");
    assert_eq!(kept.entry.size_bytes(), 4096 * 10);
}

/// A ring that cannot be asked is no reason to take anything out of the volume.
#[tokio::test]
async fn a_previous_version_that_cannot_be_asked_for_fails_the_publish() {
    let source = tempfile::tempdir().expect("a directory");
    fs::create_dir(source.path().join("dir")).expect("makes");
    fs::write(source.path().join("dir/file"), patterned(4096 * 10, 3)).expect("writes");
    let blocks = WatchedBlocks::new();
    let first = publish_with(&blocks, source.path(), small_blocks()).await;
    set_mode(&source.path().join("dir"), 0);
    blocks.0.cut_off.store(1, Ordering::Relaxed);
    let result = unprivileged(&blocks, source.path(), skip_unreadable(), Arc::new(NoLeaseRecorder));
    assert!(matches!(result, Err(PublishError::Previous { .. })), "{result:?}");
    blocks.0.cut_off.store(0, Ordering::Relaxed);
    set_mode(&source.path().join("dir"), 0o700);
    assert_eq!(snapshot(&blocks).await.version(), first.version);
}

/// Withholds directories in which there is a file called `secret`.
#[derive(Debug)]
struct NoSecrets;

impl SourceFilter for NoSecrets {
    fn withholds(&self, directory: BorrowedFd<'_>) -> Option<String> {
        let flags = rustix::fs::AtFlags::empty();
        rustix::fs::statat(directory, "secret", flags).is_ok().then(|| "it has a secret".into())
    }

    fn withholds_mount(&self, _: u64) -> Option<String> {
        None
    }
}

#[tokio::test]
async fn a_directory_that_the_filter_withholds_is_left_out_with_all_below_it() {
    let source = tempfile::tempdir().expect("a directory");
    for dir in ["a/inner", "b"] {
        fs::create_dir_all(source.path().join(dir)).expect("makes");
        fs::write(source.path().join(dir).join("file"), dir).expect("writes");
    }
    fs::write(source.path().join("a/secret"), b"x").expect("writes");
    let options = || PublishOptions {
        filter: Arc::new(NoSecrets),
        // A pattern must not hide what makes a directory one to be withheld.
        exclude: atoll_volume::owned::exclude_set(&["secret"]).expect("a pattern"),
        ..small_blocks()
    };
    let blocks = Arc::new(MemoryBlocks::new());
    let published = publish_with(&blocks, source.path(), options()).await;
    let withheld = &published.omissions.withheld;
    assert_eq!((withheld.count, withheld.listed[0].path.as_path()), (1, Path::new("a")));
    assert!(published.omissions.is_complete(), "it was not to be published");
    let tree = tree_of(&blocks).await;
    let paths: Vec<_> = tree.keys().map(|p| String::from_utf8_lossy(p).into_owned()).collect();
    assert_eq!(paths, ["", "b", "b/file"]);

    let (progress, recorder, top) =
        (Arc::new(NoProgress), Arc::new(NoLeaseRecorder), source.path().join("a"));
    let ring: Arc<dyn Blocks> = blocks.clone();
    let result = publish(env(), ring, &top, &secret(), options(), progress, recorder).await;
    assert!(matches!(result, Err(PublishError::Withheld { .. })), "{result:?}");
}
