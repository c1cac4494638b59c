//! How a pool of several stands, for commands and people, as one node knows it.

use atoll_pool::{GroupStatus, MemberStatus};
use serde::{Deserialize, Serialize};

use super::records::{GroupRecord, PeerRecord};

/// How one of this node's pools stands.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct PoolOfNode {
    /// Its name on this node.
    pub name: String,
    /// How many members it has, or will have.
    pub members: usize,
    /// How many have come together.
    pub joined: usize,
    /// Who made it, in short, and where it listens.
    pub founder: Option<String>,
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
}

impl PoolOfNode {
    /// The pool of a record, with its state if the node serves it, or why it does not.
    pub(super) fn new(
        name: &str,
        group: &GroupRecord,
        served: Result<GroupStatus, String>,
    ) -> PoolOfNode {
        let joined = if group.is_made { group.members } else { group.joined.len() + 1 };
        let unserved = PoolOfNode {
            name: name.to_owned(),
            members: group.members,
            joined,
            founder: PeerRecord::peer(&group.founder).map(|peer| peer.to_string()),
            problem: None,
            epoch: 0,
            primary: None,
            is_primary: false,
            states: Vec::new(),
        };
        match served {
            Err(problem) => PoolOfNode { problem: Some(problem), ..unserved },
            Ok(GroupStatus { epoch, primary, is_primary, members }) => PoolOfNode {
                epoch,
                primary: Some(primary.to_string()),
                is_primary,
                states: members.into_iter().map(PoolMemberState::from).collect(),
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
        let founder = self.founder.as_deref().filter(|_| self.members == 2 && self.joined == 2)?;
        Some(format!(
            "it has two members: it stops while {founder} is away, which alone decides who is the primary"
        ))
    }
}

impl PoolMemberState {
    /// Whether it has everything that was answered, and is there.
    pub fn takes_part(&self) -> bool {
        self.is_member && self.problem.is_none()
    }

    /// How it stands, in words that follow its name.
    pub fn standing(&self) -> String {
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
        let MemberStatus { peer, is_member, problem, applied, free_bytes, files_to_mend } = status;
        let node = peer.to_string();
        PoolMemberState { node, is_member, problem, applied, free_bytes, files_to_mend }
    }
}

#[cfg(test)]
mod tests {
    use atoll_key::PeerId;
    use atoll_net::Peer;

    use super::*;

    fn peer(number: u8) -> Peer {
        Peer { id: PeerId([number; 32]), addr: ([10, 0, 0, number], 4711).into() }
    }

    fn member(number: u8, is_member: bool, problem: Option<&str>) -> MemberStatus {
        let problem = problem.map(str::to_owned);
        let (applied, free_bytes, files_to_mend) = (7, None, 0);
        MemberStatus { peer: peer(number), is_member, problem, applied, free_bytes, files_to_mend }
    }

    fn group(members: usize) -> GroupRecord {
        GroupRecord {
            members,
            level: 1,
            token: String::new(),
            founder: PeerRecord::of(peer(1)),
            joined: Vec::new(),
            is_made: true,
            is_leaving: false,
        }
    }

    fn stands(members: Vec<MemberStatus>, is_primary: bool) -> PoolOfNode {
        let status = GroupStatus { epoch: 4, primary: peer(2), is_primary, members };
        PoolOfNode::new("team", &group(3), Ok(status))
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
    fn another_member_says_who_the_primary_is_whoever_founded_the_pool() {
        let pool = stands(vec![member(1, true, None)], false);
        assert_eq!(pool.summary(), format!("takes part; the primary is {}", peer(2)));
        assert_eq!((pool.is_primary, pool.epoch), (false, 4));
        assert_eq!(pool.founder, Some(peer(1).to_string()));
    }

    #[test]
    fn a_pool_of_two_warns_that_one_of_them_is_needed() {
        let status =
            GroupStatus { epoch: 1, primary: peer(1), is_primary: true, members: Vec::new() };
        let pool = PoolOfNode::new("pair", &group(2), Ok(status));
        let [warning] = &pool.warnings()[..] else { panic!("{pool:?}") };
        assert!(warning.contains(&format!("stops while {} is away", peer(1))), "{warning}");
        let waiting = GroupRecord { is_made: false, ..group(2) };
        let pool = PoolOfNode::new("pair", &waiting, Err("1 of 2".into()));
        assert_eq!((pool.summary().as_str(), pool.warnings().len()), ("1 of 2", 0));
    }
}
