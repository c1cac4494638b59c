//! What the simulator says of the benchmark where real nodes run it as well (Pastis §5.1, Figure 3).
//!
//! "In this configuration we use 16 machines … a fixed delay of 100 ms to each packet … Past's
//! replication factor is set to 4. LS³ is configured to simulate a network with the the same
//! characteristics, and we run the Andrew Benchmark both on the real and simulated networks."
//!
//! As of real nodes, all upkeep runs, and calls travel on TCP connections with TLS. What a node and a
//! mount compute takes no time here.

use std::time::Duration;

use atoll_sim::Latency;
use atoll_volume::shared::Consistency;

use super::bench::{PHASES, Run};
use super::on_sphere;
use crate::LabError;
use crate::setting::Setting;

/// Nodes that are all equally far from each other, one of which does the benchmark in the default
/// settings.
#[derive(Clone, Copy, Debug)]
pub struct Prediction {
    /// How many there are.
    pub nodes: usize,
    /// Copies of each block.
    pub replicas: usize,
    /// From any node to any other, one way.
    pub delay: Duration,
    /// Of each node's line, either way.
    pub bytes_per_sec: u64,
    /// How the client opens files.
    pub consistency: Consistency,
    /// What all else follows from.
    pub seed: u64,
}

impl Prediction {
    /// The names of the phases.
    pub const PHASES: [&'static str; 5] = PHASES;

    /// Seconds of each phase.
    ///
    /// # Errors
    /// If the benchmark breaks off.
    pub fn seconds(&self) -> Result<[f64; 5], LabError> {
        let run = Run {
            latency: Latency::Flat(self.delay),
            link: Some(self.bytes_per_sec),
            over_tcp: true,
            upkeep: true,
            consistency: self.consistency,
            ..on_sphere(Setting::Default, self.nodes, self.replicas, self.seed)
        };
        let measured = run.measure()?;
        Ok(std::array::from_fn(|phase| measured.phase(phase)))
    }
}
