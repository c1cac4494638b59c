//! The simulator, from outside, in one binary.

mod calls;
mod churn;
mod connections;
mod executor;
mod faults;
mod net_model;
mod ping;
mod scale;
