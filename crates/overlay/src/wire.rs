//! Nodes, keys and routes as they stand in message headers, here and in the crates above.
//!
//! A node's ring position never travels: it is derived from the peer's key on receipt
//! (CFS §4.4), so that nobody can claim a position.

use std::time::Duration;

use atoll_key::{IdProfile, Key};
use atoll_net::header::{Capped, WirePeer};
use minicbor::decode::Error as DecodeError;
use minicbor::encode::{Error as EncodeError, Write};
use minicbor::{Decode, Decoder, Encode, Encoder};

use crate::{MAX_VIRTUAL_SERVERS, NextHop, Node, Route, VirtualServerId};

/// The most nodes in one message.
pub const MAX_NODES: usize = 256;
/// Marks a virtual server of the `address` profile in a [`WireNode`].
const ADDRESS_PROFILE: u16 = 1 << 15;

/// Nodes as they travel: a list of [`WireNode`]s.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct WireNodes(pub Vec<Node>);

impl<C> Encode<C> for WireNodes {
    fn encode<W: Write>(&self, e: &mut Encoder<W>, c: &mut C) -> Result<(), EncodeError<W::Error>> {
        let nodes = self.0.iter().map(|node| WireNode(*node)).collect();
        Capped::<WireNode, MAX_NODES>(nodes).encode(e, c)
    }
}

impl<'b, C> Decode<'b, C> for WireNodes {
    fn decode(d: &mut Decoder<'b>, c: &mut C) -> Result<WireNodes, DecodeError> {
        let Capped(nodes) = Capped::<WireNode, MAX_NODES>::decode(d, c)?;
        Ok(WireNodes(nodes.into_iter().map(|node| node.0).collect()))
    }
}

/// One node as it travels: the byte string of a [`WirePeer`], followed by two bytes for
/// its virtual server unless that is virtual server 0 of the `identity` profile: the virtual index,
/// with the highest bit set in the `address` profile.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WireNode(pub Node);

impl<C> Encode<C> for WireNode {
    fn encode<W: Write>(&self, e: &mut Encoder<W>, _: &mut C) -> Result<(), EncodeError<W::Error>> {
        let mut bytes = WirePeer(self.0.peer).to_bytes();
        let VirtualServerId { profile, index } = self.0.virtual_server;
        if self.0.virtual_server != VirtualServerId::default() {
            let mark = if profile == IdProfile::Address { ADDRESS_PROFILE } else { 0 };
            bytes.extend_from_slice(&(index | mark).to_be_bytes());
        }
        e.bytes(&bytes)?.ok()
    }
}

impl<'b, C> Decode<'b, C> for WireNode {
    fn decode(d: &mut Decoder<'b>, _: &mut C) -> Result<WireNode, DecodeError> {
        node_from_bytes(d.bytes()?).map(WireNode).ok_or_else(|| DecodeError::message("not a node"))
    }
}

fn node_from_bytes(bytes: &[u8]) -> Option<Node> {
    if let Some(peer) = WirePeer::from_bytes(bytes) {
        return Some(Node::of(peer.0));
    }
    let (peer, mark) = bytes.split_last_chunk::<2>()?;
    let mark = u16::from_be_bytes(*mark);
    let profile =
        if mark & ADDRESS_PROFILE == 0 { IdProfile::Identity } else { IdProfile::Address };
    let index = mark & !ADDRESS_PROFILE;
    let peer = WirePeer::from_bytes(peer)?.0;
    (index < MAX_VIRTUAL_SERVERS).then(|| Node::at(peer, VirtualServerId { profile, index }))
}

/// A key as it travels: 64 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WireKey(pub Key);

impl<C> Encode<C> for WireKey {
    fn encode<W: Write>(&self, e: &mut Encoder<W>, _: &mut C) -> Result<(), EncodeError<W::Error>> {
        e.bytes(&self.0.0)?;
        Ok(())
    }
}

impl<'b, C> Decode<'b, C> for WireKey {
    fn decode(d: &mut Decoder<'b>, _: &mut C) -> Result<WireKey, DecodeError> {
        let key = Key::from_slice(d.bytes()?);
        key.map(WireKey).ok_or_else(|| DecodeError::message("a key is not 64 bytes"))
    }
}

/// A [`Route`] as it travels: `[kind, nodes, latencies]`, kind 1 `Root`, 2 `Closer`,
/// 3 `NotRoot`, 4 `Nowhere`. Latencies go with `Closer` only: one number a node, in units of
/// 0.1 ms, 0 for unknown. Other crates embed it in their own messages.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WireRoute(pub Route);

const LATENCY_UNIT_MICROS: u128 = 100;

fn latency_to_wire(latency: Option<Duration>) -> u32 {
    let units = latency.map_or(0, |l| (l.as_micros() / LATENCY_UNIT_MICROS).max(1));
    u32::try_from(units).unwrap_or(u32::MAX)
}

fn latency_from_wire(units: u32) -> Option<Duration> {
    let micros = u64::from(units) * LATENCY_UNIT_MICROS as u64;
    (units > 0).then(|| Duration::from_micros(micros))
}

impl<C> Encode<C> for WireRoute {
    fn encode<W: Write>(&self, e: &mut Encoder<W>, c: &mut C) -> Result<(), EncodeError<W::Error>> {
        let mut latencies = Vec::new();
        let (kind, nodes) = match &self.0 {
            Route::Root(nodes) => (1, nodes.clone()),
            Route::Closer(hops) => {
                latencies.extend(hops.iter().map(|hop| latency_to_wire(hop.latency)));
                (2, hops.iter().map(|hop| hop.node).collect())
            }
            Route::NotRoot(node) => (3, vec![*node]),
            Route::Nowhere => (4, Vec::new()),
        };
        let measured = latencies.iter().any(|units| *units > 0);
        e.array(if measured { 3 } else { 2 })?.u8(kind)?;
        WireNodes(nodes).encode(e, c)?;
        if measured {
            Capped::<u32, MAX_NODES>(latencies).encode(e, c)?;
        }
        Ok(())
    }
}

impl<'b, C> Decode<'b, C> for WireRoute {
    fn decode(d: &mut Decoder<'b>, c: &mut C) -> Result<WireRoute, DecodeError> {
        let fields = d.array()?.ok_or_else(|| DecodeError::message("a route without a count"))?;
        if fields < 2 {
            return Err(DecodeError::message("a route lacks its kind or nodes"));
        }
        let kind = d.u8()?;
        let mut nodes = WireNodes::decode(d, c)?.0;
        let mut latencies = Vec::new();
        if fields > 2 {
            latencies = Capped::<u32, MAX_NODES>::decode(d, c)?.0;
        }
        for _ in 3..fields {
            d.skip()?;
        }
        let route = match (kind, nodes.len()) {
            (1, 1..) => Route::Root(nodes),
            (2, 1..) => {
                let told = latencies.into_iter().chain(std::iter::repeat(0));
                let next_hop = |(node, units)| NextHop { node, latency: latency_from_wire(units) };
                Route::Closer(nodes.into_iter().zip(told).map(next_hop).collect())
            }
            (3, 1) => Route::NotRoot(nodes.remove(0)),
            (4, 0) => Route::Nowhere,
            _ => return Err(DecodeError::message("a route of no known kind")),
        };
        Ok(WireRoute(route))
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};

    use atoll_key::PeerId;
    use atoll_net::Peer;
    use atoll_net::header::{from_header, to_header};

    use super::*;

    fn node(n: u8) -> Node {
        let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, 4000));
        Node::of(Peer { id: PeerId([n; 32]), addr })
    }

    #[test]
    fn latencies_survive_the_wire_to_a_tenth_of_a_millisecond() {
        let next_hop = |n, micros: Option<u64>| {
            let latency = micros.map(Duration::from_micros);
            NextHop { node: node(n), latency }
        };
        let sent = vec![next_hop(1, Some(1_250)), next_hop(2, None), next_hop(3, Some(3))];
        let bytes = to_header(&WireRoute(Route::Closer(sent)));
        let received = from_header::<WireRoute>(&bytes).expect("well-formed").0;
        // What is measured at all is not unknown.
        let expected = vec![next_hop(1, Some(1_200)), next_hop(2, None), next_hop(3, Some(100))];
        assert_eq!(received, Route::Closer(expected));
    }

    #[test]
    fn latencies_too_many_too_few_or_too_long_break_nothing() {
        for (latencies, first) in [(vec![], None), (vec![u32::MAX; 40], Some(u32::MAX))] {
            let mut e = Encoder::new(Vec::new());
            e.array(3).and_then(|e| e.u8(2)).expect("memory");
            WireNodes(vec![node(1), node(2)]).encode(&mut e, &mut ()).expect("memory");
            Capped::<u32, MAX_NODES>(latencies).encode(&mut e, &mut ()).expect("memory");
            let route = from_header::<WireRoute>(&e.into_writer()).expect("well-formed").0;
            let Route::Closer(hops) = route else { panic!("{route:?}") };
            assert_eq!(hops.len(), 2);
            assert_eq!(hops[0].latency, first.and_then(latency_from_wire));
        }
        let many = vec![1; MAX_NODES + 1];
        let mut e = Encoder::new(Vec::new());
        e.array(3).and_then(|e| e.u8(2)).expect("memory");
        WireNodes(vec![node(1)]).encode(&mut e, &mut ()).expect("memory");
        minicbor::Encode::<()>::encode(&many, &mut e, &mut ()).expect("memory");
        assert!(from_header::<WireRoute>(&e.into_writer()).is_err());
    }
}
