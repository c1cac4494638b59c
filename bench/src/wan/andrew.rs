//! The Andrew benchmark on a shared volume of real nodes, beside what the simulator says (Pastis §5.1,
//! Figure 3), and on any directory, such as a mount of NFS (§5.7, Figure 11).
//!
//! Real `atoll` processes, one at each site, all sites equally far from each other; a shared volume is
//! mounted through the node of one of them, and this program does the five phases below the mount. Each run
//! has a volume and a mount of its own. The simulated nodes run the same code on the same network, with
//! connections as real ones have; what nodes, the mount and the kernel compute is not in their time.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use atoll_bench::{machine, today};
use atoll_lab::andrew::{self, Below, Files, InDirectory, Names, SourceTree, TreeSize};
use atoll_lab::pastis::Prediction;
use atoll_volume::shared::Consistency;
use futures_util::FutureExt;

use crate::report::median;
use crate::ring::Ring;
use crate::router::Lines;
use crate::wide::Wide;

pub(crate) const USAGE: &str = "\
make bench-wan-andrew WAN='[OPTION]...'
  --quick            one run of each model
  --runs N           runs of each model of consistency [3]
  --nodes N          nodes, one at each site [16]
  --delay-ms N       between any two sites, one way [100]
  --replicas N       copies of each block [4]
  --mbit N           rate of the access lines, Mbit/s [100]
  --atoll FILE       another program than the `atoll` beside this one
  --out DIR          where pastis/pastis-fig3.md and .csv go [nowhere]
  --on DIR           no nodes: only does the benchmark below this directory, and prints its seconds";

const MODELS: [(Consistency, &str, &str); 2] = [
    (Consistency::CloseToOpen, "cto", "close-to-open"),
    (Consistency::ReadYourWrites, "ryw", "read-your-writes"),
];

/// The nodes rest for so long before the first run: they learn how far others are.
const REST: Duration = Duration::from_secs(60);
/// Pastis §5.1 says of its Figure 3 no more than that the totals differ by about 10 %.
const ALLOWED: f64 = 0.1;
const QUEUE_BYTES: f64 = 256.0 * 1024.0;
const FIRST_SEED: u64 = 2001;

type Seconds = [f64; 5];

/// What can be said on the command line.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    runs: usize,
    nodes: usize,
    delay_ms: u64,
    replicas: usize,
    mbit: f64,
    atoll: PathBuf,
    out: Option<PathBuf>,
    /// The benchmark is done below this directory, and nowhere else.
    pub on: Option<PathBuf>,
}

impl Options {
    pub(crate) fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Options, String> {
        let mut options = Options {
            runs: 3,
            nodes: 16,
            delay_ms: 100,
            replicas: 4,
            mbit: 100.0,
            atoll: crate::options::program_beside_this_one(),
            out: None,
            on: None,
        };
        let number = |text: String| -> Result<u64, String> {
            text.parse().map_err(|_| format!("{text} is no such number"))
        };
        while let Some(name) = arguments.next() {
            let mut value = || arguments.next().ok_or(format!("{name} needs a value"));
            match name.as_str() {
                "--quick" => options.runs = 1,
                "--runs" => options.runs = number(value()?)? as usize,
                "--nodes" => options.nodes = number(value()?)? as usize,
                "--delay-ms" => options.delay_ms = number(value()?)?,
                "--replicas" => options.replicas = number(value()?)? as usize,
                "--mbit" => options.mbit = number(value()?)? as f64,
                "--atoll" => options.atoll = value()?.into(),
                "--out" => options.out = Some(value()?.into()),
                "--on" => options.on = Some(value()?.into()),
                _ => return Err(format!("what is {name}?")),
            }
        }
        if options.runs == 0 || options.mbit <= 0.0 {
            return Err("runs and rate are above zero".into());
        }
        if !(2..=32).contains(&options.nodes) || !(1..=8).contains(&options.replicas) {
            return Err("there are 2 to 32 nodes, and 1 to 8 copies of a block".into());
        }
        Ok(options)
    }

    fn bytes_per_sec(&self) -> f64 {
        self.mbit * 1e6 / 8.0
    }
}

/// The calls that the kernel's NFS client has made, if it has one.
fn nfs_calls() -> Option<u64> {
    let counts = fs::read_to_string("/proc/net/rpc/nfs").ok()?;
    let calls = counts.lines().find_map(|line| line.strip_prefix("rpc "))?;
    calls.split(' ').next()?.parse().ok()
}

/// The five phases in a new directory below `place`.
pub(crate) fn phases(place: &Path) -> Result<Seconds, String> {
    let tree = SourceTree::new(TreeSize::Small);
    let names = Names::of_tree(&tree);
    let files = InDirectory::new(place);
    done("mkdir client0", files.make_directory("client0"))?;
    let files = Below::new(files, "client0");
    let mut seconds = [0.0; 5];
    for (phase, seconds) in seconds.iter_mut().enumerate() {
        let (began, calls) = (Instant::now(), nfs_calls());
        let name = Prediction::PHASES[phase];
        match phase {
            0 => drop(done(name, andrew::make_directories(&files, &names))?),
            1 => drop(done(name, andrew::copy_in(&files, &tree))?),
            2 => drop(done(name, andrew::stat(&files, andrew::COPY))?),
            3 => drop(done(name, andrew::read(&files, andrew::COPY, &names))?),
            _ => drop(done(name, andrew::compile(&files, &names))?),
        }
        *seconds = began.elapsed().as_secs_f64();
        if let (Some(before), Some(now)) = (calls, nfs_calls())
            && now > before
        {
            eprintln!("{name}: {} NFS calls", now - before);
        }
    }
    Ok(seconds)
}

/// What a phase in a directory gives: it is done when it is polled first.
fn done<T, E: std::fmt::Display>(
    what: &str,
    work: impl Future<Output = Result<T, E>>,
) -> Result<T, String> {
    let done = work.now_or_never().expect("work in a directory waits for nothing else");
    done.map_err(|error| format!("{what}: {error}"))
}

/// `mkdir 2.01, copy 10.60, …; total 20.12`
pub(crate) fn told(seconds: &Seconds) -> String {
    let each = Prediction::PHASES.iter().zip(seconds);
    let each: Vec<String> = each.map(|(name, secs)| format!("{name} {secs:.2}")).collect();
    format!("{}; total {:.2}", each.join(", "), seconds.iter().sum::<f64>())
}

/// The times of one consistency model: of the real runs, and of as many simulated ones.
struct Found {
    real: Vec<Seconds>,
    simulated: Vec<Seconds>,
}

/// Makes the comparison, inside the nest.
pub(crate) fn compare(options: &Options, temp: &Path) -> Result<(), String> {
    let delay = Duration::from_millis(options.delay_ms);
    let between = |a: usize, b: usize| if a == b { Duration::ZERO } else { delay };
    let row = |a| (0..options.nodes).map(|b| between(a, b)).collect();
    let wide = Wide::new(Lines {
        delays: (0..options.nodes).map(row).collect(),
        rate_bytes_per_sec: options.bytes_per_sec(),
        queue_bytes: QUEUE_BYTES,
    });
    let founder = ["--replicas".to_owned(), options.replicas.to_string()];
    let ring = Ring::found(&wide, &options.atoll, temp, options.nodes, (&[], &founder));
    eprintln!("{} nodes are up", options.nodes);
    std::thread::sleep(REST);
    let mut found = Vec::new();
    for (consistency, argument, name) in MODELS {
        let (mut real, mut simulated) = (Vec::new(), Vec::new());
        for run in 0..options.runs {
            let volume = format!("{argument}{run}");
            let mount = temp.join(&volume);
            fs::create_dir(&mount).map_err(|error| error.to_string())?;
            let at = mount.to_str().expect("a path of the bench's own");
            ring.run(0, &["-q", "volume", "create", &volume, "--shared"]);
            ring.run(0, &["-q", "mount", "--consistency", argument, &volume, at]);
            let seconds = phases(&mount);
            ring.run(0, &["-q", "unmount", at]);
            let seconds = seconds?;
            eprintln!("{name}, run {run}: {}", told(&seconds));
            real.push(seconds);
            let prediction = Prediction {
                nodes: options.nodes,
                replicas: options.replicas,
                delay,
                bytes_per_sec: options.bytes_per_sec() as u64,
                consistency,
                seed: FIRST_SEED + run as u64,
            };
            let seconds = prediction.seconds().map_err(|error| error.to_string())?;
            eprintln!("{name}, simulated: {}", told(&seconds));
            simulated.push(seconds);
        }
        found.push((name, Found { real, simulated }));
    }
    drop(ring);
    report(options, &found)
}

fn middle(runs: &[Seconds], of: impl Fn(&Seconds) -> f64) -> f64 {
    median(runs.iter().map(of).collect())
}

/// How far apart they are: a ratio, or seconds where the network takes next to none.
fn apart(real: f64, simulated: f64) -> String {
    let ratio = real / simulated;
    match simulated > 0.5 {
        true if (ratio - 1.0).abs() > ALLOWED => format!("{ratio:.2} (beyond 10 %)"),
        true => format!("{ratio:.2}"),
        false => format!("{:+.2} s", real - simulated),
    }
}

/// A time that is compared, of those of one run.
type Quantity = Box<dyn Fn(&Seconds) -> f64>;

fn report(options: &Options, found: &[(&str, Found)]) -> Result<(), String> {
    let mut text = format!(
        "Measured {} by `make bench-wan-andrew` on {}.\n\n{} nodes, {} ms one way between any two, {} \
         copies of each block, lines of {} Mbit/s; medians of {} runs.\n\n| | phase | simulated, s | real, \
         s | real / simulated |\n|---|---|---|---|---|\n",
        today(),
        machine(),
        options.nodes,
        options.delay_ms,
        options.replicas,
        options.mbit,
        options.runs
    );
    let mut csv = String::from("model,run,phase,simulated_secs,real_secs\n");
    let line = |text: &mut String, line: String| {
        writeln!(text, "{line}").expect("a string takes everything");
    };
    for (name, found) in found {
        let mut quantities: Vec<(&str, Quantity)> = Vec::new();
        for (number, phase) in Prediction::PHASES.into_iter().enumerate() {
            quantities.push((phase, Box::new(move |seconds| seconds[number])));
        }
        quantities.push(("total", Box::new(|seconds| seconds.iter().sum())));
        for (phase, of) in quantities {
            let (real, simulated) = (middle(&found.real, &of), middle(&found.simulated, &of));
            let apart = apart(real, simulated);
            line(&mut text, format!("| {name} | {phase} | {simulated:.2} | {real:.2} | {apart} |"));
            let runs = found.real.iter().zip(&found.simulated).enumerate();
            for (run, (real, simulated)) in runs {
                let (simulated, real) = (of(simulated), of(real));
                line(&mut csv, format!("{name},{run},{phase},{simulated:.3},{real:.3}"));
            }
        }
    }
    print!("{text}");
    if let Some(out) = &options.out {
        let dir = out.join("pastis");
        let write = |name: &str, text: &str| {
            let path = dir.join(name);
            fs::write(&path, text).map_err(|error| format!("{}: {error}", path.display()))
        };
        fs::create_dir_all(&dir).map_err(|error| format!("{}: {error}", dir.display()))?;
        write("pastis-fig3.md", &text)?;
        write("pastis-fig3.csv", &csv)?;
    }
    Ok(())
}
