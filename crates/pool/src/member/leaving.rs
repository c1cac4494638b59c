//! Giving a member's disk back: what is left is one tree of plain files, without Atoll (Kosha has no such thing; its users would
//! copy).
//!
//! Each distributed directory is exchanged with its placeholder, which is one call and moves no data. Last, what is in the root
//! goes up to D. Doing it again after a crash goes on.
//!
//! Of a pool of several groups it is the files of one. Those that had their names in directories of other groups are in `outside-GROUP` then, under
//! their outside names; names of other groups' files are symbolic links to `outside-GROUP/NAME`. They lead right where what is left of a member
//! of each group is put into one directory.

use atoll_vfs::{Errno, FileKind, RenameFlags, XattrFlags};

use super::copied::{COPYING, COPYING_BESIDE};
use super::importing::{IMPORTING, IMPORTING_BESIDE};
use super::opening::STAMP;
use super::reserve::RESERVE;
use super::{CheckReport, ID_ATTRIBUTE, OpenError, PoolMember};
use crate::disk::{
    ACCESS_LIST, DEFAULT_LIST, Disk, DiskResult, Making, TimeToSet, missing_is_none,
};
use crate::layout::{
    self, FileId, OWN_DIRECTORY, Placeholder, Referral, SLOTS_DIRECTORY, Slot, outside_directory,
};
use crate::map::VOTE_FILES;
use crate::map::members_file::MEMBERS;

/// A link on its way to its name.
const LINK_BESIDE: &[u8] = b"link-left";

/// Files of Atoll's own, beside the stamp.
const OWN_FILES: [&[u8]; 15] = [
    LINK_BESIDE,
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
    IMPORTING,
    IMPORTING_BESIDE,
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
    /// Names of files that other groups have, as paths: links that lead nowhere in D alone.
    pub names_elsewhere: Vec<String>,
    /// Files with names in directories of other groups, once for each such name: they are in `outside-GROUP`.
    pub outside_names: u64,
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
            let names_taken = vec![OWN_DIRECTORY.to_owned()];
            return Ok(LeaveReport { names_taken, ..LeaveReport::default() });
        }
        // Names and numbers are right, and every directory has a name.
        let checked = self.check().await?;
        let CheckReport { files, outside_names, .. } = checked;
        let mut report = LeaveReport { files, outside_names, ..LeaveReport::default() };
        self.put_directories_back()
            .await
            .map_err(failed("cannot put a directory into its parent"))?;
        report.names_elsewhere =
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

    /// Lets nothing but names and bytes be Atoll's: numbers go, and referrals become links that lead through D. Returns their paths.
    async fn remove_numbers(&self) -> DiskResult<Vec<String>> {
        let outside = FileId::outside(self.settings.group);
        let mut names_elsewhere = Vec::new();
        let mut walk = self.walk().await?;
        // The directories of D that lead to where the walk is.
        let (mut is_outside, mut path) = (false, Vec::new());
        while let Some(step) = walk.next().await? {
            is_outside = step.slot.map_or(is_outside, |_| step.said == Some(outside));
            if let (Some(place), Some((dir, depth))) = (&step.place, walk.above()) {
                path.truncate(depth - 1);
                path.push(String::from_utf8_lossy(&place.name).into_owned());
                if step.stat.kind == FileKind::Symlink {
                    let steps = depth - 1 + usize::from(is_outside);
                    if self.lead_through_top((dir, &place.name), &step.node, steps).await? {
                        let above = is_outside.then(|| outside_directory(self.settings.group));
                        let names: Vec<&str> = above.iter().chain(&path).map(|s| &**s).collect();
                        names_elsewhere.push(names.join("/"));
                    }
                }
            }
            match self.disk.remove_xattr(&step.node, ID_ATTRIBUTE).await {
                Ok(()) | Err(Errno::ENODATA | Errno::EOPNOTSUPP | Errno::EPERM) => {}
                Err(errno) => return Err(errno),
            }
            if step.stat.kind == FileKind::Directory {
                walk.enter(FileId::ROOT, &step.node).await?;
            }
        }
        Ok(names_elsewhere)
    }

    /// Lets a referral that lies `steps` below D lead through D; whether it is one.
    async fn lead_through_top(
        &self,
        (dir, name): (&D::Node, &[u8]),
        link: &D::Node,
        steps: usize,
    ) -> DiskResult<bool> {
        let target = self.disk.read_node(link).await?;
        let Some(referral) = Referral::parse(&target) else {
            // It may be so already.
            return Ok(Referral::parse_left(&target).is_some());
        };
        let own = self.own().await?;
        missing_is_none(self.disk.unlink(&own, LINK_BESIDE).await)?;
        let before = self.disk.stat(dir).await?;
        let making = Making::Symlink(&referral.left_target(steps));
        self.disk.make(&own, LINK_BESIDE, making, 0o777).await?;
        self.disk.rename((&own, LINK_BESIDE), (dir, name), RenameFlags::default()).await?;
        self.disk.set_times(dir, None, Some(TimeToSet::To(before.mtime))).await?;
        Ok(true)
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
    taken.extend(move_outside_up(disk, &top, &slots).await?);
    if taken.is_empty() {
        remove_own(disk, &top, own, &slots).await?;
    }
    Ok(taken)
}

/// Moves the directory of outside names up, unless there are none; its name, if that is taken.
async fn move_outside_up<D: Disk>(
    disk: &D,
    top: &D::Node,
    slots: &D::Node,
) -> DiskResult<Option<String>> {
    let plain = RenameFlags { no_replace: true, exchange: false };
    for listed in disk.list(slots).await? {
        let Some(slot) = layout::parse_slot(&listed.name) else { continue };
        let id = FileId::outside(slot.group());
        if id.slot() != slot {
            continue;
        }
        let in_slot = disk.node(slots, &listed.name).await?;
        let name = id.to_string();
        let Some(outside) = missing_is_none(disk.node(&in_slot, name.as_bytes()).await)? else {
            continue;
        };
        let mut names = disk.list(&outside).await?;
        // Nobody has files open any more.
        let gone = |name: &[u8]| FileId::of_open_name(name).is_some();
        for listed in names.iter().filter(|listed| gone(&listed.name)) {
            disk.unlink(&outside, &listed.name).await?;
        }
        names.retain(|listed| !gone(&listed.name));
        if names.is_empty() {
            continue;
        }
        let left = outside_directory(slot.group());
        match disk.rename((&in_slot, name.as_bytes()), (top, left.as_bytes()), plain).await {
            Ok(()) => {}
            Err(Errno::EEXIST) => return Ok(Some(left)),
            Err(errno) => return Err(errno),
        }
    }
    Ok(None)
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
