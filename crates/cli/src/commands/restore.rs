//! `atoll restore`: brings a file or directory of a mounted shared volume back as it was.
//!
//! It is copied out of `.atoll/history` to a name beside its own, and gets that when all of it is there and
//! on the ring.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::{fs, io};

use rustix::fs::{CWD, RenameFlags, renameat_with};

use crate::failure::{Exit, Failure};
use crate::moment::Moment;
use crate::mounted_past::InMount;
use crate::tree_copy::{Copied, CopyError, copy_tree};
use crate::units;

/// Arguments of `atoll restore`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll log ~/team/plan.txt
  atoll restore ~/team/plan.txt --at 2026-11-20T12:00
  atoll restore --force ~/team/plans --at 2026-11-20

The volume is a shared one and mounted; `atoll log PATH` says which versions there are, and .atoll/history in the
root of the mount shows them. TIME is a date, a minute or a second of UTC: the file or directory becomes what it was
just before. With --force it replaces what has its name now, which is kept as any version that is
replaced: if it is older than the last full hour. A file with several names becomes a file for each name.
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
    let then = InMount::of(path, &what)?.then(at, &what)?;
    if let Err(error) = fs::symlink_metadata(&then) {
        return Err(match error.kind() {
            io::ErrorKind::NotFound => Failure::new(Exit::NotFound, &what)
                .because(format!("it was not there at {at}"))
                .advice(format!("`atoll log {}` lists its versions.", path.display())),
            _ => not_read(&what, &then, &error),
        });
    }
    let is_there = fs::symlink_metadata(path).is_ok();
    if is_there && !args.force {
        return Err(Failure::new(Exit::Failed, &what)
            .because("something has that name now")
            .advice("--force replaces it."));
    }
    let beside = beside(path).ok_or_else(|| {
        Failure::new(Exit::Usage, &what).because("the root of a mount cannot be replaced")
    })?;
    let copied = copy_tree(&then, &beside, quiet);
    let placed = copied.and_then(|copied| {
        place(&beside, path, is_there).map_err(|error| CopyError::at(path, error))?;
        Ok(copied)
    });
    let Copied { files, bytes, .. } = placed.map_err(|CopyError { path: at, error }| {
        // Half of it is of no use to anybody.
        let _ = remove(&beside);
        match at.starts_with(&then) {
            true => not_read(&what, &at, &error),
            false => match error.kind() {
                io::ErrorKind::NotFound => {
                    Failure::io(&what, &error).advice("Restore the directory first that it was in.")
                }
                _ => Failure::io(format!("{what}: {}", at.display()), &error),
            },
        }
    })?;
    if !quiet {
        let files = units::counted(files, "file", "files");
        let instead = if is_there { "; what had the name is replaced" } else { "" };
        eprintln!("{files} restored, {}, as of {at}{instead}", units::size(bytes));
    }
    Ok(())
}

fn not_read(what: &str, at: &Path, error: &io::Error) -> Failure {
    Failure::io(format!("{what}: {} cannot be read", at.display()), error).advice(
        "If it is not kept any more, restore the other files of its directory one by one; nothing was changed.",
    )
}

/// A free name in the same directory.
fn beside(path: &Path) -> Option<PathBuf> {
    path.file_name()?;
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let name: OsString = format!(".atoll-restored-{}", std::process::id()).into();
    Some(directory.unwrap_or(Path::new(".")).join(name))
}

/// Gives what lies beside the path its name, and removes what had that.
fn place(beside: &Path, path: &Path, is_there: bool) -> io::Result<()> {
    if !is_there {
        renameat_with(CWD, beside, CWD, path, RenameFlags::NOREPLACE)?;
        return sync_directory(path);
    }
    let is_directory = |path: &Path| fs::symlink_metadata(path).map(|meta| meta.is_dir());
    if is_directory(beside)? || is_directory(path)? {
        renameat_with(CWD, beside, CWD, path, RenameFlags::EXCHANGE)?;
        remove(beside)?;
    } else {
        fs::rename(beside, path)?;
    }
    sync_directory(path)
}

/// Removals are on the ring when this returns.
fn sync_directory(path: &Path) -> io::Result<()> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    fs::File::open(directory.unwrap_or(Path::new(".")))?.sync_all()
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path)?.is_dir() {
        true => fs::remove_dir_all(path),
        false => fs::remove_file(path),
    }
}
