//! Whom blocks are charged to, as 32 bytes beside each in the store.
//!
//! | bytes | of a publisher | of a carrier (see `copies`) |
//! |---|---|---|
//! | 16 | the first 16 of its key | `ff ff ff ff` and the first 12 of its key |
//! | 16 | its address as IPv6, bits beyond those charged as one being zero | the same with a bit set that no address has |
//!
//! All zeros are nobody. Bits set to tell these apart: in an IPv4 address the lowest of byte
//! 9, in an IPv6 address, of which at most 64 bits are charged, the lowest two of byte 15.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

use atoll_key::PeerId;
use atoll_store::Owner;

/// The key of a carrier begins with this, and goes on with that of the node.
const CARRIER_MARK: [u8; 4] = [0xff; 4];

/// The account that is charged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Who {
    /// Nobody: blocks from before quotas.
    Nobody,
    /// A publishing node, by the first 16 bytes of its key; of a carrier 4 marks and 12.
    Key([u8; 16]),
    /// An address, its bits beyond those charged as one being zero.
    Address(IpAddr),
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Who::Nobody => f.write_str("nobody"),
            Who::Key(key) => {
                let from = if key[..4] == CARRIER_MARK { 4 } else { 0 };
                key[from..from + 8].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
            Who::Address(ip) => ip.fmt(f),
        }
    }
}

/// The part of an address that is charged as one: of IPv6 the first 64 bits, since a host with one
/// address there has its whole /64.
fn charged(ip: IpAddr) -> [u8; 16] {
    match ip.to_canonical() {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => {
            let mut charged = ip.octets();
            charged[8..].copy_from_slice(&[0, 0, 0, 0, 0, 0, 0, PRESENT]);
            charged
        }
    }
}

/// Whom a publisher's blocks are charged to.
pub(crate) fn owner_of(id: &PeerId, ip: IpAddr) -> Owner {
    let publisher = id.0[..16].try_into().expect("16 of 32 bytes");
    Owner { publisher, ip: charged(ip) }
}

/// The account of copies that no two nodes vouch for: that of the node that brought them, apart
/// from what it publishes. No publisher can have such an address: the bit set is one that
/// [`charged`] clears.
pub(crate) fn carrier(id: &PeerId, ip: IpAddr) -> Owner {
    let mut owner = owner_of(id, ip);
    owner.publisher[..4].copy_from_slice(&CARRIER_MARK);
    owner.publisher[4..].copy_from_slice(&id.0[..12]);
    owner.ip[carrier_byte(&owner.ip)] |= 1;
    owner
}

/// Whether a block charged so is a carrier's.
pub(crate) fn is_carrier(owner: &Owner) -> bool {
    unmark(owner.ip).1
}

const MAPPED: [u8; 2] = [0xff; 2];
/// Set in what is charged of an IPv6 address, so that no address is all zeros as nobody is.
const PRESENT: u8 = 2;

/// The byte of an address that tells publishers from carriers.
fn carrier_byte(ip: &[u8; 16]) -> usize {
    if ip[10..12] == MAPPED { 9 } else { 15 }
}

/// The address without the mark, and whether it was there.
fn unmark(mut ip: [u8; 16]) -> ([u8; 16], bool) {
    let byte = carrier_byte(&ip);
    let is_marked = ip[byte] & 1 == 1;
    ip[byte] &= !1;
    (ip, is_marked)
}

fn ip_of(mut ip: [u8; 16]) -> IpAddr {
    if carrier_byte(&ip) == 15 {
        ip[15] = 0;
    }
    IpAddr::V6(Ipv6Addr::from(ip)).to_canonical()
}

/// Whose key stands in a block's owner.
pub(crate) fn publisher_of(key: [u8; 16]) -> Who {
    if key == Owner::NOBODY.publisher { Who::Nobody } else { Who::Key(key) }
}

/// Whether it is a carrier's. A publisher may have such a key too, one in four billion.
pub(crate) fn is_carrier_key(key: &[u8; 16]) -> bool {
    key[..4] == CARRIER_MARK
}

/// Whose address stands in a block's owner, and whether it is a carrier's.
pub(crate) fn address_of(ip: [u8; 16]) -> (Who, bool) {
    let (ip, is_carrier) = unmark(ip);
    let who = if ip == Owner::NOBODY.ip { Who::Nobody } else { Who::Address(ip_of(ip)) };
    (who, is_carrier)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn owner(key: u8, ip: &str) -> Owner {
        let ip = ip.parse().expect("an address");
        owner_of(&PeerId([key; 32]), ip)
    }

    #[test]
    fn addresses_are_charged_as_people_get_them() {
        let same = [
            ("10.1.2.3", "::ffff:10.1.2.3", true),
            ("10.1.2.3", "10.1.2.4", false),
            ("2001:db8:1:2::1", "2001:db8:1:2:ffff::7", true),
            ("2001:db8:1:2::1", "2001:db8:1:3::1", false),
        ];
        for (a, b, expected) in same {
            assert_eq!(owner(1, a) == owner(1, b), expected, "{a} and {b}");
        }
        assert_ne!(owner(1, "::1").ip, Owner::NOBODY.ip);
    }

    proptest! {
        #[test]
        fn a_carrier_is_never_taken_for_a_publisher(
            id in any::<[u8; 32]>(), v4 in any::<[u8; 4]>(), v6 in any::<[u8; 16]>(),
        ) {
            for ip in [IpAddr::from(v4), IpAddr::from(v6)] {
                let (plain, marked) = (owner_of(&PeerId(id), ip), carrier(&PeerId(id), ip));
                prop_assert!(!is_carrier(&plain) && is_carrier(&marked));
                prop_assert_eq!(unmark(marked.ip).0, plain.ip);
                prop_assert_ne!(plain.ip, Owner::NOBODY.ip);
            }
        }
    }
}
