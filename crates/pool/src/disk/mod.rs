//! What a member asks of the file system under D: the calls of Linux that act on open directories and files, asynchronous, so
//! that the same code runs on a real disk ([`directory::Directory`]) and on a simulated one ([`simulated::SimulatedDisk`]) that
//! is slow, fills up and loses what was not synced.
//!
//! A [`Disk::Node`] is an open reference to a file (`O_PATH`): it stays the same file whatever is renamed. A [`Disk::File`] can
//! be read and written. Nothing here follows symbolic links, and a name is one component.
//!
//! It knows nothing of slots, numbers and journals.

pub mod directory;
pub mod simulated;

use std::future::Future;
use std::sync::Arc;

use atoll_vfs::{Errno, FileKind, FileTime, RenameFlags, SeekTo, StatFs};
use bytes::Bytes;

/// What is known of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stat {
    /// The number of its inode, which the file system uses again once the file is gone.
    pub ino: u64,
    /// Tells files with the same inode number apart: when the inode was made, nanoseconds since 1970. 0 where that is not known.
    pub generation: u64,
    /// What it is.
    pub kind: FileKind,
    /// Permission bits: `0o7777` at most.
    pub mode: u32,
    /// Number of names.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Owning group.
    pub gid: u32,
    /// Device number, for devices.
    pub rdev: u64,
    /// Length, bytes.
    pub size_bytes: u64,
    /// Space taken, in units of 512 bytes.
    pub blocks_512: u64,
    /// Preferred size of reads and writes, bytes.
    pub block_size_bytes: u32,
    /// Last access.
    pub atime: FileTime,
    /// Last change of contents.
    pub mtime: FileTime,
    /// Last change of contents or attributes.
    pub ctime: FileTime,
}

/// One name of a directory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Listed {
    /// The name.
    pub name: Bytes,
    /// What it stands for.
    pub kind: FileKind,
    /// The number of its inode.
    pub ino: u64,
}

/// What is made under a new name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Making<'a> {
    /// An empty regular file.
    File,
    /// An empty directory.
    Directory,
    /// A symbolic link to these bytes.
    Symlink(&'a [u8]),
    /// A FIFO, socket or device, with its number.
    Special(FileKind, u64),
}

/// A time to set: `None` leaves it, [`TimeToSet::Now`] is the disk's own clock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TimeToSet {
    /// The time of the call.
    Now,
    /// This time.
    To(FileTime),
}

/// The attribute that is a file's access control list.
pub(crate) const ACCESS_LIST: &[u8] = b"system.posix_acl_access";
/// The attribute of a regular file that gives rights to the process that executes it; a change of the owner removes it.
pub(crate) const CAPABILITY: &[u8] = b"security.capability";
/// The attribute of a directory that is the list of what is made in it.
pub(crate) const DEFAULT_LIST: &[u8] = b"system.posix_acl_default";

/// The permissions of owner, group and others in an access control list (`acl(5)`, version 2 of the attribute); none if the list says
/// more than a mode does. File systems keep no such list: they set the mode.
pub(crate) fn mode_of_minimal_list(list: &[u8]) -> Option<u32> {
    const VERSION: u32 = 2;
    const OWNER_GROUP_OTHERS: [u16; 3] = [0x01, 0x04, 0x20];
    let (version, entries) = list.split_first_chunk()?;
    if u32::from_le_bytes(*version) != VERSION || entries.len() != 8 * OWNER_GROUP_OTHERS.len() {
        return None;
    }
    let mut mode = 0;
    for (entry, expected) in entries.chunks_exact(8).zip(OWNER_GROUP_OTHERS) {
        let tag = u16::from_le_bytes([entry[0], entry[1]]);
        let permissions = u16::from_le_bytes([entry[2], entry[3]]);
        if tag != expected || permissions > 7 {
            return None;
        }
        mode = mode << 3 | u32::from(permissions);
    }
    Some(mode)
}

/// The answer of a call.
pub type DiskResult<T> = Result<T, Errno>;

/// Puts a small file in the place of one of this name, by way of another name. What it holds is durable; that it has the name is so after
/// [`Disk::sync_all`].
pub(crate) async fn replace_file<D: Disk>(
    disk: &D,
    dir: &D::Node,
    (beside, name): (&[u8], &[u8]),
    bytes: &[u8],
) -> DiskResult<()> {
    match disk.make(dir, beside, Making::File, 0o600).await {
        Ok(()) | Err(Errno::EEXIST) => {}
        Err(errno) => return Err(errno),
    }
    let file = disk.open(&disk.node(dir, beside).await?).await?;
    disk.set_len(&file, 0).await?;
    if disk.write(&file, 0, bytes).await? != bytes.len() {
        return Err(Errno::ENOSPC);
    }
    disk.sync_file(&file, false).await?;
    disk.rename((dir, beside), (dir, name), RenameFlags::default()).await
}

/// A name that is not there is no error.
pub(crate) fn missing_is_none<T>(result: DiskResult<T>) -> DiskResult<Option<T>> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(Errno::ENOENT | Errno::ENOTDIR) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// A file system that keeps the files of one member, within one directory (D).
///
/// Calls are those of Linux with the rights of the process. All but [`Disk::sync_all`] and [`Disk::sync_file`] may be lost
/// by a crash of the machine, and in any order.
pub trait Disk: Send + Sync + 'static {
    /// A reference to a file, open as `O_PATH`.
    type Node: Clone + Send + Sync + 'static;
    /// A file that is open for reading, and for writing if it may be written.
    type File: Clone + Send + Sync + 'static;

    /// D itself.
    fn top(&self) -> Self::Node;

    /// Which run of the machine this is: another one after a crash of the machine, the same after that of a process.
    fn boot(&self) -> u64;

    /// The time that a file gets which is changed now.
    fn now(&self) -> FileTime;

    /// How many nodes may be kept open.
    fn max_nodes(&self) -> usize;

    /// Opens the file `name` of a directory.
    fn node(
        &self,
        dir: &Self::Node,
        name: &[u8],
    ) -> impl Future<Output = DiskResult<Self::Node>> + Send;

    /// What is known of an open file.
    fn stat(&self, node: &Self::Node) -> impl Future<Output = DiskResult<Stat>> + Send;

    /// What is known of the file `name` of a directory.
    fn stat_at(
        &self,
        dir: &Self::Node,
        name: &[u8],
    ) -> impl Future<Output = DiskResult<Stat>> + Send;

    /// Makes a file; the process' umask does not count, the default access control list of the directory does.
    fn make(
        &self,
        dir: &Self::Node,
        name: &[u8],
        making: Making<'_>,
        mode: u32,
    ) -> impl Future<Output = DiskResult<()>> + Send;

    /// Makes another name for a file.
    fn link(
        &self,
        node: &Self::Node,
        dir: &Self::Node,
        name: &[u8],
    ) -> impl Future<Output = DiskResult<()>> + Send;

    /// Renames (`renameat2(2)`).
    fn rename(
        &self,
        from: (&Self::Node, &[u8]),
        to: (&Self::Node, &[u8]),
        flags: RenameFlags,
    ) -> impl Future<Output = DiskResult<()>> + Send;

    /// Removes a name that is not a directory.
    fn unlink(&self, dir: &Self::Node, name: &[u8]) -> impl Future<Output = DiskResult<()>> + Send;

    /// Removes an empty directory.
    fn rmdir(&self, dir: &Self::Node, name: &[u8]) -> impl Future<Output = DiskResult<()>> + Send;

    /// All names of a directory, without `.` and `..`.
    fn list(&self, dir: &Self::Node) -> impl Future<Output = DiskResult<Vec<Listed>>> + Send;

    /// The target of a symbolic link.
    fn read_link(
        &self,
        dir: &Self::Node,
        name: &[u8],
    ) -> impl Future<Output = DiskResult<Bytes>> + Send;

    /// The target of an open symbolic link.
    fn read_node(&self, node: &Self::Node) -> impl Future<Output = DiskResult<Bytes>> + Send;

    /// Sets permission bits; not of symbolic links.
    fn set_mode(&self, node: &Self::Node, mode: u32)
    -> impl Future<Output = DiskResult<()>> + Send;

    /// Sets owner and group; as Linux, takes set-id bits away.
    fn set_owner(
        &self,
        node: &Self::Node,
        uid: Option<u32>,
        gid: Option<u32>,
    ) -> impl Future<Output = DiskResult<()>> + Send;

    /// Sets access and modification time.
    fn set_times(
        &self,
        node: &Self::Node,
        atime: Option<TimeToSet>,
        mtime: Option<TimeToSet>,
    ) -> impl Future<Output = DiskResult<()>> + Send;

    /// An extended attribute; [`Errno::ENODATA`] if there is none, [`Errno::EOPNOTSUPP`] where there are none at all.
    fn xattr(
        &self,
        node: &Self::Node,
        name: &[u8],
    ) -> impl Future<Output = DiskResult<Bytes>> + Send;

    /// The names of the extended attributes.
    fn xattrs(&self, node: &Self::Node) -> impl Future<Output = DiskResult<Vec<Bytes>>> + Send;

    /// Sets an extended attribute.
    fn set_xattr(
        &self,
        node: &Self::Node,
        name: &[u8],
        value: &[u8],
        flags: atoll_vfs::XattrFlags,
    ) -> impl Future<Output = DiskResult<()>> + Send;

    /// Removes an extended attribute.
    fn remove_xattr(
        &self,
        node: &Self::Node,
        name: &[u8],
    ) -> impl Future<Output = DiskResult<()>> + Send;

    /// Opens a regular file for reading, and for writing unless the file cannot be written at all.
    fn open(&self, node: &Self::Node) -> impl Future<Output = DiskResult<Self::File>> + Send;

    /// What is known of an open file.
    fn stat_file(&self, file: &Self::File) -> impl Future<Output = DiskResult<Stat>> + Send;

    /// Up to `len` bytes; fewer only at the end of the file.
    fn read(
        &self,
        file: &Self::File,
        offset: u64,
        len: usize,
    ) -> impl Future<Output = DiskResult<Bytes>> + Send;

    /// Writes all bytes, or fewer where the disk is full in their middle; returns how many.
    fn write(
        &self,
        file: &Self::File,
        offset: u64,
        data: &[u8],
    ) -> impl Future<Output = DiskResult<usize>> + Send;

    /// Cuts a file off, or extends it with a hole.
    fn set_len(
        &self,
        file: &Self::File,
        size_bytes: u64,
    ) -> impl Future<Output = DiskResult<()>> + Send;

    /// `fallocate(2)`.
    fn allocate(
        &self,
        file: &Self::File,
        mode: i32,
        offset: u64,
        len: u64,
    ) -> impl Future<Output = DiskResult<()>> + Send;

    /// `lseek(2)` for data and holes.
    fn seek(
        &self,
        file: &Self::File,
        offset: u64,
        to: SeekTo,
    ) -> impl Future<Output = DiskResult<u64>> + Send;

    /// Makes a file durable: its bytes and size, and all its attributes unless `data_only`.
    fn sync_file(
        &self,
        file: &Self::File,
        data_only: bool,
    ) -> impl Future<Output = DiskResult<()>> + Send;

    /// Makes everything durable (`syncfs(2)`).
    fn sync_all(&self) -> impl Future<Output = DiskResult<()>> + Send;

    /// Sizes and limits.
    fn stat_fs(&self) -> impl Future<Output = DiskResult<StatFs>> + Send;

    /// A file of Atoll's own that a database keeps, made if it does not exist. Its calls block.
    fn database(
        &self,
        dir: &Self::Node,
        name: &[u8],
    ) -> impl Future<Output = DiskResult<Arc<dyn DatabaseFile>>> + Send;

    /// Keeps other processes from D until the disk is dropped; [`Errno::EAGAIN`] if one has it.
    fn lock(&self, dir: &Self::Node, name: &[u8]) -> impl Future<Output = DiskResult<()>> + Send;
}

/// A file under a database, whose calls block.
pub trait DatabaseFile: Send + Sync + 'static {
    /// Its length, bytes.
    fn size(&self) -> std::io::Result<u64>;
    /// Fills `out` from `offset`.
    fn read(&self, offset: u64, out: &mut [u8]) -> std::io::Result<()>;
    /// Writes all of `data`.
    fn write(&self, offset: u64, data: &[u8]) -> std::io::Result<()>;
    /// Cuts off or extends with zeros.
    fn set_len(&self, len: u64) -> std::io::Result<()>;
    /// Makes what was written durable.
    fn sync(&self) -> std::io::Result<()>;
}
