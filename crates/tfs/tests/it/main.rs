//! Tests of whole file systems.
