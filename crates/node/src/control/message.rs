//! The control protocol's messages, byte for byte in `docs/design/control.md`.
//!
//! Headers are CBOR maps with numbered fields. [`super::calls`] says which call takes and
//! answers which. Nothing here allocates more than the message's own length.

use std::fmt;

use atoll_dht::{GetError, LockRefusal, PutError};
use atoll_key::volume_secret::MoveToken;
use atoll_key::{BlockHash, InvalidBlock, Key, NotAdmitted, ReadKey, SecretKey, VolumeSecret};
use bytes::Bytes;
use minicbor::decode::{Decoder, Error as DecodeError};
use minicbor::encode::{Encoder, Error as EncodeError, Write};
use minicbor::{Decode, Encode};

use crate::policy::Policy;

/// The longest text that an error carries across, bytes.
const MAX_TOLD_BYTES: usize = 16 << 10;

/// A reply's header.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) enum Answer<T, E> {
    /// What was asked.
    #[n(0)]
    Done(#[n(0)] T),
    /// Why it could not be done.
    #[n(1)]
    Failed(#[n(0)] E),
}

impl<T, E> From<Result<T, E>> for Answer<T, E> {
    fn from(result: Result<T, E>) -> Self {
        match result {
            Ok(value) => Answer::Done(value),
            Err(error) => Answer::Failed(error),
        }
    }
}

/// Nothing, as a CBOR map that may grow fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct Empty {}

/// A join code.
#[derive(Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct Invited {
    #[n(0)]
    pub code: String,
    #[n(1)]
    pub warning: Option<String>,
}

/// Not the code, which carries the network's secret.
impl fmt::Debug for Invited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Invited").field("warning", &self.warning).finish_non_exhaustive()
    }
}

/// A volume to open, or whose directory has moved.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct OpenVolume {
    #[n(0)]
    pub name: String,
    /// Absolute path, the system's bytes.
    #[cbor(n(1), with = "minicbor::bytes")]
    pub source: Option<Vec<u8>>,
}

/// All that it takes to write a volume.
#[derive(Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct VolumeKeys {
    #[n(0)]
    pub name: String,
    /// The directory it is published from, the system's bytes.
    #[cbor(n(1), with = "minicbor::bytes")]
    pub source: Option<Vec<u8>>,
    #[cbor(n(2), with = "minicbor::bytes")]
    pub seed: [u8; 32],
    #[cbor(n(3), with = "minicbor::bytes")]
    pub read_key: Option<[u8; 32]>,
    /// Of the move to another node.
    #[cbor(n(4), with = "minicbor::bytes")]
    pub token: Option<MoveToken>,
}

/// Not the keys: calls end up in logs.
impl fmt::Debug for VolumeKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VolumeKeys").field("name", &self.name).finish_non_exhaustive()
    }
}

impl From<VolumeSecret> for VolumeKeys {
    fn from(secret: VolumeSecret) -> VolumeKeys {
        VolumeKeys {
            name: secret.name,
            source: secret.source,
            seed: secret.key.seed(),
            read_key: secret.read_key.map(|key| *key.bytes()),
            token: secret.token,
        }
    }
}

impl From<VolumeKeys> for VolumeSecret {
    fn from(keys: VolumeKeys) -> VolumeSecret {
        VolumeSecret {
            key: SecretKey::from_seed(&keys.seed),
            read_key: keys.read_key.map(ReadKey::from_bytes),
            name: keys.name,
            source: keys.source,
            token: keys.token,
        }
    }
}

/// A volume to mark as moved to another node, or as not moved.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct MarkMoved {
    #[n(0)]
    pub name: String,
    #[n(1)]
    pub is_moved: bool,
}

/// A volume published from this node.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct VolumeName {
    #[n(0)]
    pub name: String,
}

/// What to change of the settings: absent fields stay as they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct ChangeSettings {
    /// Ring positions; 0 for `auto`.
    #[n(0)]
    pub virtual_servers: Option<u16>,
    #[n(1)]
    pub cache_bytes: Option<u64>,
}

/// How disk is to be given from now on.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct Contribute {
    #[n(0)]
    pub policy: Policy,
}

/// A replacement of the network's secret, which also removes nodes.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct Rotate {
    /// Public keys of 32 bytes each, one behind the other.
    #[cbor(n(0), with = "minicbor::bytes")]
    pub remove: Vec<u8>,
    /// How long the former secret stays good.
    #[n(1)]
    pub overlap_secs: u64,
}

/// What to change of the quotas: absent fields stay as they are. Also kept in the settings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct ChangeQuota {
    /// The share of one publishing node, in millionths; 0 to follow the network's size.
    #[n(0)]
    pub key_share: Option<u32>,
    /// The share of one address, likewise.
    #[n(1)]
    pub address_share: Option<u32>,
    /// How many nodes' worth of storage a publisher may use in the whole network.
    #[n(2)]
    pub publisher_nodes: Option<u32>,
    /// The least share, in millionths, however large the network is.
    #[n(3)]
    pub floor_share: Option<u32>,
}

/// An opened volume.
#[derive(Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct OpenedVolume {
    #[cbor(n(0), with = "minicbor::bytes")]
    pub seed: [u8; 32],
    #[n(1)]
    pub is_new: bool,
    /// How long its blocks are kept at a time, seconds; `None` for as long as the network keeps blocks.
    #[n(2)]
    pub lease_secs: Option<u64>,
}

/// Not the key: answers end up in logs.
impl fmt::Debug for OpenedVolume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenedVolume").field("is_new", &self.is_new).finish_non_exhaustive()
    }
}

/// The read key of a volume, if it is encrypted.
#[derive(Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct HeldReadKey {
    #[cbor(n(0), with = "minicbor::bytes")]
    pub read_key: Option<[u8; 32]>,
}

/// Not the key: answers end up in logs.
impl fmt::Debug for HeldReadKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeldReadKey").field("is_some", &self.read_key.is_some()).finish()
    }
}

/// Hashes to add to a manifest: the part has 32 bytes for each, and they follow the first
/// `offset` of the session. Adding the same again changes nothing, so a call may be repeated.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct KeepAdd {
    #[n(0)]
    pub volume: String,
    /// Chosen at random by the client.
    #[n(1)]
    pub session: u64,
    /// Hashes added before, in calls that were answered.
    #[n(2)]
    pub offset: u64,
}

/// A manifest to put in place of the former; the part is the volume's signed root.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct KeepCommit {
    #[n(0)]
    pub volume: String,
    #[n(1)]
    pub session: u64,
    /// How many hashes the manifest has.
    #[n(2)]
    pub count: u64,
    /// For how long these were put and are to be renewed, seconds; `None` for as long as those before.
    #[n(3)]
    pub lease_secs: Option<u64>,
}

/// A change that does not fit this node.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) enum Unfit {
    /// Why, for people.
    #[n(0)]
    Unfit(#[n(0)] String),
}

impl From<String> for Unfit {
    fn from(why: String) -> Unfit {
        Unfit::Unfit(cut(why))
    }
}

/// The error of calls that have none of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Never {}

impl<C> Encode<C> for Never {
    fn encode<W: Write>(&self, _: &mut Encoder<W>, _: &mut C) -> Result<(), EncodeError<W::Error>> {
        match *self {}
    }
}

impl<C> Decode<'_, C> for Never {
    fn decode(_: &mut Decoder<'_>, _: &mut C) -> Result<Never, DecodeError> {
        Err(DecodeError::message("this call has no error of its own"))
    }
}

/// [`GetError`] on the wire.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) enum GetFailed {
    #[n(0)]
    NotFound {
        #[cbor(n(0), with = "minicbor::bytes")]
        key: [u8; 64],
        #[n(1)]
        told: String,
    },
    #[n(1)]
    Unavailable {
        #[cbor(n(0), with = "minicbor::bytes")]
        key: [u8; 64],
        #[n(1)]
        told: String,
    },
}

/// [`PutError`] on the wire.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) enum PutFailed {
    #[n(0)]
    Full(#[n(0)] String),
    #[n(1)]
    Unavailable(#[n(0)] String),
    #[n(2)]
    Superseded {
        #[n(0)]
        offered: u64,
        #[n(1)]
        held: u64,
    },
    #[n(3)]
    Invalid(#[n(0)] Invalid),
    #[n(4)]
    OverQuota {
        #[n(0)]
        used_bytes: u64,
        #[n(1)]
        allowed_bytes: u64,
        #[n(2)]
        who: String,
    },
    #[n(5)]
    NotAdmitted(#[n(0)] Refused),
}

/// [`NotAdmitted`] on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) enum Refused {
    #[n(0)]
    Outdated,
    #[n(1)]
    Clock {
        #[n(0)]
        time_ms: u64,
        #[n(1)]
        now_ms: u64,
    },
    #[n(2)]
    Expired(#[n(0)] u64),
}

impl From<NotAdmitted> for Refused {
    fn from(why: NotAdmitted) -> Refused {
        match why {
            NotAdmitted::Outdated => Refused::Outdated,
            NotAdmitted::Clock { time_ms, now_ms } => Refused::Clock { time_ms, now_ms },
            NotAdmitted::Expired { not_after_secs } => Refused::Expired(not_after_secs),
        }
    }
}

impl From<Refused> for NotAdmitted {
    fn from(why: Refused) -> NotAdmitted {
        match why {
            Refused::Outdated => NotAdmitted::Outdated,
            Refused::Clock { time_ms, now_ms } => NotAdmitted::Clock { time_ms, now_ms },
            Refused::Expired(not_after_secs) => NotAdmitted::Expired { not_after_secs },
        }
    }
}

/// [`InvalidBlock`] on the wire.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) enum Invalid {
    #[n(0)]
    TooLong(#[n(0)] u64),
    #[n(1)]
    WrongHash,
    #[n(2)]
    Malformed(#[n(0)] String),
    #[n(3)]
    WrongSignature,
    #[n(4)]
    UnknownKind(#[n(0)] u8),
}

/// What `SignedBlock::decode` finds wrong; other texts become the last.
const MALFORMATIONS: [&str; 6] = [
    "too short",
    "no magic",
    "unknown form",
    "name too long",
    "a tombstone has no payload",
    "see the node's log",
];

impl From<InvalidBlock> for Invalid {
    fn from(error: InvalidBlock) -> Invalid {
        match error {
            InvalidBlock::TooLong(len_bytes) => Invalid::TooLong(len_bytes as u64),
            InvalidBlock::WrongHash => Invalid::WrongHash,
            InvalidBlock::Malformed(what) => Invalid::Malformed(what.to_owned()),
            InvalidBlock::WrongSignature => Invalid::WrongSignature,
            InvalidBlock::UnknownKind(number) => Invalid::UnknownKind(number),
        }
    }
}

impl From<Invalid> for InvalidBlock {
    fn from(error: Invalid) -> InvalidBlock {
        match error {
            Invalid::TooLong(len_bytes) => {
                InvalidBlock::TooLong(usize::try_from(len_bytes).unwrap_or(usize::MAX))
            }
            Invalid::WrongHash => InvalidBlock::WrongHash,
            Invalid::Malformed(what) => {
                let known = MALFORMATIONS.into_iter().find(|known| *known == what);
                InvalidBlock::Malformed(known.unwrap_or(MALFORMATIONS[MALFORMATIONS.len() - 1]))
            }
            Invalid::WrongSignature => InvalidBlock::WrongSignature,
            Invalid::UnknownKind(number) => InvalidBlock::UnknownKind(number),
        }
    }
}

impl GetFailed {
    /// What is sent of a block, or why nothing is. A tombstone is sent as other blocks are: whoever gets it
    /// sees that it is one.
    pub(crate) fn unless_sent(found: Result<Bytes, GetError>) -> Result<Bytes, GetFailed> {
        found.or_else(|error| match error {
            GetError::Removed { tombstone, .. } => Ok(*tombstone),
            GetError::NotFound { key, told } => {
                Err(GetFailed::NotFound { key: key.0, told: cut(told) })
            }
            GetError::Unavailable { key, told } => {
                Err(GetFailed::Unavailable { key: key.0, told: cut(told) })
            }
        })
    }
}

impl From<GetFailed> for GetError {
    fn from(error: GetFailed) -> GetError {
        match error {
            GetFailed::NotFound { key, told } => GetError::NotFound { key: Key(key), told },
            GetFailed::Unavailable { key, told } => GetError::Unavailable { key: Key(key), told },
        }
    }
}

impl PutFailed {
    /// With a text of at most so many bytes, and an ellipsis if that is not all.
    pub(crate) fn cut_to(error: PutError, limit_bytes: usize) -> PutFailed {
        let cut = |told| cut_to(told, limit_bytes);
        match error {
            PutError::Full(told) => PutFailed::Full(cut(told)),
            PutError::Unavailable(told) => PutFailed::Unavailable(cut(told)),
            PutError::Superseded { offered, held } => PutFailed::Superseded { offered, held },
            PutError::Invalid(error) => PutFailed::Invalid(error.into()),
            PutError::NotAdmitted(why) => PutFailed::NotAdmitted(why.into()),
            PutError::OverQuota { used_bytes, allowed_bytes, who } => {
                PutFailed::OverQuota { used_bytes, allowed_bytes, who: cut(who) }
            }
        }
    }
}

impl From<PutFailed> for PutError {
    fn from(error: PutFailed) -> PutError {
        match error {
            PutFailed::Full(told) => PutError::Full(told),
            PutFailed::Unavailable(told) => PutError::Unavailable(told),
            PutFailed::Superseded { offered, held } => PutError::Superseded { offered, held },
            PutFailed::Invalid(error) => PutError::Invalid(error.into()),
            PutFailed::NotAdmitted(why) => PutError::NotAdmitted(why.into()),
            PutFailed::OverQuota { used_bytes, allowed_bytes, who } => {
                PutError::OverQuota { used_bytes, allowed_bytes, who }
            }
        }
    }
}

/// A refusal whose text fits into a header.
pub(crate) fn cut_refusal(refusal: LockRefusal) -> LockRefusal {
    match refusal {
        LockRefusal::NoMajority(told) => LockRefusal::NoMajority(cut(told)),
        short => short,
    }
}

/// Text that fits into a header.
fn cut(text: String) -> String {
    cut_to(text, MAX_TOLD_BYTES)
}

fn cut_to(mut text: String, limit_bytes: usize) -> String {
    if text.len() > limit_bytes {
        let end = (0..=limit_bytes).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
        text.truncate(end);
        text.push('…');
    }
    text
}

/// Hashes, one behind the other.
pub(crate) fn join_hashes<'a>(hashes: impl Iterator<Item = &'a BlockHash>) -> Vec<u8> {
    hashes.flat_map(|hash| hash.0).collect()
}

pub(crate) use atoll_net::header::{from_header as decode, to_header as encode};

#[cfg(test)]
mod tests {

    use super::*;
    use crate::control::blocks;

    #[test]
    fn secrets_are_not_printed() {
        let shown = format!("{:?}", HeldReadKey { read_key: Some([77; 32]) });
        assert!(!shown.contains("77") && shown.contains("true"), "{shown}");
        let keys = VolumeKeys {
            name: "docs".into(),
            source: None,
            seed: [77; 32],
            read_key: Some([77; 32]),
            token: Some([77; 16]),
        };
        let shown = format!(
            "{keys:?} {:?}",
            OpenedVolume { seed: [77; 32], is_new: true, lease_secs: None }
        );
        assert!(!shown.contains("77") && shown.contains("docs"), "{shown}");
        let invited = Invited { code: "atoll-join:secret".into(), warning: Some("lo".into()) };
        let shown = format!("{invited:?}");
        assert!(!shown.contains("secret") && shown.contains("lo"), "{shown}");
    }

    #[test]
    fn errors_cross_the_wire_without_loss() {
        let key = Key([9; 64]);
        for error in [
            GetError::NotFound { key, told: "a: no, b: no".into() },
            GetError::Unavailable { key, told: String::new() },
        ] {
            let failed = GetFailed::unless_sent(Err(error.clone())).expect_err("no block");
            let header = encode(&Answer::<Empty, GetFailed>::Failed(failed));
            let Ok(Answer::<Empty, GetFailed>::Failed(back)) = decode(&header) else {
                panic!("{error} did not come back");
            };
            assert_eq!(GetError::from(back), error);
        }
        for error in [
            PutError::Full("2 of 3".into()),
            PutError::Unavailable("nobody".into()),
            PutError::Superseded { offered: 3, held: u64::MAX },
            PutError::OverQuota { used_bytes: 9, allowed_bytes: 8, who: "node 7".into() },
            PutError::NotAdmitted(NotAdmitted::Outdated),
            PutError::NotAdmitted(NotAdmitted::Clock { time_ms: 1, now_ms: 2 }),
            PutError::NotAdmitted(NotAdmitted::Expired { not_after_secs: 3 }),
            PutError::Invalid(InvalidBlock::TooLong(7)),
            PutError::Invalid(InvalidBlock::WrongHash),
            PutError::Invalid(InvalidBlock::Malformed("unknown form")),
            PutError::Invalid(InvalidBlock::WrongSignature),
            PutError::Invalid(InvalidBlock::UnknownKind(200)),
        ] {
            let header = encode(&PutFailed::cut_to(error.clone(), MAX_TOLD_BYTES));
            assert_eq!(PutError::from(decode::<PutFailed>(&header).expect("own bytes")), error);
        }
    }

    #[test]
    fn every_malformation_of_a_signed_block_is_known_here() {
        let good = atoll_key::SignedBlock::sign(
            &atoll_key::SecretKey::from_seed(&[1; 32]),
            b"",
            1,
            b"payload",
        );
        let changed = |at: usize, byte: u8| {
            let mut bytes = good.bytes().to_vec();
            bytes[at] = byte;
            Bytes::from(bytes)
        };
        let wrong = [
            Bytes::from_static(b"short"),
            changed(0, 0),
            changed(4, 9),
            changed(5, 255),
            changed(4, 2),
        ];
        for bytes in wrong {
            let error = atoll_key::SignedBlock::decode(&bytes).expect_err("malformed");
            assert!(matches!(error, InvalidBlock::Malformed(_)), "{error:?}");
            assert_eq!(InvalidBlock::from(Invalid::from(error.clone())), error);
        }
    }

    #[test]
    fn a_long_story_is_cut_to_fit() {
        let told = "ä".repeat(MAX_TOLD_BYTES);
        let error = GetError::NotFound { key: Key::MIN, told };
        let Err(GetFailed::NotFound { told, .. }) = GetFailed::unless_sent(Err(error)) else {
            panic!("another error came out");
        };
        assert!(told.len() <= MAX_TOLD_BYTES + 4 && told.ends_with('…'));
    }

    #[test]
    fn hostile_headers_are_refused() {
        let check = |bytes: &[u8]| {
            assert!(decode::<blocks::Get>(bytes).is_err(), "{bytes:02x?}");
            assert!(decode::<blocks::Renew>(bytes).is_err(), "{bytes:02x?}");
            assert!(decode::<OpenVolume>(bytes).is_err(), "{bytes:02x?}");
            assert!(decode::<VolumeKeys>(bytes).is_err(), "{bytes:02x?}");
            assert!(decode::<KeepAdd>(bytes).is_err(), "{bytes:02x?}");
            assert!(decode::<KeepCommit>(bytes).is_err(), "{bytes:02x?}");
            assert!(decode::<Answer<Empty, GetFailed>>(bytes).is_err(), "{bytes:02x?}");
        };
        check(b"");
        check(b"\xa1");
        check(b"\xa1\x00\x5b\xff\xff\xff\xff\xff\xff\xff\xff"); // 2^64 - 1 bytes
        check(b"\xbb\xff\xff\xff\xff\xff\xff\xff\xff"); // 2^64 - 1 fields
        check(b"\xa1\x00\x41x\x00"); // wrong length and a byte behind it
        check(&[0x81; 10_000]); // nested 10,000 deep
        check(&[0xff; 64]);
    }

    #[test]
    fn all_prefixes_of_a_message_are_refused() {
        let whole = encode(&KeepAdd { volume: "docs".into(), session: 1 << 40, offset: 12 });
        assert!(decode::<KeepAdd>(&whole).is_ok());
        for end in 0..whole.len() {
            assert!(decode::<KeepAdd>(&whole[..end]).is_err(), "{end}");
        }
        let trailing = [&whole[..], b"\x00"].concat();
        assert!(decode::<KeepAdd>(&trailing).is_err());
    }
}
