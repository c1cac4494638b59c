//! Proof that a node holds blocks (`docs/design/dht.md`, rule R1).
//!
//! The asker draws a nonce for each prover; the prover answers with the BLAKE3 hash of each
//! block keyed with it, which only somebody who has the bytes can compute. The asker has them
//! too: it asks before it drops its own copy, or before it counts on another node that has just
//! taken one (`diversion`).
//!
//! What a proof does not show: that the bytes are on the prover's own disk. It may have fetched
//! them from a third node for this; it cannot have fetched them from the asker, which denies
//! having them meanwhile ([`crate::holdings::pending_removals`]).

use std::time::Duration;

use atoll_env::{jittered, sleep};
use atoll_key::{BlockKind, Key};
use atoll_net::header::Capped;
use atoll_net::{CallError, Peer, Refusal, Request};
use atoll_overlay::Node;
use atoll_store::{BlockInfo, StoredBlock};
use futures_util::future::join_all;

use crate::diversion::follow;
use crate::inner::{Inner, note_store_error};
use crate::lease_clock::least_lease;
use crate::rpc::budget::Allowance;
use crate::rpc::{self, Fetch, FetchReply, Proof, Prove, ProveReply, from_header, to_header};
use crate::server::work_limit::Limits;

/// How often a prover that is busy is asked again, and after how long. Guesses.
const MAX_BUSY: usize = 3;
const BUSY_PAUSE: Duration = Duration::from_millis(100);
/// Bytes read for one `PROVE` before further keys are left unanswered.
const READ_BYTES: u64 = 4 << 20;
/// What proving may cost, bytes read a second. Guesses: a sixteenth of what a disk reads.
pub(crate) const LIMITS: Limits =
    Limits { at_once: 16, of_one: 4, peer: 4 << 20, strangers: 8 << 20, acquaintances: 8 << 20 };

fn mac(nonce: &[u8; 32], bytes: &[u8]) -> [u8; 32] {
    *blake3::keyed_hash(nonce, bytes).as_bytes()
}

/// Shows a peer which of the blocks it asks about are held here.
pub(crate) async fn prove(
    inner: &Inner,
    from: &Peer,
    asked: &Prove,
) -> Result<ProveReply, Refusal> {
    let is_acquaintance = inner.is_acquaintance(&from.id);
    let turn = inner.proving.take(from.id, is_acquaintance, inner.env.now())?;
    let (mut proofs, mut read) = (Vec::new(), 0);
    for key in &asked.keys {
        if read >= READ_BYTES {
            break;
        }
        let held = match inner.store.get(key).await {
            Ok(held) => held,
            Err(error) => {
                note_store_error(inner, &error);
                None
            }
        };
        read += held.as_ref().map_or(0, |held| held.bytes.len() as u64);
        // Looked at after reading: the denial may have begun meanwhile.
        let lease_secs = held.as_ref().map_or(0, |held| inner.lease_left(&held.info));
        let proof = |held: StoredBlock| Proof {
            version: held.info.version,
            lease_secs,
            mac: mac(&asked.nonce, &held.bytes),
        };
        proofs.push(held.filter(|_| lease_secs > 0 && !inner.leaving.denies(key)).map(proof));
    }
    turn.spend(read, inner.env.now());
    prove_elsewhere(inner, from, asked, &mut proofs).await;
    Ok(ProveReply { proofs: proofs.into() })
}

/// Has the nodes that keep blocks for this one prove it, with the asker's nonce. An asker that
/// keeps one itself is about to drop it, and is not asked.
async fn prove_elsewhere(inner: &Inner, from: &Peer, asked: &Prove, proofs: &mut [Option<Proof>]) {
    let lacking =
        |place: &usize| proofs[*place].is_none() && !inner.leaving.denies(&asked.keys[*place]);
    let lacking: Vec<usize> = (0..proofs.len()).filter(lacking).collect();
    let keys: Vec<Key> = lacking.iter().map(|place| asked.keys[*place]).collect();
    let mut holders = follow::by_holder(inner, &keys).await;
    holders.retain(|(holder, _)| holder.id != from.id);
    let asks = holders.iter().map(|(holder, places)| {
        let its: Vec<Key> = places.iter().map(|place| keys[*place]).collect();
        async move {
            let mut time = Allowance::of(inner, holder.id);
            ask(inner, &Node::of(*holder), asked.nonce, &its, &mut time).await
        }
    });
    let answers = join_all(asks).await;
    for ((_, places), answer) in holders.iter().zip(answers) {
        for (place, proof) in places.iter().zip(answer) {
            proofs[lacking[*place]] = proof;
        }
    }
}

/// For each of `provers`, which of `blocks` it proves to hold: as they are held here or in a
/// higher version, and for as long.
pub(crate) async fn proven_by(
    inner: &Inner,
    provers: &[Node],
    blocks: &[BlockInfo],
) -> Vec<Vec<bool>> {
    let nonces: Vec<[u8; 32]> = provers.iter().map(|_| inner.random_bytes()).collect();
    let mut macs: Vec<Vec<Option<[u8; 32]>>> =
        vec![Vec::with_capacity(blocks.len()); provers.len()];
    for info in blocks {
        let held = match inner.store.get(&info.key).await {
            Ok(held) => held.filter(|held| held.info.version == info.version),
            Err(error) => {
                note_store_error(inner, &error);
                None
            }
        };
        for (macs, nonce) in macs.iter_mut().zip(&nonces) {
            macs.push(held.as_ref().map(|held| mac(nonce, &held.bytes)));
        }
    }
    let keys: Vec<Key> = blocks.iter().map(|info| info.key).collect();
    let answers = provers.iter().zip(nonces).zip(macs).map(|((prover, nonce), macs)| {
        let keys = &keys;
        async move {
            let mut time = Allowance::of(inner, prover.peer.id);
            let proofs = ask(inner, prover, nonce, keys, &mut time).await;
            let mut proven = Vec::with_capacity(blocks.len());
            for ((info, mac), proof) in blocks.iter().zip(macs).zip(proofs) {
                proven.push(match (mac, proof) {
                    (Some(mac), Some(proof)) => {
                        shows(inner, prover, info, &mac, &proof, &mut time).await
                    }
                    _ => false,
                });
                time.moved(u64::from(proven.ends_with(&[true])), 0);
            }
            time.end(inner);
            proven
        }
    });
    join_all(answers).await
}

/// Which of `blocks`, whose bytes `prover` was given by this node, it proves to have in the
/// version given.
pub(crate) async fn has_taken(inner: &Inner, prover: &Node, blocks: &[&StoredBlock]) -> Vec<bool> {
    let nonce = inner.random_bytes();
    let keys: Vec<Key> = blocks.iter().map(|block| block.info.key).collect();
    let mut time = Allowance::of(inner, prover.peer.id);
    let proofs = ask(inner, prover, nonce, &keys, &mut time).await;
    let shows = |(block, proof): (&&StoredBlock, Option<Proof>)| {
        proof.is_some_and(|proof| {
            proof.version == block.info.version && proof.mac == mac(&nonce, &block.bytes)
        })
    };
    blocks.iter().zip(proofs).map(shows).collect()
}

/// Asks one prover; nothing for what it does not answer in its time.
async fn ask(
    inner: &Inner,
    prover: &Node,
    nonce: [u8; 32],
    keys: &[Key],
    time: &mut Allowance,
) -> Vec<Option<Proof>> {
    let mut proofs: Vec<Option<Proof>> = Vec::with_capacity(keys.len());
    let mut busy = 0;
    while proofs.len() < keys.len() {
        let asked = keys[proofs.len()..].to_vec();
        let count = asked.len();
        let header = to_header(&Prove { nonce, keys: asked });
        let request = Request { method: rpc::PROVE, header, parts: Vec::new() };
        let reply = match time.call(inner, prover, request).await {
            Ok(Some(reply)) => reply,
            Err(CallError::Refused(refusal))
                if refusal.code == Refusal::OVERLOADED && busy < MAX_BUSY =>
            {
                busy += 1;
                sleep(&*inner.env, jittered(&*inner.env, BUSY_PAUSE)).await;
                continue;
            }
            Ok(None) | Err(_) => break,
        };
        let Ok(ProveReply { proofs: Capped(some) }) = from_header(&reply.header) else { break };
        if some.is_empty() || some.len() > count {
            break;
        }
        proofs.extend(some);
    }
    proofs.resize(keys.len(), None);
    proofs
}

/// Whether a proof is good for a block held here, whose hash with the nonce is `mac`.
async fn shows(
    inner: &Inner,
    prover: &Node,
    info: &BlockInfo,
    mac: &[u8; 32],
    proof: &Proof,
    time: &mut Allowance,
) -> bool {
    if proof.lease_secs < least_lease(inner.lease_left(info)) {
        return false;
    }
    if proof.version > info.version && info.kind == BlockKind::Signed {
        return shows_newer(inner, prover, info, time).await;
    }
    proof.version == info.version && proof.mac == *mac
}

/// Whether the prover sends a sound block of a higher version.
async fn shows_newer(inner: &Inner, prover: &Node, info: &BlockInfo, time: &mut Allowance) -> bool {
    let header = to_header(&Fetch { keys: vec![info.key] });
    let request = Request { method: rpc::FETCH, header, parts: Vec::new() };
    let Ok(Some(reply)) = time.call(inner, prover, request).await else { return false };
    let one = from_header::<FetchReply>(&reply.header).is_ok_and(|r| r.blocks.0.len() == 1);
    let [bytes] = &reply.parts[..] else { return false };
    one && BlockKind::Signed.verify(&info.key, bytes).is_ok_and(|version| version > info.version)
}
