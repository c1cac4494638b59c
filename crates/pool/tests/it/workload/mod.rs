//! What clients do to a pool in tests, and whether what they then find is right.
//!
//! ```text
//! clients    tasks that change files beside each other, each its own and some that they fight over
//! steps      one change by a client, and the steps of a seed
//! tree       all files as a client sees them
//! history    every call of a file system with its answer, and when it began and ended
//! names      whether a history of names is one that calls made one after another explain
//! contents   whether bytes and attributes are those that were written
//! replicas   all files as they lie on a member's disk, and how two members' differ
//! ```
//!
//! Everything here works on any [`atoll_vfs::FileSystem`]; `replicas` alone knows how a member keeps its files.

pub(crate) mod clients;
pub(crate) mod contents;
pub(crate) mod history;
pub(crate) mod names;
pub(crate) mod replicas;
pub(crate) mod steps;
pub(crate) mod tree;

use std::sync::Arc;
use std::time::Duration;

use atoll_env::{Env, TokioRuntime};
use atoll_sim::{HostId, Loss as MessageLoss, Sim};
use atoll_vfs::{Caller, FileSystem, InodeNumber, OpenFlags, Writer};
use bytes::Bytes;

pub(crate) const ROOT: InodeNumber = InodeNumber::ROOT;

/// The environment for tests outside the simulator.
pub(crate) fn env() -> Env {
    Arc::new(TokioRuntime::current())
}

/// The user whose files these are.
pub(crate) fn me() -> Caller {
    Caller { uid: 1000, gid: 1000, ..Caller::default() }
}

/// Makes a file.
pub(crate) async fn write_file_in(fs: &dyn FileSystem, dir: InodeNumber, name: &str, text: &str) {
    let flags = OpenFlags::READ_WRITE;
    let (entry, opened) = fs.create(me(), dir, name.as_bytes(), 0o644, flags).await.unwrap();
    let (inode, handle) = (entry.attr.inode, opened.handle);
    let data = Bytes::from(text.to_owned());
    fs.write(Writer::At(me()), inode, handle, 0, data).await.unwrap();
    fs.close(inode, handle).await.unwrap();
}

/// What is in a file.
pub(crate) async fn read_file_in(fs: &dyn FileSystem, dir: InodeNumber, name: &str) -> String {
    let entry = fs.lookup(me(), dir, name.as_bytes()).await.unwrap();
    let inode = entry.attr.inode;
    let opened = fs.open(me(), inode, OpenFlags::READ).await.unwrap();
    let bytes = fs.read(inode, opened.handle, 0, 4096).await.unwrap();
    fs.close(inode, opened.handle).await.unwrap();
    String::from_utf8(bytes.to_vec()).unwrap()
}

pub(crate) fn run<T>(test: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test)
}

/// How many seeds to try: so many, or so many times as many as `ATOLL_SEEDS` says.
pub(crate) fn seeds(usual: u64) -> u64 {
    let times = std::env::var("ATOLL_SEEDS").ok().and_then(|times| times.parse::<u64>().ok());
    usual * times.unwrap_or(1)
}

/// Tries seeds: the usual number, or as many times as many as `ATOLL_SEEDS` says, or the one that `ATOLL_SEED` names. Says how to
/// replay one that fails, whether by an error or a panic.
pub(crate) fn for_each_seed(usual: u64, test: impl Fn(u64) -> Result<(), String>) {
    let chosen = std::env::var("ATOLL_SEED").ok();
    let chosen = chosen.map(|seed| seed.parse::<u64>().expect("ATOLL_SEED is a number"));
    for seed in chosen.map_or(0..seeds(usual), |seed| seed..seed + 1) {
        let _replay = Replay(seed);
        test(seed).unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
    }
}

/// Tells how to replay a seed if the test panics.
struct Replay(u64);

impl Drop for Replay {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let test = std::thread::current().name().unwrap_or_default().to_owned();
            let seed = self.0;
            eprintln!("ATOLL_SEED={seed} cargo test -p atoll-pool --test it {test} replays it");
        }
    }
}

/// How many kinds of trouble [`disturb_network`] knows.
pub(crate) const NETWORK_FAULTS: u64 = 5;

/// Makes trouble of this kind in the network between two hosts, or ends all of it.
pub(crate) fn disturb_network(sim: &Sim, (one, other): (HostId, HostId), chance: f64, kind: u64) {
    match kind {
        0 => sim.set_loss(MessageLoss::Drop { chance }),
        1 => {
            let first_timeout = Duration::from_millis(200);
            sim.set_loss(MessageLoss::Retransmit { chance, first_timeout });
        }
        2 => sim.cut(&[one], &[other]),
        3 => sim.partition(&[&[one]]),
        _ => {
            sim.heal();
            sim.set_loss(MessageLoss::None);
        }
    }
}

/// Numbers of a seed (splitmix64).
#[derive(Clone)]
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }
}
