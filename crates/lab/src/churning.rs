//! A ring whose nodes come and go.
//!
//! It starts at rest, with those nodes that are up at the beginning; from then on nodes
//! vanish without a word (their machine is switched off) and come back through a node
//! that is up, with the blocks they had.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use atoll_dht::{Dht, SimulatedKeys};
use atoll_env::{Instant, random_below, sleep};
use atoll_net::{Peer, Router};
use atoll_overlay::Node;
use atoll_overlay::chord::Chord;
use atoll_sim::{HostConfig, HostId, Latency, Sim, SimConfig};
use atoll_store::{BlockStore, MemoryStore};

use crate::churn::{Change, Schedule};
use crate::ring::{Plan, STORE_BYTES, start};

/// A node that could not join tries again through others, so often...
const JOIN_TRIES: usize = 20;
/// ... and after so long.
const JOIN_PAUSE: Duration = Duration::from_secs(5);
/// Nodes that a newcomer knows from its invitation. A guess.
const INTRODUCERS: usize = 3;

/// See the module.
pub(crate) struct ChurningRing {
    pub sim: Sim,
    plan: Plan,
    hosts: Vec<HostId>,
    stores: Vec<Arc<dyn BlockStore>>,
    up: BTreeMap<usize, Arc<Dht>>,
    changes: std::iter::Peekable<std::vec::IntoIter<Change>>,
}

impl ChurningRing {
    /// The ring at the beginning of the schedule. `plan.nodes` is not looked at.
    pub fn new(plan: Plan, schedule: Schedule) -> ChurningRing {
        let mut config = SimConfig { seed: plan.seed, ..SimConfig::default() };
        if let Some(matrix) = &plan.network.latency {
            config.latency = Latency::Matrix(matrix.clone());
        }
        let sim = Sim::new(config);
        let hosts = sim.add_hosts(schedule.hosts, &HostConfig::default());
        let stores: Vec<Arc<dyn BlockStore>> = hosts
            .iter()
            .map(|_| Arc::new(MemoryStore::new(STORE_BYTES)) as Arc<dyn BlockStore>)
            .collect();
        let seat = |n: &usize| Node::of(sim.peer(hosts[*n]));
        let mut circle: Vec<Node> = schedule.first.iter().map(seat).collect();
        circle.sort_by_key(|node| node.id);
        let mut up = BTreeMap::new();
        for n in &schedule.first {
            let member = start(&sim, hosts[*n], &[seat(n)], &circle, &plan, stores[*n].clone());
            up.insert(*n, member.dht);
        }
        let changes = schedule.changes.into_iter().peekable();
        ChurningRing { sim, plan, hosts, stores, up, changes }
    }

    /// Lets virtual time pass, and nodes come and go.
    pub fn run_until(&mut self, until: Instant) {
        let until_secs = until.as_nanos() as f64 / 1e9;
        while let Some(change) = self.changes.next_if(|change| change.at_secs <= until_secs) {
            let at = Instant((change.at_secs * 1e9) as u64);
            self.sim.run_until(at.max(self.sim.now()));
            if change.is_up { self.come(change.host) } else { self.go(change.host) }
        }
        self.sim.run_until(until);
    }

    /// A node that is up, at random.
    pub fn anybody(&self) -> (usize, Arc<Dht>) {
        let random = self.sim.outside();
        let nth = random_below(&*random, self.up.len() as u64) as usize;
        let (n, dht) = self.up.iter().nth(nth).expect("somebody is always up");
        (*n, dht.clone())
    }

    /// How many nodes are up.
    pub fn up_count(&self) -> usize {
        self.up.len()
    }

    fn go(&mut self, n: usize) {
        self.up.remove(&n);
        self.sim.crash_silently(self.hosts[n]);
    }

    fn come(&mut self, n: usize) {
        let (env, transport) = self.sim.restart(self.hosts[n]);
        let chord = Chord::new(env.clone(), transport.clone(), self.plan.chord.clone());
        let dht = Dht::new(
            env.clone(),
            transport.clone(),
            chord.clone(),
            self.stores[n].clone(),
            Arc::new(SimulatedKeys(transport.local().id)),
            self.plan.dht.clone(),
        );
        transport.serve(Arc::new(Router::new().route(1, chord.clone()).route(2, dht.clone())));
        let through: Vec<Vec<Peer>> = (0..JOIN_TRIES)
            .map(|_| {
                (0..INTRODUCERS).map(|_| self.sim.peer(self.hosts[self.anybody().0])).collect()
            })
            .collect();
        let (joining, runtime) = (dht.clone(), env.clone());
        env.spawn(Box::pin(async move {
            for introducers in through {
                if chord.join(introducers).await.is_ok() {
                    joining.start();
                    return;
                }
                sleep(&*runtime, JOIN_PAUSE).await;
            }
        }));
        self.up.insert(n, dht);
    }
}

impl Drop for ChurningRing {
    fn drop(&mut self) {
        self.sim.shut_down();
    }
}
