//! `atoll status`: the node's place on the ring, what it holds, whether repair is done.

use std::collections::BTreeSet;
use std::io::IsTerminal;
use std::str::FromStr;
use std::time::{Duration, Instant};

use atoll_key::VolumeAddress;
use atoll_node::{Cache, Clock, Diverted, RingNode, Status, shell_word};
use serde::Serialize;

use crate::connection;
use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::output::Output;
use crate::shared_spool;
use crate::spool::{self, Pending};
use crate::units;
use crate::user;

/// Successors in the table for people.
const SUCCESSORS_SHOWN: usize = 8;
/// How often `--wait` and `--watch` look.
const WAIT_LOOK_EVERY: Duration = Duration::from_millis(200);
const WATCH_LOOK_EVERY: Duration = Duration::from_secs(1);

/// Arguments of `atoll status`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll status
  atoll status --watch
  atoll status --json | jq .repair.queue_blocks
  atoll status --wait nodes=5 --wait replicated --timeout 1min")]
pub(crate) struct Args {
    /// Everything, as one JSON object
    #[arg(long)]
    json: bool,

    /// Show it again every second
    #[arg(long)]
    watch: bool,

    /// Wait until the node is in this state first: `joined` (it has a place on the ring),
    /// `replicated` (all blocks it is the root of had all their copies when it last compared),
    /// or `nodes=N` (it sees a ring of N nodes); may be given several times
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
    Nodes(usize),
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
    fn holds(self, status: &Status) -> bool {
        match self {
            Wish::Joined => status.joined,
            Wish::Replicated => status.joined && status.repair.fully_replicated,
            Wish::Nodes(nodes) => status.joined && nodes_seen(status) == nodes,
        }
    }

    fn missing(self, status: &Status) -> String {
        match self {
            Wish::Joined => "it has no place on the ring yet".into(),
            Wish::Replicated => {
                let queue = units::counted(status.repair.queue_blocks, "copy", "copies");
                format!("replication is not complete ({queue} known to be missing)")
            }
            Wish::Nodes(nodes) => {
                let seen = units::counted(nodes_seen(status) as u64, "node", "nodes");
                format!("it sees {seen} on the ring, not {nodes}")
            }
        }
    }
}

#[derive(Serialize)]
struct JsonStatus<'a> {
    #[serde(flatten)]
    status: &'a Status,
    /// The names of shared volumes of other nodes that were joined here.
    joined_volumes: Vec<String>,
    /// Changes that mounts of this machine have made and the ring has not stored.
    pending: &'a [Pending],
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

/// The nodes this one knows of: all of a small ring, its surroundings of a large one.
fn nodes_seen(status: &Status) -> usize {
    let known: BTreeSet<&str> = status
        .successors
        .iter()
        .chain(&status.predecessor)
        .map(|node| node.peer_id.as_str())
        .chain([status.peer_id.as_str()])
        .collect();
    known.len()
}

/// Shows the status.
pub(crate) async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let mut status = wait(args, global).await?;
    loop {
        let mut output = Output::new();
        let dir = global.dir()?;
        let pending = [spool::pending(&dir), shared_spool::pending(&dir)].concat();
        if args.watch && std::io::stdout().is_terminal() {
            output.bytes(b"\x1b[H\x1b[2J")?;
        }
        if args.json {
            let joined_volumes = user::joined_names(&dir);
            output.json(&JsonStatus { status: &status, joined_volumes, pending: &pending })?;
        } else {
            let joined = user::joined_names(&dir).into_iter();
            let joined = joined.map(|name| {
                let address = user::joined(&dir, &name).ok().flatten().map(|joined| joined.volume);
                let address = address.map(|volume| VolumeAddress(volume).to_string());
                ("joined", format!("{name} {}", address.unwrap_or_default()))
            });
            let lines = describe(&status).into_iter().chain(joined).chain(waiting(&pending));
            for (name, value) in lines {
                output.line(format!("{name:>10}  {value}"))?;
            }
        }
        output.flush()?;
        drop(output);
        if !args.watch {
            return Ok(());
        }
        tokio::time::sleep(WATCH_LOOK_EVERY).await;
        status = connection::status(global).await?;
    }
}

async fn wait(args: &Args, global: &Global) -> Result<Status, Failure> {
    let deadline = Instant::now() + args.timeout;
    loop {
        let late = Instant::now() >= deadline;
        match connection::status(global).await {
            Ok(status) => match args.wait.iter().find(|wish| !wish.holds(&status)) {
                None => return Ok(status),
                Some(wish) if late => {
                    return Err(Failure::new(
                        Exit::Unavailable,
                        format!(
                            "the node is not where it should be after {}",
                            units::duration(args.timeout)
                        ),
                    )
                    .because(wish.missing(&status)));
                }
                Some(_) => {}
            },
            Err(failure) if late || args.wait.is_empty() => return Err(failure),
            Err(_) => {}
        }
        tokio::time::sleep(WAIT_LOOK_EVERY).await;
    }
}

/// Enough of a hexadecimal number to tell nodes apart.
fn short(hex: &str) -> &str {
    hex.get(..12).unwrap_or(hex)
}

fn describe(status: &Status) -> Vec<(&'static str, String)> {
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
    for warning in &status.warnings {
        lines.push(("warning", warning.clone()));
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
    if nodes_seen(status) == 1 {
        return "this node alone".into();
    }
    let before = match &status.predecessor {
        None => "nobody known".into(),
        Some(node) if node.peer_id == status.peer_id => "another place of its own".into(),
        Some(node) => format!("{} at {}", short(&node.id), node.addr),
    };
    format!("about {:.0} nodes; before this one: {before}", status.estimated_nodes.max(2.0))
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

fn repair(status: &Status) -> String {
    let repair = &status.repair;
    let roots = units::counted(repair.root_blocks, "block", "blocks");
    let copies = units::counted(repair.replicas_wanted.into(), "copy", "copies");
    let duty = format!("this node sees to {roots}, {copies} of each");
    match (repair.fully_replicated, repair.queue_blocks) {
        (true, _) if repair.vanished_nodes > 0 => {
            format!("complete among the nodes that are left: {duty}; see the warning")
        }
        (true, _) => format!("complete: {duty}"),
        (false, 0) => format!("not checked yet: {duty}"),
        (false, queue) => {
            format!("under way, {} missing: {duty}", units::counted(queue, "copy", "copies"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use atoll_node::Repair;

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
        assert!(Wish::Nodes(3).holds(&status()) && !Wish::Nodes(2).holds(&status()));
        assert!(!Wish::Replicated.holds(&status()));
        let repair = Repair { fully_replicated: true, ..Repair::default() };
        assert!(Wish::Replicated.holds(&Status { repair, ..status() }));
        assert!(!Wish::Joined.holds(&Status::default()));
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
        let alone = Status { joined: true, ..Status::default() };
        assert_eq!(ring(&alone), "this node alone");
        assert!(ring(&status()).contains("before this one: cc"));
    }
}
