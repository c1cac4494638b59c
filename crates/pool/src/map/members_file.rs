//! The file `.atoll/members`, in which a member keeps a map of the pool: who the members are, as far as it knew when one came or went last. A
//! pool of one has no such file.

use atoll_vfs::Errno;

use crate::disk::{Disk, DiskResult, missing_is_none, replace_file};
use crate::pool_map::PoolMap;

pub(crate) const MEMBERS: &[u8] = b"members";
const MEMBERS_BESIDE: &[u8] = b"members.new";
/// A map's text is no longer, bytes.
const MAX_BYTES: usize = 64 << 10;

/// Reads the map; none in a pool of one. [`Errno::EINVAL`] if what is there cannot be read.
pub(crate) async fn read<D: Disk>(disk: &D, own: &D::Node) -> DiskResult<Option<PoolMap>> {
    let Some(node) = missing_is_none(disk.node(own, MEMBERS).await)? else { return Ok(None) };
    let text = disk.read(&disk.open(&node).await?, 0, MAX_BYTES).await?;
    let map = std::str::from_utf8(&text).ok().and_then(PoolMap::from_text);
    map.map(Some).ok_or(Errno::EINVAL)
}

/// Writes the map, durably.
pub(crate) async fn write<D: Disk>(disk: &D, own: &D::Node, map: &PoolMap) -> DiskResult<()> {
    replace_file(disk, own, (MEMBERS_BESIDE, MEMBERS), map.to_text().as_bytes()).await?;
    disk.sync_all().await
}
