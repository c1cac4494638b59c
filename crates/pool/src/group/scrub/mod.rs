//! Comparing the copies of all files that the members of a group have, and healing those that are wrong (beyond the paper; the pool's
//! design, *Edits behind Atoll's back*; [`crate::scrub`] says which copy is right).
//!
//! ```text
//! asking      what the primary asks members about their copies, itself included
//! healing     giving members what they lack, or have otherwise than it is right
//! ```
//!
//! The primary goes through the directories, in which each member moves back what was moved by hand and sets aside what is not of the
//! pool; then through all files, in the order of their numbers. It reads its own copy while the others read theirs, and only digests go over
//! the network. A file that clients write to is passed over, and looked at again by the next pass.
//!
//! **What is healed**
//!
//! | a member has | it gets |
//! |---|---|
//! | not all names of a file | the names, if it has the file under one of them or in its slot |
//! | a file nowhere | the file again, from a member that has it |
//! | other attributes than more than half of the members, else than the primary | those |
//! | other bytes than are right | the ranges that differ, when its own copy was set aside |
//!
//! **Invariants.** A member's file is overwritten only by what another one has of the same file, of which nobody wrote a byte meanwhile. What
//! is set aside is durable before. Files with marks are left alone: their copies may differ.
//!
//! **Pace.** A pass begins an hour after a member became the primary and a day after the pass before, and works for a tenth of the time; one
//! that somebody waits for works all the time.
//!
//! **It does not know** files of which clients hold no name any more, and what a member is given that has not all files.

mod asking;
mod healing;

use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use atoll_env::{Env, Notify, sleep};
use atoll_net::{CallError, Refusal, Request};
use atoll_vfs::{Errno, FileKind};
use futures_util::future::{Either, join_all, select};
use minicbor::{Decode, Encode};

use self::asking::{MemberCopies, Passed, there};
use super::primary::Primary;
use crate::change::PoolChange;
use crate::disk::Disk;
use crate::index::FileRecord;
use crate::layout::FileId;
use crate::marks::MARK_BYTES;
use crate::member::PoolMember;
use crate::messages::{self, CHECK, MAX_LOOK_RANGES, MAX_LOOKS, ScrubAsk, ScrubReply};
use crate::remote::Route;
use crate::scrub::{
    ContentComparison, ContentDigest, ContentVerdict, CopyLook, FileLook, LookAt, UNREADABLE,
    remembered,
};

/// After a member has become the primary; a pass takes room in caches that clients need first.
const FIRST_AFTER: Duration = Duration::from_secs(3600);
const PASS_EVERY: Duration = Duration::from_secs(24 * 3600);
/// A pass that nobody waits for rests so many times as long as it works.
const RESTS: u32 = 9;
/// How long somebody counts as waiting who has asked how far it is.
const WAITS: Duration = Duration::from_secs(10);
/// A member that is away, or has not made all changes yet, is waited for so long.
const RETRY_AFTER: Duration = Duration::from_millis(200);
const RETRIES: usize = 50;
/// A file of more ranges, 16 TiB, is not compared: clients can make files of any length that have no bytes.
const MAX_RANGES: u64 = 1 << 24;
/// How often a file is looked at until its copies are the same.
const MAX_ROUNDS: usize = 8;
/// What a report says singly; of more the numbers.
const MAX_FINDINGS: usize = 100;

/// How far a scrub is, and what the last pass has found: of one group, by its primary.
#[derive(Clone, Default, PartialEq, Eq, Debug, Encode, Decode)]
pub struct ScrubReport {
    /// Whether one is under way.
    #[n(0)]
    pub is_running: bool,
    /// How many have ended since this member became the primary.
    #[n(1)]
    pub passes: u64,
    /// How many copies each file has that were compared.
    #[n(2)]
    pub copies: u64,
    /// Files and directories that were looked at.
    #[n(3)]
    pub files: u64,
    /// Bytes of one copy of each.
    #[n(4)]
    pub bytes: u64,
    /// Files that were passed over, since clients wrote to them or a member was away.
    #[n(5)]
    pub passed_over: u64,
    /// MemberCopies that had other bytes or attributes, and have the right ones again.
    #[n(6)]
    pub healed: u64,
    /// MemberCopies that were gone, or lacked names, and are there again.
    #[n(7)]
    pub restored: u64,
    /// Files that were moved by hand, and are back.
    #[n(8)]
    pub moved_back: u64,
    /// What people have put there by hand, and copies that were changed: a directory beside the files has them now.
    #[n(9)]
    pub set_aside: u64,
    /// MemberCopies that are wrong and were not healed.
    #[n(10)]
    pub unhealed: u64,
    /// Why it did not come to its end, for people.
    #[n(12)]
    pub stopped: Option<String>,
    /// What was found, for people; the first hundred.
    #[n(11)]
    pub findings: Vec<String>,
}

/// Asks how far the scrub of a group is, by a way to its primary; has one begin if none is under way and `begins` says so.
///
/// # Errors
/// As [`Route::call`].
pub async fn ask_scrub(
    route: &dyn Route,
    begins: bool,
    limit: Duration,
) -> Result<ScrubReport, CallError> {
    let header = messages::encode(&begins);
    let reply = route.call(Request { method: CHECK, header, parts: Vec::new() }, limit).await?;
    let unreadable = || Refusal::new(Refusal::MALFORMED, "its answer cannot be read");
    messages::decode(&reply.header).ok_or_else(|| CallError::Refused(unreadable()))
}

#[derive(Default)]
struct ScrubState {
    report: ScrubReport,
    is_asked_for: bool,
    is_closed: bool,
    /// When somebody last wanted to know how far it is.
    waited_for: Option<atoll_env::Instant>,
}

/// The state of a primary's scrub.
#[derive(Default)]
pub(super) struct Scrubber {
    state: Mutex<ScrubState>,
    /// One is asked for, or the primary's work ends.
    has_news: Notify,
}

impl Scrubber {
    fn state(&self) -> MutexGuard<'_, ScrubState> {
        self.state.lock().expect("no holder of this lock panics")
    }

    /// How far it is. Begins one if none is under way and that is asked for.
    pub(super) fn report(&self, begins: bool, now: atoll_env::Instant) -> ScrubReport {
        let mut state = self.state();
        state.waited_for = Some(now);
        if begins && !state.report.is_running {
            state.is_asked_for = true;
            // So that whoever asked sees it running from now on.
            state.report = ScrubReport {
                passes: state.report.passes,
                is_running: true,
                ..ScrubReport::default()
            };
            self.has_news.notify();
        }
        state.report.clone()
    }

    /// MemberCopies that it found to be wrong and could not heal.
    pub(super) fn unhealed(&self) -> u64 {
        self.state().report.unhealed
    }

    /// Stops it: nothing of the primary is held any more.
    pub(super) fn close(&self) {
        self.state().is_closed = true;
        self.has_news.notify();
    }

    async fn until_closed(&self) {
        while !self.state().is_closed {
            self.has_news.notified().await;
        }
    }

    /// Waits until one is asked for or due; false if there is none any more.
    async fn until_due(&self, env: &Env, due: atoll_env::Instant) -> bool {
        loop {
            {
                let state = self.state();
                if state.is_closed || state.is_asked_for || env.now() >= due {
                    return !state.is_closed;
                }
            }
            let until_due = sleep(&**env, due.since(env.now()));
            select(pin!(self.has_news.notified()), until_due).await;
        }
    }

    fn begin(&self) {
        let mut state = self.state();
        state.is_asked_for = false;
        let passes = state.report.passes;
        state.report = ScrubReport { passes, is_running: true, ..ScrubReport::default() };
    }

    fn end(&self, stopped: Option<String>) {
        let mut state = self.state();
        state.report.is_running = false;
        state.report.stopped = stopped;
        state.report.passes += 1;
    }
}

/// See the module.
pub(super) struct Scrub<'a, D: Disk> {
    primary: &'a Arc<Primary<D>>,
    member: &'a Arc<PoolMember<D>>,
}

impl<D: Disk> Scrub<'_, D> {
    /// Makes passes, as long as the primary is at work.
    pub(super) async fn keep(primary: Weak<Primary<D>>, scrubber: Arc<Scrubber>, env: Env) {
        let mut due = env.now() + FIRST_AFTER;
        while scrubber.until_due(&env, due).await {
            let Some(primary) = primary.upgrade() else { return };
            scrubber.begin();
            let scrub = Scrub { primary: &primary, member: &primary.member };
            let ended = match select(pin!(scrub.pass()), pin!(scrubber.until_closed())).await {
                Either::Left((ended, _)) => ended,
                Either::Right(_) => return,
            };
            if let Err(why) = &ended {
                tracing::warn!("comparing the copies of a pool's files has stopped: {why}");
            }
            primary.member.marks().end_watch();
            scrubber.end(ended.err().map(|why| why.to_string()));
            due = env.now() + PASS_EVERY;
        }
    }

    fn note(&self, change: impl FnOnce(&mut ScrubReport)) {
        change(&mut self.primary.scrubber.state().report);
    }

    /// Something that was found about a file, for people.
    fn find(&self, id: FileId, what: &str, count: impl FnOnce(&mut ScrubReport)) {
        let path = self.path(id);
        tracing::warn!("{path}: {what}");
        self.note(|report| {
            count(report);
            if report.findings.len() < MAX_FINDINGS {
                report.findings.push(format!("{path}: {what}"));
            }
        });
    }

    fn path(&self, id: FileId) -> String {
        if id == FileId::ROOT {
            return "/".to_owned();
        }
        let place = self.member.places(id).ok().and_then(|places| places.into_iter().next());
        let path = place.and_then(|place| self.member.path(&place).ok());
        path.unwrap_or_else(|| format!("file {id}"))
    }

    /// Rests after work that began at `since`, unless somebody waits.
    async fn pace(&self, since: atoll_env::Instant) -> Result<(), Passed> {
        if self.member.has_failed() {
            return Err(Passed::Disk(Errno::EIO));
        }
        let env = &self.primary.env;
        let now = env.now();
        let waited_for = self.primary.scrubber.state().waited_for;
        match waited_for.is_some_and(|at| now.since(at) < WAITS) {
            true => atoll_env::yield_now().await,
            false => sleep(&**env, now.since(since) * RESTS).await,
        }
        Ok(())
    }

    async fn pass(&self) -> Result<(), Passed> {
        let mut at = FileId(0);
        loop {
            let (upto, page) = self.page(at)?;
            for (id, record) in &page {
                if record.kind == FileKind::Directory {
                    let since = self.primary.env.now();
                    self.tidy(*id).await;
                    self.pace(since).await?;
                }
            }
            if upto == FileId(u64::MAX) {
                break;
            }
            at = upto;
        }
        at = FileId(0);
        loop {
            let (upto, page) = self.page(at)?;
            for files in page.chunks(MAX_LOOKS) {
                let since = self.primary.env.now();
                self.compare_files(files).await?;
                self.member.marks().end_watch();
                self.pace(since).await?;
            }
            if upto == FileId(u64::MAX) {
                return Ok(());
            }
            at = upto;
        }
    }

    fn page(&self, after: FileId) -> Result<(FileId, Vec<(FileId, FileRecord)>), Passed> {
        let page = self.member.index.files_after(after, MAX_LOOKS);
        Ok(page.map_err(|error| self.member.index_failed(&error))?)
    }

    /// Has each member put the names of a directory right.
    async fn tidy(&self, id: FileId) {
        let copies = self.copies();
        let after = self.primary.backups.released();
        let tidied = copies.iter().map(|of| self.ask(of, after, ScrubAsk::Tidy(id)));
        for (of, tidied) in copies.iter().zip(join_all(tidied).await) {
            match tidied {
                Ok((ScrubReply::Tidied { moved_back, set_aside, refused }, _)) => {
                    if refused > 0 {
                        let what = format!(
                            "{refused} names here cannot be put right on {}",
                            self.name_of(of)
                        );
                        self.find(id, &what, |report| report.unhealed += u64::from(refused));
                    }
                    if moved_back > 0 {
                        let what = format!(
                            "{moved_back} moved here by hand on {}, and put back",
                            self.name_of(of)
                        );
                        self.find(id, &what, |report| report.moved_back += u64::from(moved_back));
                    }
                    if set_aside > 0 {
                        let what = format!(
                            "{set_aside} put here by hand on {}, and set aside",
                            self.name_of(of)
                        );
                        self.find(id, &what, |report| report.set_aside += u64::from(set_aside));
                    }
                }
                Ok(_) => {}
                Err(why @ Passed::Refused(_)) => {
                    self.find(id, &why.to_string(), |report| report.unhealed += 1);
                }
                Err(why) => {
                    tracing::debug!("a directory on {} was passed over: {why}", self.name_of(of));
                }
            }
        }
    }

    /// Compares files, and heals what is wrong.
    async fn compare_files(&self, files: &[(FileId, FileRecord)]) -> Result<(), Passed> {
        let quiet: BTreeSet<FileId> = {
            let mut marks = self.member.marks();
            files.iter().map(|(id, _)| *id).filter(|id| marks.watch(*id)).collect()
        };
        let copies = self.copies();
        let looks_at: Vec<LookAt> = files
            .iter()
            .map(|(id, _)| LookAt { id: *id, first: 0, count: u64::from(quiet.contains(id)) })
            .collect();
        // Most files are short, and the same everywhere.
        let looks = self.look(&copies, &looks_at).await.unwrap_or_default();
        for (at, (id, _)) in files.iter().enumerate() {
            let of_file: Vec<&CopyLook> = looks.iter().map(|of_member| &of_member[at]).collect();
            let compared = match whole_file(&of_file) {
                Some(WholeFile::WithoutBytes) => Ok(0),
                Some(WholeFile::Short(size_bytes, digest)) if quiet.contains(id) => {
                    let of_all: Vec<&FileLook> =
                        of_file.iter().filter_map(|look| there(look)).collect();
                    self.note_same(*id, digest, (&copies, &of_all)).await.map(|()| size_bytes)
                }
                _ => self.examine(*id).await,
            };
            match compared {
                Ok(bytes) => self.note(|report| {
                    report.files += 1;
                    report.bytes += bytes;
                    report.copies = report.copies.max(copies.len() as u64);
                }),
                Err(Passed::Disk(errno)) if self.member.has_failed() => {
                    return Err(Passed::Disk(errno));
                }
                Err(why @ (Passed::InUse | Passed::Away(_))) => {
                    tracing::debug!("{}: passed over: {why}", self.path(*id));
                    self.note(|report| {
                        report.files += 1;
                        report.passed_over += 1;
                    });
                }
                Err(why @ (Passed::Disk(_) | Passed::Refused(_))) => {
                    self.note(|report| report.files += 1);
                    self.find(*id, &why.to_string(), |report| report.unhealed += 1);
                }
            }
        }
        Ok(())
    }

    /// Looks at one file until all copies are the same; returns how many bytes it has. A member that is away for a moment is waited for.
    async fn examine(&self, id: FileId) -> Result<u64, Passed> {
        let (mut rounds, mut retries) = (0, 0);
        let mut healed = HealedParts::default();
        loop {
            match self.examine_once(id, &mut healed).await {
                Ok(Some(bytes)) => return Ok(bytes),
                Ok(None) if rounds < MAX_ROUNDS => rounds += 1,
                Ok(None) => return Err(Passed::InUse),
                Err(Passed::Away(_)) if retries < RETRIES => {
                    retries += 1;
                    sleep(&*self.primary.env, RETRY_AFTER).await;
                }
                Err(why) => return Err(why),
            }
        }
    }

    /// Looks at all copies of a file, and heals one thing that is wrong: none if it is to be looked at again. Bytes are healed once.
    async fn examine_once(
        &self,
        id: FileId,
        healed: &mut HealedParts,
    ) -> Result<Option<u64>, Passed> {
        let copies = self.copies();
        let is_quiet = self.member.marks().watch(id);
        let looks = self.look(&copies, &[LookAt { id, first: 0, count: 0 }]).await?;
        let looks: Vec<CopyLook> = looks.into_iter().flatten().collect();
        if looks.contains(&CopyLook::Unknown) {
            return match self.member.record(id)? {
                // It is gone.
                None => Ok(Some(0)),
                Some(_) => Err(Passed::InUse),
            };
        }
        if looks.contains(&CopyLook::Lost) {
            return self.bring_back(id, &copies, &looks).await;
        }
        let looks: Vec<&FileLook> = looks.iter().filter_map(there).collect();
        if !looks.iter().all(|look| look.is_alike(looks[0])) {
            if !healed.attributes {
                healed.attributes = true;
                self.heal_attributes(id, &copies).await?;
                return Ok(None);
            }
            // A disk that cannot keep them, as when a change sets them. Its bytes are compared all the same.
            if !healed.is_said {
                healed.is_said = true;
                let what = "its attributes are not the same on all members";
                self.find(id, what, |report| report.unhealed += 1);
            }
        }
        if looks[0].kind != FileKind::Regular {
            return Ok(Some(0));
        }
        if !is_quiet {
            return Err(Passed::InUse);
        }
        let sizes: Vec<u64> = looks.iter().map(|look| look.size_bytes).collect();
        let comparison = self.compare_contents(id, &copies, &sizes).await?;
        if !self.member.marks().is_watched(id) {
            return Err(Passed::InUse);
        }
        match comparison.verdict(remembered(&looks)) {
            ContentVerdict::Same(digest) => {
                self.note_same(id, digest, (&copies, &looks)).await?;
                Ok(Some(sizes[0]))
            }
            ContentVerdict::NoneRight => {
                let what = "no member has the bytes that were there when all had the same";
                self.find(id, what, |report| report.unhealed += 1);
                Ok(Some(sizes[0]))
            }
            ContentVerdict::Unreadable => {
                let what = "no member's disk reads all of it";
                self.find(id, what, |report| report.unhealed += 1);
                Ok(Some(sizes[0]))
            }
            ContentVerdict::Differ(_) if healed.bytes => {
                let what = "its bytes are not the same on all members after it was healed";
                self.find(id, what, |report| report.unhealed += 1);
                Ok(Some(sizes[0]))
            }
            ContentVerdict::Differ(difference) => {
                healed.bytes = true;
                let healed = self.heal_contents(id, &copies, &comparison, &difference).await?;
                Ok((!healed).then_some(sizes[0]))
            }
        }
    }

    async fn compare_contents(
        &self,
        id: FileId,
        copies: &[MemberCopies<D>],
        sizes: &[u64],
    ) -> Result<ContentComparison, Passed> {
        let mut comparison = ContentComparison::new(sizes);
        let longest = sizes.iter().copied().max().unwrap_or(0);
        if longest / MARK_BYTES > MAX_RANGES {
            return Err(Passed::Refused("it is too long to be compared".into()));
        }
        let mut first = 0;
        while first * MARK_BYTES < longest {
            let since = self.primary.env.now();
            let count = MAX_LOOK_RANGES;
            let looks = self.look(copies, &[LookAt { id, first, count }]).await?;
            let looks: Vec<CopyLook> = looks.into_iter().flatten().collect();
            let looks: Vec<&FileLook> = looks.iter().filter_map(there).collect();
            let is_as_before = looks.len() == sizes.len()
                && looks.iter().zip(sizes).all(|(look, size)| look.size_bytes == *size);
            if !is_as_before || !self.member.marks().is_watched(id) {
                return Err(Passed::InUse);
            }
            let ranges: Vec<&[ContentDigest]> = looks.iter().map(|look| look.ranges()).collect();
            comparison.add(first, &ranges);
            first += count;
            self.pace(since).await?;
        }
        Ok(comparison)
    }

    /// All copies have the same bytes: members remember which, if they are all.
    async fn note_same(
        &self,
        id: FileId,
        digest: ContentDigest,
        (copies, looks): (&[MemberCopies<D>], &[&FileLook]),
    ) -> Result<(), Passed> {
        if looks.iter().any(|look| look.recorded.is_some_and(|recorded| recorded != digest)) {
            let what = "the bytes of all copies were changed behind the pool's back";
            self.find(id, what, |report| report.unhealed += 1);
            return Ok(());
        }
        // A member that was given all files remembers none.
        let is_known = looks.iter().all(|look| look.recorded.is_some());
        if is_known || !self.are_all(copies) {
            return Ok(());
        }
        let _changing = self.member.begin_change().await?;
        let _turn = self.member.turns.write(id.0).await;
        if !self.member.marks().is_watched(id) {
            return Err(Passed::InUse);
        }
        self.member.change(PoolChange::Verified { id, digest }).await?;
        Ok(())
    }
}

/// What was healed of a file that is looked at: once each.
#[derive(Default)]
struct HealedParts {
    attributes: bool,
    bytes: bool,
    /// That its attributes differ all the same.
    is_said: bool,
}

/// A file that is the same everywhere.
enum WholeFile {
    WithoutBytes,
    /// Its length, bytes, and the digest of its bytes.
    Short(u64, ContentDigest),
}

/// What looks at a file's first range say, if that is all there is to know: it is the same everywhere. None if it is to be looked at more closely.
fn whole_file(looks: &[&CopyLook]) -> Option<WholeFile> {
    let of_all: Option<Vec<&FileLook>> = looks.iter().map(|look| there(look)).collect();
    let of_all = of_all?;
    let first = of_all.first()?;
    let is_same = |look: &&FileLook| {
        look.is_alike(first)
            && look.size_bytes == first.size_bytes
            && look.ranges() == first.ranges()
    };
    if !of_all.iter().all(is_same) {
        return None;
    }
    if first.kind != FileKind::Regular {
        return Some(WholeFile::WithoutBytes);
    }
    if first.size_bytes > MARK_BYTES || first.ranges().contains(&UNREADABLE) {
        return None;
    }
    let mut comparison = ContentComparison::new(&[first.size_bytes]);
    comparison.add(0, &[first.ranges()]);
    match comparison.verdict(None) {
        ContentVerdict::Same(digest) => Some(WholeFile::Short(first.size_bytes, digest)),
        _ => None,
    }
}
