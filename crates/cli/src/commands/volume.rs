//! `atoll volume`: volumes of one's own, which are mounted read-write.

mod delete;
mod history;
mod keys;
mod restore;
mod share;
mod show;

use atoll_dht::{Blocks, GetError};
use atoll_key::{ReadAddress, SignedBlock, VolumeAddress, VolumeCipher};
use atoll_node::shell_word;
use atoll_volume::keep::Keep;
use atoll_volume::owned::{LeaseKeeper, empty_root, sealed_root};
use atoll_volume::shared::access::TooLong;
use atoll_volume::shared::access::volume_record::MAX_KEPT_SECS;
use serde::Serialize;

use super::{recover, volumes};
use crate::connection;
use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::messages::note;
use crate::output::Output;
use crate::own_volume;
use crate::pool;
use crate::user;
use crate::waiting::told;

/// The size of data blocks, as a power of two: 64 KiB, as of published volumes.
const BLOCK_SIZE_LOG2: u8 = 16;

/// Arguments of `atoll volume`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll volume create work
  atoll volume create team --shared
  atoll volume list
  atoll volume history work
  atoll volume restore work@2026-11-20T12:00 docs
  atoll volume export work > work.key

The volume is written through a mount of its name on this node, and read anywhere by its
address. `atoll publish` makes a read-only copy of a directory instead.")]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand, Debug)]
enum Command {
    /// Make an empty volume, and print its address
    Create(CreateArgs),
    /// List this node's volumes, published and joined ones included: as `atoll volumes`
    List(volumes::Args),
    /// List the states of a volume that are kept
    History(history::Args),
    /// Make an old state of a volume, or a file or directory of it, the present one
    Restore(restore::Args),
    /// Show, or copy, what was written and is not in the volume
    Recover(recover::Args),
    /// Show one of this node's volumes: what it holds, until when, and who writes it
    Show(show::Args),
    /// Print a volume's keys, sealed with a passphrase: for paper, or for another node
    Export(keys::ExportArgs),
    /// Take over a volume whose keys were exported or moved: reads them from standard input
    Import(keys::ImportArgs),
    /// Hand a volume over to another node, which then writes it and renews its leases
    Move(keys::MoveArgs),
    /// Print a code with which somebody else can write a shared volume
    Invite(share::InviteArgs),
    /// Keep a shared volume of another node under a name, by the code of an invitation
    Join(share::JoinArgs),
    /// Take a volume off the ring: its readers are told that it was removed
    Delete(delete::DeleteArgs),
    /// Remove a volume's key from this node; the volume stays on the ring
    Forget(delete::ForgetArgs),
}

/// Arguments of `atoll volume create`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll volume create work
  atoll volume create --encrypt diary
  atoll volume create --keep 60m/48h/14d/8w notes
  atoll volume create --shared team
  atoll volume create --shared --keep 48h/14d minutes
  atoll volume create --shared --encrypt board
  atoll mount work ~/work

The key that it is written with stays in this node's directory: `atoll volume export NAME` prints
a copy for a safe place.

--keep says which old states of the volume are kept: 24h/7d/4w keeps the last state of each of the
newest 24 hours, 7 days and 4 weeks in which it was written (m: minutes, t: ten minutes; times are UTC).
A shared volume whose policy has minutes also keeps some versions of files that no full minute has seen. What
they do not share with the present takes room on the ring. `none` keeps nothing.

A --shared volume is written by many at the same time, each by a mount of their own. Its old states are in
.atoll/history of each mount, for at most four weeks; `atoll log` and `atoll restore` use them. `atoll grant` and `atoll volume invite` say who may. Everybody who knows the address can read it,
unless it is encrypted.")]
struct CreateArgs {
    /// The volume's name on this node
    name: String,

    /// Encrypt it: it can be read only with the address that has its read key; a shared one, by those whom
    /// `atoll grant` or `atoll volume invite` name
    #[arg(long)]
    encrypt: bool,

    /// Let others write it too, whom `atoll grant` or `atoll volume invite` name
    #[arg(long)]
    shared: bool,

    /// Which old states are kept
    #[arg(long, value_name = "COUNTS", default_value_t)]
    keep: Keep,

    /// One JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct JsonCreated<'a> {
    name: &'a str,
    address: String,
    encrypted: bool,
    shared: bool,
}

/// Runs the subcommand.
pub(crate) async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    match &args.command {
        Command::Create(args) => {
            let what = format!("store the volume {}", args.name);
            told(global, &what, create(args, global)).await
        }
        Command::List(args) => volumes::run(args, global).await,
        Command::History(args) => history::run(args, global).await,
        Command::Restore(args) => restore::run(args, global).await,
        Command::Recover(args) => recover::run(args, global).await,
        Command::Invite(args) => {
            told(global, "take the new member in", share::invite(args, global)).await
        }
        Command::Join(args) => share::join(args, global).await,
        Command::Show(args) => show::run(args, global).await,
        Command::Export(args) => keys::export(args, global).await,
        Command::Import(args) => keys::import(args, global).await,
        Command::Move(args) => keys::move_away(args, global).await,
        Command::Delete(args) => {
            told(global, "take the volume off", delete::delete(args, global)).await
        }
        Command::Forget(args) => delete::forget(args, global).await,
    }
}

async fn create(args: &CreateArgs, global: &Global) -> Result<(), Failure> {
    let name = &args.name;
    let what = format!("cannot make the volume {name}");
    if name.contains([':', '#', '@']) {
        return Err(Failure::new(Exit::Usage, what)
            .because("a name with ':', '#' or '@' would be taken for an address or a time"));
    }
    if args.shared && args.keep.longest_secs() > MAX_KEPT_SECS {
        return Err(Failure::new(Exit::Usage, what).because(TooLong::Kept));
    }
    pool::check_no_pool(name, global, &what)?;
    let (env, client) = connection::to_node(global).await?;
    if user::joined(&global.dir()?, name)?.is_some() {
        return Err(Failure::new(Exit::Failed, what)
            .because("this node has joined a shared volume of that name"));
    }
    let volume = client.named_volume(name).await.map_err(connection::failure)?;
    let id = volume.key.volume_id();
    if !volume.is_new {
        let taken = || Failure::new(Exit::Failed, &what);
        match client.get_signed(id.root_key()).await {
            Ok(_) => {
                return Err(taken()
                    .because("this node has a volume of that name")
                    .advice("`atoll volumes` lists them."));
            }
            // Its root was never put, or has run out: it is made anew under the same key.
            Err(GetError::NotFound { .. } | GetError::Removed { .. }) => {}
            Err(error) => return Err(Failure::get(&what, &error)),
        }
    }
    if args.shared {
        let new = (&name[..], &volume.key, args.encrypt, args.keep);
        share::create(&env, &client, new, global, &what).await?;
        return tell(args, global, ReadAddress::from(VolumeAddress(id)));
    }
    let read_key = match args.encrypt {
        true => Some(client.make_read_key(name).await.map_err(connection::failure)?),
        false => None,
    };
    let cipher = read_key.as_ref().map(|key| VolumeCipher::new(key, &id));
    let mut root = empty_root(&env, name, own_volume::owner(), BLOCK_SIZE_LOG2);
    root.mounted.keep = args.keep;
    let payload = sealed_root::encode(&root, cipher.as_ref());
    let block = SignedBlock::sign(&volume.key, b"", root.published_unix_ms, &payload);
    client.put_signed(block.clone()).await.map_err(|error| Failure::put(&what, &error))?;
    let kept = own_volume::KeepVersions::new(client, name).keep(block, Vec::new()).await;
    kept.map_err(|error| Failure::new(Exit::Failed, &what).because(error))?;
    tell(args, global, ReadAddress { volume: VolumeAddress(id), read_key })
}

fn tell(args: &CreateArgs, global: &Global, address: ReadAddress) -> Result<(), Failure> {
    let (name, shared, encrypted) = (&args.name, args.shared, args.encrypt);
    let address = address.to_text();
    let mut output = Output::new();
    if args.json {
        output.json(&JsonCreated { name, address, encrypted, shared })?;
        return output.flush();
    }
    output.line(address)?;
    output.flush()?;
    let name = shell_word(name);
    if shared && !global.quiet {
        let also = if encrypted { ", with --read only read it" } else { "" };
        note!(
            "`atoll mount {name} DIR` mounts it; `atoll grant {name} USER` lets somebody else write \
             it{also}"
        );
    } else if !global.quiet {
        note!("`atoll mount {name} DIR` mounts it read-write; the address reads it anywhere");
    }
    Ok(())
}
