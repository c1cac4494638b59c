//! The file `.atoll/members`, in which a member keeps who the members are. A pool of one has no such file.

use atoll_vfs::Errno;

use super::OpenError;
use crate::disk::{Disk, DiskResult, Making};
use crate::members::PoolMembers;

pub(super) const MEMBERS: &[u8] = b"members";
const MEMBERS_BESIDE: &[u8] = b"members.new";
/// A list is no longer, bytes.
const MAX_BYTES: usize = 64 << 10;

/// Reads the list; none in a pool of one.
pub(super) async fn read<D: Disk>(
    disk: &D,
    own: &D::Node,
) -> Result<Option<PoolMembers>, OpenError> {
    let failed = |errno| OpenError::Disk("cannot read its list of members", errno);
    let node = match disk.node(own, MEMBERS).await {
        Err(Errno::ENOENT) => return Ok(None),
        node => node.map_err(failed)?,
    };
    let file = disk.open(&node).await.map_err(failed)?;
    let text = disk.read(&file, 0, MAX_BYTES).await.map_err(failed)?;
    let members = std::str::from_utf8(&text).ok().and_then(PoolMembers::from_text);
    members.map(Some).ok_or(OpenError::Members)
}

/// Writes the list, durably.
pub(super) async fn write<D: Disk>(
    disk: &D,
    own: &D::Node,
    members: &PoolMembers,
) -> DiskResult<()> {
    match disk.make(own, MEMBERS_BESIDE, Making::File, 0o600).await {
        Ok(()) | Err(Errno::EEXIST) => {}
        Err(errno) => return Err(errno),
    }
    let file = disk.open(&disk.node(own, MEMBERS_BESIDE).await?).await?;
    let text = members.to_text();
    disk.set_len(&file, 0).await?;
    if disk.write(&file, 0, text.as_bytes()).await? != text.len() {
        return Err(Errno::ENOSPC);
    }
    disk.sync_file(&file, false).await?;
    disk.rename((own, MEMBERS_BESIDE), (own, MEMBERS), Default::default()).await?;
    disk.sync_all().await
}
