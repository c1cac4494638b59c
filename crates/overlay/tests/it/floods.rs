//! The work that calls cause at a node is bounded, however many calls there are.

use std::time::Duration;

use atoll_key::{IdProfile, PeerId};
use atoll_net::{Peer, Request, Service};
use atoll_overlay::chord::ChordConfig;
use atoll_overlay::chord::messages::{
    self, FailureReport, Introduce, Leaving, VirtualIndex, WireNode, WireNodes,
};
use atoll_overlay::{Node, Overlay, VirtualServerId};
use atoll_sim::HostConfig;
use bytes::Bytes;

use super::cluster::{Cluster, MINUTE, lan};

fn pings(cluster: &Cluster) -> u64 {
    cluster.sim.stats().methods.get(&messages::PING).map_or(0, |method| method.call_count)
}

/// One report of sixteen deaths used to make sixteen pings, each time.
#[test]
fn a_flood_of_reports_of_death_causes_few_pings() {
    const SECS: u64 = 30;
    let cluster = Cluster::perfect(lan(1), ChordConfig::default(), 40, true);
    cluster.run_secs(60);
    let idle = {
        let before = pings(&cluster);
        cluster.run_secs(SECS);
        pings(&cluster) - before
    };
    let target = cluster.hosts()[0];
    let known = cluster.chord(target).servers().known();
    let flooders = cluster.sim.add_hosts(20, &HostConfig::default());
    let before = pings(&cluster);
    let mut reports = 0;
    for _ in 0..SECS * 10 {
        for (n, flooder) in flooders.iter().enumerate() {
            let mut nodes = known.clone();
            nodes.rotate_left(n % known.len());
            nodes.truncate(messages::MAX_REPORTED);
            let header = messages::encode(&FailureReport { nodes: WireNodes(nodes) });
            cluster.send(*flooder, target, messages::REPORT_FAILED, header);
            reports += 1;
        }
        cluster.sim.run_for(Duration::from_millis(100));
    }
    let caused = pings(&cluster) - before;
    println!("{reports} reports caused {caused} pings, {idle} without, of {} nodes", known.len());
    // Each node once in ten seconds.
    assert!(caused <= idle + known.len() as u64 * (SECS / 10 + 1), "{caused}");
    cluster.ideal().unwrap();
}

#[test]
fn a_node_reported_dead_is_pinged_by_any_of_its_virtual_servers_in_the_tables() {
    for profile in [IdProfile::Address, IdProfile::Identity] {
        let config =
            ChordConfig { virtual_servers: 4, successors: 4, profile, ..ChordConfig::default() };
        // Without upkeep: only the report tells.
        let cluster = Cluster::perfect(lan(2), config, 12, false);
        let target = cluster.hosts()[0];
        let is_known = |peer: &Peer| {
            let known = cluster.chord(target).servers().known();
            known.iter().any(|node| node.peer == *peer)
        };
        let outsider = cluster.sim.add_host(HostConfig::default());
        let mut others = cluster.chord(target).servers().known();
        others.retain(|node| node.peer != cluster.peer(target));
        // Known by their first virtual server, or only by others.
        let first = others.iter().find(|node| node.virtual_server.index == 0);
        let other = others.iter().find(|node| {
            !others.iter().any(|n| n.peer == node.peer && n.virtual_server.index == 0)
        });
        for peer in [first, other].map(|node| node.expect("there is one").peer) {
            assert!(is_known(&peer));
            cluster.crash_silently(cluster.sim.host_of(&peer.id).unwrap());
            let nodes = WireNodes(vec![Node::of(peer)]);
            let header = messages::encode(&FailureReport { nodes });
            cluster.send(outsider, target, messages::REPORT_FAILED, header);
            cluster.run_secs(30);
            assert!(!is_known(&peer), "{profile:?}");
        }
    }
}

fn leave_call(from: u16, remaining: u16) -> Bytes {
    messages::encode(&Leaving {
        predecessor: None,
        successors: WireNodes::default(),
        from: VirtualIndex(from),
        remaining: VirtualIndex(remaining),
    })
}

/// Every caller that said it left was suspected, with room for 512: a flood of such calls drove
/// out the suspicions of nodes that had been found dead.
#[test]
fn leave_calls_of_unknown_peers_are_ignored() {
    let cluster = Cluster::perfect(lan(3), ChordConfig::default(), 12, true);
    cluster.run_secs(10);
    let target = cluster.hosts()[0];
    // Its successor, which it calls and finds dead itself.
    let gone = cluster.chord(target).neighbourhood().successors[0];
    cluster.crash(cluster.sim.host_of(&gone.peer.id).unwrap());
    cluster.run_secs(6);
    let is_suspected = |node: &Node| {
        let servers = cluster.chord(target).servers();
        servers.admission.is_suspected(node, cluster.sim.now())
    };
    assert!(is_suspected(&gone));
    for n in 0..3000u32 {
        let mut id = [9; 32];
        id[..4].copy_from_slice(&n.to_be_bytes());
        let ghost = Peer { id: PeerId(id), addr: gone.peer.addr };
        let request = Request {
            method: messages::LEAVE,
            header: leave_call((n % 100) as u16, (n % 3) as u16),
            parts: Vec::new(),
        };
        let answer = cluster.chord(target).handle(ghost, request);
        cluster.sim.block_on(MINUTE, answer).unwrap().unwrap();
        let place = Node::at(
            ghost,
            VirtualServerId { index: (n % 100) as u16, ..VirtualServerId::default() },
        );
        assert!(!is_suspected(&place), "{n}");
    }
    assert!(is_suspected(&gone), "it was found dead");
}

#[test]
fn a_member_gives_up_only_places_that_it_has() {
    let cluster = Cluster::perfect(lan(4), ChordConfig::default(), 12, true);
    cluster.run_secs(10);
    let (target, liar) = (cluster.hosts()[0], cluster.peer(cluster.hosts()[5]));
    for index in 1..100 {
        let request =
            Request { method: messages::LEAVE, header: leave_call(index, 1), parts: Vec::new() };
        let answer = cluster.chord(target).handle(liar, request);
        cluster.sim.block_on(MINUTE, answer).unwrap().unwrap();
    }
    assert!(!cluster.chord(target).servers().admission.has_suspects());
    cluster.ideal().unwrap();
}

/// Introductions that waited were bounded, and those taken were not: each was passed on along
/// the ring, so that one call made several, as fast as a peer sent them.
#[test]
fn a_flood_of_introductions_causes_few_calls() {
    const SECS: u64 = 30;
    let meets = |cluster: &Cluster| {
        let stats = cluster.sim.stats();
        stats.methods.get(&messages::INTRODUCE).map_or(0, |method| method.call_count)
    };
    let config =
        ChordConfig { successors: 4, audit_every: MINUTE * 60_000, ..ChordConfig::default() };
    let cluster = Cluster::perfect(lan(5), config, 60, true);
    cluster.run_secs(60);
    let hosts = cluster.hosts();
    // One peer, and many.
    for flooders in [1, 20] {
        let flooders = cluster.sim.add_hosts(flooders, &HostConfig::default());
        let before = meets(&cluster);
        let mut sent = 0;
        for round in 0..SECS as usize * 10 {
            for (n, flooder) in flooders.iter().enumerate() {
                let known = hosts[(round * 7 + n * 13) % hosts.len()];
                let node = WireNode(cluster.chord(known).me());
                let header = messages::encode(&Introduce { node, hops_left: 32 });
                cluster.send(*flooder, hosts[0], messages::INTRODUCE, header);
                sent += 1;
            }
            cluster.sim.run_for(Duration::from_millis(100));
        }
        let caused = meets(&cluster) - before - sent;
        println!("{sent} introductions of {} peers caused {caused} calls", flooders.len());
        let taken = (32 * flooders.len() as u64).min(256) * (SECS / 10 + 1);
        // Each is passed on by few nodes, this one among them.
        assert!(caused <= taken * 2, "{caused}");
        cluster.ideal().unwrap();
    }
}
