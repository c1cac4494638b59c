//! Tests of pools.

mod conformance;
mod plain;
