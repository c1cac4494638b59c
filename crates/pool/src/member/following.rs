//! Changes that another member decides, the primary: a backup keeps them in its journal until they are *released*, and makes them
//! then, in their order (PacificA, section 2.2: the committed list is a prefix of the prepared list of every replica).
//!
//! What is released is durable on all members and made on the primary, so it is never taken back. What is not released may never
//! have been answered, and a primary that has lost it cuts it off.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use atoll_vfs::Errno;

use super::{Decided, LogStand, PoolMember};
use crate::change::PoolChange;
use crate::disk::{Disk, DiskResult};
use crate::journal::RecordOrder;
use crate::layout::FileId;

/// The most changes that are looked through for one read.
const MAX_LOOKED_THROUGH: usize = 256;

/// What a backup has of its primary's changes.
#[derive(Clone, Default, Debug)]
pub(crate) struct FollowedChanges {
    /// All changes up to this one are made.
    pub(crate) applied: u64,
    /// Those after it that are in the journal.
    pub(crate) pending: BTreeMap<u64, PoolChange>,
    /// Those that were withdrawn, by changes that may not be in the journal yet.
    pub(crate) withdrawn: BTreeSet<u64>,
}

impl FollowedChanges {
    /// The last change of an unbroken sequence that is in the journal.
    pub(crate) fn last(&self) -> u64 {
        self.pending.keys().next_back().copied().unwrap_or(self.applied)
    }

    /// The next change to be made if all up to `released` are to be; none if it is not there. One that was withdrawn changes
    /// nothing: its withdrawal is durable before it is released.
    fn next(&self, released: u64) -> Option<(u64, Option<PoolChange>)> {
        let next = self.applied + 1;
        let change = self.pending.get(&next).filter(|_| next <= released)?;
        let is_withdrawn = self.withdrawn.contains(&next);
        Some((next, (!is_withdrawn).then(|| change.clone())))
    }

    /// Forgets all that is known of changes after `last`: their orders are given to others.
    fn cut(&mut self, last: u64) {
        self.pending.split_off(&last.saturating_add(1));
        // By changes that are still there: others may have been withdrawn by changes that are forgotten.
        self.withdrawn = self.pending.values().filter_map(withdrawn_by).collect();
    }

    fn add(&mut self, order: u64, change: PoolChange) {
        self.withdrawn.extend(withdrawn_by(&change));
        self.pending.insert(order, change);
    }
}

impl<D: Disk> PoolMember<D> {
    /// Where this backup stands; none on a member that decides its changes.
    pub(crate) fn followed(&self) -> Option<(u64, u64)> {
        let followed = self.followed.lock().expect("no holder of this lock panics");
        followed.as_ref().map(|followed| (followed.applied, followed.last()))
    }

    /// Whether a change of a file's names is in the journal that is not made yet; also on a member that decides its changes, and while many
    /// wait to be made.
    pub(crate) fn awaits_names(&self, id: FileId) -> bool {
        let followed = self.followed.lock().expect("no holder of this lock panics");
        let is_about = |change: &PoolChange| change.changes_names_of(id);
        followed.as_ref().is_none_or(|followed| {
            followed.pending.len() > MAX_LOOKED_THROUGH || followed.pending.values().any(is_about)
        })
    }

    /// Where this backup stands in the order of changes.
    pub(crate) fn log_stand(&self) -> Option<LogStand> {
        let (applied, last) = self.followed()?;
        let log = self.log();
        Some(LogStand { last, epoch: log.epoch_of(last), epochs: log.newest_epochs(last), applied })
    }

    fn with_followed<T>(&self, work: impl FnOnce(&mut FollowedChanges) -> T) -> DiskResult<T> {
        let mut followed = self.followed.lock().expect("no holder of this lock panics");
        followed.as_mut().map(work).ok_or(Errno::EIO)
    }

    /// Writes a change to the journal. One that is there already is left alone; one with a gap before it is refused
    /// ([`Errno::EAGAIN`]). It survives a crash of the machine after [`PoolMember::sync_changes`].
    pub(crate) async fn accept(self: &Arc<Self>, order: u64, change: PoolChange) -> DiskResult<()> {
        let _changing = self.begin_change().await?;
        let _one = self.whole.write(super::whole::FOLLOWING).await;
        let last = self.with_followed(|followed| followed.last())?;
        if order <= last {
            return Ok(());
        }
        if order != last + 1 {
            return Err(Errno::EAGAIN);
        }
        self.journal.append(&self.disk, RecordOrder::Given(order), &change).await?;
        self.note_in_log(order, &change);
        for id in change.given_numbers() {
            self.next.fetch_max(id.count() + 1, Ordering::SeqCst);
        }
        self.with_followed(|followed| followed.add(order, change))
    }

    /// Makes all changes up to `released` that are in the journal.
    pub(crate) async fn release(self: &Arc<Self>, released: u64) -> DiskResult<()> {
        let _one = self.whole.write(super::whole::RELEASING).await;
        let last = self.with_followed(|followed| followed.last().min(released))?;
        if self.with_followed(|followed| followed.next(released).is_some())? {
            let _changing = self.begin_change().await?;
            // So that a primary which has lost these is told from one that has lost what nobody was to make.
            let change = PoolChange::Released { order: last };
            self.journal.append(&self.disk, RecordOrder::Own, &change).await?;
        }
        while let Some((order, change)) = self.with_followed(|followed| followed.next(released))? {
            // Bytes of a file find it by its directories, which may be moving.
            let _moving = self.whole.write(super::whole::MOVES).await;
            let _changing = self.begin_change().await?;
            if let Some(change) = change {
                self.note_decided(&change, self.journal.written());
                if change == PoolChange::LogBegins {
                    self.log().begin_after(order - 1);
                }
                if let Err(errno) = self.apply(&change, Decided::Elsewhere).await {
                    tracing::error!("change {order} of the primary cannot be made: {errno}");
                    return Err(self.fail());
                }
                self.note_done(order, &change);
            }
            self.with_followed(|followed| {
                followed.pending.remove(&order);
                followed.withdrawn.remove(&order);
                followed.applied = order;
            })?;
        }
        Ok(())
    }

    /// These changes were withdrawn, as the primary says.
    pub(crate) fn note_withdrawn(&self, withdrawn: Vec<u64>) {
        // A member that follows nobody has none.
        let _ = self.with_followed(|followed| followed.withdrawn.extend(withdrawn));
    }

    /// Forgets changes after `last`, which the primary has lost: they were never answered. [`Errno::ESTALE`] if one of them was
    /// made: then the primary's disk is older than this one.
    pub(crate) async fn cut_off(self: &Arc<Self>, last: u64) -> DiskResult<()> {
        let has_cut = {
            let _one = self.whole.write(super::whole::FOLLOWING).await;
            let (applied, before) = self.followed().ok_or(Errno::EIO)?;
            if applied > last {
                return Err(Errno::ESTALE);
            }
            self.with_followed(|followed| followed.cut(last))?;
            self.log().cut(last);
            self.journal.forget_orders_after(last);
            before > last
        };
        // Other changes get these orders: the journal must not know those any more.
        match has_cut {
            true => self.checkpoint().await,
            false => Ok(()),
        }
    }
}

/// The change that another one withdraws.
fn withdrawn_by(change: &PoolChange) -> Option<u64> {
    match change {
        PoolChange::Withdrawn { order } => Some(*order),
        _ => None,
    }
}

/// Which of the changes that a journal has are to be made, and which are to wait.
pub(super) fn split_released(
    mut all: BTreeMap<u64, PoolChange>,
    last: u64,
    released: u64,
) -> (BTreeMap<u64, PoolChange>, BTreeMap<u64, PoolChange>, BTreeSet<u64>) {
    let _lost = all.split_off(&last.saturating_add(1));
    let waiting = all.split_off(&released.saturating_add(1));
    let withdrawn = all.values().chain(waiting.values()).filter_map(withdrawn_by).collect();
    (all, waiting, withdrawn)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A primary that lost power gives orders again which it had withdrawn.
    #[test]
    fn a_change_with_the_order_of_a_withdrawn_one_that_was_cut_off_is_made() {
        let change = |mark| PoolChange::Marked { id: FileId(7), marks: vec![mark] };
        let mut followed = FollowedChanges { applied: 4, ..FollowedChanges::default() };
        followed.add(5, change(1));
        followed.withdrawn.insert(5);
        assert_eq!(followed.next(5), Some((5, None)));
        followed.cut(4);
        assert_eq!((followed.last(), followed.next(5)), (4, None));
        followed.add(5, change(2));
        assert_eq!(followed.next(5), Some((5, Some(change(2)))));
        assert_eq!(followed.next(4), None, "it is not released");
    }
}
