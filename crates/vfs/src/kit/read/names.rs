//! Finding files by name, and letting go of them.

use std::collections::BTreeSet;

use bytes::Bytes;

use crate::kit::probe::{During, Outcome, Probe, ensure, me, refused, same, shown};
use crate::kit::{Check, checks, tree};
use crate::{
    Entry, Errno, FileKind, InodeNumber, MAX_NAME_BYTES, MAX_PERSISTENT_HANDLE_BYTES, OpenFlags,
    PersistentHandle,
};

pub(super) const CHECKS: &[Check] = checks![
    the_root_is_a_directory,
    every_name_is_found,
    names_are_found_together_as_they_are_alone,
    names_that_look_alike_are_different_files,
    a_missing_name_is_enoent,
    a_name_below_a_file_is_enotdir,
    an_impossible_name_is_einval,
    a_name_of_256_bytes_is_too_long,
    one_file_has_one_number,
    an_unknown_number_is_refused,
    a_directory_knows_its_parent,
    a_forgotten_file_is_found_by_its_handle,
    forgetting_takes_nothing_away,
    an_open_file_outlives_forget,
];

async fn the_root_is_a_directory(probe: Probe) -> Outcome {
    let attr = probe.attr(InodeNumber::ROOT).await?;
    same("number of the root", attr.inode, InodeNumber::ROOT)?;
    same("kind of the root", attr.kind, FileKind::Directory)
}

fn kind_of(node: &tree::Node) -> FileKind {
    match node.body {
        tree::Body::File(_) => FileKind::Regular,
        tree::Body::Directory(_) => FileKind::Directory,
        tree::Body::Symlink(_) => FileKind::Symlink,
    }
}

async fn every_name_is_found(probe: Probe) -> Outcome {
    for (path, node) in probe.tree.nodes() {
        let attr = probe.find(&path).await?;
        same(format!("kind of {}", shown(&path)), attr.kind, kind_of(node))?;
        if attr.inode != InodeNumber::ROOT {
            probe.fs.forget(attr.inode, 1);
        }
    }
    Ok(())
}

async fn names_are_found_together_as_they_are_alone(probe: Probe) -> Outcome {
    let names = ["file", "nothing", "directory", "link", "file"];
    let asked = names.map(|name| Bytes::from_static(name.as_bytes())).into();
    let together =
        probe.fs.lookup_all(me(), InodeNumber::ROOT, asked).await.during("lookup_all")?;
    same("answers", together.len(), names.len())?;
    for (name, found) in names.into_iter().zip(together) {
        let alone = probe.fs.lookup(me(), InodeNumber::ROOT, name.as_bytes()).await;
        let number = |entry: Entry| entry.attr.inode;
        same(name, found.map(number), alone.map(number))?;
        for held in [found, alone].into_iter().flatten() {
            probe.fs.forget(held.attr.inode, 1);
        }
    }
    Ok(())
}

async fn names_that_look_alike_are_different_files(probe: Probe) -> Outcome {
    let alike: [&[&str]; 2] = [
        &["names/caf\u{e9} composed", "names/cafe\u{301} composed"],
        &["names/Case", "names/case", "names/CASE"],
    ];
    for paths in alike {
        let mut numbers = BTreeSet::new();
        for path in paths {
            let inode = probe.inode(path).await?;
            ensure(numbers.insert(inode), || format!("{path} is the same file as another"))?;
            let content = probe.tree.get(path).and_then(|node| node.content().cloned());
            let expected = content.expect("the fixture has it").read(0, 1000);
            same(path, probe.read_all(inode, 100).await?, expected)?;
        }
    }
    Ok(())
}

async fn a_missing_name_is_enoent(probe: Probe) -> Outcome {
    let directory = probe.inode("directory").await?;
    let longest = [b'z'; MAX_NAME_BYTES];
    let names: [&[u8]; 9] =
        [b"inne", b"inner ", b"Inner", b" inner", b"inner\n", b"...", b"*", &[0xff], &longest];
    for name in names {
        refused(shown(name), probe.lookup(directory, name).await, &[Errno::ENOENT])?;
    }
    let empty = probe.inode("empty").await?;
    refused("in an empty directory", probe.lookup(empty, b"x").await, &[Errno::ENOENT])
}

async fn a_name_below_a_file_is_enotdir(probe: Probe) -> Outcome {
    for path in ["file", "link"] {
        let inode = probe.inode(path).await?;
        refused(path, probe.lookup(inode, b"below").await, &[Errno::ENOTDIR])?;
        refused(path, probe.fs.opendir(me(), inode).await, &[Errno::ENOTDIR])?;
    }
    Ok(())
}

async fn an_impossible_name_is_einval(probe: Probe) -> Outcome {
    let names: [&[u8]; 8] =
        [b"", b".", b"..", b"/", b"file/", b"directory/inner", b"fi\0le", b"\0"];
    for name in names {
        let answer = probe.lookup(InodeNumber::ROOT, name).await;
        refused(shown(name), answer, &[Errno::EINVAL])?;
    }
    Ok(())
}

async fn a_name_of_256_bytes_is_too_long(probe: Probe) -> Outcome {
    let directory = probe.inode("names").await?;
    for len in [MAX_NAME_BYTES + 1, 4096, 1 << 20] {
        let answer = probe.lookup(directory, &vec![b'n'; len]).await;
        refused(format!("{len} bytes"), answer, &[Errno::ENAMETOOLONG])?;
    }
    Ok(())
}

async fn one_file_has_one_number(probe: Probe) -> Outcome {
    let mut numbers = BTreeSet::new();
    for (path, _) in probe.tree.nodes() {
        let first = probe.find(&path).await?;
        let second = probe.find(&path).await?;
        let shown = shown(&path);
        same(format!("number of {shown}, looked up twice"), second.inode, first.inode)?;
        ensure(numbers.insert(first.inode), || {
            format!("{shown} has the number of another file, {:?}", first.inode)
        })?;
        ensure(first.inode.0 != 0, || format!("{shown} has number 0"))?;
    }
    // All are held until here, so that none could be given away meanwhile.
    for inode in numbers {
        probe.fs.forget(inode, 2);
    }
    Ok(())
}

async fn an_unknown_number_is_refused(probe: Probe) -> Outcome {
    let gone = [Errno::ESTALE, Errno::ENOENT];
    for number in [0, u64::MAX, u64::MAX / 2, 0x1234_5678_9abc] {
        let inode = InodeNumber(number);
        refused("getattr", probe.fs.getattr(inode, None).await, &gone)?;
        refused("lookup", probe.lookup(inode, b"x").await, &gone)?;
        refused("open", probe.fs.open(me(), inode, OpenFlags::READ).await, &gone)?;
        refused("opendir", probe.fs.opendir(me(), inode).await, &gone)?;
        refused("readlink", probe.fs.readlink(inode).await, &gone)?;
    }
    Ok(())
}

async fn a_directory_knows_its_parent(probe: Probe) -> Outcome {
    let directory = probe.inode("directory").await?;
    let below = probe.inode("directory/below").await?;
    let parent = probe.fs.parent(me(), below).await;
    if matches!(parent, Err(Errno::EOPNOTSUPP)) {
        return probe.needs(false, "it does not look up parents");
    }
    same("parent of directory/below", parent.during("parent")?.attr.inode, directory)?;
    let top = probe.fs.parent(me(), directory).await.during("parent")?;
    same("parent of directory", top.attr.inode, InodeNumber::ROOT)?;
    let root = probe.fs.parent(me(), InodeNumber::ROOT).await.during("parent")?;
    same("parent of the root", root.attr.inode, InodeNumber::ROOT)
}

async fn a_forgotten_file_is_found_by_its_handle(probe: Probe) -> Outcome {
    for path in ["directory/inner", "directory", "link"] {
        let before = probe.find(path).await?;
        let handle = match probe.fs.handle_of(before.inode).await {
            Err(Errno::EOPNOTSUPP) => return probe.needs(false, "it has no persistent handles"),
            handle => handle.during("handle_of")?,
        };
        probe.fs.forget(before.inode, 1);
        let found = probe.fs.by_handle(me(), &handle).await;
        same(path, found.during("by_handle")?.attr, before)?;
        same("its handle", probe.fs.handle_of(before.inode).await.during("handle_of")?, handle)?;
        probe.fs.forget(before.inode, 1);
    }
    let unknown = InodeNumber(0x1234_5678_9abc);
    refused("a number of no file", probe.fs.handle_of(unknown).await, &[Errno::ESTALE])?;
    for len in [0, 1, 16, MAX_PERSISTENT_HANDLE_BYTES] {
        let handle = PersistentHandle::new(vec![0xa5; len].into()).during("handle")?;
        let found = probe.fs.by_handle(me(), &handle).await;
        refused(format!("{len} bytes of no handle"), found, &[Errno::ESTALE])?;
    }
    Ok(())
}

async fn forgetting_takes_nothing_away(probe: Probe) -> Outcome {
    for (inode, count) in [(u64::MAX, 1), (0, u64::MAX), (1, 1000), (1, u64::MAX)] {
        probe.fs.forget(InodeNumber(inode), count);
    }
    same("kind of the root", probe.attr(InodeNumber::ROOT).await?.kind, FileKind::Directory)?;
    for path in ["directory/inner", "sizes/65537", "names", "link"] {
        let before = probe.find(path).await?;
        let again = probe.inode(path).await?;
        probe.fs.forget(again, 1);
        same(path, probe.attr(before.inode).await?.size_bytes, before.size_bytes)?;
        probe.fs.forget(before.inode, 1);
        probe.fs.forget(before.inode, 1);
        let after = probe.find(path).await?;
        same(path, (after.kind, after.size_bytes), (before.kind, before.size_bytes))?;
    }
    Ok(())
}

async fn an_open_file_outlives_forget(probe: Probe) -> Outcome {
    let path = "sizes/65537";
    let inode = probe.inode(path).await?;
    let handle = probe.open(inode, OpenFlags::READ).await?;
    probe.fs.forget(inode, 1);
    let expected = probe.tree.get(path).and_then(|n| n.content()).expect("in the fixture");
    let part = probe.fs.read(inode, handle, 65_000, 1000).await.during("read after forget")?;
    same("bytes read after forget", part.to_vec(), expected.read(65_000, 1000))?;
    probe.close(inode, handle).await
}
