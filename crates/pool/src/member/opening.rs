//! How a member's disk is made and opened.
//!
//! `D/.atoll/stamp` says that D belongs to a pool. A D without its stamp is refused, and never made anew: the disk of a pool may
//! just not be mounted.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64};
use std::sync::{Arc, Mutex, OnceLock};

use atoll_env::{Env, Instant};
use atoll_net::Peer;
use atoll_vfs::Errno;

use super::copied::CopiedMember;
use super::redo::Makes;
use super::{CheckReport, ID_ATTRIBUTE, LeaveReport, PoolMember, copied, leaving};
use crate::change::PoolChange;
use crate::disk::{Disk, DiskResult, Making, replace_file};
use crate::held::HeldFiles;
use crate::index::{IndexMeta, PoolIndex};
use crate::journal::{HALF_BYTES, JournalRecord, PoolJournal};
use crate::layout::{FileId, GroupNumber, OWN_DIRECTORY, SLOTS_DIRECTORY};
use crate::map::{VoterError, make_votes, members_file};
use crate::members::PoolMembers;
use crate::messages::{BeginCopy, CopyStage};
use crate::pool_map::PoolMap;
use crate::roster::RosterEdit;
use crate::routing::PoolId;
use crate::turns::Turns;

pub(super) const STAMP: &[u8] = b"stamp";
pub(super) const INDEX: &[u8] = b"index";
const LOCK: &[u8] = b"lock";
/// What a new file system has, and a pool leaves alone.
const LEFT_ALONE: &[u8] = b"lost+found";

/// The deepest distribution level: the paper's figures end at 10.
const MAX_LEVEL: u8 = 16;
/// The first line of a stamp.
const STAMP_LINE: &str = "atoll pool 2";

/// Numbers that are passed over at each start: as many files may have got one since the last checkpoint, and the journal knows
/// only of those that Atoll made.
pub(super) const PASSED_OVER: u64 = 1 << 24;

/// What a pool is made with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PoolSettings {
    /// Names the pool.
    pub pool: [u8; 16],
    /// Which of its groups has the files of this directory.
    pub group: GroupNumber,
    /// Directories down to this level are distributed (Kosha §3.2); at most 16.
    pub level: u8,
}

/// Why no pool was made.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum CreateError {
    /// There is something in it already.
    #[error("it is not empty: it holds {0}")]
    NotEmpty(String),
    /// The level is too deep.
    #[error("a distribution level is at most {MAX_LEVEL}")]
    Level,
    /// The disk cannot keep files as they are.
    #[error("files cannot be kept there: {0}")]
    Unfit(&'static str),
    /// A call of the disk failed.
    #[error("{0}: {1}")]
    Disk(&'static str, Errno),
}

/// Why a member's disk was not opened.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// There is no stamp.
    #[error("it is no pool's: it has no {OWN_DIRECTORY}/stamp. Is its disk mounted?")]
    NoStamp,
    /// The stamp cannot be read.
    #[error("{OWN_DIRECTORY}/stamp is damaged, or of a newer version")]
    Stamp,
    /// Another process has it.
    #[error("another process serves it")]
    InUse,
    /// A call of the disk failed.
    #[error("{0}: {1}")]
    Disk(&'static str, Errno),
    /// The index could not be read or written.
    #[error("{0}")]
    Index(String),
    /// The pool has several members.
    #[error("it is one member's of a pool of several: a node serves it")]
    HasMembers,
    /// This node is not in the list of its members, or there is none.
    #[error("this node is not one of its members")]
    NotAMember,
    /// The list of the members cannot be read.
    #[error("{OWN_DIRECTORY}/members is damaged, or of a newer version")]
    Members,
    /// The index is of another version, and what of it cannot be made again the pool of several needs.
    #[error("its index is of another version: copy its plain files into a pool that is made anew")]
    IndexVersion,
    /// What it has voted for cannot be read.
    #[error("its votes for the pool's map: {0}")]
    Votes(#[from] VoterError),
    /// It follows a primary that knows less than it.
    #[error(
        "it has made changes that its primary does not know: the primary's disk was set back to an older state"
    )]
    PrimaryIsOlder,
}

/// What opening a member's disk has come across.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OpenReport {
    /// Changes in the journal that the index had not.
    pub changes_redone: usize,
    /// Names that were made or removed, since the disk had lost the change.
    pub names_mended: usize,
    /// Files of which the index was made again, since it was gone.
    pub files_indexed: u64,
}

impl PoolSettings {
    /// Of the group that has the root directory.
    pub fn new(pool: [u8; 16], level: u8) -> PoolSettings {
        PoolSettings { pool, group: GroupNumber::FIRST, level }
    }

    /// What names this group of the pool in calls: of the first one it is the pool's name.
    pub fn address(&self) -> PoolId {
        if self.group == GroupNumber::FIRST {
            return self.pool;
        }
        let mut hasher = blake3::Hasher::new_derive_key("atoll pool group address 1");
        hasher.update(&self.pool).update(&[self.group.number()]);
        let hash = hasher.finalize();
        *hash.as_bytes().first_chunk().expect("a hash has 32 bytes")
    }

    fn to_stamp(self) -> String {
        let pool = u128::from_be_bytes(self.pool);
        let PoolSettings { group, level, .. } = self;
        format!("{STAMP_LINE}\npool {pool:032x}\ngroup {group}\nlevel {level}\n")
    }

    fn from_stamp(text: &str) -> Option<PoolSettings> {
        let mut lines = text.lines();
        if lines.next()? != STAMP_LINE {
            return None;
        }
        let pool = lines.next()?.strip_prefix("pool ")?;
        let pool = u128::from_str_radix(pool, 16).ok()?.to_be_bytes();
        let group = lines.next()?.strip_prefix("group ")?.parse().ok()?;
        let level = lines.next()?.strip_prefix("level ")?.parse().ok()?;
        let group = GroupNumber::new(group)?;
        (level <= MAX_LEVEL).then_some(PoolSettings { pool, group, level })
    }
}

/// What a pool on this disk was made with. It need not be free.
pub async fn read_settings<D: Disk>(disk: &D) -> Result<PoolSettings, OpenError> {
    match disk.node(&disk.top(), OWN_DIRECTORY.as_bytes()).await {
        Err(Errno::ENOENT) => Err(OpenError::NoStamp),
        Err(errno) => Err(OpenError::Disk("cannot open its .atoll", errno)),
        Ok(own) => read_stamp(disk, &own).await,
    }
}

/// The map of a pool that has a member on this disk, as far as that knew when a member came or went last; none in a pool of one. It need
/// not be free.
///
/// # Errors
/// If it cannot be read.
pub async fn read_map<D: Disk>(disk: &D) -> Result<Option<PoolMap>, OpenError> {
    let own = disk.node(&disk.top(), OWN_DIRECTORY.as_bytes()).await;
    let own = own.map_err(|errno| OpenError::Disk("cannot open its .atoll", errno))?;
    read_members(disk, &own).await
}

async fn read_members<D: Disk>(disk: &D, own: &D::Node) -> Result<Option<PoolMap>, OpenError> {
    members_file::read(disk, own).await.map_err(|errno| match errno {
        Errno::EINVAL => OpenError::Members,
        errno => OpenError::Disk("cannot read its list of members", errno),
    })
}

/// That a member of a pool with this distribution level can be made on a disk: it is empty, and keeps what files have.
///
/// # Errors
/// Why not.
pub async fn check_usable<D: Disk>(disk: &D, level: u8) -> Result<(), CreateError> {
    if level > MAX_LEVEL {
        return Err(CreateError::Level);
    }
    check_empty(disk).await?;
    probe(disk).await
}

async fn check_empty<D: Disk>(disk: &D) -> Result<(), CreateError> {
    let listed = disk.list(&disk.top()).await;
    let listed = listed.map_err(|errno| CreateError::Disk("cannot list it", errno))?;
    match listed.iter().find(|found| found.name != LEFT_ALONE) {
        Some(found) => {
            Err(CreateError::NotEmpty(String::from_utf8_lossy(&found.name).into_owned()))
        }
        None => Ok(()),
    }
}

/// Whether a process has the only member's disk.
pub async fn is_in_use<D: Disk>(disk: &D) -> Result<bool, OpenError> {
    let own = disk.node(&disk.top(), OWN_DIRECTORY.as_bytes()).await;
    let own = own.map_err(|errno| OpenError::Disk("cannot open its .atoll", errno))?;
    match disk.lock(&own, LOCK).await {
        Ok(()) => Ok(false),
        Err(Errno::EAGAIN) => Ok(true),
        Err(errno) => Err(OpenError::Disk("cannot lock it", errno)),
    }
}

/// Makes a pool of one a pool of several, of which this node, `local`, is the only member by now, and whose files are to have so many
/// copies. One that is so already is left alone.
///
/// # Errors
/// As when it is opened.
///
/// # Panics
/// If `copies` is not between 1 and [`crate::MAX_COPIES`].
pub async fn share<D: Disk>(
    env: Env,
    disk: D,
    local: Peer,
    (copies, min_copies): (u8, u8),
) -> Result<(), OpenError> {
    let unrecovered = PoolMember::open_unrecovered(env, disk).await?;
    if unrecovered.map().is_some() {
        return Ok(());
    }
    let (member, _) = unrecovered.recover(Makes::All).await?;
    // Files that were put there by hand are the pool's, too: from now on nobody looks for such.
    member.check().await?;
    let founding = PoolMembers::new(vec![local]).expect("one is enough");
    let mut map = PoolMap::first(&founding);
    let roster = map.roster.with(&RosterEdit::Copies(copies));
    let roster = roster.and_then(|roster| roster.with(&RosterEdit::MinCopies(min_copies)));
    map.roster = roster.expect("numbers of copies");
    let failed = |errno| OpenError::Disk("cannot write who its members are", errno);
    // Who joins has none of the changes before, of which there is one at least, and so is given the files.
    member.change(PoolChange::AllSynced { kept: Vec::new() }).await.map_err(failed)?;
    let last = member.changes_so_far();
    member.log().begin_after(last);
    member.checkpoint().await.map_err(failed)?;
    let own = member.own().await.map_err(failed)?;
    make_votes(&*member.disk, &own, &map).await.map_err(failed)?;
    // Last: it says that the pool is one of several.
    members_file::write(&*member.disk, &own, &map).await.map_err(failed)
}

/// Compares index and files of the only member, and puts right what can be.
pub async fn check<D: Disk>(env: Env, disk: D) -> Result<CheckReport, OpenError> {
    PoolMember::open(env, disk).await?.0.check().await
}

/// Makes one plain tree of the only member's files, without Atoll.
pub async fn leave<D: Disk>(env: Env, disk: D) -> Result<LeaveReport, OpenError> {
    match leaving::resume(&disk).await? {
        Some(report) => Ok(report),
        // A member leaves with what it has.
        None => {
            let member = PoolMember::open_unrecovered(env, disk).await?;
            member.recover(Makes::All).await?.0.leave().await
        }
    }
}

/// Makes a pool of one member on a disk that is empty.
pub async fn create<D: Disk>(disk: &D, settings: PoolSettings) -> Result<(), CreateError> {
    create_member(disk, settings, None).await
}

/// Makes one member of a pool on a disk that is empty: a founding one if the map is the pool's first, else one that has joined, and that
/// was never a voter.
pub async fn create_member<D: Disk>(
    disk: &D,
    settings: PoolSettings,
    map: Option<&PoolMap>,
) -> Result<(), CreateError> {
    let failed = |doing| move |errno| CreateError::Disk(doing, errno);
    let top = disk.top();
    check_usable(disk, settings.level).await?;
    let cannot = "cannot make its directories";
    let own = OWN_DIRECTORY.as_bytes();
    disk.make(&top, own, Making::Directory, 0o700).await.map_err(failed(cannot))?;
    make_fixed(disk, &top, settings.group).await.map_err(failed(cannot))?;
    if let Some(map) = map {
        let own = disk.node(&top, OWN_DIRECTORY.as_bytes()).await.map_err(failed(cannot))?;
        if map.epoch == 1 {
            make_votes(disk, &own, map).await.map_err(failed("cannot make its votes"))?;
        }
        members_file::write(disk, &own, map)
            .await
            .map_err(failed("cannot write who its members are"))?;
    }
    write_stamp(disk, settings).await.map_err(failed("cannot write its stamp"))
}

/// Makes the directories of the slots, and those that a group always has, in a D without them.
pub(super) async fn make_fixed<D: Disk>(
    disk: &D,
    top: &D::Node,
    group: GroupNumber,
) -> DiskResult<()> {
    disk.make(top, SLOTS_DIRECTORY.as_bytes(), Making::Directory, 0o700).await?;
    let slots = disk.node(top, SLOTS_DIRECTORY.as_bytes()).await?;
    for id in FileId::fixed(group) {
        let slot = id.slot().to_string();
        match disk.make(&slots, slot.as_bytes(), Making::Directory, 0o700).await {
            Ok(()) | Err(Errno::EEXIST) => {}
            Err(errno) => return Err(errno),
        }
        let slot = disk.node(&slots, slot.as_bytes()).await?;
        let name = id.to_string();
        disk.make(&slot, name.as_bytes(), Making::Directory, 0o755).await?;
        let node = disk.node(&slot, name.as_bytes()).await?;
        // Where there are no such attributes the index alone knows files.
        let _ = disk.set_xattr(&node, ID_ATTRIBUTE, &id.0.to_be_bytes(), Default::default()).await;
        disk.set_mode(&node, 0o755).await?;
    }
    Ok(())
}

async fn write_stamp<D: Disk>(disk: &D, settings: PoolSettings) -> DiskResult<()> {
    let own = disk.node(&disk.top(), OWN_DIRECTORY.as_bytes()).await?;
    replace_file(disk, &own, (b"stamp.new", STAMP), settings.to_stamp().as_bytes()).await?;
    disk.sync_all().await
}

/// Tries whether the disk keeps what files have.
async fn probe<D: Disk>(disk: &D) -> Result<(), CreateError> {
    const NAME: &[u8] = b".atoll-probe";
    let top = disk.top();
    let unfit = |why| move |_| CreateError::Unfit(why);
    let name_255 = [b'n'; 255];
    disk.make(&top, &name_255, Making::File, 0o600)
        .await
        .map_err(unfit("names of 255 bytes do not fit"))?;
    let outcome = async {
        let before =
            disk.stat_at(&top, &name_255).await.map_err(unfit("a new file is not found"))?;
        disk.rename((&top, &name_255), (&top, NAME), Default::default())
            .await
            .map_err(unfit("files cannot be renamed"))?;
        let node = disk.node(&top, NAME).await.map_err(unfit("a renamed file is not found"))?;
        let after = disk.stat(&node).await.map_err(unfit("a renamed file is not found"))?;
        if before.ino != after.ino {
            return Err(CreateError::Unfit("inode numbers do not last"));
        }
        disk.set_owner(&node, Some(65534), Some(65534)).await.map_err(unfit(
            "owners cannot be set, which takes root (or a file system that has owners)",
        ))?;
        if disk.stat_at(&top, b".ATOLL-PROBE").await.is_ok() {
            return Err(CreateError::Unfit("it takes upper and lower case for the same"));
        }
        disk.make(&top, b".atoll-probe-link", Making::Symlink(b"x"), 0o777)
            .await
            .map_err(unfit("there are no symbolic links"))?;
        disk.unlink(&top, b".atoll-probe-link").await.map_err(unfit("names cannot be removed"))?;
        Ok(())
    }
    .await;
    for name in [NAME, &name_255] {
        // One of the two is there.
        let _ = disk.unlink(&top, name).await;
    }
    outcome
}

/// The last record that a checkpoint covers, and the last change that was made by then. The journal knows of the last checkpoint as
/// the index does: one that is made again is one of what the disk has now.
pub(super) fn checkpoint_of(records: &[JournalRecord], meta: Option<IndexMeta>) -> (u64, u64) {
    let checkpoints = records.iter().filter_map(|record| match record.change {
        PoolChange::Checkpoint { sequence, order, .. } => Some((sequence, order)),
        _ => None,
    });
    let of_index = meta.map(|meta| (meta.sequence, meta.order));
    checkpoints.chain(of_index).max().unwrap_or((0, 0))
}

/// The last change that this backup was told to make, as far as its journal still knows.
pub(super) fn released_of(records: &[JournalRecord]) -> u64 {
    let released = records.iter().filter_map(|record| match record.change {
        PoolChange::Released { order } => Some(order),
        _ => None,
    });
    released.max().unwrap_or(0)
}

/// The last of the changes that follow `applied` without a gap. There is one where an index was lost.
pub(super) fn last_of_unbroken(applied: u64, decided: &BTreeMap<u64, PoolChange>) -> u64 {
    let mut last = applied;
    while decided.contains_key(&(last + 1)) {
        last += 1;
    }
    last
}

/// Where a member stands in the order of changes.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub(crate) struct LogStand {
    /// The last change that it has.
    pub(crate) last: u64,
    /// The epoch of that one.
    pub(crate) epoch: u64,
    /// The newest epochs ([`crate::change_log::ChangeLog::newest_epochs`]).
    pub(crate) epochs: Vec<(u64, u64)>,
    /// The last change that it has made, or was about to.
    pub(crate) applied: u64,
}

/// A member's disk that is not in order yet: what its journal has is to be made again.
pub(crate) struct UnrecoveredMember<D: Disk> {
    member: PoolMember<D>,
    records: Vec<JournalRecord>,
    meta: Option<IndexMeta>,
    map: Option<PoolMap>,
}

impl<D: Disk> UnrecoveredMember<D> {
    /// Makes again what a crash has undone. Who is a backup waits for its primary to say which changes are.
    pub(crate) async fn recover(
        self,
        makes: Makes,
    ) -> Result<(Arc<PoolMember<D>>, OpenReport), OpenError> {
        let report = self.member.recover(self.records, self.meta, makes).await?;
        self.member.resume_import().await?;
        Ok((Arc::new(self.member), report))
    }

    /// Discards what it has: it is given all files ([`CopiedMember`]).
    pub(crate) async fn begin_copy(self, begun: BeginCopy) -> Result<CopiedMember<D>, OpenError> {
        let (known, _) = checkpoint_of(&self.records, self.meta);
        let last_record = self.records.last().map_or(0, |record| record.sequence);
        let has_own = match self.member.copy_stage() {
            None => true,
            // A crash came before they were discarded: the index of a copy is of no change.
            Some(CopyStage::Names) => self.meta.is_some_and(|meta| meta.order > 0),
            Some(CopyStage::Bytes(_)) => false,
        };
        CopiedMember::begin(self.member, (last_record.max(known), has_own), begun).await
    }

    /// How far it is that is given all files; none if it is complete.
    pub(crate) fn copy_stage(&self) -> Option<CopyStage> {
        self.member.copy_stage()
    }

    /// Nobody gives it what it lacks: it is complete from now on.
    pub(crate) async fn take_as_complete(&self) -> DiskResult<()> {
        match self.member.copy_stage() {
            Some(_) => self.member.note_complete().await,
            None => Ok(()),
        }
    }

    /// Where it stands.
    pub(crate) fn stands(&self) -> Result<LogStand, OpenError> {
        let failed = |error: crate::index::PoolIndexError| OpenError::Index(error.to_string());
        let mut log = self.member.index.group().map_err(failed)?.log;
        let (known, applied) = checkpoint_of(&self.records, self.meta);
        let mut decided = self.member.index.logged(applied, usize::MAX).map_err(failed)?;
        for record in self.records.iter().filter(|record| record.sequence > known) {
            if record.order > 0 {
                log.add(record.order, &record.change);
                decided.insert(record.order, record.change.clone());
            }
        }
        let last = last_of_unbroken(applied, &decided);
        let released = released_of(&self.records).min(last);
        let (epoch, epochs) = (log.epoch_of(last), log.newest_epochs(last));
        Ok(LogStand { last, epoch, epochs, applied: applied.max(released) })
    }

    /// Whether it has the index that the last checkpoint wrote: without it, it may lack changes that it had.
    pub(crate) fn has_index(&self) -> bool {
        let (known, _) = checkpoint_of(&self.records, self.meta);
        known == 0 || self.meta.is_some_and(|meta| meta.sequence >= known)
    }

    /// The disk.
    pub(crate) fn disk(&self) -> Arc<D> {
        self.member.disk.clone()
    }

    /// A map of the pool, which may be an old one; none in a pool of one.
    pub(crate) fn map(&self) -> Option<&PoolMap> {
        self.map.as_ref()
    }

    /// What the pool was made with.
    pub(crate) fn settings(&self) -> PoolSettings {
        self.member.settings
    }
}

impl<D: Disk> PoolMember<D> {
    /// Opens the only member's disk, and brings it in order.
    pub(crate) async fn open(
        env: Env,
        disk: D,
    ) -> Result<(Arc<PoolMember<D>>, OpenReport), OpenError> {
        let member = Self::open_unrecovered(env, disk).await?;
        match member.map {
            Some(_) => Err(OpenError::HasMembers),
            None => member.recover(Makes::All).await,
        }
    }

    /// Opens a member's disk.
    pub(crate) async fn open_unrecovered(
        env: Env,
        disk: D,
    ) -> Result<UnrecoveredMember<D>, OpenError> {
        let failed = |doing| move |errno| OpenError::Disk(doing, errno);
        let top = disk.top();
        let own = match disk.node(&top, OWN_DIRECTORY.as_bytes()).await {
            Err(Errno::ENOENT) => return Err(OpenError::NoStamp),
            own => own.map_err(failed("cannot open its .atoll"))?,
        };
        let settings = read_stamp(&disk, &own).await?;
        match disk.lock(&own, LOCK).await {
            Err(Errno::EAGAIN) => return Err(OpenError::InUse),
            locked => locked.map_err(failed("cannot lock it"))?,
        }
        let map = read_members(&disk, &own).await?;
        let slots = match disk.node(&top, SLOTS_DIRECTORY.as_bytes()).await {
            // A crash came while they were discarded.
            Err(Errno::ENOENT)
                if copied::read_stage(&disk, &own).await? == Some(CopyStage::Names) =>
            {
                make_fixed(&disk, &top, settings.group)
                    .await
                    .map_err(failed("cannot make its slots"))?;
                disk.node(&top, SLOTS_DIRECTORY.as_bytes()).await
            }
            slots => slots,
        };
        let slots = slots.map_err(failed("cannot open its slots"))?;
        let (journal, records) = PoolJournal::open(&disk, &own, HALF_BYTES)
            .await
            .map_err(failed("cannot read its journal"))?;
        let (index, meta) = open_index(&disk, &own, map.is_some()).await?;
        let stage = copied::read_stage(&disk, &own).await?;
        let (disk, kept) = (Arc::new(disk), (slots, journal, index));
        let member = PoolMember::assemble((env, disk), (settings, map.is_some()), kept, stage);
        Ok(UnrecoveredMember { member, records, meta, map })
    }

    /// A member of these parts, which knows nothing of its files yet.
    pub(super) fn assemble(
        (env, disk): (Env, Arc<D>),
        (settings, in_group): (PoolSettings, bool),
        (slots, journal, index): (D::Node, PoolJournal<D>, PoolIndex),
        stage: Option<CopyStage>,
    ) -> PoolMember<D> {
        let max_nodes = disk.max_nodes();
        PoolMember {
            env,
            settings,
            index,
            journal,
            held: Mutex::new(HeldFiles::new(max_nodes)),
            turns: Turns::default(),
            whole: Turns::default(),
            crossing_turns: Turns::default(),
            next: AtomicU64::new(FileId::FIRST_COUNT),
            unsettled: Mutex::default(),
            unsure: OnceLock::new(),
            is_tight: AtomicBool::new(false),
            rules: [AtomicU8::new(1), AtomicU8::new(settings.level)],
            in_group,
            backups: Mutex::default(),
            followed: Mutex::default(),
            log: Mutex::default(),
            marks: Mutex::default(),
            writes: Mutex::default(),
            is_closed: AtomicBool::new(false),
            done: Mutex::default(),
            crossings: Mutex::default(),
            crossing_holds: Mutex::default(),
            planned: Mutex::new(None),
            quotas: Arc::default(),
            above_elsewhere: Mutex::default(),
            unlinked: Mutex::default(),
            reopened: Mutex::new(Instant(0)),
            copying: Mutex::new(stage),
            slots,
            disk,
        }
    }
}

async fn open_index<D: Disk>(
    disk: &D,
    own: &D::Node,
    has_members: bool,
) -> Result<(PoolIndex, Option<IndexMeta>), OpenError> {
    let file = disk
        .database(own, INDEX)
        .await
        .map_err(|errno| OpenError::Disk("cannot open its index", errno))?;
    match PoolIndex::open(file) {
        Ok(opened) => Ok(opened),
        Err(error) if !error.is_damaged => Err(OpenError::Index(error.to_string())),
        Err(error) if error.is_other_version && has_members => Err(OpenError::IndexVersion),
        Err(error) => {
            // What the index knows is made again from the files.
            tracing::warn!("{error}; it is made anew");
            disk.unlink(own, INDEX)
                .await
                .map_err(|errno| OpenError::Disk("cannot remove its index", errno))?;
            let file = disk.database(own, INDEX).await;
            let file = file.map_err(|errno| OpenError::Disk("cannot open its index", errno))?;
            PoolIndex::open(file).map_err(|error| OpenError::Index(error.to_string()))
        }
    }
}

async fn read_stamp<D: Disk>(disk: &D, own: &D::Node) -> Result<PoolSettings, OpenError> {
    let node = match disk.node(own, STAMP).await {
        Err(Errno::ENOENT) => return Err(OpenError::NoStamp),
        node => node.map_err(|errno| OpenError::Disk("cannot open its stamp", errno))?,
    };
    let read = async { disk.read(&disk.open(&node).await?, 0, 4096).await };
    let text = read.await.map_err(|errno| OpenError::Disk("cannot read its stamp", errno))?;
    std::str::from_utf8(&text).ok().and_then(PoolSettings::from_stamp).ok_or(OpenError::Stamp)
}
