//! `atoll tfs`: transparent file systems.
//!
//! A TFS is an image file or a block device. Mounted, it is served by a process of its own, as
//! volumes are; what `stat` and `clean` ask of a mounted one goes through the mount (`ask`).

mod ask;
mod check;
mod clean;
mod device;
mod map;
mod mkfs;
mod mount;
mod picture;
mod set;
mod stat;
pub(crate) mod unmount;

pub(crate) use device::{mount as open, random as random_bytes};

use crate::failure::Failure;
use crate::global::Global;

/// Arguments of `atoll tfs`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll tfs mkfs --size 20GiB disk.img
  atoll tfs mount disk.img /mnt/tfs
  mkdir /mnt/tfs/atoll && atoll tfs set --transparent /mnt/tfs/atoll
  atoll contribute transparent /mnt/tfs/atoll

A TFS is an ext2 file system whose free blocks may hold transparent files: they cost
ordinary files neither room nor speed, and may vanish at any moment.")]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand, Debug)]
enum Command {
    /// Make a TFS in an image file or on a block device
    Mkfs(mkfs::Args),
    /// Mount a TFS
    Mount(mount::Args),
    /// Unmount a TFS
    #[command(alias = "umount")]
    Unmount(unmount::Args),
    /// Look for damage in a TFS that is not mounted
    Check(check::Args),
    /// Show how much is ordinary, transparent, overwritten and free
    Stat(stat::Args),
    /// Make files transparent or ordinary, or say how much transparent data may be lost
    Set(set::Args),
    /// Remove transparent files that have lost blocks
    Clean(clean::Args),
    /// Draw where ordinary, transparent, overwritten and free blocks lie
    Map(map::Args),
}

/// Does what was asked.
pub(crate) fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    match &args.command {
        Command::Mkfs(args) => mkfs::run(args, global),
        Command::Mount(args) => mount::run(args, global),
        Command::Unmount(args) => unmount::run(args),
        Command::Check(args) => check::run(args, global),
        Command::Stat(args) => stat::run(args),
        Command::Set(args) => set::run(args),
        Command::Clean(args) => clean::run(args),
        Command::Map(args) => map::run(args),
    }
}

/// Whether what was asked mounts.
pub(crate) fn is_mount(args: &Args) -> bool {
    matches!(args.command, Command::Mount(_))
}

/// Whether this process is to serve a mount.
pub(crate) fn is_served_here(args: &Args) -> bool {
    matches!(&args.command, Command::Mount(args) if args.is_served_here())
}
