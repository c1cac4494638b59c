//! One file's bytes compared with a vector, over writes of pages, cuts, holes, flushes, and blocks that
//! cannot be read; the node goes away and comes back at any call, and the mount and its machine crash.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_dht::{
    Blocks, GetError, HeldBlock, MemoryBlocks, NewBlock, OverMemory, PutError, Wanted,
};
use atoll_env::BoxFuture;
use atoll_key::{BlockHash, BlockId, ReadKey};
use atoll_vfs::{
    Caller, Errno, FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, FALLOC_ZERO_RANGE, FileKind, FileSystem,
    Handle, InodeNumber, OpenFlags, SeekTo, SetAttr, Writer,
};
use atoll_volume::owned::{Volume, VolumeOptions, WritableFs, WriteOptions};
use bytes::Bytes;

use super::model::Dice;
use super::spool::{Crashing, MemorySpool, save};
use super::{created, env, mounted_with, secret, tree_of};

/// The longest file, and the most bytes of one write.
const MOST_BYTES: u64 = 1_200_000;
const MOST_WRITTEN: u64 = 200_000;

const PAGE: u64 = 4096;

/// What is wrong with the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trouble {
    None,
    /// It cannot be reached.
    Away,
    /// Some blocks are not found for now.
    Losses,
    /// Some puts are not answered, whether they were done or not.
    Silence,
    /// No block is found.
    Lost,
}

/// Blocks in memory behind a node with troubles, which change at any call.
struct Node {
    blocks: MemoryBlocks,
    dice: Mutex<Dice>,
    trouble: Mutex<Trouble>,
    changes: AtomicBool,
}

impl Node {
    fn heal(&self) {
        self.changes.store(false, Ordering::Relaxed);
        *self.trouble.lock().expect("unpoisoned") = Trouble::None;
    }

    /// What is wrong during a call; whether it happens to this call; how long the call takes.
    fn draw(&self) -> (Trouble, bool, Duration) {
        let mut dice = self.dice.lock().expect("unpoisoned");
        let mut trouble = self.trouble.lock().expect("unpoisoned");
        if self.changes.load(Ordering::Relaxed) && dice.below(12) == 0 {
            const ALL: [Trouble; 5] =
                [Trouble::None, Trouble::Away, Trouble::Losses, Trouble::Silence, Trouble::Lost];
            *trouble = ALL[dice.below(5) as usize];
        }
        let takes = Duration::from_millis(dice.below(4));
        let is_sure = matches!(*trouble, Trouble::Away | Trouble::Lost);
        (*trouble, is_sure || dice.below(3) == 0, takes)
    }
}

impl OverMemory for Node {
    fn memory(&self) -> &MemoryBlocks {
        &self.blocks
    }

    fn get_block(
        &self,
        id: BlockId,
        wanted: Wanted,
    ) -> BoxFuture<'static, Result<HeldBlock, GetError>> {
        let (trouble, happens, takes) = self.draw();
        let (key, told) = (id.key, "a test".to_owned());
        let found = match trouble {
            Trouble::Away => Err(GetError::Unavailable { key, told }),
            Trouble::Losses | Trouble::Lost if happens => Err(GetError::NotFound { key, told }),
            _ => Ok(self.blocks.get_block(id, wanted)),
        };
        Box::pin(async move {
            tokio::time::sleep(takes).await;
            found?.await
        })
    }

    fn put_blocks(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        let (trouble, happens, takes) = self.draw();
        let count = blocks.len();
        let is_lost = matches!(trouble, Trouble::Away | Trouble::Silence) && happens;
        let is_done = !is_lost || trouble == Trouble::Silence && takes.as_millis() % 2 == 0;
        let put = is_done.then(|| self.blocks.put_blocks(blocks));
        Box::pin(async move {
            tokio::time::sleep(takes).await;
            let done = match put {
                Some(put) => put.await,
                None => Vec::new(),
            };
            match is_lost {
                true => vec![Err(PutError::Unavailable("a test".into())); count],
                false => done,
            }
        })
    }
}

struct Open {
    fs: WritableFs,
    machine: Arc<Crashing<Node>>,
    inode: InodeNumber,
    handle: Handle,
}

struct Story {
    seed: u64,
    step: usize,
    dice: Dice,
    node: Arc<Node>,
    spool: Option<MemorySpool>,
    options: WriteOptions,
    /// What the file holds.
    model: Vec<u8>,
    /// What it held since the moment that every crash leaves behind it.
    moments: BTreeSet<BlockHash>,
    open: Option<Open>,
}

impl Story {
    async fn new(seed: u64) -> Story {
        let node = Arc::new(Node {
            blocks: MemoryBlocks::new(),
            dice: Mutex::new(Dice(seed ^ 0x5eed)),
            trouble: Mutex::new(Trouble::None),
            changes: AtomicBool::new(false),
        });
        let read_key = (seed % 4 == 1).then(|| ReadKey::from_bytes([3; 32]));
        let blocks: Arc<dyn Blocks> = node.clone();
        let block_size_log2 = [16, 14, 17, 16, 12, 18][(seed % 6) as usize];
        created(&blocks, read_key.as_ref(), block_size_log2).await;
        // Little memory, so that changes are swapped out and blocks are read again.
        let options = WriteOptions {
            read_key,
            cache_bytes: 1 << 18,
            max_changed_bytes: 1 << (17 + seed % 4),
            ..WriteOptions::default()
        };
        let spool = (!seed.is_multiple_of(5)).then(MemorySpool::default);
        let mut story = Story {
            seed,
            step: 0,
            dice: Dice(seed),
            node,
            spool,
            options,
            model: Vec::new(),
            moments: BTreeSet::new(),
            open: None,
        };
        story.mount().await;
        story
    }

    fn file(&self) -> &Open {
        self.open.as_ref().expect("it is open between two steps")
    }

    fn told(&self) -> String {
        format!("seed {}, step {}", self.seed, self.step)
    }

    /// Mounts, and opens the file. While the node has troubles, that may fail.
    async fn mount(&mut self) {
        loop {
            let disk = self.spool.clone().unwrap_or_default();
            let machine = Arc::new(Crashing::new(&self.node, &disk));
            let blocks: Arc<dyn Blocks> = machine.clone();
            // Without a spool nobody tells that the former mount is gone.
            let options = WriteOptions { take_over: self.spool.is_none(), ..self.options.clone() };
            let spool = self.spool.as_ref().map(|_| machine.spool.clone());
            match mounted_with(&blocks, options, spool).await {
                Ok(fs) => {
                    assert_eq!(fs.set_aside(), None, "{}", self.told());
                    if let Ok((inode, handle)) = opened(&fs).await {
                        self.open = Some(Open { fs, machine, inode, handle });
                        return;
                    }
                }
                Err(error) => assert!(self.has_trouble(), "{}: {error}", self.told()),
            }
            machine.kill();
            self.node.heal();
        }
    }

    fn has_trouble(&self) -> bool {
        self.node.changes.load(Ordering::Relaxed)
            || *self.node.trouble.lock().expect("unpoisoned") != Trouble::None
    }

    /// What the mount shows, or what is in the way.
    async fn read(&self, offset: u64, len: u64) -> Result<Bytes, Errno> {
        let Open { fs, inode, handle, .. } = self.file();
        fs.read(*inode, *handle, offset, len as u32).await
    }

    async fn compare(&self, offset: u64, len: u64) {
        let found = self.read(offset, len).await;
        let size = self.model.len() as u64;
        let expected = offset.min(size) as usize..offset.saturating_add(len).min(size) as usize;
        match found {
            Ok(found) => self.same(&found, &self.model[expected], offset),
            Err(error) => assert!(self.has_trouble(), "{}: {error:?}", self.told()),
        }
    }

    fn same(&self, found: &[u8], expected: &[u8], offset: u64) {
        if found != expected {
            let at = found.iter().zip(expected).position(|(a, b)| a != b);
            let (found, expected) = (found.len(), expected.len());
            panic!("{}: {found} of {expected} bytes at {offset} differ at {at:?}", self.told());
        }
    }

    async fn compare_all(&self) {
        self.compare(0, 4 << 20).await;
        let Open { fs, inode, handle, .. } = self.file();
        let attr = fs.getattr(*inode, Some(*handle)).await.expect("is there").attr;
        assert_eq!(attr.size_bytes, self.model.len() as u64, "{}", self.told());
        fs.check_invariants();
        let most = 2 * self.options.max_changed_bytes + MOST_WRITTEN + (2 << 18);
        assert!(fs.held_bytes() <= most, "{}: {} bytes held", self.told(), fs.held_bytes());
    }

    /// What the ring has is what the file holds.
    async fn compare_stored(&self) {
        let blocks: Arc<dyn Blocks> = Arc::new(self.node.blocks.clone());
        let read_key = self.options.read_key.clone();
        let options = VolumeOptions { read_key, ..VolumeOptions::default() };
        let volume = Volume::open(env(), blocks, secret().volume_id(), options).await;
        let snapshot = volume.expect("opens").snapshot().await;
        let file = snapshot.resolve(b"f").await.expect("is there");
        let found = snapshot.read_range(&file, 0, 4 << 20).await.expect("reads");
        self.same(&found, &self.model, 0);
    }

    fn changed(&mut self) {
        self.moments.insert(BlockHash::of(&self.model));
    }

    /// What is now survives every crash.
    fn kept(&mut self) {
        self.moments.clear();
        self.changed();
    }

    fn offset(&mut self) -> u64 {
        let size = self.model.len() as u64;
        match self.dice.below(8) {
            0 => self.dice.below(MOST_BYTES),
            1 => size,
            2 => self.dice.below(size + 1),
            // Near the end of a block.
            3 => ((1 + self.dice.below(MOST_BYTES >> 16)) << 16) - self.dice.below(3 * PAGE),
            _ => self.dice.below(size / PAGE + 1) * PAGE,
        }
    }

    fn len(&mut self) -> u64 {
        match self.dice.below(8) {
            0 => 1 + self.dice.below(100),
            1 => 1 + self.dice.below(3 * PAGE),
            2 => 1 + self.dice.below(MOST_WRITTEN),
            3 => 1 << 16,
            _ => (1 + self.dice.below(3)) * PAGE,
        }
    }

    /// A change that fails has changed nothing.
    fn outcome<T>(&mut self, done: Result<T, Errno>, change: impl FnOnce(&mut Vec<u8>)) {
        match done {
            Ok(_) => {
                change(&mut self.model);
                self.changed();
            }
            Err(error) => assert!(self.has_trouble(), "{}: {error:?}", self.told()),
        }
    }

    async fn write(&mut self) {
        let (offset, len) = (self.offset(), self.len());
        let mut data = Vec::new();
        while (data.len() as u64) < len {
            data.extend(self.dice.below(u64::MAX).to_be_bytes());
        }
        data.truncate(len as usize);
        self.write_at(offset, data).await;
    }

    async fn write_at(&mut self, offset: u64, data: Vec<u8>) {
        let Open { fs, inode, handle, .. } = self.file();
        let (me, bytes) = (Writer::At(Caller::default()), Bytes::from(data.clone()));
        let done = fs.write(me, *inode, *handle, offset, bytes).await;
        self.outcome(done, |model| {
            let (start, end) = (offset as usize, offset as usize + data.len());
            model.resize(model.len().max(end), 0);
            model[start..end].copy_from_slice(&data);
        });
    }

    async fn resize(&mut self) {
        let size = self.offset();
        self.resize_to(size).await;
    }

    async fn resize_to(&mut self, size: u64) {
        let Open { fs, inode, handle, .. } = self.file();
        let changes = SetAttr { size_bytes: Some(size), ..SetAttr::default() };
        let done = fs.setattr(Caller::default(), *inode, Some(*handle), changes).await;
        self.outcome(done, |model| model.resize(size as usize, 0));
    }

    async fn punch(&mut self) {
        let (offset, len) = (self.offset(), self.len());
        let mode = [FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, FALLOC_ZERO_RANGE];
        let mode = mode[self.dice.below(2) as usize];
        let Open { fs, inode, handle, .. } = self.file();
        let done = fs.fallocate(Caller::default(), *inode, *handle, offset, len, mode).await;
        self.outcome(done, |model| {
            if mode == FALLOC_ZERO_RANGE {
                model.resize(model.len().max((offset + len) as usize), 0);
            }
            let size = model.len() as u64;
            model[offset.min(size) as usize..(offset + len).min(size) as usize].fill(0);
        });
    }

    /// Before the data that is found, and at a hole, there are zeros.
    async fn seek(&mut self) {
        let size = self.model.len() as u64;
        let offset = self.dice.below(size + 1);
        let Open { fs, inode, handle, .. } = self.file();
        let data = fs.seek(*inode, *handle, offset, SeekTo::Data).await;
        let hole = fs.seek(*inode, *handle, offset, SeekTo::Hole).await;
        let before = match data {
            Ok(at) => &self.model[offset as usize..at as usize],
            Err(Errno::ENXIO) => &self.model[offset as usize..],
            Err(_) => return assert!(self.has_trouble(), "{}: {data:?}", self.told()),
        };
        assert!(before.iter().all(|byte| *byte == 0), "{}: data before {data:?}", self.told());
        match hole {
            Ok(at) if at < size => assert_eq!(self.model[at as usize], 0, "{}", self.told()),
            Ok(_) | Err(Errno::ENXIO) => {}
            Err(_) => assert!(self.has_trouble(), "{}: {hole:?}", self.told()),
        }
    }

    async fn sync(&mut self) {
        let Open { fs, inode, handle, .. } = self.file();
        match fs.fsync(*inode, *handle, false).await {
            Ok(()) => {
                self.kept();
                self.compare_stored().await;
            }
            Err(error) => assert!(self.has_trouble(), "{}: {error:?}", self.told()),
        }
    }

    async fn close(&mut self) {
        let Open { fs, inode, handle, .. } = self.file();
        match fs.flush(*inode, *handle).await {
            Ok(()) if self.spool.is_some() => self.kept(),
            Ok(()) => {}
            Err(error) => assert!(self.has_trouble(), "{}: {error:?}", self.told()),
        }
    }

    /// The mount goes and comes back. What is there was there since the last moment that is kept.
    async fn crash(&mut self) {
        let Open { fs, machine, .. } = self.open.take().expect("it is open");
        match self.dice.below(4) {
            0 => {
                self.node.heal();
                let ended = fs.end().await;
                assert!(ended.is_ok(), "{}: {ended:?}", self.told());
                self.moments.clear();
                self.changed();
                self.mount().await;
                self.compare_all().await;
                return;
            }
            1 => machine.kill(),
            _ => machine.crash(self.dice.below(100)),
        }
        drop(fs);
        // What was on its way to the ring gets there.
        tokio::time::sleep(Duration::from_millis(10)).await;
        self.mount().await;
        let found = loop {
            match self.read(0, 4 << 20).await {
                Ok(found) => break found.to_vec(),
                Err(error) => assert!(self.has_trouble(), "{}: {error:?}", self.told()),
            }
            self.node.heal();
        };
        let was_there = self.moments.contains(&BlockHash::of(&found));
        assert!(was_there, "{}: bytes that never were", self.told());
        self.model = found;
        self.kept();
        self.compare_all().await;
    }

    async fn tell(&mut self, steps: usize) {
        for step in 0..steps {
            self.step = step;
            match self.dice.below(100) {
                0..=2 => self.sync().await,
                3 | 4 => {
                    let _ = futures_util::FutureExt::now_or_never(self.file().fs.sync());
                }
                5..=9 => tokio::time::sleep(Duration::from_millis(self.dice.below(30))).await,
                10 => tokio::time::sleep(Duration::from_secs(self.dice.below(12))).await,
                11..=13 => self.close().await,
                14 => self.crash().await,
                15 | 16 => self.node.changes.store(true, Ordering::Relaxed),
                17..=19 => self.node.heal(),
                20..=26 => self.resize().await,
                27..=31 => self.punch().await,
                32..=34 => self.seek().await,
                35..=49 => {
                    let (offset, len) = (self.offset(), self.len());
                    self.compare(offset, len).await;
                }
                50..=53 => self.compare_all().await,
                _ => self.write().await,
            }
        }
        self.node.heal();
        self.compare_all().await;
        self.sync().await;
        self.compare_all().await;
        self.crash().await;
    }
}

/// The file, made if it is not there.
async fn opened(fs: &WritableFs) -> Result<(InodeNumber, Handle), Errno> {
    let me = Caller::default();
    match fs.mknod(me, InodeNumber::ROOT, b"f", FileKind::Regular, 0o644, 0).await {
        Ok(_) => fs.sync().await?,
        Err(Errno::EEXIST) => {}
        Err(error) => return Err(error),
    }
    let inode = fs.lookup(me, InodeNumber::ROOT, b"f").await?.attr.inode;
    let handle = fs.open(me, inode, OpenFlags::READ_WRITE).await?.handle;
    Ok((inode, handle))
}

#[tokio::test(start_paused = true)]
async fn a_file_holds_what_was_written() {
    for seed in 1..=36 {
        let mut story = Story::new(seed).await;
        story.kept();
        story.tell(400).await;
    }
}

impl Story {
    /// A file of a few blocks, of a mount that knows its length and has none of its blocks in memory.
    async fn of_unread_blocks() -> Story {
        let mut story = Story::new(3).await;
        let data: Vec<u8> = (0..300_000_u32).map(|at| (at / 7) as u8).collect();
        story.write_at(0, data).await;
        story.sync().await;
        story.file().fs.end().await.expect("ends");
        story.mount().await;
        let Open { fs, inode, handle, .. } = story.file();
        fs.seek(*inode, *handle, 0, SeekTo::Data).await.expect("there is data");
        story
    }

    fn suffer(&self, trouble: Trouble) {
        *self.node.trouble.lock().expect("unpoisoned") = trouble;
    }

    async fn fsync(&self) -> Result<(), Errno> {
        let Open { fs, inode, handle, .. } = self.file();
        fs.fsync(*inode, *handle, false).await
    }

    async fn status(&self) -> String {
        let status = self.file().fs.getxattr(InodeNumber::ROOT, b"user.atoll.status").await;
        String::from_utf8(status.expect("is told").to_vec()).expect("is text")
    }
}

/// Each page that was written made a block of 64 KiB dirty, which had to be read first: random writes
/// of 4 KiB filled the memory sixteen times as fast as they should.
#[tokio::test(start_paused = true)]
async fn a_page_is_held_without_the_rest_of_its_block() {
    let mut story = Story::of_unread_blocks().await;
    story.suffer(Trouble::Away);
    let page = 2 * (1 << 16) + 2 * PAGE;
    story.write_at(page, vec![1; PAGE as usize]).await;
    assert!(story.file().fs.held_bytes() < 2 * PAGE);
    story.compare(page, PAGE).await;
    assert_eq!(story.read(page + PAGE, 1).await, Err(Errno::ETIMEDOUT));
    assert_eq!(story.fsync().await, Err(Errno::ETIMEDOUT));
    let status = story.status().await;
    assert!(status.contains("/f: "), "{status}");
    // What was cut off does not come back.
    story.resize_to(page + 100).await;
    story.resize_to(page + 5 * PAGE).await;
    let grown = story.read(page, 3 * PAGE).await.expect("is in memory");
    story.same(&grown, &[vec![1; 100], vec![0; 3 * PAGE as usize - 100]].concat(), page);
    story.node.heal();
    story.compare_all().await;
    story.sync().await;
    assert_eq!(story.file().fs.held_bytes(), 0);
    story.compare_all().await;
}

/// A block that pages were written over and that is on the ring no more is not zeros. It failed each flush of the mount.
#[tokio::test(start_paused = true)]
async fn a_lost_block_below_a_page_leaves_its_file_out_until_it_is_overwritten() {
    for is_overwritten in [true, false] {
        let mut story = Story::of_unread_blocks().await;
        story.suffer(Trouble::Lost);
        let (before, block) = (story.model.clone(), 2 * (1 << 16));
        story.write_at(block + PAGE, vec![1; PAGE as usize]).await;
        for name in ["one", "two"] {
            assert_eq!(story.fsync().await, Err(Errno::EIO));
            let status = story.status().await;
            assert!(status.contains("/f: ") && status.contains("nowhere"), "{status}");
            assert!(status.contains("Save the file as a whole"), "{status}");
            save(&story.file().fs, name, name.as_bytes()).await.expect("closes");
            let fs = &story.file().fs;
            let found = fs.lookup(Caller::default(), InodeNumber::ROOT, name.as_bytes()).await;
            let inode = found.expect("is there").attr.inode;
            let open = fs.open(Caller::default(), inode, OpenFlags::READ_WRITE).await;
            assert_eq!(fs.fsync(inode, open.expect("opens").handle, false).await, Ok(()));
        }
        let written = std::mem::replace(&mut story.model, before);
        story.compare_stored().await;
        story.model = written;
        if is_overwritten {
            // Nothing of the lost block is needed any more.
            story.write_at(block, vec![2; PAGE as usize]).await;
            story.write_at(block + 2 * PAGE, vec![3; 14 * PAGE as usize]).await;
        } else {
            // What was written waits in the spool.
            story.write_at(block + 9 * PAGE, vec![4; 100]).await;
            story.file().fs.end().await.expect_err("not all is on the ring");
            story.node.heal();
            story.mount().await;
        }
        story.sync().await;
        story.node.heal();
        story.compare_all().await;
        story.compare_stored().await;
        let tree = tree_of(&story.node.blocks).await;
        assert_eq!(tree.get(&b"two"[..]), Some(&b"two".to_vec()));
    }
}
