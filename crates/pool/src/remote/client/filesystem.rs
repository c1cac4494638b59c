//! [`FileSystem`] by calls of the server.

use std::sync::Arc;
use std::time::Duration;

use atoll_vfs::{
    Answer, AttrReply, Caller, CreateVerifier, DirEntry, Entry, Errno, FileKind, FileSystem,
    Handle, InodeFlags, InodeNumber, InvalidationQueue, Locks, OpenFlags, Opened, PersistentHandle,
    RenameFlags, SeekTo, SetAttr, StatFs, Writer, XattrFlags, check_name,
};
use bytes::Bytes;
use futures_channel::oneshot;

use super::super::wire::{
    Answer as WireAnswer, CallClass, FileCall, FileReply, MAX_DATA_BYTES, MAX_LIST, MAX_LISTED,
    WireCaller, WireName, WireOpened, WireWriter, kind_number,
};
use super::attempt::{Asked, attr, bytes, errno, nothing};
use super::locking::RemoteLocks;
use super::unstable::UnstableChange;
use super::{Client, OpenAtClient, OpenKind, RemoteFs, WAIT_LIMIT};

/// The longest name of an extended attribute that is sent (Linux allows 255 bytes).
const MAX_XATTR_NAME_BYTES: usize = 1024;

impl RemoteFs {
    /// Runs a call as a task. If nobody waits for its answer any more, `undo` takes back what it was given.
    fn call<T: Send + 'static, F>(
        &self,
        work: impl FnOnce(Arc<Client>) -> F + Send + 'static,
        undo: fn(&Arc<Client>, T),
    ) -> Answer<T>
    where
        F: Future<Output = Result<T, Errno>> + Send + 'static,
    {
        let client = self.client.clone();
        Box::pin(async move {
            let (sender, receiver) = oneshot::channel();
            let env = client.exchange.env.clone();
            env.spawn(Box::pin(async move {
                let answer = work(client.clone()).await;
                if let Err(Ok(given)) = sender.send(answer) {
                    undo(&client, given);
                }
            }));
            receiver.await.unwrap_or(Err(Errno::EIO))
        })
    }

    /// A call that answers an entry.
    fn entry_call(
        &self,
        call: FileCall,
        data: Option<Bytes>,
        names: Result<(), Errno>,
    ) -> Answer<Entry> {
        let work = async move |client: Arc<Client>| {
            names?;
            let at = call.name().map(|(parent, name)| (parent, Bytes::copy_from_slice(name)));
            let asked = client.ask(call, data, None, None).await?;
            client.entry(asked, at).await
        };
        self.call(work, |client, entry| client.forget(entry.attr.inode, 1))
    }

    /// A call that answers nothing.
    fn plain_call(&self, call: FileCall, names: Result<(), Errno>) -> Answer<()> {
        let work = async move |client: Arc<Client>| {
            names?;
            client.ask(call, None, None, None).await.and_then(nothing)
        };
        self.call(work, |_, ()| ())
    }

    /// A call that answers bytes.
    fn bytes_call(&self, call: FileCall, names: Result<(), Errno>) -> Answer<Bytes> {
        let work = async move |client: Arc<Client>| {
            names?;
            client.ask(call, None, None, None).await.and_then(bytes)
        };
        self.call(work, |_, _| ())
    }
}

fn check_xattr_name(name: &[u8]) -> Result<(), Errno> {
    if name.len() > MAX_XATTR_NAME_BYTES { Err(Errno::ERANGE) } else { Ok(()) }
}

fn close_later(client: &Arc<Client>, inode: InodeNumber, handle: Handle) {
    let env = client.exchange.env.clone();
    let client = client.clone();
    env.spawn(Box::pin(async move {
        // Nobody is left who could be told that it failed.
        let _ = client.close(inode, handle).await;
    }));
}

impl Client {
    /// Counts the lookup of an entry that was answered, and has that name. Its attributes are those after the client's unstable changes.
    async fn entry(
        self: &Arc<Self>,
        asked: Asked,
        at: Option<(u64, Bytes)>,
    ) -> Result<Entry, Errno> {
        match &asked.reply {
            FileReply::Entry(entry) => {
                let mut entry = Entry::try_from(entry)?;
                self.look_up(&asked.session, &entry);
                self.refresh(&asked, &mut entry).await;
                self.tell_entry(at, &mut entry);
                Ok(entry)
            }
            _ => Err(Errno::EPROTO),
        }
    }

    /// Looks up at most [`MAX_LISTED`] names by one call.
    async fn look_up_all(
        self: &Arc<Self>,
        caller: &WireCaller,
        parent: InodeNumber,
        names: &[Bytes],
    ) -> Vec<Result<Entry, Errno>> {
        let mut found: Vec<Result<Entry, Errno>> = Vec::with_capacity(names.len());
        let mut wanted = Vec::with_capacity(names.len());
        for name in names {
            let checked = check_name(name);
            if checked.is_ok() {
                wanted.push((found.len(), WireName(name.to_vec())));
            }
            // Unless it is answered.
            found.push(Err(checked.err().unwrap_or(Errno::EPROTO)));
        }
        let asked = wanted.iter().map(|(_, name)| name.clone()).collect::<Vec<_>>().into();
        let call = FileCall::LookupAll { caller: caller.clone(), parent: parent.0, names: asked };
        let mut asked = match self.ask(call, None, None, None).await {
            Ok(asked) => asked,
            Err(errno) => {
                wanted.into_iter().for_each(|(at, _)| found[at] = Err(errno));
                return found;
            }
        };
        let reply = std::mem::replace(&mut asked.reply, FileReply::Nothing);
        let FileReply::Found(answers) = reply else { return found };
        for ((at, name), answer) in wanted.into_iter().zip(answers.0) {
            found[at] = match answer {
                WireAnswer::Done(entry) => match Entry::try_from(&entry) {
                    Ok(mut entry) => {
                        self.look_up(&asked.session, &entry);
                        self.refresh(&asked, &mut entry).await;
                        self.tell_entry(Some((parent.0, Bytes::from(name.0))), &mut entry);
                        Ok(entry)
                    }
                    Err(meaningless) => Err(meaningless.into()),
                },
                WireAnswer::Failed(errno) => Err(Errno::from_number(errno)),
            };
        }
        found
    }

    /// Asks for the attributes of a file again if the server that has told them lacks bytes of it.
    pub(super) async fn refresh(self: &Arc<Self>, asked: &Asked, entry: &mut Entry) {
        let inode = entry.attr.inode;
        if self.unstable().sent_up_to(inode.0, asked.session.verifier).is_some() {
            return;
        }
        let get = FileCall::GetAttr { inode: inode.0, handle: 0 };
        // If this fails, so does what the front end does with the file.
        if let Ok(asked) = self.ask(get, None, Some(inode.0), None).await
            && let Ok(now) = attr(&asked)
            && now.attr.inode == inode
        {
            (entry.attr, entry.attr_ttl) = (now.attr, now.ttl);
        }
    }

    fn keep_opened(
        &self,
        inode: InodeNumber,
        kind: OpenKind,
        caller: WireCaller,
        asked: &Asked,
        opened: Option<WireOpened>,
    ) -> Opened {
        let serial = asked.session.serial;
        let at_server = opened.map(|opened| (serial, opened.handle));
        let handle = self.keep_open(inode.0, kind, caller, at_server, serial);
        let direct_io = opened.is_some_and(|opened| opened.direct_io);
        Opened { handle, keep_cache: false, direct_io }
    }

    async fn open(
        self: &Arc<Self>,
        inode: InodeNumber,
        flags: OpenFlags,
        caller: (WireCaller, WireCaller),
    ) -> Result<Opened, Errno> {
        let (alone, caller) = caller;
        // The length is set by a call of its own, which is kept until it is durable.
        let kept = OpenFlags(flags.0 & !(OpenFlags::TRUNCATE | OpenFlags::EXCLUSIVE));
        let caller_alone = alone.clone();
        let open =
            FileCall::Open { caller: caller_alone, inode: inode.0, flags: kept.0, again: false };
        let asked = self.ask(open, None, Some(inode.0), None).await?;
        let FileReply::Opened(opened) = asked.reply else { return Err(Errno::EPROTO) };
        let opened = self.keep_opened(inode, OpenKind::File(kept), alone, &asked, Some(opened));
        if flags.has(OpenFlags::TRUNCATE) {
            let empty = SetAttr { size_bytes: Some(0), ..SetAttr::default() };
            if let Err(errno) = self.set_attr(caller, inode, None, empty).await {
                // The call has failed, whatever becomes of the handle.
                let _ = self.close(inode, opened.handle).await;
                return Err(errno);
            }
        }
        Ok(opened)
    }

    async fn create(
        self: &Arc<Self>,
        create: FileCall,
        flags: OpenFlags,
        caller: (WireCaller, WireCaller),
    ) -> Result<(Entry, Opened), Errno> {
        let (alone, caller) = caller;
        let at = create.name().map(|(parent, name)| (parent, Bytes::copy_from_slice(name)));
        let asked = self.ask(create, None, None, None).await?;
        let (entry, opened) = match &asked.reply {
            FileReply::Created(entry, opened) => (entry, Some(*opened)),
            // It was created before a restart of the server, and is gone: as a file that was removed while it was open.
            FileReply::Entry(entry) => (entry, None),
            _ => return Err(Errno::EPROTO),
        };
        let mut entry = Entry::try_from(entry)?;
        self.look_up(&asked.session, &entry);
        self.refresh(&asked, &mut entry).await;
        let inode = entry.attr.inode;
        let kept = OpenFlags(flags.0 & !(OpenFlags::TRUNCATE | OpenFlags::EXCLUSIVE));
        let opened = self.keep_opened(inode, OpenKind::File(kept), alone, &asked, opened);
        if flags.has(OpenFlags::TRUNCATE) && entry.attr.size_bytes > 0 {
            let empty = SetAttr { size_bytes: Some(0), ..SetAttr::default() };
            match self.set_attr(caller, inode, None, empty).await {
                Ok(now) => (entry.attr, entry.attr_ttl) = (now.attr, now.ttl),
                Err(errno) => {
                    // The call has failed, whatever becomes of the handle.
                    let _ = self.close(inode, opened.handle).await;
                    self.forget(inode, 1);
                    return Err(errno);
                }
            }
        }
        self.tell_entry(at, &mut entry);
        Ok((entry, opened))
    }

    async fn close(self: &Arc<Self>, inode: InodeNumber, handle: Handle) -> Result<(), Errno> {
        let open = self.opened(inode, handle)?;
        self.opens().opens.remove(&handle.0);
        self.own_locks().close(handle.0);
        if !self.has_open(inode.0) {
            // Nobody is left who could be told.
            self.unstable().take_failure(inode.0);
            self.ends().remove(&inode.0);
        }
        let closed = self.run(CallClass::Reads, true, move |attempt| {
            let open = open.clone();
            async move {
                let at_server = *attempt.wait(open.at_server.lock()).await?;
                let handle = match at_server {
                    Some((serial, handle)) if serial == attempt.session.serial => handle,
                    // The session that had it open is gone.
                    _ => return Ok(()),
                };
                let inode = open.inode;
                let close = match open.kind {
                    OpenKind::File(_) => FileCall::Close { inode, handle },
                    OpenKind::Directory => FileCall::CloseDirectory { inode, handle },
                };
                attempt.call(close, None).await.map(drop)
            }
        });
        closed.await.map_err(|stop| errno(stop, CallClass::Reads))
    }

    async fn set_attr(
        self: &Arc<Self>,
        caller: WireCaller,
        inode: InodeNumber,
        open: Option<Arc<OpenAtClient>>,
        changes: SetAttr,
    ) -> Result<AttrReply, Errno> {
        let under = match (&open, changes.size_bytes) {
            (Some(open), Some(_)) => self.locks_under(open, false)?,
            _ => None,
        };
        let _order = match changes.size_bytes {
            Some(_) => self.within(WAIT_LIMIT, self.order.write(inode.0)).await?,
            None => self.within(WAIT_LIMIT, self.order.read(inode.0)).await?,
        };
        let (number, new) = (inode.0, changes.into());
        let set = FileCall::SetAttr { caller, inode: number, handle: 0, changes: new, under };
        let asked = self.ask(set, None, Some(inode.0), open).await;
        self.ends().remove(&inode.0);
        let asked = asked?;
        let SetAttr { size_bytes, atime, mtime, .. } = changes;
        let is_time = atime.is_some() || mtime.is_some();
        if size_bytes.is_some() || (is_time && self.unstable().has(inode.0)) {
            let kept = SetAttr { size_bytes, atime, mtime, ..SetAttr::default() };
            let change = UnstableChange::Set(kept);
            self.keep_written(inode.0, &asked.session, change, under)?;
        }
        self.attr(&asked)
    }

    /// Attributes that were answered, as the front end is told.
    fn attr(&self, asked: &Asked) -> Result<AttrReply, Errno> {
        let mut now = attr(asked)?;
        now.ttl = self.tell_attributes(now.attr.inode, now.ttl);
        Ok(now)
    }
}

impl FileSystem for RemoteFs {
    fn lookup(&self, caller: Caller, parent: InodeNumber, name: &[u8]) -> Answer<Entry> {
        let (caller, parent, names) = (WireCaller::alone(&caller), parent.0, check_name(name));
        let name = name.to_vec();
        self.entry_call(FileCall::Lookup { caller, parent, name }, None, names)
    }

    fn lookup_all(
        &self,
        caller: Caller,
        parent: InodeNumber,
        names: Vec<Bytes>,
    ) -> Answer<Vec<Result<Entry, Errno>>> {
        let caller = WireCaller::alone(&caller);
        let work = async move |client: Arc<Client>| {
            let mut found = Vec::with_capacity(names.len());
            for some in names.chunks(MAX_LISTED) {
                found.extend(client.look_up_all(&caller, parent, some).await);
            }
            Ok(found)
        };
        self.call(work, |client, found| {
            found.into_iter().flatten().for_each(|entry| client.forget(entry.attr.inode, 1));
        })
    }

    fn parent(&self, caller: Caller, inode: InodeNumber) -> Answer<Entry> {
        let (caller, inode) = (WireCaller::alone(&caller), inode.0);
        self.entry_call(FileCall::Parent { caller, inode }, None, Ok(()))
    }

    fn handle_of(&self, inode: InodeNumber) -> Answer<PersistentHandle> {
        let work = async move |client: Arc<Client>| {
            // No number is used again. A server of NFS asks this for every name that it lists.
            if client.held().is_held(inode.0) {
                return Ok(PersistentHandle::of_number(inode, 0));
            }
            let call = FileCall::HandleOf { inode: inode.0 };
            match client.ask(call, None, None, None).await?.reply {
                FileReply::Handle(handle) => {
                    PersistentHandle::new(Bytes::from(handle)).map_err(|_| Errno::EPROTO)
                }
                _ => Err(Errno::EPROTO),
            }
        };
        self.call(work, |_, _| ())
    }

    fn by_handle(&self, caller: Caller, handle: &PersistentHandle) -> Answer<Entry> {
        let (caller, handle) = (WireCaller::alone(&caller), handle.as_bytes().to_vec());
        self.entry_call(FileCall::ByHandle { caller, handle }, None, Ok(()))
    }

    fn has_acls(&self) -> bool {
        self.client.features.has_acls
    }

    fn missing_ttl(&self) -> Duration {
        Duration::from_nanos(self.client.features.missing_ttl_nanos)
    }

    fn locks(&self) -> Option<Arc<dyn Locks>> {
        Some(Arc::new(RemoteLocks::new(self.client.clone())))
    }

    fn invalidations(&self) -> Option<Arc<InvalidationQueue>> {
        Some(self.client.invalidations.clone())
    }

    fn forget(&self, inode: InodeNumber, count: u64) {
        self.client.forget(inode, count);
    }

    fn getattr(&self, inode: InodeNumber, handle: Option<Handle>) -> Answer<AttrReply> {
        let work = async move |client: Arc<Client>| {
            let open = handle.and_then(|handle| client.opened_file(inode, handle).ok());
            let call = FileCall::GetAttr { inode: inode.0, handle: 0 };
            client.attr(&client.ask(call, None, Some(inode.0), open).await?)
        };
        self.call(work, |_, _| ())
    }

    fn setattr(
        &self,
        caller: Caller,
        inode: InodeNumber,
        handle: Option<Handle>,
        changes: SetAttr,
    ) -> Answer<AttrReply> {
        let caller = WireCaller::with_groups(&caller);
        let work = async move |client: Arc<Client>| {
            let open = handle.and_then(|handle| client.opened_file(inode, handle).ok());
            client.set_attr(caller, inode, open, changes).await
        };
        self.call(work, |_, _| ())
    }

    fn readlink(&self, inode: InodeNumber) -> Answer<Bytes> {
        self.bytes_call(FileCall::ReadLink { inode: inode.0 }, Ok(()))
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
        let (caller, parent) = (WireCaller::with_groups(&caller), parent.0);
        let (names, name, kind) = (check_name(name), name.to_vec(), kind_number(kind));
        let call = FileCall::MakeNode { caller, parent, name, kind, mode, rdev };
        self.entry_call(call, None, names)
    }

    fn create_exclusive(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        mode: u32,
        verifier: CreateVerifier,
    ) -> Answer<Entry> {
        let (caller, parent) = (WireCaller::with_groups(&caller), parent.0);
        let (names, name, verifier) = (check_name(name), name.to_vec(), verifier.0);
        let call = FileCall::CreateExclusive { caller, parent, name, mode, verifier };
        self.entry_call(call, None, names)
    }

    fn mkdir(&self, caller: Caller, parent: InodeNumber, name: &[u8], mode: u32) -> Answer<Entry> {
        let (caller, parent) = (WireCaller::with_groups(&caller), parent.0);
        let (names, name) = (check_name(name), name.to_vec());
        self.entry_call(FileCall::MakeDirectory { caller, parent, name, mode }, None, names)
    }

    fn symlink(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        target: &[u8],
    ) -> Answer<Entry> {
        let (caller, parent) = (WireCaller::with_groups(&caller), parent.0);
        let is_long = target.len() > MAX_DATA_BYTES;
        let names = if is_long { Err(Errno::ENAMETOOLONG) } else { check_name(name) };
        let (name, target) = (name.to_vec(), Bytes::copy_from_slice(target));
        self.entry_call(FileCall::Symlink { caller, parent, name }, Some(target), names)
    }

    fn link(
        &self,
        caller: Caller,
        inode: InodeNumber,
        new_parent: InodeNumber,
        new_name: &[u8],
    ) -> Answer<Entry> {
        let (caller, inode, parent) = (WireCaller::with_groups(&caller), inode.0, new_parent.0);
        let (names, name) = (check_name(new_name), new_name.to_vec());
        self.entry_call(FileCall::Link { caller, inode, parent, name }, None, names)
    }

    fn unlink(&self, caller: Caller, parent: InodeNumber, name: &[u8]) -> Answer<()> {
        let (caller, parent) = (WireCaller::with_groups(&caller), parent.0);
        let (names, name) = (check_name(name), name.to_vec());
        self.plain_call(FileCall::Unlink { caller, parent, name }, names)
    }

    fn rmdir(&self, caller: Caller, parent: InodeNumber, name: &[u8]) -> Answer<()> {
        let (caller, parent) = (WireCaller::with_groups(&caller), parent.0);
        let (names, name) = (check_name(name), name.to_vec());
        self.plain_call(FileCall::RemoveDirectory { caller, parent, name }, names)
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
        let RenameFlags { no_replace, exchange } = flags;
        let names = check_name(name).and_then(|()| check_name(new_name));
        let call = FileCall::Rename {
            caller: WireCaller::with_groups(&caller),
            parent: parent.0,
            name: name.to_vec(),
            new_parent: new_parent.0,
            new_name: new_name.to_vec(),
            no_replace,
            exchange,
        };
        self.plain_call(call, names)
    }

    fn open(&self, caller: Caller, inode: InodeNumber, flags: OpenFlags) -> Answer<Opened> {
        let alone = WireCaller::alone(&caller);
        let caller = match flags.has(OpenFlags::TRUNCATE) {
            true => WireCaller::with_groups(&caller),
            false => alone.clone(),
        };
        let work = async move |client: Arc<Client>| {
            let opened = client.open(inode, flags, (alone, caller)).await?;
            Ok((inode, opened))
        };
        let opened = self.call(work, |client, (inode, opened): (InodeNumber, Opened)| {
            close_later(client, inode, opened.handle);
        });
        Box::pin(async move { Ok(opened.await?.1) })
    }

    fn create(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        mode: u32,
        flags: OpenFlags,
    ) -> Answer<(Entry, Opened)> {
        let alone = WireCaller::alone(&caller);
        let caller = WireCaller::with_groups(&caller);
        let names = check_name(name);
        let call = FileCall::Create {
            caller: caller.clone(),
            parent: parent.0,
            name: name.to_vec(),
            mode,
            flags: flags.0 & !OpenFlags::TRUNCATE,
        };
        let work = async move |client: Arc<Client>| {
            names?;
            client.create(call, flags, (alone, caller)).await
        };
        self.call(work, |client, (entry, opened): (Entry, Opened)| {
            client.forget(entry.attr.inode, 1);
            close_later(client, entry.attr.inode, opened.handle);
        })
    }

    fn read(&self, inode: InodeNumber, handle: Handle, offset: u64, len: u32) -> Answer<Bytes> {
        let work = async move |client: Arc<Client>| {
            client.read(client.opened_file(inode, handle)?, offset, len).await
        };
        self.call(work, |_, _| ())
    }

    fn write(
        &self,
        writer: Writer,
        inode: InodeNumber,
        handle: Handle,
        offset: u64,
        data: Bytes,
    ) -> Answer<u32> {
        let is_cached = matches!(writer, Writer::Cached(_));
        let writer = WireWriter::from(&writer);
        let work = async move |client: Arc<Client>| {
            let open = client.opened_file(inode, handle)?;
            match client.write(open, writer, offset, data).await {
                // A pool refuses writes so only for now (`--min-copies`).
                Err(Errno::EROFS) if is_cached => Err(Errno::EAGAIN),
                written => written,
            }
        };
        self.call(work, |_, _| ())
    }

    fn flush(&self, inode: InodeNumber, handle: Handle) -> Answer<()> {
        let work =
            async move |client: Arc<Client>| client.flush(client.opened_file(inode, handle)?).await;
        self.call(work, |_, ()| ())
    }

    fn fsync(&self, inode: InodeNumber, handle: Handle, data_only: bool) -> Answer<()> {
        let work = async move |client: Arc<Client>| {
            client.fsync(client.opened_file(inode, handle)?, data_only).await
        };
        self.call(work, |_, ()| ())
    }

    fn seek(&self, inode: InodeNumber, handle: Handle, offset: u64, to: SeekTo) -> Answer<u64> {
        let work = async move |client: Arc<Client>| {
            let open = client.opened_file(inode, handle)?;
            let (inode, to_hole) = (inode.0, to == SeekTo::Hole);
            let call = FileCall::Seek { inode, handle: 0, offset, to_hole };
            match client.ask(call, None, Some(inode), Some(open)).await?.reply {
                FileReply::Offset(offset) => Ok(offset),
                _ => Err(Errno::EPROTO),
            }
        };
        self.call(work, |_, _| ())
    }

    fn fallocate(
        &self,
        caller: Caller,
        inode: InodeNumber,
        handle: Handle,
        offset: u64,
        len: u64,
        mode: i32,
    ) -> Answer<()> {
        let caller = WireCaller::with_groups(&caller);
        let work = async move |client: Arc<Client>| {
            let open = client.opened_file(inode, handle)?;
            client.allocate(open, caller, (offset, len, mode)).await
        };
        self.call(work, |_, ()| ())
    }

    fn close(&self, inode: InodeNumber, handle: Handle) -> Answer<()> {
        let work = async move |client: Arc<Client>| {
            client.opened_file(inode, handle)?;
            client.close(inode, handle).await
        };
        self.call(work, |_, ()| ())
    }

    fn has_stateless_directories(&self) -> bool {
        self.client.features.has_stateless_directories
    }

    fn has_lasting_cookies(&self) -> bool {
        self.client.features.has_lasting_cookies
    }

    fn opendir(&self, caller: Caller, inode: InodeNumber) -> Answer<Opened> {
        let caller = WireCaller::alone(&caller);
        let work = async move |client: Arc<Client>| {
            let call = FileCall::OpenDirectory { caller: caller.clone(), inode: inode.0 };
            let asked = client.ask(call, None, None, None).await?;
            let FileReply::Opened(opened) = asked.reply else { return Err(Errno::EPROTO) };
            let opened =
                client.keep_opened(inode, OpenKind::Directory, caller, &asked, Some(opened));
            Ok((inode, opened))
        };
        let opened = self.call(work, |client, (inode, opened): (InodeNumber, Opened)| {
            close_later(client, inode, opened.handle);
        });
        Box::pin(async move { Ok(opened.await?.1) })
    }

    fn readdir(
        &self,
        inode: InodeNumber,
        handle: Handle,
        cookie: u64,
        limit: usize,
        with_entries: bool,
    ) -> Answer<Vec<DirEntry>> {
        let work = async move |client: Arc<Client>| {
            client.list(inode, handle, cookie, limit, with_entries).await
        };
        self.call(work, |client, listed| {
            for entry in listed.into_iter().filter_map(|listed| listed.entry) {
                client.forget(entry.attr.inode, 1);
            }
        })
    }

    fn closedir(&self, inode: InodeNumber, handle: Handle) -> Answer<()> {
        let work = async move |client: Arc<Client>| {
            client.opened_directory(inode, handle)?;
            client.close(inode, handle).await
        };
        self.call(work, |_, ()| ())
    }

    fn fsyncdir(&self, inode: InodeNumber, handle: Handle, data_only: bool) -> Answer<()> {
        let work = async move |client: Arc<Client>| {
            let open = match handle == Handle::NONE && client.features.has_stateless_directories {
                true => None,
                false => Some(client.opened_directory(inode, handle)?),
            };
            let call = FileCall::FsyncDirectory { inode: inode.0, handle: 0, data_only };
            client.ask(call, None, None, open).await.and_then(nothing)
        };
        self.call(work, |_, ()| ())
    }

    fn persist(&self, inodes: &[InodeNumber]) -> Answer<()> {
        let inodes: Vec<u64> = inodes.iter().map(|inode| inode.0).collect();
        let work = async move |client: Arc<Client>| {
            let mut rest = inodes.as_slice();
            loop {
                let (some, others) = rest.split_at(rest.len().min(MAX_LIST));
                let call = FileCall::Persist { inodes: some.to_vec().into() };
                client.ask(call, None, None, None).await.and_then(nothing)?;
                rest = others;
                if rest.is_empty() {
                    return Ok(());
                }
            }
        };
        self.call(work, |_, ()| ())
    }

    fn sync(&self) -> Answer<()> {
        self.call(async move |client: Arc<Client>| client.sync().await, |_, ()| ())
    }

    fn statfs(&self, inode: InodeNumber) -> Answer<StatFs> {
        let work = async move |client: Arc<Client>| {
            let call = FileCall::StatFs { inode: inode.0 };
            match &client.ask(call, None, None, None).await?.reply {
                FileReply::StatFs(stat) => Ok(stat.into()),
                _ => Err(Errno::EPROTO),
            }
        };
        self.call(work, |_, _| ())
    }

    fn inode_flags(&self, inode: InodeNumber) -> Answer<InodeFlags> {
        let work = async move |client: Arc<Client>| {
            let call = FileCall::InodeFlags { inode: inode.0 };
            match client.ask(call, None, None, None).await?.reply {
                FileReply::Flags(flags) => Ok(InodeFlags(flags)),
                _ => Err(Errno::EPROTO),
            }
        };
        self.call(work, |_, _| ())
    }

    fn set_inode_flags(&self, caller: Caller, inode: InodeNumber, flags: InodeFlags) -> Answer<()> {
        let (caller, inode, flags) = (WireCaller::with_groups(&caller), inode.0, flags.0);
        self.plain_call(FileCall::SetInodeFlags { caller, inode, flags }, Ok(()))
    }

    fn getxattr(&self, inode: InodeNumber, name: &[u8]) -> Answer<Bytes> {
        let (inode, names, name) = (inode.0, check_xattr_name(name), name.to_vec());
        self.bytes_call(FileCall::GetXattr { inode, name }, names)
    }

    fn listxattr(&self, inode: InodeNumber) -> Answer<Vec<Bytes>> {
        let names = self.bytes_call(FileCall::ListXattr { inode: inode.0 }, Ok(()));
        Box::pin(async move {
            let mut all = names.await?;
            let mut names = Vec::new();
            while !all.is_empty() {
                let end = all.iter().position(|byte| *byte == 0).ok_or(Errno::EPROTO)?;
                names.push(all.split_to(end));
                let _nul = all.split_to(1);
            }
            Ok(names)
        })
    }

    fn setxattr(
        &self,
        caller: Caller,
        inode: InodeNumber,
        name: &[u8],
        value: Bytes,
        flags: XattrFlags,
    ) -> Answer<()> {
        let (caller, inode) = (WireCaller::with_groups(&caller), inode.0);
        let is_long = value.len() > MAX_DATA_BYTES;
        let names = if is_long { Err(Errno::E2BIG) } else { check_xattr_name(name) };
        let XattrFlags { create, replace } = flags;
        let call = FileCall::SetXattr { caller, inode, name: name.to_vec(), create, replace };
        let work = async move |client: Arc<Client>| {
            names?;
            client.ask(call, Some(value), None, None).await.and_then(nothing)
        };
        self.call(work, |_, ()| ())
    }

    fn removexattr(&self, caller: Caller, inode: InodeNumber, name: &[u8]) -> Answer<()> {
        let (caller, inode) = (WireCaller::with_groups(&caller), inode.0);
        let (names, name) = (check_xattr_name(name), name.to_vec());
        self.plain_call(FileCall::RemoveXattr { caller, inode, name }, names)
    }
}
