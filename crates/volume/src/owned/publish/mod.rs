//! Publishing a directory of this machine as a volume (CFS §3.1, §5.5).
//!
//! ```text
//! walk (1 thread) ─► files ─► read and hash (n threads) ─► outbox ─► renew, put (8 batches)
//!       └────────── directories, put together as their entries come ─┘
//! ```
//!
//! Files are streamed: no more than `max_in_flight_bytes` of blocks are read and not yet
//! acknowledged, whatever the size of the tree. The root is replaced when every other block is
//! acknowledged, so readers see the old tree or the new one.
//!
//! Only the upload is protocol and runs on the [`Env`]; reading the source is threads of
//! this machine.
//!
//! A file that has not changed since an earlier publish from this machine is not read
//! ([`stat_cache`]): its blocks are renewed by the hashes that are remembered. If the ring lacks one,
//! the source is walked again, and that file read.
//!
//! The tree may change meanwhile. A file that is gone when its turn comes is not in the volume. A
//! file that changes while it is read is read again; one that never stays the same, and (if
//! the options say so) one that the system refuses to read, keeps the version that the volume has
//! now ([`previous`]), so that a publish never removes a file that it could not read.

mod file;
mod previous;
mod report;
mod run;
mod source;
mod stat_cache;
mod upload;
mod walk;

use std::collections::BTreeSet;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;

use atoll_dht::{Blocks, GetError, PutError};
use atoll_env::{BoxFuture, Env};
use atoll_key::{BlockHash, ReadKey, SecretKey, SignedBlock, VolumeCipher, VolumeId};
use futures_util::future::{Either, select};
use globset::GlobSet;

use self::previous::Previous;
pub use self::report::{MAX_LISTED, Omission, OmissionList, Omissions};
use self::run::{Run, StopOnDrop};
use self::source::SourceDir;
use self::stat_cache::StatCache;
use self::upload::Uploaded;
use self::walk::count;
use super::progress::{Phase, Progress};
use super::{
    root::{self, Root},
    sealed_root::{self, RootError},
};
use crate::format::{MAX_BLOCK_SIZE_LOG2, MIN_BLOCK_SIZE_LOG2};

/// How often a newer root than we knew of may turn up while ours is put.
const MAX_ROOT_ATTEMPTS: u32 = 3;

/// How often the source is walked because the ring lacks blocks of files that were not read, before
/// all are read.
const MAX_UNREAD_PASSES: u32 = 3;

/// How to publish.
#[derive(Clone, Debug)]
pub struct PublishOptions {
    /// Size of a data block: a power of two, 4 KiB to 1 MiB.
    pub block_size_bytes: u32,
    /// Paths to leave out, relative to the source; see [`exclude_set`].
    pub exclude: GlobSet,
    /// A name for people, stored in the root block; at most 255 bytes.
    pub label: Option<String>,
    /// Go on past files that cannot be read: they keep their previous version, or are left out
    /// if they have none. Otherwise the publish fails.
    pub skip_unreadable: bool,
    /// Stay on the source's own file system.
    pub one_file_system: bool,
    /// Which directories are never published, whatever the other options say.
    pub filter: Arc<dyn SourceFilter>,
    /// Bytes of blocks read but not yet acknowledged by the ring.
    pub max_in_flight_bytes: usize,
    /// Threads that read and hash files.
    pub reader_threads: usize,
    /// Encrypts the volume, so that only holders of this key can read it.
    pub read_key: Option<ReadKey>,
    /// Let a volume that was published in the clear become an encrypted one, or one of
    /// another read key, or the other way round. Readers need another address then.
    pub convert: bool,
    /// The file that remembers what was read, so that unchanged files need not be read again. It is
    /// made if it is missing.
    pub stat_cache: Option<PathBuf>,
    /// Read all files, also those that seem unchanged.
    pub checksum: bool,
}

impl Default for PublishOptions {
    fn default() -> PublishOptions {
        PublishOptions {
            block_size_bytes: 64 << 10,
            exclude: GlobSet::empty(),
            label: None,
            skip_unreadable: false,
            one_file_system: false,
            filter: Arc::new(AllOfSource),
            max_in_flight_bytes: 32 << 20,
            reader_threads: 4,
            read_key: None,
            convert: false,
            stat_cache: None,
            checksum: false,
        }
    }
}

impl PublishOptions {
    fn block_size_log2(&self) -> u8 {
        self.block_size_bytes.trailing_zeros() as u8
    }
}

/// Patterns for [`PublishOptions::exclude`]: one without `/` matches a name anywhere in
/// the tree, one with `/` the path from the source's top. `*` stops at `/`, `**` does not.
pub fn exclude_set<S: AsRef<str>>(patterns: &[S]) -> Result<GlobSet, globset::Error> {
    let mut set = globset::GlobSetBuilder::new();
    for pattern in patterns {
        let pattern = pattern.as_ref().trim_end_matches('/');
        let anchored = match pattern.strip_prefix('/') {
            Some(rest) => rest.to_string(),
            None if pattern.contains('/') => pattern.to_string(),
            None => format!("**/{pattern}"),
        };
        set.add(globset::GlobBuilder::new(&anchored).literal_separator(true).build()?);
    }
    set.build()
}

/// Knows directories that must not be published. Called by several threads, for each directory
/// after its names are read and before anything in it is opened.
pub trait SourceFilter: std::fmt::Debug + Send + Sync + 'static {
    /// Why this directory is not published, for people; `None` if it may be.
    fn withholds(&self, directory: BorrowedFd<'_>) -> Option<String>;

    /// Why the file system of this number (`st_dev`) is not entered where it is mounted below
    /// the source; `None` if it may be. Asked before anything of it is opened.
    fn withholds_mount(&self, device: u64) -> Option<String>;

    /// Whether a file below `directory`, on its file system, has another time of status change after
    /// each change. If not, no file there is remembered as unchanged.
    fn trusts_times(&self, directory: BorrowedFd<'_>) -> bool {
        source::keeps_ctime(directory)
    }
}

/// Withholds nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct AllOfSource;

impl SourceFilter for AllOfSource {
    fn withholds(&self, _: BorrowedFd<'_>) -> Option<String> {
        None
    }

    fn withholds_mount(&self, _: u64) -> Option<String> {
        None
    }
}

/// Records every block of the tree, so that its lease can be extended later.
pub trait LeaseRecorder: Send + Sync + 'static {
    /// These blocks belong to the tree; called many times, at most 1,024 hashes a call,
    /// before the root block is replaced.
    fn record(&self, hashes: Vec<BlockHash>) -> BoxFuture<'static, Result<(), String>>;
}

/// Records nothing: the leases run out unless the tree is published again.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoLeaseRecorder;

impl LeaseRecorder for NoLeaseRecorder {
    fn record(&self, _: Vec<BlockHash>) -> BoxFuture<'static, Result<(), String>> {
        Box::pin(async { Ok(()) })
    }
}

/// What was published.
#[derive(Clone, Debug)]
pub struct Published {
    /// The volume; its address is `VolumeAddress(volume)`.
    pub volume: VolumeId,
    /// The root's version.
    pub version: u64,
    /// The ring had this very tree already; its root was left as it is.
    pub unchanged: bool,
    /// Regular files.
    pub files: u64,
    /// Directories, the top one included.
    pub dirs: u64,
    /// Symbolic links.
    pub symlinks: u64,
    /// FIFOs, sockets and devices, which a volume does not hold.
    pub special: u64,
    /// Files that the volume does not have as the source has them now.
    pub omissions: Omissions,
    /// Blocks of previous versions that are in this one and that the ring has lost.
    pub lost_blocks: u64,
    /// Files that had not changed since an earlier publish and were not read.
    pub unread_files: u64,
    /// Lengths of all files together.
    pub bytes: u64,
    /// Blocks of the tree (the root not counted).
    pub blocks: u64,
    /// Blocks of them the ring lacked.
    pub new_blocks: u64,
    /// Bytes of those.
    pub new_bytes: u64,
}

/// Why a tree was not published. The ring's root is then the old one.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// An option is out of bounds.
    #[error("{0}")]
    Options(String),
    /// A file or directory of the source cannot be read.
    #[error("cannot read {}: {reason}", path.display())]
    Source {
        /// Which.
        path: PathBuf,
        /// What the system said.
        reason: String,
    },
    /// The source is a directory that is never published.
    #[error("{} is not published: {reason}", path.display())]
    Withheld {
        /// Which.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The previous version of a file that cannot be read now could not be fetched.
    #[error("{path} cannot be read, and its previous version is not at hand: {source}")]
    Previous {
        /// Which, relative to the source.
        path: String,
        /// What the ring said.
        source: GetError,
    },
    /// The ring has the volume published another way, and `convert` is not set.
    #[error("the volume is published {present} now; this would publish it {asked}")]
    Converts {
        /// As the ring has it.
        present: Visibility,
        /// As it would be.
        asked: Visibility,
    },
    /// The volume is written through mounts: a publish would replace what is in it.
    #[error("the volume is written through mounts, and a publish would replace all that is in it")]
    Mounted,
    /// The ring did not take blocks.
    #[error("{0}")]
    Put(#[from] PutError),
    /// The block list could not be recorded.
    #[error("the blocks' leases cannot be kept: {0}")]
    Record(String),
    /// The threads that read the source ended before their work (a bug of this program).
    #[error("the work was stopped before its end")]
    Stopped,
}

impl PublishError {
    /// The same, with a path that leads to the file from where the publish was started.
    fn within(mut self, source: &Path) -> PublishError {
        if let PublishError::Source { path, .. } | PublishError::Withheld { path, .. } = &mut self {
            *path = source.components().chain(path.components()).collect();
        }
        self
    }
}

/// The readers of a published volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Visibility {
    /// Everybody who has the volume's address.
    Plain,
    /// Everybody who has the read key as well.
    Encrypted,
    /// Everybody who has another read key.
    OtherReadKey,
}

impl std::fmt::Display for Visibility {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Visibility::Plain => "in the clear",
            Visibility::Encrypted => "encrypted",
            Visibility::OtherReadKey => "encrypted with another read key",
        })
    }
}

impl Visibility {
    /// How the ring has the volume; `None` if it has none of this name, or nonsense.
    /// Without a read key, an encrypted one is [`Visibility::Encrypted`].
    pub async fn of(
        blocks: &Arc<dyn Blocks>,
        volume: VolumeId,
        read_key: Option<&ReadKey>,
    ) -> Result<Option<Visibility>, GetError> {
        let cipher = read_key.map(|key| VolumeCipher::new(key, &volume));
        match blocks.get_signed(volume.root_key()).await {
            Ok(root) => Ok(Visibility::of_root(&root, cipher.as_ref())),
            Err(GetError::NotFound { .. } | GetError::Removed { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn of_root(root: &SignedBlock, cipher: Option<&VolumeCipher>) -> Option<Visibility> {
        match sealed_root::decode(&root.payload, cipher) {
            Ok(_) if cipher.is_some() => Some(Visibility::Encrypted),
            Ok(_) | Err(RootError::NotEncrypted) => Some(Visibility::Plain),
            Err(RootError::Encrypted) => Some(Visibility::Encrypted),
            Err(RootError::WrongReadKey) => Some(Visibility::OtherReadKey),
            // Of a later program, or nonsense: nothing that could be kept as it is.
            Err(RootError::Bad(_) | RootError::Shared) => None,
        }
    }
}

/// Publishes the directory `source` as the volume of `secret`, or as its next version.
///
/// When this returns, the ring has acknowledged every block, and after that the root.
/// Dropping the future stops the work; the ring's root is then the old one. A symbolic
/// link as `source` is followed, none below it is.
pub async fn publish(
    env: Env,
    blocks: Arc<dyn Blocks>,
    source: &Path,
    secret: &SecretKey,
    mut options: PublishOptions,
    progress: Arc<dyn Progress>,
    recorder: Arc<dyn LeaseRecorder>,
) -> Result<Published, PublishError> {
    check_options(&options)?;
    let unreadable = |reason: String| PublishError::Source { path: source.to_path_buf(), reason };
    let filter = options.filter.clone();
    let open = || SourceDir::top(source, &*filter).map_err(|error| unreadable(error.to_string()));
    let cipher = options.read_key.as_ref().map(|key| VolumeCipher::new(key, &secret.volume_id()));
    // Before anything is uploaded. A question that fails now is asked again at the end.
    let root = Replaced { secret, cipher: cipher.as_ref(), convert: options.convert };
    let present = blocks.get_signed(secret.volume_id().root_key()).await;
    if let Ok(present) = &present {
        root.check(present)?;
    }
    let mut lost = BTreeSet::new();
    let mut uploaded = Uploaded::default();
    let mut passes = 0;
    let (run, (top, omissions)) = loop {
        // A node that denies another block each time must not make this endless.
        passes += 1;
        options.checksum |= passes > MAX_UNREAD_PASSES;
        uploaded.lost_blocks = 0;
        progress.phase(Phase::Upload);
        let cache = open_stat_cache(&options, &secret.volume_id(), cipher.as_ref(), &lost);
        let (env, present) = (env.clone(), present.clone());
        let previous = Previous::new(&env, &blocks, secret.volume_id(), cipher.as_ref(), present);
        let (outbox, inbox) = futures_channel::mpsc::unbounded();
        let (asks, asked) = futures_channel::mpsc::unbounded();
        let cipher = cipher.clone();
        let run = Run::new(env, options.clone(), cache, cipher, progress.clone(), outbox, asks);
        let run = Arc::new(run);
        let _stopper = StopOnDrop(run.clone());
        walk::start_scan(&run, open()?).map_err(|error| unreadable(error.to_string()))?;
        walk::start(&run, open()?).map_err(|error| unreadable(error.to_string()))?;
        uploaded += {
            let uploading = pin!(upload::upload(&run, &blocks, &recorder, inbox));
            let answering = pin!(previous.serve(run.clone(), asked));
            // When everything is uploaded, nothing is left to be answered.
            match select(uploading, answering).await {
                Either::Left((uploaded, _)) => uploaded?,
                Either::Right(((), uploading)) => uploading.await?,
            }
        };
        let outcome = run.outcome().map_err(|error| error.within(source))?;
        let lost_now = run.take_lost();
        if lost_now.is_empty() {
            run.remember(true);
            break (run.clone(), outcome);
        }
        lost.extend(lost_now);
    };

    let tallies = &run.tallies;
    let tree = Root {
        block_size_log2: options.block_size_log2(),
        mode: top.mode,
        mtime: top.mtime,
        published_unix_ms: env.unix_ms(),
        files: count(&tallies.files),
        dirs: count(&tallies.dirs),
        symlinks: count(&tallies.symlinks),
        bytes: count(&tallies.bytes),
        directory: top.directory,
        label: run.options.label.clone(),
        xattrs: top.xattrs,
        mounted: root::MountState::default(),
    };
    progress.phase(Phase::Root);
    let (version, unchanged) = root.replace(&blocks, &tree).await?;
    Ok(Published {
        volume: secret.volume_id(),
        version,
        unchanged,
        files: tree.files,
        dirs: tree.dirs,
        symlinks: tree.symlinks,
        special: count(&tallies.special),
        omissions,
        lost_blocks: uploaded.lost_blocks,
        unread_files: count(&tallies.unread_files),
        bytes: tree.bytes,
        blocks: count(&tallies.blocks),
        new_blocks: uploaded.new_blocks,
        new_bytes: uploaded.new_bytes,
    })
}

/// What is remembered of the source, without files that need one of the blocks `lost`. A publish does not fail for
/// lack of it.
fn open_stat_cache(
    options: &PublishOptions,
    volume: &VolumeId,
    cipher: Option<&VolumeCipher>,
    lost: &BTreeSet<BlockHash>,
) -> Option<StatCache> {
    let path = options.stat_cache.as_ref()?;
    // The same bytes are other blocks under another read key or block size.
    let sealed = cipher.map_or_else(Vec::new, |cipher| cipher.seal(b""));
    let of = BlockHash::of(&[&volume.0[..], &sealed, &[options.block_size_log2()]].concat());
    match StatCache::open(path, of, lost.clone()) {
        Ok(Some(cache)) => return Some(cache),
        Ok(None) => tracing::warn!("another publish of this volume runs: all files are read"),
        Err(error) => tracing::warn!("all files are read: {}: {error}", path.display()),
    }
    None
}

fn check_options(options: &PublishOptions) -> Result<(), PublishError> {
    let size = options.block_size_bytes;
    let allowed = (1 << MIN_BLOCK_SIZE_LOG2)..=(1 << MAX_BLOCK_SIZE_LOG2);
    if !size.is_power_of_two() || !allowed.contains(&size) {
        return Err(PublishError::Options(format!(
            "a data block cannot have {size} bytes: it must be a power of two from 4096 to 1048576"
        )));
    }
    if options.label.as_ref().is_some_and(|l| l.is_empty() || l.len() > root::MAX_LABEL_BYTES) {
        return Err(PublishError::Options("a volume's label has 1 to 255 bytes".into()));
    }
    if options.reader_threads == 0 {
        return Err(PublishError::Options("at least one thread must read".into()));
    }
    Ok(())
}

/// The root that takes the place of the ring's.
struct Replaced<'a> {
    secret: &'a SecretKey,
    cipher: Option<&'a VolumeCipher>,
    convert: bool,
}

impl Replaced<'_> {
    /// Fails if `present` is published another way, unless that is to change, or written through
    /// mounts.
    fn check(&self, present: &SignedBlock) -> Result<(), PublishError> {
        let root = sealed_root::decode(&present.payload, self.cipher);
        if root.is_ok_and(|root| root.mounted.owner.is_some()) {
            return Err(PublishError::Mounted);
        }
        let asked = match self.cipher {
            Some(_) => Visibility::Encrypted,
            None => Visibility::Plain,
        };
        match Visibility::of_root(present, self.cipher) {
            Some(present) if present != asked && !self.convert => {
                Err(PublishError::Converts { present, asked })
            }
            _ => Ok(()),
        }
    }

    /// Puts the root with a version above the ring's, unless the ring has this tree
    /// already. Returns the version, and whether it was there.
    ///
    /// The ring's answer decides: where some of its nodes cannot be asked for the present
    /// root, the clock gives the version. If that is refused, there is a newer root than was
    /// known: it is looked at as any other before it is replaced.
    async fn replace(
        &self,
        blocks: &Arc<dyn Blocks>,
        tree: &Root,
    ) -> Result<(u64, bool), PublishError> {
        let mut above = 0;
        let present = blocks.get_signed(self.secret.volume_id().root_key()).await;
        if let Err(GetError::Removed { version, .. }) = present {
            above = version;
        }
        if let Ok(present) = present {
            self.check(&present)?;
            above = present.version;
            if let Ok(mut old) = sealed_root::decode(&present.payload, self.cipher) {
                old.published_unix_ms = tree.published_unix_ms;
                if old == *tree {
                    return Ok((present.version, true));
                }
            }
        }
        let payload = sealed_root::encode(tree, self.cipher);
        for attempt in 0.. {
            let version = tree.published_unix_ms.max(above.saturating_add(1));
            let block = SignedBlock::sign(self.secret, b"", version, &payload);
            match blocks.put_signed(block).await {
                Ok(()) => return Ok((version, false)),
                Err(PutError::Superseded { held, .. }) if attempt < MAX_ROOT_ATTEMPTS => {
                    let present = blocks.get_signed(self.secret.volume_id().root_key()).await;
                    let unreadable = |error: GetError| {
                        PutError::Unavailable(format!("its newer root cannot be read: {error}"))
                    };
                    above = match present {
                        Ok(present) => {
                            self.check(&present)?;
                            present.version.max(held)
                        }
                        Err(GetError::Removed { version, .. }) => version.max(held),
                        Err(error) => return Err(unreadable(error).into()),
                    };
                }
                Err(error) => return Err(error.into()),
            }
        }
        unreachable!("the last attempt returns")
    }
}
