//! `atoll conflicts`: what members of a mounted shared volume wrote at the same time: contents that were kept beside a file,
//! and those that nobody has been shown yet.
//!
//! The mount says of each directory which they are (a virtual attribute): a file that somebody has given such a name is none.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use atoll_volume::shared::file_state::{
    CONFLICTS_XATTR, DirectoryConflicts, NAMES_AT_ONCE, STATE_XATTR, UnopenedContents,
};
use atoll_volume::shared::merged::ConflictName;
use rustix::fs::FileType;
use rustix::io::Errno;
use serde::Serialize;

use crate::beneath::{self, Directory};
use crate::failure::{Exit, Failure};
use crate::output::{Output, Part, json_text};
use crate::{units, user_path};

/// Arguments of `atoll conflicts`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll conflicts ~/team
  atoll conflicts --json ~/team/plans | jq -r .path

If two members write a file at the same time, one version keeps the name, and the other appears beside it as
NAME~USER~TIME: the first digits of its writer's key, and when it was written. Compare the two, keep what
you want under the plain name, and remove the other.
That happens when the file is opened, replaced or removed. Before that its other versions are listed too: open the
file to have them beside it. A kept version that was renamed or moved is listed no more.")]
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
    /// Whether it is in the file `beside` still, and nobody has been shown it.
    unopened: bool,
}

/// Lists them.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let mut output = Output::new();
    let here = [PathBuf::from(".")];
    let paths = if args.paths.is_empty() { &here[..] } else { &args.paths };
    let mut unread = Vec::new();
    beneath::open_many_files();
    for path in paths {
        let top = user_path::open_directory(path).map_err(|error| match error.kind() {
            io::ErrorKind::NotADirectory => {
                Failure::new(Exit::Usage, format!("{} is not a directory", path.display()))
            }
            _ => Failure::io(format!("cannot read {}", path.display()), &error),
        })?;
        check_mount(&top)?;
        walk(top, &mut unread, &mut |directory, found| {
            show(&mut output, args.json, directory, found)
        })?;
    }
    output.flush()?;
    match unread.first() {
        None => Ok(()),
        Some(first) => {
            let count = units::counted(unread.len() as u64, "directory", "directories");
            let what = format!("{count} cannot be read; the first: {first}");
            Err(Failure::new(Exit::Incomplete, what))
        }
    }
}

/// That a mount says what the conflicts of a directory are.
fn check_mount(top: &Directory) -> Result<(), Failure> {
    let told = conflicts_of(top, 0).err().and_then(|error| Errno::from_io_error(&error));
    if !matches!(told, Some(Errno::NODATA | Errno::NOTSUP)) {
        return Ok(());
    }
    let path = top.path();
    let failure =
        Failure::new(Exit::Usage, format!("cannot look for conflicts in {}", path.display()));
    let is_shared = || top.hold(OsStr::new(".")).is_ok_and(|held| held.has_xattr(STATE_XATTR));
    Err(match is_shared() {
        true => failure
            .because("its mount does not say which there are")
            .advice("If atoll was upgraded, mount the volume anew."),
        false => failure
            .because("it is in no mount of a shared volume")
            .advice("`atoll mount NAME MNT` mounts a shared volume."),
    })
}

/// What the mount says of the names of a directory, from number `from` on.
fn conflicts_of(directory: &Directory, from: usize) -> io::Result<DirectoryConflicts> {
    let name = format!("{CONFLICTS_XATTR}{from}");
    let value = directory.hold(OsStr::new("."))?.xattr(OsStr::new(&name))?;
    DirectoryConflicts::decode(&value).map_err(|_| Errno::NOTSUP.into())
}

/// Visits the conflicts of a directory.
fn visit_all(
    directory: &Directory,
    unread: &mut Vec<String>,
    visit: &mut impl FnMut(&Path, &DirectoryConflicts) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut from = 0;
    loop {
        match conflicts_of(directory, from) {
            Ok(found) => {
                visit(directory.path(), &found)?;
                if found.names < NAMES_AT_ONCE as u64 {
                    return Ok(());
                }
            }
            Err(error) => {
                unread.push(format!("{}: {error}", directory.path().display()));
                return Ok(());
            }
        }
        from += NAMES_AT_ONCE;
    }
}

/// Visits the conflicts of each directory from `top` down, on its file system alone. Others may change the tree meanwhile.
fn walk(
    top: Directory,
    unread: &mut Vec<String>,
    visit: &mut impl FnMut(&Path, &DirectoryConflicts) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let device = top.stat().map(|stat| stat.st_dev).ok();
    let mut levels: Vec<(Directory, std::vec::IntoIter<OsString>)> = Vec::new();
    let mut next = Some(top);
    loop {
        if let Some(directory) = next.take() {
            match directory.names() {
                Ok(names) => {
                    visit_all(&directory, unread, visit)?;
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

/// Shows the conflicts of a directory.
fn show(
    output: &mut Output,
    json: bool,
    directory: &Path,
    found: &DirectoryConflicts,
) -> Result<(), Failure> {
    let directory = directory.strip_prefix(".").unwrap_or(directory);
    let of = |name: &[u8]| directory.join(OsStr::from_bytes(name));
    let shown = |name: &[u8], beside: &[u8], (user, time): (&str, &str), unopened| {
        let (path, path_hex) = json_text(of(name).as_os_str().as_bytes());
        let (beside, beside_hex) = json_text(of(beside).as_os_str().as_bytes());
        let (user, time) = (user.to_owned(), time.to_owned());
        Shown { path, path_hex, beside, beside_hex, user, time, unopened }
    };
    for name in &found.kept {
        let Some(ConflictName { beside, user, time }) = ConflictName::parse(name) else { continue };
        if json {
            output.json(&shown(name, beside, (user, time), false))?;
            continue;
        }
        output.parts(&[
            Part::Name(of(name).as_os_str().as_bytes()),
            Part::Words("  beside "),
            Part::Name(beside),
            Part::Words(&format!(", written by {user} at {time}")),
        ])?;
    }
    for UnopenedContents { name, user, time } in &found.unopened {
        if json {
            output.json(&shown(name, name, (user, time), true))?;
            continue;
        }
        output.parts(&[
            Part::Name(of(name).as_os_str().as_bytes()),
            Part::Words("  has another version, written by "),
            Part::Name(user.as_bytes()),
            Part::Words(" at "),
            Part::Name(time.as_bytes()),
            Part::Words(": open the file to have it beside this one"),
        ])?;
    }
    Ok(())
}
