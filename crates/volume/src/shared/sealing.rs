//! How the blocks of an encrypted shared volume are sealed, by the read keys of its epochs
//! ([`atoll_key::epoch_key`]).
//!
//! Inodes and content blocks (leaves, file data, blocks of pointers) say which epoch's key they are sealed
//! with. A new block has the newest epoch's; what is not written anew stays as it is. Bindings, dots and
//! contexts are in the clear: nodes join siblings that they cannot read.
//!
//! | **inode**, the payload of a sibling | |
//! |---|---|
//! | 1 | layout, 2 |
//! | 4 | epoch |
//! | | the payload of layout 1, sealed with the epoch's keys of inodes |
//!
//! | **content block**, of any shared volume | |
//! |---|---|
//! | 32 | the inode that it belongs to, the first half of its key |
//! | 4 | epoch; of an encrypted volume |
//! | | the block; of an encrypted volume, sealed with the epoch's keys of content blocks |
//!
//! The sealed parts are those of [`atoll_key::read_key`]. In an encrypted volume nothing is read that is not
//! sealed, so that nobody can pass off names or contents of another volume; in another volume, nothing that
//! is.
//!
//! It fetches no keys: [`ReadAccess`](super::access::ReadAccess) does.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use atoll_key::epoch_key::MAX_EPOCHS;
use atoll_key::kinds::INODE_PREFIX_BYTES;
use atoll_key::kinds::certified::{CertifiedBlock, MAX_PAYLOAD_BYTES};
use atoll_key::read_key::{SEAL_BYTES, padded_len};
use atoll_key::{BlockHash, BlockId, ReadKey, SecretKey, VolumeCipher, VolumeId};
use bytes::Bytes;

use super::inode::{Inode, InodeKey, TooLarge};
use crate::blocks::outbox::Seal;
use crate::format::FormatError;

const LAYOUT: u8 = 2;
const EPOCH_BYTES: usize = 4;

/// Opens the blocks of one volume, and says how new ones are sealed; of a volume that is not encrypted, it
/// leaves them as they are. Cheap to clone: clones learn the same keys.
#[derive(Clone, Default)]
pub struct Sealing(Option<Arc<Mutex<Keys>>>);

struct Keys {
    volume: VolumeId,
    /// The newest key that is known, and its epoch: it opens all before.
    newest: (u32, ReadKey),
    /// With which new blocks are sealed.
    epoch: u32,
    ciphers: BTreeMap<u32, Arc<VolumeCipher>>,
}

impl Keys {
    fn cipher(&mut self, epoch: u32) -> Result<Arc<VolumeCipher>, FormatError> {
        if let Some(cipher) = self.ciphers.get(&epoch) {
            return Ok(cipher.clone());
        }
        let (newest, key) = &self.newest;
        let back = newest.checked_sub(epoch).ok_or(FormatError::NoReadKey(epoch))?;
        let cipher = Arc::new(VolumeCipher::new(&key.back(back), &self.volume));
        self.ciphers.insert(epoch, cipher.clone());
        Ok(cipher)
    }
}

impl Sealing {
    /// Of a volume that is not encrypted.
    pub fn none() -> Sealing {
        Sealing::default()
    }

    /// For somebody who has the read key of an epoch.
    pub fn of_reader(volume: VolumeId, epoch: u32, key: ReadKey) -> Sealing {
        Sealing::with(volume, (epoch, key), epoch)
    }

    /// For the owner of a volume, which seals with the key of `epoch` if it is encrypted: opens what any
    /// epoch's key has sealed.
    ///
    /// # Panics
    /// If there is no such epoch.
    pub fn of_owner(volume: &SecretKey, epoch: Option<u32>) -> Sealing {
        let Some(epoch) = epoch else { return Sealing::none() };
        assert!(epoch < MAX_EPOCHS, "there is no epoch {epoch}");
        let last = MAX_EPOCHS - 1;
        let key = ReadKey::of_epoch(volume, last).expect("the last epoch");
        Sealing::with(volume.volume_id(), (last, key), epoch)
    }

    fn with(volume: VolumeId, newest: (u32, ReadKey), epoch: u32) -> Sealing {
        let ciphers = BTreeMap::new();
        Sealing(Some(Arc::new(Mutex::new(Keys { volume, newest, epoch, ciphers }))))
    }

    fn keys(&self) -> Option<MutexGuard<'_, Keys>> {
        let keys = self.0.as_ref()?;
        Some(keys.lock().expect("no holder of this lock panics"))
    }

    /// Whether the volume is encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.0.is_some()
    }

    /// There is a key of this epoch: if it is the newest, new blocks are sealed with it from now on.
    pub(super) fn learn(&self, epoch: u32, key: ReadKey) {
        if let Some(mut keys) = self.keys()
            && epoch > keys.newest.0
        {
            keys.newest = (epoch, key);
            keys.epoch = epoch;
        }
    }

    /// Whether an inode has versions of an epoch whose key is not known.
    pub(super) fn lacks_key_of(&self, block: &CertifiedBlock) -> bool {
        let Some(keys) = self.keys() else { return false };
        let payloads = block.siblings().iter().map(|sibling| &sibling.payload);
        payloads.filter_map(|payload| inode_epoch(payload)).any(|(epoch, _)| epoch > keys.newest.0)
    }

    /// The payload of an inode in the clear.
    ///
    /// # Errors
    /// If it is not sealed with a key that is known, or not sealed at all.
    pub fn open_inode(&self, payload: &Bytes) -> Result<Bytes, FormatError> {
        let Some(mut keys) = self.keys() else { return Ok(payload.clone()) };
        let (epoch, sealed) = inode_epoch(payload).ok_or(FormatError::NotSealed)?;
        let cipher = keys.cipher(epoch)?;
        drop(keys);
        cipher.open_inode(sealed).map_err(FormatError::Sealed)
    }

    /// The inode that is the payload of a sibling.
    ///
    /// # Errors
    /// If it cannot be opened, or is not one.
    pub(super) fn inode(&self, payload: &Bytes) -> Result<Inode, FormatError> {
        Inode::decode(&self.open_inode(payload)?)
    }

    /// A content block in the clear, whichever inode it belongs to.
    ///
    /// # Errors
    /// If it is not sealed with a key that is known.
    pub fn open_block(&self, block: &Bytes) -> Result<Bytes, FormatError> {
        if block.len() < INODE_PREFIX_BYTES {
            return Err(FormatError::Truncated);
        }
        let block = block.slice(INODE_PREFIX_BYTES..);
        let Some(mut keys) = self.keys() else { return Ok(block) };
        let (epoch, sealed) =
            block.split_first_chunk::<EPOCH_BYTES>().ok_or(FormatError::Truncated)?;
        let cipher = keys.cipher(u32::from_be_bytes(*epoch))?;
        drop(keys);
        cipher.open(sealed).map_err(FormatError::Sealed)
    }

    /// A hash that stands for a name where others see it. In an encrypted volume only those who have been
    /// readers can check a guess: its key is that of epoch 0, so that it is one hash in all epochs.
    pub(super) fn hash_name(&self, name: &[u8]) -> BlockHash {
        let Some(mut keys) = self.keys() else { return BlockHash::of(name) };
        BlockHash(keys.cipher(0).expect("the first epoch's key follows from all").hash_name(name))
    }

    /// How new blocks are sealed now.
    pub fn sealer(&self) -> Sealer {
        Sealer(self.keys().map(|mut keys| {
            let epoch = keys.epoch;
            (epoch, keys.cipher(epoch).expect("an epoch whose key is known"))
        }))
    }
}

/// The epoch of a sealed inode, and what is sealed.
fn inode_epoch(payload: &[u8]) -> Option<(u32, &[u8])> {
    let (epoch, sealed) = payload.strip_prefix(&[LAYOUT])?.split_first_chunk::<EPOCH_BYTES>()?;
    Some((u32::from_be_bytes(*epoch), sealed))
}

impl fmt::Debug for Sealing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Sealing").field(&self.keys().map(|keys| keys.epoch)).finish()
    }
}

/// Seals new blocks of one volume with the key of one epoch; of a volume that is not encrypted, it leaves
/// them as they are.
#[derive(Clone, Debug)]
pub struct Sealer(Option<(u32, Arc<VolumeCipher>)>);

impl Sealer {
    /// An inode as the payload of a sibling.
    ///
    /// # Errors
    /// If it is too long when it is sealed.
    pub fn seal_inode(&self, inode: Vec<u8>) -> Result<Vec<u8>, TooLarge> {
        let Some((epoch, cipher)) = &self.0 else { return Ok(inode) };
        let len = 1 + EPOCH_BYTES + SEAL_BYTES + padded_len(inode.len());
        if len > MAX_PAYLOAD_BYTES {
            return Err(TooLarge::Payload);
        }
        Ok([&[LAYOUT], &epoch.to_be_bytes()[..], &cipher.seal_inode(&inode)].concat())
    }

    /// What makes content blocks of an inode.
    pub fn of_inode(&self, inode: InodeKey) -> ContentSealer<'_> {
        ContentSealer { sealer: self, inode }
    }
}

/// Makes content blocks of one inode.
#[derive(Clone, Copy, Debug)]
pub struct ContentSealer<'a> {
    sealer: &'a Sealer,
    inode: InodeKey,
}

impl ContentSealer<'_> {
    /// The block as the ring has it.
    pub fn seal(&self, block: &[u8]) -> Vec<u8> {
        let inode = &self.inode.0[..];
        match &self.sealer.0 {
            None => [inode, block].concat(),
            Some((epoch, cipher)) => [inode, &epoch.to_be_bytes(), &cipher.seal(block)].concat(),
        }
    }
}

impl Seal for ContentSealer<'_> {
    fn seal(&self, block: &[u8]) -> Vec<u8> {
        ContentSealer::seal(self, block)
    }

    fn name(&self, sealed: &[u8]) -> (BlockHash, BlockId) {
        let hash = BlockHash::of_inode_content(sealed);
        (hash, hash.inode_content_id())
    }
}
