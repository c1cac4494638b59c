//! `atoll member`: who belongs to the network, and removing a node from it.

use atoll_node::{Member, MemberList};

use super::named_node::NamedNode;
use super::secret::{self, Overlap};
use crate::connection;
use crate::failure::Failure;
use crate::global::Global;
use crate::output;
use crate::units;

/// How much of a key is shown: enough to tell the members of a network apart.
const SHOWN_DIGITS: usize = 12;

/// Arguments of `atoll member`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll member list
  atoll member list --json | jq -r '.members[] | [.id, .addr, .status] | @tsv'
  atoll member remove 92ba4aed9cf7

A member is named by the first digits of its key. In a large network a node lists only the
members that it has met.")]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand, Debug)]
enum Command {
    /// List the members that this node knows
    List(ListArgs),
    /// Remove nodes from the network, and replace the secret, because they know it
    Remove(RemoveArgs),
}

/// Arguments of `atoll member list`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll member list
  atoll member list --json

A member is `connected`, `away` (met before, not connected now), `known` (in the routing
tables, not met yet) or `removed`.")]
struct ListArgs {
    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// Arguments of `atoll member remove`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll member remove 92ba4aed9cf7

The same as `atoll secret rotate --remove NODE`. The network's other members close their
connections with the node and make none any more; it does not get the new secret. Blocks
that it held are copied again from their other replicas.")]
struct RemoveArgs {
    /// The first digits of the node's key, as `atoll member list` shows it
    #[arg(value_name = "NODE", required = true)]
    nodes: Vec<NamedNode>,

    #[command(flatten)]
    overlap: Overlap,

    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// Does what was asked.
pub(crate) async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let client = connection::impatient(global).await?;
    match &args.command {
        Command::Remove(args) => {
            secret::rotate(&client, &args.nodes, args.overlap, args.json).await
        }
        Command::List(args) => {
            let list = client.members().await.map_err(connection::failure)?;
            output::show(args.json, &list, describe(&list))
        }
    }
}

fn describe(list: &MemberList) -> Vec<String> {
    let mut lines = vec![format!("network {}, secret number {}", list.network_id, list.epoch)];
    if let Some(until) = list.former_until_unix_secs {
        let until = units::unix_date(until);
        lines
            .push(format!("members that were away can come back by the old one until {until} UTC"));
    }
    let who = if list.is_admin { "holds" } else { "does not hold" };
    lines.push(format!("this node {who} the administrator's key"));
    lines.push(format!("{:<12}  {:<9}  {:<21}  LAST SEEN (UTC)", "NODE", "STATUS", "ADDRESS"));
    lines.extend(list.members.iter().map(line));
    lines
}

fn line(member: &Member) -> String {
    let id = member.id.get(..SHOWN_DIGITS).unwrap_or(&member.id);
    let seen = match member.last_seen_unix_secs {
        0 => "never".to_owned(),
        secs => units::unix_date(secs),
    };
    let addr = if member.addr.is_empty() { "unknown" } else { &member.addr };
    format!("{id:<12}  {:<9}  {addr:<21}  {seen}", member.status)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list() -> MemberList {
        let member = |id: &str, status: &str, last_seen_unix_secs| Member {
            id: id.repeat(32),
            addr: "192.0.2.7:7543".into(),
            status: status.into(),
            last_seen_unix_secs,
            version: 1,
        };
        let twin = Member { id: format!("{}ff", "ab".repeat(31)), ..member("ab", "away", 1) };
        MemberList {
            network_id: "0123".into(),
            epoch: 2,
            former_until_unix_secs: Some(4_000_000_000),
            members: vec![member("ab", "connected", 4_000_000_000), twin, member("cd", "known", 0)],
            ..MemberList::default()
        }
    }

    #[test]
    fn members_are_listed_with_where_they_are_and_when_they_were_seen() {
        let said = describe(&list()).join("\n");
        for part in [
            "network 0123, secret number 2",
            "until 2096-10-02",
            "does not hold the administrator's key",
            "abababababab  connected  192.0.2.7:7543         2096-10-02",
            "cdcdcdcdcdcd  known      192.0.2.7:7543         never",
        ] {
            assert!(said.contains(part), "{part}: {said}");
        }
    }
}
