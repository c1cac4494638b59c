//! What is fuzzed: one target per decoder of network or disk bytes, with valid seeds.

use std::sync::{Arc, Mutex};

use atoll_dht::messages as dht;
use atoll_dht::{Blocks, MemoryBlocks};
use atoll_env::{BoxFuture, TokioRuntime};
use atoll_key::{BlockHash, Key, KeyRange, PeerId, SecretKey, SignedBlock, VolumeAddress};
use atoll_net::{Peer, frame, hello};
use atoll_overlay::chord::messages as chord;
use atoll_overlay::{Node, Route};
use atoll_store::segment;
use atoll_volume::owned::{self, format};
use bytes::Bytes;

/// A decoder, what it accepts, and how much it may allocate.
pub struct Target {
    pub name: &'static str,
    /// Valid encodings; each must be accepted.
    pub seeds: Vec<Vec<u8>>,
    /// Whether the bytes are accepted.
    pub decode: Box<dyn Fn(&[u8]) -> bool>,
    /// Bytes it may hold whatever the input.
    pub fixed_bytes: usize,
    /// Bytes it may hold besides, for each byte of input.
    pub factor: usize,
}

fn target(
    name: &'static str,
    seeds: Vec<Vec<u8>>,
    decode: impl Fn(&[u8]) -> bool + 'static,
) -> Target {
    // A decoded list element is a few times as large as its shortest encoding.
    Target { name, seeds, decode: Box::new(decode), fixed_bytes: 16 << 10, factor: 64 }
}

fn peer(n: u8) -> Peer {
    let addr = std::net::SocketAddr::from(([127, 0, 0, n], 4000));
    Peer { id: PeerId([n; 32]), addr }
}

fn node(n: u8) -> Node {
    Node::of(peer(n))
}

fn key(n: u8) -> Key {
    BlockHash::of(&[n]).key()
}
