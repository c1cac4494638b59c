//! One plain TCP stream, memory to memory: what a download is measured against.
//!
//! The receiver connects, says how many bytes it wants, and reads them; the time is from
//! before it connects to the last byte, as the receiver sees it. Default settings of the
//! system, no TLS, no disk: the least any protocol over one connection pays.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, ExitCode, Stdio};
use std::time::{Duration, Instant};

use crate::wide::{Wide, address};

const PORT: u16 = 7001;
const SERVE: &str = "--serve-stream";
const FETCH: &str = "--fetch-stream";
const PIECE_BYTES: usize = 256 << 10;

/// How long a stream took: until all of it, and until three quarters of it, were there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Took {
    pub whole: Duration,
    pub three_quarters: Duration,
}

/// If this process was started as one end of a stream, is it.
pub(crate) fn main_of_an_end() -> Option<ExitCode> {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.get(1).map(String::as_str) {
        Some(SERVE) => serve(),
        Some(FETCH) => {
            let len_bytes = arguments[3].parse().expect("a number");
            let took = fetch(&arguments[2], len_bytes);
            println!("{} {}", took.whole.as_nanos(), took.three_quarters.as_nanos());
        }
        _ => return None,
    }
    Some(ExitCode::SUCCESS)
}

fn own_program() -> PathBuf {
    std::env::current_exe().expect("this program has a path")
}

/// A server of streams at every site.
pub(crate) fn start_servers(wide: &Wide, sites: usize) -> Vec<Child> {
    let start = |site| {
        let mut command = wide.command(site, &own_program());
        command.arg(SERVE).stdin(Stdio::null()).spawn().expect("it runs")
    };
    (0..sites).map(start).collect()
}

/// Fetches so many bytes over one fresh connection.
pub(crate) fn measure(wide: &Wide, reader: usize, server: usize, len_bytes: u64) -> Took {
    let mut command = wide.command(reader, &own_program());
    command.arg(FETCH).arg(format!("{}:{PORT}", address(server))).arg(len_bytes.to_string());
    let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output().expect("it runs");
    assert!(output.status.success(), "{command:?}");
    let text = String::from_utf8(output.stdout).expect("two numbers");
    let mut nanos = text.split_whitespace().map(|n| n.parse().expect("a number"));
    let mut next = || Duration::from_nanos(nanos.next().expect("two numbers"));
    Took { whole: next(), three_quarters: next() }
}

fn serve() {
    let listener = TcpListener::bind(("0.0.0.0", PORT)).expect("the port is free");
    for stream in listener.incoming().flatten() {
        std::thread::spawn(move || send(stream));
    }
}

fn send(mut stream: TcpStream) {
    let mut len = [0; 8];
    if stream.read_exact(&mut len).is_err() {
        return;
    }
    let piece = vec![7; PIECE_BYTES];
    let mut left = u64::from_be_bytes(len);
    while left > 0 {
        let now = left.min(PIECE_BYTES as u64);
        if stream.write_all(&piece[..now as usize]).is_err() {
            return;
        }
        left -= now;
    }
}

fn fetch(server: &str, len_bytes: u64) -> Took {
    let began = Instant::now();
    let mut stream = TcpStream::connect(server).expect("the server listens");
    stream.write_all(&len_bytes.to_be_bytes()).expect("sent");
    let mut buffer = vec![0; PIECE_BYTES];
    let (mut got, mut three_quarters) = (0, None);
    while got < len_bytes {
        let count = stream.read(&mut buffer).expect("bytes") as u64;
        assert!(count > 0, "the stream ended after {got} bytes");
        got += count;
        if got * 4 >= len_bytes * 3 {
            three_quarters.get_or_insert_with(|| began.elapsed());
        }
    }
    let whole = began.elapsed();
    Took { whole, three_quarters: three_quarters.unwrap_or(whole) }
}
