//! `atoll restore`: brings a file or directory of a mounted shared volume back as it was.
//!
//! It is copied out of `.atoll/history` to a name beside its own, and gets that when all of it is there and
//! on the ring.

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use atoll_node::shell_word;
use rustix::fs::{FileType, RenameFlags, renameat_with};
use rustix::io::Errno;

use crate::beneath::{self, Directory};
use crate::failure::{Exit, Failure};
use crate::incomplete;
use crate::messages::note;
use crate::moment::Moment;
use crate::mounted_past::InMount;
use crate::tree_copy::{Copied, CopyError, copy_tree};
use crate::units;

/// Between two lines of progress.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Arguments of `atoll restore`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll log ~/team/plan.txt
  atoll restore ~/team/plan.txt --at 2026-11-20T12:00
  atoll restore --force ~/team/plans --at 2026-11-20

The volume is a shared one and mounted; `atoll log PATH` says which versions there are, and .atoll/history in the
root of the mount shows them. TIME is a date, a minute, a second or a millisecond of UTC: the file or directory becomes what
it was just before. With --force it replaces what has its name now, which is kept as any version that is
replaced: `atoll log PATH` lists it. A file with several names becomes a file for each name. Files of a directory that cannot be
read are named and left out; --force then replaces nothing.
Volumes that one mount writes have `atoll volume restore`.")]
pub(crate) struct Args {
    /// What is to be as it was; it need not be there now
    path: PathBuf,

    /// When it was as it is to be
    #[arg(long, value_name = "TIME")]
    at: Moment,

    /// Replace what has the name now
    #[arg(long)]
    force: bool,
}

/// Restores.
pub(crate) fn run(args: &Args, quiet: bool) -> Result<(), Failure> {
    let (path, at) = (&args.path, args.at);
    let what = format!("cannot restore {}", path.display());
    let mount = InMount::of(path, &what)?;
    let place = mount.place().ok_or_else(|| {
        Failure::new(Exit::Usage, &what).because("the root of a mount cannot be replaced")
    })?;
    let (directory, name) = place.map_err(|error| not_written(&what, path, &error))?;
    beneath::open_many_files();
    let then = mount.then(at, &what)?;
    let present = then.and_then(|then| then.hold(name).map(|_| then));
    let then = present.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Failure::new(Exit::NotFound, &what)
            .because(format!("it was not there at {at}"))
            .advice(format!(
                "`atoll log {}` lists its versions.",
                shell_word(&path.display().to_string())
            )),
        _ => not_read(&what, path, &error),
    })?;
    let is_there = directory.hold(name).is_ok();
    if is_there && !args.force {
        return Err(Failure::new(Exit::Failed, &what)
            .because("something has that name now")
            .advice("--force replaces it."));
    }
    let beside = free_name(&directory).map_err(|error| not_written(&what, path, &error))?;
    let mut told = Instant::now();
    let mut progress = |copied: &Copied, _: &Path| {
        if !quiet && told.elapsed() >= LINE_EVERY {
            told = Instant::now();
            let files = units::counted(copied.files, "file", "files");
            note!("{files} so far, {}", units::size(copied.bytes));
        }
    };
    let mut unread = Vec::new();
    let copied = copy_tree((&then, name), (&directory, &beside), &mut progress, &mut unread);
    unread.iter().for_each(|CopyError { path, error, .. }| {
        note!("{} cannot be read: {error}", incomplete::shown(path));
    });
    let unread = unread.len() as u64;
    if copied.is_ok() && unread > 0 && is_there {
        let _ = directory.remove(&beside);
        return Err(not_all(what, unread).advice(
            "Nothing was changed. To have all else, give what has the name now another name, and restore without --force.",
        ));
    }
    let placed = copied.and_then(|copied| {
        let error = |error| CopyError { is_reading: false, path: path.clone(), error };
        give_name(&directory, &beside, name, is_there).map_err(error)?;
        Ok(copied)
    });
    let Copied { files, bytes } = placed.map_err(|CopyError { is_reading, path: at, error }| {
        // Half of it is of no use to anybody.
        let _ = directory.remove(&beside);
        match is_reading {
            true => not_read(&what, &at, &error),
            false => not_written(&what, &at, &error),
        }
    })?;
    if !quiet {
        let files = units::counted(files, "file", "files");
        let instead = if is_there { "; what had the name is replaced" } else { "" };
        note!("{files} restored, {}, as of {at}{instead}", units::size(bytes));
    }
    match unread {
        0 => Ok(()),
        unread => Err(not_all(format!("restored {}, but not all of it", path.display()), unread)),
    }
}

fn not_all(what: String, unread: u64) -> Failure {
    let unread = units::counted(unread, "file or directory", "files or directories");
    Failure::new(Exit::Incomplete, what).because(format!("{unread} of that state cannot be read"))
}

fn not_read(what: &str, at: &Path, error: &io::Error) -> Failure {
    Failure::io(format!("{what}: {} cannot be read", at.display()), error)
        .advice("Nothing was changed.")
}

fn not_written(what: &str, at: &Path, error: &io::Error) -> Failure {
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::NOENT) => {
            Failure::io(what, error).advice("Restore the directory first that it was in.")
        }
        Some(Errno::NOTDIR | Errno::LOOP) => Failure::io(what, error)
            .because("a directory above it was replaced by something else meanwhile")
            .advice("Symbolic links below a mount are not followed. Look at what is there and try again."),
        _ => Failure::io(format!("{what}: {}", at.display()), error),
    }
}

/// A name in a directory that nothing has.
fn free_name(directory: &Directory) -> io::Result<OsString> {
    let process = std::process::id();
    for number in 0..u32::MAX {
        let name = OsString::from(format!(".atoll-restored-{process}-{number}"));
        match directory.hold(&name) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(name),
            Err(error) => return Err(error),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

/// Gives what lies beside a name this name, and removes what had it.
fn give_name(
    directory: &Directory,
    beside: &OsStr,
    name: &OsStr,
    is_there: bool,
) -> io::Result<()> {
    let rename = |flags| renameat_with(directory, beside, directory, name, flags);
    if !is_there {
        rename(RenameFlags::NOREPLACE)?;
        return directory.sync();
    }
    let is_directory =
        |name: &OsStr| io::Result::Ok(directory.hold(name)?.kind() == FileType::Directory);
    if is_directory(beside)? || is_directory(name)? {
        rename(RenameFlags::EXCHANGE)?;
        directory.remove(beside)?;
    } else {
        rename(RenameFlags::empty())?;
    }
    // Removals are on the ring when this returns.
    directory.sync()
}
