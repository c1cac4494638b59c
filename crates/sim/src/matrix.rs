//! Measured round trips between hosts, from a file.
//!
//! Two formats, told apart by the first bytes. LATM, uncompressed:
//!
//! | offset | bytes | field, little-endian |
//! |---|---|---|
//! | 0 | 4 | magic `LATM` |
//! | 4 | 2 | version, 1 |
//! | 6 | 2 | number *n* of hosts |
//! | 8 | 2 | number of slices |
//! | 10 | 2 | flags, ignored |
//! | 12 | 2·n·n·slices | round trips in 0.1 ms, `[slice][source][destination]`; 0xFFFF missing, 0xFFFE too long |
//!
//! Text: n lines of n round trips in milliseconds, separated by commas or blanks, an
//! empty field, `-` or `nan` where one is missing; or, with a first line that names the
//! columns `src`, `dst` and `rtt_avg_ms`, one line for each pair. `#` begins a comment.
//!
//! A missing round trip is taken from the other direction, else it is the median of all
//! between different hosts; on the diagonal it is zero.

use std::collections::BTreeMap;
use std::path::Path;

/// Most hosts in a matrix: 64 MiB of round trips.
const MAX_MATRIX_HOSTS: usize = 4096;

const MISSING: u32 = u32::MAX;
const LATM_MISSING: u16 = 0xFFFF;
const LATM_HEADER_BYTES: usize = 12;

/// A square of round trips, complete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RttMatrix {
    host_count: usize,
    rtts_us: Vec<u32>,
}

/// Why a file is not a matrix.
#[derive(Debug, thiserror::Error)]
pub enum MatrixError {
    /// The file cannot be read.
    #[error("cannot read the latency matrix: {0}")]
    Io(#[from] std::io::Error),
    /// It is compressed; only plain files are read.
    #[error("the latency matrix is compressed; unpack it first")]
    Compressed,
    /// Its content is not a matrix.
    #[error("not a latency matrix: {0}")]
    Malformed(String),
}

fn malformed(why: impl Into<String>) -> MatrixError {
    MatrixError::Malformed(why.into())
}

impl RttMatrix {
    /// Reads a file of either format; of LATM, slice number `slice`.
    pub fn read(path: &Path, slice: usize) -> Result<RttMatrix, MatrixError> {
        RttMatrix::parse(&std::fs::read(path)?, slice)
    }

    /// Reads either format; of LATM, slice number `slice`.
    pub fn parse(bytes: &[u8], slice: usize) -> Result<RttMatrix, MatrixError> {
        if bytes.starts_with(b"\xfd7zXZ\0") || bytes.starts_with(b"\x28\xb5\x2f\xfd") {
            return Err(MatrixError::Compressed);
        }
        if bytes.starts_with(b"LATM") {
            return parse_latm(bytes, slice);
        }
        let text = std::str::from_utf8(bytes).map_err(|_| malformed("neither LATM nor text"))?;
        let mut lines = text
            .lines()
            .map(|line| line.split('#').next().unwrap_or("").trim())
            .zip(1..)
            .filter(|(line, _)| !line.is_empty())
            .peekable();
        let (first, _) = lines.peek().ok_or_else(|| malformed("it is empty"))?;
        if first.split(',').any(|column| column.trim() == "src") {
            parse_pairs(lines)
        } else {
            parse_square(lines)
        }
    }

    /// Number of rows.
    pub fn host_count(&self) -> usize {
        self.host_count
    }

    /// Microseconds there and back.
    ///
    /// # Panics
    /// If a row does not exist.
    pub fn rtt_us(&self, from: u32, to: u32) -> u32 {
        assert!((to as usize) < self.host_count, "the matrix has no such column");
        self.rtts_us[from as usize * self.host_count + to as usize]
    }

    /// Fills the holes.
    fn complete(host_count: usize, mut rtts_us: Vec<u32>) -> Result<RttMatrix, MatrixError> {
        let place = |a: usize, b: usize| a * host_count + b;
        let pairs = || (0..host_count).flat_map(|a| (0..host_count).map(move |b| (a, b)));
        let mut known: Vec<u32> = pairs()
            .filter(|(a, b)| a != b && rtts_us[place(*a, *b)] != MISSING)
            .map(|(a, b)| rtts_us[place(a, b)])
            .collect();
        if known.is_empty() && host_count > 1 {
            return Err(malformed("no round trip between two hosts is known"));
        }
        known.sort_unstable();
        let median = known.get(known.len() / 2).copied().unwrap_or(0);
        for (a, b) in pairs() {
            if rtts_us[place(a, b)] == MISSING {
                let back = rtts_us[place(b, a)];
                let fill = if back == MISSING { median } else { back };
                rtts_us[place(a, b)] = if a == b { 0 } else { fill };
            }
        }
        Ok(RttMatrix { host_count, rtts_us })
    }
}

fn check_host_count(host_count: usize) -> Result<(), MatrixError> {
    if host_count == 0 || host_count > MAX_MATRIX_HOSTS {
        return Err(malformed(format!("{host_count} hosts; 1 to {MAX_MATRIX_HOSTS} are read")));
    }
    Ok(())
}

fn parse_latm(bytes: &[u8], slice: usize) -> Result<RttMatrix, MatrixError> {
    let (header, values) = bytes
        .split_at_checked(LATM_HEADER_BYTES)
        .ok_or_else(|| malformed("the header is cut short"))?;
    let field = |at: usize| usize::from(u16::from_le_bytes([header[at], header[at + 1]]));
    let (version, host_count, slice_count) = (field(4), field(6), field(8));
    if version != 1 {
        return Err(malformed(format!("LATM version {version}; only 1 is known")));
    }
    check_host_count(host_count)?;
    if slice >= slice_count {
        return Err(malformed(format!("no slice {slice}; there are {slice_count}")));
    }
    let slice_bytes = host_count * host_count * 2;
    if values.len() != slice_bytes * slice_count {
        return Err(malformed(format!("{} bytes of round trips", values.len())));
    }
    let rtts_us = values[slice * slice_bytes..][..slice_bytes]
        .chunks_exact(2)
        .map(|pair| match u16::from_le_bytes([pair[0], pair[1]]) {
            LATM_MISSING => MISSING,
            // Too long (0xFFFE) reads as the 6553.4 ms that it is at least.
            tenths => u32::from(tenths) * 100,
        })
        .collect();
    RttMatrix::complete(host_count, rtts_us)
}

/// What is wrong with a line and what should be there; never what is there, for the file may
/// be one that is not meant to be shown.
fn bad_line(number: usize, why: impl std::fmt::Display) -> MatrixError {
    malformed(format!("line {number}: {why}"))
}

fn parse_ms(field: &str, number: usize) -> Result<u32, MatrixError> {
    let field = field.trim();
    if matches!(field, "" | "-" | "nan" | "NaN") {
        return Ok(MISSING);
    }
    let ms = field.parse::<f64>().ok().filter(|ms| (0.0..=1e6).contains(ms));
    let wanted = "round trips in milliseconds are expected, numbers from 0 to 1000000";
    ms.map(|ms| (ms * 1000.0).round() as u32).ok_or_else(|| bad_line(number, wanted))
}

/// Lines come with their numbers.
fn parse_square<'a>(
    lines: impl Iterator<Item = (&'a str, usize)>,
) -> Result<RttMatrix, MatrixError> {
    let mut rtts_us = Vec::new();
    let mut host_count = 0;
    for (row, (line, number)) in lines.enumerate() {
        let before = rtts_us.len();
        let mut take = |field| parse_ms(field, number).map(|us| rtts_us.push(us));
        if line.contains(',') {
            line.split(',').try_for_each(&mut take)?;
        } else {
            line.split_whitespace().try_for_each(&mut take)?;
        }
        let width = rtts_us.len() - before;
        if row == 0 {
            check_host_count(width)?;
            host_count = width;
        }
        if width != host_count || row >= host_count {
            let why = match row < host_count {
                true => format!("there are {width} round trips, not {host_count} as before"),
                false => format!("there are more than {host_count} rows of {host_count}"),
            };
            return Err(bad_line(number, why));
        }
    }
    if rtts_us.len() != host_count * host_count {
        return Err(malformed(format!("{} rows, not {host_count}", rtts_us.len() / host_count)));
    }
    RttMatrix::complete(host_count, rtts_us)
}

/// Lines come with their numbers.
fn parse_pairs<'a>(
    mut lines: impl Iterator<Item = (&'a str, usize)>,
) -> Result<RttMatrix, MatrixError> {
    let (header, number) = lines.next().unwrap_or(("", 1));
    let columns: Vec<&str> = header.split(',').map(str::trim).collect();
    let column = |name: &str| {
        let found = columns.iter().position(|column| *column == name);
        found.ok_or_else(|| bad_line(number, format!("there is no column {name}")))
    };
    let (source, destination, rtt) = (column("src")?, column("dst")?, column("rtt_avg_ms")?);
    let mut pairs = Vec::new();
    let mut rows = BTreeMap::new();
    for (line, number) in lines {
        let fields: Vec<&str> = line.split(',').map(str::trim).collect();
        let field = |at: usize| {
            let missing = || bad_line(number, format!("there is no column {}", at + 1));
            fields.get(at).copied().ok_or_else(missing)
        };
        let (from, to) = (field(source)?, field(destination)?);
        rows.insert(from, 0);
        rows.insert(to, 0);
        pairs.push((from, to, parse_ms(field(rtt)?, number)?));
    }
    check_host_count(rows.len())?;
    // Hosts in the order of their names.
    rows.values_mut().enumerate().for_each(|(row, number)| *number = row);
    let host_count = rows.len();
    let mut rtts_us = vec![MISSING; host_count * host_count];
    for (from, to, us) in pairs {
        rtts_us[rows[from] * host_count + rows[to]] = us;
    }
    RttMatrix::complete(host_count, rtts_us)
}
