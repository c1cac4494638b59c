//! Connections: records in, replies out.
//!
//! Calls of a connection run side by side, at most [`MAX_CALLS`] at a time until their replies are sent, and are answered in the order in which they are done. What a client
//! makes a server keep is bounded: connections, calls of each, the longest record. A connection from a machine for which nothing is
//! exported is closed.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, Bytes};
use futures_util::poll;
use rustix::net::sockopt;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, Semaphore, watch};
use tokio::task::JoinSet;

use super::dispatch::is_long;
use super::nfs3::MAX_DATA_BYTES;
use super::replies::Pieces;
use super::rpc::{Call, Records, record_mark};
use super::service::Service;

/// Connections at a time. A client has one, or up to 16 (`nconnect`).
const MAX_CONNECTIONS: usize = 512;
/// Connections of one machine at a time: some mounts of 16 each.
const MAX_CONNECTIONS_OF_A_MACHINE: u64 = 128;
/// When a client that says nothing is asked whether it is there, and how often and how many times again: one that is switched off
/// says no end.
const KEEP_ALIVE: (Duration, Duration, u32) = (Duration::from_secs(60), Duration::from_secs(20), 3);
/// Calls of a connection at a time; further ones are not read. Linux has 64 or more under way.
const MAX_CALLS: usize = 64;
/// Longest call: a WRITE and what stands before its data.
const MAX_RECORD_BYTES: usize = MAX_DATA_BYTES + (16 << 10);
/// How long connections may take to end: a client that takes no replies keeps no server. A change that is not made by then
/// goes on, and is not answered.
const END_LIMIT: Duration = Duration::from_secs(15);
/// How often idle files are closed.
const SWEEP: Duration = Duration::from_millis(500);

/// Serves connections until `end` says true; then lets calls under way end, and closes all files.
///
/// # Errors
/// If no connection can be accepted any more.
pub async fn serve(
    service: Arc<Service>,
    listener: TcpListener,
    mut end: watch::Receiver<bool>,
) -> io::Result<()> {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut connections = JoinSet::new();
    let mut sweep = tokio::time::interval(SWEEP);
    let ending = end.clone();
    let ended = loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, client)) => {
                    let is_admitted = service.exports().iter().any(|export| export.admits_machine(client.ip()));
                    let Some(place) = places.clone().try_acquire_owned().ok().filter(|_| is_admitted) else {
                        tracing::debug!(%client, "a connection was refused");
                        continue;
                    };
                    let (service, end) = (service.clone(), ending.clone());
                    connections.spawn(async move {
                        if let Err(error) = connection(service, stream, client, end).await {
                            tracing::debug!(%client, %error, "a connection ended");
                        }
                        drop(place);
                    });
                }
                // The process has no descriptors left, or the client is gone again.
                Err(error) if is_passing(&error) => tokio::time::sleep(SWEEP).await,
                Err(error) => break Err(error),
            },
            _ = sweep.tick() => {
                service.close_idle(false);
                service.drop_invalidations();
            }
            Some(_) = connections.join_next() => {}
            () = told(&mut end) => break Ok(()),
        }
    };
    let all = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(END_LIMIT, all).await.is_err() {
        tracing::warn!("connections with calls under way were cut off");
        connections.shutdown().await;
    }
    service.close_idle(true);
    ended
}

/// Waits until the server is told to end, or nobody could tell it any more.
pub(super) async fn told(end: &mut watch::Receiver<bool>) {
    let _ = end.wait_for(|end| *end).await;
}

fn is_passing(error: &io::Error) -> bool {
    const EMFILE: i32 = 24;
    const ENFILE: i32 = 23;
    matches!(error.raw_os_error(), Some(EMFILE | ENFILE))
        || matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset)
}

async fn connection(
    service: Arc<Service>,
    stream: TcpStream,
    client: SocketAddr,
    mut end: watch::Receiver<bool>,
) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let (idle, interval, probes) = KEEP_ALIVE;
    sockopt::set_socket_keepalive(&stream, true)?;
    sockopt::set_tcp_keepidle(&stream, idle)?;
    sockopt::set_tcp_keepintvl(&stream, interval)?;
    sockopt::set_tcp_keepcnt(&stream, probes)?;
    // Also while replies are on their way to it.
    let all = u32::try_from((idle + interval * probes).as_millis()).expect("two minutes");
    sockopt::set_tcp_user_timeout(&stream, all)?;
    let machine = service.clients.connect(client.ip());
    if machine.connections() > MAX_CONNECTIONS_OF_A_MACHINE {
        return Err(io::Error::other("the machine has too many connections"));
    }
    let (read, write) = stream.into_split();
    let mut records = Records::new(read, MAX_RECORD_BYTES);
    let write = Arc::new(Mutex::new(write));
    let calls = Arc::new(Semaphore::new(MAX_CALLS));
    let outcome = loop {
        let Ok(place) = calls.clone().acquire_owned().await else { break Ok(()) };
        let record = tokio::select! {
            record = records.next() => record,
            () = told(&mut end) => break Ok(()),
        };
        let record = match record {
            Ok(Some(record)) => record,
            Ok(None) => break Ok(()),
            Err(error) => break Err(error),
        };
        let call = match Call::read(record) {
            Ok(call) => call,
            Err(_) => {
                break Err(io::Error::new(io::ErrorKind::InvalidData, "what came is no call"));
            }
        };
        if call.is_ok() {
            machine.note_call();
        }
        let is_alone = records.is_at_end() && !call.as_ref().is_ok_and(is_long);
        let (service, write) = (service.clone(), write.clone());
        let mut answering = Box::pin(async move {
            let reply = match call {
                Ok(call) => service.answer(client, call).await,
                Err((xid, refusal)) => Some(refusal.reply(xid).into_pieces()),
            };
            if let Some(pieces) = reply {
                // If this fails, so does reading.
                let _ = write.lock().await.write_all_buf(&mut Record::new(pieces)).await;
            }
            drop(place);
        });
        // A call that nothing stands behind is answered here if that can be done at once: another task is another thread, which
        // would have to be woken. All others run side by side.
        if !is_alone || poll!(&mut answering).is_pending() {
            tokio::spawn(answering);
        }
    };
    // Replies of calls under way are sent, as long as the client takes them.
    let _all = calls.acquire_many(u32::try_from(MAX_CALLS).expect("a few")).await;
    let ended = write.lock().await.shutdown().await;
    outcome.and(ended)
}

/// A reply as it goes out: its mark and its pieces.
struct Record(VecDeque<Bytes>);

impl Record {
    fn new(pieces: Pieces) -> Record {
        let len = pieces.iter().map(Bytes::len).sum();
        let mut record = VecDeque::from(pieces);
        record.push_front(Bytes::copy_from_slice(&record_mark(len)));
        record.retain(|piece| !piece.is_empty());
        Record(record)
    }
}

impl Buf for Record {
    fn remaining(&self) -> usize {
        self.0.iter().map(Bytes::len).sum()
    }

    fn chunk(&self) -> &[u8] {
        self.0.front().map_or(&[], |piece| piece)
    }

    fn chunks_vectored<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        let filled = slices.iter_mut().zip(&self.0);
        filled.map(|(slice, piece)| *slice = IoSlice::new(piece)).count()
    }

    fn advance(&mut self, mut count: usize) {
        while let Some(first) = self.0.front_mut() {
            if count < first.len() {
                first.advance(count);
                return;
            }
            count -= first.len();
            self.0.pop_front();
        }
    }
}
