//! Opening an image or a block device, and what is told when that fails.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;

use atoll_env::TokioRuntime;
use atoll_node::shell_word;
use atoll_tfs::Progress;
use atoll_tfs::device::{Device, ImageDevice, OpenDeviceError};
use atoll_tfs::fs::{MountError, MountOptions, MountReport, Tfs};

use rustix::fs::{major, minor};

use crate::failure::{Exit, Failure};
use crate::progress::Share;

/// Opens an image or a block device for this process alone.
pub(super) fn open(path: &Path, read_only: bool) -> Result<Arc<dyn Device>, Failure> {
    // The kernel minds no lock of ours, and a device that it has mounted may be read.
    if let Some(user) = KernelUse::of(path) {
        return Err(user.refuse(path));
    }
    match ImageDevice::open(path, read_only) {
        Ok(device) => Ok(Arc::new(device)),
        Err(OpenDeviceError::Io { path, error }) => {
            Err(Failure::io(format!("cannot open {}", path.display()), &error))
        }
        Err(error @ OpenDeviceError::Busy { .. }) => {
            Err(Failure::new(Exit::Failed, error.to_string()).advice(
                "Of one that is mounted, name the mount point; or unmount it first: \
                 atoll tfs unmount MNT",
            ))
        }
        Err(error) => Err(Failure::new(Exit::Failed, error.to_string())),
    }
}

/// Does work on a whole file system and shows how far it has come, unless `quiet`.
pub(super) fn watched<T>(verb: &'static str, quiet: bool, work: impl FnOnce(Progress) -> T) -> T {
    if quiet {
        return work(Progress::default());
    }
    let share = Arc::new(Share::new(verb));
    let shown = share.clone();
    let outcome = work(Progress::new(move |done, total| shown.show(done, total)));
    share.finish();
    outcome
}

/// What the kernel does with an image or a block device.
struct KernelUse {
    /// The loop device that is made of an image.
    loop_device: Option<String>,
    mounted_at: Option<String>,
}

impl KernelUse {
    /// None if there is nothing to be seen of it.
    fn of(path: &Path) -> Option<KernelUse> {
        let found = std::fs::metadata(path).ok()?;
        if found.file_type().is_block_device() {
            let device = found.rdev();
            let mounted_at = mounted_at(&format!("{}:{}", major(device), minor(device)))?;
            return Some(KernelUse { loop_device: None, mounted_at: Some(mounted_at) });
        }
        let path = path.canonicalize().ok()?;
        for entry in std::fs::read_dir("/sys/block").ok()?.flatten() {
            let backing = std::fs::read(entry.path().join("loop/backing_file"));
            if backing.is_ok_and(|backing| backing.trim_ascii_end() == path.as_os_str().as_bytes())
            {
                let device = std::fs::read_to_string(entry.path().join("dev"));
                return Some(KernelUse {
                    loop_device: Some(entry.file_name().to_string_lossy().into_owned()),
                    mounted_at: device.ok().and_then(|device| mounted_at(device.trim())),
                });
            }
        }
        None
    }

    fn refuse(&self, path: &Path) -> Failure {
        let failure = Failure::new(Exit::Failed, format!("{} is in use", path.display()));
        match (&self.loop_device, &self.mounted_at) {
            (_, Some(at)) => failure
                .because(format!("the kernel has it mounted at {at}"))
                .advice(format!("umount {at}")),
            (Some(device), None) => failure
                .because(format!("the kernel makes /dev/{device} of it"))
                .advice(format!("losetup -d /dev/{device}, or name that device instead.")),
            (None, None) => failure,
        }
    }
}

/// Where the block device with these numbers is mounted.
fn mounted_at(device: &str) -> Option<String> {
    let table = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    let mut mounts = table.lines().map(|line| line.split(' ').skip(2));
    let mut mount = mounts.find(|mount| mount.clone().next() == Some(device))?;
    mount.nth(2).map(str::to_owned)
}

/// Mounts the file system for this process, not for the machine.
pub(crate) fn mount(path: &Path, options: &MountOptions) -> Result<(Tfs, MountReport), Failure> {
    let device = open(path, options.read_only)?;
    let env = Arc::new(TokioRuntime::current());
    Tfs::mount(env, device, options).map_err(|error| refused(path, &error))
}

/// The file system of an image or device, to look at.
pub(super) fn mount_image(path: &Path, read_only: bool) -> Result<Tfs, Failure> {
    let options = MountOptions { read_only, background: false, ..MountOptions::default() };
    Ok(mount(path, &options)?.0)
}

fn refused(path: &Path, error: &MountError) -> Failure {
    let failure = Failure::new(Exit::Failed, format!("cannot use {}", path.display()));
    let failure = failure.because(error);
    let path = shell_word(&path.display().to_string());
    match error {
        MountError::NeedsCheck => failure.advice(format!("e2fsck -f {path}")),
        MountError::NoRoom(_) => failure.advice("Make room on the file system that holds it."),
        MountError::Io(error) if error.kind() == io::ErrorKind::StorageFull => {
            failure.advice("Make room on the file system that holds it.")
        }
        MountError::Records(_) => failure.advice(format!("atoll tfs check {path}")),
        _ => failure,
    }
}

/// 32 bytes that cannot be guessed.
pub(crate) fn random<const N: usize>() -> Result<[u8; N], Failure> {
    use std::io::Read;
    let mut bytes = [0; N];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut file| file.read_exact(&mut bytes))
        .map_err(|error: io::Error| Failure::io("cannot read /dev/urandom", &error))?;
    Ok(bytes)
}

/// Seconds since 1970, as far as ext2 can count them.
#[allow(clippy::disallowed_methods, reason = "the command line is where the clock is read")]
pub(super) fn now_unix_secs() -> u32 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |now| u32::try_from(now.as_secs()).unwrap_or(u32::MAX))
}
