//! The members this node has met: since when, where, and whether they know the secret
//! that counts now.

use std::collections::BTreeMap;

use atoll_key::PeerId;
use atoll_net::Peer;
use atoll_net::header::{Capped, WirePeer};
use minicbor::{Decode, Encode};

use crate::dir::{self, DirError, NodeDir};

/// The most members remembered: all of them in most networks, and a node's surroundings,
/// with which it speaks, in larger ones. A guess; 100 bytes each.
pub(crate) const MAX_KNOWN: usize = 4096;

/// A member as this node has met it.
///
/// CBOR map; the file `members.cbor` is an array of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct Known {
    #[n(0)]
    pub peer: WirePeer,
    /// When it first proved a secret here, milliseconds since 1970.
    #[n(1)]
    pub first_seen_unix_ms: u64,
    /// When it was last connected, the same.
    #[n(2)]
    pub last_seen_unix_ms: u64,
    /// The latest epoch whose secret it has proven.
    #[n(3)]
    pub epoch: u64,
    /// The protocol version spoken with it last.
    #[n(4)]
    pub version: u16,
}

/// The file `members.cbor`.
pub(crate) type KnownList = Capped<Known, MAX_KNOWN>;

/// Members by key, at most [`MAX_KNOWN`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct KnownMembers(BTreeMap<PeerId, Known>);

impl KnownMembers {
    pub(super) fn get(&self, id: &PeerId) -> Option<&Known> {
        self.0.get(id)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Known> {
        self.0.values()
    }

    /// Notes that `peer` has proven the secret of `epoch`. Whether that is worth writing down.
    pub(super) fn note(&mut self, peer: Peer, epoch: u64, version: u16, now_unix_ms: u64) -> bool {
        if self.0.len() >= MAX_KNOWN && !self.0.contains_key(&peer.id) {
            let oldest = self.0.values().min_by_key(|known| known.last_seen_unix_ms);
            oldest.map(|known| known.peer.0.id).map(|id| self.0.remove(&id));
        }
        let before = self.0.get(&peer.id).copied();
        let known = Known {
            peer: WirePeer(peer),
            first_seen_unix_ms: before.map_or(now_unix_ms, |known| known.first_seen_unix_ms),
            last_seen_unix_ms: now_unix_ms,
            epoch: before.map_or(epoch, |known| known.epoch.max(epoch)),
            version,
        };
        self.0.insert(peer.id, known);
        before.is_none_or(|before| (before.peer, before.epoch) != (known.peer, known.epoch))
    }

    /// Notes that these are connected now.
    pub(super) fn seen(&mut self, connected: &[PeerId], now_unix_ms: u64) {
        for id in connected {
            if let Some(known) = self.0.get_mut(id) {
                known.last_seen_unix_ms = now_unix_ms;
            }
        }
    }

    pub(super) fn load(dir: &NodeDir) -> Result<KnownMembers, DirError> {
        let path = dir.members();
        let Some(bytes) = dir::read_small(&path)? else { return Ok(KnownMembers::default()) };
        let Capped(list): KnownList =
            minicbor::decode(&bytes).map_err(|error| DirError::damaged(path, error))?;
        Ok(KnownMembers(list.into_iter().map(|known| (known.peer.0.id, known)).collect()))
    }

    pub(super) fn save(&self, dir: &NodeDir) -> Result<(), DirError> {
        let list: KnownList = self.0.values().copied().collect::<Vec<_>>().into();
        let bytes = minicbor::to_vec(&list).expect("a vector takes all that is written");
        dir::write_atomically(&dir.members(), &bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(number: u32) -> Peer {
        let mut id = [0; 32];
        id[..4].copy_from_slice(&number.to_be_bytes());
        Peer { id: PeerId(id), addr: ([10, 0, 0, 1], 7).into() }
    }

    #[test]
    fn a_member_keeps_the_time_of_its_first_meeting() {
        let mut known = KnownMembers::default();
        assert!(known.note(peer(1), 0, 1, 100), "it is new");
        assert!(!known.note(peer(1), 0, 1, 200), "nothing but the time has changed");
        assert!(known.note(peer(1), 1, 1, 300), "it has proven a later secret");
        assert!(!known.note(peer(1), 0, 1, 350), "an earlier one says nothing new");
        known.seen(&[peer(1).id, peer(2).id], 400);
        let one = known.get(&peer(1).id).expect("noted");
        assert_eq!((one.first_seen_unix_ms, one.last_seen_unix_ms, one.epoch), (100, 400, 1));
        assert_eq!(known.iter().count(), 1, "connected is not proven");
    }

    #[test]
    fn those_seen_longest_ago_make_room_and_the_file_reads_back() {
        let temp = tempfile::tempdir().expect("temp");
        let dir = NodeDir::at(temp.path());
        assert_eq!(KnownMembers::load(&dir).expect("none"), KnownMembers::default());
        let mut known = KnownMembers::default();
        for number in 0..MAX_KNOWN as u32 + 10 {
            known.note(peer(number), 0, 1, u64::from(number));
        }
        assert_eq!(known.iter().count(), MAX_KNOWN);
        assert!(known.get(&peer(9).id).is_none() && known.get(&peer(10).id).is_some());
        known.save(&dir).expect("save");
        assert_eq!(KnownMembers::load(&dir).expect("load"), known);
        std::fs::write(dir.members(), [0x9f, 0xff]).expect("damage it");
        assert!(matches!(KnownMembers::load(&dir), Err(DirError::Damaged { .. })));
    }
}
