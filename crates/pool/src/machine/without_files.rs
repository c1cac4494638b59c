//! A machine that has no files of the pool: it votes in groups where members are too few ([`crate::witnesses`]), and reaches all groups as
//! any machine does.
//!
//! It has a seat in each group whose map lists it ([`WitnessSeat`]). If one finds that its votes are not all there, the machine discards the votes of all
//! groups, draws another incarnation, and has the first group list it in that one; the other groups follow. It does not list itself where it was
//! taken off the list: somebody has removed it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::PoolMachine;
use crate::disk::Disk;
use crate::layout::GroupNumber;
use crate::map::VoterError;
use crate::messages::PoolEdit;
use crate::witness_seat::WitnessSeat;
use crate::witnesses::Witness;

/// The directories of a machine without files: one for its votes in each group.
pub trait VoteDirectories<D: Disk>: Send + Sync {
    /// The random bits that were drawn when the votes were made.
    ///
    /// # Errors
    /// Why they cannot be read, for people.
    fn incarnation(&self) -> Result<u64, String>;

    /// The directory of its votes in a group, made if it is not there.
    ///
    /// # Errors
    /// Why not, for people.
    fn open(&self, group: GroupNumber) -> Result<D, String>;

    /// Discards the votes in a group that the pool has no more, so that another one may have its number.
    ///
    /// # Errors
    /// Why not, for people.
    fn discard(&self, group: GroupNumber) -> Result<(), String>;

    /// Draws another incarnation, durably, and then discards all votes.
    ///
    /// # Errors
    /// Why not, for people.
    fn renew(&self) -> Result<(), String>;
}

/// After so long without a question of a primary a seat is told the newest map. Primaries ask twice a second.
const UNASKED: Duration = Duration::from_secs(3);

/// How a machine without files stands.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct VotingStatus {
    /// The groups in which it votes.
    pub votes_in: BTreeSet<GroupNumber>,
    /// Why it is not there for a group, for people.
    pub problems: Vec<String>,
}

impl VotingStatus {
    pub(super) fn of<D: Disk>(
        seats: &BTreeMap<GroupNumber, Arc<WitnessSeat<D>>>,
        problems: &BTreeMap<GroupNumber, String>,
    ) -> VotingStatus {
        let votes_in = seats.iter().filter(|(_, seat)| seat.is_voting());
        VotingStatus {
            votes_in: votes_in.map(|(group, _)| *group).collect(),
            problems: problems.values().cloned().collect(),
        }
    }
}

impl<D: Disk> PoolMachine<D> {
    pub(super) fn seat(&self, group: GroupNumber) -> Option<Arc<WitnessSeat<D>>> {
        self.state().seats.get(&group).cloned()
    }

    pub(super) async fn end_seat(&self, group: GroupNumber, seat: &WitnessSeat<D>) {
        if group != GroupNumber::FIRST {
            self.router.remove(&self.settings(group).address());
        }
        seat.end().await;
    }

    /// Has a seat in each of these groups, which are all, that lists this machine.
    pub(super) async fn look_without_files(
        &self,
        votes: &dyn VoteDirectories<D>,
        all: BTreeSet<GroupNumber>,
    ) {
        let looked = async {
            self.end_failed_seats(votes).await?;
            self.end_dropped_seats(votes, &all).await?;
            let own = Witness { peer: self.local(), incarnation: votes.incarnation()? };
            self.keep_listed(own).await;
            Ok(())
        };
        let looked: Result<(), String> = looked.await;
        for group in all {
            if let Some(seat) = self.seat(group) {
                self.tell_seat(group, &seat).await;
                continue;
            }
            let opened = match &looked {
                Ok(()) => self.open_seat(votes, group).await,
                Err(why) => Err(why.clone()),
            };
            if self.note_opened(group, opened).is_break() {
                return;
            }
        }
    }

    /// Ends the seats in groups that the pool has no more.
    async fn end_dropped_seats(
        &self,
        votes: &dyn VoteDirectories<D>,
        all: &BTreeSet<GroupNumber>,
    ) -> Result<(), String> {
        let seats = self.state().seats.clone();
        for (group, seat) in seats.into_iter().filter(|(group, _)| !all.contains(group)) {
            self.state().seats.remove(&group);
            self.end_seat(group, &seat).await;
            votes.discard(group)?;
        }
        Ok(())
    }

    /// Tells a seat the newest map of its group, if no primary does: the primary may have joined while this machine was away, and then the
    /// seat takes it for a stranger.
    async fn tell_seat(&self, group: GroupNumber, seat: &WitnessSeat<D>) {
        if group == GroupNumber::FIRST {
            seat.note_map(&self.state().first.clone());
        } else if seat.unasked_for() > UNASKED
            && let Some(known) = self.listed(group)
            && let Ok(map) = self.ask_map(group, &known).await
        {
            seat.note_map(&map);
        }
    }

    async fn end_failed_seats(&self, votes: &dyn VoteDirectories<D>) -> Result<(), String> {
        let seats = self.state().seats.clone();
        let failed = seats.iter().filter_map(|(group, seat)| Some((*group, seat.failed()?)));
        let failed: BTreeMap<GroupNumber, VoterError> = failed.collect();
        let has_forgotten =
            |error: &VoterError| !matches!(error, VoterError::Disk(_) | VoterError::NotAVoter);
        let all_end = failed.values().any(has_forgotten);
        for (group, seat) in seats {
            if all_end || failed.contains_key(&group) {
                self.state().seats.remove(&group);
                self.end_seat(group, &seat).await;
            }
        }
        for (group, why) in failed {
            tracing::warn!("the votes of group {group}: {why}");
        }
        if all_end {
            tracing::warn!("this machine has no votes any more: it is listed anew");
            votes.renew()?;
        }
        Ok(())
    }

    /// Has the first group list this machine as it is by now, if it lists it.
    async fn keep_listed(&self, own: Witness) {
        let listed = self.state().first.witnesses.get(own.peer.id);
        if listed.is_some_and(|listed| listed != own)
            && let Err(error) = self.edit_first(PoolEdit::Witness(own)).await
        {
            // It is tried again soon.
            tracing::debug!("the list of machines without files: {error}");
        }
    }

    async fn open_seat(
        &self,
        votes: &dyn VoteDirectories<D>,
        group: GroupNumber,
    ) -> Result<(), String> {
        let local = self.local().id;
        let map = match group {
            GroupNumber::FIRST => self.state().first.clone(),
            _ => {
                let Some(known) = self.listed(group) else { return Ok(()) };
                let map = self.ask_map(group, &known).await;
                map.map_err(|error| format!("the members of group {group}: {error}"))?
            }
        };
        if !map.witnesses.contains(local) {
            return Ok(());
        }
        let disk = votes.open(group)?;
        let peers = (self.env.clone(), self.transport.clone());
        let place = (self.settings(group).address(), map);
        let seat = WitnessSeat::start(peers, disk, place, votes.incarnation()?).await;
        let seat = seat.map_err(|error| format!("its votes of group {group}: {error}"))?;
        let mut state = self.state();
        if !state.is_ended {
            if group != GroupNumber::FIRST {
                self.router.add(self.settings(group).address(), seat.service());
            }
            state.seats.insert(group, seat);
        }
        Ok(())
    }
}
