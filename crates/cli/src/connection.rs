//! Connecting to the local node, and the messages when that fails.

use std::sync::Arc;
use std::time::Duration;

use atoll_env::Env;
use atoll_node::{Client, ClientError, ClientOptions, Status, VolumeError, shell_word};
use atoll_upkeep::connection;

use crate::failure::{Exit, Failure, TRY_AGAIN};
use crate::global::Global;

/// How long a mount waits for its node. A process that uses a mount waits in the kernel,
/// where it cannot be killed. Together with the time it takes to notice that a node hangs, this
/// gives an answer within 10 seconds. A node that is restarted is usually back in one or two.
const MOUNT_PATIENCE: Duration = Duration::from_secs(5);

/// How long a node may send nothing before a mount treats it as gone.
const MOUNT_SILENCE: Duration = Duration::from_secs(2);

/// A client of this directory's node: fails at once if none runs now, waits if the node
/// is restarted later.
pub(crate) async fn to_node(global: &Global) -> Result<(Env, Arc<Client>), Failure> {
    connection::to_node(&global.dir()?).await.map_err(failure)
}

/// A client for a mount, which reports soon that the node is gone.
pub(crate) async fn for_mount(global: &Global) -> Result<(Env, Arc<Client>), Failure> {
    let options = ClientOptions {
        patience: MOUNT_PATIENCE,
        gone_when_silent_for: Some(MOUNT_SILENCE),
        ..ClientOptions::default()
    };
    connection::connect(&global.dir()?, options).await.map_err(failure)
}

/// A client that fails as soon as the node is gone.
pub(crate) async fn impatient(global: &Global) -> Result<Client, Failure> {
    Client::connect(global.dir()?).await.map_err(failure)
}

/// The node's state.
pub(crate) async fn status(global: &Global) -> Result<Status, Failure> {
    impatient(global).await?.status().await.map_err(failure)
}

/// The failure to show for `error`.
pub(crate) fn failure(error: ClientError) -> Failure {
    let what = "the local node cannot be used";
    match error {
        ClientError::NoNode { dir } => {
            let dir = dir.display().to_string();
            Failure::new(Exit::NoNode, format!("no node runs in {dir}")).advice(format!(
                "Start one with `atoll up --dir {}`, or name another directory with --dir or \
                 ATOLL_DIR.",
                shell_word(&dir)
            ))
        }
        ClientError::TimedOut { .. } => {
            Failure::new(Exit::Unavailable, what).because(error).advice(TRY_AGAIN)
        }
        ClientError::Volume(VolumeError::Unknown { .. } | VolumeError::Unpublished { .. }) => {
            Failure::new(Exit::NotFound, error.to_string())
                .advice("`atoll volumes` lists what there is.")
        }
        ClientError::Volume(_) => Failure::new(Exit::Failed, error.to_string()),
        ClientError::Subsystem(why) => Failure::new(Exit::Failed, why),
        ClientError::Unfit(why) => Failure::new(Exit::Usage, why),
        ClientError::Dir(_) => Failure::new(Exit::Failed, what).because(error),
        ClientError::Refused { .. } => Failure::new(Exit::Failed, what)
            .because(error)
            .advice("If atoll was upgraded, restart the node."),
    }
}
