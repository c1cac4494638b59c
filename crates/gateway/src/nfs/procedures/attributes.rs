//! GETATTR, SETATTR, ACCESS, FSSTAT, FSINFO, PATHCONF.

use atoll_vfs::{Errno, FileKind, SetAttr, SetTime as To};

use super::super::access::{self, EXECUTE, READ, WRITE};
use super::super::nfs3::{
    self, AccessArgs, Attributes, FileHandle, FsInfoOk, FsStatOk, MAX_DATA_BYTES, PathConfOk,
    Reply, SetAttrArgs, SetAttributes, SetTime, Status, Time, WccData,
};
use super::super::service::{File, Session};
use super::{failed, of};
use crate::privileges;

/// Best size of a READDIR, bytes.
const DIRECTORY_BYTES: u32 = 64 << 10;
const SET_GID: u32 = 0o2000;

/// GETATTR.
pub(in super::super) async fn get(session: &Session, object: FileHandle) -> Reply<Attributes, ()> {
    let file = session.file(&object).await.map_err(failed)?;
    Ok(file.attributes())
}

/// SETATTR.
pub(in super::super) async fn set(session: &Session, args: SetAttrArgs) -> Reply<WccData, WccData> {
    let mut file = session.changed_file(&args.object).await.map_err(failed)?;
    let _alone = session.lock([&file]).await;
    let before = file.refresh().await.map_err(|error| failed(Status::of(error)))?;
    if args.guard.is_some_and(|guard| guard != before.ctime) {
        return Err((Status::NotSync, file.changed(Some(before)).await));
    }
    let applied = async {
        apply(session, &file, &args.changes).await?;
        session.persist(&file, &[file.inode()]).await
    };
    match applied.await {
        Ok(()) => Ok(file.changed(Some(before)).await),
        Err(error) => Err((Status::of(error), file.changed(Some(before)).await)),
    }
}

/// What a client wants changed, as a file system is told it.
pub(super) fn changes(wanted: &SetAttributes) -> SetAttr {
    let time = |time: &SetTime| match time {
        SetTime::Leave => None,
        SetTime::ServerTime => Some(To::Now),
        SetTime::To(time) => Some(To::To(time.to_file_time())),
    };
    SetAttr {
        mode: wanted.mode.map(|mode| mode & 0o7777),
        uid: wanted.uid,
        gid: wanted.gid,
        size_bytes: wanted.size,
        atime: time(&wanted.atime),
        mtime: time(&wanted.mtime),
    }
}

/// Changes attributes, if the caller may (Linux: `setattr_prepare`).
async fn apply(session: &Session, file: &File, wanted: &SetAttributes) -> Result<(), Errno> {
    let (fs, attr, caller) = (file.fs(), &file.attr, &file.caller);
    let mut changes = changes(wanted);
    if changes == SetAttr::default() {
        return Ok(());
    }
    if changes.size_bytes.is_some() {
        match attr.kind {
            FileKind::Regular => access::check_write(&**fs, attr, caller).await?,
            FileKind::Directory => return Err(Errno::EISDIR),
            _ => return Err(Errno::EINVAL),
        }
        if changes.size_bytes.is_some_and(|size| i64::try_from(size).is_err()) {
            return Err(Errno::EFBIG);
        }
    }
    if let Some(mode) = &mut changes.mode {
        access::check_owner(attr, caller)?;
        if caller.uid != 0 && attr.kind != FileKind::Directory && !caller.is_member(attr.gid) {
            *mode &= !SET_GID;
        }
    }
    if changes.uid.is_some_and(|uid| caller.uid != 0 && !(uid == attr.uid && caller.uid == uid)) {
        return Err(Errno::EPERM);
    }
    if let Some(gid) = changes.gid {
        access::check_owner(attr, caller)?;
        if caller.uid != 0 && gid != attr.gid && !caller.is_member(gid) {
            return Err(Errno::EPERM);
        }
    }
    for time in [changes.atime, changes.mtime].into_iter().flatten() {
        match time {
            To::To(_) => access::check_owner(attr, caller)?,
            To::Now if [0, attr.uid].contains(&caller.uid) => {}
            To::Now => access::check(&**fs, attr, caller, WRITE).await?,
        }
    }
    let changes = privileges::with_reduced_mode(&**fs, *caller, file.inode(), changes).await?;
    // A file system may want an open file for a new length.
    let open = match changes.size_bytes {
        Some(_) => {
            Some(session.service.opens.get(file.export.id, fs, *caller, &file.attr, true).await?)
        }
        None => None,
    };
    fs.setattr(*caller, file.inode(), open.as_ref().map(|open| open.handle), changes).await?;
    Ok(())
}

/// ACCESS: which of the rights that are asked for the caller has.
pub(in super::super) async fn access(
    session: &Session,
    args: AccessArgs,
) -> Reply<(Option<Attributes>, u32), Option<Attributes>> {
    let file = session.file(&args.object).await.map_err(failed)?;
    let rights = of(&file, rights(&file).await).await?;
    Ok((Some(file.attributes()), args.access & rights))
}

async fn rights(file: &File) -> Result<u32, Errno> {
    let (fs, attr, caller) = (&**file.fs(), &file.attr, &file.caller);
    let may = async |bits| access::may(fs, attr, caller, bits).await;
    let mut rights = 0;
    if may(READ).await? {
        rights |= nfs3::access::READ;
    }
    let may_write = !file.export.read_only && may(WRITE).await?;
    if may(EXECUTE).await? {
        rights |= if attr.kind == FileKind::Directory {
            nfs3::access::LOOKUP
        } else {
            nfs3::access::EXECUTE
        };
        if attr.kind == FileKind::Directory && may_write {
            rights |= nfs3::access::DELETE;
        }
    }
    if may_write {
        rights |= nfs3::access::MODIFY | nfs3::access::EXTEND;
    }
    Ok(rights)
}

/// FSSTAT.
pub(in super::super) async fn file_system(
    session: &Session,
    root: FileHandle,
) -> Reply<FsStatOk, Option<Attributes>> {
    let file = session.file(&root).await.map_err(failed)?;
    let stat = of(&file, file.fs().statfs(file.inode()).await).await?;
    let bytes = |blocks: u64| blocks.saturating_mul(stat.block_size_bytes.into());
    Ok(FsStatOk {
        attributes: Some(file.attributes()),
        total_bytes: bytes(stat.blocks),
        free_bytes: bytes(stat.blocks_free),
        available_bytes: bytes(stat.blocks_available),
        total_files: stat.files,
        free_files: stat.files_free,
        available_files: stat.files_free,
        invarsec: 0,
    })
}

/// FSINFO.
pub(in super::super) async fn limits(
    session: &Session,
    root: FileHandle,
) -> Reply<FsInfoOk, Option<Attributes>> {
    let file = session.file(&root).await.map_err(failed)?;
    let stat = of(&file, file.fs().statfs(file.inode()).await).await?;
    let most = u32::try_from(MAX_DATA_BYTES).expect("a MiB");
    Ok(FsInfoOk {
        attributes: Some(file.attributes()),
        rtmax: most,
        rtpref: most,
        rtmult: 4096,
        wtmax: most,
        wtpref: most,
        wtmult: 4096,
        dtpref: DIRECTORY_BYTES,
        max_file_bytes: stat.max_file_bytes,
        time_delta: Time {
            seconds: u32::try_from(stat.time_granularity.as_secs()).unwrap_or(u32::MAX),
            nseconds: stat.time_granularity.subsec_nanos(),
        },
        properties: nfs3::HAS_LINKS
            | nfs3::HAS_SYMLINKS
            | nfs3::IS_HOMOGENEOUS
            | nfs3::CAN_SET_TIME,
    })
}

/// PATHCONF.
pub(in super::super) async fn path_limits(
    session: &Session,
    object: FileHandle,
) -> Reply<PathConfOk, Option<Attributes>> {
    let file = session.file(&object).await.map_err(failed)?;
    let stat = of(&file, file.fs().statfs(file.inode()).await).await?;
    Ok(PathConfOk {
        attributes: Some(file.attributes()),
        link_max: stat.max_links,
        name_max: stat.max_name_bytes,
        no_trunc: true,
        // As `apply` does.
        chown_restricted: true,
        // Names are bytes.
        case_insensitive: false,
        case_preserving: true,
    })
}
