//! How message headers are written: CBOR (minicbor) with numbered fields.
//!
//! The owner of a method defines its header; what all headers share stands here: reading
//! one whole header and nothing else, the form of a [`Peer`], and lists whose length is
//! checked before they are read. Decoding allocates no more than the bytes that have
//! arrived justify.

use std::net::{IpAddr, SocketAddr};

use atoll_key::PeerId;
use bytes::Bytes;
use minicbor::data::Type;
use minicbor::decode::Error as DecodeError;
use minicbor::encode::{Error as EncodeError, Write};
use minicbor::{Decode, Decoder, Encode, Encoder};

use crate::{Peer, Refusal};

/// Encodes a header.
pub fn to_header<T: Encode<()>>(message: &T) -> Bytes {
    Bytes::from(minicbor::to_vec(message).expect("a vector takes all that is written"))
}

/// Decodes a header that holds one message and nothing else.
///
/// # Errors
/// A refusal that says what is malformed.
pub fn from_header<T: for<'b> Decode<'b, ()>>(header: &[u8]) -> Result<T, Refusal> {
    let malformed = |why: &dyn std::fmt::Display| {
        Refusal::new(Refusal::MALFORMED, format!("malformed header: {why}"))
    };
    let mut decoder = Decoder::new(header);
    let message = decoder.decode().map_err(|error| malformed(&error))?;
    if decoder.position() != header.len() {
        return Err(malformed(&"bytes after the message"));
    }
    Ok(message)
}

/// A peer as it stands in headers, files and join codes: one byte string of 32 bytes
/// public key, 4 or 16 bytes IP address, 2 bytes port, big-endian. A ring position is
/// never sent: the reader derives it from the key (CFS §4.4).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WirePeer(pub Peer);

impl WirePeer {
    /// Reads the byte string's content; `None` if it is not a peer.
    pub fn from_bytes(bytes: &[u8]) -> Option<WirePeer> {
        let (id, rest) = bytes.split_first_chunk::<32>()?;
        let (ip, port) = rest.split_last_chunk::<2>()?;
        let ip = match ip.len() {
            4 => IpAddr::from(<[u8; 4]>::try_from(ip).ok()?),
            16 => IpAddr::from(<[u8; 16]>::try_from(ip).ok()?),
            _ => return None,
        };
        let addr = SocketAddr::new(ip, u16::from_be_bytes(*port));
        Some(WirePeer(Peer { id: PeerId(*id), addr }))
    }

    /// The byte string's content.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(52);
        bytes.extend_from_slice(&self.0.id.0);
        match self.0.addr.ip() {
            IpAddr::V4(ip) => bytes.extend_from_slice(&ip.octets()),
            IpAddr::V6(ip) => bytes.extend_from_slice(&ip.octets()),
        }
        bytes.extend_from_slice(&self.0.addr.port().to_be_bytes());
        bytes
    }
}

impl<C> Encode<C> for WirePeer {
    fn encode<W: Write>(&self, e: &mut Encoder<W>, _: &mut C) -> Result<(), EncodeError<W::Error>> {
        e.bytes(&self.to_bytes())?.ok()
    }
}

impl<'b, C> Decode<'b, C> for WirePeer {
    fn decode(d: &mut Decoder<'b>, _: &mut C) -> Result<Self, DecodeError> {
        WirePeer::from_bytes(d.bytes()?).ok_or_else(|| DecodeError::message("not a peer"))
    }
}

/// A list of at most `N` elements, as a CBOR array.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Capped<T, const N: usize>(pub Vec<T>);

impl<C, T: Encode<C>, const N: usize> Encode<C> for Capped<T, N> {
    fn encode<W: Write>(&self, e: &mut Encoder<W>, c: &mut C) -> Result<(), EncodeError<W::Error>> {
        self.0.encode(e, c)
    }
}

impl<'b, C, T: Decode<'b, C>, const N: usize> Decode<'b, C> for Capped<T, N> {
    fn decode(d: &mut Decoder<'b>, c: &mut C) -> Result<Self, DecodeError> {
        let stated = d.array()?.ok_or_else(|| DecodeError::message("a list without a length"))?;
        if stated > N as u64 {
            return Err(DecodeError::message("a list longer than any may be"));
        }
        // The capacity grows with what really follows, not with the stated length.
        let mut list = Vec::new();
        for _ in 0..stated {
            list.push(T::decode(d, c)?);
        }
        Ok(Capped(list))
    }
}

impl<T, const N: usize> From<Vec<T>> for Capped<T, N> {
    fn from(list: Vec<T>) -> Self {
        Capped(list)
    }
}

/// The message as a later version may send it: every map in it has a field that this
/// version does not know. For tests that such fields are skipped.
///
/// # Panics
/// If `header` is no CBOR of definite lengths.
pub fn with_later_fields(header: &[u8]) -> Vec<u8> {
    let mut decoder = Decoder::new(header);
    let mut encoder = Encoder::new(Vec::new());
    copy_growing(&mut decoder, &mut encoder, header).expect("a message of our own");
    encoder.into_writer()
}

fn copy_growing(
    d: &mut Decoder<'_>,
    e: &mut Encoder<Vec<u8>>,
    whole: &[u8],
) -> Result<(), DecodeError> {
    const LATER: u16 = 4095;
    let count = |count: Option<u64>| count.ok_or_else(|| DecodeError::message("no length"));
    let written = "a vector takes all that is written";
    match d.datatype()? {
        Type::Map => {
            let fields = count(d.map()?)?;
            e.map(fields + 1).expect(written);
            for _ in 0..2 * fields {
                copy_growing(d, e, whole)?;
            }
            e.u16(LATER).and_then(|e| e.str("later")).expect(written);
        }
        Type::Array => {
            let elements = count(d.array()?)?;
            e.array(elements).expect(written);
            for _ in 0..elements {
                copy_growing(d, e, whole)?;
            }
        }
        _ => {
            let from = d.position();
            d.skip()?;
            e.writer_mut().extend_from_slice(&whole[from..d.position()]);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_field_stands_in_every_map_and_nowhere_else() {
        // {0: [{1: 2}, h'03']}
        let header = [0xa1, 0x00, 0x82, 0xa1, 0x01, 0x02, 0x41, 0x03];
        let later = [0x19, 0x0f, 0xff, 0x65, b'l', b'a', b't', b'e', b'r'];
        let inner = [&[0xa2, 0x01, 0x02][..], &later].concat();
        let expected = [&[0xa2, 0x00, 0x82][..], &inner, &[0x41, 0x03], &later].concat();
        assert_eq!(with_later_fields(&header), expected);
    }

    fn peer(addr: &str) -> WirePeer {
        WirePeer(Peer { id: PeerId([7; 32]), addr: addr.parse().expect("an address") })
    }

    #[test]
    fn peers_of_both_address_families_read_back() {
        for peer in [peer("10.1.2.3:4"), peer("[fe80::1]:65535")] {
            let header = to_header(&peer);
            assert_eq!(from_header(&header), Ok(peer));
            for cut in 0..header.len() {
                assert!(from_header::<WirePeer>(&header[..cut]).is_err());
            }
        }
        for len in [0, 31, 37, 39, 49, 51] {
            assert_eq!(WirePeer::from_bytes(&vec![0; len]), None, "{len} bytes");
        }
    }

    #[test]
    fn bytes_after_the_message_are_refused() {
        let mut header = to_header(&7u8).to_vec();
        header.push(0);
        assert!(from_header::<u8>(&header).is_err_and(|refusal| refusal.text.contains("after")));
    }

    #[test]
    fn a_list_is_refused_by_its_claimed_length() {
        let three: Capped<u8, 3> = vec![1, 2, 3].into();
        let header = to_header(&three);
        assert_eq!(from_header(&header), Ok(three));
        assert!(from_header::<Capped<u8, 2>>(&header).is_err());
        let endless = [0x9b, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff];
        assert!(from_header::<Capped<u8, 3>>(&endless).is_err());
        assert!(from_header::<Capped<u8, 3>>(&[0x9f, 0xff]).is_err(), "indefinite length");
    }
}
