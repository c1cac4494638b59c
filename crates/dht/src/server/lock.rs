//! `LOCK`: lock leases at this replica. `USES`: which nodes use a mutable block, and its lock.

use std::collections::BTreeSet;
use std::sync::Arc;

use atoll_key::PeerId;
use atoll_net::{Peer, Refusal};
use bytes::Bytes;

use super::Handle;
use crate::holdings::lock_leases::Outcome;
use crate::locks::LockStep;
use crate::placement::{own_set, set_tag};
use crate::rpc::{
    Answered, AskUses, BlockReader, Lock, LockReply, LockStatus, LockUse, MAX_LOCK_HOLDERS,
    UsesReply, whole_ms,
};
use crate::server::Server;

impl Handle<Lock> for Arc<Server> {
    async fn handle(
        &self,
        from: Peer,
        ask: Lock,
        _: Vec<Bytes>,
    ) -> Result<Answered<Lock>, Refusal> {
        let (status, is_wanted) = if ask.step == LockStep::Release {
            self.ask(&from, ask)?
        } else {
            self.probe_neighbours();
            self.lease_journal.note_use();
            let has_majority = self.note_ring();
            // A restart must not take a part of the nodes for all of them.
            if !self.most_peers.remember(&*self.durable).await {
                return Err(disk_failed());
            }
            match has_majority {
                false => (LockStatus::Minority, false),
                // A holder that renews has the lock: to note that is always right.
                true if ask.step != LockStep::Renew
                    && !self.lease_journal.forgotten().is_zero() =>
                {
                    (LockStatus::Settling, false)
                }
                true => self.ask(&from, ask)?,
            }
        };
        let (set, settled) = self.word_of_root(&ask);
        // The next incarnation must know it.
        self.lease_journal.written().await.map_err(|_| disk_failed())?;
        Ok((LockReply { status, is_wanted, set, settled }, Vec::new()))
    }
}

fn disk_failed() -> Refusal {
    Refusal::new(Refusal::INTERNAL, "this node's disk failed")
}

impl Handle<AskUses> for Arc<Server> {
    async fn handle(
        &self,
        _: Peer,
        AskUses { key, lock }: AskUses,
        _: Vec<Bytes>,
    ) -> Result<Answered<AskUses>, Refusal> {
        let now = self.lease_journal.now();
        let readers = self.promises.readers(now, &key).into_iter();
        let readers: Vec<_> =
            readers.map(|(peer, left)| BlockReader { peer, left_ms: whole_ms(left) }).collect();
        let locks = self.lock_leases.holders(now, &lock, MAX_LOCK_HOLDERS).into_iter();
        let lock_use = |(peer, mode, left): (PeerId, _, _)| LockUse {
            peer_id: peer.0,
            mode,
            left_ms: whole_ms(left),
        };
        let locks: Vec<_> = locks.map(lock_use).collect();
        Ok((UsesReply { readers: readers.into(), locks: locks.into() }, Vec::new()))
    }
}

impl Server {
    /// If this node is the root of the lock: the tag of its replica set, and which members are its voters.
    fn word_of_root(&self, ask: &Lock) -> (Option<u64>, u64) {
        let Some(set) = own_set(self, &ask.key) else { return (None, 0) };
        let voters = match ask.step {
            // It has not looked who they are.
            LockStep::Release => Some(0),
            _ => self.set_history.voters(self.lease_journal.now(), &ask.key, &set),
        };
        voters.map_or((None, 0), |voters| (Some(set_tag(&set)), voters))
    }

    fn ask(&self, from: &Peer, ask: Lock) -> Result<(LockStatus, bool), Refusal> {
        let (outcome, record) =
            self.lock_leases.ask(self.lease_journal.now(), from.id, &ask.into());
        if let Some(record) = record {
            self.lease_journal.lease(record);
        }
        match outcome {
            Outcome::Done { is_wanted } => Ok((LockStatus::Granted, is_wanted)),
            Outcome::Held => Ok((LockStatus::Held, false)),
            Outcome::Full => Err(Refusal::new(Refusal::OVERLOADED, "too many locks are kept here")),
        }
    }

    /// Has the nodes after this one checked now and then, while locks are asked for: nothing else
    /// calls most of them, and dead ones would be counted as present.
    fn probe_neighbours(&self) {
        if !self.lock_leases.begin_probes(self.env.now()) {
            return;
        }
        let own = self.transport.local().id;
        let hoods = self.overlay.neighbourhoods();
        let near = hoods.iter().flat_map(|hood| hood.neighbours(usize::MAX));
        let peers: BTreeSet<Peer> = near.map(|node| node.peer).collect();
        peers.iter().filter(|peer| peer.id != own).for_each(|peer| self.overlay.probe(peer));
    }
}
