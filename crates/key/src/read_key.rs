//! Read keys: who may read an encrypted volume, and how its blocks are sealed.
//!
//! CFS publishes to everybody; here a volume may be readable only with its
//! [`ReadKey`]. Nodes store and check sealed blocks like any other (the hash is of the
//! sealed bytes) and learn nothing of names and contents.
//!
//! A sealed block:
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 24 | tag: the first bytes of BLAKE3, keyed with the tag key, of all that follows, in the clear |
//! | 24 | 4 | length *n* of the block, big-endian |
//! | 28 | n | the block |
//! | 28 + n | p | zeros, up to [`padded_len`] |
//!
//! All but the tag is encrypted by XChaCha20 under the cipher key, with the tag as nonce:
//! a synthetic nonce (SIV, Rogaway and Shrimpton 2006). So sealing is deterministic, equal
//! blocks of one volume are one block, and no nonce can be reused by a publisher who starts
//! over; and what does not give its own tag back is refused. The keys depend on the read
//! key and the volume ([`VolumeCipher`]): equal blocks of two volumes have nothing in
//! common, and an attacker without the read key cannot check a guess of what a block holds.
//!
//! Deliberately not here: who gets the key, and revoking it (that takes a new volume, or a
//! new key and all blocks sealed anew; [`crate::epoch_key`] says what shared volumes do).

use std::fmt;

use bytes::Bytes;
use chacha20::XChaCha20;
use chacha20::cipher::{KeyIvInit, StreamCipher};

use crate::identity::VolumeId;
use crate::kinds::MAX_BLOCK_BYTES;

/// Bytes of the tag before a sealed block: 192 bits, XChaCha20's nonce.
pub const TAG_BYTES: usize = 24;

/// Bytes that sealing adds at least: tag and length.
pub const SEAL_BYTES: usize = TAG_BYTES + LEN_BYTES;

const LEN_BYTES: usize = 4;

/// Shorter blocks are padded to this. A guess: most of a tree's smallest files become
/// indistinguishable, and a stored block costs its node about as much anyway.
const MIN_PADDED_BYTES: usize = 256;

/// Bytes of a [`VolumeCipher::check`].
pub const CHECK_BYTES: usize = 16;

const BLOCK_TAG: &str = "atoll v1 encrypted volume: tag of a content block";
const BLOCK_CIPHER: &str = "atoll v1 encrypted volume: cipher of a content block";
const ROOT_TAG: &str = "atoll v1 encrypted volume: tag of a root";
const ROOT_CIPHER: &str = "atoll v1 encrypted volume: cipher of a root";
const LOCAL_TAG: &str = "atoll v1 encrypted volume: tag of what waits on a disk";
const LOCAL_CIPHER: &str = "atoll v1 encrypted volume: cipher of what waits on a disk";
const INODE_TAG: &str = "atoll v1 encrypted volume: tag of an inode";
const INODE_CIPHER: &str = "atoll v1 encrypted volume: cipher of an inode";
const NAME: &str = "atoll v1 encrypted volume: hash of a name";
const CHECK: &str = "atoll v1 encrypted volume: check of the read key";

/// What a reader of an encrypted volume must hold: 32 random bytes. Never printed but by
/// [`text`](crate::text).
#[derive(Clone, PartialEq, Eq)]
pub struct ReadKey([u8; 32]);

impl ReadKey {
    /// From 32 bytes of good randomness.
    pub fn from_bytes(bytes: [u8; 32]) -> ReadKey {
        ReadKey(bytes)
    }

    /// The bytes, to be kept secret.
    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }

    fn derive(&self, context: &str, volume: &VolumeId) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_derive_key(context);
        hasher.update(&self.0).update(&volume.0);
        *hasher.finalize().as_bytes()
    }
}

impl fmt::Debug for ReadKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReadKey(…)")
    }
}

/// Why bytes are not a block sealed with this key for this volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SealError {
    /// Fewer bytes than the shortest sealed block has, or more than a block may have.
    #[error("a sealed block cannot have {0} bytes")]
    Length(usize),
    /// The tag is of other bytes: another volume's block, another key, or damage.
    #[error("it is not sealed with this volume's read key")]
    Tag,
    /// The tag is right, and what it is of is not what a publisher seals.
    #[error("its length and its padding do not agree")]
    Padding,
}

/// The keys of one purpose.
#[derive(Clone)]
pub(crate) struct Keys {
    tag: [u8; 32],
    cipher: [u8; 32],
}

/// Seals and opens the blocks of one encrypted volume. Cheap to clone.
#[derive(Clone)]
pub struct VolumeCipher {
    blocks: Keys,
    root: Keys,
    local: Keys,
    inode: Keys,
    name: [u8; 32],
    check: [u8; CHECK_BYTES],
}

impl fmt::Debug for VolumeCipher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("VolumeCipher(…)")
    }
}

impl VolumeCipher {
    /// The keys of `volume` under `read_key`.
    pub fn new(read_key: &ReadKey, volume: &VolumeId) -> VolumeCipher {
        let derive = |context| read_key.derive(context, volume);
        let check = derive(CHECK);
        VolumeCipher {
            blocks: Keys { tag: derive(BLOCK_TAG), cipher: derive(BLOCK_CIPHER) },
            root: Keys { tag: derive(ROOT_TAG), cipher: derive(ROOT_CIPHER) },
            local: Keys { tag: derive(LOCAL_TAG), cipher: derive(LOCAL_CIPHER) },
            inode: Keys { tag: derive(INODE_TAG), cipher: derive(INODE_CIPHER) },
            name: derive(NAME),
            check: *check.first_chunk().expect("a hash has 32 bytes"),
        }
    }

    /// What a root says in the clear, so that a wrong read key is told before anything
    /// else is fetched. It tells nothing about the key.
    pub fn check(&self) -> [u8; CHECK_BYTES] {
        self.check
    }

    /// Seals a content block.
    ///
    /// # Panics
    /// If the sealed block would be longer than a block may be.
    pub fn seal(&self, block: &[u8]) -> Vec<u8> {
        self.blocks.seal(block)
    }

    /// Seals bytes with a right tag and without length or padding, as only a hostile holder
    /// of the key would: for tests of those who open blocks.
    pub fn seal_as_it_is(&self, inner: &[u8]) -> Vec<u8> {
        self.blocks.seal_inner(inner)
    }

    /// Opens a sealed content block.
    pub fn open(&self, sealed: &[u8]) -> Result<Bytes, SealError> {
        self.blocks.open(sealed)
    }

    /// Seals what a root says. Its keys are its own: no content block can pass for it.
    pub fn seal_root(&self, root: &[u8]) -> Vec<u8> {
        self.root.seal(root)
    }

    /// Opens what [`VolumeCipher::seal_root`] sealed.
    pub fn open_root(&self, sealed: &[u8]) -> Result<Bytes, SealError> {
        self.root.open(sealed)
    }

    /// Seals an inode of a shared volume. Its keys are its own: no content block can pass for it.
    pub fn seal_inode(&self, inode: &[u8]) -> Vec<u8> {
        self.inode.seal(inode)
    }

    /// Opens what [`VolumeCipher::seal_inode`] sealed.
    pub fn open_inode(&self, sealed: &[u8]) -> Result<Bytes, SealError> {
        self.inode.open(sealed)
    }

    /// A hash that stands for a name without telling it: only a holder of the key can check a guess.
    pub fn hash_name(&self, name: &[u8]) -> [u8; 32] {
        *blake3::keyed_hash(&self.name, name).as_bytes()
    }

    /// Seals what a writer keeps on its own disk until the ring has it: bytes of any length,
    /// which is not hidden. Its keys are its own.
    pub fn seal_local(&self, bytes: &[u8]) -> Vec<u8> {
        self.local.seal_inner(bytes)
    }

    /// Opens what [`VolumeCipher::seal_local`] sealed.
    pub fn open_local(&self, sealed: &[u8]) -> Result<Bytes, SealError> {
        self.local.open_inner(sealed)
    }
}

impl Keys {
    pub(crate) fn new(tag: [u8; 32], cipher: [u8; 32]) -> Keys {
        Keys { tag, cipher }
    }

    fn seal(&self, block: &[u8]) -> Vec<u8> {
        let sealed_len = SEAL_BYTES + padded_len(block.len());
        assert!(sealed_len <= MAX_BLOCK_BYTES, "a block of {} bytes cannot be sealed", block.len());
        let mut out = Vec::with_capacity(sealed_len);
        out.extend_from_slice(&[0; TAG_BYTES]);
        out.extend_from_slice(&(block.len() as u32).to_be_bytes());
        out.extend_from_slice(block);
        out.resize(sealed_len, 0);
        self.finish(out)
    }

    /// Seals bytes as they are, without length and padding.
    pub(crate) fn seal_inner(&self, inner: &[u8]) -> Vec<u8> {
        self.finish([&[0; TAG_BYTES], inner].concat())
    }

    /// Puts the tag of what is behind it in its place, and encrypts that.
    fn finish(&self, mut out: Vec<u8>) -> Vec<u8> {
        let tag = self.tag(&out[TAG_BYTES..]);
        out[..TAG_BYTES].copy_from_slice(&tag);
        self.apply(&tag, &mut out[TAG_BYTES..]);
        out
    }

    fn open(&self, sealed: &[u8]) -> Result<Bytes, SealError> {
        if sealed.len() < SEAL_BYTES + MIN_PADDED_BYTES || sealed.len() > MAX_BLOCK_BYTES {
            return Err(SealError::Length(sealed.len()));
        }
        let inner = self.open_inner(sealed)?;
        let (len, padded) = inner.split_first_chunk::<LEN_BYTES>().expect("longer than that");
        let len = u32::from_be_bytes(*len) as usize;
        let zeros = padded.get(len..).ok_or(SealError::Padding)?;
        if padded_len(len) != padded.len() || zeros.iter().any(|byte| *byte != 0) {
            return Err(SealError::Padding);
        }
        Ok(inner.slice(LEN_BYTES..LEN_BYTES + len))
    }

    /// Opens what [`Keys::seal_inner`] sealed.
    pub(crate) fn open_inner(&self, sealed: &[u8]) -> Result<Bytes, SealError> {
        let length = SealError::Length(sealed.len());
        let (tag, inner) = sealed.split_first_chunk::<TAG_BYTES>().ok_or(length)?;
        let mut inner = inner.to_vec();
        self.apply(tag, &mut inner);
        if self.tag(&inner) != *tag {
            return Err(SealError::Tag);
        }
        Ok(Bytes::from(inner))
    }

    fn tag(&self, inner: &[u8]) -> [u8; TAG_BYTES] {
        let hash = blake3::keyed_hash(&self.tag, inner);
        *hash.as_bytes().first_chunk().expect("a hash has 32 bytes")
    }

    fn apply(&self, tag: &[u8; TAG_BYTES], inner: &mut [u8]) {
        XChaCha20::new(&self.cipher.into(), &(*tag).into()).apply_keystream(inner);
    }
}

/// How long a block of `len` bytes is made before it is encrypted: at least 256 bytes, and
/// so that only the upper bits of the length differ from zero (Padmé; Nikitin and others,
/// "Reducing Metadata Leakage from Encrypted Files", PETS 2019): a length tells
/// O(log log len) bits, for at most an eighth more bytes. A power of two, as full data
/// blocks are, stays.
pub fn padded_len(len: usize) -> usize {
    let len = len.max(MIN_PADDED_BYTES);
    let exponent = len.ilog2();
    let kept_bits = exponent.ilog2() + 1;
    let mask = (1 << (exponent - kept_bits)) - 1;
    (len + mask) & !mask
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const VOLUME: VolumeId = VolumeId([5; 32]);

    fn cipher(key: u8) -> VolumeCipher {
        VolumeCipher::new(&ReadKey::from_bytes([key; 32]), &VOLUME)
    }

    #[test]
    fn a_sealed_block_opens_to_what_it_was() {
        for len in [0, 1, 255, 256, 257, 4096, 65536, 65550, 1 << 20, (1 << 20) + 14] {
            let block: Vec<u8> = (0..len).map(|i| (i * 7) as u8).collect();
            let sealed = cipher(1).seal(&block);
            assert_eq!(sealed.len(), SEAL_BYTES + padded_len(len), "{len}");
            assert_eq!(cipher(1).open(&sealed).expect("opens"), block, "{len}");
        }
    }

    #[test]
    fn what_waits_on_a_disk_is_sealed_under_keys_of_its_own() {
        for len in [0, 1, 3 << 20] {
            let bytes = vec![7; len];
            let sealed = cipher(1).seal_local(&bytes);
            assert_eq!(cipher(1).open_local(&sealed).expect("opens"), bytes);
            assert!(cipher(2).open_local(&sealed).is_err());
            assert!(cipher(1).open(&sealed).is_err());
            assert!(cipher(1).open_local(&sealed[..sealed.len() - 1]).is_err());
        }
    }

    #[test]
    fn equal_blocks_are_one_block_in_a_volume_and_two_in_two() {
        let block = [9; 5000];
        assert_eq!(cipher(1).seal(&block), cipher(1).seal(&block));
        let other_key = cipher(2).seal(&block);
        let same_key = ReadKey::from_bytes([1; 32]);
        let other_volume = VolumeCipher::new(&same_key, &VolumeId([6; 32])).seal(&block);
        for other in [&other_key, &other_volume] {
            assert_ne!(&cipher(1).seal(&block), other);
            assert_eq!(cipher(1).open(other), Err(SealError::Tag));
        }
    }

    #[test]
    fn a_block_of_one_purpose_cannot_pass_for_one_of_another() {
        let sealed = cipher(1).seal(b"a root");
        assert_eq!(cipher(1).open_root(&sealed), Err(SealError::Tag));
        assert_eq!(cipher(1).open_root(&cipher(1).seal_root(b"a root")).expect("opens"), "a root");
        assert_eq!(cipher(1).open_inode(&sealed), Err(SealError::Tag));
        assert_eq!(cipher(1).open_inode(&cipher(1).seal_root(b"a root")), Err(SealError::Tag));
    }

    #[test]
    fn every_changed_byte_and_every_cut_is_refused() {
        let sealed = cipher(1).seal(b"block");
        for at in 0..sealed.len() {
            let mut changed = sealed.clone();
            changed[at] ^= 1;
            assert_eq!(cipher(1).open(&changed), Err(SealError::Tag), "byte {at}");
            assert_eq!(cipher(1).open(&sealed[..at]), Err(SealError::Length(at)), "cut at {at}");
        }
        let longer = [&sealed[..], &[0]].concat();
        assert_eq!(cipher(1).open(&longer), Err(SealError::Tag));
        let too_long = vec![0; MAX_BLOCK_BYTES + 1];
        assert_eq!(cipher(1).open(&too_long), Err(SealError::Length(too_long.len())));
    }

    /// Every holder of the read key can make a valid tag of anything.
    #[test]
    fn a_right_tag_of_a_wrong_length_or_padding_is_refused() {
        let sealed = |inner: Vec<u8>| cipher(1).seal_as_it_is(&inner);
        let inner = |len: u32, padded: usize, last: u8| {
            let mut inner = len.to_be_bytes().to_vec();
            inner.resize(LEN_BYTES + padded, 0);
            *inner.last_mut().expect("not empty") = last;
            inner
        };
        assert!(cipher(1).open(&sealed(inner(5, 256, 0))).is_ok());
        for wrong in [
            inner(5, 256, 1),
            inner(5, 272, 0),
            inner(257, 256, 0),
            inner(256, 272, 0),
            inner(u32::MAX, 256, 0),
        ] {
            assert_eq!(cipher(1).open(&sealed(wrong)), Err(SealError::Padding));
        }
    }

    /// Encrypted volumes are found by the hashes of these bytes.
    #[test]
    fn the_bytes_of_a_sealed_block_never_change() {
        let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
        let sealed = cipher(1).seal(b"atoll");
        assert_eq!(hex(&sealed[..40]), SEALED);
        assert_eq!(crate::BlockHash::of(&sealed).to_hex(), SEALED_HASH);
        assert_eq!(hex(&cipher(1).seal_root(b"atoll")[..40]), SEALED_ROOT);
        assert_eq!(hex(&cipher(1).check()), CHECKED);
        assert_eq!(hex(&cipher(1).seal_inode(b"atoll")[..24]), SEALED_INODE);
        assert_eq!(hex(&cipher(1).hash_name(b"atoll")[..8]), HASHED_NAME);
    }

    const SEALED: &str =
        "8ca898b03aa4705cf0a822503d94cce38cc76dd808f1deef598e04a2af1ee5cd210e687a27e1398d";
    const SEALED_HASH: &str = "cf84eb5428ed08d16791f8afee6f10eed8c42bb84ea4278b687cf3c7f9b82a88";
    const SEALED_ROOT: &str =
        "98654f15e18ae5f686500c0464ef555ac9fdbbde089f6798aea9541e7a2ca784f16563b2b1da65b1";
    const CHECKED: &str = "5fffa0411de5a6039b1ef317298d6522";
    const SEALED_INODE: &str = "c801876d3b55eb5b0f981127458abf2ee97f8e4f45fa2c69";
    const HASHED_NAME: &str = "55957c1b733e78ef";

    /// Two known lengths of the paper's figure, and its bound of 12 %.
    #[test]
    fn padding_is_small_and_leaves_powers_of_two_alone() {
        for log2 in 8..=20 {
            assert_eq!(padded_len(1 << log2), 1 << log2);
        }
        assert_eq!([padded_len(0), padded_len(1), padded_len(255)], [256; 3]);
        assert_eq!((padded_len(257), padded_len(1000)), (272, 1024));
    }

    proptest! {
        #[test]
        fn padding_is_monotonic_idempotent_and_at_most_an_eighth(len in 256usize..1 << 21) {
            let padded = padded_len(len);
            prop_assert!(padded >= len && padded_len(padded) == padded);
            prop_assert!(padded - len <= len / 8);
            prop_assert!(padded_len(len + 1) >= padded);
        }

        #[test]
        fn what_was_not_sealed_does_not_open(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            prop_assert!(cipher(1).open(&bytes).is_err());
        }
    }

    #[test]
    fn a_read_key_is_not_printed() {
        assert_eq!(format!("{:?}", ReadKey::from_bytes([7; 32])), "ReadKey(…)");
        assert_eq!(format!("{:?}", cipher(7)), "VolumeCipher(…)");
    }
}
