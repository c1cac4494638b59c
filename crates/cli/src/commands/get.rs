//! `atoll get`: a file or tree of a volume on this machine's disk.
//!
//! `DEST` means the same on every run, or a second run could not go on where the first
//! stopped: a directory's contents always go right into DEST.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use atoll_volume::format::{Content, FormatError};
use atoll_volume::owned::{GetOptions, GetTreeError, Gotten, Item, ReadError, Unread, get_newest};
use serde::Serialize;

use crate::address::Address;
use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::incomplete::{self, JsonMissing};
use crate::interrupt;
use crate::messages::note;
use crate::output::{Output, json_text};
use crate::progress::Watch;
use crate::read_key::ReadKeyArgs;
use crate::reading::Reading;
use crate::units;

/// Arguments of `atoll get`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll get atoll:KEY ./copy                  the whole volume becomes ./copy
  atoll get atoll:KEY/docs ./docs             one directory
  atoll get atoll:KEY/docs/a.pdf .            one file, into this directory
  atoll get atoll:KEY/docs/a.pdf b.pdf        one file, under another name

Stopped half-way, the same command again goes on where it was. Files that cannot be read are
passed over and named at the end, with exit code 7; the same command again tries it once more. If the
volume is written meanwhile and blocks of the version that was begun with are gone, the copy goes on from
the newest one, and says so.")]
pub(crate) struct Args {
    /// What to copy
    #[arg(value_name = "ADDR[/PATH]", value_parser = Address::parser())]
    address: Address,

    #[command(flatten)]
    read_key: ReadKeyArgs,

    /// Where to: a directory's contents go into DEST; a file goes into DEST if that is a
    /// directory, or becomes DEST
    dest: PathBuf,

    /// Keep set-user-id and set-group-id bits: only if you trust the publisher
    #[arg(long)]
    set_id: bool,

    /// The result as one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct JsonGotten {
    address: String,
    version: u64,
    /// Another one if blocks of it were gone.
    began_with_version: u64,
    dest: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    dest_hex: Option<String>,
    files: u64,
    files_kept: u64,
    dirs: u64,
    symlinks: u64,
    bytes: u64,
    bytes_resumed: u64,
    complete: bool,
    /// Files, and entries of directories, that could not be read.
    unread: u64,
    /// The first of them.
    failures: Vec<JsonMissing>,
    millis: u64,
}

/// Copies.
pub(crate) async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let mut reading = Reading::open(global, &args.address, &args.read_key.given()?).await?;
    let item = reading.item().await?;
    let mut dest = args.dest.clone();
    let into_dir = dest.is_dir() || dest.as_os_str().as_bytes().ends_with(b"/");
    if into_dir
        && !matches!(item.entry.content, Content::Directory(_))
        && let Some(name) = args.address.file_name()
    {
        dest.push(OsStr::from_bytes(name));
    }
    check_dest(args, &item, &dest)?;
    let watch = Watch::start("copying", global.quiet);
    let options = GetOptions { set_id: args.set_id, ..GetOptions::default() };
    let snapshot = reading.snapshot.clone();
    let goes_on = |version: u64| {
        note!(
            "the volume was written meanwhile, and blocks of the version begun with are gone: going on from version \
             {version}"
        );
    };
    let copy = async {
        let progress = watch.progress();
        let from = (snapshot, item.clone());
        let copied = get_newest(&reading.volume, from, &dest, options, progress, &goes_on).await;
        copied.map_err(|error| failure(&reading, &dest, error))
    };
    let copied = interrupt::or_interrupted(copy, GOES_ON).await;
    let took = watch.finish();
    let (copied, newest) = copied?;
    let began_with = reading.snapshot.version();
    reading.snapshot = newest;
    report(args, &reading, began_with, &dest, &copied, took)?;
    completeness(&reading, &item, copied).await
}

const GOES_ON: &str = "What has arrived stays; the same command again goes on from there.";

const TOO_DEEP: &str = "A directory that lies too deep is copied by a command of its own, which names it as ADDR/PATH.";

/// Fails if not everything was copied.
async fn completeness(reading: &Reading, item: &Item, copied: Gotten) -> Result<(), Failure> {
    let is_too_deep = |unread: &Unread| {
        matches!(unread.error, ReadError::Bad { source: FormatError::TooDeep, .. })
    };
    let has_too_deep = copied.unread.iter().any(is_too_deep);
    let Some(first) = copied.unread.into_iter().next() else { return Ok(()) };
    let error = reading.volume.explained(first.error).await;
    let is_dir = matches!(item.entry.content, Content::Directory(_));
    if !is_dir || matches!(error, ReadError::Expired { .. }) {
        return Err(reading.failure("copy", &error));
    }
    let what = format!("copied {}, but not all of it", reading.address);
    let unread = units::counted(copied.unread_count, "file or directory", "files or directories");
    if copied.gave_up {
        return Err(Failure::new(Exit::Unavailable, what)
            .because("the ring does not answer; what was left was not tried")
            .advice(GOES_ON));
    }
    let failure =
        Failure::new(Exit::Incomplete, what).because(format!("{unread} could not be read"));
    Err(failure.advice(if has_too_deep { TOO_DEEP } else { GOES_ON }))
}

fn report(
    args: &Args,
    reading: &Reading,
    began_with: u64,
    dest: &Path,
    copied: &Gotten,
    took: Duration,
) -> Result<(), Failure> {
    let line = |unread: &Unread| {
        let hidden = match unread.hidden_entries {
            0 => String::new(),
            count => format!(" ({} in it)", units::counted(count, "entry", "entries")),
        };
        format!("not copied{hidden}: {}", unread.error)
    };
    let unlisted = copied.unread.iter().map(|unread| unread.hidden_entries.max(1)).sum::<u64>();
    let lines = copied.unread_count - unlisted + copied.unread.len() as u64;
    incomplete::say(copied.unread.iter().map(line), lines);
    let mut output = Output::new();
    if args.json {
        let (dest, dest_hex) = json_text(dest.as_os_str().as_bytes());
        output.json(&JsonGotten {
            address: args.address.to_string(),
            version: reading.snapshot.version(),
            began_with_version: began_with,
            dest,
            dest_hex,
            files: copied.files,
            files_kept: copied.files_kept,
            dirs: copied.dirs,
            symlinks: copied.symlinks,
            bytes: copied.bytes,
            bytes_resumed: copied.bytes_resumed,
            complete: copied.unread_count == 0,
            unread: copied.unread_count,
            failures: copied
                .unread
                .iter()
                .map(|unread| JsonMissing::new("not_copied", &unread.path, &unread.error))
                .collect(),
            millis: took.as_millis() as u64,
        })?;
        return output.flush();
    }
    output.line(describe(copied, took))?;
    output.flush()
}

fn describe(copied: &Gotten, took: Duration) -> String {
    let mut line = format!("copied {}", units::counted(copied.files, "file", "files"));
    if copied.symlinks > 0 {
        line += &format!(", {}", units::counted(copied.symlinks, "link", "links"));
    }
    line += &format!(", {} in {}", units::size(copied.bytes), units::duration(took));
    if copied.bytes > 0 {
        line += &format!(" ({})", units::rate(copied.bytes, took));
    }
    if copied.files_kept > 0 {
        let kept = units::counted(copied.files_kept, "file was", "files were");
        line += &format!("; {kept} there already");
    }
    if copied.bytes_resumed > 0 {
        line += &format!("; went on after {}", units::size(copied.bytes_resumed));
    }
    line
}

/// Checks the destination before writing begins, to fail with a clear message.
fn check_dest(args: &Args, item: &Item, dest: &Path) -> Result<(), Failure> {
    let failed = |exit| {
        let what = format!("cannot copy {} to {}", args.address, dest.display());
        Failure::new(exit, what)
    };
    let is_dir = matches!(item.entry.content, Content::Directory(_));
    if is_dir && dest.exists() && !dest.is_dir() {
        return Err(failed(Exit::Failed)
            .because("it is a directory, and what is there is none")
            .advice("Choose a DEST that does not exist yet, or is a directory."));
    }
    match dest.parent() {
        Some(parent) if !parent.as_os_str().is_empty() && !parent.exists() => {
            Err(failed(Exit::NotFound)
                .because(format!("there is no directory {}", parent.display()))
                .advice("Make it first, with mkdir -p."))
        }
        _ => Ok(()),
    }
}

fn failure(reading: &Reading, dest: &Path, error: GetTreeError) -> Failure {
    let what = format!("cannot copy {} to {}", reading.address, dest.display());
    match error {
        GetTreeError::Read(error) => reading.failure("copy", &error),
        GetTreeError::Write { ref source, .. } => {
            let failure = Failure::io(what, source).because(&error);
            if failure.exit == Exit::Full { failure.advice(GOES_ON) } else { failure }
        }
        GetTreeError::Stopped => Failure::new(Exit::Failed, what).because(error).advice(GOES_ON),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_says_what_was_copied_and_promises_no_rate_of_nothing() {
        let took = Duration::from_secs(2);
        let all = Gotten { files: 9, symlinks: 1, bytes: 2 << 20, ..Gotten::default() };
        assert_eq!(describe(&all, took), "copied 9 files, 1 link, 2.0 MiB in 2.0s (1.0 MiB/s)");
        let again = Gotten { files_kept: 9, ..Gotten::default() };
        assert_eq!(
            describe(&again, took),
            "copied 0 files, 0 B in 2.0s; 9 files were there already"
        );
    }
}
