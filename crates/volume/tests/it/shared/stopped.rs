//! A node that stops and keeps its connections: nobody hears of it, and calls to it end by their deadlines.

use std::time::Duration;

use atoll_sim::SimConfig;
use atoll_vfs::{Caller, Errno, FileSystem, InodeNumber, OpenFlags, Writer};
use atoll_volume::shared::{Consistency, SharedFs};
use bytes::Bytes;

use super::locks::Mounts;

const ROOT: InodeNumber = InodeNumber::ROOT;

/// How long a call-back promise lasts, to a reader 40 ms away.
const PROMISE: Duration = Duration::from_secs(4);

/// How long a lock lease lasts.
const LOCK_LEASE: Duration = Duration::from_secs(15);

fn me() -> Caller {
    Caller::default()
}

async fn write(fs: &SharedFs, name: &str, flags: OpenFlags) -> Result<(), Errno> {
    let flags = OpenFlags(flags.0 | OpenFlags::READ_WRITE.0);
    let (entry, opened) = fs.create(me(), ROOT, name.as_bytes(), 0o644, flags).await?;
    let inode = entry.attr.inode;
    fs.write(Writer::At(me()), inode, opened.handle, 0, Bytes::from_static(b"text")).await?;
    let closed = fs.flush(inode, opened.handle).await;
    fs.close(inode, opened.handle).await?;
    closed
}

async fn read(fs: &SharedFs, name: &str) {
    let inode = fs.lookup(me(), ROOT, name.as_bytes()).await.expect("there").attr.inode;
    let opened = fs.open(me(), inode, OpenFlags::READ).await.expect("opens");
    fs.read(inode, opened.handle, 0, 100).await.expect("reads");
    fs.close(inode, opened.handle).await.expect("closes");
}

#[test]
fn a_stopped_node_delays_writes_by_no_more_than_its_promises_and_fails_none() {
    let mut told = Vec::new();
    for seed in 0..12 {
        for what in ["file", "new", "exclusive", "directory"] {
            let sim = SimConfig { seed: 9600 + seed, jitter: 0.3, ..SimConfig::default() };
            let all = Mounts::with(sim, 5, 3, Consistency::CloseToOpen);
            let (one, reader) = (&all.mounts[0], &all.mounts[2]);
            all.run(write(one, "file", OpenFlags(0))).expect("all are there");
            // It has promises of the file and of its directory.
            all.run(read(reader, "file"));
            all.ring.sim.crash_silently(all.hosts(2..3)[0]);
            let began = all.ring.sim.now();
            let done = all.run(async {
                match what {
                    "file" => write(one, "file", OpenFlags(0)).await,
                    "new" => write(one, "new", OpenFlags(0)).await,
                    "exclusive" => write(one, "new", OpenFlags(OpenFlags::EXCLUSIVE)).await,
                    _ => one.mkdir(me(), ROOT, b"new", 0o755).await.map(drop),
                }
            });
            let took = all.ring.sim.now().since(began);
            // Some seconds more for replicas that do not answer. A lock is granted by nodes that have kept it for as
            // long as a lease: where the stopped one is the root of its set, after others have done so.
            let most = match what {
                "exclusive" => 2 * LOCK_LEASE + Duration::from_secs(6),
                "directory" => LOCK_LEASE + Duration::from_secs(6),
                _ => PROMISE + Duration::from_secs(3),
            };
            if done.is_err() || took > most {
                told.push(format!("seed {seed}, {what}: {done:?} after {took:?}"));
            }
        }
    }
    assert!(told.is_empty(), "{told:#?}");
}
