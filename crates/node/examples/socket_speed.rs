//! How fast blocks go through the control socket: one node on loopback, one client in
//! another process would be fairer, but here both share the process; CPU is for both.
//!
//! `cargo run --release -p atoll-node --example socket_speed`

#![allow(clippy::disallowed_methods, reason = "it measures real time")]

use std::time::Instant;

use atoll_dht::Blocks;
use atoll_key::BlockHash;
use atoll_node::{Client, Node, NodeConfig, daemon_runtime};
use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};

const BLOCK_BYTES: usize = 64 << 10;
const BLOCKS: u32 = 4096;
const BATCH: usize = 32;
const AT_ONCE: usize = 16;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    daemon_runtime(2)?.block_on(measure())
}

async fn measure() -> Result<(), Box<dyn std::error::Error>> {
    let temp = tempfile::tempdir()?;
    let config = NodeConfig {
        listen: Some("127.0.0.1:0".parse()?),
        storage_bytes: Some(2 << 30),
        ..NodeConfig::new(temp.path().join("node"))
    };
    let node = Node::start(config).await?;
    println!("idle node: {:.1} MiB resident", mib(node.status().resident_bytes as f64));
    let client = Client::connect(node.dir()).await?;
    let blocks: Vec<(BlockHash, Bytes)> = (0..BLOCKS)
        .map(|i| {
            let mut bytes = vec![0x5a; BLOCK_BYTES];
            bytes[..4].copy_from_slice(&i.to_be_bytes());
            let bytes = Bytes::from(bytes);
            (BlockHash::of(&bytes), bytes)
        })
        .collect();
    let total_bytes = f64::from(BLOCKS) * BLOCK_BYTES as f64;

    let began = Instant::now();
    stream::iter(blocks.chunks(BATCH))
        .map(|batch| Ok(client.put(batch.to_vec())))
        .try_buffer_unordered(AT_ONCE)
        .try_collect::<Vec<()>>()
        .await?;
    report("put", total_bytes, began);

    for _ in 0..3 {
        let began = Instant::now();
        stream::iter(blocks.iter())
            .map(|(hash, _)| Ok::<_, atoll_dht::GetError>(client.get(*hash)))
            .try_buffer_unordered(AT_ONCE)
            .try_for_each(|_| async { Ok(()) })
            .await?;
        report("get", total_bytes, began);
    }

    let hashes: Vec<BlockHash> = blocks.iter().map(|(hash, _)| *hash).collect();
    let began = Instant::now();
    for batch in hashes.chunks(1024) {
        assert!(client.renew(batch.to_vec()).await?.is_empty(), "nothing is lost");
    }
    println!("renew: {:.0} keys/s", f64::from(BLOCKS) / began.elapsed().as_secs_f64());
    println!("afterwards: {:.1} MiB resident", mib(node.status().resident_bytes as f64));
    node.stop().await;
    Ok(())
}

fn report(what: &str, total_bytes: f64, began: Instant) {
    let secs = began.elapsed().as_secs_f64();
    println!("{what}: {:.0} MB/s", total_bytes / 1e6 / secs);
}

fn mib(bytes: f64) -> f64 {
    bytes / f64::from(1 << 20)
}
