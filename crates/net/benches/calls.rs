//! What a call costs: processor time of both ends together, and how fast they go.
//!
//! Both ends run in this process, so its processor time is theirs. A plain TCP stream
//! and a plain Unix stream carry the same bytes in the same run, for comparison. Run it
//! by `cargo bench -p atoll-net`, with a word of a line's name to run only those.
#![allow(clippy::disallowed_methods, reason = "a benchmark measures real time")]

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use atoll_env::BoxFuture;
use atoll_key::SecretKey;
use atoll_net::{
    NetworkAuth, Peer, Refusal, Reply, Request, Service, TcpConfig, TcpTransport, Transport,
    UnixClient, WhenAbsent, serve_unix,
};
use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const LIMIT: Duration = Duration::from_secs(60);
const BLOCK_BYTES: usize = 64 << 10;
/// Long enough for the system's clock of processor time, which ticks in 10 ms.
const RUN: Duration = Duration::from_secs(2);

/// Method 0 echoes, method 1 answers with a block.
struct Blocks(Bytes);

impl Service for Blocks {
    fn handle(&self, _from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let parts = if request.method == 1 { vec![self.0.clone()] } else { vec![] };
        Box::pin(async move { Ok(Reply { header: request.header, parts }) })
    }
}

/// Processor time of this process, user and system.
fn cpu() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("Linux");
    let after_name = stat.rsplit(')').next().expect("a name in brackets");
    let ticks: u64 = after_name
        .split_whitespace()
        .skip(11)
        .take(2)
        .map(|field| field.parse::<u64>().expect("ticks"))
        .sum();
    Duration::from_millis(10 * ticks)
}

/// Runs `step` in `lanes` lanes for a while and prints what one step costs.
async fn measure<F>(name: &str, lanes: usize, step_bytes: usize, step: impl Fn() -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    let wanted = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect::<Vec<_>>();
    if !wanted.is_empty() && !wanted.iter().any(|word| name.contains(word.as_str())) {
        return;
    }
    step().await;
    let (began, began_cpu) = (Instant::now(), cpu());
    let mut running = tokio::task::JoinSet::new();
    let mut steps = 0u32;
    for _ in 0..lanes {
        running.spawn(step());
    }
    while running.join_next().await.is_some() {
        steps += 1;
        if began.elapsed() < RUN {
            running.spawn(step());
        }
    }
    let (took, took_cpu) = (began.elapsed(), cpu() - began_cpu);
    println!(
        "{name:<34} {lanes:>3} lanes  {:>8.1} us CPU  {:>8.1} us each  {:>8.0}/s  {:>7.0} MB/s",
        took_cpu.as_secs_f64() * 1e6 / f64::from(steps),
        took.as_secs_f64() * 1e6 * lanes as f64 / f64::from(steps),
        f64::from(steps) / took.as_secs_f64(),
        f64::from(steps) * step_bytes as f64 / took.as_secs_f64() / 1e6,
    );
}

/// One lane of blocks over a plain stream: a step writes and reads 100 blocks.
async fn plain<S>(name: &str, (mut writer, mut reader): (S, S))
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + Unpin + 'static,
{
    let blocks = 20_000;
    let block = vec![7u8; BLOCK_BYTES];
    let (began, began_cpu) = (Instant::now(), cpu());
    let sending = tokio::spawn(async move {
        for _ in 0..blocks {
            writer.write_all(&block).await.expect("the reader lives");
        }
    });
    let mut buffer = vec![0; 256 << 10];
    let mut missing = blocks * BLOCK_BYTES;
    while missing > 0 {
        missing -= reader.read(&mut buffer).await.expect("the writer lives");
    }
    sending.await.expect("sent");
    let (took, took_cpu) = (began.elapsed(), cpu() - began_cpu);
    println!(
        "{name:<34}   1 lane   {:>8.1} us CPU  {:>8.1} us each  {:>8.0}/s  {:>7.0} MB/s",
        took_cpu.as_secs_f64() * 1e6 / blocks as f64,
        took.as_secs_f64() * 1e6 / blocks as f64,
        blocks as f64 / took.as_secs_f64(),
        (blocks * BLOCK_BYTES) as f64 / took.as_secs_f64() / 1e6,
    );
}

async fn plain_tcp() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("loopback");
    let addr = listener.local_addr().expect("bound");
    let (writer, accepted) = tokio::join!(tokio::net::TcpStream::connect(addr), listener.accept());
    plain("plain TCP, 64 KiB", (writer.expect("connected"), accepted.expect("accepted").0)).await;
}

fn config(number: u8) -> TcpConfig {
    let network = NetworkAuth::new(Arc::new([1; 32]), Bytes::new());
    let listen = SocketAddr::from(([127, 0, 0, 1], 0));
    TcpConfig::new(SecretKey::from_seed(&[number; 32]), network, listen)
}

fn calls() -> [(&'static str, Request, usize); 3] {
    let header = Bytes::from(vec![3; 200]);
    let block = Bytes::from(vec![7; BLOCK_BYTES]);
    [
        ("200 B call", Request { method: 0, header: header.clone(), parts: vec![] }, 200),
        ("64 KiB reply", Request { method: 1, header: header.clone(), parts: vec![] }, BLOCK_BYTES),
        ("64 KiB request", Request { method: 0, header, parts: vec![block] }, BLOCK_BYTES),
    ]
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    let service = Arc::new(Blocks(Bytes::from(vec![7; BLOCK_BYTES])));
    plain_tcp().await;
    let pair = tokio::net::UnixStream::pair().expect("a socket pair");
    plain("plain Unix, 64 KiB", pair).await;

    let server = TcpTransport::start(config(1)).await.expect("loopback");
    let client = TcpTransport::start(config(2)).await.expect("loopback");
    server.serve(service.clone());
    for (name, request, bytes) in calls() {
        for lanes in [1, 16] {
            measure(&format!("tcp {name}"), lanes, bytes, || {
                let call = client.call(server.local(), request.clone(), LIMIT);
                async move { drop(call.await.expect("answered")) }
            })
            .await;
        }
    }

    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("socket");
    let _server = serve_unix(&path, service).expect("a socket");
    let client = Arc::new(UnixClient::new(&path));
    for (name, request, bytes) in calls() {
        for lanes in [1, 16] {
            measure(&format!("unix {name}"), lanes, bytes, || {
                let (client, request) = (client.clone(), request.clone());
                async move {
                    let reply = client.call(request, LIMIT, WhenAbsent::Fail).await;
                    drop(reply.expect("answered"));
                }
            })
            .await;
        }
    }
    handshakes().await;
}

/// A step is a node that starts, makes one connection and one call, and stops.
async fn handshakes() {
    let server = TcpTransport::start(config(1)).await.expect("loopback");
    server.serve(Arc::new(Blocks(Bytes::new())));
    let to = server.local();
    measure("tcp connection and first call", 1, 0, || async move {
        let client = TcpTransport::start(config(2)).await.expect("loopback");
        drop(client.call(to, Request::default(), LIMIT).await.expect("answered"));
        client.shutdown().await;
    })
    .await;
}
