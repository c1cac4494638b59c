//! The rules of voting as plain state: what arrives, a timer that ends and a proposal change it, and say what is to be done. It
//! neither waits nor reads a clock.
//!
//! [`MapConsensus`] is all that a voter at work knows of it; [`RaftVoter`] keeps the rules by the crate `noraft`, which knows terms,
//! votes and where entries stand in the log. What the entries say is kept here. Voters have numbers, their places in the order of their keys.
//!
//! **Invariants.** What [`Todo::save`] has is durable before anything else of that [`Todo`] is done. What was decided is never taken
//! back, whatever a voter sends.
//!
//! These are the voters of one generation ([`MapVoters`]): once a map is decided that names others, they decide nothing more. Whoever joins
//! the next generation later than others begins with the newest map that it knows: what is decided after that follows it, and what was
//! decided before does not.
//!
//! The log begins anew at the map that holds after every [`COMPACT_AFTER`] entries.

use std::collections::BTreeMap;

use minicbor::{Decode, Encode};
use noraft::{
    Action, ClusterConfig, Log, LogEntries, LogEntry, LogIndex, LogPosition, Message, Node, NodeId,
    Role, Term,
};

use super::PoolMap;
use super::wire::{LogItem, LogPlace, MAX_ITEMS, SeenVotes, VoterMessage, are_sound};
use crate::pool_map::MapVoters;

/// Decided entries that a log keeps, so that a voter which lacks some of them needs no snapshot.
const COMPACT_AFTER: u64 = 8;
/// Entries that a leader has proposed and that are not decided; more are refused. This bounds the log.
const MAX_UNDECIDED: u64 = 16;

/// What a voter must not forget.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub(super) struct DurableVotes {
    #[n(0)]
    pub(super) term: u64,
    /// The voter that has this one's vote in this term.
    #[n(1)]
    pub(super) vote: Option<u64>,
    /// The entry before `items`, which is decided.
    #[n(2)]
    pub(super) base: LogPlace,
    /// The map after it.
    #[n(3)]
    pub(super) map: PoolMap,
    #[n(4)]
    pub(super) items: Vec<LogItem>,
    /// The voters among which this is one, and their generation.
    #[n(5)]
    pub(super) voters: MapVoters,
    /// What it has seen of the voters, by their numbers, before this was written.
    #[cbor(n(6), default)]
    pub(super) seen: Vec<SeenVotes>,
}

impl DurableVotes {
    /// Before anything happened in the generation of voters that a map names.
    pub(super) fn first(map: &PoolMap) -> DurableVotes {
        DurableVotes {
            term: 0,
            vote: None,
            base: LogPlace::default(),
            map: map.clone(),
            items: Vec::new(),
            voters: map.voters.clone(),
            seen: Vec::new(),
        }
    }

    /// Whether a voter with these votes may have forgotten something that others have seen of it.
    pub(super) fn is_behind(&self, seen: &SeenVotes) -> bool {
        let last = self.base.index + self.items.len() as u64;
        let forgot = last < seen.last || (self.vote.is_none() && seen.has_voted);
        self.term < seen.term || (self.term == seen.term && forgot)
    }

    pub(super) fn is_sound(&self) -> bool {
        let count = self.voters.keys.len() as u64;
        self.vote.is_none_or(|vote| vote < count)
            && self.map.is_sound()
            && are_sound(&self.items, self.base, self.term)
    }
}

/// When a voter is to be told that its time is up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum VoteTimer {
    /// The leader says that it is there.
    Heartbeat,
    /// No leader was heard: there will be another term after this one.
    Election { term: u64 },
}

/// What came of a proposal.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum ProposalEnd {
    /// It is decided, and this map holds.
    Decided(PoolMap),
    /// The voter leads no more: others decide, or have decided.
    Lost,
}

/// What is to be done after an input: first `save`, durably.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Todo {
    pub(super) save: Option<DurableVotes>,
    /// To which voters.
    pub(super) send: Vec<(usize, VoterMessage)>,
    /// Replaces the timer that runs.
    pub(super) timer: Option<VoteTimer>,
    /// By the numbers that were given with them.
    pub(super) ended: Vec<(u64, ProposalEnd)>,
    /// The input came from the leader.
    pub(super) hears_leader: bool,
}

/// A message that no voter sends which follows the rules.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct NotByTheRules;

/// Why a proposal was not begun.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum NotProposed {
    NotLeader,
    /// Too many are under way.
    TooMany,
}

/// One voter of those that decide the map.
pub(super) trait MapConsensus: Send + 'static {
    /// What is to be done first.
    fn begin(&mut self) -> Todo;

    /// A sound message of another voter. While `has_leader`, one that wants votes is not heard, so that a voter which does not hear
    /// the leader, but is heard, ends no terms (Raft §6).
    fn receive(
        &mut self,
        from: usize,
        message: VoterMessage,
        has_leader: bool,
    ) -> Result<Todo, NotByTheRules>;

    /// The timer has ended.
    fn time_is_up(&mut self) -> Todo;

    /// Proposes a sound map, or none: to know which holds. [`Todo::ended`] names it by `number`, now or later.
    fn propose(&mut self, number: u64, map: Option<PoolMap>) -> Result<Todo, NotProposed>;

    /// The last map that it knows to be decided.
    fn map(&self) -> &PoolMap;

    fn is_leader(&self) -> bool;

    /// Others vote by now, as the last map says.
    fn has_ended(&self) -> bool;
}

/// See the module.
pub(super) struct RaftVoter {
    node: Node,
    /// What the commands of the log after `base` say, by their places.
    items: BTreeMap<u64, LogItem>,
    /// At the beginning of the log.
    base_map: PoolMap,
    map: PoolMap,
    voters: MapVoters,
    /// Up to where the log's entries are in `map`.
    applied: u64,
    /// Proposals of this leader: term, number.
    waiting: BTreeMap<u64, (u64, u64)>,
}

impl RaftVoter {
    /// Voter number `own` with what it has not forgotten, which is sound.
    pub(super) fn new(own: usize, votes: DurableVotes) -> RaftVoter {
        let DurableVotes { term, vote, base, map, items, voters, seen: _ } = votes;
        let numbers = (0..voters.keys.len() as u64).map(NodeId::new).collect();
        let config = ClusterConfig { voters: numbers, ..ClusterConfig::default() };
        let log = Log::new(config, to_entries(base, &items));
        let vote = vote.map(NodeId::new);
        RaftVoter {
            node: Node::restart(NodeId::new(own as u64), Term::new(term), vote, log),
            items: (base.index + 1..).zip(items).collect(),
            base_map: map.clone(),
            map,
            voters,
            applied: base.index,
            waiting: BTreeMap::new(),
        }
    }

    fn is_alone(&self) -> bool {
        self.node.peers().next().is_none()
    }

    fn item(&self, index: u64, entry: &LogEntry) -> LogItem {
        match entry {
            LogEntry::Term(term) => LogItem::Began(term.get()),
            LogEntry::Command => self.items[&index].clone(),
            LogEntry::ClusterConfig(_) => unreachable!("the voters do not change"),
        }
    }

    fn to_items(&self, entries: &LogEntries) -> Vec<LogItem> {
        let first = entries.prev_position().index.get() + 1;
        (first..).zip(entries.iter()).map(|(index, entry)| self.item(index, &entry)).collect()
    }

    fn durable(&self) -> DurableVotes {
        let log = self.node.log();
        DurableVotes {
            term: self.node.current_term().get(),
            vote: self.node.voted_for().map(NodeId::get),
            base: to_place(log.snapshot_position()),
            map: self.base_map.clone(),
            items: self.to_items(log.entries()),
            voters: self.voters.clone(),
            seen: Vec::new(),
        }
    }

    fn to_message(&self, message: Message) -> VoterMessage {
        let term = message.term().get();
        match message {
            Message::RequestVoteCall { last_position, .. } => {
                VoterMessage::VoteCall { term, last: to_place(last_position) }
            }
            Message::RequestVoteReply { vote_granted, .. } => {
                VoterMessage::VoteReply { term, is_granted: vote_granted }
            }
            Message::AppendEntriesCall { commit_index, mut entries, .. } => {
                // The follower's answer brings the rest.
                entries.truncate(MAX_ITEMS);
                VoterMessage::AppendCall {
                    term,
                    decided: commit_index.get(),
                    base: to_place(entries.prev_position()),
                    items: self.to_items(&entries).into(),
                }
            }
            Message::AppendEntriesReply { last_position, .. } => {
                VoterMessage::AppendReply { term, last: to_place(last_position) }
            }
        }
    }

    /// What the last input has to bring about.
    fn todo(&mut self) -> Todo {
        let mut todo = Todo::default();
        let (mut saves, mut sets_timer) = (false, false);
        loop {
            let actions = std::mem::take(self.node.actions_mut());
            for action in actions {
                match action {
                    Action::SetElectionTimeout => sets_timer = true,
                    Action::SaveCurrentTerm
                    | Action::SaveVotedFor
                    | Action::AppendLogEntries(_) => saves = true,
                    Action::BroadcastMessage(message) => {
                        let message = self.to_message(message);
                        let peers = self.node.peers().map(|to| to.get() as usize);
                        todo.send.extend(peers.map(|to| (to, message.clone())));
                    }
                    Action::SendMessage(to, message) => {
                        todo.send.push((to.get() as usize, self.to_message(message)));
                    }
                    Action::InstallSnapshot(to) => {
                        let message = VoterMessage::Snapshot {
                            term: self.node.current_term().get(),
                            at: to_place(self.node.log().snapshot_position()),
                            map: self.base_map.clone(),
                        };
                        todo.send.push((to.get() as usize, message));
                    }
                }
            }
            self.apply(&mut todo);
            if self.node.actions().is_empty() {
                break;
            }
        }
        if saves {
            todo.save = Some(self.durable());
        }
        if sets_timer && !self.is_alone() {
            let term = self.node.current_term().get();
            todo.timer = Some(match self.is_leader() {
                true => VoteTimer::Heartbeat,
                false => VoteTimer::Election { term },
            });
        }
        self.forget(&mut todo);
        todo
    }

    /// Brings decided entries into the map.
    fn apply(&mut self, todo: &mut Todo) {
        let epoch = self.map.epoch;
        while self.applied < self.node.commit_index().get() {
            let index = LogIndex::new(self.applied + 1);
            let entries = self.node.log().entries();
            let (Some(entry), Some(term)) = (entries.get_entry(index), entries.get_term(index))
            else {
                break;
            };
            if let LogItem::Change(map) = self.item(index.get(), &entry)
                && !self.has_ended()
                && map.follows(&self.map)
            {
                self.map = map;
            }
            self.applied = index.get();
            if let Some((of, number)) = self.waiting.remove(&index.get()) {
                let end = match of == term.get() {
                    true => ProposalEnd::Decided(self.map.clone()),
                    false => ProposalEnd::Lost,
                };
                todo.ended.push((number, end));
            }
        }
        if epoch != self.map.epoch {
            // Followers learn at once that there is another map.
            self.node.heartbeat();
        }
    }

    /// Lets go of what is needed no more.
    fn forget(&mut self, todo: &mut Todo) {
        if !self.is_leader() {
            let lost = std::mem::take(&mut self.waiting).into_values();
            todo.ended.extend(lost.map(|(_, number)| (number, ProposalEnd::Lost)));
        }
        let log = self.node.log();
        if self.applied >= log.snapshot_position().index.get() + COMPACT_AFTER
            && let Some((at, config)) = log.get_position_and_config(LogIndex::new(self.applied))
        {
            let config = config.clone();
            if self.node.handle_snapshot_installed(at, config) {
                self.base_map = self.map.clone();
            }
        }
        let entries = self.node.log().entries();
        let (base, last) =
            (entries.prev_position().index.get(), entries.last_position().index.get());
        self.items.retain(|index, _| base < *index && *index <= last);
    }

    /// Whether an entry is not the one that was decided for its place.
    fn contradicts(&self, at: LogPosition) -> bool {
        let entries = self.node.log().entries();
        at.index <= self.node.commit_index()
            && entries.contains_index(at.index)
            && !entries.contains(at)
    }

    /// A message of a leader: entries after `base`.
    fn append(
        &mut self,
        (from, term): (NodeId, Term),
        decided: u64,
        base: LogPlace,
        items: &[LogItem],
    ) -> Result<(), NotByTheRules> {
        let entries = to_entries(base, items);
        if term >= self.node.current_term() {
            let mut places =
                entries.iter_with_positions().map(|(at, _)| at).chain([entries.prev_position()]);
            if places.any(|at| self.contradicts(at)) {
                return Err(NotByTheRules);
            }
        }
        let commit_index = LogIndex::new(decided);
        let message = Message::AppendEntriesCall { from, term, commit_index, entries };
        self.node.handle_message(&message).map_err(|_| NotByTheRules)?;
        if let Some(appended) = &self.node.actions().append_log_entries {
            let first = appended.prev_position().index.get() + 1;
            for (index, item) in (base.index + 1..).zip(items).filter(|(index, _)| *index >= first)
            {
                self.items.insert(index, item.clone());
            }
        }
        Ok(())
    }
}

impl MapConsensus for RaftVoter {
    fn begin(&mut self) -> Todo {
        if self.is_alone() {
            self.node.handle_election_timeout();
        }
        Todo { save: Some(self.durable()), ..self.todo() }
    }

    fn receive(
        &mut self,
        from: usize,
        message: VoterMessage,
        has_leader: bool,
    ) -> Result<Todo, NotByTheRules> {
        let from = NodeId::new(from as u64);
        if !self.node.peers().any(|peer| peer == from) {
            return Err(NotByTheRules);
        }
        let term = Term::new(message.term());
        let comes_from_leader =
            matches!(message, VoterMessage::AppendCall { .. } | VoterMessage::Snapshot { .. });
        let message = match message {
            VoterMessage::AppendCall { decided, base, items, .. } => {
                self.append((from, term), decided, base, &items.0)?;
                None
            }
            VoterMessage::Snapshot { at, map, .. } => {
                let contradicts = map.epoch == self.map.epoch && map != self.map;
                if self.node.commit_index().get() < at.index && contradicts {
                    return Err(NotByTheRules);
                }
                // As entries that end where the snapshot does: which leader this is, and whether the snapshot is needed at all.
                self.append((from, term), at.index, at, &[])?;
                let is_followed = self.node.role() == Role::Follower
                    && self.node.current_term() == term
                    && self.node.commit_index().get() < at.index;
                let config = self.node.config().clone();
                if is_followed && self.node.handle_snapshot_installed(to_position(at), config) {
                    if map.epoch > self.map.epoch {
                        self.map = map.clone();
                    }
                    self.base_map = map;
                    self.applied = at.index;
                    let durable = self.durable();
                    return Ok(Todo { save: Some(durable), hears_leader: true, ..self.todo() });
                }
                None
            }
            VoterMessage::VoteCall { last, .. } => {
                Some(Message::RequestVoteCall { from, term, last_position: to_position(last) })
            }
            VoterMessage::VoteReply { is_granted, .. } => {
                Some(Message::RequestVoteReply { from, term, vote_granted: is_granted })
            }
            VoterMessage::AppendReply { last, .. } => {
                Some(Message::AppendEntriesReply { from, term, last_position: to_position(last) })
            }
        };
        if let Some(message) = message {
            let has_leader = has_leader || self.is_leader();
            if has_leader && self.node.could_be_disruptive_request_vote(&message) {
                return Ok(Todo::default());
            }
            self.node.handle_message(&message).map_err(|_| NotByTheRules)?;
        }
        let hears_leader = comes_from_leader
            && self.node.role() == Role::Follower
            && self.node.current_term() == term;
        Ok(Todo { hears_leader, ..self.todo() })
    }

    fn time_is_up(&mut self) -> Todo {
        self.node.handle_election_timeout();
        self.todo()
    }

    fn propose(&mut self, number: u64, map: Option<PoolMap>) -> Result<Todo, NotProposed> {
        if !self.is_leader() {
            return Err(NotProposed::NotLeader);
        }
        let undecided = self.node.log().last_position().index.get() - self.applied;
        if undecided >= MAX_UNDECIDED {
            return Err(NotProposed::TooMany);
        }
        let at = self.node.propose_command();
        let item = map.map_or(LogItem::Asked, LogItem::Change);
        self.items.insert(at.index.get(), item);
        self.waiting.insert(at.index.get(), (at.term.get(), number));
        Ok(self.todo())
    }

    fn map(&self) -> &PoolMap {
        &self.map
    }

    fn is_leader(&self) -> bool {
        self.node.role() == Role::Leader
    }

    fn has_ended(&self) -> bool {
        self.map.voters.generation > self.voters.generation
    }
}

fn to_position(place: LogPlace) -> LogPosition {
    LogPosition::new(Term::new(place.term), LogIndex::new(place.index))
}

fn to_place(position: LogPosition) -> LogPlace {
    LogPlace { term: position.term.get(), index: position.index.get() }
}

fn to_entries(base: LogPlace, items: &[LogItem]) -> LogEntries {
    let entry = |item: &LogItem| match item {
        LogItem::Began(term) => LogEntry::Term(Term::new(*term)),
        LogItem::Change(_) | LogItem::Asked => LogEntry::Command,
    };
    LogEntries::from_iter(to_position(base), items.iter().map(entry))
}

/// For fuzzing: hands a message to one of three voters, which has a log and leads or follows.
pub(super) fn try_message(message: &VoterMessage) {
    use atoll_key::PeerId;
    use atoll_net::Peer;

    use crate::members::PoolMembers;
    let peer = |n: u8| Peer { id: PeerId([n; 32]), addr: ([10, 0, 0, n], 1).into() };
    let founding = PoolMembers::new((1..=3).map(peer).collect()).expect("three members");
    if !message.is_sound() {
        return;
    }
    let first = PoolMap::first(&founding);
    let map = PoolMap { epoch: 2, ..first.clone() };
    let items = vec![LogItem::Began(3), LogItem::Change(map), LogItem::Began(4), LogItem::Asked];
    let votes = DurableVotes { term: 4, items, ..DurableVotes::first(&first) };
    for leads in [false, true] {
        let mut voter = RaftVoter::new(0, votes.clone());
        voter.begin();
        if leads {
            voter.time_is_up();
            let vote = VoterMessage::VoteReply { term: 5, is_granted: true };
            voter.receive(1, vote, false).expect("by the rules");
        }
        for from in [1, 2, 1] {
            let _ = voter.receive(from, message.clone(), false);
        }
        voter.time_is_up();
        let _ = voter.propose(1, None);
    }
}

#[cfg(test)]
mod tests;
