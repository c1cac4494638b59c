//! Receipts whose signatures were verified lately.
//!
//! A publisher signs one receipt for all blocks that it puts at once, and each message with some of
//! them carries it. Verifying an Ed25519 signature takes 50 µs, as long as hashing a block of
//! 64 KiB, so a node verifies each receipt once.

use std::collections::VecDeque;
use std::sync::Mutex;

use super::receipt::{Attestor, Receipt};

/// Receipts remembered, the last ones. A guess: a publisher has 8 batches under way at once.
const MAX_VERIFIED: usize = 256;

/// See the module.
#[derive(Default)]
pub(crate) struct VerifiedReceipts {
    /// The [`Receipt::fingerprint`] of each verified receipt, the newest last.
    fingerprints: Mutex<VecDeque<[u8; 32]>>,
}

impl VerifiedReceipts {
    /// Whether a receipt's publisher has signed it.
    pub(super) fn is_signed(&self, receipt: &Receipt, attestor: &dyn Attestor) -> bool {
        let fingerprint = receipt.fingerprint();
        let is_known = {
            let fingerprints = self.fingerprints.lock().expect("no holder of this lock panics");
            fingerprints.iter().rev().any(|known| *known == fingerprint)
        };
        let is_signed = is_known || receipt.is_signed(attestor);
        if is_signed && !is_known {
            self.remember(fingerprint);
        }
        is_signed
    }

    /// Remembers a receipt with a sound signature.
    pub(super) fn remember(&self, fingerprint: [u8; 32]) {
        let mut fingerprints = self.fingerprints.lock().expect("no holder of this lock panics");
        if fingerprints.len() == MAX_VERIFIED {
            fingerprints.pop_front();
        }
        fingerprints.push_back(fingerprint);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use atoll_key::{Key, PeerId, SecretKey};
    use atoll_net::Peer;

    use super::*;

    /// Counts the signatures that it verifies.
    struct Counting(SecretKey, AtomicUsize);

    impl Attestor for Counting {
        fn sign(&self, message: &[u8]) -> [u8; 64] {
            self.0.sign(message)
        }

        fn verify(&self, by: &PeerId, message: &[u8], signature: &[u8; 64]) -> bool {
            self.1.fetch_add(1, Ordering::Relaxed);
            Attestor::verify(&self.0, by, message, signature)
        }
    }

    #[test]
    fn a_sound_receipt_is_verified_once_and_a_forged_one_each_time() {
        let attestor = Counting(SecretKey::from_seed(&[1; 32]), AtomicUsize::new(0));
        let addr = "10.1.2.3:4".parse().expect("an address");
        let publisher = Peer { id: attestor.0.peer_id(), addr };
        let sound = |n| {
            let keys = std::iter::once(Key::hashed([n; 32]));
            Receipt::sign(&attestor, publisher, 1_000_000, 500_000, keys)
        };
        let verified = VerifiedReceipts::default();
        let first = sound(0);
        for _ in 0..3 {
            assert!(verified.is_signed(&first, &attestor));
        }
        assert_eq!(attestor.1.swap(0, Ordering::Relaxed), 1);
        let forged = first.with_other_signature();
        for _ in 0..3 {
            assert!(!verified.is_signed(&forged, &attestor));
        }
        assert_eq!(attestor.1.swap(0, Ordering::Relaxed), 3);
        for _ in 0..MAX_VERIFIED {
            verified.remember([7; 32]);
        }
        assert!(verified.is_signed(&first, &attestor), "forgotten, and verified again");
        assert_eq!(attestor.1.swap(0, Ordering::Relaxed), 1);
    }
}
