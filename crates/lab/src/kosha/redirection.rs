//! Kosha §6.2, Figure 6: insertions that fail while nodes fill up, with redirection.
//!
//! "The simulation for this was done for a cluster of 16 nodes, 8 of which contributed 3 GB each, 4 nodes contributed 4 GB each, and 4 nodes
//! contributed 5 GB each …. The distribution level was fixed at 4, and the number of the replicas was fixed at 3. … the number of insertion
//! failures was recorded as the files were added. The simulation was repeated with file redirection attempts varying from 1 to 15. …
//! the cumulative failure ratio is defined as the ratio of all failed file insertions over all file insertions that have occurred up to the
//! point when the given storage utilization was reached."
//!
//! | | paper's settings | default settings |
//! |---|---|---|
//! | copies | four, on the node closest to the key and the next closest ones that have room | four, on the members of a group |
//! | room | that of each node | that of the members of a group with the least: nodes of equal size are a group, two of 3 GB, one of 4 GB, one of 5 GB |
//! | a distributed directory | on the closest node; above [`PRESPECIFIED`] of its room it is redirected | `atoll_pool::group_for` |
//! | a deeper directory | with its parent | with its parent, while that group has room: `group_for` |
//! | a file | with its directory; where the closest node has no room for it, redirected | with its directory |
//! | redirection | another random key, so many times; then the insertion has failed | the next group in the directory's order |
//! | a file without room | has failed | has failed: `ENOSPC` |
//!
//! Not known: the paper's file system and the order of its files; the utilization from which directories are
//! redirected; what becomes of a copy for which a neighbour has no room. Two things are read from the figure, which goes on to 100 % of
//! 60 GB. Three copies of 17.9 GB do not fill these, and four do. And if each of the four closest nodes had to have room, the
//! small ones among them would end it near 80 %: so copies go to the closest nodes that have some.
//!
//! Files come in one of two [`Order`]s. A pool's room is taken to be known when a directory is made; a node asks
//! for it now and then.

use super::node_ids::NodeIds;
use super::population::{File, Population, Size};
use super::{percent, random};
use crate::LabError;
use crate::chart::{Axis, Chart, Ink, Mark, Point, Series, highest};
use crate::experiment::{Context, Experiment, Group, crossed, runs};
use crate::outcome::{Comparison, Csv, Outcome};
use crate::statistics::{Summary, summary};
use atoll_env::{Env, random_below};
use atoll_pool::{GroupNumber, GroupRoom, group_for};

pub(crate) const GROUP: Group = Group {
    experiments: &[Experiment {
        name: "kosha-fig6",
        title: "insertions that fail as nodes fill up, with redirection",
        source: "Kosha §6.2, Figure 6",
        nodes: None,
    }],
    run,
};

const GB: u64 = 1_000_000_000;
/// What nodes contribute, and how many contribute so much.
const NODES: [(u64, usize); 3] = [(3 * GB, 8), (4 * GB, 4), (5 * GB, 4)];
const COPIES: usize = 4;
const LEVEL: usize = 4;
/// A guess: the paper does not say its number.
const PRESPECIFIED: f64 = 0.95;
/// Redirections of a file, and of a directory: the paper's are from 1 to 15.
const TRIES: [usize; 6] = [0, 1, 2, 4, 8, 15];
/// Of which its text speaks.
const PAPER_TRIES: usize = 4;

/// In which order files are added.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Order {
    /// Directory by directory, as a tree is copied; a directory is made when it is its turn.
    Tree,
    /// At random: files of all directories grow at once, and a directory is made with its first file.
    Mixed,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Rule {
    /// The paper's, with so many redirections.
    Paper(usize),
    Pool,
}

impl Rule {
    fn name(self) -> String {
        match self {
            Rule::Paper(tries) => format!("paper-{tries}"),
            Rule::Pool => "default".into(),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Case {
    rule: Rule,
    order: Order,
}

/// One run.
struct Found {
    case: Case,
    /// The cumulative failure ratio in percent when each whole percent of utilization was reached; as far as it was.
    ratios: Vec<f64>,
    /// When the first insertion failed, percent of utilization; 100 if none did.
    first_failure: f64,
    /// At the end.
    utilization: f64,
    ratio: f64,
}

/// Room that is filled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Room {
    size: u64,
    used: u64,
}

impl Room {
    fn free(&self) -> u64 {
        self.size - self.used
    }
}

/// Nodes and where the directories are that were made.
trait Filling {
    /// Makes a directory.
    fn make(&mut self, directory: usize, parent: Option<usize>, is_spread: bool, random: &Env);
    /// Adds a file; whether there was room.
    fn add(&mut self, file: File, random: &Env) -> bool;
    /// Bytes used by all copies.
    fn used(&self) -> u64;
}

/// By the paper's rule.
struct FilledNodes {
    ids: NodeIds,
    rooms: Vec<Room>,
    tries: usize,
    /// The key of each directory.
    of_directories: Vec<u64>,
}

impl FilledNodes {
    fn new(directories: usize, tries: usize, random: &Env) -> FilledNodes {
        let mut rooms: Vec<Room> = NODES
            .iter()
            .flat_map(|(size, count)| std::iter::repeat_n(Room { size: *size, used: 0 }, *count))
            .collect();
        shuffle(&mut rooms, random);
        let ids = NodeIds::new(rooms.len(), random);
        FilledNodes { ids, rooms, tries, of_directories: vec![0; directories] }
    }

    /// `first` and as many other keys as there may be redirections.
    fn keys(&self, first: u64, random: &Env) -> impl Iterator<Item = u64> {
        let salted = std::iter::repeat_with(|| random.random_u64()).take(self.tries);
        std::iter::once(first).chain(salted)
    }

    fn primary(&self, key: u64) -> usize {
        self.ids.closest(key).next().expect("there are nodes")
    }

    /// Where the copies of a file with this key lie, if the closest node has room for it, and as many others.
    fn holders(&self, key: u64, bytes: u64) -> Option<[usize; COPIES]> {
        let has_room = |node: &usize| self.rooms[*node].free() >= bytes;
        let primary = Some(self.primary(key)).filter(has_room)?;
        let mut with_room = self.ids.closest(key).filter(has_room);
        let mut holders = [primary; COPIES];
        for holder in &mut holders {
            *holder = with_room.next()?;
        }
        Some(holders)
    }
}

impl Filling for FilledNodes {
    fn make(&mut self, directory: usize, parent: Option<usize>, is_spread: bool, random: &Env) {
        let stays = parent.filter(|_| !is_spread);
        self.of_directories[directory] = match stays {
            Some(parent) => self.of_directories[parent],
            None => {
                let first = random.random_u64();
                let has_room = |key: &u64| {
                    let Room { size, used } = self.rooms[self.primary(*key)];
                    used as f64 <= PRESPECIFIED * size as f64
                };
                self.keys(first, random).find(has_room).unwrap_or(first)
            }
        };
    }

    fn add(&mut self, file: File, random: &Env) -> bool {
        let first = self.of_directories[file.directory];
        let found = self.keys(first, random).find_map(|key| self.holders(key, file.bytes));
        found.into_iter().flatten().for_each(|node| self.rooms[node].used += file.bytes);
        found.is_some()
    }

    fn used(&self) -> u64 {
        self.rooms.iter().map(|room| room.used).sum()
    }
}

/// As a pool does it.
struct FilledGroups {
    rooms: Vec<GroupRoom>,
    of_directories: Vec<GroupNumber>,
}

impl FilledGroups {
    fn new(directories: usize) -> FilledGroups {
        let sizes = NODES
            .iter()
            .flat_map(|(size, count)| std::iter::repeat_n(*size, count.div_euclid(COPIES)));
        let rooms = sizes.zip(0..).map(|(size, number)| {
            let group = GroupNumber::new(number).expect("a pool has 64 groups");
            GroupRoom { group, size, free: size }
        });
        FilledGroups {
            rooms: rooms.collect(),
            of_directories: vec![GroupNumber::FIRST; directories],
        }
    }
}

impl Filling for FilledGroups {
    fn make(&mut self, directory: usize, parent: Option<usize>, is_spread: bool, random: &Env) {
        let own = parent.map_or(GroupNumber::FIRST, |parent| self.of_directories[parent]);
        let group = group_for(&self.rooms, own, is_spread, random.random_u64());
        self.of_directories[directory] = group;
    }

    fn add(&mut self, file: File, _: &Env) -> bool {
        let group = self.of_directories[file.directory];
        let room = &mut self.rooms[usize::from(group.number())];
        let left = room.free.checked_sub(file.bytes);
        room.free = left.unwrap_or(room.free);
        left.is_some()
    }

    fn used(&self) -> u64 {
        self.rooms.iter().map(|room| room.size - room.free).sum::<u64>() * COPIES as u64
    }
}

fn shuffle<T>(items: &mut [T], random: &Env) {
    for at in (1..items.len()).rev() {
        items.swap(at, random_below(&**random, at as u64 + 1) as usize);
    }
}

/// Adds all files.
fn fill(population: &Population, case: Case, random: &Env) -> Found {
    let directories = population.directories.len();
    let mut filling: Box<dyn Filling> = match case.rule {
        Rule::Paper(tries) => Box::new(FilledNodes::new(directories, tries, random)),
        Rule::Pool => Box::new(FilledGroups::new(directories)),
    };
    let mut files = population.files.clone();
    if case.order == Order::Mixed {
        shuffle(&mut files, random);
    }
    let all: u64 = NODES.iter().map(|(size, count)| size * *count as u64).sum();
    let mut is_made = vec![false; directories];
    let mut found =
        Found { case, ratios: Vec::new(), first_failure: 100.0, utilization: 0.0, ratio: 0.0 };
    let mut failed = 0usize;
    for (at, file) in files.iter().enumerate() {
        make_path(population, file.directory, &mut is_made, &mut *filling, random);
        if !filling.add(*file, random) {
            failed += 1;
            if failed == 1 {
                found.first_failure = found.utilization;
            }
        }
        found.utilization = 100.0 * filling.used() as f64 / all as f64;
        found.ratio = 100.0 * failed as f64 / (at + 1) as f64;
        while found.ratios.len() as f64 <= found.utilization {
            found.ratios.push(found.ratio);
        }
    }
    found
}

/// Makes a directory and those above it, where they are not there.
fn make_path(
    population: &Population,
    directory: usize,
    is_made: &mut [bool],
    filling: &mut dyn Filling,
    random: &Env,
) {
    if is_made[directory] {
        return;
    }
    let super::population::Directory { parent, depth } = population.directories[directory];
    if let Some(parent) = parent {
        make_path(population, parent, is_made, filling, random);
    }
    filling.make(directory, parent, depth <= LEVEL, random);
    is_made[directory] = true;
}

fn run(context: &Context<'_>) -> Result<Vec<Outcome>, LabError> {
    let seeds = context.seeds(50, 2);
    let tries = if context.options.quick { &[PAPER_TRIES][..] } else { &TRIES };
    // With fewer files, one would be a larger part of what a group keeps free.
    let population = Population::new(Size::PAPER, &random(context.options.seed));
    let mut cases = Vec::new();
    for order in [Order::Tree, Order::Mixed] {
        cases.extend(tries.iter().map(|tries| Case { rule: Rule::Paper(*tries), order }));
        cases.push(Case { rule: Rule::Pool, order });
    }
    let parts = crossed(&cases, &[()], &seeds);
    let found =
        context.each(&parts, |(case, (), seed)| Ok(fill(&population, *case, &random(*seed))))?;
    Ok(vec![outcome(&found, &cases, &population, &seeds)])
}

/// Over the runs of a case in which there is a value.
fn of_runs(found: &[Found], case: Case, value: impl Fn(&Found) -> Option<f64>) -> Summary {
    summary(found.iter().filter(|found| found.case == case).filter_map(value))
}

fn ratio_at(found: &[Found], case: Case, utilization: usize) -> Summary {
    of_runs(found, case, |found| found.ratios.get(utilization).copied())
}

fn outcome(found: &[Found], cases: &[Case], population: &Population, seeds: &[u64]) -> Outcome {
    let mut csv = Csv::new(&[
        "case",
        "order",
        "utilization_percent",
        "failed_percent",
        "least",
        "most",
        "runs",
    ]);
    for case in cases {
        let order = if case.order == Order::Tree { "tree" } else { "mixed" };
        for utilization in 0..=100 {
            let ratio = ratio_at(found, *case, utilization);
            if ratio.count > 0 {
                let [mean, least, most] =
                    [ratio.mean, ratio.least, ratio.most].map(|n| format!("{n:.5}"));
                let count = ratio.count;
                csv.row(&[&case.rule.name(), &order, &utilization, &mean, &least, &most, &count]);
            }
        }
    }
    let both = |order| [Rule::Paper(PAPER_TRIES), Rule::Pool].map(|rule| Case { rule, order });
    let line = |quantity: &str, paper: &str, told: &dyn Fn(Case) -> String| {
        let [ours, shipped] = both(Order::Tree).map(told);
        let [mixed, shipped_mixed] = both(Order::Mixed).map(told);
        [
            Comparison::new(quantity, paper, ours, shipped),
            Comparison::new(format!("{quantity}; files in mixed order"), "", mixed, shipped_mixed),
        ]
    };
    let at = |utilization| {
        move |case| {
            let ratio = ratio_at(found, case, utilization);
            match ratio.count {
                0 => "not reached".into(),
                _ => percent(ratio.mean),
            }
        }
    };
    let ranged = |case, value: fn(&Found) -> f64| {
        let Summary { mean, least, most, .. } = of_runs(found, case, |found| Some(value(found)));
        format!("{mean:.1} % ({least:.1} to {most:.1})")
    };
    let first = |case| ranged(case, |found| found.first_failure);
    let reached = |case| ranged(case, |found| found.utilization);
    let end = |case| percent(of_runs(found, case, |found| Some(found.ratio)).mean);
    let mut comparison = Vec::new();
    comparison.extend(line("failed, at 60 % utilization", "near 0", &at(60)));
    comparison.extend(line("failed, at 80 % utilization", "", &at(80)));
    comparison.extend(line("failed, at 90 % utilization", "", &at(90)));
    comparison.extend(line("failed, at 95 % utilization", "", &at(95)));
    comparison.extend(line("failed, of all files", "12 % near 100 % utilization", &end));
    comparison.extend(line("utilization at the first failure", "", &first));
    comparison.extend(line("utilization at the end", "", &reached));
    let late = |case| {
        let first = found.iter().filter(|found| found.case == case).map(|f| f.first_failure);
        let (late, early): (Vec<f64>, Vec<f64>) = first.partition(|first| *first >= 95.0);
        format!("{} of {}", late.len(), late.len() + early.len())
    };
    comparison.extend(line("runs without a failure below 95 %", "", &late));
    let bytes: u64 = population.files.iter().map(|file| file.bytes).sum();
    Outcome {
        name: "kosha-fig6",
        title: "insertions that fail against utilization".into(),
        source: "Kosha §6.2, Figure 6",
        setup: format!(
            "16 nodes of 60 GB in all, level {LEVEL}, {COPIES} copies of {} synthetic files of {:.1} GB; paper's settings: \
             {PAPER_TRIES} redirections",
            population.files.len(),
            bytes as f64 / 1e9
        ),
        comparison,
        notes: vec![
            "All copies together are more than the 60 GB, so that some insertions must fail at the end. A run stops with its last file."
                .into(),
            "Of the paper, 12 % is what its text gives; a word seems to be missing there (\"it does exceed 12%\")."
                .into(),
        ],
        csv,
        chart: chart(found, cases, seeds),
        seeds: seeds.to_vec(),
    }
}

fn chart(found: &[Found], cases: &[Case], seeds: &[u64]) -> Chart {
    // The few runs that get farthest are those with the fewest failures.
    let enough = seeds.len().div_ceil(2);
    let line = |case: Case, name: String, ink, mark| {
        let points = (0..=100).filter_map(|utilization| {
            let ratio = ratio_at(found, case, utilization);
            (ratio.count >= enough).then(|| Point::new(utilization as f64, ratio.mean))
        });
        Series::new(name, ink, mark, points)
    };
    // Of the paper's rule, some numbers of redirections; more lines would lie on each other.
    let drawn = [
        (0, Ink::Grey, Mark::Dotted),
        (1, Ink::Green, Mark::Line),
        (PAPER_TRIES, Ink::Blue, Mark::Line),
        (15, Ink::Sky, Mark::Dashed),
    ];
    let mut series: Vec<Series> = drawn
        .into_iter()
        .map(|(tries, ink, mark)| {
            (Case { rule: Rule::Paper(tries), order: Order::Tree }, ink, mark)
        })
        .filter(|(case, ..)| cases.contains(case))
        .map(|(case, ink, mark)| {
            let Rule::Paper(tries) = case.rule else { unreachable!("the paper's rule alone") };
            let plural = if tries == 1 { "" } else { "s" };
            line(case, format!("paper's rule, {tries} redirection{plural}"), ink, mark)
        })
        .collect();
    let of_pool = |order| Case { rule: Rule::Pool, order };
    series.extend([
        line(
            of_pool(Order::Mixed),
            "default settings, files in mixed order".into(),
            Ink::Orange,
            Mark::Dashed,
        ),
        line(of_pool(Order::Tree), "default settings".into(), Ink::Vermilion, Mark::Line),
        Series::new("Kosha paper, 4 redirections", Ink::Black, Mark::Crosses, {
            [Point::new(60.0, 0.0), Point::new(100.0, 12.0)]
        }),
    ]);
    Chart {
        title: "Failed insertions by utilization (Kosha Figure 6)".into(),
        subtitle: format!(
            "level {LEVEL}, {COPIES} copies, {}; as far as half of them got",
            runs(seeds)
        ),
        x: Axis::linear("utilization of all nodes (%)", 0.0, 102.0),
        y: Axis::up_to("insertions that failed so far (%)", highest(&series)),
        series,
    }
}
