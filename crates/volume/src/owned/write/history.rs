//! Old states are kept, and brought back.

use atoll_dht::GetError;

use super::{FlushError, Shared, WritableFs};
use crate::blocks::error::{BlockError, EditError};
use crate::blocks::outbox::Outbox;
use crate::format::DirectoryRef;
use crate::owned::OpenError;
use crate::owned::history::{self, Reason, State};
use crate::owned::root::{MountState, Root};

/// Why an old state was not brought back.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RestoreError {
    /// It cannot be read, or is not kept.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The ring did not take the new root, or a block.
    #[error(transparent)]
    Flush(#[from] FlushError),
}

impl WritableFs {
    /// Makes the newest state of `unix_ms` or before the volume's present one, and adds that one to
    /// the history. `None`: it is the present one.
    ///
    /// What this mount shows stays as it was, so it is only to be ended after this.
    pub async fn restore(&self, unix_ms: u64) -> Result<Option<State>, RestoreError> {
        self.shared.flushed(None).await?;
        let mut head = self.shared.head.lock().await;
        let present = head.root.clone();
        let state = history::state_at(&self.shared.cache, &present, unix_ms).await?;
        if state.unix_ms == present.published_unix_ms {
            return Ok(None);
        }
        let (now, mut outbox) = (self.shared.env.unix_ms(), self.shared.outbox());
        let (cache, keep) = (&self.shared.cache, present.mounted.keep);
        let next = history::next(cache, &present, keep, now, Reason::Restore, &mut outbox);
        let history = next.await.map_err(FlushError::from)?;
        outbox.finish().await.map_err(FlushError::from)?;
        let old = state.root.clone();
        let root = Root {
            published_unix_ms: now,
            label: present.label,
            mounted: MountState {
                // No file made later may have the number of one that was removed.
                next_inode: present.mounted.next_inode.max(old.mounted.next_inode),
                history,
                keep,
                replaced: present.mounted.replaced,
                // The spools' records up to now are in the state that this one replaces.
                merged: present.mounted.merged,
                ..old.mounted
            },
            ..old
        };
        self.shared.put_root(&mut head, self.shared.marked(root, true)).await?;
        Ok(Some(state))
    }
}

impl Shared {
    pub(super) fn outbox(&self) -> Outbox<'_> {
        let outbox = Outbox::new(&self.blocks, &self.cache, self.form.sealer());
        if self.form.is_releasable() { outbox.noting(&self.releases.put) } else { outbox }
    }

    /// The history of the root that a flush puts in place of `old`. One that has lost blocks stays
    /// as it is: what is written must not wait for it.
    pub(super) async fn next_history(
        &self,
        old: &Root,
        now_unix_ms: u64,
        outbox: &mut Outbox<'_>,
    ) -> Result<DirectoryRef, FlushError> {
        let keep = old.mounted.keep;
        let next = history::next(&self.cache, old, keep, now_unix_ms, Reason::Flush, outbox).await;
        match next {
            Err(EditError::Read(BlockError::Fetch(error @ GetError::Unavailable { .. }))) => {
                Err(error.into())
            }
            Err(EditError::Read(error)) => {
                tracing::warn!("a state is not kept: {}", error.at(b""));
                Ok(old.mounted.history)
            }
            next => Ok(next?),
        }
    }

    /// The roots taken over that the root has which a flush puts in place of `old`, with those that found no place before. If
    /// some are lost, they stay as they are.
    pub(super) async fn next_replaced(
        &self,
        old: &Root,
        now_unix_ms: u64,
        outbox: &mut Outbox<'_>,
    ) -> Result<DirectoryRef, FlushError> {
        let (replaced, unkept) = (&old.mounted.replaced, self.releases.unkept());
        match history::next_replaced(&self.cache, replaced, &unkept, now_unix_ms, outbox).await {
            Err(EditError::Read(BlockError::Fetch(error @ GetError::Unavailable { .. }))) => {
                Err(error.into())
            }
            Err(EditError::Read(_)) => Ok(*replaced),
            next => Ok(next?),
        }
    }

    /// `root` with `replaced` among the roots of other writers: what they have in their spools follows it. If the ring does not
    /// take it now, the next flush tries again, and nothing is released before.
    pub(super) async fn with_replaced(&self, mut root: Root, replaced: Root) -> Root {
        if !self.form.is_releasable() {
            return root;
        }
        let (now, mut outbox) = (self.env.unix_ms(), self.outbox());
        let (before, added) = (root.mounted.replaced, [replaced]);
        let next = async {
            let next = history::next_replaced(&self.cache, &before, &added, now, &mut outbox);
            let next = next.await.map_err(FlushError::from)?;
            outbox.finish().await?;
            Ok::<_, FlushError>(next)
        };
        match next.await {
            Ok(next) => root.mounted.replaced = next,
            Err(error) => {
                tracing::warn!("the root of another writer is not kept yet: {error}");
                let [replaced] = added;
                self.releases.keep_later(replaced);
            }
        }
        root
    }

    /// `root` under the policy that this mount was given.
    pub(super) async fn with_policy(&self, mut root: Root) -> Result<Root, FlushError> {
        let Some(keep) = self.options.keep.filter(|keep| *keep != root.mounted.keep) else {
            return Ok(root);
        };
        let (now, mut outbox) = (self.env.unix_ms(), self.outbox());
        let next = history::next(&self.cache, &root, keep, now, Reason::Policy, &mut outbox);
        root.mounted.history = next.await?;
        outbox.finish().await?;
        root.mounted.keep = keep;
        Ok(root)
    }
}
