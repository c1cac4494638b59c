//! Twelve sites like those of CFS §7.1: "9 of them are at sites spread over the United
//! States, and the other three are in the Netherlands, Sweden, and South Korea", some of
//! the American ones on cable modems.
//!
//! The paper does not name them. The names here are of sites of the RON testbed
//! (Andersen et al., "Resilient Overlay Networks", SOSP 2001); their links are guesses
//! from what such links carried: Ethernet at universities, a T1, the cable service of the
//! day with its slow upstream.
//!
//! A round trip takes the time of the great circle at 4/9 of the speed of light, at which
//! packets travel at best (Katz-Bassett et al., "Towards IP Geolocation Using Delay and
//! Topology Measurements", IMC 2006), times [`DETOUR`], and the access lines' delay. With
//! a latency file it is that of twelve of the file's hosts, chosen by the seed, and only
//! the links stay.

use std::fmt::Write as _;
use std::sync::Arc;
#[cfg(test)]
use std::time::Duration;

use atoll_sim::{HostConfig, RttMatrix};

use crate::LabError;

/// How much longer than best the paths are. Chosen so that three RPCs between different
/// sites and the transmission of a block take the paper's 430 ms on average.
pub(crate) const DETOUR: f64 = 1.75;

const LIGHT_KM_PER_MS: f64 = 299.792_458;
const EARTH_KM: f64 = 6371.0;

const MEGABIT: u64 = 1_000_000 / 8;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Link {
    Campus,
    T1,
    Cable,
}

impl Link {
    /// Bytes a second, up and down.
    fn rates(self) -> (u64, u64) {
        match self {
            // Shared Ethernet; a guess.
            Link::Campus => (10 * MEGABIT, 10 * MEGABIT),
            Link::T1 => (1_544_000 / 8, 1_544_000 / 8),
            // A guess.
            Link::Cable => (300_000 / 8, 3 * MEGABIT / 2),
        }
    }

    /// What the line adds to a round trip; guesses.
    fn delay_ms(self) -> f64 {
        match self {
            Link::Campus => 0.5,
            Link::T1 => 5.0,
            Link::Cable => 10.0,
        }
    }
}

struct Site {
    name: &'static str,
    latitude: f64,
    longitude: f64,
    link: Link,
}

const fn site(name: &'static str, latitude: f64, longitude: f64, link: Link) -> Site {
    Site { name, latitude, longitude, link }
}

const SITES: [Site; COUNT] = [
    site("MIT", 42.36, -71.09, Link::Campus),
    site("NYU", 40.73, -74.00, Link::Campus),
    site("Cornell", 42.45, -76.48, Link::Campus),
    site("CMU", 40.44, -79.94, Link::Campus),
    site("Utah", 40.76, -111.85, Link::Campus),
    site("Aros", 40.71, -111.89, Link::Campus),
    site("CA-T1", 37.56, -122.27, Link::T1),
    site("MA-Cable", 42.37, -71.11, Link::Cable),
    site("NC-Cable", 35.99, -78.90, Link::Cable),
    site("VU-NL", 52.33, 4.87, Link::Campus),
    site("Lulea", 65.62, 22.14, Link::Campus),
    site("Korea", 36.37, 127.36, Link::Campus),
];

/// How many sites there are.
pub(crate) const COUNT: usize = 12;

/// A site's name.
pub(crate) fn name(at: usize) -> &'static str {
    SITES[at].name
}

/// The hosts' links, in the order of the sites.
pub(crate) fn hosts() -> Vec<HostConfig> {
    let host = |site: &Site| {
        let (up, down) = site.link.rates();
        HostConfig {
            upload_bytes_per_sec: Some(up),
            download_bytes_per_sec: Some(down),
            ..HostConfig::default()
        }
    };
    SITES.iter().map(host).collect()
}

/// Round trips between the sites: the model's, or those of twelve rows of a file.
pub(crate) fn round_trips(file: Option<&RttMatrix>, seed: u64) -> Result<Arc<RttMatrix>, LabError> {
    let ms: Vec<Vec<f64>> = match file {
        None => SITES.iter().map(|a| SITES.iter().map(|b| round_trip_ms(a, b)).collect()).collect(),
        Some(file) => {
            let rows = choose(file.host_count(), seed)?;
            let rtt = |a: &u32, b: &u32| f64::from(file.rtt_us(*a, *b)) / 1000.0;
            rows.iter().map(|a| rows.iter().map(|b| rtt(a, b)).collect()).collect()
        }
    };
    let mut text = String::new();
    for row in ms {
        let row: Vec<String> = row.iter().map(|ms| format!("{ms:.3}")).collect();
        writeln!(text, "{}", row.join(" ")).expect("a String takes everything");
    }
    let matrix = RttMatrix::parse(text.as_bytes(), 0);
    Ok(Arc::new(matrix.map_err(|error| LabError::Failed(error.to_string()))?))
}

/// Twelve different rows of a file.
fn choose(rows: usize, seed: u64) -> Result<Vec<u32>, LabError> {
    if rows < COUNT {
        let why = format!("the latency file has {rows} hosts; {COUNT} sites are needed");
        return Err(LabError::Options(why));
    }
    let sim = atoll_sim::Sim::new(atoll_sim::SimConfig { seed, ..Default::default() });
    let random = sim.outside();
    let mut all: Vec<u32> = (0..rows as u32).collect();
    for at in 0..COUNT {
        let chosen = at + atoll_env::random_below(&*random, (rows - at) as u64) as usize;
        all.swap(at, chosen);
    }
    all.truncate(COUNT);
    Ok(all)
}

fn round_trip_ms(a: &Site, b: &Site) -> f64 {
    if a.name == b.name {
        return 0.0;
    }
    let travel = 2.0 * distance_km(a, b) / (LIGHT_KM_PER_MS * 4.0 / 9.0);
    travel * DETOUR + a.link.delay_ms() + b.link.delay_ms()
}

fn distance_km(a: &Site, b: &Site) -> f64 {
    let [(a_lat, a_lon), (b_lat, b_lon)] =
        [a, b].map(|site| (site.latitude.to_radians(), site.longitude.to_radians()));
    let cosine = a_lat.sin() * b_lat.sin() + a_lat.cos() * b_lat.cos() * (a_lon - b_lon).cos();
    EARTH_KM * cosine.clamp(-1.0, 1.0).acos()
}

/// How long a fetch of three RPCs takes on average without any queue: what [`DETOUR`] is
/// chosen for.
#[cfg(test)]
fn three_rpcs(block_bytes: u64) -> Duration {
    let mut total_ms = 0.0;
    let pairs = || SITES.iter().flat_map(|a| SITES.iter().map(move |b| (a, b)));
    let different = || pairs().filter(|(a, b)| a.name != b.name);
    for (client, server) in different() {
        let rate = server.link.rates().0.min(client.link.rates().1);
        total_ms += 3.0 * round_trip_ms(client, server) + block_bytes as f64 / rate as f64 * 1e3;
    }
    Duration::from_secs_f64(total_ms / different().count() as f64 / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fetch_of_three_rpcs_takes_the_papers_430_ms() {
        let taken = three_rpcs(8192);
        assert!(
            taken.abs_diff(Duration::from_millis(430)) < Duration::from_millis(10),
            "{taken:?}"
        );
    }

    #[test]
    fn round_trips_are_those_of_geography() {
        let model = round_trips(None, 1).expect("the model is a matrix");
        let at = |name| SITES.iter().position(|s| s.name == name).expect("a site") as u32;
        let ms = |a, b| model.rtt_us(at(a), at(b)) / 1000;
        assert!((80..100).contains(&ms("MIT", "Utah")), "{}", ms("MIT", "Utah"));
        assert!((270..310).contains(&ms("MIT", "Korea")), "{}", ms("MIT", "Korea"));
        assert_eq!(ms("Korea", "Korea"), 0);
        assert_eq!(ms("VU-NL", "CMU"), ms("CMU", "VU-NL"));
    }

    #[test]
    fn a_file_gives_different_hosts_for_different_seeds() {
        let line = |a: usize| (0..40).map(|b| format!("{}", a.abs_diff(b))).collect::<Vec<_>>();
        let text: String = (0..40).map(|a| line(a).join(" ") + "\n").collect();
        let file = RttMatrix::parse(text.as_bytes(), 0).expect("a matrix");
        let chosen = |seed| round_trips(Some(&file), seed).expect("enough hosts");
        assert_eq!(chosen(1), chosen(1));
        assert_ne!(chosen(1), chosen(2));
        let small = RttMatrix::parse(b"0 1\n1 0\n", 0).expect("a matrix");
        assert!(matches!(round_trips(Some(&small), 1), Err(LabError::Options(_))));
    }
}
