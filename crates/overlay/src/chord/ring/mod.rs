//! A node's part of the ring: successor lists, predecessors and routes as plain data.
//!
//! [`state`] is one virtual server with Zave's operations, [`list`] the length of its successor
//! list, [`fingers`] its fingers, [`routing`] the answer to "where next?" from all virtual servers,
//! and [`servers`] the state that the virtual servers of a node share. No clock, no network and no
//! task: time is an argument, and the calls to be made are returned.

pub(in crate::chord) mod fingers;
pub mod list;
pub(in crate::chord) mod routing;
pub mod servers;
pub mod state;
