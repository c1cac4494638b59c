//! How full a ring of unequal nodes becomes before a copy finds no room (PAST, SOSP 2001; D2 §6).
//!
//! PAST measured how much of all storage is used before files are refused, with replica
//! diversion and without. Here a ring of nodes that give from 1 to 100 units is filled with
//! blocks of one size from publishers all over it, beyond its capacity. A copy that is missing
//! after a put has found no room: the put was refused, or succeeded with fewer copies.
//!
//! Repair does not run: it would only try again. Publishers have no quotas: they would end the
//! run before the room does. Both columns are Atoll as shipped, the first with diversion off, as
//! CFS has none.

use std::sync::Arc;
use std::time::Duration;

use atoll_dht::quota::{QuotaConfig, Share};
use atoll_dht::{Blocks, DhtConfig};
use atoll_store::MemoryStore;

use crate::LabError;
use crate::chart::{Axis, Chart, Ink, Mark, Point, Series};
use crate::experiment::{Context, Experiment, Group, crossed, runs};
use crate::outcome::{Comparison, Csv, Outcome};
use crate::ring::{Network, Plan, Ring, block};
use crate::setting::Setting;
use crate::statistics::summary;

pub(crate) const GROUP: Group = Group {
    experiments: &[Experiment {
        name: "capacity",
        title: "how full a ring of unequal nodes becomes before a copy finds no room",
        source: "PAST (SOSP 2001); D2 §6",
        nodes: Some(10..=1000),
    }],
    run,
};

const BLOCK_BYTES: usize = 4096;
/// What a block takes in a store in memory.
const STORED_BYTES: u64 = BLOCK_BYTES as u64 + 144;
/// The largest node has so many times the room of the smallest.
const LARGEST: usize = 100;
/// The ring is offered so many hundredths of what it has room for.
const OFFERED_PERCENT: usize = 106;
/// Blocks put between two looks at what is stored.
const STEP: usize = 40;
/// Puts are given up after this: a refusal would otherwise be tried again for a minute.
const PUT_LIMIT: Duration = Duration::from_secs(3);
/// Copies that are still on their way when a put is acknowledged arrive in this time.
const REST: Duration = Duration::from_secs(2);

/// The state of a ring after so many puts, all of the total capacity.
#[derive(Clone, Copy, Debug)]
struct Look {
    /// What is used.
    used: f64,
    /// What found no room so far, of all copies that should have been made.
    missing: f64,
    /// Puts refused so far, of all.
    refused: f64,
}

struct Filled {
    divert: bool,
    seed: u64,
    looks: Vec<Look>,
    /// Used when the first copy found no room.
    first_missing: f64,
    /// Used when the first put was refused.
    first_refused: f64,
    /// Of the copies stored at the end, how many are not where they belong.
    diverted: f64,
}

fn dht(divert: bool) -> DhtConfig {
    let quota = QuotaConfig {
        key_share: Some(Share::WHOLE),
        address_share: Some(Share::WHOLE),
        ..QuotaConfig::default()
    };
    DhtConfig { divert, quota, put_limit: PUT_LIMIT, cache_bytes: 0, ..Setting::Default.dht() }
}

fn run(context: &Context<'_>) -> Result<Vec<Outcome>, LabError> {
    let nodes = context.nodes(100, 100);
    let unit_blocks = context.size(20, 6);
    let seeds = context.seeds(1, 1);
    let parts = crossed(&[false, true], &[nodes], &seeds);
    let found =
        context.each(&parts, |(divert, nodes, seed)| fill(*divert, *nodes, unit_blocks, *seed))?;
    Ok(vec![outcome(&found, nodes, unit_blocks, &seeds)])
}

/// Fills a ring beyond what it has room for.
fn fill(divert: bool, nodes: usize, unit_blocks: usize, seed: u64) -> Result<Filled, LabError> {
    let plan = Plan {
        seed,
        nodes,
        chord: Setting::Default.chord(nodes),
        dht: dht(divert),
        upkeep: false,
        virtual_servers: Vec::new(),
        network: Network::plain(None),
    };
    let room = |node: usize| ((node * LARGEST / nodes + 1) * unit_blocks) as u64;
    let ring =
        Ring::with_stores(&plan, |node| Arc::new(MemoryStore::new(room(node) * STORED_BYTES)));
    let capacity: u64 = (0..nodes).map(room).sum();
    let copies = plan.dht.replicas as u64;
    let offered = capacity as usize * OFFERED_PERCENT / 100 / copies as usize;
    let (mut looks, mut refused) = (Vec::new(), 0);
    let (mut first_missing, mut first_refused) = (None, None);
    let stored = || ring.members.iter().map(|member| member.store.usage().blocks).sum::<u64>();
    let share = |blocks: u64| blocks as f64 / capacity as f64;
    for first in (0..offered).step_by(STEP) {
        let last = offered.min(first + STEP);
        for n in first..last {
            let from = ring.random_below(nodes);
            let put = ring.members[from].dht.put(vec![block(n, BLOCK_BYTES)]);
            if ring.block_on(put)?.is_err() {
                refused += 1;
                first_refused.get_or_insert_with(|| share(stored()));
            }
        }
        ring.sim.run_for(REST);
        let (held, wanted) = (stored(), last as u64 * copies);
        if held < wanted {
            first_missing.get_or_insert(share(held));
        }
        looks.push(Look {
            used: share(held),
            missing: 1.0 - held as f64 / wanted as f64,
            refused: f64::from(refused) / last as f64,
        });
    }
    let held_for_others: u64 =
        ring.members.iter().map(|member| member.dht.stats().held_for_others).sum();
    let diverted = held_for_others as f64 / stored() as f64;
    let at_end = looks.last().map_or(0.0, |look| look.used);
    Ok(Filled {
        divert,
        seed,
        looks,
        first_missing: first_missing.unwrap_or(at_end),
        first_refused: first_refused.unwrap_or(at_end),
        diverted,
    })
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

fn outcome(found: &[Filled], nodes: usize, unit_blocks: usize, seeds: &[u64]) -> Outcome {
    let both = |of: fn(&Filled) -> f64| {
        [false, true].map(|divert| {
            let of_kind = found.iter().filter(|filled| filled.divert == divert);
            percent(summary(of_kind.map(of)).mean)
        })
    };
    let line = |quantity: &str, paper: &str, of: fn(&Filled) -> f64| {
        let [off, on] = both(of);
        Comparison::new(quantity, paper, off, on)
    };
    let comparison = vec![
        line("used when the first copy finds no room", "-", |filled| filled.first_missing),
        line("used when the first put is refused", "-", |filled| filled.first_refused),
        line("copies without room when 95 % is used", "-", |filled| {
            let look = filled.looks.iter().find(|look| look.used >= 0.95);
            look.or(filled.looks.last()).map_or(0.0, |look| look.missing)
        }),
        line("used in the end", "beyond 95 %, degrading gracefully", |filled| {
            filled.looks.last().map_or(0.0, |look| look.used)
        }),
        line("copies that are diverted in the end", "-", |filled| filled.diverted),
    ];
    let mut csv = Csv::new(&["diversion", "seed", "used", "missing", "refused"]);
    for Filled { divert, seed, looks, .. } in found {
        let name = if *divert { "on" } else { "off" };
        for look in looks {
            let [used, missing, refused] =
                [look.used, look.missing, look.refused].map(|share| format!("{share:.5}"));
            csv.row(&[&name, seed, &used, &missing, &refused]);
        }
    }
    Outcome {
        name: "capacity",
        title: "storage used before copies find no room".into(),
        source: "PAST (SOSP 2001); D2 §6",
        setup: format!(
            "{nodes} nodes with room for {unit_blocks} to {} blocks, three copies",
            LARGEST * unit_blocks
        ),
        comparison,
        notes: vec![
            "The column of the paper's settings is as shipped with diversion off; 95 % is then \
             never used, and the figure is that of the end."
                .into(),
            "PAST stored whole files of very different sizes; the figure beside ours is that of \
             its abstract."
                .into(),
        ],
        csv,
        chart: chart(found, nodes, seeds),
        seeds: seeds.to_vec(),
    }
}

fn chart(found: &[Filled], nodes: usize, seeds: &[u64]) -> Chart {
    let line = |divert: bool, name: &str, ink, mark| {
        let first = found.iter().find(|filled| filled.divert == divert);
        let looks = first.into_iter().flat_map(|filled| &filled.looks);
        let points = looks.map(|look| Point::new(look.used * 100.0, look.missing * 100.0));
        Series::new(name, ink, mark, points)
    };
    Chart {
        title: "Storage used before copies find no room".into(),
        subtitle: format!(
            "{nodes} nodes with 1 to {LARGEST} units of room, three copies; {}",
            runs(seeds)
        ),
        x: Axis::linear("used of all storage, %", 0.0, 100.0),
        y: Axis::linear("copies that found no room so far, %", 0.0, 50.0),
        series: vec![
            line(false, "diversion off", Ink::Blue, Mark::Dashed),
            line(true, "as shipped", Ink::Vermilion, Mark::Line),
        ],
    }
}
