//! Files that are created: one mount sees them at once, the others when they have been closed.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_dht::{
    Blocks, GetError, HeldBlock, LeaseRenewal, LockGrant, LockLease, LockRefusal, MemoryBlocks,
    NewBlock, PutError, Renewed, Wanted,
};
use atoll_env::BoxFuture;
use atoll_key::{BlockId, Key, KeyRange};
use atoll_vfs::{
    Caller, Entry, Errno, FileKind, FileSystem, InodeNumber, OpenFlags, Opened, RenameFlags, Writer,
};
use atoll_volume::shared::SharedFs;
use bytes::Bytes;
use futures_util::future::join_all;

use super::mounts::{created, env, mounted};
use crate::simulated_ring::Ring;

const ROOT: InodeNumber = InodeNumber::ROOT;

/// Blocks in memory, and which mutable ones were put, in their order. A put waits for those that were begun
/// before, as a slow ring's.
#[derive(Clone, Default)]
struct Counted {
    blocks: MemoryBlocks,
    put: Arc<Mutex<Vec<Key>>>,
    removed: Arc<AtomicUsize>,
    /// The replicas of this block do not answer.
    absent: Arc<Mutex<Option<Key>>>,
    /// How many calls put a few in their order.
    together: Arc<AtomicUsize>,
    /// Whether the nodes have no room for a few blocks in their order.
    is_full: Arc<AtomicBool>,
    /// The last of the keys that have one replica set with any other.
    until: Arc<Mutex<Option<Key>>>,
    /// The keys whose replica sets were asked for.
    asked: Arc<Mutex<Vec<Key>>>,
}

impl Counted {
    fn arc(self) -> Arc<dyn Blocks> {
        Arc::new(self)
    }

    fn take(&self) -> Vec<Key> {
        std::mem::take(&mut *self.put.lock().expect("unpoisoned"))
    }
}

impl Blocks for Counted {
    fn get_block(
        &self,
        id: BlockId,
        wanted: Wanted,
    ) -> BoxFuture<'static, Result<HeldBlock, GetError>> {
        self.blocks.get_block(id, wanted)
    }

    fn put_blocks(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        let absent = *self.absent.lock().expect("unpoisoned");
        if blocks.iter().any(|block| Some(block.id.key) == absent) {
            let refused = || Err(PutError::Unavailable("nobody answers".into()));
            let outcomes = blocks.iter().map(|_| refused()).collect();
            return Box::pin(async { outcomes });
        }
        for block in &blocks {
            if block.id.kind.joins() {
                self.put.lock().expect("unpoisoned").push(block.id.key);
            }
            let is_removal = block.id.kind.is_tombstone(&block.bytes);
            self.removed.fetch_add(usize::from(is_removal), Ordering::Relaxed);
        }
        let put = self.blocks.put_blocks(blocks);
        Box::pin(async move {
            tokio::task::yield_now().await;
            put.await
        })
    }

    fn put_in_order(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        self.together.fetch_add(1, Ordering::Relaxed);
        if self.is_full.load(Ordering::Relaxed) {
            let full = vec![Err(PutError::Full("they are".into())); blocks.len()];
            return Box::pin(async { full });
        }
        self.put_blocks(blocks)
    }

    fn renew_blocks(
        &self,
        renewal: LeaseRenewal,
    ) -> BoxFuture<'static, Vec<Result<Renewed, PutError>>> {
        self.blocks.renew_blocks(renewal)
    }

    fn same_set_until(&self, key: Key) -> BoxFuture<'static, Option<Key>> {
        self.asked.lock().expect("unpoisoned").push(key);
        let until = *self.until.lock().expect("unpoisoned");
        Box::pin(async move { until })
    }

    fn lock_lease(&self, ask: LockLease) -> BoxFuture<'static, Result<LockGrant, LockRefusal>> {
        self.blocks.lock_lease(ask)
    }

    fn watch(
        &self,
        id: BlockId,
        seen: u64,
    ) -> BoxFuture<'static, Result<Option<HeldBlock>, GetError>> {
        self.blocks.watch(id, seen)
    }
}

fn me() -> Caller {
    Caller::default()
}

async fn two_mounts() -> (Counted, SharedFs, SharedFs) {
    let counted = Counted::default();
    let blocks: Arc<dyn Blocks> = Arc::new(counted.clone());
    created(&env(), &blocks).await;
    let (one, two) = (mounted(&env(), &blocks, 1).await, mounted(&env(), &blocks, 2).await);
    counted.take();
    (counted, one, two)
}

async fn create(fs: &SharedFs, parent: InodeNumber, name: &str) -> Result<(Entry, Opened), Errno> {
    fs.create(me(), parent, name.as_bytes(), 0o644, OpenFlags::READ_WRITE).await
}

async fn create_exclusively(fs: &SharedFs, name: &str) -> Result<(Entry, Opened), Errno> {
    let flags = OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::EXCLUSIVE);
    fs.create(me(), ROOT, name.as_bytes(), 0o644, flags).await
}

async fn write(fs: &SharedFs, (entry, opened): &(Entry, Opened), text: &str) {
    let (inode, data) = (entry.attr.inode, Bytes::copy_from_slice(text.as_bytes()));
    fs.write(Writer::At(me()), inode, opened.handle, 0, data).await.expect("writes");
}

async fn close(fs: &SharedFs, (entry, opened): &(Entry, Opened)) -> Result<(), Errno> {
    let flushed = fs.flush(entry.attr.inode, opened.handle).await;
    fs.close(entry.attr.inode, opened.handle).await.expect("closes");
    flushed
}

async fn made(fs: &SharedFs, parent: InodeNumber, name: &str, text: &str) -> InodeNumber {
    let file = create(fs, parent, name).await.expect("creates");
    write(fs, &file, text).await;
    close(fs, &file).await.expect("is stored");
    file.0.attr.inode
}

async fn lookup(fs: &SharedFs, name: &str) -> Result<InodeNumber, Errno> {
    Ok(fs.lookup(me(), ROOT, name.as_bytes()).await?.attr.inode)
}

async fn content(fs: &SharedFs, name: &str) -> Result<String, Errno> {
    let inode = lookup(fs, name).await?;
    let opened = fs.open(me(), inode, OpenFlags::READ).await?;
    let read = fs.read(inode, opened.handle, 0, 1000).await;
    fs.close(inode, opened.handle).await?;
    Ok(String::from_utf8_lossy(&read?).into_owned())
}

async fn names(fs: &SharedFs) -> Vec<String> {
    let opened = fs.opendir(me(), ROOT).await.expect("opens");
    let mut names = Vec::new();
    loop {
        // By pages of two: the names of newborns continue those of the directory.
        let page = fs.readdir(ROOT, opened.handle, names.len() as u64, 2, true).await;
        let page = page.expect("lists");
        if page.is_empty() {
            break;
        }
        names.extend(page.iter().map(|entry| String::from_utf8_lossy(&entry.name).into_owned()));
    }
    fs.closedir(ROOT, opened.handle).await.expect("closes");
    names
}

/// D2 §1: "related blocks on few nodes". The inode and the name go there in one put.
/// A directory lies anywhere, and nobody waits until its place is found.
#[tokio::test(start_paused = true)]
async fn the_replica_set_of_the_next_directory_is_looked_up_before_it_is_made() {
    let (counted, one, two) = two_mounts().await;
    let looked_up = async || tokio::time::sleep(Duration::from_secs(1)).await;
    // As if most of the ring had the same set.
    *counted.until.lock().expect("unpoisoned") = Some(Key::MAX);
    looked_up().await;
    for n in 0..8 {
        let fs = if n > 5 { &two } else { &one };
        counted.take();
        fs.mkdir(me(), ROOT, format!("directory{n}").as_bytes(), 0o755).await.expect("makes");
        let before = counted.asked.lock().expect("unpoisoned").clone();
        let put = counted.take();
        assert!(before.contains(&put[0]), "directory {n}: {put:?}, {before:?}");
        looked_up().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_new_file_lies_near_its_directory_and_is_put_with_its_name() {
    let (counted, one, _) = two_mounts().await;
    one.mkdir(me(), ROOT, b"directory", 0o755).await.expect("makes");
    let directory = one.lookup(me(), ROOT, b"directory").await.expect("is there").attr.inode;
    // What the directory's key is shows with the first file, which may lie anywhere.
    counted.take();
    made(&one, directory, "first", "contents").await;
    let key = counted.take()[1];
    let hundredth = Key::MAX.half().half().half().half().half().half().half();
    let near = KeyRange::new(key.previous(), key.wrapping_add(&hundredth));
    *counted.until.lock().expect("unpoisoned") = Some(near.upto);
    let (_, two) = (one.end().await, mounted(&env(), &counted.clone().arc(), 2).await);
    let before = counted.together.load(Ordering::Relaxed);
    let directory = two.lookup(me(), ROOT, b"directory").await.expect("is there").attr.inode;
    for n in 0..20 {
        made(&two, directory, &format!("file{n}"), "contents").await;
        let put = counted.take();
        assert_eq!((put.len(), put[1]), (2, key), "the inode, then its directory");
        assert!(near.contains(&put[0]), "file {n} lies at {:?}", put[0]);
    }
    assert_eq!(counted.together.load(Ordering::Relaxed) - before, 20);
    // Other nodes may have room.
    counted.is_full.store(true, Ordering::Relaxed);
    let refused = two.symlink(me(), directory, b"refused", b"target").await;
    assert_eq!(refused.map(drop), Err(Errno::ENOSPC));
    counted.is_full.store(false, Ordering::Relaxed);
    for n in 20..24 {
        made(&two, directory, &format!("file{n}"), "contents").await;
    }
    let put = counted.take();
    assert!(put.iter().step_by(2).any(|key| !near.contains(key)), "{put:?}");
    tokio::time::sleep(Duration::from_secs(31)).await;
    two.symlink(me(), directory, b"link", b"target").await.expect("makes");
    assert!(near.contains(&counted.take()[0]), "so does a symbolic link");
    two.mkdir(me(), directory, b"below", 0o755).await.expect("makes");
    two.mkdir(me(), directory, b"beside", 0o755).await.expect("makes");
    let put = counted.take();
    assert!(!near.contains(&put[0]) || !near.contains(&put[2]), "directories lie anywhere");
}

/// A quarter of a million hashes would hold up a thread of the runtime for tens of milliseconds.
#[tokio::test(start_paused = true)]
async fn other_tasks_go_on_while_a_place_for_a_file_is_looked_for() {
    let (counted, one, _) = two_mounts().await;
    let directory = one.mkdir(me(), ROOT, b"directory", 0o755).await.expect("makes").attr.inode;
    // A number in 131,072 leads there.
    let until = counted.take()[0].wrapping_add(&Key::power_of_two(Key::BITS - 17));
    *counted.until.lock().expect("unpoisoned") = Some(until);
    let turns = Arc::new(AtomicUsize::new(0));
    let counting = turns.clone();
    let other = tokio::spawn(async move {
        loop {
            counting.fetch_add(1, Ordering::Relaxed);
            tokio::task::yield_now().await;
        }
    });
    for n in 0..5 {
        made(&one, directory, &format!("file{n}"), "contents").await;
    }
    other.abort();
    // Some 128 for each file in the mean.
    assert!(turns.load(Ordering::Relaxed) > 50, "{} turns", turns.load(Ordering::Relaxed));
}

#[tokio::test]
async fn a_file_is_written_once_and_then_its_name() {
    let (counted, one, two) = two_mounts().await;
    let file = create(&one, ROOT, "file").await.expect("creates");
    write(&one, &file, "contents").await;
    assert_eq!(counted.take(), [], "nothing is on the ring before the close");
    close(&one, &file).await.expect("is stored");
    let put = counted.take();
    assert_eq!(put.len(), 2, "the inode, then the directory");
    assert_eq!(content(&two, "file").await.as_deref(), Ok("contents"));
    made(&one, ROOT, "empty", "").await;
    let second = counted.take();
    assert_eq!((second.len(), second[1]), (2, put[1]), "an empty file too");
}

#[tokio::test]
async fn a_file_that_is_not_closed_is_there_for_this_mount_alone() {
    let (_, one, two) = two_mounts().await;
    made(&one, ROOT, "a", "").await;
    made(&one, ROOT, "z", "").await;
    let file = create(&one, ROOT, "m").await.expect("creates");
    write(&one, &file, "not closed").await;
    assert_eq!(names(&one).await, ["a", "z", "m"]);
    assert_eq!(names(&two).await, ["a", "z"]);
    assert_eq!(lookup(&one, "m").await, Ok(file.0.attr.inode));
    assert_eq!(lookup(&two, "m").await, Err(Errno::ENOENT));
    assert_eq!(content(&one, "m").await.as_deref(), Ok("not closed"));
    assert_eq!(create_exclusively(&one, "m").await.err(), Some(Errno::EEXIST));
    assert_eq!(one.mkdir(me(), ROOT, b"m", 0o755).await.err(), Some(Errno::EEXIST));
    let inode = lookup(&one, "a").await.expect("is there");
    assert_eq!(one.link(me(), inode, ROOT, b"m").await.err(), Some(Errno::EEXIST));
    // Without O_EXCL it is the same file.
    let again = one.create(me(), ROOT, b"m", 0o600, OpenFlags::READ_WRITE).await.expect("opens");
    assert_eq!(again.0.attr.inode, file.0.attr.inode);
    close(&one, &again).await.expect("is stored");
    assert_eq!(names(&two).await, ["a", "m", "z"], "closed by one of its programs");
    close(&one, &file).await.expect("closes");
    assert_eq!(names(&one).await, ["a", "m", "z"]);
}

#[tokio::test]
async fn a_file_that_is_created_exclusively_has_its_name_at_once() {
    let (_, one, two) = two_mounts().await;
    let file = create_exclusively(&one, "index.lock").await.expect("creates");
    assert_eq!(create_exclusively(&two, "index.lock").await.err(), Some(Errno::EEXIST));
    write(&one, &file, "mine").await;
    close(&one, &file).await.expect("is stored");
    assert_eq!(content(&two, "index.lock").await.as_deref(), Ok("mine"));
}

#[tokio::test]
async fn a_file_that_is_removed_before_it_is_closed_never_reaches_the_ring() {
    let (counted, one, two) = two_mounts().await;
    let file = create(&one, ROOT, "temporary").await.expect("creates");
    one.unlink(me(), ROOT, b"temporary").await.expect("removes");
    write(&one, &file, "scratch").await;
    let attr = one.getattr(file.0.attr.inode, Some(file.1.handle)).await.expect("is open").attr;
    assert_eq!((attr.nlink, attr.size_bytes), (0, 7));
    let read = one.read(file.0.attr.inode, file.1.handle, 0, 100).await.expect("reads");
    assert_eq!(&read[..], b"scratch");
    close(&one, &file).await.expect("closes");
    one.sync().await.expect("syncs");
    assert_eq!(counted.take(), []);
    assert_eq!((names(&one).await.len(), names(&two).await.len()), (0, 0));
    made(&one, ROOT, "temporary", "new").await;
    assert_eq!(content(&two, "temporary").await.as_deref(), Ok("new"));
}

#[tokio::test]
async fn a_file_that_is_not_closed_can_be_moved_linked_and_changed() {
    let (_, one, two) = two_mounts().await;
    made(&one, ROOT, "old", "old").await;
    let file = create(&one, ROOT, "new").await.expect("creates");
    write(&one, &file, "new").await;
    let no_flags = RenameFlags::default();
    one.rename(me(), ROOT, b"new", ROOT, b"old", no_flags).await.expect("renames");
    assert_eq!(names(&one).await, ["old"]);
    assert_eq!(content(&two, "old").await.as_deref(), Ok("new"));
    close(&one, &file).await.expect("closes");
    // Also in the place of one that is not closed.
    let other = create(&one, ROOT, "other").await.expect("creates");
    one.rename(me(), ROOT, b"old", ROOT, b"other", no_flags).await.expect("renames");
    write(&one, &other, "gone").await;
    close(&one, &other).await.expect("closes");
    assert_eq!(content(&two, "other").await.as_deref(), Ok("new"));
    let file = create(&one, ROOT, "file").await.expect("creates");
    one.link(me(), file.0.attr.inode, ROOT, b"link").await.expect("links");
    write(&one, &file, "both").await;
    close(&one, &file).await.expect("closes");
    assert_eq!(content(&two, "file").await.as_deref(), Ok("both"));
    assert_eq!(content(&two, "link").await.as_deref(), Ok("both"));
    let linked = two.lookup(me(), ROOT, b"link").await.expect("is there");
    assert_eq!(linked.attr.nlink, 2);
}

#[tokio::test]
async fn a_directory_with_a_file_that_is_not_closed_is_not_empty() {
    let (_, one, two) = two_mounts().await;
    let directory = one.mkdir(me(), ROOT, b"d", 0o755).await.expect("makes").attr.inode;
    let file = create(&one, directory, "file").await.expect("creates");
    assert_eq!(one.rmdir(me(), ROOT, b"d").await, Err(Errno::ENOTEMPTY));
    // Another mount does not know of it.
    two.rmdir(me(), ROOT, b"d").await.expect("is empty there");
    write(&one, &file, "lost").await;
    assert_eq!(close(&one, &file).await, Err(Errno::ENOENT), "and its program is told");
    assert_eq!(names(&one).await.len(), 0);
    one.end().await.expect("nothing waits");
}

#[tokio::test]
async fn two_mounts_that_create_one_name_keep_both_files() {
    let (_, one, two) = two_mounts().await;
    let (a, b) = (create(&one, ROOT, "f").await, create(&two, ROOT, "f").await);
    let (a, b) = (a.expect("creates"), b.expect("creates"));
    write(&one, &a, "one").await;
    write(&two, &b, "two").await;
    close(&one, &a).await.expect("is stored");
    close(&two, &b).await.expect("is stored");
    let listed = names(&one).await;
    assert_eq!((listed.len(), &listed[0][..]), (2, "f"));
    assert_eq!(names(&two).await, listed);
    assert_eq!(content(&two, "f").await.as_deref(), Ok("one"), "the first that was closed");
    assert_eq!(content(&one, &listed[1]).await.as_deref(), Ok("two"));
}

#[tokio::test]
async fn files_that_are_closed_together_are_named_together() {
    let (counted, one, two) = two_mounts().await;
    let each = (0..40).map(|n| {
        let one = one.clone();
        async move { made(&one, ROOT, &format!("{n:02}"), "x").await }
    });
    join_all(each).await;
    let put = counted.take();
    assert!(put.len() < 40 + 8, "{} versions for forty files", put.len());
    assert_eq!(names(&two).await.len(), 40);
}

#[tokio::test]
async fn an_inode_that_lost_its_last_name_is_removed_after_the_call() {
    let (counted, one, two) = two_mounts().await;
    let inode = made(&one, ROOT, "file", "x").await;
    counted.take();
    one.unlink(me(), ROOT, b"file").await.expect("removes");
    assert_eq!(counted.take().len(), 0, "nobody waits");
    assert_eq!(lookup(&one, "file").await, Err(Errno::ENOENT));
    one.end().await.expect("ends");
    let put = counted.take();
    assert!(put.len() == 2 && put[0] != put[1], "the directory, then the inode: {put:?}");
    assert_eq!(lookup(&two, "file").await, Err(Errno::ENOENT));
    assert_eq!(counted.removed.load(Ordering::Relaxed), 1);
    // One that is open, or has another name, knows of it at once.
    assert_eq!(one.getattr(inode, None).await.expect("the kernel knows it").attr.nlink, 0);
    let inode = made(&two, ROOT, "open", "x").await;
    let opened = two.open(me(), inode, OpenFlags::READ).await.expect("opens");
    two.unlink(me(), ROOT, b"open").await.expect("removes");
    let attr = two.getattr(inode, None).await.expect("is open").attr;
    assert_eq!((attr.nlink, attr.kind), (0, FileKind::Regular));
    two.close(inode, opened.handle).await.expect("closes");
    assert_eq!(counted.removed.load(Ordering::Relaxed), 2);
}

/// A crash in between would leave a name without a file.
#[tokio::test(start_paused = true)]
async fn an_inode_is_not_removed_before_its_name_is() {
    let (counted, one, two) = two_mounts().await;
    counted.take();
    made(&one, ROOT, "file", "x").await;
    let root = *counted.take().last().expect("the directory");
    *counted.absent.lock().expect("unpoisoned") = Some(root);
    one.unlink(me(), ROOT, b"file").await.expect("removes");
    assert!(one.sync().await.is_err());
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(counted.removed.load(Ordering::Relaxed), 0);
    assert_eq!(content(&two, "file").await.as_deref(), Ok("x"));
    *counted.absent.lock().expect("unpoisoned") = None;
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert_eq!(lookup(&two, "file").await, Err(Errno::ENOENT));
    assert_eq!(counted.removed.load(Ordering::Relaxed), 1);
}

/// A log that stays open appears on other mounts all the same.
#[test]
fn a_file_that_stays_open_gets_its_name_after_some_seconds() {
    let ring = Ring::new(3, 5);
    let at = |member: usize| {
        let member = &ring.members[member];
        let blocks: Arc<dyn Blocks> = member.dht.clone();
        (ring.sim.env(member.host), blocks)
    };
    let limit = Duration::from_secs(600);
    let ((env_a, blocks_a), (env_b, blocks_b)) = (at(0), at(1));
    let run = ring.sim.block_on(limit, async {
        created(&env_a, &blocks_a).await;
        let one = mounted(&env_a, &blocks_a, 1).await;
        let two = mounted(&env_b, &blocks_b, 2).await;
        let log = create(&one, ROOT, "log").await.expect("creates");
        write(&one, &log, "line 1").await;
        assert_eq!(lookup(&two, "log").await, Err(Errno::ENOENT));
        (one, two, log)
    });
    let (one, two, log) = run.expect("ends");
    ring.sim.run_for(Duration::from_secs(11));
    let later = ring.sim.block_on(limit, async {
        assert_eq!(content(&two, "log").await.as_deref(), Ok("line 1"));
        write(&one, &log, "line 2").await;
        close(&one, &log).await.expect("is stored");
        assert_eq!(content(&two, "log").await.as_deref(), Ok("line 2"));
    });
    later.expect("ends");
}
