//! Files that one mount renames, links and removes while another has them locked and has written them.

use std::time::Duration;

use atoll_sim::SimConfig;
use atoll_vfs::{Caller, Errno, FileSystem, InodeNumber, RenameFlags};
use atoll_volume::shared::{Consistency, SharedFs};

use super::locks::{EXCLUSIVE, Mounts, SHARED, make, names};

const ROOT: InodeNumber = InodeNumber::ROOT;

fn me() -> Caller {
    Caller::default()
}

async fn rename(
    fs: &SharedFs,
    (from, name): (InodeNumber, &str),
    (to, new): (InodeNumber, &str),
) -> Result<(), Errno> {
    fs.lookup(me(), from, name.as_bytes()).await?;
    let flags = RenameFlags::default();
    fs.rename(me(), from, name.as_bytes(), to, new.as_bytes(), flags).await
}

fn links(all: &Mounts, at: usize, inode: InodeNumber) -> u32 {
    all.run(all.mounts[at].getattr(inode, None)).expect("is there").attr.nlink
}

#[test]
fn a_locked_file_that_another_mount_renames_stays_locked_and_loses_nothing() {
    for seed in 0..3 {
        // The holder gives it a name and a link too, or not.
        for holder_renames in [false, true] {
            let context = format!("seed {seed}, {holder_renames}");
            let all = Mounts::new(8980 + seed, 5, 2, Consistency::CloseToOpen);
            let [one, two] = [&all.mounts[0], &all.mounts[1]];
            let e = all.run(one.mkdir(me(), ROOT, b"e", 0o755)).expect("is made").attr.inode;
            all.run(make(one, "f", "before"));
            let holder = all.open(1, "f");
            let theirs_e = all.run(two.lookup(me(), ROOT, b"e")).expect("is there").attr.inode;
            all.run(holder.lock(EXCLUSIVE, true)).expect("free");
            all.run(holder.write("under a lock")).expect("locked");
            all.run(rename(one, (ROOT, "f"), (ROOT, "g"))).expect("a lock keeps no name");
            if holder_renames {
                all.run(rename(two, (ROOT, "g"), (ROOT, "h"))).expect("is renamed");
                all.run(rename(one, (ROOT, "h"), (ROOT, "g"))).expect("is renamed");
            }
            assert_eq!(links(&all, 1, holder.inode), 1, "{context}");
            all.run(one.link(me(), holder.inode, e, b"h")).expect("is linked");
            let other = all.open(0, "g");
            assert_eq!(all.run(other.lock(SHARED, false)), Err(Errno::EAGAIN), "{context}");
            assert_eq!(all.run(holder.lock(EXCLUSIVE, false)), Ok(()), "{context}");
            all.run(holder.write("under a lock, still")).expect("locked");
            all.run(holder.unlock()).expect("is published");
            all.run(other.lock(SHARED, true)).expect("free by now");
            assert_eq!(all.run(other.text()), "under a lock, still", "{context}");
            for at in [0, 1] {
                assert_eq!(links(&all, at, holder.inode), 2, "{context}");
                assert_eq!(all.run(names(&all.mounts[at])), ["e", "g"], "{context}");
            }
            all.run(other.unlock()).expect("nothing is to be published");
            // The name that was written anew goes alone, under a lock of the other mount.
            all.run(holder.lock(EXCLUSIVE, true)).expect("free by now");
            all.run(holder.write("UNDER")).expect("locked");
            all.run(one.unlink(me(), ROOT, b"g")).expect("is removed");
            all.run(one.sync()).expect("the ring knows");
            all.run(holder.unlock()).expect("is published");
            all.ring.sim.run_for(Duration::from_secs(5));
            for (at, e) in [(0, e), (1, theirs_e)] {
                let fs = &all.mounts[at];
                let left = all.run(fs.lookup(me(), e, b"h")).expect("the other name").attr;
                assert_eq!((left.inode, left.nlink), (holder.inode, 1), "{context}");
                assert_eq!(all.run(names(fs)), ["e"], "{context}");
            }
            assert_eq!(all.run(other.text()).len(), "under a lock, still".len(), "{context}");
            all.run(other.lock(SHARED, true)).expect("free by now");
            assert_eq!(all.run(other.text()), "UNDER a lock, still", "{context}");
            all.run(other.unlock()).expect("nothing is to be published");
            all.run(two.unlink(me(), theirs_e, b"h")).expect("is removed");
            all.run(two.sync()).expect("the ring knows");
            assert_eq!(all.run(one.lookup(me(), e, b"h")).err(), Some(Errno::ENOENT), "{context}");
        }
    }
}

/// The holder loses its lock, and what it has written, between two renames of others.
#[test]
fn a_file_that_is_renamed_while_its_lock_is_lost_has_one_name_and_one_link() {
    for seed in 0..3 {
        let all = Mounts::new(8990 + seed, 7, 2, Consistency::CloseToOpen);
        let one = &all.mounts[0];
        all.run(make(one, "f", "before"));
        let holder = all.open(1, "f");
        all.run(holder.lock(EXCLUSIVE, true)).expect("free");
        all.run(holder.write("dropped")).expect("locked");
        all.run(rename(one, (ROOT, "f"), (ROOT, "g"))).expect("is renamed");
        all.ring.sim.partition(&[&all.hosts(1..2)]);
        all.ring.sim.run_for(Duration::from_secs(40));
        all.run(rename(one, (ROOT, "g"), (ROOT, "h"))).expect("is renamed");
        all.run(make(one, "h", "after"));
        assert_eq!(all.run(holder.flush()), Err(Errno::EIO), "seed {seed}");
        all.ring.sim.heal();
        all.ring.sim.run_for(Duration::from_secs(300));
        all.run(holder.lock(EXCLUSIVE, true)).expect("free");
        assert_eq!(all.run(holder.text()), "after", "seed {seed}");
        all.run(holder.write("AF")).expect("locked anew");
        all.run(holder.unlock()).expect("is published");
        for at in [0, 1] {
            assert_eq!(links(&all, at, holder.inode), 1, "seed {seed}");
            assert_eq!(all.run(names(&all.mounts[at])), ["h"], "seed {seed}");
        }
        let text = all.open(0, "h");
        assert_eq!(all.run(text.text()), "AFter", "seed {seed}");
    }
}

/// A program has written what it has not closed, and renames the file, which another member has closed meanwhile.
#[test]
fn a_rename_of_a_file_with_changes_covers_nothing_that_others_have_closed() {
    for seed in 0..3 {
        for (followed, renames_here) in [(false, true), (true, true), (false, false), (true, false)]
        {
            let context = format!("seed {seed}, {followed}, {renames_here}");
            let sim = SimConfig { seed: 9000 + seed, jitter: 0.3, ..SimConfig::default() };
            let all = Mounts::with(sim, 5, 2, Consistency::CloseToOpen);
            let [one, two] = [&all.mounts[0], &all.mounts[1]];
            all.run(make(one, "f", "first"));
            let (writer, theirs) = (all.open(1, "f"), all.open(0, "f"));
            if !followed {
                all.run(writer.write("mine")).expect("writes");
            }
            all.run(theirs.write("acknowledged")).expect("writes");
            all.run(theirs.flush()).expect("the ring takes it");
            if followed {
                all.ring.sim.run_for(Duration::from_secs(2));
                let shown = all.run(two.getattr(writer.inode, None)).expect("is there").attr;
                assert_eq!(shown.size_bytes, 12, "{context}");
                all.run(writer.write("mine")).expect("writes");
            }
            let fs = if renames_here { two } else { one };
            all.run(rename(fs, (ROOT, "f"), (ROOT, "g"))).expect("is renamed");
            assert_eq!(links(&all, 1, writer.inode), 1, "{context}");
            all.run(writer.flush()).expect("the ring takes it");
            // An open turns contents that were written at the same time into files of their own.
            all.open(0, "g");
            let mine = if followed { "mineowledged" } else { "minet" };
            for at in [0, 1] {
                let names = all.run(names(&all.mounts[at]));
                let kept = names.iter().find(|name| name.contains('~'));
                assert_eq!((names.len(), kept.is_some()), (2, true), "{context}: {names:?}");
                for (name, text) in [("g", mine), (&**kept.expect("is there"), "acknowledged")] {
                    let file = all.open(at, name);
                    assert_eq!(all.run(file.text()), text, "{context}: {name}");
                    assert_eq!(links(&all, at, file.inode), 1, "{context}: {name}");
                }
            }
        }
    }
}
