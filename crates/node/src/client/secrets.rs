//! A volume's keys: out of the local node, into it, and away.

use atoll_key::VolumeSecret;

use super::{Client, ClientError};
use crate::control::calls;
use crate::control::message::{MarkMoved, VolumeName};

impl Client {
    /// All that it takes to write a volume.
    ///
    /// # Errors
    /// If there is no such volume.
    pub async fn volume_secret(&self, name: &str) -> Result<VolumeSecret, ClientError> {
        let call = VolumeName { name: name.to_owned() };
        self.ask::<calls::VolumeExport>(call).await.map(Into::into)
    }

    /// Takes over a volume whose keys were made elsewhere; whether it is new here.
    ///
    /// # Errors
    /// If another volume has its name.
    pub async fn import_volume(&self, secret: VolumeSecret) -> Result<bool, ClientError> {
        self.ask::<calls::VolumeImport>(secret.into()).await.map(|opened| opened.is_new)
    }

    /// Marks a volume as moved to another node, or as not moved. While it is marked it cannot be
    /// opened here, and its leases are renewed until the other node has taken over.
    ///
    /// # Errors
    /// If there is no such volume.
    pub async fn mark_moved(
        &self,
        name: &str,
        is_moved: bool,
    ) -> Result<VolumeSecret, ClientError> {
        let call = MarkMoved { name: name.to_owned(), is_moved };
        self.ask::<calls::VolumeMoved>(call).await.map(Into::into)
    }

    /// Removes a volume from this node, its keys included. The ring is told nothing.
    ///
    /// # Errors
    /// If there is no such volume.
    pub async fn forget_volume(&self, name: &str) -> Result<(), ClientError> {
        let call = VolumeName { name: name.to_owned() };
        self.ask::<calls::VolumeForget>(call).await.map(drop)
    }
}
