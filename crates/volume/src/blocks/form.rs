//! How the blocks of an owned volume are on the ring: sealed if it is encrypted, and in a volume that is written through
//! mounts with its key before them, so that its owner can release them.

use atoll_key::kinds::VOLUME_PREFIX_BYTES;
use atoll_key::{BlockHash, BlockId, VolumeCipher, VolumeId};
use bytes::Bytes;

use super::outbox::Seal;
use crate::format::FormatError;

/// See the module.
#[derive(Clone, Default)]
pub(crate) struct BlockForm {
    /// The volume whose content all blocks are; `None` where they are plain content blocks.
    volume: Option<VolumeId>,
    cipher: Option<VolumeCipher>,
}

impl BlockForm {
    /// Of plain content blocks, which other volumes may have too.
    pub(crate) fn plain(cipher: Option<VolumeCipher>) -> BlockForm {
        BlockForm { volume: None, cipher }
    }

    /// Of the content of a volume.
    pub(crate) fn of_volume(volume: VolumeId, cipher: Option<VolumeCipher>) -> BlockForm {
        BlockForm { volume: Some(volume), cipher }
    }

    /// Whether the volume's owner can release the blocks.
    pub(crate) fn is_releasable(&self) -> bool {
        self.volume.is_some()
    }

    /// Whether blocks of both forms are the same, given that the same cipher opens them.
    pub(crate) fn is_like(&self, other: &BlockForm) -> bool {
        self.volume == other.volume
    }

    /// What names a block on the ring.
    pub(crate) fn id(&self, hash: &BlockHash) -> BlockId {
        match self.volume {
            None => hash.id(),
            Some(_) => hash.volume_content_id(),
        }
    }

    /// The block, of what the ring has.
    pub(crate) fn open(&self, bytes: Bytes) -> Result<Bytes, FormatError> {
        let sealed = match &self.volume {
            None => bytes,
            Some(volume) => match bytes.split_first_chunk::<VOLUME_PREFIX_BYTES>() {
                None => return Err(FormatError::Truncated),
                // Its owner could release it.
                Some((owner, _)) if *owner != volume.0 => {
                    return Err(FormatError::BadReference("the block is another volume's"));
                }
                Some(_) => bytes.slice(VOLUME_PREFIX_BYTES..),
            },
        };
        match &self.cipher {
            None => Ok(sealed),
            Some(cipher) => cipher.open(&sealed).map_err(FormatError::Sealed),
        }
    }

    /// The hash under which the ring would have a block.
    pub(crate) fn hash_of(&self, block: &[u8]) -> BlockHash {
        match (&self.volume, &self.cipher) {
            (None, None) => BlockHash::of(block),
            _ => self.name(&Seal::seal(self, block)).0,
        }
    }

    /// How new blocks are made, unless they are put as they are.
    pub(crate) fn sealer(&self) -> Option<&dyn Seal> {
        match (&self.volume, &self.cipher) {
            (None, None) => None,
            _ => Some(self),
        }
    }
}

impl Seal for BlockForm {
    fn seal(&self, block: &[u8]) -> Vec<u8> {
        let owner = self.volume.as_ref().map_or(&[][..], |volume| &volume.0);
        match &self.cipher {
            None => [owner, block].concat(),
            Some(cipher) if owner.is_empty() => cipher.seal(block),
            Some(cipher) => [owner, &cipher.seal(block)].concat(),
        }
    }

    fn name(&self, sealed: &[u8]) -> (BlockHash, BlockId) {
        let hash = match self.volume {
            None => BlockHash::of(sealed),
            Some(_) => BlockHash::of_volume_content(sealed),
        };
        (hash, self.id(&hash))
    }
}

#[cfg(test)]
mod tests {
    use atoll_key::ReadKey;

    use super::*;

    #[test]
    fn a_block_opens_in_its_own_form_and_in_no_other() {
        let (own, other) = (VolumeId([1; 32]), VolumeId([2; 32]));
        let cipher = VolumeCipher::new(&ReadKey::from_bytes([3; 32]), &own);
        for cipher in [None, Some(cipher)] {
            let form = BlockForm::of_volume(own, cipher.clone());
            let sealed = Bytes::from(Seal::seal(&form, b"content"));
            let (hash, id) = form.name(&sealed);
            assert_eq!((form.hash_of(b"content"), form.id(&hash)), (hash, id));
            assert_eq!(id.verify(&sealed), Ok(0));
            assert_eq!(form.open(sealed.clone()).as_deref(), Ok(&b"content"[..]));
            let of_other = BlockForm::of_volume(other, cipher.clone());
            assert!(matches!(of_other.open(sealed.clone()), Err(FormatError::BadReference(_))));
            assert!(form.open(sealed.slice(..31)).is_err());
            let plain = BlockForm::plain(cipher);
            assert_ne!(plain.hash_of(b"content"), hash);
            assert!(!plain.is_like(&form));
        }
    }
}
