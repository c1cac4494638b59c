//! Who the founding members of a pool are: lines of text, the founder first.
//!
//! ```text
//! atoll pool members 1
//! KEY ADDRESS
//! end
//! ```
//!
//! KEY is 64 hexadecimal digits, a node's public key; ADDRESS is where it listens.

use atoll_key::PeerId;
use atoll_net::Peer;
use data_encoding::HEXLOWER;

const FIRST_LINE: &str = "atoll pool members 1";
const LAST_LINE: &str = "end\n";

/// The founding members of a pool of several, which do not change. The first is the *founder*: the node on which the pool was made.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PoolMembers {
    peers: Vec<Peer>,
}

impl PoolMembers {
    /// The most members.
    pub const MAX: usize = 16;

    /// These members, the founder first; none if there are not between 2 and [`PoolMembers::MAX`], or one is named twice.
    pub fn new(peers: Vec<Peer>) -> Option<PoolMembers> {
        let is_twice =
            |(at, peer): (usize, &Peer)| peers[..at].iter().any(|other| other.id == peer.id);
        let is_sound = (2..=PoolMembers::MAX).contains(&peers.len());
        (is_sound && !peers.iter().enumerate().any(is_twice)).then_some(PoolMembers { peers })
    }

    /// The node on which the pool was made.
    pub fn founder(&self) -> Peer {
        self.peers[0]
    }

    /// All of them, the founder first.
    pub fn peers(&self) -> &[Peer] {
        &self.peers
    }

    /// The member with this key.
    pub fn get(&self, id: PeerId) -> Option<Peer> {
        self.peers.iter().find(|peer| peer.id == id).copied()
    }

    /// Whether a node is one of them.
    pub fn contains(&self, id: PeerId) -> bool {
        self.peers.iter().any(|peer| peer.id == id)
    }

    pub(crate) fn to_text(&self) -> String {
        let mut text = format!("{FIRST_LINE}\n");
        for Peer { id, addr } in &self.peers {
            text.push_str(&format!("{} {addr}\n", HEXLOWER.encode(&id.0)));
        }
        text + LAST_LINE
    }

    pub(crate) fn from_text(text: &str) -> Option<PoolMembers> {
        let mut lines = text.strip_suffix(LAST_LINE)?.lines();
        if lines.next()? != FIRST_LINE {
            return None;
        }
        let peer = |line: &str| {
            let (key, addr) = line.split_once(' ')?;
            let key = HEXLOWER.decode(key.as_bytes()).ok()?.try_into().ok()?;
            Some(Peer { id: PeerId(key), addr: addr.parse().ok()? })
        };
        let peers: Option<Vec<Peer>> = lines.take(PoolMembers::MAX + 1).map(peer).collect();
        PoolMembers::new(peers?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(number: u8) -> Peer {
        Peer { id: PeerId([number; 32]), addr: ([10, 0, 0, number], 4711).into() }
    }

    #[test]
    fn a_list_reads_back_and_a_damaged_one_is_none() {
        let members = PoolMembers::new(vec![peer(1), peer(2), peer(255)]).unwrap();
        let text = members.to_text();
        assert_eq!(PoolMembers::from_text(&text), Some(members));
        for len in 0..text.len() {
            assert_eq!(PoolMembers::from_text(&text[..len]), None, "{len}");
        }
        assert_eq!(PoolMembers::new(vec![peer(1)]), None, "a pool of one has no list");
        assert_eq!(PoolMembers::new(vec![peer(1), peer(2), peer(1)]), None, "one is named twice");
        assert_eq!(PoolMembers::new((0..17).map(peer).collect()), None);
    }
}
