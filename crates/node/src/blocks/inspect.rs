//! What `atoll why` asks of the ring: what each replica of some blocks says, and which nodes use one of them.

use std::collections::BTreeMap;

use atoll_dht::{Dht, LockMode, Replica, ReplicaCopy, Uses};
use atoll_key::Key;
use atoll_net::Peer;

use crate::status::{
    AskedNode, BlockCopy, BlockReplicas, BlockUser, LockUser, ReplicaReport, UsesReport, hex,
};

/// Asks all nodes that should hold the blocks.
pub(super) async fn replicas(dht: &Dht, keys: Vec<Key>) -> ReplicaReport {
    let mut report = ReplicaReport::default();
    let mut numbers: BTreeMap<Peer, usize> = BTreeMap::new();
    for found in dht.replicas(keys).await {
        let mut block = BlockReplicas::default();
        match found {
            Ok(replicas) => {
                for Replica { peer, said } in replicas {
                    let nodes = &mut report.nodes;
                    let node = *numbers.entry(peer).or_insert_with(|| {
                        let (peer_id, addr) = (hex(&peer.id.0), peer.addr.to_string());
                        nodes.push(AskedNode { peer_id, addr, trouble: None });
                        nodes.len() - 1
                    });
                    let copy = match said {
                        Ok(copy) => copy,
                        Err(trouble) => {
                            nodes[node].trouble = Some(trouble);
                            None
                        }
                    };
                    let version = copy.map(|copy| copy.version);
                    let (lease_secs, diverted) = match copy {
                        Some(ReplicaCopy { lease_secs, is_diverted, .. }) => {
                            (lease_secs, is_diverted)
                        }
                        None => (0, false),
                    };
                    block.copies.push(BlockCopy { node, version, lease_secs, diverted });
                }
            }
            Err(trouble) => block.trouble = Some(trouble),
        }
        report.blocks.push(block);
    }
    report
}

/// Asks the replicas of a block which nodes use it.
pub(super) async fn uses(dht: &Dht, key: Key, lock: Key) -> UsesReport {
    let Uses { readers, locks, replicas: (answered, silent) } = match dht.uses(key, lock).await {
        Ok(uses) => uses,
        Err(trouble) => return UsesReport { trouble: Some(trouble), ..UsesReport::default() },
    };
    let reader = |peer: &Peer| BlockUser { peer_id: hex(&peer.id.0), addr: peer.addr.to_string() };
    let lock = |(peer, mode): (&atoll_key::PeerId, &LockMode)| LockUser {
        peer_id: hex(&peer.0),
        exclusive: *mode == LockMode::Exclusive,
    };
    UsesReport {
        readers: readers.keys().map(reader).collect(),
        locks: locks.iter().map(lock).collect(),
        answered,
        silent,
        trouble: None,
    }
}
