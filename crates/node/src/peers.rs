//! Lists of peers in files and join codes.

use std::collections::BTreeSet;

use atoll_net::Peer;
use atoll_net::header::{Capped, WirePeer};
use atoll_overlay::chord::{MAX_REMEMBERED, RememberedPeer};
use minicbor::decode::{Decoder, Error as DecodeError};
use minicbor::encode::{Encoder, Error as EncodeError, Write};
use minicbor::{Decode, Encode};

use crate::dir::{self, DirError, NodeDir};

/// The most peers a list may hold.
pub(crate) const MAX_PEERS: usize = MAX_REMEMBERED;

/// So many failures of a peer are written down together: about a day's.
const FAILURES_SAVED: u32 = 24;

/// At most [`MAX_PEERS`] peer addresses.
///
/// CBOR: an array of [`WirePeer`]s.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerList(Vec<Peer>);

impl PeerList {
    /// The first [`MAX_PEERS`] of `peers`, each address of each peer once. A node may be known by several: it
    /// is not said which of its addresses is the right one.
    pub fn new(peers: impl IntoIterator<Item = Peer>) -> PeerList {
        PeerList(distinct(peers).take(MAX_PEERS).collect())
    }

    /// The peers.
    pub fn as_slice(&self) -> &[Peer] {
        &self.0
    }
}

/// `peers`, each address of each peer once, in the order given.
pub(crate) fn distinct(peers: impl IntoIterator<Item = Peer>) -> impl Iterator<Item = Peer> {
    let mut seen = BTreeSet::new();
    peers.into_iter().filter(move |peer| seen.insert(*peer))
}

/// The file `peers.cbor`: the peers known last, those met first in front.
///
/// CBOR: an array of at most [`MAX_PEERS`] arrays: [`WirePeer`], calls in a row that it has
/// not answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PeerMemory(pub Vec<RememberedPeer>);

#[derive(Encode, Decode)]
struct Entry {
    #[n(0)]
    peer: WirePeer,
    #[n(1)]
    failures: u32,
}

impl PeerMemory {
    pub(crate) fn load(dir: &NodeDir) -> Result<PeerMemory, DirError> {
        let path = dir.peers();
        let Some(bytes) = dir::read_small(&path)? else { return Ok(PeerMemory::default()) };
        minicbor::decode(&bytes).map_err(|error| DirError::damaged(path, error))
    }

    pub(crate) fn save(&self, dir: &NodeDir) -> Result<(), DirError> {
        let bytes = minicbor::to_vec(self).expect("a vector takes all that is written");
        dir::write_atomically(&dir.peers(), &bytes)
    }

    /// Whether what has changed since `saved` is worth a write: other addresses do, and one failure
    /// in [`FAILURES_SAVED`].
    pub(crate) fn is_news_after(&self, saved: &PeerMemory) -> bool {
        let gist = |memory: &PeerMemory| -> Vec<(Peer, u32)> {
            let known = memory.0.iter();
            known.map(|known| (known.peer, known.failures / FAILURES_SAVED)).collect()
        };
        gist(self) != gist(saved)
    }
}

impl<C> Encode<C> for PeerMemory {
    fn encode<W: Write>(&self, e: &mut Encoder<W>, c: &mut C) -> Result<(), EncodeError<W::Error>> {
        let entry =
            |known: &RememberedPeer| Entry { peer: WirePeer(known.peer), failures: known.failures };
        let entries = self.0.iter().take(MAX_PEERS).map(entry).collect();
        Capped::<Entry, MAX_PEERS>(entries).encode(e, c)
    }
}

impl<'b, C> Decode<'b, C> for PeerMemory {
    fn decode(d: &mut Decoder<'b>, c: &mut C) -> Result<Self, DecodeError> {
        let Capped(entries) = Capped::<Entry, MAX_PEERS>::decode(d, c)?;
        let known = |entry: Entry| RememberedPeer { peer: entry.peer.0, failures: entry.failures };
        Ok(PeerMemory(entries.into_iter().map(known).collect()))
    }
}

impl<C> Encode<C> for PeerList {
    fn encode<W: Write>(&self, e: &mut Encoder<W>, c: &mut C) -> Result<(), EncodeError<W::Error>> {
        let peers = self.0.iter().map(|peer| WirePeer(*peer)).collect();
        Capped::<WirePeer, MAX_PEERS>(peers).encode(e, c)
    }
}

impl<'b, C> Decode<'b, C> for PeerList {
    fn decode(d: &mut Decoder<'b>, c: &mut C) -> Result<Self, DecodeError> {
        let Capped(peers) = Capped::<WirePeer, MAX_PEERS>::decode(d, c)?;
        Ok(PeerList::new(peers.into_iter().map(|peer| peer.0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) fn peer(number: u8, addr: &str) -> Peer {
        Peer { id: atoll_key::PeerId([number; 32]), addr: addr.parse().expect("an address") }
    }

    #[test]
    fn lists_of_both_address_families_read_back() {
        let list = PeerList::new([peer(1, "10.1.2.3:7543"), peer(2, "[fe80::1]:9")]);
        let bytes = minicbor::to_vec(&list).expect("encode");
        assert_eq!(minicbor::decode::<PeerList>(&bytes).expect("decode"), list);
    }

    #[test]
    fn a_peer_address_is_listed_once_and_a_list_is_short() {
        let many = (0..200).map(|i| peer(i as u8, "10.0.0.1:1"));
        assert_eq!(PeerList::new(many).as_slice().len(), MAX_PEERS);
        let both = [peer(1, "10.0.0.1:1"), peer(1, "10.0.0.2:1")];
        let list = PeerList::new(both.into_iter().chain(both));
        assert_eq!(list.as_slice(), both, "a node that has moved is known at both addresses");
    }

    #[test]
    fn a_memory_reads_back_and_a_damaged_one_is_refused() {
        let temp = tempfile::tempdir().expect("temp");
        let dir = NodeDir::at(temp.path());
        let known = |n, failures| RememberedPeer { peer: peer(n, "10.1.2.3:7543"), failures };
        let memory = PeerMemory(vec![known(2, 0), known(1, 17_520)]);
        assert!(!PeerMemory(vec![known(2, 3), known(1, 17_521)]).is_news_after(&memory));
        assert!(PeerMemory(vec![known(2, 0), known(1, 17_544)]).is_news_after(&memory));
        assert!(PeerMemory(vec![known(1, 17_520), known(2, 0)]).is_news_after(&memory));
        memory.save(&dir).expect("saved");
        assert_eq!(PeerMemory::load(&dir).expect("loaded"), memory);
        let bytes = std::fs::read(dir.peers()).expect("read");
        for len in 0..bytes.len() {
            std::fs::write(dir.peers(), &bytes[..len]).expect("cut short");
            assert!(PeerMemory::load(&dir).is_err(), "{len}");
        }
    }

    #[test]
    fn lists_that_lie_are_refused() {
        let cases: [&[u8]; 5] = [
            b"\x9b\xff\xff\xff\xff\xff\xff\xff\xff", // an array of 2^64 - 1
            b"\x18\x41",
            b"\x9f\xff", // no length
            b"\x81\x43abc",
            b"\x82\x40",
        ];
        for bytes in cases {
            assert!(minicbor::decode::<PeerList>(bytes).is_err(), "{bytes:02x?}");
        }
    }
}
