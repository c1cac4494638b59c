//! Tests of pools.

mod conformance;
