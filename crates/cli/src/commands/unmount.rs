//! `atoll unmount`: ends a mount, also one whose process has died.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use atoll_gateway::fuse::OurMount;
use rustix::io::Errno;

use crate::failure::{Exit, Failure};
use crate::messages::note;
use crate::mount_server;
use crate::pool;
use crate::tfs;

/// Arguments of `atoll unmount`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll unmount ~/docs
  atoll unmount --lazy ~/docs

The command first stores what was written to a volume on the ring, or of a shared volume on this machine's disk. If
that fails, the mount stays, and the command names what is in memory alone; with --lazy the mount is detached, and its
process tries for ten more minutes. What waits on disk then is brought to the ring by the node, which tries each minute,
or by the next mount; what could not even be written there is lost.
A mount whose process has died (\"Transport endpoint is not connected\") is taken away.")]
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
    let Some(mount) = OurMount::at(mountpoint) else { return Ok(()) };
    let root = match File::open(mountpoint) {
        Ok(root) => root,
        Err(error) if is_dead(&error) => {
            tell_of_death(&mount);
            return Ok(());
        }
        // It is another user's, or was moved away: the kernel decides.
        Err(error) if is_any(&error, &[Errno::ACCESS, Errno::NOENT]) => return Ok(()),
        Err(error) => return Err(not_stored(mountpoint, &error)),
    };
    let synced = root.sync_all();
    // It would keep the mount busy.
    drop(root);
    match synced {
        Ok(()) => {
            let status = mount_server::status(mountpoint).unwrap_or_default();
            if status.contains("wait in the spool") {
                let then = match status.contains("the ring does not take") {
                    true => "They stay on this machine, and the next mount shows them.",
                    false => "The node brings them to the ring when it can, or the next mount.",
                };
                note!("{status}\n{then}");
            }
            Ok(())
        }
        Err(error) if is_dead(&error) => {
            tell_of_death(&mount);
            Ok(())
        }
        // Another mount writes the volume now: waiting helps nobody, and what is left is set aside in the spool.
        Err(error) if is_any(&error, &[Errno::ROFS]) => Ok(()),
        Err(error) => Err(not_stored(mountpoint, &error)),
    }
}

fn not_stored(mountpoint: &Path, error: &io::Error) -> Failure {
    let what = format!("what was written to {} is not stored yet", mountpoint.display());
    let told = mount_server::status(mountpoint).filter(|told| !told.starts_with("ok"));
    let why = told.unwrap_or_else(|| error.to_string());
    Failure::new(Exit::Unavailable, what).because(why).advice(
        "Copy what is in memory alone to another place, or remedy that (`atoll status`), and try again. \
         --lazy unmounts all the same; what its process cannot store within ten minutes is lost then, \
         unless it waits in the spool.",
    )
}

/// Whether there is no process that serves a mount.
fn is_dead(error: &io::Error) -> bool {
    is_any(error, &[Errno::NOTCONN, Errno::CONNABORTED])
}

fn tell_of_death(mount: &OurMount) {
    if pool::is_source(&mount.source) {
        note!(
            "the process of this mount had died; the next mount of the pool makes again what it was doing"
        );
    // Of a TFS it is told whether its device was closed in order.
    } else if !Path::new(&mount.source).is_absolute() {
        note!(
            "the process of this mount had died; what its spool has, the node brings to the ring within about a \
             minute, or the next mount does (`atoll status`)"
        );
    }
}

fn is_any(error: &io::Error, errnos: &[Errno]) -> bool {
    errnos.iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}
