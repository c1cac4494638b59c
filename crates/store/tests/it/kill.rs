//! SIGKILL of a process that writes as fast as it can, on the real disk.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use atoll_store::{BlockStore, DiskStore};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use crate::fixture::{Random, block, key, small_config, wait};

const DIR: &str = "ATOLL_TEST_KILL_DIR";
const FIRST: &str = "ATOLL_TEST_KILL_FIRST";
const BATCH: u64 = 4;

fn len_bytes(n: u64) -> usize {
    (Random(n).below(20_000)) as usize
}

/// Not a test by itself: what the killed process runs, when its parent says where.
#[test]
fn child_that_writes_until_it_is_killed() {
    let (Ok(dir), Ok(first)) = (std::env::var(DIR), std::env::var(FIRST)) else { return };
    let store = DiskStore::open(Path::new(&dir), small_config()).expect("opens");
    let mut next: u64 = first.parse().expect("a number");
    let mut puts = FuturesUnordered::new();
    wait(async {
        loop {
            while puts.len() < 8 {
                let batch = (next..next + BATCH).map(|n| block(n, 0, len_bytes(n), 9)).collect();
                let (put, first) = (store.put(batch), next);
                puts.push(async move { (first, put.await) });
                next += BATCH;
            }
            let (first, answer) = puts.next().await.expect("eight are running");
            answer.expect("there is room");
            let mut out = std::io::stdout().lock();
            writeln!(out, "\nacknowledged {first}").and_then(|()| out.flush()).expect("a parent");
        }
    });
}

/// Starts a child, kills it after `count` acknowledgements; returns all it acknowledged.
fn write_and_kill(dir: &Path, first: u64, count: u64) -> Vec<u64> {
    let mut child = Command::new(std::env::current_exe().expect("known"))
        .args(["--exact", "kill::child_that_writes_until_it_is_killed", "--nocapture"])
        .env(DIR, dir)
        .env(FIRST, first.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .expect("started");
    let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let mut acknowledged = Vec::new();
    for line in lines.map_while(Result::ok) {
        if let Some(first) = line.strip_prefix("acknowledged ") {
            acknowledged.push(first.parse().expect("a number"));
        }
        if acknowledged.len() as u64 == count {
            child.kill().expect("killed");
        }
    }
    child.wait().expect("ended");
    acknowledged
}

#[test]
fn a_process_killed_under_load_loses_no_acknowledged_block() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut random = Random(11);
    let mut acknowledged = Vec::new();
    let mut first = 0;
    for round in 0..6 {
        let count = 1 + random.below(60);
        let newly = write_and_kill(dir.path(), first, count);
        assert!(newly.len() as u64 >= count, "round {round}: {} of {count}", newly.len());
        first = newly.iter().max().expect("not empty") + 100 * BATCH;
        acknowledged.extend(newly);
        let store = DiskStore::open(dir.path(), small_config()).expect("opens after a kill");
        assert!(!store.report().rebuilt_index, "{:?}", store.report());
        store.check_invariants();
        for n in acknowledged.iter().flat_map(|first| *first..*first + BATCH) {
            let expected = block(n, 0, len_bytes(n), 9);
            assert_eq!(wait(store.get(&key(n))), Ok(Some(expected)), "round {round}, block {n}");
        }
    }
}
