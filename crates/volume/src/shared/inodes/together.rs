//! Putting an inode and the directory that comes to name it together.
//!
//! The inode goes first ([`atoll_dht::Blocks::put_in_order`]): a replica that has the name has the inode, or a majority
//! has. If both have one replica set, that takes one round trip.
//!
//! Invariants:
//!
//! - The turn of the inode is taken before its directory's, by all who hold both.
//! - No version of a directory covers one whose child the ring did not take.

use std::sync::Arc;

use atoll_dht::PutError;
use atoll_key::GroupId;
use atoll_key::kinds::certified::{CertifiedBlock, Dot};
use atoll_vfs::Errno;

use super::{Base, Inodes, Next, Over, State, Version};
use crate::shared::fault::Fault;
use crate::shared::inode::{Inode, InodeKey};

/// The version of an inode that is put before the first version of a directory which names it.
pub(super) struct Child<'a> {
    block: &'a CertifiedBlock,
    /// What became of it.
    outcome: Option<Result<(), PutError>>,
}

/// What became of an inode and of its directory.
pub(in crate::shared) enum Together<T> {
    /// The inode is there; and whether the directory names it.
    Stored(Arc<Version>, Result<T, Fault>),
    /// The inode is not there, and no name.
    Neither(Fault),
    /// Replicas did not take the inode as it was signed, and there is no name; another version may do.
    Refused(Fault),
}

impl Inodes {
    /// Makes an inode that members of `groups` may write, and puts it with the next version of a directory: what `edit`
    /// makes of it, which is given the key of the inode.
    pub(in crate::shared) async fn create_in<T>(
        &self,
        (groups, number): (&[GroupId], [u8; 16]),
        inode: impl FnOnce(Dot) -> Inode,
        (directory, base): (InodeKey, Base<'_>),
        mut edit: impl FnMut(InodeKey, &mut Inode, Dot) -> Result<T, Errno>,
    ) -> Result<(InodeKey, Together<T>), Fault> {
        let (key, state, made) = self.sign_first(groups, number, inode).await?;
        let _turn = state.turn.lock().await;
        let edit = |inode: &mut Inode, dot: Dot| edit(key, inode, dot);
        let both = self.put_both((key, &state), &made, (directory, base), edit).await?;
        Ok((key, both))
    }

    /// Puts the next version of an inode, what `edit` makes of `version`, with the next version of a directory.
    pub(in crate::shared) async fn update_in<T>(
        &self,
        (key, version): (InodeKey, &Arc<Version>),
        mut edit: impl FnMut(&mut Inode, Dot) -> Result<(), Errno>,
        directory: (InodeKey, Base<'_>),
        edit_directory: impl FnMut(&mut Inode, Dot) -> Result<T, Errno>,
    ) -> Result<Together<T>, Fault> {
        let state = self.state(key);
        let _turn = state.turn.lock().await;
        let signing = state.signing.lock().await;
        let over = Over::default();
        let next = Next { version, refused_base: None, over, is_recorded: true };
        let mut edit = |inode: &mut Inode, dot: Dot| Ok((edit(inode, dot)?, false));
        let signed = self.sign_next(&state, next, &mut edit).await?;
        let unsent = state.known().unsent_past.values().cloned().collect();
        drop(signing);
        self.put_leaves(&state, unsent).await?;
        self.put_both((key, &state), &signed.block, directory, edit_directory).await
    }

    /// Puts a version of an inode and its directory; the caller has the inode's turn.
    async fn put_both<T>(
        &self,
        (key, state): (InodeKey, &State),
        block: &CertifiedBlock,
        (directory, base): (InodeKey, Base<'_>),
        mut edit: impl FnMut(&mut Inode, Dot) -> Result<T, Errno>,
    ) -> Result<Together<T>, Fault> {
        let began = self.env.now();
        let mut child = Child { block, outcome: None };
        let above = self.state(directory);
        let _turn = above.turn.lock().await;
        let edit = |inode: &mut Inode, dot: Dot| Ok((edit(inode, dot)?, false));
        let named = self
            .write_in_turn((directory, &above), (base, Some(&mut child)), Over::default(), edit)
            .await;
        match child.outcome {
            Some(Ok(())) => {
                let version = self.learn(state, block, began).await?.ok_or(Errno::ESTALE)?;
                self.note_put(key, state, &version);
                Ok(Together::Stored(version, named.map(|(value, _)| value)))
            }
            Some(Err(error @ (PutError::NotAdmitted(_) | PutError::Superseded { .. }))) => {
                self.credentials.forget(block.groups());
                Ok(Together::Refused(error.into()))
            }
            Some(Err(error)) => Ok(Together::Neither(error.into())),
            None => Ok(Together::Neither(named.err().unwrap_or(Errno::EIO.into()))),
        }
    }

    /// Puts a version of a directory, and before it the child that it is to name, unless that was put.
    pub(super) async fn put_after(
        &self,
        child: Option<&mut Child<'_>>,
        block: &CertifiedBlock,
    ) -> Result<(), PutError> {
        let Some(child) = child.filter(|child| child.is_to_be_put()) else {
            return self.put(block).await;
        };
        let outcomes = self.blocks.put_in_order(vec![child.block.into(), block.into()]).await;
        let mut outcomes = outcomes.into_iter();
        let none = || Err(PutError::Unavailable("the put has no outcome".into()));
        let (first, second) = (outcomes.next().unwrap_or_else(none), outcomes.next());
        child.outcome = Some(first);
        second.unwrap_or_else(none)
    }
}

/// A version of a directory that names a child, from when it is signed. If the ring does not take the child, or the
/// call is given up, the version is forgotten: what a later one covers would be named without an inode. Should a
/// replica have both all the same, this mount joins them like another's, since it goes on under a new name.
pub(super) struct Unrecorded<'a> {
    inodes: &'a Inodes,
    state: &'a State,
    is_recorded: bool,
}

impl<'a> Unrecorded<'a> {
    pub(super) fn of(inodes: &'a Inodes, state: &'a State) -> Unrecorded<'a> {
        Unrecorded { inodes, state, is_recorded: false }
    }

    /// The ring has the child.
    pub(super) fn record(mut self, block: &CertifiedBlock) {
        self.state.known().signed = Some(block.clone());
        self.is_recorded = true;
    }
}

impl Drop for Unrecorded<'_> {
    fn drop(&mut self) {
        if !self.is_recorded {
            let mut writer = self.state.writer.lock().expect("no holder of this lock panics");
            *writer = self.inodes.new_writer();
        }
    }
}

impl Child<'_> {
    /// Whether it has not been put yet.
    pub(super) fn is_to_be_put(&self) -> bool {
        self.outcome.is_none()
    }

    /// Whether it was put in vain.
    pub(super) fn is_refused(&self) -> bool {
        matches!(self.outcome, Some(Err(_)))
    }
}
