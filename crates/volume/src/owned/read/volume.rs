//! A volume and its updates: which root is the newest.
//!
//! CFS §5.2: "A client can check the freshness of a cached root block to decide whether to
//! look for a newer version." Here a root is used for `max_age` and refreshed in the background
//! once it is half as old, so that a reader rarely waits. While the ring
//! cannot be reached the old root stays in use, and [`Volume::status`] says so.
//!
//! A root with a lower version than one seen is a replay (§3.1 guards against these with a
//! timestamp) and is never taken; nor is another root of the same version.
//!
//! A volume opened at a time shows one state of its [`history`] and never another.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use atoll_dht::{Blocks, GetError};
use atoll_env::{BoxFuture, Env, Instant, timeout};
use atoll_key::{ReadKey, SignedBlock, VolumeCipher, VolumeId};
use futures_util::FutureExt;
use futures_util::future::Shared;

use super::error::{OpenError, ReadError};
use super::snapshot::Snapshot;
use crate::blocks::cache::{BlockCache, Outage};
use crate::owned::{history, sealed_root};

/// How long a reader waits for the ring to confirm a root before it goes on with the old
/// one. A guess: a delay that a person hardly notices.
const MAX_REFRESH_WAIT: Duration = Duration::from_secs(3);

/// How long after a failed refresh the next may begin. Guess.
const RETRY_AFTER: Duration = Duration::from_secs(5);

/// The message for a root that was found before and is gone now.
const EXPIRED: &str = "the volume's lease has run out: no node has its root block any more; what \
                       was read before stays readable; its publisher brings it back with \
                       `atoll renew`";

/// How to read a volume.
#[derive(Clone, Debug)]
pub struct VolumeOptions {
    /// How old the root may be before the ring is asked for a newer one.
    pub max_age: Duration,
    /// Blocks kept in memory.
    pub cache_bytes: u64,
    /// How far to read ahead of a sequential reader, at most. This limits memory; the network is
    /// limited by the volume's [window](crate::blocks::window).
    pub read_ahead_bytes: u64,
    /// The read key of an encrypted volume; `None` for one that everybody may read.
    pub read_key: Option<ReadKey>,
    /// Show the newest state of this time (milliseconds since 1970) or before, whatever is
    /// published later.
    pub at_unix_ms: Option<u64>,
}

impl Default for VolumeOptions {
    fn default() -> VolumeOptions {
        VolumeOptions {
            max_age: Duration::from_secs(30),
            cache_bytes: 32 << 20,
            read_ahead_bytes: 16 << 20,
            read_key: None,
            at_unix_ms: None,
        }
    }
}

/// How long what never changes may be believed: a day, since some kernels overflow on more.
const FOREVER: Duration = Duration::from_secs(24 * 60 * 60);

/// What is known of a volume's freshness.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeStatus {
    /// Version of the root in use.
    pub version: u64,
    /// How long ago the ring confirmed it.
    pub age: Duration,
    /// Why it may be stale, if the last refresh failed.
    pub stale: Option<String>,
    /// No node has its root any more: its lease has run out. Cached blocks stay readable.
    pub expired: bool,
    /// Why blocks cannot be read, if the last one asked for could not.
    pub outage: Option<Outage>,
}

impl fmt::Display for VolumeStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.outage, &self.stale) {
            (Some(outage), _) => write!(f, "blocks cannot be fetched: {}", outage.reason),
            (None, Some(reason)) => write!(f, "may be out of date: {reason}"),
            (None, None) => f.write_str("ok"),
        }
    }
}

/// A volume that is being read; follows its publisher's updates.
pub struct Volume {
    env: Env,
    blocks: Arc<dyn Blocks>,
    id: VolumeId,
    options: VolumeOptions,
    cipher: Option<VolumeCipher>,
    state: Mutex<State>,
}

struct State {
    snapshot: Arc<Snapshot>,
    block: SignedBlock,
    confirmed_at: Instant,
    stale: Option<String>,
    expired: bool,
    retry_at: Instant,
    refresh: Option<Refresh>,
}

/// A refresh under way.
#[derive(Clone)]
struct Refresh {
    began_at: Instant,
    done: Shared<BoxFuture<'static, ()>>,
}

impl fmt::Debug for Volume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Volume({:?})", self.id)
    }
}

impl Volume {
    /// Fetches the volume's root, or that of an old state.
    pub async fn open(
        env: Env,
        blocks: Arc<dyn Blocks>,
        id: VolumeId,
        options: VolumeOptions,
    ) -> Result<Arc<Volume>, OpenError> {
        let block = blocks.get_signed(id.root_key()).await?;
        let confirmed_at = env.now();
        let cipher = options.read_key.as_ref().map(|key| VolumeCipher::new(key, &id));
        let mut root = sealed_root::decode(&block.payload, cipher.as_ref())?;
        let ring = (blocks.clone(), root.form(id, cipher.clone()));
        let cache = BlockCache::new(env.clone(), ring, options.cache_bytes);
        if let Some(unix_ms) = options.at_unix_ms {
            root = history::state_at(&cache, &root, unix_ms).await?.root;
        }
        let read_ahead_bytes = options.read_ahead_bytes;
        let version = block.version;
        let snapshot = Arc::new(Snapshot { id, version, root, cache, read_ahead_bytes });
        let state = Mutex::new(State {
            snapshot,
            block,
            confirmed_at,
            stale: None,
            expired: false,
            retry_at: Instant::default(),
            refresh: None,
        });
        Ok(Arc::new(Volume { env, blocks, id, options, cipher, state }))
    }

    /// The volume.
    pub fn id(&self) -> VolumeId {
        self.id
    }

    /// The options it was opened with.
    pub fn options(&self) -> &VolumeOptions {
        &self.options
    }

    /// How fresh the volume is.
    pub fn status(&self) -> VolumeStatus {
        let state = self.state();
        VolumeStatus {
            version: state.snapshot.version,
            age: self.env.now().since(state.confirmed_at),
            stale: state.stale.clone(),
            expired: state.expired,
            outage: state.snapshot.cache.outage(),
        }
    }

    /// The newest root known, asked for again if it is older than `max_age`. When the
    /// ring cannot be reached, the old one ([`Volume::status`] says so). Answers within
    /// a few seconds.
    pub async fn snapshot(self: &Arc<Self>) -> Arc<Snapshot> {
        let now = self.env.now();
        let waiting = {
            let mut state = self.state();
            let age = now.since(state.confirmed_at);
            if self.options.at_unix_ms.is_some() {
                return state.snapshot.clone();
            }
            if age <= self.options.max_age / 2 && !self.options.max_age.is_zero() {
                return state.snapshot.clone();
            }
            let refresh = match &state.refresh {
                Some(refresh) => refresh.clone(),
                None if now < state.retry_at => return state.snapshot.clone(),
                None => self.begin_refresh(&mut state, now),
            };
            let waited = now.since(refresh.began_at);
            if age < self.options.max_age || waited >= MAX_REFRESH_WAIT {
                return state.snapshot.clone();
            }
            timeout(&*self.env, MAX_REFRESH_WAIT - waited, refresh.done)
        };
        // If it takes longer, the old root serves; `status` tells its age.
        let _ = waiting.await;
        self.state().snapshot.clone()
    }

    /// The newest version, if it is a later one than `version`: the ring is asked now. Answers within its deadlines.
    pub async fn newer_than(self: &Arc<Self>, version: u64) -> Option<Arc<Snapshot>> {
        if self.options.at_unix_ms.is_some() {
            return None;
        }
        let refresh = {
            let mut state = self.state();
            match &state.refresh {
                Some(refresh) => refresh.clone(),
                None => self.begin_refresh(&mut state, self.env.now()),
            }
        };
        refresh.done.await;
        let newest = self.state().snapshot.clone();
        (newest.version > version).then_some(newest)
    }

    /// The snapshot in use, fresh or not.
    pub(crate) fn current(&self) -> Arc<Snapshot> {
        self.state().snapshot.clone()
    }

    /// How much longer names found in the present snapshot may be believed.
    pub(crate) fn fresh_for(&self) -> Duration {
        if self.options.at_unix_ms.is_some() {
            return FOREVER;
        }
        let state = self.state();
        (state.confirmed_at + self.options.max_age).max(state.retry_at).since(self.env.now())
    }

    /// Whether the volume has expired, now that one of its blocks is nowhere: the ring is
    /// asked for the root, unless it was a moment ago. Answers within a few seconds.
    async fn has_expired(self: &Arc<Self>) -> bool {
        let now = self.env.now();
        let waiting = {
            let mut state = self.state();
            let asked_lately = now < state.retry_at || now < state.confirmed_at + RETRY_AFTER;
            let refresh = match &state.refresh {
                Some(refresh) => refresh.clone(),
                None if asked_lately => return state.expired,
                None => self.begin_refresh(&mut state, now),
            };
            timeout(&*self.env, MAX_REFRESH_WAIT, refresh.done)
        };
        // If it takes longer, the answer is not known.
        let _ = waiting.await;
        self.state().expired
    }

    /// The same error, or the better one that the whole volume has expired.
    pub async fn explained(self: &Arc<Self>, error: ReadError) -> ReadError {
        match error {
            ReadError::Fetch { path, source: source @ GetError::NotFound { .. } }
                if self.has_expired().await =>
            {
                ReadError::Expired { path, source }
            }
            other => other,
        }
    }

    /// Starts a refresh that goes on even if no caller waits for it.
    fn begin_refresh(self: &Arc<Self>, state: &mut State, now: Instant) -> Refresh {
        let volume = self.clone();
        let work: BoxFuture<'static, ()> = Box::pin(async move {
            let asked_at = volume.env.now();
            let answer = volume.blocks.get_signed(volume.id.root_key()).await;
            let mut state = volume.state();
            let expired = matches!(answer, Err(GetError::NotFound { .. }));
            let was_expired = std::mem::replace(&mut state.expired, expired);
            if expired && !was_expired {
                tracing::error!(volume = ?volume.id, "{EXPIRED}");
            }
            match volume.take(&mut state, answer) {
                Ok(()) => {
                    state.confirmed_at = asked_at;
                    state.stale = None;
                    state.retry_at = Instant::default();
                }
                Err(reason) => {
                    // Asked for again every few seconds: the same reason is not news.
                    if state.stale.as_ref() != Some(&reason) {
                        let version = state.snapshot.version;
                        tracing::warn!(volume = ?volume.id, version, %reason, "root not refreshed");
                    }
                    state.stale = Some(reason);
                    state.retry_at = volume.env.now() + RETRY_AFTER.min(volume.options.max_age);
                }
            }
            state.refresh = None;
        });
        let refresh = Refresh { began_at: now, done: work.shared() };
        state.refresh = Some(refresh.clone());
        self.env.spawn(Box::pin(refresh.done.clone()));
        refresh
    }

    /// Takes the ring's answer, or says why not.
    fn take(&self, state: &mut State, answer: Result<SignedBlock, GetError>) -> Result<(), String> {
        let block = answer.map_err(|error| match error {
            GetError::NotFound { .. } => format!("{EXPIRED} ({error})"),
            GetError::Unavailable { .. } => error.to_string(),
            GetError::Removed { .. } => OpenError::Removed.to_string(),
        })?;
        if self.options.at_unix_ms.is_some() {
            return Ok(());
        }
        let held = state.snapshot.version;
        if block.version < held {
            return Err(format!(
                "the ring answered with the older version {} (a replay, or nodes that are behind)",
                block.version
            ));
        }
        if block.version == held {
            if block == state.block {
                return Ok(());
            }
            return Err(format!("the publisher signed two different roots of version {held}"));
        }
        let root = sealed_root::decode(&block.payload, self.cipher.as_ref())
            .map_err(|error| format!("version {} cannot be read: {error}", block.version))?;
        let form = root.form(self.id, self.cipher.clone());
        let mut cache = state.snapshot.cache.clone();
        if !cache.form().is_like(&form) {
            // A volume that was published is written through mounts now, or the other way round.
            let ring = (self.blocks.clone(), form);
            cache = BlockCache::new(self.env.clone(), ring, self.options.cache_bytes);
        }
        state.snapshot = Arc::new(Snapshot {
            id: self.id,
            version: block.version,
            root,
            cache,
            read_ahead_bytes: self.options.read_ahead_bytes,
        });
        state.block = block;
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }
}
