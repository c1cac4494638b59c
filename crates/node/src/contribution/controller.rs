//! The contribution controller: changes the policy, moves blocks, follows the watermarks, and
//! checks files that may vanish.
//!
//! **A change is written down before it begins**: the settings name the new policy and the place
//! blocks are still to be moved from, so that a node that stops at any moment goes on with it
//! at its next start. Only when the former place is empty do the settings forget it, and only
//! then is it removed.
//!
//! Blocks that do not fit are evicted, those farthest from the node's positions first, and only if
//! other nodes prove to hold them: a node that is alone, or in a network that keeps one copy,
//! refuses to offer less than it holds, and watermarks do not make it evict anything.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_dht::Dht;
use atoll_env::{Env, jittered, sleep, timeout};
use atoll_key::Key;
use atoll_overlay::Overlay;
use atoll_store::{Backend, BlockStore, ContributedStore, FileStore, FlagCheck, Moved, StoreError};
use tokio::sync::Notify;

use super::backends::{capacity_bytes, forget_files, remove_backend};
use crate::counted::counted;
use crate::dir::NodeDir;
use crate::policy::{Place, Policy};
use crate::ring::Ring;
use crate::settings::SettingsStore;

/// How often the disk is looked at: watermarks, room of a transparent file system.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// Blocks moved in one go, bytes; other calls are answered in between.
const MOVE_STEP_BYTES: u64 = 4 << 20;
/// How long it rests between two steps of a move.
const MOVE_REST: Duration = Duration::from_millis(20);
/// What is given up at once when the place blocks move to has no room, bytes.
const DROP_STEP_BYTES: u64 = 1 << 20;
/// Candidates for being given up that are looked at together, bytes.
const GIVE_UP_STEP_BYTES: u64 = 64 << 20;
/// Others are asked about so many at once.
const GIVE_UP_BLOCKS: usize = 128;
/// What compaction may copy in one go, bytes.
const RECLAIM_STEP_BYTES: u64 = 16 << 20;
/// After so many steps in a row that give back nothing, shrinking waits for the next look.
const MAX_IDLE_SHRINKS: usize = 3;
/// The time within which every file that may vanish is opened once (§3.1: the cleaner), unless
/// there are so many that [`MOST_FILES`] at a look do not suffice.
const FILES_WITHIN: Duration = Duration::from_secs(3600);
/// Files opened at one look, at least and at most: guesses at a load that no disk notices, and at
/// one that leaves room for other work.
const LEAST_FILES: u64 = 64;
const MOST_FILES: u64 = 4096;

/// What to do about blocks whose directory is not there.
pub(super) const AWAY_ADVICE: &str =
    "mount its TFS, or give them up, if it is gone for good (`atoll contribute --abandon`)";

/// Follows the policy by which a node gives disk.
pub(crate) struct ContributionController {
    pub env: Env,
    pub dir: NodeDir,
    pub flag: FlagCheck,
    pub settings: Arc<SettingsStore>,
    pub store: Arc<ContributedStore>,
    pub overlay: Arc<dyn Overlay>,
    pub dht: Arc<Dht>,
    pub ring: Arc<Ring>,
    /// Copies of each block in this network.
    pub replicas: u32,
    pub state: State,
}

/// What changes.
#[derive(Default)]
pub(crate) struct State {
    /// One change, or removal of a backend that was left, at a time.
    pub(super) changing: Mutex<()>,
    pub(super) changed: Notify,
    /// All files are to be opened at the next look.
    pub(super) suspicious: AtomicBool,
    pub(super) moved_blocks: AtomicU64,
    pub(super) dropped_blocks: AtomicU64,
    pub(super) trouble: Mutex<Option<String>>,
}

impl ContributionController {
    pub(super) fn policy(&self) -> Policy {
        self.settings.present().policy()
    }

    /// Whether no other node can have copies of the blocks held here.
    pub(super) fn is_only_holder(&self) -> bool {
        self.replicas < 2 || self.overlay.is_alone()
    }

    fn positions(&self) -> Vec<Key> {
        self.overlay.positions().iter().map(|node| node.id.0).collect()
    }

    /// Changes how disk is given. Waits for the disk.
    ///
    /// # Errors
    /// Why this node cannot do that, in words.
    pub(crate) fn change(&self, policy: &Policy) -> Result<(), String> {
        let _one = self.state.changing.lock().expect("no holder of this lock panics");
        let policy = &Place::settle(policy);
        let place = Place::of(policy);
        self.check_policy(policy, &place)?;
        let present = self.store.present();
        if Place::of_backend(&present) == place {
            if let Backend::Files(files) = &present
                && files.look().is_err()
            {
                files.take_again().map_err(|error| error.to_string())?;
                self.state.suspicious.store(true, Ordering::Relaxed);
            }
            self.write_down(policy, None)?;
        } else {
            self.change_place(policy, &place)?;
        }
        self.adjust(policy);
        self.state.changed.notify_one();
        Ok(())
    }

    fn change_place(&self, policy: &Policy, place: &Place) -> Result<(), String> {
        let left = Place::of_backend(&self.store.present());
        let former = self.store.former();
        let backend = match former {
            // Back to where the blocks came from.
            Some(former) if Place::of_backend(&former) == *place => former,
            Some(former) => {
                let left = former.store().usage().blocks;
                let from = Place::of_backend(&former).path(&self.dir);
                let from = from.display();
                return Err(if is_away(&former) {
                    format!(
                        "the blocks in {from} have not been moved yet, and it is not there: {AWAY_ADVICE}"
                    )
                } else {
                    let left = counted(left, "block is", "blocks are");
                    format!(
                        "{left} still being moved from {from}; wait until that is done \
                         (`atoll contribute` shows it)"
                    )
                });
            }
            None => {
                let capacity_bytes = self.settings.present().storage_bytes();
                place.open(&self.dir, capacity_bytes, self.flag)?
            }
        };
        self.write_down(policy, Some(&left))?;
        self.store.change_to(backend).map_err(|busy| busy.to_string())
    }

    /// Waits no longer for blocks in a directory that is gone. Waits for the disk.
    ///
    /// # Errors
    /// That it is not so, in words.
    pub(crate) fn abandon_former(&self) -> Result<(), String> {
        let _one = self.state.changing.lock().expect("no holder of this lock panics");
        match self.store.former() {
            None => return Err("no blocks are being moved: there is nothing to abandon".to_owned()),
            Some(former) if is_away(&former) => {}
            Some(former) => {
                let from = Place::of_backend(&former).path(&self.dir);
                return Err(format!(
                    "the blocks in {} are there, and being moved: they need not be abandoned",
                    from.display()
                ));
            }
        }
        self.settings.change(|settings| {
            settings.set_former(None);
            Ok(())
        })?;
        if let Some(Backend::Files(files)) = self.store.abandon_former() {
            forget_files(files, &self.dir).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    fn write_down(&self, policy: &Policy, former: Option<&Place>) -> Result<(), String> {
        let stored = former.cloned();
        self.settings.change(|settings| {
            settings.set_policy(policy);
            if stored.is_some() {
                settings.set_former(stored);
            }
            Ok(())
        })
    }

    /// Follows the disk: what the store may take now. Waits for the disk.
    fn adjust(&self, policy: &Policy) {
        let present = self.store.present();
        let capacity = capacity_bytes(policy, &self.dir, &present);
        match capacity {
            Ok(capacity_bytes) => present.set_capacity(capacity_bytes),
            Err(error) => tracing::warn!(%error, "the disk's use cannot be looked at"),
        }
    }

    fn tell(&self, trouble: Option<String>) {
        let told = {
            let mut told = self.state.trouble.lock().expect("no holder of this lock panics");
            std::mem::replace(&mut *told, trouble.clone())
        };
        if let Some(why) = trouble.as_ref().filter(|_| told != trouble) {
            tracing::warn!(why, "contributing");
        }
    }

    /// Goes on for ever.
    pub(crate) async fn run(self: Arc<Self>) {
        let mut files_from = None;
        loop {
            let trouble = self.step(&mut files_from).await.err();
            self.tell(trouble);
            let pause = jittered(&*self.env, LOOK_EVERY);
            let _ = timeout(&*self.env, pause, self.state.changed.notified()).await;
        }
    }

    async fn step(self: &Arc<Self>, files_from: &mut Option<Key>) -> Result<(), String> {
        self.look().await?;
        self.move_all().await?;
        self.shrink().await?;
        if let Backend::Files(files) = self.store.present() {
            self.look_after(&files, files_from).await?;
        }
        Ok(())
    }

    /// Looks at the disk, and lets the store take what it may now.
    async fn look(self: &Arc<Self>) -> Result<(), String> {
        let controller = self.clone();
        let looked = tokio::task::spawn_blocking(move || {
            let _one = controller.state.changing.lock().expect("no holder of this lock panics");
            controller.adjust(&controller.policy());
        });
        looked.await.map_err(|error| error.to_string())
    }

    /// Moves what an earlier policy left elsewhere.
    async fn move_all(self: &Arc<Self>) -> Result<(), String> {
        let mut was_full = false;
        while self.store.former().is_some() {
            match self.store.move_some(MOVE_STEP_BYTES).await {
                Ok(Moved { emptied: Some(backend), .. }) => {
                    return self.leave(backend).await;
                }
                Ok(moved) => {
                    was_full = false;
                    self.state.moved_blocks.fetch_add(moved.blocks, Ordering::Relaxed);
                    if moved.blocks == 0 {
                        return Ok(());
                    }
                }
                // Before anything is given up: what it may take may be from a time when its
                // directory was away.
                Err(StoreError::Full { .. }) if !was_full => {
                    was_full = true;
                    self.look().await?;
                }
                Err(StoreError::Full { .. }) => self.give_up(DROP_STEP_BYTES).await?,
                // Its own warning says so, and nothing is given up for it.
                Err(StoreError::Away { .. }) => return Ok(()),
                Err(error) => return Err(format!("blocks cannot be moved: {error}")),
            }
            sleep(&*self.env, MOVE_REST).await;
        }
        Ok(())
    }

    /// Removes a backend that is empty, and forgets it.
    async fn leave(self: &Arc<Self>, backend: Backend) -> Result<(), String> {
        let controller = self.clone();
        let left = tokio::task::spawn_blocking(move || {
            let _one = controller.state.changing.lock().expect("no holder of this lock panics");
            let place = Place::of_backend(&backend).path(&controller.dir);
            // Another change may have begun since.
            let former = controller.store.former().map(|former| Place::of_backend(&former));
            controller.settings.change(|settings| {
                settings.set_former(former);
                Ok(())
            })?;
            remove_backend(backend, &controller.dir)
                .map_err(|error| format!("{} cannot be removed: {error}", place.display()))?;
            tracing::info!(left = %place.display(), "all blocks have been moved");
            Ok(())
        });
        left.await.map_err(|error| error.to_string())?
    }

    /// Gives up about so much that others are seen to hold.
    async fn give_up(&self, want_bytes: u64) -> Result<(), String> {
        if self.is_only_holder() {
            return Err("there is too little room for the blocks held here, and no other node \
                        holds them"
                .to_owned());
        }
        let (mut blocks, mut bytes) = (0, 0);
        while bytes < want_bytes {
            // More than are wanted: some of them others may not hold yet.
            let some_bytes = (want_bytes - bytes).saturating_mul(4).min(GIVE_UP_STEP_BYTES);
            let chosen = self.store.farthest(&self.positions(), some_bytes);
            let chosen = chosen.map_err(|error| error.to_string())?;
            let mut gone_bytes = 0;
            for some in chosen.chunks(GIVE_UP_BLOCKS) {
                let gone = self.dht.give_up(some.to_vec()).await;
                let gone = gone.map_err(|error| error.to_string())?;
                blocks += gone.len() as u64;
                gone_bytes += gone.iter().map(|info| u64::from(info.len_bytes)).sum::<u64>();
                if bytes + gone_bytes >= want_bytes {
                    break;
                }
            }
            if gone_bytes == 0 {
                break;
            }
            bytes += gone_bytes;
        }
        if blocks == 0 {
            return Err("there is too little room for the blocks held here, and not enough \
                        other nodes hold them yet; copies are given up when they do"
                .to_owned());
        }
        tracing::info!(blocks, bytes, "gave up copies for want of room");
        self.state.dropped_blocks.fetch_add(blocks, Ordering::Relaxed);
        Ok(())
    }

    /// Brings the store down to what it may take.
    async fn shrink(&self) -> Result<(), String> {
        // One that is being moved shrinks by being moved; files go by themselves.
        let Backend::Log(log) = self.store.present() else { return Ok(()) };
        let mut idle = 0;
        loop {
            let usage = log.usage();
            let excess_bytes = usage.disk_bytes.saturating_sub(usage.capacity_bytes);
            if excess_bytes == 0 || usage.blocks == 0 || idle > MAX_IDLE_SHRINKS {
                return Ok(());
            }
            if self.store.former().is_none() && idle > 0 {
                self.give_up(excess_bytes.min(usage.block_bytes)).await?;
            }
            let mut freed_bytes = 0;
            loop {
                let freed = log.reclaim(RECLAIM_STEP_BYTES).await;
                match freed.map_err(|error| error.to_string())? {
                    0 => break,
                    freed => freed_bytes += freed,
                }
            }
            idle = if freed_bytes == 0 { idle + 1 } else { 1 };
        }
    }

    /// Opens some files that may have vanished.
    async fn look_after(
        &self,
        files: &FileStore,
        files_from: &mut Option<Key>,
    ) -> Result<(), String> {
        let looks = FILES_WITHIN.as_secs() / LOOK_EVERY.as_secs();
        let mut count = (files.usage().blocks / looks).clamp(LEAST_FILES, MOST_FILES);
        if self.state.suspicious.swap(false, Ordering::Relaxed) {
            (*files_from, count) = (None, u64::MAX);
        }
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        let care = files.look_after(*files_from, count).await;
        let care = care.map_err(|error| error.to_string())?;
        if care.lost > 0 {
            tracing::info!(blocks = care.lost, "blocks have vanished; repair restores them");
        }
        *files_from = care.next;
        Ok(())
    }
}

/// Whether a backend is a directory that is not there. Looks at the disk.
pub(super) fn is_away(backend: &Backend) -> bool {
    matches!(backend, Backend::Files(files) if files.look().is_err())
}
