//! A node as a process of its own.

use std::io::Write;
use std::process::{Child, Command, Stdio};

/// Runs `up`, an `atoll up` whose standard error is taken care of, and hands it the code of
/// the network it is to enter; without one it makes a network.
pub fn start_node(mut up: Command, code: &str) -> Child {
    up.args((!code.is_empty()).then_some(["--join", "-"]).into_iter().flatten());
    let started = up.stdin(Stdio::piped()).stdout(Stdio::null()).spawn();
    let mut process = started.expect("it runs");
    let mut stdin = process.stdin.take().expect("piped");
    stdin.write_all(code.as_bytes()).expect("it reads its code");
    process
}
