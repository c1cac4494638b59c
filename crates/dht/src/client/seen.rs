//! The highest version seen of each mutable block that this node has read or written.
//!
//! A partition that heals, or an old replica set that comes back, brings older versions of a
//! volume's root with it. A reader that has seen a newer version must not go back to an older one:
//! that would be a rollback, and a publisher could build on it. So versions are remembered across
//! restarts, and [`get_mutable`](super::get_mutable) looks further while the best version it finds
//! is older.
//!
//! The table is bounded: beyond [`MAX_SEEN`] the block not read or written for longest is
//! forgotten. It is saved at most once a second, so a crash may lose the last second.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::{Env, sleep};
use atoll_key::Key;
use minicbor::{Decode, Encode};

use super::recent::Recent;
use crate::durable::DurableState;
use crate::rpc::{from_header, to_header};

/// Mutable blocks remembered. A guess: volumes that one machine reads.
const MAX_SEEN: usize = 4096;
/// Changes are saved together, so long after the first.
const SAVE_AFTER: Duration = Duration::from_secs(1);
/// The durable record.
const RECORD: &str = "seen-versions";
/// A key and a version.
const ENTRY_BYTES: usize = 72;

/// The record: | key, 64 bytes | version, 8 | for each, that seen last at the end.
#[derive(Encode, Decode)]
#[cbor(map)]
struct Record {
    #[cbor(n(0), with = "minicbor::bytes")]
    entries: Vec<u8>,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct SeenVersions {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    versions: Recent<u64, MAX_SEEN>,
    is_saving: bool,
}

impl SeenVersions {
    /// What an earlier run of this node has seen.
    pub(super) fn remembered(durable: &dyn DurableState) -> SeenVersions {
        let versions = SeenVersions::default();
        let record = durable.load(RECORD).and_then(|bytes| from_header::<Record>(&bytes).ok());
        let entries = record.map_or_else(Vec::new, |record| record.entries);
        for entry in entries.chunks_exact(ENTRY_BYTES).take(MAX_SEEN) {
            let key = Key::from_slice(&entry[..64]).expect("64 bytes");
            let version = u64::from_be_bytes(entry[64..].try_into().expect("8 bytes"));
            versions.lock().raise(key, version);
        }
        versions
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }

    /// The highest version seen of a mutable block; 0 if none was.
    pub(super) fn version(&self, key: &Key) -> u64 {
        self.lock().versions.get(key).copied().unwrap_or(0)
    }

    /// A version was read or written, and is saved soon if it is the highest.
    pub(super) fn saw(
        self: &Arc<Self>,
        env: &Env,
        durable: &Arc<dyn DurableState>,
        key: Key,
        version: u64,
    ) {
        let mut state = self.lock();
        if !state.raise(key, version) || std::mem::replace(&mut state.is_saving, true) {
            return;
        }
        drop(state);
        let (seen, timer, durable) = (self.clone(), sleep(&**env, SAVE_AFTER), durable.clone());
        env.spawn(Box::pin(async move {
            timer.await;
            seen.lock().is_saving = false;
            if let Err(error) = seen.save(&*durable).await {
                tracing::error!(%error, "versions of mutable blocks could not be saved");
            }
        }));
    }

    /// Saves all versions.
    ///
    /// # Errors
    /// What the system said, for people.
    pub(super) async fn save(&self, durable: &dyn DurableState) -> Result<(), String> {
        let record = self.lock().record();
        durable.save(RECORD, to_header(&record).to_vec()).await
    }

    /// Older versions are read again.
    pub(super) fn forget_all(&self) {
        self.lock().versions.clear();
    }
}

impl State {
    /// Notes a version; whether it is higher than the one known.
    fn raise(&mut self, key: Key, version: u64) -> bool {
        let known = self.versions.get(&key).copied();
        self.versions.note(key, known.unwrap_or(version).max(version));
        known.is_none_or(|known| known < version)
    }

    fn record(&self) -> Record {
        let all = self.versions.oldest_first();
        let mut entries = Vec::with_capacity(all.len() * ENTRY_BYTES);
        for (key, version) in all {
            entries.extend_from_slice(&key.0);
            entries.extend_from_slice(&version.to_be_bytes());
        }
        Record { entries }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;
    use crate::durable::MemoryState;

    fn key(n: u32) -> Key {
        atoll_key::BlockHash::of(&n.to_be_bytes()).key()
    }

    #[test]
    fn the_highest_version_survives_a_restart() {
        let (durable, seen) = (MemoryState::default(), SeenVersions::default());
        assert!(seen.lock().raise(key(1), 5));
        assert!(!seen.lock().raise(key(1), 4) && !seen.lock().raise(key(1), 5));
        seen.save(&durable).now_or_never().expect("memory").expect("saved");
        let again = SeenVersions::remembered(&durable);
        assert_eq!((again.version(&key(1)), again.version(&key(2))), (5, 0));
    }

    #[test]
    fn the_block_looked_at_longest_ago_is_forgotten_also_after_a_restart() {
        let (durable, seen) = (MemoryState::default(), SeenVersions::default());
        (0..MAX_SEEN as u32).for_each(|n| assert!(seen.lock().raise(key(n), 1)));
        seen.lock().raise(key(0), 1);
        seen.save(&durable).now_or_never().expect("memory").expect("saved");
        let again = SeenVersions::remembered(&durable);
        again.lock().raise(key(u32::MAX), 1);
        assert_eq!((again.version(&key(0)), again.version(&key(1))), (1, 0));
    }

    #[test]
    fn a_damaged_record_counts_as_missing() {
        let durable = MemoryState::default();
        durable.save(RECORD, vec![0xff; 100]).now_or_never().expect("memory").expect("saved");
        assert!(SeenVersions::remembered(&durable).lock().versions.oldest_first().is_empty());
    }
}
