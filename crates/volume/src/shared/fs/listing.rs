//! Listing directories.

use atoll_vfs::Errno;

use super::{Freshness, Shared};
use crate::mount::{Found, Listed, OpenId, Place};
use crate::shared::fault::Fault;
use crate::shared::inode::InodeKey;
use crate::shared::table::{Listing, Open};

/// Inodes of a listing that are read at once.
pub(super) const READS_AT_ONCE: usize = 32;

impl Shared {
    pub(super) async fn open_directory(&self, number: u64) -> Result<u64, Fault> {
        let listing = self.listing(number, Freshness::Newest).await?;
        Ok(self.table().open(number, Open::Directory(listing))?)
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

    /// Names of an open directory.
    pub(super) async fn names(
        &self,
        (number, handle): OpenId,
        cookie: u64,
        limit: usize,
    ) -> Result<Vec<Listed<InodeKey>>, Fault> {
        let mut listing = self.table().listing(number, handle)?;
        if cookie == 0 && self.table().node(number)?.orphan.is_none() {
            // From its beginning a directory is listed as it is now (POSIX, `rewinddir`).
            listing = self.listing(number, self.names_age()).await?;
            self.table().relist(number, handle, &listing);
        }
        let from = usize::try_from(cookie).unwrap_or(usize::MAX);
        let names = listing.names()?.enumerate().skip(from).take(limit);
        let listed = |(at, (name, file, kind))| Listed { name, kind, cookie: at as u64 + 1, file };
        Ok(names.map(listed).collect())
    }

    /// What a name stands for. The attributes of a listing are read after it began.
    pub(super) async fn listed(
        &self,
        (directory, name): Place<'_>,
        key: InodeKey,
        with_entry: bool,
    ) -> Found {
        if with_entry {
            match self.entry(key, self.names_age()).await {
                Ok(entry) => return Found::Entry(entry),
                // Gone since, unless its name has lost it.
                Err(Fault { errno: Errno::ESTALE, .. }) => {
                    let lost = self.lost_entry(directory, name).await;
                    return lost.map_or(Found::Gone, Found::Entry);
                }
                Err(_) => {}
            }
        }
        Found::Number(self.table().number_for(&key))
    }
}
