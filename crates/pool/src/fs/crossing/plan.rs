//! What a change over several groups comes to, group by group.
//!
//! A file that gets its first name in a directory of another group stays where it is; in the place of a plain name it has an *outside
//! name* in its own group, and the other one has a referral under that name. A file that gets a name in its own group has it as any
//! file has. Nothing moves data.

use std::collections::BTreeMap;

use atoll_vfs::{Caller, Errno, FileKind, RenameFlags};

use crate::change::{BirthKind, FileBirth, PoolChange, PoolPlace};
use crate::disk::{Disk, DiskResult};
use crate::fs::PoolFs;
use crate::fs::names::birth_in;
use crate::layout::{FileId, GroupNumber, Referral};
use crate::messages::{CrossingCall, CrossingReply, FoundName};

impl FoundName {
    /// A file of this kind, or a referral.
    pub(crate) fn of(id: FileId, kind: FileKind, referral: Option<Referral>) -> FoundName {
        match referral {
            Some(Referral { file, kind, depth, .. }) => FoundName { id, file, kind, depth },
            None => FoundName { id, file: id, kind, depth: 0 },
        }
    }

    fn is_directory(&self) -> bool {
        self.kind == FileKind::Directory
    }

    /// Whether it is a file of another group.
    pub(super) fn is_referral(&self) -> bool {
        self.id != self.file
    }

    /// The name that the file has in its own group, if it has one here.
    fn outside(&self) -> PoolPlace {
        let FoundName { id, file, kind, depth } = *self;
        outside(Referral { id, file, kind, depth })
    }
}

/// The outside name that belongs to a referral.
fn outside(referral: Referral) -> PoolPlace {
    PoolPlace::new(FileId::outside(referral.file.group()), &referral.outside_name())
}

/// A change over several groups.
#[derive(Default)]
pub(in crate::fs) struct CrossingPlan {
    /// What each group makes, one after the other.
    pub(super) parts: BTreeMap<GroupNumber, Vec<PoolChange>>,
    /// Directories that get another parent, and that parent: none of them may lie below itself.
    pub(super) moved: Vec<(FileId, FileId)>,
}

/// One file that goes from a name to another one, and the number of the referral that it gets there, if it needs one.
struct Going<'a> {
    file: FoundName,
    from: &'a PoolPlace,
    to: &'a PoolPlace,
    fresh: FileId,
    /// How deep it lies there, if it is a directory.
    depth: u8,
}

impl CrossingPlan {
    fn add(&mut self, group: GroupNumber, change: PoolChange) {
        self.parts.entry(group).or_default().push(change);
    }

    /// A name goes.
    fn remove(&mut self, file: FoundName, at: &PoolPlace) {
        self.add(at.parent.group(), PoolChange::Unlink { id: file.id, at: at.clone(), by: None });
        if file.is_referral() {
            let id = file.file;
            self.add(id.group(), PoolChange::Unlink { id, at: file.outside(), by: None });
        }
    }

    /// A file of another group gets a name; how it gets its outside name is the caller's.
    fn refer(&mut self, referral: Referral, at: &PoolPlace) {
        let what = BirthKind::Referral(referral);
        let birth = FileBirth { what, uid: 0, gid: 0, mode: 0o777, is_listed: false, times: None };
        let make = PoolChange::Make { id: referral.id, at: at.clone(), birth, by: None };
        self.add(at.parent.group(), make);
    }

    /// A file leaves a name for one in another group's directory; [`CrossingPlan::arrive`] comes when that name is free.
    fn leave(&mut self, going: &Going<'_>) {
        let Going { file, from, to, .. } = going;
        let (source, target) = (from.parent.group(), to.parent.group());
        if file.is_referral() {
            self.add(source, PoolChange::Unlink { id: file.id, at: (*from).clone(), by: None });
        }
        let id = file.file;
        if id.group() != target {
            let from = if file.is_referral() { file.outside() } else { (*from).clone() };
            let to = outside(going.referral());
            self.add(id.group(), PoolChange::Rename { id, from, to, replaced: None, by: None });
        }
        if file.is_directory() && from.parent != to.parent {
            self.moved.push((file.id, to.parent));
        }
    }

    fn arrive(&mut self, going: &Going<'_>) {
        let Going { file, to, .. } = going;
        let target = to.parent.group();
        if file.file.group() == target {
            let (id, from) = (file.file, file.outside());
            let to = (*to).clone();
            self.add(target, PoolChange::Rename { id, from, to, replaced: None, by: None });
        } else {
            self.refer(going.referral(), to);
        }
    }

    /// The call that makes the change is named by the first of the coordinator's own changes.
    fn by(mut self, own: GroupNumber, origin: Option<crate::calls::CallOrigin>) -> CrossingPlan {
        let first = self.parts.get_mut(&own).and_then(|changes| changes.first_mut());
        if let Some(
            PoolChange::Make { by, .. }
            | PoolChange::Unlink { by, .. }
            | PoolChange::Rename { by, .. }
            | PoolChange::Exchange { by, .. },
        ) = first
        {
            *by = origin;
        }
        self
    }
}

impl Going<'_> {
    fn referral(&self) -> Referral {
        let Going { file, fresh, depth, .. } = *self;
        Referral { id: fresh, file: file.file, kind: file.kind, depth }
    }
}

impl<D: Disk> PoolFs<D> {
    /// What stands under a name of any group, and a number for a referral there.
    async fn look_anywhere(&self, place: &PoolPlace) -> DiskResult<(Option<FoundName>, FileId)> {
        let call = CrossingCall::Look { place: place.clone() };
        match self.ask(place.parent.group(), call).await? {
            CrossingReply::Found { found, fresh } => Ok((found, fresh)),
            _ => Err(Errno::EPROTO),
        }
    }

    /// How deep a directory comes to lie under this name; 0 for any other file.
    async fn depth_at(&self, file: &FoundName, to: &PoolPlace) -> DiskResult<u8> {
        match file.is_directory() {
            true => Ok(self.depth_anywhere(to.parent).await?.saturating_add(1)),
            false => Ok(0),
        }
    }

    /// In which group a directory is made: this one where others see to it that it gets an access control list.
    pub(in crate::fs) async fn group_for(
        &self,
        parent: FileId,
        name: &[u8],
    ) -> DiskResult<GroupNumber> {
        let Some(siblings) = self.siblings() else { return Ok(self.group()) };
        let is_spread = self.member.is_to_be_distributed(parent)?;
        let group = siblings.group_for(self.group(), is_spread, hash(parent, name));
        if group == self.group() {
            return Ok(group);
        }
        let (dir, _) = self.member.directory(parent).await?;
        match self.member.has_default_list(&dir).await? {
            true => Ok(self.group()),
            false => Ok(group),
        }
    }

    /// Makes a directory in another group. Returns its referral.
    pub(in crate::fs) async fn make_elsewhere(
        &self,
        caller: &Caller,
        at: PoolPlace,
        mode: u32,
        group: GroupNumber,
    ) -> DiskResult<FileId> {
        let id = self.member.new_id(self.member.home(at.parent)?.slot)?;
        let plan = async || {
            if self.look_here(&at).await?.is_some() {
                return Err(Errno::EEXIST);
            }
            let (_, stat) = self.member.directory(at.parent).await?;
            let birth = birth_in(&stat, caller, BirthKind::Directory, mode, false);
            // The other group knows nothing of the directories above.
            self.member.check_left(birth.uid, at.parent)?;
            let outside_names = FileId::outside(group);
            let CrossingReply::Number(file) =
                self.ask(group, CrossingCall::Number { parent: outside_names }).await?
            else {
                return Err(Errno::EPROTO);
            };
            let depth = self.member.depth(at.parent)?.saturating_add(1);
            let referral = Referral { id, file, kind: FileKind::Directory, depth };
            let mut plan = CrossingPlan::default();
            plan.refer(referral, &at);
            let at = outside(referral);
            plan.add(group, PoolChange::Make { id: file, at, birth, by: None });
            Ok(Some(plan.by(self.group(), self.origin)))
        };
        self.cross(plan).await?;
        Ok(id)
    }

    /// Gives a file of another group a name here. Returns its referral.
    pub(in crate::fs) async fn link_elsewhere(
        &self,
        file: FileId,
        at: PoolPlace,
    ) -> DiskResult<FileId> {
        let group = file.group();
        let id = self.member.new_id(self.member.home(at.parent)?.slot)?;
        let plan = async || {
            if self.look_here(&at).await?.is_some() {
                return Err(Errno::EEXIST);
            }
            let CrossingReply::Kind(kind) =
                self.ask(group, CrossingCall::Kind { id: file }).await?
            else {
                return Err(Errno::EPROTO);
            };
            if kind == FileKind::Directory {
                return Err(Errno::EPERM);
            }
            let referral = Referral { id, file, kind, depth: 0 };
            let mut plan = CrossingPlan::default();
            plan.refer(referral, &at);
            plan.add(group, PoolChange::Link { id: file, at: outside(referral), by: None });
            Ok(Some(plan.by(self.group(), self.origin)))
        };
        self.cross(plan).await?;
        Ok(id)
    }

    /// Removes a name of a file of another group.
    pub(in crate::fs) async fn remove_elsewhere(
        &self,
        at: PoolPlace,
        is_rmdir: bool,
    ) -> DiskResult<()> {
        let plan = async || {
            let file = self.look_here(&at).await?.ok_or(Errno::ENOENT)?;
            match (file.is_directory(), is_rmdir) {
                (true, false) => return Err(Errno::EISDIR),
                (false, true) => return Err(Errno::ENOTDIR),
                _ => {}
            }
            let mut plan = CrossingPlan::default();
            plan.remove(file, &at);
            Ok(Some(plan.by(self.group(), self.origin)))
        };
        self.cross(plan).await
    }

    /// Renames a file where other groups have a part in it.
    pub(in crate::fs) async fn rename_across(
        &self,
        from: PoolPlace,
        to: PoolPlace,
        flags: RenameFlags,
    ) -> DiskResult<()> {
        self.cross(|| self.plan_rename(&from, &to, flags)).await
    }

    async fn plan_rename(
        &self,
        from: &PoolPlace,
        to: &PoolPlace,
        flags: RenameFlags,
    ) -> DiskResult<Option<CrossingPlan>> {
        let own = self.group();
        // The first name does not change until the second one is looked at: where nothing is to be changed, nobody checks the two again.
        let (file, _held) = self.look_and_hold(from).await?;
        let file = file.ok_or(Errno::ENOENT)?;
        if from == to {
            return if flags.no_replace { Err(Errno::EEXIST) } else { Ok(None) };
        }
        let (other, fresh) = self.look_anywhere(to).await?;
        let mut plan = CrossingPlan::default();
        let is_own = to.parent.group() == own;
        if flags.exchange {
            let other = other.ok_or(Errno::ENOENT)?;
            if file.file == other.file {
                return Ok(None);
            }
            if is_own {
                let (id, other_id) = (file.id, other.id);
                let (from, to) = (from.clone(), to.clone());
                for (file, into) in [(&file, &to), (&other, &from)] {
                    if file.is_directory() && from.parent != to.parent {
                        plan.moved.push((file.id, into.parent));
                    }
                }
                plan.add(own, PoolChange::Exchange { id, from, other: other_id, to, by: None });
                return Ok(Some(plan.by(own, self.origin)));
            }
            let back = self.member.new_id(self.member.home(from.parent)?.slot)?;
            let depth = self.depth_at(&file, to).await?;
            let going = Going { file, from, to, fresh, depth };
            let depth = self.depth_at(&other, from).await?;
            let coming = Going { file: other, from: to, to: from, fresh: back, depth };
            plan.leave(&going);
            plan.leave(&coming);
            plan.arrive(&going);
            plan.arrive(&coming);
            return Ok(Some(plan.by(own, self.origin)));
        }
        if let Some(other) = other {
            if flags.no_replace {
                return Err(Errno::EEXIST);
            }
            if file.file == other.file {
                // Two names of one file: nothing happens (`rename(2)`).
                return Ok(None);
            }
            match (file.is_directory(), other.is_directory()) {
                (false, true) => return Err(Errno::EISDIR),
                (true, false) => return Err(Errno::ENOTDIR),
                _ => {}
            }
            plan.remove(other, to);
        }
        let is_file_here = is_own && !file.is_referral();
        let depth = if is_file_here { 0 } else { self.depth_at(&file, to).await? };
        // A referral that comes to lie at another depth is made anew: its outside name says how deep it lies.
        if is_file_here || (is_own && file.depth == depth) {
            if file.is_directory() && from.parent != to.parent {
                plan.moved.push((file.id, to.parent));
            }
            let (from, to) = (from.clone(), to.clone());
            plan.add(own, PoolChange::Rename { id: file.id, from, to, replaced: None, by: None });
        } else {
            let going = Going { file, from, to, fresh, depth };
            plan.leave(&going);
            plan.arrive(&going);
        }
        Ok(Some(plan.by(own, self.origin)))
    }
}

/// By which directories are spread: parent and name (Kosha §3.1 takes the name alone).
fn hash(parent: FileId, name: &[u8]) -> u64 {
    let mut hasher = blake3::Hasher::new_derive_key("atoll pool group 1");
    hasher.update(&parent.0.to_be_bytes()).update(name);
    let hash = hasher.finalize();
    u64::from_be_bytes(*hash.as_bytes().first_chunk().expect("a hash has 32 bytes"))
}
