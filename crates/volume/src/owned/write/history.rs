//! Old states are kept, and brought back.

use super::outbox::Outbox;
use super::{FlushError, Shared};
use crate::blocks::error::{BlockError, EditError};
use crate::format::DirectoryRef;
use crate::owned::history::{self, Reason};
use crate::owned::root::Root;
use atoll_dht::GetError;

impl Shared {
    pub(super) fn outbox(&self) -> Outbox<'_> {
        Outbox::new(&self.blocks, &self.cache, self.cipher.as_ref())
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
