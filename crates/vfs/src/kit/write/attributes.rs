//! Changing attributes.

use bytes::Bytes;

use crate::kit::probe::{During, Outcome, Probe, ensure, me, refused, same, same_bytes};
use crate::kit::{Check, checks};
use crate::{
    Attr, Errno, FileKind, FileTime, InodeNumber, OpenFlags, SetAttr, SetTime, Writer, XattrFlags,
};

pub(super) const CHECKS: &[Check] = checks![
    modes_are_set_with_their_special_bits,
    owners_are_set,
    times_are_set_to_the_nanosecond,
    one_attribute_changes_alone,
    writing_changes_the_time,
    making_and_removing_changes_the_directorys_time,
    extended_attributes_are_set_and_removed,
    extended_attributes_keep_to_their_flags,
];

async fn set(probe: &Probe, inode: InodeNumber, changes: SetAttr) -> Outcome<Attr> {
    let reply = probe.fs.setattr(me(), inode, None, changes).await;
    let attr = reply.during(format!("{changes:?}"))?.attr;
    same("attributes afterwards", probe.attr(inode).await?, attr)?;
    Ok(attr)
}

async fn modes_are_set_with_their_special_bits(probe: Probe) -> Outcome {
    for path in ["file", "directory"] {
        let inode = probe.inode(path).await?;
        for mode in [0o600, 0o755, 0o1777, 0o2755, 0o4711, 0o7777, 0] {
            let attr =
                set(&probe, inode, SetAttr { mode: Some(mode), ..SetAttr::default() }).await?;
            same(format!("mode of {path}"), format!("{:o}", attr.mode), format!("{mode:o}"))?;
        }
    }
    Ok(())
}

async fn owners_are_set(probe: Probe) -> Outcome {
    for path in ["file", "directory", "link"] {
        let inode = probe.inode(path).await?;
        let before = probe.attr(inode).await?;
        let attr = set(&probe, inode, SetAttr { uid: Some(1001), ..SetAttr::default() }).await?;
        same("owner and group", (attr.uid, attr.gid), (1001, before.gid))?;
        let attr = set(&probe, inode, SetAttr { gid: Some(1002), ..SetAttr::default() }).await?;
        same("owner and group", (attr.uid, attr.gid), (1001, 1002))?;
    }
    Ok(())
}

async fn times_are_set_to_the_nanosecond(probe: Probe) -> Outcome {
    let times =
        [(0, 0), (1_700_000_000, 123_456_789), (-1, 999_999_999), (1 << 32, 1), (-86_400, 5)];
    for path in ["file", "directory", "link"] {
        let inode = probe.inode(path).await?;
        for (secs, nanos) in times {
            let time = FileTime { secs, nanos };
            let other = FileTime { secs: secs + 1, nanos };
            let (atime, mtime) = (Some(SetTime::To(other)), Some(SetTime::To(time)));
            let attr = set(&probe, inode, SetAttr { atime, mtime, ..SetAttr::default() }).await?;
            same(format!("times of {path}"), (attr.atime, attr.mtime), (other, time))?;
        }
        let now = SetAttr { mtime: Some(SetTime::Now), ..SetAttr::default() };
        let attr = set(&probe, inode, now).await?;
        same("mtime set to now, against ctime", attr.mtime, attr.ctime)?;
    }
    Ok(())
}

async fn one_attribute_changes_alone(probe: Probe) -> Outcome {
    let inode = probe.inode("file").await?;
    let before = probe.attr(inode).await?;
    let attr = set(&probe, inode, SetAttr { mode: Some(0o600), ..SetAttr::default() }).await?;
    same(
        "all but mode and ctime",
        Attr { mode: before.mode, ctime: before.ctime, ..attr },
        before,
    )?;
    let untouched = set(&probe, inode, SetAttr::default()).await?;
    same("all, when nothing is to change", untouched, attr)?;
    same_bytes("bytes", &probe.read_all(inode, 100).await?, b"some bytes\n")
}

/// Long ago, so that any change of a time shows.
async fn age(probe: &Probe, inode: InodeNumber) -> Outcome {
    let past = Some(SetTime::To(FileTime { secs: 1000, nanos: 0 }));
    set(probe, inode, SetAttr { mtime: past, ..SetAttr::default() }).await.map(drop)
}

async fn ensure_young(probe: &Probe, inode: InodeNumber, what: &str) -> Outcome {
    let mtime = probe.attr(inode).await?.mtime;
    ensure(mtime.secs > 1000, || format!("{what} left the mtime at {mtime:?}"))
}

async fn writing_changes_the_time(probe: Probe) -> Outcome {
    let inode = probe.inode("file").await?;
    age(&probe, inode).await?;
    let handle = probe.open(inode, OpenFlags::WRITE).await?;
    probe
        .fs
        .write(Writer::At(me()), inode, handle, 0, Bytes::from_static(b"x"))
        .await
        .during("write")?;
    probe.close(inode, handle).await?;
    ensure_young(&probe, inode, "a write").await?;
    age(&probe, inode).await?;
    let cut = SetAttr { size_bytes: Some(1), ..SetAttr::default() };
    set(&probe, inode, cut).await?;
    ensure_young(&probe, inode, "a truncation").await?;
    age(&probe, inode).await?;
    let handle = probe.open(inode, OpenFlags::READ).await?;
    probe.fs.read(inode, handle, 0, 10).await.during("read")?;
    probe.close(inode, handle).await?;
    same("mtime after a read", probe.attr(inode).await?.mtime.secs, 1000)
}

async fn making_and_removing_changes_the_directorys_time(probe: Probe) -> Outcome {
    let (fs, inode) = (&probe.fs, probe.inode("directory").await?);
    age(&probe, inode).await?;
    fs.mknod(me(), inode, b"new", FileKind::Regular, 0o644, 0).await.during("mknod")?;
    ensure_young(&probe, inode, "mknod").await?;
    age(&probe, inode).await?;
    fs.rename(me(), inode, b"new", inode, b"newer", Default::default()).await.during("rename")?;
    ensure_young(&probe, inode, "rename").await?;
    age(&probe, inode).await?;
    fs.unlink(me(), inode, b"newer").await.during("unlink")?;
    ensure_young(&probe, inode, "unlink").await
}

async fn extended_attributes_are_set_and_removed(probe: Probe) -> Outcome {
    probe.needs(probe.features.xattrs, "it keeps no extended attributes")?;
    let fs = &probe.fs;
    for path in ["file", "directory"] {
        let inode = probe.inode(path).await?;
        for value in [&b"value"[..], b"", &[0, 255], &[b'v'; 4000]] {
            let flags = XattrFlags::default();
            let value = Bytes::copy_from_slice(value);
            fs.setxattr(me(), inode, b"user.a", value.clone(), flags).await.during("setxattr")?;
            same("value", fs.getxattr(inode, b"user.a").await.during("getxattr")?, value)?;
        }
        same("names", fs.listxattr(inode).await.during("listxattr")?, vec!["user.a"])?;
        fs.removexattr(me(), inode, b"user.a").await.during("removexattr")?;
        refused("getxattr", fs.getxattr(inode, b"user.a").await, &[Errno::ENODATA])?;
        refused("removexattr", fs.removexattr(me(), inode, b"user.a").await, &[Errno::ENODATA])?;
        same("names", fs.listxattr(inode).await.during("listxattr")?.len(), 0)?;
    }
    Ok(())
}

async fn extended_attributes_keep_to_their_flags(probe: Probe) -> Outcome {
    probe.needs(probe.features.xattrs, "it keeps no extended attributes")?;
    let (fs, inode) = (&probe.fs, probe.inode("file").await?);
    let create = XattrFlags { create: true, replace: false };
    let replace = XattrFlags { create: false, replace: true };
    let value = || Bytes::from_static(b"v");
    let missing = fs.setxattr(me(), inode, b"user.a", value(), replace).await;
    refused("replacing what is missing", missing, &[Errno::ENODATA])?;
    fs.setxattr(me(), inode, b"user.a", value(), create).await.during("setxattr")?;
    let exists = fs.setxattr(me(), inode, b"user.a", value(), create).await;
    refused("creating what exists", exists, &[Errno::EEXIST])?;
    fs.setxattr(me(), inode, b"user.a", value(), replace).await.during("setxattr")
}
