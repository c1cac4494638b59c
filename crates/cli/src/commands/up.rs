//! `atoll up`: a node in the foreground.

use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::sync::Arc;

use atoll_node::{
    IdProfile, JoinCode, MAX_REPLICAS, Node, NodeConfig, StartError, VirtualServers, daemon_runtime,
};
use atoll_upkeep::VolumeWalk;
use clap::builder::{PossibleValuesParser, TypedValueParser};

use crate::crash;
use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::heap;
use crate::messages::note;
use crate::units;

/// Threads of a node: enough for TLS and hashing on several cores, few enough to stay
/// small when idle. A guess.
const MAX_WORKERS: usize = 4;

/// The longest join code read from standard input, bytes.
const MAX_CODE_BYTES: u64 = 64 << 10;

/// Arguments of `atoll up`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll up                                          make a network, or start again
  atoll up --join - --storage 50GiB < code          enter the network of an invitation
  atoll up --join -                                 the same: paste the code, then Enter and Ctrl-D
  atoll invite | ssh other atoll up --join -        the same on another machine
  atoll invite | atoll --dir /tmp/n2 up --listen 127.0.0.1:0 --join -   a second node on this machine

The code is a secret: a code in the place of `-` is seen by every user of the machine (`ps`), and stays in the
shell's history.
The node remembers its options: later starts need none. Ctrl-C leaves the ring and stops the
node. Neither that nor a crash loses what it stores.")]
pub(crate) struct Args {
    /// Where to accept connections; port 0 takes a free one [default: 0.0.0.0:7543]
    #[arg(long, value_name = "IP:PORT", value_parser = parse_addr)]
    listen: Option<SocketAddr>,

    /// The address others should connect to, if it is not the one listened on
    #[arg(long, value_name = "IP:PORT", value_parser = parse_addr)]
    advertise: Option<SocketAddr>,

    /// Join the network of a code, which `atoll invite` prints; `-` reads it from standard
    /// input, where no other user sees it. Without a code the first start makes a new network
    #[arg(long, value_name = "CODE")]
    join: Option<String>,

    /// How much disk to give at most, e.g. 50GiB [default: 10GiB]; `atoll contribute` gives it
    /// in other ways
    #[arg(long, value_name = "SIZE", value_parser = units::parse_size)]
    storage: Option<u64>,

    /// How many places on the ring to have: a number, or `auto` for one per 10 GiB of
    /// storage [default: auto]
    #[arg(long, value_name = "N|auto")]
    virtual_servers: Option<VirtualServers>,

    /// Memory for blocks cached for other nodes; 0 for no cache [default: 64MiB]
    #[arg(long, value_name = "SIZE", value_parser = units::parse_size)]
    cache: Option<u64>,

    /// How a new network derives the ring positions of its nodes: `identity`, from their keys, for
    /// members you invite; `address`, from their IP addresses (then one node per address), for
    /// networks that anybody may join. It can never be changed [default: identity]
    #[arg(long, value_name = "PROFILE", value_parser = profile_parser(), conflicts_with = "join")]
    #[arg(hide_possible_values = true)]
    node_ids: Option<IdProfile>,

    /// How many copies of each block a new network keeps, 1 to 8. It can never be changed [default: 3]
    #[arg(long, value_name = "K", conflicts_with = "join")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_REPLICAS)))]
    replicas: Option<u32>,
}

/// A list rather than a function, so that shells can complete it.
fn profile_parser() -> impl TypedValueParser<Value = IdProfile> {
    PossibleValuesParser::new(["identity", "address"]).map(|text| match text.as_str() {
        "address" => IdProfile::Address,
        _ => IdProfile::Identity,
    })
}

fn parse_addr(text: &str) -> Result<SocketAddr, String> {
    let hint = "it is an IP address and a port, e.g. 0.0.0.0:7543 or [::1]:7543";
    text.parse().map_err(|_| hint.to_string())
}

/// Runs the node until it is told to stop.
pub(crate) fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let config = NodeConfig {
        listen: args.listen,
        advertise: args.advertise,
        join: args.join.as_deref().map(join_code).transpose()?,
        storage_bytes: args.storage,
        virtual_servers: args.virtual_servers,
        cache_bytes: args.cache,
        profile: args.node_ids,
        replicas: args.replicas,
        walk: Some(Arc::new(VolumeWalk)),
        ..NodeConfig::new(global.dir()?)
    };
    heap::keep();
    let threads = std::thread::available_parallelism().map_or(2, usize::from).min(MAX_WORKERS);
    let runtime = daemon_runtime(threads)
        .map_err(|error| Failure::new(Exit::Failed, "cannot start threads").because(error))?;
    runtime.spawn(heap::give_back());
    let result = runtime.block_on(serve(config));
    crash::work_is_over();
    runtime.shutdown_background();
    result
}

fn join_code(argument: &str) -> Result<JoinCode, Failure> {
    let mut text = argument.to_string();
    if argument == "-" {
        text.clear();
        io::stdin()
            .take(MAX_CODE_BYTES)
            .read_to_string(&mut text)
            .map_err(|error| Failure::io("cannot read the join code", &error))?;
        if text.trim().is_empty() {
            return Err(Failure::new(Exit::Usage, "there is no join code on standard input")
                .advice("`atoll invite` on a node of the network prints one."));
        }
    }
    text.parse().map_err(|error| {
        Failure::new(Exit::Usage, "the code after --join cannot be used")
            .because(error)
            .advice("`atoll invite` on a node of the network prints a code.")
    })
}

async fn serve(config: NodeConfig) -> Result<(), Failure> {
    let beside = atoll_upkeep::subsystems();
    let start = async || Node::start_with(config.clone(), &beside).await.map_err(start_failure);
    let mut node = start().await?;
    tell(&node);
    let why = loop {
        tokio::select! {
            why = node.until_told_to_stop() => break why,
            by = node.until_superseded() => {
                node.kill().await;
                return Err(superseded("the node has ended", StartError::Superseded { by }));
            }
            addr = node.until_moved() => {
                note!("this machine's address is {addr} now: the node starts anew there");
                node.stop().await;
                node = start().await?;
            }
        }
    };
    note!("{why}: leaving the ring");
    node.stop().await;
    Ok(())
}

/// Says on standard output what runs here. The node neither waits for a reader nor needs one.
fn tell(node: &Node) {
    let mut told = format!("node {} in {}\n", node.local().id, node.dir().display());
    told += &format!("listening on {}\n", node.listen());
    if node.is_founder() {
        told.insert_str(0, "a new network; `atoll invite` prints a code for others to join\n");
    }
    std::thread::spawn(move || {
        let mut stdout = io::stdout();
        let _ = stdout.write_all(told.as_bytes()).and_then(|()| stdout.flush());
    });
}

fn start_failure(error: StartError) -> Failure {
    let what = "the node cannot be started";
    match &error {
        StartError::Superseded { .. } => superseded(what, error),
        StartError::Config(_) => Failure::new(Exit::Usage, what).because(error),
        _ => Failure::new(Exit::Failed, what).because(error),
    }
}

/// Another process with the node's key goes on in its place.
fn superseded(what: &str, error: StartError) -> Failure {
    Failure::new(Exit::Failed, what).because(error).advice(
        "To run this one, stop the other first. Copy a node's directory only while the node is stopped, and run only one \
         of the copies. For a second node, enter the network with a directory of its own: `atoll invite` prints a code, \
         `atoll --dir DIR up --join -` takes it.",
    )
}
