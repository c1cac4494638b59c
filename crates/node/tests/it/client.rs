//! The client and the control socket under trouble, and the volumes behind it.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use atoll_dht::{Blocks, GetError, NewBlock, PutError, Wanted};
use atoll_env::BoxFuture;
use atoll_key::kinds::certified::{Author, Binding, Certificate, CertifiedBlock, WriterId};
use atoll_key::{BlockHash, GroupId, InvalidBlock, SecretKey, SignedBlock, UserId, VolumeId};
use atoll_net::{
    CallError, Peer, Refusal, Reply, Request, Service, UnixClient, WhenAbsent, serve_unix,
};
use atoll_node::{Client, ClientError, SettingsChange, VirtualServers, VolumeError};
use bytes::Bytes;

use crate::world::{Home, LONG, blocks};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_get_started_while_the_node_is_down_succeeds_when_it_is_back() {
    let home = Home::new();
    let node = home.found().await;
    let put = blocks(1, 1, 1000);
    let (hash, bytes) = put[0].clone();
    let client = home.patient_client().await;
    client.put(put).await.expect("put");
    node.stop().await;
    let waiting = tokio::spawn(client.get(hash));
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!waiting.is_finished(), "it waits");
    let node = home.start_again().await;
    assert_eq!(waiting.await.expect("no panic"), Ok(bytes));
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watcher_at_the_socket_hears_of_the_next_version() {
    let home = Home::new();
    let node = home.found().await;
    let (client, writer) = (home.client().await, home.client().await);
    let signed = |version| SignedBlock::sign(&SecretKey::from_seed(&[1; 32]), b"", version, b"");
    writer.put_signed(signed(1)).await.expect("put");
    let watching = tokio::spawn(client.watch(signed(0).id(), 1));
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!watching.is_finished(), "it has seen that version");
    writer.put_signed(signed(2)).await.expect("put");
    let heard = watching.await.expect("no panic").expect("held").expect("newer");
    assert_eq!((heard.version, &heard.bytes), (2, signed(2).bytes()));
    let held = client.get_block(signed(0).id(), Wanted::AtLeast(2)).await.expect("held");
    assert_eq!(held, heard);
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_socket_says_which_nodes_hold_blocks() {
    let home = Home::new();
    let node = home.found().await;
    let client = home.client().await;
    let put = blocks(1, 1, 1000);
    let held = put[0].0.id();
    client.put(put).await.expect("put");
    let signed = SignedBlock::sign(&SecretKey::from_seed(&[1; 32]), b"", 7, b"");
    client.put_signed(signed.clone()).await.expect("put");
    let lacking = BlockHash::of(b"nobody has it").id();
    let said = client.replicas(&[held, signed.id(), lacking]).await.expect("answered");
    assert_eq!((said.nodes.len(), said.blocks.len()), (1, 3), "the only node there is");
    assert_eq!(said.nodes[0].trouble, None);
    let versions: Vec<Option<u64>> =
        said.blocks.iter().map(|block| block.copies[0].version).collect();
    assert_eq!(versions, [Some(0), Some(7), None]);
    assert!(said.blocks[0].copies[0].lease_secs > 24 * 3600, "{said:?}");
    let uses = client.uses(signed.id(), signed.id().key).await.expect("answered");
    assert_eq!((uses.answered, uses.silent, uses.readers.len()), (1, 0, 0));
    node.stop().await;
}

/// Versions of one height are in no order: a client took a joined block for an older one whenever its hash
/// was lower.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn joined_blocks_of_one_height_reach_readers_and_watchers_at_the_socket() {
    let home = Home::new();
    let node = home.found().await;
    let client = home.client().await;
    let secret = |n| SecretKey::from_seed(&[n; 32]);
    let group = secret(100);
    let volume = VolumeId(secret(101).public());
    let binding = Binding::new(volume, [1; 16], &[GroupId(group.public())]).expect("one group");
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970");
    let mut seen = None;
    for n in 0..8 {
        let user = UserId(secret(n).public());
        let certificate = Certificate::issue(&group, user, 0, u64::MAX);
        let author =
            Author { secret: secret(n), certificate, writer: WriterId::new(&user, [n; 8]) };
        let time_ms = now.as_millis() as u64;
        let block = CertifiedBlock::create(binding.clone(), &author, time_ms, &[n]);
        let block = block.expect("a member");
        let (id, bytes) = (block.id(), block.bytes().clone());
        let put = client.put_blocks(vec![NewBlock { id, bytes, lease_secs: None }]).await;
        assert_eq!(put, [Ok(())]);
        let held = client.get_block(id, Wanted::AtLeast(block.version())).await.expect("held");
        if let Some(seen) = seen {
            assert_eq!(client.watch(id, seen).await, Ok(Some(held.clone())));
        }
        seen = Some(held.version);
    }
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_patience_a_get_fails_and_says_how_to_start_a_node() {
    let home = Home::new();
    let node = home.found().await;
    let client = home.client().await;
    node.stop().await;
    let error = client.get(BlockHash([1; 32])).await.expect_err("no node");
    assert!(matches!(error, GetError::Unavailable { .. }));
    assert!(error.to_string().contains("atoll up --dir"), "{error}");
    let error = client.status().await.expect_err("no node");
    assert!(matches!(error, ClientError::NoNode { .. }), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_rings_own_errors_reach_the_client() {
    let home = Home::new();
    let node = home.found().await;
    let client = home.client().await;
    let error = client.get(BlockHash([1; 32])).await.expect_err("nobody has it");
    assert!(matches!(error, GetError::NotFound { .. }), "{error}");

    let key = SecretKey::from_seed(&[1; 32]);
    let newer = SignedBlock::sign(&key, b"", 5, b"newer");
    client.put_signed(newer.clone()).await.expect("put");
    let older = SignedBlock::sign(&key, b"", 4, b"older");
    let error = client.put_signed(older).await.expect_err("replay");
    assert_eq!(error, PutError::Superseded { offered: 4, held: 5 });
    assert_eq!(client.get_signed(newer.key()).await, Ok(newer));

    let tombstone = SignedBlock::sign_tombstone(&key, b"", 6);
    assert_eq!(client.remove_blocks(vec![tombstone.clone().into()]).await, [Ok(())]);
    let id = SignedBlock::id_at(SignedBlock::sign(&key, b"", 0, b"").key());
    let tombstone = tombstone.bytes().clone();
    let removed = GetError::Removed { key: id.key, version: 6, tombstone: tombstone.into() };
    assert_eq!(client.get_block(id, Wanted::Newest).await, Err(removed.clone()));
    assert_eq!(client.watch(id, 5).await, Err(removed));

    let forged = vec![(BlockHash([7; 32]), Bytes::from_static(b"not it"))];
    let error = client.put(forged).await.expect_err("wrong hash");
    assert_eq!(error, PutError::Invalid(InvalidBlock::WrongHash));
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_calls_on_the_socket_are_refused_and_the_node_lives() {
    let home = Home::new();
    let node = home.found().await;
    let raw = UnixClient::new(&home.dir.join("control.sock"));
    let call = |method: u16, header: &[u8], parts: Vec<Bytes>| {
        let header = Bytes::copy_from_slice(header);
        raw.call(Request { method, header, parts }, LONG, WhenAbsent::Fail)
    };
    let enormous = b"\xa1\x00\x5b\xff\xff\xff\xff\xff\xff\xff\xff";
    for method in (0x0300..0x0334).chain([0x0101, 0x0201, 0xffff]) {
        for header in [&b""[..], &[0xff; 100], &[0x81; 1000], enormous, b"\xbf"] {
            let refused = call(method, header, vec![Bytes::from_static(b"part")]).await;
            let Err(CallError::Refused(refusal)) = refused else {
                panic!("{method:#06x} {header:02x?}: {refused:?}");
            };
            let expected = [Refusal::MALFORMED, Refusal::UNKNOWN_METHOD];
            assert!(expected.contains(&refusal.code), "{method:#06x}: {refusal}");
        }
    }
    let unfinished = call(0x0303, b"\xa1\x00\x58\x40", vec![]).await;
    assert!(matches!(unfinished, Err(CallError::Refused(_))), "{unfinished:?}");
    home.client().await.status().await.expect("alive");
    node.stop().await;
}

/// The header of a reply that carries nothing: `[0, [{}]]`.
const DONE: &[u8] = b"\x82\x00\x81\xa0";

/// A service on the socket that is not the expected node, or that lies.
struct Liar {
    header: &'static [u8],
    parts: Vec<Bytes>,
}

impl Service for Liar {
    fn handle(&self, _: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let reply = match request.method {
            0x0300 => Reply { header: Bytes::from_static(DONE), parts: Vec::new() },
            _ => Reply { header: Bytes::from_static(self.header), parts: self.parts.clone() },
        };
        Box::pin(async move { Ok(reply) })
    }
}

/// The client checks what it gets: "nothing unverified leaves Atoll".
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lying_node_is_not_believed() {
    let other = SignedBlock::sign(&SecretKey::from_seed(&[2; 32]), b"", 1, b"other");
    let mut forged = other.bytes().to_vec();
    forged[60] ^= 1;
    let lies: [(&[u8], Vec<Bytes>); 9] = [
        (DONE, vec![Bytes::from_static(b"other bytes")]),
        (DONE, vec![other.bytes().clone()]),
        (DONE, vec![forged.into()]),
        (DONE, vec![]),
        (b"", vec![]),
        (b"\xa0", vec![]),
        (b"\x82\x00\x81\xa1\x00\x43abc", vec![]),
        (b"\x82\x01\x81\x82\x09\x80", vec![]),
        (b"\x9b\xff\xff\xff\xff\xff\xff\xff\xff", vec![Bytes::from_static(b"{]")]),
    ];
    for (header, parts) in lies {
        let temp = tempfile::tempdir().expect("temp");
        let liar = Liar { header, parts };
        let _server = serve_unix(&temp.path().join("control.sock"), Arc::new(liar)).expect("serve");
        let client = Client::connect(temp.path()).await.expect("something answers");
        let got = client.get(BlockHash([1; 32])).await;
        assert!(matches!(got, Err(GetError::Unavailable { .. })), "{header:02x?}: {got:?}");
        let key = SecretKey::from_seed(&[1; 32]).volume_id().root_key();
        let got = client.get_signed(key).await;
        assert!(matches!(got, Err(GetError::Unavailable { .. })), "{header:02x?}: {got:?}");
        assert!(client.renew(vec![BlockHash([1; 32])]).await.is_err(), "{header:02x?}");
        assert!(client.status().await.is_err(), "{header:02x?}");
        assert!(client.invite().await.is_err(), "{header:02x?}");
        assert!(client.named_volume("docs").await.is_err(), "{header:02x?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_is_published_under_its_own_name_and_keeps_its_key() {
    let home = Home::new();
    let node = home.found().await;
    let client = home.client().await;
    let temp = tempfile::tempdir().expect("temp");
    let [docs, others] = ["a/docs", "b/docs"].map(|path| temp.path().join(path));
    for dir in [&docs, &others] {
        std::fs::create_dir_all(dir).expect("mkdir");
    }
    let first = client.volume(None, &docs).await.expect("made");
    assert_eq!((first.name.as_str(), first.is_new), ("docs", true));
    let roundabout = docs.join("../docs/.");
    let again = client.volume(None, &roundabout).await.expect("the same directory");
    assert!(!again.is_new && again.key.seed() == first.key.seed());
    let error = client.volume(None, &others).await.expect_err("taken");
    let ClientError::Volume(VolumeError::NameTaken { source_dir, .. }) = &error else {
        panic!("{error}");
    };
    assert!(source_dir.ends_with("a/docs") && error.to_string().contains("--name"), "{error}");
    let named = client.volume(Some("docs-b"), &others).await.expect("another name");
    assert!(named.is_new && named.key.seed() != first.key.seed());
    let moved = client.moved_volume(None, &others).await.expect("the directory has moved");
    assert!(!moved.is_new && moved.key.seed() == first.key.seed(), "under the same address");
    assert!(client.volume(None, &docs).await.is_err(), "and left the old place");
    let mistyped = client.moved_volume(Some("dosc"), &docs).await.expect_err("no such volume");
    assert!(mistyped.to_string().contains("no volume dosc"), "{mistyped}");
    let names: Vec<String> =
        client.volumes().await.expect("list").into_iter().map(|volume| volume.name).collect();
    assert_eq!(names, ["docs", "docs-b"]);
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_manifest_survives_a_restart_in_the_middle_and_is_shown_when_committed() {
    let home = Home::new();
    let node = home.found().await;
    let client = home.patient_client().await;
    let volume = client.named_volume("docs").await.expect("made");
    let hashes: Vec<BlockHash> = blocks(1, 70_000, 4).into_iter().map(|(hash, _)| hash).collect();
    let mut keep = client.keep("docs");
    keep.add(&hashes[..40_000]).await.expect("added");
    node.stop().await;
    let node = home.start_again().await;
    keep.add(&hashes[40_000..]).await.expect("added");
    let shown = client.volumes().await.expect("list").remove(0);
    assert_eq!((shown.root_version, shown.lease_expires_unix_secs), (0, 0), "not committed");
    let root = SignedBlock::sign(&volume.key, b"", 9, b"root");
    keep.commit(&root).await.expect("committed");
    let shown = client.status().await.expect("status").volumes.remove(0);
    assert_eq!((shown.root_version, shown.kept_blocks), (9, 70_000));
    let lease_secs = shown.lease_expires_unix_secs - shown.refreshed_unix_secs;
    assert_eq!(lease_secs, 30 * 24 * 3600);
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_are_renewed_when_asked_and_what_is_lost_is_told() {
    let home = Home::new();
    let node = home.found().await;
    let client = home.client().await;
    let error = client.renew_volume("docs").await.expect_err("no such volume");
    assert!(error.to_string().contains("no volume docs"), "{error}");
    let volume = client.named_volume("docs").await.expect("made");
    let error = client.renew_volume("docs").await.expect_err("nothing to keep");
    assert!(error.to_string().contains("nothing is published as docs"), "{error}");
    let mut keep = client.keep("docs");
    keep.add(&[BlockHash([3; 32])]).await.expect("added");
    keep.commit(&SignedBlock::sign(&volume.key, b"", 1, b"root")).await.expect("committed");
    let renewed = client.renew_volume("docs").await.expect("renewed");
    assert_eq!((renewed.lost_blocks, renewed.trouble), (1, None));
    let lease_secs = renewed.lease_expires_unix_secs - renewed.refreshed_unix_secs;
    assert_eq!(lease_secs, 30 * 24 * 3600);
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_change_while_the_node_runs_and_outlive_it() {
    let home = Home::new();
    let node = home.found().await;
    let client = home.client().await;
    let before = client.settings().await.expect("shown");
    assert_eq!((before.virtual_servers.as_str(), before.positions), ("auto", 1));
    let change = SettingsChange {
        virtual_servers: Some(VirtualServers::Count(3)),
        cache_bytes: Some(5 << 20),
    };
    let after = client.change_settings(change).await.expect("changed");
    client.forget_absent().await.expect("written down");
    assert_eq!((after.virtual_servers.as_str(), after.cache_bytes), ("3", 5 << 20));
    crate::world::until("three places", || node.status().positions.len() == 3).await;
    let many = SettingsChange { virtual_servers: Some(VirtualServers::Count(999)), ..change };
    assert!(client.change_settings(many).await.is_err());
    node.stop().await;
    let node = home.start_again().await;
    assert_eq!(node.status().positions.len(), 3);
    let client = home.client().await;
    assert_eq!(client.settings().await.expect("shown"), after);
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_has_disk_space_given_back() {
    let home = Home::new();
    let node = home.found().await;
    let client = home.client().await;
    let reclaimed = client.reclaim().await.expect("done");
    assert_eq!((reclaimed.freed_bytes, reclaimed.block_bytes), (0, 0));
    assert_eq!(reclaimed.disk_bytes, node.status().disk_bytes);
    node.stop().await;
}

/// CFS §3.1: the ring drops blocks whose leases are not renewed; the lease renewer renews them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_lease_renewer_renews_a_volume_and_reports_what_is_lost() {
    let home = Home::new();
    let mut config = home.config(None);
    config.lease = Duration::from_secs(60);
    let node = atoll_node::Node::start(config).await.expect("starts");
    let client = home.client().await;
    let volume = client.named_volume("docs").await.expect("made");
    let there = blocks(1, 30, 100);
    client.put(there.clone()).await.expect("put");
    let mut keep = client.keep("docs");
    let hashes: Vec<BlockHash> = there.iter().map(|(hash, _)| *hash).collect();
    keep.add(&hashes).await.expect("added");
    keep.add(&[BlockHash([3; 32])]).await.expect("added");
    let root = SignedBlock::sign(&volume.key, b"", 1, b"root");
    keep.commit(&root).await.expect("committed");
    // As if the last refresh had been long ago.
    node.stop().await;
    std::fs::remove_file(home.dir.join("volumes/docs/kept")).expect("remove");
    let mut config = atoll_node::NodeConfig::new(&home.dir);
    config.lease = Duration::from_secs(60);
    let node = atoll_node::Node::start(config).await.expect("starts");
    crate::world::until("the volume has been renewed", || {
        node.status().volumes[0].refreshed_unix_secs > 0
    })
    .await;
    let status = node.status();
    assert_eq!(status.volumes[0].lost_blocks, 1);
    let warning = "1 block of volume docs was on no node that answered";
    assert!(status.warnings.iter().any(|w| w.contains(warning)), "{:?}", status.warnings);
    let put_again = home.client().await.get_signed(root.key()).await;
    assert_eq!(put_again, Ok(root), "the root was put by the lease renewer");
    node.stop().await;
}
