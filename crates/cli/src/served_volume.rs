//! A volume that this process serves, to the kernel (`atoll mount`) or to clients of NFS (`atoll nfs`): how it is opened, and
//! how it ends.
//!
//! One of this node's own, by its name, is read-write; any other, by its address, read-only. A shared volume, by either, is
//! read-write for its members. What was written and is not on the ring when the front end has ended is brought there by
//! [`ServedVolume::end`].

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use atoll_dht::Blocks;
use atoll_env::Env;
use atoll_key::{SecretKey, UserAddress, VolumeId};
use atoll_node::{Client, make_private_dir};
use atoll_pool::PoolFs;
use atoll_pool::disk::directory::Directory;
use atoll_pool::remote::SpreadFs;
use atoll_upkeep::shared_spool::{self, Opened};
use atoll_vfs::FileSystem;
use atoll_volume::HandleTable;
use atoll_volume::keep::Keep;
use atoll_volume::owned::{VolumeFs, VolumeOptions, WritableFs, WriteOptions};
use atoll_volume::shared::access::{NotReader, groups};
use atoll_volume::shared::{
    Consistency, OpenError, PastFs, SharedFs, SharedOptions, Spooled, access,
};
use clap::ValueEnum;

use crate::address::Address;
use crate::connection;
use crate::failure::{Exit, Failure, TRY_AGAIN};
use crate::global::Global;
use crate::moment::{self, Moment};
use crate::output::hex;
use crate::own_volume;
use crate::pool::{self, records::PoolRecord};
use crate::read_key::{Found, Given};
use crate::reading::Reading;
use crate::shared_volume;
use crate::spool;
use crate::units;
use crate::user::{self, Joined};
use crate::volume_target::Target;

/// How a volume is served, whatever the front end.
#[derive(clap::Args, Debug)]
pub(crate) struct VolumeArgs {
    /// How old the shown version may be before the ring is asked for a newer one
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = units::parse_duration)]
    max_age: Duration,

    /// Show everything as yours, whoever owns it where it was written (only with an address)
    #[arg(long)]
    map_owners: bool,

    /// Write although another mount does, which then changes nothing any more (only with a name)
    #[arg(long)]
    take_over: bool,

    /// close(2) waits until the ring has what was written (only with a name)
    #[arg(long)]
    sync: bool,

    /// Disk for what the ring does not have yet, at least 1MiB [default: 1GiB]
    #[arg(long, value_name = "SIZE", value_parser = units::parse_size)]
    spool: Option<u64>,

    /// The consistency model by which files of a shared volume are opened [default: cto]
    #[arg(long, value_name = "MODEL", value_enum)]
    consistency: Option<ConsistencyModel>,

    /// Which old states are kept from now on, as `atoll volume create` says it (only with a name). Other mounts
    /// of a shared volume go by it when they are mounted anew
    #[arg(long, value_name = "COUNTS")]
    keep: Option<Keep>,

    /// Memory for blocks that may be read again [default: 32MiB]
    #[arg(long, value_name = "SIZE", value_parser = units::parse_size)]
    cache: Option<u64>,
}

/// When a mount of a shared volume shows what others have written (Pastis §3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum ConsistencyModel {
    /// Close-to-open
    Cto,
    /// Read-your-writes
    Ryw,
}

/// The least that `--spool` takes.
const MIN_SPOOL_BYTES: u64 = 1 << 20;

impl VolumeArgs {
    /// Whether they make sense for this volume; `what` says what fails otherwise.
    pub(crate) fn check(&self, target: &Target, what: &str) -> Result<(), Failure> {
        match target {
            Target::Address(address) if !address.path.is_empty() => {
                Err(Failure::new(Exit::Usage, what)
                    .because("only whole volumes can be mounted")
                    .advice(format!("Mount {} and look below it.", address.volume)))
            }
            Target::Name(_, None) if self.map_owners => Err(Failure::new(Exit::Usage, what)
                .because("a mount that writes keeps owners; --map-owners goes with an address")),
            Target::Name(_, None) if self.spool.is_some_and(|bytes| bytes < MIN_SPOOL_BYTES) => {
                Err(Failure::new(Exit::Usage, what)
                    .because("a spool of less than 1MiB is full at once")
                    .advice("Leave --spool out, or give it more."))
            }
            Target::Address(_) | Target::Name(_, Some(_))
                if self.take_over || self.keep.is_some() || self.sync || self.spool.is_some() =>
            {
                Err(Failure::new(Exit::Usage, what).because(
                    "a mount of an address or of an old state writes nothing; --take-over, \
                     --keep, --sync and --spool go with a name",
                ))
            }
            _ => Ok(()),
        }
    }

    /// Whether any was given.
    pub(crate) fn is_any_given(&self) -> bool {
        self.map_owners
            || self.take_over
            || self.sync
            || self.spool.is_some()
            || self.consistency.is_some()
            || self.keep.is_some()
            || self.cache.is_some()
    }

    /// The same arguments for the process that serves in the background.
    pub(crate) fn to_arguments(&self) -> Vec<String> {
        let mut arguments =
            vec!["--max-age".to_owned(), humantime::format_duration(self.max_age).to_string()];
        let flags = [
            (self.take_over, "--take-over"),
            (self.map_owners, "--map-owners"),
            (self.sync, "--sync"),
        ];
        arguments
            .extend(flags.iter().filter(|(is_set, _)| *is_set).map(|(_, flag)| (*flag).into()));
        let model = self.consistency.and_then(|model| model.to_possible_value());
        let values = [
            ("--consistency", model.map(|model| model.get_name().to_owned())),
            ("--spool", self.spool.map(|bytes| bytes.to_string())),
            ("--keep", self.keep.map(|keep| keep.to_string())),
            ("--cache", self.cache.map(|bytes| bytes.to_string())),
        ];
        for (option, value) in values {
            arguments.extend(value.into_iter().flat_map(|value| [option.to_owned(), value]));
        }
        arguments
    }

    /// That an option is for shared volumes.
    fn check_not_shared(&self, what: &str) -> Result<(), Failure> {
        match self.consistency {
            None => Ok(()),
            Some(_) => Err(Failure::new(Exit::Usage, what)
                .because("--consistency goes with a shared volume, and this is none")),
        }
    }
}

/// A volume that is open to be served.
pub(crate) struct ServedVolume {
    /// Its files.
    pub(crate) fs: Arc<dyn FileSystem>,
    /// Whether all changes are to be refused.
    pub(crate) read_only: bool,
    /// What it is called in the kernel's table of mounts.
    pub(crate) fs_name: String,
    /// Tells it apart from every other volume and pool.
    pub(crate) identity: Vec<u8>,
    ending: VolumeEnding,
    what: String,
}

/// What is to be done when nobody uses the volume any more.
enum VolumeEnding {
    /// Nothing was written.
    Nothing,
    Pool(PoolFs<Directory>),
    RemotePool(Arc<SpreadFs>),
    Own(WritableFs),
    Shared {
        fs: SharedFs,
        spool: Option<PathBuf>,
        /// The node's directory, and what was served.
        node: PathBuf,
        name: String,
    },
}

impl ServedVolume {
    /// Opens a volume through the local node; its file handles last if there is a directory for where files are (`handles`).
    /// `what` says what has failed otherwise.
    pub(crate) async fn open(
        target: &Target,
        args: &VolumeArgs,
        read_key: &Given,
        (global, handles): (&Global, Option<&Path>),
        what: &str,
    ) -> Result<ServedVolume, Failure> {
        if let Target::Name(name, at) = target
            && let Some(record) = pool::records::find(&global.dir()?, name, what)?
        {
            return pool_of(&record, (name, at.is_some()), args, global, what).await;
        }
        let opening = VolumeOpening { target, args, global, handles, what: what.to_owned() };
        match target {
            Target::Address(address) => {
                let read_key = read_key.key_for(address)?;
                let (env, client) = connection::for_mount(global).await?;
                if is_shared(&client, address.volume.0).await {
                    let user = user::key(&global.dir()?)?;
                    let fs_name = address.to_string();
                    let volume = Shared { volume: address.volume.0, at: address.at, fs_name };
                    return opening.shared((env, client), volume, user).await;
                }
                opening.read_only(env, client, address, read_key).await
            }
            Target::Name(name, Some(at)) => {
                let (env, client) = connection::for_mount(global).await?;
                if let Some((volume, user)) = shared_of_name(&client, name, global, what).await? {
                    let fs_name = format!("{}@{at}", own_volume::fs_name(name, volume));
                    let volume = Shared { volume, at: Some(*at), fs_name };
                    return opening.shared((env, client), volume, user).await;
                }
                let named = own_volume::address(&client, name, Some(*at), what).await;
                let (address, read_key) = named?;
                opening.read_only(env, client, &address, read_key).await
            }
            Target::Name(name, None) => opening.own(name).await,
        }
    }

    /// Brings what was written to the ring. Called once no call is made any more.
    pub(crate) async fn end(self) -> Result<(), Failure> {
        let what = &self.what;
        let (fs, spool, node, name) = match self.ending {
            VolumeEnding::Nothing => return Ok(()),
            VolumeEnding::Pool(fs) => {
                return fs.end().await.map_err(|errno| {
                    Failure::new(Exit::Failed, format!("{what}: its disk was not synced"))
                        .because(errno)
                });
            }
            VolumeEnding::RemotePool(fs) => {
                return fs.sync().await.map_err(|errno| {
                    let lost = format!("{what}: what was written last may not be durable");
                    Failure::new(Exit::Unavailable, lost).because(errno)
                });
            }
            VolumeEnding::Own(fs) => return own_volume::end(&fs, what).await,
            VolumeEnding::Shared { fs, spool, node, name } => (fs, spool, node, name),
        };
        let ended = own_volume::until_on_ring(async || fs.end().await, |_| false).await;
        let ended = ended.map_err(|error| {
            let lost = format!("{what}: what was written last is lost");
            Failure::new(Exit::Unavailable, lost).because(error)
        });
        let left = fs.spooled();
        if let Some(path) = &spool {
            let refused = left.as_ref().and_then(|left| left.refused.as_deref());
            shared_spool::note_refused(path, refused);
        }
        if let Some(Spooled { why, .. }) = left {
            let told = spool::describe_shared(&shared_spool::pending_of(&node, &name));
            tracing::warn!("{} {why}", told.unwrap_or_default());
        }
        ended
    }
}

/// Opens a pool: of one, which needs no node, or of several, which the node serves.
async fn pool_of(
    record: &PoolRecord,
    (name, is_past): (&str, bool),
    args: &VolumeArgs,
    global: &Global,
    what: &str,
) -> Result<ServedVolume, Failure> {
    let refused = |why| Err(Failure::new(Exit::Usage, what).because(why));
    if is_past {
        return refused("it is a pool, which keeps no old states");
    }
    if args.is_any_given() {
        return refused("it is a pool; options of volumes mean nothing to it");
    }
    if record.group.is_some() {
        let fs = Arc::new(pool::begin_remote((name, record), global, what).await?);
        return Ok(ServedVolume {
            fs: fs.clone(),
            read_only: false,
            fs_name: pool::source(name),
            identity: record.pool_id().unwrap_or_default().to_vec(),
            ending: VolumeEnding::RemotePool(fs),
            what: what.to_owned(),
        });
    }
    let fs = pool::open(record, what).await?;
    Ok(ServedVolume {
        fs: Arc::new(fs.clone()),
        read_only: false,
        fs_name: pool::source(name),
        identity: fs.settings().pool.to_vec(),
        ending: VolumeEnding::Pool(fs),
        what: what.to_owned(),
    })
}

/// A shared volume that is to be served.
struct Shared {
    volume: VolumeId,
    /// As it was then.
    at: Option<Moment>,
    fs_name: String,
}

/// A volume that is being opened.
struct VolumeOpening<'a> {
    target: &'a Target,
    args: &'a VolumeArgs,
    global: &'a Global,
    handles: Option<&'a Path>,
    what: String,
}

impl VolumeOpening<'_> {
    /// Where files are by their handles, of one view of a volume.
    fn handle_table(&self, view: &str) -> Result<Option<Arc<HandleTable>>, Failure> {
        let Some(directory) = self.handles else { return Ok(None) };
        let failed =
            |error: &dyn fmt::Display| Failure::new(Exit::Failed, &self.what).because(error);
        make_private_dir(directory).map_err(|error| failed(&error))?;
        let path = directory.join(view);
        let table = HandleTable::open(&path);
        let table = table.map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => {
                failed(&"another server serves it").advice("`atoll nfs` lists servers.")
            }
            _ => failed(&format!("{}: {error}", path.display())),
        })?;
        Ok(Some(Arc::new(table)))
    }

    /// A volume that is not written.
    async fn read_only(
        self,
        env: Env,
        client: Arc<Client>,
        address: &Address,
        read_key: Found,
    ) -> Result<ServedVolume, Failure> {
        let at = address.at.map_or("now".to_owned(), |at| at.unix_ms.to_string());
        let by = if matches!(self.target, Target::Name(..)) { "name" } else { "address" };
        let table = self.handle_table(&format!("{}-{by}-{at}", hex(&address.volume.0.0)))?;
        let VolumeOpening { args, what, .. } = self;
        args.check_not_shared(&what)?;
        let mut options = VolumeOptions { max_age: args.max_age, ..VolumeOptions::default() };
        if let Some(bytes) = args.cache {
            options.cache_bytes = bytes;
        }
        let reading = Reading::through(env, client, address, read_key, options).await?;
        let (uid, gid) = own_volume::owner();
        let fs = match args.map_owners {
            true => VolumeFs::with_one_owner(reading.env, reading.volume, uid, gid),
            false => VolumeFs::new(reading.env, reading.volume, uid, gid),
        };
        let fs = match table {
            Some(table) => fs.with_handles(table),
            None => fs,
        };
        Ok(ServedVolume {
            fs: Arc::new(fs),
            read_only: true,
            fs_name: address.to_string(),
            identity: address.volume.0.0.to_vec(),
            ending: VolumeEnding::Nothing,
            what,
        })
    }

    /// One of this node's own volumes, read-write.
    async fn own(self, name: &str) -> Result<ServedVolume, Failure> {
        let VolumeOpening { args, global, .. } = self;
        let (env, client) = connection::for_mount(global).await?;
        let dir = global.dir()?;
        if let Some((volume, user)) = shared_of_name(&client, name, global, &self.what).await? {
            if user::joined(&dir, name)?.is_none() {
                own_volume::find(&client, name, &self.what).await?;
            }
            if let Some(keep) = args.keep {
                if user::joined(&dir, name)?.is_some() {
                    return Err(Failure::new(Exit::Usage, self.what).because(
                        "--keep of a shared volume is said on the node that has made it",
                    ));
                }
                keep_from_now_on(&env, &client, (name, keep), &self.what).await?;
            }
            let fs_name = own_volume::fs_name(name, volume);
            let volume = Shared { volume, at: None, fs_name };
            return self.shared((env, client), volume, user).await;
        }
        let volume = own_volume::find(&client, name, &self.what).await?;
        args.check_not_shared(&self.what)?;
        let spool = spool::open(&dir, name, &self.what)?;
        let Some(spool) = spool else {
            return Err(spool::in_use(&self.what)
                .advice("`atoll unmount` ends a mount, `atoll nfs --stop` a server."));
        };
        let handles = self.handle_table(&hex(&volume.key.volume_id().0))?;
        let what = self.what;
        let mut options = WriteOptions {
            read_key: client.read_key(name).await.map_err(connection::failure)?,
            owner: own_volume::owner(),
            take_over: args.take_over,
            sync: args.sync,
            keep: args.keep,
            handles,
            ..WriteOptions::default()
        };
        if let Some(bytes) = args.spool {
            options.max_spool_bytes = bytes;
        }
        if let Some(bytes) = args.cache {
            options.cache_bytes = bytes;
        }
        let keeper = Arc::new(own_volume::KeepVersions::new(client.clone(), name));
        let key = volume.key.clone();
        let fs = WritableFs::open(env, client.clone(), key, options, keeper, Some(spool)).await;
        let fs = fs.map_err(|error| own_volume::failure(&what, error))?;
        // A move marks the volume before it looks for a writer: one of the two sees the other.
        if let Err(error) = own_volume::find(&client, name, &what).await {
            return own_volume::end(&fs, &what).await.and(Err(error));
        }
        let volume = volume.key.volume_id();
        Ok(ServedVolume {
            fs: Arc::new(fs.clone()),
            read_only: false,
            fs_name: own_volume::fs_name(name, volume),
            identity: volume.0.to_vec(),
            ending: VolumeEnding::Own(fs),
            what,
        })
    }

    /// A shared volume, read-only if there is no key of a user.
    async fn shared(
        self,
        (env, client): (Env, Arc<Client>),
        Shared { volume, at, fs_name }: Shared,
        user: Option<SecretKey>,
    ) -> Result<ServedVolume, Failure> {
        let VolumeOpening { target, args, global, what, .. } = self;
        let is_of_one = args.take_over || args.sync || args.map_owners;
        if is_of_one {
            return Err(Failure::new(Exit::Usage, what).because(
                "it is a shared volume; --take-over, --sync and --map-owners go with volumes that \
                 one mount writes",
            ));
        }
        let consistency = match args.consistency {
            Some(ConsistencyModel::Ryw) => Consistency::ReadYourWrites,
            Some(ConsistencyModel::Cto) | None => Consistency::CloseToOpen,
        };
        let mut options = SharedOptions { consistency, ..SharedOptions::default() };
        if let Some(bytes) = args.cache {
            options.cache_bytes = bytes;
        }
        if let Some(bytes) = args.spool {
            options.max_spool_bytes = bytes;
        }
        let who = user.as_ref().map(|user| UserAddress(user.user_id()));
        let node = global.dir()?;
        let name = target.to_string();
        let spool = match &user {
            // Nothing is written of a state of the past.
            Some(user) if at.is_none() => {
                spool::open_shared(&node, (volume, user.user_id()), &name, &what)?
            }
            _ => None,
        };
        let spool_path = spool.as_ref().map(|spool| spool.path.clone());
        let fs = match (spool, user) {
            (Some(Opened { directory, .. }), Some(user)) => {
                SharedFs::open_spooled(env, client, (volume, user), options, directory).await
            }
            (_, user) => SharedFs::open(env, client, volume, user, options).await,
        };
        let fs = fs.map_err(|error| match error {
            OpenError::Get(error) => Failure::get(&what, &error),
            OpenError::NotReader(why) => not_reader(&what, why, who),
            error => Failure::new(Exit::Failed, &what).because(error),
        })?;
        let then = match at {
            None => None,
            Some(at) => Some(state_at(&fs, at, &what).await?),
        };
        // Whoever may not write the root directory may have been granted a part of it, or be granted one later.
        let read_only = then.is_some() || who.is_none();
        let shown: Arc<dyn FileSystem> = match then {
            None => Arc::new(fs.clone()),
            Some(then) => Arc::new(then),
        };
        let ending = VolumeEnding::Shared { fs, spool: spool_path, node, name };
        Ok(ServedVolume {
            fs: shown,
            read_only,
            fs_name,
            identity: volume.0.to_vec(),
            ending,
            what,
        })
    }
}

/// Whether the ring says that a volume is a shared one. What it cannot say, whoever opens it is told.
async fn is_shared(client: &Arc<Client>, volume: VolumeId) -> bool {
    let root = client.get_signed(volume.root_key()).await;
    root.is_ok_and(|root| access::is_shared(&root.payload))
}

/// The shared volume that a name means, and the key that this node's user has for it.
async fn shared_of_name(
    client: &Arc<Client>,
    name: &str,
    global: &Global,
    what: &str,
) -> Result<Option<(VolumeId, Option<SecretKey>)>, Failure> {
    let dir = global.dir()?;
    if let Some(Joined { volume, user, .. }) = user::joined(&dir, name)? {
        return Ok(Some((volume, Some(user))));
    }
    let id = own_volume::address(client, name, None, what).await?.0.volume.0;
    Ok(match is_shared(client, id).await {
        true => Some((id, user::key(&dir)?)),
        false => None,
    })
}

/// A shared volume as it was.
async fn state_at(fs: &SharedFs, at: Moment, what: &str) -> Result<PastFs, Failure> {
    match fs.at(at.after_ms()).await {
        Ok(Some(then)) => Ok(then),
        Ok(None) => {
            let states = fs.states();
            let kept = states.first().map(|oldest| moment::written(*oldest));
            let why = kept.map_or("it keeps no old states".to_owned(), |oldest| {
                format!("{}; the oldest state is of {oldest}", at.why_nothing_is_kept())
            });
            Err(Failure::new(Exit::NotFound, what).because(why))
        }
        Err(why) => Err(Failure::new(Exit::Failed, what).because(why)),
    }
}

/// Changes which old versions of a shared volume are kept.
async fn keep_from_now_on(
    env: &Env,
    client: &Arc<Client>,
    (name, keep): (&str, Keep),
    what: &str,
) -> Result<(), Failure> {
    let failed = |error| shared_volume::failure(what, error);
    let owned = shared_volume::owned(client.clone(), name, what).await?;
    if owned.record.keep == keep {
        return Ok(());
    }
    let changed =
        groups::change_volume(env, &owned.blocks, &owned.key, |record| record.keep = keep);
    let (block, _) = changed.await.map_err(failed)?;
    owned.keep(block, what).await
}

/// The failure of a user who cannot read an encrypted volume.
fn not_reader(what: &str, why: NotReader, who: Option<UserAddress>) -> Failure {
    let failure = |exit| Failure::new(exit, what).because(&why);
    match (&why, who) {
        (NotReader::Unknown { .. }, _) => failure(Exit::Unavailable).advice(TRY_AGAIN),
        (_, Some(who)) => failure(Exit::Failed)
            .advice(format!("Ask its owner for `atoll grant NAME {who} --read`.")),
        (_, None) => failure(Exit::Failed).advice(
            "Ask its owner for `atoll grant NAME USER --read`; USER is what `atoll id` says.",
        ),
    }
}
