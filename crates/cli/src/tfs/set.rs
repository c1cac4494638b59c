//! `atoll tfs set`: makes files transparent or ordinary.
//!
//! An empty file and a directory take the attribute; a file with contents is copied into a new
//! one beside it, which has the attribute from its birth, and renamed over it. What is made in a
//! transparent directory is transparent; what was in it before stays what it was.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, fchown};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, XattrFlags, getxattr, mknodat, setxattr};
use rustix::io::Errno;

use crate::failure::{Exit, Failure};

/// The attribute.
const FLAG: &str = "user.tfs.transparent";

/// Arguments of `atoll tfs set`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll tfs set --transparent /mnt/tfs/atoll
  atoll tfs set --ordinary /mnt/tfs/photo.jpg

New files in a transparent directory are transparent; those in it before are not changed,
name them. `getfattr -n user.tfs.transparent FILE` tells what a file is.")]
pub struct Args {
    /// They may vanish, and cost no room
    #[arg(long, conflicts_with = "ordinary", required_unless_present = "ordinary")]
    transparent: bool,

    /// They stay
    #[arg(long)]
    ordinary: bool,

    /// Files and directories on a mounted TFS
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<PathBuf>,
}

/// Sets.
pub fn run(args: &Args) -> Result<(), Failure> {
    let kind = if args.transparent { "transparent" } else { "ordinary" };
    for path in &args.paths {
        set(path, args.transparent).map_err(|error| {
            let what = format!("cannot make {} {kind}", path.display());
            match error.raw_os_error().map(Errno::from_raw_os_error) {
                Some(Errno::OPNOTSUPP) => Failure::new(Exit::Failed, what)
                    .because("it is not on a mounted TFS")
                    .advice("`atoll tfs mount DEVICE MNT` mounts one."),
                Some(Errno::BUSY) => {
                    Failure::new(Exit::Failed, what).because("a program has it open")
                }
                Some(Errno::PERM) => Failure::new(Exit::Failed, what)
                    .because("a file with several names cannot be transparent"),
                _ => Failure::io(what, &error),
            }
        })?;
    }
    Ok(())
}

fn set(path: &Path, transparent: bool) -> io::Result<()> {
    let found = fs::symlink_metadata(path)?;
    // Elsewhere the attribute would be kept as any other, and mean nothing.
    if !super::ask::is_tfs(path) {
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
        return Err(Errno::PERM.into());
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
    target.set_modified(found.modified()?)?;
    target.sync_all()
}
