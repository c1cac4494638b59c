//! Finding a name in a directory, and listing one, block by block.

use std::sync::Arc;

use atoll_key::BlockHash;
use bytes::Bytes;

use super::cache::BlockCache;
use super::error::BlockError;
use crate::format::{
    Child, Content, DirectoryBlock, DirectoryEntry, DirectoryRef, FormatError, Nodes, link_name,
};

/// Leaves fetched ahead of the one being listed.
const LEAVES_AHEAD: usize = 4;

/// The entry `name` of a directory; reads one block per level.
pub(crate) async fn find(
    cache: &Arc<BlockCache>,
    directory: &DirectoryRef,
    name: &[u8],
) -> Result<Option<DirectoryEntry>, BlockError> {
    let Some(mut block) = top(cache, directory).await? else { return Ok(None) };
    let mut bound = None;
    loop {
        let children = match &block.nodes {
            Nodes::Leaf(entries) => {
                let found = entries.binary_search_by(|entry| entry.name[..].cmp(name));
                return Ok(found.ok().map(|index| entries[index].clone()));
            }
            Nodes::Interior(children) => children,
        };
        let after = children.partition_point(|child| child.first_name[..] <= *name);
        let Some(index) = after.checked_sub(1) else { return Ok(None) };
        block = descend(cache, block.level, children, index, &mut bound).await?;
    }
}

/// What an entry stands for: if the file has several names, its entry in the table `links`, under
/// the name that it was found by.
pub(crate) async fn resolved(
    cache: &Arc<BlockCache>,
    links: &DirectoryRef,
    entry: DirectoryEntry,
) -> Result<DirectoryEntry, BlockError> {
    let Content::Linked { inode, kind } = entry.content else { return Ok(entry) };
    match find(cache, links, &link_name(inode)).await? {
        Some(found) if found.kind() == kind && !matches!(found.content, Content::Linked { .. }) => {
            Ok(DirectoryEntry { name: entry.name, ..found })
        }
        _ => {
            let source = FormatError::BadReference("a name leads to no file in the table of links");
            Err(BlockError::Bad { hash: links.hash.unwrap_or(BlockHash([0; 32])), source })
        }
    }
}

/// A block of a directory that cannot be read.
pub(crate) struct UnreadLeaf {
    pub(crate) error: BlockError,
    /// How many entries lie below it, from the one that was looked for on.
    pub(crate) entries: u64,
}

impl From<UnreadLeaf> for BlockError {
    fn from(unread: UnreadLeaf) -> BlockError {
        unread.error
    }
}

/// The leaf that holds entry number `index` of a directory, and the entry's place in it;
/// `None` past the end. Begins to fetch the leaves after it.
pub(crate) async fn leaf_at(
    cache: &Arc<BlockCache>,
    directory: &DirectoryRef,
    mut index: u64,
) -> Result<Option<(Arc<DirectoryBlock>, usize)>, UnreadLeaf> {
    if index >= directory.entries {
        return Ok(None);
    }
    let unread = |entries| move |error| UnreadLeaf { error, entries };
    let all = unread(directory.entries - index);
    let Some(mut block) = top(cache, directory).await.map_err(all)? else { return Ok(None) };
    let mut bound = None;
    loop {
        let children = match &block.nodes {
            Nodes::Leaf(_) => {
                // All counts above were checked against those below.
                let index = usize::try_from(index).expect("below the leaf's own count");
                return Ok(Some((block, index)));
            }
            Nodes::Interior(children) => children,
        };
        let mut at = 0;
        while at + 1 < children.len() && index >= children[at].entries {
            index -= children[at].entries;
            at += 1;
        }
        if block.level == 1 {
            for child in children.iter().skip(at + 1).take(LEAVES_AHEAD) {
                cache.prefetch(child.hash);
            }
        }
        // Of the last child, `index` may be past what it says that it has.
        let below = unread(children[at].entries.saturating_sub(index).max(1));
        block = descend(cache, block.level, children, at, &mut bound).await.map_err(below)?;
    }
}

pub(super) async fn top(
    cache: &Arc<BlockCache>,
    directory: &DirectoryRef,
) -> Result<Option<Arc<DirectoryBlock>>, BlockError> {
    let Some(hash) = directory.hash else { return Ok(None) };
    let block = cache.directory(hash).await?;
    block
        .check_counts((directory.entries, directory.subdirectories))
        .map_err(BlockError::bad(hash))?;
    Ok(Some(block))
}

/// Fetches child number `index` and checks that it is what its parent says. `bound` is
/// the name before which all names of the parent lie, and becomes the child's.
pub(super) async fn descend(
    cache: &Arc<BlockCache>,
    level: u8,
    children: &[Child],
    index: usize,
    bound: &mut Option<Bytes>,
) -> Result<Arc<DirectoryBlock>, BlockError> {
    let child = &children[index];
    if let Some(sibling) = children.get(index + 1) {
        *bound = Some(sibling.first_name.clone());
    }
    let block = cache.directory(child.hash).await?;
    block.check_place(level, child, bound.as_ref()).map_err(BlockError::bad(child.hash))?;
    Ok(block)
}
