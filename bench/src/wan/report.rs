//! What is printed and written.

use std::fmt::Write as _;
use std::time::Duration;

use crate::measure::{Download, Results, SMALL_BYTES, Streamed};
use crate::options::Options;
use atoll_bench::{machine, today};

pub(crate) fn write(options: &Options, results: &Results) {
    let text = text(options, results);
    print!("{text}");
    if let Some(dir) = &options.out {
        std::fs::create_dir_all(dir).expect("a directory");
        std::fs::write(dir.join("wan.md"), text).expect("wan.md");
        std::fs::write(dir.join("wan.csv"), csv(results)).expect("wan.csv");
    }
}

pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[middle],
        _ => (values[middle - 1] + values[middle]) / 2.0,
    }
}

fn secs(values: impl Iterator<Item = Duration>) -> f64 {
    median(values.map(|value| value.as_secs_f64()).collect())
}

/// What one site saw, or the medians over all.
#[derive(Clone, Copy)]
struct Row {
    rtt_ms: f64,
    received: f64,
    atoll: f64,
    predicted: f64,
    /// The prediction as a share of what it took.
    share: f64,
    stream: f64,
    stream_three_quarters: f64,
    stream_predicted: f64,
    stream_share: f64,
    publisher_stream: f64,
    times_as_fast: f64,
}

fn row(results: &Results, reader: usize, len_bytes: u64) -> Row {
    let of = |d: &&Download| d.reader == reader && d.len_bytes == len_bytes;
    let downloads: Vec<&Download> = results.downloads.iter().filter(of).collect();
    let of = |s: &&Streamed| s.reader == reader && s.len_bytes == len_bytes;
    let streams: Vec<&Streamed> = results.streams.iter().filter(of).collect();
    let sites = &results.sites;
    let others = (0..sites.count()).filter(|site| *site != reader);
    let from_publisher =
        streams.iter().filter(|s| downloads.iter().any(|d| d.publisher == s.server));
    let atoll = secs(downloads.iter().map(|d| d.atoll));
    let predicted = secs(downloads.iter().map(|d| d.predicted + results.empty));
    let stream = secs(streams.iter().map(|s| s.whole));
    let stream_predicted = secs(streams.iter().map(|s| s.predicted));
    let received = downloads.iter().map(|d| d.received_bytes as f64 / d.len_bytes as f64);
    Row {
        rtt_ms: secs(others.map(|site| sites.rtt(reader, site))) * 1e3,
        received: median(received.collect()),
        atoll,
        predicted,
        share: predicted / atoll,
        stream,
        stream_three_quarters: secs(streams.iter().map(|s| s.three_quarters)),
        stream_predicted,
        stream_share: stream_predicted / stream,
        publisher_stream: secs(from_publisher.map(|s| s.whole)),
        times_as_fast: stream / atoll,
    }
}

fn medians(rows: &[(usize, Row)]) -> Row {
    let of = |value: fn(&Row) -> f64| {
        let values = rows.iter().map(|(_, row)| value(row));
        median(values.filter(|value| !value.is_nan()).collect())
    };
    Row {
        rtt_ms: of(|row| row.rtt_ms),
        received: of(|row| row.received),
        atoll: of(|row| row.atoll),
        predicted: of(|row| row.predicted),
        share: of(|row| row.share),
        stream: of(|row| row.stream),
        stream_three_quarters: of(|row| row.stream_three_quarters),
        stream_predicted: of(|row| row.stream_predicted),
        stream_share: of(|row| row.stream_share),
        publisher_stream: of(|row| row.publisher_stream),
        times_as_fast: of(|row| row.times_as_fast),
    }
}

fn text(options: &Options, results: &Results) -> String {
    let mut out = String::new();
    let mut line = |text: String| writeln!(out, "{text}").expect("a String");
    let rtts = results.sites.sorted();
    let at = |share: f64| rtts[((rtts.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e3;
    line("# Downloads over a wide-area network\n".into());
    line(format!("Measured {} by `make bench-wan` on {}.\n", today(), machine()));
    line(format!(
        "{} `atoll` processes in network namespaces joined by a router in user space, three \
         copies of every\nblock, caches off. Sites: {}.\nRound trips between them: {:.0} to {:.0} \
         ms, median {:.0} ms. Access lines of {} Mbit/s either way with\n{} KiB of queue. TCP: {}, \
         the system's defaults. Runs: {}, each with files of its own, published\nfrom another \
         site; medians.\n",
        results.sites.count(),
        results.sites.origin,
        at(0.0),
        at(1.0),
        at(0.5),
        options.mbit,
        options.queue_kib,
        results.control,
        options.runs,
    ));
    line(format!(
        "Atoll: `atoll cat` of a file through the node of the site, the whole command. TCP: one \
         fresh connection,\nmemory to memory, without TLS: of 1 MiB the median over all other \
         sites as senders, of the large file from\nthe site in the middle of them by distance. \
         With three copies on {} nodes the reader's own node holds a\nquarter of the blocks: \
         *received* is what came from others, with what was asked for twice, and TCP's time\nfor \
         three quarters of the bytes is given beside. *Times as fast* compares whole files. \
         Predicted: the same\ncode, places, files and network in the simulator, and {:.1} ms for \
         a command that fetches nothing.\n",
        results.sites.count(),
        results.empty.as_secs_f64() * 1e3,
    ));
    for len_bytes in [SMALL_BYTES, options.large_bytes()] {
        let readers = options.readers().into_iter();
        let rows: Vec<(usize, Row)> = readers
            .map(|reader| (reader, row(results, reader, len_bytes)))
            .filter(|(_, row)| !row.atoll.is_nan())
            .collect();
        table(&mut line, len_bytes, &rows);
    }
    out
}

/// Seconds, or nothing where nothing was measured.
fn shown(secs: f64) -> String {
    if secs.is_nan() { "–".into() } else { format!("{secs:.3}") }
}

fn measured_line(name: &str, row: &Row) -> String {
    format!(
        "| {name} | {:.0} | {:.0} % | {} | {} | {} | {} | {:.2} |",
        row.rtt_ms,
        row.received * 100.0,
        shown(row.atoll),
        shown(row.stream),
        shown(row.stream_three_quarters),
        shown(row.publisher_stream),
        row.times_as_fast,
    )
}

fn predicted_line(name: &str, row: &Row) -> String {
    format!(
        "| {name} | {} | {} | {:+.0} % | {} | {} | {:+.0} % |",
        shown(row.atoll),
        shown(row.predicted),
        (row.share - 1.0) * 100.0,
        shown(row.stream),
        shown(row.stream_predicted),
        (row.stream_share - 1.0) * 100.0,
    )
}

fn table(line: &mut impl FnMut(String), len_bytes: u64, rows: &[(usize, Row)]) {
    line(format!("## {} MiB\n", len_bytes >> 20));
    line(
        "| site | RTT, ms | received | Atoll, s | TCP, s | TCP for ¾ of it, s | \
         TCP from the publisher, s | times as fast |\n|---|---|---|---|---|---|---|---|"
            .into(),
    );
    let medians = medians(rows);
    for (site, row) in rows {
        line(measured_line(&site.to_string(), row));
    }
    line(measured_line("median", &medians));
    line(
        "\n| site | Atoll, s | predicted, s | off by | TCP, s | predicted, s | off by |\n\
         |---|---|---|---|---|---|---|"
            .into(),
    );
    for (site, row) in rows {
        line(predicted_line(&site.to_string(), row));
    }
    line(predicted_line("median", &medians) + "\n");
}

fn csv(results: &Results) -> String {
    let mut out = String::from(
        "what,run,server,reader,bytes,received_bytes,dropped_packets,seconds,predicted_seconds\n",
    );
    for d in &results.downloads {
        let predicted = (d.predicted + results.empty).as_secs_f64();
        writeln!(
            out,
            "atoll,{},{},{},{},{},{},{:.6},{:.6}",
            d.run,
            d.publisher,
            d.reader,
            d.len_bytes,
            d.received_bytes,
            d.traffic.dropped,
            d.atoll.as_secs_f64(),
            predicted
        )
        .expect("a String");
    }
    for s in &results.streams {
        writeln!(
            out,
            "tcp,,{},{},{},,,{:.6},{:.6}",
            s.server,
            s.reader,
            s.len_bytes,
            s.whole.as_secs_f64(),
            s.predicted.as_secs_f64()
        )
        .expect("a String");
    }
    out
}
