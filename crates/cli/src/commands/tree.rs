//! `atoll tree`: everything below a directory, drawn.
//!
//! A hostile volume can be very deep; the walk keeps its own stack and one page of
//! entries for each level.

use std::collections::VecDeque;
use std::num::NonZeroUsize;

use atoll_volume::format::Content;
use atoll_volume::owned::{Item, Listing};

use crate::address::Address;
use crate::commands::ls::{JsonItem, PAGE};
use crate::failure::Failure;
use crate::global::Global;
use crate::output::{Output, Part};
use crate::read_key::ReadKeyArgs;
use crate::reading::Reading;
use crate::units;

/// Arguments of `atoll tree`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll tree atoll:KEY
  atoll tree --depth 2 atoll:KEY/usr
  atoll tree --json atoll:KEY | jq -r 'select(.kind == \"file\") | .name'")]
pub(crate) struct Args {
    /// Which directory
    #[arg(value_name = "ADDR[/PATH]", value_parser = Address::parser())]
    address: Address,

    #[command(flatten)]
    read_key: ReadKeyArgs,

    /// Show no more than this many levels
    #[arg(long, value_name = "N")]
    depth: Option<NonZeroUsize>,

    /// One JSON object a line; names are paths below the directory
    #[arg(long)]
    json: bool,
}

/// A directory that is being shown.
struct Level {
    listing: Listing,
    page: VecDeque<Item>,
    ended: bool,
    /// What stands before the names of this level.
    indent: String,
}

impl Level {
    fn new(listing: Listing, indent: String) -> Level {
        Level { listing, page: VecDeque::new(), ended: false, indent }
    }

    /// The next entry and whether it is the last.
    async fn next(&mut self, reading: &Reading) -> Result<Option<(Item, bool)>, Failure> {
        while self.page.len() < 2 && !self.ended {
            let more = self.listing.next_page(PAGE).await;
            let more = more.map_err(|error| reading.failure("list", &error))?;
            self.ended = more.is_empty();
            self.page.extend(more);
        }
        Ok(self.page.pop_front().map(|item| (item, self.page.is_empty())))
    }
}

/// Shows the tree.
pub(crate) async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let reading = Reading::open(global, &args.address, &args.read_key.given()?).await?;
    let top = reading.follow().await?;
    let mut levels = vec![Level::new(reading.list(&top)?, String::new())];
    let mut output = Output::new();
    if !args.json {
        output.line(args.address.to_string())?;
    }
    let below_top = if top.path.is_empty() { 0 } else { top.path.len() + 1 };
    let (mut dirs, mut files) = (0, 0);
    while let Some(level) = levels.last_mut() {
        let Some((item, last)) = level.next(&reading).await? else {
            levels.pop();
            continue;
        };
        let indent = level.indent.clone();
        let is_dir = matches!(item.entry.content, Content::Directory(_));
        if is_dir {
            dirs += 1
        } else {
            files += 1
        }
        if args.json {
            output.json(&JsonItem::of(&item.path[below_top..], &item))?;
        } else {
            let branch = if last { "└── " } else { "├── " };
            show(&mut output, &indent, branch, &item)?;
        }
        if is_dir && args.depth.is_none_or(|depth| levels.len() < depth.get()) {
            let indent = indent + if last { "    " } else { "│   " };
            levels.push(Level::new(reading.list(&item)?, indent));
        }
    }
    if !args.json {
        output.line(format!(
            "\n{}, {}",
            units::counted(dirs, "directory", "directories"),
            units::counted(files, "file", "files"),
        ))?;
    }
    output.flush()
}

fn show(output: &mut Output, indent: &str, branch: &str, item: &Item) -> Result<(), Failure> {
    let name = [Part::Words(indent), Part::Words(branch), Part::Name(&item.entry.name)];
    match &item.entry.content {
        Content::Symlink(target) => {
            let [indent, branch, name] = name;
            output.parts(&[indent, branch, name, Part::Words(" -> "), Part::Name(target)])
        }
        _ => output.parts(&name),
    }
}
