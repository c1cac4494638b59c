//! `atoll unmount`: ends a mount, also one whose process has died.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use atoll_gateway::fuse::OurMount;

use crate::failure::{Exit, Failure};
use crate::mount_server;
use crate::tfs;

/// Arguments of `atoll unmount`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll unmount ~/docs
  atoll unmount --lazy ~/docs

The command first stores unsaved changes to your own volume on the ring. If that fails, the mount
stays; with --lazy it is detached, its process tries for ten more minutes, and what the ring has not
taken then waits on disk for the node, which tries each minute, or the next mount.")]
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
    if !args.lazy {
        bring_to_ring(&args.mountpoint)?;
    }
    tfs::unmount::unmount(&args.mountpoint, args.lazy, "atoll unmount")
}

/// Makes what was written through one of our mounts durable; of others, nothing is asked.
fn bring_to_ring(mountpoint: &Path) -> Result<(), Failure> {
    if OurMount::at(mountpoint).is_none() {
        return Ok(());
    }
    match File::open(mountpoint).and_then(|root| root.sync_all()) {
        Ok(()) => {
            let status = mount_server::status(mountpoint).unwrap_or_default();
            if status.contains("wait in the spool") {
                eprintln!(
                    "{status}\nThe node brings them to the ring when it can, or the next mount."
                );
            }
            Ok(())
        }
        // Its process is gone, or another mount writes the volume now: waiting helps nobody.
        Err(error) if is_beyond_help(&error) => Ok(()),
        Err(error) => {
            let what = format!("what was written to {} is not stored yet", mountpoint.display());
            let why = "`getfattr -n user.atoll.status MNT` says why; --lazy unmounts all the same.";
            Err(Failure::new(Exit::Unavailable, what).because(error).advice(why))
        }
    }
}

fn is_beyond_help(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let beyond = [Errno::NOTCONN, Errno::CONNABORTED, Errno::ROFS, Errno::ACCESS, Errno::NOENT];
    beyond.iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}
