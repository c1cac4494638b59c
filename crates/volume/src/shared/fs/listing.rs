//! Listing directories.

use std::sync::Arc;

use atoll_vfs::{DirEntry, Errno, FileKind, Handle, InodeNumber, Opened};
use bytes::Bytes;
use futures_util::stream::{self, StreamExt};

use super::{Freshness, Shared};
use crate::shared::fault::Fault;
use crate::shared::inode::InodeKey;
use crate::shared::table::{Listing, Open};

/// Inodes of a listing that are read at once.
const READS_AT_ONCE: usize = 32;

impl Shared {
    pub(super) async fn open_directory(&self, number: u64) -> Result<Opened, Fault> {
        let listing = self.listing(number, Freshness::Newest).await?;
        let handle = self.table().open(number, Open::Directory(listing))?;
        Ok(Opened { handle: Handle(handle), keep_cache: false, direct_io: false })
    }

    /// The names of a directory as it is now; those of newborns come last.
    async fn listing(&self, number: u64, freshness: Freshness) -> Result<Listing, Fault> {
        let (key, version) = self.directory(number, freshness).await?;
        let table = self.table();
        let newborns = table.newborns_of(&key).into_iter().filter_map(|(name, number)| {
            let node = table.node(number).ok()?;
            Some((name, node.key, node.kind))
        });
        let newborns = newborns.collect();
        Ok(Listing { version, newborns })
    }

    /// A page of a listing, not empty unless it has ended.
    pub(super) async fn list(
        self: &Arc<Self>,
        (number, handle): (u64, u64),
        mut cookie: u64,
        limit: usize,
        with_entries: bool,
    ) -> Result<Vec<DirEntry>, Fault> {
        loop {
            let page = self.page((number, handle), cookie, limit, with_entries).await?;
            let total = self.table().listing(number, handle)?.len()? as u64;
            cookie = cookie.saturating_add(limit as u64);
            // Names that are gone since are left out, and an empty answer means the end.
            if !page.is_empty() || limit == 0 || cookie >= total {
                return Ok(page);
            }
        }
    }

    async fn page(
        self: &Arc<Self>,
        (number, handle): (u64, u64),
        cookie: u64,
        limit: usize,
        with_entries: bool,
    ) -> Result<Vec<DirEntry>, Fault> {
        let mut listing = self.table().listing(number, handle)?;
        if cookie == 0 && self.table().node(number)?.orphan.is_none() {
            // From its beginning a directory is listed as it is now (POSIX, `rewinddir`).
            listing = self.listing(number, self.names_age()).await?;
            self.table().relist(number, handle, &listing);
        }
        let from = usize::try_from(cookie).unwrap_or(usize::MAX);
        let page: Vec<(usize, (Bytes, InodeKey, FileKind))> =
            listing.names()?.enumerate().skip(from).take(limit).collect();
        // The attributes of a listing were read after it began.
        let age = self.names_age();
        let listed = stream::iter(page).map(|(at, (name, key, kind))| async move {
            let found = match with_entries {
                true => self.entry(key, age).await.map(Some),
                false => Ok(None),
            };
            let inode = match &found {
                Ok(Some(entry)) => entry.attr.inode,
                _ => InodeNumber(self.table().number_for(&key)),
            };
            let entry = match found {
                // Gone since, unless its name has lost it.
                Err(Fault { errno: Errno::ESTALE, .. }) => {
                    Some(self.lost_entry(number, &name).await.ok()?)
                }
                found => found.ok().flatten(),
            };
            Some(DirEntry { name, kind, inode, cookie: at as u64 + 1, entry })
        });
        let listed: Vec<Option<DirEntry>> = listed.buffered(READS_AT_ONCE).collect().await;
        Ok(listed.into_iter().flatten().collect())
    }
}
