//! A directory has one name, also if two mounts have renamed it at the same time.
//!
//! Two names in one directory become one when versions are merged ([`merged`](crate::shared::merged)). Names in several
//! directories come about if one mount moves a directory to another one while a second mount, which has not seen that,
//! perhaps for want of the ring, gives it another name where it was. Of these the one counts that was moved to last: that of
//! the greatest of the inode's links whose directory has a name of it. A mount that meets another name says that
//! there is none, and takes it away while no directory moves, so that all mounts drop the same names, and none whose move
//! is under way.
//!
//! Invariants: a directory keeps a name; its inode is never removed here.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use atoll_env::sleep;
use atoll_vfs::Errno;

use super::names::{entries, modified, names_of, take_away};
use super::{Freshness, Shared, Version};
use crate::shared::fault::Fault;
use crate::shared::inode::{InodeKey, Link};
use crate::shared::inodes::Base;

/// How long a directory is left alone whose names could not be dropped, for want of permission for example. A guess.
const PAUSE_WHEN_REFUSED: Duration = Duration::from_secs(60);

/// The directories that may name one, in the order in which their names count, and at the end the one where it was
/// found.
fn places(links: &BTreeSet<Link>, found_in: InodeKey) -> Vec<InodeKey> {
    let mut links: Vec<&Link> = links.iter().collect();
    links.sort_by_key(|link| std::cmp::Reverse((link.added.height, link.added.writer)));
    let mut places: Vec<InodeKey> = Vec::new();
    for place in links.into_iter().map(|link| link.directory).chain([found_in]) {
        if !places.contains(&place) {
            places.push(place);
        }
    }
    places
}

impl Shared {
    /// [`Errno::ENOENT`] for a name in `found_in` of a directory that has been moved elsewhere.
    pub(super) async fn check_place(
        self: &Arc<Self>,
        key: InodeKey,
        found_in: InodeKey,
    ) -> Result<(), Fault> {
        // What cannot be read is told by the lookup.
        let Ok(version) = self.inodes.read(key, self.names_age()).await else { return Ok(()) };
        let links = &version.inode().links;
        if links.iter().all(|link| link.directory == found_in) {
            return Ok(());
        }
        if !self.has_say(&version, found_in).await {
            return Ok(());
        }
        self.settle_soon(key, found_in);
        for place in places(links, found_in) {
            if place == found_in {
                break;
            }
            let above = self.inodes.read(place, self.names_age()).await;
            if above.is_ok_and(|above| names_of(above.inode(), key) > 0) {
                return Err(Errno::ENOENT.into());
            }
        }
        Ok(())
    }

    /// Whether all who may write a directory may write the one that it was found in: nobody else takes its name away
    /// there.
    async fn has_say(&self, version: &Version, found_in: InodeKey) -> bool {
        let above = self.inodes.read(found_in, self.names_age()).await;
        above.is_ok_and(|above| {
            let writers = above.block.groups();
            version.block.groups().iter().all(|group| writers.contains(group))
        })
    }

    /// Drops names of a directory that do not count, after the call.
    fn settle_soon(self: &Arc<Self>, key: InodeKey, found_in: InodeKey) {
        let is_away = self.spool.is_offline() || self.inodes.credentials.user().is_none();
        let settling = move |shared: &Shared, is_settling: bool| {
            let mut all = shared.settling.lock().expect("no holder of this lock panics");
            if is_settling { all.insert(key) } else { all.remove(&key) }
        };
        if is_away || !settling(self, true) {
            return;
        }
        let (shared, env) = (self.clone(), self.env.clone());
        self.env.spawn(Box::pin(async move {
            let settled = shared.settle(key, found_in).await;
            let shared = Arc::downgrade(&shared);
            if let Err(fault) = settled {
                tracing::debug!("a directory has names in several ones: {fault:?}");
                sleep(&*env, PAUSE_WHEN_REFUSED).await;
            }
            if let Some(shared) = shared.upgrade() {
                settling(&shared, false);
            }
        }));
    }

    async fn settle(&self, key: InodeKey, found_in: InodeKey) -> Result<(), Fault> {
        self.while_no_directory_moves(self.drop_other_names(key, found_in)).await
    }

    /// Leaves a directory the name that counts. First the names go, then the links: nothing is without a name.
    async fn drop_other_names(&self, key: InodeKey, found_in: InodeKey) -> Result<(), Fault> {
        let version = self.inodes.read(key, Freshness::Latest).await?;
        let links = &version.inode().links;
        let mut named = Vec::new();
        for place in places(links, found_in) {
            match self.inodes.read(place, Freshness::Latest).await {
                Ok(above) if names_of(above.inode(), key) > 0 => named.push(place),
                Ok(_) | Err(Fault { errno: Errno::ESTALE, .. }) => {}
                Err(fault) => return Err(fault),
            }
        }
        let Some((kept, others)) = named.split_first() else { return Ok(()) };
        if links.iter().all(|link| link.directory != *kept) {
            self.add_link(key, *kept).await?;
        }
        let now = self.now();
        let mut is_done = true;
        for place in others {
            if !self.has_say(&version, *place).await {
                is_done = false;
                continue;
            }
            let dropped = self.inodes.update(*place, Base::Newest, |above, dot| {
                let of = entries(above)?.iter().filter(|entry| entry.inode == key);
                let found: Vec<_> = of.cloned().collect();
                let moved_aside = take_away(above, &found, dot)?;
                modified(above, now);
                Ok(moved_aside)
            });
            self.relink_all(&dropped.await?.0, *place).await;
            tracing::info!(
                "a directory that was renamed and moved at the same time keeps one name"
            );
        }
        if is_done && links.iter().any(|link| link.directory != *kept) {
            let changed = self.change(key, |inode, _| {
                inode.links.retain(|link| link.directory == *kept);
                Ok(())
            });
            changed.await?;
        }
        Ok(())
    }
}
