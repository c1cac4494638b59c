//! `atoll conflicts`: files of which a mounted shared volume has kept a second version, because two members wrote them at
//! the same time.
//!
//! They are known by their names ([`ConflictName`]), so this reads directories and nothing else.

use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use atoll_volume::shared::merged::ConflictName;
use serde::Serialize;

use crate::failure::{Exit, Failure};
use crate::mounted_past::is_in_shared_mount;
use crate::output::{Output, Part};

/// Arguments of `atoll conflicts`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll conflicts ~/team
  atoll conflicts --json ~/team/plans | jq -r .path

If two members write a file at the same time, one version keeps the name, and the other appears beside it as
NAME~USER~TIME: the first digits of its writer's key, and when it was written. Compare the two, keep what
you want under the plain name, and remove the other.")]
pub(crate) struct Args {
    /// Directories of mounted volumes; without any, the current one
    #[arg(value_name = "PATH")]
    paths: Vec<PathBuf>,

    /// One JSON object for each, on a line of its own
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Shown {
    path: String,
    beside: String,
    user: String,
    time: String,
}

/// Lists them.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let mut output = Output::new();
    let here = [PathBuf::from(".")];
    let paths = if args.paths.is_empty() { &here[..] } else { &args.paths };
    let mut unread = Vec::new();
    for path in paths {
        let top = fs::metadata(path)
            .map_err(|error| Failure::io(format!("cannot read {}", path.display()), &error))?;
        if !top.is_dir() {
            let what = format!("{} is not a directory", path.display());
            return Err(Failure::new(Exit::Usage, what));
        }
        let mut shown = 0;
        walk(path, top.dev(), &mut unread, &mut |directory, conflict| {
            shown += usize::from(show(&mut output, args.json, directory, conflict)?);
            Ok(())
        })?;
        if shown == 0 && !is_in_shared_mount(path) {
            eprintln!(
                "{} is in no mount of a shared volume; no conflicts were found",
                path.display()
            );
        }
    }
    output.flush()?;
    match unread.first() {
        None => Ok(()),
        Some(first) => {
            let what = format!("{} directories cannot be read; the first: {first}", unread.len());
            Err(Failure::new(Exit::Incomplete, what))
        }
    }
}

/// Visits all names of conflicts below a directory, on its file system alone.
fn walk(
    top: &Path,
    device: u64,
    unread: &mut Vec<String>,
    visit: &mut impl FnMut(&Path, &[u8]) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut waiting = vec![top.to_owned()];
    while let Some(directory) = waiting.pop() {
        let entries =
            match fs::read_dir(&directory).and_then(Iterator::collect::<Result<Vec<_>, _>>) {
                Ok(entries) => entries,
                Err(error) => {
                    unread.push(format!("{}: {error}", directory.display()));
                    continue;
                }
            };
        let mut names: Vec<_> =
            entries.into_iter().map(|entry| entry.file_name().into_vec()).collect();
        names.sort();
        for name in &names {
            if ConflictName::parse(name).is_some() {
                visit(&directory, name)?;
            }
        }
        for name in names.iter().rev() {
            let path = directory.join(std::ffi::OsStr::from_bytes(name));
            // What is gone meanwhile is no conflict any more.
            if fs::symlink_metadata(&path).is_ok_and(|meta| meta.is_dir() && meta.dev() == device) {
                waiting.push(path);
            }
        }
    }
    Ok(())
}

/// Shows a name if it is one of a conflict; whether it is.
fn show(output: &mut Output, json: bool, directory: &Path, name: &[u8]) -> Result<bool, Failure> {
    let Some(ConflictName { beside, user, time }) = ConflictName::parse(name) else {
        return Ok(false);
    };
    let directory = directory.strip_prefix(".").unwrap_or(directory);
    let path = directory.join(std::ffi::OsStr::from_bytes(name));
    if json {
        let shown = Shown {
            path: path.to_string_lossy().into_owned(),
            beside: directory
                .join(std::ffi::OsStr::from_bytes(beside))
                .to_string_lossy()
                .into_owned(),
            user: user.to_owned(),
            time: time.to_owned(),
        };
        return output.json(&shown).map(|()| true);
    }
    let parts = [
        Part::Name(path.as_os_str().as_bytes()),
        Part::Words("  beside "),
        Part::Name(beside),
        Part::Words(&format!(", written by {user} at {time}")),
    ];
    output.parts(&parts).map(|()| true)
}
