//! Many threads at once: ordinary and transparent files, commits and cleaning, beside each
//! other. Each thread reads the data it wrote, and no thread waits for ever.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use atoll_env::TokioRuntime;
use atoll_tfs::device::{Device, FaultyDevice};
use atoll_tfs::fs::{MountOptions, Tfs};
use atoll_tfs::mkfs::mkfs;
use atoll_vfs::{Errno, FileSystem, InodeNumber, OpenFlags, RenameFlags, SetAttr, Writer};
use bytes::Bytes;
use tokio::task::JoinSet;

use crate::calls::{ME, ROOT, contribution, owned, read, write};
use crate::dice::Dice;
use crate::e2fsck::assert_clean;
use crate::mkfs::options;

/// Writes, reads and removes files of its own in `parent`.
async fn work(
    tfs: Tfs,
    parent: InodeNumber,
    who: u64,
    longest: u64,
    steps: u64,
    lost: Arc<AtomicU64>,
) {
    let transparent = parent != ROOT;
    let mut dice = Dice::new(who);
    let mut files: [Option<u64>; 6] = [None; 6];
    for step in 0..steps {
        let slot = dice.below(6) as usize;
        let name = format!("w{who}f{slot}");
        match files[slot] {
            None => {
                let len = dice.below(longest) + 1;
                match write(&tfs, parent, &name, &owned(who + len, len as usize)).await {
                    Ok(_) => files[slot] = Some(len),
                    Err(Errno::ENOSPC) => match tfs.unlink(ME, parent, name.as_bytes()).await {
                        Ok(()) | Err(Errno::ENOENT) => {}
                        Err(errno) => panic!("{name}: {errno:?}"),
                    },
                    Err(errno) => panic!("{name}: {errno:?}"),
                }
            }
            Some(len) => match read(&tfs, parent, &name).await {
                Ok(bytes) => {
                    assert!(bytes == owned(who + len, len as usize), "{name} is its own");
                    if dice.one_in(2) {
                        match tfs.unlink(ME, parent, name.as_bytes()).await {
                            Ok(()) => {}
                            // Cleaned away since.
                            Err(Errno::ENOENT) => assert!(transparent, "{name}"),
                            Err(errno) => panic!("{name}: {errno:?}"),
                        }
                        files[slot] = None;
                    }
                }
                Err(Errno::ENOENT) if transparent => {
                    lost.fetch_add(1, Ordering::Relaxed);
                    files[slot] = None;
                }
                Err(errno) => panic!("{name}: {errno:?}"),
            },
        }
        match step % 40 {
            20 => tfs.sync().await.unwrap_or_else(|e| panic!("{e:?}: {:?}", tfs.failure())),
            39 if transparent => {
                let cleaned = tfs.clean();
                cleaned.unwrap_or_else(|e| panic!("{e:?}: {:?}", tfs.failure()));
            }
            _ => tokio::task::yield_now().await,
        }
    }
}

/// A new file system, mounted.
fn mounted(mib: usize) -> (FaultyDevice, Tfs) {
    let device = FaultyDevice::new(mib << 20, 1);
    mkfs(&(Arc::new(device.clone()) as Arc<dyn Device>), &options(1024)).unwrap();
    let env = Arc::new(TokioRuntime::current());
    let (tfs, _) = Tfs::mount(env, Arc::new(device.clone()), &MountOptions::default()).unwrap();
    (device, tfs)
}

/// Waits for all threads; afterwards the file system is sound.
async fn finish(workers: JoinSet<()>, tfs: &Tfs, device: &FaultyDevice, what: &str) {
    workers.join_all().await;
    assert_eq!(tfs.failure(), None);
    tfs.unmount().unwrap();
    assert_clean(&device.bytes(), what);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn threads_do_not_disturb_each_other() {
    let (device, tfs) = mounted(16);
    let parent = contribution(&tfs).await;
    let lost = Arc::new(AtomicU64::new(0));
    let mut workers = JoinSet::new();
    for who in 0..3 {
        workers.spawn(work(tfs.clone(), ROOT, who, 1_200_000, 200, lost.clone()));
        workers.spawn(work(tfs.clone(), parent, who + 100, 700_000, 200, lost.clone()));
    }
    while let Some(worker) = workers.join_next().await {
        worker.unwrap();
    }
    assert!(lost.load(Ordering::Relaxed) > 10, "ordinary data came over transparent data");
    assert_eq!(tfs.failure(), None);
    tfs.unmount().unwrap();
    assert_clean(&device.bytes(), "after many threads");
}

/// Files that live on without a name, written and read while the file system is unmounted.
async fn work_without_names(tfs: Tfs, parent: InodeNumber, who: u64) -> Result<(), Errno> {
    let mut dice = Dice::new(who);
    for n in 0..10_000 {
        let name = format!("w{who}f{n}");
        let flags = OpenFlags::READ_WRITE;
        let (entry, opened) = tfs.create(ME, parent, name.as_bytes(), 0o644, flags).await?;
        let (number, handle) = (entry.attr.inode, opened.handle);
        for step in 0..4 {
            let bytes = Bytes::from(owned(who, dice.below(30_000) as usize + 1));
            tfs.write(Writer::At(ME), number, handle, step * 20_000, bytes).await?;
            if step == 1 {
                tfs.unlink(ME, parent, name.as_bytes()).await?;
            }
        }
        tfs.close(number, handle).await?;
        tfs.forget(number, 1);
        tokio::task::yield_now().await;
    }
    Ok(())
}

/// An open file without a name was given back while it was still written to, and its new
/// blocks belonged to no file.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn what_is_unmounted_beside_calls_is_whole() {
    for round in 0..12 {
        let device = FaultyDevice::new(16 << 20, 1);
        mkfs(&(Arc::new(device.clone()) as Arc<dyn Device>), &options(1024)).unwrap();
        let env = Arc::new(TokioRuntime::current());
        let (tfs, _) = Tfs::mount(env, Arc::new(device.clone()), &MountOptions::default()).unwrap();
        let parent = contribution(&tfs).await;
        let mut workers = JoinSet::new();
        for who in 0..6 {
            let parent = if who % 3 == 0 { parent } else { ROOT };
            workers.spawn(work_without_names(tfs.clone(), parent, who));
        }
        for _ in 0..round * 40 {
            tfs.sync().await.unwrap();
            tokio::task::yield_now().await;
        }
        tfs.unmount().unwrap();
        while let Some(worker) = workers.join_next().await {
            assert_eq!(worker.unwrap(), Err(Errno::EROFS), "round {round}");
        }
        assert_eq!(tfs.failure(), None);
        tfs.unmount().unwrap();
        assert_clean(&device.bytes(), &format!("unmounted beside calls, round {round}"));
    }
}

/// Directories moved into each other, exchanged, made and removed: by any thread any of them.
async fn move_directories(tfs: Tfs, directories: Vec<InodeNumber>, who: u64) {
    let mut dice = Dice::new(who + 50);
    for _ in 0..1500 {
        let (from, to) = (*dice.pick(&directories).unwrap(), *dice.pick(&directories).unwrap());
        let name = |dice: &mut Dice| format!("d{}", dice.below(4));
        let (old, new) = (name(&mut dice), name(&mut dice));
        let (old, new) = (old.as_bytes(), new.as_bytes());
        let done = match dice.below(5) {
            0 => match tfs.mkdir(ME, from, old, 0o755).await {
                Ok(entry) => {
                    tfs.forget(entry.attr.inode, 1);
                    Ok(())
                }
                Err(errno) => Err(errno),
            },
            1 => tfs.rmdir(ME, from, old).await,
            kind => {
                let exchange = kind == 2;
                let flags = RenameFlags { exchange, ..RenameFlags::default() };
                tfs.rename(ME, from, old, to, new, flags).await
            }
        };
        let fine = [Errno::ENOENT, Errno::EEXIST, Errno::EINVAL, Errno::ENOTEMPTY, Errno::ESTALE];
        assert!(done.is_ok() || done.is_err_and(|e| fine.contains(&e)), "{done:?}");
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn directories_moved_by_many_threads_stay_a_tree() {
    let (device, tfs) = mounted(16);
    // Held for as long as they are moved, with a name or without.
    let mut directories = vec![ROOT];
    for n in 0..4 {
        let parent = directories[n / 2];
        let entry = tfs.mkdir(ME, parent, format!("d{n}").as_bytes(), 0o755).await.unwrap();
        directories.push(entry.attr.inode);
    }
    let mut workers = JoinSet::new();
    for who in 0..4 {
        workers.spawn(move_directories(tfs.clone(), directories.clone(), who));
    }
    finish(workers, &tfs, &device, "directories moved by many threads").await;
}

/// A file that always holds the same bytes, as far as it reaches: a reader sees those, or
/// zeros where it was lengthened, whatever is cut off and written meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn what_is_cut_off_beside_readers_shows_them_nothing_else() {
    const LEN: usize = 200_000;
    let (device, tfs) = mounted(16);
    let contributed = contribution(&tfs).await;
    let bytes = Arc::new(owned(5, LEN));
    let mut workers = JoinSet::new();
    for (who, parent) in [(0, ROOT), (1, contributed)] {
        let flags = OpenFlags::READ_WRITE;
        let (entry, opened) = tfs.create(ME, parent, b"file", 0o644, flags).await.unwrap();
        let (number, handle) = (entry.attr.inode, opened.handle);
        let (writer, wanted) = (tfs.clone(), bytes.clone());
        workers.spawn(async move {
            let mut dice = Dice::new(who);
            for _ in 0..150 {
                let at = dice.below(LEN as u64) as usize;
                let end = (at + dice.below(60_000) as usize).min(LEN);
                let part = Bytes::copy_from_slice(&wanted[at..end]);
                writer.write(Writer::At(ME), number, handle, at as u64, part).await.unwrap();
                let size = Some(dice.below(LEN as u64));
                let changes = SetAttr { size_bytes: size, ..SetAttr::default() };
                writer.setattr(ME, number, None, changes).await.unwrap();
                tokio::task::yield_now().await;
            }
        });
        let (filler, other) = (tfs.clone(), owned(77, 50_000));
        workers.spawn(async move {
            // Blocks that were cut off are given to others at once.
            for n in 0..60 {
                let name = format!("w{who}n{n}");
                write(&filler, ROOT, &name, &other).await.unwrap();
                filler.sync().await.unwrap();
                filler.unlink(ME, ROOT, name.as_bytes()).await.unwrap();
            }
        });
        let (reader, wanted) = (tfs.clone(), bytes.clone());
        workers.spawn(async move {
            let mut dice = Dice::new(who + 9);
            for _ in 0..600 {
                let at = dice.below(LEN as u64);
                let read = reader.read(number, handle, at, 30_000).await.unwrap();
                for (i, byte) in read.iter().enumerate() {
                    let wanted = wanted[at as usize + i];
                    assert!(*byte == wanted || *byte == 0, "{who}: byte {}", at as usize + i);
                }
                tokio::task::yield_now().await;
            }
        });
    }
    finish(workers, &tfs, &device, "cut off beside readers").await;
}

/// The second to open a file was let in while the first still compared its blocks.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn whoever_opens_a_lost_file_at_the_same_time_is_told() {
    const FILES: u64 = 12;
    let device = FaultyDevice::new(32 << 20, 1);
    mkfs(&(Arc::new(device.clone()) as Arc<dyn Device>), &options(1024)).unwrap();
    let mount = |device: &FaultyDevice| {
        let env = Arc::new(TokioRuntime::current());
        let quiet = MountOptions { background: false, ..MountOptions::default() };
        Tfs::mount(env, Arc::new(device.clone()), &quiet).unwrap().0
    };
    let tfs = mount(&device);
    let parent = contribution(&tfs).await;
    let mut last = Vec::new();
    for n in 0..FILES {
        let number = write(&tfs, parent, &format!("t{n}"), &owned(n, 900_000)).await.unwrap();
        let extents = tfs.file_extents(number).unwrap();
        let end = extents.last().unwrap();
        last.push(end.start + end.len - 1);
    }
    tfs.sync().await.unwrap();
    drop(tfs);
    device.power_cycle();
    for block in last {
        device.write_at(u64::from(block) * 1024, &[3; 1024]).unwrap();
    }
    let tfs = mount(&device);
    for n in 0..FILES {
        let name = format!("t{n}");
        let number = tfs.lookup(ME, parent, name.as_bytes()).await.unwrap().attr.inode;
        let mut openers = JoinSet::new();
        for _ in 0..4 {
            let tfs = tfs.clone();
            openers.spawn(async move { tfs.open(ME, number, OpenFlags::READ).await.map(|_| ()) });
        }
        while let Some(opened) = openers.join_next().await {
            let opened = opened.unwrap();
            assert!(matches!(opened, Err(Errno::ENOENT | Errno::ESTALE)), "{name}: {opened:?}");
        }
        tfs.forget(number, 1);
    }
    assert_eq!(tfs.failure(), None);
    tfs.unmount().unwrap();
    assert_clean(&device.bytes(), "opened by many when they were lost");
}

/// A device that takes its time to sync, as disks do: calls go on meanwhile.
#[derive(Debug)]
struct SlowToSync(FaultyDevice);

impl Device for SlowToSync {
    fn len_bytes(&self) -> u64 {
        self.0.len_bytes()
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> std::io::Result<()> {
        self.0.read_at(offset, buffer)
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> std::io::Result<()> {
        self.0.write_at(offset, data)
    }

    #[allow(clippy::disallowed_methods)]
    fn sync(&self) -> std::io::Result<()> {
        std::thread::sleep(std::time::Duration::from_millis(3));
        self.0.sync()
    }
}

/// Blocks that were freed are given out after the next commit. One call waited for one commit, and
/// was told that the disk was full when others had taken what that set free and freed as much
/// again.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_disk_that_is_never_full_never_says_so() {
    const WORKERS: u64 = 6;
    const ROUNDS: u64 = 60;
    let device = FaultyDevice::new(16 << 20, 1);
    mkfs(&(Arc::new(device.clone()) as Arc<dyn Device>), &options(1024)).unwrap();
    let env = Arc::new(TokioRuntime::current());
    let slow = Arc::new(SlowToSync(device.clone()));
    let (tfs, _) = Tfs::mount(env, slow, &MountOptions::default()).unwrap();
    // Together they leave a tenth free.
    let share = tfs.usage().unwrap().free_blocks * 1024 * 9 / 10 / WORKERS;
    let mut workers = JoinSet::new();
    for who in 0..WORKERS {
        let tfs = tfs.clone();
        workers.spawn(async move {
            let flags = OpenFlags::READ_WRITE;
            let name = format!("w{who}");
            let (entry, opened) =
                tfs.create(ME, ROOT, name.as_bytes(), 0o644, flags).await.unwrap();
            let (number, handle) = (entry.attr.inode, opened.handle);
            // Less than a share, for the directory and indirect blocks.
            let len = share - (share >> 4);
            let data = Bytes::from(vec![who as u8; len as usize]);
            let empty = SetAttr { size_bytes: Some(0), ..SetAttr::default() };
            for round in 0..ROUNDS {
                tfs.setattr(ME, number, None, empty).await.unwrap();
                let what = format!("worker {who}, round {round}");
                if who % 2 == 0 {
                    let reserved = tfs.fallocate(ME, number, handle, 0, len, 0).await;
                    assert_eq!(reserved, Ok(()), "{what}");
                } else {
                    let written = tfs.write(Writer::At(ME), number, handle, 0, data.clone()).await;
                    assert_eq!(written, Ok(len as u32), "{what}");
                }
                tokio::task::yield_now().await;
            }
        });
    }
    finish(workers, &tfs, &device, "files emptied and filled by many threads").await;
}
