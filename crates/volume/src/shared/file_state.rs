//! What a mount knows of one file, for people who ask why it is as it is: the value of the virtual attribute
//! [`STATE_XATTR`], which `atoll why` reads; and what of a directory was written at the same time as something else, for
//! `atoll conflicts`: that of [`CONFLICTS_XATTR`].
//!
//! It is CBOR with numbered fields, so that fields can be added; mount and command may be of different
//! versions. The ring's part, which replicas there are and which nodes use the file, is not in it.

use minicbor::{Decode, Encode};

/// The attribute of each file of a shared volume that has its [`FileState`].
pub const STATE_XATTR: &str = "user.atoll.state";
/// The beginning of the names of attributes that have the hashes of a file's content blocks, 32 bytes each: a number
/// follows, of how many hashes are left out at the beginning.
pub const BLOCKS_XATTR: &str = "user.atoll.blocks.";
/// How many hashes such an attribute has at most.
pub const BLOCKS_AT_ONCE: usize = 1_024;

/// The beginning of the names of attributes that have the [`DirectoryConflicts`] of a directory: a number follows, of how
/// many of its names are left out at the beginning.
pub const CONFLICTS_XATTR: &str = "user.atoll.conflicts.";
/// How many names such an attribute is about, at most. With all siblings that an inode may have, it fits an attribute.
pub const NAMES_AT_ONCE: usize = 64;

/// What of some names of a directory was written at the same time as something else.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct DirectoryConflicts {
    /// How many names were looked at; fewer than [`NAMES_AT_ONCE`] if no other ones follow.
    #[n(0)]
    pub names: u64,
    /// Names that a mount has given, `NAME~USER~TIME`.
    #[n(1)]
    pub kept: Vec<Vec<u8>>,
    /// Contents in other files that nobody has been shown yet.
    #[n(2)]
    pub unopened: Vec<UnopenedContents>,
}

/// Contents that were written at the same time as those which their file shows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct UnopenedContents {
    /// The file's name.
    #[n(0)]
    pub name: Vec<u8>,
    /// The first 8 hexadecimal digits of their writer's public key.
    #[n(1)]
    pub user: String,
    /// When they were written: `20261123T135501Z`.
    #[n(2)]
    pub time: String,
}

impl DirectoryConflicts {
    /// The attribute's value.
    pub fn encode(&self) -> Vec<u8> {
        minicbor::to_vec(self).expect("a vector takes all that is written")
    }

    /// Reads an attribute's value.
    ///
    /// # Errors
    /// If it is none; for people.
    pub fn decode(bytes: &[u8]) -> Result<DirectoryConflicts, String> {
        minicbor::decode(bytes).map_err(|error| error.to_string())
    }
}

/// What a mount knows of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct FileState {
    /// The volume's public key.
    #[cbor(n(0), with = "minicbor::bytes")]
    pub volume: [u8; 32],
    /// The volume's name for people.
    #[n(1)]
    pub label: String,
    /// Whether only readers can read it.
    #[n(2)]
    pub is_encrypted: bool,
    /// The inode's key, its first half.
    #[cbor(n(3), with = "minicbor::bytes")]
    pub inode: [u8; 32],
    /// The key of the file's lock.
    #[cbor(n(4), with = "minicbor::bytes")]
    pub lock: Vec<u8>,
    /// The inode's version that this mount knows.
    #[n(5)]
    pub version: u64,
    /// Why the ring did not say which version is the newest; the file is shown as it was known before.
    #[n(6)]
    pub ring_trouble: Option<String>,
    /// The versions that were written at the same time, the leading one first.
    #[n(7)]
    pub siblings: Vec<WrittenVersion>,
    /// How many other contents are in the inode that were written at the same time.
    #[n(8)]
    pub conflicts: u64,
    /// Why a version cannot be read, if there is such a one.
    #[n(9)]
    pub unreadable: Option<String>,
    /// The groups whose members may write it.
    #[n(10)]
    pub groups: Vec<WritingGroup>,
    /// The user who has mounted it; absent if it is mounted without a key.
    #[cbor(n(11), with = "minicbor::bytes")]
    pub user: Option<[u8; 32]>,
    /// Until when the user's certificate is valid, seconds since 1970; absent if the user may not write.
    #[n(12)]
    pub certificate_until_secs: Option<u64>,
    /// Why the user may not write.
    #[n(13)]
    pub why_not: Option<String>,
    /// What this mount has not brought to the ring.
    #[n(14)]
    pub pending: PendingChanges,
    /// How often it is open here.
    #[n(15)]
    pub opens: u64,
    /// Whether this mount has a lease of the file's lock.
    #[n(16)]
    pub has_lock: bool,
    /// By which model it is opened: `cto` or `ryw`.
    #[n(17)]
    pub consistency: String,
    /// Whether the file itself says so, and not the mount.
    #[n(18)]
    pub chooses_consistency: bool,
}

/// One of the versions that an inode has at a time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct WrittenVersion {
    /// The public key of the user who wrote it.
    #[cbor(n(0), with = "minicbor::bytes")]
    pub user: [u8; 32],
    /// The user's label in the record of a group that may write the file; may be empty.
    #[n(1)]
    pub label: String,
    /// Its height.
    #[n(2)]
    pub height: u64,
    /// When it was written, by the writer's clock, milliseconds since 1970.
    #[n(3)]
    pub time_ms: u64,
    /// Whether it removes the file.
    #[n(4)]
    pub is_removal: bool,
}

/// A group whose members may write a file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct WritingGroup {
    /// Its public key.
    #[cbor(n(0), with = "minicbor::bytes")]
    pub group: [u8; 32],
    /// Its name for people.
    #[n(1)]
    pub label: String,
    /// How many members it has.
    #[n(2)]
    pub members: u64,
    /// Why its record cannot be read.
    #[n(3)]
    pub trouble: Option<String>,
}

/// What a mount has not brought to the ring.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct PendingChanges {
    /// Whether the file has changes that are not on the ring.
    #[n(0)]
    pub is_changed: bool,
    /// Bytes of these in memory.
    #[n(1)]
    pub changed_bytes: u64,
    /// Whether the file's name is not on the ring: it was created and not closed yet.
    #[n(2)]
    pub is_unnamed: bool,
    /// Whether the file has lost its last name: what is written to it goes nowhere.
    #[n(3)]
    pub is_removed: bool,
    /// Whether names that were removed from this directory, or the one that the file is in, are still on the ring.
    #[n(4)]
    pub removes_names: bool,
    /// Files of the whole mount with changes that are not on the ring, and directories.
    #[n(5)]
    pub mount_changes: u64,
    /// Inodes of the whole mount that wait to be removed.
    #[n(6)]
    pub mount_removals: u64,
    /// Why what was written last could not be brought to the ring.
    #[n(7)]
    pub trouble: Option<String>,
    /// Whether its last version waits in the spool for the ring.
    #[n(8)]
    pub is_spooled: bool,
    /// Whether that of a directory that names it does.
    #[n(9)]
    pub name_is_spooled: bool,
    /// Why the ring does not take what waits there of the file or of such a directory.
    #[n(10)]
    pub spool_refused: Option<String>,
}

impl FileState {
    /// The attribute's value.
    pub fn encode(&self) -> Vec<u8> {
        minicbor::to_vec(self).expect("a vector takes all that is written")
    }

    /// Reads an attribute's value.
    ///
    /// # Errors
    /// If it is none; for people.
    pub fn decode(bytes: &[u8]) -> Result<FileState, String> {
        minicbor::decode(bytes).map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_reads_back_and_garbage_is_refused() {
        let state = FileState {
            lock: vec![4; 64],
            siblings: vec![WrittenVersion { height: 7, ..WrittenVersion::default() }; 2],
            groups: vec![WritingGroup { members: 3, ..WritingGroup::default() }],
            user: Some([9; 32]),
            why_not: Some("why".into()),
            pending: PendingChanges { is_changed: true, ..PendingChanges::default() },
            ..FileState::default()
        };
        let bytes = state.encode();
        assert_eq!(FileState::decode(&bytes), Ok(state));
        assert!((0..bytes.len()).all(|cut| FileState::decode(&bytes[..cut]).is_err()));
    }
}
