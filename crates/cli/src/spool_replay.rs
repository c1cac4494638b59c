//! Brings to the ring what mounts that have died have left in the spools of this node.
//!
//! The node looks at its spools from time to time. One that has changes and that no mount had at two
//! looks is replayed as by a mount, which ends at once: a user who mounts the volume again soon
//! after a crash is not in its way. What the ring does not take stays for the next look.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use atoll_dht::Blocks;
use atoll_key::SecretKey;
use atoll_volume::owned::{WritableFs, WriteOptions};
use atoll_volume::shared::{SharedFs, SharedOptions};

use crate::connection;
use crate::failure::{Exit, Failure};
use crate::own_volume;
use crate::shared_spool::{self, Left};
use crate::spool;
use crate::user;

/// How often the spools are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(30);

/// Runs until it is aborted.
pub(crate) async fn run(node: PathBuf) {
    // By name: why the last replay failed, if there was one.
    let mut left: BTreeMap<String, Option<String>> = BTreeMap::new();
    // The same of shared volumes, by path.
    let mut left_shared: BTreeMap<PathBuf, Option<String>> = BTreeMap::new();
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let before = std::mem::take(&mut left);
        for name in left_by_mounts(&node).await {
            let Some(told) = before.get(&name) else {
                left.insert(name, None);
                continue;
            };
            let failed = replay(&node, &name).await.err().map(|failure| failure.to_string());
            if let Some(failure) = failed.as_ref().filter(|_| failed != *told) {
                tracing::warn!("{failure}");
            }
            left.extend(failed.map(|failure| (name, Some(failure))));
        }
        let before = std::mem::take(&mut left_shared);
        for spool in left_by_shared_mounts(&node).await {
            let path = spool.path.clone();
            let Some(told) = before.get(&path) else {
                left_shared.insert(path, None);
                continue;
            };
            let failed = replay_shared(&node, spool).await.err().map(|failure| failure.to_string());
            if let Some(failure) = failed.as_ref().filter(|_| failed != *told) {
                tracing::warn!("{failure}");
            }
            left_shared.extend(failed.map(|failure| (path, Some(failure))));
        }
    }
}

/// The volumes with changes in a spool that no mount has.
async fn left_by_mounts(node: &Path) -> Vec<String> {
    let node = node.to_owned();
    let pending = tokio::task::spawn_blocking(move || spool::pending(&node)).await;
    let left = pending.unwrap_or_default().into_iter();
    left.filter(|spool| !spool.mounted && spool.bytes > 0).map(|spool| spool.name).collect()
}

async fn left_by_shared_mounts(node: &Path) -> Vec<Left> {
    let node = node.to_owned();
    let left = tokio::task::spawn_blocking(move || shared_spool::left(&node)).await;
    left.unwrap_or_default()
}

/// The key of the user whose mount has left a spool: this node's, or that of an invitation.
fn key_of(node: &Path, left: &Left) -> Result<Option<SecretKey>, Failure> {
    let joined = user::joined(node, &left.name)?.map(|joined| joined.user);
    let keys = user::key(node)?.into_iter().chain(joined);
    Ok(keys.into_iter().find(|key| key.user_id() == left.user))
}

async fn replay_shared(node: &Path, left: Left) -> Result<(), Failure> {
    let what = format!("what a mount has left of {} is not on the ring yet", left.name);
    let failure = || Failure::new(Exit::Unavailable, &what);
    let key = key_of(node, &left)?;
    let key = key.ok_or_else(|| failure().because("the key of its user is not on this node"))?;
    let (env, client) = connection::to_node_in(node).await?;
    let opened = shared_spool::open_left(&left).map_err(|error| Failure::io(&what, &error))?;
    // A mount that has come meanwhile does it itself.
    let Some(directory) = opened else { return Ok(()) };
    let (owner, options) = ((left.volume, key), SharedOptions::default());
    let fs = SharedFs::open_spooled(env, client, owner, options, directory).await;
    let fs = fs.map_err(|error| failure().because(error))?;
    fs.end().await.map_err(|error| failure().because(error))?;
    let spooled = fs.spooled();
    let refused = spooled.as_ref().and_then(|spooled| spooled.refused.as_deref());
    shared_spool::note_refused(&left.path, refused);
    match spooled {
        Some(spooled) => Err(failure().because(spooled.why)),
        None => {
            tracing::info!("what a mount has left of {} is on the ring", left.name);
            Ok(())
        }
    }
}

async fn replay(node: &Path, name: &str) -> Result<(), Failure> {
    let what = format!("what a mount has left of {name} is not on the ring yet");
    let (env, client) = connection::to_node_in(node).await?;
    let volume = own_volume::find(&client, name, &what).await?;
    let options = WriteOptions {
        read_key: client.read_key(name).await.map_err(connection::failure)?,
        owner: own_volume::owner(),
        ..WriteOptions::default()
    };
    // A mount that has come meanwhile does it itself.
    let Some(spool) = spool::open(node, name, &what)? else { return Ok(()) };
    let (blocks, read_key): (Arc<dyn Blocks>, _) = (client.clone(), options.read_key.as_ref());
    let overtaken =
        WritableFs::set_aside_overtaken(&env, &blocks, &volume.key, read_key, spool.clone()).await;
    if overtaken.map_err(|error| own_volume::failure(&what, error))?.is_some() {
        tracing::warn!(
            "another writer has overtaken what a mount has left: `atoll volume recover {name}`"
        );
        return Ok(());
    }
    let keeper = Arc::new(own_volume::KeepVersions::new(client.clone(), name));
    let fs = WritableFs::open(env, client, volume.key, options, keeper, Some(spool)).await;
    let fs = fs.map_err(|error| own_volume::failure(&what, error))?;
    fs.end().await.map_err(|error| own_volume::failure(&what, error.into()))?;
    tracing::info!("what a mount has left of {name} is on the ring");
    Ok(())
}
