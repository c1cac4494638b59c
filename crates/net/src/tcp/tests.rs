//! Breaches of the handshake and of the frames that need a peer that cheats.

use std::collections::BTreeMap;

use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::*;
use crate::frame::{Frame, HEAD_BYTES};
use crate::hello::{Binding, HELLO_BYTES, Hello, Role, SPOKEN, Verdict, Versions};

const SECRET: [u8; 32] = [42; 32];

fn config(number: u8) -> TcpConfig {
    let network = NetworkAuth::new(Arc::new(SECRET), Bytes::from_static(b"profile"));
    let listen = SocketAddr::from(([127, 0, 0, 1], 0));
    TcpConfig::new(SecretKey::from_seed(&[number; 32]), network, listen)
}

async fn until(what: &str, condition: impl Fn() -> bool) {
    let wait = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let limit = Duration::from_secs(30);
    tokio::time::timeout(limit, wait).await.unwrap_or_else(|_| panic!("never: {what}"));
}

/// A TLS connection that has proven its key, and what proofs on it are bound to.
async fn tls_only(
    to: Peer,
    change: impl FnOnce(&mut ClientConfig),
) -> std::io::Result<(TlsStream<TcpStream>, Binding)> {
    let secret = SecretKey::from_seed(&[9; 32]);
    let tls = Tls::new(&secret).expect("TLS");
    let mut config = ClientConfig::clone(&*tls.client(to.id).expect("TLS"));
    change(&mut config);
    let tcp = TcpStream::connect(to.addr).await?;
    let name = ServerName::from(to.addr.ip());
    let stream = TlsConnector::from(Arc::new(config)).connect(name, tcp).await?;
    let exporter = stream.get_ref().1;
    let exporter = exporter
        .export_keying_material([0; 32], b"EXPORTER-atoll-network-proof", None)
        .expect("TLS");
    Ok((stream, Binding::new(&SECRET.into(), &exporter, secret.peer_id(), to.id)))
}

fn hello() -> Hello {
    Hello {
        role: Role::Dialler,
        verdict: Verdict::Welcome,
        versions: SPOKEN,
        addr: SocketAddr::from(([127, 0, 0, 1], 7)),
        profile: *blake3::hash(b"profile").as_bytes(),
    }
}

async fn answer(stream: &mut TlsStream<TcpStream>) -> Vec<u8> {
    let mut answer = Vec::new();
    // An end without a goodbye is an error of TLS, and an end all the same.
    let _ = stream.read_to_end(&mut answer).await;
    answer
}

#[tokio::test]
async fn a_recorded_proof_is_worth_nothing_on_another_connection() {
    let server = TcpTransport::start(config(1)).await.expect("start");
    let (mut first, binding) = tls_only(server.local(), |_| ()).await.expect("TLS");
    let proof = hello().encode(&binding);
    first.write_all(&proof).await.expect("send");
    first.read_exact(&mut [0; HELLO_BYTES]).await.expect("the proof is good on its own connection");

    let (mut second, _) = tls_only(server.local(), |_| ()).await.expect("TLS");
    second.write_all(&proof).await.expect("send");
    assert_eq!(answer(&mut second).await, b"");
    assert_eq!(server.refusals(), BTreeMap::from([(RefusalReason::WrongSecret, 1)]));
}

#[tokio::test]
async fn a_malformed_or_long_hello_is_answered_nothing() {
    let server = TcpTransport::start(config(1)).await.expect("start");
    for (count, bytes) in [vec![0xff; 2], vec![0, 1, 0], vec![0; 2000]].into_iter().enumerate() {
        let (mut stream, _) = tls_only(server.local(), |_| ()).await.expect("TLS");
        stream.write_all(&bytes).await.expect("send");
        assert_eq!(answer(&mut stream).await, b"");
        let counted = BTreeMap::from([(RefusalReason::MalformedProof, count as u64 + 1)]);
        until("it is counted", || server.refusals() == counted).await;
    }
}

#[tokio::test]
async fn the_versions_are_told_only_to_one_that_proved_the_secret() {
    let server = TcpTransport::start(config(1)).await.expect("start");
    let (min, max) = (SPOKEN.max + 1, SPOKEN.max + 2);
    let newer = Hello { versions: Versions { min, max }, ..hello() };
    let (mut stream, binding) = tls_only(server.local(), |_| ()).await.expect("TLS");
    stream.write_all(&newer.encode(&binding)).await.expect("send");
    let told = answer(&mut stream).await;
    let (told, _) = crate::hello::verify(&told, Role::Listener, &binding).expect("a hello");
    assert_eq!((told.verdict, told.versions), (Verdict::NoCommonVersion, SPOKEN));

    let (mut stream, _) = tls_only(server.local(), |_| ()).await.expect("TLS");
    stream.write_all(&newer.encode(&binding)).await.expect("send");
    assert_eq!(answer(&mut stream).await, b"");
    let counted = [(RefusalReason::WrongSecret, 1), (RefusalReason::WrongVersion, 1)];
    assert_eq!(server.refusals(), BTreeMap::from(counted));
}

/// A transport that speaks these versions.
async fn speaking(number: u8, min: u16, max: u16) -> Arc<TcpTransport> {
    let mut config = config(number);
    config.network.versions = Versions { min, max };
    TcpTransport::start(config).await.expect("start")
}

#[tokio::test]
async fn ranges_of_versions_that_overlap_talk_and_others_are_both_named() {
    let limit = Duration::from_secs(30);
    let listeners = [speaking(1, 1, 1).await, speaking(2, 1, 2).await, speaking(3, 2, 2).await];
    let diallers = [speaking(4, 1, 1).await, speaking(5, 1, 2).await, speaking(6, 2, 2).await];
    for (from, dialler) in diallers.iter().enumerate() {
        for (to, listener) in listeners.iter().enumerate() {
            let answer = dialler.call(listener.local(), Request::default(), limit).await;
            if from.abs_diff(to) < 2 {
                assert!(matches!(answer, Err(CallError::Refused(_))), "{from} {to}: {answer:?}");
                continue;
            }
            let error = answer.expect_err("no version in common").to_string();
            let [ours, theirs] = [from, to].map(|at| if at == 0 { 1 } else { 2 });
            let told = format!("speaks protocol version {theirs}, this node version {ours}");
            assert!(error.contains(&told), "{error}");
            let refused = || listener.refusals().get(&RefusalReason::WrongVersion) == Some(&1);
            until("the listener counts it", refused).await;
        }
    }
}

#[tokio::test]
async fn a_connection_without_the_protocol_name_is_refused() {
    let server = TcpTransport::start(config(1)).await.expect("start");
    for name in [vec![], vec![b"h2".to_vec()]] {
        let refused = async {
            let (mut stream, binding) =
                tls_only(server.local(), |tls| tls.alpn_protocols = name.clone()).await?;
            stream.write_all(&hello().encode(&binding)).await?;
            std::io::Result::Ok(answer(&mut stream).await)
        };
        assert!(refused.await.is_ok_and(|answer| answer.is_empty()) || !name.is_empty());
    }
    until("both are counted", || server.refusals().get(&RefusalReason::Tls) == Some(&2)).await;
}

#[tokio::test]
async fn a_malformed_frame_closes_only_its_connection_and_is_counted_with_its_sender() {
    let server = TcpTransport::start(config(1)).await.expect("start");
    let member = TcpTransport::start(config(2)).await.expect("start");
    let call = |limit| member.call(server.local(), Request::default(), limit);
    let limit = Duration::from_secs(30);
    assert!(matches!(call(limit).await, Err(CallError::Refused(_))));

    let (mut cheat, binding) = tls_only(server.local(), |_| ()).await.expect("TLS");
    cheat.write_all(&hello().encode(&binding)).await.expect("send");
    cheat.read_exact(&mut [0; HELLO_BYTES]).await.expect("welcome");
    let mut frame = Frame::Request(1, Request::default()).encode().to_vec();
    frame[16..20].copy_from_slice(&u32::MAX.to_be_bytes());
    cheat.write_all(&frame).await.expect("send");
    assert!(answer(&mut cheat).await.len() <= HEAD_BYTES, "no more than the first ping");
    let cheat = SecretKey::from_seed(&[9; 32]).peer_id();
    assert_eq!(server.stats().malformed_frames, BTreeMap::from([(cheat, 1)]));

    assert!(matches!(call(limit).await, Err(CallError::Refused(_))));
    assert_eq!(member.stats().connections_dialled, 1);
    until("one is left", || server.stats().connections == 1).await;
}

#[tokio::test]
async fn the_cipher_is_one_this_machine_computes_fast() {
    let server = TcpTransport::start(config(1)).await.expect("start");
    let (stream, _) = tls_only(server.local(), |_| ()).await.expect("TLS");
    let suite = stream.get_ref().1.negotiated_cipher_suite().expect("handshake is over").suite();
    #[cfg(target_arch = "x86_64")]
    if std::is_x86_feature_detected!("aes") {
        assert_eq!(suite, rustls::CipherSuite::TLS13_AES_128_GCM_SHA256);
    }
    assert!(format!("{suite:?}").starts_with("TLS13_"));
}

/// A listener that speaks TLS with its own key, and nothing more by itself.
struct Cheat {
    listener: tokio::net::TcpListener,
    secret: SecretKey,
}

impl Cheat {
    async fn new() -> Cheat {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        Cheat { listener, secret: SecretKey::from_seed(&[8; 32]) }
    }

    fn peer(&self) -> Peer {
        let addr = self.listener.local_addr().expect("it is bound");
        Peer { id: self.secret.peer_id(), addr }
    }

    /// Accepts a dialler, reads its hello, and says nothing.
    async fn accept(
        &self,
        dialler: PeerId,
    ) -> (tokio_rustls::server::TlsStream<TcpStream>, Binding) {
        let tls = Tls::new(&self.secret).expect("TLS");
        let (tcp, _) = self.listener.accept().await.expect("somebody dials");
        let accepted = tokio_rustls::TlsAcceptor::from(tls.server()).accept(tcp).await;
        let mut stream = accepted.expect("TLS");
        let exporter = stream.get_ref().1;
        let exporter = exporter
            .export_keying_material([0; 32], b"EXPORTER-atoll-network-proof", None)
            .expect("TLS");
        let binding = Binding::new(&SECRET.into(), &exporter, dialler, self.secret.peer_id());
        stream.read_exact(&mut [0; HELLO_BYTES]).await.expect("the dialler proves first");
        (stream, binding)
    }
}

fn listener_hello() -> Hello {
    Hello { role: Role::Listener, ..hello() }
}

#[tokio::test]
async fn a_first_request_leaves_with_the_dialers_proof_and_not_after_the_listeners() {
    let (cheat, client) =
        (Cheat::new().await, TcpTransport::start(config(1)).await.expect("start"));
    let request = Request { method: 0x0203, ..Request::default() };
    let call = client.call(cheat.peer(), request.clone(), Duration::from_secs(30));
    let serve = async {
        let (mut stream, binding) = cheat.accept(client.local().id).await;
        // The ping that measures the round trip, and the request: before any word of ours.
        let mut frames = Vec::new();
        while frames.len() < 2 {
            let mut head = [0; HEAD_BYTES];
            stream.read_exact(&mut head).await.expect("a frame before our proof");
            frames.push(crate::frame::decode(Bytes::copy_from_slice(&head)).expect("bare frames"));
        }
        let id = frames.iter().find_map(|frame| match frame {
            Frame::Request(id, asked) if *asked == request => Some(*id),
            _ => None,
        });
        stream.write_all(&listener_hello().encode(&binding)).await.expect("sent");
        let reply = Frame::Reply(id.expect("the request"), Reply::default()).encode();
        stream.write_all(&reply).await.expect("sent");
        stream
    };
    let (result, _stream) = tokio::join!(call, serve);
    assert_eq!(result, Ok(Reply::default()));
}

#[tokio::test]
async fn nothing_a_listener_says_counts_before_its_proof() {
    let (cheat, client) =
        (Cheat::new().await, TcpTransport::start(config(1)).await.expect("start"));
    let forged = Frame::Reply(0, Reply::default()).encode();
    for number in 0..3 {
        let call = client.call(cheat.peer(), Request::default(), Duration::from_secs(30));
        let serve = async {
            let (mut stream, binding) = cheat.accept(client.local().id).await;
            let proof = listener_hello().encode(&binding);
            let words = match number {
                // A reply instead of the proof; a proof of another network; a cut-off one.
                0 => forged.to_vec(),
                1 => {
                    let mut forged = proof.to_vec();
                    forged[60] ^= 1;
                    forged
                }
                _ => proof[..40].to_vec(),
            };
            stream.write_all(&words).await.expect("sent");
            stream.write_all(&forged).await.expect("sent");
            let _ = stream.shutdown().await;
            stream
        };
        let (result, _stream) = tokio::join!(call, serve);
        assert!(matches!(result, Err(CallError::Unreachable(_))), "{number}: {result:?}");
        until("it is counted", || client.stats().dials_failed == number + 1).await;
        // It is not dialled again at once; and ever later.
        let again = client.call(cheat.peer(), Request::default(), Duration::from_secs(30)).await;
        let error = again.expect_err("it backs off");
        assert!(error.to_string().contains("a moment ago"), "{error}");
        tokio::time::sleep(Duration::from_millis(110 << number)).await;
    }
    assert!(client.reach(cheat.peer(), Duration::from_millis(300)).await.is_err());
}

/// Answers with its name.
struct Named(&'static str);

impl Service for Named {
    fn handle(&self, _: Peer, _: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let header = Bytes::from_static(self.0.as_bytes());
        Box::pin(async { Ok(Reply { header, parts: Vec::new() }) })
    }
}

/// A node's directory may be copied: then the key is at two addresses.
#[tokio::test]
async fn a_call_of_the_own_key_reaches_the_process_at_the_address() {
    let mut all = Vec::new();
    for (name, number) in [("original", 1), ("copy", 1), ("other", 2)] {
        let transport = TcpTransport::start(config(number)).await.expect("start");
        transport.serve(Arc::new(Named(name)));
        all.push(transport);
    }
    let limit = Duration::from_secs(30);
    let own_key_at = async |at: usize| {
        let answer = all[0].call_own_key(all[at].local().addr, Request::default(), limit).await;
        answer.map(|reply| reply.header)
    };
    assert_eq!(own_key_at(0).await, Ok(Bytes::from_static(b"original")));
    assert_eq!(own_key_at(1).await, Ok(Bytes::from_static(b"copy")));
    let other = own_key_at(2).await;
    assert!(matches!(other, Err(CallError::Unreachable(_))), "{other:?}");
    // Other calls to the own key do not leave the process.
    let here = all[0].call(all[1].local(), Request::default(), limit).await.expect("answered");
    assert_eq!(here.header, Bytes::from_static(b"original"));
    assert!(all.iter().all(|transport| transport.connected().is_empty()));
}
