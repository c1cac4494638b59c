//! Serves a file system to clients on other machines, for as long as their sessions last.
//!
//! A call that is numbered runs as a task: it goes on when the attempt that brought it is given up, and further attempts wait for
//! it. While it takes long they are told so ([`wire::AT_WORK`]), so that a client can tell a slow disk from a dead server.
//!
//! A call that is made once ([`FileCall::is_made_once`]) is made by a file system that remembers it, if this one does
//! ([`RemembersCalls`]).
//!
//! It does not know who may call: the owner of the pool asks that before.

use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use atoll_env::{BoxFuture, Env};
use atoll_key::PeerId;
use atoll_net::header::{from_header, to_header};
use atoll_net::{Peer, Refusal, Reply, Request, Service};
use atoll_vfs::{
    Caller, CreateVerifier, DirEntry, Entry, Errno, FileSystem, Handle, InodeFlags, InodeNumber,
    OpenFlags, Opened, PersistentHandle, RenameFlags, SeekTo, Writer, XattrFlags,
};
use bytes::Bytes;
use minicbor::Encode;

use crate::calls::{CallOrigin, ClientKey, RemembersCalls};
use crate::turns::Turns;

use super::locking::LockKeeper;
use super::sessions::{Attempt, Leftover, SessionOpen, SessionTable};
use super::wire::{
    self, Answer, Begin, Begun, CallHeader, FileCall, FileReply, SessionCall, WireWriter,
};

/// How long an attempt waits for its call before it is told that it is at work: below the time that a client gives its first one.
const AT_WORK_AFTER: Duration = Duration::from_millis(500);
/// How often silent sessions are looked for.
const LOOK_PERIOD: Duration = Duration::from_secs(30);

/// What an earlier server has made of an append.
enum AppendedBefore {
    Whole,
    /// The file ends within it.
    Partly,
    Not,
}

/// What a call answers: its reply, and bytes beside it.
type Outcome = Result<(FileReply, Option<Bytes>), Errno>;

/// See the module. Clones are handles to the same one.
#[derive(Clone)]
pub struct RemoteServer {
    shared: Arc<ServerShared>,
}

struct ServerShared {
    env: Env,
    fs: Arc<dyn FileSystem>,
    /// The same one, if it remembers calls.
    remembering: Option<Arc<dyn RemembersCalls>>,
    /// By inode: what changes a file's length; alone where it must end at a known place.
    lengths: Turns,
    boot: u64,
    /// Another one when bytes that were answered, and not synced, may have been lost.
    verifier: u64,
    table: Mutex<SessionTable>,
    locks: Arc<LockKeeper>,
}

impl RemoteServer {
    /// Serves `fs`. Sessions are of this server alone: clients of an earlier one begin new ones, and do not know what became of
    /// changes of names that were at work.
    pub fn new(env: Env, fs: Arc<dyn FileSystem>) -> RemoteServer {
        let verifier = env.random_u64();
        let locks = LockKeeper::alone(&env);
        RemoteServer::start(env, fs, None, verifier, locks)
    }

    /// Serves `fs`, which remembers the calls that earlier servers made, here or on other members. `verifier` is another one than
    /// theirs if bytes that they answered, and that were not synced, may have been lost.
    pub fn remembering(env: Env, fs: Arc<dyn RemembersCalls>, verifier: u64) -> RemoteServer {
        let locks = LockKeeper::alone(&env);
        RemoteServer::start(env, fs.clone(), Some(fs), verifier, locks)
    }

    /// Serves `fs` as [`RemoteServer::remembering`], with locks that earlier servers knew.
    pub(crate) fn with_locks(
        env: Env,
        fs: Arc<dyn RemembersCalls>,
        verifier: u64,
        locks: Arc<LockKeeper>,
    ) -> RemoteServer {
        RemoteServer::start(env, fs.clone(), Some(fs), verifier, locks)
    }

    fn start(
        env: Env,
        fs: Arc<dyn FileSystem>,
        remembering: Option<Arc<dyn RemembersCalls>>,
        verifier: u64,
        locks: Arc<LockKeeper>,
    ) -> RemoteServer {
        let shared = Arc::new(ServerShared {
            env: env.clone(),
            fs,
            remembering,
            lengths: Turns::default(),
            boot: env.random_u64(),
            verifier,
            table: Mutex::default(),
            locks,
        });
        let weak = Arc::downgrade(&shared);
        env.spawn(Box::pin(end_silent_sessions(env.clone(), weak)));
        RemoteServer { shared }
    }

    /// Which run of the server this is, as its clients say in their calls.
    pub(crate) fn boot(&self) -> u64 {
        self.shared.boot
    }

    /// How many sessions there are, and what they have open in all.
    pub fn counts(&self) -> (usize, usize) {
        self.shared.locked().counts()
    }

    /// # Panics
    /// If what is counted is not what is there.
    pub fn check_invariants(&self) {
        self.shared.locked().check_invariants();
    }
}

async fn end_silent_sessions(env: Env, server: Weak<ServerShared>) {
    loop {
        atoll_env::sleep(&*env, LOOK_PERIOD).await;
        let Some(server) = server.upgrade() else { return };
        let ended = server.locked().end_silent(env.now());
        for leftover in ended {
            server.give_back(leftover).await;
        }
    }
}

impl Service for RemoteServer {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let shared = self.shared.clone();
        Box::pin(async move {
            match request.method {
                wire::BEGIN => shared.begin(from.id, &request),
                wire::RENEW => shared.renew(from.id, &request),
                wire::END => shared.end(from.id, &request),
                wire::CALL => shared.call(from.id, request).await,
                method => {
                    let text = format!("method {method:#06x} is not known here");
                    Err(Refusal::new(Refusal::UNKNOWN_METHOD, text))
                }
            }
        })
    }
}

fn reply<T: Encode<()>>(message: &T) -> Reply {
    Reply { header: to_header(message), parts: Vec::new() }
}

fn reply_to_call(outcome: Outcome) -> Reply {
    match outcome {
        Ok((done, data)) => {
            let header = to_header(&Answer::Done(done));
            Reply { header, parts: data.into_iter().collect() }
        }
        Err(errno) => reply(&Answer::<FileReply>::Failed(errno.0)),
    }
}

fn malformed(what: &str) -> Refusal {
    Refusal::new(Refusal::MALFORMED, what)
}

fn unknown_session() -> Refusal {
    Refusal::new(wire::UNKNOWN_SESSION, "there is no such session of this peer")
}

/// The only part of a message, if it has one.
fn only_part(request: Request) -> Result<Option<Bytes>, Refusal> {
    let mut parts = request.parts.into_iter();
    match (parts.next(), parts.next()) {
        (Some(part), None) if part.len() > wire::MAX_DATA_BYTES => Err(malformed("a long part")),
        (part, None) => Ok(part),
        _ => Err(malformed("more than one part")),
    }
}

impl ServerShared {
    fn locked(&self) -> MutexGuard<'_, SessionTable> {
        self.table.lock().expect("no holder of this lock panics")
    }

    fn begin(&self, from: PeerId, request: &Request) -> Result<Reply, Refusal> {
        let begin: Begin = from_header(&request.header)?;
        if self.has_ended() {
            return Err(Refusal::new(Refusal::OVERLOADED, "this server ends"));
        }
        let session = begin.session;
        let begun = self.locked().begin(begin, from, self.env.now());
        if begun.is_ok() {
            let client = self.locked().client_of(session);
            client.into_iter().for_each(|client| self.locks.hear(client));
        }
        Ok(reply(&match begun {
            Ok(()) => Answer::Done(Begun {
                boot: self.boot,
                verifier: self.verifier,
                has_acls: self.fs.has_acls(),
                has_stateless_directories: self.fs.has_stateless_directories(),
                has_lasting_cookies: self.fs.has_lasting_cookies(),
                missing_ttl_nanos: wire::nanos(self.fs.missing_ttl()),
                remembers_calls: self.remembering.is_some(),
            }),
            Err(errno) => Answer::Failed(errno.0),
        }))
    }

    fn has_ended(&self) -> bool {
        self.remembering.as_ref().is_some_and(|fs| fs.has_ended())
    }

    /// Checks that a call is of a session that this server has, which renews it.
    fn hear(&self, from: PeerId, of: &SessionCall) -> Result<ClientKey, Refusal> {
        let now = self.env.now();
        let client = match of.boot == self.boot {
            true => {
                let mut table = self.locked();
                table.hear(of.session, from, of.lowest, now).map(|session| session.client())
            }
            false => None,
        };
        let client = client.ok_or_else(unknown_session)?;
        self.locks.hear(client);
        Ok(client)
    }

    fn renew(&self, from: PeerId, request: &Request) -> Result<Reply, Refusal> {
        self.hear(from, &from_header(&request.header)?)?;
        Ok(Reply::default())
    }

    fn end(self: Arc<Self>, from: PeerId, request: &Request) -> Result<Reply, Refusal> {
        let of: SessionCall = from_header(&request.header)?;
        let client = self.hear(from, &of)?;
        self.locks.end(client);
        let leftover = self.locked().end(of.session, from);
        // The client may not wait for it.
        let env = self.env.clone();
        env.spawn(Box::pin(async move { self.give_back(leftover).await }));
        Ok(Reply::default())
    }

    /// Lets go of what a session held.
    async fn give_back(&self, leftover: Leftover) {
        for SessionOpen { inode, handle, is_directory } in leftover.opens {
            // Nobody is left who could be told that it failed.
            let _ = match is_directory {
                true => self.fs.closedir(inode, handle).await,
                false => self.fs.close(inode, handle).await,
            };
        }
        for (inode, count) in leftover.held {
            self.fs.forget(inode, count);
        }
    }

    async fn call(self: Arc<Self>, from: PeerId, request: Request) -> Result<Reply, Refusal> {
        let CallHeader { of, number, call, forgotten } = from_header(&request.header)?;
        let data = only_part(request)?;
        let client = self.hear(from, &of)?;
        let session = of.session;
        let number = match (number, call.is_numbered()) {
            (_, false) => {
                return Ok(reply_to_call(self.perform((session, client), None, call, data).await));
            }
            (Some(number), true) => number,
            (None, true) => return Err(malformed("a change without a number")),
        };
        let (attempt, origin) = match self.locked().get(session) {
            Some(session) => (session.attempt(number), session.origin(number)),
            None => return Err(unknown_session()),
        };
        let waiting = match attempt {
            Attempt::Answered(reply) => return Ok(reply),
            Attempt::Again(waiting) => waiting,
            Attempt::First(waiting) => {
                let env = self.env.clone();
                env.spawn(Box::pin(async move {
                    self.forget(session, &forgotten.0);
                    let of = (session, client);
                    let outcome = self.perform(of, Some(origin), call, data).await;
                    if outcome.is_err() && self.has_ended() {
                        // The next server knows whether it was made.
                        self.locked().abandon(session, number);
                        return;
                    }
                    let reply = reply_to_call(outcome);
                    let now = self.env.now();
                    let waiting = self.locked().answer(session, number, &reply, now);
                    for attempt in waiting {
                        // An attempt may have been given up.
                        let _ = attempt.send(reply.clone());
                    }
                }));
                return Self::wait(env, waiting).await;
            }
            Attempt::GivenUp => {
                return Err(Refusal::new(wire::GIVEN_UP, "the answer is not waited for"));
            }
            Attempt::Busy => {
                return Err(Refusal::new(Refusal::OVERLOADED, "too many calls of this session"));
            }
        };
        Self::wait(self.env.clone(), waiting).await
    }

    async fn wait(
        env: Env,
        waiting: futures_channel::oneshot::Receiver<Reply>,
    ) -> Result<Reply, Refusal> {
        match atoll_env::timeout(&*env, AT_WORK_AFTER, waiting).await {
            Ok(Ok(reply)) => Ok(reply),
            // The session has ended, or the server.
            Ok(Err(_)) => Err(Refusal::new(wire::ENDED, "the call has no answer")),
            Err(_) => Err(Refusal::new(wire::AT_WORK, "the call is at work")),
        }
    }

    // ---- what sessions hold ----

    fn file(&self, session: wire::SessionId, inode: u64, number: u64) -> Result<Handle, Errno> {
        self.locked().get(session).ok_or(Errno::EBADF)?.opened(inode, number, false)
    }

    fn directory(
        &self,
        session: wire::SessionId,
        inode: u64,
        number: u64,
    ) -> Result<Handle, Errno> {
        if number == 0 && self.fs.has_stateless_directories() {
            return Ok(Handle::NONE);
        }
        self.locked().get(session).ok_or(Errno::EBADF)?.opened(inode, number, true)
    }

    fn optional_file(
        &self,
        session: wire::SessionId,
        inode: u64,
        number: u64,
    ) -> Result<Option<Handle>, Errno> {
        if number == 0 { Ok(None) } else { self.file(session, inode, number).map(Some) }
    }

    fn check_opens(&self, session: wire::SessionId) -> Result<(), Errno> {
        self.locked().get(session).ok_or(Errno::EIO)?.check_opens()
    }

    /// Counts the lookup of an entry for a session; takes it back if that has ended.
    fn hold(&self, session: wire::SessionId, entry: &Entry) -> Result<(), Errno> {
        let inode = entry.attr.inode;
        let held = self.locked().get(session).ok_or(Errno::EIO).and_then(|one| one.hold(inode.0));
        if held.is_err() {
            self.fs.forget(inode, 1);
        }
        held
    }

    /// Takes lookups of a session back.
    fn forget(&self, session: wire::SessionId, forgotten: &[wire::Forgotten]) {
        for one in forgotten {
            let taken = self.locked().get(session).map_or(0, |session| session.forget(*one));
            if taken > 0 {
                self.fs.forget(InodeNumber(one.inode), taken);
            }
        }
    }

    fn entry(&self, session: wire::SessionId, entry: &Entry) -> Outcome {
        self.hold(session, entry)?;
        Ok((FileReply::Entry(entry.into()), None))
    }

    /// Keeps what was opened for a session; closes it if that has ended.
    async fn keep_open(
        &self,
        session: wire::SessionId,
        inode: InodeNumber,
        opened: Opened,
        is_directory: bool,
    ) -> Result<wire::WireOpened, Errno> {
        let open = SessionOpen { inode, handle: opened.handle, is_directory };
        let kept = self.locked().get(session).ok_or(Errno::EIO).and_then(|one| one.open(open));
        match kept {
            Ok(handle) => Ok(wire::WireOpened { handle, direct_io: opened.direct_io }),
            Err(errno) => {
                self.give_back(Leftover { opens: vec![open], held: Vec::new() }).await;
                Err(errno)
            }
        }
    }

    // ---- calls ----

    async fn perform(
        &self,
        (session, client): (wire::SessionId, ClientKey),
        origin: Option<CallOrigin>,
        call: FileCall,
        data: Option<Bytes>,
    ) -> Outcome {
        const NOTHING: Outcome = Ok((FileReply::Nothing, None));
        // A write under a lock, until this is dropped.
        let write = match call.under() {
            Some((inode, session)) => {
                match self.locks.begin_write(client, session, InodeNumber(inode)) {
                    Some(write) => Some(Arc::new(write)),
                    None => return Ok((FileReply::LocksLost, None)),
                }
            }
            None => None,
        };
        let fs = match (&self.remembering, origin, &write) {
            (Some(fs), Some(origin), None) if call.is_made_once() => fs.for_call(origin),
            (Some(fs), _, Some(write)) => fs.keeping(write.clone()),
            _ => self.fs.clone(),
        };
        // No bytes may travel as no part.
        let data = data.unwrap_or_default();
        match call {
            FileCall::Lookup { caller, parent, name } => {
                let entry = fs.lookup(caller.caller(), InodeNumber(parent), &name).await?;
                self.entry(session, &entry)
            }
            FileCall::LookupAll { caller, parent, names } => {
                let names = names.0.into_iter().map(|name| Bytes::from(name.0)).collect();
                let found = fs.lookup_all(caller.caller(), InodeNumber(parent), names).await?;
                let held = |found: Result<Entry, Errno>| {
                    found.and_then(|entry| self.hold(session, &entry).map(|()| entry))
                };
                let answers = found.into_iter().map(|found| match held(found) {
                    Ok(entry) => wire::Answer::Done((&entry).into()),
                    Err(errno) => wire::Answer::Failed(errno.0),
                });
                Ok((FileReply::Found(answers.collect::<Vec<_>>().into()), None))
            }
            FileCall::Parent { caller, inode } => {
                self.entry(session, &fs.parent(caller.caller(), InodeNumber(inode)).await?)
            }
            FileCall::HandleOf { inode } => {
                let handle = fs.handle_of(InodeNumber(inode)).await?;
                Ok((FileReply::Handle(handle.as_bytes().to_vec()), None))
            }
            FileCall::ByHandle { caller, handle } => {
                let handle = PersistentHandle::new(Bytes::from(handle))?;
                self.entry(session, &fs.by_handle(caller.caller(), &handle).await?)
            }
            FileCall::Forget => NOTHING,
            FileCall::GetAttr { inode, handle } => {
                let handle = self.optional_file(session, inode, handle)?;
                let reply = fs.getattr(InodeNumber(inode), handle).await?;
                Ok((FileReply::Attr((&reply).into()), None))
            }
            FileCall::SetAttr { caller, inode, handle, changes, under: _ } => {
                let handle = self.optional_file(session, inode, handle)?;
                let changes = changes.try_into().map_err(|_: wire::Meaningless| Errno::EINVAL)?;
                let _length = self.lengths.read(inode).await;
                let (caller, inode) = (caller.caller(), InodeNumber(inode));
                let reply = fs.setattr(caller, inode, handle, changes).await?;
                Ok((FileReply::Attr((&reply).into()), None))
            }
            FileCall::ReadLink { inode } => {
                Ok((FileReply::Bytes, Some(fs.readlink(InodeNumber(inode)).await?)))
            }
            FileCall::MakeNode { caller, parent, name, kind, mode, rdev } => {
                let kind = wire::kind(kind).map_err(|_| Errno::EINVAL)?;
                let (caller, parent) = (caller.caller(), InodeNumber(parent));
                let entry = fs.mknod(caller, parent, &name, kind, mode, rdev).await?;
                self.entry(session, &entry)
            }
            FileCall::CreateExclusive { caller, parent, name, mode, verifier } => {
                let verifier = CreateVerifier(verifier);
                let (caller, parent) = (caller.caller(), InodeNumber(parent));
                let entry = fs.create_exclusive(caller, parent, &name, mode, verifier).await?;
                self.entry(session, &entry)
            }
            FileCall::MakeDirectory { caller, parent, name, mode } => {
                let entry = fs.mkdir(caller.caller(), InodeNumber(parent), &name, mode).await?;
                self.entry(session, &entry)
            }
            FileCall::Symlink { caller, parent, name } => {
                let (caller, parent, target) = (caller.caller(), InodeNumber(parent), data);
                self.entry(session, &fs.symlink(caller, parent, &name, &target).await?)
            }
            FileCall::Link { caller, inode, parent, name } => {
                let (inode, parent) = (InodeNumber(inode), InodeNumber(parent));
                self.entry(session, &fs.link(caller.caller(), inode, parent, &name).await?)
            }
            FileCall::Unlink { caller, parent, name } => {
                fs.unlink(caller.caller(), InodeNumber(parent), &name).await?;
                NOTHING
            }
            FileCall::RemoveDirectory { caller, parent, name } => {
                fs.rmdir(caller.caller(), InodeNumber(parent), &name).await?;
                NOTHING
            }
            FileCall::Rename {
                caller,
                parent,
                name,
                new_parent,
                new_name,
                no_replace,
                exchange,
            } => {
                let (parent, new_parent) = (InodeNumber(parent), InodeNumber(new_parent));
                let flags = RenameFlags { no_replace, exchange };
                fs.rename(caller.caller(), parent, &name, new_parent, &new_name, flags).await?;
                NOTHING
            }
            FileCall::Open { caller, inode, flags, again } => {
                self.check_opens(session)?;
                let inode = InodeNumber(inode);
                if !again && fs.getattr(inode, None).await?.attr.nlink == 0 {
                    // The client believes in a name that another one has removed, or given to another file: it is to look it up again.
                    return Err(Errno::ESTALE);
                }
                let opened = fs.open(caller.caller(), inode, OpenFlags(flags)).await?;
                let opened = self.keep_open(session, inode, opened, false).await?;
                Ok((FileReply::Opened(opened), None))
            }
            FileCall::Create { caller, parent, name, mode, flags } => {
                self.check_opens(session)?;
                let (caller, parent) = (caller.caller(), InodeNumber(parent));
                let flags = OpenFlags(flags);
                let (entry, opened) = fs.create(caller, parent, &name, mode, flags).await?;
                if self.remembering.is_some() && opened.handle == Handle::NONE {
                    // It was created before, and is gone.
                    return self.entry(session, &entry);
                }
                let opened = self.keep_open(session, entry.attr.inode, opened, false).await?;
                self.hold(session, &entry)?;
                Ok((FileReply::Created((&entry).into(), opened), None))
            }
            FileCall::Read { inode, handle, offset, len, anywhere: _ } => {
                let handle = self.file(session, inode, handle)?;
                let len = len.min(wire::MAX_DATA_BYTES as u32);
                let data = fs.read(InodeNumber(inode), handle, offset, len).await?;
                Ok((FileReply::Bytes, Some(data)))
            }
            FileCall::Write { writer, inode, handle, offset, under: _ } => {
                let file = (InodeNumber(inode), self.file(session, inode, handle)?);
                self.write(&*fs, &writer, file, offset, data).await
            }
            FileCall::Flush { inode, handle } => {
                let handle = self.file(session, inode, handle)?;
                fs.flush(InodeNumber(inode), handle).await?;
                NOTHING
            }
            FileCall::Fsync { inode, handle, data_only } => {
                let handle = self.file(session, inode, handle)?;
                fs.fsync(InodeNumber(inode), handle, data_only).await?;
                NOTHING
            }
            FileCall::Seek { inode, handle, offset, to_hole } => {
                let handle = self.file(session, inode, handle)?;
                let to = if to_hole { SeekTo::Hole } else { SeekTo::Data };
                let offset = fs.seek(InodeNumber(inode), handle, offset, to).await?;
                Ok((FileReply::Offset(offset), None))
            }
            FileCall::Allocate { caller, inode, handle, offset, len, mode, under: _ } => {
                let handle = self.file(session, inode, handle)?;
                let _length = self.lengths.read(inode).await;
                let (caller, inode) = (caller.caller(), InodeNumber(inode));
                fs.fallocate(caller, inode, handle, offset, len, mode).await?;
                NOTHING
            }
            FileCall::Close { inode, handle } => {
                let handle = match self.locked().get(session) {
                    Some(session) => session.close(inode, handle, false)?,
                    None => return Err(Errno::EBADF),
                };
                fs.close(InodeNumber(inode), handle).await?;
                NOTHING
            }
            FileCall::OpenDirectory { caller, inode } => {
                self.check_opens(session)?;
                let inode = InodeNumber(inode);
                let opened = fs.opendir(caller.caller(), inode).await?;
                let opened = self.keep_open(session, inode, opened, true).await?;
                Ok((FileReply::Opened(opened), None))
            }
            FileCall::ReadDirectory { inode, handle, cookie, limit, with_entries } => {
                let handle = self.directory(session, inode, handle)?;
                let limit = (limit as usize).min(wire::MAX_LISTED);
                let inode = InodeNumber(inode);
                let listed = fs.readdir(inode, handle, cookie, limit, with_entries).await?;
                self.listing(session, listed)
            }
            FileCall::CloseDirectory { inode, handle } => {
                let handle = match self.locked().get(session) {
                    Some(session) => session.close(inode, handle, true)?,
                    None => return Err(Errno::EBADF),
                };
                fs.closedir(InodeNumber(inode), handle).await?;
                NOTHING
            }
            FileCall::FsyncDirectory { inode, handle, data_only } => {
                let handle = self.directory(session, inode, handle)?;
                fs.fsyncdir(InodeNumber(inode), handle, data_only).await?;
                NOTHING
            }
            FileCall::Persist { inodes } => {
                let inodes: Vec<InodeNumber> = inodes.0.into_iter().map(InodeNumber).collect();
                fs.persist(&inodes).await?;
                NOTHING
            }
            FileCall::Sync => {
                fs.sync().await?;
                NOTHING
            }
            FileCall::StatFs { inode } => {
                let stat = fs.statfs(InodeNumber(inode)).await?;
                Ok((FileReply::StatFs((&stat).into()), None))
            }
            FileCall::InodeFlags { inode } => {
                Ok((FileReply::Flags(fs.inode_flags(InodeNumber(inode)).await?.0), None))
            }
            FileCall::SetInodeFlags { caller, inode, flags } => {
                let flags = InodeFlags(flags);
                fs.set_inode_flags(caller.caller(), InodeNumber(inode), flags).await?;
                NOTHING
            }
            FileCall::GetXattr { inode, name } => {
                Ok((FileReply::Bytes, Some(fs.getxattr(InodeNumber(inode), &name).await?)))
            }
            FileCall::ListXattr { inode } => {
                let mut names = Vec::new();
                for name in fs.listxattr(InodeNumber(inode)).await? {
                    names.extend_from_slice(&name);
                    names.push(0);
                }
                Ok((FileReply::Bytes, Some(names.into())))
            }
            FileCall::SetXattr { caller, inode, name, create, replace } => {
                let flags = XattrFlags { create, replace };
                let (caller, inode) = (caller.caller(), InodeNumber(inode));
                fs.setxattr(caller, inode, &name, data, flags).await?;
                NOTHING
            }
            FileCall::RemoveXattr { caller, inode, name } => {
                fs.removexattr(caller.caller(), InodeNumber(inode), &name).await?;
                NOTHING
            }
            FileCall::FindLock { .. }
            | FileCall::Lock { .. }
            | FileCall::KeepLocks { .. }
            | FileCall::StopWaiting { .. }
            | FileCall::KeepSession { .. } => Ok((self.locks.perform(client, call).await?, None)),
        }
    }

    async fn write(
        &self,
        fs: &dyn FileSystem,
        writer: &WireWriter,
        (inode, handle): (InodeNumber, Handle),
        offset: u64,
        data: Bytes,
    ) -> Outcome {
        match writer {
            WireWriter::At(_) | WireWriter::Mapping => {
                let _length = self.lengths.read(inode.0).await;
                let written = fs.write(writer.into(), inode, handle, offset, data).await?;
                Ok((FileReply::Written(written, Some(offset)), None))
            }
            WireWriter::AtEnd(_) => {
                let _length = self.lengths.write(inode.0).await;
                self.append(fs, writer.into(), (inode, handle), data).await
            }
            WireWriter::AtEndIf(_) | WireWriter::AtEndAgain(_) => {
                let _length = self.lengths.write(inode.0).await;
                let end = fs.getattr(inode, Some(handle)).await?.attr.size_bytes;
                if end == offset {
                    return self.append(fs, writer.into(), (inode, handle), data).await;
                }
                let ends_at = Ok((FileReply::EndsAt(end), None));
                if matches!(writer, WireWriter::AtEndIf(_)) || end < offset {
                    return ends_at;
                }
                match self.appended_before(inode, offset, end, &data).await? {
                    AppendedBefore::Whole => {
                        let written = u32::try_from(data.len()).map_err(|_| Errno::EINVAL)?;
                        Ok((FileReply::Written(written, Some(offset)), None))
                    }
                    AppendedBefore::Partly => {
                        let (Writer::At(caller) | Writer::AtEnd(caller)) = Writer::from(writer)
                        else {
                            return Err(Errno::EPROTO);
                        };
                        let at = Writer::At(caller);
                        let written = fs.write(at, inode, handle, offset, data).await?;
                        Ok((FileReply::Written(written, Some(offset)), None))
                    }
                    AppendedBefore::Not => ends_at,
                }
            }
        }
    }

    /// Writes at the end. A client that may have to send the bytes again must know where they went: that is certain if the file grew
    /// by just them.
    async fn append(
        &self,
        fs: &dyn FileSystem,
        writer: Writer,
        (inode, handle): (InodeNumber, Handle),
        data: Bytes,
    ) -> Outcome {
        let size =
            async || fs.getattr(inode, Some(handle)).await.ok().map(|now| now.attr.size_bytes);
        let before = size().await;
        let written = fs.write(writer, inode, handle, 0, data).await?;
        let begins = before.filter(|before| before.checked_add(u64::from(written)).is_some());
        let begins = match (begins, size().await) {
            (Some(before), Some(after)) if before + u64::from(written) == after => Some(before),
            _ => None,
        };
        Ok((FileReply::Written(written, begins), None))
    }

    /// Whether an append that a server before this one was asked for was made where the file ended: nobody else can have appended
    /// there then. What stands in the way is another's, unless the file ends within it and has nothing else there, or holes that a
    /// loss of power has left.
    async fn appended_before(
        &self,
        inode: InodeNumber,
        offset: u64,
        end: u64,
        data: &Bytes,
    ) -> Result<AppendedBefore, Errno> {
        let len = u32::try_from(data.len()).map_err(|_| Errno::EINVAL)?;
        let open = self.fs.open(Caller::default(), inode, OpenFlags::READ).await?;
        let read = self.fs.read(inode, open.handle, offset, len).await;
        let _ = self.fs.close(inode, open.handle).await;
        let stands = read?;
        if stands == *data {
            return Ok(AppendedBefore::Whole);
        }
        let is_own = stands.iter().zip(data).all(|(stands, own)| stands == own || *stands == 0);
        let ends_within = offset.checked_add(u64::from(len)).is_some_and(|own_end| end <= own_end);
        Ok(if is_own && ends_within { AppendedBefore::Partly } else { AppendedBefore::Not })
    }

    fn listing(&self, session: wire::SessionId, listed: Vec<DirEntry>) -> Outcome {
        let mut all = Vec::with_capacity(listed.len().min(wire::MAX_LISTED));
        for mut entry in listed {
            if let Some(found) = &entry.entry
                && self.hold(session, found).is_err()
            {
                entry.entry = None;
            }
            all.push(wire::WireDirEntry::from(&entry));
        }
        Ok((FileReply::Listing(all.into()), None))
    }
}
