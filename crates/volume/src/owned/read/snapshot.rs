//! One version of a volume, by path.

use std::fmt;
use std::sync::Arc;

use atoll_key::VolumeId;
use bytes::Bytes;
use futures_util::stream::{BoxStream, StreamExt, TryStreamExt};

use super::error::{ReadError, shown_path};
use crate::blocks::cache::BlockCache;
use crate::blocks::directory::{self, UnreadLeaf};
use crate::blocks::error::BlockError;
use crate::blocks::file::File;
use crate::blocks::pace::Wanted;
use crate::format::{Content, DirectoryEntry, DirectoryRef, xattrs};
use crate::owned::history::{self, State};
use crate::owned::root::Root;

/// One version of a volume; never changes. Cheap to keep: blocks are fetched as they are
/// read.
pub struct Snapshot {
    pub(crate) id: VolumeId,
    pub(crate) version: u64,
    pub(crate) root: Root,
    pub(crate) cache: Arc<BlockCache>,
    pub(crate) read_ahead_bytes: u64,
}

impl fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Snapshot({:?}, version {})", self.id, self.version)
    }
}

/// A file, directory or link found in a snapshot.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Item {
    /// Its path from the volume's root, without a leading slash; empty for the root.
    pub path: Bytes,
    /// What its directory says about it. The root's name is empty.
    pub entry: DirectoryEntry,
}

/// A directory being listed.
#[derive(Clone)]
pub struct Listing {
    cache: Arc<BlockCache>,
    path: Bytes,
    directory: DirectoryRef,
    links: DirectoryRef,
    next: u64,
}

impl fmt::Debug for Listing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Listing({}, at {})", shown_path(&self.path), self.next)
    }
}

impl Listing {
    /// The next entries in order of their names, at most `limit`; empty at the end.
    pub async fn next_page(&mut self, limit: usize) -> Result<Vec<Item>, ReadError> {
        let mut page = Vec::new();
        let read = self.read_page(&mut page, limit).await;
        read.map(|()| page).map_err(|unread| unread.error.at(&self.path))
    }

    /// As [`Listing::next_page`], but after an error goes on behind the block that could not
    /// be read: the entries before it, or else the error and how many entries it hides.
    pub(crate) async fn next_page_past(
        &mut self,
        limit: usize,
    ) -> Result<Vec<Item>, (ReadError, u64)> {
        let mut page = Vec::new();
        match self.read_page(&mut page, limit).await {
            // The next call meets the block again, and then has nothing before it.
            Ok(()) => Ok(page),
            Err(_) if !page.is_empty() => Ok(page),
            Err(unread) => {
                self.next = self.next.saturating_add(unread.entries);
                Err((unread.error.at(&self.path), unread.entries))
            }
        }
    }

    async fn read_page(&mut self, page: &mut Vec<Item>, limit: usize) -> Result<(), UnreadLeaf> {
        while page.len() < limit {
            let found = directory::leaf_at(&self.cache, &self.directory, self.next).await?;
            let Some((leaf, from)) = found else { break };
            for entry in leaf.entries().iter().skip(from).take(limit - page.len()) {
                let path = joined(&self.path, &entry.name);
                let found = directory::resolved(&self.cache, &self.links, entry.clone()).await;
                let entry = found.map_err(|error| UnreadLeaf { error, entries: 1 })?;
                page.push(Item { path, entry });
                self.next += 1;
            }
        }
        Ok(())
    }
}

/// `parent/name`, without a slash before the first component.
pub(crate) fn joined(parent: &[u8], name: &[u8]) -> Bytes {
    if parent.is_empty() {
        return Bytes::copy_from_slice(name);
    }
    Bytes::from([parent, b"/", name].concat())
}

impl Snapshot {
    /// The volume.
    pub fn volume(&self) -> VolumeId {
        self.id
    }

    /// The version its publisher gave it.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// What the publisher signed: label, totals, time of publishing.
    pub fn info(&self) -> &Root {
        &self.root
    }

    /// The old states of the volume that are kept, the oldest first.
    pub async fn history(&self) -> Result<Vec<State>, ReadError> {
        let states = history::states(&self.cache, &self.root).await;
        states.map_err(|error| error.at(b""))
    }

    /// The root directory.
    pub fn root(&self) -> Item {
        Item { path: Bytes::new(), entry: self.root.entry() }
    }

    /// Finds `path`: components separated by `/`; empty ones and `.` are passed over, `..`
    /// is refused. Symbolic links are not followed.
    pub async fn resolve(&self, path: &[u8]) -> Result<Item, ReadError> {
        let mut item = self.root();
        for name in path.split(|byte| *byte == b'/') {
            match name {
                b"" | b"." => continue,
                b".." => return Err(ReadError::GoesUp { path: shown_path(path) }),
                _ => {}
            }
            item = match self.child(&item, name).await? {
                Some(child) => child,
                None => {
                    let path = shown_path(&joined(&item.path, name));
                    return Err(ReadError::NoSuchEntry { path });
                }
            };
        }
        Ok(item)
    }

    /// The entry `name` of a directory.
    pub async fn child(&self, directory: &Item, name: &[u8]) -> Result<Option<Item>, ReadError> {
        let found = self.find(&directory.as_directory()?, name).await;
        let entry = found.map_err(|error| error.at(&directory.path))?;
        Ok(entry.map(|entry| Item { path: joined(&directory.path, name), entry }))
    }

    /// The entry `name` of a directory.
    pub(crate) async fn find(
        &self,
        directory: &DirectoryRef,
        name: &[u8],
    ) -> Result<Option<DirectoryEntry>, BlockError> {
        match directory::find(&self.cache, directory, name).await? {
            Some(entry) => Ok(Some(self.resolved(entry).await?)),
            None => Ok(None),
        }
    }

    /// What an entry of one of this version's directories stands for.
    pub(crate) async fn resolved(
        &self,
        entry: DirectoryEntry,
    ) -> Result<DirectoryEntry, BlockError> {
        directory::resolved(&self.cache, &self.root.mounted.links, entry).await
    }

    /// Lists a directory, in order of the names' bytes.
    pub fn list(&self, directory: &Item) -> Result<Listing, ReadError> {
        Ok(Listing {
            cache: self.cache.clone(),
            path: directory.path.clone(),
            directory: directory.as_directory()?,
            links: self.root.mounted.links,
            next: 0,
        })
    }

    /// Up to `len` bytes of a file at `offset`; fewer only at its end.
    pub async fn read_range(&self, file: &Item, offset: u64, len: u32) -> Result<Bytes, ReadError> {
        let opened = self.open(file).await?;
        opened.read(offset, len).await.map_err(|error| error.at(&file.path))
    }

    /// A whole file in order, as it is fetched, block by block. At most `read_ahead_bytes`
    /// of the volume's options are fetched ahead, and as many at once as the volume's
    /// [window](crate::blocks::window) allows.
    pub fn read_stream(&self, file: &Item) -> BoxStream<'static, Result<Bytes, ReadError>> {
        let (cache, item, ahead) = (self.cache.clone(), file.clone(), self.read_ahead_bytes);
        let opening = async move {
            let opened = item.open(&cache).await?;
            let path = item.path;
            Ok(opened.stream(ahead).map_err(move |error| error.at(&path)))
        };
        futures_util::stream::once(opening).try_flatten().boxed()
    }

    /// The extended attributes of an item, in order of their names.
    pub async fn xattrs(&self, item: &Item) -> Result<Vec<(Bytes, Bytes)>, ReadError> {
        let read = read_xattrs(&self.cache, &item.entry).await;
        read.map_err(|error| error.at(&item.path))
    }

    pub(crate) async fn open(&self, file: &Item) -> Result<File, ReadError> {
        file.open(&self.cache).await
    }
}

impl Item {
    /// The target, if this is a symbolic link.
    pub fn target(&self) -> Option<&Bytes> {
        match &self.entry.content {
            Content::Symlink(target) => Some(target),
            _ => None,
        }
    }

    fn as_directory(&self) -> Result<DirectoryRef, ReadError> {
        match self.entry.content {
            Content::Directory(directory) => Ok(directory),
            _ => Err(ReadError::NotADirectory { path: shown_path(&self.path) }),
        }
    }

    async fn open(&self, cache: &Arc<BlockCache>) -> Result<File, ReadError> {
        let Content::Regular { size_bytes, inode, .. } = self.entry.content else {
            return Err(ReadError::NotAFile { path: shown_path(&self.path) });
        };
        File::open(cache, inode, size_bytes).await.map_err(|error| error.at(&self.path))
    }
}

/// About how long a block of extended attributes is, bytes.
const XATTR_BYTES: u64 = 1 << 10;

pub(crate) async fn read_xattrs(
    cache: &Arc<BlockCache>,
    entry: &DirectoryEntry,
) -> Result<Vec<(Bytes, Bytes)>, BlockError> {
    let Some(hash) = entry.xattrs else { return Ok(Vec::new()) };
    let bytes = cache.get(hash, Wanted::Now(XATTR_BYTES)).await?;
    xattrs::decode(&bytes).map_err(BlockError::bad(hash))
}
