//! Tests of pools.

mod conformance;
mod disk;
mod plain;
