//! What a read-only file system refuses.

use bytes::Bytes;

use crate::kit::probe::{During, Outcome, Probe, me, refused, same, same_bytes};
use crate::kit::{Check, checks};
use crate::{
    Errno, FileKind, InodeNumber, OpenFlags, RenameFlags, SetAttr, SetTime, Writer, XattrFlags,
};

pub(super) const CHECKS: &[Check] =
    checks![changes_of_names_are_erofs, changes_of_files_are_erofs, opening_for_writing_is_erofs,];

const EROFS: &[Errno] = &[Errno::EROFS];
const ONLY_READ_ONLY: &str = "it can be written";

async fn changes_of_names_are_erofs(probe: Probe) -> Outcome {
    probe.needs(probe.features.read_only, ONLY_READ_ONLY)?;
    let (fs, root) = (&probe.fs, InodeNumber::ROOT);
    let file = probe.inode("file").await?;
    let before = probe.names(root).await?;
    for kind in [FileKind::Regular, FileKind::Fifo] {
        refused("mknod", fs.mknod(me(), root, b"new", kind, 0o644, 0).await, EROFS)?;
    }
    refused("mkdir", fs.mkdir(me(), root, b"new", 0o755).await, EROFS)?;
    refused("symlink", fs.symlink(me(), root, b"new", b"target").await, EROFS)?;
    refused("link", fs.link(me(), file, root, b"new").await, EROFS)?;
    refused("unlink", fs.unlink(me(), root, b"file").await, EROFS)?;
    refused("rmdir", fs.rmdir(me(), root, b"empty").await, EROFS)?;
    let flags = RenameFlags::default();
    refused("rename", fs.rename(me(), root, b"file", root, b"new", flags).await, EROFS)?;
    let created = fs.create(me(), root, b"new", 0o644, OpenFlags::READ_WRITE).await;
    refused("create", created, EROFS)?;
    same("names of the root", probe.names(root).await?, before)
}

async fn changes_of_files_are_erofs(probe: Probe) -> Outcome {
    probe.needs(probe.features.read_only, ONLY_READ_ONLY)?;
    let fs = &probe.fs;
    let before = probe.find("file").await?;
    let inode = before.inode;
    let changes = [
        SetAttr { mode: Some(0o600), ..SetAttr::default() },
        SetAttr { uid: Some(5), ..SetAttr::default() },
        SetAttr { size_bytes: Some(0), ..SetAttr::default() },
        SetAttr { mtime: Some(SetTime::Now), ..SetAttr::default() },
    ];
    for change in changes {
        refused(format!("{change:?}"), fs.setattr(me(), inode, None, change).await, EROFS)?;
    }
    let value = Bytes::from_static(b"v");
    let set = fs.setxattr(me(), inode, b"user.x", value, XattrFlags::default()).await;
    refused("setxattr", set, EROFS)?;
    refused("removexattr", fs.removexattr(me(), inode, b"user.x").await, EROFS)?;
    let handle = probe.open(inode, OpenFlags::READ).await?;
    let write = fs.write(Writer::At(me()), inode, handle, 0, Bytes::from_static(b"x")).await;
    refused("write", write, &[Errno::EROFS, Errno::EBADF])?;
    probe.close(inode, handle).await?;
    same("attributes afterwards", probe.attr(inode).await?, before)?;
    same_bytes("bytes afterwards", &probe.read_all(inode, 100).await?, b"some bytes\n")
}

async fn opening_for_writing_is_erofs(probe: Probe) -> Outcome {
    probe.needs(probe.features.read_only, ONLY_READ_ONLY)?;
    let inode = probe.inode("file").await?;
    for flags in [
        OpenFlags::WRITE,
        OpenFlags::READ_WRITE,
        OpenFlags(OpenFlags::WRITE.0 | OpenFlags::APPEND),
        OpenFlags(OpenFlags::READ.0 | OpenFlags::TRUNCATE),
    ] {
        let answer = probe.fs.open(me(), inode, flags).await;
        refused(format!("open with {flags:?}"), answer, EROFS)?;
    }
    let handle = probe.open(inode, OpenFlags::READ).await?;
    probe.fs.fsync(inode, handle, false).await.during("fsync of what was only read")?;
    probe.close(inode, handle).await
}
