//! An entry of the index: where a block is and what is known of it.

use std::collections::BTreeMap;
use std::sync::RwLock;

use atoll_key::{BlockKind, Key};

use super::error::IndexError;
use crate::segment::record_bytes;
use crate::{BlockInfo, Owner};

pub(super) const ENTRY_BYTES: usize = 44;
const ENTRY_CRC_OFFSET: usize = ENTRY_BYTES - 4;

/// Where a block is and what is known of it.
///
/// | offset | bytes | field |
/// |---|---|---|
/// | 0 | 6 | segment |
/// | 6 | 4 | offset of the record in it |
/// | 10 | 3 | length of the block |
/// | 13 | 1 | kind |
/// | 14 | 8 | version |
/// | 22 | 8 | end of the lease |
/// | 30 | 6 | sequence number |
/// | 36 | 4 | number of the owner |
/// | 40 | 4 | CRC-32 of the key and bytes 0..40 |
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct IndexEntry {
    pub(crate) segment: u64,
    pub(crate) offset: u32,
    pub(crate) len_bytes: u32,
    pub(crate) kind: BlockKind,
    pub(crate) version: u64,
    pub(crate) expires_unix_secs: u64,
    pub(crate) sequence: u64,
    pub(crate) owner: Owner,
}

impl IndexEntry {
    pub(crate) fn info(&self, key: Key) -> BlockInfo {
        BlockInfo {
            key,
            kind: self.kind,
            version: self.version,
            expires_unix_secs: self.expires_unix_secs,
            len_bytes: self.len_bytes,
            owner: self.owner,
        }
    }

    /// What its record takes in the log.
    pub(crate) fn record_bytes(&self) -> u64 {
        record_bytes(self.len_bytes)
    }

    /// The same block with the lease and the owner of `other`, if that lease is longer.
    pub(crate) fn leased_as(self, other: &IndexEntry) -> IndexEntry {
        if other.expires_unix_secs <= self.expires_unix_secs {
            return self;
        }
        IndexEntry { expires_unix_secs: other.expires_unix_secs, owner: other.owner, ..self }
    }

    /// The same block leased until `expires_unix_secs` for `owner`, or for its present
    /// owner if that is [`Owner::NOBODY`].
    pub(crate) fn extended(self, expires_unix_secs: u64, owner: Owner) -> IndexEntry {
        let owner = if owner == Owner::NOBODY { self.owner } else { owner };
        IndexEntry { expires_unix_secs, owner, ..self }
    }

    pub(super) fn encode(&self, key: &Key, owner: u32) -> [u8; ENTRY_BYTES] {
        let mut out = [0; ENTRY_BYTES];
        out[..6].copy_from_slice(&be48(self.segment));
        out[6..10].copy_from_slice(&self.offset.to_be_bytes());
        out[10..13].copy_from_slice(&self.len_bytes.to_be_bytes()[1..]);
        out[13] = self.kind as u8;
        out[14..22].copy_from_slice(&self.version.to_be_bytes());
        out[22..30].copy_from_slice(&self.expires_unix_secs.to_be_bytes());
        out[30..36].copy_from_slice(&be48(self.sequence));
        out[36..ENTRY_CRC_OFFSET].copy_from_slice(&owner.to_be_bytes());
        let crc = entry_crc(key, &out[..ENTRY_CRC_OFFSET]);
        out[ENTRY_CRC_OFFSET..].copy_from_slice(&crc.to_be_bytes());
        out
    }

    pub(super) fn decode(
        key: &Key,
        bytes: &[u8; ENTRY_BYTES],
        owners: &OwnerNumbers,
    ) -> Result<IndexEntry, IndexError> {
        let number = |from: usize, to: usize| {
            bytes[from..to].iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
        };
        let crc = number(ENTRY_CRC_OFFSET, ENTRY_BYTES) as u32;
        let sound = crc == entry_crc(key, &bytes[..ENTRY_CRC_OFFSET]);
        let kind = BlockKind::from_u8(bytes[13]);
        let (Ok(kind), true) = (kind, sound) else {
            return Err(IndexError::Damaged("an entry does not match its checksum".to_owned()));
        };
        let owner = owners.owner(number(36, 40) as u32);
        Ok(IndexEntry {
            segment: number(0, 6),
            offset: number(6, 10) as u32,
            len_bytes: number(10, 13) as u32,
            kind,
            version: number(14, 22),
            expires_unix_secs: number(22, 30),
            sequence: number(30, 36),
            owner: owner.ok_or_else(|| {
                IndexError::Damaged("an entry is of an owner that is not there".to_owned())
            })?,
        })
    }
}

/// The lower 48 bits; no store ever counts further.
fn be48(number: u64) -> [u8; 6] {
    let bytes = number.to_be_bytes();
    assert!(bytes[..2] == [0; 2], "{number} has more than 48 bits");
    bytes[2..].try_into().expect("6 bytes")
}

fn entry_crc(key: &Key, fields: &[u8]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(&key.0);
    crc.update(fields);
    crc.finalize()
}

/// Owners by the numbers that entries name them with. A number is an owner's for as long as the
/// index is open, since earlier snapshots may still name it; on disk only for as long as a block
/// is the owner's.
#[derive(Debug, Default)]
pub(super) struct OwnerNumbers(RwLock<Numbers>);

#[derive(Debug, Default)]
struct Numbers {
    by_number: BTreeMap<u32, Owner>,
    by_owner: BTreeMap<Owner, u32>,
}

impl OwnerNumbers {
    pub(super) fn owner(&self, number: u32) -> Option<Owner> {
        let numbers = self.0.read().expect("no panic while the lock is held");
        numbers.by_number.get(&number).copied()
    }

    pub(super) fn set(&self, owner: Owner, number: u32) {
        let mut numbers = self.0.write().expect("no panic while the lock is held");
        numbers.by_number.insert(number, owner);
        numbers.by_owner.insert(owner, number);
    }

    /// The number of `owner`; a new owner gets one.
    pub(super) fn number(&self, owner: &Owner) -> u32 {
        let known = {
            let numbers = self.0.read().expect("no panic while the lock is held");
            let last = numbers.by_number.keys().next_back();
            numbers.by_owner.get(owner).copied().ok_or(last.map_or(0, |last| last + 1))
        };
        known.unwrap_or_else(|number| {
            self.set(*owner, number);
            number
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_reads_back() {
        let entry = IndexEntry {
            segment: 1 << 40,
            offset: 7,
            len_bytes: 65_536,
            kind: BlockKind::Signed,
            version: u64::MAX,
            expires_unix_secs: 12,
            sequence: 99,
            owner: Owner { publisher: [4; 16], ip: [5; 16] },
        };
        let key = Key([3; 64]);
        let owners = OwnerNumbers::default();
        let number = owners.number(&entry.owner);
        assert_ne!(owners.number(&Owner::NOBODY), number);
        assert_eq!(owners.number(&entry.owner), number);
        let encoded = entry.encode(&key, number);
        assert_eq!(IndexEntry::decode(&key, &encoded, &owners).expect("valid"), entry);
        for bit in 0..ENTRY_BYTES * 8 {
            let mut bytes = encoded;
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(IndexEntry::decode(&key, &bytes, &owners).is_err(), "bit {bit}");
        }
        assert!(IndexEntry::decode(&Key([4; 64]), &encoded, &owners).is_err(), "another's");
        assert!(IndexEntry::decode(&key, &encoded, &OwnerNumbers::default()).is_err(), "nobody's");
    }
}
