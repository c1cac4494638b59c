//! `atoll tfs unmount`: ends a mount, and waits until its server has closed the device, so that
//! whoever comes next (`atoll tfs check`, e2fsck, a copy) finds it whole.

use std::path::{Path, PathBuf};
use std::time::Duration;

use atoll_gateway::fuse;
use atoll_tfs::device::{ImageDevice, OpenDeviceError};
use atoll_tfs::format::superblock::STATE_VALID;
use atoll_tfs::fs::read_superblock;
use rustix::fs::{StatVfsMountFlags, statvfs};

use crate::commands::unmount::failure;
use crate::failure::{Exit, Failure};

/// Arguments of `atoll tfs unmount`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll tfs unmount /mnt/tfs
  atoll tfs unmount --lazy /mnt/tfs

When it is done, the image or block device is closed and may be checked, copied or mounted
again; with --lazy that may take as long as somebody uses the mount.")]
pub struct Args {
    /// Where it is mounted
    #[arg(value_name = "MNT")]
    mountpoint: PathBuf,

    /// Take it out of sight at once; those who use it may go on
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
pub fn run(args: &Args) -> Result<(), Failure> {
    unmount(&args.mountpoint, args.lazy)
}

/// Unmounts any mount of ours; one of a TFS is closed afterwards, unless `lazy`.
pub fn unmount(mountpoint: &Path, lazy: bool) -> Result<(), Failure> {
    let device = device_of(mountpoint);
    // Of one whose server has died nothing is told: it was not closed.
    let told = statvfs(mountpoint);
    let writable = !told.is_ok_and(|told| told.f_flag.contains(StatVfsMountFlags::RDONLY));
    fuse::unmount(mountpoint, lazy).map_err(failure)?;
    match device.filter(|_| !lazy) {
        Some(device) => wait_until_closed(&device, writable),
        None => Ok(()),
    }
}

/// The image or block device that is mounted there; a volume's source is no path.
fn device_of(mountpoint: &Path) -> Option<PathBuf> {
    let source = PathBuf::from(fuse::mounted_source(mountpoint)?);
    source.is_absolute().then_some(source)
}

#[allow(clippy::disallowed_methods, reason = "the command line is where one waits")]
fn wait_until_closed(path: &Path, writable: bool) -> Result<(), Failure> {
    let mut waited = Duration::ZERO;
    loop {
        match ImageDevice::open(path, true) {
            Ok(device) if writable => return check_closed(path, &device),
            Ok(_) => return Ok(()),
            Err(OpenDeviceError::Busy { .. }) if waited < WAIT_LIMIT => {}
            Err(OpenDeviceError::Busy { .. }) => {
                let what = format!("{} is still in use", path.display());
                return Err(Failure::new(Exit::Failed, what)
                    .because("it is unmounted, but its server has not closed it")
                    .advice("It may still be writing; look again before you use it."));
            }
            // Whose name or permissions are not what they were can be waited for no longer.
            Err(_) => return Ok(()),
        }
        if waited == SAY_AFTER {
            eprintln!("waiting until {} is written and closed", path.display());
        }
        std::thread::sleep(LOOK_EVERY);
        waited += LOOK_EVERY;
    }
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
