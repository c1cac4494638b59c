//! Limits on what users and directories take, in a pool of one.

use std::sync::Arc;

use atoll_pool::disk::simulated::{Loss, SimulatedDisk};
use atoll_pool::{PoolFs, PoolSettings, QuotaAmount, QuotaRow, QuotaSubject, create};
use atoll_sim::{Sim, SimConfig};
use atoll_vfs::{Caller, Errno, FileSystem, InodeNumber, OpenFlags, RenameFlags, SetAttr, Writer};
use bytes::Bytes;

use crate::group::LONG;

type Fs = PoolFs<SimulatedDisk>;

const ROOT: InodeNumber = InodeNumber::ROOT;
const ANN: QuotaSubject = QuotaSubject::User(7);
const PAGE: u64 = 4096;

fn ann() -> Caller {
    Caller { uid: 7, gid: 7, ..Caller::default() }
}

fn amount(bytes: u64, files: u64) -> QuotaAmount {
    QuotaAmount { bytes, files }
}

async fn row(fs: &Fs, subject: QuotaSubject) -> QuotaRow {
    fs.quotas().await.unwrap().rows()[&subject]
}

/// What has been kept in step, and what a count comes to.
async fn used(fs: &Fs, subject: QuotaSubject) -> QuotaAmount {
    let kept = fs.quotas_as_kept().rows()[&subject].used;
    let counted = row(fs, subject).await.used;
    assert_eq!(kept, counted, "calls have kept something else in step than there is");
    counted
}

async fn create_file(fs: &Fs, parent: InodeNumber, name: &str) -> Result<InodeNumber, Errno> {
    let made = fs.create(ann(), parent, name.as_bytes(), 0o644, OpenFlags::WRITE).await;
    let (entry, opened) = made?;
    fs.close(entry.attr.inode, opened.handle).await.unwrap();
    Ok(entry.attr.inode)
}

async fn write(fs: &Fs, inode: InodeNumber, offset: u64, len: u64) -> Result<u32, Errno> {
    let handle = fs.open(ann(), inode, OpenFlags::WRITE).await.unwrap().handle;
    let data = Bytes::from(vec![1; len as usize]);
    let written = fs.write(Writer::At(ann()), inode, handle, offset, data).await;
    fs.close(inode, handle).await.unwrap();
    written
}

async fn mkdir(fs: &Fs, parent: InodeNumber, name: &str) -> InodeNumber {
    fs.mkdir(ann(), parent, name.as_bytes(), 0o755).await.unwrap().attr.inode
}

async fn rename(fs: &Fs, from: (InodeNumber, &str), to: (InodeNumber, &str)) -> Result<(), Errno> {
    let flags = RenameFlags::default();
    fs.rename(ann(), from.0, from.1.as_bytes(), to.0, to.1.as_bytes(), flags).await
}

fn with_pool<F: Future<Output = ()> + Send + 'static>(
    work: impl FnOnce(Fs, SimulatedDisk, Sim) -> F,
) {
    let sim = Sim::new(SimConfig::default());
    let disk = SimulatedDisk::new(sim.outside());
    let begin = async {
        create(&disk, PoolSettings::new([7; 16], 1)).await.unwrap();
        PoolFs::open(sim.outside(), disk.clone()).await.unwrap().0
    };
    let fs = sim.block_on(LONG, begin).unwrap();
    sim.block_on(LONG, work(fs, disk, sim.clone())).unwrap();
    sim.shut_down();
}

#[test]
fn bytes_and_files_of_a_user_have_a_limit() {
    with_pool(async |fs, _, _| {
        fs.set_quota(ANN, Some(amount(3 * PAGE, 3))).await.unwrap();
        let one = create_file(&fs, ROOT, "one").await.unwrap();
        assert_eq!(write(&fs, one, 0, 2 * PAGE).await, Ok(2 * PAGE as u32));
        // Over what is there already, and not a page more than there is left.
        assert_eq!(write(&fs, one, PAGE, PAGE).await, Ok(PAGE as u32));
        assert_eq!(write(&fs, one, 2 * PAGE, PAGE + 1).await, Err(Errno::EDQUOT));
        assert_eq!(used(&fs, ANN).await, amount(2 * PAGE, 1));
        assert_eq!(write(&fs, one, 2 * PAGE, 1).await, Ok(1));
        let two = create_file(&fs, ROOT, "two").await.unwrap();
        assert_eq!(write(&fs, two, 0, 1).await, Err(Errno::EDQUOT));
        let longer = SetAttr { size_bytes: Some(1), ..SetAttr::default() };
        assert_eq!(fs.setattr(ann(), two, None, longer).await.err(), Some(Errno::EDQUOT));
        fs.symlink(ann(), ROOT, b"three", b"target").await.unwrap();
        assert_eq!(create_file(&fs, ROOT, "four").await.err(), Some(Errno::EDQUOT));
        // Others have no limit, and a second name is no second file.
        fs.mkdir(Caller::default(), ROOT, b"roots", 0o755).await.unwrap();
        fs.link(ann(), one, ROOT, b"again").await.unwrap();
        assert_eq!(used(&fs, ANN).await, amount(3 * PAGE, 3));
        fs.unlink(ann(), ROOT, b"one").await.unwrap();
        assert_eq!(used(&fs, ANN).await, amount(3 * PAGE, 3));
        fs.unlink(ann(), ROOT, b"again").await.unwrap();
        assert_eq!(used(&fs, ANN).await, amount(0, 2));
        assert_eq!(write(&fs, two, 0, 3 * PAGE).await, Ok(3 * PAGE as u32));
        let shorter = SetAttr { size_bytes: Some(0), ..SetAttr::default() };
        fs.setattr(ann(), two, None, shorter).await.unwrap();
        assert_eq!(used(&fs, ANN).await, amount(0, 2));
    });
}

#[test]
fn who_gets_a_file_has_to_have_room_for_it() {
    with_pool(async |fs, _, _| {
        let root = Caller::default();
        let made = fs.create(root, ROOT, b"file", 0o644, OpenFlags::WRITE).await.unwrap();
        let file = made.0.attr.inode;
        write(&fs, file, 0, 2 * PAGE).await.unwrap();
        fs.set_quota(ANN, Some(amount(PAGE, 10))).await.unwrap();
        let to_ann = SetAttr { uid: Some(7), ..SetAttr::default() };
        assert_eq!(fs.setattr(root, file, None, to_ann).await.err(), Some(Errno::EDQUOT));
        fs.set_quota(ANN, Some(amount(2 * PAGE, 10))).await.unwrap();
        fs.setattr(root, file, None, to_ann).await.unwrap();
        assert_eq!(used(&fs, ANN).await, amount(2 * PAGE, 1));
        let back = SetAttr { uid: Some(0), ..SetAttr::default() };
        fs.setattr(root, file, None, back).await.unwrap();
        assert_eq!(used(&fs, ANN).await, amount(0, 0));
    });
}

#[test]
fn a_directory_has_a_limit_for_all_that_is_below_it() {
    with_pool(async |fs, _, _| {
        let home = mkdir(&fs, ROOT, "home").await;
        let limited = QuotaSubject::Directory(home.0);
        let deep = mkdir(&fs, mkdir(&fs, home, "a").await, "b").await;
        fs.set_quota(limited, Some(amount(6 * PAGE, 6))).await.unwrap();
        assert_eq!(row(&fs, limited).await.used, amount(3 * PAGE, 3), "three directories");
        let file = create_file(&fs, deep, "file").await.unwrap();
        write(&fs, file, 0, 3 * PAGE).await.unwrap();
        assert_eq!(write(&fs, file, 3 * PAGE, 1).await, Err(Errno::EDQUOT));
        let room = fs.statfs(deep).await.unwrap();
        let unit = u64::from(room.block_size_bytes);
        assert_eq!((room.blocks * unit, room.blocks_available), (6 * PAGE, 0));
        assert_eq!((room.files, room.files_free), (6, 2));
        assert!(fs.statfs(ROOT).await.unwrap().blocks_available > 0);
        // Outside there is room, and what comes from there is refused.
        let outside = create_file(&fs, ROOT, "outside").await.unwrap();
        write(&fs, outside, 0, PAGE).await.unwrap();
        let refused = rename(&fs, (ROOT, "outside"), (deep, "inside")).await;
        assert_eq!(refused, Err(Errno::EDQUOT));
        rename(&fs, (deep, "file"), (ROOT, "file")).await.unwrap();
        assert_eq!(used(&fs, limited).await, amount(3 * PAGE, 3));
        rename(&fs, (ROOT, "outside"), (deep, "inside")).await.unwrap();
        assert_eq!(used(&fs, limited).await, amount(4 * PAGE, 4));
        // A name that another one replaces.
        let small = create_file(&fs, deep, "small").await.unwrap();
        assert_eq!(write(&fs, small, 0, PAGE).await, Ok(PAGE as u32));
        rename(&fs, (deep, "small"), (deep, "inside")).await.unwrap();
        assert_eq!(used(&fs, limited).await, amount(4 * PAGE, 4));
        // It is of the directory that the first of its names is in.
        fs.link(ann(), small, ROOT, b"link").await.unwrap();
        let with_link = used(&fs, limited).await;
        fs.unlink(ann(), deep, b"inside").await.unwrap();
        assert_eq!(used(&fs, limited).await, amount(3 * PAGE, 3));
        assert!(with_link == amount(3 * PAGE, 3) || with_link == amount(4 * PAGE, 4));
    });
}

#[test]
fn a_directory_that_is_moved_takes_what_is_below_it_along() {
    with_pool(async |fs, _, sim| {
        let home = mkdir(&fs, ROOT, "home").await;
        let limited = QuotaSubject::Directory(home.0);
        fs.set_quota(limited, Some(amount(100 * PAGE, 100))).await.unwrap();
        let moved = mkdir(&fs, ROOT, "moved").await;
        let file = create_file(&fs, moved, "file").await.unwrap();
        write(&fs, file, 0, 5 * PAGE).await.unwrap();
        assert_eq!(row(&fs, limited).await.used, amount(PAGE, 1));
        rename(&fs, (ROOT, "moved"), (home, "moved")).await.unwrap();
        let until = sim.now() + std::time::Duration::from_secs(5);
        sim.outside().sleep_until(until).await;
        assert_eq!(fs.quotas_as_kept().rows()[&limited].used, amount(7 * PAGE, 3));
        assert_eq!(used(&fs, limited).await, amount(7 * PAGE, 3));
    });
}

#[test]
fn limits_last_and_what_is_used_is_counted_again_after_a_loss_of_power() {
    with_pool(async |fs, disk, sim| {
        fs.set_quota(ANN, Some(amount(8 * PAGE, 8))).await.unwrap();
        let file = create_file(&fs, ROOT, "file").await.unwrap();
        write(&fs, file, 0, 3 * PAGE).await.unwrap();
        let handle = fs.open(ann(), file, OpenFlags::WRITE).await.unwrap().handle;
        fs.fsync(file, handle, false).await.unwrap();
        drop(fs);
        disk.crash_with(Loss::Ordered, 3);
        let disk = disk.reopen();
        let (fs, _) = PoolFs::open(sim.outside(), disk).await.unwrap();
        sim.outside().sleep_until(sim.now() + std::time::Duration::from_secs(3)).await;
        assert_eq!(used(&fs, ANN).await, amount(3 * PAGE, 1));
        let file = fs.lookup(ann(), ROOT, b"file").await.unwrap().attr.inode;
        assert_eq!(write(&fs, file, 3 * PAGE, 6 * PAGE).await, Err(Errno::EDQUOT));
        fs.set_quota(ANN, None).await.unwrap();
        write(&fs, file, 3 * PAGE, 6 * PAGE).await.unwrap();
        assert!(fs.quotas().await.unwrap().rows().is_empty());
    });
}

/// Writers that ask for all that is left at the same time.
#[test]
fn calls_at_the_same_time_do_not_exceed_a_limit_together() {
    with_pool(async |fs, disk, _| {
        fs.set_quota(ANN, Some(amount(10 * PAGE, 40))).await.unwrap();
        let mut files = Vec::new();
        for number in 0..20 {
            files.push(create_file(&fs, ROOT, &number.to_string()).await.unwrap());
        }
        disk.set_latency(1, std::time::Duration::from_millis(2));
        let fs = Arc::new(fs);
        let writes = files.into_iter().map(|file| {
            let fs = fs.clone();
            async move { write(&fs, file, 0, PAGE).await }
        });
        let done = futures_util::future::join_all(writes).await;
        assert_eq!(done.iter().filter(|done| done.is_ok()).count(), 10);
        assert_eq!(used(&fs, ANN).await, amount(10 * PAGE, 20));
    });
}

/// Neither another name nor an exchange brings more into a directory than its limit allows; what takes the place of as much does.
#[test]
fn names_do_not_get_around_a_limit() {
    with_pool(async |fs, _, _| {
        let home = mkdir(&fs, ROOT, "home").await;
        let limited = QuotaSubject::Directory(home.0);
        fs.set_quota(limited, Some(amount(5 * PAGE, 10))).await.unwrap();
        assert_eq!(row(&fs, limited).await.used, amount(PAGE, 1));
        for (parent, name, pages) in [(ROOT, "big", 5), (home, "small", 1), (home, "old", 3)] {
            let file = create_file(&fs, parent, name).await.unwrap();
            write(&fs, file, 0, pages * PAGE).await.unwrap();
        }
        let big = fs.lookup(ann(), ROOT, b"big").await.unwrap().attr.inode;
        assert_eq!(fs.link(ann(), big, home, b"big").await.err(), Some(Errno::EDQUOT));
        let exchange = RenameFlags { exchange: true, no_replace: false };
        let exchanged = fs.rename(ann(), ROOT, b"big", home, b"small", exchange).await;
        assert_eq!(exchanged, Err(Errno::EDQUOT));
        assert_eq!(rename(&fs, (ROOT, "big"), (home, "old")).await, Err(Errno::EDQUOT));
        let shorter = SetAttr { size_bytes: Some(3 * PAGE), ..SetAttr::default() };
        fs.setattr(ann(), big, None, shorter).await.unwrap();
        rename(&fs, (ROOT, "big"), (home, "old")).await.unwrap();
        assert_eq!(used(&fs, limited).await, amount(5 * PAGE, 3));
    });
}

/// Moves of directories elsewhere do not keep files from being counted.
#[test]
fn directories_that_move_all_the_time_keep_no_limit_from_being_counted() {
    with_pool(async |fs, _, sim| {
        let (one, other) = (mkdir(&fs, ROOT, "one").await, mkdir(&fs, ROOT, "other").await);
        let home = mkdir(&fs, ROOT, "home").await;
        let file = create_file(&fs, home, "file").await.unwrap();
        write(&fs, file, 0, 9 * PAGE).await.unwrap();
        mkdir(&fs, one, "moves").await;
        let limited = QuotaSubject::Directory(home.0);
        fs.set_quota(limited, Some(amount(5 * PAGE, 10))).await.unwrap();
        for _ in 0..300 {
            rename(&fs, (one, "moves"), (other, "moves")).await.unwrap();
            rename(&fs, (other, "moves"), (one, "moves")).await.unwrap();
            sim.outside().sleep_until(sim.now() + std::time::Duration::from_millis(10)).await;
        }
        assert_eq!(fs.quotas_as_kept().rows()[&limited].used, amount(10 * PAGE, 2));
        assert!(fs.quotas_as_kept().is_counted());
    });
}
