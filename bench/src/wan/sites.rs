//! Where the nodes are: round trips between them.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use atoll_sim::{HostConfig, HostId, Latency, RttMatrix, Sim, SimConfig};

/// Two rows of a matrix nearer than this are taken for one site.
const MIN_RTT: Duration = Duration::from_millis(5);

/// Round trips between sites, and where they are from.
#[derive(Clone, Debug)]
pub(crate) struct Sites {
    pub rtts: Vec<Vec<Duration>>,
    pub origin: String,
}

impl Sites {
    /// Points of a sphere (Pastis §4), the farthest 300 ms apart there and back: the mean
    /// is then 150 ms, near the 145 ms between the hosts of PlanetLab (R. Zhu et al.,
    /// IEEE/ACM ToN 25(2), 2017).
    pub(crate) fn on_a_sphere(count: usize, seed: u64) -> Sites {
        let max = Duration::from_millis(150);
        let latency = Latency::Sphere { max };
        let sim = Sim::new(SimConfig { seed, latency, ..SimConfig::default() });
        let hosts = sim.add_hosts(count, &HostConfig::default());
        let rtt = |a: &HostId, b: &HostId| sim.latency(*a, *b) + sim.latency(*b, *a);
        let rtts = hosts.iter().map(|a| hosts.iter().map(|b| rtt(a, b)).collect()).collect();
        Sites { rtts, origin: format!("synthetic: points of a sphere, seed {seed}") }
    }

    /// Rows of a matrix, drawn by `seed`, no two of them nearer than 5 ms.
    pub(crate) fn of_matrix(path: &Path, count: usize, seed: u64) -> Result<Sites, String> {
        let bytes = unpacked(path)?;
        let matrix = RttMatrix::parse(&bytes, 0).map_err(|error| error.to_string())?;
        let rtt = |a: u32, b: u32| Duration::from_micros(u64::from(matrix.rtt_us(a, b)));
        let mut rows: Vec<u32> = (0..matrix.host_count() as u32).collect();
        shuffle(&mut rows, seed);
        let mut chosen: Vec<u32> = Vec::new();
        for row in rows {
            let is_apart = |other: &u32| rtt(row, *other).min(rtt(*other, row)) >= MIN_RTT;
            if chosen.len() < count && chosen.iter().all(is_apart) {
                chosen.push(row);
            }
        }
        if chosen.len() < count {
            return Err(format!("{} has no {count} sites 5 ms apart", path.display()));
        }
        let rtts = chosen.iter().map(|a| chosen.iter().map(|b| rtt(*a, *b)).collect()).collect();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        Ok(Sites { rtts, origin: format!("{name}, rows {chosen:?} (seed {seed})") })
    }

    pub(crate) fn count(&self) -> usize {
        self.rtts.len()
    }

    /// There and back, which a matrix may say differently for the two directions.
    pub(crate) fn rtt(&self, a: usize, b: usize) -> Duration {
        (self.rtts[a][b] + self.rtts[b][a]) / 2
    }

    /// Half of the round trip each way.
    pub(crate) fn delays(&self) -> Vec<Vec<Duration>> {
        let row = |a| (0..self.count()).map(|b| self.rtt(a, b) / 2).collect();
        (0..self.count()).map(row).collect()
    }

    /// The same for the simulator.
    pub(crate) fn latency(&self) -> Latency {
        let ms = |rtt: Duration| format!("{:.3}", rtt.as_secs_f64() * 1e3);
        let line = |a| (0..self.count()).map(|b| ms(self.rtt(a, b))).collect::<Vec<_>>().join(",");
        let text = (0..self.count()).map(line).collect::<Vec<_>>().join("\n");
        let matrix = RttMatrix::parse(text.as_bytes(), 0).expect("a square of round trips");
        Latency::Matrix(Arc::new(matrix))
    }

    /// All round trips between different sites, sorted.
    pub(crate) fn sorted(&self) -> Vec<Duration> {
        let pairs = (0..self.count()).flat_map(|a| (0..a).map(move |b| (a, b)));
        let mut all: Vec<Duration> = pairs.map(|(a, b)| self.rtt(a, b)).collect();
        all.sort_unstable();
        all
    }
}

fn unpacked(path: &Path) -> Result<Vec<u8>, String> {
    if path.extension().is_none_or(|extension| extension != "xz") {
        return std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()));
    }
    let output = Command::new("xz").args(["-d", "-c"]).arg(path).output();
    let output = output.map_err(|error| format!("cannot run xz: {error}"))?;
    if output.status.success() {
        Ok(output.stdout)
    } else {
        Err(String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

/// Fisher and Yates, by splitmix64: the same on every machine.
fn shuffle(rows: &mut [u32], seed: u64) {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    for at in (1..rows.len()).rev() {
        rows.swap(at, (next() % (at as u64 + 1)) as usize);
    }
}
