//! `atoll status`: the node's place on the ring, what it holds, whether repair is done.

use std::collections::BTreeSet;
use std::io::IsTerminal;
use std::str::FromStr;
use std::time::{Duration, Instant};

use atoll_key::VolumeAddress;
use atoll_node::{Cache, Clock, Diverted, Health, RingCount, RingNode, Status, shell_word};
use atoll_upkeep::shared_spool;
use serde::Serialize;

use crate::connection;
use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::nfs::servers::{self, ServerRecord};
use crate::output::{Output, safe_message};
use crate::spool::{self, JsonPending, Pending};
use crate::units;
use crate::user;

/// Successors in the table for people.
const SUCCESSORS_SHOWN: usize = 8;
/// How often `--wait` and `--watch` look.
const WAIT_LOOK_EVERY: Duration = Duration::from_millis(200);
const WATCH_LOOK_EVERY: Duration = Duration::from_secs(1);
/// How often `--wait` has a large ring counted: that takes a lookup for each sixteen nodes.
const COUNT_EVERY: Duration = Duration::from_secs(2);
/// How long counting may take at least.
const COUNT_LIMIT: Duration = Duration::from_secs(5);

/// Arguments of `atoll status`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll status
  atoll status --watch
  atoll status --json | jq .repair.queue_blocks
  atoll status --wait nodes=5 --wait replicated --timeout 1min
  atoll status >/dev/null || echo \"exit code $?\"

The exit code tells scripts whether the blocks that this node sees to have as many copies as the
network was made for (`atoll up --replicas`):
  0  healthy: they have
  8  degraded: they have fewer, or some could not be copied; a network of fewer nodes than copies
     is degraded too, so one that has just been started is until more nodes have joined
  9  the node cannot tell, e.g. because it has just started or its neighbours have just changed
  3  no node runs here
  5  the node does not answer
With --wait it is 0 as soon as the states are reached, and 5 if they are not in time.")]
pub(crate) struct Args {
    /// Everything, as one JSON object
    #[arg(long)]
    json: bool,

    /// Show it again every second
    #[arg(long)]
    watch: bool,

    /// Wait until the node is in this state first: `joined` (it has a place on the ring),
    /// `replicated` (all blocks it is the root of had all copies that the network was made for
    /// when it last compared), or `nodes=N` (the ring has N nodes, counted by walking around it
    /// if it is large); may be given several times
    #[arg(long, value_name = "STATE")]
    wait: Vec<Wish>,

    /// How long to wait at most
    #[arg(long, value_name = "TIME", default_value = "1min", value_parser = units::parse_duration)]
    timeout: Duration,
}

/// A state to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wish {
    Joined,
    Replicated,
    Nodes(u64),
}

impl FromStr for Wish {
    type Err = String;

    fn from_str(text: &str) -> Result<Wish, String> {
        match (text, text.strip_prefix("nodes=").map(str::parse)) {
            ("joined", _) => Ok(Wish::Joined),
            ("replicated", _) => Ok(Wish::Replicated),
            (_, Some(Ok(nodes))) => Ok(Wish::Nodes(nodes)),
            _ => Err("it is one of joined, replicated, nodes=N".into()),
        }
    }
}

impl Wish {
    /// Whether it holds; `counted` are the nodes of a ring that is too large to be seen from one
    /// place.
    fn holds(self, status: &Status, counted: Option<RingCount>) -> bool {
        match self {
            Wish::Joined => status.joined,
            Wish::Replicated => status.joined && status.repair.fully_replicated,
            Wish::Nodes(nodes) => status.joined && nodes_of(status, counted) == Some(nodes),
        }
    }

    fn missing(self, status: &Status, counted: Option<RingCount>) -> String {
        match self {
            Wish::Joined => "it has no place on the ring yet".into(),
            Wish::Replicated if status.health_reasons.is_empty() => {
                "replication is not complete".into()
            }
            Wish::Replicated => {
                format!("replication is not complete: {}", status.health_reasons.join("; "))
            }
            Wish::Nodes(nodes) => match (nodes_of(status, counted), counted) {
                (Some(seen), _) => {
                    let seen = units::counted(seen, "node", "nodes");
                    format!("the ring has {seen}, not {nodes}")
                }
                (None, Some(part)) => {
                    let part = units::counted(part.nodes, "node", "nodes");
                    format!("it has counted {part} and not come around the ring, not {nodes}")
                }
                (None, None) => "the nodes of the ring could not be counted".into(),
            },
        }
    }
}

/// How many nodes the ring has: as the node sees them, or as were counted.
fn nodes_of(status: &Status, counted: Option<RingCount>) -> Option<u64> {
    let counted = counted.filter(|count| count.is_whole).map(|count| count.nodes);
    status.known_nodes.or(counted).or_else(|| is_of_old_node(status).then(|| named(status)))
}

/// Whether a node of an earlier version sent this, which tells no stage and cannot count its ring.
fn is_of_old_node(status: &Status) -> bool {
    status.repair.stage.is_empty()
}

/// The nodes that a status names: all of a small ring.
fn named(status: &Status) -> u64 {
    let neighbours = status.successors.iter().chain(&status.predecessor);
    let named = neighbours.map(|node| node.peer_id.as_str()).chain([status.peer_id.as_str()]);
    named.collect::<BTreeSet<&str>>().len() as u64
}

#[derive(Serialize)]
struct JsonStatus<'a> {
    #[serde(flatten)]
    status: &'a Status,
    /// The names of shared volumes of other nodes that were joined here.
    joined_volumes: Vec<String>,
    /// Changes that mounts of this machine have made and the ring has not stored.
    pending: Vec<JsonPending<'a>>,
    /// Servers of NFS that run from the node's directory.
    nfs: &'a [ServerRecord],
}

/// The changes that wait for the ring: a line for each volume.
fn waiting(pending: &[Pending]) -> Vec<(&'static str, String)> {
    let lines = pending.iter().flat_map(
        |Pending { name, bytes, files, mounted, refused, set_aside, .. }| {
            let waits = (*bytes > 0).then(|| {
                let how = match (mounted, refused) {
                    (true, _) => String::new(),
                    (false, None) => ", and it is not mounted".to_owned(),
                    (false, Some(_)) => {
                        let word = shell_word(name);
                        format!(", which does not take them: `atoll volume recover {word}`")
                    }
                };
                let size = units::size(*bytes);
                match files {
                    0 => format!("{size} of changes to {name} wait for the ring{how}"),
                    _ => {
                        let files = units::counted(*files, "file", "files");
                        format!("{files} of {name} ({size}) wait for the ring{how}")
                    }
                }
            });
            let aside = (!set_aside.is_empty()).then(|| {
                let word = shell_word(name);
                format!("changes to {name} were set aside: `atoll volume recover {word}`")
            });
            [waits, aside]
        },
    );
    lines.flatten().map(|line| ("pending", line)).collect()
}

/// Shows the status.
pub(crate) async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let mut status = wait(args, global).await?;
    loop {
        let mut output = Output::new();
        let dir = global.dir()?;
        let pending = [spool::pending(&dir), shared_spool::pending(&dir)].concat();
        let nfs = servers::running(&dir);
        if args.watch && std::io::stdout().is_terminal() {
            output.bytes(b"\x1b[H\x1b[2J")?;
        }
        if args.json {
            let joined_volumes = user::joined_names(&dir);
            let pending = pending.iter().map(JsonPending::from).collect();
            let (status, nfs) = (&status, &nfs[..]);
            output.json(&JsonStatus { status, joined_volumes, pending, nfs })?;
        } else {
            let joined = user::joined_names(&dir).into_iter();
            let joined = joined.map(|name| {
                let address = user::joined(&dir, &name).ok().flatten().map(|joined| joined.volume);
                let address = address.map(|volume| VolumeAddress(volume).to_string());
                ("joined", format!("{name} {}", address.unwrap_or_default()))
            });
            let served = nfs.iter().flat_map(ServerRecord::lines).map(|line| ("nfs", line));
            let lines = describe(&status).into_iter().chain(joined);
            let lines = lines.chain(waiting(&pending)).chain(served);
            for (name, value) in lines {
                output.line(format!("{name:>10}  {value}"))?;
            }
        }
        output.flush()?;
        drop(output);
        if !args.watch {
            return match status.health {
                // It was asked for something else, which it has.
                _ if !args.wait.is_empty() => Ok(()),
                Health::Healthy => Ok(()),
                Health::Degraded => Err(Failure::silent(Exit::Degraded)),
                Health::Unknown => Err(Failure::silent(Exit::Unknown)),
            };
        }
        tokio::time::sleep(WATCH_LOOK_EVERY).await;
        status = connection::status(global).await?;
    }
}

async fn wait(args: &Args, global: &Global) -> Result<Status, Failure> {
    let deadline = Instant::now() + args.timeout;
    let mut count = RingCounter::default();
    loop {
        let late = Instant::now() >= deadline;
        match connection::status(global).await {
            Ok(status) => {
                let counts = args.wait.iter().any(|wish| matches!(wish, Wish::Nodes(_)));
                if counts && status.known_nodes.is_none() && !is_of_old_node(&status) {
                    count.renew(global, deadline).await;
                }
                match args.wait.iter().find(|wish| !wish.holds(&status, count.last)) {
                    None => return Ok(status),
                    Some(wish) if late => {
                        let after = units::duration(args.timeout);
                        let what = format!("the node is not where it should be after {after}");
                        let why = wish.missing(&status, count.last);
                        return Err(Failure::new(Exit::Unavailable, what).because(why));
                    }
                    Some(_) => {}
                }
            }
            Err(failure) if late || args.wait.is_empty() => return Err(failure),
            Err(_) => {}
        }
        tokio::time::sleep(WAIT_LOOK_EVERY).await;
    }
}

/// Has the node count a ring that it does not see all of, now and then.
#[derive(Default)]
struct RingCounter {
    last: Option<RingCount>,
    counted_at: Option<Instant>,
}

impl RingCounter {
    /// Counts again unless that was done a moment ago; a walk that fails, or takes longer than
    /// there is time, leaves nothing counted.
    async fn renew(&mut self, global: &Global, deadline: Instant) {
        if self.counted_at.is_some_and(|at| at.elapsed() < COUNT_EVERY) {
            return;
        }
        let left = deadline.saturating_duration_since(Instant::now()).max(COUNT_LIMIT);
        let counting = async { connection::impatient(global).await.ok()?.count_nodes().await.ok() };
        self.last = tokio::time::timeout(left, counting).await.ok().flatten();
        self.counted_at = Some(Instant::now());
    }
}

/// Enough of a hexadecimal number to tell nodes apart.
fn short(hex: &str) -> &str {
    hex.get(..12).unwrap_or(hex)
}

fn describe(status: &Status) -> Vec<(&str, String)> {
    let mut lines = vec![
        ("node", format!("{} at {}", short(&status.peer_id), status.advertise)),
        ("network", short(&status.network_id).to_string()),
        (
            "up",
            format!(
                "{}, process {}, {} of memory",
                units::whole_secs(status.uptime_secs),
                status.process,
                units::size(status.resident_bytes),
            ),
        ),
        ("ring", ring(status)),
    ];
    lines.push(("position", positions(&status.positions)));
    // Between a node's own places there are others'; only those are news.
    let others: Vec<&RingNode> =
        status.successors.iter().filter(|node| node.peer_id != status.peer_id).collect();
    for (i, node) in others.iter().take(SUCCESSORS_SHOWN).enumerate() {
        let title = if i == 0 { "successors" } else { "" };
        lines.push((title, format!("{} at {}", short(&node.id), node.addr)));
    }
    if let Some(more @ 1..) = others.len().checked_sub(SUCCESSORS_SHOWN) {
        lines.push(("", format!("and {more} more (--json shows all)")));
    }
    lines.push((
        "holds",
        format!(
            "{}, {} ({} of {} on disk)",
            units::counted(status.blocks, "block", "blocks"),
            units::size(status.block_bytes),
            units::size(status.disk_bytes),
            units::size(status.capacity_bytes),
        ),
    ));
    lines.push(("cache", cache(&status.cache)));
    lines.extend(health(status));
    lines.push(("repair", repair(status)));
    lines.push(("clock", clock(&status.clock)));
    lines.extend(diverted(&status.diverted).map(|line| ("diverted", line)));
    lines.push((
        "traffic",
        format!(
            "{} in, {} out, {}",
            units::size(status.received_bytes),
            units::size(status.sent_bytes),
            units::counted(status.connections, "connection", "connections"),
        ),
    ));
    for (reason, times) in &status.refusals {
        lines.push(("refused", format!("{}: {reason}", units::counted(*times, "time", "times"))));
    }
    for (peer, blocks) in &status.bad_blocks {
        let blocks = units::counted(*blocks, "bad block", "bad blocks");
        lines.push(("bad", format!("{blocks} from {}", short(peer))));
    }
    for volume in status.volumes.iter().filter(|volume| volume.root_version > 0) {
        lines.push(("volume", format!("{} {}", volume.name, volume.address)));
    }
    for row in status.parts.values().flat_map(|part| &part.rows) {
        lines.push((&row.name, safe_message(&row.text)));
    }
    for warning in &status.warnings {
        lines.push(("warning", safe_message(warning)));
    }
    lines
}

/// One position, or how many there are and the first.
fn positions(positions: &[String]) -> String {
    match positions {
        [] => "none".into(),
        [only] => short(only).into(),
        [first, ..] => {
            format!("{} virtual servers, the first at {}", positions.len(), short(first))
        }
    }
}

fn ring(status: &Status) -> String {
    if !status.joined {
        return "not joined yet".into();
    }
    let nodes = match status.known_nodes {
        Some(1) => return "this node alone".into(),
        Some(nodes) => units::counted(nodes, "node", "nodes"),
        None => format!("about {:.0} nodes", status.estimated_nodes.max(2.0)),
    };
    let before = match &status.predecessor {
        None => "nobody known".into(),
        Some(node) if node.peer_id == status.peer_id => "another place of its own".into(),
        Some(node) => format!("{} at {}", short(&node.id), node.addr),
    };
    format!("{nodes}; before this one: {before}")
}

fn cache(cache: &Cache) -> String {
    if cache.limit_bytes == 0 {
        return "off".into();
    }
    format!(
        "{}, {} of {}; answered {} of {} questions",
        units::counted(cache.blocks, "block", "blocks"),
        units::size(cache.bytes),
        units::size(cache.limit_bytes),
        units::count(cache.hits),
        units::count(cache.hits + cache.misses),
    )
}

fn clock(clock: &Clock) -> String {
    if clock.compared == 0 {
        return "not compared with others yet".into();
    }
    let others = units::counted(clock.compared as u64, "other address", "other addresses");
    let compared = format!("agrees with {} of {others}", clock.agreeing);
    match clock.off_secs {
        0 => compared,
        off => {
            let direction = if off < 0 { "behind" } else { "ahead" };
            let off = units::whole_secs(off.unsigned_abs());
            format!("{compared}: {off} {direction}; their time is used")
        }
    }
}

/// Copies that are not where they belong, if there are any.
fn diverted(diverted: &Diverted) -> Option<String> {
    let Diverted { pointers, held_for_others } = *diverted;
    let elsewhere = units::counted(pointers, "copy", "copies");
    let here = units::counted(held_for_others, "copy", "copies");
    match (pointers, held_for_others) {
        (0, 0) => None,
        (_, 0) => Some(format!("other nodes keep {elsewhere} for which there is no room here")),
        (0, _) => Some(format!("{here} kept here for nodes without room")),
        _ => Some(format!("other nodes keep {elsewhere} for this one, it keeps {here} for others")),
    }
}

/// Whether the copies are there that should be, and what is lacking or not known. A ring that has
/// too few nodes is nothing to be alarmed by: it may have been started just now.
fn health(status: &Status) -> Vec<(&'static str, String)> {
    let verdict = match status.health {
        Health::Healthy => {
            let copies = units::counted(status.repair.replicas_wanted.into(), "copy", "copies");
            return vec![("copies", format!("complete: {copies} of each block this node sees to"))];
        }
        Health::Degraded => "not complete",
        Health::Unknown => "not known yet",
    };
    let reasons = status.health_reasons.iter().enumerate();
    reasons
        .map(|(i, why)| match i {
            0 => ("copies", format!("{verdict}: {why}")),
            _ => ("", why.clone()),
        })
        .collect()
}

fn repair(status: &Status) -> String {
    let repair = &status.repair;
    let roots = units::counted(repair.root_blocks, "block", "blocks");
    let wanted = units::counted(repair.replicas_wanted.into(), "copy", "copies");
    let missing = match repair.queue_blocks {
        0 => String::new(),
        queue => format!("; {} known to be missing", units::counted(queue, "copy", "copies")),
    };
    let made = units::counted(repair.repaired_blocks, "copy", "copies");
    format!(
        "this node sees to {roots}: {} of {wanted} each{missing}; {made} made since the start",
        repair.replicas_present
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use atoll_node::{Repair, StatusPart, StatusRow};

    fn node(id: &str) -> RingNode {
        RingNode { id: id.into(), addr: "127.0.0.1:1".into(), peer_id: id.into() }
    }

    fn status() -> Status {
        Status {
            joined: true,
            peer_id: "aa".into(),
            positions: vec!["aa".into()],
            predecessor: Some(node("cc")),
            successors: vec![node("bb"), node("cc")],
            known_nodes: Some(3),
            ..Status::default()
        }
    }

    #[test]
    fn diverted_copies_are_told_if_there_are_any() {
        let told = |pointers, held_for_others| diverted(&Diverted { pointers, held_for_others });
        assert_eq!(told(0, 0), None);
        let elsewhere = "other nodes keep 2 copies for which there is no room here";
        assert_eq!(told(2, 0).as_deref(), Some(elsewhere));
        assert_eq!(told(0, 1).as_deref(), Some("1 copy kept here for nodes without room"));
        assert!(told(1, 2).is_some_and(|line| line.contains("it keeps 2 copies for others")));
    }

    #[test]
    fn what_waits_for_the_ring_is_told() {
        let spool = Pending { name: "work".into(), bytes: 1024, ..Pending::default() };
        let aside = Pending { bytes: 0, set_aside: vec!["x".into()], ..spool.clone() };
        let shared = Pending { files: 2, name: "team".into(), mounted: true, ..spool.clone() };
        let refused = Pending { refused: Some("x".into()), mounted: false, ..shared.clone() };
        let told = waiting(&[refused]);
        assert!(told[0].1.ends_with("not take them: `atoll volume recover team`"), "{told:?}");
        let told = waiting(&[spool, aside, shared]);
        assert_eq!(told[2].1, "2 files of team (1.0 KiB) wait for the ring");
        let said = "1.0 KiB of changes to work wait for the ring, and it is not mounted";
        assert_eq!(told[0], ("pending", said.into()));
        assert!(told[1].1.ends_with("`atoll volume recover work`"), "{told:?}");
    }

    #[test]
    fn wishes_are_read_and_judged() {
        assert_eq!("nodes=3".parse(), Ok(Wish::Nodes(3)));
        assert!("nodes=x".parse::<Wish>().is_err() && "done".parse::<Wish>().is_err());
        let holds = |wish: Wish, status: &Status| wish.holds(status, None);
        assert!(holds(Wish::Nodes(3), &status()) && !holds(Wish::Nodes(2), &status()));
        assert!(!holds(Wish::Replicated, &status()));
        let repair = Repair { fully_replicated: true, ..Repair::default() };
        assert!(holds(Wish::Replicated, &Status { repair, ..status() }));
        assert!(!holds(Wish::Joined, &Status::default()));
    }

    #[test]
    fn a_large_ring_has_as_many_nodes_as_were_counted_and_never_as_were_estimated() {
        let repair = Repair { stage: "in_step".into(), ..Repair::default() };
        let large = Status { known_nodes: None, estimated_nodes: 24.0, repair, ..status() };
        let wish = Wish::Nodes(24);
        let counted = |nodes, is_whole| Some(RingCount { nodes, is_whole });
        assert!(wish.holds(&large, counted(24, true)));
        for not in [None, counted(24, false), counted(25, true)] {
            assert!(!wish.holds(&large, not), "{not:?}");
            assert!(wish.missing(&large, not).contains("count") || not == counted(25, true));
        }
        assert!(wish.missing(&large, counted(25, true)).contains("has 25 nodes, not 24"));
        // A node of an earlier version names its neighbours, and cannot count.
        let old = Status { known_nodes: None, ..status() };
        assert!(Wish::Nodes(3).holds(&old, None) && !wish.holds(&old, None));
    }

    #[test]
    fn copies_are_told_without_alarm_and_with_what_to_do() {
        let told = |health, reasons: &[&str]| {
            let health_reasons = reasons.iter().map(|why| (*why).to_owned()).collect();
            let repair = Repair { replicas_wanted: 3, ..Repair::default() };
            super::health(&Status { health, health_reasons, repair, ..status() })
        };
        let complete = "complete: 3 copies of each block this node sees to";
        assert_eq!(told(Health::Healthy, &[]), [("copies", complete.to_owned())]);
        let lacking = told(Health::Degraded, &["add 2 nodes", "it has no room"]);
        assert_eq!(lacking[0], ("copies", "not complete: add 2 nodes".into()));
        assert_eq!(lacking[1], ("", "it has no room".into()));
        let waits = told(Health::Unknown, &["it has just started"]);
        assert_eq!(waits, [("copies", "not known yet: it has just started".to_owned())]);
    }

    #[test]
    fn the_cache_says_what_it_holds_and_how_useful_it_is() {
        assert_eq!(cache(&Cache::default()), "off");
        let used = Cache {
            blocks: 2,
            bytes: 1 << 15,
            limit_bytes: 1 << 26,
            hits: 3,
            misses: 7,
            evictions: 0,
        };
        let said = "2 blocks, 32.0 KiB of 64.0 MiB; answered 3 of 10 questions";
        assert_eq!(cache(&used), said);
    }

    #[test]
    fn a_wrong_clock_is_shown_with_how_far_it_is_off() {
        assert_eq!(clock(&Clock::default()), "not compared with others yet");
        let right = Clock { compared: 3, agreeing: 3, ..Clock::default() };
        assert_eq!(clock(&right), "agrees with 3 of 3 other addresses");
        let wrong = clock(&Clock { compared: 3, off_secs: -7200, ..Clock::default() });
        assert!(wrong.starts_with("agrees with 0 of 3 other addresses: 2h"), "{wrong}");
        assert!(wrong.ends_with("behind; their time is used"), "{wrong}");
    }

    #[test]
    fn a_nodes_own_virtual_servers_are_not_shown_as_its_neighbours() {
        let own = RingNode { peer_id: "aa".into(), ..node("dd") };
        let mut with_own = status();
        with_own.successors.insert(0, own.clone());
        let shown = |status: &Status| -> Vec<String> {
            let lines = describe(status).into_iter();
            lines.map(|(name, value)| format!("{name} {value}")).collect()
        };
        assert_eq!(shown(&with_own), shown(&status()));
        assert!(shown(&with_own).contains(&"successors bb at 127.0.0.1:1".to_string()));
        with_own.predecessor = Some(own);
        assert!(ring(&with_own).ends_with("before this one: another place of its own"));
    }

    #[test]
    fn a_node_without_a_place_says_so() {
        assert_eq!(ring(&Status::default()), "not joined yet");
        let alone = Status { joined: true, known_nodes: Some(1), ..Status::default() };
        assert_eq!(ring(&alone), "this node alone");
        assert!(ring(&status()).starts_with("3 nodes; before this one: cc"));
        let large = Status { known_nodes: None, estimated_nodes: 23.6, ..status() };
        assert!(ring(&large).starts_with("about 24 nodes; "));
    }

    #[test]
    fn subsystems_made_elsewhere_have_rows_of_their_own() {
        let row = |text: &str| StatusRow { name: "pool".into(), text: text.into() };
        let rows = vec![row("work of 3 nodes"), row("\x1b[2Jplay")];
        let part = StatusPart { rows, ..StatusPart::default() };
        let parts = [("pools".to_owned(), part)].into();
        let status = Status { parts, ..status() };
        let lines = describe(&status);
        let pools: Vec<&str> =
            lines.iter().filter(|line| line.0 == "pool").map(|line| &line.1[..]).collect();
        assert_eq!(pools[0], "work of 3 nodes");
        assert!(pools.len() == 2 && !pools[1].contains(char::is_control), "{pools:?}");
    }
}
