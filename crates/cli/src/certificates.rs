//! Renews the certificates of those who may write what this node's user shares: of members of its shared
//! volumes and of the user's groups. Runs beside the node, like the replay of spools.
//!
//! A certificate is due once a day. What cannot be renewed now is tried again at the next look; it lasts
//! for six days more.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use atoll_dht::Blocks;
use atoll_volume::shared::access::groups::{renew, renew_volume};
use atoll_volume::shared::access::{AccessError, Renewal, read_volume};

use crate::connection;
use crate::failure::Failure;
use crate::user;

/// The first look: the node has joined the ring by then.
const FIRST_AFTER: Duration = Duration::from_secs(60);
/// How often it is looked which are due: one block is read for each volume and group.
const LOOK_EVERY: Duration = Duration::from_secs(3600);

/// Runs until it is aborted.
pub(crate) async fn run(node: PathBuf) {
    tokio::time::sleep(FIRST_AFTER).await;
    loop {
        match renew_all(&node).await {
            Ok(failed) => failed.iter().for_each(|(of, why)| {
                tracing::warn!("certificates of {of} were not renewed: {why}");
            }),
            Err(failure) => tracing::warn!("certificates were not renewed: {failure}"),
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// Renews what is due; says what could not be, and why.
async fn renew_all(node: &Path) -> Result<BTreeMap<String, String>, Failure> {
    let (env, client) = connection::to_node_in(node).await?;
    let blocks: Arc<dyn Blocks> = client.clone();
    let mut failed = BTreeMap::new();
    let mut note = |of: String, outcome: Result<Renewal, String>| match outcome {
        Ok(Renewal { renewed: 0, dropped: 0 }) => {}
        Ok(Renewal { renewed, dropped }) => {
            tracing::info!("certificates of {of}: {renewed} renewed, {dropped} ended");
        }
        Err(why) => drop(failed.insert(of, why)),
    };
    let volumes = client.volumes().await.map_err(connection::failure)?;
    for volume in volumes.into_iter().filter(|volume| volume.source.is_none()) {
        let name = volume.name;
        let key = client.named_volume(&name).await.map_err(connection::failure)?.key;
        let outcome = match read_volume(&blocks, key.volume_id()).await {
            Ok(Some((_, record))) => renew_volume(&env, &blocks, &key, &record).await,
            // Not a shared one, or none at all.
            Ok(None) | Err(AccessError::Bad { .. }) => continue,
            Err(error) => Err(error),
        };
        note(format!("volume {name}"), outcome.map_err(|error| error.to_string()));
    }
    let names = user::groups(node);
    if let Some(user) = user::key(node)? {
        for name in names {
            let outcome = renew(&env, &blocks, &user::group_key(&user, &name)).await;
            note(format!("group {name}"), outcome.map_err(|error| error.to_string()));
        }
    }
    Ok(failed)
}
