//! The network's members and secret as a subsystem: what peers and the node's owner ask.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use atoll_env::{BoxFuture, Env};
use atoll_key::PeerId;
use atoll_net::{Peer, Service, TcpTransport, Transport};
use atoll_overlay::Overlay;

use super::{FAMILY, Membership, MembershipService};
use crate::config::StartError;
use crate::control::body::{Json, malformed};
use crate::control::calls::{Invite, Members, RotateSecret};
use crate::control::message::{Empty, Invited, Unfit};
use crate::control::server::Calls;
use crate::join_code::JoinCode;
use crate::status::{AwayNode, Member, MemberList, Status};
use crate::subsystem::Subsystem;

/// Successors named in an invitation besides the node itself.
const INVITED_SUCCESSORS: usize = 3;

/// The members that this node knows, and the invitation of new ones.
pub(crate) struct NetworkMembers {
    pub env: Env,
    pub membership: Arc<Membership>,
    pub transport: Arc<TcpTransport>,
    pub overlay: Arc<dyn Overlay>,
    pub listen: SocketAddr,
}

impl NetworkMembers {
    fn invite(&self) -> Invited {
        let around = self.overlay.neighbourhood();
        let successors = around.successors.iter().map(|node| node.peer).take(INVITED_SUCCESSORS);
        let peers = std::iter::once(self.transport.local()).chain(successors);
        let code = JoinCode::new(self.membership.network(), peers);
        let warning = if code.is_loopback_only() {
            Some(format!(
                "the node listens on {}: this code works on this machine only; \
                 for others, start it with --listen 0.0.0.0:PORT",
                self.listen
            ))
        } else if !around.joined {
            Some("the node has no place on the ring yet".into())
        } else {
            None
        };
        Invited { code: code.to_string(), warning }
    }

    fn list(&self) -> MemberList {
        let in_tables: Vec<Peer> =
            self.overlay.known_nodes().into_iter().map(|node| node.peer).collect();
        let connected = self.transport.connected();
        self.membership.list(self.transport.local(), &in_tables, &connected)
    }
}

impl Subsystem for NetworkMembers {
    fn service(self: Arc<Self>) -> Option<(u8, Arc<dyn Service>)> {
        Some((FAMILY, Arc::new(MembershipService(self.membership.clone()))))
    }

    fn control_calls(self: Arc<Self>, calls: &mut Calls) {
        let members = self.clone();
        calls.on_blocking::<Invite>(move |Empty {}| Ok(members.invite()));
        let members = self.clone();
        calls.on_blocking::<Members>(move |Empty {}| Ok(Json(members.list())));
        calls.on::<RotateSecret>(move |call| {
            let (membership, transport) = (self.membership.clone(), self.transport.clone());
            Box::pin(async move {
                let (keys, rest) = call.remove.as_chunks::<32>();
                if !rest.is_empty() {
                    return Err(malformed("part of a key"));
                }
                let remove = keys.iter().map(|key| PeerId(*key)).collect();
                let overlap = Duration::from_secs(call.overlap_secs);
                let rotated = membership.rotate(transport, remove, overlap).await;
                Ok(rotated.map(Json).map_err(Unfit::from))
            })
        });
    }

    fn start(self: Arc<Self>) -> BoxFuture<'static, Result<(), StartError>> {
        let run = self.membership.clone().run(self.transport.clone());
        self.env.spawn(Box::pin(run));
        Box::pin(async { Ok(()) })
    }

    fn report(&self, status: &mut Status) {
        status.not_member = self.membership.warning();
        status.warnings.extend(status.not_member.clone());
        let away = self.list().members.into_iter().filter(|member| member.status == "away");
        status.away = away
            .map(|Member { id, addr, last_seen_unix_secs, .. }| AwayNode {
                peer_id: id,
                addr,
                last_seen_unix_secs,
            })
            .collect();
    }

    fn stop(self: Arc<Self>) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            let membership = self.membership.clone();
            let _ = tokio::task::spawn_blocking(move || membership.save_all()).await;
        })
    }
}
