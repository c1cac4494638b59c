//! Names of an open directory: those that are stored, joined with those that have changed.

use std::sync::Arc;

use atoll_vfs::FileKind;
use bytes::Bytes;

use super::{Fault, WritableFs};
use crate::blocks::directory;
use crate::blocks::error::BlockError;
use crate::owned::write::tree::OpenDirectory;

/// Bits of a listing's cookie for the place among changed names; those above are for the place
/// among the stored ones.
const CHANGED_BITS: u32 = 24;

/// A name of a listing.
pub(super) struct Listed {
    pub(super) name: Bytes,
    pub(super) kind: FileKind,
    /// Its file, if the name is not as it is stored.
    pub(super) inode: Option<u64>,
    pub(super) cookie: u64,
}

impl WritableFs {
    /// Names of an open directory from a cookie on: each with its cookie, and what it means if it
    /// is not stored.
    pub(super) async fn names_from(
        &self,
        open: &OpenDirectory,
        cookie: u64,
        limit: usize,
    ) -> Result<Vec<Listed>, Fault> {
        let (mut stored_at, mut changed_at) =
            (cookie >> CHANGED_BITS, (cookie & ((1 << CHANGED_BITS) - 1)) as usize);
        let mut listed = Vec::new();
        let mut leaf: Option<(Arc<crate::format::DirectoryBlock>, usize)> = None;
        while listed.len() < limit {
            if leaf.as_ref().is_none_or(|(leaf, at)| *at >= leaf.entries().len()) {
                leaf = directory::leaf_at(&self.shared.cache, &open.stored, stored_at)
                    .await
                    .map_err(BlockError::from)?;
            }
            let next_stored = leaf.as_ref().map(|(leaf, at)| &leaf.entries()[*at]);
            let next_changed = open.changes.get(changed_at);
            let (takes_stored, takes_changed) = match (next_stored, next_changed) {
                (None, None) => break,
                (Some(_), None) => (true, false),
                (None, Some(_)) => (false, true),
                (Some(stored), Some((name, _))) => (stored.name <= *name, *name <= stored.name),
            };
            let meaning = match takes_changed {
                true => next_changed.and_then(|(name, meaning)| {
                    meaning.map(|(inode, kind)| (name.clone(), kind, Some(inode)))
                }),
                false => next_stored.map(|entry| (entry.name.clone(), entry.kind(), None)),
            };
            if takes_stored {
                stored_at += 1;
                if let Some((_, at)) = &mut leaf {
                    *at += 1;
                }
            }
            changed_at += usize::from(takes_changed);
            if let Some((name, kind, inode)) = meaning {
                let cookie = stored_at << CHANGED_BITS | changed_at as u64;
                listed.push(Listed { name, kind, inode, cookie });
            }
        }
        Ok(listed)
    }
}
