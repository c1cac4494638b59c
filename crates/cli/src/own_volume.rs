//! A node's own volumes for commands: finds one by its name, and ends a mount that writes one.

use std::ffi::OsStr;
use std::fmt::Display;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use atoll_env::Env;
use atoll_gateway::fuse;
use atoll_key::{VolumeAddress, VolumeId};
use atoll_node::{Client, Volume, VolumeStatus, shell_word};
use atoll_upkeep::own_volume::{self, FindError};
pub(crate) use atoll_upkeep::own_volume::{KeepVersions, owner};
use atoll_volume::owned::{FlushError, Root, WritableFs, WriteError};

use crate::address::Address;
use crate::connection;
use crate::failure::{Exit, Failure};
use crate::moment::Moment;
use crate::read_key::Found;
use crate::units;

/// How long a mount that has ended tries to bring what was written to the ring.
const END_LIMIT: Duration = Duration::from_secs(600);

/// The pause between two attempts.
const RETRY_AFTER: Duration = Duration::from_secs(5);

/// What the node knows of its volume of this name.
pub(crate) async fn status(
    client: &Client,
    name: &str,
    what: &str,
) -> Result<VolumeStatus, Failure> {
    own_volume::status(client, name).await.map_err(|error| not_found(name, what, error))
}

/// The volume of this name, which was made by `atoll volume create`.
pub(crate) async fn find(client: &Client, name: &str, what: &str) -> Result<Volume, Failure> {
    own_volume::find(client, name).await.map_err(|error| not_found(name, what, error))
}

fn not_found(name: &str, what: &str, error: FindError) -> Failure {
    let failure = |exit| Failure::new(exit, what).because(&error);
    match error {
        FindError::Client(error) => connection::failure(error),
        FindError::User(error) => error.into(),
        FindError::Joined => {
            failure(Exit::Failed).advice("Ask its owner, on whose node it was made.")
        }
        FindError::Unknown => failure(Exit::NotFound).advice(format!(
            "`atoll volume create {}` makes one; `atoll volumes` lists those there are.",
            shell_word(name)
        )),
        FindError::Published { ref address, .. } => failure(Exit::Failed)
            .advice(format!("Change files there, or mount {address} to read it.")),
    }
}

/// For how long yet a mount has said that it writes the volume, if one has.
pub(crate) fn claim(env: &Env, root: &Root) -> Option<Duration> {
    let until_ms = root.mounted.writer?.until_unix_ms;
    until_ms.checked_sub(env.unix_ms()).filter(|left| *left > 0).map(Duration::from_millis)
}

/// That a mount writes the volume.
pub(crate) fn is_written(what: &str, left: Duration) -> Failure {
    Failure::new(Exit::Failed, what).because(format!(
        "a mount writes it; if that is gone without having ended, the volume is free in {}",
        units::whole_secs(left.as_secs())
    ))
}

/// What a mount that writes a volume is called in the kernel's table: also another node of this
/// machine may have a volume of that name.
pub(crate) fn fs_name(name: &str, volume: VolumeId) -> String {
    let address = VolumeAddress(volume).to_string();
    let (_, key) = address.split_once(':').expect("an address has a scheme");
    format!("atoll:{name}:{}", &key[..12])
}

/// Where this machine has mounted a volume to write it.
pub(crate) fn mounts(name: &str, volume: VolumeId) -> Vec<PathBuf> {
    fuse::mounts_of(OsStr::new(&fs_name(name, volume))).unwrap_or_default()
}

/// The address of the volume of this name, at a time if one is given, and its read key.
pub(crate) async fn address(
    client: &Client,
    name: &str,
    at: Option<Moment>,
    what: &str,
) -> Result<(Address, Found), Failure> {
    status(client, name, what).await?;
    let id = client.named_volume(name).await.map_err(connection::failure)?.key.volume_id();
    let key = client.read_key(name).await.map_err(connection::failure)?;
    let address = Address { volume: VolumeAddress(id), read_key: None, at, path: Vec::new() };
    Ok((address, Found { key, optional: false }))
}

/// Why a volume cannot be written.
pub(crate) fn failure(what: &str, error: WriteError) -> Failure {
    match error {
        WriteError::Get(error) => Failure::get(what, &error),
        WriteError::Busy { .. } => Failure::new(Exit::Unavailable, what).because(&error).advice(
            "`--take-over` ends its writing; what it has not written then stays in its spool.",
        ),
        WriteError::Flush(FlushError::Put(error)) => Failure::put(what, &error),
        error => Failure::new(Exit::Failed, what).because(error),
    }
}

/// Tries to bring what a mount has written to the ring, until it is there, the error is a final one, or
/// that has taken too long; then the last error.
pub(crate) async fn until_on_ring<E: Display>(
    attempt: impl AsyncFn() -> Result<(), E>,
    is_final: impl Fn(&E) -> bool,
) -> Result<(), E> {
    let begin = Instant::now();
    loop {
        match attempt().await {
            Ok(()) => return Ok(()),
            Err(error) if is_final(&error) || begin.elapsed() >= END_LIMIT => return Err(error),
            Err(error) => tracing::warn!("what was written is not on the ring yet: {error}"),
        }
        tokio::time::sleep(RETRY_AFTER).await;
    }
}

/// Brings what a mount has written to the ring, and lets others write the volume.
pub(crate) async fn end(fs: &WritableFs, what: &str) -> Result<(), Failure> {
    let is_left_out = |error: &FlushError| matches!(error, FlushError::LeftOut { .. });
    let is_final =
        |error: &FlushError| is_left_out(error) || matches!(error, FlushError::Fenced { .. });
    let waits = "what was written last stays in the spool";
    let left = || Failure::new(Exit::Unavailable, format!("{what}: {waits}"));
    match until_on_ring(async || fs.end().await, is_final).await {
        Ok(()) => Ok(()),
        Err(error) if is_left_out(&error) => Err(left().because(error).advice(
            "All else is on the ring. The node tries again each minute, and so does the next mount; \
             files can be removed there.",
        )),
        Err(error) if is_final(&error) => Err(left()
            .because(error)
            .advice("The next mount, or the node, sets it aside for `atoll volume recover`.")),
        Err(_) => Err(left().because("the ring did not take it").advice(
            "The node brings it to the ring when it can, or the next mount of the volume.",
        )),
    }
}
