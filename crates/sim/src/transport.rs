//! `net::Transport` of one incarnation of a host.

use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use atoll_env::BoxFuture;
use atoll_key::PeerId;
use atoll_net::{CallError, Peer, Reply, Request, Service, Transport};

use crate::world::network::fits;
use crate::world::{Grave, Shared};

/// What a host's code asks for peers. Of a dead incarnation: calls fail at once.
pub(crate) struct SimTransport {
    pub(crate) shared: Arc<Shared>,
    pub(crate) host: u32,
    pub(crate) incarnation: u32,
    pub(crate) local: Peer,
}

impl Transport for SimTransport {
    fn local(&self) -> Peer {
        self.local
    }

    fn call(
        &self,
        to: Peer,
        request: Request,
        limit: Duration,
    ) -> BoxFuture<'static, Result<Reply, CallError>> {
        if !fits(&request.header, &request.parts) {
            return Box::pin(std::future::ready(Err(CallError::TooLarge)));
        }
        Box::pin(Call {
            shared: self.shared.clone(),
            caller: (self.host, self.incarnation),
            state: CallState::Unsent(Some((to, request, limit))),
        })
    }

    /// With [`crate::Connections::Instant`] a connection takes no time to make: all hosts that run have one.
    fn remote_ip(&self, peer: &PeerId) -> Option<IpAddr> {
        self.shared.with(|world| {
            let other = *world.host_by_id.get(peer)?;
            let is_known = world.is_current(self.host, self.incarnation)
                && world.is_connected(self.host, other);
            is_known.then(|| world.host_mut(other).peer.addr.ip())
        })
    }

    fn round_trip(&self, peer: &PeerId) -> Option<Duration> {
        self.shared.with(|world| {
            let callee = *world.host_by_id.get(peer)?;
            // Either side measures the connection that both have.
            let back = || world.round_trip(callee, self.host);
            world.round_trip(self.host, callee).or_else(back)
        })
    }

    fn serve(&self, service: Arc<dyn Service>) {
        self.shared.with(|world| {
            let unused = if world.is_current(self.host, self.incarnation) {
                world.host_mut(self.host).service.replace(service)
            } else {
                Some(service)
            };
            world.graves.extend(unused.map(Grave::Service));
        });
    }
}

enum CallState {
    /// Not polled yet; empty for a moment while it is sent.
    Unsent(Option<(Peer, Request, Duration)>),
    /// The slot that is held for us.
    Sent(u32),
    Done,
}

struct Call {
    shared: Arc<Shared>,
    caller: (u32, u32),
    state: CallState,
}

impl Future for Call {
    type Output = Result<Reply, CallError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        match &mut this.state {
            CallState::Unsent(what) => {
                let (to, request, limit) = what.take().expect("sent once");
                let caller = this.caller;
                let started = this
                    .shared
                    .with(|world| world.start_call(caller, to, request, limit, cx.waker().clone()));
                match started {
                    Ok(slot) => {
                        this.state = CallState::Sent(slot);
                        Poll::Pending
                    }
                    Err(error) => {
                        this.state = CallState::Done;
                        Poll::Ready(Err(error))
                    }
                }
            }
            CallState::Sent(slot) => {
                let slot = *slot;
                let outcome = this.shared.with(|world| {
                    let outcome = world.poll_call(slot, cx.waker())?;
                    world.leave_call(slot);
                    Some(outcome)
                });
                let Some(outcome) = outcome else { return Poll::Pending };
                this.state = CallState::Done;
                Poll::Ready(outcome)
            }
            CallState::Done => panic!("a call is not polled after its outcome"),
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if let CallState::Sent(slot) = self.state {
            self.shared.with(|world| world.leave_call(slot));
        }
    }
}
