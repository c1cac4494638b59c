//! What a node remembers of its configuration from one start to the next.

use std::net::SocketAddr;

use atoll_dht::{QuotaConfig, Share};
use atoll_overlay::MAX_VIRTUAL_SERVERS;
use minicbor::{Decode, Encode};

use crate::config::{
    DEFAULT_CACHE_BYTES, DEFAULT_LISTEN, DEFAULT_STORAGE_BYTES, MIN_STORAGE_BYTES, NodeConfig,
    StartError, VirtualServers,
};
use crate::contribution::{FormerPlace, Place, Policy, StoredPolicy};
use crate::control::message::ChangeQuota;
use crate::dir::{self, DirError, NodeDir};
use crate::memory;

/// The file `settings.cbor`: what later starts take over.
///
/// CBOR map: 0 listen, 1 advertise (both text), 2 storage in bytes, 3 whether the node
/// has ever had a place on the ring, 4 virtual servers (0 for `auto`), 5 cache in bytes,
/// 6 quotas, 7 how disk is given (absent: by the fixed size of 2), both as in the control
/// protocol, 8 where blocks are still to be moved from: a map whose 0 is the directory of
/// files, absent for the log.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct Settings {
    #[n(0)]
    listen: Option<String>,
    #[n(1)]
    advertise: Option<String>,
    #[n(2)]
    storage_bytes: Option<u64>,
    #[n(3)]
    has_joined: Option<bool>,
    #[n(4)]
    virtual_servers: Option<u16>,
    #[n(5)]
    cache_bytes: Option<u64>,
    #[n(6)]
    quota: Option<ChangeQuota>,
    #[n(7)]
    policy: Option<StoredPolicy>,
    #[n(8)]
    former: Option<FormerPlace>,
}

impl Settings {
    pub(crate) fn load(dir: &NodeDir) -> Result<Settings, DirError> {
        let path = dir.settings();
        let Some(bytes) = dir::read_small(&path)? else { return Ok(Settings::default()) };
        let settings: Settings =
            minicbor::decode(&bytes).map_err(|error| DirError::damaged(&path, error))?;
        for text in [&settings.listen, &settings.advertise].into_iter().flatten() {
            text.parse::<SocketAddr>().map_err(|error| DirError::damaged(&path, error))?;
        }
        Ok(settings)
    }

    /// Writes what has changed; nothing otherwise, so that a node on a full disk can start.
    pub(crate) fn save(&self, dir: &NodeDir) -> Result<(), DirError> {
        if Settings::load(dir).is_ok_and(|present| present == *self) {
            return Ok(());
        }
        let bytes = minicbor::to_vec(self).expect("a vector takes all that is written");
        dir::write_atomically(&dir.settings(), &bytes)
    }

    /// What the configuration says, else what is remembered, else the defaults.
    pub(crate) fn apply(&mut self, config: &NodeConfig) -> Result<(), StartError> {
        if let Some(listen) = config.listen {
            self.listen = Some(listen.to_string());
        }
        if let Some(advertise) = config.advertise {
            if advertise.ip().is_unspecified() || advertise.port() == 0 {
                return Err(StartError::Config(format!(
                    "{advertise} is no address others could connect to"
                )));
            }
            self.advertise = Some(advertise.to_string());
        }
        if let Some(bytes) = config.storage_bytes {
            if bytes < MIN_STORAGE_BYTES {
                return Err(StartError::Config(format!(
                    "{bytes} bytes of storage are too few; give at least {} MiB",
                    MIN_STORAGE_BYTES >> 20
                )));
            }
            self.storage_bytes = Some(bytes);
        }
        if let Some(virtual_servers) = config.virtual_servers {
            self.set_virtual_servers(virtual_servers);
        }
        if let Some(bytes) = config.cache_bytes {
            check_cache(bytes).map_err(StartError::Config)?;
            self.set_cache_bytes(bytes);
        }
        Ok(())
    }

    pub(crate) fn virtual_servers(&self) -> VirtualServers {
        match self.virtual_servers {
            None | Some(0) => VirtualServers::Auto,
            Some(count) => VirtualServers::Count(count.min(MAX_VIRTUAL_SERVERS)),
        }
    }

    pub(crate) fn set_virtual_servers(&mut self, virtual_servers: VirtualServers) {
        self.virtual_servers = Some(match virtual_servers {
            VirtualServers::Auto => 0,
            VirtualServers::Count(count) => count,
        });
    }

    pub(crate) fn cache_bytes(&self) -> u64 {
        self.cache_bytes.unwrap_or(DEFAULT_CACHE_BYTES)
    }

    pub(crate) fn set_cache_bytes(&mut self, bytes: u64) {
        self.cache_bytes = Some(bytes);
    }

    /// How much publishers may use of this node.
    pub(crate) fn quota(&self) -> QuotaConfig {
        let set = self.quota.unwrap_or_default();
        let share = |millionths: Option<u32>| {
            millionths.filter(|share| *share > 0).map(Share::from_millionths)
        };
        let default = QuotaConfig::default();
        QuotaConfig {
            key_share: share(set.key_share),
            address_share: share(set.address_share),
            publisher_nodes: set.publisher_nodes.unwrap_or(default.publisher_nodes),
            floor_share: set.floor_share.map_or(default.floor_share, Share::from_millionths),
            ..default
        }
    }

    pub(crate) fn change_quota(&mut self, change: ChangeQuota) {
        let before = self.quota.unwrap_or_default();
        self.quota = Some(ChangeQuota {
            key_share: change.key_share.or(before.key_share),
            address_share: change.address_share.or(before.address_share),
            publisher_nodes: change.publisher_nodes.or(before.publisher_nodes),
            floor_share: change.floor_share.or(before.floor_share),
        });
    }

    pub(crate) fn listen(&self) -> SocketAddr {
        self.listen
            .as_ref()
            .map_or(DEFAULT_LISTEN, |text| text.parse().expect("checked when it was loaded"))
    }

    /// Remembers the port that was in fact taken.
    pub(crate) fn set_listen(&mut self, bound: SocketAddr) {
        self.listen = Some(bound.to_string());
    }

    pub(crate) fn advertise(&self) -> Option<SocketAddr> {
        self.advertise.as_ref().map(|text| text.parse().expect("checked when it was loaded"))
    }

    pub(crate) fn storage_bytes(&self) -> u64 {
        self.storage_bytes.unwrap_or(DEFAULT_STORAGE_BYTES)
    }

    /// How disk is given.
    pub(crate) fn policy(&self) -> Policy {
        match &self.policy {
            Some(policy) => policy.clone().into(),
            None => Policy::Fixed { size_bytes: self.storage_bytes() },
        }
    }

    pub(crate) fn set_policy(&mut self, policy: &Policy) {
        self.policy = match policy {
            Policy::Fixed { size_bytes } => {
                self.storage_bytes = Some(*size_bytes);
                None
            }
            other => Some(other.into()),
        };
    }

    /// Where blocks are still to be moved from.
    pub(crate) fn former(&self) -> Option<Place> {
        self.former.clone().map(Place::from_stored)
    }

    pub(crate) fn set_former(&mut self, former: Option<FormerPlace>) {
        self.former = former;
    }

    pub(crate) fn has_joined(&self) -> bool {
        self.has_joined.unwrap_or(false)
    }

    pub(crate) fn set_joined(&mut self) {
        self.has_joined = Some(true);
    }
}

/// Whether a cache so large can be meant.
pub(crate) fn check_cache(bytes: u64) -> Result<(), String> {
    match memory::total_bytes() {
        Some(total) if bytes > total => Err(format!(
            "a cache of {} does not fit the {} of memory of this machine",
            gib(bytes),
            gib(total)
        )),
        _ => Ok(()),
    }
}

/// In GiB, which memory is thought of in.
fn gib(bytes: u64) -> String {
    format!("{:.0} GiB", (bytes as f64 / f64::from(1 << 30)).ceil())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_said_is_remembered_from_the_last_start() {
        let temp = tempfile::tempdir().expect("temp");
        let dir = NodeDir::at(temp.path());
        let mut first = Settings::load(&dir).expect("none");
        assert_eq!(
            (first.listen(), first.storage_bytes()),
            (DEFAULT_LISTEN, DEFAULT_STORAGE_BYTES)
        );
        let listen: SocketAddr = "127.0.0.1:4000".parse().expect("address");
        let config = NodeConfig {
            listen: Some(listen),
            storage_bytes: Some(1 << 30),
            ..NodeConfig::new(temp.path())
        };
        first.apply(&config).expect("sensible");
        first.save(&dir).expect("save");
        let mut second = Settings::load(&dir).expect("load");
        second.apply(&NodeConfig::new(temp.path())).expect("nothing said");
        assert_eq!((second.listen(), second.storage_bytes()), (listen, 1 << 30));
    }

    #[test]
    fn senseless_settings_are_refused() {
        let nowhere = "0.0.0.0:5".parse().ok();
        let config = NodeConfig { advertise: nowhere, ..NodeConfig::new("/x") };
        assert!(matches!(Settings::default().apply(&config), Err(StartError::Config(_))));
        let config = NodeConfig { storage_bytes: Some(5), ..NodeConfig::new("/x") };
        assert!(matches!(Settings::default().apply(&config), Err(StartError::Config(_))));
        let config = NodeConfig { cache_bytes: Some(100 << 50), ..NodeConfig::new("/x") };
        let error = Settings::default().apply(&config).expect_err("more than any memory");
        let said = error.to_string();
        assert!(said.starts_with("a cache of 104857600 GiB does not fit the "), "{said}");
    }

    #[test]
    fn a_damaged_file_is_told() {
        let temp = tempfile::tempdir().expect("temp");
        let dir = NodeDir::at(temp.path());
        let settings = Settings { listen: Some("nonsense".into()), ..Settings::default() };
        settings.save(&dir).expect("save");
        assert!(matches!(Settings::load(&dir), Err(DirError::Damaged { .. })));
    }
}
