//! Old states are kept, and brought back.

use atoll_dht::GetError;

use super::{FlushError, Shared, WritableFs};
use crate::blocks::error::{BlockError, EditError};
use crate::blocks::outbox::{Outbox, Seal};
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
        Outbox::new(
            &self.blocks,
            &self.cache,
            self.cipher.as_ref().map(|cipher| cipher as &dyn Seal),
        )
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
