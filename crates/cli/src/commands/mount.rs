//! `atoll mount`: a volume as a file system of this machine: one's own, by its name, read-write;
//! any other, by its address, read-only. A shared volume, by either, is read-write for its members.
//!
//! A process of its own serves the mount (see [`crate::mount_server`]). Its later messages go to
//! a log in the node's directory.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use atoll_gateway::fuse::{self, MountError, MountOptions};
use atoll_node::shell_word;
use atoll_upkeep::shared_spool;
use atoll_volume::shared::file_state::{FileState, STATE_XATTR};

use crate::connection;
use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::messages::note;
use crate::mount_server;
use crate::pool;
use crate::read_key::{self, Found, Given, ReadKeyArgs};
use crate::runtime::until_done;
use crate::served_volume::{ServedVolume, VolumeArgs};
use crate::spool;
use crate::volume_target::Target;

/// Arguments of `atoll mount`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  mkdir -p ~/docs && atoll mount atoll:KEY ~/docs
  atoll mount --max-age 5s atoll:KEY /mnt
  atoll volume create work && atoll mount work ~/work
  atoll mount work@2026-11-20T12:00 /mnt
  atoll volume join atoll-share:CODE team && atoll mount team ~/team
  atoll pool create home /srv/home && atoll mount home /mnt/home
  atoll unmount ~/docs

A mount of an address follows the volume's updates. A mount of a name (`atoll volume create`) is
read-write: what is written is on this machine's disk after close(2), and on the ring after
fsync(2), or within about ten seconds. What is not there yet when this machine or the mount's
process dies, the next mount of the name brings there, or the node within a minute. One mount
writes a volume at a time.
A shared volume (`atoll volume create --shared`) is mounted by many at the same time. Those write it, or a part of
it, to whom that was granted; without a key (`atoll id`) it is mounted read-only. What is written is on the ring after close(2);
while the ring cannot be reached it waits on this machine's disk, and `atoll status` says so.
With --consistency cto (close-to-open) a file that is opened shows all that others have closed before;
with ryw (read-your-writes) what this mount wrote itself, and what others did somewhat later, which is faster.
NAME@TIME (or ADDR@TIME) shows, read-only, the newest state that is kept and not younger than TIME:
a date or a minute of UTC; `atoll volume history` lists them. A mount of a shared volume has all that are kept
in .atoll/history, which is not listed (`ls MNT/.atoll/history`).
A mount runs as a process of its own and survives
restarts of the node. While the node is down, reads of data that is not in memory fail with
\"Connection timed out\" within 10 seconds; DIR/logs and `getfattr -n user.atoll.status MNT` say
why. An encrypted volume's read key is not among its arguments, so that `ps` does not show it.")]
pub(crate) struct Args {
    /// The address of a volume, or the name of one of this node's own or of a pool; with @TIME an old state of a volume
    #[arg(value_name = "ADDR[@TIME]|NAME[@TIME]", value_parser = Target::parser())]
    target: Target,

    #[command(flatten)]
    read_key: ReadKeyArgs,

    /// An empty directory to mount on
    #[arg(value_name = "MNT")]
    mountpoint: PathBuf,

    #[command(flatten)]
    volume: VolumeArgs,

    /// Serve the mount here, until Ctrl-C or `atoll unmount`
    #[arg(long)]
    foreground: bool,

    /// Let other users of this machine use the mount
    #[arg(long)]
    allow_other: bool,

    /// Say on standard output when the mount is there, in a session of its own
    #[arg(long, hide = true, requires = "foreground")]
    announce: bool,
}

impl Args {
    /// Whether this process is to serve the mount.
    pub(crate) fn is_served_here(&self) -> bool {
        self.foreground
    }

    fn what(&self) -> String {
        format!("cannot mount {}", self.target)
    }
}

/// Mounts.
pub(crate) fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    args.volume.check(&args.target, &args.what())?;
    if !args.foreground {
        return in_background_or_told(args, global);
    }
    mount_server::run(args.announce, serve(args, global))
}

async fn serve(args: &Args, global: &Global) -> Result<(), Failure> {
    let read_key = match &args.target {
        Target::Address(_) => args.read_key.given()?,
        // The node has it.
        Target::Name(..) => Given::default(),
    };
    // Before the ring is told that this mount writes.
    fuse::check_mountpoint(&args.mountpoint, false).map_err(|error| mount_failure(args, error))?;
    let what = args.what();
    let served =
        ServedVolume::open(&args.target, &args.volume, &read_key, (global, None), &what).await?;
    let options = MountOptions {
        read_only: served.read_only,
        allow_other: args.allow_other,
        fs_name: served.fs_name.clone(),
        ..MountOptions::default()
    };
    let handle = tokio::runtime::Handle::current();
    let mounted = match fuse::mount(served.fs.clone(), &args.mountpoint, &options, &handle) {
        Ok(mut mounted) => mount_server::serve(&mut mounted, &args.mountpoint, args.announce).await,
        Err(error) => Err(mount_failure(args, error)),
    };
    mounted.and(served.end().await)
}

fn mount_failure(args: &Args, error: MountError) -> Failure {
    let exit = match &error {
        MountError::NoMountpoint { .. } => Exit::NotFound,
        _ => Exit::Failed,
    };
    let failure = Failure::new(exit, args.what()).because(&error);
    match (error, &args.target) {
        (MountError::NoDevice | MountError::NoHelper, Target::Address(address)) => {
            let address = shell_word(&address.to_string());
            failure.advice(format!("`atoll get {address} DEST` copies it instead."))
        }
        (MountError::Broken { path }, _) => {
            let path = shell_word(&path.display().to_string());
            failure.advice(format!("`atoll unmount {path}` takes it away."))
        }
        _ => failure,
    }
}

/// As [`in_background`]; if that fails, says what waits in a spool.
fn in_background_or_told(args: &Args, global: &Global) -> Result<(), Failure> {
    let mounted = in_background(args, global);
    if mounted.is_err()
        && let Ok(dir) = global.dir()
    {
        let left = shared_spool::pending_of(&dir, &args.target.to_string());
        if let Some(told) = spool::describe_shared(&left) {
            note!("{told}");
        }
    }
    mounted
}

fn in_background(args: &Args, global: &Global) -> Result<(), Failure> {
    let what = args.what();
    if !pool::is_pool_of_one(&args.target, global)? {
        // Before a log is written into its directory, there must be a node.
        until_done(async { connection::impatient(global).await.map(drop) })?;
    }
    let dir = global.dir()?;
    let mountpoint =
        std::path::absolute(&args.mountpoint).map_err(|error| Failure::io(&what, &error))?;
    let place = mountpoint.as_os_str().as_bytes();
    let (log_path, log) = mount_server::open_log(&dir, "mount", place);
    let (log, no_log) = match log {
        Ok(log) => (Stdio::from(log), None),
        // A full disk keeps nobody from what is on the ring.
        Err(error) => (Stdio::null(), Some(error)),
    };
    let program = std::env::current_exe().map_err(|error| Failure::io(&what, &error))?;
    let mut command = Command::new(program);
    command.arg("--dir").arg(&dir).arg("mount").arg(args.target.to_string()).arg(&mountpoint);
    command.args(["--foreground", "--announce"]).args(args.volume.to_arguments());
    command.args(args.allow_other.then_some("--allow-other"));
    command.args(std::iter::repeat_n("-v", global.verbose.into()));
    // The server's arguments and environment can be looked at for as long as it runs.
    command.env_remove(read_key::VARIABLE);
    let found = match &args.target {
        Target::Address(address) => args.read_key.given()?.key_for(address)?,
        // The node has it.
        Target::Name(..) => Found::default(),
    };
    if found.key.is_some() {
        command.args(["--read-key", "-"]);
        command.args(found.optional.then_some("--read-key-optional"));
    }
    let key_text = found.key.map(|key| key.to_text()).unwrap_or_default();
    let advice = match &no_log {
        None => format!("The mount's log is {}.", log_path.display()),
        Some(_) => "`--foreground` shows what it has to say.".to_owned(),
    };
    command.stderr(log);
    mount_server::start(command, key_text.as_bytes(), &what, &advice)?;
    if !global.quiet {
        note!("mounted on {}", mountpoint.display());
    }
    if let Some(error) = no_log {
        note!("the mount works without its log {}: {error}", log_path.display());
    }
    if let Some(status) = without_spool(&mountpoint) {
        note!("the mount works without its spool: {status}");
    }
    if let Some(why) = why_not_written(&mountpoint) {
        note!("its top directory is read-only for you (`atoll id`): {why}");
    }
    if let Target::Name(name, None) = &args.target
        && !spool::pending_of(&dir, name).set_aside.is_empty()
    {
        note!(
            "earlier changes were set aside, since another writer has changed the volume or the \
             spool is damaged; `atoll volume recover {}` tells more",
            shell_word(name)
        );
    }
    Ok(())
}

/// Why the user may not write the root directory of a shared volume, if that is so. Parts of it may be granted all the
/// same.
fn why_not_written(mountpoint: &Path) -> Option<String> {
    let mut state = vec![0; 64 << 10];
    let len = rustix::fs::getxattr(mountpoint, STATE_XATTR, &mut state).ok()?;
    FileState::decode(&state[..len]).ok()?.why_not
}

/// The reason why a mount has no spool, if it has none: a part of its status.
fn without_spool(mountpoint: &Path) -> Option<String> {
    let status = mount_server::status(mountpoint)?;
    status.find("nothing is spooled").map(|at| status[at..].to_owned())
}
