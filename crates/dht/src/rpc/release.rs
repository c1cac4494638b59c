//! Releasing blocks: the headers of `RELEASE`.

use atoll_key::kinds::{MAX_RELEASED, Release};
use bytes::Bytes;
use minicbor::decode::Error as DecodeError;
use minicbor::encode::{Error as EncodeError, Write};
use minicbor::{Decode, Decoder, Encode, Encoder};

use super::Message;
use super::encoding::{self, Packed};

/// `RELEASE`: those who may write what blocks belong to do not need them any more.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct ReleaseBlocks {
    /// What they have signed; not verified yet.
    #[cbor(n(0), with = "signed")]
    pub release: Release,
    /// The caller points to this node for these blocks, and this one asks no other.
    #[n(1)]
    pub is_pointed: bool,
}

/// The answer to a [`ReleaseBlocks`].
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct ReleaseReply {
    /// One for each block, a byte each.
    #[cbor(n(0), with = "encoding::packed")]
    pub statuses: Vec<ReleaseStatus>,
}

/// What became of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ReleaseStatus {
    /// The block is not held.
    Lacking = 0,
    /// What the release says is done: its lease ends, or it is removed.
    Released = 1,
    /// It is not theirs to release, or could not be read.
    Refused = 2,
    /// It was put or renewed at the time of the release or later, or may have been: it stays.
    PutSince = 3,
}

impl Packed for ReleaseStatus {
    const BYTES: usize = 1;
    const MAX: usize = MAX_RELEASED;

    fn write(&self, out: &mut Vec<u8>) {
        out.push(*self as u8);
    }

    fn read(bytes: &[u8]) -> Option<ReleaseStatus> {
        Some(match bytes[0] {
            0 => ReleaseStatus::Lacking,
            1 => ReleaseStatus::Released,
            3 => ReleaseStatus::PutSince,
            _ => ReleaseStatus::Refused,
        })
    }
}

impl Message for ReleaseBlocks {
    fn entries(&self) -> usize {
        self.release.keys().len()
    }
}

/// Field encoding of a release: its bytes.
mod signed {
    use super::{Bytes, DecodeError, Decoder, EncodeError, Encoder, Release, Write};

    pub(super) fn encode<C, W: Write>(
        release: &Release,
        e: &mut Encoder<W>,
        _: &mut C,
    ) -> Result<(), EncodeError<W::Error>> {
        e.bytes(&release.to_bytes())?.ok()
    }

    pub(super) fn decode<C>(d: &mut Decoder<'_>, _: &mut C) -> Result<Release, DecodeError> {
        let bytes = Bytes::copy_from_slice(d.bytes()?);
        Release::decode(&bytes).map_err(DecodeError::message)
    }
}
