//! Bytes of open files: read, written and kept until they are durable.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use atoll_env::sleep;
use atoll_vfs::{AttrReply, Errno, Handle};
use bytes::{Bytes, BytesMut};

use super::super::wire::{CallClass, FileCall, FileReply, MAX_DATA_BYTES, WireCaller, WireWriter};
use super::attempt::{Asked, Attempt, bytes, errno, nothing};
use super::exchange::Stop;
use super::unstable::UnstableChange;
use super::{Client, OpenAtClient, OpenKind, REFUSED_RETRY_EVERY, WAIT_LIMIT};
use crate::locks::LockSession;

/// How often an append is tried at the place where the file was said to end; a guess at how many clients append to one file. Beyond,
/// the server says where, and the client cannot find out whether a server that died has made it.
const MAX_APPEND_ATTEMPTS: usize = 16;

/// For so long a page of a mapping is written again that a group refuses for now; as long as a sync may take.
const PAGE_LIMIT: Duration = Duration::from_secs(120);

/// Where an append is tried.
#[derive(Default)]
struct AppendPlace {
    /// Where the file ends, as far as is known.
    end: Option<u64>,
    /// A server that is gone may have written the bytes there.
    possibly_done: bool,
    attempts: usize,
}

impl Attempt {
    /// Appends where the file is said to end, or to end by now. None if it never ends there.
    async fn append(
        &self,
        open: &OpenAtClient,
        caller: WireCaller,
        (data, under): (Bytes, Option<LockSession>),
        place: &mut AppendPlace,
    ) -> Result<Option<Asked>, Stop> {
        let inode = open.inode;
        let up_to = self.send_unstable(inode).await?;
        let handle = self.handle(open).await?.1;
        while place.attempts < MAX_APPEND_ATTEMPTS {
            let end = match place.end {
                Some(end) => end,
                None => match self.prepare(FileCall::GetAttr { inode, handle }, None).await? {
                    (FileReply::Attr(reply), _) => {
                        AttrReply::try_from(&reply).map_err(Errno::from)?.attr.size_bytes
                    }
                    _ => return Err(Errno::EPROTO.into()),
                },
            };
            place.end = Some(end);
            let writer = match place.possibly_done {
                true => WireWriter::AtEndAgain(caller.clone()),
                false => WireWriter::AtEndIf(caller.clone()),
            };
            let write = FileCall::Write { writer, inode, handle, offset: end, under };
            let answer = self.call(write, Some(data.clone())).await;
            if answer == Err(Stop::Lost { possibly_done: true }) {
                place.possibly_done = true;
            }
            let (reply, data) = answer?;
            match reply {
                FileReply::Written(taken, _) => {
                    place.end = end.checked_add(u64::from(taken));
                    let session = self.session.clone();
                    return Ok(Some(Asked { reply, data, session, up_to }));
                }
                FileReply::EndsAt(now) => {
                    place.end = Some(now);
                    place.possibly_done = false;
                    place.attempts += 1;
                }
                _ => return Err(Errno::EPROTO.into()),
            }
        }
        Ok(None)
    }
}

impl Client {
    pub(super) async fn read(
        self: &Arc<Self>,
        open: Arc<OpenAtClient>,
        offset: u64,
        len: u32,
    ) -> Result<Bytes, Errno> {
        let inode = open.inode;
        let is_readable = matches!(open.kind, OpenKind::File(flags) if flags.reads());
        let anywhere = is_readable && !self.reads_at_server.load(Ordering::Relaxed);
        let mut all = BytesMut::new();
        let mut left = len as usize;
        loop {
            let wanted = left.min(MAX_DATA_BYTES);
            let offset = offset.checked_add(all.len() as u64).ok_or(Errno::EINVAL)?;
            let read = FileCall::Read { inode, handle: 0, offset, len: wanted as u32, anywhere };
            let piece = self.ask(read, None, Some(inode), Some(open.clone())).await;
            let piece = piece.and_then(bytes)?;
            if piece.len() > wanted {
                return Err(Errno::EPROTO);
            }
            left -= piece.len();
            if all.is_empty() && (left == 0 || piece.len() < wanted) {
                return Ok(piece);
            }
            all.extend_from_slice(&piece);
            if left == 0 || piece.len() < wanted {
                return Ok(all.freeze());
            }
        }
    }

    pub(super) async fn write(
        self: &Arc<Self>,
        open: Arc<OpenAtClient>,
        writer: WireWriter,
        offset: u64,
        mut data: Bytes,
    ) -> Result<u32, Errno> {
        let under = self.locks_under(&open, writer == WireWriter::Mapping)?;
        let mut written = 0;
        let env = self.exchange.env.clone();
        let until = env.now() + PAGE_LIMIT;
        loop {
            let piece = data.split_to(data.len().min(MAX_DATA_BYTES));
            let wanted = piece.len();
            let at = offset.checked_add(written as u64).ok_or(Errno::EFBIG)?;
            let taken = loop {
                match self.write_piece(&open, writer.clone(), at, (piece.clone(), under)).await {
                    // The kernel drops a page that is refused.
                    Err(Errno::EAGAIN) if writer == WireWriter::Mapping && env.now() < until => {
                        sleep(&*env, REFUSED_RETRY_EVERY).await;
                    }
                    taken => break taken,
                }
            };
            match taken {
                Ok(taken) if taken == wanted && !data.is_empty() => written += taken,
                Ok(taken) => {
                    written += taken;
                    break;
                }
                // What was written before counts.
                Err(_) if written > 0 => break,
                Err(errno) => return Err(errno),
            }
        }
        self.make_room().await;
        u32::try_from(written).map_err(|_| Errno::EINVAL)
    }

    pub(super) async fn write_piece(
        self: &Arc<Self>,
        open: &Arc<OpenAtClient>,
        writer: WireWriter,
        offset: u64,
        (data, under): (Bytes, Option<LockSession>),
    ) -> Result<usize, Errno> {
        let inode = open.inode;
        let order = self.within(WAIT_LIMIT, self.order.read(inode)).await?;
        let asked = match writer {
            WireWriter::AtEnd(caller) => self.append(open, caller, data.clone(), under).await?,
            writer => {
                let write = FileCall::Write { writer, inode, handle: 0, offset, under };
                let asked = self.ask(write, Some(data.clone()), Some(inode), Some(open.clone()));
                let asked = asked.await;
                self.ends().remove(&inode);
                asked?
            }
        };
        let FileReply::Written(taken, begins) = asked.reply else { return Err(Errno::EPROTO) };
        let taken = taken as usize;
        if taken > data.len() {
            return Err(Errno::EPROTO);
        }
        match begins {
            _ if taken == 0 => {}
            Some(begins) => {
                // A copy: the front end's bytes may be part of a large buffer.
                let bytes = Bytes::copy_from_slice(&data[..taken]);
                let change = UnstableChange::Write(begins, bytes);
                self.keep_written(inode, &asked.session, change, under)?;
            }
            None => {
                // Nobody knows where the bytes went: they could not be sent again.
                drop(order);
                if self.sync_file(inode).await.is_err() {
                    self.unstable().fail(inode);
                }
            }
        }
        Ok(taken)
    }

    /// Appends. The client says where, so that it can find out whether an attempt that a dead server was at was made.
    async fn append(
        self: &Arc<Self>,
        open: &Arc<OpenAtClient>,
        caller: WireCaller,
        data: Bytes,
        under: Option<LockSession>,
    ) -> Result<Asked, Errno> {
        let inode = open.inode;
        let place = AppendPlace { end: self.ends().remove(&inode), ..AppendPlace::default() };
        let place = futures_util::lock::Mutex::new(place);
        let appended =
            self.run(CallClass::Changes, true, |attempt| {
                let (caller, data, place) = (caller.clone(), data.clone(), &place);
                async move {
                    attempt.append(open, caller, (data, under), &mut *place.lock().await).await
                }
            });
        let appended = appended.await.map_err(|stop| errno(stop, CallClass::Changes))?;
        if let Some(asked) = appended {
            let end = place.into_inner().end;
            if let Some(end) = end.filter(|_| self.has_open(inode)) {
                self.ends().insert(inode, end);
            }
            return Ok(asked);
        }
        // Others append all the time.
        let writer = WireWriter::AtEnd(caller);
        let write = FileCall::Write { writer, inode, handle: 0, offset: 0, under };
        self.ask(write, Some(data), Some(inode), Some(open.clone())).await
    }

    pub(super) async fn fsync(
        self: &Arc<Self>,
        open: Arc<OpenAtClient>,
        data_only: bool,
    ) -> Result<(), Errno> {
        let inode = open.inode;
        self.own_locks().check(Some(Handle(open.number)))?;
        let fsync = FileCall::Fsync { inode, handle: 0, data_only };
        let synced = match self.ask(fsync, None, Some(inode), Some(open)).await {
            Ok(asked) => {
                self.unstable().end(inode, asked.up_to);
                nothing(asked)
            }
            Err(errno) => {
                // A disk that has failed to write bytes may take them for written from now on.
                self.unstable().distrust(inode);
                Err(errno)
            }
        };
        if self.unstable().take_failure(inode) { Err(Errno::EIO) } else { synced }
    }

    pub(super) async fn flush(self: &Arc<Self>, open: Arc<OpenAtClient>) -> Result<(), Errno> {
        let inode = open.inode;
        self.own_locks().check(Some(Handle(open.number)))?;
        let mut flushed = Ok(());
        if !self.has_no_flush.load(Ordering::Relaxed) {
            let flush = FileCall::Flush { inode, handle: 0 };
            flushed = self.ask(flush, None, Some(inode), Some(open)).await.and_then(nothing);
        }
        if flushed == Err(Errno::ENOSYS) {
            // The server's writes are not delayed; those of this client may be lost.
            self.has_no_flush.store(true, Ordering::Relaxed);
            flushed = Ok(());
        }
        if self.unstable().take_failure(inode) { Err(Errno::EIO) } else { flushed }
    }

    pub(super) async fn allocate(
        self: &Arc<Self>,
        open: Arc<OpenAtClient>,
        caller: WireCaller,
        (offset, len, mode): (u64, u64, i32),
    ) -> Result<(), Errno> {
        let inode = open.inode;
        let under = self.locks_under(&open, false)?;
        let _order = self.within(WAIT_LIMIT, self.order.write(inode)).await?;
        let allocate = FileCall::Allocate { caller, inode, handle: 0, offset, len, mode, under };
        let asked = self.ask(allocate, None, Some(inode), Some(open)).await;
        self.ends().remove(&inode);
        let asked = asked?;
        let change = UnstableChange::Allocate(offset, len, mode);
        self.keep_written(inode, &asked.session, change, under)?;
        nothing(asked)
    }

    pub(super) async fn sync(self: &Arc<Self>) -> Result<(), Errno> {
        let synced = self.run(CallClass::Syncs, true, |attempt| {
            let client = self.clone();
            async move {
                let mut marks = Vec::new();
                let inodes = client.unstable().all();
                for inode in inodes {
                    marks.push((inode, attempt.send_unstable(inode).await?));
                }
                attempt.call(FileCall::Sync, None).await?;
                Ok(marks)
            }
        });
        let marks = synced.await.map_err(|stop| errno(stop, CallClass::Syncs))?;
        let mut unstable = self.unstable();
        marks.into_iter().for_each(|(inode, up_to)| unstable.end(inode, up_to));
        Ok(())
    }
}
