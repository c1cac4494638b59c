//! `atoll tfs mount`: a TFS as a file system of this machine.
//!
//! A process of its own serves the mount (see [`crate::mount_server`]). Its messages go to the
//! journal of the process that started it, or to the file named by `--log`.

use std::io;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;

use atoll_gateway::fuse::{self, MountError, MountOptions as FuseOptions};
use atoll_node::shell_word;
use atoll_tfs::fs::MountOptions;

use super::device;
use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::heap;
use crate::messages::note;
use crate::mount_server;
use crate::units;

/// Arguments of `atoll tfs mount`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll tfs mount disk.img /mnt/tfs
  atoll tfs mount --allow-other /dev/sdb1 /srv
  atoll tfs mount -o nosuid,nodev,noatime disk.img /mnt/tfs
  atoll tfs unmount /mnt/tfs

A crash of the machine or of the mount's process loses at most the last second of changes (more
where the disk is behind), and nothing that preceded an fsync(2) of a file or directory on the
mount, for which `sync /mnt/tfs` is enough. The kernel does not pass sync(2) and syncfs(2) to FUSE
servers: `sync` and `sync -f` alone make nothing durable.

SIGTERM and Ctrl-C unmount. While the mount is in use the server waits up to 8 seconds, then
detaches it and serves the files that are open until they are closed. A second signal ends that
at once; what was written until then is kept.")]
pub(super) struct Args {
    /// An image file or a block device
    #[arg(value_name = "DEVICE")]
    device: PathBuf,

    /// Where: an empty directory
    #[arg(value_name = "MNT")]
    mountpoint: PathBuf,

    /// Mount read-only
    #[arg(long)]
    read_only: bool,

    /// Let other users of this machine use the mount
    #[arg(long)]
    allow_other: bool,

    /// Options as of mount(8), with commas between them [default: nosuid,nodev,relatime]
    #[arg(short, long = "options", value_name = "OPTIONS", value_delimiter = ',')]
    options: Vec<Flag>,

    /// Memory for the file system's own blocks
    #[arg(long, value_name = "SIZE", default_value = "16MiB", value_parser = units::parse_size)]
    cache: u64,

    /// Where the mount's log goes [default: nowhere]
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,

    /// Serve the mount here, until Ctrl-C or `atoll tfs unmount`
    #[arg(long)]
    foreground: bool,

    /// Say on standard output when the mount is there, in a session of its own
    #[arg(long, hide = true, requires = "foreground")]
    announce: bool,
}

/// An option of mount(8). Of two that contradict each other the last counts.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Flag {
    /// Set-user-ID programs run with the rights of their owners; only root may allow it
    Suid,
    /// Set-user-ID bits mean nothing
    Nosuid,
    /// Device files are devices; only root may allow it
    Dev,
    /// Device files cannot be opened
    Nodev,
    /// Reads change no access times
    Noatime,
    /// A read changes the access time if the file was changed since, or if it is a day old
    Relatime,
}

impl Args {
    /// Whether `on` was given, and not `off` after it.
    fn has(&self, on: Flag, off: Flag) -> bool {
        self.options.iter().rev().find(|flag| [on, off].contains(flag)) == Some(&on)
    }

    /// Whether this process is to serve the mount.
    pub(super) fn is_served_here(&self) -> bool {
        self.foreground
    }

    fn has_suid(&self) -> bool {
        self.has(Flag::Suid, Flag::Nosuid)
    }

    fn has_dev(&self) -> bool {
        self.has(Flag::Dev, Flag::Nodev)
    }
}

/// Mounts.
pub(super) fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    if (args.has_suid() || args.has_dev()) && !rustix::process::geteuid().is_root() {
        let what = format!("cannot mount {}", args.device.display());
        return Err(Failure::new(Exit::Usage, what).because("only root may mount with suid or dev"));
    }
    if !args.foreground {
        return in_background(args, global);
    }
    mount_server::run(args.announce, serve(args))
}

async fn serve(args: &Args) -> Result<(), Failure> {
    let options = MountOptions {
        read_only: args.read_only,
        no_access_times: args.has(Flag::Noatime, Flag::Relatime),
        cache_bytes: usize::try_from(args.cache).unwrap_or(usize::MAX),
        ..MountOptions::default()
    };
    // Before the device is touched, whose mounting may have to look after a crash.
    fuse::check_mountpoint(&args.mountpoint, false).map_err(|error| mount_failure(args, &error))?;
    let (tfs, report) = device::mount(&args.device, &options)?;
    tracing::info!(?report, "the file system is open");
    let fuse_options = FuseOptions {
        read_only: args.read_only,
        allow_other: args.allow_other,
        access_times: !options.no_access_times,
        set_user_id: args.has_suid(),
        devices: args.has_dev(),
        // `atoll tfs unmount` waits for it by this name.
        fs_name: std::path::absolute(&args.device)
            .unwrap_or_else(|_| args.device.clone())
            .display()
            .to_string(),
        ..FuseOptions::default()
    };
    let handle = tokio::runtime::Handle::current();
    let mounted = fuse::mount(Arc::new(tfs.clone()), &args.mountpoint, &fuse_options, &handle);
    let mut mounted = match mounted {
        Ok(mounted) => mounted,
        Err(error) => {
            let _ = tfs.unmount();
            return Err(mount_failure(args, &error));
        }
    };
    let trimming = tokio::spawn(heap::give_back());
    let ended = mount_server::serve(&mut mounted, &args.mountpoint, args.announce).await;
    trimming.abort();
    let closed = tfs.unmount().map_err(|errno| {
        Failure::new(Exit::Failed, format!("{} was not closed in order", args.device.display()))
            .because(tfs.failure().map_or_else(|| errno.to_string(), str::to_owned))
            .advice("The next mount makes it whole.")
    });
    ended.and(closed)
}

fn mount_failure(args: &Args, error: &MountError) -> Failure {
    let exit = match error {
        MountError::NoMountpoint { .. } => Exit::NotFound,
        _ => Exit::Failed,
    };
    let failure = Failure::new(exit, format!("cannot mount {}", args.device.display()));
    match error {
        MountError::Broken { path } => failure.because(error).advice(format!(
            "`atoll tfs unmount {}` takes it away.",
            shell_word(&path.display().to_string())
        )),
        _ => failure.because(error),
    }
}

fn in_background(args: &Args, global: &Global) -> Result<(), Failure> {
    let what = format!("cannot mount {}", args.device.display());
    let failed = |error: &io::Error| Failure::io(&what, error);
    let absolute = |path: &PathBuf| std::path::absolute(path).map_err(|error| failed(&error));
    let program = std::env::current_exe().map_err(|error| failed(&error))?;
    let mountpoint = absolute(&args.mountpoint)?;
    let mut command = Command::new(program);
    command.args(["tfs", "mount", "--foreground", "--announce", "--cache"]);
    command.arg(args.cache.to_string());
    command.args(args.read_only.then_some("--read-only"));
    command.args(args.allow_other.then_some("--allow-other"));
    for flag in args.options.iter().filter_map(clap::ValueEnum::to_possible_value) {
        command.args(["-o", flag.get_name()]);
    }
    command.args(std::iter::repeat_n("-v", global.verbose.into()));
    command.arg("--").arg(absolute(&args.device)?).arg(&mountpoint);
    let log = match &args.log {
        None => Stdio::null(),
        Some(path) => {
            let log = std::fs::OpenOptions::new().append(true).create(true).open(path);
            log.map_err(|error| Failure::io(format!("cannot write {}", path.display()), &error))?
                .into()
        }
    };
    command.stderr(log);
    mount_server::start(command, b"", &what, "`--foreground` shows what it has to say.")?;
    if !global.quiet {
        note!("mounted on {}", mountpoint.display());
    }
    Ok(())
}
