//! Where a `FileStore`'s blocks are, whether that is there, and reading them.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use atoll_key::Key;
use bytes::Bytes;

use super::directory::{BlockDir, Space};
use crate::engine::entry::IndexEntry;
use crate::engine::shared::Shared;
use crate::{StoreError, Usage};

/// The directory of an open store with its index, shared by readers and the writer.
pub(crate) struct Place {
    pub(crate) shared: Arc<Shared>,
    pub(crate) dir: BlockDir,
    pub(super) is_away: AtomicBool,
    /// How often the directory has come or gone.
    pub(super) comings: AtomicU64,
    unit_bytes: AtomicU64,
    pub(super) lost_blocks: AtomicU64,
    /// Leases that ended before this are over, as the store was told last; 0 if it was not.
    pub(super) passed_unix_secs: AtomicU64,
}

/// Why a block's file did not give its bytes.
pub(super) enum Failure {
    /// It is lost: gone, or not what was written.
    Lost,
    /// Nothing can be said: the directory is away, or fails. Why.
    Unknown(String),
}

impl Place {
    pub(super) fn new(shared: Arc<Shared>, dir: BlockDir) -> Place {
        Place {
            shared,
            dir,
            is_away: AtomicBool::new(true),
            comings: AtomicU64::new(0),
            unit_bytes: AtomicU64::new(4096),
            lost_blocks: AtomicU64::new(0),
            passed_unix_secs: AtomicU64::new(0),
        }
    }

    pub(crate) fn lookup(&self, key: &Key) -> Result<Option<IndexEntry>, StoreError> {
        Ok(self.shared.catalog.lookup(key)?)
    }

    pub(crate) fn unit_bytes(&self) -> u64 {
        self.unit_bytes.load(Ordering::Relaxed)
    }

    pub(super) fn is_away(&self) -> bool {
        self.is_away.load(Ordering::Relaxed)
    }

    /// What is told of a directory that was not there when it was looked at last.
    pub(super) fn away(&self) -> StoreError {
        StoreError::Away { dir: self.dir.path().to_path_buf() }
    }

    pub(crate) fn usage(&self) -> Usage {
        if self.is_away() {
            return Usage::default();
        }
        let usage = self.shared.usage();
        let disk_bytes = usage.block_bytes + usage.blocks * self.unit_bytes() / 2;
        Usage { disk_bytes, ..usage }
    }

    /// Looks whether the directory is there and how much it can take.
    pub(super) fn look(&self) -> Result<Space, String> {
        let found = self.dir.presence().and_then(|()| {
            Space::of(self.dir.path())
                .map_err(|error| format!("{} cannot be used: {error}", self.dir.path().display()))
        });
        if let Ok(space) = &found {
            self.unit_bytes.store(space.unit_bytes, Ordering::Relaxed);
        }
        if self.is_away.swap(found.is_err(), Ordering::Relaxed) != found.is_err() {
            self.comings.fetch_add(1, Ordering::Relaxed);
        }
        found
    }

    /// What a failure to read a file means: only in a directory that is there is a file lost,
    /// and not for what this process or the machine is short of.
    fn judge(&self, error: &io::Error) -> Failure {
        use rustix::io::Errno;
        let says_nothing = error.raw_os_error().map(Errno::from_raw_os_error).is_none_or(|code| {
            matches!(
                code,
                Errno::AGAIN
                    | Errno::CONNABORTED
                    | Errno::INTR
                    | Errno::MFILE
                    | Errno::NFILE
                    | Errno::NOMEM
                    | Errno::NOTCONN
                    | Errno::TIMEDOUT
            )
        });
        let away = self.look().err();
        if says_nothing || away.is_some() {
            return Failure::Unknown(away.unwrap_or_else(|| error.to_string()));
        }
        Failure::Lost
    }

    pub(super) fn read(&self, key: &Key, entry: &IndexEntry) -> Result<Bytes, Failure> {
        match self.dir.read(key, entry.version, entry.len_bytes) {
            Ok(Some(bytes)) if crc32fast::hash(&bytes) == entry.offset => Ok(bytes.into()),
            Ok(_) => Err(Failure::Lost),
            Err(error) => Err(self.judge(&error)),
        }
    }

    pub(super) fn probe(&self, key: &Key, entry: &IndexEntry) -> Result<(), Failure> {
        match self.dir.probe(key, entry.version, entry.len_bytes) {
            Ok(true) => Ok(()),
            Ok(false) => Err(Failure::Lost),
            Err(error) => Err(self.judge(&error)),
        }
    }
}
