//! The policies by which a node gives disk, and the place where each keeps its blocks, as the
//! control protocol and the node's settings have them.

use std::path::PathBuf;

use atoll_dht::Share;
use minicbor::{Decode, Encode};

/// How a node gives disk.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub enum Policy {
    /// So many bytes.
    #[n(0)]
    Fixed {
        /// What the store may take.
        #[n(0)]
        size_bytes: u64,
    },
    /// What keeps the file system of the node's directory between two watermarks.
    #[n(1)]
    Dynamic {
        /// The store grows until so much of the file system is used.
        #[cbor(n(0), with = "millionths")]
        low: Share,
        /// Beyond this blocks are given up until `low` is reached.
        #[cbor(n(1), with = "millionths")]
        high: Share,
    },
    /// All that is free of a transparent file system.
    #[n(2)]
    Transparent {
        /// A transparent directory.
        #[cbor(n(0), with = "path_bytes")]
        dir: PathBuf,
    },
}

impl Policy {
    /// The name a person types.
    pub fn name(&self) -> &'static str {
        match self {
            Policy::Fixed { .. } => "fixed",
            Policy::Dynamic { .. } => "dynamic",
            Policy::Transparent { .. } => "transparent",
        }
    }
}

/// Where blocks are or were.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) enum Place {
    #[n(0)]
    Log,
    #[n(1)]
    Files(#[cbor(n(0), with = "path_bytes")] PathBuf),
}

impl Place {
    pub(crate) fn of(policy: &Policy) -> Place {
        match policy {
            Policy::Fixed { .. } | Policy::Dynamic { .. } => Place::Log,
            Policy::Transparent { dir } => Place::Files(dir.clone()),
        }
    }

    /// The same policy with its directory under the one name it is known by: two names would
    /// be two places.
    pub(crate) fn settle(policy: &Policy) -> Policy {
        match policy {
            Policy::Transparent { dir } if dir.is_absolute() => {
                // One that is away has the name that was found when it was there.
                let found = dir.canonicalize();
                Policy::Transparent { dir: found.unwrap_or_else(|_| dir.components().collect()) }
            }
            policy => policy.clone(),
        }
    }
}

/// A share as a count of millionths.
mod millionths {
    use atoll_dht::Share;
    use minicbor::decode::{Decoder, Error as DecodeError};
    use minicbor::encode::{Encoder, Error as EncodeError, Write};

    pub(super) fn encode<C, W: Write>(
        share: &Share,
        e: &mut Encoder<W>,
        _: &mut C,
    ) -> Result<(), EncodeError<W::Error>> {
        e.u32(share.millionths())?.ok()
    }

    pub(super) fn decode<C>(d: &mut Decoder<'_>, _: &mut C) -> Result<Share, DecodeError> {
        d.u32().map(Share::from_millionths)
    }
}

/// A path as the system's bytes.
mod path_bytes {
    use std::path::{Path, PathBuf};

    use minicbor::decode::{Decoder, Error as DecodeError};
    use minicbor::encode::{Encoder, Error as EncodeError, Write};

    use crate::dir;

    pub(super) fn encode<C, W: Write>(
        path: &Path,
        e: &mut Encoder<W>,
        _: &mut C,
    ) -> Result<(), EncodeError<W::Error>> {
        e.bytes(&dir::path_to_bytes(path))?.ok()
    }

    pub(super) fn decode<C>(d: &mut Decoder<'_>, _: &mut C) -> Result<PathBuf, DecodeError> {
        Ok(dir::path_from_bytes(d.bytes()?.to_vec()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_written_down_without_loss() {
        let share = Share::from_millionths;
        for policy in [
            Policy::Fixed { size_bytes: u64::MAX },
            Policy::Dynamic { low: share(1), high: share(1_000_000) },
            Policy::Transparent { dir: "/srv/ü \u{1}".into() },
        ] {
            let bytes = minicbor::to_vec(&policy).expect("a vector");
            assert_eq!(minicbor::decode::<Policy>(&bytes).expect("own bytes"), policy);
        }
    }
}
