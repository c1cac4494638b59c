//! Making a shared volume.

use std::collections::BTreeSet;
use std::sync::Arc;

use atoll_dht::{Blocks, NewBlock};
use atoll_env::Env;
use atoll_key::kinds::certified::{Author, Binding, CertifiedBlock, WriterId};
use atoll_key::{SecretKey, SignedBlock, volume_group};
use atoll_vfs::FileTime;

use super::group_record::GroupRecord;
use super::groups::{new_member, put_group};
use super::readers::put_first;
use super::volume_record::VolumeRecord;
use super::{AccessError, next_version, read_signed};
use crate::keep::Keep;
use crate::shared::entries::Entries;
use crate::shared::inode::{Attributes, Contents, Inode, InodeKey};
use crate::shared::sealing::Sealing;

/// What a new volume is to be like.
#[derive(Clone, Debug)]
pub struct NewVolume {
    /// The volume's name for people, at most 255 bytes.
    pub label: String,
    /// What its first member is called in its group's record.
    pub member_label: String,
    /// Size of data blocks, as a power of two: 12 to 20.
    pub block_size_log2: u8,
    /// User and group of the root directory.
    pub owner: (u32, u32),
    /// Mode of the root directory.
    pub mode: u32,
    /// Whether only readers can read names and contents.
    pub is_encrypted: bool,
    /// Which old versions of files and directories are kept.
    pub keep: Keep,
}

/// Makes a volume that `user` may write: its root directory, then its readers if it is encrypted, then its
/// default group, then the record that its address leads to. Each is on the ring before the next, so that whoever finds the record
/// finds all; what an attempt leaves that fails expires.
///
/// # Errors
/// If the ring does not take it, or a label is too long.
pub async fn create(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    volume: &SecretKey,
    user: &SecretKey,
    options: &NewVolume,
) -> Result<VolumeRecord, AccessError> {
    let group = volume_group(volume, 0);
    let (id, now_ms) = (volume.volume_id(), env.unix_ms());
    let member = new_member(&group, user.user_id(), &options.member_label, now_ms / 1000, 0)?;
    let author = Author {
        secret: user.clone(),
        certificate: member.certificate,
        writer: WriterId::new(&user.user_id(), env.random_u64().to_be_bytes()),
    };
    let number = [env.random_u64(), env.random_u64()].map(u64::to_be_bytes).concat();
    let number = number.try_into().expect("16 bytes");
    let binding = Binding::new(id, number, &[group.group_id()]).expect("one group");
    let record = VolumeRecord {
        root: InodeKey::of(&binding.key()),
        block_size_log2: options.block_size_log2,
        created_unix_ms: now_ms,
        label: options.label.clone(),
        group_epoch: 0,
        bound_epoch: 0,
        is_encrypted: options.is_encrypted,
        keep: options.keep,
        has_keepers: false,
    };
    let directory = root_directory(options, now_ms).encode().expect("an empty directory is short");
    let sealer = Sealing::of_owner(volume, record.read_epoch()).sealer();
    let directory = sealer.seal_inode(directory).expect("an empty directory is short");
    let root = CertifiedBlock::create(binding, &author, now_ms, &directory);
    let root = root.expect("the author is a member");
    let payload = record.encode()?;
    let held = read_signed(blocks, SignedBlock::id_at(id.root_key())).await?;
    let version = next_version(held.as_ref(), now_ms);
    let record_block = SignedBlock::sign(volume, b"", version, &payload);

    let new = NewBlock { id: root.id(), bytes: root.bytes().clone(), lease_secs: None };
    blocks.put_blocks(vec![new]).await.into_iter().collect::<Result<Vec<()>, _>>()?;
    if options.is_encrypted {
        put_first(env, blocks, volume, (user.user_id(), &options.member_label)).await?;
    }
    let members = [(user.user_id(), member)].into();
    let group_record = GroupRecord { label: options.label.clone(), members };
    put_group(env, blocks, &group, &group_record).await?;
    blocks.put_signed(record_block).await?;
    Ok(record)
}

fn root_directory(options: &NewVolume, now_ms: u64) -> Inode {
    let now = FileTime { secs: (now_ms / 1000) as i64, nanos: (now_ms % 1000) as u32 * 1_000_000 };
    let (uid, gid) = options.owner;
    let mode = options.mode;
    let (mtime, ctime, atime) = (now, now, now);
    let attributes = Attributes { mode, uid, gid, mtime, ctime, atime, ..Attributes::default() };
    let contents = Contents::Directory(Entries::default());
    Inode { attributes, links: BTreeSet::new(), past: None, contents }
}
