//! What a kind of volume answers for the front.

use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use atoll_env::Env;
use atoll_vfs::{
    AttrReply, Caller, CreateVerifier, Entry, Errno, FileKind, InodeNumber, InvalidationQueue,
    Locks, OpenFlags, Opened, PersistentHandle, RenameFlags, SeekTo, SetAttr, StatFs, Writer,
    XattrFlags,
};
use bytes::Bytes;

/// An open file or directory: its inode number and its handle.
pub(crate) type OpenId = (u64, u64);

/// A directory's inode number, and a name in it.
pub(crate) type Place<'a> = (u64, &'a Bytes);

/// What a call is about, for messages: an inode number, and a name in that directory.
pub(crate) type About<'a> = (u64, Option<&'a Bytes>);

/// A file to be made.
#[derive(Clone, Debug)]
pub(crate) enum Birth {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link to a target.
    Symlink(Bytes),
    /// A FIFO, socket or device, and the device's number.
    Special(FileKind, u64),
}

/// A name of an open directory.
#[derive(Debug)]
pub(crate) struct Listed<F> {
    /// The name.
    pub(crate) name: Bytes,
    /// The kind of its file.
    pub(crate) kind: FileKind,
    /// Where to go on after it.
    pub(crate) cookie: u64,
    /// What the listing says of its file.
    pub(crate) file: F,
}

impl<F> Listed<F> {
    /// The same name, with something else said of its file.
    pub(crate) fn map<G>(self, file: impl FnOnce(F) -> G) -> Listed<G> {
        let Listed { name, kind, cookie, file: said } = self;
        Listed { name, kind, cookie, file: file(said) }
    }
}

/// What a name of a listing stands for now.
pub(crate) enum Found {
    /// A file of this number; its entry was counted as a lookup.
    Entry(Entry),
    /// A file of this number, whose entry was not asked for or cannot be read.
    Number(u64),
    /// The name is gone.
    Gone,
}

/// A call under way.
pub(crate) trait Call<T, F>: Future<Output = Result<T, F>> + Send {}

impl<T, F, C: Future<Output = Result<T, F>> + Send> Call<T, F> for C {}

/// One kind of volume. The calls are those of [`atoll_vfs::FileSystem`], which says what they do;
/// names have been copied, and numbers and handles are bare. The default of a call that changes
/// something refuses with [`Errno::EROFS`].
pub(crate) trait Engine: Send + Sync + 'static {
    /// Why a call failed.
    type Fault: From<Errno> + Send;

    /// What a listing says of a file.
    type File: Send + Sync;

    /// Entries of a listing that are read at the same time; 1 where that seldom asks the ring.
    const READS_AT_ONCE: usize = 1;

    /// Time, for the calls' deadline.
    fn env(&self) -> &Env;

    /// Logs why a call failed, once, and says what the program is told.
    fn report(&self, about: About<'_>, fault: Self::Fault) -> impl Future<Output = Errno> + Send;

    /// Logs that a call took too long.
    fn report_late(&self, about: About<'_>) {
        let _ = about;
    }

    /// Whether the mount works, and why not: `ok`, or a sentence. Answers within seconds, also while blocks cannot be
    /// read.
    fn status(&self) -> impl Future<Output = String> + Send;

    /// See [`atoll_vfs::FileSystem::locks`].
    fn locks(&self) -> Option<Arc<dyn Locks>> {
        None
    }

    /// See [`atoll_vfs::FileSystem::invalidations`].
    fn invalidations(&self) -> Option<Arc<InvalidationQueue>> {
        None
    }

    /// See [`atoll_vfs::FileSystem::missing_ttl`].
    fn missing_ttl(&self) -> Duration {
        Duration::ZERO
    }

    /// The entry of a name, counted as one lookup.
    fn lookup(&self, place: Place<'_>) -> impl Call<Entry, Self::Fault>;

    /// The entry of the directory above one, counted as one lookup.
    fn parent(&self, inode: u64) -> impl Call<Entry, Self::Fault>;

    /// The persistent handle of an inode.
    fn handle_of(&self, inode: u64) -> impl Call<PersistentHandle, Self::Fault>;

    /// The entry of the file that a persistent handle names, counted as one lookup.
    fn by_handle(&self, handle: &PersistentHandle) -> impl Call<Entry, Self::Fault>;

    /// Takes back lookups.
    fn forget(&self, inode: u64, count: u64);

    /// Attributes.
    fn getattr(&self, inode: u64, handle: Option<u64>) -> impl Call<AttrReply, Self::Fault>;

    /// Changes attributes.
    fn setattr(
        &self,
        inode: u64,
        handle: Option<u64>,
        changes: SetAttr,
    ) -> impl Call<AttrReply, Self::Fault> {
        let _ = (inode, handle, changes);
        ready(Err(Errno::EROFS.into()))
    }

    /// The target of a symbolic link.
    fn readlink(&self, inode: u64) -> impl Call<Bytes, Self::Fault>;

    /// Makes a file; its entry is counted as one lookup.
    fn make(
        &self,
        caller: Caller,
        place: Place<'_>,
        birth: Birth,
        mode: u32,
    ) -> impl Call<Entry, Self::Fault> {
        let _ = (caller, place, birth, mode);
        ready(Err(Errno::EROFS.into()))
    }

    /// Makes a regular file that its creator recognises by `verifier`.
    fn make_exclusive(
        &self,
        caller: Caller,
        place: Place<'_>,
        mode: u32,
        verifier: CreateVerifier,
    ) -> impl Call<Entry, Self::Fault> {
        let _ = (caller, place, mode, verifier);
        ready(Err(Errno::EROFS.into()))
    }

    /// Makes another name for a file.
    fn link(&self, inode: u64, place: Place<'_>) -> impl Call<Entry, Self::Fault> {
        let _ = (inode, place);
        ready(Err(Errno::EROFS.into()))
    }

    /// Removes the name of an empty directory, or of anything else.
    fn remove(&self, place: Place<'_>, is_directory: bool) -> impl Call<(), Self::Fault> {
        let _ = (place, is_directory);
        ready(Err(Errno::EROFS.into()))
    }

    /// Renames.
    fn rename(
        &self,
        from: Place<'_>,
        to: Place<'_>,
        flags: RenameFlags,
    ) -> impl Call<(), Self::Fault> {
        let _ = (from, to, flags);
        ready(Err(Errno::EROFS.into()))
    }

    /// Opens a regular file.
    fn open(&self, caller: Caller, inode: u64, flags: OpenFlags) -> impl Call<Opened, Self::Fault>;

    /// Makes and opens a regular file.
    fn create(
        &self,
        caller: Caller,
        place: Place<'_>,
        mode: u32,
        flags: OpenFlags,
    ) -> impl Call<(Entry, Opened), Self::Fault> {
        let _ = (caller, place, mode, flags);
        ready(Err(Errno::EROFS.into()))
    }

    /// Reads from an open file.
    fn read(&self, open: OpenId, offset: u64, len: u32) -> impl Call<Bytes, Self::Fault>;

    /// Writes into an open file.
    fn write(
        &self,
        writer: Writer,
        open: OpenId,
        offset: u64,
        data: &Bytes,
    ) -> impl Call<u32, Self::Fault> {
        let _ = (writer, open, offset, data);
        ready(Err(Errno::EROFS.into()))
    }

    /// Reports errors of delayed writes at a `close(2)`. [`Errno::ENOSYS`]: there are none.
    fn flush(&self, open: OpenId) -> impl Call<(), Self::Fault> {
        let _ = open;
        ready(Err(Errno::ENOSYS.into()))
    }

    /// Makes a file durable.
    fn fsync(&self, open: OpenId) -> impl Call<(), Self::Fault> {
        let _ = open;
        ready(Ok(()))
    }

    /// Makes a directory durable.
    fn fsyncdir(&self, inode: u64) -> impl Call<(), Self::Fault> {
        let _ = inode;
        ready(Ok(()))
    }

    /// Has names and attributes of files survive a crash of this machine.
    fn persist(&self, inodes: &[InodeNumber]) -> impl Call<(), Self::Fault> {
        let _ = inodes;
        ready(Ok(()))
    }

    /// Makes everything durable.
    fn sync(&self) -> impl Call<(), Self::Fault> {
        ready(Ok(()))
    }

    /// The next data or hole of an open file.
    fn seek(&self, open: OpenId, offset: u64, to: SeekTo) -> impl Call<u64, Self::Fault>;

    /// Reserves space for, or punches a hole into, a range of an open file: offset and length.
    fn fallocate(&self, open: OpenId, range: (u64, u64), mode: i32) -> impl Call<(), Self::Fault> {
        let _ = (open, range, mode);
        ready(Err(Errno::EOPNOTSUPP.into()))
    }

    /// Ends an open of a file.
    fn close(&self, open: OpenId) -> impl Call<(), Self::Fault>;

    /// Ends an open of a directory.
    fn closedir(&self, open: OpenId) -> impl Call<(), Self::Fault> {
        self.close(open)
    }

    /// Opens a directory; returns the handle.
    fn opendir(&self, inode: u64) -> impl Call<u64, Self::Fault>;

    /// Names of an open directory after a cookie, at most `limit`; none at its end. From cookie 0 on, a
    /// directory that may change is listed as it is now (POSIX, `rewinddir`).
    fn names(
        &self,
        open: OpenId,
        cookie: u64,
        limit: usize,
    ) -> impl Call<Vec<Listed<Self::File>>, Self::Fault>;

    /// What a name of a listing stands for; its entry if that is wanted and can be read.
    fn listed(
        &self,
        directory: u64,
        listed: &Listed<Self::File>,
        with_entry: bool,
    ) -> impl Future<Output = Found> + Send;

    /// Sizes and counts of the volume.
    fn statfs(&self) -> impl Future<Output = StatFs> + Send;

    /// The value of an extended attribute.
    fn getxattr(&self, inode: u64, name: &Bytes) -> impl Call<Bytes, Self::Fault>;

    /// The names of the extended attributes.
    fn listxattr(&self, inode: u64) -> impl Call<Vec<Bytes>, Self::Fault>;

    /// Sets an extended attribute, or removes it if there is no value.
    fn setxattr(
        &self,
        inode: u64,
        name: &Bytes,
        value: Option<Bytes>,
        flags: XattrFlags,
    ) -> impl Call<(), Self::Fault> {
        let _ = (inode, name, value, flags);
        ready(Err(Errno::EROFS.into()))
    }
}
