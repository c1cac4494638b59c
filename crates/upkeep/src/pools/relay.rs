//! Calls of a pool's file system (`atoll_pool::remote`) by processes of this machine: a mount and a server of files hand them to their
//! node over its control socket, and the node calls whoever is the primary of the group that is meant, or is it.
//!
//! | bytes of a request | |
//! |---|---|
//! | 16 | the pool |
//! | 1 | the group |
//! | 2 | method, big-endian |
//! | 4 | limit, milliseconds |
//! | 4 | length of the header |
//! | | the header, and the bytes beside it |
//!
//! A reply begins with a byte: 0, then the length of the header (4 bytes), the header, and the bytes beside it; 1, a refusal: its code (2
//! bytes) and text; 2, the primary cannot be reached: why; 3, no answer in time.

use std::sync::Arc;
use std::time::Duration;

use atoll_env::BoxFuture;
use atoll_net::{CallError, Refusal, Reply, Request};
use atoll_node::{Client, ClientError};
use atoll_pool::remote::Route;
use atoll_pool::{GroupNumber, PoolId};
use bytes::{Buf, Bytes};

use super::{Pools, call};

/// A call does not take longer.
const MAX_LIMIT: Duration = Duration::from_secs(120);

/// A way to the primary of a group of a pool through the local node.
#[derive(Clone)]
pub struct NodeRoute {
    client: Arc<Client>,
    pool: PoolId,
    group: GroupNumber,
}

impl NodeRoute {
    /// A route to the primary of the first group of `pool`, to which the node belongs.
    pub fn new(client: Arc<Client>, pool: PoolId) -> NodeRoute {
        NodeRoute { client, pool, group: GroupNumber::FIRST }
    }

    /// A route to another group.
    pub fn to(&self, group: GroupNumber) -> NodeRoute {
        NodeRoute { group, ..self.clone() }
    }
}

impl Route for NodeRoute {
    fn call(
        &self,
        request: Request,
        limit: Duration,
    ) -> BoxFuture<'static, Result<Reply, CallError>> {
        let bytes = to_bytes((&self.pool, self.group), &request, limit);
        let client = self.client.clone();
        Box::pin(async move {
            match client.outside_call(call::RELAY, bytes).await {
                Ok(reply) => read_answer(reply),
                Err(ClientError::Subsystem(why)) => {
                    Err(CallError::Refused(Refusal::new(Refusal::OVERLOADED, why)))
                }
                Err(error) => Err(CallError::Unreachable(error.to_string())),
            }
        })
    }
}

fn to_bytes((pool, group): (&PoolId, GroupNumber), request: &Request, limit: Duration) -> Bytes {
    let limit = u32::try_from(limit.as_millis()).unwrap_or(u32::MAX);
    let mut bytes = pool.to_vec();
    bytes.push(group.number());
    bytes.extend(request.method.to_be_bytes());
    bytes.extend(limit.to_be_bytes());
    put(&mut bytes, &request.header, &request.parts);
    bytes.into()
}

fn put(bytes: &mut Vec<u8>, header: &[u8], parts: &[Bytes]) {
    bytes.extend((header.len() as u32).to_be_bytes());
    bytes.extend_from_slice(header);
    for part in parts {
        bytes.extend_from_slice(part);
    }
}

/// A header, and the bytes beside it.
fn take(mut bytes: Bytes) -> Option<(Bytes, Vec<Bytes>)> {
    let len = bytes.try_get_u32().ok()? as usize;
    if len > bytes.len() {
        return None;
    }
    let header = bytes.split_to(len);
    let parts = if bytes.is_empty() { Vec::new() } else { vec![bytes] };
    Some((header, parts))
}

fn read_request(mut bytes: Bytes) -> Option<((PoolId, GroupNumber), Request, Duration)> {
    let pool = *bytes.first_chunk()?;
    bytes.advance(16);
    let group = GroupNumber::new(bytes.try_get_u8().ok()?)?;
    let method = bytes.try_get_u16().ok()?;
    let limit = Duration::from_millis(bytes.try_get_u32().ok()?.into());
    let (header, parts) = take(bytes)?;
    Some(((pool, group), Request { method, header, parts }, limit.min(MAX_LIMIT)))
}

fn read_answer(mut bytes: Bytes) -> Result<Reply, CallError> {
    let unreadable = || CallError::Unreachable("the node's answer cannot be read".into());
    match bytes.try_get_u8() {
        Ok(0) => {
            let (header, parts) = take(bytes).ok_or_else(unreadable)?;
            Ok(Reply { header, parts })
        }
        Ok(1) => {
            let code = bytes.try_get_u16().map_err(|_| unreadable())?;
            let text = String::from_utf8_lossy(&bytes).into_owned();
            Err(CallError::Refused(Refusal::new(code, text)))
        }
        Ok(2) => Err(CallError::Unreachable(String::from_utf8_lossy(&bytes).into_owned())),
        Ok(3) => Err(CallError::TimedOut),
        _ => Err(unreadable()),
    }
}

fn to_answer(answer: Result<Reply, CallError>) -> Bytes {
    let mut bytes = Vec::new();
    match answer {
        Ok(Reply { header, parts }) => {
            bytes.push(0);
            put(&mut bytes, &header, &parts);
        }
        Err(CallError::Refused(Refusal { code, text })) => {
            bytes.push(1);
            bytes.extend(code.to_be_bytes());
            bytes.extend(text.as_bytes());
        }
        Err(CallError::Unreachable(why)) => {
            bytes.push(2);
            bytes.extend(why.as_bytes());
        }
        Err(CallError::TimedOut) => bytes.push(3),
        Err(CallError::TooLarge) => {
            bytes.push(1);
            bytes.extend(Refusal::MALFORMED.to_be_bytes());
            bytes.extend(b"the message is too long");
        }
    }
    bytes.into()
}

/// Hands a call on.
pub(super) async fn answer(pools: &Pools, request: Bytes) -> Result<Bytes, String> {
    let ((pool, group), request, limit) = read_request(request).ok_or("the call cannot be read")?;
    let machine = pools.served(&pool).ok_or("this node does not serve that pool now")?;
    Ok(to_answer(machine.call(group, request, limit).await))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_answers_read_back_and_parts_of_them_do_not() {
        let request = Request {
            method: 0x0540,
            header: Bytes::from_static(b"header"),
            parts: vec![Bytes::from_static(b"bytes")],
        };
        let limit = Duration::from_millis(1234);
        let place = ([7; 16], GroupNumber::new(3).unwrap());
        let bytes = to_bytes((&place.0, place.1), &request, limit);
        assert_eq!(read_request(bytes.clone()), Some((place, request.clone(), limit)));
        for len in 0..33 {
            assert_eq!(read_request(bytes.slice(..len)), None, "{len}");
        }
        let reply = Reply { header: request.header, parts: request.parts };
        let refusal = CallError::Refused(Refusal::new(7, "no"));
        let unreachable = CallError::Unreachable("gone".into());
        for answer in [Ok(reply), Err(refusal), Err(unreachable), Err(CallError::TimedOut)] {
            assert_eq!(read_answer(to_answer(answer.clone())), answer);
        }
        assert!(read_answer(Bytes::new()).is_err());
        assert!(read_answer(Bytes::from_static(&[0, 0xff, 0, 0, 0])).is_err());
    }
}
