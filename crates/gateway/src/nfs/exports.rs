//! What is served, to whom, and as whom.
//!
//! An [`Export`] is a file system with a name. Clients are believed to speak for their users (`AUTH_SYS`), as by every
//! NFS server without Kerberos: so an export is for the machines that it lists, and root of such a machine is nobody here
//! unless the export says otherwise ([`Squash`]).

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use atoll_vfs::{Caller, FileSystem, Groups};

use super::rpc::Credential;

/// User and group that stand for nobody (Linux `nobody`).
pub const NOBODY: u32 = 65534;

/// Ports that only root of a machine may use.
const FIRST_ORDINARY_PORT: u16 = 1024;

/// Whose callers become nobody.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Squash {
    /// Root's.
    #[default]
    Root,
    /// All.
    All,
    /// None.
    None,
}

/// Addresses: those whose first bits are these.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Network {
    address: IpAddr,
    bits: u8,
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.bits)
    }
}

impl Network {
    /// The addresses that begin with these bits of an address; none for more bits than it has.
    pub fn new(address: IpAddr, bits: u8) -> Option<Network> {
        let most = if address.is_ipv4() { 32 } else { 128 };
        (bits <= most).then_some(Network { address, bits })
    }

    /// Whether an address is one of them.
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.address, address.to_canonical()) {
            (IpAddr::V4(own), IpAddr::V4(other)) => {
                (own.to_bits() ^ other.to_bits())
                    .checked_shr(32 - u32::from(self.bits))
                    .unwrap_or(0)
                    == 0
            }
            (IpAddr::V6(own), IpAddr::V6(other)) => {
                (own.to_bits() ^ other.to_bits())
                    .checked_shr(128 - u32::from(self.bits))
                    .unwrap_or(0)
                    == 0
            }
            _ => false,
        }
    }
}

/// A file system that is served.
#[derive(Clone)]
pub struct Export {
    /// The path by which clients mount it, beginning with `/`.
    pub path: String,
    /// Names it in handles: the same after a restart, and no other export's.
    pub id: u64,
    /// The file system.
    pub fs: Arc<dyn FileSystem>,
    /// Refuses every change.
    pub read_only: bool,
    /// Whose callers become nobody.
    pub squash: Squash,
    /// The user and group that nobody is.
    pub anonymous: (u32, u32),
    /// Whose machines may use it.
    pub clients: Vec<Network>,
    /// Only for calls from ports that root of a machine may use.
    pub privileged_ports: bool,
    /// Answers changes of names and attributes before they would survive a crash (`async` of exports(5)).
    pub answers_early: bool,
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Export")
            .field("path", &self.path)
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

impl Export {
    /// An export for this machine alone.
    pub fn local(path: &str, id: u64, fs: Arc<dyn FileSystem>) -> Export {
        let loopback = [
            "127.0.0.0".parse().map(|a| Network::new(a, 8)),
            "::1".parse().map(|a| Network::new(a, 128)),
        ];
        Export {
            path: path.to_owned(),
            id,
            fs,
            read_only: false,
            squash: Squash::Root,
            anonymous: (NOBODY, NOBODY),
            clients: loopback.into_iter().filter_map(|network| network.ok().flatten()).collect(),
            privileged_ports: false,
            answers_early: false,
        }
    }

    /// Whether calls from this address are answered.
    pub fn admits(&self, address: IpAddr, port: u16) -> bool {
        self.admits_machine(address) && (!self.privileged_ports || port < FIRST_ORDINARY_PORT)
    }

    /// Whether this machine may use it, by calls from the right ports: what tells nothing of files it may ask from any.
    pub fn admits_machine(&self, address: IpAddr) -> bool {
        self.clients.iter().any(|network| network.contains(address))
    }

    /// The user for whom a call is made.
    pub fn caller(&self, credential: &Credential) -> Caller {
        let (anonymous_uid, anonymous_gid) = self.anonymous;
        let nobody = Caller { uid: anonymous_uid, gid: anonymous_gid, ..Caller::default() };
        let Credential::Sys(sys) = credential else { return nobody };
        match self.squash {
            Squash::All => nobody,
            Squash::None => Caller {
                uid: sys.uid,
                gid: sys.gid,
                groups: Groups::listed(&sys.gids.0),
                ..Caller::default()
            },
            // As Linux' server does: neither the user nor a group is root's.
            Squash::Root => {
                let group = |gid: u32| if gid == 0 { anonymous_gid } else { gid };
                let groups: Vec<u32> = sys.gids.0.iter().copied().map(group).collect();
                Caller {
                    uid: if sys.uid == 0 { anonymous_uid } else { sys.uid },
                    gid: group(sys.gid),
                    groups: Groups::listed(&groups),
                    ..Caller::default()
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use atoll_vfs::memory::MemoryFs;

    use super::super::rpc::AuthSys;
    use super::super::xdr::{List, Opaque};
    use super::*;

    fn export() -> Export {
        let env = Arc::new(atoll_env::TokioRuntime::current());
        Export::local("/x", 1, Arc::new(MemoryFs::new(env)))
    }

    #[test]
    fn networks_are_told_by_their_first_bits() {
        let network = |text: &str, bits| Network::new(text.parse().unwrap(), bits).unwrap();
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        assert!(network("10.1.0.0", 16).contains(ip("10.1.255.3")));
        assert!(!network("10.1.0.0", 16).contains(ip("10.2.0.1")));
        assert!(network("0.0.0.0", 0).contains(ip("203.0.113.9")));
        assert!(network("192.0.2.7", 32).contains(ip("192.0.2.7")));
        assert!(!network("192.0.2.7", 32).contains(ip("192.0.2.6")));
        assert!(
            network("127.0.0.0", 8).contains(ip("::ffff:127.0.0.1")),
            "as a socket of both versions says it"
        );
        assert!(network("fd00::", 8).contains(ip("fdff::1")));
        assert!(!network("fd00::", 8).contains(ip("10.0.0.1")));
        assert_eq!(Network::new(ip("10.0.0.0"), 33), None);
    }

    #[tokio::test]
    async fn root_of_another_machine_is_nobody_by_user_and_by_groups() {
        let sys = AuthSys {
            stamp: 0,
            machine: Opaque::default(),
            uid: 0,
            gid: 0,
            gids: List(vec![0, 24]),
        };
        let credential = Credential::Sys(sys.clone());
        let mut export = export();
        let caller = export.caller(&credential);
        assert_eq!((caller.uid, caller.gid), (NOBODY, NOBODY));
        assert!(!caller.is_member(0) && caller.is_member(24));
        let user = export.caller(&Credential::Sys(AuthSys { uid: 1000, ..sys }));
        assert_eq!((user.uid, user.gid), (1000, NOBODY));
        export.squash = Squash::None;
        assert_eq!(export.caller(&credential).uid, 0);
        assert_eq!(export.caller(&Credential::None).uid, NOBODY);
        export.squash = Squash::All;
        assert!(!export.caller(&credential).is_member(24));
    }

    #[tokio::test]
    async fn an_export_is_for_the_machines_that_it_lists() {
        let mut export = export();
        let local: IpAddr = "127.0.0.1".parse().unwrap();
        assert!(export.admits(local, 40_000));
        assert!(!export.admits("192.0.2.1".parse().unwrap(), 40_000));
        export.privileged_ports = true;
        assert!(!export.admits(local, 1024) && export.admits(local, 1023));
    }
}
