//! A voter at work: one task takes what arrives, in its order, and does what [`MapConsensus`] says.
//!
//! A state is durable before a message that depends on it leaves, and before anybody learns of a map. Messages may be lost: a voter
//! that is away, or slow, gets none beyond the few that are under way to it, and the next heartbeat repairs that.
//!
//! Once a write of its disk has failed, a voter takes no part until it is opened again. What it finds then is written again before
//! anything else, since what was read may not be durable.

use std::collections::{BTreeMap, VecDeque};
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::{BoxFuture, Env, Instant, Notify, random_below};
use atoll_net::{Peer, Refusal, Reply, Request, Transport};
use futures_channel::oneshot;
use futures_util::future::select;

use super::consensus::{
    DurableVotes, MapConsensus, NotProposed, ProposalEnd, RaftVoter, Todo, VoteTimer,
};
use super::storage::{VoteStorage, VoterError};
use super::wire::{
    MAX_MESSAGE_BYTES, PROPOSE, ProposeCall, ProposeReply, VOTER_MESSAGE, VoterMessage,
};
use super::{PoolMap, voters};
use crate::disk::Disk;
use crate::members::PoolMembers;
use crate::messages::{decode, encode, refused};
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
    Proposal(Option<PoolMap>, oneshot::Sender<Result<ProposeReply, Refusal>>),
}

struct VoterState {
    inputs: VecDeque<Input>,
    map: PoolMap,
    is_leader: bool,
    failed: Option<VoterError>,
    has_ended: bool,
}

/// What calls and the task share.
struct VoterShared {
    own: usize,
    founding: PoolMembers,
    state: Mutex<VoterState>,
    has_inputs: Notify,
    changed: Notify,
}

impl VoterShared {
    fn state(&self) -> MutexGuard<'_, VoterState> {
        self.state.lock().expect("no holder of this lock panics")
    }

    fn voters(&self) -> &[Peer] {
        voters(&self.founding)
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
        founding: &PoolMembers,
    ) -> Result<Arc<MapVoter>, VoterError> {
        let local = transport.local().id;
        let number = voters(founding).iter().position(|voter| voter.id == local);
        let number = number.ok_or(VoterError::NotAVoter)?;
        let (storage, votes) = VoteStorage::open(disk, own, founding).await?;
        let mut consensus = RaftVoter::new(number, founding, votes);
        let begin = consensus.begin();
        let state = VoterState {
            inputs: VecDeque::new(),
            map: consensus.map().clone(),
            is_leader: false,
            failed: None,
            has_ended: false,
        };
        let shared = Arc::new(VoterShared {
            own: number,
            founding: founding.clone(),
            state: Mutex::new(state),
            has_inputs: Notify::default(),
            changed: Notify::default(),
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
            outgoing: voters(founding).iter().map(|_| Arc::default()).collect(),
        };
        let voter = Arc::new(MapVoter { shared });
        task.perform(begin).await?;
        env.spawn(Box::pin(task.run()));
        Ok(voter)
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
                Box::pin(async { taken.map(|()| Reply::default()) })
            }
            PROPOSE if !self.shared.founding.contains(from.id) => {
                refuse(Refusal::new(refused::NOT_A_MEMBER, "the caller is no member of the pool"))
            }
            PROPOSE => match decode::<ProposeCall>(&header) {
                Some(call) => {
                    let answer = self.propose(call.map);
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

    fn take_message(&self, from: Peer, message: Option<VoterMessage>) -> Result<(), Refusal> {
        let VoterShared { own, founding, .. } = &*self.shared;
        let voter = self.shared.voters().iter().position(|voter| voter.id == from.id);
        let Some(voter) = voter.filter(|voter| voter != own) else {
            return Err(Refusal::new(refused::NOT_A_MEMBER, "the caller is no voter of the pool"));
        };
        let Some(message) = message.filter(|message| message.is_sound(founding)) else {
            return Err(Refusal::new(Refusal::MALFORMED, "a message that no voter sends"));
        };
        let is_alike = |input: &Input| matches!(input, Input::Message(from, _) if *from == voter);
        self.shared.add(Input::Message(voter, message), MAX_WAITING, is_alike)
    }

    /// Proposes a map, or none: to know which holds.
    pub(super) fn propose(
        &self,
        map: Option<PoolMap>,
    ) -> BoxFuture<'static, Result<ProposeReply, Refusal>> {
        let is_sound = map.as_ref().is_none_or(|map| map.is_sound(&self.shared.founding));
        let (sender, answer) = oneshot::channel();
        let input = Input::Proposal(map, sender);
        let is_alike = |input: &Input| matches!(input, Input::Proposal(..));
        let added = match is_sound {
            true => self.shared.add(input, MAX_PROPOSALS, is_alike),
            false => Err(Refusal::new(Refusal::MALFORMED, "a map that cannot be this pool's")),
        };
        Box::pin(async {
            added?;
            answer.await.unwrap_or_else(|_| {
                Err(Refusal::new(Refusal::INTERNAL, "the voter has ended, or its disk failed"))
            })
        })
    }
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
    proposals: BTreeMap<u64, oneshot::Sender<Result<ProposeReply, Refusal>>>,
    last_proposal: u64,
    /// How many messages are under way to each voter.
    outgoing: Vec<Arc<AtomicUsize>>,
}

impl<D: Disk> VoterTask<D> {
    async fn run(mut self) {
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
                    Some(self.consensus.time_is_up())
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

    fn take(&mut self, input: Input) -> Option<Todo> {
        match input {
            Input::Message(from, message) => {
                let heard = self.leader_heard;
                let has_leader = heard.is_some_and(|at| self.env.now().since(at) < LEADER_LASTS);
                let taken = self.consensus.receive(from, message, has_leader);
                if taken.is_err() {
                    let from = self.shared.voters()[from];
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
                    Err(NotProposed::NotLeader) => Ok(ProposeReply::NotLeader),
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
        if let Some(votes) = save {
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
            self.send(to, &message);
        }
        for (number, end) in ended {
            let Some(sender) = self.proposals.remove(&number) else { continue };
            let _ = sender.send(Ok(match end {
                ProposalEnd::Decided(map) => ProposeReply::Holds(map),
                ProposalEnd::Lost => ProposeReply::NotLeader,
            }));
        }
        let mut state = self.shared.state();
        let is_leader = self.consensus.is_leader();
        if state.map != *self.consensus.map() || state.is_leader != is_leader {
            state.map = self.consensus.map().clone();
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

    fn send(&self, to: usize, message: &VoterMessage) {
        let under_way = self.outgoing[to].clone();
        if under_way.load(Ordering::SeqCst) >= MAX_OUTGOING {
            return;
        }
        under_way.fetch_add(1, Ordering::SeqCst);
        let header = addressed(&self.pool, &encode(message));
        let request = Request { method: VOTER_MESSAGE, header, parts: Vec::new() };
        let call = self.transport.call(self.shared.voters()[to], request, MESSAGE_LIMIT);
        self.env.spawn(Box::pin(async move {
            // What is lost comes again.
            let _ = call.await;
            under_way.fetch_sub(1, Ordering::SeqCst);
        }));
    }
}
