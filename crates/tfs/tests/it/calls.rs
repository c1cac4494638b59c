//! Calls of a file system as tests want to say them.

use atoll_tfs::fs::Tfs;
use atoll_vfs::{Caller, Errno, FileSystem, Groups, InodeNumber, OpenFlags, Writer, XattrFlags};
use bytes::Bytes;

pub(crate) const ME: Caller = Caller { uid: 0, gid: 0, pid: 0, umask: 0, groups: Groups::None };
pub(crate) const ROOT: InodeNumber = InodeNumber::ROOT;

/// A directory whose new files are transparent.
pub(crate) async fn contribution(tfs: &Tfs) -> InodeNumber {
    let entry = tfs.mkdir(ME, ROOT, b"contributed", 0o755).await.unwrap();
    let number = entry.attr.inode;
    let on = Bytes::from_static(b"1");
    tfs.setxattr(ME, number, b"user.tfs.transparent", on, XattrFlags::default()).await.unwrap();
    number
}

/// Bytes that tell whose they are and where.
pub(crate) fn owned(owner: u64, len: usize) -> Vec<u8> {
    (0..len).map(|i| (owner as usize * 131 + i / 512 * 7 + 1) as u8).collect()
}

pub(crate) async fn write(
    tfs: &Tfs,
    parent: InodeNumber,
    name: &str,
    bytes: &[u8],
) -> Result<InodeNumber, Errno> {
    let flags = OpenFlags::WRITE;
    let (entry, opened) = tfs.create(ME, parent, name.as_bytes(), 0o644, flags).await?;
    let number = entry.attr.inode;
    let written =
        tfs.write(Writer::At(ME), number, opened.handle, 0, Bytes::copy_from_slice(bytes)).await;
    tfs.close(number, opened.handle).await?;
    tfs.forget(number, 1);
    if written? as usize == bytes.len() { Ok(number) } else { Err(Errno::ENOSPC) }
}

pub(crate) async fn read(tfs: &Tfs, parent: InodeNumber, name: &str) -> Result<Vec<u8>, Errno> {
    let number = tfs.lookup(ME, parent, name.as_bytes()).await?.attr.inode;
    let handle = match tfs.open(ME, number, OpenFlags::READ).await {
        Ok(opened) => opened.handle,
        Err(errno) => {
            tfs.forget(number, 1);
            return Err(errno);
        }
    };
    let bytes = tfs.read(number, handle, 0, 4 << 20).await;
    tfs.close(number, handle).await?;
    tfs.forget(number, 1);
    bytes.map(|bytes| bytes.to_vec())
}

/// Fills the free space with transparent files; how many there are.
pub(crate) async fn fill(tfs: &Tfs, parent: InodeNumber, len: usize) -> u64 {
    for n in 0.. {
        match write(tfs, parent, &format!("t{n}"), &owned(n, len)).await {
            Ok(_) => {}
            Err(Errno::ENOSPC) => {
                tfs.unlink(ME, parent, format!("t{n}").as_bytes()).await.unwrap();
                return n;
            }
            Err(errno) => panic!("{errno:?}"),
        }
    }
    unreachable!("a disk is full at some time")
}
