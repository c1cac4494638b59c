//! The port mapper (RFC 1833, section 3: version 2), for clients that are told no port: Windows', and `mount HOST:/EXPORT` without
//! options.
//!
//! It answers for the two programs of one gateway and nothing else, over TCP and UDP, to the machines that an export is for. A port is
//! told for TCP alone. Nothing can be registered.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::{Semaphore, watch};

use super::nfs3::{MOUNT, NFS};
use super::rpc::{Call, Records, Refusal, accepted, record_mark};
use super::server::told;
use super::service::Service;
use super::xdr::{Writer, xdr_struct};

/// The port that clients ask.
pub const PORT: u16 = 111;

const PROGRAM: (u32, u32) = (100_000, 2);
const NULL: u32 = 0;
const GET_PORT: u32 = 3;
const DUMP: u32 = 4;
const TCP: u32 = 6;

/// Longest question.
const MAX_BYTES: usize = 1024;
/// Connections at a time; each is for one or two questions.
const MAX_CONNECTIONS: usize = 64;
/// How long a connection may stay.
const LIMIT: Duration = Duration::from_secs(10);
/// After a socket has failed.
const PAUSE: Duration = Duration::from_millis(500);

xdr_struct! {
    /// A program and where it is.
    Mapping {
        /// Its number.
        program: u32,
        /// Its version.
        version: u32,
        /// Number of the transport's protocol.
        protocol: u32,
        /// The port.
        port: u32,
    }
}

/// What is told of a gateway on this port.
fn mappings(port: u16) -> [Mapping; 2] {
    [NFS, MOUNT].map(|(program, version)| Mapping {
        program,
        version,
        protocol: TCP,
        port: port.into(),
    })
}

fn answer(record: Bytes, port: u16) -> Option<Writer> {
    let call = match Call::read(record) {
        Ok(Ok(call)) => call,
        Ok(Err((xid, refusal))) => return Some(refusal.reply(xid)),
        Err(_) => return None,
    };
    let refused = |refusal: Refusal| Some(refusal.reply(call.xid));
    if call.program.0 != PROGRAM.0 {
        return refused(Refusal::Program);
    }
    if call.program.1 != PROGRAM.1 {
        return refused(Refusal::Version(PROGRAM.1, PROGRAM.1));
    }
    let mut reply = accepted(call.xid);
    match call.procedure {
        NULL => {}
        GET_PORT => {
            let mut from = call.arguments;
            let Ok(asked) = from.take::<Mapping>() else {
                return Some(Refusal::Arguments.reply(call.xid));
            };
            let key = |of: &Mapping| (of.program, of.version, of.protocol);
            let found = mappings(port).into_iter().find(|mapping| key(mapping) == key(&asked));
            reply.put(&found.map_or(0, |found| found.port));
        }
        DUMP => {
            for mapping in mappings(port) {
                reply.put(&true).put(&mapping);
            }
            reply.put(&false);
        }
        _ => return refused(Refusal::Procedure),
    }
    Some(reply)
}

/// Answers for the gateway on `port` until `end` says true.
pub async fn serve_port_mapper(
    service: Arc<Service>,
    (tcp, udp): (TcpListener, UdpSocket),
    port: u16,
    mut end: watch::Receiver<bool>,
) {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut datagram = [0; MAX_BYTES];
    let admits = |client: SocketAddr| {
        service.exports().iter().any(|export| export.admits_machine(client.ip()))
    };
    loop {
        tokio::select! {
            received = udp.recv_from(&mut datagram) => match received {
                Ok((len, client)) if admits(client) => {
                    let reply = answer(Bytes::copy_from_slice(&datagram[..len]), port);
                    if let Some(reply) = reply {
                        let _ = udp.send_to(&reply.into_bytes(), client).await;
                    }
                }
                Ok(_) => {}
                Err(_) => tokio::time::sleep(PAUSE).await,
            },
            accepted = tcp.accept() => match accepted {
                Ok((stream, client)) if admits(client) => {
                    let Ok(place) = places.clone().try_acquire_owned() else { continue };
                    tokio::spawn(async move {
                        let _ = tokio::time::timeout(LIMIT, connection(stream, port)).await;
                        drop(place);
                    });
                }
                Ok(_) => {}
                Err(_) => tokio::time::sleep(PAUSE).await,
            },
            () = told(&mut end) => return,
        }
    }
}

async fn connection(stream: TcpStream, port: u16) -> io::Result<()> {
    let (read, mut write) = stream.into_split();
    let mut records = Records::new(read, MAX_BYTES);
    while let Some(record) = records.next().await? {
        let Some(reply) = answer(record, port) else { return Ok(()) };
        let reply = reply.into_bytes();
        write.write_all(&[&record_mark(reply.len()), &reply[..]].concat()).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::xdr::Reader;
    use super::*;

    /// The words of the reply to a call of version `version`.
    fn ask(program: (u32, u32), procedure: u32, arguments: &[u32]) -> Vec<u32> {
        let mut call = Writer::default();
        [7, 0, 2, program.0, program.1, procedure, 0, 0, 0, 0].iter().chain(arguments).for_each(
            |word| {
                call.put(word);
            },
        );
        let mut reply = Reader::new(answer(call.into_bytes(), 2049).expect("a reply").into_bytes());
        std::iter::from_fn(|| reply.take().ok()).collect()
    }

    #[test]
    fn ports_are_told_of_its_programs_over_tcp() {
        let done = [7, 1, 0, 0, 0, 0];
        let port = |program, version, protocol| {
            let told = ask(PROGRAM, GET_PORT, &[program, version, protocol, 0]);
            assert_eq!(told[..6], done);
            told[6]
        };
        assert_eq!(port(100_003, 3, 6), 2049);
        assert_eq!(port(100_005, 3, 6), 2049);
        for (program, version, protocol) in [(100_003, 3, 17), (100_003, 4, 6), (100_021, 4, 6)] {
            assert_eq!(port(program, version, protocol), 0, "nothing is there");
        }
        assert_eq!(ask(PROGRAM, NULL, &[]), done);
        assert_eq!(
            ask(PROGRAM, DUMP, &[])[6..],
            [1, 100_003, 3, 6, 2049, 1, 100_005, 3, 6, 2049, 0]
        );
    }

    #[test]
    fn what_it_is_not_asked_for_is_refused() {
        assert_eq!(ask(PROGRAM, 1, &[])[5], 3, "nothing can be registered");
        assert_eq!(ask((100_000, 4), NULL, &[])[5..], [2, 2, 2], "the versions there are");
        assert_eq!(ask((100_003, 3), NULL, &[])[5], 1);
        assert_eq!(ask(PROGRAM, GET_PORT, &[1])[5], 4);
        assert!(answer(Bytes::from_static(b"x"), 1).is_none());
    }
}
