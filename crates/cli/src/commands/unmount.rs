//! `atoll unmount`: ends a mount, also one whose process has died.

use std::path::PathBuf;

use atoll_gateway::fuse::UnmountError;

use crate::failure::{Exit, Failure};
use crate::tfs;

/// Arguments of `atoll unmount`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll unmount ~/docs
  atoll unmount --lazy ~/docs")]
pub struct Args {
    /// Where it is mounted
    #[arg(value_name = "MNT")]
    mountpoint: PathBuf,

    /// Take it out of sight at once; those who use it may go on
    #[arg(long)]
    lazy: bool,
}

/// Unmounts.
pub fn run(args: &Args) -> Result<(), Failure> {
    tfs::unmount::unmount(&args.mountpoint, args.lazy)
}

/// What a person is told.
pub fn failure(error: UnmountError) -> Failure {
    let exit = match &error {
        UnmountError::NotMounted { .. } => Exit::NotFound,
        UnmountError::Unreadable { source, .. }
            if source.kind() == std::io::ErrorKind::NotFound =>
        {
            Exit::NotFound
        }
        _ => Exit::Failed,
    };
    let busy = matches!(error, UnmountError::Busy { .. });
    let failure = Failure::new(exit, error.to_string());
    if busy { failure.advice("`atoll unmount --lazy` does not wait for them.") } else { failure }
}
