//! What voters say to each other, and members to voters, as CBOR (`docs/design/pool.md`). Method `0x0504` is one way, its reply is
//! empty; `0x0505` is answered when the map is decided.
//!
//! A message does not say who sent it: that is the peer whose key the network has proven.

use atoll_net::header::Capped;
use minicbor::{Decode, Encode};

use super::PoolMap;
use crate::members::PoolMembers;
use crate::messages::encode;

/// A message between voters.
pub const VOTER_MESSAGE: u16 = 0x0504;
/// Proposes a map, or asks for the one that holds.
pub const PROPOSE: u16 = 0x0505;

/// Asks a voter what it has seen of the caller, which is to vote: the header is the generation of voters.
pub const SEEN: u16 = 0x0507;

/// The longest message, bytes: more than twice what [`MAX_ITEMS`] maps of a full pool take.
pub(super) const MAX_MESSAGE_BYTES: usize = 240 << 10;
/// The most entries of the log in one message.
pub(super) const MAX_ITEMS: usize = 8;
/// Terms and places in the log of which a voter hears are below, so that counting on from there never overflows.
const MAX_NUMBER: u64 = 1 << 60;

/// A place in the log of the voters.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Encode, Decode)]
pub(super) struct LogPlace {
    #[n(0)]
    pub(super) term: u64,
    #[n(1)]
    pub(super) index: u64,
}

impl LogPlace {
    fn is_sound(self, term: u64) -> bool {
        self.term <= term && self.index < MAX_NUMBER
    }
}

/// An entry of the log of the voters.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub(super) enum LogItem {
    /// A leader began its term.
    #[n(0)]
    Began(#[n(0)] u64),
    /// The map is to be this one, if it follows the one that holds.
    #[n(1)]
    Change(#[n(0)] PoolMap),
    /// Somebody asks which map holds: nothing changes.
    #[n(2)]
    Asked,
}

/// Whether entries after `base` can be in a log in this term.
pub(super) fn are_sound(items: &[LogItem], base: LogPlace, term: u64) -> bool {
    let mut last = base.term;
    let mut is_sound = |item: &LogItem| match item {
        LogItem::Began(began) => std::mem::replace(&mut last, *began) < *began && *began <= term,
        LogItem::Change(map) => map.is_sound(),
        LogItem::Asked => true,
    };
    base.term <= term && items.iter().all(&mut is_sound)
}

/// The messages of Raft (§5, §7 of the paper).
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub(super) enum VoterMessage {
    /// RequestVote.
    #[n(0)]
    VoteCall {
        #[n(0)]
        term: u64,
        /// The end of the candidate's log.
        #[n(1)]
        last: LogPlace,
    },
    /// Its answer.
    #[n(1)]
    VoteReply {
        #[n(0)]
        term: u64,
        #[n(1)]
        is_granted: bool,
    },
    /// AppendEntries.
    #[n(2)]
    AppendCall {
        #[n(0)]
        term: u64,
        /// Up to where the leader knows entries to be decided.
        #[n(1)]
        decided: u64,
        /// The entry before `items`.
        #[n(2)]
        base: LogPlace,
        #[n(3)]
        items: Capped<LogItem, MAX_ITEMS>,
    },
    /// Its answer: the end of the follower's log.
    #[n(3)]
    AppendReply {
        #[n(0)]
        term: u64,
        #[n(1)]
        last: LogPlace,
    },
    /// InstallSnapshot: the map after all entries up to a place.
    #[n(4)]
    Snapshot {
        #[n(0)]
        term: u64,
        #[n(1)]
        at: LogPlace,
        #[n(2)]
        map: PoolMap,
    },
}

impl VoterMessage {
    pub(super) fn term(&self) -> u64 {
        match self {
            VoterMessage::VoteCall { term, .. }
            | VoterMessage::VoteReply { term, .. }
            | VoterMessage::AppendCall { term, .. }
            | VoterMessage::AppendReply { term, .. }
            | VoterMessage::Snapshot { term, .. } => *term,
        }
    }

    /// Whether a voter that follows the rules may have sent it.
    pub(super) fn is_sound(&self) -> bool {
        let term = self.term();
        term < MAX_NUMBER
            && match self {
                VoterMessage::VoteCall { last, .. } => last.is_sound(term),
                VoterMessage::VoteReply { .. } => true,
                VoterMessage::AppendCall { decided, base, items, .. } => {
                    *decided < MAX_NUMBER && base.is_sound(term) && are_sound(&items.0, *base, term)
                }
                VoterMessage::AppendReply { last, .. } => last.is_sound(term),
                VoterMessage::Snapshot { at, map, .. } => at.is_sound(term) && map.is_sound(),
            }
    }
}

/// What messages of a voter show that it had on its disk when it sent them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Encode, Decode)]
pub(super) struct SeenVotes {
    /// The highest term of them.
    #[n(0)]
    pub(super) term: u64,
    /// It had given its vote in that term.
    #[n(1)]
    pub(super) has_voted: bool,
    /// Up to where its log went, of the last message of that term that says so.
    #[n(2)]
    pub(super) last: u64,
}

impl SeenVotes {
    /// After another sound message.
    pub(super) fn note(&mut self, message: &VoterMessage) {
        let term = message.term();
        if term < self.term {
            return;
        }
        if term > self.term {
            *self = SeenVotes { term, ..SeenVotes::default() };
        }
        match message {
            // A follower's log becomes shorter where it contradicts a leader's.
            VoterMessage::AppendReply { last, .. } => self.last = last.index,
            VoterMessage::VoteCall { last, .. } => (self.has_voted, self.last) = (true, last.index),
            VoterMessage::VoteReply { is_granted, .. } => self.has_voted |= is_granted,
            VoterMessage::AppendCall { base, items, .. } => {
                self.has_voted = true;
                self.last = self.last.max(base.index + items.0.len() as u64);
            }
            VoterMessage::Snapshot { at, .. } => {
                self.has_voted = true;
                self.last = self.last.max(at.index);
            }
        }
    }
}

/// The answer to [`SEEN`].
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub(super) struct SeenReply {
    /// What the voter has seen of the caller in that generation; none if that is nothing.
    #[n(0)]
    pub(super) seen: Option<SeenVotes>,
    /// A map that was decided, if it names voters of a later generation.
    #[n(1)]
    pub(super) newer: Option<PoolMap>,
}

/// A message, and which voters it is among. The answer is empty, or a map by which there are others by now.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub(super) struct VoterCall {
    /// The generation of voters ([`crate::pool_map::MapVoters`]).
    #[n(0)]
    pub(super) generation: u64,
    #[n(1)]
    pub(super) message: VoterMessage,
}

/// A member's call to a voter.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub(super) struct ProposeCall {
    /// The map that is to hold; none asks for the one that does.
    #[n(0)]
    pub(super) map: Option<PoolMap>,
    /// The newest map that the caller knows: whoever is asked may not know yet that it votes.
    #[n(1)]
    pub(super) known: PoolMap,
}

/// The answer.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub(super) enum ProposeReply {
    /// This map held when the call was decided: the proposed one, or that which was decided instead.
    #[n(0)]
    Holds(#[n(0)] PoolMap),
    /// The voter does not lead, or does so no longer, or there are other voters by now: whether the call was decided is not known. With a
    /// map that was decided, if the voter knows a newer one than the caller.
    #[n(1)]
    NotLeader(#[n(0)] Option<PoolMap>),
}

/// For fuzzing: some such messages.
pub fn example_map_messages() -> Vec<Vec<u8>> {
    let peer = |n: u8| atoll_net::Peer {
        id: atoll_key::PeerId([n; 32]),
        addr: ([10, 0, 0, n], 4711).into(),
    };
    let founding = PoolMembers::new((1..=3).map(peer).collect()).expect("three members");
    let primary = peer(3).id;
    let map = PoolMap { epoch: 7, primary, run: 3, ..PoolMap::first(&founding) };
    let at = LogPlace { term: 4, index: 9 };
    let items = vec![LogItem::Began(5), LogItem::Change(map.clone()), LogItem::Asked];
    let messages = [
        VoterMessage::VoteCall { term: 5, last: at },
        VoterMessage::VoteReply { term: 5, is_granted: true },
        VoterMessage::AppendCall { term: 5, decided: 9, base: at, items: items.into() },
        VoterMessage::AppendReply { term: 5, last: at },
        VoterMessage::Snapshot { term: 5, at, map: map.clone() },
    ];
    let call = |message| encode(&VoterCall { generation: 1, message }).to_vec();
    let mut all: Vec<Vec<u8>> = messages.into_iter().map(call).collect();
    all.push(encode(&ProposeCall { map: None, known: map.clone() }).to_vec());
    all.push(encode(&ProposeCall { map: Some(map.clone()), known: map.clone() }).to_vec());
    all.push(encode(&ProposeReply::Holds(map.clone())).to_vec());
    let seen = SeenVotes { term: 5, has_voted: true, last: 9 };
    all.push(encode(&SeenReply { seen: Some(seen), newer: Some(map.clone()) }).to_vec());
    all.push(encode(&ProposeReply::NotLeader(Some(map))).to_vec());
    all.push(encode(&ProposeReply::NotLeader(None)).to_vec());
    all
}

#[cfg(test)]
mod tests {
    use super::super::is_map_message;
    use super::super::tests::founding;
    use super::*;
    use crate::messages::decode;

    #[test]
    fn messages_read_back_and_what_is_cut_off_is_none() {
        for bytes in example_map_messages() {
            assert!(is_map_message(&bytes));
            let message = decode::<VoterCall>(&bytes);
            assert!(message.is_none_or(|message| encode(&message) == bytes));
            for len in 0..bytes.len() {
                assert!(!is_map_message(&bytes[..len]));
            }
            assert!(!is_map_message(&[&bytes[..], &[0]].concat()));
        }
    }

    #[test]
    fn the_longest_message_is_short_enough() {
        let roster = crate::roster::largest();
        let witnesses = crate::witnesses::most();
        let map = PoolMap { epoch: u64::MAX, roster, witnesses, ..PoolMap::first(&founding(16)) };
        let items = vec![LogItem::Change(map); MAX_ITEMS];
        let base = LogPlace { term: MAX_NUMBER - 1, index: MAX_NUMBER - 1 };
        let message = VoterMessage::AppendCall {
            term: MAX_NUMBER - 1,
            decided: MAX_NUMBER - 1,
            base,
            items: items.into(),
        };
        assert!(message.is_sound());
        assert!(encode(&message).len() <= MAX_MESSAGE_BYTES / 2);
    }

    #[test]
    fn what_was_seen_of_a_voter_is_of_its_last_term() {
        let place = |term, index| LogPlace { term, index };
        let mut seen = SeenVotes::default();
        let mut after = |message: VoterMessage| {
            seen.note(&message);
            (seen.term, seen.has_voted, seen.last)
        };
        assert_eq!(after(VoterMessage::AppendReply { term: 3, last: place(3, 9) }), (3, false, 9));
        let shorter = VoterMessage::AppendReply { term: 3, last: place(2, 7) };
        assert_eq!(after(shorter), (3, false, 7), "what a leader contradicts is cut off");
        assert_eq!(after(VoterMessage::VoteReply { term: 4, is_granted: false }), (4, false, 0));
        assert_eq!(after(VoterMessage::VoteReply { term: 4, is_granted: true }), (4, true, 0));
        assert_eq!(after(VoterMessage::VoteReply { term: 4, is_granted: false }), (4, true, 0));
        assert_eq!(after(VoterMessage::VoteCall { term: 2, last: place(1, 9) }), (4, true, 0));
        let items = vec![LogItem::Began(5), LogItem::Asked].into();
        let leads = VoterMessage::AppendCall { term: 5, decided: 0, base: place(4, 7), items };
        assert_eq!(after(leads), (5, true, 9));
    }

    #[test]
    fn what_no_voter_says_is_unsound() {
        let founding = founding(3);
        let place = |term, index| LogPlace { term, index };
        let call = |base, items: &[LogItem]| VoterMessage::AppendCall {
            term: 5,
            decided: 0,
            base,
            items: items.to_vec().into(),
        };
        let map = PoolMap::first(&founding);
        let stranger = PoolMap { primary: atoll_key::PeerId([9; 32]), ..map.clone() };
        assert!(call(place(3, 8), &[LogItem::Began(4), LogItem::Began(5)]).is_sound());
        let unsound = [
            call(place(6, 8), &[]),
            call(place(3, u64::MAX), &[]),
            call(place(3, 8), &[LogItem::Began(3)]),
            call(place(3, 8), &[LogItem::Began(6)]),
            call(place(3, 8), &[LogItem::Began(5), LogItem::Began(4)]),
            call(place(3, 8), &[LogItem::Change(stranger.clone())]),
            VoterMessage::VoteCall { term: u64::MAX, last: place(0, 0) },
            VoterMessage::VoteCall { term: 5, last: place(6, 0) },
            VoterMessage::VoteReply { term: MAX_NUMBER, is_granted: true },
            VoterMessage::AppendReply { term: 5, last: place(5, MAX_NUMBER) },
            VoterMessage::Snapshot { term: 5, at: place(6, 1), map },
            VoterMessage::Snapshot { term: 5, at: place(5, 1), map: stranger },
        ];
        for message in unsound {
            assert!(!message.is_sound(), "{message:?}");
        }
    }
}
