//! Trees of plain files that are taken into a pool: in place, by renames, and by copying them.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use atoll_pool::disk::directory::Directory;
use atoll_pool::disk::simulated::{InFlight, Loss, SimulatedDisk};
use atoll_pool::disk::{Disk, Making, TimeToSet};
use atoll_pool::{
    CheckReport, CopyProblem, CopyReport, ImportError, InPlaceReport, PoolFs, PoolSettings,
    TreeProblem, TreeSource, check, copy_tree_into, create, import_in_place, leave,
};
use atoll_vfs::{Errno, FileKind, FileSystem, FileTime, OpenFlags, SetAttr, XattrFlags};
use bytes::Bytes;

use crate::conformance::{is_root, opened};
use crate::workload::tree::{Tree, tree};
use crate::workload::{ROOT, env, me, read_file_in, run, write_file_in};

/// What is known of a file of a tree, the same inode before and after.
#[derive(PartialEq, Eq, Debug)]
struct PlainFile {
    ino: u64,
    generation: u64,
    mode: u32,
    owner: (u32, u32),
    nlink: u32,
    size_bytes: u64,
    mtime: FileTime,
    xattrs: Vec<Vec<u8>>,
    /// A file's first MiB; the target of a link.
    bytes: Bytes,
}

type Listing = BTreeMap<String, PlainFile>;

/// All files below a directory of a disk, with all that they have; numbers of the pool left out.
async fn listing<D: Disk>(disk: &D, top: &D::Node) -> Listing {
    let mut all = Listing::new();
    let mut open = vec![(top.clone(), String::new())];
    while let Some((dir, path)) = open.pop() {
        for listed in disk.list(&dir).await.unwrap() {
            let path = format!("{path}/{}", String::from_utf8_lossy(&listed.name));
            let node = disk.node(&dir, &listed.name).await.unwrap();
            let stat = disk.stat(&node).await.unwrap();
            let bytes = match stat.kind {
                FileKind::Symlink => disk.read_node(&node).await.unwrap(),
                FileKind::Regular => {
                    let file = disk.open(&node).await.unwrap();
                    disk.read(&file, 0, 1 << 20).await.unwrap()
                }
                _ => Bytes::new(),
            };
            if stat.kind == FileKind::Directory {
                open.push((node.clone(), path.clone()));
            }
            let mut xattrs = Vec::new();
            for name in disk.xattrs(&node).await.unwrap() {
                if !name.starts_with(b"trusted.atoll.") {
                    let value = disk.xattr(&node, &name).await.unwrap();
                    xattrs.push([&name[..], b"=", &value[..]].concat());
                }
            }
            let file = PlainFile {
                ino: stat.ino,
                generation: stat.generation,
                mode: stat.mode,
                owner: (stat.uid, stat.gid),
                nlink: stat.nlink,
                size_bytes: stat.size_bytes,
                mtime: stat.mtime,
                xattrs,
                bytes,
            };
            all.insert(path, file);
        }
    }
    all
}

async fn write<D: Disk>(disk: &D, dir: &D::Node, name: &[u8], text: &[u8]) -> D::Node {
    disk.make(dir, name, Making::File, 0o640).await.unwrap();
    let node = disk.node(dir, name).await.unwrap();
    let file = disk.open(&node).await.unwrap();
    disk.write(&file, 0, text).await.unwrap();
    node
}

async fn mkdir<D: Disk>(disk: &D, dir: &D::Node, name: &[u8]) -> D::Node {
    disk.make(dir, name, Making::Directory, 0o750).await.unwrap();
    disk.node(dir, name).await.unwrap()
}

/// Makes the directory `source` beside a pool's slots, with files of all kinds; returns it.
pub(crate) async fn make_source<D: Disk>(disk: &D) -> D::Node {
    let source = mkdir(disk, &disk.top(), b"source").await;
    let file = write(disk, &source, b"file", b"some bytes").await;
    disk.set_owner(&file, Some(1000), Some(1001)).await.unwrap();
    disk.set_mode(&file, 0o4711).await.unwrap();
    disk.set_xattr(&file, b"user.a", b"1", XattrFlags::default()).await.unwrap();
    // From another pool, or the file that it was copied from.
    let number = 0x1c30_0000_0000_0014u64.to_be_bytes();
    disk.set_xattr(&file, b"trusted.atoll.id", &number, XattrFlags::default()).await.unwrap();
    let dir = mkdir(disk, &source, b"dir").await;
    disk.link(&file, &dir, b"second name").await.unwrap();
    disk.set_xattr(&dir, b"user.dir", b"2", XattrFlags::default()).await.unwrap();
    let mut deep = dir.clone();
    for level in 0..20 {
        deep = mkdir(disk, &deep, &[b'a' + level]).await;
    }
    write(disk, &deep, b"deepest", b"of all").await;
    let target = b"../../somewhere/else/and/further";
    disk.make(&dir, b"link", Making::Symlink(target), 0o777).await.unwrap();
    disk.make(&dir, b"fifo", Making::Special(FileKind::Fifo, 0), 0o600).await.unwrap();
    disk.make(&dir, b"dev", Making::Special(FileKind::CharDevice, 0x103), 0o600).await.unwrap();
    mkdir(disk, &source, b"empty").await;
    let sparse = write(disk, &source, b"caf\xe9", b"start").await;
    disk.set_len(&disk.open(&sparse).await.unwrap(), 300_000).await.unwrap();
    for node in [&file, &dir, &source] {
        let time = Some(TimeToSet::To(FileTime { secs: 1_000_000_007, nanos: 123_456_789 }));
        disk.set_times(node, time, time).await.unwrap();
    }
    disk.sync_all().await.unwrap();
    source
}

/// A pool of one with a file and a directory, and a tree beside it.
async fn prepared() -> SimulatedDisk {
    let disk = SimulatedDisk::new(env());
    create(&disk, PoolSettings::new([7; 16], 1)).await.unwrap();
    let (fs, _) = PoolFs::open(env(), disk.clone()).await.unwrap();
    let kept = fs.mkdir(me(), ROOT, b"kept", 0o755).await.unwrap().attr.inode;
    write_file_in(&fs, kept, "mine", "was there").await;
    fs.end().await.unwrap();
    drop(fs);
    disk.kill(InFlight::Lost);
    let disk = disk.reopen();
    make_source(&disk).await;
    disk
}

async fn source(disk: &SimulatedDisk) -> <SimulatedDisk as Disk>::Node {
    disk.node(&disk.top(), b"source").await.unwrap()
}

async fn root(disk: &SimulatedDisk) -> <SimulatedDisk as Disk>::Node {
    let mut node = disk.top();
    for name in ["slots", "000", "0000000000000001"] {
        node = disk.node(&node, name.as_bytes()).await.unwrap();
    }
    node
}

/// Imports by a process of its own.
async fn import(disk: &SimulatedDisk) -> Result<InPlaceReport, ImportError> {
    let source = source(disk).await;
    import_in_place(env(), disk.clone(), &source, &[], false).await
}

/// The next process, after the one that had the disk.
fn next(disk: &SimulatedDisk) -> SimulatedDisk {
    disk.kill(InFlight::Lost);
    disk.reopen()
}

async fn checked(disk: &SimulatedDisk) -> CheckReport {
    check(env(), next(disk)).await.unwrap()
}

/// What is in the source and in the pool by now is all that was in the source, each file once.
async fn assert_nothing_is_lost(disk: &SimulatedDisk, before: &Listing, what: &str) {
    let mut found = listing(disk, &source(disk).await).await;
    for (path, seen) in listing(disk, &root(disk).await).await {
        if !path.starts_with("/kept") {
            assert!(found.insert(path.clone(), seen).is_none(), "{what}: {path} is there twice");
        }
    }
    assert_eq!(&found, before, "{what}");
}

#[test]
fn a_tree_is_taken_in_place_and_its_files_stay_the_same_inodes() {
    run(async {
        let disk = prepared().await;
        let before = listing(&disk, &source(&disk).await).await;
        let report = import(&disk).await.unwrap();
        assert_eq!((report.moved, report.survey.problems_in_all), (4, 0), "{report:?}");
        assert_eq!(report.survey.files, before.len() as u64);
        // One file has two names.
        assert_eq!(report.numbered, before.len() as u64 - 1);
        let disk = next(&disk);
        assert_eq!(disk.list(&source(&disk).await).await, Ok(Vec::new()));
        assert_nothing_is_lost(&disk, &before, "imported").await;
        assert!(checked(&disk).await.is_clean());
        let disk = next(&disk);
        let (fs, report) = PoolFs::open(env(), disk.clone()).await.unwrap();
        assert_eq!((report.changes_redone, report.files_indexed), (0, 0));
        assert_eq!(read_file_in(&fs, ROOT, "file").await, "some bytes");
        let tree = tree(&fs).await;
        assert_eq!(tree["/file"].inode, tree["/dir/second name"].inode);
        assert_eq!(tree["/file"].nlink, 2);
        assert_eq!(tree["/file"].inode.0 >> 52, 0, "its number is one of this group");
        assert_eq!(tree.len(), before.len() + 2);
        // And a client changes what it has taken in.
        fs.rename(me(), ROOT, b"dir", tree["/kept"].inode, b"moved", Default::default())
            .await
            .unwrap();
        assert_eq!(fs.lookup(me(), tree["/kept"].inode, b"moved").await.unwrap().attr.mode, 0o750);
    });
}

/// What an interruption of an import leaves, wherever it comes.
fn interrupted_anywhere(interrupt: impl Fn(&SimulatedDisk, u64)) {
    run(async {
        for cut in 0.. {
            let disk = prepared().await;
            let before = listing(&disk, &source(&disk).await).await;
            disk.stop_after(cut);
            let _ = import(&disk).await;
            if !disk.is_stopped() {
                assert!(cut > 20, "an import calls the disk");
                break;
            }
            interrupt(&disk, cut);
            let what = format!("cut off after {cut} calls");
            let disk = disk.reopen();
            assert_nothing_is_lost(&disk, &before, &what).await;
            // The pool is opened, and all that is in it has numbers.
            let (fs, _) = PoolFs::open(env(), disk.clone()).await.unwrap();
            drop(fs);
            let disk = next(&disk);
            let own = disk.node(&disk.top(), b".atoll").await.unwrap();
            assert_eq!(disk.stat_at(&own, b"importing").await.err(), Some(Errno::ENOENT), "{what}");
            let report = checked(&disk).await;
            assert_eq!((report.files_added, report.files_gone), (0, 0), "{what}: {report:?}");
            // It is taken in by the next import.
            let disk = next(&disk);
            import(&disk).await.unwrap_or_else(|error| panic!("{what}: {error}"));
            let disk = next(&disk);
            assert_eq!(disk.list(&source(&disk).await).await, Ok(Vec::new()), "{what}");
            assert_nothing_is_lost(&disk, &before, &what).await;
            assert!(checked(&disk).await.is_clean(), "{what}");
        }
    });
}

#[test]
fn an_import_in_place_that_is_killed_anywhere_loses_nothing_and_goes_on() {
    interrupted_anywhere(|disk, _| disk.kill(InFlight::Lost));
}

#[test]
fn an_import_in_place_that_a_loss_of_power_ends_anywhere_loses_nothing_and_goes_on() {
    interrupted_anywhere(|disk, cut| disk.crash_with(Loss::Ordered, cut));
}

/// A disk that refuses any one call: what was moved has its number, or gets it when the pool is opened.
#[test]
fn an_import_in_place_of_which_one_call_fails_loses_nothing_and_goes_on() {
    run(async {
        for call in 0.. {
            let disk = prepared().await;
            let before = listing(&disk, &source(&disk).await).await;
            let top = source(&disk).await;
            disk.fail_after(call, Errno::EIO);
            let imported = import_in_place(env(), disk.clone(), &top, &[], false).await;
            if disk.faults_left() > 0 {
                imported.expect("no call has failed");
                break;
            }
            let what = format!("call {call} fails: {imported:?}");
            let disk = next(&disk);
            assert_nothing_is_lost(&disk, &before, &what).await;
            let (fs, _) = PoolFs::open(env(), disk.clone()).await.unwrap();
            drop(fs);
            let report = checked(&disk).await;
            assert_eq!((report.files_added, report.files_gone), (0, 0), "{what}: {report:?}");
            let disk = next(&disk);
            import(&disk).await.unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_nothing_is_lost(&next(&disk), &before, &what).await;
        }
    });
}

/// Each thing that is in the way is named, and nothing is changed.
#[test]
fn what_is_in_the_way_of_an_import_in_place_is_named_before_anything_is_changed() {
    run(async {
        let disk = prepared().await;
        let (top, at) = (source(&disk).await, root(&disk).await);
        write(&disk, &at, b"file", b"the pool's").await;
        write(&disk, &at, b"empty", b"the pool's").await;
        let dir = disk.node(&top, b"dir").await.unwrap();
        for target in [
            &b"../../4f2/4f20000000000007"[..],
            b"./../../4f2/4f20000000000007",
            b"../../040/0400000000000002/0000000000000012d040000000000034003",
        ] {
            let name = target.len().to_string().into_bytes();
            disk.make(&dir, &name, Making::Symlink(target), 0o777).await.unwrap();
        }
        let other = mkdir(&disk, &dir, b"other").await;
        let own = mkdir(&disk, &other, b".atoll").await;
        write(&disk, &own, b"stamp", b"atoll pool 2").await;
        // One that is a user's.
        mkdir(&disk, &mkdir(&disk, &dir, b"users").await, b".atoll").await;
        let before = (listing(&disk, &top).await, listing(&disk, &at).await);
        let report = import(&disk).await.unwrap();
        let mut problems: Vec<_> = report
            .survey
            .problems
            .iter()
            .map(|(path, problem)| (String::from_utf8_lossy(path).into_owned(), *problem))
            .collect();
        problems.sort_by(|one, other| one.0.cmp(&other.0));
        let like = TreeProblem::LikePlaceholder;
        let expected = [
            ("dir/26", like),
            ("dir/28", like),
            ("dir/62", like),
            ("dir/other/.atoll", TreeProblem::Pool),
            ("empty", TreeProblem::NameTaken),
            ("file", TreeProblem::NameTaken),
        ];
        assert_eq!(problems, expected.map(|(path, problem)| (path.to_owned(), problem)));
        assert_eq!((report.moved, report.survey.problems_in_all), (0, 6));
        let disk = next(&disk);
        let (top, at) = (source(&disk).await, root(&disk).await);
        assert_eq!((listing(&disk, &top).await, listing(&disk, &at).await), before);
    });
}

#[test]
fn a_trial_changes_nothing_and_a_directory_that_is_not_there_is_said() {
    run(async {
        let disk = prepared().await;
        let before = listing(&disk, &source(&disk).await).await;
        let top = source(&disk).await;
        let tried = import_in_place(env(), disk.clone(), &top, &[], true).await.unwrap();
        assert_eq!((tried.moved, tried.survey.files), (0, before.len() as u64));
        for (into, errno) in [("kept/mine", Errno::ENOTDIR), ("nothing", Errno::ENOENT)] {
            let disk = next(&disk);
            let (top, into) = (source(&disk).await, into.split('/'));
            let into: Vec<Vec<u8>> = into.map(|name| name.as_bytes().to_vec()).collect();
            let refused = import_in_place(env(), disk, &top, &into, false).await;
            assert_eq!(refused, Err(ImportError::Into(errno)));
        }
        let disk = next(&disk);
        assert_eq!(listing(&disk, &source(&disk).await).await, before);
        // Below a distributed directory.
        let top = source(&disk).await;
        let into = [b"kept".to_vec()];
        import_in_place(env(), disk.clone(), &top, &into, false).await.unwrap();
        let (fs, _) = PoolFs::open(env(), next(&disk)).await.unwrap();
        let kept = fs.lookup(me(), ROOT, b"kept").await.unwrap().attr.inode;
        assert_eq!(read_file_in(&fs, kept, "file").await, "some bytes");
    });
}

/// A real disk: lists, a deep tree, names that are no text.
#[tokio::test]
async fn a_tree_of_a_real_disk_is_taken_in_place_and_given_back() {
    if !is_root() {
        return;
    }
    let temp = tempfile::tempdir().unwrap();
    let (files, from) = (temp.path().join("files"), temp.path().join("from"));
    fs::create_dir(&files).unwrap();
    let disk = || Directory::open(&files).unwrap();
    create(&disk(), PoolSettings::new([7; 16], 1)).await.unwrap();
    let mut deep = from.join("deep");
    for _ in 0..200 {
        deep.push("a-long-name");
    }
    // Longer than a path may be in one call.
    fs::create_dir_all(&deep).unwrap();
    fs::write(deep.join("file"), "deepest").unwrap();
    let odd = from.join(std::ffi::OsStr::from_bytes(b"caf\xe9"));
    fs::write(&odd, "odd").unwrap();
    fs::hard_link(&odd, from.join("deep/other")).unwrap();
    fs::set_permissions(&odd, fs::Permissions::from_mode(0o2751)).unwrap();
    symlink("/nowhere", from.join("link")).unwrap();
    symlink(".", from.join("loop")).unwrap();
    // Version 2; the owner and user 1000 everything.
    let entries: [(u16, u16, u32); 5] =
        [(1, 7, u32::MAX), (2, 7, 1000), (4, 0, u32::MAX), (16, 7, u32::MAX), (32, 0, u32::MAX)];
    let mut list = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, number) in entries {
        list.extend(tag.to_le_bytes());
        list.extend(permissions.to_le_bytes());
        list.extend(number.to_le_bytes());
    }
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(from.join("deep"), "system.posix_acl_default", &list, flags).unwrap();
    let inode = fs::metadata(&odd).unwrap().ino();
    let on_disk = disk();
    let source = on_disk.beside(&from).unwrap();
    let before = listing(&on_disk, &source).await;
    let report = import_in_place(env(), on_disk, &source, &[], false).await.unwrap();
    assert_eq!((report.moved, report.survey.problems_in_all), (4, 0), "{report:?}");
    assert_eq!(fs::read_dir(&from).unwrap().count(), 0);
    let fs = opened(&files).await;
    assert_eq!(read_file_in_bytes(&fs, b"caf\xe9").await, "odd");
    let deep = fs.lookup(me(), ROOT, b"deep").await.unwrap().attr.inode;
    assert_eq!(fs.getxattr(deep, b"system.posix_acl_default").await.unwrap(), &list[..]);
    fs.end().await.unwrap();
    drop(fs);
    leave(env(), disk()).await.unwrap();
    let on_disk = disk();
    assert_eq!(listing(&on_disk, &on_disk.top()).await, before);
    let odd = files.join(std::ffi::OsStr::from_bytes(b"caf\xe9"));
    assert_eq!(fs::metadata(odd).unwrap().ino(), inode);
}

async fn read_file_in_bytes(fs: &dyn FileSystem, name: &[u8]) -> String {
    let inode = fs.lookup(me(), ROOT, name).await.unwrap().attr.inode;
    let opened = fs.open(me(), inode, OpenFlags::READ).await.unwrap();
    let bytes = fs.read(inode, opened.handle, 0, 4096).await.unwrap();
    fs.close(inode, opened.handle).await.unwrap();
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// A disk whose directory `source` is to be copied.
async fn disk_to_copy() -> SimulatedDisk {
    let disk = SimulatedDisk::new(env());
    let top = make_source(&disk).await;
    // In a copy it is escaped.
    let target = b"../../4f2/4f20000000000007";
    disk.make(&top, b"like", Making::Symlink(target), 0o777).await.unwrap();
    disk
}

async fn empty_pool() -> SimulatedDisk {
    let disk = SimulatedDisk::new(env());
    create(&disk, PoolSettings::new([7; 16], 1)).await.unwrap();
    disk
}

async fn copy(from: &SimulatedDisk, fs: &dyn FileSystem) -> Result<CopyReport, Errno> {
    let source = TreeSource { disk: from, dir: source(from).await, device: 1 };
    copy_tree_into(&source, fs, &[], false, &|_| ()).await
}

/// That a pool has all files of the source, with all that they have.
async fn assert_copied(from: &SimulatedDisk, fs: &dyn FileSystem, what: &str) -> Tree {
    let expected = listing(from, &source(from).await).await;
    let found = tree(fs).await;
    let paths = |paths: Vec<&String>| paths.into_iter().cloned().collect::<Vec<_>>();
    assert_eq!(paths(found.keys().collect()), paths(expected.keys().collect()), "{what}");
    for (path, file) in &expected {
        let seen = &found[path];
        let attr = fs.getattr(seen.inode, None).await.unwrap().attr;
        assert_eq!((seen.owner, attr.mtime), (file.owner, file.mtime), "{what}: {path}");
        assert!(seen.kind == FileKind::Symlink || seen.mode == file.mode, "{what}: {path}");
        let is_alike = (attr.nlink, attr.size_bytes) == (file.nlink, file.size_bytes);
        assert!(is_alike || seen.kind == FileKind::Directory, "{what}: {path}");
        let xattrs = seen.xattrs.iter();
        let xattrs: Vec<_> =
            xattrs.map(|(name, value)| [&name[..], b"=", value].concat()).collect();
        assert_eq!(xattrs, file.xattrs, "{what}: {path}");
        assert!(seen.text == file.bytes[..], "{what}: {path}");
    }
    found
}

#[test]
fn a_tree_is_copied_once_with_all_that_it_has() {
    run(async {
        let (from, to) = (disk_to_copy().await, empty_pool().await);
        let (fs, _) = PoolFs::open(env(), to.clone()).await.unwrap();
        let before = listing(&from, &source(&from).await).await;
        let report = copy(&from, &fs).await.unwrap();
        assert_eq!((report.problems_in_all, report.stopped.clone()), (0, None), "{report:?}");
        assert_eq!((report.files, report.passed_over), (before.len() as u64, 0));
        // The hole, and the second name, are not copied.
        assert!(report.bytes < 20_000, "{report:?}");
        let found = assert_copied(&from, &fs, "copied").await;
        assert_eq!(found["/file"].inode, found["/dir/second name"].inode);
        assert_eq!(listing(&from, &source(&from).await).await, before, "it is only read");
        let again = copy(&from, &fs).await.unwrap();
        assert_eq!((again.files, again.bytes, again.problems_in_all), (0, 0, 0), "{again:?}");
        assert_eq!(again.passed_over, before.len() as u64);
        assert_eq!(tree(&fs).await, found);
    });
}

#[test]
fn what_the_pool_has_otherwise_is_named_and_stays() {
    run(async {
        let (from, to) = (disk_to_copy().await, empty_pool().await);
        let (fs, _) = PoolFs::open(env(), to.clone()).await.unwrap();
        write_file_in(&fs, ROOT, "file", "the pool's").await;
        fs.mkdir(me(), ROOT, b"dir", 0o700).await.unwrap();
        let report = copy(&from, &fs).await.unwrap();
        let named: Vec<_> =
            report.problems.iter().map(|(path, problem)| (&path[..], *problem)).collect();
        assert_eq!(report.problems_in_all, 2);
        for path in [&b"file"[..], b"dir"] {
            assert!(named.contains(&(path, CopyProblem::Differs)), "{named:?}");
        }
        assert_eq!(read_file_in(&fs, ROOT, "file").await, "the pool's");
        let dir = fs.lookup(me(), ROOT, b"dir").await.unwrap().attr;
        assert_eq!((dir.mode, dir.nlink), (0o700, 2), "nothing is put into it");
        fs.lookup(me(), ROOT, b"empty").await.expect("the others are copied");
        // When they are out of the way, the next run takes the rest.
        fs.unlink(me(), ROOT, b"file").await.unwrap();
        fs.rmdir(me(), ROOT, b"dir").await.unwrap();
        let report = copy(&from, &fs).await.unwrap();
        assert_eq!((report.problems_in_all, report.passed_over), (0, 3), "{report:?}");
        assert_copied(&from, &fs, "the rest").await;
    });
}

#[test]
fn a_copy_that_is_killed_anywhere_goes_on_and_leaves_nothing_else() {
    run(async {
        let from = disk_to_copy().await;
        let expected = listing(&from, &source(&from).await).await;
        let mut cuts = 0;
        for cut in (0..).step_by(5) {
            let disk = empty_pool().await;
            let (fs, _) = PoolFs::open(env(), disk.clone()).await.unwrap();
            disk.stop_after(cut);
            let _ = copy(&from, &fs).await;
            let is_cut = disk.is_stopped();
            drop(fs);
            if !is_cut {
                break;
            }
            cuts += 1;
            let disk = next(&disk);
            let (fs, _) = PoolFs::open(env(), disk.clone()).await.unwrap();
            let what = format!("cut off after {cut} calls");
            for (path, seen) in tree(&fs).await {
                if path.contains(".atoll-import-") {
                    continue;
                }
                assert!(seen.text == expected[&path].bytes[..], "{what}: {path} is half there");
            }
            let report = copy(&from, &fs).await.unwrap();
            assert_eq!((report.problems_in_all, &report.stopped), (0, &None), "{what}: {report:?}");
            assert_copied(&from, &fs, &what).await;
        }
        assert!(cuts > 20, "a copy calls the disk: {cuts}");
    });
}

/// The pool's disk is full: the copy ends there, and goes on when there is room.
#[test]
fn a_copy_into_a_full_pool_ends_and_goes_on_later() {
    run(async {
        let (from, to) = (disk_to_copy().await, empty_pool().await);
        let top = source(&from).await;
        let large = write(&from, &top, b"large", b"").await;
        let file = from.open(&large).await.unwrap();
        for mib in 0..100 {
            from.write(&file, mib << 20, &vec![mib as u8 + 1; 1 << 20]).await.unwrap();
        }
        let (fs, _) = PoolFs::open(env(), to.clone()).await.unwrap();
        fs.sync().await.unwrap();
        to.set_capacity(90 << 20, 10_000);
        fs.sync().await.unwrap();
        let report = copy(&from, &fs).await.unwrap();
        let stopped = report.stopped.expect("there is no room");
        assert_eq!(stopped, (b"large".to_vec(), Errno::ENOSPC));
        assert_eq!(fs.lookup(me(), ROOT, b"large").await.err(), Some(Errno::ENOENT));
        to.set_capacity(1 << 34, 1 << 20);
        fs.sync().await.unwrap();
        let report = copy(&from, &fs).await.unwrap();
        assert_eq!((report.problems_in_all, report.stopped), (0, None));
        let found = fs.lookup(me(), ROOT, b"large").await.unwrap().attr;
        assert_eq!(found.size_bytes, 100 << 20);
    });
}

/// A list that the pool's directory hands on is not the source's; a tree that holds the pool's own directory is refused.
#[tokio::test]
async fn a_copy_has_the_lists_of_its_source_and_none_of_the_directory_that_gets_it() {
    if !is_root() {
        return;
    }
    let temp = tempfile::tempdir().unwrap();
    let (files, from) = (temp.path().join("files"), temp.path().join("from"));
    fs::create_dir(&files).unwrap();
    create(&Directory::open(&files).unwrap(), PoolSettings::new([7; 16], 1)).await.unwrap();
    fs::create_dir_all(from.join("dir")).unwrap();
    fs::write(from.join("dir/file"), "text").unwrap();
    fs::write(from.join("run"), "#!/bin/true").unwrap();
    let pool = opened(&files).await;
    let mut list = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, number) in [
        (1u16, 7u16, u32::MAX),
        (2, 7, 1000),
        (4, 5, u32::MAX),
        (16, 7, u32::MAX),
        (32, 0, u32::MAX),
    ] {
        list.extend(tag.to_le_bytes());
        list.extend(permissions.to_le_bytes());
        list.extend(number.to_le_bytes());
    }
    let list = Bytes::from(list);
    let flags = XattrFlags::default();
    pool.setxattr(me(), ROOT, b"system.posix_acl_default", list.clone(), flags).await.unwrap();
    let path = from.join("run");
    rustix::fs::setxattr(&path, "system.posix_acl_access", &list, rustix::fs::XattrFlags::empty())
        .unwrap();
    let copy = async |path: &Path| {
        let disk = Directory::open(path).unwrap().for_reading();
        let source = TreeSource { disk: &disk, dir: disk.top(), device: disk.device() };
        copy_tree_into(&source, &pool, &[], false, &|_| ()).await.unwrap()
    };
    let report = copy(&from).await;
    assert_eq!((report.files, report.problems_in_all), (3, 0), "{report:?}");
    let found = tree(&pool).await;
    assert_eq!(found["/run"].xattrs.get(&b"system.posix_acl_access"[..]), Some(&list));
    for path in ["/dir", "/dir/file"] {
        assert_eq!(found[path].xattrs.len(), 0, "{path}: {:?}", found[path].xattrs);
    }
    let mode = SetAttr { mode: Some(0o700), ..SetAttr::default() };
    pool.setattr(me(), found["/dir/file"].inode, None, mode).await.unwrap();
    let report = copy(&from).await;
    assert_eq!((report.passed_over, report.problems_in_all), (2, 1), "{report:?}");
    let report = copy(temp.path()).await;
    let problems: Vec<_> = report.survey.problems.iter().map(|(_, problem)| *problem).collect();
    assert!(problems.contains(&TreeProblem::Pool), "{problems:?}");
    assert!(problems.contains(&TreeProblem::Itself), "{problems:?}");
    assert_eq!(report.files, 0);
}
