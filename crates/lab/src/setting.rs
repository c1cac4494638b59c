//! The two ways everything is run, and nothing else: which switches make them.
//!
//! CFS §7: "Unless noted, all tests were run with caching turned off, with no replication,
//! with just one virtual server per physical server, and with server selection turned
//! off. … Every server maintains a successor list with 2 log2(N) entries." That is
//! [`Setting::Paper`]. One thing cannot be switched off and makes lookups shorter than
//! the paper's: a node whose successor list covers a key names the key's root at once,
//! where CFS Figure 5 asks the key's predecessor first.
//!
//! [`Setting::Default`] is as shipped, with its adaptive table full as after a rest
//! ([`crate::ring`]): how long filling it takes is what `lookup-budget` looks at.

use std::fmt;
use std::time::Duration;

use atoll_dht::{CacheAt, DhtConfig, Mechanisms, ReplicaChoice};
use atoll_overlay::chord::{ChordConfig, TablePolicy};
use atoll_overlay::walk::Selection;

use crate::chart::{Ink, Mark, Point, Series};

/// A column of the tables.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Setting {
    /// As in the paper: what Atoll adds is switched off.
    Paper,
    /// As shipped.
    Default,
}

impl Setting {
    /// Both, in the order of the tables.
    pub const BOTH: [Setting; 2] = [Setting::Paper, Setting::Default];

    /// The overlay of a ring of so many nodes.
    pub fn chord(self, nodes: usize) -> ChordConfig {
        match self {
            Setting::Paper => {
                // CFS §4.2: r is 2 log2 N.
                let successors = (2.0 * (nodes.max(2) as f64).log2()).ceil() as usize;
                // §7.2.5: "it does not use that server again until it has been stabilized".
                let suspect_for = Duration::from_secs(24 * 3600);
                ChordConfig {
                    successors,
                    suspect_for,
                    selection: Selection::NearestKey,
                    routes: 1,
                    check_nodes: false,
                    table: TablePolicy::Fingers,
                    ..ChordConfig::default()
                }
            }
            Setting::Default => ChordConfig::default(),
        }
    }

    /// The column's line in a chart; `what` is added to its name.
    pub(crate) fn line(self, what: &str, points: impl IntoIterator<Item = Point>) -> Series {
        let (name, ink, mark) = match self {
            Setting::Paper => ("Atoll, paper's settings", Ink::Blue, Mark::Squares),
            Setting::Default => ("Atoll, default settings", Ink::Vermilion, Mark::Discs),
        };
        Series::new(format!("{name}{what}"), ink, mark, points)
    }

    /// How many virtual servers a node runs.
    pub fn virtual_servers(self) -> u16 {
        match self {
            Setting::Paper => 1,
            Setting::Default => ChordConfig::default().virtual_servers,
        }
    }

    /// The block layer.
    pub fn dht(self) -> DhtConfig {
        match self {
            Setting::Paper => DhtConfig {
                replicas: 1,
                selection: Selection::NearestKey,
                routes: 1,
                replica_choice: ReplicaChoice::Root,
                mechanisms: Mechanisms::without_hedged_lookups(),
                cache_at: CacheAt::Off,
                cache_bytes: 0,
                stray_grace: Duration::ZERO,
                ..DhtConfig::default()
            },
            Setting::Default => DhtConfig::default(),
        }
    }
}

/// Switches server selection (CFS §4.3) on, for the figures that compare.
pub(crate) fn select_servers(chord: &mut ChordConfig, dht: &mut DhtConfig) {
    chord.selection = Selection::Cost;
    dht.selection = Selection::Cost;
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Setting::Paper => "paper",
            Setting::Default => "default",
        })
    }
}
