//! One change by a client, and the steps of a seed.

use atoll_vfs::{
    Errno, FileKind, FileSystem, FileTime, InodeNumber, OpenFlags, RenameFlags, SetAttr, SetTime,
    Writer, XattrFlags,
};
use bytes::Bytes;

use super::{Dice, ROOT, me};

/// Stamped bytes are written in cells of this size, which divides a sector: a loss of power takes all of a cell or nothing.
pub(crate) const CELL_BYTES: u64 = 64;

/// What a client does. Paths begin with `/`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Step {
    Mkdir(String),
    Create(String),
    Symlink(String),
    Link(String, String),
    Unlink(String),
    Rmdir(String),
    Rename(String, String),
    Exchange(String, String),
    Chmod(String, u32),
    Chown(String, u32),
    SetTimes(String, i64),
    /// Writes and syncs.
    Write(String, u8),
    /// Writes stamped cells and does not sync.
    Stamp {
        path: String,
        first_cell: u64,
        cells: u64,
        stamp: Stamp,
    },
    /// Sets the length to so many cells.
    Truncate(String, u64),
    /// Syncs a file.
    Sync(String),
    /// Reads a file.
    Read(String),
    /// Sets an extended attribute.
    SetXattr(String, &'static str, String),
    RemoveXattr(String, &'static str),
    /// What was done so far survives a crash.
    Persist,
    /// The journal begins anew.
    Checkpoint,
}

/// Says in each cell of a write who wrote it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Stamp {
    pub(crate) client: u32,
    /// No other write of the history has it.
    pub(crate) number: u64,
}

impl Stamp {
    /// A line of text that says client, file, number of the write, and which cell of the file this is.
    pub(crate) fn cell(self, inode: InodeNumber, cell: u64) -> Vec<u8> {
        let Stamp { client, number } = self;
        let text =
            format!("client {client:03} file {:016x} write {number:07} cell {cell:06}", inode.0);
        format!("{text:.<width$}\n", width = CELL_BYTES as usize - 1).into_bytes()
    }

    /// The bytes of a write.
    pub(crate) fn cells(self, inode: InodeNumber, first_cell: u64, cells: u64) -> Bytes {
        (first_cell..first_cell + cells).flat_map(|cell| self.cell(inode, cell)).collect()
    }
}

/// The paths that a step names.
pub(crate) fn paths(step: &Step) -> Vec<&str> {
    match step {
        Step::Mkdir(path)
        | Step::Create(path)
        | Step::Symlink(path)
        | Step::Unlink(path)
        | Step::Rmdir(path)
        | Step::Chmod(path, _)
        | Step::Chown(path, _)
        | Step::SetTimes(path, _)
        | Step::Write(path, _)
        | Step::Stamp { path, .. }
        | Step::Truncate(path, _)
        | Step::Sync(path)
        | Step::Read(path)
        | Step::SetXattr(path, ..)
        | Step::RemoveXattr(path, _) => vec![path],
        Step::Link(from, to) | Step::Rename(from, to) | Step::Exchange(from, to) => vec![from, to],
        Step::Persist | Step::Checkpoint => Vec::new(),
    }
}

/// The file at a path.
pub(crate) async fn find(fs: &dyn FileSystem, path: &str) -> Result<InodeNumber, Errno> {
    let mut at = ROOT;
    for name in path.split('/').filter(|name| !name.is_empty()) {
        let entry = fs.lookup(me(), at, name.as_bytes()).await?;
        at = entry.attr.inode;
        fs.forget(at, 1);
    }
    Ok(at)
}

/// The directory of a path, and the name in it.
async fn place<'a>(fs: &dyn FileSystem, path: &'a str) -> Result<(InodeNumber, &'a [u8]), Errno> {
    let (dir, name) = path.rsplit_once('/').expect("an absolute path");
    Ok((find(fs, dir).await?, name.as_bytes()))
}

async fn set(fs: &dyn FileSystem, path: &str, changes: SetAttr) -> Result<(), Errno> {
    let inode = find(fs, path).await?;
    fs.setattr(me(), inode, None, changes).await.map(drop)
}

/// Opens a file, works on it and closes it.
async fn opened<T>(
    fs: &dyn FileSystem,
    path: &str,
    flags: OpenFlags,
    work: impl AsyncFnOnce(InodeNumber, atoll_vfs::Handle) -> Result<T, Errno>,
) -> Result<T, Errno> {
    let inode = find(fs, path).await?;
    let handle = fs.open(me(), inode, flags).await?.handle;
    let done = work(inode, handle).await;
    fs.close(inode, handle).await?;
    done
}

/// The longest file of a workload.
pub(crate) const MAX_FILE_BYTES: u32 = 1 << 20;

/// Makes a step.
pub(crate) async fn take(fs: &dyn FileSystem, step: &Step) -> Result<(), Errno> {
    let kept = |inode: InodeNumber| fs.forget(inode, 1);
    match step {
        Step::Mkdir(path) => {
            let (dir, name) = place(fs, path).await?;
            kept(fs.mkdir(me(), dir, name, 0o755).await?.attr.inode);
        }
        Step::Create(path) => {
            let (dir, name) = place(fs, path).await?;
            kept(fs.mknod(me(), dir, name, FileKind::Regular, 0o644, 0).await?.attr.inode);
        }
        Step::Symlink(path) => {
            let (dir, name) = place(fs, path).await?;
            kept(fs.symlink(me(), dir, name, b"../../123/0000000000000009").await?.attr.inode);
        }
        Step::Link(from, to) => {
            let inode = find(fs, from).await?;
            let (dir, name) = place(fs, to).await?;
            kept(fs.link(me(), inode, dir, name).await?.attr.inode);
        }
        Step::Unlink(path) => {
            let (dir, name) = place(fs, path).await?;
            fs.unlink(me(), dir, name).await?;
        }
        Step::Rmdir(path) => {
            let (dir, name) = place(fs, path).await?;
            fs.rmdir(me(), dir, name).await?;
        }
        Step::Rename(from, to) | Step::Exchange(from, to) => {
            let exchange = matches!(step, Step::Exchange(..));
            let ((dir, name), (new_dir, new_name)) = (place(fs, from).await?, place(fs, to).await?);
            let flags = RenameFlags { no_replace: false, exchange };
            fs.rename(me(), dir, name, new_dir, new_name, flags).await?;
        }
        Step::Chmod(path, mode) => {
            set(fs, path, SetAttr { mode: Some(*mode), ..SetAttr::default() }).await?
        }
        Step::Chown(path, uid) => {
            set(fs, path, SetAttr { uid: Some(*uid), ..SetAttr::default() }).await?
        }
        Step::SetTimes(path, secs) => {
            let mtime = Some(SetTime::To(FileTime { secs: *secs, nanos: 0 }));
            set(fs, path, SetAttr { mtime, ..SetAttr::default() }).await?;
        }
        Step::Truncate(path, cells) => {
            let size_bytes = Some(cells * CELL_BYTES);
            set(fs, path, SetAttr { size_bytes, ..SetAttr::default() }).await?;
        }
        Step::Write(path, byte) => {
            opened(fs, path, OpenFlags::WRITE, async |inode, handle| {
                let bytes = Bytes::from(vec![*byte; 1500]);
                let written = fs.write(Writer::At(me()), inode, handle, 0, bytes).await;
                fs.fsync(inode, handle, false).await?;
                written.map(drop)
            })
            .await?;
        }
        Step::Stamp { path, first_cell, cells, stamp } => {
            opened(fs, path, OpenFlags::WRITE, async |inode, handle| {
                let bytes = stamp.cells(inode, *first_cell, *cells);
                let offset = first_cell * CELL_BYTES;
                fs.write(Writer::At(me()), inode, handle, offset, bytes).await.map(drop)
            })
            .await?;
        }
        Step::Sync(path) => {
            opened(fs, path, OpenFlags::WRITE, async |inode, handle| {
                fs.fsync(inode, handle, false).await
            })
            .await?;
        }
        Step::Read(path) => {
            opened(fs, path, OpenFlags::READ, async |inode, handle| {
                fs.read(inode, handle, 0, MAX_FILE_BYTES).await.map(drop)
            })
            .await?;
        }
        Step::SetXattr(path, name, value) => {
            let inode = find(fs, path).await?;
            let value = Bytes::copy_from_slice(value.as_bytes());
            fs.setxattr(me(), inode, name.as_bytes(), value, XattrFlags::default()).await?;
        }
        Step::RemoveXattr(path, name) => {
            let inode = find(fs, path).await?;
            fs.removexattr(me(), inode, name.as_bytes()).await?;
        }
        Step::Persist => fs.persist(&[]).await?,
        Step::Checkpoint => fs.sync().await?,
    }
    Ok(())
}

/// Extended attributes that steps set.
const XATTRS: [&str; 2] = ["user.first", "user.second"];

impl Dice {
    /// One of 39 paths, at most three names deep.
    pub(crate) fn path(&mut self) -> String {
        self.path_of(3)
    }

    fn path_of(&mut self, max_depth: u64) -> String {
        let depth = 1 + self.below(max_depth);
        (0..depth).map(|_| format!("/{}", ["a", "b", "c"][self.below(3) as usize])).collect()
    }

    /// A step for crashes: what it writes it syncs.
    pub(crate) fn step(&mut self) -> Step {
        match self.below(24) {
            0..=4 => Step::Mkdir(self.path()),
            5..=8 => Step::Create(self.path()),
            9 => Step::Symlink(self.path()),
            10 => Step::Link(self.path(), self.path()),
            11 | 12 => Step::Unlink(self.path()),
            13 => Step::Rmdir(self.path()),
            14..=16 => Step::Rename(self.path(), self.path()),
            17 => Step::Exchange(self.path(), self.path()),
            18 => Step::Chmod(self.path(), 0o600),
            19 => Step::Chown(self.path(), 1001),
            20 => Step::SetTimes(self.path(), 1_000_000),
            21 => Step::Write(self.path(), 1 + self.below(9) as u8),
            22 => Step::Persist,
            _ => Step::Checkpoint,
        }
    }

    /// A change of names that several clients may fight over.
    pub(crate) fn name_step(&mut self) -> Step {
        let path = self.path_of(2);
        match self.below(16) {
            0..=2 => Step::Mkdir(path),
            3..=6 => Step::Create(path),
            7 => Step::Symlink(path),
            8 => Step::Link(path, self.path_of(2)),
            9 | 10 => Step::Unlink(path),
            11 | 12 => Step::Rmdir(path),
            13 | 14 => Step::Rename(path, self.path_of(2)),
            _ => Step::Exchange(path, self.path_of(2)),
        }
    }

    /// A path that is mostly a file's.
    fn file_path(&mut self) -> String {
        ["/b", "/c", "/a/b", "/a/c", "/a/a/b"][self.below(5) as usize].to_owned()
    }

    /// A path that is mostly a directory's.
    fn directory_path(&mut self) -> String {
        ["/a", "/a/a", "/d"][self.below(3) as usize].to_owned()
    }

    /// A change of files that are one client's own. `stamp` is new.
    pub(crate) fn own_step(&mut self, stamp: Stamp) -> Step {
        let path = self.file_path();
        let xattr = XATTRS[self.below(2) as usize];
        match self.below(40) {
            0..=2 => self.name_step(),
            3..=6 => Step::Mkdir(self.directory_path()),
            7..=12 => Step::Create(path),
            13 => Step::Symlink(path),
            14 => Step::Link(path, self.file_path()),
            15 => Step::Unlink(path),
            16 => Step::Rmdir(self.directory_path()),
            17 => Step::Rename(self.directory_path(), self.directory_path()),
            18 => Step::Rename(path, self.file_path()),
            19 => Step::Exchange(self.directory_path(), path),
            20..=26 => {
                let first_cell = self.below(200);
                // Most are small, some take several messages.
                let cells = 1 + match self.below(8) {
                    0 => self.below(6000),
                    _ => self.below(40),
                };
                Step::Stamp { path, first_cell, cells, stamp }
            }
            27 | 28 => Step::Truncate(path, self.below(100)),
            29 | 30 => Step::Sync(path),
            31 | 32 => Step::Read(path),
            33 => Step::Chmod(path, [0o600, 0o640, 0o755][self.below(3) as usize]),
            34 => Step::Chown(path, 1000 + self.below(3) as u32),
            35 => Step::SetTimes(path, 1_000_000 + self.below(1000) as i64),
            36..=38 => Step::SetXattr(path, xattr, format!("{}/{}", stamp.client, stamp.number)),
            _ => Step::RemoveXattr(path, xattr),
        }
    }
}

mod tests {
    use super::*;

    #[test]
    fn a_cell_says_who_wrote_it_and_is_as_long_as_all() {
        let cell = Stamp { client: 3, number: 17 }.cell(InodeNumber(0x4f20_0000_0000_0002), 9);
        assert_eq!(
            String::from_utf8(cell.clone()).unwrap(),
            "client 003 file 4f20000000000002 write 0000017 cell 000009......\n"[..63].to_owned()
                + "\n"
        );
        assert_eq!(cell.len() as u64, CELL_BYTES);
    }
}
