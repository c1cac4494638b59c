//! Renaming.

use crate::kit::probe::{During, Outcome, Probe, me, refused, same, same_bytes};
use crate::kit::{Check, checks};
use crate::{Errno, InodeNumber, RenameFlags};

pub(super) const CHECKS: &[Check] = checks![
    a_renamed_file_keeps_its_number_and_bytes,
    a_rename_replaces_a_file,
    a_replaced_file_lives_while_open,
    a_renamed_directory_keeps_what_is_in_it,
    a_rename_replaces_an_empty_directory_only,
    kinds_do_not_replace_each_other,
    a_directory_does_not_move_into_itself,
    a_rename_to_itself_does_nothing,
    a_missing_name_is_not_renamed,
    no_replace_refuses_what_exists,
    an_exchange_swaps_two_names,
];

const ROOT: InodeNumber = InodeNumber::ROOT;
const PLAIN: RenameFlags = RenameFlags { no_replace: false, exchange: false };

async fn rename(probe: &Probe, from: &[u8], to: &[u8]) -> Result<(), Errno> {
    probe.fs.rename(me(), ROOT, from, ROOT, to, PLAIN).await
}

async fn a_renamed_file_keeps_its_number_and_bytes(probe: Probe) -> Outcome {
    let (before, directory) = (probe.find("file").await?, probe.inode("directory").await?);
    rename(&probe, b"file", b"new name").await.during("rename")?;
    let renamed = probe.find("new name").await?;
    same("number", renamed.inode, before.inode)?;
    same("mtime and links", (renamed.mtime, renamed.nlink), (before.mtime, 1))?;
    refused("the old name", probe.lookup(ROOT, b"file").await, &[Errno::ENOENT])?;
    let moved = probe.fs.rename(me(), ROOT, b"new name", directory, b"moved", PLAIN).await;
    moved.during("rename into another directory")?;
    let inode = probe.inode("directory/moved").await?;
    same("number", inode, before.inode)?;
    same_bytes("bytes", &probe.read_all(inode, 100).await?, b"some bytes\n")
}

async fn a_rename_replaces_a_file(probe: Probe) -> Outcome {
    let directory = probe.inode("directory").await?;
    let (file, inner) = (probe.inode("file").await?, probe.inode("directory/inner").await?);
    let replaced = probe.fs.rename(me(), ROOT, b"file", directory, b"inner", PLAIN).await;
    replaced.during("rename over a file")?;
    same("number", probe.inode("directory/inner").await?, file)?;
    same("links of what was replaced", probe.attr(inner).await?.nlink, 0)?;
    let names = probe.names(directory).await?;
    same("names", names, vec!["below", "inner"])?;
    rename(&probe, b"link", b"missing before").await.during("rename of a link")?;
    let link = probe.inode("missing before").await?;
    same("target", &probe.fs.readlink(link).await.during("readlink")?[..], b"file")
}

async fn a_replaced_file_lives_while_open(probe: Probe) -> Outcome {
    let directory = probe.inode("directory").await?;
    let inner = probe.inode("directory/inner").await?;
    let handle = probe.open(inner, crate::OpenFlags::READ).await?;
    let replaced = probe.fs.rename(me(), ROOT, b"file", directory, b"inner", PLAIN).await;
    replaced.during("rename over an open file")?;
    probe.fs.forget(inner, 1);
    let found = probe.fs.read(inner, handle, 0, 100).await.during("read")?;
    same_bytes("bytes of what was replaced", &found, b"inner")?;
    probe.close(inner, handle).await
}

async fn a_renamed_directory_keeps_what_is_in_it(probe: Probe) -> Outcome {
    let (directory, empty) = (probe.inode("directory").await?, probe.inode("empty").await?);
    let moved = probe.fs.rename(me(), ROOT, b"directory", empty, b"moved", PLAIN).await;
    moved.during("rename")?;
    same("number", probe.inode("empty/moved").await?, directory)?;
    let deeper = probe.inode("empty/moved/below/deeper").await?;
    same_bytes("bytes", &probe.read_all(deeper, 100).await?, b"deeper")?;
    match probe.fs.parent(me(), directory).await {
        Err(Errno::EOPNOTSUPP) => Ok(()),
        parent => same("parent", parent.during("parent")?.attr.inode, empty),
    }
}

async fn a_rename_replaces_an_empty_directory_only(probe: Probe) -> Outcome {
    let directory = probe.inode("directory").await?;
    let full = &[Errno::ENOTEMPTY, Errno::EEXIST];
    refused("over a full directory", rename(&probe, b"empty", b"directory").await, full)?;
    rename(&probe, b"directory", b"empty").await.during("over an empty directory")?;
    same("number", probe.inode("empty").await?, directory)?;
    probe.find("empty/below/deeper").await?;
    refused("the old name", probe.lookup(ROOT, b"directory").await, &[Errno::ENOENT])
}

async fn kinds_do_not_replace_each_other(probe: Probe) -> Outcome {
    for name in [&b"file"[..], b"link"] {
        refused("a file over a directory", rename(&probe, name, b"empty").await, &[Errno::EISDIR])?;
        refused(
            "a directory over a file",
            rename(&probe, b"empty", name).await,
            &[Errno::ENOTDIR],
        )?;
    }
    rename(&probe, b"file", b"link").await.during("a file over a link")
}

async fn a_directory_does_not_move_into_itself(probe: Probe) -> Outcome {
    let directory = probe.inode("directory").await?;
    let below = probe.inode("directory/below").await?;
    for into in [directory, below] {
        let answer = probe.fs.rename(me(), ROOT, b"directory", into, b"x", PLAIN).await;
        refused("rename into itself", answer, &[Errno::EINVAL])?;
    }
    probe.find("directory/below/deeper").await.map(drop)
}

async fn a_rename_to_itself_does_nothing(probe: Probe) -> Outcome {
    for name in [&b"file"[..], b"directory", b"link"] {
        let before = probe.find(name).await?;
        rename(&probe, name, name).await.during("rename to itself")?;
        let after = probe.find(name).await?;
        same("number and links", (after.inode, after.nlink), (before.inode, before.nlink))?;
    }
    let inode = probe.inode("file").await?;
    same_bytes("bytes", &probe.read_all(inode, 100).await?, b"some bytes\n")
}

async fn a_missing_name_is_not_renamed(probe: Probe) -> Outcome {
    let before = probe.names(ROOT).await?;
    for to in [&b"file"[..], b"new"] {
        refused("rename", rename(&probe, b"missing", to).await, &[Errno::ENOENT])?;
    }
    same("names", probe.names(ROOT).await?, before)
}

async fn no_replace_refuses_what_exists(probe: Probe) -> Outcome {
    let flags = RenameFlags { no_replace: true, exchange: false };
    for to in [&b"link"[..], b"empty", b"directory"] {
        let answer = probe.fs.rename(me(), ROOT, b"file", ROOT, to, flags).await;
        refused("rename onto what exists", answer, &[Errno::EEXIST])?;
    }
    let renamed = probe.fs.rename(me(), ROOT, b"file", ROOT, b"new", flags).await;
    renamed.during("rename to a new name")?;
    probe.find("new").await.map(drop)
}

async fn an_exchange_swaps_two_names(probe: Probe) -> Outcome {
    probe.needs(probe.features.exchange, "it does not exchange names")?;
    let flags = RenameFlags { no_replace: false, exchange: true };
    let below = probe.inode("directory/below").await?;
    let (file, empty) = (probe.inode("file").await?, probe.inode("empty").await?);
    let swapped = probe.fs.rename(me(), ROOT, b"file", ROOT, b"empty", flags).await;
    swapped.during("exchange")?;
    same("numbers", (probe.inode("file").await?, probe.inode("empty").await?), (empty, file))?;
    // Across directories, of different kinds.
    let swapped = probe.fs.rename(me(), ROOT, b"empty", below, b"deeper", flags).await;
    swapped.during("exchange across directories")?;
    same("number", probe.inode("directory/below/deeper").await?, file)?;
    let found = probe.inode("empty").await?;
    same_bytes("bytes", &probe.read_all(found, 100).await?, b"deeper")?;
    let missing = probe.fs.rename(me(), ROOT, b"file", ROOT, b"missing", flags).await;
    refused("exchange with nothing", missing, &[Errno::ENOENT])?;
    let directory = probe.inode("directory").await?;
    let within = probe.fs.rename(me(), ROOT, b"directory", directory, b"below", flags).await;
    refused("exchange with its own child", within, &[Errno::EINVAL])
}
