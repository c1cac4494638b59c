//! What `atoll status` shows.
//!
//! The daemon fills a [`Status`] and sends it to its clients as JSON, which is also
//! what `--json` prints: one description for all readers. Fields are only ever added.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A node's state at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// The daemon's version.
    pub version: String,
    /// The node's directory.
    pub dir: String,
    /// The daemon's process number.
    pub process: u32,
    /// The node's public key, hexadecimal.
    pub peer_id: String,
    /// Where it accepts connections.
    pub listen: String,
    /// The address it tells to others.
    pub advertise: String,
    /// Names the network without giving its secret away.
    pub network_id: String,
    /// Seconds since the daemon started.
    pub uptime_secs: u64,
    /// Whether it has a place on the ring.
    pub joined: bool,
    /// Its ring positions, hexadecimal.
    pub positions: Vec<String>,
    /// The node before it on the ring.
    pub predecessor: Option<RingNode>,
    /// The nodes after it, nearest first.
    pub successors: Vec<RingNode>,
    /// How many nodes the ring seems to have.
    pub estimated_nodes: f64,
    /// How many nodes the ring has, this one included, where this node sees all of them.
    pub known_nodes: Option<u64>,
    /// Members met before that are not on the ring, those seen last first; only where this node
    /// sees all of the ring.
    pub away: Vec<AwayNode>,
    /// Why this node is no longer a member of the network.
    pub not_member: Option<String>,
    /// Whether its blocks have the copies that the network was made for, as far as it can tell.
    pub health: Health,
    /// What is lacking, or not known, in sentences for people; empty if the node is healthy.
    pub health_reasons: Vec<String>,
    /// Blocks held.
    pub blocks: u64,
    /// Bytes of the blocks held.
    pub block_bytes: u64,
    /// What the store takes on disk, bytes.
    pub disk_bytes: u64,
    /// What it may take at most, bytes.
    pub capacity_bytes: u64,
    /// Blocks found to have rotted on disk since the start; each is fetched again.
    pub rotten_blocks: u64,
    /// Why the node's disk does not take blocks.
    pub disk_trouble: Option<String>,
    /// The state of replication.
    pub repair: Repair,
    /// Copies kept by other nodes than they belong to, for want of room.
    pub diverted: Diverted,
    /// Blocks cached for others.
    pub cache: Cache,
    /// How the machine's clock stands among those of other nodes.
    pub clock: Clock,
    /// Handshakes and calls refused since the start, by reason.
    pub refusals: BTreeMap<String, u64>,
    /// Blocks received that did not match their keys, by the sender's public key.
    pub bad_blocks: BTreeMap<String, u64>,
    /// Open connections to peers.
    pub connections: u64,
    /// Bytes received from peers since the start.
    pub received_bytes: u64,
    /// Bytes sent to peers since the start.
    pub sent_bytes: u64,
    /// Memory resident, bytes.
    pub resident_bytes: u64,
    /// The volumes published from here.
    pub volumes: Vec<VolumeStatus>,
    /// Warnings for people, in sentences.
    pub warnings: Vec<String>,
    /// What subsystems that were made outside this crate say of themselves, by their names.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub parts: BTreeMap<String, StatusPart>,
}

/// What a subsystem that was made outside this crate says of itself.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct StatusPart {
    /// For people, in order.
    pub rows: Vec<StatusRow>,
    /// For programs.
    pub json: Value,
}

/// A row of `atoll status`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct StatusRow {
    /// A word, such as `ring`.
    pub name: String,
    /// One line.
    pub text: String,
}

/// Whether a node's blocks have the copies that the network was made for: those of which it is the
/// root, on the nodes that should hold them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Health {
    /// It cannot tell, e.g. because it has not compared with the others yet.
    #[default]
    Unknown,
    /// There are fewer copies than the network was made for, or they could not be made.
    Degraded,
    /// All are there.
    Healthy,
}

/// A member of the network that is not on the ring.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct AwayNode {
    /// Its public key, hexadecimal.
    pub peer_id: String,
    /// Where it listened.
    pub addr: String,
    /// When it was last connected, seconds since 1970; 0 if that is not known.
    pub last_seen_unix_secs: u64,
}

/// How many nodes a ring has, counted by walking around it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RingCount {
    /// Nodes met, this one included.
    pub nodes: u64,
    /// Whether the walk went around the ring.
    pub is_whole: bool,
}

/// What can be set while a node runs; see `atoll settings`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeSettings {
    /// `auto`, or a number of ring positions.
    pub virtual_servers: String,
    /// Ring positions the node has or is taking.
    pub positions: u16,
    /// What blocks cached for others may take, bytes.
    pub cache_bytes: u64,
    /// How much disk the store may take, bytes.
    pub storage_bytes: u64,
    /// How node IDs are chosen in this network: `identity` or `address`.
    pub node_ids: String,
    /// Copies of each block in this network.
    pub replicas: u32,
}

/// What a step of giving back disk space did; see `atoll gc`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Reclaimed {
    /// Bytes given back; 0 if there is nothing more to gain.
    pub freed_bytes: u64,
    /// Bytes of the blocks held.
    pub block_bytes: u64,
    /// What the store takes on its disk now, bytes.
    pub disk_bytes: u64,
}

/// What the nodes that should hold some blocks say of them; see `atoll why`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ReplicaReport {
    /// The nodes that were asked.
    pub nodes: Vec<AskedNode>,
    /// The blocks, in the order of the request.
    pub blocks: Vec<BlockReplicas>,
}

/// A node that should hold some of the blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct AskedNode {
    /// Its public key, hexadecimal.
    pub peer_id: String,
    /// Where it listens.
    pub addr: String,
    /// Why it has not answered.
    pub trouble: Option<String>,
}

/// The replicas of one block.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BlockReplicas {
    /// One for each node that should hold it, the root first; those that have not answered included.
    pub copies: Vec<BlockCopy>,
    /// Why these nodes could not be found.
    pub trouble: Option<String>,
}

/// What one node says of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BlockCopy {
    /// Which of [`ReplicaReport::nodes`].
    pub node: usize,
    /// The version it holds; nothing if it holds none, or has not answered.
    pub version: Option<u64>,
    /// Seconds the copy's lease still has.
    pub lease_secs: u64,
    /// Whether another node keeps the copy for it.
    pub diverted: bool,
}

/// Which nodes use a mutable block, as its replicas know them; see `atoll why`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct UsesReport {
    /// Nodes that have read or written it in the last 15 s.
    pub readers: Vec<BlockUser>,
    /// Nodes that have a lease of the lock.
    pub locks: Vec<LockUser>,
    /// How many replicas have answered.
    pub answered: usize,
    /// How many have not.
    pub silent: usize,
    /// Why the replicas could not be found.
    pub trouble: Option<String>,
}

/// A node that has read or written a block.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BlockUser {
    /// Its public key, hexadecimal.
    pub peer_id: String,
    /// Where it listens.
    pub addr: String,
}

/// A node that has a lock.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LockUser {
    /// Its public key, hexadecimal.
    pub peer_id: String,
    /// Whether it excludes all others.
    pub exclusive: bool,
}

/// What publishers may use of a node and what they do; see `atoll quota`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct QuotaStatus {
    /// How many nodes the network seems to have.
    pub estimated_nodes: f64,
    /// What the node offers, bytes.
    pub capacity_bytes: u64,
    /// How many nodes' worth of storage a publisher may use in the whole network.
    pub publisher_nodes: u32,
    /// The least share however large the network is, from 0 to 1.
    pub floor_share: f64,
    /// The share set for one publishing node; absent when it follows the network's size.
    pub key_share_set: Option<f64>,
    /// The share set for one address; absent when it follows the network's size.
    pub address_share_set: Option<f64>,
    /// The share of one publishing node at present, from 0 to 1.
    pub key_share: f64,
    /// That is, bytes.
    pub key_allowed_bytes: u64,
    /// The share of one address at present, from 0 to 1.
    pub address_share: f64,
    /// That is, bytes.
    pub address_allowed_bytes: u64,
    /// The publishing nodes for which most is kept, the largest first.
    pub keys: Vec<QuotaAccount>,
    /// The addresses for which most is kept, the largest first.
    pub addresses: Vec<QuotaAccount>,
    /// Blocks refused over quota since the start.
    pub refused_blocks: u64,
}

/// What is kept for one publisher or one address.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct QuotaAccount {
    /// The first bytes of the node's key, an address, or `nobody`.
    pub who: String,
    /// It did not publish these blocks but brought copies that no other node vouched for.
    pub brought: bool,
    /// What is kept, bytes, with what keeping costs.
    pub used_bytes: u64,
    /// How many blocks.
    pub blocks: u64,
    /// What would be kept at most, bytes.
    pub allowed_bytes: u64,
}

/// How a node's clock stands among those of other nodes; see `atoll_overlay::clock`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Clock {
    /// How many other addresses have told their clocks lately.
    pub compared: usize,
    /// How many of them agree with this machine's clock.
    pub agreeing: usize,
    /// By how much this machine's clock is ahead of the network's time, seconds; 0 unless a
    /// majority contradicts it. The node uses the network's time then.
    pub off_secs: i64,
    /// Nodes whose clocks are wrong.
    pub wrong: Vec<WrongClock>,
    /// If no majority of clocks agrees: nodes whose clocks contradict this machine's, and by how
    /// much they are ahead of that.
    pub undecided: Vec<WrongClock>,
}

/// A node whose clock is wrong.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct WrongClock {
    /// The node's public key, hexadecimal.
    pub peer_id: String,
    /// The node's address.
    pub addr: String,
    /// By how much its clock is ahead of the network's time, seconds.
    pub off_secs: i64,
}

/// A ring position and the node that has it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RingNode {
    /// The ring position, hexadecimal.
    pub id: String,
    /// The node's address.
    pub addr: String,
    /// The node's public key, hexadecimal: a node may stand at several positions.
    #[serde(default)]
    pub peer_id: String,
}

/// The state of replication; see `atoll_dht::RepairStatus`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Repair {
    /// Copies found missing and not yet restored.
    pub queue_blocks: u64,
    /// Whether all blocks of this root have as many copies as the network was made for, as far as
    /// the last reconciliation saw.
    pub fully_replicated: bool,
    /// Copies each block should have: what the network was made for.
    pub replicas_wanted: u32,
    /// Nodes that are there to hold them, this one included; as many as wanted at most.
    pub replicas_present: u32,
    /// How far the comparison with these has come: `no_place`, `not_compared`, `new_neighbours`,
    /// `requested` (copies were found missing since), `differing` or `in_step`.
    pub stage: String,
    /// The nodes that could not be brought into step, if the stage is `differing`.
    pub open: Vec<OpenReplica>,
    /// Blocks this node is the root of.
    pub root_blocks: u64,
    /// Copies made by repair since the start.
    pub repaired_blocks: u64,
    /// Bytes of them.
    pub repaired_bytes: u64,
    /// Rounds of reconciliation since the start.
    pub rounds: u64,
    /// When the last round ended, milliseconds since 1970; 0 before the first.
    pub last_round_unix_ms: u64,
    /// Neighbours that disappeared together and were whole replica sets: blocks that only they
    /// had are on no node that can be reached.
    pub vanished_nodes: u32,
    /// The share of the ring whose blocks these are, from 0 to 1.
    pub vanished_ring_share: f64,
    /// When that was noticed, milliseconds since 1970; 0 if it was not.
    pub vanished_since_unix_ms: u64,
}

/// A node with which blocks could not be brought into step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct OpenReplica {
    /// Its public key, hexadecimal.
    pub peer_id: String,
    /// Its address.
    pub addr: String,
    /// How many blocks; 1 if that is not known.
    pub blocks: u64,
    /// What kept them from being copied, in words.
    pub why: String,
}

/// Copies that are not where they belong because there was no room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Diverted {
    /// Copies of this node that others keep for it: pointers to them are here.
    pub pointers: u64,
    /// Copies that this node keeps for others.
    pub held_for_others: u64,
}

/// The blocks a node caches for lookups that pass by (CFS §5.2).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Cache {
    /// Blocks held.
    pub blocks: u64,
    /// What they take, bytes.
    pub bytes: u64,
    /// What they may take, bytes; 0 for no cache.
    pub limit_bytes: u64,
    /// Questions answered from the cache since the start.
    pub hits: u64,
    /// Questions that neither the store nor the cache answered.
    pub misses: u64,
    /// Blocks that had to make room since the start.
    pub evictions: u64,
}

/// The members of the network that a node knows; see `atoll member`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MemberList {
    /// Names the network.
    pub network_id: String,
    /// How often the network's secret has been replaced.
    pub epoch: u64,
    /// When it was replaced last, seconds since 1970, if that is known here.
    pub replaced_unix_secs: Option<u64>,
    /// Until when the former secret is good for members that were away, if it still is.
    pub former_until_unix_secs: Option<u64>,
    /// Whether this node holds the key of the network's administrator.
    pub is_admin: bool,
    /// In the order of their keys; this node among them.
    pub members: Vec<Member>,
}

/// A member of the network, as one node knows it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Member {
    /// Its public key, hexadecimal.
    pub id: String,
    /// Where it listens; empty if that was never known here.
    pub addr: String,
    /// `this node`, `connected`, `away` (met and not connected), `known` (only heard of) or
    /// `removed`.
    pub status: String,
    /// When it was last connected, seconds since 1970; 0 for never.
    pub last_seen_unix_secs: u64,
    /// The protocol version spoken with it last; 0 if none was.
    pub version: u16,
}

/// What replacing a network's secret has done; see `atoll secret rotate`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Rotated {
    /// How often the secret has been replaced now.
    pub epoch: u64,
    /// How many nodes were removed with it.
    pub removed: u64,
    /// How many of the connected members have the new secret already.
    pub told: u64,
    /// How many members are connected.
    pub connected: u64,
    /// Until when the former secret is good for members that are away, seconds since 1970.
    pub former_until_unix_secs: u64,
}

/// A volume published from this node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct VolumeStatus {
    /// Its name on this node.
    pub name: String,
    /// `atoll:KEY`.
    pub address: String,
    /// The directory it is published from, if any.
    pub source: Option<String>,
    /// Version of the root that is kept alive; 0 when nothing has been published yet, or
    /// it was unpublished.
    pub root_version: u64,
    /// Content blocks kept alive.
    pub kept_blocks: u64,
    /// When the leases were last renewed, seconds since 1970; 0 for never.
    pub refreshed_unix_secs: u64,
    /// When the first lease ends if it is not renewed, seconds since 1970; 0 when nothing
    /// has been published yet.
    pub lease_expires_unix_secs: u64,
    /// How long its blocks are kept at a time, seconds.
    #[serde(default)]
    pub lease_secs: u64,
    /// Content blocks the ring had lost at the last renewal.
    pub lost_blocks: u64,
    /// Why the last renewal was not finished, if so.
    pub trouble: Option<String>,
    /// Blocks renewed so far by the renewal under way, if one is.
    #[serde(default)]
    pub renewing_blocks: Option<u64>,
    /// Whether it is encrypted: only holders of the read key can read it. The key is not here.
    #[serde(default)]
    pub encrypted: bool,
    /// Whether it was moved to another node, which has not taken over yet.
    #[serde(default)]
    pub is_moved: bool,
}

/// Lower-case hexadecimal, as keys are shown.
pub(crate) fn hex(bytes: &[u8]) -> String {
    data_encoding::HEXLOWER.encode(bytes)
}

/// How a node gives disk and what has become of it; see `atoll contribute`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ContributionStatus {
    /// `fixed`, `dynamic` or `transparent`.
    pub policy: String,
    /// What was set, of `fixed`, bytes.
    pub size_bytes: Option<u64>,
    /// The lower watermark of `dynamic`, from 0 to 1.
    pub low: Option<f64>,
    /// The upper watermark of `dynamic`, from 0 to 1.
    pub high: Option<f64>,
    /// Where the blocks are.
    pub dir: String,
    /// What the store may take at present, bytes.
    pub offered_bytes: u64,
    /// What it takes on its disk, bytes.
    pub used_bytes: u64,
    /// Blocks held.
    pub blocks: u64,
    /// The size of the file system the blocks are on, bytes; 0 if it is not there.
    pub disk_total_bytes: u64,
    /// What is free of it to everybody, bytes. Transparent files count as free.
    pub disk_free_bytes: u64,
    /// Blocks whose files had vanished, since the start.
    pub lost_blocks: u64,
    /// Blocks given up for want of room, since the start.
    pub dropped_blocks: u64,
    /// Blocks that are being moved from where an earlier policy kept them.
    pub moving: Option<Moving>,
    /// Warnings for people, in sentences.
    pub warnings: Vec<String>,
}

/// Blocks on their way from one place to another.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Moving {
    /// From where.
    pub from: String,
    /// Blocks moved since the node started.
    pub moved_blocks: u64,
    /// Blocks still to be moved.
    pub left_blocks: u64,
    /// Their bytes.
    pub left_bytes: u64,
}
