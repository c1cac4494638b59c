//! What is shown of a file: as JSON, and as lines for people.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::ffi::OsStrExt;

use atoll_key::{GroupAddress, GroupId, UserAddress, UserId, VolumeAddress, VolumeId};
use atoll_node::BlockCopy;
use atoll_volume::shared::file_state::{FileState, PendingChanges};
use serde::{Serialize, Serializer};

use super::{Found, Ring, advice};
use crate::failure::Failure;
use crate::output::{Output, Part, escaped, hex, json_list, json_text};
use crate::units;

/// Blocks that are named of those that lack copies.
const MAX_NAMED: usize = 8;

/// What is known of a file.
#[derive(Serialize)]
pub(super) struct Report {
    pub path: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path_hex: Option<String>,
    pub volume: String,
    pub label: String,
    pub encrypted: bool,
    /// The first half of the inode's key, hexadecimal.
    pub inode: String,
    /// The version that this mount shows.
    pub version: String,
    /// Who wrote it, and when.
    pub written: Option<Written>,
    /// Versions that were written at the same time and are not replaced yet.
    pub concurrent: Vec<Written>,
    /// Other contents that the inode still has beside those that are shown.
    pub conflicts: u64,
    /// Names of versions that were kept beside it.
    #[serde(flatten, serialize_with = "beside_json")]
    pub beside: Vec<Vec<u8>>,
    /// Why a version cannot be read.
    pub unreadable: Option<String>,
    pub replicas: Vec<Replica>,
    /// How many nodes should hold it.
    pub replicas_wanted: usize,
    pub data: Data,
    pub pending: Pending,
    pub access: Access,
    pub open: Open,
    /// Why the ring could not be asked, by the node or by the mount.
    pub ring_trouble: Option<String>,
    /// What to do about what is not well.
    pub todo: Vec<String>,
}

fn beside_json<S: Serializer>(names: &[Vec<u8>], serializer: S) -> Result<S::Ok, S::Error> {
    json_list("beside", names.iter().map(Vec::as_slice), serializer)
}

/// A version, and its writer.
#[derive(Serialize)]
pub(super) struct Written {
    pub user: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub label: String,
    /// Whether the user of this mount wrote it.
    pub own: bool,
    pub height: u64,
    pub unix_ms: u64,
    pub removal: bool,
}

/// What one replica says of the inode.
#[derive(Serialize)]
pub(super) struct Replica {
    pub node: String,
    pub addr: String,
    /// Whether it is the node that was asked.
    pub own: bool,
    pub state: ReplicaState,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    pub lease_secs: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
}

/// How a replica stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ReplicaState {
    /// It has the newest version.
    Newest,
    /// It has an older one, or not all that was written at the same time.
    Behind,
    /// It answers, and has none.
    Missing,
    /// It does not answer.
    Silent,
}

/// The content blocks of the file.
#[derive(Default, Serialize)]
pub(super) struct Data {
    /// How many were looked at.
    pub blocks: u64,
    /// Whether there are more.
    pub more: bool,
    /// Blocks that all nodes hold which should.
    pub complete: u64,
    /// Blocks that some of them hold.
    pub degraded: u64,
    /// Blocks that no node holds which has answered.
    pub absent: u64,
    /// The first that are not complete, and the nodes that lack them.
    pub lacking: Vec<Lacking>,
    /// The shortest lease, seconds.
    pub lease_secs: Option<u64>,
    /// Why they could not be looked at.
    pub trouble: Option<String>,
}

/// A block that not all nodes hold which should.
#[derive(Serialize)]
pub(super) struct Lacking {
    pub block: String,
    pub copies: usize,
    pub nodes: Vec<String>,
}

/// What this mount has not brought to the ring.
#[derive(Serialize)]
pub(super) struct Pending {
    pub changed: bool,
    pub changed_bytes: u64,
    pub unnamed: bool,
    pub removed: bool,
    pub removes_names: bool,
    pub mount_changes: u64,
    pub mount_removals: u64,
    pub trouble: Option<String>,
    pub spooled: bool,
    pub name_spooled: bool,
    pub spool_refused: Option<String>,
}

/// Who may write.
#[derive(Serialize)]
pub(super) struct Access {
    pub groups: Vec<Group>,
    /// The user of the mount.
    pub user: Option<String>,
    pub may_write: bool,
    pub certificate_until_unix_secs: Option<u64>,
    pub why_not: Option<String>,
}

/// A group that may write.
#[derive(Serialize)]
pub(super) struct Group {
    pub group: String,
    pub label: String,
    pub members: u64,
    pub trouble: Option<String>,
}

/// Who uses the file.
#[derive(Serialize)]
pub(super) struct Open {
    /// By which model it is opened: `cto` or `ryw`.
    pub consistency: String,
    /// Whether the file itself says so, and not the mount.
    pub chosen: bool,
    /// How often it is open in this mount.
    pub here: u64,
    /// Whether this mount has it locked.
    pub locked_here: bool,
    /// Nodes that have read or written it in the last 15 s.
    pub readers: Vec<User>,
    /// Nodes that have it locked.
    pub locks: Vec<User>,
    /// Replicas that have not said who uses it.
    pub silent: usize,
}

/// A node that uses the file.
#[derive(Serialize)]
pub(super) struct User {
    pub node: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub addr: String,
    pub own: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exclusive: Option<bool>,
}

/// A version as people see it: its height, and the beginning of the hash of what was written at it.
pub(super) fn version_text(version: u64) -> String {
    format!("{}.{:06x}", version >> 24, version & 0xff_ffff)
}

/// Enough of a hexadecimal number to tell nodes apart.
pub(super) fn short(hex: &str) -> &str {
    hex.get(..12).unwrap_or(hex)
}

impl Report {
    /// Puts together what was found.
    pub(super) fn of(found: Found) -> Report {
        let Found { path, state, beside, blocks, ring } = found;
        let own = state.user;
        let mut written = state.siblings.iter().map(|one| Written {
            user: UserAddress(UserId(one.user)).to_string(),
            label: one.label.clone(),
            own: own == Some(one.user),
            height: one.height,
            unix_ms: one.time_ms,
            removal: one.is_removal,
        });
        let (first, concurrent) = (written.next(), written.collect());
        let node_trouble = ring.as_ref().err().cloned();
        let (text, path_hex) = json_text(path.as_os_str().as_bytes());
        let mut report = Report {
            path: text,
            path_hex,
            volume: VolumeAddress(VolumeId(state.volume)).to_string(),
            label: state.label.clone(),
            encrypted: state.is_encrypted,
            inode: hex(&state.inode),
            version: version_text(state.version),
            written: first,
            concurrent,
            conflicts: state.conflicts,
            beside,
            unreadable: state.unreadable.clone(),
            replicas: ring.as_ref().map(|ring| replicas(ring, state.version)).unwrap_or_default(),
            replicas_wanted: ring.as_ref().map_or(0, |ring| ring.replicas),
            data: data(&ring, blocks),
            pending: pending(&state.pending),
            access: access(&state),
            open: open(ring.as_ref().ok(), &state),
            ring_trouble: state.ring_trouble.clone().or(node_trouble),
            todo: Vec::new(),
        };
        let name = path.file_name().map(OsStrExt::as_bytes).unwrap_or_default();
        let joined = ring.as_ref().is_ok_and(|ring| ring.joined);
        report.todo = advice::todo(&report, name, joined);
        report
    }
}

/// What each replica says of the inode, of which this mount shows `version`.
fn replicas(ring: &Ring, version: u64) -> Vec<Replica> {
    let Some(inode) = ring.copies.blocks.first() else { return Vec::new() };
    let said = inode.copies.iter().filter_map(|copy| copy.version);
    let newest = said.chain([version]).map(|version| version >> 24).max().unwrap_or(0);
    // Two versions of the greatest height are both needed: who has one of them is behind.
    let at_top: BTreeSet<u64> = inode
        .copies
        .iter()
        .filter_map(|copy| copy.version)
        .chain([version])
        .filter(|version| version >> 24 == newest)
        .collect();
    let is_newest = |held: u64| match at_top.contains(&version) {
        true => held == version,
        false => at_top.contains(&held) && at_top.len() == 1,
    };
    let replica = |copy: &BlockCopy| {
        let node = &ring.copies.nodes[copy.node];
        let state = match (copy.version, &node.trouble) {
            (Some(held), _) if is_newest(held) => ReplicaState::Newest,
            (Some(_), _) => ReplicaState::Behind,
            (None, None) => ReplicaState::Missing,
            (None, Some(_)) => ReplicaState::Silent,
        };
        Replica {
            own: node.peer_id == ring.own_id,
            node: node.peer_id.clone(),
            addr: node.addr.clone(),
            state,
            version: copy.version.map(version_text),
            lease_secs: copy.lease_secs,
            trouble: node.trouble.clone(),
        }
    };
    inode.copies.iter().map(replica).collect()
}

fn data(
    ring: &Result<Ring, String>,
    blocks: Result<(Vec<atoll_key::BlockId>, bool), String>,
) -> Data {
    let (blocks, more) = match blocks {
        Ok(blocks) => blocks,
        Err(trouble) => return Data { trouble: Some(trouble), ..Data::default() },
    };
    let mut data = Data { blocks: blocks.len() as u64, more, ..Data::default() };
    let Ok(ring) = ring else { return data };
    for (id, found) in blocks.iter().zip(ring.copies.blocks.iter().skip(1)) {
        let held = found.copies.iter().filter(|copy| copy.version.is_some());
        let copies = held.clone().count();
        let lease = held.map(|copy| copy.lease_secs).min();
        data.lease_secs = data.lease_secs.into_iter().chain(lease).min();
        if copies > 0 && copies == found.copies.len() {
            data.complete += 1;
            continue;
        }
        match copies {
            0 => data.absent += 1,
            _ => data.degraded += 1,
        }
        if let Some(trouble) = &found.trouble {
            data.trouble = Some(trouble.clone());
        }
        if data.lacking.len() < MAX_NAMED {
            let lacks = found.copies.iter().filter(|copy| copy.version.is_none());
            let nodes = lacks.map(|copy| ring.copies.nodes[copy.node].peer_id.clone()).collect();
            let block = hex(&id.key.0[..32]);
            data.lacking.push(Lacking { block, copies, nodes });
        }
    }
    data
}

fn pending(of: &PendingChanges) -> Pending {
    Pending {
        changed: of.is_changed,
        changed_bytes: of.changed_bytes,
        unnamed: of.is_unnamed,
        removed: of.is_removed,
        removes_names: of.removes_names,
        mount_changes: of.mount_changes,
        mount_removals: of.mount_removals,
        trouble: of.trouble.clone(),
        spooled: of.is_spooled,
        name_spooled: of.name_is_spooled,
        spool_refused: of.spool_refused.clone(),
    }
}

fn access(state: &FileState) -> Access {
    let group = |group: &atoll_volume::shared::file_state::WritingGroup| Group {
        group: GroupAddress(GroupId(group.group)).to_string(),
        label: group.label.clone(),
        members: group.members,
        trouble: group.trouble.clone(),
    };
    Access {
        groups: state.groups.iter().map(group).collect(),
        user: state.user.map(|user| UserAddress(UserId(user)).to_string()),
        may_write: state.certificate_until_secs.is_some(),
        certificate_until_unix_secs: state.certificate_until_secs,
        why_not: state.why_not.clone(),
    }
}

fn open(ring: Option<&Ring>, state: &FileState) -> Open {
    let (readers, locks, silent) = match ring {
        Some(Ring { own_id, uses, .. }) => {
            let reader = |one: &atoll_node::BlockUser| User {
                own: one.peer_id == *own_id,
                node: one.peer_id.clone(),
                addr: one.addr.clone(),
                exclusive: None,
            };
            let lock = |one: &atoll_node::LockUser| User {
                own: one.peer_id == *own_id,
                node: one.peer_id.clone(),
                addr: String::new(),
                exclusive: Some(one.exclusive),
            };
            let readers = uses.readers.iter().map(reader).collect();
            (readers, uses.locks.iter().map(lock).collect(), uses.silent)
        }
        None => (Vec::new(), Vec::new(), 0),
    };
    Open {
        consistency: state.consistency.clone(),
        chosen: state.chooses_consistency,
        here: state.opens,
        locked_here: state.has_lock,
        readers,
        locks,
        silent,
    }
}

impl Written {
    fn text(&self) -> String {
        let who = match (&self.label[..], self.own) {
            ("", true) => "you".to_owned(),
            ("", false) => self.user.clone(),
            (label, true) => format!("{label} (you)"),
            (label, false) => label.to_owned(),
        };
        let when = units::unix_date(self.unix_ms / 1000);
        let what = if self.removal { "removed" } else { "written" };
        format!("{what} {when} UTC by {}", escaped(who.as_bytes()))
    }
}

impl Replica {
    fn text(&self) -> String {
        let node = format!("{} at {}{}", short(&self.node), self.addr, this_node(self.own));
        let lease = || format!("lease {}", units::whole_secs(self.lease_secs));
        let version = self.version.clone().unwrap_or_default();
        match self.state {
            ReplicaState::Newest => format!("{node}: has it, {}", lease()),
            ReplicaState::Behind => format!("{node}: behind, has version {version}, {}", lease()),
            ReplicaState::Missing => format!("{node}: answers, and does not have it"),
            ReplicaState::Silent => {
                let why = self.trouble.as_deref().unwrap_or("no answer");
                format!("{node}: does not answer ({why})")
            }
        }
    }
}

fn this_node(own: bool) -> &'static str {
    if own { " (this node)" } else { "" }
}

impl Data {
    fn lines(&self, wanted: usize) -> Vec<String> {
        let blocks = units::counted(self.blocks, "block", "blocks");
        let first = if self.more { "the first " } else { "" };
        let mut lines = vec![match (&self.trouble, self.blocks) {
            (Some(trouble), _) => format!("cannot be looked at: {trouble}"),
            (None, 0) => "in the inode itself".to_owned(),
            (None, _) if self.degraded + self.absent > 0 => format!(
                "{first}{blocks}: {} on all nodes that should hold them, {} on some, {} on none that answered",
                units::count(self.complete),
                units::count(self.degraded),
                units::count(self.absent)
            ),
            (None, _) if self.complete == 0 => {
                format!("{first}{blocks}, which nobody was asked for")
            }
            (None, _) => format!(
                "{first}{blocks}, {} on all nodes that should hold {} ({})",
                if self.blocks == 1 { "which is" } else { "all of them" },
                if self.blocks == 1 { "it" } else { "them" },
                units::counted(wanted as u64, "copy", "copies")
            ),
        }];
        for Lacking { block, copies, nodes } in &self.lacking {
            let nodes: Vec<&str> = nodes.iter().map(|node| short(node)).collect();
            let copies = units::counted(*copies as u64, "copy", "copies");
            lines.push(format!("{}: {copies}, none on {}", short(block), nodes.join(", ")));
        }
        lines
    }
}

impl Pending {
    fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        if self.removed {
            lines.push("it has no name any more: what is written to it goes nowhere".to_owned());
        } else if self.unnamed {
            lines.push("just created: its name is not on the ring yet".to_owned());
        }
        if self.changed {
            let bytes = units::size(self.changed_bytes);
            lines.push(format!("{bytes} of changes that are not on the ring yet"));
        }
        if self.spooled {
            lines.push("its last version waits in the spool, on this machine's disk".to_owned());
        }
        if self.name_spooled {
            lines.push("changes of its directory's names wait in the spool".to_owned());
        }
        lines.extend(
            self.spool_refused.as_ref().map(|why| format!("the ring does not take them: {why}")),
        );
        if self.removes_names {
            lines.push("changes of its directory's names are not on the ring yet".to_owned());
        }
        lines.extend(self.trouble.as_ref().map(|why| format!("the last attempt failed: {why}")));
        if lines.is_empty() {
            let elsewhere = match (self.mount_changes, self.mount_removals) {
                (0, 0) => String::new(),
                (changes, removals) => format!(
                    "; in the rest of the mount {} and {} of files",
                    units::counted(changes, "change", "changes"),
                    units::counted(removals, "removal", "removals")
                ),
            };
            lines.push(format!("nothing{elsewhere}"));
        }
        lines
    }
}

impl Access {
    fn lines(&self) -> Vec<String> {
        let group = |group: &Group| match &group.trouble {
            None => format!(
                "group {} ({}), {}",
                escaped(group.label.as_bytes()),
                group.group,
                units::counted(group.members, "member", "members")
            ),
            Some(trouble) => format!("group {}: {trouble}", group.group),
        };
        let mut lines: Vec<String> = self.groups.iter().map(group).collect();
        lines.push(match (&self.why_not, self.certificate_until_unix_secs) {
            (None, Some(until)) => {
                format!("you may write it; your certificate ends {} UTC", units::unix_date(until))
            }
            (why, _) => format!("you may not write it: {}", why.as_deref().unwrap_or("unknown")),
        });
        lines
    }
}

impl Open {
    fn lines(&self) -> Vec<String> {
        let mut lines = vec![match self.here {
            0 => "not in this mount".to_owned(),
            count => format!("{} in this mount", units::counted(count, "time", "times")),
        }];
        let model = match &self.consistency[..] {
            "ryw" => "read-your-writes",
            _ => "close-to-open",
        };
        let whose = if self.chosen { "as the file says" } else { "as the mount is" };
        lines.push(format!("opened {model}, {whose}"));
        let names = |users: &[User]| -> String {
            let name = |one: &User| format!("{}{}", short(&one.node), this_node(one.own));
            users.iter().map(name).collect::<Vec<_>>().join(", ")
        };
        if !self.readers.is_empty() {
            lines.push(format!("read or written in the last 15 s by {}", names(&self.readers)));
        }
        let mut by_mode: BTreeMap<bool, Vec<&User>> = BTreeMap::new();
        for lock in &self.locks {
            by_mode.entry(lock.exclusive == Some(true)).or_default().push(lock);
        }
        for (exclusive, users) in by_mode {
            let how = if exclusive { "locked for writing" } else { "locked for reading" };
            let users: Vec<String> = users
                .iter()
                .map(|one| format!("{}{}", short(&one.node), this_node(one.own)))
                .collect();
            lines.push(format!("{how} by {}", users.join(", ")));
        }
        lines
    }
}

impl Report {
    /// Writes it as lines for people.
    pub(super) fn write(&self, output: &mut Output) -> Result<(), Failure> {
        let kind = if self.encrypted { " (encrypted)" } else { "" };
        output.parts(&[
            Part::Name(self.path.as_bytes()),
            Part::Words("  in "),
            Part::Name(self.label.as_bytes()),
            Part::Words(&format!("{kind}, {}", self.volume)),
        ])?;
        let mut fields: Vec<(&str, Vec<String>)> = Vec::new();
        let written = self.written.as_ref().map(|written| format!(", {}", written.text()));
        let mut version = vec![format!("{}{}", self.version, written.unwrap_or_default())];
        for other in &self.concurrent {
            version.push(format!("at the same time {}", other.text()));
        }
        version.extend(self.unreadable.iter().map(|why| format!("one cannot be read: {why}")));
        fields.push(("inode", vec![self.inode.clone()]));
        fields.push(("version", version));
        let mut conflicts = Vec::new();
        if self.conflicts > 0 {
            let others = units::counted(self.conflicts, "other content", "other contents");
            conflicts.push(format!("{others} of the same time, kept in the inode"));
        }
        let beside = self.beside.iter().map(|name| escaped(name));
        conflicts.extend(beside.map(|name| format!("kept beside it: {name}")));
        fields.push(("conflicts", conflicts));
        fields.push(("replicas", self.replica_lines()));
        fields.push(("data", self.data.lines(self.replicas_wanted)));
        fields.push(("pending", self.pending.lines()));
        fields.push(("write", self.access.lines()));
        fields.push(("open", self.open.lines()));
        let todo = match self.todo.is_empty() {
            true => vec!["nothing".to_owned()],
            false => self.todo.clone(),
        };
        fields.push(("to do", todo));
        for (title, lines) in fields {
            for (at, line) in lines.iter().enumerate() {
                let title = if at == 0 { title } else { "" };
                output.line(format!("{title:>9}  {}", escaped(line.as_bytes())))?;
            }
        }
        Ok(())
    }

    fn replica_lines(&self) -> Vec<String> {
        if let Some(trouble) = &self.ring_trouble
            && self.replicas.is_empty()
        {
            return vec![format!("cannot be asked: {trouble}")];
        }
        let newest = self.replicas.iter().filter(|one| one.state == ReplicaState::Newest).count();
        let count = self.replicas.len();
        let few = match count < self.replicas_wanted {
            true => {
                format!("; {} are wanted, and the ring has no more nodes", self.replicas_wanted)
            }
            false => String::new(),
        };
        let mut lines = vec![format!("{newest} of {count} have version {}{few}", self.version)];
        lines.extend(self.replicas.iter().map(Replica::text));
        lines
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use atoll_key::BlockHash;
    use atoll_node::{AskedNode, BlockReplicas, BlockUser, LockUser, ReplicaReport, UsesReport};
    use atoll_volume::shared::file_state::{WritingGroup, WrittenVersion};

    use super::*;

    const VERSION: u64 = 7 << 24 | 0xabc;

    fn ring(copies: Vec<BlockReplicas>, trouble: Option<&str>) -> Ring {
        let node = |n: usize| AskedNode {
            peer_id: format!("{n}").repeat(64),
            addr: format!("10.0.0.{n}:7543"),
            trouble: trouble.filter(|_| n == 3).map(str::to_owned),
        };
        Ring {
            own_id: "1".repeat(64),
            replicas: 3,
            joined: true,
            copies: ReplicaReport { nodes: (1..4).map(node).collect(), blocks: copies },
            uses: UsesReport {
                readers: vec![BlockUser { peer_id: "2".repeat(64), addr: String::new() }],
                locks: vec![LockUser { peer_id: "1".repeat(64), exclusive: true }],
                ..UsesReport::default()
            },
        }
    }

    fn copies(versions: [Option<u64>; 3]) -> BlockReplicas {
        let copy =
            |(node, version)| BlockCopy { node, version, lease_secs: 2_000_000, diverted: false };
        let copies = versions.into_iter().enumerate().map(copy).collect();
        BlockReplicas { copies, trouble: None }
    }

    fn state() -> FileState {
        let written = WrittenVersion {
            user: [5; 32],
            label: "alice".into(),
            height: 7,
            time_ms: 1_795_442_101_000,
            is_removal: false,
        };
        FileState {
            label: "team".into(),
            version: VERSION,
            siblings: vec![written],
            groups: vec![WritingGroup {
                members: 2,
                label: "team".into(),
                ..WritingGroup::default()
            }],
            user: Some([5; 32]),
            certificate_until_secs: Some(4_000_000_000),
            consistency: "cto".into(),
            ..FileState::default()
        }
    }

    fn report(state: FileState, ring: Result<Ring, String>, blocks: usize) -> Report {
        let id = |n: usize| BlockHash([n as u8; 32]).id();
        let blocks = Ok(((0..blocks).map(id).collect(), false));
        let path = PathBuf::from("/m/plan");
        Report::of(Found { path, state, beside: Vec::new(), blocks, ring })
    }

    #[test]
    fn nothing_is_to_be_done_if_all_replicas_have_everything() {
        let all = copies([Some(VERSION); 3]);
        let data = copies([Some(0); 3]);
        let told = report(state(), Ok(ring(vec![all, data.clone(), data], None)), 2);
        assert_eq!(told.todo, Vec::<String>::new());
        assert!(told.replicas.iter().all(|one| one.state == ReplicaState::Newest));
        assert_eq!(told.replica_lines()[0], "3 of 3 have version 7.000abc");
        assert_eq!(
            told.data.lines(3),
            ["2 blocks, all of them on all nodes that should hold them (3 copies)"]
        );
        assert_eq!(told.pending.lines(), ["nothing"]);
        let open = told.open.lines().join("\n");
        for part in [
            "not in this mount",
            "close-to-open",
            "15 s by 222222222222",
            "locked for writing by 111111111111 (this node)",
        ] {
            assert!(open.contains(part), "{part}: {open}");
        }
        let written = told.written.expect("there is one").text();
        assert_eq!(written, "written 2026-11-23 13:55:01 UTC by alice (you)");
    }

    #[test]
    fn what_waits_in_the_spool_is_named() {
        let mut state = state();
        state.pending.is_spooled = true;
        state.pending.name_is_spooled = true;
        state.pending.spool_refused = Some("you are not a member".into());
        let told = report(state, Err("no node runs".into()), 0);
        let lines = told.pending.lines().join("\n");
        for part in
            ["its last version waits in the spool", "names wait in the spool", "not a member"]
        {
            assert!(lines.contains(part), "{part}: {lines}");
        }
        assert!(told.todo.join("\n").contains("--discard"), "{:?}", told.todo);
    }

    #[test]
    fn each_thing_that_is_not_well_is_named_with_what_to_do() {
        let inode = copies([Some(VERSION), Some(6 << 24), None]);
        let data = [copies([Some(0); 3]), copies([Some(0), None, None]), copies([None; 3])];
        let blocks = [vec![inode], data.to_vec()].concat();
        let mut state = state();
        state.pending.is_changed = true;
        state.pending.trouble = Some("the ring did not take it".into());
        state.conflicts = 1;
        state.certificate_until_secs = None;
        state.why_not = Some("you are not a member".into());
        let told = report(state, Ok(ring(blocks, Some("timed out"))), 3);
        let states: Vec<ReplicaState> = told.replicas.iter().map(|one| one.state).collect();
        assert_eq!(states, [ReplicaState::Newest, ReplicaState::Behind, ReplicaState::Silent]);
        assert_eq!((told.data.complete, told.data.degraded, told.data.absent), (1, 1, 1));
        assert_eq!(told.data.lacking[0].nodes, ["2".repeat(64), "3".repeat(64)]);
        let todo = told.todo.join("\n");
        for part in [
            "333333333333 does not answer",
            "222222222222 does not have the newest version",
            "1 block of the contents is on no node",
            "1 block of the contents lack",
            "Keep the volume mounted: changes are not on the ring (the ring did not take it)",
            "Open the file once",
            "atoll grant NAME atolluser:",
        ] {
            assert!(todo.contains(part), "{part}: {todo}");
        }
    }

    #[test]
    fn what_the_mount_knows_is_shown_if_the_ring_cannot_be_asked() {
        let told = report(state(), Err("no node runs".into()), 1);
        assert_eq!(told.replica_lines(), ["cannot be asked: no node runs"]);
        assert!(told.todo[0].contains("no node runs") && told.todo[0].contains("`atoll status`"));
        assert!(told.data.lines(0)[0].contains("nobody was asked"));
        assert!(told.access.may_write);
    }

    /// Two replicas with different versions of one height both lack something.
    #[test]
    fn replicas_of_one_height_are_told_apart() {
        let other = VERSION + 1;
        let inode = copies([Some(VERSION), Some(other), Some(VERSION)]);
        let told = report(state(), Ok(ring(vec![inode], None)), 0);
        let states: Vec<ReplicaState> = told.replicas.iter().map(|one| one.state).collect();
        assert_eq!(states, [ReplicaState::Newest, ReplicaState::Behind, ReplicaState::Newest]);
    }
}
