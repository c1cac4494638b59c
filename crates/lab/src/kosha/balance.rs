//! Kosha §6.2, Figure 5: how even the load of nodes is, against the distribution level.
//!
//! "We simulated a Kosha cluster of 16 nodes … Each node contributed 10 GB of disk space to avoid file redirection. The distribution
//! level was varied from 1 to 10 … The simulation was repeated 50 times varying the `nodeId` assignments … We also calculated
//! these quantities for a hypothetical scheme which distributed individual files …. Using directory distribution with distribution level
//! 4 or greater provides comparable load balancing to that of individually hashing all files."
//!
//! | | paper's settings | default settings |
//! |---|---|---|
//! | holds directories | 16 nodes with random identifiers | 16 groups of equal size |
//! | a distributed directory goes to | the node closest to the hash of its name | `atoll_pool::group_for` |
//! | from run to run | other identifiers and hashes | other hashes |
//!
//! Not known: the paper's file system; whether it counted copies (here a file counts once, where its primary is: copies on the
//! neighbours would even the load out); and its numbers, which are given as a plot alone.

use super::node_ids::NodeIds;
use super::population::{Population, Size};
use super::random;
use crate::LabError;
use crate::chart::{Axis, Chart, Ink, Mark, Point, Series, highest};
use crate::experiment::{Context, Experiment, Group, crossed, runs};
use crate::outcome::{Comparison, Csv, Outcome};
use crate::setting::Setting;
use crate::statistics::{Summary, summary};
use atoll_env::Env;
use atoll_pool::{GroupNumber, GroupRoom, group_for};

pub(crate) const GROUP: Group = Group {
    experiments: &[Experiment {
        name: "kosha-fig5",
        title: "balance of nodes against the distribution level",
        source: "Kosha §6.2, Figure 5",
        nodes: Some(2..=64),
    }],
    run,
};

const NODES: usize = 16;
const NODE_BYTES: u64 = 10_000_000_000;
const LEVELS: std::ops::RangeInclusive<usize> = 1..=10;

/// Runs in which files are hashed singly: ten times as many hashes, which differ less from run to run.
const FILE_RUNS: usize = 10;

/// The unit that a placement rule hashes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Grain {
    /// Directories down to a level.
    Level(usize),
    /// Each file: "the finest grained distribution".
    Files,
}

impl Grain {
    fn all() -> Vec<Grain> {
        LEVELS.map(Grain::Level).chain([Grain::Files]).collect()
    }
}

/// The load of the nodes in one run, in percent of the whole.
struct Found {
    setting: Setting,
    grain: Grain,
    files: Summary,
    bytes: Summary,
}

/// The placement rule of a run.
enum Places {
    Nodes(NodeIds),
    Groups(Vec<GroupRoom>),
}

impl Places {
    fn new(setting: Setting, nodes: usize, random: &Env) -> Places {
        match setting {
            Setting::Paper => Places::Nodes(NodeIds::new(nodes, random)),
            Setting::Default => Places::Groups(
                (0..nodes as u8)
                    .map(|number| GroupNumber::new(number).expect("a pool has 64 groups"))
                    .map(|group| GroupRoom { group, size: NODE_BYTES, free: NODE_BYTES })
                    .collect(),
            ),
        }
    }

    /// The node, or group, for a hash.
    fn of(&self, hash: u64) -> usize {
        match self {
            Places::Nodes(nodes) => nodes.closest(hash).next().expect("there is a node"),
            Places::Groups(groups) => {
                usize::from(group_for(groups, GroupNumber::FIRST, true, hash).number())
            }
        }
    }
}

fn run(context: &Context<'_>) -> Result<Vec<Outcome>, LabError> {
    let nodes = context.nodes(NODES, NODES);
    let size = if context.options.quick { Size::QUICK } else { Size::PAPER };
    let seeds = context.seeds(50, 5);
    let population = Population::new(size, &random(context.options.seed));
    let levels: Vec<Grain> = LEVELS.map(Grain::Level).collect();
    let mut parts = crossed(&Setting::BOTH, &levels, &seeds);
    parts.extend(crossed(&Setting::BOTH, &[Grain::Files], &seeds[..seeds.len().min(FILE_RUNS)]));
    let found = context.each(&parts, |(setting, grain, seed)| {
        Ok(load(&population, *setting, *grain, nodes, &random(*seed)))
    })?;
    Ok(vec![outcome(&found, &population, nodes, &seeds)])
}

fn load(
    population: &Population,
    setting: Setting,
    grain: Grain,
    nodes: usize,
    random: &Env,
) -> Found {
    let places = Places::new(setting, nodes, random);
    let place = || places.of(random.random_u64());
    let of_directories: Vec<usize> = match grain {
        Grain::Files => Vec::new(),
        Grain::Level(level) => {
            let mut of_directories = Vec::with_capacity(population.directories.len());
            for (at, anchor) in population.anchors(level).into_iter().enumerate() {
                let is_spread = anchor == at;
                of_directories.push(if is_spread { place() } else { of_directories[anchor] });
            }
            of_directories
        }
    };
    let (mut files, mut bytes) = (vec![0.0; nodes], vec![0.0; nodes]);
    for file in &population.files {
        let at = of_directories.get(file.directory).copied().unwrap_or_else(place);
        files[at] += 1.0;
        bytes[at] += file.bytes as f64;
    }
    let shares = |load: &[f64]| {
        let all: f64 = load.iter().sum();
        summary(load.iter().map(|load| 100.0 * load / all))
    };
    Found { setting, grain, files: shares(&files), bytes: shares(&bytes) }
}

/// Over the runs.
fn of_runs(
    found: &[Found],
    setting: Setting,
    grain: Grain,
    value: impl Fn(&Found) -> f64,
) -> Summary {
    summary(found.iter().filter(|f| f.setting == setting && f.grain == grain).map(value))
}

fn outcome(found: &[Found], population: &Population, nodes: usize, seeds: &[u64]) -> Outcome {
    let files = |f: &Found| f.files.deviation;
    let bytes = |f: &Found| f.bytes.deviation;
    let mut csv = Csv::new(&[
        "setting",
        "level",
        "of",
        "mean",
        "deviation",
        "least_deviation",
        "most_deviation",
        "most",
    ]);
    for setting in Setting::BOTH {
        for grain in Grain::all() {
            let level = match grain {
                Grain::Level(level) => level.to_string(),
                Grain::Files => "files".into(),
            };
            type Of = fn(&Found) -> Summary;
            for (of, shares) in [("files", (|f| f.files) as Of), ("bytes", |f| f.bytes)] {
                let mean = of_runs(found, setting, grain, |f| shares(f).mean).mean;
                let sd = of_runs(found, setting, grain, |f| shares(f).deviation);
                let most = of_runs(found, setting, grain, |f| shares(f).most).mean;
                let [mean, deviation, least, highest, most] =
                    [mean, sd.mean, sd.least, sd.most, most].map(|n| format!("{n:.4}"));
                csv.row(&[&setting, &level, &of, &mean, &deviation, &least, &highest, &most]);
            }
        }
    }
    let line = |quantity: String, paper: &str, grain, value: &dyn Fn(&Found) -> Summary| {
        let [ours, shipped] = Setting::BOTH.map(|setting| {
            let of =
                |part: fn(Summary) -> f64| of_runs(found, setting, grain, |f| part(value(f))).mean;
            let (mean, deviation) = (of(|s| s.mean), of(|s| s.deviation));
            format!("{mean:.2} ± {deviation:.2}, most {:.2}", of(|s| s.most))
        });
        Comparison::new(quantity, paper, ours, shipped)
    };
    let mut comparison = Vec::new();
    for (what, value) in
        [("files", (|f: &Found| f.files) as fn(&Found) -> Summary), ("bytes", |f| f.bytes)]
    {
        for level in [1, 2, 3, 4, 6, 10] {
            let paper = if level == 4 { "comparable to single files" } else { "" };
            let quantity = format!("{what}, level {level}");
            comparison.push(line(quantity, paper, Grain::Level(level), &value));
        }
        comparison.push(line(format!("{what}, hashed singly"), "", Grain::Files, &value));
    }
    let directories = population.directories.len();
    let homes = population.directories.iter().filter(|at| at.parent.is_none()).count();
    Outcome {
        name: "kosha-fig5",
        title: "percent of all files, and bytes, that a node has (mean ± deviation over nodes, and the fullest node)".into(),
        source: "Kosha §6.2, Figure 5",
        setup: format!(
            "{nodes} nodes; {} synthetic files of {homes} users in {directories} directories",
            population.files.len()
        ),
        comparison,
        notes: vec![
            "The paper's rule gives each node the keys that are closest to its random identifier: shares of the circle differ so much \
             that hashing each file does not even the load out. Groups of a pool are drawn by weight, and have no such shares."
                .into(),
            "A node of the paper's column is a group in the last one. Files count where their primary is."
                .into(),
        ],
        csv,
        chart: chart(found, nodes, seeds, files, bytes),
        seeds: seeds.to_vec(),
    }
}

fn chart(
    found: &[Found],
    nodes: usize,
    seeds: &[u64],
    files: fn(&Found) -> f64,
    bytes: fn(&Found) -> f64,
) -> Chart {
    let points = |setting, value: fn(&Found) -> f64| {
        let of = move |level| of_runs(found, setting, Grain::Level(level), value).mean;
        LEVELS.map(move |level| Point::new(level as f64, of(level)))
    };
    let bound = |setting, value: fn(&Found) -> f64| {
        let of = of_runs(found, setting, Grain::Files, value).mean;
        [LEVELS.start(), LEVELS.end()].map(|level| Point::new(*level as f64, of))
    };
    let (paper, shipped) = (Setting::Paper, Setting::Default);
    let series = vec![
        Series::new("paper's rule, files hashed singly: files", Ink::Grey, Mark::Dashed, {
            bound(paper, files)
        }),
        Series::new("paper's rule, files hashed singly: bytes", Ink::Grey, Mark::Dotted, {
            bound(paper, bytes)
        }),
        Series::new("default settings, files hashed singly: files", Ink::Orange, Mark::Dashed, {
            bound(shipped, files)
        }),
        Series::new("default settings, files hashed singly: bytes", Ink::Orange, Mark::Dotted, {
            bound(shipped, bytes)
        }),
        Series::new("paper's rule: files", Ink::Blue, Mark::Squares, points(paper, files)),
        Series::new("paper's rule: bytes", Ink::Sky, Mark::Squares, points(paper, bytes)),
        Series::new("default settings: files", Ink::Vermilion, Mark::Discs, points(shipped, files)),
        Series::new("default settings: bytes", Ink::Purple, Mark::Discs, points(shipped, bytes)),
    ];
    Chart {
        title: "Balance by distribution level (Kosha Figure 5)".into(),
        subtitle: format!(
            "{nodes} nodes, {}; the mean of a node is {:.2} %",
            runs(seeds),
            100.0 / nodes as f64
        ),
        x: Axis::linear("distribution level", 0.0, *LEVELS.end() as f64),
        y: Axis::up_to("standard deviation of nodes (% of all)", highest(&series)),
        series,
    }
}
