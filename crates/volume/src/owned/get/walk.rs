//! The walk of a copy: makes directories and yields what else is in them.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use atoll_vfs::FileKind;
use bytes::Bytes;
use futures_util::stream::{self, Stream};

use super::dest::{DestDir, hashed_part_name, part_name};
use super::{Copy, Ended, GetTreeError, add};
use crate::format::{Content, MAX_DEPTH};
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
    /// Part of it cannot be read, so it may have names that are not known.
    has_unread: bool,
}

struct Walk<'a> {
    copy: &'a Copy,
    levels: Vec<Level>,
    tell_discovered: bool,
}

/// Walks `top`, in order of the names, makes its directories, and yields its files and links. With `tell_discovered`, progress hears of each.
pub(super) fn walk<'a>(
    copy: &'a Copy,
    top: &Item,
    into: Arc<DestDir>,
    tell_discovered: bool,
) -> Result<impl Stream<Item = Result<Found, Ended>> + 'a, Ended> {
    let levels = vec![Level::new(&copy.snapshot, top.clone(), into)?];
    let walk = Walk { copy, levels, tell_discovered };
    Ok(stream::try_unfold(walk, |mut walk| async move {
        Ok(walk.next().await?.map(|found| (found, walk)))
    }))
}

impl Level {
    fn new(snapshot: &Snapshot, item: Item, into: Arc<DestDir>) -> Result<Level, Ended> {
        let listing = snapshot.list(&item).map_err(GetTreeError::from)?;
        Ok(Level { item, listing, page: Vec::new().into_iter(), into, has_unread: false })
    }

    /// Under which name a file is written until it is complete: not over a file that the
    /// volume itself has there, or may have.
    async fn part_name(&mut self, snapshot: &Snapshot, name: &[u8]) -> Vec<u8> {
        let part = part_name(name);
        let is_free = !self.has_unread
            && match snapshot.child(&self.item, &part).await {
                Ok(namesake) => namesake.is_none(),
                Err(_) => {
                    self.has_unread = true;
                    false
                }
            };
        if is_free { part } else { hashed_part_name(name) }
    }
}

impl Walk<'_> {
    async fn next(&mut self) -> Result<Option<Found>, Ended> {
        loop {
            let Some(level) = self.levels.last_mut() else {
                if self.tell_discovered {
                    self.copy.progress.discovery_ended();
                }
                return Ok(None);
            };
            let Some(item) = level.page.next() else {
                let page = match level.listing.next_page_past(PAGE_ENTRIES).await {
                    Ok(page) => page,
                    Err((error, entries)) => {
                        level.has_unread = true;
                        self.copy.unread(level.item.path.clone(), error, entries)?;
                        continue;
                    }
                };
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
            let part = level.part_name(&self.copy.snapshot, &name).await;
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
    async fn enter(&mut self, item: Item) -> Result<(), Ended> {
        let level = self.levels.last().expect("a directory was found in one");
        if self.levels.len() > MAX_DEPTH {
            self.copy.too_deep(&item);
            return Ok(());
        }
        let attributes = self.copy.directory_attributes(&item).await?;
        let (parent, name) = (level.into.clone(), item.entry.name.clone());
        let into = self.copy.pool.run(move || parent.child(&name, attributes)).await?;
        add(&self.copy.tallies.dirs, 1);
        self.levels.push(Level::new(&self.copy.snapshot, item, into)?);
        Ok(())
    }
}
