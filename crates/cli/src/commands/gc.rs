//! `atoll gc`: give back the disk space of blocks that are gone, at once.
//!
//! The node does so by itself, slowly: what is removed, replaced or expired leaves its bytes in
//! the log until the segment is compacted (`docs/design/store.md`).

use atoll_node::Reclaimed;

use crate::connection;
use crate::failure::Failure;
use crate::global::Global;
use crate::output::Output;
use crate::progress::Share;
use crate::units;

/// Arguments of `atoll gc`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll gc
  atoll gc --json | jq .freed_bytes

The node gives back space by itself, so that there is at most about half as much dead data
as live. It goes on working meanwhile, and stopping this command does no harm.")]
pub(crate) struct Args {
    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// Has the node compact until there is nothing more to gain.
pub(crate) async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let client = connection::impatient(global).await?;
    let before = client.status().await.map_err(connection::failure)?;
    let dead_bytes = before.disk_bytes.saturating_sub(before.block_bytes);
    let progress = (!global.quiet).then(|| Share::new("compacting"));
    let mut freed_bytes = 0;
    let reclaimed = loop {
        let step = client.reclaim().await.map_err(connection::failure)?;
        freed_bytes += step.freed_bytes;
        if let Some(progress) = &progress {
            progress.show(freed_bytes.min(dead_bytes), dead_bytes);
        }
        // Blocks that die while it runs are left to the next run.
        if step.freed_bytes == 0 || freed_bytes >= dead_bytes {
            break Reclaimed { freed_bytes, ..step };
        }
    };
    if let Some(progress) = progress {
        progress.finish();
    }
    let mut output = Output::new();
    if args.json {
        output.json(&reclaimed)?;
    } else {
        output.line(describe(&reclaimed))?;
    }
    output.flush()
}

fn describe(reclaimed: &Reclaimed) -> String {
    let Reclaimed { freed_bytes, block_bytes, disk_bytes } = *reclaimed;
    let [freed, blocks, disk] = [freed_bytes, block_bytes, disk_bytes].map(units::size);
    match freed_bytes {
        0 => format!("nothing to give back: {blocks} of blocks take {disk}"),
        _ => format!("gave back {freed}: {blocks} of blocks take {disk}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_person_sees_what_was_gained_and_what_is_left() {
        let gained = Reclaimed { freed_bytes: 4 << 30, block_bytes: 1 << 30, disk_bytes: 5 << 28 };
        assert_eq!(describe(&gained), "gave back 4.0 GiB: 1.0 GiB of blocks take 1.2 GiB");
        let none = Reclaimed { freed_bytes: 0, ..gained };
        assert_eq!(describe(&none), "nothing to give back: 1.0 GiB of blocks take 1.2 GiB");
    }
}
