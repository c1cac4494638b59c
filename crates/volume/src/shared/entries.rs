//! The entries of a directory, in order, as *leaves* of some ten to some hundred entries each.
//!
//! The entries of a large directory lie in content blocks of their own ("each directory inode points to
//! a set of CHBs containing the directory entries", Pastis §3): one for each leaf. A change makes one leaf
//! anew, or two, and the others are shared with the version before: in memory as on the ring.
//!
//! A change writes a leaf and the inode, whose list of leaves is the longer the smaller they are. Both together
//! are smallest where leaf and list have about the same length, so leaves grow with their number
//! ([`max_leaf_bytes`]).
//!
//! | bytes | field |
//! |---|---|
//! | 4 | magic `ATSL` |
//! | 1 | layout, 1 |
//! | 2 | number of entries, at least 1 |
//! | … | [entries](super::inode), ascending |
//!
//! Invariants: no leaf is empty, entries ascend within leaves and from leaf to leaf.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock};

use atoll_dht::{Blocks, GetError, Wanted};
use atoll_key::BlockHash;
use atoll_key::kinds::certified::CertifiedBlock;
use atoll_vfs::FileKind;
use bytes::Bytes;

use super::inode::{Contents, Entry, Inode, put_entry, take_entry};
use super::sealing::Sealing;
use super::standing::{Standing, Trusted};
use crate::format::cursor::{Cursor, put_header};
use crate::format::{FormatError, shown};

const MAGIC: &[u8; 4] = b"ATSL";
const NAME: &str = "leaf of a directory";
/// What [`max_leaf_bytes`] is at least and at most. The latter lets one inode refer to some hundred thousand names.
const MAX_LEAF_BYTES: std::ops::RangeInclusive<usize> = 4 << 10..=32 << 10;
/// A leaf's share of the list in the inode: a hash.
const REFERENCE_BYTES: usize = 32;

/// A leaf with more bytes of entries is divided, in a directory of so many leaves. On average leaves are about
/// three quarters full, and so about as long as one and a half lists of them.
fn max_leaf_bytes(leaves: usize) -> usize {
    (2 * REFERENCE_BYTES * leaves).clamp(*MAX_LEAF_BYTES.start(), *MAX_LEAF_BYTES.end())
}

/// As many bytes as each leaf of a directory has that is made at once: half of what it may have, so that names
/// can be added.
fn first_leaf_bytes(entries_bytes: usize) -> usize {
    // n leaves of 32 n bytes each.
    let half = (REFERENCE_BYTES * entries_bytes).isqrt();
    half.clamp(MAX_LEAF_BYTES.start() / 2, MAX_LEAF_BYTES.end() / 2)
}

/// Leaves that were read or written, by their hash.
pub type Leaves = BTreeMap<BlockHash, Arc<Leaf>>;

/// Some entries of a directory, at least one, ascending.
#[derive(Clone, Debug)]
pub struct Leaf {
    entries: Vec<Entry>,
    /// How many bytes they have when encoded.
    bytes: usize,
    subdirectories: usize,
    /// The hash by which inodes refer to it: that of the sealed block, in an encrypted volume.
    name: OnceLock<BlockHash>,
}

impl Leaf {
    fn of(entries: Vec<Entry>) -> Leaf {
        let bytes = entries.iter().map(Entry::encoded_bytes).sum();
        let subdirectories = entries.iter().filter(|entry| is_directory(entry)).count();
        Leaf { entries, bytes, subdirectories, name: OnceLock::new() }
    }

    /// Reads a leaf.
    ///
    /// # Errors
    /// If it is not one.
    pub fn decode(block: &Bytes) -> Result<Leaf, FormatError> {
        let mut cursor = Cursor::header(block, MAGIC, NAME)?;
        let count = usize::from(cursor.u16()?);
        let mut entries: Vec<Entry> = Vec::new();
        for _ in 0..count {
            let entry = take_entry(&mut cursor)?;
            if entries.last().is_some_and(|last| *last >= entry) {
                return Err(FormatError::Unsorted { name: shown(&entry.name) });
            }
            entries.push(entry);
        }
        cursor.end()?;
        if entries.is_empty() {
            return Err(FormatError::BadReference("a leaf of a directory is empty"));
        }
        Ok(Leaf::of(entries))
    }

    /// Reads a leaf that the ring has under this hash.
    ///
    /// # Errors
    /// If it is not one.
    pub(super) fn named(hash: BlockHash, block: &Bytes) -> Result<Arc<Leaf>, FormatError> {
        let leaf = Leaf::decode(block)?;
        leaf.name(hash);
        Ok(Arc::new(leaf))
    }

    /// Its block.
    pub fn encode(&self) -> Vec<u8> {
        let mut block = Vec::with_capacity(7 + self.bytes);
        put_header(&mut block, MAGIC);
        let count = u16::try_from(self.entries.len()).expect("an entry has 67 bytes or more");
        block.extend_from_slice(&count.to_be_bytes());
        self.entries.iter().for_each(|entry| put_entry(&mut block, entry));
        block
    }

    /// Whether inodes refer to it already.
    pub(super) fn is_named(&self) -> bool {
        self.name.get().is_some()
    }

    /// Inodes refer to it by this hash.
    pub(super) fn name(&self, hash: BlockHash) {
        self.name.get_or_init(|| hash);
    }

    /// The hash by which inodes refer to it, else that of its block in the clear.
    pub(super) fn hash(&self) -> BlockHash {
        self.name.get().copied().unwrap_or_else(|| BlockHash::of(&self.encode()))
    }

    pub(super) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    fn first(&self) -> &Entry {
        &self.entries[0]
    }

    fn last(&self) -> &Entry {
        self.entries.last().expect("a leaf has entries")
    }
}

fn is_directory(entry: &Entry) -> bool {
    entry.file_kind() == FileKind::Directory
}

/// See the module. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Entries {
    leaves: Vec<Arc<Leaf>>,
}

impl PartialEq for Entries {
    fn eq(&self, other: &Entries) -> bool {
        self.iter().eq(other.iter())
    }
}

impl Eq for Entries {}

impl FromIterator<Entry> for Entries {
    /// In any order.
    fn from_iter<I: IntoIterator<Item = Entry>>(entries: I) -> Entries {
        let sorted: BTreeSet<Entry> = entries.into_iter().collect();
        let (mut leaves, mut leaf, mut bytes) = (Vec::new(), Vec::new(), 0);
        let most = first_leaf_bytes(sorted.iter().map(Entry::encoded_bytes).sum());
        for entry in sorted {
            let more = entry.encoded_bytes();
            if bytes + more > most {
                leaves.push(Arc::new(Leaf::of(std::mem::take(&mut leaf))));
                bytes = 0;
            }
            bytes += more;
            leaf.push(entry);
        }
        if !leaf.is_empty() {
            leaves.push(Arc::new(Leaf::of(leaf)));
        }
        Entries { leaves }
    }
}

impl Entries {
    /// Those that lie in these leaves, of which there are `count`.
    ///
    /// # Errors
    /// If they do not ascend, or there are more or fewer, or a leaf was not read.
    pub(super) fn in_leaves(
        hashes: &[BlockHash],
        count: usize,
        read: &Leaves,
    ) -> Result<Entries, FormatError> {
        let mut leaves: Vec<Arc<Leaf>> = Vec::new();
        for hash in hashes {
            let leaf = read.get(hash);
            let leaf = leaf.ok_or(FormatError::BadReference("a directory's leaf was not read"))?;
            if leaves.last().is_some_and(|before| before.last() >= leaf.first()) {
                return Err(FormatError::Unsorted { name: shown(&leaf.first().name) });
            }
            leaves.push(leaf.clone());
        }
        let entries = Entries { leaves };
        if entries.len() != count {
            let (stated, found) = (count as u64, entries.len() as u64);
            return Err(FormatError::Mismatch { what: "entries of a directory", stated, found });
        }
        Ok(entries)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.leaves.iter().map(|leaf| leaf.entries.len()).sum()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.leaves.is_empty()
    }

    /// How many name directories.
    pub(super) fn subdirectories(&self) -> usize {
        self.leaves.iter().map(|leaf| leaf.subdirectories).sum()
    }

    /// Of directories that several entries name, all entries but the one that leads, as siblings do: the highest, of two
    /// equal ones that added later, then that of the greater writer.
    pub(super) fn surplus_names(&self) -> Vec<Entry> {
        if self.subdirectories() < 2 {
            return Vec::new();
        }
        let leaves = self.leaves.iter().filter(|leaf| leaf.subdirectories > 0);
        let entries = leaves.flat_map(|leaf| &leaf.entries);
        let mut named: Vec<&Entry> = entries.filter(|entry| is_directory(entry)).collect();
        named.sort_unstable_by_key(|entry| {
            let Entry { added, time_ms, name, inode, .. } = *entry;
            (*inode, Reverse((added.height, *time_ms, added.writer)), name)
        });
        let next = named.windows(2).filter(|two| two[0].inode == two[1].inode);
        next.map(|two| two[1].clone()).collect()
    }

    /// How many bytes they have when encoded.
    pub(super) fn encoded_bytes(&self) -> usize {
        self.leaves.iter().map(|leaf| leaf.bytes).sum()
    }

    pub(super) fn leaves(&self) -> &[Arc<Leaf>] {
        &self.leaves
    }

    /// Leaves with names under which nothing is on the ring, nor on its way there, are as if they were new. A version that
    /// shares them was about to refer to them, and did not.
    pub(super) fn forget_names(&mut self, is_there: impl Fn(&BlockHash) -> bool) {
        for leaf in &mut self.leaves {
            if leaf.is_named() && !is_there(&leaf.hash()) {
                *leaf = Arc::new(Leaf::of(leaf.entries.clone()));
            }
        }
    }

    /// All, ascending.
    pub fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.leaves.iter().flat_map(|leaf| &leaf.entries)
    }

    /// Those of one name, the plain name that was given.
    pub(super) fn of_name(&self, name: &[u8]) -> impl Iterator<Item = &Entry> {
        self.starting_at(name).take_while(move |entry| entry.name == name)
    }

    /// Those from a name on.
    pub(super) fn starting_at(&self, name: &[u8]) -> impl Iterator<Item = &Entry> {
        let first = self.leaves.partition_point(|leaf| &leaf.last().name[..] < name);
        let below = self
            .leaves
            .get(first)
            .map_or(0, |leaf| leaf.entries.partition_point(|entry| &entry.name[..] < name));
        let leaves = self.leaves[first..].iter().flat_map(|leaf| &leaf.entries);
        leaves.skip(below)
    }

    /// Whether one of `before` is not here.
    pub(super) fn lacks_one_of(&self, before: &Entries) -> bool {
        // Versions share the leaves that are the same.
        let shared: BTreeSet<*const Leaf> = self.leaves.iter().map(Arc::as_ptr).collect();
        let others = before.leaves.iter().filter(|leaf| !shared.contains(&Arc::as_ptr(leaf)));
        others.flat_map(|leaf| &leaf.entries).any(|entry| !self.contains(entry))
    }

    fn contains(&self, entry: &Entry) -> bool {
        let at = self.leaves.partition_point(|leaf| leaf.last() < entry);
        self.leaves.get(at).is_some_and(|leaf| leaf.entries.binary_search(entry).is_ok())
    }

    /// Adds an entry, if it is not there.
    pub fn insert(&mut self, entry: Entry) {
        let at = self.leaves.partition_point(|leaf| *leaf.last() < entry);
        let at = at.min(self.leaves.len().saturating_sub(1));
        let Some(leaf) = self.leaves.get(at) else {
            self.leaves.push(Arc::new(Leaf::of(vec![entry])));
            return;
        };
        let Err(place) = leaf.entries.binary_search(&entry) else { return };
        let mut entries = leaf.entries.clone();
        entries.insert(place, entry);
        let mut left = Leaf::of(entries);
        if left.bytes <= max_leaf_bytes(self.leaves.len()) {
            self.leaves[at] = Arc::new(left);
            return;
        }
        // Names that come in order leave full leaves behind.
        let is_last = at + 1 == self.leaves.len() && place + 1 == left.entries.len();
        let half = if is_last { place } else { left.entries.len() / 2 };
        let right = Leaf::of(left.entries.split_off(half));
        self.leaves[at] = Arc::new(Leaf::of(left.entries));
        self.leaves.insert(at + 1, Arc::new(right));
    }

    /// Takes an entry away; whether it was there.
    pub fn remove(&mut self, entry: &Entry) -> bool {
        let at = self.leaves.partition_point(|leaf| leaf.last() < entry);
        let Some(leaf) = self.leaves.get(at) else { return false };
        let Ok(place) = leaf.entries.binary_search(entry) else { return false };
        let mut entries = leaf.entries.clone();
        entries.remove(place);
        if entries.is_empty() {
            self.leaves.remove(at);
            return true;
        }
        let mut leaf = Leaf::of(entries);
        if let Some(next) = self.leaves.get(at + 1)
            // The two are far from full together, so that the next names do not divide them again.
            && leaf.bytes + next.bytes <= max_leaf_bytes(self.leaves.len()) / 4
        {
            leaf.entries.extend(next.entries.iter().cloned());
            leaf = Leaf::of(leaf.entries);
            self.leaves.remove(at + 1);
        }
        self.leaves[at] = Arc::new(leaf);
        true
    }
}

/// Reads the leaves that the siblings of a block refer to, from the ring. Those that only [late](super::standing) siblings
/// refer to may be nowhere: a member who was shut out can name any.
///
/// # Errors
/// If another one cannot be fetched, or is no leaf.
pub(super) async fn fetch(
    blocks: &Arc<dyn Blocks>,
    block: &CertifiedBlock,
    sealing: &Sealing,
) -> Result<Leaves, GetError> {
    let mut leaves = Leaves::new();
    let LeavesOf { needed, of_late } = leaves_of(block, sealing);
    for hash in needed.iter().chain(&of_late).copied() {
        let held = match blocks.get_block(hash.inode_content_id(), Wanted::Newest).await {
            Err(GetError::NotFound { .. }) if of_late.contains(&hash) => continue,
            held => held?,
        };
        let bad =
            |error: FormatError| GetError::Unavailable { key: hash.key(), told: error.to_string() };
        let leaf = sealing.open_block(&held.bytes).and_then(|block| Leaf::named(hash, &block));
        match leaf {
            Err(_) if of_late.contains(&hash) => {}
            leaf => drop(leaves.insert(hash, leaf.map_err(bad)?)),
        }
    }
    Ok(leaves)
}

/// The leaves that the siblings of a block refer to.
#[derive(Default)]
pub(super) struct LeavesOf {
    pub(super) needed: BTreeSet<BlockHash>,
    /// Those that only late siblings refer to.
    pub(super) of_late: BTreeSet<BlockHash>,
}

pub(super) fn leaves_of(block: &CertifiedBlock, sealing: &Sealing) -> LeavesOf {
    let nobody = Trusted::new();
    let standing = Standing::of(block, &nobody);
    let mut found = LeavesOf::default();
    for sibling in block.siblings() {
        let Ok(Inode { contents: Contents::Unread { leaves, .. }, .. }) =
            sealing.inode(&sibling.payload)
        else {
            continue;
        };
        match standing.is_late(sibling) {
            true => found.of_late.extend(leaves),
            false => found.needed.extend(leaves),
        }
    }
    found.of_late.retain(|hash| !found.needed.contains(hash));
    found
}

#[cfg(test)]
mod tests {
    use atoll_key::kinds::certified::{Dot, WriterId};

    use super::super::inode::InodeKey;
    use super::*;

    fn new_leaves<'a>(after: &'a Entries, before: &'a Entries) -> impl Iterator<Item = &'a Leaf> {
        let is_new =
            |leaf: &&Arc<Leaf>| !before.leaves.iter().any(|other| Arc::ptr_eq(leaf, other));
        after.leaves.iter().filter(is_new).map(|leaf| &**leaf)
    }

    /// An empty file cost 27 kB on each node that has its directory, nearly all of it a leaf of 16 to 32 KiB which each
    /// new name replaced: 169 MB for 6,232 names, until released blocks are dropped.
    #[test]
    fn a_new_name_of_a_large_directory_writes_some_kilobytes() {
        const NAMES: u64 = 6232;
        let mut entries = Entries::default();
        let (mut leaf_bytes, mut list_bytes) = (0, 0);
        for number in 0..NAMES {
            // In no order, as the names of most directories.
            let name = Bytes::from(format!("{:08}", number * 7919 % 1_000_003));
            let added = Dot { writer: WriterId::from_bytes([1; 16]), height: number + 1 };
            let before = entries.clone();
            let names = (InodeKey([1; 32]), FileKind::Regular);
            entries.insert(Entry::new(name, names, added, 1_750_000_000_000));
            leaf_bytes += new_leaves(&entries, &before).map(|leaf| 7 + leaf.bytes).sum::<usize>();
            list_bytes += REFERENCE_BYTES * entries.leaves.len();
        }
        let each = |bytes: usize| bytes / NAMES as usize;
        println!("a name: {} bytes of leaves, {} of lists", each(leaf_bytes), each(list_bytes));
        assert!(each(leaf_bytes) < 5 << 10, "{} bytes of leaves", each(leaf_bytes));
        assert!(each(leaf_bytes + list_bytes) < 8 << 10, "{} bytes of lists", each(list_bytes));
    }
}
