//! Reading inodes ahead of lookups, on a ring in the simulator where each answer takes 100 ms.

use std::time::Duration;

use atoll_dht::DhtConfig;
use atoll_sim::{Latency, SimConfig};
use atoll_vfs::{Caller, FileSystem, InodeNumber, OpenFlags};
use atoll_volume::shared::{SharedFs, SharedOptions};
use bytes::Bytes;

use super::mounts::{created, mounted_with};
use crate::simulated_ring::Ring;

const LONG: Duration = Duration::from_secs(3600);
const ROUND_TRIP: Duration = Duration::from_millis(100);
const ROOT: InodeNumber = InodeNumber::ROOT;
const FILES: usize = 100;

fn me() -> Caller {
    Caller::default()
}

fn names() -> Vec<Bytes> {
    (0..FILES).map(|n| format!("file {n:03}").into()).collect()
}

/// Round trips that a program waits for which looks the files up in this order, and opens them if it `opens`.
fn round_trips(ahead: bool, opens: bool, order: impl FnOnce(&mut Vec<Bytes>)) -> u128 {
    let latency = Latency::Flat(ROUND_TRIP / 2);
    let sim = SimConfig { seed: 9100, latency, ..SimConfig::default() };
    let ring = Ring::with(sim, DhtConfig::default(), 12);
    let mut mounts: Vec<SharedFs> = Vec::new();
    for at in 0..2 {
        let env = ring.sim.env(ring.members[at].host);
        let blocks = ring.members[at].dht.clone() as std::sync::Arc<dyn atoll_dht::Blocks>;
        let options = SharedOptions { read_inodes_ahead: ahead, ..SharedOptions::default() };
        let mount = async {
            if at == 0 {
                created(&env, &blocks).await;
            }
            mounted_with(&env, &blocks, at as u8 + 1, options).await
        };
        mounts.push(ring.sim.block_on(LONG, mount).expect("calls have deadlines"));
    }
    let made = async {
        for name in names() {
            mounts[0].mknod(me(), ROOT, &name, atoll_vfs::FileKind::Regular, 0o644, 0).await?;
        }
        Ok::<_, atoll_vfs::Errno>(())
    };
    ring.sim.block_on(LONG, made).expect("calls have deadlines").expect("makes the files");
    // Until nothing is promised any more.
    ring.sim.run_for(Duration::from_secs(60));
    let mut order_of = names();
    order(&mut order_of);
    let start = ring.sim.now();
    let read = async {
        for name in &order_of {
            let inode = mounts[1].lookup(me(), ROOT, name).await?.attr.inode;
            if opens {
                let opened = mounts[1].open(me(), inode, OpenFlags::READ).await?;
                mounts[1].close(inode, opened.handle).await?;
            }
        }
        Ok::<_, atoll_vfs::Errno>(())
    };
    ring.sim.block_on(LONG, read).expect("calls have deadlines").expect("all are there");
    ring.sim.now().since(start).as_nanos() / ROUND_TRIP.as_nanos()
}

#[test]
fn a_program_that_looks_names_up_in_order_waits_seldom() {
    let in_order = |_: &mut Vec<Bytes>| {};
    let (with, without) = (round_trips(true, false, in_order), round_trips(false, false, in_order));
    assert!(without >= FILES as u128, "{without}");
    assert!(with * 8 < without, "{with} of {without}");
    let (with, without) = (round_trips(true, true, in_order), round_trips(false, true, in_order));
    assert!(with * 8 < without, "{with} of {without}, when each is opened");
    // As `git status` does, which leaves some out.
    let with = round_trips(true, false, |names| {
        let mut n = 0;
        names.retain(|_| {
            n += 1;
            n % 3 != 0
        });
    });
    assert!(with * 6 < without, "{with} of {without}, when a third is left out");
}

#[test]
fn lookups_in_another_order_wait_as_before() {
    let (with, without) = (
        round_trips(true, false, |names| names.reverse()),
        round_trips(false, false, |names| names.reverse()),
    );
    assert_eq!(with, without);
}
