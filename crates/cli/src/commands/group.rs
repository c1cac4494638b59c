//! `atoll group`: groups of users, who may together be granted volumes.

use std::sync::Arc;

use atoll_dht::Blocks;
use atoll_env::Env;
use atoll_key::{GroupAddress, GroupId, UserAddress};
use atoll_node::{Client, check_name};
use atoll_volume::shared::access::groups::{add_member, remove_member};
use atoll_volume::shared::access::readers::{add_reading_group, remove_reading_group};
use atoll_volume::shared::access::{AccessError, GroupRecord};
use serde::Serialize;

use crate::connection;
use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::messages::note;
use crate::moment::Moment;
use crate::output::{self, Output};
use crate::own_group::{self, MAX_NAME_BYTES, OwnGroup};
use crate::shared_volume::{self, Grantee, JsonMember};
use crate::units;
use crate::user;

/// Arguments of `atoll group`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll group create band alice=atolluser:KEY bob=atolluser:KEY
  atoll group add band carol=atolluser:KEY --until 2027-01-31
  atoll group remove band bob
  atoll group list band
  atoll grant work band

A group belongs to the user of this node, who alone adds and removes members. Its members may write
every volume that the group is granted, also other people's (`atollgroup:KEY`). Members get
certificates for a week at a time, which this node renews daily while it runs: somebody who is removed
can write for a week at most, or with --now nothing any more in your volumes. Everybody who knows the group can
see who its members are.
`atoll grant VOLUME/PATH USER` makes groups that are called VOLUME:PATH.")]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand, Debug)]
enum Command {
    /// Make a group, and print its address
    Create(CreateArgs),
    /// Add members, or say anew until when they are members
    Add(AddArgs),
    /// Remove members, whose certificates are not renewed any more
    Remove(RemoveArgs),
    /// List your groups, or the members of one
    List(ListArgs),
}

#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll group create band
  atoll group create band alice=atolluser:KEY

The group's key follows from yours and its name: after the loss of the list of groups, the same command
finds the group again.")]
struct CreateArgs {
    /// The group's name
    name: String,

    /// Members, as `atoll id` prints them there; LABEL= before one is shown in lists
    #[arg(value_name = "USER", value_parser = Grantee::parse)]
    users: Vec<Grantee>,

    /// One JSON object
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll group add band bob=atolluser:KEY
  atoll group add band atolluser:KEY --until 2027-01-31")]
struct AddArgs {
    /// The group's name
    name: String,

    /// Members, as `atoll id` prints them there; LABEL= before one is shown in lists
    #[arg(value_name = "USER", value_parser = Grantee::parse, required = true)]
    users: Vec<Grantee>,

    /// Until when they are members: a date or a minute of UTC
    #[arg(long, value_name = "TIME")]
    until: Option<Moment>,
}

#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll group remove band bob
  atoll group remove band bob --now
  atoll group remove band atolluser:KEY

With --now the group gets a new key, and everything in your shared volumes that it may write is bound to that,
which takes two messages a file; run it again if it was interrupted. Volumes of others that were granted the group
still know the former key: their owners have to grant the new one, and revoke the other.")]
struct RemoveArgs {
    /// The group's name
    name: String,

    /// Members: labels, or keys
    #[arg(value_name = "USER", value_parser = Grantee::parse, required = true)]
    users: Vec<Grantee>,

    /// Do not wait until their certificates end
    #[arg(long)]
    now: bool,
}

#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll group list
  atoll group list band --json | jq -r '.members[].label'")]
struct ListArgs {
    /// The group's name; without it, the groups that were made on this node are listed
    name: Option<String>,

    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Shown {
    name: String,
    group: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    members: Option<Vec<JsonMember>>,
}

/// A group of the user's.
struct Group {
    env: Env,
    client: Arc<Client>,
    blocks: Arc<dyn Blocks>,
    own: OwnGroup,
}

impl Group {
    async fn open(name: &str, global: &Global) -> Result<Group, Failure> {
        let (env, client) = connection::to_node(global).await?;
        let own = own_group::open(name, &env, global)?;
        Ok(Group { env, blocks: client.clone(), client, own })
    }

    /// The record of a group that was made before.
    async fn record(&self, name: &str, what: &str) -> Result<GroupRecord, Failure> {
        let record = self.own.read(&self.blocks).await;
        record.map_err(|error| shared_volume::failure(what, error))?.ok_or_else(|| {
            Failure::new(Exit::NotFound, what)
                .because(format!("you have no group {name}"))
                .advice("`atoll group list` shows yours, `atoll group create NAME` makes one.")
        })
    }

    async fn add(&self, users: &[Grantee], until_secs: u64, what: &str) -> Result<(), Failure> {
        let (env, blocks, key) = (&self.env, &self.blocks, &self.own.key);
        for user in users {
            let Grantee::User(user, label) = user else {
                return Err(Failure::new(Exit::Usage, what)
                    .because("a member is named by its key: LABEL=atolluser:KEY")
                    .advice("`atoll id` prints it on the member's node."));
            };
            add_member(env, blocks, key, *user, label, until_secs)
                .await
                .map_err(|error| shared_volume::failure(what, error))?;
        }
        Ok(())
    }
}

impl Group {
    /// Binds everything in the user's volumes that is bound to a former epoch of the group to the present one; of how
    /// many files and directories.
    async fn bind_volumes(&self, global: &Global, what: &str) -> Result<u64, Failure> {
        let me = user::key(&user::directory(global)?)?;
        let renewed = |groups: &[GroupId]| self.own.renewed(groups);
        let failed = |error| shared_volume::failure(what, error);
        let mut rebound = 0;
        let volumes = self.client.volumes().await.map_err(connection::failure)?;
        for volume in volumes.into_iter().filter(|volume| volume.source.is_none()) {
            let owned = match shared_volume::owned(self.client.clone(), &volume.name, what).await {
                Ok(owned) => owned,
                // Not a shared one, or none at all.
                Err(failure) if matches!(failure.exit, Exit::Failed | Exit::NotFound) => continue,
                Err(failure) => return Err(failure),
            };
            let readers = owned.readers(what).await?;
            let reads = self.own.former().into_iter().filter(|one| readers.groups.contains(one));
            for former in reads {
                let (env, blocks, key) = (&self.env, &self.blocks, &owned.key);
                add_reading_group(env, blocks, key, self.own.id()).await.map_err(failed)?;
                remove_reading_group(env, blocks, key, former).await.map_err(failed)?;
            }
            let (root, env) = (owned.record.root, &self.env);
            let report = owned.rebind(env, me.clone(), root, &renewed, (what, global.quiet));
            rebound += report.await?.changed;
        }
        Ok(rebound)
    }
}

/// Does what was asked.
pub(crate) async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    match &args.command {
        Command::Create(args) => create(args, global).await,
        Command::Add(args) => add(args, global).await,
        Command::Remove(args) => remove(args, global).await,
        Command::List(args) => list(args, global).await,
    }
}

async fn create(args: &CreateArgs, global: &Global) -> Result<(), Failure> {
    let name = &args.name;
    let what = format!("cannot make the group {name}");
    let is_long = name.len() > MAX_NAME_BYTES;
    if check_name(name).is_err() || name.contains([':', '=', '@', '#']) || is_long {
        return Err(Failure::new(Exit::Usage, what).because(
            "a group's name has 1 to 64 bytes, no ':', '=', '@', '#' or slash, and no dot in front",
        ));
    }
    let mut group = Group::open(name, global).await?;
    let made = group.own.make(&group.env, &group.blocks).await;
    let is_new = made.map_err(|error| own_group::failure(&what, error))?;
    group.add(&args.users, 0, &what).await?;
    let address = GroupAddress(group.own.id()).to_string();
    let shown = Shown { name: name.clone(), group: address.clone(), members: None };
    output::show(args.json, &shown, [address])?;
    if !is_new && !global.quiet {
        note!("the group was there already; its members stay");
    }
    Ok(())
}

async fn add(args: &AddArgs, global: &Global) -> Result<(), Failure> {
    let name = &args.name;
    let what = format!("cannot add to the group {name}");
    let group = Group::open(name, global).await?;
    group.record(name, &what).await?;
    let until_secs = shared_volume::until_secs(args.until);
    group.add(&args.users, until_secs, &what).await?;
    let added = units::counted(args.users.len() as u64, "member", "members");
    let mut output = Output::new();
    output.line(format!("{name}: {added}, {}", shared_volume::until_text(until_secs)))?;
    output.flush()
}

async fn remove(args: &RemoveArgs, global: &Global) -> Result<(), Failure> {
    let name = &args.name;
    let what = format!("cannot remove from the group {name}");
    let mut group = Group::open(name, global).await?;
    let record = group.record(name, &what).await?;
    let mut output = Output::new();
    for named in &args.users {
        let user = shared_volume::find_member(&record, named, &what)?;
        if args.now {
            let begun = group.own.begin_epoch(&group.env, &group.blocks, user).await;
            begun.map_err(|error| own_group::failure(&what, error))?;
            continue;
        }
        let removed = remove_member(&group.env, &group.blocks, &group.own.key, user).await;
        let removed = removed.map_err(|error: AccessError| shared_volume::failure(&what, error))?;
        let Some(member) = removed else {
            return Err(Failure::new(Exit::NotFound, what)
                .because(format!("{} is no member", UserAddress(user))));
        };
        let until = units::unix_date(member.certificate.not_after_secs);
        output.line(format!("{name}: removed; can write until {until} UTC at most"))?;
    }
    if args.now {
        let rebound = group.bind_volumes(global, &what).await?;
        let address = GroupAddress(group.own.id());
        output.line(format!("{name}: shut out, {rebound} changed; the group is {address} now"))?;
    }
    output.flush()
}

async fn list(args: &ListArgs, global: &Global) -> Result<(), Failure> {
    let Some(name) = &args.name else {
        let dir = user::directory(global)?;
        let Some(user) = user::key(&dir)? else { return Ok(()) };
        let mut output = Output::new();
        for name in user::groups(&dir) {
            let group = GroupAddress(OwnGroup::of(&dir, &user, &name)?.id()).to_string();
            match args.json {
                true => output.json(&Shown { name, group, members: None })?,
                false => output.line(format!("{name}  {group}"))?,
            }
        }
        return output.flush();
    };
    let what = format!("cannot list the group {name}");
    let group = Group::open(name, global).await?;
    let record = group.record(name, &what).await?;
    let address = GroupAddress(group.own.id()).to_string();
    let lines = [address.clone()].into_iter().chain(shared_volume::member_lines(&record));
    let members = Some(shared_volume::json_members(&record));
    let shown = Shown { name: name.clone(), group: address, members };
    output::show(args.json, &shown, lines)
}
