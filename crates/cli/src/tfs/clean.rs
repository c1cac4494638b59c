//! `atoll tfs clean`: the cleaner (§3.1 of the paper), now.

use std::path::{Path, PathBuf};

use atoll_tfs::stat::CLEAN_XATTR;
use rustix::fs::{XattrFlags, setxattr};
use rustix::io::Errno;
use serde::Serialize;

use super::{ask, device};
use crate::failure::{Exit, Failure};
use crate::output;
use crate::runtime::until_done;
use crate::units;

/// Arguments of `atoll tfs clean`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll tfs clean /mnt/tfs

A mounted TFS does this by itself now and then.")]
pub(super) struct Args {
    /// A mount point, or an image file or block device that is not mounted
    #[arg(value_name = "MNT|DEVICE")]
    of: PathBuf,

    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// What was cleaned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
struct Shown {
    /// Transparent files that had lost blocks.
    files: u64,
    /// Blocks that are free again.
    blocks: u64,
}

fn what(path: &Path) -> String {
    format!("cannot clean {}", path.display())
}

/// Runs the cleaner of the TFS that is mounted at `path`.
fn clean_mounted(path: &Path) -> Result<(), Failure> {
    // Elsewhere the attribute would be kept as any other, and mean nothing.
    ask::ask(path, CLEAN_XATTR)?;
    setxattr(path, CLEAN_XATTR, b"1", XattrFlags::empty()).map_err(|error| match error {
        Errno::INVAL => Failure::new(Exit::Usage, what(path))
            .because("the whole file system is cleaned")
            .advice("Name the mount point."),
        Errno::PERM | Errno::ACCESS => Failure::new(Exit::Failed, what(path))
            .because("only root and the owner of its topmost directory may"),
        error => Failure::io(what(path), &error.into()),
    })
}

/// Cleans.
pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let shown: Shown = if args.of.is_dir() {
        clean_mounted(&args.of)?;
        let lines = ask::ask_text(&args.of, CLEAN_XATTR)?;
        let number = |name: &str| {
            let line = lines.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|number| number.trim().parse().ok())
                .ok_or_else(|| ask::nonsense(&args.of))
        };
        Shown { files: number("files ")?, blocks: number("blocks ")? }
    } else {
        until_done(async {
            let failed = |errno| Failure::new(Exit::Failed, what(&args.of)).because(errno);
            let tfs = device::mount_image(&args.of, false)?;
            let cleaned = tfs.clean();
            tfs.unmount().map_err(failed)?;
            let cleaned = cleaned.map_err(failed)?;
            Ok(Shown { files: cleaned.files, blocks: cleaned.blocks })
        })?
    };
    let files = units::counted(shown.files, "file", "files");
    let blocks = units::counted(shown.blocks, "block", "blocks");
    let line = format!("{files} had lost blocks; {blocks} are free again");
    output::show(args.json, &shown, [line])
}
