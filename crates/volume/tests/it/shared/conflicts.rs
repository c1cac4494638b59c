//! Two mounts that write at the same time, and rings that do not answer: nothing that was closed is lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use atoll_dht::{Blocks, MemoryBlocks, NewBlock, OverMemory, PutError};
use atoll_env::BoxFuture;
use atoll_vfs::{
    Caller, Errno, FileSystem, Handle, InodeNumber, OpenFlags, RenameFlags, SetAttr, Writer,
};
use atoll_volume::shared::{SharedFs, SharedOptions};
use bytes::Bytes;

use super::mounts::{created, env, mounted, mounted_with, volume};

const ROOT: InodeNumber = InodeNumber::ROOT;
const RW: OpenFlags = OpenFlags::READ_WRITE;

fn me() -> Caller {
    Caller::default()
}

/// Memory that takes so many more puts, and then none; or takes them and says that it has not.
#[derive(Clone)]
pub(super) struct Failing {
    memory: MemoryBlocks,
    left: Arc<AtomicI64>,
    /// Which of the next puts: the lowest bit is the next one.
    denied: Arc<AtomicU64>,
}

impl Failing {
    pub(super) fn over(memory: &MemoryBlocks) -> Failing {
        let left = Arc::new(AtomicI64::new(i64::MAX));
        Failing { memory: memory.clone(), left, denied: Arc::default() }
    }

    pub(super) fn refuse_all(&self, refuses: bool) {
        self.left.store(if refuses { 0 } else { i64::MAX }, Ordering::Relaxed);
    }
}

impl OverMemory for Failing {
    fn memory(&self) -> &MemoryBlocks {
        &self.memory
    }

    fn put_blocks(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        let refused = vec![Err(PutError::Unavailable("nobody answers".into())); blocks.len()];
        if self.left.fetch_sub(1, Ordering::Relaxed) <= 0 {
            return Box::pin(async { refused });
        }
        let writes_inodes = blocks.iter().any(|block| block.id.kind.is_mutable());
        let put = self.memory.put_blocks(blocks);
        let mut is_denied = false;
        if writes_inodes {
            let denied = self.denied.load(Ordering::Relaxed);
            self.denied.store(denied >> 1, Ordering::Relaxed);
            is_denied = denied & 1 == 1;
        }
        Box::pin(async move {
            let done = put.await;
            if is_denied { refused } else { done }
        })
    }
}

async fn ring() -> (MemoryBlocks, Arc<dyn Blocks>) {
    let memory = MemoryBlocks::new();
    let blocks: Arc<dyn Blocks> = Arc::new(memory.clone());
    created(&env(), &blocks).await;
    (memory, blocks)
}

async fn open(fs: &SharedFs, name: &str) -> (InodeNumber, Handle) {
    let number = fs.lookup(me(), ROOT, name.as_bytes()).await.expect("there").attr.inode;
    (number, fs.open(me(), number, RW).await.expect("opens").handle)
}

async fn create(fs: &SharedFs, name: &str) -> (InodeNumber, Handle) {
    let made = fs.create(me(), ROOT, name.as_bytes(), 0o644, RW).await.expect("made");
    (made.0.attr.inode, made.1.handle)
}

async fn write(fs: &SharedFs, (number, handle): (InodeNumber, Handle), text: &str) {
    let data = Bytes::copy_from_slice(text.as_bytes());
    let empty = SetAttr { size_bytes: Some(0), ..SetAttr::default() };
    fs.setattr(me(), number, Some(handle), empty).await.expect("cut");
    fs.write(Writer::At(me()), number, handle, 0, data).await.expect("written");
}

async fn close(fs: &SharedFs, (number, handle): (InodeNumber, Handle)) -> Result<(), Errno> {
    let flushed = fs.flush(number, handle).await;
    fs.close(number, handle).await.expect("it was open");
    flushed
}

async fn read(fs: &SharedFs, (number, handle): (InodeNumber, Handle)) -> String {
    let bytes = fs.read(number, handle, 0, 1 << 20).await.expect("reads");
    String::from_utf8_lossy(&bytes).into_owned()
}

async fn put(fs: &SharedFs, name: &str, text: &str) {
    let file = create(fs, name).await;
    write(fs, file, text).await;
    close(fs, file).await.expect("the ring takes it");
}

async fn names(fs: &SharedFs, directory: InodeNumber) -> Vec<String> {
    let handle = fs.opendir(me(), directory).await.expect("opens").handle;
    let listed = fs.readdir(directory, handle, 0, 1000, true).await.expect("lists");
    fs.closedir(directory, handle).await.expect("it is open");
    listed.into_iter().map(|entry| String::from_utf8_lossy(&entry.name).into_owned()).collect()
}

/// All files of the root directory with what is in them.
async fn contents(fs: &SharedFs) -> Vec<(String, String)> {
    let mut all = Vec::new();
    for name in names(fs, ROOT).await {
        let file = open(fs, &name).await;
        all.push((name, read(fs, file).await));
        fs.close(file.0, file.1).await.expect("it is open");
    }
    all
}

/// Pastis §3.1 keeps the version with the later time. Here both are kept, and both mounts show them by the
/// same names.
#[tokio::test(start_paused = true)]
async fn what_two_mounts_write_at_the_same_time_is_kept_twice() {
    let (_, blocks) = ring().await;
    let (one, two) = (mounted(&env(), &blocks, 1).await, mounted(&env(), &blocks, 2).await);
    put(&one, "plan", "first").await;
    let (mine, yours) = (open(&one, "plan").await, open(&two, "plan").await);
    write(&one, mine, "of one").await;
    write(&two, yours, "of two").await;
    // What is open does not change under its reader.
    assert_eq!(
        (read(&one, mine).await, read(&two, yours).await),
        ("of one".into(), "of two".into())
    );
    close(&one, mine).await.expect("the ring takes it");
    close(&two, yours).await.expect("the ring takes it");
    contents(&one).await;
    let all = contents(&two).await;
    assert_eq!(contents(&one).await, all);
    let (names, mut texts): (Vec<String>, Vec<String>) = all.into_iter().unzip();
    texts.sort();
    assert_eq!(texts, ["of one", "of two"]);
    assert!(names[0] == "plan" && names[1].starts_with("plan~"), "{names:?}");
    // Whoever writes it now has seen both: there is no third.
    let file = open(&one, "plan").await;
    write(&one, file, "agreed").await;
    close(&one, file).await.expect("the ring takes it");
    assert_eq!(contents(&two).await.len(), 2);
    assert_eq!(contents(&two).await[0], ("plan".into(), "agreed".into()));
}

/// Both make the file of the same contents, and it is one file.
#[tokio::test(start_paused = true)]
async fn mounts_that_keep_the_same_contents_at_once_make_one_file() {
    let (_, blocks) = ring().await;
    let (one, two) = (mounted(&env(), &blocks, 1).await, mounted(&env(), &blocks, 2).await);
    put(&one, "plan", "first").await;
    let (mine, yours) = (open(&one, "plan").await, open(&two, "plan").await);
    write(&one, mine, "of one").await;
    write(&two, yours, "of two").await;
    close(&one, mine).await.expect("the ring takes it");
    close(&two, yours).await.expect("the ring takes it");
    let three = mounted(&env(), &blocks, 3).await;
    futures_util::future::join3(contents(&one), contents(&two), contents(&three)).await;
    let all = contents(&three).await;
    assert_eq!(all.len(), 2, "{all:?}");
    assert_eq!(contents(&one).await, all);
    let kept = &all[1].0;
    let attr = three.lookup(me(), ROOT, kept.as_bytes()).await.expect("there").attr;
    one.unlink(me(), ROOT, kept.as_bytes()).await.expect("removed");
    one.sync().await.expect("is on the ring");
    assert_eq!(contents(&two).await.len(), 1);
    assert!(attr.size_bytes == 6 && attr.nlink >= 1);
}

/// A change of attributes neither hides contents nor makes a file of its own.
#[tokio::test(start_paused = true)]
async fn attributes_and_contents_do_not_compete() {
    let (_, blocks) = ring().await;
    let (one, two) = (mounted(&env(), &blocks, 1).await, mounted(&env(), &blocks, 2).await);
    put(&one, "plan", "first").await;
    let file = open(&one, "plan").await;
    write(&one, file, "second").await;
    for mode in [0o600, 0o640, 0o660] {
        let number = two.lookup(me(), ROOT, b"plan").await.expect("there").attr.inode;
        let change = SetAttr { mode: Some(mode), ..SetAttr::default() };
        two.setattr(me(), number, None, change).await.expect("changed");
    }
    close(&one, file).await.expect("the ring takes it");
    assert_eq!(contents(&two).await, [("plan".into(), "second".into())]);
}

#[tokio::test(start_paused = true)]
async fn a_file_without_a_name_lives_until_it_is_closed() {
    let (_, blocks) = ring().await;
    let (one, two) = (mounted(&env(), &blocks, 1).await, mounted(&env(), &blocks, 2).await);
    put(&one, "plan", "first").await;
    let file = open(&one, "plan").await;
    write(&one, file, "second").await;
    one.unlink(me(), ROOT, b"plan").await.expect("removed");
    one.sync().await.expect("is on the ring");
    assert_eq!(read(&one, file).await, "second");
    assert_eq!(one.getattr(file.0, None).await.expect("open").attr.nlink, 0);
    write(&one, file, "third").await;
    assert_eq!(read(&one, file).await, "third");
    close(&one, file).await.expect("nothing is to be written");
    assert_eq!(two.lookup(me(), ROOT, b"plan").await, Err(Errno::ENOENT));
    one.forget(file.0, 100);
    assert_eq!(one.getattr(file.0, None).await, Err(Errno::ESTALE));
}

/// A close that the ring does not answer is an error, and what was written is not given up.
#[tokio::test(start_paused = true)]
async fn what_cannot_be_written_at_a_close_is_tried_again() {
    let (memory, blocks) = ring().await;
    let failing = Failing::over(&memory);
    let over: Arc<dyn Blocks> = Arc::new(failing.clone());
    let (one, two) = (mounted(&env(), &over, 1).await, mounted(&env(), &blocks, 2).await);
    put(&one, "plan", "first").await;
    let file = open(&one, "plan").await;
    write(&one, file, "second").await;
    failing.left.store(0, Ordering::Relaxed);
    assert_eq!(close(&one, file).await, Err(Errno::ETIMEDOUT));
    let status = one.getxattr(ROOT, b"user.atoll.status").await.expect("there");
    assert!(status.starts_with(b"1 file with "), "{status:?}");
    assert_eq!(contents(&two).await, [("plan".into(), "first".into())]);
    // This mount shows what it has.
    assert_eq!(contents(&one).await, [("plan".into(), "second".into())]);
    failing.left.store(i64::MAX, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert_eq!(contents(&two).await, [("plan".into(), "second".into())]);
    assert_eq!(one.getxattr(ROOT, b"user.atoll.status").await.expect("there"), "ok");
    assert_eq!(one.held_bytes(), 0);
}

/// The ring has taken what it denies: the next version includes that, and is no rival of it.
#[tokio::test(start_paused = true)]
async fn a_write_whose_acknowledgement_was_lost_is_no_conflict() {
    let (memory, blocks) = ring().await;
    let failing = Failing::over(&memory);
    let over: Arc<dyn Blocks> = Arc::new(failing.clone());
    let (one, two) = (mounted(&env(), &over, 1).await, mounted(&env(), &blocks, 2).await);
    put(&one, "plan", "first").await;
    let file = open(&one, "plan").await;
    for text in ["second", "third"] {
        write(&one, file, text).await;
        failing.denied.store(1, Ordering::Relaxed);
        assert_eq!(one.fsync(file.0, file.1, false).await, Err(Errno::ETIMEDOUT));
        assert_eq!(contents(&two).await, [("plan".into(), text.into())]);
    }
    write(&one, file, "fourth").await;
    close(&one, file).await.expect("the ring takes it");
    // A name whose making was not acknowledged is there, once: it went to the ring with its inode.
    failing.denied.store(1, Ordering::Relaxed);
    for told in [Errno::ETIMEDOUT, Errno::EEXIST] {
        assert_eq!(one.mkdir(me(), ROOT, b"directory", 0o755).await.map(drop), Err(told));
    }
    assert_eq!(names(&two, ROOT).await, ["directory", "plan"]);
}

/// A mount that is gone after any number of puts leaves the file under its old name, its new one or
/// both, and what was closed is in it.
#[tokio::test(start_paused = true)]
async fn a_move_that_ends_anywhere_loses_nothing() {
    for left in 0..8 {
        let (memory, blocks) = ring().await;
        let failing = Failing::over(&memory);
        let over: Arc<dyn Blocks> = Arc::new(failing.clone());
        let one = mounted(&env(), &over, 1).await;
        let to = one.mkdir(me(), ROOT, b"to", 0o755).await.expect("made").attr.inode;
        put(&one, "plan", "first").await;
        failing.left.store(left, Ordering::Relaxed);
        let moved = one.rename(me(), ROOT, b"plan", to, b"moved", RenameFlags::default()).await;
        drop(one);
        let two = mounted(&env(), &blocks, 2).await;
        let to = two.lookup(me(), ROOT, b"to").await.expect("there").attr.inode;
        let mut places = 0;
        for (directory, name) in [(ROOT, &b"plan"[..]), (to, b"moved")] {
            let Ok(entry) = two.lookup(me(), directory, name).await else { continue };
            places += 1;
            let number = entry.attr.inode;
            let handle = two.open(me(), number, RW).await.expect("opens").handle;
            assert_eq!(read(&two, (number, handle)).await, "first");
            two.close(number, handle).await.expect("it is open");
        }
        assert!(places > 0, "after {left} puts it is gone");
        assert!(moved.is_err() || places == 1, "after {left} puts");
        // Both names are taken away one after the other, and the file stays until the last.
        let taken = two.unlink(me(), ROOT, b"plan").await;
        if taken.is_ok() && places == 2 {
            let number = two.lookup(me(), to, b"moved").await.expect("its other name").attr.inode;
            assert!(two.open(me(), number, RW).await.is_ok(), "after {left} puts");
        }
    }
}

/// Who has no key, or is no member, reads; and is told why nothing can be written.
#[tokio::test(start_paused = true)]
async fn strangers_read_and_do_not_write() {
    let (_, blocks) = ring().await;
    let one = mounted(&env(), &blocks, 1).await;
    put(&one, "plan", "first").await;
    let stranger = mounted(&env(), &blocks, 77).await;
    let id = volume().volume_id();
    let options = SharedOptions::default();
    let reader = SharedFs::open(env(), blocks.clone(), id, None, options.clone()).await;
    let reader = reader.expect("opens");
    for (fs, errno) in [(&stranger, Errno::EACCES), (&reader, Errno::EROFS)] {
        let number = fs.lookup(me(), ROOT, b"plan").await.expect("there").attr.inode;
        let opened = fs.open(me(), number, OpenFlags::READ).await.expect("opens");
        assert_eq!(read(fs, (number, opened.handle)).await, "first");
        assert_eq!(fs.open(me(), number, RW).await, Err(errno));
        assert_eq!(fs.mkdir(me(), ROOT, b"dir", 0o755).await, Err(errno));
        assert_eq!(fs.unlink(me(), ROOT, b"plan").await, Err(errno));
        let size = SetAttr { size_bytes: Some(0), ..SetAttr::default() };
        assert_eq!(fs.setattr(me(), number, None, size).await, Err(errno));
        let mode = SetAttr { mode: Some(0o777), ..SetAttr::default() };
        assert_eq!(fs.setattr(me(), number, None, mode).await, Err(errno));
        assert!(!fs.may_write().await);
    }
    assert!(one.may_write().await);
    assert_eq!(contents(&one).await, [("plan".into(), "first".into())]);
}

/// Blocks of a large file that do not fit in memory go to the ring before the file is closed, and others
/// see them after that.
#[tokio::test(start_paused = true)]
async fn a_file_larger_than_memory_is_seen_when_it_is_closed() {
    let (_, blocks) = ring().await;
    let options = SharedOptions { max_changed_bytes: 1 << 20, ..SharedOptions::default() };
    let one = mounted_with(&env(), &blocks, 1, options).await;
    let two = mounted(&env(), &blocks, 2).await;
    let file = create(&one, "large").await;
    let chunk = |number: u64| Bytes::from(vec![number as u8 + 1; 100_000]);
    for number in 0..100 {
        let wrote = one.write(Writer::At(me()), file.0, file.1, number * 100_000, chunk(number));
        assert_eq!(wrote.await, Ok(100_000));
        assert!(one.held_bytes() <= 2 << 20, "{} bytes are held", one.held_bytes());
    }
    let size = |fs: SharedFs| async move {
        Ok::<_, Errno>(fs.lookup(me(), ROOT, b"large").await?.attr.size_bytes)
    };
    assert_eq!(size(two.clone()).await, Err(Errno::ENOENT));
    close(&one, file).await.expect("the ring takes it");
    assert_eq!(size(two.clone()).await, Ok(10_000_000));
    let theirs = open(&two, "large").await;
    for number in 0..100 {
        let bytes = two.read(theirs.0, theirs.1, number * 100_000, 100_000).await.expect("reads");
        assert_eq!(bytes, chunk(number), "{number}");
    }
}
