//! All experiments, and running them by name.
//!
//! Experiments that look at the same runs from different sides (CFS Figures 13 to 15)
//! form a group, which runs once however many of its members are asked for.

use crate::experiment::{Context, Experiment, Group, LabError, MAX_RUNS, Options, Progress};
use crate::outcome::Outcome;
use crate::{capacity, cfs, kosha, lookup_budget, malicious, mechanisms, pastis, tfs};

const GROUPS: [&Group; 19] = [
    &cfs::downloads::GROUP,
    &cfs::lookup_cost::GROUP,
    &cfs::balance::SHARES,
    &cfs::caching::GROUP,
    &cfs::balance::CONTROL,
    &cfs::failures::GROUP,
    &lookup_budget::GROUP,
    &malicious::GROUP,
    &capacity::GROUP,
    &mechanisms::GROUP,
    &tfs::allocations::GROUP,
    &tfs::copying::GROUP,
    &pastis::size::GROUP,
    &pastis::replication::GROUP,
    &pastis::clients::GROUP,
    &pastis::consistency::GROUP,
    &kosha::balance::GROUP,
    &kosha::redirection::GROUP,
    &kosha::availability::GROUP,
];

/// All experiments, in the order of the papers.
pub fn experiments() -> impl Iterator<Item = &'static Experiment> {
    GROUPS.iter().flat_map(|group| group.experiments)
}

/// Whether these experiments can be run with these options.
///
/// # Errors
/// If a name is unknown or an option does not fit.
pub fn check(names: &[&str], options: &Options) -> Result<(), LabError> {
    if options.runs.is_some_and(|runs| !(1..=MAX_RUNS).contains(&runs)) {
        return Err(LabError::Options(format!("from 1 to {MAX_RUNS} runs can be made")));
    }
    for name in names {
        let known = experiments().find(|experiment| experiment.name == *name);
        let known = known.ok_or_else(|| LabError::Unknown((*name).to_owned()))?;
        // A number of nodes that one of several experiments cannot take is not for it.
        check_nodes(known, options, names.len() > 1)?;
    }
    Ok(())
}

/// Runs the experiments of these names, in the order of the paper.
///
/// # Errors
/// As [`outcomes`]; what was found before is lost then.
pub fn run(
    names: &[&str],
    options: &Options,
    progress: &dyn Progress,
) -> Result<Vec<Outcome>, LabError> {
    outcomes(names, options, progress)?.collect()
}

/// The same one after another, each group being run when its first outcome is asked for: a
/// long run leaves what it has found if it is broken off.
///
/// # Errors
/// At once, as [`check`]; instead of an outcome, if a ring does not do what a ring must.
pub fn outcomes<'a>(
    names: &'a [&'a str],
    options: &'a Options,
    progress: &'a dyn Progress,
) -> Result<impl Iterator<Item = Result<Outcome, LabError>> + 'a, LabError> {
    check(names, options)?;
    let run = move |group: &Group| match run_group(group, names, options, progress) {
        Ok(outcomes) => outcomes.into_iter().map(Ok).collect(),
        Err(error) => vec![Err(error)],
    };
    Ok(GROUPS.into_iter().flat_map(run))
}

/// Runs a group if any of its experiments is asked for.
fn run_group(
    group: &Group,
    names: &[&str],
    options: &Options,
    progress: &dyn Progress,
) -> Result<Vec<Outcome>, LabError> {
    let wanted: Vec<&str> =
        group.experiments.iter().map(|e| e.name).filter(|name| names.contains(name)).collect();
    if wanted.is_empty() {
        return Ok(Vec::new());
    }
    let mut outcomes = (group.run)(&Context { options, progress, names: &wanted })?;
    outcomes.retain(|outcome| wanted.contains(&outcome.name));
    Ok(outcomes)
}

fn check_nodes(
    experiment: &Experiment,
    options: &Options,
    one_of_many: bool,
) -> Result<(), LabError> {
    let name = experiment.name;
    match (options.nodes, &experiment.nodes) {
        (Some(nodes), Some(range)) if !range.contains(&nodes) => {
            let (least, most) = (range.start(), range.end());
            Err(LabError::Options(format!("{name} runs with {least} to {most} nodes, not {nodes}")))
        }
        (Some(_), None) if !one_of_many => {
            Err(LabError::Options(format!("the number of nodes of {name} is the paper's")))
        }
        _ => Ok(()),
    }
}
