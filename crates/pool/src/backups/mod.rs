//! A primary's queues to the other members: changes in their order, and bytes of files; an item is done when all that take part have
//! it (PacificA, MSR-TR-2008-25, section 2.2).
//!
//! ```text
//! link    one other member: session, queue, beats, and what is known of it
//! ```
//!
//! A *member of the epoch* has everything that was answered, and must answer each item. A *learner* is one that comes back: it gets the
//! changes that it lacks, then all items as a member does, and the ranges of files that it may have missed. One that is silent is
//! no longer waited for: a learner at once, a member when the pool's map says so.
//!
//! A change is *released* when it and all before it are durable on all members and made on the primary: backups make it then.
//!
//! The caller ([`crate::group`]) decides which members take part.

mod link;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use atoll_env::{Env, Moment, Notify};
use atoll_net::Transport;
use bytes::Bytes;
use futures_util::future::join_all;

use crate::disk::DiskResult;
use crate::layout::FileId;
use crate::messages::ItemKind;
use crate::pool_map::PoolMap;
use crate::routing::PoolId;

pub use self::link::CopyProgress;
pub(crate) use self::link::{BackupLink, HandedItem, LEASE, LeaseOffer, LinkEnd, SUSPECT_AFTER};

/// How many copies of everything a map's group has, for [`crate::roster::RosterRules::min_copies`]. A group that one member alone is enrolled in
/// has as many as may be asked for: nobody else could have one, and that a pool may have more members stops nothing yet.
fn copies_of(map: &PoolMap) -> usize {
    match map.enrolled.peers().len() {
        0 | 1 => usize::MAX,
        _ => map.members.len(),
    }
}

/// The values that the primary sends to every other member with its beats and items.
struct PrimaryAnnouncement {
    pool: PoolId,
    /// The last released change.
    released: AtomicU64,
    map: Mutex<PoolMap>,
    /// See [`copies_of`].
    copies: AtomicUsize,
    /// Members may have lost bytes so often, or are others.
    losses: AtomicU64,
    /// The run of the server that clients work with; none before there is one.
    boot: OnceLock<u64>,
    /// Something has changed about a link.
    has_news: Notify,
}

/// The changes that are made, and those that are released.
#[derive(Default)]
struct FinishedOrders {
    finished: BTreeSet<u64>,
    /// Files, and changes that are to be made before their bytes are written, and are not released.
    needed: BTreeMap<FileId, u64>,
}

/// See the module.
pub(crate) struct Backups {
    env: Env,
    transport: Arc<dyn Transport>,
    links: Mutex<Arc<[Arc<BackupLink>]>>,
    orders: Mutex<FinishedOrders>,
    said: Arc<PrimaryAnnouncement>,
}

impl Backups {
    /// Links to all enrolled members but this one. All changes up to `released` are made.
    pub(crate) fn new(
        env: &Env,
        transport: &Arc<dyn Transport>,
        pool: PoolId,
        map: &PoolMap,
        released: u64,
    ) -> Backups {
        let said = Arc::new(PrimaryAnnouncement {
            pool,
            released: AtomicU64::new(released),
            map: Mutex::new(map.clone()),
            copies: AtomicUsize::new(copies_of(map)),
            losses: AtomicU64::new(0),
            boot: OnceLock::new(),
            has_news: Notify::default(),
        });
        let backups = Backups {
            env: env.clone(),
            transport: transport.clone(),
            links: Mutex::new(Arc::default()),
            orders: Mutex::default(),
            said,
        };
        backups.link_to(map);
        backups
    }

    /// The links to the other members.
    pub(crate) fn links(&self) -> Arc<[Arc<BackupLink>]> {
        self.links.lock().expect("no holder of this lock panics").clone()
    }

    /// Has links to those whom a map names, and to nobody else; returns the new ones.
    fn link_to(&self, map: &PoolMap) -> Vec<Arc<BackupLink>> {
        let mut links = self.links.lock().expect("no holder of this lock panics");
        let (mut all, mut new) = (Vec::new(), Vec::new());
        let local = self.transport.local().id;
        for peer in map.enrolled.peers().iter().filter(|peer| peer.id != local) {
            match links.iter().find(|link| link.id == peer.id) {
                Some(known) => {
                    known.set_address(peer.addr);
                    all.push(known.clone());
                }
                None => {
                    let is_member = map.members.contains(&peer.id);
                    let (env, transport) = (&self.env, &self.transport);
                    let link = BackupLink::new(env, transport, *peer, self.said.clone(), is_member);
                    let link = Arc::new(link);
                    new.push(link.clone());
                    all.push(link);
                }
            }
        }
        for gone in links.iter().filter(|link| !map.enrolled.contains(link.id)) {
            gone.retire();
        }
        *links = all.into();
        new
    }

    fn orders(&self) -> MutexGuard<'_, FinishedOrders> {
        self.orders.lock().expect("no holder of this lock panics")
    }

    /// Hands something to all that take part; returns when all have it. [`Errno::EIO`](atoll_vfs::Errno::EIO) if this member has
    /// stopped its work before.
    pub(crate) async fn hand(&self, what: ItemKind, bytes: Bytes) -> DiskResult<()> {
        let links = self.links();
        let item = HandedItem::for_all(what, bytes, links.len());
        let handed = join_all(links.iter().map(|link| link.hand(item.clone()))).await;
        handed.into_iter().collect()
    }

    /// Stops the work: whatever waits for a backup fails.
    pub(crate) fn close(&self) {
        for link in self.links().iter() {
            link.close();
        }
        self.said.has_news.notify();
    }

    /// Something has changed about a link: it went down, was heard of again, or has everything.
    pub(crate) fn has_news(&self) -> &Notify {
        &self.said.has_news
    }

    /// The map by which this member is the primary.
    pub(crate) fn map(&self) -> PoolMap {
        self.said.map()
    }

    /// A newer one; the members that it does not name are no longer waited for. Returns links to members that have come.
    pub(crate) fn set_map(&self, map: &PoolMap) -> Vec<Arc<BackupLink>> {
        *self.said.map.lock().expect("no holder of this lock panics") = map.clone();
        self.said.copies.store(copies_of(map), Ordering::SeqCst);
        self.said.losses.fetch_add(1, Ordering::SeqCst);
        let new = self.link_to(map);
        for link in self.links().iter() {
            match map.members.contains(&link.id) {
                true => link.require(),
                false => link.excuse(),
            }
        }
        self.said.has_news.notify();
        new
    }

    /// How many members have everything, this one among them; more than can be asked for if no other one is enrolled.
    pub(crate) fn copies(&self) -> usize {
        self.said.copies.load(Ordering::SeqCst)
    }

    /// Looked at for each call of a client.
    fn members(&self) -> impl Iterator<Item = Arc<BackupLink>> {
        let links = self.links();
        (0..links.len()).map(move |at| links[at].clone()).filter(|link| link.is_member())
    }

    /// The change that bytes of a file wait for: one that makes it or sets its times, or else all that are released, whether or not a
    /// learner was told so.
    pub(crate) fn needed_by(&self, id: FileId) -> u64 {
        let orders = self.orders();
        orders.needed.get(&id).copied().unwrap_or_else(|| self.released())
    }

    /// A change makes a file, or sets its times, which bytes that are written later change.
    pub(crate) fn note_needed(&self, id: FileId, order: u64) {
        self.orders().needed.insert(id, order);
    }

    /// The last released change.
    pub(crate) fn released(&self) -> u64 {
        self.said.released.load(Ordering::SeqCst)
    }

    /// All changes up to this one are made, and all members have them.
    pub(crate) fn release_inherited(&self, order: u64) {
        self.said.released.fetch_max(order, Ordering::SeqCst);
    }

    /// A change is made, or withdrawn.
    pub(crate) fn finish(&self, order: u64) {
        {
            let mut orders = self.orders();
            orders.finished.insert(order);
            let before = self.released();
            let mut released = before;
            while orders.finished.remove(&(released + 1)) {
                released += 1;
            }
            if released == before {
                return;
            }
            self.said.released.store(released, Ordering::SeqCst);
            orders.needed.retain(|_, needed| *needed > released);
        }
        for link in self.links().iter() {
            // Bytes may wait at the backup for the file to be made.
            if link.has_bytes_waiting() {
                link.beat();
            }
        }
    }

    /// Waits until all members can be spoken to.
    pub(crate) async fn all_up(&self) {
        join_all(self.members().map(|link| async move { link.up().await })).await;
    }

    /// Whether all members have promised, until now at least, to follow nobody else.
    pub(crate) fn has_leases(&self, now: Moment) -> bool {
        self.members().all(|link| link.has_granted(now))
    }

    /// Clients work with this run of the server: other members may answer their reads from now on.
    pub(crate) fn serve(&self, boot: u64) {
        // A primary begins to serve once.
        let _ = self.said.boot.set(boot);
    }

    /// The lease that members can be given now; none before clients are served, or while this member lacks a promise of some member.
    pub(crate) fn lease_offer(&self) -> Option<LeaseOffer> {
        let boot = *self.said.boot.get()?;
        let ends: Option<Vec<Moment>> = self.members().map(|link| link.promise_ends()).collect();
        let earliest = |one: Moment, other: Moment| Moment {
            steady: one.steady.min(other.steady),
            unix_ms: one.unix_ms.min(other.unix_ms),
        };
        Some(LeaseOffer { ends: ends?.into_iter().reduce(earliest)?, boot })
    }

    /// Gives no more read leases to those that a map leaves out; returns for how long some of them may have one.
    pub(crate) fn end_leases(&self, map: &PoolMap) -> Duration {
        let links = self.links();
        let gone = links.iter().filter(|link| !map.members.contains(&link.id));
        gone.map(|link| link.end_leases()).max().unwrap_or_default()
    }

    /// Changes whenever a member may have lost bytes, or members are others.
    pub(crate) fn losses(&self) -> u64 {
        self.said.losses.load(Ordering::SeqCst)
    }

    /// The members that may have lost bytes.
    pub(crate) fn members_to_mend(&self) -> Vec<Arc<BackupLink>> {
        self.members().filter(|link| link.files_to_mend() > 0).collect()
    }

    /// Ranges of a file that some member has not got again.
    pub(crate) fn unmended(&self, id: FileId) -> Vec<u64> {
        self.members().flat_map(|link| link.to_mend(id)).collect()
    }

    /// Room on the fullest member's disk, less what is on its way, bytes.
    pub(crate) fn free_bytes(&self) -> u64 {
        self.least_room().map_or(u64::MAX, |(free, _)| free)
    }

    /// That, and the size of that member's disk, bytes; none without members.
    pub(crate) fn least_room(&self) -> Option<(u64, u64)> {
        let room = |link: &Arc<BackupLink>| {
            (link.free_bytes(), link.report().map_or(0, |report| report.size_bytes))
        };
        self.members().map(|link| room(&link)).min()
    }
}

impl PrimaryAnnouncement {
    fn map(&self) -> PoolMap {
        self.map.lock().expect("no holder of this lock panics").clone()
    }
}
