//! Replacing the network's secret while it runs, and removing nodes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use atoll_dht::Blocks;
use atoll_key::{PeerId, SecretKey};
use atoll_net::{NetworkAuth, Request, TcpConfig, TcpTransport, Transport};
use atoll_node::{Client, ClientError, JoinCode, Member, Node, NodeConfig, Protocol};
use bytes::Bytes;

use crate::world::{Home, LONG, blocks, code_of, ring, sees, until};

const HOUR: Duration = Duration::from_secs(3600);
/// The methods by which a record travels.
const RECORDS: [u16; 2] = [0x0400, 0x0401];
const GIVE: u16 = RECORDS[1];

async fn epoch(client: &Client) -> u64 {
    client.members().await.expect("answered").epoch
}

/// Waits until a node has the secret of this epoch.
async fn reaches(home: &Home, wanted: u64) {
    let client = home.client().await;
    let waiting = async {
        while epoch(&client).await < wanted {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let ended = tokio::time::timeout(LONG, waiting).await;
    ended.unwrap_or_else(|_| panic!("never: epoch {wanted} in {}", home.dir.display()));
}

async fn member(client: &Client, id: &PeerId) -> Option<Member> {
    let id = data_encoding(id);
    client.members().await.expect("answered").members.into_iter().find(|m| m.id == id)
}

fn data_encoding(id: &PeerId) -> String {
    id.0.iter().map(|byte| format!("{byte:02x}")).collect()
}

async fn stop_all(nodes: Vec<(Home, Node)>) {
    for (_, node) in nodes {
        node.stop().await;
    }
}

fn warns(node: &Node, what: &str) -> bool {
    node.status().warnings.iter().any(|warning| warning.contains(what))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_secret_is_replaced_under_load_and_a_leaked_code_is_worth_nothing_from_then_on() {
    let nodes = ring(3).await;
    let leaked = code_of(&nodes[1].0).await;
    let writer = nodes[2].0.client().await;
    let over = Arc::new(AtomicBool::new(false));
    let stop = over.clone();
    let load = tokio::spawn(async move {
        let mut acknowledged = Vec::new();
        for round in 0.. {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            let put = blocks(round, 4, 2000);
            writer.put(put.clone()).await.expect("no put fails");
            for (hash, bytes) in &put {
                assert_eq!(writer.get(*hash).await.as_ref(), Ok(bytes));
            }
            acknowledged.extend(put);
        }
        acknowledged
    });
    let admin = nodes[0].0.client().await;
    let rotated = admin.rotate_secret(&[], HOUR).await.expect("it made the network");
    assert_eq!((rotated.epoch, rotated.removed), (1, 0));
    assert_eq!(rotated.told, rotated.connected, "all who are connected have it");
    for (home, _) in &nodes {
        reaches(home, 1).await;
    }
    over.store(true, Ordering::Relaxed);
    let acknowledged = load.await.expect("the load ends");
    for (home, node) in &nodes {
        sees(node, 3).await;
        let client = home.client().await;
        for (hash, bytes) in &acknowledged {
            assert_eq!(client.get(*hash).await.as_ref(), Ok(bytes));
        }
    }

    let thief = Home::new();
    let outside = thief.join(&leaked).await;
    assert!(!outside.status().joined);
    until("it is told why", || warns(&outside, "secret was replaced")).await;
    assert_eq!(code_of(&thief).await.network.secret, leaked.network.secret);
    outside.stop().await;
    let fresh = code_of(&nodes[3].0).await;
    assert_ne!(fresh.network.secret, leaked.network.secret);
    // The same directory: the leaked code had belonged to a user who was meant to join.
    let inside = thief.join(&fresh).await;
    sees(&inside, 4).await;
    inside.stop().await;
    stop_all(nodes).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_removed_node_is_in_nobodys_tables_and_never_learns_the_new_secret() {
    let mut nodes = ring(3).await;
    let (home, removed) = nodes.pop().expect("four");
    let id = removed.local().id;
    let before = code_of(&home).await.network.secret;
    let admin = nodes[0].0.client().await;
    admin.rotate_secret(&[id], HOUR).await.expect("it made the network");
    for (other, node) in &nodes {
        reaches(other, 1).await;
        sees(node, 2).await;
        let seen = member(&other.client().await, &id).await;
        assert_eq!(seen.map(|member| member.status), Some("removed".into()));
    }
    until("it is told", || warns(&removed, "removed")).await;
    let put = home.client().await.put(blocks(1, 1, 100)).await;
    let got = blocks(1, 1, 100)[0].0;
    for (other, node) in &nodes {
        assert!(other.client().await.get(got).await.is_err(), "{put:?} went nowhere");
        assert!(node.status().refusals.contains_key("removed"), "{:?}", node.status().refusals);
    }
    removed.stop().await;
    let removed = home.start_again().await;
    until("it is told again", || warns(&removed, "removed")).await;
    for (_, node) in &nodes {
        sees(node, 2).await;
    }
    assert_eq!(code_of(&home).await.network.secret, before);
    // Nor is it dialled.
    let error = admin.members().await.expect("answered");
    assert!(error.members.iter().all(|m| m.status != "connected" || m.id != data_encoding(&id)));
    removed.stop().await;
    stop_all(nodes).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_was_away_is_let_in_by_the_former_secret_and_given_the_new_one() {
    let mut nodes = ring(2).await;
    let (home, away) = nodes.pop().expect("three");
    let peers = home.dir.join("peers.cbor");
    until("its peers are remembered", || peers.exists()).await;
    away.kill().await;
    let admin = nodes[0].0.client().await;
    admin.rotate_secret(&[], HOUR).await.expect("it made the network");
    reaches(&nodes[1].0, 1).await;
    let back = home.start_again().await;
    reaches(&home, 1).await;
    sees(&back, 2).await;
    let secret = code_of(&home).await.network.secret;
    assert_eq!(secret, code_of(&nodes[0].0).await.network.secret);
    // The new secret is on its disk.
    back.kill().await;
    let back = home.start_again().await;
    assert_eq!(code_of(&home).await.network.secret, secret);
    sees(&back, 2).await;
    back.stop().await;
    stop_all(nodes).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_missed_two_rotations_comes_back_by_a_new_code_to_its_place() {
    let mut nodes = ring(2).await;
    let (home, away) = nodes.pop().expect("three");
    let id = away.status().peer_id;
    let peers = home.dir.join("peers.cbor");
    until("its peers are remembered", || peers.exists()).await;
    away.kill().await;
    let admin = nodes[0].0.client().await;
    for wanted in [1, 2] {
        admin.rotate_secret(&[], HOUR).await.expect("it made the network");
        reaches(&nodes[1].0, wanted).await;
    }
    let back = home.start_again().await;
    assert!(warns(&back, "serving alone"), "{:?}", back.status().warnings);
    for (_, node) in &nodes {
        sees(node, 1).await;
    }
    back.stop().await;
    let back = home.join(&code_of(&nodes[1].0).await).await;
    sees(&back, 2).await;
    assert_eq!(back.status().peer_id, id);
    reaches(&home, 2).await;
    back.stop().await;
    stop_all(nodes).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_node_with_the_administrators_key_can_replace_the_secret() {
    let nodes = ring(1).await;
    assert!(nodes[0].0.dir.join("admin.key").exists());
    assert_eq!(crate::world::mode(nodes[0].0.dir.join("admin.key")), 0o600);
    let client = nodes[1].0.client().await;
    let refused = |error| match error {
        ClientError::Unfit(why) => why,
        other => panic!("{other}"),
    };
    let why = refused(client.rotate_secret(&[], HOUR).await.expect_err("no key"));
    assert!(why.contains("administrator") && why.contains("admin.key"), "{why}");
    // Another key under that name is not the administrator's.
    let key = nodes[1].0.dir.join("admin.key");
    std::fs::copy(nodes[1].0.dir.join("identity.key"), &key).expect("copied");
    let why = refused(client.rotate_secret(&[], HOUR).await.expect_err("the wrong key"));
    assert!(why.contains("does not hold"), "{why}");
    let admin = nodes[0].0.client().await;
    let me = nodes[0].1.local().id;
    let why = refused(admin.rotate_secret(&[me], HOUR).await.expect_err("itself"));
    assert!(why.contains("remove itself"), "{why}");
    let why = refused(admin.rotate_secret(&[], Duration::ZERO).await.expect_err("at once"));
    assert!(why.contains("60 seconds to 90 days"), "{why}");
    assert_eq!(epoch(&admin).await, 0);
    stop_all(nodes).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_keeps_the_record_to_itself_keeps_it_from_nobody() {
    let first = Home::new();
    let mut nodes = vec![];
    let founder = first.found().await;
    let code = code_of(&first).await;
    nodes.push((first, founder));
    for number in 0..3 {
        let home = Home::new();
        let lacks: &[u16] = if number == 0 { &RECORDS } else { &[] };
        let protocol = Protocol { lacks, ..Protocol::default() };
        let config = NodeConfig { protocol, ..home.config(Some(code.clone())) };
        let node = Node::start(config).await.expect("a fresh directory");
        nodes.push((home, node));
    }
    for (_, node) in &nodes {
        sees(node, 3).await;
    }
    nodes[0].0.client().await.rotate_secret(&[], HOUR).await.expect("it made the network");
    for at in [0, 2, 3] {
        reaches(&nodes[at].0, 1).await;
    }
    for (_, node) in &nodes {
        sees(node, 3).await;
    }
    stop_all(nodes).await;
}

/// A member that speaks for itself, by the secret of a code.
async fn cheat(code: &JoinCode) -> Arc<TcpTransport> {
    let mut profile = b"atoll 1\0".to_vec();
    profile.push(code.network.profile as u8);
    profile.extend_from_slice(&code.network.replicas.to_be_bytes());
    let auth = NetworkAuth::new(Arc::new(code.network.secret), profile.into());
    let listen = "127.0.0.1:0".parse().expect("an address");
    let config = TcpConfig::new(SecretKey::from_seed(&[77; 32]), auth, listen);
    TcpTransport::start(config).await.expect("loopback has free ports")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forged_replayed_and_oversized_records_change_nothing() {
    let nodes = ring(1).await;
    let cheat = cheat(&code_of(&nodes[0].0).await).await;
    let victim = nodes[1].1.local();
    let give = |record: Vec<u8>| {
        let parts = vec![Bytes::from(record)];
        cheat.call(victim, Request { method: GIVE, header: Bytes::new(), parts }, LONG)
    };
    give(vec![0; 300]).await.expect("it is heard, and not believed");
    let admin = nodes[0].0.client().await;
    let mut records = Vec::new();
    for wanted in [1, 2] {
        admin.rotate_secret(&[], HOUR).await.expect("it made the network");
        reaches(&nodes[1].0, wanted).await;
        records.push(std::fs::read(nodes[1].0.dir.join("membership")).expect("on its disk"));
    }
    let held = records[1].clone();
    let mut forged = held.clone();
    forged[40] += 1; // the epoch's last byte
    let mut long = held.clone();
    long[121..123].copy_from_slice(&[0xff, 0xff]);
    let mut huge = held.clone();
    huge.resize(3 << 20, 0);
    for record in [records[0].clone(), forged, long, huge, Vec::new(), held.clone()] {
        give(record).await.expect("it is heard, and not believed");
        assert_eq!(epoch(&nodes[1].0.client().await).await, 2);
        assert_eq!(std::fs::read(nodes[1].0.dir.join("membership")).expect("there"), held);
    }
    for (_, node) in &nodes {
        sees(node, 1).await;
    }
    stop_all(nodes).await;
}
