//! When the machines of a large corporation are up, for 840 hours.
//!
//! The paper's trace (W. Bolosky, J. Douceur, D. Ely, M. Theimer, SIGMETRICS 2000: 51,663 machines, looked at once an hour) is not here.
//! The default is synthetic: sessions and pauses as they were fitted to that trace ([`crate::churn::CORPORATE`]), and the
//! event that the paper names: 4,890 machines fail in hour 615. The fit has no day and no week, and all machines are alike in it;
//! real ones are not, and go off together in the evening.
//!
//! Failed are machines that were up when they were looked at and down an hour later. How the 4,890 fail within their hour is not known
//! ([`Burst`]). How long they stay away is not known either, and drawn as any pause that outlasts the hour.

use std::collections::BTreeSet;

use atoll_env::{Env, random_below};

use crate::LabError;
use crate::churn::{CORPORATE, Sessions, sessions};
use crate::inputs::Availability;

pub(super) const HOUR_SECS: f64 = 3600.0;
pub(super) const HOURS: usize = 840;
/// The paper's machines.
pub(super) const MACHINES: usize = 51_663;
/// When the most machines failed, and how many.
pub(super) const BURST_HOUR: usize = 615;
const BURST_MACHINES: usize = 4890;

/// How machines fail in the hour in which the most do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Burst {
    /// Any time of the hour is as likely.
    Spread,
    /// At one moment, as when the power of a building fails.
    AtOnce,
}

impl Burst {
    pub(super) const ALL: [Burst; 2] = [Burst::Spread, Burst::AtOnce];
}

/// When each machine is up.
pub(super) struct Machines {
    sessions: Vec<Sessions>,
    /// Those that were up when hour 615 began and down when it ended.
    pub failed_in_burst: usize,
    /// Those up when it began.
    pub up_before_burst: usize,
}

const UP_WORDS: usize = HOURS / 64 + 1;

/// The hours at which a machine is up, as bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct UpHours([u64; UP_WORDS]);

impl UpHours {
    pub(super) fn at(&self, hour: usize) -> bool {
        self.0[hour / 64] & (1 << (hour % 64)) != 0
    }
}

impl Machines {
    /// So many machines of the model.
    pub(super) fn modelled(count: usize, burst: Burst, random: &Env) -> Machines {
        let sessions = sessions(CORPORATE, count, HOURS as f64 * HOUR_SECS, random);
        let mut machines = Machines { sessions, failed_in_burst: 0, up_before_burst: 0 };
        machines.count_burst();
        let failing = (BURST_MACHINES * count).div_ceil(MACHINES);
        let missing = failing.saturating_sub(machines.failed_in_burst);
        let [from, to] = burst_hour();
        let is_up = |machine: &usize| {
            let mut sessions = machines.sessions[*machine].iter();
            sessions.any(|(start, end)| *start <= from && *end > to)
        };
        let mut candidates: Vec<usize> = (0..count).filter(is_up).collect();
        for _ in 0..missing.min(candidates.len()) {
            let machine = candidates.swap_remove(below(random, candidates.len()));
            let at = match burst {
                Burst::Spread => {
                    from + (to - from) * below(random, 1 << 30) as f64 / (1u64 << 30) as f64
                }
                Burst::AtOnce => (from + to) / 2.0,
            };
            machines.fail(machine, at, random);
        }
        machines.count_burst();
        machines
    }

    /// The machines of a trace; those that are never up are none.
    ///
    /// # Errors
    /// If it is shorter than 840 hours, or has hardly any machine.
    pub(super) fn traced(trace: &Availability) -> Result<Machines, LabError> {
        let needed = HOURS as f64 * HOUR_SECS;
        if trace.length_secs() < needed {
            return Err(LabError::Options(format!(
                "the availability file covers {:.0} s; {needed:.0} s are needed",
                trace.length_secs()
            )));
        }
        let all = (0..trace.host_count()).map(|host| trace.intervals(host).to_vec());
        let is_ever_up = |sessions: &Sessions| sessions.iter().any(|(start, _)| *start < needed);
        let sessions: Vec<Sessions> = all.filter(is_ever_up).collect();
        let mut machines = Machines { sessions, failed_in_burst: 0, up_before_burst: 0 };
        let least = (0..=HOURS).map(|hour| machines.up_count(hour)).min().unwrap_or(0);
        if least < LEAST_UP {
            return Err(LabError::Options(format!(
                "the availability file has {least} hosts up at a time; {LEAST_UP} are needed"
            )));
        }
        machines.count_burst();
        Ok(machines)
    }

    pub(super) fn count(&self) -> usize {
        self.sessions.len()
    }

    /// Whether a machine is up.
    pub(super) fn is_up(&self, machine: usize, at_secs: f64) -> bool {
        let sessions = &self.sessions[machine];
        let begun = sessions.partition_point(|(start, _)| *start <= at_secs);
        begun > 0 && at_secs < sessions[begun - 1].1
    }

    /// Whether each machine is up when it is looked at once an hour, from the beginning to hour 840.
    pub(super) fn hourly(&self) -> Vec<UpHours> {
        let hours_up = |sessions: &Sessions| {
            let mut up = UpHours([0; UP_WORDS]);
            for (start, end) in sessions {
                let first = (start.max(0.0) / HOUR_SECS).ceil() as usize;
                let end = (end.max(0.0) / HOUR_SECS).ceil() as usize;
                (first..end.min(HOURS + 1)).for_each(|hour| up.0[hour / 64] |= 1 << (hour % 64));
            }
            up
        };
        self.sessions.iter().map(hours_up).collect()
    }

    /// When a machine comes or goes next; none if it does not.
    pub(super) fn next_change(&self, machine: usize, at_secs: f64) -> Option<f64> {
        let sessions = &self.sessions[machine];
        let begun = sessions.partition_point(|(start, _)| *start <= at_secs);
        let end = begun.checked_sub(1).map(|last| sessions[last].1).filter(|end| *end > at_secs);
        end.or_else(|| sessions.get(begun).map(|(start, _)| *start))
    }

    /// A machine that is up, not one of these.
    pub(super) fn any_up(
        &self,
        at_secs: f64,
        but: &BTreeSet<usize>,
        random: &Env,
    ) -> Option<usize> {
        let drawn = std::iter::repeat_with(|| below(random, self.count())).take(MOST_DRAWS);
        drawn.into_iter().find(|machine| !but.contains(machine) && self.is_up(*machine, at_secs))
    }

    fn up_count(&self, hour: usize) -> usize {
        (0..self.count()).filter(|machine| self.is_up(*machine, hour as f64 * HOUR_SECS)).count()
    }

    /// Ends a machine's session; it comes back after a pause, and goes on and off as before.
    fn fail(&mut self, machine: usize, at: f64, random: &Env) {
        let sessions = &mut self.sessions[machine];
        sessions.retain(|(start, _)| *start < at);
        if let Some((_, end)) = sessions.last_mut() {
            *end = end.min(at);
        }
        let [_, seen] = burst_hour();
        let mut now = at;
        while now < HOURS as f64 * HOUR_SECS {
            let mut pauses = std::iter::repeat_with(|| CORPORATE.down.draw(random) * HOUR_SECS);
            let start = now + pauses.find(|pause| now + pause > seen).expect("it never ends");
            now = start + CORPORATE.up.draw(random) * HOUR_SECS;
            sessions.push((start, now));
        }
    }

    fn count_burst(&mut self) {
        let [from, to] = burst_hour();
        let was_up = |machine: &usize| self.is_up(*machine, from);
        let fails =
            |machine: &usize| self.next_change(*machine, from).is_some_and(|change| change <= to);
        let up: Vec<usize> = (0..self.count()).filter(was_up).collect();
        let failed = up.iter().filter(|machine| fails(machine)).count();
        (self.up_before_burst, self.failed_in_burst) = (up.len(), failed);
    }
}

/// Fewer machines do not make groups with others in reserve.
const LEAST_UP: usize = 100;
/// Of so many machines at random one is up, if a tenth are.
const MOST_DRAWS: usize = 1000;

fn burst_hour() -> [f64; 2] {
    [(BURST_HOUR - 1) as f64 * HOUR_SECS, BURST_HOUR as f64 * HOUR_SECS]
}

fn below(random: &Env, bound: usize) -> usize {
    random_below(&**random, bound as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kosha::random;

    #[test]
    fn as_many_fail_in_the_burst_as_the_paper_says() {
        for burst in Burst::ALL {
            let machines = Machines::modelled(5166, burst, &random(1));
            assert_eq!(machines.failed_in_burst, 489, "{burst:?}");
            let up = machines.up_before_burst as f64 / 5166.0;
            assert!((0.78..0.90).contains(&up), "{up} are up");
            let after = machines.up_count(BURST_HOUR);
            assert!(
                after < machines.up_before_burst - 350,
                "{after} of {}",
                machines.up_before_burst
            );
        }
    }

    #[test]
    fn a_machine_comes_and_goes_in_turn() {
        let machines = Machines::modelled(300, Burst::AtOnce, &random(2));
        for machine in 0..machines.count() {
            let mut now = 0.0;
            let mut is_up = machines.is_up(machine, now);
            while let Some(change) = machines.next_change(machine, now) {
                assert!(change > now);
                assert_ne!(machines.is_up(machine, change), is_up);
                (now, is_up) = (change, !is_up);
            }
            // One that is down at the end does not come back within it.
            assert!(!is_up || now >= HOURS as f64 * HOUR_SECS, "{machine} ends at {now}");
        }
    }

    #[test]
    fn hours_are_those_at_which_a_machine_is_up() {
        let machines = Machines::modelled(50, Burst::Spread, &random(3));
        for (machine, up) in machines.hourly().iter().enumerate() {
            for hour in 0..=HOURS {
                assert_eq!(up.at(hour), machines.is_up(machine, hour as f64 * HOUR_SECS));
            }
        }
    }

    #[test]
    fn a_trace_that_is_too_short_or_small_is_refused() {
        let hosts = |count: usize, secs: u64| {
            let lines = (0..count).map(|host| format!("{host},0,{secs}\n"));
            let text = format!("host,start_s,end_s\n{}", lines.collect::<String>());
            Availability::parse(&text).expect("valid")
        };
        let long = 841 * 3600;
        assert_eq!(Machines::traced(&hosts(120, long)).expect("it fits").count(), 120);
        for (trace, words) in [(hosts(120, 3600), "3600 s"), (hosts(9, long), "9 hosts")] {
            let error = Machines::traced(&trace).err().expect("refused").to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
