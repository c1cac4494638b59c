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

// A benchmark reads the real clock.
#![allow(clippy::disallowed_methods)]

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

use std::process::ExitCode;

fn main() -> ExitCode {
    if let Some(code) = stream::main_of_an_end() {
        return code;
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
    let Some(temp) = nest::inside() else {
        if let Some(what) = nest::missing() {
            eprintln!("SKIPPED: no wide-area network can be made here: {what}.");
            return ExitCode::SUCCESS;
        }
        return nest::run_inside();
    };
    let results = measure::measure(&options, &temp);
    report::write(&options, &results);
    ExitCode::SUCCESS
}
