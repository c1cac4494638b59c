//! The block: an inode's binding and its siblings, and how two blocks are joined.

use bytes::Bytes;

use super::Fields;
use super::access::{Binding, Rebinding};
use super::sibling::{Author, Dot, MAX_HEIGHT, Said, Sibling, WriterId};
use crate::hash;
use crate::identity::{GroupId, VolumeId};
use crate::kinds::{BlockId, BlockKind, InvalidBlock, MAX_BLOCK_BYTES};
use crate::ring::Key;

/// A replica takes no fresh sibling of which there would be more: its writer reads the inode first,
/// and covers what it has merged.
pub const MAX_ADMITTED_SIBLINGS: usize = 8;
/// The most siblings of a block. Both sides of a partition may have [`MAX_ADMITTED_SIBLINGS`]; of
/// more, from three sides or more, the lowest of the oldest bindings are dropped.
pub const MAX_SIBLINGS: usize = 2 * MAX_ADMITTED_SIBLINGS;
/// Those that siblings name, and a newer one.
const MAX_REBINDINGS: usize = MAX_SIBLINGS + 1;

const MAGIC: &[u8; 4] = b"ATCB";
const LAYOUT: u8 = 1;
/// Bits of a version below the height.
pub(super) const HASH_BITS: u32 = 24;

/// An inode: who may write it, and its concurrent versions.
///
/// | bytes | field |
/// |---|---|
/// | 4 | magic `ATCB` |
/// | 1 | layout, 1 |
/// | … | [`Binding`] |
/// | 1 | number of rebindings, at most 17 |
/// | … | [`Rebinding`]s, versions ascending: the newest, and those of siblings |
/// | 1 | number of siblings, 1 to 16 |
/// | … | [`Sibling`]s, bytes ascending; none covers another |
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CertifiedBlock {
    binding: Binding,
    key: Key,
    rebindings: Vec<Rebinding>,
    siblings: Vec<Sibling>,
    encoded: Bytes,
}

impl CertifiedBlock {
    /// The first version of a new inode. `None` if the author is not in one of its groups, the
    /// payload is too long, or the author's certificate is another user's.
    pub fn create(
        binding: Binding,
        author: &Author,
        time_ms: u64,
        payload: &[u8],
    ) -> Option<CertifiedBlock> {
        let key = binding.key();
        let sibling = Sibling::sign(author, &key, (0, &[]), time_ms, Said::Inode(payload))?;
        CertifiedBlock::signed(binding, key, Vec::new(), sibling)
    }

    /// The version that takes the place of all siblings of this block; `payload` is `None` if the
    /// inode is removed and nothing is left of it. Errors as of [`CertifiedBlock::create`].
    pub fn write(
        &self,
        author: &Author,
        time_ms: u64,
        payload: Option<&[u8]>,
    ) -> Option<CertifiedBlock> {
        let said = payload.map_or(Said::Removal(&[]), Said::Inode);
        self.say(author, time_ms, said)
    }

    /// The same for a removal that leaves `payload`, at most
    /// [`MAX_REMOVAL_PAYLOAD_BYTES`](super::MAX_REMOVAL_PAYLOAD_BYTES).
    pub fn remove(&self, author: &Author, time_ms: u64, payload: &[u8]) -> Option<CertifiedBlock> {
        self.say(author, time_ms, Said::Removal(payload))
    }

    /// What `sibling`, one of this block's, says, written anew under the newest binding: it takes the place of that one and
    /// of nothing else. Errors as of [`CertifiedBlock::create`].
    pub fn say_again(
        &self,
        sibling: &Sibling,
        author: &Author,
        time_ms: u64,
        payload: &[u8],
    ) -> Option<CertifiedBlock> {
        let said = match sibling.is_removal {
            true => Said::Removal(payload),
            false => Said::Inode(payload),
        };
        self.say_over(std::slice::from_ref(sibling), author, time_ms, said)
    }

    fn say(&self, author: &Author, time_ms: u64, said: Said<'_>) -> Option<CertifiedBlock> {
        self.say_over(&self.siblings, author, time_ms, said)
    }

    fn say_over(
        &self,
        replaced: &[Sibling],
        author: &Author,
        time_ms: u64,
        said: Said<'_>,
    ) -> Option<CertifiedBlock> {
        let seen = (self.binding_version(), replaced);
        let sibling = Sibling::sign(author, &self.key, seen, time_ms, said)?;
        CertifiedBlock::signed(self.binding.clone(), self.key, self.rebindings.clone(), sibling)
    }

    /// The dot of the version that `writer` would write in place of this block.
    pub fn next_dot(&self, writer: WriterId) -> Dot {
        Dot { writer, height: self.height() + 1 }
    }

    /// This block under a newer binding. A writer whom that excludes cannot cover what is written under
    /// it, so it takes effect with the first sibling that [`CertifiedBlock::write`] makes of the result.
    /// `None` if the volume's owner has not signed the rebinding, or it is not newer.
    pub fn rebound(&self, rebinding: Rebinding) -> Option<CertifiedBlock> {
        let is_newer = rebinding.version > self.binding_version();
        if !is_newer || !rebinding.is_signed_by(&self.binding.volume, &self.key) {
            return None;
        }
        let rebindings = self.rebindings.iter().cloned().chain([rebinding]).collect();
        CertifiedBlock::encode(self.binding.clone(), self.key, rebindings, self.siblings.clone())
    }

    fn signed(
        binding: Binding,
        key: Key,
        rebindings: Vec<Rebinding>,
        sibling: Sibling,
    ) -> Option<CertifiedBlock> {
        let block = CertifiedBlock::encode(binding, key, rebindings, vec![sibling])?;
        block.siblings[0].verify(&block).ok()?;
        Some(block)
    }

    /// Reads a block and checks it and its signatures. Payloads are slices of `bytes`.
    pub fn decode(bytes: &Bytes) -> Result<CertifiedBlock, InvalidBlock> {
        let block = CertifiedBlock::decode_verified(bytes)?;
        let volume = &block.binding.volume;
        if !block.rebindings.iter().all(|r| r.is_signed_by(volume, &block.key)) {
            return Err(InvalidBlock::WrongSignature);
        }
        block.siblings.iter().try_for_each(|sibling| sibling.verify(&block))?;
        Ok(block)
    }

    /// Reads a block whose signatures have been checked.
    pub fn decode_verified(bytes: &Bytes) -> Result<CertifiedBlock, InvalidBlock> {
        let malformed = |what| Err(InvalidBlock::Malformed(what));
        if bytes.len() > MAX_BLOCK_BYTES {
            return Err(InvalidBlock::TooLong(bytes.len()));
        }
        let mut fields = Fields::new(bytes);
        if &fields.array::<4>()? != MAGIC {
            return malformed("no magic");
        }
        if fields.u8()? != LAYOUT {
            return malformed("unknown layout");
        }
        let binding = Binding::decode(&mut fields)?;
        let count = usize::from(fields.u8()?);
        if count > MAX_REBINDINGS {
            return malformed("too many rebindings");
        }
        let rebindings: Result<Vec<Rebinding>, _> =
            (0..count).map(|_| Rebinding::decode(&mut fields)).collect();
        let count = usize::from(fields.u8()?);
        if !(1..=MAX_SIBLINGS).contains(&count) {
            return malformed("no siblings, or too many");
        }
        let siblings: Result<Vec<Sibling>, _> =
            (0..count).map(|_| Sibling::decode(&mut fields)).collect();
        fields.end()?;
        let key = binding.key();
        let block = CertifiedBlock::encode(binding, key, rebindings?, siblings?);
        // A block has one encoding.
        let block = block.filter(|block| block.encoded == *bytes);
        block.ok_or(InvalidBlock::Malformed("not in order, or with superfluous parts"))
    }

    /// A block of these parts without those that are superfluous.
    fn encode(
        binding: Binding,
        key: Key,
        mut rebindings: Vec<Rebinding>,
        siblings: Vec<Sibling>,
    ) -> Option<CertifiedBlock> {
        let is_covered = |one: &Sibling| siblings.iter().any(|other| other.covers(one));
        let mut siblings: Vec<Sibling> =
            siblings.iter().filter(|one| !is_covered(one)).cloned().collect();
        siblings.sort_by(|a, b| a.encoded().cmp(b.encoded()));
        siblings.dedup();
        if siblings.len() > MAX_SIBLINGS {
            // An excluded writer can sign any number of siblings of any height: the binding decides
            // first.
            let age = |one: &Sibling| std::cmp::Reverse((one.binding_version, one.dot.height));
            siblings.sort_by(|a, b| age(a).cmp(&age(b)).then_with(|| a.encoded().cmp(b.encoded())));
            siblings.truncate(MAX_SIBLINGS);
            siblings.sort_by(|a, b| a.encoded().cmp(b.encoded()));
        }
        rebindings.sort_by_key(|rebinding| rebinding.version);
        let newest = rebindings.last().map(|rebinding| rebinding.version);
        rebindings.retain(|rebinding| {
            let is_of = |sibling: &Sibling| sibling.binding_version == rebinding.version;
            Some(rebinding.version) == newest || siblings.iter().any(is_of)
        });
        let ascend = rebindings.windows(2).all(|pair| pair[0].version < pair[1].version);
        if siblings.is_empty() || !ascend || rebindings.len() > MAX_REBINDINGS {
            return None;
        }
        let mut out = MAGIC.to_vec();
        out.push(LAYOUT);
        binding.encode(&mut out);
        out.push(rebindings.len() as u8);
        rebindings.iter().for_each(|rebinding| rebinding.encode(&mut out));
        out.push(siblings.len() as u8);
        siblings.iter().for_each(|sibling| out.extend_from_slice(sibling.encoded()));
        let encoded = Bytes::from(out);
        Some(CertifiedBlock { binding, key, rebindings, siblings, encoded })
    }

    /// What both blocks say of one inode: the siblings of both that no other covers. `None` if they
    /// are of different inodes. Of two rebindings of one version, which an owner should not sign, that
    /// of the higher signature counts, and siblings that it does not allow are dropped.
    pub fn join(&self, other: &CertifiedBlock) -> Option<CertifiedBlock> {
        if self.key != other.key {
            return None;
        }
        let mut rebindings: Vec<Rebinding> = self.rebindings.clone();
        for theirs in &other.rebindings {
            match rebindings.iter_mut().find(|ours| ours.version == theirs.version) {
                Some(ours) if ours.order() < theirs.order() => *ours = theirs.clone(),
                Some(_) => {}
                None => rebindings.push(theirs.clone()),
            }
        }
        let groups = |version: u32| match version {
            0 => Some(self.binding.groups()),
            _ => rebindings.iter().find(|r| r.version == version).map(Rebinding::groups),
        };
        let may_write = |sibling: &&Sibling| {
            groups(sibling.binding_version)
                .is_some_and(|groups| groups.contains(&sibling.certificate.group))
        };
        let siblings = self.siblings.iter().chain(&other.siblings).filter(may_write);
        let siblings: Vec<Sibling> = siblings.cloned().collect();
        CertifiedBlock::encode(self.binding.clone(), self.key, rebindings, siblings)
    }

    /// Whether this block has all that the other says, or has covered it.
    pub fn includes(&self, other: &CertifiedBlock) -> bool {
        self.join(other).is_some_and(|joined| joined.encoded == self.encoded)
    }

    /// The newest rebinding, if there is one.
    pub fn rebinding(&self) -> Option<&Rebinding> {
        self.rebindings.last()
    }

    /// The version of the newest binding: 0, or that of a rebinding.
    pub fn binding_version(&self) -> u32 {
        self.rebindings.last().map_or(0, |rebinding| rebinding.version)
    }

    /// The volume that the inode belongs to.
    pub fn volume(&self) -> VolumeId {
        self.binding.volume
    }

    /// The groups that may write it now.
    pub fn groups(&self) -> &[GroupId] {
        self.groups_of(self.binding_version()).expect("the newest is there")
    }

    /// What its name commits to.
    pub fn binding(&self) -> &Binding {
        &self.binding
    }

    /// The rebinding that counts, if there is one.
    pub fn newest_rebinding(&self) -> Option<&Rebinding> {
        self.rebindings.last()
    }

    pub(super) fn groups_of(&self, version: u32) -> Option<&[GroupId]> {
        match version {
            0 => Some(self.binding.groups()),
            _ => self.rebindings.iter().find(|r| r.version == version).map(Rebinding::groups),
        }
    }

    /// Its concurrent versions; at least one.
    pub fn siblings(&self) -> &[Sibling] {
        &self.siblings
    }

    /// The greatest height of its siblings.
    pub fn height(&self) -> u64 {
        self.siblings.iter().map(|sibling| sibling.dot.height).max().expect("there is one")
    }

    /// See the folder's comment.
    pub fn version(&self) -> u64 {
        debug_assert!(self.height() < MAX_HEIGHT);
        let hash = hash::state_hash(&self.encoded);
        let low = u32::from_be_bytes(hash[..4].try_into().expect("4 bytes")) >> (32 - HASH_BITS);
        self.height() << HASH_BITS | u64::from(low)
    }

    /// Where it lives on the ring.
    pub fn key(&self) -> Key {
        self.key
    }

    /// What names it.
    pub fn id(&self) -> BlockId {
        CertifiedBlock::id_at(self.key)
    }

    /// What names the certified block that lives there.
    pub fn id_at(key: Key) -> BlockId {
        BlockId { kind: BlockKind::Certified, key }
    }

    /// The bytes that are stored and sent.
    pub fn bytes(&self) -> &Bytes {
        &self.encoded
    }
}
