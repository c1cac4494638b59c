//! `atoll publish`: a directory becomes a volume, or its next version.

use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use atoll_dht::{Blocks, Leased, MAX_LEASE, MIN_VOLUME_LEASE};
use atoll_env::BoxFuture;
use atoll_key::{BlockHash, ReadAddress, ReadKey, VolumeAddress};
use atoll_node::{Client, Keep, Volume};
use atoll_volume::owned::{
    LeaseRecorder, Omission, OmissionList, PublishError, PublishOptions, Published, Visibility,
    exclude_set, publish,
};
use serde::Serialize;
use tokio::sync::Mutex;

use crate::connection;
use crate::failure::{Exit, Failure, TRY_AGAIN};
use crate::global::Global;
use crate::incomplete::{self, JsonMissing};
use crate::interrupt;
use crate::output::Output;
use crate::pool;
use crate::progress::Watch;
use crate::source_filter::{self, WithoutNodes};
use crate::stat_cache;
use crate::units;
use crate::user;

const GOES_ON: &str = "What was uploaded stays; the same command again goes on from there. \
                       Readers still see the version before.";

/// Arguments of `atoll publish`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll publish ~/docs
  atoll publish ~/src/project --exclude target --exclude '*.o'
  atoll publish /srv/www --name website
  key=$(atoll publish ~/docs | tail -n 1)
  atoll publish --encrypt ~/diary             prints atoll:KEY#READKEY

The last line is the address, atoll:KEY. Publishing again updates the same address and
uploads only what the ring lacks. A file is not read again while its length, inode number and times
(ctime included) are as they were, if it had not changed for a minute when it was last read. This
holds on ext4, XFS, Btrfs, F2FS, bcachefs and ZFS, whose times can be relied on unless the clock is
set back; --checksum reads all files.

The tree may be in use: a file that is deleted meanwhile is not published, and a file that
changes each time it is read keeps the version published before. The command names at the end
each file that it kept so or left out, and exits with 7. Directories of Atoll's nodes, which hold
secret keys, and mounts of Atoll are never published; the command names them, and that is no error.

A volume published with --encrypt is read with the whole address, #READKEY included: without
it the names and contents cannot be read. Publishing it again needs no --encrypt. The nodes that
keep its blocks can see how many there are, how long they are and when they change.")]
pub(crate) struct Args {
    /// Which directory
    #[arg(value_name = "DIR")]
    source: PathBuf,

    /// What to call it on this node [default: the directory's own name]
    #[arg(long)]
    name: Option<String>,

    /// The directory that the volume of this name was published from has moved here: keep
    /// publishing under the same address
    #[arg(long)]
    moved: bool,

    /// Encrypt names and contents; the printed address has the read key, which opens them
    #[arg(long, group = "visibility")]
    encrypt: bool,

    /// Do not encrypt: every member who has the address can read it (the default, unless it was
    /// encrypted before)
    #[arg(long, group = "visibility")]
    plain: bool,

    /// Let --encrypt or --plain change a volume that was published the other way. What was
    /// published in the clear can be read by others until its leases run out
    #[arg(long, requires = "visibility")]
    convert: bool,

    /// Leave out files that match: a name anywhere (`*.o`), or a path from the top (`/build`);
    /// may be given several times
    #[arg(long, value_name = "GLOB")]
    exclude: Vec<String>,

    /// Size of data blocks: a power of two, 4KiB to 1MiB. Larger ones are faster to publish and to
    /// copy, and slower to seek in
    #[arg(long, value_name = "SIZE", default_value = "64KiB", value_parser = units::parse_size)]
    block_size: u64,

    /// Read all files, also those that seem not to have changed since they were last read
    #[arg(long)]
    checksum: bool,

    /// Do not fail at files that cannot be read: each keeps the version published before (a
    /// directory with everything in it), or is left out if there is none
    #[arg(long)]
    skip_unreadable: bool,

    /// Stay on the file system of DIR: leave out what is mounted below it
    #[arg(short = 'x', long)]
    one_file_system: bool,

    /// Keep the blocks for so long at a time, from 1day to 90days [default: as before, at first 30days]. The node renews
    /// them three times in that time; they go when it was away for longer, or that long after `atoll unpublish`
    #[arg(long, value_name = "TIME", value_parser = parse_lease)]
    lease: Option<Duration>,

    /// The result as one JSON object (then the address is a field of it)
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct JsonPublished {
    address: String,
    encrypted: bool,
    name: String,
    version: u64,
    unchanged: bool,
    files: u64,
    dirs: u64,
    symlinks: u64,
    special: u64,
    /// Everything that may be published is in the volume as it is.
    complete: bool,
    kept: u64,
    left_out: u64,
    withheld: u64,
    lost_blocks: u64,
    /// The first few of each of these three kinds.
    omissions: Vec<JsonMissing>,
    bytes: u64,
    blocks: u64,
    /// Files that were not read, because they had not changed.
    unread_files: u64,
    new_blocks: u64,
    new_bytes: u64,
    /// For how long its blocks are kept at a time, if that was chosen.
    lease_secs: Option<u64>,
    millis: u64,
}

fn parse_lease(text: &str) -> Result<Duration, String> {
    let lease = units::parse_duration(text)?;
    match (MIN_VOLUME_LEASE..=MAX_LEASE).contains(&lease) {
        true => Ok(lease),
        false => Err("blocks are kept for 1day to 90days at a time".to_owned()),
    }
}

/// Hands the node the list of blocks whose leases it is to renew; empty once committed.
#[derive(Clone)]
struct KeepOnNode(Arc<Mutex<Option<Keep>>>);

impl LeaseRecorder for KeepOnNode {
    fn record(&self, hashes: Vec<BlockHash>) -> BoxFuture<'static, Result<(), String>> {
        let this = self.clone();
        Box::pin(async move {
            match &mut *this.0.lock().await {
                Some(keep) => keep.add(&hashes).await.map_err(|error| error.to_string()),
                None => Err("the list is closed".into()),
            }
        })
    }
}

/// Publishes.
pub(crate) async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let what = format!("cannot publish {}", args.source.display());
    let options = options(args)?;
    match std::fs::metadata(&args.source) {
        Err(error) => return Err(Failure::io(what, &error)),
        Ok(metadata) if !metadata.is_dir() => {
            return Err(Failure::new(Exit::Failed, what)
                .because("it is not a directory")
                .advice("Put the file into a directory and publish that."));
        }
        Ok(_) => source_filter::check(&what, &args.source)?,
    }
    let (env, client) = connection::to_node(global).await?;
    let name = args.name.as_deref();
    let volume = match args.moved {
        true => client.moved_volume(name, &args.source).await,
        false => client.volume(name, &args.source).await,
    };
    let volume = volume.map_err(connection::failure)?;
    let pool = pool::check_no_pool(&volume.name, global, &what);
    if volume.is_new && (pool.is_err() || user::joined(&global.dir()?, &volume.name)?.is_some()) {
        // It was made by this call, and nothing has its key.
        client.forget_volume(&volume.name).await.map_err(connection::failure)?;
        pool.map_err(|failure| failure.advice("--name calls this one otherwise."))?;
        return Err(Failure::new(Exit::Failed, what)
            .because(format!("this node has joined a shared volume that is called {}", volume.name))
            .advice("--name calls this one otherwise."));
    }
    let read_key = read_key(args, &client, &volume, &what).await?;
    let options = PublishOptions {
        label: Some(volume.name.clone()),
        read_key: read_key.clone(),
        convert: args.convert,
        stat_cache: stat_cache::prepare(&global.dir()?, &volume.name),
        ..options
    };
    let lease = args.lease.or(volume.lease);
    let watch = Watch::start("publishing", global.quiet);
    let work = async {
        let keeping =
            KeepOnNode(Arc::new(Mutex::new(Some(client.keep(&volume.name).leased(args.lease)))));
        let blocks = Leased::over(client.clone(), lease);
        let recorder: Arc<dyn LeaseRecorder> = Arc::new(keeping.clone());
        let (key, counts) = (&volume.key, watch.progress());
        let published = publish(env, blocks, &args.source, key, options, counts, recorder).await;
        let published = published.map_err(|error| failure(&what, error))?;
        keep(&client, keeping, &what, &published).await?;
        if args.plain {
            client.forget_read_key(&volume.name).await.map_err(connection::failure)?;
        }
        Ok(published)
    };
    let published = interrupt::or_interrupted(work, GOES_ON).await;
    let took = watch.finish();
    report(args, &volume.name, &published?, read_key, lease, took)
}

fn options(args: &Args) -> Result<PublishOptions, Failure> {
    let exclude = exclude_set(&args.exclude).map_err(|error| {
        Failure::new(Exit::Usage, "a pattern after --exclude cannot be used").because(error)
    })?;
    let block_size_bytes = u32::try_from(args.block_size)
        .ok()
        .filter(|size| size.is_power_of_two() && (4 << 10..=1 << 20).contains(size))
        .ok_or_else(|| {
            let asked = units::size(args.block_size);
            Failure::new(Exit::Usage, format!("blocks of {asked} cannot be used"))
                .because("--block-size must be a power of two from 4KiB to 1MiB")
        })?;
    Ok(PublishOptions {
        block_size_bytes,
        checksum: args.checksum,
        exclude,
        skip_unreadable: args.skip_unreadable,
        one_file_system: args.one_file_system,
        filter: Arc::new(WithoutNodes),
        ..PublishOptions::default()
    })
}

/// The key that the volume is read with from now on. It is on the node's disk before
/// anything is sealed with it.
async fn read_key(
    args: &Args,
    client: &Arc<Client>,
    volume: &Volume,
    what: &str,
) -> Result<Option<ReadKey>, Failure> {
    let held = client.read_key(&volume.name).await.map_err(connection::failure)?;
    if args.plain {
        let converts = held.is_some() && !args.convert;
        let refused = || converts_failure(what, Visibility::Encrypted, Visibility::Plain);
        return if converts { Err(refused()) } else { Ok(None) };
    }
    if held.is_some() || !args.encrypt {
        return Ok(held);
    }
    if !volume.is_new && !args.convert {
        // Refused before the key is made, or the next publish would find one.
        let blocks: Arc<dyn Blocks> = client.clone();
        let present = Visibility::of(&blocks, volume.key.volume_id(), None).await;
        match present.map_err(|error| Failure::get(what, &error))? {
            Some(Visibility::Plain) => {
                return Err(converts_failure(what, Visibility::Plain, Visibility::Encrypted));
            }
            Some(_) => {
                let present = Visibility::OtherReadKey;
                return Err(converts_failure(what, present, Visibility::Encrypted));
            }
            None => {}
        }
    }
    client.make_read_key(&volume.name).await.map(Some).map_err(connection::failure)
}

/// Makes the node renew the new version's leases from now on.
async fn keep(
    client: &Client,
    keeping: KeepOnNode,
    what: &str,
    published: &Published,
) -> Result<(), Failure> {
    let root = client.get_signed(published.volume.root_key()).await;
    let root = root.map_err(|error| Failure::get(what, &error))?;
    let keep = keeping.0.lock().await.take().expect("it is taken only here");
    keep.commit(&root).await.map_err(connection::failure)
}

fn report(
    args: &Args,
    name: &str,
    published: &Published,
    read_key: Option<ReadKey>,
    lease: Option<Duration>,
    took: Duration,
) -> Result<(), Failure> {
    say_omissions(published);
    let encrypted = read_key.is_some();
    let volume = VolumeAddress(published.volume);
    let address = ReadAddress { volume, read_key }.to_text();
    let mut output = Output::new();
    if args.json {
        output.json(&JsonPublished {
            address,
            encrypted,
            name: name.to_string(),
            version: published.version,
            unchanged: published.unchanged,
            files: published.files,
            dirs: published.dirs,
            symlinks: published.symlinks,
            special: published.special,
            complete: published.omissions.is_complete(),
            kept: published.omissions.kept.count,
            left_out: published.omissions.left_out.count,
            withheld: published.omissions.withheld.count,
            lost_blocks: published.lost_blocks,
            omissions: json_omissions(published),
            bytes: published.bytes,
            blocks: published.blocks,
            unread_files: published.unread_files,
            new_blocks: published.new_blocks,
            new_bytes: published.new_bytes,
            lease_secs: lease.map(|lease| lease.as_secs()),
            millis: took.as_millis() as u64,
        })?;
        output.flush()?;
        return completeness(published);
    }
    for line in describe(name, published, took) {
        output.line(line)?;
    }
    if let Some(lease) = lease {
        output.line(format!("kept for {} at a time", units::duration(lease)))?;
    }
    if encrypted {
        output.line("encrypted: who has the whole address, #READKEY included, can read it")?;
    }
    output.line(address)?;
    output.flush()?;
    completeness(published)
}

fn say_omissions(published: &Published) {
    let omissions = &published.omissions;
    let lists = [
        ("never published", &omissions.withheld),
        ("kept as it was", &omissions.kept),
        ("left out", &omissions.left_out),
    ];
    for (what, list) in lists {
        let line = |omission: &Omission| {
            format!("{what}: {}: {}", incomplete::shown(&omission.path), omission.reason)
        };
        incomplete::say(list.listed.iter().map(line), list.count);
    }
}

fn json_omissions(published: &Published) -> Vec<JsonMissing> {
    let omissions = &published.omissions;
    let lists = [
        ("withheld", &omissions.withheld),
        ("kept", &omissions.kept),
        ("left_out", &omissions.left_out),
    ];
    let json = |(what, list): (&'static str, &OmissionList)| {
        let of = move |omission: &Omission| {
            JsonMissing::new(what, omission.path.as_os_str().as_bytes(), &omission.reason)
        };
        list.listed.iter().map(of).collect::<Vec<_>>()
    };
    lists.into_iter().flat_map(json).collect()
}

/// Fails, with a code of its own, if not everything was published as it is now.
fn completeness(published: &Published) -> Result<(), Failure> {
    let omissions = &published.omissions;
    if omissions.is_complete() {
        return Ok(());
    }
    let mut parts = Vec::new();
    if omissions.kept.count > 0 {
        parts.push(format!("{} kept as published before", units::count(omissions.kept.count)));
    }
    if omissions.left_out.count > 0 {
        parts.push(format!("{} left out", units::count(omissions.left_out.count)));
    }
    if published.lost_blocks > 0 {
        let lost = units::counted(published.lost_blocks, "block", "blocks");
        parts.push(format!("the ring has lost {lost} of what was kept"));
    }
    Err(Failure::new(Exit::Incomplete, "published, but not everything as it is now")
        .because(parts.join(", "))
        .advice("Publish again when it can be read; a snapshot of the file system stays still."))
}

fn describe(name: &str, published: &Published, took: Duration) -> Vec<String> {
    // A rate would count the bytes of files that the publish did not read.
    let rate = match published.unread_files {
        0 => format!(" ({})", units::rate(published.bytes, took)),
        _ => String::new(),
    };
    let mut lines = vec![
        format!(
            "{name}: {}, {}, {}; {}",
            units::counted(published.files, "file", "files"),
            units::counted(published.dirs, "directory", "directories"),
            units::counted(published.symlinks, "link", "links"),
            units::size(published.bytes),
        ),
        format!(
            "{}, {} of them new ({}), in {}{rate}",
            units::counted(published.blocks, "block", "blocks"),
            units::count(published.new_blocks),
            units::size(published.new_bytes),
            units::duration(took),
        ),
    ];
    if published.unread_files > 0 {
        let unread = units::counted(published.unread_files, "file", "files");
        lines.push(format!("{unread} not read: unchanged since an earlier publish"));
    }
    if published.special > 0 {
        let special = units::counted(
            published.special,
            "device, FIFO or socket",
            "devices, FIFOs or sockets",
        );
        lines.push(format!("{special} left out: a volume does not hold them"));
    }
    if published.omissions.withheld.count > 0 {
        let withheld =
            units::counted(published.omissions.withheld.count, "directory is", "directories are");
        lines.push(format!("{withheld} never published: named above"));
    }
    lines.push(if published.unchanged {
        format!("nothing has changed since version {}", published.version)
    } else {
        format!("version {}", published.version)
    });
    lines
}

fn failure(what: &str, error: PublishError) -> Failure {
    match error {
        PublishError::Options(_) => Failure::new(Exit::Usage, what).because(error),
        PublishError::Source { .. } => Failure::new(Exit::Failed, what).because(error).advice(
            "--skip-unreadable goes on past it, and keeps its former version; --exclude names \
                 what to leave out.",
        ),
        PublishError::Withheld { .. } => Failure::new(Exit::Failed, what).because(error),
        PublishError::Previous { ref source, .. } => {
            Failure::get(what, source).because(&error).advice(TRY_AGAIN)
        }
        PublishError::Converts { present, asked } => converts_failure(what, present, asked),
        PublishError::Mounted => Failure::new(Exit::Failed, what)
            .because(&error)
            .advice("Mount it and copy the directory into it, or publish under another --name."),
        PublishError::Put(error) => Failure::put(what, &error),
        PublishError::Record(_) | PublishError::Stopped => {
            Failure::new(Exit::Failed, what).because(error).advice(GOES_ON)
        }
    }
}

/// The refusal to change who can read a volume.
fn converts_failure(what: &str, present: Visibility, asked: Visibility) -> Failure {
    let failure = Failure::new(Exit::Failed, what)
        .because(format!("the volume is published {present}, and this would publish it {asked}"));
    match (present, asked) {
        (Visibility::Plain, _) => failure.advice(
            "What was published in the clear stays readable until its leases run out. Publish it \
             under another --name, or say --encrypt --convert to encrypt it from now on.",
        ),
        (_, Visibility::Plain) => {
            failure.advice("Say --plain --convert if everybody may read it from now on.")
        }
        (_, _) => failure.advice(
            "Its read key is not on this node. Publish from the node that has it, or say \
             --encrypt --convert to give it another; its readers need the new address then.",
        ),
    }
}
