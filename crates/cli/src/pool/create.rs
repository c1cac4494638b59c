//! `atoll pool create`: a new pool. `atoll pool attach`: one that is in a directory already.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use atoll_pool::{CreateError, MAX_COPIES, PoolSettings, USUAL_COPIES};

use atoll_upkeep::pools;

use super::records::{self, GroupRecord, PoolRecord};
use super::{disk, failure};
use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::messages::note;
use crate::output::hex;
use crate::tfs::random_bytes;

/// Arguments of `atoll pool create`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll pool create home /srv/home
  atoll pool create home /srv/home --level 2
  atoll pool create home /srv/home --copies 3 --min-copies 2

A pool has one machine at first, and needs no node; `atoll pool invite` lets others join. Directories down to the level are spread over the
machines, deeper ones lie with their parent: with level 1 each directory in the pool's root goes somewhere else.

With --min-copies 2 no change is begun while fewer than two machines have everything: files can be read, and changes fail with
\"Read-only file system\". It holds once a second machine belongs to the pool; `atoll pool copies` changes it.")]
pub(super) struct CreateArgs {
    /// The pool's name on this node
    name: String,

    /// The directory that holds the pool's files: an empty one, or a new one
    #[arg(value_name = "FILES")]
    files: PathBuf,

    /// Down to which depth directories are distributed, at most 16
    #[arg(long, value_name = "LEVEL", default_value_t = 1)]
    level: u8,

    /// On how many machines each file is once there are so many, 1 to 5
    #[arg(long, value_name = "N", default_value_t = USUAL_COPIES, value_parser = clap::value_parser!(u8).range(1..=MAX_COPIES as i64))]
    copies: u8,

    /// How many machines must have everything so that changes are taken, 1 to the number of copies
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=MAX_COPIES as i64))]
    min_copies: u8,
}

/// Arguments of `atoll pool attach`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll pool attach home /mnt/disk/home

For a disk that comes from another machine, or when the node's own directory was lost.")]
pub(super) struct AttachArgs {
    /// The pool's name on this node
    name: String,

    /// The directory that holds the pool's files
    #[arg(value_name = "FILES")]
    files: PathBuf,
}

/// Makes a pool.
pub(super) async fn create(args: &CreateArgs, global: &Global) -> Result<(), Failure> {
    let what = format!("cannot make pool {}", args.name);
    if args.min_copies > args.copies {
        return Err(Failure::new(Exit::Usage, what).because(format!(
            "changes cannot need {} copies where files have {}",
            args.min_copies, args.copies
        )));
    }
    let node = global.dir()?;
    records::check_free(&node, &args.name, &what)?;
    // Before the pool is made: it would be one that no node knows.
    records::make_place(&node, &what)?;
    let is_new = make_directory(&args.files, &what)?;
    let made = create_in(args, &what).await;
    if made.is_err() && is_new {
        let _ = std::fs::remove_dir(&args.files);
    }
    let record = made?;
    records::add(&node, &args.name, &record, &what)?;
    if !global.quiet {
        note!("made pool {} in {}", args.name, record.dir.display());
        note!("`atoll mount {0} MNT` and `atoll nfs {0}` serve it", args.name);
    }
    Ok(())
}

async fn create_in(args: &CreateArgs, what: &str) -> Result<PoolRecord, Failure> {
    let dir = canonical(&args.files, what)?;
    let disk = disk(&dir, what)?;
    let settings = PoolSettings::new(random_bytes()?, args.level);
    let made = atoll_pool::create(&disk, settings).await;
    made.map_err(|error| create_failure(&error, &dir, what))?;
    let (copies, min_copies) =
        (Some(args.copies), Some(args.min_copies).filter(|least| *least > 1));
    Ok(PoolRecord { dir, pool: hex(&settings.pool), copies, min_copies, group: None })
}

pub(super) fn create_failure(error: &CreateError, dir: &Path, what: &str) -> Failure {
    let exit = match error {
        CreateError::NotEmpty(_) | CreateError::Level => Exit::Usage,
        CreateError::Unfit(_) | CreateError::Disk(..) => Exit::Failed,
    };
    let failure = Failure::new(exit, what).because(format!("{}: {error}", dir.display()));
    match error {
        CreateError::NotEmpty(name) if name == atoll_pool::OWN_DIRECTORY => {
            failure.advice("It may hold a pool: `atoll pool attach` lets this node know it.")
        }
        _ => failure,
    }
}

/// Makes a directory that does not exist; whether it is new.
pub(super) fn make_directory(dir: &Path, what: &str) -> Result<bool, Failure> {
    match DirBuilder::new().mode(0o700).create(dir) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(Failure::io(what, &error).because(format!("{}: {error}", dir.display()))),
    }
}

pub(super) fn canonical(dir: &Path, what: &str) -> Result<PathBuf, Failure> {
    dir.canonicalize()
        .map_err(|error| Failure::io(what, &error).because(format!("{}: {error}", dir.display())))
}

/// Lets the node know a pool.
pub(super) async fn attach(args: &AttachArgs, global: &Global) -> Result<(), Failure> {
    let what = format!("cannot attach pool {}", args.name);
    let node = global.dir()?;
    records::check_free(&node, &args.name, &what)?;
    let dir = canonical(&args.files, &what)?;
    // A machine that joined later has no member of the first group there.
    let of_group = pools::directories(&dir).map_err(|error| Failure::io(&*what, &error))?;
    let of_group = of_group.into_iter().next().map_or(dir.clone(), |(_, path)| path);
    let settings = atoll_pool::read_settings(&disk(&of_group, &what)?).await;
    let settings = settings.map_err(|error| failure(&error, &what))?;
    let map = atoll_pool::read_map(&disk(&of_group, &what)?).await;
    let token = hex(&random_bytes::<16>()?);
    let group = map.map_err(|error| failure(&error, &what))?.map(|_| GroupRecord {
        level: settings.level,
        token,
        joins: None,
        is_leaving: false,
        is_without_files: false,
        is_set_down: false,
    });
    let pool = hex(&settings.pool);
    let record = PoolRecord { dir, pool, copies: None, min_copies: None, group };
    records::check_other(&node, (&args.name, &record.pool), &what)?;
    records::add(&node, &args.name, &record, &what)?;
    super::tell_node(&record, global).await;
    if !global.quiet {
        note!("pool {} is in {}", args.name, record.dir.display());
    }
    Ok(())
}
