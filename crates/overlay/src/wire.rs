//! Nodes, keys and routes as they stand in message headers, here and in the crates above.
//!
//! A node's ring position never travels: it is derived from the peer's key on receipt
//! (CFS §4.4), so that nobody can claim a position.

use atoll_key::Key;
use atoll_net::header::{Capped, WirePeer};
use minicbor::decode::Error as DecodeError;
use minicbor::encode::{Error as EncodeError, Write};
use minicbor::{Decode, Decoder, Encode, Encoder};

use crate::{Node, Route};

/// The most nodes in one message.
pub const MAX_NODES: usize = 256;
/// Nodes as they travel: a list of [`WirePeer`]s.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct WireNodes(pub Vec<Node>);

impl<C> Encode<C> for WireNodes {
    fn encode<W: Write>(&self, e: &mut Encoder<W>, c: &mut C) -> Result<(), EncodeError<W::Error>> {
        let peers = self.0.iter().map(|node| WirePeer(node.peer)).collect();
        Capped::<WirePeer, MAX_NODES>(peers).encode(e, c)
    }
}

impl<'b, C> Decode<'b, C> for WireNodes {
    fn decode(d: &mut Decoder<'b>, c: &mut C) -> Result<WireNodes, DecodeError> {
        let Capped(peers) = Capped::<WirePeer, MAX_NODES>::decode(d, c)?;
        Ok(WireNodes(peers.into_iter().map(|peer| Node::of(peer.0)).collect()))
    }
}

/// One node as it travels; see [`WireNodes`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WireNode(pub Node);

impl<C> Encode<C> for WireNode {
    fn encode<W: Write>(&self, e: &mut Encoder<W>, c: &mut C) -> Result<(), EncodeError<W::Error>> {
        WirePeer(self.0.peer).encode(e, c)
    }
}

impl<'b, C> Decode<'b, C> for WireNode {
    fn decode(d: &mut Decoder<'b>, c: &mut C) -> Result<WireNode, DecodeError> {
        Ok(WireNode(Node::of(WirePeer::decode(d, c)?.0)))
    }
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
            Route::Back(node) => (3, vec![*node]),
            Route::Nowhere => (4, Vec::new()),
        };
        e.array(2)?.u8(kind)?;
        WireNodes(nodes).encode(e, c)
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
            (3, 1) => Route::Back(nodes.remove(0)),
            (4, 0) => Route::Nowhere,
            _ => return Err(DecodeError::message("a route of no known kind")),
        };
        Ok(WireRoute(route))
    }
}
