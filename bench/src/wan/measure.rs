//! The runs: publish, read, stream, simulate.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use atoll_dht::{CacheAt, DhtConfig};
use atoll_key::{PeerId, VolumeAddress, VolumeId};
use atoll_sim::{Control, TcpModel};

use crate::options::Options;
use crate::predict::{Model, Setting};
use crate::ring::Ring;
use crate::router::{Lines, Traffic};
use crate::sites::Sites;
use crate::stream;
use crate::wide::Wide;
use atoll_bench::noise;

pub(crate) const SMALL_BYTES: u64 = 1 << 20;
/// Runs of a command that fetches nothing, for what a command costs by itself.
const EMPTY_RUNS: usize = 9;
/// Pause before a download: what came before is over, and connections have been idle.
const REST: Duration = Duration::from_secs(2);

/// One download by one site.
#[derive(Clone, Debug)]
pub(crate) struct Download {
    pub run: usize,
    pub publisher: usize,
    pub reader: usize,
    pub len_bytes: u64,
    /// What the reader's node received meanwhile: all but its own replicas, and what was
    /// asked for twice.
    pub received_bytes: u64,
    pub atoll: Duration,
    /// Packets through the router meanwhile.
    pub traffic: Traffic,
    pub predicted: Duration,
}

/// One TCP stream.
#[derive(Clone, Debug)]
pub(crate) struct Streamed {
    pub server: usize,
    pub reader: usize,
    pub len_bytes: u64,
    pub whole: Duration,
    pub three_quarters: Duration,
    pub predicted: Duration,
}

/// All that was measured.
pub(crate) struct Results {
    pub sites: Sites,
    pub downloads: Vec<Download>,
    pub streams: Vec<Streamed>,
    pub control: String,
    /// What a command takes that fetches nothing.
    pub empty: Duration,
}

/// A published file.
struct File {
    run: usize,
    publisher: usize,
    len_bytes: u64,
    /// Names of its copies that differ, one for each reader, or one for all.
    source: PathBuf,
    names: Vec<String>,
    address: String,
}

pub(crate) fn measure(options: &Options, temp: &Path) -> Results {
    let sites = options.sites().unwrap_or_else(|what| panic!("{what}"));
    let lines = Lines {
        delays: sites.delays(),
        rate_bytes_per_sec: options.rate_bytes_per_sec(),
        queue_bytes: options.queue_bytes(),
    };
    let wide = Wide::new(lines);
    let control = wide.setting("tcp_congestion_control");
    let ring = Ring::start(&wide, &options.atoll, temp, sites.count(), &options.up);
    eprintln!("{} nodes are up", sites.count());
    let identities: Vec<PeerId> = (0..sites.count()).map(|site| ring.identity(site)).collect();
    let empty = empty_command(&ring);
    let mut downloads = Vec::new();
    let mut files = Vec::new();
    for run in 0..options.runs {
        let publisher = (run * 5) % sites.count();
        for len_bytes in [SMALL_BYTES, options.large_bytes()] {
            let file = publish(&ring, temp, run, publisher, len_bytes, sites.count());
            for reader in options.readers() {
                if reader != publisher {
                    std::thread::sleep(REST);
                    downloads.push(download(&wide, &ring, temp, &file, reader));
                }
            }
            files.push(file);
        }
    }
    drop(ring);
    let mut streams = all_streams(&wide, options, &sites);
    drop(wide);
    eprintln!("simulating");
    let setting = Setting {
        sites: &sites,
        rate_bytes_per_sec: options.rate_bytes_per_sec(),
        tcp: tcp_model(&control, options),
        identities,
        config: without_cache(),
        seed: options.seed,
    };
    predict(&setting, &files, &mut downloads, &mut streams);
    Results { sites, downloads, streams, control, empty }
}

/// A node as `--cache 0` makes it.
pub(crate) fn without_cache() -> DhtConfig {
    DhtConfig { cache_at: CacheAt::Off, cache_bytes: 0, ..DhtConfig::default() }
}

/// The system's TCP, as the simulator models it.
pub(crate) fn tcp_model(control: &str, options: &Options) -> TcpModel {
    let control = match control {
        "bbr" => Control::Bbr,
        "reno" => Control::Reno,
        _ => Control::Cubic,
    };
    let queue_bytes = Some(options.queue_bytes() as u64);
    TcpModel { control, queue_bytes, ..TcpModel::today() }
}

fn empty_command(ring: &Ring) -> Duration {
    let mut all: Vec<Duration> = (0..EMPTY_RUNS).map(|_| ring.run(0, &["volumes"]).1).collect();
    all.sort_unstable();
    all[EMPTY_RUNS / 2]
}

fn publish(
    ring: &Ring,
    temp: &Path,
    run: usize,
    publisher: usize,
    len_bytes: u64,
    copies: usize,
) -> File {
    // Of the small file each reader has one of its own.
    let copies = if len_bytes == SMALL_BYTES { copies } else { 1 };
    let name = format!("run{run}-{}", len_bytes >> 20);
    let source = temp.join(&name);
    fs::create_dir(&source).expect("a directory");
    let names: Vec<String> = (0..copies).map(|copy| format!("data{copy}")).collect();
    for (copy, file) in names.iter().enumerate() {
        let seed = (run * 1000 + copy) as u64 ^ len_bytes << 20;
        fs::write(source.join(file), noise(len_bytes as usize, seed)).expect("a file");
    }
    eprintln!("run {run}: site {publisher} publishes {copies} x {} MiB", len_bytes >> 20);
    let address = ring.publish(publisher, &name, &source);
    File { run, publisher, len_bytes, source, names, address }
}

impl File {
    fn name_for(&self, reader: usize) -> &str {
        &self.names[reader % self.names.len()]
    }

    fn volume(&self) -> VolumeId {
        let address: VolumeAddress = self.address.parse().expect("publish printed it");
        address.0
    }
}

fn download(wide: &Wide, ring: &Ring, temp: &Path, file: &File, reader: usize) -> Download {
    let path = format!("{}/{}", file.address, file.name_for(reader));
    let copy = temp.join("download");
    wide.router.take_traffic();
    let before = ring.received_bytes(reader);
    let atoll = ring.cat(reader, &path, &copy);
    let traffic = wide.router.take_traffic();
    let received_bytes = ring.received_bytes(reader) - before;
    let original = file.source.join(file.name_for(reader));
    let same = fs::read(&copy).expect("it was written") == fs::read(original).expect("it is there");
    assert!(same, "{path} arrived changed");
    fs::remove_file(copy).expect("it is there");
    let (run, publisher, len_bytes) = (file.run, file.publisher, file.len_bytes);
    eprintln!(
        "  site {reader}: {} MiB in {:.3} s, {:.0} % of them received",
        len_bytes >> 20,
        atoll.as_secs_f64(),
        received_bytes as f64 / len_bytes as f64 * 100.0
    );
    let predicted = Duration::ZERO;
    Download { run, publisher, reader, len_bytes, received_bytes, atoll, traffic, predicted }
}

/// Small streams from all sites to each reader, a large one from the site in the middle of
/// all by distance.
fn all_streams(wide: &Wide, options: &Options, sites: &Sites) -> Vec<Streamed> {
    let _servers = stream::start_servers(wide, sites.count());
    std::thread::sleep(REST);
    let mut streams = Vec::new();
    for reader in options.readers() {
        let mut servers: Vec<usize> = (0..sites.count()).filter(|site| *site != reader).collect();
        servers.sort_by_key(|server| sites.rtt(reader, *server));
        eprintln!("streams to site {reader}");
        for (rank, server) in servers.iter().copied().enumerate() {
            let is_in_the_middle = rank == servers.len() / 2;
            let sizes = [Some(SMALL_BYTES), is_in_the_middle.then_some(options.large_bytes())];
            for len_bytes in sizes.into_iter().flatten() {
                let took = stream::measure(wide, reader, server, len_bytes);
                let (whole, three_quarters) = (took.whole, took.three_quarters);
                let predicted = Duration::ZERO;
                let streamed =
                    Streamed { server, reader, len_bytes, whole, three_quarters, predicted };
                streams.push(streamed);
            }
        }
    }
    streams
}

fn predict(
    setting: &Setting<'_>,
    files: &[File],
    downloads: &mut [Download],
    streams: &mut [Streamed],
) {
    let model = Model::new(setting);
    for file in files {
        let tree = model.publish(file.publisher, &file.source, file.volume());
        let of_file = |download: &&mut Download| {
            (download.run, download.len_bytes) == (file.run, file.len_bytes)
        };
        for download in downloads.iter_mut().filter(of_file) {
            let name = file.name_for(download.reader);
            download.predicted = model.read(download.reader, &tree, name).took;
        }
    }
    for streamed in streams {
        let Streamed { server, reader, len_bytes, .. } = *streamed;
        streamed.predicted = model.stream(server, reader, len_bytes);
    }
}
