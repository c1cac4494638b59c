//! `atoll volume history`: the states of a volume that are kept.

use atoll_volume::owned::history::State;
use atoll_volume::owned::{Root, VolumeOptions};
use serde::Serialize;

use crate::connection;
use crate::failure::Failure;
use crate::global::Global;
use crate::moment;
use crate::output::Output;
use crate::own_volume;
use crate::reading::Reading;
use crate::units;

/// Arguments of `atoll volume history`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll volume history work
  atoll mount work@2026-11-20T12:00 /mnt
  atoll volume restore work@2026-11-20T12:00 docs/letter.txt

The present state comes first. Times are UTC, and may be written behind NAME@ as they are shown. A
state is kept when the volume is written again in a later hour, or what else the finest unit of
--keep is (`atoll volume create --help`).")]
pub(crate) struct Args {
    /// The name of one of this node's volumes
    name: String,

    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct JsonState {
    time: String,
    unix_ms: u64,
    present: bool,
    files: u64,
    directories: u64,
    bytes: u64,
}

/// Lists them.
pub(crate) async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let what = format!("cannot list the history of {}", args.name);
    let (env, client) = connection::to_node(global).await?;
    let (address, read_key) = own_volume::address(&client, &args.name, None, &what).await?;
    let options = VolumeOptions::default();
    let reading = Reading::through(env, client, &address, read_key, options).await?;
    let states = reading.snapshot.history().await;
    let states = states.map_err(|error| reading.failure("read the history of", &error))?;
    let present = reading.snapshot.info();
    let mut output = Output::new();
    show(&mut output, args.json, (present.published_unix_ms, present), true)?;
    for State { unix_ms, root } in states.iter().rev() {
        show(&mut output, args.json, (*unix_ms, root), false)?;
    }
    if !args.json {
        output.line(format!("kept: {}", present.mounted.keep))?;
    }
    output.flush()
}

fn show(
    output: &mut Output,
    json: bool,
    (unix_ms, root): (u64, &Root),
    present: bool,
) -> Result<(), Failure> {
    let time = moment::written(unix_ms);
    let Root { files, dirs, bytes, .. } = *root;
    if json {
        return output.json(&JsonState { time, unix_ms, present, files, directories: dirs, bytes });
    }
    let files = units::counted(files, "file", "files");
    let note = if present { "  present" } else { "" };
    output.line(format!("{time}  {files:>16}  {:>10}{note}", units::size(bytes)))
}
