//! A disk in memory that behaves as a file system of Linux does for a process of root, and breaks as one does.
//!
//! Modelled: all calls of [`Disk`] with Linux' errors in Linux' order; names that are linked, renamed and exchanged; files that
//! live on without names while they are open; inode numbers that are used again at once, with another generation; holes; space
//! for bytes, directories, long links and attributes, and inodes. A machine can lose power ([`SimulatedDisk::crash`]) or be set
//! back ([`SimulatedDisk::rollback`]), a process can be killed with calls in flight ([`SimulatedDisk::kill`]) or in the middle
//! of a change ([`SimulatedDisk::stop_after`]), calls can fail and take time. All of it is repeated from a seed.
//!
//! Not modelled: other users than root, access control lists that say more than a mode, `security.capability`, reads that change the access time, devices
//! and FIFOs that can be opened, `fallocate` modes beyond space, holes and zeros, bytes on the device that rot.
//!
//! Several processes can use one disk: each is a [`SimulatedDisk`] with its clones, made by [`SimulatedDisk::reopen`].

mod contents;
mod generator;
mod journal;
mod machine;
mod tree;

use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::Env;
use atoll_vfs::{Errno, FileTime, RenameFlags, SeekTo, StatFs, XattrFlags};
use bytes::Bytes;

use contents::{BLOCK, FileContents, MAX_BYTES};
use generator::Generator;
pub use journal::Loss;
use machine::{Faults, Machine};
use tree::{DiskLimits, DiskTree, Id, InodeBody, TOP, TreeChange, TreePlace};

use super::{DatabaseFile, Disk, DiskResult, Listed, Making, Stat, TimeToSet};

/// Room of a disk of which nothing was said: 16 GiB, a million files, as many links as a real disk promises.
const ROOM: DiskLimits = DiskLimits { blocks: 1 << 22, inodes: 1 << 20, links: 32_000 };
/// Nodes that may be kept open.
const MAX_NODES: usize = 1024;

/// Kinds of calls, for faults and counts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[allow(missing_docs)]
pub enum DiskCall {
    Node,
    Stat,
    Make,
    Link,
    Rename,
    Unlink,
    Rmdir,
    List,
    ReadLink,
    SetMode,
    SetOwner,
    SetTimes,
    Xattr,
    SetXattr,
    RemoveXattr,
    Open,
    Read,
    Write,
    SetLen,
    Allocate,
    Seek,
    SyncFile,
    SyncAll,
    StatFs,
    Database,
    DatabaseRead,
    DatabaseWrite,
    DatabaseSync,
    Lock,
}

impl DiskCall {
    /// Whether it changes the disk, or what is durable of it.
    fn is_change(self) -> bool {
        !matches!(
            self,
            DiskCall::Node
                | DiskCall::Stat
                | DiskCall::List
                | DiskCall::ReadLink
                | DiskCall::Xattr
                | DiskCall::Open
                | DiskCall::Read
                | DiskCall::Seek
                | DiskCall::StatFs
                | DiskCall::DatabaseRead
        )
    }
}

/// What becomes of the calls that a killed process has in flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InFlight {
    /// None is made.
    Lost,
    /// All are made, each when its time comes; until then the process' locks hold. (Those that a task of the simulator makes
    /// whose [`Env`] has ended are lost.)
    Late,
}

/// A disk as it once was.
#[derive(Clone)]
pub struct Snapshot(DiskTree);

impl fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Snapshot")
    }
}

/// See the module. Clones are the same process.
#[derive(Clone)]
pub struct SimulatedDisk {
    process: Arc<Process>,
    env: Env,
}

struct Process {
    machine: Arc<Mutex<Machine>>,
    number: u64,
}

impl Process {
    fn machine(&self) -> MutexGuard<'_, Machine> {
        self.machine.lock().expect("no holder of this lock panics")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.machine().unlock(self.number);
    }
}

/// An open file of a [`SimulatedDisk`].
#[derive(Clone)]
pub struct OpenFile(Arc<HeldNode>);

struct HeldNode {
    machine: Arc<Mutex<Machine>>,
    process: u64,
    id: Id,
}

impl Drop for HeldNode {
    fn drop(&mut self) {
        let mut machine = self.machine.lock().expect("no holder of this lock panics");
        machine.let_go(self.process, self.id);
    }
}

impl fmt::Debug for OpenFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OpenFile({})", self.0.id)
    }
}

impl fmt::Debug for SimulatedDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimulatedDisk(process {})", self.process.number)
    }
}

/// A call on its way; see [`Machine::settle`].
struct Underway(Arc<Process>);

impl Drop for Underway {
    fn drop(&mut self) {
        self.0.machine().settle(self.0.number);
    }
}

fn place(dir: &OpenFile, name: &[u8]) -> TreePlace {
    (dir.0.id, Bytes::copy_from_slice(name))
}

/// An owned [`Making`].
enum OwnMaking {
    Symlink(Bytes),
    Other(Making<'static>),
}

impl SimulatedDisk {
    /// An empty disk with the clock and the timers of `env`.
    pub fn new(env: Env) -> SimulatedDisk {
        let now = FileTime::from_unix_ms(env.unix_ms());
        let mut machine = Machine::new(ROOM, now);
        let number = machine.start_process();
        let machine = Arc::new(Mutex::new(machine));
        SimulatedDisk { process: Arc::new(Process { machine, number }), env }
    }

    /// The same disk for another process: after the end of this one, or beside it.
    pub fn reopen(&self) -> SimulatedDisk {
        let number = self.machine().start_process();
        let machine = self.process.machine.clone();
        SimulatedDisk { process: Arc::new(Process { machine, number }), env: self.env.clone() }
    }

    fn machine(&self) -> MutexGuard<'_, Machine> {
        self.process.machine()
    }

    fn faults<T: Default>(&self, set: impl FnOnce(&mut Faults) -> T) -> T {
        self.machine().faults(self.process.number).map(set).unwrap_or_default()
    }

    /// The machine loses power: all its processes end, and what was not durable is lost as [`Loss::Ordered`] says. Then
    /// [`Self::reopen`].
    pub fn crash(&self, seed: u64) {
        self.crash_with(Loss::Ordered, seed);
    }

    /// [`Self::crash`] with another kind of loss.
    pub fn crash_with(&self, loss: Loss, seed: u64) {
        self.machine().crash(loss, seed);
    }

    /// The process ends and the machine goes on: nothing is lost that has reached it. Then [`Self::reopen`].
    pub fn kill(&self, calls: InFlight) {
        self.machine().kill(self.process.number, calls == InFlight::Late);
    }

    /// The disk as it is now, as if all of it were durable.
    pub fn snapshot(&self) -> Snapshot {
        let mut tree = self.machine().live.clone();
        tree.remove_nameless(|_| false);
        Snapshot(tree)
    }

    /// Sets the disk back; all processes end. Then [`Self::reopen`].
    pub fn rollback(&self, to: &Snapshot) {
        let mut machine = self.machine();
        machine.kill_all();
        machine.crashes += 1;
        machine.live = to.0.clone();
        machine.start_afresh();
    }

    /// Sets how much fits. What is there stays, even if it is more.
    pub fn set_capacity(&self, bytes: u64, inodes: u64) {
        let limits = &mut self.machine().live.limits;
        (limits.blocks, limits.inodes) = (bytes / BLOCK, inodes);
    }

    /// Sets how many names a file, or subdirectories a directory, may have.
    pub fn set_max_links(&self, links: u32) {
        self.machine().live.limits.links = links;
    }

    /// Calls about extended attributes answer [`Errno::EOPNOTSUPP`] from now on.
    pub fn without_xattrs(&self) {
        self.machine().has_xattrs = false;
    }

    /// Each call first waits up to `bound`, by chance. A call is made even if its caller no longer waits for it.
    pub fn set_latency(&self, seed: u64, bound: Duration) {
        let mut machine = self.machine();
        (machine.latency, machine.dice) = (bound, Generator(seed));
    }

    /// No call is made for this time; those that wait are made then.
    pub fn hang_for(&self, time: Duration) {
        self.machine().hangs_until = Some(self.env.now() + time);
    }

    /// How many calls of this kind were made so far, also by processes that have ended.
    pub fn calls(&self, call: DiskCall) -> u64 {
        self.machine().calls.get(&call).copied().unwrap_or(0)
    }

    /// The next call of this kind by this process fails; several at one call after the other.
    pub fn fail_next(&self, call: DiskCall, errno: Errno) {
        self.faults(|faults| faults.next.push((call, errno)));
    }

    /// One call of this process fails after `calls` others.
    pub fn fail_after(&self, calls: u64, errno: Errno) {
        self.faults(|faults| faults.after = Some((calls, errno)));
    }

    /// How many calls are still to fail by [`Self::fail_next`] and [`Self::fail_after`].
    pub fn faults_left(&self) -> usize {
        self.faults(|faults| faults.next.len() + usize::from(faults.after.is_some()))
    }

    /// After `calls` calls that change or sync something no call of this process reaches the disk: all are [`Errno::EIO`].
    pub fn stop_after(&self, calls: u64) {
        self.faults(|faults| faults.stop_after = Some(calls));
    }

    /// Whether [`Self::stop_after`] has stopped the process.
    pub fn is_stopped(&self) -> bool {
        self.faults(|faults| faults.is_stopped)
    }

    /// Makes a call: at once, or in a task of its own once its time has come.
    async fn call<T: Send + 'static>(
        &self,
        call: DiskCall,
        files: &[&OpenFile],
        work: impl FnOnce(&mut Machine, FileTime) -> DiskResult<T> + Send + 'static,
    ) -> DiskResult<T> {
        if files.iter().any(|file| file.0.process != self.process.number) {
            return Err(Errno::EIO);
        }
        let (underway, latency) = {
            let mut machine = self.machine();
            machine.set_out(self.process.number)?;
            let bound = u64::try_from(machine.latency.as_nanos()).unwrap_or(u64::MAX - 1);
            let latency = Duration::from_nanos(match bound {
                0 => 0,
                bound => machine.dice.below(bound + 1),
            });
            let hangs = machine.hangs_until.map(|until| until.since(self.env.now()));
            let latency = latency.max(hangs.unwrap_or_default());
            (Underway(self.process.clone()), (!latency.is_zero() || bound > 0).then_some(latency))
        };
        let make = move |env: &Env, underway: Underway| {
            let now = FileTime::from_unix_ms(env.unix_ms());
            let mut machine = underway.0.machine();
            machine.arrive(underway.0.number, call)?;
            work(&mut machine, now)
        };
        let Some(latency) = latency else { return make(&self.env, underway) };
        let (done, answer) = futures_channel::oneshot::channel();
        let (env, held) =
            (self.env.clone(), files.iter().map(|file| (*file).clone()).collect::<Vec<_>>());
        let ready = self.env.sleep_until(self.env.now() + latency);
        self.env.spawn(Box::pin(async move {
            ready.await;
            let _ = done.send(make(&env, underway));
            drop(held);
        }));
        let answer = answer.await.unwrap_or(Err(Errno::EIO));
        // The answer to a process that has died meanwhile reaches nobody.
        let alive = self.machine().check_alive(self.process.number);
        alive.and(answer)
    }

    /// A call that changes names or attributes.
    async fn change(
        &self,
        call: DiskCall,
        files: &[&OpenFile],
        change: TreeChange,
    ) -> DiskResult<()> {
        self.call(call, files, move |machine, now| machine.change(change, now)).await
    }

    /// Lets a call open a file.
    fn opener(&self) -> impl FnOnce(&mut Machine, Id) -> OpenFile + Send + 'static {
        let (shared, process) = (self.process.machine.clone(), self.process.number);
        move |machine, id| {
            machine.hold(process, id);
            OpenFile(Arc::new(HeldNode { machine: shared, process, id }))
        }
    }

    async fn change_xattr(
        &self,
        call: DiskCall,
        node: &OpenFile,
        name: &[u8],
        value: Option<&[u8]>,
        flags: XattrFlags,
    ) -> DiskResult<()> {
        let name = Bytes::copy_from_slice(name);
        let value = value.map(Bytes::copy_from_slice);
        let change = TreeChange::SetXattr(node.0.id, name, value, flags);
        let work = move |machine: &mut Machine, now| {
            machine.check_xattrs()?;
            machine.change(change, now)
        };
        self.call(call, &[node], work).await
    }
}

impl Disk for SimulatedDisk {
    type Node = OpenFile;
    type File = OpenFile;

    fn top(&self) -> OpenFile {
        let open = self.opener();
        open(&mut self.machine(), TOP)
    }

    fn boot(&self) -> u64 {
        self.process.machine().crashes
    }

    fn now(&self) -> FileTime {
        FileTime::from_unix_ms(self.env.unix_ms())
    }

    fn max_nodes(&self) -> usize {
        MAX_NODES
    }

    async fn node(&self, dir: &OpenFile, name: &[u8]) -> DiskResult<OpenFile> {
        let (place, open) = (place(dir, name), self.opener());
        let work = move |machine: &mut Machine, _| {
            let id = machine.live.find(&place)?;
            Ok(open(machine, id))
        };
        self.call(DiskCall::Node, &[dir], work).await
    }

    async fn stat(&self, node: &OpenFile) -> DiskResult<Stat> {
        let id = node.0.id;
        self.call(DiskCall::Stat, &[node], move |machine, _| Ok(machine.live.inode(id)?.stat()))
            .await
    }

    async fn stat_at(&self, dir: &OpenFile, name: &[u8]) -> DiskResult<Stat> {
        let place = place(dir, name);
        let work = move |machine: &mut Machine, _| {
            let id = if place.1.is_empty() { place.0 } else { machine.live.find(&place)? };
            Ok(machine.live.inode(id)?.stat())
        };
        self.call(DiskCall::Stat, &[dir], work).await
    }

    async fn make(
        &self,
        dir: &OpenFile,
        name: &[u8],
        making: Making<'_>,
        mode: u32,
    ) -> DiskResult<()> {
        let place = place(dir, name);
        let making = match making {
            Making::Symlink(target) => OwnMaking::Symlink(Bytes::copy_from_slice(target)),
            Making::File => OwnMaking::Other(Making::File),
            Making::Directory => OwnMaking::Other(Making::Directory),
            Making::Special(kind, rdev) => OwnMaking::Other(Making::Special(kind, rdev)),
        };
        let work = move |machine: &mut Machine, now| {
            let making = match &making {
                OwnMaking::Symlink(target) => Making::Symlink(target),
                OwnMaking::Other(making) => *making,
            };
            machine.make(place, making, mode, now).map(drop)
        };
        self.call(DiskCall::Make, &[dir], work).await
    }

    async fn link(&self, node: &OpenFile, dir: &OpenFile, name: &[u8]) -> DiskResult<()> {
        let change = TreeChange::Link { id: node.0.id, place: place(dir, name) };
        self.change(DiskCall::Link, &[node, dir], change).await
    }

    async fn rename(
        &self,
        (dir, name): (&OpenFile, &[u8]),
        (new_dir, new_name): (&OpenFile, &[u8]),
        flags: RenameFlags,
    ) -> DiskResult<()> {
        let change =
            TreeChange::Rename { from: place(dir, name), to: place(new_dir, new_name), flags };
        self.change(DiskCall::Rename, &[dir, new_dir], change).await
    }

    async fn unlink(&self, dir: &OpenFile, name: &[u8]) -> DiskResult<()> {
        self.change(DiskCall::Unlink, &[dir], TreeChange::Unlink(place(dir, name))).await
    }

    async fn rmdir(&self, dir: &OpenFile, name: &[u8]) -> DiskResult<()> {
        self.change(DiskCall::Rmdir, &[dir], TreeChange::Rmdir(place(dir, name))).await
    }

    async fn list(&self, dir: &OpenFile) -> DiskResult<Vec<Listed>> {
        let id = dir.0.id;
        self.call(DiskCall::List, &[dir], move |machine, _| machine.live.list(id)).await
    }

    async fn read_link(&self, dir: &OpenFile, name: &[u8]) -> DiskResult<Bytes> {
        let place = place(dir, name);
        let work = move |machine: &mut Machine, _| {
            let (id, otherwise) = match place.1.is_empty() {
                true => (place.0, Errno::ENOENT),
                false => (machine.live.find(&place)?, Errno::EINVAL),
            };
            match &machine.live.inode(id)?.body {
                InodeBody::Symlink(target) => Ok(target.clone()),
                _ => Err(otherwise),
            }
        };
        self.call(DiskCall::ReadLink, &[dir], work).await
    }

    async fn read_node(&self, node: &OpenFile) -> DiskResult<Bytes> {
        self.read_link(node, b"").await
    }

    async fn set_mode(&self, node: &OpenFile, mode: u32) -> DiskResult<()> {
        self.change(DiskCall::SetMode, &[node], TreeChange::SetMode(node.0.id, mode)).await
    }

    async fn set_owner(
        &self,
        node: &OpenFile,
        uid: Option<u32>,
        gid: Option<u32>,
    ) -> DiskResult<()> {
        self.change(DiskCall::SetOwner, &[node], TreeChange::SetOwner(node.0.id, uid, gid)).await
    }

    async fn set_times(
        &self,
        node: &OpenFile,
        atime: Option<TimeToSet>,
        mtime: Option<TimeToSet>,
    ) -> DiskResult<()> {
        let id = node.0.id;
        let work = move |machine: &mut Machine, now| {
            let time = |time| match time {
                TimeToSet::Now => now,
                TimeToSet::To(time) => FileTime { nanos: time.nanos.min(999_999_999), ..time },
            };
            machine.change(TreeChange::SetTimes(id, atime.map(time), mtime.map(time)), now)
        };
        self.call(DiskCall::SetTimes, &[node], work).await
    }

    async fn xattr(&self, node: &OpenFile, name: &[u8]) -> DiskResult<Bytes> {
        let (id, name) = (node.0.id, Bytes::copy_from_slice(name));
        let work = move |machine: &mut Machine, _| {
            machine.check_xattrs()?;
            machine.live.xattr(id, &name)
        };
        self.call(DiskCall::Xattr, &[node], work).await
    }

    async fn xattrs(&self, node: &OpenFile) -> DiskResult<Vec<Bytes>> {
        let id = node.0.id;
        let work = move |machine: &mut Machine, _| {
            machine.check_xattrs()?;
            Ok(machine.live.inode(id)?.xattrs.keys().cloned().collect())
        };
        self.call(DiskCall::Xattr, &[node], work).await
    }

    async fn set_xattr(
        &self,
        node: &OpenFile,
        name: &[u8],
        value: &[u8],
        flags: XattrFlags,
    ) -> DiskResult<()> {
        self.change_xattr(DiskCall::SetXattr, node, name, Some(value), flags).await
    }

    async fn remove_xattr(&self, node: &OpenFile, name: &[u8]) -> DiskResult<()> {
        self.change_xattr(DiskCall::RemoveXattr, node, name, None, XattrFlags::default()).await
    }

    async fn open(&self, node: &OpenFile) -> DiskResult<OpenFile> {
        let (id, open) = (node.0.id, self.opener());
        let work = move |machine: &mut Machine, _| {
            machine.check_openable(id)?;
            Ok(open(machine, id))
        };
        self.call(DiskCall::Open, &[node], work).await
    }

    async fn stat_file(&self, file: &OpenFile) -> DiskResult<Stat> {
        self.stat(file).await
    }

    async fn read(&self, file: &OpenFile, offset: u64, len: usize) -> DiskResult<Bytes> {
        let id = file.0.id;
        let work = move |machine: &mut Machine, _| Ok(machine.contents(id)?.read(offset, len));
        self.call(DiskCall::Read, &[file], work).await
    }

    async fn write(&self, file: &OpenFile, offset: u64, data: &[u8]) -> DiskResult<usize> {
        if data.is_empty() {
            return Ok(0);
        }
        let (id, data) = (file.0.id, data.to_vec());
        let work = move |machine: &mut Machine, now| {
            machine.edit_contents(id, now, |contents, room| contents.write(offset, &data, room))
        };
        self.call(DiskCall::Write, &[file], work).await
    }

    async fn set_len(&self, file: &OpenFile, size_bytes: u64) -> DiskResult<()> {
        let id = file.0.id;
        let work = move |machine: &mut Machine, now| {
            machine.edit_contents(id, now, |contents, _| contents.set_len(size_bytes))
        };
        self.call(DiskCall::SetLen, &[file], work).await
    }

    async fn allocate(&self, file: &OpenFile, mode: i32, offset: u64, len: u64) -> DiskResult<()> {
        let id = file.0.id;
        let work = move |machine: &mut Machine, now| {
            let allocate =
                |contents: &mut FileContents, room| contents.allocate(mode, offset, len, room);
            machine.edit_contents(id, now, allocate)
        };
        self.call(DiskCall::Allocate, &[file], work).await
    }

    async fn seek(&self, file: &OpenFile, offset: u64, to: SeekTo) -> DiskResult<u64> {
        let id = file.0.id;
        self.call(DiskCall::Seek, &[file], move |machine, _| machine.contents(id)?.seek(offset, to))
            .await
    }

    async fn sync_file(&self, file: &OpenFile, data_only: bool) -> DiskResult<()> {
        let id = file.0.id;
        self.call(DiskCall::SyncFile, &[file], move |machine, _| machine.sync_file(id, data_only))
            .await
    }

    async fn sync_all(&self) -> DiskResult<()> {
        let work = |machine: &mut Machine, _| {
            machine.start_afresh();
            Ok(())
        };
        self.call(DiskCall::SyncAll, &[], work).await
    }

    async fn stat_fs(&self) -> DiskResult<StatFs> {
        let work = |machine: &mut Machine, _| {
            let live = &machine.live;
            Ok(StatFs {
                block_size_bytes: BLOCK as u32,
                blocks: live.limits.blocks,
                blocks_free: live.free_blocks(),
                blocks_available: live.free_blocks(),
                files: live.limits.inodes,
                files_free: live.free_inodes(),
                max_links: live.limits.links,
                max_file_bytes: MAX_BYTES,
                ..StatFs::default()
            })
        };
        self.call(DiskCall::StatFs, &[], work).await
    }

    async fn database(&self, dir: &OpenFile, name: &[u8]) -> DiskResult<Arc<dyn DatabaseFile>> {
        let (place, open) = (place(dir, name), self.opener());
        let work = move |machine: &mut Machine, now| {
            let id = machine.make_or_find(place, now)?;
            Ok(open(machine, id))
        };
        let file = self.call(DiskCall::Database, &[dir], work).await?;
        Ok(Arc::new(Database { env: self.env.clone(), file }))
    }

    async fn lock(&self, dir: &OpenFile, name: &[u8]) -> DiskResult<()> {
        let (place, process) = (place(dir, name), self.process.number);
        let work = move |machine: &mut Machine, now| {
            let id = machine.make_or_find(place, now)?;
            machine.lock(process, id)
        };
        self.call(DiskCall::Lock, &[dir], work).await
    }
}

/// A file under a database. Its calls take no time.
struct Database {
    env: Env,
    file: OpenFile,
}

impl Database {
    fn call<T>(
        &self,
        call: DiskCall,
        work: impl FnOnce(&mut Machine, Id, FileTime) -> DiskResult<T>,
    ) -> io::Result<T> {
        let now = FileTime::from_unix_ms(self.env.unix_ms());
        let held = &self.file.0;
        let mut machine = held.machine.lock().expect("no holder of this lock panics");
        machine.check_alive(held.process)?;
        machine.arrive(held.process, call)?;
        Ok(work(&mut machine, held.id, now)?)
    }
}

impl DatabaseFile for Database {
    fn size(&self) -> io::Result<u64> {
        self.call(DiskCall::DatabaseRead, |machine, id, _| Ok(machine.contents(id)?.size))
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let len = out.len();
        let read = |machine: &mut Machine, id, _| Ok(machine.contents(id)?.read(offset, len));
        let bytes = self.call(DiskCall::DatabaseRead, read)?;
        if bytes.len() < len {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        out.copy_from_slice(&bytes);
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let write = |machine: &mut Machine, id, now| {
            machine.edit_contents(id, now, |contents, room| contents.write(offset, data, room))
        };
        match self.call(DiskCall::DatabaseWrite, write)? {
            written if written < data.len() => Err(Errno::ENOSPC.into()),
            _ => Ok(()),
        }
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.call(DiskCall::DatabaseWrite, |machine, id, now| {
            machine.edit_contents(id, now, |contents, _| contents.set_len(len))
        })
    }

    fn sync(&self) -> io::Result<()> {
        self.call(DiskCall::DatabaseSync, |machine, id, _| machine.sync_file(id, true))
    }
}
