//! A lock orders all that its holders do, and not the contents of the locked file alone: names that one has removed, files
//! that he has made and changed, and the locked file itself, which may be new or removed.
//!
//! Mounts show names and attributes up to a second old here, as they do by default.

use std::cell::Cell;
use std::time::Duration;

use atoll_env::{Env, sleep};
use atoll_sim::SimConfig;
use atoll_vfs::{Attr, Caller, Errno, FileSystem, InodeNumber, LockOwner, OpenFlags, SetAttr};
use atoll_volume::shared::{Consistency, SharedFs, SharedOptions};
use futures_util::future::{join, join_all};

use super::locks::{EXCLUSIVE, Mounts, Open, SHARED, create_exclusively, make, names};

const ROOT: InodeNumber = InodeNumber::ROOT;
const BOTH: [Consistency; 2] = [Consistency::CloseToOpen, Consistency::ReadYourWrites];

fn me() -> Caller {
    Caller::default()
}

fn mounts(seed: u64, count: usize, consistency: Consistency) -> Mounts {
    let sim = SimConfig { seed, jitter: 0.3, ..SimConfig::default() };
    let options = SharedOptions { consistency, ..SharedOptions::default() };
    Mounts::with_options(sim, 6, count, options)
}

/// `open(2)` with `O_CREAT`.
async fn opened(fs: &SharedFs, name: &str) -> Open {
    let flags = OpenFlags::READ_WRITE;
    let (entry, opened) = fs.create(me(), ROOT, name.as_bytes(), 0o644, flags).await.expect("new");
    Open { fs: fs.clone(), inode: entry.attr.inode, handle: opened.handle, owner: LockOwner(1) }
}

impl Open {
    async fn attr(&self) -> Attr {
        self.fs.getattr(self.inode, Some(self.handle)).await.expect("is open").attr
    }

    /// `close(2)`: the front end gives up the locks of the open file.
    async fn close(self) {
        self.flush().await.expect("is stored");
        self.unlock().await.expect("is given up");
        self.fs.close(self.inode, self.handle).await.expect("closes");
    }
}

async fn number(fs: &SharedFs, name: &str) -> Result<InodeNumber, Errno> {
    Ok(fs.lookup(me(), ROOT, name.as_bytes()).await?.attr.inode)
}

async fn text(fs: &SharedFs, name: &str) -> Result<String, Errno> {
    let inode = number(fs, name).await?;
    let handle = fs.open(me(), inode, OpenFlags::READ).await?.handle;
    let read = fs.read(inode, handle, 0, 1000).await;
    fs.close(inode, handle).await?;
    Ok(String::from_utf8_lossy(&read?).into_owned())
}

/// A database with a rollback journal: the journal's end is the commit. The next holder saw it for up to a second
/// and took the transaction back.
#[test]
fn what_a_holder_of_a_lock_has_changed_is_seen_by_the_next_one() {
    for (seed, consistency) in (9100..9112).zip(BOTH.into_iter().cycle()) {
        let all = mounts(seed, 2, consistency);
        let [one, two] = [0, 1].map(|at| all.mounts[at].clone());
        all.run(async {
            make(&one, "base", "before").await;
            make(&one, "journal", "undo").await;
            make(&one, "changed", "old").await;
            one.mkdir(me(), ROOT, b"directory", 0o755).await.expect("makes");
        });
        let [base, other] = [0, 1].map(|at| all.open(at, "base"));
        let open_all_the_time = all.open(1, "changed");
        all.run(base.lock(EXCLUSIVE, false)).expect("free");
        all.run(async {
            // All that the second mount knows of it is new.
            assert_eq!(names(&two).await.len(), 4);
            assert_eq!(text(&two, "journal").await.as_deref(), Ok("undo"));
            assert_eq!(open_all_the_time.text().await, "old");
            assert_eq!(two.lookup(me(), ROOT, b"directory").await.expect("there").attr.mode, 0o755);
            let waits = other.lock(if seed % 3 == 0 { SHARED } else { EXCLUSIVE }, true);
            let changes = async {
                let journal = number(&one, "journal").await.expect("there");
                one.unlink(me(), ROOT, b"journal").await.expect("removes");
                assert_eq!(one.lookup(me(), ROOT, b"journal").await.err(), Some(Errno::ENOENT));
                make(&one, "changed", "new").await;
                let mode = SetAttr { mode: Some(0o700), ..SetAttr::default() };
                let directory = number(&one, "directory").await.expect("there");
                one.setattr(me(), directory, None, mode).await.expect("changes");
                // One that is not closed, and one that nobody has locked.
                let made = opened(&one, "made").await;
                made.write("made").await.expect("is open");
                base.unlock().await.expect("is published");
                (journal, made)
            };
            let (locked, _) = join(waits, changes).await;
            locked.expect("is granted in the end");
            let missing = two.lookup(me(), ROOT, b"journal").await.err();
            assert_eq!(missing, Some(Errno::ENOENT), "seed {seed}");
            assert_eq!(text(&two, "changed").await.as_deref(), Ok("new"), "seed {seed}");
            assert_eq!(open_all_the_time.text().await, "new", "seed {seed}");
            assert_eq!(text(&two, "made").await.as_deref(), Ok("made"), "seed {seed}");
            let directory = two.lookup(me(), ROOT, b"directory").await.expect("there").attr;
            assert_eq!(directory.mode, 0o700, "seed {seed}");
            assert_eq!(names(&two).await, ["base", "changed", "directory", "made"], "seed {seed}");
        });
    }
}

/// An unlock brings to the ring what other programs have written too. One of them closed its file while the unlock waited until
/// the close had stored it: then there was no open file left, the unlock failed with `EBADF`, and SQLite's commit with an I/O error.
#[test]
fn a_file_that_is_closed_while_a_lock_is_given_up_fails_no_unlock() {
    for (seed, is_new) in (9140..9148).zip([true, false].into_iter().cycle()) {
        let all = mounts(seed, 2, Consistency::CloseToOpen);
        let [one, two] = [0, 1].map(|at| all.mounts[at].clone());
        all.run(make(&one, "base", "before"));
        if !is_new {
            all.run(make(&one, "beside", ""));
        }
        let [base, other] = [0, 1].map(|at| all.open(at, "base"));
        all.run(base.lock(EXCLUSIVE, false)).expect("free");
        all.run(async {
            let beside = opened(&one, "beside").await;
            beside.write("closed").await.expect("is open");
            let is_closed = Cell::new(false);
            let close = async {
                beside.close().await;
                is_closed.set(true);
            };
            let unlock = async {
                assert!(!is_closed.get(), "seed {seed}: the close is under way");
                base.unlock().await
            };
            let ((), unlocked) = join(close, unlock).await;
            assert_eq!(unlocked, Ok(()), "seed {seed}");
            assert_eq!(other.lock(EXCLUSIVE, false).await, Ok(()), "seed {seed}");
            assert_eq!(text(&two, "beside").await.as_deref(), Ok("closed"), "seed {seed}");
        });
    }
}

/// `O_EXCL`: what the owner of a lock file has changed is seen by the next one who makes it.
#[test]
fn what_the_owner_of_a_lock_file_has_removed_is_gone_for_the_next_one() {
    for (seed, consistency) in (9120..9128).zip(BOTH.into_iter().cycle()) {
        let all = mounts(seed, 2, consistency);
        let [one, two] = [0, 1].map(|at| all.mounts[at].clone());
        all.run(async {
            let work = one.mkdir(me(), ROOT, b"work", 0o755).await.expect("makes").attr.inode;
            let flags = OpenFlags::READ_WRITE;
            let (made, opened) = one.create(me(), work, b"item", 0o644, flags).await.expect("new");
            one.flush(made.attr.inode, opened.handle).await.expect("is stored");
            one.close(made.attr.inode, opened.handle).await.expect("closes");
            let there = two.lookup(me(), ROOT, b"work").await.expect("there").attr.inode;
            two.lookup(me(), there, b"item").await.expect("there");
            create_exclusively(&one, "lock").await.expect("free");
            one.unlink(me(), work, b"item").await.expect("removes");
            one.unlink(me(), ROOT, b"lock").await.expect("removes");
            while let Err(errno) = create_exclusively(&two, "lock").await {
                assert_eq!(errno, Errno::EEXIST);
            }
            let missing = two.lookup(me(), there, b"item").await.err();
            assert_eq!(missing, Some(Errno::ENOENT), "seed {seed}");
        });
    }
}

/// The usual check whether a lock file is still the one that was locked.
async fn holds(file: &Open, name: &str, by_links: bool) -> bool {
    match by_links {
        true => file.attr().await.nlink > 0,
        false => number(&file.fs, name).await == Ok(file.attr().await.inode),
    }
}

/// Takes a lock file, counts in another file and removes the lock file again.
async fn count_with_lock_file(fs: &SharedFs, env: &Env, by_links: bool) -> usize {
    let mut vain = 0;
    let lock = loop {
        let lock = opened(fs, "lock").await;
        lock.lock(EXCLUSIVE, true).await.expect("is granted in the end");
        if holds(&lock, "lock", by_links).await {
            break lock;
        }
        vain += 1;
        lock.close().await;
    };
    let count: u32 = text(fs, "count").await.expect("there").parse().expect("a number");
    sleep(&**env, Duration::from_millis(env.random_u64() % 40)).await;
    make(fs, "count", &format!("{}", count + 1)).await;
    fs.unlink(me(), ROOT, b"lock").await.expect("it is here");
    lock.close().await;
    vain
}

/// A lock file that is removed when it is given up: the inode number, or the number of links, tells whether it is
/// the one that others lock.
#[test]
fn a_lock_file_that_is_removed_when_it_is_given_up_has_one_holder() {
    for (seed, consistency) in (9140..9146).zip(BOTH.into_iter().cycle()) {
        let all = mounts(seed, 3, consistency);
        all.run(make(&all.mounts[0], "count", "0"));
        let env = all.ring.sim.outside();
        let programs = all.mounts.iter().map(|fs| {
            let (fs, env) = (fs.clone(), env.clone());
            async move {
                for _ in 0..8 {
                    count_with_lock_file(&fs, &env, seed % 3 == 0).await;
                }
            }
        });
        all.run(join_all(programs));
        assert_eq!(all.run(text(&all.mounts[1], "count")).as_deref(), Ok("24"), "seed {seed}");
        all.run(sleep(&*env, Duration::from_secs(20)));
        assert_eq!(all.run(names(&all.mounts[2])), ["count"], "seed {seed}");
    }
}

/// `flock -n FILE`, of a file that is not there yet: each mount locked a file of its own.
#[test]
fn a_new_file_is_locked_by_one_mount() {
    for (seed, consistency) in (9160..9168).zip(BOTH.into_iter().cycle()) {
        let all = mounts(seed, 2, consistency);
        let env = all.ring.sim.outside();
        for round in 0..4 {
            let name = format!("job {round}");
            let locked = [0, 1].map(|at| {
                let (fs, name, env) = (all.mounts[at].clone(), name.clone(), env.clone());
                async move {
                    let file = opened(&fs, &name).await;
                    sleep(&*env, Duration::from_millis(env.random_u64() % 50)).await;
                    let locked = file.lock(EXCLUSIVE, false).await;
                    (file, locked)
                }
            });
            let [one, two] = locked;
            let ((one, first), (two, second)) = all.run(join(one, two));
            let is_one = matches!((first, second), (Ok(()), Err(Errno::EAGAIN)))
                || matches!((first, second), (Err(Errno::EAGAIN), Ok(())));
            // A lease that is asked for by both at a time may be refused to both.
            let is_none = first.is_err() && second.is_err();
            assert!(is_one || is_none, "{first:?} {second:?}, seed {seed}");
            all.run(async {
                let (winner, other) = if first.is_ok() { (one, two) } else { (two, one) };
                winner.lock(EXCLUSIVE, true).await.expect("is granted in the end");
                winner.write(&name).await.expect("is locked");
                winner.close().await;
                other.lock(EXCLUSIVE, true).await.expect("is granted in the end");
                assert_eq!(other.text().await, name, "seed {seed}");
                assert_eq!(number(&other.fs, &name).await, Ok(other.inode), "seed {seed}");
                other.close().await;
            });
        }
        let all_names: Vec<String> = (0..4).map(|round| format!("job {round}")).collect();
        for fs in &all.mounts {
            assert_eq!(all.run(names(fs)), all_names, "seed {seed}");
        }
    }
}

/// What was written before the lock is kept beside.
#[test]
fn a_new_file_with_contents_becomes_the_one_that_has_its_name() {
    let all = mounts(9180, 2, Consistency::CloseToOpen);
    let [one, two] = [0, 1].map(|at| all.mounts[at].clone());
    all.run(async {
        let file = opened(&one, "file").await;
        let other = opened(&two, "file").await;
        file.lock(EXCLUSIVE, false).await.expect("free");
        other.write("before the lock").await.expect("is open");
        assert_eq!(other.lock(EXCLUSIVE, false).await, Err(Errno::EAGAIN));
        file.write("by the first").await.expect("is locked");
        file.unlock().await.expect("is published");
        other.lock(EXCLUSIVE, true).await.expect("is granted in the end");
        assert_eq!(other.text().await, "by the first");
        other.write("by the SECOND").await.expect("is locked");
        other.close().await;
        assert_eq!(text(&one, "file").await.as_deref(), Ok("by the SECOND"));
        let all_names = names(&one).await;
        assert_eq!(all_names.len(), 2, "{all_names:?}");
        assert_eq!(text(&one, &all_names[1]).await.as_deref(), Ok("before the lock"));
    });
}

/// As on any local file system: whoever has it open sees what was written last, and that no link is left.
#[test]
fn a_file_that_is_removed_under_its_lock_shows_its_last_contents_to_the_next_holder() {
    for (seed, consistency) in (9200..9206).zip(BOTH.into_iter().cycle()) {
        let all = mounts(seed, 3, consistency);
        all.run(make(&all.mounts[0], "file", "before"));
        let [one, two, three] = [0, 1, 2].map(|at| all.open(at, "file"));
        all.run(async {
            two.lock(EXCLUSIVE, false).await.expect("free");
            let waits = async {
                one.lock(EXCLUSIVE, true).await.expect("is granted in the end");
                (one.attr().await.nlink, one.text().await)
            };
            let removes = async {
                two.write("under the lock").await.expect("is locked");
                two.fs.unlink(me(), ROOT, b"file").await.expect("removes");
                assert_eq!(two.attr().await.nlink, 0);
                // Also what is written then.
                two.write("removed, locked").await.expect("is locked");
                two.close().await;
            };
            let (shown, ()) = join(waits, removes).await;
            assert_eq!(shown, (0, "removed, locked".to_owned()), "seed {seed}");
            one.close().await;
            three.lock(SHARED, true).await.expect("is granted in the end");
            assert_eq!((three.attr().await.nlink, &*three.text().await), (0, "removed, locked"));
            three.close().await;
        });
        let env = all.ring.sim.outside();
        all.run(sleep(&*env, Duration::from_secs(20)));
        assert!(all.run(names(&all.mounts[0])).is_empty(), "seed {seed}");
    }
}

/// A file with another name keeps it, also if the one that goes was locked.
#[test]
fn a_locked_file_with_two_names_loses_one() {
    let all = mounts(9220, 2, Consistency::CloseToOpen);
    let [fs, other] = [0, 1].map(|at| all.mounts[at].clone());
    all.run(make(&fs, "file", "before"));
    let file = all.open(0, "file");
    all.run(async {
        file.lock(EXCLUSIVE, false).await.expect("free");
        fs.link(me(), file.inode, ROOT, b"link").await.expect("links");
        fs.unlink(me(), ROOT, b"file").await.expect("removes");
        assert_eq!(file.attr().await.nlink, 1);
        file.write("AFTER ").await.expect("is locked");
        file.close().await;
        assert_eq!(text(&other, "link").await.as_deref(), Ok("AFTER "));
        assert_eq!(names(&other).await, ["link"]);
    });
}

/// The lock is lost with what was written under it; the name stays removed.
#[test]
fn a_file_that_was_removed_under_a_lock_that_is_lost_is_gone() {
    let all = mounts(9230, 1, Consistency::CloseToOpen);
    all.run(make(&all.mounts[0], "file", "before"));
    let file = all.open(0, "file");
    let env = all.ring.sim.outside();
    all.run(file.lock(EXCLUSIVE, false)).expect("free");
    all.run(file.fs.unlink(me(), ROOT, b"file")).expect("removes");
    all.ring.sim.partition(&[&all.hosts(0..1)]);
    all.run(sleep(&*env, Duration::from_secs(40)));
    all.ring.sim.heal();
    all.run(sleep(&*env, Duration::from_secs(60)));
    assert_eq!(all.run(file.write("x")), Err(Errno::EIO));
    assert!(all.run(names(&all.mounts[0])).is_empty());
    let status = all.run(file.fs.getxattr(ROOT, b"user.atoll.status")).expect("there");
    assert!(status.starts_with(b"ok"), "{}", String::from_utf8_lossy(&status));
}
