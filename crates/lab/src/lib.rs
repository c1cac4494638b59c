//! The laboratory: what the papers measured, measured again with Atoll's own code on a
//! simulated network.
//!
//! An [`Experiment`] runs the node's protocol code (`overlay`, `dht` and a store in
//! memory) in `sim`, never a model of it, and ends in an [`Outcome`]: a table *paper |
//! Atoll in the paper's settings | Atoll as shipped*, the points as CSV and a [`Chart`].
//! [`setting`] alone knows which switches make up the two columns.
//!
//! ```no_run
//! let options = atoll_lab::Options { quick: true, ..atoll_lab::Options::default() };
//! let outcomes = atoll_lab::run(&["cfs-fig9"], &options, &atoll_lab::Silent).expect("it runs");
//! println!("{}", outcomes[0].table());
//! ```
//!
//! **Invariant:** one seed, one result: equal options give equal bytes, on any machine
//! and any number of processors.
//!
//! It does not know sockets, terminals or where its files go.

pub mod andrew;
mod capacity;
pub mod cfs;
pub mod chart;
mod churn;
mod churning;
mod experiment;
mod inputs;
mod kosha;
mod lookup_budget;
mod malicious;
mod mechanisms;
mod outcome;
mod overlay;
pub mod pastis;
mod registry;
mod ring;
pub mod setting;
mod statistics;
mod tfs;

pub use chart::Chart;
pub use experiment::{Experiment, LabError, Options, Progress, Silent};
pub use inputs::{Availability, InputError, read_availability, read_latency};
pub use outcome::{Comparison, Csv, Outcome};
pub use registry::{check, experiments, outcomes, run};
