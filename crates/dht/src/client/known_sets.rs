//! Replica sets of mutable blocks that this node has looked up, so that it reads or writes such a
//! block again in one round trip (Pastis §3.3).
//!
//! A remembered set may be out of date. The root's replies carry a tag of the set as the root
//! knows it; a caller that finds no such reply, or another tag, looks the set up and asks again. A
//! root that lies could keep up a set that it no longer heads, so a set is forgotten after
//! [`MAX_AGE`] in any case.
//!
//! A set that is used shortly before it would be forgotten is looked up again in the background, and so is one that a
//! caller will use soon ([`same_set_until`]).
//!
//! The table is bounded: beyond [`MAX_SETS`] the set looked up longest ago is forgotten.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::Instant;
use atoll_key::Key;
use atoll_overlay::walk::WalkError;
use atoll_overlay::{Named, Node};

use super::Client;
use super::recent::Recent;
use crate::placement::set_tag;

/// Sets remembered. A guess: the files that a busy mount has open, several times over.
const MAX_SETS: usize = 4096;
/// How long a set is believed. A guess: lookups again each minute cost little.
const MAX_AGE: Duration = Duration::from_secs(60);
/// One that is used after so long is looked up again in the background. A guess: a lookup that meets dead
/// nodes takes less than what is left.
const RENEW_AFTER: Duration = Duration::from_secs(40);
/// So many lookups of a node run in the background at once; further sets are looked up when they are used.
/// A guess.
const MAX_AHEAD: usize = 16;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct KnownSets {
    /// With the time of each lookup.
    sets: Mutex<Recent<(Vec<Node>, Instant), MAX_SETS>>,
    /// Keys that are being looked up in the background.
    ahead: Mutex<BTreeSet<Key>>,
}

/// The root of a key and the nodes after it.
#[derive(Clone, Debug)]
pub(super) struct NamedNodes {
    /// At least the root.
    pub nodes: Vec<Node>,
    /// They were looked up a while ago, and the root has to confirm its replica set.
    pub is_remembered: bool,
}

impl NamedNodes {
    /// Whether the replica set, the first of the nodes, can be relied on when the root's reply
    /// carries this tag.
    pub(super) fn is_confirmed(&self, replicas: &[Node], tag: Option<u64>) -> bool {
        !self.is_remembered || tag == Some(set_tag(replicas))
    }
}

impl KnownSets {
    fn lock(&self) -> MutexGuard<'_, Recent<(Vec<Node>, Instant), MAX_SETS>> {
        self.sets.lock().expect("no holder of this lock panics")
    }

    /// The root and its successors, if no lookup is needed: from the routing tables, or as remembered unless
    /// `anew`.
    pub(super) fn known(client: &Arc<Client>, key: &Key, anew: bool) -> Option<NamedNodes> {
        if let Some(nodes) = client.overlay.known_successors(key) {
            return Some(NamedNodes { nodes, is_remembered: false });
        }
        if !client.config.mechanisms.known_sets || anew {
            return None;
        }
        let (nodes, age) = client.known_sets.remembered(key, client.env.now())?;
        if age >= RENEW_AFTER {
            look_up_ahead(client, *key);
        }
        Some(NamedNodes { nodes, is_remembered: true })
    }

    /// A key has the set that was looked up for another one.
    pub(super) fn note_same(client: &Arc<Client>, key: Key, of: &Key) {
        let mut sets = client.known_sets.lock();
        let found = sets.get(of).cloned();
        if let Some(found) = found {
            sets.note(key, found);
        }
    }

    /// The root does not answer: the set is looked up when it is used next.
    pub(super) fn forget(client: &Arc<Client>, key: &Key) {
        client.known_sets.lock().forget(key);
    }

    /// By a lookup, which tells `named` of each root and its successors that a node on the way names. They are
    /// unverified.
    ///
    /// # Errors
    /// If the lookup fails.
    pub(super) async fn look_up(
        client: &Arc<Client>,
        key: &Key,
        named: Named,
    ) -> Result<NamedNodes, WalkError> {
        let nodes = client.overlay.find_root_telling(key, named).await?;
        client.known_sets.lock().note(*key, (nodes.clone(), client.env.now()));
        Ok(NamedNodes { nodes, is_remembered: false })
    }

    /// The root and its successors, in one of both ways.
    ///
    /// # Errors
    /// If the lookup fails.
    pub(super) async fn find(
        client: &Arc<Client>,
        key: &Key,
        anew: bool,
    ) -> Result<NamedNodes, WalkError> {
        match KnownSets::known(client, key, anew) {
            Some(named) => Ok(named),
            None => KnownSets::look_up(client, key, Box::new(|_| {})).await,
        }
    }

    /// With the time since the lookup.
    fn remembered(&self, key: &Key, now: Instant) -> Option<(Vec<Node>, Duration)> {
        let sets = self.lock();
        let (nodes, since) = sets.get(key)?;
        let age = now.since(*since);
        (age < MAX_AGE).then(|| (nodes.clone(), age))
    }

    fn lock_ahead(&self) -> MutexGuard<'_, BTreeSet<Key>> {
        self.ahead.lock().expect("no holder of this lock panics")
    }
}

/// The last of the keys that have the same replica set as this one, beginning with it, as far as this node knows
/// without asking others; if it does not, the set is looked up in the background.
pub(crate) fn same_set_until(client: &Arc<Client>, key: &Key) -> Option<Key> {
    if !client.config.mechanisms.joint_puts {
        return None;
    }
    let Some(named) = KnownSets::known(client, key, false) else {
        look_up_ahead(client, *key);
        return None;
    };
    Some(*named.nodes.first()?.id.key())
}

/// Looks a set up in the background.
fn look_up_ahead(client: &Arc<Client>, key: Key) {
    if client.config.mechanisms.sets_ahead
        && let Some(lookup) = ahead(client, key)
    {
        client.env.spawn(Box::pin(lookup));
    }
}

/// A lookup that nobody waits for, unless it is under way or there are too many.
fn ahead(client: &Arc<Client>, key: Key) -> Option<impl Future<Output = ()> + Send + 'static> {
    let mut under_way = client.known_sets.lock_ahead();
    if under_way.len() >= MAX_AHEAD || !under_way.insert(key) {
        return None;
    }
    let done = Done { client: client.clone(), key };
    Some(async move {
        if let Err(error) = KnownSets::look_up(&done.client, &key, Box::new(|_| {})).await {
            tracing::debug!(%key, %error, "a replica set was not found ahead of its use");
        }
        drop(done);
    })
}

/// Ends a lookup in the background, also one that is dropped.
struct Done {
    client: Arc<Client>,
    key: Key,
}

impl Drop for Done {
    fn drop(&mut self) {
        self.client.known_sets.lock_ahead().remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use atoll_key::PeerId;
    use atoll_net::Peer;

    use super::*;

    fn nodes(count: u8) -> Vec<Node> {
        let addr = "127.0.0.1:1".parse().expect("an address");
        (0..count).map(|n| Node::of(Peer { id: PeerId([n; 32]), addr })).collect()
    }

    #[test]
    fn a_set_is_believed_for_a_minute() {
        let (sets, start, key) = (KnownSets::default(), Instant::default(), Key::hashed([1; 32]));
        let at = |secs: u64| start + Duration::from_secs(secs);
        sets.lock().note(key, (nodes(3), at(0)));
        assert_eq!(sets.remembered(&key, at(59)), Some((nodes(3), Duration::from_secs(59))));
        assert_eq!(sets.remembered(&key, at(60)), None);
    }

    #[test]
    fn a_remembered_set_counts_only_if_its_root_means_the_same_nodes() {
        let looked_up = NamedNodes { nodes: nodes(5), is_remembered: false };
        let remembered = NamedNodes { nodes: nodes(5), is_remembered: true };
        let set = &nodes(3)[..];
        assert!(looked_up.is_confirmed(set, None));
        assert!(remembered.is_confirmed(set, Some(set_tag(set))));
        let other: Vec<Node> = nodes(3).into_iter().rev().collect();
        for tag in [None, Some(set_tag(&other)), Some(set_tag(&nodes(2)))] {
            assert!(!remembered.is_confirmed(set, tag), "{tag:?}");
        }
    }
}
