//! `atoll renew`: extend the leases of what is published from this node, now.
//!
//! The node does so by itself, a third of a lease after the last time (CFS §3.1, §5.5);
//! this command is for users who will switch it off for long, or had it off for too long.

use std::time::Duration;

use atoll_node::{Client, ClientOptions, VolumeStatus};

use crate::connection;
use crate::failure::{Exit, Failure, TRY_AGAIN};
use crate::global::Global;
use crate::output::Output;
use crate::progress::Share;
use crate::units;

/// How long the renewal of one volume may take: millions of blocks. A guess.
const LIMIT: Duration = Duration::from_secs(3600);
/// How often progress is asked for.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Arguments of `atoll renew`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll renew
  atoll renew docs photos
  atoll renew --json | jq .lost_blocks

The node renews by itself while it runs. Blocks that are on no node any more come back
when their directory is published again.")]
pub(crate) struct Args {
    /// Names of volumes, as `atoll volumes` lists them; all of them if none is given
    #[arg(value_name = "NAME")]
    names: Vec<String>,

    /// One JSON object a volume
    #[arg(long)]
    json: bool,
}

/// Renews them, one after another.
pub(crate) async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let client = patient(global).await?;
    let mut names = args.names.clone();
    if names.is_empty() {
        let volumes = client.volumes().await.map_err(connection::failure)?;
        let published = volumes.into_iter().filter(|volume| volume.root_version > 0);
        names.extend(published.map(|volume| volume.name));
        if names.is_empty() && !args.json {
            eprintln!("nothing is published from this node; `atoll publish DIR` does that");
        }
    }
    let mut output = Output::new();
    let mut worst = None;
    for name in names {
        let volume = renew_watched(&client, &name, args.json).await?;
        if args.json {
            output.json(&volume)?;
        } else {
            output.line(describe(&volume))?;
        }
        output.flush()?;
        worst = problem(&volume).or(worst);
    }
    worst.map_or(Ok(()), Err)
}

async fn patient(global: &Global) -> Result<Client, Failure> {
    let options = ClientOptions { limit: LIMIT, ..ClientOptions::default() };
    Client::connect_with(global.dir()?, options).await.map_err(connection::failure)
}

/// Renews the leases of one volume; its state then.
pub(super) async fn one(global: &Global, name: &str) -> Result<VolumeStatus, Failure> {
    renew_watched(&patient(global).await?, name, global.quiet).await
}

/// Renews one volume, and shows how far that has come.
async fn renew_watched(client: &Client, name: &str, quiet: bool) -> Result<VolumeStatus, Failure> {
    let share = (!quiet).then(|| Share::new("renewing"));
    let watch = async {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            // A node that does not answer is noticed by the renewal itself.
            let Ok(volumes) = client.volumes().await else { continue };
            let Some(volume) = volumes.into_iter().find(|volume| volume.name == name) else {
                continue;
            };
            if let (Some(share), Some(done)) = (&share, volume.renewing_blocks) {
                share.show(done, volume.kept_blocks);
            }
        }
    };
    let renewed = tokio::select! {
        renewed = client.renew_volume(name) => renewed,
        () = watch => unreachable!("it watches until the renewal has ended"),
    };
    if let Some(share) = share {
        share.finish();
    }
    renewed.map_err(connection::failure)
}

fn describe(volume: &VolumeStatus) -> String {
    let mut blocks = units::counted(volume.kept_blocks, "block", "blocks");
    let until = units::unix_date(volume.lease_expires_unix_secs);
    if volume.trouble.is_some() {
        return format!("{}: {blocks} not renewed; kept until {until} UTC", volume.name);
    }
    if volume.lost_blocks > 0 {
        let there = volume.kept_blocks.saturating_sub(volume.lost_blocks);
        blocks = format!("{} of {blocks}", units::count(there));
    }
    format!("{}: {blocks} kept until {until} UTC", volume.name)
}

/// What is still wrong with a volume.
fn problem(volume: &VolumeStatus) -> Option<Failure> {
    let name = &volume.name;
    if let Some(trouble) = &volume.trouble {
        let what = format!("the leases of volume {name} were not renewed");
        return Some(Failure::new(Exit::Unavailable, what).because(trouble).advice(TRY_AGAIN));
    }
    if volume.lost_blocks > 0 {
        let lost = units::counted(volume.lost_blocks, "block", "blocks");
        let source = volume.source.as_deref().unwrap_or("its directory");
        let what = format!("no node that can be reached has {lost} of volume {name}");
        return Some(
            Failure::new(Exit::NotFound, what).advice(format!(
                "If no node is missing, `atoll publish {source}` brings them back."
            )),
        );
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_could_not_be_kept_is_a_failure() {
        let good = VolumeStatus { name: "docs".into(), kept_blocks: 2, ..VolumeStatus::default() };
        assert!(problem(&good).is_none());
        assert_eq!(describe(&good), "docs: 2 blocks kept until 1970-01-01 00:00:00 UTC");
        let lost = VolumeStatus { lost_blocks: 1, source: Some("/srv/d".into()), ..good.clone() };
        assert_eq!(describe(&lost), "docs: 1 of 2 blocks kept until 1970-01-01 00:00:00 UTC");
        let failure = problem(&lost).expect("lost");
        assert_eq!(failure.exit, Exit::NotFound);
        assert!(failure.to_string().contains("1 block of volume docs"), "{failure}");
        let silent = VolumeStatus { trouble: Some("nobody answers".into()), ..good };
        assert_eq!(problem(&silent).expect("not renewed").exit, Exit::Unavailable);
    }
}
