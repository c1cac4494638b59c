//! A whole volume of a hostile publisher, opened and read through.
//!
//! An input is a list of blocks, children before parents, the root's payload last; each
//! is 4 bytes length, big-endian, and its bytes. Where a block names another, it has
//! [`MARK`] and the other's number in place of the hash. The target makes the blocks one
//! after another, puts the true hashes in place of the numbers and signs the root, so
//! that whatever was mutated, hashes and signature are right: a publisher can sign
//! anything. (A block that contains its own hash, or its parent's, cannot be made.)
//!
//! Then it reads: steps are counted here, fetches by the volume's ring. Nothing is cached,
//! so a walk that does not end runs into the limit of fetches.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use atoll_dht::{Blocks, GetError, HeldBlock, LeaseRenewal, NewBlock, PutError, Renewed, Wanted};
use atoll_env::{BoxFuture, Env};
use atoll_key::{BlockHash, BlockId, SecretKey, SignedBlock};
use atoll_sim::{Sim, SimConfig};
use atoll_vfs::{Caller, Errno, FileKind, FileSystem, InodeNumber, OpenFlags, SeekTo};
use atoll_volume::format::directory::{
    Child, Content, DirectoryBlock, DirectoryEntry, DirectoryRef, Nodes,
};
use atoll_volume::format::inode::{Data, InodeBlock, Shape};
use atoll_volume::format::{PointerBlock, xattrs};
use atoll_volume::owned::{Item, Snapshot, Volume, VolumeFs, VolumeOptions};
use bytes::Bytes;

use super::format::{attribute, entry, file, root};
use super::{Target, target};

/// Stands, with a block's number behind it, for the hash of that block.
const MARK: [u8; 28] = *b"the hash of the block number";

/// Fetches after which a walk counts as endless: a bounded walk of our [`ITEMS`] items
/// needs a few thousand, a search for a hole in each of [`SEEKS`] files four times more.
const FETCH_LIMIT: u64 = 100_000;

/// Items looked at, by each way to read.
const ITEMS: usize = 40;

/// Files searched for data and holes.
const SEEKS: usize = 2;

/// Entries asked for at a time.
const PAGE: usize = 7;

pub(super) fn targets() -> Vec<Target> {
    let seeds = vec![small(), wide(), deep(), long(), old()];
    let target = target("volume/whole", seeds, |input| {
        let Some(ring) = unpack(input) else { return false };
        let sim = Sim::new(SimConfig::default());
        let env = sim.outside();
        let done = sim.block_on(Duration::from_secs(3600), read_through(env, Arc::new(ring)));
        done.is_ok_and(|read| read.is_ok())
    });
    // The blocks, a read of 64 KiB through 16 blocks of up to 1 MiB (holes, which take
    // no bytes to claim) and the simulator's and cache's fixed tables.
    vec![Target { fixed_bytes: 64 << 20, factor: 64, ..target }]
}

fn secret() -> SecretKey {
    SecretKey::from_seed(&[8; 32])
}

/// Makes the blocks of an input; `None` if it has no root.
fn unpack(mut input: &[u8]) -> Option<Ring> {
    let mut hashes: Vec<BlockHash> = Vec::new();
    let mut content = BTreeMap::new();
    loop {
        let (len, rest) = input.split_first_chunk::<4>()?;
        let (block, rest) = rest.split_at(rest.len().min(u32::from_be_bytes(*len) as usize));
        let block = name_blocks(block, &hashes);
        if rest.is_empty() {
            let root = SignedBlock::sign(&secret(), b"", 1, &block);
            return Some(Ring { content, root, fetches: AtomicU64::new(0) });
        }
        let hash = BlockHash::of(&block);
        hashes.push(hash);
        content.insert(hash.id(), Bytes::from(block));
        input = rest;
    }
}

/// Puts hashes in place of marks; a mark with the number of no earlier block stays, as
/// the hash of a block that no node has.
fn name_blocks(block: &[u8], hashes: &[BlockHash]) -> Vec<u8> {
    let mut out = block.to_vec();
    let mut at = 0;
    while at + 32 <= out.len() {
        if out[at] == MARK[0] && out[at..].starts_with(&MARK) {
            let number = u32::from_be_bytes(out[at + 28..at + 32].try_into().expect("4 bytes"));
            if let Some(hash) = hashes.get(number as usize) {
                out[at..at + 32].copy_from_slice(&hash.0);
            }
            at += 32;
        } else {
            at += 1;
        }
    }
    out
}

/// What the publisher put.
struct Ring {
    content: BTreeMap<BlockId, Bytes>,
    root: SignedBlock,
    fetches: AtomicU64,
}

impl Blocks for Ring {
    fn get_block(&self, id: BlockId, _: Wanted) -> BoxFuture<'static, Result<HeldBlock, GetError>> {
        if id == self.root.id() {
            let root = HeldBlock { version: self.root.version, bytes: self.root.bytes().clone() };
            return Box::pin(async { Ok(root) });
        }
        let fetches = self.fetches.fetch_add(1, Ordering::Relaxed);
        assert!(fetches < FETCH_LIMIT, "the walk does not end");
        let missing = GetError::NotFound { key: id.key, told: String::new() };
        let found = self.content.get(&id).cloned().ok_or(missing);
        Box::pin(async move { Ok(HeldBlock { version: 0, bytes: found? }) })
    }

    fn put_blocks(&self, _: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        unreachable!("readers put nothing")
    }

    fn put_in_order(&self, _: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        unreachable!("readers put nothing")
    }

    fn renew_blocks(&self, _: LeaseRenewal) -> BoxFuture<'static, Vec<Result<Renewed, PutError>>> {
        unreachable!("readers renew nothing")
    }

    fn watch(&self, _: BlockId, _: u64) -> BoxFuture<'static, Result<Option<HeldBlock>, GetError>> {
        unreachable!("readers watch nothing")
    }
}

/// Reads by path, then as a mount does; the error is of whatever failed last.
async fn read_through(env: Env, ring: Arc<Ring>) -> Result<(), String> {
    let options = VolumeOptions { cache_bytes: 0, ..VolumeOptions::default() };
    let at = VolumeOptions { at_unix_ms: Some(OLD_UNIX_MS), ..options.clone() };
    // Most have no history.
    let _ = Volume::open(env.clone(), ring.clone(), secret().volume_id(), at).await;
    let opened = Volume::open(env.clone(), ring, secret().volume_id(), options).await;
    let volume = opened.map_err(|error| error.to_string())?;
    let by_path = by_path(&*volume.snapshot().await).await;
    let mounted = mounted(&VolumeFs::new(env, volume, 0, 0)).await;
    by_path.and(mounted.map_err(|errno| errno.to_string()))
}

async fn by_path(snapshot: &Snapshot) -> Result<(), String> {
    let mut outcome = Ok(());
    let mut note = |result: Result<(), atoll_volume::owned::ReadError>| {
        if let Err(error) = result {
            let _ = error.errno();
            outcome = Err(error.to_string());
        }
    };
    note(snapshot.history().await.map(drop));
    let mut queue = VecDeque::from([snapshot.root()]);
    for _ in 0..ITEMS {
        let Some(item) = queue.pop_front() else { break };
        note(snapshot.xattrs(&item).await.map(drop));
        match item.entry.kind() {
            FileKind::Directory => note(list(snapshot, &item, &mut queue).await),
            FileKind::Regular => note(read_ends(snapshot, &item).await),
            _ => assert!(item.target().is_some_and(|target| !target.is_empty()), "a bare link"),
        }
        note(snapshot.resolve(&item.path).await.map(|found| {
            assert_eq!(found.entry, item.entry, "listed and found are two things");
        }));
    }
    outcome
}

async fn list(
    snapshot: &Snapshot,
    directory: &Item,
    queue: &mut VecDeque<Item>,
) -> Result<(), atoll_volume::owned::ReadError> {
    let mut listing = snapshot.list(directory)?;
    while queue.len() < ITEMS {
        let page = listing.next_page(PAGE).await?;
        if page.is_empty() {
            break;
        }
        let names_grow = page.windows(2).all(|pair| pair[0].entry.name < pair[1].entry.name);
        assert!(names_grow && page.len() <= PAGE, "a page is out of order or too long");
        queue.extend(page);
    }
    Ok(())
}

/// Offsets worth reading at in a file of some length.
fn places(size_bytes: u64) -> [u64; 5] {
    [0, 4095, size_bytes / 2, size_bytes.saturating_sub(5), size_bytes.saturating_add(1)]
}

async fn read_ends(snapshot: &Snapshot, file: &Item) -> Result<(), atoll_volume::owned::ReadError> {
    let size_bytes = file.entry.size_bytes();
    for offset in places(size_bytes) {
        let bytes = snapshot.read_range(file, offset, 64 << 10).await?;
        let expected = size_bytes.saturating_sub(offset).min(64 << 10);
        assert_eq!(bytes.len() as u64, expected, "a read of another length than the file's");
    }
    Ok(())
}

async fn mounted(fs: &VolumeFs) -> Result<(), Errno> {
    let mut outcome = Ok(());
    let mut note = |result: Result<(), Errno>| outcome = result.and(outcome);
    let mut queue = VecDeque::from([(InodeNumber::ROOT, FileKind::Directory)]);
    let mut seeks = 0;
    for _ in 0..ITEMS {
        let Some((inode, kind)) = queue.pop_front() else { break };
        note(fs.getattr(inode, None).await.map(drop));
        note(fs.listxattr(inode).await.map(drop));
        match kind {
            FileKind::Directory => note(readdir(fs, inode, &mut queue).await),
            FileKind::Symlink => note(fs.readlink(inode).await.map(drop)),
            _ => {
                seeks += 1;
                note(read(fs, inode, seeks <= SEEKS).await);
            }
        }
    }
    note(fs.statfs(InodeNumber::ROOT).await.map(drop));
    outcome
}

async fn readdir(
    fs: &VolumeFs,
    inode: InodeNumber,
    queue: &mut VecDeque<(InodeNumber, FileKind)>,
) -> Result<(), Errno> {
    let handle = fs.opendir(Caller::default(), inode).await?.handle;
    let mut cookie = 0;
    let mut outcome = Ok(());
    while queue.len() < ITEMS {
        let page = match fs.readdir(inode, handle, cookie, PAGE, true).await {
            Ok(page) => page,
            Err(errno) => {
                outcome = Err(errno);
                break;
            }
        };
        let Some(last) = page.last() else { break };
        assert!(last.cookie > cookie && page.len() <= PAGE, "a page brings nobody further");
        cookie = last.cookie;
        for found in &page {
            if let Err(errno) = fs.lookup(Caller::default(), inode, &found.name).await {
                outcome = Err(errno);
            }
        }
        queue.extend(page.iter().map(|found| (found.inode, found.kind)));
    }
    fs.closedir(inode, handle).await.and(outcome)
}

async fn read(fs: &VolumeFs, inode: InodeNumber, seek: bool) -> Result<(), Errno> {
    let size_bytes = fs.getattr(inode, None).await?.attr.size_bytes;
    let handle = fs.open(Caller::default(), inode, OpenFlags::READ).await?.handle;
    let mut outcome = Ok(());
    for offset in places(size_bytes) {
        outcome = fs.read(inode, handle, offset, 64 << 10).await.map(drop).and(outcome);
    }
    if seek {
        for to in [SeekTo::Data, SeekTo::Hole] {
            match fs.seek(inode, handle, 1, to).await {
                Ok(found) => assert!((1..=size_bytes).contains(&found), "a seek out of the file"),
                // Nothing but a hole follows, or nothing at all.
                Err(Errno::ENXIO) => {}
                Err(errno) => outcome = Err(errno),
            }
        }
    }
    fs.close(inode, handle).await.and(outcome)
}

/// Puts an input together; a block's number serves as its hash.
#[derive(Default)]
struct Builder {
    out: Vec<u8>,
    count: u32,
}

impl Builder {
    fn add(&mut self, block: &[u8]) -> BlockHash {
        self.out.extend_from_slice(&(block.len() as u32).to_be_bytes());
        self.out.extend_from_slice(block);
        let mut name = [0; 32];
        name[..28].copy_from_slice(&MARK);
        name[28..].copy_from_slice(&self.count.to_be_bytes());
        self.count += 1;
        BlockHash(name)
    }

    fn directory(&mut self, entries: Vec<DirectoryEntry>) -> DirectoryRef {
        let block = DirectoryBlock { level: 0, nodes: Nodes::Leaf(entries) };
        self.top(&block)
    }

    fn top(&mut self, block: &DirectoryBlock) -> DirectoryRef {
        let (entries, subdirectories) = block.counts();
        DirectoryRef { entries, subdirectories, hash: Some(self.add(&block.encode())) }
    }

    fn inode(&mut self, size_bytes: u64, data: Data) -> Option<BlockHash> {
        let shape = Shape::new(size_bytes, 12).expect("allowed");
        Some(self.add(&InodeBlock { shape, data }.encode()))
    }

    fn finish(mut self, directory: DirectoryRef) -> Vec<u8> {
        self.add(&root(directory).encode());
        self.out
    }
}

/// One of everything.
fn small() -> Vec<u8> {
    let mut builder = Builder::default();
    let inline = builder.inode(5, Data::Inline(attribute("12345")));
    let block = builder.add(&[1; 4096]);
    let tail = builder.add(&[2; 808]);
    let pointers = [block.0, [0; 32], tail.0].concat();
    let holes = builder.inode(9000, Data::Pointers(Bytes::from(pointers)));
    let attributes = xattrs::encode(&[(attribute("user.a"), attribute("1"))]).expect("few");
    let xattrs = Some(builder.add(&attributes));
    let below = builder.directory(vec![file("x", 5, inline), file("y", 9000, holes)]);
    let top = builder.directory(vec![
        entry("dir", Content::Directory(below)),
        file("empty", 0, None),
        DirectoryEntry { xattrs, ..file("inline", 5, inline) },
        entry("link", Content::Symlink(attribute("dir/x"))),
        entry("none", Content::Directory(DirectoryRef::default())),
    ]);
    builder.finish(top)
}

/// When the state of [`old`] was.
const OLD_UNIX_MS: u64 = 1_740_000_000_000;

/// An empty volume that has an old state.
fn old() -> Vec<u8> {
    let mut builder = Builder::default();
    let payload = Bytes::from(root(DirectoryRef::default()).encode());
    let size_bytes = payload.len() as u64;
    let inode = builder.inode(size_bytes, Data::Inline(payload));
    let history = builder.directory(vec![file(&format!("{OLD_UNIX_MS:020}"), size_bytes, inode)]);
    let mut present = root(DirectoryRef::default());
    present.mounted.history = history;
    builder.add(&present.encode());
    builder.out
}

/// A directory of three levels of blocks, and a file with an indirect block.
fn wide() -> Vec<u8> {
    let mut builder = Builder::default();
    let block = builder.add(&[3; 4096]);
    let indirect = builder.add(&PointerBlock::encode(1, &[Some(block); 300]));
    let inode = builder.inode(300 << 12, Data::Pointers(Bytes::copy_from_slice(&indirect.0)));
    let mut parents = Vec::new();
    for half in ["a", "b"] {
        let mut leaves = Vec::new();
        for third in ["a", "b", "c"] {
            let name = |end| format!("{half}{third}{end}");
            let entries = vec![file(&name("1"), 300 << 12, inode), file(&name("2"), 0, None)];
            let leaf = DirectoryBlock { level: 0, nodes: Nodes::Leaf(entries) };
            leaves.push(child(&mut builder, &leaf));
        }
        let above = DirectoryBlock { level: 1, nodes: Nodes::Interior(leaves) };
        parents.push(child(&mut builder, &above));
    }
    let top = DirectoryBlock { level: 2, nodes: Nodes::Interior(parents) };
    let top = builder.top(&top);
    builder.finish(top)
}

fn child(builder: &mut Builder, block: &DirectoryBlock) -> Child {
    let (entries, subdirectories) = block.counts();
    let first_name = block.first_name().clone();
    Child { hash: builder.add(&block.encode()), entries, subdirectories, first_name }
}

/// A hundred blocks that describe a tree of 2^100 directories.
fn deep() -> Vec<u8> {
    let mut builder = Builder::default();
    let mut below = DirectoryRef::default();
    for _ in 0..100 {
        let twice = ["l", "r"].map(|name| entry(name, Content::Directory(below)));
        below = builder.directory(twice.to_vec());
    }
    builder.finish(below)
}

/// Four blocks that describe a file of 4 TiB without a hole.
fn long() -> Vec<u8> {
    let mut builder = Builder::default();
    let mut pointer = builder.add(&[4; 4096]);
    for level in [1, 2] {
        pointer = builder.add(&PointerBlock::encode(level, &[Some(pointer); 2048]));
    }
    let size_bytes = 256 * 2048 * 2048 * 4096;
    let inode = builder.inode(size_bytes, Data::Pointers(Bytes::from(pointer.0.repeat(256))));
    let top = builder.directory(vec![file("long", size_bytes, inode)]);
    builder.finish(top)
}
