//! The files of a spool: a block each, as the ring is to have it.
//!
//! | file | what it holds |
//! |---|---|
//! | `HASH-LEN.block` | a content block: its hash, 64 hexadecimal digits, and its length |
//! | `NUMBER-KEY-LEN.inode` | a certified block of one sibling: a number of 20 digits that grows with each such file, the first half of the block's key (64 hexadecimal digits), the length |
//!
//! A block says itself whether it is whole, by its hash or its signatures, and a file appears as a whole or not
//! at all ([`SpoolDirectory::replace`]). So there is no log and nothing to recover: what a crash has left is what
//! was kept.
//!
//! Of each inode, a version is removed when a later one is kept that covers it. What cannot be read is set aside.
//!
//! It does not know the ring, nor what blocks mean.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use atoll_key::kinds::certified::{CertifiedBlock, Dot, Sibling};
use atoll_key::{BlockHash, MAX_BLOCK_BYTES, UserId, VolumeId};
use bytes::Bytes;
use futures_util::future::join_all;

use crate::counted::counted;
use crate::shared::inode::InodeKey;
use crate::spool_directory::SpoolDirectory;

/// How the names of files with versions of inodes end.
pub const SPOOL_INODE: &str = ".inode";
/// How the names of files with content blocks end.
pub const SPOOL_BLOCK: &str = ".block";

/// No mount keeps as many versions.
const MAX_NUMBER: u64 = 1 << 62;

/// How often a version is read whose file goes meanwhile, since a later one is kept.
const MAX_READS: usize = 16;

/// Why something was not kept.
#[derive(Debug)]
pub(super) enum KeepError {
    /// The spool has as many bytes as it may have.
    NoRoom { max_bytes: u64 },
    /// The disk has failed.
    Io(io::Error),
}

/// A version of an inode that is kept.
#[derive(Clone, Debug)]
struct Kept {
    number: u64,
    len: u64,
    dot: Dot,
    binding_version: u32,
    is_removal: bool,
}

impl Kept {
    fn name(&self, key: &InodeKey) -> String {
        let (number, len) = (self.number, self.len);
        format!("{number:020}-{}-{len}{SPOOL_INODE}", BlockHash(key.0).to_hex())
    }

    fn is_covered_by(&self, sibling: &Sibling) -> bool {
        let is_older = sibling.dot.height > self.dot.height
            && sibling.binding_version >= self.binding_version
            && sibling.context.includes(&self.dot);
        sibling.dot == self.dot || is_older
    }
}

struct Content {
    len: u64,
    /// The ring has it; it is kept for inodes that the ring does not have.
    is_sent: bool,
}

impl Content {
    fn name(&self, hash: &BlockHash) -> String {
        format!("{}-{}{SPOOL_BLOCK}", hash.to_hex(), self.len)
    }
}

#[derive(Default)]
struct Index {
    /// Of each inode a version of each writer that no other covers, the last one last.
    versions: BTreeMap<InodeKey, Vec<Kept>>,
    contents: BTreeMap<BlockHash, Content>,
    last_number: u64,
    bytes: u64,
    /// Files that were set aside.
    damaged: usize,
}

/// See the module.
pub(super) struct Disk {
    directory: Arc<dyn SpoolDirectory>,
    max_bytes: u64,
    index: Mutex<Index>,
}

impl Disk {
    /// What a directory has of a volume, kept by mounts of a user.
    pub(super) async fn open(
        directory: Arc<dyn SpoolDirectory>,
        (volume, user): (VolumeId, UserId),
        max_bytes: u64,
    ) -> io::Result<Disk> {
        let disk = Disk { directory, max_bytes, index: Mutex::default() };
        let mut foreign = Vec::new();
        let mut names = disk.directory.list().await?;
        // Numbers ascend.
        names.sort();
        for name in names {
            if let Some((hash, len)) = content_of(&name) {
                let mut index = disk.index();
                index.contents.insert(hash, Content { len, is_sent: false });
                index.bytes += len;
            } else if let Some((number, key, len)) = version_of(&name) {
                disk.index().last_number = number;
                let bytes = disk.directory.read(name.clone()).await?;
                let block = CertifiedBlock::decode(&bytes).ok().filter(|block| {
                    block.volume() == volume
                        && InodeKey::of(&block.key()) == key
                        && bytes.len() as u64 == len
                        && matches!(block.siblings(), [one] if one.certificate.user == user)
                });
                match block {
                    Some(block) => disk.note(key, &block, number).await,
                    None => foreign.push(name),
                }
            } else if name.ends_with(".new") {
                // A crash came before it had its name.
                disk.directory.remove(name).await?;
            }
        }
        disk.set_aside(foreign).await?;
        Ok(disk)
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().expect("no holder of this lock panics")
    }

    /// Notes a version that is in its file, and removes those that it covers.
    async fn note(&self, key: InodeKey, block: &CertifiedBlock, number: u64) {
        let sibling = &block.siblings()[0];
        let kept = Kept {
            number,
            len: block.bytes().len() as u64,
            dot: sibling.dot,
            binding_version: sibling.binding_version,
            is_removal: sibling.is_removal,
        };
        let covered = {
            let mut index = self.index();
            let covered = index.take_covered(&key, sibling);
            index.bytes += kept.len;
            index.versions.entry(key).or_default().push(kept);
            covered
        };
        self.remove(&key, covered).await;
    }

    /// Keeps a version of an inode, durably.
    pub(super) async fn keep_version(&self, block: &CertifiedBlock) -> Result<(), KeepError> {
        let key = InodeKey::of(&block.key());
        let len = block.bytes().len() as u64;
        self.check_room(len)?;
        let number = {
            let mut index = self.index();
            index.last_number += 1;
            index.last_number
        };
        let [sibling] = block.siblings() else {
            return Err(KeepError::Io(io::Error::other("a version of several writers")));
        };
        let (dot, binding_version) = (sibling.dot, sibling.binding_version);
        let kept = Kept { number, len, dot, binding_version, is_removal: sibling.is_removal };
        let written = self.directory.replace(kept.name(&key), block.bytes().clone()).await;
        written.map_err(KeepError::Io)?;
        self.note(key, block, number).await;
        Ok(())
    }

    /// Keeps content blocks, durably.
    pub(super) async fn keep_contents(
        &self,
        blocks: Vec<(BlockHash, Bytes)>,
    ) -> Result<(), KeepError> {
        let blocks: Vec<_> = {
            let index = self.index();
            blocks.into_iter().filter(|(hash, _)| !index.contents.contains_key(hash)).collect()
        };
        self.check_room(blocks.iter().map(|(_, bytes)| bytes.len() as u64).sum())?;
        let written = blocks.into_iter().map(|(hash, bytes)| async move {
            let content = Content { len: bytes.len() as u64, is_sent: false };
            self.directory.replace(content.name(&hash), bytes).await?;
            let mut index = self.index();
            index.bytes += content.len;
            index.contents.insert(hash, content);
            Ok(())
        });
        let written: io::Result<Vec<()>> = join_all(written).await.into_iter().collect();
        written.map(drop).map_err(KeepError::Io)
    }

    fn check_room(&self, more: u64) -> Result<(), KeepError> {
        let max_bytes = self.max_bytes;
        match self.index().bytes.saturating_add(more) <= max_bytes {
            true => Ok(()),
            false => Err(KeepError::NoRoom { max_bytes }),
        }
    }

    /// The versions of an inode, none of which covers another.
    pub(super) async fn versions(&self, key: &InodeKey) -> io::Result<Vec<CertifiedBlock>> {
        let mut error = io::Error::from(io::ErrorKind::NotFound);
        for _ in 0..MAX_READS {
            let kept = self.index().versions.get(key).cloned().unwrap_or_default();
            let reads = kept.iter().map(|kept| async {
                let bytes = self.directory.read(kept.name(key)).await?;
                // Its signatures were checked when it was kept, or when the spool was opened.
                CertifiedBlock::decode_verified(&bytes).map_err(io::Error::other)
            });
            match join_all(reads).await.into_iter().collect() {
                Ok(blocks) => return Ok(blocks),
                Err(failed) => error = failed,
            }
            if error.kind() != io::ErrorKind::NotFound {
                break;
            }
        }
        Err(error)
    }

    /// A content block; `None` if it is not kept.
    pub(super) async fn content(&self, hash: &BlockHash) -> io::Result<Option<Bytes>> {
        let Some(name) = self.index().contents.get(hash).map(|content| content.name(hash)) else {
            return Ok(None);
        };
        match self.directory.read(name.clone()).await {
            Ok(bytes) if BlockHash::of_inode_content(&bytes) == *hash => Ok(Some(bytes)),
            Ok(_) => {
                {
                    let mut index = self.index();
                    let content = index.contents.remove(hash);
                    index.bytes -= content.map_or(0, |content| content.len);
                }
                self.set_aside(vec![name]).await?;
                Ok(None)
            }
            // The ring has got it meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Content blocks that the ring does not have, up to so many bytes, or one.
    pub(super) fn unsent_contents(&self, max: (usize, u64)) -> Vec<BlockHash> {
        let index = self.index();
        let unsent = index.contents.iter().filter(|(_, content)| !content.is_sent);
        let (mut found, mut bytes) = (Vec::new(), 0);
        for (hash, content) in unsent {
            bytes += content.len;
            if !found.is_empty() && (found.len() >= max.0 || bytes > max.1) {
                break;
            }
            found.push(*hash);
        }
        found
    }

    pub(super) fn note_sent(&self, hashes: &[BlockHash]) {
        let mut index = self.index();
        for hash in hashes {
            if let Some(content) = index.contents.get_mut(hash) {
                content.is_sent = true;
            }
        }
    }

    /// Removes all content blocks: the ring has them and all inodes.
    pub(super) async fn remove_contents(&self) {
        let contents = {
            let mut index = self.index();
            let contents = std::mem::take(&mut index.contents);
            index.bytes -= contents.values().map(|content| content.len).sum::<u64>();
            contents
        };
        for (hash, content) in contents {
            self.remove_file(content.name(&hash)).await;
        }
    }

    /// The ring has a version, or one that includes it.
    pub(super) async fn remove_version(&self, block: &CertifiedBlock) {
        let key = InodeKey::of(&block.key());
        let mut covered = Vec::new();
        for sibling in block.siblings() {
            covered.extend(self.index().take_covered(&key, sibling));
        }
        self.remove(&key, covered).await;
    }

    async fn remove(&self, key: &InodeKey, versions: Vec<Kept>) {
        for kept in versions {
            self.remove_file(kept.name(key)).await;
        }
    }

    /// What stays is brought to the ring once more by the next mount, which changes nothing.
    async fn remove_file(&self, name: String) {
        if let Err(error) = self.directory.remove(name).await {
            tracing::warn!("a file of the spool cannot be removed: {error}");
        }
    }

    async fn set_aside(&self, names: Vec<String>) -> io::Result<()> {
        if names.is_empty() {
            return Ok(());
        }
        self.index().damaged += names.len();
        let files = counted(names.len() as u64, "file of the spool is", "files of the spool are");
        let aside = self.directory.set_aside(names).await?;
        tracing::error!("{files} damaged, and set aside: see {aside}");
        Ok(())
    }

    /// The inodes that have versions here, in the order in which the last ones were kept.
    pub(super) fn inodes(&self) -> Vec<InodeKey> {
        let index = self.index();
        let last = |kept: &[Kept]| kept.iter().map(|kept| kept.number).max();
        let mut inodes: Vec<_> =
            index.versions.iter().map(|(key, kept)| (last(kept), *key)).collect();
        inodes.sort_unstable();
        inodes.into_iter().map(|(_, key)| key).collect()
    }

    pub(super) fn max_bytes(&self) -> u64 {
        self.max_bytes
    }

    pub(super) fn has_versions(&self, key: &InodeKey) -> bool {
        self.index().versions.contains_key(key)
    }

    /// Whether a version of an inode is here that is not its removal.
    pub(super) fn has_living(&self, key: &InodeKey) -> bool {
        let index = self.index();
        index.versions.get(key).is_some_and(|kept| kept.iter().any(|kept| !kept.is_removal))
    }

    pub(super) fn has_content(&self, hash: &BlockHash) -> bool {
        self.index().contents.contains_key(hash)
    }

    /// How many inodes, how many bytes of files, and how many damaged files there are.
    pub(super) fn counts(&self) -> (usize, u64, usize) {
        let index = self.index();
        (index.versions.len(), index.bytes, index.damaged)
    }
}

impl Index {
    fn take_covered(&mut self, key: &InodeKey, by: &Sibling) -> Vec<Kept> {
        let Some(kept) = self.versions.get_mut(key) else { return Vec::new() };
        let covered: Vec<Kept> = kept.extract_if(.., |kept| kept.is_covered_by(by)).collect();
        if kept.is_empty() {
            self.versions.remove(key);
        }
        self.bytes -= covered.iter().map(|kept| kept.len).sum::<u64>();
        covered
    }
}

/// The hash and the length of a content block that a file has.
fn content_of(name: &str) -> Option<(BlockHash, u64)> {
    let (hash, len) = name.strip_suffix(SPOOL_BLOCK)?.split_once('-')?;
    Some((BlockHash(hash_of(hash)?), len_of(len)?))
}

/// The number, the inode and the length of a version that a file has.
fn version_of(name: &str) -> Option<(u64, InodeKey, u64)> {
    let (number, rest) = name.strip_suffix(SPOOL_INODE)?.split_once('-')?;
    let (key, len) = rest.split_once('-')?;
    let number: u64 = Some(number).filter(|number| number.len() == 20)?.parse().ok()?;
    Some((
        Some(number).filter(|number| *number <= MAX_NUMBER)?,
        InodeKey(hash_of(key)?),
        len_of(len)?,
    ))
}

fn len_of(digits: &str) -> Option<u64> {
    digits.parse().ok().filter(|len| *len <= MAX_BLOCK_BYTES as u64)
}

fn hash_of(hex: &str) -> Option<[u8; 32]> {
    let mut hash = [0; 32];
    if hex.len() != 64 || !hex.is_ascii() {
        return None;
    }
    for (at, byte) in hash.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(hash)
}
