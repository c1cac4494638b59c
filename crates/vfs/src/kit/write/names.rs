//! Making and removing names.

use crate::kit::probe::{During, Outcome, Probe, ensure, me, refused, same, same_bytes};
use crate::kit::{Check, checks};
use crate::{
    CreateVerifier, DirEntry, Entry, Errno, FileKind, FileTime, InodeNumber, OpenFlags, SetAttr,
    SetTime, Writer,
};

pub(super) const CHECKS: &[Check] = checks![
    what_is_made_is_found_and_listed,
    a_name_that_exists_is_eexist,
    impossible_names_are_not_made,
    nothing_is_made_below_a_file,
    an_exclusive_create_makes_a_file_once,
    an_exclusive_creation_is_known_again_by_its_verifier,
    an_exclusive_creation_ends_with_its_files_times,
    a_plain_create_opens_what_is_there,
    every_kind_of_special_file_is_kept,
    a_new_file_has_one_link,
    a_directory_counts_its_subdirectories,
    an_unlinked_file_is_gone,
    an_unlinked_file_lives_while_open,
    unlink_refuses_directories,
    rmdir_refuses_files_and_full_directories,
    a_removed_directory_takes_no_files,
    a_handle_of_a_deleted_file_is_stale,
    hard_links_are_one_file,
    hard_links_to_directories_are_refused,
    a_listing_is_one_snapshot,
    a_listing_goes_on_in_another_open,
    ten_thousand_names_fit,
];

const ROOT: InodeNumber = InodeNumber::ROOT;

async fn what_is_made_is_found_and_listed(probe: Probe) -> Outcome {
    let directory = probe.fs.mkdir(me(), ROOT, b"made", 0o750).await.during("mkdir")?.attr;
    same("kind", directory.kind, FileKind::Directory)?;
    same("mode", directory.mode, 0o750)?;
    let names: [&[u8]; 4] = [b"plain", b"new\nline", b"\xff\xfe", &[b'n'; 255]];
    for name in names {
        let kind = FileKind::Regular;
        let made = probe.fs.mknod(me(), directory.inode, name, kind, 0o640, 0).await;
        let made = made.during("mknod")?.attr;
        same("kind", made.kind, FileKind::Regular)?;
        same("mode and size", (made.mode, made.size_bytes), (0o640, 0))?;
        let found = probe.lookup(directory.inode, name).await.during("lookup")?.attr;
        same("the file found", found.inode, made.inode)?;
    }
    let link =
        probe.fs.symlink(me(), directory.inode, b"to", b"../file").await.during("symlink")?;
    same("kind", link.attr.kind, FileKind::Symlink)?;
    let target = probe.fs.readlink(link.attr.inode).await.during("readlink")?;
    same("target", &target[..], b"../file")?;
    let mut expected: Vec<&[u8]> = names.to_vec();
    expected.push(b"to");
    expected.sort_unstable();
    same("names", probe.names(directory.inode).await?, expected)
}

async fn a_name_that_exists_is_eexist(probe: Probe) -> Outcome {
    let fs = &probe.fs;
    let inner = probe.inode("directory/inner").await?;
    for name in [&b"file"[..], b"directory", b"link", b"empty"] {
        let exists = &[Errno::EEXIST];
        refused("mkdir", fs.mkdir(me(), ROOT, name, 0o755).await, exists)?;
        refused("symlink", fs.symlink(me(), ROOT, name, b"x").await, exists)?;
        let made = fs.mknod(me(), ROOT, name, FileKind::Regular, 0o644, 0).await;
        refused("mknod", made, exists)?;
        if probe.features.hard_links {
            refused("link", fs.link(me(), inner, ROOT, name).await, exists)?;
        }
    }
    let inode = probe.inode("file").await?;
    same_bytes("file", &probe.read_all(inode, 100).await?, b"some bytes\n")
}

async fn impossible_names_are_not_made(probe: Probe) -> Outcome {
    let (fs, flags) = (&probe.fs, OpenFlags::READ_WRITE);
    let before = probe.names(ROOT).await?;
    let too_long = [b'n'; 256];
    let names: [(&[u8], Errno); 6] = [
        (b"", Errno::EINVAL),
        (b".", Errno::EINVAL),
        (b"..", Errno::EINVAL),
        (b"a/b", Errno::EINVAL),
        (b"a\0b", Errno::EINVAL),
        (&too_long, Errno::ENAMETOOLONG),
    ];
    for (name, errno) in names {
        refused("mkdir", fs.mkdir(me(), ROOT, name, 0o755).await, &[errno])?;
        refused("symlink", fs.symlink(me(), ROOT, name, b"x").await, &[errno])?;
        refused("create", fs.create(me(), ROOT, name, 0o644, flags).await, &[errno])?;
        let rename = fs.rename(me(), ROOT, b"file", ROOT, name, Default::default()).await;
        refused("rename", rename, &[errno])?;
    }
    same("names", probe.names(ROOT).await?, before)
}

async fn nothing_is_made_below_a_file(probe: Probe) -> Outcome {
    let (fs, file) = (&probe.fs, probe.inode("file").await?);
    let not = &[Errno::ENOTDIR];
    refused("mkdir", fs.mkdir(me(), file, b"x", 0o755).await, not)?;
    let created = fs.create(me(), file, b"x", 0o644, OpenFlags::READ_WRITE).await;
    refused("create", created, not)?;
    refused("symlink", fs.symlink(me(), file, b"x", b"y").await, not)?;
    refused("unlink", fs.unlink(me(), file, b"x").await, not)?;
    let rename = fs.rename(me(), ROOT, b"empty", file, b"x", Default::default()).await;
    refused("rename", rename, not)
}

async fn an_exclusive_create_makes_a_file_once(probe: Probe) -> Outcome {
    let flags = OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::EXCLUSIVE);
    let (entry, opened) =
        probe.fs.create(me(), ROOT, b"once", 0o600, flags).await.during("create")?;
    same("mode", entry.attr.mode, 0o600)?;
    probe.close(entry.attr.inode, opened.handle).await?;
    for name in [&b"once"[..], b"file", b"link", b"directory"] {
        let again = probe.fs.create(me(), ROOT, name, 0o600, flags).await;
        refused("create again", again, &[Errno::EEXIST])?;
    }
    Ok(())
}

async fn exclusive(probe: &Probe, name: &[u8], verifier: u64) -> Result<Entry, Errno> {
    let verifier = CreateVerifier(verifier.to_be_bytes());
    probe.fs.create_exclusive(me(), ROOT, name, 0o600, verifier).await
}

async fn an_exclusive_creation_is_known_again_by_its_verifier(probe: Probe) -> Outcome {
    // What a file system loses that cuts times to fewer seconds or takes some for errors.
    for verifier in
        [0, u64::MAX, 0x8000_0000_7fff_ffff, 0x7fff_ffff_8000_0000, 0x0123_4567_89ab_cdef]
    {
        let name = format!("{verifier:x}");
        let made = exclusive(&probe, name.as_bytes(), verifier).await.during("creation")?.attr;
        same("kind", made.kind, FileKind::Regular)?;
        same("mode and size", (made.mode, made.size_bytes), (0o600, 0))?;
        same("attributes", probe.find(&name).await?, made)?;
        let again = exclusive(&probe, name.as_bytes(), verifier).await;
        same("the file of the second call", again.during("the second call")?.attr, made)?;
        for bit in [0, 15, 30, 31, 32, 47, 62, 63] {
            let other = exclusive(&probe, name.as_bytes(), verifier ^ 1 << bit).await;
            refused(format_args!("a verifier with another bit {bit}"), other, &[Errno::EEXIST])?;
        }
        for name in [&b"file"[..], b"link", b"directory"] {
            let there = exclusive(&probe, name, verifier).await;
            refused("a name that exists", there, &[Errno::EEXIST])?;
        }
    }
    let nothing = exclusive(&probe, &[b'n'; 256], 1).await;
    refused("a name that is too long", nothing, &[Errno::ENAMETOOLONG])
}

async fn an_exclusive_creation_ends_with_its_files_times(probe: Probe) -> Outcome {
    let past = Some(SetTime::To(FileTime { secs: 1000, nanos: 0 }));
    let changes = [
        SetAttr { atime: past, ..SetAttr::default() },
        SetAttr { mtime: Some(SetTime::Now), ..SetAttr::default() },
        SetAttr { size_bytes: Some(1), ..SetAttr::default() },
    ];
    for (verifier, change) in (7..).zip(changes) {
        let name = format!("{verifier}");
        let made = exclusive(&probe, name.as_bytes(), verifier).await.during("creation")?.attr;
        let owned = SetAttr { mode: Some(0o640), uid: Some(5), ..SetAttr::default() };
        probe.fs.setattr(me(), made.inode, None, owned).await.during("a new mode and owner")?;
        let again = exclusive(&probe, name.as_bytes(), verifier).await;
        same("the file", again.during("after another mode")?.attr.inode, made.inode)?;
        probe.fs.setattr(me(), made.inode, None, change).await.during(format!("{change:?}"))?;
        let after = exclusive(&probe, name.as_bytes(), verifier).await;
        refused(format!("after {change:?}"), after, &[Errno::EEXIST])?;
    }
    Ok(())
}

async fn a_plain_create_opens_what_is_there(probe: Probe) -> Outcome {
    let file = probe.inode("file").await?;
    let created = probe.fs.create(me(), ROOT, b"file", 0o600, OpenFlags::READ_WRITE).await;
    let (entry, opened) = created.during("create")?;
    same("the file opened", entry.attr.inode, file)?;
    same("its mode", entry.attr.mode, 0o644)?;
    probe.close(file, opened.handle).await?;
    same_bytes("its bytes", &probe.read_all(file, 100).await?, b"some bytes\n")?;
    let flags = OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::TRUNCATE);
    let created = probe.fs.create(me(), ROOT, b"file", 0o600, flags).await;
    let (entry, opened) = created.during("create with O_TRUNC")?;
    same("size after O_TRUNC", entry.attr.size_bytes, 0)?;
    probe.close(file, opened.handle).await
}

async fn every_kind_of_special_file_is_kept(probe: Probe) -> Outcome {
    probe.needs(probe.features.special_files, "it has no special files")?;
    let kinds = [
        (FileKind::Fifo, 0),
        (FileKind::Socket, 0),
        (FileKind::CharDevice, 0x0103),
        (FileKind::BlockDevice, 0x0801),
    ];
    for (kind, rdev) in kinds {
        let name = format!("{kind:?}");
        let made = probe.fs.mknod(me(), ROOT, name.as_bytes(), kind, 0o600, rdev).await;
        made.during(format!("mknod of a {kind:?}"))?;
        let found = probe.find(&name).await?;
        same("kind, mode, number", (found.kind, found.mode, found.rdev), (kind, 0o600, rdev))?;
        let listed = probe.list(ROOT, 100, false).await?;
        let listed = listed.iter().find(|entry| entry.name == name.as_bytes());
        same("kind in the listing", listed.map(|entry| entry.kind), Some(kind))?;
    }
    Ok(())
}

async fn a_new_file_has_one_link(probe: Probe) -> Outcome {
    let created = probe.fs.create(me(), ROOT, b"new", 0o644, OpenFlags::READ_WRITE).await;
    let (entry, opened) = created.during("create")?;
    same("links", entry.attr.nlink, 1)?;
    same("blocks", entry.attr.blocks_512, 0)?;
    probe.fs.unlink(me(), ROOT, b"new").await.during("unlink")?;
    same("links once unlinked", probe.attr(entry.attr.inode).await?.nlink, 0)?;
    probe.close(entry.attr.inode, opened.handle).await
}

async fn a_directory_counts_its_subdirectories(probe: Probe) -> Outcome {
    let before = probe.attr(ROOT).await?.nlink;
    if before == 1 {
        return probe.needs(false, "its directories have one link (as Btrfs's)");
    }
    for (index, name) in [&b"one"[..], b"two"].into_iter().enumerate() {
        let made = probe.fs.mkdir(me(), ROOT, name, 0o755).await.during("mkdir")?.attr;
        same("links of a new directory", made.nlink, 2)?;
        same("links of its parent", probe.attr(ROOT).await?.nlink, before + index as u32 + 1)?;
    }
    let (one, two) = (probe.inode("one").await?, probe.inode("two").await?);
    let moved = probe.fs.rename(me(), ROOT, b"one", two, b"one", Default::default()).await;
    moved.during("rename")?;
    same("links of the root", probe.attr(ROOT).await?.nlink, before + 1)?;
    same("links of two", probe.attr(two).await?.nlink, 3)?;
    probe.fs.rmdir(me(), two, b"one").await.during("rmdir")?;
    same("links of two", probe.attr(two).await?.nlink, 2)?;
    probe.fs.forget(one, 1);
    probe.fs.rmdir(me(), ROOT, b"two").await.during("rmdir")?;
    same("links of the root", probe.attr(ROOT).await?.nlink, before)
}

async fn an_unlinked_file_is_gone(probe: Probe) -> Outcome {
    for name in [&b"file"[..], b"link"] {
        probe.fs.unlink(me(), ROOT, name).await.during("unlink")?;
        refused("lookup", probe.lookup(ROOT, name).await, &[Errno::ENOENT])?;
        refused("unlink again", probe.fs.unlink(me(), ROOT, name).await, &[Errno::ENOENT])?;
    }
    let names = probe.names(ROOT).await?;
    same("names", names, vec!["directory", "empty"])
}

async fn an_unlinked_file_lives_while_open(probe: Probe) -> Outcome {
    let inode = probe.inode("file").await?;
    let handle = probe.open(inode, OpenFlags::READ_WRITE).await?;
    probe.fs.unlink(me(), ROOT, b"file").await.during("unlink")?;
    probe.fs.forget(inode, 1);
    let found = probe.fs.read(inode, handle, 0, 100).await.during("read once unlinked")?;
    same_bytes("bytes once unlinked", &found, b"some bytes\n")?;
    let taken = probe.fs.write(Writer::At(me()), inode, handle, 5, "BYTES".into()).await;
    same("bytes taken", taken.during("write once unlinked")?, 5)?;
    let found = probe.fs.read(inode, handle, 0, 100).await.during("read")?;
    same_bytes("bytes written once unlinked", &found, b"some BYTES\n")?;
    // A new file of that name is another file.
    let created = probe.fs.create(me(), ROOT, b"file", 0o644, OpenFlags::READ_WRITE).await;
    let (entry, opened) = created.during("create")?;
    ensure(entry.attr.inode != inode, || "the number of an open file was used again".to_owned())?;
    same("size of the new file", entry.attr.size_bytes, 0)?;
    probe.close(entry.attr.inode, opened.handle).await?;
    probe.close(inode, handle).await
}

async fn unlink_refuses_directories(probe: Probe) -> Outcome {
    for name in [&b"directory"[..], b"empty"] {
        let answer = probe.fs.unlink(me(), ROOT, name).await;
        refused("unlink of a directory", answer, &[Errno::EISDIR, Errno::EPERM])?;
    }
    probe.find("directory/below/deeper").await.map(drop)
}

async fn rmdir_refuses_files_and_full_directories(probe: Probe) -> Outcome {
    let fs = &probe.fs;
    for name in [&b"file"[..], b"link"] {
        refused("rmdir of a file", fs.rmdir(me(), ROOT, name).await, &[Errno::ENOTDIR])?;
    }
    let full = &[Errno::ENOTEMPTY, Errno::EEXIST];
    refused("rmdir", fs.rmdir(me(), ROOT, b"directory").await, full)?;
    refused("rmdir", fs.rmdir(me(), ROOT, b"missing").await, &[Errno::ENOENT])?;
    fs.rmdir(me(), ROOT, b"empty").await.during("rmdir of an empty directory")?;
    refused("lookup", probe.lookup(ROOT, b"empty").await, &[Errno::ENOENT])
}

async fn a_removed_directory_takes_no_files(probe: Probe) -> Outcome {
    let inode = probe.inode("empty").await?;
    let handle = probe.opendir(inode).await?;
    probe.fs.rmdir(me(), ROOT, b"empty").await.during("rmdir")?;
    let gone = &[Errno::ENOENT, Errno::ESTALE];
    refused("mkdir", probe.fs.mkdir(me(), inode, b"x", 0o755).await, gone)?;
    let created = probe.fs.create(me(), inode, b"x", 0o644, OpenFlags::READ_WRITE).await;
    refused("create", created, gone)?;
    let rename = probe.fs.rename(me(), ROOT, b"file", inode, b"x", Default::default()).await;
    refused("rename", rename, gone)?;
    same("entries", probe.list_from(inode, handle, 0, 10, true).await?.len(), 0)?;
    probe.fs.closedir(inode, handle).await.during("closedir")
}

async fn a_handle_of_a_deleted_file_is_stale(probe: Probe) -> Outcome {
    let inode = probe.inode("file").await?;
    let handle = match probe.fs.handle_of(inode).await {
        Err(Errno::EOPNOTSUPP) => return probe.needs(false, "it has no persistent handles"),
        handle => handle.during("handle_of")?,
    };
    probe.fs.unlink(me(), ROOT, b"file").await.during("unlink")?;
    let held = probe.fs.by_handle(me(), &handle).await.during("by_handle while it is held")?;
    same("number", held.attr.inode, inode)?;
    probe.fs.forget(inode, 2);
    refused("by_handle", probe.fs.by_handle(me(), &handle).await, &[Errno::ESTALE])?;
    // Some file system gives one of these the number.
    for n in 0..100 {
        let name = format!("next{n}");
        let kind = FileKind::Regular;
        probe.fs.mknod(me(), ROOT, name.as_bytes(), kind, 0o644, 0).await.during("mknod")?;
    }
    refused("by_handle", probe.fs.by_handle(me(), &handle).await, &[Errno::ESTALE])
}

async fn hard_links_are_one_file(probe: Probe) -> Outcome {
    probe.needs(probe.features.hard_links, "it has no hard links")?;
    let (inode, directory) = (probe.inode("file").await?, probe.inode("directory").await?);
    let linked = probe.fs.link(me(), inode, directory, b"also").await.during("link")?.attr;
    same("the file linked", (linked.inode, linked.nlink), (inode, 2))?;
    same("links by the old name", probe.find("file").await?.nlink, 2)?;
    let handle = probe.open(inode, OpenFlags::WRITE).await?;
    probe.fs.write(Writer::At(me()), inode, handle, 0, "SOME".into()).await.during("write")?;
    probe.close(inode, handle).await?;
    let also = probe.inode("directory/also").await?;
    same_bytes("bytes by the new name", &probe.read_all(also, 100).await?, b"SOME bytes\n")?;
    probe.fs.unlink(me(), ROOT, b"file").await.during("unlink")?;
    same("links by the new name", probe.find("directory/also").await?.nlink, 1)?;
    same_bytes("bytes afterwards", &probe.read_all(also, 100).await?, b"SOME bytes\n")?;
    // Both names are one file: renaming one onto the other does nothing.
    probe.fs.link(me(), inode, ROOT, b"again").await.during("link")?;
    let flags = Default::default();
    probe.fs.rename(me(), ROOT, b"again", directory, b"also", flags).await.during("rename")?;
    same("links", probe.find("again").await?.nlink, 2)
}

async fn hard_links_to_directories_are_refused(probe: Probe) -> Outcome {
    probe.needs(probe.features.hard_links, "it has no hard links")?;
    let inode = probe.inode("directory").await?;
    refused("link", probe.fs.link(me(), inode, ROOT, b"also").await, &[Errno::EPERM])
}

/// A directory of names of which some go and others come while it is listed.
struct BusyDirectory(InodeNumber);

impl BusyDirectory {
    const NAMES: usize = 40;

    async fn make(probe: &Probe, parts: &[&str], count: usize, directory: InodeNumber) -> Outcome {
        for index in 0..count {
            for part in parts {
                let name = format!("{index:02} {part}");
                let made =
                    probe.fs.mknod(me(), directory, name.as_bytes(), FileKind::Regular, 0o644, 0);
                made.await.during("mknod")?;
            }
        }
        Ok(())
    }

    async fn new(probe: &Probe) -> Outcome<BusyDirectory> {
        let directory =
            probe.fs.mkdir(me(), ROOT, b"busy", 0o755).await.during("mkdir")?.attr.inode;
        BusyDirectory::make(probe, &["stays", "goes"], BusyDirectory::NAMES, directory).await?;
        Ok(BusyDirectory(directory))
    }

    async fn change(&self, probe: &Probe) -> Outcome {
        for index in 0..BusyDirectory::NAMES {
            let name = format!("{index:02} goes");
            probe.fs.unlink(me(), self.0, name.as_bytes()).await.during("unlink")?;
        }
        BusyDirectory::make(probe, &["comes"], 5, self.0).await
    }

    /// What was there all the time is listed once.
    fn check<'a>(listed: impl Iterator<Item = &'a DirEntry>) -> Outcome {
        let mut stayed: Vec<_> = listed.map(|entry| entry.name.clone()).collect();
        stayed.retain(|name| name.ends_with(b" stays"));
        stayed.sort();
        let expected: Vec<_> =
            (0..BusyDirectory::NAMES).map(|index| format!("{index:02} stays")).collect();
        same("entries that were there all the time", stayed, expected)
    }
}

async fn a_listing_is_one_snapshot(probe: Probe) -> Outcome {
    let busy = BusyDirectory::new(&probe).await?;
    let handle = probe.opendir(busy.0).await?;
    let first = probe.fs.readdir(busy.0, handle, 0, 30, false).await.during("readdir")?;
    busy.change(&probe).await?;
    let cookie = first.last().map_or(0, |entry| entry.cookie);
    let rest = probe.list_from(busy.0, handle, cookie, 7, true).await?;
    probe.fs.closedir(busy.0, handle).await.during("closedir")?;
    BusyDirectory::check(first.iter().chain(&rest))
}

/// Of file systems that say that their cookies last.
async fn a_listing_goes_on_in_another_open(probe: Probe) -> Outcome {
    if !probe.fs.has_lasting_cookies() {
        return Ok(());
    }
    let busy = BusyDirectory::new(&probe).await?;
    let (mut listed, mut cookie) = (Vec::new(), 0);
    loop {
        let handle = probe.opendir(busy.0).await?;
        let page = probe.fs.readdir(busy.0, handle, cookie, 7, false).await.during("readdir")?;
        probe.fs.closedir(busy.0, handle).await.during("closedir")?;
        if cookie == 0 {
            busy.change(&probe).await?;
        }
        let Some(last) = page.last() else { break };
        cookie = last.cookie;
        listed.extend(page);
    }
    BusyDirectory::check(listed.iter())
}

async fn ten_thousand_names_fit(probe: Probe) -> Outcome {
    const COUNT: usize = 10_000;
    let directory = probe.fs.mkdir(me(), ROOT, b"many", 0o755).await.during("mkdir")?.attr.inode;
    for index in 0..COUNT {
        let name = format!("name {index}");
        let made = probe.fs.symlink(me(), directory, name.as_bytes(), b"x").await;
        probe.fs.forget(made.during("symlink")?.attr.inode, 1);
    }
    same("names", probe.names(directory).await?.len(), COUNT)?;
    for index in (0..COUNT).step_by(2) {
        let name = format!("name {index}");
        probe.fs.unlink(me(), directory, name.as_bytes()).await.during("unlink")?;
    }
    same("names left", probe.names(directory).await?.len(), COUNT / 2)
}
