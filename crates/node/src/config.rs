//! How a node is started, and what it remembers of that.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use atoll_key::IdProfile;
use atoll_net::Versions;
use atoll_net::hello::SPOKEN;
use atoll_overlay::MAX_VIRTUAL_SERVERS;
use atoll_store::FlagCheck;

use crate::dir::DirError;
use crate::join_code::JoinCode;
use crate::tree_walk::TreeWalk;

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
    /// Copies of each block, when a new network is made. Default [`crate::DEFAULT_REPLICAS`]; a network that is
    /// there already must agree.
    pub replicas: Option<u32>,
    /// How long a block stays without being renewed.
    pub lease: Duration,
    /// Lists the blocks of volumes that mounts have written, so that their leases are renewed also
    /// when the mount died before it said what it wrote.
    pub walk: Option<Arc<dyn TreeWalk>>,
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
            replicas: None,
            lease: Duration::from_secs(30 * 24 * 3600),
            walk: None,
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
    /// Another process has the node's key, and goes on in its place.
    #[error(
        "another process with this node's key runs at {by}, and has run longer: one of the two directories \
         is a copy of the other, and both would count as one node"
    )]
    Superseded {
        /// Where it listens.
        by: SocketAddr,
    },
    /// The configuration makes no sense.
    #[error("{0}")]
    Config(String),
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
