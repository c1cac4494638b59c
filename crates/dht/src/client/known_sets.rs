//! Replica sets of mutable blocks that this node has looked up, so that it reads or writes such a
//! block again in one round trip (Pastis §3.3).
//!
//! A remembered set may be out of date. The root's replies carry a tag of the set as the root
//! knows it; a caller that finds no such reply, or another tag, looks the set up and asks again. A
//! root that lies could keep up a set that it no longer heads, so a set is forgotten after
//! [`MAX_AGE`] in any case.
//!
//! The table is bounded: beyond [`MAX_SETS`] the set looked up longest ago is forgotten.

use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::Instant;
use atoll_key::Key;
use atoll_overlay::Node;
use atoll_overlay::walk::WalkError;

use super::recent::Recent;
use crate::context::Context;
use crate::placement::set_tag;

/// Sets remembered. A guess: the files that a busy mount has open, several times over.
const MAX_SETS: usize = 4096;
/// How long a set is believed. A guess: lookups again each minute cost little.
const MAX_AGE: Duration = Duration::from_secs(60);

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct KnownSets {
    /// With the time of each lookup.
    sets: Mutex<Recent<(Vec<Node>, Instant), MAX_SETS>>,
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

    /// The root and its successors: from the routing tables, as remembered unless `anew`, or by a
    /// lookup.
    ///
    /// # Errors
    /// If the lookup fails.
    pub(super) async fn find(
        &self,
        context: &Context,
        key: &Key,
        anew: bool,
    ) -> Result<NamedNodes, WalkError> {
        if let Some(nodes) = context.overlay.known_successors(key) {
            return Ok(NamedNodes { nodes, is_remembered: false });
        }
        let may_remember = context.config.mechanisms.known_sets && !anew;
        let remembered = self.remembered(key, context.env.now()).filter(|_| may_remember);
        if let Some(nodes) = remembered {
            return Ok(NamedNodes { nodes, is_remembered: true });
        }
        let nodes = context.overlay.find_root(key).await?;
        self.lock().note(*key, (nodes.clone(), context.env.now()));
        Ok(NamedNodes { nodes, is_remembered: false })
    }

    fn remembered(&self, key: &Key, now: Instant) -> Option<Vec<Node>> {
        let sets = self.lock();
        let (nodes, since) = sets.get(key)?;
        (now.since(*since) < MAX_AGE).then(|| nodes.clone())
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
        assert_eq!(sets.remembered(&key, at(59)), Some(nodes(3)));
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
