//! Contents: what is durable when, and what is told of it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_env::TokioRuntime;
use atoll_gateway::nfs::nfs3::{
    Attributes, CreateArgs, CreateHow, Created, FileHandle, FsInfoOk, PathConfOk, Procedure, Reply,
    SetAttributes, Stable, Status, Time, WccData,
};
use atoll_gateway::nfs::{Export, Squash};
use atoll_vfs::memory::MemoryFs;
use atoll_vfs::{
    Answer, AttrReply, Caller, DirEntry, Entry, Errno, FileKind, FileSystem, Handle, InodeNumber,
    OpenFlags, Opened, PersistentHandle, SetAttr, StatFs, Writer,
};
use bytes::Bytes;
use tokio::sync::{Barrier, oneshot};

use super::{Client, ROOT, at, memory, serve, unchanged};

#[tokio::test]
async fn what_is_written_is_read_and_its_end_is_told() {
    let client = Client::new(&serve(memory()), ROOT);
    let root = client.mount("/x").await.unwrap();
    let file = client.create(&root, "f", 0o644).await.unwrap();
    let written = client.write(&file, 3, b"abcdef", Stable::Unstable).await.unwrap();
    assert_eq!((written.count, written.committed), (6, Stable::Unstable));
    assert_eq!(client.commit(&file).await.unwrap().verifier, written.verifier);
    let synced = client.write(&file, 9, b"!", Stable::DataSync).await.unwrap();
    assert_eq!(synced.committed, Stable::FileSync);
    let part = client.read(&file, 0, 5).await.unwrap();
    assert_eq!((&part.data[..], part.is_end), (&b"\0\0\0ab"[..], false));
    let rest = client.read(&file, 5, 5).await.unwrap();
    assert_eq!((&rest.data[..], rest.is_end), (&b"cdef!"[..], true), "to its end and not beyond");
    for offset in [10, 11, u64::MAX, 1 << 63] {
        let beyond = client.read(&file, offset, 5).await.unwrap();
        assert_eq!((beyond.data.len(), beyond.is_end), (0, true), "{offset}");
    }
    assert_eq!(
        client.write(&file, u64::MAX - 1, b"abc", Stable::Unstable).await.unwrap_err(),
        Status::FBig
    );
    assert_eq!(
        client.write(&file, (1 << 63) - 1, b"abc", Stable::Unstable).await.unwrap_err(),
        Status::FBig
    );
    assert_eq!(client.read(&root, 0, 1).await.unwrap_err(), Status::IsDir);
    client.setattr(&file, SetAttributes { size: Some(4), ..unchanged() }).await.unwrap();
    assert_eq!(client.read(&file, 0, 100).await.unwrap().data, &b"\0\0\0a"[..]);
}

/// A file system in memory whose syncs can fail, whose reads and lookups can hang, and whose cookies count names.
pub(crate) struct Failing {
    fs: Arc<MemoryFs>,
    fails: AtomicBool,
    pub(crate) hangs: AtomicBool,
    /// Syncs and reads are not answered in time.
    times_out: AtomicBool,
    /// Changes of names and attributes that survive a crash.
    persisted: AtomicU64,
    /// Changes wait for the disk until so many do.
    together: Mutex<Option<Arc<Barrier>>>,
    /// Opens of files, and of directories.
    opens: AtomicU64,
    pub(crate) opendirs: AtomicU64,
    /// Names are not read on as long as this is set.
    pub(crate) holds_names: Arc<AtomicBool>,
    /// The next change of attributes or sync tells the first that it is made, and is answered after the second.
    gate: Mutex<Option<(oneshot::Sender<()>, oneshot::Receiver<()>)>>,
}

impl Failing {
    fn past_the_gate<T: Send + 'static>(&self, answered: Answer<T>) -> Answer<T> {
        let Some((made, answer)) = self.gate.lock().unwrap().take() else { return answered };
        Box::pin(async move {
            made.send(()).unwrap();
            answer.await.unwrap();
            answered.await
        })
    }
}

impl Failing {
    fn on_disk(&self) -> Result<(), Errno> {
        match (self.fails.load(Ordering::SeqCst), self.times_out.load(Ordering::SeqCst)) {
            (true, _) => Err(Errno::EIO),
            (_, true) => Err(Errno::ETIMEDOUT),
            _ => Ok(()),
        }
    }
}

impl FileSystem for Failing {
    fn lookup(&self, caller: Caller, parent: InodeNumber, name: &[u8]) -> Answer<Entry> {
        if self.hangs.load(Ordering::SeqCst) {
            return Box::pin(std::future::pending());
        }
        self.fs.lookup(caller, parent, name)
    }
    fn handle_of(&self, inode: InodeNumber) -> Answer<PersistentHandle> {
        self.fs.handle_of(inode)
    }
    fn by_handle(&self, caller: Caller, handle: &PersistentHandle) -> Answer<Entry> {
        self.fs.by_handle(caller, handle)
    }
    fn forget(&self, inode: InodeNumber, count: u64) {
        self.fs.forget(inode, count);
    }
    fn getattr(&self, inode: InodeNumber, handle: Option<Handle>) -> Answer<AttrReply> {
        self.fs.getattr(inode, handle)
    }
    fn setattr(
        &self,
        caller: Caller,
        inode: InodeNumber,
        handle: Option<Handle>,
        changes: SetAttr,
    ) -> Answer<AttrReply> {
        self.past_the_gate(self.fs.setattr(caller, inode, handle, changes))
    }
    fn readlink(&self, inode: InodeNumber) -> Answer<Bytes> {
        self.fs.readlink(inode)
    }
    fn mknod(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        kind: FileKind,
        mode: u32,
        rdev: u64,
    ) -> Answer<Entry> {
        self.fs.mknod(caller, parent, name, kind, mode, rdev)
    }
    fn open(&self, caller: Caller, inode: InodeNumber, flags: OpenFlags) -> Answer<Opened> {
        self.opens.fetch_add(1, Ordering::SeqCst);
        self.fs.open(caller, inode, flags)
    }
    fn read(&self, inode: InodeNumber, handle: Handle, offset: u64, len: u32) -> Answer<Bytes> {
        if self.hangs.load(Ordering::SeqCst) {
            return Box::pin(std::future::pending());
        }
        if self.times_out.load(Ordering::SeqCst) {
            return Box::pin(async { Err(Errno::ETIMEDOUT) });
        }
        self.fs.read(inode, handle, offset, len)
    }
    fn write(
        &self,
        writer: Writer,
        inode: InodeNumber,
        handle: Handle,
        offset: u64,
        data: Bytes,
    ) -> Answer<u32> {
        self.fs.write(writer, inode, handle, offset, data)
    }
    fn fsync(&self, inode: InodeNumber, handle: Handle, data_only: bool) -> Answer<()> {
        if let Err(errno) = self.on_disk() {
            return Box::pin(async move { Err(errno) });
        }
        self.past_the_gate(self.fs.fsync(inode, handle, data_only))
    }
    fn persist(&self, inodes: &[InodeNumber]) -> Answer<()> {
        assert!(!inodes.is_empty());
        let persisted = self.on_disk();
        if persisted.is_ok() {
            self.persisted.fetch_add(1, Ordering::SeqCst);
        }
        let together = self.together.lock().unwrap().clone();
        Box::pin(async move {
            if let Some(together) = together {
                together.wait().await;
            }
            persisted
        })
    }
    fn unlink(&self, caller: Caller, parent: InodeNumber, name: &[u8]) -> Answer<()> {
        self.fs.unlink(caller, parent, name)
    }
    fn close(&self, inode: InodeNumber, handle: Handle) -> Answer<()> {
        self.fs.close(inode, handle)
    }
    fn opendir(&self, caller: Caller, inode: InodeNumber) -> Answer<Opened> {
        self.opendirs.fetch_add(1, Ordering::SeqCst);
        self.fs.opendir(caller, inode)
    }
    fn readdir(
        &self,
        inode: InodeNumber,
        handle: Handle,
        cookie: u64,
        limit: usize,
        with_entries: bool,
    ) -> Answer<Vec<DirEntry>> {
        let all = self.fs.readdir(inode, handle, 0, usize::MAX, with_entries);
        let holds = self.holds_names.clone();
        Box::pin(async move {
            while holds.load(Ordering::SeqCst) {
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
            let counted = all.await?.into_iter().zip(1..);
            let counted = counted.map(|(entry, cookie)| DirEntry { cookie, ..entry });
            Ok(counted.skip(cookie as usize).take(limit).collect())
        })
    }
    fn closedir(&self, inode: InodeNumber, handle: Handle) -> Answer<()> {
        self.fs.closedir(inode, handle)
    }
    fn statfs(&self, inode: InodeNumber) -> Answer<StatFs> {
        let stat = self.fs.statfs(inode);
        Box::pin(async move {
            let time_granularity = Duration::from_millis(2500);
            Ok(StatFs { max_links: 7, max_file_bytes: 1 << 40, time_granularity, ..stat.await? })
        })
    }
}

pub(crate) fn failing() -> Arc<Failing> {
    Arc::new(Failing {
        fs: memory(),
        fails: AtomicBool::new(false),
        hangs: AtomicBool::new(false),
        times_out: AtomicBool::new(false),
        persisted: AtomicU64::new(0),
        together: Mutex::default(),
        opens: AtomicU64::new(0),
        opendirs: AtomicU64::new(0),
        holds_names: Arc::default(),
        gate: Mutex::default(),
    })
}

#[tokio::test]
async fn a_sync_that_fails_fails_the_commit_and_makes_clients_write_again() {
    let fs = failing();
    let client = Client::new(&serve(fs.clone()), ROOT);
    let root = client.mount("/x").await.unwrap();
    let file = client.create(&root, "f", 0o644).await.unwrap();
    let before = client.write(&file, 0, b"abc", Stable::Unstable).await.unwrap().verifier;
    fs.fails.store(true, Ordering::SeqCst);
    assert_eq!(client.commit(&file).await.unwrap_err(), Status::Io);
    fs.fails.store(false, Ordering::SeqCst);
    let again = client.write(&file, 0, b"abc", Stable::Unstable).await.unwrap().verifier;
    assert_ne!(again, before, "what was written before the failure may be lost");
    assert_eq!(client.commit(&file).await.unwrap().verifier, again);
    fs.fails.store(true, Ordering::SeqCst);
    assert_eq!(client.write(&file, 0, b"abc", Stable::FileSync).await.unwrap_err(), Status::Io);
    fs.fails.store(false, Ordering::SeqCst);
    assert_ne!(
        client.commit(&file).await.unwrap().verifier,
        again,
        "also what others wrote unstably"
    );
}

/// A file system may tell one caller alone that bytes are lost (`fsync(2)`).
#[tokio::test]
async fn a_sync_that_fails_during_a_commit_makes_its_client_write_again() {
    let fs = failing();
    let client = Arc::new(Client::new(&serve(fs.clone()), ROOT));
    let root = client.mount("/x").await.unwrap();
    let file = client.create(&root, "f", 0o644).await.unwrap();
    let written = client.write(&file, 0, b"abc", Stable::Unstable).await.unwrap();
    let ((made, is_made), (answer, answered)) = (oneshot::channel(), oneshot::channel());
    *fs.gate.lock().unwrap() = Some((made, answered));
    let (one, committed) = (client.clone(), file.clone());
    let commit = tokio::spawn(async move { one.commit(&committed).await });
    is_made.await.unwrap();
    fs.fails.store(true, Ordering::SeqCst);
    assert_eq!(client.write(&file, 9, b"x", Stable::FileSync).await.unwrap_err(), Status::Io);
    answer.send(()).unwrap();
    assert_ne!(commit.await.unwrap().unwrap().verifier, written.verifier);
}

/// Or the first client would take the other's change for its own, and keep bytes that are no longer the file's.
#[tokio::test]
async fn no_others_change_of_contents_lies_between_what_a_file_was_like_before_and_after() {
    let truncation = async |client: Client, root: FileHandle, _: FileHandle| {
        let how = CreateHow::Unchecked(SetAttributes { size: Some(0), ..unchanged() });
        let args = CreateArgs { at: at(&root, "f"), how };
        let made: Reply<Created, WccData> = client.call(Procedure::Create, &args).await;
        made.unwrap();
    };
    let write = async |client: Client, _: FileHandle, file: FileHandle| {
        client.write(&file, 0, b"longer", Stable::Unstable).await.unwrap();
    };
    for truncates in [false, true] {
        let fs = failing();
        let service = serve(fs.clone());
        let client = Client::new(&service, ROOT);
        let root = client.mount("/x").await.unwrap();
        let file = client.create(&root, "f", 0o644).await.unwrap();
        client.write(&file, 0, b"abc", Stable::Unstable).await.unwrap();
        let ((made, is_made), (answer, answered)) = (oneshot::channel(), oneshot::channel());
        *fs.gate.lock().unwrap() = Some((made, answered));
        let changes = SetAttributes { mode: Some(0o600), ..unchanged() };
        let (one, changed) = (Client::new(&service, ROOT), file.clone());
        let set = tokio::spawn(async move { one.setattr(&changed, changes).await });
        is_made.await.unwrap();
        let other = Client::new(&service, ROOT);
        let changing = tokio::spawn(async move {
            match truncates {
                true => truncation(other, root, file).await,
                false => write(other, root, file).await,
            }
        });
        // As far as it comes.
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        answer.send(()).unwrap();
        let wcc = set.await.unwrap().unwrap();
        changing.await.unwrap();
        let after = wcc.after.unwrap();
        assert_eq!((wcc.before.unwrap().size, after.size, after.mode), (3, 3, 0o600));
    }
}

#[tokio::test]
async fn what_a_file_was_like_before_is_not_told_where_others_change_it_too() {
    let fs = Arc::new(MemoryFs::new(Arc::new(TokioRuntime::current())));
    let client = Client::new(&serve(fs), ROOT);
    let root = client.mount("/x").await.unwrap();
    let file = client.create(&root, "f", 0o644).await.unwrap();
    let wcc = client.setattr(&file, SetAttributes { mode: Some(0o600), ..unchanged() }).await;
    let wcc = wcc.unwrap();
    assert_eq!((wcc.before, wcc.after.unwrap().mode), (None, 0o600));
    let wcc = client.remove(&root, "f").await.unwrap();
    assert!(wcc.before.is_none() && wcc.after.is_some());
}

#[tokio::test]
async fn a_client_is_told_the_limits_of_the_file_system() {
    let client = Client::new(&serve(failing()), ROOT);
    let root = client.mount("/x").await.unwrap();
    let info: Reply<FsInfoOk, Option<Attributes>> = client.call(Procedure::FsInfo, &root).await;
    let info = info.unwrap();
    assert_eq!(info.max_file_bytes, 1 << 40);
    assert_eq!(info.time_delta, Time { seconds: 2, nseconds: 500_000_000 });
    let limits: Reply<PathConfOk, Option<Attributes>> =
        client.call(Procedure::PathConf, &root).await;
    let limits = limits.unwrap();
    assert_eq!((limits.link_max, limits.name_max), (7, 255));
}

#[tokio::test]
async fn a_file_that_would_be_too_long_is_not_made() {
    let client = Client::new(&serve(failing()), ROOT);
    let root = client.mount("/x").await.unwrap();
    let wanted = SetAttributes { size: Some((1 << 40) + 1), ..unchanged() };
    for how in [CreateHow::Guarded(wanted.clone()), CreateHow::Unchecked(wanted.clone())] {
        let args = CreateArgs { at: at(&root, "f"), how };
        let made: Reply<Created, WccData> = client.call(Procedure::Create, &args).await;
        assert_eq!(made.unwrap_err().0, Status::FBig);
        assert_eq!(client.lookup(&root, "f").await.unwrap_err(), Status::NoEnt);
    }
    let how = CreateHow::Guarded(SetAttributes { size: Some(1 << 40), ..wanted });
    let args = CreateArgs { at: at(&root, "f"), how };
    let made: Reply<Created, WccData> = client.call(Procedure::Create, &args).await;
    assert_eq!(made.unwrap().attributes.unwrap().size, 1 << 40);
}

#[tokio::test(start_paused = true)]
async fn a_call_that_changes_nothing_is_answered_in_time_and_a_change_is_not_given_up() {
    let fs = failing();
    let client = Client::new(&serve(fs.clone()), ROOT);
    let root = client.mount("/x").await.unwrap();
    let file = client.create(&root, "f", 0o644).await.unwrap();
    fs.hangs.store(true, Ordering::SeqCst);
    assert_eq!(client.read(&file, 0, 1).await.unwrap_err(), Status::Jukebox);
    fs.hangs.store(false, Ordering::SeqCst);
    assert!(client.read(&file, 0, 1).await.is_ok());
}

#[tokio::test]
async fn a_change_of_names_or_attributes_is_answered_once_it_survives_a_crash() {
    let fs = failing();
    let service = serve(fs.clone());
    let client = Client::new(&service, ROOT);
    let root = client.mount("/x").await.unwrap();
    let file = client.create(&root, "f", 0o644).await.unwrap();
    assert_eq!(fs.persisted.load(Ordering::SeqCst), 1);
    client.setattr(&file, SetAttributes { mode: Some(0o600), ..unchanged() }).await.unwrap();
    client.remove(&root, "f").await.unwrap();
    assert_eq!(fs.persisted.load(Ordering::SeqCst), 3);
    // A disk that fails is told.
    fs.fails.store(true, Ordering::SeqCst);
    assert_eq!(client.create(&root, "g", 0o644).await.unwrap_err(), Status::Io);
    let early = Export { answers_early: true, ..Export::local("/x", 9, fs.clone()) };
    service.add(Export { squash: Squash::None, ..early });
    client.create(&root, "h", 0o644).await.unwrap();
    assert_eq!(fs.persisted.load(Ordering::SeqCst), 3, "nobody waited for the disk");
}

/// A file system that says that it did not get an answer in time, as a volume without its ring.
#[tokio::test]
async fn what_may_be_made_twice_is_to_be_tried_again() {
    let fs = failing();
    let client = Client::new(&serve(fs.clone()), ROOT);
    let root = client.mount("/x").await.unwrap();
    let file = client.create(&root, "f", 0o644).await.unwrap();
    client.write(&file, 0, b"x", Stable::Unstable).await.unwrap();
    fs.times_out.store(true, Ordering::SeqCst);
    assert_eq!(client.commit(&file).await.unwrap_err(), Status::Jukebox);
    assert_eq!(client.read(&file, 0, 1).await.unwrap_err(), Status::Jukebox);
    assert_eq!(client.create(&root, "g", 0o644).await.unwrap_err(), Status::Io);
}

/// A volume that is only read shows an open file as it was when it was opened: under the times of a newer version, a client would keep
/// the old bytes.
#[tokio::test]
async fn a_file_that_has_changed_is_opened_anew_for_reading() {
    let fs = failing();
    let client = Client::new(&serve(fs.clone()), ROOT);
    let root = client.mount("/x").await.unwrap();
    let file = client.create(&root, "f", 0o644).await.unwrap();
    for _ in 0..3 {
        client.read(&file, 0, 10).await.unwrap();
    }
    assert_eq!(fs.opens.load(Ordering::SeqCst), 1, "it is kept open");
    let me = Caller::default();
    let there = fs.fs.lookup(me, InodeNumber::ROOT, b"f").await.unwrap().attr.inode;
    let longer = SetAttr { size_bytes: Some(5), ..SetAttr::default() };
    fs.fs.setattr(me, there, None, longer).await.unwrap();
    assert_eq!(client.read(&file, 0, 10).await.unwrap().data, &[0; 5][..]);
    assert_eq!(fs.opens.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn a_commit_that_loses_nothing_leaves_the_verifier_as_it_is() {
    let client = Client::new(&serve(memory()), ROOT);
    let root = client.mount("/x").await.unwrap();
    let file = client.create(&root, "f", 0o644).await.unwrap();
    let before = client.write(&file, 0, b"x", Stable::Unstable).await.unwrap().verifier;
    client.commit(&root).await.unwrap_err();
    assert_eq!(client.commit(&file).await.unwrap().verifier, before);
}

#[tokio::test(start_paused = true)]
async fn changes_of_one_directory_wait_for_the_disk_together() {
    let fs = failing();
    let client = Client::new(&serve(fs.clone()), ROOT);
    let root = client.mount("/x").await.unwrap();
    client.create(&root, "removed", 0o644).await.unwrap();
    *fs.together.lock().unwrap() = Some(Arc::new(Barrier::new(3)));
    let changes = async {
        tokio::join!(
            client.create(&root, "f", 0o644),
            client.create(&root, "g", 0o644),
            client.remove(&root, "removed"),
        )
    };
    let made =
        tokio::time::timeout(Duration::from_secs(60), changes).await.expect("they wait at once");
    assert!(made.0.is_ok() && made.1.is_ok() && made.2.is_ok());
}
