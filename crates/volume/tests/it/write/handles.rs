//! File handles of a volume that is written: a handle is a number, which no other file gets.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use atoll_dht::{Blocks, MemoryBlocks, OverMemory};
use atoll_env::{BoxFuture, Env};
use atoll_key::{ReadKey, SecretKey};
use atoll_vfs::kit::{self, Features, Restart, RestartSubject, Subject, Tree, write_tree_to_fs};
use atoll_vfs::{Caller, Errno, FileKind, FileSystem, InodeNumber, PersistentHandle, RenameFlags};
use atoll_volume::HandleTable;
use atoll_volume::owned::{
    NoLeaseKeeper, NoLeaseRecorder, NoProgress, Volume, VolumeFs, VolumeOptions, WritableFs,
    WriteOptions, publish,
};

use super::model::Dice;
use super::spool::{Crashing, MemorySpool};
use super::{REGULAR, created, env, mounted, mounted_with, secret};
use crate::handles::TableFiles;
use crate::ring::small_blocks;

const ROOT: InodeNumber = InodeNumber::ROOT;

fn me() -> Caller {
    Caller::default()
}

fn with(table: &Arc<HandleTable>) -> WriteOptions {
    WriteOptions { handles: Some(table.clone()), ..WriteOptions::default() }
}

/// A volume, as one mount after the other writes it.
struct OwnedLife {
    blocks: Arc<dyn Blocks>,
    secret: SecretKey,
    options: WriteOptions,
    tables: TableFiles,
    fs: Option<WritableFs>,
}

impl OwnedLife {
    async fn begin(&mut self) -> Result<(), String> {
        let handles = Some(self.tables.next());
        let options = WriteOptions { handles, ..self.options.clone() };
        let (secret, keeper) = (self.secret.clone(), Arc::new(NoLeaseKeeper));
        let fs = WritableFs::open(env(), self.blocks.clone(), secret, options, keeper, None).await;
        self.fs = Some(fs.map_err(|error| error.to_string())?);
        Ok(())
    }
}

impl Restart for OwnedLife {
    fn fs(&self) -> Arc<dyn FileSystem> {
        Arc::new(self.fs.clone().expect("is mounted"))
    }

    fn restart(&mut self) -> BoxFuture<'_, Result<(), String>> {
        Box::pin(async move {
            let fs = self.fs.take().expect("is mounted");
            fs.check_invariants();
            fs.end().await.map_err(|error| error.to_string())?;
            fs.check_invariants();
            self.begin().await
        })
    }
}

struct WithHandles {
    read_key: Option<ReadKey>,
    /// The tree was published, and files have no numbers until they are changed.
    is_published: bool,
}

impl Subject for WithHandles {
    fn name(&self) -> String {
        "a volume mounted read-write, with handles".into()
    }

    fn features(&self) -> Features {
        Features::FULL
    }

    fn env(&self) -> Env {
        env()
    }

    fn make(&self, tree: Arc<Tree>) -> BoxFuture<'_, Result<Arc<dyn FileSystem>, String>> {
        Box::pin(async move { Ok(self.start(tree).await?.fs()) })
    }
}

impl RestartSubject for WithHandles {
    fn start(&self, tree: Arc<Tree>) -> BoxFuture<'_, Result<Box<dyn Restart>, String>> {
        Box::pin(async move {
            let blocks: Arc<dyn Blocks> = Arc::new(MemoryBlocks::new());
            let options =
                WriteOptions { read_key: self.read_key.clone(), ..WriteOptions::default() };
            let (tables, secret) = (TableFiles::new(), secret());
            let mut life = OwnedLife { blocks, secret, options, tables, fs: None };
            if self.is_published {
                let source = tempfile::tempdir().map_err(|error| error.to_string())?;
                kit::write_tree_to_disk(&tree, source.path()).map_err(|error| error.to_string())?;
                let (progress, recorder) = (Arc::new(NoProgress), Arc::new(NoLeaseRecorder));
                let (blocks, secret) = (life.blocks.clone(), &life.secret);
                publish(env(), blocks, source.path(), secret, small_blocks(), progress, recorder)
                    .await
                    .map_err(|error| error.to_string())?;
                life.begin().await?;
            } else {
                created(&life.blocks, self.read_key.as_ref(), 16).await;
                life.begin().await?;
                let fs = life.fs.as_ref().expect("is mounted");
                write_tree_to_fs(&tree, fs).await.map_err(|error| format!("{error:?}"))?;
            }
            Ok(Box::new(life) as Box<dyn Restart>)
        })
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_conforms_with_handles() {
    let subject = WithHandles { read_key: None, is_published: false };
    kit::run_read_suite(&subject).await.assert_passes();
    kit::run_write_suite(&subject).await.assert_passes();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handles_last_over_restarts() {
    for read_key in [None, Some(ReadKey::from_bytes([3; 32]))] {
        let subject = WithHandles { read_key, is_published: false };
        let report = kit::run_restart_suite(&subject).await;
        report.assert_passes();
        assert_eq!(report.passed(), report.checks.len(), "nothing is skipped\n{report}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handles_of_a_published_tree_last_over_restarts() {
    let subject = WithHandles { read_key: None, is_published: true };
    let report = kit::run_restart_suite(&subject).await;
    report.assert_passes();
    assert_eq!(report.passed(), report.checks.len(), "nothing is skipped\n{report}");
}

async fn make(fs: &WritableFs, name: &str) -> (InodeNumber, PersistentHandle) {
    let made = fs.mknod(me(), ROOT, name.as_bytes(), REGULAR, 0o644, 0).await.expect("makes");
    let handle = fs.handle_of(made.attr.inode).await.expect("has a handle");
    fs.forget(made.attr.inode, 1);
    (made.attr.inode, handle)
}

async fn rename(fs: &WritableFs, from: &str, to: &str) {
    let flags = RenameFlags::default();
    let renamed = fs.rename(me(), ROOT, from.as_bytes(), ROOT, to.as_bytes(), flags).await;
    renamed.expect("renames");
}

/// A mount died after it had given a number away, and before any root or spool had it: the next
/// mount gave the number to another file.
#[tokio::test(start_paused = true)]
async fn a_number_that_a_crash_has_taken_is_not_used_again() {
    let blocks: Arc<dyn Blocks> = Arc::new(MemoryBlocks::new());
    created(&blocks, None, 16).await;
    let mut tables = TableFiles::new();
    let by_force = |table: Arc<HandleTable>| WriteOptions { take_over: true, ..with(&table) };
    let mut lost = BTreeMap::new();
    for life in 0..4 {
        let fs = mounted(&blocks, by_force(tables.next())).await.expect("mounts");
        for (handle, number) in &lost {
            assert_eq!(fs.by_handle(me(), handle).await, Err(Errno::ESTALE), "{number:?}");
        }
        let (number, handle) = make(&fs, "lost").await;
        assert_eq!(lost.insert(handle, number), None, "in life {life}");
        assert!(lost.values().filter(|lost| **lost == number).count() == 1, "in life {life}");
        // It dies: nothing of this is flushed.
    }
    // Also once a mount has ended in order, having made nothing.
    let fs = mounted(&blocks, by_force(tables.next())).await.expect("mounts");
    fs.end().await.expect("ends");
    let fs = mounted(&blocks, with(&tables.next())).await.expect("mounts");
    let (number, handle) = make(&fs, "lost").await;
    assert!(!lost.contains_key(&handle) && number.0 < 1 << 63);
    fs.end().await.expect("ends");
    // One that follows it passes over none.
    let fs = mounted(&blocks, with(&tables.next())).await.expect("mounts");
    assert_eq!(make(&fs, "next").await.0.0, number.0 + 1);
}

/// The table had the new name when the mount died, and the ring the old one.
#[tokio::test(start_paused = true)]
async fn a_rename_that_a_crash_undoes_leaves_the_handle() {
    let blocks: Arc<dyn Blocks> = Arc::new(MemoryBlocks::new());
    created(&blocks, None, 16).await;
    let mut tables = TableFiles::new();
    let fs = mounted(&blocks, with(&tables.next())).await.expect("mounts");
    let dir = fs.mkdir(me(), ROOT, b"dir", 0o755).await.expect("makes").attr.inode;
    let below = fs.mkdir(me(), dir, b"below", 0o755).await.expect("makes").attr.inode;
    let file = fs.mknod(me(), below, b"file", REGULAR, 0o644, 0).await.expect("makes").attr.inode;
    let handle = fs.handle_of(file).await.expect("has a handle");
    fs.sync().await.expect("flushes");
    let flags = RenameFlags::default();
    fs.rename(me(), below, b"file", dir, b"elsewhere", flags).await.expect("renames");
    fs.rename(me(), dir, b"below", ROOT, b"above", flags).await.expect("renames");
    rename(&fs, "dir", "renamed").await;

    let by_force = WriteOptions { take_over: true, ..with(&tables.next()) };
    let fs = mounted(&blocks, by_force).await.expect("takes over");
    assert_eq!(fs.by_handle(me(), &handle).await.expect("is there").attr.inode, file);
    fs.forget(file, 1);
    fs.check_invariants();
    assert_eq!(fs.files_in_memory(), 1);
}

/// A mount without a table, on another machine, renames and removes.
#[tokio::test(start_paused = true)]
async fn what_another_mount_has_renamed_is_stale_until_it_is_looked_up() {
    let blocks: Arc<dyn Blocks> = Arc::new(MemoryBlocks::new());
    created(&blocks, None, 16).await;
    let mut tables = TableFiles::new();
    let fs = mounted(&blocks, with(&tables.next())).await.expect("mounts");
    let (number, renamed) = make(&fs, "renamed").await;
    let (_, removed) = make(&fs, "removed").await;
    fs.end().await.expect("ends");
    let other = mounted(&blocks, WriteOptions::default()).await.expect("mounts");
    let found = other.lookup(me(), ROOT, b"renamed").await.expect("is there").attr;
    assert_eq!(other.handle_of(found.inode).await, Err(Errno::EOPNOTSUPP));
    assert_eq!(other.by_handle(me(), &renamed).await, Err(Errno::ESTALE));
    rename(&other, "renamed", "new").await;
    other.unlink(me(), ROOT, b"removed").await.expect("removes");
    rename(&other, "new", "removed").await;
    other.end().await.expect("ends");

    let fs = mounted(&blocks, with(&tables.next())).await.expect("mounts");
    for handle in [&renamed, &removed] {
        assert_eq!(fs.by_handle(me(), handle).await, Err(Errno::ESTALE));
    }
    let found = fs.lookup(me(), ROOT, b"removed").await.expect("is there").attr.inode;
    assert_eq!(found, number);
    assert_eq!(fs.handle_of(number).await, Ok(renamed.clone()));
    fs.end().await.expect("ends");
    let fs = mounted(&blocks, with(&tables.next())).await.expect("mounts");
    assert_eq!(fs.by_handle(me(), &renamed).await.expect("is there").attr.inode, number);
    assert_eq!(fs.by_handle(me(), &removed).await, Err(Errno::ESTALE));
}

/// A disk that does not take the table's entries gives out no handle that ends with the process.
#[tokio::test(start_paused = true)]
async fn a_full_table_drops_the_oldest_handle_and_looks_it_up_again() {
    let blocks: Arc<dyn Blocks> = Arc::new(MemoryBlocks::new());
    created(&blocks, None, 16).await;
    let place = tempfile::tempdir().expect("a directory");
    let table = HandleTable::with_limit(&place.path().join("handles"), 8).expect("opens");
    let fs = mounted(&blocks, with(&Arc::new(table))).await.expect("mounts");
    let (first, handle) = make(&fs, "first").await;
    for number in 0..20 {
        make(&fs, &number.to_string()).await;
    }
    fs.sync().await.expect("flushes");
    assert_eq!(fs.files_in_memory(), 1);
    assert_eq!(fs.by_handle(me(), &handle).await, Err(Errno::ESTALE));
    let found = fs.lookup(me(), ROOT, b"first").await.expect("is there").attr.inode;
    assert_eq!((found, fs.handle_of(found).await), (first, Ok(handle.clone())));
    fs.forget(first, 1);
    assert_eq!(fs.by_handle(me(), &handle).await.expect("is found").attr.inode, first);
}

/// An old state shows hard links and special files; each name is a file of its own.
#[tokio::test(start_paused = true)]
async fn names_of_a_written_volume_have_handles_where_it_is_only_read() {
    let blocks: Arc<dyn Blocks> = Arc::new(MemoryBlocks::new());
    created(&blocks, None, 16).await;
    let fs = mounted(&blocks, WriteOptions::default()).await.expect("mounts");
    let file = fs.mknod(me(), ROOT, b"one", REGULAR, 0o644, 0).await.expect("makes").attr.inode;
    fs.link(me(), file, ROOT, b"two").await.expect("links");
    fs.mknod(me(), ROOT, b"fifo", FileKind::Fifo, 0o644, 0).await.expect("makes");
    fs.end().await.expect("ends");
    let mut tables = TableFiles::new();
    let mut all = Vec::new();
    for life in 0..2 {
        let id = secret().volume_id();
        let volume = Volume::open(env(), blocks.clone(), id, VolumeOptions::default()).await;
        let fs = VolumeFs::new(env(), volume.expect("opens"), 0, 0).with_handles(tables.next());
        for (number, handle) in &all {
            let found = fs.by_handle(me(), handle).await.expect("is there");
            assert_eq!(found.attr.inode, *number);
        }
        for name in ["one", "two", "fifo"] {
            let found = fs.lookup(me(), ROOT, name.as_bytes()).await.expect("is there").attr.inode;
            let kept = (found, fs.handle_of(found).await.expect("has a handle"));
            assert_eq!(life == 1, all.contains(&kept), "{name}");
            all.push(kept);
        }
    }
    assert_eq!(all.iter().map(|(number, _)| number).collect::<BTreeSet<_>>().len(), 3);
}

/// A ring in memory.
struct Ring(MemoryBlocks);

impl OverMemory for Ring {
    fn memory(&self) -> &MemoryBlocks {
        &self.0
    }
}

/// Files by the user that each was made for, who is another one for each: so it is known after a
/// crash which file a handle has led to.
struct Story {
    seed: u64,
    dice: Dice,
    made: u32,
    handles: BTreeMap<u32, PersistentHandle>,
    /// Files that this mount has renamed: a crash may undo several renames, and a second one is
    /// forgotten.
    renamed: BTreeSet<u32>,
}

impl Story {
    fn place(&mut self) -> Vec<u8> {
        let name = |dice: &mut Dice| vec![b'a' + dice.below(3) as u8];
        let depth = self.dice.below(3);
        (0..=depth).map(|_| name(&mut self.dice)).collect::<Vec<_>>().join(&b'/')
    }

    /// The directory of a path, held, and the name there.
    async fn above<'p>(fs: &WritableFs, path: &'p [u8]) -> Result<(InodeNumber, &'p [u8]), Errno> {
        let mut at = ROOT;
        let mut names = path.split(|&b| b == b'/').peekable();
        loop {
            let name = names.next().expect("a path has a name");
            if names.peek().is_none() {
                return Ok((at, name));
            }
            let found = fs.lookup(me(), at, name).await;
            fs.forget(at, 1);
            at = found?.attr.inode;
        }
    }

    /// The user of a file.
    async fn user(fs: &WritableFs, parent: InodeNumber, name: &[u8]) -> Result<u32, Errno> {
        let found = fs.lookup(me(), parent, name).await?.attr;
        fs.forget(found.inode, 1);
        Ok(found.uid)
    }

    async fn step(&mut self, fs: &WritableFs) -> Result<(), Errno> {
        let path = self.place();
        let (parent, name) = Story::above(fs, &path).await?;
        let done = self.change(fs, parent, name).await;
        fs.forget(parent, 1);
        done
    }

    async fn change(
        &mut self,
        fs: &WritableFs,
        parent: InodeNumber,
        name: &[u8],
    ) -> Result<(), Errno> {
        match self.dice.below(12) {
            0..=4 => {
                let caller = Caller { uid: 1000 + self.made, ..me() };
                let made = match self.dice.below(2) {
                    0 => fs.mkdir(caller, parent, name, 0o755).await?,
                    _ => fs.mknod(caller, parent, name, REGULAR, 0o644, 0).await?,
                };
                self.made += 1;
                let handle = fs.handle_of(made.attr.inode).await.expect("has a handle");
                fs.forget(made.attr.inode, 1);
                self.handles.insert(caller.uid, handle);
            }
            5..=7 => {
                let to = self.place();
                let (new_parent, new_name) = Story::above(fs, &to).await?;
                let user = Story::user(fs, parent, name).await;
                if user.is_ok_and(|user| self.renamed.insert(user)) {
                    let flags = RenameFlags::default();
                    let renamed = fs.rename(me(), parent, name, new_parent, new_name, flags);
                    let _ = renamed.await;
                }
                fs.forget(new_parent, 1);
            }
            8 => fs.unlink(me(), parent, name).await?,
            9 => fs.rmdir(me(), parent, name).await?,
            10 => {
                let from = self.place();
                let (above, old) = Story::above(fs, &from).await?;
                if let Ok(found) = fs.lookup(me(), above, old).await {
                    let linked = fs.link(me(), found.attr.inode, parent, name).await;
                    fs.forget(found.attr.inode, 1 + u64::from(linked.is_ok()));
                }
                fs.forget(above, 1);
            }
            _ if self.dice.below(4) == 0 => drop(fs.sync().await),
            _ => tokio::time::sleep(Duration::from_millis(self.dice.below(2500))).await,
        }
        Ok(())
    }

    /// Which users' files there are.
    async fn users(fs: &WritableFs) -> BTreeSet<u32> {
        let mut users = BTreeSet::new();
        let mut waiting = vec![ROOT];
        while let Some(directory) = waiting.pop() {
            let handle = fs.opendir(me(), directory).await.expect("opens").handle;
            let all = fs.readdir(directory, handle, 0, 1000, true).await.expect("lists");
            for entry in all.into_iter().filter_map(|listed| listed.entry) {
                users.insert(entry.attr.uid);
                match entry.attr.kind {
                    FileKind::Directory => waiting.push(entry.attr.inode),
                    _ => fs.forget(entry.attr.inode, 1),
                }
            }
            fs.closedir(directory, handle).await.expect("closes");
            fs.forget(directory, 1);
        }
        users
    }

    /// That each handle leads to its file, and is stale if that is gone.
    async fn check(&self, fs: &WritableFs) {
        let seed = self.seed;
        let mut found = BTreeSet::new();
        for (user, handle) in &self.handles {
            match fs.by_handle(me(), handle).await {
                Ok(entry) => {
                    assert_eq!(entry.attr.uid, *user, "seed {seed}: another file");
                    fs.forget(entry.attr.inode, 1);
                    found.insert(*user);
                }
                Err(errno) => assert_eq!(errno, Errno::ESTALE, "seed {seed}: {user}"),
            }
        }
        assert_eq!(found, Story::users(fs).await, "seed {seed}");
        fs.check_invariants();
    }
}

/// Mounts crash after any change, and their machine forgets any part of what was not durable.
#[tokio::test(start_paused = true)]
async fn handles_lead_to_their_files_after_crashes_and_to_no_others() {
    let mut undone = 0;
    for seed in 0..40 {
        let ring = Arc::new(Ring(MemoryBlocks::new()));
        let (spool, mut tables) = (MemorySpool::default(), TableFiles::new());
        let blocks: Arc<dyn Blocks> = ring.clone();
        created(&blocks, None, 16).await;
        let mut story = Story {
            seed,
            dice: Dice(seed),
            made: 0,
            handles: BTreeMap::new(),
            renamed: BTreeSet::new(),
        };
        for _ in 0..6 {
            let machine = Arc::new(Crashing::new(&ring, &spool));
            let blocks: Arc<dyn Blocks> = machine.clone();
            let options = with(&tables.next());
            let fs = mounted_with(&blocks, options, Some(machine.spool.clone())).await;
            let fs = fs.expect("mounts");
            assert_eq!(fs.set_aside(), None, "seed {seed}");
            story.check(&fs).await;
            story.renamed.clear();
            for _ in 0..30 {
                // Most names are not there, or are.
                let _ = story.step(&fs).await;
            }
            story.check(&fs).await;
            let there = Story::users(&fs).await.len();
            machine.crash(story.dice.below(100));
            undone += u64::from(there > 0);
        }
    }
    assert!(undone > 100, "{undone} mounts had files when they crashed");
}
