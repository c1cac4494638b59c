//! Copying a tree of plain files into a pool through the file system that it serves.
//!
//! Each file is made under a temporary name in the directory where it is to be, gets all its bytes, durably, and its attributes, and is then
//! renamed to its name, which replaces nothing: nobody sees half a file. The temporary name is a hash of the file and its path, so that another
//! run removes what one that was interrupted has left. A file that is there already with the same kind, size, time, mode and owner is passed
//! over; one that differs is reported, and stays as it is in the pool.
//!
//! The source is only read.

use std::collections::BTreeMap;

use atoll_vfs::{
    Attr, Caller, Errno, FileKind, FileSystem, FileTime, Handle, InodeNumber, OpenFlags,
    RenameFlags, SeekTo, SetAttr, SetTime, Writer, XattrFlags,
};
use bytes::Bytes;

use crate::disk::{ACCESS_LIST, DEFAULT_LIST, Disk, DiskResult, Stat};
use crate::member::xattr_names;
use crate::tree_survey::{ImportWalk, MAX_LISTED, TreeProblem, TreeStep, TreeSurvey, survey_tree};

/// What temporary names begin with.
const TEMPORARY: &str = ".atoll-import-";
/// Bytes of one write.
const PIECE_BYTES: u64 = 1 << 20;
/// How often a file is read that changes meanwhile.
const TRIES: usize = 2;

/// Why a file was not copied.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CopyProblem {
    /// The pool has another file there.
    #[error("the pool has another file there, which stays")]
    Differs,
    /// It was written while it was read.
    #[error("it changed while it was copied")]
    Changes,
    /// Another file system is mounted there.
    #[error("another file system is mounted there")]
    Mount,
    /// It cannot be read.
    #[error("cannot be read: {0}")]
    Unreadable(Errno),
    /// The pool refuses it.
    #[error("the pool does not take it: {0}")]
    Refused(Errno),
}

/// What a copy has done.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CopyReport {
    /// Names that the pool has got.
    pub files: u64,
    /// Bytes that were written.
    pub bytes: u64,
    /// Names that it had already.
    pub passed_over: u64,
    /// Bytes of those.
    pub passed_over_bytes: u64,
    /// Files that were not copied, by their paths below the tree's directory, and why: the first ones of each kind. What is below a directory of
    /// these was not looked at.
    pub problems: Vec<(Vec<u8>, CopyProblem)>,
    /// How many there are in all, without mounts.
    pub problems_in_all: u64,
    /// What is in the way: with a problem in it nothing was copied.
    pub survey: TreeSurvey,
    /// Why the copy ended before its end.
    pub stopped: Option<(Vec<u8>, Errno)>,
}

/// A directory whose files are to be copied.
#[derive(Debug)]
pub struct TreeSource<'a, D: Disk> {
    /// Its file system.
    pub disk: &'a D,
    /// The directory.
    pub dir: D::Node,
    /// The number of the file system on this machine.
    pub device: u64,
}

/// Copies all files below `source` into the directory `into` of a file system, given by its names from the root on; with `is_trial`, only looks
/// whether that can be. `progress` hears of each file, and first of what was found.
///
/// # Errors
/// If there is no such directory, or the source cannot be read at all.
pub async fn copy_tree_into<D: Disk>(
    source: &TreeSource<'_, D>,
    fs: &dyn FileSystem,
    into: &[Vec<u8>],
    is_trial: bool,
    progress: &(dyn Fn(&CopyReport) + Send + Sync),
) -> Result<CopyReport, Errno> {
    let top = find_directory(fs, into).await?;
    let (disk, path) = (source.disk, into.join(&b'/'));
    let ino = disk.stat(&source.dir).await?.ino;
    let (links, report) = (BTreeMap::new(), CopyReport::default());
    let device = source.device;
    let mut copy = TreeCopy { disk, device, fs, path, links, report, progress };
    // A mount of the pool shows it where the copy would come to itself.
    let mark = copy.temporary(ino, b"");
    match fs.mknod(me(), top, &mark, FileKind::Regular, 0o600, 0).await {
        Ok(made) => fs.forget(made.attr.inode, 1),
        Err(Errno::EEXIST) => {}
        Err(errno) => return Err(errno),
    }
    let survey = survey_tree(disk, &source.dir, Some(&mark)).await;
    let unmarked = fs.unlink(me(), top, &mark).await;
    let mut survey = survey?;
    unmarked?;
    // The rest is copied, or is reported when the copy comes to it.
    survey.problems.retain(|(_, problem)| is_in_the_way(*problem));
    survey.problems_in_all = survey.problems.len() as u64;
    let is_refused = !survey.problems.is_empty();
    copy.report.survey = survey;
    progress(&copy.report);
    if !is_refused && !is_trial {
        copy.copy_below(&source.dir, top).await?;
    }
    Ok(copy.report)
}

fn is_in_the_way(problem: TreeProblem) -> bool {
    match problem {
        TreeProblem::Pool | TreeProblem::Itself | TreeProblem::Depth => true,
        TreeProblem::Mount
        | TreeProblem::LikePlaceholder
        | TreeProblem::NameTaken
        | TreeProblem::Unreadable(_) => false,
    }
}

/// Root: files get their owners.
fn me() -> Caller {
    Caller::default()
}

async fn find_directory(fs: &dyn FileSystem, names: &[Vec<u8>]) -> Result<InodeNumber, Errno> {
    let mut inode = InodeNumber::ROOT;
    for name in names {
        let found = fs.lookup(me(), inode, name).await?;
        if found.attr.kind != FileKind::Directory {
            return Err(Errno::ENOTDIR);
        }
        inode = found.attr.inode;
    }
    Ok(inode)
}

/// Why one file was not copied.
enum EntryError {
    /// The others can be.
    OfFile(CopyProblem),
    /// Nothing more can be written.
    Stop(Errno),
}

/// A failed call that reads the source.
fn unreadable(errno: Errno) -> EntryError {
    EntryError::OfFile(CopyProblem::Unreadable(errno))
}

/// A failed call that writes to the pool.
fn unwritten(errno: Errno) -> EntryError {
    match errno {
        Errno::EEXIST => EntryError::OfFile(CopyProblem::Differs),
        Errno::ENAMETOOLONG
        | Errno::EOPNOTSUPP
        | Errno::E2BIG
        | Errno::EFBIG
        | Errno::EINVAL
        | Errno::EMLINK
        | Errno::EPERM
        | Errno::ERANGE
        // Somebody has removed the directory meanwhile, or has put one in the way.
        | Errno::ENOENT
        | Errno::ESTALE
        | Errno::ENOTDIR
        | Errno::ENOTEMPTY => EntryError::OfFile(CopyProblem::Refused(errno)),
        errno => EntryError::Stop(errno),
    }
}

/// A directory of the pool that is being filled.
#[derive(Clone, Copy)]
struct FilledDirectory {
    inode: InodeNumber,
    /// The source's directory.
    stat: Stat,
}

/// A file with several names: inode and generation, length and time, so that no other file that got the inode meanwhile is taken for it.
type LinkedFile = (u64, u64, u64, FileTime);

fn linked(stat: &Stat) -> LinkedFile {
    (stat.ino, stat.generation, stat.size_bytes, stat.mtime)
}

/// A file of the source.
struct Source<'a, D: Disk> {
    name: &'a Bytes,
    node: &'a D::Node,
    stat: Stat,
}

struct TreeCopy<'a, D: Disk> {
    disk: &'a D,
    device: u64,
    fs: &'a dyn FileSystem,
    /// Of the directory that gets the tree.
    path: Vec<u8>,
    /// The pool's files for those of the source that have several names.
    links: BTreeMap<LinkedFile, InodeNumber>,
    report: CopyReport,
    progress: &'a (dyn Fn(&CopyReport) + Send + Sync),
}

impl<D: Disk> TreeCopy<'_, D> {
    /// The temporary name of a file of the source.
    fn temporary(&self, ino: u64, name: &[u8]) -> Vec<u8> {
        let mut hasher = blake3::Hasher::new_derive_key("atoll pool import name 1");
        hasher.update(&self.device.to_be_bytes()).update(&ino.to_be_bytes());
        hasher.update(&(name.len() as u64).to_be_bytes()).update(name).update(&self.path);
        let hash = hasher.finalize();
        let first = hash.as_bytes().first_chunk().expect("a hash has 32 bytes");
        format!("{TEMPORARY}{:016x}", u64::from_be_bytes(*first)).into_bytes()
    }

    fn note(&mut self, path: Vec<u8>, problem: CopyProblem) {
        self.report.problems_in_all += u64::from(problem != CopyProblem::Mount);
        let of_kind = |(_, other): &&(Vec<u8>, CopyProblem)| *other == problem;
        if self.report.problems.iter().filter(of_kind).count() < MAX_LISTED {
            self.report.problems.push((path, problem));
        }
    }

    /// Copies all below a directory; what cannot be copied is noted.
    async fn copy_below(&mut self, source: &D::Node, top: InodeNumber) -> Result<(), Errno> {
        let stat = self.disk.stat(source).await?;
        let mut walk = ImportWalk::begin(self.disk, source).await?;
        let mut filled = vec![FilledDirectory { inode: top, stat }];
        while let Some(step) = walk.next().await {
            let Some(dir) = filled.last().copied() else { break };
            let (name, found) = match step {
                TreeStep::Left => {
                    filled.pop();
                    if let Err(errno) = self.end_directory(dir).await {
                        self.report.stopped = Some((walk.path(b"."), errno));
                        break;
                    }
                    continue;
                }
                TreeStep::Name(name, found) => (name, found),
            };
            match self.copy_step(&mut walk, (&name, found), dir).await {
                Ok(below) => filled.extend(below),
                Err(EntryError::OfFile(problem)) => self.note(walk.path(&name), problem),
                Err(EntryError::Stop(errno)) => {
                    self.report.stopped = Some((walk.path(&name), errno));
                    break;
                }
            }
            (self.progress)(&self.report);
        }
        if self.report.stopped.is_none()
            && let Err(errno) = self.fs.sync().await
        {
            self.report.stopped = Some((Vec::new(), errno));
        }
        Ok(())
    }

    /// Copies what the walk has come to, and enters a directory; that is to be filled then.
    async fn copy_step(
        &mut self,
        walk: &mut ImportWalk<'_, D>,
        (name, found): (&Bytes, DiskResult<(D::Node, Stat)>),
        dir: FilledDirectory,
    ) -> Result<Option<FilledDirectory>, EntryError> {
        let (node, stat) = match found {
            Ok(found) => found,
            // Somebody has removed it.
            Err(Errno::ENOENT) => return Ok(None),
            Err(Errno::EXDEV) => return Err(EntryError::OfFile(CopyProblem::Mount)),
            Err(errno) => return Err(unreadable(errno)),
        };
        let file = Source { name, node: &node, stat };
        let Some(inode) = self.copy_entry(&file, dir).await? else { return Ok(None) };
        walk.enter(name, &node).await.map_err(unreadable)?;
        Ok(Some(FilledDirectory { inode, stat }))
    }

    /// Everything is in a directory: it gets its times.
    async fn end_directory(&self, dir: FilledDirectory) -> Result<(), Errno> {
        let FilledDirectory { inode, stat, .. } = dir;
        if self.fs.getattr(inode, None).await?.attr.mtime != stat.mtime {
            self.fs.setattr(me(), inode, None, times_of(&stat)).await?;
        }
        self.fs.forget(inode, 1);
        Ok(())
    }

    /// Copies what stands under a name; the pool's directory, if it is one, without what is in it.
    async fn copy_entry(
        &mut self,
        file: &Source<'_, D>,
        dir: FilledDirectory,
    ) -> Result<Option<InodeNumber>, EntryError> {
        let stat = &file.stat;
        let is_directory = stat.kind == FileKind::Directory;
        let has_names = !is_directory && stat.nlink > 1;
        let size_bytes = if stat.kind == FileKind::Regular { allocated(stat) } else { 0 };
        match self.fs.lookup(me(), dir.inode, file.name).await {
            Ok(found) => {
                let inode = found.attr.inode;
                if !is_same(stat, &found.attr) {
                    self.fs.forget(inode, 1);
                    return Err(EntryError::OfFile(CopyProblem::Differs));
                }
                self.report.passed_over += 1;
                self.report.passed_over_bytes += size_bytes;
                if has_names {
                    self.links.entry(linked(stat)).or_insert(inode);
                } else if !is_directory {
                    self.fs.forget(inode, 1);
                }
                return Ok(is_directory.then_some(inode));
            }
            Err(Errno::ENOENT) => {}
            Err(errno) => return Err(unwritten(errno)),
        }
        if let Some(first) = self.links.get(&linked(stat)).filter(|_| has_names) {
            let named = self.fs.link(me(), *first, dir.inode, file.name).await;
            self.fs.forget(named.map_err(unwritten)?.attr.inode, 1);
            self.report.files += 1;
            self.report.passed_over_bytes += size_bytes;
            return Ok(None);
        }
        let temporary = self.temporary(stat.ino, file.name);
        let mut made = self.make(file, dir, &temporary).await;
        for _ in 1..TRIES {
            if matches!(made, Err(EntryError::OfFile(CopyProblem::Changes))) {
                made = self.make(file, dir, &temporary).await;
            }
        }
        let inode = match made {
            Ok(inode) => {
                let flags = RenameFlags { no_replace: true, exchange: false };
                let (from, to) = ((dir.inode, &temporary[..]), (dir.inode, &file.name[..]));
                let named = self.fs.rename(me(), from.0, from.1, to.0, to.1, flags).await;
                named.map_err(unwritten).map(|()| inode)
            }
            Err(error) => Err(error),
        };
        let inode = match inode {
            Ok(inode) => inode,
            Err(error) => {
                // What cannot be removed now is removed by the next run.
                let _ = self.remove(dir.inode, &temporary).await;
                return Err(error);
            }
        };
        self.report.files += 1;
        if has_names {
            self.links.insert(linked(stat), inode);
        } else if !is_directory {
            self.fs.forget(inode, 1);
        }
        Ok(is_directory.then_some(inode))
    }

    /// Makes a file under its temporary name, whole.
    async fn make(
        &mut self,
        file: &Source<'_, D>,
        dir: FilledDirectory,
        temporary: &[u8],
    ) -> Result<InodeNumber, EntryError> {
        let (fs, stat) = (self.fs, &file.stat);
        self.remove(dir.inode, temporary).await.map_err(unwritten)?;
        let (inode, stat) = match stat.kind {
            FileKind::Regular => {
                let open = self.disk.open(file.node).await.map_err(unreadable)?;
                let before = self.disk.stat_file(&open).await.map_err(unreadable)?;
                let flags = OpenFlags(OpenFlags::WRITE.0 | OpenFlags::EXCLUSIVE);
                let made = fs.create(me(), dir.inode, temporary, 0o600, flags).await;
                let (entry, opened) = made.map_err(unwritten)?;
                let to = (entry.attr.inode, opened.handle);
                let filled = self.fill(&open, &before, to).await;
                let closed = fs.close(to.0, to.1).await;
                filled?;
                closed.map_err(unwritten)?;
                let after = self.disk.stat_file(&open).await.map_err(unreadable)?;
                let changes = |stat: &Stat| (stat.size_bytes, stat.mtime, stat.ctime);
                if changes(&before) != changes(&after) {
                    fs.forget(to.0, 1);
                    return Err(EntryError::OfFile(CopyProblem::Changes));
                }
                (to.0, before)
            }
            FileKind::Directory => {
                let made = fs.mkdir(me(), dir.inode, temporary, 0o700).await;
                (made.map_err(unwritten)?.attr.inode, *stat)
            }
            FileKind::Symlink => {
                let target = self.disk.read_node(file.node).await.map_err(unreadable)?;
                let made = fs.symlink(me(), dir.inode, temporary, &target).await;
                (made.map_err(unwritten)?.attr.inode, *stat)
            }
            kind => {
                let made = fs.mknod(me(), dir.inode, temporary, kind, 0o600, stat.rdev).await;
                (made.map_err(unwritten)?.attr.inode, *stat)
            }
        };
        match self.set_attributes(file.node, &stat, inode).await {
            Ok(()) => Ok(inode),
            Err(error) => {
                fs.forget(inode, 1);
                Err(error)
            }
        }
    }

    /// Removes what has a temporary name: a run that was interrupted has left it.
    async fn remove(&self, dir: InodeNumber, temporary: &[u8]) -> Result<(), Errno> {
        let removed = match self.fs.unlink(me(), dir, temporary).await {
            Err(Errno::EISDIR) => self.fs.rmdir(me(), dir, temporary).await,
            removed => removed,
        };
        match removed {
            Err(Errno::ENOENT) => Ok(()),
            removed => removed,
        }
    }

    /// Copies the bytes of a file, but for its holes, and makes them durable.
    async fn fill(
        &mut self,
        from: &D::File,
        stat: &Stat,
        (inode, handle): (InodeNumber, Handle),
    ) -> Result<(), EntryError> {
        let (mut at, size) = (0, stat.size_bytes);
        while at < size {
            let start = match self.disk.seek(from, at, SeekTo::Data).await {
                Ok(start) => start,
                Err(Errno::ENXIO) => break,
                // This disk does not say.
                Err(Errno::EINVAL | Errno::EOPNOTSUPP) => at,
                Err(errno) => return Err(unreadable(errno)),
            };
            let end = match self.disk.seek(from, start, SeekTo::Hole).await {
                Ok(end) => end.min(size),
                // It was cut off meanwhile, which is found out at the end.
                Err(Errno::ENXIO) => break,
                Err(Errno::EINVAL | Errno::EOPNOTSUPP) => size,
                Err(errno) => return Err(unreadable(errno)),
            };
            at = start;
            while at < end {
                let len = usize::try_from((end - at).min(PIECE_BYTES)).unwrap_or(usize::MAX);
                let read = self.disk.read(from, at, len).await.map_err(unreadable)?;
                if read.is_empty() {
                    break;
                }
                self.write(&read, at, (inode, handle)).await.map_err(unwritten)?;
                at += read.len() as u64;
                self.report.bytes += read.len() as u64;
                (self.progress)(&self.report);
            }
            if at < end {
                break;
            }
        }
        let length = SetAttr { size_bytes: Some(size), ..SetAttr::default() };
        self.fs.setattr(me(), inode, Some(handle), length).await.map_err(unwritten)?;
        self.fs.fsync(inode, handle, false).await.map_err(unwritten)
    }

    async fn write(
        &self,
        data: &Bytes,
        offset: u64,
        (inode, handle): (InodeNumber, Handle),
    ) -> Result<(), Errno> {
        let mut at = 0;
        while at < data.len() {
            let (to, piece) = (offset + at as u64, data.slice(at..));
            match self.fs.write(Writer::At(me()), inode, handle, to, piece).await? {
                0 => return Err(Errno::EIO),
                written => at += written as usize,
            }
        }
        Ok(())
    }

    /// Gives a new file owner, extended attributes, mode and times, in this order: each takes something of those after it away.
    async fn set_attributes(
        &self,
        node: &D::Node,
        stat: &Stat,
        inode: InodeNumber,
    ) -> Result<(), EntryError> {
        let owner = SetAttr { uid: Some(stat.uid), gid: Some(stat.gid), ..SetAttr::default() };
        self.fs.setattr(me(), inode, None, owner).await.map_err(unwritten)?;
        // The directory may have got a default list meanwhile.
        if stat.kind != FileKind::Symlink {
            for list in [ACCESS_LIST, DEFAULT_LIST] {
                match self.fs.removexattr(me(), inode, list).await {
                    Ok(()) | Err(Errno::ENODATA | Errno::EOPNOTSUPP) => {}
                    Err(errno) => return Err(unwritten(errno)),
                }
            }
        }
        for name in xattr_names(self.disk, node).await.map_err(unreadable)? {
            let value = match self.disk.xattr(node, &name).await {
                Err(Errno::ENODATA) => continue,
                value => value.map_err(unreadable)?,
            };
            let flags = XattrFlags::default();
            match self.fs.setxattr(me(), inode, &name, value, flags).await {
                // Attributes that file systems have for themselves are not a file's.
                Err(Errno::EOPNOTSUPP) if !is_list(&name) && !name.starts_with(b"user.") => {
                    tracing::warn!("attribute {} is left out", String::from_utf8_lossy(&name));
                }
                set => set.map_err(unwritten)?,
            }
        }
        let mode = (stat.kind != FileKind::Symlink).then_some(stat.mode);
        let changes = SetAttr { mode, ..times_of(stat) };
        self.fs.setattr(me(), inode, None, changes).await.map_err(unwritten)?;
        Ok(())
    }
}

fn is_list(name: &[u8]) -> bool {
    name == ACCESS_LIST || name == DEFAULT_LIST
}

fn times_of(stat: &Stat) -> SetAttr {
    let (atime, mtime) = (Some(SetTime::To(stat.atime)), Some(SetTime::To(stat.mtime)));
    SetAttr { atime, mtime, ..SetAttr::default() }
}

/// Bytes that take room.
fn allocated(stat: &Stat) -> u64 {
    stat.size_bytes.min(stat.blocks_512.saturating_mul(512))
}

/// Whether the pool has a file already, as far as attributes tell.
fn is_same(stat: &Stat, found: &Attr) -> bool {
    let (is_link, is_directory) =
        (stat.kind == FileKind::Symlink, stat.kind == FileKind::Directory);
    let has_size = is_link || stat.kind == FileKind::Regular;
    found.kind == stat.kind
        && (found.uid, found.gid, found.rdev) == (stat.uid, stat.gid, stat.rdev)
        && (is_link || found.mode == stat.mode)
        && (is_directory || found.mtime == stat.mtime)
        && (!has_size || found.size_bytes == stat.size_bytes)
}
