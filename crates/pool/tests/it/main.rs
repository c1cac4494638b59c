//! Tests of pools.

mod conformance;
mod crash;
mod disk;
mod plain;
mod remote;
