//! Who may write a shared volume (Pastis §3.4), and who may read an encrypted one.
//!
//! ```text
//! volume record ──► root directory's inode ──► groups that may write it
//! (the volume's key signs it)                         │
//!                              group record: members' certificates
//!                              (the group's key signs it)
//! ```
//!
//! In Pastis "the owner of a file delivers a write certificate to each user she allows to write"; how
//! it is delivered is not said. Here a group's owner puts the certificates of all members into one
//! signed block, where members' mounts find them.
//!
//! - [`volume_record`], [`group_record`]: the bytes of both.
//! - [`groups`]: adding and removing members, and renewing certificates. A certificate is valid for a
//!   week at most, and issued anew each day. Removing is not renewing.
//! - [`keeper_record`], [`keepers`]: members who renew certificates beside the owner.
//! - [`reader_record`], [`readers`]: who may read an encrypted volume, and changing that.
//! - [`mod@create`]: a new volume.
//! - [`credentials`]: finds the certificate with which a user may write an inode.
//! - [`read_access`]: finds the read keys of a mount.
//! - [`mod@rebind`]: gives the inodes of a volume other groups, which shuts a member out at once.
//!
//! Groups' keys follow from the volume's key or the user's ([`atoll_key::volume_group`],
//! [`atoll_key::user_group`]).
//!
//! It does not know where keys are kept, nor when certificates are to be renewed: who has the keys
//! calls [`groups::renew`] about daily.

pub mod create;
pub mod credentials;
pub mod group_record;
pub mod groups;
pub mod keeper_record;
pub mod keepers;
pub mod read_access;
pub mod reader_record;
pub mod readers;
pub mod rebind;
pub mod volume_record;

use std::sync::Arc;

use atoll_dht::{Blocks, GetError, PutError, Wanted};
use atoll_key::epoch_key::MAX_EPOCHS;
use atoll_key::{BlockId, SignedBlock, VolumeId};

pub use create::{NewVolume, create};
pub use credentials::{Credentials, NotAllowed};
pub use group_record::{GroupRecord, Member};
pub use groups::{Renewal, read_group};
pub use keeper_record::{KeeperRecord, ListedMember};
pub use keepers::read_keepers;
pub use read_access::{NotReader, ReadAccess};
pub use reader_record::{Reader, ReaderRecord};
pub use readers::read_readers;
pub use rebind::{RebindReport, rebind};
pub use volume_record::{VolumeRecord, is_shared};

use crate::format::FormatError;

/// How often a change is tried when somebody else changes the same block.
const ATTEMPTS: u32 = 8;

/// Why a record cannot be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TooLong {
    /// A label with more bytes than it may have.
    #[error("a label has at most {0} bytes")]
    Label(usize),
    /// More than [`group_record::MAX_MEMBERS`].
    #[error("a group has at most {} members", group_record::MAX_MEMBERS)]
    Members,
    /// More than [`group_record::MAX_MEMBERS`].
    #[error("a volume has at most {} readers", group_record::MAX_MEMBERS)]
    Readers,
    /// More than [`keeper_record::MAX_KEEPERS`], or keys of too many epochs.
    #[error("a volume has at most {} keepers", keeper_record::MAX_KEEPERS)]
    Keepers,
    /// Longer than [`MAX_KEPT_SECS`](volume_record::MAX_KEPT_SECS).
    #[error("a shared volume keeps old versions for at most four weeks: 4w, 28d or 672h")]
    Kept,
}

/// Why who may write could not be read or changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AccessError {
    /// A block could not be fetched.
    #[error(transparent)]
    Get(#[from] GetError),
    /// A block was not stored.
    #[error(transparent)]
    Put(#[from] PutError),
    /// A record is not what it should be.
    #[error("the record of the {of} is bad: {error}")]
    Bad {
        /// Of the volume, its readers, its keepers, or a group.
        of: &'static str,
        /// What is wrong with it.
        error: FormatError,
    },
    /// A record would be too long.
    #[error(transparent)]
    TooLong(#[from] TooLong),
    /// There is no record of the group on the ring.
    #[error("the group is not on the ring: it was never made, or its lease has run out")]
    NoGroup,
    /// There is no such volume on the ring.
    #[error("the volume is not on the ring: it was never made, or its lease has run out")]
    NoVolume,
    /// There is no record of the volume's readers on the ring.
    #[error(
        "the record of the volume's readers is not on the ring: the volume is not encrypted, or its \
         lease has run out"
    )]
    NoReaders,
    /// There is no record of the volume's keepers on the ring.
    #[error(
        "the record of the volume's keepers is not on the ring: it has none, or its lease has run out"
    )]
    NoKeepers,
    /// Only a member can be a keeper.
    #[error("the user is not a member of the volume")]
    NotMember,
    /// A keeper has the group's key, which only a new epoch makes void.
    #[error("the user is a keeper: a new epoch has to begin")]
    IsKeeper,
    /// The volume has had all its epochs.
    #[error("members of an encrypted volume can be shut out at once {} times", MAX_EPOCHS - 1)]
    NoEpoch,
    /// What was given as a user's key is none.
    #[error("the user's key is not a key")]
    BadUser,
    /// A membership was to end before now.
    #[error("the time until which it was to last has passed")]
    Past,
}

/// The newest version of a signed block; `None` if the ring has none.
async fn read_signed(
    blocks: &Arc<dyn Blocks>,
    id: BlockId,
) -> Result<Option<SignedBlock>, AccessError> {
    match blocks.get_block(id, Wanted::Newest).await {
        Ok(held) => match SignedBlock::decode(&held.bytes) {
            Ok(block) => Ok(Some(block)),
            Err(error) => {
                Err(GetError::Unavailable { key: id.key, told: error.to_string() }.into())
            }
        },
        Err(GetError::NotFound { .. } | GetError::Removed { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The record of a volume, and the block that it is in; `None` if the ring has none.
///
/// # Errors
/// Also if the volume is not a shared one.
pub async fn read_volume(
    blocks: &Arc<dyn Blocks>,
    volume: VolumeId,
) -> Result<Option<(SignedBlock, VolumeRecord)>, AccessError> {
    let block = read_signed(blocks, SignedBlock::id_at(volume.root_key())).await?;
    let Some(block) = block else { return Ok(None) };
    let record = VolumeRecord::decode(&block.payload);
    let record = record.map_err(|error| AccessError::Bad { of: "volume", error })?;
    Ok(Some((block, record)))
}

/// The version that takes the place of `held`. It also grows with time, so that a record which is made
/// anew after its lease has run out is newer than copies of the former one.
fn next_version(held: Option<&SignedBlock>, now_ms: u64) -> u64 {
    // A keeper may have put the last version there is: then the ring refuses ours.
    held.map_or(0, |block| block.version.saturating_add(1)).max(now_ms)
}

fn put_label(out: &mut Vec<u8>, label: &str, most: usize) -> Result<(), TooLong> {
    let len = u8::try_from(label.len()).ok().filter(|len| usize::from(*len) <= most);
    out.push(len.ok_or(TooLong::Label(most))?);
    out.extend_from_slice(label.as_bytes());
    Ok(())
}
