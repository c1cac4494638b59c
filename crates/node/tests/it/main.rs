//! Whole nodes in one process, on loopback, and clients of their sockets.

#![allow(clippy::disallowed_methods, reason = "whole nodes run only on tokio")]

mod client;
mod contribution;
mod membership;
mod ring;
mod start;
mod subsystem;
mod versions;
mod world;
