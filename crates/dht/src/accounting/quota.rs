//! Quotas: how much of this node's storage a publisher may use (CFS §5.4).
//!
//! Every block is charged to a publisher's key and to the address it publishes from, and
//! each may use a share of this node's storage. The paper's share is fixed at 0.1 %; here,
//! as it proposes ("require the quota imposed by each server to decrease in proportion to
//! the total number of servers"), it is so many nodes' worth of the estimated network.
//! `docs/design/dht.md` says what follows from that.
//!
//! **Invariant:** nothing is taken for a publisher or an address beyond its share, whatever way it
//! comes: room is reserved before a batch goes to the store, so batches that arrive together are
//! counted together, and until the store has it, whether or not its caller waits. Puts end at three
//! quarters of the share; the rest is for repair, which brings more when a neighbour is gone.
//!
//! The sums are the store's ([`BlockStore::usage_of`]); this module keeps settings and
//! reservations, and knows neither receipts nor peers' calls.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use atoll_key::{BlockKind, QuotaClass};
use atoll_store::{BlockStore, Holding, Owner};

pub use crate::accounting::owner::Who;
use crate::accounting::owner::{address_of, is_carrier_key, publisher_of};
pub use crate::config::{QuotaConfig, Share};
pub use crate::rpc::{OverQuota, QuotaOf};

/// What a block costs beside its bytes: its record's header and its entry in the index.
/// Measured: 144 bytes of header, and 78 + 64 in pages that are about half full.
const OVERHEAD_BYTES: u64 = 448;
/// One part in this many of a publisher's share is reserved for root blocks: a publisher that has
/// used up the rest can still replace the root of its volume.
const ROOT_RESERVE: u64 = 64;
/// Of a share, puts may use so many parts in so many. A guess: when one of the nodes around
/// is gone, a third more comes to each of those that stay, with three copies.
const FOR_PUTS: (u64, u64) = (3, 4);
/// A root asks its replicas whether they have room for a publisher that uses more than one
/// part in so many of what it may put. A guess: nodes' parts of the ring differ as much.
const NEAR: u64 = 4;

/// By what limits a block is charged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ChargeClass {
    /// None: it is here.
    Free,
    /// A copy of a publisher's block that another node vouches for.
    Repair,
    /// A block of a publisher's.
    Content,
    /// A root block of a publisher's: it may use the reserve.
    Root,
    /// A copy from a neighbour that no other node vouches for.
    Copy,
}

impl ChargeClass {
    /// That of a block which its publisher puts or renews.
    pub(crate) fn of_published(kind: BlockKind) -> ChargeClass {
        match kind.quota_class() {
            QuotaClass::Root => ChargeClass::Root,
            QuotaClass::Data => ChargeClass::Content,
        }
    }
}

/// A block's bytes, charged.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Want {
    pub owner: Owner,
    pub bytes: u64,
    pub class: ChargeClass,
}

/// What keeping a block of `len_bytes` costs.
pub(crate) fn cost_bytes(len_bytes: u32) -> u64 {
    u64::from(len_bytes) + OVERHEAD_BYTES
}

fn held_bytes(held: Holding) -> u64 {
    held.block_bytes.saturating_add(held.blocks.saturating_mul(OVERHEAD_BYTES))
}

/// Settings and reservations.
#[derive(Debug)]
pub(crate) struct Quota {
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    config: QuotaConfig,
    /// Bytes on their way to the store, by publisher and by address.
    reserved: BTreeMap<(QuotaOf, [u8; 16]), u64>,
    refused: u64,
}

/// Room that is being filled; given back when dropped, by when the store counts it.
#[derive(Debug)]
pub(crate) struct Reservation {
    state: Arc<Mutex<State>>,
    taken: Vec<Want>,
}

impl Reservation {
    /// How much is being filled.
    pub(crate) fn bytes(&self) -> u64 {
        self.taken.iter().map(|want| want.bytes).sum()
    }

    /// Is given back together with this one.
    pub(crate) fn add(&mut self, mut other: Reservation) {
        self.taken.append(&mut other.taken);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut state = lock(&self.state);
        for want in &self.taken {
            state.reserve(want, false);
        }
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().expect("no holder of this lock panics")
}

fn accounts(owner: &Owner) -> [(QuotaOf, [u8; 16]); 2] {
    [(QuotaOf::Key, owner.publisher), (QuotaOf::Address, owner.ip)]
}

impl State {
    fn reserve(&mut self, want: &Want, more: bool) {
        for account in accounts(&want.owner) {
            let reserved = self.reserved.entry(account).or_default();
            *reserved = if more { *reserved + want.bytes } else { *reserved - want.bytes };
            if *reserved == 0 {
                self.reserved.remove(&account);
            }
        }
    }

    fn share(&self, of: QuotaOf, class: ChargeClass, peers: f64) -> Share {
        let config = &self.config;
        let fixed = match of {
            QuotaOf::Key => config.key_share,
            QuotaOf::Address => config.address_share,
        };
        let share = fixed.unwrap_or_else(|| {
            let part = f64::from(config.publisher_nodes) / peers.max(1.0);
            // No number of nodes makes the cast wrap: it saturates.
            let scaled = (part * f64::from(Share::WHOLE.millionths())) as u32;
            Share::from_millionths(scaled).max(config.floor_share)
        });
        if class == ChargeClass::Copy { share.max(config.copy_share) } else { share }
    }

    /// What may be kept, bytes; `None` without a limit.
    fn allowed_bytes(
        &self,
        of: QuotaOf,
        class: ChargeClass,
        peers: f64,
        capacity_bytes: u64,
    ) -> Option<u64> {
        let share = self.share(of, class, peers);
        let whole_bytes = share.of(capacity_bytes);
        let put_bytes = whole_bytes / FOR_PUTS.1 * FOR_PUTS.0;
        match class {
            ChargeClass::Free => None,
            _ if share == Share::WHOLE => None,
            ChargeClass::Repair | ChargeClass::Copy => Some(whole_bytes),
            ChargeClass::Root => Some(put_bytes),
            ChargeClass::Content => Some(put_bytes - put_bytes / ROOT_RESERVE),
        }
    }

    /// Blocks kept or on their way, by the owner's key and by its address.
    fn used_bytes(&self, store: &dyn BlockStore, owner: &Owner) -> [(QuotaOf, u64); 2] {
        let held = store.usage_of(owner);
        let used = |account: (QuotaOf, [u8; 16]), held: Holding| {
            let reserved = self.reserved.get(&account).copied().unwrap_or(0);
            (account.0, held_bytes(held).saturating_add(reserved))
        };
        let [key, address] = accounts(owner);
        [used(key, held.publisher), used(address, held.ip)]
    }

    fn judge(
        &self,
        store: &dyn BlockStore,
        capacity_bytes: u64,
        peers: f64,
        want: &Want,
    ) -> Result<(), OverQuota> {
        // Only what was here before owners were kept, or comes from where it was.
        if want.owner == Owner::NOBODY || want.bytes == 0 {
            return Ok(());
        }
        for (of, used_bytes) in self.used_bytes(store, &want.owner) {
            match self.allowed_bytes(of, want.class, peers, capacity_bytes) {
                // A peer that asks for room names any number.
                Some(allowed_bytes) if used_bytes.saturating_add(want.bytes) > allowed_bytes => {
                    return Err(OverQuota { used_bytes, allowed_bytes, of });
                }
                _ => {}
            }
        }
        Ok(())
    }
}

impl Quota {
    pub(crate) fn new(config: QuotaConfig) -> Quota {
        let state = State { config, reserved: BTreeMap::new(), refused: 0 };
        Quota { state: Arc::new(Mutex::new(state)) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub(crate) fn set_config(&self, config: QuotaConfig) {
        self.lock().config = config;
    }

    /// Reserves room for each block in turn, on a network of about `peers` nodes; blocks
    /// that find none are left out of the reservation.
    pub(crate) fn reserve(
        &self,
        store: &dyn BlockStore,
        peers: f64,
        wants: &[Want],
    ) -> (Vec<Result<(), OverQuota>>, Reservation) {
        let capacity_bytes = store.usage().capacity_bytes;
        let mut taken = Vec::with_capacity(wants.len());
        let mut verdicts = Vec::with_capacity(wants.len());
        let mut state = self.lock();
        for want in wants {
            let verdict = state.judge(store, capacity_bytes, peers, want);
            if verdict.is_err() {
                state.refused += 1;
            } else if want.bytes > 0 {
                state.reserve(want, true);
                taken.push(*want);
            }
            verdicts.push(verdict);
        }
        drop(state);
        (verdicts, Reservation { state: self.state.clone(), taken })
    }

    /// Whether there is room for so much, without reserving it.
    pub(crate) fn check(
        &self,
        store: &dyn BlockStore,
        peers: f64,
        want: &Want,
    ) -> Result<(), OverQuota> {
        self.lock().judge(store, store.usage().capacity_bytes, peers, want)
    }

    /// How much more content `owner` may put here, on a network of about `peers` nodes; `None`
    /// without a limit.
    pub(crate) fn left_bytes(
        &self,
        store: &dyn BlockStore,
        peers: f64,
        owner: &Owner,
    ) -> Option<u64> {
        let state = self.lock();
        let capacity_bytes = store.usage().capacity_bytes;
        let left = |(of, used_bytes): (QuotaOf, u64)| {
            let allowed = state.allowed_bytes(of, ChargeClass::Content, peers, capacity_bytes);
            allowed.map(|allowed| allowed.saturating_sub(used_bytes))
        };
        state.used_bytes(store, owner).into_iter().filter_map(left).min()
    }

    /// Whether `owner` has used so much that others may have no room for it any more.
    pub(crate) fn is_near_limit(&self, store: &dyn BlockStore, peers: f64, owner: Owner) -> bool {
        let state = self.lock();
        let capacity_bytes = store.usage().capacity_bytes;
        let is_near = |(of, used_bytes): (QuotaOf, u64)| {
            let allowed = state.allowed_bytes(of, ChargeClass::Content, peers, capacity_bytes);
            allowed.is_some_and(|allowed| used_bytes > allowed / NEAR)
        };
        state.used_bytes(store, &owner).into_iter().any(is_near)
    }

    /// What is used and allowed, of the largest `limit` publishers and addresses.
    pub(crate) fn report(&self, store: &dyn BlockStore, peers: f64, limit: usize) -> QuotaReport {
        let capacity_bytes = store.usage().capacity_bytes;
        let owners = store.owners(limit);
        let state = self.lock();
        let key_share = state.share(QuotaOf::Key, ChargeClass::Content, peers);
        let address_share = state.share(QuotaOf::Address, ChargeClass::Content, peers);
        let allowed = |of| {
            let limit = state.allowed_bytes(of, ChargeClass::Content, peers, capacity_bytes);
            limit.unwrap_or(capacity_bytes)
        };
        let account = |of: QuotaOf, who: Who, is_carrier: bool, held: Holding| {
            let class = if is_carrier { ChargeClass::Copy } else { ChargeClass::Content };
            let allowed_bytes = state.allowed_bytes(of, class, peers, capacity_bytes);
            let allowed_bytes = allowed_bytes.unwrap_or(capacity_bytes);
            let used_bytes = held_bytes(held);
            Account { who, is_carrier, used_bytes, blocks: held.blocks, allowed_bytes }
        };
        let key = |(key, held): ([u8; 16], Holding)| {
            account(QuotaOf::Key, publisher_of(key), is_carrier_key(&key), held)
        };
        let address = |(ip, held): ([u8; 16], Holding)| {
            let (who, is_carrier) = address_of(ip);
            account(QuotaOf::Address, who, is_carrier, held)
        };
        QuotaReport {
            settings: state.config,
            estimated_nodes: peers,
            capacity_bytes,
            key_share,
            key_allowed_bytes: allowed(QuotaOf::Key),
            address_share,
            address_allowed_bytes: allowed(QuotaOf::Address),
            keys: owners.publishers.into_iter().map(key).collect(),
            addresses: owners.ips.into_iter().map(address).collect(),
            refused_blocks: state.refused,
        }
    }
}

/// The state of a node's quotas, for people.
#[derive(Clone, PartialEq, Debug)]
pub struct QuotaReport {
    /// What was set.
    pub settings: QuotaConfig,
    /// The estimated number of nodes, which the shares follow.
    pub estimated_nodes: f64,
    /// What the node offers, bytes.
    pub capacity_bytes: u64,
    /// The share of a key at present.
    pub key_share: Share,
    /// What may be put by a key, bytes: three quarters of that, or all that there is.
    pub key_allowed_bytes: u64,
    /// The share of an address at present.
    pub address_share: Share,
    /// What may be put from an address, bytes.
    pub address_allowed_bytes: u64,
    /// The publishers for whom most is kept, the largest first.
    pub keys: Vec<Account>,
    /// The addresses for which most is kept, the largest first.
    pub addresses: Vec<Account>,
    /// Blocks refused over quota since the node started.
    pub refused_blocks: u64,
}

/// What is kept for one publisher or one address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Account {
    /// Whom.
    pub who: Who,
    /// It did not publish them but brought copies that no other node vouched for.
    pub is_carrier: bool,
    /// What is kept, bytes, with what keeping costs.
    pub used_bytes: u64,
    /// How many blocks.
    pub blocks: u64,
    /// What may be put, bytes; repair may bring more, up to the share.
    pub allowed_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accounting::owner::owner_of;
    use atoll_key::{Key, PeerId};
    use atoll_store::{BlockInfo, MemoryStore, StoredBlock};
    use bytes::Bytes;
    use futures_util::FutureExt;

    const CAPACITY: u64 = 10 << 20;

    fn owner(key: u8, ip: &str) -> Owner {
        let ip = ip.parse().expect("an address");
        owner_of(&PeerId([key; 32]), ip)
    }

    fn want(owner: Owner, len_bytes: u32) -> Want {
        Want { owner, bytes: cost_bytes(len_bytes), class: ChargeClass::Content }
    }

    fn put(store: &MemoryStore, n: u32, len_bytes: u32, owner: Owner) {
        let mut key = [0; 32];
        key[..4].copy_from_slice(&n.to_be_bytes());
        let info = BlockInfo {
            key: Key::hashed(key),
            kind: BlockKind::Content,
            version: 0,
            expires_unix_secs: 9,
            len_bytes,
            owner,
        };
        let bytes = Bytes::from(vec![0; len_bytes as usize]);
        store.put(vec![StoredBlock { info, bytes }]).now_or_never().expect("ready").expect("room");
    }

    /// Puts blocks of owners in turn until none of them is taken; bytes held for all.
    fn flood(quota: &Quota, peers: f64, owners: &[Owner]) -> u64 {
        let store = MemoryStore::new(CAPACITY);
        let mut n = 0;
        loop {
            let mut taken = false;
            for owner in owners {
                let (verdicts, _room) = quota.reserve(&store, peers, &[want(*owner, 9_000)]);
                if verdicts[0].is_ok() {
                    put(&store, n, 9_000, *owner);
                    n += 1;
                    taken = true;
                }
            }
            if !taken {
                return u64::from(n) * cost_bytes(9_000);
            }
        }
    }

    fn share_of(part: f64) -> std::ops::Range<u64> {
        let share = CAPACITY as f64 * part * 0.75;
        // All but the reserve for root blocks and less than one more block.
        (share * 63.0 / 64.0) as u64 - cost_bytes(9_000)..share as u64
    }

    /// CFS §5.4: "if each CFS server limits any one IP address to using 0.1% of its storage".
    #[test]
    fn many_keys_of_one_address_or_one_key_at_many_fill_no_more_than_one_share() {
        let quota = Quota::new(QuotaConfig::default());
        let keys: Vec<Owner> = (0..40).map(|key| owner(key, "10.1.1.1")).collect();
        let addresses: Vec<Owner> = (0..40).map(|n| owner(7, &format!("10.1.1.{n}"))).collect();
        for owners in [keys, addresses] {
            assert!(share_of(0.16).contains(&flood(&quota, 100.0, &owners)));
        }
    }

    #[test]
    fn others_find_room_beside_a_flood() {
        let quota = Quota::new(QuotaConfig::default());
        let [one, two] = [owner(1, "10.1.1.1"), owner(2, "10.1.1.2")];
        assert_eq!(flood(&quota, 100.0, &[one, two]), 2 * flood(&quota, 100.0, &[two]));
    }

    /// CFS §5.4: "an adaptive limit of this form is possible".
    #[test]
    fn a_share_shrinks_as_the_network_grows_down_to_a_floor() {
        let quota = Quota::new(QuotaConfig::default());
        let one = [owner(1, "10.1.1.1")];
        for (peers, part) in [(20.0, 0.8), (32.0, 0.5), (160.0, 0.1), (320.0, 0.05)] {
            let filled = flood(&quota, peers, &one);
            assert!(share_of(part).contains(&filled), "{peers} nodes: {filled}");
        }
        let share =
            |peers| quota.lock().share(QuotaOf::Key, ChargeClass::Content, peers).millionths();
        assert_eq!([1e3, 1e4, 1e5, 1e9].map(share), [16_000, 1_600, 1_000, 1_000]);
        assert_eq!([0.0, -1.0, f64::NAN].map(share), [1_000_000; 3], "no estimate yet");
        assert_eq!([1.0, 16.0].map(share), [1_000_000; 2]);
        let endless = want(one[0], u32::MAX);
        let store = MemoryStore::new(CAPACITY);
        let (verdicts, _room) = quota.reserve(&store, 16.0, &[endless]);
        assert!(verdicts[0].is_ok(), "a whole share is no limit; the store knows what is full");
    }

    #[test]
    fn what_is_set_replaces_what_follows_from_the_size() {
        let quota = Quota::new(QuotaConfig::default());
        let key_share = Some(Share::from_millionths(50_000));
        quota.set_config(QuotaConfig { key_share, ..QuotaConfig::default() });
        assert!(share_of(0.05).contains(&flood(&quota, 1.0, &[owner(1, "10.1.1.1")])));
        let address_share = Some(Share::from_millionths(80_000));
        quota.set_config(QuotaConfig { address_share, ..QuotaConfig::default() });
        let keys = [owner(1, "10.1.1.1"), owner(2, "10.1.1.1")];
        assert!(share_of(0.08).contains(&flood(&quota, 1.0, &keys)));
    }

    #[test]
    fn the_refusal_says_what_is_used_and_allowed_and_which_is_over() {
        let quota = Quota::new(QuotaConfig::default());
        let store = MemoryStore::new(CAPACITY);
        put(&store, 1, 700_000, owner(1, "10.1.1.1"));
        let wants = [
            want(owner(1, "10.1.1.9"), 800_000),
            want(owner(2, "10.1.1.1"), 800_000),
            want(owner(2, "10.1.1.2"), 800_000),
        ];
        let (verdicts, _room) = quota.reserve(&store, 100.0, &wants);
        let share = CAPACITY * 16 / 100 / 4 * 3;
        let over = |of| {
            Err(OverQuota {
                used_bytes: cost_bytes(700_000),
                allowed_bytes: share - share / 64,
                of,
            })
        };
        assert_eq!(verdicts, [over(QuotaOf::Key), over(QuotaOf::Address), Ok(())]);
    }

    #[test]
    fn batches_under_way_at_once_are_counted_together() {
        let quota = Quota::new(QuotaConfig::default());
        let store = MemoryStore::new(CAPACITY);
        let half = [want(owner(1, "10.1.1.1"), 700_000)];
        let (one, room) = quota.reserve(&store, 100.0, &half);
        let (two, _) = quota.reserve(&store, 100.0, &half);
        assert!(one[0].is_ok() && two[0].is_err(), "{two:?}");
        drop(room);
        assert!(quota.reserve(&store, 100.0, &half).0[0].is_ok(), "given back");
        let both = [half[0], half[0]];
        let (verdicts, room) = quota.reserve(&store, 100.0, &both);
        assert!(verdicts[0].is_ok() && verdicts[1].is_err(), "within a batch");
        drop(room);
        assert!(quota.lock().reserved.is_empty());
    }

    #[test]
    fn a_publisher_without_room_can_still_replace_its_root() {
        let quota = Quota::new(QuotaConfig::default());
        let store = MemoryStore::new(CAPACITY);
        let one = owner(1, "10.1.1.1");
        let mut n = 0;
        while quota.reserve(&store, 100.0, &[want(one, 100)]).0[0].is_ok() {
            put(&store, n, 100, one);
            n += 1;
        }
        let root = Want { class: ChargeClass::Root, ..want(one, 200) };
        assert!(quota.reserve(&store, 100.0, &[root]).0[0].is_ok());
        let huge = Want { class: ChargeClass::Root, ..want(one, 100_000) };
        assert!(quota.reserve(&store, 100.0, &[huge]).0[0].is_err(), "the reserve has an end");
    }

    /// When a neighbour is gone, more blocks of each publisher come to the nodes that stay.
    #[test]
    fn repair_may_bring_more_than_may_be_put_and_no_more_than_the_share() {
        let quota = Quota::new(QuotaConfig::default());
        let one = owner(1, "10.1.1.1");
        let store = MemoryStore::new(CAPACITY);
        let share = CAPACITY * 16 / 100;
        put(&store, 1, 1_000_000, one);
        let most = u32::try_from(share - cost_bytes(1_000_000) - cost_bytes(0)).expect("small");
        let verdict = |len, class| {
            let want = Want { class, ..want(one, len) };
            quota.reserve(&store, 100.0, &[want]).0[0].is_ok()
        };
        assert!(!verdict(most, ChargeClass::Content) && !verdict(most, ChargeClass::Root));
        assert!(verdict(most, ChargeClass::Repair) && !verdict(most + 1, ChargeClass::Repair));
        assert!(verdict(most + 1, ChargeClass::Free));
    }
}
