//! Names of an open directory: those that are stored, joined with those that have changed.

use std::collections::BTreeSet;
use std::sync::Arc;

use atoll_vfs::{Caller, DirEntry, Errno, FileKind, FileSystem, InodeNumber};

use super::{Fault, WritableEngine, WritableFs};
use crate::blocks::directory;
use crate::blocks::error::BlockError;
use crate::mount::Listed;
use crate::owned::write::tree::OpenDirectory;

/// Bits of a listing's cookie for the place among changed names; those above are for the place
/// among the stored ones.
const CHANGED_BITS: u32 = 24;

/// Names that are read at once where all are.
const NAMES_AT_ONCE: usize = 1000;

impl WritableEngine {
    /// Names of an open directory from a cookie on: each with its cookie, and what it means if it
    /// is not stored.
    pub(super) async fn names_from(
        &self,
        open: &OpenDirectory,
        cookie: u64,
        limit: usize,
    ) -> Result<Vec<Listed<Option<u64>>>, Fault> {
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
            if let Some((name, kind, file)) = meaning {
                let cookie = stored_at << CHANGED_BITS | changed_at as u64;
                listed.push(Listed { name, kind, cookie, file });
            }
        }
        Ok(listed)
    }
}

impl WritableFs {
    /// All names of files, by path. Their table has none: every directory is listed.
    pub(super) async fn names_of(&self, files: &BTreeSet<u64>) -> Result<Vec<Vec<u8>>, Errno> {
        let me = Caller::default();
        let mut paths = Vec::new();
        let mut waiting = vec![(Vec::new(), InodeNumber::ROOT)];
        while let Some((above, directory)) = waiting.pop() {
            let handle = self.opendir(me, directory).await?.handle;
            let mut cookie = 0;
            loop {
                let page = self.readdir(directory, handle, cookie, NAMES_AT_ONCE, true).await?;
                let Some(last) = page.last() else { break };
                cookie = last.cookie;
                for DirEntry { name, kind, inode, .. } in page {
                    let path = if above.is_empty() {
                        name.to_vec()
                    } else {
                        [&above[..], &name].join(&b'/')
                    };
                    match kind {
                        FileKind::Directory => waiting.push((path, inode)),
                        _ => {
                            self.forget(inode, 1);
                            if files.contains(&inode.0) {
                                paths.push(path);
                            }
                        }
                    }
                }
            }
            self.closedir(directory, handle).await?;
            self.forget(directory, 1);
        }
        Ok(paths)
    }
}
