//! A file system that does what its test says: names stand for behaviours.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_vfs::{
    Answer, Attr, AttrReply, Caller, DirEntry, Entry, Errno, FileKind, FileSystem, FileTime,
    Handle, InodeNumber, OpenFlags, Opened, SetAttr, StatFs, Writer,
};
use bytes::Bytes;
use tokio::sync::watch;

/// Reads of this wait until the gate opens.
pub(crate) const SLOW: InodeNumber = InodeNumber(10);
pub(crate) const QUICK: InodeNumber = InodeNumber(11);
/// Reads of this panic at once, and after a while.
pub(crate) const PANICS: InodeNumber = InodeNumber(12);
pub(crate) const PANICS_LATER: InodeNumber = InodeNumber(13);
/// Reads of this give more than was asked for.
pub(crate) const GENEROUS: InodeNumber = InodeNumber(14);
/// A link whose target is longer than a page.
pub(crate) const LONG_LINK: InodeNumber = InodeNumber(15);
pub(crate) const LINK_LEN: usize = 5000;
/// Reads of this keep their thread waiting until the gate opens.
pub(crate) const BLOCKING: InodeNumber = InodeNumber(16);

/// May be written, and counts flushes as begun, of which it says that it needs none.
pub(crate) const WRITABLE: InodeNumber = InodeNumber(17);

/// The kernel may keep what it reads of this. Writes begin, and take effect when the gate opens.
pub(crate) const HELD: InodeNumber = InodeNumber(18);

/// A disk with room for one page: longer writes of this are cut short, later ones are `ENOSPC`.
pub(crate) const ONE_PAGE: InodeNumber = InodeNumber(19);

/// Is listed, and cannot be looked up.
pub(crate) const UNREADABLE: InodeNumber = InodeNumber(20);

pub(crate) const FILES: [(&str, InodeNumber); 11] = [
    // The kernel asks for attributes with the first page of a listing.
    ("unreadable", UNREADABLE),
    ("held", HELD),
    ("one page", ONE_PAGE),
    ("slow", SLOW),
    ("writable", WRITABLE),
    ("blocking", BLOCKING),
    ("quick", QUICK),
    ("panics", PANICS),
    ("panics later", PANICS_LATER),
    ("generous", GENEROUS),
    ("long link", LONG_LINK),
];

/// Beside [`FILES`], a name `errno N` fails with that number.
pub(crate) struct Scripted {
    /// Whether slow reads and held writes may end.
    pub gate: watch::Receiver<bool>,
    /// How many slow reads and held writes have begun, and flushes.
    pub waiting: watch::Sender<usize>,
    /// The byte that all of [`HELD`] consists of.
    pub held: Arc<AtomicU8>,
    /// What arrives about the length of files, in order.
    pub lengths: Arc<Mutex<Vec<&'static str>>>,
}

fn attr(inode: InodeNumber) -> Attr {
    let kind = match inode {
        InodeNumber::ROOT => FileKind::Directory,
        LONG_LINK => FileKind::Symlink,
        _ => FileKind::Regular,
    };
    let time = FileTime::default();
    Attr {
        inode,
        kind,
        mode: 0o755,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        size_bytes: 4096,
        blocks_512: 8,
        block_size_bytes: 4096,
        atime: time,
        mtime: time,
        ctime: time,
    }
}

fn answer<T: Send + 'static>(result: Result<T, Errno>) -> Answer<T> {
    Box::pin(async move { result })
}

impl FileSystem for Scripted {
    fn lookup(&self, _caller: Caller, _parent: InodeNumber, name: &[u8]) -> Answer<Entry> {
        let name = String::from_utf8_lossy(name).into_owned();
        if let Some(number) = name.strip_prefix("errno ") {
            return answer(Err(Errno(number.parse().unwrap())));
        }
        assert_ne!(name, "panics in lookup", "on purpose");
        let found = FILES.iter().find(|(known, _)| *known == name);
        if found.is_some_and(|(_, inode)| *inode == UNREADABLE) {
            return answer(Err(Errno::EIO));
        }
        answer(found.ok_or(Errno::ENOENT).map(|(_, inode)| Entry {
            attr: attr(*inode),
            generation: 0,
            name_ttl: Duration::ZERO,
            attr_ttl: Duration::ZERO,
        }))
    }

    fn getattr(&self, inode: InodeNumber, _handle: Option<Handle>) -> Answer<AttrReply> {
        answer(Ok(AttrReply { attr: attr(inode), ttl: Duration::ZERO }))
    }

    fn readlink(&self, _inode: InodeNumber) -> Answer<Bytes> {
        answer(Ok(Bytes::from(vec![b'x'; LINK_LEN])))
    }

    fn open(&self, _caller: Caller, inode: InodeNumber, flags: OpenFlags) -> Answer<Opened> {
        if flags.has(OpenFlags::TRUNCATE) {
            self.lengths.lock().unwrap().push("open that empties");
        }
        let cached = matches!(inode, HELD | ONE_PAGE);
        if flags.writes() && inode != WRITABLE && !cached {
            return answer(Err(Errno::EROFS));
        }
        answer(Ok(Opened { handle: Handle::NONE, keep_cache: cached, direct_io: !cached }))
    }

    fn read(&self, inode: InodeNumber, _handle: Handle, offset: u64, len: u32) -> Answer<Bytes> {
        if offset >= 4096 {
            return answer(Ok(Bytes::new()));
        }
        let data = Bytes::from(vec![b'd'; len.min(4096) as usize]);
        match inode {
            SLOW => {
                let mut gate = self.gate.clone();
                self.waiting.send_modify(|count| *count += 1);
                Box::pin(async move {
                    gate.wait_for(|open| *open).await.map_err(|_| Errno::EIO)?;
                    Ok(data)
                })
            }
            BLOCKING => {
                self.waiting.send_modify(|count| *count += 1);
                while !*self.gate.borrow() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                answer(Ok(data))
            }
            PANICS => panic!("on purpose, before there is a future"),
            PANICS_LATER => Box::pin(async {
                tokio::task::yield_now().await;
                panic!("on purpose, in a task")
            }),
            HELD => answer(Ok(Bytes::from(vec![self.held.load(Ordering::SeqCst); data.len()]))),
            GENEROUS => answer(Ok(Bytes::from(vec![b'g'; len as usize + 100]))),
            _ => answer(Ok(data)),
        }
    }

    fn write(
        &self,
        _: Writer,
        inode: InodeNumber,
        _: Handle,
        offset: u64,
        data: Bytes,
    ) -> Answer<u32> {
        let len = data.len() as u32;
        match inode {
            HELD => {
                let (mut gate, held) = (self.gate.clone(), self.held.clone());
                self.waiting.send_modify(|count| *count += 1);
                Box::pin(async move {
                    gate.wait_for(|open| *open).await.map_err(|_| Errno::EIO)?;
                    held.store(data[0], Ordering::SeqCst);
                    Ok(len)
                })
            }
            ONE_PAGE if offset >= 4096 => answer(Err(Errno::ENOSPC)),
            ONE_PAGE => answer(Ok(len.min(4096))),
            _ => answer(Ok(len)),
        }
    }

    fn setattr(
        &self,
        _: Caller,
        inode: InodeNumber,
        handle: Option<Handle>,
        changes: SetAttr,
    ) -> Answer<AttrReply> {
        if changes.size_bytes.is_some() {
            let what = if handle.is_some() { "ftruncate" } else { "truncate" };
            self.lengths.lock().unwrap().push(what);
        }
        answer(Ok(AttrReply { attr: attr(inode), ttl: Duration::ZERO }))
    }

    fn flush(&self, _inode: InodeNumber, _handle: Handle) -> Answer<()> {
        self.waiting.send_modify(|count| *count += 1);
        answer(Err(Errno::ENOSYS))
    }

    fn close(&self, _inode: InodeNumber, _handle: Handle) -> Answer<()> {
        answer(Ok(()))
    }

    fn has_stateless_directories(&self) -> bool {
        true
    }

    /// Not called (Linux 5.1): the kernel is told to list without.
    fn opendir(&self, _caller: Caller, _inode: InodeNumber) -> Answer<Opened> {
        answer(Err(Errno::EIO))
    }

    /// Lists a name no directory may hold before each that it may.
    fn readdir(
        &self,
        _inode: InodeNumber,
        _handle: Handle,
        cookie: u64,
        limit: usize,
        with_entries: bool,
    ) -> Answer<Vec<DirEntry>> {
        let names = FILES.iter().flat_map(|(name, inode)| [("a/b", *inode), (*name, *inode)]);
        let entries = names.zip(1..).map(|((name, inode), cookie)| DirEntry {
            name: Bytes::from_static(name.as_bytes()),
            kind: attr(inode).kind,
            inode,
            cookie,
            entry: (with_entries && inode != UNREADABLE).then(|| Entry {
                attr: attr(inode),
                generation: 0,
                name_ttl: Duration::ZERO,
                attr_ttl: Duration::ZERO,
            }),
        });
        // After the first page one at a time, so that some pages hold nothing that can be used.
        let most = if cookie == 0 { 4 } else { 1 };
        answer(Ok(entries.skip(cookie as usize).take(limit.min(most)).collect()))
    }

    fn closedir(&self, _inode: InodeNumber, _handle: Handle) -> Answer<()> {
        answer(Err(Errno::EIO))
    }

    fn statfs(&self, _inode: InodeNumber) -> Answer<StatFs> {
        answer(Ok(StatFs { block_size_bytes: 4096, max_name_bytes: 255, ..StatFs::default() }))
    }
}
