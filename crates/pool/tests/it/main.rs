//! Tests of pools.

mod conformance;
mod crash;
mod disk;
mod group;
mod machine;
mod map;
mod plain;
mod remote;
mod spread;
mod workload;
