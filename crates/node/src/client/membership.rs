//! Asking the local node about the network's members.

use std::time::Duration;

use atoll_key::PeerId;

use super::{Client, ClientError};
use crate::control::body::Json;
use crate::control::calls;
use crate::control::message::{self, Empty};
use crate::status::{MemberList, Rotated};

impl Client {
    /// The members of the network that the node knows.
    pub async fn members(&self) -> Result<MemberList, ClientError> {
        self.ask::<calls::Members>(Empty {}).await.map(|Json(members)| members)
    }

    /// Replaces the network's secret and removes nodes. The former secret stays good for
    /// `overlap`, for members that are away.
    ///
    /// # Errors
    /// If the node does not hold the administrator's key, or the wish makes no sense.
    pub async fn rotate_secret(
        &self,
        remove: &[PeerId],
        overlap: Duration,
    ) -> Result<Rotated, ClientError> {
        let remove = remove.iter().flat_map(|id| id.0).collect();
        let call = message::Rotate { remove, overlap_secs: overlap.as_secs() };
        self.ask::<calls::RotateSecret>(call).await.map(|Json(rotated)| rotated)
    }
}
