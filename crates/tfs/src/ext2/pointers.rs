//! Which blocks a file may point at: those of the file system that are not a group's own
//! metadata. A damaged pointer must neither show a bitmap as a file's bytes nor let a write
//! to a file change an inode table.

use super::{Ext2Error, damaged};
use crate::format::DESCRIPTOR_BYTES;
use crate::format::group::GroupDescriptor;
use crate::format::superblock::Superblock;
use crate::meta::Meta;

/// How many groups' metadata is remembered (a guess: files that are read at the same time).
const MEMO: usize = 16;

/// A group's own metadata: first block and count of its four parts.
type OwnRuns = [(u32, u32); 4];

/// What the check needs: the geometry, which never changes, and where the groups met last
/// keep their metadata, which does not change either.
#[derive(Debug)]
pub(super) struct Pointable {
    geometry: Superblock,
    /// At the group's number modulo its length.
    memo: [Option<(u32, OwnRuns)>; MEMO],
}

impl Pointable {
    pub(super) fn new(superblock: &Superblock) -> Pointable {
        Pointable { geometry: superblock.clone(), memo: [None; MEMO] }
    }

    /// Refuses a block number that no file may point at.
    pub(super) fn check(&mut self, meta: &mut Meta, block: u32) -> Result<(), Ext2Error> {
        let first = self.geometry.first_data_block();
        if block < first || block >= self.geometry.blocks() {
            return damaged(format!("a file points at block {block}, which does not exist"));
        }
        let group = (block - first) / self.geometry.blocks_per_group();
        let own = match self.memo[group as usize % MEMO] {
            Some((known, own)) if known == group => own,
            _ => self.meet(meta, group)?,
        };
        if own.iter().any(|(start, len)| block >= *start && block - start < *len) {
            return damaged(format!("a file points at block {block}, which is metadata"));
        }
        Ok(())
    }

    fn meet(&mut self, meta: &mut Meta, group: u32) -> Result<OwnRuns, Ext2Error> {
        let each = (meta.block_bytes() / DESCRIPTOR_BYTES) as u32;
        let block = self.geometry.first_data_block() + 1 + group / each;
        let at = (group % each) as usize * DESCRIPTOR_BYTES;
        let descriptor = GroupDescriptor::decode(&meta.read(block)?[at..]);
        if !descriptor.fits(&self.geometry, group) {
            return damaged(format!("the descriptor of group {group} is impossible"));
        }
        let own = descriptor.own_runs(&self.geometry, group);
        self.memo[group as usize % MEMO] = Some((group, own));
        Ok(own)
    }
}
