//! The walk of a copy: makes directories and yields what else is in them.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use atoll_key::BlockHash;
use atoll_vfs::FileKind;
use bytes::Bytes;
use futures_util::stream::{self, Stream};

use super::dest::{DestDir, hashed_part_name, part_name};
use super::{Copy, GetTreeError, add};
use crate::owned::format::{Content, FormatError, MAX_DEPTH};
use crate::owned::read::error::BlockError;
use crate::owned::read::{Item, Listing, Snapshot};

/// Entries listed at a time.
const PAGE_ENTRIES: usize = 512;

/// Subdirectories whose blocks are fetched ahead, per page.
const DIRECTORIES_AHEAD: usize = 32;

/// Something to copy that is not a directory.
pub(super) struct Found {
    pub(super) item: Item,
    pub(super) into: Into,
    pub(super) name: Bytes,
    pub(super) part: Vec<u8>,
}

/// Where it goes.
#[derive(Clone)]
pub(super) enum Into {
    /// Into a directory of the copy.
    Copied(Arc<DestDir>),
    /// Into some directory, as `dest`.
    Bare { fd: Arc<OwnedFd>, dest: PathBuf },
}

impl Into {
    pub(super) fn fd(&self) -> &OwnedFd {
        match self {
            Into::Copied(dir) => dir.fd(),
            Into::Bare { fd, .. } => fd,
        }
    }

    pub(super) fn path_of(&self, name: &[u8]) -> PathBuf {
        match self {
            Into::Copied(dir) => dir.path_of(name),
            Into::Bare { dest, .. } => dest.clone(),
        }
    }

    pub(super) fn is_fresh(&self) -> bool {
        matches!(self, Into::Copied(dir) if dir.fresh)
    }
}

/// A directory of the path the walk is on.
struct Level {
    item: Item,
    listing: Listing,
    page: std::vec::IntoIter<Item>,
    into: Arc<DestDir>,
}

struct Walk<'a> {
    copy: &'a Copy,
    levels: Vec<Level>,
    tell_discovered: bool,
}

/// Walks `top`, in order of the names, and yields its files and links; directories are
/// made by the way. With `tell_discovered`, progress hears of each.
pub(super) fn walk<'a>(
    copy: &'a Copy,
    top: &Item,
    into: Arc<DestDir>,
    tell_discovered: bool,
) -> impl Stream<Item = Result<Found, GetTreeError>> + 'a {
    let first = Level::new(&copy.snapshot, top.clone(), into);
    let walk = first.map(|level| Walk { copy, levels: vec![level], tell_discovered });
    stream::try_unfold(walk, |walk| async move {
        let mut walk = walk?;
        Ok(walk.next().await?.map(|found| (found, Ok(walk))))
    })
}

impl Level {
    fn new(snapshot: &Snapshot, item: Item, into: Arc<DestDir>) -> Result<Level, GetTreeError> {
        let listing = snapshot.list(&item)?;
        Ok(Level { item, listing, page: Vec::new().into_iter(), into })
    }
}

impl Walk<'_> {
    async fn next(&mut self) -> Result<Option<Found>, GetTreeError> {
        loop {
            let Some(level) = self.levels.last_mut() else {
                if self.tell_discovered {
                    self.copy.progress.discovery_ended();
                }
                return Ok(None);
            };
            let Some(item) = level.page.next() else {
                let page = level.listing.next_page(PAGE_ENTRIES).await?;
                if page.is_empty() {
                    self.levels.pop();
                    continue;
                }
                self.look_ahead(&page);
                let level = self.levels.last_mut().expect("it was there a moment ago");
                level.page = page.into_iter();
                continue;
            };
            if item.entry.kind() == FileKind::Directory {
                self.enter(item).await?;
                continue;
            }
            let name = item.entry.name.clone();
            let into = Into::Copied(level.into.clone());
            let mut part = part_name(&name);
            if self.copy.snapshot.child(&level.item, &part).await?.is_some() {
                // Not over a file that the volume itself has there.
                part = hashed_part_name(&name);
            }
            return Ok(Some(Found { item, into, name, part }));
        }
    }

    /// Begins to fetch the subdirectories of a page, and counts its files.
    fn look_ahead(&self, page: &[Item]) {
        let tops = page.iter().filter_map(|item| match &item.entry.content {
            Content::Directory(directory) => directory.hash,
            _ => None,
        });
        tops.take(DIRECTORIES_AHEAD).for_each(|hash| self.copy.snapshot.cache.prefetch(hash));
        if self.tell_discovered {
            let files = page.iter().filter(|item| item.entry.kind() == FileKind::Regular);
            let (count, bytes) = files.fold((0, 0u64), |(count, bytes), item| {
                (count + 1, bytes.saturating_add(item.entry.size_bytes()))
            });
            self.copy.progress.discovered(count, bytes);
        }
    }

    /// Makes a subdirectory and walks it next.
    async fn enter(&mut self, item: Item) -> Result<(), GetTreeError> {
        let level = self.levels.last().expect("a directory was found in one");
        if self.levels.len() > MAX_DEPTH {
            let hash = match &item.entry.content {
                Content::Directory(directory) => directory.hash.unwrap_or(BlockHash([0; 32])),
                _ => BlockHash([0; 32]),
            };
            let error = BlockError::Bad { hash, source: FormatError::TooDeep };
            return Err(error.at(&item.path).into());
        }
        let attributes = self.copy.attributes(&item.entry, &item.path).await?;
        let (parent, name) = (level.into.clone(), item.entry.name.clone());
        let into = self.copy.pool.run(move || parent.child(&name, attributes)).await?;
        add(&self.copy.tallies.dirs, 1);
        self.levels.push(Level::new(&self.copy.snapshot, item, into)?);
        Ok(())
    }
}
