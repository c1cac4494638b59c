//! Giving a member's disk back: what is left is one tree of plain files, without Atoll (Kosha has no such thing; its users would
//! copy).
//!
//! Each distributed directory is exchanged with its placeholder, which is one call and moves no data. Last, what is in the root
//! goes up to D. Doing it again after a crash goes on.

use atoll_vfs::{Errno, FileKind, RenameFlags, XattrFlags};

use super::copied::{COPYING, COPYING_BESIDE};
use super::opening::STAMP;
use super::reserve::RESERVE;
use super::{ID_ATTRIBUTE, OpenError, PoolMember};
use crate::disk::{ACCESS_LIST, DEFAULT_LIST, Disk, DiskResult, TimeToSet, missing_is_none};
use crate::layout::{self, FileId, OWN_DIRECTORY, Placeholder, SLOTS_DIRECTORY, Slot};
use crate::map::VOTE_FILES;
use crate::map::members_file::MEMBERS;

/// Files of Atoll's own, beside the stamp.
const OWN_FILES: [&[u8]; 12] = [
    b"stamp.new",
    b"journal-0",
    b"journal-1",
    b"index",
    b"lock",
    RESERVE,
    MEMBERS,
    b"members.new",
    COPYING,
    COPYING_BESIDE,
    VOTE_FILES[0],
    VOTE_FILES[1],
];

/// What leaving has left.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LeaveReport {
    /// Files and directories, now plain ones.
    pub files: u64,
    /// Names of the root that D has already, or that the pool's own directory has; nothing was lost, and the pool is not left yet.
    pub names_taken: Vec<String>,
}

impl<D: Disk> PoolMember<D> {
    /// Makes one plain tree of all files. Nobody else may use the member, and it cannot be opened again.
    pub(crate) async fn leave(&self) -> Result<LeaveReport, OpenError> {
        let failed = |doing| move |errno| OpenError::Disk(doing, errno);
        let root = self.node(FileId::ROOT).await.map_err(failed("cannot open the root"))?;
        let own = OWN_DIRECTORY.as_bytes();
        if missing_is_none(self.disk.stat_at(&root, own).await)
            .map_err(failed("cannot look for .atoll"))?
            .is_some()
        {
            return Ok(LeaveReport { files: 0, names_taken: vec![OWN_DIRECTORY.to_owned()] });
        }
        // Names and numbers are right, and every directory has a name.
        let checked = self.check().await?;
        let mut report = LeaveReport { files: checked.files, ..LeaveReport::default() };
        self.put_directories_back()
            .await
            .map_err(failed("cannot put a directory into its parent"))?;
        self.remove_numbers().await.map_err(failed("cannot remove the numbers of files"))?;
        self.hand_root_on().await.map_err(failed("cannot give it the root's owner and mode"))?;
        let slots = SLOTS_DIRECTORY.as_bytes();
        let (top, own) =
            (self.disk.top(), self.own().await.map_err(failed("cannot open its .atoll"))?);
        // A user's directory may be called as Atoll's.
        let aside = self.disk.rename((&top, slots), (&own, slots), RenameFlags::default()).await;
        aside.map_err(failed("cannot move its slots away"))?;
        report.names_taken = finish(&*self.disk, &own).await?;
        Ok(report)
    }

    /// D protects the files as the pool's root did.
    async fn hand_root_on(&self) -> DiskResult<()> {
        let root = self.disk.stat(&self.node(FileId::ROOT).await?).await?;
        let top = self.disk.top();
        self.disk.set_owner(&top, Some(root.uid), Some(root.gid)).await?;
        self.disk.set_mode(&top, root.mode).await?;
        // With a list the group's bits of the mode are those of its mask: the mode alone would let more in.
        let node = self.node(FileId::ROOT).await?;
        for list in [ACCESS_LIST, DEFAULT_LIST] {
            match self.disk.xattr(&node, list).await {
                Ok(value) => self.disk.set_xattr(&top, list, &value, XattrFlags::default()).await?,
                Err(Errno::ENODATA | Errno::EOPNOTSUPP) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    async fn put_directories_back(&self) -> DiskResult<()> {
        let exchange = RenameFlags { exchange: true, no_replace: false };
        let all = self.index.all_files().map_err(|error| self.index_failed(&error))?;
        for (id, record) in all {
            let Some(slot) = record.slot.filter(|_| id != FileId::ROOT) else { continue };
            let Some(place) = self.places(id)?.into_iter().next() else { continue };
            let dir = self.node(place.parent).await?;
            let stands = missing_is_none(self.disk.read_link(&dir, &place.name).await)?;
            if stands.and_then(|target| Placeholder::parse(&target))
                != Some(Placeholder { slot, id })
            {
                return Err(Errno::EEXIST);
            }
            let before = self.disk.stat(&dir).await?;
            let in_slot = self.slot_node(slot).await?;
            let name = id.to_string();
            self.disk.rename((&dir, &place.name), (&in_slot, name.as_bytes()), exchange).await?;
            self.disk.unlink(&in_slot, name.as_bytes()).await?;
            // Nobody has changed the directory.
            self.disk.set_times(&dir, None, Some(TimeToSet::To(before.mtime))).await?;
        }
        Ok(())
    }

    async fn remove_numbers(&self) -> DiskResult<()> {
        let mut walk = self.walk().await?;
        while let Some(step) = walk.next().await? {
            match self.disk.remove_xattr(&step.node, ID_ATTRIBUTE).await {
                Ok(()) | Err(Errno::ENODATA | Errno::EOPNOTSUPP | Errno::EPERM) => {}
                Err(errno) => return Err(errno),
            }
            if step.stat.kind == FileKind::Directory {
                walk.enter(FileId::ROOT, &step.node).await?;
            }
        }
        Ok(())
    }
}

/// Goes on where [`PoolMember::leave`] was interrupted after it had moved its slots away; none if it was not.
pub(super) async fn resume<D: Disk>(disk: &D) -> Result<Option<LeaveReport>, OpenError> {
    let failed = |errno| OpenError::Disk("cannot open its .atoll", errno);
    let own = disk.node(&disk.top(), OWN_DIRECTORY.as_bytes()).await;
    let Some(own) = missing_is_none(own).map_err(failed)? else { return Ok(None) };
    let slots = disk.node(&own, SLOTS_DIRECTORY.as_bytes()).await;
    if missing_is_none(slots).map_err(failed)?.is_none() {
        return Ok(None);
    }
    let names_taken = finish(disk, &own).await?;
    Ok(Some(LeaveReport { names_taken, ..LeaveReport::default() }))
}

async fn finish<D: Disk>(disk: &D, own: &D::Node) -> Result<Vec<String>, OpenError> {
    let taken = move_up(disk, own).await;
    let taken = taken.map_err(|errno| OpenError::Disk("cannot move the root's files up", errno))?;
    disk.sync_all().await.map_err(|errno| OpenError::Disk("cannot make it durable", errno))?;
    Ok(taken)
}

async fn move_up<D: Disk>(disk: &D, own: &D::Node) -> DiskResult<Vec<String>> {
    let top = disk.top();
    let slots = disk.node(own, SLOTS_DIRECTORY.as_bytes()).await?;
    let mut taken = Vec::new();
    let plain = RenameFlags { no_replace: true, exchange: false };
    let in_slot = missing_is_none(disk.node(&slots, Slot::ROOT.to_string().as_bytes()).await)?;
    let root = match in_slot {
        Some(in_slot) => {
            missing_is_none(disk.node(&in_slot, FileId::ROOT.to_string().as_bytes()).await)?
        }
        None => None,
    };
    if let Some(root) = root {
        for listed in disk.list(&root).await? {
            match disk.rename((&root, &listed.name), (&top, &listed.name), plain).await {
                Ok(()) => {}
                Err(Errno::EEXIST) => {
                    taken.push(String::from_utf8_lossy(&listed.name).into_owned())
                }
                Err(errno) => return Err(errno),
            }
        }
    }
    if taken.is_empty() {
        remove_own(disk, &top, own, &slots).await?;
    }
    Ok(taken)
}

/// Removes what was Atoll's.
async fn remove_own<D: Disk>(
    disk: &D,
    top: &D::Node,
    own: &D::Node,
    slots: &D::Node,
) -> DiskResult<()> {
    for slot in disk.list(slots).await? {
        let dir = disk.node(slots, &slot.name).await?;
        for left in disk.list(&dir).await? {
            match left.kind {
                // The root, which is empty; any other has its place.
                FileKind::Directory => disk.rmdir(&dir, &left.name).await?,
                // A placeholder that was exchanged before a crash.
                FileKind::Symlink if layout::parse_id(&left.name).is_some() => {
                    disk.unlink(&dir, &left.name).await?
                }
                // Somebody has put it there.
                _ => return Err(Errno::ENOTEMPTY),
            }
        }
        disk.rmdir(slots, &slot.name).await?;
    }
    // Slots and stamp last: as long as they are here, leaving can be gone on with.
    let mut is_empty = true;
    for listed in disk.list(own).await? {
        match listed.kind {
            FileKind::Directory if listed.name == SLOTS_DIRECTORY => {}
            // What was set aside after a crash stays.
            FileKind::Directory => {
                is_empty = disk.rmdir(own, &listed.name).await.is_ok() && is_empty
            }
            _ if listed.name == STAMP => {}
            _ if OWN_FILES.contains(&&listed.name[..]) => disk.unlink(own, &listed.name).await?,
            // A file on its way back after a crash, or somebody's.
            _ => is_empty = false,
        }
    }
    missing_is_none(disk.unlink(own, STAMP).await)?;
    disk.rmdir(own, SLOTS_DIRECTORY.as_bytes()).await?;
    if is_empty {
        disk.rmdir(top, OWN_DIRECTORY.as_bytes()).await?;
    }
    Ok(())
}
