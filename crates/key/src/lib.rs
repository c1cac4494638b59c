//! Ring arithmetic, keys, block identities and signatures.
//!
//! Everything that lives on the ring is named by a [`Key`]; this crate says how
//! keys are made from contents ([`BlockHash`]), from public keys ([`VolumeId`],
//! [`PeerId`]) and how intervals of the ring are written ([`KeyRange`]).
//!
//! Sources: CFS §4.1 (consistent hashing), §4.4 (node IDs are hashes), §5
//! (content-hash blocks and signed blocks). CFS uses 160-bit SHA-1 identifiers;
//! Atoll uses a 512-bit circle with BLAKE3 hashes in its upper half, which leaves
//! room for keys that keep an order (D2 §4.2).
//!
//! It deliberately knows nothing of time, tasks, peers' addresses, disks or files.

pub mod epoch_key;
pub mod hash;
pub mod identity;
pub mod kinds;
pub mod read_key;
pub mod ring;
pub mod text;
mod verified;
pub mod volume_secret;

pub use hash::BlockHash;
pub use identity::{
    GroupId, IdProfile, PeerId, SecretKey, UserId, VolumeId, user_group, volume_group,
};
pub use kinds::{
    BlockId, BlockKind, InvalidBlock, MAX_BLOCK_BYTES, NotAdmitted, QuotaClass, SignedBlock,
};
pub use read_key::{ReadKey, SealError, VolumeCipher};
pub use ring::{Key, KeyRange, NodeId};
pub use text::{GroupAddress, ReadAddress, UserAddress, VolumeAddress, VolumeInvitation};
pub use volume_secret::{SecretError, VolumeSecret};
