//! The kit against the reference, and against file systems that are broken on purpose.

mod broken;
mod faults;
mod reference;
mod trees;
