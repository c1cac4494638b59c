//! What is fuzzed: one target per decoder of network or disk bytes, with valid seeds.
//!
//! A target's decoder does more than decode where more can be said: what was accepted is
//! encoded and decoded again, and must be the same; bytes of a whole store or volume are
//! opened and read through. It panics where that fails, which is a finding like any other.

mod dht;
mod format;
mod key;
mod net;
mod nfs;
mod node;
mod overlay;
mod pool;
mod sim;
mod store;
mod tfs;
mod volume;

use std::fmt::Debug;
use std::net::SocketAddr;

use atoll_key::{BlockHash, Key, PeerId};
use atoll_net::Peer;
use atoll_overlay::Node;

/// Says whether bytes are accepted.
type Decode = dyn Fn(&[u8]) -> bool;

/// A decoder, what it accepts, and how much it may allocate.
pub(crate) struct Target {
    pub name: &'static str,
    /// Valid encodings; each must be accepted.
    pub seeds: Vec<Vec<u8>>,
    /// Whether the bytes are accepted.
    pub decode: Box<Decode>,
    /// Bytes it may hold whatever the input.
    pub fixed_bytes: usize,
    /// Bytes it may hold besides, for each byte of input.
    pub factor: usize,
}

/// All targets.
pub(crate) fn all() -> Vec<Target> {
    let mut targets = key::targets();
    targets.extend(net::targets());
    targets.extend(overlay::targets());
    targets.extend(dht::targets());
    targets.extend(store::targets());
    targets.extend(format::targets());
    targets.extend(volume::targets());
    targets.extend(node::targets());
    targets.extend(sim::targets());
    targets.extend(tfs::targets());
    targets.extend(nfs::targets());
    targets.extend(pool::targets());
    targets
}

/// A target with the limits that suit a decoder of one message: a decoded list element is
/// a few times as large as its shortest encoding, lists grow by doubling, and what is
/// accepted is encoded once more; errors are text of a few hundred bytes.
fn target(
    name: &'static str,
    seeds: Vec<Vec<u8>>,
    decode: impl Fn(&[u8]) -> bool + 'static,
) -> Target {
    Target { name, seeds, decode: Box::new(decode), fixed_bytes: 16 << 10, factor: 64 }
}

/// A target whose accepted values must survive being encoded and decoded again.
fn round_trip<T: PartialEq + Debug + 'static, E: Debug + 'static>(
    name: &'static str,
    values: Vec<T>,
    encode: impl Fn(&T) -> Vec<u8> + 'static,
    decode: impl Fn(&[u8]) -> Result<T, E> + 'static,
) -> Target {
    let seeds = values.iter().map(&encode).collect();
    target(name, seeds, move |input| {
        let Ok(value) = decode(input) else { return false };
        let again = decode(&encode(&value)).expect("what decodes is encoded to what decodes");
        assert_eq!(again, value, "it does not survive being encoded");
        true
    })
}

fn peer(n: u8) -> Peer {
    let addr = if n.is_multiple_of(2) {
        SocketAddr::from(([127, 0, 0, n], 4000))
    } else {
        SocketAddr::from(([0xfe80, 0, 0, 0, 0, 0, 0, u16::from(n)], 4000))
    };
    Peer { id: PeerId([n; 32]), addr }
}

fn node(n: u8) -> Node {
    Node::of(peer(n))
}

fn key(n: u8) -> Key {
    BlockHash::of(&[n]).key()
}
