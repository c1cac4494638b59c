//! The block layer's small durable records (`atoll_dht::durable`), one file each below
//! `ring/` in the node's directory, written as everything that matters there.
//!
//! A record that cannot be read counts as missing and is reported in the log; it is replaced
//! at the next save.

use atoll_dht::durable::DurableState;
use atoll_env::BoxFuture;

use crate::dir::{DirError, NodeDir, make_private_dir, read_small, write_atomically};

/// Records in a node's directory.
pub(crate) struct DirState {
    dir: NodeDir,
}

impl DirState {
    /// The records of the node in `dir`.
    ///
    /// # Errors
    /// If their directory cannot be made.
    pub(crate) fn open(dir: &NodeDir) -> Result<DirState, DirError> {
        make_private_dir(&dir.ring_state())?;
        Ok(DirState { dir: dir.clone() })
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
        let again = DirState::open(&dir).expect("made");
        assert_eq!(again.load("expected"), Some(vec![2, 3]));
        let record = dir.ring_state().join("expected");
        std::fs::remove_file(&record).expect("removed");
        std::fs::create_dir(&record).expect("something else of that name");
        assert_eq!(again.load("expected"), None);
        assert!(again.save("expected", vec![4]).await.is_err());
    }
}
