//! What the Pastis paper measured on its simulator (J.-M. Busca, F. Picconi, P. Sens, "Pastis: a
//! Highly-Scalable Multi-User Peer-to-Peer File System", INRIA RR-5288, 2004, §5), measured again with
//! Atoll's shared volumes.
//!
//! | module | figures |
//! |---|---|
//! | [`prediction`] | 3: the simulator's part of the comparison with real nodes, which `atoll-bench` makes |
//! | [`size`] | 4: the time of the benchmark against the number of nodes |
//! | [`replication`] | 5, 6, 7: against the number of replicas |
//! | [`clients`] | 8: against the number of clients that work at once |
//! | [`consistency`] | 9: the two models of consistency; 10: what remembered replica sets save |
//! | [`bench`] | the benchmark on a ring, which all of them run |
//! | [`observed`] | where the time of a client goes |
//! | [`outdated`] | replica sets that are out of date |
//!
//! Two columns, as for the other papers. In the *paper's settings* a mount shows no name without asking,
//! keeps no block after a file is closed, and looks replica sets up each time; the *default settings*
//! are those of a mount. The overlay is Atoll's in both: Pastry, whose tables are spread over all
//! distances and choose near nodes, has no counterpart here but the adaptive table. CFS's fingers are
//! measured beside it in Figure 4.
//!
//! Time is that of the network alone. The paper's simulator added the time that its machine took for
//! each message, and a figure for the network's software.

pub(crate) mod bench;
pub(crate) mod clients;
pub(crate) mod consistency;
mod observed;
mod outdated;
mod prediction;
pub(crate) mod replication;
pub(crate) mod size;

use atoll_sim::{Latency, PASTIS_SPHERE_MAX};
use atoll_volume::shared::Consistency;

use crate::setting::Setting;
use crate::statistics::{Summary, summary};
use bench::{Measured, OutOfDate, Routing, Run};
pub use prediction::Prediction;

/// The paper's large network (§5.2 to §5.6).
const NODES: usize = 32_768;
/// That of a quick run.
const QUICK_NODES: usize = 256;
/// Replicas of Figures 9 and 10, §5.5.
const MOST_REPLICAS: usize = 16;

/// A run as in most of the paper's figures: one client, the sphere of 300 ms, close-to-open.
fn on_sphere(setting: Setting, nodes: usize, replicas: usize, seed: u64) -> Run {
    Run {
        seed,
        nodes,
        replicas,
        clients: 1,
        setting,
        routing: Routing::AsShipped,
        latency: Latency::Sphere { max: PASTIS_SPHERE_MAX },
        link: None,
        over_tcp: false,
        upkeep: false,
        consistency: Consistency::CloseToOpen,
        knows_sets: setting == Setting::Default,
        makes_near: setting == Setting::Default,
        asks_early: setting == Setting::Default,
        out_of_date: OutOfDate::Nothing,
    }
}

/// A quantity of all runs that are picked.
fn of_runs<'a, C: PartialEq + 'a>(
    found: &'a [(C, Measured)],
    case: &C,
    quantity: impl Fn(&Measured) -> f64,
) -> Summary {
    summary(found.iter().filter(|(of, _)| of == case).map(|(_, measured)| quantity(measured)))
}

/// `123.4 ± 5.6`
fn secs(of: Summary) -> String {
    match of.count {
        0 => String::new(),
        1 => format!("{:.1}", of.mean),
        _ => format!("{:.1} ± {:.1}", of.mean, of.deviation),
    }
}

/// By how much a mean is more than another one: `+13.5 %`.
fn more(of: Summary, than: Summary) -> String {
    match than.mean > 0.0 {
        true => format!("{:+.1} %", 100.0 * (of.mean / than.mean - 1.0)),
        false => String::new(),
    }
}
