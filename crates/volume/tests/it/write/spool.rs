//! What the ring does not have yet survives crashes.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_dht::{
    Blocks, GetError, HeldBlock, MemoryBlocks, NewBlock, OverMemory, PutError, Wanted,
};
use atoll_env::{BoxFuture, Env};
use atoll_key::kinds::Release;
use atoll_key::{BlockId, ReadKey, SignedBlock};
use atoll_vfs::{
    Caller, Errno, FileSystem, InodeNumber, OpenFlags, SetAttr, SetTime, Writer, XattrFlags,
};
use atoll_volume::SpoolDirectory;
use atoll_volume::owned::{WritableFs, WriteError, WriteOptions, sealed_root};
use bytes::Bytes;

use super::{created, env, mounted, mounted_with, secret};

/// A file: what is durable, and what follows it.
type File = (Vec<u8>, Vec<u8>);

/// A directory in memory.
#[derive(Clone, Default)]
pub(crate) struct MemorySpool {
    files: Arc<Mutex<BTreeMap<String, File>>>,
    pub(crate) fails: Arc<AtomicBool>,
    /// Nothing more can be written to it.
    pub(crate) is_full: Arc<AtomicBool>,
    /// Reads of the swap file.
    swap_ins: Arc<AtomicU64>,
    /// Files that lie on bad blocks.
    unreadable: Arc<Mutex<BTreeSet<String>>>,
}

impl MemorySpool {
    /// What a crash leaves: of what is not durable, a part, and perhaps with a wrong end.
    pub(crate) fn crash(&self, percent: u64) {
        self.files.lock().expect("unpoisoned").retain(|name, (durable, rest)| {
            rest.truncate(rest.len() * percent as usize / 100);
            if percent.is_multiple_of(3)
                && let Some(last) = rest.last_mut()
            {
                *last ^= 1;
            }
            durable.append(rest);
            // Its name may not be durable either.
            !durable.is_empty() || percent.is_multiple_of(2) || !name.ends_with(".records")
        });
    }

    pub(crate) fn all(&self) -> Vec<u8> {
        let files = self.files.lock().expect("unpoisoned");
        files.values().flat_map(|(durable, rest)| [&durable[..], rest].concat()).collect()
    }

    /// Removes a directory, if it is there.
    pub(super) fn discard(&self, directory: &str) -> bool {
        let mut files = self.files.lock().expect("unpoisoned");
        let before = files.len();
        files.retain(|name, _| !name.starts_with(&format!("{directory}/")));
        files.len() < before
    }

    /// Another directory with the same files.
    pub(super) fn copied(&self) -> MemorySpool {
        let mut files = self.files.lock().expect("unpoisoned").clone();
        files.remove("swap");
        MemorySpool { files: Arc::new(Mutex::new(files)), ..MemorySpool::default() }
    }

    /// Changes one bit of a file.
    pub(crate) fn flip(&self, name: &str, at: usize) {
        let mut files = self.files.lock().expect("unpoisoned");
        let (durable, rest) = files.get_mut(name).expect("is there");
        let byte = durable.iter_mut().chain(rest).nth(at);
        *byte.expect("the file is that long") ^= 1;
    }

    fn len_of(&self, name: &str) -> usize {
        let files = self.files.lock().expect("unpoisoned");
        let (durable, rest) = &files[name];
        durable.len() + rest.len()
    }

    /// This directory as one process sees it.
    pub(crate) fn used_by(&self, env: &Env) -> (Arc<dyn SpoolDirectory>, Arc<Life>) {
        let has_crashed = AtomicBool::new(false);
        let life = Arc::new(Life { has_crashed, left: AtomicU64::new(u64::MAX) });
        let disk = Disk { env: env.clone(), spool: self.clone(), life: life.clone() };
        (Arc::new(disk), life)
    }

    /// The names of all files.
    pub(crate) fn names(&self) -> Vec<String> {
        self.files.lock().expect("unpoisoned").keys().cloned().collect()
    }

    pub(super) fn records(&self) -> Vec<String> {
        let files = self.files.lock().expect("unpoisoned");
        files.keys().filter(|name| name.ends_with(".records")).cloned().collect()
    }

    /// The directory of this name in it.
    pub(super) fn below(&self, directory: &str) -> MemorySpool {
        let below = MemorySpool::default();
        for (name, file) in &*self.files.lock().expect("unpoisoned") {
            if let Some(name) = name.strip_prefix(&format!("{directory}/")) {
                below.files.lock().expect("unpoisoned").insert(name.into(), file.clone());
            }
        }
        MemorySpool { unreadable: self.unreadable.clone(), ..below }
    }
}

/// What one mount sees of the ring and of its disk: nothing more after a crash.
pub(super) struct Crashing<T> {
    blocks: Arc<T>,
    memory: MemoryBlocks,
    pub(super) spool: Arc<dyn SpoolDirectory>,
    disk: MemorySpool,
    life: Arc<Life>,
}

struct Disk {
    env: Env,
    spool: MemorySpool,
    life: Arc<Life>,
}

/// How much longer a machine works.
pub(crate) struct Life {
    has_crashed: AtomicBool,
    /// So many puts and calls of the disk are done yet.
    left: AtomicU64,
}

impl Life {
    /// The process ends after so many more calls.
    pub(crate) fn ends_after(&self, calls: u64) {
        self.left.store(calls, Ordering::Relaxed);
    }

    /// Whether something is done.
    fn spend(&self) -> bool {
        let left = self.left.load(Ordering::Relaxed);
        if left == 0 {
            self.has_crashed.store(true, Ordering::Relaxed);
        }
        self.left.store(left.saturating_sub(u64::from(left < u64::MAX)), Ordering::Relaxed);
        !self.has_crashed.load(Ordering::Relaxed)
    }
}

impl<T: OverMemory> Crashing<T> {
    pub(super) fn new(blocks: &Arc<T>, spool: &MemorySpool) -> Crashing<T> {
        let (disk, life) = spool.used_by(&env());
        Crashing {
            blocks: blocks.clone(),
            memory: blocks.memory().clone(),
            spool: disk,
            disk: spool.clone(),
            life,
        }
    }

    /// The mount's process ends.
    pub(super) fn kill(&self) {
        self.life.has_crashed.store(true, Ordering::Relaxed);
    }

    /// It ends after so many more puts and calls of the disk.
    pub(super) fn lives_for(&self, calls: u64) {
        self.life.ends_after(calls);
    }

    pub(super) fn has_crashed(&self) -> bool {
        self.life.has_crashed.load(Ordering::Relaxed)
    }

    /// The machine crashes: of what is not durable, so many percent are left.
    pub(super) fn crash(&self, percent: u64) {
        self.kill();
        self.disk.crash(percent);
    }
}

impl<T: OverMemory> OverMemory for Crashing<T> {
    fn memory(&self) -> &MemoryBlocks {
        &self.memory
    }

    fn get_block(
        &self,
        id: BlockId,
        wanted: Wanted,
    ) -> BoxFuture<'static, Result<HeldBlock, GetError>> {
        OverMemory::get_block(&*self.blocks, id, wanted)
    }

    fn release_blocks(&self, release: Release) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        if !self.life.spend() {
            return Box::pin(std::future::pending());
        }
        self.blocks.release_blocks(release)
    }

    fn put_blocks(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        if !self.life.spend() {
            return Box::pin(std::future::pending());
        }
        self.blocks.put_blocks(blocks)
    }
}

impl Disk {
    fn with<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut BTreeMap<String, File>) -> io::Result<T> + Send + 'static,
    ) -> BoxFuture<'static, io::Result<T>> {
        let (env, spool, life) = (self.env.clone(), self.spool.clone(), self.life.clone());
        Box::pin(async move {
            atoll_env::sleep(&*env, Duration::from_millis(1)).await;
            if !life.spend() {
                return std::future::pending().await;
            }
            if spool.fails.load(Ordering::Relaxed) {
                return Err(io::Error::other("a test"));
            }
            work(&mut spool.files.lock().expect("unpoisoned"))
        })
    }
}

impl SpoolDirectory for Disk {
    fn list(&self) -> BoxFuture<'static, io::Result<Vec<String>>> {
        self.with(|files| Ok(files.keys().filter(|name| !name.contains('/')).cloned().collect()))
    }

    fn read(&self, name: String) -> BoxFuture<'static, io::Result<Bytes>> {
        let unreadable = self.spool.unreadable.clone();
        self.with(move |files| {
            if unreadable.lock().expect("unpoisoned").contains(&name) {
                return Err(io::Error::other("a bad block"));
            }
            let (durable, rest) = files.get(&name).ok_or(io::ErrorKind::NotFound)?;
            Ok(Bytes::from([&durable[..], rest].concat()))
        })
    }

    fn append(&self, name: String, bytes: Bytes) -> BoxFuture<'static, io::Result<()>> {
        let is_full = self.spool.is_full.load(Ordering::Relaxed);
        self.with(move |files| {
            if is_full {
                return Err(io::ErrorKind::StorageFull.into());
            }
            files.entry(name).or_default().1.extend_from_slice(&bytes);
            Ok(())
        })
    }

    fn sync(&self, name: String) -> BoxFuture<'static, io::Result<()>> {
        self.with(move |files| {
            let (durable, rest) = files.get_mut(&name).ok_or(io::ErrorKind::NotFound)?;
            durable.append(rest);
            Ok(())
        })
    }

    fn replace(&self, name: String, bytes: Bytes) -> BoxFuture<'static, io::Result<()>> {
        let is_full = self.spool.is_full.load(Ordering::Relaxed);
        self.with(move |files| {
            if is_full {
                return Err(io::ErrorKind::StorageFull.into());
            }
            files.insert(name, (bytes.to_vec(), Vec::new()));
            Ok(())
        })
    }

    fn remove(&self, name: String) -> BoxFuture<'static, io::Result<()>> {
        self.with(move |files| {
            files.remove(&name);
            Ok(())
        })
    }

    fn swap_out(&self, bytes: Bytes) -> BoxFuture<'static, io::Result<u64>> {
        self.with(move |files| {
            let (swap, _) = files.entry("swap".into()).or_default();
            swap.extend_from_slice(&bytes);
            Ok((swap.len() - bytes.len()) as u64)
        })
    }

    fn swap_in(&self, offset: u64, len: u32) -> BoxFuture<'static, io::Result<Bytes>> {
        self.spool.swap_ins.fetch_add(1, Ordering::Relaxed);
        self.with(move |files| {
            let (swap, _) = files.get("swap").ok_or(io::ErrorKind::NotFound)?;
            let bytes = swap.get(offset as usize..offset as usize + len as usize);
            Ok(Bytes::copy_from_slice(bytes.ok_or(io::ErrorKind::UnexpectedEof)?))
        })
    }

    fn swap_clear(&self) -> BoxFuture<'static, io::Result<()>> {
        self.with(|files| {
            files.remove("swap");
            Ok(())
        })
    }

    fn set_aside(&self, names: Vec<String>) -> BoxFuture<'static, io::Result<String>> {
        self.with(move |files| {
            for name in names {
                if let Some(file) = files.remove(&name) {
                    files.insert(format!("aside/{name}"), file);
                }
            }
            Ok("aside".into())
        })
    }
}

/// Memory whose puts of content can be refused.
struct Away {
    blocks: MemoryBlocks,
    is_away: AtomicBool,
}

impl OverMemory for Away {
    fn memory(&self) -> &MemoryBlocks {
        &self.blocks
    }

    fn put_blocks(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        let is_root = blocks.iter().any(|block| block.id.kind.is_mutable());
        if self.is_away.load(Ordering::Relaxed) && !is_root {
            let away = vec![Err(PutError::Unavailable("a test".into())); blocks.len()];
            return Box::pin(async { away });
        }
        self.blocks.put_blocks(blocks)
    }
}

struct Setting {
    ring: Arc<Away>,
    spool: MemorySpool,
    options: WriteOptions,
}

impl Setting {
    async fn new(options: WriteOptions) -> Setting {
        let ring = Arc::new(Away { blocks: MemoryBlocks::new(), is_away: AtomicBool::new(false) });
        let blocks: Arc<dyn Blocks> = ring.clone();
        created(&blocks, options.read_key.as_ref(), 16).await;
        Setting { ring, spool: MemorySpool::default(), options }
    }

    async fn mount(&self) -> (WritableFs, Arc<Crashing<Away>>) {
        let machine = Arc::new(Crashing::new(&self.ring, &self.spool));
        let blocks: Arc<dyn Blocks> = machine.clone();
        let spool = Some(machine.spool.clone());
        let fs = mounted_with(&blocks, self.options.clone(), spool).await.expect("mounts");
        (fs, machine)
    }

    fn ring_is_away(&self, is_away: bool) {
        self.ring.is_away.store(is_away, Ordering::Relaxed);
    }
}

/// Writes a file and closes it.
pub(super) async fn save(fs: &WritableFs, name: &str, content: &[u8]) -> Result<(), Errno> {
    let me = Caller::default();
    let flags = OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::TRUNCATE);
    let (entry, open) = fs.create(me, InodeNumber::ROOT, name.as_bytes(), 0o644, flags).await?;
    let (inode, handle) = (entry.attr.inode, open.handle);
    for (at, part) in content.chunks(1 << 20).enumerate() {
        let part = Bytes::copy_from_slice(part);
        fs.write(Writer::At(me), inode, handle, (at as u64) << 20, part).await?;
    }
    let closed = fs.flush(inode, handle).await;
    fs.close(inode, handle).await?;
    fs.forget(inode, 1);
    closed
}

/// Bytes that no two blocks of have in common.
pub(super) fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..len).map(|_| next()).collect()
}

pub(super) async fn load(fs: &WritableFs, name: &str) -> Result<Bytes, Errno> {
    let me = Caller::default();
    let inode = fs.lookup(me, InodeNumber::ROOT, name.as_bytes()).await?.attr.inode;
    let handle = fs.open(me, inode, OpenFlags::READ).await?.handle;
    let bytes = fs.read(inode, handle, 0, 64 << 20).await?;
    fs.close(inode, handle).await?;
    Ok(bytes)
}

/// While the ring is away, `close` returns, `fsync` does not, and a crash of the machine loses
/// nothing that was closed. The next mount need not wait for the end of the first one's claim.
#[tokio::test(start_paused = true)]
async fn what_was_closed_survives_a_crash_while_the_ring_is_away() {
    let setting = Setting::new(WriteOptions::default()).await;
    let (fs, machine) = setting.mount().await;
    save(&fs, "before", b"on the ring").await.expect("closes");
    fs.sync().await.expect("flushes");
    setting.ring_is_away(true);
    save(&fs, "before", b"in the spool").await.expect("closes");
    save(&fs, "new", b"in the spool too").await.expect("closes");
    let inode = fs.lookup(Caller::default(), InodeNumber::ROOT, b"new").await.expect("is there");
    let mtime = Some(SetTime::To(atoll_vfs::FileTime { secs: -5, nanos: 7 }));
    let changes = SetAttr { mtime, mode: Some(0o640), ..SetAttr::default() };
    fs.setattr(Caller::default(), inode.attr.inode, None, changes).await.expect("changes");
    save(&fs, "last", b"").await.expect("closes");
    assert_eq!(fs.sync().await, Err(Errno::ETIMEDOUT));
    machine.crash(0);
    setting.ring_is_away(false);
    let (again, _machine) = setting.mount().await;
    assert_eq!(load(&again, "before").await.expect("reads"), &b"in the spool"[..]);
    assert_eq!(load(&again, "new").await.expect("reads"), &b"in the spool too"[..]);
    let found = again.lookup(Caller::default(), InodeNumber::ROOT, b"new").await.expect("finds");
    assert_eq!((found.attr.mode, found.attr.mtime.secs, found.attr.mtime.nanos), (0o640, -5, 7));
    assert_ne!(found.attr.ctime.secs, -5);
    again.end().await.expect("ends");
    assert_eq!(setting.spool.records(), Vec::<String>::new(), "all of it is on the ring");
    let blocks: Arc<dyn Blocks> = setting.ring.clone();
    let elsewhere = mounted(&blocks, WriteOptions::default()).await.expect("mounts elsewhere");
    assert_eq!(load(&elsewhere, "new").await.expect("reads"), &b"in the spool too"[..]);
}

/// A crash between the root's arrival on the ring and the end of its segments: what the root has is
/// not made again.
#[tokio::test(start_paused = true)]
async fn what_the_ring_has_is_not_made_again() {
    let setting = Setting::new(WriteOptions::default()).await;
    let (fs, machine) = setting.mount().await;
    save(&fs, "file", b"first").await.expect("closes");
    // The disk does nothing after this moment: no segment is removed.
    let before = setting.spool.files.lock().expect("unpoisoned").clone();
    fs.sync().await.expect("flushes");
    fs.unlink(Caller::default(), InodeNumber::ROOT, b"file").await.expect("removes");
    fs.sync().await.expect("flushes");
    machine.crash(0);
    *setting.spool.files.lock().expect("unpoisoned") = before;
    let (again, _machine) = setting.mount().await;
    assert_eq!(load(&again, "file").await, Err(Errno::ENOENT));
    assert_eq!(again.set_aside(), None);
}

/// Where another writer has put a root, nothing of the spool is mixed with it: it is set aside, and
/// can be read.
#[tokio::test(start_paused = true)]
async fn what_another_writer_has_overtaken_is_set_aside() {
    let read_key = Some(ReadKey::from_bytes([3; 32]));
    let options = WriteOptions { read_key, ..WriteOptions::default() };
    let setting = Setting::new(options).await;
    let (fs, machine) = setting.mount().await;
    save(&fs, "old", b"both have it").await.expect("closes");
    fs.sync().await.expect("flushes");
    setting.ring_is_away(true);
    save(&fs, "mine", b"a secret that waits").await.expect("closes");
    fs.unlink(Caller::default(), InodeNumber::ROOT, b"old").await.expect("removes");
    save(&fs, "mine too", b"").await.expect("closes");
    machine.crash(0);
    setting.ring_is_away(false);
    let all = setting.spool.all();
    assert!(!all.windows(8).any(|part| part == b"a secret" || part == b"mine too"), "it is sealed");

    let blocks: Arc<dyn Blocks> = setting.ring.clone();
    let by_force = WriteOptions { take_over: true, ..setting.options.clone() };
    let other = mounted(&blocks, by_force).await.expect("takes over");
    save(&other, "theirs", b"1").await.expect("closes");
    other.end().await.expect("ends");

    let (again, _machine) = setting.mount().await;
    assert_eq!(load(&again, "theirs").await.expect("reads"), &b"1"[..]);
    assert_eq!(load(&again, "mine").await, Err(Errno::ENOENT));
    assert_eq!(again.set_aside().as_deref(), Some("aside"));
    let status = again.getxattr(InodeNumber::ROOT, b"user.atoll.status").await.expect("is told");
    assert!(String::from_utf8_lossy(&status).contains("aside"), "{status:?}");
    save(&again, "next", b"2").await.expect("closes");

    let aside = setting.spool.below("aside");
    let disk = Crashing::new(&setting.ring, &aside).spool;
    let opened =
        WritableFs::open_set_aside(env(), blocks, secret(), setting.options.clone(), disk).await;
    let (left, missing) = opened.expect("opens");
    assert_eq!(missing, None);
    assert_eq!(load(&left, "mine").await.expect("reads"), &b"a secret that waits"[..]);
    assert_eq!(load(&left, "old").await, Err(Errno::ENOENT));
    assert_eq!(save(&left, "more", b"").await, Err(Errno::EROFS));
}

/// What is damaged, or lies on a bad disk, is set aside, and the volume can be written; what comes
/// before can be recovered.
#[tokio::test(start_paused = true)]
async fn a_damaged_spool_locks_nobody_out() {
    for (place, left) in [(Some(0), ""), (Some(1), "a"), (None, "a")] {
        let setting = Setting::new(WriteOptions::default()).await;
        let (fs, machine) = setting.mount().await;
        setting.ring_is_away(true);
        for name in ["a", "b", "c"] {
            save(&fs, name, b"1").await.expect("closes");
            // The first flush begins a segment.
            let _ = fs.sync().await;
        }
        machine.crash(0);
        setting.ring_is_away(false);
        let all = setting.spool.records();
        {
            let mut files = setting.spool.files.lock().expect("unpoisoned");
            match place {
                Some(place) => files.get_mut(&all[place]).expect("is there").0[40] ^= 1,
                None => drop(
                    setting.spool.unreadable.lock().expect("unpoisoned").insert(all[1].clone()),
                ),
            }
        }
        let (again, machine) = setting.mount().await;
        assert_eq!(again.set_aside().as_deref(), Some("aside"));
        save(&again, "d", b"1").await.expect("closes");
        machine.crash(0);
        let (last, _machine) = setting.mount().await;
        assert_eq!(load(&last, "d").await.expect("reads"), &b"1"[..]);
        assert_eq!(load(&last, "a").await, Err(Errno::ENOENT));

        let aside = setting.spool.below("aside");
        assert_eq!(aside.records(), all);
        let disk = Crashing::new(&setting.ring, &aside).spool;
        let (blocks, options) = (setting.ring.clone(), setting.options.clone());
        let opened = WritableFs::open_set_aside(env(), blocks, secret(), options, disk).await;
        let (found, missing) = opened.expect("opens");
        assert!(missing.is_some());
        let names = found.changed_names().await.expect("lists");
        let names: Vec<String> =
            names.into_iter().map(|(n, _)| String::from_utf8(n).expect("text")).collect();
        assert_eq!(names.concat(), left);
    }
}

/// No bit of a spool can change such that something closed is lost and nobody is told; of the last
/// close nothing more is known where the machine has crashed right after it.
#[tokio::test(start_paused = true)]
async fn damage_is_no_end_of_what_was_written() {
    for (is_killed, names) in [(true, ["a", "b", "c"]), (false, ["a", "b", "b"])] {
        let setting = Setting::new(WriteOptions::default()).await;
        let (fs, machine) = setting.mount().await;
        setting.ring_is_away(true);
        for name in ["a", "b", "c"] {
            save(&fs, name, b"1").await.expect("closes");
        }
        match is_killed {
            true => machine.kill(),
            false => machine.crash(0),
        }
        let segments = setting.spool.records();
        let bytes = segments
            .iter()
            .flat_map(|segment| (0..setting.spool.len_of(segment)).map(move |at| (segment, at)));
        let mut losses = 0;
        for (segment, at) in bytes {
            let spool = setting.spool.copied();
            spool.flip(segment, at);
            let disk = Crashing::new(&setting.ring, &spool).spool;
            let (blocks, options) = (setting.ring.clone(), setting.options.clone());
            let opened = WritableFs::open_set_aside(env(), blocks, secret(), options, disk).await;
            let (left, missing) = opened.expect("opens");
            let mut is_whole = true;
            for name in names {
                is_whole &= load(&left, name).await.is_ok();
            }
            assert!(is_whole || missing.is_some(), "killed: {is_killed}, byte {at} of {segment}");
            losses += u64::from(!is_whole);
        }
        assert!(losses > 0);
        // The same when the volume is mounted: it is said, and set aside.
        setting.spool.flip(&segments[0], 40);
        let (again, _machine) = setting.mount().await;
        assert_eq!(again.set_aside().as_deref(), Some("aside"));
    }
}

/// Days without the ring: each flush fails, and the files are as few as before.
#[tokio::test(start_paused = true)]
async fn failed_flushes_leave_few_files() {
    let setting = Setting::new(WriteOptions::default()).await;
    let (fs, machine) = setting.mount().await;
    let mut number = 0;
    for _ in 0..3 {
        setting.ring_is_away(true);
        for _ in 0..20 {
            save(&fs, &format!("{number}"), b"1").await.expect("closes");
            fs.sync().await.expect_err("the ring is away");
            number += 1;
        }
        assert!(setting.spool.records().len() <= 2, "{:?}", setting.spool.records());
        setting.ring_is_away(false);
        // This flush has the first records of a segment that goes on.
        let flushed = fs.sync();
        save(&fs, &format!("{number}"), b"1").await.expect("closes");
        number += 1;
        flushed.await.expect("flushes");
    }
    setting.ring_is_away(true);
    save(&fs, "last", b"1").await.expect("closes");
    machine.crash(0);
    let (again, _machine) = setting.mount().await;
    assert_eq!(again.set_aside(), None);
    for name in (0..number).map(|number| format!("{number}")).chain(["last".into()]) {
        assert_eq!(load(&again, &name).await.expect("reads"), &b"1"[..], "{name}");
    }
}

/// The directory of a node was copied, and both machines mount the volume, one after the other. What
/// the root has of one spool is not taken for what it has of the other.
#[tokio::test(start_paused = true)]
async fn a_copied_spool_counts_for_itself() {
    let setting = Setting::new(WriteOptions::default()).await;
    let (fs, _machine) = setting.mount().await;
    save(&fs, "both", b"1").await.expect("closes");
    fs.end().await.expect("ends");
    let copy = setting.spool.copied();
    let (fs, machine) = setting.mount().await;
    setting.ring_is_away(true);
    save(&fs, "mine", b"1").await.expect("closes");
    machine.crash(0);
    setting.ring_is_away(false);

    let blocks: Arc<dyn Blocks> = setting.ring.clone();
    let other = Setting { ring: setting.ring.clone(), spool: copy, ..setting };
    let disk = Crashing::new(&other.ring, &other.spool).spool;
    let refused = mounted_with(&blocks, other.options.clone(), Some(disk)).await.err();
    assert!(matches!(refused, Some(WriteError::Busy { .. })), "{refused:?}");
    let by_force = WriteOptions { take_over: true, ..other.options.clone() };
    let other = Setting { options: by_force, ..other };
    let (theirs, _machine) = other.mount().await;
    assert_eq!(theirs.set_aside(), None);
    for name in ["x", "y", "z"] {
        save(&theirs, name, b"1").await.expect("closes");
        theirs.sync().await.expect("flushes");
    }
    theirs.end().await.expect("ends");

    let setting = Setting { spool: setting.spool, ..other };
    let (again, _machine) = setting.mount().await;
    assert_eq!(load(&again, "z").await.expect("reads"), &b"1"[..]);
    assert_eq!(load(&again, "mine").await, Err(Errno::ENOENT));
    assert_eq!(again.set_aside().as_deref(), Some("aside"));
}

/// A disk without room keeps nobody from the volume, unless something is in the spool that would then
/// be passed over.
#[tokio::test(start_paused = true)]
async fn a_full_disk_locks_nobody_out() {
    // Without the spool nothing says that the mount which is named as the writer is gone.
    let options = WriteOptions { take_over: true, ..WriteOptions::default() };
    let setting = Setting::new(options).await;
    setting.spool.is_full.store(true, Ordering::Relaxed);
    for attempt in 0..2 {
        let (fs, machine) = setting.mount().await;
        let status = fs.getxattr(InodeNumber::ROOT, b"user.atoll.status").await.expect("is told");
        assert!(String::from_utf8_lossy(&status).contains("nothing is spooled"), "{status:?}");
        save(&fs, &format!("{attempt}"), b"1").await.expect("closes");
        setting.ring_is_away(true);
        assert_eq!(save(&fs, "late", b"1").await, Err(Errno::ETIMEDOUT));
        setting.ring_is_away(false);
        machine.crash(0);
    }
    setting.spool.is_full.store(false, Ordering::Relaxed);
    let (fs, machine) = setting.mount().await;
    for attempt in 0..2 {
        load(&fs, &format!("{attempt}")).await.expect("close has waited for the ring");
    }
    setting.ring_is_away(true);
    save(&fs, "waits", b"1").await.expect("closes");
    machine.crash(0);
    setting.ring_is_away(false);
    setting.spool.is_full.store(true, Ordering::Relaxed);
    let disk = Crashing::new(&setting.ring, &setting.spool).spool;
    let blocks: Arc<dyn Blocks> = setting.ring.clone();
    let refused = mounted_with(&blocks, setting.options.clone(), Some(disk)).await.err();
    assert!(matches!(refused, Some(WriteError::Spool(_))), "{refused:?}");
    setting.spool.is_full.store(false, Ordering::Relaxed);
    let (fs, _machine) = setting.mount().await;
    assert_eq!(load(&fs, "waits").await.expect("reads"), &b"1"[..]);
}

/// What a killed process had not made durable is so before the next one's records are.
#[tokio::test(start_paused = true)]
async fn a_kill_and_then_a_crash_leave_no_gap() {
    let setting = Setting::new(WriteOptions::default()).await;
    let (fs, machine) = setting.mount().await;
    setting.ring_is_away(true);
    fs.mkdir(Caller::default(), InodeNumber::ROOT, b"a", 0o755).await.expect("makes");
    tokio::time::sleep(Duration::from_millis(500)).await;
    machine.kill();
    let (fs, machine) = setting.mount().await;
    save(&fs, "b", b"1").await.expect("closes");
    machine.crash(0);
    let (fs, _machine) = setting.mount().await;
    assert_eq!(fs.set_aside(), None);
    assert_eq!(load(&fs, "b").await.expect("reads"), &b"1"[..]);
    fs.lookup(Caller::default(), InodeNumber::ROOT, b"a").await.expect("is there");
}

/// Where the disk fails, `close` waits for the ring, and nothing is lost.
#[tokio::test(start_paused = true)]
async fn where_the_disk_fails_close_waits_for_the_ring() {
    let setting = Setting::new(WriteOptions::default()).await;
    let (fs, machine) = setting.mount().await;
    setting.spool.fails.store(true, Ordering::Relaxed);
    save(&fs, "a", b"1").await.expect("closes");
    setting.ring_is_away(true);
    assert_eq!(save(&fs, "b", b"1").await, Err(Errno::ETIMEDOUT));
    let status = fs.getxattr(InodeNumber::ROOT, b"user.atoll.status").await.expect("is told");
    assert!(String::from_utf8_lossy(&status).contains("nothing is spooled"), "{status:?}");
    setting.ring_is_away(false);
    save(&fs, "b", b"1").await.expect("closes");
    machine.crash(0);
    setting.spool.fails.store(false, Ordering::Relaxed);
    let (again, _machine) = setting.mount().await;
    assert_eq!(load(&again, "a").await.expect("reads"), &b"1"[..]);
    assert_eq!(load(&again, "b").await.expect("reads"), &b"1"[..]);
}

/// A writer waits for the ring when the spool is full; `sync` makes each close wait.
#[tokio::test(start_paused = true)]
async fn a_full_spool_and_sync_wait_for_the_ring() {
    let options = WriteOptions { max_spool_bytes: 4 << 20, ..WriteOptions::default() };
    let setting = Setting::new(options).await;
    let (fs, _machine) = setting.mount().await;
    setting.ring_is_away(true);
    for name in ["a", "b"] {
        save(&fs, name, &[1; 2 << 20]).await.expect("closes");
    }
    assert_eq!(save(&fs, "c", &[3; 2 << 20]).await, Err(Errno::ETIMEDOUT));
    setting.ring_is_away(false);
    save(&fs, "c", &[4; 2 << 20]).await.expect("closes");

    let setting = Setting::new(WriteOptions { sync: true, ..WriteOptions::default() }).await;
    let (fs, _machine) = setting.mount().await;
    save(&fs, "a", b"1").await.expect("closes");
    setting.ring_is_away(true);
    assert_eq!(save(&fs, "a", b"2").await, Err(Errno::ETIMEDOUT));
}

/// A program has filled the spool while the ring was away. What it then removes or empties makes room, in the
/// records and in the swap file.
#[tokio::test(start_paused = true)]
async fn a_removal_frees_a_full_spool() {
    let options = WriteOptions {
        max_spool_bytes: 4 << 20,
        max_changed_bytes: 1 << 20,
        ..WriteOptions::default()
    };
    for empties in [false, true] {
        let setting = Setting::new(options.clone()).await;
        let (fs, machine) = setting.mount().await;
        setting.ring_is_away(true);
        save(&fs, "small", b"small").await.expect("closes");
        let mut written = 0;
        while save(&fs, &format!("{written}"), &noise(1 << 20, written)).await.is_ok() {
            written += 1;
            assert!(written < 10, "the spool is bounded");
        }
        let me = Caller::default();
        for number in 0..=written {
            let name = format!("{number}");
            if empties {
                let Ok(found) = fs.lookup(me, InodeNumber::ROOT, name.as_bytes()).await else {
                    continue;
                };
                let empty = SetAttr { size_bytes: Some(0), ..SetAttr::default() };
                fs.setattr(me, found.attr.inode, None, empty).await.expect("cuts");
                fs.forget(found.attr.inode, 1);
            } else {
                let _ = fs.unlink(me, InodeNumber::ROOT, name.as_bytes()).await;
            }
        }
        save(&fs, "new", &noise(1 << 20, 99)).await.expect("closes");
        save(&fs, "new", &noise(1 << 20, 98)).await.expect("closes");
        assert!(setting.spool.all().len() < 4 << 20, "{} bytes", setting.spool.all().len());
        fs.check_invariants();
        machine.crash(0);
        let (again, _machine) = setting.mount().await;
        assert_eq!(load(&again, "small").await.expect("reads"), &b"small"[..]);
        assert!(load(&again, "new").await.expect("reads") == noise(1 << 20, 98));
        let old = load(&again, "0").await;
        assert_eq!(old, if empties { Ok(Bytes::new()) } else { Err(Errno::ENOENT) });
    }
}

/// A crash while the spool is written anew: what was closed is whole, and what was removed is whole or gone.
#[tokio::test(start_paused = true)]
async fn a_crash_while_the_spool_is_freed_loses_nothing() {
    let options = WriteOptions { max_spool_bytes: 1 << 20, ..WriteOptions::default() };
    for (lives_for, percent) in (0..).flat_map(|calls| [(calls, 0), (calls, 60), (calls, 100)]) {
        let setting = Setting::new(options.clone()).await;
        let (fs, machine) = setting.mount().await;
        setting.ring_is_away(true);
        save(&fs, "big", &noise(900_000, 2)).await.expect("closes");
        // A flush fails here: the removal is recorded in another file than the data.
        save(&fs, "kept", &noise(300_000, 1)).await.expect("closes");
        assert_eq!(setting.spool.records().len(), 2);
        machine.lives_for(lives_for);
        let removal = fs.unlink(Caller::default(), InodeNumber::ROOT, b"big");
        let removed = tokio::time::timeout(Duration::from_secs(5), removal).await;
        let is_over = removed.is_ok() && !machine.has_crashed();
        machine.crash(percent);
        setting.ring_is_away(false);
        let (again, _machine) = setting.mount().await;
        assert!(load(&again, "kept").await.expect("reads") == noise(300_000, 1));
        match load(&again, "big").await {
            Ok(bytes) => assert!(bytes == noise(900_000, 2), "after {lives_for}, {percent} %"),
            Err(errno) => assert_eq!(errno, Errno::ENOENT),
        }
        again.end().await.expect("ends");
        if is_over && percent == 100 {
            assert!(lives_for > 2, "it takes some calls of the disk");
            return;
        }
    }
}

/// While the ring is away, far more is written than the memory holds; all of it can be read,
/// and changed, and reaches the ring.
#[tokio::test(start_paused = true)]
async fn what_the_memory_does_not_hold_is_swapped_out() {
    for read_key in [None, Some(ReadKey::from_bytes([3; 32]))] {
        let options =
            WriteOptions { max_changed_bytes: 2 << 20, read_key, ..WriteOptions::default() };
        let setting = Setting::new(options).await;
        let (fs, machine) = setting.mount().await;
        setting.ring_is_away(true);
        let content = |file: usize| noise(20 << 20, file as u64);
        for file in 0..2 {
            save(&fs, &format!("{file}"), &content(file)).await.expect("closes");
        }
        let me = Caller::default();
        for file in 0..2 {
            let name = format!("{file}");
            assert!(load(&fs, &name).await.expect("reads") == content(file), "{file}");
            let inode = fs.lookup(me, InodeNumber::ROOT, name.as_bytes()).await.expect("finds");
            let inode = inode.attr.inode;
            let handle = fs.open(me, inode, OpenFlags::READ_WRITE).await.expect("opens").handle;
            let patch = Bytes::from_static(b"patch");
            fs.write(Writer::At(me), inode, handle, 100_000, patch).await.expect("writes");
            let size_bytes = Some(19_000_001);
            let changes = SetAttr { size_bytes, ..SetAttr::default() };
            fs.setattr(me, inode, Some(handle), changes).await.expect("cuts");
            fs.close(inode, handle).await.expect("closes");
        }
        let expected = |file: usize| {
            let mut bytes = content(file);
            bytes[100_000..100_005].copy_from_slice(b"patch");
            bytes.truncate(19_000_001);
            bytes
        };
        let was_swapped = setting.spool.files.lock().expect("unpoisoned").contains_key("swap");
        assert!(was_swapped && fs.held_bytes() < 5 << 20, "{} bytes", fs.held_bytes());
        // A flush that fails does not read all of it.
        let before = setting.spool.swap_ins.load(Ordering::Relaxed);
        fs.sync().await.expect_err("the ring is away");
        let read = setting.spool.swap_ins.load(Ordering::Relaxed) - before;
        assert!(read < 200, "{read} blocks of 580");
        setting.ring_is_away(false);
        fs.sync().await.expect("flushes");
        let left = setting.spool.files.lock().expect("unpoisoned").contains_key("swap");
        assert!(!left, "nothing of it is needed");
        for file in 0..2 {
            assert!(load(&fs, &format!("{file}")).await.expect("reads") == expected(file));
        }
        machine.crash(0);
        let (fs, _machine) = setting.mount().await;
        assert!(load(&fs, "1").await.expect("reads") == expected(1));
    }
}

/// Another mount of another machine is refused as before.
#[tokio::test(start_paused = true)]
async fn only_the_same_spool_may_follow_at_once() {
    let setting = Setting::new(WriteOptions::default()).await;
    let (_fs, machine) = setting.mount().await;
    machine.crash(0);
    let blocks: Arc<dyn Blocks> = setting.ring.clone();
    let refused = mounted(&blocks, WriteOptions::default()).await.err().expect("is refused");
    assert!(matches!(refused, WriteError::Busy { .. }), "{refused}");
    drop(setting.mount().await);
}

/// Where the ring has no room, a mount begins all the same: files can be removed.
#[tokio::test(start_paused = true)]
async fn a_spool_that_the_ring_has_no_room_for_locks_nobody_out() {
    let options = WriteOptions { max_changed_bytes: 1 << 20, ..WriteOptions::default() };
    let setting = Setting::new(options).await;
    let (fs, machine) = setting.mount().await;
    setting.ring_is_away(true);
    save(&fs, "big", &[1; 1 << 20]).await.expect("closes");
    machine.crash(0);
    let (again, _machine) = setting.mount().await;
    save(&again, "more", b"1").await.expect("closes");
    again.unlink(Caller::default(), InodeNumber::ROOT, b"big").await.expect("makes room");
    setting.ring_is_away(false);
    again.end().await.expect("ends");
}

/// A program that writes all the time and never closes.
#[tokio::test(start_paused = true)]
async fn what_was_written_a_second_ago_survives_while_more_is_written() {
    let setting = Setting::new(WriteOptions::default()).await;
    let (fs, machine) = setting.mount().await;
    setting.ring_is_away(true);
    let me = Caller::default();
    let log = fs.create(me, InodeNumber::ROOT, b"log", 0o644, OpenFlags::READ_WRITE);
    let (entry, open) = log.await.expect("opens");
    let (inode, handle) = (entry.attr.inode, open.handle);
    for line in 0..18 {
        fs.write(Writer::At(me), inode, handle, line, Bytes::from_static(b"1"))
            .await
            .expect("writes");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    machine.crash(0);
    let (again, _machine) = setting.mount().await;
    let left = load(&again, "log").await.expect("is there").len();
    assert!(left >= 6, "{left}");
}

/// A mount that is fenced ends, and nothing of what it has taken is lost.
#[tokio::test(start_paused = true)]
async fn the_end_of_a_fenced_mount_keeps_what_was_written() {
    let setting = Setting::new(WriteOptions::default()).await;
    let (fs, machine) = setting.mount().await;
    let blocks: Arc<dyn Blocks> = setting.ring.clone();
    let by_force = WriteOptions { take_over: true, ..WriteOptions::default() };
    let other = mounted(&blocks, by_force).await.expect("takes over");
    fs.mkdir(Caller::default(), InodeNumber::ROOT, b"mine", 0o755).await.expect("makes");
    fs.end().await.expect_err("it is fenced");
    machine.crash(0);
    other.end().await.expect("ends");
    let (again, _machine) = setting.mount().await;
    assert_eq!(again.set_aside().as_deref(), Some("aside"));
    let disk = Crashing::new(&setting.ring, &setting.spool.below("aside")).spool;
    let opened = WritableFs::open_set_aside(env(), blocks, secret(), setting.options.clone(), disk);
    let (left, missing) = opened.await.expect("opens");
    assert_eq!(missing, None);
    assert_eq!(left.changed_names().await, Ok(vec![(b"mine".to_vec(), true)]));
}

/// The story: what a mount had left could be recovered only after the next mount on its machine, which was refused for as long as
/// the mount went on that had taken over.
#[tokio::test(start_paused = true)]
async fn what_was_overtaken_is_recovered_while_the_other_mount_writes() {
    let setting = Setting::new(WriteOptions::default()).await;
    let (fs, machine) = setting.mount().await;
    let blocks: Arc<dyn Blocks> = setting.ring.clone();
    setting.ring_is_away(true);
    save(&fs, "mine", b"1").await.expect("closes");
    machine.crash(0);
    setting.ring_is_away(false);
    let find = || async {
        let disk = Crashing::new(&setting.ring, &setting.spool).spool;
        let (env, read_key) = (env(), setting.options.read_key.as_ref());
        WritableFs::set_aside_overtaken(&env, &blocks, &secret(), read_key, disk).await
    };
    assert_eq!(find().await.expect("reads"), None, "nobody has written the volume since");
    let by_force = WriteOptions { take_over: true, ..setting.options.clone() };
    let other = mounted(&blocks, by_force).await.expect("takes over");
    assert_eq!(find().await.expect("reads").as_deref(), Some("aside"));
    assert_eq!(find().await.expect("reads"), None, "nothing is left to be overtaken");
    let disk = Crashing::new(&setting.ring, &setting.spool.below("aside")).spool;
    let options = setting.options.clone();
    let opened = WritableFs::open_set_aside(env(), blocks.clone(), secret(), options, disk);
    let (left, missing) = opened.await.expect("opens");
    assert_eq!(missing, None);
    assert_eq!(left.changed_names().await, Ok(vec![(b"mine".to_vec(), true)]));
    save(&other, "theirs", b"2").await.expect("it writes on");
    other.end().await.expect("ends");
}

/// A file with several names is in no directory.
#[tokio::test(start_paused = true)]
async fn a_linked_file_that_was_overtaken_is_named() {
    let setting = Setting::new(WriteOptions::default()).await;
    let (fs, _machine) = setting.mount().await;
    let me = Caller::default();
    let dir = fs.mkdir(me, InodeNumber::ROOT, b"dir", 0o755).await.expect("makes").attr.inode;
    save(&fs, "one", b"1").await.expect("closes");
    let inode = fs.lookup(me, InodeNumber::ROOT, b"one").await.expect("is there").attr.inode;
    fs.link(me, inode, dir, b"two").await.expect("links");
    fs.end().await.expect("ends");
    let (fs, machine) = setting.mount().await;
    setting.ring_is_away(true);
    save(&fs, "one", b"changed").await.expect("closes");
    machine.crash(0);
    setting.ring_is_away(false);
    let blocks: Arc<dyn Blocks> = setting.ring.clone();
    let by_force = WriteOptions { take_over: true, ..setting.options.clone() };
    mounted(&blocks, by_force).await.expect("takes over").end().await.expect("ends");
    let (again, _machine) = setting.mount().await;
    assert_eq!(again.set_aside().as_deref(), Some("aside"));
    let disk = Crashing::new(&setting.ring, &setting.spool.below("aside")).spool;
    let opened =
        WritableFs::open_set_aside(env(), blocks, secret(), setting.options.clone(), disk).await;
    let (left, missing) = opened.expect("opens");
    assert_eq!(missing, None);
    assert_eq!(
        left.changed_names().await,
        Ok(vec![(b"dir/two".to_vec(), true), (b"one".to_vec(), true)])
    );
}

/// Names, attributes and removals cost memory and disk, too.
#[tokio::test(start_paused = true)]
async fn what_waits_for_a_silent_ring_is_bounded() {
    let setting = Setting::new(WriteOptions::default()).await;
    let (fs, _machine) = setting.mount().await;
    setting.ring_is_away(true);
    let me = Caller::default();
    let mut made = 0;
    let refused = loop {
        assert!(made < 300_000, "all are taken");
        let name = format!("{made}");
        match fs.mknod(me, InodeNumber::ROOT, name.as_bytes(), super::REGULAR, 0o644, 0).await {
            Ok(entry) => fs.forget(entry.attr.inode, 1),
            Err(errno) => break errno,
        }
        made += 1;
        if made % 10_000 == 0 {
            tokio::time::sleep(Duration::from_secs(5)).await;
        }
    };
    assert_eq!(refused, Errno::ETIMEDOUT);
    let mut removed = 0;
    while fs.unlink(me, InodeNumber::ROOT, format!("{removed}").as_bytes()).await.is_ok() {
        removed += 1;
    }
    assert_eq!(removed, made);
}

/// Extended attributes are kept in memory until the ring has them.
#[tokio::test(start_paused = true)]
async fn extended_attributes_that_wait_for_a_silent_ring_are_bounded() {
    let options = WriteOptions { max_changed_bytes: 1 << 20, ..WriteOptions::default() };
    let setting = Setting::new(options).await;
    let (fs, _machine) = setting.mount().await;
    setting.ring_is_away(true);
    let me = Caller::default();
    let value = Bytes::from(noise(60_000, 1));
    let mut number = 0;
    let refused = loop {
        assert!(number < 200, "all are taken");
        number += 1;
        let name = format!("{number}");
        let made = fs.mknod(me, InodeNumber::ROOT, name.as_bytes(), super::REGULAR, 0o644, 0).await;
        let made = match made {
            Ok(made) => made.attr.inode,
            Err(errno) => break errno,
        };
        let set = fs.setxattr(me, made, b"user.a", value.clone(), XattrFlags::default()).await;
        fs.forget(made, 1);
        if let Err(errno) = set {
            break errno;
        }
    };
    assert_eq!(refused, Errno::ETIMEDOUT);
    assert!(fs.held_bytes() < 3 << 20, "{} bytes", fs.held_bytes());
    fs.check_invariants();
    setting.ring_is_away(false);
    fs.sync().await.expect("flushes");
    assert_eq!(fs.held_bytes(), 0);
    fs.check_invariants();
}

/// An attribute that is changed again and again costs no memory, and more and more of the disk.
#[tokio::test(start_paused = true)]
async fn changes_that_bring_no_data_fill_no_disk() {
    let options = WriteOptions { max_spool_bytes: 1 << 20, ..WriteOptions::default() };
    let setting = Setting::new(options).await;
    let (fs, _machine) = setting.mount().await;
    save(&fs, "file", b"1").await.expect("closes");
    fs.sync().await.expect("flushes");
    setting.ring_is_away(true);
    let me = Caller::default();
    let inode = fs.lookup(me, InodeNumber::ROOT, b"file").await.expect("is there").attr.inode;
    let changes = SetAttr { mode: Some(0o600), ..SetAttr::default() };
    let mut made = 0;
    while fs.setattr(me, inode, None, changes).await.is_ok() {
        made += 1;
        assert!(made < 200_000, "the disk is full: {} bytes", setting.spool.all().len());
        if made % 10_000 == 0 {
            tokio::time::sleep(Duration::from_secs(5)).await;
        }
    }
}

/// A root that lies about how many records it has of this spool.
#[tokio::test(start_paused = true)]
async fn a_count_of_records_at_its_end_does_no_harm() {
    let setting = Setting::new(WriteOptions::default()).await;
    let (fs, _machine) = setting.mount().await;
    fs.end().await.expect("ends");
    let blocks: Arc<dyn Blocks> = setting.ring.clone();
    let block = blocks.get_signed(secret().volume_id().root_key()).await.expect("is there");
    let mut root = sealed_root::decode(&block.payload, None).expect("reads");
    root.mounted.merged[0].records = u64::MAX;
    let payload = sealed_root::encode(&root, None);
    let lie = SignedBlock::sign(&secret(), b"", block.version + 1, &payload);
    blocks.put_signed(lie).await.expect("memory takes it");
    let (fs, machine) = setting.mount().await;
    setting.ring_is_away(true);
    save(&fs, "file", b"1").await.expect("closes");
    machine.crash(0);
    setting.ring_is_away(false);
    let (again, _machine) = setting.mount().await;
    assert_eq!(load(&again, "file").await.expect("reads"), &b"1"[..]);
}
