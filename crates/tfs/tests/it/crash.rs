//! Power cuts at every kind of moment: the file system is whole afterwards, and holds what was
//! synced.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use atoll_env::TokioRuntime;
use atoll_tfs::device::{Device, FaultyDevice};
use atoll_tfs::fs::{MountOptions, Tfs};
use atoll_tfs::mkfs::mkfs;
use atoll_vfs::{
    Errno, FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, FileKind, FileSystem, InodeNumber, OpenFlags,
    RenameFlags, SetAttr, Writer,
};
use bytes::Bytes;

use crate::calls::ME;
use crate::dice::Dice;
use crate::e2fsck::assert_clean;
use crate::mkfs::options;
use crate::recorder::{Playback, Recorder};

/// What files hold, by name; contents identify file and write.
type Model = BTreeMap<Vec<u8>, Vec<u8>>;

async fn write_file(tfs: &Tfs, name: &[u8], at: u64, bytes: &[u8]) -> Result<(), Errno> {
    let (entry, opened) = tfs.create(ME, InodeNumber::ROOT, name, 0o644, OpenFlags::WRITE).await?;
    let number = entry.attr.inode;
    let written =
        tfs.write(Writer::At(ME), number, opened.handle, at, Bytes::copy_from_slice(bytes)).await;
    tfs.close(number, opened.handle).await?;
    tfs.forget(number, 1);
    if written? as usize == bytes.len() { Ok(()) } else { Err(Errno::ENOSPC) }
}

/// One step of the workload; the model follows if it succeeds, and what may have changed is
/// noted before.
async fn step(
    tfs: &Tfs,
    model: &mut Model,
    touched: &mut BTreeSet<Vec<u8>>,
    dice: &mut Dice,
    number: u64,
) -> Result<(), Errno> {
    let name = format!("file{}", dice.below(12)).into_bytes();
    touched.insert(name.clone());
    match dice.below(10) {
        0..=4 => {
            let at = dice.below(60_000);
            let bytes = vec![(number % 250 + 1) as u8; dice.below(40_000) as usize + 1];
            write_file(tfs, &name, at, &bytes).await?;
            let file = model.entry(name).or_default();
            let end = at as usize + bytes.len();
            file.resize(file.len().max(end), 0);
            file[at as usize..end].copy_from_slice(&bytes);
        }
        5..=6 => {
            match tfs.unlink(ME, InodeNumber::ROOT, &name).await {
                Err(Errno::ENOENT) => assert!(!model.contains_key(&name)),
                other => other?,
            }
            model.remove(&name);
        }
        7 => {
            let to = format!("file{}", dice.below(12)).into_bytes();
            touched.insert(to.clone());
            let root = InodeNumber::ROOT;
            match tfs.rename(ME, root, &name, root, &to, RenameFlags::default()).await {
                Err(Errno::ENOENT) => assert!(!model.contains_key(&name)),
                other => {
                    other?;
                    let file = model.remove(&name).expect("it could be renamed");
                    model.insert(to, file);
                }
            }
        }
        8 => {
            let Some(file) = model.get_mut(&name) else { return Ok(()) };
            let entry = tfs.lookup(ME, InodeNumber::ROOT, &name).await?;
            let size = dice.below(70_000);
            if dice.one_in(2) {
                let (number, mode) = (entry.attr.inode, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE);
                let handle = tfs.open(ME, number, OpenFlags::WRITE).await?.handle;
                tfs.fallocate(ME, number, handle, size, 20_000, mode).await?;
                tfs.close(number, handle).await?;
                tfs.forget(number, 1);
                let end = file.len().min(size as usize + 20_000);
                file[end.min(size as usize)..end].fill(0);
                return Ok(());
            }
            let changes = SetAttr { size_bytes: Some(size), ..SetAttr::default() };
            tfs.setattr(ME, entry.attr.inode, None, changes).await?;
            tfs.forget(entry.attr.inode, 1);
            file.resize(size as usize, 0);
        }
        _ => {
            let directory = format!("directory{number}").into_bytes();
            let entry = tfs.mkdir(ME, InodeNumber::ROOT, &directory, 0o755).await?;
            tfs.forget(entry.attr.inode, 1);
            tfs.rmdir(ME, InodeNumber::ROOT, &directory).await?;
        }
    }
    Ok(())
}

async fn contents(tfs: &Tfs) -> Result<Model, Errno> {
    let mut model = Model::new();
    let root = tfs.opendir(ME, InodeNumber::ROOT).await?.handle;
    let mut cookie = 0;
    loop {
        let listed = tfs.readdir(InodeNumber::ROOT, root, cookie, 100, true).await?;
        let Some(last) = listed.last() else { break };
        cookie = last.cookie;
        for entry in listed {
            let number = entry.entry.expect("asked for").attr.inode;
            if entry.kind == FileKind::Regular {
                let handle = tfs.open(ME, number, OpenFlags::READ).await?.handle;
                let bytes = tfs.read(number, handle, 0, 1 << 20).await?;
                tfs.close(number, handle).await?;
                model.insert(entry.name.to_vec(), bytes.to_vec());
            }
            tfs.forget(number, 1);
        }
    }
    tfs.closedir(InodeNumber::ROOT, root).await?;
    Ok(model)
}

fn mount_on(device: Arc<dyn Device>) -> Tfs {
    let env = Arc::new(TokioRuntime::current());
    let options = MountOptions { background: false, ..MountOptions::default() };
    Tfs::mount(env, device, &options).unwrap().0
}

fn mount(device: &FaultyDevice) -> Tfs {
    mount_on(Arc::new(device.clone()))
}

/// What a recorded run did, by the operations that the device had seen then.
enum Event {
    /// A call begins that changes these names or what they stand for.
    Touched(BTreeSet<Vec<u8>>),
    /// All that was done is durable.
    Synced(Model),
}

/// Runs the workload to its end.
async fn run(device: &Recorder, seed: u64, steps: u64) -> Vec<(usize, Event)> {
    let tfs = mount_on(Arc::new(device.clone()));
    let mut dice = Dice::new(seed);
    let mut model = Model::new();
    let mut events = Vec::new();
    for number in 0..steps {
        let before = device.count();
        let mut touched = BTreeSet::new();
        step(&tfs, &mut model, &mut touched, &mut dice, number).await.unwrap();
        events.push((before, Event::Touched(touched)));
        if number % 5 == 4 {
            tfs.sync().await.unwrap();
            events.push((device.count(), Event::Synced(model.clone())));
        }
    }
    tfs.unmount().unwrap();
    events.push((device.count(), Event::Synced(model)));
    events
}

/// What was synced when the device had seen `at` operations, and the names that calls may
/// have changed since.
fn state_at(events: &[(usize, Event)], at: usize) -> (Model, BTreeSet<Vec<u8>>) {
    let (mut synced, mut touched) = (Model::new(), BTreeSet::new());
    for (_, event) in events.iter().filter(|(when, _)| *when <= at) {
        match event {
            Event::Touched(names) => touched.extend(names.iter().cloned()),
            Event::Synced(model) => {
                synced = model.clone();
                touched.clear();
            }
        }
    }
    (synced, touched)
}

fn blank() -> Vec<u8> {
    let device = FaultyDevice::new(4 << 20, 1);
    mkfs(&(Arc::new(device.clone()) as Arc<dyn Device>), &options(1024)).unwrap();
    device.bytes()
}

#[tokio::test]
async fn after_a_power_cut_the_file_system_is_whole_and_holds_what_was_synced() {
    let image = blank();
    let recorder = Recorder::of(image.clone());
    let events = run(&recorder, 7, 100).await;
    let operations = recorder.operations();
    assert!(operations.len() > 300, "{}", operations.len());
    let mut playback = Playback::of(image);
    let mut dice = Dice::new(11);
    for (at, operation) in operations.iter().enumerate() {
        playback.play(operation);
        let remains = Arc::new(playback.crashed(&mut dice));
        let tfs = mount_on(remains.clone());
        let found = contents(&tfs).await.unwrap();
        let (synced, touched) = state_at(&events, at + 1);
        // Between the last commit and the cut a file may be either, or on the way: its blocks
        // are written in place.
        for (name, bytes) in synced.iter().filter(|(name, _)| !touched.contains(*name)) {
            let name_text = String::from_utf8_lossy(name);
            assert!(found.get(name) == Some(bytes), "{name_text} after a cut at {at}");
        }
        for name in found.keys() {
            let known = synced.contains_key(name) || touched.contains(name);
            assert!(known, "{} after a cut at {at}", String::from_utf8_lossy(name));
        }
        // e2fsck takes its time: now and then.
        if at % 16 == 0 {
            tfs.unmount().unwrap();
            assert_clean(&remains.bytes(), &format!("power cut at {at}"));
        }
    }
}

#[tokio::test]
async fn a_device_that_fails_ends_all_changes_and_loses_nothing_synced() {
    let device = FaultyDevice::holding(blank(), 3);
    let tfs = mount(&device);
    write_file(&tfs, b"kept", 0, b"kept").await.unwrap();
    tfs.sync().await.unwrap();
    write_file(&tfs, b"lost", 0, b"lost").await.unwrap();
    device.fail_writes(true);
    assert_eq!(tfs.sync().await, Err(Errno::EIO));
    device.fail_writes(false);
    assert!(tfs.failure().is_some());
    assert_eq!(write_file(&tfs, b"more", 0, b"more").await, Err(Errno::EROFS));
    assert_eq!(tfs.sync().await, Err(Errno::EIO));
    assert!(contents(&tfs).await.unwrap().contains_key(&b"kept"[..]), "reads go on");
    drop(tfs);
    device.power_cycle();
    let found = contents(&mount(&device)).await.unwrap();
    assert_eq!(found.get(&b"kept"[..]), Some(&b"kept".to_vec()));
}

/// The power goes again while what the first cut left is made whole.
#[tokio::test]
async fn a_power_cut_while_the_journal_is_brought_home_loses_nothing() {
    let image = blank();
    let recorder = Recorder::of(image.clone());
    let events = run(&recorder, 9, 60).await;
    let mut playback = Playback::of(image);
    let mut dice = Dice::new(12);
    let mut recoveries = 0;
    for (at, operation) in recorder.operations().iter().enumerate() {
        playback.play(operation);
        if at % 20 != 7 {
            continue;
        }
        let remains = playback.crashed(&mut dice).bytes();
        let again = Recorder::of(remains.clone());
        drop(mount_on(Arc::new(again.clone())));
        let mut second = Playback::of(remains);
        let (synced, touched) = state_at(&events, at + 1);
        for operation in again.operations() {
            second.play(&operation);
            let tfs = mount_on(Arc::new(second.crashed(&mut dice)));
            let found = contents(&tfs).await.unwrap();
            for (name, bytes) in synced.iter().filter(|(name, _)| !touched.contains(*name)) {
                let name_text = String::from_utf8_lossy(name);
                assert!(found.get(name) == Some(bytes), "{name_text} after cuts at {at}");
            }
            recoveries += 1;
        }
    }
    assert!(recoveries > 100, "{recoveries}");
}

/// A device that cannot be read now and then.
#[derive(Debug)]
struct Flaky {
    device: FaultyDevice,
    dice: Mutex<Dice>,
    one_in: AtomicU64,
}

impl Device for Flaky {
    fn len_bytes(&self) -> u64 {
        self.device.len_bytes()
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let one_in = self.one_in.load(Ordering::Relaxed);
        if one_in > 0 && self.dice.lock().unwrap().one_in(one_in) {
            return Err(io::Error::other("cannot be read"));
        }
        self.device.read_at(offset, buffer)
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.device.write_at(offset, data)
    }

    fn sync(&self) -> io::Result<()> {
        self.device.sync()
    }
}

async fn rename_some(tfs: &Tfs, dice: &mut Dice) -> Result<(), Errno> {
    let name = |n: u64| format!("file{n}").into_bytes();
    let (old, new) = (name(dice.below(12)), name(dice.below(12)));
    let root = InodeNumber::ROOT;
    tfs.rename(ME, root, &old, root, &new, RenameFlags::default()).await
}

/// A read that fails in the middle of a call: the call fails, and what it had done by then is
/// not committed.
#[tokio::test]
async fn reads_that_fail_leave_no_half_of_a_call() {
    let mut broken = 0;
    for seed in 0..40 {
        let device = FaultyDevice::holding(blank(), seed);
        let flaky = Arc::new(Flaky {
            device: device.clone(),
            dice: Mutex::new(Dice::new(seed)),
            one_in: AtomicU64::new(0),
        });
        let env = Arc::new(TokioRuntime::current());
        // Next to no memory, so that metadata is read again and again.
        let options = MountOptions { background: false, cache_bytes: 1, ..MountOptions::default() };
        let (tfs, _) = Tfs::mount(env, flaky.clone(), &options).unwrap();
        flaky.one_in.store(4, Ordering::Relaxed);
        let mut dice = Dice::new(seed + 100);
        // The contents of files are not followed: a call that fails may have done some of it.
        for number in 0..120 {
            let name = format!("file{}", dice.below(12)).into_bytes();
            let bytes = vec![1; dice.below(40_000) as usize + 1];
            let done = match dice.below(4) {
                0 => tfs.unlink(ME, InodeNumber::ROOT, &name).await,
                1 => rename_some(&tfs, &mut dice).await,
                _ => write_file(&tfs, &name, dice.below(60_000), &bytes).await,
            };
            if tfs.failure().is_some() {
                broken += 1;
                assert!(done.is_err());
                break;
            }
            if number % 10 == 9 && tfs.sync().await.is_err() {
                break;
            }
        }
        flaky.one_in.store(0, Ordering::Relaxed);
        drop(tfs);
        let tfs = mount(&device);
        contents(&tfs).await.unwrap();
        tfs.unmount().unwrap();
        assert_clean(&device.bytes(), &format!("reads failed, seed {seed}"));
    }
    assert!(broken > 10, "{broken} calls broke off in the middle");
}
