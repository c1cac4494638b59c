//! A ring whose nodes come and go.
//!
//! It starts with those nodes that are up at the beginning, their successor lists and
//! fingers right, and their adaptive tables ([`Tables`]) empty or as full as they become; from
//! then on nodes vanish without a word (their machine is switched off) and come back through
//! a node that is up, with the blocks they had.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use atoll_dht::durable::MemoryState;
use atoll_dht::{Dht, SimulatedKeys};
use atoll_env::{Instant, random_below, sleep};
use atoll_net::{Peer, Router};
use atoll_overlay::Node;
use atoll_sim::{HostConfig, HostId, Sim, SimConfig};
use atoll_store::{BlockStore, MemoryStore};

use crate::churn::{Change, Schedule};
use crate::overlay::{KnownNode, OverlayNode, fill_tables};
use crate::ring::{Member, Plan, STORE_BYTES, start};

/// A node that could not join tries again through others, so often...
const JOIN_TRIES: usize = 20;
/// ... and after so long.
const JOIN_PAUSE: Duration = Duration::from_secs(5);
/// Nodes that a newcomer knows from its invitation. A guess.
const INTRODUCERS: usize = 3;
/// A full table has heard of each of its nodes within so long. A guess: sweeps take as long.
const HEARD_WITHIN_SECS: usize = 240;
/// Nodes that have been up for longer count as up for so long.
const MOST_UP_SECS: f64 = 1e6;

/// How adaptive tables begin.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Tables {
    /// Empty, and every node has just begun.
    Cold,
    /// With every node that is up, as far as there is room; nodes have been up for as long as
    /// the schedule says.
    Full,
}

/// See the module.
pub(crate) struct ChurningRing {
    pub sim: Sim,
    plan: Plan,
    hosts: Vec<HostId>,
    stores: Vec<Arc<dyn BlockStore>>,
    states: Vec<Arc<MemoryState>>,
    up: BTreeMap<usize, Arc<Dht>>,
    changes: std::iter::Peekable<std::vec::IntoIter<Change>>,
}

impl ChurningRing {
    /// The ring at the beginning of the schedule. `plan.nodes` is not looked at.
    pub(crate) fn new(plan: Plan, schedule: Schedule, tables: Tables) -> ChurningRing {
        let mut config = SimConfig { seed: plan.seed, ..SimConfig::default() };
        if let Some(latency) = &plan.network.latency {
            config.latency = latency.clone();
        }
        let sim = Sim::new(config);
        let hosts = sim.add_hosts(schedule.hosts, &HostConfig::default());
        let stores: Vec<Arc<dyn BlockStore>> = hosts
            .iter()
            .map(|_| Arc::new(MemoryStore::new(STORE_BYTES)) as Arc<dyn BlockStore>)
            .collect();
        let position = |n: usize| Node::of(sim.peer(hosts[n]));
        let mut circle: Vec<Node> = schedule.first.iter().map(|(n, _)| position(*n)).collect();
        circle.sort_by_key(|node| node.id);
        let begin =
            |n: usize| start(&sim, hosts[n], &[position(n)], &circle, &plan, stores[n].clone());
        let members: Vec<(Member, f64)> =
            schedule.first.iter().map(|(n, up_secs)| (begin(*n), *up_secs)).collect();
        if tables == Tables::Full {
            fill(&sim, &members);
        }
        let numbers = schedule.first.iter().map(|(n, _)| *n);
        let up = numbers.zip(members).map(|(n, (member, _))| (n, member.dht)).collect();
        let changes = schedule.changes.into_iter().peekable();
        let states = hosts.iter().map(|_| Arc::default()).collect();
        ChurningRing { sim, plan, hosts, stores, states, up, changes }
    }

    /// Lets virtual time pass, and nodes come and go.
    pub(crate) fn run_until(&mut self, until: Instant) {
        let until_secs = until.as_nanos() as f64 / 1e9;
        while let Some(change) = self.changes.next_if(|change| change.at_secs <= until_secs) {
            let at = Instant((change.at_secs * 1e9) as u64);
            self.sim.run_until(at.max(self.sim.now()));
            if change.is_up { self.come(change.host) } else { self.go(change.host) }
        }
        self.sim.run_until(until);
    }

    /// A node that is up, at random.
    pub(crate) fn anybody(&self) -> (usize, Arc<Dht>) {
        let random = self.sim.outside();
        let nth = random_below(&*random, self.up.len() as u64) as usize;
        let (n, dht) = self.up.iter().nth(nth).expect("a node is always up");
        (*n, dht.clone())
    }

    /// How many nodes are up.
    pub(crate) fn up_count(&self) -> usize {
        self.up.len()
    }

    fn go(&mut self, n: usize) {
        self.up.remove(&n);
        self.sim.crash_silently(self.hosts[n]);
    }

    fn come(&mut self, n: usize) {
        let (env, transport) = self.sim.restart(self.hosts[n]);
        let config = self.plan.chord.clone();
        let overlay = OverlayNode::new(env.clone(), transport.clone(), config);
        let dht = Dht::new(
            env.clone(),
            transport.clone(),
            overlay.overlay(),
            self.stores[n].clone(),
            Arc::new(SimulatedKeys(transport.local().id)),
            self.states[n].clone(),
            self.plan.dht.clone(),
        );
        transport.serve(Arc::new(Router::new().route(1, overlay.service()).route(2, dht.clone())));
        let through: Vec<Vec<Peer>> = (0..JOIN_TRIES)
            .map(|_| {
                (0..INTRODUCERS).map(|_| self.sim.peer(self.hosts[self.anybody().0])).collect()
            })
            .collect();
        let (joining, runtime) = (dht.clone(), env.clone());
        env.spawn(Box::pin(async move {
            for introducers in through {
                if overlay.join(introducers).await {
                    joining.start();
                    return;
                }
                sleep(&*runtime, JOIN_PAUSE).await;
            }
        }));
        self.up.insert(n, dht);
    }
}

/// Tells all adaptive tables of all members, up for so long.
fn fill(sim: &Sim, members: &[(Member, f64)]) {
    let up_secs = |up: f64| up.min(MOST_UP_SECS) as u32;
    let known = members.iter().enumerate().map(|(nth, (member, up))| KnownNode {
        node: Node::of(sim.peer(member.host)),
        heard_secs_ago: ((nth % HEARD_WITHIN_SECS) as u32).min(up_secs(*up)),
    });
    let known: Vec<KnownNode> = known.collect();
    fill_tables(members.iter().map(|(member, _)| &member.overlay), &known, sim.now());
}

impl Drop for ChurningRing {
    fn drop(&mut self) {
        self.sim.shut_down();
    }
}
