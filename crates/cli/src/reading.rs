//! What the reading commands share: a volume opened through the local node, and a path
//! in it.

use std::sync::Arc;

use atoll_dht::{Blocks, GetError};
use atoll_env::Env;
use atoll_vfs::FileKind;
use atoll_volume::format::Content;
use atoll_volume::owned::RootError;
use atoll_volume::owned::{Item, Listing, OpenError, ReadError, Snapshot, Volume, VolumeOptions};

use crate::address::Address;
use crate::connection;
use crate::failure::{Exit, Failure, TRY_AGAIN};
use crate::global::Global;
use crate::messages::note;
use crate::moment;
use crate::read_key::{self, Given};

/// The most links followed on the way to a file, as in Linux.
const MAX_LINKS: usize = 40;

/// A volume open for reading.
pub(crate) struct Reading {
    /// What was asked for.
    pub address: Address,
    /// Time and tasks.
    pub env: Env,
    /// The volume.
    pub volume: Arc<Volume>,
    /// Its newest version.
    pub snapshot: Arc<Snapshot>,
}

impl Reading {
    /// Opens the volume of `address` through the node of this directory.
    pub(crate) async fn open(
        global: &Global,
        address: &Address,
        given: &Given,
    ) -> Result<Reading, Failure> {
        let (env, client) = connection::to_node(global).await?;
        let options = VolumeOptions::default();
        Reading::through(env, client, address, given.key_for(address)?, options).await
    }

    /// Opens the volume of `address` through these blocks.
    pub(crate) async fn through(
        env: Env,
        blocks: Arc<dyn Blocks>,
        address: &Address,
        read_key: read_key::Found,
        options: VolumeOptions,
    ) -> Result<Reading, Failure> {
        let open = |read_key| {
            let at_unix_ms = address.at.map(|at| at.unix_ms);
            let options = VolumeOptions { read_key, at_unix_ms, ..options.clone() };
            Volume::open(env.clone(), blocks.clone(), address.volume.0, options)
        };
        let opened = match open(read_key.key).await {
            Err(OpenError::Root(RootError::NotEncrypted)) if read_key.optional => open(None).await,
            opened => opened,
        };
        let volume = opened.map_err(|error| open_failure(address, error))?;
        let snapshot = volume.snapshot().await;
        if let Some(reason) = volume.status().stale {
            note!("warning: {} may be out of date: {reason}", address.volume);
        }
        Ok(Reading { address: address.clone(), env, volume, snapshot })
    }

    /// What the address names; a link is not followed.
    pub(crate) async fn item(&self) -> Result<Item, Failure> {
        self.resolve(&self.address.path).await
    }

    async fn resolve(&self, path: &[Vec<u8>]) -> Result<Item, Failure> {
        let path = path.join(&b'/');
        self.snapshot.resolve(&path).await.map_err(|error| self.failure("read", &error))
    }

    /// What the address names, through links that stay within the volume.
    pub(crate) async fn follow(&self) -> Result<Item, Failure> {
        let mut rest: Vec<Vec<u8>> = self.address.path.iter().rev().cloned().collect();
        let mut at: Vec<Vec<u8>> = Vec::new();
        let mut links = 0;
        let mut item = self.snapshot.root();
        while let Some(name) = rest.pop() {
            if name == b".." {
                at.pop();
            } else {
                at.push(name);
            }
            item = self.resolve(&at).await?;
            let Content::Symlink(target) = &item.entry.content else { continue };
            links += 1;
            if target.starts_with(b"/") || links > MAX_LINKS {
                let why = if links > MAX_LINKS {
                    "too many symbolic links"
                } else {
                    "it is a symbolic link that leads out of the volume"
                };
                return Err(self.failed(Exit::Failed, "read").because(why));
            }
            at.pop();
            let names = target.split(|byte| *byte == b'/').rev();
            rest.extend(names.filter(|n| !n.is_empty() && *n != b".").map(<[u8]>::to_vec));
            if rest.is_empty() {
                // A link to ".": the directory it stands in.
                item = self.resolve(&at).await?;
            }
        }
        Ok(item)
    }

    /// Begins to list a directory.
    pub(crate) fn list(&self, directory: &Item) -> Result<Listing, Failure> {
        self.snapshot.list(directory).map_err(|error| self.failure("list", &error))
    }

    /// Fails unless `item` is a regular file.
    pub(crate) fn require_file(&self, item: &Item, verb: &str) -> Result<(), Failure> {
        match item.entry.content {
            Content::Regular { .. } => Ok(()),
            _ => {
                let why = format!("it is a {}", kind_name(item.entry.kind()));
                Err(self.failed(Exit::Failed, verb).because(why).advice("`atoll ls` lists it."))
            }
        }
    }

    /// The failure of `verb` on this address.
    pub(crate) fn failure(&self, verb: &str, error: &ReadError) -> Failure {
        match error {
            ReadError::NoSuchEntry { .. } => self.failed(Exit::NotFound, verb).because(error),
            ReadError::NotADirectory { .. }
            | ReadError::NotAFile { .. }
            | ReadError::GoesUp { .. } => self.failed(Exit::Failed, verb).because(error),
            ReadError::Fetch { source: GetError::Unavailable { .. }, .. } => {
                self.failed(Exit::Unavailable, verb).because(error).advice(TRY_AGAIN)
            }
            ReadError::Fetch {
                source: GetError::NotFound { .. } | GetError::Removed { .. },
                ..
            } => self.failed(Exit::Unavailable, verb).because(error).advice(
                "No node that can be reached has this block. If nodes are missing (`atoll \
                     status` says so), it comes back with them; if none is, when the volume is \
                     published again.",
            ),
            ReadError::Expired { .. } => self
                .failed(Exit::NotFound, verb)
                .because(error)
                .advice("Ask its publisher to run `atoll renew`, or to publish it again."),
            ReadError::Bad { .. } => self.failed(Exit::Failed, verb).because(error),
        }
    }

    fn failed(&self, exit: Exit, verb: &str) -> Failure {
        Failure::new(exit, format!("cannot {verb} {}", self.address))
    }
}

/// Why the volume of an address, or its state at a time, cannot be read.
pub(crate) fn open_failure(address: &Address, error: OpenError) -> Failure {
    let what = format!("cannot open {}", Address { path: Vec::new(), ..address.clone() });
    match error {
        OpenError::Gone(_) => Failure::new(Exit::NotFound, what).because(error).advice(
            "Ask its publisher to run `atoll renew`, or to publish it again; or the address is of \
             another network.",
        ),
        OpenError::Fetch(error) => Failure::get(what, &error),
        OpenError::NotKept { oldest_unix_ms } => {
            let oldest = moment::written(oldest_unix_ms);
            Failure::new(Exit::NotFound, what)
                .because(format!("{error}; the oldest is of {oldest}"))
        }
        OpenError::History(_) => Failure::new(Exit::Failed, what).because(error),
        OpenError::Removed => Failure::new(Exit::NotFound, what).because(error),
        OpenError::Root(RootError::Encrypted) => Failure::new(Exit::Usage, what)
            .because(error)
            .advice(match address.path.iter().any(|name| name.contains(&b'#')) {
                true => "The read key stands before the path: atoll:KEY#READKEY/PATH.",
                false => "The read key may also be in a file (--read-key) or in ATOLL_READ_KEY.",
            }),
        OpenError::Root(RootError::WrongReadKey) => Failure::new(Exit::Usage, what)
            .because(error)
            .advice("Copy the whole address again, as `atoll publish` printed it."),
        OpenError::Root(RootError::NotEncrypted) => Failure::new(Exit::Usage, what).because(error),
        OpenError::Root(RootError::Bad(_) | RootError::Shared) => {
            Failure::new(Exit::Failed, what).because(error)
        }
    }
}

/// What a kind of file is called.
pub(crate) fn kind_name(kind: FileKind) -> &'static str {
    match kind {
        FileKind::Regular => "file",
        FileKind::Directory => "directory",
        FileKind::Symlink => "symlink",
        FileKind::Fifo => "fifo",
        FileKind::Socket => "socket",
        FileKind::CharDevice => "character device",
        FileKind::BlockDevice => "block device",
    }
}
