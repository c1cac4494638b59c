//! `atoll get`: a file or tree of a volume on this machine's disk.
//!
//! `DEST` means the same on every run, or a second run could not go on where the first
//! stopped: a directory's contents always go right into DEST.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use atoll_volume::owned::format::Content;
use atoll_volume::owned::{GetOptions, GetTreeError, Gotten, VolumeOptions, get_tree};
use serde::Serialize;

use crate::address::Address;
use crate::arguments::Global;
use crate::failure::{Exit, Failure};
use crate::interrupt;
use crate::output::Output;
use crate::progress::Watch;
use crate::reading::Reading;
use crate::units;

/// Arguments of `atoll get`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll get atoll:KEY ./copy                  the whole volume becomes ./copy
  atoll get atoll:KEY/docs ./docs             one directory
  atoll get atoll:KEY/docs/a.pdf .            one file, into this directory
  atoll get atoll:KEY/docs/a.pdf b.pdf        one file, under another name

Stopped half-way, the same command again goes on where it was.")]
pub struct Args {
    /// What to copy
    #[arg(value_name = "ADDR[/PATH]", value_parser = Address::parser())]
    address: Address,

    /// Where to: a directory's contents go into DEST; a file goes into DEST if that is a
    /// directory, or becomes DEST
    dest: PathBuf,

    /// Keep set-user-id and set-group-id bits: only if you trust the publisher
    #[arg(long)]
    set_id: bool,

    /// The result as one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct JsonGotten {
    address: String,
    version: u64,
    dest: String,
    files: u64,
    files_kept: u64,
    dirs: u64,
    symlinks: u64,
    bytes: u64,
    bytes_resumed: u64,
    millis: u64,
}

/// Copies.
pub async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let reading = Reading::open(global, &args.address, VolumeOptions::default()).await?;
    let item = reading.item().await?;
    let mut dest = args.dest.clone();
    let into_dir = dest.is_dir() || dest.as_os_str().as_bytes().ends_with(b"/");
    if into_dir
        && !matches!(item.entry.content, Content::Directory(_))
        && let Some(name) = args.address.file_name()
    {
        dest.push(OsStr::from_bytes(name));
    }
    let watch = Watch::start("copying", global.quiet);
    let options = GetOptions { set_id: args.set_id, ..GetOptions::default() };
    let snapshot = reading.snapshot.clone();
    let copy = async {
        let progress = watch.progress();
        let copied = get_tree(snapshot, &item, &dest, options, progress).await;
        copied.map_err(|error| failure(&reading, &dest, error))
    };
    let copied = interrupt::or_interrupted(
        copy,
        "What has arrived stays; the same command again goes on from there.",
    )
    .await;
    let took = watch.finish();
    report(args, &reading, &dest, copied?, took)
}

fn report(
    args: &Args,
    reading: &Reading,
    dest: &std::path::Path,
    copied: Gotten,
    took: std::time::Duration,
) -> Result<(), Failure> {
    let mut output = Output::new();
    if args.json {
        output.json(&JsonGotten {
            address: args.address.to_string(),
            version: reading.snapshot.version(),
            dest: dest.display().to_string(),
            files: copied.files,
            files_kept: copied.files_kept,
            dirs: copied.dirs,
            symlinks: copied.symlinks,
            bytes: copied.bytes,
            bytes_resumed: copied.bytes_resumed,
            millis: took.as_millis() as u64,
        })?;
        return output.flush();
    }
    let mut line = format!(
        "copied {}, {} in {} ({})",
        units::counted(copied.files, "file", "files"),
        units::size(copied.bytes),
        units::duration(took),
        units::rate(copied.bytes, took),
    );
    if copied.files_kept > 0 {
        line += &format!("; {} were there already", units::count(copied.files_kept));
    }
    if copied.bytes_resumed > 0 {
        line += &format!("; went on after {}", units::size(copied.bytes_resumed));
    }
    output.line(line)?;
    output.flush()
}

fn failure(reading: &Reading, dest: &std::path::Path, error: GetTreeError) -> Failure {
    match error {
        GetTreeError::Read(error) => reading.failure("copy", &error),
        GetTreeError::Write { .. } | GetTreeError::Stopped => Failure::new(
            Exit::Failed,
            format!("cannot copy {} to {}", reading.address, dest.display()),
        )
        .because(error)
        .advice("What has arrived stays; the same command again goes on from there."),
    }
}
