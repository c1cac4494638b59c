//! Extending leases: the headers of `RENEW`, and the short names it has for blocks.

use atoll_key::{Key, KeyRange};
use minicbor::{Decode, Encode};

use super::encoding::Packed;
use super::receipt::WireReceipt;
use super::{MAX_KEYS, Message, OverQuota, encoding};

/// Bytes of a name: enough to make a second block with the same name infeasible.
pub const NAME_BYTES: usize = 16;

/// The first bytes of a hashed key: a publisher that renews a large volume names millions of
/// blocks, and nodes know the rest of the keys of those they hold.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Name(pub(crate) [u8; NAME_BYTES]);

impl Name {
    /// The name of a hashed key.
    pub fn of(key: &Key) -> Name {
        Name(key.0[..NAME_BYTES].try_into().expect("16 of 64 bytes"))
    }

    /// The first key with this name. No node stands between it and the key that is meant, so
    /// both have the same root; and it has the same tag in a receipt.
    pub fn first(&self) -> Key {
        self.padded(0)
    }

    /// All keys with this name.
    pub fn range(&self) -> KeyRange {
        KeyRange::new(self.first().previous(), self.padded(0xff))
    }

    fn padded(&self, with: u8) -> Key {
        let mut key = [with; 64];
        key[..NAME_BYTES].copy_from_slice(&self.0);
        Key(key)
    }
}

impl Packed for Name {
    const BYTES: usize = NAME_BYTES;
    const MAX: usize = MAX_KEYS;

    fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.0);
    }

    fn read(bytes: &[u8]) -> Option<Name> {
        bytes.try_into().ok().map(Name)
    }
}

/// `RENEW`: extend leases.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Renew {
    /// Which blocks.
    #[cbor(n(0), with = "encoding::packed")]
    pub names: Vec<Name>,
    /// Seconds from now until the lease should end at the earliest.
    #[n(1)]
    pub lease_secs: u64,
    /// True: renew and tell the replicas, as root. False: only renew.
    #[n(2)]
    pub as_root: bool,
    /// The publisher's; without one no lease is extended.
    #[n(3)]
    pub receipt: Option<WireReceipt>,
    /// The caller puts what is lacking. The root may say so of a block without asking its replicas.
    #[n(4)]
    pub will_be_put: Option<bool>,
}

impl Renew {
    /// See the field. Older nodes do not send it.
    pub(crate) fn will_be_put(&self) -> bool {
        self.will_be_put == Some(true)
    }
}

/// The answer to a [`Renew`].
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct RenewReply {
    /// One for each name, a byte each.
    #[cbor(n(0), with = "encoding::packed")]
    pub statuses: Vec<RenewStatus>,
    /// Of the first key that is [`RenewStatus::OverQuota`]: why.
    #[n(1)]
    pub over: Option<OverQuota>,
}

/// What became of the lease of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum RenewStatus {
    /// The block is not held; as root: a majority of the replica set lacks it.
    Lacking = 0,
    /// It is held; as root: by a majority of the replica set.
    Held = 1,
    /// This node is not the key's root.
    NotRoot = 2,
    /// This root cannot tell: it holds the block and a majority does not, or it does not and too
    /// few others answered.
    Undecided = 3,
    /// Held for another publisher, and the caller's has no room for it.
    OverQuota = 4,
    /// Held, and less than half of the lease was left before this request. Never as root.
    Late = 5,
}

impl RenewStatus {
    /// Whether a replica that says this has the block.
    pub(crate) fn is_held(self) -> bool {
        matches!(self, RenewStatus::Held | RenewStatus::OverQuota | RenewStatus::Late)
    }
}

impl Packed for RenewStatus {
    const BYTES: usize = 1;
    const MAX: usize = MAX_KEYS;

    fn write(&self, out: &mut Vec<u8>) {
        out.push(*self as u8);
    }

    fn read(bytes: &[u8]) -> Option<RenewStatus> {
        Some(match bytes[0] {
            0 => RenewStatus::Lacking,
            1 => RenewStatus::Held,
            2 => RenewStatus::NotRoot,
            4 => RenewStatus::OverQuota,
            5 => RenewStatus::Late,
            // A number that this version does not know says nothing of the block.
            _ => RenewStatus::Undecided,
        })
    }
}

impl Message for Renew {
    fn entries(&self) -> usize {
        self.names.len()
    }

    fn is_signed_by_publisher(&self) -> bool {
        self.receipt.is_some()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{from_header, to_header};
    use super::*;

    proptest! {
        #[test]
        fn a_name_is_that_of_its_keys_and_of_no_others(hash: [u8; 32], other: [u8; 32]) {
            let key = Key::hashed(hash);
            let range = Name::of(&key).range();
            prop_assert!(range.contains(&key) && range.contains(&Name::of(&key).first()));
            let is_its = range.contains(&Key::hashed(other));
            prop_assert_eq!(is_its, hash[..16] == other[..16]);
        }
    }

    #[test]
    fn a_list_that_is_too_long_or_ends_within_a_name_is_refused() {
        // Fields 0 to 2; the list is a byte string with a length of two bytes.
        let message = |bytes: usize| {
            let len = u16::try_from(bytes).expect("short").to_be_bytes();
            let head = [0xa3, 0x00, 0x59, len[0], len[1]];
            let mut all = [&head[..], &vec![7; bytes]].concat();
            all.extend_from_slice(&[0x01, 0x05, 0x02, 0xf4]);
            from_header::<Renew>(&all)
        };
        let renew = message(32).expect("well-formed");
        assert_eq!(renew.names, [Name([7; 16]); 2]);
        assert_eq!(from_header(&to_header(&renew)), Ok(renew));
        for bytes in [1, 15, 17, 16 * (MAX_KEYS + 1)] {
            assert!(message(bytes).is_err(), "{bytes}");
        }
        assert!(message(16 * MAX_KEYS).is_ok());
    }
}
