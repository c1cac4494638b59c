//! LOOKUP, READLINK, CREATE, MKDIR, SYMLINK, MKNOD, REMOVE, RMDIR, RENAME, LINK.

use atoll_vfs::{CreateVerifier, Entry, Errno, FileKind, RenameFlags, SetAttr, check_name};

use super::super::access::{self, EXECUTE, WRITE};
use super::super::nfs3::{
    Attributes, CreateArgs, CreateHow, Created, DirOp, FileHandle, FileType, LinkArgs, LookupOk,
    MkDirArgs, MkNodArgs, MkNodData, Path, RenameArgs, Reply, SetAttributes, Status, SymLinkArgs,
    Verifier, WccAttr, WccData,
};
use super::super::service::{File, Session, rdev};
use super::super::xdr::Opaque;
use super::attributes::changes;
use super::{failed, of};
use crate::privileges;

fn check_directory(dir: &File) -> Result<(), Errno> {
    if dir.attr.kind == FileKind::Directory { Ok(()) } else { Err(Errno::ENOTDIR) }
}

/// LOOKUP.
pub(in super::super) async fn lookup(
    session: &Session,
    args: DirOp,
) -> Reply<LookupOk, Option<Attributes>> {
    let dir = session.file(&args.dir).await.map_err(failed)?;
    let found = of(&dir, find(session, &dir, &args.name.0).await).await?;
    let (file, object) = found;
    Ok(LookupOk { object, attributes: Some(file.attributes()), dir: Some(dir.attributes()) })
}

async fn find(session: &Session, dir: &File, name: &[u8]) -> Result<(File, FileHandle), Errno> {
    check_directory(dir)?;
    access::check(&**dir.fs(), &dir.attr, &dir.caller, EXECUTE).await?;
    let entry = match name {
        b"." => dir.fs().by_handle(dir.caller, &dir.fs().handle_of(dir.inode()).await?).await?,
        // Nothing of an export leads out of it.
        b".." => dir.fs().parent(dir.caller, dir.inode()).await?,
        name => {
            check_name(name)?;
            dir.fs().lookup(dir.caller, dir.inode(), name).await?
        }
    };
    let file = dir.beside(entry.attr);
    let handle = session.handle(&file).await?;
    Ok((file, handle))
}

/// READLINK.
pub(in super::super) async fn read_link(
    session: &Session,
    link: FileHandle,
) -> Reply<(Option<Attributes>, Path), Option<Attributes>> {
    let file = session.file(&link).await.map_err(failed)?;
    let target = async {
        if file.attr.kind != FileKind::Symlink {
            return Err(Errno::EINVAL);
        }
        file.fs().readlink(file.inode()).await
    };
    let target = of(&file, target.await).await?;
    Ok((file.now().await, Opaque(target)))
}

/// A directory in which a name is made or removed, while no other change of it runs here.
struct Place {
    dir: File,
    before: WccAttr,
}

impl Place {
    /// Of a directory that is locked.
    async fn new(mut dir: File) -> Result<Place, Status> {
        let before = dir.refresh().await.map_err(Status::of)?;
        Ok(Place { dir, before })
    }

    async fn wcc(&self) -> WccData {
        self.dir.changed(Some(self.before.clone())).await
    }

    /// The caller must be allowed to make and remove names here.
    async fn check(&self, name: &[u8]) -> Result<(), Errno> {
        check_directory(&self.dir)?;
        check_name(name)?;
        access::check_names(&**self.dir.fs(), &self.dir.attr, &self.dir.caller).await
    }

    /// The mode of a new file that is no directory.
    fn new_mode(&self, wanted: Option<u32>) -> u32 {
        privileges::new_mode(&self.dir.attr, self.dir.caller, wanted.unwrap_or(0) & 0o7777)
    }

    /// What has the name.
    async fn lookup(&self, name: &[u8]) -> Result<File, Errno> {
        let entry = self.dir.fs().lookup(self.dir.caller, self.dir.inode(), name).await?;
        Ok(self.dir.beside(entry.attr))
    }

    /// The reply when a file was made.
    async fn made(&self, session: &Session, file: &File) -> Created {
        let object = session.handle(file).await.ok();
        Created { object, attributes: file.now().await, dir: self.wcc().await }
    }
}

/// `.` and `..` are there: what is made or put in their place exists.
fn check_new_name(name: &[u8]) -> Result<(), Errno> {
    if matches!(name, b"." | b"..") { Err(Errno::EEXIST) } else { Ok(()) }
}

/// Makes something by `make`, with the attributes that the client wants.
async fn make(
    session: &Session,
    at: &DirOp,
    wanted: Option<&SetAttributes>,
    make: impl AsyncFnOnce(&Place) -> Result<Entry, Errno>,
) -> Reply<Created, WccData> {
    let dir = session.changed_file(&at.dir).await.map_err(failed)?;
    let alone = session.lock([&dir]).await;
    let place = Place::new(dir).await.map_err(failed)?;
    let name = &at.name.0[..];
    let made = async {
        check_new_name(name)?;
        place.check(name).await?;
        if let Some(wanted) = wanted {
            check_size(&place.dir, wanted).await?;
        }
        let entry = make(&place).await?;
        let entry = match wanted {
            Some(wanted) => with_attributes(&place.dir, entry, wanted).await?,
            None => entry,
        };
        Ok(place.dir.beside(entry.attr))
    };
    let file = match made.await {
        Ok(file) => file,
        Err(error) => return Err((Status::of(error), place.wcc().await)),
    };
    let created = place.made(session, &file).await;
    // Others change the directory while this waits for the disk, and wait with it.
    drop(alone);
    match session.persist(&file, &[place.dir.inode(), file.inode()]).await {
        Ok(()) => Ok(created),
        Err(error) => Err((Status::of(error), created.dir)),
    }
}

/// The length must be possible: else a file would be made first and its length refused then.
async fn check_size(dir: &File, wanted: &SetAttributes) -> Result<(), Errno> {
    match wanted.size {
        None | Some(0) => Ok(()),
        Some(size) if size <= dir.fs().statfs(dir.inode()).await?.max_file_bytes => Ok(()),
        Some(_) => Err(Errno::EFBIG),
    }
}

/// Sets what creating calls do not: owner and group, where the caller may, length and times.
async fn with_attributes(dir: &File, entry: Entry, wanted: &SetAttributes) -> Result<Entry, Errno> {
    let made = dir.beside(entry.attr);
    let mut rest = SetAttr { mode: None, ..changes(wanted) };
    if dir.caller.uid != 0 {
        rest.uid = None;
        rest.gid = rest.gid.filter(|gid| dir.caller.is_member(*gid));
    }
    rest.size_bytes =
        rest.size_bytes.filter(|size| made.attr.kind == FileKind::Regular && *size != 0);
    let attr = if rest == SetAttr::default() {
        made.attr
    } else {
        dir.fs().setattr(dir.caller, made.inode(), None, rest).await?.attr
    };
    made.keep_lookup();
    Ok(Entry { attr, ..entry })
}

/// CREATE.
pub(in super::super) async fn create(
    session: &Session,
    args: CreateArgs,
) -> Reply<Created, WccData> {
    match &args.how {
        CreateHow::Unchecked(wanted) => unchecked(session, &args.at, wanted).await,
        CreateHow::Guarded(wanted) => {
            make(session, &args.at, Some(wanted), async |place| {
                make_file(place, &args.at.name.0, wanted.mode).await
            })
            .await
        }
        CreateHow::Exclusive(verifier) => exclusive(session, &args.at, verifier).await,
    }
}

/// Makes a regular file; a name that is there is an error.
async fn make_file(place: &Place, name: &[u8], mode: Option<u32>) -> Result<Entry, Errno> {
    let mode = place.new_mode(mode);
    let (fs, dir) = (place.dir.fs(), place.dir.inode());
    fs.mknod(place.dir.caller, dir, name, FileKind::Regular, mode, 0).await
}

/// A file that is there is taken as it is, but for its length.
async fn unchecked(
    session: &Session,
    at: &DirOp,
    wanted: &SetAttributes,
) -> Reply<Created, WccData> {
    let name = &at.name.0[..];
    make(session, at, None, async |place| {
        check_size(&place.dir, wanted).await?;
        match make_file(place, name, wanted.mode).await {
            Ok(entry) => return with_attributes(&place.dir, entry, wanted).await,
            Err(Errno::EEXIST) => {}
            Err(error) => return Err(error),
        }
        let entry = place.dir.fs().lookup(place.dir.caller, place.dir.inode(), name).await?;
        let there = place.dir.beside(entry.attr);
        if there.attr.kind != FileKind::Regular {
            return Err(Errno::EEXIST);
        }
        if let Some(size) = wanted.size {
            access::check_write(&**there.fs(), &there.attr, &there.caller).await?;
            let _others = session.share(&there).await;
            let open = session
                .service
                .opens
                .get(there.export.id, there.fs(), there.caller, &there.attr, true)
                .await?;
            let changes = SetAttr { size_bytes: Some(size), ..SetAttr::default() };
            there.fs().setattr(there.caller, there.inode(), Some(open.handle), changes).await?;
        }
        there.keep_lookup();
        Ok(entry)
    })
    .await
}

/// The file can be written by its owner alone until the client has set its attributes, as it must next.
async fn exclusive(session: &Session, at: &DirOp, verifier: &Verifier) -> Reply<Created, WccData> {
    let verifier = CreateVerifier(*verifier);
    make(session, at, None, async |place| {
        let (fs, caller, dir) = (place.dir.fs(), place.dir.caller, place.dir.inode());
        fs.create_exclusive(caller, dir, &at.name.0, 0, verifier).await
    })
    .await
}

/// MKDIR.
pub(in super::super) async fn make_directory(
    session: &Session,
    args: MkDirArgs,
) -> Reply<Created, WccData> {
    make(session, &args.at, Some(&args.attributes), async |place| {
        let mode = args.attributes.mode.unwrap_or(0) & 0o7777;
        place.dir.fs().mkdir(place.dir.caller, place.dir.inode(), &args.at.name.0, mode).await
    })
    .await
}

/// SYMLINK.
pub(in super::super) async fn make_link(
    session: &Session,
    args: SymLinkArgs,
) -> Reply<Created, WccData> {
    make(session, &args.at, Some(&args.attributes), async |place| {
        if args.target.0.is_empty() || args.target.0.contains(&0) {
            return Err(Errno::EINVAL);
        }
        place
            .dir
            .fs()
            .symlink(place.dir.caller, place.dir.inode(), &args.at.name.0, &args.target.0)
            .await
    })
    .await
}

/// MKNOD.
pub(in super::super) async fn make_special(
    session: &Session,
    args: MkNodArgs,
) -> Reply<Created, WccData> {
    let (kind, wanted, device) = match &args.what {
        MkNodData::Device(FileType::Chr, wanted, device) => {
            (FileKind::CharDevice, wanted, rdev(device))
        }
        MkNodData::Device(_, wanted, device) => (FileKind::BlockDevice, wanted, rdev(device)),
        MkNodData::Plain(FileType::Sock, wanted) => (FileKind::Socket, wanted, 0),
        MkNodData::Plain(_, wanted) => (FileKind::Fifo, wanted, 0),
        MkNodData::Other(_) => return Err(failed(Status::BadType)),
    };
    make(session, &args.at, Some(wanted), async |place| {
        let is_device = matches!(kind, FileKind::CharDevice | FileKind::BlockDevice);
        if is_device && place.dir.caller.uid != 0 {
            return Err(Errno::EPERM);
        }
        let mode = place.new_mode(wanted.mode);
        place
            .dir
            .fs()
            .mknod(place.dir.caller, place.dir.inode(), &args.at.name.0, kind, mode, device)
            .await
    })
    .await
}

/// REMOVE.
pub(in super::super) async fn remove(session: &Session, args: DirOp) -> Reply<WccData, WccData> {
    take_away(session, &args, false).await
}

/// RMDIR.
pub(in super::super) async fn remove_directory(
    session: &Session,
    args: DirOp,
) -> Reply<WccData, WccData> {
    take_away(session, &args, true).await
}

async fn take_away(session: &Session, args: &DirOp, is_directory: bool) -> Reply<WccData, WccData> {
    let dir = session.changed_file(&args.dir).await.map_err(failed)?;
    let alone = session.lock([&dir]).await;
    let place = Place::new(dir).await.map_err(failed)?;
    let name = &args.name.0[..];
    let removed = async {
        match name {
            b"." => return Err(Errno::EINVAL),
            b".." => return Err(Errno::ENOTEMPTY),
            _ => place.check(name).await?,
        }
        let file = place.lookup(name).await?;
        access::check_sticky(&place.dir.attr, &file.attr, &place.dir.caller)?;
        let (fs, caller, parent) = (place.dir.fs(), place.dir.caller, place.dir.inode());
        match (is_directory, file.attr.kind == FileKind::Directory) {
            (true, true) => fs.rmdir(caller, parent, name).await,
            (true, false) => Err(Errno::ENOTDIR),
            (false, true) => Err(Errno::EISDIR),
            (false, false) => {
                fs.unlink(caller, parent, name).await?;
                close_if_last(session, &file);
                Ok(())
            }
        }
    };
    let removed = removed.await;
    let wcc = place.wcc().await;
    drop(alone);
    let persisted = match removed {
        Ok(()) => session.persist(&place.dir, &[place.dir.inode()]).await,
        error => error,
    };
    match persisted {
        Ok(()) => Ok(wcc),
        Err(error) => Err((Status::of(error), wcc)),
    }
}

/// A file whose last name is gone ends: no open of the gateway's keeps it.
fn close_if_last(session: &Session, file: &File) {
    if file.attr.nlink <= 1 {
        session.service.opens.forget(file.export.id, file.inode());
    }
}

/// RENAME.
pub(in super::super) async fn rename(
    session: &Session,
    args: RenameArgs,
) -> Reply<(WccData, WccData), (WccData, WccData)> {
    let from = session.changed_file(&args.from.dir).await.map_err(failed)?;
    let to = session.changed_file(&args.to.dir).await.map_err(failed)?;
    if from.export.id != to.export.id {
        return Err(failed(Status::XDev));
    }
    let alone = session.lock([&from, &to]).await;
    let from = Place::new(from).await.map_err(failed)?;
    let to = Place::new(to).await.map_err(failed)?;
    let renamed = move_name(session, &from, &args.from.name.0, &to, &args.to.name.0).await;
    let wcc = (from.wcc().await, to.wcc().await);
    drop(alone);
    let persisted = match renamed {
        Ok(file) => session.persist(&file, &[from.dir.inode(), to.dir.inode(), file.inode()]).await,
        Err(error) => Err(error),
    };
    match persisted {
        Ok(()) => Ok(wcc),
        Err(error) => Err((Status::of(error), wcc)),
    }
}

/// Moves a name; returns its file.
async fn move_name(
    session: &Session,
    from: &Place,
    name: &[u8],
    to: &Place,
    new_name: &[u8],
) -> Result<File, Errno> {
    from.check(name).await?;
    check_new_name(new_name)?;
    to.check(new_name).await?;
    let caller = from.dir.caller;
    let file = from.lookup(name).await?;
    access::check_sticky(&from.dir.attr, &file.attr, &caller)?;
    // A directory that gets another parent is written: its `..` changes.
    if file.attr.kind == FileKind::Directory && from.dir.inode() != to.dir.inode() {
        access::check(&**file.fs(), &file.attr, &caller, WRITE).await?;
    }
    let replaced = match to.lookup(new_name).await {
        Ok(replaced) => Some(replaced),
        Err(Errno::ENOENT) => None,
        Err(error) => return Err(error),
    };
    if let Some(replaced) = &replaced {
        access::check_sticky(&to.dir.attr, &replaced.attr, &caller)?;
    }
    let fs = from.dir.fs();
    fs.rename(caller, from.dir.inode(), name, to.dir.inode(), new_name, RenameFlags::default())
        .await?;
    if let Some(replaced) = replaced.filter(|replaced| replaced.inode() != file.inode()) {
        close_if_last(session, &replaced);
    }
    Ok(file)
}

/// LINK.
pub(in super::super) async fn link(
    session: &Session,
    args: LinkArgs,
) -> Reply<(Option<Attributes>, WccData), (Option<Attributes>, WccData)> {
    let file = session.changed_file(&args.file).await.map_err(failed)?;
    let dir = session.changed_file(&args.link.dir).await.map_err(failed)?;
    if file.export.id != dir.export.id {
        return Err(failed(Status::XDev));
    }
    let alone = session.lock([&dir]).await;
    let place = Place::new(dir).await.map_err(failed)?;
    let name = &args.link.name.0[..];
    let linked = async {
        check_new_name(name)?;
        place.check(name).await?;
        if file.attr.kind == FileKind::Directory {
            return Err(Errno::EPERM);
        }
        let entry = file.fs().link(file.caller, file.inode(), place.dir.inode(), name).await?;
        drop(file.beside(entry.attr));
        Ok(())
    };
    let linked = linked.await;
    let told = (file.now().await, place.wcc().await);
    drop(alone);
    let persisted = match linked {
        Ok(()) => session.persist(&file, &[place.dir.inode(), file.inode()]).await,
        error => error,
    };
    match persisted {
        Ok(()) => Ok(told),
        Err(error) => Err((Status::of(error), told)),
    }
}

/// Finds a path of names below a directory, without following links.
pub(in super::super) async fn walk(
    session: &Session,
    root: File,
    path: &[u8],
) -> Result<FileHandle, Errno> {
    let mut at = root;
    for name in path.split(|byte| *byte == b'/').filter(|name| !name.is_empty() && *name != b".") {
        if name == b".." {
            return Err(Errno::EACCES);
        }
        (at, _) = find(session, &at, name).await?;
    }
    session.handle(&at).await
}
