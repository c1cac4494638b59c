//! Which versions a mount asks the ring for, as the mount says and as each file says itself.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_dht::{
    Blocks, GetError, HeldBlock, MemoryBlocks, NewBlock, OverMemory, PutError, Wanted,
};
use atoll_env::BoxFuture;
use atoll_key::BlockId;
use atoll_vfs::{Caller, Errno, FileSystem, InodeNumber, OpenFlags, Writer, XattrFlags};
use atoll_volume::shared::consistency::CONSISTENCY_XATTR;
use atoll_volume::shared::{Consistency, SharedFs, SharedOptions};
use bytes::Bytes;

use super::mounts::{created, env, mounted_with};

const ROOT: InodeNumber = InodeNumber::ROOT;
const NAME: &[u8] = CONSISTENCY_XATTR.as_bytes();

/// A ring whose nearest replica is behind: who asks for at least some version of an inode gets the oldest that
/// will do.
#[derive(Default)]
struct Lagging {
    memory: MemoryBlocks,
    versions: Mutex<BTreeMap<BlockId, Vec<HeldBlock>>>,
    /// How often all replicas of an inode were asked, and how often one.
    asked: Mutex<BTreeMap<bool, usize>>,
}

impl OverMemory for Lagging {
    fn memory(&self) -> &MemoryBlocks {
        &self.memory
    }

    fn get_block(
        &self,
        id: BlockId,
        wanted: Wanted,
    ) -> BoxFuture<'static, Result<HeldBlock, GetError>> {
        if id.kind.joins() {
            let all = wanted == Wanted::Newest;
            *self.asked.lock().expect("one thread").entry(all).or_default() += 1;
            let versions = self.versions.lock().expect("one thread");
            let old = versions.get(&id).into_iter().flatten();
            let mut old = old.filter(|held| id.kind.reaches(held.version, wanted.least()));
            if !all && let Some(held) = old.next() {
                let held = held.clone();
                return Box::pin(async { Ok(held) });
            }
        }
        self.memory.get_block(id, wanted)
    }

    fn put_blocks(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        for NewBlock { id, bytes, .. } in &blocks {
            if id.kind.joins() {
                let version = id.verify(bytes).expect("a mount's");
                let held = HeldBlock { version, bytes: bytes.clone() };
                self.versions.lock().expect("one thread").entry(*id).or_default().push(held);
            }
        }
        self.memory.put_blocks(blocks)
    }
}

impl Lagging {
    /// All replicas have what was written so far.
    fn catch_up(&self) {
        let mut versions = self.versions.lock().expect("one thread");
        versions.values_mut().for_each(|versions| drop(versions.drain(..versions.len() - 1)));
    }

    /// How often all replicas were asked since it was called last, and how often one.
    fn asked(&self) -> (usize, usize) {
        let asked = std::mem::take(&mut *self.asked.lock().expect("one thread"));
        let of = |all| asked.get(&all).copied().unwrap_or(0);
        (of(true), of(false))
    }
}

fn me() -> Caller {
    Caller::default()
}

async fn mount(ring: &Arc<Lagging>, user: u8, consistency: Consistency) -> SharedFs {
    let names_max_age = Duration::from_secs(3600);
    let options = SharedOptions { names_max_age, consistency, ..SharedOptions::default() };
    let blocks: Arc<dyn Blocks> = ring.clone();
    mounted_with(&env(), &blocks, user, options).await
}

async fn make(fs: &SharedFs, directory: InodeNumber, name: &str) -> InodeNumber {
    let rw = OpenFlags::READ_WRITE;
    let (entry, opened) =
        fs.create(me(), directory, name.as_bytes(), 0o644, rw).await.expect("made");
    fs.flush(entry.attr.inode, opened.handle).await.expect("closed");
    fs.close(entry.attr.inode, opened.handle).await.expect("closed");
    entry.attr.inode
}

async fn choose(fs: &SharedFs, inode: InodeNumber, value: &'static str) -> Result<(), Errno> {
    let value = Bytes::from_static(value.as_bytes());
    fs.setxattr(me(), inode, NAME, value, XattrFlags::default()).await
}

async fn write(fs: &SharedFs, inode: InodeNumber, text: &'static str) {
    let handle = fs.open(me(), inode, OpenFlags::READ_WRITE).await.expect("opens").handle;
    let text = Bytes::from_static(text.as_bytes());
    fs.write(Writer::At(me()), inode, handle, 0, text).await.expect("written");
    fs.flush(inode, handle).await.expect("closed");
    fs.close(inode, handle).await.expect("closed");
}

async fn read(fs: &SharedFs, inode: InodeNumber) -> Vec<u8> {
    let handle = fs.open(me(), inode, OpenFlags::READ).await.expect("opens").handle;
    let read = fs.read(inode, handle, 0, 100).await.expect("read").to_vec();
    fs.close(inode, handle).await.expect("closed");
    read
}

/// A file that says nothing is opened as the mount is set to; one that says `cto` is never stale, and one that says
/// `ryw` asks one replica, in either mount.
#[tokio::test]
async fn a_file_that_says_how_it_is_read_is_read_so_by_every_mount() {
    for default in [Consistency::CloseToOpen, Consistency::ReadYourWrites] {
        let ring = Arc::new(Lagging::default());
        let blocks: Arc<dyn Blocks> = ring.clone();
        created(&env(), &blocks).await;
        let writer = mount(&ring, 1, Consistency::CloseToOpen).await;
        let mut files = Vec::new();
        for (name, chosen) in [("plain", None), ("fresh", Some("cto")), ("fast", Some("ryw"))] {
            let inode = make(&writer, ROOT, name).await;
            write(&writer, inode, "old").await;
            if let Some(chosen) = chosen {
                choose(&writer, inode, chosen).await.expect("stored");
            }
            files.push((name, inode));
        }
        ring.catch_up();
        let reader = mount(&ring, 2, default).await;
        let mut theirs = Vec::new();
        for (name, _) in &files {
            let inode = reader.lookup(me(), ROOT, name.as_bytes()).await.expect("there").attr.inode;
            let handle = reader.open(me(), inode, OpenFlags::READ).await.expect("opens").handle;
            reader.close(inode, handle).await.expect("closed");
            theirs.push(inode);
        }
        for (_, inode) in &files {
            write(&writer, *inode, "new").await;
        }
        let by_default = if default == Consistency::CloseToOpen { "new" } else { "old" };
        for ((name, _), (inode, expected)) in
            files.iter().zip(theirs.iter().zip([by_default, "new", "old"]))
        {
            ring.asked();
            let shown = read(&reader, *inode).await;
            let (all, one) = ring.asked();
            let expects_all = expected == "new";
            assert_eq!((all, one), (usize::from(expects_all), usize::from(!expects_all)), "{name}");
            let what = format!("{name} in a mount that is {default:?}");
            let stale = String::from_utf8(shown).expect("text");
            // The file that was read before the first one that will do was written.
            assert_eq!(stale == "new", expects_all, "{what} shows {stale:?}");
        }
    }
}

/// A mount that meets a file for the first time learns how it is to be read from what one replica has, and asks all
/// then.
#[tokio::test]
async fn a_file_that_was_never_seen_is_read_as_it_says() {
    let ring = Arc::new(Lagging::default());
    let blocks: Arc<dyn Blocks> = ring.clone();
    created(&env(), &blocks).await;
    let writer = mount(&ring, 1, Consistency::CloseToOpen).await;
    choose(&writer, ROOT, "cto").await.expect("stored");
    let inode = make(&writer, ROOT, "file").await;
    ring.catch_up();
    // The nearest replica has the file as it was made, and the attribute.
    write(&writer, inode, "new").await;
    let reader = mount(&ring, 2, Consistency::ReadYourWrites).await;
    let theirs = reader.lookup(me(), ROOT, b"file").await.expect("there").attr.inode;
    assert_eq!(read(&reader, theirs).await, b"new");
}

#[tokio::test]
async fn what_is_made_in_a_directory_is_read_as_the_directory_is() {
    let ring = Arc::new(Lagging::default());
    let blocks: Arc<dyn Blocks> = ring.clone();
    created(&env(), &blocks).await;
    let fs = mount(&ring, 1, Consistency::CloseToOpen).await;
    let directory = fs.mkdir(me(), ROOT, b"logs", 0o755).await.expect("made").attr.inode;
    assert_eq!(choose(&fs, directory, "eventually").await, Err(Errno::EINVAL));
    choose(&fs, directory, "ryw").await.expect("stored");
    let below = fs.mkdir(me(), directory, b"today", 0o755).await.expect("made").attr.inode;
    for inode in [below, make(&fs, directory, "a").await, make(&fs, below, "b").await] {
        assert_eq!(fs.getxattr(inode, NAME).await, Ok(Bytes::from_static(b"ryw")));
    }
    // What is moved there, or was there before, keeps what it has.
    let elsewhere = make(&fs, ROOT, "c").await;
    fs.rename(me(), ROOT, b"c", directory, b"c", Default::default()).await.expect("moved");
    assert_eq!(fs.getxattr(elsewhere, NAME).await, Err(Errno::ENODATA));
    fs.removexattr(me(), directory, NAME).await.expect("removed");
    let plain = make(&fs, directory, "d").await;
    assert_eq!(fs.getxattr(plain, NAME).await, Err(Errno::ENODATA));
    let virtual_one = b"user.atoll.state";
    let set = fs.setxattr(me(), plain, virtual_one, Bytes::new(), XattrFlags::default()).await;
    assert_eq!(set, Err(Errno::EPERM));
}
