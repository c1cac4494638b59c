//! Coming onto a ring and leaving it.

use std::fmt;

use atoll_net::{CallError, Peer};
use futures_util::future::join_all;

use super::Chord;
use crate::Node;
use crate::walk::WalkError;

/// Why a node could not join.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum JoinError {
    /// The node is on a ring already.
    #[error("this node is on a ring already")]
    AlreadyJoined,
    /// No bootstrap peers were given.
    #[error("there is nobody to ask: no bootstrap peers were given")]
    NobodyToAsk,
    /// None of the bootstrap peers led to a ring.
    #[error("no bootstrap peer led to a ring: {}", list(.asked))]
    NobodyHelped {
        /// Who was asked, and what became of it.
        asked: Vec<(Peer, JoinFailure)>,
    },
}

/// Why one bootstrap peer did not help.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum JoinFailure {
    /// The address card is this node's own.
    #[error("that is this node itself")]
    Itself,
    /// The way to this node's place on the ring was not found.
    #[error("{0}")]
    Walk(#[from] WalkError),
    /// The node that should become the successor did not answer.
    #[error("our successor {0:?} did not say who surrounds it: {1}")]
    Successor(Node, CallError),
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

impl Chord {
    /// Makes a ring of one and starts the upkeep. Other rings of the same network are
    /// found through remembered peers and merged with.
    pub fn create(&self) {
        self.update(|state, _| state.create());
        self.start();
    }

    /// Joins the ring that one of the `bootstrap` peers is on (CFS §4.2): looks up this
    /// node's successor, takes over its list and makes itself known to it. Starts the
    /// upkeep. The bootstrap peers are asked one after the other, in the order given.
    ///
    /// # Errors
    /// Says who was asked and what each said; the node is then on no ring, and joining
    /// may be tried again.
    pub async fn join(&self, bootstrap: Vec<Peer>) -> Result<(), JoinError> {
        if self.lock().state.joined() {
            return Err(JoinError::AlreadyJoined);
        }
        if bootstrap.is_empty() {
            return Err(JoinError::NobodyToAsk);
        }
        let mut asked = Vec::new();
        for peer in bootstrap {
            self.lock().remembered.add(peer, &*self.env);
            match self.join_through(peer).await {
                Ok(()) => {
                    self.start();
                    self.stabilize().await;
                    return Ok(());
                }
                Err(failure) => asked.push((peer, failure)),
            }
        }
        Err(JoinError::NobodyHelped { asked })
    }

    async fn join_through(&self, peer: Peer) -> Result<(), JoinFailure> {
        let me = self.me();
        let start = Node::of(peer);
        if start.id == me.id {
            return Err(JoinFailure::Itself);
        }
        // Not our own ID: the ring may remember us from before a restart.
        let key = me.id.key().next();
        let mut tries = 1;
        loop {
            let successor = self.walk_to_root_from(&[start], &key).await?.value[0];
            match self.call_neighbours(&successor).await {
                Ok(told) => {
                    self.update(|state, now| state.join(successor, &told, now));
                    return Ok(());
                }
                Err(error) if tries == JOIN_TRIES => {
                    return Err(JoinFailure::Successor(successor, error));
                }
                Err(_) => tries += 1,
            }
        }
    }

    /// Leaves the ring in good order: predecessor and successor are told and close the
    /// gap at once. Stops the upkeep. The node may join again.
    pub async fn leave(&self) {
        let (told, tasks) = {
            let mut inner = self.lock();
            (inner.state.told(), std::mem::take(&mut inner.tasks))
        };
        for task in tasks {
            task.abort();
        }
        self.update(|state, _| state.leave());
        let mut neighbours: Vec<Node> =
            told.predecessor.into_iter().chain(told.successors.first().copied()).collect();
        neighbours.dedup();
        // Who does not hear it will find out by itself.
        join_all(neighbours.iter().map(|node| self.call_leave(node, &told))).await;
    }
}
