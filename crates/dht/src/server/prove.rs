//! `PROVE`: shows which blocks are held here, or kept for this node by another one.

use std::sync::Arc;

use atoll_key::Key;
use atoll_net::{Peer, Refusal};
use atoll_overlay::Node;
use atoll_store::StoredBlock;
use bytes::Bytes;
use futures_util::future::join_all;

use super::Handle;
use super::work_limit::Limits;
use crate::diversion::follow;
use crate::holdings::proof::{ask, mac};
use crate::rpc::budget::PeerBudget;
use crate::rpc::{Answered, Proof, Prove, ProveReply};
use crate::server::Server;

/// Bytes read for one request before further keys are left unanswered.
const READ_BYTES: u64 = 4 << 20;
/// What proving may cost, bytes read a second. Guesses: a sixteenth of what a disk reads.
pub(crate) const LIMITS: Limits =
    Limits { at_once: 16, of_one: 4, peer: 4 << 20, strangers: 8 << 20, known: 8 << 20 };

impl Handle<Prove> for Arc<Server> {
    async fn handle(
        &self,
        from: Peer,
        asked: Prove,
        _: Vec<Bytes>,
    ) -> Result<Answered<Prove>, Refusal> {
        let is_known = self.is_known_peer(&from.id);
        let permit = self.proving.acquire(from.id, is_known, self.env.now())?;
        let (mut proofs, mut read_bytes) = (Vec::new(), 0);
        for key in &asked.keys {
            if read_bytes >= READ_BYTES {
                break;
            }
            let held = self.read(key).await;
            read_bytes += held.as_ref().map_or(0, |held| held.bytes.len() as u64);
            // Looked at after reading: the denial may have begun meanwhile.
            let lease_secs = held.as_ref().map_or(0, |held| self.lease_left(&held.info));
            let proof = |held: StoredBlock| Proof {
                version: held.info.version,
                lease_secs,
                mac: mac(&asked.nonce, &held.bytes),
            };
            proofs.push(held.filter(|_| lease_secs > 0 && !self.pending.denies(key)).map(proof));
        }
        permit.spend(read_bytes, self.env.now());
        prove_elsewhere(self, &from, &asked, &mut proofs).await;
        Ok((ProveReply { proofs: proofs.into() }, Vec::new()))
    }
}

/// Has the nodes that keep blocks for this one prove it, with the asker's nonce. An asker that
/// keeps one itself is about to drop it, and is not asked.
async fn prove_elsewhere(
    server: &Server,
    from: &Peer,
    asked: &Prove,
    proofs: &mut [Option<Proof>],
) {
    let lacking =
        |place: &usize| proofs[*place].is_none() && !server.pending.denies(&asked.keys[*place]);
    let lacking: Vec<usize> = (0..proofs.len()).filter(lacking).collect();
    let keys: Vec<Key> = lacking.iter().map(|place| asked.keys[*place]).collect();
    let mut holders = follow::by_holder(server, &keys).await;
    holders.retain(|(holder, _)| holder.id != from.id);
    let asks = holders.iter().map(|(holder, places)| {
        let its: Vec<Key> = places.iter().map(|place| keys[*place]).collect();
        async move {
            let mut time = PeerBudget::of(server, holder.id);
            ask(server, &Node::of(*holder), asked.nonce, &its, &mut time).await
        }
    });
    let answers = join_all(asks).await;
    for ((_, places), answer) in holders.iter().zip(answers) {
        for (place, proof) in places.iter().zip(answer) {
            proofs[lacking[*place]] = proof;
        }
    }
}
