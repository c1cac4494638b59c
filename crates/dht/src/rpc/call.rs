//! Calling a peer: the one place where a call's outcome is told to the peer book and the overlay.

use std::time::Duration;

use atoll_env::timeout;
use atoll_net::{CallError, Reply, Request};
use atoll_overlay::Node;
use atoll_store::BlockInfo;
use bytes::Bytes;

use super::{BlockHeader, COMPARE_LIMIT, Method, TimeLimit, WATCH_WAIT, read_reply, to_request};
use crate::rpc::Rpc;

/// The shortest limit of a lookup's question. A guess: as the overlay's calls.
const MIN_LOOKUP_LIMIT: Duration = Duration::from_secs(2);

/// The header of a reply and its parts.
pub(crate) type Answered<M> = (<M as Method>::Reply, Vec<Bytes>);

impl Rpc {
    /// The description of a stored block, for a message.
    pub(crate) fn header_of(&self, info: &BlockInfo) -> BlockHeader {
        BlockHeader { key: info.key, kind: info.kind, lease_secs: self.lease_left(info) }
    }

    /// Calls a peer and checks its reply; the time limit is the method's. A call to this node
    /// itself goes to its own handler, without a limit.
    pub(crate) async fn call<M: Method>(
        &self,
        to: &Node,
        header: &M,
        parts: Vec<Bytes>,
    ) -> Result<Answered<M>, CallError> {
        let limit = self.config.call_limit;
        let request = to_request(header, parts);
        let called = match M::SPEC.time {
            _ if self.is_me(to) => {
                let answer = self.answer_own.get().expect("set when the node is built");
                answer(request).await.map_err(CallError::from)
            }
            TimeLimit::Lookup => {
                let book = self.overlay.peer_book();
                let limit = book.patience(&to.peer.id, MIN_LOOKUP_LIMIT, limit);
                self.observe(to, request, limit, true).await
            }
            TimeLimit::Call => self.observe(to, request, limit, false).await,
            TimeLimit::Compare => self.observe(to, request, COMPARE_LIMIT, false).await,
            TimeLimit::Watch => self.observe(to, request, WATCH_WAIT + limit, false).await,
            TimeLimit::Half => {
                self.within(limit / 2, self.observe(to, request, limit, false)).await
            }
            TimeLimit::Quarter => {
                self.within(limit / 4, self.observe(to, request, limit, false)).await
            }
        };
        Ok(read_reply::<M>(header.entries(), called?)?)
    }

    /// What a call returns in less time than its own limit. That a peer takes longer says nothing
    /// about it.
    pub(crate) async fn within<T>(
        &self,
        limit: Duration,
        call: impl Future<Output = Result<T, CallError>>,
    ) -> Result<T, CallError> {
        timeout(&*self.env, limit, call).await.unwrap_or(Err(CallError::TimedOut))
    }

    /// Makes a call; if the peer seems to have failed, tells the overlay. How long it took goes
    /// into the peer book where the answer `is_short`: one block at most.
    async fn observe(
        &self,
        to: &Node,
        request: Request,
        limit: Duration,
        is_short: bool,
    ) -> Result<Reply, CallError> {
        let (book, start) = (self.overlay.peer_book(), self.env.now());
        let result = self.transport.call(to.peer, request, limit).await;
        let now = self.env.now();
        match &result {
            // This process was stopped, and says nothing of the peer.
            Ok(_) | Err(CallError::Refused(_)) if self.was_stopped(start, limit) => {
                book.lives(&to.peer.id, now);
            }
            Err(CallError::TimedOut) if self.was_stopped(start, limit) => {}
            // The peer has answered another call meanwhile; this one waited in a queue.
            Err(CallError::TimedOut) if book.has_answered_since(&to.peer.id, start) => {
                book.late(&to.peer, now);
            }
            Err(error) if error.is_failure_of_peer() => {
                book.silent(&to.peer, now);
                match (error, is_short) {
                    // Many blocks may take longer than any limit, over a line that is slow.
                    (CallError::TimedOut, false) => self.overlay.probe(&to.peer),
                    _ => self.overlay.report_failure(&to.peer),
                }
            }
            Ok(_) | Err(CallError::Refused(_)) if is_short => {
                book.answered(&to.peer.id, now.since(start), now);
            }
            Ok(_) | Err(CallError::Refused(_)) => book.lives(&to.peer.id, now),
            _ => {}
        }
        result
    }
}
