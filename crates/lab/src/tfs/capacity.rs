//! TFS §5.1, Figures 6 and 7: how much a network of identical hosts stores.
//!
//! "We assume a network of identical hosts, each with 100GB disks that are 50% full." A host
//! gives a share of its disk: "For fixed contribution, each host contributes 5% of the disk
//! (5 GB), the dynamic system contributes 35% of the disk, and TFS contributes about 47%",
//! and loses files at a rate `F` in TFS, not in the others. With a bandwidth `B` for
//! replication it stores `C = min(T(t)·(B - F), c) / r(t)` (equation 7, and the disk); for each
//! bandwidth the threshold `t` is the one that stores most.
//!
//! Figure 6 is a corporate network, Figure 7 the Internet. The paper's traces are not ours to
//! give; hosts follow the distributions that were fitted to traces of the same two networks
//! ([`crate::churn`]), or the file of `--availability` in both figures.
//!
//! In the paper's settings shares and loss are the paper's, and copies any number from one on.
//! As shipped TFS's share and loss are those measured in `tfs-fig5`, and copies are whole.

use crate::LabError;
use crate::chart::{Axis, Chart, Ink, Mark, Point, Series};
use crate::churn::{CORPORATE, Churn, INTERNET, sessions};
use crate::experiment::Context;
use crate::outcome::{Comparison, Csv, Outcome};
use crate::setting::Setting;
use crate::tfs::availability::Presence;
use atoll_sim::{Sim, SimConfig};

const DISK_BYTES: f64 = 100e9;
/// "five nines".
const AVAILABILITY: f64 = 0.999_99;
const FIXED_SHARE: f64 = 0.05;
const DYNAMIC_SHARE: f64 = 0.35;
const PAPER_TFS: Given = Given { share: 0.47, loss_bytes_per_sec: 80.0 };
const DAY_SECS: f64 = 86_400.0;
/// Thresholds tried: from a minute to the length of the trace, evenly by logarithm.
const THRESHOLDS: usize = 400;
const LEAST_THRESHOLD_SECS: f64 = 60.0;
/// Bandwidths of the curves, bytes a second: ten a decade. Beyond the last nothing changes.
const LEAST_BANDWIDTH: f64 = 100.0;
const DECADES: i32 = 4;
/// Far from filling any disk, bytes a second.
const SCARCE: f64 = 1000.0;
/// "where it contributes 40% more storage than a dynamic watermarking system".
const PAPER_MORE: f64 = 1.4;
/// What differs by less is called equal.
const EQUAL: f64 = 0.99;
/// A tenth more.
const MORE: f64 = 1.1;
const POINTS_PER_DECADE: i32 = 10;

/// What a host gives with TFS.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Given {
    /// Of the whole disk.
    pub share: f64,
    /// Transparent data that ordinary data overwrites, bytes a second.
    pub loss_bytes_per_sec: f64,
}

/// How hosts give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Method {
    Fixed,
    Dynamic,
    Tfs,
}

impl Method {
    const ALL: [Method; 3] = [Method::Fixed, Method::Dynamic, Method::Tfs];

    fn name(self) -> &'static str {
        match self {
            Method::Fixed => "fixed, 5 %",
            Method::Dynamic => "dynamic, 35 %",
            Method::Tfs => "TFS",
        }
    }

    fn given(self, tfs: Given) -> Given {
        match self {
            Method::Fixed => Given { share: FIXED_SHARE, loss_bytes_per_sec: 0.0 },
            Method::Dynamic => Given { share: DYNAMIC_SHARE, loss_bytes_per_sec: 0.0 },
            Method::Tfs => tfs,
        }
    }
}

/// One of the two networks.
#[derive(Clone, Copy, Debug)]
struct Network {
    name: &'static str,
    title: &'static str,
    source: &'static str,
    chart: &'static str,
    churn: Churn,
    /// Of the paper's trace.
    days: f64,
}

const NETWORKS: [Network; 2] = [
    Network {
        name: "tfs-fig6",
        title: "storage against bandwidth, corporate network (GB a host)",
        source: "TFS §5.1, Figure 6",
        chart: "Storage of a corporate network (TFS Figure 6)",
        churn: CORPORATE,
        days: 35.0,
    },
    Network {
        name: "tfs-fig7",
        title: "storage against bandwidth, Internet (GB a host)",
        source: "TFS §5.1, Figure 7",
        chart: "Storage of an Internet network (TFS Figure 7)",
        churn: INTERNET,
        days: 28.0,
    },
];

/// What a column stores with each method, at each bandwidth.
struct Curves {
    setting: Setting,
    tfs: Given,
    /// By method, as in [`Method::ALL`]: what is stored and with which threshold.
    best: [Vec<Best>; 3],
}

/// The best that can be done with a bandwidth.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Best {
    bandwidth: f64,
    /// Bytes a host, each file counted once.
    stored: f64,
    threshold_secs: f64,
}

/// Both figures, with what `tfs-fig5` found for TFS as shipped.
pub(crate) fn outcomes(context: &Context<'_>, measured: Given) -> Result<Vec<Outcome>, LabError> {
    let hosts = context.size(5000, 500);
    let seed = context.options.seed;
    NETWORKS
        .iter()
        .map(|network| {
            let presence = match &context.options.availability {
                Some(trace) => Presence::recorded(trace),
                None => {
                    let random = Sim::new(SimConfig { seed, ..SimConfig::default() }).outside();
                    let length_secs = network.days * DAY_SECS;
                    let hosts = sessions(network.churn, hosts, length_secs, &random);
                    Presence::new(&hosts, length_secs)
                }
            };
            if presence.is_empty() {
                return Err(LabError::Options("no machine is up in the availability file".into()));
            }
            let curves = [(Setting::Paper, PAPER_TFS), (Setting::Default, measured)]
                .map(|(setting, tfs)| curves(&presence, setting, tfs));
            Ok(outcome(network, &presence, &curves, context))
        })
        .collect()
}

fn bandwidths() -> impl Iterator<Item = f64> {
    (0..=DECADES * POINTS_PER_DECADE)
        .map(|n| LEAST_BANDWIDTH * 10f64.powf(f64::from(n) / f64::from(POINTS_PER_DECADE)))
}

fn curves(presence: &Presence, setting: Setting, tfs: Given) -> Curves {
    let best = Method::ALL.map(|method| {
        bandwidths()
            .map(|bandwidth| best(presence, setting, method.given(tfs), bandwidth))
            .collect()
    });
    Curves { setting, tfs, best }
}

/// Equation 7 at the threshold that stores most.
fn best(presence: &Presence, setting: Setting, given: Given, bandwidth: f64) -> Best {
    let whole = setting == Setting::Default;
    let longest = presence.length_secs.max(2.0 * LEAST_THRESHOLD_SECS);
    let step = (longest / LEAST_THRESHOLD_SECS).ln() / THRESHOLDS as f64;
    let thresholds = (0..=THRESHOLDS).map(|n| LEAST_THRESHOLD_SECS * (step * n as f64).exp());
    thresholds
        .map(|threshold_secs| {
            let lazy = presence.lazily(threshold_secs);
            let for_copies = (bandwidth - given.loss_bytes_per_sec).max(0.0);
            let kept = (lazy.session_secs * for_copies).min(given.share * DISK_BYTES);
            let stored = kept / lazy.copies(AVAILABILITY, whole);
            Best { bandwidth, stored, threshold_secs }
        })
        // Of equals the first: the shortest wait.
        .fold(None, |best: Option<Best>, this| match best {
            Some(best) if best.stored >= this.stored => Some(best),
            _ => Some(this),
        })
        .expect("there are thresholds")
}

const GB: f64 = 1e9;

fn outcome(
    network: &Network,
    presence: &Presence,
    curves: &[Curves; 2],
    context: &Context<'_>,
) -> Outcome {
    let mut csv =
        Csv::new(&["setting", "method", "bandwidth_kb_per_sec", "stored_gb", "threshold_hours"]);
    for Curves { setting, best, .. } in curves {
        for (method, best) in Method::ALL.iter().zip(best) {
            for Best { bandwidth, stored, threshold_secs } in best {
                let bandwidth = format!("{:.4}", bandwidth / 1e3);
                let stored = format!("{:.4}", stored / GB);
                let hours = format!("{:.3}", threshold_secs / 3600.0);
                // A comma would end the field.
                let name = method.name().replace(", ", " ");
                csv.row(&[setting, &name, &bandwidth, &stored, &hours]);
            }
        }
    }
    let data = match &context.options.availability {
        Some(trace) => format!("{} hosts of the availability file", trace.host_count()),
        None => format!("hosts as fitted to such a network, {} days", network.days),
    };
    Outcome {
        name: network.name,
        title: network.title.into(),
        source: network.source,
        setup: format!(
            "{data}; disks of 100 GB, half full; files up {:.3} % of the time",
            AVAILABILITY * 100.0
        ),
        seeds: vec![context.options.seed],
        comparison: comparison(network, presence, curves),
        notes: vec![
            "Stored is what each host adds to the network, copies not counted; for each bandwidth \
             with the best time to wait for a vanished host. Fixed and dynamic contribution are \
             taken to lose nothing, as in the paper."
                .into(),
            format!(
                "The paper's settings: TFS gives {:.0} % and loses {:.2} kB/s, copies are any \
                 number. As shipped: {:.1} % and {:.3} kB/s as tfs-fig5 measures, whole copies.",
                curves[0].tfs.share * 100.0,
                curves[0].tfs.loss_bytes_per_sec / 1e3,
                curves[1].tfs.share * 100.0,
                curves[1].tfs.loss_bytes_per_sec / 1e3,
            ),
        ],
        chart: chart(network, curves, &data),
        csv,
    }
}

fn comparison(network: &Network, presence: &Presence, curves: &[Curves; 2]) -> Vec<Comparison> {
    let line = |quantity: &str, paper: &str, said: &dyn Fn(&Curves) -> String| {
        Comparison::new(quantity, paper, said(&curves[0]), said(&curves[1]))
    };
    let plenty = |curves: &Curves, method: usize| {
        curves.best[method].last().expect("there are points").stored
    };
    let mut lines: Vec<Comparison> = Method::ALL
        .iter()
        .enumerate()
        .map(|(n, method)| {
            let quantity = format!("{}, with bandwidth enough (GB)", method.name());
            line(&quantity, "", &|curves| format!("{:.1}", plenty(curves, n) / GB))
        })
        .collect();
    let more = |curves: &Curves| format!("{:.2}", plenty(curves, 2) / plenty(curves, 1));
    lines.push(line("TFS against dynamic, with bandwidth enough", "1.4", &more));
    let scarce = |curves: &Curves| {
        let at = curves.best[1].iter().position(|best| best.bandwidth >= SCARCE);
        let at = at.expect("the curve goes on beyond");
        format!("{:.2}", curves.best[2][at].stored / curves.best[1][at].stored)
    };
    lines.push(line("TFS against dynamic, with 1 kB/s", "slightly less", &scarce));
    let is_corporate = network.name == "tfs-fig6";
    let said = |found: Option<&Best>| {
        found.map_or("never".into(), |best| format!("{:.1}", best.bandwidth / 1e3))
    };
    let equal = |curves: &Curves| {
        let pairs = curves.best[2].iter().zip(&curves.best[1]);
        let equal = pairs.rev().take_while(|(tfs, other)| tfs.stored >= EQUAL * other.stored);
        said(equal.last().map(|(tfs, _)| tfs))
    };
    let paper = if is_corporate { "small amounts" } else { "\"as much as the other techniques\"" };
    lines.push(line("TFS stores no less than dynamic from (kB/s a host)", paper, &equal));
    let more = |curves: &Curves| {
        let mut pairs = curves.best[2].iter().zip(&curves.best[1]);
        said(pairs.find(|(tfs, other)| tfs.stored > MORE * other.stored).map(|(tfs, _)| tfs))
    };
    let paper = if is_corporate { "" } else { "\"much more\" than Internet hosts have" };
    lines.push(line("TFS stores a tenth more first with (kB/s a host)", paper, &more));
    let hour = presence.lazily(3600.0);
    let session = |_: &Curves| format!("{:.1} h", hour.session_secs / 3600.0);
    lines.push(line("a session, waiting for an hour", "", &session));
    let copies = |curves: &Curves| {
        format!("{:.1}", hour.copies(AVAILABILITY, curves.setting == Setting::Default))
    };
    lines.push(line("copies, waiting for an hour", "", &copies));
    lines
}

fn chart(network: &Network, curves: &[Curves; 2], data: &str) -> Chart {
    let look =
        [(Ink::Green, Mark::Dotted), (Ink::Blue, Mark::Dashed), (Ink::Vermilion, Mark::Line)];
    let points = |best: &[Best]| -> Vec<Point> {
        best.iter().map(|best| Point::new(best.bandwidth / 1e3, best.stored / GB)).collect()
    };
    let mut series: Vec<Series> = Method::ALL
        .iter()
        .zip(look)
        .zip(&curves[0].best)
        .map(|((method, (ink, mark)), best)| Series::new(method.name(), ink, mark, points(best)))
        .collect();
    series.push(Series::new(
        format!("TFS as shipped, {:.0} %, whole copies", curves[1].tfs.share * 100.0),
        Ink::Purple,
        Mark::Line,
        points(&curves[1].best[2]),
    ));
    let most = LEAST_BANDWIDTH * 10f64.powi(DECADES) / 1e3;
    let dynamic = curves[0].best[1].last().expect("there are points").stored / GB;
    series.push(Series::new(
        "TFS paper: 40 % more than dynamic",
        Ink::Black,
        Mark::Crosses,
        [Point::new(most, PAPER_MORE * dynamic)],
    ));
    Chart {
        title: network.chart.into(),
        subtitle: format!("{data}; disks of 100 GB, half full"),
        x: Axis::log_over("bandwidth for replication (kB/s a host)", LEAST_BANDWIDTH / 1e3, most),
        y: Axis::up_to("stored (GB a host, copies not counted)", crate::chart::highest(&series)),
        series,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two hosts in turn up for an hour and down for ten minutes.
    fn presence() -> Presence {
        let cycle = 4200.0;
        let host: Vec<(f64, f64)> =
            (0..100).map(|n| (cycle * f64::from(n), cycle * f64::from(n) + 3600.0)).collect();
        Presence::new(&[host.clone(), host], 100.0 * cycle)
    }

    #[test]
    fn storage_grows_with_bandwidth() {
        let curves = curves(&presence(), Setting::Paper, PAPER_TFS);
        for best in &curves.best {
            assert!(best.is_sorted_by(|a, b| a.stored <= b.stored));
        }
    }

    /// All then wait equally short, and need equally many copies.
    #[test]
    fn with_any_bandwidth_storage_is_as_the_shares_of_the_disk() {
        let [fixed, dynamic, tfs] = Method::ALL
            .map(|method| best(&presence(), Setting::Paper, method.given(PAPER_TFS), 1e9).stored);
        assert!((dynamic / fixed - 7.0).abs() < 1e-9, "{dynamic} and {fixed}");
        assert!((tfs / dynamic - 47.0 / 35.0).abs() < 1e-9);
    }

    #[test]
    fn what_overwrites_more_than_the_bandwidth_leaves_nothing() {
        let given = Given { share: 0.47, loss_bytes_per_sec: 1000.0 };
        let at = |bandwidth| best(&presence(), Setting::Paper, given, bandwidth).stored;
        assert_eq!(at(999.0), 0.0);
        assert!(at(1001.0) > 0.0);
    }

    #[test]
    fn waiting_over_the_pauses_pays_when_bandwidth_is_scarce() {
        let given = Given { share: 0.35, loss_bytes_per_sec: 0.0 };
        let scarce = best(&presence(), Setting::Paper, given, 100.0);
        assert!(scarce.threshold_secs >= 600.0, "{scarce:?}");
        let plenty = best(&presence(), Setting::Paper, given, 1e9);
        assert!(plenty.threshold_secs < 600.0, "{plenty:?}");
    }
}
