//! Measured data from files: round trips between hosts, and when hosts were up.
//!
//! Round trips: the formats of `atoll_sim::RttMatrix` (LATM or text). Availability: lines
//! `host,start_s,end_s`, one interval of being up each, with that header, sorted by host
//! and time. Either may be compressed with xz, which the `xz` program then unpacks.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use atoll_sim::{MatrixError, RttMatrix};

/// No file is read beyond so many bytes, unpacked.
const MAX_BYTES: u64 = 256 << 20;
const XZ_MAGIC: &[u8] = b"\xfd7zXZ\0";

/// Why a file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum InputError {
    /// It cannot be read.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// It is packed and there is no program to unpack it.
    #[error("it is compressed, and there is no `xz` program to unpack it")]
    NoXz,
    /// The program did not unpack it.
    #[error("xz does not unpack it: {0}")]
    Xz(String),
    /// There is too much of it.
    #[error("it has more than {MAX_BYTES} bytes")]
    TooLong,
    /// It is something else.
    #[error("{0}")]
    Malformed(String),
}

/// When hosts were up: for each host its intervals, seconds from the trace's first moment.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Availability {
    hosts: Vec<Vec<(f64, f64)>>,
    length_secs: f64,
}

/// Reads round trips; of several snapshots the first.
///
/// # Errors
/// If the file cannot be read or is no matrix.
pub fn read_latency(path: &Path) -> Result<RttMatrix, InputError> {
    RttMatrix::parse(&read(path)?, 0).map_err(|error| match error {
        MatrixError::Io(error) => InputError::Io(error),
        other => InputError::Malformed(other.to_string()),
    })
}

/// Reads when hosts were up.
///
/// # Errors
/// If the file cannot be read or is something else.
pub fn read_availability(path: &Path) -> Result<Availability, InputError> {
    let bytes = read(path)?;
    let text =
        std::str::from_utf8(&bytes).map_err(|_| InputError::Malformed("it is not text".into()))?;
    Availability::parse(text)
}

/// A file's bytes, unpacked.
fn read(path: &Path) -> Result<Vec<u8>, InputError> {
    let mut bytes = Vec::new();
    std::fs::File::open(path)?.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.starts_with(XZ_MAGIC) {
        bytes = unpack(path)?;
    }
    if bytes.len() as u64 > MAX_BYTES { Err(InputError::TooLong) } else { Ok(bytes) }
}

fn unpack(path: &Path) -> Result<Vec<u8>, InputError> {
    // A name that begins with a dash is not an option.
    let path: PathBuf = std::path::absolute(path)?;
    let mut child = Command::new("xz")
        .args(["--decompress", "--stdout", "--quiet", "--"])
        .arg(path)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => InputError::NoXz,
            _ => InputError::Io(error),
        })?;
    let mut bytes = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        stdout.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    }
    if bytes.len() as u64 > MAX_BYTES {
        child.kill()?;
        child.wait()?;
        return Err(InputError::TooLong);
    }
    let end = child.wait_with_output()?;
    if !end.status.success() {
        let said = String::from_utf8_lossy(&end.stderr);
        let said = said.lines().next().unwrap_or("it ended with an error");
        return Err(InputError::Xz(said.to_owned()));
    }
    Ok(bytes)
}

impl Availability {
    /// Reads the text of such a file.
    ///
    /// # Errors
    /// With the number of the line that makes no sense.
    pub fn parse(text: &str) -> Result<Availability, InputError> {
        let malformed =
            |line: usize, why: &str| InputError::Malformed(format!("line {}: {why}", line + 1));
        let mut lines = text.lines().enumerate();
        if lines.next().map(|(_, header)| header.trim()) != Some("host,start_s,end_s") {
            return Err(malformed(0, "it should be \"host,start_s,end_s\""));
        }
        let mut hosts: BTreeMap<&str, Vec<(f64, f64)>> = BTreeMap::new();
        for (at, line) in lines.filter(|(_, line)| !line.trim().is_empty()) {
            let fields: Vec<&str> = line.split(',').map(str::trim).collect();
            let [host, start, end] = fields[..] else {
                return Err(malformed(at, "it should have three fields"));
            };
            let number = |field: &str| field.parse::<f64>().ok().filter(|n| n.is_finite());
            let (Some(start), Some(end)) = (number(start), number(end)) else {
                return Err(malformed(at, "start and end should be numbers of seconds"));
            };
            let intervals = hosts.entry(host).or_default();
            if end < start || intervals.last().is_some_and(|(_, before)| start < *before) {
                return Err(malformed(at, "intervals of a host should follow each other"));
            }
            intervals.push((start, end));
        }
        let intervals = || hosts.values().flatten();
        if hosts.is_empty() {
            return Err(malformed(1, "there is no interval"));
        }
        let first = intervals().map(|i| i.0).fold(f64::INFINITY, f64::min);
        let last = intervals().map(|i| i.1).fold(f64::NEG_INFINITY, f64::max);
        let hosts = hosts
            .values()
            .map(|list| list.iter().map(|(start, end)| (start - first, end - first)).collect())
            .collect();
        Ok(Availability { hosts, length_secs: last - first })
    }

    /// How many hosts there are.
    pub fn host_count(&self) -> usize {
        self.hosts.len()
    }

    /// From the first moment of the trace to its last, seconds.
    pub fn length_secs(&self) -> f64 {
        self.length_secs
    }

    /// When a host was up.
    pub fn intervals(&self, host: usize) -> &[(f64, f64)] {
        &self.hosts[host]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "host,start_s,end_s\n0,100,160\n0,200,260\n7,130,300\n";

    #[test]
    fn intervals_count_from_the_first_moment() {
        let trace = Availability::parse(TRACE).expect("valid");
        assert_eq!((trace.host_count(), trace.length_secs()), (2, 200.0));
        assert_eq!(trace.intervals(0), [(0.0, 60.0), (100.0, 160.0)]);
        assert_eq!(trace.intervals(1), [(30.0, 200.0)]);
    }

    #[test]
    fn a_bad_line_is_named() {
        let cases = [
            ("", "line 1:"),
            ("a,b\n", "host,start_s,end_s"),
            ("host,start_s,end_s\n", "no interval"),
            ("host,start_s,end_s\n1,2\n", "line 2: it should have three fields"),
            ("host,start_s,end_s\n1,2,x\n", "numbers"),
            ("host,start_s,end_s\n1,2,NaN\n", "numbers"),
            ("host,start_s,end_s\n1,5,2\n", "follow each other"),
            ("host,start_s,end_s\n1,0,9\n1,5,12\n", "line 3: intervals"),
        ];
        for (text, words) in cases {
            let error = Availability::parse(text).expect_err(text).to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn packed_files_are_unpacked() {
        let temp = tempfile::tempdir().expect("temp");
        let plain = temp.path().join("up.csv");
        std::fs::write(&plain, TRACE).expect("written");
        let read = read_availability(&plain).expect("valid");
        if let Ok(status) = Command::new("xz").arg(&plain).status() {
            assert!(status.success());
            let packed = temp.path().join("up.csv.xz");
            assert_eq!(read_availability(&packed).expect("valid"), read);
            let mut bytes = std::fs::read(&packed).expect("read");
            bytes.truncate(bytes.len() - 9);
            std::fs::write(&packed, bytes).expect("written");
            let error = read_availability(&packed).expect_err("cut short");
            assert!(matches!(error, InputError::Xz(_)), "{error}");
        }
    }

    #[test]
    fn a_file_that_is_no_matrix_is_refused() {
        let temp = tempfile::tempdir().expect("temp");
        let path = temp.path().join("rtt.txt");
        assert!(matches!(read_latency(&path), Err(InputError::Io(_))));
        std::fs::write(&path, "1 2\n3\n").expect("written");
        assert!(matches!(read_latency(&path), Err(InputError::Malformed(_))));
        std::fs::write(&path, "0 20\n20 0\n").expect("written");
        assert_eq!(read_latency(&path).expect("valid").rtt_us(0, 1), 20_000);
    }
}
