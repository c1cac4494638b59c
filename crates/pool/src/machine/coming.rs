//! Machines that come and go, as people ask for it: the first group's map changes, and the maps of others.

use std::time::Duration;

use atoll_env::sleep;
use atoll_key::PeerId;
use atoll_net::{Peer, Request};
use bytes::Bytes;

use super::rules::{groups_wanted, is_machine, staying};
use super::{EDIT_LIMIT, FAILURE_CHECK_EVERY, MAP_LIMIT, PoolMachine};
use crate::disk::Disk;
use crate::group::PoolEditError;
use crate::layout::GroupNumber;
use crate::members::PoolMembers;
use crate::messages::{self, MAP, PoolEdit};
use crate::pool_map::PoolMap;
use crate::remote::Route;
use crate::roster::RosterEdit;
use crate::witnesses::Witness;

/// How long a group is asked to remove a machine that it has perhaps.
const UNLISTED_LIMIT: Duration = Duration::from_secs(1);

impl<D: Disk> PoolMachine<D> {
    /// Has a machine belong to the pool: returns the map of the first group, by which it sees what it is to do.
    ///
    /// # Errors
    /// If the pool is full; if this machine belongs to it already; if nobody answers.
    pub async fn admit(&self, peer: Peer) -> Result<PoolMap, PoolEditError> {
        let first = self.edit_first(PoolEdit::Roster(RosterEdit::ToGo(peer.id, false))).await?;
        let groups = first.roster.groups();
        let is_alone =
            |members: &PoolMembers| members.peers().iter().all(|other| other.id == peer.id);
        if groups.values().any(|group| !group.is_open && is_alone(&group.members)) {
            // It was answered before, and may have made nothing yet.
            return Ok(first);
        }
        let in_first = first.enrolled.contains(peer.id);
        for (group, listed) in groups.clone() {
            if listed.members.contains(peer.id) {
                self.check_not_needed(group, peer.id).await?;
            }
        }
        if in_first {
            self.check_not_needed(GroupNumber::FIRST, peer.id).await?;
        }
        if first.witnesses.contains(peer.id) {
            let why = "the pool has this node without files: `atoll pool remove` on another \
                       machine comes first";
            return Err(PoolEditError::Refused(why.to_owned()));
        }
        if in_first || first.enrolled.peers().len() < first.roster.copies() {
            return self.edit_first(PoolEdit::Enrol(peer)).await;
        }
        if first.roster.lists(peer.id) {
            return Ok(first);
        }
        let mut machines = staying(&first);
        machines.insert(peer.id);
        if groups.len() + 1 < groups_wanted(machines.len(), first.roster.copies()) {
            let begun = self.edit_first(PoolEdit::Roster(RosterEdit::Begin(peer))).await;
            if !matches!(begun, Err(PoolEditError::Refused(_))) {
                return begun;
            }
        }
        // There are as many groups as there can be, or as such a pool has: it takes part in the one with the fewest members.
        let smallest = groups.iter().min_by_key(|(_, group)| group.members.peers().len());
        let Some((smallest, _)) = smallest else {
            return self.edit_first(PoolEdit::Enrol(peer)).await;
        };
        self.edit(*smallest, PoolEdit::Enrol(peer), EDIT_LIMIT).await?;
        // The roster says so soon, and it asks again.
        Err(PoolEditError::Refused("the pool takes it up".to_owned()))
    }

    /// Has a node belong to the pool without files: returns the map of the first group.
    ///
    /// # Errors
    /// If it has files, or there are too many such nodes; if nobody answers.
    pub async fn admit_without_files(&self, witness: Witness) -> Result<PoolMap, PoolEditError> {
        if is_machine(&self.state().first, witness.peer.id) {
            return Err(PoolEditError::Refused("the pool has this node with files".to_owned()));
        }
        self.edit_first(PoolEdit::Witness(witness)).await
    }

    /// That a group does not count on what a machine had, which comes without it.
    async fn check_not_needed(&self, group: GroupNumber, id: PeerId) -> Result<(), PoolEditError> {
        let until = self.env.now() + EDIT_LIMIT;
        let map = loop {
            let request = Request { method: MAP, header: Bytes::new(), parts: Vec::new() };
            let answer = self.groups.route(group).call(request, MAP_LIMIT).await;
            let map = answer.ok().and_then(|reply| messages::decode::<PoolMap>(&reply.header));
            match map {
                Some(map) => break map,
                None if self.env.now() > until => return Err(PoolEditError::NoAnswer),
                None => sleep(&*self.env, FAILURE_CHECK_EVERY).await,
            }
        };
        if map.members.contains(&id) || map.voters.keys.contains(&id) {
            let why = "the pool has this node as a member already; if its directory is lost, \
                       `atoll pool remove` on another member comes first";
            return Err(PoolEditError::Refused(why.to_owned()));
        }
        Ok(())
    }

    /// Has other machines take the place of one, which goes from each group when they have everything; or has it stay.
    ///
    /// # Errors
    /// If nobody answers.
    pub async fn let_go(&self, id: PeerId, goes: bool) -> Result<(), PoolEditError> {
        self.edit_first(PoolEdit::Roster(RosterEdit::ToGo(id, goes))).await.map(drop)
    }

    /// How many copies files are to have from now on.
    ///
    /// # Errors
    /// If it is no such number; if nobody answers.
    pub async fn set_copies(&self, copies: u8) -> Result<(), PoolEditError> {
        self.edit_first(PoolEdit::Roster(RosterEdit::Copies(copies))).await.map(drop)
    }

    /// How many members of a group must have everything so that it takes changes, from now on.
    ///
    /// # Errors
    /// If it is no such number; if nobody answers.
    pub async fn set_min_copies(&self, least: u8) -> Result<(), PoolEditError> {
        self.edit_first(PoolEdit::Roster(RosterEdit::MinCopies(least))).await.map(drop)
    }

    /// Down to which level directories are distributed that are made from now on. Those that are there stay where they are.
    ///
    /// # Errors
    /// If it is no such number; if nobody answers.
    pub async fn set_level(&self, level: u8) -> Result<(), PoolEditError> {
        self.edit_first(PoolEdit::Roster(RosterEdit::Level(level))).await.map(drop)
    }

    /// Has a machine belong to no group any more, at once: others are given copies afterwards.
    ///
    /// # Errors
    /// If it alone has everything of a group: then it stays in that one, and in those that are not asked yet. If a group does not answer within
    /// `limit`: then it goes when that does.
    pub async fn remove(&self, id: PeerId, limit: Duration) -> Result<(), PoolEditError> {
        if self.state().first.witnesses.contains(id) {
            // Other groups do as the first one does.
            return self.remove_from(GroupNumber::FIRST, id, limit).await;
        }
        let was_to_go = self.state().first.roster.to_go().contains(&id);
        let removed = self.remove_from_all(id, limit).await;
        if let (Err(PoolEditError::Refused(_)), false) = (&removed, was_to_go) {
            self.let_go(id, false).await?;
        }
        removed
    }

    async fn remove_from_all(&self, id: PeerId, limit: Duration) -> Result<(), PoolEditError> {
        let until = self.env.now() + limit;
        let first = self.edit_first(PoolEdit::Roster(RosterEdit::ToGo(id, true))).await?;
        let groups: Vec<_> = first.roster.groups().clone().into_iter().collect();
        let mut dropped = Vec::new();
        for (group, known) in groups {
            let is_only = known.members.peers().iter().all(|peer| peer.id == id);
            if is_only && !known.is_open {
                dropped.push(group);
            } else if known.members.contains(id) {
                self.remove_from(group, id, until.since(self.env.now())).await?;
            } else {
                // The roster may not list it yet. If the group does not answer, its primary has it go all the same.
                drop(self.remove_from(group, id, UNLISTED_LIMIT).await);
            }
        }
        if first.enrolled.contains(id) {
            self.remove_from(GroupNumber::FIRST, id, until.since(self.env.now())).await?;
        }
        // Last: as long as the machine belongs to the pool, its group is at work.
        for group in dropped {
            self.edit_first(PoolEdit::Roster(RosterEdit::Drop(group))).await?;
        }
        Ok(())
    }

    async fn remove_from(
        &self,
        group: GroupNumber,
        id: PeerId,
        limit: Duration,
    ) -> Result<(), PoolEditError> {
        self.edit(group, PoolEdit::Remove(id), limit).await.map(drop)
    }
}
