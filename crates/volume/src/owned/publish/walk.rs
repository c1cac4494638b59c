//! Walking the source and putting its directories together.
//!
//! One thread walks the tree, directories in the order of their names, and queues the
//! regular files; the reader threads publish them. A directory is finished, and becomes
//! an entry of its parent, by the thread that adds the last of its entries; so directories
//! come after their children and no thread waits for another. Memory: the names
//! of the directories on the walker's path, and [`MAX_JOBS`] unfinished files. Entries
//! wait only for an earlier one of the same directory.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex};

use atoll_key::BlockHash;
use atoll_vfs::{FileKind, FileTime};
use bytes::Bytes;
use rustix::io::Errno;

use super::PublishError;
use super::file::{FileError, publish_file};
use super::run::{EmitError, FailOnPanic, Run, Stopped, Tallies, Top, Trouble};
use super::source::{DirError, Names, SourceDir, mode_of, mtime_of, xattrs_of};
use crate::format::build::DirectoryBuilder;
use crate::format::{Content, DirectoryEntry, MAX_DEPTH};

/// Files queued or being read. Each keeps its directory open, so this also bounds open
/// files (the usual limit is 1,024 a process).
const MAX_JOBS: usize = 256;

/// A directory of which some entries are not there yet.
struct Unfinished {
    parent: Option<(Arc<Unfinished>, usize)>,
    name: Bytes,
    mode: u32,
    mtime: FileTime,
    xattrs: Option<BlockHash>,
    path: PathBuf,
    total: usize,
    entries: Mutex<Entries>,
}

#[derive(Default)]
struct Entries {
    builder: DirectoryBuilder,
    /// Entries before this one are in the builder.
    next: usize,
    /// Later ones that came early; `None` for what is left out.
    early: BTreeMap<usize, Option<DirectoryEntry>>,
}

/// A file to publish.
struct Job {
    dir: Arc<SourceDir>,
    name: Bytes,
    into: Arc<Unfinished>,
    index: usize,
}

/// The files found and not begun.
#[derive(Default)]
struct Queue {
    jobs: Mutex<(VecDeque<Job>, bool)>,
    changed: Condvar,
}

impl Queue {
    fn push(&self, job: Job) {
        self.jobs.lock().expect("no holder of this lock panics").0.push_back(job);
        self.changed.notify_one();
    }

    fn close(&self) {
        self.jobs.lock().expect("no holder of this lock panics").1 = true;
        self.changed.notify_all();
    }

    fn pop(&self) -> Option<Job> {
        let mut held = self.jobs.lock().expect("no holder of this lock panics");
        loop {
            if let Some(job) = held.0.pop_front() {
                return Some(job);
            }
            if held.1 {
                return None;
            }
            held = self.changed.wait(held).expect("no holder of this lock panics");
        }
    }
}

/// Closes the queue however the walk ends, so that the readers end too.
struct CloseOnDrop(Arc<Queue>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Starts the threads that read the source. They end when it is read, or `run` stops.
pub(super) fn start(run: &Arc<Run>, top: SourceDir) -> std::io::Result<()> {
    // Files of this machine, not protocol: the simulator has no disk, and reads that
    // block must not hold up the runtime's workers.
    let queue = Arc::new(Queue::default());
    let closer = CloseOnDrop(queue.clone());
    for index in 0..run.options.reader_threads {
        let (run, queue) = (run.clone(), queue.clone());
        std::thread::Builder::new().name(format!("publish-read-{index}")).spawn(move || {
            let _guard = FailOnPanic(run.clone());
            while let Some(job) = queue.pop() {
                read(&run, job);
            }
        })?;
    }
    let run = run.clone();
    std::thread::Builder::new().name("publish-walk".into()).spawn(move || {
        let _guard = FailOnPanic(run.clone());
        let walker = Walker { run: &run, queue: &closer.0 };
        // Not an error here: the thread that stopped the run has recorded why.
        let _ = walker.directory(Arc::new(top), None, Bytes::new(), 0);
    })?;
    Ok(())
}

/// A reader's work on one file.
fn read(run: &Run, job: Job) {
    if run.is_stopped() {
        return;
    }
    let published = match publish_file(run, &job.dir, &job.name) {
        Ok(entry) => Ok(Some(entry)),
        Err(FileError::Stopped) => return,
        Err(FileError::Vanished) => Ok(None),
        Err(FileError::Special) => {
            Tallies::add(&run.tallies.special, 1);
            Ok(None)
        }
        Err(FileError::Changed) => Err(Trouble::Changing),
        Err(FileError::Unreadable(reason)) => Err(Trouble::Unreadable(reason)),
    };
    let stand_in = |trouble| run.stand_in(job.dir.path_of(&job.name), trouble);
    let Ok(entry) = published.or_else(stand_in) else { return };
    run.end_job();
    // Not an error here: the thread that stopped the run has recorded why.
    let _ = complete(run, job.into, job.index, entry);
}

struct Walker<'a> {
    run: &'a Run,
    queue: &'a Queue,
}

impl Walker<'_> {
    /// Queues all of a directory's files and walks its subdirectories.
    fn directory(
        &self,
        dir: Arc<SourceDir>,
        parent: Option<(Arc<Unfinished>, usize)>,
        name: Bytes,
        depth: usize,
    ) -> Result<(), Stopped> {
        let (names, node) = match self.open(&dir, depth, &name, parent.clone()) {
            Ok(opened) => opened,
            Err(error) => {
                return match parent {
                    Some((into, index)) => self.unopened(dir.path.clone(), error, into, index),
                    None => Err(self.unopened_top(error)),
                };
            }
        };
        Tallies::add(&self.run.tallies.dirs, 1);
        if node.total == 0 {
            return finish(self.run, node);
        }
        for (index, (name, kind)) in names.iter().enumerate() {
            self.entry(&dir, &node, index, name, kind, depth)?;
        }
        Ok(())
    }

    fn open(
        &self,
        dir: &SourceDir,
        depth: usize,
        name: &Bytes,
        parent: Option<(Arc<Unfinished>, usize)>,
    ) -> Result<(Names, Arc<Unfinished>), DirError> {
        if depth > MAX_DEPTH {
            let reason = format!("directories lie more than {MAX_DEPTH} deep in each other");
            return Err(DirError::Unreadable(reason));
        }
        let stat = rustix::fs::fstat(&dir.fd)?;
        let names = dir.names(&self.run.options)?;
        let xattrs = match xattrs_of(&dir.fd).map_err(DirError::Unreadable)? {
            Some(block) => Some(self.run.emit(block)?),
            None => None,
        };
        let node = Unfinished {
            parent,
            name: name.clone(),
            mode: mode_of(&stat),
            mtime: mtime_of(&stat),
            xattrs,
            path: dir.path.clone(),
            total: names.len(),
            entries: Mutex::default(),
        };
        Ok((names, Arc::new(node)))
    }

    fn entry(
        &self,
        dir: &Arc<SourceDir>,
        node: &Arc<Unfinished>,
        index: usize,
        name: &[u8],
        kind: FileKind,
        depth: usize,
    ) -> Result<(), Stopped> {
        let bytes = Bytes::copy_from_slice(name);
        match kind {
            FileKind::Regular => {
                self.run.begin_job(MAX_JOBS)?;
                self.queue.push(Job { dir: dir.clone(), name: bytes, into: node.clone(), index });
                Ok(())
            }
            FileKind::Directory => match dir.child(name, &self.run.options) {
                Ok(child) => {
                    let parent = Some((node.clone(), index));
                    self.directory(Arc::new(child), parent, bytes, depth + 1)
                }
                Err(error) => self.unopened(dir.path_of(name), error, node.clone(), index),
            },
            FileKind::Symlink => {
                let entry = match symlink(dir, bytes) {
                    Ok(entry) => {
                        Tallies::add(&self.run.tallies.symlinks, 1);
                        Some(entry)
                    }
                    Err(Errno::NOENT) => None,
                    Err(error) => {
                        let trouble = match error {
                            Errno::INVAL | Errno::STALE => Trouble::Changing,
                            _ => Trouble::Unreadable(error.to_string()),
                        };
                        self.run.stand_in(dir.path_of(name), trouble)?
                    }
                };
                complete(self.run, node.clone(), index, entry)
            }
            _ => {
                Tallies::add(&self.run.tallies.special, 1);
                complete(self.run, node.clone(), index, None)
            }
        }
    }

    /// Completes the entry of a directory that is not walked.
    fn unopened(
        &self,
        path: PathBuf,
        error: DirError,
        into: Arc<Unfinished>,
        index: usize,
    ) -> Result<(), Stopped> {
        let trouble = match error {
            DirError::Stopped => return Err(Stopped),
            DirError::Vanished => return complete(self.run, into, index, None),
            DirError::Withheld(reason) => {
                self.run.withheld(path, reason);
                return complete(self.run, into, index, None);
            }
            DirError::Replaced => Trouble::Changing,
            DirError::Unreadable(reason) => Trouble::Unreadable(reason),
        };
        let entry = self.run.stand_in(path, trouble)?;
        complete(self.run, into, index, entry)
    }

    /// Fails the publish: without its top directory there is nothing to publish.
    fn unopened_top(&self, error: DirError) -> Stopped {
        let path = PathBuf::new();
        match error {
            DirError::Stopped => {}
            DirError::Withheld(reason) => self.run.fail(PublishError::Withheld { path, reason }),
            DirError::Vanished | DirError::Replaced => {
                let reason = Errno::NOENT.to_string();
                self.run.fail(PublishError::Source { path, reason });
            }
            DirError::Unreadable(reason) => self.run.fail(PublishError::Source { path, reason }),
        }
        Stopped
    }
}

fn symlink(dir: &SourceDir, name: Bytes) -> rustix::io::Result<DirectoryEntry> {
    let stat = dir.stat(&name)?;
    let target = rustix::fs::readlinkat(&dir.fd, &name[..], Vec::new())?;
    Ok(DirectoryEntry {
        name,
        mode: mode_of(&stat),
        mtime: mtime_of(&stat),
        content: Content::Symlink(Bytes::from(target.into_bytes())),
        xattrs: None,
        owner: None,
    })
}

/// Puts entry `index` of a directory in its place, and finishes the directory (and its
/// parents) if it was the last.
fn complete(
    run: &Run,
    node: Arc<Unfinished>,
    index: usize,
    entry: Option<DirectoryEntry>,
) -> Result<(), Stopped> {
    let mut held = node.entries.lock().expect("no holder of this lock panics");
    held.early.insert(index, entry);
    let mut sink = |block| run.emit(block).map_err(EmitError::from);
    while let Some(entry) = {
        let next = held.next;
        held.early.remove(&next)
    } {
        held.next += 1;
        if let Some(entry) = entry {
            held.builder.push(&entry, &mut sink).map_err(|error| told(run, &node, error))?;
        }
    }
    let finished = held.next == node.total;
    drop(held);
    if finished { finish(run, node) } else { Ok(()) }
}

fn finish(run: &Run, node: Arc<Unfinished>) -> Result<(), Stopped> {
    let builder = {
        let mut held = node.entries.lock().expect("no holder of this lock panics");
        std::mem::take(&mut held.builder)
    };
    let mut sink = |block| run.emit(block).map_err(EmitError::from);
    let directory = builder.finish(&mut sink).map_err(|error| told(run, &node, error))?;
    let Unfinished { mode, mtime, xattrs, .. } = *node;
    match &node.parent {
        None => {
            run.finish(Top { mode, mtime, directory, xattrs });
            Ok(())
        }
        Some((parent, index)) => {
            let content = Content::Directory(directory);
            let owner = None;
            let entry =
                DirectoryEntry { name: node.name.clone(), mode, mtime, content, xattrs, owner };
            complete(run, parent.clone(), *index, Some(entry))
        }
    }
}

fn told(run: &Run, node: &Unfinished, error: EmitError) -> Stopped {
    if let EmitError::Format(error) = error {
        let path = node.path.clone();
        run.fail(PublishError::Source { path, reason: error.to_string() });
    }
    Stopped
}

/// Walks the source once more, beside the publish, to know how much there is to do.
pub(super) fn start_scan(run: &Arc<Run>, top: SourceDir) -> std::io::Result<()> {
    let run = run.clone();
    std::thread::Builder::new().name("publish-scan".into()).spawn(move || {
        scan(&run, &top, 0);
        run.progress.discovery_ended();
    })?;
    Ok(())
}

/// Counts a directory's files; errors are left to the walker to report.
fn scan(run: &Run, dir: &SourceDir, depth: usize) {
    let Ok(names) = dir.names(&run.options) else { return };
    let (mut files, mut bytes) = (0, 0);
    for (name, kind) in names.iter() {
        if run.is_stopped() {
            return;
        }
        match kind {
            FileKind::Regular => {
                files += 1;
                bytes += dir.stat(name).map_or(0, |stat| stat.st_size as u64);
            }
            FileKind::Directory if depth < MAX_DEPTH => {
                if let Ok(child) = dir.child(name, &run.options) {
                    scan(run, &child, depth + 1);
                }
            }
            _ => {}
        }
        if files == 1024 {
            run.progress.discovered(std::mem::take(&mut files), std::mem::take(&mut bytes));
        }
    }
    run.progress.discovered(files, bytes);
}

/// How many of each kind there were.
pub(super) fn count(counter: &std::sync::atomic::AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}
