//! The simulated disk beside a real one, and what its crashes leave.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use atoll_env::{Env, TokioRuntime};
use atoll_pool::disk::directory::Directory;
use atoll_pool::disk::simulated::{DiskCall, InFlight, Loss, SimulatedDisk};
use atoll_pool::disk::{Disk, DiskResult, Making, TimeToSet};
use atoll_vfs::{Errno, FileKind, FileTime, RenameFlags, SeekTo, XattrFlags};
use bytes::Bytes;
use proptest::prelude::*;

fn run<T>(test: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test)
}

fn simulated() -> SimulatedDisk {
    let env: Env = Arc::new(TokioRuntime::new(tokio::runtime::Handle::current()));
    SimulatedDisk::new(env)
}

/// One step of a test: files are chosen from what was opened before, names from a few.
#[derive(Clone, Debug)]
enum Step {
    Open(usize, usize),
    Make(usize, usize, usize, u32),
    Link(usize, usize, usize),
    Rename(usize, usize, usize, usize, bool, bool),
    Unlink(usize, usize),
    Rmdir(usize, usize),
    Mode(usize, u32),
    Owner(usize, Option<u32>, Option<u32>),
    Times(usize, Option<i64>, Option<i64>),
    SetXattr(usize, usize, usize, bool, bool),
    RemoveXattr(usize, usize),
    Write(usize, u64, usize),
    SetLen(usize, u64),
    Allocate(usize, i32, u64, u64),
    Seek(usize, u64),
    Look(usize, usize),
}

const NAMES: [&[u8]; 5] = [b"a", b"b", b"c", b"d", b"e"];
/// The kind of file system whose limits, holes and counts of links the simulated disk has (Linux `EXT4_SUPER_MAGIC`).
const EXT4: i64 = 0xef53;
/// Names that calls refuse, or understand in a way of their own.
const ODD_NAMES: [&[u8]; 4] = [b".", b"", &[b'n'; 255], &[b'n'; 256]];
const XATTRS: [&[u8]; 8] =
    [b"user.a", b"trusted.b", b"user.", b"", b"plain", b"system.none", &[b'u'; 256], b"user.c"];

fn name(at: usize) -> &'static [u8] {
    let odd = at.checked_sub(NAMES.len() * 6);
    odd.map_or(NAMES[at % NAMES.len()], |odd| ODD_NAMES[odd % ODD_NAMES.len()])
}

/// Text that tells two answers apart.
fn told<T: Debug>(answer: DiskResult<T>) -> String {
    format!("{answer:?}")
}

async fn stat_of<D: Disk>(disk: &D, node: &D::Node) -> String {
    match disk.stat(node).await {
        Err(errno) => format!("{errno:?}"),
        Ok(found) => {
            let size = if found.kind == FileKind::Directory { 0 } else { found.size_bytes };
            let (kind, mode, nlink) = (found.kind, found.mode, found.nlink);
            format!("{kind:?} {mode:o} {nlink} {}:{} {} {size}", found.uid, found.gid, found.rdev)
        }
    }
}

/// Makes one step on a disk and says what came of it.
async fn step<D: Disk>(disk: &D, nodes: &mut Vec<D::Node>, step: &Step) -> String {
    let node = |at: usize| nodes[at % nodes.len()].clone();
    match *step {
        Step::Open(dir, at) => match disk.node(&node(dir), name(at)).await {
            Ok(found) => {
                let stat = stat_of(disk, &found).await;
                nodes.push(found);
                stat
            }
            Err(errno) => format!("{errno:?}"),
        },
        Step::Make(dir, at, what, mode) => {
            let making = match what % 12 {
                0..4 => Making::File,
                4..8 => Making::Directory,
                8 => Making::Symlink(b"target"),
                9 => Making::Symlink(b""),
                10 => Making::Special(FileKind::Fifo, 0),
                _ => Making::Special(FileKind::Regular, 0),
            };
            told(disk.make(&node(dir), name(at), making, mode).await)
        }
        Step::Link(file, dir, at) => told(disk.link(&node(file), &node(dir), name(at)).await),
        Step::Rename(dir, at, new_dir, new_at, no_replace, exchange) => {
            let flags = RenameFlags { no_replace, exchange };
            let (dir, new_dir) = (node(dir), node(new_dir));
            told(disk.rename((&dir, name(at)), (&new_dir, name(new_at)), flags).await)
        }
        Step::Unlink(dir, at) => told(disk.unlink(&node(dir), name(at)).await),
        Step::Rmdir(dir, at) => told(disk.rmdir(&node(dir), name(at)).await),
        Step::Mode(file, mode) => told(disk.set_mode(&node(file), mode).await),
        Step::Owner(file, uid, gid) => told(disk.set_owner(&node(file), uid, gid).await),
        Step::Times(file, atime, mtime) => {
            let time = |secs| TimeToSet::To(FileTime { secs, nanos: 7 });
            let set = disk.set_times(&node(file), atime.map(time), mtime.map(time)).await;
            let found = disk.stat(&node(file)).await.ok().filter(|_| mtime.is_some());
            format!("{set:?} {:?}", found.map(|found| found.mtime))
        }
        Step::SetXattr(file, at, len, create, replace) => {
            let flags = XattrFlags { create, replace };
            let value = vec![b'v'; len];
            told(disk.set_xattr(&node(file), XATTRS[at % XATTRS.len()], &value, flags).await)
        }
        Step::RemoveXattr(file, at) => {
            told(disk.remove_xattr(&node(file), XATTRS[at % XATTRS.len()]).await)
        }
        Step::Write(file, offset, len) => match disk.open(&node(file)).await {
            Ok(file) => told(disk.write(&file, offset, &vec![b'w'; len]).await),
            Err(errno) => format!("{errno:?}"),
        },
        Step::SetLen(file, len) => match disk.open(&node(file)).await {
            Ok(file) => told(disk.set_len(&file, len).await),
            Err(errno) => format!("{errno:?}"),
        },
        Step::Allocate(file, mode, offset, len) => match disk.open(&node(file)).await {
            Ok(file) => told(disk.allocate(&file, mode, offset, len).await),
            Err(errno) => format!("{errno:?}"),
        },
        Step::Seek(file, offset) => match disk.open(&node(file)).await {
            Ok(file) => {
                let data = disk.seek(&file, offset, SeekTo::Data).await;
                format!("{data:?} {:?}", disk.seek(&file, offset, SeekTo::Hole).await)
            }
            Err(errno) => format!("{errno:?}"),
        },
        Step::Look(file, at) => {
            let file = node(file);
            let names = disk.list(&file).await.map(|names| {
                names.into_iter().map(|listed| (listed.name, listed.kind)).collect::<BTreeSet<_>>()
            });
            let xattrs =
                disk.xattrs(&file).await.map(|all| all.into_iter().collect::<BTreeSet<_>>());
            let xattr = disk.xattr(&file, XATTRS[at % XATTRS.len()]).await;
            let (link, link_at) =
                (disk.read_node(&file).await, disk.read_link(&file, name(at)).await);
            let bytes = match disk.open(&file).await {
                Ok(file) => format!("{:?}", disk.read(&file, 0, 1 << 20).await.map(hashed)),
                Err(errno) => format!("{errno:?}"),
            };
            let stat = stat_of(disk, &file).await;
            format!("{stat} {names:?} {xattrs:?} {xattr:?} {link:?} {link_at:?} {bytes}")
        }
    }
}

/// Long bytes, short.
fn hashed(bytes: Bytes) -> (usize, blake3::Hash) {
    (bytes.len(), blake3::hash(&bytes))
}

/// All files below a directory: their paths, attributes and bytes.
async fn tree<D: Disk>(disk: &D) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut ahead = vec![(String::new(), disk.top())];
    while let Some((path, dir)) = ahead.pop() {
        for listed in disk.list(&dir).await.unwrap() {
            let node = disk.node(&dir, &listed.name).await.unwrap();
            let path = format!("{path}/{}", String::from_utf8_lossy(&listed.name));
            let mut nodes = vec![node.clone()];
            let is_openable = matches!(listed.kind, FileKind::Regular | FileKind::Directory);
            let told = match is_openable {
                true => step(disk, &mut nodes, &Step::Look(0, 0)).await,
                false => stat_of(disk, &node).await,
            };
            found.insert(path.clone(), told);
            if listed.kind == FileKind::Directory {
                ahead.push((path, node));
            }
        }
    }
    found
}

/// Whether the process may set trusted attributes, and the kernel refuses modes of symbolic links without setting them.
async fn is_as_simulated(real: &Directory) -> bool {
    let (top, name) = (real.top(), b"probe");
    real.make(&top, name, Making::Symlink(b"x"), 0).await.unwrap();
    let link = real.node(&top, name).await.unwrap();
    let set = real.set_xattr(&link, b"trusted.probe", b"x", XattrFlags::default()).await;
    let mode = real.set_mode(&link, 0o600).await;
    let is_kept = real.stat(&link).await.unwrap().mode == 0o777;
    real.unlink(&top, name).await.unwrap();
    set.is_ok() && mode == Err(Errno::EOPNOTSUPP) && is_kept
}

/// Makes the same steps on both disks and compares every answer, then the trees.
fn compare(steps: &[Step]) -> Result<(), TestCaseError> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: the simulated disk behaves as for root; run this test as root");
        return Ok(());
    }
    let place = tempfile::tempdir().unwrap();
    if rustix::fs::statfs(place.path()).unwrap().f_type != EXT4 {
        eprintln!("SKIPPED: the simulated disk behaves as ext4; run this test with TMPDIR on one");
        return Ok(());
    }
    rustix::process::umask(rustix::fs::Mode::empty());
    let real = Directory::open(place.path()).unwrap();
    run(async {
        let simulated = simulated();
        let top = real.top();
        real.set_mode(&top, 0o700).await.unwrap();
        if !is_as_simulated(&real).await {
            eprintln!("SKIPPED: no trusted attributes (CAP_SYS_ADMIN), or a kernel before 6.6");
            return Ok(());
        }
        let (mut real_nodes, mut nodes) = (vec![top], vec![simulated.top()]);
        let mut has_unwritten = false;
        for (at, next) in steps.iter().enumerate() {
            // A FIFO can be opened on a real disk.
            if let Step::Look(file, _)
            | Step::Write(file, ..)
            | Step::SetLen(file, _)
            | Step::Seek(file, _)
            | Step::Allocate(file, ..) = next
            {
                let found = simulated.stat(&nodes[file % nodes.len()]).await.unwrap();
                if found.kind == FileKind::Fifo {
                    continue;
                }
            }
            // Whether space that was never written is data, ext4 says by what is in its cache.
            has_unwritten |= matches!(next, Step::Allocate(_, 0 | 1 | 16 | 17, ..));
            if has_unwritten && matches!(next, Step::Seek(..)) {
                continue;
            }
            let expected = step(&real, &mut real_nodes, next).await;
            let got = step(&simulated, &mut nodes, next).await;
            prop_assert_eq!(got, expected, "step {}: {:?}", at, next);
        }
        prop_assert_eq!(tree(&simulated).await, tree(&real).await);
        Ok(())
    })
}

fn any_step() -> impl Strategy<Value = Step> {
    // Most names are plain, and most files those that were opened first: they meet.
    let (name, file) = (0..34_usize, 0..6_usize);
    let len = prop_oneof![0..10_u64, 4000..4200_u64, 0..50_000_u64];
    let mode = prop_oneof![Just(0o644_u32), Just(0o6755), Just(0o2775), 0..0o10000_u32];
    let id = prop::option::of(0..3_u32);
    let secs = prop::option::of(-1000..1_000_000_i64);
    prop_oneof![
        6 => (file.clone(), name.clone()).prop_map(|(dir, at)| Step::Open(dir, at)),
        8 => (file.clone(), name.clone(), 0..12_usize, mode.clone())
            .prop_map(|(dir, at, what, mode)| Step::Make(dir, at, what, mode)),
        3 => (file.clone(), file.clone(), name.clone())
            .prop_map(|(file, dir, at)| Step::Link(file, dir, at)),
        8 => (file.clone(), name.clone(), file.clone(), name.clone(), 0..8_u8)
            .prop_map(|(dir, at, to, new_at, flags)| {
                Step::Rename(dir, at, to, new_at, matches!(flags, 1 | 3), matches!(flags, 2..5))
            }),
        2 => (file.clone(), name.clone()).prop_map(|(dir, at)| Step::Unlink(dir, at)),
        2 => (file.clone(), name.clone()).prop_map(|(dir, at)| Step::Rmdir(dir, at)),
        1 => (file.clone(), mode).prop_map(|(file, mode)| Step::Mode(file, mode)),
        1 => (file.clone(), id.clone(), id).prop_map(|(file, uid, gid)| Step::Owner(file, uid, gid)),
        1 => (file.clone(), secs.clone(), secs).prop_map(|(file, a, m)| Step::Times(file, a, m)),
        2 => (file.clone(), 0..8_usize, prop_oneof![0..100_usize, Just(65_537)], 0..8_u8)
            .prop_map(|(file, at, len, flags)| {
                Step::SetXattr(file, at, len, flags & 6 == 2, flags & 6 == 4)
            }),
        1 => (file.clone(), 0..8_usize).prop_map(|(file, at)| Step::RemoveXattr(file, at)),
        2 => (file.clone(), len.clone(), len.clone())
            .prop_map(|(file, offset, len)| Step::Write(file, offset, len as usize)),
        1 => (file.clone(), len.clone()).prop_map(|(file, len)| Step::SetLen(file, len)),
        2 => (file.clone(), prop_oneof![0..4_i32, Just(16), Just(17)], len.clone(), len)
            .prop_map(|(file, mode, offset, len)| Step::Allocate(file, mode, offset, len)),
        2 => (file.clone(), 0..50_000_u64).prop_map(|(file, at)| Step::Seek(file, at)),
        2 => (file, name).prop_map(|(file, at)| Step::Look(file, at)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn calls_on_a_simulated_disk_answer_as_on_a_real_one(
        steps in prop::collection::vec(any_step(), 1..60),
    ) {
        compare(&steps)?;
    }
}

/// Answers that a random sequence of calls rarely meets, one after the other on the same disk.
#[test]
fn answers_of_rare_calls_are_those_of_a_real_disk() {
    let (dot, empty, long, too_long) = (30, 31, 32, 33);
    let deep = [
        Step::Make(0, 0, 4, 0o7777),
        Step::Open(0, 0),
        Step::Make(1, 1, 4, 0o755),
        Step::Open(1, 1),
        Step::Make(0, 2, 0, 0o6755),
        Step::Open(0, 2),
        Step::Look(3, 0),
        // A directory into itself, and over what it lies in.
        Step::Rename(0, 0, 2, 3, false, false),
        Step::Rename(0, 0, 2, 3, true, false),
        Step::Rename(1, 1, 0, 0, false, false),
        Step::Rename(1, 1, 0, 0, false, true),
        Step::Rename(0, 0, 1, 1, false, true),
        Step::Rename(0, 0, 1, 1, true, true),
        // Of two kinds.
        Step::Rename(0, 2, 0, 0, false, false),
        Step::Rename(0, 0, 0, 2, false, false),
        Step::Rename(0, 2, 1, 1, false, true),
        Step::Rename(0, 2, 1, 1, false, true),
        // Odd names.
        Step::Rename(0, dot, 0, 3, false, false),
        Step::Rename(0, 2, 0, dot, true, false),
        Step::Rename(0, empty, 0, 3, false, false),
        Step::Rename(0, 2, 0, too_long, false, false),
        Step::Rename(0, 4, 0, too_long, false, false),
        Step::Rename(0, 2, 0, long, false, false),
        Step::Rename(0, long, 0, 2, false, false),
        Step::Make(0, too_long, 4, 0o755),
        Step::Unlink(0, dot),
        Step::Rmdir(0, dot),
        Step::Rmdir(0, 0),
        Step::Rmdir(0, 2),
        Step::Unlink(0, 0),
        Step::Link(1, 0, 4),
        Step::Link(1, 0, 2),
        Step::Link(3, 3, 4),
        // Owners and set-id bits.
        Step::Mode(1, 0o2775),
        Step::Owner(1, Some(1), Some(2)),
        Step::Make(1, 3, 0, 0o6755),
        Step::Make(1, 4, 4, 0o755),
        Step::Open(1, 3),
        Step::Open(1, 4),
        Step::Owner(4, None, None),
        Step::Look(4, 0),
        Step::Mode(4, 0o6745),
        Step::Owner(4, Some(5), None),
        Step::Look(4, 0),
        // Without names.
        Step::Link(3, 0, 4),
        Step::Unlink(0, 2),
        Step::Unlink(0, 4),
        Step::Write(3, 5000, 10),
        Step::Look(3, 0),
        Step::Link(3, 0, 4),
        Step::Rmdir(1, 1),
        Step::Make(2, 0, 0, 0o644),
        Step::Open(2, too_long),
        Step::Rename(0, 0, 2, 0, false, false),
        Step::Look(2, 0),
        Step::Make(0, 2, 8, 0),
        Step::Open(0, 2),
        Step::Mode(6, 0o700),
        Step::SetXattr(6, 0, 1, false, false),
        Step::SetXattr(6, 1, 1, false, false),
        Step::Look(6, 0),
        Step::Look(6, 1),
    ];
    compare(&deep).unwrap();
}

/// Names in D.
async fn names(disk: &SimulatedDisk) -> Vec<String> {
    let names = disk.list(&disk.top()).await.unwrap();
    names.into_iter().map(|listed| String::from_utf8(listed.name.to_vec()).unwrap()).collect()
}

async fn make_file(disk: &SimulatedDisk, name: &str) -> DiskResult<()> {
    disk.make(&disk.top(), name.as_bytes(), Making::File, 0o644).await
}

async fn open_file(disk: &SimulatedDisk, name: &str) -> DiskResult<<SimulatedDisk as Disk>::File> {
    disk.open(&disk.node(&disk.top(), name.as_bytes()).await?).await
}

/// Counts of names are those of the names that are there, and no inode is counted twice or lost.
async fn assert_consistent(disk: &SimulatedDisk) {
    let mut counted: BTreeMap<u64, (u32, u32)> = BTreeMap::new();
    let top = disk.stat(&disk.top()).await.unwrap();
    counted.insert(top.ino, (top.nlink, 2));
    let mut ahead = vec![(top.ino, disk.top())];
    while let Some((number, dir)) = ahead.pop() {
        for listed in disk.list(&dir).await.unwrap() {
            let node = disk.node(&dir, &listed.name).await.unwrap();
            let found = disk.stat(&node).await.unwrap();
            assert_eq!((found.ino, found.kind), (listed.ino, listed.kind));
            let is_directory = found.kind == FileKind::Directory;
            let count = counted.entry(found.ino).or_insert((found.nlink, 0));
            count.1 += if is_directory { 2 } else { 1 };
            if is_directory {
                counted.get_mut(&number).unwrap().1 += 1;
                ahead.push((found.ino, node));
            }
        }
    }
    for (number, (said, found)) in &counted {
        assert_eq!(said, found, "names of inode {number}");
    }
    let room = disk.stat_fs().await.unwrap();
    assert_eq!(room.files - room.files_free, counted.len() as u64);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_crash_leaves_a_whole_file_system_and_what_was_synced(
        steps in prop::collection::vec(any_step(), 1..40),
        synced in 0..40_usize,
        later in prop::collection::vec(any_step(), 0..40),
        loss in prop_oneof![Just(Loss::Ordered), Just(Loss::Arbitrary)],
        seed in any::<u64>(),
    ) {
        run(async {
            let disk = simulated();
            let mut nodes = vec![disk.top()];
            for next in &steps[..synced.min(steps.len())] {
                step(&disk, &mut nodes, next).await;
            }
            disk.sync_all().await.unwrap();
            let all = tree(&disk).await;
            for next in &steps[synced.min(steps.len())..] {
                step(&disk, &mut nodes, next).await;
            }
            // One file is synced, in a directory that is not, and then others change.
            let (top, dir) = (disk.top(), b"synced-dir");
            disk.make(&top, dir, Making::Directory, 0o755).await.unwrap();
            let dir = disk.node(&top, dir).await.unwrap();
            disk.make(&dir, b"old", Making::File, 0o644).await.unwrap();
            let node = disk.node(&dir, b"old").await.unwrap();
            disk.set_mode(&node, 0o600).await.unwrap();
            let file = disk.open(&node).await.unwrap();
            disk.write(&file, 0, b"bytes").await.unwrap();
            disk.rename((&dir, b"old"), (&dir, b"new"), RenameFlags::default()).await.unwrap();
            disk.sync_file(&file, false).await.unwrap();
            let before = disk.stat(&node).await.unwrap();
            for next in &later {
                step(&disk, &mut nodes, next).await;
            }
            disk.crash_with(loss, seed);
            prop_assert_eq!(disk.stat(&top).await, Err(Errno::EIO));
            let disk = disk.reopen();
            assert_consistent(&disk).await;
            let dir = disk.node(&disk.top(), b"synced-dir").await.unwrap();
            let node = disk.node(&dir, b"new").await.unwrap();
            prop_assert_eq!(disk.stat(&node).await, Ok(before));
            prop_assert_eq!(disk.stat_at(&dir, b"old").await, Err(Errno::ENOENT));
            let file = disk.open(&node).await.unwrap();
            prop_assert_eq!(disk.read(&file, 0, 10).await, Ok(Bytes::from_static(b"bytes")));
            if steps.len() <= synced && later.is_empty() {
                let mut left = tree(&disk).await;
                left.retain(|path, _| !path.starts_with("/synced-dir"));
                prop_assert_eq!(left, all);
            }
            Ok(())
        })?;
    }
}

#[test]
fn an_ordered_crash_leaves_the_first_changes_and_an_arbitrary_one_any() {
    run(async {
        let mut found = BTreeSet::new();
        for (loss, seeds) in [(Loss::Ordered, 0..200), (Loss::Arbitrary, 0..50)] {
            for seed in seeds {
                let disk = simulated();
                for name in ["0", "1", "2", "3"] {
                    make_file(&disk, name).await.unwrap();
                }
                disk.sync_file(&open_file(&disk, "1").await.unwrap(), false).await.unwrap();
                disk.crash_with(loss, seed);
                let left = names(&disk.reopen()).await.concat();
                match loss {
                    Loss::Ordered => assert!(["01", "012", "0123"].contains(&&*left), "{left}"),
                    Loss::Arbitrary => assert!(left.contains('1'), "{left}"),
                }
                found.insert((loss == Loss::Ordered, left));
            }
        }
        assert_eq!(found.iter().filter(|(is_ordered, _)| *is_ordered).count(), 3, "{found:?}");
        assert!(found.contains(&(false, "13".into())), "{found:?}");
    });
}

#[test]
fn a_crash_takes_nothing_that_was_synced_with_everything() {
    run(async {
        for seed in 0..50 {
            for loss in [Loss::Ordered, Loss::Arbitrary] {
                let disk = simulated();
                let top = disk.top();
                make_file(&disk, "kept").await.unwrap();
                let file = open_file(&disk, "kept").await.unwrap();
                disk.write(&file, 0, &[b'k'; 5000]).await.unwrap();
                make_file(&disk, "gone").await.unwrap();
                let _open = open_file(&disk, "gone").await.unwrap();
                disk.unlink(&top, b"gone").await.unwrap();
                disk.sync_all().await.unwrap();
                let all = tree(&disk).await;
                disk.crash_with(loss, seed);
                let disk = disk.reopen();
                assert_eq!(tree(&disk).await, all);
                assert_consistent(&disk).await;
            }
        }
    });
}

#[test]
fn a_crash_tears_writes_between_sectors_only() {
    run(async {
        let mut is_torn = false;
        for seed in 0..50 {
            let disk = simulated();
            make_file(&disk, "f").await.unwrap();
            let file = open_file(&disk, "f").await.unwrap();
            disk.write(&file, 0, &[b'o'; 8192]).await.unwrap();
            disk.sync_file(&file, true).await.unwrap();
            disk.write(&file, 0, &[b'n'; 10_000]).await.unwrap();
            disk.crash(seed);
            let disk = disk.reopen();
            let file = open_file(&disk, "f").await.unwrap();
            let bytes = disk.read(&file, 0, 1 << 20).await.unwrap();
            assert!([8192, 10_000].contains(&bytes.len()), "{}", bytes.len());
            let mut kinds = BTreeSet::new();
            for (at, sector) in bytes.chunks(512).enumerate() {
                assert!(sector.iter().all(|byte| *byte == sector[0]));
                let old = if at < 16 { b'o' } else { 0 };
                assert!([b'n', old].contains(&sector[0]), "{}", sector[0]);
                kinds.insert(sector[0] == b'n');
            }
            is_torn |= kinds.len() == 2;
        }
        assert!(is_torn);
    });
}

#[test]
fn inode_numbers_are_used_again_at_once_but_not_while_a_file_is_open() {
    run(async {
        let disk = simulated();
        let top = disk.top();
        make_file(&disk, "a").await.unwrap();
        let open = disk.node(&top, b"a").await.unwrap();
        let a = disk.stat(&open).await.unwrap();
        disk.unlink(&top, b"a").await.unwrap();
        make_file(&disk, "b").await.unwrap();
        assert_ne!(disk.stat_at(&top, b"b").await.unwrap().ino, a.ino);
        drop(open);
        make_file(&disk, "c").await.unwrap();
        let c = disk.stat_at(&top, b"c").await.unwrap();
        assert_eq!(c.ino, a.ino);
        assert_ne!(c.generation, a.generation);
    });
}

#[test]
fn a_killed_process_loses_nothing_and_its_late_calls_hold_its_locks() {
    for calls in [InFlight::Lost, InFlight::Late] {
        run(async {
            let disk = simulated();
            let top = disk.top();
            disk.lock(&top, b"lock").await.unwrap();
            assert_eq!(disk.lock(&top, b"lock").await, Err(Errno::EAGAIN));
            let other = disk.reopen();
            assert_eq!(other.lock(&other.top(), b"lock").await, Err(Errno::EAGAIN));
            assert_eq!(
                other.stat(&top).await,
                Err(Errno::EIO),
                "a file that another process has open"
            );
            make_file(&disk, "kept").await.unwrap();
            disk.set_latency(7, Duration::from_millis(20));
            {
                let mut late = std::pin::pin!(make_file(&disk, "late"));
                assert!(futures_util::poll!(&mut late).is_pending());
                disk.kill(calls);
            }
            let next = disk.reopen();
            let mut held = next.lock(&next.top(), b"lock").await;
            while held == Err(Errno::EAGAIN) && calls == InFlight::Late {
                held = next.lock(&next.top(), b"lock").await;
            }
            assert_eq!(held, Ok(()));
            let expected: &[&str] = match calls {
                InFlight::Lost => &["kept", "lock"],
                InFlight::Late => &["kept", "late", "lock"],
            };
            assert_eq!(names(&next).await, expected);
            assert_eq!(disk.stat(&top).await, Err(Errno::EIO));
        });
    }
}

#[test]
fn calls_fail_and_processes_stop_where_a_test_says() {
    run(async {
        let disk = simulated();
        disk.fail_next(DiskCall::Make, Errno::EIO);
        assert!(disk.stat(&disk.top()).await.is_ok());
        assert_eq!(make_file(&disk, "a").await, Err(Errno::EIO));
        disk.fail_after(1, Errno::ENOSPC);
        assert_eq!(make_file(&disk, "a").await, Ok(()));
        assert_eq!(disk.faults_left(), 1);
        assert_eq!(make_file(&disk, "b").await, Err(Errno::ENOSPC));
        assert_eq!(disk.faults_left(), 0);
        disk.stop_after(1);
        assert_eq!(make_file(&disk, "b").await, Ok(()));
        assert!(disk.stat(&disk.top()).await.is_ok() && !disk.is_stopped());
        assert_eq!(make_file(&disk, "c").await, Err(Errno::EIO));
        assert!(disk.stat(&disk.top()).await.is_err() && disk.is_stopped());
        assert_eq!(names(&disk.reopen()).await, ["a", "b"]);
    });
}

#[test]
fn a_disk_fills_up_and_is_set_back() {
    run(async {
        let disk = simulated();
        let database = disk.database(&disk.top(), b"db").await.unwrap();
        database.write(0, &[1; 5000]).unwrap();
        let before = disk.snapshot();
        let used = disk.stat_fs().await.unwrap();
        disk.set_capacity((used.blocks - used.blocks_free + 2) * 4096, 3);
        make_file(&disk, "a").await.unwrap();
        assert_eq!(make_file(&disk, "b").await, Err(Errno::ENOSPC));
        let file = open_file(&disk, "a").await.unwrap();
        assert_eq!(disk.write(&file, 0, &[1; 10_000]).await, Ok(8192));
        assert_eq!(disk.write(&file, 8192, b"x").await, Err(Errno::ENOSPC));
        let (node, flags) = (disk.node(&disk.top(), b"a").await.unwrap(), XattrFlags::default());
        let set = disk.set_xattr(&node, b"user.long", &[1; 3000], flags).await;
        assert_eq!(set, Err(Errno::ENOSPC));
        assert_eq!(database.write(8192, b"x").map_err(Errno::from), Err(Errno::ENOSPC));
        disk.without_xattrs();
        assert_eq!(disk.xattrs(&node).await, Err(Errno::EOPNOTSUPP));
        disk.rollback(&before);
        assert_eq!(database.size().map_err(Errno::from), Err(Errno::EIO));
        let disk = disk.reopen();
        assert_eq!(names(&disk).await, ["db"]);
        let database = disk.database(&disk.top(), b"db").await.unwrap();
        let mut bytes = [0; 5000];
        database.read(0, &mut bytes).unwrap();
        assert_eq!(bytes, [1; 5000]);
        assert!(database.read(1, &mut bytes).is_err());
    });
}

#[test]
fn a_crash_gives_no_inode_number_to_two_files() {
    run(async {
        for seed in 0..50 {
            for is_synced in [false, true] {
                let disk = simulated();
                let top = disk.top();
                make_file(&disk, "a").await.unwrap();
                disk.sync_all().await.unwrap();
                disk.unlink(&top, b"a").await.unwrap();
                make_file(&disk, "b").await.unwrap();
                if is_synced {
                    disk.sync_file(&open_file(&disk, "b").await.unwrap(), true).await.unwrap();
                }
                disk.crash_with(Loss::Arbitrary, seed);
                let disk = disk.reopen();
                assert_consistent(&disk).await;
                let left = names(&disk).await.concat();
                assert!(if is_synced { left == "b" } else { left.len() < 2 }, "{left}");
            }
        }
    });
}

#[test]
fn a_crash_does_not_make_a_change_of_one_file_to_another_of_the_same_name() {
    run(async {
        let mut found = BTreeSet::new();
        for seed in 0..100 {
            let disk = simulated();
            let top = disk.top();
            make_file(&disk, "a").await.unwrap();
            disk.sync_all().await.unwrap();
            let number = disk.stat_at(&top, b"a").await.unwrap().ino;
            disk.rename((&top, b"a"), (&top, b"b"), RenameFlags::default()).await.unwrap();
            make_file(&disk, "a").await.unwrap();
            disk.unlink(&top, b"a").await.unwrap();
            disk.crash_with(Loss::Arbitrary, seed);
            let disk = disk.reopen();
            let all = disk.list(&disk.top()).await.unwrap();
            assert!(all.iter().any(|listed| listed.ino == number), "the synced file is lost");
            found.insert(names(&disk).await.concat());
        }
        assert_eq!(found, BTreeSet::from(["a".into(), "ab".into(), "b".into()]));
    });
}

/// Two names were exchanged on what a crash had left, though the file under the second one was another one than before the crash.
#[test]
fn a_crash_gives_no_file_a_name_that_it_never_had() {
    run(async {
        let mut is_exchanged = false;
        for seed in 0..100 {
            let disk = simulated();
            let top = disk.top();
            make_file(&disk, "first").await.unwrap();
            make_file(&disk, "second").await.unwrap();
            disk.sync_all().await.unwrap();
            // The number of a file that is gone is another one's soon.
            let file = async |disk: &SimulatedDisk, name: &[u8]| {
                let stat = disk.stat_at(&disk.top(), name).await.unwrap();
                (stat.ino, stat.generation)
            };
            let (first, second) = (file(&disk, b"first").await, file(&disk, b"second").await);
            // Another file is called as the second one, and is exchanged with the first one.
            disk.unlink(&top, b"second").await.unwrap();
            make_file(&disk, "second").await.unwrap();
            let exchange = RenameFlags { exchange: true, no_replace: false };
            disk.rename((&top, b"first"), (&top, b"second"), exchange).await.unwrap();
            disk.crash_with(Loss::Arbitrary, seed);
            let disk = disk.reopen();
            for listed in disk.list(&disk.top()).await.unwrap() {
                let (name, stands) = (&listed.name[..], file(&disk, &listed.name).await);
                is_exchanged |= stands == first && name == b"second";
                assert!(
                    stands != second || name == b"second",
                    "seed {seed}: the second file moved"
                );
            }
        }
        assert!(is_exchanged);
    });
}

/// A list that says what a mode says sets the mode, and is no attribute afterwards.
#[test]
fn a_list_without_entries_of_its_own_is_a_mode() {
    const LIST: &[u8] = b"system.posix_acl_access";
    let list = |owner: u8, group: u8, others: u8| {
        let entry = |tag, permissions| [tag, 0, permissions, 0, 0xff, 0xff, 0xff, 0xff];
        [&[2, 0, 0, 0][..], &entry(1, owner), &entry(4, group), &entry(32, others)].concat()
    };
    async fn answers<D: Disk>(disk: &D, lists: &[Vec<u8>]) -> Vec<String> {
        let top = disk.top();
        let mut answers = Vec::new();
        let makings = [
            (b"file", Making::File),
            (b"dir_", Making::Directory),
            (b"link", Making::Symlink(b"x")),
        ];
        for (name, making) in makings {
            disk.make(&top, name, making, 0o4751).await.unwrap();
            let node = disk.node(&top, name).await.unwrap();
            for list in lists {
                for (create, replace) in [(false, true), (false, false), (true, false)] {
                    let flags = XattrFlags { create, replace };
                    answers.push(told(disk.set_xattr(&node, LIST, list, flags).await));
                    answers.push(told(disk.xattr(&node, LIST).await));
                    answers.push(told(disk.stat(&node).await.map(|stat| stat.mode)));
                }
            }
            answers.push(told(disk.remove_xattr(&node, LIST).await));
            answers.push(told(disk.xattrs(&node).await));
        }
        answers
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: the simulated disk behaves as for root; run this test as root");
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let real = Directory::open(place.path()).unwrap();
    run(async {
        let lists = [list(6, 4, 0), list(7, 5, 5), list(0, 0, 0)];
        let of_real = answers(&real, &lists).await;
        if of_real[0].contains("EOPNOTSUPP") {
            eprintln!("SKIPPED: the file system has no access control lists");
            return;
        }
        assert_eq!(answers(&simulated(), &lists).await, of_real);
    });
}
