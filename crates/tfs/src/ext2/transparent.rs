//! Blocks of transparent files (§3.1): which they are, whether all are still theirs, taking and
//! giving them back.
//!
//! A transparent file's map is a chain of extents in the records. Its blocks are free for
//! ordinary files, which may take them at any moment; one that was taken makes the whole map
//! *lost*. Blocks are taken for transparent files only in state free (Figure 2), outside
//! avoided chunks (§3.3), and not before the transaction that freed them is committed: an older
//! state of the file system, which a crash may bring back, must not find foreign bytes in an
//! ordinary file.

use super::blocks::Run;
use super::files::Extent;
use super::{Ext2, Ext2Error, Records};
use crate::bitmap;
use crate::format::inode::Inode;
use crate::meta::Meta;
use crate::records::map::{ExtentHead, MAX_EXTENTS, MapEntry};
use crate::records::summary::CHUNKS;
use crate::records::tag::{Belongs, Tag};
use crate::states::BlockEvent;

/// The map of a transparent file, in memory while it is open.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Map {
    /// What stands in the records.
    pub entry: MapEntry,
    /// Its extents, in the order of the file; none is a hole.
    pub extents: Vec<Extent>,
}

/// The least run that is taken while better ones may follow: transparent data that lies in
/// few pieces is found and given back in few steps. A guess.
const GOOD_RUN_BLOCKS: u32 = 16;
/// The most blocks taken in one step.
const MAX_RUN_BLOCKS: u32 = 512;
/// The most runs given back in one step.
const RUNS_A_STEP: usize = 4;

/// Where the search for free blocks goes on: transparent data fills the disk from its end.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TransparentCursor {
    group: Option<u32>,
    /// In that group, where the last run ended.
    bit: Option<usize>,
    scarcity: Option<Scarcity>,
}

/// The whole disk was looked through for runs in vain. On a full disk all that is left are
/// pieces: to look for better at each step would take as long as the disk is large.
#[derive(Clone, Copy, Debug)]
struct Scarcity {
    /// Runs so long were looked for.
    least: u32,
    /// Blocks given back since, by files of either kind.
    returned: u64,
}

impl TransparentCursor {
    /// Whether runs of `least` blocks are worth being looked for in all of so many groups:
    /// unless that was in vain, and fewer blocks were given back since than would make one in
    /// each group.
    fn may_find(&self, least: u32, groups: u32) -> bool {
        self.scarcity.is_none_or(|scarcity| {
            least < scarcity.least
                || scarcity.returned >= u64::from(groups) * u64::from(scarcity.least)
        })
    }

    fn found_none(&mut self, least: u32) {
        self.scarcity = Some(Scarcity { least, returned: 0 });
    }

    pub(super) fn note_returned(&mut self, blocks: u32) {
        if let Some(scarcity) = &mut self.scarcity {
            scarcity.returned = scarcity.returned.saturating_add(blocks.into());
        }
    }
}

impl Map {
    /// The extents that hold blocks of `count` from `logical` on, holes (start 0) among them.
    pub fn extents_of(&self, logical: u32, count: u32) -> Vec<Extent> {
        let end = logical.saturating_add(count);
        let mut found = Vec::new();
        let mut at = logical;
        let first = self.extents.partition_point(|e| e.logical + e.len <= logical);
        for extent in &self.extents[first..] {
            if extent.logical >= end {
                break;
            }
            if extent.logical > at {
                found.push(Extent { logical: at, start: 0, len: extent.logical - at });
                at = extent.logical;
            }
            let skip = at - extent.logical;
            let len = (extent.len - skip).min(end - at);
            found.push(Extent { logical: at, start: extent.start + skip, len });
            at += len;
        }
        if at < end {
            found.push(Extent { logical: at, start: 0, len: end - at });
        }
        found
    }
}

impl Ext2 {
    /// The map of a transparent file, if all of its blocks are still its own by the bitmaps;
    /// none if one was overwritten, or the map is damaged: the file is lost. Tags are not
    /// compared.
    ///
    /// # Errors
    /// What reading the disk says.
    pub fn load_map(&mut self, number: u32, inode: &Inode) -> Result<Option<Map>, Ext2Error> {
        let longest = self.longest_file_bytes();
        let Some((records, meta)) = self.records_and_meta() else { return Ok(None) };
        let Some(entry) = records.map_entry(meta, number)? else { return Ok(None) };
        if entry.generation != inode.generation || entry.size_bytes > longest {
            return Ok(None);
        }
        let (extents, whole) = read_chain(records, meta, number, &entry)?;
        if !whole {
            return Ok(None);
        }
        for extent in &extents {
            if !self.is_intact(Run { start: extent.start, len: extent.len })? {
                return Ok(None);
            }
        }
        Ok(Some(Map { entry, extents }))
    }

    /// Whether a run within one group is in state transparent, all of it.
    fn is_intact(&mut self, run: Run) -> Result<bool, Ext2Error> {
        let (group, bit) = self.group_of_block(run.start)?;
        let range = bit as usize..(bit + run.len) as usize;
        if range.end > self.superblock().blocks_of_group(group) as usize {
            return Ok(false);
        }
        let (allocated, _) = self.block_bitmap(group)?;
        let Some((records, meta)) = self.records_and_meta() else { return Ok(false) };
        let transparent = records.transparent_bitmap(meta, group)?;
        let overwritten = records.overwritten_bitmap(meta, group)?;
        Ok(bitmap::next(&allocated, range.clone(), true).is_none()
            && bitmap::next(&transparent, range.clone(), false).is_none()
            && bitmap::next(&overwritten, range, true).is_none())
    }

    /// Takes at least one and at most `want` blocks for transparent data.
    ///
    /// # Errors
    /// [`Ext2Error::NoSpace`] if none is free outside avoided chunks.
    pub fn allocate_transparent(&mut self, want: u32) -> Result<Run, Ext2Error> {
        let want = want.clamp(1, MAX_RUN_BLOCKS);
        let groups = self.superblock().groups();
        let from = self.transparent_cursor.group.unwrap_or(groups - 1).min(groups - 1);
        let good = GOOD_RUN_BLOCKS.min(want);
        for least in [good, 1] {
            // Any run at all is always looked for: what is free can be taken.
            if least > 1 && !self.transparent_cursor.may_find(least, groups) {
                continue;
            }
            for i in 0..=groups {
                let group = (from + groups - i % groups) % groups;
                let from = (i == 0).then_some(self.transparent_cursor.bit).flatten();
                if let Some(run) = self.search_transparent(group, from, want, least)? {
                    let (_, start) = self.group_of_block(run.start)?;
                    let bit = Some((start + run.len) as usize);
                    self.transparent_cursor.group = Some(group);
                    self.transparent_cursor.bit = bit;
                    return Ok(run);
                }
            }
            if least > 1 {
                self.transparent_cursor.found_none(least);
            }
            if good == 1 {
                break;
            }
        }
        Err(Ext2Error::NoSpace)
    }

    /// Looks through a group, from its last chunk to its first: ordinary files fill a group
    /// upwards, and come to its end last. `from` is where the run before ended.
    fn search_transparent(
        &mut self,
        group: u32,
        from: Option<usize>,
        want: u32,
        least: u32,
    ) -> Result<Option<Run>, Ext2Error> {
        // Some free blocks are transparent; without looking at the bitmaps, a full disk is
        // found to be full.
        let free = u32::from(self.descriptor(group)?.free_blocks);
        let Some((records, meta)) = self.records_and_meta() else { return Ok(None) };
        if free <= records.summary(meta, group)?.transparent {
            return Ok(None);
        }
        let (allocated, _) = self.block_bitmap(group)?;
        let first = self.superblock().first_block_of_group(group);
        let blocks = self.superblock().blocks_of_group(group) as usize;
        let Some((records, meta)) = self.records_and_meta() else { return Ok(None) };
        let chunk_blocks = records.chunk_blocks();
        let avoided = records.summary(meta, group)?.avoided;
        let transparent = records.transparent_bitmap(meta, group)?;
        let top =
            from.map_or(CHUNKS, |from| (from.saturating_sub(1) / chunk_blocks + 1).min(CHUNKS));
        for chunk in (0..top).rev().filter(|chunk| avoided & 1 << chunk == 0) {
            let end = ((chunk + 1) * chunk_blocks).min(blocks);
            let begin = chunk * chunk_blocks;
            let mut bit = from.filter(|_| chunk + 1 == top).map_or(begin, |from| from.max(begin));
            while bit < end {
                let Some(start) = bitmap::next(&allocated, bit..end, false) else { break };
                // Most of what ordinary files left is transparent: passed over together.
                let Some(unused) = bitmap::next(&transparent, start..end, false) else { break };
                if unused > start {
                    bit = unused;
                    continue;
                }
                let limit = end.min(start + want as usize);
                let free = bitmap::run_end(&allocated, start..limit, false);
                let own = bitmap::run_end(&transparent, start..free, false);
                let resting = (start..own).find(|bit| meta.is_resting(first + *bit as u32));
                let stop = resting.unwrap_or(own);
                if stop - start >= least as usize {
                    let run = Run { start: first + start as u32, len: (stop - start) as u32 };
                    return Ok(Some(run));
                }
                bit = stop.max(start) + 1;
            }
        }
        Ok(None)
    }

    /// Gives a run that was found by [`Ext2::allocate_transparent`] to a file, for the hole at
    /// `logical`; the map in memory is changed with the records.
    ///
    /// # Errors
    /// [`Ext2Error::NoSpace`] if the file has too many extents; nothing is changed then.
    pub fn add_to_map(
        &mut self,
        number: u32,
        map: &mut Map,
        logical: u32,
        run: Run,
    ) -> Result<(), Ext2Error> {
        let at = map.extents.partition_point(|extent| extent.logical < logical);
        let joins = at > 0 && {
            let before = &map.extents[at - 1];
            before.logical + before.len == logical
                && before.start + before.len == run.start
                && self.group_of_block(before.start)?.0 == self.group_of_block(run.start)?.0
        };
        if !joins && map.extents.len() >= MAX_EXTENTS {
            return Err(Ext2Error::NoSpace);
        }
        if joins {
            map.extents[at - 1].len += run.len;
        } else {
            map.extents.insert(at, Extent { logical, start: run.start, len: run.len });
        }
        map.entry.blocks += run.len;
        // The changed extent, and the one before it, which names it.
        let changed = if joins { at - 1 } else { at };
        self.write_heads(number, map, changed.saturating_sub(1)..=changed)?;
        self.happen_to(run, BlockEvent::TransparentWrite)
    }

    /// Something happens to a run within one group.
    pub(super) fn happen_to(&mut self, run: Run, event: BlockEvent) -> Result<(), Ext2Error> {
        if event == BlockEvent::TransparentDelete {
            self.transparent_cursor.note_returned(run.len);
        }
        let (group, _) = self.group_of_block(run.start)?;
        let (allocated, _) = self.block_bitmap(group)?;
        let Some((records, meta)) = self.records_and_meta() else { return Ok(()) };
        records.happen(meta, &allocated, run, event)
    }

    fn write_heads(
        &mut self,
        number: u32,
        map: &mut Map,
        range: std::ops::RangeInclusive<usize>,
    ) -> Result<(), Ext2Error> {
        map.entry.first_extent = map.extents.first().map_or(0, |extent| extent.start);
        let Some((records, meta)) = self.records_and_meta() else { return Ok(()) };
        for at in range {
            let Some(extent) = map.extents.get(at) else { continue };
            let next = map.extents.get(at + 1).map_or(0, |next| next.start);
            let head = ExtentHead { owner: number, logical: extent.logical, len: extent.len, next };
            records.put_extent_head(meta, extent.start, Some(&head))?;
        }
        records.put_map_entry(meta, number, Some(&map.entry))
    }

    /// Gives back the blocks of a map beyond its first `keep`, as many as one step can;
    /// returns whether none are left. Overwritten ones become what Figure 2 says.
    ///
    /// # Errors
    /// What reading the disk says.
    pub fn cut_map(&mut self, number: u32, map: &mut Map, keep: u32) -> Result<bool, Ext2Error> {
        for _ in 0..RUNS_A_STEP {
            let Some(last) = map.extents.last_mut() else { break };
            if last.logical + last.len <= keep {
                break;
            }
            let kept = keep.saturating_sub(last.logical);
            let run = Run { start: last.start + kept, len: last.len - kept };
            map.entry.blocks = map.entry.blocks.saturating_sub(run.len);
            if kept > 0 {
                last.len = kept;
            } else {
                map.extents.pop();
                let Some((records, meta)) = self.records_and_meta() else { return Ok(true) };
                records.put_extent_head(meta, run.start, None)?;
            }
            self.happen_to(run, BlockEvent::TransparentDelete)?;
        }
        if let Some(last) = map.extents.len().checked_sub(1) {
            self.write_heads(number, map, last..=last)?;
        } else {
            self.write_heads(number, map, 0..=0)?;
        }
        Ok(map.extents.last().is_none_or(|last| last.logical + last.len <= keep))
    }

    /// Gives back a map that stands on the disk, as many extents from its start as one step can;
    /// true when it is gone. Extents behind damage stay marked, until the records are gone
    /// through.
    ///
    /// # Errors
    /// What reading the disk says.
    pub fn drop_map(&mut self, number: u32) -> Result<bool, Ext2Error> {
        let Some((records, meta)) = self.records_and_meta() else { return Ok(true) };
        let mut entry = records.map_entry(meta, number)?;
        if let Some(entry) = &mut entry {
            for _ in 0..RUNS_A_STEP {
                let Some((records, meta)) = self.records_and_meta() else { return Ok(true) };
                let start = entry.first_extent;
                let head = match start {
                    0 => None,
                    start if records.has_block(start) => records.extent_head(meta, start)?,
                    _ => None,
                };
                let whole =
                    head.filter(|h| h.owner == number && records.in_one_group(start, h.len));
                let Some(head) = whole else {
                    if start != 0 {
                        records.note_damage();
                    }
                    entry.first_extent = 0;
                    break;
                };
                records.put_extent_head(meta, start, None)?;
                entry.first_extent = head.next;
                entry.blocks = entry.blocks.saturating_sub(head.len);
                self.happen_to(Run { start, len: head.len }, BlockEvent::TransparentDelete)?;
            }
        }
        let left = entry.filter(|entry| entry.first_extent != 0);
        let Some((records, meta)) = self.records_and_meta() else { return Ok(true) };
        records.put_map_entry(meta, number, left.as_ref())?;
        Ok(left.is_none())
    }

    /// The part of a map that can be read, whose ever the blocks are now.
    ///
    /// # Errors
    /// What reading the disk says.
    pub fn lost_map(&mut self, number: u32) -> Result<Option<Map>, Ext2Error> {
        let Some((records, meta)) = self.records_and_meta() else { return Ok(None) };
        let Some(entry) = records.map_entry(meta, number)? else { return Ok(None) };
        let (extents, _) = read_chain(records, meta, number, &entry)?;
        Ok(Some(Map { entry, extents }))
    }

    /// The map of a file as the records have it, and whether its chain of extents is whole.
    /// Nothing is said of the state of its blocks.
    ///
    /// # Errors
    /// What reading the disk says.
    pub fn recorded_map(&mut self, number: u32) -> Result<Option<(Map, bool)>, Ext2Error> {
        let Some((records, meta)) = self.records_and_meta() else { return Ok(None) };
        let Some(entry) = records.map_entry(meta, number)? else { return Ok(None) };
        let (extents, whole) = read_chain(records, meta, number, &entry)?;
        Ok(Some((Map { entry, extents }, whole)))
    }

    /// The tag that a block of a file should have.
    pub fn tag_of(&self, belongs: Belongs, block: &[u8]) -> Tag {
        let key = self.records().map_or([0; 32], |records| records.header().tag_key);
        Tag::of(&key, belongs, block)
    }
}

/// The extents of a chain from its start as far as they can be true (of this owner, ascending,
/// each within a group), and whether that is all of it, of as many blocks as its entry says.
fn read_chain(
    records: &mut Records,
    meta: &mut Meta,
    number: u32,
    entry: &MapEntry,
) -> Result<(Vec<Extent>, bool), Ext2Error> {
    let mut extents: Vec<Extent> = Vec::new();
    let mut at = entry.first_extent;
    let mut blocks = 0u32;
    while at != 0 {
        if !records.has_block(at) || extents.len() >= MAX_EXTENTS {
            return Ok((extents, false));
        }
        let Some(head) = records.extent_head(meta, at)? else { return Ok((extents, false)) };
        let follows = extents.last().is_none_or(|last| last.logical + last.len <= head.logical);
        let ends = head.logical.checked_add(head.len);
        if head.owner != number || !follows || ends.is_none() || !records.in_one_group(at, head.len)
        {
            return Ok((extents, false));
        }
        extents.push(Extent { logical: head.logical, start: at, len: head.len });
        blocks = blocks.saturating_add(head.len);
        at = head.next;
    }
    Ok((extents, blocks == entry.blocks))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn good_runs_are_looked_for_again_when_there_may_be_some() {
        let mut cursor = TransparentCursor::default();
        assert!(cursor.may_find(16, 10));
        cursor.note_returned(1000);
        cursor.found_none(16);
        assert!(!cursor.may_find(16, 10) && cursor.may_find(15, 10));
        cursor.note_returned(159);
        assert!(!cursor.may_find(16, 10));
        cursor.note_returned(1);
        assert!(cursor.may_find(16, 10), "one in each of ten groups");
        cursor.found_none(4);
        assert!(!cursor.may_find(4, 10) && !cursor.may_find(16, 10) && cursor.may_find(3, 10));
    }
}
