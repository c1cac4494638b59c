//! How long hosts stay and how many copies that takes, under lazy replication (TFS §4).
//!
//! A system that waits for a threshold `t` before it copies what a vanished host held sees
//! longer sessions: "we first combine intervals that were separated by less than t. We then
//! use the average length of the remaining intervals and add the value t to it" (§5.1). During
//! such a session the host is up for a share `u` of the time only, and a file must be on
//! `r = ln(1 - a) / ln(1 - u)` hosts (equation 3).
//!
//! A host's last interval ends a session even where only the trace ends: sessions are never
//! longer than the trace.

use crate::churn::Sessions;
use crate::inputs::Availability;

/// When the hosts of a network were up, added up so that any threshold is quickly asked for.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Presence {
    intervals: usize,
    up_secs: f64,
    /// Pauses between intervals of a host, ascending.
    pauses: Vec<f64>,
    /// The first so many pauses together, seconds; one more entry than pauses.
    sums: Vec<f64>,
    pub length_secs: f64,
}

/// A network as a system sees it that waits before it repairs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Lazy {
    /// From coming to being replaced, on average: `T(t)`, seconds.
    pub session_secs: f64,
    /// The share of it that a host is up: `u(t)`.
    pub online: f64,
}

impl Lazy {
    /// The copies that a file needs, so that one is up with probability `availability`
    /// (equation 3): any number from one on, or whole copies.
    pub(crate) fn copies(self, availability: f64, whole: bool) -> f64 {
        if self.online >= 1.0 {
            return 1.0;
        }
        let copies = ((1.0 - availability).ln() / (1.0 - self.online).ln()).max(1.0);
        if whole { (copies - 1e-9).ceil() } else { copies }
    }
}

impl Presence {
    /// Of hosts with these sessions; parts of them outside of `0..length_secs` do not count.
    pub(crate) fn new<'a>(
        hosts: impl IntoIterator<Item = &'a Sessions>,
        length_secs: f64,
    ) -> Presence {
        let (mut intervals, mut up_secs, mut pauses) = (0, 0.0, Vec::new());
        for sessions in hosts {
            let mut before: Option<f64> = None;
            for (start, end) in sessions {
                let (start, end) = (start.max(0.0), end.min(length_secs));
                if end <= start {
                    continue;
                }
                intervals += 1;
                up_secs += end - start;
                pauses.extend(before.map(|before| start - before));
                before = Some(end);
            }
        }
        pauses.sort_by(f64::total_cmp);
        let mut sums = vec![0.0];
        sums.extend(pauses.iter().scan(0.0, |sum, pause| {
            *sum += pause;
            Some(*sum)
        }));
        Presence { intervals, up_secs, pauses, sums, length_secs }
    }

    /// Of a recorded trace.
    pub(crate) fn recorded(trace: &Availability) -> Presence {
        let hosts: Vec<Sessions> =
            (0..trace.host_count()).map(|host| trace.intervals(host).to_vec()).collect();
        Presence::new(&hosts, trace.length_secs())
    }

    /// Whether anybody was ever up.
    pub(crate) fn is_empty(&self) -> bool {
        self.intervals == 0
    }

    /// What a system sees that waits for `threshold_secs`.
    pub(crate) fn lazily(&self, threshold_secs: f64) -> Lazy {
        let bridged = self.pauses.partition_point(|pause| *pause < threshold_secs);
        let sessions = (self.intervals - bridged) as f64;
        let counted = self.up_secs + self.sums[bridged] + sessions * threshold_secs;
        Lazy { session_secs: counted / sessions, online: self.up_secs / counted }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_closer_than_the_threshold_are_one_session() {
        let hosts = [vec![(0.0, 100.0), (110.0, 200.0), (300.0, 400.0)], vec![(-50.0, 10.0)]];
        let presence = Presence::new(&hosts, 400.0);
        let eager = presence.lazily(0.0);
        assert_eq!(eager, Lazy { session_secs: 75.0, online: 1.0 });
        // The pause of 10 s is bridged, that of 100 s is not: 200, 100 and 10 s, each 20 s longer.
        let lazy = presence.lazily(20.0);
        assert_eq!(lazy.session_secs, (200.0 + 100.0 + 10.0) / 3.0 + 20.0);
        assert_eq!(lazy.online, 300.0 / 370.0);
    }

    #[test]
    fn copies_follow_equation_3() {
        let half = Lazy { session_secs: 1.0, online: 0.5 };
        // 0.5^r = 0.00001.
        assert!((half.copies(0.99999, false) - 16.61).abs() < 0.01);
        assert_eq!(half.copies(0.99999, true), 17.0);
        let sure = Lazy { session_secs: 1.0, online: 1.0 };
        assert_eq!(sure.copies(0.99999, true), 1.0);
        let good = Lazy { session_secs: 1.0, online: 0.999_999 };
        assert_eq!(good.copies(0.99999, false), 1.0, "no fraction of a copy");
    }

    #[test]
    fn a_recorded_trace_counts_as_it_is() {
        let text = "host,start_s,end_s\n0,100,160\n0,200,260\n7,130,300\n";
        let presence = Presence::recorded(&Availability::parse(text).expect("valid"));
        assert_eq!(presence.lazily(0.0).session_secs, 290.0 / 3.0);
    }
}
