//! Serves a file system in memory over NFS, on a port of this machine alone:
//!
//! ```text
//! cargo run -p atoll-gateway --example memory_nfs -- 20049
//! mount -t nfs -o vers=3,proto=tcp,mountproto=tcp,port=20049,mountport=20049,nolock 127.0.0.1:/ MNT
//! ```

// Tasks and connections of a front end belong to the machine it runs on.
#![allow(clippy::disallowed_methods)]

use std::sync::Arc;

use atoll_env::TokioRuntime;
use atoll_gateway::nfs::{Export, HandleKey, LIMIT, Options, Service, Squash, serve};
use atoll_vfs::memory::MemoryFs;
use tokio::net::TcpListener;
use tokio::sync::watch;

#[tokio::main]
async fn main() -> std::io::Result<()> {
    let port = std::env::args().nth(1).and_then(|port| port.parse().ok()).unwrap_or(20049);
    let service = Service::new(Options { key: HandleKey::new([0; 32]), verifier: 1, limit: LIMIT });
    let fs = Arc::new(MemoryFs::new(Arc::new(TokioRuntime::current())));
    service.add(Export { squash: Squash::None, ..Export::local("/", 1, fs) });
    let listener = TcpListener::bind(("127.0.0.1", port)).await?;
    println!("serving on {}", listener.local_addr()?);
    let (end, ended) = watch::channel(false);
    tokio::spawn(async move {
        let _ = tokio::signal::ctrl_c().await;
        end.send_replace(true);
    });
    serve(service, listener, ended).await
}
