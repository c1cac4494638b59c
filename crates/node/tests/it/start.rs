//! Directories, identities, and how a node refuses to start.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use atoll_node::{
    Client, ClientError, DirError, IdProfile, JoinCode, Node, NodeConfig, StartError,
};

use crate::world::{Home, code_of, mode, positions, until};

#[tokio::test]
async fn a_first_start_makes_a_private_directory() {
    let home = Home::new();
    let node = home.found().await;
    assert!(node.is_founder());
    assert_eq!(mode(&home.dir), 0o700);
    for name in ["identity.key", "network.cbor", "settings.cbor", "node.lock", "control.sock"] {
        assert_eq!(mode(home.dir.join(name)), 0o600, "{name}");
    }
    assert_eq!(fs::read(home.dir.join("identity.key")).expect("read").len(), 32);
    node.stop().await;
    assert!(!home.dir.join("control.sock").exists(), "the socket goes with the node");
}

#[tokio::test]
async fn a_later_start_is_the_same_node_at_the_same_address() {
    let home = Home::new();
    let node = home.found().await;
    let (card, listen, place) = (node.local(), node.listen(), positions(&node.status()));
    let network = node.status().network_id;
    node.stop().await;
    let settings = || fs::metadata(home.dir.join("settings.cbor")).expect("there").ino();
    let written = settings();
    let node = home.start_again().await;
    assert_eq!(settings(), written, "nothing new is written: the disk may be full");
    assert!(!node.is_founder());
    assert_eq!((node.local(), node.listen()), (card, listen));
    assert_eq!((positions(&node.status()), node.status().network_id), (place, network));
    node.stop().await;
}

#[tokio::test]
async fn a_key_that_others_can_read_is_refused() {
    let home = Home::new();
    home.found().await.stop().await;
    let key = home.dir.join("identity.key");
    fs::set_permissions(&key, fs::Permissions::from_mode(0o644)).expect("chmod");
    let error = Node::start(NodeConfig::new(&home.dir)).await.expect_err("readable");
    assert!(matches!(error, StartError::Dir(DirError::Readable { .. })), "{error}");
    assert!(error.to_string().contains(&format!("chmod 600 {}", key.display())), "{error}");
}

#[tokio::test]
async fn a_damaged_key_is_told_and_not_replaced() {
    let home = Home::new();
    home.found().await.stop().await;
    let key = home.dir.join("identity.key");
    fs::write(&key, b"short").expect("write");
    let error = Node::start(NodeConfig::new(&home.dir)).await.expect_err("damaged");
    assert!(matches!(error, StartError::Dir(DirError::Damaged { .. })), "{error}");
    assert_eq!(fs::read(&key).expect("read"), b"short");
}

#[tokio::test]
async fn a_damaged_list_of_peers_costs_nothing_but_the_memory() {
    let (home, other) = (Home::new(), Home::new());
    let node = home.found().await;
    other.join(&code_of(&home).await).await.stop().await;
    fs::write(other.dir.join("peers.cbor"), b"\x9f\xff damaged").expect("write");
    let again = other.start_again().await;
    assert_eq!(again.status().successors.len(), 1, "found by the join code's peers");
    again.stop().await;
    node.stop().await;
}

#[tokio::test]
async fn a_second_daemon_in_one_directory_is_refused() {
    let home = Home::new();
    let node = home.found().await;
    let error = Node::start(NodeConfig::new(&home.dir)).await.expect_err("one runs");
    assert!(matches!(error, StartError::Dir(DirError::Locked { .. })), "{error}");
    assert!(error.to_string().contains(&std::process::id().to_string()), "{error}");
    home.client().await.status().await.expect("the first is not disturbed");
    node.stop().await;
}

#[tokio::test]
async fn another_network_needs_another_directory() {
    let (home, other) = (Home::new(), Home::new());
    home.found().await.stop().await;
    let node = other.found().await;
    let code = code_of(&other).await;
    let error = Node::start(home.config(Some(code.clone()))).await.expect_err("another network");
    assert!(matches!(error, StartError::OtherNetwork { .. }), "{error}");
    assert!(error.to_string().contains("--dir"), "{error}");
    node.stop().await;
    let again = Node::start(other.config(Some(code))).await.expect("its own network's code");
    again.stop().await;
}

#[tokio::test]
async fn a_taken_port_is_told() {
    let (home, other) = (Home::new(), Home::new());
    let node = home.found().await;
    let config = NodeConfig { listen: Some(node.listen()), ..other.config(None) };
    let error = Node::start(config).await.expect_err("taken");
    assert!(matches!(error, StartError::Listen { .. }), "{error}");
    assert!(error.to_string().contains("--listen"), "{error}");
    node.stop().await;
}

#[tokio::test]
async fn without_a_node_the_client_says_how_to_start_one() {
    let home = Home::new();
    let absent = Client::connect(&home.dir).await.expect_err("no directory");
    home.found().await.stop().await;
    let stopped = Client::connect(&home.dir).await.expect_err("no node");
    for error in [absent, stopped] {
        assert!(matches!(error, ClientError::NoNode { .. }), "{error}");
        let hint = format!("atoll up --dir {}", home.dir.display());
        assert!(error.to_string().contains(&hint), "{error}");
    }
}

#[tokio::test]
async fn a_socket_left_by_a_crash_is_replaced() {
    let home = Home::new();
    home.found().await.stop().await;
    // What a killed process leaves: a socket file without a server.
    drop(std::os::unix::net::UnixListener::bind(home.dir.join("control.sock")).expect("bind"));
    let error = Client::connect(&home.dir).await.expect_err("nobody answers");
    assert!(matches!(error, ClientError::NoNode { .. }), "{error}");
    let node = home.start_again().await;
    home.client().await.status().await.expect("answers");
    node.stop().await;
}

#[tokio::test]
async fn a_directory_too_deep_for_a_socket_path_works_too() {
    let temp = tempfile::tempdir().expect("temp");
    let dir = temp.path().join("d".repeat(80)).join("e".repeat(80));
    let config = NodeConfig { listen: "127.0.0.1:0".parse().ok(), ..NodeConfig::new(&dir) };
    let node = Node::start(config).await.expect("starts");
    let client = Client::connect(&dir).await.expect("connects");
    assert_eq!(client.status().await.expect("answers").dir, dir.display().to_string());
    node.stop().await;
}

#[tokio::test]
async fn an_invitation_from_loopback_warns_that_it_does_not_leave_the_machine() {
    let home = Home::new();
    let node = home.found().await;
    let invitation = home.client().await.invite().await.expect("invitation");
    assert_eq!(invitation.code.bootstrap, [node.local()]);
    assert!(invitation.warning.is_some_and(|warning| warning.contains("this machine only")));
    let text = invitation.code.to_string();
    assert!(text.starts_with("atoll-join:"));
    assert_eq!(text.parse(), Ok(invitation.code));
    node.stop().await;
}

#[tokio::test]
async fn a_newcomer_that_reaches_nobody_waits_and_says_so() {
    let (home, newcomer) = (Home::new(), Home::new());
    let node = home.found().await;
    let code = code_of(&home).await;
    node.stop().await;
    let late = newcomer.join(&code).await;
    let status = late.status();
    assert!(!status.joined);
    assert!(status.warnings.iter().any(|warning| warning.contains("not on the ring yet")));
    let node = home.start_again().await;
    until("it gets in", || late.status().joined && late.status().warnings.is_empty()).await;
    assert_eq!(late.status().successors.len(), 1);
    late.stop().await;
    node.stop().await;
}

#[tokio::test]
async fn a_client_can_stop_the_node() {
    let home = Home::new();
    let node = home.found().await;
    home.client().await.shutdown().await.expect("heard");
    assert_eq!(node.until_told_to_stop().await, "a client asked for it");
    node.stop().await;
}

#[tokio::test]
async fn a_terminated_node_stops() {
    let home = Home::new();
    let node = home.found().await;
    // Whatever the node does, this process survives the signal.
    let _caught = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate());
    {
        let mut told = std::pin::pin!(node.until_told_to_stop());
        assert!(futures_util::poll!(&mut told).is_pending(), "it runs");
        let this = rustix::process::getpid();
        rustix::process::kill_process(this, rustix::process::Signal::TERM).expect("sent");
        assert_eq!(told.await, "terminated");
    }
    node.stop().await;
    assert!(!home.dir.join("control.sock").exists());
}

#[tokio::test]
async fn a_first_start_that_failed_does_not_bind_the_directory_to_its_network() {
    let (home, other) = (Home::new(), Home::new());
    let node = other.found().await;
    // The likely mistake: the port is taken by a node that runs here already.
    let config = NodeConfig { listen: Some(node.listen()), ..home.config(None) };
    Node::start(config).await.expect_err("taken");
    let joined = home.join(&code_of(&other).await).await;
    assert!(joined.status().joined && !joined.is_founder());
    joined.stop().await;
    node.stop().await;
}

mod join_codes {
    use super::*;
    use atoll_key::PeerId;
    use atoll_key::text::encode_checked;
    use atoll_net::Peer;
    use atoll_node::{JoinCodeError, Network};

    fn peer(number: u8, addr: &str) -> Peer {
        Peer { id: PeerId([number; 32]), addr: addr.parse().expect("an address") }
    }

    fn code() -> JoinCode {
        let peers = [peer(1, "10.0.0.1:7543"), peer(2, "[2001:db8::2]:1")];
        JoinCode::new(Network::generate(IdProfile::Identity, 3, [9; 32]), peers)
    }

    #[test]
    fn a_code_reads_back_also_with_space_around_it() {
        let code = code();
        assert_eq!(code.to_string().parse(), Ok(code.clone()));
        assert_eq!(format!("  {code}\n").parse(), Ok(code));
    }

    #[test]
    fn a_code_names_few_nodes_and_its_secret_is_not_printed() {
        let many = (0..40).map(|i| peer(i, "10.0.0.1:7543"));
        let code = JoinCode::new(Network::generate(IdProfile::Identity, 3, [9; 32]), many);
        assert_eq!(code.bootstrap.len(), atoll_node::MAX_BOOTSTRAP);
        let secret = format!("{:?}", code.network.secret);
        assert!(!format!("{code:?}").contains(&secret[1..20]));
    }

    #[test]
    fn mistyped_and_cut_codes_are_refused() {
        let text = code().to_string();
        for end in 0..text.len() {
            assert!(text[..end].parse::<JoinCode>().is_err(), "cut at {end}");
        }
        for at in 11..text.len() {
            let mut wrong = text.clone().into_bytes();
            wrong[at] = if wrong[at] == b'a' { b'b' } else { b'a' };
            let wrong = String::from_utf8(wrong).expect("ASCII");
            assert!(wrong.parse::<JoinCode>().is_err(), "changed at {at}");
        }
    }

    /// The checksum is right in all of these: an attacker made them on purpose.
    #[test]
    fn forged_codes_are_refused() {
        let network = |replicas: u8, secret: &[u8]| {
            let head = [0xa4, 0x00, 0x02, 0x01, replicas, 0x02, 0x58, secret.len() as u8];
            [&head[..], secret, &[0x03, 0x58, 32], &[8; 32]].concat()
        };
        let payload =
            |network: &[u8], peers: &[u8]| [&[1, 0xa2, 0x00][..], network, &[0x01], peers].concat();
        let one = [&[0x81, 0x58, 38][..], &[7; 32], &[10, 0, 0, 1], &[0x1d, 0x77]].concat();
        let good = network(3, &[9; 32]);
        let forge = |bytes: &[u8]| encode_checked("atoll-join:", bytes).parse::<JoinCode>();
        assert!(forge(&payload(&good, &one)).is_ok(), "the forger knows the format");
        let no_port = [&[0x81, 0x58, 38][..], &[7; 32], &[10, 0, 0, 1], &[0, 0]].concat();
        let five = [&[0x85][..]]
            .into_iter()
            .map(<[u8]>::to_vec)
            .chain((0..5).map(|i| [&[0x58, 38][..], &[i; 32], &[10, 0, 0, 1, 0, 9]].concat()))
            .collect::<Vec<_>>()
            .concat();
        let cases: [(&str, Vec<u8>); 11] = [
            ("empty", vec![]),
            ("another layout", [&[2][..], &payload(&good, &one)[1..]].concat()),
            ("no replicas", payload(&network(0, &[9; 32]), &one)),
            ("too many replicas", payload(&network(23, &[9; 32]), &one)),
            ("a short secret", payload(&network(3, &[9; 31]), &one)),
            ("nobody to ask", payload(&good, &[0x80])),
            ("nowhere to ask", payload(&good, &no_port)),
            ("too many to ask", payload(&good, &five)),
            ("2^64 - 1 peers", payload(&good, &[0x9b, 255, 255, 255, 255, 255, 255, 255, 255])),
            ("a peer of 3 bytes", payload(&good, &[0x81, 0x43, 1, 2, 3])),
            ("nested for ever", [vec![1], vec![0x81; 2000]].concat()),
        ];
        for (what, bytes) in cases {
            let refused = forge(&bytes);
            assert!(refused.is_err(), "{what}: {refused:?}");
        }
        let long = "a".repeat(10 << 20);
        let refused = format!("atoll-join:{long}").parse::<JoinCode>();
        assert!(matches!(refused, Err(JoinCodeError::Text(_))));
    }
}
