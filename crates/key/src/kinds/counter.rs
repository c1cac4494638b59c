//! A kind for tests: nothing outside this folder knows it, so a test that sends its blocks
//! through a crate shows that the crate asks a kind's rules and decides nothing by the kind.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 16 | name; its hash is the key |
//! | 16 | 8 | count: the version, big-endian |
//!
//! To differ from the other kinds in each rule, a count replaces only one that is at least
//! [`LEAST_STEP`] lower. Anybody may write a counter, so it must be in no network: it is compiled
//! for tests only.

use super::{InvalidBlock, QuotaClass, Rules};
use crate::ring::Key;

/// By how much a count must be higher to replace another.
pub const LEAST_STEP: u64 = 10;

pub(super) struct Counter;

/// The block with this name and count, and its key.
pub fn counter(name: &[u8; 16], count: u64) -> (Key, Vec<u8>) {
    (key(name), [&name[..], &count.to_be_bytes()].concat())
}

fn key(name: &[u8]) -> Key {
    Key::hashed(blake3::derive_key("atoll test counter", name))
}

impl Rules for Counter {
    fn verify(&self, key: &Key, bytes: &[u8]) -> Result<u64, InvalidBlock> {
        let (name, count) = bytes.split_at_checked(16).ok_or(InvalidBlock::Malformed("short"))?;
        let count = count.try_into().map_err(|_| InvalidBlock::Malformed("no count"))?;
        if self::key(name) != *key {
            return Err(InvalidBlock::WrongHash);
        }
        Ok(u64::from_be_bytes(count))
    }

    fn is_mutable(&self) -> bool {
        true
    }

    fn supersedes(&self, offered: u64, held: u64) -> bool {
        offered >= held.saturating_add(LEAST_STEP)
    }

    fn quota_class(&self) -> QuotaClass {
        QuotaClass::Data
    }

    /// The highest count of all.
    fn is_tombstone(&self, bytes: &[u8]) -> bool {
        bytes.ends_with(&u64::MAX.to_be_bytes())
    }
}
