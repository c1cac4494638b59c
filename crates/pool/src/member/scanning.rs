//! Walking through all of a member's files, and making the index again from them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::vec::IntoIter;

use atoll_vfs::{Errno, FileKind, RenameFlags};

use super::{OpenError, PoolMember};
use crate::change::PoolPlace;
use crate::disk::{Disk, DiskResult, Listed, Making, Stat, missing_is_none};
use crate::index::FileRecord;
use crate::layout::{self, FileId, LinkForm, Placeholder, Referral, Slot};

/// Which inodes, by their generations, are which files.
type KnownInodes = BTreeMap<(u64, u64), FileId>;

/// One file that a walk came across.
pub(crate) struct WalkStep<D: Disk> {
    /// Where it is; none for a distributed directory, which has no name where it lies.
    pub(crate) place: Option<PoolPlace>,
    /// The slot, if it is a distributed directory.
    pub(crate) slot: Option<Slot>,
    /// The number by its attribute, or by the name of a distributed directory.
    pub(crate) said: Option<FileId>,
    /// What it stands for, if it is a placeholder.
    pub(crate) placeholder: Option<Placeholder>,
    pub(crate) node: D::Node,
    pub(crate) stat: Stat,
}

/// A walk through all of D, slot by slot. Directories are entered by [`FileWalk::enter`] when they were seen.
pub(crate) struct FileWalk<'a, D: Disk> {
    member: &'a PoolMember<D>,
    slots: VecDeque<Slot>,
    distributed: Option<(Slot, D::Node, IntoIter<Listed>)>,
    stack: Vec<(FileId, D::Node, IntoIter<Listed>)>,
}

impl<D: Disk> FileWalk<'_, D> {
    /// The next file; none at the end.
    pub(crate) async fn next(&mut self) -> DiskResult<Option<WalkStep<D>>> {
        loop {
            if let Some((parent, dir, names)) = self.stack.last_mut() {
                let Some(listed) = names.next() else {
                    self.stack.pop();
                    continue;
                };
                let place = PoolPlace::new(*parent, &listed.name);
                let Some(node) = missing_is_none(self.member.disk.node(dir, &listed.name).await)?
                else {
                    continue;
                };
                let stat = self.member.disk.stat(&node).await?;
                let placeholder = match stat.kind {
                    FileKind::Symlink => {
                        Placeholder::parse(&self.member.disk.read_node(&node).await?)
                    }
                    _ => None,
                };
                let said = self.member.id_of(&node).await;
                return Ok(Some(WalkStep {
                    place: Some(place),
                    slot: None,
                    said,
                    placeholder,
                    node,
                    stat,
                }));
            }
            if let Some((slot, dir, ids)) = &mut self.distributed {
                let slot = *slot;
                let Some(listed) = ids.next() else {
                    self.distributed = None;
                    continue;
                };
                let Some(id) = layout::parse_id(&listed.name) else { continue };
                let Some(node) = missing_is_none(self.member.disk.node(dir, &listed.name).await)?
                else {
                    continue;
                };
                let stat = self.member.disk.stat(&node).await?;
                if stat.kind != FileKind::Directory {
                    continue;
                }
                return Ok(Some(WalkStep {
                    place: None,
                    slot: Some(slot),
                    said: Some(id),
                    placeholder: None,
                    node,
                    stat,
                }));
            }
            let Some(slot) = self.slots.pop_front() else { return Ok(None) };
            let Some(dir) = missing_is_none(self.member.slot_node(slot).await)? else { continue };
            let ids = self.member.disk.list(&dir).await?.into_iter();
            self.distributed = Some((slot, dir, ids));
        }
    }

    /// The directory that holds the file which [`FileWalk::next`] has returned, and how many directories below a slot's that is, itself counted.
    pub(crate) fn above(&self) -> Option<(&D::Node, usize)> {
        self.stack.last().map(|(_, dir, _)| (dir, self.stack.len()))
    }

    /// Goes into a directory, which is file `id`.
    pub(crate) async fn enter(&mut self, id: FileId, node: &D::Node) -> DiskResult<()> {
        let names = self.member.disk.list(node).await?.into_iter();
        self.stack.push((id, node.clone(), names));
        Ok(())
    }
}

impl<D: Disk> PoolMember<D> {
    /// Begins a walk through all files.
    pub(crate) async fn walk(&self) -> DiskResult<FileWalk<'_, D>> {
        let listed = self.disk.list(&self.slots).await?;
        let mut slots: Vec<Slot> =
            listed.iter().filter_map(|listed| layout::parse_slot(&listed.name)).collect();
        slots.sort_unstable();
        Ok(FileWalk { member: self, slots: slots.into(), distributed: None, stack: Vec::new() })
    }

    /// Makes the index again from the files; returns how many there are.
    ///
    /// Files without the attribute are known by their inodes, as far as the index had them; others get new numbers, and handles
    /// of them are stale.
    pub(crate) async fn index_again(&self) -> Result<u64, OpenError> {
        let known = self.clear_index()?;
        let failed = |errno| OpenError::Disk("cannot make its index again", errno);
        // No number is given out before all that were are known.
        let mut walk = self.walk().await.map_err(failed)?;
        let mut highest = 0;
        let mut live = BTreeSet::new();
        while let Some(step) = walk.next().await.map_err(failed)? {
            highest = highest.max(step.said.map_or(0, |id| id.count() + 1));
            live.extend(known.get(&(step.stat.ino, step.stat.generation)));
            if step.stat.kind == FileKind::Directory {
                // Numbers do not matter yet.
                walk.enter(FileId(0), &step.node).await.map_err(failed)?;
            }
        }
        self.pass_over(highest);
        let mut files = 0;
        let mut walk = self.walk().await.map_err(failed)?;
        while let Some(step) = walk.next().await.map_err(failed)? {
            files += u64::from(step.placeholder.is_none());
            let id = self.index_step(&step, (&known, &live)).await.map_err(failed)?;
            if step.stat.kind == FileKind::Directory {
                walk.enter(id, &step.node).await.map_err(failed)?;
            }
        }
        Ok(files)
    }

    /// Returns which inodes were which files.
    fn clear_index(&self) -> Result<KnownInodes, OpenError> {
        let mut known = KnownInodes::new();
        let failed = |error: crate::index::PoolIndexError| OpenError::Index(error.to_string());
        for (id, record) in self.index.all_files().map_err(failed)? {
            for place in self.index.places(id).map_err(failed)? {
                self.index.remove_place(id, &place);
            }
            self.index.remove_file(id, record).map_err(failed)?;
            known.insert((record.ino, record.generation), id);
        }
        Ok(known)
    }

    /// Enters one file into the index.
    async fn index_step(
        &self,
        step: &WalkStep<D>,
        (known, live): (&KnownInodes, &BTreeSet<FileId>),
    ) -> DiskResult<FileId> {
        let WalkStep { place, slot, said, placeholder, node, stat } = step;
        if let (Some(place), Some(Placeholder { id, .. })) = (place, placeholder) {
            self.index.add_place(*id, place);
            self.count_placeholder(place.parent, true)?;
            return Ok(*id);
        }
        // An attribute that was copied with a file is that of the other one, whose inode the index knew.
        let as_known = known.get(&(stat.ino, stat.generation)).copied();
        let said = &as_known.or(said.filter(|said| slot.is_some() || !live.contains(said)));
        let known = match (slot, said) {
            (Some(_), Some(id)) => Some(*id),
            _ => {
                let failed = |error| self.index_failed(&error);
                let by_inode = self.index.by_inode(stat.ino).map_err(failed)?;
                match (by_inode, said) {
                    (Some(id), _) => Some(id),
                    (None, Some(id)) if self.record(*id)?.is_none() => Some(*id),
                    _ => None,
                }
            }
        };
        let id = match (known, place) {
            (Some(id), _) => id,
            (None, Some(place)) => {
                let id = self.new_id(self.home(place.parent)?.slot)?;
                self.set_id(node, id).await;
                id
            }
            (None, None) => return Err(Errno::EIO),
        };
        let placeholders = self.record(id)?.map_or(0, |record| record.placeholders);
        let record = match stat.kind {
            FileKind::Symlink => {
                let target = self.disk.read_node(node).await?;
                FileRecord::of(stat, *slot, 0).with_form(LinkForm::of(&target))
            }
            _ => FileRecord::of(stat, *slot, placeholders),
        };
        self.index.put_file(id, record);
        if let Some(place) = place {
            self.index.add_place(id, place);
        }
        Ok(id)
    }

    /// Lets a placeholder go up as far as its directory lies deep; one that does already is left alone.
    pub(crate) async fn mend_placeholder(
        &self,
        place: &PoolPlace,
        dir: &D::Node,
        placeholder: Placeholder,
    ) -> DiskResult<bool> {
        let wanted = placeholder.target(self.home(place.parent)?.steps);
        Ok(self.mend_link((place, dir), placeholder.id, &wanted).await?.is_some())
    }

    /// As [`PoolMember::mend_placeholder`], of a referral, which is a file of its own.
    pub(crate) async fn mend_referral(
        &self,
        place: &PoolPlace,
        dir: &D::Node,
        referral: Referral,
    ) -> DiskResult<()> {
        let wanted = referral.target(self.home(place.parent)?.steps);
        let Some(node) = self.mend_link((place, dir), referral.id, &wanted).await? else {
            return Ok(());
        };
        let stat = self.disk.stat(&node).await?;
        self.held().drop_node(referral.id);
        let record = FileRecord::of(&stat, None, 0).with_form(LinkForm::Referral(referral));
        self.index.put_file(referral.id, record);
        Ok(())
    }

    /// Puts another symbolic link under a name, if another one stands there; returns it.
    async fn mend_link(
        &self,
        (place, dir): (&PoolPlace, &D::Node),
        id: FileId,
        wanted: &[u8],
    ) -> DiskResult<Option<D::Node>> {
        let stands = missing_is_none(self.disk.read_link(dir, &place.name).await)?;
        if stands.is_none_or(|stands| stands == wanted) {
            return Ok(None);
        }
        let own = self.own().await?;
        let beside = format!("link-{id}").into_bytes();
        match self.disk.unlink(&own, &beside).await {
            Ok(()) | Err(Errno::ENOENT) => {}
            Err(errno) => return Err(errno),
        }
        self.disk.make(&own, &beside, Making::Symlink(wanted), 0o777).await?;
        let node = self.disk.node(&own, &beside).await?;
        if Referral::parse(wanted).is_some() {
            self.set_id(&node, id).await;
        }
        self.disk.rename((&own, &beside), (dir, &place.name), RenameFlags::default()).await?;
        Ok(Some(node))
    }
}
