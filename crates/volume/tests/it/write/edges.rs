//! What a mount met at the edges: files and directories that change while they are written.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_dht::{Blocks, MemoryBlocks, NewBlock, OverMemory, PutError};
use atoll_env::{BoxFuture, Env};
use atoll_key::{BlockHash, SignedBlock};
use atoll_vfs::{
    Caller, Errno, FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, FileSystem, Handle, InodeNumber, OpenFlags,
    SeekTo, SetAttr, Writer,
};
use atoll_volume::format::inode::{Data, Shape};
use atoll_volume::format::{
    Content, DirectoryBlock, DirectoryEntry, DirectoryRef, InodeBlock, Nodes, PointerBlock,
};
use atoll_volume::owned::{
    FlushError, LeaseKeeper, NoLeaseKeeper, WritableFs, WriteError, WriteOptions, empty_root,
    sealed_root,
};
use bytes::Bytes;

use super::{REGULAR, created, env, mounted, secret};
use crate::ring::clocked;

const ROOT: InodeNumber = InodeNumber::ROOT;

/// A new volume, mounted.
async fn new_mount(block_size_log2: u8) -> (Arc<dyn Blocks>, WritableFs) {
    let blocks: Arc<dyn Blocks> = Arc::new(MemoryBlocks::new());
    created(&blocks, None, block_size_log2).await;
    let fs = mounted(&blocks, WriteOptions::default()).await.expect("mounts");
    (blocks, fs)
}

/// Makes or opens a file in the root directory.
async fn open(fs: &WritableFs, name: &str, flags: OpenFlags) -> (InodeNumber, Handle) {
    let made = fs.create(Caller::default(), ROOT, name.as_bytes(), 0o644, flags).await;
    let (entry, opened) = made.expect("opens");
    (entry.attr.inode, opened.handle)
}

async fn write(fs: &WritableFs, (inode, handle): (InodeNumber, Handle), at: u64, bytes: Vec<u8>) {
    let writer = Writer::At(Caller::default());
    fs.write(writer, inode, handle, at, Bytes::from(bytes)).await.expect("writes");
}

async fn resize(fs: &WritableFs, inode: InodeNumber, size_bytes: u64) {
    let changes = SetAttr { size_bytes: Some(size_bytes), ..SetAttr::default() };
    fs.setattr(Caller::default(), inode, None, changes).await.expect("is cut");
}

/// An editor's save: the old file is cut to nothing, and it takes a while until its first bytes.
#[tokio::test(start_paused = true)]
async fn a_file_is_written_after_it_was_flushed_empty() {
    let (blocks, fs) = new_mount(16).await;
    write(&fs, open(&fs, "file", OpenFlags::READ_WRITE).await, 0, vec![1; 100_000]).await;
    fs.end().await.expect("ends");

    let fs = mounted(&blocks, WriteOptions::default()).await.expect("mounts again");
    let flags = OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::TRUNCATE);
    let file = open(&fs, "file", flags).await;
    fs.sync().await.expect("flushes");
    write(&fs, file, 10, vec![2; 10]).await;
    let read = fs.read(file.0, file.1, 0, 100).await.expect("reads");
    assert_eq!(read, [vec![0; 10], vec![2; 10]].concat());
}

#[tokio::test(start_paused = true)]
async fn a_hole_stays_one_when_the_file_is_cut_inside() {
    for flushes in [false, true] {
        let (_, fs) = new_mount(12).await;
        let file = open(&fs, "file", OpenFlags::READ_WRITE).await;
        write(&fs, file, 0, vec![1; 3 * 4096]).await;
        fs.sync().await.expect("flushes");
        let mode = FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE;
        let punched = fs.fallocate(Caller::default(), file.0, file.1, 4096, 4096, mode).await;
        punched.expect("makes a hole");
        resize(&fs, file.0, 6000).await;
        if flushes {
            fs.sync().await.expect("flushes");
        }
        let read = fs.read(file.0, file.1, 0, 10_000).await.expect("reads");
        assert_eq!(read, [vec![1; 4096], vec![0; 6000 - 4096]].concat(), "flushed: {flushes}");
    }
}

/// What a build does: directories are made, filled, emptied and removed.
#[tokio::test(start_paused = true)]
async fn a_removed_directory_leaves_the_memory() {
    let (_, fs) = new_mount(16).await;
    let me = Caller::default();
    for round in 0..4 {
        let dir = fs.mkdir(me, ROOT, b"dir", 0o755).await.expect("makes").attr.inode;
        let file = fs.mknod(me, dir, b"file", REGULAR, 0o644, 0).await.expect("makes");
        if round % 2 == 1 {
            fs.sync().await.expect("flushes");
        }
        fs.unlink(me, dir, b"file").await.expect("removes");
        fs.rmdir(me, ROOT, b"dir").await.expect("removes");
        fs.forget(file.attr.inode, 1);
        fs.forget(dir, 1);
    }
    fs.sync().await.expect("flushes");
    fs.check_invariants();
    assert_eq!(fs.files_in_memory(), 1, "the root directory");
}

/// Blocks in memory whose puts of roots are unanswered, refused, or as they should be; other blocks
/// take their time.
#[derive(Default)]
struct Ring {
    blocks: MemoryBlocks,
    roots: Mutex<Roots>,
    put_time: Mutex<Duration>,
    put_error: Mutex<Option<PutError>>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Roots {
    #[default]
    Taken,
    /// Taken, and nothing said.
    Unanswered,
    Refused,
}

fn away() -> PutError {
    PutError::Unavailable("a test".into())
}

impl OverMemory for Ring {
    fn memory(&self) -> &MemoryBlocks {
        &self.blocks
    }

    fn put_blocks(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        if !blocks.iter().any(|block| block.id.kind.is_mutable()) {
            let put_time = *self.put_time.lock().unwrap();
            if let Some(error) = self.put_error.lock().unwrap().clone() {
                return Box::pin(async move { vec![Err(error); blocks.len()] });
            }
            let put = self.blocks.put_blocks(blocks);
            return Box::pin(async move {
                tokio::time::sleep(put_time).await;
                put.await
            });
        }
        match *self.roots.lock().unwrap() {
            Roots::Taken => self.blocks.put_blocks(blocks),
            Roots::Refused => Box::pin(async { vec![Err(away())] }),
            Roots::Unanswered => {
                let put = self.blocks.put_blocks(blocks);
                Box::pin(async {
                    put.await;
                    vec![Err(away())]
                })
            }
        }
    }
}

async fn mounted_by(env: &Env, ring: &Arc<Ring>) -> Result<WritableFs, WriteError> {
    let (blocks, options) = (ring.clone(), WriteOptions::default());
    WritableFs::open(env.clone(), blocks, secret(), options, Arc::new(NoLeaseKeeper), None).await
}

impl Ring {
    async fn mounted(self: &Arc<Ring>) -> (Arc<dyn Blocks>, WritableFs) {
        let blocks: Arc<dyn Blocks> = self.clone();
        created(&blocks, None, 16).await;
        let fs = mounted(&blocks, WriteOptions::default()).await.expect("mounts");
        (blocks, fs)
    }

    fn answers(&self, roots: Roots) {
        *self.roots.lock().unwrap() = roots;
    }
}

/// The ring takes the last root and its answer is lost: the mount that ends says so, and goes on
/// with the same root, not with a rival of its version.
#[tokio::test(start_paused = true)]
async fn a_mount_ends_after_an_answer_was_lost() {
    let (env, ring) = (clocked(), Arc::new(Ring::default()));
    created(&(ring.clone() as Arc<dyn Blocks>), None, 16).await;
    let fs = mounted_by(&env, &ring).await.expect("mounts");
    let me = Caller::default();
    fs.mkdir(me, ROOT, b"dir", 0o755).await.expect("makes");
    ring.answers(Roots::Unanswered);
    fs.end().await.expect_err("not known to be on the ring");
    ring.answers(Roots::Taken);
    tokio::time::sleep(Duration::from_secs(5)).await;
    fs.end().await.expect("ends");
    let fs = mounted_by(&env, &ring).await.expect("mounts again");
    fs.lookup(me, ROOT, b"dir").await.expect("is there");
}

/// Whoever mounts is told that the ring takes nothing.
#[tokio::test(start_paused = true)]
async fn a_mount_that_the_ring_refuses_fails() {
    let ring = Arc::new(Ring::default());
    let (blocks, fs) = ring.mounted().await;
    fs.end().await.expect("ends");
    ring.answers(Roots::Refused);
    let work =
        tokio::time::timeout(Duration::from_secs(600), mounted(&blocks, WriteOptions::default()));
    let refused = work.await.expect("says so").err().expect("fails");
    assert!(matches!(refused, WriteError::Flush(FlushError::Put(_))), "{refused}");
}

struct SlowKeeper;

impl LeaseKeeper for SlowKeeper {
    fn keep(&self, _: SignedBlock, _: Vec<BlockHash>) -> BoxFuture<'static, Result<(), String>> {
        Box::pin(async {
            tokio::time::sleep(Duration::from_secs(100)).await;
            Ok(())
        })
    }
}

/// A mount that has ended and only lists its blocks yet does not claim the volume again.
#[tokio::test(start_paused = true)]
async fn a_mount_that_has_ended_lets_others_write() {
    let ring = Arc::new(Ring::default());
    let blocks: Arc<dyn Blocks> = ring.clone();
    created(&blocks, None, 16).await;
    let options = WriteOptions::default();
    let first = WritableFs::open(
        env(),
        blocks.clone(),
        secret(),
        options.clone(),
        Arc::new(SlowKeeper),
        None,
    )
    .await
    .expect("mounts");
    first.mkdir(Caller::default(), ROOT, b"dir", 0o755).await.expect("makes");
    let ends = tokio::spawn({
        let first = first.clone();
        async move { first.end().await }
    });
    tokio::time::sleep(Duration::from_secs(30)).await;
    let second = mounted(&blocks, options).await.expect("the first has ended");
    second.lookup(Caller::default(), ROOT, b"dir").await.expect("is there");
    ends.await.expect("does not panic").expect("ends");
    first.end().await.expect("has ended before");
}

/// A flush that takes minutes is no reason to let another mount in.
#[tokio::test(start_paused = true)]
async fn a_mount_writes_while_its_flush_takes_long() {
    let (env, ring) = (clocked(), Arc::new(Ring::default()));
    created(&(ring.clone() as Arc<dyn Blocks>), None, 16).await;
    let fs = mounted_by(&env, &ring).await.expect("mounts");
    *ring.put_time.lock().unwrap() = Duration::from_secs(400);
    fs.mkdir(Caller::default(), ROOT, b"dir", 0o755).await.expect("makes");
    for _ in 0..17 {
        tokio::time::sleep(Duration::from_secs(30)).await;
        let refused = mounted_by(&env, &ring).await.err().expect("is refused");
        assert!(matches!(refused, WriteError::Busy { .. }), "{refused}");
    }
    *ring.put_time.lock().unwrap() = Duration::ZERO;
    fs.end().await.expect("ends");
    let fs = mounted_by(&env, &ring).await.expect("mounts again");
    fs.lookup(Caller::default(), ROOT, b"dir").await.expect("is there");
}

/// Who has filled the ring can remove files, and the memory is bounded whatever fills it.
#[tokio::test(start_paused = true)]
async fn files_are_removed_when_the_ring_is_full() {
    let ring = Arc::new(Ring::default());
    let blocks: Arc<dyn Blocks> = ring.clone();
    created(&blocks, None, 12).await;
    let options = WriteOptions { max_changed_bytes: 1 << 20, ..WriteOptions::default() };
    let fs = mounted(&blocks, options).await.expect("mounts");
    let me = Caller::default();
    let sparse = open(&fs, "sparse", OpenFlags::READ_WRITE).await;
    resize(&fs, sparse.0, 1 << 30).await;
    fs.sync().await.expect("flushes");
    *ring.put_error.lock().unwrap() = Some(PutError::Full("a test".into()));
    let mode = FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE;
    let punches =
        (0..64).map(|part| fs.fallocate(me, sparse.0, sparse.1, part << 24, 1 << 24, mode));
    let outcomes = futures_util::future::join_all(punches).await;
    assert!(outcomes.iter().filter(|punched| punched.is_ok()).count() < 10);

    let data = Bytes::from(vec![1; 1 << 20]);
    let full = fs.write(Writer::At(me), sparse.0, sparse.1, 0, data).await;
    assert_eq!(full, Err(Errno::ENOSPC));
    resize(&fs, sparse.0, 0).await;
    fs.unlink(me, ROOT, b"sparse").await.expect("makes room");
    fs.check_invariants();
}

/// A root that lies: the number of the next file is taken, or the last one; totals are at their
/// end.
#[tokio::test(start_paused = true)]
async fn numbers_of_a_lying_root_do_no_harm() {
    let (blocks, fs) = new_mount(16).await;
    let me = Caller::default();
    let old = open(&fs, "old", OpenFlags::READ_WRITE).await;
    write(&fs, old, 0, vec![1; 100]).await;
    fs.end().await.expect("ends");
    for next_inode in [old.0.0, u64::MAX] {
        let block = blocks.get_signed(secret().volume_id().root_key()).await.expect("is there");
        let mut root = sealed_root::decode(&block.payload, None).expect("reads");
        root.mounted.next_inode = next_inode;
        (root.files, root.dirs, root.bytes) = (u64::MAX, u64::MAX, u64::MAX);
        let payload = sealed_root::encode(&root, None);
        let lie = SignedBlock::sign(&secret(), b"", block.version + 1, &payload);
        blocks.put_signed(lie).await.expect("memory takes it");
        let fs = mounted(&blocks, WriteOptions::default()).await.expect("mounts");
        let file = open(&fs, "old", OpenFlags::READ_WRITE).await;
        let made = fs.mknod(me, ROOT, b"new", REGULAR, 0o644, 0).await;
        match next_inode {
            u64::MAX => assert_eq!(made.err(), Some(Errno::ENOSPC)),
            _ => {
                assert_ne!(made.expect("makes").attr.inode, file.0);
                fs.unlink(me, ROOT, b"new").await.expect("removes");
            }
        }
        write(&fs, file, 100, vec![2; 100]).await;
        fs.check_invariants();
        fs.end().await.expect("ends");
    }
}

/// POSIX, `rewinddir`: the listing is of the directory as it is then.
#[tokio::test(start_paused = true)]
async fn a_listing_that_begins_again_shows_what_has_changed() {
    let (_, fs) = new_mount(16).await;
    let me = Caller::default();
    let dir = fs.mkdir(me, ROOT, b"dir", 0o755).await.expect("makes").attr.inode;
    let handle = fs.opendir(me, dir).await.expect("opens").handle;
    let names = async || {
        let page = fs.readdir(dir, handle, 0, 10, false).await.expect("lists");
        page.into_iter()
            .map(|entry| String::from_utf8_lossy(&entry.name).into())
            .collect::<Vec<String>>()
    };
    assert!(names().await.is_empty());
    for name in ["a", "b"] {
        fs.mknod(me, dir, name.as_bytes(), REGULAR, 0o644, 0).await.expect("makes");
    }
    assert_eq!(names().await, ["a", "b"]);
    fs.sync().await.expect("flushes");
    fs.unlink(me, dir, b"a").await.expect("removes");
    assert_eq!(names().await, ["b"]);
    fs.unlink(me, dir, b"b").await.expect("removes");
    fs.rmdir(me, ROOT, b"dir").await.expect("removes");
    assert!(names().await.is_empty());
    fs.closedir(dir, handle).await.expect("closes");
    fs.check_invariants();
}

/// Nothing of a file costs what its length says.
#[tokio::test(start_paused = true)]
async fn a_sparse_file_of_a_tebibyte_takes_what_it_has_of_data() {
    let memory = MemoryBlocks::new();
    let blocks: Arc<dyn Blocks> = Arc::new(memory.clone());
    created(&blocks, None, 16).await;
    let fs = mounted(&blocks, WriteOptions::default()).await.expect("mounts");
    let file = open(&fs, "file", OpenFlags::READ_WRITE).await;
    let size = 1u64 << 40;
    let places = [0, size / 3, size - 5];
    for place in places {
        write(&fs, file, place, vec![7; 5]).await;
    }
    fs.end().await.expect("ends");
    let puts = memory.counts().puts;
    assert!(puts < 30, "{puts} blocks");

    let fs = mounted(&blocks, WriteOptions::default()).await.expect("mounts again");
    let file = open(&fs, "file", OpenFlags::READ_WRITE).await;
    let attr = fs.getattr(file.0, None).await.expect("is there").attr;
    assert_eq!(attr.size_bytes, size);
    assert!(attr.blocks_512 <= 3 * 128, "{} sectors", attr.blocks_512);
    for place in places {
        assert_eq!(fs.read(file.0, file.1, place, 5).await.expect("reads"), [7; 5][..]);
    }
    let block = |place: u64| place & !0xffff;
    assert_eq!(fs.seek(file.0, file.1, 1 << 30, SeekTo::Data).await, Ok(block(size / 3)));
    let mode = FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE;
    let range = (size / 3 - (1 << 30), 2 << 30);
    let punched = fs.fallocate(Caller::default(), file.0, file.1, range.0, range.1, mode);
    punched.await.expect("is punched");
    assert_eq!(fs.seek(file.0, file.1, 1 << 30, SeekTo::Data).await, Ok(block(size - 5)));
    fs.sync().await.expect("flushes");
    fs.check_invariants();
    resize(&fs, file.0, 3).await;
    fs.end().await.expect("ends");
}

/// Few blocks can describe a file of 4 TiB without a hole: a search for one ends.
#[tokio::test(start_paused = true)]
async fn a_search_for_a_hole_in_endless_data_ends() {
    let blocks: Arc<dyn Blocks> = Arc::new(MemoryBlocks::new());
    let put = async |block: Vec<u8>| {
        let hash = BlockHash::of(&block);
        blocks.put(vec![(hash, block.into())]).await.expect("memory takes it");
        hash
    };
    let mut pointer = put(vec![4; 4096]).await;
    for level in [1, 2] {
        pointer = put(PointerBlock::encode(level, &[Some(pointer); 2048])).await;
    }
    let size_bytes = 256 * 2048 * 2048 * 4096;
    let shape = Shape::new(size_bytes, 12).expect("allowed");
    let data = Data::Pointers(Bytes::from([pointer.0; 256].concat()));
    let inode = Some(put(InodeBlock { shape, data }.encode()).await);
    let entry = DirectoryEntry {
        name: Bytes::from_static(b"file"),
        mode: 0o644,
        mtime: Default::default(),
        content: Content::Regular { size_bytes, blocks_512: 0, inode },
        xattrs: None,
        owner: None,
    };
    let leaf = DirectoryBlock { level: 0, nodes: Nodes::Leaf(vec![entry]) };
    let hash = Some(put(leaf.encode()).await);
    let mut root = empty_root(&env(), "test", (0, 0), 12);
    root.mounted.has_own_blocks = false;
    root.directory = DirectoryRef { entries: 1, subdirectories: 0, hash };
    let payload = sealed_root::encode(&root, None);
    let block = SignedBlock::sign(&secret(), b"", 1, &payload);
    blocks.put_signed(block).await.expect("memory takes it");

    let fs = mounted(&blocks, WriteOptions::default()).await.expect("mounts");
    let file = open(&fs, "file", OpenFlags::READ_WRITE).await;
    assert_eq!(fs.seek(file.0, file.1, 1, SeekTo::Data).await, Ok(1));
    assert_eq!(fs.seek(file.0, file.1, 1, SeekTo::Hole).await, Ok(size_bytes));
}
