//! Remote calls per lookup at 16 … 4,096 simulated nodes, against the paper's ½·log2 N
//! (CFS Figure 9), and what the simulation itself costs.
//!
//! Each ring keeps its full upkeep running (stabilisation, fingers, repair) while 10,000
//! blocks are put and then 10,000 lookups are made from random nodes. With `--write FILE`
//! the table is written there as Markdown.

#![allow(clippy::disallowed_methods, reason = "it measures the simulation from outside")]

#[path = "../tests/it/perfect.rs"]
mod perfect;

use std::fmt::Write as _;
use std::time::Instant;

use atoll_sim::{Sim, SimConfig};
use perfect::calls_per_lookup;

const SEED: u64 = 2001;
const BLOCKS: usize = 10_000;

struct Row {
    nodes: usize,
    mean: f64,
    p10: usize,
    p90: usize,
    max: usize,
    seconds: f64,
    events: u64,
}

fn measure(count: usize) -> Row {
    let began = Instant::now();
    let sim = Sim::new(SimConfig { seed: SEED, ..SimConfig::default() });
    let calls = calls_per_lookup(&sim, count, BLOCKS);
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

/// What the times were measured on.
fn processor() -> String {
    let cpus = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpus.lines().find(|line| line.starts_with("model name"));
    let model = model.and_then(|line| line.split_once(": ")).map_or("an unnamed CPU", |m| m.1);
    format!("one core of {model}")
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
             {BLOCKS} blocks of 8 KiB put and {BLOCKS} lookups made from nodes all over \
             the ring, full upkeep\nrunning, seed {SEED}, 20 ms latency each way. CFS Figure 9 measures \
             about ½·log2 N. A lookup\nhere may finish sooner: a node whose successor list covers the key \
             names the root at once, and a block\nthat the asking node holds itself takes no call.\nMade by `make bench` on {}.\n\n{table}",
            processor()
        );
        std::fs::write(file, page).expect("the results file can be written");
    }
}
