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
use atoll_overlay::{Node, Seat};

use crate::LabError;
use crate::chart::{Axis, Chart, Ink, Mark, Point, Series};
use crate::experiment::{Context, Experiment, Group};
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
    [(1, Ink::Vermilion, Mark::Line), (6, Ink::Blue, Mark::Dashed), (24, Ink::Green, Mark::Dotted)];
/// Virtual servers of the physical servers of Figure 12.
const POWERS: [u16; 8] = [1, 2, 4, 8, 16, 32, 64, 128];
/// "The data marked Real is derived from the distribution of 10,000 blocks among 64
/// servers, each with 6 virtual servers."
const REAL: u16 = 6;

// ---- Figure 10 ----

/// One distribution: the share of each physical server.
struct Shares {
    setting: Setting,
    virtual_servers: u16,
    of_blocks: bool,
    seed: u64,
    shares: Vec<f64>,
}

fn plan(setting: Setting, seed: u64, virtual_servers: Vec<u16>) -> Plan {
    let nodes = virtual_servers.len();
    let seats = virtual_servers.iter().map(|count| usize::from(*count)).sum();
    Plan {
        seed,
        nodes,
        chord: setting.chord(seats),
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
    let mut parts = Vec::new();
    for seed in &seeds {
        parts.extend(EACH.map(|(each, ..)| (Setting::Paper, each, false, *seed)));
        parts.push((Setting::Paper, REAL, true, *seed));
        parts.push((Setting::Default, Setting::Default.virtual_servers(), true, *seed));
    }
    let found = context.each(&parts, |(setting, each, of_blocks, seed)| {
        let ring = Ring::new(&plan(*setting, *seed, vec![*each; nodes]));
        let shares = if *of_blocks {
            ring.put(blocks, BLOCK_BYTES)?;
            shares_of_blocks(&ring)
        } else {
            shares_of_space(&ring, *each)
        };
        let (setting, virtual_servers) = (*setting, *each);
        Ok(Shares { setting, virtual_servers, of_blocks: *of_blocks, seed: *seed, shares })
    })?;
    Ok(vec![shares_outcome(&found, nodes, blocks, &seeds)])
}

fn shares_of_blocks(ring: &Ring) -> Vec<f64> {
    let held: Vec<f64> =
        ring.members.iter().map(|member| member.store.usage().blocks as f64).collect();
    let all: f64 = held.iter().sum();
    held.iter().map(|held| held / all).collect()
}

/// The share of the circle whose keys have a position of each node as their successor.
fn shares_of_space(ring: &Ring, virtual_servers: u16) -> Vec<f64> {
    let mut seats: Vec<(Node, usize)> = Vec::new();
    for (at, member) in ring.members.iter().enumerate() {
        let peer = ring.sim.peer(member.host);
        let seat = |index| Node::at(peer, Seat { index, ..Seat::default() });
        seats.extend((0..virtual_servers).map(|index| (seat(index), at)));
    }
    seats.sort_by_key(|(node, _)| node.id);
    let mut shares = vec![0.0; ring.members.len()];
    for (n, (node, at)) in seats.iter().enumerate() {
        let (before, _) = seats[(n + seats.len() - 1) % seats.len()];
        shares[*at] += KeyRange::new(*before.id.key(), *node.id.key()).fraction();
    }
    shares
}

fn shares_outcome(found: &[Shares], nodes: usize, blocks: usize, seeds: &[u64]) -> Outcome {
    let pick = |setting, each, of_blocks| -> Vec<f64> {
        let wanted = found.iter().filter(|shares| {
            shares.setting == setting
                && shares.virtual_servers == each
                && shares.of_blocks == of_blocks
        });
        wanted.flat_map(|shares| shares.shares.iter().copied()).collect()
    };
    let average = 1.0 / nodes as f64;
    let said = |shares: &[f64]| {
        let Summary { deviation, least, most, .. } = summary(shares.iter().copied());
        let [deviation, least, most] = [deviation, least, most].map(|n| n / average);
        format!("{deviation:.2} ({least:.2} to {most:.2})")
    };
    let shipped = Setting::Default.virtual_servers();
    let of_default = pick(Setting::Default, shipped, true);
    let mut comparison: Vec<Comparison> = EACH
        .iter()
        .zip(["none to many times the average", "tighter", "tighter still"])
        .map(|((each, ..), paper)| {
            let quantity =
                format!("ID space, {each} virtual server{}", if *each == 1 { "" } else { "s" });
            Comparison::new(quantity, paper, said(&pick(Setting::Paper, *each, false)), "")
        })
        .collect();
    comparison.push(Comparison::new(
        format!("{blocks} blocks, {REAL} virtual servers"),
        "like the ID space",
        said(&pick(Setting::Paper, REAL, true)),
        format!(
            "{}: {shipped} virtual server{}",
            said(&of_default),
            if shipped == 1 { "" } else { "s" }
        ),
    ));
    let mut csv = Csv::new(&["setting", "virtual_servers", "of", "seed", "server", "share"]);
    for Shares { setting, virtual_servers, of_blocks, seed, shares } in found {
        let of = if *of_blocks { "blocks" } else { "id_space" };
        for (server, share) in shares.iter().enumerate() {
            csv.row(&[setting, virtual_servers, &of, seed, &server, &format!("{share:.6}")]);
        }
    }
    let curve = |name: String, ink, mark, shares: Vec<f64>| Series {
        name,
        ink,
        mark,
        points: steps(shares).into_iter().map(|(x, y)| Point::new(x, y)).collect(),
    };
    let mut series = vec![Series {
        name: format!("every server the same: {average:.3}"),
        ink: Ink::Grey,
        mark: Mark::Line,
        points: vec![Point::new(average, 0.0), Point::new(average, 1.0)],
    }];
    series.extend(EACH.map(|(each, ink, mark)| {
        let name = format!("ID space, {each} virtual server{}", if each == 1 { "" } else { "s" });
        curve(name, ink, mark, pick(Setting::Paper, each, false))
    }));
    // Every so manieth server, as in the paper: crosses would otherwise hide the line.
    let mut real = curve(
        format!("{blocks} blocks, {REAL} virtual servers"),
        Ink::Black,
        Mark::Crosses,
        pick(Setting::Paper, REAL, true),
    );
    let every = (real.points.len() / 40).max(1);
    real.points = real.points.into_iter().step_by(every).collect();
    series.push(real);
    let highest = pick(Setting::Paper, 1, false).into_iter().fold(0.0, f64::max);
    Outcome {
        name: "cfs-fig10",
        title: "shares of servers (deviation, least and most as multiples of the average)".into(),
        source: "CFS §7.2.2, Figure 10",
        setup: format!("{nodes} servers, {blocks} blocks"),
        comparison,
        notes: vec![format!(
            "As shipped each block has {} copies, which evens their shares out.",
            Setting::Default.dht().replicas
        )],
        csv,
        chart: Chart {
            title: "Load by virtual servers (CFS Figure 10)".into(),
            subtitle: format!("{nodes} servers, {} runs together", seeds.len()),
            x: Axis::up_to("share of a server", highest),
            y: Axis::linear("share of servers with at most so much", 0.0, 1.0),
            series,
        },
        seeds: seeds.to_vec(),
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
    let seeds = context.seeds(3, 10);
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

fn control_outcome(found: &[Held], blocks: usize, seeds: &[u64]) -> Outcome {
    let of = |setting, at: usize| {
        summary(found.iter().filter(|held| held.setting == setting).map(|held| held.blocks[at]))
    };
    let mut csv = Csv::new(&["setting", "virtual_servers", "blocks", "least", "most", "expected"]);
    for setting in Setting::BOTH {
        for (at, count) in POWERS.iter().enumerate() {
            let held = of(setting, at);
            let expected = format!("{:.1}", expected(blocks, *count));
            csv.row(&[&setting, count, &held.mean, &held.least, &held.most, &expected]);
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
            let quantity = format!("{count} virtual server{}", if *count == 1 { "" } else { "s" });
            Comparison::new(quantity, paper, said(Setting::Paper), said(Setting::Default))
        })
        .collect();
    let series = |setting, name: &str, ink, mark| Series {
        name: name.into(),
        ink,
        mark,
        points: POWERS
            .iter()
            .enumerate()
            .map(|(at, count)| {
                let held = of(setting, at);
                Point::spread(f64::from(*count), held.mean, held.least.max(1.0), held.most)
            })
            .collect(),
    };
    let copies = Setting::Default.dht().replicas;
    let thousandth = blocks as f64 / 1000.0;
    let heights = [1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0].map(|n| n * thousandth).into();
    let paper = if blocks == 10_000 { vec![Point::new(16.0, 586.0)] } else { Vec::new() };
    let ticks: Vec<f64> = POWERS.iter().copied().map(f64::from).collect();
    Outcome {
        name: "cfs-fig12",
        title: "blocks stored by a server (mean, least and most of the runs)".into(),
        source: "CFS §7.2.4, Figure 12",
        setup: format!("{blocks} blocks, eight servers with 255 virtual servers together"),
        comparison,
        notes: vec![format!(
            "As shipped each block has {copies} copies on different servers, so that none holds \
             more than {blocks}."
        )],
        csv,
        chart: Chart {
            title: "Blocks stored by virtual servers (CFS Figure 12)".into(),
            subtitle: format!("{blocks} blocks, {} runs; bars: least and most", seeds.len()),
            x: Axis::log("virtual servers of the server", 1.0, 128.0, ticks.clone()),
            y: Axis::log("blocks stored", thousandth, thousandth * 1000.0, heights),
            series: vec![
                Series {
                    name: "expected: in proportion".into(),
                    ink: Ink::Grey,
                    mark: Mark::Dashed,
                    points: POWERS
                        .iter()
                        .map(|n| Point::new(f64::from(*n), expected(blocks, *n)))
                        .collect(),
                },
                series(
                    Setting::Paper,
                    "Atoll, paper's settings: one copy",
                    Ink::Blue,
                    Mark::Squares,
                ),
                series(
                    Setting::Default,
                    &format!("Atoll, default settings: {copies} copies"),
                    Ink::Vermilion,
                    Mark::Discs,
                ),
                Series {
                    name: "CFS paper".into(),
                    ink: Ink::Black,
                    mark: Mark::Crosses,
                    points: paper,
                },
            ],
        },
        seeds: seeds.to_vec(),
    }
}
