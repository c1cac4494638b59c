//! Members that say of every newcomer that they cannot reach it: it is not taken for true on
//! the word of one.

use std::sync::Arc;

use atoll_env::BoxFuture;
use atoll_net::{Peer, Refusal, Reply, Request, Router, Service};
use atoll_overlay::Overlay;
use atoll_overlay::chord::messages::{self, Doubt, FAMILY, Reached, Surroundings};
use atoll_overlay::chord::table::learn::LEARN;
use atoll_overlay::chord::{Chord, ChordConfig};
use atoll_sim::HostId;

use super::cluster::{Cluster, lan};

/// Keeps its place as an honest node does, and refutes every claim.
struct Doubter(Arc<Chord>);

impl Service for Doubter {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let method = request.method;
        let answer = self.0.handle(from, request);
        Box::pin(async move {
            let mut reply = answer.await?;
            let doubt = Some(Doubt::Refuted);
            match method {
                messages::NOTIFY => {
                    let said = messages::decode::<Surroundings>(&reply.header)?;
                    reply.header = messages::encode(&Surroundings { doubt, ..said });
                }
                messages::REACH_ME => reply.header = messages::encode(&Reached { doubt }),
                _ => {}
            }
            Ok(reply)
        })
    }
}

fn begins_to_doubt(cluster: &Cluster, host: HostId) {
    let doubter = Arc::new(Doubter(cluster.chord(host)));
    cluster.sim.transport(host).serve(Arc::new(Router::new().route(FAMILY, doubter)));
}

fn assert_found_everywhere(cluster: &Cluster, newcomer: HostId) {
    let key = *cluster.chord(newcomer).me().id.key();
    for host in cluster.hosts() {
        let root = cluster.find_root(host, key).map(|found| found.value[0].peer);
        assert_eq!(root, Ok(cluster.peer(newcomer)), "seed {}", cluster.sim.seed());
    }
}

#[test]
fn one_lying_successor_does_not_keep_a_newcomer_off_the_ring() {
    for seed in 1..=6 {
        let cluster = Cluster::perfect(lan(seed), ChordConfig::default(), 20, true);
        cluster.run_secs(5);
        let newcomer = cluster.add();
        let place = cluster.chord(newcomer).me();
        let successor = cluster.root(&place.id.key().next());
        let all = cluster.hosts();
        let liar = all.iter().find(|host| cluster.chord(**host).me().id == successor);
        let liar = *liar.expect("a node follows");
        begins_to_doubt(&cluster, liar);
        // Also if the newcomer joins through the liar.
        let others = all.iter().find(|host| **host != liar && **host != newcomer);
        let via = if seed % 3 == 0 { liar } else { *others.expect("there are others") };
        cluster.join(newcomer, &[via]).unwrap();
        assert_eq!(cluster.chord(newcomer).doubted_by(), None);
        cluster.run_secs(30);
        assert_found_everywhere(&cluster, newcomer);
    }
}

#[test]
fn newcomers_join_a_ring_where_one_in_five_nodes_refuses_them() {
    let cluster = Cluster::perfect(lan(11), ChordConfig::default(), 40, true);
    cluster.run_secs(5);
    for host in cluster.hosts().into_iter().step_by(5) {
        begins_to_doubt(&cluster, host);
    }
    let via = cluster.hosts()[1];
    let newcomers: Vec<HostId> = (0..20).map(|_| cluster.add()).collect();
    for newcomer in &newcomers {
        cluster.join(*newcomer, &[via]).unwrap();
    }
    cluster.run_secs(60);
    for newcomer in newcomers {
        assert_found_everywhere(&cluster, newcomer);
    }
}

/// A node of an older version: it does not know some methods, and is honest in all others.
struct Elder {
    chord: Arc<Chord>,
    lacks: &'static [u16],
}

impl Service for Elder {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        if self.lacks.contains(&request.method) {
            let refusal = Refusal::new(Refusal::UNKNOWN_METHOD, "not in my version");
            return Box::pin(async move { Err(refusal) });
        }
        self.chord.handle(from, request)
    }
}

/// A neighbour that refused a call as unknown was taken for dead, again and again.
#[test]
fn a_node_that_does_not_know_a_method_is_alive_and_keeps_its_place() {
    const LACKS: [u16; 7] = [
        messages::PING,
        messages::NUDGE,
        messages::LEAVE,
        messages::REPORT_FAILED,
        messages::INTRODUCE,
        messages::REACH_ME,
        LEARN,
    ];
    for seed in 1..=4 {
        // A ring larger than the successor lists: only then are there questions to ask.
        let config = ChordConfig { successors: 4, ..ChordConfig::default() };
        let cluster = Cluster::perfect(lan(seed), config, 24, true);
        cluster.run_secs(5);
        let elder = cluster.hosts()[seed as usize];
        let service = Arc::new(Elder { chord: cluster.chord(elder), lacks: &LACKS });
        cluster.sim.transport(elder).serve(Arc::new(Router::new().route(FAMILY, service)));
        let me = cluster.chord(elder).me();
        let place = *me.id.key();
        let neighbours = || {
            let is_beside = |host: &HostId| {
                let around = cluster.chord(*host).neighbourhood();
                around.successors.into_iter().chain(around.predecessor).any(|n| n.id == me.id)
            };
            cluster.hosts().into_iter().filter(is_beside).count()
        };
        let at_first = neighbours();
        for second in 0..600 {
            cluster.run_secs(1);
            assert_eq!(neighbours(), at_first, "seed {seed}, second {second}");
        }
        assert!(cluster.chord(elder).neighbourhood().range().is_some_and(|r| r.contains(&place)));
        assert_found_everywhere(&cluster, elder);
    }
}
