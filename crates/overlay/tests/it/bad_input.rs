//! Malformed calls, and nodes on the ring that answer nonsense.

use std::sync::Arc;

use atoll_env::BoxFuture;
use atoll_key::PeerId;
use atoll_net::{CallError, Peer, Refusal, Reply, Request, Service};
use atoll_overlay::chord::ChordConfig;
use atoll_overlay::chord::messages::{
    self, Alive, Introduce, Leaving, Ping, Surroundings, VirtualIndex, WireNode, WireNodes,
    WirePeer, WireRoute,
};
use atoll_overlay::{Neighbourhood, Node, Overlay, Route};
use atoll_sim::HostConfig;
use bytes::Bytes;

use super::cluster::{Cluster, MINUTE, keys, lan};

fn ring_of_four(seed: u64) -> Cluster {
    let cluster = Cluster::grown(lan(seed), ChordConfig::default(), 4);
    cluster.run_until_ideal(MINUTE);
    cluster
}

#[test]
fn malformed_calls_are_refused_with_a_reason_and_change_nothing() {
    let cluster = ring_of_four(1);
    let outsider = cluster.sim.add_host(HostConfig::default());
    let target = cluster.hosts()[0];
    let before = cluster.chord(target).neighbourhood();
    let nonsense: [&[u8]; 5] =
        [b"", b"\xff", b"\x9a\xff\xff\xff\xff", b"\x81\x5a\xff\xff\xff\xff", b"\x80\x00"];
    for method in [
        messages::NEIGHBOURS,
        messages::NOTIFY,
        messages::LEAVE,
        messages::ROUTE,
        messages::REPORT_FAILED,
        messages::INTRODUCE,
    ] {
        for header in nonsense {
            let answer = cluster.call(outsider, target, method, Bytes::from_static(header));
            let Err(CallError::Refused(refusal)) = answer else {
                panic!("{method:#x} {header:x?}: {answer:?}")
            };
            assert_eq!(refusal.code, Refusal::MALFORMED, "{method:#x} {header:x?}");
            assert!(refusal.text.starts_with("malformed"), "{}", refusal.text);
        }
    }
    assert_eq!(cluster.chord(target).neighbourhood(), before);
}

#[test]
fn an_unknown_method_is_refused_as_such() {
    let cluster = ring_of_four(1);
    let hosts = cluster.hosts();
    let answer = cluster.call(hosts[1], hosts[0], 0x01fe, Bytes::new());
    assert!(matches!(answer, Err(CallError::Refused(r)) if r.code == Refusal::UNKNOWN_METHOD));
}

#[test]
fn a_node_can_only_say_of_itself_that_it_leaves() {
    let cluster = ring_of_four(2);
    let outsider = cluster.sim.add_host(HostConfig::default());
    let hosts = cluster.hosts();
    let before = cluster.chord(hosts[0]).neighbourhood();
    let told = Leaving {
        predecessor: before.predecessor.map(WireNode),
        successors: WireNodes(before.successors.clone()),
        from: VirtualIndex(0),
        remaining: VirtualIndex(0),
    };
    cluster.call(outsider, hosts[0], messages::LEAVE, messages::encode(&told)).unwrap();
    assert_eq!(cluster.chord(hosts[0]).neighbourhood(), before);
}

#[test]
fn introductions_of_nodes_that_do_not_answer_change_no_table() {
    let cluster = ring_of_four(3);
    let outsider = cluster.sim.add_host(HostConfig::default());
    for n in 0..200u8 {
        let ghost = Peer { id: PeerId([n; 32]), addr: cluster.peer(outsider).addr };
        let introduce = Introduce { node: WireNode(Node::of(ghost)), hops_left: 255 };
        let target = cluster.hosts()[usize::from(n) % 4];
        let answer =
            cluster.call(outsider, target, messages::INTRODUCE, messages::encode(&introduce));
        // Some are taken, the others are too many.
        match answer {
            Err(CallError::Refused(refusal)) if n > 100 => {
                assert_eq!(refusal.code, Refusal::OVERLOADED);
            }
            answer => drop(answer.unwrap()),
        }
    }
    cluster.run_secs(60);
    cluster.ideal().unwrap();
}

#[test]
fn false_reports_of_death_are_checked_and_not_believed() {
    let cluster = ring_of_four(4);
    let outsider = cluster.sim.add_host(HostConfig::default());
    let target = cluster.hosts()[0];
    let before = cluster.chord(target).neighbourhood();
    let dead = messages::FailureReport { nodes: WireNodes(before.successors.clone()) };
    cluster.call(outsider, target, messages::REPORT_FAILED, messages::encode(&dead)).unwrap();
    assert_eq!(cluster.chord(target).neighbourhood(), before);
}

/// Says it is on the ring, and answers everything with the same lie.
struct Liar {
    peer: Peer,
    route: Route,
    told: (Option<Node>, Vec<Node>),
}

impl Service for Liar {
    fn handle(&self, _: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let header = match request.method {
            messages::PING => {
                let ping: Ping = messages::decode(&request.header).unwrap();
                let peer = Some(WirePeer(self.peer));
                messages::encode(&Alive {
                    joined: true,
                    nonce: ping.nonce,
                    servers: Some(1),
                    peer,
                    unix_ms: None,
                })
            }
            messages::NEIGHBOURS | messages::NOTIFY => messages::encode(&Surroundings {
                epoch: 1,
                predecessor: self.told.0.map(WireNode),
                successors: Some(WireNodes(self.told.1.clone())),
                doubt: None,
            }),
            messages::ROUTE => messages::encode(&WireRoute(self.route.clone())),
            _ => Bytes::new(),
        };
        Box::pin(std::future::ready(Ok(Reply { header, parts: Vec::new() })))
    }
}

/// Answers every call with bytes that are no message.
struct Babbler;

impl Service for Babbler {
    fn handle(&self, _: Peer, _: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let header = Bytes::from_static(b"\x9f\x9f\x9f");
        Box::pin(std::future::ready(Ok(Reply { header, parts: Vec::new() })))
    }
}

/// Puts one of twelve nodes of a ring at rest under the control of `service`.
fn corrupted(
    seed: u64,
    service: impl FnOnce(&[Node], &Neighbourhood) -> Arc<dyn Service>,
) -> (Cluster, Node) {
    let config = ChordConfig { successors: 4, ..ChordConfig::default() };
    let cluster = Cluster::perfect(lan(seed), config, 12, true);
    cluster.run_secs(5);
    let host = cluster.hosts()[3];
    let nodes: Vec<Node> = cluster.live().iter().map(|n| n.me).collect();
    let before = cluster.chord(host).neighbourhood();
    cluster.crash(host);
    let (_, transport) = cluster.sim.restart(host);
    transport.serve(service(&nodes, &before));
    (cluster, before.me)
}

#[test]
fn a_neighbour_that_answers_random_bytes_is_dropped_and_the_others_form_one_ring() {
    for seed in 0..4 {
        let (cluster, _) = corrupted(seed, |_, _| Arc::new(Babbler));
        cluster.run_until_ideal(MINUTE);
        assert_eq!(cluster.live().len(), 11);
    }
}

#[test]
fn a_neighbour_whose_list_is_nonsense_breaks_no_table() {
    for seed in 0..4 {
        let (cluster, _) = corrupted(seed, |nodes, before| {
            let mut list = nodes.to_vec();
            list.push(before.me);
            list.extend(nodes.iter().rev());
            Arc::new(Liar {
                peer: before.me.peer,
                route: Route::Nowhere,
                told: (Some(nodes[0]), list),
            })
        });
        cluster.run_secs(60);
        for host in cluster.hosts() {
            cluster.chord(host).state().check_invariants();
        }
    }
}

#[test]
fn lookups_end_and_mostly_succeed_when_one_node_misdirects_them() {
    for seed in 0..4 {
        for lie in 0..4 {
            let (cluster, liar) = corrupted(seed, |nodes, before| {
                let route = match lie {
                    0 => Route::closer(nodes.iter().take(8).copied()),
                    1 => Route::Root(vec![before.me]),
                    2 => Route::NotRoot(nodes[0]),
                    _ => Route::closer([before.me]),
                };
                Arc::new(Liar {
                    peer: before.me.peer,
                    route,
                    told: (before.predecessor, before.successors.clone()),
                })
            });
            let asker = cluster.hosts()[0];
            let mut right = 0;
            for key in keys(60) {
                let end = cluster.find_root(asker, key);
                let trace = end.as_ref().map_or_else(|e| e.trace().unwrap(), |f| &f.trace);
                assert!(trace.0.len() <= 64);
                right += usize::from(
                    end.is_ok_and(|f| f.value[0].id == cluster.root(&key) || f.value[0] == liar),
                );
            }
            assert!(right >= 40, "seed {seed}, lie {lie}: {right} of 60");
        }
    }
}
