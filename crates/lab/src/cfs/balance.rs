//! CFS §7.2.2, Figure 10, and §7.2.4, Figure 12: who stores how much.
//!
//! Figure 10: "typical distributions of ID space among 64 physical servers for 1, 6, and 24
//! virtual servers per physical server. The crosses represent an actual distribution of
//! 10,000 blocks over 64 physical servers each with 6 virtual servers."
//!
//! Figure 12: physical servers "with 1, 2, 4, 8, 16, 32, 64, and 128 virtual servers …
//! 10,000 blocks are inserted … the physical server with 16 virtual servers stores 586
//! blocks; there are a total of 255 virtual servers, so this is close to the expected value
//! 627". (The paper says that there are seven physical servers, and lists eight.)
//!
//! The share of the ID space follows from the nodes' positions alone; blocks are put on a
//! ring of running nodes.

use atoll_key::KeyRange;
use atoll_overlay::{Node, VirtualServerId};

use crate::LabError;
use crate::chart::{Axis, Chart, Ink, Mark, Point, Series};
use crate::experiment::{Context, Experiment, Group, crossed, runs};
use crate::outcome::{Comparison, Csv, Outcome};
use crate::ring::{Network, Plan, Ring};
use crate::setting::Setting;
use crate::statistics::{Summary, steps, summary};

pub(crate) const SHARES: Group = Group {
    experiments: &[Experiment {
        name: "cfs-fig10",
        title: "how evenly virtual servers share out the ID space",
        source: "CFS §7.2.2, Figure 10",
        nodes: Some(4..=1000),
    }],
    run: run_shares,
};

pub(crate) const CONTROL: Group = Group {
    experiments: &[Experiment {
        name: "cfs-fig12",
        title: "blocks stored against the number of virtual servers",
        source: "CFS §7.2.4, Figure 12",
        nodes: None,
    }],
    run: run_control,
};

const BLOCK_BYTES: usize = 64;
/// Virtual servers of each physical one, Figure 10.
const EACH: [(u16, Ink, Mark); 3] =
    [(1, Ink::Purple, Mark::Line), (6, Ink::Blue, Mark::Dashed), (24, Ink::Green, Mark::Dotted)];
/// Virtual servers of the physical servers of Figure 12.
const POWERS: [u16; 8] = [1, 2, 4, 8, 16, 32, 64, 128];
/// "The data marked Real is derived from the distribution of 10,000 blocks among 64
/// servers, each with 6 virtual servers."
const REAL: u16 = 6;

// ---- Figure 10 ----

/// The whole that the servers have shares of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Of {
    /// Of the ID space: with several copies, of what servers keep a copy of.
    Space,
    /// Of the blocks stored.
    Blocks,
}

/// One distribution.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Kind {
    setting: Setting,
    of: Of,
    virtual_servers: u16,
}

/// One distribution of one run: the share of each physical server.
struct Shares {
    kind: Kind,
    seed: u64,
    shares: Vec<f64>,
}

fn kinds() -> Vec<Kind> {
    let mut kinds = Vec::new();
    for setting in Setting::BOTH {
        let kind = |of, virtual_servers| Kind { setting, of, virtual_servers };
        kinds.extend(EACH.map(|(each, ..)| kind(Of::Space, each)));
        kinds.push(kind(Of::Blocks, REAL));
    }
    kinds
}

fn plan(setting: Setting, seed: u64, virtual_servers: Vec<u16>) -> Plan {
    let nodes = virtual_servers.len();
    let positions = virtual_servers.iter().map(|count| usize::from(*count)).sum();
    Plan {
        seed,
        nodes,
        chord: setting.chord(positions),
        dht: setting.dht(),
        upkeep: false,
        virtual_servers,
        network: Network::plain(None),
    }
}

fn run_shares(context: &Context<'_>) -> Result<Vec<Outcome>, LabError> {
    let nodes = context.nodes(64, 64);
    let blocks = context.size(10_000, 2_000);
    let seeds = context.seeds(10, 2);
    let parts = crossed(&kinds(), &[nodes], &seeds);
    let found = context.each(&parts, |(kind, nodes, seed)| {
        let ring = Ring::new(&plan(kind.setting, *seed, vec![kind.virtual_servers; *nodes]));
        let shares = match kind.of {
            Of::Space => shares_of_space(&ring, *kind),
            Of::Blocks => {
                ring.put(blocks, BLOCK_BYTES)?;
                shares_of_blocks(&ring)
            }
        };
        Ok(Shares { kind: *kind, seed: *seed, shares })
    })?;
    Ok(vec![shares_outcome(&found, nodes, blocks, &seeds)])
}

fn shares_of_blocks(ring: &Ring) -> Vec<f64> {
    let held: Vec<f64> =
        ring.members.iter().map(|member| member.store.usage().blocks as f64).collect();
    let all: f64 = held.iter().sum();
    held.iter().map(|held| held / all).collect()
}

/// The share of all copies that each node keeps: of each part of the circle, those whose
/// positions follow it first have one, as many different nodes as there are copies.
fn shares_of_space(ring: &Ring, kind: Kind) -> Vec<f64> {
    let mut positions: Vec<(Node, usize)> = Vec::new();
    for (at, member) in ring.members.iter().enumerate() {
        let peer = ring.sim.peer(member.host);
        let position =
            |index| Node::at(peer, VirtualServerId { index, ..VirtualServerId::default() });
        positions.extend((0..kind.virtual_servers).map(|index| (position(index), at)));
    }
    positions.sort_by_key(|(node, _)| node.id);
    let copies = kind.setting.dht().replicas.min(ring.members.len());
    let mut shares = vec![0.0; ring.members.len()];
    for (n, (node, _)) in positions.iter().enumerate() {
        let (before, _) = positions[(n + positions.len() - 1) % positions.len()];
        let part = KeyRange::new(*before.id.key(), *node.id.key()).fraction();
        for at in replica_set(&positions, n, copies) {
            shares[at] += part / copies as f64;
        }
    }
    shares
}

/// The first so many different members at and after position `n`.
fn replica_set(positions: &[(Node, usize)], n: usize, copies: usize) -> Vec<usize> {
    let mut replica_set = Vec::with_capacity(copies);
    for (_, at) in positions[n..].iter().chain(&positions[..n]) {
        if replica_set.len() == copies {
            break;
        }
        if !replica_set.contains(at) {
            replica_set.push(*at);
        }
    }
    replica_set
}

/// All runs' shares of one kind, ascending.
fn pick(found: &[Shares], kind: Kind) -> Vec<f64> {
    let of_kind = found.iter().filter(|shares| shares.kind == kind);
    let mut shares: Vec<f64> = of_kind.flat_map(|shares| shares.shares.iter().copied()).collect();
    shares.sort_by(f64::total_cmp);
    shares
}

fn virtual_servers(count: u16) -> String {
    format!("{count} virtual server{}", if count == 1 { "" } else { "s" })
}

fn shares_outcome(found: &[Shares], nodes: usize, blocks: usize, seeds: &[u64]) -> Outcome {
    let said = |kind| {
        let shares = pick(found, kind);
        let of_average = summary(shares.into_iter().map(|share| share * nodes as f64));
        let Summary { deviation, least, most, .. } = of_average;
        format!("{deviation:.2} ({least:.2} to {most:.2})")
    };
    let line = |quantity: String, paper: &str, of, virtual_servers| {
        let [ours, shipped] =
            Setting::BOTH.map(|setting| said(Kind { setting, of, virtual_servers }));
        Comparison::new(quantity, paper, ours, shipped)
    };
    let mut comparison: Vec<Comparison> = EACH
        .iter()
        .zip(["none to many times the average", "tighter", "tighter still"])
        .map(|((each, ..), paper)| {
            line(format!("ID space, {}", virtual_servers(*each)), paper, Of::Space, *each)
        })
        .collect();
    comparison.push(line(
        format!("{blocks} blocks, {}", virtual_servers(REAL)),
        "like the ID space",
        Of::Blocks,
        REAL,
    ));
    let mut csv = Csv::new(&["setting", "virtual_servers", "of", "seed", "server", "share"]);
    for Shares { kind, seed, shares } in found {
        let of = if kind.of == Of::Blocks { "blocks" } else { "id_space" };
        for (server, share) in shares.iter().enumerate() {
            let share = format!("{share:.6}");
            csv.row(&[&kind.setting, &kind.virtual_servers, &of, seed, &server, &share]);
        }
    }
    Outcome {
        name: "cfs-fig10",
        title: "shares of servers (deviation, least and most as multiples of the average)".into(),
        source: "CFS §7.2.2, Figure 10",
        setup: format!("{nodes} servers, {blocks} blocks"),
        comparison,
        notes: vec![format!(
            "As shipped each block has {} copies on different servers: who follows whom evens \
             shares out as well. A server then runs one virtual server for each 10 GiB it gives.",
            Setting::Default.dht().replicas
        )],
        csv,
        chart: shares_chart(found, nodes, blocks, seeds),
        seeds: seeds.to_vec(),
    }
}

/// The most crosses of the plot: more would hide the line they lie on.
const CROSSES: usize = 40;

fn shares_chart(found: &[Shares], nodes: usize, blocks: usize, seeds: &[u64]) -> Chart {
    let average = 1.0 / nodes as f64;
    let space = |setting, virtual_servers| {
        let kind = Kind { setting, of: Of::Space, virtual_servers };
        steps(pick(found, kind)).into_iter().map(|(x, y)| Point::new(x, y))
    };
    let mut series = vec![Series::new(
        format!("every server the same: {average:.3}"),
        Ink::Grey,
        Mark::Line,
        [0.0, 1.0].map(|y| Point::new(average, y)),
    )];
    series.extend(EACH.map(|(each, ink, mark)| {
        let name = format!("ID space, {}", virtual_servers(each));
        Series::new(name, ink, mark, space(Setting::Paper, each))
    }));
    let (copies, one) = (Setting::Default.dht().replicas, EACH[0].0);
    series.push(Series::new(
        format!("default settings: {copies} copies, {}", virtual_servers(one)),
        Ink::Vermilion,
        Mark::Line,
        space(Setting::Default, one),
    ));
    let real = pick(found, Kind { setting: Setting::Paper, of: Of::Blocks, virtual_servers: REAL });
    let every = (real.len() / CROSSES).max(1);
    let crosses = real.iter().enumerate().skip(every / 2).step_by(every);
    series.push(Series::new(
        format!("{blocks} blocks, {}", virtual_servers(REAL)),
        Ink::Black,
        Mark::Crosses,
        crosses.map(|(n, share)| Point::new(*share, (n + 1) as f64 / real.len() as f64)),
    ));
    let widest = series.iter().flat_map(|s| &s.points).map(|p| p.x).fold(0.0, f64::max);
    Chart {
        title: "Load by virtual servers (CFS Figure 10)".into(),
        subtitle: format!("{nodes} servers, {} together", runs(seeds)),
        x: Axis::up_to("a server's share of the ID space, or of all blocks stored", widest),
        y: Axis::linear("share of servers with at most so much", 0.0, 1.0),
        series,
    }
}

// ---- Figure 12 ----

/// Blocks on each physical server of one run.
struct Held {
    setting: Setting,
    blocks: Vec<f64>,
}

fn run_control(context: &Context<'_>) -> Result<Vec<Outcome>, LabError> {
    let blocks = context.size(10_000, 500);
    let seeds = context.seeds(3, 6);
    // Three copies take three times as long, and are compared with nothing.
    let of_default = seeds.len().min(context.size(seeds.len(), 2));
    let parts: Vec<(Setting, u64)> = seeds
        .iter()
        .map(|seed| (Setting::Paper, *seed))
        .chain(seeds[..of_default].iter().map(|seed| (Setting::Default, *seed)))
        .collect();
    let found = context.each(&parts, |(setting, seed)| {
        let ring = Ring::new(&plan(*setting, *seed, POWERS.to_vec()));
        ring.put(blocks, BLOCK_BYTES)?;
        let held = ring.members.iter().map(|member| member.store.usage().blocks as f64);
        Ok(Held { setting: *setting, blocks: held.collect() })
    })?;
    Ok(vec![control_outcome(&found, blocks, &seeds)])
}

fn expected(blocks: usize, virtual_servers: u16) -> f64 {
    let all: f64 = POWERS.iter().copied().map(f64::from).sum();
    blocks as f64 * f64::from(virtual_servers) / all
}

/// Over the runs: the blocks of the server with `POWERS[at]` virtual servers.
fn held(found: &[Held], setting: Setting, at: usize) -> Summary {
    summary(found.iter().filter(|held| held.setting == setting).map(|held| held.blocks[at]))
}

fn control_outcome(found: &[Held], blocks: usize, seeds: &[u64]) -> Outcome {
    let of = |setting, at| held(found, setting, at);
    let mut csv = Csv::new(&["setting", "virtual_servers", "blocks", "least", "most", "expected"]);
    for setting in Setting::BOTH {
        for (at, count) in POWERS.iter().enumerate() {
            let held = of(setting, at);
            let expected = format!("{:.1}", expected(blocks, *count));
            let mean = format!("{:.1}", held.mean);
            csv.row(&[&setting, count, &mean, &held.least, &held.most, &expected]);
        }
    }
    let comparison = POWERS
        .iter()
        .enumerate()
        .map(|(at, count)| {
            let paper = match count {
                16 if blocks == 10_000 => "586, expected 627".to_owned(),
                _ => format!("expected {:.0}", expected(blocks, *count)),
            };
            let said = |setting| {
                let held = of(setting, at);
                format!("{:.0} ({:.0} to {:.0})", held.mean, held.least, held.most)
            };
            let [ours, shipped] = Setting::BOTH.map(said);
            Comparison::new(virtual_servers(*count), paper, ours, shipped)
        })
        .collect();
    Outcome {
        name: "cfs-fig12",
        title: "blocks stored by a server (mean, least and most of the runs)".into(),
        source: "CFS §7.2.4, Figure 12",
        setup: format!("{blocks} blocks, eight servers with 255 virtual servers together"),
        comparison,
        notes: vec![format!(
            "As shipped each block has {} copies on different servers, so that none holds more \
             than {blocks}.",
            Setting::Default.dht().replicas
        )],
        csv,
        chart: control_chart(found, blocks, seeds),
        seeds: seeds.to_vec(),
    }
}

fn control_chart(found: &[Held], blocks: usize, seeds: &[u64]) -> Chart {
    let counts = || POWERS.iter().copied().enumerate();
    let points = |setting| {
        counts().map(move |(at, count)| {
            let held = held(found, setting, at);
            // Nothing has no place on the logarithmic axis.
            Point::spread(f64::from(count), held.mean, held.least.max(1.0), held.most)
        })
    };
    let expected = counts().map(|(_, n)| Point::new(f64::from(n), expected(blocks, n)));
    let copies = Setting::Default.dht().replicas;
    let paper = (blocks == 10_000).then(|| Point::new(16.0, 586.0));
    let series = vec![
        Series::new("expected: in proportion", Ink::Grey, Mark::Dashed, expected),
        Setting::Paper.line(": one copy", points(Setting::Paper)),
        Setting::Default.line(&format!(": {copies} copies"), points(Setting::Default)),
        Series::new("CFS paper", Ink::Black, Mark::Crosses, paper),
    ];
    let ticks = counts().map(|(_, n)| f64::from(n)).collect();
    Chart {
        title: "Blocks stored by virtual servers (CFS Figure 12)".into(),
        subtitle: format!("{blocks} blocks, {}; bars: least and most, from 1 on", runs(seeds)),
        x: Axis::log("virtual servers of the server", 1.0, 128.0, ticks),
        y: Axis::log_over("blocks stored", 1.0, blocks as f64),
        series,
    }
}
