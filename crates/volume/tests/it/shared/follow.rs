//! What an open file shows of what others have closed since, on a ring in the simulator.

use std::time::Duration;

use atoll_sim::SimConfig;
use atoll_vfs::{
    Caller, FileLock, FileSystem, Handle, InodeNumber, Invalidation, LockKind, LockOwner,
    LockRange, OpenFlags, SetAttr, Writer,
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
        Scene::opened_by(seed, flags, 0)
    }

    fn opened_by(seed: u64, flags: OpenFlags, pid: u32) -> Scene {
        let config = SimConfig { seed, jitter: 0.3, ..SimConfig::default() };
        let all = Mounts::with_options(config, 5, 2, SharedOptions::default());
        let [one, two] = [&all.mounts[0], &all.mounts[1]];
        let (file, handle) = all.run(async {
            put(one, "one").await;
            let file = two.lookup(me(), ROOT, b"f").await.expect("there").attr.inode;
            (file, two.open(Caller { pid, ..me() }, file, flags).await.expect("opens").handle)
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

/// What a program of the second mount does after another member has closed the file, and before the file is written by a program
/// that has it open all the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Between {
    Nothing,
    /// Another program asks for attributes.
    Stat,
    /// Another program reads the file.
    Read,
    /// Another program locks another file.
    OtherLocksOther,
    /// The program reads what it has open.
    ReadsIt,
    /// The program locks it, or another file.
    LocksIt,
    LocksOther,
}

impl Scene {
    /// All files of the directory, the second mount's view; kept contents by the name `~`.
    fn texts(&self) -> Vec<(String, String)> {
        let two = &self.all.mounts[1];
        self.all.run(async {
            let handle = two.opendir(me(), ROOT).await.expect("opens").handle;
            let listed = two.readdir(ROOT, handle, 0, 100, true).await.expect("lists");
            two.closedir(ROOT, handle).await.expect("it is open");
            let mut texts = Vec::new();
            for entry in listed {
                let file = entry.entry.expect("is known").attr.inode;
                let handle = two.open(me(), file, OpenFlags::READ).await.expect("opens").handle;
                let read = two.read(file, handle, 0, 1000).await.expect("reads");
                two.close(file, handle).await.expect("it is open");
                let name = String::from_utf8_lossy(&entry.name).into_owned();
                let name = if name.contains('~') { "~".to_owned() } else { name };
                texts.push((name, String::from_utf8_lossy(&read).into_owned()));
            }
            texts
        })
    }

    fn lock_another(&self, pid: u32) {
        let two = &self.all.mounts[1];
        let locks = two.locks().expect("it has locks");
        self.all.run(async {
            let flags = OpenFlags::READ_WRITE;
            let (made, opened) =
                two.create(me(), ROOT, b"lock", 0o644, flags).await.expect("is made");
            two.flush(made.attr.inode, opened.handle).await.expect("the ring takes it");
            let (kind, range) = (LockKind::Exclusive, LockRange::WHOLE);
            let lock = FileLock { kind, range, pid, through: Some(opened.handle) };
            let owner = LockOwner(u64::from(pid));
            locks.lock(made.attr.inode, owner, lock, true).await.expect("is granted");
            locks.unlock(made.attr.inode, owner, range).await.expect("is given back");
            two.close(made.attr.inode, opened.handle).await.expect("it is open");
            two.unlink(me(), ROOT, b"lock").await.expect("is removed");
        });
    }

    fn between(&self, what: Between) {
        let two = &self.all.mounts[1];
        let read = |handle| two.read(self.file, handle, 0, 1000);
        match what {
            Between::Nothing => {}
            Between::Stat => {
                let seen = self.all.run(two.getattr(self.file, None)).expect("there").attr;
                assert_eq!(seen.size_bytes, 12, "the file has followed");
            }
            Between::Read => self.all.run(async {
                let opened = two.open(me(), self.file, OpenFlags::READ).await.expect("opens");
                assert_eq!(read(opened.handle).await.expect("reads"), "acknowledged");
                two.close(self.file, opened.handle).await.expect("it is open");
            }),
            Between::OtherLocksOther => self.lock_another(77),
            Between::ReadsIt => {
                self.between(Between::Stat);
                assert_eq!(self.all.run(read(self.handle)).expect("reads"), "acknowledged");
            }
            Between::LocksIt => {
                let locks = two.locks().expect("it has locks");
                let (kind, range) = (LockKind::Exclusive, LockRange::WHOLE);
                let lock = FileLock { kind, range, pid: 9, through: Some(self.handle) };
                self.all.run(locks.lock(self.file, LockOwner(9), lock, true)).expect("is granted");
            }
            Between::LocksOther => self.lock_another(PID),
        }
    }
}

/// The process of the second mount that has the file open.
const PID: u32 = 5;

/// An open file shows what others have closed since, and whoever wrote it then covered that without having read it: two of
/// 3,854 acknowledged contents were lost in a storm of 200 s.
#[test]
fn contents_that_a_writer_has_not_read_are_kept_though_his_mount_shows_them() {
    use Between::{LocksIt, LocksOther, Nothing, OtherLocksOther, Read, ReadsIt, Stat};
    for (n, what) in (0..).zip([Nothing, Stat, Read, OtherLocksOther, ReadsIt, LocksIt, LocksOther])
    {
        for is_append in [false, true] {
            let scene = Scene::opened_by(9540 + n, OpenFlags::READ_WRITE, PID);
            scene.closed("acknowledged");
            scene.between(what);
            let two = &scene.all.mounts[1];
            scene.all.run(async {
                let writer = if is_append { Writer::AtEnd(me()) } else { Writer::At(me()) };
                if !is_append {
                    let empty = SetAttr { size_bytes: Some(0), ..SetAttr::default() };
                    let cut = two.setattr(me(), scene.file, Some(scene.handle), empty).await;
                    cut.expect("is cut");
                }
                let write = two.write(writer, scene.file, scene.handle, 0, ", mine".into());
                write.await.expect("writes");
                two.flush(scene.file, scene.handle).await.expect("the ring takes it");
            });
            let locks = scene.all.mounts[1].locks().expect("it has locks");
            let range = LockRange::WHOLE;
            scene.all.run(locks.unlock(scene.file, LockOwner(9), range)).expect("is given back");
            scene.all.ring.sim.run_for(Duration::from_secs(10));
            // An open turns contents that were written at the same time into files of their own.
            scene.texts();
            let own = match (is_append, what) {
                (true, Nothing) => "one, mine",
                (true, _) => "acknowledged, mine",
                (false, _) => ", mine",
            };
            let mut expected = vec![("f".to_owned(), own.to_owned())];
            let is_unread = matches!(what, Stat | Read | OtherLocksOther) && !is_append;
            if is_unread || what == Nothing {
                expected.push(("~".to_owned(), "acknowledged".to_owned()));
            }
            assert_eq!(scene.texts(), expected, "{what:?}, an append: {is_append}");
        }
    }
}

/// Programs of one mount share a file as those of one machine do.
#[test]
fn what_other_programs_of_the_mount_have_written_is_not_kept_beside() {
    let scene = Scene::opened_by(9550, OpenFlags::READ_WRITE, PID);
    let two = &scene.all.mounts[1];
    scene.all.run(put(two, "of this mount"));
    scene.all.run(async {
        let write = two.write(Writer::At(me()), scene.file, scene.handle, 0, "mine".into());
        write.await.expect("writes");
        two.flush(scene.file, scene.handle).await.expect("the ring takes it");
    });
    scene.all.ring.sim.run_for(Duration::from_secs(10));
    assert_eq!(scene.texts(), [("f".to_owned(), "minehis mount".to_owned())]);
}
