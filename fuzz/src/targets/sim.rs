//! Files that a person gets from elsewhere and gives to the laboratory: matrices of round trips,
//! and traces of when hosts were up.

use atoll_lab::Availability;
use atoll_sim::RttMatrix;

use super::{Target, target};

pub(super) fn targets() -> Vec<Target> {
    let mut latm = b"LATM".to_vec();
    for field in [1u16, 3, 1, 0] {
        latm.extend_from_slice(&field.to_le_bytes());
    }
    for tenths in [0u16, 100, 0xffff, 110, 0, 0xfffe, 90, 80, 0] {
        latm.extend_from_slice(&tenths.to_le_bytes());
    }
    let seeds = vec![
        latm,
        b"# ms\n0, 10.5, -\n9,0,30\nnan, 29, 0\n".to_vec(),
        b"0 10\n11 0\n".to_vec(),
        b"src,dst,rtt_avg_ms\na,b,10\nb,c,20.25\nc,a,5e1\n".to_vec(),
    ];
    let target = target("sim/matrix", seeds, |input| {
        let Ok(matrix) = RttMatrix::parse(input, 0) else { return false };
        let last = matrix.host_count() as u32 - 1;
        let _ = matrix.rtt_us(last, last) + matrix.rtt_us(0, last);
        true
    });
    // A file of pairs names n hosts in n/2 short lines, and the table has n² numbers of
    // 4 bytes: at most 64 MiB (4,096 hosts), and as much again to sort them for a median,
    // in a list that grows by doubling.
    vec![Target { fixed_bytes: 200 << 20, ..target }, availability()]
}

fn availability() -> Target {
    let seeds = vec![
        b"host,start_s,end_s\n0,100,160\n0,200,260\n7,130,300\n".to_vec(),
        b"host,start_s,end_s\n\na, -1e3, 0.5\nb,2,2\n".to_vec(),
    ];
    target("lab/availability", seeds, |input| {
        let Ok(text) = std::str::from_utf8(input) else { return false };
        let Ok(trace) = Availability::parse(text) else { return false };
        for host in 0..trace.host_count() {
            let mut before = 0.0;
            for (start, end) in trace.intervals(host) {
                assert!(before <= *start && start <= end && *end <= trace.length_secs());
                before = *end;
            }
        }
        true
    })
}
