//! How requests and replies become a header and parts, and back.

use atoll_net::Refusal;
use bytes::Bytes;
use minicbor::{Decode, Encode};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::message::{self, Empty};

/// What a request or a reply carries.
pub(crate) trait Body: Sized + Send + 'static {
    /// Its CBOR header.
    type Header: Encode<()> + for<'b> Decode<'b, ()> + Send;

    fn split(self) -> Result<(Self::Header, Vec<Bytes>), Refusal>;

    /// Puts back together what [`Body::split`] split. Parts that the body has no use for are
    /// refused.
    fn join(header: Self::Header, parts: Vec<Bytes>) -> Result<Self, Refusal>;
}

/// Implements [`Body`] for headers that come without parts.
macro_rules! header_only {
    ($($body:ty),* $(,)?) => {
        $(impl $crate::control::body::Body for $body {
            type Header = $body;

            fn split(self) -> Result<(Self::Header, Vec<Bytes>), Refusal> {
                Ok((self, Vec::new()))
            }

            fn join(header: Self::Header, parts: Vec<Bytes>) -> Result<Self, Refusal> {
                let [] = $crate::control::body::exactly(parts)?;
                Ok(header)
            }
        })*
    };
}
pub(super) use header_only;

header_only!(
    Empty,
    message::MarkMoved,
    message::OpenVolume,
    message::VolumeKeys,
    message::OpenedVolume,
    message::VolumeName,
    message::ChangeSettings,
    message::ChangeQuota,
    message::Contribute,
    message::Rotate,
    message::Invited,
    message::HeldReadKey,
);

/// A header with one part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WithPart<H>(pub(crate) H, pub(crate) Bytes);

impl<H: Encode<()> + for<'b> Decode<'b, ()> + Send + 'static> Body for WithPart<H> {
    type Header = H;

    fn split(self) -> Result<(H, Vec<Bytes>), Refusal> {
        Ok((self.0, vec![self.1]))
    }

    fn join(header: H, parts: Vec<Bytes>) -> Result<Self, Refusal> {
        let [part] = exactly(parts)?;
        Ok(WithPart(header, part))
    }
}

/// One block, or the signed bytes of one.
pub(crate) type Block = WithPart<Empty>;

impl Block {
    pub(crate) fn of(bytes: Bytes) -> Block {
        WithPart(Empty {}, bytes)
    }
}

/// A description for people and programs, as `--json` prints it: one part of JSON.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Json<T>(pub(crate) T);

impl<T: Serialize + DeserializeOwned + Send + 'static> Body for Json<T> {
    type Header = Empty;

    fn split(self) -> Result<(Empty, Vec<Bytes>), Refusal> {
        let json = serde_json::to_vec(&self.0)
            .map_err(|error| Refusal::new(Refusal::INTERNAL, error.to_string()))?;
        Ok((Empty {}, vec![json.into()]))
    }

    fn join(_: Empty, parts: Vec<Bytes>) -> Result<Self, Refusal> {
        let [json] = exactly(parts)?;
        serde_json::from_slice(&json).map(Json).map_err(|error| malformed(error.to_string()))
    }
}

pub(crate) fn malformed(what: impl Into<String>) -> Refusal {
    Refusal::new(Refusal::MALFORMED, what)
}

pub(super) fn exactly<const N: usize>(parts: Vec<Bytes>) -> Result<[Bytes; N], Refusal> {
    parts.try_into().map_err(|parts: Vec<_>| malformed(format!("{} parts, not {N}", parts.len())))
}
