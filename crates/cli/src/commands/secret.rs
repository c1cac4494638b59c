//! `atoll secret`: replacing the network's secret while the network runs.

use std::time::Duration;

use atoll_node::{Client, ClientError, Rotated};

use super::named_node::NamedNode;
use crate::connection;
use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::output;
use crate::units;

/// Arguments of `atoll secret`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll secret rotate
  atoll secret rotate --remove 92ba4aed9cf7
  atoll secret rotate --overlap 1day

A join code contains the network's secret. If a code has leaked, replace the secret:
codes given out before are worth nothing at once, members go on as before. It is done on
the node that made the network, which holds the administrator's key (admin.key in its
directory: keep a copy of it in a safe place).")]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand, Debug)]
enum Command {
    /// Replace the secret: members get the new one, old join codes become worthless
    Rotate(RotateArgs),
}

/// Arguments of `atoll secret rotate`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll secret rotate
  atoll secret rotate --remove 92ba4aed9cf7 --remove 0b1c2d3e4f50

Members that run get the new secret from each other within seconds, without a restart.
One that is away gets it when it comes back within the time of --overlap; later it needs a
new code (`atoll up --join -`) and keeps its place and its blocks.")]
struct RotateArgs {
    /// Remove this node from the network: the first digits of its key, as `atoll member list`
    /// shows it
    #[arg(long, value_name = "NODE")]
    remove: Vec<NamedNode>,

    #[command(flatten)]
    overlap: Overlap,

    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// How long the former secret stays good.
#[derive(clap::Args, Clone, Copy, Debug)]
pub(crate) struct Overlap {
    /// How long absent members can return with the old secret, from 1min to 90days
    #[arg(long = "overlap", value_name = "TIME", value_parser = units::parse_duration)]
    #[arg(default_value = "7days")]
    time: Duration,
}

/// Does what was asked.
pub(crate) async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let Command::Rotate(args) = &args.command;
    let client = connection::impatient(global).await?;
    rotate(&client, &args.remove, args.overlap, args.json).await
}

/// Replaces the secret, removes nodes, and says what that did.
pub(crate) async fn rotate(
    client: &Client,
    remove: &[NamedNode],
    overlap: Overlap,
    json: bool,
) -> Result<(), Failure> {
    let what = "cannot replace the network's secret";
    let remove = if remove.is_empty() {
        Vec::new()
    } else {
        let list = client.members().await.map_err(connection::failure)?;
        remove.iter().map(|named| named.find(&list)).collect::<Result<_, _>>()?
    };
    let rotated =
        client.rotate_secret(&remove, overlap.time).await.map_err(|error| match error {
            ClientError::Unfit(why) => Failure::new(Exit::Failed, what).because(why),
            other => connection::failure(other),
        })?;
    output::show(json, &rotated, describe(&rotated))
}

fn describe(rotated: &Rotated) -> Vec<String> {
    let Rotated { epoch, removed, told, connected, former_until_unix_secs } = rotated;
    let mut lines = Vec::new();
    if *removed > 0 {
        lines.push(format!("{} removed", units::counted(*removed, "node", "nodes")));
    }
    let until = units::unix_date(*former_until_unix_secs);
    lines.extend([
        format!(
            "secret number {epoch} is with this node and {told} of {} connected to it; they hand \
             it on",
            units::counted(*connected, "member", "members")
        ),
        format!("members that are away can come back by the old one until {until} UTC"),
        "join codes given out before are worth nothing now; `atoll invite` prints a new one".into(),
    ]);
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_rotation_did_is_said() {
        let rotated = Rotated {
            epoch: 3,
            removed: 1,
            told: 6,
            connected: 7,
            former_until_unix_secs: 4_000_000_000,
        };
        let said = describe(&rotated).join("\n");
        for part in ["1 node removed", "secret number 3", "6 of 7", "until 2096-10-02", "invite"] {
            assert!(said.contains(part), "{part}: {said}");
        }
        let said = describe(&Rotated { removed: 0, ..rotated }).join("\n");
        assert!(!said.contains("removed"), "{said}");
    }
}
