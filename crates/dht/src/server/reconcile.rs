//! `RECONCILE`: compares ranges. At least one claim is answered, whatever that costs; others only
//! while little has been looked at.

use std::sync::Arc;

use atoll_net::{Peer, Refusal};
use atoll_store::StoreError;
use bytes::Bytes;

use super::Handle;
use super::work_limit::Limits;
use crate::holdings::ranges::{CUT_LOOKS, cut, first_items, summary};
use crate::replication::reconcile::{Plan, plan};
use crate::rpc::{Answer, Answered, Claim, Reconcile, ReconcileReply};
use crate::server::Server;

/// Blocks looked at for one request before further claims are left unanswered. A guess:
/// some milliseconds of work.
const MAX_VISITED: u64 = 16_384;
/// The reply must fit a header, and one answer has at most 2,048 × 72 bytes: no further claim is
/// answered beyond this.
const ENOUGH_BYTES: usize = 100_000;
/// What comparing may cost, blocks looked at a second. Guesses: a look takes about half a
/// microsecond, so together some tenths of a core.
pub(crate) const LIMITS: Limits =
    Limits { at_once: 16, of_one: 1, peer: 50_000, strangers: 100_000, known: 200_000 };

impl Handle<Reconcile> for Arc<Server> {
    async fn handle(
        &self,
        from: Peer,
        request: Reconcile,
        _: Vec<Bytes>,
    ) -> Result<Answered<Reconcile>, Refusal> {
        let is_known = self.is_known_peer(&from.id);
        let permit = self.comparing.acquire(from.id, is_known, self.env.now())?;
        let mut answers = Vec::with_capacity(request.claims.len());
        let (mut bytes, mut visited) = (0, 0);
        for claim in request.claims {
            let answered = compare(self, &claim).await;
            let (answer, looks) =
                answered.map_err(|e| Refusal::new(Refusal::INTERNAL, e.to_string()))?;
            permit.spend(looks, self.env.now());
            visited += looks;
            bytes += answer.header_bytes();
            answers.push(answer);
            if bytes > ENOUGH_BYTES || visited > MAX_VISITED {
                break;
            }
        }
        Ok((ReconcileReply { answers: answers.into() }, Vec::new()))
    }
}

/// Answers a peer's claim; also says what that cost, in blocks looked at.
async fn compare(server: &Server, claim: &Claim) -> Result<(Answer, u64), StoreError> {
    let (own, mut looks) = match claim.summary.count {
        // A newcomer takes all there is, whatever it sums up to.
        0 => (None, 0),
        _ => summary(server, claim.range).await.map(|(own, looks)| (Some(own), looks))?,
    };
    match plan(claim, own.as_ref()) {
        Plan::Same => return Ok((Answer::Same, looks)),
        Plan::Parts => {
            looks = 2 * looks + CUT_LOOKS;
            let parts = cut(server, claim.range).await?;
            if parts.len() > 1 {
                return Ok((Answer::Parts(parts), looks));
            }
        }
        Plan::Items => {}
    }
    let (items, rest) = first_items(server, claim.range)?;
    looks += items.len() as u64 + 1;
    let answer = match rest {
        None if items.is_empty() && claim.summary.count == 0 => Answer::Same,
        None => Answer::Items(items),
        Some(rest) => Answer::Some { items, upto: rest.after },
    };
    Ok((answer, looks))
}
