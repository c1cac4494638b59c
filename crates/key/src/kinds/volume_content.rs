//! Content of a volume: blocks that never change, as content blocks, and say to which owned volume they belong, so
//! that its owner can release them ([`VolumeRelease`]). No other volume can need them.
//!
//! | bytes | field |
//! |---|---|
//! | 32 | the volume's public key |
//! | … | content |
//!
//! The key is BLAKE3 of all bytes in key-derivation mode, context `atoll v1 content of a volume`, and 32 zero bytes.
//! Content blocks have another context, so that none of them names a volume, whatever its first bytes are.

use bytes::Bytes;

use super::certified::CLOCK_SLACK_MS;
use super::owned_content::{OWNER_BYTES, OwnedContent};
use super::release::MAX_RELEASED;
use super::{BlockId, BlockKind, InvalidBlock, NotAdmitted};
use crate::hash::BlockHash;
use crate::identity::{SecretKey, VolumeId};
use crate::ring::Key;

/// Bytes of a block of a volume's content before the content: the volume.
pub const VOLUME_PREFIX_BYTES: usize = OWNER_BYTES;

/// How long after a release the block is removed, seconds: what readers have begun to read ends before, as a fetch
/// has a deadline of less. A guess.
pub const REMOVED_AFTER_SECS: u64 = 120;

const CONTEXT: &[u8] = b"atoll v1 release of a volume\0";
const HEADER_BYTES: usize = 32 + 8 + 1;
const SIGNATURE_BYTES: usize = 64;

pub(super) static RULES: OwnedContent =
    OwnedContent { hash_of: BlockHash::of_volume_content, release_removes: true };

impl BlockHash {
    /// What names the block of a volume's content with this hash.
    pub fn volume_content_id(&self) -> BlockId {
        BlockId { kind: BlockKind::VolumeContent, key: self.key() }
    }
}

/// A volume's owner says that the volume did not need blocks of its content at a time. What is put or renewed then or
/// later stays: so of a release and a put of one node the later one counts, in whatever order replicas hear of them.
///
/// | bytes | field |
/// |---|---|
/// | 32 | the volume's public key |
/// | 8 | as of when, seconds since 1970 |
/// | 1 | number *n* of blocks, 1 to 128 |
/// | 32 n | their hashes, ascending |
/// | 64 | signature by the volume's key of `"atoll v1 release of a volume\0"` and all bytes before it |
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VolumeRelease {
    /// As of when, seconds since 1970.
    pub as_of_unix_secs: u64,
    volume: VolumeId,
    hashes: Vec<BlockHash>,
    encoded: Bytes,
}

impl VolumeRelease {
    /// Releases blocks of the content of the volume with this key. `None` if there are none, or too many.
    pub fn sign(
        volume: &SecretKey,
        as_of_unix_secs: u64,
        blocks: &[BlockHash],
    ) -> Option<VolumeRelease> {
        let mut hashes = blocks.to_vec();
        hashes.sort_unstable();
        hashes.dedup();
        if !(1..=MAX_RELEASED).contains(&hashes.len()) {
            return None;
        }
        let id = volume.volume_id();
        let mut out = id.0.to_vec();
        out.extend_from_slice(&as_of_unix_secs.to_be_bytes());
        out.push(hashes.len() as u8);
        hashes.iter().for_each(|hash| out.extend_from_slice(&hash.0));
        out.extend_from_slice(&volume.sign(&[CONTEXT, &out].concat()));
        Some(VolumeRelease { as_of_unix_secs, volume: id, hashes, encoded: out.into() })
    }

    /// Reads a release. The signature is not checked, see [`VolumeRelease::verify`].
    ///
    /// # Errors
    /// If it is malformed.
    pub fn decode(bytes: &Bytes) -> Result<VolumeRelease, InvalidBlock> {
        let malformed = InvalidBlock::Malformed;
        let (header, rest) = bytes.split_at_checked(HEADER_BYTES).ok_or(malformed("short"))?;
        let (volume, rest_of_header) = header.split_at(32);
        let (as_of, count) = rest_of_header.split_at(8);
        let count = usize::from(count[0]);
        if !(1..=MAX_RELEASED).contains(&count) || rest.len() != 32 * count + SIGNATURE_BYTES {
            return Err(malformed("no blocks, too many, or another length"));
        }
        let (hashes, _signature) = rest.split_at(32 * count);
        let hash = |bytes: &[u8]| BlockHash(bytes.try_into().expect("32 bytes"));
        let hashes: Vec<BlockHash> = hashes.chunks_exact(32).map(hash).collect();
        if !hashes.windows(2).all(|pair| pair[0] < pair[1]) {
            return Err(malformed("blocks not in order"));
        }
        Ok(VolumeRelease {
            as_of_unix_secs: u64::from_be_bytes(as_of.try_into().expect("8 bytes")),
            volume: VolumeId(volume.try_into().expect("32 bytes")),
            hashes,
            encoded: bytes.clone(),
        })
    }

    /// Checks that the volume's owner has signed it.
    ///
    /// # Errors
    /// If not.
    pub fn verify(&self) -> Result<(), InvalidBlock> {
        let (signed, signature) = self.encoded.split_at(self.encoded.len() - SIGNATURE_BYTES);
        let signature = signature.try_into().expect("64 bytes");
        match self.volume.verify(&[CONTEXT, signed].concat(), signature) {
            true => Ok(()),
            false => Err(InvalidBlock::WrongSignature),
        }
    }

    /// Whether a replica takes it now: it is not a replay.
    ///
    /// # Errors
    /// If it is.
    pub fn admit(&self, now_ms: u64) -> Result<(), NotAdmitted> {
        let time_ms = self.as_of_unix_secs.saturating_mul(1000);
        match time_ms.abs_diff(now_ms) > CLOCK_SLACK_MS {
            true => Err(NotAdmitted::Clock { time_ms, now_ms }),
            false => Ok(()),
        }
    }

    /// The volume whose content the blocks are.
    pub fn volume(&self) -> VolumeId {
        self.volume
    }

    /// The keys of the blocks.
    pub fn keys(&self) -> impl ExactSizeIterator<Item = Key> {
        self.hashes.iter().map(BlockHash::key)
    }

    /// Its bytes, as the table says.
    pub fn bytes(&self) -> &Bytes {
        &self.encoded
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::{Release, ReleaseEffect};

    const NOW_SECS: u64 = 1_000_000;

    fn secret(n: u8) -> SecretKey {
        SecretKey::from_seed(&[n; 32])
    }

    fn of_volume(n: u8, content: &[u8]) -> Vec<u8> {
        [&secret(n).volume_id().0, content].concat()
    }

    #[test]
    fn a_block_names_the_volume_that_it_begins_with_and_no_other_kind_does() {
        let bytes = of_volume(1, b"abc");
        let hash = BlockHash::of_volume_content(&bytes);
        let id = hash.volume_content_id();
        assert_eq!(id.verify(&bytes), Ok(0));
        assert_eq!(id.verify(&of_volume(2, b"abc")), Err(InvalidBlock::WrongHash));
        assert_eq!(id.kind.belongs_to(&bytes), Some(secret(1).volume_id().0));
        assert!(id.kind.release_removes());
        let short = &bytes[..VOLUME_PREFIX_BYTES - 1];
        let short_id = BlockHash::of_volume_content(short).volume_content_id();
        assert!(short_id.verify(short).is_err(), "it names no volume");
        for other in [hash.id(), hash.inode_content_id()] {
            assert!(other.verify(&bytes).is_err(), "{:?}", other.kind);
            assert!(!other.kind.release_removes());
        }
    }

    #[test]
    fn a_release_reads_back_and_covers_blocks_of_its_volume_alone() {
        let blocks = [BlockHash([2; 32]), BlockHash([1; 32]), BlockHash([2; 32])];
        let one = VolumeRelease::sign(&secret(1), NOW_SECS, &blocks).expect("two blocks");
        assert_eq!(VolumeRelease::decode(one.bytes()), Ok(one.clone()));
        let release = Release::from(one);
        assert_eq!(Release::decode(&release.to_bytes().into()), Ok(release.clone()));
        assert_eq!((release.verify(), release.admit(NOW_SECS * 1000)), (Ok(()), Ok(())));
        let keys: Vec<Key> = release.keys().collect();
        assert_eq!(keys, [BlockHash([1; 32]).key(), BlockHash([2; 32]).key()]);
        assert_eq!(release.effect(), ReleaseEffect::Removed { as_of_unix_secs: NOW_SECS });
        let own = of_volume(1, b"abc");
        assert!(release.covers(BlockKind::VolumeContent, &own));
        assert!(!release.covers(BlockKind::VolumeContent, &of_volume(2, b"abc")), "another volume");
        assert!(!release.covers(BlockKind::InodeContent, &own), "an inode of that number");
        assert!(!release.covers(BlockKind::Content, &own), "a file that begins so");
        assert_eq!(VolumeRelease::sign(&secret(1), NOW_SECS, &[]), None);
        let many: Vec<BlockHash> = (0..=MAX_RELEASED as u8).map(|n| BlockHash([n; 32])).collect();
        assert_eq!(VolumeRelease::sign(&secret(1), NOW_SECS, &many), None);
    }

    #[test]
    fn a_replay_and_a_changed_release_are_refused() {
        let blocks = [BlockHash([2; 32]), BlockHash([1; 32])];
        let one = VolumeRelease::sign(&secret(1), NOW_SECS, &blocks).expect("two blocks");
        for now_ms in [NOW_SECS * 1000 + 600_001, NOW_SECS * 1000 - 600_001] {
            assert!(matches!(one.admit(now_ms), Err(NotAdmitted::Clock { .. })));
        }
        let bytes = Release::from(one).to_bytes();
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            let read = Release::decode(&changed.into());
            assert!(read.and_then(|changed| changed.verify()).is_err(), "byte {at}");
        }
        for len in 0..bytes.len() {
            assert!(Release::decode(&bytes[..len].to_vec().into()).is_err(), "{len} bytes");
        }
    }
}
