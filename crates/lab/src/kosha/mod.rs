//! What the Kosha paper simulated (A. R. Butt, T. A. Johnson, Y. Zheng, Y. C. Hu, "Kosha: A Peer-to-Peer
//! Enhancement for the Network File System", SC 2004, §6.2 and §6.3), simulated again with the
//! placement of Atoll's pools.
//!
//! | module | figures |
//! |---|---|
//! | [`balance`] | 5: how even the load is, against the distribution level |
//! | [`redirection`] | 6: insertions that fail as nodes fill up |
//! | [`availability`] | 7: files that are there while machines come and go |
//! | [`machines`], [`group_life`] | when machines are up, and when a group of them serves |
//! | [`population`] | a synthetic file system in the place of the paper's |
//! | [`node_ids`] | the paper's rule: names and nodes on one circle |
//!
//! Two columns, as for the other papers. In the *paper's settings* directories are placed by the paper's rule,
//! which is written down here ([`node_ids`]) and is no part of Atoll; the *default settings* are those of a
//! pool: `atoll_pool::group_for`. Where the paper has a node, a pool has a *group* of members, each with a
//! copy of every file.
//!
//! The paper's file system had 221,000 files of 130 users, and 17.9 GB; it was not published. Ours has as many,
//! and everything else of it follows from published fits ([`population`]).

pub(crate) mod availability;
pub(crate) mod balance;
mod group_life;
mod machines;
mod node_ids;
mod population;
pub(crate) mod redirection;

use atoll_env::Env;
use atoll_sim::{Sim, SimConfig};

/// The random numbers of one run.
fn random(seed: u64) -> Env {
    Sim::new(SimConfig { seed, ..SimConfig::default() }).outside()
}

/// A number with so many digits behind the point that it does not look like none.
fn percent(number: f64) -> String {
    match number {
        0.0 => "0 %".into(),
        _ if number.abs() < 0.1 => format!("{number:.4} %"),
        _ => format!("{number:.2} %"),
    }
}
