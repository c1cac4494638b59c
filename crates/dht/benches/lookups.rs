//! Remote calls per lookup at 16 … 4,096 simulated nodes, against the paper's ½·log2 N
//! (CFS Figure 9), and what the simulation itself costs.
//!
//! Each ring keeps its full upkeep running (stabilisation, fingers, repair) while 10,000
//! blocks are put and then 10,000 lookups are made from random nodes. With `--write FILE`
//! the table is written there as Markdown.

#![allow(clippy::disallowed_methods, reason = "it measures the simulation from outside")]

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use atoll_dht::{Blocks, Dht, DhtConfig};
use atoll_key::BlockHash;
use atoll_net::Router;
use atoll_overlay::Node;
use atoll_overlay::chord::state::ChordState;
use atoll_overlay::chord::{Chord, ChordConfig};
use atoll_sim::{HostConfig, Sim, SimConfig};
use atoll_store::MemoryStore;
use bytes::Bytes;
use futures_util::{StreamExt, stream};

const SEED: u64 = 2001;
const BLOCKS: usize = 10_000;
const BLOCK_BYTES: usize = 8192;

struct Row {
    nodes: usize,
    mean: f64,
    p10: usize,
    p90: usize,
    max: usize,
    seconds: f64,
    events: u64,
}

fn block(n: usize) -> (BlockHash, Bytes) {
    let mut bytes = vec![0; BLOCK_BYTES];
    bytes[..8].copy_from_slice(&n.to_be_bytes());
    (BlockHash::of(&bytes), Bytes::from(bytes))
}

fn ring(sim: &Sim, count: usize) -> Vec<Arc<Dht>> {
    let hosts = sim.add_hosts(count, &HostConfig::default());
    let mut nodes: Vec<Node> = hosts.iter().map(|host| Node::of(sim.peer(*host))).collect();
    nodes.sort_by_key(|node| node.id);
    // CFS §4.2: r is 2 log2 N.
    let successors = (2 * count.ilog2() as usize).max(4);
    let config = ChordConfig { successors, ..ChordConfig::default() };
    let mut dhts = Vec::with_capacity(count);
    for host in hosts {
        let (env, transport) = (sim.env(host), sim.transport(host));
        let me = Node::of(sim.peer(host));
        let state = ChordState::perfect(me, &nodes, successors);
        let chord = Chord::with_state(env.clone(), transport.clone(), config.clone(), state);
        let store = Arc::new(MemoryStore::new(1 << 30));
        let dht = Dht::new(env, transport.clone(), chord.clone(), store, DhtConfig::default());
        transport.serve(Arc::new(Router::new().route(1, chord.clone()).route(2, dht.clone())));
        chord.start();
        dht.start();
        dhts.push(dht);
    }
    dhts
}

/// Which node makes operation `n`: spread over the ring, the same in every run.
fn node_for(n: usize, nodes: usize) -> usize {
    (n.wrapping_mul(2_654_435_761) >> 7) % nodes
}

fn measure(count: usize) -> Row {
    let began = Instant::now();
    let sim = Sim::new(SimConfig { seed: SEED, ..SimConfig::default() });
    let dhts = ring(&sim, count);
    let limit = Duration::from_secs(3600);
    let puts = stream::iter(0..BLOCKS)
        .map(|n| dhts[node_for(n, count)].put(vec![block(n)]))
        .buffer_unordered(200)
        .for_each(|put| async { put.expect("a healthy ring takes blocks") });
    sim.block_on(limit, puts).expect("puts end");
    let lookups = stream::iter(0..BLOCKS)
        .map(|n| {
            let dht = dhts[node_for(n + 1_000_003, count)].clone();
            async move { dht.lookup(block(n).0).await }
        })
        .buffer_unordered(200)
        .map(|found| found.expect("a healthy ring finds blocks").trace.calls())
        .collect::<Vec<usize>>();
    let mut calls = sim.block_on(limit, lookups).expect("lookups end");
    calls.sort_unstable();
    let row = Row {
        nodes: count,
        mean: calls.iter().sum::<usize>() as f64 / calls.len() as f64,
        p10: calls[calls.len() / 10],
        p90: calls[calls.len() * 9 / 10],
        max: calls[calls.len() - 1],
        seconds: began.elapsed().as_secs_f64(),
        events: sim.event_count(),
    };
    sim.shut_down();
    row
}

/// The most memory this process has had, MiB.
fn peak_mib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmHWM:"));
    let kib = line.and_then(|l| l.split_whitespace().nth(1)).and_then(|n| n.parse::<f64>().ok());
    kib.map_or(f64::NAN, |kib| kib / 1024.0)
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let write = arguments.iter().position(|a| a == "--write").and_then(|i| arguments.get(i + 1));
    let mut table = String::from(
        "| nodes | mean calls | ½·log2 N | ratio | p10 | p90 | most | simulated in | events |\n\
         |---|---|---|---|---|---|---|---|---|\n",
    );
    print!("{table}");
    for count in [16, 32, 64, 128, 256, 512, 1024, 2048, 4096] {
        let row = measure(count);
        let paper = 0.5 * (count as f64).log2();
        let line = format!(
            "| {} | {:.2} | {paper:.1} | {:.2} | {} | {} | {} | {:.1} s | {} |\n",
            row.nodes,
            row.mean,
            row.mean / paper,
            row.p10,
            row.p90,
            row.max,
            row.seconds,
            row.events,
        );
        print!("{line}");
        table.push_str(&line);
    }
    let peak = format!("\nPeak memory of the process: {:.0} MiB.\n", peak_mib());
    print!("{peak}");
    let _ = write!(table, "{peak}");
    if let Some(file) = write {
        let page = format!(
            "# Remote calls per lookup, simulated\n\n\
             {BLOCKS} blocks of {BLOCK_BYTES} bytes put and {BLOCKS} lookups made from nodes all over \
             the ring, full upkeep\nrunning, seed {SEED}, 20 ms latency each way. CFS Figure 9 measures \
             about ½·log2 N. A lookup\nhere may finish sooner: a node whose successor list covers the key \
             names the root at once.\nMade by `make bench`.\n\n{table}"
        );
        std::fs::write(file, page).expect("the results file can be written");
    }
}
