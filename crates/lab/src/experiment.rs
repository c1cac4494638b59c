//! What an experiment is, and what it is run with; [`crate::registry`] lists all of them.
//!
//! A run is a simulation with a seed of its own in one thread; runs are spread over the
//! processors, and their results are put together in their own order, so that the number of
//! processors changes nothing.

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use atoll_sim::RttMatrix;

use crate::inputs::Availability;
use crate::outcome::Outcome;

/// Something that can be run by its name.
#[derive(Clone, Debug)]
pub struct Experiment {
    /// What is typed.
    pub name: &'static str,
    /// What it measures.
    pub title: &'static str,
    /// Where the paper says so.
    pub source: &'static str,
    /// How many nodes it can be asked for; `None` where the number is fixed.
    pub nodes: Option<RangeInclusive<usize>>,
}

/// How to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Nodes, where an experiment lets one choose; its own number if `None`.
    pub nodes: Option<usize>,
    /// The first run has this seed, the next one more, and so on.
    pub seed: u64,
    /// Runs with seeds of their own; the experiment's number if `None`.
    pub runs: Option<usize>,
    /// Fewer nodes, blocks and runs: seconds instead of minutes.
    pub quick: bool,
    /// Round trips between hosts, instead of a model.
    pub latency: Option<Arc<RttMatrix>>,
    /// When hosts are up, instead of a model.
    pub availability: Option<Arc<Availability>>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            nodes: None,
            seed: 2001,
            runs: None,
            quick: false,
            latency: None,
            availability: None,
        }
    }
}

/// The most runs of one experiment.
pub(crate) const MAX_RUNS: usize = 1000;

/// Why an experiment was not run to its end.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LabError {
    /// There is none of that name.
    #[error("there is no experiment {0:?}")]
    Unknown(String),
    /// An option does not fit.
    #[error("{0}")]
    Options(String),
    /// The simulated ring did not do what a ring must.
    #[error("{0}")]
    Failed(String),
}

/// Learns how far a run is.
pub trait Progress: Sync {
    /// A group of experiments begins; it has this many parts.
    fn begins(&self, names: &[&str], parts: usize);
    /// One of the parts is done.
    fn part_done(&self);
}

/// Shows no progress.
#[derive(Clone, Copy, Debug)]
pub struct Silent;

impl Progress for Silent {
    fn begins(&self, _: &[&str], _: usize) {}
    fn part_done(&self) {}
}

/// Experiments that share their runs.
pub(crate) struct Group {
    pub experiments: &'static [Experiment],
    /// Runs them all; the outcomes are in the same order.
    pub run: fn(&Context<'_>) -> Result<Vec<Outcome>, LabError>,
}

/// What a group is run with.
pub(crate) struct Context<'a> {
    pub options: &'a Options,
    pub progress: &'a dyn Progress,
    /// The experiments of the group that are asked for.
    pub names: &'a [&'a str],
}

impl Context<'_> {
    /// The number of nodes asked for, or the paper's, or a smaller one when it is to be quick.
    pub(crate) fn nodes(&self, full: usize, quick: usize) -> usize {
        self.options.nodes.unwrap_or(if self.options.quick { quick } else { full })
    }

    /// Whether the experiment of this name is asked for.
    pub(crate) fn wants(&self, name: &str) -> bool {
        self.names.contains(&name)
    }

    /// The seeds of the runs.
    pub(crate) fn seeds(&self, full: usize, quick: usize) -> Vec<u64> {
        let runs = self.options.runs.unwrap_or(if self.options.quick { quick } else { full });
        (0..runs as u64).map(|n| self.options.seed.wrapping_add(n)).collect()
    }

    /// `full`, or `quick` when it is to be quick.
    pub(crate) fn size(&self, full: usize, quick: usize) -> usize {
        if self.options.quick { quick } else { full }
    }

    /// Does independent parts on all processors; results in the order of the parts.
    pub(crate) fn each<J: Sync, R: Send>(
        &self,
        parts: &[J],
        work: impl Fn(&J) -> Result<R, LabError> + Sync,
    ) -> Result<Vec<R>, LabError> {
        self.progress.begins(self.names, parts.len());
        let next = AtomicUsize::new(0);
        let results: Mutex<Vec<Option<Result<R, LabError>>>> =
            Mutex::new(parts.iter().map(|_| None).collect());
        let workers = std::thread::available_parallelism().map_or(1, |n| n.get());
        std::thread::scope(|scope| {
            for _ in 0..workers.min(parts.len()) {
                scope.spawn(|| {
                    while let Some((at, part)) = take(&next, parts) {
                        let result = work(part);
                        self.progress.part_done();
                        results.lock().expect("results are only put down")[at] = Some(result);
                    }
                });
            }
        });
        let results = results.into_inner().expect("results are only put down");
        results.into_iter().map(|result| result.expect("every part was done")).collect()
    }
}

/// Every case at every point, once for each seed.
pub(crate) fn crossed<C: Copy, P: Copy>(
    cases: &[C],
    points: &[P],
    seeds: &[u64],
) -> Vec<(C, P, u64)> {
    let mut parts = Vec::with_capacity(cases.len() * points.len() * seeds.len());
    for case in cases {
        for point in points {
            parts.extend(seeds.iter().map(|seed| (*case, *point, *seed)));
        }
    }
    parts
}

/// `1 run` or `5 runs`, for the line below a chart's title.
pub(crate) fn runs(seeds: &[u64]) -> String {
    format!("{} run{}", seeds.len(), if seeds.len() == 1 { "" } else { "s" })
}

/// The next part that no thread has begun.
fn take<'a, J>(next: &AtomicUsize, parts: &'a [J]) -> Option<(usize, &'a J)> {
    let at = next.fetch_add(1, Ordering::Relaxed);
    parts.get(at).map(|part| (at, part))
}
