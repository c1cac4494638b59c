//! The quick form of every experiment, with bounds on what its seeds give.

mod andrew;
mod bounds;
mod options;
mod points;
mod tfs;
