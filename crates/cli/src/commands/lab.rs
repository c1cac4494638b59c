//! `atoll lab`: the papers' experiments, with Atoll's own code on a simulated network.

use std::fs;
use std::io::{IsTerminal, stderr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use atoll_lab::{Comparison, Experiment, InputError, LabError, Options, Outcome, Progress};
use atoll_node::shell_word;
use clap::Subcommand;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::messages::note;
use crate::output::Output;
use crate::units;

/// Arguments of `atoll lab`.
#[derive(clap::Args, Debug)]
#[command(
    subcommand_required = true,
    arg_required_else_help = true,
    after_help = "Examples:
  atoll lab list
  atoll lab run cfs-fig9
  atoll lab run --all --quick --out /tmp/lab"
)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: LabCommand,
}

#[derive(Subcommand, Debug)]
enum LabCommand {
    /// List the experiments
    List(ListArgs),
    /// Run experiments; write points and plots, print a table beside the paper's numbers
    Run(RunArgs),
}

#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll lab list
  atoll lab list --json | jq -r .name")]
struct ListArgs {
    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll lab run cfs-fig9
  atoll lab run cfs-fig13 cfs-fig14 --nodes 500 --runs 3
  atoll lab run cfs-fig6 --latency planetlab.latm.xz
  atoll lab run --all --quick --out /tmp/lab --json | jq .rows

No node is needed. The same seed gives the same points, on any machine.")]
#[command(group(clap::ArgGroup::new("which").required(true)))]
struct RunArgs {
    /// Which experiments
    #[arg(value_name = "EXPERIMENT", group = "which")]
    experiments: Vec<String>,

    /// All of them
    #[arg(long, group = "which")]
    all: bool,

    /// Nodes of the largest ring, where an experiment leaves it open [default: the paper's]
    #[arg(long, value_name = "N")]
    nodes: Option<usize>,

    /// The first run's seed; the next one has one more, and so on
    #[arg(long, value_name = "S", default_value_t = Options::default().seed)]
    seed: u64,

    /// Runs with seeds of their own [default: the paper's number]
    #[arg(long, value_name = "R")]
    runs: Option<usize>,

    /// Smaller rings and fewer runs: seconds instead of minutes
    #[arg(long)]
    quick: bool,

    /// Round trips between hosts (a LATM or text matrix, also .xz) instead of a model
    #[arg(long, value_name = "FILE")]
    latency: Option<PathBuf>,

    /// When hosts are up (CSV host,start_s,end_s, also .xz) instead of a model
    #[arg(long, value_name = "FILE")]
    availability: Option<PathBuf>,

    /// Where points (CSV) and plots (SVG) go; made if need be
    #[arg(long, value_name = "DIR", default_value = "atoll-lab")]
    out: PathBuf,

    /// One JSON object an experiment instead of tables
    #[arg(long)]
    json: bool,

    /// Tables and plots in Markdown, for a report
    #[arg(long, conflicts_with = "json")]
    markdown: bool,
}

/// Lists or runs.
pub(crate) fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    match &args.command {
        LabCommand::List(args) => list(args),
        LabCommand::Run(args) => run_experiments(args, global),
    }
}

#[derive(Serialize)]
struct JsonExperiment {
    name: &'static str,
    title: &'static str,
    source: &'static str,
}

fn list(args: &ListArgs) -> Result<(), Failure> {
    let mut output = Output::new();
    let widest = atoll_lab::experiments().map(|e| e.name.len()).max().unwrap_or(0);
    for Experiment { name, title, source, .. } in atoll_lab::experiments() {
        if args.json {
            output.json(&JsonExperiment { name, title, source })?;
        } else {
            output.line(format!("{name:widest$}  {title} ({source})"))?;
        }
    }
    output.flush()
}

#[derive(Serialize)]
struct JsonOutcome<'a> {
    experiment: &'a str,
    title: &'a str,
    source: &'a str,
    setup: &'a str,
    runs: usize,
    seeds: &'a [u64],
    rows: &'a [Comparison],
    notes: &'a [String],
    csv: String,
    svg: String,
    repeat: &'a str,
}

fn run_experiments(args: &RunArgs, global: &Global) -> Result<(), Failure> {
    let options = Options {
        nodes: args.nodes,
        seed: args.seed,
        runs: args.runs,
        quick: args.quick,
        latency: load(&args.latency, "latencies", atoll_lab::read_latency)?,
        availability: load(&args.availability, "availability", atoll_lab::read_availability)?,
    };
    let names: Vec<&str> = match args.all {
        true => atoll_lab::experiments().map(|experiment| experiment.name).collect(),
        false => args.experiments.iter().map(String::as_str).collect(),
    };
    let bar = Bar::new(global.quiet);
    let outcomes = atoll_lab::outcomes(&names, &options, &bar).map_err(failure)?;
    prepare(&args.out)?;
    let mut output = Output::new();
    for (n, outcome) in outcomes.enumerate() {
        bar.finish();
        let outcome = outcome.map_err(failure)?;
        let files = write(&args.out, &outcome)?;
        if n > 0 && !args.json {
            output.line("")?;
        }
        tell(&mut output, args, &outcome, files)?;
        // Results stay, also if a later experiment breaks off.
        output.flush()?;
    }
    Ok(())
}

/// One experiment as it was asked for.
fn tell(
    output: &mut Output,
    args: &RunArgs,
    outcome: &Outcome,
    [csv, svg]: [PathBuf; 2],
) -> Result<(), Failure> {
    let repeat = repeat(args, outcome.name);
    if args.markdown {
        return report(output, outcome, [&csv, &svg], &repeat);
    }
    if !args.json {
        return show(output, outcome, [&csv, &svg], &repeat);
    }
    output.json(&JsonOutcome {
        experiment: outcome.name,
        title: &outcome.title,
        source: outcome.source,
        setup: &outcome.setup,
        runs: outcome.seeds.len(),
        seeds: &outcome.seeds,
        rows: &outcome.comparison,
        notes: &outcome.notes,
        csv: csv.display().to_string(),
        svg: svg.display().to_string(),
        repeat: &repeat,
    })
}

fn show(
    output: &mut Output,
    outcome: &Outcome,
    [csv, svg]: [&Path; 2],
    repeat: &str,
) -> Result<(), Failure> {
    output.line(format!("{}: {} ({})", outcome.name, outcome.title, outcome.source))?;
    output.line(&outcome.setup)?;
    output.line("")?;
    for line in outcome.table().lines() {
        output.line(format!("  {line}"))?;
    }
    output.line("")?;
    for note in &outcome.notes {
        output.line(note)?;
    }
    output.line(runs(outcome))?;
    output.line(format!("repeat: {repeat}"))?;
    output.line(format!("points: {}", csv.display()))?;
    output.line(format!("plot:   {}", svg.display()))
}

/// A section of a report.
fn report(
    output: &mut Output,
    outcome: &Outcome,
    [csv, svg]: [&Path; 2],
    repeat: &str,
) -> Result<(), Failure> {
    let Outcome { name, title, source, setup, .. } = outcome;
    output.line(format!("### {name}: {title}\n\n{source}: {setup}; {}.\n", runs(outcome)))?;
    output.line(outcome.markdown())?;
    for note in &outcome.notes {
        output.line(format!("{note}\n"))?;
    }
    output.line(format!("![{title}]({})\n", svg.display()))?;
    output.line(format!("Points: [{name}.csv]({}). Repeat: `{repeat}`", csv.display()))
}

/// How many runs there were, and their seeds.
fn runs(outcome: &Outcome) -> String {
    let seeds: Vec<String> = outcome.seeds.iter().map(u64::to_string).collect();
    let runs = units::counted(seeds.len() as u64, "run", "runs");
    let seed = if seeds.len() == 1 { "seed" } else { "seeds" };
    format!("{runs}, {seed} {}", shortened(&seeds))
}

/// A list that may be long; seeds count up by one.
fn shortened(seeds: &[String]) -> String {
    match seeds {
        [first, _, .., last] if seeds.len() > 8 => format!("{first} … {last}"),
        _ => seeds.join(" "),
    }
}

/// The command that gives the same points again.
fn repeat(args: &RunArgs, name: &str) -> String {
    let mut command = format!("atoll lab run {name}");
    let mut add = |option: &str, value: Option<String>| {
        if let Some(value) = value {
            command.push_str(&format!(" {option} {value}"));
        }
    };
    let path =
        |path: &Option<PathBuf>| path.as_ref().map(|path| shell_word(&path.display().to_string()));
    let leaves_nodes_open = atoll_lab::experiments().any(|e| e.name == name && e.nodes.is_some());
    add("--nodes", args.nodes.filter(|_| leaves_nodes_open).map(|n| n.to_string()));
    add("--seed", Some(args.seed.to_string()));
    add("--runs", args.runs.map(|n| n.to_string()));
    add("--latency", path(&args.latency));
    add("--availability", path(&args.availability));
    if args.quick {
        command.push_str(" --quick");
    }
    command
}

fn load<T>(
    path: &Option<PathBuf>,
    what: &str,
    read: impl Fn(&Path) -> Result<T, InputError>,
) -> Result<Option<Arc<T>>, Failure> {
    let Some(path) = path else { return Ok(None) };
    let what = format!("cannot use the {what} in {}", path.display());
    match read(path) {
        Ok(data) => Ok(Some(Arc::new(data))),
        Err(InputError::Io(error)) => Err(Failure::io(what, &error)),
        Err(InputError::NoXz) => Err(Failure::new(Exit::Failed, what)
            .because(InputError::NoXz)
            .advice("Install xz (package xz-utils), or unpack the file first.")),
        Err(error) => Err(Failure::new(Exit::Failed, what).because(error)),
    }
}

/// Makes sure that results can be kept before anything is computed.
fn prepare(out: &Path) -> Result<(), Failure> {
    let failed =
        |error: std::io::Error| Failure::io(format!("cannot write into {}", out.display()), &error);
    fs::create_dir_all(out).map_err(failed)?;
    let probe = out.join(format!(".probe-{}", std::process::id()));
    fs::write(&probe, "").map_err(failed)?;
    fs::remove_file(&probe).map_err(failed)
}

fn write(out: &Path, outcome: &Outcome) -> Result<[PathBuf; 2], Failure> {
    let keep = |extension: &str, text: &str| {
        let path = out.join(format!("{}.{extension}", outcome.name));
        fs::write(&path, text)
            .map_err(|error| Failure::io(format!("cannot write {}", path.display()), &error))?;
        Ok::<PathBuf, Failure>(path)
    };
    Ok([keep("csv", outcome.csv.text())?, keep("svg", &outcome.chart.to_svg())?])
}

fn failure(error: LabError) -> Failure {
    match &error {
        LabError::Unknown(_) => {
            Failure::new(Exit::Usage, error.to_string()).advice("`atoll lab list` names them all.")
        }
        LabError::Options(_) => Failure::new(Exit::Usage, error.to_string()),
        LabError::Failed(_) => {
            Failure::new(Exit::Failed, "the experiment broke off").because(&error)
        }
    }
}

/// A bar for each group of experiments, on a terminal; elsewhere a line. Both end in how
/// long it took.
struct Bar {
    quiet: bool,
    running: Mutex<Option<Running>>,
}

/// A group of experiments under way.
struct Running {
    names: String,
    began: Instant,
    bar: Option<ProgressBar>,
}

impl Bar {
    fn new(quiet: bool) -> Bar {
        Bar { quiet, running: Mutex::default() }
    }

    fn running(&self) -> MutexGuard<'_, Option<Running>> {
        self.running.lock().expect("no holder of this lock panics")
    }

    /// Ends the group under way, if any.
    fn finish(&self) {
        let Some(Running { names, began, bar }) = self.running().take() else { return };
        if let Some(bar) = bar {
            bar.finish_and_clear();
        }
        note!("{names} took {}", units::duration(began.elapsed()));
    }
}

impl Progress for Bar {
    fn begins(&self, names: &[&str], parts: usize) {
        if self.quiet {
            return;
        }
        let names = names.join(", ");
        let bar = stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(parts as u64);
            let style = ProgressStyle::with_template(
                "{prefix} {bar:20} {pos} of {len}, {elapsed}{wide_msg}",
            );
            bar.set_style(style.expect("the template is right").progress_chars("█▉▊▋▌▍▎▏ "));
            bar.set_prefix(names.clone());
            bar.enable_steady_tick(Duration::from_millis(500));
            bar
        });
        if bar.is_none() {
            note!("running {names}: {}", units::counted(parts as u64, "part", "parts"));
        }
        *self.running() = Some(Running { names, began: Instant::now(), bar });
    }

    fn part_done(&self) {
        let running = self.running();
        let Some(bar) = running.as_ref().and_then(|running| running.bar.as_ref()) else { return };
        bar.inc(1);
        let (done, all) = (bar.position(), bar.length().unwrap_or(0));
        if done > 0 && done < all {
            bar.set_message(format!(", {} left", units::whole_secs(bar.eta().as_secs().max(1))));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_list_of_seeds_is_shortened() {
        let seeds = |n: u64| (1..=n).map(|s| s.to_string()).collect::<Vec<_>>();
        assert_eq!(shortened(&seeds(3)), "1 2 3");
        assert_eq!(shortened(&seeds(20)), "1 … 20");
    }
}
