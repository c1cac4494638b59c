//! Whether a publisher is where it says, and has made the receipt shown (CFS §5.4: "publishers
//! respond to a confirmation request that includes a random nonce, as described in Section 4.4").
//!
//! Before an address is charged for the first time, and again after an hour, this node asks the
//! publisher: the node at the claimed address must prove the publisher's key and say that it made
//! the receipt. In between nothing is asked. An open connection that ends at the claimed IP address
//! has proven the key there, whichever side made it ([`Transport::remote_ip`]); only without one is
//! the publisher dialled ([`Transport::reach`]). A publisher that shows its receipt itself is not asked whether
//! it made it.
//!
//! Nodes cannot be made to call others at random: only a receipt with a valid signature leads to a
//! call; one call serves all requests that show it meanwhile; calls are limited for each address
//! and in total; and a publisher that does not answer is not called again for a while. A disowned
//! receipt is not held against the next one, so a replayed old receipt cannot lock its publisher
//! out.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::{BoxFuture, Env, Instant};
use atoll_key::PeerId;
use atoll_net::{CallError, Peer, Refusal, Transport};
use futures_util::FutureExt;
use futures_util::future::Shared;

use crate::accounting::receipt::BAD_RECEIPT;
use crate::rpc::{Confirm, send};

/// How long a confirmation holds.
const CONFIRMED_FOR: Duration = Duration::from_secs(3600);
/// How long a publisher that did not answer is not asked again: as long as the transport, at
/// most, does not dial a peer again. Longer, and one lost dial keeps it from publishing.
const REFUSED_FOR: Duration = Duration::from_secs(2);
/// Publishers remembered, confirmed or not.
const MAX_KNOWN: usize = 4096;
/// Confirmations under way at once.
const MAX_ASKING: usize = 64;
/// Of them, at one address.
const MAX_ASKING_ADDRESS: usize = 4;
/// Confirmations under way for receipts that one peer has shown: addresses where no node answers
/// cost it nothing, and must not keep other publishers waiting.
const MAX_ASKING_SOURCE: usize = 8;
/// Receipts of its own that a node remembers. At a mebibyte each, the last 4 GiB.
const MAX_ISSUED: usize = 4096;

/// Why a publisher was not confirmed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum Doubt {
    /// Its key does not answer at its address.
    #[error("it does not answer there: {0}")]
    Absent(String),
    /// It does not say that it made the receipt.
    #[error("{0}")]
    Disowned(String),
}

/// Whether a publisher was confirmed, or why not.
type Verdict = Result<(), Doubt>;

/// A publisher and the address it claims: with its port, or a receipt from before it moved
/// to another one could discredit it there.
type Claim = (PeerId, SocketAddr);

/// What is being asked: of a claim, about a receipt.
type Question = (Claim, Option<[u8; 32]>);

type Asking = Shared<BoxFuture<'static, Verdict>>;

/// What is known of publishers, and what this node has published.
#[derive(Default)]
pub(crate) struct Confirmations {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    known: BTreeMap<Claim, (Verdict, Instant)>,
    /// And the peer that has shown the receipt.
    asking: BTreeMap<Question, (PeerId, Asking)>,
    issued: VecDeque<[u8; 32]>,
}

impl State {
    /// Whether one more may be asked at this address, for what `source` has shown.
    fn may_ask(&self, ip: IpAddr, source: &PeerId) -> bool {
        let here = self.asking.keys().filter(|((_, at), _)| at.ip() == ip).count();
        let shown = self.asking.values().filter(|(by, _)| by == source).count();
        self.asking.len() < MAX_ASKING && here < MAX_ASKING_ADDRESS && shown < MAX_ASKING_SOURCE
    }

    /// Whether this is what is being asked at present.
    fn is_asking(&self, question: &Question, asking: &Asking) -> bool {
        self.asking.get(question).is_some_and(|(_, now)| now.ptr_eq(asking))
    }

    fn remember(&mut self, claim: Claim, verdict: Verdict, now: Instant) {
        if matches!(verdict, Err(Doubt::Disowned(_))) {
            return;
        }
        let hold = if verdict.is_ok() { CONFIRMED_FOR } else { REFUSED_FOR };
        if self.known.len() >= MAX_KNOWN && !self.known.contains_key(&claim) {
            self.known.retain(|_, (_, until)| *until > now);
            if self.known.len() >= MAX_KNOWN {
                let soonest = self.known.iter().min_by_key(|(_, (_, until))| *until);
                soonest.map(|(claim, _)| *claim).map(|claim| self.known.remove(&claim));
            }
        }
        self.known.insert(claim, (verdict, now + hold));
    }
}

impl Confirmations {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }

    /// Remembers a receipt of this node's.
    pub(super) fn issued(&self, digest: [u8; 32]) {
        let mut state = self.lock();
        if state.issued.len() == MAX_ISSUED {
            state.issued.pop_front();
        }
        state.issued.push_back(digest);
    }

    /// Whether this node made the receipt with this digest, not too many receipts ago.
    pub(crate) fn is_mine(&self, digest: &[u8; 32]) -> bool {
        // The newest come last, and are shown first.
        self.lock().issued.iter().rev().any(|issued| issued == digest)
    }

    /// Makes sure that `publisher` is where it says, and made the receipt with this digest
    /// if there is one, as `source` has shown. Takes at most `limit`, and no time if that is
    /// known. Cancel-safe.
    ///
    /// # Errors
    /// If it is not, or too much is being confirmed at present.
    pub(super) async fn confirm(
        &self,
        env: &Env,
        transport: &Arc<dyn Transport>,
        source: &PeerId,
        publisher: Peer,
        digest: Option<[u8; 32]>,
        limit: Duration,
    ) -> Result<(), Refusal> {
        let claim = (publisher.id, publisher.addr);
        // Another of its receipts, being asked about, may do for this one.
        if let Some((question, other)) = self.other_asking(claim, digest)
            && self.wait(env, question, other).await.is_ok()
        {
            return Ok(());
        }
        let question: Question = (claim, digest);
        let asking = {
            let mut state = self.lock();
            if let Some((verdict, until)) = state.known.get(&claim)
                && *until > env.now()
            {
                return refusal(&publisher, verdict.clone());
            }
            let ip = publisher.addr.ip();
            if !state.asking.contains_key(&question) && !state.may_ask(ip, source) {
                let text = "too many publishers are being confirmed; try again";
                return Err(Refusal::new(Refusal::OVERLOADED, text));
            }
            let begin = || {
                let nonce = [env.random_u64(), env.random_u64()].map(u64::to_be_bytes);
                let nonce = nonce.concat().try_into().expect("16 bytes");
                let confirm = digest.map(|digest| Confirm { nonce, digest });
                let asking = ask(transport.clone(), publisher, confirm, limit);
                let asking: BoxFuture<'static, Verdict> = Box::pin(asking);
                (*source, asking.shared())
            };
            state.asking.entry(question).or_insert_with(begin).1.clone()
        };
        refusal(&publisher, self.wait(env, question, asking).await)
    }

    /// Waits for an answer and remembers it. If the caller that asked gives up, the
    /// next one that waits goes on asking.
    async fn wait(&self, env: &Env, question: Question, asking: Asking) -> Verdict {
        let answer = asking.clone();
        let waiting = Waiting { confirmations: self, question, asking: Some(asking) };
        let verdict = answer.await;
        let mut state = self.lock();
        if waiting.asking.as_ref().is_some_and(|asking| state.is_asking(&question, asking)) {
            state.asking.remove(&question);
            state.remember(question.0, verdict.clone(), env.now());
        }
        drop(state);
        verdict
    }

    /// What is being asked of a publisher about another receipt.
    fn other_asking(&self, claim: Claim, digest: Option<[u8; 32]>) -> Option<(Question, Asking)> {
        let state = self.lock();
        if state.asking.contains_key(&(claim, digest)) {
            return None;
        }
        let of_claim = (claim, None)..=(claim, Some([0xff; 32]));
        let (question, (_, asking)) = state.asking.range(of_claim).next()?;
        Some((*question, asking.clone()))
    }
}

/// A request that waits for an answer. Its caller may give up at any time; the last request
/// to give up waiting takes the question back, or it would be in the way of others for ever.
struct Waiting<'a> {
    confirmations: &'a Confirmations,
    question: Question,
    asking: Option<Asking>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut state = self.confirmations.lock();
        let Some(asking) = self.asking.take() else { return };
        let is_asking = state.is_asking(&self.question, &asking);
        drop(asking);
        let waiting = |(_, asking): &(PeerId, Asking)| asking.strong_count() != Some(1);
        let given_up = if is_asking && !state.asking.get(&self.question).is_some_and(waiting) {
            state.asking.remove(&self.question)
        } else {
            None
        };
        drop(state);
        drop(given_up);
    }
}

fn refusal(publisher: &Peer, verdict: Verdict) -> Result<(), Refusal> {
    verdict.map_err(|why| {
        Refusal::new(BAD_RECEIPT, format!("publisher {publisher} could not be confirmed: {why}"))
    })
}

/// Asks at the claimed address: is the key there, and did it make this receipt?
async fn ask(
    transport: Arc<dyn Transport>,
    publisher: Peer,
    question: Option<Confirm>,
    limit: Duration,
) -> Verdict {
    let made = async {
        let Some(question) = question else { return Ok(()) };
        let disowned = |why: &str| Err(Doubt::Disowned(why.to_owned()));
        match send(&*transport, publisher, &question, Vec::new(), limit).await {
            Ok((reply, _)) if reply.nonce != question.nonce => disowned("it repeats another nonce"),
            Ok((reply, _)) if reply.is_mine => Ok(()),
            Ok(_) => disowned("it did not make this receipt"),
            Err(CallError::Refused(refusal)) => disowned(&refusal.to_string()),
            Err(error) => Err(absent(error)),
        }
    };
    let there = async {
        if is_connected(&*transport, &publisher) {
            return Ok(());
        }
        transport.reach(publisher, limit).await.map_err(absent)
    };
    let (there, made) = futures_util::join!(there, made);
    there.and(made)
}

/// Whether the publisher's key is proven at its IP address by a connection that is open.
fn is_connected(transport: &dyn Transport, publisher: &Peer) -> bool {
    let ip = transport.remote_ip(&publisher.id);
    ip.is_some_and(|ip| ip.to_canonical() == publisher.addr.ip().to_canonical())
}

fn absent(error: CallError) -> Doubt {
    Doubt::Absent(error.to_string())
}
