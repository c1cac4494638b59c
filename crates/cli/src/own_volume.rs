//! Finds a node's own volume by its name, and ends a mount that writes one.

use std::sync::Arc;
use std::time::Duration;

use atoll_env::BoxFuture;
use atoll_key::{BlockHash, SignedBlock, VolumeAddress};
use atoll_node::{Client, Volume, VolumeStatus};
use atoll_volume::owned::{FlushError, LeaseKeeper, WritableFs, WriteError};

use crate::address::Address;
use crate::connection;
use crate::failure::{Exit, Failure};
use crate::moment::Moment;
use crate::read_key::Found;

/// How long a mount that has ended tries to bring what was written to the ring.
const END_LIMIT: Duration = Duration::from_secs(600);

/// The pause between two attempts.
const RETRY_AFTER: Duration = Duration::from_secs(5);

/// The user and group of this process.
pub(crate) fn owner() -> (u32, u32) {
    (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw())
}

/// The volume of this name, which was made by `atoll volume create`.
pub(crate) async fn find(client: &Client, name: &str, what: &str) -> Result<Volume, Failure> {
    let known = known(client, name, what).await?;
    if let Some(source) = &known.source {
        return Err(Failure::new(Exit::Failed, what)
            .because(format!(
                "it is published from {source}, and the next publish would undo \
                              what is written"
            ))
            .advice(format!("Change files there, or mount {} to read it.", known.address)));
    }
    client.named_volume(name).await.map_err(connection::failure)
}

/// What the node knows of the volume of this name, however it was made.
async fn known(client: &Client, name: &str, what: &str) -> Result<VolumeStatus, Failure> {
    let volumes = client.volumes().await.map_err(connection::failure)?;
    volumes.into_iter().find(|volume| volume.name == name).ok_or_else(|| {
        let advice = format!(
            "`atoll volume create {name}` makes one; `atoll volumes` lists those there are."
        );
        Failure::new(Exit::NotFound, what)
            .because("this node has no volume of that name")
            .advice(advice)
    })
}

/// The address of the volume of this name, at a time if one is given, and its read key.
pub(crate) async fn address(
    client: &Client,
    name: &str,
    at: Option<Moment>,
    what: &str,
) -> Result<(Address, Found), Failure> {
    known(client, name, what).await?;
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

/// Brings what a mount has written to the ring, and lets others write the volume.
pub(crate) async fn end(fs: &WritableFs, what: &str) -> Result<(), Failure> {
    let work = async {
        loop {
            match fs.end().await {
                Ok(()) => return Ok(()),
                Err(error @ FlushError::Fenced { .. }) => return Err(error),
                Err(error) => tracing::warn!("what was written is not on the ring yet: {error}"),
            }
            tokio::time::sleep(RETRY_AFTER).await;
        }
    };
    let waits = "what was written last stays in the spool";
    let left = || Failure::new(Exit::Unavailable, format!("{what}: {waits}"));
    match tokio::time::timeout(END_LIMIT, work).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(left()
            .because(error)
            .advice("The next mount sets it aside for `atoll volume recover`.")),
        Err(_) => Err(left()
            .because("the ring did not take it")
            .advice("The next mount of the volume brings it to the ring.")),
    }
}

/// Makes the node renew the leases of each version that a mount has written.
pub(crate) struct KeepVersions {
    client: Arc<Client>,
    name: String,
}

impl KeepVersions {
    /// A keeper for the volume `name`.
    pub(crate) fn new(client: Arc<Client>, name: &str) -> KeepVersions {
        KeepVersions { client, name: name.to_owned() }
    }
}

impl LeaseKeeper for KeepVersions {
    fn keep(
        &self,
        root: SignedBlock,
        blocks: Vec<BlockHash>,
    ) -> BoxFuture<'static, Result<(), String>> {
        let mut keep = self.client.keep(&self.name);
        Box::pin(async move {
            keep.add(&blocks).await.map_err(|error| error.to_string())?;
            keep.commit(&root).await.map_err(|error| error.to_string())
        })
    }
}
