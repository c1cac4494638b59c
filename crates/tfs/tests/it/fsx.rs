//! Random calls on TFS and on the reference file system in memory, side by side, while
//! transparent files come, are read, and are lost beside them: ordinary files are always what
//! the reference says, transparent ones their own bytes or an error.
//!
//! In the manner of `fsx` (A. Tevanian, NeXT 1991), over all calls instead of one file's.

mod churn;

use std::collections::BTreeMap;
use std::sync::Arc;

use atoll_env::{Env, TokioRuntime};
use atoll_tfs::device::Device;
use atoll_tfs::fs::{MountOptions, Tfs};
use atoll_tfs::mkfs::mkfs;
use atoll_vfs::memory::MemoryFs;
use atoll_vfs::{
    Attr, Errno, FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, FALLOC_ZERO_RANGE, FileKind, FileSystem,
    FileTime, Handle, InodeNumber, OpenFlags, RenameFlags, SetAttr, SetTime, Writer, XattrFlags,
};
use bytes::Bytes;

use crate::calls::{ME, ROOT, contribution};
use crate::dice::Dice;
use crate::e2fsck::assert_image_clean;
use crate::mkfs::options;
use crate::sparse::SparseDevice;

/// The disk: ordinary files fill some of it, transparent ones want more than the rest.
const DISK_BYTES: usize = 32 << 20;
const MAX_DIRECTORIES: usize = 12;
const NAMES: u64 = 6;
const MAX_OPEN: usize = 12;
const MAX_TRANSPARENT: usize = 700;
const MAX_TRANSPARENT_OPEN: usize = 6;
/// Calls between remounts.
const REMOUNT_EVERY: u64 = 4000;
/// Remounts between visits of e2fsck and comparisons of the whole tree.
const CHECK_EVERY: u64 = 8;

/// What one call answers on TFS and on the reference: `$i` is 0 and 1.
macro_rules! both {
    ($self:ident, $what:expr, |$fs:ident, $i:ident| $call:expr) => {{
        let ours = {
            let ($fs, $i): (&dyn FileSystem, usize) = (&$self.ours, 0);
            $call.await
        };
        let theirs = {
            let ($fs, $i): (&dyn FileSystem, usize) = (&$self.reference, 1);
            $call.await
        };
        $self.agree($what, ours, theirs)
    }};
}

/// A file in both file systems.
type Pair = [InodeNumber; 2];

/// A transparent file: what it holds, and its handle while it is open.
struct Transparent {
    bytes: Vec<u8>,
    open: Option<Handle>,
}

pub(crate) struct Fsx {
    seed: u64,
    dice: Dice,
    calls: u64,
    remounts: u64,
    device: SparseDevice,
    pub ours: Tfs,
    pub reference: MemoryFs,
    directories: Vec<Pair>,
    open: Vec<(Pair, [Handle; 2])>,
    contributed: InodeNumber,
    transparent: BTreeMap<String, Transparent>,
    transparent_named: u64,
    pub transparent_reads: u64,
    pub transparent_lost: u64,
    random: Bytes,
}

fn mount(device: &SparseDevice) -> Tfs {
    let env = Arc::new(TokioRuntime::current());
    let quiet = MountOptions { background: false, ..MountOptions::default() };
    Tfs::mount(env, Arc::new(device.clone()), &quiet).unwrap().0
}

impl Fsx {
    pub(crate) async fn new(block_bytes: u32, seed: u64) -> Fsx {
        let device = SparseDevice::new(DISK_BYTES);
        mkfs(&(Arc::new(device.clone()) as Arc<dyn Device>), &options(block_bytes)).unwrap();
        let ours = mount(&device);
        ours.rmdir(ME, ROOT, b"lost+found").await.unwrap();
        let contributed = contribution(&ours).await;
        let env: Env = Arc::new(TokioRuntime::current());
        let mut dice = Dice::new(seed);
        let random: Vec<u8> = (0..1 << 17).map(|_| dice.next() as u8).collect();
        Fsx {
            seed,
            dice,
            calls: 0,
            remounts: 0,
            device,
            ours,
            reference: MemoryFs::new(env),
            directories: vec![[ROOT, ROOT]],
            open: Vec::new(),
            contributed,
            transparent: BTreeMap::new(),
            transparent_named: 0,
            transparent_reads: 0,
            transparent_lost: 0,
            random: Bytes::from(random),
        }
    }

    fn place(&self) -> String {
        format!("seed {}, call {}", self.seed, self.calls)
    }

    /// Both must have done it, or refused it for the same reason.
    fn agree<T>(
        &self,
        what: &str,
        ours: Result<T, Errno>,
        theirs: Result<T, Errno>,
    ) -> Option<[T; 2]> {
        match (ours, theirs) {
            (Ok(ours), Ok(theirs)) => Some([ours, theirs]),
            (Err(ours), Err(theirs)) if ours == theirs => None,
            (ours, theirs) => panic!(
                "{}: {what}: {:?}, the reference says {:?} ({:?})",
                self.place(),
                ours.err(),
                theirs.err(),
                self.ours.failure()
            ),
        }
    }

    fn same_attributes(&self, what: &str, [ours, theirs]: [Attr; 2]) {
        let of = |a: &Attr| (a.kind, a.mode, a.nlink, a.uid, a.gid, a.size_bytes, a.rdev);
        // A directory's length and number of names are each file system's own.
        if ours.kind == FileKind::Directory && theirs.kind == FileKind::Directory {
            assert_eq!(ours.mode, theirs.mode, "{}: {what}", self.place());
        } else {
            assert_eq!(of(&ours), of(&theirs), "{}: {what}", self.place());
        }
    }

    fn directory(&mut self) -> Pair {
        *self.dice.pick(&self.directories).unwrap()
    }

    fn name(&mut self) -> Vec<u8> {
        let name = self.dice.below(NAMES);
        // One that is long, so that directories grow.
        let tail = if name == 0 { "x".repeat(200) } else { String::new() };
        format!("n{name}{tail}").into_bytes()
    }

    fn bytes(&mut self, most: u64) -> Bytes {
        let len = (self.dice.below(most) + 1) as usize;
        let start = self.dice.below((self.random.len() - len) as u64) as usize;
        self.random.slice(start..start + len)
    }

    fn offset(&mut self) -> u64 {
        match self.dice.below(40) {
            0 => self.dice.below(70 << 20),
            1..4 => self.dice.below(1 << 20),
            _ => self.dice.below(48 << 10),
        }
    }

    /// The file of a name, if both have it.
    async fn find(&self, directory: Pair, name: &[u8]) -> Option<(Pair, FileKind)> {
        let found = both!(self, "lookup", |fs, i| fs.lookup(ME, directory[i], name))?;
        self.same_attributes("lookup", [found[0].attr, found[1].attr]);
        let pair = [found[0].attr.inode, found[1].attr.inode];
        self.ours.forget(pair[0], 1);
        self.reference.forget(pair[1], 1);
        Some((pair, found[0].attr.kind))
    }

    pub(crate) async fn run(&mut self, calls: u64) {
        for _ in 0..calls {
            self.calls += 1;
            match self.dice.below(100) {
                0..20 => self.write().await,
                20..40 => self.read().await,
                40..45 => self.truncate().await,
                45..48 => self.fallocate().await,
                48..58 => self.create().await,
                58..64 => self.close().await,
                64..68 => self.unlink().await,
                68..72 => self.rename().await,
                72..75 => self.link().await,
                75..77 => self.symlink().await,
                77..80 => self.xattrs().await,
                80..83 => self.directories().await,
                83..85 => self.list().await,
                85..87 => self.sync().await,
                87..90 => self.attributes().await,
                _ => self.churn().await,
            }
            if self.calls.is_multiple_of(REMOUNT_EVERY) {
                self.remount().await;
            }
        }
    }

    async fn write(&mut self) {
        let Some(&(file, handles)) = self.dice.pick(&self.open) else { return };
        let at = self.offset();
        let most = if self.dice.one_in(10) { 60_000 } else { 5000 };
        let bytes = self.bytes(most);
        let len = bytes.len();
        let done = both!(self, "write", |fs, i| fs.write(
            Writer::At(ME),
            file[i],
            handles[i],
            at,
            bytes.clone()
        ))
        .unwrap();
        assert_eq!(done[0] as usize, len, "{}: it fits", self.place());
    }

    async fn read(&mut self) {
        let Some(&(file, handles)) = self.dice.pick(&self.open) else { return };
        let (at, len) = (self.offset(), self.dice.below(40_000) as u32);
        let read = both!(self, "read", |fs, i| fs.read(file[i], handles[i], at, len)).unwrap();
        assert!(read[0] == read[1], "{}: other bytes at {at}+{len}", self.place());
    }

    async fn truncate(&mut self) {
        let Some(&(file, _)) = self.dice.pick(&self.open) else { return };
        let size = if self.dice.one_in(3) { 0 } else { self.offset() };
        let to = SetAttr { size_bytes: Some(size), ..SetAttr::default() };
        let set = both!(self, "truncate", |fs, i| fs.setattr(ME, file[i], None, to)).unwrap();
        self.same_attributes("truncate", [set[0].attr, set[1].attr]);
    }

    /// Space reserved, a hole punched, or a range zeroed; where space is reserved within a file,
    /// not beyond its end.
    async fn fallocate(&mut self) {
        let Some(&(file, handles)) = self.dice.pick(&self.open) else { return };
        let attrs = both!(self, "getattr", |fs, i| fs.getattr(file[i], None)).unwrap();
        let size = attrs[0].attr.size_bytes;
        let (mut at, mut len) = (self.offset(), self.dice.below(40_000) + 1);
        if self.dice.one_in(3) {
            at = at / 1024 * 1024;
            len = len.next_multiple_of(1024);
        }
        let within = at + len <= size;
        let mode = match self.dice.below(6) {
            0 => 0,
            1 if within => FALLOC_KEEP_SIZE,
            2 => FALLOC_ZERO_RANGE,
            3 if within => FALLOC_ZERO_RANGE | FALLOC_KEEP_SIZE,
            _ => FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE,
        };
        if mode & FALLOC_PUNCH_HOLE != 0 && self.dice.one_in(4) {
            // Through indirect blocks of all levels.
            len = 1 << self.dice.below(40);
        }
        both!(self, "fallocate", |fs, i| fs.fallocate(ME, file[i], handles[i], at, len, mode))
            .unwrap();
        let attrs = both!(self, "getattr", |fs, i| fs.getattr(file[i], None)).unwrap();
        self.same_attributes("fallocate", [attrs[0].attr, attrs[1].attr]);
    }

    async fn create(&mut self) {
        let (directory, name) = (self.directory(), self.name());
        let mut flags = OpenFlags::READ_WRITE;
        if self.dice.one_in(6) {
            flags.0 |= OpenFlags::EXCLUSIVE;
        }
        if self.dice.one_in(8) {
            flags.0 |= OpenFlags::TRUNCATE;
        }
        if let Some((_, kind)) = self.find(directory, &name).await
            && kind != FileKind::Regular
        {
            return;
        }
        let made = both!(self, "create", |fs, i| fs.create(ME, directory[i], &name, 0o640, flags));
        let Some([ours, theirs]) = made else { return };
        self.same_attributes("create", [ours.0.attr, theirs.0.attr]);
        let file = [ours.0.attr.inode, theirs.0.attr.inode];
        self.open.push((file, [ours.1.handle, theirs.1.handle]));
        if self.open.len() > MAX_OPEN {
            self.close().await;
        }
    }

    async fn close(&mut self) {
        if self.open.is_empty() {
            return;
        }
        let which = self.dice.below(self.open.len() as u64) as usize;
        self.close_one(which).await;
    }

    async fn close_one(&mut self, which: usize) {
        let (file, handles) = self.open.swap_remove(which);
        both!(self, "close", |fs, i| fs.close(file[i], handles[i])).unwrap();
        self.ours.forget(file[0], 1);
        self.reference.forget(file[1], 1);
    }

    async fn unlink(&mut self) {
        let (directory, name) = (self.directory(), self.name());
        both!(self, "unlink", |fs, i| fs.unlink(ME, directory[i], &name));
    }

    async fn rename(&mut self) {
        let (from, to) = (self.directory(), self.directory());
        let (old, new) = (self.name(), self.name());
        let flags = RenameFlags { no_replace: self.dice.one_in(5), exchange: false };
        let flags = RenameFlags { exchange: !flags.no_replace && self.dice.one_in(5), ..flags };
        let replaced = self.find(to, &new).await;
        let renamed =
            both!(self, "rename", |fs, i| fs.rename(ME, from[i], &old, to[i], &new, flags));
        if let (Some(_), Some((gone, FileKind::Directory)), false) =
            (renamed, replaced, flags.exchange)
        {
            // Unless it was renamed to itself.
            let still = self.find(to, &new).await;
            if still.is_none_or(|(pair, _)| pair != gone) {
                self.directories.retain(|directory| *directory != gone);
            }
        }
    }

    async fn link(&mut self) {
        let (from, to) = (self.directory(), self.directory());
        let (old, new) = (self.name(), self.name());
        let Some((file, kind)) = self.find(from, &old).await else { return };
        if kind == FileKind::Directory {
            return;
        }
        let linked = both!(self, "link", |fs, i| fs.link(ME, file[i], to[i], &new));
        if let Some([ours, theirs]) = linked {
            self.same_attributes("link", [ours.attr, theirs.attr]);
            self.ours.forget(ours.attr.inode, 1);
            self.reference.forget(theirs.attr.inode, 1);
        }
    }

    async fn symlink(&mut self) {
        let (directory, name) = (self.directory(), self.name());
        let target = vec![b't'; self.dice.below(300) as usize + 1];
        let made = both!(self, "symlink", |fs, i| fs.symlink(ME, directory[i], &name, &target));
        if let Some([ours, theirs]) = made {
            self.same_attributes("symlink", [ours.attr, theirs.attr]);
            self.ours.forget(ours.attr.inode, 1);
            self.reference.forget(theirs.attr.inode, 1);
        } else if let Some((link, FileKind::Symlink)) = self.find(directory, &name).await {
            let read = both!(self, "readlink", |fs, i| fs.readlink(link[i])).unwrap();
            assert_eq!(read[0], read[1], "{}: readlink", self.place());
        }
    }

    async fn xattrs(&mut self) {
        let (directory, name) = (self.directory(), self.name());
        let Some((file, kind)) = self.find(directory, &name).await else { return };
        if kind == FileKind::Symlink {
            return;
        }
        let attribute = format!("user.a{}", self.dice.below(3)).into_bytes();
        let flags = XattrFlags { create: self.dice.one_in(4), replace: false };
        let value = self.bytes(100);
        match self.dice.below(3) {
            0 | 1 => {
                both!(self, "setxattr", |fs, i| {
                    fs.setxattr(ME, file[i], &attribute, value.clone(), flags)
                });
            }
            _ => {
                both!(self, "removexattr", |fs, i| fs.removexattr(ME, file[i], &attribute));
            }
        }
        self.same_xattrs(file).await;
    }

    async fn same_xattrs(&self, file: Pair) {
        let mut names = both!(self, "listxattr", |fs, i| fs.listxattr(file[i])).unwrap();
        names.iter_mut().for_each(|names| names.sort());
        assert_eq!(names[0], names[1], "{}: names of attributes", self.place());
        for name in &names[0] {
            let read = both!(self, "getxattr", |fs, i| fs.getxattr(file[i], name)).unwrap();
            assert_eq!(read[0], read[1], "{}: value of an attribute", self.place());
        }
    }

    async fn directories(&mut self) {
        let (parent, name) = (self.directory(), self.name());
        if self.dice.one_in(2) && self.directories.len() < MAX_DIRECTORIES {
            let made = both!(self, "mkdir", |fs, i| fs.mkdir(ME, parent[i], &name, 0o755));
            if let Some([ours, theirs]) = made {
                self.same_attributes("mkdir", [ours.attr, theirs.attr]);
                self.directories.push([ours.attr.inode, theirs.attr.inode]);
                self.ours.forget(ours.attr.inode, 1);
                self.reference.forget(theirs.attr.inode, 1);
            }
            return;
        }
        let found = self.find(parent, &name).await;
        let removed = both!(self, "rmdir", |fs, i| fs.rmdir(ME, parent[i], &name));
        if let (Some(_), Some((gone, _))) = (removed, found) {
            self.directories.retain(|directory| *directory != gone);
        }
    }

    /// Lists a directory of both; the transparent files' own one does not count.
    async fn entries(&self, directory: Pair) -> Vec<(Vec<u8>, Pair, FileKind)> {
        let mut sides = Vec::new();
        for (fs, number) in
            [(&self.ours as &dyn FileSystem, directory[0]), (&self.reference, directory[1])]
        {
            let handle = fs.opendir(ME, number).await.unwrap().handle;
            let (mut all, mut cookie) = (Vec::new(), 0);
            loop {
                let part = fs.readdir(number, handle, cookie, 3, false).await.unwrap();
                let Some(last) = part.last() else { break };
                cookie = last.cookie;
                all.extend(part.into_iter().map(|e| (e.name.to_vec(), e.kind, e.inode)));
            }
            fs.closedir(number, handle).await.unwrap();
            all.retain(|(name, _, _)| name != b"contributed");
            all.sort_by(|a, b| a.0.cmp(&b.0));
            sides.push(all);
        }
        let [ours, theirs] = <[_; 2]>::try_from(sides).unwrap();
        let names = |side: &[(Vec<u8>, FileKind, InodeNumber)]| -> Vec<(String, FileKind)> {
            side.iter().map(|e| (String::from_utf8_lossy(&e.0).replace("xxxxx", ""), e.1)).collect()
        };
        assert_eq!(names(&ours), names(&theirs), "{}: a directory's entries", self.place());
        let pairs = ours.into_iter().zip(theirs);
        pairs.map(|(one, other)| (one.0, [one.2, other.2], one.1)).collect()
    }

    async fn list(&mut self) {
        let directory = self.directory();
        self.entries(directory).await;
    }

    async fn sync(&mut self) {
        if self.dice.one_in(4) {
            both!(self, "sync", |fs, _i| fs.sync()).unwrap();
        } else if let Some(&(file, handles)) = self.dice.pick(&self.open) {
            both!(self, "fsync", |fs, i| fs.fsync(file[i], handles[i], false)).unwrap();
        }
    }

    async fn attributes(&mut self) {
        let (directory, name) = (self.directory(), self.name());
        let Some((file, kind)) = self.find(directory, &name).await else { return };
        if kind == FileKind::Symlink {
            return;
        }
        let secs = self.dice.below(1 << 33) as i64 - (1 << 30);
        let time = FileTime { secs, nanos: self.dice.below(1_000_000_000) as u32 };
        let changes = SetAttr {
            mode: Some(self.dice.below(0o10000) as u32),
            uid: self.dice.one_in(2).then_some(self.dice.next() as u32 >> 1),
            mtime: Some(SetTime::To(time)),
            ..SetAttr::default()
        };
        let set = both!(self, "setattr", |fs, i| fs.setattr(ME, file[i], None, changes)).unwrap();
        self.same_attributes("setattr", [set[0].attr, set[1].attr]);
        let got = both!(self, "getattr", |fs, i| fs.getattr(file[i], None)).unwrap();
        assert_eq!(got[0].attr.mtime, got[1].attr.mtime, "{}: mtime", self.place());
    }

    /// Unmounts TFS.
    async fn unmount(&mut self) {
        while !self.open.is_empty() {
            self.close_one(0).await;
        }
        for (name, file) in &mut self.transparent {
            if let Some(handle) = file.open.take() {
                let entry = self.ours.lookup(ME, self.contributed, name.as_bytes()).await.unwrap();
                self.ours.close(entry.attr.inode, handle).await.unwrap();
                self.ours.forget(entry.attr.inode, 2);
            }
        }
        assert_eq!(self.ours.failure(), None);
        self.ours.unmount().unwrap();
    }

    async fn remount(&mut self) {
        self.unmount().await;
        self.remounts += 1;
        let check = self.remounts.is_multiple_of(CHECK_EVERY);
        if check {
            assert_image_clean(self.device.image_without(|_| false).path(), &self.place());
        }
        self.ours = mount(&self.device);
        if check {
            self.same_trees().await;
        }
    }

    /// Everything in the two is the same.
    pub(crate) async fn same_trees(&self) {
        let mut pending = vec![[ROOT, ROOT]];
        while let Some(directory) = pending.pop() {
            for (_, file, kind) in self.entries(directory).await {
                let attrs = both!(self, "getattr", |fs, i| fs.getattr(file[i], None)).unwrap();
                self.same_attributes("the whole tree", [attrs[0].attr, attrs[1].attr]);
                match kind {
                    FileKind::Directory => pending.push(file),
                    FileKind::Regular => self.same_contents(file).await,
                    _ => {
                        let read = both!(self, "readlink", |fs, i| fs.readlink(file[i])).unwrap();
                        assert_eq!(read[0], read[1], "{}: readlink", self.place());
                    }
                }
                if kind != FileKind::Symlink {
                    self.same_xattrs(file).await;
                }
            }
        }
    }

    async fn same_contents(&self, file: Pair) {
        const PIECE: u32 = 1 << 20;
        let opened = both!(self, "open", |fs, i| fs.open(ME, file[i], OpenFlags::READ)).unwrap();
        let handles = [opened[0].handle, opened[1].handle];
        for at in (0..).step_by(PIECE as usize) {
            let read = both!(self, "read", |fs, i| fs.read(file[i], handles[i], at, PIECE));
            let [ours, theirs] = read.unwrap();
            assert!(ours == theirs, "{}: other bytes in {at}+{PIECE}", self.place());
            if ours.len() < PIECE as usize {
                break;
            }
        }
        both!(self, "close", |fs, i| fs.close(file[i], handles[i])).unwrap();
    }

    /// Unmounts for the last time: the device, and what transparent files held.
    pub(crate) async fn finish(mut self) -> (SparseDevice, MemoryFs, BTreeMap<String, Vec<u8>>) {
        self.same_trees().await;
        self.unmount().await;
        assert_image_clean(self.device.image_without(|_| false).path(), &self.place());
        let held = self.transparent.into_iter().map(|(name, file)| (name, file.bytes)).collect();
        (self.device, self.reference, held)
    }
}

async fn check(block_bytes: u32, seed: u64, calls: u64) {
    let mut fsx = Fsx::new(block_bytes, seed).await;
    fsx.run(calls).await;
    let (reads, lost) = (fsx.transparent_reads, fsx.transparent_lost);
    assert!(reads > calls / 200 && lost > calls / 1000, "{reads} reads, {lost} files lost");
    fsx.finish().await;
}

#[tokio::test]
async fn two_hundred_thousand_calls_agree_with_the_reference() {
    check(1024, 1, 200_000).await;
}

#[tokio::test]
async fn calls_agree_with_the_reference_in_large_blocks() {
    check(4096, 2, 60_000).await;
}
