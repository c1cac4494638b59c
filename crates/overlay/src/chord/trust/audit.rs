//! Audits: cross-checking successor lists with other nodes.
//!
//! A successor list repeats the list of the first successor, which repeats that of its own. A
//! member that leaves nodes out therefore hides them from all nodes before it, and accomplices
//! could make themselves the holders of a block. (CFS §8 leaves malicious members to future work.)
//! They can only withhold nodes, because every named node is checked
//! ([`crate::chord::trust::verify`]). An audit asks other nodes as well and unites all answers.
//!
//! It starts anywhere on the ring, looks for nodes a little before this one, and asks some of them
//! which node is at this node's own position. To a node that names another one there this node
//! introduces itself (`INTRODUCE`). It asks one node of its own list for its surroundings, and
//! another node which nodes lie between two entries of the list. Every node named after this one
//! that the list lacks is asked, and so are the nodes that it names. A node that answers is
//! corroborated ([`crate::chord::ring::state::ChordState::corroborate`]), and the nodes before it
//! are told. A node hidden by its predecessor is thus found from both sides: it makes itself known
//! to the nodes before it, and they look for it.
//!
//! [`super::audit_schedule`] says when. A ring of honest nodes at rest pays some 10 bytes a second.
//!
//! An audit does not know which node lies, and punishes none: a node that has just joined looks the
//! same for a moment.

use std::collections::{BTreeMap, BTreeSet};

use atoll_env::random_below;
use atoll_key::{Key, PeerId};
use futures_util::StreamExt;
use futures_util::stream;

use crate::chord::Chord;
use crate::chord::membership::ring_merge::INTRODUCE_HOPS;
use crate::chord::messages::{self, AskRoute, WireKey, WireRoute};
use crate::chord::ring::state::{ChordState, Told};
use crate::chord::trust::admission::Verdict;
use crate::{Node, Overlay, Route};

/// The most virtual servers audited each time, so that a node of many pays little more than
/// one of one.
const MAX_AT_A_TIME: usize = 2;
/// The most calls of an audit under way.
const PARALLEL_CALLS: usize = 4;
/// How many nodes an audit asks for this node's own position. Where one in five lies, the audits
/// of some minutes meet an honest one.
const WITNESSES: usize = 2;
/// After an audit that found much, so many times as many witnesses are asked, from as many times
/// as many starts.
const ALERT_FACTOR: usize = 4;
/// Witnesses are looked for at most so far before this node, measured by the distance between
/// its neighbours: mostly within half a list.
const MAX_GAPS: u64 = 4;
/// Witnesses are chosen among nodes not much farther away, or else among so many of the nearest:
/// liars could name accomplices all over the ring.
const MAX_AHEAD: usize = 8;
/// Of those nearest to the key, one of so many is asked next, at random: the nearest may lie.
const MAX_NEXT: usize = 3;
/// The most questions from one beginning.
const MAX_HOPS: usize = 2;
/// The most nodes taken from one answer.
const MAX_NAMED: usize = 8;
/// The most nodes asked whether they belong into the list.
const MAX_CANDIDATES: usize = 24;
/// The most nodes told of one that was missing.
const MAX_TOLD: usize = 16;

/// The answers of the witnesses of an audit.
#[derive(Default)]
struct Testimony {
    /// Nodes that named another node in this node's place.
    unaware: Vec<Node>,
    /// Nodes not far before this one that named none: their lists are too short.
    silent: Vec<Node>,
    /// The nodes that they named, by naming peer.
    named: Vec<(PeerId, Vec<Node>)>,
}

impl Chord {
    /// Audits those virtual servers whose turn it is, a few at a time.
    pub(in crate::chord) async fn audit_due(&self) {
        let due: Vec<u16> = {
            let mut inner = self.lock();
            if inner.servers.is_alone() {
                return;
            }
            let all = 0..inner.servers.count();
            let mut due: Vec<u16> = all
                .filter(|index| {
                    let server = inner.servers.server_mut(*index);
                    server.is_some_and(|s| s.state.joined() && s.audits.take_due())
                })
                .collect();
            // The others stay due.
            while due.len() > MAX_AT_A_TIME {
                due.swap_remove(random_below(&*self.env, due.len() as u64) as usize);
            }
            due
        };
        let audits = due.into_iter().map(|index| self.audit(index));
        stream::iter(audits).buffer_unordered(MAX_AT_A_TIME).collect::<()>().await;
    }

    async fn audit(&self, index: u16) {
        let me = self.lock().servers.position(index);
        let mut heard = self.hear_witnesses(index, &me).await;
        let mut news = 0;
        for guide in &heard.unaware {
            if let Some(server) = self.lock().servers.server_mut(index) {
                news += usize::from(server.audits.record_introduction(guide.peer.id));
            }
            // The next audit shows whether it arrived.
            let _ = self.call_introduce(guide, &me, INTRODUCE_HOPS).await;
        }
        for guide in &heard.silent {
            let _ = self.call_introduce(guide, &me, 0).await;
        }
        heard.named.extend(self.ask_one_listed(index).await);
        let found = self.ask_named(index, heard.named).await;
        if let Some(server) = self.lock().servers.server_mut(index) {
            // Honest successors would have named enough nodes.
            let is_short = usize::from(server.state.is_short());
            server.audits.ended(found + news + is_short);
        }
    }

    /// Asks some nodes before this one which node is at this node's position.
    async fn hear_witnesses(&self, index: u16, me: &Node) -> Testimony {
        let mut testimony = Testimony::default();
        let is_alert = {
            let inner = self.lock();
            inner.servers.server(index).is_some_and(|server| server.audits.is_alert)
        };
        let factor = if is_alert { ALERT_FACTOR } else { 1 };
        // By how far before this node they are.
        let mut ahead: BTreeMap<Key, Node> = BTreeMap::new();
        let (predecessor, listed) = {
            let inner = self.lock();
            let state = inner.servers.state(index);
            (state.and_then(ChordState::predecessor), state.map(|s| s.successors().to_vec()))
        };
        add_ahead(me.id.key(), predecessor.filter(|node| !self.owns(node)), &mut ahead);
        let mut starts = self.audit_starts(factor + 1).into_iter();
        for start in starts.by_ref().take(factor) {
            let Some(key) = self.somewhere_before(index) else { break };
            let named = self.look_around(&start, &key).await;
            let named = named.into_iter().filter(|node| !self.owns(node));
            add_ahead(me.id.key(), named, &mut ahead);
        }
        // The other way round, every second time: another node is asked which nodes lie between
        // two entries of the list.
        let listed: Vec<Node> = listed.into_iter().flatten().skip(1).take(MAX_NAMED).collect();
        let nth = random_below(&*self.env, listed.len().max(1) as u64) as usize;
        let is_turn = is_alert || random_below(&*self.env, 2) == 0;
        if let (true, Some(start), Some(node)) = (is_turn, starts.next(), listed.get(nth)) {
            let named = self.look_around(&start, &node.id.key().previous()).await;
            testimony.named.push((start.peer.id, named));
        }
        let mut asked = BTreeSet::new();
        for _ in 0..WITNESSES * factor {
            ahead.retain(|_, node| !asked.contains(&node.peer));
            let near = ahead.range(..=self.window(index)).count();
            let nearest = near.max(ahead.len().min(MAX_AHEAD));
            let nth = random_below(&*self.env, nearest.max(1) as u64) as usize;
            let Some(witness) = ahead.values().nth(nth).copied() else { break };
            asked.insert(witness.peer);
            match self.ask_the_way(me.id.key(), &witness).await {
                Some(Route::Root(list)) => {
                    if list[0] != *me {
                        testimony.unaware.push(witness);
                    }
                    testimony.named.push((witness.peer.id, list));
                }
                Some(route) => {
                    testimony.silent.push(witness);
                    let others = route.nodes().into_iter().filter(|node| !self.owns(node));
                    add_ahead(me.id.key(), others, &mut ahead);
                }
                None => {}
            }
        }
        testimony
    }

    /// Asks nodes from `start` towards `key`; returns all nodes named on the way. It does not end
    /// at a root that is named: other nodes may name a node that one liar hides.
    async fn look_around(&self, start: &Node, key: &Key) -> Vec<Node> {
        let mut asked = BTreeSet::new();
        let mut near = BTreeMap::new();
        let mut named = Vec::new();
        let mut next = Some(*start);
        for _ in 0..MAX_HOPS {
            let Some(guide) = next else { break };
            asked.insert(guide.peer);
            if let Some(route) = self.ask_the_way(key, &guide).await {
                let others: Vec<Node> =
                    route.nodes().into_iter().filter(|node| !self.owns(node)).collect();
                if matches!(route, Route::Closer(_)) {
                    add_ahead(key, others.iter().copied(), &mut near);
                }
                named.extend(others);
            }
            near.retain(|_, node: &mut Node| !asked.contains(&node.peer));
            let nth = random_below(&*self.env, near.len().clamp(1, MAX_NEXT) as u64) as usize;
            next = near.values().nth(nth).copied();
        }
        named
    }

    /// A key some nodes before virtual server `index`. Its two neighbours show how far nodes are
    /// apart: a small sample, but not a list that liars made up.
    fn somewhere_before(&self, index: u16) -> Option<Key> {
        let inner = self.lock();
        let state = inner.servers.state(index)?;
        let apart = between_neighbours(state)?;
        let mut key = *state.me().id.key();
        for _ in 0..=random_below(&*self.env, MAX_GAPS) {
            key = key.distance_from(&apart);
        }
        Some(key)
    }

    /// How far before virtual server `index` its witnesses are.
    fn window(&self, index: u16) -> Key {
        let inner = self.lock();
        let apart = inner.servers.state(index).and_then(between_neighbours).unwrap_or(Key::MIN);
        let wider = |at: Key| if at >= Key::power_of_two(510) { at } else { at.wrapping_add(&at) };
        wider(wider(wider(apart)))
    }

    /// The surroundings of a random node of the list other than the first, which every stabilize
    /// round asks.
    async fn ask_one_listed(&self, index: u16) -> Option<(PeerId, Vec<Node>)> {
        let listed: Vec<Node> = {
            let inner = self.lock();
            let list = inner.servers.state(index)?.successors();
            list.iter().skip(1).take(MAX_NAMED).filter(|node| !self.owns(node)).copied().collect()
        };
        let nth = random_below(&*self.env, listed.len().max(1) as u64) as usize;
        let node = listed.get(nth)?;
        let told = self.ask_surroundings(node, None).await?;
        Some((node.peer.id, told.predecessor.into_iter().chain(told.successors).collect()))
    }

    async fn ask_the_way(&self, key: &Key, guide: &Node) -> Option<Route> {
        let ask = AskRoute { key: WireKey(*key), as_root: false };
        let ask = messages::encode(&ask);
        match self.call::<WireRoute>(guide, messages::ROUTE, ask).await {
            Ok(route) => {
                self.spent_on_the_way(1);
                Some(route.0)
            }
            Err(error) => {
                if error.is_failure_of_peer() {
                    self.report_failure(&guide.peer);
                }
                None
            }
        }
    }

    /// Nodes anywhere on the ring, in random order, remembered ones among them: where accomplices
    /// fill a list that goes around the ring, the tables hold no other node. Nodes of our own
    /// successor lists only if there are no others.
    fn audit_starts(&self, count: usize) -> Vec<Node> {
        let now = self.env.now();
        let mut known = self.known_nodes();
        known.extend(self.known_peers().into_iter().map(|peer| self.place(peer, 0)));
        known.retain(|node| !self.peer_book.is_avoided(&node.peer.id, now));
        known.sort_unstable();
        known.dedup_by_key(|node| node.peer);
        let (mut starts, mut followers): (Vec<Node>, Vec<Node>) = {
            let inner = self.lock();
            let follows =
                |node: &Node| inner.servers.states().any(|s| s.successors().contains(node));
            known.into_iter().partition(|node| !follows(node))
        };
        let mut chosen = Vec::new();
        while chosen.len() < count {
            let from = if starts.is_empty() { &mut followers } else { &mut starts };
            if from.is_empty() {
                break;
            }
            chosen.push(from.swap_remove(random_below(&*self.env, from.len() as u64) as usize));
        }
        chosen
    }

    /// Asks the named nodes that the list of virtual server `index` lacks, and the nodes that they
    /// name in turn; how many of them belong there.
    async fn ask_named(&self, index: u16, named: Vec<(PeerId, Vec<Node>)>) -> usize {
        let mut candidates: BTreeMap<Key, (Node, PeerId)> = BTreeMap::new();
        for (source, list) in named {
            self.add_missing(index, &list, source, &mut candidates);
        }
        let (mut seen, mut found) = (BTreeSet::new(), 0);
        while seen.len() < MAX_CANDIDATES
            && let Some((_, (node, source))) = candidates.pop_first()
        {
            if !seen.insert(node) || !self.is_missing(index, &node) {
                continue;
            }
            let Some(told) = self.ask_surroundings(&node, Some(source)).await else { continue };
            let is_nearer = {
                let inner = self.lock();
                inner.servers.state(index).is_some_and(|state| state.would_adopt(&node.id))
            };
            let is_new = if is_nearer {
                self.adopt(index, &node, Some(source)).await
            } else {
                self.corroborate(&node, &told, INTRODUCE_HOPS).await
            };
            found += usize::from(is_new);
            let around: Vec<Node> = told.predecessor.into_iter().chain(told.successors).collect();
            self.add_missing(index, &around, node.peer.id, &mut candidates);
        }
        found
    }

    fn is_missing(&self, index: u16, node: &Node) -> bool {
        let inner = self.lock();
        let suspected = inner.servers.judge(node, self.env.now()) == Verdict::Suspected;
        let state = inner.servers.state(index);
        !suspected && state.is_some_and(|s| s.would_adopt(&node.id) || s.lacks(&node.id))
    }

    /// Of those that `source` names, the nearest after this node that it does not know.
    fn add_missing(
        &self,
        index: u16,
        named: &[Node],
        source: PeerId,
        candidates: &mut BTreeMap<Key, (Node, PeerId)>,
    ) {
        let me = self.lock().servers.position(index);
        let mut missing: Vec<(Key, Node)> = named
            .iter()
            .filter(|node| self.is_missing(index, node))
            .map(|node| (node.id.key().distance_from(me.id.key()), *node))
            .collect();
        missing.sort_unstable();
        missing.truncate(MAX_NAMED);
        for (at, node) in missing {
            candidates.entry(at).or_insert((node, source));
        }
    }

    /// The surroundings of a node that is at its claimed address and on a ring, in its own words.
    async fn ask_surroundings(&self, node: &Node, source: Option<PeerId>) -> Option<Told> {
        if !self.ensure_checked_for(node, source).await {
            return None;
        }
        match self.call_neighbours(node).await {
            Ok(told) => Some(told),
            Err(error) => {
                self.forget_if_useless(node, &error);
                None
            }
        }
    }

    /// Asks an introduced node that would be no first successor of this node, if a list lacks it.
    pub(in crate::chord) async fn corroborate_if_missing(
        &self,
        node: &Node,
        source: Option<PeerId>,
        hops: u8,
    ) {
        let count = self.lock().servers.count();
        if (0..count).any(|index| self.is_missing(index, node))
            && let Some(told) = self.ask_surroundings(node, source).await
        {
            self.corroborate(node, &told, hops).await;
        }
    }

    /// Takes a node that has answered, and whose surroundings are `told`, into all lists that lack
    /// it, and, with hops left, tells the nodes before it. Whether any list lacked it.
    async fn corroborate(&self, node: &Node, told: &Told, hops_left: u8) -> bool {
        let before: Option<Vec<Node>> = self.update(|servers, now| {
            let mut lists = Vec::new();
            let mut is_news = false;
            for index in 0..servers.count() {
                let corroborated = servers.with(index, now, |state, judge| {
                    let is_new = judge(node) == Verdict::Welcome && state.corroborate(*node);
                    is_new.then(|| state.successors().to_vec())
                });
                lists.extend(corroborated.flatten());
                is_news |= servers.continue_list(index, node, told, now);
            }
            let before = |list: Vec<Node>| list.into_iter().take_while(|listed| listed != node);
            is_news |= !lists.is_empty();
            is_news.then(|| lists.into_iter().flat_map(before).collect())
        });
        let Some(mut before) = before else { return false };
        if hops_left > 0 {
            before.retain(|listed| !self.owns(listed));
            before.sort_unstable();
            before.dedup_by_key(|listed| listed.peer);
            before.truncate(MAX_TOLD);
            let node = *node;
            let calls = before.into_iter().map(|listed| async move {
                let _ = self.call_introduce(&listed, &node, 0).await;
            });
            stream::iter(calls).buffer_unordered(PARALLEL_CALLS).collect::<()>().await;
        }
        true
    }
}

/// The distance between a virtual server's two neighbours.
fn between_neighbours(state: &ChordState) -> Option<Key> {
    let before = state.predecessor().unwrap_or(state.me());
    Some(state.head()?.id.key().distance_from(before.id.key()))
}

/// Notes nodes by how far before `key` they are.
fn add_ahead(key: &Key, nodes: impl IntoIterator<Item = Node>, ahead: &mut BTreeMap<Key, Node>) {
    ahead.extend(nodes.into_iter().map(|node| (key.distance_from(node.id.key()), node)));
}
