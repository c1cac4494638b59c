//! Where files lie on a member's disk: names and numbers, as plain functions (Kosha §3.1, §3.2).
//!
//! ```text
//! D/slots/000/0000000000000001/          the root directory: slot 0, file 1
//!             0000000000000001/home      -> ../../4f2/4f20000000000002, a placeholder
//! D/slots/4f2/4f20000000000002/          the directory "home", and all that stays with it
//! D/.atoll/                              the journal, the index, open files without a name
//! ```
//!
//! A *slot* is one of 4,096 shares of the name space. A *distributed directory* does not lie in its parent: it is
//! `slots/SLOT/ID`, and its parent holds a *placeholder*, a relative symbolic link to it, so that people can read the tree
//! without Atoll. Directories down to the pool's distribution level are distributed, deeper ones lie in their parent.
//!
//! A *group* of members has every 64th part of the slots, and all files in them. A name of a file of another group is a *referral*: a
//! file of this group, a symbolic link to the file's *outside name* in its own group.
//!
//! A user's own symbolic link that reads like a placeholder or a referral is stored with `./` before it, and so is one that begins with such
//! a `./`: it leads to the same place, and what is read back is what was written.

use std::fmt;

use atoll_vfs::{FileKind, InodeNumber};
use minicbor::{Decode, Decoder, Encode};

/// How many shares the name space has.
pub(crate) const SLOTS: u16 = 4096;

/// How many groups a pool has at most.
pub(crate) const GROUPS: u8 = 64;

/// How many slots a group has.
const SLOTS_OF_GROUP: u16 = SLOTS / GROUPS as u16;

/// The directory of Atoll's own files in D.
pub const OWN_DIRECTORY: &str = ".atoll";

/// The directory of the slots in D.
pub(crate) const SLOTS_DIRECTORY: &str = "slots";

/// The longest target of a symbolic link, bytes (Linux `PATH_MAX` without its NUL).
pub(crate) const MAX_TARGET_BYTES: usize = 4095;

/// The shortest symbolic link that is a placeholder, bytes.
pub(crate) const MIN_PLACEHOLDER_BYTES: u64 = 23;

/// Bits of a file's number below its birth slot.
const COUNT_BITS: u32 = 52;
/// How the name of an open file begins that has no other name. No outside name begins so: those begin with hexadecimal digits.
const OPEN_PREFIX: &str = "open-";

/// What a link of a user begins with where it could be taken for a placeholder.
pub(crate) const ESCAPE: &[u8] = b"./";

/// Which group of members has a file: they have a journal of their own, and a primary.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Encode)]
#[cbor(transparent)]
pub struct GroupNumber(#[n(0)] u8);

/// A number that is none is refused.
impl<'b, C> Decode<'b, C> for GroupNumber {
    fn decode(
        decoder: &mut Decoder<'b>,
        _: &mut C,
    ) -> Result<GroupNumber, minicbor::decode::Error> {
        let group = GroupNumber::new(decoder.u8()?);
        group.ok_or_else(|| minicbor::decode::Error::message("there is no such group"))
    }
}

impl GroupNumber {
    /// The group that has the root directory.
    pub const FIRST: GroupNumber = GroupNumber(0);

    /// The group with this number; none from [`GROUPS`] on.
    pub fn new(number: u8) -> Option<GroupNumber> {
        (number < GROUPS).then_some(GroupNumber(number))
    }

    /// The group that has a file with this number.
    pub fn of(inode: InodeNumber) -> GroupNumber {
        FileId::from(inode).group()
    }

    /// Its number.
    pub fn number(self) -> u8 {
        self.0
    }

    fn first_slot(self) -> Slot {
        Slot(u16::from(self.0) * SLOTS_OF_GROUP)
    }
}

/// The directory of D in which files of a group are that had their names in directories of others, when a member has left the pool.
pub(crate) fn outside_directory(group: GroupNumber) -> String {
    format!("outside-{group}")
}

impl fmt::Display for GroupNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// One of [`SLOTS`] shares of the name space.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Encode)]
#[cbor(transparent)]
pub(crate) struct Slot(#[n(0)] u16);

/// A number that is none is refused.
impl<'b, C> Decode<'b, C> for Slot {
    fn decode(decoder: &mut Decoder<'b>, _: &mut C) -> Result<Slot, minicbor::decode::Error> {
        let slot = Slot::new(decoder.u16()?);
        slot.ok_or_else(|| minicbor::decode::Error::message("there is no such slot"))
    }
}

impl Slot {
    /// Where the root directory lies.
    pub(crate) const ROOT: Slot = Slot(0);

    /// The slot with this number; none from [`SLOTS`] on.
    pub(crate) fn new(number: u16) -> Option<Slot> {
        (number < SLOTS).then_some(Slot(number))
    }

    /// The group that has it.
    pub(crate) fn group(self) -> GroupNumber {
        GroupNumber((self.0 / SLOTS_OF_GROUP) as u8)
    }

    /// The slot of a distributed directory, of those of its parent's group: by the hash of its parent's number, its name, and how
    /// often a member past its limit has passed it on (Kosha §3.3). The paper hashes the name alone, which puts every `Documents`
    /// into one.
    pub(crate) fn of_directory(parent: FileId, name: &[u8], salt: u32) -> Slot {
        let mut hasher = blake3::Hasher::new_derive_key("atoll pool slot 1");
        hasher.update(&parent.0.to_be_bytes()).update(&salt.to_be_bytes()).update(name);
        let hash = hasher.finalize();
        let [high, low, ..] = *hash.as_bytes();
        Slot(parent.group().first_slot().0 + u16::from_be_bytes([high, low]) % SLOTS_OF_GROUP)
    }

    /// Its number.
    pub(crate) fn number(self) -> u16 {
        self.0
    }
}

/// Three hexadecimal digits, as on disk.
impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:03x}", self.0)
    }
}

/// Names a file for as long as the pool exists; no number is used again. Its first 12 bits are the file's *birth slot*: the
/// slot in which it was made.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Encode, Decode)]
#[cbor(transparent)]
pub(crate) struct FileId(#[n(0)] pub(crate) u64);

impl FileId {
    /// The root directory.
    pub(crate) const ROOT: FileId = FileId(InodeNumber::ROOT.0);

    /// The file that is made in `slot` as number `count` of the pool; none if there are no numbers left.
    pub(crate) fn new(slot: Slot, count: u64) -> Option<FileId> {
        (count >> COUNT_BITS == 0).then_some(FileId(u64::from(slot.0) << COUNT_BITS | count))
    }

    /// The directory of the outside names of a group's files.
    pub(crate) fn outside(group: GroupNumber) -> FileId {
        FileId(u64::from(group.first_slot().0) << COUNT_BITS | 2)
    }

    /// The name of a file in [`FileId::outside`] that is open and has no name that clients see (`member/unlinked.rs`).
    pub(crate) fn open_name(self) -> Vec<u8> {
        format!("{OPEN_PREFIX}{self}").into_bytes()
    }

    /// The file that has this name as an open file; none if it is no such name.
    pub(crate) fn of_open_name(name: &[u8]) -> Option<FileId> {
        parse_id(name.strip_prefix(OPEN_PREFIX.as_bytes())?)
    }

    /// The first number that is given out is beyond those of directories that are always there.
    pub(crate) const FIRST_COUNT: u64 = 16;

    /// The directories that a group always has, and that have no names.
    pub(crate) fn fixed(group: GroupNumber) -> [FileId; 2] {
        [FileId::ROOT, FileId::outside(group)]
    }

    /// Whether it is a directory that is always there, and has no name.
    pub(crate) fn is_fixed(self) -> bool {
        self == FileId::ROOT || self == FileId::outside(self.group())
    }

    /// The slot in which it was made.
    pub(crate) fn slot(self) -> Slot {
        Slot((self.0 >> COUNT_BITS) as u16)
    }

    /// The group that has it.
    pub(crate) fn group(self) -> GroupNumber {
        self.slot().group()
    }

    /// The number without the slot.
    pub(crate) fn count(self) -> u64 {
        self.0 & ((1 << COUNT_BITS) - 1)
    }

    /// Its number as file systems say it.
    pub(crate) fn inode(self) -> InodeNumber {
        InodeNumber(self.0)
    }
}

impl From<InodeNumber> for FileId {
    fn from(inode: InodeNumber) -> FileId {
        FileId(inode.0)
    }
}

/// Sixteen hexadecimal digits, as on disk.
impl fmt::Display for FileId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Reads a number back that [`fmt::Display`] has written: exactly so many lower-case hexadecimal digits.
fn parse_hex(text: &[u8], digits: usize) -> Option<u64> {
    if text.len() != digits || !text.iter().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f')) {
        return None;
    }
    u64::from_str_radix(std::str::from_utf8(text).ok()?, 16).ok()
}

/// The slot of a directory in `slots`.
pub(crate) fn parse_slot(name: &[u8]) -> Option<Slot> {
    Slot::new(u16::try_from(parse_hex(name, 3)?).ok()?)
}

/// The file of a name that is a number.
pub(crate) fn parse_id(name: &[u8]) -> Option<FileId> {
    parse_hex(name, 16).map(FileId)
}

/// What stands in a parent for a distributed directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Placeholder {
    /// Where the directory lies.
    pub(crate) slot: Slot,
    /// Which directory.
    pub(crate) id: FileId,
}

impl Placeholder {
    /// The target of the symbolic link, in a directory that lies `steps` below a distributed one.
    pub(crate) fn target(self, steps: usize) -> Vec<u8> {
        let mut target = b"../".repeat(steps + 2);
        target.extend_from_slice(format!("{}/{}", self.slot, self.id).as_bytes());
        target
    }

    /// The placeholder that a symbolic link is; none if it is a user's. How many steps it goes up does not matter: that is
    /// corrected after a directory was moved.
    pub(crate) fn parse(target: &[u8]) -> Option<Placeholder> {
        let mut rest = target.strip_prefix(b"../")?;
        while let Some(further) = rest.strip_prefix(b"../") {
            rest = further;
        }
        let (slot, id) = rest.split_at_checked(3)?;
        Some(Placeholder { slot: parse_slot(slot)?, id: parse_id(id.strip_prefix(b"/")?)? })
    }
}

/// A name of a file of another group: a file of this one, which leads there.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) struct Referral {
    /// The number of the referral itself.
    #[n(0)]
    pub(crate) id: FileId,
    /// The file.
    #[n(1)]
    pub(crate) file: FileId,
    /// What the file is.
    #[cbor(n(2), with = "kind_letter")]
    pub(crate) kind: FileKind,
    /// How deep it lies if it is a directory, as it was when it got this name: the entries of the root at 1, and 255 as deep as that or
    /// deeper. 0 for any other file.
    #[n(3)]
    pub(crate) depth: u8,
}

/// A referral that lies deeper leads elsewhere by hand, so that it is not too long for any disk.
const MAX_STEPS: usize = 256;

/// The letters that `ls -l` has for kinds of files, but `-`.
const KIND_LETTERS: [(FileKind, u8); 7] = [
    (FileKind::Regular, b'f'),
    (FileKind::Directory, b'd'),
    (FileKind::Symlink, b'l'),
    (FileKind::Fifo, b'p'),
    (FileKind::Socket, b's'),
    (FileKind::CharDevice, b'c'),
    (FileKind::BlockDevice, b'b'),
];

fn letter_of(kind: FileKind) -> u8 {
    let found = KIND_LETTERS.iter().find(|(other, _)| *other == kind);
    found.map_or(b'f', |(_, letter)| *letter)
}

fn kind_of_letter(letter: u8) -> Option<FileKind> {
    KIND_LETTERS.iter().find(|(_, other)| *other == letter).map(|(kind, _)| *kind)
}

/// A kind of a file as a letter.
pub(crate) mod kind_letter {
    use minicbor::encode::{Error, Write};
    use minicbor::{Decoder, Encoder};

    use super::{FileKind, kind_of_letter, letter_of};

    pub(crate) fn encode<C, W: Write>(
        kind: &FileKind,
        encoder: &mut Encoder<W>,
        _: &mut C,
    ) -> Result<(), Error<W::Error>> {
        encoder.u8(letter_of(*kind))?.ok()
    }

    pub(crate) fn decode<C>(
        decoder: &mut Decoder<'_>,
        _: &mut C,
    ) -> Result<FileKind, minicbor::decode::Error> {
        let kind = kind_of_letter(decoder.u8()?);
        kind.ok_or_else(|| minicbor::decode::Error::message("there is no such kind of files"))
    }
}

impl Referral {
    /// The file's outside name in [`FileId::outside`]: the number of the referral, the letter of its kind, its own number, how deep it lies.
    pub(crate) fn outside_name(self) -> Vec<u8> {
        let letter = char::from(letter_of(self.kind));
        format!("{}{letter}{}{:02x}", self.id, self.file, self.depth).into_bytes()
    }

    /// The referral that an outside name belongs to.
    pub(crate) fn of_outside_name(name: &[u8]) -> Option<Referral> {
        let (id, rest) = name.split_at_checked(16)?;
        let (letter, rest) = rest.split_first()?;
        let kind = kind_of_letter(*letter)?;
        let (file, depth) = rest.split_at_checked(16)?;
        let depth = u8::try_from(parse_hex(depth, 2)?).ok()?;
        Some(Referral { id: parse_id(id)?, file: parse_id(file)?, kind, depth })
    }

    /// The target of the symbolic link, in a directory that lies `steps` below a distributed one. It leads there where the slots of
    /// both groups are in one directory.
    pub(crate) fn target(self, steps: usize) -> Vec<u8> {
        let outside = FileId::outside(self.file.group());
        let steps = steps.min(MAX_STEPS);
        let mut target = Placeholder { slot: outside.slot(), id: outside }.target(steps);
        target.push(b'/');
        target.extend(self.outside_name());
        target
    }

    /// The target of the symbolic link that is left when a member has left the pool, in a directory that lies `steps` below D. It leads there where
    /// what is left of both groups is in one directory.
    pub(crate) fn left_target(self, steps: usize) -> Vec<u8> {
        let outside = outside_directory(self.file.group());
        [&b"../".repeat(steps.min(MAX_STEPS))[..], outside.as_bytes(), b"/", &self.outside_name()]
            .concat()
    }

    /// The referral of which such a link is left.
    pub(crate) fn parse_left(mut target: &[u8]) -> Option<Referral> {
        while let Some(rest) = target.strip_prefix(b"../") {
            target = rest;
        }
        let at = target.iter().position(|byte| *byte == b'/')?;
        let referral = Referral::of_outside_name(&target[at + 1..])?;
        (target[..at] == *outside_directory(referral.file.group()).as_bytes()).then_some(referral)
    }

    /// The referral that a symbolic link is; none if it is a user's.
    pub(crate) fn parse(target: &[u8]) -> Option<Referral> {
        let end = target.iter().rposition(|byte| *byte == b'/')?;
        let Placeholder { slot, id } = Placeholder::parse(&target[..end])?;
        let referral = Referral::of_outside_name(&target[end + 1..])?;
        let is_sound = id == FileId::outside(referral.file.group()) && slot == id.slot();
        is_sound.then_some(referral)
    }
}

/// In what form a symbolic link is stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LinkForm {
    /// As a user wrote it; any other file.
    Plain,
    /// A user's, that could be taken for one of the others.
    Escaped,
    /// A name of a file of another group.
    Referral(Referral),
}

impl LinkForm {
    /// Of a link that is stored so, and is no placeholder.
    pub(crate) fn of(stored: &[u8]) -> LinkForm {
        match Referral::parse(stored) {
            Some(referral) => LinkForm::Referral(referral),
            None if unescape(stored).len() < stored.len() => LinkForm::Escaped,
            None => LinkForm::Plain,
        }
    }
}

/// The stored form of a user's link; none if it is too long.
pub(crate) fn escape(target: &[u8]) -> Option<Vec<u8>> {
    let stored = match needs_escape(target) {
        true => [ESCAPE, target].concat(),
        false => target.to_vec(),
    };
    (stored.len() <= MAX_TARGET_BYTES).then_some(stored)
}

/// What a user wrote, from its stored form, which is no placeholder.
pub(crate) fn unescape(stored: &[u8]) -> &[u8] {
    match stored.strip_prefix(ESCAPE) {
        Some(target) if needs_escape(target) => target,
        _ => stored,
    }
}

/// Whether a user's link is stored in another form.
pub(crate) fn needs_escape(mut target: &[u8]) -> bool {
    while let Some(rest) = target.strip_prefix(ESCAPE) {
        target = rest;
    }
    Placeholder::parse(target).is_some() || Referral::parse(target).is_some()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Kosha §3.1 hashes the name of a directory; here its parent counts, too.
    #[test]
    fn slots_of_directories_are_spread_evenly_and_differ_between_parents() {
        let slots: std::collections::BTreeSet<_> =
            (0..512u64).map(|parent| Slot::of_directory(FileId(parent), b"Documents", 0)).collect();
        assert_eq!(slots.len(), 64, "all slots of the group for 512 directories of one name");
        assert!(slots.iter().all(|slot| slot.group() == GroupNumber::FIRST));
        let (group, parent) = (GroupNumber(7), FileId(0x1c3_0000_0000_0007 << 4));
        assert_eq!(Slot::of_directory(parent, b"Documents", 0).group(), group);
        let first = Slot::of_directory(FileId::ROOT, b"home", 0);
        assert_eq!(first, Slot::of_directory(FileId::ROOT, b"home", 0));
        assert_ne!(first, Slot::of_directory(FileId::ROOT, b"home", 1));
    }

    #[test]
    fn a_number_holds_its_birth_slot() {
        let slot = Slot::new(0xabc).unwrap();
        let id = FileId::new(slot, 7).unwrap();
        assert_eq!(id.count(), 7);
        assert_eq!(id.to_string(), "abc0000000000007");
        assert_eq!(parse_id(id.to_string().as_bytes()), Some(id));
        assert_eq!(FileId::new(slot, 1 << 52), None);
        assert_eq!(Slot::new(4096), None);
    }

    #[test]
    fn a_placeholder_leads_from_its_parent_to_the_directory() {
        let place =
            Placeholder { slot: Slot::new(0x4f2).unwrap(), id: FileId(0x4f20_0000_0000_0007) };
        assert_eq!(place.target(0), b"../../4f2/4f20000000000007");
        assert_eq!(place.target(2), b"../../../../4f2/4f20000000000007");
        for steps in 0..5 {
            assert_eq!(Placeholder::parse(&place.target(steps)), Some(place));
        }
        for other in [
            "../../4f2/4f2000000000000",
            "4f2/4f20000000000007",
            "../4F2/4f20000000000007",
            "../fff/x",
            "",
        ] {
            assert_eq!(Placeholder::parse(other.as_bytes()), None, "{other}");
        }
    }

    #[test]
    fn an_outside_name_says_which_referral_it_belongs_to_and_how_deep_that_lies() {
        let (id, file) = (FileId(0x12), FileId(0x40_0000_0000_0034 << 4));
        for (kind, depth, name) in [
            (FileKind::Directory, 3, "0000000000000012d040000000000034003"),
            (FileKind::Regular, 0, "0000000000000012f040000000000034000"),
        ] {
            let referral = Referral { id, file, kind, depth };
            assert_eq!(referral.outside_name(), name.as_bytes());
            assert_eq!(Referral::of_outside_name(name.as_bytes()), Some(referral));
            assert_eq!(Referral::parse(&referral.target(4)), Some(referral));
            let left = [b"../../outside-1/", name.as_bytes()].concat();
            assert_eq!(referral.left_target(2), left);
            assert_eq!(Referral::parse_left(&left), Some(referral));
        }
        let without_depth = b"0000000000000012d0400000000000340";
        assert_eq!(Referral::of_outside_name(without_depth), None);
    }

    proptest! {
        /// A user's link is never taken for a placeholder, and reads back as it was written.
        #[test]
        fn links_of_users_are_kept(ups in 0usize..4, dots in 0usize..4, form in any::<bool>(), tail in "[a-f0-9/.]{0,24}") {
            let mut target = b"./".repeat(dots);
            target.extend(b"../".repeat(ups));
            target.extend_from_slice(if form { b"4f2/4f20000000000007" } else { tail.as_bytes() });
            let stored = escape(&target).unwrap();
            prop_assert_eq!(Placeholder::parse(&stored), None);
            prop_assert_eq!(unescape(&stored), &target[..]);
        }
    }
}
