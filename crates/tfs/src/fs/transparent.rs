//! Transparent files that are open (§3.1, §3.2): opening checks the blocks, one lost block and
//! the file is gone; while it is open its blocks are pinned. Their bytes are `tagged`'s.

use std::collections::BTreeMap;

use atoll_vfs::{Caller, Errno, FileKind, FileTime};

use super::access::{check_changeable, check_owner};
use super::held::Ending;
use super::{Core, Shared, errno};
use crate::ext2::{Ext2Error, Extent, Map, Run};
use crate::format::inode::{Inode, POINTERS, TRANSPARENT};
use crate::records::map::MapEntry;

/// Blocks that a step writes or compares at most: their tags lie in few blocks.
pub(super) const BLOCKS_A_STEP: u32 = 64;
/// Metadata blocks that a step changes at most: for each of its runs bitmaps, summary, heads
/// of two extents; tags, map entry, inode.
pub(super) const STEP_BLOCKS: usize = 40;
/// The epoch of a file whose tags are to be compared when it is opened next; the first is 1.
const NEVER: u32 = 0;

/// The attribute that says whether a file is transparent, or new files in a directory will be.
pub(super) const TRANSPARENT_XATTR: &[u8] = b"user.tfs.transparent";

/// The maps of all transparent files that are open.
#[derive(Debug, Default)]
pub(super) struct OpenMaps(pub(super) BTreeMap<u32, OpenMap>);

#[derive(Debug)]
pub(super) struct OpenMap {
    pub(super) map: Map,
    opens: u32,
    /// All tags were compared in this epoch, or the file has grown since it was empty.
    compared: bool,
}

/// What an open found.
pub(super) enum Look {
    /// It is open.
    Open,
    /// It is pinned; its tags are to be compared.
    Compare {
        /// Which file has the inode.
        generation: u32,
    },
    /// It is lost.
    Lost {
        /// Which file has the inode.
        generation: u32,
    },
}

impl Core {
    /// The map of a transparent file that is open.
    pub(super) fn open_map(&self, number: u32) -> Option<&Map> {
        self.maps.0.get(&number).map(|open| &open.map)
    }

    /// What is known of a transparent file, open or not.
    pub(super) fn map_entry(
        &mut self,
        number: u32,
        inode: &Inode,
    ) -> Result<Option<MapEntry>, Ext2Error> {
        if let Some(map) = self.open_map(number) {
            return Ok(Some(map.entry));
        }
        let Some((records, meta)) = self.ext2.records_and_meta() else { return Ok(None) };
        let entry = records.map_entry(meta, number)?;
        let longest = self.ext2.longest_file_bytes();
        let own = |e: &MapEntry| e.generation == inode.generation && e.size_bytes <= longest;
        Ok(entry.filter(own))
    }

    /// Notes a new transparent file, or a new directory of an old one.
    pub(super) fn put_transparent_parent(
        &mut self,
        number: u32,
        inode: &Inode,
        parent: u32,
    ) -> Result<(), Ext2Error> {
        let found = self.map_entry(number, inode)?;
        let Some((records, meta)) = self.ext2.records_and_meta() else { return Ok(()) };
        let epoch = records.header().epoch;
        let new = MapEntry {
            generation: inode.generation,
            parent,
            first_extent: 0,
            blocks: 0,
            size_bytes: 0,
            epoch,
        };
        let entry = found.map_or(new, |entry| MapEntry { parent, ..entry });
        records.put_map_entry(meta, number, Some(&entry))?;
        if let Some(open) = self.maps.0.get_mut(&number) {
            open.map.entry = entry;
        }
        Ok(())
    }

    /// Opens a transparent file as far as that needs no data.
    pub(super) fn look(&mut self, number: u32) -> Result<Look, Errno> {
        if let Some(open) = self.maps.0.get_mut(&number) {
            open.opens += 1;
            // Another call compares, and may find it lost: this one does not wait for it.
            let generation = open.map.entry.generation;
            return Ok(if open.compared { Look::Open } else { Look::Compare { generation } });
        }
        let inode = self.live_inode(number)?;
        let generation = inode.generation;
        let map = self.ext2.load_map(number, &inode).map_err(|error| errno(&error))?;
        let Some(map) = map else { return Ok(Look::Lost { generation }) };
        let Some((records, _)) = self.ext2.records_and_meta() else {
            return Ok(Look::Lost { generation });
        };
        for extent in &map.extents {
            records.pin(Run { start: extent.start, len: extent.len });
        }
        let compared = map.entry.epoch == records.header().epoch || map.extents.is_empty();
        self.maps.0.insert(number, OpenMap { map, opens: 1, compared });
        Ok(if compared { Look::Open } else { Look::Compare { generation } })
    }

    /// Notes of an open file that its tags are to be compared when it is opened next.
    pub(super) fn doubt(&mut self, number: u32) -> Result<(), Ext2Error> {
        let Some(open) = self.maps.0.get_mut(&number) else { return Ok(()) };
        open.map.entry.epoch = NEVER;
        open.compared = false;
        let entry = open.map.entry;
        let Some((records, meta)) = self.ext2.records_and_meta() else { return Ok(()) };
        records.put_map_entry(meta, number, Some(&entry))
    }

    /// Ends an open of a transparent file.
    pub(super) fn close_transparent(&mut self, number: u32) {
        let Some(open) = self.maps.0.get_mut(&number) else { return };
        open.opens -= 1;
        if open.opens > 0 {
            return;
        }
        let open = self.maps.0.remove(&number).expect("it is there");
        if let Some((records, _)) = self.ext2.records_and_meta() {
            for extent in &open.map.extents {
                records.unpin(Run { start: extent.start, len: extent.len });
            }
        }
    }

    /// Takes away the name of a file that is lost; it then ends as any without a name, here and
    /// now if it is not held. The name is found by looking through the directory. (To other
    /// software it is an empty file, which may have been given more names: each goes when it is
    /// opened by, and the file with the last.)
    fn lose(
        &mut self,
        number: u32,
        generation: u32,
        now: FileTime,
    ) -> Result<Option<Ending>, Ext2Error> {
        let mut inode = self.ext2.inode(number)?;
        // Another call may have been here first, and the number be another file's by now.
        if inode.links == 0 || inode.generation != generation || !inode.is_transparent_file() {
            return Ok(None);
        }
        let entry = {
            let Some((records, meta)) = self.ext2.records_and_meta() else { return Ok(None) };
            records.map_entry(meta, number)?
        };
        // The record may be damaged: then the directory in which it was found last has it. A
        // file whose name cannot be found stays; a name without a file would be damage.
        let parents = [entry.map(|entry| entry.parent), self.held.parent_of(number)];
        let names = inode.links;
        for parent in parents.into_iter().flatten() {
            if inode.links > 0 && self.remove_name_of(number, parent, now)? {
                inode.links -= 1;
            }
        }
        if inode.links == names {
            return Ok(None);
        }
        inode.ctime = now;
        if inode.links > 0 {
            self.ext2.put_inode(number, &inode)?;
            return Ok(None);
        }
        self.add_orphan(number, &mut inode)?;
        self.ext2.put_inode(number, &inode)?;
        Ok((!self.held.is_held(number)).then(|| Ending::of(number, &inode)))
    }

    /// Whether a directory had the name of a file, which it has no longer.
    fn remove_name_of(
        &mut self,
        number: u32,
        parent: u32,
        now: FileTime,
    ) -> Result<bool, Ext2Error> {
        let Ok(mut directory) = self.ext2.inode(parent) else { return Ok(false) };
        if directory.kind() != Ok(FileKind::Directory) || directory.links == 0 {
            return Ok(false);
        }
        let mut from = 0;
        loop {
            let listed = self.ext2.list_entries(parent, &directory, from, 256)?;
            let Some(last) = listed.last() else { return Ok(false) };
            from = last.next;
            if let Some(entry) = listed.into_iter().find(|entry| entry.inode == number) {
                let found = self.ext2.find_entry(parent, &directory, &entry.name)?;
                if let Some(found) = found.filter(|found| found.inode == number) {
                    self.ext2.remove_entry(parent, &mut directory, &entry.name, found.at)?;
                    directory.mtime = now;
                    directory.ctime = now;
                    self.ext2.put_inode(parent, &directory)?;
                    return Ok(true);
                }
                return Ok(false);
            }
        }
    }
}

impl Shared {
    /// Makes a directory's new files transparent, or an empty file; or ordinary again.
    pub(super) fn set_transparent(
        &self,
        caller: Caller,
        number: u32,
        on: bool,
    ) -> Result<(), Errno> {
        let _handle = self.join_transaction(STEP_BLOCKS)?;
        let mut core = self.core();
        let mut inode = core.live_inode(number)?;
        check_owner(caller, &inode)?;
        check_changeable(&inode)?;
        let directory = match inode.kind() {
            Ok(FileKind::Directory) => true,
            Ok(FileKind::Regular) => false,
            _ => return Err(Errno::EOPNOTSUPP),
        };
        if (inode.flags & TRANSPARENT != 0) == on {
            return Ok(());
        }
        // A file's contents cannot be moved while it may be open, and it must have one name.
        let size = match core.map_entry(number, &inode).map_err(|error| errno(&error))? {
            Some(entry) if !on => entry.size_bytes,
            _ => inode.size_bytes,
        };
        if !directory && (size > 0 || inode.links > 1 || inode.pointers != [0; POINTERS]) {
            return Err(Errno::EOPNOTSUPP);
        }
        if core.open_map(number).is_some() || (!directory && core.held.is_open(number)) {
            return Err(Errno::EBUSY);
        }
        inode.flags = inode.flags & !TRANSPARENT | if on { TRANSPARENT } else { 0 };
        inode.ctime = self.now();
        let mut work = || {
            core.ext2.put_inode(number, &inode)?;
            if !directory {
                if on {
                    // A caller that names it has found it by its one name.
                    let parent = core.held.parent_of(number).unwrap_or(0);
                    core.put_transparent_parent(number, &inode, parent)?;
                } else if let Some((records, meta)) = core.ext2.records_and_meta() {
                    records.put_map_entry(meta, number, None)?;
                }
            }
            core.ext2.note_transparent(number, directory, on)
        };
        work().map_err(|error| self.broken(&error))
    }

    /// Opens a transparent file: `ENOENT` if it is lost, and then it is gone.
    pub(super) fn open_transparent(&self, number: u32) -> Result<(), Errno> {
        let look = self.core().look(number)?;
        match look {
            Look::Open => Ok(()),
            Look::Compare { generation } => match self.all_tags_match(number) {
                Ok(true) => self.note_compared(number),
                Ok(false) => {
                    self.core().close_transparent(number);
                    self.lose(number, generation)
                }
                Err(errno) => {
                    self.core().close_transparent(number);
                    Err(errno)
                }
            },
            Look::Lost { generation } => self.lose(number, generation),
        }
    }

    /// Other software moved a file to another directory.
    pub(super) fn note_parent(&self, number: u32, parent: u32) -> Result<(), Errno> {
        let _handle = self.join_transaction(1)?;
        let mut core = self.core();
        let inode = core.live_inode(number)?;
        let put = core.put_transparent_parent(number, &inode, parent);
        put.map_err(|error| self.broken(&error))
    }

    fn note_compared(&self, number: u32) -> Result<(), Errno> {
        if let Some(open) = self.core().maps.0.get_mut(&number) {
            open.compared = true;
        }
        // The cleaner finds files by their numbers: what is noted of a file that was not looked up
        // would say that its directory is known as well.
        if self.read_only || !self.core().held.is_held(number) {
            return Ok(());
        }
        let _handle = self.join_transaction(2)?;
        let mut core = self.core();
        let epoch = core.ext2.records().map_or(0, |records| records.header().epoch);
        let Some(open) = core.maps.0.get_mut(&number) else { return Ok(()) };
        open.map.entry.epoch = epoch;
        let entry = open.map.entry;
        let Some((records, meta)) = core.ext2.records_and_meta() else { return Ok(()) };
        let put = records.put_map_entry(meta, number, Some(&entry));
        put.map_err(|error| self.broken(&error))
    }

    /// A read has found bytes that are not the file's: the next open of it fails and says that it
    /// is gone. Nothing is lost if this cannot be noted.
    pub(super) fn note_doubt(&self, number: u32) {
        let Ok(_handle) = self.join_transaction(1) else { return };
        let doubted = self.core().doubt(number);
        if let Err(error) = doubted {
            self.broken(&error);
        }
    }

    /// Takes away the name of a file, and the file if it is not held: `ENOENT` says so.
    pub(super) fn lose(&self, number: u32, generation: u32) -> Result<(), Errno> {
        if !self.read_only {
            let ending = {
                let _handle = self.join_transaction(STEP_BLOCKS)?;
                let now = self.now();
                let lost = self.core().lose(number, generation, now);
                lost.map_err(|error| self.broken(&error))?
            };
            ending.map_or(Ok(()), |ending| self.end_inode(ending))?;
        }
        Err(Errno::ENOENT)
    }

    /// Compares all blocks of an open file with their tags.
    fn all_tags_match(&self, number: u32) -> Result<bool, Errno> {
        let extents = self.core().open_map(number).map_or_else(Vec::new, |m| m.extents.clone());
        for extent in extents {
            let mut done = 0;
            while done < extent.len {
                let len = BLOCKS_A_STEP.min(extent.len - done);
                let part =
                    Extent { logical: extent.logical + done, start: extent.start + done, len };
                match self.read_tagged(number, part) {
                    Ok(_) => {}
                    Err(Errno::EIO) => return Ok(false),
                    Err(errno) => return Err(errno),
                }
                done += len;
            }
        }
        Ok(true)
    }
}
