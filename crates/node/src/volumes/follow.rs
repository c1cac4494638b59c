//! The newest version of a volume that a mount writes becomes the one whose leases are renewed.
//!
//! A mount gives its node a list of its blocks from time to time (`keep`). One that dies has put
//! roots after its last list: the renewer finds the newest on the ring, and lists its blocks itself.

use atoll_dht::GetError;

use super::lease_renewer::LeaseRenewer;
use crate::control::volume_error::VolumeError;

impl LeaseRenewer {
    /// Replaces the list of volume `name`, which is of version `listed`, if a mount has put a newer
    /// one; whether it did.
    ///
    /// # Errors
    /// Why the newest version cannot be listed, for people. The former list stays.
    pub(super) async fn follow(&self, name: &str, listed: u64) -> Result<bool, String> {
        let Some(walk) = &self.walk else { return Ok(false) };
        let volume = name.to_owned();
        let keys = self.off_thread(move |volumes| -> Result<_, VolumeError> {
            let is_mounted = volumes.is_mounted(&volume)?;
            Ok(is_mounted.then_some((volumes.key(&volume)?, volumes.read_key(&volume)?)))
        });
        let Some((key, read_key)) = keys.await.map_err(|error| error.to_string())? else {
            return Ok(false);
        };
        let id = key.volume_id();
        let newest = match self.blocks.get_signed(id.root_key()).await {
            Ok(newest) if newest.version > listed => newest,
            // The pass that follows puts the list's root again.
            Ok(_) | Err(GetError::NotFound { .. } | GetError::Removed { .. }) => return Ok(false),
            Err(error) => return Err(error.to_string()),
        };
        let (env, blocks) = (self.env.clone(), self.blocks.clone());
        let below = walk.blocks_below(env, blocks, id, newest.clone(), read_key).await?;
        tracing::info!("volume {name}: version {} is kept from now on", newest.version);
        let (volume, session) = (name.to_owned(), self.env.random_u64());
        let now = self.now_unix_secs();
        let adopt =
            self.off_thread(move |volumes| volumes.adopt(&volume, session, &newest, &below, now));
        match adopt.await {
            // The mount lives, and has given a newer list.
            Ok(()) | Err(VolumeError::Superseded { .. }) => Ok(true),
            Err(error) => Err(error.to_string()),
        }
    }
}
