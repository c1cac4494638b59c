//! `atoll contribute`: how a node gives disk.

use std::path::PathBuf;

use atoll_node::{ContributionStatus, Policy, Share};

use crate::commands::quota::parse_percent;
use crate::connection;
use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::output;
use crate::units;

/// Arguments of `atoll contribute`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll contribute
  atoll contribute fixed 50GiB
  atoll contribute dynamic --low 80% --high 85%
  atoll contribute transparent /mnt/tfs/atoll

A change holds at once and for later starts; blocks move in the background. Copies
for which there is no room are given up, those farthest from this node on the ring first; repair
makes them again from the copies on other nodes.")]
pub(crate) struct Args {
    #[command(subcommand)]
    policy: Option<PolicyArgs>,

    /// Do not wait any longer for blocks in a directory that is gone for good
    #[arg(long)]
    abandon: bool,

    /// One JSON object
    #[arg(long, global = true)]
    json: bool,
}

#[derive(clap::Subcommand, Debug)]
enum PolicyArgs {
    /// A fixed size, whatever else fills the disk
    Fixed {
        /// How much disk the store may use
        #[arg(value_name = "SIZE", value_parser = units::parse_size, allow_negative_numbers = true)]
        size: u64,
    },
    /// Fill the disk up to a watermark, and give space back when other files fill it further
    Dynamic {
        /// The store grows until this share of the disk is used, and shrinks to it
        #[arg(long, value_name = "PERCENT", default_value = "80%", value_parser = parse_percent)]
        low: Share,
        /// The store shrinks when more than this share of the disk is used
        #[arg(long, value_name = "PERCENT", default_value = "85%", value_parser = parse_percent)]
        high: Share,
    },
    /// All free space of a mounted TFS, which takes it back when other files need it
    Transparent {
        /// An empty transparent directory (`atoll tfs set --transparent`)
        // Not "dir": clap would take it for the node's directory.
        #[arg(value_name = "DIR")]
        given: PathBuf,
    },
}

impl PolicyArgs {
    fn policy(&self) -> Result<Policy, Failure> {
        Ok(match self {
            PolicyArgs::Fixed { size } => Policy::Fixed { size_bytes: *size },
            PolicyArgs::Dynamic { low, high } => Policy::Dynamic { low: *low, high: *high },
            PolicyArgs::Transparent { given } => {
                let dir = std::path::absolute(given).map_err(|error| {
                    Failure::io(format!("cannot find {}", given.display()), &error)
                })?;
                Policy::Transparent { dir }
            }
        })
    }
}

/// Makes the change, if one is given, and shows how disk is given.
pub(crate) async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let policy = args.policy.as_ref().map(PolicyArgs::policy).transpose()?;
    if args.abandon && policy.is_some() {
        return Err(Failure::new(Exit::Usage, "--abandon goes with no policy")
            .advice("`atoll contribute --abandon` first, then the policy."));
    }
    let client = connection::impatient(global).await?;
    let status = match (args.abandon, &policy) {
        (true, _) => client.abandon_former().await,
        (false, Some(policy)) => client.contribute(policy).await,
        (false, None) => client.contribution().await,
    };
    let status = status.map_err(connection::failure)?;
    output::show(args.json, &status, describe(&status))
}

fn describe(status: &ContributionStatus) -> Vec<String> {
    let percent = |part: Option<f64>| format!("{:.4}", part.unwrap_or_default() * 100.0);
    let percent = |part| format!("{}%", percent(part).trim_end_matches('0').trim_end_matches('.'));
    let policy = match status.policy.as_str() {
        "fixed" => format!("fixed, {}", units::size(status.size_bytes.unwrap_or_default())),
        "dynamic" => format!(
            "dynamic, fills the disk up to {} and gives back above {}",
            percent(status.low),
            percent(status.high)
        ),
        "transparent" => "transparent, all that is free".to_owned(),
        other => other.to_owned(),
    };
    let blocks = units::counted(status.blocks, "block", "blocks");
    let mut rows = vec![
        ("policy", policy),
        ("in", status.dir.clone()),
        ("offered", units::size(status.offered_bytes)),
        ("used", format!("{} ({blocks})", units::size(status.used_bytes))),
    ];
    if status.disk_total_bytes > 0 {
        let [free, total] = [status.disk_free_bytes, status.disk_total_bytes].map(units::size);
        rows.push(("disk", format!("{free} of {total} free")));
    }
    if let Some(moving) = &status.moving {
        let left = units::counted(moving.left_blocks, "block", "blocks");
        let size = units::size(moving.left_bytes);
        // A directory that is not there shows none.
        let what = match moving.left_blocks {
            0 => "what is left".to_owned(),
            _ => format!("{left} ({size})"),
        };
        rows.push(("moving", format!("{what} still to come from {}", moving.from)));
    }
    if status.lost_blocks > 0 {
        let lost = units::counted(status.lost_blocks, "block", "blocks");
        rows.push(("vanished", format!("{lost} since the start; repair restores them")));
    }
    if status.dropped_blocks > 0 {
        let dropped = units::counted(status.dropped_blocks, "copy", "copies");
        rows.push(("given up", format!("{dropped} since the start, for want of room")));
    }
    let warnings = status.warnings.iter().map(|warning| ("warning", warning.clone()));
    let rows = rows.into_iter().chain(warnings);
    rows.map(|(name, value)| format!("{name:>9}  {value}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use atoll_node::Moving;

    #[test]
    fn what_is_given_is_shown_with_what_the_disk_says() {
        let status = ContributionStatus {
            policy: "dynamic".into(),
            low: Some(0.8),
            high: Some(0.855),
            dir: "/n/store".into(),
            offered_bytes: 10 << 30,
            used_bytes: 1 << 30,
            blocks: 7,
            disk_total_bytes: 100 << 30,
            disk_free_bytes: 40 << 30,
            moving: Some(Moving { from: "/tfs".into(), left_blocks: 3, ..Moving::default() }),
            warnings: vec!["look out".into()],
            ..ContributionStatus::default()
        };
        let text = describe(&status).join("\n");
        for part in [
            "up to 80% and gives back above 85.5%",
            "1.0 GiB (7 blocks)",
            "40.0 GiB of 100.0 GiB free",
            "3 blocks (0 B) still to come from /tfs",
            "warning  look out",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains("vanished") && !text.contains("given up"), "{text}");
    }
}
