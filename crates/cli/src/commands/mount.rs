//! `atoll mount`: a volume as a file system of this machine: one's own, by its name, read-write;
//! any other, by its address, read-only. A shared volume, by either, is read-write for its members.
//!
//! A process of its own serves the mount (see [`crate::mount_server`]). Its later messages go to
//! a log in the node's directory.

use std::ffi::OsStr;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use atoll_dht::Blocks;
use atoll_env::Env;
use atoll_gateway::fuse::{self, MountError, MountOptions};
use atoll_key::{SecretKey, UserAddress, VolumeId};
use atoll_node::{Client, shell_word};
use atoll_vfs::FileSystem;
use atoll_volume::keep::Keep;
use atoll_volume::owned::{VolumeFs, VolumeOptions, WritableFs, WriteOptions};
use atoll_volume::shared::access::{NotReader, groups};
use atoll_volume::shared::file_state::{FileState, STATE_XATTR};
use atoll_volume::shared::{
    Consistency, OpenError, PastFs, SharedFs, SharedOptions, Spooled, access,
};
use clap::ValueEnum;
use clap::builder::TypedValueParser;
use clap::error::ErrorKind;

use crate::address::Address;
use crate::connection;
use crate::failure::{Exit, Failure, TRY_AGAIN};
use crate::global::Global;
use crate::messages::note;
use crate::moment::{self, Moment};
use crate::mount_server;
use crate::output::escaped;
use crate::own_volume;
use crate::read_key::{self, Found, ReadKeyArgs};
use crate::reading::Reading;
use crate::runtime::until_done;
use crate::shared_spool::{self, Opened};
use crate::shared_volume;
use crate::spool;
use crate::units;
use crate::user::{self, Joined};

/// Arguments of `atoll mount`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  mkdir -p ~/docs && atoll mount atoll:KEY ~/docs
  atoll mount --max-age 5s atoll:KEY /mnt
  atoll volume create work && atoll mount work ~/work
  atoll mount work@2026-11-20T12:00 /mnt
  atoll volume join atoll-share:CODE team && atoll mount team ~/team
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
    /// The address of a volume, or the name of one of this node's own; with @TIME an old state
    #[arg(value_name = "ADDR[@TIME]|NAME[@TIME]", value_parser = Target::parser())]
    target: Target,

    #[command(flatten)]
    read_key: ReadKeyArgs,

    /// An empty directory to mount on
    #[arg(value_name = "MNT")]
    mountpoint: PathBuf,

    /// How old the shown version may be before the ring is asked for a newer one
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = units::parse_duration)]
    max_age: Duration,

    /// Show everything as yours, whoever owns it where it was written (only with an address)
    #[arg(long)]
    map_owners: bool,

    /// Write although another mount does, which then changes nothing any more (only with a name)
    #[arg(long)]
    take_over: bool,

    /// close(2) waits until the ring has what was written (only with a name)
    #[arg(long)]
    sync: bool,

    /// Disk for what the ring does not have yet, at least 1MiB [default: 1GiB]
    #[arg(long, value_name = "SIZE", value_parser = units::parse_size)]
    spool: Option<u64>,

    /// The consistency model by which files of a shared volume are opened [default: cto]
    #[arg(long, value_name = "MODEL", value_enum)]
    consistency: Option<ConsistencyModel>,

    /// Which old states are kept from now on, as `atoll volume create` says it (only with a name). Other mounts
    /// of a shared volume go by it when they are mounted anew
    #[arg(long, value_name = "COUNTS")]
    keep: Option<Keep>,

    /// Serve the mount here, until Ctrl-C or `atoll unmount`
    #[arg(long)]
    foreground: bool,

    /// Let other users of this machine use the mount
    #[arg(long)]
    allow_other: bool,

    /// Memory for blocks that may be read again [default: 32MiB]
    #[arg(long, value_name = "SIZE", value_parser = units::parse_size)]
    cache: Option<u64>,

    /// Say on standard output when the mount is there, in a session of its own
    #[arg(long, hide = true, requires = "foreground")]
    announce: bool,
}

impl Args {
    /// Whether this process is to serve the mount.
    pub(crate) fn is_served_here(&self) -> bool {
        self.foreground
    }
}

/// When a mount of a shared volume shows what others have written (Pastis §3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum ConsistencyModel {
    /// Close-to-open
    Cto,
    /// Read-your-writes
    Ryw,
}

/// The least that `--spool` takes.
const MIN_SPOOL_BYTES: u64 = 1 << 20;

/// Mounts.
pub(crate) fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    match &args.target {
        Target::Address(address) if !address.path.is_empty() => {
            return Err(Failure::new(Exit::Usage, format!("cannot mount {address}"))
                .because("only whole volumes can be mounted")
                .advice(format!("Mount {} and look below it.", address.volume)));
        }
        Target::Name(name, None) if args.map_owners => {
            return Err(Failure::new(Exit::Usage, format!("cannot mount {name}"))
                .because("a mount that writes keeps owners; --map-owners goes with an address"));
        }
        Target::Name(name, None) if args.spool.is_some_and(|bytes| bytes < MIN_SPOOL_BYTES) => {
            return Err(Failure::new(Exit::Usage, format!("cannot mount {name}"))
                .because("a spool of less than 1MiB is full at once")
                .advice("Leave --spool out, or give it more."));
        }
        target @ (Target::Address(_) | Target::Name(_, Some(_)))
            if args.take_over || args.keep.is_some() || args.sync || args.spool.is_some() =>
        {
            let why = "a mount of an address or of an old state writes nothing; --take-over, \
                       --keep, --sync and --spool go with a name";
            return Err(Failure::new(Exit::Usage, format!("cannot mount {target}")).because(why));
        }
        _ => {}
    }
    if !args.foreground {
        return in_background_or_told(args, global);
    }
    mount_server::run(args.announce, async {
        match &args.target {
            Target::Address(address) => {
                let read_key = args.read_key.given()?.key_for(address)?;
                let (env, client) = connection::for_mount(global).await?;
                if is_shared(&client, address.volume.0).await {
                    let user = user::key(&global.dir()?)?;
                    let fs_name = address.to_string();
                    let volume = Shared { volume: address.volume.0, at: address.at, fs_name };
                    return serve_shared(args, global, (env, client), volume, user).await;
                }
                serve(args, env, client, address, read_key).await
            }
            Target::Name(name, Some(at)) => {
                let (env, client) = connection::for_mount(global).await?;
                let what = format!("cannot mount {}", args.target);
                if let Some((volume, user)) = shared_of_name(&client, name, global, &what).await? {
                    let fs_name = format!("{}@{at}", own_volume::fs_name(name, volume));
                    let volume = Shared { volume, at: Some(*at), fs_name };
                    return serve_shared(args, global, (env, client), volume, user).await;
                }
                let named = own_volume::address(&client, name, Some(*at), &what).await;
                let (address, read_key) = named?;
                serve(args, env, client, &address, read_key).await
            }
            Target::Name(name, None) => serve_own(args, name, global).await,
        }
    })
}

/// Whether the ring says that a volume is a shared one. What it cannot say, whoever opens it is told.
async fn is_shared(client: &Arc<Client>, volume: VolumeId) -> bool {
    let root = client.get_signed(volume.root_key()).await;
    root.is_ok_and(|root| access::is_shared(&root.payload))
}

/// The shared volume that a name means, and the key that this node's user has for it.
async fn shared_of_name(
    client: &Arc<Client>,
    name: &str,
    global: &Global,
    what: &str,
) -> Result<Option<(VolumeId, Option<SecretKey>)>, Failure> {
    let dir = global.dir()?;
    if let Some(Joined { volume, user, .. }) = user::joined(&dir, name)? {
        return Ok(Some((volume, Some(user))));
    }
    let id = own_volume::address(client, name, None, what).await?.0.volume.0;
    Ok(match is_shared(client, id).await {
        true => Some((id, user::key(&dir)?)),
        false => None,
    })
}

/// A shared volume that is to be mounted.
struct Shared {
    volume: VolumeId,
    /// As it was then.
    at: Option<Moment>,
    fs_name: String,
}

/// Serves a shared volume, read-only if there is no key of a user.
async fn serve_shared(
    args: &Args,
    global: &Global,
    (env, client): (Env, Arc<Client>),
    Shared { volume, at, fs_name }: Shared,
    user: Option<SecretKey>,
) -> Result<(), Failure> {
    let what = format!("cannot mount {}", args.target);
    let is_of_one = args.take_over || args.sync || args.map_owners;
    if is_of_one {
        return Err(Failure::new(Exit::Usage, what).because(
            "it is a shared volume; --take-over, --sync and --map-owners go with volumes that one \
             mount writes",
        ));
    }
    fuse::check_mountpoint(&args.mountpoint, false).map_err(|error| mount_failure(args, error))?;
    let consistency = match args.consistency {
        Some(ConsistencyModel::Ryw) => Consistency::ReadYourWrites,
        Some(ConsistencyModel::Cto) | None => Consistency::CloseToOpen,
    };
    let mut options = SharedOptions { consistency, ..SharedOptions::default() };
    if let Some(bytes) = args.cache {
        options.cache_bytes = bytes;
    }
    if let Some(bytes) = args.spool {
        options.max_spool_bytes = bytes;
    }
    let who = user.as_ref().map(|user| UserAddress(user.user_id()));
    let dir = global.dir()?;
    let name = args.target.to_string();
    let spool = match &user {
        // Nothing is written of a state of the past.
        Some(user) if at.is_none() => {
            shared_spool::open(&dir, (volume, user.user_id()), &name, &what)?
        }
        _ => None,
    };
    let spool_path = spool.as_ref().map(|spool| spool.path.clone());
    let fs = match (spool, user) {
        (Some(Opened { directory, .. }), Some(user)) => {
            SharedFs::open_spooled(env, client, (volume, user), options, directory).await
        }
        (_, user) => SharedFs::open(env, client, volume, user, options).await,
    };
    let fs = fs.map_err(|error| match error {
        OpenError::Get(error) => Failure::get(&what, &error),
        OpenError::NotReader(why) => not_reader(&what, why, who),
        error => Failure::new(Exit::Failed, &what).because(error),
    })?;
    let then = match at {
        None => None,
        Some(at) => Some(state_at(&fs, at, &what).await?),
    };
    let options = MountOptions {
        // Whoever may not write the root directory may have been granted a part of it, or be granted one later.
        read_only: then.is_some() || who.is_none(),
        allow_other: args.allow_other,
        fs_name,
        ..MountOptions::default()
    };
    let shown: Arc<dyn FileSystem> = match then {
        None => Arc::new(fs.clone()),
        Some(then) => Arc::new(then),
    };
    let handle = tokio::runtime::Handle::current();
    let mounted = fuse::mount(shown, &args.mountpoint, &options, &handle);
    let served = match mounted {
        Ok(mut mounted) => mount_server::serve(&mut mounted, &args.mountpoint, args.announce).await,
        Err(error) => Err(mount_failure(args, error)),
    };
    let ended = own_volume::until_on_ring(async || fs.end().await, |_| false).await;
    let ended = ended.map_err(|error| {
        let lost = format!("{what}: what was written last is lost");
        Failure::new(Exit::Unavailable, lost).because(error)
    });
    let left = fs.spooled();
    if let Some(path) = &spool_path {
        let refused = left.as_ref().and_then(|left| left.refused.as_deref());
        shared_spool::note_refused(path, refused);
    }
    if let Some(Spooled { why, .. }) = left {
        let told = shared_spool::describe(&shared_spool::pending_of(&dir, &name));
        tracing::warn!("{} {why}", told.unwrap_or_default());
    }
    served.and(ended)
}

/// A shared volume as it was.
async fn state_at(fs: &SharedFs, at: Moment, what: &str) -> Result<PastFs, Failure> {
    match fs.at(at.after_ms()).await {
        Ok(Some(then)) => Ok(then),
        Ok(None) => {
            let states = fs.states();
            let kept = states.first().map(|oldest| moment::written(*oldest));
            let why = kept.map_or("it keeps no old states".to_owned(), |oldest| {
                format!("{}; the oldest state is of {oldest}", at.why_nothing_is_kept())
            });
            Err(Failure::new(Exit::NotFound, what).because(why))
        }
        Err(why) => Err(Failure::new(Exit::Failed, what).because(why)),
    }
}

/// Changes which old versions of a shared volume are kept.
async fn keep_from_now_on(
    env: &Env,
    client: &Arc<Client>,
    (name, keep): (&str, Keep),
    what: &str,
) -> Result<(), Failure> {
    let failed = |error| shared_volume::failure(what, error);
    let owned = shared_volume::owned(client.clone(), name, what).await?;
    if owned.record.keep == keep {
        return Ok(());
    }
    let changed =
        groups::change_volume(env, &owned.blocks, &owned.key, |record| record.keep = keep);
    let (block, _) = changed.await.map_err(failed)?;
    owned.keep(block, what).await
}

/// The failure of a user who cannot read an encrypted volume.
fn not_reader(what: &str, why: NotReader, who: Option<UserAddress>) -> Failure {
    let failure = |exit| Failure::new(exit, what).because(&why);
    match (&why, who) {
        (NotReader::Unknown { .. }, _) => failure(Exit::Unavailable).advice(TRY_AGAIN),
        (_, Some(who)) => failure(Exit::Failed)
            .advice(format!("Ask its owner for `atoll grant NAME {who} --read`.")),
        (_, None) => failure(Exit::Failed).advice(
            "Ask its owner for `atoll grant NAME USER --read`; USER is what `atoll id` says.",
        ),
    }
}

/// That an option is for shared volumes.
fn check_not_shared(args: &Args) -> Result<(), Failure> {
    match args.consistency {
        None => Ok(()),
        Some(_) => Err(Failure::new(Exit::Usage, format!("cannot mount {}", args.target))
            .because("--consistency goes with a shared volume, and this is none")),
    }
}

/// Serves a volume read-only.
async fn serve(
    args: &Args,
    env: Env,
    client: Arc<Client>,
    address: &Address,
    read_key: Found,
) -> Result<(), Failure> {
    check_not_shared(args)?;
    let mut options = VolumeOptions { max_age: args.max_age, ..VolumeOptions::default() };
    if let Some(bytes) = args.cache {
        options.cache_bytes = bytes;
    }
    let reading = Reading::through(env, client, address, read_key, options).await?;
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    let (uid, gid) = (uid.as_raw(), gid.as_raw());
    let fs: Arc<dyn FileSystem> = Arc::new(match args.map_owners {
        true => VolumeFs::with_one_owner(reading.env, reading.volume, uid, gid),
        false => VolumeFs::new(reading.env, reading.volume, uid, gid),
    });
    let options = MountOptions {
        read_only: true,
        allow_other: args.allow_other,
        fs_name: address.to_string(),
        ..MountOptions::default()
    };
    let handle = tokio::runtime::Handle::current();
    let mut mounted = fuse::mount(fs, &args.mountpoint, &options, &handle)
        .map_err(|error| mount_failure(args, error))?;
    mount_server::serve(&mut mounted, &args.mountpoint, args.announce).await
}

/// Serves one of this node's own volumes, read-write.
async fn serve_own(args: &Args, name: &str, global: &Global) -> Result<(), Failure> {
    let what = format!("cannot mount {name}");
    // Before the ring is told that this mount writes.
    fuse::check_mountpoint(&args.mountpoint, false).map_err(|error| mount_failure(args, error))?;
    let (env, client) = connection::for_mount(global).await?;
    let dir = global.dir()?;
    if let Some((volume, user)) = shared_of_name(&client, name, global, &what).await? {
        if user::joined(&dir, name)?.is_none() {
            own_volume::find(&client, name, &what).await?;
        }
        if let Some(keep) = args.keep {
            if user::joined(&dir, name)?.is_some() {
                return Err(Failure::new(Exit::Usage, what)
                    .because("--keep of a shared volume is said on the node that has made it"));
            }
            keep_from_now_on(&env, &client, (name, keep), &what).await?;
        }
        let fs_name = own_volume::fs_name(name, volume);
        let volume = Shared { volume, at: None, fs_name };
        return serve_shared(args, global, (env, client), volume, user).await;
    }
    let volume = own_volume::find(&client, name, &what).await?;
    check_not_shared(args)?;
    let mut options = WriteOptions {
        read_key: client.read_key(name).await.map_err(connection::failure)?,
        owner: own_volume::owner(),
        take_over: args.take_over,
        sync: args.sync,
        keep: args.keep,
        ..WriteOptions::default()
    };
    if let Some(bytes) = args.spool {
        options.max_spool_bytes = bytes;
    }
    if let Some(bytes) = args.cache {
        options.cache_bytes = bytes;
    }
    let spool = spool::open(&dir, name, &what)?;
    let Some(spool) = spool else {
        return Err(spool::in_use(&what).advice("`atoll unmount` ends a mount."));
    };
    let keeper = Arc::new(own_volume::KeepVersions::new(client.clone(), name));
    let key = volume.key.clone();
    let fs = WritableFs::open(env, client.clone(), key, options, keeper, Some(spool)).await;
    let fs = fs.map_err(|error| own_volume::failure(&what, error))?;
    // A move marks the volume before it looks for a writer: one of the two sees the other.
    if let Err(error) = own_volume::find(&client, name, &what).await {
        return own_volume::end(&fs, &what).await.and(Err(error));
    }
    let options = MountOptions {
        allow_other: args.allow_other,
        fs_name: own_volume::fs_name(name, volume.key.volume_id()),
        ..MountOptions::default()
    };
    let handle = tokio::runtime::Handle::current();
    let mounted = fuse::mount(Arc::new(fs.clone()), &args.mountpoint, &options, &handle);
    let served = match mounted {
        Ok(mut mounted) => mount_server::serve(&mut mounted, &args.mountpoint, args.announce).await,
        Err(error) => Err(mount_failure(args, error)),
    };
    let ended = own_volume::end(&fs, &what).await;
    served.and(ended)
}

fn mount_failure(args: &Args, error: MountError) -> Failure {
    let exit = match &error {
        MountError::NoMountpoint { .. } => Exit::NotFound,
        _ => Exit::Failed,
    };
    let failure = Failure::new(exit, format!("cannot mount {}", args.target)).because(&error);
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
        if let Some(told) = shared_spool::describe(&left) {
            note!("{told}");
        }
    }
    mounted
}

fn in_background(args: &Args, global: &Global) -> Result<(), Failure> {
    let what = format!("cannot mount {}", args.target);
    // Before a log is written into its directory, there must be a node.
    until_done(async { connection::impatient(global).await.map(drop) })?;
    let dir = global.dir()?;
    let mountpoint =
        std::path::absolute(&args.mountpoint).map_err(|error| Failure::io(&what, &error))?;
    let (log_path, log) = open_log(&dir, &mountpoint);
    let (log, no_log) = match log {
        Ok(log) => (Stdio::from(log), None),
        // A full disk keeps nobody from what is on the ring.
        Err(error) => (Stdio::null(), Some(error)),
    };
    let program = std::env::current_exe().map_err(|error| Failure::io(&what, &error))?;
    let mut command = Command::new(program);
    command.arg("--dir").arg(&dir).arg("mount").arg(args.target.to_string()).arg(&mountpoint);
    command.args(["--foreground", "--announce", "--max-age"]);
    command.arg(humantime::format_duration(args.max_age).to_string());
    command.args(args.allow_other.then_some("--allow-other"));
    command.args(args.take_over.then_some("--take-over"));
    command.args(args.map_owners.then_some("--map-owners"));
    command.args(args.sync.then_some("--sync"));
    if let Some(model) = args.consistency.and_then(|model| model.to_possible_value()) {
        command.arg("--consistency").arg(model.get_name());
    }
    if let Some(bytes) = args.spool {
        command.arg("--spool").arg(bytes.to_string());
    }
    if let Some(keep) = args.keep {
        command.arg("--keep").arg(keep.to_string());
    }
    if let Some(bytes) = args.cache {
        command.arg("--cache").arg(bytes.to_string());
    }
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

/// `DIR/logs/mount-….log`, for this user only.
fn open_log(dir: &Path, mountpoint: &Path) -> (PathBuf, io::Result<File>) {
    let logs = dir.join("logs");
    let path = logs.join(log_name(mountpoint));
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&logs);
    let mut options = OpenOptions::new();
    let log = made.and_then(|()| options.append(true).create(true).mode(0o600).open(&path));
    (path, log)
}

/// A name that tells where the mount is, short enough for any file system.
fn log_name(mountpoint: &Path) -> String {
    let name: String =
        escaped(mountpoint.as_os_str().as_bytes()).trim_matches('/').replace(['/', '\\', ' '], "-");
    let tail: Vec<char> = name.chars().rev().take(60).collect();
    format!("mount-{}.log", tail.into_iter().rev().collect::<String>())
}

/// A volume to mount: any by its address, or one's own by its name, perhaps at a time.
#[derive(Clone, Debug)]
enum Target {
    Address(Address),
    Name(String, Option<Moment>),
}

impl Target {
    fn parser() -> impl TypedValueParser<Value = Target> {
        TargetParser
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Address(address) => address.fmt(f),
            Target::Name(name, None) => f.write_str(name),
            Target::Name(name, Some(at)) => write!(f, "{name}@{at}"),
        }
    }
}

/// Parses what begins like an address as one; anything else is a name.
#[derive(Clone)]
struct TargetParser;

impl TypedValueParser for TargetParser {
    type Value = Target;

    fn parse_ref(
        &self,
        command: &clap::Command,
        argument: Option<&clap::Arg>,
        text: &OsStr,
    ) -> Result<Target, clap::Error> {
        let named = text.to_str().map(moment::split);
        let Some((name, time)) = named.filter(|(name, _)| !name.contains([':', '/', '#'])) else {
            return Address::parser().parse_ref(command, argument, text).map(Target::Address);
        };
        let at = time.map(str::parse).transpose().map_err(|why: String| {
            let why = format!("{} is no volume at a time: {why}\n", escaped(text.as_bytes()));
            clap::Error::raw(ErrorKind::ValueValidation, why).with_cmd(command)
        })?;
        Ok(Target::Name(name.to_owned(), at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_are_named_after_their_mount() {
        assert_eq!(log_name(Path::new("/home/me/my docs")), "mount-home-me-my-docs.log");
        let long = format!("/{}", "x".repeat(500));
        assert!(log_name(Path::new(&long)).len() < 80);
    }
}
