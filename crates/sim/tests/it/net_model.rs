//! Latency models and bandwidth.

use std::sync::Arc;
use std::time::Duration;

use atoll_net::Request;
use atoll_sim::{
    HostConfig, HostId, Latency, MatrixError, PASTIS_SPHERE_MAX, RttMatrix, Sim, SimConfig,
};
use bytes::Bytes;

use crate::ping::{Echo, PING, flat, millis, request, secs, timed_call};

fn config(latency: Latency) -> SimConfig {
    SimConfig { latency, ..SimConfig::default() }
}

/// Pastis §4: "nodes are randomly located on a sphere"; §5.2: "The maximal network
/// latency, which corresponds to two diametrically opposed points, was set to 300ms."
#[test]
fn latency_on_the_sphere_is_symmetric_with_the_papers_maximum() {
    let sim = Sim::new(config(Latency::Sphere { max: PASTIS_SPHERE_MAX }));
    let hosts = sim.add_hosts(400, &HostConfig::default());
    let mut all = Vec::new();
    for a in &hosts {
        assert_eq!(sim.latency(*a, *a), Duration::ZERO);
        for b in hosts.iter().filter(|b| *b > a) {
            assert_eq!(sim.latency(*a, *b), sim.latency(*b, *a));
            all.push(sim.latency(*a, *b).as_secs_f64() * 1e3);
        }
    }
    let mean = all.iter().sum::<f64>() / all.len() as f64;
    let (min, max) = all.iter().fold((f64::MAX, 0f64), |(lo, hi), x| (lo.min(*x), hi.max(*x)));
    // Along the surface the density of the angle θ is ½ sin θ, whose mean is π/2.
    assert!((mean - 150.0).abs() < 3.0, "mean {mean} ms");
    assert!(max <= 300.0 && max > 285.0 && min < 15.0, "{min} to {max} ms");
    // sin θ / 2 puts a quarter below 60°: 100 ms.
    let quarter = all.iter().filter(|ms| **ms < 100.0).count() as f64 / all.len() as f64;
    assert!((quarter - 0.25).abs() < 0.02, "{quarter}");
}

#[test]
fn the_triangle_inequality_holds_on_the_sphere() {
    let sim = Sim::new(config(Latency::Sphere { max: PASTIS_SPHERE_MAX }));
    let hosts = sim.add_hosts(30, &HostConfig::default());
    for (a, b, c) in
        hosts.iter().flat_map(|a| hosts.iter().flat_map(|b| hosts.iter().map(|c| (*a, *b, *c))))
    {
        let detour = sim.latency(a, b) + sim.latency(b, c) + Duration::from_nanos(5_000);
        assert!(sim.latency(a, c) <= detour);
    }
}

fn latm(host_count: u16, slices: &[&[u16]]) -> Vec<u8> {
    let mut file = b"LATM".to_vec();
    for field in [1, host_count, slices.len() as u16, 0] {
        file.extend_from_slice(&field.to_le_bytes());
    }
    slices.iter().flat_map(|s| s.iter()).for_each(|v| file.extend_from_slice(&v.to_le_bytes()));
    file
}

#[test]
fn a_matrix_of_tenths_of_milliseconds_reads_back() {
    let first = [0, 105, 0xFFFF, 107, 0, 0xFFFE, 300, 0xFFFF, 0];
    let second = [0, 1, 2, 3, 0, 4, 5, 6, 0];
    let file = latm(3, &[&first, &second]);
    let matrix = RttMatrix::parse(&file, 1).unwrap();
    assert_eq!((matrix.rtt_us(0, 2), matrix.rtt_us(2, 1)), (200, 600));
    let matrix = RttMatrix::parse(&file, 0).unwrap();
    assert_eq!((matrix.rtt_us(0, 1), matrix.rtt_us(1, 0)), (10_500, 10_700));
    // Missing: as the other way. Saturated: as long as it is at least.
    assert_eq!((matrix.rtt_us(0, 2), matrix.rtt_us(2, 1)), (30_000, 6_553_400));
}

#[test]
fn virtual_hosts_take_half_a_round_trip_of_their_row_each_way() {
    let path = std::env::temp_dir().join(format!("atoll-matrix-{}.csv", std::process::id()));
    std::fs::write(&path, "# ms\n0, 10.5\n, 1\n").unwrap();
    let matrix = RttMatrix::read(&path, 0).unwrap();
    std::fs::remove_file(&path).unwrap();
    let sim = Sim::new(config(Latency::Matrix(Arc::new(matrix))));
    let near = HostConfig { access_delay: millis(2), ..HostConfig::default() };
    sim.add_hosts(3, &HostConfig::default());
    sim.add_host(near);
    let us = |a, b| sim.latency(HostId(a), HostId(b)).as_micros();
    assert_eq!((us(0, 1), us(1, 2), us(0, 2)), (5250, 5250, 0));
    // Row 1 with itself is half of 1 ms; an access line counts at either end.
    assert_eq!((us(3, 3), us(1, 3), us(3, 0)), (0, 2500, 7250));
}

#[test]
fn pairs_with_named_columns_are_a_matrix_too() {
    let text = "src,dst,rtt_min_ms,rtt_avg_ms\nparis,lima,99,100.5\nlima,lima,0,0.25\n\
                paris,oslo,1,20\noslo,lima,1,90";
    let matrix = RttMatrix::parse(text.as_bytes(), 0).unwrap();
    // By name: lima, oslo, paris.
    assert_eq!(matrix.host_count(), 3);
    assert_eq!((matrix.rtt_us(2, 0), matrix.rtt_us(0, 2)), (100_500, 100_500));
    assert_eq!((matrix.rtt_us(0, 0), matrix.rtt_us(1, 1)), (250, 0));
}

#[test]
fn files_that_are_no_matrix_are_refused() {
    let mut lying = latm(2, &[&[0, 1, 1, 0]]);
    lying[6..8].copy_from_slice(&4000u16.to_le_bytes());
    let cases: [(&[u8], usize, &str); 13] = [
        (b"", 0, "empty"),
        (b"LATM\x01\x00", 0, "cut short"),
        (&lying, 0, "8 bytes of round trips"),
        (&latm(2, &[&[0, 1, 1, 0]]), 1, "no slice 1"),
        (&latm(0, &[]), 0, "0 hosts"),
        (b"0 1\n1 0 2\n", 0, "line 2: there are 3 round trips, not 2 as before"),
        (b"0 1\n1 0\n1 2\n", 0, "line 3: there are more than 2 rows of 2"),
        (b"0 1\n", 0, "1 rows"),
        (b"0 -1\n1 0\n", 0, "line 1: round trips in milliseconds are expected"),
        (b"# names\n0 1\nsecret 0\n", 0, "line 3: round trips"),
        (b"src,dst\na,b\n", 0, "line 1: there is no column rtt_avg_ms"),
        (b"src,dst,rtt_avg_ms\nsecret\n", 0, "line 2: there is no column 2"),
        (b"src,dst,rtt_avg_ms\n\na,b,secret\n", 0, "line 3: round trips"),
    ];
    for (bytes, slice, why) in cases {
        let error = RttMatrix::parse(bytes, slice).unwrap_err().to_string();
        assert!(error.contains(why), "{error}, not {why}");
        // Any file may be taken for a matrix by mistake.
        assert!(!error.contains("secret"), "{error}");
    }
    let packed = RttMatrix::parse(b"\xfd7zXZ\0...", 0);
    assert!(matches!(packed, Err(MatrixError::Compressed)));
}

proptest::proptest! {
    #[test]
    fn any_bytes_are_a_matrix_or_are_refused(
        bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..200),
        text in "[-0-9a ,.#\n]{0,80}",
        slice in 0usize..3,
    ) {
        let _ = RttMatrix::parse(&bytes, slice);
        let _ = RttMatrix::parse(&[b"LATM\x01\0", &bytes[..]].concat(), slice);
        let _ = RttMatrix::parse(format!("src,dst,rtt_avg_ms\n{text}").as_bytes(), slice);
        if let Ok(matrix) = RttMatrix::parse(text.as_bytes(), slice) {
            let last = matrix.host_count() as u32 - 1;
            matrix.rtt_us(last, last);
        }
    }
}

const MEGABYTE: usize = 1_000_000;

fn bulk(len: usize) -> Request {
    Request { method: PING, header: Bytes::new(), parts: vec![Bytes::from(vec![0; len])] }
}

/// Hosts without latency or overhead; the first is limited as said, all take and drop.
fn limited(upload: Option<u64>, download: Option<u64>) -> (Sim, Vec<HostId>) {
    let sim = Sim::new(SimConfig { message_overhead_bytes: 0, ..flat(0) });
    let limits = HostConfig {
        upload_bytes_per_sec: upload,
        download_bytes_per_sec: download,
        ..HostConfig::default()
    };
    let mut hosts = vec![sim.add_host(limits)];
    hosts.extend(sim.add_hosts(3, &HostConfig::default()));
    // No service: the refusal is a short reply.
    (sim, hosts)
}

fn times(sim: &Sim, pairs: &[(HostId, HostId)], len: usize) -> Vec<u64> {
    let calls = pairs.iter().map(|(from, to)| {
        let call = sim.transport(*from).call(sim.peer(*to), bulk(len), secs(100));
        let env = sim.outside();
        async move {
            drop(call.await);
            env.now().as_nanos() / 1_000_000
        }
    });
    sim.block_on(secs(100), futures_util::future::join_all(calls)).unwrap()
}

#[test]
fn a_megabyte_over_a_megabyte_a_second_takes_a_second() {
    let (sim, h) = limited(Some(MEGABYTE as u64), None);
    assert_eq!(times(&sim, &[(h[0], h[1])], MEGABYTE), [1000], "uplink");
    let (sim, h) = limited(None, Some(MEGABYTE as u64));
    assert_eq!(times(&sim, &[(h[1], h[0])], MEGABYTE), [1000], "downlink");
}

#[test]
fn two_concurrent_transfers_share_a_link() {
    let (sim, h) = limited(Some(MEGABYTE as u64), None);
    assert_eq!(times(&sim, &[(h[0], h[1]), (h[0], h[2])], MEGABYTE), [1000, 2000], "uplink");
    let (sim, h) = limited(None, Some(MEGABYTE as u64));
    let mut taken = times(&sim, &[(h[1], h[0]), (h[2], h[0])], MEGABYTE);
    taken.sort_unstable();
    assert_eq!(taken, [1000, 2000], "downlink");
}

#[test]
fn transfers_over_different_links_do_not_wait_for_each_other() {
    let (sim, h) = limited(Some(MEGABYTE as u64), Some(MEGABYTE as u64));
    let taken = times(&sim, &[(h[0], h[1]), (h[1], h[0]), (h[2], h[3])], MEGABYTE);
    // The first two run at the same time, each at full speed; the refusals are short
    // but queue behind the megabytes at the limited host.
    assert_eq!(taken[2], 0);
    assert!(taken[..2].iter().all(|ms| (1000..1010).contains(ms)), "{taken:?}");
}

#[test]
fn the_slower_of_uplink_and_downlink_decides_and_latency_is_added_once() {
    let sim = Sim::new(SimConfig { message_overhead_bytes: 0, ..flat(50) });
    let fast = HostConfig { upload_bytes_per_sec: Some(4_000_000), ..HostConfig::default() };
    let slow = HostConfig { download_bytes_per_sec: Some(2_000_000), ..HostConfig::default() };
    let (a, b) = (sim.add_host(fast), sim.add_host(slow));
    assert_eq!(times(&sim, &[(a, b)], MEGABYTE), [50 + 500 + 50]);
}

#[test]
fn jitter_only_lengthens_and_stays_within_its_share() {
    let sim = Sim::new(SimConfig { jitter: 0.5, ..flat(100) });
    let hosts = sim.add_hosts(2, &HostConfig::default());
    Echo::serve(&sim, hosts[1], Duration::ZERO);
    let taken: Vec<Duration> =
        (0..200).map(|_| timed_call(&sim, hosts[0], hosts[1], request("x"), secs(5)).1).collect();
    assert!(taken.iter().all(|t| (millis(200)..millis(300)).contains(t)));
    let mean = taken.iter().sum::<Duration>() / 200;
    assert!((millis(240)..millis(260)).contains(&mean), "{mean:?}");
}
