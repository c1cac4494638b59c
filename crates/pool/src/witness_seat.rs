//! A node without files at work in one group: it votes where the group's map wants that ([`crate::witnesses`]), and says that it is there.
//!
//! The group's primary asks each such node twice a second whether it is there, and tells it the newest map by that. The node's directory has its votes and the
//! newest map that it knows, as Atoll's own directory of a member has them, and nothing else.
//!
//! **It does not know** how a node without files gets to the group's files ([`crate::PoolGroups`]), and what becomes of a directory that
//! was set back to an older state ([`crate::machine`]).

use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use atoll_env::{BoxFuture, Env, Instant, Notify, sleep};
use atoll_net::{Peer, Refusal, Reply, Request, Service, Transport};
use futures_util::future::select;

use crate::disk::Disk;
use crate::map::{MapSeat, PROPOSE, PoolMap, SEEN, VOTER_MESSAGE, VoterError};
use crate::messages::{self, MAP, WITNESS, WitnessReply, refused};
use crate::routing::PoolId;

/// How often it does what the map wants, also if it hears of no other one.
const LOOK_EVERY: Duration = Duration::from_millis(100);

struct SeatState {
    /// When a primary has asked last; when it began, before that.
    asked: Instant,
    /// Why it votes no more until it is opened again.
    failed: Option<VoterError>,
    is_ended: bool,
}

/// See the module. It is at work until it is dropped.
pub struct WitnessSeat<D: Disk> {
    env: Env,
    maps: MapSeat<D>,
    incarnation: u64,
    has_news: Notify,
    /// Held while it does what the map wants.
    following: futures_util::lock::Mutex<()>,
    state: Mutex<SeatState>,
}

impl<D: Disk> std::fmt::Debug for WitnessSeat<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WitnessSeat").field("maps", &self.maps).finish_non_exhaustive()
    }
}

impl<D: Disk> WitnessSeat<D> {
    /// Begins to work for the group that is called `group` ([`crate::PoolSettings::address`]), of which `map` was decided, with what is at the top
    /// of `disk`.
    ///
    /// # Errors
    /// What the disk says.
    pub async fn start(
        (env, transport): (Env, Arc<dyn Transport>),
        disk: D,
        (group, map): (PoolId, PoolMap),
        incarnation: u64,
    ) -> Result<Arc<WitnessSeat<D>>, VoterError> {
        let own = disk.top();
        let place = (Arc::new(disk), own);
        let peers = (env.clone(), transport);
        let maps = MapSeat::start_without_files(peers, place, (group, map), incarnation).await?;
        let state = SeatState { asked: env.now(), failed: None, is_ended: false };
        let seat = Arc::new(WitnessSeat {
            env,
            maps,
            incarnation,
            has_news: Notify::default(),
            following: futures_util::lock::Mutex::new(()),
            state: Mutex::new(state),
        });
        seat.env.spawn(Box::pin(keep(Arc::downgrade(&seat), seat.env.clone())));
        Ok(seat)
    }

    fn state(&self) -> MutexGuard<'_, SeatState> {
        self.state.lock().expect("no holder of this lock panics")
    }

    /// The newest map of the group that it knows.
    pub fn map(&self) -> PoolMap {
        self.maps.map()
    }

    /// A map of the group that was decided.
    pub fn note_map(&self, map: &PoolMap) {
        self.maps.note_map(map);
        self.has_news.notify();
    }

    /// For how long no primary has asked.
    pub(crate) fn unasked_for(&self) -> Duration {
        self.env.now().since(self.state().asked)
    }

    /// Whether it votes in the generation of voters that it knows.
    pub fn is_voting(&self) -> bool {
        let generation = self.map().voters.generation;
        let voter = self.maps.voter().filter(|voter| voter.failed().is_none());
        voter.is_some_and(|voter| voter.generation() == generation)
    }

    /// Why it votes no more until it is opened again.
    pub fn failed(&self) -> Option<VoterError> {
        let voter = self.maps.voter().and_then(|voter| voter.failed());
        self.state().failed.or(voter)
    }

    /// What peers may ask of it.
    pub fn service(self: &Arc<Self>) -> Arc<dyn Service> {
        Arc::new(WitnessService { seat: Arc::downgrade(self) })
    }

    /// Ends its work: nothing of its directory is written after this.
    pub async fn end(&self) {
        self.state().is_ended = true;
        self.has_news.notify();
        // What has begun may still write votes.
        let _none = self.following.lock().await;
        self.maps.end().await;
    }

    async fn follow(&self) {
        let _one = self.following.lock().await;
        let has_ended = {
            let state = self.state();
            state.failed.is_some() || state.is_ended
        };
        if has_ended {
            return;
        }
        if let Err(error) = self.maps.follow().await {
            tracing::warn!("this node without files does not vote: {error}");
            self.state().failed = Some(error);
        }
    }

    /// Answers that it is there.
    fn answer_witness(&self, request: &Request) -> Result<Reply, Refusal> {
        let malformed = || Refusal::new(Refusal::MALFORMED, "a call that cannot be read");
        let map = messages::decode::<PoolMap>(&request.header).ok_or_else(malformed)?;
        self.note_map(&map);
        self.state().asked = self.env.now();
        if let Some(error) = self.failed() {
            return Err(Refusal::new(refused::DISK, error.to_string()));
        }
        let reply = WitnessReply { incarnation: self.incarnation, epoch: self.map().epoch };
        Ok(Reply { header: messages::encode(&reply), parts: Vec::new() })
    }
}

/// Does what maps want of it.
async fn keep<D: Disk>(seat: Weak<WitnessSeat<D>>, env: Env) {
    loop {
        let Some(own) = seat.upgrade().filter(|own| !own.state().is_ended) else { return };
        own.follow().await;
        select(pin!(own.has_news.notified()), sleep(&*env, LOOK_EVERY)).await;
    }
}

struct WitnessService<D: Disk> {
    seat: Weak<WitnessSeat<D>>,
}

impl<D: Disk> Service for WitnessService<D> {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let seat = self.seat.upgrade();
        Box::pin(async move {
            let ended = || Refusal::new(Refusal::OVERLOADED, "it is being ended");
            let seat = seat.ok_or_else(ended)?;
            let map = seat.map();
            if map.peer(from.id).is_none() {
                let text = "the caller is no member of the pool";
                return Err(Refusal::new(refused::NOT_A_MEMBER, text));
            }
            match request.method {
                VOTER_MESSAGE | PROPOSE | SEEN => seat.maps.handle(from, request).await,
                MAP => Ok(Reply { header: messages::encode(&map), parts: Vec::new() }),
                WITNESS if map.enrolled.contains(from.id) => seat.answer_witness(&request),
                _ => Err(Refusal::new(Refusal::OVERLOADED, "it has no files")),
            }
        })
    }
}
