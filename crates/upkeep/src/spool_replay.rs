//! Brings to the ring what mounts that have died have left in the spools of this node.
//!
//! The node looks at its spools from time to time. One that has changes and that no mount had at two
//! looks is replayed as by a mount, which ends at once: a user who mounts the volume again soon
//! after a crash is not in its way. What the ring does not take stays for the next look.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use atoll_dht::Blocks;
use atoll_env::{Env, sleep};
use atoll_key::SecretKey;
use atoll_node::MakeSubsystem;
use atoll_volume::owned::{WritableFs, WriteOptions};
use atoll_volume::shared::{SharedFs, SharedOptions};

use crate::background::Background;
use crate::connection;
use crate::own_volume;
use crate::shared_spool::{self, Left};
use crate::spool;
use crate::user::{self, UserError};

/// How often the spools are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(30);

/// The replay as a subsystem.
pub(crate) fn subsystem() -> MakeSubsystem {
    Arc::new(|node| Arc::new(Background::new(node.env.clone(), run(node.env, node.dir))))
}

/// Runs until it is dropped.
async fn run(env: Env, node: PathBuf) {
    // By name: why the last replay failed, if there was one.
    let mut left: BTreeMap<String, Option<String>> = BTreeMap::new();
    // The same of shared volumes, by path.
    let mut left_shared: BTreeMap<PathBuf, Option<String>> = BTreeMap::new();
    loop {
        sleep(&*env, LOOK_EVERY).await;
        let before = std::mem::take(&mut left);
        for name in left_by_mounts(&node).await {
            let Some(told) = before.get(&name) else {
                left.insert(name, None);
                continue;
            };
            let failed = replay(&node, &name).await.err();
            let failed = failed.map(|why| is_not_on_ring(&name, why, told.as_deref()));
            left.extend(failed.map(|why| (name, Some(why))));
        }
        let before = std::mem::take(&mut left_shared);
        for spool in left_by_shared_mounts(&node).await {
            let (path, name) = (spool.path.clone(), spool.name.clone());
            let Some(told) = before.get(&path) else {
                left_shared.insert(path, None);
                continue;
            };
            let failed = replay_shared(&node, spool).await.err();
            let failed = failed.map(|why| is_not_on_ring(&name, why, told.as_deref()));
            left_shared.extend(failed.map(|why| (path, Some(why))));
        }
    }
}

/// Says why a replay has failed, unless that was said last time.
fn is_not_on_ring(name: &str, why: String, told: Option<&str>) -> String {
    if Some(&why[..]) != told {
        tracing::warn!("what a mount has left of {name} is not on the ring yet: {why}");
    }
    why
}

fn text(error: impl Display) -> String {
    error.to_string()
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
fn key_of(node: &Path, left: &Left) -> Result<Option<SecretKey>, UserError> {
    let joined = user::joined(node, &left.name)?.map(|joined| joined.user);
    let keys = user::key(node)?.into_iter().chain(joined);
    Ok(keys.into_iter().find(|key| key.user_id() == left.user))
}

async fn replay_shared(node: &Path, left: Left) -> Result<(), String> {
    let key = key_of(node, &left).map_err(text)?;
    let key = key.ok_or("the key of its user is not on this node")?;
    let (env, client) = connection::to_node(node).await.map_err(text)?;
    let opened = shared_spool::open_left(&left).map_err(text)?;
    // A mount that has come meanwhile does it itself.
    let Some(directory) = opened else { return Ok(()) };
    let (owner, options) = ((left.volume, key), SharedOptions::default());
    let fs = SharedFs::open_spooled(env, client, owner, options, directory).await;
    let fs = fs.map_err(text)?;
    fs.end().await.map_err(text)?;
    let spooled = fs.spooled();
    let refused = spooled.as_ref().and_then(|spooled| spooled.refused.as_deref());
    shared_spool::note_refused(&left.path, refused);
    match spooled {
        Some(spooled) => Err(spooled.why.to_string()),
        None => {
            tracing::info!("what a mount has left of {} is on the ring", left.name);
            Ok(())
        }
    }
}

async fn replay(node: &Path, name: &str) -> Result<(), String> {
    let (env, client) = connection::to_node(node).await.map_err(text)?;
    let volume = own_volume::find(&client, name).await.map_err(text)?;
    let options = WriteOptions {
        read_key: client.read_key(name).await.map_err(text)?,
        owner: own_volume::owner(),
        ..WriteOptions::default()
    };
    // A mount that has come meanwhile does it itself.
    let Some(spool) = spool::open(node, name).map_err(text)? else { return Ok(()) };
    let (blocks, read_key): (Arc<dyn Blocks>, _) = (client.clone(), options.read_key.as_ref());
    let overtaken =
        WritableFs::set_aside_overtaken(&env, &blocks, &volume.key, read_key, spool.clone()).await;
    if overtaken.map_err(text)?.is_some() {
        tracing::warn!(
            "another writer has overtaken what a mount has left: `atoll volume recover {name}`"
        );
        return Ok(());
    }
    let keeper = Arc::new(own_volume::KeepVersions::new(client.clone(), name));
    let fs = WritableFs::open(env, client, volume.key, options, keeper, Some(spool)).await;
    fs.map_err(text)?.end().await.map_err(text)?;
    tracing::info!("what a mount has left of {name} is on the ring");
    Ok(())
}
