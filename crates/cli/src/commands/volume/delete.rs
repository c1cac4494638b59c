//! `atoll volume delete`: take a volume off the ring. `atoll volume forget`: only off this node.

use std::sync::Arc;

use atoll_dht::{Blocks, PutError};
use atoll_key::{SignedBlock, VolumeAddress};
use atoll_node::shell_word;
use atoll_volume::owned::{OpenError, RootError, newest_root, releasable_blocks, release_blocks};

use crate::commands::unpublish;
use crate::connection;
use crate::failure::{Exit, Failure, TRY_AGAIN};
use crate::global::Global;
use crate::messages::note;
use crate::output::Output;
use crate::own_volume;
use crate::progress::Share;
use crate::spool;
use crate::stat_cache;
use crate::terminal;
use crate::units;
use crate::user::{self, Joined};

/// Arguments of `atoll volume delete`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll volume delete scratch
  atoll volume delete scratch --yes
  atoll volume delete website --keep-key

The volume's root is replaced by the statement that it was removed, which readers are told at once.
Then all nodes that have its blocks are told that nothing needs them: the room is back some minutes
later. Blocks of a volume that was published (`atoll publish`) may be in others too: they stay until
their leases have run out, as do the blocks that a node has which is away now. The key is removed from
this node, and nobody can write the volume again, unless --keep-key is given or the key was exported. A
directory that the volume was published from stays as it is.")]
pub(super) struct DeleteArgs {
    /// The volume's name on this node
    name: String,

    #[command(flatten)]
    confirmed: Confirmed,

    /// Delete it although a mount writes it, whose last changes are lost then
    #[arg(long)]
    force: bool,

    /// Keep the key, so that `volume create` or `publish` brings the same address back
    #[arg(long)]
    keep_key: bool,
}

/// Arguments of `atoll volume forget`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll volume export work > work.key && atoll volume forget work
  atoll volume forget team                 a volume that was joined

The volume stays on the ring as it is. This node renews its leases no more and removes its key: do
this where another node has imported it. Of a volume that was joined, the code of the invitation is removed; to join
it again takes that code, or a new one.")]
pub(super) struct ForgetArgs {
    /// The volume's name on this node
    name: String,

    #[command(flatten)]
    confirmed: Confirmed,
}

#[derive(clap::Args, Debug)]
struct Confirmed {
    /// Do not ask
    #[arg(long)]
    yes: bool,
}

impl Confirmed {
    /// Asks whether that is meant, unless it was said.
    fn check(&self, what: &str, name: &str) -> Result<(), Failure> {
        if self.yes {
            return Ok(());
        }
        let question = format!("This cannot be undone. Type {name} to go on");
        match terminal::ask(&question, false) {
            Ok(Some(typed)) if typed.trim() == name => Ok(()),
            Ok(Some(_)) => Err(Failure::new(Exit::Failed, what).because("that is another name")),
            Ok(None) => Err(Failure::new(Exit::Usage, what)
                .because("there is no terminal to ask on")
                .advice("--yes says that it is meant.")),
            Err(error) => Err(Failure::io(what, &error)),
        }
    }
}

/// Takes a volume off the ring.
pub(super) async fn delete(args: &DeleteArgs, global: &Global) -> Result<(), Failure> {
    let name = &args.name;
    let what = format!("cannot delete {name}");
    let (env, client) = connection::to_node(global).await?;
    let status = own_volume::status(&client, name, &what).await?;
    let secret = client.volume_secret(name).await.map_err(connection::failure)?;
    if secret.token.is_some() {
        return Err(Failure::new(Exit::Failed, what)
            .because("it was moved to another node")
            .advice(format!(
                "`atoll volume forget {}` removes it from this one.",
                shell_word(name)
            )));
    }
    let id = secret.key.volume_id();
    let mut root_read = None;
    let held = match newest_root(&*client, &id, secret.read_key.as_ref()).await {
        Ok((block, root)) => {
            if let Some(left) = own_volume::claim(&env, &root).filter(|_| !args.force) {
                return Err(own_volume::is_written(&what, left)
                    .advice("Unmount it first; --force deletes it all the same."));
            }
            root_read = Some((block.clone(), root));
            Some(block.version)
        }
        Err(OpenError::Gone(_) | OpenError::Removed) => None,
        // The ring has a root that cannot be read here.
        Err(OpenError::Root(error)) if !args.force && error != RootError::Shared => {
            return Err(Failure::new(Exit::Failed, what)
                .because(error)
                .advice("--force deletes it all the same."));
        }
        Err(OpenError::Root(_)) => match client.get_signed(id.root_key()).await {
            Ok(block) => Some(block.version),
            Err(error) => return Err(Failure::get(what, &error)),
        },
        Err(OpenError::Fetch(error)) => return Err(Failure::get(what, &error)),
        // Only of old states.
        Err(error @ (OpenError::NotKept { .. } | OpenError::History(_))) => {
            return Err(Failure::new(Exit::Failed, what).because(error));
        }
    };
    args.confirmed.check(&what, name)?;
    // Without its root nothing tells which they are.
    let blocks: Arc<dyn Blocks> = client.clone();
    let releasable = match &root_read {
        Some((block, root)) => {
            let newest = (block.clone(), root);
            let read_key = secret.read_key.clone();
            let all = releasable_blocks(env.clone(), blocks.clone(), newest, &secret.key, read_key);
            all.await.unwrap_or_else(|why| {
                note!("what is not listed stays on the ring until its lease ends: {why}");
                None
            })
        }
        None => None,
    };
    if let Some(version) = held {
        let tombstone = SignedBlock::sign_tombstone(&secret.key, b"", version + 1);
        let mut removed = client.remove_blocks(vec![tombstone.into()]).await;
        match removed.pop().expect("one outcome for one block") {
            Ok(()) => {}
            Err(PutError::Superseded { .. }) => {
                return Err(Failure::new(Exit::Failed, what)
                    .because("it was written meanwhile")
                    .advice(TRY_AGAIN));
            }
            Err(error) => return Err(Failure::put(what, &error)),
        }
    }
    let released = match releasable {
        Some(all) => {
            let (share, count) = (Share::new("releasing blocks"), all.len() as u64);
            let told = |done| {
                if !global.quiet {
                    share.show(done, count)
                }
            };
            let left = release_blocks(&env, &blocks, &secret.key, all, &told).await;
            share.finish();
            Some((count, left))
        }
        None => None,
    };
    // Only now: after a crash before this the same command goes on.
    if status.root_version > 0 {
        unpublish::stop(&client, name).await?;
    }
    let mut output = Output::new();
    let until = units::unix_date(status.lease_expires_unix_secs);
    let counted = |count| units::counted(count, "block", "blocks");
    output.line(match released {
        Some((_, 0)) => format!("{name}: deleted; its room on the ring is back within minutes"),
        Some((count, left)) => format!(
            "{name}: deleted; not all nodes have heard of {} of its {}, which go by {until} UTC; the others \
             within minutes",
            left,
            counted(count)
        ),
        None => format!("{name}: deleted; the ring drops its blocks by {until} UTC"),
    })?;
    if args.keep_key {
        output.line("its key stays on this node")?;
        return output.flush();
    }
    client.forget_volume(name).await.map_err(connection::failure)?;
    spool::remove(&global.dir()?, name);
    stat_cache::remove(&global.dir()?, name);
    output.flush()
}

/// Takes a volume off this node.
pub(super) async fn forget(args: &ForgetArgs, global: &Global) -> Result<(), Failure> {
    let name = &args.name;
    let what = format!("cannot forget {name}");
    let (_, client) = connection::to_node(global).await?;
    let volumes = client.volumes().await.map_err(connection::failure)?;
    if volumes.iter().all(|volume| volume.name != *name)
        && let Some(joined) = user::joined(&global.dir()?, name)?
    {
        return forget_joined(args, &joined, global, &what);
    }
    let status = own_volume::status(&client, name, &what).await?;
    let secret = client.volume_secret(name).await.map_err(connection::failure)?;
    if let Some(mount) = own_volume::mounts(name, secret.key.volume_id()).first() {
        return Err(Failure::new(Exit::Failed, what)
            .because(format!("it is mounted on {}", mount.display())));
    }
    spool::check_empty(&global.dir()?, name, &what)?;
    spool::check_shared_empty(&global.dir()?, (secret.key.volume_id(), None), &what)?;
    args.confirmed.check(&what, name)?;
    client.forget_volume(name).await.map_err(connection::failure)?;
    spool::remove(&global.dir()?, name);
    stat_cache::remove(&global.dir()?, name);
    let mut output = Output::new();
    let until = units::unix_date(status.lease_expires_unix_secs);
    output.line(format!("{name}: forgotten; unless another node renews its leases, its blocks may go from {until} UTC on"))?;
    output.flush()
}

/// Ends that this node knows a shared volume of another one by a name.
fn forget_joined(
    args: &ForgetArgs,
    joined: &Joined,
    global: &Global,
    what: &str,
) -> Result<(), Failure> {
    let (name, dir) = (&args.name, global.dir()?);
    if let Some(mount) = own_volume::mounts(name, joined.volume).first() {
        return Err(Failure::new(Exit::Failed, what)
            .because(format!("it is mounted on {}", mount.display()))
            .advice("Unmount it first."));
    }
    let user = joined.user.user_id();
    spool::check_shared_empty(&dir, (joined.volume, Some(user)), what)?;
    args.confirmed.check(what, name)?;
    user::forget_joined(&dir, name)?;
    let mut output = Output::new();
    output.line(match joined.is_invited {
        true => format!("{name}: forgotten; to join it again takes its code, or a new one"),
        false => {
            let address = VolumeAddress(joined.volume);
            format!("{name}: forgotten; `atoll volume join {address} NAME` joins it again")
        }
    })?;
    output.flush()
}
