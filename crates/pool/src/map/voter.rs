//! A voter at work: one task takes what arrives, in its order, and does what [`MapConsensus`] says.
//!
//! A state is durable before a message that depends on it leaves, and before anybody learns of a map. Messages may be lost: a voter
//! that is away, or slow, gets none beyond the few that are under way to it, and the next heartbeat repairs that.
//!
//! When a map is decided that names other voters, a voter does nothing more but to tell whoever calls. One that is among the others, too, is
//! begun anew for them ([`MapVoter::begin`]).
//!
//! Once a write of its disk has failed, a voter takes no part until it is opened again. What it finds then is written again before
//! anything else, since what was read may not be durable.

use std::collections::{BTreeMap, VecDeque};
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::{BoxFuture, Env, Instant, Notify, random_below};
use atoll_key::PeerId;
use atoll_net::{Peer, Refusal, Reply, Request, Transport};
use bytes::Bytes;
use futures_channel::oneshot;
use futures_util::future::select;

use super::PoolMap;
use super::consensus::{
    DurableVotes, MapConsensus, NotProposed, ProposalEnd, RaftVoter, Todo, VoteTimer,
};
use super::storage::{VoteStorage, VoterError, make_votes};
use super::wire::{
    MAX_MESSAGE_BYTES, PROPOSE, ProposeCall, ProposeReply, SEEN, SeenReply, SeenVotes,
    VOTER_MESSAGE, VoterCall, VoterMessage,
};
use crate::disk::Disk;
use crate::messages::{decode, encode, refused};
use crate::pool_map::MapVoters;
use crate::routing::{PoolId, addressed};

/// Between heartbeats of the leader.
const HEARTBEAT: Duration = Duration::from_millis(75);
/// A voter that has not heard the leader for so long begins an election (150 to 300 ms, Raft §9.3).
const ELECTION: Duration = Duration::from_millis(150);
/// How much longer it waits at most.
const ELECTION_SPREAD: Duration = Duration::from_millis(150);
/// A voter that has heard the leader within this time votes for nobody else: less than [`ELECTION`], so that no election waits for it.
const LEADER_LASTS: Duration = Duration::from_millis(100);
/// How long a message may take.
const MESSAGE_LIMIT: Duration = Duration::from_millis(500);
/// The most messages under way to one voter.
const MAX_OUTGOING: usize = 8;
/// The most messages of one voter that wait to be taken.
const MAX_WAITING: usize = 32;
/// The most proposals that wait to be taken.
const MAX_PROPOSALS: usize = 64;

/// What waits for the voter's task.
enum Input {
    Message(usize, VoterMessage),
    /// Answered with the map that holds; none if this voter does not lead.
    Proposal(Option<PoolMap>, oneshot::Sender<Result<Option<PoolMap>, Refusal>>),
}

struct VoterState {
    inputs: VecDeque<Input>,
    map: PoolMap,
    /// What messages of the voters have shown, by their numbers.
    seen: Vec<SeenVotes>,
    is_leader: bool,
    failed: Option<VoterError>,
    has_ended: bool,
    /// Its task has: nothing is written any more.
    has_stopped: bool,
}

/// What calls and the task share.
struct VoterShared {
    own: usize,
    voters: MapVoters,
    state: Mutex<VoterState>,
    has_inputs: Notify,
    changed: Notify,
    stopped: Notify,
}

impl VoterShared {
    fn state(&self) -> MutexGuard<'_, VoterState> {
        self.state.lock().expect("no holder of this lock panics")
    }

    /// The number of a voter.
    fn number(&self, id: PeerId) -> Option<usize> {
        self.voters.keys.iter().position(|key| *key == id)
    }

    /// A voter, where it listens by now.
    fn peer(&self, number: usize) -> Option<Peer> {
        let id = self.voters.keys.iter().nth(number)?;
        self.state().map.peer(*id)
    }

    /// A map that was decided, if it is newer than one of this epoch.
    fn newer_than(&self, epoch: u64) -> Option<PoolMap> {
        let state = self.state();
        (state.map.epoch > epoch).then(|| state.map.clone())
    }

    /// A map that was decided, as another voter says.
    fn note_map(&self, map: PoolMap) {
        let mut state = self.state();
        if map.is_sound() && map.epoch > state.map.epoch {
            state.map = map;
            drop(state);
            self.changed.notify();
            self.has_inputs.notify();
        }
    }

    /// Hands an input to the task, if there are fewer than `most` of its kind.
    fn add(
        &self,
        input: Input,
        most: usize,
        is_alike: impl Fn(&Input) -> bool,
    ) -> Result<(), Refusal> {
        let mut state = self.state();
        if let Some(error) = state.failed {
            return Err(Refusal::new(refused::DISK, error.to_string()));
        }
        if state.has_ended || state.inputs.iter().filter(|input| is_alike(input)).count() >= most {
            return Err(Refusal::new(Refusal::OVERLOADED, "too much at once"));
        }
        state.inputs.push_back(input);
        drop(state);
        self.has_inputs.notify();
        Ok(())
    }
}

/// A voter of a pool, at work until this is dropped.
pub struct MapVoter {
    shared: Arc<VoterShared>,
}

impl std::fmt::Debug for MapVoter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MapVoter").field("own", &self.shared.own).finish_non_exhaustive()
    }
}

impl MapVoter {
    /// Begins to vote with what is in Atoll's own directory `own` of this member's disk, which nobody else uses.
    ///
    /// # Errors
    /// [`VoterError::NotAVoter`] on a member that does not vote; why its votes cannot be read or written.
    pub async fn start<D: Disk>(
        env: Env,
        transport: Arc<dyn Transport>,
        disk: Arc<D>,
        own: &D::Node,
        pool: PoolId,
    ) -> Result<Arc<MapVoter>, VoterError> {
        let local = transport.local().id;
        let (storage, votes) = VoteStorage::open(disk, own).await?;
        let voters = votes.voters.clone();
        let mut seen = votes.seen.clone();
        seen.resize(voters.keys.len(), SeenVotes::default());
        let number = voters.keys.iter().position(|key| *key == local);
        let number = number.ok_or(VoterError::NotAVoter)?;
        let mut consensus = RaftVoter::new(number, votes);
        let begin = consensus.begin();
        let state = VoterState {
            inputs: VecDeque::new(),
            map: consensus.map().clone(),
            seen,
            is_leader: false,
            failed: None,
            has_ended: false,
            has_stopped: false,
        };
        let outgoing = voters.keys.iter().map(|_| Arc::default()).collect();
        let shared = Arc::new(VoterShared {
            own: number,
            voters,
            state: Mutex::new(state),
            has_inputs: Notify::default(),
            changed: Notify::default(),
            stopped: Notify::default(),
        });
        let mut task = VoterTask {
            env: env.clone(),
            transport,
            pool,
            shared: shared.clone(),
            storage,
            consensus: Box::new(consensus),
            deadline: None,
            leader_heard: None,
            proposals: BTreeMap::new(),
            last_proposal: 0,
            outgoing,
        };
        let voter = Arc::new(MapVoter { shared });
        task.perform(begin).await?;
        env.spawn(Box::pin(async move {
            task.run().await;
            task.shared.state().has_stopped = true;
            task.shared.stopped.notify();
        }));
        Ok(voter)
    }

    /// Begins to vote in the generation of voters that `map` names, which was decided. This member has never voted in it.
    ///
    /// # Errors
    /// As [`MapVoter::start`].
    pub async fn begin<D: Disk>(
        env: Env,
        transport: Arc<dyn Transport>,
        disk: Arc<D>,
        own: &D::Node,
        (pool, map): (PoolId, &PoolMap),
    ) -> Result<Arc<MapVoter>, VoterError> {
        make_votes(&*disk, own, map).await?;
        MapVoter::start(env, transport, disk, own, pool).await
    }

    /// Stops its work; nothing is written to its files after this. One task waits at a time.
    pub(super) async fn stop(&self) {
        self.shared.state().has_ended = true;
        self.shared.has_inputs.notify();
        while !self.shared.state().has_stopped {
            self.shared.stopped.notified().await;
        }
    }

    /// The generation of voters in which it votes.
    pub fn generation(&self) -> u64 {
        self.shared.voters.generation
    }

    /// The last map that this voter knows to be decided. There may be a newer one.
    pub fn map(&self) -> PoolMap {
        self.shared.state().map.clone()
    }

    /// Resolves when [`MapVoter::map`], [`MapVoter::is_leader`] or [`MapVoter::failed`] has changed since it last resolved. One task waits at a time.
    pub async fn changed(&self) {
        self.shared.changed.notified().await;
    }

    /// Whether it leads the voters, as far as it knows.
    pub fn is_leader(&self) -> bool {
        self.shared.state().is_leader
    }

    /// Why it votes no more; none while it does.
    pub fn failed(&self) -> Option<VoterError> {
        self.shared.state().failed
    }

    /// Answers the calls [`VOTER_MESSAGE`] and [`PROPOSE`] of a peer whose key is proven; the header lacks the pool's 16 bytes.
    pub fn handle(
        &self,
        from: Peer,
        request: Request,
    ) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let Request { method, header, parts } = request;
        let malformed = |why| Refusal::new(Refusal::MALFORMED, why);
        let refuse = |refusal| -> BoxFuture<'static, _> { Box::pin(async { Err(refusal) }) };
        if header.len() > MAX_MESSAGE_BYTES || !parts.is_empty() {
            return refuse(malformed("a message about maps that is too long"));
        }
        match method {
            VOTER_MESSAGE => {
                let taken = self.take_message(from, decode(&header));
                Box::pin(async {
                    let header = taken?.map_or_else(Bytes::new, |map| encode(&map));
                    Ok(Reply { header, parts: Vec::new() })
                })
            }
            SEEN => {
                let answered =
                    decode(&header).ok_or_else(|| malformed("a call that cannot be read"));
                let answered = answered.map(|generation| self.say_seen(from.id, generation));
                Box::pin(async {
                    let header = encode(&answered?);
                    Ok(Reply { header, parts: Vec::new() })
                })
            }
            PROPOSE if !self.map().enrolled.contains(from.id) => {
                refuse(Refusal::new(refused::NOT_A_MEMBER, "the caller is no member of the pool"))
            }
            PROPOSE => match decode::<ProposeCall>(&header) {
                Some(call) => {
                    let answer = self.propose(call);
                    Box::pin(async {
                        let header = encode(&answer.await?);
                        Ok(Reply { header, parts: Vec::new() })
                    })
                }
                None => refuse(malformed("a proposal that cannot be read")),
            },
            _ => refuse(Refusal::new(Refusal::UNKNOWN_METHOD, "no such call")),
        }
    }

    /// Returns the map by which there are other voters, if the caller does not know them.
    fn take_message(
        &self,
        from: Peer,
        call: Option<VoterCall>,
    ) -> Result<Option<PoolMap>, Refusal> {
        let voter = self.shared.number(from.id).filter(|voter| *voter != self.shared.own);
        let sound = call.filter(|call| call.message.is_sound());
        let VoterCall { generation, message } = match (sound, voter) {
            (Some(call), _) => call,
            (None, Some(_)) => {
                return Err(Refusal::new(Refusal::MALFORMED, "a message that no voter sends"));
            }
            (None, None) => return Err(not_a_voter()),
        };
        let map = self.map();
        let is_enrolled = map.peer(from.id).is_some();
        if map.voters.generation > generation && is_enrolled {
            return Ok(Some(map));
        }
        if generation > self.generation() && is_enrolled {
            return Err(Refusal::new(Refusal::OVERLOADED, "it does not vote among those yet"));
        }
        let voter = voter.filter(|_| generation == self.generation()).ok_or_else(not_a_voter)?;
        self.shared.state().seen[voter].note(&message);
        let is_alike = |input: &Input| matches!(input, Input::Message(from, _) if *from == voter);
        self.shared.add(Input::Message(voter, message), MAX_WAITING, is_alike)?;
        Ok(None)
    }

    /// What it has seen of a voter in a generation.
    fn say_seen(&self, of: PeerId, generation: u64) -> SeenReply {
        let state = self.shared.state();
        let number = self.shared.number(of).filter(|_| generation == self.generation());
        let seen = number.map(|number| state.seen[number]);
        let is_later = state.map.voters.generation > generation;
        SeenReply {
            seen: seen.filter(|seen| *seen != SeenVotes::default()),
            newer: is_later.then(|| state.map.clone()),
        }
    }

    /// Proposes a map, or none: to know which holds.
    pub(super) fn propose(
        &self,
        call: ProposeCall,
    ) -> BoxFuture<'static, Result<ProposeReply, Refusal>> {
        let ProposeCall { map, known } = call;
        let epoch = known.epoch;
        self.shared.note_map(known);
        let is_sound = map.as_ref().is_none_or(PoolMap::is_sound);
        let (sender, answer) = oneshot::channel();
        let input = Input::Proposal(map, sender);
        let is_alike = |input: &Input| matches!(input, Input::Proposal(..));
        let added = match is_sound {
            true => self.shared.add(input, MAX_PROPOSALS, is_alike),
            false => Err(Refusal::new(Refusal::MALFORMED, "a map that cannot be this pool's")),
        };
        let shared = self.shared.clone();
        Box::pin(async move {
            added?;
            let answer = answer.await.unwrap_or_else(|_| {
                Err(Refusal::new(Refusal::INTERNAL, "the voter has ended, or its disk failed"))
            });
            Ok(match answer? {
                Some(map) => ProposeReply::Holds(map),
                None => ProposeReply::NotLeader(shared.newer_than(epoch)),
            })
        })
    }
}

fn not_a_voter() -> Refusal {
    Refusal::new(refused::NOT_A_MEMBER, "the caller is no voter of the pool")
}

impl Drop for MapVoter {
    fn drop(&mut self) {
        self.shared.state().has_ended = true;
        self.shared.has_inputs.notify();
    }
}

/// See the module.
struct VoterTask<D: Disk> {
    env: Env,
    transport: Arc<dyn Transport>,
    pool: PoolId,
    shared: Arc<VoterShared>,
    storage: VoteStorage<D>,
    consensus: Box<dyn MapConsensus>,
    /// When its time is up.
    deadline: Option<Instant>,
    leader_heard: Option<Instant>,
    proposals: BTreeMap<u64, oneshot::Sender<Result<Option<PoolMap>, Refusal>>>,
    last_proposal: u64,
    /// How many messages are under way to each voter.
    outgoing: Vec<Arc<AtomicUsize>>,
}

impl<D: Disk> VoterTask<D> {
    async fn run(&mut self) {
        loop {
            let next = {
                let mut state = self.shared.state();
                if state.has_ended {
                    return;
                }
                state.inputs.pop_front()
            };
            let todo = match next {
                Some(input) => self.take(input),
                // What arrived counts before the time that is up: the process may have stood still.
                None if self.deadline.is_some_and(|at| at <= self.env.now()) => {
                    self.deadline = None;
                    (!self.has_ended()).then(|| self.consensus.time_is_up())
                }
                None => {
                    let has_inputs = pin!(self.shared.has_inputs.notified());
                    match self.deadline {
                        Some(at) => drop(select(has_inputs, self.env.sleep_until(at)).await),
                        None => has_inputs.await,
                    }
                    None
                }
            };
            if let Some(todo) = todo
                && self.perform(todo).await.is_err()
            {
                return;
            }
        }
    }

    /// Others vote by now.
    fn has_ended(&self) -> bool {
        let newest = self.shared.state().map.voters.generation;
        self.consensus.has_ended() || newest > self.shared.voters.generation
    }

    fn take(&mut self, input: Input) -> Option<Todo> {
        match input {
            Input::Message(..) if self.has_ended() => None,
            Input::Proposal(_, sender) if self.has_ended() => {
                let _ = sender.send(Ok(None));
                None
            }
            Input::Message(from, message) => {
                let heard = self.leader_heard;
                let has_leader = heard.is_some_and(|at| self.env.now().since(at) < LEADER_LASTS);
                let taken = self.consensus.receive(from, message, has_leader);
                if taken.is_err() {
                    let from = self.shared.peer(from).map(|peer| peer.to_string());
                    let from = from.unwrap_or_default();
                    tracing::warn!("{from} does not vote by the rules; its message is ignored");
                }
                taken.ok()
            }
            // The caller has given up.
            Input::Proposal(_, sender) if sender.is_canceled() => None,
            Input::Proposal(map, sender) => {
                self.last_proposal += 1;
                let number = self.last_proposal;
                let answer = match self.consensus.propose(number, map) {
                    Ok(todo) => {
                        self.proposals.insert(number, sender);
                        return Some(todo);
                    }
                    Err(NotProposed::NotLeader) => Ok(None),
                    Err(NotProposed::TooMany) => {
                        Err(Refusal::new(Refusal::OVERLOADED, "too many proposals at once"))
                    }
                };
                let _ = sender.send(answer);
                None
            }
        }
    }

    /// Does what is to be done. After an error the voter takes no part any more.
    async fn perform(&mut self, todo: Todo) -> Result<(), VoterError> {
        let Todo { save, send, timer, ended, hears_leader } = todo;
        if let Some(mut votes) = save {
            votes.seen = self.shared.state().seen.clone();
            self.save(&votes).await?;
        }
        let now = self.env.now();
        if hears_leader {
            self.leader_heard = Some(now);
        }
        if let Some(timer) = timer {
            self.deadline = Some(now + self.time_until(timer));
        }
        for (to, message) in send {
            self.send(to, message);
        }
        for (number, end) in ended {
            let Some(sender) = self.proposals.remove(&number) else { continue };
            let _ = sender.send(Ok(match end {
                ProposalEnd::Decided(map) => Some(map),
                ProposalEnd::Lost => None,
            }));
        }
        let mut state = self.shared.state();
        let is_leader = self.consensus.is_leader() && !self.consensus.has_ended();
        let map = self.consensus.map();
        if state.map.epoch < map.epoch || state.is_leader != is_leader {
            if state.map.epoch < map.epoch {
                state.map = map.clone();
            }
            state.is_leader = is_leader;
            self.shared.changed.notify();
        }
        Ok(())
    }

    async fn save(&mut self, votes: &DurableVotes) -> Result<(), VoterError> {
        let saved = self.storage.save(votes).await.map_err(VoterError::Disk);
        if let Err(error) = saved {
            tracing::error!("this voter of a pool takes no part any more: {error}");
            let mut state = self.shared.state();
            state.failed = Some(error);
            state.is_leader = false;
            // Whoever waits learns that nothing comes any more.
            state.inputs.clear();
            self.shared.changed.notify();
        }
        saved
    }

    /// Voters wait for different times, each in a share of the spread that moves on with each term, so that one of them has
    /// begun and won before the next begins, whichever are there.
    fn time_until(&self, timer: VoteTimer) -> Duration {
        match timer {
            VoteTimer::Heartbeat => HEARTBEAT,
            VoteTimer::Election { term } => {
                let count = self.outgoing.len() as u64;
                let turn = (self.shared.own as u64 + term) % count;
                let share = ELECTION_SPREAD.as_nanos() as u64 / count;
                let nanos = turn * share + random_below(&*self.env, share / 2);
                ELECTION + Duration::from_nanos(nanos)
            }
        }
    }

    fn send(&self, to: usize, message: VoterMessage) {
        let Some(peer) = self.shared.peer(to) else { return };
        let under_way = self.outgoing[to].clone();
        if under_way.load(Ordering::SeqCst) >= MAX_OUTGOING {
            return;
        }
        under_way.fetch_add(1, Ordering::SeqCst);
        let generation = self.shared.voters.generation;
        let header = encode(&VoterCall { generation, message });
        let header = addressed(&self.pool, &header);
        let request = Request { method: VOTER_MESSAGE, header, parts: Vec::new() };
        let call = self.transport.call(peer, request, MESSAGE_LIMIT);
        let shared = self.shared.clone();
        self.env.spawn(Box::pin(async move {
            // What is lost comes again.
            if let Ok(reply) = call.await
                && let Some(map) = decode::<PoolMap>(&reply.header)
            {
                shared.note_map(map);
            }
            under_way.fetch_sub(1, Ordering::SeqCst);
        }));
    }
}
