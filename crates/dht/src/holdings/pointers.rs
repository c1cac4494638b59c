//! The records of diverted copies, in a store beside the blocks, one a key.
//!
//! Their entries have the key, kind, version and lease of the block, so that they are listed,
//! found, extended and expire as blocks do. What tells them apart is whom they are charged to:
//! a pointer to the block's publisher, as its copy is; a hold to the member it is for, at an
//! address that no publisher has ([`HOLDS`]). The store's sums then say how many there are of
//! each, and for which member. A record's bytes are the other node, as [`WirePeer`] writes it.

use std::sync::Arc;

use atoll_key::{Key, KeyRange, PeerId};
use atoll_net::Peer;
use atoll_net::header::WirePeer;
use atoll_store::{BlockInfo, BlockStore, Merged, Owner, StoreError, StoredBlock};
use bytes::Bytes;

/// The address that holds are charged to. Of an IPv6 address no more than the first 64 bits are
/// ever charged, so no publisher has it.
const HOLDS: [u8; 16] = [0xff; 16];

/// See the module.
pub(crate) struct Pointers {
    store: Arc<dyn BlockStore>,
}

fn is_hold(info: &BlockInfo) -> bool {
    info.owner.ip == HOLDS
}

/// Whom holds for `member` are charged to: an account apart from what it publishes.
fn hold_owner(member: &PeerId) -> Owner {
    let mut publisher: [u8; 16] = member.0[..16].try_into().expect("16 of 32 bytes");
    publisher.iter_mut().for_each(|byte| *byte = !*byte);
    Owner { publisher, ip: HOLDS }
}

impl Pointers {
    pub(crate) fn new(store: Arc<dyn BlockStore>) -> Pointers {
        Pointers { store }
    }

    fn info(&self, key: &Key) -> Option<BlockInfo> {
        if self.store.usage().blocks == 0 {
            return None;
        }
        self.store.info(key).unwrap_or_else(|error| {
            tracing::error!(%error, "a pointer could not be read");
            None
        })
    }

    /// What is known of a copy that another node keeps for this one.
    pub(crate) fn pointed(&self, key: &Key) -> Option<BlockInfo> {
        self.info(key).filter(|info| !is_hold(info))
    }

    /// Which node keeps a copy of this block for this one.
    pub(crate) async fn holder(&self, key: &Key) -> Option<Peer> {
        self.pointed(key)?;
        let record = match self.store.get(key).await {
            Ok(record) => record?,
            Err(error) => {
                tracing::error!(%error, "a pointer could not be read");
                return None;
            }
        };
        WirePeer::from_bytes(&record.bytes).map(|WirePeer(holder)| holder)
    }

    /// Up to `limit` records of a range, in ring order from its start.
    pub(crate) fn list(&self, range: KeyRange, limit: usize) -> Result<Vec<BlockInfo>, StoreError> {
        if self.store.usage().blocks == 0 { Ok(Vec::new()) } else { self.store.list(range, limit) }
    }

    /// Notes that `holder` keeps copies of blocks for this node; replaces what was noted.
    pub(crate) async fn point(
        &self,
        holder: &Peer,
        copies: Vec<BlockInfo>,
    ) -> Result<(), StoreError> {
        let bytes = Bytes::from(WirePeer(*holder).to_bytes());
        let len_bytes = u32::try_from(bytes.len()).expect("a peer is short");
        // A record of the same version would stay.
        let replaced = copies.iter().filter(|new| {
            let held = self.info(&new.key);
            held.is_some_and(|held| held.version >= new.version)
        });
        let replaced: Vec<Key> = replaced.map(|info| info.key).collect();
        if !replaced.is_empty() {
            self.store.remove(replaced).await?;
        }
        let record =
            |info| StoredBlock { info: BlockInfo { len_bytes, ..info }, bytes: bytes.clone() };
        self.store.put(copies.into_iter().map(record).collect()).await
    }

    /// Notes that this node keeps a copy for `member`, until it has not asked for it for so long.
    pub(crate) async fn hold(
        &self,
        member: &Peer,
        copies: impl Iterator<Item = BlockInfo>,
        until_unix_secs: u64,
    ) -> Result<(), StoreError> {
        let owner = hold_owner(&member.id);
        let hold = |info| BlockInfo { owner, expires_unix_secs: until_unix_secs, ..info };
        self.point(member, copies.map(hold).collect()).await
    }

    /// Extends what is noted of a copy, with the copy.
    pub(crate) fn extend(&self, key: &Key, expires_unix_secs: u64, owner: Owner) {
        if let Err(error) = self.store.renew(&[*key], expires_unix_secs, owner) {
            tracing::error!(%error, "a pointer's lease could not be extended");
        }
    }

    /// Has what is noted of a copy end sooner, with the copy.
    pub(crate) fn shorten(&self, key: &Key, expires_unix_secs: u64) {
        if let Err(error) = self.store.shorten(&[*key], expires_unix_secs) {
            tracing::error!(%error, "a pointer's lease could not be shortened");
        }
    }

    /// Extends a hold for `member`; false if there is none.
    pub(crate) fn extend_hold(&self, key: &Key, member: &PeerId, until_unix_secs: u64) -> bool {
        let is_held = self.is_held_for(key, member);
        if is_held {
            self.extend(key, until_unix_secs, hold_owner(member));
        }
        is_held
    }

    /// Forgets what is noted of blocks.
    pub(crate) async fn forget(&self, keys: Vec<Key>) {
        if keys.is_empty() {
            return;
        }
        if let Err(error) = self.store.remove(keys).await {
            tracing::error!(%error, "pointers could not be removed");
        }
    }

    /// Forgets what ended before then.
    pub(crate) async fn forget_expired(&self, before_unix_secs: u64) -> Result<u64, StoreError> {
        self.store.remove_expired(before_unix_secs).await
    }

    /// Whether this node keeps a copy of the block for another, as of `now_unix_secs`.
    pub(crate) fn is_held(&self, key: &Key, now_unix_secs: u64) -> bool {
        let held = self.info(key).filter(is_hold);
        held.is_some_and(|held| held.expires_unix_secs > now_unix_secs)
    }

    /// Whether this node keeps a copy of the block for `member`.
    pub(crate) fn is_held_for(&self, key: &Key, member: &PeerId) -> bool {
        self.info(key).is_some_and(|info| info.owner == hold_owner(member))
    }

    /// How many copies this node keeps for `member`.
    pub(crate) fn held_for(&self, member: &PeerId) -> u64 {
        self.store.usage_of(&hold_owner(member)).publisher.blocks
    }

    /// How many pointers there are, and how many holds.
    pub(crate) fn counts(&self) -> (u64, u64) {
        let any = Owner { publisher: [0; 16], ip: HOLDS };
        let holds = self.store.usage_of(&any).ip.blocks;
        (self.store.usage().blocks.saturating_sub(holds), holds)
    }

    /// The blocks of `store` and those that there are pointers to, if there are pointers, as one
    /// set.
    pub(crate) fn merged_with<'a>(
        &'a self,
        store: &'a dyn BlockStore,
        now: u64,
    ) -> Option<Merged<'a>> {
        let counts: fn(&BlockInfo) -> bool = |record| !is_hold(record);
        let (pointers, _) = self.counts();
        let other = &*self.store;
        (pointers > 0).then_some(Merged { store, other, counts, now_unix_secs: now })
    }

    /// Those of a list of records that are pointers.
    pub(crate) fn pointers(list: &[BlockInfo]) -> impl Iterator<Item = &BlockInfo> {
        list.iter().filter(|info| !is_hold(info))
    }

    /// Those of a list of records that are holds.
    pub(crate) fn holds(list: &[BlockInfo]) -> impl Iterator<Item = &BlockInfo> {
        list.iter().filter(|info| is_hold(info))
    }
}
