//! Opening a node's directory: its identity, its network and its settings, read or made.

use atoll_key::SecretKey;

use crate::config::{NodeConfig, StartError};
use crate::dir::{self, DirError, DirLock, NodeDir};
use crate::membership::open_admin_key;
use crate::network::{DEFAULT_REPLICAS, Network, StoredNetwork, check_replicas, random_seed};
use crate::peers::{PeerList, PeerMemory};
use crate::policy::Policy;
use crate::settings::SettingsStore;

/// What the directory says about the node before anything runs.
pub(crate) struct Opened {
    pub dir: NodeDir,
    pub lock: DirLock,
    pub identity: SecretKey,
    pub network: StoredNetwork,
    pub settings: SettingsStore,
    pub remembered: PeerMemory,
    pub is_founder: bool,
}

/// Takes the directory and reads or makes what a node needs to begin.
pub(crate) fn open(config: &NodeConfig) -> Result<Opened, StartError> {
    let root =
        std::path::absolute(&config.dir).map_err(DirError::io("cannot find", &config.dir))?;
    let dir = NodeDir::at(root);
    dir.prepare()?;
    let lock = dir.lock()?;
    let settings = SettingsStore::open(&dir, config)?;
    let policy = settings.present().policy();
    if config.storage_bytes.is_some() && !matches!(policy, Policy::Fixed { .. }) {
        let policy = policy.name();
        tracing::warn!(policy, "a size was given, which only counts where disk is given by size");
    }
    let (network, is_founder) = open_network(&dir, config, settings.present().has_joined())?;
    let identity = open_identity(&dir)?;
    let remembered = match PeerMemory::load(&dir) {
        Ok(peers) => peers,
        // Only a memory: the join code's peers and the neighbours replace it.
        Err(error) => {
            tracing::warn!("{error}");
            PeerMemory::default()
        }
    };
    Ok(Opened { dir, lock, identity, network, settings, remembered, is_founder })
}

fn open_identity(dir: &NodeDir) -> Result<SecretKey, DirError> {
    let path = dir.identity();
    if let Some(bytes) = dir::read_secret(&path)? {
        let seed = bytes.as_slice().try_into().map_err(|_| {
            DirError::damaged(&path, format!("it has {} bytes; a key has 32", bytes.len()))
        })?;
        return Ok(SecretKey::from_seed(seed));
    }
    let seed = random_seed();
    dir::create_atomically(&path, &seed)?;
    Ok(SecretKey::from_seed(&seed))
}

/// The directory's network: the one it has, the join code's, or a new one; and whether
/// this start founds it. A node that has never been on a ring (its first start failed, or
/// reached no peer) holds nothing yet and may still be given another code.
fn open_network(
    dir: &NodeDir,
    config: &NodeConfig,
    has_joined: bool,
) -> Result<(StoredNetwork, bool), StartError> {
    let stored = Network::load(dir)?;
    let (network, is_founder) = match (stored, &config.join) {
        (Some(stored), None) => {
            stored
                .network
                .agrees_with(config.profile, config.replicas)
                .map_err(StartError::Config)?;
            let made_here = stored.bootstrap.as_slice().is_empty();
            return Ok((stored, made_here && !has_joined));
        }
        (stored, Some(code)) => {
            let joined = stored.as_ref().and_then(|s| s.network.joined_with(&code.network));
            if let (Some(stored), None, true) = (&stored, &joined, has_joined) {
                return Err(StartError::OtherNetwork {
                    dir: dir.root().to_owned(),
                    ours: stored.network.id().to_string(),
                    theirs: code.network.id().to_string(),
                });
            }
            let network = joined.unwrap_or_else(|| code.network.clone());
            (StoredNetwork { network, bootstrap: code.peer_list() }, false)
        }
        (None, None) => {
            let replicas = config.replicas.unwrap_or(DEFAULT_REPLICAS);
            check_replicas(replicas).map_err(StartError::Config)?;
            let admin = open_admin_key(dir)?.public();
            let profile = config.profile.unwrap_or_default();
            let network = Network::generate(profile, replicas, admin);
            (StoredNetwork { network, bootstrap: PeerList::default() }, true)
        }
    };
    network.save(dir)?;
    Ok((network, is_founder))
}
