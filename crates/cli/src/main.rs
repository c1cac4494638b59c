//! The `atoll` command: arguments, progress, tables and JSON over the node's client and
//! the volume code. One module per command; it knows no protocol and no format.

// A command is a real program on a real machine: clocks and threads are its own.
#![allow(clippy::disallowed_methods)]

mod address;
mod arguments;
mod commands;
mod connection;
mod failure;
mod incomplete;
mod interrupt;
mod logging;
mod output;
mod progress;
mod read_key;
mod reading;
mod source_filter;
mod tfs;
mod units;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let arguments = arguments::Arguments::parse();
    match commands::run(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("error: {}", output::safe_message(&failure.to_string()));
            ExitCode::from(failure.exit as u8)
        }
    }
}
