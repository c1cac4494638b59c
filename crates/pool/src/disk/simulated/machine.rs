//! The machine under simulated disks: what its disk holds, what of that is durable, which processes run, and what is to go wrong
//! with their calls.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use atoll_env::Instant;
use atoll_vfs::{Errno, FileKind, FileTime};
use bytes::Bytes;

use super::DiskCall;
use super::contents::FileContents;
use super::generator::Generator;
use super::journal::{LogEntry, Loss, Synced};
use super::tree::{DiskLimits, DiskTree, Id, Inode, InodeBody, TreeChange, TreePlace};
use crate::disk::{DiskResult, Making};

/// A machine's disk and the processes that use it.
pub(super) struct Machine {
    /// How often it has crashed.
    pub(super) crashes: u64,
    /// The disk as processes see it.
    pub(super) live: DiskTree,
    /// The disk when everything was last made durable.
    pub(super) durable: DiskTree,
    /// Changes of names and attributes since.
    pub(super) log: Vec<LogEntry>,
    /// Which of them must outlive a crash.
    pub(super) required: BTreeSet<usize>,
    /// Files that were made durable since.
    pub(super) synced: BTreeMap<Id, Synced>,
    processes: BTreeMap<u64, Process>,
    next_process: u64,
    next_id: Id,
    last_generation: u64,
    locks: BTreeMap<Id, u64>,
    /// How many calls were made, of all processes.
    pub(super) calls: BTreeMap<DiskCall, u64>,
    pub(super) has_xattrs: bool,
    pub(super) latency: Duration,
    /// By the machine's clock.
    pub(super) hangs_until: Option<Instant>,
    pub(super) dice: Generator,
}

/// A process that uses the disk.
#[derive(Default)]
struct Process {
    is_dead: bool,
    /// Calls in flight at its death still arrive.
    is_late: bool,
    in_flight: usize,
    opens: BTreeMap<Id, usize>,
    faults: Faults,
}

/// What is to go wrong with the calls of a process.
#[derive(Default)]
pub(super) struct Faults {
    pub(super) next: Vec<(DiskCall, Errno)>,
    pub(super) after: Option<(u64, Errno)>,
    pub(super) stop_after: Option<u64>,
    pub(super) is_stopped: bool,
}

impl Faults {
    fn meet(&mut self, call: DiskCall) -> DiskResult<()> {
        if let Some(left) = self.stop_after.filter(|_| call.is_change() && !self.is_stopped) {
            self.is_stopped = left == 0;
            self.stop_after = Some(left.saturating_sub(1));
        }
        if self.is_stopped {
            return Err(Errno::EIO);
        }
        if let Some(at) = self.next.iter().position(|(kind, _)| *kind == call) {
            return Err(self.next.remove(at).1);
        }
        match self.after {
            Some((0, errno)) => {
                self.after = None;
                Err(errno)
            }
            Some((left, errno)) => {
                self.after = Some((left - 1, errno));
                Ok(())
            }
            None => Ok(()),
        }
    }
}

impl Machine {
    pub(super) fn new(limits: DiskLimits, now: FileTime) -> Machine {
        let live = DiskTree::new(limits, now, 1);
        Machine {
            crashes: 0,
            durable: live.clone(),
            live,
            log: Vec::new(),
            required: BTreeSet::new(),
            synced: BTreeMap::new(),
            processes: BTreeMap::new(),
            next_process: 0,
            next_id: super::tree::TOP + 1,
            last_generation: 1,
            locks: BTreeMap::new(),
            calls: BTreeMap::new(),
            has_xattrs: true,
            latency: Duration::ZERO,
            hangs_until: None,
            dice: Generator(0),
        }
    }

    // --- processes

    pub(super) fn start_process(&mut self) -> u64 {
        self.next_process += 1;
        self.processes.insert(self.next_process, Process::default());
        self.next_process
    }

    /// Faults of a process; those of one that has ended are nobody's.
    pub(super) fn faults(&mut self, process: u64) -> Option<&mut Faults> {
        Some(&mut self.processes.get_mut(&process)?.faults)
    }

    /// A call sets out; it is refused if its process is dead.
    pub(super) fn set_out(&mut self, process: u64) -> DiskResult<()> {
        match self.processes.get_mut(&process) {
            Some(process) if !process.is_dead => {
                process.in_flight += 1;
                Ok(())
            }
            _ => Err(Errno::EIO),
        }
    }

    /// A call that has set out has arrived, or never will.
    pub(super) fn settle(&mut self, process: u64) {
        if let Some(found) = self.processes.get_mut(&process) {
            found.in_flight -= 1;
            if found.is_dead && found.in_flight == 0 {
                self.bury(process);
            }
        }
    }

    pub(super) fn check_alive(&self, process: u64) -> DiskResult<()> {
        match self.processes.get(&process) {
            Some(process) if !process.is_dead => Ok(()),
            _ => Err(Errno::EIO),
        }
    }

    /// Whether there are extended attributes at all.
    pub(super) fn check_xattrs(&self) -> DiskResult<()> {
        if self.has_xattrs { Ok(()) } else { Err(Errno::EOPNOTSUPP) }
    }

    /// A call is about to be made.
    pub(super) fn arrive(&mut self, process: u64, call: DiskCall) -> DiskResult<()> {
        *self.calls.entry(call).or_default() += 1;
        match self.processes.get_mut(&process) {
            Some(process) if !process.is_dead || process.is_late => process.faults.meet(call),
            _ => Err(Errno::EIO),
        }
    }

    /// Ends a process. What it has open and locked is free once none of its calls is in flight.
    pub(super) fn kill(&mut self, process: u64, is_late: bool) {
        if let Some(found) = self.processes.get_mut(&process).filter(|found| !found.is_dead) {
            (found.is_dead, found.is_late) = (true, is_late);
            if found.in_flight == 0 || !is_late {
                self.bury(process);
            }
        }
    }

    fn bury(&mut self, process: u64) {
        self.processes.remove(&process);
        self.unlock(process);
        self.remove_unused();
    }

    pub(super) fn kill_all(&mut self) {
        self.processes.clear();
        self.locks.clear();
    }

    pub(super) fn lock(&mut self, process: u64, id: Id) -> DiskResult<()> {
        match self.locks.contains_key(&id) {
            true => Err(Errno::EAGAIN),
            false => {
                self.locks.insert(id, process);
                Ok(())
            }
        }
    }

    pub(super) fn unlock(&mut self, process: u64) {
        self.locks.retain(|_, holder| *holder != process);
    }

    // --- open files

    pub(super) fn hold(&mut self, process: u64, id: Id) {
        if let Some(process) = self.processes.get_mut(&process) {
            *process.opens.entry(id).or_default() += 1;
        }
    }

    pub(super) fn let_go(&mut self, process: u64, id: Id) {
        let Some(process) = self.processes.get_mut(&process) else { return };
        if let Some(count) = process.opens.get_mut(&id) {
            *count -= 1;
            if *count == 0 {
                process.opens.remove(&id);
                self.remove_if_unused(id);
            }
        }
    }

    fn is_open(&self, id: Id) -> bool {
        self.processes.values().any(|process| process.opens.contains_key(&id))
    }

    fn remove_if_unused(&mut self, id: Id) {
        if !self.is_open(id) {
            self.live.remove_if_nameless(id);
        }
    }

    fn remove_unused(&mut self) {
        let open: BTreeSet<Id> =
            self.processes.values().flat_map(|process| process.opens.keys().copied()).collect();
        self.live.remove_nameless(|id| open.contains(&id));
    }

    // --- changes

    /// Makes a change of names or attributes, and notes it for a crash.
    pub(super) fn change(&mut self, change: TreeChange, now: FileTime) -> DiskResult<()> {
        if let Some(effect) = self.live.apply(&change, now)? {
            let entry = LogEntry::new(&self.live, change, effect, now);
            self.log.push(entry);
            for id in [effect.file, effect.other].into_iter().flatten() {
                self.remove_if_unused(id);
            }
        }
        Ok(())
    }

    pub(super) fn make(
        &mut self,
        place: TreePlace,
        making: Making<'_>,
        mode: u32,
        now: FileTime,
    ) -> DiskResult<Id> {
        // As Linux: what can be told from the arguments alone comes first.
        match making {
            Making::Symlink([]) => return Err(Errno::ENOENT),
            Making::Symlink(target) if target.contains(&0) => return Err(Errno::EINVAL),
            Making::Symlink(target) if target.len() >= 4096 => return Err(Errno::ENAMETOOLONG),
            Making::Special(FileKind::Regular | FileKind::Directory | FileKind::Symlink, _) => {
                return Err(Errno::EINVAL);
            }
            _ => {}
        }
        self.live.check_vacant(&place)?;
        let parent = self.live.inode(place.0)?;
        let is_group_kept = parent.mode & 0o2000 != 0;
        let gid = if is_group_kept { parent.gid } else { 0 };
        let (mode, body) = match making {
            Making::File => (mode & 0o7777, InodeBody::Regular(FileContents::default())),
            Making::Directory => (
                mode & 0o1777 | if is_group_kept { 0o2000 } else { 0 },
                InodeBody::Directory { names: BTreeMap::new(), parent: place.0 },
            ),
            Making::Symlink(target) => (0o777, InodeBody::Symlink(Bytes::copy_from_slice(target))),
            Making::Special(kind, rdev) => (mode & 0o7777, InodeBody::Special(kind, rdev)),
        };
        let nanos = (now.secs as u64).wrapping_mul(1_000_000_000).wrapping_add(now.nanos.into());
        let generation = nanos.max(self.last_generation + 1);
        let id = self.next_id;
        let inode = Box::new(Inode {
            number: self.live.free_number(),
            generation,
            mode,
            nlink: if matches!(making, Making::Directory) { 2 } else { 1 },
            uid: 0,
            gid,
            atime: now,
            mtime: now,
            ctime: now,
            xattrs: BTreeMap::new(),
            body,
        });
        self.change(TreeChange::Make { place, id, inode }, now)?;
        (self.next_id, self.last_generation) = (id + 1, generation);
        Ok(id)
    }

    /// `open(2)` with `O_CREAT` and `O_NOFOLLOW` for a file of Atoll's own.
    pub(super) fn make_or_find(&mut self, place: TreePlace, now: FileTime) -> DiskResult<Id> {
        match self.live.find(&place) {
            Ok(id) => {
                self.check_openable(id)?;
                Ok(id)
            }
            Err(Errno::ENOENT) => self.make(place, Making::File, 0o600, now),
            Err(errno) => Err(errno),
        }
    }

    /// Whether a file can be read and written.
    pub(super) fn check_openable(&self, id: Id) -> DiskResult<()> {
        match self.live.inode(id)?.kind() {
            FileKind::Regular => Ok(()),
            FileKind::Directory => Err(Errno::EISDIR),
            FileKind::Symlink => Err(Errno::ELOOP),
            _ => Err(Errno::ENXIO),
        }
    }

    pub(super) fn contents(&self, id: Id) -> DiskResult<&FileContents> {
        match &self.live.inode(id)?.body {
            InodeBody::Regular(contents) => Ok(contents),
            _ => Err(Errno::EINVAL),
        }
    }

    /// Changes a file's bytes; `edit` gets how many blocks are free.
    pub(super) fn edit_contents<T>(
        &mut self,
        id: Id,
        now: FileTime,
        edit: impl FnOnce(&mut FileContents, u64) -> DiskResult<T>,
    ) -> DiskResult<T> {
        let room = self.live.free_blocks();
        self.live.edit(id, |inode| {
            let InodeBody::Regular(contents) = &mut inode.body else { return Err(Errno::EINVAL) };
            let done = edit(contents, room)?;
            (inode.mtime, inode.ctime) = (now, now);
            Ok(done)
        })?
    }

    /// Everything is lost that was not durable and is not `kept` by chance.
    pub(super) fn crash(&mut self, loss: Loss, seed: u64) {
        self.crashes += 1;
        self.kill_all();
        self.live = self.left(loss, Generator(seed));
        self.start_afresh();
    }

    /// Everything is durable now.
    pub(super) fn start_afresh(&mut self) {
        self.durable = self.live.clone();
        self.log.clear();
        self.required.clear();
        self.synced.clear();
    }
}
