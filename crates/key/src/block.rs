//! Blocks: what a key promises about the bytes stored under it.
//!
//! CFS §5.5: a server accepts a content-hash block if its key is the hash of its
//! content, and a signed block if it is signed by a public key whose hash is the
//! block's key. [`BlockKind::verify`] is that rule; nodes apply it before storing
//! and clients after fetching.
//!
//! A signed block carries a version besides (CFS leaves replay to the publisher):
//! a higher version replaces a lower one, never the other way round.

use bytes::Bytes;

use crate::hash::{self, BlockHash};
use crate::identity::{SecretKey, VolumeId};
use crate::ring::Key;

/// The largest block, in bytes: a data block of 1 MiB and its header.
pub const MAX_BLOCK_BYTES: usize = (1 << 20) + (64 << 10);

/// The longest name of a signed block, in bytes.
pub const MAX_SIGNED_NAME_BYTES: usize = 64;

/// What kind of block a key names; the number is the one on the wire and on disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum BlockKind {
    /// Named by the hash of its bytes; never changes.
    Content = 1,
    /// Named by the hash of a public key (and name); the key's holder may replace it.
    Signed = 2,
}

/// Why bytes are not the block their key names.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidBlock {
    /// Longer than [`MAX_BLOCK_BYTES`].
    #[error("the block has {0} bytes; the limit is {MAX_BLOCK_BYTES}")]
    TooLong(usize),
    /// The bytes hash to another key.
    #[error("the block's bytes do not match its key")]
    WrongHash,
    /// The bytes do not have the layout of a signed block.
    #[error("not a signed block: {0}")]
    Malformed(&'static str),
    /// The signature is not the key holder's.
    #[error("the block's signature is wrong")]
    WrongSignature,
    /// A kind number nobody knows.
    #[error("unknown block kind {0}")]
    UnknownKind(u8),
}

impl BlockKind {
    /// Reads a kind's number.
    pub fn from_u8(number: u8) -> Result<BlockKind, InvalidBlock> {
        match number {
            1 => Ok(BlockKind::Content),
            2 => Ok(BlockKind::Signed),
            other => Err(InvalidBlock::UnknownKind(other)),
        }
    }

    /// Checks that `bytes` are what `key` names; returns the block's version
    /// (0 for content, which has only one).
    pub fn verify(self, key: &Key, bytes: &[u8]) -> Result<u64, InvalidBlock> {
        if bytes.len() > MAX_BLOCK_BYTES {
            return Err(InvalidBlock::TooLong(bytes.len()));
        }
        match self {
            BlockKind::Content if BlockHash::of(bytes).key() == *key => Ok(0),
            BlockKind::Content => Err(InvalidBlock::WrongHash),
            BlockKind::Signed => {
                let block = SignedBlock::decode(&Bytes::copy_from_slice(bytes))?;
                if block.key() == *key { Ok(block.version) } else { Err(InvalidBlock::WrongHash) }
            }
        }
    }
}

/// A block signed by the holder of a key.
///
/// | offset | bytes | field |
/// |---|---|---|
/// | 0 | 4 | magic `ATSB` |
/// | 4 | 1 | layout, 1 |
/// | 5 | 1 | length *n* of the name, at most 64 |
/// | 6 | 32 | public key (Ed25519) |
/// | 38 | 8 | version, big-endian |
/// | 46 | n | name |
/// | 46 + n | m | payload |
/// | 46 + n + m | 64 | signature of `"atoll v1 signed block\0"` and all bytes before it |
///
/// All bytes are covered by the signature, so a block has one encoding.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SignedBlock {
    /// Whose block it is.
    pub owner: VolumeId,
    /// Which of the owner's blocks it is; empty for a volume's root.
    pub name: Bytes,
    /// Higher replaces lower.
    pub version: u64,
    /// What the owner signed.
    pub payload: Bytes,
    encoded: Bytes,
}

const SIGNED_MAGIC: &[u8; 4] = b"ATSB";
const SIGNED_LAYOUT: u8 = 1;
const SIGNED_HEADER_BYTES: usize = 46;
const SIGNATURE_BYTES: usize = 64;
const SIGNING_CONTEXT: &[u8] = b"atoll v1 signed block\0";

impl SignedBlock {
    /// Makes and signs a block.
    ///
    /// # Panics
    /// If the name is longer than [`MAX_SIGNED_NAME_BYTES`].
    pub fn sign(secret: &SecretKey, name: &[u8], version: u64, payload: &[u8]) -> SignedBlock {
        assert!(name.len() <= MAX_SIGNED_NAME_BYTES, "a signed block's name is short");
        let owner = secret.volume_id();
        let mut out =
            Vec::with_capacity(SIGNED_HEADER_BYTES + name.len() + payload.len() + SIGNATURE_BYTES);
        out.extend_from_slice(SIGNED_MAGIC);
        out.push(SIGNED_LAYOUT);
        out.push(name.len() as u8);
        out.extend_from_slice(&owner.0);
        out.extend_from_slice(&version.to_be_bytes());
        out.extend_from_slice(name);
        out.extend_from_slice(payload);
        let signature = secret.sign(&[SIGNING_CONTEXT, &out].concat());
        out.extend_from_slice(&signature);
        let encoded = Bytes::from(out);
        let payload_end = encoded.len() - SIGNATURE_BYTES;
        SignedBlock {
            owner,
            name: encoded.slice(SIGNED_HEADER_BYTES..SIGNED_HEADER_BYTES + name.len()),
            version,
            payload: encoded.slice(SIGNED_HEADER_BYTES + name.len()..payload_end),
            encoded,
        }
    }

    /// Reads a block and checks its signature; the payload is a slice of `bytes`.
    pub fn decode(bytes: &Bytes) -> Result<SignedBlock, InvalidBlock> {
        if bytes.len() > MAX_BLOCK_BYTES {
            return Err(InvalidBlock::TooLong(bytes.len()));
        }
        if bytes.len() < SIGNED_HEADER_BYTES + SIGNATURE_BYTES {
            return Err(InvalidBlock::Malformed("too short"));
        }
        if &bytes[..4] != SIGNED_MAGIC {
            return Err(InvalidBlock::Malformed("no magic"));
        }
        if bytes[4] != SIGNED_LAYOUT {
            return Err(InvalidBlock::Malformed("unknown layout"));
        }
        let name_end = SIGNED_HEADER_BYTES + usize::from(bytes[5]);
        let payload_end = bytes.len() - SIGNATURE_BYTES;
        if usize::from(bytes[5]) > MAX_SIGNED_NAME_BYTES || name_end > payload_end {
            return Err(InvalidBlock::Malformed("name too long"));
        }
        let owner = VolumeId(bytes[6..38].try_into().expect("32 bytes"));
        let version = u64::from_be_bytes(bytes[38..46].try_into().expect("8 bytes"));
        let signature = bytes[payload_end..].try_into().expect("64 bytes");
        let signed = [SIGNING_CONTEXT, &bytes[..payload_end]].concat();
        if !owner.verify(&signed, &signature) {
            return Err(InvalidBlock::WrongSignature);
        }
        Ok(SignedBlock {
            owner,
            name: bytes.slice(SIGNED_HEADER_BYTES..name_end),
            version,
            payload: bytes.slice(name_end..payload_end),
            encoded: bytes.clone(),
        })
    }

    /// Where the block lives on the ring.
    pub fn key(&self) -> Key {
        hash::signed_key(&self.owner.0, &self.name)
    }

    /// The bytes that are stored and sent.
    pub fn bytes(&self) -> &Bytes {
        &self.encoded
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn block() -> SignedBlock {
        SignedBlock::sign(&SecretKey::from_seed(&[3; 32]), b"name", 7, b"payload")
    }

    #[test]
    fn a_signed_block_reads_back() {
        let block = block();
        let back = SignedBlock::decode(block.bytes()).expect("valid");
        assert_eq!(back, block);
        assert_eq!(
            (&back.payload[..], &back.name[..], back.version),
            (&b"payload"[..], &b"name"[..], 7)
        );
        assert_eq!(BlockKind::Signed.verify(&block.key(), block.bytes()), Ok(7));
    }

    /// CFS §5.5: "the block must be signed by a public key whose hash is the key".
    #[test]
    fn every_changed_byte_of_a_signed_block_is_refused() {
        let block = block();
        for i in 0..block.bytes().len() {
            let mut bytes = block.bytes().to_vec();
            bytes[i] ^= 0x40;
            assert!(BlockKind::Signed.verify(&block.key(), &bytes).is_err(), "byte {i}");
        }
    }

    #[test]
    fn a_valid_block_of_somebody_else_is_refused() {
        let other = SignedBlock::sign(&SecretKey::from_seed(&[4; 32]), b"name", 9, b"payload");
        assert_eq!(
            BlockKind::Signed.verify(&block().key(), other.bytes()),
            Err(InvalidBlock::WrongHash)
        );
    }

    /// CFS §5.5: content is accepted "if the supplied key is equal to the hash".
    #[test]
    fn content_is_accepted_only_under_its_hash() {
        let key = BlockHash::of(b"abc").key();
        assert_eq!(BlockKind::Content.verify(&key, b"abc"), Ok(0));
        assert_eq!(BlockKind::Content.verify(&key, b"abd"), Err(InvalidBlock::WrongHash));
    }

    #[test]
    fn oversized_blocks_are_refused_before_they_are_hashed() {
        let bytes = vec![0; MAX_BLOCK_BYTES + 1];
        let key = BlockHash::of(&bytes).key();
        for kind in [BlockKind::Content, BlockKind::Signed] {
            assert_eq!(kind.verify(&key, &bytes), Err(InvalidBlock::TooLong(bytes.len())));
        }
    }

    #[test]
    fn an_unknown_kind_is_refused() {
        assert_eq!(BlockKind::from_u8(9), Err(InvalidBlock::UnknownKind(9)));
    }

    proptest! {
        #[test]
        fn any_bytes_decode_or_fail_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = SignedBlock::decode(&Bytes::from(bytes.clone()));
            let mut with_magic = b"ATSB\x01".to_vec();
            with_magic.extend(bytes);
            let _ = SignedBlock::decode(&Bytes::from(with_magic));
        }
    }
}
