//! Tests of the stores as their callers see them, on good disks and bad ones.

mod contract;
mod contributed;
mod crash;
mod files;
mod fixture;
mod full;
mod images;
mod kill;
mod model;
mod summary;
