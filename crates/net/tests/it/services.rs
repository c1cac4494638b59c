//! Services and nodes for the tests.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use atoll_env::BoxFuture;
use atoll_key::SecretKey;
use atoll_net::{
    NetworkAuth, Peer, Refusal, Reply, Request, Service, TcpConfig, TcpTransport, Transport,
};
use bytes::Bytes;

/// Long enough for anything on a busy machine.
pub(crate) const LONG: Duration = Duration::from_secs(30);

/// Answers with what it got.
pub(crate) struct Echo;

impl Service for Echo {
    fn handle(&self, _from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        Box::pin(async move { Ok(Reply { header: request.header, parts: request.parts }) })
    }
}

/// Never answers; counts requests that began and futures that were dropped.
#[derive(Default, Clone)]
pub(crate) struct Never {
    pub begun: Arc<AtomicUsize>,
    pub dropped: Arc<AtomicUsize>,
}

struct CountDrop(Arc<AtomicUsize>);

impl Drop for CountDrop {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl Service for Never {
    fn handle(&self, _from: Peer, _request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        self.begun.fetch_add(1, Ordering::SeqCst);
        let dropped = CountDrop(self.dropped.clone());
        Box::pin(async move {
            let _dropped = dropped;
            std::future::pending().await
        })
    }
}

/// Answers by a closure.
pub(crate) struct By<F>(pub F);

impl<F> Service for By<F>
where
    F: Fn(Peer, Request) -> Result<Reply, Refusal> + Send + Sync + 'static,
{
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let result = (self.0)(from, request);
        Box::pin(async move { result })
    }
}

pub(crate) fn key(number: u8) -> SecretKey {
    SecretKey::from_seed(&[number; 32])
}

pub(crate) const SECRET: [u8; 32] = [42; 32];

pub(crate) fn network() -> NetworkAuth {
    NetworkAuth::new(Arc::new(SECRET), Bytes::from_static(b"profile one"))
}

pub(crate) fn config(number: u8) -> TcpConfig {
    TcpConfig::new(key(number), network(), SocketAddr::from(([127, 0, 0, 1], 0)))
}

pub(crate) async fn node(number: u8, service: impl Service) -> Arc<TcpTransport> {
    let node = TcpTransport::start(config(number)).await.expect("loopback has free ports");
    node.serve(Arc::new(service));
    node
}

pub(crate) fn request(header: &'static [u8]) -> Request {
    Request { method: 0x0101, header: Bytes::from_static(header), parts: vec![] }
}

pub(crate) fn bulk(bytes: usize) -> Request {
    Request { method: 0x0102, header: Bytes::new(), parts: vec![Bytes::from(vec![7; bytes])] }
}

/// Waits until `condition` holds; the test's own deadline is the only limit.
pub(crate) async fn until(what: &str, condition: impl Fn() -> bool) {
    let wait = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(LONG, wait).await.unwrap_or_else(|_| panic!("never: {what}"));
}
