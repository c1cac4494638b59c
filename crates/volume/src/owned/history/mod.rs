//! The history of a volume that is written through mounts: its old states.
//!
//! A root refers to a directory of them. A state's name there is its time, milliseconds since 1970
//! in 20 digits, and its file, which lies in its inode block, is the payload of the root of that
//! time without its own history and without who wrote the volume then. All below that root is
//! shared with the present tree as far as it is the same.
//!
//! A state is added when its root is replaced in another hour (of the policy's finest unit) than
//! it was put, and the same edit of the directory removes what the policy ([`Keep`]) does not keep: the state at
//! twelve o'clock is the last root before, and most flushes leave the history alone.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use atoll_key::BlockHash;
use atoll_vfs::FileTime;
use bytes::Bytes;
use futures_util::stream::{self, StreamExt, TryStreamExt};

use super::read::OpenError;
use super::root::{MountState, Root};
use crate::blocks::cache::BlockCache;
use crate::blocks::directory::leaf_at;
use crate::blocks::edit_directory::{Changes, edit_directory};
use crate::blocks::error::{BlockError, EditError};
use crate::blocks::pace::Wanted;
use crate::format::build::Sink;
use crate::format::inode::{Data, InodeBlock, Shape};
use crate::format::{Content, DirectoryEntry, DirectoryRef, FormatError, MIN_BLOCK_SIZE_LOG2};
use crate::keep::Keep;

/// The most states that a reader takes for a history. A writer removes the oldest beyond that.
pub const MAX_STATES: u64 = 8192;

/// States read at once.
const FETCHES: usize = 16;

const MODE: u32 = 0o444;

/// The mode of a state that a restore has replaced: it stays as long as an older one does.
const REPLACED_MODE: u32 = 0o1444;

/// About how long the block of a state is, bytes.
const STATE_BYTES: u64 = 512;

/// A state of a volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct State {
    /// When its tree was published, milliseconds since 1970.
    pub unix_ms: u64,
    /// Its root.
    pub root: Root,
}

/// Where a state's root is.
#[derive(Clone, Copy, Debug)]
struct Stored {
    inode: BlockHash,
    size_bytes: u64,
    is_replaced: bool,
}

/// What a root's history has, by time.
type Names = BTreeMap<u64, Stored>;

async fn names(cache: &Arc<BlockCache>, history: &DirectoryRef) -> Result<Names, BlockError> {
    let bad = BlockError::bad(history.hash.unwrap_or(BlockHash([0; 32])));
    if history.entries > MAX_STATES {
        return Err(bad(FormatError::BadReference("the history has too many states")));
    }
    let mut names = Names::new();
    while let Some((leaf, from)) = leaf_at(cache, history, names.len() as u64).await? {
        for entry in &leaf.entries()[from..] {
            let Some((unix_ms, stored)) = name_of(entry) else {
                return Err(bad(FormatError::BadReference("an entry of the history is no state")));
            };
            names.insert(unix_ms, stored);
        }
    }
    Ok(names)
}

fn name_of(entry: &DirectoryEntry) -> Option<(u64, Stored)> {
    let text = std::str::from_utf8(&entry.name).ok().filter(|text| text.len() == 20)?;
    let unix_ms = text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())??;
    let Content::Regular { size_bytes, inode: Some(inode), .. } = entry.content else {
        return None;
    };
    let is_replaced = entry.mode == REPLACED_MODE;
    (size_bytes <= 1 << MIN_BLOCK_SIZE_LOG2)
        .then_some((unix_ms, Stored { inode, size_bytes, is_replaced }))
}

fn name(unix_ms: u64) -> Bytes {
    Bytes::from(format!("{unix_ms:020}"))
}

async fn read(cache: &Arc<BlockCache>, unix_ms: u64, stored: Stored) -> Result<State, BlockError> {
    let bytes = cache.get(stored.inode, Wanted::Soon(STATE_BYTES)).await?;
    let decode = || {
        let inode = InodeBlock::decode(&bytes)?;
        match inode.data {
            Data::Inline(payload) if inode.shape.size_bytes == stored.size_bytes => {
                Root::decode(&payload)
            }
            _ => Err(FormatError::BadReference("the length of an old state is not what it says")),
        }
    };
    let root = decode().map_err(BlockError::bad(stored.inode))?;
    Ok(State { unix_ms, root })
}

/// The states in `directory` whose blocks `is_wanted`, the oldest first.
pub(super) async fn states_in(
    cache: &Arc<BlockCache>,
    directory: &DirectoryRef,
    is_wanted: impl Fn(&BlockHash) -> bool,
) -> Result<Vec<State>, BlockError> {
    let names = names(cache, directory).await?;
    let wanted = names.into_iter().filter(|(_, stored)| is_wanted(&stored.inode));
    let reads = wanted.map(|(unix_ms, stored)| read(cache, unix_ms, stored));
    stream::iter(reads).buffered(FETCHES).try_collect().await
}

/// The old states below `root`, the oldest first.
pub(super) async fn states(cache: &Arc<BlockCache>, root: &Root) -> Result<Vec<State>, BlockError> {
    states_in(cache, &root.mounted.history, |_| true).await
}

/// How long the root of a writer is kept that another one has taken over from, milliseconds: as long as its blocks would
/// stay that nobody renews. `volume recover` needs it.
const REPLACED_FOR_MS: u64 = 30 * 24 * 3600 * 1000;

/// The roots that were taken over from other writers, without those of long ago; some are `added` now.
pub(super) async fn next_replaced<S: Sink<EditError> + Send>(
    cache: &Arc<BlockCache>,
    replaced: &DirectoryRef,
    added: &[Root],
    now_unix_ms: u64,
    sink: &mut S,
) -> Result<DirectoryRef, EditError> {
    let names = names(cache, replaced).await?;
    let mut changes = Changes::new();
    for (unix_ms, _) in names.range(..now_unix_ms.saturating_sub(REPLACED_FOR_MS)) {
        changes.insert(name(*unix_ms), None);
    }
    let mut unix_ms = now_unix_ms;
    for root in added {
        while names.contains_key(&unix_ms) || changes.contains_key(&name(unix_ms)) {
            unix_ms += 1;
        }
        changes.insert(name(unix_ms), Some(entry(root, unix_ms, false, sink)?));
    }
    if changes.is_empty() {
        return Ok(*replaced);
    }
    edit_directory(cache, replaced, changes, sink).await
}

/// The newest state of `unix_ms` or before, the present one included.
pub(super) async fn state_at(
    cache: &Arc<BlockCache>,
    root: &Root,
    unix_ms: u64,
) -> Result<State, OpenError> {
    let unread = |error: BlockError| OpenError::History(error.at(b""));
    let names = names(cache, &root.mounted.history).await.map_err(unread)?;
    let present = root.published_unix_ms;
    let old = names.range(..=unix_ms).next_back();
    match old.filter(|(time, _)| **time > present || present > unix_ms) {
        Some((time, stored)) => read(cache, *time, *stored).await.map_err(unread),
        None if present <= unix_ms => Ok(State { unix_ms: present, root: root.clone() }),
        None => {
            let oldest = names.keys().next().copied();
            Err(OpenError::NotKept { oldest_unix_ms: oldest.unwrap_or(present) })
        }
    }
}

/// Why the history changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Reason {
    /// A flush replaces the root.
    Flush,
    /// A restore replaces the root.
    Restore,
    /// There is another policy.
    Policy,
}

/// The history of the root that follows `old` at `now`, under the policy `keep`.
pub(super) async fn next<S: Sink<EditError> + Send>(
    cache: &Arc<BlockCache>,
    old: &Root,
    keep: Keep,
    now_unix_ms: u64,
    reason: Reason,
    sink: &mut S,
) -> Result<DirectoryRef, EditError> {
    let history = &old.mounted.history;
    if keep == Keep::NONE {
        return Ok(DirectoryRef::default());
    }
    if reason == Reason::Flush && !keep.separates(old.published_unix_ms, now_unix_ms) {
        return Ok(*history);
    }
    let names = names(cache, history).await?;
    let mut times: BTreeSet<u64> = names.keys().copied().collect();
    let mut changes = Changes::new();
    let mut replaced: BTreeSet<u64> =
        names.iter().filter(|(_, stored)| stored.is_replaced).map(|(time, _)| *time).collect();
    if reason != Reason::Policy {
        let mut unix_ms = old.published_unix_ms;
        while !times.insert(unix_ms) {
            unix_ms += 1;
        }
        let is_replaced = reason == Reason::Restore;
        replaced.extend(is_replaced.then_some(unix_ms));
        changes.insert(name(unix_ms), Some(entry(old, unix_ms, is_replaced, sink)?));
    }
    let mut kept = keep.kept(&times, now_unix_ms);
    if let Some(oldest) = kept.first().copied() {
        kept.extend(replaced.range(oldest..));
    }
    while kept.len() as u64 > MAX_STATES {
        kept.pop_first();
    }
    for unix_ms in times.difference(&kept) {
        match names.contains_key(unix_ms) {
            true => changes.insert(name(*unix_ms), None),
            false => changes.remove(&name(*unix_ms)),
        };
    }
    edit_directory(cache, history, changes, sink).await
}

/// The entry of `root` as a state.
fn entry<S: Sink<EditError>>(
    root: &Root,
    unix_ms: u64,
    is_replaced: bool,
    sink: &mut S,
) -> Result<DirectoryEntry, EditError> {
    let mounted = MountState {
        writer: None,
        merged: Vec::new(),
        history: DirectoryRef::default(),
        replaced: DirectoryRef::default(),
        keep: Keep::default(),
        ..root.mounted.clone()
    };
    let payload = Bytes::from(Root { mounted, ..root.clone() }.encode());
    let shape = Shape::new(payload.len() as u64, MIN_BLOCK_SIZE_LOG2)?;
    let inode = sink.emit(InodeBlock { shape, data: Data::Inline(payload) }.encode())?;
    Ok(DirectoryEntry {
        name: name(unix_ms),
        mode: if is_replaced { REPLACED_MODE } else { MODE },
        mtime: FileTime::from_unix_ms(unix_ms),
        content: Content::Regular {
            size_bytes: shape.size_bytes,
            blocks_512: shape.size_bytes.div_ceil(512),
            inode: Some(inode),
        },
        xattrs: None,
        owner: None,
    })
}
