//! The files of the past that the kernel knows, as plain data.
//!
//! Invariants: a number means one file of one time for as long as it is here, and comes from the two, so
//! that it is the same whenever it comes back; a file is here while the kernel holds its number or has it
//! open.

use std::collections::BTreeMap;
use std::sync::Arc;

use atoll_key::BlockHash;
use atoll_vfs::{Errno, FileKind, InodeTable, PersistentHandle, TableInode};
use bytes::Bytes;

use crate::blocks::content::Content;
use crate::shared::inline_blocks::Pin;
use crate::shared::inode::InodeKey;
use crate::shared::inodes::PastInode;
use crate::shared::table::ROOT;

/// Set in the numbers of inodes and handles.
pub(super) const PAST: u64 = 1 << 63;

/// What a file of the past is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Place {
    /// `.atoll`.
    Top,
    /// The directory of all states.
    History,
    /// An inode as it was just before a time.
    Inode { time_ms: u64, key: InodeKey },
}

impl Place {
    /// The bytes of its handle, from which its number comes.
    ///
    /// | bytes | |
    /// |---|---|
    /// | 1 | 0: [`Place::Top`], 1: [`Place::History`] |
    /// | 8 + 32 | [`Place::Inode`]: the time in milliseconds, big-endian, and the inode's key |
    fn bytes(&self) -> Bytes {
        match self {
            Place::Top => Bytes::from_static(&[0]),
            Place::History => Bytes::from_static(&[1]),
            Place::Inode { time_ms, key } => {
                Bytes::from([&time_ms.to_be_bytes()[..], &key.0].concat())
            }
        }
    }

    pub(super) fn handle(&self) -> Result<PersistentHandle, Errno> {
        PersistentHandle::new(self.bytes())
    }

    pub(super) fn of_handle(handle: &PersistentHandle) -> Result<Place, Errno> {
        match handle.as_bytes() {
            [0] => Ok(Place::Top),
            [1] => Ok(Place::History),
            bytes => {
                let (time_ms, key) = bytes.split_first_chunk().ok_or(Errno::ESTALE)?;
                let key = key.try_into().map(InodeKey).map_err(|_| Errno::ESTALE)?;
                Ok(Place::Inode { time_ms: u64::from_be_bytes(*time_ms), key })
            }
        }
    }
}

pub(super) struct Node {
    pub(super) place: Place,
    /// The directory in which it was looked up; `None` if it was found by its handle.
    pub(super) parent: Option<Place>,
    /// What it was; of the inodes alone.
    pub(super) found: Option<Arc<PastInode>>,
}

impl TableInode for Node {}

/// A name of an open directory, with what it stands for.
pub(super) type Name = (Bytes, FileKind, Place);

/// What a handle is of.
pub(super) enum Opening {
    File {
        content: Arc<Content>,
        /// Keeps contents readable that lie in the inode.
        pin: Option<Arc<Pin>>,
    },
    Directory(Arc<Vec<Name>>),
}

/// See the module.
pub(super) struct Nodes {
    table: InodeTable<Node, Opening>,
    by_place: BTreeMap<Place, u64>,
}

impl Default for Nodes {
    fn default() -> Nodes {
        Nodes { table: InodeTable::without_root(PAST | 1), by_place: BTreeMap::new() }
    }
}

impl Nodes {
    pub(super) fn node(&self, number: u64) -> Result<&Node, Errno> {
        self.table.get(number)
    }

    /// The root of a file system of its own: it is here for ever.
    pub(super) fn insert_root(&mut self, place: Place, found: PastInode) {
        let found = Some(Arc::new(found));
        self.table.insert(ROOT, None, Node { place, parent: None, found });
        self.by_place.insert(place, ROOT);
    }

    /// The time of a file system of its own.
    pub(super) fn own_time_ms(&self) -> Option<u64> {
        match self.table.get(ROOT).ok()?.place {
            Place::Inode { time_ms, .. } => Some(time_ms),
            Place::Top | Place::History => None,
        }
    }

    /// The number that a place has, or would have: derived from it, unless another place has that.
    pub(super) fn number_of(&self, place: &Place) -> u64 {
        if let Some(number) = self.by_place.get(place) {
            return *number;
        }
        let hash = BlockHash::of(&place.bytes()).0;
        let first = u64::from_be_bytes(*hash.first_chunk().expect("32 bytes"));
        self.table.free_number(PAST | first, PAST..=u64::MAX, |_| false)
    }

    /// Counts a lookup of a place that is here.
    pub(super) fn held_again(&mut self, place: &Place) -> Option<u64> {
        let number = *self.by_place.get(place)?;
        self.table.look_up(number).then_some(number)
    }

    /// Brings a place here, unless it is, and counts a lookup of it.
    pub(super) fn hold(
        &mut self,
        parent: Option<Place>,
        place: Place,
        found: Option<PastInode>,
    ) -> u64 {
        if let Some(number) = self.held_again(&place) {
            return number;
        }
        let number = self.number_of(&place);
        let found = found.map(Arc::new);
        self.table.insert_looked_up(number, None, Node { place, parent, found });
        self.by_place.insert(place, number);
        number
    }

    /// Takes back lookups.
    pub(super) fn forget(&mut self, number: u64, count: u64) {
        let by_place = &mut self.by_place;
        self.table.forget(number, count, |_, node| leave(by_place, &node));
    }

    pub(super) fn open(&mut self, number: u64, opening: Opening) -> Result<u64, Errno> {
        self.table.open(number, opening)
    }

    pub(super) fn opened(&self, number: u64, handle: u64) -> Result<&Opening, Errno> {
        self.table.opened(number, handle)
    }

    /// The contents of an open file.
    pub(super) fn opened_file(
        &self,
        number: u64,
        handle: u64,
    ) -> Result<(Arc<Content>, Option<Arc<Pin>>), Errno> {
        match self.opened(number, handle)? {
            Opening::File { content, pin } => Ok((content.clone(), pin.clone())),
            Opening::Directory(_) => Err(Errno::EISDIR),
        }
    }

    pub(super) fn close(&mut self, number: u64, handle: u64) -> Result<(), Errno> {
        let by_place = &mut self.by_place;
        self.table.close(number, handle, |_, node| leave(by_place, &node)).map(drop)
    }
}

fn leave(by_place: &mut BTreeMap<Place, u64>, node: &Node) {
    by_place.remove(&node.place);
}
