//! How a pool of several stands, for commands and people, as one node knows it.

use std::collections::BTreeSet;

use atoll_key::PeerId;
use atoll_net::Peer;
use atoll_pool::{GroupNumber, GroupStatus, MachineStatus, MemberStatus, PoolMembers};
use data_encoding::HEXLOWER;
use serde::{Deserialize, Serialize};

/// How one of this node's pools stands.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct PoolOfNode {
    /// Its name on this node.
    pub name: String,
    /// Why this node does not serve it, for people.
    pub problem: Option<String>,
    /// Others say that this machine belongs to it no more.
    pub is_removed: bool,
    /// The machines that belong to it; none if this node does not know.
    pub machines: Vec<PoolMachineState>,
    /// The machines that belong to it and have no files of it, as far as this node knows.
    #[serde(default)]
    pub witnesses: Vec<PoolWitnessState>,
    /// On how many machines each file is to be.
    pub copies: usize,
    /// A group with fewer members that take part refuses changes.
    #[serde(default)]
    pub min_copies: usize,
    /// Down to which level directories are distributed that are made now, if somebody has changed that since the pool was made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<u8>,
    /// Its groups of members, each of which has a part of the directories.
    pub groups: Vec<PoolGroupState>,
}

/// A machine of a pool.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct PoolMachineState {
    /// The node, in short, and where it listens.
    pub node: String,
    /// Its public key, in hexadecimal digits.
    pub key: String,
    /// Whether it is this one.
    pub is_here: bool,
    /// In how many groups it has a member, as far as this node knows.
    pub groups: usize,
    /// Whether it goes when others have what it has.
    pub is_to_go: bool,
    /// What others are given before it goes, as far as this node knows; none if it stays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain: Option<PoolDrain>,
}

/// What is left to be copied before a machine goes. A group's primary knows that of its group; other nodes do not.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct PoolDrain {
    /// The groups that it still is in.
    pub groups_left: usize,
    /// Those of them of which this node knows what is left: it is their primary.
    pub groups_known: usize,
    /// Bytes that others lack of these groups' files; none if one of them is just given names, or no other machine has come
    /// yet.
    pub bytes_left: Option<u64>,
    /// How long that takes, seconds; none if that is not known of each group that is left.
    pub seconds_left: Option<u64>,
}

impl PoolDrain {
    /// What is left in these groups, which have the machine.
    fn of<'g>(groups: impl Iterator<Item = &'g PoolGroupState>) -> PoolDrain {
        let mut drain = PoolDrain {
            groups_left: 0,
            groups_known: 0,
            bytes_left: Some(0),
            seconds_left: Some(0),
        };
        for group in groups {
            drain.groups_left += 1;
            if !group.is_primary {
                drain.seconds_left = None;
                continue;
            }
            drain.groups_known += 1;
            for state in &group.states {
                let Some(copying) = &state.copying else { continue };
                let (bytes, seconds) = (copying.bytes_left(), copying.seconds_left);
                drain.bytes_left = drain.bytes_left.zip(bytes).map(|(all, more)| all + more);
                // Groups copy beside each other.
                drain.seconds_left = drain.seconds_left.zip(seconds).map(|(all, one)| all.max(one));
            }
            // Who takes its place has not come yet: nobody knows what that one lacks.
            if group.states.iter().all(|state| state.copying.is_none()) && group.lacks_copies {
                (drain.bytes_left, drain.seconds_left) = (None, None);
            }
        }
        drain
    }
}

/// A machine that belongs to a pool and has no files of it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct PoolWitnessState {
    /// The node, in short, and where it listens.
    pub node: String,
    /// Its public key, in hexadecimal digits.
    pub key: String,
    /// Whether it is this one.
    pub is_here: bool,
    /// Whether it is one of the voters of some group: a witness.
    pub votes: bool,
    /// Whether it has no vote because enough others vote, as far as this node knows.
    #[serde(default)]
    pub is_spare: bool,
    /// Why it is away, as this node knows if it is a primary.
    pub problem: Option<String>,
}

impl PoolWitnessState {
    /// How it stands, in words that follow its name.
    pub fn standing(&self) -> String {
        let part = match (self.votes, self.is_spare) {
            (true, _) => "has no files, and votes as a witness",
            (false, true) => "has no files, and no vote: enough others vote",
            (false, false) => "has no files, and no vote",
        };
        match &self.problem {
            Some(problem) => format!("{part}; it is away: {problem}"),
            None => part.to_owned(),
        }
    }

    /// All of a pool, as the node `own` knows them.
    fn of(status: &MachineStatus, own: PeerId) -> Vec<PoolWitnessState> {
        let served: Vec<&GroupStatus> =
            status.groups.iter().filter_map(|(_, stands)| stands.as_ref().ok()).collect();
        // Two members alone are not: a witness that is there votes beside them.
        let are_enough = !served.is_empty() && served.iter().all(|group| group.voters.len() > 2);
        let state = |peer: &Peer| {
            let in_first = status.first.voters.keys.contains(&peer.id);
            let in_others =
                || served.iter().any(|group| group.voters.iter().any(|voter| voter.id == peer.id));
            let here = status.voting.as_ref().filter(|_| peer.id == own);
            let mut known = served.iter().flat_map(|group| &group.witnesses);
            let known = known.find(|one| one.peer.id == peer.id && one.problem.is_some());
            let votes = in_first || in_others() || here.is_some_and(|own| !own.votes_in.is_empty());
            PoolWitnessState {
                node: peer.to_string(),
                key: HEXLOWER.encode(&peer.id.0),
                is_here: peer.id == own,
                votes,
                is_spare: !votes && are_enough,
                problem: known.and_then(|one| one.problem.clone()),
            }
        };
        status.first.witnesses.all().iter().map(|witness| state(&witness.peer)).collect()
    }

    /// Its public key; none if the text is none.
    pub fn peer_id(&self) -> Option<PeerId> {
        key_of(&self.key)
    }
}

fn key_of(text: &str) -> Option<PeerId> {
    HEXLOWER.decode(text.as_bytes()).ok()?.try_into().ok().map(PeerId)
}

/// How a group of a pool stands.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct PoolGroupState {
    /// Its number.
    pub group: u8,
    /// Whether this node has a member of it. What is said of one without is what others have said of it.
    pub is_here: bool,
    /// Whether directories are made in it: not before it has had all its copies.
    pub is_open: bool,
    /// How many members it has.
    pub members: usize,
    /// Whether fewer of them that stay have everything than files are to have copies, as its primary knows.
    #[serde(default)]
    pub lacks_copies: bool,
    /// Why this node does not serve it, for people.
    pub problem: Option<String>,
    /// The members whose majority decides who is the primary, in short, and where they listen.
    pub voters: Vec<String>,
    /// Counts the group's maps, each of which says who is the primary; 0 if this node does not serve it.
    pub epoch: u64,
    /// Who decides its changes, as far as this node knows.
    pub primary: Option<String>,
    /// Whether this node does, and serves clients.
    pub is_primary: bool,
    /// How its members stand, as far as this node knows: on the primary all, itself first; elsewhere this one.
    pub states: Vec<PoolMemberState>,
    /// Copies that the last scrub found to be wrong and could not heal, as far as this node knows.
    #[serde(default)]
    pub unhealed: u64,
    /// How many mounts and servers have taken locks on files of late, and how many locks they hold, as this node knows it.
    pub lock_sessions: usize,
    /// See `lock_sessions`.
    pub locks: usize,
}

/// How a member stands.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct PoolMemberState {
    /// The node, in short, and where it listens.
    pub node: String,
    /// Whether it has everything that was answered. One that has not and is there is brought up to date.
    pub is_member: bool,
    /// Why it does not take part.
    pub problem: Option<String>,
    /// The last change that it has made.
    pub applied: u64,
    /// Room on its disk, bytes; none if that is not known.
    pub free_bytes: Option<u64>,
    /// Files of which it gets ranges again.
    pub files_to_mend: usize,
    /// How far it is, if it is given all files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copying: Option<PoolCopying>,
}

/// How far a member is that is given all files.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct PoolCopying {
    /// Files that it was given by name, and nothing else yet; 0 if it has all names.
    pub names: u64,
    /// Regular files whose bytes it has.
    pub files_done: u64,
    /// How many there are.
    pub files: u64,
    /// Bytes of them that it has.
    pub bytes_done: u64,
    /// And all.
    pub bytes: u64,
    /// How long it takes, seconds; none if that is not known yet.
    pub seconds_left: Option<u64>,
}

impl PoolCopying {
    /// How many bytes it lacks; none if it is just given names.
    pub fn bytes_left(&self) -> Option<u64> {
        (self.names == 0).then(|| self.bytes.saturating_sub(self.bytes_done))
    }

    fn words(&self) -> String {
        if self.names > 0 {
            return format!("is given the names of all files: {} by now", self.names);
        }
        let PoolCopying { files_done, files, .. } = self;
        let left = match self.seconds_left {
            Some(seconds) if seconds >= 120 => format!(", {} minutes left", seconds / 60),
            Some(seconds) => format!(", {seconds} seconds left"),
            None => String::new(),
        };
        let share = match self.bytes {
            0 => 100,
            bytes => u128::from(self.bytes_done) * 100 / u128::from(bytes),
        };
        format!("is given all files: {files_done} of {files}, {share} % of the bytes{left}")
    }
}

impl PoolOfNode {
    /// A pool by its name on the node `own`, with its state if the node serves it, or why it does not.
    pub(super) fn new(
        (name, own): (&str, PeerId),
        served: Result<MachineStatus, String>,
    ) -> PoolOfNode {
        let unserved = PoolOfNode {
            name: name.to_owned(),
            problem: None,
            is_removed: false,
            machines: Vec::new(),
            witnesses: Vec::new(),
            copies: 0,
            min_copies: 0,
            level: None,
            groups: Vec::new(),
        };
        let status = match served {
            Err(problem) => return PoolOfNode { problem: Some(problem), ..unserved },
            Ok(status) => status,
        };
        let mut all = status.all_groups();
        for (number, stands) in &status.groups {
            if let (Ok(stands), Some(known)) = (stands, all.get_mut(number)) {
                *known = stands.enrolled.clone();
            }
        }
        let roster = status.roster();
        let is_open = |number| roster.groups().get(&number).is_none_or(|group| group.is_open);
        let machines: BTreeSet<_> = all.values().flat_map(PoolMembers::peers).collect();
        let staying = machines.iter().filter(|peer| !roster.to_go().contains(&peer.id)).count();
        let groups: Vec<PoolGroupState> = all
            .iter()
            .map(|(number, members)| {
                let here = status.groups.iter().find(|(group, _)| group == number);
                let here = here.map(|(_, stands)| stands.clone());
                let complete = here.iter().flatten().flat_map(|stands| &stands.members);
                let complete = complete
                    .filter(|state| state.is_member && !roster.to_go().contains(&state.peer.id));
                let lacks_copies = complete.count() < roster.copies().min(staying);
                let state = PoolGroupState::new((*number, members), here);
                let lacks_copies = state.is_primary && lacks_copies;
                PoolGroupState { is_open: is_open(*number), lacks_copies, ..state }
            })
            .collect();
        let served = groups.iter().any(|group| group.is_here && group.problem.is_none());
        let why = groups.iter().find_map(|group| group.problem.clone());
        let without_files = status.voting.as_ref();
        let witnesses = PoolWitnessState::of(&status, own);
        let problem = match (status.is_removed, served) {
            (true, _) => Some("this machine belongs to it no more".to_owned()),
            (false, _) if without_files.is_some() => {
                without_files.and_then(|own| own.problems.first().cloned())
            }
            (false, true) => None,
            (false, false) => Some(why.unwrap_or_else(|| "its directories are opened".to_owned())),
        };
        let groups_of = |id: PeerId| {
            let has = all.values().map(move |members| members.contains(id));
            groups.iter().zip(has).filter(|(_, has)| *has).map(|(group, _)| group)
        };
        let machine = |peer: &Peer| PoolMachineState {
            node: peer.to_string(),
            key: HEXLOWER.encode(&peer.id.0),
            is_here: peer.id == own,
            groups: all.values().filter(|members| members.contains(peer.id)).count(),
            is_to_go: roster.to_go().contains(&peer.id),
            drain: roster.to_go().contains(&peer.id).then(|| PoolDrain::of(groups_of(peer.id))),
        };
        let machines = machines.into_iter().map(machine).collect();
        PoolOfNode {
            problem,
            is_removed: status.is_removed,
            machines,
            witnesses,
            copies: roster.copies(),
            min_copies: roster.rules().min_copies.into(),
            level: roster.rules().level,
            groups,
            ..unserved
        }
    }

    /// How it stands, in a few words.
    pub fn summary(&self) -> String {
        if let Some(problem) = &self.problem {
            return problem.clone();
        }
        if let Some(own) = self.witnesses.iter().find(|one| one.is_here) {
            return format!("this node {}", own.standing());
        }
        let here: Vec<_> = self.groups.iter().filter(|group| group.is_here).collect();
        match (&self.groups[..], &here[..]) {
            ([only], _) => only.summary(),
            (all, here) => {
                let served = here.iter().filter(|group| group.problem.is_none()).count();
                let leads = here.iter().filter(|group| group.is_primary).count();
                format!(
                    "{} machines, {} groups; this node has a member of {served}, and is the primary of {leads}",
                    self.machines.len(),
                    all.len()
                )
            }
        }
    }

    /// That a group refuses changes since too few of its members take part, as its primary knows, for people.
    pub fn refuses_changes(&self, group: &PoolGroupState) -> Option<String> {
        let members = group.states.iter().filter(|state| state.is_member).count();
        // The rule does not hold for a group that one machine alone belongs to.
        let refuses = group.is_primary && group.members > 1 && members < self.min_copies;
        refuses.then(|| {
            format!(
                "it refuses changes: {members} of the {} copies that changes need are there",
                self.min_copies
            )
        })
    }

    /// What somebody should know who looks after it.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        for group in &self.groups {
            let of = |why: String| match self.groups.len() {
                1 => why,
                _ => format!("group {}: {why}", group.group),
            };
            let short = group.states.iter().filter(|state| !state.takes_part());
            let stands = |state: &PoolMemberState| format!("{} {}", state.node, state.standing());
            let away = group.problem.iter().filter(|_| self.problem.is_none()).cloned();
            let unhealed = group.unhealed_copies();
            let few = self.refuses_changes(group);
            let all = away
                .chain(short.map(stands))
                .chain(group.needed_member(&self.witnesses))
                .chain(unhealed);
            let all = all.chain(few);
            warnings.extend(all.map(of));
        }
        let away = self.witnesses.iter().filter(|one| one.problem.is_some());
        warnings.extend(away.map(|one| format!("{} {}", one.node, one.standing())));
        warnings
    }
}

impl PoolMachineState {
    /// Its public key; none if the text is none.
    pub fn peer_id(&self) -> Option<PeerId> {
        key_of(&self.key)
    }
}

impl PoolGroupState {
    /// A group with these members, and the state of this node's member; why there is none, if there is to be one.
    fn new(
        (group, members): (GroupNumber, &PoolMembers),
        here: Option<Result<GroupStatus, String>>,
    ) -> PoolGroupState {
        let known = PoolGroupState {
            group: group.number(),
            members: members.peers().len(),
            is_here: here.is_some(),
            ..PoolGroupState::default()
        };
        match here {
            None => known,
            Some(Err(problem)) => PoolGroupState { problem: Some(problem), ..known },
            Some(Ok(GroupStatus {
                epoch,
                primary,
                is_primary,
                enrolled: _,
                voters,
                members,
                locks: (lock_sessions, locks),
                unhealed,
                witnesses: _,
            })) => PoolGroupState {
                voters: voters.iter().map(|peer| peer.to_string()).collect(),
                epoch,
                primary: Some(primary.to_string()),
                is_primary,
                states: members.into_iter().map(PoolMemberState::from).collect(),
                unhealed,
                lock_sessions,
                locks,
                ..known
            },
        }
    }

    /// How it stands, in a few words.
    pub fn summary(&self) -> String {
        if let Some(problem) = &self.problem {
            return problem.clone();
        }
        if self.is_primary {
            let taking_part = self.states.iter().filter(|state| state.takes_part()).count();
            return match taking_part == self.members {
                true => format!("this node is the primary; all {taking_part} members take part"),
                false => format!(
                    "this node is the primary; {taking_part} of {} members take part",
                    self.members
                ),
            };
        }
        let own = self.states.first().map_or_else(String::new, PoolMemberState::standing);
        match &self.primary {
            Some(primary) => format!("{own}; the primary is {primary}"),
            None => own,
        }
    }

    /// That copies are wrong and were not healed, for people.
    pub fn unhealed_copies(&self) -> Option<String> {
        (self.unhealed > 0).then(|| {
            let count = self.unhealed;
            format!("{count} copies of files are wrong and could not be healed: `atoll pool check` names them")
        })
    }

    /// Without which of its members it stops, if there is one, for people.
    pub fn needed_member(&self, witnesses: &[PoolWitnessState]) -> Option<String> {
        let nodes = |away: bool| {
            let named = witnesses.iter().filter(|one| one.problem.is_some() == away);
            named.map(|one| one.node.as_str()).collect::<Vec<_>>().join(", ")
        };
        match &self.voters[..] {
            [_] if self.members == 1 => {
                Some("it has one member: nobody else has a copy".to_owned())
            }
            [voter] if witnesses.iter().any(|one| one.problem.is_none()) => Some(format!(
                "it stops while {voter} is away, which alone decides who is the primary, until {} votes as a witness, or another machine has a copy",
                nodes(false)
            )),
            [voter] if !witnesses.is_empty() => Some(format!(
                "it stops while {voter} is away, which alone decides who is the primary: {} would vote as a witness, and is away",
                nodes(true)
            )),
            [voter] => Some(format!(
                "it stops while {voter} is away, which alone decides who is the primary. A third machine ends that: one that has a copy, or one without files as a witness (`atoll pool join` without a directory)"
            )),
            _ => None,
        }
    }
}

impl PoolMemberState {
    /// Whether it has everything that was answered, and is there.
    pub fn takes_part(&self) -> bool {
        self.is_member && self.problem.is_none()
    }

    /// How it stands, in words that follow its name.
    pub fn standing(&self) -> String {
        if let Some(copying) = &self.copying {
            return copying.words();
        }
        match &self.problem {
            Some(problem) => format!("is away: {problem}"),
            None if self.is_member => "takes part".to_owned(),
            None => match self.files_to_mend {
                0 => "is brought up to date".to_owned(),
                1 => "is brought up to date: 1 file".to_owned(),
                files => format!("is brought up to date: {files} files"),
            },
        }
    }
}

impl From<MemberStatus> for PoolMemberState {
    fn from(status: MemberStatus) -> PoolMemberState {
        let MemberStatus {
            peer,
            is_member,
            problem,
            applied,
            free_bytes,
            files_to_mend,
            copying,
            silence: _,
        } = status;
        let copying = copying.map(|copying| PoolCopying {
            names: copying.names,
            files_done: copying.files_done,
            files: copying.files,
            bytes_done: copying.bytes_done,
            bytes: copying.bytes,
            seconds_left: copying.left.map(|left| left.as_secs()),
        });
        let node = peer.to_string();
        PoolMemberState { node, is_member, problem, applied, free_bytes, files_to_mend, copying }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use atoll_pool::{PoolMap, PoolWitnesses, RosterEdit, VotingStatus, Witness, WitnessStatus};

    use super::*;

    fn peer(number: u8) -> Peer {
        Peer { id: PeerId([number; 32]), addr: ([10, 0, 0, number], 4711).into() }
    }

    fn member(number: u8, is_member: bool, problem: Option<&str>) -> MemberStatus {
        let problem = problem.map(str::to_owned);
        let (applied, free_bytes, files_to_mend) = (7, None, 0);
        let (peer, copying, silence) = (peer(number), None, Duration::ZERO);
        MemberStatus {
            peer,
            is_member,
            problem,
            applied,
            free_bytes,
            files_to_mend,
            copying,
            silence,
        }
    }

    fn stands_of(count: u8, members: Vec<MemberStatus>, is_primary: bool) -> PoolOfNode {
        let enrolled = PoolMembers::new((1..=count).map(peer).collect()).unwrap();
        let voters = (1..=if count < 3 { 1 } else { 3 }).map(peer).collect();
        let (epoch, primary, locks) = (4, peer(2), (1, 2));
        let first = PoolMap::first(&enrolled);
        let (unhealed, witnesses) = (0, Vec::new());
        let status = GroupStatus {
            epoch,
            primary,
            is_primary,
            enrolled,
            voters,
            witnesses,
            members,
            unhealed,
            locks,
        };
        let groups = vec![(GroupNumber::FIRST, Ok(status))];
        let status = MachineStatus { first, groups, is_removed: false, voting: None };
        PoolOfNode::new(("team", peer(2).id), Ok(status))
    }

    fn stands(members: Vec<MemberStatus>, is_primary: bool) -> PoolOfNode {
        stands_of(3, members, is_primary)
    }

    #[test]
    fn the_primary_says_who_is_away_and_who_is_brought_up_to_date() {
        let whole = vec![member(2, true, None), member(1, true, None), member(3, true, None)];
        let pool = stands(whole, true);
        assert_eq!(pool.summary(), "this node is the primary; all 3 members take part");
        assert_eq!(pool.warnings(), [""; 0]);
        let mut learner = member(3, false, None);
        learner.files_to_mend = 5;
        let short = vec![member(2, true, None), member(1, true, Some("no answer")), learner];
        let pool = stands(short, true);
        assert_eq!(pool.summary(), "this node is the primary; 1 of 3 members take part");
        let expected = [
            format!("{} is away: no answer", peer(1)),
            format!("{} is brought up to date: 5 files", peer(3)),
        ];
        assert_eq!(pool.warnings(), expected);
    }

    #[test]
    fn a_member_that_is_given_all_files_says_how_far_it_is() {
        let copying = |names, bytes_done, seconds_left| PoolCopying {
            names,
            files_done: 3,
            files: 10,
            bytes_done,
            bytes: 200,
            seconds_left,
        };
        let words = [
            (copying(7, 0, None), "is given the names of all files: 7 by now"),
            (copying(0, 50, None), "is given all files: 3 of 10, 25 % of the bytes"),
            (
                copying(0, 50, Some(9)),
                "is given all files: 3 of 10, 25 % of the bytes, 9 seconds left",
            ),
            (
                copying(0, 199, Some(600)),
                "is given all files: 3 of 10, 99 % of the bytes, 10 minutes left",
            ),
        ];
        for (copying, expected) in words {
            let state = PoolMemberState { copying: Some(copying), ..member(3, false, None).into() };
            assert_eq!(state.standing(), expected);
        }
        let empty = PoolCopying { bytes: 0, bytes_done: 0, ..copying(0, 0, None) };
        assert!(empty.words().contains("100 %"));
    }

    #[test]
    fn another_member_says_who_the_primary_is_and_who_votes() {
        let pool = stands(vec![member(1, true, None)], false);
        assert_eq!(pool.summary(), format!("takes part; the primary is {}", peer(2)));
        let group = &pool.groups[0];
        assert_eq!((group.is_primary, group.epoch), (false, 4));
        assert_eq!((group.lock_sessions, group.locks), (1, 2));
        assert_eq!(group.voters, [1, 2, 3].map(|number| peer(number).to_string()));
        let machines: Vec<_> = pool.machines.iter().map(|machine| machine.node.clone()).collect();
        assert_eq!(machines, group.voters);
    }

    #[test]
    fn a_pool_of_one_or_two_warns_that_one_of_them_is_needed() {
        let warning = |count| stands_of(count, Vec::new(), true).groups[0].needed_member(&[]);
        assert!(warning(2).unwrap().contains(&format!("stops while {} is away", peer(1))));
        assert!(warning(1).unwrap().contains("nobody else has a copy"));
        assert_eq!(warning(3), None);
        let witness = |problem: Option<&str>| PoolWitnessState {
            node: "third".into(),
            key: String::new(),
            is_here: false,
            votes: false,
            is_spare: false,
            problem: problem.map(str::to_owned),
        };
        let pair = &stands_of(2, Vec::new(), true).groups[0];
        let away = pair.needed_member(&[witness(Some("no answer"))]).unwrap();
        assert!(away.ends_with("third would vote as a witness, and is away"), "{away}");
        let there = pair.needed_member(&[witness(None)]).unwrap();
        assert!(there.contains("until third votes as a witness"), "{there}");
        let standing = witness(Some("no answer")).standing();
        assert_eq!(standing, "has no files, and no vote; it is away: no answer");
        let spare = PoolWitnessState { is_spare: true, ..witness(None) };
        assert_eq!(spare.standing(), "has no files, and no vote: enough others vote");
        let pool = PoolOfNode::new(("pair", peer(1).id), Err("the code is wrong".into()));
        assert_eq!((pool.summary().as_str(), pool.warnings().len()), ("the code is wrong", 0));
    }

    #[test]
    fn machines_without_files_say_whether_they_vote_and_those_that_are_away_are_warned_of() {
        let listed = [11, 12].map(|number| Witness { peer: peer(number), incarnation: 1 });
        let enrolled = PoolMembers::new(vec![peer(1), peer(2)]).unwrap();
        let mut first = PoolMap::first(&enrolled);
        first.witnesses = PoolWitnesses::new(listed.to_vec()).unwrap();
        first.voters.keys = [1, 2, 11].map(|number| peer(number).id).into();
        let away = WitnessStatus { peer: peer(11), votes: true, problem: Some("gone".into()) };
        let primary = GroupStatus {
            epoch: 3,
            primary: peer(2),
            is_primary: true,
            enrolled,
            voters: [1, 2, 11].map(peer).into(),
            witnesses: vec![away],
            members: vec![member(2, true, None), member(1, true, None)],
            unhealed: 0,
            locks: (0, 0),
        };
        let groups = vec![(GroupNumber::FIRST, Ok(primary))];
        let status =
            MachineStatus { first: first.clone(), groups, is_removed: false, voting: None };
        let pool = PoolOfNode::new(("pair", peer(2).id), Ok(status));
        let votes: Vec<bool> = pool.witnesses.iter().map(|one| one.votes).collect();
        assert_eq!(votes, [true, false]);
        assert!(pool.witnesses[1].is_spare);
        assert_eq!(pool.machines.len(), 2, "those without files are listed elsewhere");
        let said = "has no files, and votes as a witness; it is away: gone";
        assert_eq!(pool.warnings(), [format!("{} {said}", peer(11))]);
        let voting = |problems: &[&str]| VotingStatus {
            votes_in: [GroupNumber::FIRST].into(),
            problems: problems.iter().map(|why| (*why).to_owned()).collect(),
        };
        let here = |voting| {
            let (first, groups) = (first.clone(), Vec::new());
            let status = MachineStatus { first, groups, is_removed: false, voting: Some(voting) };
            PoolOfNode::new(("pair", peer(11).id), Ok(status))
        };
        let pool = here(voting(&[]));
        assert_eq!(pool.summary(), "this node has no files, and votes as a witness");
        assert!(pool.warnings().is_empty());
        assert_eq!(here(voting(&["no room"])).problem.as_deref(), Some("no room"));
    }

    #[test]
    fn a_pool_of_several_groups_says_which_of_them_are_here() {
        let of = |numbers: &[u8]| {
            PoolMembers::new(numbers.iter().map(|number| peer(*number)).collect()).unwrap()
        };
        let mut first = PoolMap::first(&of(&[1, 2, 3]));
        for edit in [RosterEdit::Begin(peer(4)), RosterEdit::ToGo(peer(2).id, true)] {
            first.roster = first.roster.with(&edit).unwrap();
        }
        let one = GroupNumber::new(1).unwrap();
        let stands = |groups, is_removed| {
            let status = MachineStatus { first: first.clone(), groups, is_removed, voting: None };
            PoolOfNode::new(("team", peer(2).id), Ok(status))
        };
        let (voters, members) = (vec![peer(4)], vec![member(4, true, None)]);
        let here = GroupStatus {
            epoch: 9,
            primary: peer(4),
            is_primary: true,
            enrolled: of(&[4, 2]),
            voters,
            witnesses: Vec::new(),
            members,
            unhealed: 0,
            locks: (0, 0),
        };
        let gone = "its directory is gone".to_owned();
        let pool = stands(vec![(GroupNumber::FIRST, Err(gone.clone())), (one, Ok(here))], false);
        assert_eq!(
            pool.summary(),
            "4 machines, 2 groups; this node has a member of 1, and is the primary of 1"
        );
        assert_eq!(pool.machines.len(), 4);
        let own = &pool.machines[1];
        assert_eq!((own.is_here, own.is_to_go, own.groups), (true, true, 2));
        assert!(!pool.machines[0].is_here && !pool.machines[0].is_to_go);
        let [first_group, second] = &pool.groups[..] else { panic!("{:?}", pool.groups) };
        assert_eq!((first_group.members, second.members), (3, 2), "its own map is the newest");
        assert_eq!((first_group.is_open, second.is_open), (true, false));
        let warnings = pool.warnings();
        assert!(warnings.contains(&format!("group 0: {gone}")), "{warnings:?}");
        let pool = stands(vec![(GroupNumber::FIRST, Err(gone.clone()))], false);
        assert_eq!(pool.problem, Some(gone));
        let removed = stands(Vec::new(), true);
        assert_eq!(removed.summary(), "this machine belongs to it no more");
    }

    #[test]
    fn a_group_with_too_few_copies_for_changes_is_warned_of() {
        let mut pool = stands(vec![member(2, true, None), member(1, false, None)], true);
        assert_eq!(pool.min_copies, 1);
        assert_eq!(pool.refuses_changes(&pool.groups[0]), None);
        pool.min_copies = 2;
        let warned = pool.warnings();
        let said = "it refuses changes: 1 of the 2 copies that changes need are there";
        assert!(warned.iter().any(|why| why == said), "{warned:?}");
        pool.groups[0].is_primary = false;
        assert_eq!(pool.refuses_changes(&pool.groups[0]), None, "it does not know");
        let mut alone = stands_of(1, vec![member(2, true, None)], true);
        alone.min_copies = 2;
        assert_eq!(alone.refuses_changes(&alone.groups[0]), None, "nobody else has come");
    }

    #[test]
    fn a_drain_says_what_is_left_and_how_long_that_takes() {
        let copying = |names, bytes_done, seconds_left| PoolCopying {
            names,
            files_done: 1,
            files: 2,
            bytes_done,
            bytes: 100,
            seconds_left,
        };
        let learner = |copying| PoolMemberState { copying, ..member(3, false, None).into() };
        let group = |states: Vec<PoolMemberState>, is_primary, lacks_copies| PoolGroupState {
            states,
            is_primary,
            lacks_copies,
            ..PoolGroupState::default()
        };
        let quick = group(vec![learner(Some(copying(0, 90, Some(5))))], true, true);
        let slow = group(vec![learner(Some(copying(0, 20, Some(70))))], true, true);
        let left = |groups: &[&PoolGroupState]| PoolDrain::of(groups.iter().copied());
        let drain = |groups_left, groups_known, bytes_left, seconds_left| PoolDrain {
            groups_left,
            groups_known,
            bytes_left,
            seconds_left,
        };
        assert_eq!(left(&[&quick, &slow]), drain(2, 2, Some(90), Some(70)), "at the same time");
        let names = group(vec![learner(Some(copying(7, 0, None)))], true, true);
        assert_eq!(left(&[&quick, &names]), drain(2, 2, None, None));
        let elsewhere = group(Vec::new(), false, false);
        assert_eq!(left(&[&quick, &elsewhere]), drain(2, 1, Some(10), None));
        let waits = group(vec![learner(None)], true, true);
        assert_eq!(left(&[&waits]), drain(1, 1, None, None), "nobody has come yet");
        assert_eq!(left(&[&quick, &waits]), drain(2, 2, None, None));
        let done = group(vec![member(1, true, None).into()], true, false);
        assert_eq!(left(&[&done]), drain(1, 1, Some(0), Some(0)));
    }

    #[test]
    fn copies_that_could_not_be_healed_are_warned_of() {
        let mut pool = stands(vec![member(1, true, None)], true);
        let before = pool.warnings().len();
        pool.groups[0].unhealed = 3;
        assert_eq!(pool.warnings().len(), before + 1);
        assert!(pool.warnings().iter().any(|why| why.starts_with("3 copies of files are wrong")));
    }
}
