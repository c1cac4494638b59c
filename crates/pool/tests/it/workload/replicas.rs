//! All files as they lie on a member's disk: read through [`Disk`] and without any of the pool's code, so that a fault of that
//! code does not hide itself. The replicas of a pool have equal trees, and each tree is well-formed.

use std::collections::{BTreeMap, BTreeSet};

use atoll_pool::disk::simulated::SimulatedDisk;
use atoll_pool::disk::{Disk, DiskResult};
use atoll_vfs::{FileKind, FileTime};
use bytes::Bytes;

/// The attribute that holds a file's number.
const ID_ATTRIBUTE: &[u8] = b"trusted.atoll.id";
/// Where the root directory lies.
const ROOT_PATH: &str = "000/0000000000000001";

/// A file as it lies on the disk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct PlainFile {
    pub(crate) kind: FileKind,
    pub(crate) mode: u32,
    pub(crate) owner: (u32, u32),
    pub(crate) nlink: u32,
    pub(crate) rdev: u64,
    /// Of a regular file.
    pub(crate) bytes: Bytes,
    /// Of a symbolic link, a placeholder too.
    pub(crate) target: Bytes,
    /// All of them, the file's number too.
    pub(crate) xattrs: BTreeMap<Bytes, Bytes>,
    /// Of a regular file: when it was last written.
    pub(crate) mtime: Option<FileTime>,
    /// The first path of the same inode: this path, unless the file has several names.
    pub(crate) first_path: String,
}

/// Files by their paths within `slots`. The directories of the slots themselves are left out: a member may have one that is
/// empty.
pub(crate) type PlainTree = BTreeMap<String, PlainFile>;

/// What else than names, bytes and attributes is compared.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Compared {
    /// When regular files were last written.
    pub(crate) times: bool,
}

/// Everything below D/slots.
pub(crate) async fn plain_tree(disk: &SimulatedDisk) -> DiskResult<PlainTree> {
    let slots = disk.node(&disk.top(), b"slots").await?;
    let mut inodes = BTreeMap::new();
    let mut all = PlainTree::new();
    let mut open = vec![(slots, String::new())];
    while let Some((dir, path)) = open.pop() {
        for listed in disk.list(&dir).await? {
            let name = String::from_utf8_lossy(&listed.name).into_owned();
            let is_slot = path.is_empty();
            let path = if is_slot { name } else { format!("{path}/{name}") };
            let node = disk.node(&dir, &listed.name).await?;
            if !is_slot || listed.kind != FileKind::Directory {
                let (ino, file) = plain_file(disk, &node).await?;
                inodes.insert(path.clone(), ino);
                all.insert(path.clone(), file);
            }
            if listed.kind == FileKind::Directory {
                open.push((node, path));
            }
        }
    }
    let mut first_paths = BTreeMap::new();
    for (path, file) in &mut all {
        file.first_path = first_paths.entry(inodes[path]).or_insert_with(|| path.clone()).clone();
    }
    Ok(all)
}

async fn plain_file(
    disk: &SimulatedDisk,
    node: &<SimulatedDisk as Disk>::Node,
) -> DiskResult<(u64, PlainFile)> {
    let stat = disk.stat(node).await?;
    let is_regular = stat.kind == FileKind::Regular;
    let mut xattrs = BTreeMap::new();
    for name in disk.xattrs(node).await? {
        let value = disk.xattr(node, &name).await?;
        xattrs.insert(name, value);
    }
    let bytes = match is_regular {
        true => {
            let file = disk.open(node).await?;
            let len = usize::try_from(stat.size_bytes).expect("files of tests are small");
            disk.read(&file, 0, len).await?
        }
        false => Bytes::new(),
    };
    let target = match stat.kind {
        FileKind::Symlink => disk.read_node(node).await?,
        _ => Bytes::new(),
    };
    let file = PlainFile {
        kind: stat.kind,
        mode: stat.mode,
        owner: (stat.uid, stat.gid),
        nlink: stat.nlink,
        rdev: stat.rdev,
        bytes,
        target,
        xattrs,
        mtime: is_regular.then_some(stat.mtime),
        first_path: String::new(),
    };
    Ok((stat.ino, file))
}

/// How the tree of `one` differs from that of `other`, a line for each difference; none if they are equal.
pub(crate) fn differences(
    (one, first): (&str, &PlainTree),
    (other, second): (&str, &PlainTree),
    compared: Compared,
) -> Vec<String> {
    let mut lines = Vec::new();
    let paths: BTreeSet<&String> = first.keys().chain(second.keys()).collect();
    for path in paths {
        match (first.get(path), second.get(path)) {
            (Some(file), None) => lines.push(format!("{path}: on {one} alone: {}", brief(file))),
            (None, Some(file)) => lines.push(format!("{path}: on {other} alone: {}", brief(file))),
            (Some(first), Some(second)) => {
                let mut add = |what: &str, first: String, second: String| {
                    if first != second {
                        lines.push(format!("{path}: {what}: {one} {first}, {other} {second}"));
                    }
                };
                let text = |bytes: &Bytes| String::from_utf8_lossy(bytes).into_owned();
                add("kind", format!("{:?}", first.kind), format!("{:?}", second.kind));
                add("mode", format!("{:o}", first.mode), format!("{:o}", second.mode));
                add("owner", format!("{:?}", first.owner), format!("{:?}", second.owner));
                add("names", first.nlink.to_string(), second.nlink.to_string());
                add("device", first.rdev.to_string(), second.rdev.to_string());
                add("target", text(&first.target), text(&second.target));
                add("is the file of", first.first_path.clone(), second.first_path.clone());
                let names: BTreeSet<&Bytes> =
                    first.xattrs.keys().chain(second.xattrs.keys()).collect();
                for name in names {
                    let value = |file: &PlainFile| format!("{:?}", file.xattrs.get(name));
                    add(&text(name), value(first), value(second));
                }
                let size = |file: &PlainFile| format!("{} bytes", file.bytes.len());
                add("size", size(first), size(second));
                if let Some(at) = first_difference(&first.bytes, &second.bytes) {
                    add(&format!("byte {at}"), around(&first.bytes, at), around(&second.bytes, at));
                }
                if compared.times {
                    add("mtime", format!("{:?}", first.mtime), format!("{:?}", second.mtime));
                }
            }
            (None, None) => unreachable!("one of them has the path"),
        }
    }
    lines
}

fn brief(file: &PlainFile) -> String {
    let id = file.xattrs.get(ID_ATTRIBUTE).map(|id| hex(id));
    format!(
        "{:?} {:o} {:?}, {} bytes, file {id:?}",
        file.kind,
        file.mode,
        file.owner,
        file.bytes.len()
    )
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Where both have bytes, and other ones.
fn first_difference(first: &[u8], second: &[u8]) -> Option<usize> {
    first.iter().zip(second).position(|(first, second)| first != second)
}

/// The bytes of a file about an offset, as text.
fn around(bytes: &[u8], at: usize) -> String {
    let start = at / 64 * 64;
    let end = (start + 64).min(bytes.len());
    format!("{:?}", String::from_utf8_lossy(&bytes[start..end]))
}

/// A placeholder's target: slot and number, as in the path of the directory.
fn placeholder(file: &PlainFile) -> Option<String> {
    if file.kind != FileKind::Symlink {
        return None;
    }
    let mut rest = std::str::from_utf8(&file.target).ok()?.strip_prefix("../")?;
    while let Some(further) = rest.strip_prefix("../") {
        rest = further;
    }
    is_home(rest).then(|| rest.to_owned())
}

/// Whether the path is that of a directory that is always there, and has no name: of the root, or of the outside names of a group's
/// files.
fn is_fixed(home: &str) -> bool {
    home == ROOT_PATH || home.ends_with("0000000000002") && home.len() == 20
}

/// Whether the path is that of a distributed directory: three and sixteen hexadecimal digits.
fn is_home(path: &str) -> bool {
    let is_hex = |text: &str| text.bytes().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f'));
    path.split_once('/')
        .is_some_and(|(slot, id)| (slot.len(), id.len()) == (3, 16) && is_hex(slot) && is_hex(id))
}

/// What is wrong with a tree, a line for each fault: a placeholder that leads nowhere, a distributed directory with no name or
/// several or that cannot be reached from the root, a number that two files have, or that a directory's path contradicts.
pub(crate) fn faults(tree: &PlainTree) -> Vec<String> {
    let mut lines = Vec::new();
    let mut placeholders: BTreeMap<String, Vec<&String>> = BTreeMap::new();
    let mut by_id: BTreeMap<&Bytes, &String> = BTreeMap::new();
    for (path, file) in tree {
        if let Some(home) = placeholder(file) {
            placeholders.entry(home).or_default().push(path);
        }
        let Some(id) = file.xattrs.get(ID_ATTRIBUTE) else { continue };
        let other = by_id.entry(id).or_insert(&file.first_path);
        if **other != file.first_path {
            lines.push(format!("{path}: has the number {} of {other}", hex(id)));
        }
        if is_home(path) && !path.ends_with(&hex(id)) {
            lines.push(format!("{path}: has the number {}", hex(id)));
        }
    }
    for (home, names) in &placeholders {
        if tree.get(home).is_none_or(|file| file.kind != FileKind::Directory) {
            lines.push(format!("{}: leads to {home}, which is no directory", names[0]));
        }
        if names.len() > 1 {
            lines.push(format!("{home}: has several names: {names:?}"));
        }
    }
    if !tree.contains_key(ROOT_PATH) {
        lines.push(format!("{ROOT_PATH}: there is no root directory"));
    }
    let fixed = tree.keys().map(String::as_str).filter(|path| is_fixed(path));
    let mut open: Vec<&str> = fixed.collect();
    let mut reached: BTreeSet<&str> = open.iter().copied().collect();
    while let Some(home) = open.pop() {
        let below = format!("{home}/");
        for (led_to, names) in &placeholders {
            let is_below = names.iter().any(|name| name.starts_with(&below));
            if is_below && reached.insert(led_to) {
                open.push(led_to);
            }
        }
    }
    for path in tree.keys().filter(|path| is_home(path)) {
        match placeholders.contains_key(path) {
            _ if is_fixed(path) => {}
            false => lines.push(format!("{path}: has no name")),
            true if !reached.contains(path.as_str()) => {
                lines.push(format!("{path}: cannot be reached from the root"));
            }
            true => {}
        }
    }
    lines
}

/// The first of many lines.
fn listed(lines: &[String]) -> String {
    const SHOWN: usize = 20;
    let mut text = lines.iter().take(SHOWN).map(|line| format!("  {line}\n")).collect::<String>();
    if lines.len() > SHOWN {
        text.push_str(&format!("  and {} more\n", lines.len() - SHOWN));
    }
    text
}

/// That members' disks are well-formed and equal.
///
/// # Panics
/// If they are not, with the first differences and `what`.
pub(crate) async fn assert_equal_replicas(
    members: &[(&str, &SimulatedDisk)],
    compared: Compared,
    what: &str,
) {
    let mut trees = Vec::new();
    for (name, disk) in members {
        let tree = plain_tree(disk).await.unwrap_or_else(|errno| panic!("{what}: {name}: {errno}"));
        let faults = faults(&tree);
        assert!(faults.is_empty(), "{what}: the disk of {name}:\n{}", listed(&faults));
        trees.push((*name, tree));
    }
    for pair in trees.windows(2) {
        let [(one, first), (other, second)] = pair else { unreachable!("windows of two") };
        let lines = differences((one, first), (other, second), compared);
        assert!(lines.is_empty(), "{what}: replicas differ:\n{}", listed(&lines));
    }
}

mod tests {
    use atoll_pool::disk::{Making, TimeToSet};
    use atoll_pool::{PoolFs, PoolSettings, create};
    use atoll_vfs::{RenameFlags, XattrFlags};

    use super::*;
    use crate::workload::steps::{Stamp, Step, take};
    use crate::workload::{env, run};

    const STAMP: Stamp = Stamp { client: 0, number: 1 };

    /// A disk after some steps, with the directories /dir, /dir/deep (both distributed) and /empty, and files in them.
    async fn written() -> SimulatedDisk {
        let disk = SimulatedDisk::new(env());
        create(&disk, PoolSettings::new([7; 16], 2)).await.unwrap();
        let fs = PoolFs::open(env(), disk.clone()).await.unwrap().0;
        let path = |path: &str| path.to_owned();
        for step in [
            Step::Mkdir(path("/dir")),
            Step::Mkdir(path("/dir/deep")),
            Step::Mkdir(path("/empty")),
            Step::Create(path("/file")),
            Step::Create(path("/dir/deep/file")),
            Step::Link(path("/file"), path("/dir/linked")),
            Step::Symlink(path("/link")),
            Step::Stamp { path: path("/file"), first_cell: 2, cells: 100, stamp: STAMP },
            Step::SetXattr(path("/file"), "user.first", path("value")),
            Step::Checkpoint,
        ] {
            take(&fs, &step).await.unwrap();
        }
        drop(fs);
        disk.reopen()
    }

    type Node = <SimulatedDisk as Disk>::Node;

    async fn node(disk: &SimulatedDisk, path: &str) -> Node {
        let mut at = disk.node(&disk.top(), b"slots").await.unwrap();
        for name in path.split('/') {
            at = disk.node(&at, name.as_bytes()).await.unwrap();
        }
        at
    }

    /// Where the directory of a placeholder in the root lies.
    async fn home(disk: &SimulatedDisk, name: &str) -> String {
        let tree = plain_tree(disk).await.unwrap();
        placeholder(&tree[&format!("{ROOT_PATH}/{name}")]).expect("a placeholder")
    }

    #[test]
    fn disks_of_equal_changes_are_equal_and_well_formed() {
        run(async {
            let (one, other) = (written().await, written().await);
            let tree = plain_tree(&one).await.unwrap();
            // The two that are always there, three directories with their placeholders, two files, one with two names, and a link.
            assert_eq!(tree.len(), 12, "{:?}", tree.keys());
            assert_eq!(tree[&format!("{ROOT_PATH}/file")].bytes.len(), 102 * 64);
            assert_equal_replicas(&[("one", &one), ("other", &other)], Compared::default(), "here")
                .await;
        });
    }

    /// Changes one disk by hand.
    async fn edit(disk: &SimulatedDisk, what: &str) {
        let root = node(disk, ROOT_PATH).await;
        let file = disk.node(&root, b"file").await.unwrap();
        let open = disk.open(&file).await.unwrap();
        let flags = XattrFlags::default();
        let done = match what {
            "a name is removed" => disk.unlink(&root, b"link").await,
            "a file is made" => disk.make(&root, b"more", Making::File, 0o644).await,
            "a mode is set" => disk.set_mode(&file, 0o600).await,
            "a group is set" => disk.set_owner(&file, None, Some(7)).await,
            "a time is set" => {
                let time = FileTime { secs: 7, nanos: 0 };
                disk.set_times(&file, None, Some(TimeToSet::To(time))).await
            }
            "an attribute is removed" => disk.remove_xattr(&file, b"user.first").await,
            "a number is changed" => disk.set_xattr(&file, ID_ATTRIBUTE, &[0; 8], flags).await,
            "a byte is changed" => disk.write(&open, 1000, b"\0").await.map(drop),
            "a file is cut off" => disk.set_len(&open, 100).await,
            "a name is another file's" => {
                disk.unlink(&root, b"file").await.unwrap();
                disk.make(&root, b"file", Making::File, 0o644).await
            }
            "a placeholder is removed" => disk.unlink(&root, b"empty").await,
            "a directory is removed" => {
                let home = home(disk, "empty").await;
                let (slot, id) = home.split_once('/').unwrap();
                disk.rmdir(&node(disk, slot).await, id.as_bytes()).await
            }
            "a placeholder is copied" => {
                let target = format!("../../{}", home(disk, "empty").await);
                disk.make(&root, b"again", Making::Symlink(target.as_bytes()), 0o777).await
            }
            "a number is copied" => {
                let id =
                    disk.xattr(&node(disk, &home(disk, "dir").await).await, ID_ATTRIBUTE).await;
                disk.set_xattr(&file, ID_ATTRIBUTE, &id.unwrap(), flags).await
            }
            "a directory goes into itself" => {
                let into = node(disk, &home(disk, "dir").await).await;
                disk.rename((&root, b"dir"), (&into, b"dir"), RenameFlags::default()).await
            }
            _ => panic!("no edit: {what}"),
        };
        done.unwrap();
    }

    #[test]
    fn a_difference_of_any_kind_is_seen() {
        run(async {
            for (what, expected) in [
                ("a name is removed", "link: on other alone: Symlink 777"),
                ("a file is made", "more: on one alone: Regular 644"),
                ("a mode is set", "file: mode: one 600, other 644"),
                ("a group is set", "file: owner: one (1000, 7), other (1000, 1000)"),
                ("a time is set", "file: mtime: one Some(FileTime { secs: 7, nanos: 0 }), other"),
                ("an attribute is removed", "file: user.first: one None, other Some("),
                ("a number is changed", "file: trusted.atoll.id: one Some("),
                ("a byte is changed", "file: byte 1000: one \"client 000 file"),
                ("a file is cut off", "file: size: one 100 bytes, other 6528 bytes"),
                ("a name is another file's", "file: names: one 1, other 2"),
                ("a placeholder is removed", "empty: on other alone: Symlink 777"),
            ] {
                let (one, other) = (written().await, written().await);
                edit(&one, what).await;
                let (one, other) =
                    (plain_tree(&one).await.unwrap(), plain_tree(&other).await.unwrap());
                let lines = differences(("one", &one), ("other", &other), Compared { times: true });
                assert!(lines.iter().any(|line| line.contains(expected)), "{what}: {lines:#?}");
            }
        });
    }

    #[test]
    fn a_tree_that_is_not_well_formed_is_seen() {
        run(async {
            for (what, expected) in [
                ("a placeholder is removed", ": has no name"),
                ("a directory is removed", ", which is no directory"),
                ("a placeholder is copied", ": has several names: ["),
                ("a number is copied", ": has the number "),
                ("a number is changed", ""),
                ("a directory goes into itself", ": cannot be reached from the root"),
            ] {
                let disk = written().await;
                edit(&disk, what).await;
                let lines = faults(&plain_tree(&disk).await.unwrap());
                match expected {
                    "" => assert!(lines.is_empty(), "{what}: {lines:#?}"),
                    _ => assert!(
                        lines.iter().any(|line| line.contains(expected)),
                        "{what}: {lines:#?}"
                    ),
                }
            }
        });
    }

    #[test]
    #[should_panic(expected = "replicas differ")]
    fn replicas_that_differ_fail_a_test() {
        run(async {
            let (one, other) = (written().await, written().await);
            edit(&one, "a byte is changed").await;
            assert_equal_replicas(
                &[("one", &one), ("other", &other)],
                Compared::default(),
                "seed 0",
            )
            .await;
        });
    }
}
