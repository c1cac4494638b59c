//! What a simulation is made of: its seed, its network, its hosts.

use std::time::Duration;

use atoll_key::PeerId;

use crate::latency::Latency;
use crate::tcp::TcpModel;

/// A simulated network and how closely it is watched.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// The whole run follows from this number, and from the round if one was asked for
    /// ([`SEED_ROUND`]).
    pub seed: u64,
    /// How long a message travels.
    pub latency: Latency,
    /// Each message takes up to this share of its latency longer, at random; 0 keeps
    /// messages between two hosts in order.
    pub jitter: f64,
    /// What becomes of messages at random.
    pub loss: Loss,
    /// What messages travel on.
    pub connections: Connections,
    /// Bytes on the wire of each message besides its header and parts.
    pub message_overhead_bytes: usize,
    /// Whether tasks that are ready at the same instant run in random order, so that
    /// more interleavings are seen, rather than first come, first served.
    pub shuffle_tasks: bool,
    /// How many of the last events are kept for [`crate::Sim::trace`].
    pub trace_last_count: usize,
    /// So many polls and events at one instant are taken for a livelock: a panic.
    pub max_steps_per_instant: u64,
    /// The wall clock when the simulation starts, milliseconds since 1970.
    pub unix_epoch_ms: u64,
}

/// The environment variable that gives every simulation of a process another run of the same seed:
/// a number, 0 or absent for the usual one. Tests name few seeds, so that they are quick; a soak
/// runs them in round after round.
pub const SEED_ROUND: &str = "ATOLL_SEED_ROUND";

/// The round that was asked for.
pub(crate) fn seed_round() -> u64 {
    let Ok(round) = std::env::var(SEED_ROUND) else { return 0 };
    round.parse().unwrap_or_else(|_| panic!("{SEED_ROUND} is a number, not {round:?}"))
}

/// The seed that a run really has. Round 0 leaves seeds as they are.
pub(crate) fn seed_of_round(seed: u64, round: u64) -> u64 {
    seed ^ round.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

impl Default for SimConfig {
    fn default() -> SimConfig {
        SimConfig {
            seed: 0,
            latency: Latency::Flat(Duration::from_millis(20)),
            jitter: 0.0,
            loss: Loss::None,
            connections: Connections::Instant,
            // A guess: TCP and IP headers (40 to 52), a TLS record (22), our frame.
            message_overhead_bytes: 96,
            shuffle_tasks: true,
            trace_last_count: 32,
            max_steps_per_instant: 50_000_000,
            unix_epoch_ms: 1_750_000_000_000,
        }
    }
}

/// What messages travel on.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Connections {
    /// Each by itself, with no handshake and no window: the cheapest, and right where
    /// messages are short or distances small.
    Instant,
    /// The bytes of one TCP connection between each two hosts, opened by the first
    /// message and kept. [`HostConfig`]'s rates count the segments' headers too, and the
    /// message overhead should then be that of the frame and of TLS alone.
    Tcp(TcpModel),
}

/// What becomes of messages at random. The chance is per message, whatever its size.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Loss {
    /// Nothing is lost.
    None,
    /// A message is gone with this chance; its caller runs into the deadline. Harsher
    /// than TCP, and so the better test of a protocol.
    Drop {
        /// From 0 to 1.
        chance: f64,
    },
    /// A message is sent again until it arrives, as TCP does: it comes late by one
    /// timeout for the first loss, two more for the second, and so on doubling. After
    /// eight losses in a row it is gone.
    Retransmit {
        /// From 0 to 1.
        chance: f64,
        /// TCP's initial timeout is 1 s (RFC 6298), its usual minimum 200 ms.
        first_timeout: Duration,
    },
}

/// One simulated machine.
#[derive(Clone, Debug, Default)]
pub struct HostConfig {
    /// Uplink, bytes per second; `None` is unlimited. Messages queue at it in order.
    pub upload_bytes_per_sec: Option<u64>,
    /// Downlink, bytes per second; `None` is unlimited.
    pub download_bytes_per_sec: Option<u64>,
    /// Added to the latency of every message from or to this host: its access line.
    pub access_delay: Duration,
    /// How far the host's wall clock is off, milliseconds.
    pub clock_skew_ms: i64,
    /// Its identity, such as that of a real node whose place on a ring it is to have; one
    /// that follows from the seed if none is given. Two hosts with the same are copies of one
    /// node: calls reach the one whose address they name.
    pub identity: Option<PeerId>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_round_has_other_seeds_and_round_0_the_usual_ones() {
        let seeds = |round| (0..100).map(move |seed| seed_of_round(seed, round));
        assert!(seeds(0).eq(0..100));
        let all: std::collections::BTreeSet<u64> = (0..100).flat_map(seeds).collect();
        assert_eq!(all.len(), 100 * 100);
    }
}
