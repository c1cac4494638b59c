//! A caller without the network's secret is not answered.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use crate::processes::{NodeProcess, Ring, until};

fn refusals(node: &NodeProcess) -> u64 {
    let status = node.atoll(["status", "--json"]).ok().json();
    let refusals = status["refusals"].as_object().expect("a map").clone();
    refusals.values().filter_map(serde_json::Value::as_u64).sum()
}

fn listen_address(node: &NodeProcess) -> String {
    let status = node.atoll(["status", "--json"]).ok().json();
    status["listen"].as_str().expect("an address").to_string()
}

#[test]
fn a_node_of_another_network_is_refused_and_counted() {
    let ring = Ring::of(1);
    let before = refusals(&ring.nodes[0]);
    let invited = ring.nodes[0].atoll(["invite", "--json"]).ok().json();
    // A code of another network that names this network's node as bootstrap.
    let other_temp = tempfile::tempdir().expect("temp");
    let other = NodeProcess::start(other_temp.path().join("other"), None);
    other.wait_for(&["joined"]);
    let code: atoll_node::JoinCode =
        other.atoll(["invite"]).ok().stdout.trim().parse().expect("a code");
    let here: atoll_node::JoinCode =
        invited["code"].as_str().expect("text").parse().expect("a code");
    let forged = atoll_node::JoinCode::new(code.network, here.bootstrap);
    let stranger =
        NodeProcess::start(other_temp.path().join("stranger"), Some(&forged.to_string()));
    until("the stranger is refused", || refusals(&ring.nodes[0]) > before);
    let status = ring.nodes[0].atoll(["status", "--json"]).ok().json();
    assert_eq!(status["successors"].as_array().map(Vec::len), Some(0), "it is not on the ring");
    until("the refusal is logged", || ring.nodes[0].log().contains("refus"));
    drop(stranger);
}

/// Whatever is sent before the handshake, not a byte of ours comes back that a TLS
/// server would not send to anybody.
#[test]
fn plain_bytes_are_not_answered() {
    let ring = Ring::of(1);
    let address = listen_address(&ring.nodes[0]);
    for greeting in [&b"GET / HTTP/1.0\r\n\r\n"[..], b"\0\0\0\0\0\0\0\0", &[0xff; 4096]] {
        let mut stream = TcpStream::connect(&address).expect("connects");
        stream.set_read_timeout(Some(Duration::from_secs(30))).expect("a timeout");
        let _ = stream.write_all(greeting);
        let _ = stream.shutdown(Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        // A TLS alert has seven bytes: kind 21, version, length 2, level, description.
        let alert = answer.len() == 7 && answer[0] == 21;
        assert!(answer.is_empty() || alert, "{answer:?}");
    }
    ring.nodes[0].atoll(["status"]).ok();
}
