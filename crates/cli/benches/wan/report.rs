//! What is printed and written.

use std::fmt::Write as _;
use std::time::Duration;

use crate::measure::{Download, Results, SMALL_BYTES, Streamed};
use crate::options::Options;

pub fn write(options: &Options, results: &Results) {
    let text = text(options, results);
    print!("{text}");
    if let Some(dir) = &options.out {
        std::fs::create_dir_all(dir).expect("a directory");
        std::fs::write(dir.join("wan.md"), text).expect("wan.md");
        std::fs::write(dir.join("wan.csv"), csv(results)).expect("wan.csv");
    }
}

fn median(mut values: Vec<f64>) -> f64 {
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

struct Row {
    reader: usize,
    rtt_ms: f64,
    received: f64,
    atoll: f64,
    predicted: f64,
    stream: f64,
    stream_three_quarters: f64,
    stream_predicted: f64,
    publisher_stream: f64,
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
    Row {
        reader,
        rtt_ms: secs(others.map(|site| sites.rtt(reader, site))) * 1e3,
        received: median(
            downloads.iter().map(|d| d.received_bytes as f64 / d.len_bytes as f64).collect(),
        ),
        atoll: secs(downloads.iter().map(|d| d.atoll)),
        predicted: secs(downloads.iter().map(|d| d.predicted + results.empty)),
        stream: secs(streams.iter().map(|s| s.whole)),
        stream_three_quarters: secs(streams.iter().map(|s| s.three_quarters)),
        stream_predicted: secs(streams.iter().map(|s| s.predicted)),
        publisher_stream: secs(from_publisher.map(|s| s.whole)),
    }
}

fn text(options: &Options, results: &Results) -> String {
    let mut out = String::new();
    let mut line = |text: String| writeln!(out, "{text}").expect("a String");
    let rtts = results.sites.sorted();
    let at = |share: f64| rtts[((rtts.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e3;
    line(format!("Sites: {}.", results.sites.origin));
    line(format!(
        "Round trips between them: {:.0} to {:.0} ms, median {:.0} ms. Access lines of {} Mbit/s \
         either way with {} KiB of queue. TCP: {}, the system's defaults. {} run(s). A command \
         that fetches nothing takes {:.1} ms, which the predictions include.\n",
        at(0.0),
        at(1.0),
        at(0.5),
        options.mbit,
        options.queue_kib,
        results.control,
        options.runs,
        results.empty.as_secs_f64() * 1e3,
    ));
    for len_bytes in [SMALL_BYTES, options.large_bytes()] {
        let readers = options.readers().into_iter();
        let rows: Vec<Row> = readers
            .map(|reader| row(results, reader, len_bytes))
            .filter(|row| !row.atoll.is_nan())
            .collect();
        table(&mut line, len_bytes, &rows);
    }
    out
}

/// Seconds, or nothing where nothing was measured.
fn shown(secs: f64) -> String {
    if secs.is_nan() { "–".into() } else { format!("{secs:.3}") }
}

fn measured_line(name: &str, of: &dyn Fn(&dyn Fn(&Row) -> f64) -> f64) -> String {
    format!(
        "| {name} | {:.0} | {:.0} % | {} | {} | {} | {} | {:.2} |",
        of(&|r| r.rtt_ms),
        of(&|r| r.received) * 100.0,
        shown(of(&|r| r.atoll)),
        shown(of(&|r| r.stream)),
        shown(of(&|r| r.stream_three_quarters)),
        shown(of(&|r| r.publisher_stream)),
        of(&|r| r.stream / r.atoll),
    )
}

fn predicted_line(name: &str, of: &dyn Fn(&dyn Fn(&Row) -> f64) -> f64) -> String {
    let percent = |ratio: f64| (ratio - 1.0) * 100.0;
    format!(
        "| {name} | {} | {} | {:+.0} % | {} | {} | {:+.0} % |",
        shown(of(&|r| r.atoll)),
        shown(of(&|r| r.predicted)),
        percent(of(&|r| r.predicted / r.atoll)),
        shown(of(&|r| r.stream)),
        shown(of(&|r| r.stream_predicted)),
        percent(of(&|r| r.stream_predicted / r.stream)),
    )
}

fn table(line: &mut impl FnMut(String), len_bytes: u64, rows: &[Row]) {
    line(format!("### {} MiB\n", len_bytes >> 20));
    line(
        "| site | RTT, ms | received | Atoll, s | TCP, s | TCP for ¾ of it, s | \
         TCP from the publisher, s | times as fast |\n|---|---|---|---|---|---|---|---|"
            .into(),
    );
    let median_of = |value: &dyn Fn(&Row) -> f64| median(rows.iter().map(value).collect());
    for row in rows {
        line(measured_line(&row.reader.to_string(), &|value| value(row)));
    }
    line(measured_line("median", &median_of));
    line(
        "\n| site | Atoll, s | predicted, s | off by | TCP, s | predicted, s | off by |\n\
         |---|---|---|---|---|---|---|"
            .into(),
    );
    for row in rows {
        line(predicted_line(&row.reader.to_string(), &|value| value(row)));
    }
    line(predicted_line("median", &median_of) + "\n");
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
