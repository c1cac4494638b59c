//! Restarts of the server, which may lose power.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_env::Env;
use atoll_pool::remote::RemoteFs;
use atoll_vfs::{
    Errno, FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, FileKind, FileSystem, FileTime, Handle,
    InodeNumber, OpenFlags, SetAttr, SetTime, Writer,
};
use bytes::Bytes;
use futures_util::future::join_all;

use super::network::{FaultyRoute, LATEST, change_once, check_lines};
use super::{Behind, Dice, ROOT, Seed, World, file, lines, me, read_all, seeds, until_answered};

/// A client's file, and what it should hold.
struct OwnFile {
    fs: Arc<RemoteFs>,
    inode: InodeNumber,
    handle: Handle,
    model: Vec<u8>,
    dice: Dice,
    env: Env,
    /// So many appends had no answer.
    unanswered: u64,
}

impl OwnFile {
    fn bytes(&mut self, len: usize) -> Vec<u8> {
        let first = self.dice.below(256) as u8;
        (0..len).map(|at| first.wrapping_add(at as u8)).collect()
    }

    async fn step(&mut self) {
        let (fs, inode, handle) = (self.fs.clone(), self.inode, self.handle);
        match self.dice.below(12) {
            0..=3 => {
                let offset = self.dice.below(100_000);
                let len = 1 + self.dice.below(20_000) as usize;
                let data = self.bytes(len);
                let bytes = Bytes::from(data.clone());
                let write = || fs.write(Writer::At(me()), inode, handle, offset, bytes.clone());
                assert_eq!(until_answered(write).await as usize, len);
                let end = offset as usize + len;
                if self.model.len() < end {
                    self.model.resize(end, 0);
                }
                self.model[offset as usize..end].copy_from_slice(&data);
            }
            4..=6 => {
                let len = 1 + self.dice.below(3000) as usize;
                let data = self.bytes(len);
                let bytes = Bytes::from(data.clone());
                match fs.write(Writer::AtEnd(me()), inode, handle, 0, bytes).await {
                    Ok(written) => {
                        assert_eq!(written as usize, len);
                        self.model.extend_from_slice(&data);
                    }
                    Err(Errno::EIO) => self.cut_off_append().await,
                    Err(errno) => panic!("append: {errno}"),
                }
            }
            7 | 8 => {
                let len = self.dice.below(120_000);
                let size_bytes = Some(len);
                let changes = SetAttr { size_bytes, ..SetAttr::default() };
                until_answered(|| fs.setattr(me(), inode, None, changes)).await;
                self.model.resize(len as usize, 0);
            }
            9 => {
                let (offset, len) = (self.dice.below(100_000), 1 + self.dice.below(30_000));
                let mode = FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE;
                until_answered(|| fs.fallocate(me(), inode, handle, offset, len, mode)).await;
                let end = self.model.len().min((offset + len) as usize);
                let start = end.min(offset as usize);
                self.model[start..end].fill(0);
            }
            10 => until_answered(|| fs.fsync(inode, handle, false)).await,
            _ => self.check().await,
        }
    }

    /// The time of an append was over before all was sent again that the server had lost, or before an answer came: it was made, or
    /// not, or will be when its message comes late.
    async fn cut_off_append(&mut self) {
        self.unanswered += 1;
        atoll_env::sleep(&*self.env, LATEST).await;
        let size_bytes = Some(self.model.len() as u64);
        let changes = SetAttr { size_bytes, ..SetAttr::default() };
        until_answered(|| self.fs.setattr(me(), self.inode, None, changes)).await;
    }

    async fn check(&self) {
        let now = read_all(&*self.fs, self.inode, self.handle).await;
        self.compare(&now);
        let attr = until_answered(|| self.fs.getattr(self.inode, None)).await.attr;
        assert_eq!(attr.size_bytes, self.model.len() as u64);
    }

    fn compare(&self, now: &[u8]) {
        assert_eq!(now.len(), self.model.len(), "length of file {:?}", self.inode);
        if let Some(at) = (0..now.len()).find(|at| now[*at] != self.model[*at]) {
            panic!("byte {at} of file {:?} is another one", self.inode);
        }
    }
}

/// Work of a client on files of its own, while the server ends again and again.
fn survive_restarts(seed: u64, percent: u64, loses_power: bool) {
    let _seed = Seed(seed);
    let world = World::new(seed, Behind::Pool(1));
    world.block_on(async {
        world.start(None).await;
        let route = FaultyRoute::new(&world, seed, percent);
        let fs = world.mount_over(route).await;
        let mut files = Vec::new();
        for number in 0..3 {
            let path = format!("file-{number}");
            let inode = {
                let served = world.served().fs;
                let (inode, handle) = file(&*served, &path).await;
                served.close(inode, handle).await.unwrap();
                inode
            };
            let handle =
                until_answered(|| fs.open(me(), inode, OpenFlags::READ_WRITE)).await.handle;
            let (fs, dice) = (fs.clone(), Dice(seed * 10 + number));
            let (env, unanswered) = (world.sim.outside(), 0);
            files.push(OwnFile { fs, inode, handle, model: Vec::new(), dice, env, unanswered });
        }
        // Names are another matter.
        world.served().fs.sync().await.unwrap();
        let done = Arc::new(Mutex::new(false));
        let restarts = async {
            let mut dice = Dice(seed ^ 0xdead);
            while !*done.lock().unwrap() {
                world.pause(dice.millis(400 + 300 * percent)).await;
                let power = (loses_power && dice.below(2) == 0).then(|| dice.below(1000));
                world.restart(power, dice.millis(3000)).await;
            }
        };
        let work = async {
            let pause = |time| world.pause(time);
            let steps = files.iter_mut().map(|file| async move {
                for _ in 0..60 {
                    file.step().await;
                    // A few steps between each two restarts.
                    pause(file.dice.millis(60)).await;
                }
            });
            join_all(steps).await;
            for file in &files {
                until_answered(|| fs.fsync(file.inode, file.handle, false)).await;
            }
            *done.lock().unwrap() = true;
        };
        futures_util::future::join(work, restarts).await;
        let unanswered: u64 = files.iter().map(|file| file.unanswered).sum();
        // A server that is gone again before it was sent everything does not answer.
        assert!(unanswered <= percent / 5, "{unanswered} appends have no answer");
        // What was synced survives the loss of power without its client.
        drop(fs);
        for file in &mut files {
            file.fs = world.mount().await;
        }
        world.restart(Some(7), Duration::ZERO).await;
        for file in &files {
            let served = world.served().fs;
            let handle = served.open(me(), file.inode, OpenFlags::READ).await.unwrap().handle;
            file.compare(&read_all(&*served, file.inode, handle).await);
            served.close(file.inode, handle).await.unwrap();
        }
    });
}

#[test]
fn a_client_goes_on_over_restarts_of_the_server() {
    seeds(8).for_each(|seed| survive_restarts(seed, 0, false));
}

#[test]
fn answered_bytes_survive_the_servers_loss_of_power() {
    seeds(8).for_each(|seed| survive_restarts(seed, 0, true));
}

#[test]
fn answered_bytes_survive_loss_of_power_and_a_faulty_network() {
    seeds(8).for_each(|seed| survive_restarts(seed, 20, true));
}

/// Clients change names and append, while the server ends again and again. Every call is answered: each change is made once.
fn change_over_restarts(seed: u64, percent: u64, loses_power: bool) {
    let _seed = Seed(seed);
    let world = World::new(seed, Behind::Pool((seed % 3) as u8));
    world.block_on(async {
        world.start(None).await;
        let shared = {
            let served = world.served().fs;
            let (inode, handle) = file(&*served, "shared").await;
            served.close(inode, handle).await.unwrap();
            served.sync().await.unwrap();
            inode
        };
        let mut clients = Vec::new();
        // Bytes that one client sends again may replace those of another.
        let count = if loses_power { 1 } else { 2 };
        for number in 0..count {
            let route = FaultyRoute::new(&world, 2 * seed + number, percent);
            clients.push(world.mount_over(route).await);
        }
        let done = Arc::new(Mutex::new(false));
        let restarts = async {
            let mut dice = Dice(seed ^ 0xbeef);
            while !*done.lock().unwrap() {
                world.pause(dice.millis(1500)).await;
                let power = (loses_power && dice.below(2) == 0).then(|| dice.below(1000));
                world.restart(power, dice.millis(2000)).await;
            }
        };
        let work = async {
            let work = (0..4).map(|worker| {
                let (fs, dice) =
                    (clients[worker as usize % clients.len()].clone(), Dice(seed * 100 + worker));
                change_once(fs, worker, dice, shared)
            });
            let all = join_all(work).await;
            *done.lock().unwrap() = true;
            all
        };
        let (all, ()) = futures_util::future::join(work, restarts).await;
        world.pause(Duration::from_secs(60)).await;
        check_lines(&lines(&*world.served().fs, shared).await, &all);
        let unanswered: u64 = all.iter().map(|changed| changed.unanswered).sum();
        // A network that fails a call seven times does not answer it.
        assert!(unanswered <= percent, "{unanswered} calls may have been made or not");
    });
}

#[test]
fn changes_are_made_once_over_restarts() {
    seeds(8).for_each(|seed| change_over_restarts(seed, 0, false));
}

#[test]
fn changes_are_made_once_over_restarts_and_a_faulty_network() {
    seeds(8).for_each(|seed| change_over_restarts(seed, 15, false));
}

#[test]
fn changes_are_made_once_over_losses_of_power() {
    seeds(8).for_each(|seed| change_over_restarts(seed, 0, true));
}

#[test]
fn a_file_that_was_removed_while_open_is_stale_after_a_restart_and_others_are_not() {
    let world = World::new(1, Behind::Pool(1));
    world.block_on(async {
        world.start(None).await;
        let fs = world.mount().await;
        let (removed, of_removed) = file(&*fs, "removed").await;
        let (kept, of_kept) = file(&*fs, "kept").await;
        let line = Bytes::from_static(b"text");
        for (inode, handle) in [(removed, of_removed), (kept, of_kept)] {
            fs.write(Writer::At(me()), inode, handle, 0, line.clone()).await.unwrap();
        }
        fs.unlink(me(), ROOT, b"removed").await.unwrap();
        assert_eq!(fs.read(removed, of_removed, 0, 10).await, Ok(line.clone()));
        world.restart(None, Duration::from_secs(1)).await;
        assert_eq!(fs.read(removed, of_removed, 0, 10).await, Err(Errno::ESTALE));
        assert_eq!(fs.read(kept, of_kept, 0, 10).await, Ok(line));
        assert_eq!(fs.close(removed, of_removed).await, Ok(()));
        assert_eq!(fs.close(kept, of_kept).await, Ok(()));
        assert_eq!(fs.read(kept, of_kept, 0, 10).await, Err(Errno::EBADF));
    });
    world.check_ended();
}

#[test]
fn a_half_read_directory_goes_on_after_a_restart() {
    for (seed, behind) in [(1, Behind::Memory), (2, Behind::Pool(0)), (3, Behind::Pool(1))] {
        let world = World::new(seed, behind);
        world.block_on(async {
            world.start(None).await;
            let fs = world.mount().await;
            let name = |number: u32| format!("name-{number:05}");
            for number in 0..1500 {
                let name = name(number).into_bytes();
                let made = fs.mknod(me(), ROOT, &name, FileKind::Regular, 0o644, 0).await;
                fs.forget(made.unwrap().attr.inode, 1);
            }
            let handle = fs.opendir(me(), ROOT).await.unwrap().handle;
            let mut listed = Vec::new();
            let mut cookie = 0;
            for round in 0.. {
                let piece = fs.readdir(ROOT, handle, cookie, 301, round % 2 == 0).await.unwrap();
                let Some(last) = piece.last() else { break };
                cookie = last.cookie;
                for entry in piece {
                    entry.entry.into_iter().for_each(|found| fs.forget(found.attr.inode, 1));
                    listed.push(String::from_utf8(entry.name.to_vec()).unwrap());
                }
                if round == 1 || round == 2 {
                    fs.unlink(me(), ROOT, name(round * 7).as_bytes()).await.unwrap();
                    world.restart(None, Duration::from_secs(1)).await;
                }
            }
            let mut sorted = listed.clone();
            sorted.sort();
            sorted.dedup();
            assert_eq!(sorted.len(), listed.len(), "a name twice");
            // Those that were removed had been listed before.
            assert_eq!(sorted.len(), 1500, "a name is missing");
            fs.closedir(ROOT, handle).await.unwrap();
        });
        world.check_ended();
    }
}

#[test]
fn times_that_were_set_after_a_write_stay_when_bytes_are_sent_again() {
    for seed in seeds(8) {
        let _seed = Seed(seed);
        let world = World::new(seed, Behind::Pool(1));
        world.block_on(async {
            world.start(None).await;
            let fs = world.mount().await;
            let (inode, handle) = file(&*fs, "copied").await;
            fs.sync().await.unwrap();
            fs.write(Writer::At(me()), inode, handle, 0, vec![7; 100].into()).await.unwrap();
            let mtime = FileTime { secs: 1_000_000, nanos: 5 };
            let changes = SetAttr { mtime: Some(SetTime::To(mtime)), ..SetAttr::default() };
            fs.setattr(me(), inode, None, changes).await.unwrap();
            world.restart(Some(seed), Duration::ZERO).await;
            // A name that is looked up shows the bytes, too.
            let found = fs.lookup(me(), ROOT, b"copied").await.unwrap();
            assert_eq!((found.attr.size_bytes, found.attr.mtime), (100, mtime));
            fs.fsync(inode, handle, false).await.unwrap();
            let attr = fs.getattr(inode, None).await.unwrap().attr;
            assert_eq!((attr.size_bytes, attr.mtime), (100, mtime));
        });
    }
}

#[test]
fn bytes_that_cannot_be_sent_again_are_said_once() {
    let world = World::new(1, Behind::Pool(1));
    world.block_on(async {
        world.start(None).await;
        let fs = world.mount().await;
        let (inode, handle) = file(&*fs, "lost").await;
        fs.sync().await.unwrap();
        let data = Bytes::from(vec![7; 500_000]);
        fs.write(Writer::At(me()), inode, handle, 0, data).await.unwrap();
        world.restart(Some(3), Duration::ZERO).await;
        let full = world.served().disk;
        full.fail_after(0, Errno::ENOSPC);
        // The call that finds it out is answered all the same.
        let attr = fs.getattr(inode, None).await;
        assert!(attr.is_ok() || full.faults_left() == 0, "{attr:?}");
        let synced = [fs.fsync(inode, handle, false).await, fs.fsync(inode, handle, false).await];
        assert_eq!(synced, [Err(Errno::EIO), Ok(())]);
        assert_eq!(fs.flush(inode, handle).await, Ok(()));
    });
}

#[test]
fn much_that_is_unstable_is_made_durable_by_the_client() {
    let world = World::new(1, Behind::Pool(1));
    world.block_on(async {
        world.start(None).await;
        let fs = world.mount().await;
        let (inode, handle) = file(&*fs, "large").await;
        fs.sync().await.unwrap();
        for number in 0..70u64 {
            let data = Bytes::from(vec![number as u8; 1 << 20]);
            let offset = number << 20;
            let written = fs.write(Writer::At(me()), inode, handle, offset, data).await;
            assert_eq!(written, Ok(1 << 20));
        }
        // The disk has those of which the client keeps none.
        let synced = world.served().disk;
        drop(fs);
        world.pause(Duration::from_secs(1)).await;
        drop(synced);
        world.restart(Some(1), Duration::ZERO).await;
        let served = world.served().fs;
        let size = served.getattr(inode, None).await.unwrap().attr.size_bytes;
        assert!(size > 60 << 20, "{size}");
    });
}

#[test]
fn what_is_unstable_for_long_is_made_durable_by_the_client() {
    let world = World::new(1, Behind::Pool(1));
    world.block_on(async {
        world.start(None).await;
        let fs = world.mount().await;
        let (inode, handle) = file(&*fs, "old").await;
        fs.sync().await.unwrap();
        fs.write(Writer::At(me()), inode, handle, 0, vec![7; 100].into()).await.unwrap();
        fs.close(inode, handle).await.unwrap();
        world.pause(Duration::from_secs(40)).await;
        world.sim.crash(world.client);
        drop(fs);
        world.restart(Some(1), Duration::ZERO).await;
        let served = world.served().fs;
        assert_eq!(served.getattr(inode, None).await.unwrap().attr.size_bytes, 100);
    });
}
