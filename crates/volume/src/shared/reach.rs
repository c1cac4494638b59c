//! Which blocks an inode refers to: leaves of a directory, and data of a file with the blocks of pointers to it.
//!
//! It reads blocks of pointers, and no data.

use std::collections::BTreeSet;
use std::sync::Arc;

use atoll_key::BlockHash;
use atoll_key::kinds::certified::CertifiedBlock;

use super::entries::{self, LeavesOf};
use super::inline_blocks::InlineBlocks;
use super::inode::{Contents, FileData};
use super::sealing::Sealing;
use crate::blocks::cache::BlockCache;
use crate::owned::reachable::Node;

/// Finds what is on the ring below inodes of one volume.
pub(super) struct Reach<'a> {
    pub(super) inline: &'a Arc<InlineBlocks>,
    pub(super) cache: &'a Arc<BlockCache>,
    pub(super) sealing: &'a Sealing,
}

impl Reach<'_> {
    /// Adds what the siblings of a block refer to, those included that are not shown.
    ///
    /// # Errors
    /// If not all of it could be read, for people.
    pub(super) async fn add_inode(
        &self,
        block: &CertifiedBlock,
        found: &mut BTreeSet<BlockHash>,
    ) -> Result<(), String> {
        let LeavesOf { needed, of_late } = entries::leaves_of(block, self.sealing);
        found.extend(needed.into_iter().chain(of_late));
        let mut added = Ok(());
        // What one writer has left that cannot be read costs nothing of what others have written.
        for sibling in block.siblings().iter().filter(|sibling| !sibling.is_removal) {
            let inode = self.sealing.inode(&sibling.payload);
            let outcome = match inode.map(|inode| inode.contents) {
                Ok(Contents::Regular { data: Some(data), .. }) => {
                    self.add_data(&data, &BTreeSet::new(), found).await
                }
                Ok(_) => Ok(()),
                Err(error) => Err(error.to_string()),
            };
            added = added.and(outcome);
        }
        added
    }

    /// Adds the blocks of a file's data, and none that are below one of `known`.
    ///
    /// # Errors
    /// The same.
    pub(super) async fn add_data(
        &self,
        data: &FileData,
        known: &BTreeSet<BlockHash>,
        found: &mut BTreeSet<BlockHash>,
    ) -> Result<(), String> {
        let (top, _pin) = match data {
            FileData::Elsewhere(hash) => {
                found.insert(*hash);
                (*hash, None)
            }
            FileData::Here(block) => {
                let pin = self.inline.pin(block.encode().into());
                (pin.hash, Some(pin))
            }
        };
        let mut waiting = vec![Node::Inode(top)];
        // A few blocks can describe endless data.
        let mut read = BTreeSet::new();
        while let Some(node) = waiting.pop() {
            if known.contains(&node.hash()) || !read.insert(node) {
                continue;
            }
            let below = node.below(self.cache).await;
            let below = below.map_err(|error| error.at(b"").to_string())?;
            found.extend(below.nodes.iter().map(|node| node.hash()));
            found.extend(below.data);
            waiting.extend(below.nodes);
        }
        Ok(())
    }
}
