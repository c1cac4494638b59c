//! Files that are open and lose their last name: "unlinked open files live on", over the death of the primary, too.

use atoll_vfs::{Errno, Handle, InodeNumber, OpenFlags, RenameFlags, Writer};
use bytes::Bytes;

use super::*;
use crate::workload::{ROOT, for_each_seed, me};

/// Clients have opened their files again at a new primary.
const REOPENED: Duration = Duration::from_secs(11);

type OpenFile = (InodeNumber, Handle);

async fn make(fs: &dyn FileSystem, name: &[u8], text: &'static str) -> OpenFile {
    let (entry, opened) = fs.create(me(), ROOT, name, 0o644, OpenFlags::READ_WRITE).await.unwrap();
    let file = (entry.attr.inode, opened.handle);
    write(fs, file, 0, text).await;
    file
}

async fn write(fs: &dyn FileSystem, (inode, handle): OpenFile, offset: u64, text: &'static str) {
    let data = Bytes::from_static(text.as_bytes());
    let written = fs.write(Writer::At(me()), inode, handle, offset, data).await;
    assert_eq!(written, Ok(text.len() as u32));
}

async fn read(fs: &dyn FileSystem, (inode, handle): OpenFile) -> Result<String, Errno> {
    let bytes = fs.read(inode, handle, 0, 1000).await?;
    Ok(String::from_utf8(bytes.to_vec()).unwrap())
}

impl Group {
    /// Three members, and a mount on the machine of one that is not the primary. The time is over in which any file may be open.
    fn with_mount(seed: u64) -> (Group, Arc<RemoteFs>, [usize; 3]) {
        let mut group = Group::new(seed, 1);
        group.run_for(REOPENED);
        let roles = group.roles();
        let fs = group.mount(roles[1]);
        (group, fs, roles)
    }

    /// How many names there are in D of files without names, on each member, when all have made all changes.
    fn open_names(&mut self) -> Vec<usize> {
        self.run_for(Duration::from_millis(500));
        let count = |at: usize| {
            let tree = self.sim.block_on(LONG, plain_tree(&self.disks[at])).unwrap().unwrap();
            tree.keys().filter(|path| path.to_string().contains("/open-")).count()
        };
        self.all().into_iter().map(count).collect()
    }

    fn close_and_wait(&mut self, fs: &RemoteFs, (inode, handle): OpenFile) {
        self.run(fs.close(inode, handle)).unwrap();
        self.run_for(Duration::from_secs(1));
    }
}

/// POOL: "Open files that were unlinked stay until their leases end", on all members.
#[test]
fn a_file_without_a_name_outlives_the_primary() {
    for_each_seed(6, |seed| {
        let (mut group, fs, [first, ..]) = Group::with_mount(seed);
        let file = group.run(make(&*fs, b"file", "before"));
        group.run(fs.unlink(me(), ROOT, b"file")).unwrap();
        assert_eq!(group.run(fs.lookup(me(), ROOT, b"file")).err(), Some(Errno::ENOENT));
        assert_eq!(group.run(fs.getattr(file.0, Some(file.1))).unwrap().attr.nlink, 0);
        assert_eq!(group.open_names(), [1, 1, 1]);
        group.run(write(&*fs, file, 6, " and after"));
        match seed % 3 {
            0 => group.kill(first, InFlight::Lost),
            1 => group.lose_power(first, Loss::Ordered, seed),
            // A power failure of all, and what was not synced may be gone: the client sends it again.
            _ => group.all().into_iter().for_each(|at| group.lose_power(at, Loss::Ordered, seed)),
        }
        if seed % 3 == 2 {
            group.all().into_iter().for_each(|at| group.restart(at));
        }
        assert_eq!(group.run(read(&*fs, file)).as_deref(), Ok("before and after"), "seed {seed}");
        group.run(write(&*fs, file, 0, "BEFORE"));
        assert_eq!(group.run(fs.getattr(file.0, Some(file.1))).unwrap().attr.nlink, 0);
        let linked = group.run(fs.link(me(), file.0, ROOT, b"again"));
        assert_eq!(linked.err(), Some(Errno::ENOENT), "it has no name, as on Linux");
        if seed % 3 != 2 {
            group.restart(first);
        }
        group.settle_and_compare()?;
        group.run_for(REOPENED);
        assert_eq!(group.open_names(), [1, 1, 1]);
        group.close_and_wait(&fs, file);
        assert_eq!(group.open_names(), [0, 0, 0]);
        assert_eq!(group.run(fs.getattr(file.0, None)).err(), Some(Errno::ESTALE));
        group.settle_and_compare()
    });
}

/// Another client removes what an idle one has open, after the primary that knew of it has died.
#[test]
fn a_new_primary_hears_in_time_what_idle_clients_have_open() {
    for (seed, wait) in [(1, Duration::ZERO), (2, Duration::from_secs(7)), (3, REOPENED)] {
        let (mut group, fs, [first, _, third]) = Group::with_mount(seed);
        let file = group.run(make(&*fs, b"file", "still there"));
        group.kill(first, InFlight::Lost);
        let other = group.mount(third);
        group.run_for(wait);
        group.run(other.unlink(me(), ROOT, b"file")).unwrap();
        group.restart(first);
        group.run_for(Duration::from_secs(60));
        assert_eq!(group.run(read(&*fs, file)).as_deref(), Ok("still there"), "after {wait:?}");
        group.close_and_wait(&fs, file);
        assert_eq!(group.open_names(), [0, 0, 0]);
        group.settle_and_compare().unwrap();
    }
}

#[test]
fn a_file_that_another_one_replaces_outlives_the_primary() {
    for_each_seed(4, |seed| {
        let (mut group, fs, [first, ..]) = Group::with_mount(seed);
        let file = group.run(make(&*fs, b"file", "old"));
        let new = group.run(make(&*fs, b"new", "new"));
        group.run(fs.close(new.0, new.1)).unwrap();
        group.run(fs.rename(me(), ROOT, b"new", ROOT, b"file", RenameFlags::default())).unwrap();
        assert_eq!(group.run(fs.getattr(file.0, Some(file.1))).unwrap().attr.nlink, 0);
        group.kill(first, InFlight::Late);
        assert_eq!(group.run(read(&*fs, file)).as_deref(), Ok("old"));
        let found = group.run(fs.lookup(me(), ROOT, b"file")).unwrap();
        assert_eq!((found.attr.inode, found.attr.nlink), (new.0, 1));
        group.restart(first);
        group.run_for(REOPENED);
        group.close_and_wait(&fs, file);
        assert_eq!(group.open_names(), [0, 0, 0]);
        group.settle_and_compare()
    });
}

/// One of two names is no last one; and the open name counts for nobody.
#[test]
fn a_file_with_another_name_gets_no_open_name() {
    let (mut group, fs, _) = Group::with_mount(1);
    let file = group.run(make(&*fs, b"one", "text"));
    group.run(fs.link(me(), file.0, ROOT, b"two")).unwrap();
    group.run(fs.unlink(me(), ROOT, b"one")).unwrap();
    assert_eq!(group.open_names(), [0, 0, 0]);
    assert_eq!(group.run(fs.getattr(file.0, None)).unwrap().attr.nlink, 1);
    group.run(fs.unlink(me(), ROOT, b"two")).unwrap();
    assert_eq!(group.open_names(), [1, 1, 1]);
    group.close_and_wait(&fs, file);
    assert_eq!(group.open_names(), [0, 0, 0]);
    group.settle_and_compare().unwrap();
}

/// A removal is one change, whether or not the file is open; the end of its last open is another one.
#[test]
fn the_open_name_costs_a_change_when_the_file_is_closed() {
    let (mut group, fs, [first, ..]) = Group::with_mount(1);
    let changes = |group: &Group| group.status(first).members[0].applied;
    let (open, closed) = (group.run(make(&*fs, b"a", "")), group.run(make(&*fs, b"b", "")));
    group.run(fs.close(closed.0, closed.1)).unwrap();
    let before = changes(&group);
    group.run(fs.unlink(me(), ROOT, b"b")).unwrap();
    assert_eq!(changes(&group), before + 1);
    group.run(fs.unlink(me(), ROOT, b"a")).unwrap();
    assert_eq!(changes(&group), before + 2);
    group.close_and_wait(&fs, open);
    assert_eq!(changes(&group), before + 3);
    group.settle_and_compare().unwrap();
}

/// Nobody comes back for it: the name goes when the session of its client would have ended.
#[test]
fn what_nobody_opens_again_is_removed() {
    let (mut group, fs, [first, ..]) = Group::with_mount(1);
    let _file = group.run(make(&*fs, b"file", "text"));
    group.run(fs.unlink(me(), ROOT, b"file")).unwrap();
    // Its client ends with the primary, and tells nobody.
    group.kill(first, InFlight::Lost);
    drop(fs);
    group.restart(first);
    group.run_for(Duration::from_secs(500));
    assert_eq!(group.open_names(), [1, 1, 1]);
    group.run_for(Duration::from_secs(150));
    assert_eq!(group.open_names(), [0, 0, 0]);
    group.settle_and_compare().unwrap();
}

/// A member that is given all files is given these, too.
#[test]
fn a_new_member_has_files_without_names() {
    const FOURTH: usize = 3;
    let mut group = Group::of(4, 1, 1);
    group.run_for(REOPENED);
    let fs = group.mount(FOURTH);
    let file = group.run(make(&*fs, b"file", "text"));
    group.run(fs.unlink(me(), ROOT, b"file")).unwrap();
    // The log does not reach back to it.
    for _ in 0..520 {
        group.run(fs.mkdir(me(), ROOT, b"again", 0o755)).unwrap();
        group.run(fs.rmdir(me(), ROOT, b"again")).unwrap();
    }
    group.wipe(FOURTH);
    group.restart(FOURTH);
    group.await_quiet().unwrap();
    assert_eq!(group.open_names(), [1, 1, 1, 1]);
    group.compare(Compared::default()).unwrap();
    let first = group.primary().unwrap();
    group.kill(first, InFlight::Lost);
    assert_eq!(group.run(read(&*fs, file)).as_deref(), Ok("text"));
    group.restart(first);
    group.await_quiet().unwrap();
    group.run_for(REOPENED);
    group.close_and_wait(&fs, file);
    assert_eq!(group.open_names(), [0, 0, 0, 0]);
    group.settle_and_compare().unwrap();
}
