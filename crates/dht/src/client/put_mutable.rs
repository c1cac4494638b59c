//! Putting mutable blocks at their replica set, in one round trip if the set is known.
//!
//! Several blocks of one replica set go there together, in their order: a replica stores none of them without
//! those before it ([`crate::server::put`]), and none counts as stored unless those before it do. So a new inode
//! and its name in a directory take one round trip (Pastis §3.1 has two, the inode's first).
//!
//! The writer's node sends the block to all replicas at once and counts the majority itself, so no
//! single node is believed, and hears which replica holds another version. It waits for every
//! replica whose answer is not overdue, because one of them may refuse, and for overdue ones while
//! no majority has answered. A remembered replica set counts only if its root confirms it
//! (`known_sets`).
//!
//! Two writers that hold one key may write different blocks of one version at the same time. A
//! writer that hears of another block of its version has failed, even if a majority took its own:
//! were the majority's next member to fail, repair could copy the other block. So at most one of
//! them succeeds, and a higher version settles the matter. Not covered: a writer that cannot reach
//! the replica with the other block.
//!
//! Replicas name the readers that they have promised a call-back ([`crate::holdings::promises`]). The writer's
//! node tells them before the put is acknowledged; one that does not answer is waited for until its
//! promise has ended.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use atoll_env::{Instant, sleep, timeout};
use atoll_key::{BlockId, Key, PeerId};
use atoll_net::Peer;
use atoll_overlay::{Node, distinct_peers};
use futures_util::future::join_all;

use super::Client;
use super::ack_verification::Said;
use super::get_mutable::ask_for_promises;
use super::known_sets::{KnownSets, NamedNodes};
use super::put_batch::{Direct, Outcome, Tally};
use crate::accounting::admission::Origin;
use crate::blocks::HeldBlock;
use crate::cache::promised::{Asking, promised_by_majority};
use crate::placement::size_of;
use crate::rpc::put_times::WaitsFor;
use crate::rpc::quorum::{Calls, Event};
use crate::rpc::{Block, Changed, PROMISE_TIME, PromiseHolder, PromisesReply, PutStatus};

/// While no majority has answered, overdue answers are waited for so long: a majority of slow disks
/// stores the block, and a dead majority has left the ring then. A guess: half of a call.
const MOST_WAIT: Duration = Duration::from_secs(5);

/// A reader that does not answer is told again after this pause. A guess.
const TELL_AGAIN: Duration = Duration::from_millis(500);

/// Puts a mutable block at its replica set. `holders` have it already; the set is looked up `anew`
/// after an attempt that failed.
pub(super) async fn put_mutable(
    client: &Arc<Client>,
    block: Block,
    holders: BTreeSet<PeerId>,
    anew: bool,
) -> Outcome {
    let named = match KnownSets::find(client, &block.header.key, anew).await {
        Ok(named) => named,
        Err(error) => return Outcome::Again(holders, error.to_string()),
    };
    let outcomes = put_together(client, vec![block], vec![holders], &named).await;
    outcomes.into_iter().next().expect("one block has one outcome")
}

/// Puts mutable blocks of one lease at the replica set that is `named`, which is that of all of them; of each,
/// `holders` have it already. One outcome for each.
pub(super) async fn put_together(
    client: &Arc<Client>,
    blocks: Vec<Block>,
    holders: Vec<BTreeSet<PeerId>>,
    named: &NamedNodes,
) -> Vec<Outcome> {
    let set = distinct_peers(&named.nodes, client.config.replicas);
    let keys: Vec<Key> = blocks.iter().map(|block| block.header.key).collect();
    let origin = Origin::own(client, blocks[0].header.lease_secs, &keys);
    let ids = blocks.iter().map(|block| BlockId { key: block.header.key, kind: block.header.kind });
    let asking: Option<Vec<Asking>> = ids.map(|id| ask_for_promises(client, id)).collect();
    let asking = asking.unwrap_or_default();
    let numbers: Vec<u64> = asking.iter().map(Asking::number).collect();
    let mut readers: Vec<Readers> = blocks.iter().map(|_| Readers::default()).collect();
    let direct = Direct::new(client, &set, &origin, &blocks, holders);
    let mut direct = direct.with_promises(&numbers);
    let mut tally = Tally::new(client, &set, blocks.len());
    let mut calls = Calls::new(client, WaitsFor::Replica);
    direct.put(&mut calls, false);
    let mut root_says = None;
    let give_up = client.env.now() + MOST_WAIT;
    while calls.is_patient() || !direct.is_settled(&tally) {
        let left = give_up.since(client.env.now());
        match timeout(&*client.env, left, calls.next()).await {
            Ok(Some(Event::Answer(node, Ok(said)))) => {
                if node == set[0] {
                    root_says = said.set;
                }
                note_readers(&mut readers, &said, client.env.now());
                direct.note(&mut tally, node, said).await;
            }
            Ok(Some(_)) => {}
            Ok(None) | Err(_) => break,
        }
    }
    calls.finish();
    let holders = direct.holders.clone();
    let mut outcomes = direct.outcomes(Some(tally), "");
    let is_confirmed = named.is_confirmed(&set, root_says);
    let size = size_of(client, &set);
    // Also if too few have stored a block: they are not asked again.
    join_all(keys.iter().zip(&readers).map(|(key, readers)| readers.tell(client, *key, size)))
        .await;
    // What was counted on must hold after a restart as well.
    let not_counted = match client.expected.remember(&*client.durable).await {
        _ if !is_confirmed => Some("its replica set has changed"),
        true => None,
        false => Some("this node's disk failed"),
    };
    let (mut asking, mut is_first_missing) = (asking.into_iter(), false);
    for (at, Block { header, bytes }) in blocks.into_iter().enumerate() {
        let outcome = &mut outcomes[at];
        let why = match is_first_missing {
            true => Some("the block before it is not stored"),
            false => not_counted,
        };
        if matches!(outcome, Outcome::Stored)
            && let Some(why) = why
        {
            *outcome = Outcome::Again(holders[at].clone(), why.to_owned());
        }
        let is_stored = matches!(outcome, Outcome::Stored);
        is_first_missing |= !is_stored;
        let Some(asking) = asking.next() else { continue };
        asking.changed();
        if is_stored
            && let Some(promised) = readers[at].promised(size)
            && let Ok(version) = header.kind.verify(&header.key, &bytes)
        {
            asking.keep(HeldBlock { version, bytes }, promised);
        }
    }
    outcomes
}

/// Notes what a replica has said of the readers of each block.
fn note_readers(readers: &mut [Readers], said: &Said, now: Instant) {
    let mut promises = said.promises.iter();
    for (index, status) in said.indices.iter().zip(&said.statuses) {
        if matches!(status, PutStatus::Stored { .. }) {
            readers[*index].note(promises.next(), now);
        }
    }
}

/// What replicas that have stored a block have said of its readers.
#[derive(Default)]
struct Readers {
    named: BTreeMap<PeerId, Reader>,
    /// Replicas that have stored the block; of these, such as know all promises that they have made; and for how long
    /// others have promised this node a call-back.
    stored: usize,
    knowing: usize,
    promised: Vec<Duration>,
    /// When promises have ended that a replica has forgotten.
    forgotten_until: Instant,
}

/// A reader that replicas have named.
struct Reader {
    /// How many replicas have.
    replicas: usize,
    /// Where it is, as they say: one address, unless one of them lies.
    peers: Vec<Peer>,
    /// The numbers of its promises.
    numbers: BTreeSet<u64>,
    /// When the last of them has ended.
    until: Instant,
}

impl Readers {
    /// A replica has stored the block. Of blocks whose versions are not joined it says nothing: there are no promises.
    fn note(&mut self, promises: Option<&PromisesReply>, now: Instant) {
        self.stored += 1;
        let Some(promises) = promises else {
            self.knowing += 1;
            return;
        };
        self.promised.extend(promises.promised_ms.map(Duration::from_millis));
        // No promise lasts longer, whatever a liar says.
        let until = |left_ms: u64| now + Duration::from_millis(left_ms).min(PROMISE_TIME);
        match promises.forgotten_ms {
            0 => self.knowing += 1,
            left => self.forgotten_until = self.forgotten_until.max(until(left)),
        }
        let mut here = BTreeSet::new();
        for PromiseHolder { peer, number, left_ms } in &promises.holders.0 {
            let none = || Reader {
                replicas: 0,
                peers: Vec::new(),
                numbers: BTreeSet::new(),
                until: Instant::default(),
            };
            let reader = self.named.entry(peer.id).or_insert_with(none);
            reader.replicas += usize::from(here.insert(peer.id));
            reader.numbers.insert(*number);
            reader.until = reader.until.max(until(*left_ms));
            if !reader.peers.contains(peer) {
                reader.peers.push(*peer);
            }
        }
    }

    /// The readers to be told. A majority of the set has made a reader's promise, so only those count whom so many have
    /// named as must be among the replicas that have answered: one liar cannot have others waited for.
    fn to_tell(&self, size: usize) -> impl Iterator<Item = (&PeerId, &Reader)> {
        let unheard = size.saturating_sub(self.stored);
        let least = (size / 2 + 1).saturating_sub(unheard).max(1);
        self.named.iter().filter(move |(_, reader)| reader.replicas >= least)
    }

    /// Tells the readers of a block that it has changed; resolves when each was told or its promise has ended.
    async fn tell(&self, client: &Arc<Client>, key: Key, size: usize) {
        let own = client.transport.local().id;
        let untold = self.to_tell(size).filter(|(id, reader)| {
            let is_untold = |number: &u64| client.promised.is_untold(**id, *number);
            **id != own && reader.numbers.iter().any(is_untold)
        });
        let told = untold.map(|(id, reader)| async move {
            tell(client, reader, key).await;
            reader.numbers.iter().for_each(|number| client.promised.told(*id, *number));
        });
        join_all(told).await;
        // A majority that knows its promises has a replica in common with each that has made some.
        if 2 * self.knowing <= size {
            let left = self.forgotten_until.since(client.env.now());
            sleep(&*client.env, left).await;
        }
    }

    /// For how long this node may keep what it has put, as a reader what it has read.
    fn promised(&self, size: usize) -> Option<Duration> {
        let are_all = self.promised.len() == self.stored;
        are_all.then(|| promised_by_majority(self.promised.clone(), size)).flatten()
    }
}

/// Tells one reader, again and again until it answers or its promise has ended.
async fn tell(client: &Arc<Client>, reader: &Reader, key: Key) {
    let changed = Changed { key };
    for peer in reader.peers.iter().cycle() {
        let left = reader.until.since(client.env.now());
        let node = Node::of(*peer);
        let call = client.call(&node, &changed, Vec::new());
        match timeout(&*client.env, left, call).await {
            Ok(Ok(_)) => return,
            // The reader can show what it has until then.
            Ok(Err(_)) if client.env.now() < reader.until => {
                let pause = reader.until.since(client.env.now()).min(TELL_AGAIN);
                sleep(&*client.env, pause).await;
            }
            _ => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holder(n: u8) -> PromiseHolder {
        let addr = "127.0.0.1:1".parse().expect("an address");
        PromiseHolder { peer: Peer { id: PeerId([n; 32]), addr }, number: 7, left_ms: 9_000 }
    }

    /// Three replicas, of which these have stored the block and named these readers.
    fn told(answers: &[&[u8]]) -> Vec<u8> {
        let mut readers = Readers::default();
        for named in answers {
            let holders: Vec<PromiseHolder> = named.iter().map(|n| holder(*n)).collect();
            let promises =
                PromisesReply { promised_ms: None, holders: holders.into(), forgotten_ms: 0 };
            readers.note(Some(&promises), Instant::default());
        }
        readers.to_tell(3).map(|(id, _)| id.0[0]).collect()
    }

    #[test]
    fn one_replica_cannot_have_a_writer_wait_for_readers_that_it_makes_up() {
        assert_eq!(told(&[&[1], &[1], &[1, 8, 9]]), [1]);
        assert_eq!(told(&[&[1], &[8, 8], &[1]]), [1], "named twice by one");
        // The third replica may have made the promise too, and does not answer.
        assert_eq!(told(&[&[1], &[2]]), [1, 2]);
    }
}
