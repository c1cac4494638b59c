//! The files of the past that the kernel knows, as plain data.
//!
//! Invariants: a number means one file of one time for as long as it is here, and comes from the two, so
//! that it is the same whenever it comes back; a file is here while the kernel holds its number or has it
//! open.

use std::collections::BTreeMap;
use std::sync::Arc;

use atoll_key::BlockHash;
use atoll_vfs::{Errno, FileKind, PersistentHandle};
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
pub(super) enum Place {
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
    lookups: u64,
    opens: u64,
    /// What it was; of the inodes alone.
    pub(super) found: Option<Arc<PastInode>>,
}

/// A name of an open directory.
#[derive(Clone)]
pub(super) struct Listed {
    pub(super) name: Bytes,
    pub(super) kind: FileKind,
    pub(super) place: Place,
}

/// What a handle is of.
pub(super) enum Opening {
    File {
        content: Arc<Content>,
        /// Keeps contents readable that lie in the inode.
        pin: Option<Arc<Pin>>,
    },
    Directory(Arc<Vec<Listed>>),
}

/// See the module.
#[derive(Default)]
pub(super) struct Nodes {
    nodes: BTreeMap<u64, Node>,
    by_place: BTreeMap<Place, u64>,
    opens: BTreeMap<u64, (u64, Opening)>,
    last_handle: u64,
}

impl Nodes {
    pub(super) fn node(&self, number: u64) -> Result<&Node, Errno> {
        self.nodes.get(&number).ok_or(Errno::ESTALE)
    }

    /// The root of a file system of its own: it is here for ever.
    pub(super) fn insert_root(&mut self, place: Place, found: PastInode) {
        let found = Some(Arc::new(found));
        self.nodes.insert(ROOT, Node { place, parent: None, lookups: 1, opens: 0, found });
        self.by_place.insert(place, ROOT);
    }

    /// The time of a file system of its own.
    pub(super) fn own_time_ms(&self) -> Option<u64> {
        match self.nodes.get(&ROOT)?.place {
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
        let mut number = PAST | u64::from_be_bytes(*hash.first_chunk().expect("32 bytes"));
        while self.nodes.contains_key(&number) {
            number = PAST | number.wrapping_add(1);
        }
        number
    }

    /// Counts a lookup of a place that is here.
    pub(super) fn held_again(&mut self, place: &Place) -> Option<u64> {
        let number = *self.by_place.get(place)?;
        self.nodes.get_mut(&number)?.lookups += 1;
        Some(number)
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
        self.nodes.insert(number, Node { place, parent, lookups: 1, opens: 0, found });
        self.by_place.insert(place, number);
        number
    }

    /// Takes back lookups.
    pub(super) fn forget(&mut self, number: u64, count: u64) {
        if let Some(node) = self.nodes.get_mut(&number) {
            node.lookups = node.lookups.saturating_sub(count);
            self.reap(number);
        }
    }

    fn reap(&mut self, number: u64) {
        let is_unused = |node: &Node| node.lookups == 0 && node.opens == 0;
        if number != ROOT && self.nodes.get(&number).is_some_and(is_unused) {
            let node = self.nodes.remove(&number).expect("it was there");
            self.by_place.remove(&node.place);
        }
    }

    pub(super) fn open(&mut self, number: u64, opening: Opening) -> Result<u64, Errno> {
        self.nodes.get_mut(&number).ok_or(Errno::ESTALE)?.opens += 1;
        self.last_handle += 1;
        let handle = PAST | self.last_handle;
        self.opens.insert(handle, (number, opening));
        Ok(handle)
    }

    pub(super) fn opened(&self, number: u64, handle: u64) -> Result<&Opening, Errno> {
        let opened = self.opens.get(&handle).filter(|(of, _)| *of == number);
        opened.map(|(_, opening)| opening).ok_or(Errno::EBADF)
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
        self.opened(number, handle)?;
        self.opens.remove(&handle);
        if let Some(node) = self.nodes.get_mut(&number) {
            node.opens -= 1;
        }
        self.reap(number);
        Ok(())
    }
}
