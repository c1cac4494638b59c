//! Crashes: of the process in the middle of a change, of the machine with what was not synced, seed by seed.

use std::collections::{BTreeMap, BTreeSet};

use atoll_pool::disk::Disk;
use atoll_pool::disk::simulated::{InFlight, Loss, SimulatedDisk};
use atoll_pool::{CheckReport, PoolFs, PoolSettings, check, create, leave};
use atoll_vfs::{
    CreateVerifier, Errno, FileKind, FileSystem, InodeNumber, OpenFlags, PersistentHandle,
    RenameFlags, Writer,
};
use bytes::Bytes;

use crate::workload::steps::{Step, find, paths, take};
use crate::workload::tree::{Tree, tree, tree_after};
use crate::workload::{Dice, ROOT, env, me, run, seeds};

type Fs = PoolFs<SimulatedDisk>;

async fn new_pool(level: u8) -> (SimulatedDisk, Fs) {
    let disk = SimulatedDisk::new(env());
    create(&disk, PoolSettings::new([7; 16], level)).await.unwrap();
    let fs = open(&disk).await;
    (disk, fs)
}

async fn open(disk: &SimulatedDisk) -> Fs {
    PoolFs::open(env(), disk.clone()).await.expect("it opens").0
}

/// A change for each way in which names lie on the disk, in a pool whose first two levels are distributed, with the tree of
/// [`PREPARED`].
fn directed() -> Vec<Step> {
    let path = |path: &str| path.to_owned();
    vec![
        Step::Mkdir(path("/new")),
        Step::Mkdir(path("/dist/plain/new")),
        Step::Create(path("/new")),
        Step::Create(path("/dist/plain/new")),
        Step::Symlink(path("/new")),
        Step::Link(path("/file"), path("/dist/second")),
        Step::Unlink(path("/file")),
        Step::Unlink(path("/dist/linked")),
        Step::Rmdir(path("/empty")),
        Step::Rmdir(path("/dist/plain/empty")),
        // A file, over a file, over another's name.
        Step::Rename(path("/file"), path("/dist/plain/moved")),
        Step::Rename(path("/file"), path("/dist/other")),
        Step::Rename(path("/dist/linked"), path("/dist/other")),
        // A distributed directory, to another depth, over an empty one of both kinds.
        Step::Rename(path("/full"), path("/moved")),
        Step::Rename(path("/full"), path("/dist/plain/moved")),
        Step::Rename(path("/full"), path("/empty")),
        Step::Rename(path("/full"), path("/dist/plain/empty")),
        // A plain directory, up, and over both kinds.
        Step::Rename(path("/dist/plain/deep"), path("/moved")),
        Step::Rename(path("/dist/plain/deep"), path("/empty")),
        Step::Rename(path("/dist/plain/deep"), path("/dist/plain/empty")),
        Step::Exchange(path("/full"), path("/empty")),
        Step::Exchange(path("/full"), path("/dist/plain/deep")),
        Step::Exchange(path("/file"), path("/dist/plain/deep")),
        Step::Chmod(path("/dist/other"), 0o4711),
        Step::Chown(path("/full"), 1001),
        Step::SetTimes(path("/dist/other"), 7),
        Step::Persist,
        Step::Checkpoint,
    ]
}

const PREPARED: [&str; 7] = [
    "/dist",
    "/dist/sub",
    "/dist/sub/below",
    "/dist/plain",
    "/dist/plain/empty",
    "/dist/plain/deep",
    "/empty",
];

async fn prepared() -> (SimulatedDisk, Fs) {
    // Level 1: /dist is distributed, /dist/plain lies in it.
    let (disk, fs) = new_pool(1).await;
    for path in PREPARED {
        take(&fs, &Step::Mkdir(path.to_owned())).await.unwrap();
    }
    take(&fs, &Step::Mkdir("/full".to_owned())).await.unwrap();
    for path in ["/file", "/dist/other", "/full/in", "/dist/plain/deep/in"] {
        take(&fs, &Step::Create(path.to_owned())).await.unwrap();
    }
    take(&fs, &Step::Link("/dist/other".to_owned(), "/dist/linked".to_owned())).await.unwrap();
    fs.sync().await.unwrap();
    (disk, fs)
}

/// A process that dies in the middle of a change, wherever, has made all of it or nothing.
#[test]
fn a_change_that_is_cut_off_anywhere_is_made_or_not() {
    run(async {
        for step in directed() {
            let (_, fs) = prepared().await;
            let before = tree(&fs).await;
            take(&fs, &step).await.unwrap_or_else(|errno| panic!("{step:?}: {errno}"));
            let after = tree(&fs).await;
            let mut cut = 0;
            loop {
                let (disk, fs) = prepared().await;
                disk.stop_after(cut);
                let _ = take(&fs, &step).await;
                if !disk.is_stopped() {
                    break;
                }
                drop(fs);
                disk.kill(InFlight::Lost);
                let disk = disk.reopen();
                let fs = open(&disk).await;
                let found = tree(&fs).await;
                let is_whole = found == before || found == after;
                assert!(
                    is_whole,
                    "{step:?} cut off after {cut} calls: {found:#?}\nbefore: {before:#?}"
                );
                drop(fs);
                assert_clean(&disk, &format!("{step:?} cut off after {cut} calls")).await;
                cut += 1;
            }
            assert!(cut > 0 || before == after, "{step:?} calls the disk");
        }
    });
}

/// The process that has the disk is dead; another one checks it.
async fn checked(disk: &SimulatedDisk) -> CheckReport {
    disk.kill(InFlight::Lost);
    check(env(), disk.reopen()).await.unwrap()
}

async fn assert_clean(disk: &SimulatedDisk, what: &str) {
    let report = checked(disk).await;
    assert_eq!((report.files_added, report.files_gone), (0, 0), "{what}: {report:?}");
    assert_eq!(report.orphans_named, 0, "{what}: {report:?}");
    assert!(report.names_without_directory.is_empty(), "{what}: {report:?}");
}

/// A disk that refuses any one call: the change fails or is made, and is never half-made.
#[test]
fn a_change_of_which_one_call_fails_is_made_or_not() {
    run(async {
        for step in directed() {
            let (_, fs) = prepared().await;
            let before = tree(&fs).await;
            take(&fs, &step).await.unwrap();
            let after = tree(&fs).await;
            for call in 0.. {
                let (disk, fs) = prepared().await;
                disk.fail_after(call, Errno::ENOSPC);
                let taken = take(&fs, &step).await;
                let was_met = disk.faults_left() == 0;
                if !was_met {
                    break;
                }
                drop(fs);
                disk.kill(InFlight::Lost);
                let fs = open(&disk.reopen()).await;
                let found = tree(&fs).await;
                let expected = if taken.is_ok() { &after } else { &before };
                // A change that failed may have been made, if what failed came after it.
                assert!(
                    found == *expected || (taken.is_err() && found == after),
                    "{step:?}, call {call} fails, {taken:?}: {found:#?}\nbefore: {before:#?}"
                );
            }
        }
    });
}

/// The process dies between changes: everything is there.
#[test]
fn a_killed_process_loses_nothing() {
    run(async {
        for seed in 0..seeds(60) {
            let (disk, fs) = new_pool((seed % 3) as u8).await;
            let mut dice = Dice(seed);
            for _ in 0..40 {
                let step = dice.step();
                let _ = take(&fs, &step).await;
            }
            let before = tree(&fs).await;
            drop(fs);
            disk.kill(InFlight::Lost);
            let disk = disk.reopen();
            let fs = open(&disk).await;
            assert_eq!(tree(&fs).await, before, "seed {seed}");
            drop(fs);
            assert_clean(&disk, &format!("seed {seed}")).await;
        }
    });
}

/// What a client was told survives.
struct Promised {
    tree: Tree,
    handles: BTreeMap<String, PersistentHandle>,
}

async fn promised(fs: &Fs) -> Promised {
    let tree = tree(fs).await;
    let mut handles = BTreeMap::new();
    for (path, seen) in &tree {
        handles.insert(path.clone(), fs.handle_of(seen.inode).await.unwrap());
    }
    Promised { tree, handles }
}

/// The machine loses power: what was answered after [`FileSystem::persist`] is there, with its numbers, and so are bytes that
/// were synced.
fn loses_power(loss: Loss, seeds: u64) {
    run(async {
        for seed in 0..seeds {
            let (disk, fs) = new_pool((seed % 3) as u8).await;
            let mut dice = Dice(seed);
            let mut kept = promised(&fs).await;
            let mut since: Vec<Step> = Vec::new();
            let mut done: Vec<Step> = Vec::new();
            let steps = 10 + dice.below(50);
            for _ in 0..steps {
                let step = dice.step();
                let taken = take(&fs, &step).await;
                if taken.is_ok() {
                    done.push(step.clone());
                }
                match step {
                    Step::Persist | Step::Checkpoint => {
                        taken.unwrap();
                        kept = promised(&fs).await;
                        since.clear();
                    }
                    step if taken.is_ok() => since.push(step),
                    _ => {}
                }
            }
            drop(fs);
            disk.crash_with(loss, seed);
            let disk = disk.reopen();
            let fs = open(&disk).await;
            let found = tree_after(&fs, loss).await;
            let what = |path: &str| {
                format!(
                    "seed {seed}, {path}, all: {done:?}, since: {since:?}\n{found:#?}\n{:#?}",
                    kept.tree
                )
            };
            let touched: BTreeSet<&str> = since.iter().flat_map(paths).collect();
            let inodes_touched: BTreeSet<InodeNumber> =
                touched.iter().filter_map(|path| Some(kept.tree.get(*path)?.inode)).collect();
            // A path is as it was unless a later change named it, a directory above, or another name of the file.
            let is_free = |path: &str| {
                !touched
                    .iter()
                    .any(|touched| path == *touched || path.starts_with(&format!("{touched}/")))
            };
            for (path, seen) in &kept.tree {
                if !is_free(path) || inodes_touched.contains(&seen.inode) {
                    continue;
                }
                let Some(now) = found.get(path) else { panic!("lost: {}", what(path)) };
                let is_written = since.iter().any(|step| matches!(step, Step::Write(..)));
                assert_eq!(
                    (now.inode, now.kind, now.mode, now.owner),
                    (seen.inode, seen.kind, seen.mode, seen.owner),
                    "{}",
                    what(path)
                );
                if seen.kind != FileKind::Regular || !is_written {
                    assert_eq!(now.text, seen.text, "{}", what(path));
                }
                let by_handle = fs.by_handle(me(), &kept.handles[path]).await;
                assert_eq!(
                    by_handle.map(|entry| entry.attr.inode),
                    Ok(seen.inode),
                    "{}",
                    what(path)
                );
            }
            for path in found.keys().filter(|path| is_free(path)) {
                assert!(kept.tree.contains_key(path), "came back: {}", what(path));
            }
            // Opening it again changes nothing.
            drop(fs);
            disk.kill(InFlight::Lost);
            let disk = disk.reopen();
            let fs = open(&disk).await;
            assert_eq!(tree(&fs).await, found, "seed {seed}: opened once more");
            drop(fs);
            let report = checked(&disk).await;
            // A file that a change replaced which the journal has lost, and the disk not.
            assert!(report.files_gone <= since.len() as u64, "seed {seed}: {report:?}");
            let is_whole = report.names_without_directory.is_empty() || loss == Loss::Arbitrary;
            assert!(is_whole, "seed {seed}: {report:?}");
        }
    });
}

#[test]
fn a_machine_that_loses_power_keeps_what_was_promised() {
    loses_power(Loss::Ordered, seeds(300));
}

/// On a file system that keeps any of the unsynced names and not others.
#[test]
fn a_machine_that_loses_power_keeps_what_was_promised_on_a_disk_without_order() {
    loses_power(Loss::Arbitrary, seeds(300));
}

/// A crash while the journal is made again is like any other.
#[test]
fn a_crash_while_it_is_opened_loses_nothing() {
    run(async {
        for seed in 0..seeds(20) {
            let (disk, fs) = new_pool(1).await;
            let mut dice = Dice(seed);
            let mut steps = Vec::new();
            for _ in 0..30 {
                let step = dice.step();
                if take(&fs, &step).await.is_ok() {
                    steps.push(step);
                }
            }
            fs.persist(&[]).await.unwrap();
            let before = tree(&fs).await;
            drop(fs);
            disk.crash_with(Loss::Ordered, seed);
            for cut in (0..).step_by(7) {
                let opening = disk.reopen();
                opening.stop_after(cut);
                let opened = PoolFs::open(env(), opening.clone()).await;
                let was_cut = opening.is_stopped();
                drop(opened);
                opening.kill(InFlight::Lost);
                if !was_cut {
                    break;
                }
            }
            let fs = open(&disk.reopen()).await;
            let names = |tree: &Tree| -> Vec<(String, InodeNumber)> {
                tree.iter().map(|(path, seen)| (path.clone(), seen.inode)).collect()
            };
            assert_eq!(names(&tree(&fs).await), names(&before), "seed {seed}: {steps:?}");
        }
    });
}

/// All paths below D, and what they are.
async fn plain(disk: &SimulatedDisk) -> BTreeMap<String, FileKind> {
    let mut all = BTreeMap::new();
    let mut open = vec![(disk.top(), String::new())];
    while let Some((dir, path)) = open.pop() {
        for listed in disk.list(&dir).await.unwrap() {
            let path = format!("{path}/{}", String::from_utf8_lossy(&listed.name));
            if listed.kind == FileKind::Directory {
                open.push((disk.node(&dir, &listed.name).await.unwrap(), path.clone()));
            }
            all.insert(path, listed.kind);
        }
    }
    all
}

/// Leaving that is cut off anywhere is gone on with, to the same plain tree.
#[test]
fn leaving_that_is_cut_off_anywhere_goes_on() {
    run(async {
        let (disk, fs) = prepared().await;
        let tree: BTreeMap<String, FileKind> =
            tree(&fs).await.into_iter().map(|(path, seen)| (path, seen.kind)).collect();
        drop(fs);
        disk.kill(InFlight::Lost);
        leave(env(), disk.reopen()).await.unwrap();
        disk.kill(InFlight::Lost);
        assert_eq!(plain(&disk.reopen()).await, tree);
        for cut in 0.. {
            let (disk, fs) = prepared().await;
            drop(fs);
            disk.kill(InFlight::Lost);
            let first = disk.reopen();
            first.stop_after(cut);
            let _ = leave(env(), first.clone()).await;
            if !first.is_stopped() {
                break;
            }
            first.kill(InFlight::Lost);
            let found = plain(&disk.reopen()).await;
            if !found.contains_key("/.atoll/slots") && !found.contains_key("/.atoll/stamp") {
                // All but an empty directory is done.
                assert!(
                    found.iter().filter(|(path, _)| *path != "/.atoll").eq(tree.iter()),
                    "after {cut} calls"
                );
                continue;
            }
            leave(env(), disk.reopen())
                .await
                .unwrap_or_else(|error| panic!("after {cut} calls: {error}"));
            assert_eq!(plain(&disk.reopen()).await, tree, "after {cut} calls");
        }
    });
}

/// A disk that fills up: files can be removed, the pool can be opened, and goes on once there is room.
#[test]
fn a_full_disk_is_left_again() {
    // Also one that is smaller than what a large one keeps free.
    for size_mib in [600, 90] {
        fills_up(size_mib << 20);
    }
}

fn fills_up(size_bytes: u64) {
    run(async {
        let (disk, fs) = new_pool(1).await;
        fs.sync().await.unwrap();
        disk.set_capacity(size_bytes, 10_000);
        fs.sync().await.unwrap();
        let (entry, opened) =
            fs.create(me(), ROOT, b"large", 0o644, OpenFlags::WRITE).await.unwrap();
        let (inode, chunk) = (entry.attr.inode, Bytes::from(vec![7; 4 << 20]));
        let mut end = 0;
        let full = loop {
            match fs.write(Writer::At(me()), inode, opened.handle, end, chunk.clone()).await {
                Ok(written) => end += u64::from(written),
                Err(errno) => break errno,
            }
        };
        assert_eq!(full, Errno::ENOSPC);
        fs.close(inode, opened.handle).await.unwrap();
        fs.forget(inode, 1);
        fs.sync().await.unwrap();
        assert_eq!(take(&fs, &Step::Mkdir("/more".to_owned())).await, Err(Errno::ENOSPC));
        take(&fs, &Step::Chmod("/large".to_owned(), 0o600)).await.unwrap();
        drop(fs);
        disk.kill(InFlight::Lost);
        let disk = disk.reopen();
        let fs = open(&disk).await;
        take(&fs, &Step::Unlink("/large".to_owned())).await.unwrap();
        fs.sync().await.unwrap();
        take(&fs, &Step::Mkdir("/more".to_owned())).await.unwrap();
    });
}

/// Half a minute after a change all is in the index: there is nothing to make again.
#[tokio::test(start_paused = true)]
async fn half_a_minute_after_a_change_all_is_in_the_index() {
    let (disk, fs) = new_pool(1).await;
    take(&fs, &Step::Mkdir("/home".to_owned())).await.unwrap();
    atoll_env::sleep(&*env(), std::time::Duration::from_secs(31)).await;
    drop(fs);
    disk.kill(InFlight::Lost);
    let (_, report) = PoolFs::open(env(), disk.reopen()).await.unwrap();
    assert_eq!(report.changes_redone, 0);
}

/// A client that repeats an exclusive create after the server's machine lost power gets its file (RFC 1813, CREATE).
#[test]
fn an_exclusive_create_is_recognised_after_a_loss_of_power() {
    run(async {
        for seed in 0..seeds(40) {
            let (disk, fs) = new_pool(1).await;
            let verifier = CreateVerifier(*b"verifier");
            let made = fs.create_exclusive(me(), ROOT, b"file", 0o644, verifier).await.unwrap();
            fs.persist(&[ROOT, made.attr.inode]).await.unwrap();
            drop(fs);
            disk.crash_with(if seed % 2 == 0 { Loss::Ordered } else { Loss::Arbitrary }, seed);
            let fs = open(&disk.reopen()).await;
            let again = fs.create_exclusive(me(), ROOT, b"file", 0o644, verifier).await;
            assert_eq!(again.map(|entry| entry.attr.inode), Ok(made.attr.inode), "seed {seed}");
            let other =
                fs.create_exclusive(me(), ROOT, b"file", 0o644, CreateVerifier(*b"another!")).await;
            assert_eq!(other.err(), Some(Errno::EEXIST), "seed {seed}");
        }
    });
}

/// A file that was written and synced long ago needs one sync, of its own.
#[test]
fn a_sync_of_a_settled_file_leaves_the_journal_alone() {
    run(async {
        let (disk, fs) = new_pool(1).await;
        take(&fs, &Step::Create("/file".to_owned())).await.unwrap();
        take(&fs, &Step::Checkpoint).await.unwrap();
        take(&fs, &Step::Persist).await.unwrap();
        let inode = find(&fs, "/file").await.unwrap();
        let handle = fs.open(me(), inode, OpenFlags::WRITE).await.unwrap().handle;
        fs.write(Writer::At(me()), inode, handle, 0, Bytes::from_static(b"x")).await.unwrap();
        // The sync, and nothing else that changes the disk.
        disk.stop_after(1);
        fs.fsync(inode, handle, false).await.unwrap();
        assert!(!disk.is_stopped());
    });
}

/// A file whose number the disk had lost, and which stood where another one had been, or was to be, was taken for that one, with its
/// bytes.
#[test]
fn a_file_never_has_the_bytes_of_another_one_after_a_loss_of_power() {
    let mut sizes = BTreeSet::new();
    for seed in 0..200 {
        let loss = if seed % 2 == 0 { Loss::Arbitrary } else { Loss::Ordered };
        for is_removed in [false, true] {
            run(async {
                let (disk, fs) = new_pool(1).await;
                let create = async |name: &[u8]| {
                    let flags = OpenFlags::READ_WRITE;
                    let (entry, opened) = fs.create(me(), ROOT, name, 0o644, flags).await.unwrap();
                    (entry.attr.inode, opened.handle)
                };
                let write = async |(inode, handle)| {
                    let bytes = Bytes::from_static(b"of the other one");
                    fs.write(Writer::At(me()), inode, handle, 0, bytes).await.unwrap();
                };
                let empty = match is_removed {
                    true => {
                        let other = create(b"other").await;
                        write(other).await;
                        fs.unlink(me(), ROOT, b"other").await.unwrap();
                        create(b"other").await.0
                    }
                    false => {
                        let (empty, _) = create(b"other").await;
                        let flags = RenameFlags::default();
                        fs.rename(me(), ROOT, b"other", ROOT, b"empty", flags).await.unwrap();
                        write(create(b"other").await).await;
                        empty
                    }
                };
                fs.persist(&[empty]).await.unwrap();
                drop(fs);
                disk.crash_with(loss, seed);
                let fs = open(&disk.reopen()).await;
                let name = if is_removed { b"other" } else { b"empty" };
                let found = fs.lookup(me(), ROOT, name).await.unwrap().attr;
                assert_eq!((found.inode, found.size_bytes), (empty, 0), "seed {seed}");
                if !is_removed {
                    sizes.insert(fs.lookup(me(), ROOT, b"other").await.unwrap().attr.size_bytes);
                }
            });
        }
    }
    assert!(sizes.len() > 1, "the bytes of the other file are lost, or not: {sizes:?}");
}

/// Its old name is another file's, which may have lost its number: that one was taken for it, and it had no bytes.
#[test]
fn a_file_whose_name_is_replaced_outlasts_a_loss_of_power() {
    let changes = [(true, false), (true, true), (false, true)];
    let cases = changes.map(|(is_linked, is_replaced)| {
        [true, false].map(|is_settled| (is_settled, is_linked, is_replaced))
    });
    for seed in 0..seeds(100) {
        for (is_settled, is_linked, is_replaced) in cases.concat() {
            run(async {
                let (disk, fs) = new_pool(1).await;
                let flags = OpenFlags::READ_WRITE;
                let (entry, opened) = fs.create(me(), ROOT, b"old", 0o644, flags).await.unwrap();
                let (file, handle) = (entry.attr.inode, opened.handle);
                let bytes = Bytes::from_static(b"bytes");
                fs.write(Writer::At(me()), file, handle, 0, bytes.clone()).await.unwrap();
                fs.fsync(file, handle, false).await.unwrap();
                if is_settled {
                    take(&fs, &Step::Checkpoint).await.unwrap();
                }
                let plain = RenameFlags::default();
                match is_linked {
                    true => drop(fs.link(me(), file, ROOT, b"new").await.unwrap()),
                    false => fs.rename(me(), ROOT, b"old", ROOT, b"new", plain).await.unwrap(),
                }
                if is_replaced {
                    fs.create(me(), ROOT, b"other", 0o644, flags).await.unwrap();
                    fs.rename(me(), ROOT, b"other", ROOT, b"old", plain).await.unwrap();
                } else {
                    fs.unlink(me(), ROOT, b"old").await.unwrap();
                }
                drop(fs);
                disk.crash_with(Loss::Arbitrary, seed);
                let fs = open(&disk.reopen()).await;
                let mut found = Vec::new();
                for name in [&b"old"[..], b"new"] {
                    if let Ok(entry) = fs.lookup(me(), ROOT, name).await {
                        found.push(entry.attr);
                    }
                }
                let found = found.iter().find(|attr| attr.inode == file);
                let size = found.map(|attr| attr.size_bytes);
                assert_eq!(size, Some(5), "seed {seed}, {is_settled}, {is_linked}, {is_replaced}");
            });
        }
    }
}
