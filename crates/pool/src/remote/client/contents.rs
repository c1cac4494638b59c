//! Bytes of open files: read, written and kept until they are durable.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use atoll_vfs::Errno;
use bytes::{Bytes, BytesMut};

use super::super::wire::{CallClass, FileCall, FileReply, MAX_DATA_BYTES, WireCaller, WireWriter};
use super::attempt::{Asked, attr, bytes, errno, nothing};
use super::exchange::Stop;
use super::unstable::UnstableChange;
use super::{Client, OpenAtClient, WAIT_LIMIT};

/// How often an append is tried at the place where the file was said to end; a guess at how many clients append to one file. Beyond,
/// the server says where, and the client cannot find out whether a server that died has made it.
const MAX_APPEND_ATTEMPTS: usize = 16;

impl Client {
    pub(super) async fn read(
        self: &Arc<Self>,
        open: Arc<OpenAtClient>,
        offset: u64,
        len: u32,
    ) -> Result<Bytes, Errno> {
        let inode = open.inode;
        let mut all = BytesMut::new();
        let mut left = len as usize;
        loop {
            let wanted = left.min(MAX_DATA_BYTES);
            let offset = offset.checked_add(all.len() as u64).ok_or(Errno::EINVAL)?;
            let read = FileCall::Read { inode, handle: 0, offset, len: wanted as u32 };
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
        let mut written = 0;
        loop {
            let piece = data.split_to(data.len().min(MAX_DATA_BYTES));
            let wanted = piece.len();
            let at = offset.checked_add(written as u64).ok_or(Errno::EFBIG)?;
            match self.write_piece(&open, writer.clone(), at, piece).await {
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
        data: Bytes,
    ) -> Result<usize, Errno> {
        let inode = open.inode;
        let order = self.within(WAIT_LIMIT, self.order.read(inode)).await?;
        let asked = match writer {
            WireWriter::AtEnd(caller) => self.append(open, caller, data.clone()).await?,
            writer => {
                let write = FileCall::Write { writer, inode, handle: 0, offset };
                self.ask(write, Some(data.clone()), Some(inode), Some(open.clone())).await?
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
                self.keep_unstable(inode, &asked.session, UnstableChange::Write(begins, bytes));
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
    ) -> Result<Asked, Errno> {
        let inode = open.inode;
        for _ in 0..MAX_APPEND_ATTEMPTS {
            let known = *open.end.lock().expect("no holder of this lock panics");
            let end = match known {
                Some(end) => end,
                None => {
                    let get = FileCall::GetAttr { inode, handle: 0 };
                    let asked = self.ask(get, None, Some(inode), Some(open.clone())).await;
                    let asked = asked.map_err(|errno| match errno {
                        Errno::ETIMEDOUT => Errno::EIO,
                        errno => errno,
                    });
                    attr(&asked?)?.attr.size_bytes
                }
            };
            let asked = self.append_at(open, caller.clone(), end, data.clone()).await?;
            let (ends_at, is_written) = match asked.reply {
                FileReply::Written(taken, _) => (end.checked_add(u64::from(taken)), true),
                FileReply::EndsAt(now) => (Some(now), false),
                _ => return Err(Errno::EPROTO),
            };
            *open.end.lock().expect("no holder of this lock panics") = ends_at;
            if is_written {
                return Ok(asked);
            }
        }
        // Others append all the time.
        let writer = WireWriter::AtEnd(caller);
        let write = FileCall::Write { writer, inode, handle: 0, offset: 0 };
        self.ask(write, Some(data), Some(inode), Some(open.clone())).await
    }

    /// Appends if the file ends at `end`.
    async fn append_at(
        self: &Arc<Self>,
        open: &Arc<OpenAtClient>,
        caller: WireCaller,
        end: u64,
        data: Bytes,
    ) -> Result<Asked, Errno> {
        let inode = open.inode;
        let possibly_done = AtomicBool::new(false);
        let appended = self.run(CallClass::Changes, true, |attempt| {
            let (caller, data, possibly_done) = (caller.clone(), data.clone(), &possibly_done);
            async move {
                let up_to = attempt.send_unstable(inode).await?;
                let handle = attempt.handle(open).await?.1;
                let writer = match possibly_done.load(Ordering::Relaxed) {
                    true => WireWriter::AtEndAgain(caller),
                    false => WireWriter::AtEndIf(caller),
                };
                let write = FileCall::Write { writer, inode, handle, offset: end };
                let answer = attempt.call(write, Some(data)).await;
                if answer == Err(Stop::Lost { possibly_done: true }) {
                    possibly_done.store(true, Ordering::Relaxed);
                }
                let (reply, data) = answer?;
                Ok(Asked { reply, data, session: attempt.session.clone(), up_to })
            }
        });
        appended.await.map_err(|stop| errno(stop, CallClass::Changes))
    }

    pub(super) async fn fsync(
        self: &Arc<Self>,
        open: Arc<OpenAtClient>,
        data_only: bool,
    ) -> Result<(), Errno> {
        let inode = open.inode;
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
        let _order = self.within(WAIT_LIMIT, self.order.write(inode)).await?;
        let allocate = FileCall::Allocate { caller, inode, handle: 0, offset, len, mode };
        let asked = self.ask(allocate, None, Some(inode), Some(open)).await?;
        let change = UnstableChange::Allocate(offset, len, mode);
        self.keep_unstable(inode, &asked.session, change);
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
