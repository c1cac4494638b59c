//! `atoll unmount`: ends a mount, also one whose process has died.

use std::path::PathBuf;
use std::time::Duration;

use atoll_gateway::fuse::{Draining, Mounted, UnmountError};

use crate::failure::{Exit, Failure};
use crate::interrupt::Signals;
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

/// How long a server that is told to end waits for programs that use its mount (systemd kills
/// after 90 s, Docker after 10).
const PATIENCE: Duration = Duration::from_secs(8);

/// Ends a mount that this process serves, after the first signal: no file that is open is cut off
/// before a second one.
pub(crate) async fn take_away(mounted: &mut Mounted, mut signals: Signals) -> Result<(), Failure> {
    let say = |draining: Draining<'_>| eprintln!("{draining}; a second signal ends it at once");
    tokio::select! {
        drained = mounted.drain(PATIENCE, say) => {
            drained.map_err(|error| failure(error, "atoll unmount"))
        }
        () = signals.next() => {
            signals.exit_at_next();
            // Or its name would stay, with nobody behind it.
            let _ = mounted.unmount(true).await;
            Err(Failure::new(Exit::Interrupted, "ended while the mount was in use"))
        }
    }
}

/// The error message for an unmount that failed; advice names `command`, which the user typed.
pub(crate) fn failure(error: UnmountError, command: &str) -> Failure {
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
    match busy {
        true => failure.advice(format!("`{command} --lazy` does not wait for them.")),
        false => failure,
    }
}
