//! READDIR and READDIRPLUS.
//!
//! Cookies: 0 is the beginning, 1 lies after `.`, 2 after `..`, and `cookie + 2` after the entry to which the file system gave that
//! cookie. Where cookies last ([`FileSystem::has_lasting_cookies`]) each call opens the directory anew; other directories are listed by
//! hashes of their names (`listings`). Either way a listing goes on through restarts and changes.

use std::sync::Arc;

use atoll_vfs::{Attr, DirEntry, Entry, Errno, FileKind, FileSystem, InodeNumber, MAX_COOKIE};

use super::super::access::{self, EXECUTE, READ};
use super::super::listings::{ListedName, NameListing};
use super::super::nfs3::{
    Attributes, FileHandle, Name, ReadDirArgs, ReadDirPlusArgs, Reply, Status, Verifier,
};
use super::super::service::{File, Session, attributes_of};
use super::super::xdr::{Opaque, Reader, Writer, Xdr, XdrError};
use super::failed;

const AFTER_DOT: u64 = 1;
const AFTER_DOT_DOT: u64 = 2;

/// Entries asked for at a time.
const AT_A_TIME: usize = 256;
/// Longest reply, bytes.
const MAX_REPLY_BYTES: usize = 1 << 20;

/// Cookies last, so nothing has to be told of them.
const VERIFIER: Verifier = [0; 8];

/// Bytes of a reply beside its entries: status, attributes, verifier, the end of the list and whether it is the last.
const REPLY_BYTES: usize = 4 + 4 + 84 + 8 + 4 + 4;
/// Bytes of an entry beside its name: that there is one, its number, the name's length and the cookie.
const ENTRY_BYTES: usize = 4 + 8 + 4 + 8;
/// Bytes of attributes and handle, at most.
const PLUS_BYTES: usize = 4 + 84 + 4 + 4 + 64;

/// One entry of a reply.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(in super::super) struct Listed {
    /// Number of the file.
    pub(in super::super) fileid: u64,
    /// Its name.
    pub(in super::super) name: Name,
    /// Where to go on after it.
    pub(in super::super) cookie: u64,
    /// Of READDIRPLUS: attributes and handle, where they are known.
    pub(in super::super) plus: Option<(Option<Attributes>, Option<FileHandle>)>,
}

/// Reply of READDIR and, with `plus` in each entry, of READDIRPLUS.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(in super::super) struct ListOk {
    /// Of the directory.
    pub(in super::super) attributes: Option<Attributes>,
    /// What belongs to the cookies.
    pub(in super::super) verifier: Verifier,
    /// The entries.
    pub(in super::super) entries: Vec<Listed>,
    /// Whether the directory ends here.
    pub(in super::super) is_end: bool,
}

impl Xdr for ListOk {
    /// Only the server's side is needed.
    fn read(_: &mut Reader) -> Result<ListOk, XdrError> {
        Err(XdrError::Invalid)
    }

    fn write(&self, to: &mut Writer) {
        to.put(&self.attributes).put(&self.verifier);
        for entry in &self.entries {
            to.put(&true).put(&entry.fileid).put(&entry.name).put(&entry.cookie);
            if let Some((attributes, handle)) = &entry.plus {
                to.put(attributes).put(handle);
            }
        }
        to.put(&false).put(&self.is_end);
    }
}

/// READDIR.
pub(in super::super) async fn read(
    session: &Session,
    args: ReadDirArgs,
) -> Reply<ListOk, Option<Attributes>> {
    let most = (args.count as usize).min(MAX_REPLY_BYTES);
    list(session, &args.dir, args.cookie, Room { names: most, reply: most }, false).await
}

/// READDIRPLUS.
pub(in super::super) async fn read_plus(
    session: &Session,
    args: ReadDirPlusArgs,
) -> Reply<ListOk, Option<Attributes>> {
    let reply = (args.max_count as usize).min(MAX_REPLY_BYTES);
    let names = (args.dir_count as usize).min(reply);
    list(session, &args.dir, args.cookie, Room { names, reply }, true).await
}

/// Bytes that are left.
struct Room {
    /// For numbers, names and cookies (`dircount`).
    names: usize,
    /// In all (`maxcount`).
    reply: usize,
}

impl Room {
    /// Takes what an entry needs; whether there was as much.
    fn take(&mut self, name: usize, plus: bool) -> bool {
        let names = ENTRY_BYTES + name.next_multiple_of(4);
        let all = names + if plus { PLUS_BYTES } else { 0 };
        let fits = names <= self.names && all <= self.reply;
        if fits {
            (self.names, self.reply) = (self.names - names, self.reply - all);
        }
        fits
    }

    /// How many entries there is room for at most.
    fn entries(&self, plus: bool) -> usize {
        let all = ENTRY_BYTES + 4 + if plus { PLUS_BYTES } else { 0 };
        (self.names / (ENTRY_BYTES + 4)).min(self.reply / all)
    }
}

async fn list(
    session: &Session,
    dir: &FileHandle,
    cookie: u64,
    mut room: Room,
    plus: bool,
) -> Reply<ListOk, Option<Attributes>> {
    let dir = session.file(dir).await.map_err(failed)?;
    room.reply = room.reply.saturating_sub(REPLY_BYTES);
    if !plus {
        room.names = room.reply;
    }
    let listed = entries(session, &dir, cookie, room, plus).await;
    // As they were before the names were read: a client that keeps these names must notice what has changed since.
    let attributes = Some(dir.attributes());
    match listed {
        Ok((entries, is_end)) if is_end || !entries.is_empty() => {
            Ok(ListOk { attributes, verifier: VERIFIER, entries, is_end })
        }
        Ok(_) => Err((Status::TooSmall, attributes)),
        Err(status) => Err((status, attributes)),
    }
}

async fn entries(
    session: &Session,
    dir: &File,
    cookie: u64,
    mut room: Room,
    plus: bool,
) -> Result<(Vec<Listed>, bool), Status> {
    let fs = dir.fs().clone();
    if dir.attr.kind != FileKind::Directory {
        return Err(Status::NotDir);
    }
    let may = |bits| access::may(&*fs, &dir.attr, &dir.caller, bits);
    if !may(READ).await.map_err(Status::of)? {
        return Err(Status::Acces);
    }
    // Names without what they stand for.
    let shows_files = plus && may(EXECUTE).await.map_err(Status::of)?;
    let mut listed = Vec::new();
    for (after, name) in [(AFTER_DOT, "."), (AFTER_DOT_DOT, "..")] {
        if cookie >= after {
            continue;
        }
        if !room.take(name.len(), plus) {
            return Ok((listed, false));
        }
        let attr = if after == AFTER_DOT { Some(dir.attr) } else { parent(dir).await };
        let attributes =
            attr.filter(|_| shows_files).map(|attr| attributes_of(dir.export.id, &attr));
        listed.push(Listed {
            fileid: attr.map_or(dir.attr.inode.0, |attr| attr.inode.0),
            name: Opaque::from(name.as_bytes()),
            cookie: after,
            plus: plus.then_some((attributes, None)),
        });
    }
    let mut from = cookie.saturating_sub(AFTER_DOT_DOT);
    if from > MAX_COOKIE {
        return Err(Status::BadCookie);
    }
    let names = DirectoryNames::open(session, dir, from == 0).await.map_err(Status::of)?;
    loop {
        // One more than fit: whether that is the last one is to be known.
        let limit = AT_A_TIME.min(room.entries(plus) + 1);
        let part = names.after(dir, from, limit, shows_files).await.map_err(Status::of)?;
        let Some(last) = part.last() else { return Ok((listed, true)) };
        from = last.entry.cookie;
        for HeldEntry { entry, .. } in &part {
            if !room.take(entry.name.len(), plus) {
                return Ok((listed, false));
            }
            let mut shown = (None, None);
            if let Some(found) = entry.entry.as_ref().filter(|_| shows_files) {
                let handle = fs.handle_of(found.attr.inode).await.ok();
                let handle = handle.map(|handle| session.service.key.seal(dir.export.id, &handle));
                shown = (Some(attributes_of(dir.export.id, &found.attr)), handle);
            }
            listed.push(Listed {
                fileid: entry.inode.0,
                name: Opaque(entry.name.clone()),
                cookie: entry.cookie + AFTER_DOT_DOT,
                plus: plus.then_some(shown),
            });
        }
    }
}

async fn parent(dir: &File) -> Option<Attr> {
    let entry = dir.fs().parent(dir.caller, dir.inode()).await.ok()?;
    Some(dir.beside(entry.attr).attr)
}

/// The names of a directory, in an order that lasts.
enum DirectoryNames {
    /// The file system's own.
    Lasting(OpenDirectory),
    /// That of their hashes.
    Hashed(Arc<NameListing>),
}

impl DirectoryNames {
    async fn open(
        session: &Session,
        dir: &File,
        is_beginning: bool,
    ) -> Result<DirectoryNames, Errno> {
        if dir.fs().has_lasting_cookies() {
            return OpenDirectory::open(dir.fs().clone(), dir).await.map(DirectoryNames::Lasting);
        }
        let listings = &session.service.listings;
        let listing =
            listings.get(dir.export.id, dir.fs(), dir.caller, &dir.attr, is_beginning).await?;
        Ok(DirectoryNames::Hashed(listing))
    }

    /// The next entries after a cookie; none at the end.
    async fn after(
        &self,
        dir: &File,
        cookie: u64,
        limit: usize,
        with_entries: bool,
    ) -> Result<Vec<HeldEntry>, Errno> {
        let fs = dir.fs();
        match self {
            DirectoryNames::Lasting(open) => {
                let (inode, handle) = (dir.inode(), open.handle);
                let part = fs.readdir(inode, handle, cookie, limit, with_entries).await?;
                Ok(part.into_iter().map(|entry| HeldEntry { fs: fs.clone(), entry }).collect())
            }
            DirectoryNames::Hashed(listing) => {
                Ok(looked_up(listing, dir, cookie, limit, with_entries).await)
            }
        }
    }
}

/// The next entries of a listing. Names that are gone since are left out.
async fn looked_up(
    listing: &NameListing,
    dir: &File,
    mut cookie: u64,
    limit: usize,
    with_entries: bool,
) -> Vec<HeldEntry> {
    loop {
        let part = listing.after(cookie, limit);
        let Some(last) = part.last() else { return Vec::new() };
        cookie = last.cookie;
        let found: Vec<Option<Result<Entry, Errno>>> = if with_entries {
            let names = part.iter().map(|listed| listed.name.clone()).collect();
            match dir.fs().lookup_all(dir.caller, dir.inode(), names).await {
                Ok(found) => found.into_iter().map(Some).collect(),
                Err(errno) => vec![Some(Err(errno)); part.len()],
            }
        } else {
            vec![None; part.len()]
        };
        let entry = |(listed, found): (&ListedName, Option<Result<Entry, Errno>>)| {
            let entry = match found {
                Some(Err(Errno::ENOENT)) => return None,
                found => found.and_then(Result::ok),
            };
            let ListedName { cookie, name, kind, inode } = listed.clone();
            let (inode, kind) = entry.map_or((inode, kind), |e| (e.attr.inode, e.attr.kind));
            let entry = DirEntry { name, kind, inode, cookie, entry };
            Some(HeldEntry { fs: dir.fs().clone(), entry })
        };
        let entries: Vec<HeldEntry> = part.iter().zip(found).filter_map(entry).collect();
        if !entries.is_empty() {
            return entries;
        }
    }
}

/// An entry whose lookup is taken back when this is dropped.
struct HeldEntry {
    fs: Arc<dyn FileSystem>,
    entry: DirEntry,
}

impl Drop for HeldEntry {
    fn drop(&mut self) {
        if let Some(entry) = &self.entry.entry {
            self.fs.forget(entry.attr.inode, 1);
        }
    }
}

/// A directory that is open until this is dropped.
struct OpenDirectory {
    fs: Arc<dyn FileSystem>,
    inode: InodeNumber,
    handle: atoll_vfs::Handle,
}

impl OpenDirectory {
    async fn open(fs: Arc<dyn FileSystem>, dir: &File) -> Result<OpenDirectory, Errno> {
        let opened = fs.opendir(dir.caller, dir.inode()).await?;
        Ok(OpenDirectory { fs, inode: dir.inode(), handle: opened.handle })
    }
}

impl Drop for OpenDirectory {
    fn drop(&mut self) {
        let closed = self.fs.closedir(self.inode, self.handle);
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(closed);
        }
    }
}
