//! `atoll pool import`: take a tree of plain files into a pool.
//!
//! In place, by renames, where this machine has the pool's only copy, which nobody uses, on the tree's own file system. Otherwise the files are
//! copied through the file system that the pool serves. The first line says which of the two it is, and why.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use atoll_gateway::fuse;
use atoll_pool::disk::Disk as _;
use atoll_pool::{
    CopyProblem, CopyReport, ImportError, OWN_DIRECTORY, OpenError, TreeProblem, TreeSource,
    TreeSurvey, copy_tree_into, import_in_place, is_in_use, read_map,
};
use atoll_upkeep::pools;
use atoll_vfs::{Errno, FileSystem};
use rustix::fs::{FlockOperation, Mode, OFlags, ResolveFlags};
use serde::Serialize;

use super::records::PoolRecord;
use super::{
    ENDING_LIMIT, adopt, begin_remote, check_identity, disk, env, failure, known, open, when_free,
};
use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::incomplete::{self, JsonMissing, shown};
use crate::messages::note;
use crate::output::{Output, escaped};
use crate::progress::{Meter, State};
use crate::units;

/// Arguments of `atoll pool import`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll pool import home /srv/old
  atoll pool import home /srv/old --into /archive
  atoll pool import home /srv/old --dry-run

In place, all names of DIR are renamed into the pool, and no data moves: if DIR is on the file system of the pool's directory, nobody uses the
pool, and no other machine has a copy of it. DIR is empty then. No program may have files of DIR open meanwhile: it would go on writing to them
behind the pool's back. Otherwise each file is copied once, with owner, mode, times, attributes, lists, holes and links, and DIR stays as it is.

Interrupted, the command goes on when it is run again. Nothing in the pool is replaced: files that it has already with the same size, time, mode
and owner are passed over, others are named, with exit code 7. What is mounted below DIR is left out.")]
pub(super) struct Args {
    /// The pool's name on this node
    name: String,

    /// The directory whose files are taken
    #[arg(value_name = "DIR")]
    source: PathBuf,

    /// The directory of the pool that gets them, if that is not its root
    #[arg(long, value_name = "PATH")]
    into: Option<PathBuf>,

    /// Copy them, also where they could be renamed
    #[arg(long)]
    copy: bool,

    /// Only say which way it would be, and what is in the way
    #[arg(long)]
    dry_run: bool,

    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// The report of an import, as JSON.
#[derive(Serialize)]
struct ImportDone {
    in_place: bool,
    why_copied: Vec<String>,
    dry_run: bool,
    files: u64,
    bytes: u64,
    passed_over: u64,
    not_copied: u64,
    missing: Vec<JsonMissing>,
}

/// A tree to be taken into a pool.
struct Import<'a> {
    args: &'a Args,
    record: PoolRecord,
    /// Without symbolic links.
    source: PathBuf,
    /// The same, open and locked.
    opened: OwnedFd,
    into: Vec<Vec<u8>>,
    what: String,
    is_quiet: bool,
}

/// Takes it.
pub(super) async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let what = format!("cannot import {} into pool {}", shown(&args.source), args.name);
    let record = known(&args.name, global, &what)?;
    if record.group.as_ref().is_some_and(|group| group.joins.is_some() || group.is_leaving) {
        return Err(Failure::new(Exit::Failed, what).because("this node is no member of it now"));
    }
    let into = into_names(args.into.as_deref(), &what)?;
    let source = super::create::canonical(&args.source, &what)?;
    // Opened once, without links: whoever may rename it cannot have another directory taken.
    let opened = open_directory(&source, &what)?;
    let import = Import { args, record, source, opened, into, what, is_quiet: global.quiet };
    import.check_source()?;
    import.lock()?;
    let reasons = import.reasons_to_copy().await?;
    match reasons.is_empty() {
        true => import.in_place().await?,
        false => import.copy(reasons, global).await?,
    }
    Ok(())
}

fn open_directory(path: &Path, what: &str) -> Result<OwnedFd, Failure> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::NO_SYMLINKS;
    let opened = rustix::fs::openat2(rustix::fs::CWD, path, flags, Mode::empty(), resolve);
    opened.map_err(|error| match error {
        rustix::io::Errno::NOTDIR => Failure::new(Exit::Usage, what).because("it is no directory"),
        error => Failure::io(what, &error.into()),
    })
}

/// The names of a path of the pool from its root on.
fn into_names(into: Option<&Path>, what: &str) -> Result<Vec<Vec<u8>>, Failure> {
    let Some(path) = into.filter(|path| *path != Path::new("/")) else { return Ok(Vec::new()) };
    let names = adopt::names(path).ok_or_else(|| {
        let why = format!("{} is no path of a directory", shown(path));
        Failure::new(Exit::Usage, what).because(why)
    })?;
    Ok(names.into_iter().map(<[u8]>::to_vec).collect())
}

impl Import<'_> {
    fn refused(&self, why: impl std::fmt::Display) -> Failure {
        Failure::new(Exit::Usage, &*self.what).because(why)
    }

    /// That the tree is one, and is neither the pool itself nor a pool's directory.
    fn check_source(&self) -> Result<(), Failure> {
        let Import { source, record, args, .. } = self;
        let files = record.dir.canonicalize().unwrap_or_else(|_| record.dir.clone());
        if files.starts_with(source) || source.starts_with(&files) {
            let files = shown(&files);
            return Err(
                self.refused(format!("{files}, the pool's directory, is in it or above it"))
            );
        }
        for above in source.ancestors() {
            if above.join(OWN_DIRECTORY).join("stamp").symlink_metadata().is_ok() {
                let above = shown(above);
                return Err(self.refused(format!("it is in {above}, a pool's directory")));
            }
        }
        let mounted = fuse::mounts_of(super::source(&args.name).as_ref()).unwrap_or_default();
        if let Some(at) = mounted.iter().find(|at| source.starts_with(at)) {
            let at = shown(at);
            return Err(self.refused(format!("it is in {at}, where this pool is mounted")));
        }
        Ok(())
    }

    /// Keeps other imports from the tree.
    fn lock(&self) -> Result<(), Failure> {
        match rustix::fs::flock(&self.opened, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(()),
            Err(rustix::io::Errno::AGAIN) => {
                let why = "another program, perhaps an import, has locked it";
                Err(Failure::new(Exit::Failed, &*self.what).because(why))
            }
            Err(error) => Err(Failure::io(&*self.what, &error.into())),
        }
    }

    /// A path of the directory that was opened, whatever has its name by now.
    fn at(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.opened.as_raw_fd()))
    }

    /// Why its files cannot be renamed into the pool's directory; nothing if they can.
    async fn reasons_to_copy(&self) -> Result<Vec<String>, Failure> {
        let Import { record, source, what, .. } = self;
        if self.args.copy {
            return Ok(vec!["--copy says so".to_owned()]);
        }
        let io = |error: std::io::Error| Failure::io(&**what, &error);
        let mut reasons = Vec::new();
        let directories = pools::directories(&record.dir).map_err(io)?;
        let is_first = |(_, dir): &(_, PathBuf)| *dir == record.dir;
        if record.group.is_some() && !directories.iter().any(is_first) {
            return Ok(vec!["this machine does not have the pool's root".to_owned()]);
        }
        let files = disk(&record.dir, what)?;
        check_identity(&files, record, what).await?;
        let map = read_map(&files).await.map_err(|error| failure(&error, what))?;
        if directories.len() > 1 || map.is_some_and(|map| !map.is_of_one()) {
            reasons.push("other machines belong to the pool".to_owned());
        }
        if self.is_used().await? {
            reasons.push(match record.group {
                Some(_) => "this machine's node serves the pool".to_owned(),
                None => "a mount or an NFS server uses the pool".to_owned(),
            });
        }
        match files.beside(&self.at()) {
            Ok(_) => {}
            Err(Errno::EXDEV) => {
                let files = shown(&record.dir);
                reasons.push(format!("it is on another file system, or mount, than {files}"));
            }
            Err(errno) => return Err(Failure::new(Exit::Failed, &**what).because(errno)),
        }
        if let Some(at) = fuse::mounts_below(source).map_err(io)?.first() {
            reasons.push(format!("another file system is mounted at {}", shown(at)));
        }
        Ok(reasons)
    }

    /// Whether a process has the pool's directory. One that has just ended a mount may have it for a moment.
    async fn is_used(&self) -> Result<bool, Failure> {
        let deadline = tokio::time::Instant::now() + ENDING_LIMIT;
        loop {
            let used = is_in_use(&disk(&self.record.dir, &self.what)?).await;
            let used = used.map_err(|error| failure(&error, &self.what))?;
            let is_late = tokio::time::Instant::now() > deadline;
            if !used || is_late || self.record.group.is_some() {
                return Ok(used);
            }
            tokio::time::sleep(ENDING_LIMIT / 20).await;
        }
    }

    fn say(&self, line: impl std::fmt::Display) {
        if !self.is_quiet {
            note!("{line}");
        }
    }

    /// Renames all names of the tree into the pool's directory.
    async fn in_place(&self) -> Result<(), Failure> {
        let Import { args, record, into, what, .. } = self;
        self.say("in place: the files are renamed into the pool, none is copied");
        let imported = when_free(record, what, async |files| {
            let top = files
                .beside(&self.at())
                .map_err(|errno| OpenError::Disk("cannot open it", errno))?;
            match import_in_place(env(), files, &top, into, args.dry_run).await {
                Err(ImportError::Open(error)) => Err(error),
                imported => Ok(imported),
            }
        });
        let report = imported.await?.map_err(|error| {
            let failure = Failure::new(exit_of(&error), &**what).because(&error);
            match error {
                ImportError::Move { .. } => failure
                    .advice("What was renamed is in the pool; run it again when the rest can be."),
                _ => failure,
            }
        })?;
        let survey = report.survey;
        self.check_survey(&survey, "--copy copies the files instead.")?;
        let (files, bytes) = (survey.files, survey.bytes);
        let done = ImportDone {
            in_place: true,
            why_copied: Vec::new(),
            dry_run: args.dry_run,
            files,
            bytes,
            passed_over: 0,
            not_copied: 0,
            missing: Vec::new(),
        };
        self.tell(&done, files)
    }

    /// That nothing is in the way.
    fn check_survey(&self, survey: &TreeSurvey, advice: &str) -> Result<(), Failure> {
        if survey.problems.is_empty() {
            return Ok(());
        }
        let line =
            |(path, problem): &(Vec<u8>, TreeProblem)| format!("{}: {problem}", escaped(path));
        let count = survey.problems_in_all.max(survey.problems.len() as u64);
        incomplete::say(survey.problems.iter().map(line), count);
        let count = units::counted(count, "file is", "files are");
        let why = format!("{count} in the way; nothing was changed");
        Err(Failure::new(Exit::Failed, &*self.what).because(why).advice(advice))
    }

    /// Copies the files through the pool's file system.
    async fn copy(&self, reasons: Vec<String>, global: &Global) -> Result<(), Failure> {
        let Import { args, record, what, .. } = self;
        let why = reasons.join("; ");
        if record.group.is_none() && self.is_used().await? {
            return Err(Failure::new(Exit::Failed, &**what).because(why).advice(
                "End the mount (`atoll unmount`) or server (`atoll nfs --stop`) and run it again, or copy the files into the mount.",
            ));
        }
        self.say(format_args!("by copying: {why}"));
        let report = match record.group {
            Some(_) => {
                let fs = begin_remote((&args.name, record), global, what).await;
                self.copy_into(&fs.map_err(|failure| failure.also(&reasons))?).await?
            }
            None => {
                let fs = open(record, what).await?;
                let copied = self.copy_into(&fs).await;
                let ended = fs.end().await;
                let report = copied?;
                ended.map_err(|errno| Failure::new(Exit::Failed, &**what).because(errno))?;
                report
            }
        };
        self.check_survey(&report.survey, "Name a directory that is no pool's.")?;
        if let Some((path, errno)) = &report.stopped {
            let exit = if *errno == Errno::ENOSPC { Exit::Full } else { Exit::Failed };
            let copied = units::counted(report.files, "file or directory", "files and directories");
            return Err(Failure::new(exit, &**what)
                .because(format!("{}: {errno}", escaped(path)))
                .advice(format!("Copied by now: {copied}. Run again, it goes on.")));
        }
        let files = if args.dry_run { report.survey.files } else { report.files };
        let bytes = if args.dry_run { report.survey.bytes } else { report.bytes };
        let missing = report.problems.iter().map(|(path, problem)| {
            let what = match problem {
                CopyProblem::Mount => "left_out",
                CopyProblem::Differs => "differs",
                CopyProblem::Changes | CopyProblem::Unreadable(_) | CopyProblem::Refused(_) => {
                    "not_copied"
                }
            };
            JsonMissing::new(what, path, problem)
        });
        let done = ImportDone {
            in_place: false,
            why_copied: reasons,
            dry_run: args.dry_run,
            files,
            bytes,
            passed_over: report.passed_over,
            not_copied: report.problems_in_all,
            missing: missing.collect(),
        };
        self.tell(&done, files + report.passed_over)?;
        let lines = report.problems.iter();
        let lines = lines.map(|(path, problem)| format!("{}: {problem}", escaped(path)));
        incomplete::say(lines, report.problems_in_all.max(report.problems.len() as u64));
        match report.problems_in_all {
            0 => Ok(()),
            count => {
                let count = units::counted(count, "file was", "files were");
                Err(Failure::new(Exit::Incomplete, format!("imported, but {count} not copied"))
                    .advice("Rename what differs, in the tree or in the pool, and run it again."))
            }
        }
    }

    async fn copy_into(&self, fs: &dyn FileSystem) -> Result<CopyReport, Failure> {
        let from = disk(&self.at(), &self.what)?.for_reading();
        let source = TreeSource { disk: &from, dir: from.top(), device: from.device() };
        let meter = Meter::new("importing", self.is_quiet);
        let show = |report: &CopyReport| {
            let CopyReport { files, bytes, passed_over, passed_over_bytes, survey, .. } = report;
            meter.show(State {
                files: files + passed_over,
                files_total: Some(survey.files),
                bytes: bytes + passed_over_bytes,
                bytes_total: Some(survey.bytes),
                ..State::default()
            });
        };
        let copied = copy_tree_into(&source, fs, &self.into, self.args.dry_run, &show).await;
        meter.finish();
        copied.map_err(|errno| {
            let exit = if errno == Errno::ENOENT { Exit::NotFound } else { Exit::Failed };
            let into = escaped(&[b"/", &self.into.join(&b'/')[..]].concat());
            Failure::new(exit, &*self.what)
                .because(format!("{into} of the pool, or the tree: {errno}"))
        })
    }

    fn tell(&self, done: &ImportDone, in_pool: u64) -> Result<(), Failure> {
        let mut output = Output::new();
        let files = |count| units::counted(count, "file or directory", "files and directories");
        if self.args.json {
            output.json(done)?;
        } else if done.dry_run {
            output.line(format!(
                "{}, {}: nothing is in the way",
                files(done.files),
                units::size(done.bytes)
            ))?;
        } else {
            output.line(format!(
                "in the pool now: {}, {}",
                files(in_pool),
                units::size(done.bytes)
            ))?;
            if done.passed_over > 0 {
                output.line(format!("it had already: {}", files(done.passed_over)))?;
            }
        }
        output.flush()
    }
}

fn exit_of(error: &ImportError) -> Exit {
    match error {
        ImportError::Into(Errno::ENOENT) => Exit::NotFound,
        ImportError::Disk(_, Errno::ENOSPC) => Exit::Full,
        ImportError::Into(_)
        | ImportError::Open(_)
        | ImportError::HasOthers
        | ImportError::Look(_)
        | ImportError::Move { .. }
        | ImportError::Disk(..) => Exit::Failed,
    }
}
