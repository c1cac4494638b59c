//! The other groups of a pool, as one of them sees them.

use std::time::Duration;

use atoll_env::BoxFuture;
use atoll_key::PeerId;
use atoll_net::{CallError, Reply, Request};

use crate::layout::GroupNumber;
use crate::placement::GroupRoom;
use crate::roster::RosterRules;

/// Where a pool's other groups are, and which directories go to them.
pub trait SiblingGroups: Send + Sync + 'static {
    /// Whether there is any other one.
    fn are_several(&self) -> bool;

    /// What the roster says of all groups.
    fn rules(&self) -> RosterRules;

    /// The groups in which directories are made.
    fn in_use(&self) -> Vec<GroupNumber>;

    /// Whether a node is a member of any group, or belongs to the pool without files: it may ask for what one group asks of another.
    fn is_member(&self, node: PeerId) -> bool;

    /// Whether a node is a member of this group.
    fn is_member_of(&self, group: GroupNumber, node: PeerId) -> bool;

    /// In which group a directory is made that a directory of group `own` is to hold ([`crate::group_for`]).
    fn group_for(&self, own: GroupNumber, is_spread: bool, seed: u64) -> GroupNumber;

    /// A group has refused a directory, since it has no room: others get new ones until it is asked again what room it has.
    fn note_full(&self, group: GroupNumber);

    /// The room of all groups, as far as it is known.
    fn rooms(&self) -> Vec<GroupRoom>;

    /// Makes a call that the primary of a group answers.
    ///
    /// # Errors
    /// As [`atoll_net::Transport::call`].
    fn call(
        &self,
        group: GroupNumber,
        request: Request,
        limit: Duration,
    ) -> BoxFuture<'static, Result<Reply, CallError>>;
}
