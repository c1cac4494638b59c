//! Finding files: by number, and by name.

use atoll_vfs::{Errno, FileKind};
use bytes::Bytes;

use super::{ID_ATTRIBUTE, PoolMember, whole};
use crate::change::PoolPlace;
use crate::disk::{Disk, DiskResult, Stat};
use crate::index::FileRecord;
use crate::layout::{self, FileId, LinkForm, MIN_PLACEHOLDER_BYTES, Placeholder, Referral, Slot};

/// More directories above each other than any path has: an index that says so is damaged.
pub(super) const MAX_DEPTH: usize = 1 << 16;

/// What stands under a name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FoundFile {
    /// Which file.
    pub(crate) id: FileId,
    /// What is known of it; of a distributed directory, not of its placeholder.
    pub(crate) stat: Stat,
    /// Where it lies, if it is a distributed directory.
    pub(crate) slot: Option<Slot>,
}

/// Where a directory lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Home {
    /// The slot of the distributed directory that it is or lies in.
    pub(crate) slot: Slot,
    /// How far below that it lies.
    pub(crate) steps: usize,
}

impl<D: Disk> PoolMember<D> {
    pub(crate) fn record(&self, id: FileId) -> DiskResult<Option<FileRecord>> {
        self.index.file(id).map_err(|error| self.index_failed(&error))
    }

    pub(crate) fn places(&self, id: FileId) -> DiskResult<Vec<PoolPlace>> {
        self.index.places(id).map_err(|error| self.index_failed(&error))
    }

    /// The directory that holds a directory; none for one that is always there.
    pub(crate) fn parent_of(&self, id: FileId) -> DiskResult<Option<FileId>> {
        if id.is_fixed() {
            return Ok(None);
        }
        let place = self.places(id)?.into_iter().next().ok_or(Errno::ESTALE)?;
        Ok(Some(place.parent))
    }

    /// The node of a file, by its number.
    pub(crate) async fn node(&self, id: FileId) -> DiskResult<D::Node> {
        if let Some(node) = self.held().node(id) {
            return Ok(node);
        }
        let record = self.record(id)?.ok_or(Errno::ESTALE)?;
        if let Some(slot) = record.slot {
            return self.distributed(id, slot).await;
        }
        for place in self.places(id)? {
            let dir = match self.directory_node(place.parent).await {
                // A name that is no more.
                Err(Errno::ESTALE | Errno::ENOENT | Errno::ENOTDIR) => continue,
                dir => dir?,
            };
            match self.matching(&dir, &place.name, record).await {
                Ok(node) => {
                    self.held().keep_node(id, node.clone());
                    return Ok(node);
                }
                Err(Errno::ESTALE) => {}
                Err(errno) => return Err(errno),
            }
        }
        match self.known_by_attribute(id, record).await? {
            Some((node, _)) => {
                self.held().keep_node(id, node.clone());
                Ok(node)
            }
            None => Err(Errno::ESTALE),
        }
    }

    /// A file of a pool of several under one of its names that says that it is file `id`, and that the index does not know: a crash has lost
    /// that the file was made again ([`super::scrubbing`]), or somebody has put a copy with its attributes in its place. It is that file from now on; a
    /// scrub looks at its bytes.
    pub(super) async fn known_by_attribute(
        &self,
        id: FileId,
        record: FileRecord,
    ) -> DiskResult<Option<(D::Node, Stat)>> {
        if !self.in_group || record.slot.is_some() {
            return Ok(None);
        }
        for place in self.places(id)? {
            let dir = match self.directory_node(place.parent).await {
                Err(Errno::ESTALE | Errno::ENOENT | Errno::ENOTDIR) => continue,
                dir => dir?,
            };
            let node = match self.disk.node(&dir, &place.name).await {
                Err(Errno::ENOENT | Errno::ENOTDIR) => continue,
                node => node?,
            };
            let stat = self.disk.stat(&node).await?;
            if stat.kind != record.kind || self.id_of(&node).await != Some(id) {
                continue;
            }
            let FileRecord { ino, generation, .. } = FileRecord::of(&stat, None, 0);
            let now = FileRecord { ino, generation, ..record };
            let replaced = self.index.replace_inode(id, record, now);
            replaced.map_err(|error| self.index_failed(&error))?;
            return Ok(Some((node, stat)));
        }
        Ok(None)
    }

    /// The node of a directory: from the next one above that is open, or lies in a slot.
    pub(super) async fn directory_node(&self, id: FileId) -> DiskResult<D::Node> {
        let mut below = Vec::new();
        let mut at = id;
        let mut node = loop {
            if let Some(node) = self.held().node(at) {
                break node;
            }
            let record = self.record(at)?.ok_or(Errno::ESTALE)?;
            if let Some(slot) = record.slot {
                break self.distributed(at, slot).await?;
            }
            let place = self.places(at)?.into_iter().next().ok_or(Errno::ESTALE)?;
            let parent = place.parent;
            below.push((at, record, place.name));
            if below.len() > MAX_DEPTH {
                return Err(Errno::EIO);
            }
            at = parent;
        };
        for (id, record, name) in below.into_iter().rev() {
            node = self.matching(&node, &name, record).await?;
            self.held().keep_node(id, node.clone());
        }
        Ok(node)
    }

    /// The node under a name, if it is the inode that the index has; [`Errno::ESTALE`] if not.
    async fn matching(
        &self,
        dir: &D::Node,
        name: &[u8],
        record: FileRecord,
    ) -> DiskResult<D::Node> {
        let node = match self.disk.node(dir, name).await {
            Err(Errno::ENOENT | Errno::ENOTDIR) => return Err(Errno::ESTALE),
            node => node?,
        };
        let stat = self.disk.stat(&node).await?;
        match (stat.ino, stat.generation) == (record.ino, record.generation) {
            true => Ok(node),
            false => Err(Errno::ESTALE),
        }
    }

    async fn distributed(&self, id: FileId, slot: Slot) -> DiskResult<D::Node> {
        let missing = |errno| match errno {
            Errno::ENOENT => Errno::ESTALE,
            errno => errno,
        };
        let in_slot = self.slot_node(slot).await.map_err(missing)?;
        let node = self.disk.node(&in_slot, id.to_string().as_bytes()).await.map_err(missing)?;
        self.held().keep_node(id, node.clone());
        Ok(node)
    }

    /// The directory of Atoll's own files.
    pub(crate) async fn own(&self) -> DiskResult<D::Node> {
        self.disk.node(&self.disk.top(), layout::OWN_DIRECTORY.as_bytes()).await
    }

    /// The directory of a slot; [`Errno::ENOENT`] if nothing was ever in it.
    pub(crate) async fn slot_node(&self, slot: Slot) -> DiskResult<D::Node> {
        self.disk.node(&self.slots, slot.to_string().as_bytes()).await
    }

    /// The directory of a slot, made if it does not exist.
    pub(crate) async fn slot_to_fill(&self, slot: Slot) -> DiskResult<D::Node> {
        match self.slot_node(slot).await {
            Err(Errno::ENOENT) => {}
            node => return node,
        }
        let name = slot.to_string();
        match self
            .disk
            .make(&self.slots, name.as_bytes(), crate::disk::Making::Directory, 0o700)
            .await
        {
            Ok(()) | Err(Errno::EEXIST) => self.slot_node(slot).await,
            Err(errno) => Err(errno),
        }
    }

    /// The node of a directory that may get names: [`Errno::ENOTDIR`] if it is none.
    pub(crate) async fn directory(&self, id: FileId) -> DiskResult<(D::Node, Stat)> {
        let node = self.node(id).await?;
        let stat = self.disk.stat(&node).await?;
        match stat.kind {
            FileKind::Directory => Ok((node, stat)),
            _ => Err(Errno::ENOTDIR),
        }
    }

    /// What stands under a name of a directory, whose lock the caller has.
    pub(crate) async fn find(
        &self,
        parent: FileId,
        dir: &D::Node,
        name: &[u8],
    ) -> DiskResult<FoundFile> {
        let stat = self.disk.stat_at(dir, name).await?;
        self.found(parent, dir, name, stat).await
    }

    async fn found(
        &self,
        parent: FileId,
        dir: &D::Node,
        name: &[u8],
        mut stat: Stat,
    ) -> DiskResult<FoundFile> {
        let place = PoolPlace::new(parent, name);
        // A link that is known is no placeholder: reading it would renew its access time.
        let known = self.index.by_inode(stat.ino).map_err(|error| self.index_failed(&error))?;
        if let Some(id) = known
            && let Some(record) = self.record(id)?
            && record.generation == stat.generation
        {
            self.check_known(id, &place)?;
            self.note_place(id, &place, stat.kind)?;
            if record.slot.is_some() {
                // It was put into its parent by hand.
                self.index.put_file(id, FileRecord { slot: None, ..record });
            }
            stat.size_bytes = written_size(&stat, &record);
            return Ok(FoundFile { id, stat, slot: None });
        }
        let mut form = LinkForm::Plain;
        if stat.kind == FileKind::Symlink && stat.size_bytes >= MIN_PLACEHOLDER_BYTES {
            let target = self.disk.read_link(dir, name).await?;
            if let Some(place) = Placeholder::parse(&target) {
                return self.behind(parent, dir, name, place).await;
            }
            form = LinkForm::of(&target);
        }
        if self.in_group {
            return Err(Errno::ENOENT);
        }
        let id = self.adopt(dir, &place, stat, form).await?;
        let record = self.record(id)?.ok_or(Errno::ESTALE)?;
        stat.size_bytes = written_size(&stat, &record);
        Ok(FoundFile { id, stat, slot: None })
    }

    /// The distributed directory of a placeholder.
    async fn behind(
        &self,
        parent: FileId,
        dir: &D::Node,
        name: &[u8],
        place: Placeholder,
    ) -> DiskResult<FoundFile> {
        let Placeholder { slot, id } = place;
        self.check_known(id, &PoolPlace::new(parent, name))?;
        let open = self.held().node(id);
        let node = match open {
            Some(node) => node,
            None => match self.distributed(id, slot).await {
                // Made in a change that a crash has lost, and its directory before its name.
                Err(Errno::ESTALE) if self.is_leftover(id)? => {
                    self.disk.unlink(dir, name).await?;
                    return Err(Errno::ENOENT);
                }
                // The name is there, and nothing behind it.
                node => node.map_err(|_| Errno::EIO)?,
            },
        };
        let stat = self.disk.stat(&node).await?;
        if self.record(id)?.is_none_or(|record| record.slot != Some(slot) || record.ino != stat.ino)
        {
            let placeholders = self.record(id)?.map_or(0, |record| record.placeholders);
            let record = FileRecord::of(&stat, Some(slot), placeholders);
            self.index.put_file(id, record);
        }
        self.note_place(id, &PoolPlace::new(parent, name), stat.kind)?;
        Ok(FoundFile { id, stat, slot: Some(slot) })
    }

    /// Whether a name is that of a directory which is gone from its slot.
    pub(crate) async fn lost_directory(
        &self,
        dir: &D::Node,
        name: &[u8],
    ) -> DiskResult<Option<FileId>> {
        let stat = self.disk.stat_at(dir, name).await?;
        if stat.kind != FileKind::Symlink {
            return Ok(None);
        }
        let Some(place) = Placeholder::parse(&self.disk.read_link(dir, name).await?) else {
            return Ok(None);
        };
        match self.distributed(place.id, place.slot).await {
            Err(Errno::ESTALE) => Ok(Some(place.id)),
            found => found.map(|_| None),
        }
    }

    /// What somebody has put into a pool of several by hand, on one member, is not there for its clients.
    fn check_known(&self, id: FileId, place: &PoolPlace) -> DiskResult<()> {
        let is_known = !self.in_group
            || self.index.has_place(id, place).map_err(|error| self.index_failed(&error))?;
        if is_known { Ok(()) } else { Err(Errno::ENOENT) }
    }

    /// Learns a name that somebody else has given, and forgets one of a directory, which has a single name.
    fn note_place(&self, id: FileId, place: &PoolPlace, kind: FileKind) -> DiskResult<()> {
        let failed = |error| self.index_failed(&error);
        if !self.index.has_place(id, place).map_err(failed)? {
            if kind == FileKind::Directory {
                for before in self.places(id)? {
                    self.index.remove_place(id, &before);
                }
            }
            self.index.add_place(id, place);
        }
        Ok(())
    }

    /// Gives a number to a file that Atoll has not made, or of which the index has lost the entry.
    pub(super) async fn adopt(
        &self,
        dir: &D::Node,
        place: &PoolPlace,
        stat: Stat,
        form: LinkForm,
    ) -> DiskResult<FileId> {
        let _one = self.whole.write(whole::ADOPTION).await;
        let known = self.index.by_inode(stat.ino).map_err(|error| self.index_failed(&error))?;
        if let Some(id) = known
            && self.record(id)?.is_some_and(|record| record.generation == stat.generation)
        {
            self.note_place(id, place, stat.kind)?;
            return Ok(id);
        }
        let node = self.disk.node(dir, &place.name).await?;
        let said = self.id_of(&node).await;
        let id = match said {
            Some(id) if self.record(id)?.is_none() && self.was_given(id) => id,
            // The attribute was copied with a file: the other one has the number.
            _ => {
                let id = self.new_id(self.home(place.parent)?.slot)?;
                self.set_id(&node, id).await;
                id
            }
        };
        let record = FileRecord::of(&stat, None, 0).with_form(form);
        self.index.put_file(id, record);
        self.index.add_place(id, place);
        Ok(id)
    }

    /// The number that a file's attribute says.
    pub(crate) async fn id_of(&self, node: &D::Node) -> Option<FileId> {
        let value = self.disk.xattr(node, ID_ATTRIBUTE).await.ok()?;
        Some(FileId(u64::from_be_bytes(value[..].try_into().ok()?)))
    }

    /// Writes a file's number into its attribute, where that can be.
    pub(crate) async fn set_id(&self, node: &D::Node, id: FileId) {
        let flags = atoll_vfs::XattrFlags::default();
        // Without it the index alone knows the file.
        let _ = self.disk.set_xattr(node, ID_ATTRIBUTE, &id.0.to_be_bytes(), flags).await;
    }

    /// Whether a number was given out before the last start, since the last checkpoint before that, to a file of which neither
    /// the journal nor the index knows.
    fn is_leftover(&self, id: FileId) -> DiskResult<bool> {
        let unsure = self.unsure.get().cloned().unwrap_or_default();
        Ok(unsure.contains(&id.count()) && self.record(id)?.is_none())
    }

    pub(crate) fn was_given(&self, id: FileId) -> bool {
        id.count() < self.next.load(std::sync::atomic::Ordering::SeqCst)
    }

    /// Where a directory lies.
    pub(crate) fn home(&self, id: FileId) -> DiskResult<Home> {
        let mut at = id;
        for steps in 0..MAX_DEPTH {
            let record = self.record(at)?.ok_or(Errno::ESTALE)?;
            if let Some(slot) = record.slot {
                return Ok(Home { slot, steps });
            }
            at = self.parent_of(at)?.ok_or(Errno::EIO)?;
        }
        Err(Errno::EIO)
    }

    /// Whether a directory that is made in `parent` is a distributed one: at most as deep as the distribution level (Kosha §3.2).
    pub(crate) fn is_to_be_distributed(&self, parent: FileId) -> DiskResult<bool> {
        let level = self.level();
        Ok(self.depth_up_to(parent, level)? < level)
    }

    /// How deep a directory lies: the root at 0, its entries at 1. One with a name in another group knows it from when it got that name.
    pub(crate) fn depth(&self, directory: FileId) -> DiskResult<u8> {
        self.depth_up_to(directory, u8::MAX)
    }

    /// As [`PoolMember::depth`]; `limit` if it is that or more.
    fn depth_up_to(&self, directory: FileId, limit: u8) -> DiskResult<u8> {
        let mut at = directory;
        for steps in 0..limit {
            if at.is_fixed() {
                return Ok(steps);
            }
            let place = self.places(at)?.into_iter().next().ok_or(Errno::ESTALE)?;
            if place.parent == FileId::outside(at.group()) {
                let referral = Referral::of_outside_name(&place.name).ok_or(Errno::EIO)?;
                return Ok(referral.depth.saturating_add(steps).min(limit));
            }
            at = place.parent;
        }
        Ok(limit)
    }

    /// Whether directory `id` is `above` or lies below it.
    pub(crate) fn is_within(&self, id: FileId, above: FileId) -> DiskResult<bool> {
        let mut at = Some(id);
        for _ in 0..MAX_DEPTH {
            match at {
                Some(directory) if directory == above => return Ok(true),
                Some(directory) => at = self.parent_of(directory)?,
                None => return Ok(false),
            }
        }
        Err(Errno::EIO)
    }

    /// What is known of a file by its node; a user's link as long as the user wrote it.
    pub(crate) async fn stat(&self, id: FileId, node: &D::Node) -> DiskResult<Stat> {
        let mut stat = self.disk.stat(node).await?;
        if stat.kind == FileKind::Symlink
            && let Some(record) = self.record(id)?
        {
            stat.size_bytes = written_size(&stat, &record);
        }
        Ok(stat)
    }

    /// The target of a user's symbolic link.
    pub(crate) async fn read_link(&self, node: &D::Node) -> DiskResult<Bytes> {
        let stored = self.disk.read_node(node).await?;
        Ok(stored.slice_ref(layout::unescape(&stored)))
    }
}

/// The length of a file as a user wrote it: a symbolic link may be stored with an escape.
fn written_size(stat: &Stat, record: &FileRecord) -> u64 {
    match record.is_escaped() {
        true => stat.size_bytes.saturating_sub(layout::ESCAPE.len() as u64),
        false => stat.size_bytes,
    }
}
