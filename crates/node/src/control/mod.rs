//! The control socket: how commands and mounts call the local node.
//!
//! Calls of methods `0x03xx` (see `docs/design/control.md`) over the mode-0600 Unix socket in
//! the node's directory. [`calls`] is the one table of them: the server's dispatch, the client,
//! the fuzz target and the page follow from it; subsystems made outside this crate have calls of
//! their own beside it ([`outside`]). Block bytes travel beside the headers and are
//! not copied here. The errors of an operation cross the socket without loss:
//! [`GetError`](atoll_dht::GetError) and [`PutError`](atoll_dht::PutError) on the client's side
//! equal those of the node.

pub(crate) mod blocks;
pub(crate) mod body;
pub(crate) mod calls;
pub(crate) mod message;
pub(crate) mod outside;
pub(crate) mod server;
pub(crate) mod volume_error;
