//! Connections: what strangers send, and how a server ends.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use atoll_env::TokioRuntime;
use atoll_gateway::nfs::{Service, nfs3, rpc, serve as serve_connections};
use atoll_vfs::memory::MemoryFs;
use atoll_vfs::{FileSystem, InodeNumber, Invalidation};
use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::files::failing;
use super::{Client, ROOT, at, memory, serve};

pub(super) struct Server {
    pub(super) address: std::net::SocketAddr,
    end: watch::Sender<bool>,
    task: tokio::task::JoinHandle<std::io::Result<()>>,
}

pub(super) async fn start(service: &Arc<Service>) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (end, ended) = watch::channel(false);
    let task = tokio::spawn(serve_connections(service.clone(), listener, ended));
    Server { address, end, task }
}

async fn send(stream: &mut TcpStream, record: &[u8]) {
    stream.write_all(&rpc::record_mark(record.len())).await.unwrap();
    stream.write_all(record).await.unwrap();
}

async fn receive(stream: &mut TcpStream) -> Bytes {
    let mut mark = [0; 4];
    stream.read_exact(&mut mark).await.unwrap();
    let mut record = vec![0; (u32::from_be_bytes(mark) & 0x7fff_ffff) as usize];
    stream.read_exact(&mut record).await.unwrap();
    record.into()
}

/// Whether the server has closed the connection.
async fn is_closed(mut stream: TcpStream) -> bool {
    !matches!(stream.read(&mut [0; 64]).await, Ok(1..))
}

#[tokio::test]
async fn what_is_no_call_ends_its_connection_and_no_other() {
    let service = serve(memory());
    let client = Client::new(&service, ROOT);
    let server = start(&service).await;
    let mut good = TcpStream::connect(server.address).await.unwrap();
    for bytes in [
        &[0xff; 4][..],               // A record of 2 GiB.
        &[0x80, 0, 0, 4, 1, 2, 3, 4], // No call.
        &[0; 4 * 100],                // Fragments without end.
        b"GET / HTTP/1.1\r\n\r\n",
    ] {
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        assert!(is_closed(stream).await, "{bytes:?}");
        let null = client.record(1, nfs3::NFS, 0, &());
        send(&mut good, &null).await;
        assert_eq!(receive(&mut good).await.len(), 24);
    }
    server.end.send_replace(true);
    server.task.await.unwrap().unwrap();
}

#[tokio::test]
async fn programs_and_procedures_that_are_not_there_are_told() {
    let service = serve(memory());
    let client = Client::new(&service, ROOT);
    let server = start(&service).await;
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    for (program, procedure, accepted) in
        [((100_000, 2), 0, 1), ((100_003, 4), 0, 2), ((100_003, 3), 22, 3), ((100_005, 3), 6, 3)]
    {
        send(&mut stream, &client.record(5, program, procedure, &())).await;
        let reply = receive(&mut stream).await;
        assert_eq!(reply[20..24], u32::to_be_bytes(accepted), "{program:?} {procedure}");
    }
    // Arguments that cannot be read, or with more after them.
    for arguments in [7u64, u64::MAX] {
        send(&mut stream, &client.record(5, nfs3::NFS, 1, &arguments)).await;
        assert_eq!(receive(&mut stream).await[20..24], [0, 0, 0, 4]);
    }
    server.end.send_replace(true);
    server.task.await.unwrap().unwrap();
}

#[tokio::test]
async fn calls_are_answered_that_came_in_pieces_or_at_once() {
    let service = serve(memory());
    let client = Client::new(&service, ROOT);
    let server = start(&service).await;
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    let null = client.record(1, nfs3::NFS, 0, &());
    let (first, rest) = null.split_at(10);
    stream.write_all(&[0, 0, 0, 10]).await.unwrap();
    stream.write_all(first).await.unwrap();
    stream.flush().await.unwrap();
    stream.write_all(&rpc::record_mark(rest.len())).await.unwrap();
    stream.write_all(rest).await.unwrap();
    assert_eq!(receive(&mut stream).await.len(), 24);
    let many: Vec<u8> = (0..500u32)
        .flat_map(|xid| {
            let call = client.record(xid, nfs3::NFS, 0, &());
            [&rpc::record_mark(call.len())[..], &call].concat()
        })
        .collect();
    let (mut read, mut write) = stream.into_split();
    let sender = tokio::spawn(async move {
        write.write_all(&many).await.unwrap();
        write
    });
    let mut replies = vec![0; 500 * 28];
    read.read_exact(&mut replies).await.unwrap();
    drop(sender.await.unwrap());
    server.end.send_replace(true);
    server.task.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_client_that_takes_no_replies_keeps_no_server() {
    let service = serve(memory());
    let client = Client::new(&service, ROOT);
    let root = client.mount("/x").await.unwrap();
    let file = client.create(&root, "f", 0o644).await.unwrap();
    client.write(&file, 0, &vec![7; 1 << 20], nfs3::Stable::Unstable).await.unwrap();
    let server = start(&service).await;
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    for xid in 0..32 {
        let args = nfs3::ReadArgs { file: file.clone(), offset: 0, count: 1 << 20 };
        let read = client.record(xid, nfs3::NFS, nfs3::Procedure::Read as u32, &args);
        send(&mut stream, &read).await;
    }
    let served = || service.clients().iter().map(|machine| machine.calls).sum::<u64>();
    while served() < 32 {
        tokio::task::yield_now().await;
    }
    server.end.send_replace(true);
    server.task.await.unwrap().unwrap();
    drop(stream);
}

#[tokio::test]
async fn a_call_that_waits_holds_up_none_that_comes_after_it() {
    let fs = failing();
    let service = serve(fs.clone());
    let client = Client::new(&service, ROOT);
    let root = client.mount("/x").await.unwrap();
    let server = start(&service).await;
    fs.hangs.store(true, Ordering::SeqCst);
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    let lookup = nfs3::Procedure::Lookup as u32;
    for xid in (1..40).step_by(2) {
        send(&mut stream, &client.record(xid, nfs3::NFS, lookup, &at(&root, "name"))).await;
        send(&mut stream, &client.record(xid + 1, nfs3::NFS, 0, &())).await;
        assert_eq!(receive(&mut stream).await[..4], (xid + 1).to_be_bytes());
    }
    server.task.abort();
}

/// A file system with several front ends says in a queue what others have changed; the gateway keeps nothing that depends on it.
#[tokio::test(start_paused = true)]
async fn the_queue_of_others_changes_does_not_grow() {
    let fs = Arc::new(MemoryFs::new(Arc::new(TokioRuntime::current())));
    let server = start(&serve(fs.clone())).await;
    let queue = fs.invalidations().expect("it has others");
    queue.push(Invalidation::Attributes(InodeNumber::ROOT));
    tokio::time::sleep(std::time::Duration::from_secs(2)).await;
    assert_eq!(queue.try_next(), None);
    server.end.send_replace(true);
    server.task.await.unwrap().unwrap();
}
