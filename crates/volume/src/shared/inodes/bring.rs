//! Bringing to the ring what waits in the spool.
//!
//! Replicas take a fresh version only if it was signed within ten minutes, under a certificate that is valid
//! now. A version that has waited for longer, or of an inode that was rebound meanwhile, is signed again by the same writer: the same payload, and a
//! context that covers what was signed before and nothing besides that the mount had not seen. So what others have
//! written meanwhile stays beside it: contents become files of their own, directories merge. The elements of a
//! payload keep the names of the writes that added them, which the new version's context includes.
//!
//! | | |
//! |---|---|
//! | content blocks | before any inode |
//! | files | many at once; before the directories that name them |
//! | directories | after all that they name, else in the order in which they were written: of a file that moved, the new name comes before the old one goes |
//! | removals | last |
//!
//! A version that the ring does not take stays in the spool, and so does a directory that names such an inode. That it can be
//! read from the ring says nothing: one replica may have it, of a put that no majority took.
//!
//! Invariant: a version that was signed again is in the spool before it is sent, so a writer never signs two of one
//! height.

use std::collections::BTreeSet;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use atoll_dht::{Blocks, GetError, PutError};
use atoll_env::BoxFuture;
use atoll_key::NotAdmitted;
use atoll_key::kinds::certified::{CertifiedBlock, Sibling};
use atoll_vfs::{Errno, FileKind};
use futures_util::stream::{self, StreamExt};

use super::{Inodes, MAX_ATTEMPTS, State};
use crate::shared::access::NotAllowed;
use crate::shared::entries;
use crate::shared::fault::Fault;
use crate::shared::inode::{Contents, InodeKey};

/// A version that was signed before is signed again. Half of what replicas allow, as their clocks differ.
const SIGNED_FOR: Duration = Duration::from_secs(300);
/// Files and removals that are put at once.
const AT_ONCE: usize = 16;
/// How often the spool is gone through before others have their turn: files may be written all the time.
const MAX_ROUNDS: usize = 8;
/// How often an inode is put that is written meanwhile, or whose directory names new files.
const MAX_TRIES: usize = 8;

/// The ring cannot be reached.
pub(in crate::shared) struct OutOfReach;

/// An inode of which the ring has a version now that has waited.
pub(in crate::shared) struct Brought {
    pub(in crate::shared) key: InodeKey,
    pub(in crate::shared) kind: FileKind,
    /// The directories that name it, as that version says; none of the root directory.
    pub(in crate::shared) directories: Vec<InodeKey>,
}

/// What became of an inode that waits.
enum Outcome {
    /// The ring has it, or does not take it.
    Done,
    /// It names inodes that have to be there before it.
    Names(Vec<InodeKey>),
}

/// Which inodes wait, by what has to come first.
#[derive(Default)]
struct Order {
    others: Vec<InodeKey>,
    directories: Vec<InodeKey>,
    removals: Vec<InodeKey>,
}

impl Inodes {
    /// Brings to the ring all that waits in the spool; whether nothing is left that the ring could take.
    pub(in crate::shared) async fn bring_spooled(&self) -> Result<bool, OutOfReach> {
        for _ in 0..MAX_ROUNDS {
            match self.spool.send_contents().await {
                Ok(()) => {}
                Err(PutError::Unavailable(_)) => return Err(OutOfReach),
                Err(error) => {
                    self.spool.explain(&error.to_string());
                    return Ok(false);
                }
            }
            let order = self.order().await;
            self.bring_many(order.others).await?;
            for key in order.directories {
                self.bring_below(key, BTreeSet::new()).await?;
            }
            self.bring_many(order.removals).await?;
            if self.spool.settle().await {
                return Ok(true);
            }
        }
        Ok(false)
    }

    async fn order(&self) -> Order {
        let mut order = Order::default();
        for key in self.spool.waiting() {
            // What cannot be read now is found out when it is to be put.
            let versions = self.spool.versions(&key).await.unwrap_or_default();
            let siblings = versions.iter().flat_map(|block| block.siblings());
            let inodes = siblings.filter(|sibling| !sibling.is_removal);
            let mut kinds = inodes.map(|sibling| self.reading.sealing().inode(&sibling.payload));
            let is_directory = |contents: &Contents| {
                matches!(contents, Contents::Directory(_) | Contents::Unread { .. })
            };
            match kinds.next() {
                None if !versions.is_empty() => order.removals.push(key),
                Some(Ok(inode)) if is_directory(&inode.contents) => order.directories.push(key),
                _ => order.others.push(key),
            }
        }
        order
    }

    async fn bring_many(&self, keys: Vec<InodeKey>) -> Result<(), OutOfReach> {
        let brought = keys.into_iter().map(|key| self.bring_below(key, BTreeSet::new()));
        let mut brought = stream::iter(brought).buffer_unordered(AT_ONCE);
        while let Some(brought) = brought.next().await {
            brought?;
        }
        Ok(())
    }

    /// Brings an inode to the ring, after the inodes that it names. `above` are those on the way to it.
    fn bring_below(
        &self,
        key: InodeKey,
        mut above: BTreeSet<InodeKey>,
    ) -> BoxFuture<'_, Result<(), OutOfReach>> {
        Box::pin(async move {
            above.insert(key);
            for _ in 0..MAX_TRIES {
                let Outcome::Names(below) = self.bring(key, &above).await? else { return Ok(()) };
                for inode in &below {
                    self.bring_below(*inode, above.clone()).await?;
                }
                if below.iter().any(|inode| self.spool.is_living_waiting(inode)) {
                    let why = "it names a file that the ring does not take";
                    self.spool.refuse(key, why.into());
                    return Ok(());
                }
            }
            Ok(())
        })
    }

    /// Brings an inode to the ring, unless it names others that wait and are not among `above`.
    async fn bring(
        &self,
        key: InodeKey,
        above: &BTreeSet<InodeKey>,
    ) -> Result<Outcome, OutOfReach> {
        let state = self.state(key);
        let _turn = state.turn.lock().await;
        // A version that was signed last and is in no spool covers the one that is.
        if let Err(fault) = self.put_behind_in_turn(key, &state).await {
            return self.not_brought(key, fault);
        }
        let versions = match self.spool.versions(&key).await {
            Ok(versions) => versions,
            Err(error) => return self.not_brought(key, Fault::new(Errno::EIO, error)),
        };
        let mut below = BTreeSet::new();
        for block in &versions {
            match self.names_below(block).await {
                Ok(names) => below.extend(names),
                Err(fault) => return self.not_brought(key, fault),
            }
        }
        below.retain(|inode| !above.contains(inode) && self.spool.is_living_waiting(inode));
        if !below.is_empty() {
            return Ok(Outcome::Names(below.into_iter().collect()));
        }
        // The blocks of these versions are in the spool at the latest now.
        match self.spool.send_contents().await {
            Ok(()) => {}
            Err(PutError::Unavailable(_)) => return Err(OutOfReach),
            Err(error) => return self.not_brought(key, error.into()),
        }
        for block in versions {
            let brought = self.described(key, &block);
            if let Err(fault) = self.send(&state, block).await {
                return self.not_brought(key, fault);
            }
            self.brought().extend(brought);
        }
        Ok(Outcome::Done)
    }

    fn brought(&self) -> MutexGuard<'_, Vec<Brought>> {
        self.brought.lock().expect("no holder of this lock panics")
    }

    /// What was brought since this was asked last.
    pub(in crate::shared) fn take_brought(&self) -> Vec<Brought> {
        std::mem::take(&mut self.brought())
    }

    /// What a version of one writer says of an inode that is not removed.
    fn described(&self, key: InodeKey, block: &CertifiedBlock) -> Option<Brought> {
        let living = block.siblings().iter().find(|sibling| !sibling.is_removal)?;
        let inode = self.reading.sealing().inode(&living.payload).ok()?;
        let mut directories: Vec<InodeKey> =
            inode.links.iter().map(|link| link.directory).collect();
        // The one that it was linked to last, first.
        directories.reverse();
        Some(Brought { key, kind: inode.contents.kind(), directories })
    }

    /// The inodes that a directory's version names.
    async fn names_below(&self, block: &CertifiedBlock) -> Result<Vec<InodeKey>, Fault> {
        let is_directory = |payload| {
            let inode = self.reading.sealing().inode(payload);
            inode.is_ok_and(|inode| inode.contents.kind() == FileKind::Directory)
        };
        if !block.siblings().iter().any(|one| !one.is_removal && is_directory(&one.payload)) {
            return Ok(Vec::new());
        }
        let blocks: Arc<dyn Blocks> = self.blocks.clone();
        let leaves = entries::fetch(&blocks, block, self.reading.sealing()).await?;
        let merged = self.merged(block, &leaves)?;
        Ok(match merged.map(|merged| merged.inode.contents) {
            Some(Contents::Directory(entries)) => entries.iter().map(|e| e.inode).collect(),
            _ => Vec::new(),
        })
    }

    fn not_brought(&self, key: InodeKey, fault: Fault) -> Result<Outcome, OutOfReach> {
        if fault.errno == Errno::ETIMEDOUT {
            return Err(OutOfReach);
        }
        self.spool.refuse(key, fault.why.unwrap_or_else(|| fault.errno.to_string()));
        Ok(Outcome::Done)
    }

    /// Puts a version that waits, signed again if need be. The caller has the inode's turn.
    async fn send(&self, state: &State, mut block: CertifiedBlock) -> Result<(), Fault> {
        let age_ms = self.env.unix_ms().abs_diff(block.siblings()[0].time_ms);
        let mut refused = None;
        let mut is_old = age_ms > SIGNED_FOR.as_millis() as u64;
        for _ in 0..MAX_ATTEMPTS {
            // Others may write it now than when it was signed. What is sent under a former binding is late: it would
            // stand beside what others have written.
            let newest = match self.spool.on_ring(&InodeKey::of(&block.key())).await {
                // Another version covers it, and the mount that has written that one stores it.
                Ok(held) if held.includes(&block) && !is_among(&block, &held) => {
                    self.spool.delivered(&block).await;
                    return Ok(());
                }
                // One replica alone may have it: a put that no majority took leaves that.
                Ok(held) => Some(held),
                Err(error @ GetError::Unavailable { .. }) => return Err(error.into()),
                Err(GetError::NotFound { .. } | GetError::Removed { .. }) => None,
            };
            let binding_version = newest.as_ref().map_or(0, CertifiedBlock::binding_version);
            if is_old || binding_version > block.binding_version() {
                block = self.sign_again(state, &block, newest.as_ref()).await?;
            }
            let error = match self.spool.send(&block).await {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            is_old = true;
            match &error {
                PutError::NotAdmitted(NotAdmitted::Expired { .. }) => {
                    self.credentials.forget(block.groups());
                }
                PutError::Superseded { .. } | PutError::NotAdmitted(_) => {}
                _ => return Err(error.into()),
            }
            refused = Some(error);
        }
        Err(refused.map_or(Errno::EIO.into(), Fault::from))
    }

    /// The same payload in a version that covers `block` and what this mount has signed of the inode, written
    /// under the newest binding; it is in the spool in place of `block`.
    async fn sign_again(
        &self,
        state: &State,
        block: &CertifiedBlock,
        newest: Option<&CertifiedBlock>,
    ) -> Result<CertifiedBlock, Fault> {
        let _signing = state.signing.lock().await;
        let [sibling] = block.siblings() else {
            return Err(Fault::new(Errno::EIO, "a version of several writers"));
        };
        let signed = state.known().signed.clone();
        let mut over = match &signed {
            Some(signed) if sibling.dot.writer == state.writer() => {
                block.join(signed).ok_or(Errno::EIO)?
            }
            _ => block.clone(),
        };
        if let Some(rebinding) = newest.and_then(CertifiedBlock::rebinding)
            && rebinding.version > over.binding_version()
        {
            over = over.rebound(rebinding.clone()).ok_or(Errno::EIO)?;
        }
        let author = self.credentials.author(over.groups(), sibling.dot.writer).await;
        let author = author.map_err(|error| match error {
            NotAllowed::Unknown { .. } => Fault::from(error),
            error => Fault::new(Errno::EACCES, error),
        })?;
        let payload = (!sibling.is_removal).then_some(&sibling.payload[..]);
        let again = over.write(&author, self.env.unix_ms(), payload);
        let again = again.ok_or(Fault::new(Errno::EIO, "an inode cannot be signed again"))?;
        self.spool.keep_again(&again).await?;
        // What is signed here from now on covers it, whoever its writer was.
        let mut known = state.known();
        known.signed = match &known.signed {
            Some(signed) => signed.join(&again),
            None => Some(again.clone()),
        };
        Ok(again)
    }
}

/// Whether a version is one of those that a block has beside each other.
fn is_among(version: &CertifiedBlock, block: &CertifiedBlock) -> bool {
    let has = |one: &Sibling| block.siblings().iter().any(|other| other.dot == one.dot);
    version.siblings().iter().any(has)
}
