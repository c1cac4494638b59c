//! `atoll conflicts`: files of which a mounted shared volume has kept a second version, because two members wrote them at
//! the same time.
//!
//! They are known by their names ([`ConflictName`]), so this reads directories and nothing else.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use atoll_volume::shared::merged::ConflictName;
use rustix::fs::FileType;
use serde::Serialize;

use crate::beneath::{self, Directory};
use crate::failure::{Exit, Failure};
use crate::messages::note;
use crate::mounted_past::is_in_shared_mount;
use crate::output::{Output, Part, json_text};

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
    #[serde(skip_serializing_if = "Option::is_none")]
    path_hex: Option<String>,
    beside: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    beside_hex: Option<String>,
    user: String,
    time: String,
}

/// Lists them.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let mut output = Output::new();
    let here = [PathBuf::from(".")];
    let paths = if args.paths.is_empty() { &here[..] } else { &args.paths };
    let mut unread = Vec::new();
    beneath::open_many_files();
    for path in paths {
        let top = Directory::open(path).map_err(|error| match error.kind() {
            io::ErrorKind::NotADirectory => {
                Failure::new(Exit::Usage, format!("{} is not a directory", path.display()))
            }
            _ => Failure::io(format!("cannot read {}", path.display()), &error),
        })?;
        let mut shown = 0;
        walk(top, &mut unread, &mut |directory, conflict| {
            shown += usize::from(show(&mut output, args.json, directory, conflict)?);
            Ok(())
        })?;
        if shown == 0 && !is_in_shared_mount(path) {
            note!("{} is in no mount of a shared volume; no conflicts were found", path.display());
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

/// Visits all names of conflicts below a directory, on its file system alone. Others may change the tree meanwhile.
fn walk(
    top: Directory,
    unread: &mut Vec<String>,
    visit: &mut impl FnMut(&Path, &[u8]) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let device = top.stat().map(|stat| stat.st_dev).ok();
    let mut levels: Vec<(Directory, std::vec::IntoIter<OsString>)> = Vec::new();
    let mut next = Some(top);
    loop {
        if let Some(directory) = next.take() {
            match directory.names() {
                Ok(names) => {
                    for name in names.iter().map(|name| name.as_bytes()) {
                        if ConflictName::parse(name).is_some() {
                            visit(directory.path(), name)?;
                        }
                    }
                    levels.push((directory, names.into_iter()));
                }
                Err(error) => unread.push(format!("{}: {error}", directory.path().display())),
            }
        }
        let Some((directory, names)) = levels.last_mut() else { return Ok(()) };
        let Some(name) = names.next() else {
            levels.pop();
            continue;
        };
        // What is gone meanwhile is no conflict any more.
        let Ok(held) = directory.hold(&name) else { continue };
        if held.kind() == FileType::Directory && Some(held.stat().st_dev) == device {
            let path = directory.path_of(&name);
            match held.open_directory(path.clone()) {
                Ok(below) => next = Some(below),
                Err(error) => unread.push(format!("{}: {error}", path.display())),
            }
        }
    }
}

/// Shows a name if it is one of a conflict; whether it is.
fn show(output: &mut Output, json: bool, directory: &Path, name: &[u8]) -> Result<bool, Failure> {
    let Some(ConflictName { beside, user, time }) = ConflictName::parse(name) else {
        return Ok(false);
    };
    let directory = directory.strip_prefix(".").unwrap_or(directory);
    let path = directory.join(std::ffi::OsStr::from_bytes(name));
    if json {
        let beside = directory.join(std::ffi::OsStr::from_bytes(beside));
        let (path, path_hex) = json_text(path.as_os_str().as_bytes());
        let (beside, beside_hex) = json_text(beside.as_os_str().as_bytes());
        let shown = Shown {
            path,
            path_hex,
            beside,
            beside_hex,
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
