//! How fields are written: lists of short values as one byte string, and types of other crates.
//!
//! Every list has a cap, which is checked before anything is allocated for it.

use atoll_key::{BlockKind, Key};
use atoll_net::header::WirePeer;
use atoll_overlay::wire::{WireKey, WireNodes, WireRoute};

/// A value of a fixed length, of which lists are sent as one CBOR byte string.
pub(super) trait Packed: Sized {
    /// Bytes of one.
    const BYTES: usize;
    /// The most in one list.
    const MAX: usize;

    /// Appends it.
    fn write(&self, out: &mut Vec<u8>);

    /// Reads one from exactly [`Packed::BYTES`] bytes.
    fn read(bytes: &[u8]) -> Option<Self>;
}

impl Packed for Key {
    const BYTES: usize = 64;
    const MAX: usize = super::MAX_KEYS;

    fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.0);
    }

    fn read(bytes: &[u8]) -> Option<Key> {
        Key::from_slice(bytes)
    }
}

/// Field encoding of a list of [`Packed`] values.
pub(super) mod packed {
    use minicbor::decode::Error as DecodeError;
    use minicbor::encode::{Error as EncodeError, Write};
    use minicbor::{Decoder, Encoder};

    use super::Packed;

    pub(crate) fn encode<T: Packed, C, W: Write>(
        list: &[T],
        e: &mut Encoder<W>,
        _: &mut C,
    ) -> Result<(), EncodeError<W::Error>> {
        let mut bytes = Vec::with_capacity(list.len() * T::BYTES);
        list.iter().for_each(|value| value.write(&mut bytes));
        e.bytes(&bytes)?.ok()
    }

    pub(crate) fn decode<T: Packed, C>(
        d: &mut Decoder<'_>,
        _: &mut C,
    ) -> Result<Vec<T>, DecodeError> {
        let bytes = d.bytes()?;
        let is_list = bytes.len().is_multiple_of(T::BYTES) && bytes.len() / T::BYTES <= T::MAX;
        let list = is_list.then(|| bytes.chunks(T::BYTES).map(T::read).collect()).flatten();
        list.ok_or_else(|| DecodeError::message("not a list of values of this kind"))
    }
}

/// Field encoding of a block's kind: its number.
pub(super) mod kind {
    use super::BlockKind;
    use minicbor::decode::Error as DecodeError;
    use minicbor::encode::{Error as EncodeError, Write};
    use minicbor::{Decoder, Encoder};

    pub(crate) fn encode<C, W: Write>(
        kind: &BlockKind,
        e: &mut Encoder<W>,
        _: &mut C,
    ) -> Result<(), EncodeError<W::Error>> {
        e.u8(*kind as u8)?.ok()
    }

    pub(crate) fn decode<C>(d: &mut Decoder<'_>, _: &mut C) -> Result<BlockKind, DecodeError> {
        BlockKind::from_u8(d.u8()?).map_err(DecodeError::message)
    }
}

/// Field encodings of types that another crate wraps for the wire.
macro_rules! wrapped {
    ($($module:ident: $Plain:ty, $Borrowed:ty = $Wire:ident;)*) => {$(
        pub(super) mod $module {
            use minicbor::decode::Error as DecodeError;
            use minicbor::encode::{Error as EncodeError, Write};
            use minicbor::{Decode, Decoder, Encode, Encoder};

            use super::$Wire;

            pub(crate) fn encode<C, W: Write>(
                value: &$Borrowed,
                e: &mut Encoder<W>,
                ctx: &mut C,
            ) -> Result<(), EncodeError<W::Error>> {
                $Wire(value.to_owned()).encode(e, ctx)
            }

            pub(crate) fn decode<'b, C>(
                d: &mut Decoder<'b>,
                ctx: &mut C,
            ) -> Result<$Plain, DecodeError> {
                Ok($Wire::decode(d, ctx)?.0)
            }
        }
    )*};
}

wrapped! {
    key: atoll_key::Key, atoll_key::Key = WireKey;
    peer: atoll_net::Peer, atoll_net::Peer = WirePeer;
    nodes: Vec<atoll_overlay::Node>, [atoll_overlay::Node] = WireNodes;
    route: atoll_overlay::Route, atoll_overlay::Route = WireRoute;
}
