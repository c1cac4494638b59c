//! What one member has to do with the pool's map: it knows the newest one that it has heard of, keeps who the members are on its disk,
//! votes as soon as a map names it, and asks the voters.
//!
//! A map that names this member as a voter of the next generation may be heard of from anybody. Its votes are made before that map is written
//! to the disk, so a voter whose disk has the map, and no votes of its generation, has lost them, and does not vote.
//!
//! **A node without files** ([`crate::witnesses`]) has such a seat, too, in a directory of its own. Whatever it finds there, it votes in a generation only
//! after most of that generation's voters, itself included, have said what they have seen of it. If its votes lack something of that, its directory
//! was set back or made anew, and it does not vote: whoever runs it has it listed in another incarnation, as a node that has never voted. What
//! nobody has seen who answers cannot be found out.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::{BoxFuture, Env};
use atoll_net::{Peer, Refusal, Reply, Request, Transport};
use futures_util::future::join_all;

use super::asking::{AskError, MapAsker};
use super::members_file;
use super::storage::{VoterError, read_votes};
use super::voter::MapVoter;
use super::wire::{
    ProposeCall, ProposeReply, SEEN, SeenReply, SeenVotes, VOTER_MESSAGE, VoterCall,
};
use crate::disk::Disk;
use crate::messages::{decode, encode, refused};
use crate::pool_map::PoolMap;
use crate::routing::{PoolId, addressed};
use crate::witnesses::Witness;

/// How long a voter may take to say what it has seen of this one.
const SEEN_LIMIT: Duration = Duration::from_millis(300);

struct Voting {
    voter: Option<Arc<MapVoter>>,
    /// The last generation of voters that is known: it was begun if this is one of them.
    generation: u64,
    /// The map that is on the disk.
    written: PoolMap,
}

/// See the module.
pub struct MapSeat<D: Disk> {
    env: Env,
    transport: Arc<dyn Transport>,
    pool: PoolId,
    disk: Arc<D>,
    /// Atoll's own directory on it.
    own: D::Node,
    /// Of a node without files.
    incarnation: Option<u64>,
    voting: Mutex<Voting>,
    asker: MapAsker,
}

impl<D: Disk> std::fmt::Debug for MapSeat<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MapSeat").field("voter", &self.voter()).finish_non_exhaustive()
    }
}

impl<D: Disk> MapSeat<D> {
    /// For this node, with what is in Atoll's own directory `own` of its disk, which nobody else uses; `map` is the one that is there.
    ///
    /// # Errors
    /// If it is one of the voters of that map, and its votes are not there.
    pub async fn start(
        env: Env,
        transport: Arc<dyn Transport>,
        (disk, own): (Arc<D>, D::Node),
        (pool, map): (PoolId, PoolMap),
    ) -> Result<MapSeat<D>, VoterError> {
        let voter = MapVoter::start(env.clone(), transport.clone(), disk.clone(), &own, pool).await;
        let is_voter = map.voters.keys.contains(&transport.local().id);
        let voter = match voter {
            // Its votes were made, and the process ended before it wrote the map.
            Ok(voter) if voter.generation() > map.voters.generation => Some(voter),
            Ok(voter) if is_voter && voter.generation() == map.voters.generation => Some(voter),
            Ok(_) if is_voter => return Err(VoterError::SetBack),
            Err(error) if is_voter => return Err(error),
            Ok(_) | Err(_) => None,
        };
        let generation = voter.as_ref().map_or(map.voters.generation, |voter| voter.generation());
        let asker = MapAsker::new(env.clone(), transport.clone(), pool, map.clone(), voter.clone());
        let voting = Mutex::new(Voting { voter, generation, written: map });
        let incarnation = None;
        Ok(MapSeat { env, transport, pool, disk, own, incarnation, voting, asker })
    }

    /// For this node, which has no files, in this incarnation. `map` was decided, and need not be in the directory yet. It begins to vote with
    /// [`MapSeat::follow`].
    ///
    /// # Errors
    /// What the disk says.
    pub async fn start_without_files(
        (env, transport): (Env, Arc<dyn Transport>),
        (disk, own): (Arc<D>, D::Node),
        (pool, map): (PoolId, PoolMap),
        incarnation: u64,
    ) -> Result<MapSeat<D>, VoterError> {
        let written = members_file::read(&*disk, &own).await?;
        let voted = read_votes(&*disk, &own).await?.map(|votes| votes.map);
        let known = written.iter().chain(&voted).chain([&map]).max_by_key(|map| map.epoch);
        let known = known.unwrap_or(&map).clone();
        let asker = MapAsker::new(env.clone(), transport.clone(), pool, known, None);
        let is_new = written.is_none();
        let mut written = written.unwrap_or(map);
        if is_new {
            // Nothing stands there: whatever holds is written.
            written.epoch = 0;
        }
        let generation = if is_new { 0 } else { written.voters.generation };
        let voting = Mutex::new(Voting { voter: None, generation, written });
        let incarnation = Some(incarnation);
        Ok(MapSeat { env, transport, pool, disk, own, incarnation, voting, asker })
    }

    fn voting(&self) -> MutexGuard<'_, Voting> {
        self.voting.lock().expect("no holder of this lock panics")
    }

    /// This member as a voter; none if it is none.
    pub fn voter(&self) -> Option<Arc<MapVoter>> {
        self.voting().voter.clone()
    }

    /// The newest map that it knows to be decided. There may be a newer one.
    pub fn map(&self) -> PoolMap {
        if let Some(voter) = self.voter() {
            self.asker.note_map(&voter.map());
        }
        self.asker.map()
    }

    /// A map that was decided.
    pub fn note_map(&self, map: &PoolMap) {
        self.asker.note_map(map);
    }

    /// See [`MapAsker::propose`].
    ///
    /// # Errors
    /// As there.
    pub async fn propose(&self, map: &PoolMap, limit: Duration) -> Result<PoolMap, AskError> {
        self.asker.propose(map, limit).await
    }

    /// See [`MapAsker::ask`].
    ///
    /// # Errors
    /// As there.
    pub async fn ask(&self, limit: Duration) -> Result<PoolMap, AskError> {
        self.asker.ask(limit).await
    }

    /// Does what the newest map wants of this member: it begins to vote, and who the members are is durable afterwards. To be called again
    /// and again, once at a time.
    ///
    /// # Errors
    /// What the disk says. The member takes no part any more then until it is opened again.
    pub async fn follow(&self) -> Result<(), VoterError> {
        let map = self.map();
        if let Some(incarnation) = self.incarnation {
            return self.follow_without_files(map, incarnation).await;
        }
        let (is_other, begins) = {
            let voting = self.voting();
            let is_newer = map.voters.generation > voting.generation;
            let PoolMap { enrolled, voters, roster, witnesses, .. } = &voting.written;
            let begins = is_newer && map.voters.keys.contains(&self.transport.local().id);
            let now = (&map.enrolled, &map.voters, &map.roster, &map.witnesses);
            let is_other = now != (enrolled, voters, roster, witnesses);
            (is_other, begins)
        };
        if begins {
            let (env, transport) = (self.env.clone(), self.transport.clone());
            if let Some(before) = self.voter() {
                // It writes the same files.
                before.stop().await;
            }
            let named = (self.pool, &map);
            let voter =
                MapVoter::begin(env, transport, self.disk.clone(), &self.own, named).await?;
            self.asker.set_voter(voter.clone());
            let mut voting = self.voting();
            voting.voter = Some(voter);
            voting.generation = map.voters.generation;
        }
        if is_other {
            members_file::write(&*self.disk, &self.own, &map).await?;
            let mut voting = self.voting();
            voting.generation = voting.generation.max(map.voters.generation);
            voting.written = map;
        }
        Ok(())
    }

    /// See [`MapSeat::follow`].
    async fn follow_without_files(&self, map: PoolMap, incarnation: u64) -> Result<(), VoterError> {
        let own = Witness { peer: self.transport.local(), incarnation };
        let generation = map.voters.generation;
        let votes_in = self.voter().map_or(0, |voter| voter.generation());
        if map.has_vote_of(own) && votes_in < generation {
            if let Some(before) = self.voter() {
                // It writes the same files.
                before.stop().await;
            }
            let Some(seen) = self.ask_seen(&map).await else { return Ok(()) };
            let voter = self.voter_in(&map, &seen).await?;
            self.asker.set_voter(voter.clone());
            self.voting().voter = Some(voter);
        }
        let is_other = {
            let PoolMap { epoch, enrolled, voters, witnesses, .. } = &self.voting().written;
            *epoch == 0
                || (&map.enrolled, &map.voters, &map.witnesses) != (enrolled, voters, witnesses)
        };
        if is_other {
            members_file::write(&*self.disk, &self.own, &map).await?;
            let mut voting = self.voting();
            voting.generation = voting.generation.max(generation);
            voting.written = map;
        }
        Ok(())
    }

    /// This node without files as a voter in the generation that a map names, of which others have seen this.
    async fn voter_in(
        &self,
        map: &PoolMap,
        seen: &[SeenVotes],
    ) -> Result<Arc<MapVoter>, VoterError> {
        let (env, transport, disk) = (self.env.clone(), self.transport.clone(), self.disk.clone());
        let generation = map.voters.generation;
        let had_begun = self.voting().generation >= generation;
        match read_votes(&*self.disk, &self.own).await? {
            Some(votes) if votes.voters.generation == generation => {
                if seen.iter().any(|seen| votes.is_behind(seen)) {
                    return Err(VoterError::SetBack);
                }
                MapVoter::start(env, transport, disk, &self.own, self.pool).await
            }
            _ if !seen.is_empty() => Err(VoterError::SetBack),
            _ if had_begun => Err(VoterError::Missing),
            _ => MapVoter::begin(env, transport, disk, &self.own, (self.pool, map)).await,
        }
    }

    /// What the voters that a map names have seen of this one; none if too few of them say that, or others vote by now.
    async fn ask_seen(&self, map: &PoolMap) -> Option<Vec<SeenVotes>> {
        let local = self.transport.local().id;
        let generation = map.voters.generation;
        let header = addressed(&self.pool, &encode(&generation));
        let asked = map.voting().filter(|peer| peer.id != local).map(|peer| {
            let request = Request { method: SEEN, header: header.clone(), parts: Vec::new() };
            self.transport.call(peer, request, SEEN_LIMIT)
        });
        let (mut seen, mut answers) = (Vec::new(), 1);
        for reply in join_all(asked).await {
            let Some(reply) = reply.ok().and_then(|reply| decode::<SeenReply>(&reply.header))
            else {
                continue;
            };
            if let Some(newer) = reply.newer {
                self.note_map(&newer);
                return None;
            }
            answers += 1;
            seen.extend(reply.seen);
        }
        (answers > map.voters.keys.len() / 2).then_some(seen)
    }

    /// Ends its vote, if it has one: nothing is written any more.
    pub(crate) async fn end(&self) {
        if let Some(voter) = self.voter() {
            voter.stop().await;
        }
    }

    /// Answers the calls that are about maps, of a member whose key is proven; the header lacks the pool's 16 bytes.
    pub fn handle(
        &self,
        from: Peer,
        request: Request,
    ) -> BoxFuture<'static, Result<Reply, Refusal>> {
        match self.voter() {
            Some(voter) => voter.handle(from, request),
            None => {
                let answer = self.answer_without_voter(from, &request);
                Box::pin(async { answer })
            }
        }
    }

    /// The answer of a member that is no voter: others may not know yet who votes by now, or it does not know that it does.
    fn answer_without_voter(&self, from: Peer, request: &Request) -> Result<Reply, Refusal> {
        let map = self.map();
        if map.peer(from.id).is_none() {
            let text = "the caller is no member of the pool, as far as this one knows";
            return Err(Refusal::new(refused::NOT_A_MEMBER, text));
        }
        let malformed =
            || Refusal::new(Refusal::MALFORMED, "a message about maps that cannot be read");
        let header = match request.method {
            VOTER_MESSAGE => {
                let call = decode::<VoterCall>(&request.header).ok_or_else(malformed)?;
                if call.generation >= map.voters.generation {
                    return Err(Refusal::new(Refusal::OVERLOADED, "it does not vote"));
                }
                encode(&map)
            }
            SEEN => {
                let generation = decode::<u64>(&request.header).ok_or_else(malformed)?;
                let newer = (map.voters.generation > generation).then_some(map);
                encode(&SeenReply { seen: None, newer })
            }
            _ => {
                let call = decode::<ProposeCall>(&request.header).ok_or_else(malformed)?;
                let newer = (map.epoch > call.known.epoch).then_some(map);
                self.note_map(&call.known);
                encode(&ProposeReply::NotLeader(newer))
            }
        };
        Ok(Reply { header, parts: Vec::new() })
    }
}
