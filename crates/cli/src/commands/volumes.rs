//! `atoll volumes`: what is published from this node, and until when it is kept.

use std::time::{Duration, SystemTime};

use atoll_node::VolumeStatus;

use crate::connection;
use crate::failure::Failure;
use crate::global::Global;
use crate::output::Output;
use crate::units;

/// Arguments of `atoll volumes`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll volumes
  atoll volumes --json | jq -r .address")]
pub(crate) struct Args {
    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

/// Lists them.
pub(crate) async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let status = connection::status(global).await?;
    let mut output = Output::new();
    if status.volumes.is_empty() && !args.json {
        eprintln!("nothing is published from this node; `atoll publish DIR` does that");
    }
    for volume in &status.volumes {
        if args.json {
            output.json(volume)?;
            continue;
        }
        output.line(format!("{}  {}", volume.name, volume.address))?;
        for line in describe(volume) {
            output.line(format!("    {line}"))?;
        }
    }
    output.flush()
}

fn describe(volume: &VolumeStatus) -> Vec<String> {
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
        format!("its lease ran out on {until} UTC; `atoll renew {}` may still save it", volume.name)
    } else {
        format!("kept until {until} UTC ({}) without this node", units::duration(left))
    };
    let mut lines = vec![format!("version {}, {blocks}, {kept}", volume.root_version)];
    if let Some(source) = &volume.source {
        lines.insert(0, format!("from {source}"));
    }
    if volume.encrypted {
        let name = &volume.name;
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
        assert_eq!(describe(&VolumeStatus::default()), ["nothing published yet"]);
        let given_up =
            VolumeStatus { lease_expires_unix_secs: 4_000_000_000, ..VolumeStatus::default() };
        let said = describe(&given_up).join("\n");
        assert!(said.starts_with("unpublished; its blocks may go from 2096-10-02"), "{said}");
        let expired = VolumeStatus { name: "a".into(), root_version: 3, ..VolumeStatus::default() };
        assert!(describe(&expired)[0].contains("`atoll renew a`"));
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
        let lines = describe(&volume).join("\n");
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
