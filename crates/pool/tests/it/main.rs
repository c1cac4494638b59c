//! Tests of pools.

mod conformance;
mod crash;
mod disk;
mod group;
mod importing;
mod machine;
mod map;
mod plain;
mod quotas;
mod remote;
mod spread;
mod workload;
