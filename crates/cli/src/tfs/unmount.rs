//! `atoll tfs unmount`: ends a mount, and waits until its server has closed the device, so that
//! the next program (`atoll tfs check`, e2fsck, a copy) finds it whole.

use std::path::{Path, PathBuf};
use std::time::Duration;

use atoll_gateway::fuse::{self, OurMount};
use atoll_tfs::device::{ImageDevice, OpenDeviceError};
use atoll_tfs::format::superblock::STATE_VALID;
use atoll_tfs::fs::read_superblock;
use rustix::fs::{StatVfsMountFlags, statvfs};

use crate::failure::{Exit, Failure};
use crate::messages::note;
use crate::mount_server::unmount_failure;

/// Arguments of `atoll tfs unmount`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll tfs unmount /mnt/tfs
  atoll tfs unmount --lazy /mnt/tfs

When it is done, the image or block device is closed and may be checked, copied or mounted
again; with --lazy that may take as long as a program uses the mount. A copy of the mount in another
mount namespace (a container's) keeps it open too: the command says so, and waits two minutes.")]
pub(crate) struct Args {
    /// Where it is mounted
    #[arg(value_name = "MNT")]
    mountpoint: PathBuf,

    /// Detach it at once; programs that use it may finish
    #[arg(long)]
    lazy: bool,
}

/// How often it is looked whether the device is closed.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// After so long it is said what is being waited for.
const SAY_AFTER: Duration = Duration::from_secs(1);
/// The longest wait: what is dirty is at most a journal's area and what the kernel holds back.
const WAIT_LIMIT: Duration = Duration::from_secs(120);

/// Unmounts.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    unmount(&args.mountpoint, args.lazy, "atoll tfs unmount")
}

/// Unmounts any mount of ours; one of a TFS is closed afterwards, unless `lazy`. `command` is
/// what was typed.
pub(crate) fn unmount(mountpoint: &Path, lazy: bool, command: &str) -> Result<(), Failure> {
    let mount = OurMount::at(mountpoint);
    // Of one whose server has died nothing is told: it was not closed.
    let told = statvfs(mountpoint);
    let writable = !told.is_ok_and(|told| told.f_flag.contains(StatVfsMountFlags::RDONLY));
    fuse::unmount(mountpoint, lazy).map_err(|error| unmount_failure(error, command))?;
    match mount.filter(|_| !lazy) {
        // A volume's source is no path.
        Some(mount) if Path::new(&mount.source).is_absolute() => {
            wait_until_closed(&mount, mountpoint, writable)
        }
        _ => Ok(()),
    }
}

#[allow(clippy::disallowed_methods, reason = "the command line is where one waits")]
fn wait_until_closed(mount: &OurMount, mountpoint: &Path, writable: bool) -> Result<(), Failure> {
    let path = Path::new(&mount.source);
    let mut waited = Duration::ZERO;
    loop {
        match ImageDevice::open(path, true) {
            Ok(device) if writable => return check_closed(path, &device),
            Ok(_) => return Ok(()),
            Err(OpenDeviceError::Busy { .. }) if waited < WAIT_LIMIT => {}
            Err(OpenDeviceError::Busy { .. }) => {
                let what = format!("{} is still in use", path.display());
                let failure = Failure::new(Exit::Failed, what);
                return Err(match mount.mounted_elsewhere() {
                    Some(process) => failure
                        .because(format!("it is unmounted here, but {}", elsewhere(process)))
                        .advice(format!(
                            "`nsenter -t {process} -m umount {}` unmounts it there.",
                            mountpoint.display()
                        )),
                    None => failure
                        .because("it is unmounted, but its server has not closed it")
                        .advice("It may still be writing; look again before you use it."),
                });
            }
            // A device whose name or permissions have changed cannot be waited for.
            Err(_) => return Ok(()),
        }
        if waited == SAY_AFTER {
            note!("waiting until {} is written and closed", path.display());
            if let Some(process) = mount.mounted_elsewhere() {
                note!("it is unmounted here, but {}", elsewhere(process));
            }
        }
        std::thread::sleep(LOOK_EVERY);
        waited += LOOK_EVERY;
    }
}

fn elsewhere(process: u32) -> String {
    format!("still mounted in the mount namespace of process {process}")
}

/// Whether the server closed it in order, as far as the superblock tells.
fn check_closed(path: &Path, device: &ImageDevice) -> Result<(), Failure> {
    if read_superblock(device).is_ok_and(|superblock| superblock.state() & STATE_VALID != 0) {
        return Ok(());
    }
    let what = format!("unmounted, but {} was not closed in order", path.display());
    Err(Failure::new(Exit::Failed, what)
        .advice("The next mount makes it whole; the log of this one (--log) may say why."))
}
