//! Contents that a writer has not read, when there is no room for the file that keeps them.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::Duration;

use atoll_vfs::{Caller, Errno, FileSystem, Handle, InodeNumber, OpenFlags, Writer};
use atoll_volume::shared::{SharedFs, SharedOptions};
use bytes::Bytes;

use super::offline::{Setting, large, read, tree, write};

const ROOT: InodeNumber = InodeNumber::ROOT;
const MINUTE: Duration = Duration::from_secs(60);

fn me() -> Caller {
    Caller::default()
}

/// A file that the first mount has open, and shows as another member has closed it since; its program has not read that.
struct Scene {
    all: Setting,
    fs: SharedFs,
    file: InodeNumber,
    handle: Handle,
    theirs: Bytes,
}

impl Scene {
    fn new(seed: u64, options: SharedOptions, theirs: Bytes) -> Scene {
        let all = Setting::with(seed, options, false);
        let fs = all.mounted();
        all.run(write(&fs, ROOT, "f", "first")).expect("is written");
        let (file, handle) = all.run(async {
            let file = fs.lookup(me(), ROOT, b"f").await.expect("is there").attr.inode;
            let opened = fs.open(me(), file, OpenFlags::READ_WRITE).await.expect("opens");
            (file, opened.handle)
        });
        all.run(write(&all.others[0], ROOT, "f", theirs.clone())).expect("is written");
        all.wait(Duration::from_secs(2));
        let shown = all.run(read(&fs, ROOT, "f")).expect("another program reads it");
        assert!(shown == theirs, "the file has followed");
        Scene { all, fs, file, handle, theirs }
    }

    fn overwrite(&self) -> Result<(), Errno> {
        self.all.run(async {
            let write = self.fs.write(Writer::At(me()), self.file, self.handle, 0, "mine".into());
            write.await?;
            let flushed = self.fs.flush(self.file, self.handle).await;
            self.fs.close(self.file, self.handle).await.expect("it is open");
            flushed
        })
    }

    /// Nothing is covered while there is no room.
    fn nothing_is_covered(&self, context: &str) {
        let shown = self.all.run(read(&self.all.others[0], ROOT, "f"));
        assert_eq!(shown, Ok(self.theirs.clone()), "{context}");
    }

    /// All is there, when there is room.
    fn all_is_there(&self, context: &str) {
        let mine = [b"mine", &self.theirs[4..]].concat();
        let expected = BTreeSet::from([self.theirs.clone(), mine.into()]);
        assert_eq!(self.all.status(&self.fs), "ok", "{context}");
        for fs in [&self.fs, &self.all.others[0]] {
            let files = self.all.run(tree(fs, ROOT, String::new()));
            assert_eq!(files.len(), 2, "{context}: {:?}", files.keys());
            let texts: BTreeSet<Bytes> = files.into_values().collect();
            assert!(texts == expected, "{context}");
        }
    }
}

#[test]
fn a_full_ring_lets_nobody_cover_what_he_has_not_read() {
    for (seed, theirs) in [(9400, Bytes::from("acknowledged")), (9401, large(9))] {
        for puts in 0..5 {
            let context = format!("seed {seed}, room for {puts} puts");
            let scene = Scene::new(seed, SharedOptions::default(), theirs.clone());
            let node = &scene.all.machine.node;
            node.puts_with_room.store(puts, Ordering::Relaxed);
            let written = scene.overwrite();
            if written.is_err() {
                assert_eq!(written, Err(Errno::ENOSPC), "{context}");
                scene.nothing_is_covered(&context);
            }
            assert!(written.is_err() || puts > 1, "{context}: it is full");
            scene.all.wait(MINUTE);
            node.puts_with_room.store(u64::MAX, Ordering::Relaxed);
            node.is_full.store(false, Ordering::Relaxed);
            scene.all.wait(MINUTE * 3);
            scene.all_is_there(&context);
        }
    }
}

#[test]
fn a_full_spool_lets_nobody_cover_what_he_has_not_read() {
    // With the second, some nodes have what no majority has taken.
    for (seed, is_unconfirmed) in [(9410, false), (9411, true)] {
        for theirs in [Bytes::from("acknowledged"), large(9)] {
            let context = format!("seed {seed}, {} bytes", theirs.len());
            let scene = Scene::new(seed, SharedOptions::default(), theirs);
            let machine = &scene.all.machine;
            match is_unconfirmed {
                true => machine.node.is_unconfirmed.store(true, Ordering::Relaxed),
                false => machine.node.stop(),
            }
            machine.disk.is_full.store(true, Ordering::Relaxed);
            assert_eq!(scene.overwrite(), Err(Errno::ENOSPC), "{context}");
            scene.all.wait(MINUTE * 2);
            scene.nothing_is_covered(&context);
            machine.disk.is_full.store(false, Ordering::Relaxed);
            scene.all.wait(MINUTE);
            machine.node.is_unconfirmed.store(false, Ordering::Relaxed);
            scene.all.reconnect();
            assert!(scene.all.is_spool_empty(), "{context}");
            scene.all_is_there(&context);
        }
    }
}

/// The file that keeps them fits into the spool, and the contents that cover them do not.
#[test]
fn a_spool_with_a_limit_keeps_what_a_writer_has_not_read() {
    let options = SharedOptions { max_spool_bytes: 100_000, ..SharedOptions::default() };
    let scene = Scene::new(9420, options, "acknowledged".into());
    scene.all.machine.node.stop();
    let filled = scene.all.run(write(&scene.fs, ROOT, "fills", large(3)));
    assert_eq!(filled, Err(Errno::ENOSPC));
    let _ = scene.overwrite();
    scene.nothing_is_covered("offline");
    scene.all.reconnect();
    scene.all.run(scene.fs.unlink(me(), ROOT, b"fills")).expect("is removed");
    scene.all.wait(MINUTE);
    scene.all_is_there("online again");
}
