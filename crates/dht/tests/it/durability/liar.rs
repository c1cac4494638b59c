//! Nodes that say that they have stored, or renewed, what they throw away, and what they said so of.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use atoll_dht::rpc::{self, Name, Put, Renew, Vouch};
use atoll_env::BoxFuture;
use atoll_key::{Key, PeerId};
use atoll_net::{Peer, Refusal, Reply, Request, Service};

use crate::denier::Denier;

/// The blocks to whose put or renewal liars have said yes, as root or as the node that the publisher
/// asks whether the root tells the truth: each may stand for a copy that is nowhere.
/// Whether a liar belongs to a replica set does not tell: those who put and renew may be cut off from
/// members of it, or not know yet of nodes that have joined.
#[derive(Clone, Default)]
pub(super) struct Lies(Arc<Mutex<BTreeSet<(Name, usize)>>>);

impl Lies {
    /// Forgets earlier ones.
    pub(super) fn clear(&self) {
        self.0.lock().expect("no holder panics").clear();
    }

    /// How many liars said so of a block.
    pub(super) fn of(&self, key: &Key) -> usize {
        let (name, lies) = (Name::of(key), self.0.lock().expect("no holder panics"));
        lies.iter().filter(|(of, _)| *of == name).count()
    }
}

/// A [`Denier`] whose lies about puts and renewals are noted.
pub(super) struct Liar {
    denier: Denier,
    member: usize,
    publisher: PeerId,
    lies: Lies,
}

impl Liar {
    pub(super) fn new(
        honest: Arc<dyn Service>,
        member: usize,
        publisher: PeerId,
        lies: Lies,
    ) -> Liar {
        Liar { denier: Denier(honest), member, publisher, lies }
    }
}

impl Service for Liar {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let names: Vec<Name> = match request.method {
            rpc::PUT => {
                let put: Put = rpc::from_header(&request.header).expect("honest");
                put.blocks.0.iter().map(|block| Name::of(&block.key)).collect()
            }
            rpc::RENEW => {
                let renew: Renew = rpc::from_header(&request.header).expect("honest");
                renew.names
            }
            rpc::VOUCH if from.id == self.publisher => {
                let asked: Vouch = rpc::from_header(&request.header).expect("honest");
                asked.keys.iter().map(Name::of).collect()
            }
            _ => Vec::new(),
        };
        let lies = names.into_iter().map(|name| (name, self.member));
        self.lies.0.lock().expect("no holder panics").extend(lies);
        self.denier.handle(from, request)
    }
}
