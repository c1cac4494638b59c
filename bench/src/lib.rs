//! Parts that the benchmarks of real nodes share: data that does not compress, starting nodes,
//! and a description of the machine and the date. The program `wan/` in this package measures
//! downloads over long distances.

// Measurements read the real clock.
#![allow(clippy::disallowed_methods)]

mod machine;
mod noise;
mod process;
mod ring;

pub use machine::{machine, today};
pub use noise::noise;
pub use process::start_node;
pub use ring::{LocalRing, median, timed};
