//! `atoll unmount`: ends a mount, also one whose process has died.

use std::path::PathBuf;

use crate::failure::Failure;
use crate::tfs;

/// Arguments of `atoll unmount`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll unmount ~/docs
  atoll unmount --lazy ~/docs")]
pub(crate) struct Args {
    /// Where it is mounted
    #[arg(value_name = "MNT")]
    mountpoint: PathBuf,

    /// Detach it at once; programs that use it may finish
    #[arg(long)]
    lazy: bool,
}

/// Unmounts.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    tfs::unmount::unmount(&args.mountpoint, args.lazy, "atoll unmount")
}
