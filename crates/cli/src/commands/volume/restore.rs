//! `atoll volume restore`: an old state of a volume, or a part of one, becomes the present.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::sync::Arc;

use atoll_env::Env;
use atoll_node::Client;
use atoll_vfs::Errno;
use atoll_volume::owned::{
    CopyError, FlushError, RestoreError, VolumeFs, VolumeOptions, WritableFs, WriteError,
    WriteOptions,
};

use crate::address::Address;
use crate::connection;
use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::messages::note;
use crate::moment::{self, Moment};
use crate::own_volume;
use crate::read_key::Found;
use crate::reading::{self, Reading};
use crate::spool;
use crate::units;

/// Arguments of `atoll volume restore`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll volume restore work@2026-11-20T12:00
  atoll volume restore work@2026-11-20T12:00 docs/letter.txt
  atoll volume restore --force work@2026-11-20 docs

Times are UTC; `atoll volume history NAME` lists what is kept. Without PATH the whole volume is again as it
was then, and the state that it has now is kept in the history. A file with several names becomes
a file for each name. While the volume is mounted read-write, mount NAME@TIME beside it and copy.")]
pub(crate) struct Args {
    /// The name of one of this node's volumes, and a time: its newest state that is not younger
    #[arg(value_name = "NAME@TIME", value_parser = state)]
    state: (String, Moment),

    /// Only this file or directory of it; the rest of the volume stays
    path: Option<OsString>,

    /// Replace what has the name of PATH now
    #[arg(long, requires = "path")]
    force: bool,
}

fn state(text: &str) -> Result<(String, Moment), String> {
    match moment::split(text) {
        (name, Some(time)) => Ok((name.to_owned(), time.parse()?)),
        (name, None) => Err(format!("it needs a time, as in {name}@2026-11-20T12:00")),
    }
}

/// Restores.
pub(crate) async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let (name, moment) = &args.state;
    let what = format!("cannot restore {name}");
    let (env, client) = connection::to_node(global).await?;
    let volume = own_volume::find(&client, name, &what).await?;
    let (address, read_key) = own_volume::address(&client, name, Some(*moment), &what).await?;
    let options = WriteOptions {
        read_key: read_key.key.clone(),
        owner: own_volume::owner(),
        ..WriteOptions::default()
    };
    let elsewhere = format!("Mount {name}@{moment} elsewhere and copy from it.");
    let Some(spool) = spool::open(&global.dir()?, name, &what)? else {
        return Err(spool::in_use(&what).advice(elsewhere));
    };
    let keeper = Arc::new(own_volume::KeepVersions::new(client.clone(), name));
    let key = volume.key;
    let fs = WritableFs::open(env.clone(), client.clone(), key, options, keeper, Some(spool)).await;
    let fs = fs.map_err(|error| match error {
        WriteError::Busy { .. } => {
            Failure::new(Exit::Unavailable, &what).because(&error).advice(elsewhere)
        }
        error => own_volume::failure(&what, error),
    })?;
    let restored = match args.path.clone().map(OsStringExt::into_vec) {
        None => restore_all(&fs, &address, *moment, &what).await,
        Some(path) => {
            let old = old_state(env, client, &address, read_key).await;
            match old {
                Ok(old) => restore_path(&fs, &old, &path, args.force, &what).await,
                Err(failure) => Err(failure),
            }
        }
    };
    let ended = own_volume::end(&fs, &what).await;
    let told = restored?;
    ended?;
    if !global.quiet {
        note!("{told}");
    }
    Ok(())
}

async fn restore_all(
    fs: &WritableFs,
    address: &Address,
    moment: Moment,
    what: &str,
) -> Result<String, Failure> {
    match fs.restore(moment.unix_ms).await {
        Ok(Some(state)) => {
            Ok(format!("the volume is as it was on {}", moment::written(state.unix_ms)))
        }
        Ok(None) => Ok("the volume has not changed since then".into()),
        Err(RestoreError::Open(error)) => Err(reading::open_failure(address, error)),
        Err(RestoreError::Flush(FlushError::Put(error))) => Err(Failure::put(what, &error)),
        Err(error) => Err(Failure::new(Exit::Failed, what).because(error)),
    }
}

async fn old_state(
    env: Env,
    client: Arc<Client>,
    address: &Address,
    read_key: Found,
) -> Result<VolumeFs, Failure> {
    let options = VolumeOptions::default();
    let reading = Reading::through(env, client, address, read_key, options).await?;
    let (uid, gid) = own_volume::owner();
    Ok(VolumeFs::new(reading.env, reading.volume, uid, gid))
}

async fn restore_path(
    fs: &WritableFs,
    old: &VolumeFs,
    path: &[u8],
    replaces: bool,
    what: &str,
) -> Result<String, Failure> {
    let copied = fs.copy_from(old, path, replaces).await.map_err(|error| {
        let exit = match &error {
            CopyError::Call { errno: Errno::ENOENT, .. } => Exit::NotFound,
            CopyError::Call { errno: Errno::ETIMEDOUT, .. } => Exit::Unavailable,
            _ => Exit::Failed,
        };
        let failure = Failure::new(exit, what).because(&error);
        match error {
            CopyError::Exists { .. } => failure.advice("--force replaces it."),
            CopyError::Call { .. } => failure,
        }
    })?;
    let files = units::counted(copied.files, "file", "files");
    Ok(format!("{files} restored, {}", units::size(copied.bytes)))
}
