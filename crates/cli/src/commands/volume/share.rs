//! `atoll volume create --shared`, `invite` and `join`.

use std::path::Path;
use std::sync::Arc;

use atoll_dht::Blocks;
use atoll_env::Env;
use atoll_key::text::TextError;
use atoll_key::{SecretKey, VolumeAddress, VolumeId, VolumeInvitation};
use atoll_node::{Client, check_name, shell_word};
use atoll_volume::keep::Keep;
use atoll_volume::owned::LeaseKeeper;
use atoll_volume::shared::access::groups::add_volume_member;
use atoll_volume::shared::access::{self, AccessError, GroupRecord, NewVolume};
use serde::Serialize;

use super::BLOCK_SIZE_LOG2;
use crate::connection;
use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::messages::note;
use crate::moment::Moment;
use crate::output;
use crate::own_volume;
use crate::pool;
use crate::read_key::read_text;
use crate::shared_volume;
use crate::spool;
use crate::user::{self, Joined};

/// The label of the volume's maker in its list of members.
const MAKER: &str = "owner";

/// The label of members who were invited, unless another one is given.
const INVITED: &str = "invited";

/// Arguments of `atoll volume invite`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll volume invite work
  atoll volume invite work --until 2027-01-31 --label alice

The code contains the volume's address and the secret key of a new member: whoever has it can write the
volume, so give it to one person, over a channel that others do not read. `atoll revoke work LABEL` ends
it. Where the other person has an `atoll id`, `atoll grant` does without a secret.")]
pub(super) struct InviteArgs {
    /// The volume's name on this node
    name: String,

    /// Until when the new member may write: a date or a minute of UTC
    #[arg(long, value_name = "TIME")]
    until: Option<Moment>,

    /// A label for the new member in lists of members [default: invited, or invited-2 and so on]
    #[arg(long)]
    label: Option<String>,

    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// Arguments of `atoll volume join`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll volume join - work < code && atoll mount work ~/work
  atoll volume join - work                     the same: paste the code, then Enter and Ctrl-D
  atoll volume join atoll:KEY work             a volume that was granted to your `atoll id`

The code is a secret: in the place of `-` it is seen by every user of the machine, and stays in the shell's
history.

The code is kept in this node's directory (DIR/shared/NAME). With another code, or the address, the same command
joins the volume anew under its name: after its owner has revoked the first code, for example. `atoll volume list`
lists what was joined, `atoll volume forget NAME` ends it.")]
pub(super) struct JoinArgs {
    /// The code that `atoll volume invite` printed; `-` reads it from standard input. Or the volume's address, to
    /// write it as the user of this node
    code: String,

    /// A name for the volume on this node
    name: String,

    /// One JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct JsonInvitation {
    name: String,
    address: String,
    code: String,
}

#[derive(Serialize)]
struct JsonJoined {
    name: String,
    address: String,
    may_write: bool,
}

/// Makes the record and the root directory of a shared volume with this key.
pub(super) async fn create(
    env: &Env,
    client: &Arc<Client>,
    (name, key, is_encrypted, keep): (&str, &SecretKey, bool, Keep),
    global: &Global,
    what: &str,
) -> Result<(), Failure> {
    let user = user::key_or_new(&user::directory(global)?, env)?;
    let blocks: Arc<dyn Blocks> = client.clone();
    let options = NewVolume {
        label: name.to_owned(),
        member_label: MAKER.to_owned(),
        block_size_log2: BLOCK_SIZE_LOG2,
        owner: own_volume::owner(),
        mode: 0o755,
        is_encrypted,
        keep,
    };
    let failed = |error| shared_volume::failure(what, error);
    access::create(env, &blocks, key, &user, &options).await.map_err(failed)?;
    let found = access::read_volume(&blocks, key.volume_id()).await.map_err(failed)?;
    let (block, _) = found.ok_or_else(|| failed(AccessError::NoVolume))?;
    let kept = own_volume::KeepVersions::new(client.clone(), name).keep(block, Vec::new()).await;
    kept.map_err(|error| Failure::new(Exit::Failed, what).because(error))
}

/// Prints a code with which somebody can write a volume.
pub(super) async fn invite(args: &InviteArgs, global: &Global) -> Result<(), Failure> {
    let name = &args.name;
    let what = format!("cannot invite to {name}");
    let (env, client) = connection::to_node(global).await?;
    let owned = shared_volume::owned(client, name, &what).await?;
    let (user, until_secs) = (user::new_key(&env), shared_volume::until_secs(args.until));
    let members = owned.members(&what).await?;
    let label = free_label(args.label.as_deref(), &members).ok_or_else(|| {
        Failure::new(Exit::Failed, &what)
            .because("a member has that label already")
            .advice("Choose another --label, by which this invitation can be revoked.")
    })?;
    let (volume, member) = ((&owned.key, &owned.record), (user.user_id(), &label[..]));
    add_volume_member(&env, &owned.blocks, volume, member, until_secs)
        .await
        .map_err(|error| shared_volume::failure(&what, error))?;
    let invitation = VolumeInvitation { volume: owned.key.volume_id(), user };
    let (address, code) = (VolumeAddress(invitation.volume).to_string(), invitation.to_text());
    let shown = JsonInvitation { name: name.clone(), address, code: code.clone() };
    output::show(args.json, &shown, [code])?;
    if !args.json && !global.quiet {
        let until = shared_volume::until_text(until_secs);
        note!(
            "one person, {until}: `atoll volume join - NAME` on their node, which reads the code; \
             `atoll revoke {} {}` ends it",
            shell_word(name),
            shell_word(&label)
        );
    }
    Ok(())
}

/// A label that no member has: the one that is wanted, or a new one; none if a member has that.
fn free_label(wanted: Option<&str>, members: &GroupRecord) -> Option<String> {
    let is_free = |label: &str| members.members.values().all(|member| member.label != label);
    match wanted {
        Some("") => Some(String::new()),
        Some(wanted) => is_free(wanted).then(|| wanted.to_owned()),
        None if is_free(INVITED) => Some(INVITED.to_owned()),
        None => (2..).map(|number| format!("{INVITED}-{number}")).find(|label| is_free(label)),
    }
}

/// Keeps a code under a name.
pub(super) async fn join(args: &JoinArgs, global: &Global) -> Result<(), Failure> {
    let name = &args.name;
    let what = format!("cannot join as {name}");
    let usage = |why: &dyn std::fmt::Display| Failure::new(Exit::Usage, &what).because(why);
    if check_name(name).is_err() || name.contains([':', '#', '@']) {
        return Err(usage(&"a volume's name has no ':', '#', '@' or slash, and no dot in front"));
    }
    let text = match &args.code[..] {
        "-" => read_text("-".as_ref()).map_err(|error| Failure::io(&what, &error))?,
        code => code.to_owned(),
    };
    let (volume, invited) = parse_code(text.trim()).map_err(|error| {
        usage(&format!("the code cannot be used: {error}"))
            .advice("`atoll volume invite` prints one, which begins with atoll-share:.")
    })?;
    let (env, client) = connection::to_node(global).await?;
    let dir = user::directory(global)?;
    let is_invited = invited.is_some();
    let user = match invited {
        Some(user) => user,
        None => user::key_or_new(&dir, &env)?,
    };
    let joined = Joined { volume, user, is_invited };
    pool::check_no_pool(name, global, &what)?;
    let volumes = client.volumes().await.map_err(connection::failure)?;
    if volumes.iter().any(|volume| volume.name == *name) {
        return Err(Failure::new(Exit::Failed, what)
            .because("this node has another volume of that name")
            .advice("`atoll volume join CODE OTHER-NAME` calls this one otherwise."));
    }
    if let Some(former) = user::joined(&dir, name)? {
        check_replaceable(&dir, name, (&former, &joined), &what)?;
    }
    let blocks: Arc<dyn Blocks> = client;
    let groups = shared_volume::root_groups(&blocks, joined.volume, &what).await?;
    let credentials = access::Credentials::new(env, blocks, Some(joined.user.clone()));
    let may_write = credentials.may_write(&groups).await;
    user::join(&dir, name, &joined)?;
    let address = VolumeAddress(joined.volume).to_string();
    let shown = JsonJoined { name: name.clone(), address: address.clone(), may_write };
    output::show(args.json, &shown, [address])?;
    if !may_write {
        note!(
            "warning: its member may not write now: never granted, removed, or the time is over; `atoll volume \
             show {}` says more",
            shell_word(name)
        );
    }
    if !args.json && !global.quiet {
        note!("`atoll mount {} DIR` mounts it", shell_word(name));
    }
    Ok(())
}

/// The volume of a code, and the member's key that an invitation has; an address has none.
fn parse_code(text: &str) -> Result<(VolumeId, Option<SecretKey>), TextError> {
    if text.starts_with("atoll:") {
        let VolumeAddress(volume) = text.parse()?;
        return Ok((volume, None));
    }
    let VolumeInvitation { volume, user } = text.parse()?;
    Ok((volume, Some(user)))
}

/// That another key, of the same volume, can take the place of the one by which it was joined: nothing that was
/// written with that one needs it any more.
fn check_replaceable(
    dir: &Path,
    name: &str,
    (former, wanted): (&Joined, &Joined),
    what: &str,
) -> Result<(), Failure> {
    let refused = || Failure::new(Exit::Failed, what);
    if former.volume != wanted.volume {
        return Err(refused().because("this node has joined another volume under that name").advice(
            format!(
                "`atoll volume join CODE OTHER-NAME` calls this one otherwise; `atoll volume forget {}` lets go \
                 of the other.",
                shell_word(name)
            ),
        ));
    }
    let (before, now) = (former.user.user_id(), wanted.user.user_id());
    if before == now {
        return Ok(());
    }
    if let Some(mount) = own_volume::mounts(name, former.volume).first() {
        return Err(refused()
            .because(format!("it is mounted on {} by the former key", mount.display()))
            .advice("Unmount it first."));
    }
    spool::check_shared_empty(dir, (former.volume, Some(before)), what)
}
