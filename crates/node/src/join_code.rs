//! Join codes: what a new node needs to join a network.
//!
//! `atoll-join:` and checked base 32 (see `atoll_key::text`) of
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 1 | layout, 1 |
//! | 1 | n | CBOR map: 0 network (see [`Network`]), 1 bootstrap peers (see [`PeerList`]) |
//!
//! A code carries the network's secret and so makes its holder a member. It is therefore never
//! printed by `Debug` nor logged.

use std::fmt;
use std::str::FromStr;

use atoll_key::text::{self, TextError};
use atoll_net::Peer;
use minicbor::{Decode, Encode};

use crate::network::Network;
use crate::peers::PeerList;

const SCHEME: &str = "atoll-join:";
const LAYOUT: u8 = 1;

/// The most bootstrap peers in a code: keeps it short enough to paste (about 90
/// characters each).
pub const MAX_BOOTSTRAP: usize = 4;

/// The longest text read as a code, bytes.
const MAX_CODE_BYTES: usize = 4096;

/// What a new node needs to join a network.
#[derive(Clone, PartialEq, Eq)]
pub struct JoinCode {
    /// The network and its secret.
    pub network: Network,
    /// Nodes to ask first; never empty.
    pub bootstrap: Vec<Peer>,
}

#[derive(Encode, Decode)]
#[cbor(map)]
struct Payload {
    #[n(0)]
    network: Network,
    #[n(1)]
    bootstrap: PeerList,
}

/// Why a text is not a join code.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JoinCodeError {
    /// Mistyped, cut short, or something else altogether.
    #[error("not a join code: {0}")]
    Text(#[from] TextError),
    /// Its checksum is right, but it says nothing usable.
    #[error("the join code is of no use: {0}")]
    Content(String),
}

impl JoinCode {
    /// A code for `network` that names the first [`MAX_BOOTSTRAP`] of `peers`.
    ///
    /// # Panics
    /// If there are no peers.
    pub fn new(network: Network, peers: impl IntoIterator<Item = Peer>) -> JoinCode {
        let bootstrap: Vec<Peer> =
            PeerList::new(peers).as_slice().iter().take(MAX_BOOTSTRAP).copied().collect();
        assert!(!bootstrap.is_empty(), "a join code names a node to ask");
        JoinCode { network, bootstrap }
    }

    /// Whether all named peers can be reached from this machine only.
    pub fn is_loopback_only(&self) -> bool {
        self.bootstrap.iter().all(|peer| peer.addr.ip().is_loopback())
    }
}

impl fmt::Display for JoinCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let payload = Payload {
            network: self.network.clone(),
            bootstrap: PeerList::new(self.bootstrap.iter().copied()),
        };
        let mut bytes = vec![LAYOUT];
        minicbor::encode(&payload, &mut bytes).expect("a vector takes all that is written");
        f.write_str(&text::encode_checked(SCHEME, &bytes))
    }
}

impl fmt::Debug for JoinCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JoinCode({:?}, {:?})", self.network, self.bootstrap)
    }
}

impl FromStr for JoinCode {
    type Err = JoinCodeError;

    fn from_str(text: &str) -> Result<JoinCode, JoinCodeError> {
        let text = text.trim();
        if text.len() > MAX_CODE_BYTES {
            return Err(TextError::Encoding.into());
        }
        let bytes = text::decode_checked(SCHEME, text)?;
        let Some((&LAYOUT, body)) = bytes.split_first() else {
            return Err(TextError::Version.into());
        };
        let content = |what: String| JoinCodeError::Content(what);
        let payload: Payload = minicbor::decode(body).map_err(|e| content(e.to_string()))?;
        payload.network.check().map_err(content)?;
        let bootstrap = payload.bootstrap.as_slice();
        if bootstrap.is_empty() || bootstrap.len() > MAX_BOOTSTRAP {
            return Err(content(format!("it names {} nodes", bootstrap.len())));
        }
        if let Some(peer) = bootstrap.iter().find(|p| p.addr.port() == 0) {
            return Err(content(format!("{} is no address to connect to", peer.addr)));
        }
        Ok(JoinCode { bootstrap: bootstrap.to_vec(), network: payload.network })
    }
}

impl JoinCode {
    /// The peers as a list for a file.
    pub(crate) fn peer_list(&self) -> PeerList {
        PeerList::new(self.bootstrap.iter().copied())
    }
}
