//! The owned file system, end to end on blocks in memory and trees on this machine's disk.

mod formats;
mod get;
mod golden;
mod hostile;
mod mount;
mod publish;
mod ring;
mod roots;
mod scale;
mod trees;
