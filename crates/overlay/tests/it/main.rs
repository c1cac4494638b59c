//! Chord from outside, in the simulator, in one binary.

mod bad_input;
mod capture;
mod churn;
mod clocks;
mod cluster;
mod dead_nodes;
mod duplicates;
mod floods;
mod joining;
mod liars;
mod lookup_budget;
mod lookups;
mod merging;
mod paper;
mod refusals;
mod scale;
mod selection;
mod state_properties;
mod static_ring;
mod virtual_servers;
mod walking;
mod ways_in;
