//! The quick form of every experiment, with bounds on what its seeds give.

mod andrew;
mod bounds;
mod kosha;
mod options;
mod pastis;
mod points;
mod tfs;
