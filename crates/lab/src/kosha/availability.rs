//! Kosha §6.3, Figure 7: files that are there while machines of a corporation come and go.
//!
//! "We used an availability trace of 51663 machines in a large corporation over a consecutive 35-day (840-hour) period …. For each hour, we
//! determined the total number of files that remain available. The distribution level was fixed at 3, and the experiments were repeated with
//! the number of replicas varying from 0 to 4. For each case, 100 runs were made …. For the case of Kosha-3, the average availability is
//! 99.991% …. The largest number of failures (4890) occurred at hour 615, where over 12% files became unavailable for Kosha-0 compared to only
//! 0.16% for Kosha-3."
//!
//! | | paper's settings | default settings |
//! |---|---|---|
//! | machines | all, with random identifiers | of 16 groups of members, and any other one that is up in reserve |
//! | copies | on the nodes closest to the key that were up an hour ago: K, and one more | on the members of a group |
//! | a directory is there | if one of these is up | while its group serves ([`super::group_life`]): most voters are up, and a member that has everything |
//! | a file is there | if its directory is: the name leads to the node at once (§4.1.3) | if all directories above it are, and the root |
//! | repair | within the hour | after ten minutes of silence, and a copy at 100 Mbit/s |
//! | looked at | once an hour | at each moment |
//!
//! Not known: the paper's file system; how a directory comes back all of whose copies went in one hour. Its figure falls by 12 % in hour
//! 615, which is about the share of machines that failed in that hour alone, and not of all that were down: so a directory is taken
//! to be there again in the next hour ([`Return::NextHour`]). That it is away until one of its machines is back is
//! measured beside it ([`Return::WithMachine`]); and that a file needs all directories above it.
//!
//! Machines are those of [`super::machines`], or of `--availability FILE`.

use super::group_life::{DEAD_AFTER_SECS, Repair, outages};
use super::machines::{BURST_HOUR, Burst, HOUR_SECS, HOURS, MACHINES, Machines};
use super::node_ids::NodeIds;
use super::population::{Population, Size};
use super::{percent, random};
use crate::LabError;
use crate::chart::{Axis, Chart, Ink, Mark, Point, Series};
use crate::experiment::{Context, Experiment, Group, crossed, runs};
use crate::outcome::{Comparison, Csv, Outcome};
use crate::statistics::{Summary, summary};
use atoll_env::Env;
use atoll_pool::{GroupNumber, GroupRoom, group_for};

pub(crate) const GROUP: Group = Group {
    experiments: &[Experiment {
        name: "kosha-fig7",
        title: "files available while machines come and go",
        source: "Kosha §6.3, Figure 7",
        nodes: Some(1000..=MACHINES),
    }],
    run,
};

const LEVEL: usize = 3;
/// The paper's K is from 0 to 4.
const MOST_COPIES: usize = 5;
const GROUPS: u8 = 16;
/// Pools that are looked at in one run, each with other machines and hashes.
const POOLS: usize = 10;
/// 100 Mbit/s, the paper's Ethernet (§6.1).
const COPY_BYTES_PER_SEC: f64 = 12.5e6;

/// How a directory comes back that is on no machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Return {
    NextHour,
    WithMachine,
}

/// When another machine takes the place of a silent member.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Replaced {
    AsShipped,
    AfterMinute,
    Never,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Rule {
    /// The paper's; whether a file needs all directories above it.
    Paper { back: Return, needs_ancestors: bool },
    /// As a pool does it.
    Pool(Replaced),
}

/// The settings of the figure's first curves.
const PAPER: Rule = Rule::Paper { back: Return::NextHour, needs_ancestors: false };
const SHIPPED: Rule = Rule::Pool(Replaced::AsShipped);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Case {
    rule: Rule,
    burst: Burst,
    copies: usize,
}

/// One run.
struct Found {
    case: Case,
    /// For each hour, the share of files that are not there, percent.
    missing: Vec<f64>,
    machines: usize,
    failed_in_burst: usize,
    up_before_burst: usize,
}

impl Found {
    fn new(case: Case, machines: &Machines) -> Found {
        Found {
            case,
            missing: vec![0.0; HOURS],
            machines: machines.count(),
            failed_in_burst: machines.failed_in_burst,
            up_before_burst: machines.up_before_burst,
        }
    }

    fn available(&self) -> f64 {
        100.0 - self.missing.iter().sum::<f64>() / self.missing.len() as f64
    }
}

fn rules() -> [Rule; 7] {
    let paper = |back, needs_ancestors| Rule::Paper { back, needs_ancestors };
    [
        PAPER,
        paper(Return::NextHour, true),
        paper(Return::WithMachine, false),
        paper(Return::WithMachine, true),
        SHIPPED,
        Rule::Pool(Replaced::AfterMinute),
        Rule::Pool(Replaced::Never),
    ]
}

impl Rule {
    fn name(self) -> &'static str {
        match self {
            Rule::Paper { back: Return::NextHour, needs_ancestors: false } => "paper",
            Rule::Paper { back: Return::NextHour, needs_ancestors: true } => "paper-ancestors",
            Rule::Paper { back: Return::WithMachine, needs_ancestors: false } => "paper-lasting",
            Rule::Paper { back: Return::WithMachine, needs_ancestors: true } => {
                "paper-lasting-ancestors"
            }
            Rule::Pool(Replaced::AsShipped) => "default",
            Rule::Pool(Replaced::AfterMinute) => "default-after-minute",
            Rule::Pool(Replaced::Never) => "default-no-replacement",
        }
    }
}

/// The directories that are distributed, in the order of the population, and the files that stay with each.
struct Distributed {
    /// Which of them each lies in.
    parents: Vec<Option<usize>>,
    /// Share of all files, percent.
    files: Vec<f64>,
}

impl Distributed {
    fn new(population: &Population) -> Distributed {
        let anchors = population.anchors(LEVEL);
        let mut numbers = vec![0; anchors.len()];
        let mut parents: Vec<Option<usize>> = Vec::new();
        for (at, directory) in population.directories.iter().enumerate() {
            if anchors[at] == at {
                numbers[at] = parents.len();
                parents.push(directory.parent.map(|parent| numbers[parent]));
            }
        }
        let mut files = vec![0.0; parents.len()];
        let each = 100.0 / population.files.len() as f64;
        for file in &population.files {
            files[numbers[anchors[file.directory]]] += each;
        }
        Distributed { parents, files }
    }
}

fn run(context: &Context<'_>) -> Result<Vec<Outcome>, LabError> {
    let count = context.nodes(MACHINES, 2000);
    let seeds = context.seeds(10, 2);
    let size = if context.options.quick { Size::QUICK } else { Size::PAPER };
    let population = Population::new(size, &random(context.options.seed));
    let distributed = Distributed::new(&population);
    let trace = context.options.availability.as_deref();
    // A recorded hour is as it is.
    let bursts = if trace.is_some() { &[Burst::Spread][..] } else { &Burst::ALL };
    let parts = crossed(bursts, &[()], &seeds);
    let found = context.each(&parts, |(burst, (), seed)| {
        let random = random(*seed);
        let machines = match trace {
            Some(trace) => Machines::traced(trace)?,
            None => Machines::modelled(count, *burst, &random),
        };
        let mut found = Vec::new();
        // Once an hour both bursts look alike.
        if *burst == Burst::Spread {
            found.extend(by_nodes(&machines, &distributed, &random));
        }
        found.extend(by_groups(&machines, &distributed, size.bytes, *burst, &random));
        Ok(found)
    })?;
    let found: Vec<Found> = found.into_iter().flatten().collect();
    let source = if trace.is_some() { "the file's" } else { "synthetic" };
    Ok(vec![outcome(&found, bursts, source, &distributed, &seeds)])
}

/// A set of numbers of copies as bits: that of K + 1 copies is bit K.
type Copies = u8;

/// By the paper's rule.
fn by_nodes(machines: &Machines, distributed: &Distributed, random: &Env) -> Vec<Found> {
    let ids = NodeIds::new(machines.count(), random);
    let keys: Vec<u64> = distributed.parents.iter().map(|_| random.random_u64()).collect();
    let rules: Vec<Rule> =
        rules().into_iter().filter(|r| matches!(r, Rule::Paper { .. })).collect();
    let mut found: Vec<Found> = Vec::new();
    for rule in &rules {
        found.extend((1..=MOST_COPIES).map(|copies| {
            let case = Case { rule: *rule, burst: Burst::Spread, copies };
            Found::new(case, machines)
        }));
    }
    let hourly = machines.hourly();
    // The machines that have a waiting directory, by its number of copies.
    let mut waiting: Vec<(Copies, [[usize; MOST_COPIES]; MOST_COPIES])> =
        vec![(0, [[0; MOST_COPIES]; MOST_COPIES]); keys.len()];
    for hour in 1..=HOURS {
        let (before, up) = (|m: usize| hourly[m].at(hour - 1), |m: usize| hourly[m].at(hour));
        let mut gone: Vec<[Copies; 4]> = Vec::with_capacity(keys.len());
        for (at, key) in keys.iter().enumerate() {
            let mut live = ids.closest(*key).filter(|machine| before(*machine));
            let holders: [usize; MOST_COPIES] =
                std::array::from_fn(|_| live.next().expect("more machines are up than that"));
            let first_up = holders.iter().position(|machine| up(*machine));
            let now: Copies = (1 << first_up.unwrap_or(MOST_COPIES)) - 1;
            let (mut lasting, mut waits_for) = waiting[at];
            for copies in 0..MOST_COPIES {
                let bit = 1 << copies;
                if lasting & bit != 0 && waits_for[copies][..=copies].iter().any(|m| up(*m)) {
                    lasting &= !bit;
                } else if lasting & bit == 0 && now & bit != 0 {
                    lasting |= bit;
                    waits_for[copies] = holders;
                }
            }
            waiting[at] = (lasting, waits_for);
            let above = distributed.parents[at].map_or([0; 4], |parent| gone[parent]);
            gone.push([now, now | above[1], lasting, lasting | above[3]]);
        }
        for (at, gone) in gone.iter().enumerate() {
            for (rule, gone) in gone.iter().enumerate() {
                for copies in (0..MOST_COPIES).filter(|copies| gone & (1 << copies) != 0) {
                    let found = &mut found[rule * MOST_COPIES + copies];
                    found.missing[hour - 1] += distributed.files[at];
                }
            }
        }
    }
    found
}

/// As pools do it: the mean of some.
fn by_groups(
    machines: &Machines,
    distributed: &Distributed,
    bytes: u64,
    burst: Burst,
    random: &Env,
) -> Vec<Found> {
    let copy_secs = bytes as f64 / f64::from(GROUPS) / COPY_BYTES_PER_SEC;
    let mut found = Vec::new();
    for rule in rules() {
        let Rule::Pool(replaced) = rule else { continue };
        let dead_after_secs =
            if replaced == Replaced::AfterMinute { 60.0 } else { DEAD_AFTER_SECS };
        let replaces = replaced != Replaced::Never;
        for copies in 1..=MOST_COPIES {
            let repair = Repair { copies, dead_after_secs, replaces, copy_secs };
            let mut of_case = Found::new(Case { rule, burst, copies }, machines);
            for _ in 0..POOLS {
                let files = files_by_groups(distributed, random);
                let end = HOURS as f64 * HOUR_SECS;
                let away: Vec<Vec<(f64, f64)>> =
                    (0..GROUPS).map(|_| outages(machines, repair, end, random)).collect();
                add_missing(&mut of_case.missing, &files, &away);
            }
            of_case.missing.iter_mut().for_each(|missing| *missing /= POOLS as f64);
            found.push(of_case);
        }
    }
    found
}

/// A set of groups as bits.
type Groups = u16;

/// The files, percent of all, by the groups that they need: those of their directory, of all directories above it, and of the root.
fn files_by_groups(distributed: &Distributed, random: &Env) -> Vec<(Groups, f64)> {
    let number = |number| GroupNumber::new(number).expect("a pool has 64 groups");
    let rooms: Vec<GroupRoom> =
        (0..GROUPS).map(|group| GroupRoom::unknown(number(group))).collect();
    let mut needs: Vec<Groups> = Vec::with_capacity(distributed.parents.len());
    let mut files = std::collections::BTreeMap::new();
    for (at, parent) in distributed.parents.iter().enumerate() {
        let group = group_for(&rooms, GroupNumber::FIRST, true, random.random_u64());
        let above = parent.map_or(1 << GroupNumber::FIRST.number(), |parent| needs[parent]);
        needs.push(above | 1 << group.number());
        *files.entry(needs[at]).or_insert(0.0) += distributed.files[at];
    }
    files.into_iter().collect()
}

/// Adds the share of files that are missing, hour by hour, while groups are away.
fn add_missing(missing: &mut [f64], files: &[(Groups, f64)], away: &[Vec<(f64, f64)>]) {
    let mut changes: Vec<(f64, Groups)> = Vec::new();
    for (group, outages) in away.iter().enumerate() {
        changes.extend(
            outages.iter().flat_map(|(start, end)| [*start, *end]).map(|at| (at, 1 << group)),
        );
    }
    changes.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (mut down, mut since) = (0, 0.0);
    for (at, group) in changes {
        if down != 0 {
            let needing = files.iter().filter(|(needs, _)| needs & down != 0);
            add_span(missing, since, at, needing.map(|(_, share)| share).sum());
        }
        (down, since) = (down ^ group, at);
    }
}

/// Adds a share to the hours of a span of time, each by how much of it lies in the span.
fn add_span(missing: &mut [f64], from: f64, to: f64, share: f64) {
    for (hour, missing) in missing.iter_mut().enumerate().skip((from / HOUR_SECS) as usize) {
        let begin = hour as f64 * HOUR_SECS;
        if begin >= to {
            break;
        }
        *missing += share * (to.min(begin + HOUR_SECS) - from.max(begin)) / HOUR_SECS;
    }
}

fn of_runs(found: &[Found], case: Case, value: impl Fn(&Found) -> f64) -> Summary {
    summary(found.iter().filter(|found| found.case == case).map(value))
}

/// The mean over hours and runs of a case.
fn available(found: &[Found], case: Case) -> Summary {
    of_runs(found, case, Found::available)
}

/// The files missing in hour 615, percent.
fn missing_in_burst(found: &[Found], case: Case) -> Summary {
    of_runs(found, case, |found| found.missing[BURST_HOUR - 1])
}

fn table(found: &[Found], cases: &[Case]) -> Csv {
    let mut csv = Csv::new(&["case", "burst", "copies", "hour", "available_percent", "least"]);
    for case in cases {
        let burst = if case.burst == Burst::Spread { "spread" } else { "at-once" };
        let mut row = |hour: &str, of: Summary| {
            let (mean, least) = (format!("{:.5}", of.mean), format!("{:.5}", of.least));
            csv.row(&[&case.rule.name(), &burst, &case.copies, &hour, &mean, &least]);
        };
        row("all", available(found, *case));
        for hour in 1..=HOURS {
            row(&hour.to_string(), of_runs(found, *case, |f| 100.0 - f.missing[hour - 1]));
        }
    }
    csv
}

fn comparison(found: &[Found], bursts: &[Burst]) -> Vec<Comparison> {
    let spread = |rule, copies| Case { rule, burst: Burst::Spread, copies };
    let told = |case| format!("{:.5} %", available(found, case).mean);
    let mut comparison = Vec::new();
    for copies in 1..=MOST_COPIES {
        let paper = if copies == 4 { "99.991 %" } else { "" };
        let plural = if copies == 1 { "copy" } else { "copies" };
        let quantity = format!("available, K = {} ({copies} {plural})", copies - 1);
        let [ours, shipped] = [PAPER, SHIPPED].map(|rule| told(spread(rule, copies)));
        comparison.push(Comparison::new(quantity, paper, ours, shipped));
    }
    for (copies, paper) in [(1, "over 12 %"), (3, ""), (4, "0.16 %"), (5, "")] {
        let gone = |rule| percent(missing_in_burst(found, spread(rule, copies)).mean);
        let quantity = format!("missing in hour {BURST_HOUR}, K = {}", copies - 1);
        comparison.push(Comparison::new(quantity, paper, gone(PAPER), gone(SHIPPED)));
    }
    let mut other = |what: &str, rule: Rule, burst| {
        for copies in [3, 4, 5] {
            let told = told(Case { rule, burst, copies });
            let is_paper = matches!(rule, Rule::Paper { .. });
            let [ours, shipped] =
                if is_paper { [told, String::new()] } else { [String::new(), told] };
            let quantity = format!("{what}, K = {}", copies - 1);
            comparison.push(Comparison::new(quantity, "", ours, shipped));
        }
    };
    let paper = |back, needs_ancestors| Rule::Paper { back, needs_ancestors };
    let (next, lasting) = (Return::NextHour, Return::WithMachine);
    other("if files need all directories above", paper(next, true), Burst::Spread);
    other("if what is gone waits for a machine", paper(lasting, false), Burst::Spread);
    other("if both", paper(lasting, true), Burst::Spread);
    if bursts.contains(&Burst::AtOnce) {
        other("if those of hour 615 fail at one moment", SHIPPED, Burst::AtOnce);
    }
    let replaced = |replaced| Rule::Pool(replaced);
    let spread = Burst::Spread;
    other("if silent ones are replaced after a minute", replaced(Replaced::AfterMinute), spread);
    other("if no machine takes a silent one's place", replaced(Replaced::Never), spread);
    comparison
}

fn outcome(
    found: &[Found],
    bursts: &[Burst],
    source: &str,
    distributed: &Distributed,
    seeds: &[u64],
) -> Outcome {
    let mut cases: Vec<Case> = Vec::new();
    for case in found.iter().map(|found| found.case) {
        if !cases.contains(&case) {
            cases.push(case);
        }
    }
    let of_machines = |value: fn(&Found) -> usize| {
        summary(found.iter().map(|found| value(found) as f64)).mean.round() as usize
    };
    let count = of_machines(|found| found.machines);
    let (failed, up) = (of_machines(|f| f.failed_in_burst), of_machines(|f| f.up_before_burst));
    Outcome {
        name: "kosha-fig7",
        title: "files available over 840 hours".into(),
        source: "Kosha §6.3, Figure 7",
        setup: format!(
            "{count} machines, {source}; in hour {BURST_HOUR} {failed} fail of {up} that are up; level {LEVEL}, {} directories \
             distributed over all nodes, or over {GROUPS} groups",
            distributed.files.len()
        ),
        comparison: comparison(found, bursts),
        notes: vec![
            format!(
                "The default settings count each moment, {POOLS} pools a run, and all groups that a file's path leads through. A group that \
                 has lost most of its voters waits for one of them, however many other machines there are."
            ),
            "With one copy, or two, one member votes: its machine's own pauses are the group's."
                .into(),
        ],
        csv: table(found, &cases),
        chart: chart(found, seeds),
        seeds: seeds.to_vec(),
    }
}

fn chart(found: &[Found], seeds: &[u64]) -> Chart {
    let line = |rule, copies: usize, name: &str, ink, mark| {
        let case = Case { rule, burst: Burst::Spread, copies };
        let points = (1..=HOURS).map(|hour| {
            let missing = of_runs(found, case, |found| found.missing[hour - 1]).mean;
            Point::new(hour as f64, 100.0 - missing)
        });
        Series::new(format!("{name}, K = {}", copies - 1), ink, mark, points)
    };
    let series = vec![
        line(PAPER, 1, "paper's rule", Ink::Grey, Mark::Line),
        line(PAPER, 2, "paper's rule", Ink::Sky, Mark::Line),
        line(PAPER, 4, "paper's rule", Ink::Blue, Mark::Line),
        line(SHIPPED, 3, "default settings", Ink::Orange, Mark::Line),
        line(SHIPPED, 5, "default settings", Ink::Vermilion, Mark::Line),
        Series::new("Kosha paper, hour 615: K = 0 and K = 3", Ink::Black, Mark::Crosses, {
            [Point::new(BURST_HOUR as f64, 88.0), Point::new(BURST_HOUR as f64, 99.84)]
        }),
    ];
    let lowest = series.iter().flat_map(|s| &s.points).map(|point| point.y).fold(100.0, f64::min);
    Chart {
        title: "Files available while machines come and go (Kosha Figure 7)".into(),
        subtitle: format!("level {LEVEL}, {}", runs(seeds)),
        x: Axis::linear("hour", 0.0, HOURS as f64),
        y: Axis::linear("files available (%)", lowest.floor() - 1.0, 100.0),
        series,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_missing_while_any_group_of_theirs_is_away() {
        let files = [(0b001, 50.0), (0b011, 30.0), (0b101, 20.0)];
        let away = [vec![], vec![(1800.0, 5400.0)], vec![(3600.0, 7200.0)]];
        let mut missing = vec![0.0; 3];
        add_missing(&mut missing, &files, &away);
        assert_eq!(missing, [15.0, 15.0 + 20.0, 0.0]);
        let mut missing = vec![0.0; 3];
        add_missing(&mut missing, &files, &[vec![(0.0, 3600.0)], vec![], vec![]]);
        assert_eq!(missing, [100.0, 0.0, 0.0], "the root is above all");
    }

    #[test]
    fn all_files_are_distributed_and_each_needs_the_root() {
        let random = random(1);
        let size = Size { users: 9, files: 900, bytes: 9_000_000 };
        let distributed = Distributed::new(&Population::new(size, &random));
        let all: f64 = distributed.files.iter().sum();
        assert!((all - 100.0).abs() < 1e-6, "{all}");
        let files = files_by_groups(&distributed, &random);
        assert!(files.iter().all(|(groups, _)| groups & 1 != 0 && groups.count_ones() <= 4));
        let all: f64 = files.iter().map(|(_, share)| share).sum();
        assert!((all - 100.0).abs() < 1e-6, "{all}");
    }

    /// A directory of one copy waits for its machine, and with two of them for one of both.
    #[test]
    fn more_copies_never_make_less_available() {
        let random = random(2);
        let size = Size { users: 9, files: 900, bytes: 9_000_000 };
        let distributed = Distributed::new(&Population::new(size, &random));
        let machines = Machines::modelled(600, Burst::Spread, &random);
        let found = by_nodes(&machines, &distributed, &random);
        for of_rule in found.chunks(MOST_COPIES) {
            for two in of_rule.windows(2) {
                assert!(two[0].available() <= two[1].available() + 1e-9, "{:?}", two[0].case);
            }
        }
        let of =
            |rule| found.iter().find(|f| f.case.rule == rule).expect("it is there").available();
        let lasting = Rule::Paper { back: Return::WithMachine, needs_ancestors: false };
        let above = Rule::Paper { back: Return::NextHour, needs_ancestors: true };
        assert!(of(lasting) < of(PAPER) && of(above) < of(PAPER));
    }
}
