//! One version of an inode, and what its writer had seen when writing it.

use bytes::Bytes;

use super::access::Certificate;
use super::{CertifiedBlock, Fields};
use crate::identity::{SecretKey, UserId};
use crate::kinds::InvalidBlock;
use crate::ring::Key;

/// The most entries of a context; see the folder's comment. A guess: 3 KiB.
pub const MAX_CONTEXT: usize = 128;
/// The longest payload of a sibling, bytes: [`MAX_SIBLINGS`](super::MAX_SIBLINGS) of them fit a block.
pub const MAX_PAYLOAD_BYTES: usize = 60 << 10;
/// The longest payload of a removal, bytes: where what was removed is found, and no more.
pub const MAX_REMOVAL_PAYLOAD_BYTES: usize = 64;
/// Heights lie below: they have 40 bits in a block's version.
pub(super) const MAX_HEIGHT: u64 = 1 << 40;
/// A sibling's height is at most its time divided by this. So no writer can use up the heights of an
/// inode, and one can be written 31 times a second for ever: heights reach [`MAX_HEIGHT`] in the year
/// 3084.
pub(super) const MS_PER_HEIGHT: u64 = 32;

const SIBLING_CONTEXT: &[u8] = b"atoll v1 certified sibling\0";
const INODE: u8 = 1;
const REMOVAL: u8 = 2;
/// How much of a writer's name is the beginning of its user's public key.
const USER_PREFIX_BYTES: usize = 8;

/// One series of writes, each of which had seen those before it: a mount. The first 8 bytes are those
/// of the user's public key, so that nobody writes in another's name; the rest is drawn at random.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct WriterId([u8; 16]);

impl WriterId {
    /// A writer of this user's.
    pub fn new(user: &UserId, random: [u8; 8]) -> WriterId {
        let mut id = [0; 16];
        id[..USER_PREFIX_BYTES].copy_from_slice(&user.0[..USER_PREFIX_BYTES]);
        id[USER_PREFIX_BYTES..].copy_from_slice(&random);
        WriterId(id)
    }

    /// From its 16 bytes.
    pub fn from_bytes(bytes: [u8; 16]) -> WriterId {
        WriterId(bytes)
    }

    /// Its 16 bytes.
    pub fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// How its user's public key begins.
    pub fn user_prefix(&self) -> [u8; USER_PREFIX_BYTES] {
        *self.0.first_chunk().expect("16 bytes")
    }

    fn is_of(&self, user: &UserId) -> bool {
        self.0[..USER_PREFIX_BYTES] == user.0[..USER_PREFIX_BYTES]
    }
}

/// Names one sibling of an inode. A writer's heights ascend.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Dot {
    /// Who wrote it.
    pub writer: WriterId,
    /// One more than the greatest height that the writer had seen.
    pub height: u64,
}

/// What a writer had seen: of each writer all heights up to one.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Context {
    /// Ascending, one for each writer.
    seen: Vec<Dot>,
}

impl Context {
    /// Whether it includes the dot.
    pub fn includes(&self, dot: &Dot) -> bool {
        let found = self.seen.binary_search_by_key(&dot.writer, |seen| seen.writer);
        found.is_ok_and(|at| self.seen[at].height >= dot.height)
    }

    /// Also includes the dot from now on, and all of its writer's that are lower.
    fn add(&mut self, dot: Dot) {
        match self.seen.binary_search_by_key(&dot.writer, |seen| seen.writer) {
            Ok(at) => self.seen[at].height = self.seen[at].height.max(dot.height),
            Err(at) => self.seen.insert(at, dot),
        }
    }

    /// All that the writers of these siblings had seen, and the siblings. Of more than
    /// [`MAX_CONTEXT`] writers those of the least heights are forgotten, but never the siblings' own
    /// dots: a sibling that is forgotten is not covered, and a hostile context can name any writers.
    pub(super) fn of(siblings: &[Sibling]) -> Context {
        let mut context = Context::default();
        for sibling in siblings {
            sibling.context.seen.iter().for_each(|dot| context.add(*dot));
            context.add(sibling.dot);
        }
        let superfluous = context.seen.len().saturating_sub(MAX_CONTEXT);
        if superfluous > 0 {
            let is_old = |dot: &&Dot| siblings.iter().all(|one| one.dot.writer != dot.writer);
            let mut by_height: Vec<Dot> = context.seen.iter().filter(is_old).copied().collect();
            by_height.sort_unstable_by_key(|dot| (dot.height, dot.writer));
            let forgotten = &by_height[..superfluous];
            context.seen.retain(|dot| !forgotten.contains(dot));
        }
        context
    }
}

/// What a writer signs with.
#[derive(Clone, Debug)]
pub struct Author {
    /// The user's key.
    pub secret: SecretKey,
    /// That the user belongs to a group that may write.
    pub certificate: Certificate,
    /// The series of writes that this one continues: it has seen all others of it, also those that
    /// were not acknowledged.
    pub writer: WriterId,
}

/// What a sibling says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Said<'a> {
    /// What the inode is.
    Inode(&'a [u8]),
    /// That it has been removed.
    Removal(&'a [u8]),
}

impl Said<'_> {
    fn payload(&self) -> &[u8] {
        match self {
            Said::Inode(payload) | Said::Removal(payload) => payload,
        }
    }

    fn fits(&self) -> bool {
        match self {
            Said::Inode(payload) => payload.len() <= MAX_PAYLOAD_BYTES,
            Said::Removal(payload) => payload.len() <= MAX_REMOVAL_PAYLOAD_BYTES,
        }
    }
}

/// One version of an inode.
///
/// | bytes | field |
/// |---|---|
/// | 4 | length of the rest |
/// | 1 | form: 1 an inode, 2 its removal |
/// | 4 | version of the binding: 0 the block's own, else that of a rebinding |
/// | 144 | [`Certificate`] |
/// | 16 + 8 | dot: writer, height |
/// | 8 | when it was written, milliseconds since 1970; at least 32 for each height |
/// | 1 | number *n* of entries of the context, at most 128 |
/// | 24 n | the entries: writer, height; writers ascending |
/// | … | payload, at most 60 KiB; of a removal at most 64 bytes |
/// | 64 | signature of `"atoll v1 certified sibling\0"`, the inode's key (32 bytes) and all bytes from the form on |
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Sibling {
    /// Whether it says that the inode has been removed.
    pub is_removal: bool,
    /// The version of the binding under which it was written.
    pub binding_version: u32,
    /// That its writer may write.
    pub certificate: Certificate,
    /// Its name.
    pub dot: Dot,
    /// When it was written, by the writer's clock, milliseconds since 1970.
    pub time_ms: u64,
    /// What its writer had seen.
    pub context: Context,
    /// What the inode is; of a removal, what its writer left of it.
    pub payload: Bytes,
    encoded: Bytes,
}

impl Sibling {
    /// Signs the next version of an inode; `seen` are the siblings that it takes the place of. Its time
    /// is the first that its height may have, if that is later.
    pub(super) fn sign(
        author: &Author,
        inode: &Key,
        (binding_version, seen): (u32, &[Sibling]),
        time_ms: u64,
        said: Said<'_>,
    ) -> Option<Sibling> {
        let height = seen.iter().map(|sibling| sibling.dot.height).max().unwrap_or(0) + 1;
        let context = Context::of(seen);
        let is_author = author.certificate.user == UserId(author.secret.public());
        if !said.fits() || height >= MAX_HEIGHT || !is_author {
            return None;
        }
        let time_ms = time_ms.max(height * MS_PER_HEIGHT);
        let mut out = vec![0; 4];
        out.push(if matches!(said, Said::Inode(_)) { INODE } else { REMOVAL });
        out.extend_from_slice(&binding_version.to_be_bytes());
        author.certificate.encode(&mut out);
        out.extend_from_slice(&author.writer.0);
        out.extend_from_slice(&height.to_be_bytes());
        out.extend_from_slice(&time_ms.to_be_bytes());
        out.push(context.seen.len() as u8);
        for dot in &context.seen {
            out.extend_from_slice(&dot.writer.0);
            out.extend_from_slice(&dot.height.to_be_bytes());
        }
        out.extend_from_slice(said.payload());
        let signature = author.secret.sign(&message(inode, &out[4..]));
        out.extend_from_slice(&signature);
        let len = u32::try_from(out.len() - 4).expect("a payload is short");
        out[..4].copy_from_slice(&len.to_be_bytes());
        let encoded = Bytes::from(out);
        Some(Sibling::decode(&mut Fields::new(&encoded)).expect("it was just written"))
    }

    /// Reads a sibling; its signatures are not checked.
    pub(super) fn decode(fields: &mut Fields<'_>) -> Result<Sibling, InvalidBlock> {
        let from = fields.at;
        let len = fields.u32()? as usize;
        let body = fields.take(len)?;
        let encoded = fields.bytes.slice(from..fields.at);
        let mut fields = Fields::new(&body);
        let form = fields.u8()?;
        let binding_version = fields.u32()?;
        let certificate = Certificate::decode(&fields.array()?);
        let dot = decode_dot(&mut fields)?;
        let time_ms = fields.u64()?;
        if dot.height > time_ms / MS_PER_HEIGHT {
            return Err(InvalidBlock::Malformed("a height before its time"));
        }
        let count = usize::from(fields.u8()?);
        if count > MAX_CONTEXT {
            return Err(InvalidBlock::Malformed("a context of too many entries"));
        }
        let seen: Result<Vec<Dot>, _> = (0..count).map(|_| decode_dot(&mut fields)).collect();
        let seen = seen?;
        if !seen.windows(2).all(|pair| pair[0].writer < pair[1].writer) {
            return Err(InvalidBlock::Malformed("a context not in order"));
        }
        if seen.iter().any(|seen| seen.height >= dot.height) {
            return Err(InvalidBlock::Malformed("a context above its writer"));
        }
        let payload_bytes = fields.left().checked_sub(64);
        let payload_bytes = payload_bytes.ok_or(InvalidBlock::Malformed("cut short"))?;
        let payload = fields.take(payload_bytes)?;
        let said = match form {
            INODE => Said::Inode(&payload),
            REMOVAL => Said::Removal(&payload),
            _ => return Err(InvalidBlock::Malformed("unknown form")),
        };
        if !said.fits() {
            return Err(InvalidBlock::Malformed("a payload of a wrong length"));
        }
        let context = Context { seen };
        let is_removal = form == REMOVAL;
        Ok(Sibling {
            is_removal,
            binding_version,
            certificate,
            dot,
            time_ms,
            context,
            payload,
            encoded,
        })
    }

    /// Checks the chain from `block`'s groups to the writer, and the writer's signature.
    pub(super) fn verify(&self, block: &CertifiedBlock) -> Result<(), InvalidBlock> {
        let groups = block.groups_of(self.binding_version);
        let groups = groups.ok_or(InvalidBlock::Malformed("a sibling of an unknown binding"))?;
        if !groups.contains(&self.certificate.group) {
            return Err(InvalidBlock::Malformed("a sibling of a group that may not write"));
        }
        if !self.certificate.is_valid_at(self.time_ms / 1000) {
            return Err(InvalidBlock::Malformed("a sibling written without a certificate"));
        }
        if !self.dot.writer.is_of(&self.certificate.user) {
            return Err(InvalidBlock::Malformed("a sibling in another's name"));
        }
        let (signed, signature) = self.encoded[4..].split_at(self.encoded.len() - 4 - 64);
        let signature = signature.try_into().expect("64 bytes");
        let is_signed = self.certificate.user.verify(&message(&block.key(), signed), signature);
        if is_signed && self.certificate.is_signed() {
            Ok(())
        } else {
            Err(InvalidBlock::WrongSignature)
        }
    }

    /// Whether its writer had seen the other one and has taken its place.
    pub(super) fn covers(&self, other: &Sibling) -> bool {
        self.dot.height > other.dot.height
            && self.binding_version >= other.binding_version
            && self.context.includes(&other.dot)
    }

    /// The bytes that are stored and sent.
    pub(super) fn encoded(&self) -> &Bytes {
        &self.encoded
    }
}

fn message(inode: &Key, signed: &[u8]) -> Vec<u8> {
    [SIBLING_CONTEXT, &inode.0[..32], signed].concat()
}

fn decode_dot(fields: &mut Fields<'_>) -> Result<Dot, InvalidBlock> {
    let dot = Dot { writer: WriterId(fields.array()?), height: fields.u64()? };
    if (1..MAX_HEIGHT).contains(&dot.height) {
        Ok(dot)
    } else {
        Err(InvalidBlock::Malformed("an impossible height"))
    }
}
