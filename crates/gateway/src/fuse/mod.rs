//! The kernel's view: any [`FileSystem`] as a FUSE mount.
//!
//! [`mount`] makes the mount and starts threads that read the kernel's requests, mostly one
//! of them at a time (`leadership`); each request is a future of its own on the given tokio runtime
//! (`dispatch`). The kernel caches as long as the file system's answers allow (TTLs,
//! `keep_cache`).
//!
//! The kernel does not keep writes back (`FUSE_WRITEBACK_CACHE`): it would take some for which
//! there is no room, set times on its own, and write at each close all the same.
//!
//! Three requests never arrive, because fuser 0.18 does not know them: `FUSE_SYNCFS`, which Linux
//! 6.18 sends for `fuseblk` mounts anyway but not for `fuse` (so sync(2) reaches no file system,
//! and one that delays must not delay for long), `FUSE_TMPFILE` (`O_TMPFILE`), and
//! `FUSE_INTERRUPT`, which only a lock that is waited for would need (`locks`).
//!
//! As root the mount is made directly; other users need `fusermount3`, which comes with
//! the package `fuse3`.
//!
//! **When the process that serves a mount dies**, the mount stays in the table and every
//! use of it says "Transport endpoint is not connected" until [`unmount`] takes it away;
//! [`mount`] says so when it meets one. (The kernel's way to avoid this, `auto_unmount`,
//! needs the helper and `allow_other`.) A process that serves a mount therefore catches
//! SIGTERM and SIGINT and calls [`Mounted::drain`].
//!
//! **When serving fails**, which is a fault of this program or of the kernel, the thread `fuse` panics while the mount
//! is in place. A process whose panic hook aborts leaves a dead mount behind as above, and never the directory below
//! it, into which programs would go on writing. In others the mount is taken away.

mod bridge;
mod convert;
mod directory;
mod dispatch;
mod executing;
mod flags;
mod groups;
mod invalidations;
mod leadership;
mod locks;
mod mountpoint;
mod privileges;
mod reply;
mod thread_status;

use std::io;
use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use atoll_vfs::FileSystem;
use fuser::{Config, MountOption, Session, SessionACL};
use rustix::io::Errno;
use thiserror::Error;
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::watch;

pub use mountpoint::{
    OurMount, UnmountError, check as check_mountpoint, is_mount_of_ours, mounts_below, mounts_of,
    unmount,
};

use bridge::Bridge;
use dispatch::Dispatcher;

/// How far the kernel reads ahead where we may say so (root). The kernel's own default
/// is 128 KiB, too little for blocks that come over a network.
const READ_AHEAD_KIB: u32 = 1024;

/// How to mount.
#[derive(Clone, Debug)]
pub struct MountOptions {
    /// Let the kernel refuse writes.
    pub read_only: bool,
    /// Let other users in (for other users than root this needs `user_allow_other` in
    /// `/etc/fuse.conf`).
    pub allow_other: bool,
    /// Let the kernel check permissions by mode and owner.
    pub default_permissions: bool,
    /// Reads change access times, as under `relatime`: what the kernel's table says. It is the
    /// file system that changes them.
    pub access_times: bool,
    /// Programs run with the owner's rights where their set-user-ID or set-group-ID bit says so.
    /// Only for root.
    pub set_user_id: bool,
    /// Device files are devices. Only for root.
    pub devices: bool,
    /// Allow a mount point that is not empty, or that something is mounted on.
    pub nonempty: bool,
    /// What `mount` and `df` show as the source, for instance `atoll:KEY`.
    pub fs_name: String,
    /// Threads that read requests from the kernel; all but one sleep while that keeps up.
    pub threads: NonZeroUsize,
    /// Most requests under way at a time; the kernel queues the others.
    pub max_requests: usize,
    /// A request that takes longer is answered with `ETIMEDOUT`. Only a backstop: the
    /// file system has shorter deadlines of its own.
    pub request_limit: Duration,
}

impl Default for MountOptions {
    fn default() -> MountOptions {
        let cores = std::thread::available_parallelism().map_or(2, NonZeroUsize::get);
        MountOptions {
            read_only: false,
            allow_other: false,
            default_permissions: true,
            access_times: false,
            set_user_id: false,
            devices: false,
            nonempty: false,
            fs_name: "atoll".to_owned(),
            threads: NonZeroUsize::new(cores.clamp(2, 8)).expect("at least two"),
            max_requests: 1024,
            request_limit: Duration::from_secs(300),
        }
    }
}

/// Why a file system could not be mounted.
#[derive(Debug, Error)]
pub enum MountError {
    /// The mount point does not exist.
    #[error("the mount point {} does not exist: mkdir -p it first", path.display())]
    NoMountpoint {
        /// Where.
        path: PathBuf,
    },
    /// The mount point is not a directory.
    #[error("{} is not a directory", path.display())]
    NotADirectory {
        /// Where.
        path: PathBuf,
    },
    /// The mount point holds files, which the mount would hide.
    #[error(
        "{} is not empty; mount on an empty directory",
        path.display()
    )]
    NotEmpty {
        /// Where.
        path: PathBuf,
    },
    /// One of our file systems is mounted there.
    #[error("something is mounted at {} already; unmount it first", path.display())]
    AlreadyMounted {
        /// Where.
        path: PathBuf,
    },
    /// The mount point is, or lies in, a mount whose process has died.
    #[error(
        "{} is a mount whose process has died (\"Transport endpoint is not connected\"); \
         unmount it first",
        path.display()
    )]
    Broken {
        /// The dead mount.
        path: PathBuf,
    },
    /// The mount point cannot be looked at.
    #[error("cannot look at {}: {source}", path.display())]
    Unreadable {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The kernel's FUSE device is missing.
    #[error(
        "/dev/fuse does not exist: this kernel has no FUSE (try `modprobe fuse`), or this \
         container was not given the device (docker run --device /dev/fuse --cap-add SYS_ADMIN)"
    )]
    NoDevice,
    /// This user may not open the kernel's FUSE device.
    #[error(
        "this user may not open /dev/fuse, which every user may on most systems: \
         as root, chmod 666 /dev/fuse"
    )]
    DeviceForbidden,
    /// Ordinary users need a helper program, and it is missing.
    #[error("mounting without root needs fusermount3, which is not installed: apt install fuse3")]
    NoHelper,
    /// This user may not let others in.
    #[error("letting other users in needs the line `user_allow_other` in /etc/fuse.conf, or root")]
    OthersForbidden,
    /// The runtime has no threads of its own, so a process that waited for the mount while
    /// serving it would wait for ever.
    #[error("serving a mount needs a multi-threaded runtime")]
    SingleThreaded,
    /// The kernel or the helper refused.
    #[error("cannot mount at {}: {source}", path.display())]
    Refused {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// A mount being served. Dropping it unmounts lazily.
#[derive(Debug)]
pub struct Mounted {
    path: PathBuf,
    /// Its device number as the kernel's table has it: tells it from a later mount.
    device: String,
    fs: FsHandle,
    ended: watch::Receiver<Option<Ended>>,
}

/// What [`Mounted::drain`] waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Draining<'a> {
    /// Until the mount is no longer used, for so long at most.
    Busy {
        /// Where.
        path: &'a Path,
        /// How long.
        patience: Duration,
    },
    /// It is out of the tree of names; those who use it go on.
    Lazily {
        /// Where it was.
        path: &'a Path,
    },
    /// It is unmounted here, but not in another mount namespace.
    Elsewhere {
        /// Where.
        path: &'a Path,
        /// A process that lives there.
        process: u32,
    },
}

impl std::fmt::Display for Draining<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Draining::Busy { path, patience } => write!(
                f,
                "{} is in use: waiting up to {} s until its files are closed",
                path.display(),
                patience.as_secs()
            ),
            Draining::Lazily { path } => write!(
                f,
                "{} is unmounted; its open files are served until they are closed",
                path.display()
            ),
            Draining::Elsewhere { path, process } => write!(
                f,
                "{} is unmounted here, but still mounted in the mount namespace of process \
                 {process}: waiting until it is unmounted there",
                path.display()
            ),
        }
    }
}

/// How often [`Mounted::drain`] looks whether the mount is still in use.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// How long a mount that is not in use takes to end: after that, the user is told why it does not.
const SAY_AFTER: Duration = Duration::from_secs(1);

/// How serving ended: an error as text, since many may wait for it.
type Ended = Result<(), String>;

struct FsHandle(Arc<dyn FileSystem>);

impl std::fmt::Debug for FsHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FileSystem")
    }
}

/// Mounts `fs` at `mountpoint` and serves it on the multi-threaded runtime of `handle`
/// (with its timer on). When it returns, the mount is in place.
pub fn mount(
    fs: Arc<dyn FileSystem>,
    mountpoint: &Path,
    options: &MountOptions,
    handle: &Handle,
) -> Result<Mounted, MountError> {
    if handle.runtime_flavor() == RuntimeFlavor::CurrentThread {
        return Err(MountError::SingleThreaded);
    }
    mountpoint::check_machine()?;
    let path = mountpoint::check(mountpoint, options.nonempty)?;
    let dispatcher = Dispatcher::new(handle.clone(), options.max_requests, options.request_limit);
    let leadership = dispatcher.leadership.clone();
    let notifier = Arc::new(OnceLock::new());
    let bridge = Bridge::new(fs.clone(), dispatcher, notifier.clone());
    let refused = |source: io::Error| refused(&path, source);
    let session = Session::new(bridge, &path, &config(options)).map_err(refused)?;
    notifier.get_or_init(|| session.notifier());
    // Without it the threads sleep a little more often.
    if let Ok(device) = session.as_fd().try_clone_to_owned() {
        leadership.read_from(device);
    }
    let device = mountpoint::mounted_at(&path).map(|mount| mount.device).unwrap_or_default();
    raise_read_ahead(&device);

    let (tell, ended) = watch::channel(None);
    if let Some(queue) = fs.invalidations() {
        let (notifier, ended) = (session.notifier(), ended.clone());
        let device = session.as_fd().try_clone_to_owned().map_err(refused)?;
        invalidations::forward(queue, notifier, device, ended, handle.clone()).map_err(refused)?;
    }
    let session = session.spawn().map_err(refused)?;
    std::thread::Builder::new()
        .name("fuse".to_owned())
        .spawn(move || {
            // All of it, not only what is used: the rest of it unmounts when it is dropped.
            let session = session;
            let served = session.guard.join();
            let served = served.unwrap_or_else(|_| Err(io::Error::other("its thread panicked")));
            let outcome = how_it_ended(served);
            if let Err(error) = &outcome {
                // Programs would go on writing into the directory below the mount.
                panic!("serving a mount failed: {error}");
            }
            tell.send_replace(Some(outcome));
        })
        .map_err(refused)?;
    Ok(Mounted { path, device, fs: FsHandle(fs), ended })
}

/// The kernel ends a mount by `ENODEV` to threads that read requests, which fuser expects, and by
/// `ECONNABORTED` to a thread that had just taken one.
fn how_it_ended(outcome: io::Result<()>) -> Ended {
    match outcome {
        Err(error) if error.raw_os_error() == Some(Errno::CONNABORTED.raw_os_error()) => Ok(()),
        outcome => outcome.map_err(|error| error.to_string()),
    }
}

fn config(options: &MountOptions) -> Config {
    // A comma would end the option where the helper passes it on.
    let fs_name = options.fs_name.replace([',', '\\', '\n', '\0'], "_");
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::FSName(fs_name),
        // fuser gives its own `Subtype` to the helper only, not to the kernel.
        MountOption::CUSTOM(format!("subtype={}", mountpoint::SUBTYPE)),
        if options.read_only { MountOption::RO } else { MountOption::RW },
        if options.access_times { MountOption::Atime } else { MountOption::NoAtime },
        if options.set_user_id { MountOption::Suid } else { MountOption::NoSuid },
        if options.devices { MountOption::Dev } else { MountOption::NoDev },
    ];
    if options.default_permissions {
        config.mount_options.push(MountOption::DefaultPermissions);
    }
    config.acl = if options.allow_other { SessionACL::All } else { SessionACL::Owner };
    config.n_threads = Some(options.threads.get());
    config.clone_fd = true;
    config
}

fn refused(path: &Path, source: io::Error) -> MountError {
    let text = source.to_string();
    if text.contains("user_allow_other") {
        return MountError::OthersForbidden;
    }
    MountError::Refused { path: path.to_owned(), source }
}

/// The kernel grants a FUSE file system no more read-ahead than 128 KiB at the start;
/// root may raise it afterwards. Elsewhere it stays, and only large reads are large.
fn raise_read_ahead(device: &str) {
    let control = format!("/sys/class/bdi/{device}/read_ahead_kb");
    if let Err(error) = std::fs::write(&control, READ_AHEAD_KIB.to_string()) {
        tracing::debug!(%error, control, "cannot raise the read-ahead");
    }
}

impl Mounted {
    /// Where it is mounted, without symbolic links.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Waits until the mount has ended, by [`Mounted::unmount`] or by anybody else's
    /// doing, and the file system has made everything durable. Cancel-safe.
    pub async fn wait(&mut self) -> io::Result<()> {
        let ended = match self.ended.wait_for(Option::is_some).await {
            Ok(ended) => ended.clone().unwrap_or(Ok(())),
            Err(_) => Err("the thread that serves the mount is gone".to_owned()),
        };
        self.fs.0.sync().await?;
        ended.map_err(io::Error::other)
    }

    /// Unmounts, and waits until the mount has ended, unless `lazy`. One that has been
    /// unmounted already is no error.
    pub async fn unmount(&mut self, lazy: bool) -> Result<(), UnmountError> {
        if self.has_ended() {
            return Ok(());
        }
        match self.detach(lazy).await {
            Ok(()) | Err(UnmountError::NotMounted { .. }) if lazy => Ok(()),
            Ok(()) | Err(UnmountError::NotMounted { .. }) => self.wait_after_detaching().await,
            Err(error) => Err(error),
        }
    }

    async fn wait_after_detaching(&mut self) -> Result<(), UnmountError> {
        let ended = self.wait().await;
        ended.map_err(|error| UnmountError::Refused {
            path: self.path.clone(),
            reason: error.to_string(),
        })
    }

    /// Unmounts as soon as the mount is not in use, after `patience` lazily, and serves those who
    /// still use it until they are done. `say` is told what is being waited for. Cancel-safe.
    ///
    /// # Errors
    /// As [`Mounted::unmount`].
    pub async fn drain(
        &mut self,
        patience: Duration,
        say: impl Fn(Draining<'_>),
    ) -> Result<(), UnmountError> {
        let until = tokio::time::Instant::now() + patience;
        let mut said = false;
        while let Err(error) = self.detach(false).await {
            match error {
                UnmountError::NotMounted { .. } => break,
                UnmountError::Busy { .. } if tokio::time::Instant::now() >= until => {
                    say(Draining::Lazily { path: &self.path });
                    self.unmount(true).await?;
                    break;
                }
                UnmountError::Busy { .. } if !said => {
                    said = true;
                    say(Draining::Busy { path: &self.path, patience });
                }
                UnmountError::Busy { .. } => tokio::time::sleep(LOOK_EVERY).await,
                error => return Err(error),
            }
        }
        if tokio::time::timeout(SAY_AFTER, self.wait()).await.is_err()
            && let Some(process) = mountpoint::mounted_elsewhere(&self.device)
        {
            say(Draining::Elsewhere { path: &self.path, process });
        }
        self.wait_after_detaching().await
    }

    /// Takes the mount out of the tree of names.
    async fn detach(&self, lazy: bool) -> Result<(), UnmountError> {
        let (path, device) = (self.path.clone(), self.device.clone());
        let work =
            tokio::task::spawn_blocking(move || mountpoint::unmount_own(&path, &device, lazy));
        work.await.map_err(|error| UnmountError::Refused {
            path: self.path.clone(),
            reason: error.to_string(),
        })?
    }

    fn has_ended(&self) -> bool {
        self.ended.borrow().is_some()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if self.has_ended() {
            return;
        }
        if let Err(error) = mountpoint::unmount_own(&self.path, &self.device, true) {
            tracing::debug!(%error, "while dropping a mount");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_that_ends_while_a_request_is_taken_has_ended_in_order() {
        let error = |errno: Errno| Err(io::Error::from_raw_os_error(errno.raw_os_error()));
        assert_eq!(how_it_ended(error(Errno::CONNABORTED)), Ok(()));
        assert!(how_it_ended(error(Errno::INVAL)).is_err());
        assert_eq!(how_it_ended(Ok(())), Ok(()));
    }
}
