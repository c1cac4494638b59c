//! `atoll volume export`, `import` and `move`: a volume's keys as text, sealed by a passphrase.

use std::io::{self, IsTerminal, Read};
use std::sync::Arc;

use atoll_dht::{Blocks, GetError};
use atoll_env::Env;
use atoll_key::volume_secret::{Cost, MAX_SECRET_TEXT_BYTES, SALT_BYTES, move_acceptance};
use atoll_key::{VolumeAddress, VolumeSecret};
use atoll_node::{Client, ClientError, TreeWalk, VolumeError, shell_word};
use atoll_upkeep::VolumeWalk;
use atoll_volume::owned::{OpenError, RootError, newest_root};

use crate::commands::renew;
use crate::connection;
use crate::failure::{Exit, Failure, TRY_AGAIN};
use crate::global::Global;
use crate::messages::note;
use crate::output::Output;
use crate::own_volume;
use crate::passphrase::PassphraseArgs;
use crate::pool;
use crate::shared_volume;
use crate::spool;
use crate::units;
use crate::user;

/// Arguments of `atoll volume export`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll volume export work > work.key
  atoll volume export work --passphrase-file pass.txt | lp

The text has all that it takes to write the volume, and to read it if it is encrypted: the secret
key, the read key, the name, the directory it is published from. Print it, or keep it where this
machine's end does not reach. Without the passphrase nobody can use it: choose one of several
words that nobody guesses, and keep it apart. A volume can be exported while it is mounted.")]
pub(super) struct ExportArgs {
    /// The volume's name on this node
    name: String,

    #[command(flatten)]
    passphrase: PassphraseArgs,
}

/// Arguments of `atoll volume import`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll volume import < work.key
  atoll volume import work2 < work.key

This node can write the volume then and renews its leases, as far as the ring still has it: mount
it, or publish its directory (with --moved if that is elsewhere now). A volume that was exported
can be written from both nodes, by one mount at a time; one that was moved (`atoll volume move`)
only from this one. The same command again goes on after an error.")]
pub(super) struct ImportArgs {
    /// The volume's name on this node [default: the name in the key text]
    name: Option<String>,

    #[command(flatten)]
    passphrase: PassphraseArgs,
}

/// Arguments of `atoll volume move`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll volume move work > work.key        here
  atoll volume import < work.key           on the other node
  atoll volume move --cancel work          keep it, if no node has imported it

From now on the volume cannot be mounted or published from here. This node renews its leases until
the other one has imported the key and says so on the ring; then it forgets the volume by itself.
The same command again prints the key again.")]
pub(super) struct MoveArgs {
    /// The volume's name on this node
    name: String,

    /// Keep the volume here after all
    #[arg(long)]
    cancel: bool,

    #[command(flatten)]
    passphrase: PassphraseArgs,
}

/// Prints the keys.
pub(super) async fn export(args: &ExportArgs, global: &Global) -> Result<(), Failure> {
    let name = &args.name;
    let what = format!("cannot export {name}");
    let (env, client) = connection::to_node(global).await?;
    own_volume::status(&client, name, &what).await?;
    let passphrase = args.passphrase.take(&what, true)?;
    let secret = client.volume_secret(name).await.map_err(connection::failure)?;
    print(&env, &VolumeSecret { token: None, ..secret }, &passphrase)
}

fn print(env: &Env, secret: &VolumeSecret, passphrase: &str) -> Result<(), Failure> {
    let mut salt = [0; SALT_BYTES];
    let (a, b) = salt.split_at_mut(8);
    a.copy_from_slice(&env.random_u64().to_be_bytes());
    b.copy_from_slice(&env.random_u64().to_be_bytes());
    let mut output = Output::new();
    output.line(secret.seal(passphrase, salt, Cost::DEFAULT))?;
    output.flush()
}

/// Prints the keys for another node, after which this one writes the volume no more.
pub(super) async fn move_away(args: &MoveArgs, global: &Global) -> Result<(), Failure> {
    let name = &args.name;
    let what = format!("cannot move {name}");
    let (env, client) = connection::to_node(global).await?;
    let status = own_volume::status(&client, name, &what).await?;
    if args.cancel {
        return cancel(&client, name).await;
    }
    spool::check_empty(&global.dir()?, name, &what)?;
    let passphrase = args.passphrase.take(&what, true)?;
    let secret = client.mark_moved(name, true).await.map_err(connection::failure)?;
    let id = secret.key.volume_id();
    let found = newest_root(&*client, &id, secret.read_key.as_ref()).await;
    // A mount names itself in the root before it looks for the mark: one of the two sees the other.
    let refused = match found {
        Ok((_, root)) => own_volume::claim(&env, &root)
            .map(|left| own_volume::is_written(&what, left).advice("Unmount it first.")),
        // Many may write a shared volume.
        Err(OpenError::Gone(_) | OpenError::Removed | OpenError::Root(RootError::Shared)) => None,
        Err(error) => Some(Failure::new(Exit::Unavailable, &what).because(error).advice(TRY_AGAIN)),
    };
    if let Some(refused) = refused {
        if !status.is_moved {
            client.mark_moved(name, false).await.map_err(connection::failure)?;
        }
        return Err(refused);
    }
    print(&env, &secret, &passphrase)?;
    if !global.quiet {
        note!(
            "`atoll volume import` on the other node takes it over; until then this node renews \
             its leases"
        );
    }
    Ok(())
}

async fn cancel(client: &Arc<Client>, name: &str) -> Result<(), Failure> {
    let what = format!("cannot keep {name} here");
    let secret = client.volume_secret(name).await.map_err(connection::failure)?;
    let Some(token) = &secret.token else {
        return Err(Failure::new(Exit::Failed, what).because("it was not moved"));
    };
    match client.get_signed(move_acceptance(&secret.key, token).key()).await {
        Err(GetError::NotFound { .. }) => {}
        Ok(_) => {
            return Err(Failure::new(Exit::Failed, what)
                .because("another node has taken it over")
                .advice(format!(
                    "To have it back, run `atoll volume move {}` there and import the key here.",
                    shell_word(name)
                )));
        }
        Err(error) => return Err(Failure::get(what, &error)),
    }
    client.mark_moved(name, false).await.map_err(connection::failure)?;
    let mut output = Output::new();
    output.line(format!("{name}: it stays here; destroy the key that was printed"))?;
    output.flush()
}

/// Takes keys over, and renews the leases of what they are of.
pub(super) async fn import(args: &ImportArgs, global: &Global) -> Result<(), Failure> {
    let what = "cannot import a volume's key";
    let mut secret = open(args, what)?;
    if let Some(name) = &args.name {
        secret.name.clone_from(name);
    }
    let name = secret.name.clone();
    if name.contains([':', '#']) {
        return Err(Failure::new(Exit::Usage, what)
            .because(format!("{name} would be taken for an address"))
            .advice("Name it otherwise: `atoll volume import NAME`."));
    }
    pool::check_no_pool(&name, global, what)?;
    let (env, client) = connection::to_node(global).await?;
    let address = VolumeAddress(secret.key.volume_id()).to_string();
    let volumes = client.volumes().await.map_err(connection::failure)?;
    if user::joined(&global.dir()?, &name)?.is_some() {
        return Err(Failure::new(Exit::Failed, what)
            .because(format!("this node has joined a shared volume that is called {name}"))
            .advice(format!(
                "`atoll volume import OTHER-NAME` calls this one otherwise; `atoll volume forget {}` lets go of \
                 that one.",
                shell_word(&name)
            )));
    }
    if let Some(other) = volumes.iter().find(|v| v.address == address && v.name != name) {
        return Err(Failure::new(Exit::Failed, what)
            .because(format!("this node has it already: it is called {} here", other.name)));
    }
    let is_new = client.import_volume(secret.clone()).await.map_err(|error| match error {
        ClientError::Volume(VolumeError::OtherKey { .. }) => Failure::new(Exit::Failed, what)
            .because(format!("this node has another volume that is called {name}"))
            .advice("`atoll volume import OTHER-NAME` calls this one otherwise."),
        error => connection::failure(error),
    })?;
    let mut output = Output::new();
    output.line(match is_new {
        true => format!("{name}: imported, {address}"),
        false => format!("{name}: it is here already, {address}"),
    })?;
    output.line(keep(env, &client, &secret, global).await?)?;
    if let Some(token) = &secret.token {
        let acceptance = move_acceptance(&secret.key, token);
        client.put_signed(acceptance).await.map_err(|error| {
            Failure::put("cannot tell the former node that the volume is here", &error)
        })?;
        output.line("the node that it was moved from forgets it within some ten minutes")?;
    }
    output.flush()
}

/// Makes this node renew the leases of what the ring has of a volume; says of how much.
async fn keep(
    env: Env,
    client: &Arc<Client>,
    secret: &VolumeSecret,
    global: &Global,
) -> Result<String, Failure> {
    let what = format!("the key of {} is here, but its leases are not renewed", secret.name);
    let failed = |error: &dyn std::fmt::Display| {
        Failure::new(Exit::Unavailable, &what).because(error).advice(TRY_AGAIN)
    };
    let (id, read_key) = (secret.key.volume_id(), secret.read_key.as_ref());
    let block = match newest_root(&**client, &id, read_key).await {
        Ok((block, _)) => block,
        Err(error @ (OpenError::Gone(_) | OpenError::Removed)) => {
            return Ok(format!("there are no leases to renew: {error}"));
        }
        Err(OpenError::Root(RootError::Shared)) => {
            client.get_signed(id.root_key()).await.map_err(|error| failed(&error))?
        }
        Err(error) => return Err(failed(&error)),
    };
    let (root, read_key, renewing) = (block.clone(), read_key.cloned(), env.clone());
    let listed = VolumeWalk.blocks_below(env, client.clone(), id, root, read_key).await;
    let blocks = listed.map_err(|error| failed(&error))?;
    let mut keep = client.keep(&secret.name);
    keep.add(&blocks).await.map_err(|error| failed(&error))?;
    match keep.commit(&block).await {
        // This node has written a newer one.
        Ok(()) | Err(ClientError::Volume(VolumeError::Superseded { .. })) => {}
        Err(error) => return Err(failed(&error)),
    }
    // The list counts as renewed when it is made.
    let renew::Report { volume: renewed, shared, .. } =
        renew::one(&renewing, client, global, &secret.name).await?;
    if let Some(trouble) = renewed.trouble {
        return Err(failed(&trouble));
    }
    let mut blocks = units::counted(renewed.kept_blocks, "block", "blocks");
    if let Some(shared) = shared {
        blocks += &format!(" of {}", shared_volume::inodes(shared.inodes));
    }
    Ok(match renewed.lost_blocks {
        0 => format!("this node renews the leases of its {blocks}"),
        lost => format!("this node renews the leases of its {blocks}; no node has {lost} of them"),
    })
}

/// Reads the keys from standard input.
fn open(args: &ImportArgs, what: &str) -> Result<VolumeSecret, Failure> {
    if args.passphrase.is_standard_input() {
        return Err(Failure::new(Exit::Usage, what)
            .because("the key itself is read from standard input, not the passphrase"));
    }
    if io::stdin().is_terminal() {
        note!("Paste the key, and end with Ctrl-D on a line of its own.");
    }
    let mut text = String::new();
    let limit = MAX_SECRET_TEXT_BYTES as u64;
    io::stdin().take(limit).read_to_string(&mut text).map_err(|error| Failure::io(what, &error))?;
    let usage = |why: &dyn std::fmt::Display| Failure::new(Exit::Usage, what).because(why);
    if text.trim().is_empty() {
        return Err(usage(&"there is no key on standard input"));
    }
    let passphrase = args.passphrase.take(what, false)?;
    VolumeSecret::open(&text, &passphrase).map_err(|error| usage(&error))
}
