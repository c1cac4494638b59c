//! The program's own log, on standard error (`messages`).

use std::io::IsTerminal;

use tracing::level_filters::LevelFilter;

use crate::failure::{Exit, Failure};
use crate::messages::Log;

/// Starts logging: `quietest` unless `-v`, `-vv` or `ATOLL_LOG` (error, warn, info,
/// debug, trace, off) say otherwise.
pub(crate) fn start(verbose: u8, quietest: LevelFilter) -> Result<(), Failure> {
    let level = match (std::env::var("ATOLL_LOG"), verbose) {
        (Ok(name), _) if !name.is_empty() => name.parse().map_err(|_| {
            Failure::new(Exit::Usage, format!("ATOLL_LOG is {name:?}"))
                .advice("It may be error, warn, info, debug, trace or off.")
        })?,
        (_, 0) => quietest,
        (_, 1) => LevelFilter::DEBUG.min(quietest.max(LevelFilter::INFO)),
        (_, 2) => LevelFilter::DEBUG,
        _ => LevelFilter::TRACE,
    };
    let terminal = std::io::stderr().is_terminal();
    tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(Log)
        // What cannot be written would be told by `note!`, which panics if that cannot be written either.
        .log_internal_errors(false)
        .with_ansi(terminal)
        .init();
    Ok(())
}
