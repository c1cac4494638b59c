//! `atoll member`: who belongs to the network, and removing a node from it.

use std::str::FromStr;

use atoll_key::PeerId;
use atoll_node::{Member, MemberList};

use super::secret::{self, Overlap};
use crate::arguments::Global;
use crate::connection;
use crate::failure::{Exit, Failure};
use crate::output::Output;
use crate::units;

/// How much of a key is shown: enough to tell the members of a network apart.
const SHOWN_DIGITS: usize = 12;
/// The fewest digits by which a node may be named.
const LEAST_DIGITS: usize = 8;

/// Arguments of `atoll member`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll member list
  atoll member list --json | jq -r '.members[] | [.id, .addr, .status] | @tsv'
  atoll member remove 92ba4aed9cf7

A node is known by its key, of which the first digits are shown; in a large network a node
knows those members that it has met.")]
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
    nodes: Vec<Wanted>,

    #[command(flatten)]
    overlap: Overlap,

    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// The first hexadecimal digits of a node's key.
#[derive(Clone, Debug)]
pub(crate) struct Wanted(String);

impl FromStr for Wanted {
    type Err = String;

    fn from_str(text: &str) -> Result<Wanted, String> {
        let digits = text.to_ascii_lowercase();
        let is_hex = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        if is_hex && (LEAST_DIGITS..=64).contains(&digits.len()) {
            return Ok(Wanted(digits));
        }
        Err(format!("a node is named by {LEAST_DIGITS} to 64 hexadecimal digits of its key"))
    }
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
            let mut output = Output::new();
            if args.json {
                output.json(&list)?;
                return output.flush();
            }
            for line in describe(&list) {
                output.line(line)?;
            }
            output.flush()
        }
    }
}

/// The node whose key begins so.
///
/// # Errors
/// If there is none, or more than one. A whole key need not be known here.
pub(crate) fn find(list: &MemberList, Wanted(digits): &Wanted) -> Result<PeerId, Failure> {
    let ids = list.members.iter().map(|member| &member.id);
    let found: Vec<&String> = ids.filter(|id| id.starts_with(digits)).collect();
    let id = match found[..] {
        [id] => id,
        [] if digits.len() == 64 => digits,
        [] => {
            return Err(Failure::new(Exit::NotFound, format!("no member {digits}"))
                .because("this node knows none whose key begins so")
                .advice("`atoll member list` lists those it knows; a whole key always does."));
        }
        _ => {
            return Err(Failure::new(Exit::Usage, format!("which member is {digits}?"))
                .because(format!("the keys of {} members begin so", found.len()))
                .advice("Give more digits; `atoll member list --json` shows all."));
        }
    };
    key_of(id).ok_or_else(|| Failure::new(Exit::Failed, format!("{id} is not a key")))
}

fn key_of(hex: &str) -> Option<PeerId> {
    let (pairs, rest) = hex.as_bytes().as_chunks::<2>();
    let byte = |pair: &[u8; 2]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    let bytes: Option<Vec<u8>> = pairs.iter().map(byte).collect();
    bytes.filter(|_| rest.is_empty())?.try_into().ok().map(PeerId)
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

    #[test]
    fn a_node_is_named_by_enough_digits_to_be_one() {
        for bad in ["", "abc", "xyzxyzxy", &"a".repeat(65)] {
            assert!(bad.parse::<Wanted>().is_err(), "{bad}");
        }
        let find = |text: &str| find(&list(), &text.parse().expect("digits"));
        assert_eq!(find("CDCDCDCD").ok(), Some(PeerId([0xcd; 32])));
        assert_eq!(find("abababab").map_err(|failure| failure.exit), Err(Exit::Usage));
        assert_eq!(find(&"ab".repeat(32)).ok(), Some(PeerId([0xab; 32])));
        assert_eq!(find("01234567").map_err(|failure| failure.exit), Err(Exit::NotFound));
        assert_eq!(find(&"0e".repeat(32)).ok(), Some(PeerId([0x0e; 32])), "not known here");
    }
}
