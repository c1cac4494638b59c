//! What an open file shows of what others have closed since, on a ring in the simulator.

use std::time::Duration;

use atoll_sim::SimConfig;
use atoll_vfs::{
    Caller, FileLock, FileSystem, Handle, InodeNumber, Invalidation, LockKind, LockOwner,
    LockRange, OpenFlags, Writer,
};
use atoll_volume::shared::{SharedFs, SharedOptions};
use bytes::Bytes;

use super::locks::Mounts;

const ROOT: InodeNumber = InodeNumber::ROOT;

fn me() -> Caller {
    Caller::default()
}

/// Two mounts of one volume, and a file that the first has made and the second has open.
struct Scene {
    all: Mounts,
    file: InodeNumber,
    handle: Handle,
}

async fn put(fs: &SharedFs, text: &str) {
    let flags = OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::TRUNCATE);
    let (made, opened) = fs.create(me(), ROOT, b"f", 0o644, flags).await.expect("is made");
    let (inode, handle) = (made.attr.inode, opened.handle);
    let data = Bytes::copy_from_slice(text.as_bytes());
    fs.write(Writer::At(me()), inode, handle, 0, data).await.expect("writes");
    fs.flush(inode, handle).await.expect("the ring takes it");
    fs.close(inode, handle).await.expect("it is open");
}

impl Scene {
    fn new(seed: u64, flags: OpenFlags) -> Scene {
        let config = SimConfig { seed, jitter: 0.3, ..SimConfig::default() };
        let all = Mounts::with_options(config, 5, 2, SharedOptions::default());
        let [one, two] = [&all.mounts[0], &all.mounts[1]];
        let (file, handle) = all.run(async {
            put(one, "one").await;
            let file = two.lookup(me(), ROOT, b"f").await.expect("there").attr.inode;
            (file, two.open(me(), file, flags).await.expect("opens").handle)
        });
        let scene = Scene { all, file, handle };
        assert_eq!(scene.shown(), (3, "one".to_owned()));
        scene
    }

    /// What the second mount tells a program that asks for the attributes and then reads.
    fn shown(&self) -> (u64, String) {
        let two = &self.all.mounts[1];
        self.all.run(async {
            let attr = two.getattr(self.file, Some(self.handle)).await.expect("there").attr;
            let read = two.read(self.file, self.handle, 0, 1000).await.expect("reads");
            (attr.size_bytes, String::from_utf8(read.to_vec()).expect("a test's"))
        })
    }

    /// What the first mount writes and closes, some time ago.
    fn closed(&self, text: &str) {
        self.all.run(put(&self.all.mounts[0], text));
        self.all.ring.sim.run_for(Duration::from_secs(2));
    }

    /// Whether the kernel was told to drop pages of the file.
    fn told_to_drop(&self) -> bool {
        let queue = self.all.mounts[1].invalidations().expect("it has a queue");
        let data = |told| matches!(told, Invalidation::Data { inode, .. } if inode == self.file);
        std::iter::from_fn(|| queue.try_next()).filter(|told| data(told.clone())).count() > 0
    }
}

/// `tail -f` asks for the size, and reads what is more.
#[test]
fn an_open_file_shows_what_others_have_closed_since() {
    for seed in 9500..9504 {
        let scene = Scene::new(seed, OpenFlags::READ);
        assert!(!scene.told_to_drop(), "seed {seed}");
        let long = "x".repeat(100);
        for text in ["one, two", &long, "short"] {
            scene.closed(text);
            let shown = scene.shown();
            assert_eq!(shown, (text.len() as u64, text.to_owned()), "seed {seed}");
            assert!(scene.told_to_drop(), "seed {seed}: the kernel has pages of what was there");
        }
        // By its name as well.
        scene.closed("by name");
        let two = &scene.all.mounts[1];
        let named = scene.all.run(two.lookup(me(), ROOT, b"f")).expect("there").attr;
        assert_eq!(named.size_bytes, 7, "seed {seed}");
    }
}

#[test]
fn an_open_file_that_has_changes_stays_as_it_is() {
    let scene = Scene::new(9510, OpenFlags::READ_WRITE);
    let two = &scene.all.mounts[1];
    let write = two.write(Writer::At(me()), scene.file, scene.handle, 0, "mine".into());
    scene.all.run(write).expect("writes");
    scene.closed("of another");
    assert_eq!(scene.shown(), (4, "mine".to_owned()));
    assert!(!scene.told_to_drop());
}

#[test]
fn a_locked_file_stays_as_it_was_when_it_was_locked() {
    let scene = Scene::new(9520, OpenFlags::READ_WRITE);
    let locks = scene.all.mounts[1].locks().expect("it has locks");
    let owner = LockOwner(1);
    let (kind, range, through) = (LockKind::Shared, LockRange::WHOLE, Some(scene.handle));
    let lock = locks.lock(scene.file, owner, FileLock { kind, range, pid: 7, through }, true);
    scene.all.run(lock).expect("is granted");
    // A program that asks for no lock.
    scene.closed("not locked");
    assert_eq!(scene.shown(), (3, "one".to_owned()));
    scene.all.run(locks.unlock(scene.file, owner, LockRange::WHOLE)).expect("is given back");
    scene.all.ring.sim.run_for(Duration::from_secs(2));
    assert_eq!(scene.shown(), (10, "not locked".to_owned()));
}

/// What another mount has removed is there until it is closed, and a ring that is gone makes nobody wait for long.
#[test]
fn an_open_file_that_was_removed_stays_as_it_was() {
    let scene = Scene::new(9530, OpenFlags::READ);
    let one = &scene.all.mounts[0];
    scene.all.run(async {
        one.unlink(me(), ROOT, b"f").await.expect("is removed");
        one.sync().await.expect("is on the ring");
    });
    scene.all.ring.sim.run_for(Duration::from_secs(2));
    assert_eq!(scene.shown(), (3, "one".to_owned()));
}
