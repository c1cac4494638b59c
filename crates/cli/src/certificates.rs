//! Keeps what this node's user shares: the leases of its shared volumes, and the certificates of those who
//! may write them, and of the user's groups. Runs beside the node, like the replay of spools.
//!
//! Both are due once a day. What cannot be renewed now is tried again at the next look: a certificate
//! lasts for six days more, a lease for weeks.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use atoll_dht::Blocks;
use atoll_env::Instant;
use atoll_volume::shared::access::groups::{renew, renew_volume};
use atoll_volume::shared::access::{AccessError, Renewal, read_volume};
use atoll_volume::shared::sealing::Sealing;
use atoll_volume::shared::upkeep::{self, Kept};

use crate::connection;
use crate::failure::Failure;
use crate::user;

/// The first look: the node has joined the ring by then.
const FIRST_AFTER: Duration = Duration::from_secs(60);
/// How often it is looked which are due: one block is read for each volume and group.
const LOOK_EVERY: Duration = Duration::from_secs(3600);

/// How often the leases of a volume are extended: every inode of it is read.
const KEEP_EVERY: Duration = Duration::from_secs(24 * 3600);

/// Runs until it is aborted.
pub(crate) async fn run(node: PathBuf) {
    let mut kept = BTreeMap::new();
    tokio::time::sleep(FIRST_AFTER).await;
    loop {
        match renew_all(&node, &mut kept).await {
            Ok(failed) => failed.iter().for_each(|(of, why)| {
                tracing::warn!("certificates or leases of {of} were not renewed: {why}");
            }),
            Err(failure) => tracing::warn!("nothing shared was renewed: {failure}"),
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// Renews what is due; says what could not be, and why. `kept` are the volumes whose leases were extended,
/// and when.
async fn renew_all(
    node: &Path,
    kept: &mut BTreeMap<String, Instant>,
) -> Result<BTreeMap<String, String>, Failure> {
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
        let record = match read_volume(&blocks, key.volume_id()).await {
            Ok(Some((_, record))) => record,
            // Not a shared one, or none at all.
            Ok(None) | Err(AccessError::Bad { .. }) => continue,
            Err(error) => {
                note(format!("volume {name}"), Err(error.to_string()));
                continue;
            }
        };
        let outcome = renew_volume(&env, &blocks, &key, &record).await;
        note(format!("volume {name}"), outcome.map_err(|error| error.to_string()));
        let now = env.now();
        if kept.get(&name).is_some_and(|at| now.since(*at) < KEEP_EVERY) {
            continue;
        }
        let sealing = Sealing::of_owner(&key, record.read_epoch());
        match upkeep::keep(&env, &blocks, key.volume_id(), record.root, &sealing).await {
            Ok(Kept { inodes, renewed, lacking: 0, unread: 0, .. }) => {
                tracing::info!(
                    "volume {name}: leases of {renewed} blocks, {inodes} inodes renewed"
                );
                kept.insert(name, now);
            }
            Ok(Kept { lacking, unread, named, .. }) => {
                let first = named.first().map(|why| format!(" ({why})")).unwrap_or_default();
                let why =
                    format!("{lacking} blocks are nowhere, {unread} inodes cannot be read{first}");
                note(format!("volume {name}"), Err(why));
                kept.insert(name, now);
            }
            Err(error) => note(format!("volume {name}"), Err(error.to_string())),
        }
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
