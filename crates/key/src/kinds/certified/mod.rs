//! Certified blocks: one inode of a shared volume each, written by many (Pastis §3.1, §3.4).
//!
//! Pastis keeps an inode in a *User Certificate Block*: a writer signs the new version and shows a
//! certificate, signed with the inode's key, that allows it. Of two concurrent versions the
//! one with the later time stays, and the other is lost. Atoll departs from that in two places:
//!
//! - **The name of the block is the hash of its [`Binding`]**, which lists the groups that may write
//!   it. So the first link of the chain inode → group → user needs no signature and no key of the
//!   inode that somebody would have to keep; a [`Certificate`] is the second link, and the writer's
//!   own signature the third.
//! - **Concurrent versions are joined.** A block is a set of [`Sibling`]s, each signed by its writer.
//!   A sibling names the siblings that its writer had seen (its [`Context`]), and *covers* them:
//!   covered siblings are dropped, all others stay, whatever their clocks say. This is the dotted
//!   version vector of Preguiça et al. 2010 (arXiv:1011.5808), with a height as counter.
//!
//! # Covering
//!
//! Each sibling has a [`Dot`]: its writer and its height, which is one more than the greatest height
//! that its writer had seen. Sibling *a* covers sibling *b* if *a*'s context includes *b*'s dot, *a*
//! is higher than *b*, and *a* was not written under an older binding than *b*. Joining two blocks
//! keeps the siblings of both that none of the others covers. Joining is commutative and idempotent,
//! and replicas that exchange their blocks come to hold the same one.
//!
//! A context has at most [`MAX_CONTEXT`] entries; those of the least height are left out. A sibling
//! whose entry was left out and that some replica still held comes back as a conflict then: nothing
//! is lost by forgetting.
//!
//! # Version
//!
//! The version of a block is its greatest height (40 bits), then 24 bits of a hash of its siblings.
//! It never decreases above the hash when blocks are joined; two different blocks of one height are
//! equally new, and both are needed ([`super::BlockKind::joins`]).
//!
//! # What is checked, and when
//!
//! [`verify`](super::BlockKind::verify) checks the whole chain, and each certificate against the time
//! that the sibling's writer signed: a file does not vanish because its last writer's certificate has
//! run out. [`admit`](super::BlockKind::admit) checks besides what only a replica that receives a
//! *fresh* sibling can: that its time is now, and that it is written under the newest binding. What
//! comes from another node is not fresh; only a time that has not come yet is refused there as well,
//! since heights are bounded by times. Hence a removed member can add a sibling with a false time from
//! before, as a copy, but after a rebinding cannot cover what others have written.
//!
//! It does not know what a payload means, nor who should be in a group.

mod access;
mod block;
mod release;
mod sibling;
#[cfg(test)]
mod tests;

pub use access::{Binding, CERTIFICATE_BYTES, Certificate, MAX_GROUPS, Rebinding};
pub use block::{CertifiedBlock, MAX_ADMITTED_SIBLINGS, MAX_SIBLINGS};
pub use release::{InodeRelease, MIN_RELEASED_LEASE_SECS};
pub use sibling::{
    Author, Context, Dot, MAX_CONTEXT, MAX_PAYLOAD_BYTES, MAX_REMOVAL_PAYLOAD_BYTES, Sibling,
    WriterId,
};

use bytes::Bytes;

use super::{InvalidBlock, NotAdmitted, QuotaClass, Rules};
use crate::ring::Key;

/// How far a fresh sibling's time may be from the replica's, milliseconds. The clocks of a network
/// are compared with each other, so more than that is a wrong clock or a false time. A guess.
pub(super) const CLOCK_SLACK_MS: u64 = 10 * 60 * 1000;

pub(super) struct Certified;

impl Rules for Certified {
    fn verify(&self, key: &Key, bytes: &[u8]) -> Result<u64, InvalidBlock> {
        let block = CertifiedBlock::decode(&Bytes::copy_from_slice(bytes))?;
        if block.key() == *key { Ok(block.version()) } else { Err(InvalidBlock::WrongHash) }
    }

    fn is_mutable(&self) -> bool {
        true
    }

    fn joins(&self) -> bool {
        true
    }

    /// Neither version makes the other superfluous.
    fn supersedes(&self, _: u64, _: u64) -> bool {
        false
    }

    fn rank(&self, version: u64) -> u64 {
        version >> block::HASH_BITS
    }

    fn join(&self, held: &[u8], offered: &[u8]) -> Option<(Vec<u8>, u64)> {
        let decode = |bytes: &[u8]| CertifiedBlock::decode_verified(&Bytes::copy_from_slice(bytes));
        let (held, offered) = (decode(held).ok()?, decode(offered).ok()?);
        let joined = held.join(&offered)?;
        Some((joined.bytes().to_vec(), joined.version()))
    }

    fn admit(&self, held: Option<&[u8]>, offered: &[u8], now_ms: u64) -> Result<(), NotAdmitted> {
        let decode = |bytes: &[u8]| CertifiedBlock::decode_verified(&Bytes::copy_from_slice(bytes));
        let offered = decode(offered).map_err(|_| NotAdmitted::Outdated)?;
        let held = held.and_then(|held| decode(held).ok());
        let known = |sibling: &&Sibling| {
            held.as_ref().is_some_and(|held| held.siblings().contains(sibling))
        };
        let newest = held.iter().map(CertifiedBlock::binding_version).max().unwrap_or(0);
        let newest = newest.max(offered.binding_version());
        for fresh in offered.siblings().iter().filter(|sibling| !known(sibling)) {
            if fresh.time_ms.abs_diff(now_ms) > CLOCK_SLACK_MS {
                return Err(NotAdmitted::Clock { time_ms: fresh.time_ms, now_ms });
            }
            if !fresh.certificate.is_valid_at(now_ms / 1000) {
                return Err(NotAdmitted::Expired {
                    not_after_secs: fresh.certificate.not_after_secs,
                });
            }
            if fresh.binding_version < newest {
                return Err(NotAdmitted::Outdated);
            }
        }
        let joined = held.as_ref().and_then(|held| held.join(&offered));
        let siblings = joined.as_ref().unwrap_or(&offered).siblings();
        // Not those of writers who may have been shut out: copies of theirs may come at any time.
        let newest = siblings.iter().filter(|sibling| sibling.binding_version == newest);
        if newest.count() > MAX_ADMITTED_SIBLINGS { Err(NotAdmitted::Outdated) } else { Ok(()) }
    }

    fn admit_copy(&self, offered: &[u8], now_ms: u64) -> Result<(), NotAdmitted> {
        let offered = CertifiedBlock::decode_verified(&Bytes::copy_from_slice(offered));
        let times = offered.iter().flat_map(|block| block.siblings()).map(|one| one.time_ms);
        match times.max() {
            Some(time_ms) if time_ms > now_ms.saturating_add(CLOCK_SLACK_MS) => {
                Err(NotAdmitted::Clock { time_ms, now_ms })
            }
            _ => Ok(()),
        }
    }

    /// Few and small, and needed to say what a directory is now, also to remove something from it.
    fn quota_class(&self) -> QuotaClass {
        QuotaClass::Root
    }

    fn is_tombstone(&self, bytes: &[u8]) -> bool {
        let block = CertifiedBlock::decode_verified(&Bytes::copy_from_slice(bytes));
        block.is_ok_and(|block| block.siblings().iter().all(|sibling| sibling.is_removal))
    }
}

/// Reads fields one after the other; every length is checked before it is used.
struct Fields<'a> {
    bytes: &'a Bytes,
    at: usize,
}

impl<'a> Fields<'a> {
    fn new(bytes: &'a Bytes) -> Fields<'a> {
        Fields { bytes, at: 0 }
    }

    fn take(&mut self, len: usize) -> Result<Bytes, InvalidBlock> {
        let end = self.at.checked_add(len).filter(|end| *end <= self.bytes.len());
        let end = end.ok_or(InvalidBlock::Malformed("cut short"))?;
        Ok(self.bytes.slice(std::mem::replace(&mut self.at, end)..end))
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], InvalidBlock> {
        Ok(self.take(N)?[..].try_into().expect("so many bytes"))
    }

    fn u8(&mut self) -> Result<u8, InvalidBlock> {
        Ok(self.array::<1>()?[0])
    }

    fn u32(&mut self) -> Result<u32, InvalidBlock> {
        Ok(u32::from_be_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, InvalidBlock> {
        Ok(u64::from_be_bytes(self.array()?))
    }

    fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    fn end(self) -> Result<(), InvalidBlock> {
        if self.left() == 0 { Ok(()) } else { Err(InvalidBlock::Malformed("trailing bytes")) }
    }
}
