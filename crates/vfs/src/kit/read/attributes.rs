//! Attributes, link targets, extended attributes, and the file system's own figures.

use std::time::Duration;

use crate::kit::probe::{During, Outcome, Probe, ensure, refused, same, shown};
use crate::kit::tree::Body;
use crate::kit::{Check, checks};
use crate::{Errno, FileKind, InodeNumber, MAX_NAME_BYTES, OpenFlags};

pub(super) const CHECKS: &[Check] = checks![
    sizes_modes_and_times_are_kept,
    lookup_getattr_and_listing_agree,
    attributes_are_sound,
    getattr_by_handle_agrees,
    holes_take_no_space,
    link_targets_are_kept,
    only_links_have_targets,
    extended_attributes_are_kept,
    a_missing_extended_attribute_is_enodata,
    the_figures_of_the_file_system_are_sound,
];

async fn sizes_modes_and_times_are_kept(probe: Probe) -> Outcome {
    for (path, node) in probe.tree.nodes() {
        let attr = probe.find(&path).await?;
        let shown = shown(&path);
        same(format!("mtime of {shown}"), attr.mtime, node.mtime)?;
        match &node.body {
            Body::Symlink(target) => {
                same(format!("size of {shown}"), attr.size_bytes, target.len() as u64)?;
            }
            Body::File(content) => {
                same(format!("size of {shown}"), attr.size_bytes, content.len_bytes())?;
                same(format!("links of {shown}"), attr.nlink, 1)?;
            }
            Body::Directory(_) => {
                ensure(attr.nlink >= 1, || format!("{shown} has no links"))?;
            }
        }
        if !matches!(node.body, Body::Symlink(_)) {
            let (mode, expected) = (format!("{:o}", attr.mode), format!("{:o}", node.mode));
            same(format!("mode of {shown}"), mode, expected)?;
        }
    }
    Ok(())
}

async fn lookup_getattr_and_listing_agree(probe: Probe) -> Outcome {
    for directory in ["", "names", "sizes", "holes", "modes", "times", "links", "xattrs"] {
        let parent = probe.inode(directory).await?;
        for listed in probe.list(parent, 10, true).await? {
            let shown = format!("{} in {directory:?}", shown(&listed.name));
            let found = probe.lookup(parent, &listed.name).await;
            let found = found.during(format!("lookup of {shown}"))?.attr;
            same(format!("getattr of {shown}"), probe.attr(found.inode).await?, found)?;
            same(format!("kind in the listing, {shown}"), listed.kind, found.kind)?;
            same(format!("number in the listing, {shown}"), listed.inode, found.inode)?;
            let Some(entry) = listed.entry else {
                return ensure(false, || format!("{shown} was listed without its entry"));
            };
            same(format!("entry in the listing, {shown}"), entry.attr, found)?;
            probe.fs.forget(found.inode, 2);
        }
    }
    Ok(())
}

async fn attributes_are_sound(probe: Probe) -> Outcome {
    for (path, _) in probe.tree.nodes() {
        let attr = probe.find(&path).await?;
        let shown = shown(&path);
        ensure(attr.mode <= 0o7777, || format!("{shown} has mode {:o}", attr.mode))?;
        ensure(attr.block_size_bytes >= 512, || format!("{shown} has blocks too small"))?;
        for time in [attr.atime, attr.mtime, attr.ctime] {
            ensure(time.nanos < 1_000_000_000, || format!("{shown} has the time {time:?}"))?;
        }
        ensure(i64::try_from(attr.size_bytes).is_ok(), || format!("{shown} is too long"))?;
    }
    let year = Duration::from_secs(366 * 24 * 3600);
    let reply = probe.fs.getattr(InodeNumber::ROOT, None).await.during("getattr")?;
    ensure(reply.ttl <= year, || format!("attributes to be believed for {:?}", reply.ttl))
}

async fn getattr_by_handle_agrees(probe: Probe) -> Outcome {
    let inode = probe.inode("file").await?;
    let handle = probe.open(inode, OpenFlags::READ).await?;
    let by_handle = probe.fs.getattr(inode, Some(handle)).await.during("getattr by handle")?;
    same("attributes by handle", by_handle.attr, probe.attr(inode).await?)?;
    probe.close(inode, handle).await
}

async fn holes_take_no_space(probe: Probe) -> Outcome {
    probe.needs(probe.features.holes, "its holes take space")?;
    for (path, most_bytes) in
        [("holes/nothing but a hole", 1 << 20), ("holes/one byte late", 2 << 20)]
    {
        let attr = probe.find(path).await?;
        let taken = attr.blocks_512 * 512;
        ensure(taken <= most_bytes, || format!("{path} takes {taken} bytes"))?;
    }
    Ok(())
}

async fn link_targets_are_kept(probe: Probe) -> Outcome {
    for (path, node) in probe.tree.nodes() {
        if let Body::Symlink(target) = &node.body {
            let inode = probe.inode(&path).await?;
            let found =
                probe.fs.readlink(inode).await.during(format!("readlink of {}", shown(&path)))?;
            same(format!("target of {}", shown(&path)), &found, target)?;
        }
    }
    Ok(())
}

async fn only_links_have_targets(probe: Probe) -> Outcome {
    for path in ["file", "directory", ""] {
        let inode = probe.inode(path).await?;
        refused(format!("readlink of {path:?}"), probe.fs.readlink(inode).await, &[Errno::EINVAL])?;
    }
    Ok(())
}

async fn extended_attributes_are_kept(probe: Probe) -> Outcome {
    probe.needs(probe.features.xattrs, "it keeps no extended attributes")?;
    for path in ["xattrs/file", "xattrs/directory", "xattrs/none"] {
        let node = probe.tree.get(path).expect("in the fixture");
        let inode = probe.inode(path).await?;
        let mut names = probe.fs.listxattr(inode).await.during("listxattr")?;
        names.retain(|name| name.starts_with(b"user."));
        names.sort();
        let expected: Vec<_> = node.xattrs.keys().cloned().collect();
        same(format!("names of the attributes of {path}"), names, expected)?;
        for (name, value) in &node.xattrs {
            let found = probe.fs.getxattr(inode, name).await;
            let found = found.during(format!("getxattr {} of {path}", shown(name)))?;
            same(format!("{} of {path}", shown(name)), &found, value)?;
        }
    }
    Ok(())
}

async fn a_missing_extended_attribute_is_enodata(probe: Probe) -> Outcome {
    for path in ["xattrs/file", "file", "directory", "link", ""] {
        let inode = probe.inode(path).await?;
        for name in [&b"user.missing"[..], b"user.commen", b"user.comment2", b"security.capability"]
        {
            let answer = probe.fs.getxattr(inode, name).await;
            let accepted = [Errno::ENODATA, Errno::EOPNOTSUPP];
            refused(format!("{} of {path:?}", shown(name)), answer, &accepted)?;
        }
    }
    Ok(())
}

async fn the_figures_of_the_file_system_are_sound(probe: Probe) -> Outcome {
    let figures = probe.fs.statfs(InodeNumber::ROOT).await.during("statfs")?;
    let shown = || format!("{figures:?}");
    ensure(figures.block_size_bytes >= 512, shown)?;
    ensure(figures.blocks_free <= figures.blocks, shown)?;
    ensure(figures.blocks_available <= figures.blocks_free, shown)?;
    ensure(figures.files_free <= figures.files, shown)?;
    same("longest name", figures.max_name_bytes as usize, MAX_NAME_BYTES)?;
    same("several names", figures.max_links > 1, probe.features.hard_links)?;
    ensure(figures.max_file_bytes <= i64::MAX as u64, shown)?;
    // The trees of the kit have nanoseconds.
    same("unit of times", figures.time_granularity, Duration::from_nanos(1))?;
    let file = probe.find("file").await?;
    same("kind", file.kind, FileKind::Regular)?;
    probe.fs.statfs(file.inode).await.during("statfs of a file").map(drop)
}
