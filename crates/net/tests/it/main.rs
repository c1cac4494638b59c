//! The real transport and the Unix carrier, over loopback.
#![allow(clippy::disallowed_methods, reason = "the real transport runs only on tokio")]

mod crossing;
mod memory;
mod mux;
mod services;
mod strangers;
mod tcp;
mod unix;
