//! Signed blocks: named by the hash of a public key and a name, replaced by the key's holder.
//!
//! CFS §5.5: a server accepts a signed block if it is signed by a public key whose hash is the
//! block's key. A signed block carries a version besides (CFS leaves replay to the publisher): a
//! higher version replaces a lower one, never the other way round.

use bytes::Bytes;

use super::{BlockId, BlockKind, InvalidBlock, MAX_BLOCK_BYTES, QuotaClass, Rules};
use crate::hash;
use crate::identity::{SecretKey, VolumeId};
use crate::ring::Key;

/// The longest name of a signed block, in bytes.
pub const MAX_SIGNED_NAME_BYTES: usize = 64;

pub(super) struct Signed;

impl Rules for Signed {
    fn verify(&self, key: &Key, bytes: &[u8]) -> Result<u64, InvalidBlock> {
        let block = SignedBlock::decode(&Bytes::copy_from_slice(bytes))?;
        if block.key() == *key { Ok(block.version) } else { Err(InvalidBlock::WrongHash) }
    }

    fn is_mutable(&self) -> bool {
        true
    }

    /// Signed blocks are volumes' roots: few, small, and needed to say what a volume is now.
    fn quota_class(&self) -> QuotaClass {
        QuotaClass::Root
    }

    fn is_tombstone(&self, bytes: &[u8]) -> bool {
        bytes.get(FORM_OFFSET) == Some(&TOMBSTONE)
    }
}

/// A block signed by the holder of a key.
///
/// | offset | bytes | field |
/// |---|---|---|
/// | 0 | 4 | magic `ATSB` |
/// | 4 | 1 | form: 1 a block, 2 a tombstone (no payload): its owner has removed the block |
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
    /// The publisher, by the key that signs the block.
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
const FORM_OFFSET: usize = 4;
const BLOCK: u8 = 1;
const TOMBSTONE: u8 = 2;
const SIGNED_HEADER_BYTES: usize = 46;
const SIGNATURE_BYTES: usize = 64;
const SIGNING_CONTEXT: &[u8] = b"atoll v1 signed block\0";

impl SignedBlock {
    /// Makes and signs a block.
    ///
    /// # Panics
    /// If the name is longer than [`MAX_SIGNED_NAME_BYTES`].
    pub fn sign(secret: &SecretKey, name: &[u8], version: u64, payload: &[u8]) -> SignedBlock {
        SignedBlock::sign_form(BLOCK, secret, name, version, payload)
    }

    /// Makes and signs the version that removes a block.
    ///
    /// # Panics
    /// As [`SignedBlock::sign`].
    pub fn sign_tombstone(secret: &SecretKey, name: &[u8], version: u64) -> SignedBlock {
        SignedBlock::sign_form(TOMBSTONE, secret, name, version, b"")
    }

    fn sign_form(
        form: u8,
        secret: &SecretKey,
        name: &[u8],
        version: u64,
        payload: &[u8],
    ) -> SignedBlock {
        assert!(name.len() <= MAX_SIGNED_NAME_BYTES, "a signed block's name is short");
        let owner = secret.volume_id();
        let mut out =
            Vec::with_capacity(SIGNED_HEADER_BYTES + name.len() + payload.len() + SIGNATURE_BYTES);
        out.extend_from_slice(SIGNED_MAGIC);
        out.push(form);
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
        let form = bytes[FORM_OFFSET];
        if form != BLOCK && form != TOMBSTONE {
            return Err(InvalidBlock::Malformed("unknown form"));
        }
        let name_end = SIGNED_HEADER_BYTES + usize::from(bytes[5]);
        let payload_end = bytes.len() - SIGNATURE_BYTES;
        if usize::from(bytes[5]) > MAX_SIGNED_NAME_BYTES || name_end > payload_end {
            return Err(InvalidBlock::Malformed("name too long"));
        }
        if form == TOMBSTONE && name_end != payload_end {
            return Err(InvalidBlock::Malformed("a tombstone has no payload"));
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

    /// What names the block.
    pub fn id(&self) -> BlockId {
        SignedBlock::id_at(self.key())
    }

    /// What names the signed block that lives there.
    pub fn id_at(key: Key) -> BlockId {
        BlockId { kind: BlockKind::Signed, key }
    }

    /// What names the block that the holder of this public key calls `name`.
    pub fn id_named(owner: &[u8; 32], name: &[u8]) -> BlockId {
        SignedBlock::id_at(hash::signed_key(owner, name))
    }

    /// Whether this version says that its owner has removed the block.
    pub fn is_tombstone(&self) -> bool {
        Signed.is_tombstone(&self.encoded)
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

    #[test]
    fn a_tombstone_is_a_version_without_payload_that_only_the_owner_can_sign() {
        let secret = SecretKey::from_seed(&[3; 32]);
        let tombstone = SignedBlock::sign_tombstone(&secret, b"name", 8);
        assert_eq!(tombstone.id(), block().id());
        assert_eq!(tombstone.id().verify(tombstone.bytes()), Ok(8));
        assert!(tombstone.is_tombstone() && !block().is_tombstone());
        // A block without payload is none, nor does changing the form make it one.
        let empty = SignedBlock::sign(&secret, b"name", 8, b"");
        assert!(!empty.is_tombstone());
        let mut bytes = empty.bytes().to_vec();
        bytes[FORM_OFFSET] = TOMBSTONE;
        assert_eq!(empty.id().verify(&bytes), Err(InvalidBlock::WrongSignature));
        let mut bytes = block().bytes().to_vec();
        bytes[FORM_OFFSET] = TOMBSTONE;
        let error = InvalidBlock::Malformed("a tombstone has no payload");
        assert_eq!(block().id().verify(&bytes), Err(error));
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
