//! A deterministic simulator: virtual time, a virtual network and faults.
//!
//! Protocol code written against `env::Runtime` and `net::Transport` runs here by the
//! thousands of nodes in one thread. Pastis §4 evaluates the same way (its simulator
//! LS³ keeps "a central event schedule, processed in time-of-occurrence order", with
//! the layers above "unaware of whether they are executing on top of a simulated or a
//! real environment"); from TigerBeetle comes the seed that replays a run and the
//! checker that looks after every step ([`Sim::step_hook`]): safety first, then the
//! faults end ([`Sim::heal`]) and progress is demanded ([`Sim::eventually`]).
//!
//! ```
//! use std::time::Duration;
//! use atoll_sim::{HostConfig, Sim, SimConfig};
//!
//! let sim = Sim::new(SimConfig { seed: 7, ..SimConfig::default() }); let host =
//! sim.add_host(HostConfig::default()); let env = sim.env(host); let slept =
//! sim.block_on(Duration::from_secs(60), atoll_env::sleep(&*env, Duration::from_secs(9)));
//! assert_eq!(slept, Ok(())); assert_eq!(sim.now().as_nanos(), 9_000_000_000);
//! ```
//!
//! Layers: `tasks` (who runs next) and `schedule` (what happens when) are plain data; `world` owns
//! them together with the hosts; `world/network` is the life of a call, `world/streams` that of a
//! connection's bytes, `flow` the window they pass and `tcp` the kinds of TCP; `runtime` and
//! `transport` are what protocol code holds; `sim` drives it all.
//!
//! Invariants:
//! - One seed, one run: nothing here reads a clock, a thread or a randomly seeded map.
//!   [`Sim::trace_hash`] covers every event, so two runs can be compared.
//! - Code that is not ours (futures, wakers, services, destructors) never runs while
//!   the world's lock is held.
//! - A crash ends an incarnation: its tasks are dropped, its timers never fire, and
//!   nothing it sent is delivered any more.
//! - Virtual time never goes back, and events at one instant happen in the order in
//!   which they were scheduled.
//!
//! What is not modelled unless asked for ([`Connections::Tcp`]): the handshake of a new
//! connection and its window; without it a message is lost or arrives as a whole, and
//! uplinks serve messages in order. The time that a handler computes is never modelled:
//! it is zero.
//!
//! It does not know what messages mean.

mod clock;
mod config;
mod flow;
mod invariants;
mod latency;
mod matrix;
mod random;
mod report;
mod runtime;
mod schedule;
mod sim;
mod slab;
mod tasks;
mod tcp;
mod trace;
mod transport;
mod world;

pub use config::{Connections, HostConfig, Loss, SEED_ROUND, SimConfig};
pub use latency::{Latency, PASTIS_SPHERE_MAX};
pub use matrix::{MatrixError, RttMatrix};
pub use report::{MethodStats, PendingCall, Stats, Stuck};
pub use sim::{RunEnd, Sim, Step};
pub use tcp::{Control, TcpModel};
pub use trace::{EventKind, TraceEvent};

/// A simulated machine. Numbers count up from zero in the order of [`Sim::add_host`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct HostId(pub u32);

impl std::fmt::Display for HostId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if *self == HostId::OUTSIDE { f.write_str("outside") } else { write!(f, "h{}", self.0) }
    }
}

impl HostId {
    /// No machine at all: tasks of the test itself, which never crash.
    pub const OUTSIDE: HostId = HostId(u32::MAX);
}
