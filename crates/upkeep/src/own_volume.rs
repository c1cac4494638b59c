//! Volumes whose keys this node has, found by their names.

use std::sync::Arc;

use atoll_env::BoxFuture;
use atoll_key::{BlockHash, SignedBlock};
use atoll_node::{Client, ClientError, Volume, VolumeStatus};
use atoll_volume::owned::LeaseKeeper;

use crate::user::{self, UserError};

/// Why there is no volume of a name to be written.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    /// The node did not answer, or refused.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// How it was joined cannot be read.
    #[error(transparent)]
    User(#[from] UserError),
    /// It is a shared volume of another node.
    #[error("this node has joined it, and does not have the volume's key")]
    Joined,
    /// There is none.
    #[error("this node has no volume of that name")]
    Unknown,
    /// It follows a directory.
    #[error("it is published from {source_dir}, and the next publish would undo what is written")]
    Published {
        /// The directory.
        source_dir: String,
        /// The volume's address.
        address: String,
    },
}

/// The user and group of this process.
pub fn owner() -> (u32, u32) {
    (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw())
}

/// What the node knows of its volume of this name.
pub async fn status(client: &Client, name: &str) -> Result<VolumeStatus, FindError> {
    let volumes = client.volumes().await?;
    match volumes.into_iter().find(|volume| volume.name == name) {
        Some(volume) => Ok(volume),
        None if user::joined(client.dir(), name)?.is_some() => Err(FindError::Joined),
        None => Err(FindError::Unknown),
    }
}

/// The volume of this name, which was made by `atoll volume create`.
pub async fn find(client: &Client, name: &str) -> Result<Volume, FindError> {
    let VolumeStatus { source, address, .. } = status(client, name).await?;
    match source {
        Some(source_dir) => Err(FindError::Published { source_dir, address }),
        None => Ok(client.named_volume(name).await?),
    }
}

/// Makes the node renew the leases of each version that a mount has written.
pub struct KeepVersions {
    client: Arc<Client>,
    name: String,
}

impl KeepVersions {
    /// A keeper for the volume `name`.
    pub fn new(client: Arc<Client>, name: &str) -> KeepVersions {
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
