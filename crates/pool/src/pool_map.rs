//! The *map* of a pool of several: who belongs to it, which member is the primary, and which members have everything that was
//! answered. Plain data; [`crate::map`] decides it.
//!
//! **Members of the epoch** have everything that was answered. **Enrolled** is every member of the pool, also one that is away, or has
//! just joined and has nothing yet.
//!
//! On disk a map is text ([`PoolMap::to_text`]), so that people can read who the members are:
//!
//! ```text
//! atoll pool members 2
//! epoch 7 of KEY run 0123456789abcdef verifier 0123456789abcdef
//! voters 1
//! KEY ADDRESS complete votes
//! KEY ADDRESS complete
//! KEY ADDRESS
//! witness KEY ADDRESS 0123456789abcdef votes
//! copies 3
//! end
//! ```
//!
//! A line `witness` stands for each node without files ([`crate::witnesses`]). What follows `copies` is the pool's roster ([`crate::roster`]). KEY is 64 hexadecimal digits, a node's public key; the first is the primary's. ADDRESS is where the node listens.
//!
//! **Voters** decide maps. They are a *generation*, with a number: a map that names others is the last that the generation before
//! decides, and the first of the next one (a stop sign: *Stoppable Paxos*, Lamport, Malkhi and Zhou, 2008). Members vote, and *witnesses* where members
//! are too few: always fewer of these than of members.

use std::collections::BTreeSet;

use atoll_key::PeerId;
use atoll_net::Peer;
use data_encoding::HEXLOWER;
use minicbor::{Decode, Encode};

use crate::members::{PoolMembers, peer_key, peer_keys};
use crate::roster::PoolRoster;
use crate::witnesses::{self, PoolWitnesses, Witness};

const FIRST_LINE: &str = "atoll pool members 2";
const LAST_LINE: &str = "end\n";
const COMPLETE: &str = "complete";
const VOTES: &str = "votes";

/// The lower bits of an epoch count maps; those above say by which *revival* the group came to what it has: each time people make one copy
/// the group, they are others, and more. Before the first one they are 0.
const REVIVAL_BITS: u32 = 24;
/// Bits of a revival that tell those of one second apart.
const SAME_SECOND_BITS: u32 = 6;

/// The revival of an epoch.
pub(crate) fn revival(epoch: u64) -> u64 {
    epoch >> REVIVAL_BITS
}

/// When that was, seconds since 1970, unless clocks were set back.
pub(crate) fn revival_secs(epoch: u64) -> u64 {
    revival(epoch) >> SAME_SECOND_BITS
}

/// An epoch for people: how many maps there were since the last revival, if there was one, and when that was, seconds since 1970.
pub fn epoch_parts(epoch: u64) -> (u64, Option<u64>) {
    let count = epoch & ((1 << REVIVAL_BITS) - 1);
    (count, (revival(epoch) > 0).then(|| revival_secs(epoch)))
}

/// The first epoch of a revival after `epoch`, at this time in seconds since 1970: greater than that of any earlier one.
pub(crate) fn revived(epoch: u64, now_secs: u64, random: u64) -> u64 {
    let secs = now_secs.max(revival_secs(epoch).saturating_add(1));
    let secs = secs.min(u64::MAX >> (REVIVAL_BITS + SAME_SECOND_BITS));
    ((secs << SAME_SECOND_BITS) | (random >> (64 - SAME_SECOND_BITS))) << REVIVAL_BITS
}

/// The voters that decide maps, until a map names others.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct MapVoters {
    /// Counts generations; the first is 1.
    #[n(0)]
    pub generation: u64,
    /// Who they are: one, three or five enrolled members and witnesses.
    #[cbor(n(1), with = "peer_keys")]
    pub keys: BTreeSet<PeerId>,
}

/// Who may vote, as the primary knows it.
pub(crate) struct VotersToBe<'a> {
    /// The members that there are to be.
    pub(crate) enrolled: &'a PoolMembers,
    /// The nodes without files that there are to be.
    pub(crate) witnesses: &'a PoolWitnesses,
    /// Those of them that have answered of late in the incarnation that is listed: they know that they may have to vote.
    pub(crate) ready: &'a BTreeSet<PeerId>,
    /// The voters of now without those whose incarnation is another one by now.
    pub(crate) voting: &'a BTreeSet<PeerId>,
}

/// What a node is worth as a voter: the least first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum VoterRank {
    Complete,
    /// Who is just being brought up to date goes on to vote, where nobody has left.
    Kept,
    NewComplete,
    /// It is away, or is just being brought up to date.
    Incomplete,
    Witness,
    NewWitness,
    /// A witness that votes and has not answered of late.
    SilentWitness,
    Dead,
}

impl MapVoters {
    /// How many vote where so many members, and so many witnesses, can: fewer witnesses than members.
    fn count(members: usize, witnesses: usize) -> usize {
        let all = (members + witnesses).min((2 * members).saturating_sub(1)).max(members);
        match all {
            0..=2 => 1,
            3 | 4 => 3,
            _ => 5,
        }
    }

    /// The voters of a pool that has these members and witnesses. Those of now stay, but for ones that are dead, whom others replace that have
    /// everything, and for witnesses whose place a member can take. When one of them belongs to the pool no more, or there are to be more or
    /// fewer, those come first that have everything, of now before others, and members before witnesses: most of the next voters are there.
    pub(crate) fn of(
        &self,
        next: &VotersToBe<'_>,
        is_dead: impl Fn(PeerId) -> bool,
        has_everything: impl Fn(PeerId) -> bool,
    ) -> MapVoters {
        let VotersToBe { enrolled, witnesses, ready, voting } = *next;
        let votes = |id: &PeerId| voting.contains(id);
        let is_complete = |id: &PeerId| enrolled.contains(*id) && has_everything(*id);
        let members = enrolled.peers().iter().map(|peer| peer.id);
        let others = witnesses.all().iter().map(|witness| witness.peer.id);
        let is_ready = |id: &PeerId| ready.contains(id) && !is_dead(*id);
        let complete = members.clone().filter(is_complete).count();
        let more = MapVoters::count(complete, others.clone().filter(is_ready).count());
        let may_vote = others.clone().filter(|id| votes(id) || is_ready(id)).count();
        let fewer = self.keys.len().min(MapVoters::count(enrolled.peers().len(), may_vote));
        let wanted = more.max(fewer);
        let knows = |id: &PeerId| enrolled.contains(*id) || witnesses.contains(*id);
        let is_kept =
            wanted == self.keys.len() && self.keys.iter().all(|key| knows(key) && votes(key));
        let has_better = others.clone().any(|id| votes(&id))
            && members.clone().any(|id| is_complete(&id) && !votes(&id));
        if is_kept && !has_better && !self.keys.iter().any(|key| is_dead(*key)) {
            return self.clone();
        }
        let rank = |id: &PeerId| match (votes(id), is_dead(*id)) {
            _ if witnesses.contains(*id) => match (votes(id), is_ready(id)) {
                (true, true) => Some(VoterRank::Witness),
                (false, true) => Some(VoterRank::NewWitness),
                (true, false) if !is_dead(*id) => Some(VoterRank::SilentWitness),
                (true, false) => Some(VoterRank::Dead),
                (false, false) => None,
            },
            (true, _) if is_complete(id) => Some(VoterRank::Complete),
            (false, _) if is_complete(id) => Some(VoterRank::NewComplete),
            (true, false) if is_kept => Some(VoterRank::Kept),
            (true, false) => Some(VoterRank::Incomplete),
            (true, true) => Some(VoterRank::Dead),
            (false, _) => None,
        };
        let mut candidates: Vec<PeerId> =
            members.chain(others).filter(|id| rank(id).is_some()).collect();
        candidates.sort_by_key(rank);
        let chosen = |count: usize| {
            let (mut chosen, mut without_files) = (BTreeSet::new(), 0);
            for id in &candidates {
                let is_witness = witnesses.contains(*id);
                if chosen.len() < count && !(is_witness && without_files == count / 2) {
                    without_files += usize::from(is_witness);
                    chosen.insert(*id);
                }
            }
            chosen
        };
        let has_most = |keys: &BTreeSet<PeerId>| {
            let there = keys.iter().filter(|id| is_complete(id) || is_ready(id)).count();
            there > keys.len() / 2
        };
        let counts = [5, 3, 1].into_iter().filter(|count| *count <= wanted);
        let mut all = counts.map(|count| (count, chosen(count)));
        let keys = match is_kept {
            true => Some(chosen(wanted)).filter(|keys| keys.len() == wanted),
            false => {
                all.find(|(count, keys)| keys.len() == *count && has_most(keys)).map(|all| all.1)
            }
        };
        match keys {
            Some(keys) if keys != self.keys => {
                MapVoters { generation: self.generation.saturating_add(1), keys }
            }
            Some(_) => self.clone(),
            None if is_kept => self.clone(),
            None => MapVoters { generation: self.generation.saturating_add(1), keys: chosen(1) },
        }
    }

    /// The voters of a pool without witnesses.
    pub fn of_members(
        &self,
        enrolled: &PoolMembers,
        is_dead: impl Fn(PeerId) -> bool,
        has_everything: impl Fn(PeerId) -> bool,
    ) -> MapVoters {
        let to_be = VotersToBe {
            enrolled,
            witnesses: &PoolWitnesses::default(),
            ready: &BTreeSet::new(),
            voting: &self.keys,
        };
        self.of(&to_be, is_dead, has_everything)
    }

    fn is_sound(&self, enrolled: &PoolMembers, witnesses: &PoolWitnesses) -> bool {
        self.generation >= 1
            && matches!(self.keys.len(), 1 | 3 | 5)
            && self.keys.iter().all(|key| enrolled.contains(*key) || witnesses.contains(*key))
    }
}

/// Who has what part in a pool, from one change of it to the next.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct PoolMap {
    /// Counts maps; the first is 1.
    #[n(0)]
    pub epoch: u64,
    /// The member that decides changes of files.
    #[cbor(n(1), with = "peer_key")]
    pub primary: PeerId,
    /// The run of its process that proposed the map: random bits, others at each start.
    #[n(3)]
    pub run: u64,
    /// The write verifier: another one than in the map before if bytes that were answered, and not synced, may have been lost.
    #[n(4)]
    pub verifier: u64,
    /// The members that have everything that was answered, the primary among them.
    #[cbor(n(2), with = "peer_keys")]
    pub members: BTreeSet<PeerId>,
    /// All members of the pool, with their addresses.
    #[n(5)]
    pub enrolled: PoolMembers,
    /// Who decides the next map.
    #[n(6)]
    pub voters: MapVoters,
    /// The pool's other groups, in the map of its first one.
    #[cbor(n(7), default)]
    pub roster: PoolRoster,
    /// The nodes that belong to the pool and have no files of it.
    #[cbor(n(8), default)]
    pub witnesses: PoolWitnesses,
}

impl PoolMap {
    /// The map with which a pool begins: the first of the list is primary, all are members of the epoch, and the first one, three or five
    /// vote.
    pub fn first(founding: &PoolMembers) -> PoolMap {
        let keys = || founding.peers().iter().map(|peer| peer.id);
        let count = MapVoters::count(founding.peers().len(), 0);
        PoolMap {
            epoch: 1,
            primary: founding.founder().id,
            run: 0,
            verifier: 0,
            members: keys().collect(),
            enrolled: founding.clone(),
            voters: MapVoters { generation: 1, keys: keys().take(count).collect() },
            roster: PoolRoster::default(),
            witnesses: PoolWitnesses::default(),
        }
    }

    /// Whether it can be a map at all.
    pub fn is_sound(&self) -> bool {
        self.epoch >= 1
            && self.members.contains(&self.primary)
            && self.members.iter().all(|member| self.enrolled.contains(*member))
            && self.voters.is_sound(&self.enrolled, &self.witnesses)
            && !self.witnesses.all().iter().any(|witness| self.enrolled.contains(witness.peer.id))
            && self.roster.is_sound()
    }

    /// The primary, and where it listens.
    pub(crate) fn primary_peer(&self) -> Peer {
        self.enrolled.get(self.primary).expect("the primary of a sound map is enrolled")
    }

    /// A node that belongs to the group, with files or without, and where it listens.
    pub(crate) fn peer(&self, id: PeerId) -> Option<Peer> {
        self.enrolled.get(id).or_else(|| Some(self.witnesses.get(id)?.peer))
    }

    /// All nodes that belong to the group, with files or without.
    pub(crate) fn all_peers(&self) -> impl Iterator<Item = Peer> {
        let witnesses = self.witnesses.all().iter().map(|witness| witness.peer);
        self.enrolled.peers().iter().copied().chain(witnesses)
    }

    /// Whether a node without files votes, in this incarnation.
    pub(crate) fn has_vote_of(&self, witness: Witness) -> bool {
        self.voters.keys.contains(&witness.peer.id) && self.witnesses.contains_incarnation(witness)
    }

    /// Whether all enrolled members have everything.
    pub(crate) fn is_whole(&self) -> bool {
        self.members.len() == self.enrolled.peers().len()
    }

    /// Whether the pool has one member, and one group.
    pub fn is_of_one(&self) -> bool {
        self.enrolled.peers().len() == 1 && self.roster.groups().is_empty()
    }

    /// Whether it may be decided when `current` holds: its proposer knew that one, and voters change by generations.
    pub fn follows(&self, current: &PoolMap) -> bool {
        let (before, now) = (&current.voters, &self.voters);
        current.epoch.checked_add(1) == Some(self.epoch)
            && (now == before || before.generation.checked_add(1) == Some(now.generation))
    }

    /// Its text, as on disk.
    pub fn to_text(&self) -> String {
        let PoolMap { epoch, run, verifier, .. } = self;
        let primary = HEXLOWER.encode(&self.primary.0);
        let mut text = format!(
            "{FIRST_LINE}\nepoch {epoch} of {primary} run {run:016x} verifier {verifier:016x}\nvoters {}\n",
            self.voters.generation
        );
        for Peer { id, addr } in self.enrolled.peers() {
            text.push_str(&format!("{} {addr}", HEXLOWER.encode(&id.0)));
            for (keys, word) in [(&self.members, COMPLETE), (&self.voters.keys, VOTES)] {
                if keys.contains(id) {
                    text.push(' ');
                    text.push_str(word);
                }
            }
            text.push('\n');
        }
        for witness in self.witnesses.all() {
            let votes = self.voters.keys.contains(&witness.peer.id);
            let word = if votes { format!(" {VOTES}") } else { String::new() };
            text.push_str(&format!("{}{word}\n", witness.to_line()));
        }
        text + &self.roster.to_text() + LAST_LINE
    }

    /// The map of a text; none if that is none.
    pub fn from_text(text: &str) -> Option<PoolMap> {
        let mut lines = text.strip_suffix(LAST_LINE)?.lines().peekable();
        if lines.next()? != FIRST_LINE {
            return None;
        }
        let key = |text: &str| HEXLOWER.decode(text.as_bytes()).ok()?.try_into().ok().map(PeerId);
        let hex = |text: &str| u64::from_str_radix(text, 16).ok();
        let words: Vec<&str> = lines.next()?.split(' ').collect();
        let ["epoch", epoch, "of", primary, "run", run, "verifier", verifier] = words[..] else {
            return None;
        };
        let generation = lines.next()?.strip_prefix("voters ")?.parse().ok()?;
        let (mut peers, mut members, mut keys) = (Vec::new(), BTreeSet::new(), BTreeSet::new());
        let is_member =
            |line: &&str| !line.starts_with("copies ") && !line.starts_with(witnesses::LINE);
        while let Some(line) = lines.next_if(is_member) {
            let mut words = line.split(' ');
            let peer = Peer { id: key(words.next()?)?, addr: words.next()?.parse().ok()? };
            for word in words {
                let is_new = match word {
                    COMPLETE => members.insert(peer.id),
                    VOTES => keys.insert(peer.id),
                    _ => return None,
                };
                is_new.then_some(())?;
            }
            peers.push(peer);
        }
        let mut without_files = Vec::new();
        while let Some(line) = lines.next_if(|line| line.starts_with(witnesses::LINE)) {
            let (witness, word) = Witness::from_line(line)?;
            match word {
                Some(VOTES) => keys.insert(witness.peer.id).then_some(())?,
                Some(_) => return None,
                None => {}
            }
            without_files.push(witness);
        }
        let map = PoolMap {
            epoch: epoch.parse().ok()?,
            primary: key(primary)?,
            run: hex(run)?,
            verifier: hex(verifier)?,
            members,
            enrolled: PoolMembers::new(peers)?,
            voters: MapVoters { generation, keys },
            roster: PoolRoster::from_lines(lines)?,
            witnesses: PoolWitnesses::new(without_files)?,
        };
        map.is_sound().then_some(map)
    }

    /// The members and witnesses that vote.
    pub fn voting(&self) -> impl Iterator<Item = Peer> {
        self.all_peers().filter(|peer| self.voters.keys.contains(&peer.id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::{decode, encode};

    fn id(n: u8) -> PeerId {
        PeerId([n; 32])
    }

    fn peer(n: u8) -> Peer {
        Peer { id: id(n), addr: ([10, 0, 0, n], 4711).into() }
    }

    fn founding(count: u8) -> PoolMembers {
        PoolMembers::new((1..=count).map(peer).collect()).unwrap()
    }

    fn keys(numbers: &[u8]) -> BTreeSet<PeerId> {
        numbers.iter().map(|n| id(*n)).collect()
    }

    #[test]
    fn maps_read_back_and_damaged_ones_are_none() {
        let map = PoolMap::first(&founding(16));
        let bytes = encode(&map);
        assert_eq!(decode::<PoolMap>(&bytes), Some(map));
        for len in 0..bytes.len() {
            assert_eq!(decode::<PoolMap>(&bytes[..len]), None);
        }
        let rest = [
            &[0x05, 0x06][..],
            &encode(&founding(2)),
            &encode(&PoolMap::first(&founding(2)).voters),
            &encode(&PoolRoster::default()),
        ];
        let rest = rest.concat();
        let key = |n: u8| [&[0x58, 0x20][..], &[n; 32]].concat();
        let with = |members: &[u8]| [&[0x88, 0x01][..], &key(1), members, &rest].concat();
        assert!(decode::<PoolMap>(&with(&[&[0x82][..], &key(1), &key(2)].concat())).is_some());
        let wrong = [
            [&[0x82][..], &key(2), &key(1)].concat(),
            [&[0x82][..], &key(1), &key(1)].concat(),
            [&[0x91][..], &(1..18).flat_map(key).collect::<Vec<_>>()].concat(),
            vec![0x9b, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff],
            [&[0x9f][..], &key(1), &[0xff]].concat(),
            [&[0x81, 0x58, 0x1f][..], &[1; 31]].concat(),
        ];
        for members in wrong {
            assert_eq!(decode::<PoolMap>(&with(&members)), None, "{members:x?}");
        }
    }

    #[test]
    fn the_text_of_a_map_reads_back_and_a_damaged_one_is_none() {
        let map = PoolMap {
            roster: crate::roster::largest(),
            epoch: 7,
            run: u64::MAX,
            verifier: 3,
            members: keys(&[1, 3]),
            voters: MapVoters { generation: 2, keys: keys(&[2, 3, 4]) },
            ..PoolMap::first(&founding(5))
        };
        let text = map.to_text();
        assert_eq!(PoolMap::from_text(&text), Some(map));
        for len in 0..text.len() {
            assert_eq!(PoolMap::from_text(&text[..len]), None, "{len}");
        }
        for (from, to) in [
            ("epoch 7", "epoch 0"),
            ("votes", "vote"),
            ("complete", "complete complete"),
            ("voters 2", "voters x"),
        ] {
            assert_eq!(PoolMap::from_text(&text.replacen(from, to, 1)), None, "{to}");
        }
    }

    #[test]
    fn a_map_names_enrolled_members_alone_with_the_primary_among_them() {
        let first = PoolMap::first(&founding(3));
        let map = |members: &[u8], primary: u8| PoolMap {
            epoch: 2,
            primary: id(primary),
            members: keys(members),
            ..first.clone()
        };
        assert!(map(&[2, 3], 3).is_sound());
        assert!(!map(&[], 1).is_sound());
        assert!(!map(&[2, 3], 1).is_sound(), "the primary is no member");
        assert!(!map(&[1, 4], 1).is_sound(), "a stranger is one");
        assert!(!PoolMap { epoch: 0, ..map(&[1], 1) }.is_sound());
        for voters in [&[][..], &[1, 2], &[1, 2, 4]] {
            let voters = MapVoters { generation: 1, keys: keys(voters) };
            assert!(!PoolMap { voters, ..first.clone() }.is_sound());
        }
    }

    #[test]
    fn a_map_follows_the_one_before_and_voters_change_by_generations() {
        let first = PoolMap::first(&founding(3));
        let second = PoolMap { epoch: 2, ..first.clone() };
        assert!(second.follows(&first));
        assert!(!first.follows(&first));
        let last = PoolMap { epoch: u64::MAX, ..first.clone() };
        assert!(!PoolMap { epoch: 0, ..first.clone() }.follows(&last));
        let with = |generation, voters: &[u8]| PoolMap {
            voters: MapVoters { generation, keys: keys(voters) },
            ..second.clone()
        };
        assert!(with(2, &[1]).follows(&first));
        assert!(!with(1, &[1]).follows(&first), "others, but the same generation");
        assert!(!with(3, &[1]).follows(&first));
    }

    #[test]
    fn the_first_one_three_or_five_members_vote() {
        let count = |members| PoolMap::first(&founding(members)).voting().count();
        assert_eq!([1, 2, 3, 4, 5, 6, 16].map(count), [1, 1, 3, 3, 5, 5, 5]);
        assert_eq!(PoolMap::first(&founding(4)).voting().next(), Some(peer(1)));
    }

    #[test]
    fn voters_are_more_when_so_many_have_everything_and_dead_ones_are_replaced() {
        let now = |voters: &[u8]| MapVoters { generation: 4, keys: keys(voters) };
        let next = |voters: &[u8], enrolled: u8, dead: &[u8], complete: &[u8]| {
            let (dead, complete) = (keys(dead), keys(complete));
            let none = PoolWitnesses::default();
            let to_be = VotersToBe {
                enrolled: &founding(enrolled),
                witnesses: &none,
                ready: &BTreeSet::new(),
                voting: &keys(voters),
            };
            let next = now(voters).of(&to_be, |id| dead.contains(&id), |id| complete.contains(&id));
            assert_eq!(next.generation, if next.keys == keys(voters) { 4 } else { 5 });
            assert!(next.is_sound(&founding(enrolled), &none));
            next.keys
        };
        assert_eq!(next(&[1], 3, &[], &[1, 2]), keys(&[1]), "the third has nothing yet");
        assert_eq!(next(&[1], 3, &[], &[1, 2, 3]), keys(&[1, 2, 3]));
        assert_eq!(next(&[1, 2, 3], 3, &[], &[1]), keys(&[1, 2, 3]), "two are away");
        assert_eq!(next(&[1, 2, 3], 4, &[2], &[1, 3, 4]), keys(&[1, 3, 4]));
        assert_eq!(next(&[1, 2, 3], 3, &[2], &[1, 3]), keys(&[1, 2, 3]), "nobody can replace it");
        assert_eq!(next(&[1, 2, 3], 2, &[], &[1, 2]), keys(&[1]), "one was removed");
        assert_eq!(next(&[2, 3, 4], 3, &[], &[1, 2, 3]), keys(&[1, 2, 3]), "a voter was removed");
        assert_eq!(next(&[1, 2, 3], 5, &[], &[1, 2, 3, 4]), keys(&[1, 2, 3]));
        assert_eq!(next(&[1, 2, 3], 5, &[], &[1, 2, 3, 4, 5]), keys(&[1, 2, 3, 4, 5]));
        assert_eq!(next(&[2], 2, &[2], &[1]), keys(&[1]));
        assert_eq!(next(&[1, 2, 3], 4, &[], &[2, 3, 4]), keys(&[1, 2, 3]), "one is restarted");
        // One of them leaves: those that are left are there.
        assert_eq!(next(&[1, 2, 3], 2, &[], &[2]), keys(&[2]), "the first is away");
        assert_eq!(next(&[1, 2, 3, 4, 5], 4, &[], &[3, 4]), keys(&[1, 3, 4]), "two are away");
        assert_eq!(next(&[1, 2, 3, 4, 5], 4, &[], &[3]), keys(&[3]), "all others are");
        // One of them goes, and who comes has nothing yet.
        assert_eq!(next(&[2, 3, 9], 4, &[], &[2, 3]), keys(&[2]));
        assert_eq!(next(&[2, 3, 9], 4, &[], &[2, 3, 4]), keys(&[2, 3, 4]));
        assert_eq!(next(&[9], 2, &[], &[1]), keys(&[1]));
    }
    /// Of members 1 to `enrolled`, and nodes without files from 101 on.
    fn next_with(
        voters: &[u8],
        (enrolled, witnesses): (u8, u8),
        (dead, complete, ready): (&[u8], &[u8], &[u8]),
    ) -> BTreeSet<PeerId> {
        let listed = (101..101 + witnesses).map(|n| Witness { peer: peer(n), incarnation: 1 });
        let witnesses = PoolWitnesses::new(listed.collect()).unwrap();
        let to_be = VotersToBe {
            enrolled: &founding(enrolled),
            witnesses: &witnesses,
            ready: &keys(ready),
            voting: &keys(voters),
        };
        let now = MapVoters { generation: 4, keys: keys(voters) };
        let (dead, complete) = (keys(dead), keys(complete));
        let next = now.of(&to_be, |id| dead.contains(&id), |id| complete.contains(&id));
        assert!(next.is_sound(&founding(enrolled), &witnesses));
        assert_eq!(next.generation, if next.keys == keys(voters) { 4 } else { 5 });
        let voting = witnesses.all().iter().filter(|one| next.keys.contains(&one.peer.id)).count();
        assert!(2 * voting < next.keys.len(), "fewer witnesses than members");
        next.keys
    }

    #[test]
    fn witnesses_vote_where_members_are_too_few() {
        let next = |voters: &[u8], of, ready: &[u8]| {
            let complete: Vec<u8> = (1..=of).collect();
            next_with(voters, (of, 3), (&[], &complete, ready))
        };
        assert_eq!(next(&[1], 1, &[101, 102]), keys(&[1]), "nobody else has a copy");
        assert_eq!(next(&[1], 2, &[]), keys(&[1]), "nobody has said that it is there");
        assert_eq!(next(&[1], 2, &[102]), keys(&[1, 2, 102]));
        assert_eq!(next(&[1, 2, 102], 2, &[101, 102, 103]), keys(&[1, 2, 102]), "they stay");
        assert_eq!(next(&[1, 2, 102], 3, &[102]), keys(&[1, 2, 3]), "a member takes its place");
        assert_eq!(next(&[1, 2, 3], 3, &[101]), keys(&[1, 2, 3]), "it is a gateway");
        assert_eq!(next(&[1, 2, 3], 3, &[101, 103]), keys(&[1, 2, 3, 101, 103]));
        assert_eq!(next(&[1, 2, 3], 4, &[101]), keys(&[1, 2, 3, 4, 101]));
        assert_eq!(next(&[1, 2, 3, 4, 101], 5, &[101]), keys(&[1, 2, 3, 4, 5]));
    }

    #[test]
    fn voters_with_a_witness_stay_while_one_is_away_and_others_replace_dead_ones() {
        let all = [1, 2, 101];
        let next = |of, dead: &[u8], complete: &[u8], ready: &[u8]| {
            next_with(&all, of, (dead, complete, ready))
        };
        assert_eq!(next((2, 2), &[], &[1], &[101, 102]), keys(&all), "a member is away");
        assert_eq!(next((2, 2), &[], &[1, 2], &[]), keys(&all), "the witness is away");
        assert_eq!(next((2, 2), &[101], &[1, 2], &[]), keys(&all), "nobody can replace it");
        assert_eq!(next((2, 2), &[101], &[1, 2], &[102]), keys(&[1, 2, 102]));
        assert_eq!(next((2, 2), &[2], &[1], &[101, 102]), keys(&all), "witnesses stay fewer");
        assert_eq!(next((1, 2), &[], &[1], &[101, 102]), keys(&[1]), "one member has left");
        assert_eq!(next((3, 2), &[2], &[1, 3], &[101]), keys(&[1, 3, 101]));
        // The witness is another one by now: it votes no more, and again when it has said that it is there.
        let renewed = |voting: &[u8], ready: &[u8]| {
            let witnesses =
                PoolWitnesses::new(vec![Witness { peer: peer(101), incarnation: 2 }]).unwrap();
            let to_be = VotersToBe {
                enrolled: &founding(2),
                witnesses: &witnesses,
                ready: &keys(ready),
                voting: &keys(voting),
            };
            let now = MapVoters { generation: 4, keys: keys(&all) };
            now.of(&to_be, |_| false, |_| true)
        };
        let without = MapVoters { generation: 5, keys: keys(&[1]) };
        assert_eq!(renewed(&[1, 2], &[]), without);
    }

    #[test]
    fn a_map_with_witnesses_reads_back_and_names_no_node_twice() {
        let witnesses = crate::witnesses::most();
        let map = PoolMap { witnesses, ..PoolMap::first(&founding(3)) };
        let voters = MapVoters { generation: 2, keys: keys(&[1, 2, 200]) };
        let map = PoolMap { voters, ..map };
        assert!(map.is_sound());
        assert_eq!(decode::<PoolMap>(&encode(&map)), Some(map.clone()));
        let text = map.to_text();
        assert_eq!(PoolMap::from_text(&text), Some(map.clone()));
        for len in 0..text.len() {
            assert_eq!(PoolMap::from_text(&text[..len]), None, "{len}");
        }
        let twice = Witness { peer: peer(2), incarnation: 1 };
        let twice = PoolWitnesses::new(vec![twice]).unwrap();
        assert!(!PoolMap { witnesses: twice, ..PoolMap::first(&founding(3)) }.is_sound());
        assert_eq!(map.voting().count(), 3);
    }
}
