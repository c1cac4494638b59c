//! Commits of the index.
//!
//! An index that cannot be written stops nothing: its changes stay in the catalogue, up to
//! [`MAX_BACKLOG`], and it is opened again before the next group of jobs.

use super::error::IndexError;
use super::index::Index;
use super::shared::Shared;
use crate::StoreError;

/// Changes kept in memory while the index fails, as a multiple of `commit_entries`.
const MAX_BACKLOG: usize = 16;

/// The open index and whether its last commit failed.
pub(crate) struct Committer {
    index: Index,
    has_failed: bool,
}

impl Committer {
    pub(crate) fn new(index: Index) -> Committer {
        Committer { index, has_failed: false }
    }

    /// Whether the last commit failed and the index has not been opened again since.
    pub(crate) fn has_failed(&self) -> bool {
        self.has_failed
    }

    /// Commits what is in the catalogue; returns the segments that may be removed then. On
    /// failure everything stays in the catalogue.
    pub(crate) fn commit(&mut self, shared: &Shared) -> Result<Vec<u64>, IndexError> {
        if self.has_failed {
            return Err(IndexError::Io("it failed before".to_owned()));
        }
        let frozen = shared.catalog.freeze();
        let committed = self.index.commit(&frozen);
        match committed.and_then(|snapshot| Ok((snapshot, self.index.len_bytes()?))) {
            Ok((snapshot, index_bytes)) => {
                shared.catalog.committed(snapshot, index_bytes);
                Ok(frozen.dead)
            }
            Err(error) => {
                tracing::warn!(%error, "the index could not be committed");
                self.has_failed = true;
                shared.catalog.not_committed(frozen);
                Err(error)
            }
        }
    }

    /// Opens an index that has failed again.
    pub(crate) fn reopen_if_failed(&mut self, shared: &Shared) {
        if !self.has_failed {
            return;
        }
        match self.index.reopen().and_then(|()| self.load_snapshot(shared)) {
            Ok(()) => self.has_failed = false,
            Err(error) => tracing::warn!(%error, "the index could not be opened again"),
        }
    }

    /// Gives the catalogue the index's last committed state.
    pub(crate) fn load_snapshot(&mut self, shared: &Shared) -> Result<(), IndexError> {
        shared.catalog.set_snapshot(self.index.snapshot()?, self.index.len_bytes()?);
        Ok(())
    }

    /// Refuses new blocks when the index has failed for so long that its backlog is full.
    pub(crate) fn check_backlog(&self, shared: &Shared) -> Result<(), StoreError> {
        let limit = shared.config.commit_entries.saturating_mul(MAX_BACKLOG);
        if self.has_failed && shared.catalog.uncommitted() >= limit {
            let why = "the index has not been writable for long; open the store again";
            return Err(StoreError::Io(why.to_owned()));
        }
        Ok(())
    }
}
