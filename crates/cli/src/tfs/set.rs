//! `atoll tfs set`: makes files transparent or ordinary, and sets the target loss rate.
//!
//! An empty file and a directory take the attribute; a file with contents is copied into a new
//! one beside it, which has the attribute from its birth, and renamed over it. A file made in a
//! transparent directory is transparent; files in it from before keep their kind.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, fchown};
use std::path::{Path, PathBuf};

use atoll_tfs::stat::{TARGET_LOSS_XATTR, USAGE_XATTR};
use rustix::fs::{FileType, OFlags, XattrFlags, renameat, setxattr};
use rustix::io::Errno;
use rustix::process::geteuid;

use super::{ask, device};
use crate::beneath::{Directory, Held};
use crate::failure::{Exit, Failure};
use crate::runtime::until_done;
use crate::units;

/// The attribute.
const FLAG: &str = "user.tfs.transparent";

/// Arguments of `atoll tfs set`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll tfs set --transparent /mnt/tfs/atoll
  atoll tfs set --ordinary /mnt/tfs/photo.jpg
  atoll tfs set --target-loss 1KiB /mnt/tfs

New files in a transparent directory are transparent; files that are in it already
are changed only if they are named. `getfattr -n user.tfs.transparent FILE` tells what a file is.

With a lower target loss rate, transparent data keeps away from more of the disk, namely
from where ordinary files come and go; `atoll tfs stat` shows what that costs in room.")]
pub(super) struct Args {
    #[command(flatten)]
    what: What,

    /// Files and directories on a mounted TFS; for --target-loss mount points, or image
    /// files or block devices that are not mounted
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<PathBuf>,
}

#[derive(clap::Args, Debug)]
#[group(required = true, multiple = false)]
struct What {
    /// Make them transparent: they may vanish, and cost no room
    #[arg(long)]
    transparent: bool,

    /// Make them ordinary: they stay
    #[arg(long)]
    ordinary: bool,

    /// How much transparent data may be overwritten, a second on average
    #[arg(long, value_name = "SIZE", value_parser = parse_rate, allow_negative_numbers = true)]
    target_loss: Option<u64>,
}

/// Reads `100`, `1KiB` or `1KiB/s`.
fn parse_rate(text: &str) -> Result<u64, String> {
    units::parse_size(text.trim().trim_end_matches("/s"))
        .map_err(|_| "a rate is a size a second, e.g. 100B, 1KiB or 1KiB/s".to_string())
}

/// Sets.
pub(super) fn run(args: &Args) -> Result<(), Failure> {
    if let Some(rate) = args.what.target_loss {
        return args.paths.iter().try_for_each(|path| set_target_loss(path, rate));
    }
    let transparent = args.what.transparent;
    let kind = if transparent { "transparent" } else { "ordinary" };
    for path in &args.paths {
        set(path, transparent).map_err(|error| {
            let what = format!("cannot make {} {kind}", path.display());
            match error.raw_os_error().map(Errno::from_raw_os_error) {
                Some(Errno::OPNOTSUPP) => Failure::new(Exit::Failed, what)
                    .because("it is not on a mounted TFS")
                    .advice("`atoll tfs mount DEVICE MNT` mounts one."),
                Some(Errno::BUSY) => {
                    Failure::new(Exit::Failed, what).because("a program has it open")
                }
                Some(Errno::PERM) => Failure::new(Exit::Failed, what)
                    .because("only its owner and root may, and no user if it is immutable"),
                _ => Failure::io(what, &error),
            }
        })?;
    }
    Ok(())
}

fn set_target_loss(path: &Path, rate: u64) -> Result<(), Failure> {
    let what = || format!("cannot set the target loss rate of {}", path.display());
    if path.is_dir() {
        // Elsewhere it would be kept as any other attribute, and mean nothing.
        ask::ask(path, TARGET_LOSS_XATTR)?;
        let value = rate.to_string();
        return setxattr(path, TARGET_LOSS_XATTR, value.as_bytes(), XattrFlags::empty()).map_err(
            |error| match error {
                Errno::INVAL => Failure::new(Exit::Usage, what())
                    .because("it is one for the whole file system")
                    .advice("Name the mount point."),
                Errno::PERM | Errno::ACCESS => Failure::new(Exit::Failed, what())
                    .because("only root and the owner of its topmost directory may"),
                error => Failure::io(what(), &error.into()),
            },
        );
    }
    until_done(async {
        let failed = |errno| Failure::new(Exit::Failed, what()).because(errno);
        let tfs = device::mount_image(path, false)?;
        let set = tfs.set_target_loss(rate as f64).and_then(|()| tfs.choose_avoided().map(drop));
        tfs.unmount().map_err(failed)?;
        set.map_err(failed)
    })
}

fn set(path: &Path, transparent: bool) -> io::Result<()> {
    let (above, name) = match path.file_name() {
        Some(name) => (path.parent().unwrap_or(Path::new("")), name),
        None => (path, OsStr::new(".")),
    };
    let directory = Directory::open(above)?;
    let found = directory.hold(name)?;
    // Elsewhere the attribute would be kept as any other, and mean nothing.
    if !found.has_xattr(USAGE_XATTR) {
        return Err(Errno::OPNOTSUPP.into());
    }
    if is_transparent(&found)? == transparent {
        return Ok(());
    }
    match found.kind() {
        FileType::Directory => mark(&found, transparent),
        FileType::RegularFile if found.stat().st_size == 0 => mark(&found, transparent),
        FileType::RegularFile if found.stat().st_nlink > 1 => {
            let why = "a file with several names cannot be transparent";
            Err(io::Error::new(io::ErrorKind::InvalidInput, why))
        }
        FileType::RegularFile => replace(&directory, name, transparent, &found),
        _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no file and no directory")),
    }
}

/// Whether the attribute is there.
fn is_transparent(found: &Held) -> io::Result<bool> {
    match found.xattr(OsStr::new(FLAG)) {
        Ok(value) => Ok(value == b"1"),
        Err(error) if error.raw_os_error() == Some(Errno::NODATA.raw_os_error()) => Ok(false),
        Err(error) => Err(error),
    }
}

fn mark(file: &Held, transparent: bool) -> io::Result<()> {
    file.set_xattr(OsStr::new(FLAG), if transparent { b"1" } else { b"0" })
}

/// Copies a file into a new one of the other kind and puts that in its place.
fn replace(directory: &Directory, name: &OsStr, transparent: bool, found: &Held) -> io::Result<()> {
    let mut beside = name.to_os_string();
    beside.push(format!(".{}.new", std::process::id()));
    // Made without being opened: one that is open cannot choose what it is.
    directory.make_node(&beside, FileType::RegularFile, 0)?;
    let placed = copy(found, directory, &beside, transparent)
        .and_then(|()| Ok(renameat(directory, &beside, directory, name)?));
    if placed.is_err() {
        let _ = directory.remove(&beside);
    }
    placed
}

/// Fills an empty file that was just made. Users who may write the directory could put another one in its place.
fn copy(from: &Held, directory: &Directory, to: &OsStr, transparent: bool) -> io::Result<()> {
    let made = directory.hold(to)?;
    let stat = *made.stat();
    let is_ours = stat.st_uid == geteuid().as_raw() && stat.st_nlink == 1 && stat.st_size == 0;
    if made.kind() != FileType::RegularFile || !is_ours {
        return Err(io::Error::other("another program has put something in the place of its copy"));
    }
    mark(&made, transparent)?;
    let mut source = from.open_file(OFlags::RDONLY)?;
    let mut target = made.open_file(OFlags::WRONLY)?;
    io::copy(&mut source, &mut target)?;
    let found = source.metadata()?;
    // Only root may give files away; others' copies are theirs already.
    let _ = fchown(&target, Some(found.uid()), Some(found.gid()));
    target.set_permissions(found.permissions())?;
    // After the mode, which would change the mask of an access control list.
    copy_attributes(from, &made)?;
    target.set_modified(found.modified()?)?;
    target.sync_all()
}

/// Copies extended attributes, access control lists among them, but for the one that differs.
fn copy_attributes(from: &Held, to: &Held) -> io::Result<()> {
    for (name, value) in from.xattrs()? {
        if name == FLAG {
            continue;
        }
        match to.set_xattr(&name, &value) {
            // A capability is root's to give.
            Err(error)
                if error.kind() == io::ErrorKind::PermissionDenied
                    && name.as_bytes().starts_with(b"security.") => {}
            set => set?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    /// Root copied a file of a user, who put a link in the place of the file or of its copy meanwhile: root read and
    /// wrote what the link led to.
    #[test]
    fn a_link_in_the_place_of_a_file_or_of_its_copy_is_refused() -> io::Result<()> {
        let scratch = tempfile::tempdir()?;
        let place = |name: &str| scratch.path().join(name);
        fs::write(place("secret"), "secret")?;
        fs::write(place("file"), "own")?;
        fs::write(place("full"), "full")?;
        fs::write(place("two"), "")?;
        fs::hard_link(place("two"), place("names"))?;
        symlink(place("secret"), place("link"))?;
        let directory = Directory::open(scratch.path())?;
        let held = |name: &str| directory.hold(OsStr::new(name));
        for to in ["link", "full", "two"] {
            let before = fs::read(place(to))?;
            assert!(copy(&held("file")?, &directory, OsStr::new(to), false).is_err(), "{to}");
            assert_eq!(fs::read(place(to))?, before, "{to}");
        }
        directory.make_node(OsStr::new("new"), FileType::RegularFile, 0)?;
        assert!(copy(&held("link")?, &directory, OsStr::new("new"), false).is_err());
        assert_eq!(fs::read(place("new"))?, b"");
        copy(&held("file")?, &directory, OsStr::new("new"), false)?;
        assert_eq!(fs::read(place("new"))?, b"own");
        Ok(())
    }
}
