//! `atoll pool quota`: say how much the files of a user, or those below a directory of a pool, may take, and list how much they do.

use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use atoll_pool::{
    GroupNumber, QuotaAmount, QuotaError, QuotaRow, QuotaSubject, QuotaTable, ask_quotas,
};
use atoll_upkeep::pools::NodeRoute;
use atoll_vfs::{Caller, DirEntry, Errno, FileKind, FileSystem, InodeNumber};
use serde::Serialize;

use super::records::PoolRecord;
use super::{begin_remote, known, open};
use crate::connection;
use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::output::{Output, escaped, json_text};
use crate::units;

/// How long the first group's primary may take to answer.
const CALL_LIMIT: Duration = Duration::from_secs(10);
/// For so long the first group may be without a primary.
const PATIENCE: Duration = Duration::from_secs(30);
const RETRY_EVERY: Duration = Duration::from_millis(500);
/// Names that are read from a directory at once.
const LISTED_AT_ONCE: usize = 1024;
/// Directories above another one, at most.
const MAX_DEPTH: usize = 4096;

/// Arguments of `atoll pool quota`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll pool quota home
  atoll pool quota home --user alice --size 20GiB --files 1000000
  atoll pool quota home --directory /projects/atlas --size 500GiB
  atoll pool quota home --user alice --none
  atoll pool quota home --json

Without --user and --directory it lists the limits, and what is used of them. --size and --files set a limit; what is left out is not limited. A
file counts with its length in whole pages of 4 KiB, also where it has holes, and each file, directory or link as one; for its owner, and for each
limited directory above (the first of its names). A directory that was removed is listed by its number: --directory '{NUMBER}' --none removes
its limit. What would exceed a limit fails with EDQUOT (\"Disk quota exceeded\"). `df` of a limited
directory shows its limit. Who has more than a new limit keeps it, and gets no more.")]
pub(super) struct Args {
    /// The pool's name on this node
    name: String,

    /// Whose files are limited: a name of this machine's, or a number
    #[arg(long, value_name = "USER", conflicts_with = "directory")]
    user: Option<String>,

    /// The directory of the pool below which files are limited
    #[arg(long, value_name = "PATH")]
    directory: Option<PathBuf>,

    /// How many bytes they may take
    #[arg(long, value_name = "SIZE", value_parser = units::parse_size, conflicts_with = "none")]
    size: Option<u64>,

    /// How many files there may be
    #[arg(long, value_name = "N", conflicts_with = "none")]
    files: Option<u64>,

    /// Remove the limit
    #[arg(long)]
    none: bool,

    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

/// A limit, as JSON.
#[derive(Serialize)]
struct QuotaLine {
    #[serde(skip_serializing_if = "Option::is_none")]
    user: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    directory: Option<String>,
    /// Its bytes in hexadecimal, where it is no text.
    #[serde(skip_serializing_if = "Option::is_none")]
    directory_hex: Option<String>,
    used_bytes: u64,
    used_files: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    limit_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    limit_files: Option<u64>,
    /// Whether all files were counted since the limit was set.
    is_counted: bool,
}

/// Sets a limit, or lists them.
pub(super) async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let what = match args.user.is_some() || args.directory.is_some() {
        true => format!("cannot set a limit of pool {}", args.name),
        false => format!("cannot list the limits of pool {}", args.name),
    };
    let usage = |text: &str| Failure::new(Exit::Usage, &what).because(text);
    let is_set = args.size.is_some() || args.files.is_some() || args.none;
    if is_set && args.user.is_none() && args.directory.is_none() {
        return Err(usage("--user or --directory says whose limit it is"));
    }
    let record = known(&args.name, global, &what)?;
    let user = args.user.as_deref().map(|user| uid(user, &what)).transpose()?;
    match record.group {
        Some(_) => of_several(args, (&record, user), is_set, global, &what).await,
        None => of_one(args, (&record, user), is_set, &what).await,
    }
}

impl Args {
    /// The limit that is to be set; none if it is to be removed.
    fn limit(&self) -> Option<QuotaAmount> {
        let no = QuotaAmount::UNLIMITED;
        let (bytes, files) = (self.size.unwrap_or(no.bytes), self.files.unwrap_or(no.files));
        (!self.none).then_some(QuotaAmount { bytes, files })
    }
}

async fn of_several(
    args: &Args,
    (record, user): (&PoolRecord, Option<u32>),
    is_set: bool,
    global: &Global,
    what: &str,
) -> Result<(), Failure> {
    let (_, client) = connection::for_mount(global).await?;
    let damaged = || Failure::new(Exit::Failed, what).because("its record is damaged");
    let route = NodeRoute::new(client, record.pool_id().ok_or_else(damaged)?);
    let route = route.to(GroupNumber::FIRST);
    let fs = begin_remote((&args.name, record), global, what).await?;
    let subject = subject(args, user, &fs, what).await?;
    let set = subject.filter(|_| is_set).map(|subject| (subject, args.limit()));
    let table = asked(&route, set, what).await?;
    show(args, &table, subject, &fs).await
}

async fn of_one(
    args: &Args,
    (record, user): (&PoolRecord, Option<u32>),
    is_set: bool,
    what: &str,
) -> Result<(), Failure> {
    let fs = open(record, what).await?;
    let failed = |errno: Errno| Failure::new(Exit::Failed, what).because(errno);
    let subject = subject(args, user, &fs, what).await?;
    if let Some(subject) = subject.filter(|_| is_set) {
        let set = fs.set_quota(subject, args.limit()).await;
        set.map_err(|text| Failure::new(Exit::Failed, what).because(text))?;
    }
    let table = fs.quotas().await.map_err(failed)?;
    let shown = show(args, &table, subject, &fs).await;
    fs.end().await.map_err(failed)?;
    shown
}

/// Asks the first group's primary, also if there is none for a moment.
async fn asked(
    route: &NodeRoute,
    set: Option<(QuotaSubject, Option<QuotaAmount>)>,
    what: &str,
) -> Result<QuotaTable, Failure> {
    let until = tokio::time::Instant::now() + PATIENCE;
    loop {
        match ask_quotas(route, set, CALL_LIMIT).await {
            Ok(table) => return Ok(table),
            Err(QuotaError::Refused(text)) => {
                return Err(Failure::new(Exit::Failed, what).because(text));
            }
            Err(error) if tokio::time::Instant::now() > until => {
                return Err(Failure::new(Exit::Unavailable, what)
                    .because(error)
                    .advice("`atoll pool status` tells how it stands."));
            }
            Err(_) => tokio::time::sleep(RETRY_EVERY).await,
        }
    }
}

/// Whose limit the command is about, if about one.
async fn subject(
    args: &Args,
    user: Option<u32>,
    fs: &dyn FileSystem,
    what: &str,
) -> Result<Option<QuotaSubject>, Failure> {
    let Some(path) = &args.directory else { return Ok(user.map(QuotaSubject::User)) };
    if let Some(number) = removed_number(path).filter(|_| args.none) {
        return Ok(Some(QuotaSubject::Directory(number)));
    }
    let failed = |errno: Errno| {
        let path = escaped(path.as_os_str().as_bytes());
        let exit = if errno == Errno::ENOENT { Exit::NotFound } else { Exit::Failed };
        Failure::new(exit, what).because(format!("{path} in the pool: {errno}"))
    };
    let mut at = InodeNumber::ROOT;
    for part in path.components() {
        let name = match part {
            Component::RootDir | Component::CurDir => continue,
            Component::Normal(name) => name.as_bytes(),
            Component::ParentDir | Component::Prefix(_) => return Err(failed(Errno::EINVAL)),
        };
        let entry = fs.lookup(Caller::default(), at, name).await.map_err(failed)?;
        if entry.attr.kind != FileKind::Directory {
            return Err(failed(Errno::ENOTDIR));
        }
        at = entry.attr.inode;
    }
    Ok(Some(QuotaSubject::Directory(at.0)))
}

/// The number of a directory that was removed, as the list shows it.
fn removed_number(path: &Path) -> Option<u64> {
    let text = path.to_str()?.trim_start_matches('/');
    u64::from_str_radix(text.strip_prefix('{')?.strip_suffix('}')?, 16).ok()
}

/// The number of a user of this machine.
fn uid(user: &str, what: &str) -> Result<u32, Failure> {
    if let Ok(number) = user.parse() {
        return Ok(number);
    }
    // It knows the users of a directory service, too.
    let asked = Command::new("id").args(["-u", "--", user]).stderr(Stdio::null()).output();
    let found = asked.ok().and_then(|answer| String::from_utf8(answer.stdout).ok());
    found.and_then(|number| number.trim().parse().ok()).ok_or_else(|| {
        Failure::new(Exit::NotFound, what)
            .because(format!("this machine knows no user {}", escaped(user.as_bytes())))
            .advice("A number is right on all machines.")
    })
}

async fn show(
    args: &Args,
    table: &QuotaTable,
    only: Option<QuotaSubject>,
    fs: &dyn FileSystem,
) -> Result<(), Failure> {
    let mut output = Output::new();
    let rows = table.rows().iter().filter(|(of, _)| only.is_none_or(|only| only == **of));
    let mut is_empty = true;
    for (subject, row) in rows {
        is_empty = false;
        let directory = match subject {
            QuotaSubject::User(_) => None,
            QuotaSubject::Directory(number) => Some(path_of(fs, InodeNumber(*number)).await),
        };
        if args.json {
            output.json(&as_json(*subject, directory.as_deref(), row, table.is_counted()))?;
            continue;
        }
        let whose = match (subject, directory) {
            (QuotaSubject::User(uid), _) => format!("user {uid}"),
            (QuotaSubject::Directory(_), Some(path)) => escaped(path.as_os_str().as_bytes()),
            (QuotaSubject::Directory(number), None) => format!("directory {number:016x}"),
        };
        output.line(format!("{whose}: {}", describe(row)))?;
    }
    if !args.json {
        if is_empty {
            output.line("no limit")?;
        } else if !table.is_counted() {
            output.line("(files are still being counted)")?;
        }
    }
    output.flush()
}

fn describe(row: &QuotaRow) -> String {
    let used = row.used_by_all();
    let of = |limit: u64, text: String| match limit {
        u64::MAX => String::new(),
        _ => format!(" of {text}"),
    };
    let (bytes, files) = (row.limit.bytes, row.limit.files);
    format!(
        "{}{} and {}{}",
        units::size(used.bytes),
        of(bytes, units::size(bytes)),
        units::counted(used.files, "file", "files"),
        of(files, units::count(files)),
    )
}

fn as_json(
    subject: QuotaSubject,
    directory: Option<&Path>,
    row: &QuotaRow,
    is_counted: bool,
) -> QuotaLine {
    let used = row.used_by_all();
    let directory = directory.map(|path| json_text(path.as_os_str().as_bytes()));
    let limited = |limit: u64| (limit != u64::MAX).then_some(limit);
    QuotaLine {
        user: match subject {
            QuotaSubject::User(uid) => Some(uid),
            QuotaSubject::Directory(_) => None,
        },
        directory_hex: directory.as_ref().and_then(|(_, bytes)| bytes.clone()),
        directory: directory.map(|(text, _)| text),
        used_bytes: used.bytes,
        used_files: used.files,
        limit_bytes: limited(row.limit.bytes),
        limit_files: limited(row.limit.files),
        is_counted,
    }
}

/// The path of a directory; its number in braces below the last one above it that can be found.
async fn path_of(fs: &dyn FileSystem, directory: InodeNumber) -> PathBuf {
    let mut names: Vec<Vec<u8>> = Vec::new();
    let mut at = directory;
    while at != InodeNumber::ROOT && names.len() < MAX_DEPTH {
        match name_of(fs, at).await {
            Ok((parent, name)) => {
                names.push(name);
                at = parent;
            }
            Err(_) => {
                names.push(format!("{{{:016x}}}", at.0).into_bytes());
                break;
            }
        }
    }
    let mut path = PathBuf::from("/");
    path.extend(names.iter().rev().map(|name| std::ffi::OsStr::from_bytes(name)));
    path
}

/// The directory that holds one, and its name there.
async fn name_of(
    fs: &dyn FileSystem,
    directory: InodeNumber,
) -> Result<(InodeNumber, Vec<u8>), Errno> {
    let parent = fs.parent(Caller::default(), directory).await?.attr.inode;
    let opened = fs.opendir(Caller::default(), parent).await?;
    let mut cookie = 0;
    let found = loop {
        let listed = fs.readdir(parent, opened.handle, cookie, LISTED_AT_ONCE, false).await?;
        let Some(last) = listed.last() else { break Err(Errno::ENOENT) };
        cookie = last.cookie;
        let is_it = |entry: &&DirEntry| entry.inode == directory;
        if let Some(entry) = listed.iter().find(is_it) {
            break Ok((parent, entry.name.to_vec()));
        }
    };
    fs.closedir(parent, opened.handle).await?;
    found
}
