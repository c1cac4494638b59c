//! Changes of a directory that are shown before they are on the ring.
//!
//! A program that removes names waits for none of them: the version without a name is signed and known to this
//! mount at once, and put a moment later, with all that was removed while the put before was
//! under way. Whatever else is written of the directory meanwhile covers it, since a version covers all that was
//! signed.
//!
//! If the mount ends before the put, the names are still there. What cannot be put is tried again as long as
//! the mount lives.
//!
//! Invariant: `Known::is_unput` says whether the inode is in `Inodes::unput`.

use std::collections::BTreeMap;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use atoll_key::kinds::certified::Dot;
use atoll_vfs::Errno;

use super::{Base, Freshness, Inodes, Next, Over, Signed, State, Version};
use crate::shared::fault::Fault;
use crate::shared::inode::{Inode, InodeKey};
use crate::shared::merged::Merged;

impl Inodes {
    /// Shows the next version of a directory, which [`Inodes::put_behind`] puts: what `edit` makes of one that is at
    /// most `age` old. Also whether the caller has to have it put: nobody else is about to.
    pub(in crate::shared) async fn update_behind<T>(
        &self,
        key: InodeKey,
        age: Duration,
        mut edit: impl FnMut(&mut Inode, Dot) -> Result<T, Errno>,
    ) -> Result<(T, bool), Fault> {
        let state = self.state(key);
        let read = self.read_state(&state, key, Freshness::Within(age)).await?;
        let _signing = state.signing.lock().await;
        // What was shown meanwhile includes what was read.
        let known = state.known().version.clone();
        let (version, at) = known.ok_or(Errno::ESTALE)?;
        let version = if version.block.includes(&read.block) { version } else { read };
        let next = Next {
            version: &version,
            refused_base: None,
            over: Over::default(),
            is_recorded: true,
        };
        let mut edit = |inode: &mut Inode, dot: Dot| Ok((edit(inode, dot)?, false));
        let Signed { block, inode, leaves, value, .. } =
            self.sign_next(&state, next, &mut edit).await?;
        let merged = Merged { inode, conflicts: Vec::new(), unreadable: Vec::new() };
        let mut unput = self.unput_states();
        let mut known = state.known();
        known.version = Some((Version::of(block, merged, leaves), at));
        known.is_unput = true;
        let begins = unput.insert(key, state.clone()).is_none();
        Ok((value, begins))
    }

    /// Puts what [`Inodes::update_behind`] has shown of a directory.
    pub(in crate::shared) async fn put_behind(&self, key: InodeKey) -> Result<(), Fault> {
        let state = self.unput_states().get(&key).cloned();
        let Some(state) = state else { return Ok(()) };
        let _turn = state.turn.lock().await;
        self.put_behind_in_turn(key, &state).await
    }

    /// The same; the caller has the inode's turn.
    pub(super) async fn put_behind_in_turn(
        &self,
        key: InodeKey,
        state: &State,
    ) -> Result<(), Fault> {
        while state.known().is_unput {
            let version = state.known().version().cloned();
            let put = match &version {
                Some(version) => {
                    let (inode, base) = ((key, state), Base::Version(version));
                    self.write_in_turn(inode, (base, None), Over::default(), |_, _| Ok(((), false)))
                        .await
                        .map(drop)
                }
                None => Err(Errno::ESTALE.into()),
            };
            match put {
                Ok(()) => {}
                // The directory has been removed.
                Err(Fault { errno: Errno::ESTALE, .. }) => self.drop_behind(key, state),
                Err(fault) => return Err(fault),
            }
        }
        Ok(())
    }

    /// Directories with changes that are not put yet.
    pub(in crate::shared) fn behind(&self) -> Vec<InodeKey> {
        self.unput_states().keys().copied().collect()
    }

    /// A version has been put.
    pub(super) fn note_put(&self, key: InodeKey, state: &State, written: &Arc<Version>) {
        let mut unput = self.unput_states();
        let mut known = state.known();
        if known.signed.as_ref().is_some_and(|signed| written.block.includes(signed)) {
            known.is_unput = false;
            unput.remove(&key);
        }
    }

    fn drop_behind(&self, key: InodeKey, state: &State) {
        let mut unput = self.unput_states();
        let mut known = state.known();
        known.is_unput = false;
        known.unsent.clear();
        unput.remove(&key);
    }

    fn unput_states(&self) -> MutexGuard<'_, BTreeMap<InodeKey, Arc<State>>> {
        self.unput.lock().expect("no holder of this lock panics")
    }
}
