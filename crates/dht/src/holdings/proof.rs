//! Proof that a node holds blocks (`docs/design/dht.md`, rule R1).
//!
//! The asker draws a nonce for each prover; the prover answers with the BLAKE3 hash of each block
//! keyed with it, which only a node that has the bytes can compute. The asker has the bytes as
//! well: it asks before it drops its own copy, or before it counts on a node that has just taken
//! one (`diversion`).
//!
//! Not covered: a proof does not show that the bytes are on the prover's own disk. It may have
//! fetched them from a third node, though not from the asker, which denies having them meanwhile
//! ([`super::pending_removals`]).

use std::time::Duration;

use atoll_env::{jittered, sleep};
use atoll_key::Key;
use atoll_net::{CallError, Refusal};
use atoll_overlay::Node;
use atoll_store::{BlockInfo, StoredBlock};
use futures_util::future::join_all;

use crate::holdings::Holdings;
use crate::lease_clock::least_lease;
use crate::rpc::budget::PeerBudget;
use crate::rpc::{Fetch, Proof, Prove};

/// How often a prover that is busy is asked again, and after how long. Guesses.
const MAX_BUSY: usize = 3;
const BUSY_PAUSE: Duration = Duration::from_millis(100);
pub(crate) fn mac(nonce: &[u8; 32], bytes: &[u8]) -> [u8; 32] {
    *blake3::keyed_hash(nonce, bytes).as_bytes()
}

/// For each of `provers`, which of `blocks` it proves to hold: as they are held here or in a
/// higher version, and for as long.
pub(crate) async fn proven_by(
    holdings: &Holdings,
    provers: &[Node],
    blocks: &[BlockInfo],
) -> Vec<Vec<bool>> {
    let nonces: Vec<[u8; 32]> = provers.iter().map(|_| holdings.random_bytes()).collect();
    let mut macs: Vec<Vec<Option<[u8; 32]>>> =
        vec![Vec::with_capacity(blocks.len()); provers.len()];
    for info in blocks {
        let held = holdings.read(&info.key).await.filter(|held| held.info.version == info.version);
        for (macs, nonce) in macs.iter_mut().zip(&nonces) {
            macs.push(held.as_ref().map(|held| mac(nonce, &held.bytes)));
        }
    }
    let keys: Vec<Key> = blocks.iter().map(|info| info.key).collect();
    let answers = provers.iter().zip(nonces).zip(macs).map(|((prover, nonce), macs)| {
        let keys = &keys;
        async move {
            let mut time = PeerBudget::of(holdings, prover.peer.id);
            let proofs = ask(holdings, prover, nonce, keys, &mut time).await;
            let mut proven = Vec::with_capacity(blocks.len());
            for ((info, mac), proof) in blocks.iter().zip(macs).zip(proofs) {
                proven.push(match (mac, proof) {
                    (Some(mac), Some(proof)) => {
                        shows(holdings, prover, info, &mac, &proof, &mut time).await
                    }
                    _ => false,
                });
                time.moved(u64::from(proven.ends_with(&[true])), 0);
            }
            proven
        }
    });
    join_all(answers).await
}

/// Which of `blocks`, whose bytes `prover` was given by this node, it proves to have in the
/// version given.
pub(crate) async fn has_taken(
    holdings: &Holdings,
    prover: &Node,
    blocks: &[&StoredBlock],
) -> Vec<bool> {
    let nonce = holdings.random_bytes();
    let keys: Vec<Key> = blocks.iter().map(|block| block.info.key).collect();
    let mut time = PeerBudget::of(holdings, prover.peer.id);
    let proofs = ask(holdings, prover, nonce, &keys, &mut time).await;
    let shows = |(block, proof): (&&StoredBlock, Option<Proof>)| {
        proof.is_some_and(|proof| {
            proof.version == block.info.version && proof.mac == mac(&nonce, &block.bytes)
        })
    };
    blocks.iter().zip(proofs).map(shows).collect()
}

/// Asks one prover; nothing for what it does not answer in its time.
pub(crate) async fn ask(
    holdings: &Holdings,
    prover: &Node,
    nonce: [u8; 32],
    keys: &[Key],
    time: &mut PeerBudget<'_>,
) -> Vec<Option<Proof>> {
    let mut proofs: Vec<Option<Proof>> = Vec::with_capacity(keys.len());
    let mut busy = 0;
    while proofs.len() < keys.len() {
        let asked = keys[proofs.len()..].to_vec();
        let asked = Prove { nonce, keys: asked };
        match time.call(prover, &asked, Vec::new()).await {
            Ok(Some((reply, _))) => proofs.extend(reply.proofs.0),
            Err(CallError::Refused(refusal))
                if refusal.code == Refusal::OVERLOADED && busy < MAX_BUSY =>
            {
                busy += 1;
                sleep(&*holdings.env, jittered(&*holdings.env, BUSY_PAUSE)).await;
            }
            Ok(None) | Err(_) => break,
        }
    }
    proofs.resize(keys.len(), None);
    proofs
}

/// Whether a proof is good for a block held here, whose hash with the nonce is `mac`.
async fn shows(
    holdings: &Holdings,
    prover: &Node,
    info: &BlockInfo,
    mac: &[u8; 32],
    proof: &Proof,
    time: &mut PeerBudget<'_>,
) -> bool {
    if proof.lease_secs < least_lease(holdings.lease_left(info)) {
        return false;
    }
    if info.kind.replaces(proof.version, info.version) {
        return shows_newer(holdings, prover, info, time).await;
    }
    proof.version == info.version && proof.mac == *mac
}

/// Whether the prover sends a sound block that makes the one held here superfluous.
async fn shows_newer(
    holdings: &Holdings,
    prover: &Node,
    info: &BlockInfo,
    time: &mut PeerBudget<'_>,
) -> bool {
    let (key, kind) = (&info.key, info.kind);
    let fetch = Fetch { keys: vec![info.key] };
    let Ok(Some((_, parts))) = time.call(prover, &fetch, Vec::new()).await else {
        return false;
    };
    let [bytes] = &parts[..] else { return false };
    let Ok(version) = kind.verify(key, bytes) else { return false };
    let held = holdings.read(key).await;
    held.is_some_and(|held| kind.includes(bytes, &held.bytes, (version, held.info.version)))
}
