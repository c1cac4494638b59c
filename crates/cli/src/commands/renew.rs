//! `atoll renew`: extend the leases of what is published from this node, now.
//!
//! The node does so by itself, a third of a lease after the last time (CFS §3.1, §5.5);
//! this command is for users who will switch it off for long, or had it off for too long.
//!
//! The node renews the record of a shared volume. The command then walks the volume from its root directory, as the
//! node does once a day, and also walks volumes that this node has joined.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use atoll_dht::Blocks;
use atoll_env::Env;
use atoll_node::{Client, ClientError, ClientOptions, VolumeError, VolumeStatus, shell_word};
use atoll_upkeep::{StillWritable, Walk};
use atoll_volume::shared::access::{AccessError, read_volume};
use atoll_volume::shared::upkeep::Kept;

use crate::connection;
use crate::failure::{Exit, Failure, TRY_AGAIN};
use crate::global::Global;
use crate::messages::note;
use crate::output::{Output, escaped};
use crate::progress::Share;
use crate::{shared_volume, units, user};

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

/// A volume that was renewed.
#[derive(serde::Serialize)]
pub(super) struct Report {
    #[serde(flatten)]
    pub volume: VolumeStatus,
    /// The result of walking it, if it is a shared one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared: Option<SharedReport>,
    /// The node that it was moved to renews it now, and this one has forgotten it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    is_taken_over: bool,
}

impl Report {
    /// Of a volume that one mount or publisher writes.
    fn of(volume: VolumeStatus) -> Report {
        Report { volume, shared: None, is_taken_over: false }
    }
}

/// The result of walking a shared volume.
#[derive(Default, serde::Serialize)]
pub(super) struct SharedReport {
    pub inodes: u64,
    unread_inodes: u64,
    /// The first of these, and why.
    unread: Vec<String>,
}

/// Renews them, one after another.
pub(crate) async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let client = patient(global).await?;
    let dir = global.dir()?;
    let mut names = args.names.clone();
    if names.is_empty() {
        let volumes = client.volumes().await.map_err(connection::failure)?;
        let published = volumes.into_iter().filter(|volume| volume.root_version > 0);
        names.extend(published.map(|volume| volume.name));
        names.extend(user::joined_names(&dir));
        if names.is_empty() && !args.json {
            note!("nothing is published from this node; `atoll publish DIR` does that");
        }
    }
    let (env, ring) = connection::to_node(global).await?;
    let mut output = Output::new();
    let mut worst = None;
    for name in names {
        let report = renew(&env, (&client, &ring), &dir, &name, args.json).await?;
        if args.json {
            output.json(&report)?;
        } else {
            output.line(describe(&report))?;
        }
        output.flush()?;
        worst = problem(&report).or(worst);
    }
    worst.map_or(Ok(()), Err)
}

/// Renews all of a volume.
async fn renew(
    env: &Env,
    (client, ring): (&Client, &Arc<Client>),
    dir: &Path,
    name: &str,
    quiet: bool,
) -> Result<Report, Failure> {
    let blocks: Arc<dyn Blocks> = ring.clone();
    let what = format!("the leases of volume {name} were not renewed");
    let volumes = client.volumes().await.map_err(connection::failure)?;
    let is_here = volumes.iter().any(|volume| volume.name == name);
    if !is_here && let Some(joined) = user::joined(dir, name)? {
        let walk = Walk::of_member(env, &blocks, joined).await;
        let walk = walk.map_err(|why| Failure::new(Exit::Failed, what.clone()).because(why))?;
        let volume = VolumeStatus { name: name.to_owned(), ..VolumeStatus::default() };
        return walked(env, &blocks, &walk, volume, &what).await;
    }
    let volume = match renew_watched(client, name, quiet).await {
        Err(ClientError::Volume(VolumeError::TakenOver { .. })) => {
            let volume = VolumeStatus { name: name.to_owned(), ..VolumeStatus::default() };
            return Ok(Report { is_taken_over: true, ..Report::of(volume) });
        }
        renewed => renewed.map_err(connection::failure)?,
    };
    // The key of one that is on its way to another node is not for use here.
    if volume.source.is_some() || volume.trouble.is_some() || volume.is_moved {
        return Ok(Report::of(volume));
    }
    let key = client.named_volume(name).await.map_err(connection::failure)?.key;
    match read_volume(&blocks, key.volume_id()).await {
        Ok(Some((_, record))) => {
            let walk = Walk::of_owner(dir, &key, &record)?;
            walked(env, &blocks, &walk, volume, &what).await
        }
        // One writer's.
        Ok(None) | Err(AccessError::Bad { .. }) => Ok(Report::of(volume)),
        Err(error) => Err(shared_volume::failure(&what, error)),
    }
}

/// Walks a shared volume; what is kept of it.
async fn walked(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    walk: &Walk,
    mut volume: VolumeStatus,
    what: &str,
) -> Result<Report, Failure> {
    let kept = walk.keep(env, blocks).await.map_err(|error| Failure::put(what, &error))?;
    if let Err(StillWritable { inodes, named }) = walk.rebind_former(env, blocks, &kept).await {
        let inodes = shared_volume::inodes(inodes);
        let named = named.iter().map(|(path, why)| format!("{}: {why}", escaped(path)));
        let named: Vec<String> = named.collect();
        let named = named.join("; ");
        note!("warning: members who were shut out can still write {inodes}: {named}");
    }
    let Kept { inodes, renewed, lacking, unread, named, .. } = kept;
    (volume.kept_blocks, volume.lost_blocks) = (renewed + lacking, lacking);
    volume.refreshed_unix_secs = env.unix_ms() / 1000;
    let shared = SharedReport { inodes, unread_inodes: unread, unread: named };
    Ok(Report { shared: Some(shared), ..Report::of(volume) })
}

async fn patient(global: &Global) -> Result<Client, Failure> {
    let options = ClientOptions { limit: LIMIT, ..ClientOptions::default() };
    Client::connect_with(global.dir()?, options).await.map_err(connection::failure)
}

/// Renews the leases of one volume; its state then.
pub(super) async fn one(
    env: &Env,
    ring: &Arc<Client>,
    global: &Global,
    name: &str,
) -> Result<Report, Failure> {
    let client = patient(global).await?;
    renew(env, (&client, ring), &global.dir()?, name, global.quiet).await
}

/// Renews one volume, and shows how far that has come.
async fn renew_watched(
    client: &Client,
    name: &str,
    quiet: bool,
) -> Result<VolumeStatus, ClientError> {
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
    renewed
}

fn describe(report: &Report) -> String {
    let volume = &report.volume;
    let mut blocks = units::counted(volume.kept_blocks, "block", "blocks");
    if volume.lost_blocks > 0 {
        let there = volume.kept_blocks.saturating_sub(volume.lost_blocks);
        blocks = format!("{} of {blocks}", units::count(there));
    }
    let name = &volume.name;
    if report.is_taken_over {
        return format!("{name}: the node that it was moved to renews it; it is forgotten here");
    }
    if volume.trouble.is_some() {
        let until = units::unix_date(volume.lease_expires_unix_secs);
        return format!("{name}: {blocks} not renewed; kept until {until} UTC");
    }
    if let Some(shared) = &report.shared {
        return format!("{name}: {blocks} of {} renewed", shared_volume::inodes(shared.inodes));
    }
    format!("{name}: {blocks} kept until {} UTC", units::unix_date(volume.lease_expires_unix_secs))
}

/// What is still wrong with a volume.
fn problem(report: &Report) -> Option<Failure> {
    let volume = &report.volume;
    let name = &volume.name;
    if let Some(trouble) = &volume.trouble {
        let what = format!("the leases of volume {name} were not renewed");
        return Some(Failure::new(Exit::Unavailable, what).because(trouble).advice(TRY_AGAIN));
    }
    if let Some(shared) = report.shared.as_ref().filter(|shared| shared.unread_inodes > 0) {
        let unread = shared_volume::inodes(shared.unread_inodes);
        let what = format!("{unread} of volume {name} cannot be read, so not all was renewed");
        return Some(Failure::new(Exit::Incomplete, what).because(shared.unread.join("; ")));
    }
    if volume.lost_blocks > 0 {
        let lost = units::counted(volume.lost_blocks, "block", "blocks");
        let what = format!("no node that can be reached has {lost} of volume {name}");
        let failure = Failure::new(Exit::NotFound, what);
        if report.shared.is_some() {
            return Some(failure.advice("Start the nodes that have them."));
        }
        let source = volume.source.as_deref().map_or("its directory".into(), shell_word);
        return Some(
            failure.advice(format!(
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
        let report = |volume: &VolumeStatus| Report::of(volume.clone());
        let good = VolumeStatus { name: "docs".into(), kept_blocks: 2, ..VolumeStatus::default() };
        assert!(problem(&report(&good)).is_none());
        assert_eq!(describe(&report(&good)), "docs: 2 blocks kept until 1970-01-01 00:00:00 UTC");
        let lost = VolumeStatus { lost_blocks: 1, source: Some("/srv/d".into()), ..good.clone() };
        let shown = describe(&report(&lost));
        assert_eq!(shown, "docs: 1 of 2 blocks kept until 1970-01-01 00:00:00 UTC");
        let failure = problem(&report(&lost)).expect("lost");
        assert_eq!(failure.exit, Exit::NotFound);
        assert!(failure.to_string().contains("1 block of volume docs"), "{failure}");
        let silent = VolumeStatus { trouble: Some("nobody answers".into()), ..good.clone() };
        assert_eq!(problem(&report(&silent)).expect("not renewed").exit, Exit::Unavailable);
        let found = SharedReport { inodes: 1, unread_inodes: 0, unread: Vec::new() };
        let mut shared = Report { shared: Some(found), ..Report::of(good) };
        assert_eq!(describe(&shared), "docs: 2 blocks of 1 file or directory renewed");
        assert!(problem(&shared).is_none());
        shared.shared.as_mut().expect("shared").unread_inodes = 1;
        assert_eq!(problem(&shared).expect("unread").exit, Exit::Incomplete);
    }
}
