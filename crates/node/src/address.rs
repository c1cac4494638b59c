//! Whether this machine still has the address that the node tells others.
//!
//! A node tells others its address once, when it starts. If it found the address out by itself and
//! the address changes, the node must start again ([`crate::Node::until_moved`]). If the user gave
//! the address (`--advertise`), the node can only warn that the machine no longer has it.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use atoll_net::tcp::reachable;

/// How often the address is looked at.
pub(crate) const LOOK_EVERY: Duration = Duration::from_secs(20);

/// Follows the address of a machine.
pub(crate) struct AddressWatch {
    told: IpAddr,
    seen: IpAddr,
}

impl AddressWatch {
    /// Others have been told `told`.
    pub(crate) fn new(told: IpAddr) -> AddressWatch {
        AddressWatch { told, seen: told }
    }

    /// Notes that the machine would be reached at `now`, and returns whether it has moved there. A
    /// new address counts when it is seen twice. Loopback never counts: a machine whose network is
    /// down usually gets its address back.
    pub(crate) fn note_address(&mut self, now: IpAddr) -> bool {
        let is_settled = now == self.seen;
        self.seen = now;
        is_settled && now != self.told && !now.is_loopback()
    }
}

/// Where others would reach a node that listens on all addresses and was given none to tell.
pub(crate) fn found_now(listen: SocketAddr, advertise: Option<SocketAddr>) -> Option<IpAddr> {
    let is_found = advertise.is_none() && listen.ip().is_unspecified();
    is_found.then(|| reachable(listen).ip())
}

/// What to tell people if the machine no longer has the address that is listened on.
pub(crate) fn trouble(listen: SocketAddr) -> Option<String> {
    let is_here = UdpSocket::bind((listen.ip(), 0)).is_ok();
    (!is_here).then(|| {
        format!(
            "this machine no longer has the address {}, where the node listens: stop it, and start \
             it with `atoll up --listen 0.0.0.0:{}` or the new address",
            listen.ip(),
            listen.port()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    #[test]
    fn a_machine_has_moved_when_its_new_address_lasts() {
        let mut watch = AddressWatch::new(ip(1));
        let loopback = IpAddr::from([127, 0, 0, 1]);
        let seen = [ip(1), ip(2), ip(1), loopback, loopback, ip(1), ip(3)];
        assert!(seen.iter().all(|now| !watch.note_address(*now)));
        assert!(watch.note_address(ip(3)));
    }

    #[test]
    fn only_an_address_that_was_found_out_is_followed() {
        let [all, one] = ["0.0.0.0:7", "127.0.0.1:7"].map(|addr| addr.parse().expect("an address"));
        assert!(found_now(all, None).is_some());
        assert_eq!(found_now(all, Some(one)), None);
        assert_eq!(found_now(one, None), None);
    }

    #[test]
    fn a_vanished_address_is_told() {
        // An address for documentation (RFC 5737): no machine has it.
        let gone = trouble("192.0.2.7:7543".parse().expect("an address")).expect("not here");
        assert!(gone.contains("192.0.2.7") && gone.contains("--listen 0.0.0.0:7543"), "{gone}");
        assert_eq!(trouble("127.0.0.1:7543".parse().expect("an address")), None);
    }
}
