//! Past versions of an inode: what it was before (beyond the paper: Pastis keeps no old version).
//!
//! When a version is replaced that is to be kept ([`Keep::kept_secs_after`]), its inode goes into a content
//! block of its own, together with the list of those before it. The next version refers to the newest
//! such block, so any earlier version is found by two fetches. Of the versions that were replaced within the finest unit
//! of the policy none is kept, unless that is a minute: then [`MAX_WITHIN_A_MINUTE`] are, of those whose
//! contents the next version lacks.
//!
//! | bytes | field |
//! |---|---|
//! | 4 | magic `ATPV` |
//! | 1 | layout, 1 |
//! | 8 + 8 + 8 | when it was written, when it was replaced, until when it is kept: milliseconds since 1970 |
//! | 32 | public key of the user who wrote it |
//! | 2 | number *n* of earlier ones, at most 512 |
//! | 56 n | earlier ones that were kept still, the newest first: three times as above, hash of the block |
//! | … | the [inode](super::inode), in the clear |
//!
//! A content block: in an encrypted volume it is sealed as others are.
//!
//! The block's lease is not renewed. It lasts two days longer than the block and what it lists are kept
//! ([`PastVersion::lease_secs`]), which is [`MAX_KEPT_SECS`](super::access::volume_record::MAX_KEPT_SECS) at most. Once
//! another block lists it, it is released: it is needed only as long as its own version is kept.
//!
//! The list is in the order of replacing, not of times: clocks of writers differ. It is the word of the
//! last writer, as the contents of a file are.
//!
//! It does not know how blocks are fetched: `inodes::past` does.

use std::cmp::Reverse;

use atoll_key::kinds::certified::{
    CertifiedBlock, MAX_PAYLOAD_BYTES, MIN_RELEASED_LEASE_SECS, Sibling,
};
use atoll_key::{BlockHash, UserId};
use bytes::Bytes;

use super::inode::{Contents, Entry, Inode};
use super::origin::Origin;
use super::standing::{Standing, Trusted};
use crate::format::FormatError;
use crate::format::cursor::{Cursor, put_header, put_u64};
use crate::keep::Keep;

const MAGIC: &[u8; 4] = b"ATPV";
const NAME: &str = "past version of an inode";
/// The most earlier versions that a block lists: 28 KiB. The default policy keeps 255 at most. Of more, those go that
/// were to be kept for the shortest time, of these the oldest.
pub const MAX_EARLIER: usize = 512;
/// How many versions of an inode are kept at a time that no full minute has seen. A guess: a person saves a file less often
/// within the hour for which they are kept, and a program that does it all the time costs one block a minute.
pub const MAX_WITHIN_A_MINUTE: usize = 16;
/// How much longer than what it lists a block is there: clocks differ. The ring keeps what is released as long.
const LEASE_MARGIN_SECS: u64 = MIN_RELEASED_LEASE_SECS as u64;
const EARLIER_BYTES: usize = 3 * 8 + 32;

/// What a removal leaves of an inode that has kept versions: layout, hash of the newest.
const LEFT_LAYOUT: u8 = 1;

/// The times of a past version, milliseconds since 1970.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span {
    /// When it was written, by its writer's clock.
    pub began_ms: u64,
    /// When it was replaced, by the clock of the next one's writer.
    pub ended_ms: u64,
    /// Until when it is kept.
    pub kept_until_ms: u64,
}

impl Span {
    /// Whether no full minute has seen the version.
    fn is_within_a_minute(&self) -> bool {
        Keep::is_within_a_minute(self.began_ms, self.ended_ms)
    }

    /// For how long the version is kept.
    fn kept_ms(&self) -> u64 {
        self.kept_until_ms.saturating_sub(self.ended_ms)
    }

    fn put(&self, out: &mut Vec<u8>) {
        let times = [self.began_ms, self.ended_ms, self.kept_until_ms];
        times.into_iter().for_each(|time| put_u64(out, time));
    }

    fn take(cursor: &mut Cursor) -> Result<Span, FormatError> {
        let (began_ms, ended_ms) = (cursor.u64()?, cursor.u64()?);
        Ok(Span { began_ms, ended_ms, kept_until_ms: cursor.u64()? })
    }
}

/// Where another past version is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Earlier {
    /// Its times.
    pub span: Span,
    /// Its block.
    pub hash: BlockHash,
}

/// See the module.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PastVersion {
    /// Its times.
    pub span: Span,
    /// The user who wrote it.
    pub user: UserId,
    /// Those before it, the newest first.
    pub earlier: Vec<Earlier>,
    /// The inode's bytes.
    pub payload: Bytes,
}

impl PastVersion {
    /// The block.
    pub fn encode(&self) -> Vec<u8> {
        let count = self.earlier.len().min(MAX_EARLIER);
        let mut out = Vec::with_capacity(80 + count * EARLIER_BYTES + self.payload.len());
        put_header(&mut out, MAGIC);
        self.span.put(&mut out);
        out.extend_from_slice(&self.user.0);
        out.extend_from_slice(&(count as u16).to_be_bytes());
        for Earlier { span, hash } in &self.earlier[..count] {
            span.put(&mut out);
            out.extend_from_slice(&hash.0);
        }
        out.extend_from_slice(&self.payload);
        out
    }

    /// Reads a block; [`PastVersion::inode`] reads the inode.
    ///
    /// # Errors
    /// If it is not one.
    pub fn decode(block: &Bytes) -> Result<PastVersion, FormatError> {
        let mut cursor = Cursor::header(block, MAGIC, NAME)?;
        let span = Span::take(&mut cursor)?;
        let user = UserId(cursor.array()?);
        let count = usize::from(cursor.u16()?);
        if count > MAX_EARLIER || count > cursor.len() / EARLIER_BYTES {
            return Err(FormatError::Truncated);
        }
        let mut earlier = Vec::with_capacity(count);
        for _ in 0..count {
            let span = Span::take(&mut cursor)?;
            earlier.push(Earlier { span, hash: cursor.hash()? });
        }
        let len = cursor.len();
        if len > MAX_PAYLOAD_BYTES {
            return Err(FormatError::TrailingBytes(len - MAX_PAYLOAD_BYTES));
        }
        Ok(PastVersion { span, user, earlier, payload: cursor.take(len)? })
    }

    /// What the inode was.
    ///
    /// # Errors
    /// If it is none.
    pub fn inode(&self) -> Result<Inode, FormatError> {
        Inode::decode(&self.payload)
    }

    /// How long the block is needed from when it is made.
    pub fn lease_secs(&self) -> u64 {
        let kept = self.earlier.iter().map(|one| one.span.kept_until_ms);
        let last_ms = kept.fold(self.span.kept_until_ms, u64::max);
        last_ms.saturating_sub(self.span.ended_ms) / 1000 + LEASE_MARGIN_SECS
    }

    /// Of this one and those before it, the newest that began before `time_ms`.
    pub fn before(&self, time_ms: u64) -> Option<(Span, Place)> {
        self.all().find(|(span, _)| span.began_ms < time_ms)
    }

    /// Of this one and those before it, the oldest of those that came after [`before`](PastVersion::before).
    pub fn after(&self, time_ms: u64) -> Option<(Span, Place)> {
        self.all().take_while(|(span, _)| span.began_ms >= time_ms).last()
    }

    /// This one and those before it, the newest first.
    fn all(&self) -> impl Iterator<Item = (Span, Place)> {
        let earlier = self.earlier.iter().map(|one| (one.span, Place::Earlier(one.hash)));
        std::iter::once((self.span, Place::Here)).chain(earlier)
    }

    /// Whether of the versions that follow, and are replaced within their minute at about `time_ms`, none is kept: there are
    /// too many like them.
    pub(super) fn is_followed_by_gap(&self, time_ms: u64) -> bool {
        let is_like = |span: &Span| span.is_within_a_minute() && span.kept_until_ms > time_ms;
        self.all().filter(|(span, _)| is_like(span)).count() >= MAX_WITHIN_A_MINUTE
    }
}

/// What an inode was just before `time_ms`, as far as `next` says it, the version that came next of those that are there. It
/// must have begun within the same minute. What was there between is not kept, because the version after it lacked nothing:
/// it had fewer names, other attributes, or was an empty file. So this is `next` without what was added since, but for its
/// attributes. `before`: the version before `next` that is there, if there was one. `is_whole`: all is there still that was
/// kept of the minute.
///
/// `None` if that is not certain.
pub fn before_next(
    next: &Inode,
    time_ms: u64,
    before: Option<&PastVersion>,
    is_whole: bool,
) -> Option<Inode> {
    let is_new = is_whole && before.is_none();
    let mut inode = next.clone();
    match &mut inode.contents {
        Contents::Directory(entries) => {
            if !is_whole || before.is_some_and(|before| before.is_followed_by_gap(time_ms)) {
                return None;
            }
            let added = entries.iter().filter(|entry| entry.time_ms >= time_ms);
            let added: Vec<Entry> = added.cloned().collect();
            for entry in &added {
                entries.remove(entry);
            }
        }
        Contents::Unread { .. } => return None,
        Contents::Regular { size_bytes, blocks_512, data, written } => {
            if written.time_ms >= time_ms {
                // Of a file that is not new, other contents may not have been kept.
                if !is_new {
                    return None;
                }
                (*size_bytes, *blocks_512, *data) = (0, 0, None);
            }
        }
        Contents::Symlink(_) | Contents::Special { .. } => {}
    }
    Some(inode)
}

/// Where a past version is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// In the block that was asked.
    Here,
    /// In another block.
    Earlier(BlockHash),
}

/// A version of an inode that is about to be replaced.
pub struct Replaced<'a> {
    /// Its block: all siblings that the next version covers.
    pub block: &'a CertifiedBlock,
    /// Whose late siblings count as others.
    pub trusted: &'a Trusted,
    /// What they say together.
    pub inode: &'a Inode,
    /// When it is replaced, milliseconds since 1970.
    pub ended_ms: u64,
    /// How long it is kept at least, seconds, whatever the policy.
    pub kept_secs: u64,
    /// Whether the next version lacks something that it has.
    pub is_lost: bool,
}

impl Replaced<'_> {
    /// Whether it is kept, unless there are too many that are like it.
    pub fn may_be_kept(&self, keep: Keep) -> bool {
        self.span(keep).is_some()
    }

    fn span(&self, keep: Keep) -> Option<Span> {
        let (began_ms, ended_ms) = (began_ms(self.block, Some(self.inode)), self.ended_ms);
        let secs = match keep.kept_secs_after(began_ms, ended_ms) {
            0 if self.is_lost && Keep::is_within_a_minute(began_ms, ended_ms) => {
                keep.kept_secs_within_a_minute()
            }
            secs => secs,
        };
        let secs = secs.max(self.kept_secs);
        let kept_until_ms = ended_ms.saturating_add(secs * 1000);
        (secs > 0).then_some(Span { began_ms, ended_ms, kept_until_ms })
    }

    /// It as a past version, if it is kept; `before` is what its inode refers to, if that is there still.
    /// `None` also if the inode is too long.
    pub fn past(
        &self,
        keep: Keep,
        before: Option<(BlockHash, PastVersion)>,
    ) -> Option<PastVersion> {
        let span = self.span(keep)?;
        let user = author(self.block, self.inode, self.trusted)?;
        let mut earlier = Vec::new();
        if let Some((hash, PastVersion { span, earlier: before, .. })) = before {
            earlier.push(Earlier { span, hash });
            earlier.extend(before);
        }
        earlier.retain(|earlier| earlier.span.kept_until_ms > self.ended_ms);
        let within = earlier.iter().filter(|one| one.span.is_within_a_minute()).count();
        let is_one_more = span.is_within_a_minute() && self.kept_secs == 0;
        if is_one_more && within >= MAX_WITHIN_A_MINUTE {
            return None;
        }
        while earlier.len() > MAX_EARLIER {
            let order = |(at, one): &(usize, &Earlier)| (one.span.kept_ms(), Reverse(*at));
            let (least, _) = earlier.iter().enumerate().min_by_key(order)?;
            earlier.remove(least);
        }
        let mut inode = self.inode.clone();
        inode.attributes.origin = None;
        let payload = inode.encode().ok()?.into();
        Some(PastVersion { span, user, earlier, payload })
    }
}

/// When what the siblings of a block say together, `inode`, was there: when the last of them was written. That the owner has
/// signed it anew changes nothing.
pub fn began_ms(block: &CertifiedBlock, inode: Option<&Inode>) -> u64 {
    let origin = inode.and_then(|inode| inode.attributes.origin);
    let times = block.siblings().iter().map(|sibling| Origin::of(origin, block, sibling).1);
    times.max().unwrap_or(0)
}

/// Who wrote what the siblings of a block say together, `inode`: the leading one.
pub(super) fn author(block: &CertifiedBlock, inode: &Inode, trusted: &Trusted) -> Option<UserId> {
    let leading = leading(block, trusted)?;
    Some(Origin::of(inode.attributes.origin, block, leading).0)
}

/// The sibling whose attributes are shown, also of a removal.
pub(super) fn leading<'a>(block: &'a CertifiedBlock, trusted: &Trusted) -> Option<&'a Sibling> {
    let standing = Standing::of(block, trusted);
    block.siblings().iter().max_by_key(|one| (!one.is_removal, standing.precedence(one)))
}

/// What the removal of an inode leaves: where its past versions are.
pub(super) fn left_by_removal(past: Option<BlockHash>) -> Vec<u8> {
    past.map_or(Vec::new(), |hash| [&[LEFT_LAYOUT], &hash.0[..]].concat())
}

/// What a removal has left.
///
/// # Errors
/// If it is neither nothing nor a hash.
pub fn decode_left(payload: &Bytes) -> Result<Option<BlockHash>, FormatError> {
    if payload.is_empty() {
        return Ok(None);
    }
    let mut cursor = Cursor::new(payload);
    match cursor.u8()? {
        LEFT_LAYOUT => {}
        other => return Err(FormatError::UnknownLayout(other)),
    }
    let hash = cursor.hash()?;
    cursor.end()?;
    Ok(Some(hash))
}
