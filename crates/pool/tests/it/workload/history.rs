//! Every call of a file system with its answer, and when it began and ended: what [`names`](super::names) and
//! [`contents`](super::contents) judge.
//!
//! A [`RecordedFs`] is the file system of one client within one [`Arena`]: a directory, or some names of one, that looks like a
//! whole file system. Each arena's names are judged by themselves, so that the search for an order of its calls is short.
//!
//! An answer is one of three things. *Done*: the change is there. *Refused*: the change is not there and never will be. *Unknown*
//! ([`Errno::EIO`], [`Errno::ETIMEDOUT`], or no answer): it may be made at any later time, until the test says by
//! [`History::settled`] that all such calls have been made or never will be.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use atoll_env::{Env, Instant};
use atoll_vfs::{
    Answer, Attr, AttrReply, Caller, CreateVerifier, DirEntry, Entry, Errno, FileKind, FileSystem,
    Handle, InodeNumber, OpenFlags, Opened, RenameFlags, SetAttr, StatFs, Writer, XattrFlags,
};
use bytes::Bytes;

use super::{ROOT, me};

/// A file within an arena: [`ROOT`] is the arena's directory.
pub(crate) type Place = (InodeNumber, Bytes);

/// A call, as far as it is judged.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Called {
    Lookup(Place),
    List(InodeNumber),
    Make { at: Place, kind: FileKind, mode: u32, target: Bytes },
    Link { inode: InodeNumber, at: Place },
    Unlink(Place),
    Rmdir(Place),
    Rename { from: Place, to: Place, flags: RenameFlags },
    GetAttr(InodeNumber),
    SetAttr(InodeNumber, SetAttr),
    Open(InodeNumber),
    Read { inode: InodeNumber, offset: u64, len: u32 },
    Write { inode: InodeNumber, offset: u64, data: Bytes },
    Sync(InodeNumber),
    ReadLink(InodeNumber),
    GetXattr(InodeNumber, Bytes),
    SetXattr(InodeNumber, Bytes, Bytes),
    RemoveXattr(InodeNumber, Bytes),
    ListXattr(InodeNumber),
}

impl Called {
    /// Whether it changes names.
    pub(crate) fn changes_names(&self) -> bool {
        matches!(
            self,
            Called::Make { .. }
                | Called::Link { .. }
                | Called::Unlink(_)
                | Called::Rmdir(_)
                | Called::Rename { .. }
        )
    }

    /// The file whose bytes or attributes it is about.
    pub(crate) fn inode(&self) -> Option<InodeNumber> {
        match self {
            Called::GetAttr(inode)
            | Called::SetAttr(inode, _)
            | Called::Open(inode)
            | Called::Read { inode, .. }
            | Called::Write { inode, .. }
            | Called::Sync(inode)
            | Called::ReadLink(inode)
            | Called::GetXattr(inode, _)
            | Called::SetXattr(inode, ..)
            | Called::RemoveXattr(inode, _)
            | Called::ListXattr(inode) => Some(*inode),
            _ => None,
        }
    }
}

/// What a call answered.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Reply {
    Nothing,
    Attr(Attr),
    Names(BTreeMap<Bytes, (InodeNumber, FileKind)>),
    Bytes(Bytes),
    Written(u32),
    Xattrs(Vec<Bytes>),
}

/// A call and its answer.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) client: u32,
    pub(crate) arena: usize,
    pub(crate) called: Called,
    /// Numbers of moments: a call that ended before another began has a lower one.
    pub(crate) begun: u64,
    pub(crate) began_at: Instant,
    pub(crate) ended: Option<u64>,
    pub(crate) answer: Option<Result<Reply, Errno>>,
}

impl Call {
    /// What is known of its outcome; none: it may be made, now or later.
    pub(crate) fn outcome(&self) -> Option<&Result<Reply, Errno>> {
        self.answer.as_ref().filter(|answer| !matches!(answer, Err(Errno::EIO | Errno::ETIMEDOUT)))
    }

    /// A line about it.
    pub(crate) fn line(&self) -> String {
        let at = self.began_at.as_nanos() as f64 / 1e9;
        let answer = match &self.answer {
            None => "no answer".to_owned(),
            Some(Ok(Reply::Attr(attr))) => format!(
                "file {:x}: {:?} {:o} {}:{}, {} names, {} bytes, mtime {}.{:09}",
                attr.inode.0,
                attr.kind,
                attr.mode,
                attr.uid,
                attr.gid,
                attr.nlink,
                attr.size_bytes,
                attr.mtime.secs,
                attr.mtime.nanos
            ),
            Some(Ok(reply)) => cut_off(format!("{reply:?}")),
            Some(Err(errno)) => format!("{errno:?}"),
        };
        let called = cut_off(format!("{:?}", self.called));
        let ended = self.ended.map_or_else(|| "-".to_owned(), |ended| ended.to_string());
        format!("{}..{ended} ({at:.3} s) client {}: {called} = {answer}", self.begun, self.client)
    }
}

/// Bytes make long lines.
fn cut_off(line: String) -> String {
    const MOST: usize = 300;
    if line.len() <= MOST {
        return line;
    }
    format!("{}...", line.chars().take(MOST).collect::<String>())
}

/// What happened beside the calls.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mark {
    /// Calls without a known outcome have been made or never will be.
    Settled,
    /// A machine lost power: bytes, lengths and extended attributes that were not synced may be older ones again.
    PowerLost,
}

/// One moment of a history.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Moment {
    /// The call with this index begins.
    Begin(usize),
    /// It ends.
    End(usize),
    Mark(Mark),
}

#[derive(Default)]
struct Events {
    calls: Vec<Call>,
    moments: Vec<Moment>,
    stamps: u64,
}

/// All calls of a test. Clones are the same one, which outlives the clients' hosts.
#[derive(Clone)]
pub(crate) struct History {
    env: Env,
    events: Arc<Mutex<Events>>,
}

impl History {
    /// An empty one with the clock of `env`.
    pub(crate) fn new(env: Env) -> History {
        History { env, events: Arc::default() }
    }

    fn events(&self) -> MutexGuard<'_, Events> {
        self.events.lock().expect("no holder of this lock panics")
    }

    /// Says that the calls in flight and those whose outcome nobody knows have been made or never will be: their server and
    /// its machine's late calls are gone, and so are the clients that would repeat them.
    pub(crate) fn settled(&self) {
        self.events().moments.push(Moment::Mark(Mark::Settled));
    }

    /// Says that a machine lost power.
    pub(crate) fn power_lost(&self) {
        self.events().moments.push(Moment::Mark(Mark::PowerLost));
    }

    /// A number that no other write has.
    pub(crate) fn next_stamp(&self) -> u64 {
        let mut events = self.events();
        events.stamps += 1;
        events.stamps
    }

    /// The calls, and what happened in which order.
    pub(crate) fn read(&self) -> (Vec<Call>, Vec<Moment>) {
        let events = self.events();
        (events.calls.clone(), events.moments.clone())
    }

    /// Edits what was recorded, to show that a false history is found.
    pub(crate) fn falsify(&self, edit: impl FnMut(&mut Call)) {
        self.events().calls.iter_mut().for_each(edit);
    }

    /// A call begins.
    pub(crate) fn begin(&self, client: u32, arena: usize, called: Called) -> usize {
        let began_at = self.env.now();
        let mut events = self.events();
        let (index, begun) = (events.calls.len(), events.moments.len() as u64);
        events.moments.push(Moment::Begin(index));
        let (ended, answer) = (None, None);
        events.calls.push(Call { client, arena, called, begun, began_at, ended, answer });
        index
    }

    /// A call has its answer.
    pub(crate) fn end(&self, index: usize, answer: Result<Reply, Errno>) {
        let mut events = self.events();
        let ended = events.moments.len() as u64;
        events.moments.push(Moment::End(index));
        let call = &mut events.calls[index];
        (call.ended, call.answer) = (Some(ended), Some(answer));
    }
}

/// A directory, or those of its names that begin with a prefix, as a file system of its own.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Arena {
    /// No other arena of the history has it.
    pub(crate) number: usize,
    pub(crate) dir: InodeNumber,
    pub(crate) prefix: &'static str,
}

/// The file system of one client within one arena, which records what is called. Files of other arenas are not reached.
///
/// Recorded are the calls that steps make. Writes are at an offset; `fallocate` and opens that truncate are refused.
#[derive(Clone)]
pub(crate) struct RecordedFs {
    fs: Arc<dyn FileSystem>,
    history: History,
    client: u32,
    arena: Arena,
    persists: bool,
    /// When open directories were opened: their names are those of that moment.
    listings: Arc<Mutex<BTreeMap<Handle, usize>>>,
}

impl RecordedFs {
    pub(crate) fn new(
        fs: Arc<dyn FileSystem>,
        history: &History,
        client: u32,
        arena: &Arena,
    ) -> RecordedFs {
        let (history, arena) = (history.clone(), arena.clone());
        RecordedFs { fs, history, client, arena, persists: false, listings: Arc::default() }
    }

    /// Answers after [`FileSystem::persist`], as NFS does with changes. Here also what only looks waits for it: otherwise a client
    /// could see a change of another one that has no answer yet, and that a loss of power then takes.
    pub(crate) fn persisting(self) -> RecordedFs {
        RecordedFs { persists: true, ..self }
    }

    fn inode(&self, inode: InodeNumber) -> InodeNumber {
        if inode == ROOT { self.arena.dir } else { inode }
    }

    fn name(&self, dir: InodeNumber, name: &[u8]) -> Vec<u8> {
        let prefix = if dir == ROOT { self.arena.prefix.as_bytes() } else { b"" };
        [prefix, name].concat()
    }

    fn record<T: Send + 'static>(
        &self,
        called: Called,
        call: impl FnOnce(&dyn FileSystem) -> Answer<T>,
        reply: impl FnOnce(&T) -> Reply + Send + 'static,
    ) -> Answer<T> {
        let persists = self.persists;
        let index = self.history.begin(self.client, self.arena.number, called);
        let (fs, history) = (self.fs.clone(), self.history.clone());
        let answer = call(&*fs);
        Box::pin(async move {
            let mut answer = answer.await;
            if persists && fs.persist(&[]).await.is_err() {
                answer = Err(Errno::EIO);
            }
            history.end(index, answer.as_ref().map(reply).map_err(|errno| *errno));
            answer
        })
    }

    fn refused<T: Send + 'static>() -> Answer<T> {
        Box::pin(async { Err(Errno::EOPNOTSUPP) })
    }
}

fn place(dir: InodeNumber, name: &[u8]) -> Place {
    (dir, Bytes::copy_from_slice(name))
}

fn of_entry(entry: &Entry) -> Reply {
    Reply::Attr(entry.attr)
}

fn of_nothing(_: &()) -> Reply {
    Reply::Nothing
}

impl FileSystem for RecordedFs {
    fn lookup(&self, caller: Caller, parent: InodeNumber, name: &[u8]) -> Answer<Entry> {
        let (dir, found) = (self.inode(parent), self.name(parent, name));
        let called = Called::Lookup(place(parent, name));
        self.record(called, |fs| fs.lookup(caller, dir, &found), of_entry)
    }

    fn forget(&self, inode: InodeNumber, count: u64) {
        self.fs.forget(self.inode(inode), count);
    }

    fn getattr(&self, inode: InodeNumber, handle: Option<Handle>) -> Answer<AttrReply> {
        let file = self.inode(inode);
        let reply = |reply: &AttrReply| Reply::Attr(reply.attr);
        self.record(Called::GetAttr(inode), |fs| fs.getattr(file, handle), reply)
    }

    fn setattr(
        &self,
        caller: Caller,
        inode: InodeNumber,
        handle: Option<Handle>,
        changes: SetAttr,
    ) -> Answer<AttrReply> {
        let file = self.inode(inode);
        let reply = |reply: &AttrReply| Reply::Attr(reply.attr);
        let called = Called::SetAttr(inode, changes);
        self.record(called, |fs| fs.setattr(caller, file, handle, changes), reply)
    }

    fn readlink(&self, inode: InodeNumber) -> Answer<Bytes> {
        let reply = |target: &Bytes| Reply::Bytes(target.clone());
        self.record(Called::ReadLink(inode), |fs| fs.readlink(inode), reply)
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
        let (dir, made) = (self.inode(parent), self.name(parent, name));
        let called = Called::Make { at: place(parent, name), kind, mode, target: Bytes::new() };
        self.record(called, |fs| fs.mknod(caller, dir, &made, kind, mode, rdev), of_entry)
    }

    /// For verifiers that are not used again.
    fn create_exclusive(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        mode: u32,
        verifier: CreateVerifier,
    ) -> Answer<Entry> {
        let (dir, made) = (self.inode(parent), self.name(parent, name));
        let kind = FileKind::Regular;
        let called = Called::Make { at: place(parent, name), kind, mode, target: Bytes::new() };
        let call = |fs: &dyn FileSystem| fs.create_exclusive(caller, dir, &made, mode, verifier);
        self.record(called, call, of_entry)
    }

    fn mkdir(&self, caller: Caller, parent: InodeNumber, name: &[u8], mode: u32) -> Answer<Entry> {
        let (dir, made) = (self.inode(parent), self.name(parent, name));
        let kind = FileKind::Directory;
        let called = Called::Make { at: place(parent, name), kind, mode, target: Bytes::new() };
        self.record(called, |fs| fs.mkdir(caller, dir, &made, mode), of_entry)
    }

    fn symlink(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        target: &[u8],
    ) -> Answer<Entry> {
        let (dir, made) = (self.inode(parent), self.name(parent, name));
        let (kind, mode, target) = (FileKind::Symlink, 0o777, Bytes::copy_from_slice(target));
        let called = Called::Make { at: place(parent, name), kind, mode, target: target.clone() };
        self.record(called, |fs| fs.symlink(caller, dir, &made, &target), of_entry)
    }

    fn link(
        &self,
        caller: Caller,
        inode: InodeNumber,
        new_parent: InodeNumber,
        new_name: &[u8],
    ) -> Answer<Entry> {
        let (dir, made) = (self.inode(new_parent), self.name(new_parent, new_name));
        let called = Called::Link { inode, at: place(new_parent, new_name) };
        self.record(called, |fs| fs.link(caller, inode, dir, &made), of_entry)
    }

    fn unlink(&self, caller: Caller, parent: InodeNumber, name: &[u8]) -> Answer<()> {
        let (dir, gone) = (self.inode(parent), self.name(parent, name));
        let called = Called::Unlink(place(parent, name));
        self.record(called, |fs| fs.unlink(caller, dir, &gone), of_nothing)
    }

    fn rmdir(&self, caller: Caller, parent: InodeNumber, name: &[u8]) -> Answer<()> {
        let (dir, gone) = (self.inode(parent), self.name(parent, name));
        let called = Called::Rmdir(place(parent, name));
        self.record(called, |fs| fs.rmdir(caller, dir, &gone), of_nothing)
    }

    fn rename(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        new_parent: InodeNumber,
        new_name: &[u8],
        flags: RenameFlags,
    ) -> Answer<()> {
        let (dir, old) = (self.inode(parent), self.name(parent, name));
        let (new_dir, new) = (self.inode(new_parent), self.name(new_parent, new_name));
        let (from, to) = (place(parent, name), place(new_parent, new_name));
        let call = |fs: &dyn FileSystem| fs.rename(caller, dir, &old, new_dir, &new, flags);
        self.record(Called::Rename { from, to, flags }, call, of_nothing)
    }

    fn open(&self, caller: Caller, inode: InodeNumber, flags: OpenFlags) -> Answer<Opened> {
        if flags.has(OpenFlags::TRUNCATE) {
            return Self::refused();
        }
        let reply = |_: &Opened| Reply::Nothing;
        self.record(Called::Open(inode), |fs| fs.open(caller, inode, flags), reply)
    }

    fn read(&self, inode: InodeNumber, handle: Handle, offset: u64, len: u32) -> Answer<Bytes> {
        let reply = |bytes: &Bytes| Reply::Bytes(bytes.clone());
        let called = Called::Read { inode, offset, len };
        self.record(called, |fs| fs.read(inode, handle, offset, len), reply)
    }

    fn write(
        &self,
        writer: Writer,
        inode: InodeNumber,
        handle: Handle,
        offset: u64,
        data: Bytes,
    ) -> Answer<u32> {
        if !matches!(writer, Writer::At(_)) {
            return Self::refused();
        }
        let called = Called::Write { inode, offset, data: data.clone() };
        let reply = |written: &u32| Reply::Written(*written);
        self.record(called, |fs| fs.write(writer, inode, handle, offset, data), reply)
    }

    fn fsync(&self, inode: InodeNumber, handle: Handle, data_only: bool) -> Answer<()> {
        self.record(Called::Sync(inode), |fs| fs.fsync(inode, handle, data_only), of_nothing)
    }

    fn flush(&self, inode: InodeNumber, handle: Handle) -> Answer<()> {
        self.fs.flush(inode, handle)
    }

    fn close(&self, inode: InodeNumber, handle: Handle) -> Answer<()> {
        self.fs.close(inode, handle)
    }

    fn opendir(&self, caller: Caller, inode: InodeNumber) -> Answer<Opened> {
        let index = self.history.begin(self.client, self.arena.number, Called::List(inode));
        let (listings, opened) =
            (self.listings.clone(), self.fs.opendir(caller, self.inode(inode)));
        let history = self.history.clone();
        Box::pin(async move {
            let opened = opened.await;
            match &opened {
                Ok(opened) => {
                    listings.lock().expect("no holder panics").insert(opened.handle, index);
                }
                Err(errno) => history.end(index, Err(*errno)),
            }
            opened
        })
    }

    /// Recorded if all names are asked for at once.
    fn readdir(
        &self,
        inode: InodeNumber,
        handle: Handle,
        cookie: u64,
        limit: usize,
        with_entries: bool,
    ) -> Answer<Vec<DirEntry>> {
        let listed = self.fs.readdir(self.inode(inode), handle, cookie, limit, with_entries);
        let prefix = if inode == ROOT { self.arena.prefix.as_bytes() } else { b"" };
        let index = match (cookie, limit) {
            (0, usize::MAX) => self.listings.lock().expect("no holder panics").remove(&handle),
            _ => None,
        };
        let history = self.history.clone();
        Box::pin(async move {
            let listed = listed.await.map(|mut listed| {
                listed.retain_mut(|entry| match entry.name.strip_prefix(prefix) {
                    Some(name) => {
                        entry.name = Bytes::copy_from_slice(name);
                        true
                    }
                    None => false,
                });
                listed
            });
            if let Some(index) = index {
                let names = |listed: &Vec<DirEntry>| {
                    let name = |entry: &DirEntry| (entry.name.clone(), (entry.inode, entry.kind));
                    Reply::Names(listed.iter().map(name).collect())
                };
                history.end(index, listed.as_ref().map(names).map_err(|errno| *errno));
            }
            listed
        })
    }

    fn closedir(&self, inode: InodeNumber, handle: Handle) -> Answer<()> {
        self.fs.closedir(self.inode(inode), handle)
    }

    fn persist(&self, inodes: &[InodeNumber]) -> Answer<()> {
        self.fs.persist(inodes)
    }

    fn sync(&self) -> Answer<()> {
        self.fs.sync()
    }

    fn statfs(&self, inode: InodeNumber) -> Answer<StatFs> {
        self.fs.statfs(self.inode(inode))
    }

    fn getxattr(&self, inode: InodeNumber, name: &[u8]) -> Answer<Bytes> {
        let reply = |value: &Bytes| Reply::Bytes(value.clone());
        let called = Called::GetXattr(inode, Bytes::copy_from_slice(name));
        self.record(called, |fs| fs.getxattr(inode, name), reply)
    }

    fn listxattr(&self, inode: InodeNumber) -> Answer<Vec<Bytes>> {
        let reply = |names: &Vec<Bytes>| Reply::Xattrs(names.clone());
        self.record(Called::ListXattr(inode), |fs| fs.listxattr(inode), reply)
    }

    fn setxattr(
        &self,
        caller: Caller,
        inode: InodeNumber,
        name: &[u8],
        value: Bytes,
        flags: XattrFlags,
    ) -> Answer<()> {
        let called = Called::SetXattr(inode, Bytes::copy_from_slice(name), value.clone());
        self.record(called, |fs| fs.setxattr(caller, inode, name, value, flags), of_nothing)
    }

    fn removexattr(&self, caller: Caller, inode: InodeNumber, name: &[u8]) -> Answer<()> {
        let called = Called::RemoveXattr(inode, Bytes::copy_from_slice(name));
        self.record(called, |fs| fs.removexattr(caller, inode, name), of_nothing)
    }
}

/// Makes a directory that clients then have for themselves.
pub(crate) async fn make_ground(fs: &dyn FileSystem, dir: InodeNumber, name: &str) -> InodeNumber {
    let made = fs.mkdir(me(), dir, name.as_bytes(), 0o777).await;
    made.unwrap_or_else(|errno| panic!("making {name}: {errno}")).attr.inode
}
