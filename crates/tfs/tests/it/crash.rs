//! Power cuts at every kind of moment: the file system is whole afterwards, and holds what was
//! synced.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use atoll_env::TokioRuntime;
use atoll_tfs::device::{Device, FaultyDevice};
use atoll_tfs::fs::{MountOptions, Tfs};
use atoll_tfs::mkfs::mkfs;
use atoll_vfs::{
    Caller, Errno, FileKind, FileSystem, InodeNumber, OpenFlags, RenameFlags, SetAttr,
};
use bytes::Bytes;

use crate::e2fsck::assert_clean;
use crate::mkfs::options;

const ME: Caller = Caller { uid: 0, gid: 0, pid: 0 };

struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % bound
    }
}

/// What files hold, by name; contents identify file and write.
type Model = BTreeMap<Vec<u8>, Vec<u8>>;

async fn write_file(tfs: &Tfs, name: &[u8], at: u64, bytes: &[u8]) -> Result<(), Errno> {
    let (entry, opened) = tfs.create(ME, InodeNumber::ROOT, name, 0o644, OpenFlags::WRITE).await?;
    let number = entry.attr.inode;
    let written = tfs.write(number, opened.handle, at, Bytes::copy_from_slice(bytes)).await;
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

fn mount(device: &FaultyDevice) -> Tfs {
    let shared: Arc<dyn Device> = Arc::new(device.clone());
    let env = Arc::new(TokioRuntime::current());
    Tfs::mount(env, shared, &MountOptions::default()).unwrap().0
}

/// Runs the workload until the power goes; returns the model at the last commit that was
/// acknowledged, the files that calls may have changed since, and whether all was done.
async fn run(device: &FaultyDevice, seed: u64, steps: u64) -> (Model, BTreeSet<Vec<u8>>, bool) {
    let shared: Arc<dyn Device> = Arc::new(device.clone());
    let env = Arc::new(TokioRuntime::current());
    let Ok((tfs, _)) = Tfs::mount(env, shared, &MountOptions::default()) else {
        return (Model::new(), BTreeSet::new(), false);
    };
    let mut dice = Dice(seed);
    let mut committed = Model::new();
    let mut model = Model::new();
    let mut touched = BTreeSet::new();
    for number in 0..steps {
        if step(&tfs, &mut model, &mut touched, &mut dice, number).await.is_err() {
            return (committed, touched, false);
        }
        if number % 5 == 4 {
            match tfs.sync().await {
                Ok(()) => {
                    committed = model.clone();
                    touched.clear();
                }
                Err(_) => return (committed, touched, false),
            }
        }
    }
    match tfs.unmount() {
        Ok(()) => (model, BTreeSet::new(), true),
        Err(_) => (committed, touched, false),
    }
}

fn blank() -> Vec<u8> {
    let device = FaultyDevice::new(4 << 20, 1);
    mkfs(&(Arc::new(device.clone()) as Arc<dyn Device>), &options(1024)).unwrap();
    device.bytes()
}

#[tokio::test]
async fn after_a_power_cut_the_file_system_is_whole_and_holds_what_was_synced() {
    let image = blank();
    let sound = FaultyDevice::holding(image.clone(), 0);
    let (expected, _, done) = run(&sound, 7, 60).await;
    assert!(done);
    let operations = sound.operations();
    assert_eq!(contents(&mount(&sound)).await.unwrap(), expected);
    let mut checked = 0;
    // e2fsck takes a tenth of a second: every third moment here, each of them in the journal's
    // own tests.
    for at in (0..operations).step_by(3) {
        let device = FaultyDevice::holding(image.clone(), at);
        device.cut_power_at(at);
        let (committed, touched, done) = run(&device, 7, 60).await;
        assert!(!done, "the power goes at {at} of {operations}");
        device.power_cycle();
        let tfs = mount(&device);
        let found = contents(&tfs).await.unwrap();
        // Between the last commit and the cut a file may be either, or on the way: its blocks
        // are written in place.
        for (name, bytes) in committed.iter().filter(|(name, _)| !touched.contains(*name)) {
            let name_text = String::from_utf8_lossy(name);
            assert!(found.get(name) == Some(bytes), "{name_text} after a cut at {at}");
        }
        for name in found.keys() {
            let known = committed.contains_key(name) || touched.contains(name);
            assert!(known, "{} after a cut at {at}", String::from_utf8_lossy(name));
        }
        tfs.unmount().unwrap();
        assert_clean(&device.bytes(), &format!("power cut at {at}"));
        checked += 1;
    }
    assert!(checked > 50, "{checked} of {operations}");
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
