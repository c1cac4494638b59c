//! `atoll stat`: what is known of one file.

use atoll_volume::format::Content;
use bytes::Bytes;
use serde::{Serialize, Serializer};

use crate::address::Address;
use crate::commands::ls::JsonItem;
use crate::failure::Failure;
use crate::global::Global;
use crate::output::{Output, Part, escaped, hex, json_list};
use crate::read_key::ReadKeyArgs;
use crate::reading::{self, Reading};
use crate::units;

/// Arguments of `atoll stat`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll stat atoll:KEY
  atoll stat --json atoll:KEY/usr/include/stdio.h")]
pub(crate) struct Args {
    /// Which file, directory or link (links are not followed)
    #[arg(value_name = "ADDR[/PATH]", value_parser = Address::parser())]
    address: Address,

    #[command(flatten)]
    read_key: ReadKeyArgs,

    /// One JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct JsonStat {
    volume: String,
    version: u64,
    #[serde(flatten)]
    item: JsonItem,
    #[serde(skip_serializing_if = "Option::is_none")]
    block: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stored_bytes: Option<u64>,
    /// Their names.
    #[serde(flatten, serialize_with = "xattrs_json")]
    xattrs: Vec<(Bytes, Bytes)>,
}

fn xattrs_json<S: Serializer>(xattrs: &[(Bytes, Bytes)], serializer: S) -> Result<S::Ok, S::Error> {
    json_list("xattrs", xattrs.iter().map(|(name, _)| &name[..]), serializer)
}

/// Shows it.
pub(crate) async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let reading = Reading::open(global, &args.address, &args.read_key.given()?).await?;
    let item = reading.item().await?;
    let xattrs = reading.snapshot.xattrs(&item).await;
    let xattrs = xattrs.map_err(|error| reading.failure("read the attributes of", &error))?;
    let (block, stored_bytes) = match &item.entry.content {
        Content::Regular { inode, blocks_512, .. } => {
            (inode.map(|hash| hex(&hash.0)), Some(blocks_512 * 512))
        }
        Content::Directory(directory) => (directory.hash.map(|hash| hex(&hash.0)), None),
        _ => (None, None),
    };
    let mut output = Output::new();
    if args.json {
        output.json(&JsonStat {
            volume: args.address.volume.to_string(),
            version: reading.snapshot.version(),
            item: JsonItem::of(&item.path, &item),
            block,
            stored_bytes,
            xattrs,
        })?;
        return output.flush();
    }
    let entry = &item.entry;
    let mut field = |name: &str, value: String| output.line(format!("{name:>10}  {value}"));
    field("address", args.address.to_string())?;
    field("kind", reading::kind_name(entry.kind()).into())?;
    match &entry.content {
        Content::Regular { size_bytes, .. } => {
            let stored = units::size(stored_bytes.unwrap_or(0));
            let bytes = units::counted(*size_bytes, "byte", "bytes");
            field("size", format!("{bytes} ({stored} stored)"))?;
        }
        Content::Directory(directory) => {
            let entries = units::counted(directory.entries, "entry", "entries");
            let dirs = units::counted(directory.subdirectories, "directory", "directories");
            field("size", format!("{entries}, {dirs} among them"))?;
        }
        _ => {}
    }
    let mode = units::mode(entry.kind(), entry.mode);
    field("mode", format!("{:04o} ({mode})", entry.mode))?;
    let mtime = entry.mtime;
    field("modified", format!("{}.{:09} UTC", units::date(mtime.secs), mtime.nanos))?;
    if let Some(hash) = block {
        field("block", hash)?;
    }
    for (name, value) in &xattrs {
        let length = units::counted(value.len() as u64, "byte", "bytes");
        field("attribute", format!("{} ({length})", escaped(name)))?;
    }
    field("version", format!("{} of the volume", reading.snapshot.version()))?;
    if let Some(reason) = reading.volume.status().stale {
        field("note", format!("may be out of date: {reason}"))?;
    }
    if let Content::Symlink(target) = &entry.content {
        output.parts(&[Part::Words("    target  "), Part::Name(target)])?;
    }
    output.flush()
}
