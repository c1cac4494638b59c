//! `atoll pool`: one tree of plain files on the disks of machines (Kosha): of one, or of several that have a copy each.
//!
//! `records` keeps the directory of each pool of this node. `atoll mount` and `atoll nfs` open a pool by its name and serve the files
//! in that directory.

mod adopt;
mod check;
mod create;
mod group;
mod import;
mod leave;
mod quota;
pub(crate) mod records;
mod revive;
mod status;

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use atoll_env::{Env, TokioRuntime};
use atoll_pool::disk::directory::Directory;
use atoll_pool::remote::{RemoteFs, Route, SpreadFs};
use atoll_pool::{GroupNumber, OpenError, OpenRemote, PoolFs};
use atoll_upkeep::pools::NodeRoute;

use crate::connection;
use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::output::escaped;
use crate::volume_target::Target;
use records::PoolRecord;

/// How long a process that has ended a mount may take to let go of the pool.
const ENDING_LIMIT: Duration = Duration::from_secs(2);
/// How long a node may take to let go of one, where changes wait for a member.
const NODE_ENDING_LIMIT: Duration = Duration::from_secs(15);

/// Arguments of `atoll pool`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll pool create home /srv/home
  atoll mount home /mnt/home
  atoll nfs home
  atoll pool import home /srv/old
  atoll pool invite home
  atoll pool status
  atoll pool check home
  atoll pool leave home

The files of a pool lie in its directory as plain files, with their own names, owners, modes, times and attributes, and can
be read there without Atoll: begin at FILES/slots/000/0000000000000001. A pool of one machine is as safe as that machine's disk
and needs no node. In one of several (`atoll pool invite`) each file has three copies on different machines, so one machine may die and nothing
stops. Each machine beyond the third adds its room: directories are spread over groups of machines. Root makes and serves pools, since files keep
their owners.")]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand, Debug)]
enum Command {
    /// Make a pool in an empty directory
    Create(create::CreateArgs),
    /// Take a tree of plain files into a pool: in place where that can be, or else by copying it
    Import(import::Args),
    /// Let this node know a pool that is in a directory already
    Attach(create::AttachArgs),
    /// Print a code by which other machines join a pool
    Invite(group::InviteArgs),
    /// Give a directory of this machine to a pool that others have, or vote there without one
    Join(group::JoinArgs),
    /// Let a machine go when other machines have copies of what it has
    Drain(group::DrainArgs),
    /// Take a machine out of a pool that does not come back
    Remove(group::RemoveMemberArgs),
    /// Say on how many machines each file of a pool is, and how many of them changes need
    Copies(group::CopiesArgs),
    /// Say down to which depth new directories are spread over machines
    Level(group::LevelArgs),
    /// List this node's pools
    Status(status::Args),
    /// Compare all copies of a pool's files, or the index of a pool of one with them, and put right what can be
    Check(check::Args),
    /// List what people have changed in this machine's directory by hand, or give it to the pool
    Adopt(adopt::Args),
    /// Say how much a user's files, or those below a directory, may take, or list what they do
    Quota(quota::Args),
    /// Make this machine's copy what the pool has, when the other copies are lost for good
    Revive(revive::Args),
    /// Give the directory back: what is left is one tree of plain files, and no pool
    Leave(leave::LeaveArgs),
    /// Let this node forget a pool; its directory stays as it is
    Forget(leave::ForgetArgs),
}

/// Does what was asked.
pub(crate) async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    match &args.command {
        Command::Create(args) => create::create(args, global).await,
        Command::Import(args) => import::run(args, global).await,
        Command::Invite(args) => group::invite(args, global).await,
        Command::Drain(args) => group::drain(args, global).await,
        Command::Copies(args) => group::copies(args, global).await,
        Command::Level(args) => group::level(args, global).await,
        Command::Remove(args) => group::remove(args, global).await,
        Command::Join(args) => group::join(args, global).await,
        Command::Attach(args) => create::attach(args, global).await,
        Command::Status(args) => status::run(args, global).await,
        Command::Check(args) => check::run(args, global).await,
        Command::Adopt(args) => adopt::run(args, global).await,
        Command::Quota(args) => quota::run(args, global).await,
        Command::Revive(args) => revive::run(args, global).await,
        Command::Leave(args) => leave::leave(args, global).await,
        Command::Forget(args) => leave::forget(args, global).await,
    }
}

fn env() -> Env {
    Arc::new(TokioRuntime::current())
}

/// A pool's directory as a disk.
fn disk(dir: &Path, what: &str) -> Result<Directory, Failure> {
    Directory::open(dir).map_err(|error| {
        let path = escaped(dir.as_os_str().as_bytes());
        Failure::io(what, &error).because(format!("{path}: {error}"))
    })
}

/// The pool of a name, of which this node must know.
fn known(name: &str, global: &Global, what: &str) -> Result<PoolRecord, Failure> {
    records::find(&global.dir()?, name, what)?.ok_or_else(|| {
        Failure::new(Exit::NotFound, what)
            .because(format!("this node has no pool {name}"))
            .advice("`atoll pool status` lists its pools.")
    })
}

fn failure(error: &OpenError, what: &str) -> Failure {
    let failure = Failure::new(Exit::Failed, what).because(error);
    match error {
        OpenError::InUse => {
            failure.advice("`atoll unmount` ends a mount, `atoll nfs --stop` a server.")
        }
        OpenError::Index(_) => failure.advice("`atoll pool check` makes the index again."),
        OpenError::HasMembers
        | OpenError::NotAMember
        | OpenError::Members
        | OpenError::IndexVersion
        | OpenError::Votes(_)
        | OpenError::PrimaryIsOlder
        | OpenError::NoStamp
        | OpenError::Stamp
        | OpenError::Disk(..) => failure,
    }
}

/// The prefix of a pool's name in the kernel's table of mounts; a volume's is `atoll:`.
const SOURCE: &str = "pool:";

/// A pool in the kernel's table of mounts.
pub(crate) fn source(name: &str) -> String {
    format!("{SOURCE}{name}")
}

/// Whether an entry of the kernel's table of mounts is a pool.
pub(crate) fn is_source(source: &OsStr) -> bool {
    source.as_bytes().starts_with(SOURCE.as_bytes())
}

/// That no pool of this node has a name: `atoll mount NAME` would not lead to a volume.
pub(crate) fn check_no_pool(name: &str, global: &Global, what: &str) -> Result<(), Failure> {
    match records::find(&global.dir()?, name, what)? {
        Some(_) => Err(Failure::new(Exit::Failed, what)
            .because("this node has a pool of that name")
            .advice("`atoll pool status` lists its pools.")),
        None => Ok(()),
    }
}

/// Has the node look at the records, if it runs: it serves pools of several.
async fn tell_node(record: &PoolRecord, global: &Global) {
    if record.group.is_some()
        && let Ok(client) = connection::impatient(global).await
    {
        // One that is stopping looks at them at its next start.
        let _ = atoll_upkeep::pools::look(&client).await;
    }
}

/// Whether a name is that of a pool of one, which is served without a node.
pub(crate) fn is_pool_of_one(target: &Target, global: &Global) -> Result<bool, Failure> {
    let Target::Name(name, None) = target else { return Ok(false) };
    let record = records::find(&global.dir()?, name, &format!("cannot read pool {name}"))?;
    Ok(record.is_some_and(|record| record.group.is_none()))
}

/// Begins to use the file system of a pool of several, through the node.
pub(crate) async fn begin_remote(
    (name, record): (&str, &PoolRecord),
    global: &Global,
    what: &str,
) -> Result<SpreadFs, Failure> {
    let (env, client) = connection::for_mount(global).await?;
    let pool = record.pool_id();
    let pool =
        pool.ok_or_else(|| Failure::new(Exit::Failed, what).because("its record is damaged"))?;
    let all = atoll_upkeep::pools::status(&client).await.map_err(connection::failure)?;
    if let Some(problem) =
        all.into_iter().find(|pool| pool.name == name).and_then(|pool| pool.problem)
    {
        return Err(Failure::new(Exit::Unavailable, what).because(problem));
    }
    let route = NodeRoute::new(client.clone(), pool);
    let first = RemoteFs::begin(env.clone(), Arc::new(route.clone())).await.map_err(|errno| {
        let failure = Failure::new(Exit::Unavailable, what);
        match errno {
            atoll_vfs::Errno::ETIMEDOUT => failure
                .because("it has no primary now that answers")
                .advice("`atoll pool status` tells how it stands."),
            errno => failure.because(errno),
        }
    })?;
    let to = move |group: GroupNumber| Arc::new(route.to(group)) as Arc<dyn Route>;
    let others = OpenRemote { env: env.clone(), route: Box::new(to) };
    Ok(SpreadFs::new(env, Arc::new(first), Arc::new(others)))
}

/// Opens a pool to be served.
pub(crate) async fn open(record: &PoolRecord, what: &str) -> Result<PoolFs<Directory>, Failure> {
    let (fs, report) =
        when_free(record, what, async |disk| PoolFs::open(env(), disk).await).await?;
    tracing::info!(?report, "the pool is open");
    Ok(fs)
}

/// Does something with a pool's disk. A process that has just ended a mount may have it for a moment.
async fn when_free<T>(
    record: &PoolRecord,
    what: &str,
    work: impl AsyncFn(Directory) -> Result<T, OpenError>,
) -> Result<T, Failure> {
    let limit = if record.group.is_some() { NODE_ENDING_LIMIT } else { ENDING_LIMIT };
    let deadline = tokio::time::Instant::now() + limit;
    loop {
        let disk = disk(&record.dir, what)?;
        check_identity(&disk, record, what).await?;
        match work(disk).await {
            Err(OpenError::InUse) if tokio::time::Instant::now() < deadline => {
                tokio::time::sleep(ENDING_LIMIT / 20).await;
            }
            outcome => return outcome.map_err(|error| failure(&error, what)),
        }
    }
}

/// That a directory holds the pool that this node knows, and not another one that was put in its place.
async fn check_identity(disk: &Directory, record: &PoolRecord, what: &str) -> Result<(), Failure> {
    let settings = atoll_pool::read_settings(disk).await.map_err(|error| failure(&error, what))?;
    match crate::output::hex(&settings.pool) == record.pool {
        true => Ok(()),
        false => Err(Failure::new(Exit::Failed, what)
            .because(format!("{} holds another pool", record.dir.display()))),
    }
}
