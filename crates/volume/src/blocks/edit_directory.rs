//! A directory with some of its entries changed: blocks in which nothing changes stay as they are,
//! so that a change in a directory of 100,000 names writes one leaf and the blocks above it.
//!
//! The old directory is passed once, in order of its names. A block without a change is taken over
//! whole where the block before it ends, and entry by entry otherwise. Where blocks end is
//! decided as for a new directory ([`DirectoryBuilder`]), but a block that deletions have made
//! small stays until a change meets it.

use std::collections::BTreeMap;
use std::sync::Arc;

use atoll_env::BoxFuture;
use bytes::Bytes;

use super::cache::BlockCache;
use super::directory::{descend, top};
use super::error::EditError;
use crate::format::build::{DirectoryBuilder, Sink};
use crate::format::{DirectoryBlock, DirectoryEntry, DirectoryRef, Nodes};

/// What becomes of names: the entry of each one, or that it is gone.
pub(crate) type Changes = BTreeMap<Bytes, Option<DirectoryEntry>>;

/// Writes `directory` with `changes`; new blocks go to `sink`.
pub(crate) async fn edit_directory<S: Sink<EditError> + Send>(
    cache: &Arc<BlockCache>,
    directory: &DirectoryRef,
    changes: Changes,
    sink: &mut S,
) -> Result<DirectoryRef, EditError> {
    let mut edit = Edit { cache, changes, builder: DirectoryBuilder::default(), sink };
    if let Some(block) = top(cache, directory).await? {
        edit.pass(block, None).await?;
    }
    edit.insert_upto(None)?;
    let Edit { builder, sink, .. } = edit;
    builder.finish(sink)
}

struct Edit<'a, S> {
    cache: &'a Arc<BlockCache>,
    /// Those of names that are not passed yet.
    changes: Changes,
    builder: DirectoryBuilder,
    sink: &'a mut S,
}

impl<S: Sink<EditError> + Send> Edit<'_, S> {
    /// Passes a block whose names all lie before `bound`.
    fn pass(
        &mut self,
        block: Arc<DirectoryBlock>,
        bound: Option<Bytes>,
    ) -> BoxFuture<'_, Result<(), EditError>> {
        Box::pin(async move {
            let children = match &block.nodes {
                Nodes::Leaf(entries) => return self.merge(entries),
                Nodes::Interior(children) => children,
            };
            for (index, child) in children.iter().enumerate() {
                let next = children.get(index + 1).map(|next| &next.first_name);
                let end = next.or(bound.as_ref());
                // New names before the child's first belong to the block before it.
                self.insert_upto(Some(&child.first_name))?;
                let changes = self.changes.keys().next();
                let is_changed = changes.is_some_and(|name| end.is_none_or(|end| name < end));
                let level = block.level - 1;
                if !is_changed && self.builder.ends_before(&child.first_name, level, self.sink)? {
                    self.builder.push_block(level, child, self.sink)?;
                    continue;
                }
                let mut below = bound.clone();
                let block = descend(self.cache, block.level, children, index, &mut below).await?;
                self.pass(block, below).await?;
            }
            Ok(())
        })
    }

    /// Passes the entries of a leaf.
    fn merge(&mut self, entries: &[DirectoryEntry]) -> Result<(), EditError> {
        for entry in entries {
            self.insert_upto(Some(&entry.name))?;
            match self.changes.remove(&entry.name) {
                None => self.builder.push(entry, self.sink)?,
                Some(Some(changed)) => self.builder.push(&changed, self.sink)?,
                Some(None) => {}
            }
        }
        Ok(())
    }

    /// Adds the new names before `name`, or all.
    fn insert_upto(&mut self, name: Option<&Bytes>) -> Result<(), EditError> {
        while let Some(first) = self.changes.first_entry()
            && name.is_none_or(|name| first.key() < name)
        {
            if let Some(entry) = first.remove() {
                self.builder.push(&entry, self.sink)?;
            }
        }
        Ok(())
    }
}
