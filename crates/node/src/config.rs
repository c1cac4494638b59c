//! How a node is started, and what it remembers of that.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use atoll_dht::{QuotaConfig, Share};
use atoll_key::IdProfile;
use atoll_net::Versions;
use atoll_net::hello::SPOKEN;
use atoll_overlay::MAX_VIRTUAL_SERVERS;
use atoll_store::FlagCheck;
use minicbor::{Decode, Encode};

use crate::contribution::{FormerPlace, Place, Policy, StoredPolicy};
use crate::control::message::ChangeQuota;
use crate::dir::{self, DirError, NodeDir};
use crate::join::JoinCode;
use crate::memory;

/// Where a node listens unless told otherwise: all addresses, an arbitrary port.
pub const DEFAULT_LISTEN: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED), 7543);

/// What a node gives unless told otherwise, bytes: 10 GiB, a guess.
pub const DEFAULT_STORAGE_BYTES: u64 = 10 << 30;

/// The least a node may give, bytes: some segments of the store.
pub const MIN_STORAGE_BYTES: u64 = 16 << 20;

/// What a node speaks. Only tests of rings of several versions change it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protocol {
    /// The versions.
    pub versions: Versions,
    /// Methods that it does not know, as if it were from before they were added.
    pub lacks: &'static [u16],
}

impl Default for Protocol {
    fn default() -> Protocol {
        Protocol { versions: SPOKEN, lacks: &[] }
    }
}

/// How a node is started. `None` means: as at the last start, or the default.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// The node's directory; made if it does not exist.
    pub dir: PathBuf,
    /// Where to accept connections; port 0 takes a free one. Remembered.
    /// Default [`DEFAULT_LISTEN`].
    pub listen: Option<SocketAddr>,
    /// The address to tell others, if not the one listened on (behind a port
    /// forwarding, say). Remembered.
    pub advertise: Option<SocketAddr>,
    /// The network to enter at the first start; `None` makes a new one.
    pub join: Option<JoinCode>,
    /// How much disk the store may take, bytes, if it is given by a fixed size
    /// ([`crate::Policy`]). Remembered. Default [`DEFAULT_STORAGE_BYTES`].
    pub storage_bytes: Option<u64>,
    /// How many ring positions the node has (CFS §5.3). Remembered.
    /// Default [`VirtualServers::Auto`].
    pub virtual_servers: Option<VirtualServers>,
    /// How much memory blocks cached for others may take, bytes; 0 for no cache.
    /// Remembered. Default [`DEFAULT_CACHE_BYTES`].
    pub cache_bytes: Option<u64>,
    /// How node IDs are chosen, when a new network is made. Default
    /// [`IdProfile::Identity`]; a network that is there already must agree.
    pub profile: Option<IdProfile>,
    /// Copies of each block, when a new network is made.
    pub replicas: u32,
    /// How long a block stays without being renewed.
    pub lease: Duration,
    /// How long to try to enter the ring before `start` returns regardless.
    pub join_patience: Duration,
    /// Whether a directory that is contributed as transparent must say that it is. Only tests
    /// without a mounted TFS have it otherwise.
    pub flag: FlagCheck,
    /// What it speaks. Only tests change it.
    pub protocol: Protocol,
}

/// What blocks cached for others may take unless told otherwise, bytes: a guess that a
/// desktop does not feel.
pub const DEFAULT_CACHE_BYTES: u64 = 64 << 20;

/// How many ring positions a node has (CFS §5.3: "in rough proportion to the server's
/// storage and network capacity").
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum VirtualServers {
    /// One for every [`DEFAULT_STORAGE_BYTES`] the node gives.
    #[default]
    Auto,
    /// So many, 1 to [`MAX_VIRTUAL_SERVERS`].
    Count(u16),
}

impl VirtualServers {
    /// The number for a node that gives `storage_bytes`.
    pub fn count(self, storage_bytes: u64) -> u16 {
        match self {
            VirtualServers::Auto => {
                let units = (storage_bytes + DEFAULT_STORAGE_BYTES / 2) / DEFAULT_STORAGE_BYTES;
                u16::try_from(units).unwrap_or(u16::MAX).clamp(1, MAX_VIRTUAL_SERVERS)
            }
            VirtualServers::Count(count) => count,
        }
    }
}

impl std::str::FromStr for VirtualServers {
    type Err = String;

    fn from_str(text: &str) -> Result<VirtualServers, String> {
        match text.parse() {
            _ if text == "auto" => Ok(VirtualServers::Auto),
            Ok(count @ 1..=MAX_VIRTUAL_SERVERS) => Ok(VirtualServers::Count(count)),
            _ => Err(format!("it is `auto` or a number from 1 to {MAX_VIRTUAL_SERVERS}")),
        }
    }
}

impl std::fmt::Display for VirtualServers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            VirtualServers::Auto => f.write_str("auto"),
            VirtualServers::Count(count) => count.fmt(f),
        }
    }
}

impl NodeConfig {
    /// The defaults, in `dir`.
    pub fn new(dir: impl Into<PathBuf>) -> NodeConfig {
        NodeConfig {
            dir: dir.into(),
            listen: None,
            advertise: None,
            join: None,
            storage_bytes: None,
            virtual_servers: None,
            cache_bytes: None,
            profile: None,
            replicas: 3,
            lease: Duration::from_secs(30 * 24 * 3600),
            join_patience: Duration::from_secs(5),
            flag: FlagCheck::Attribute,
            protocol: Protocol::default(),
        }
    }
}

/// Why a node could not be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The directory cannot be used, or a node runs in it already.
    #[error(transparent)]
    Dir(#[from] DirError),
    /// The directory belongs to another network than the join code.
    #[error(
        "{dir} belongs to network {ours}, the join code to {theirs}; \
         to enter that one, start a node in another directory (--dir)",
        dir = dir.display()
    )]
    OtherNetwork {
        /// The directory.
        dir: PathBuf,
        /// Its network.
        ours: String,
        /// The join code's.
        theirs: String,
    },
    /// The address cannot be listened on.
    #[error("cannot listen on {addr}: {reason}; choose another with --listen ADDR:PORT")]
    Listen {
        /// The address.
        addr: SocketAddr,
        /// What the system said.
        reason: String,
    },
    /// The block store cannot be opened.
    #[error("cannot open the block store: {0}")]
    Store(String),
    /// The control socket cannot be made.
    #[error("cannot make the control socket: {0}")]
    Socket(String),
    /// The configuration makes no sense.
    #[error("{0}")]
    Config(String),
}

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
    fn virtual_servers_follow_the_storage_given_unless_counted() {
        let gib = 1 << 30;
        for (storage_gib, count) in [(1, 1), (10, 1), (14, 1), (15, 2), (50, 5), (5000, 128)] {
            assert_eq!(VirtualServers::Auto.count(storage_gib * gib), count, "{storage_gib} GiB");
        }
        assert_eq!("7".parse::<VirtualServers>().map(|v| v.count(gib)), Ok(7));
        assert_eq!("auto".parse(), Ok(VirtualServers::Auto));
        for bad in ["0", "129", "-1", "many", ""] {
            assert!(bad.parse::<VirtualServers>().is_err(), "{bad}");
        }
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
