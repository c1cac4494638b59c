//! Copies that differ: what people do to plain files behind the pool's back, and bytes that rot.

use atoll_pool::disk::{Disk, Making};
use atoll_pool::{ScrubReport, ask_scrub};
use atoll_vfs::{Handle, InodeNumber, OpenFlags, RenameFlags, Writer};
use bytes::Bytes;

use super::*;
use crate::workload::{ROOT, me};

type Fs = PoolFs<SimulatedDisk>;
type Node = <SimulatedDisk as Disk>::Node;

const MIB: usize = 1 << 20;
const SCRUB_LIMIT: Duration = Duration::from_secs(600);

impl Group {
    /// Makes a file with these bytes, durable.
    fn put(&self, parent: InodeNumber, name: &str, bytes: &[u8]) -> (InodeNumber, Handle) {
        let fs = self.fs();
        self.run(async {
            let flags = OpenFlags::READ_WRITE;
            let (made, opened) =
                fs.create(me(), parent, name.as_bytes(), 0o644, flags).await.unwrap();
            let file = (made.attr.inode, opened.handle);
            write(&fs, file, 0, bytes).await;
            fs.fsync(file.0, file.1, false).await.unwrap();
            file
        })
    }

    fn directory(&self, name: &str) -> InodeNumber {
        let fs = self.fs();
        self.run(async { fs.mkdir(me(), ROOT, name.as_bytes(), 0o755).await.unwrap().attr.inode })
    }

    fn close(&self, file: (InodeNumber, Handle)) {
        let fs = self.fs();
        self.run(async { fs.close(file.0, file.1).await.unwrap() });
    }

    /// What clients read.
    fn read(&self, file: InodeNumber, len: usize) -> Vec<u8> {
        let fs = self.fs();
        self.run(async {
            let opened = fs.open(me(), file, OpenFlags::READ).await.unwrap();
            let mut bytes = Vec::new();
            while bytes.len() < len {
                let some = fs.read(file, opened.handle, bytes.len() as u64, MIB as u32).await;
                let some = some.unwrap();
                if some.is_empty() {
                    break;
                }
                bytes.extend_from_slice(&some);
            }
            fs.close(file, opened.handle).await.unwrap();
            bytes
        })
    }

    /// Compares all copies, and waits until that is done.
    pub(super) fn scrub(&mut self) -> ScrubReport {
        let route = self.route(0);
        self.run(async {
            let limit = Duration::from_secs(5);
            let begun = ask_scrub(&*route, true, limit).await.unwrap();
            assert!(begun.is_running);
            let env = self.sim.outside();
            let until = env.now() + SCRUB_LIMIT;
            loop {
                let report = ask_scrub(&*route, false, limit).await.unwrap();
                if !report.is_running {
                    return report;
                }
                assert!(env.now() < until, "it does not end: {report:?}");
                sleep(&*env, Duration::from_millis(100)).await;
            }
        })
    }

    /// A name on one member's disk.
    fn on_disk(&self, at: usize, path: &str) -> (Node, Vec<u8>) {
        self.run(async {
            let disk = &self.disks[at];
            let mut dir = disk.top();
            let (above, name) = path.rsplit_once('/').unwrap();
            for component in above.split('/') {
                dir = disk.node(&dir, component.as_bytes()).await.unwrap();
            }
            (dir, name.as_bytes().to_vec())
        })
    }

    fn exists(&self, at: usize, path: &str) -> bool {
        self.run(async {
            let disk = &self.disks[at];
            let mut dir = disk.top();
            for component in path.split('/') {
                match disk.node(&dir, component.as_bytes()).await {
                    Ok(node) => dir = node,
                    Err(_) => return false,
                }
            }
            true
        })
    }

    /// Where a distributed directory of the root lies.
    fn slot_of(&self, at: usize, name: &str) -> String {
        let (dir, name) = self.on_disk(at, &in_root(name));
        let target = self.run(self.disks[at].read_link(&dir, &name)).unwrap();
        let target = String::from_utf8(target.to_vec()).unwrap();
        format!("slots/{}", target.trim_start_matches("../"))
    }

    /// Writes bytes into a plain file behind the pool's back.
    fn edit_by_hand(&self, at: usize, path: &str, offset: usize, bytes: &[u8]) {
        let (dir, name) = self.on_disk(at, path);
        self.run(async {
            let disk = &self.disks[at];
            let node = disk.node(&dir, &name).await.unwrap();
            let file = disk.open(&node).await.unwrap();
            disk.write(&file, offset as u64, bytes).await.unwrap();
        });
    }

    fn bytes_by_hand(&self, at: usize, path: &str) -> Vec<u8> {
        let (dir, name) = self.on_disk(at, path);
        self.run(async {
            let disk = &self.disks[at];
            let file = disk.open(&disk.node(&dir, &name).await.unwrap()).await.unwrap();
            disk.read(&file, 0, 64 * MIB).await.unwrap().to_vec()
        })
    }

    fn remove_by_hand(&self, at: usize, path: &str) {
        let (dir, name) = self.on_disk(at, path);
        self.run(async {
            let disk = &self.disks[at];
            match disk.unlink(&dir, &name).await {
                Ok(()) => {}
                Err(_) => disk.rmdir(&dir, &name).await.unwrap(),
            }
        });
    }

    fn move_by_hand(&self, at: usize, from: &str, to: &str) {
        let (from, to) = (self.on_disk(at, from), self.on_disk(at, to));
        let flags = RenameFlags::default();
        self.run(self.disks[at].rename((&from.0, &from.1), (&to.0, &to.1), flags)).unwrap();
    }

    /// As an editor saves a file: another one, renamed over it.
    fn save_by_hand(&self, at: usize, path: &str, bytes: &[u8]) {
        let (dir, name) = self.on_disk(at, path);
        self.run(async {
            let disk = &self.disks[at];
            disk.make(&dir, b".swap", Making::File, 0o600).await.unwrap();
            let file = disk.open(&disk.node(&dir, b".swap").await.unwrap()).await.unwrap();
            disk.write(&file, 0, bytes).await.unwrap();
            let flags = RenameFlags::default();
            disk.rename((&dir, b".swap"), (&dir, &name), flags).await.unwrap();
        });
    }

    /// Until all marks are cleared: half a minute after the last change.
    fn settle(&mut self) {
        self.run_for(Duration::from_secs(40));
    }

    fn in_order(&mut self) {
        self.settle_and_compare().unwrap();
    }
}

async fn write(fs: &Fs, file: (InodeNumber, Handle), offset: u64, data: &[u8]) {
    let mut at = 0;
    while at < data.len() {
        let some = Bytes::copy_from_slice(&data[at..data.len().min(at + MIB)]);
        at += fs.write(Writer::At(me()), file.0, file.1, offset + at as u64, some).await.unwrap()
            as usize;
    }
}

const ROOT_ON_DISK: &str = "slots/000/0000000000000001";

fn in_root(name: &str) -> String {
    format!("{ROOT_ON_DISK}/{name}")
}

fn some_bytes(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| (at as u8).wrapping_mul(7).wrapping_add(seed) | 1).collect()
}

#[test]
fn a_pool_in_order_has_nothing_to_heal() {
    let mut group = Group::new(1, 1);
    let home = group.directory("home");
    let file = group.put(home, "file", &some_bytes(3 * MIB + 5, 1));
    group.put(ROOT, "short", b"some bytes");
    group.put(ROOT, "empty", b"");
    let fs = group.fs();
    group.run(async {
        fs.symlink(me(), ROOT, b"link", b"home/file").await.unwrap();
        fs.link(me(), file.0, ROOT, b"second").await.unwrap();
    });
    group.settle();
    let report = group.scrub();
    assert_eq!((report.copies, report.unhealed, report.passed_over), (3, 0, 0), "{report:?}");
    assert_eq!(report.findings, [""; 0]);
    assert_eq!(report.bytes, 3 * MIB as u64 + 5 + 10);
    group.in_order();
}

/// POOL: without a digest the majority decides, then the primary; with one, the digest.
#[test]
fn bytes_that_rot_are_healed_on_whichever_member() {
    for is_remembered in [false, true] {
        for rotten in [vec![0], vec![1], vec![2], vec![0, 1], vec![1, 2]] {
            if rotten.len() == 2 && !is_remembered {
                continue;
            }
            let mut group = Group::new(1, 1);
            let bytes = some_bytes(3 * MIB, 1);
            let file = group.put(ROOT, "file", &bytes);
            group.close(file);
            group.settle();
            if is_remembered {
                group.scrub();
            }
            for at in &rotten {
                group.edit_by_hand(*at, &in_root("file"), MIB + 17, b"rot");
            }
            let report = group.scrub();
            let found = (report.healed, report.unhealed, report.set_aside);
            assert_eq!(found, (rotten.len() as u64, 0, rotten.len() as u64), "{report:?}");
            for at in MEMBERS {
                assert_eq!(group.bytes_by_hand(at, &in_root("file")), bytes, "{rotten:?} on {at}");
                assert_eq!(group.exists(at, ".atoll/aside/file"), rotten.contains(&at));
            }
            assert_eq!(group.read(file.0, bytes.len()), bytes);
            let report = group.scrub();
            assert_eq!(report.findings, [""; 0]);
            group.in_order();
        }
    }
}

/// What somebody wrote by hand is set aside, whole.
#[test]
fn an_edit_by_hand_is_undone_and_kept() {
    let mut group = Group::new(2, 1);
    let home = group.directory("home");
    let file = group.put(home, "notes", b"as the pool has it");
    group.close(file);
    group.settle();
    let [primary, backup, _] = group.roles();
    let slot = group.slot_of(primary, "home");
    for at in [backup, primary] {
        group.edit_by_hand(at, &format!("{slot}/notes"), 0, b"by hand: it is longer now");
        let report = group.scrub();
        assert_eq!((report.healed, report.set_aside, report.unhealed), (1, 1, 0), "{report:?}");
        assert!(report.findings[0].starts_with("/home/notes: "), "{report:?}");
        let aside = group.bytes_by_hand(at, ".atoll/aside/home/notes");
        assert_eq!(aside, b"by hand: it is longer now");
        assert_eq!(group.read(file.0, 100), b"as the pool has it");
        group.in_order();
    }
}

/// Editors write another file and rename it; others remove, move and add files.
#[test]
fn names_that_were_changed_by_hand_are_put_right() {
    let mut group = Group::new(3, 1);
    let home = group.directory("home");
    for name in ["saved", "removed", "moved", "linked"] {
        let file = group.put(home, name, format!("these are the bytes of {name}").as_bytes());
        if name == "linked" {
            let fs = group.fs();
            group.run(async { fs.link(me(), file.0, ROOT, b"second").await.unwrap() });
        }
        group.close(file);
    }
    let sub = group.fs();
    let sub = group.run(async { sub.mkdir(me(), home, b"sub", 0o750).await.unwrap().attr.inode });
    let deep = group.put(sub, "deep", &some_bytes(MIB + 3, 4));
    group.close(deep);
    group.settle();
    for (at, with_directory) in [(0, true), (1, true), (2, false)] {
        let slot = group.slot_of(at, "home");
        let path = |name: &str| format!("{slot}/{name}");
        group.save_by_hand(at, &path("saved"), b"by an editor");
        group.remove_by_hand(at, &path("removed"));
        group.remove_by_hand(at, &path("linked"));
        group.move_by_hand(at, &path("moved"), &in_root("elsewhere"));
        group.save_by_hand(at, &path("strange"), b"put there by hand");
        if with_directory {
            group.remove_by_hand(at, &path("sub/deep"));
            group.remove_by_hand(at, &path("sub"));
            group.remove_by_hand(at, &in_root("home"));
        }
        let report = group.scrub();
        assert_eq!((report.unhealed, report.passed_over), (0, 0), "{report:#?}");
        assert!(report.set_aside >= 2 && report.moved_back == 1, "{report:#?}");
        assert_eq!(group.bytes_by_hand(at, ".atoll/aside/home/saved"), b"by an editor");
        assert_eq!(group.bytes_by_hand(at, ".atoll/aside/home/strange"), b"put there by hand");
        assert_eq!(group.read(deep.0, 2 * MIB), some_bytes(MIB + 3, 4));
        let report = group.scrub();
        assert_eq!(report.findings, [""; 0], "{at}");
        group.in_order();
    }
}

/// Modes, owners and extended attributes: those of more than half of the members, else the primary's.
#[test]
fn attributes_that_were_changed_by_hand_are_set_back() {
    for at in MEMBERS {
        let mut group = Group::new(4, 1);
        let file = group.put(ROOT, "file", b"bytes");
        group.close(file);
        let fs = group.fs();
        group.run(async {
            let flags = atoll_vfs::XattrFlags::default();
            fs.setxattr(me(), file.0, b"user.name", Bytes::from_static(b"value"), flags)
                .await
                .unwrap();
        });
        group.settle();
        let (dir, name) = group.on_disk(at, &in_root("file"));
        group.run(async {
            let disk = &group.disks[at];
            let node = disk.node(&dir, &name).await.unwrap();
            disk.set_mode(&node, 0o777).await.unwrap();
            disk.set_owner(&node, Some(77), None).await.unwrap();
            disk.remove_xattr(&node, b"user.name").await.unwrap();
        });
        let report = group.scrub();
        assert_eq!((report.healed, report.unhealed), (1, 0), "{report:?}");
        let attr = group.run(async { fs.getattr(file.0, None).await.unwrap().attr });
        assert_eq!((attr.mode & 0o7777, attr.uid), (0o644, me().uid));
        assert_eq!(group.scrub().findings, [""; 0]);
        group.in_order();
    }
}

/// A file to which clients write is left alone: its copies may differ for a moment.
#[test]
fn files_in_use_are_passed_over() {
    let mut group = Group::new(5, 1);
    let file = group.put(ROOT, "file", &some_bytes(2 * MIB, 1));
    group.settle();
    group.edit_by_hand(1, &in_root("file"), 5, b"rot");
    let fs = group.fs();
    group.run(async { write(&fs, file, 9, b"by a client").await });
    let report = group.scrub();
    assert_eq!((report.passed_over, report.healed), (1, 0), "{report:?}");
    group.run(async { fs.fsync(file.0, file.1, false).await.unwrap() });
    group.settle();
    let report = group.scrub();
    assert_eq!((report.passed_over, report.healed), (0, 1), "{report:?}");
    let mut expected = some_bytes(2 * MIB, 1);
    expected[9..20].copy_from_slice(b"by a client");
    assert_eq!(group.read(file.0, expected.len()), expected);
    group.in_order();
}

/// A digest is that of the bytes as of the last comparison: a write of a client ends it.
#[test]
fn a_write_voids_the_digest_on_all_members_also_over_a_crash() {
    let mut group = Group::new(6, 1);
    let file = group.put(ROOT, "file", b"the old bytes");
    group.settle();
    group.scrub();
    let fs = group.fs();
    group.run(async {
        write(&fs, file, 4, b"new").await;
        fs.fsync(file.0, file.1, false).await.unwrap();
    });
    drop(fs);
    for at in MEMBERS {
        group.kill(at, InFlight::Lost);
    }
    for at in MEMBERS {
        group.restart(at);
    }
    group.await_quiet().unwrap();
    group.settle();
    // One member alone has the old bytes again, which had the old digest.
    group.edit_by_hand(2, &in_root("file"), 4, b"old");
    let report = group.scrub();
    assert_eq!((report.healed, report.unhealed), (1, 0), "{report:?}");
    for at in MEMBERS {
        assert_eq!(group.bytes_by_hand(at, &in_root("file")), b"the new bytes", "{at}");
    }
}

/// What one member has alone is nobody's truth: the digest of what all had is kept.
#[test]
fn a_digest_outlasts_the_members_that_are_away() {
    let mut group = Group::of(2, 7, 1);
    let file = group.put(ROOT, "file", b"the right bytes");
    group.close(file);
    group.settle();
    group.scrub();
    // The one that votes goes on alone.
    group.kill(1, InFlight::Lost);
    group.run_for(Duration::from_secs(10));
    assert_eq!(group.primary(), Some(0));
    group.edit_by_hand(0, &in_root("file"), 4, b"WRONG");
    let report = group.scrub();
    assert_eq!((report.copies, report.healed, report.unhealed), (1, 0, 1), "{report:?}");
    group.restart(1);
    group.await_quiet().unwrap();
    group.settle();
    let report = group.scrub();
    assert_eq!((report.copies, report.healed, report.unhealed), (2, 1, 0), "{report:?}");
    for at in 0..2 {
        assert_eq!(group.bytes_by_hand(at, &in_root("file")), b"the right bytes", "{at}");
    }
}

/// Each of two copies is wrong somewhere: neither may overwrite the other.
#[test]
fn nothing_is_healed_where_no_copy_has_the_digest() {
    let mut group = Group::of(2, 8, 1);
    let bytes = some_bytes(3 * MIB, 5);
    let file = group.put(ROOT, "file", &bytes);
    group.close(file);
    group.settle();
    group.scrub();
    group.edit_by_hand(0, &in_root("file"), 5, b"rot");
    group.edit_by_hand(1, &in_root("file"), 2 * MIB + 5, b"rot");
    for _ in 0..2 {
        let report = group.scrub();
        assert_eq!((report.healed, report.unhealed, report.set_aside), (0, 1, 0), "{report:?}");
    }
    assert_eq!(group.bytes_by_hand(0, &in_root("file"))[MIB..], bytes[MIB..]);
    assert_eq!(group.bytes_by_hand(1, &in_root("file"))[..2 * MIB], bytes[..2 * MIB]);
}

/// The index of its member does not know yet which inode it is.
#[test]
fn a_file_that_was_made_again_is_known_after_a_crash() {
    let mut group = Group::new(9, 1);
    let file = group.put(ROOT, "file", b"bytes that stay");
    group.close(file);
    group.settle();
    let [_, backup, other] = group.roles();
    for at in [backup, other] {
        group.remove_by_hand(at, &in_root("file"));
        assert_eq!(group.scrub().restored, 1);
        group.kill(at, InFlight::Lost);
        group.restart(at);
        group.await_quiet().unwrap();
        let fs = group.fs();
        group.run(async {
            let opened = fs.open(me(), file.0, OpenFlags::WRITE).await.unwrap();
            write(&fs, (file.0, opened.handle), 11, b"more").await;
            fs.fsync(file.0, opened.handle, false).await.unwrap();
            fs.close(file.0, opened.handle).await.unwrap();
        });
        group.in_order();
        assert_eq!(group.failed, [""; 0]);
        assert_eq!(group.bytes_by_hand(at, &in_root("file")), b"bytes that more", "{at}");
        assert!(!group.exists(at, ".atoll/aside/file"), "nobody has changed it");
        group.settle();
    }
}

/// A rename to another directory and a scrub that sets something aside both need that no directory moves, and that no change is made.
#[test]
fn strangers_are_set_aside_while_directories_are_moved() {
    let mut group = Group::new(12, 1);
    let homes = ["one", "other"].map(|name| group.directory(name));
    let fs = group.fs();
    group.run(async { fs.mkdir(me(), homes[0], b"moves", 0o755).await.unwrap() });
    group.settle();
    let [primary, ..] = group.roles();
    let slot = group.slot_of(primary, "one");
    for number in 0..40 {
        group.save_by_hand(primary, &format!("{slot}/strange-{number}"), b"put there by hand");
    }
    for (at, disk) in group.disks.iter().enumerate() {
        disk.set_latency(at as u64, Duration::from_millis(2));
    }
    let (mount, env) = (group.mount(primary), group.sim.env(group.clients));
    let moved = Arc::new(Mutex::new(0));
    let (counted, clock) = (moved.clone(), env.clone());
    env.spawn(Box::pin(async move {
        for number in 0..200 {
            let (from, to) = (homes[number % 2], homes[(number + 1) % 2]);
            let flags = RenameFlags::default();
            mount.rename(me(), from, b"moves", to, b"moves", flags).await.unwrap();
            *counted.lock().unwrap() += 1;
            sleep(&*clock, Duration::from_millis(1)).await;
        }
    }));
    let report = group.scrub();
    assert!(report.set_aside >= 40, "{report:#?}");
    group.run_for(Duration::from_secs(20));
    assert_eq!(*moved.lock().unwrap(), 200);
    group.in_order();
}
