//! Brings to the ring what mounts that have died have left in the spools of this node.
//!
//! The node looks at its spools from time to time. One that has changes and that no mount had at two
//! looks is replayed as by a mount, which ends at once: a user who mounts the volume again soon
//! after a crash is not in its way. What the ring does not take stays for the next look.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use atoll_volume::owned::{WritableFs, WriteOptions};

use crate::connection;
use crate::failure::Failure;
use crate::own_volume;
use crate::spool;

/// How often the spools are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(30);

/// Runs until it is aborted.
pub(crate) async fn run(node: PathBuf) {
    // By name: why the last replay failed, if there was one.
    let mut left: BTreeMap<String, Option<String>> = BTreeMap::new();
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
    }
}

/// The volumes with changes in a spool that no mount has.
async fn left_by_mounts(node: &Path) -> Vec<String> {
    let node = node.to_owned();
    let pending = tokio::task::spawn_blocking(move || spool::pending(&node)).await;
    let left = pending.unwrap_or_default().into_iter();
    left.filter(|spool| !spool.mounted && spool.bytes > 0).map(|spool| spool.name).collect()
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
    let keeper = Arc::new(own_volume::KeepVersions::new(client.clone(), name));
    let fs = WritableFs::open(env, client, volume.key, options, keeper, Some(spool)).await;
    let fs = fs.map_err(|error| own_volume::failure(&what, error))?;
    fs.end().await.map_err(|error| own_volume::failure(&what, error.into()))?;
    tracing::info!("what a mount has left of {name} is on the ring");
    Ok(())
}
