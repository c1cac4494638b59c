//! Joining a ring and leaving it.

use std::fmt;
use std::net::SocketAddr;

use atoll_env::timeout;
use atoll_key::Key;
use atoll_net::{CallError, Peer};
use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream;

use crate::chord::Chord;
use crate::chord::ring::state::{ChordState, Told};
use crate::chord::trust::admission::Verdict;
use crate::walk::{Found, Start, WalkError, WalkLimits};
use crate::{Node, VirtualServerId};

/// Why a node could not join.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum JoinError {
    /// The node is on a ring already.
    #[error("this node is on a ring already")]
    AlreadyJoined,
    /// No bootstrap peers were given.
    #[error("no bootstrap peers were given")]
    NobodyToAsk,
    /// Another node, which is alive, has this node's position.
    #[error(
        "{by} holds this node's place on the ring: in this network a place belongs to an IP \
         address, so one address runs one node. Stop that node, give this one another \
         address, or run that one with more virtual servers"
    )]
    PositionTaken {
        /// The peer that holds it.
        by: Peer,
    },
    /// The node that would be our successor cannot reach us, and no more nodes contradict it than
    /// agree with it.
    #[error(
        "{by} cannot reach this node at {addr}, where it says it listens: let incoming \
         connections through to that port, or tell this node its address as others see it"
    )]
    Unreachable {
        /// The peer that tried.
        by: Peer,
        /// Where.
        addr: SocketAddr,
    },
    /// Another process has this node's key, and goes on: this one has to end.
    #[error("another process with this node's key runs at {by}")]
    Superseded {
        /// Where it listens.
        by: SocketAddr,
    },
    /// None of the bootstrap peers led to a ring.
    #[error("no bootstrap peer led to a ring: {}", list(.asked))]
    NobodyHelped {
        /// The peers asked, and why each did not help.
        asked: Vec<(Peer, JoinFailure)>,
    },
}

/// Why one bootstrap peer did not help.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum JoinFailure {
    /// The peer address is this node's own.
    #[error("that is this node itself")]
    Itself,
    /// Another node, which is alive, has this node's position.
    #[error("{0} holds this node's place on the ring")]
    PositionTaken(Peer),
    /// Another process has this node's key, and goes on.
    #[error("another process with this node's key runs at {0}")]
    Superseded(SocketAddr),
    /// The way to this node's place on the ring was not found.
    #[error("{0}")]
    Walk(#[from] WalkError),
    /// The node that should become the successor did not answer.
    #[error("our successor {0:?} did not tell its neighbours: {1}")]
    Successor(Node, CallError),
}

fn gone(successor: Node) -> JoinFailure {
    let text = "it is not, or no longer, where it is said to be";
    JoinFailure::Successor(successor, CallError::Unreachable(text.into()))
}

/// Why the number of virtual servers was not changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum VirtualServersError {
    /// A node without a ring position is no node.
    #[error("a node needs at least one virtual server; to stop storing blocks, stop the node")]
    None,
    /// More than any node of the network may hold.
    #[error("{wanted} virtual servers are too many: a node of this network may run {most}")]
    TooMany {
        /// The number asked for.
        wanted: u16,
        /// The network's maximum.
        most: u16,
    },
}

fn list(asked: &[(Peer, JoinFailure)]) -> String {
    struct One<'a>(&'a (Peer, JoinFailure));
    impl fmt::Display for One<'_> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "{}: {}", self.0.0, self.0.1)
        }
    }
    asked.iter().map(|one| One(one).to_string()).collect::<Vec<_>>().join("; ")
}

/// How often a join is tried through one bootstrap peer: a successor may die on the way.
const JOIN_TRIES: usize = 3;
/// So many of its future successors a node has checked before it joins.
const MAX_AWAITED: usize = 32;
/// The most `LEAVE` calls under way.
const PARALLEL_LEAVES: usize = 16;
/// The most virtual servers that join at once.
const PARALLEL_JOINS: usize = 4;

impl Chord {
    /// Makes a ring of one and starts the upkeep. Other rings of the same network are
    /// found through remembered peers and merged with. Does nothing once this process
    /// [was superseded](Chord::superseded_by).
    pub fn create(&self) {
        if self.superseded_by().is_some() {
            return;
        }
        self.look_at_former_address();
        self.update(|servers, _| servers.create());
        self.start();
    }

    /// Joins the ring that one of the `bootstrap` peers is on (CFS §4.2): looks up this
    /// node's successor, takes over its list and makes itself known to it. Starts the
    /// upkeep. The bootstrap peers are asked one after the other, in the order given.
    /// Virtual servers after the first join through its tables; one that does not get
    /// on the ring now tries again every period.
    ///
    /// # Errors
    /// Names the peers asked and their answers; the node is then on no ring, and joining may be
    /// tried again.
    pub async fn join(&self, bootstrap: Vec<Peer>) -> Result<(), JoinError> {
        if self.lock().servers.joined() {
            return Err(JoinError::AlreadyJoined);
        }
        if bootstrap.is_empty() {
            return Err(JoinError::NobodyToAsk);
        }
        self.stay_superseded()?;
        self.look_at_former_address();
        let mut asked = Vec::new();
        for peer in bootstrap {
            self.lock().membership.remembered.name(peer);
            match self.join_through(peer).await {
                Ok(way) => {
                    self.start();
                    self.stabilize_all().await;
                    self.confirm_reachable(way).await?;
                    self.join_the_rest().await;
                    return self.stay_superseded();
                }
                Err(JoinFailure::PositionTaken(by)) => return Err(JoinError::PositionTaken { by }),
                Err(failure) => asked.push((peer, failure)),
            }
            self.stay_superseded()?;
        }
        Err(JoinError::NobodyHelped { asked })
    }

    /// Puts the first virtual server on the ring of `peer`. Returns the nodes asked on the way,
    /// `peer` first.
    async fn join_through(&self, peer: Peer) -> Result<Vec<Node>, JoinFailure> {
        let me = self.me();
        let start = Node::at(peer, VirtualServerId { index: 0, ..me.virtual_server });
        if start.peer.id == me.peer.id {
            return Err(JoinFailure::Itself);
        }
        self.is_free(&me, &start).await?;
        // Not our own ID: the ring may remember us from before a restart.
        let key = me.id.key().next();
        let mut tries = 1;
        loop {
            let found = self.walk_to_place(&key, Start::Elsewhere(&[start])).await?;
            match self.join_at(me.virtual_server.index, found.value[0]).await {
                Ok(()) => {
                    let asked = found.trace.0.iter().map(|asked| asked.node);
                    return Ok(std::iter::once(start).chain(asked).collect());
                }
                Err(JoinFailure::Successor(..)) if tries < JOIN_TRIES => tries += 1,
                Err(failure) => return Err(failure),
            }
        }
    }

    /// The root of `key`, before which this node wants to stand: without guesses.
    pub(in crate::chord) async fn walk_to_place(
        &self,
        key: &Key,
        start: Start<'_>,
    ) -> Result<Found<Vec<Node>>, WalkError> {
        let limits = WalkLimits { guess: false, ..self.root_limits() };
        self.walk_to_root(key, start, limits).await
    }

    /// Whether `other` leaves the place `mine` to this node: it is elsewhere, or not alive.
    async fn is_free(&self, mine: &Node, other: &Node) -> Result<(), JoinFailure> {
        let is_elsewhere = other.peer.id == mine.peer.id && other.peer.addr != mine.peer.addr;
        if is_elsewhere && self.is_superseded_from(other.peer.addr).await {
            return Err(JoinFailure::Superseded(other.peer.addr));
        }
        let is_taken = other.id == mine.id
            && other.peer.id != mine.peer.id
            && self.ensure_checked(other).await;
        if is_taken { Err(JoinFailure::PositionTaken(other.peer)) } else { Ok(()) }
    }

    /// Puts a virtual server on the ring before `successor`, which may be of this node too.
    async fn join_at(&self, index: u16, successor: Node) -> Result<(), JoinFailure> {
        let me = self.lock().servers.position(index);
        self.is_free(&me, &successor).await?;
        if !self.ensure_checked(&successor).await {
            return Err(gone(successor));
        }
        let told = self.call_neighbours(&successor).await;
        let told = told.map_err(|error| JoinFailure::Successor(successor, error))?;
        if let Some(before) = &told.predecessor {
            self.is_free(&me, before).await?;
        }
        // A node with one successor only is lost if that one dies now.
        let around = told.predecessor.iter().chain(told.successors.iter().take(MAX_AWAITED));
        let checks = join_all(around.map(|node| self.ensure_checked(node)));
        let _ = timeout(&*self.env, self.config.call_limit, checks).await;
        let unknown = self.update(|servers, now| {
            let is_on_ring = servers.state(index).is_none_or(ChordState::joined);
            if is_on_ring || servers.position(index).id == successor.id {
                return Vec::new();
            }
            if servers.judge(&successor, now) != Verdict::Welcome {
                return Vec::new(); // It has left meanwhile.
            }
            servers.with(index, now, |state, judge| state.join(successor, &told, judge));
            servers.keep_waiting(index, successor, told, now)
        });
        self.check_claims(&unknown, Some(successor.peer.id));
        let joined = self.lock().servers.state(index).is_none_or(ChordState::joined);
        if joined { Ok(()) } else { Err(gone(successor)) }
    }

    /// Has the virtual servers that are on no ring join through the tables of those that
    /// are (CFS §5.3).
    pub(in crate::chord) async fn join_the_rest(&self) {
        let waiting: Vec<u16> = {
            let inner = self.lock();
            if !inner.servers.joined() {
                return;
            }
            let on_no_ring = inner.servers.states().filter(|state| !state.joined());
            on_no_ring.map(|state| state.me().virtual_server.index).collect()
        };
        let joins = waiting.into_iter().map(|index| self.join_by_own_tables(index));
        stream::iter(joins).buffer_unordered(PARALLEL_JOINS).collect::<()>().await;
    }

    async fn join_by_own_tables(&self, index: u16) {
        let key = self.lock().servers.position(index).id.key().next();
        // After a failure the next period tries again.
        if let Ok(found) = self.walk_to_place(&key, Start::OwnTables).await
            && self.join_at(index, found.value[0]).await.is_ok()
        {
            self.stabilize_server(index).await;
        }
    }

    /// Changes how many virtual servers this node runs (CFS §5.3: "this number can be
    /// adjusted from time to time"). New ones have joined, or tried to, when this returns;
    /// superfluous ones, those of the highest indices, have left in good order.
    ///
    /// # Errors
    /// If the network does not allow so many, or none are wanted; nothing has changed then.
    pub async fn set_virtual_servers(&self, count: u16) -> Result<(), VirtualServersError> {
        let most = self.config.max_virtual_servers;
        if count == 0 {
            return Err(VirtualServersError::None);
        }
        if count > most {
            return Err(VirtualServersError::TooMany { wanted: count, most });
        }
        self.update(|servers, _| servers.grow(count));
        let mut left = Vec::new();
        self.update(|servers, _| {
            while servers.count() > count
                && let Some((gone, told)) = servers.shrink()
            {
                left.push((gone, told));
            }
        });
        self.tell_of_leaving(&left, count).await;
        self.join_the_rest().await;
        Ok(())
    }

    /// Tells the neighbours of virtual servers that have left, `remaining` of this node's
    /// staying. Neighbours that miss the call detect it by stabilising.
    async fn tell_of_leaving(&self, left: &[(Node, Told)], remaining: u16) {
        let stays = |node: &Node| !left.iter().any(|(gone, _)| gone.id == node.id);
        let mut calls = Vec::new();
        for (gone, told) in left {
            let mut neighbours: Vec<Node> =
                told.predecessor.into_iter().chain(told.successors.first().copied()).collect();
            neighbours.dedup();
            neighbours.retain(|node| !self.owns(node));
            // Those that leave together are no neighbours for those that stay.
            let mut before = told.predecessor;
            for _ in 0..left.len() {
                let leaves = |node: Node| left.iter().find(|(gone, _)| gone.id == node.id);
                let Some((_, its)) = before.and_then(leaves) else { break };
                before = its.predecessor;
            }
            before = before.filter(stays);
            let after: Vec<Node> = told.successors.iter().filter(|n| stays(n)).copied().collect();
            let told = Told { predecessor: before, successors: after };
            for node in neighbours {
                calls.push((gone.virtual_server.index, node, told.clone()));
            }
        }
        let calls = calls.into_iter().map(|(from, to, told)| async move {
            let _ = self.call_leave(from, &to, &told, remaining).await;
        });
        stream::iter(calls).buffer_unordered(PARALLEL_LEAVES).collect::<()>().await;
    }

    /// Leaves the ring in good order, with all virtual servers: their predecessors and
    /// successors are told and close the gaps at once. Stops the upkeep. The node may join
    /// again.
    pub async fn leave(&self) {
        let tasks = std::mem::take(&mut self.lock().maintenance.tasks);
        tasks.into_iter().for_each(|task| task.abort());
        let left = self.update(|servers, _| {
            let left: Vec<(Node, Told)> =
                servers.states().map(|state| (state.me(), state.told())).collect();
            servers.leave();
            left
        });
        self.tell_of_leaving(&left, 0).await;
    }
}
