//! The settings of a node's part in a ring.

use std::net::SocketAddr;
use std::time::Duration;

use atoll_key::IdProfile;
use atoll_net::Peer;

use crate::chord::membership::remembered::RememberedPeer;
use crate::chord::ring::list::{DISTINCT_SUCCESSORS, ListLength};
use crate::chord::table::explore::TablePolicy;
use crate::chord::trust::admission::Rules;
use crate::walk::Selection;
use crate::{MAX_VIRTUAL_SERVERS, Mechanisms};

/// The settings. The times fit a LAN and the open internet alike; all but the first
/// are guesses that simulations confirm.
#[derive(Clone, Debug)]
pub struct ChordConfig {
    /// The paper's r, "2 log2 N for the foreseeable maximum number of nodes" (CFS §4.2).
    pub successors: usize,
    /// A list goes on until it holds so many physical nodes, or `successors` if that is
    /// less: enough for all copies of a block.
    pub distinct_successors: usize,
    /// How the network derives ring positions.
    pub profile: IdProfile,
    /// How many ring positions this node holds (CFS §5.3), at least one. May be changed
    /// later: [`super::Chord::set_virtual_servers`].
    pub virtual_servers: u16,
    /// The most that any node of the network may hold, at most [`MAX_VIRTUAL_SERVERS`]: "the
    /// virtual node index must fall between 0 and some small maximum" (CFS §4.4).
    pub max_virtual_servers: u16,
    /// Whether a claimed node is checked before it enters a table (CFS §4.4). The paper's
    /// measurements ran without.
    pub check_nodes: bool,
    /// How often the first successor is called; up to four times as rarely while nothing changes.
    pub stabilize_every: Duration,
    /// How often one finger is verified.
    pub fix_fingers_every: Duration,
    /// How often a remembered peer outside the neighbourhood is asked for a nearer
    /// successor, to find rings that were split off; up to four times as rarely while nothing
    /// changes. Alone on a ring: `stabilize_every`.
    pub merge_every: Duration,
    /// How often successor lists are cross-checked where there is reason
    /// ([`crate::chord::trust::audit`]); while nothing is found, up to 32 times as rarely. Without
    /// `check_nodes` never.
    pub audit_every: Duration,
    /// How a lookup chooses its next hop.
    pub selection: Selection,
    /// How many routes a lookup may take when it doubts the end of the first; see
    /// [`crate::walk::WalkLimits`].
    pub routes: usize,
    /// Which routing table is kept beside the successor lists.
    pub table: TablePolicy,
    /// The budget of upkeep: bytes a second of all messages of this family, sent and received,
    /// but lookups'. The adaptive table may use the part that stabilising leaves.
    pub table_budget_bytes_per_sec: u64,
    /// The limit of one call.
    pub call_limit: Duration,
    /// How long a node found dead is not taken from hearsay, and asked last by lookups.
    pub suspect_for: Duration,
    /// Peer addresses that the user named: they are called for as long as the node runs.
    pub bootstrap: Vec<Peer>,
    /// The address of this node when it ran before, if that is known: a process with its key may still
    /// be there.
    pub former_address: Option<SocketAddr>,
    /// The switches of an experiment.
    pub mechanisms: Mechanisms,
    /// Peers known from an earlier run, in the order of [`super::Chord::remembered`].
    pub remembered: Vec<RememberedPeer>,
}

impl Default for ChordConfig {
    fn default() -> ChordConfig {
        ChordConfig {
            successors: 16,
            distinct_successors: DISTINCT_SUCCESSORS,
            profile: IdProfile::default(),
            virtual_servers: 1,
            max_virtual_servers: MAX_VIRTUAL_SERVERS,
            check_nodes: true,
            stabilize_every: Duration::from_secs(1),
            fix_fingers_every: Duration::from_secs(5),
            merge_every: Duration::from_secs(20),
            audit_every: Duration::from_secs(16),
            selection: Selection::default(),
            routes: 3,
            table: TablePolicy::default(),
            table_budget_bytes_per_sec: 1024,
            call_limit: Duration::from_secs(2),
            suspect_for: Duration::from_secs(10),
            bootstrap: Vec::new(),
            former_address: None,
            mechanisms: Mechanisms::default(),
            remembered: Vec::new(),
        }
    }
}

impl ChordConfig {
    /// How long the successor lists are.
    pub fn list_length(&self) -> ListLength {
        let distinct = self.distinct_successors.min(self.successors);
        ListLength { entries: self.successors, distinct }
    }

    pub(super) fn rules(&self) -> Rules {
        Rules {
            profile: self.profile,
            max_virtual_servers: self.max_virtual_servers,
            check: self.check_nodes,
        }
    }
}
