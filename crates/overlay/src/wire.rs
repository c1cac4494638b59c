//! Nodes, keys and routes as they stand in message headers, here and in the crates above.
//!
//! A node's ring position never travels: it is derived from the peer's key on receipt
//! (CFS §4.4), so that no node can claim a position.

use atoll_key::{IdProfile, Key};
use atoll_net::header::{Capped, WirePeer};
use minicbor::decode::Error as DecodeError;
use minicbor::encode::{Error as EncodeError, Write};
use minicbor::{Decode, Decoder, Encode, Encoder};

use crate::{MAX_VIRTUAL_SERVERS, Node, Route, VirtualServerId};

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

/// A [`Route`] as it travels: `[kind, nodes]`, kind 1 `Root`, 2 `Closer`, 3 `Back`,
/// 4 `Nowhere`. Other crates embed it in their own messages.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WireRoute(pub Route);

impl<C> Encode<C> for WireRoute {
    fn encode<W: Write>(&self, e: &mut Encoder<W>, c: &mut C) -> Result<(), EncodeError<W::Error>> {
        let (kind, nodes) = match &self.0 {
            Route::Root(nodes) => (1, nodes.clone()),
            Route::Closer(nodes) => (2, nodes.clone()),
            Route::NotRoot(node) => (3, vec![*node]),
            Route::Nowhere => (4, Vec::new()),
        };
        e.array(2)?.u8(kind)?;
        WireNodes(nodes).encode(e, c)?;
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
        for _ in 2..fields {
            d.skip()?;
        }
        let route = match (kind, nodes.len()) {
            (1, 1..) => Route::Root(nodes),
            (2, 1..) => Route::Closer(nodes),
            (3, 1) => Route::NotRoot(nodes.remove(0)),
            (4, 0) => Route::Nowhere,
            _ => return Err(DecodeError::message("a route of no known kind")),
        };
        Ok(WireRoute(route))
    }
}
