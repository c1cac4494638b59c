//! `atoll group`: groups of users, who may together be granted volumes.

use std::sync::Arc;

use atoll_dht::Blocks;
use atoll_env::Env;
use atoll_key::{GroupAddress, SecretKey, UserAddress};
use atoll_node::check_name;
use atoll_volume::shared::access::groups::{add_member, put_group, remove_member};
use atoll_volume::shared::access::{AccessError, GroupRecord, read_group};
use serde::Serialize;

use crate::connection;
use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::moment::Moment;
use crate::output::{self, Output};
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
can write for a week at most. Everybody who knows the group can see who its members are.")]
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
  atoll group remove band atolluser:KEY")]
struct RemoveArgs {
    /// The group's name
    name: String,

    /// Members: labels, or keys
    #[arg(value_name = "USER", value_parser = Grantee::parse, required = true)]
    users: Vec<Grantee>,
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
    blocks: Arc<dyn Blocks>,
    key: SecretKey,
}

impl Group {
    async fn open(name: &str, global: &Global) -> Result<Group, Failure> {
        let (env, client) = connection::to_node(global).await?;
        let user = user::key_or_new(&user::directory(global)?, &env)?;
        Ok(Group { env, blocks: client, key: user::group_key(&user, name) })
    }

    async fn read(&self, what: &str) -> Result<Option<GroupRecord>, Failure> {
        let record = read_group(&self.blocks, self.key.group_id()).await;
        record.map_err(|error| shared_volume::failure(what, error))
    }

    /// The record of a group that was made before.
    async fn record(&self, name: &str, what: &str) -> Result<GroupRecord, Failure> {
        self.read(what).await?.ok_or_else(|| {
            Failure::new(Exit::NotFound, what)
                .because(format!("you have no group {name}"))
                .advice("`atoll group list` shows yours, `atoll group create NAME` makes one.")
        })
    }

    async fn add(&self, users: &[Grantee], until_secs: u64, what: &str) -> Result<(), Failure> {
        let (env, blocks, key) = (&self.env, &self.blocks, &self.key);
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
    if check_name(name).is_err() || name.contains([':', '=', '@', '#']) || name.len() > 64 {
        return Err(Failure::new(Exit::Usage, what).because(
            "a group's name has 1 to 64 bytes, no ':', '=', '@', '#' or slash, and no dot in front",
        ));
    }
    let group = Group::open(name, global).await?;
    let is_new = group.read(&what).await?.is_none();
    if is_new {
        let record = GroupRecord { label: name.clone(), ..GroupRecord::default() };
        put_group(&group.env, &group.blocks, &group.key, &record)
            .await
            .map_err(|error| shared_volume::failure(&what, error))?;
    }
    user::add_group(&user::directory(global)?, name, group.key.group_id())?;
    group.add(&args.users, 0, &what).await?;
    let address = GroupAddress(group.key.group_id()).to_string();
    let shown = Shown { name: name.clone(), group: address.clone(), members: None };
    output::show(args.json, &shown, [address])?;
    if !is_new && !global.quiet {
        eprintln!("the group was there already; its members stay");
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
    let group = Group::open(name, global).await?;
    let record = group.record(name, &what).await?;
    let mut output = Output::new();
    for named in &args.users {
        let user = shared_volume::find_member(&record, named, &what)?;
        let removed = remove_member(&group.env, &group.blocks, &group.key, user).await;
        let removed = removed.map_err(|error: AccessError| shared_volume::failure(&what, error))?;
        let Some(member) = removed else {
            return Err(Failure::new(Exit::NotFound, what)
                .because(format!("{} is no member", UserAddress(user))));
        };
        let until = units::unix_date(member.certificate.not_after_secs);
        output.line(format!("{name}: removed; can write until {until} UTC at most"))?;
    }
    output.flush()
}

async fn list(args: &ListArgs, global: &Global) -> Result<(), Failure> {
    let Some(name) = &args.name else {
        let dir = user::directory(global)?;
        let Some(user) = user::key(&dir)? else { return Ok(()) };
        let mut output = Output::new();
        for name in user::groups(&dir) {
            let group = GroupAddress(user::group_key(&user, &name).group_id()).to_string();
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
    let address = GroupAddress(group.key.group_id()).to_string();
    let lines = [address.clone()].into_iter().chain(shared_volume::member_lines(&record));
    let members = Some(shared_volume::json_members(&record));
    let shown = Shown { name: name.clone(), group: address, members };
    output::show(args.json, &shown, lines)
}
