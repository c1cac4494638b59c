//! `atoll publish`: a directory becomes a volume, or its next version.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use atoll_dht::Blocks;
use atoll_env::BoxFuture;
use atoll_key::{BlockHash, ReadAddress, ReadKey, VolumeAddress};
use atoll_node::{Client, Keep, Volume};
use atoll_volume::owned::{
    Keeper, PublishError, PublishOptions, Published, Visibility, exclude_set, publish,
};
use serde::Serialize;
use tokio::sync::Mutex;

use crate::arguments::Global;
use crate::connection;
use crate::failure::{Exit, Failure};
use crate::interrupt;
use crate::output::{Output, escaped};
use crate::progress::Watch;
use crate::units;

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
uploads only what the ring lacks.

What is published with --encrypt is read with the whole address, #READKEY included: without
it nobody can tell names or contents. Publishing it again needs no --encrypt. How many blocks
it has, how long they are and when they change can be seen by the nodes that keep them.")]
pub struct Args {
    /// Which directory
    #[arg(value_name = "DIR")]
    source: PathBuf,

    /// What to call it on this node [default: the directory's own name]
    #[arg(long)]
    name: Option<String>,

    /// The volume of this name was published from another directory, which is here now: go
    /// on under its address
    #[arg(long)]
    moved: bool,

    /// Let only those read it who have the read key, which is part of the address printed
    #[arg(long, group = "visibility")]
    encrypt: bool,

    /// Let everybody who has the address read it; so it is unless it was encrypted before
    #[arg(long, group = "visibility")]
    plain: bool,

    /// Let --encrypt or --plain change a volume that was published the other way. What was
    /// published in the clear can be read by others until its leases run out
    #[arg(long, requires = "visibility")]
    convert: bool,

    /// Leave out what matches: a name anywhere (`*.o`), or a path from the top (`/build`);
    /// may be given several times
    #[arg(long, value_name = "GLOB")]
    exclude: Vec<String>,

    /// Size of data blocks: a power of two, 4KiB to 1MiB
    #[arg(long, value_name = "SIZE", default_value = "64KiB", value_parser = units::parse_size)]
    block_size: u64,

    /// Leave out what cannot be read, and say so, rather than fail
    #[arg(long)]
    skip_unreadable: bool,

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
    skipped: u64,
    bytes: u64,
    blocks: u64,
    new_blocks: u64,
    new_bytes: u64,
    millis: u64,
}

/// Hands the node the list of blocks whose leases it is to renew; empty once committed.
#[derive(Clone)]
struct KeepOnNode(Arc<Mutex<Option<Keep>>>);

impl Keeper for KeepOnNode {
    fn keep(&self, hashes: Vec<BlockHash>) -> BoxFuture<'static, Result<(), String>> {
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
pub async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let what = format!("cannot publish {}", args.source.display());
    let options = options(args)?;
    match std::fs::metadata(&args.source) {
        Err(error) => return Err(Failure::io(what, &error)),
        Ok(metadata) if !metadata.is_dir() => {
            return Err(Failure::new(Exit::Failed, what)
                .because("it is not a directory")
                .advice("Put the file into a directory and publish that."));
        }
        Ok(_) => {}
    }
    let (env, client) = connection::to_node(global).await?;
    let name = args.name.as_deref();
    let volume = match args.moved {
        true => client.moved_volume(name, &args.source).await,
        false => client.volume(name, &args.source).await,
    };
    let volume = volume.map_err(connection::failure)?;
    let read_key = read_key(args, &client, &volume, &what).await?;
    let options = PublishOptions {
        label: Some(volume.name.clone()),
        read_key: read_key.clone(),
        convert: args.convert,
        ..options
    };
    let watch = Watch::start("publishing", global.quiet);
    let work = async {
        let keeping = KeepOnNode(Arc::new(Mutex::new(Some(client.keep(&volume.name)))));
        let blocks: Arc<dyn Blocks> = client.clone();
        let keeper: Arc<dyn Keeper> = Arc::new(keeping.clone());
        let (key, counts) = (&volume.key, watch.progress());
        let published = publish(env, blocks, &args.source, key, options, counts, keeper).await;
        let published = published.map_err(|error| failure(&what, error))?;
        keep(&client, keeping, &what, &published).await?;
        if args.plain {
            client.forget_read_key(&volume.name).await.map_err(connection::failure)?;
        }
        Ok(published)
    };
    let published = interrupt::or_interrupted(work, GOES_ON).await;
    let took = watch.finish();
    report(args, &volume.name, &published?, read_key, took)
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
        exclude,
        skip_unreadable: args.skip_unreadable,
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
    took: Duration,
) -> Result<(), Failure> {
    for skipped in &published.skipped {
        let path = escaped(std::os::unix::ffi::OsStrExt::as_bytes(skipped.path.as_os_str()));
        eprintln!("skipped {path}: {}", skipped.reason);
    }
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
            skipped: published.skipped_count,
            bytes: published.bytes,
            blocks: published.blocks,
            new_blocks: published.new_blocks,
            new_bytes: published.new_bytes,
            millis: took.as_millis() as u64,
        })?;
        return output.flush();
    }
    for line in describe(name, published, took) {
        output.line(line)?;
    }
    if encrypted {
        output.line("encrypted: who has the whole address, #READKEY included, can read it")?;
    }
    output.line(address)?;
    output.flush()
}

fn describe(name: &str, published: &Published, took: Duration) -> Vec<String> {
    let mut lines = vec![
        format!(
            "{name}: {}, {}, {}; {}",
            units::counted(published.files, "file", "files"),
            units::counted(published.dirs, "directory", "directories"),
            units::counted(published.symlinks, "link", "links"),
            units::size(published.bytes),
        ),
        format!(
            "{}, {} of them new ({}), in {} ({})",
            units::counted(published.blocks, "block", "blocks"),
            units::count(published.new_blocks),
            units::size(published.new_bytes),
            units::duration(took),
            units::rate(published.bytes, took),
        ),
    ];
    if published.special > 0 {
        let special = units::counted(
            published.special,
            "device, FIFO or socket",
            "devices, FIFOs or sockets",
        );
        lines.push(format!("{special} left out: a volume does not hold them"));
    }
    if published.skipped_count > 0 {
        let unread = units::counted(published.skipped_count, "file", "files");
        lines.push(format!("{unread} left out: they could not be read"));
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
        PublishError::Source { .. } => Failure::new(Exit::Failed, what)
            .because(error)
            .advice("--skip-unreadable leaves it out; --exclude names what to leave out."),
        PublishError::Converts { present, asked } => converts_failure(what, present, asked),
        PublishError::Put(error) => Failure::put(what, &error),
        PublishError::Keep(_) | PublishError::Stopped => {
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
