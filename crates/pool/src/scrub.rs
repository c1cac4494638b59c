//! Comparing the copies of a file that the members of a group have, and which of them is right (beyond the paper; the pool's design,
//! *Edits behind Atoll's back*). Plain data: `group/scrub/` drives, `member/scrubbing.rs` reads disks.
//!
//! A disk may return other bytes than were written to it (bit rot), and people may change, move or remove plain files by hand. Neither
//! is a change of the pool, so other members have what was there before.
//!
//! **Digests.** A file's bytes are compared by the digests of its ranges, of one MiB each, the same that have marks ([`crate::marks`]). The
//! digest of a file is that of its length and of the digests of its ranges. When all members have the same bytes of a file without marks,
//! that is a change of the pool ([`PoolChange::Verified`](crate::change::PoolChange::Verified)), so all remember the digest until somebody
//! writes to the file: a mark comes before the first byte.
//!
//! **Which copy is right**: that with the digest which is remembered. Where one is, and no copy has it, nothing is healed. Without one that of
//! more than half of the members; else, range by range, that of more than half; else the primary's. A digest that is remembered is never replaced
//! by that of other bytes, unless a client wrote them.

use std::collections::BTreeMap;

use atoll_vfs::FileKind;
use minicbor::{Decode, Encode};

use crate::layout::{FileId, kind_letter};

/// The digest of a range of a file, or of a whole file (BLAKE3).
pub(crate) type ContentDigest = [u8; 32];

/// The digest of a range without any byte but zeros, so that a hole is as good as zeros.
pub(crate) const ZEROS: ContentDigest = [0; 32];
/// Stands for the digest of a range that the disk does not read.
pub(crate) const UNREADABLE: ContentDigest = [0xff; 32];

/// The most ranges of one file that are told apart where copies differ, which bounds memory.
const MAX_DIFFERING: usize = 1 << 18;

/// Key derivation context of a file's digest.
const CONTEXT: &str = "atoll pool contents 1";

/// The digest of the bytes of a range.
pub(crate) fn range_digest(bytes: &[u8]) -> ContentDigest {
    match bytes.iter().all(|byte| *byte == 0) {
        true => ZEROS,
        false => *blake3::hash(bytes).as_bytes(),
    }
}

/// What a member has of a file.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) enum CopyLook {
    /// No file has this number.
    #[n(0)]
    Unknown,
    /// One has, and it is not on the disk under all its names.
    #[n(1)]
    Lost,
    #[n(2)]
    There(#[n(0)] FileLook),
}

/// What stands under a file's names.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) struct FileLook {
    #[cbor(n(0), with = "kind_letter")]
    pub(crate) kind: FileKind,
    /// Digest of mode, owner, device number and, of a symbolic link, target.
    #[cbor(n(1), with = "minicbor::bytes")]
    pub(crate) attributes: ContentDigest,
    /// Digest of the extended attributes; none where the disk has none.
    #[cbor(n(2), with = "minicbor::bytes")]
    pub(crate) extended: Option<ContentDigest>,
    /// Of a regular file; 0 of any other.
    #[n(3)]
    pub(crate) size_bytes: u64,
    /// The digest that this member remembers.
    #[cbor(n(5), with = "minicbor::bytes")]
    pub(crate) recorded: Option<ContentDigest>,
    /// The digests of the ranges that were asked for, one after the other, 32 bytes each.
    #[cbor(n(4), with = "minicbor::bytes")]
    digests: Vec<u8>,
}

impl FileLook {
    /// What stands there, without a range.
    pub(crate) fn new(
        kind: FileKind,
        (attributes, extended): (ContentDigest, Option<ContentDigest>),
        size_bytes: u64,
    ) -> FileLook {
        let (recorded, digests) = (None, Vec::new());
        FileLook { kind, attributes, extended, size_bytes, recorded, digests }
    }

    pub(crate) fn add_range(&mut self, digest: &ContentDigest) {
        self.digests.extend(digest);
    }

    /// The digests of the ranges.
    pub(crate) fn ranges(&self) -> &[ContentDigest] {
        self.digests.as_chunks().0
    }

    /// Whether names and attributes are the same.
    pub(crate) fn is_alike(&self, other: &FileLook) -> bool {
        let has_other_extended =
            self.extended.zip(other.extended).is_some_and(|(own, other)| own != other);
        (self.kind, self.attributes) == (other.kind, other.attributes) && !has_other_extended
    }
}

/// The digest that members remember of a file: all that do remember the same, for a mark voids it on all. None also if they do not.
pub(crate) fn remembered(looks: &[&FileLook]) -> Option<ContentDigest> {
    let mut known = looks.iter().filter_map(|look| look.recorded);
    let first = known.next()?;
    known.all(|other| other == first).then_some(first)
}

/// Which file's which ranges are looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) struct LookAt {
    #[n(0)]
    pub(crate) id: FileId,
    /// The first.
    #[n(1)]
    pub(crate) first: u64,
    /// How many at most.
    #[n(2)]
    pub(crate) count: u64,
}

/// One copy of a file's bytes.
struct CopyContents {
    size_bytes: u64,
    hasher: blake3::Hasher,
    is_readable: bool,
}

/// The copies of one file's bytes, range by range. The first is the primary's.
pub(crate) struct ContentComparison {
    copies: Vec<CopyContents>,
    /// Ranges that are not the same everywhere: what each copy has, none beyond its end.
    differing: BTreeMap<u64, Vec<Option<ContentDigest>>>,
}

/// What a comparison says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum ContentVerdict {
    /// All copies are the same, and this is their digest.
    Same(ContentDigest),
    /// They are not.
    Differ(ContentDifference),
    /// No copy can be read.
    Unreadable,
    /// No copy is what members remember.
    NoneRight,
}

/// How copies differ.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct ContentDifference {
    /// The copy that has the right length.
    pub(crate) size_of: usize,
    /// Ranges, and the copy that is right there.
    pub(crate) right: BTreeMap<u64, usize>,
    /// Copies that are wrong somewhere.
    pub(crate) wrong: Vec<usize>,
}

impl ContentComparison {
    /// Of copies of these lengths.
    pub(crate) fn new(sizes_bytes: &[u64]) -> ContentComparison {
        let copy = |size_bytes: &u64| {
            let mut hasher = blake3::Hasher::new_derive_key(CONTEXT);
            hasher.update(&size_bytes.to_be_bytes());
            CopyContents { size_bytes: *size_bytes, hasher, is_readable: true }
        };
        ContentComparison {
            copies: sizes_bytes.iter().map(copy).collect(),
            differing: BTreeMap::new(),
        }
    }

    /// Adds the next ranges, from `first` on, of each copy.
    pub(crate) fn add(&mut self, first: u64, ranges: &[&[ContentDigest]]) {
        for (copy, ranges) in self.copies.iter_mut().zip(ranges) {
            for digest in *ranges {
                copy.hasher.update(digest);
                copy.is_readable &= *digest != UNREADABLE;
            }
        }
        let count = ranges.iter().map(|ranges| ranges.len()).max().unwrap_or(0);
        for at in 0..count {
            let of_all = || ranges.iter().map(|ranges| ranges.get(at).copied());
            let mut all = of_all();
            let own = all.next().flatten();
            if own == Some(UNREADABLE) || all.any(|other| other != own) {
                if self.differing.len() == MAX_DIFFERING {
                    return;
                }
                self.differing.insert(first + at as u64, of_all().collect());
            }
        }
    }

    /// When all ranges were added: `recorded` is the digest that members remember.
    pub(crate) fn verdict(&self, recorded: Option<ContentDigest>) -> ContentVerdict {
        let digests: Vec<ContentDigest> =
            self.copies.iter().map(|copy| *copy.hasher.finalize().as_bytes()).collect();
        let first = digests.first().copied().unwrap_or(ZEROS);
        let is_same = digests.iter().all(|digest| *digest == first);
        if is_same && self.copies.iter().all(|copy| copy.is_readable) {
            return ContentVerdict::Same(first);
        }
        let readable = |at: &usize| self.copies[*at].is_readable;
        let as_recorded = digests.iter().position(|digest| recorded == Some(*digest));
        if recorded.is_some() && as_recorded.is_none() {
            return ContentVerdict::NoneRight;
        }
        let of_most = majority(
            digests
                .iter()
                .zip(&self.copies)
                .map(|(digest, copy)| copy.is_readable.then_some(*digest)),
        );
        let has_one_size =
            self.copies.iter().all(|copy| copy.size_bytes == self.copies[0].size_bytes);
        let good = match (as_recorded.or(of_most), has_one_size) {
            (None, false) => (0..self.copies.len()).find(readable),
            (good, _) => good,
        };
        if good.is_none() && !has_one_size {
            return ContentVerdict::Unreadable;
        }
        let source = |(mark, of_all): (&u64, &Vec<Option<ContentDigest>>)| {
            let readable = of_all.iter().map(|digest| digest.filter(|of| *of != UNREADABLE));
            let first_readable = readable.clone().position(|digest| digest.is_some());
            Some((*mark, good.or(majority(readable)).or(first_readable)?))
        };
        let right: BTreeMap<u64, usize> = self.differing.iter().filter_map(source).collect();
        if right.is_empty() && has_one_size {
            return ContentVerdict::Unreadable;
        }
        let size_of = good.unwrap_or(0);
        let is_wrong = |at: &usize| {
            self.copies[*at].size_bytes != self.copies[size_of].size_bytes
                || right.iter().any(|(mark, good)| self.has_other(*mark, *good, *at))
        };
        let wrong = (0..self.copies.len()).filter(is_wrong).collect();
        ContentVerdict::Differ(ContentDifference { size_of, right, wrong })
    }

    /// Whether a copy has other bytes in a range than the good one.
    pub(crate) fn has_other(&self, mark: u64, good: usize, at: usize) -> bool {
        self.differing.get(&mark).is_some_and(|of_all| of_all[at] != of_all[good])
    }
}

/// Which of these more than half of all are the same as, the first of them; those that are none count, and are nobody's.
pub(crate) fn majority<T: PartialEq>(all: impl Iterator<Item = Option<T>>) -> Option<usize> {
    let all: Vec<Option<T>> = all.collect();
    let is_most = |at: &usize| {
        all[*at].is_some() && 2 * all.iter().filter(|other| **other == all[*at]).count() > all.len()
    };
    (0..all.len()).find(is_most)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(text: &str) -> ContentDigest {
        range_digest(text.as_bytes())
    }

    /// Files of one letter a range.
    fn compared(copies: &[&str], recorded: Option<&str>) -> ContentVerdict {
        let ranges = |copy: &str| -> Vec<ContentDigest> {
            let range = |letter: char| match letter {
                '!' => UNREADABLE,
                letter => digest(&letter.to_string()),
            };
            copy.chars().map(range).collect()
        };
        let compare = |copies: &[&str]| {
            let sizes: Vec<u64> = copies.iter().map(|copy| copy.len() as u64).collect();
            let mut comparison = ContentComparison::new(&sizes);
            let ranges: Vec<_> = copies.iter().map(|copy| ranges(copy)).collect();
            // In two steps, as long files are.
            let halves = |at: usize| ranges.iter().map(move |of| of.split_at(of.len().min(at)));
            let first: Vec<&[ContentDigest]> = halves(2).map(|(first, _)| first).collect();
            let rest: Vec<&[ContentDigest]> = halves(2).map(|(_, rest)| rest).collect();
            comparison.add(0, &first);
            comparison.add(2, &rest);
            comparison
        };
        let recorded = recorded.map(|file| match compare(&[file]).verdict(None) {
            ContentVerdict::Same(digest) => digest,
            other => panic!("one copy is the same as itself: {other:?}"),
        });
        compare(copies).verdict(recorded)
    }

    fn differ(size_of: usize, right: &[(u64, usize)], wrong: &[usize]) -> ContentVerdict {
        let (right, wrong) = (right.iter().copied().collect(), wrong.to_vec());
        ContentVerdict::Differ(ContentDifference { size_of, right, wrong })
    }

    #[test]
    fn copies_that_are_the_same_have_one_digest_and_others_another() {
        let ContentVerdict::Same(digest) = compared(&["abc", "abc"], None) else { panic!() };
        assert_eq!(compared(&["abc"], None), ContentVerdict::Same(digest));
        for other in ["abd", "ab", "acb", ""] {
            assert_ne!(compared(&[other], None), ContentVerdict::Same(digest), "{other}");
        }
        assert_eq!(range_digest(&[0; 9]), ZEROS);
        assert_eq!(range_digest(&[]), ZEROS);
    }

    /// POOL: the digest decides, without one the majority, then the primary.
    #[test]
    fn the_digest_decides_then_the_majority_then_the_primary() {
        let copies = ["abc", "axc", "axc"];
        assert_eq!(compared(&copies, Some("abc")), differ(0, &[(1, 0)], &[1, 2]));
        assert_eq!(compared(&copies, Some("axc")), differ(1, &[(1, 1)], &[0]));
        assert_eq!(compared(&copies, None), differ(1, &[(1, 1)], &[0]));
        // Who would be right by the majority may be wrong by the digest.
        assert_eq!(compared(&copies, Some("yyy")), ContentVerdict::NoneRight);
        assert_eq!(compared(&["xbc", "abx"], Some("abc")), ContentVerdict::NoneRight);
        assert_eq!(compared(&["abc", "abx"], None), differ(0, &[(2, 0)], &[1]));
        assert_eq!(compared(&["abc", "abx"], Some("abx")), differ(1, &[(2, 1)], &[0]));
    }

    #[test]
    fn each_range_has_its_majority_where_no_copy_is_right_everywhere() {
        let verdict = compared(&["xbc", "aby", "azc"], None);
        assert_eq!(verdict, differ(0, &[(0, 1), (1, 0), (2, 0)], &[0, 1, 2]));
    }

    #[test]
    fn copies_of_other_lengths_are_compared_as_a_whole() {
        assert_eq!(compared(&["abc", "ab", "ab"], None), differ(1, &[(2, 1)], &[0]));
        assert_eq!(compared(&["abc", "ab"], None), differ(0, &[(2, 0)], &[1]));
        assert_eq!(compared(&["ab", "abc"], Some("abc")), differ(1, &[(2, 1)], &[0]));
        // Nothing but zeros beyond the end of the other.
        let mut comparison = ContentComparison::new(&[5, 9, 9]);
        comparison.add(0, &[&[ZEROS], &[ZEROS], &[ZEROS]]);
        assert_eq!(comparison.verdict(None), differ(1, &[], &[0]));
    }

    #[test]
    fn what_cannot_be_read_is_nowhere_right() {
        assert_eq!(compared(&["a!c", "abc"], None), differ(0, &[(1, 1)], &[0]));
        assert_eq!(compared(&["a!c", "a!c", "abc"], None), differ(0, &[(1, 2)], &[0, 1]));
        assert_eq!(compared(&["a!c", "a!c"], None), ContentVerdict::Unreadable);
        assert_eq!(compared(&["a!c", "!bc"], None), differ(0, &[(0, 0), (1, 1)], &[0, 1]));
    }
}
