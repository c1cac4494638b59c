//! `atoll tfs set`: makes files transparent or ordinary, and sets the target loss rate.
//!
//! An empty file and a directory take the attribute; a file with contents is copied into a new
//! one beside it, which has the attribute from its birth, and renamed over it. A file made in a
//! transparent directory is transparent; files in it from before keep their kind.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, fchown};
use std::path::{Path, PathBuf};

use atoll_tfs::stat::TARGET_LOSS_XATTR;
use rustix::fs::{
    CWD, FileType, Mode, XattrFlags, fsetxattr, getxattr, listxattr, mknodat, setxattr,
};
use rustix::io::Errno;

use super::{ask, device};
use crate::failure::{Exit, Failure};
use crate::runtime::until_done;
use crate::units;

/// The attribute.
const FLAG: &str = "user.tfs.transparent";

/// The longest value of an attribute, and list of names, that Linux hands out.
const MAX_XATTR_BYTES: usize = 64 << 10;

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
    let found = fs::symlink_metadata(path)?;
    // Elsewhere the attribute would be kept as any other, and mean nothing.
    if !ask::is_tfs(path) {
        return Err(Errno::OPNOTSUPP.into());
    }
    if is_transparent(path)? == transparent {
        return Ok(());
    }
    if found.is_dir() || (found.is_file() && found.len() == 0) {
        return mark(path, transparent);
    }
    if !found.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no file and no directory"));
    }
    if found.nlink() > 1 {
        let why = "a file with several names cannot be transparent";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    replace(path, transparent, &found)
}

/// Whether the attribute is there.
fn is_transparent(path: &Path) -> io::Result<bool> {
    let mut value = [0; 16];
    match getxattr(path, FLAG, &mut value[..]) {
        Ok(len) => Ok(value[..len] == *b"1"),
        Err(Errno::NODATA) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn mark(path: &Path, transparent: bool) -> io::Result<()> {
    let value: &[u8] = if transparent { b"1" } else { b"0" };
    Ok(setxattr(path, FLAG, value, XattrFlags::empty())?)
}

/// Copies a file into a new one of the other kind and puts that in its place.
fn replace(path: &Path, transparent: bool, found: &fs::Metadata) -> io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".{}.new", std::process::id()));
    let beside = path.with_file_name(name);
    let made = copy(path, &beside, transparent, found).and_then(|()| fs::rename(&beside, path));
    if made.is_err() {
        let _ = fs::remove_file(&beside);
    }
    made
}

fn copy(from: &Path, to: &Path, transparent: bool, found: &fs::Metadata) -> io::Result<()> {
    let mut source = File::open(from)?;
    // Made without being opened: one that is open cannot choose what it is.
    mknodat(CWD, to, FileType::RegularFile, Mode::RUSR | Mode::WUSR, 0)?;
    mark(to, transparent)?;
    let mut target = OpenOptions::new().write(true).open(to)?;
    io::copy(&mut source, &mut target)?;
    // Only root may give files away; others' copies are theirs already.
    let _ = fchown(&target, Some(found.uid()), Some(found.gid()));
    target.set_permissions(found.permissions())?;
    // After the mode, which would change the mask of an access control list.
    copy_attributes(from, &target)?;
    target.set_modified(found.modified()?)?;
    target.sync_all()
}

/// Copies extended attributes, access control lists among them, but for the one that differs.
fn copy_attributes(from: &Path, to: &File) -> io::Result<()> {
    let mut names = vec![0; MAX_XATTR_BYTES];
    let len = listxattr(from, &mut names[..])?;
    for name in names[..len].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        if name == FLAG.as_bytes() {
            continue;
        }
        let mut value = vec![0; MAX_XATTR_BYTES];
        let len = getxattr(from, name, &mut value[..])?;
        match fsetxattr(to, name, &value[..len], XattrFlags::empty()) {
            // A capability is root's to give.
            Err(Errno::PERM) if name.starts_with(b"security.") => {}
            set => set?,
        }
    }
    Ok(())
}
