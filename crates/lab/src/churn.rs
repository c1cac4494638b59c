//! When hosts come and go: from a model or from a trace.
//!
//! The model is an alternating renewal process of each host, with durations whose
//! distributions were fitted to real traces (Javadi, Kondo, Iosup, Epema, "The Failure
//! Trace Archive: Enabling the comparison of failure measurements and models of
//! distributed systems", JPDC 2013). The default is the churn of a file-sharing network,
//! Overnet in 2003 (`Overnet03`), the fastest of the nine: log-normal, a session of two
//! hours on average. It has no day and no week in it, and all hosts are alike.
//!
//! A trace is used as it is: each host follows a host of the trace from a random moment
//! on, the same for all of them; where more hosts are wanted than the trace has, its hosts
//! are used again from another moment.

use atoll_env::{Env, random_below};

use crate::LabError;
use crate::inputs::Availability;

/// A log-normal distribution: of hours, where hosts come and go.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct LogNormal {
    pub mu: f64,
    pub sigma: f64,
}

/// How long hosts are up and down in turn.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Churn {
    pub up: LogNormal,
    pub down: LogNormal,
}

/// `Overnet03`, a file-sharing network.
const OVERNET: Churn =
    Churn { up: LogNormal { mu: 0.19, sigma: 0.98 }, down: LogNormal { mu: 0.08, sigma: 1.8 } };
/// `Microsoft99`, the desktop computers of a company.
pub(crate) const CORPORATE: Churn =
    Churn { up: LogNormal { mu: 2.62, sigma: 1.84 }, down: LogNormal { mu: 1.42, sigma: 1.54 } };
/// `Skype06`, the super-peers of Skype.
pub(crate) const INTERNET: Churn =
    Churn { up: LogNormal { mu: 1.6, sigma: 1.57 }, down: LogNormal { mu: 1.4, sigma: 1.73 } };

/// Before the beginning, each host has gone on and off for so many cycles on average:
/// sessions under way are then as old as they are in the long run.
const CYCLES_BEFORE: f64 = 10.0;
const HOUR_SECS: f64 = 3600.0;
/// More hosts than this are not simulated.
const MAX_HOSTS: usize = 1_000_000;

impl LogNormal {
    fn mean_hours(self) -> f64 {
        (self.mu + self.sigma.powi(2) / 2.0).exp()
    }

    /// A value at random.
    pub(crate) fn draw(self, random: &Env) -> f64 {
        (self.mu + self.sigma * normal(random)).exp()
    }

    fn draw_secs(self, random: &Env) -> f64 {
        self.draw(random) * HOUR_SECS
    }
}

/// Uniform in `0.0..1.0`.
fn unit(random: &Env) -> f64 {
    (random.random_u64() >> 11) as f64 / (1u64 << 53) as f64
}

/// Normal with mean 0 and deviation 1 (Box and Muller).
fn normal(random: &Env) -> f64 {
    let (a, b) = (1.0 - unit(random), unit(random));
    (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()
}

/// A host comes or goes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Change {
    pub at_secs: f64,
    pub host: usize,
    pub is_up: bool,
}

/// What happens to the hosts that are ever up; they are numbered from zero.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Schedule {
    pub hosts: usize,
    /// The hosts that are up at the beginning, and for how many seconds already.
    pub first: Vec<(usize, f64)>,
    /// In order of time.
    pub changes: Vec<Change>,
}

/// A schedule of `length_secs` with about `mean_up` hosts up at a time.
pub(crate) fn schedule(
    trace: Option<&Availability>,
    mean_up: usize,
    length_secs: f64,
    random: &Env,
) -> Result<Schedule, LabError> {
    let sessions = match trace {
        None => modelled(mean_up, length_secs, random),
        Some(trace) => traced(trace, mean_up, length_secs, random)?,
    };
    let mut schedule = Schedule { hosts: 0, first: Vec::new(), changes: Vec::new() };
    for sessions in sessions.into_iter().filter(|sessions| !sessions.is_empty()) {
        let host = schedule.hosts;
        schedule.hosts += 1;
        for (start, end) in sessions {
            if start <= 0.0 {
                schedule.first.push((host, -start));
            } else {
                schedule.changes.push(Change { at_secs: start, host, is_up: true });
            }
            if end < length_secs {
                schedule.changes.push(Change { at_secs: end, host, is_up: false });
            }
        }
    }
    schedule.changes.sort_by(|a, b| a.at_secs.total_cmp(&b.at_secs).then(a.host.cmp(&b.host)));
    Ok(schedule)
}

/// When one host was up, seconds.
pub(crate) type Sessions = Vec<(f64, f64)>;

/// Overnet's sessions with so many hosts up at a time.
fn modelled(mean_up: usize, length_secs: f64, random: &Env) -> Vec<Sessions> {
    let (up, down) = (OVERNET.up.mean_hours(), OVERNET.down.mean_hours());
    let hosts = (mean_up as f64 * (up + down) / up).round() as usize;
    sessions(OVERNET, hosts, length_secs, random)
}

/// Sessions of each host that overlap `0..length_secs`.
pub(crate) fn sessions(
    churn: Churn,
    hosts: usize,
    length_secs: f64,
    random: &Env,
) -> Vec<Sessions> {
    let cycle_hours = churn.up.mean_hours() + churn.down.mean_hours();
    let before = CYCLES_BEFORE * cycle_hours * HOUR_SECS;
    let host = |_| {
        // Hosts must not begin in step.
        let mut at = -before * (1.0 + unit(random));
        let mut sessions = Vec::new();
        while at < length_secs {
            let end = at + churn.up.draw_secs(random);
            if end > 0.0 {
                sessions.push((at, end));
            }
            at = end + churn.down.draw_secs(random);
        }
        sessions
    };
    (0..hosts).map(host).collect()
}

fn traced(
    trace: &Availability,
    mean_up: usize,
    length_secs: f64,
    random: &Env,
) -> Result<Vec<Sessions>, LabError> {
    let spare = trace.length_secs() - length_secs;
    if spare < 0.0 {
        return Err(LabError::Options(format!(
            "the availability file covers {:.0} s; {length_secs:.0} s are needed",
            trace.length_secs()
        )));
    }
    let all = trace.host_count();
    let mut sessions: Vec<Sessions> = Vec::new();
    let mut up_secs = 0.0;
    // Lap after lap through the trace's hosts, each from another moment.
    while up_secs < mean_up as f64 * length_secs {
        let from = spare * unit(random);
        let first = random_below(&**random, all as u64) as usize;
        let before = up_secs;
        for n in 0..all {
            let cut: Sessions = trace
                .intervals((first + n) % all)
                .iter()
                .map(|(start, end)| (start - from, end - from))
                .filter(|(start, end)| *end > 0.0 && *start < length_secs)
                .collect();
            let overlap = |(start, end): &(f64, f64)| end.min(length_secs) - start.max(0.0);
            up_secs += cut.iter().map(overlap).sum::<f64>();
            sessions.push(cut);
            if up_secs >= mean_up as f64 * length_secs {
                break;
            }
        }
        if up_secs == before || sessions.len() > MAX_HOSTS {
            return Err(LabError::Options("hardly a host of the availability file is up".into()));
        }
    }
    Ok(sessions)
}

#[cfg(test)]
mod tests {
    use super::*;
    use atoll_sim::{Sim, SimConfig};

    fn random(seed: u64) -> Env {
        Sim::new(SimConfig { seed, ..SimConfig::default() }).outside()
    }

    fn up_over_time(schedule: &Schedule, length_secs: f64) -> Vec<usize> {
        let mut up = schedule.first.len();
        let mut samples = Vec::new();
        let mut changes = schedule.changes.iter().peekable();
        for sample in 0..10 {
            let at = length_secs * f64::from(sample) / 10.0;
            while let Some(change) = changes.next_if(|change| change.at_secs <= at) {
                up = if change.is_up { up + 1 } else { up - 1 };
            }
            samples.push(up);
        }
        samples
    }

    #[test]
    fn as_many_hosts_are_up_as_were_asked_for_from_the_beginning_on() {
        let schedule = schedule(None, 1000, 7200.0, &random(1)).expect("the model");
        for up in up_over_time(&schedule, 7200.0) {
            assert!((900..1100).contains(&up), "{up}");
        }
        // A session lasts two hours: in two hours as many leave as there are.
        let left = schedule.changes.iter().filter(|change| !change.is_up).count();
        assert!((800..1300).contains(&left), "{left}");
    }

    #[test]
    fn a_host_comes_and_goes_in_turn() {
        let schedule = schedule(None, 50, 36_000.0, &random(2)).expect("the model");
        let mut up = vec![false; schedule.hosts];
        schedule.first.iter().for_each(|(host, _)| up[*host] = true);
        for change in &schedule.changes {
            assert_ne!(up[change.host], change.is_up);
            up[change.host] = change.is_up;
        }
    }

    #[test]
    fn a_trace_is_followed_and_used_again_where_it_is_too_small() {
        let text = "host,start_s,end_s\n1,0,500\n2,0,1000\n2,1100,2000\n";
        let trace = Availability::parse(text).expect("valid");
        let schedule = schedule(Some(&trace), 20, 200.0, &random(3)).expect("long enough");
        let up = up_over_time(&schedule, 200.0);
        assert!(up.iter().all(|up| (10..=40).contains(up)), "{up:?}");
        let error = super::schedule(Some(&trace), 20, 9000.0, &random(3)).expect_err("too short");
        assert!(error.to_string().contains("2000 s"), "{error}");
    }

    #[test]
    fn a_trace_in_which_nobody_is_up_is_refused() {
        let trace = Availability::parse("host,start_s,end_s\n1,0,0\n1,900,900\n").expect("valid");
        assert!(schedule(Some(&trace), 5, 10.0, &random(4)).is_err());
    }
}
