//! Connecting to a node that must be running, and may be restarted later.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use atoll_env::{Env, TokioRuntime};
use atoll_node::{Client, ClientError, ClientOptions};

/// How long a transfer waits for a node that is being restarted. A guess: an upgrade
/// and the store's reopening fit in.
const PATIENCE: Duration = Duration::from_secs(60);

/// A client of the node in `dir`: fails at once if none runs now, waits if the node is restarted
/// later.
pub async fn to_node(dir: &Path) -> Result<(Env, Arc<Client>), ClientError> {
    let options = ClientOptions { patience: PATIENCE, ..ClientOptions::default() };
    connect(dir, options).await
}

/// The same with other options.
pub async fn connect(
    dir: &Path,
    options: ClientOptions,
) -> Result<(Env, Arc<Client>), ClientError> {
    Client::connect(dir).await?;
    let client = Client::connect_with(dir, options).await?;
    Ok((Arc::new(TokioRuntime::current()), Arc::new(client)))
}
