//! `atoll volume history`: the states of a volume that are kept.

use std::sync::Arc;

use atoll_dht::Blocks;
use atoll_node::Client;
use atoll_volume::owned::history::State;
use atoll_volume::owned::{Root, VolumeOptions};
use atoll_volume::shared::access::{self, VolumeRecord};
use serde::Serialize;

use crate::connection;
use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::messages::note;
use crate::moment::{self, Moment};
use crate::output::Output;
use crate::own_volume;
use crate::reading::Reading;
use crate::units;
use crate::user;

/// Arguments of `atoll volume history`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll volume history work
  atoll mount work@2026-11-20T12:00 /mnt
  atoll volume restore work@2026-11-20T12:00 docs/letter.txt

The present state comes first. Times are UTC, and may be written behind NAME@ as they are shown. A
state is kept when the volume is written again in a later hour, or what else the finest unit of
--keep is (`atoll volume create --help`). Of a shared volume these are the times that .atoll/history in
each mount has; `atoll log PATH` lists the versions of a file.")]
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

/// A state of a shared volume; nobody counts what is in it.
#[derive(Serialize)]
struct JsonSharedState {
    time: String,
    unix_ms: u64,
}

/// Lists them.
pub(crate) async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let what = format!("cannot list the history of {}", args.name);
    let (env, client) = connection::to_node(global).await?;
    if let Some(record) = shared(&client, &args.name, global, &what).await? {
        return show_shared(&record, env.unix_ms(), args.json);
    }
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

/// The record of a shared volume of this name, if it is one.
async fn shared(
    client: &Arc<Client>,
    name: &str,
    global: &Global,
    what: &str,
) -> Result<Option<VolumeRecord>, Failure> {
    let volume = match user::joined(&global.dir()?, name)? {
        Some(joined) => joined.volume,
        None => own_volume::address(client, name, None, what).await?.0.volume.0,
    };
    match client.get_signed(volume.root_key()).await {
        Ok(root) if access::is_shared(&root.payload) => {
            let record = VolumeRecord::decode(&root.payload);
            record.map(Some).map_err(|error| Failure::new(Exit::Failed, what).because(error))
        }
        // What is wrong with another volume is told when it is read.
        _ => Ok(None),
    }
}

/// Lists the states that the mounts of a shared volume show.
fn show_shared(record: &VolumeRecord, now_ms: u64, json: bool) -> Result<(), Failure> {
    let mut output = Output::new();
    let states = record.keep.states(record.created_unix_ms, now_ms);
    if states.is_empty() {
        let made = units::unix_date(record.created_unix_ms / 1000);
        note!("no state is kept now; the volume was made {made} UTC");
    }
    for unix_ms in states.into_iter().rev() {
        // As the names in .atoll/history.
        let time = Moment::of(unix_ms).to_string();
        match json {
            true => output.json(&JsonSharedState { time, unix_ms })?,
            false => output.line(time)?,
        }
    }
    if !json {
        output.line(format!("kept: {}", record.keep))?;
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
