//! Calls on several mounts of one volume, and several calls of one mount at the same time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use atoll_dht::{
    Blocks, GetError, HeldBlock, LeaseRenewal, MemoryBlocks, NewBlock, PutError, Renewed, Wanted,
};
use atoll_env::BoxFuture;
use atoll_key::BlockId;
use atoll_vfs::{Caller, Errno, FileSystem, InodeNumber, OpenFlags, RenameFlags, Writer};
use atoll_volume::shared::{SharedFs, SharedOptions};
use bytes::Bytes;

use super::mounts::{created, env, mounted, mounted_with};

const ROOT: InodeNumber = InodeNumber::ROOT;

type Work = Box<dyn FnOnce() -> BoxFuture<'static, ()> + Send>;

/// Blocks in memory; does something else once, between two steps of a call.
#[derive(Clone, Default)]
struct Interrupted {
    blocks: MemoryBlocks,
    after_get: Arc<Mutex<Option<(usize, Work)>>>,
    /// Refuse the next certified block, as a replica does that holds newer groups of writers.
    refuses: Arc<AtomicBool>,
}

impl Interrupted {
    /// Does `work` after so many mutable blocks have been read.
    fn after_gets(&self, count: usize, work: Work) {
        *self.after_get.lock().expect("unpoisoned") = Some((count, work));
    }
}

impl Blocks for Interrupted {
    fn get_block(
        &self,
        id: BlockId,
        wanted: Wanted,
    ) -> BoxFuture<'static, Result<HeldBlock, GetError>> {
        let got = self.blocks.get_block(id, wanted);
        let work = {
            let mut planned = self.after_get.lock().expect("unpoisoned");
            match planned.as_mut().filter(|_| id.kind.joins()) {
                Some((count, _)) if *count > 1 => {
                    *count -= 1;
                    None
                }
                Some(_) => planned.take().map(|(_, work)| work),
                None => None,
            }
        };
        Box::pin(async move {
            let got = got.await;
            if let Some(work) = work {
                work().await;
            }
            got
        })
    }

    fn put_blocks(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        let is_certified = blocks[0].id.kind.joins();
        if is_certified && self.refuses.swap(false, Ordering::Relaxed) {
            // As the client of the ring tells it.
            let refused = PutError::Superseded { offered: 1, held: 2 };
            return Box::pin(async move { vec![Err(refused)] });
        }
        self.blocks.put_blocks(blocks)
    }

    fn put_in_order(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        self.put_blocks(blocks)
    }

    fn renew_blocks(
        &self,
        renewal: LeaseRenewal,
    ) -> BoxFuture<'static, Vec<Result<Renewed, PutError>>> {
        self.blocks.renew_blocks(renewal)
    }

    fn watch(
        &self,
        id: BlockId,
        seen: u64,
    ) -> BoxFuture<'static, Result<Option<HeldBlock>, GetError>> {
        self.blocks.watch(id, seen)
    }
}

async fn write(fs: &SharedFs, parent: InodeNumber, name: &str, bytes: &str) -> InodeNumber {
    let me = Caller::default();
    let flags = OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::TRUNCATE);
    let made = fs.create(me, parent, name.as_bytes(), 0o644, flags).await;
    let (entry, opened) = made.expect("makes");
    let inode = entry.attr.inode;
    let data = Bytes::copy_from_slice(bytes.as_bytes());
    fs.write(Writer::At(me), inode, opened.handle, 0, data).await.expect("writes");
    fs.flush(inode, opened.handle).await.expect("is stored");
    fs.close(inode, opened.handle).await.expect("closes");
    inode
}

async fn content(fs: &SharedFs, parent: InodeNumber, name: &str) -> Result<String, Errno> {
    let me = Caller::default();
    let inode = fs.lookup(me, parent, name.as_bytes()).await?.attr.inode;
    let opened = fs.open(me, inode, OpenFlags::READ).await?;
    let read = fs.read(inode, opened.handle, 0, 1000).await;
    fs.close(inode, opened.handle).await?;
    Ok(String::from_utf8_lossy(&read?).into_owned())
}

async fn names(fs: &SharedFs) -> Vec<String> {
    let opened = fs.opendir(Caller::default(), ROOT).await.expect("opens");
    let listed = fs.readdir(ROOT, opened.handle, 0, 1000, false).await.expect("lists");
    fs.closedir(ROOT, opened.handle).await.expect("closes");
    listed.into_iter().map(|entry| String::from_utf8_lossy(&entry.name).into_owned()).collect()
}

/// Two mounts of users 1 and 2 on one volume.
async fn two_mounts() -> (Interrupted, SharedFs, SharedFs) {
    let interrupted = Interrupted::default();
    let blocks: Arc<dyn Blocks> = Arc::new(interrupted.clone());
    created(&env(), &blocks).await;
    let (one, two) = (mounted(&env(), &blocks, 1).await, mounted(&env(), &blocks, 2).await);
    (interrupted, one, two)
}

/// A file that was open while its volume's groups changed could not be written any more: the ring's
/// client says `Superseded`, which was an error for good.
#[tokio::test]
async fn a_refused_version_is_written_again_and_covers_nothing_unseen() {
    let (interrupted, one, two) = two_mounts().await;
    let me = Caller::default();
    let inode = write(&one, ROOT, "file", "first").await;
    let opened = one.open(me, inode, OpenFlags::READ_WRITE).await.expect("opens");
    one.write(Writer::At(me), inode, opened.handle, 0, Bytes::from_static(b"ours!"))
        .await
        .expect("writes");
    write(&two, ROOT, "file", "other").await;
    interrupted.refuses.store(true, Ordering::Relaxed);
    one.flush(inode, opened.handle).await.expect("is written again");
    one.close(inode, opened.handle).await.expect("closes");
    assert_eq!(content(&two, ROOT, "file").await, Ok("ours!".into()));
    let names = names(&two).await;
    assert_eq!(names.len(), 2, "{names:?}");
    assert_eq!(content(&two, ROOT, &names[1]).await, Ok("other".into()));
}

/// Makes two files `c` at the same time; returns their names.
async fn made_at_once(interrupted: &Interrupted, one: &SharedFs, two: &SharedFs) -> Vec<String> {
    let first = one.clone();
    let makes = move || -> BoxFuture<'static, ()> {
        Box::pin(async move {
            write(&first, ROOT, "c", "first").await;
        })
    };
    interrupted.after_gets(1, Box::new(makes));
    write(two, ROOT, "c", "second").await;
    let names = names(one).await;
    assert!(names.len() == 2 && names[0] == "c" && names[1].starts_with("c~"), "{names:?}");
    names
}

/// `rm -r` failed on directories with such names: removing `c` gave its name to the other one.
#[tokio::test]
async fn a_name_beside_one_that_is_removed_stays_what_it_was() {
    let (interrupted, one, two) = two_mounts().await;
    let made = made_at_once(&interrupted, &one, &two).await;
    let there = content(&one, ROOT, &made[1]).await;
    one.unlink(Caller::default(), ROOT, b"c").await.expect("removes");
    one.sync().await.expect("is on the ring");
    assert_eq!(names(&two).await, made[1..]);
    assert_eq!(content(&two, ROOT, &made[1]).await, there);
    one.unlink(Caller::default(), ROOT, made[1].as_bytes()).await.expect("removes");
    one.sync().await.expect("is on the ring");
    assert_eq!(names(&two).await.len(), 0);
}

/// A file saved by a rename appeared as `c~USER~TIME`, and the older one beside it as `c`.
#[tokio::test]
async fn a_file_renamed_over_one_of_two_has_its_name() {
    let (interrupted, one, two) = two_mounts().await;
    let made = made_at_once(&interrupted, &one, &two).await;
    let there = content(&one, ROOT, &made[1]).await;
    write(&one, ROOT, "saved", "newest").await;
    let renamed = one.rename(Caller::default(), ROOT, b"saved", ROOT, b"c", RenameFlags::default());
    renamed.await.expect("renames");
    assert_eq!(names(&two).await, made);
    assert_eq!(content(&two, ROOT, "c").await, Ok("newest".into()));
    assert_eq!(content(&two, ROOT, &made[1]).await, there);
    // One of the two over the other.
    let (from, to) = (made[1].as_bytes(), b"c");
    let renamed = two.rename(Caller::default(), ROOT, from, ROOT, to, RenameFlags::default());
    renamed.await.expect("renames");
    assert_eq!(names(&one).await, ["c"]);
    assert_eq!(content(&one, ROOT, "c").await, there);
}

/// What was made in a directory while another mount removed it was acknowledged and had no path.
#[tokio::test]
async fn a_directory_that_was_removed_while_a_file_was_made_in_it_gets_its_name_back() {
    let (interrupted, one, two) = two_mounts().await;
    let me = Caller::default();
    let made = one.mkdir(me, ROOT, b"d", 0o755).await.expect("makes");
    two.lookup(me, ROOT, b"d").await.expect("sees it");
    let removing = one.clone();
    let removes = move || -> BoxFuture<'static, ()> {
        Box::pin(async move { removing.rmdir(me, ROOT, b"d").await.expect("it is empty") })
    };
    // The first read is that of the creation, the second that of the name at the close.
    interrupted.after_gets(2, Box::new(removes));
    write(&two, made.attr.inode, "f", "kept").await;
    one.end().await.expect("ends");
    assert_eq!(names(&two).await, ["d"]);
    assert_eq!(content(&two, made.attr.inode, "f").await, Ok("kept".into()));
}

/// A file gets another name while its only one is taken away: it stays under the new one.
#[tokio::test(start_paused = true)]
async fn a_name_that_is_made_while_another_goes_keeps_its_file() {
    for gets in 1..=2 {
        let interrupted = Interrupted::default();
        let blocks: Arc<dyn Blocks> = Arc::new(interrupted.clone());
        created(&env(), &blocks).await;
        let one = mounted(&env(), &blocks, 1).await;
        write(&one, ROOT, "a", "text").await;
        let me = Caller::default();
        let number = one.lookup(me, ROOT, b"a").await.expect("there").attr.inode;
        // Of an open file the inode is changed before the call returns.
        one.open(me, number, OpenFlags::READ).await.expect("opens");
        let fs = one.clone();
        let links = move || -> BoxFuture<'static, ()> {
            Box::pin(async move {
                fs.link(me, number, ROOT, b"b").await.expect("linked");
            })
        };
        interrupted.after_gets(gets, Box::new(links));
        one.unlink(me, ROOT, b"a").await.expect("removed");
        let two = mounted(&env(), &blocks, 2).await;
        for fs in [&one, &two] {
            let found = fs.lookup(me, ROOT, b"b").await.expect("its new name");
            assert_eq!(found.attr.nlink, 1, "after {gets} reads");
            let handle = fs.open(me, found.attr.inode, OpenFlags::READ).await;
            let handle = handle.expect("opens").handle;
            let text = fs.read(found.attr.inode, handle, 0, 100).await.expect("reads");
            assert_eq!(text, "text");
        }
    }
}

/// A program that reads a name in a file which another mount has just closed finds it, although a moment ago
/// there was none; and a file that was replaced is not missing.
#[tokio::test(start_paused = true)]
async fn a_new_name_and_a_replaced_file_are_found_at_once() {
    let blocks: Arc<dyn Blocks> = Arc::new(MemoryBlocks::default());
    created(&env(), &blocks).await;
    let default = SharedOptions::default;
    let one = mounted_with(&env(), &blocks, 1, default()).await;
    let two = mounted_with(&env(), &blocks, 2, default()).await;
    let me = Caller::default();
    write(&one, ROOT, "ref", "old").await;
    let before = two.lookup(me, ROOT, b"ref").await.expect("there").attr.inode;
    assert_eq!(two.lookup(me, ROOT, b"object").await.err(), Some(Errno::ENOENT));
    write(&one, ROOT, "object", "x").await;
    write(&one, ROOT, "ref.lock", "object").await;
    one.rename(me, ROOT, b"ref.lock", ROOT, b"ref", RenameFlags::default()).await.expect("renames");
    one.sync().await.expect("is on the ring");
    two.lookup(me, ROOT, b"object").await.expect("was closed before");
    // The kernel looks a file up again that has gone when it is opened.
    assert_eq!(two.open(me, before, OpenFlags::READ).await.err(), Some(Errno::ESTALE));
    let now = two.lookup(me, ROOT, b"ref").await.expect("there").attr.inode;
    let opened = two.open(me, now, OpenFlags::READ).await.expect("opens");
    assert_eq!(two.read(now, opened.handle, 0, 100).await.expect("reads"), "object");
}
