//! How a pool of several stands, for commands and people, as one node knows it.

use atoll_pool::{GroupStatus, MemberStatus};
use serde::{Deserialize, Serialize};

/// How one of this node's pools stands.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct PoolOfNode {
    /// Its name on this node.
    pub name: String,
    /// How many members it has; 0 if this node does not know.
    pub members: usize,
    /// The members whose majority decides who is the primary, in short, and where they listen.
    pub voters: Vec<String>,
    /// Why this node does not serve it, for people.
    pub problem: Option<String>,
    /// Counts the pool's maps, each of which says who is the primary; 0 if this node does not serve it.
    pub epoch: u64,
    /// Who decides its changes, as far as this node knows.
    pub primary: Option<String>,
    /// Whether this node does, and serves clients.
    pub is_primary: bool,
    /// How its members stand, as far as this node knows: on the primary all, itself first; elsewhere this one.
    pub states: Vec<PoolMemberState>,
    /// How many mounts and servers have taken locks on files of late, and how many locks they hold, as this node knows it.
    #[serde(default)]
    pub lock_sessions: usize,
    /// See `lock_sessions`.
    #[serde(default)]
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
    /// The pool of a record, with its state if the node serves it, or why it does not.
    pub(super) fn new(name: &str, served: Result<GroupStatus, String>) -> PoolOfNode {
        let unserved = PoolOfNode {
            name: name.to_owned(),
            members: 0,
            voters: Vec::new(),
            problem: None,
            epoch: 0,
            primary: None,
            is_primary: false,
            states: Vec::new(),
            lock_sessions: 0,
            locks: 0,
        };
        match served {
            Err(problem) => PoolOfNode { problem: Some(problem), ..unserved },
            Ok(GroupStatus {
                epoch,
                primary,
                is_primary,
                enrolled,
                voters,
                members,
                locks: (lock_sessions, locks),
            }) => PoolOfNode {
                members: enrolled.peers().len(),
                voters: voters.iter().map(|peer| peer.to_string()).collect(),
                epoch,
                primary: Some(primary.to_string()),
                is_primary,
                states: members.into_iter().map(PoolMemberState::from).collect(),
                lock_sessions,
                locks,
                ..unserved
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

    /// What somebody should know who looks after it.
    pub fn warnings(&self) -> Vec<String> {
        let short = self.states.iter().filter(|state| !state.takes_part());
        let stands = |state: &PoolMemberState| format!("{} {}", state.node, state.standing());
        short.map(stands).chain(self.needed_member()).collect()
    }

    /// Without which of its members it stops, if there is one, for people.
    pub fn needed_member(&self) -> Option<String> {
        match &self.voters[..] {
            [_] if self.members == 1 => {
                Some("it has one member: nobody else has a copy".to_owned())
            }
            [voter] => Some(format!(
                "it stops while {voter} is away, which alone decides who is the primary: three members would do without any one"
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
        let MemberStatus { peer, is_member, problem, applied, free_bytes, files_to_mend, copying } =
            status;
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
    use atoll_key::PeerId;
    use atoll_net::Peer;
    use atoll_pool::PoolMembers;

    use super::*;

    fn peer(number: u8) -> Peer {
        Peer { id: PeerId([number; 32]), addr: ([10, 0, 0, number], 4711).into() }
    }

    fn member(number: u8, is_member: bool, problem: Option<&str>) -> MemberStatus {
        let problem = problem.map(str::to_owned);
        let (applied, free_bytes, files_to_mend) = (7, None, 0);
        let (peer, copying) = (peer(number), None);
        MemberStatus { peer, is_member, problem, applied, free_bytes, files_to_mend, copying }
    }

    fn stands_of(count: u8, members: Vec<MemberStatus>, is_primary: bool) -> PoolOfNode {
        let enrolled = PoolMembers::new((1..=count).map(peer).collect()).unwrap();
        let voters = (1..=if count < 3 { 1 } else { 3 }).map(peer).collect();
        let (epoch, primary, locks) = (4, peer(2), (1, 2));
        let status = GroupStatus { epoch, primary, is_primary, enrolled, voters, members, locks };
        PoolOfNode::new("team", Ok(status))
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
        assert_eq!((pool.is_primary, pool.epoch), (false, 4));
        assert_eq!((pool.lock_sessions, pool.locks), (1, 2));
        assert_eq!(pool.voters, [1, 2, 3].map(|number| peer(number).to_string()));
    }

    #[test]
    fn a_pool_of_one_or_two_warns_that_one_of_them_is_needed() {
        let warning = |count| stands_of(count, Vec::new(), true).needed_member();
        assert!(warning(2).unwrap().contains(&format!("stops while {} is away", peer(1))));
        assert!(warning(1).unwrap().contains("nobody else has a copy"));
        assert_eq!(warning(3), None);
        let pool = PoolOfNode::new("pair", Err("the code is wrong".into()));
        assert_eq!((pool.summary().as_str(), pool.warnings().len()), ("the code is wrong", 0));
    }
}
