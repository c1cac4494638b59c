//! One receipt serves for all messages of a put, if it is small beside the blocks.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use atoll_dht::DhtConfig;
use atoll_dht::rpc;
use atoll_env::BoxFuture;
use atoll_key::PeerId;
use atoll_net::{Peer, Refusal, Reply, Request, Service};
use atoll_store::MemoryStore;

use crate::ring::{ROOMY, Ring, sized_block};

/// The receipts that one node was sent with blocks, and by which peers.
type Shown = Arc<Mutex<Vec<(PeerId, String)>>>;

struct Recorder {
    honest: Arc<dyn Service>,
    shown: Shown,
}

impl Service for Recorder {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        if request.method == rpc::PUT {
            let put: rpc::Put = rpc::from_header(&request.header).expect("nodes are honest");
            let receipt = format!("{:?}", put.receipt.expect("a publisher's"));
            self.shown.lock().expect("no panic").push((from.id, receipt));
        }
        self.honest.handle(from, request)
    }
}

#[test]
fn the_messages_of_a_put_carry_one_receipt_unless_it_is_long_beside_the_blocks() {
    let mut ring = Ring::configured(3, DhtConfig::default(), 5);
    let shown = Shown::default();
    let recorder = shown.clone();
    ring.join_as(Arc::new(MemoryStore::new(ROOMY)), move |honest| {
        Arc::new(Recorder { honest, shown: recorder.clone() })
    });
    ring.settle();
    for (from, len, is_shared) in [(0, 64 << 10, true), (100, 100, false)] {
        let blocks: Vec<_> = (from..from + 32).map(|n| sized_block(n, len)).collect();
        let keys: Vec<_> = blocks.iter().map(|(hash, _)| hash.key()).collect();
        ring.try_put(0, blocks).expect("the ring is healthy");
        for key in keys {
            assert!(ring.holders(&key).len() >= 2, "acknowledged blocks are on a majority");
        }
        let shown = std::mem::take(&mut *shown.lock().expect("no panic"));
        let senders: BTreeSet<&PeerId> = shown.iter().map(|(from, _)| from).collect();
        let receipts: BTreeSet<&str> = shown.iter().map(|(_, receipt)| &receipt[..]).collect();
        assert!(senders.len() > 1, "the node is a root of some blocks and a replica of others");
        assert_eq!(receipts.len() == 1, is_shared, "{len} bytes: {} receipts", receipts.len());
    }
}
