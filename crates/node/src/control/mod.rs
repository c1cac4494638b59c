//! The control socket: what commands and mounts ask of the local node.
//!
//! Calls of methods `0x03xx` (see `docs/design/control.md`) over the mode-0600 Unix
//! socket in the node's directory. Block bytes travel beside the headers and are not
//! copied here. Errors cross as what they are: [`GetError`](atoll_dht::GetError) and
//! [`PutError`](atoll_dht::PutError) on the client's side equal those of the node.

pub(crate) mod message;
pub(crate) mod server;
