//! A member that is given all files by the primary: one that has none, or lacks changes that nobody keeps any more.
//!
//! ```text
//! names       it discards its files, and makes all that there were at one change S, from batches of the primary
//! bytes       it follows the log after S as any member, and is given the bytes of all files beside that
//! learning    it gets what was written since S, and what may have been read too early or too late, and is complete
//! ```
//!
//! Files are made by the code that makes changes, and without the journal: a member that dies before it has all names begins anew. The
//! stage is durable in `.atoll/copying` from before the first file is discarded until everything is durable; as long as it is there
//! this member is incomplete, whatever its log says. Then it is no member of an epoch and never the primary.
//!
//! | line of `.atoll/copying` | |
//! |---|---|
//! | `atoll pool copying 1` | |
//! | `names`, or `bytes S UPTO FILES BYTES ALL-FILES ALL-BYTES` | the stage: numbers of [`CopiedBytes`] |
//! | `end` | |
//!
//! The primary's side is `group/copying/`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use atoll_vfs::{Errno, FileKind, RenameFlags, XattrFlags};
use futures_util::lock::Mutex;

use super::following::FollowedChanges;
use super::opening::{INDEX, make_fixed};
use super::{Decided, OpenError, PoolMember};
use crate::change::PoolChange;
use crate::change_log::ChangeLog;
use crate::disk::{CAPABILITY, Disk, DiskResult, Making, TimeToSet, missing_is_none, replace_file};
use crate::index::{FileRecord, GroupEntries, PoolIndex};
use crate::layout::{self, FileId, OWN_DIRECTORY, SLOTS_DIRECTORY};
use crate::messages::{
    BeginCopy, CopiedBytes, CopyAmount, CopyBatch, CopyStage, ItemKind, OWN_ATTRIBUTES,
};

/// Of Atoll's own files.
pub(super) const COPYING: &[u8] = b"copying";
pub(super) const COPYING_BESIDE: &[u8] = b"copying.new";
/// Where files are on their way to be removed.
const DISCARDED: &[u8] = b"discarded";
/// Where files are that nobody is to lose.
const OLD: &[u8] = b"old";

const FIRST_LINE: &str = "atoll pool copying 1";
const LAST_LINE: &str = "end\n";
/// Entries of the index in memory beyond which it is written.
const MAX_PENDING: usize = 50_000;

/// A member that is given names.
pub(crate) struct CopiedMember<D: Disk> {
    member: Arc<PoolMember<D>>,
    /// The last record of the journal that it had.
    sequence: u64,
    begun: BeginCopy,
    /// The last batch that was taken; held while one is.
    taken: Mutex<u64>,
}

/// Why a batch was not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CopyBatchError {
    /// The primary has sent what cannot be.
    Wrong(&'static str),
    Disk(Errno),
}

impl From<Errno> for CopyBatchError {
    fn from(errno: Errno) -> CopyBatchError {
        CopyBatchError::Disk(errno)
    }
}

fn to_text(stage: &CopyStage) -> String {
    let line = match stage {
        CopyStage::Names => "names".to_owned(),
        CopyStage::Bytes(CopiedBytes { order, upto, done, all }) => format!(
            "bytes {order} {upto} {} {} {} {}",
            done.files, done.bytes, all.files, all.bytes
        ),
    };
    format!("{FIRST_LINE}\n{line}\n{LAST_LINE}")
}

fn from_text(text: &str) -> Option<CopyStage> {
    let line = text.strip_prefix(FIRST_LINE)?.strip_prefix('\n')?;
    let line = line.strip_suffix(LAST_LINE)?.strip_suffix('\n')?;
    let Some(numbers) = line.strip_prefix("bytes ") else {
        return (line == "names").then_some(CopyStage::Names);
    };
    let numbers: Result<Vec<u64>, _> = numbers.split(' ').map(str::parse).collect();
    let [order, upto, files, bytes, all_files, all_bytes] = numbers.ok()?[..] else { return None };
    let done = CopyAmount { files, bytes };
    let all = CopyAmount { files: all_files, bytes: all_bytes };
    Some(CopyStage::Bytes(CopiedBytes { order, upto, done, all }))
}

/// Reads the stage; none on a member that is complete. What cannot be read is that of a member which may have anything.
pub(super) async fn read_stage<D: Disk>(
    disk: &D,
    own: &D::Node,
) -> Result<Option<CopyStage>, OpenError> {
    let failed = |errno| OpenError::Disk("cannot read how far it was copied", errno);
    let Some(node) = missing_is_none(disk.node(own, COPYING).await).map_err(failed)? else {
        return Ok(None);
    };
    let file = disk.open(&node).await.map_err(failed)?;
    let text = disk.read(&file, 0, 4096).await.map_err(failed)?;
    let stage = std::str::from_utf8(&text).ok().and_then(from_text);
    Ok(Some(stage.unwrap_or(CopyStage::Names)))
}

impl<D: Disk> PoolMember<D> {
    /// How far it is that is given all files; none if it is complete.
    pub(crate) fn copy_stage(&self) -> Option<CopyStage> {
        *self.copying.lock().expect("no holder of this lock panics")
    }

    /// Notes the stage. It may be that of before after a loss of power, unless everything is synced.
    async fn note_stage(&self, stage: Option<CopyStage>) -> DiskResult<()> {
        let (disk, own) = (&self.disk, self.own().await?);
        match &stage {
            None => {
                missing_is_none(disk.unlink(&own, COPYING).await)?;
            }
            Some(stage) => {
                let text = to_text(stage);
                replace_file(&**disk, &own, (COPYING_BESIDE, COPYING), text.as_bytes()).await?;
            }
        }
        *self.copying.lock().expect("no holder of this lock panics") = stage;
        Ok(())
    }

    /// Notes durably that its files are to be discarded.
    pub(crate) async fn note_discarded(&self) -> DiskResult<()> {
        self.note_stage(Some(CopyStage::Names)).await?;
        self.disk.sync_all().await
    }

    /// Makes everything durable that was copied so far, and notes it.
    pub(super) async fn note_copied(&self, upto: FileId, done: CopyAmount) -> DiskResult<()> {
        let Some(CopyStage::Bytes(before)) = self.copy_stage() else { return Err(Errno::EINVAL) };
        self.disk.sync_all().await?;
        let stage = CopyStage::Bytes(CopiedBytes { upto: upto.0, done, ..before });
        self.note_stage(Some(stage)).await
    }

    /// It has everything, durably.
    pub(super) async fn note_complete(&self) -> DiskResult<()> {
        self.note_stage(None).await?;
        self.disk.sync_all().await
    }

    /// Whether there is anything but empty directories that are always there.
    async fn has_files(&self, top: &D::Node) -> DiskResult<bool> {
        let slots = self.disk.node(top, SLOTS_DIRECTORY.as_bytes()).await?;
        for in_slots in self.disk.list(&slots).await? {
            let slot = self.disk.node(&slots, &in_slots.name).await?;
            for listed in self.disk.list(&slot).await? {
                if !layout::parse_id(&listed.name).is_some_and(FileId::is_fixed) {
                    return Ok(true);
                }
                let dir = self.disk.node(&slot, &listed.name).await?;
                if !self.disk.list(&dir).await?.is_empty() {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Has no files any more but the root. Those that it had go to `.atoll/old` if `keeps_old`.
    async fn discard_files(&self, keeps_old: bool) -> DiskResult<()> {
        let (disk, top, own) = (&*self.disk, self.disk.top(), self.own().await?);
        let slots = SLOTS_DIRECTORY.as_bytes();
        let plain = RenameFlags { no_replace: true, exchange: false };
        let has_slots = missing_is_none(disk.stat_at(&top, slots).await)?.is_some();
        if has_slots && keeps_old && self.has_files(&top).await? {
            make_directory(disk, &own, OLD).await?;
            let old = disk.node(&own, OLD).await?;
            let mut number = 0u64;
            loop {
                let name = format!("slots-{number}");
                match disk.rename((&top, slots), (&old, name.as_bytes()), plain).await {
                    Err(Errno::EEXIST) => number += 1,
                    renamed => break renamed?,
                }
            }
            tracing::warn!("what this member had is in {OWN_DIRECTORY}/old/slots-{number}");
        } else if has_slots {
            remove_tree(disk, &own, DISCARDED).await?;
            disk.rename((&top, slots), (&own, DISCARDED), plain).await?;
        }
        for listed in disk.list(&own).await? {
            // What a crash has left on its way.
            let is_left = listed.name.starts_with(b"moved-") || listed.name.starts_with(b"link-");
            if is_left || listed.name == DISCARDED {
                remove_tree(disk, &own, &listed.name).await?;
            }
        }
        make_fixed(disk, &top, self.settings.group).await
    }
}

impl<D: Disk> CopiedMember<D> {
    /// Discards what a member has: files, index, and what its journal says after record `sequence` at the latest. Files that are its own,
    /// and no copy, go to `.atoll/old` if there is room.
    pub(crate) async fn begin(
        member: PoolMember<D>,
        (sequence, has_own): (u64, bool),
        begun: BeginCopy,
    ) -> Result<CopiedMember<D>, OpenError> {
        let failed = |errno| OpenError::Disk("cannot discard what it has", errno);
        let has_room = member.room_left().await.map_err(failed)?
            > begun.used_bytes.saturating_add(begun.used_bytes / 16);
        member.note_discarded().await.map_err(failed)?;
        member.discard_files(has_own && has_room).await.map_err(failed)?;
        let own = member.own().await.map_err(failed)?;
        let PoolMember { env, disk, settings, in_group, journal, index, copying, .. } = member;
        drop(index);
        missing_is_none(disk.unlink(&own, INDEX).await).map_err(failed)?;
        let file = disk.database(&own, INDEX).await.map_err(failed)?;
        let opened = PoolIndex::open(file);
        let (index, _) = opened.map_err(|error| OpenError::Index(error.to_string()))?;
        let slots = disk.node(&disk.top(), SLOTS_DIRECTORY.as_bytes()).await.map_err(failed)?;
        let stage = copying.into_inner().expect("no holder of this lock panics");
        let member =
            PoolMember::assemble((env, disk), (settings, in_group), (slots, journal, index), stage);
        let enter_fixed = async {
            for id in FileId::fixed(member.settings.group) {
                let in_slot = member.slot_node(id.slot()).await?;
                let node = member.disk.node(&in_slot, id.to_string().as_bytes()).await?;
                let stat = member.disk.stat(&node).await?;
                member.index.put_file(id, FileRecord::of(&stat, Some(id.slot()), 0));
            }
            member.next.fetch_max(begun.next, Ordering::SeqCst);
            Ok(())
        };
        enter_fixed.await.map_err(failed)?;
        Ok(CopiedMember { member: Arc::new(member), sequence, begun, taken: Mutex::new(0) })
    }

    /// Gives the member back, whatever it has, and the last record of its journal; none if something is still under way.
    pub(crate) fn into_parts(self) -> Option<(PoolMember<D>, u64)> {
        Some((Arc::into_inner(self.member)?, self.sequence))
    }

    /// Takes a batch; one that was taken before changes nothing. Returns the member when it has all names, and follows.
    pub(crate) async fn take(
        &self,
        number: u64,
        batch: &CopyBatch,
    ) -> Result<Option<Arc<PoolMember<D>>>, CopyBatchError> {
        let mut taken = self.taken.lock().await;
        if number <= *taken {
            return Ok(None);
        }
        if number != *taken + 1 || !batch.is_sound() {
            return Err(CopyBatchError::Wrong("a batch that cannot be"));
        }
        let member = &self.member;
        let mut is_end = false;
        match batch {
            CopyBatch::Files(changes) => {
                for change in changes {
                    self.make(change).await?;
                }
            }
            CopyBatch::Marks(marks) => {
                marks.iter().for_each(|(id, marks)| member.marks().add(*id, marks));
            }
            CopyBatch::Remembered(marks) => {
                marks.iter().for_each(|(id, marks)| member.marks().remember(*id, marks.clone()));
            }
            CopyBatch::Calls(client, record) => {
                let added = member.done().add_record(client, record);
                added.ok_or(CopyBatchError::Wrong("calls that cannot be read"))?;
            }
            CopyBatch::Crossing(record) => member.crossings().add(record.clone()),
            CopyBatch::Quotas(table) => member.quotas().set_table(table.clone()),
            CopyBatch::End(all) => {
                self.end(*all).await?;
                is_end = true;
            }
        }
        if member.index.pending() > MAX_PENDING {
            let frozen =
                member.index.freeze(member.meta(self.sequence, 0), GroupEntries::default());
            member.index.write(&frozen).map_err(|error| member.index_failed(&error))?;
        }
        *taken = number;
        Ok(is_end.then(|| member.clone()))
    }

    /// Makes a file, or gives it what it has.
    async fn make(&self, change: &PoolChange) -> Result<(), CopyBatchError> {
        let member = &self.member;
        let (id, parent) = match change {
            PoolChange::Make { id, at, .. } | PoolChange::Link { id, at, .. } => {
                (*id, Some(at.parent))
            }
            PoolChange::Extended { id, .. } | PoolChange::Attributes { id, .. } => (*id, None),
            _ => return Err(CopyBatchError::Wrong("a change that makes no file")),
        };
        let is_made = member.record(id)?.is_some();
        if is_made == matches!(change, PoolChange::Make { .. }) {
            return Err(CopyBatchError::Wrong("a file that is made twice, or not at all"));
        }
        if let Some(parent) = parent {
            let kind = member.record(parent)?.map(|record| record.kind);
            if kind != Some(FileKind::Directory) {
                return Err(CopyBatchError::Wrong("a name in no directory"));
            }
        }
        match member.apply(change, Decided::Elsewhere).await {
            Ok(_) => Ok(()),
            Err(Errno::EEXIST) => Err(CopyBatchError::Wrong("two files of one name")),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Makes all of it durable. The log begins after the change as of which the names are.
    async fn end(&self, all: CopyAmount) -> DiskResult<()> {
        let (member, order) = (&self.member, self.begun.order);
        let (first, epoch) = self.begun.epoch;
        let epochs = match epoch {
            0 => BTreeMap::new(),
            epoch => BTreeMap::from([(first, epoch)]),
        };
        *member.log() = ChangeLog { recent: BTreeMap::new(), after: order, epochs };
        let followed = FollowedChanges { applied: order, ..FollowedChanges::default() };
        *member.followed.lock().expect("no holder of this lock panics") = Some(followed);
        member.settle(self.sequence, order, order).await?;
        let (upto, done) = (0, CopyAmount::default());
        member.note_stage(Some(CopyStage::Bytes(CopiedBytes { order, upto, done, all }))).await?;
        member.disk.sync_all().await
    }
}

// ---- bytes, and what they are copied with ----

impl<D: Disk> PoolMember<D> {
    /// Writes bytes of a file that is copied.
    pub(super) async fn take_copied_bytes(
        &self,
        (node, file): (&D::Node, &D::File),
        (offset, size_bytes): (u64, u64),
        bytes: &[u8],
    ) -> DiskResult<()> {
        if self.disk.stat_file(file).await?.size_bytes != size_bytes {
            self.disk.set_len(file, size_bytes).await?;
        }
        if bytes.is_empty() {
            return Ok(());
        }
        let capability = self.disk.xattr(node, CAPABILITY).await;
        self.write_here(file, offset, bytes).await?;
        match capability {
            Ok(value) => self.disk.set_xattr(node, CAPABILITY, &value, XattrFlags::default()).await,
            Err(_) => Ok(()),
        }
    }

    /// Gives a file attributes as the primary has them. The changes up to the item's are made; a file that is gone since is passed over.
    pub(super) async fn take_state(&self, what: &ItemKind, bytes: &[u8]) -> DiskResult<()> {
        let Some(id) = what.file() else { return Err(Errno::EINVAL) };
        let _turn = self.turns.write(id.0).await;
        let node = {
            let _still = self.whole.read(super::whole::MOVES).await;
            match self.node(id).await {
                Err(Errno::ESTALE) if self.record(id)?.is_none() => return Ok(()),
                node => node?,
            }
        };
        self.set_state(&node, what, bytes).await
    }

    /// Sets attributes of a file, which nobody changes meanwhile.
    pub(crate) async fn set_state(
        &self,
        node: &D::Node,
        what: &ItemKind,
        bytes: &[u8],
    ) -> DiskResult<()> {
        let disk = &self.disk;
        match what {
            ItemKind::XattrNames { .. } => {
                let kept: Vec<&[u8]> = bytes.split(|byte| *byte == 0).collect();
                for name in xattr_names(&**disk, node).await? {
                    if !kept.contains(&&name[..]) {
                        ignore_refusals(disk.remove_xattr(node, &name).await)?;
                    }
                }
                Ok(())
            }
            ItemKind::Xattr { name, .. } => {
                ignore_refusals(disk.set_xattr(node, name, bytes, XattrFlags::default()).await)
            }
            ItemKind::State { mode, uid, gid, mtime, .. } => {
                let before = disk.stat(node).await?;
                if (before.uid, before.gid) != (*uid, *gid) {
                    disk.set_owner(node, Some(*uid), Some(*gid)).await?;
                }
                if before.kind != FileKind::Symlink {
                    disk.set_mode(node, *mode).await?;
                }
                if before.kind != FileKind::Directory {
                    let (secs, nanos) = *mtime;
                    let time = TimeToSet::To(atoll_vfs::FileTime { secs, nanos });
                    disk.set_times(node, None, Some(time)).await?;
                }
                Ok(())
            }
            _ => Err(Errno::EINVAL),
        }
    }
}

/// The extended attributes of a file, but for Atoll's own.
pub(crate) async fn xattr_names<D: Disk>(
    disk: &D,
    node: &D::Node,
) -> DiskResult<Vec<bytes::Bytes>> {
    match disk.xattrs(node).await {
        Ok(mut names) => {
            names.retain(|name| !name.starts_with(OWN_ATTRIBUTES));
            Ok(names)
        }
        Err(Errno::EOPNOTSUPP) => Ok(Vec::new()),
        Err(errno) => Err(errno),
    }
}

/// An attribute that this disk cannot keep is one that it lacks, as when a change sets it.
pub(super) fn ignore_refusals(set: DiskResult<()>) -> DiskResult<()> {
    match set {
        Err(
            Errno::ENODATA
            | Errno::EOPNOTSUPP
            | Errno::EPERM
            | Errno::EACCES
            | Errno::ENOSPC
            | Errno::E2BIG
            | Errno::ERANGE,
        ) => Ok(()),
        set => set,
    }
}

pub(super) async fn make_directory<D: Disk>(
    disk: &D,
    dir: &D::Node,
    name: &[u8],
) -> DiskResult<()> {
    match disk.make(dir, name, Making::Directory, 0o700).await {
        Ok(()) | Err(Errno::EEXIST) => Ok(()),
        Err(errno) => Err(errno),
    }
}

/// Removes what stands under a name, and everything below it; nothing if there is nothing. Directories come up one by one, so that
/// two are open at a time however deep it is.
async fn remove_tree<D: Disk>(disk: &D, dir: &D::Node, name: &[u8]) -> DiskResult<()> {
    let Some(stat) = missing_is_none(disk.stat_at(dir, name).await)? else { return Ok(()) };
    if stat.kind != FileKind::Directory {
        return disk.unlink(dir, name).await;
    }
    let top = disk.node(dir, name).await?;
    let plain = RenameFlags { no_replace: true, exchange: false };
    let mut number = 0u64;
    loop {
        let listed = disk.list(&top).await?;
        if listed.is_empty() {
            return disk.rmdir(dir, name).await;
        }
        for below in listed {
            if below.kind != FileKind::Directory {
                disk.unlink(&top, &below.name).await?;
                continue;
            }
            let sub = disk.node(&top, &below.name).await?;
            for deeper in disk.list(&sub).await? {
                if deeper.kind != FileKind::Directory {
                    disk.unlink(&sub, &deeper.name).await?;
                    continue;
                }
                loop {
                    let up = format!("up-{number}");
                    number += 1;
                    match disk.rename((&sub, &deeper.name), (&top, up.as_bytes()), plain).await {
                        Err(Errno::EEXIST) => {}
                        renamed => break renamed?,
                    }
                }
            }
            disk.rmdir(&top, &below.name).await?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::directory::Directory;
    use crate::layout::Slot;

    #[test]
    fn stages_read_back_and_what_is_cut_off_is_none() {
        let done = CopyAmount { files: 3, bytes: u64::MAX };
        let bytes = CopiedBytes { order: 7, upto: u64::MAX, done, all: CopyAmount::default() };
        for stage in [CopyStage::Names, CopyStage::Bytes(bytes)] {
            let text = to_text(&stage);
            assert_eq!(from_text(&text), Some(stage));
            for len in 0..text.len() {
                assert_eq!(from_text(&text[..len]), None, "{len}");
            }
        }
        assert_eq!(from_text("atoll pool copying 2\nnames\nend\n"), None);
        assert_eq!(from_text("atoll pool copying 1\nbytes 1 2 3\nend\n"), None);
    }

    #[tokio::test]
    async fn a_deep_tree_is_removed_with_few_nodes_open() {
        let place = tempfile::tempdir().unwrap();
        let disk = Directory::open(place.path()).unwrap();
        let top = disk.top();
        disk.make(&top, b"tree", Making::Directory, 0o700).await.unwrap();
        let mut dir = disk.node(&top, b"tree").await.unwrap();
        for _ in 0..3000 {
            for name in [&b"file"[..], b"up-0"] {
                disk.make(&dir, name, Making::File, 0o600).await.unwrap();
            }
            disk.make(&dir, b"beside", Making::Directory, 0o700).await.unwrap();
            disk.make(&dir, b"below", Making::Directory, 0o700).await.unwrap();
            dir = disk.node(&dir, b"below").await.unwrap();
        }
        remove_tree(&disk, &top, b"tree").await.unwrap();
        assert_eq!(disk.list(&top).await.unwrap(), []);
        remove_tree(&disk, &top, b"tree").await.unwrap();
    }

    /// A directory of a learner has its default access control list of later: files that the log makes in it get that list, or lack the
    /// one that it had then. POSIX lists, on a real disk.
    #[tokio::test]
    async fn lists_of_files_that_the_log_makes_are_put_right_by_their_states() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("not run: it takes root");
            return;
        }
        let place = tempfile::tempdir().unwrap();
        let disk = Directory::open(place.path()).unwrap();
        let settings = crate::member::PoolSettings::new([7; 16], 1);
        let keys = [1, 2].map(|n| atoll_key::PeerId([n; 32]));
        let peer = |id| atoll_net::Peer { id, addr: ([10, 0, 0, 1], 1).into() };
        let list = crate::members::PoolMembers::new(keys.map(peer).to_vec()).unwrap();
        crate::member::create_member(
            &disk,
            settings,
            Some(&crate::pool_map::PoolMap::first(&list)),
        )
        .await
        .unwrap();
        let env: atoll_env::Env = Arc::new(atoll_env::TokioRuntime::current());
        let opened = PoolMember::open_unrecovered(env, disk).await.unwrap();
        let map = crate::pool_map::PoolMap::first(&list);
        let session = crate::messages::GroupSession { number: 1, primary_run: 1, backup_run: 1 };
        let begin = BeginCopy { session, map, order: 5, epoch: (1, 2), next: 9, used_bytes: 0 };
        let copied = opened.begin_copy(begin).await.unwrap();
        let place_of = |parent, name: &[u8]| crate::change::PoolPlace::new(FileId(parent), name);
        let make = |id, parent, name: &[u8], what, is_listed| {
            let (uid, gid, mode, times) = (3, 4, 0o640, None);
            let birth = crate::change::FileBirth { what, uid, gid, mode, is_listed, times };
            PoolChange::Make { id: FileId(id), at: place_of(parent, name), birth, by: None }
        };
        use crate::change::BirthKind::{Directory as Plain, Distributed, Regular};
        // user::rwx, user 7:rw-, group::r-x, mask::rwx, other::---.
        let mut acl = vec![2, 0, 0, 0];
        for (tag, bits, id) in [
            (1u16, 7u16, u32::MAX),
            (2, 6, 7),
            (4, 5, u32::MAX),
            (16, 7, u32::MAX),
            (32, 0, u32::MAX),
        ] {
            acl.extend(tag.to_le_bytes());
            acl.extend(bits.to_le_bytes());
            acl.extend(id.to_le_bytes());
        }
        let default = crate::disk::DEFAULT_LIST;
        let slot = Slot::new(7).unwrap();
        let files = CopyBatch::Files(vec![
            make(20, 1, b"dir", Distributed(slot), false),
            make(3, 20, b"before", Regular, false),
            PoolChange::Extended {
                id: FileId(20),
                name: default.to_vec(),
                value: Some(acl.clone()),
                by: None,
            },
        ]);
        assert!(copied.take(1, &files).await.unwrap().is_none());
        assert!(copied.take(1, &files).await.unwrap().is_none(), "it was taken before");
        let twice = CopyBatch::Files(vec![make(3, 20, b"twice", Regular, false)]);
        assert!(matches!(copied.take(2, &twice).await.err(), Some(CopyBatchError::Wrong(_))));
        let nowhere = CopyBatch::Files(vec![make(5, 3, b"in a file", Regular, false)]);
        assert!(matches!(copied.take(2, &nowhere).await.err(), Some(CopyBatchError::Wrong(_))));
        let end = CopyBatch::End(CopyAmount::default());
        let member = copied.take(2, &end).await.unwrap().expect("it has all names");
        assert_eq!(member.log_stand().map(|stand| (stand.last, stand.epoch)), Some((5, 2)));
        let names = async |id| {
            let node = member.node(FileId(id)).await.unwrap();
            (
                xattr_names(&*member.disk, &node).await.unwrap(),
                member.disk.stat(&node).await.unwrap(),
            )
        };
        assert_eq!(names(3).await.0, [""; 0], "it got no list when it was made");
        let changes = [
            make(4, 20, b"file", Regular, false),
            make(6, 20, b"sub", Plain, false),
            // Its directory had a list then, and has none any more.
            make(8, 1, b"listed", Distributed(slot), true),
        ];
        for (change, order) in changes.into_iter().zip(6..) {
            member.accept(order, change).await.unwrap();
            member.release(order).await.unwrap();
        }
        assert_eq!(names(6).await.0.len(), 2, "it got the list of later");
        for (id, list) in [(4, &b""[..]), (6, b""), (8, b"system.posix_acl_default\0")] {
            let (id, after) = (FileId(id), 8);
            let what = ItemKind::XattrNames { id, after };
            member.take_bytes(&what, list).await.unwrap();
            if !list.is_empty() {
                let what = ItemKind::Xattr { id, after, name: default.to_vec() };
                member.take_bytes(&what, &acl).await.unwrap();
            }
            let (mode, uid, gid, mtime) = (0o2640, 9, 4, (5, 6));
            let what = ItemKind::State { id, after, mode, uid, gid, mtime };
            member.take_bytes(&what, &[]).await.unwrap();
            let (names, stat) = names(id.0).await;
            assert_eq!(names.len(), usize::from(!list.is_empty()), "{names:?}");
            assert_eq!((stat.mode, stat.uid, stat.gid), (0o2640, 9, 4));
        }
        assert!(matches!(member.copy_stage(), Some(CopyStage::Bytes(_))));
        member.take_bytes(&ItemKind::Complete, &[]).await.unwrap();
        assert_eq!(member.copy_stage(), None);
    }
}
