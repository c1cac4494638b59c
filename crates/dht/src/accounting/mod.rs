//! Accounting: this folder decides which account each block is charged to, and whether that account
//! has room for more (CFS §5.4).

pub(crate) mod admission;
pub(crate) mod attribution;
mod confirm;
pub(crate) mod owner;
pub mod quota;
pub mod receipt;
mod verified;

use std::sync::Arc;

use atoll_net::{Peer, Refusal};

use crate::context::layer_above;
use crate::holdings::Holdings;
use confirm::Confirmations;
use quota::Quota;
use receipt::Attestor;
use verified::VerifiedReceipts;

/// Quotas and reservations, confirmed publishers, and this node's own receipts.
pub(crate) struct Accounting {
    holdings: Arc<Holdings>,
    attestor: Arc<dyn Attestor>,
    pub quota: Quota,
    pub confirmations: Confirmations,
    verified: VerifiedReceipts,
}
layer_above!(Accounting, holdings: Arc<Holdings>);

impl Accounting {
    pub(crate) fn new(holdings: Arc<Holdings>, attestor: Arc<dyn Attestor>) -> Accounting {
        let quota = Quota::new(holdings.config.quota);
        Accounting {
            holdings,
            attestor,
            quota,
            confirmations: Confirmations::default(),
            verified: VerifiedReceipts::default(),
        }
    }

    /// Makes sure that a publisher, or a node that brings copies, is where it says; `from` has
    /// shown its receipt, or is the carrier.
    ///
    /// # Errors
    /// If it is not, or cannot be asked at present.
    async fn confirm(
        &self,
        from: &Peer,
        publisher: Peer,
        digest: Option<[u8; 32]>,
    ) -> Result<(), Refusal> {
        let limit = self.config.call_limit / 2;
        let (env, transport) = (&self.env, &self.transport);
        self.confirmations.confirm(env, transport, &from.id, publisher, digest, limit).await
    }
}
