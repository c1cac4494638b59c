//! Whole nodes in one process, on loopback, and clients of their sockets.

mod client;
mod ring;
mod start;
mod world;
