//! The same calls on a volume and on a file system in memory, with flushes, puts that fail, and
//! mounts that end or crash in between: what both answer and show is the same.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use atoll_dht::{Blocks, MemoryBlocks, NewBlock, OverMemory, PutError};
use atoll_env::BoxFuture;
use atoll_vfs::memory::MemoryFs;
use atoll_vfs::{
    Caller, Errno, FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, FALLOC_ZERO_RANGE, FileKind, FileSystem,
    Handle, InodeNumber, OpenFlags, RenameFlags, SeekTo, SetAttr, Writer, XattrFlags,
};
use atoll_volume::owned::{WritableFs, WriteOptions};
use bytes::Bytes;

use super::spool::{Crashing, MemorySpool};
use super::{created, env, mounted_with};

/// Blocks in memory whose puts can be made to fail.
struct Unsteady {
    blocks: MemoryBlocks,
    fails: AtomicBool,
    /// How long a put takes, milliseconds.
    put_ms: u64,
}

impl OverMemory for Unsteady {
    fn memory(&self) -> &MemoryBlocks {
        &self.blocks
    }

    fn put_blocks(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        let is_root = blocks.iter().any(|block| block.id.kind.is_mutable());
        let put_time = Duration::from_millis(self.put_ms);
        if self.fails.load(Ordering::Relaxed) && !is_root {
            let refused = vec![Err(PutError::Unavailable("a test".into())); blocks.len()];
            return Box::pin(async move {
                tokio::time::sleep(put_time).await;
                refused
            });
        }
        let put = self.blocks.put_blocks(blocks);
        Box::pin(async move {
            tokio::time::sleep(put_time).await;
            put.await
        })
    }
}

pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }
}

/// One call, by paths.
#[derive(Clone, Debug)]
pub(super) enum Call {
    Mkdir(Vec<u8>),
    Make(Vec<u8>, FileKind),
    Symlink(Vec<u8>),
    Link(Vec<u8>, Vec<u8>),
    Unlink(Vec<u8>),
    Rmdir(Vec<u8>),
    Rename(Vec<u8>, Vec<u8>, RenameFlags),
    Write(Vec<u8>, u64, usize, u8),
    Truncate(Vec<u8>, u64),
    Allocate(Vec<u8>, u64, u64, i32),
    Mode(Vec<u8>, u32),
    SetXattr(Vec<u8>, u8, XattrFlags),
    RemoveXattr(Vec<u8>, u8),
}

fn path(dice: &mut Dice) -> Vec<u8> {
    let depth = dice.below(3) as usize;
    let name = |dice: &mut Dice| vec![b'a' + dice.below(4) as u8];
    (0..=depth).map(|_| name(dice)).collect::<Vec<_>>().join(&b'/')
}

pub(super) fn call(dice: &mut Dice) -> Call {
    // Some offsets lie so far out that small blocks need indirect ones.
    let at = |dice: &mut Dice| {
        dice.below(5) * 65_536 / 2 + dice.below(300) + (dice.below(10) / 9) * 2_000_000
    };
    match dice.below(20) {
        0..=2 => Call::Mkdir(path(dice)),
        3 => Call::Make(path(dice), FileKind::Fifo),
        4 | 5 => Call::Make(path(dice), FileKind::Regular),
        6 => Call::Symlink(path(dice)),
        7 | 8 => Call::Link(path(dice), path(dice)),
        9 => Call::Unlink(path(dice)),
        10 => Call::Rmdir(path(dice)),
        11 | 12 => {
            let flags =
                RenameFlags { no_replace: dice.below(4) == 0, exchange: dice.below(4) == 0 };
            Call::Rename(path(dice), path(dice), flags)
        }
        13 | 14 => {
            let (at, len) = (at(dice), dice.below(150_000) as usize);
            Call::Write(path(dice), at, len, dice.below(256) as u8)
        }
        15 => Call::Truncate(path(dice), at(dice)),
        16 => {
            let modes = [0, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, FALLOC_ZERO_RANGE];
            let mode = modes[dice.below(3) as usize];
            Call::Allocate(path(dice), at(dice), 1 + dice.below(150_000), mode)
        }
        17 => Call::Mode(path(dice), dice.below(0o10000) as u32),
        18 => {
            let flags = XattrFlags { create: dice.below(3) == 0, replace: dice.below(3) == 0 };
            Call::SetXattr(path(dice), dice.below(3) as u8, flags)
        }
        _ => Call::RemoveXattr(path(dice), dice.below(3) as u8),
    }
}

async fn find(fs: &dyn FileSystem, path: &[u8]) -> Result<InodeNumber, Errno> {
    let mut at = InodeNumber::ROOT;
    for name in path.split(|byte| *byte == b'/') {
        at = fs.lookup(Caller::default(), at, name).await?.attr.inode;
    }
    Ok(at)
}

async fn place<'a>(fs: &dyn FileSystem, path: &'a [u8]) -> Result<(InodeNumber, &'a [u8]), Errno> {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(at) => Ok((find(fs, &path[..at]).await?, &path[at + 1..])),
        None => Ok((InodeNumber::ROOT, path)),
    }
}

pub(super) async fn opened<T>(
    fs: &dyn FileSystem,
    path: &[u8],
    work: impl AsyncFnOnce(InodeNumber, atoll_vfs::Handle) -> Result<T, Errno>,
) -> Result<T, Errno> {
    let inode = find(fs, path).await?;
    let handle = fs.open(Caller::default(), inode, OpenFlags::READ_WRITE).await?.handle;
    let done = work(inode, handle).await;
    fs.close(inode, handle).await?;
    done
}

pub(super) async fn make(fs: &dyn FileSystem, call: &Call) -> Result<(), Errno> {
    let me = Caller::default();
    match call {
        Call::Mkdir(path) => {
            let (parent, name) = place(fs, path).await?;
            fs.mkdir(me, parent, name, 0o755).await.map(drop)
        }
        Call::Make(path, kind) => {
            let (parent, name) = place(fs, path).await?;
            fs.mknod(me, parent, name, *kind, 0o644, 0).await.map(drop)
        }
        Call::Symlink(path) => {
            let (parent, name) = place(fs, path).await?;
            fs.symlink(me, parent, name, b"target").await.map(drop)
        }
        Call::Link(old, new) => {
            let inode = find(fs, old).await?;
            let (parent, name) = place(fs, new).await?;
            fs.link(me, inode, parent, name).await.map(drop)
        }
        Call::Unlink(path) => {
            let (parent, name) = place(fs, path).await?;
            fs.unlink(me, parent, name).await
        }
        Call::Rmdir(path) => {
            let (parent, name) = place(fs, path).await?;
            fs.rmdir(me, parent, name).await
        }
        Call::Rename(old, new, flags) => {
            let (parent, name) = place(fs, old).await?;
            let (new_parent, new_name) = place(fs, new).await?;
            fs.rename(me, parent, name, new_parent, new_name, *flags).await
        }
        Call::Write(path, offset, len, byte) => {
            let data = Bytes::from(vec![*byte; *len]);
            opened(fs, path, async |inode, handle| {
                fs.write(Writer::At(me), inode, handle, *offset, data).await.map(drop)
            })
            .await
        }
        Call::Truncate(path, size) => {
            let inode = find(fs, path).await?;
            let size_bytes = Some(*size);
            fs.setattr(me, inode, None, SetAttr { size_bytes, ..SetAttr::default() })
                .await
                .map(drop)
        }
        Call::Allocate(path, offset, len, mode) => {
            opened(fs, path, async |inode, handle| {
                fs.fallocate(me, inode, handle, *offset, *len, *mode).await
            })
            .await
        }
        Call::Mode(path, mode) => {
            let inode = find(fs, path).await?;
            let changes = SetAttr { mode: Some(*mode), uid: Some(*mode), ..SetAttr::default() };
            fs.setattr(me, inode, None, changes).await.map(drop)
        }
        Call::SetXattr(path, name, flags) => {
            let inode = find(fs, path).await?;
            let name = [b"user.".as_slice(), &[b'a' + name]].concat();
            fs.setxattr(me, inode, &name, Bytes::from_static(b"value"), *flags).await
        }
        Call::RemoveXattr(path, name) => {
            let inode = find(fs, path).await?;
            let name = [b"user.".as_slice(), &[b'a' + name]].concat();
            fs.removexattr(me, inode, &name).await
        }
    }
}

/// What a tree shows, by path: attributes, and contents.
pub(super) async fn shown(fs: &dyn FileSystem) -> BTreeMap<Vec<u8>, String> {
    let mut shown = BTreeMap::new();
    // Two names of one file are told by the first.
    let mut first_names: BTreeMap<InodeNumber, Vec<u8>> = BTreeMap::new();
    let mut waiting = vec![(Vec::new(), InodeNumber::ROOT)];
    while let Some((path, inode)) = waiting.pop() {
        let attr = fs.getattr(inode, None).await.expect("attributes").attr;
        let mut names = fs.listxattr(inode).await.expect("xattrs");
        names.sort();
        let first = first_names.entry(inode).or_insert_with(|| path.clone()).clone();
        let size = if attr.kind == FileKind::Directory { 0 } else { attr.size_bytes };
        let mut text = format!(
            "{:?} {:o} {} {} {size} {names:?} {:?}",
            attr.kind,
            attr.mode,
            attr.nlink,
            attr.uid,
            String::from_utf8_lossy(&first),
        );
        match attr.kind {
            FileKind::Directory => {
                let handle = fs.opendir(Caller::default(), inode).await.expect("opens").handle;
                let mut cookie = 0;
                let mut children = Vec::new();
                loop {
                    // Few at a time, so that cookies matter.
                    let page = fs.readdir(inode, handle, cookie, 2, true).await.expect("lists");
                    let Some(last) = page.last() else { break };
                    cookie = last.cookie;
                    children.extend(page);
                }
                fs.closedir(inode, handle).await.expect("closes");
                text += &format!(" {} entries", children.len());
                children.sort_by(|a, b| b.name.cmp(&a.name));
                for child in children {
                    let below = [&path[..], &child.name].join(&b'/');
                    waiting.push((below, child.entry.expect("attributes").attr.inode));
                }
            }
            FileKind::Regular => {
                let open = fs.open(Caller::default(), inode, OpenFlags::READ).await.expect("opens");
                let all = fs.read(inode, open.handle, 0, 4 << 20).await.expect("reads");
                let data = fs.seek(inode, open.handle, 0, SeekTo::Data).await;
                assert!(
                    data.is_err()
                        || data.is_ok_and(|at| all[..at as usize].iter().all(|b| *b == 0))
                );
                text += &format!(" {:?}", atoll_key::BlockHash::of(&all));
                fs.close(inode, open.handle).await.expect("closes");
            }
            _ => {}
        }
        shown.insert(path, text);
    }
    shown
}

async fn compare(model: &MemoryFs, fs: &WritableFs, seed: u64, step: usize) {
    let (expected, found) = (shown(model).await, shown(fs).await);
    for (path, text) in &expected {
        let path_text = String::from_utf8_lossy(path);
        assert_eq!(Some(text), found.get(path), "seed {seed}, step {step}, {path_text}");
    }
    assert_eq!(expected.len(), found.len(), "seed {seed}, step {step}");
    fs.check_invariants();
}

/// A file that is open in both, perhaps without a name by now.
struct Kept {
    model: (InodeNumber, Handle),
    found: (InodeNumber, Handle),
}

impl Kept {
    async fn open(model: &MemoryFs, fs: &WritableFs, path: &[u8]) -> Option<Kept> {
        let open = async |fs: &dyn FileSystem| {
            let inode = find(fs, path).await?;
            let handle = fs.open(Caller::default(), inode, OpenFlags::READ_WRITE).await?.handle;
            Ok::<_, Errno>((inode, handle))
        };
        let (model, found) = (open(model).await, open(fs).await);
        assert_eq!(model.is_ok(), found.is_ok());
        Some(Kept { model: model.ok()?, found: found.ok()? })
    }

    /// One call by the handle, and what is read after it.
    async fn call(fs: &dyn FileSystem, file: (InodeNumber, Handle), dice: &mut Dice) -> String {
        let (inode, handle) = file;
        let me = Caller::default();
        let at = dice.below(6) * 20_000 + dice.below(300);
        let len = 1 + dice.below(50_000);
        let byte = dice.below(256) as u8;
        let outcome = match dice.below(4) {
            0 => {
                let size_bytes = Some(at * dice.below(2));
                let changes = SetAttr { size_bytes, ..SetAttr::default() };
                fs.setattr(me, inode, Some(handle), changes).await.map(drop)
            }
            1 => {
                let mode = FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE;
                fs.fallocate(me, inode, handle, at, len, mode).await
            }
            _ => {
                let data = Bytes::from(vec![byte; len as usize]);
                fs.write(Writer::At(me), inode, handle, at, data).await.map(drop)
            }
        };
        let all = fs.read(inode, handle, 0, 4 << 20).await.expect("reads");
        let nlink = fs.getattr(inode, Some(handle)).await.expect("is there").attr.nlink;
        format!("{outcome:?} {nlink} {} {:?}", all.len(), atoll_key::BlockHash::of(&all))
    }
}

/// Everything until now is in the spool, as after the close of a file that was written.
async fn close_a_file(model: &MemoryFs, fs: &WritableFs) {
    for fs in [model as &dyn FileSystem, fs] {
        let made = fs.mknod(Caller::default(), InodeNumber::ROOT, b"x", FileKind::Regular, 0, 0);
        assert!(matches!(made.await.map(drop), Ok(()) | Err(Errno::EEXIST)));
    }
    opened(fs, b"x", async |inode, handle| fs.flush(inode, handle).await).await.expect("closes");
}

async fn run(seed: u64, steps: usize, block_size_log2: u8) {
    let mut dice = Dice(seed);
    let spool = MemorySpool::default();
    let has_spool = !seed.is_multiple_of(5);
    let put_ms = [0, 3, 20][(seed / 2 % 3) as usize];
    let (blocks, fails) = (MemoryBlocks::new(), AtomicBool::new(false));
    let ring = Arc::new(Unsteady { blocks, fails, put_ms });
    let blocks: Arc<dyn Blocks> = ring.clone();
    created(&blocks, None, block_size_log2).await;
    let open = async || {
        let machine = Arc::new(Crashing::new(&ring, &spool));
        let blocks: Arc<dyn Blocks> = machine.clone();
        // Little memory, so that changes are swapped out.
        let mut options = WriteOptions::default();
        if seed % 4 < 2 {
            // What is released too early is missed.
            options.cache_bytes = 1 << 14;
        }
        if has_spool {
            options.max_changed_bytes = 1 << (18 + seed % 3);
        }
        let spool = has_spool.then(|| machine.spool.clone());
        (mounted_with(&blocks, options, spool).await.expect("mounts"), machine)
    };
    let (mut fs, mut machine) = open().await;
    let model = MemoryFs::new(env());
    let mut kept: Vec<Kept> = Vec::new();
    let mut gone = 0;
    for step in 0..steps {
        gone += ring.blocks.lose_released();
        match dice.below(48) {
            0 | 1 => {
                let flushed = fs.sync().await;
                assert!(flushed.is_ok() || ring.fails.load(Ordering::Relaxed), "seed {seed}");
            }
            2 => ring.fails.store(dice.below(2) == 0, Ordering::Relaxed),
            3 => compare(&model, &fs, seed, step).await,
            4 => {
                ring.fails.store(false, Ordering::Relaxed);
                compare(&model, &fs, seed, step).await;
                for Kept { model: held, found } in kept.drain(..) {
                    model.close(held.0, held.1).await.expect("closes");
                    fs.close(found.0, found.1).await.expect("closes");
                }
                fs.end().await.expect("ends");
                (fs, machine) = open().await;
                compare(&model, &fs, seed, step).await;
            }
            15 | 16 if has_spool => {
                close_a_file(&model, &fs).await;
                machine.crash(dice.below(100));
                for Kept { model: held, .. } in kept.drain(..) {
                    model.close(held.0, held.1).await.expect("closes");
                }
                (fs, machine) = open().await;
                assert_eq!(fs.set_aside(), None, "seed {seed}, step {step}");
                compare(&model, &fs, seed, step).await;
            }
            // A flush that others do not wait for.
            5 => drop(futures_util::FutureExt::now_or_never(fs.sync())),
            6 => tokio::task::yield_now().await,
            7 => tokio::time::sleep(Duration::from_millis(dice.below(12))).await,
            // Long enough for blocks to be released.
            8 => tokio::time::sleep(Duration::from_secs(dice.below(40))).await,
            9 | 10 if kept.len() < 3 => {
                kept.extend(Kept::open(&model, &fs, &path(&mut dice)).await);
            }
            9..=13 if !kept.is_empty() => {
                let file = &kept[dice.below(kept.len() as u64) as usize];
                let mut same = Dice(dice.0);
                let expected = Kept::call(&model, file.model, &mut dice).await;
                let found = Kept::call(&fs, file.found, &mut same).await;
                assert_eq!(expected, found, "seed {seed}, step {step}: an open file");
            }
            14 if !kept.is_empty() => {
                let Kept { model: held, found } = kept.swap_remove(0);
                model.close(held.0, held.1).await.expect("closes");
                fs.close(found.0, found.1).await.expect("closes");
            }
            _ => {
                let call = call(&mut dice);
                let (expected, found) = (make(&model, &call).await, make(&fs, &call).await);
                assert_eq!(expected, found, "seed {seed}, step {step}: {call:?}");
            }
        }
    }
    compare(&model, &fs, seed, steps).await;
    assert!(gone > 0, "seed {seed}: nothing was released");
    if !has_spool {
        return;
    }
    // A crash between two closes leaves the tree as it was at some moment between them.
    close_a_file(&model, &fs).await;
    let mut moments = vec![shown(&model).await];
    for _ in 0..8 {
        let call = call(&mut dice);
        let (expected, found) = (make(&model, &call).await, make(&fs, &call).await);
        assert_eq!(expected, found, "seed {seed}: {call:?}");
        moments.push(shown(&model).await);
        tokio::time::sleep(Duration::from_millis(dice.below(12))).await;
    }
    machine.crash(dice.below(100));
    let found = shown(&open().await.0).await;
    assert!(moments.contains(&found), "seed {seed}");
}

#[tokio::test(start_paused = true)]
async fn it_answers_as_a_file_system_in_memory_does() {
    for seed in 1..=60 {
        run(seed, 400, if seed % 2 == 0 { 16 } else { 12 }).await;
    }
}
