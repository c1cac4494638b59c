//! Downloads over long distances, beside one TCP stream between the same hosts, and
//! beside what the simulator says.
//!
//! Real `atoll` processes, one at each of twelve sites: network namespaces joined by a
//! router in this program, with the latencies of a measured matrix (`--latency FILE`) or
//! of points on a sphere, and access lines of a rate either way. From every site files of
//! 1 MiB and 100 MiB are read that another site has published (CFS §7.1 and Figure 8 did
//! so on the RON testbed), and the same bytes are fetched by a plain TCP connection. The
//! simulator then runs the same nodes on the same network (Pastis §5.1 compares so).
//! Needs root; see [`nest`] for what it leaves alone.
//!
//! With `andrew` as its first argument it measures a shared volume instead: see [`andrew`].

// A benchmark reads the real clock.
#![allow(clippy::disallowed_methods)]

mod andrew;
mod forecast;
mod measure;
mod nest;
mod options;
mod predict;
mod report;
mod ring;
mod router;
mod sites;
mod stream;
mod tun;
mod wide;

use std::path::PathBuf;
use std::process::ExitCode;

fn main() -> ExitCode {
    if let Some(code) = stream::main_of_an_end() {
        return code;
    }
    let mut arguments = std::env::args().skip(1).peekable();
    if arguments.next_if(|argument| argument == "andrew").is_some() {
        return andrew(arguments);
    }
    let options = match options::Options::parse() {
        Ok(options) => options,
        Err(what) => {
            eprintln!("{what}\n\n{}", options::USAGE);
            return ExitCode::from(2);
        }
    };
    if options.predict_only {
        forecast::print(&options);
        return ExitCode::SUCCESS;
    }
    let temp = match nest_or_end() {
        Ok(temp) => temp,
        Err(code) => return code,
    };
    let results = measure::measure(&options, &temp);
    report::write(&options, &results);
    ExitCode::SUCCESS
}

/// Inside the nest, the directory for results; outside, the exit status of the run inside.
fn nest_or_end() -> Result<PathBuf, ExitCode> {
    nest::inside().ok_or_else(|| match nest::missing() {
        Some(what) => {
            eprintln!("SKIPPED: no wide-area network can be made here: {what}.");
            ExitCode::SUCCESS
        }
        None => nest::run_inside(),
    })
}

/// The Andrew benchmark.
fn andrew(arguments: impl Iterator<Item = String>) -> ExitCode {
    let options = match andrew::Options::parse(arguments) {
        Ok(options) => options,
        Err(what) => {
            eprintln!("{what}\n\n{}", andrew::USAGE);
            return ExitCode::from(2);
        }
    };
    let done = match &options.on {
        Some(dir) => andrew::phases(dir).map(|seconds| println!("{}", andrew::told(&seconds))),
        None => match nest_or_end() {
            Ok(temp) => andrew::compare(&options, &temp),
            Err(code) => return code,
        },
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(what) => {
            eprintln!("{what}");
            ExitCode::FAILURE
        }
    }
}
