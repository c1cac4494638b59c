//! The calls of Chord nodes, methods `0x01xx`, as bytes.
//!
//! Headers are CBOR (minicbor): an array whose positions are field numbers. A field that
//! is absent is null or beyond the array's end, and positions that are not known are
//! skipped, so that messages can grow. `docs/design/chord.md` has the tables.
//!
//! A call is made by one virtual server to another (CFS §5.3): fields name their indices.
//! Both belong to virtual servers of the network's own profile, which does not travel with them.
//!
//! No claim in a header is believed: element counts are capped, nothing is allocated
//! by declared length, and a node's ring position never travels. It is derived from the
//! peer's key on receipt (CFS §4.4), so that no node can claim a position.

pub use atoll_net::header::{WirePeer, from_header as decode, to_header as encode};
use minicbor::data::Type;
use minicbor::decode::Error as DecodeError;
use minicbor::encode::{Error as EncodeError, Write};
use minicbor::{Decode, Decoder, Encode, Encoder};

use crate::MAX_VIRTUAL_SERVERS;
use crate::chord::ring::state::Told;
pub use crate::wire::{WireKey, WireNode, WireNodes, WireRoute};

/// The upper byte of all methods here.
pub const FAMILY: u8 = 0x01;
/// Are you there? [`Ping`], or empty; answered by [`Alive`].
pub const PING: u16 = 0x0100;
/// Asks for a virtual server's surroundings: [`Seen`]; answered by [`Surroundings`].
pub const NEIGHBOURS: u16 = 0x0101;
/// I take you for my successor: [`Seen`]; answered by [`Surroundings`].
pub const NOTIFY: u16 = 0x0102;
/// My list has changed, look at it. [`Nudge`], or empty; answered by nothing.
pub const NUDGE: u16 = 0x0103;
/// I leave: [`Leaving`]; answered by nothing.
pub const LEAVE: u16 = 0x0104;
/// Where next for this key? [`AskRoute`]; answered by [`WireRoute`].
pub const ROUTE: u16 = 0x0105;
/// These did not answer me: [`FailureReport`]; answered by nothing, once checked.
pub const REPORT_FAILED: u16 = 0x0106;
/// There is this node, perhaps of another ring: [`Introduce`]; answered by nothing.
pub const INTRODUCE: u16 = 0x0107;

/// Do you reach me where I say I listen? Empty; answered by [`Reached`], after a check.
pub const REACH_ME: u16 = 0x0108;
/// I have seen your key at two addresses: [`SeenAt`]; answered by nothing.
pub const SEEN_AT: u16 = 0x0109;
/// A process asks another one that has the same key: [`KeyClaim`]; answered by [`KeyClaim`].
pub const KEY_CLAIM: u16 = 0x010a;

/// Refusal code: this node, or the virtual server meant, is not on a ring.
pub const NOT_JOINED: u16 = 100;

/// The most failed nodes in one [`FailureReport`].
pub const MAX_REPORTED: usize = 16;

/// A virtual index; absent and null are 0. One at or beyond [`MAX_VIRTUAL_SERVERS`] is malformed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct VirtualIndex(pub u16);

impl<C> Encode<C> for VirtualIndex {
    fn encode<W: Write>(&self, e: &mut Encoder<W>, _: &mut C) -> Result<(), EncodeError<W::Error>> {
        e.u16(self.0)?.ok()
    }

    fn is_nil(&self) -> bool {
        self.0 == 0
    }
}

impl<'b, C> Decode<'b, C> for VirtualIndex {
    fn decode(d: &mut Decoder<'b>, _: &mut C) -> Result<VirtualIndex, DecodeError> {
        if d.datatype()? == Type::Null {
            d.skip()?;
            return Ok(VirtualIndex(0));
        }
        let index = d.u16()?;
        let known = index < MAX_VIRTUAL_SERVERS;
        known
            .then_some(VirtualIndex(index))
            .ok_or_else(|| DecodeError::message("no such virtual server"))
    }

    fn nil() -> Option<VirtualIndex> {
        Some(VirtualIndex(0))
    }
}

/// [`PING`]: the virtual server it is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Encode, Decode)]
pub struct Ping {
    /// The virtual server meant.
    #[n(0)]
    pub to: VirtualIndex,
    /// To be repeated in the answer (CFS §4.4).
    #[n(1)]
    pub nonce: Option<u64>,
}

/// [`NUDGE`]: the two virtual servers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Encode, Decode)]
pub struct Nudge {
    /// The virtual server meant.
    #[n(0)]
    pub to: VirtualIndex,
    /// The one whose list has changed.
    #[n(1)]
    pub from: VirtualIndex,
}

/// Answer to [`PING`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Alive {
    /// Whether the virtual server meant is a member of a ring.
    #[n(0)]
    pub joined: bool,
    /// The nonce of the question.
    #[n(1)]
    pub nonce: Option<u64>,
    /// How many virtual servers the node runs.
    #[n(2)]
    pub servers: Option<u16>,
    /// The key and address that the node wants others to know.
    #[n(3)]
    pub peer: Option<WirePeer>,
    /// The node's wall clock, milliseconds since 1970, uncorrected.
    #[n(4)]
    pub unix_ms: Option<u64>,
}

/// [`NEIGHBOURS`] and [`NOTIFY`]: the epoch that the asker has seen before.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Encode, Decode)]
pub struct Seen {
    /// The epoch of the last answer, whose list need not be sent again.
    #[n(0)]
    pub epoch: Option<u64>,
    /// The virtual server asked.
    #[n(1)]
    pub to: VirtualIndex,
    /// The virtual server that asks.
    #[n(2)]
    pub from: VirtualIndex,
}

/// Answer to [`NEIGHBOURS`] and [`NOTIFY`].
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Surroundings {
    /// The answerer's epoch.
    #[n(0)]
    pub epoch: u64,
    /// Its predecessor.
    #[n(1)]
    pub predecessor: Option<WireNode>,
    /// Its successors; absent if the asker has seen this epoch.
    #[n(2)]
    pub successors: Option<WireNodes>,
    /// To [`NOTIFY`]: the doubt about the caller's claim, if it is not believed.
    #[n(3)]
    pub doubt: Option<Doubt>,
}

/// Why a caller of [`NOTIFY`] is not taken for the predecessor, whatever its position.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
#[cbor(index_only)]
pub enum Doubt {
    /// It has not been checked yet.
    #[n(1)]
    Unchecked,
    /// No answer comes from its claimed address, or another key's.
    #[n(2)]
    Refuted,
}

/// Answer to [`REACH_ME`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Reached {
    /// Why not, or not yet.
    #[n(0)]
    pub doubt: Option<Doubt>,
}

/// [`SEEN_AT`]: two addresses of one key.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub struct SeenAt {
    /// The key at one address.
    #[n(0)]
    pub one: WirePeer,
    /// The key at the other.
    #[n(1)]
    pub other: WirePeer,
}

/// [`KEY_CLAIM`], and its answer: what decides which of two processes of one key goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub struct KeyClaim {
    /// Drawn by the asker for this question.
    #[n(0)]
    pub nonce: u64,
    /// How long the speaker's process has run, by its monotonic clock, milliseconds.
    #[n(1)]
    pub uptime_ms: u64,
    /// A number that the speaker's process has drawn.
    #[n(2)]
    pub incarnation: u64,
}

/// [`LEAVE`]: the surroundings of the virtual server that leaves.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Leaving {
    /// Its predecessor.
    #[n(0)]
    pub predecessor: Option<WireNode>,
    /// Its successors.
    #[n(1)]
    pub successors: WireNodes,
    /// Which virtual server leaves.
    #[n(2)]
    pub from: VirtualIndex,
    /// How many virtual servers its node goes on with, those of the lowest indices; with
    /// none the whole node leaves.
    #[n(3)]
    pub remaining: VirtualIndex,
}

impl Leaving {
    /// As plain data.
    pub fn told(&self) -> Told {
        Told { predecessor: self.predecessor.map(|n| n.0), successors: self.successors.0.clone() }
    }
}

/// [`ROUTE`]: where to ask next for a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub struct AskRoute {
    /// The key.
    #[n(0)]
    pub key: WireKey,
    /// Whether the asker takes the asked node for the key's root.
    #[n(1)]
    pub as_root: bool,
}

/// [`REPORT_FAILED`]: nodes that gave no answer, at most [`MAX_REPORTED`] of which are looked at.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct FailureReport {
    /// The nodes.
    #[n(0)]
    pub nodes: WireNodes,
}

/// [`INTRODUCE`]: a node that the receiver may not know.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Introduce {
    /// The node.
    #[n(0)]
    pub node: WireNode,
    /// How often this may still be passed on.
    #[n(1)]
    pub hops_left: u8,
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

    use atoll_key::Key;
    use atoll_key::PeerId;
    use atoll_net::{Peer, Refusal};
    use proptest::prelude::*;

    use super::*;
    use crate::wire::MAX_NODES;
    use crate::{Node, Route};

    fn node(seed: u8, v6: bool) -> Node {
        let ip = if v6 { IpAddr::V6(Ipv6Addr::LOCALHOST) } else { IpAddr::V4(Ipv4Addr::LOCALHOST) };
        Node::of(Peer { id: PeerId([seed; 32]), addr: SocketAddr::new(ip, 4000 + u16::from(seed)) })
    }

    #[test]
    fn every_kind_of_route_survives_the_wire() {
        let nodes = vec![node(1, false), node(2, true)];
        for route in [
            Route::Root(nodes.clone()),
            Route::closer(nodes),
            Route::NotRoot(node(3, true)),
            Route::Nowhere,
        ] {
            let bytes = encode(&WireRoute(route.clone()));
            assert_eq!(decode::<WireRoute>(&bytes).unwrap().0, route);
        }
    }

    #[test]
    fn an_absent_field_is_none_and_an_unknown_one_is_skipped() {
        assert_eq!(decode::<Seen>(&[0x80]).unwrap(), Seen::default());
        let seen = Seen { epoch: Some(7), ..Seen::default() };
        assert_eq!(decode::<Seen>(&[0x84, 0x07, 0xf6, 0x00, 0x18, 0xff]).unwrap(), seen);
    }

    /// The message as a later version may send it: with one more field than any has now.
    fn skips_a_later_field<T>(message: T)
    where
        T: minicbor::Encode<()> + for<'b> Decode<'b, ()> + PartialEq + std::fmt::Debug,
    {
        let header = encode(&message);
        let fields = header[0] - 0x80;
        assert!(fields < 8, "{message:?} is an array with a short head: {header:02x?}");
        let mut later = header.to_vec();
        later[0] = 0x80 + 9;
        later.extend(std::iter::repeat_n(0xf6, usize::from(8 - fields)));
        later.extend_from_slice(b"\x65later");
        assert_eq!(decode::<T>(&later).as_ref(), Ok(&message));
    }

    #[test]
    fn every_message_skips_a_field_that_it_does_not_know() {
        let one = node(1, false);
        let nodes = || WireNodes(vec![one, node(2, true)]);
        skips_a_later_field(Ping { to: VirtualIndex(2), nonce: Some(7) });
        skips_a_later_field(Nudge { to: VirtualIndex(0), from: VirtualIndex(0) });
        skips_a_later_field(Alive {
            joined: true,
            nonce: None,
            servers: Some(3),
            peer: Some(WirePeer(one.peer)),
            unix_ms: Some(9),
        });
        skips_a_later_field(Seen { epoch: Some(7), to: VirtualIndex(1), from: VirtualIndex(2) });
        skips_a_later_field(Surroundings {
            epoch: 1,
            predecessor: None,
            successors: Some(nodes()),
            doubt: None,
        });
        skips_a_later_field(Reached { doubt: None });
        skips_a_later_field(SeenAt { one: WirePeer(one.peer), other: WirePeer(one.peer) });
        skips_a_later_field(KeyClaim { nonce: 1, uptime_ms: 2, incarnation: 3 });
        skips_a_later_field(Leaving {
            predecessor: Some(WireNode(one)),
            successors: nodes(),
            from: VirtualIndex(1),
            remaining: VirtualIndex(2),
        });
        skips_a_later_field(AskRoute { key: WireKey(Key([3; 64])), as_root: true });
        skips_a_later_field(FailureReport { nodes: nodes() });
        skips_a_later_field(Introduce { node: WireNode(one), hops_left: 2 });
    }

    #[test]
    fn index_zero_is_absent_and_an_index_beyond_the_maximum_is_refused() {
        let ask = |to, from| Seen { epoch: None, to: VirtualIndex(to), from: VirtualIndex(from) };
        assert_eq!(encode(&ask(0, 0)), [0x80][..]);
        assert_eq!(encode(&ask(0, 3)), [0x83, 0xf6, 0x00, 0x03][..]);
        for (to, from) in [(0, 0), (0, 3), (5, 0), (127, 127)] {
            assert_eq!(decode::<Seen>(&encode(&ask(to, from))).unwrap(), ask(to, from));
        }
        assert_eq!(decode::<Seen>(&[0x83, 0xf6, 0xf6, 0x03]).unwrap(), ask(0, 3));
        for header in [&[0x82, 0xf6, 0x18, 0x80][..], &[0x83, 0xf6, 0xf6, 0x19, 0xff, 0xff]] {
            assert_eq!(decode::<Seen>(header).unwrap_err().code, Refusal::MALFORMED);
        }
    }

    #[test]
    fn a_claimed_count_allocates_nothing() {
        // An array said to hold 2^32 nodes, then one said to hold 200 that are missing.
        for header in [&[0x9a, 0xff, 0xff, 0xff, 0xff][..], &[0x98, 200][..]] {
            let refusal = decode::<WireNodes>(header).unwrap_err();
            assert_eq!(refusal.code, Refusal::MALFORMED);
        }
    }

    #[test]
    fn more_nodes_than_the_cap_are_refused() {
        let bytes = encode(&WireNodes(vec![node(1, false); MAX_NODES + 1]));
        assert!(decode::<WireNodes>(&bytes).is_err());
        let bytes = encode(&WireNodes(vec![node(1, false); MAX_NODES]));
        assert!(decode::<WireNodes>(&bytes).is_ok());
    }

    #[test]
    fn a_node_cannot_claim_a_position() {
        // Only the peer travels; the position is the hash of its key.
        let mut forged = node(1, false);
        forged.id = node(2, false).id;
        let received = decode::<WireNode>(&encode(&WireNode(forged))).unwrap().0;
        assert_eq!(received.id, node(1, false).id);
    }

    #[test]
    fn empty_and_contradictory_routes_are_refused() {
        for (kind, nodes) in [(1, 0), (2, 0), (3, 0), (3, 2), (4, 1), (0, 1), (5, 1)] {
            let mut e = minicbor::Encoder::new(Vec::new());
            e.array(2).unwrap().u8(kind).unwrap();
            WireNodes(vec![node(1, false); nodes]).encode(&mut e, &mut ()).unwrap();
            assert!(decode::<WireRoute>(&e.into_writer()).is_err(), "kind {kind}, {nodes} nodes");
        }
    }

    #[test]
    fn the_layout_is_the_documented_one() {
        let ask = AskRoute { key: WireKey(Key::MAX), as_root: false };
        let mut bytes = vec![0x82, 0x58, 0x40];
        bytes.extend([0xff; 64]);
        bytes.push(0xf4);
        assert_eq!(encode(&ask), bytes);
        // [epoch 7, no predecessor, [id ‖ 127.0.0.1 ‖ port 4001]]
        let said = Surroundings {
            epoch: 7,
            predecessor: None,
            successors: Some(WireNodes(vec![node(1, false)])),
            doubt: None,
        };
        let mut bytes = vec![0x83, 0x07, 0xf6, 0x81, 0x58, 38];
        bytes.extend([1; 32]);
        bytes.extend([127, 0, 0, 1, 0x0f, 0xa1]);
        assert_eq!(encode(&said), bytes);
    }

    #[test]
    fn bytes_after_a_message_are_refused() {
        let alive = Alive { joined: true, nonce: None, servers: None, peer: None, unix_ms: None };
        assert_eq!(encode(&alive), [0x81, 0xf5][..]);
        let mut bytes = encode(&alive).to_vec();
        bytes.push(0);
        assert!(decode::<Alive>(&bytes).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_decode_or_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = decode::<Surroundings>(&bytes);
            let _ = decode::<Leaving>(&bytes);
            let _ = decode::<AskRoute>(&bytes);
            let _ = decode::<WireRoute>(&bytes);
            let _ = decode::<FailureReport>(&bytes);
            let _ = decode::<Introduce>(&bytes);
            let _ = decode::<Seen>(&bytes);
            let _ = decode::<Ping>(&bytes);
            let _ = decode::<Nudge>(&bytes);
            let _ = decode::<Reached>(&bytes);
            let _ = decode::<SeenAt>(&bytes);
            let _ = decode::<KeyClaim>(&bytes);
        }

        #[test]
        fn a_damaged_message_is_refused_or_differs(at in 0usize..200, to in any::<u8>()) {
            let told = Surroundings {
                epoch: 77,
                predecessor: Some(WireNode(node(1, true))),
                successors: Some(WireNodes(vec![node(2, false), node(3, true)])),
                doubt: Some(Doubt::Refuted),
            };
            let mut bytes = encode(&told).to_vec();
            let at = at % bytes.len();
            prop_assume!(bytes[at] != to);
            bytes[at] = to;
            if let Ok(other) = decode::<Surroundings>(&bytes) {
                prop_assert_ne!(other, told);
            }
        }
    }
}
