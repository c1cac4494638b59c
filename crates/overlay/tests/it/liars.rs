//! Node ID authentication (CFS §4.4): a node that claims another node's place enters no table; a
//! node that claims its own does.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_env::{BoxFuture, Env, timeout};
use atoll_key::{BlockHash, IdProfile, Key, PeerId};
use atoll_net::{CallError, Peer, Refusal, Reply, Request, Service, Transport};
use atoll_overlay::chord::messages::{
    self, Alive, Introduce, Ping, Seen, Surroundings, VirtualIndex, WireNode, WireNodes, WirePeer,
    WireRoute,
};
use atoll_overlay::chord::table::learn::{LEARN, Learn, Learned};
use atoll_overlay::chord::{Chord, ChordConfig, JoinError};
use atoll_overlay::{Node, Overlay, Route, VirtualServerId};
use atoll_sim::{HostConfig, HostId};
use bytes::Bytes;

use super::cluster::{Cluster, MINUTE, lan};

const HONEST: usize = 40;
/// One in five of all.
const LIARS: usize = 10;
pub(crate) const MAX_INDEX: u16 = 4;

/// The data that the liars are after.
pub(crate) fn victim() -> Key {
    BlockHash::of(b"somebody's root block").key()
}

pub(crate) fn config(profile: IdProfile, check_nodes: bool) -> ChordConfig {
    ChordConfig {
        profile,
        check_nodes,
        max_virtual_servers: MAX_INDEX,
        virtual_servers: 2,
        successors: 8,
        ..ChordConfig::default()
    }
}

/// The identity that a liar claims.
#[derive(Clone, Copy, Debug)]
enum Lie {
    /// Its own key at the addresses of others, or where no node is.
    Address,
    /// Virtual indices that the network does not allow.
    Index,
    /// A position by the other profile's hash.
    Profile,
    /// Another node's key, at its own address.
    Identity,
    /// Its own place, but the answer to a check is the nonce of the one before.
    Replay,
    /// A virtual server that it does not admit to.
    Vacant,
    /// Its own place, but its answer names another address, as that of a node to which the question
    /// was forwarded would.
    Elsewhere,
    /// Its own place, and more virtual servers than the network allows.
    Greedy,
}

const LIES: [Lie; 8] = [
    Lie::Address,
    Lie::Index,
    Lie::Profile,
    Lie::Identity,
    Lie::Replay,
    Lie::Vacant,
    Lie::Elsewhere,
    Lie::Greedy,
];

/// A node that wants to be the root of the victim's data.
struct Liar {
    peer: Peer,
    lie: Lie,
    last_nonce: Mutex<Option<u64>>,
    /// Itself, as it would like to be seen, and others of its kind.
    accomplices: Arc<Mutex<Vec<Node>>>,
    /// How often any of them was asked for the nodes it knows; none if they do not say.
    asked_for_nodes: Arc<Mutex<Option<usize>>>,
}

/// The nodes that a liar says it knows: all that the asker knows, and its accomplices.
fn learned(learn: &Learn, accomplices: &[Node]) -> Learned {
    let place = |node: &Node| u64::from_be_bytes(*node.id.key().0.first_chunk().unwrap());
    let span = |place: u64| place.wrapping_sub(learn.after).wrapping_sub(1);
    let mut nodes: Vec<Node> = accomplices.to_vec();
    nodes.retain(|node| span(place(node)) <= span(learn.upto));
    nodes.sort_unstable_by_key(|node| span(place(node)));
    Learned {
        upto: learn.upto,
        near: learn.after,
        ages: vec![0; learn.known.len() / 3],
        node_ages: vec![0; nodes.len()],
        nodes: WireNodes(nodes),
    }
}

impl Service for Liar {
    fn handle(&self, _: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let accomplices = self.accomplices.lock().unwrap().clone();
        let header = match request.method {
            messages::PING => {
                let ping: Ping = messages::decode(&request.header).unwrap();
                let before = std::mem::replace(&mut *self.last_nonce.lock().unwrap(), ping.nonce);
                let nonce = if matches!(self.lie, Lie::Replay) { before } else { ping.nonce };
                let servers = Some(match self.lie {
                    Lie::Index | Lie::Greedy => 128,
                    Lie::Vacant => 1,
                    _ => MAX_INDEX,
                });
                let mut peer = self.peer;
                if matches!(self.lie, Lie::Elsewhere) {
                    peer.addr.set_port(2);
                }
                let peer = Some(WirePeer(peer));
                messages::encode(&Alive { joined: true, nonce, servers, peer, unix_ms: None })
            }
            messages::NEIGHBOURS | messages::NOTIFY => messages::encode(&Surroundings {
                epoch: 1,
                predecessor: accomplices.last().copied().map(WireNode),
                successors: Some(WireNodes(accomplices)),
                doubt: None,
            }),
            messages::ROUTE => messages::encode(&WireRoute(Route::Root(accomplices))),
            LEARN => match self.asked_for_nodes.lock().unwrap().as_mut() {
                Some(count) => {
                    *count += 1;
                    messages::encode(&learned(
                        &messages::decode(&request.header).unwrap(),
                        &accomplices,
                    ))
                }
                None => Bytes::new(),
            },
            _ => Bytes::new(),
        };
        Box::pin(std::future::ready(Ok(Reply { header, parts: Vec::new() })))
    }
}

/// The nearest to the victim's data of many places that a lie could make up.
fn coveted(lie: Lie, liar: Peer, profile: IdProfile, honest: &[Peer]) -> Node {
    let server = |index| VirtualServerId { profile, index };
    let addresses = || {
        let nowhere = (0..200).map(|n| SocketAddr::from((Ipv4Addr::new(10, 9, 0, n), 1)));
        honest.iter().map(|peer| peer.addr).chain(nowhere)
    };
    let places: Vec<Node> = match lie {
        Lie::Address => {
            addresses().map(|addr| Node::at(Peer { id: liar.id, addr }, server(0))).collect()
        }
        Lie::Index => (MAX_INDEX..128).map(|index| Node::at(liar, server(index))).collect(),
        Lie::Profile => {
            let other = match profile {
                IdProfile::Address => IdProfile::Identity,
                IdProfile::Identity => IdProfile::Address,
            };
            (0..128)
                .map(|index| Node::at(liar, VirtualServerId { profile: other, index }))
                .collect()
        }
        Lie::Identity => {
            let keys = honest.iter().map(|peer| peer.id).chain((0..200).map(|n| PeerId([n; 32])));
            keys.map(|id| Node::at(Peer { id, addr: liar.addr }, server(0))).collect()
        }
        Lie::Replay | Lie::Elsewhere | Lie::Greedy => {
            (0..MAX_INDEX).map(|index| Node::at(liar, server(index))).collect()
        }
        Lie::Vacant => (1..MAX_INDEX).map(|index| Node::at(liar, server(index))).collect(),
    };
    let nearest = places.into_iter().min_by_key(|n| n.id.key().distance_from(&victim()));
    nearest.expect("there is a place")
}

/// A ring of honest nodes and the liars around it.
pub(crate) struct Siege {
    pub cluster: Cluster,
    /// Where they are, the identity they claim, and the place that they could hold lawfully.
    pub liars: Vec<(HostId, Node, Option<Node>)>,
    /// How often honest nodes have asked liars for the nodes they know, if these say it.
    pub asked_for_nodes: Arc<Mutex<Option<usize>>>,
}

impl Siege {
    pub(crate) fn lay(seed: u64, config: ChordConfig) -> Siege {
        let profile = config.profile;
        let cluster = Cluster::perfect(lan(seed), config, HONEST, true);
        cluster.run_secs(5);
        let honest: Vec<Peer> = cluster.hosts().iter().map(|h| cluster.peer(*h)).collect();
        let accomplices: Arc<Mutex<Vec<Node>>> = Arc::default();
        let asked_for_nodes: Arc<Mutex<Option<usize>>> = Arc::default();
        let mut liars = Vec::new();
        for n in 0..LIARS {
            let host = cluster.sim.add_host(HostConfig::default());
            let lie = LIES[n % LIES.len()];
            let peer = cluster.peer(host);
            let place = coveted(lie, peer, profile, &honest);
            accomplices.lock().unwrap().push(place);
            let last_nonce = Mutex::new(None);
            let (accomplices, asked_for_nodes) = (accomplices.clone(), asked_for_nodes.clone());
            let liar = Liar { peer, lie, last_nonce, accomplices, asked_for_nodes };
            cluster.sim.transport(host).serve(Arc::new(liar));
            let tells_its_place =
                matches!(lie, Lie::Address | Lie::Profile | Lie::Identity | Lie::Vacant);
            let own_place = Node::at(peer, VirtualServerId { profile, index: 0 });
            liars.push((host, place, tells_its_place.then_some(own_place)));
        }
        // Clockwise from the data, as in an honest list.
        accomplices.lock().unwrap().sort_unstable_by_key(|n| n.id.key().distance_from(&victim()));
        Siege { cluster, liars, asked_for_nodes }
    }

    /// Every liar tells every honest node of itself and of one of the others.
    pub(crate) fn tell(&self, round: usize) {
        for (n, (host, place, _)) in self.liars.iter().enumerate() {
            let other = self.liars[(n + round) % self.liars.len()].1;
            for target in self.cluster.hosts() {
                self.notify(*host, *place, target);
                for node in [place, &other] {
                    let introduce = Introduce { node: WireNode(*node), hops_left: 32 };
                    self.cluster.send(
                        *host,
                        target,
                        messages::INTRODUCE,
                        messages::encode(&introduce),
                    );
                }
            }
        }
    }

    /// `NOTIFY` to all virtual servers of a node. Where the peer address is not the liar's own, the
    /// transport has been told that this is where it listens, which it cannot know.
    fn notify(&self, host: HostId, place: Node, target: HostId) {
        for to in 0..2 {
            let from = VirtualIndex(place.virtual_server.index);
            let seen = Seen { epoch: None, to: VirtualIndex(to), from };
            let header = messages::encode(&seen);
            let real = self.cluster.peer(host);
            if place.peer.id != real.id {
                // The handshake would show it.
                continue;
            }
            if place.peer.addr == real.addr {
                self.cluster.send(host, target, messages::NOTIFY, header);
            } else {
                let request = Request { method: messages::NOTIFY, header, parts: Vec::new() };
                let answer = self.cluster.chord(target).handle(place.peer, request);
                self.cluster.sim.env(host).spawn(Box::pin(async move {
                    let _ = answer.await;
                }));
            }
        }
    }

    /// The dishonest nodes in an honest node's tables, or among those it remembers.
    pub(crate) fn intruders(&self) -> BTreeSet<Node> {
        let mut intruders = self.neighbours_but(&[]);
        intruders.append(&mut self.next_hops());
        intruders
    }

    /// The dishonest nodes among the neighbours and the remembered peers. `given` are peers that
    /// users have named to their nodes.
    pub(crate) fn neighbours_but(&self, given: &[Peer]) -> BTreeSet<Node> {
        let lawful = self.lawful();
        let may_be = |peer: &Peer| given.contains(peer) || lawful.iter().any(|n| n.peer == *peer);
        let mut intruders = BTreeSet::new();
        for host in self.cluster.hosts() {
            let chord = self.cluster.chord(host);
            let known = chord.servers().known();
            intruders.extend(known.into_iter().filter(|node| !lawful.contains(node)));
            let remembered = chord.known_peers().into_iter().filter(|peer| !may_be(peer));
            intruders.extend(remembered.map(Node::of));
        }
        intruders
    }

    /// The dishonest nodes that might be asked for the way.
    pub(crate) fn next_hops(&self) -> BTreeSet<Node> {
        let lawful = self.lawful();
        let known = |host: &HostId| self.cluster.chord(*host).known_nodes();
        let all = self.cluster.hosts().iter().flat_map(known).collect::<BTreeSet<Node>>();
        all.difference(&lawful).copied().collect()
    }

    /// A liar that can be reached at its own address may be known there, whatever else it claims.
    fn lawful(&self) -> BTreeSet<Node> {
        let honest = self.cluster.hosts().into_iter().flat_map(|host| self.cluster.places(host));
        honest.chain(self.liars.iter().filter_map(|(_, _, own_place)| *own_place)).collect()
    }

    /// Whether all lists are right, but for liars at the places that they hold lawfully.
    pub(crate) fn is_at_rest(&self) -> bool {
        let mut ring: Vec<Node> =
            self.cluster.live().into_iter().filter(|n| n.joined).map(|n| n.me).collect();
        ring.sort_unstable_by_key(|node| node.id);
        let lawful: BTreeSet<Node> = self.liars.iter().filter_map(|(_, _, own)| *own).collect();
        self.cluster.live().iter().all(|around| {
            let at = ring.iter().position(|node| *node == around.me);
            let mut list = around.successors.clone();
            list.retain(|node| !lawful.contains(node));
            let follows = |n: usize| at.map(|at| ring[(at + n) % ring.len()]);
            list.len() + LIARS >= self.cluster.config.successors
                && list.iter().enumerate().all(|(n, node)| follows(n + 1) == Some(*node))
        })
    }

    pub(crate) fn look_up_everywhere(&self) {
        let root = self.cluster.root(&victim());
        for host in self.cluster.hosts() {
            let found = self.cluster.find_root(host, victim());
            assert_eq!(found.map(|found| found.value[0].id), Ok(root));
        }
    }
}

#[test]
fn checks_keep_liars_out_and_the_victims_data_is_found() {
    for profile in [IdProfile::Address, IdProfile::Identity] {
        for seed in 1..=2 {
            let siege = Siege::lay(seed, config(profile, true));
            for round in 0..30 {
                siege.tell(round);
                siege.cluster.run_secs(1);
                assert_eq!(siege.intruders(), BTreeSet::new(), "{profile:?}, round {round}");
            }
            siege.look_up_everywhere();
            siege.cluster.run_secs(30);
            assert!(siege.is_at_rest(), "{profile:?}, seed {seed}");
            assert_eq!(siege.intruders(), BTreeSet::new());
            siege.look_up_everywhere();
        }
    }
}

/// That the test above can fail.
#[test]
fn without_checks_liars_enter_the_tables() {
    for profile in [IdProfile::Address, IdProfile::Identity] {
        let siege = Siege::lay(1, config(profile, false));
        let mut seen = BTreeSet::new();
        for round in 0..5 {
            siege.tell(round);
            siege.cluster.sim.run_for(Duration::from_millis(200));
            seen.append(&mut siege.intruders());
        }
        assert!(!seen.is_empty(), "{profile:?}");
    }
}

#[test]
fn honest_late_joiners_are_admitted_while_liars_flood_claims() {
    for profile in [IdProfile::Address, IdProfile::Identity] {
        let siege = Siege::lay(3, config(profile, true));
        let first = siege.cluster.hosts()[0];
        for round in 0..6 {
            siege.tell(round);
            let host = siege.cluster.add();
            siege.cluster.join(host, &[first]).unwrap();
            siege.cluster.sim.run_for(Duration::from_millis(500));
        }
        for round in 0..10 {
            siege.tell(round);
            siege.cluster.run_secs(1);
        }
        assert_eq!(siege.cluster.hosts().len(), HONEST + 6);
        siege.cluster.run_secs(10);
        assert!(siege.is_at_rest(), "{profile:?}");
        assert_eq!(siege.intruders(), BTreeSet::new());
        siege.look_up_everywhere();
    }
}

/// How many calls all others make to nodes that do not exist, or not there.
#[test]
fn a_flood_of_claims_causes_a_bounded_number_of_dials() {
    let config = config(IdProfile::Identity, true);
    let cluster = Cluster::perfect(lan(5), config, 12, true);
    cluster.run_secs(10);
    let before = cluster.sim.stats().call_count();
    cluster.run_secs(30);
    let idle = cluster.sim.stats().call_count() - before;
    // The victim's address, at which the calls are counted.
    let third = cluster.sim.add_host(HostConfig::default());
    let flooder = cluster.sim.add_host(HostConfig::default());
    let target = cluster.hosts()[0];
    let before = cluster.sim.stats().call_count();
    let mut sent = 0;
    for second in 0..30u32 {
        for n in 0..500u32 {
            let mut id = [7; 32];
            id[..4].copy_from_slice(&(second * 500 + n).to_be_bytes());
            let ghost = Peer { id: PeerId(id), addr: cluster.peer(third).addr };
            let chord = cluster.chord(target);
            let header = messages::encode(&Seen::default());
            let notify = Request { method: messages::NOTIFY, header, parts: Vec::new() };
            let answer = chord.handle(ghost, notify);
            cluster.sim.env(flooder).spawn(Box::pin(async move {
                let _ = answer.await;
            }));
            sent += 1;
        }
        cluster.run_secs(1);
    }
    let caused = (cluster.sim.stats().call_count() - before).saturating_sub(idle);
    println!("{sent} claims in 30 s caused {caused} calls");
    assert!(caused < 30 * 32 + 128 + 300, "{caused}");
    cluster.run_secs(15);
    cluster.ideal().unwrap();
}

#[test]
fn fakes_named_by_a_neighbour_enter_no_list() {
    for seed in 1..=3 {
        let profile = IdProfile::Identity;
        let cluster = Cluster::perfect(lan(seed), config(profile, true), 20, true);
        cluster.run_secs(3);
        // A true member names a crowd of its own making as its neighbours.
        let host = cluster.hosts()[4];
        let peer = cluster.peer(host);
        let fakes: Vec<Node> = (0..60)
            .map(|n| {
                Node::at(
                    Peer { id: PeerId([n; 32]), ..peer },
                    VirtualServerId { profile, index: 0 },
                )
            })
            .collect();
        cluster.crash(host);
        let (_, transport) = cluster.sim.restart(host);
        let accomplices = Arc::new(Mutex::new(fakes.clone()));
        let last_nonce = Mutex::new(None);
        let asked_for_nodes = Arc::default();
        transport.serve(Arc::new(Liar {
            peer,
            lie: Lie::Address,
            last_nonce,
            accomplices,
            asked_for_nodes,
        }));
        for _ in 0..30 {
            cluster.run_secs(1);
            for honest in cluster.hosts() {
                let known = cluster.chord(honest).servers().known();
                assert!(!known.iter().any(|node| fakes.contains(node)), "{known:?}");
            }
        }
        for honest in cluster.hosts() {
            cluster.chord(honest).check_invariants();
        }
    }
}

/// A transport that says it listens elsewhere, and is believed by those it calls.
struct Behind {
    inner: Arc<dyn Transport>,
    env: Env,
    addr: SocketAddr,
    others: BTreeMap<PeerId, Arc<Chord>>,
}

impl Transport for Behind {
    fn local(&self) -> Peer {
        Peer { addr: self.addr, ..self.inner.local() }
    }

    fn call(
        &self,
        to: Peer,
        request: Request,
        limit: Duration,
    ) -> BoxFuture<'static, Result<Reply, CallError>> {
        let (from, env) = (self.local(), self.env.clone());
        let callee = self.others.get(&to.id).cloned();
        Box::pin(async move {
            let Some(callee) = callee else { return Err(CallError::TimedOut) };
            match timeout(&*env, limit, callee.handle(from, request)).await {
                Ok(answer) => Ok(answer?),
                Err(_) => Err(CallError::TimedOut),
            }
        })
    }

    fn round_trip(&self, peer: &PeerId) -> Option<Duration> {
        self.inner.round_trip(peer)
    }

    fn serve(&self, service: Arc<dyn Service>) {
        self.inner.serve(service);
    }
}

/// A node on the host, which says that it listens at `addr`.
fn node_at(cluster: &Cluster, host: HostId, addr: SocketAddr) -> Arc<Chord> {
    let (env, inner) = (cluster.sim.env(host), cluster.sim.transport(host));
    let others = cluster.hosts().into_iter().map(|h| (cluster.peer(h).id, cluster.chord(h)));
    let transport = Behind { inner, env: env.clone(), addr, others: others.collect() };
    Chord::new(env, Arc::new(transport), cluster.config.clone())
}

#[test]
fn a_second_node_at_one_address_is_told_that_its_place_is_taken() {
    for others in [0, 5] {
        let config = config(IdProfile::Address, true);
        let cluster = Cluster::grown(lan(4), config, 1 + others);
        cluster.run_until_ideal(MINUTE);
        let hosts = cluster.hosts();
        let resident = cluster.peer(hosts[0]);
        let host = cluster.sim.add_host(HostConfig::default());
        let addr = SocketAddr::new(resident.addr.ip(), 2);
        for via in &hosts {
            let (chord, via) = (node_at(&cluster, host, addr), cluster.peer(*via));
            let join = async move { chord.join(vec![via]).await };
            let error = cluster.sim.block_on(MINUTE, join).unwrap().unwrap_err();
            assert_eq!(error, JoinError::PositionTaken { by: resident });
            let text = error.to_string();
            assert!(text.contains("virtual servers") && text.contains("10.0.0.1"), "{text}");
        }
        cluster.ideal().unwrap();
    }
}

/// It can call all others, and none can call it.
#[test]
fn a_node_unreachable_at_its_address_enters_no_table() {
    for profile in [IdProfile::Address, IdProfile::Identity] {
        let cluster = Cluster::grown(lan(6), config(profile, true), 6);
        cluster.run_until_ideal(MINUTE);
        let host = cluster.sim.add_host(HostConfig::default());
        let nowhere = SocketAddr::from((Ipv4Addr::new(10, 200, 0, 1), 1));
        let chord = node_at(&cluster, host, nowhere);
        let via = cluster.peer(cluster.hosts()[0]);
        let joining = chord.clone();
        let join = async move { joining.join(vec![via]).await };
        let error = cluster.sim.block_on(MINUTE, join).unwrap().unwrap_err();
        let JoinError::Unreachable { by, addr } = error else { panic!("{error}") };
        assert!(cluster.hosts().iter().any(|host| cluster.peer(*host) == by));
        assert_eq!(addr, nowhere);
        assert!(!chord.neighbourhood().joined);
        for _ in 0..30 {
            cluster.run_secs(1);
            cluster.ideal().unwrap();
        }
    }
}
