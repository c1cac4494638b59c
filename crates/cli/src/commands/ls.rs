//! `atoll ls`: one directory of a volume.

use atoll_volume::format::Content;
use atoll_volume::owned::Item;
use serde::Serialize;

use crate::address::Address;
use crate::failure::Failure;
use crate::global::Global;
use crate::output::{JsonName, Output, Part, json_text};
use crate::read_key::ReadKeyArgs;
use crate::reading::{self, Reading};
use crate::units;

/// How many entries are asked for at a time.
pub(crate) const PAGE: usize = 1000;

/// Arguments of `atoll ls`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll ls atoll:KEY
  atoll ls -l atoll:KEY/usr/include
  atoll ls --json atoll:KEY | jq -r .name")]
pub(crate) struct Args {
    /// Which directory (or file)
    #[arg(value_name = "ADDR[/PATH]", value_parser = Address::parser())]
    address: Address,

    #[command(flatten)]
    read_key: ReadKeyArgs,

    /// Modes, lengths and times as well
    #[arg(short)]
    long: bool,

    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

/// One entry, in JSON.
#[derive(Serialize)]
pub(crate) struct JsonItem {
    #[serde(flatten)]
    name: JsonName,
    kind: &'static str,
    mode: String,
    size_bytes: u64,
    mtime_secs: i64,
    mtime_nanos: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    target_hex: Option<String>,
}

impl JsonItem {
    /// Of an item, under this name.
    pub(crate) fn of(name: &[u8], item: &Item) -> JsonItem {
        let entry = &item.entry;
        let target = match &entry.content {
            Content::Symlink(target) => Some(json_text(target)),
            _ => None,
        };
        let (target, target_hex) = target.map_or((None, None), |(text, hex)| (Some(text), hex));
        JsonItem {
            name: JsonName::of(name),
            kind: reading::kind_name(entry.kind()),
            mode: format!("{:04o}", entry.mode),
            size_bytes: entry.size_bytes(),
            mtime_secs: entry.mtime.secs,
            mtime_nanos: entry.mtime.nanos,
            target,
            target_hex,
        }
    }
}

/// Lists.
pub(crate) async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let reading = Reading::open(global, &args.address, &args.read_key.given()?).await?;
    let item = reading.follow().await?;
    let mut output = Output::new();
    if !matches!(item.entry.content, Content::Directory(_)) {
        let name = args.address.file_name().unwrap_or_default().to_vec();
        show(&mut output, args, &name, &item)?;
        return output.flush();
    }
    let mut listing = reading.list(&item)?;
    loop {
        let page =
            listing.next_page(PAGE).await.map_err(|error| reading.failure("list", &error))?;
        if page.is_empty() {
            return output.flush();
        }
        for item in page {
            show(&mut output, args, &item.entry.name, &item)?;
        }
    }
}

fn show(output: &mut Output, args: &Args, name: &[u8], item: &Item) -> Result<(), Failure> {
    if args.json {
        return output.json(&JsonItem::of(name, item));
    }
    if !args.long {
        return output.parts(&[Part::Name(name)]);
    }
    let entry = &item.entry;
    let before = format!(
        "{} {:>14} {} ",
        units::mode(entry.kind(), entry.mode),
        units::count(entry.size_bytes()),
        units::date(entry.mtime.secs),
    );
    match &entry.content {
        Content::Symlink(target) => output.parts(&[
            Part::Words(&before),
            Part::Name(name),
            Part::Words(" -> "),
            Part::Name(target),
        ]),
        _ => output.parts(&[Part::Words(&before), Part::Name(name)]),
    }
}

#[cfg(test)]
mod tests {
    use atoll_volume::format::DirectoryEntry;
    use bytes::Bytes;

    use super::*;

    #[test]
    fn json_keeps_the_bytes_of_a_link_that_leads_to_no_text() {
        let shown = |target: &'static [u8]| {
            let entry = DirectoryEntry {
                name: Bytes::from_static(b"link"),
                mode: 0o777,
                mtime: Default::default(),
                content: Content::Symlink(Bytes::from_static(target)),
                xattrs: None,
                owner: None,
            };
            let item = Item { path: Bytes::from_static(b"link"), entry };
            serde_json::to_value(JsonItem::of(b"link", &item)).expect("serialises")
        };
        let bytes = shown(b"a\xff");
        assert_eq!((&bytes["target"], &bytes["target_hex"]), (&"a\u{fffd}".into(), &"61ff".into()));
        assert_eq!(shown(b"a").get("target_hex"), None);
    }
}
