//! Publishing: what goes in comes out, and an update uploads only what changed.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use atoll_dht::{Blocks, MemoryBlocks};
use atoll_env::BoxFuture;
use atoll_key::BlockHash;
use atoll_volume::owned::{
    LeaseRecorder, NoLeaseRecorder, NoProgress, Progress, PublishError, PublishOptions,
    exclude_set, publish,
};
use proptest::prelude::*;

use crate::ring::{WatchedBlocks, env, publish_with, secret, small_blocks, snapshot};
use crate::trees::{assert_same, in_volume, on_disk, patterned, set_mtime, variety};

/// CFS §3.1: the tree below a root block is the one its publisher inserted.
#[tokio::test]
async fn a_published_tree_reads_back_with_every_byte_name_mode_time_link_and_xattr() {
    let source = tempfile::tempdir().expect("a directory");
    variety(source.path());
    let blocks = Arc::new(MemoryBlocks::new());
    let published = publish_with(&blocks, source.path(), small_blocks()).await;
    let snapshot = snapshot(&blocks).await;
    let disk = on_disk(source.path());
    assert_same(&in_volume(&snapshot).await, &disk);
    let files = disk.values().filter(|s| s.kind == atoll_vfs::FileKind::Regular);
    assert_eq!(published.files, files.clone().count() as u64);
    assert_eq!(published.bytes, files.map(|s| s.bytes.len() as u64).sum::<u64>());
    assert_eq!((published.dirs, published.symlinks, published.special), (5, 2, 0));
    assert_eq!(published.new_blocks, blocks.len() as u64);
    assert_eq!(published.new_bytes, blocks.counts().put_bytes);
    assert_eq!(published.blocks, published.new_blocks);
    assert_eq!(snapshot.info().files, published.files);
}

#[derive(Clone, Debug)]
enum Node {
    File(Vec<u8>, u32),
    Link(String),
    Dir(BTreeMap<String, Node>),
}

fn node() -> impl Strategy<Value = Node> {
    let bytes = prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..200),
        (0usize..40_000, any::<u64>()).prop_map(|(len, seed)| patterned(len, seed)),
        (1usize..6, 0usize..5000).prop_map(|(holes, tail)| [
            vec![0; holes * 4096],
            patterned(tail, 9)
        ]
        .concat()),
    ];
    let leaf = prop_oneof![
        4 => (bytes, 0u32..0o1000).prop_map(|(b, m)| Node::File(b, m | 0o400)),
        1 => "[a-z./]{1,40}".prop_map(Node::Link),
    ];
    leaf.prop_recursive(4, 40, 8, |inner| {
        proptest::collection::btree_map("[A-Za-z0-9 .äß-]{1,20}", inner, 0..8).prop_map(Node::Dir)
    })
}

fn make(at: &Path, node: &Node) {
    use std::os::unix::fs::PermissionsExt;
    match node {
        Node::File(bytes, mode) => {
            fs::write(at, bytes).expect("writes");
            fs::set_permissions(at, fs::Permissions::from_mode(*mode)).expect("sets");
        }
        Node::Link(target) => std::os::unix::fs::symlink(target, at).expect("links"),
        Node::Dir(children) => {
            fs::create_dir(at).expect("makes");
            for (name, child) in children {
                if name != "." && name != ".." {
                    make(&at.join(name), child);
                }
            }
        }
    }
    set_mtime(at, 1_600_000_000 + at.as_os_str().len() as i64, 7);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn any_tree_reads_back_as_it_was_published(
        children in proptest::collection::btree_map("[a-z]{1,8}", node(), 0..8),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runs");
        runtime.block_on(async {
            let dir = tempfile::tempdir().expect("a directory");
            let top = dir.path().join("top");
            make(&top, &Node::Dir(children));
            let blocks = Arc::new(MemoryBlocks::new());
            publish_with(&blocks, &top, small_blocks()).await;
            assert_same(&in_volume(&*snapshot(&blocks).await).await, &on_disk(&top));
        });
    }
}

/// CFS §3.1: an update "involves updating the file system's root block in place, to make
/// it point to the new data".
#[tokio::test]
async fn an_update_uploads_only_the_blocks_that_changed() {
    let source = tempfile::tempdir().expect("a directory");
    for i in 0..50 {
        fs::write(source.path().join(format!("file-{i}")), patterned(10_000, i)).expect("writes");
    }
    fs::create_dir(source.path().join("dir")).expect("makes");
    fs::write(source.path().join("dir/large"), patterned(4096 * 300, 99)).expect("writes");
    let blocks = Arc::new(MemoryBlocks::new());
    let first = publish_with(&blocks, source.path(), small_blocks()).await;

    let mut large = patterned(4096 * 300, 99);
    large[4096 * 150] ^= 1;
    fs::write(source.path().join("dir/large"), &large).expect("writes");
    let second = publish_with(&blocks, source.path(), small_blocks()).await;
    // A data block, its indirect block, the inode, its directory, the root directory.
    assert_eq!(second.new_blocks, 5);
    assert!(!second.unchanged && second.version > first.version);
    assert_eq!(second.volume, first.volume);
    assert_same(&in_volume(&*snapshot(&blocks).await).await, &on_disk(source.path()));
}

#[tokio::test]
async fn publishing_the_same_tree_again_changes_nothing() {
    let source = tempfile::tempdir().expect("a directory");
    variety(source.path());
    let blocks = Arc::new(MemoryBlocks::new());
    let first = publish_with(&blocks, source.path(), small_blocks()).await;
    let before = blocks.counts();
    let second = publish_with(&blocks, source.path(), small_blocks()).await;
    assert!(second.unchanged);
    assert_eq!((second.version, second.new_blocks), (first.version, 0));
    assert_eq!(blocks.counts().puts, before.puts);
    // The label is signed with the tree: another one is another version.
    let options = PublishOptions { label: Some("maps".into()), ..small_blocks() };
    let third = publish_with(&blocks, source.path(), options).await;
    assert!(!third.unchanged && third.version > first.version && third.new_blocks == 0);
    assert_eq!(snapshot(&blocks).await.info().label.as_deref(), Some("maps"));
}

#[tokio::test]
async fn equal_files_are_stored_once() {
    let source = tempfile::tempdir().expect("a directory");
    for i in 0..20 {
        fs::write(source.path().join(format!("copy-{i}")), patterned(20_000, 5)).expect("writes");
    }
    let blocks = Arc::new(MemoryBlocks::new());
    let published = publish_with(&blocks, source.path(), small_blocks()).await;
    // Five data blocks, one inode, one directory.
    assert_eq!((published.new_blocks, blocks.counts().puts), (7, 7));
}

#[tokio::test]
async fn excluded_names_and_paths_are_left_out() {
    let source = tempfile::tempdir().expect("a directory");
    for dir in ["target", "keep/target", "docs"] {
        fs::create_dir_all(source.path().join(dir)).expect("makes");
        fs::write(source.path().join(dir).join("file.o"), b"x").expect("writes");
        fs::write(source.path().join(dir).join("file.c"), b"y").expect("writes");
    }
    let exclude = exclude_set(&["*.o", "/target/", "docs/*.c"]).expect("patterns");
    let options = PublishOptions { exclude, ..small_blocks() };
    let blocks = Arc::new(MemoryBlocks::new());
    publish_with(&blocks, source.path(), options).await;
    let tree = in_volume(&*snapshot(&blocks).await).await;
    let paths: Vec<_> = tree.keys().map(|p| String::from_utf8_lossy(p).into_owned()).collect();
    assert_eq!(paths, ["", "docs", "keep", "keep/target", "keep/target/file.c"]);
}

#[tokio::test]
async fn fifos_and_sockets_are_counted_and_left_out() {
    let source = tempfile::tempdir().expect("a directory");
    fs::write(source.path().join("file"), b"x").expect("writes");
    let fifo = source.path().join("fifo");
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0)
        .expect("makes");
    let _socket = std::os::unix::net::UnixListener::bind(source.path().join("s")).expect("binds");
    let blocks = Arc::new(MemoryBlocks::new());
    let published = publish_with(&blocks, source.path(), small_blocks()).await;
    assert_eq!((published.special, published.files), (2, 1));
    assert_eq!(snapshot(&blocks).await.root().entry.size_bytes(), 1);
}

/// A directory with more levels than a reader follows: also what cannot be read.
fn too_deep(top: &Path) {
    let mut at = top.to_path_buf();
    for _ in 0..130 {
        at.push("d");
        fs::create_dir(&at).expect("makes");
    }
}

#[tokio::test]
async fn what_cannot_be_published_fails_the_whole_or_is_skipped_by_choice() {
    let source = tempfile::tempdir().expect("a directory");
    fs::write(source.path().join("file"), b"x").expect("writes");
    too_deep(source.path());
    let blocks: Arc<dyn Blocks> = Arc::new(MemoryBlocks::new());
    let run = |options| {
        let recorder = Arc::new(NoLeaseRecorder);
        let blocks = blocks.clone();
        let source = source.path().to_path_buf();
        async move {
            publish(env(), blocks, &source, &secret(), options, Arc::new(NoProgress), recorder)
                .await
        }
    };
    let error = run(small_blocks()).await.expect_err("it is too deep");
    let PublishError::Source { path, reason } = &error else { panic!("{error}") };
    let within = path.starts_with(source.path()) && path.ends_with("d/d/d");
    assert!(within && reason.contains("128"), "{error}");
    let root = blocks.get_signed(secret().volume_id().root_key()).await;
    assert!(root.is_err(), "nothing is published by halves");

    let published = run(PublishOptions { skip_unreadable: true, ..small_blocks() }).await;
    let published = published.expect("publishes the rest");
    let left_out = &published.omissions.left_out;
    assert_eq!((left_out.count, published.files, published.dirs), (1, 1, 129));
    assert!(left_out.listed[0].reason.contains("128"));
}

#[tokio::test]
async fn a_source_that_is_no_directory_is_refused() {
    let source = tempfile::NamedTempFile::new().expect("a file");
    let blocks: Arc<dyn Blocks> = Arc::new(MemoryBlocks::new());
    let (progress, recorder) = (Arc::new(NoProgress), Arc::new(NoLeaseRecorder));
    let (path, secret) = (source.path(), secret());
    let result = publish(env(), blocks, path, &secret, small_blocks(), progress, recorder).await;
    assert!(matches!(result, Err(PublishError::Source { .. })));
}

#[tokio::test]
async fn bad_options_are_refused_before_anything_is_read() {
    let blocks: Arc<dyn Blocks> = Arc::new(MemoryBlocks::new());
    let sizes = [0, 1000, 2048, 12_288, 2 << 20]
        .map(|block_size_bytes| PublishOptions { block_size_bytes, ..PublishOptions::default() });
    let label = PublishOptions { label: Some("x".repeat(256)), ..PublishOptions::default() };
    for options in sizes.into_iter().chain([label]) {
        let (progress, recorder) = (Arc::new(NoProgress), Arc::new(NoLeaseRecorder));
        let (path, secret) = (Path::new("/does/not/exist"), secret());
        let result =
            publish(env(), blocks.clone(), path, &secret, options, progress, recorder).await;
        assert!(matches!(result, Err(PublishError::Options(_))));
    }
}

#[derive(Default)]
struct Kept(Mutex<Vec<BlockHash>>);

impl LeaseRecorder for Kept {
    fn record(&self, hashes: Vec<BlockHash>) -> BoxFuture<'static, Result<(), String>> {
        assert!(hashes.len() <= 1024);
        self.0.lock().expect("not poisoned").extend(hashes);
        Box::pin(async { Ok(()) })
    }
}

struct Refuses;

impl LeaseRecorder for Refuses {
    fn record(&self, _: Vec<BlockHash>) -> BoxFuture<'static, Result<(), String>> {
        Box::pin(async { Err("the disk is full".into()) })
    }
}

#[tokio::test]
async fn the_recorder_hears_of_every_block_of_the_tree_new_or_not() {
    let source = tempfile::tempdir().expect("a directory");
    variety(source.path());
    for i in 0..3000 {
        fs::write(source.path().join(format!("{i}")), i.to_string()).expect("writes");
    }
    let blocks = Arc::new(MemoryBlocks::new());
    publish_with(&blocks, source.path(), small_blocks()).await;
    let recorder = Arc::new(Kept::default());
    let ring: Arc<dyn Blocks> = blocks.clone();
    let (progress, secret) = (Arc::new(NoProgress), secret());
    publish(env(), ring, source.path(), &secret, small_blocks(), progress, recorder.clone())
        .await
        .expect("publishes");
    let mut kept = recorder.0.lock().expect("not poisoned").clone();
    kept.sort();
    assert_eq!(kept.len(), blocks.len());
    kept.dedup();
    assert_eq!(blocks.renew(kept.clone()).await, Ok(vec![]));
    assert_eq!(kept.len(), blocks.len());
}

#[tokio::test]
async fn a_failing_keeper_or_ring_fails_the_publish_and_leaves_the_old_root() {
    let source = tempfile::tempdir().expect("a directory");
    variety(source.path());
    let blocks = WatchedBlocks::new();
    let first = publish_with(&blocks, source.path(), small_blocks()).await;
    fs::write(source.path().join("new"), patterned(5_000_000, 1)).expect("writes");
    let ring: Arc<dyn Blocks> = blocks.clone();
    let attempt = |recorder: Arc<dyn LeaseRecorder>| {
        let (ring, source, progress) = (ring.clone(), source.path().to_path_buf(), NoProgress);
        async move {
            let progress = Arc::new(progress);
            publish(env(), ring, &source, &secret(), small_blocks(), progress, recorder).await
        }
    };
    let result = attempt(Arc::new(Refuses)).await;
    assert!(matches!(result, Err(PublishError::Record(_))), "{result:?}");
    blocks.0.cut_off.store(1, Ordering::Relaxed);
    let result = attempt(Arc::new(NoLeaseRecorder)).await;
    assert!(matches!(result, Err(PublishError::Put(_))), "{result:?}");
    blocks.0.cut_off.store(0, Ordering::Relaxed);
    assert_eq!(snapshot(&blocks).await.version(), first.version);
}

#[derive(Default)]
struct Totals {
    discovered: Mutex<(u64, u64)>,
    done: Mutex<(u64, u64)>,
    uploaded: Mutex<(u64, u64)>,
}

fn bump(total: &Mutex<(u64, u64)>, a: u64, b: u64) {
    let mut total = total.lock().expect("not poisoned");
    *total = (total.0 + a, total.1 + b);
}

impl Progress for Totals {
    fn discovered(&self, files: u64, bytes: u64) {
        bump(&self.discovered, files, bytes);
    }

    fn done(&self, files: u64, bytes: u64) {
        bump(&self.done, files, bytes);
    }

    fn uploaded(&self, new_blocks: u64, new_bytes: u64) {
        bump(&self.uploaded, new_blocks, new_bytes);
    }
}

#[tokio::test]
async fn progress_adds_up_to_what_was_published() {
    let source = tempfile::tempdir().expect("a directory");
    variety(source.path());
    let sparse = fs::File::create(source.path().join("sparse")).expect("makes");
    sparse.set_len(10_000_001).expect("grows");
    let blocks: Arc<dyn Blocks> = Arc::new(MemoryBlocks::new());
    let totals = Arc::new(Totals::default());
    let (secret, recorder) = (secret(), Arc::new(NoLeaseRecorder));
    let published =
        publish(env(), blocks, source.path(), &secret, small_blocks(), totals.clone(), recorder)
            .await
            .expect("publishes");
    let total = |total: &Mutex<(u64, u64)>| *total.lock().expect("not poisoned");
    assert_eq!(total(&totals.done), (published.files, published.bytes));
    assert_eq!(total(&totals.uploaded), (published.new_blocks, published.new_bytes));
}

/// The fix of a version comes from the ring: a publisher whose clock is behind goes on
/// from what is there.
#[tokio::test]
async fn a_version_exceeds_the_rings_even_if_the_clock_is_behind() {
    let source = tempfile::tempdir().expect("a directory");
    let blocks = Arc::new(MemoryBlocks::new());
    let far = u64::MAX / 2;
    crate::ring::put_root(&*blocks, far, &crate::ring::root_of(Default::default()).encode()).await;
    fs::write(source.path().join("file"), b"x").expect("writes");
    let published = publish_with(&blocks, source.path(), small_blocks()).await;
    assert_eq!(published.version, far + 1);
}

/// Zeros that take space and holes that do not are the same contents.
#[tokio::test]
async fn a_block_of_zeros_is_a_hole_whether_the_source_has_one_there_or_not() {
    let source = tempfile::tempdir().expect("a directory");
    let contents = [vec![0; 4096 * 20], patterned(4096 * 3, 1), vec![0; 5000]].concat();
    fs::write(source.path().join("full"), &contents).expect("writes");
    let sparse = fs::File::create(source.path().join("sparse")).expect("makes");
    sparse.set_len(contents.len() as u64).expect("grows");
    std::os::unix::fs::FileExt::write_all_at(&sparse, &patterned(4096 * 3, 1), 4096 * 20)
        .expect("writes");
    for name in ["full", "sparse"] {
        set_mtime(&source.path().join(name), 1, 1);
    }
    let blocks = Arc::new(MemoryBlocks::new());
    let published = publish_with(&blocks, source.path(), small_blocks()).await;
    // Three data blocks, one inode for both, the directory.
    assert_eq!(published.new_blocks, 5);
    let snapshot = snapshot(&blocks).await;
    let full = snapshot.resolve(b"full").await.expect("is there").entry;
    let sparse = snapshot.resolve(b"sparse").await.expect("is there").entry;
    assert_eq!(full.content, sparse.content);
}

/// A publish that was interrupted is not waited for: its threads end, though the ring has
/// not answered and the budget is used up.
#[tokio::test]
async fn a_dropped_publish_ends_its_threads() {
    let source = tempfile::tempdir().expect("a directory");
    for i in 0..20 {
        fs::write(source.path().join(i.to_string()), patterned(500_000, i)).expect("writes");
    }
    let blocks = WatchedBlocks::new();
    blocks.0.delay_ms.store(3_600_000, Ordering::Relaxed);
    let ring: Arc<dyn Blocks> = blocks.clone();
    let (progress, recorder, secret) = (Arc::new(NoProgress), Arc::new(NoLeaseRecorder), secret());
    let options = PublishOptions { max_in_flight_bytes: 100_000, ..small_blocks() };
    {
        let (progress, path) = (progress.clone(), source.path());
        let work = publish(env(), ring, path, &secret, options, progress, recorder);
        let limit = std::time::Duration::from_millis(300);
        assert!(tokio::time::timeout(limit, work).await.is_err(), "the ring does not answer");
    }
    // The threads hold the progress; they let go of it as they end.
    while Arc::strong_count(&progress) > 1 {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}
