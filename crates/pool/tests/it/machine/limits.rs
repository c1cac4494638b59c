//! What people say of a pool's files while it is used: how many copies changes need, and down to which level directories are distributed.

use atoll_pool::RosterEdit;
use atoll_vfs::{Errno, InodeNumber, OpenFlags, RenameFlags, SetAttr, Writer};
use bytes::Bytes;
use futures_util::future::join_all;
use futures_util::{FutureExt, TryFutureExt};

use super::without_files::{block_on, pair, until};
use super::*;
use crate::workload::{ROOT, me, read_file_in, write_file_in};

/// The group that has a file.
fn group_of(inode: InodeNumber) -> u64 {
    // 12 bits are a slot, of which each group has 64.
    inode.0 >> 52 >> 6
}

#[test]
fn a_group_with_fewer_copies_than_changes_need_can_be_read_and_refuses_each_change() {
    let pool = pair(1);
    let _ends = ShutDown(pool.sim.clone());
    let fs = block_on(&pool, pool.mount(2));
    block_on(&pool, write_file_in(&*fs, ROOT, "file", "made by two"));
    let (file, open) = block_on(&pool, async {
        let file = fs.lookup(me(), ROOT, b"file").await.unwrap().attr.inode;
        fs.mkdir(me(), ROOT, b"dir", 0o755).await.unwrap();
        (file, fs.open(me(), file, OpenFlags(2)).await.unwrap().handle)
    });
    pool.set_min_copies(0, 2).unwrap();
    pool.run_for(Duration::from_secs(1));
    block_on(&pool, write_file_in(&*fs, ROOT, "with both", "taken"));
    pool.kill(1, InFlight::Lost);
    until(&pool, "one is left", |pool| {
        pool.stands(GroupNumber::FIRST).is_some_and(|stands| {
            stands.members.iter().filter(|member| member.is_member).count() == 1
        })
    });
    assert_eq!(block_on(&pool, read_file_in(&*fs, ROOT, "file")), "made by two");
    let mode = || SetAttr { mode: Some(0o600), ..SetAttr::default() };
    let refused = block_on(&pool, async {
        let data = Bytes::from_static(b"x");
        [
            fs.mkdir(me(), ROOT, b"new", 0o755).await.map(drop),
            fs.create(me(), ROOT, b"new", 0o644, OpenFlags(2)).await.map(drop),
            fs.symlink(me(), ROOT, b"new", b"file").await.map(drop),
            fs.link(me(), file, ROOT, b"new").await.map(drop),
            fs.unlink(me(), ROOT, b"file").await,
            fs.rmdir(me(), ROOT, b"dir").await,
            fs.rename(me(), ROOT, b"file", ROOT, b"new", RenameFlags::default()).await,
            fs.setattr(me(), file, None, mode()).await.map(drop),
            fs.write(Writer::At(me()), file, open, 0, data).await.map(drop),
            fs.open(me(), file, OpenFlags(2 | OpenFlags::TRUNCATE)).await.map(drop),
            fs.setxattr(me(), file, b"user.a", Bytes::new(), Default::default()).await,
        ]
    });
    for (at, refused) in refused.into_iter().enumerate() {
        assert_eq!(refused, Err(Errno::EROFS), "call {at}");
    }
    // People may say otherwise meanwhile.
    pool.set_min_copies(0, 1).unwrap();
    pool.run_for(Duration::from_secs(1));
    block_on(&pool, write_file_in(&*fs, ROOT, "by one", "taken"));
    pool.set_min_copies(0, 2).unwrap();
    pool.run_for(Duration::from_secs(1));
    let refused = block_on(&pool, fs.mkdir(me(), ROOT, b"new", 0o755)).map(drop);
    assert_eq!(refused, Err(Errno::EROFS));
    pool.restart(1);
    pool.settle();
    block_on(&pool, write_file_in(&*fs, ROOT, "again", "taken"));
    pool.compare().unwrap();
}

/// A member is gone, and the map that leaves it out is not decided yet: a call that comes meanwhile waits for that map, and goes by it.
#[test]
fn a_change_that_waits_until_a_dead_member_is_left_out_is_refused() {
    let pool = pair(1);
    let _ends = ShutDown(pool.sim.clone());
    pool.set_min_copies(0, 2).unwrap();
    pool.run_for(Duration::from_secs(1));
    let fs = block_on(&pool, pool.mount(0));
    block_on(&pool, write_file_in(&*fs, ROOT, "file", "made by two"));
    block_on(&pool, write_file_in(&*fs, ROOT, "mapped", "made by two"));
    let (file, open, mapped, mapping) = block_on(&pool, async {
        fs.mkdir(me(), ROOT, b"dir", 0o755).await.unwrap();
        let file = fs.lookup(me(), ROOT, b"file").await.unwrap().attr.inode;
        fs.setxattr(me(), file, b"user.a", Bytes::new(), Default::default()).await.unwrap();
        let mapped = fs.lookup(me(), ROOT, b"mapped").await.unwrap().attr.inode;
        let open = fs.open(me(), file, OpenFlags(2)).await.unwrap().handle;
        let mapping = fs.open(me(), mapped, OpenFlags(2)).await.unwrap().handle;
        fs.fsync(file, open, false).await.unwrap();
        (file, open, mapped, mapping)
    });
    // Without the witness no map is decided.
    pool.kill(2, InFlight::Lost);
    pool.kill(1, InFlight::Lost);
    pool.run_for(Duration::from_secs(1));
    let page = Arc::new(Mutex::new(None));
    {
        let (fs, page) = (fs.clone(), page.clone());
        pool.env().spawn(Box::pin(async move {
            let data = Bytes::from_static(b"MADE");
            let written = fs.write(Writer::Mapping, mapped, mapping, 0, data).await;
            *page.lock().unwrap() = Some(written);
        }));
    }
    let calls = {
        let fs = fs.clone();
        async move {
            let data = Bytes::from_static(b"x");
            let mode = SetAttr { mode: Some(0o600), ..SetAttr::default() };
            let size = SetAttr { size_bytes: Some(1), ..SetAttr::default() };
            join_all([
                fs.write(Writer::At(me()), file, open, 0, data.clone()).map_ok(drop).boxed(),
                fs.write(Writer::AtEnd(me()), file, open, 0, data.clone()).map_ok(drop).boxed(),
                fs.setattr(me(), file, None, mode).map_ok(drop).boxed(),
                fs.setattr(me(), file, None, size).map_ok(drop).boxed(),
                fs.setxattr(me(), file, b"user.b", Bytes::new(), Default::default()),
                fs.removexattr(me(), file, b"user.a"),
                fs.fallocate(me(), file, open, 0, 100, 0),
                fs.open(me(), file, OpenFlags(2 | OpenFlags::TRUNCATE)).map_ok(drop).boxed(),
                fs.mkdir(me(), ROOT, b"new", 0o755).map_ok(drop).boxed(),
                fs.create(me(), ROOT, b"made", 0o644, OpenFlags(2)).map_ok(drop).boxed(),
                fs.rename(me(), ROOT, b"dir", ROOT, b"renamed", RenameFlags::default()),
                fs.unlink(me(), ROOT, b"file"),
                // The client of a front end keeps the bytes, and sends them again.
                fs.write(Writer::Cached(me()), file, open, 0, data).map_ok(drop).boxed(),
            ])
            .await
        }
    };
    let answers: Arc<Mutex<Vec<Result<(), Errno>>>> = Arc::default();
    let kept = answers.clone();
    pool.env().spawn(Box::pin(async move {
        let all = calls.await;
        *kept.lock().unwrap() = all;
    }));
    pool.run_for(Duration::from_secs(2));
    assert!(answers.lock().unwrap().is_empty(), "they wait for the member");
    pool.restart(2);
    until(&pool, "the calls end", |_| !answers.lock().unwrap().is_empty());
    let refused = answers.lock().unwrap().clone();
    let (last, all) = refused.split_last().unwrap();
    assert_eq!(*last, Err(Errno::EAGAIN));
    for (at, refused) in all.iter().enumerate() {
        assert_eq!(*refused, Err(Errno::EROFS), "call {at}");
    }
    assert_eq!(block_on(&pool, read_file_in(&*fs, ROOT, "file")), "made by two");
    pool.run_for(Duration::from_secs(5));
    assert_eq!(*page.lock().unwrap(), None, "a page of a mapping waits");
    pool.restart(1);
    pool.settle();
    until(&pool, "the page is written", |_| page.lock().unwrap().is_some());
    assert_eq!(*page.lock().unwrap(), Some(Ok(4)));
    assert_eq!(block_on(&pool, read_file_in(&*fs, ROOT, "mapped")), "MADE by two");
    let data = Bytes::from_static(b"M");
    let written = block_on(&pool, fs.write(Writer::Cached(me()), file, open, 0, data));
    assert_eq!(written, Ok(1));
    pool.compare().unwrap();
}

#[test]
fn a_machine_that_is_alone_takes_changes_until_another_one_has_joined() {
    let pool = Pool::new(2, 1);
    let _ends = ShutDown(pool.sim.clone());
    pool.set_min_copies(0, 2).unwrap();
    pool.run_for(Duration::from_secs(1));
    let fs = block_on(&pool, pool.mount(0));
    block_on(&pool, write_file_in(&*fs, ROOT, "alone", "taken"));
    pool.join(0, 1).unwrap();
    pool.settle();
    block_on(&pool, write_file_in(&*fs, ROOT, "by two", "taken"));
    pool.compare().unwrap();
}

#[test]
fn each_group_refuses_changes_by_its_own_members() {
    let pool = Pool::with_copies(5, 2, 2, 4);
    let _ends = ShutDown(pool.sim.clone());
    pool.join_without_files(0, 4);
    pool.run_for(Duration::from_secs(20));
    assert!(pool.set_min_copies(0, 3).is_err(), "more than there are to be");
    pool.set_min_copies(0, 2).unwrap();
    assert!(pool.set_copies(0, 1).is_err(), "fewer than changes need");
    let fs = block_on(&pool, pool.mount(4));
    let made: Vec<InodeNumber> = block_on(&pool, async {
        let mut made = Vec::new();
        for number in 0..12 {
            let name = format!("directory {number}");
            let dir = fs.mkdir(me(), ROOT, name.as_bytes(), 0o755).await.unwrap().attr.inode;
            write_file_in(&*fs, dir, "file", "made").await;
            made.push(dir);
        }
        made
    });
    // A machine that not all groups have.
    let of = |at: usize| {
        let groups = pool.groups().into_iter().filter(|of| pool.members_of(*of).contains(&at));
        groups.map(|group| u64::from(group.number())).collect::<BTreeSet<_>>()
    };
    let all: BTreeSet<u64> = made.iter().map(|dir| group_of(*dir)).collect();
    let at = (0..4).find(|at| !all.is_subset(&of(*at)) && !all.is_disjoint(&of(*at)));
    let at = at.expect("such a machine");
    let short = of(at);
    pool.kill(at, InFlight::Lost);
    pool.run_for(Duration::from_secs(3));
    let mut refused = [0, 0];
    for dir in &made {
        let is_short = short.contains(&group_of(*dir));
        let tried = block_on(&pool, async {
            assert_eq!(read_file_in(&*fs, *dir, "file").await, "made");
            fs.mkdir(me(), *dir, b"new", 0o755).await.map(drop)
        });
        assert_eq!(tried, if is_short { Err(Errno::EROFS) } else { Ok(()) }, "{dir:?}");
        refused[usize::from(is_short)] += 1;
    }
    assert!(refused.iter().all(|count| *count > 0), "{refused:?}");
    pool.restart(at);
    pool.settle();
    for dir in &made {
        block_on(&pool, fs.mkdir(me(), *dir, b"late", 0o755)).unwrap();
    }
    pool.compare().unwrap();
}

#[test]
fn another_level_holds_for_directories_that_are_made_from_then_on() {
    let pool = Pool::with_copies(4, 3, 1, 4);
    let _ends = ShutDown(pool.sim.clone());
    let fs = block_on(&pool, pool.mount(0));
    let make = |parent: InodeNumber, prefix: &'static str| {
        let fs = fs.clone();
        async move {
            let mut groups = BTreeSet::new();
            let mut first = None;
            for number in 0..16 {
                let name = format!("{prefix}{number}");
                let made = fs.mkdir(me(), parent, name.as_bytes(), 0o755).await.unwrap();
                first.get_or_insert(made.attr.inode);
                groups.insert(group_of(made.attr.inode));
            }
            (groups, first.unwrap())
        }
    };
    let (groups, top) = block_on(&pool, make(ROOT, "top"));
    assert!(groups.len() > 1, "{groups:?}");
    let (groups, below) = block_on(&pool, make(top, "below"));
    assert_eq!(groups, [group_of(top)].into(), "deeper ones lie with their parent");
    pool.set_level(0, 2).unwrap();
    pool.run_for(Duration::from_secs(3));
    let (groups, _) = block_on(&pool, make(top, "now"));
    assert!(groups.len() > 1, "{groups:?}");
    let found = block_on(&pool, fs.lookup(me(), top, b"below0")).unwrap();
    assert_eq!(found.attr.inode, below, "it stays where it is");
    let (groups, _) = block_on(&pool, make(below, "deep"));
    assert_eq!(groups, [group_of(top)].into());
    pool.set_level(0, 0).unwrap();
    pool.run_for(Duration::from_secs(3));
    let (groups, _) = block_on(&pool, make(ROOT, "root"));
    assert_eq!(groups, [0].into());
    assert!(pool.set_level(0, 17).is_err());
    // The rules are the roster's, and so are there after a restart of all.
    let rules = pool.first().roster.rules();
    assert_eq!(rules.level, Some(0));
    (0..4).for_each(|at| pool.kill(at, InFlight::Lost));
    (0..4).for_each(|at| pool.restart(at));
    pool.settle();
    assert_eq!(pool.first().roster.rules(), rules);
    let again = pool.first().roster.with(&RosterEdit::Level(3)).unwrap();
    assert_eq!(again.rules().level, Some(3));
    let (groups, _) = block_on(&pool, make(ROOT, "after"));
    assert_eq!(groups, [0].into());
    pool.compare().unwrap();
}
