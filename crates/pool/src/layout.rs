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
//! A user's own symbolic link that reads like a placeholder is stored with `./` before it, and so is one that begins with such
//! a `./`: it leads to the same place, and what is read back is what was written.

use std::fmt;

use atoll_vfs::InodeNumber;
use minicbor::{Decode, Decoder, Encode};

/// How many shares the name space has.
pub(crate) const SLOTS: u16 = 4096;

/// The directory of Atoll's own files in D.
pub const OWN_DIRECTORY: &str = ".atoll";

/// The directory of the slots in D.
pub(crate) const SLOTS_DIRECTORY: &str = "slots";

/// The longest target of a symbolic link, bytes (Linux `PATH_MAX` without its NUL).
pub(crate) const MAX_TARGET_BYTES: usize = 4095;

/// Bits of a file's number below its birth slot.
const COUNT_BITS: u32 = 52;

/// What a link of a user begins with where it could be taken for a placeholder.
pub(crate) const ESCAPE: &[u8] = b"./";

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

    /// The slot of a distributed directory: by the hash of its parent's number, its name, and how often a member past its limit
    /// has passed it on (Kosha §3.3). The paper hashes the name alone, which puts every `Documents` on one machine.
    pub(crate) fn of_directory(parent: FileId, name: &[u8], salt: u32) -> Slot {
        let mut hasher = blake3::Hasher::new_derive_key("atoll pool slot 1");
        hasher.update(&parent.0.to_be_bytes()).update(&salt.to_be_bytes()).update(name);
        let hash = hasher.finalize();
        let [high, low, ..] = *hash.as_bytes();
        Slot(u16::from_be_bytes([high, low]) % SLOTS)
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
    Placeholder::parse(target).is_some()
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
        assert!(slots.len() > 400, "{} slots for 512 directories of one name", slots.len());
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
