//! Nodes that say that they have stored, or renewed, what they throw away, and what they said so of.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use atoll_dht::rpc::{self, AskHoldings, Name, Put, Renew};
use atoll_key::{Key, PeerId};
use atoll_net::Service;

use crate::faulty::{denier, faulty};

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

/// A node that denies nothing and keeps nothing, whose lies about puts and renewals are noted.
pub(super) fn liar(
    honest: Arc<dyn Service>,
    member: usize,
    publisher: PeerId,
    lies: Lies,
) -> Arc<dyn Service> {
    faulty(denier(honest), move |from, request| {
        let names: Vec<Name> = match request.method {
            rpc::PUT => {
                let put: Put = rpc::from_header(&request.header).expect("honest");
                put.blocks.0.iter().map(|block| Name::of(&block.key)).collect()
            }
            rpc::RENEW => {
                let renew: Renew = rpc::from_header(&request.header).expect("honest");
                renew.names
            }
            rpc::HOLDINGS if from.id == publisher => {
                let asked: AskHoldings = rpc::from_header(&request.header).expect("honest");
                asked.keys.iter().map(Name::of).collect()
            }
            _ => Vec::new(),
        };
        let told = names.into_iter().map(|name| (name, member));
        lies.0.lock().expect("no holder panics").extend(told);
        None
    })
}
