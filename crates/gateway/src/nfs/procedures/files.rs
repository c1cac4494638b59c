//! READ, WRITE, COMMIT.

use atoll_vfs::{Errno, FileKind, Writer};
use bytes::Bytes;

use super::super::access;
use super::super::nfs3::{
    Attributes, CommitArgs, CommitOk, MAX_DATA_BYTES, ReadArgs, ReadOk, Reply, Stable, Status,
    WccData, WriteArgs, WriteOk,
};
use super::super::opens::{self, OpenFile};
use super::super::service::{File, Session, waiting_for_disk};
use super::{failed, of};
use crate::privileges;

fn check_regular(file: &File) -> Result<(), Errno> {
    match file.attr.kind {
        FileKind::Regular => Ok(()),
        FileKind::Directory => Err(Errno::EISDIR),
        _ => Err(Errno::EINVAL),
    }
}

/// READ.
pub(in super::super) async fn read(
    session: &Session,
    args: ReadArgs,
) -> Reply<ReadOk, Option<Attributes>> {
    let file = session.file(&args.file).await.map_err(failed)?;
    let count = args.count.min(u32::try_from(MAX_DATA_BYTES).expect("a MiB"));
    let data = of(&file, read_bytes(session, &file, args.offset, count).await).await?;
    let attributes = file.now().await;
    // The file may have changed meanwhile; what is open may be an older version of it.
    let end = args.offset.saturating_add(data.len() as u64);
    let size = attributes.as_ref().map_or(0, |now| now.size).max(file.attr.size_bytes);
    let is_end = data.len() < count as usize || end >= size;
    Ok(ReadOk { attributes, is_end, data })
}

async fn read_bytes(
    session: &Session,
    file: &File,
    offset: u64,
    count: u32,
) -> Result<Bytes, Errno> {
    check_regular(file)?;
    access::check_read(&**file.fs(), &file.attr, &file.caller).await?;
    if i64::try_from(offset).is_err() || count == 0 {
        return Ok(Bytes::new());
    }
    let open = session
        .service
        .opens
        .get(file.export.id, file.fs(), file.caller, &file.attr, false)
        .await?;
    let mut data = file.fs().read(file.inode(), open.handle, offset, count).await?;
    data.truncate(count as usize);
    Ok(data)
}

/// WRITE.
pub(in super::super) async fn write(session: &Session, args: WriteArgs) -> Reply<WriteOk, WccData> {
    let file = session.changed_file(&args.file).await.map_err(failed)?;
    let _others = session.share(&file).await;
    let mut data = args.data.0;
    data.truncate(args.count as usize);
    // What is told before the write is made holds if it is lost.
    let verifier = session.service.verifier();
    let outcome = write_bytes(session, &file, args.offset, data, args.stable).await;
    let wcc = file.changed(None).await;
    match outcome {
        Ok(count) => Ok(WriteOk { file: wcc, count, committed: committed(args.stable), verifier }),
        Err(error) => Err((Status::of(error), wcc)),
    }
}

/// A file system makes data and attributes durable together.
fn committed(stable: Stable) -> Stable {
    if stable == Stable::Unstable { Stable::Unstable } else { Stable::FileSync }
}

async fn write_bytes(
    session: &Session,
    file: &File,
    offset: u64,
    data: Bytes,
    stable: Stable,
) -> Result<u32, Errno> {
    check_regular(file)?;
    let (fs, caller) = (file.fs(), file.caller);
    access::check_write(&**fs, &file.attr, &caller).await?;
    let end = offset.checked_add(data.len() as u64).ok_or(Errno::EFBIG)?;
    if i64::try_from(end).is_err() {
        return Err(Errno::EFBIG);
    }
    if data.is_empty() {
        return Ok(0);
    }
    let open = session.service.opens.get(file.export.id, fs, caller, &file.attr, true).await?;
    if caller.uid != 0
        && let mode @ Some(_) = privileges::reduced_mode(&file.attr, caller)
    {
        let changes = atoll_vfs::SetAttr { mode, ..atoll_vfs::SetAttr::default() };
        let changed = fs.setattr(caller, file.inode(), None, changes).await;
        if matches!(changed, Err(Errno::EROFS)) {
            // The client drops the bytes if it is told so: a write of nothing says whether that holds only for now.
            let nothing = Bytes::new();
            let asked =
                fs.write(Writer::Cached(caller), file.inode(), open.handle, offset, nothing);
            asked.await?;
        }
        changed?;
    }
    let count = fs.write(Writer::Cached(caller), file.inode(), open.handle, offset, data).await?;
    if stable != Stable::Unstable {
        // What others wrote unstably, and cannot be made durable, may be lost as well.
        let data_only = stable == Stable::DataSync;
        let synced = sync(file, &open, data_only).await;
        synced.inspect_err(|_| session.service.may_have_lost())?;
    }
    Ok(count)
}

/// COMMIT. All of the file, whatever range is named.
pub(in super::super) async fn commit(
    session: &Session,
    args: CommitArgs,
) -> Reply<CommitOk, WccData> {
    let file = session.changed_file(&args.file).await.map_err(failed)?;
    let outcome = make_durable(session, &file).await;
    // Another's sync that failed meanwhile may have been told what was lost of this client's writes.
    let verifier = session.service.verifier();
    let wcc = file.changed(None).await;
    match outcome {
        Ok(()) => Ok(CommitOk { file: wcc, verifier }),
        Err(error) => Err((Status::of(error), wcc)),
    }
}

async fn sync(file: &File, open: &OpenFile, data_only: bool) -> Result<(), Errno> {
    let (fs, inode, handle) = (file.fs().clone(), file.inode(), open.handle);
    waiting_for_disk(move || fs.fsync(inode, handle, data_only)).await
}

async fn make_durable(session: &Session, file: &File) -> Result<(), Errno> {
    check_regular(file)?;
    let (fs, inode) = (file.fs(), file.inode());
    // Whoever may write has done so; others have nothing to commit, and are not asked.
    let open = session.service.opens.get(file.export.id, fs, file.caller, &file.attr, true).await?;
    let durable = async {
        opens::flush(&**fs, inode, open.handle).await?;
        sync(file, &open, false).await
    };
    // What was written unstably may be lost.
    durable.await.inspect_err(|_| session.service.may_have_lost())
}
