//! Who may write an inode: the chain inode → group → user (Pastis §3.4).
//!
//! A [`Binding`] names an inode and the groups that may write it; its hash is the block's key, so it
//! never changes. The volume's owner may replace the groups by a [`Rebinding`], which is how a member
//! is locked out at once: a new group, with new certificates for those who stay. A [`Certificate`]
//! says that a user belongs to a group for a time.

use super::Fields;
use crate::hash;
use crate::identity::{GroupId, SecretKey, UserId, VolumeId};
use crate::kinds::InvalidBlock;
use crate::ring::Key;

/// The most groups that may write one inode.
pub const MAX_GROUPS: usize = 8;
/// Bytes of a [`Certificate`].
pub const CERTIFICATE_BYTES: usize = 32 + 32 + 8 + 8 + 64;

const CERTIFICATE_CONTEXT: &[u8] = b"atoll v1 certificate\0";
const REBINDING_CONTEXT: &[u8] = b"atoll v1 rebinding\0";

/// An inode's name and its first groups.
///
/// | bytes | field |
/// |---|---|
/// | 32 | the volume's public key: it signs rebindings |
/// | 16 | number, drawn at random: tells inodes with the same groups apart |
/// | 1 | number *n* of groups, 1 to 8 |
/// | 32 n | the groups' public keys, ascending |
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Binding {
    /// The volume's owner.
    pub volume: VolumeId,
    /// Drawn at random.
    pub number: [u8; 16],
    groups: Vec<GroupId>,
}

impl Binding {
    /// An inode that members of these groups may write. `None` if there are none, or more than
    /// [`MAX_GROUPS`].
    pub fn new(volume: VolumeId, number: [u8; 16], groups: &[GroupId]) -> Option<Binding> {
        Some(Binding { volume, number, groups: in_order(groups)? })
    }

    /// The groups that may write it, unless a rebinding says otherwise.
    pub fn groups(&self) -> &[GroupId] {
        &self.groups
    }

    /// Where the inode lives on the ring.
    pub fn key(&self) -> Key {
        let mut bytes = Vec::new();
        self.encode(&mut bytes);
        hash::inode_key(&bytes)
    }

    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.volume.0);
        out.extend_from_slice(&self.number);
        encode_groups(&self.groups, out);
    }

    pub(super) fn decode(fields: &mut Fields<'_>) -> Result<Binding, InvalidBlock> {
        let (volume, number) = (VolumeId(fields.array()?), fields.array()?);
        Ok(Binding { volume, number, groups: decode_groups(fields)? })
    }
}

/// The groups that may write an inode from now on, signed by the volume's owner.
///
/// | bytes | field |
/// |---|---|
/// | 4 | version, at least 1; the highest counts |
/// | 1 | number *n* of groups, 1 to 8 |
/// | 32 n | the groups' public keys, ascending |
/// | 64 | signature of `"atoll v1 rebinding\0"`, the inode's key (32 bytes) and all bytes before it |
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rebinding {
    /// Higher replaces lower.
    pub version: u32,
    groups: Vec<GroupId>,
    signature: [u8; 64],
}

impl Rebinding {
    /// Binds the inode to other groups. `None` if there are none or too many, or the version is 0.
    pub fn sign(
        volume: &SecretKey,
        inode: &Key,
        version: u32,
        groups: &[GroupId],
    ) -> Option<Rebinding> {
        let groups = in_order(groups).filter(|_| version > 0)?;
        let mut rebinding = Rebinding { version, groups, signature: [0; 64] };
        rebinding.signature = volume.sign(&rebinding.message(inode));
        Some(rebinding)
    }

    /// The groups that may write the inode.
    pub fn groups(&self) -> &[GroupId] {
        &self.groups
    }

    fn message(&self, inode: &Key) -> Vec<u8> {
        let mut message = [REBINDING_CONTEXT, &inode.0[..32]].concat();
        self.encode_unsigned(&mut message);
        message
    }

    /// Decides between two of one version.
    pub(super) fn order(&self) -> &[u8; 64] {
        &self.signature
    }

    pub(super) fn is_signed_by(&self, volume: &VolumeId, inode: &Key) -> bool {
        volume.verify(&self.message(inode), &self.signature)
    }

    fn encode_unsigned(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.version.to_be_bytes());
        encode_groups(&self.groups, out);
    }

    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        self.encode_unsigned(out);
        out.extend_from_slice(&self.signature);
    }

    pub(super) fn decode(fields: &mut Fields<'_>) -> Result<Rebinding, InvalidBlock> {
        let version = fields.u32()?;
        if version == 0 {
            return Err(InvalidBlock::Malformed("a rebinding of version 0"));
        }
        let groups = decode_groups(fields)?;
        Ok(Rebinding { version, groups, signature: fields.array()? })
    }
}

/// Says that a user belongs to a group for a time, signed by the group's owner.
///
/// | bytes | field |
/// |---|---|
/// | 32 | the group's public key |
/// | 32 | the user's public key |
/// | 8 | from when, seconds since 1970 |
/// | 8 | until when, inclusive |
/// | 64 | signature of `"atoll v1 certificate\0"` and all bytes before it, by the group's key |
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Certificate {
    /// Which group.
    pub group: GroupId,
    /// Who belongs to it.
    pub user: UserId,
    /// From when, seconds since 1970.
    pub not_before_secs: u64,
    /// Until when, seconds since 1970, inclusive.
    pub not_after_secs: u64,
    pub(super) signature: [u8; 64],
}

impl Certificate {
    /// Issues a certificate.
    pub fn issue(
        group: &SecretKey,
        user: UserId,
        not_before_secs: u64,
        not_after_secs: u64,
    ) -> Certificate {
        let (group_id, signature) = (GroupId(group.public()), [0; 64]);
        let unsigned =
            Certificate { group: group_id, user, not_before_secs, not_after_secs, signature };
        Certificate { signature: group.sign(&unsigned.message()), ..unsigned }
    }

    /// Whether the group's owner has signed it.
    pub fn is_signed(&self) -> bool {
        self.group.verify(&self.message(), &self.signature)
    }

    /// Whether it holds at that time, seconds since 1970.
    pub fn is_valid_at(&self, secs: u64) -> bool {
        (self.not_before_secs..=self.not_after_secs).contains(&secs)
    }

    fn message(&self) -> Vec<u8> {
        let mut message = CERTIFICATE_CONTEXT.to_vec();
        self.encode_unsigned(&mut message);
        message
    }

    fn encode_unsigned(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.group.0);
        out.extend_from_slice(&self.user.0);
        out.extend_from_slice(&self.not_before_secs.to_be_bytes());
        out.extend_from_slice(&self.not_after_secs.to_be_bytes());
    }

    /// Its bytes, as the table says.
    pub fn encode(&self, out: &mut Vec<u8>) {
        self.encode_unsigned(out);
        out.extend_from_slice(&self.signature);
    }

    /// Reads its bytes. The signature is not checked ([`Certificate::is_signed`]).
    pub fn decode(bytes: &[u8; CERTIFICATE_BYTES]) -> Certificate {
        let (group, rest) = bytes.split_at(32);
        let (user, rest) = rest.split_at(32);
        let (not_before, rest) = rest.split_at(8);
        let (not_after, signature) = rest.split_at(8);
        let secs = |bytes: &[u8]| u64::from_be_bytes(bytes.try_into().expect("8 bytes"));
        Certificate {
            group: GroupId(group.try_into().expect("32 bytes")),
            user: UserId(user.try_into().expect("32 bytes")),
            not_before_secs: secs(not_before),
            not_after_secs: secs(not_after),
            signature: signature.try_into().expect("64 bytes"),
        }
    }
}

fn in_order(groups: &[GroupId]) -> Option<Vec<GroupId>> {
    let mut groups = groups.to_vec();
    groups.sort_unstable();
    groups.dedup();
    (1..=MAX_GROUPS).contains(&groups.len()).then_some(groups)
}

fn encode_groups(groups: &[GroupId], out: &mut Vec<u8>) {
    out.push(groups.len() as u8);
    groups.iter().for_each(|group| out.extend_from_slice(&group.0));
}

fn decode_groups(fields: &mut Fields<'_>) -> Result<Vec<GroupId>, InvalidBlock> {
    let count = usize::from(fields.u8()?);
    if !(1..=MAX_GROUPS).contains(&count) {
        return Err(InvalidBlock::Malformed("no groups, or too many"));
    }
    let groups: Result<Vec<GroupId>, _> = (0..count).map(|_| fields.array().map(GroupId)).collect();
    let groups = groups?;
    let ascend = groups.windows(2).all(|pair| pair[0] < pair[1]);
    if ascend { Ok(groups) } else { Err(InvalidBlock::Malformed("groups not in order")) }
}
