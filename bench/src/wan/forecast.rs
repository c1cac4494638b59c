//! What the simulator says by itself: the same setting without a real ring, for trying out
//! changes. The same every time, and no machine need be quiet for it; the real run decides.

use std::fs;
use std::time::Duration;

use atoll_key::{PeerId, SecretKey, VolumeId};

use crate::measure::{SMALL_BYTES, tcp_model, without_cache};
use crate::options::Options;
use crate::predict::{Model, Reading, Setting};
use crate::report::median;
use atoll_bench::noise;

/// Readings of one site at one size, one for each run, and the streams to it.
struct Site {
    readings: Vec<Reading>,
    streams: Vec<Duration>,
}

pub(crate) fn print(options: &Options) {
    let sites = options.sites().unwrap_or_else(|what| panic!("{what}"));
    let setting = Setting {
        sites: &sites,
        rate_bytes_per_sec: options.rate_bytes_per_sec(),
        tcp: tcp_model("bbr", options),
        identities: (0..sites.count()).map(|site| identity(options.places, site)).collect(),
        config: without_cache(),
        seed: options.places,
    };
    let model = Model::new(&setting);
    println!("sites: {}", sites.origin);
    for len_bytes in [SMALL_BYTES, options.large_bytes()] {
        let mut rows: Vec<(usize, Site)> = options
            .readers()
            .into_iter()
            .map(|reader| (reader, Site { readings: Vec::new(), streams: Vec::new() }))
            .collect();
        for run in 0..options.runs {
            read_everywhere(&model, options, sites.count(), run, len_bytes, &mut rows);
        }
        for (reader, site) in &mut rows {
            let mut servers: Vec<usize> = (0..sites.count()).filter(|s| s != reader).collect();
            servers.sort_by_key(|server| sites.rtt(*reader, *server));
            if len_bytes != SMALL_BYTES {
                servers = vec![servers[servers.len() / 2]];
            }
            let streams = servers.iter().map(|server| model.stream(*server, *reader, len_bytes));
            site.streams = streams.collect();
        }
        table(len_bytes, &rows);
    }
}

fn read_everywhere(
    model: &Model,
    options: &Options,
    count: usize,
    run: usize,
    len_bytes: u64,
    rows: &mut [(usize, Site)],
) {
    let publisher = (run * 5) % count;
    let temp = tempfile::tempdir().expect("a directory");
    let copies = if len_bytes == SMALL_BYTES { count } else { 1 };
    for copy in 0..copies {
        let seed = (run * 1000 + copy) as u64 ^ len_bytes << 20 ^ options.places << 50;
        let path = temp.path().join(format!("data{copy}"));
        fs::write(path, noise(len_bytes as usize, seed)).expect("a file");
    }
    let volume = VolumeId(secret(options.places, 1000 + run).public());
    let tree = model.publish(publisher, temp.path(), volume);
    for (reader, site) in rows.iter_mut().filter(|(reader, _)| *reader != publisher) {
        let name = format!("data{}", *reader % copies);
        site.readings.push(model.read(*reader, &tree, &name));
    }
}

fn secret(seed: u64, number: usize) -> SecretKey {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_be_bytes());
    bytes[8..16].copy_from_slice(&(number as u64).to_be_bytes());
    SecretKey::from_seed(&bytes)
}

fn identity(seed: u64, site: usize) -> PeerId {
    PeerId(secret(seed, site).public())
}

fn table(len_bytes: u64, rows: &[(usize, Site)]) {
    println!("\n{} MiB\n site  atoll s  TCP s  times  received  hedges  won", len_bytes >> 20);
    let mut all = Vec::new();
    for (reader, site) in rows.iter().filter(|(_, site)| !site.readings.is_empty()) {
        let of = |value: fn(&Reading) -> f64| median(site.readings.iter().map(value).collect());
        let atoll = of(|reading| reading.took.as_secs_f64());
        let tcp = median(site.streams.iter().map(Duration::as_secs_f64).collect());
        let received = of(|reading| reading.received_bytes as f64) / len_bytes as f64 * 100.0;
        let hedges = of(|reading| reading.hedges as f64);
        let won = of(|reading| reading.hedges_won as f64);
        all.push((atoll, tcp, received));
        println!(
            "{reader:5}  {atoll:7.3}  {tcp:5.2}  {:5.2}  {received:6.0} %  {hedges:6}  {won:3}",
            tcp / atoll
        );
    }
    let of = |value: fn(&(f64, f64, f64)) -> f64| median(all.iter().map(value).collect());
    let times = of(|(atoll, tcp, _)| tcp / atoll);
    let (atoll, tcp, received) = (of(|row| row.0), of(|row| row.1), of(|row| row.2));
    println!("median {atoll:7.3}  {tcp:5.2}  {times:5.2}  {received:6.0} %");
}
