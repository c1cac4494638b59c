//! Calls that take longer than usual, and whether the node that was called is there.
//!
//! A call may wait in a queue, at a busy node or on a full line, so that it takes long says nothing about whether its
//! node lives. So a node whose answer is overdue is sent a *ping* on the side, and another a while after each that it
//! answers. A node that leaves one unanswered is *silent*: callers pass it over, and it is asked last, until it
//! answers anything. The call goes on, and its answer still counts.
//!
//! A node that was stopped and goes on answers late what was under way. That must not become its usual time, or it is
//! waited for longer when it is stopped again: the peer book does not time such answers, and [`MOST_USUAL`] bounds
//! what is waited for before the first ping.
//!
//! A timer that is much too late says that this process was stopped itself. Its calls say nothing of others then.

use std::sync::Arc;
use std::time::Duration;

use atoll_env::{BoxFuture, Instant, sleep};
use atoll_key::PeerId;
use atoll_net::{PROBE, Peer, Request};
use atoll_overlay::Node;
use atoll_overlay::peer_book::{PeerBook, Standing};
use futures_util::future::{Either, select};

use crate::rpc::Rpc;

/// No short call is taken for usual that takes longer. A guess: half of what a stopped node may delay a reader, the
/// other half being for the ping.
pub(crate) const MOST_USUAL: Duration = Duration::from_secs(1);
/// A ping is given at least so long: a busy machine may need as long. A guess.
const LEAST_PING: Duration = Duration::from_secs(1);
/// And at most so long where short answers take long too, besides the time of what is on the line. A guess.
const MOST_PING: Duration = Duration::from_secs(2);
/// A timer that ends so much too late was not looked at: the process was stopped. A guess.
const STOPPED: Duration = Duration::from_secs(1);

/// What has come of a call.
pub(crate) enum Heard<T> {
    /// The call has ended.
    Answer(T),
    /// Neither an answer has come in its usual time nor one to a ping; the call goes on.
    Silent(BoxFuture<'static, T>),
}

/// After how long an answer to a short call is overdue.
fn overdue_after(short: &PeerBook, peer: &PeerId) -> Duration {
    short.late_after(peer).min(MOST_USUAL)
}

/// How long an answer to a ping is waited for on a line that carries little.
fn ping_limit(short: &PeerBook, peer: &PeerId) -> Duration {
    short.late_after(peer).clamp(LEAST_PING, MOST_PING)
}

/// Waits for a short call to a node, or until that is silent.
pub(crate) fn hear<T: Send + 'static>(
    rpc: &Arc<Rpc>,
    node: Node,
    call: impl Future<Output = T> + Send + 'static,
) -> BoxFuture<'static, Heard<T>> {
    let after = overdue_after(rpc.overlay.peer_book(), &node.peer.id);
    hear_long(rpc, node, call, after, || Duration::ZERO)
}

/// Waits for a call to a node that is overdue `after` so long, or until the node is silent. `line_time` tells how
/// long the line needs for what this node is sending: a ping waits for that.
pub(crate) fn hear_long<T: Send + 'static>(
    rpc: &Arc<Rpc>,
    node: Node,
    call: impl Future<Output = T> + Send + 'static,
    after: Duration,
    line_time: impl Fn() -> Duration + Send + 'static,
) -> BoxFuture<'static, Heard<T>> {
    let (rpc, call) = (rpc.clone(), Box::pin(call) as BoxFuture<'static, T>);
    Box::pin(async move {
        if rpc.is_me(&node) || !rpc.config.mechanisms.side_pings {
            return Heard::Answer(call.await);
        }
        let silent = std::pin::pin!(rpc.until_silent(&node.peer, after, line_time));
        match select(call, silent).await {
            Either::Left((answer, _)) => Heard::Answer(answer),
            Either::Right(((), call)) => Heard::Silent(call),
        }
    })
}

impl Rpc {
    /// Resolves when a peer, asked something now, has not answered a ping that was sent `after` so long, or later.
    async fn until_silent(
        &self,
        peer: &Peer,
        after: Duration,
        line_time: impl Fn() -> Duration + Send,
    ) {
        let book = self.overlay.peer_book();
        sleep(&*self.env, after).await;
        loop {
            let (began, limit) = (self.env.now(), ping_limit(book, &peer.id) + line_time());
            let ping = Request { method: PROBE, ..Request::default() };
            let answer = self.transport.call(*peer, ping, limit).await;
            let now = self.env.now();
            match answer {
                Err(error) if error.is_failure_of_peer() && !self.was_stopped(began, limit) => {
                    // Calls to it that are overdue at the same time are one silence.
                    if book.standing(peer, now) != Standing::Silent {
                        book.silent(peer, now);
                    }
                    self.overlay.probe(peer);
                    return;
                }
                // That it answers says that it lives, and nothing of the call.
                _ => {}
            }
            sleep(&*self.env, limit.saturating_sub(now.since(began))).await;
        }
    }

    /// Whether this process was stopped since then, while it waited at most so long for something.
    pub(super) fn was_stopped(&self, began: Instant, limit: Duration) -> bool {
        self.env.now().since(began) > limit + STOPPED
    }
}

/// What came of a call, once it has ended.
pub(crate) async fn ended<T>(heard: Heard<T>) -> T {
    match heard {
        Heard::Answer(answer) => answer,
        Heard::Silent(call) => call.await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const PEER: PeerId = PeerId([1; 32]);

    fn book(answer: Duration) -> PeerBook {
        let book = PeerBook::default();
        (0..20).for_each(|n| book.answered(&PEER, answer, Instant(n)));
        book
    }

    #[test]
    fn a_silent_peer_is_passed_over_after_two_seconds_or_three_if_it_is_always_slow() {
        let most = |answer| {
            let book = book(answer);
            overdue_after(&book, &PEER) + ping_limit(&book, &PEER)
        };
        assert!(most(MS * 5) <= MS * 1_100, "{:?}", most(MS * 5));
        assert!(most(MS * 200) <= MS * 1_700, "{:?}", most(MS * 200));
        assert!(most(MS * 400) <= MS * 2_100, "{:?}", most(MS * 400));
        assert_eq!(most(Duration::from_secs(10)), Duration::from_secs(3));
    }

    #[test]
    fn a_ping_is_given_as_long_as_a_busy_peer_takes() {
        assert_eq!(ping_limit(&book(MS), &PEER), LEAST_PING);
        let busy = ping_limit(&book(MS * 700), &PEER);
        assert!(busy > MS * 1_400 && busy <= MOST_PING, "{busy:?}");
    }
}
