//! A call in the session of the moment, and again in the next one if the server has lost it.

use std::sync::Arc;

use atoll_env::sleep;
use atoll_vfs::{AttrReply, Errno, OpenFlags};
use bytes::Bytes;

use super::super::wire::{CallClass, FileCall, FileReply, WireCaller, WireWriter};
use super::exchange::{AwaitedNumber, ClientSession, Patience, Stop};
use super::unstable::UnstableChange;
use super::{Client, OpenAtClient, REFUSED_RETRY_EVERY};

/// A call in one session.
#[derive(Clone)]
pub(super) struct Attempt {
    client: Arc<Client>,
    pub(super) session: Arc<ClientSession>,
    patience: Arc<Patience>,
}

/// What a call has answered.
pub(super) struct Asked {
    pub(super) reply: FileReply,
    pub(super) data: Option<Bytes>,
    pub(super) session: Arc<ClientSession>,
    /// The session's server had all unstable changes of the file up to this one before the call.
    pub(super) up_to: u64,
}

impl Client {
    /// Makes a call in the present session; in the next one if the server has lost that, unless the call may have been made and
    /// can neither be repeated nor be known by its number.
    pub(super) async fn run<T, F>(
        self: &Arc<Self>,
        class: CallClass,
        is_repeatable: bool,
        make: impl Fn(Attempt) -> F,
    ) -> Result<T, Stop>
    where
        F: Future<Output = Result<T, Stop>>,
    {
        let patience = Arc::new(Patience::new(self.exchange.env.now(), class));
        loop {
            let session = self.exchange.session(&patience).await?;
            self.note_verifier(session.verifier);
            let (client, patience) = (self.clone(), patience.clone());
            match make(Attempt { client, session, patience }).await {
                Err(Stop::Lost { possibly_done: true }) if !is_repeatable => {
                    return Err(Stop::Errno(Errno::EIO));
                }
                Err(Stop::Lost { .. }) => {}
                answer => return answer,
            }
        }
    }

    /// Makes a call: of a file whose unstable bytes the server must have first, and through an open file or directory.
    pub(super) async fn ask(
        self: &Arc<Self>,
        call: FileCall,
        data: Option<Bytes>,
        file: Option<u64>,
        open: Option<Arc<OpenAtClient>>,
    ) -> Result<Asked, Errno> {
        let class = call.class();
        let is_made_once = call.is_made_once() && self.features.remembers_calls;
        let is_repeatable = call.is_repeatable() || is_made_once;
        let own_number = Arc::new(futures_util::lock::Mutex::new(None));
        let asked = self.run(class, is_repeatable, move |attempt| {
            let (mut call, data, open) = (call.clone(), data.clone(), open.clone());
            let own_number = own_number.clone();
            async move {
                let up_to = match file {
                    Some(inode) => attempt.send_unstable(inode).await?,
                    None => 0,
                };
                if let Some(open) = open {
                    call.set_handle(attempt.handle(&open).await?.1);
                }
                let (reply, data) = match is_made_once {
                    true => {
                        let mut number = own_number.lock().await;
                        attempt.call_once(call, data, &mut number).await?
                    }
                    false => attempt.call(call, data).await?,
                };
                Ok(Asked { reply, data, session: attempt.session.clone(), up_to })
            }
        });
        asked.await.map_err(|stop| errno(stop, class))
    }
}

/// What a caller is told.
pub(super) fn errno(stop: Stop, class: CallClass) -> Errno {
    match (stop, class) {
        (Stop::Errno(errno), _) => errno,
        (_, CallClass::Reads) => Errno::ETIMEDOUT,
        (_, CallClass::Changes | CallClass::Syncs) => Errno::EIO,
    }
}

pub(super) fn nothing(asked: Asked) -> Result<(), Errno> {
    if asked.reply == FileReply::Nothing { Ok(()) } else { Err(Errno::EPROTO) }
}

pub(super) fn bytes(asked: Asked) -> Result<Bytes, Errno> {
    match asked.reply {
        // No bytes may travel as no part.
        FileReply::Bytes => Ok(asked.data.unwrap_or_default()),
        _ => Err(Errno::EPROTO),
    }
}

pub(super) fn attr(asked: &Asked) -> Result<AttrReply, Errno> {
    match &asked.reply {
        FileReply::Attr(reply) => Ok(reply.try_into()?),
        _ => Err(Errno::EPROTO),
    }
}

impl Attempt {
    pub(super) async fn call(
        &self,
        call: FileCall,
        data: Option<Bytes>,
    ) -> Result<(FileReply, Option<Bytes>), Stop> {
        self.call_as(call, data, None).await
    }

    /// A call that is made once: it has the same number in all sessions.
    async fn call_once(
        &self,
        call: FileCall,
        data: Option<Bytes>,
        number: &mut Option<AwaitedNumber>,
    ) -> Result<(FileReply, Option<Bytes>), Stop> {
        if number.is_none() {
            *number = Some(self.client.exchange.take_number(&self.patience).await?);
        }
        self.call_as(call, data, number.as_ref()).await
    }

    async fn call_as(
        &self,
        call: FileCall,
        data: Option<Bytes>,
        number: Option<&AwaitedNumber>,
    ) -> Result<(FileReply, Option<Bytes>), Stop> {
        let forgotten = || self.client.held().take_forgotten(self.session.serial);
        let Attempt { client, session, patience } = self;
        let (locks, is_write) = (call.lock_session(), call.under().is_some());
        let answer =
            client.exchange.call(session, (call, data), number, forgotten, patience).await?;
        if answer.0 == FileReply::LocksLost {
            locks.into_iter().for_each(|session| client.lose_locks(session));
            if is_write {
                return Err(Errno::EIO.into());
            }
        }
        Ok(answer)
    }

    /// Waits as long as the call goes on.
    pub(super) async fn wait<T>(&self, wait: impl Future<Output = T>) -> Result<T, Stop> {
        self.client.exchange.while_patient(&self.patience, wait).await
    }

    /// A call before the one that matters, which has not been made if this brings no answer.
    pub(super) async fn prepare(
        &self,
        call: FileCall,
        data: Option<Bytes>,
    ) -> Result<(FileReply, Option<Bytes>), Stop> {
        self.call(call, data).await.map_err(|stop| match stop {
            Stop::Lost { .. } => Stop::Lost { possibly_done: false },
            stop => stop,
        })
    }

    /// The session's handle of something open, and the serial number of the session; opens it again if it was open in an
    /// earlier one. [`Errno::ESTALE`] if it was removed meanwhile, and had no open name (`member/unlinked.rs`).
    pub(super) async fn handle(&self, open: &OpenAtClient) -> Result<(u64, u64), Stop> {
        let serial = self.session.serial;
        let mut at_server = self.wait(open.at_server.lock()).await?;
        if let Some((of, handle)) = *at_server
            && of == serial
        {
            return Ok((serial, handle));
        }
        match self.prepare(open.open_call(), None).await {
            Ok((FileReply::Opened(opened), _)) => {
                *at_server = Some((serial, opened.handle));
                Ok((serial, opened.handle))
            }
            Ok(_) => Err(Errno::EPROTO.into()),
            Err(Stop::Errno(Errno::ENOENT)) => Err(Errno::ESTALE.into()),
            Err(stop) => Err(stop),
        }
    }

    /// Opens a file for the client itself.
    async fn open(&self, inode: u64, flags: OpenFlags) -> Result<u64, Stop> {
        let caller = WireCaller::alone(&atoll_vfs::Caller::default());
        let open = FileCall::Open { caller, inode, flags: flags.0, again: true };
        match self.prepare(open, None).await? {
            (FileReply::Opened(opened), _) => Ok(opened.handle),
            _ => Err(Errno::EPROTO.into()),
        }
    }

    async fn close(&self, inode: u64, handle: u64) -> Result<(), Stop> {
        match self.prepare(FileCall::Close { inode, handle }, None).await {
            Err(Stop::Errno(_)) => Ok(()),
            closed => closed.map(drop),
        }
    }

    /// Makes a file durable, through an open one if it is.
    pub(super) async fn sync_file(&self, inode: u64) -> Result<(), Stop> {
        if let Some(open) = self.client.open_file_of(inode) {
            let handle = self.handle(&open).await?.1;
            let sync = FileCall::Fsync { inode, handle, data_only: false };
            return self.prepare(sync, None).await.map(drop);
        }
        let handle = self.open(inode, OpenFlags::READ).await?;
        let sync = FileCall::Fsync { inode, handle, data_only: false };
        let synced = self.prepare(sync, None).await;
        self.close(inode, handle).await?;
        synced.map(drop)
    }

    /// Sends the unstable changes of a file that the session's server does not have. Returns the number of the last change that
    /// it has then.
    pub(super) async fn send_unstable(&self, inode: u64) -> Result<u64, Stop> {
        let verifier = self.session.verifier;
        let sent_up_to = || self.client.unstable().sent_up_to(inode, verifier);
        if let Some(up_to) = sent_up_to() {
            return Ok(up_to);
        }
        let _turn = self.wait(self.client.sending.write(inode)).await?;
        loop {
            if let Some(up_to) = sent_up_to() {
                return Ok(up_to);
            }
            match self.send_missing(inode).await {
                Ok(()) => {}
                // It has too much open at this moment.
                Err(Stop::Errno(Errno::EMFILE | Errno::ENFILE)) => return Err(Stop::OutOfTime),
                // Fewer members than changes need: the bytes are kept until there are enough again.
                Err(Stop::Errno(Errno::EAGAIN | Errno::EROFS)) => {
                    self.wait(sleep(&*self.client.exchange.env, REFUSED_RETRY_EVERY)).await?;
                }
                Err(Stop::Errno(errno)) => self.client.lose_unstable(inode, errno),
                Err(stop) => return Err(stop),
            }
        }
    }

    async fn send_missing(&self, inode: u64) -> Result<(), Stop> {
        let verifier = self.session.verifier;
        let handle = self.open(inode, OpenFlags::WRITE).await?;
        let mut sent = Ok(());
        while let Some((number, change)) = {
            let unstable = self.client.unstable();
            unstable.next_to_send(inode, verifier)
        } {
            sent = self.send_change(inode, handle, change).await;
            if sent.is_err() {
                break;
            }
            self.client.unstable().note_sent(inode, verifier, number);
        }
        self.close(inode, handle).await?;
        sent
    }

    async fn send_change(
        &self,
        inode: u64,
        handle: u64,
        change: UnstableChange,
    ) -> Result<(), Stop> {
        let caller = WireCaller::alone(&atoll_vfs::Caller::default());
        match change {
            UnstableChange::Write(mut offset, mut data) => {
                while !data.is_empty() {
                    // As a page that is written back: its first write has changed the file's privileges.
                    let writer = WireWriter::Mapping;
                    let write = FileCall::Write { writer, inode, handle, offset, under: None };
                    let written = match self.prepare(write, Some(data.clone())).await? {
                        (FileReply::Written(0, _), _) => return Err(Errno::ENOSPC.into()),
                        (FileReply::Written(written, _), _) => written as usize,
                        _ => return Err(Errno::EPROTO.into()),
                    };
                    if written > data.len() {
                        return Err(Errno::EPROTO.into());
                    }
                    offset += written as u64;
                    data = data.split_off(written);
                }
            }
            UnstableChange::Set(changes) => {
                let changes = changes.into();
                let set = FileCall::SetAttr { caller, inode, handle: 0, changes, under: None };
                self.prepare(set, None).await?;
            }
            UnstableChange::Allocate(offset, len, mode) => {
                let allocate =
                    FileCall::Allocate { caller, inode, handle, offset, len, mode, under: None };
                self.prepare(allocate, None).await?;
            }
        }
        Ok(())
    }
}
