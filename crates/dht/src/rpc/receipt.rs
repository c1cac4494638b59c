//! A publisher's receipt in a message; [`Receipt`](crate::receipt::Receipt) is what it says.

use atoll_net::header::WirePeer;
use minicbor::{Decode, Encode};

/// A receipt in a message.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct WireReceipt {
    #[n(0)]
    pub(crate) publisher: WirePeer,
    #[n(1)]
    pub(crate) issued_unix_secs: u64,
    #[n(2)]
    pub(crate) lease_secs: u64,
    /// 16 bytes for each key it is for; left out if those are the keys of the message, in
    /// its order.
    #[cbor(n(3), with = "minicbor::bytes")]
    pub(crate) tags: Option<Vec<u8>>,
    #[cbor(n(4), with = "minicbor::bytes")]
    pub(crate) signature: [u8; 64],
}
