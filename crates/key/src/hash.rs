//! BLAKE3, with one domain per purpose.
//!
//! CFS §5.5 names blocks by SHA-1; Atoll by BLAKE3 in key-derivation mode, so that
//! a content block can never be passed off as a signed block or a node as either.

use std::fmt;
use std::sync::LazyLock;

use crate::ring::Key;

static CONTENT: LazyLock<blake3::Hasher> =
    LazyLock::new(|| blake3::Hasher::new_derive_key("atoll v1 content block"));
static SIGNED: LazyLock<blake3::Hasher> =
    LazyLock::new(|| blake3::Hasher::new_derive_key("atoll v1 signed block"));
static NODE: LazyLock<blake3::Hasher> =
    LazyLock::new(|| blake3::Hasher::new_derive_key("atoll v1 node identity"));
static ADDRESS: LazyLock<blake3::Hasher> =
    LazyLock::new(|| blake3::Hasher::new_derive_key("atoll v1 node address"));
static INODE: LazyLock<blake3::Hasher> =
    LazyLock::new(|| blake3::Hasher::new_derive_key("atoll v1 inode binding"));
static INODE_CONTENT: LazyLock<blake3::Hasher> =
    LazyLock::new(|| blake3::Hasher::new_derive_key("atoll v1 content of an inode"));
static VOLUME_CONTENT: LazyLock<blake3::Hasher> =
    LazyLock::new(|| blake3::Hasher::new_derive_key("atoll v1 content of a volume"));
static STATE: LazyLock<blake3::Hasher> =
    LazyLock::new(|| blake3::Hasher::new_derive_key("atoll v1 certified block"));

/// The hash of a content block: its identity and, padded, its [`Key`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockHash(pub [u8; 32]);

impl BlockHash {
    /// The hash of a content block's bytes.
    pub fn of(content: &[u8]) -> BlockHash {
        let mut hasher = CONTENT.clone();
        hasher.update(content);
        BlockHash(*hasher.finalize().as_bytes())
    }

    /// The hash of a block of an inode's content; `bytes` are the whole block.
    pub fn of_inode_content(bytes: &[u8]) -> BlockHash {
        BlockHash(*INODE_CONTENT.clone().update(bytes).finalize().as_bytes())
    }

    /// The hash of a block of a volume's content; `bytes` are the whole block.
    pub fn of_volume_content(bytes: &[u8]) -> BlockHash {
        BlockHash(*VOLUME_CONTENT.clone().update(bytes).finalize().as_bytes())
    }

    /// Where the block lives on the ring.
    pub fn key(&self) -> Key {
        Key::hashed(self.0)
    }

    /// Lower-case hexadecimal, 64 characters.
    pub fn to_hex(&self) -> String {
        self.0.iter().map(|b| format!("{b:02x}")).collect()
    }
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockHash({})", self.key())
    }
}

impl fmt::Display for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.key().fmt(f)
    }
}

/// The key of a signed block: hash of the public key and the block's name.
pub(crate) fn signed_key(public_key: &[u8; 32], name: &[u8]) -> Key {
    let mut hasher = SIGNED.clone();
    hasher.update(public_key).update(name);
    Key::hashed(*hasher.finalize().as_bytes())
}

/// The key of an inode: hash of its binding.
pub(crate) fn inode_key(binding: &[u8]) -> Key {
    let mut hasher = INODE.clone();
    Key::hashed(*hasher.update(binding).finalize().as_bytes())
}

/// What tells two certified blocks of one height apart.
pub(crate) fn state_hash(block: &[u8]) -> [u8; 32] {
    let mut hasher = STATE.clone();
    *hasher.update(block).finalize().as_bytes()
}

/// The ring position of a node's virtual server.
pub(crate) fn node_key(public_key: &[u8; 32], virtual_index: u32) -> Key {
    let mut hasher = NODE.clone();
    hasher.update(public_key).update(&virtual_index.to_be_bytes());
    Key::hashed(*hasher.finalize().as_bytes())
}

/// The ring position of a virtual server in a network whose IDs come from addresses.
pub(crate) fn address_key(ip: &std::net::Ipv6Addr, virtual_index: u32) -> Key {
    let mut hasher = ADDRESS.clone();
    hasher.update(&ip.octets()).update(&virtual_index.to_be_bytes());
    Key::hashed(*hasher.finalize().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn domains_are_separate() {
        let bytes = [7u8; 32];
        let content = BlockHash::of(&bytes).key();
        let signed = signed_key(&bytes, b"");
        let node = node_key(&bytes, 0);
        assert!(content != signed && signed != node && content != node);
    }

    #[test]
    fn the_content_hash_never_changes() {
        // Published trees are found by this value: changing it orphans them all.
        assert_eq!(BlockHash::of(b"atoll").to_hex(), GOLDEN);
    }

    const GOLDEN: &str = "08583a5d5cc4ca0b93c0b06a8bfcca6dccc0d4003b7ce1aa50fd24a2067fb4cb";
}
