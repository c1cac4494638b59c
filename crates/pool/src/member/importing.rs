//! Taking a tree of plain files into a pool in place: each of its topmost names is renamed into a directory of the pool, and all files get
//! numbers.
//!
//! ```text
//! look       all of the tree is looked at: what cannot be taken in refuses the whole before anything is changed
//! importing  .atoll/importing names the directory that gets the files, durably
//! rename     each topmost name, without replacing any; durable before the next step
//! number     every file below that directory that the index lacks; the index is written
//! end        .atoll/importing is removed
//! ```
//!
//! A crash leaves each topmost name in the tree or in the pool. Whoever opens the member next and finds `importing` does the last two steps
//! again; importing again renames what is left. Nothing is removed or replaced.
//!
//! **In a pool of several** this is for its only member: nobody else has to be told, and members that join later are given all files of
//! the index.

use atoll_env::Env;
use atoll_vfs::{Errno, FileKind, RenameFlags};

use super::{ID_ATTRIBUTE, MAX_PENDING, Makes, OpenError, PoolMember, UnrecoveredMember};
use crate::change::{PoolChange, PoolPlace};
use crate::disk::{Disk, DiskResult, Stat, missing_is_none, replace_file};
use crate::layout::{self, FileId, LinkForm, MIN_PLACEHOLDER_BYTES, Placeholder};
use crate::tree_survey::{ImportWalk, TreeProblem, TreeStep, TreeSurvey, survey_tree};

/// Which directory gets files, in Atoll's own directory: as long as it is there, some may have no number.
pub(super) const IMPORTING: &[u8] = b"importing";
pub(super) const IMPORTING_BESIDE: &[u8] = b"importing.new";
/// The first words of that file; the directory's number follows.
const IMPORTING_WORDS: &str = "atoll pool importing 1 ";

/// Room that the index needs for each file, bytes. A guess: some three times what its entries take.
const INDEX_BYTES: u64 = 1 << 10;

/// Why a tree was not taken in, or not all of it.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImportError {
    /// The member cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Other members would not have the files.
    #[error("the pool has other machines, or other groups")]
    HasOthers,
    /// The pool has no such directory.
    #[error("the pool has no such directory to take the files: {0}")]
    Into(Errno),
    /// The tree cannot be looked at.
    #[error("cannot look at it: {0}")]
    Look(Errno),
    /// Some of its names were renamed; what was has numbers.
    #[error("cannot move {} into the pool: {errno}", String::from_utf8_lossy(name))]
    Move {
        /// The first name that was not.
        name: Vec<u8>,
        /// Why.
        errno: Errno,
    },
    /// A call of the disk failed.
    #[error("{0}: {1}")]
    Disk(&'static str, Errno),
}

/// What an import in place has done.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct InPlaceReport {
    /// What was found before anything was changed. With a problem in it nothing was.
    pub survey: TreeSurvey,
    /// Topmost names that are the pool's now.
    pub moved: u64,
    /// Files that have got numbers.
    pub numbered: u64,
}

/// Takes all files below `source`, a directory of the same file system, into the directory `into` of the pool whose only member has this disk;
/// with `is_trial`, only looks whether that could be.
///
/// # Errors
/// Why not, or not all of them.
pub async fn import_in_place<D: Disk>(
    env: Env,
    disk: D,
    source: &D::Node,
    into: &[Vec<u8>],
    is_trial: bool,
) -> Result<InPlaceReport, ImportError> {
    let unrecovered = PoolMember::open_unrecovered(env, disk).await?;
    if !is_only_member(&unrecovered) {
        return Err(ImportError::HasOthers);
    }
    let (member, _) = unrecovered.recover(Makes::All).await?;
    let into = member.directory_of(into).await.map_err(ImportError::Into)?;
    let mut survey = survey_tree(&*member.disk, source, None).await.map_err(ImportError::Look)?;
    member.note_taken(source, into, &mut survey).await.map_err(ImportError::Look)?;
    if is_trial || survey.problems_in_all > 0 {
        return Ok(InPlaceReport { survey, ..InPlaceReport::default() });
    }
    member.take_in(source, into, survey).await
}

/// Whether the pool has no member but this one, and no other group.
fn is_only_member<D: Disk>(member: &UnrecoveredMember<D>) -> bool {
    member.copy_stage().is_none() && member.map().is_none_or(|map| map.is_of_one())
}

impl<D: Disk> PoolMember<D> {
    /// The directory of a path, given by its names from the root on.
    async fn directory_of(&self, names: &[Vec<u8>]) -> DiskResult<FileId> {
        let mut id = FileId::ROOT;
        for name in names {
            let (dir, _) = self.directory(id).await?;
            id = self.find(id, &dir, name).await?.id;
        }
        self.directory(id).await.map(|_| id)
    }

    /// Notes the topmost names that the pool has already.
    async fn note_taken(
        &self,
        source: &D::Node,
        into: FileId,
        survey: &mut TreeSurvey,
    ) -> DiskResult<()> {
        let dir = self.node(into).await?;
        for listed in self.disk.list(source).await? {
            if missing_is_none(self.disk.stat_at(&dir, &listed.name).await)?.is_some() {
                survey.note(listed.name.to_vec(), TreeProblem::NameTaken);
            }
        }
        Ok(())
    }

    /// Renames, numbers, and makes both durable.
    async fn take_in(
        &self,
        source: &D::Node,
        into: FileId,
        survey: TreeSurvey,
    ) -> Result<InPlaceReport, ImportError> {
        let failed = |doing| move |errno| ImportError::Disk(doing, errno);
        let room = self.disk.stat_fs().await.map_err(failed("cannot ask what room there is"))?;
        let room = room.blocks_available.saturating_mul(room.block_size_bytes.into());
        if room / INDEX_BYTES < survey.files {
            let doing = "there is no room for the index of so many files";
            return Err(ImportError::Disk(doing, Errno::ENOSPC));
        }
        self.forget_numbers(source).await.map_err(failed("cannot prepare its files"))?;
        if self.in_group && self.changes_so_far() == 0 {
            // Who joins lacks one change at least, and so is given all files.
            let change = PoolChange::AllSynced { kept: Vec::new() };
            self.change(change).await.map_err(failed("cannot write to the journal"))?;
        }
        let own = self.own().await.map_err(failed("cannot open its .atoll"))?;
        let text = format!("{IMPORTING_WORDS}{into}\n");
        let names = (IMPORTING_BESIDE, IMPORTING);
        let begun = async {
            replace_file(&*self.disk, &own, names, text.as_bytes()).await?;
            self.disk.sync_all().await
        };
        begun.await.map_err(failed("cannot note that files are to come"))?;
        let mut moved = 0;
        let moving = self.move_all(source, into, &mut moved).await;
        let numbered = self.end_import().await.map_err(failed("cannot number its files"))?;
        moving?;
        Ok(InPlaceReport { survey, moved, numbered })
    }

    /// Numbers that files have from another pool, or have from one that they were copied from, are not theirs here.
    async fn forget_numbers(&self, source: &D::Node) -> DiskResult<()> {
        let mut walk = ImportWalk::begin(&*self.disk, source).await?;
        while let Some(step) = walk.next().await {
            let TreeStep::Name(name, found) = step else { continue };
            let (node, stat) = match found {
                Err(Errno::ENOENT) => continue,
                found => found?,
            };
            // A file may have a name in the pool already.
            if !self.knows(&stat)? && self.id_of(&node).await.is_some() {
                self.disk.remove_xattr(&node, ID_ATTRIBUTE).await?;
            }
            if stat.kind == FileKind::Directory {
                walk.enter(&name, &node).await?;
            }
        }
        Ok(())
    }

    /// Whether the index has this file.
    fn knows(&self, stat: &Stat) -> DiskResult<bool> {
        let known = self.index.by_inode(stat.ino).map_err(|error| self.index_failed(&error))?;
        let record = known.map(|id| self.record(id)).transpose()?.flatten();
        Ok(record.is_some_and(|record| record.generation == stat.generation))
    }

    async fn move_all(
        &self,
        source: &D::Node,
        into: FileId,
        moved: &mut u64,
    ) -> Result<(), ImportError> {
        let dir = self.node(into).await.map_err(ImportError::Into)?;
        let plain = RenameFlags { no_replace: true, exchange: false };
        for listed in self.disk.list(source).await.map_err(ImportError::Look)? {
            let (from, to) = ((source, &listed.name[..]), (&dir, &listed.name[..]));
            match self.disk.rename(from, to, plain).await {
                Ok(()) => *moved += 1,
                // Somebody has removed it.
                Err(Errno::ENOENT) => {}
                Err(errno) => {
                    return Err(ImportError::Move { name: listed.name.to_vec(), errno });
                }
            }
        }
        Ok(())
    }

    /// Ends an import that was interrupted; the member is open, and nobody uses it yet.
    pub(super) async fn resume_import(&self) -> Result<(), OpenError> {
        let failed = |errno| OpenError::Disk("cannot end an import of files", errno);
        let own = self.own().await.map_err(failed)?;
        let begun = missing_is_none(self.disk.stat_at(&own, IMPORTING).await).map_err(failed)?;
        if begun.is_some() {
            let numbered = self.end_import().await.map_err(failed)?;
            tracing::info!("an import was interrupted: {numbered} files have numbers now");
        }
        Ok(())
    }

    /// Gives numbers to all files below the directory that `importing` names, and removes it; how many.
    async fn end_import(&self) -> DiskResult<u64> {
        self.disk.sync_all().await?;
        let own = self.own().await?;
        let file = self.disk.open(&self.disk.node(&own, IMPORTING).await?).await?;
        let text = self.disk.read(&file, 0, 256).await?;
        // One that cannot be read may mean any directory.
        let into = text.strip_prefix(IMPORTING_WORDS.as_bytes()).and_then(<[u8]>::first_chunk);
        let into = into.and_then(|digits: &[u8; 16]| layout::parse_id(digits));
        let numbered = match into.unwrap_or(FileId::ROOT) {
            // Somebody has removed it since.
            id if self.record(id)?.is_none() => 0,
            id => self.number_below(id).await?,
        };
        if self.in_group {
            // A member that has what was before lacks all of this.
            let last = self.changes_so_far();
            self.log().begin_after(last);
        }
        self.checkpoint().await?;
        self.disk.unlink(&own, IMPORTING).await?;
        self.disk.sync_all().await?;
        Ok(numbered)
    }

    /// Gives numbers to all files below a directory that the index lacks; how many. Distributed directories, which lie elsewhere, are left
    /// out: only Atoll fills them.
    async fn number_below(&self, top: FileId) -> DiskResult<u64> {
        let mut walk = ImportWalk::begin(&*self.disk, &self.node(top).await?).await?;
        let mut above = vec![(top, self.node(top).await?)];
        let mut numbered = 0;
        while let Some(step) = walk.next().await {
            let (name, found) = match step {
                TreeStep::Left => {
                    above.pop();
                    continue;
                }
                TreeStep::Name(name, found) => (name, found),
            };
            let (node, stat) = match found {
                Err(errno) if is_of_one(errno) => {
                    tracing::warn!("{} has no number: {errno}", String::from_utf8_lossy(&name));
                    continue;
                }
                found => found?,
            };
            let Some((parent, dir)) = above.last() else { break };
            let place = PoolPlace::new(*parent, &name);
            let mut form = LinkForm::Plain;
            if stat.kind == FileKind::Symlink && stat.size_bytes >= MIN_PLACEHOLDER_BYTES {
                let target = self.disk.read_node(&node).await?;
                form = LinkForm::of(&target);
                if Placeholder::parse(&target).is_some() || matches!(form, LinkForm::Referral(_)) {
                    // A tree with such a link is refused; these are Atoll's.
                    continue;
                }
            }
            numbered += u64::from(!self.knows(&stat)?);
            let id = match self.adopt(dir, &place, stat, form).await {
                Err(errno) if is_of_one(errno) => continue,
                id => id?,
            };
            if self.index.pending() > MAX_PENDING {
                self.checkpoint().await?;
            }
            if stat.kind == FileKind::Directory {
                match walk.enter(&name, &node).await {
                    Err(errno) if is_of_one(errno) => {}
                    entered => {
                        entered?;
                        above.push((id, node));
                    }
                }
            }
        }
        Ok(numbered)
    }
}

/// Whether a call fails for one file, which is passed over: others get their numbers, and the pool can be opened. It gets one when it is looked
/// up, or by a check.
fn is_of_one(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::ENOENT
            | Errno::ESTALE
            | Errno::ENOTDIR
            | Errno::EXDEV
            | Errno::EACCES
            | Errno::EPERM
    )
}
