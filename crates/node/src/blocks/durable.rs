//! The block layer's small durable records (`atoll_dht::durable`), one file each below
//! `ring/` in the node's directory, written as everything that matters there.
//!
//! Pointers to blocks that other nodes keep for this one are in a small log of their own,
//! `pointers/`: what the node contributes may be full, or files that vanish, when one is written. Which blocks were
//! released is in another, `releases/`. What need
//! not survive the machine is in a journal (`super::journal`).
//!
//! A record that cannot be read counts as missing and is reported in the log; it is replaced
//! at the next save.

use std::path::PathBuf;
use std::sync::Arc;

use atoll_dht::durable::DurableState;
use atoll_dht::journal::Journal;
use atoll_env::{BoxFuture, Env};
use atoll_store::{BlockStore, DiskConfig, DiskStore};

use super::journal::DirJournal;
use crate::config::StartError;
use crate::dir::{NodeDir, make_private_dir, read_small, write_atomically};

/// What pointers may take on disk, and releases, bytes: some ten million. A guess.
const RECORD_BYTES: u64 = 4 << 30;
/// Length of a segment of their logs, bytes.
const RECORD_SEGMENT_BYTES: u64 = 4 << 20;
/// Bytes that they leave free on the disk: less than blocks, which must go elsewhere first.
const RECORD_RESERVE_BYTES: u64 = 4 << 20;

/// Records in a node's directory.
pub(crate) struct DirState {
    dir: NodeDir,
    pointers: Arc<DiskStore>,
    releases: Arc<DiskStore>,
    journal: Arc<DirJournal>,
}

impl DirState {
    /// The records of the node in `dir`. Waits for the disk.
    ///
    /// # Errors
    /// If their directory cannot be made, or the logs cannot be opened.
    pub(crate) fn open(dir: &NodeDir) -> Result<DirState, StartError> {
        make_private_dir(&dir.ring_state())?;
        let config = DiskConfig {
            capacity_bytes: RECORD_BYTES,
            segment_bytes: RECORD_SEGMENT_BYTES,
            index_cache_bytes: 1 << 20,
            queue_bytes: 1 << 20,
            reader_threads: 1,
            free_reserve_bytes: RECORD_RESERVE_BYTES,
            ..DiskConfig::default()
        };
        let log = |path: PathBuf, of: &str| {
            make_private_dir(&path)?;
            let opened = DiskStore::open(&path, config.clone());
            let opened = opened.map_err(|error| StartError::Store(format!("{of}: {error}")))?;
            Ok::<_, StartError>(Arc::new(opened))
        };
        let pointers = log(dir.pointers(), "pointers")?;
        let releases = log(dir.releases(), "releases")?;
        let journal = DirJournal::open(&dir.ring_state())
            .map_err(|error| StartError::Store(format!("journal: {error}")))?;
        Ok(DirState { dir: dir.clone(), pointers, releases, journal: Arc::new(journal) })
    }

    /// The pointers' log, to be flushed and closed with the node.
    pub(crate) fn pointer_log(&self) -> Arc<DiskStore> {
        self.pointers.clone()
    }
}

impl DurableState for DirState {
    fn load(&self, name: &'static str) -> Option<Vec<u8>> {
        let path = self.dir.ring_state().join(name);
        match read_small(&path) {
            Ok(record) => record,
            Err(error) => {
                tracing::error!(%error, "what the node knew of its ring is lost");
                None
            }
        }
    }

    fn save(&self, name: &'static str, record: Vec<u8>) -> BoxFuture<'static, Result<(), String>> {
        let path = self.dir.ring_state().join(name);
        Box::pin(async move {
            let written = tokio::task::spawn_blocking(move || write_atomically(&path, &record));
            match written.await {
                Ok(written) => written.map_err(|error| error.to_string()),
                Err(error) => Err(error.to_string()),
            }
        })
    }

    fn pointers(&self) -> Arc<dyn BlockStore> {
        self.pointers.clone()
    }

    fn releases(&self) -> Arc<dyn BlockStore> {
        self.releases.clone()
    }

    fn journal(&self, _: &Env) -> Arc<dyn Journal> {
        self.journal.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn records_survive_a_restart_and_damage_counts_as_missing() {
        let temp = tempfile::tempdir().expect("a directory");
        let dir = NodeDir::at(temp.path().join("node"));
        dir.prepare().expect("made");
        let state = DirState::open(&dir).expect("made");
        assert_eq!(state.load("expected"), None);
        state.save("expected", vec![1]).await.expect("saved");
        state.save("expected", vec![2, 3]).await.expect("saved");
        drop(state);
        let again = DirState::open(&dir).expect("made");
        assert_eq!(again.load("expected"), Some(vec![2, 3]));
        let record = dir.ring_state().join("expected");
        std::fs::remove_file(&record).expect("removed");
        std::fs::create_dir(&record).expect("something else of that name");
        assert_eq!(again.load("expected"), None);
        assert!(again.save("expected", vec![4]).await.is_err());
    }
}
