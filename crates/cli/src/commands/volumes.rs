//! `atoll volumes`: the volumes that this node knows by a name: those it publishes or has made, and until when they are
//! kept, and those of other nodes that it has joined.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use atoll_dht::Blocks;
use atoll_env::{Env, TokioRuntime};
use atoll_key::VolumeAddress;
use atoll_node::{VolumeStatus, shell_word};
use atoll_volume::shared::access::{VolumeRecord, read_volume};
use futures_util::future::join_all;
use serde::Serialize;

use crate::connection;
use crate::failure::Failure;
use crate::global::Global;
use crate::joined_volume::{self, JoinedStatus};
use crate::messages::note;
use crate::output::Output;
use crate::units;
use crate::user;

/// How long the ring may take to say which volumes are shared.
const RING_LIMIT: Duration = Duration::from_secs(5);

/// Arguments of `atoll volumes`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll volumes
  atoll volumes --json | jq -r .address
  atoll volumes --json | jq 'select(.joined.may_write == false)'")]
pub(crate) struct Args {
    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

/// Lists them.
pub(crate) async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let status = connection::status(global).await?;
    let mut output = Output::new();
    let joined = joined(global).await?;
    if status.volumes.is_empty() && joined.is_empty() && !args.json {
        note!("nothing is published from this node; `atoll publish DIR` does that");
    }
    let shared = shared(global, &status.volumes).await;
    for volume in &status.volumes {
        let record = shared.get(&volume.name);
        let encrypted = volume.encrypted || record.is_some_and(|record| record.is_encrypted);
        if args.json {
            let status = VolumeStatus { encrypted, ..volume.clone() };
            output.json(&Shown { status, shared: record.is_some(), joined: None })?;
            continue;
        }
        output.line(format!("{}  {}", volume.name, volume.address))?;
        for line in describe(volume, record) {
            output.line(format!("    {line}"))?;
        }
    }
    for joined in joined {
        if args.json {
            output.json(&Shown::of_joined(joined))?;
            continue;
        }
        output.line(format!("{}  {}", joined.name, joined.address))?;
        for line in describe_joined(&joined) {
            output.line(format!("    {line}"))?;
        }
    }
    output.flush()
}

/// The volumes of other nodes that were joined here.
async fn joined(global: &Global) -> Result<Vec<JoinedStatus>, Failure> {
    let dir = global.dir()?;
    if user::joined_names(&dir).is_empty() {
        return Ok(Vec::new());
    }
    let env: Env = Arc::new(TokioRuntime::current());
    let blocks: Arc<dyn Blocks> = Arc::new(connection::impatient(global).await?);
    Ok(joined_volume::all(&env, &blocks, &dir).await)
}

fn describe_joined(joined: &JoinedStatus) -> Vec<String> {
    let how = if joined.is_encrypted { "shared, encrypted" } else { "shared" };
    vec![
        format!("{how}, of another node; joined {}", joined.member()),
        format!("may write: {}", joined.access()),
    ]
}

/// A volume, as JSON.
#[derive(Serialize)]
struct Shown {
    #[serde(flatten)]
    status: VolumeStatus,
    /// Whether many may write it; not said while the ring does not answer.
    shared: bool,
    /// As whom this node writes it, if it is another node's.
    #[serde(skip_serializing_if = "Option::is_none")]
    joined: Option<JoinedStatus>,
}

impl Shown {
    fn of_joined(joined: JoinedStatus) -> Shown {
        let status = VolumeStatus {
            name: joined.name.clone(),
            address: joined.address.clone(),
            encrypted: joined.is_encrypted,
            ..VolumeStatus::default()
        };
        Shown { status, shared: true, joined: Some(joined) }
    }
}

/// The records of those of these volumes that are shared, as far as the ring says so within some seconds.
async fn shared(global: &Global, volumes: &[VolumeStatus]) -> BTreeMap<String, VolumeRecord> {
    let asked = volumes.iter().filter(|one| one.source.is_none() && one.root_version > 0);
    let asked: Vec<&VolumeStatus> = asked.collect();
    let client = match connection::impatient(global).await {
        Ok(client) if !asked.is_empty() => client,
        _ => return BTreeMap::new(),
    };
    let blocks: Arc<dyn Blocks> = Arc::new(client);
    let reads = asked.into_iter().map(|volume| {
        let blocks = &blocks;
        async move {
            let address: VolumeAddress = volume.address.parse().ok()?;
            let read = tokio::time::timeout(RING_LIMIT, read_volume(blocks, address.0)).await;
            let (_, record) = read.ok()?.ok()??;
            Some((volume.name.clone(), record))
        }
    });
    join_all(reads).await.into_iter().flatten().collect()
}

fn describe(volume: &VolumeStatus, shared: Option<&VolumeRecord>) -> Vec<String> {
    let now_secs =
        SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let left = Duration::from_secs(volume.lease_expires_unix_secs.saturating_sub(now_secs));
    let until = units::unix_date(volume.lease_expires_unix_secs);
    if volume.root_version == 0 {
        return vec![match volume.lease_expires_unix_secs {
            0 => "nothing published yet".into(),
            _ if left.is_zero() => format!("unpublished; its last lease ran out on {until} UTC"),
            _ => format!("unpublished; its blocks may go from {until} UTC on"),
        }];
    }
    let blocks = units::counted(volume.kept_blocks, "block", "blocks");
    let kept = if left.is_zero() {
        let name = shell_word(&volume.name);
        format!("its lease ran out on {until} UTC; `atoll renew {name}` may still save it")
    } else {
        format!("kept until {until} UTC ({}) without this node", units::duration(left))
    };
    let mut lines = match shared {
        None => vec![format!("version {}, {blocks}, {kept}", volume.root_version)],
        Some(record) => {
            let how = if record.is_encrypted { "shared, encrypted" } else { "shared" };
            let name = shell_word(&volume.name);
            vec![
                format!("{how}; `atoll volume show {name}` lists who may use it"),
                format!("its record {kept}"),
            ]
        }
    };
    if let Some(source) = &volume.source {
        lines.insert(0, format!("from {source}"));
    }
    if volume.encrypted {
        let name = shell_word(&volume.name);
        lines.push(format!(
            "encrypted; `atoll volume show {name} --read-key` shows the address with its read key"
        ));
    }
    if volume.is_moved {
        lines.push("moved to another node, which has not taken over yet".into());
    }
    if volume.lost_blocks > 0 {
        let lost = units::counted(volume.lost_blocks, "block", "blocks");
        lines.push(format!(
            "{lost} on no node that answered at the last renewal; if no node is missing, publish \
             it again to bring them back"
        ));
    }
    if let Some(trouble) = &volume.trouble {
        lines.push(format!("leases not renewed: {trouble}"));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_with_a_volume_is_said() {
        assert_eq!(describe(&VolumeStatus::default(), None), ["nothing published yet"]);
        let given_up =
            VolumeStatus { lease_expires_unix_secs: 4_000_000_000, ..VolumeStatus::default() };
        let said = describe(&given_up, None).join("\n");
        assert!(said.starts_with("unpublished; its blocks may go from 2096-10-02"), "{said}");
        let expired = VolumeStatus { name: "a".into(), root_version: 3, ..VolumeStatus::default() };
        assert!(describe(&expired, None)[0].contains("`atoll renew a`"));
        let volume = VolumeStatus {
            lease_expires_unix_secs: 4_000_000_000,
            root_version: 3,
            kept_blocks: 12,
            lost_blocks: 1,
            source: Some("/srv/docs".into()),
            trouble: Some("the ring is silent".into()),
            encrypted: true,
            ..VolumeStatus::default()
        };
        let lines = describe(&volume, None).join("\n");
        for part in [
            "from /srv/docs",
            "version 3, 12 blocks, kept until 2096-10-02",
            "encrypted; `atoll volume show ",
            "1 block on no node that answered",
            "the ring is silent",
        ] {
            assert!(lines.contains(part), "{part}: {lines}");
        }
    }
}
