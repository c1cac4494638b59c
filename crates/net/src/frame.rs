//! The frame: how one message looks on a connection, whatever carries it.
//!
//! Numbers are big-endian. A frame is a head of 24 bytes and a body:
//!
//! ```text
//! offset size
//!      0    4  length of all that follows this field
//!      4    1  kind (see Kind)
//!      5    1  zero
//!      6    2  code: the method of a request, the code of a refusal, else zero
//!      8    8  id: of the call, or of the ping; zero in a GoAway
//!     16    4  header length H
//!     20    2  part count N
//!     22    2  zero
//!     24   4N  part lengths
//!  24+4N    H  header (of a refusal: its text, UTF-8)
//!         ...  parts, one after the other
//! ```
//!
//! Invariants: a head is checked against every limit before anything is allocated for
//! its body; the lengths must add up exactly; fields without meaning for a kind must be
//! zero, so that each frame has one encoding. Decoding slices the body and copies
//! nothing. The meaning of headers and parts is not known here.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use crate::{MAX_HEADER_BYTES, MAX_MESSAGE_BYTES, MAX_PARTS, Refusal, Reply, Request};

/// Length of a frame's head, in bytes.
pub const HEAD_BYTES: usize = 24;
/// Length of the field that says how long the rest is, in bytes.
const LENGTH_FIELD_BYTES: usize = 4;
/// The longest text of a refusal, in bytes; a longer one is cut when sent.
pub const MAX_REFUSAL_BYTES: usize = 1024;
/// The largest body: table, header and parts, in bytes.
pub const MAX_BODY_BYTES: usize = 4 * MAX_PARTS + MAX_MESSAGE_BYTES;

/// What a frame is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Kind {
    /// A call. `code` is the method.
    Request = 1,
    /// The answer to the call with this id.
    Reply = 2,
    /// A refusal of the call with this id; the header is the text for people.
    Refusal = 3,
    /// The caller gave up the call with this id.
    Cancel = 4,
    /// Asks for a pong with the same id.
    Ping = 5,
    /// Answers a ping.
    Pong = 6,
    /// The sender begins no more calls here and asks the same; the connection closes
    /// when both have said so and no call is open.
    GoAway = 7,
}

impl Kind {
    fn from_wire(byte: u8) -> Option<Kind> {
        Some(match byte {
            1 => Kind::Request,
            2 => Kind::Reply,
            3 => Kind::Refusal,
            4 => Kind::Cancel,
            5 => Kind::Ping,
            6 => Kind::Pong,
            7 => Kind::GoAway,
            _ => return None,
        })
    }

    fn has_code(self) -> bool {
        matches!(self, Kind::Request | Kind::Refusal)
    }

    fn max_header_bytes(self) -> usize {
        match self {
            Kind::Request | Kind::Reply => MAX_HEADER_BYTES,
            Kind::Refusal => MAX_REFUSAL_BYTES,
            Kind::Cancel | Kind::Ping | Kind::Pong | Kind::GoAway => 0,
        }
    }

    fn max_parts(self) -> usize {
        match self {
            Kind::Request | Kind::Reply => MAX_PARTS,
            _ => 0,
        }
    }
}

/// What is wrong with a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FrameError {
    /// Fewer bytes than a head, or than the head promises.
    #[error("the frame is cut off")]
    Truncated,
    /// More bytes than the frame has.
    #[error("bytes follow the frame")]
    Trailing,
    /// The kind is not defined.
    #[error("unknown kind of frame {0}")]
    UnknownKind(u8),
    /// A field without meaning for this kind is set.
    #[error("a reserved field is not zero")]
    Reserved,
    /// The header is longer than allowed for this kind.
    #[error("a header of {0} bytes is too long")]
    HeaderTooLong(u32),
    /// More parts than allowed for this kind.
    #[error("{0} parts are too many")]
    TooManyParts(u16),
    /// Header and parts together are larger than [`MAX_MESSAGE_BYTES`].
    #[error("a frame of {0} bytes is too large")]
    TooLarge(u32),
    /// The lengths of table, header and parts do not add up to the frame's length.
    #[error("the lengths in the frame do not add up")]
    LengthsDisagree,
    /// A refusal's text is not UTF-8.
    #[error("the text of a refusal is not UTF-8")]
    TextNotUtf8,
}

/// A checked head.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Head {
    /// What the frame is for.
    pub kind: Kind,
    /// Method or refusal code.
    pub code: u16,
    /// The call's or the ping's id.
    pub id: u64,
    header_bytes: usize,
    parts: usize,
    body_bytes: usize,
}

impl Head {
    /// Decodes a head and checks it against every limit. Allocates nothing.
    pub fn decode(bytes: &[u8; HEAD_BYTES]) -> Result<Head, FrameError> {
        let mut at = &bytes[..];
        let length = at.get_u32();
        let kind = at.get_u8();
        let kind = Kind::from_wire(kind).ok_or(FrameError::UnknownKind(kind))?;
        let zero = at.get_u8();
        let code = at.get_u16();
        let id = at.get_u64();
        let header_length = at.get_u32();
        let parts = at.get_u16();
        let zeros = at.get_u16();
        let idle_id = kind == Kind::GoAway && id != 0;
        if zero != 0 || zeros != 0 || idle_id || (code != 0 && !kind.has_code()) {
            return Err(FrameError::Reserved);
        }
        let header_bytes = header_length as usize;
        if header_bytes > kind.max_header_bytes() {
            return Err(FrameError::HeaderTooLong(header_length));
        }
        if usize::from(parts) > kind.max_parts() {
            return Err(FrameError::TooManyParts(parts));
        }
        let parts = usize::from(parts);
        let table_and_header = 4 * parts + header_bytes;
        let body_bytes = (length as usize)
            .checked_sub(HEAD_BYTES - LENGTH_FIELD_BYTES)
            .ok_or(FrameError::LengthsDisagree)?;
        if body_bytes > 4 * parts + MAX_MESSAGE_BYTES {
            return Err(FrameError::TooLarge(length));
        }
        let agree = if parts == 0 {
            body_bytes == table_and_header
        } else {
            body_bytes >= table_and_header
        };
        if !agree {
            return Err(FrameError::LengthsDisagree);
        }
        Ok(Head { kind, code, id, header_bytes, parts, body_bytes })
    }

    /// How many bytes follow the head.
    pub fn body_bytes(&self) -> usize {
        self.body_bytes
    }

    /// Slices the body, which must be as long as [`Head::body_bytes`] says, into a frame.
    pub fn with_body(self, mut body: Bytes) -> Result<Frame, FrameError> {
        if body.len() < self.body_bytes {
            return Err(FrameError::Truncated);
        }
        if body.len() > self.body_bytes {
            return Err(FrameError::Trailing);
        }
        let mut table = body.split_to(4 * self.parts);
        let header = body.split_to(self.header_bytes);
        let mut parts = Vec::with_capacity(self.parts);
        while table.has_remaining() {
            let part_bytes = table.get_u32() as usize;
            if part_bytes > body.len() {
                return Err(FrameError::LengthsDisagree);
            }
            parts.push(body.split_to(part_bytes));
        }
        if !body.is_empty() {
            return Err(FrameError::LengthsDisagree);
        }
        let id = self.id;
        Ok(match self.kind {
            Kind::Request => Frame::Request(id, Request { method: self.code, header, parts }),
            Kind::Reply => Frame::Reply(id, Reply { header, parts }),
            Kind::Refusal => {
                let text = std::str::from_utf8(&header).map_err(|_| FrameError::TextNotUtf8)?;
                Frame::Refusal(id, Refusal { code: self.code, text: text.to_owned() })
            }
            Kind::Cancel => Frame::Cancel(id),
            Kind::Ping => Frame::Ping(id),
            Kind::Pong => Frame::Pong(id),
            Kind::GoAway => Frame::GoAway,
        })
    }
}

/// One frame, decoded.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Frame {
    /// A call with its id.
    Request(u64, Request),
    /// The answer to a call.
    Reply(u64, Reply),
    /// The refusal of a call.
    Refusal(u64, Refusal),
    /// The caller gave up.
    Cancel(u64),
    /// Asks for a pong.
    Ping(u64),
    /// Answers a ping.
    Pong(u64),
    /// No more calls from the sender.
    GoAway,
}

impl Frame {
    /// What of the frame is not its head: its bytes without the table, in bytes.
    pub fn payload_bytes(&self) -> usize {
        match self {
            Frame::Request(_, request) => payload_bytes(&request.header, &request.parts),
            Frame::Reply(_, reply) => payload_bytes(&reply.header, &reply.parts),
            Frame::Refusal(_, refusal) => refusal.text.len().min(MAX_REFUSAL_BYTES),
            Frame::Cancel(_) | Frame::Ping(_) | Frame::Pong(_) | Frame::GoAway => 0,
        }
    }

    /// Writes head, table and header to `out` and returns the parts, which follow them
    /// on the wire.
    ///
    /// The message must be within the limits: see [`within_limits`].
    pub fn encode_start(self, out: &mut BytesMut) -> Vec<Bytes> {
        match self {
            Frame::Request(id, Request { method, header, parts }) => {
                put_start(out, Kind::Request, method, id, &header, &parts);
                parts
            }
            Frame::Reply(id, Reply { header, parts }) => {
                put_start(out, Kind::Reply, 0, id, &header, &parts);
                parts
            }
            Frame::Refusal(id, refusal) => {
                let text = cut_text(&refusal.text).as_bytes();
                put_start(out, Kind::Refusal, refusal.code, id, text, &[]);
                Vec::new()
            }
            Frame::Cancel(id) => put_bare(out, Kind::Cancel, id),
            Frame::Ping(id) => put_bare(out, Kind::Ping, id),
            Frame::Pong(id) => put_bare(out, Kind::Pong, id),
            Frame::GoAway => put_bare(out, Kind::GoAway, 0),
        }
    }

    /// The whole frame in one piece.
    pub fn encode(self) -> Bytes {
        let mut out = BytesMut::new();
        for part in self.encode_start(&mut out) {
            out.extend_from_slice(&part);
        }
        out.freeze()
    }
}

/// Decodes exactly one frame. Its header and parts are slices of `bytes`.
pub fn decode(mut bytes: Bytes) -> Result<Frame, FrameError> {
    if bytes.len() < HEAD_BYTES {
        return Err(FrameError::Truncated);
    }
    let body = bytes.split_off(HEAD_BYTES);
    let head: &[u8; HEAD_BYTES] = bytes[..].try_into().expect("split at this length");
    Head::decode(head)?.with_body(body)
}

/// Whether a message can be sent at all.
pub fn within_limits(header: &Bytes, parts: &[Bytes]) -> bool {
    header.len() <= MAX_HEADER_BYTES
        && parts.len() <= MAX_PARTS
        && payload_bytes(header, parts) <= MAX_MESSAGE_BYTES
}

/// Header and parts together, in bytes.
pub fn payload_bytes(header: &Bytes, parts: &[Bytes]) -> usize {
    header.len() + parts.iter().map(Bytes::len).sum::<usize>()
}

fn cut_text(text: &str) -> &str {
    let mut end = text.len().min(MAX_REFUSAL_BYTES);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

fn put_bare(out: &mut BytesMut, kind: Kind, id: u64) -> Vec<Bytes> {
    put_start(out, kind, 0, id, &[], &[]);
    Vec::new()
}

fn put_start(out: &mut BytesMut, kind: Kind, code: u16, id: u64, header: &[u8], parts: &[Bytes]) {
    let parts_bytes: usize = parts.iter().map(Bytes::len).sum();
    let body_bytes = 4 * parts.len() + header.len() + parts_bytes;
    assert!(body_bytes <= MAX_BODY_BYTES, "messages are checked before they are queued");
    out.reserve(HEAD_BYTES + 4 * parts.len() + header.len());
    out.put_u32((HEAD_BYTES - LENGTH_FIELD_BYTES + body_bytes) as u32);
    out.put_u8(kind as u8);
    out.put_u8(0);
    out.put_u16(code);
    out.put_u64(id);
    out.put_u32(header.len() as u32);
    out.put_u16(parts.len() as u16);
    out.put_u16(0);
    for part in parts {
        out.put_u32(part.len() as u32);
    }
    out.extend_from_slice(header);
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn bytes(most: usize) -> impl Strategy<Value = Bytes> {
        vec(any::<u8>(), 0..most).prop_map(Bytes::from)
    }

    fn frames() -> impl Strategy<Value = Frame> {
        let message = || (bytes(300), vec(bytes(2000), 0..8));
        prop_oneof![
            (any::<u64>(), any::<u16>(), message()).prop_map(|(id, method, (header, parts))| {
                Frame::Request(id, Request { method, header, parts })
            }),
            (any::<u64>(), message())
                .prop_map(|(id, (header, parts))| Frame::Reply(id, Reply { header, parts })),
            (any::<u64>(), any::<u16>(), ".{0,80}")
                .prop_map(|(id, code, text)| Frame::Refusal(id, Refusal { code, text })),
            any::<u64>().prop_map(Frame::Cancel),
            any::<u64>().prop_map(Frame::Ping),
            any::<u64>().prop_map(Frame::Pong),
            Just(Frame::GoAway),
        ]
    }

    proptest! {
        #[test]
        fn a_frame_survives_the_wire(frame in frames()) {
            prop_assert_eq!(decode(frame.clone().encode()), Ok(frame));
        }

        #[test]
        fn a_frame_cut_anywhere_is_refused(frame in frames(), cut in any::<prop::sample::Index>()) {
            let mut encoded = frame.encode();
            encoded.truncate(cut.index(encoded.len()));
            prop_assert_eq!(decode(encoded), Err(FrameError::Truncated));
        }

        #[test]
        fn whatever_decodes_has_one_encoding(noise in vec(any::<u8>(), 0..200), frame in frames()) {
            let mut mixed = frame.encode().to_vec();
            for (index, byte) in noise.iter().enumerate().filter(|(index, _)| index % 3 == 0) {
                let at = (index * 7 + usize::from(*byte)) % mixed.len();
                mixed[at] ^= byte;
            }
            for bytes in [Bytes::from(mixed), Bytes::from(noise)] {
                if let Ok(frame) = decode(bytes.clone()) {
                    prop_assert_eq!(frame.encode(), bytes);
                }
            }
        }
    }

    fn sample() -> Vec<u8> {
        let parts = vec![Bytes::from_static(b"one"), Bytes::from_static(b"two!")];
        let request = Request { method: 0x0203, header: Bytes::from_static(b"head"), parts };
        Frame::Request(9, request).encode().to_vec()
    }

    fn with(at: usize, bytes: &[u8]) -> Result<Frame, FrameError> {
        let mut frame = sample();
        frame[at..at + bytes.len()].copy_from_slice(bytes);
        decode(Bytes::from(frame))
    }

    #[test]
    fn the_layout_is_the_documented_one() {
        let expected = [
            &[0, 0, 0, 39, 1, 0, 2, 3, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 4, 0, 2, 0, 0][..],
            &[0, 0, 0, 3, 0, 0, 0, 4],
            b"headonetwo!",
        ];
        assert_eq!(sample(), expected.concat());
    }

    #[test]
    fn each_lie_has_its_name() {
        let (over_header, over_parts) = (MAX_HEADER_BYTES as u32 + 1, MAX_PARTS as u16 + 1);
        let over = (MAX_MESSAGE_BYTES + 8 + 21) as u32;
        let cases = [
            (4, vec![0], FrameError::UnknownKind(0)),
            (4, vec![8], FrameError::UnknownKind(8)),
            (5, vec![1], FrameError::Reserved),
            (22, vec![0, 1], FrameError::Reserved),
            (4, vec![Kind::Reply as u8], FrameError::Reserved),
            (16, over_header.to_be_bytes().to_vec(), FrameError::HeaderTooLong(over_header)),
            (20, over_parts.to_be_bytes().to_vec(), FrameError::TooManyParts(over_parts)),
            (0, over.to_be_bytes().to_vec(), FrameError::TooLarge(over)),
            (0, vec![0xff; 4], FrameError::TooLarge(u32::MAX)),
            (0, vec![0, 0, 0, 19], FrameError::LengthsDisagree),
            (0, vec![0, 0, 0, 31], FrameError::LengthsDisagree),
            (0, vec![0, 0, 0, 38], FrameError::Trailing),
            (0, vec![0, 0, 0, 40], FrameError::Truncated),
            (24, vec![0, 0, 0, 2], FrameError::LengthsDisagree),
            (24, vec![0xff, 0xff, 0xff, 0xff], FrameError::LengthsDisagree),
            (28, vec![0, 0, 0, 5], FrameError::LengthsDisagree),
            (16, vec![0, 0, 0, 5], FrameError::LengthsDisagree),
            (20, vec![0, 0], FrameError::LengthsDisagree),
        ];
        for (at, bytes, error) in cases {
            assert_eq!(with(at, &bytes), Err(error), "{bytes:?} at {at}");
        }
    }

    #[test]
    fn control_frames_carry_nothing() {
        for kind in [Kind::Cancel, Kind::Ping, Kind::Pong, Kind::GoAway] {
            let id = u64::from(kind != Kind::GoAway);
            let mut out = BytesMut::new();
            put_start(&mut out, kind, 0, id, b"x", &[]);
            assert_eq!(decode(out.freeze()), Err(FrameError::HeaderTooLong(1)));
            let mut out = BytesMut::new();
            put_start(&mut out, kind, 0, id, b"", &[Bytes::new()]);
            assert_eq!(decode(out.freeze()), Err(FrameError::TooManyParts(1)));
        }
        let mut out = BytesMut::new();
        put_start(&mut out, Kind::GoAway, 0, 1, b"", &[]);
        assert_eq!(decode(out.freeze()), Err(FrameError::Reserved));
    }

    #[test]
    fn a_refusal_is_text_and_short() {
        let long = Refusal::new(7, "é".repeat(MAX_REFUSAL_BYTES));
        let Ok(Frame::Refusal(1, sent)) = decode(Frame::Refusal(1, long).encode()) else {
            panic!("a long refusal is cut, not lost");
        };
        assert_eq!(sent.text, "é".repeat(MAX_REFUSAL_BYTES / 2));
        let mut out = BytesMut::new();
        put_start(&mut out, Kind::Refusal, 7, 1, &[0xff], &[]);
        assert_eq!(decode(out.freeze()), Err(FrameError::TextNotUtf8));
    }

    #[test]
    fn the_largest_message_passes_and_shares_its_memory() {
        let parts = vec![Bytes::from(vec![7; MAX_MESSAGE_BYTES / MAX_PARTS]); MAX_PARTS];
        assert!(within_limits(&Bytes::new(), &parts));
        assert!(!within_limits(&Bytes::from_static(b"x"), &parts));
        let encoded = Frame::Reply(1, Reply { header: Bytes::new(), parts }).encode();
        let range = encoded.as_ptr_range();
        let Ok(Frame::Reply(1, reply)) = decode(encoded) else { panic!("within the limits") };
        assert_eq!(reply.parts.len(), MAX_PARTS);
        assert!(reply.parts.iter().all(|part| range.contains(&part.as_ptr())));
    }
}
