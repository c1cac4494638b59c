//! `atoll compare`: whether two trees on disk are the same, for instance a mount and the
//! directory it was published from.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use atoll_vfs::kit::{CompareOptions, Comparison, compare_trees};

use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::output::{Output, Part, safe_message};
use crate::progress::{Meter, State};
use crate::units;

/// Arguments of `atoll compare`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll compare ~/docs /mnt/docs

Compares names, kinds, bytes, link targets, modes and times of the last change.")]
pub(crate) struct Args {
    /// One directory
    a: PathBuf,

    /// The other
    b: PathBuf,

    /// Extended attributes of users as well
    #[arg(long)]
    xattrs: bool,
}

/// Compares.
pub(crate) fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let what = format!("cannot compare {} with {}", args.a.display(), args.b.display());
    let (files_total, bytes_total) = totals(&args.a);
    let meter = Meter::new("comparing", global.quiet);
    let options = CompareOptions { xattrs: args.xattrs, ..CompareOptions::default() };
    let compared = compare_trees(&args.a, &args.b, options, |found| {
        meter.show(State {
            files: found.files,
            files_total: Some(files_total),
            bytes: found.bytes,
            bytes_total: Some(bytes_total),
            ..State::default()
        });
    });
    let took = meter.finish();
    let found = compared.map_err(|error| Failure::io(&what, &error))?;
    let mut output = Output::new();
    for difference in &found.differences {
        let words = format!(": {}", safe_message(&difference.what));
        output.parts(&[Part::Name(difference.path.as_os_str().as_bytes()), Part::Words(&words)])?;
    }
    output.line(format!(
        "{}: {} in {} ({})",
        if found.is_same() { "the same" } else { "DIFFERENT" },
        describe(&found),
        units::duration(took),
        units::rate(found.bytes, took),
    ))?;
    output.flush()?;
    if found.is_same() {
        return Ok(());
    }
    let differences = units::counted(found.difference_count, "difference", "differences");
    Err(Failure::new(
        Exit::Failed,
        format!("{} and {} have {differences}", args.a.display(), args.b.display()),
    ))
}

fn describe(found: &Comparison) -> String {
    format!(
        "{}, {}, {}, {}",
        units::counted(found.files, "file", "files"),
        units::counted(found.directories, "directory", "directories"),
        units::counted(found.symlinks, "link", "links"),
        units::size(found.bytes),
    )
}

/// Files and bytes below a directory, for the bar; what cannot be read is the
/// comparison's to tell.
fn totals(top: &Path) -> (u64, u64) {
    let (mut files, mut bytes) = (0, 0);
    let mut pending = vec![top.to_path_buf()];
    while let Some(dir) = pending.pop() {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            match entry.metadata() {
                Ok(metadata) if metadata.is_dir() => pending.push(entry.path()),
                Ok(metadata) if metadata.is_file() => {
                    files += 1;
                    bytes += metadata.len();
                }
                _ => {}
            }
        }
    }
    (files, bytes)
}
