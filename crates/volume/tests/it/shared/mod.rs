//! Shared volumes (Pastis): inodes, and what concurrent versions of them say together.

mod access;
mod ahead;
mod conflicts;
mod conformance;
mod consistency;
mod encrypted;
mod entries;
mod follow;
mod fs;
mod full_ring;
mod given_up;
mod handles;
mod inodes;
mod keepers;
mod late;
mod leaves;
mod liars;
mod lock_order;
mod locks;
mod lost;
mod lost_locks;
mod merging;
mod model;
mod mounts;
mod newborns;
mod no_room;
mod offline;
mod offline_removed;
mod past;
mod places;
mod releases;
mod removals;
mod renamed_locked;
mod renames;
mod sealing;
mod spool_ends;
mod state;
mod states;
mod status;
mod stopped;
mod storm;
mod unseen;
mod upkeep;
mod written_meanwhile;

use atoll_key::kinds::certified::{Author, Binding, Certificate, CertifiedBlock, Dot, WriterId};
use atoll_key::{GroupId, SecretKey, UserId, VolumeId};
use atoll_vfs::FileKind;
use atoll_volume::shared::inode::{Attributes, Contents, Entry, Inode, InodeKey};
use bytes::Bytes;

/// Seconds since 1970, 2026-11-23 13:55:01 UTC.
const NOW_SECS: u64 = 1_795_442_101;
const NOW_MS: u64 = NOW_SECS * 1000;

fn secret(n: u8) -> SecretKey {
    SecretKey::from_seed(&[n; 32])
}

fn group() -> SecretKey {
    secret(100)
}

fn writer(n: u8) -> WriterId {
    WriterId::new(&UserId(secret(n).public()), [n; 8])
}

fn dot(n: u8, height: u64) -> Dot {
    Dot { writer: writer(n), height }
}

fn author(n: u8) -> Author {
    let user = UserId(secret(n).public());
    let certificate = Certificate::issue(&group(), user, 0, u64::MAX);
    Author { secret: secret(n), certificate, writer: writer(n) }
}

/// The first version of an inode, by user 1.
fn create(inode: &Inode) -> CertifiedBlock {
    let binding = Binding::new(VolumeId([1; 32]), [2; 16], &[GroupId(group().public())]);
    let payload = inode.encode().expect("short");
    CertifiedBlock::create(binding.expect("a group"), &author(1), NOW_MS, &payload).expect("signed")
}

fn write(seen: &CertifiedBlock, n: u8, inode: &Inode) -> CertifiedBlock {
    let payload = inode.encode().expect("short");
    seen.write(&author(n), NOW_MS, Some(&payload)).expect("a member")
}

fn joined(a: &CertifiedBlock, b: &CertifiedBlock) -> CertifiedBlock {
    a.join(b).expect("one inode")
}

fn inode(contents: Contents) -> Inode {
    Inode { attributes: Attributes::default(), links: [].into(), past: None, contents }
}

fn entry(name: &str, number: u8, added: Dot) -> Entry {
    let names = (InodeKey([number; 32]), FileKind::Regular);
    Entry::new(Bytes::copy_from_slice(name.as_bytes()), names, added, NOW_MS)
}
