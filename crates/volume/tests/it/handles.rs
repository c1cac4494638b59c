//! File handles of volumes that are only read: a file is its path.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use atoll_dht::MemoryBlocks;
use atoll_env::BoxFuture;
use atoll_key::ReadKey;
use atoll_vfs::kit::{self, Restart, RestartSubject, Subject, Tree};
use atoll_vfs::{Caller, Errno, FileKind, FileSystem, InodeNumber, OpenFlags, PersistentHandle};
use atoll_volume::HandleTable;
use atoll_volume::owned::{PublishOptions, VolumeFs, VolumeOptions};
use tempfile::TempDir;

use crate::mount::{PublishedVolume, eager};
use crate::ring::{env, open_with, publish_with, small_blocks};

const ROOT: InodeNumber = InodeNumber::ROOT;

fn me() -> Caller {
    Caller::default()
}

/// The files of tables of handles, as one process after the other finds them. Each has its own
/// copy, so that what is left of the former one is as if it had been killed.
pub(crate) struct TableFiles {
    place: TempDir,
    lives: u64,
}

impl TableFiles {
    pub(crate) fn new() -> TableFiles {
        TableFiles { place: tempfile::tempdir().expect("a directory"), lives: 0 }
    }

    /// The table of the next process.
    pub(crate) fn next(&mut self) -> Arc<HandleTable> {
        let path = |life: u64| self.place.path().join(format!("handles-{life}"));
        if self.lives > 0 {
            fs::copy(path(self.lives), path(self.lives + 1)).expect("copies");
        }
        self.lives += 1;
        Arc::new(HandleTable::open(&path(self.lives)).expect("opens"))
    }
}

/// A published volume, as one process after the other shows it.
struct PublishedLife {
    blocks: Arc<MemoryBlocks>,
    tables: TableFiles,
    options: VolumeOptions,
    fs: Arc<dyn FileSystem>,
}

impl Restart for PublishedLife {
    fn fs(&self) -> Arc<dyn FileSystem> {
        self.fs.clone()
    }

    fn restart(&mut self) -> BoxFuture<'_, Result<(), String>> {
        Box::pin(async move {
            let volume = open_with(&self.blocks, self.options.clone()).await;
            let fs = VolumeFs::new(env(), volume, 1000, 1000).with_handles(self.tables.next());
            self.fs = Arc::new(fs);
            Ok(())
        })
    }
}

/// What the kit starts is a volume in which files have handles.
struct WithHandles(PublishedVolume);

impl Subject for WithHandles {
    fn name(&self) -> String {
        format!("{} with handles", self.0.name())
    }

    fn features(&self) -> kit::Features {
        self.0.features()
    }

    fn env(&self) -> atoll_env::Env {
        env()
    }

    fn make(&self, tree: Arc<Tree>) -> BoxFuture<'_, Result<Arc<dyn FileSystem>, String>> {
        Box::pin(async move { Ok(self.start(tree).await?.fs()) })
    }
}

impl RestartSubject for WithHandles {
    fn start(&self, tree: Arc<Tree>) -> BoxFuture<'_, Result<Box<dyn Restart>, String>> {
        let read_key = self.0.read_key.clone();
        let publish = PublishOptions { read_key: read_key.clone(), ..small_blocks() };
        let options = VolumeOptions { read_key, ..VolumeOptions::default() };
        Box::pin(async move {
            let source = tempfile::tempdir().map_err(|error| error.to_string())?;
            kit::write_tree_to_disk(&tree, source.path()).map_err(|error| error.to_string())?;
            let (blocks, mut tables) = (Arc::new(MemoryBlocks::new()), TableFiles::new());
            publish_with(&blocks, source.path(), publish).await;
            let volume = open_with(&blocks, options.clone()).await;
            let fs = VolumeFs::new(env(), volume, 1000, 1000).with_handles(tables.next());
            let fs: Arc<dyn FileSystem> = Arc::new(fs);
            Ok(Box::new(PublishedLife { blocks, tables, options, fs }) as Box<dyn Restart>)
        })
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_conforms_with_handles() {
    for read_key in [None, Some(ReadKey::from_bytes([5; 32]))] {
        let subject = WithHandles(PublishedVolume { read_key });
        kit::run_read_suite(&subject).await.assert_passes();
        let report = kit::run_restart_suite(&subject).await;
        report.assert_passes();
        assert!(report.passed() >= 2, "{report}");
    }
}

/// A directory that is published again and again, and mounted by one process after the other.
struct Story {
    source: TempDir,
    blocks: Arc<MemoryBlocks>,
    tables: TableFiles,
    fs: VolumeFs,
}

impl Story {
    async fn new(make: impl FnOnce(&Path)) -> Story {
        let source = tempfile::tempdir().expect("a directory");
        make(source.path());
        let (blocks, mut tables) = (Arc::new(MemoryBlocks::new()), TableFiles::new());
        publish_with(&blocks, source.path(), small_blocks()).await;
        let fs = VolumeFs::new(env(), open_with(&blocks, eager()).await, 0, 0);
        let fs = fs.with_handles(tables.next());
        Story { source, blocks, tables, fs }
    }

    fn path(&self, path: &str) -> std::path::PathBuf {
        self.source.path().join(path)
    }

    async fn publish(&self) {
        publish_with(&self.blocks, self.source.path(), small_blocks()).await;
    }

    async fn restart(&mut self) {
        let fs = VolumeFs::new(env(), open_with(&self.blocks, eager()).await, 0, 0);
        self.fs = fs.with_handles(self.tables.next());
    }

    /// The number and the handle of a file, which is not held any more.
    async fn handle(&self, path: &str) -> (InodeNumber, PersistentHandle) {
        let mut at = ROOT;
        for name in path.split('/') {
            let found = self.fs.lookup(me(), at, name.as_bytes()).await.expect("is there");
            self.fs.forget(at, 1);
            at = found.attr.inode;
        }
        let handle = self.fs.handle_of(at).await.expect("has a handle");
        self.fs.forget(at, 1);
        (at, handle)
    }

    /// The number and the length of the file that a handle leads to, which is not held any more.
    async fn find(&self, handle: &PersistentHandle) -> Result<(InodeNumber, u64), Errno> {
        let found = self.fs.by_handle(me(), handle).await?;
        self.fs.forget(found.attr.inode, 1);
        Ok((found.attr.inode, found.attr.size_bytes))
    }
}

/// An NFS client holds a file by its handle while the publisher replaces it: it must see the new
/// one, with the number that it knows.
#[tokio::test]
async fn a_handle_leads_to_what_is_published_under_its_path() {
    let mut story = Story::new(|source| {
        fs::create_dir_all(source.join("dir/sub")).expect("makes");
        fs::write(source.join("dir/file"), b"old").expect("writes");
        fs::write(source.join("dir/sub/below"), b"x").expect("writes");
        std::os::unix::fs::symlink("old", source.join("link")).expect("links");
    })
    .await;
    let (file, of_file) = story.handle("dir/file").await;
    let (sub, of_sub) = story.handle("dir/sub").await;
    let (_, of_below) = story.handle("dir/sub/below").await;
    let (link, of_link) = story.handle("link").await;

    let held = story.fs.by_handle(me(), &of_file).await.expect("is there").attr;
    let opened = story.fs.open(me(), file, OpenFlags::READ).await.expect("opens");
    assert!(!opened.keep_cache, "its contents may change");
    fs::write(story.path("dir/file"), b"newer").expect("writes");
    fs::remove_file(story.path("link")).expect("removes");
    std::os::unix::fs::symlink("newest", story.path("link")).expect("links");
    story.publish().await;
    let old = story.fs.read(file, opened.handle, 0, 100).await.expect("reads");
    assert_eq!(&old[..], b"old", "an open keeps its version");
    let reply = story.fs.getattr(file, None).await.expect("is there");
    assert_eq!((reply.attr.size_bytes, held.size_bytes), (5, 3));
    assert!(reply.ttl.as_secs() < 3600);
    let again = story.fs.open(me(), file, OpenFlags::READ).await.expect("opens");
    assert_eq!(&story.fs.read(file, again.handle, 0, 100).await.expect("reads")[..], b"newer");
    story.fs.close(file, opened.handle).await.expect("closes");
    story.fs.close(file, again.handle).await.expect("closes");
    story.fs.forget(file, 1);
    assert_eq!(story.fs.held(), (1, 0), "the root");
    for _ in 0..2 {
        assert_eq!(story.find(&of_file).await, Ok((file, 5)));
        assert_eq!(story.find(&of_link).await, Ok((link, 6)));
        assert_eq!(story.find(&of_sub).await.expect("is there").0, sub);
        assert_eq!(story.fs.held(), (1, 0), "the root");
        story.restart().await;
    }

    // A name that is gone, one that is another kind of file now, and one below it.
    fs::remove_file(story.path("dir/file")).expect("removes");
    fs::remove_dir_all(story.path("dir/sub")).expect("removes");
    fs::write(story.path("dir/sub"), b"a file now").expect("writes");
    story.publish().await;
    for _ in 0..2 {
        for handle in [&of_file, &of_sub, &of_below] {
            assert_eq!(story.find(handle).await, Err(Errno::ESTALE));
        }
        assert_ne!(story.handle("dir/sub").await.0, sub, "another kind of file");
        story.restart().await;
    }

    // And back: the same paths again.
    fs::remove_file(story.path("dir/sub")).expect("removes");
    fs::create_dir(story.path("dir/sub")).expect("makes");
    fs::write(story.path("dir/sub/below"), b"back").expect("writes");
    fs::write(story.path("dir/file"), b"back").expect("writes");
    story.publish().await;
    assert_eq!(story.find(&of_file).await, Ok((file, 4)));
    assert_eq!(story.find(&of_below).await.expect("is there").1, 4);
    story.restart().await;
    assert_eq!(story.handle("dir/sub").await, (sub, of_sub));
}

#[tokio::test]
async fn a_ring_that_is_away_makes_no_handle_stale() {
    let source = tempfile::tempdir().expect("a directory");
    fs::create_dir(source.path().join("dir")).expect("makes");
    fs::write(source.path().join("dir/file"), b"x").expect("writes");
    let (blocks, mut tables) = (crate::ring::WatchedBlocks::new(), TableFiles::new());
    publish_with(&blocks, source.path(), small_blocks()).await;
    let fs = VolumeFs::new(env(), open_with(&blocks, VolumeOptions::default()).await, 0, 0);
    let fs = fs.with_handles(tables.next());
    let dir = fs.lookup(me(), ROOT, b"dir").await.expect("is there").attr.inode;
    let file = fs.lookup(me(), dir, b"file").await.expect("is there").attr.inode;
    let handle = fs.handle_of(file).await.expect("has a handle");

    let fs = VolumeFs::new(env(), open_with(&blocks, VolumeOptions::default()).await, 0, 0);
    let fs = fs.with_handles(tables.next());
    blocks.0.cut_off.store(1, std::sync::atomic::Ordering::Relaxed);
    assert_eq!(fs.by_handle(me(), &handle).await, Err(Errno::ETIMEDOUT));
    blocks.0.cut_off.store(0, std::sync::atomic::Ordering::Relaxed);
    assert_eq!(fs.by_handle(me(), &handle).await.expect("is back").attr.inode, file);
    assert_eq!(fs.held(), (3, 0));
}

#[tokio::test]
async fn a_volume_without_a_table_has_no_handles() {
    let source = tempfile::tempdir().expect("a directory");
    fs::write(source.path().join("file"), b"x").expect("writes");
    let blocks = Arc::new(MemoryBlocks::new());
    publish_with(&blocks, source.path(), small_blocks()).await;
    let fs = VolumeFs::new(env(), open_with(&blocks, VolumeOptions::default()).await, 0, 0);
    let file = fs.lookup(me(), ROOT, b"file").await.expect("is there").attr;
    assert_eq!(file.kind, FileKind::Regular);
    assert_eq!(fs.handle_of(file.inode).await, Err(Errno::EOPNOTSUPP));
    let handle = PersistentHandle::of_number(file.inode, 0);
    assert_eq!(fs.by_handle(me(), &handle).await, Err(Errno::ESTALE));
}
