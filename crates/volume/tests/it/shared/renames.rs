//! Renames that fail: every step of them is undone, whatever has failed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use atoll_dht::{Blocks, MemoryBlocks, NewBlock, OverMemory, PutError};
use atoll_env::BoxFuture;
use atoll_key::GroupId;
use atoll_vfs::{Caller, Errno, FileKind, FileSystem, InodeNumber, RenameFlags};
use atoll_volume::shared::SharedFs;
use atoll_volume::shared::access::rebind::find;
use atoll_volume::shared::access::{Credentials, GroupRecord, groups, rebind};
use atoll_volume::shared::sealing::Sealing;

use super::mounts::{created_with, env, mounted, user, volume};

const ROOT: InodeNumber = InodeNumber::ROOT;
const NO_FLAGS: RenameFlags = RenameFlags { no_replace: false, exchange: false };
const EXCHANGE: RenameFlags = RenameFlags { no_replace: false, exchange: true };

fn me() -> Caller {
    Caller::default()
}

/// Memory that refuses some of the next puts.
#[derive(Clone)]
struct Refusing {
    memory: MemoryBlocks,
    /// How many it takes before.
    left: Arc<AtomicI64>,
    /// How many it refuses then.
    refuses: i64,
    error: PutError,
}

impl OverMemory for Refusing {
    fn memory(&self) -> &MemoryBlocks {
        &self.memory
    }

    fn put_blocks(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        let left = self.left.fetch_sub(1, Ordering::Relaxed);
        if left <= 0 && left > -self.refuses {
            let refused = vec![Err(self.error.clone()); blocks.len()];
            return Box::pin(async { refused });
        }
        self.memory.put_blocks(blocks)
    }
}

/// All names of the root directory and of those in it, with the number of links that each file shows.
async fn links(fs: &SharedFs) -> BTreeMap<String, u32> {
    let mut all = BTreeMap::new();
    let mut waiting = vec![(ROOT, String::new())];
    while let Some((directory, path)) = waiting.pop() {
        let handle = fs.opendir(me(), directory).await.expect("opens").handle;
        let listed = fs.readdir(directory, handle, 0, 1000, true).await.expect("lists");
        fs.closedir(directory, handle).await.expect("it is open");
        for entry in listed {
            let attr = entry.entry.expect("its attributes are known").attr;
            let path = format!("{path}/{}", String::from_utf8_lossy(&entry.name));
            match attr.kind {
                FileKind::Directory => waiting.push((attr.inode, path)),
                _ => drop(all.insert(path, attr.nlink)),
            }
        }
    }
    all
}

async fn make(fs: &SharedFs, parent: InodeNumber, name: &str) -> InodeNumber {
    let made = fs.mknod(me(), parent, name.as_bytes(), FileKind::Regular, 0o644, 0);
    made.await.expect("is made").attr.inode
}

fn set(names: &[&str]) -> BTreeMap<String, u32> {
    names.iter().map(|name| ((*name).to_owned(), 1)).collect()
}

/// A rename to another directory adds a link first. That stayed if it was refused, unless another program of the mount had
/// taken the name: after 511 attempts the file could not be renamed at all.
#[tokio::test(start_paused = true)]
async fn a_rename_that_fails_at_any_step_leaves_each_file_its_one_name() {
    let errors = [PutError::Full("all are".into()), PutError::Unavailable("nobody answers".into())];
    let (before, replaced, exchanged) =
        (set(&["/a/x", "/b/y"]), set(&["/b/y"]), set(&["/a/x", "/b/y"]));
    let mut failed = 0;
    for error in errors {
        // One put fails, or all do for a while.
        for refuses in [1, 30] {
            for (what, after) in [("move", &replaced), ("exchange", &exchanged), ("link", &before)]
            {
                for left in 0..6 {
                    let memory = MemoryBlocks::new();
                    let refusing = Refusing {
                        memory: memory.clone(),
                        left: Arc::new(AtomicI64::new(i64::MAX)),
                        refuses,
                        error: error.clone(),
                    };
                    let (over, blocks): (Arc<dyn Blocks>, Arc<dyn Blocks>) =
                        (Arc::new(refusing.clone()), Arc::new(memory));
                    created_with(&env(), &blocks, false).await;
                    let (one, two) =
                        (mounted(&env(), &over, 1).await, mounted(&env(), &blocks, 2).await);
                    let a = one.mkdir(me(), ROOT, b"a", 0o755).await.expect("made").attr.inode;
                    let b = one.mkdir(me(), ROOT, b"b", 0o755).await.expect("made").attr.inode;
                    let (x, y) = (make(&one, a, "x").await, make(&one, b, "y").await);
                    refusing.left.store(left, Ordering::Relaxed);
                    let done = match what {
                        "move" => one.rename(me(), a, b"x", b, b"y", NO_FLAGS).await,
                        "exchange" => one.rename(me(), a, b"x", b, b"y", EXCHANGE).await,
                        _ => one.link(me(), x, b, b"z").await.map(drop),
                    };
                    tokio::time::sleep(Duration::from_secs(10)).await;
                    refusing.left.store(i64::MAX, Ordering::Relaxed);
                    tokio::time::sleep(Duration::from_secs(60)).await;
                    one.sync().await.expect("the ring takes all");
                    let told =
                        format!("{what}, {refuses} refused after {left} ({error}): {done:?}");
                    failed += usize::from(done.is_err());
                    for fs in [&one, &two] {
                        let shown = links(fs).await;
                        match (what, &done) {
                            ("link", Ok(())) => {
                                let names = ["/a/x", "/b/y", "/b/z"];
                                assert!(shown.keys().eq(names.iter()), "{told}: {shown:?}");
                                assert_eq!((shown["/a/x"], shown["/b/z"]), (2, 2), "{told}");
                            }
                            (_, Ok(())) => assert_eq!(&shown, after, "{told}"),
                            (_, Err(_)) => assert_eq!(shown, before, "{told}"),
                        }
                    }
                    // Each name means the file that it should.
                    let at = |parent, name: &'static [u8]| {
                        let found = one.lookup(me(), parent, name);
                        async move { found.await.map(|entry| entry.attr.inode) }
                    };
                    let expected = match (what, &done) {
                        ("move", Ok(())) => (Err(Errno::ENOENT), Ok(x)),
                        ("exchange", Ok(())) => (Ok(y), Ok(x)),
                        _ => (Ok(x), Ok(y)),
                    };
                    assert_eq!((at(a, b"x").await, at(b, b"y").await), expected, "{told}");
                }
            }
        }
    }
    assert!(failed > 20, "{failed}");
}

/// A member may write the file and the directory that it is in, and not the one to which it is moved.
#[tokio::test(start_paused = true)]
async fn a_rename_into_a_directory_of_others_is_refused_for_ever_without_a_trace() {
    let blocks: Arc<dyn Blocks> = Arc::new(MemoryBlocks::new());
    let record = created_with(&env(), &blocks, false).await;
    let owner = mounted(&env(), &blocks, 1).await;
    for name in [b"mine", b"thei"] {
        owner.mkdir(me(), ROOT, name, 0o755).await.expect("made");
    }
    let theirs = owner.lookup(me(), ROOT, b"thei").await.expect("there").attr.inode;
    let mine = owner.lookup(me(), ROOT, b"mine").await.expect("there").attr.inode;
    make(&owner, mine, "x").await;
    make(&owner, theirs, "y").await;
    owner.sync().await.expect("is on the ring");
    // Another group alone may write the second directory: the owner's and nobody else's.
    let other = GroupRecord::default();
    groups::put_group(&env(), &blocks, &user(99), &other).await.expect("is put");
    let owner_user = user(1).user_id();
    groups::add_member(&env(), &blocks, &user(99), owner_user, "", 0).await.expect("is added");
    let path = [b"thei".to_vec()];
    let top = find(&blocks, record.root, &path, &Sealing::none()).await.expect("reads");
    let credentials = Credentials::new(env(), blocks.clone(), Some(user(1)));
    let others = |_: &[GroupId]| vec![user(99).group_id()];
    let sealing = (&volume(), &Sealing::none());
    let top = top.expect("there");
    let report = rebind(&env(), &blocks, sealing, &credentials, top, &others, &mut |_| {}).await;
    assert_eq!(report.failed, 0, "{report:?}");
    let two = mounted(&env(), &blocks, 2).await;
    let inode = |name: &'static [u8]| {
        let found = two.lookup(me(), ROOT, name);
        async move { found.await.expect("there").attr.inode }
    };
    let (mine, theirs) = (inode(b"mine").await, inode(b"thei").await);
    for flags in [NO_FLAGS, EXCHANGE].into_iter().cycle().take(20) {
        let refused = two.rename(me(), mine, b"x", theirs, b"y", flags).await;
        assert_eq!(refused, Err(Errno::EACCES));
        let refused = two.rename(me(), theirs, b"y", mine, b"x", flags).await;
        assert_eq!(refused, Err(Errno::EACCES));
    }
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(links(&two).await, set(&["/mine/x", "/thei/y"]));
    two.rename(me(), mine, b"x", ROOT, b"x", NO_FLAGS).await.expect("its own file");
    assert_eq!(links(&two).await, set(&["/thei/y", "/x"]));
}
