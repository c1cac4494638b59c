//! The durability checker: random faults, and no acknowledged block is ever lost.
//!
//! A [`Model`] knows every block that a put acknowledged, with its lease as the publisher last
//! renewed it, and every disk, those of nodes that are off included. After each fault of a
//! [`Scenario`] it fails when
//!
//! - a block whose lease lasts is on no disk at all. A scenario destroys a disk only while every
//!   block on it is on another honest disk as well, so no destruction excuses a loss: fewer than
//!   k holders of any block are lost for good before others have taken their place;
//! - a put was acknowledged and fewer than a majority of k disks have the block (liars that were
//!   sent it count as disks, since nobody can tell that they keep nothing);
//! - most of a replica set of nodes that joined hours ago lack a block;
//! - a reader gets other bytes than were put, or, once everything has been healed, nothing.
//!
//! A lease is counted in time in which at least two nodes were up: no node's lease clock runs
//! faster. Blocks whose lease has ended are forgotten.
//!
//! What makes the checker find a missing rule: a publisher that renews for longer while a whole
//! replica set is off (R1, R4); neighbours that return with copies whose leases have ended (R1); nodes that join side by side before the neighbours of one that is full
//! or refuses (R5); a put by the first node back after a power cut (W1).
//!
//! Liars are a fifth of the nodes of some scenarios, with honest nodes between them. Three more
//! may join side by side for some hours. A put or renewal to which two liars have said yes promises
//! nothing: as whoever puts sees the ring, they may be two of three, also where members of the replica
//! set are cut off or have just joined. No scenario with liars destroys disks.
//!
//! A failure prints its seed; `ATOLL_DURABILITY_SEEDS=from..upto` runs those, and a plain number
//! as many from 1 on.

mod disk;
mod liar;
mod model;
mod scenario;

use model::Model;
use scenario::Scenario;

/// Seeds run by `make test`: about half a minute of CPU.
const SEEDS: std::ops::Range<u64> = 1..25;

fn seeds() -> std::ops::Range<u64> {
    let Ok(asked) = std::env::var("ATOLL_DURABILITY_SEEDS") else { return SEEDS };
    let number = |text: &str| text.parse().expect("ATOLL_DURABILITY_SEEDS is COUNT or FROM..UPTO");
    match asked.split_once("..") {
        Some((from, upto)) => number(from)..number(upto),
        None => 1..number(&asked) + 1,
    }
}

#[test]
fn nothing_acknowledged_is_lost_whatever_happens() {
    let mut failed = Vec::new();
    for seed in seeds() {
        if std::panic::catch_unwind(|| Scenario::new(seed).run()).is_err() {
            println!("ATOLL_DURABILITY_SEEDS={seed}..{} replays this failure", seed + 1);
            failed.push(seed);
        }
    }
    assert!(failed.is_empty(), "{} of {} seeds failed: {failed:?}", failed.len(), seeds().count());
}
