//! The messages of the calls for blocks: what [`atoll_dht::Blocks`] takes and gives, as headers.

use atoll_dht::rpc::{Lock, ReleaseBlocks};
use atoll_dht::{LeaseRenewal, LockGrant, NewBlock, PutError, Renewed, RingRoom, Wanted};
use atoll_key::{BlockId, BlockKind, Key};
use atoll_net::Refusal;
use atoll_net::header::Capped;
use bytes::Bytes;
use minicbor::{Decode, Encode};

use super::body::{Body, header_only, malformed};
use super::message::{Empty, PutFailed};

/// The most blocks in one call.
const MAX_BLOCKS: usize = 1024;
/// The most errors in one reply. In the place of more, the last says that there are.
const MAX_ERRORS: usize = 200;
/// The longest text of an error among others, bytes: all errors must fit a header.
const MAX_ERROR_BYTES: usize = 1 << 10;

/// A block's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct WireId {
    #[n(0)]
    kind: u8,
    #[cbor(n(1), with = "minicbor::bytes")]
    key: [u8; 64],
}

impl From<BlockId> for WireId {
    fn from(BlockId { kind, key }: BlockId) -> WireId {
        WireId { kind: kind as u8, key: key.0 }
    }
}

impl TryFrom<WireId> for BlockId {
    type Error = Refusal;

    fn try_from(WireId { kind, key }: WireId) -> Result<BlockId, Refusal> {
        let kind = BlockKind::from_u8(kind).map_err(|error| malformed(error.to_string()))?;
        Ok(BlockId { kind, key: Key(key) })
    }
}

/// A block to be fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct Get {
    #[n(0)]
    pub id: WireId,
    /// The lowest version that will do; absent for the newest.
    #[n(1)]
    pub least: Option<u64>,
}

impl Get {
    pub(crate) fn new(id: BlockId, wanted: Wanted) -> Get {
        let least = match wanted {
            Wanted::Newest => None,
            Wanted::AtLeast(version) => Some(version),
        };
        Get { id: id.into(), least }
    }

    pub(crate) fn wanted(&self) -> Wanted {
        self.least.map_or(Wanted::Newest, Wanted::AtLeast)
    }
}

/// A block to be watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct Watch {
    #[n(0)]
    pub id: WireId,
    /// The version that the caller has seen.
    #[n(1)]
    pub seen: u64,
}

/// A key, whose replica set is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct AskSameSet {
    #[cbor(n(0), with = "minicbor::bytes")]
    pub key: [u8; 64],
}

/// The last of the keys that have the same replica set, if it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct SameSet {
    #[cbor(n(0), with = "minicbor::bytes")]
    pub until: Option<[u8; 64]>,
}

/// How much room the ring has, if that is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct Room {
    #[n(0)]
    pub total_bytes: Option<u64>,
    #[n(1)]
    pub free_bytes: Option<u64>,
    #[n(2)]
    pub available_bytes: Option<u64>,
}

impl From<Option<RingRoom>> for Room {
    fn from(room: Option<RingRoom>) -> Room {
        Room {
            total_bytes: room.map(|room| room.total_bytes),
            free_bytes: room.map(|room| room.free_bytes),
            available_bytes: room.map(|room| room.available_bytes),
        }
    }
}

impl From<Room> for Option<RingRoom> {
    fn from(room: Room) -> Option<RingRoom> {
        Some(RingRoom {
            total_bytes: room.total_bytes?,
            free_bytes: room.free_bytes?,
            available_bytes: room.available_bytes?,
        })
    }
}

/// A block to be stored; the part of the same number has its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct PutHeader {
    #[n(0)]
    id: WireId,
    /// Seconds; absent for the network's own lease.
    #[n(1)]
    lease_secs: Option<u64>,
}

/// Blocks to be stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BlockList(pub(crate) Vec<NewBlock>);

impl Body for BlockList {
    type Header = Capped<PutHeader, MAX_BLOCKS>;

    fn split(self) -> Result<(Self::Header, Vec<Bytes>), Refusal> {
        let header =
            |block: &NewBlock| PutHeader { id: block.id.into(), lease_secs: block.lease_secs };
        let headers: Vec<PutHeader> = self.0.iter().map(header).collect();
        Ok((headers.into(), self.0.into_iter().map(|block| block.bytes).collect()))
    }

    fn join(headers: Self::Header, parts: Vec<Bytes>) -> Result<Self, Refusal> {
        if headers.0.len() != parts.len() {
            let (names, parts) = (headers.0.len(), parts.len());
            return Err(malformed(format!("{names} names for {parts} blocks")));
        }
        let block = |(header, bytes): (PutHeader, Bytes)| {
            Ok(NewBlock { id: header.id.try_into()?, bytes, lease_secs: header.lease_secs })
        };
        headers.0.into_iter().zip(parts).map(block).collect::<Result<_, _>>().map(BlockList)
    }
}

/// Leases to be extended.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct Renew {
    #[n(0)]
    ids: Capped<WireId, MAX_BLOCKS>,
    #[n(1)]
    lease_secs: Option<u64>,
    #[n(2)]
    will_be_put: bool,
}

impl From<LeaseRenewal> for Renew {
    fn from(LeaseRenewal { ids, lease_secs, will_be_put }: LeaseRenewal) -> Renew {
        let ids: Vec<WireId> = ids.into_iter().map(WireId::from).collect();
        Renew { ids: ids.into(), lease_secs, will_be_put }
    }
}

impl TryFrom<Renew> for LeaseRenewal {
    type Error = Refusal;

    fn try_from(Renew { ids, lease_secs, will_be_put }: Renew) -> Result<LeaseRenewal, Refusal> {
        let ids = ids.0.into_iter().map(BlockId::try_from).collect::<Result<_, _>>()?;
        Ok(LeaseRenewal { ids, lease_secs, will_be_put })
    }
}

/// Blocks whose replicas are asked what they hold.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct AskReplicas {
    #[n(0)]
    pub ids: Capped<WireId, MAX_BLOCKS>,
}

/// A mutable block, and the lock that stands where it does, whose users are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct AskUses {
    #[n(0)]
    pub id: WireId,
    #[cbor(n(1), with = "minicbor::bytes")]
    pub lock: [u8; 64],
}

/// What became of each block of a call.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct Outcomes {
    /// A byte for each block: 0 for stored or held, 1 for lacking, 2 + n for the n-th error.
    #[cbor(n(0), with = "minicbor::bytes")]
    each: Vec<u8>,
    #[n(1)]
    errors: Capped<PutFailed, MAX_ERRORS>,
}

header_only!(
    Get,
    Watch,
    AskSameSet,
    SameSet,
    Room,
    Renew,
    Outcomes,
    Lock,
    LockGrant,
    AskReplicas,
    AskUses,
    ReleaseBlocks
);

const HELD: u8 = 0;
const LACKING: u8 = 1;
const FIRST_ERROR: usize = 2;

impl Outcomes {
    pub(crate) fn of_put(outcomes: Vec<Result<(), PutError>>) -> Outcomes {
        Outcomes::new(outcomes.into_iter().map(|outcome| outcome.map(|()| HELD)))
    }

    pub(crate) fn of_renewal(outcomes: Vec<Result<Renewed, PutError>>) -> Outcomes {
        let byte = |renewed| match renewed {
            Renewed::Held => HELD,
            Renewed::Lacking => LACKING,
        };
        Outcomes::new(outcomes.into_iter().map(|outcome| outcome.map(byte)))
    }

    fn new(outcomes: impl Iterator<Item = Result<u8, PutError>>) -> Outcomes {
        let (mut each, mut errors) = (Vec::new(), Vec::<PutFailed>::new());
        for outcome in outcomes {
            let error = match outcome {
                Ok(byte) => {
                    each.push(byte);
                    continue;
                }
                Err(error) => PutFailed::cut_to(error, MAX_ERROR_BYTES),
            };
            let place = errors.iter().position(|known| *known == error).unwrap_or_else(|| {
                if errors.len() < MAX_ERRORS {
                    let more = || PutFailed::Unavailable("further blocks failed as well".into());
                    errors.push(if errors.len() == MAX_ERRORS - 1 { more() } else { error });
                }
                errors.len() - 1
            });
            each.push(u8::try_from(FIRST_ERROR + place).expect("there are at most 200 errors"));
        }
        Outcomes { each, errors: errors.into() }
    }

    /// What became of `count` blocks that were put.
    ///
    /// # Errors
    /// If that is not what this says.
    pub(crate) fn put(self, count: usize) -> Result<Vec<Result<(), PutError>>, Refusal> {
        let stored = |outcome| match outcome {
            Ok(Renewed::Lacking) => Err(malformed("a block that was put is lacking")),
            outcome => Ok(outcome.map(drop)),
        };
        self.renewal(count)?.into_iter().map(stored).collect()
    }

    /// The same for leases that were to be extended.
    ///
    /// # Errors
    /// The same.
    pub(crate) fn renewal(self, count: usize) -> Result<Vec<Result<Renewed, PutError>>, Refusal> {
        let outcome = |byte: &u8| match *byte {
            HELD => Ok(Ok(Renewed::Held)),
            LACKING => Ok(Ok(Renewed::Lacking)),
            error => {
                let error = self.errors.0.get(usize::from(error) - FIRST_ERROR);
                let error = error.ok_or_else(|| malformed("an error that is not there"))?;
                Ok(Err(error.clone().into()))
            }
        };
        let outcomes: Vec<_> = self.each.iter().map(outcome).collect::<Result<_, Refusal>>()?;
        match outcomes.len() == count {
            true => Ok(outcomes),
            false => Err(malformed(format!("{} outcomes of {count} blocks", outcomes.len()))),
        }
    }
}

/// The newer version of a watched block, if there is one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Changed(pub(crate) Option<Bytes>);

impl Body for Changed {
    type Header = Empty;

    fn split(self) -> Result<(Empty, Vec<Bytes>), Refusal> {
        Ok((Empty {}, self.0.into_iter().collect()))
    }

    fn join(_: Empty, parts: Vec<Bytes>) -> Result<Self, Refusal> {
        let mut parts = parts.into_iter();
        match (parts.next(), parts.next()) {
            (block, None) => Ok(Changed(block)),
            (_, Some(_)) => Err(malformed("several blocks where one was watched")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::message::{decode, encode};

    #[test]
    fn each_outcome_comes_across_and_equal_errors_once() {
        let (full, away) =
            (PutError::Full("node 7".into()), PutError::Unavailable("no answer".into()));
        let outcomes = vec![
            Ok(Renewed::Held),
            Err(full.clone()),
            Ok(Renewed::Lacking),
            Err(away),
            Err(full.clone()),
        ];
        let wire = Outcomes::of_renewal(outcomes.clone());
        assert_eq!(wire.errors.0.len(), 2);
        let back: Outcomes = decode(&encode(&wire)).expect("own bytes");
        assert_eq!(back.renewal(5), Ok(outcomes));
        let wire = Outcomes::of_put(vec![Err(full.clone()), Ok(())]);
        assert_eq!(wire.clone().put(2), Ok(vec![Err(full), Ok(())]));
        assert!(wire.put(3).is_err(), "an outcome is missing");
        assert!(Outcomes { each: vec![LACKING], errors: Vec::new().into() }.put(1).is_err());
        let forged = Outcomes { each: vec![2], errors: Vec::new().into() };
        assert!(forged.put(1).is_err(), "an error that is not there");
    }

    #[test]
    fn however_many_blocks_fail_in_their_own_way_the_reply_fits_a_header() {
        let failed = |n| Err(PutError::Unavailable(format!("{n} {}", "ä".repeat(4000))));
        let outcomes: Vec<_> = (0..MAX_BLOCKS).map(failed).collect();
        let wire = Outcomes::of_put(outcomes);
        assert!(encode(&wire).len() < atoll_net::MAX_HEADER_BYTES);
        let back = wire.put(MAX_BLOCKS).expect("an outcome for each");
        assert!(back.iter().all(Result::is_err));
        assert_ne!(back[0], back[1]);
        let more = Err(PutError::Unavailable("further blocks failed as well".into()));
        assert_ne!(back[MAX_ERRORS - 2], more);
        assert!(back[MAX_ERRORS - 1..].iter().all(|outcome| *outcome == more));
    }
}
