//! `atoll tfs stat`: who uses how much.

use std::path::PathBuf;

use atoll_tfs::fs::Usage;
use atoll_tfs::stat::{TROUBLE_XATTR, Trouble, USAGE_XATTR};
use serde::Serialize;

use super::{ask, device};
use crate::failure::{Exit, Failure};
use crate::output;
use crate::runtime::until_done;
use crate::units;

/// Arguments of `atoll tfs stat`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll tfs stat /mnt/tfs
  atoll tfs stat --json disk.img")]
pub(super) struct Args {
    /// A mount point, or an image file or block device that is not mounted
    #[arg(value_name = "MNT|DEVICE")]
    of: PathBuf,

    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// What `--json` shows.
#[derive(Serialize)]
struct Shown {
    block_bytes: u32,
    blocks: u64,
    free_blocks: u64,
    reserved_blocks: u64,
    records_blocks: u64,
    transparent_blocks: u64,
    overwritten_blocks: u64,
    avoided_free_blocks: u64,
    transparent_room_blocks: u64,
    pinned_blocks: u64,
    inodes: u64,
    free_inodes: u64,
    transparent_files: u64,
    transparent_directories: u64,
    groups: u32,
    chunks: u64,
    avoided_chunks: u64,
    allocated_bytes_per_sec: f64,
    target_loss_bytes_per_sec: f64,
    avoided_share: f64,
    observed_secs: f64,
    /// Why nothing can be changed any more.
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<String>,
    /// What was answered with input/output errors lately.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    met: Vec<String>,
}

impl Shown {
    fn new(usage: Usage, trouble: Trouble) -> Shown {
        Shown {
            block_bytes: usage.block_bytes,
            blocks: usage.blocks,
            free_blocks: usage.free_blocks,
            reserved_blocks: usage.reserved_blocks,
            records_blocks: usage.records_blocks,
            transparent_blocks: usage.transparent_blocks,
            overwritten_blocks: usage.overwritten_blocks,
            avoided_free_blocks: usage.avoided_free_blocks,
            transparent_room_blocks: usage.transparent_room_blocks,
            pinned_blocks: usage.pinned_blocks,
            inodes: usage.inodes,
            free_inodes: usage.free_inodes,
            transparent_files: usage.transparent_files,
            transparent_directories: usage.transparent_directories,
            groups: usage.groups,
            chunks: usage.avoidance.chunks,
            avoided_chunks: usage.avoidance.avoided_chunks,
            allocated_bytes_per_sec: usage.avoidance.rate_bytes_per_sec,
            target_loss_bytes_per_sec: usage.avoidance.target_bytes_per_sec,
            avoided_share: usage.avoidance.share,
            observed_secs: usage.avoidance.observed_secs,
            refused: trouble.refused,
            met: trouble.met,
        }
    }
}

/// Shows.
pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let (usage, trouble) = if args.of.is_dir() {
        let lines = ask::ask_text(&args.of, USAGE_XATTR)?;
        let usage = Usage::from_lines(&lines).ok_or_else(|| ask::nonsense(&args.of))?;
        (usage, Trouble::from_lines(&ask::ask_text(&args.of, TROUBLE_XATTR)?))
    } else {
        until_done(async {
            let tfs = device::mount_image(&args.of, true)?;
            let usage = tfs.usage().map_err(|errno| {
                let failure =
                    Failure::new(Exit::Failed, format!("cannot read {}", args.of.display()));
                match tfs.trouble().met.pop() {
                    Some(why) => failure.because(why),
                    None => failure.because(errno),
                }
            })?;
            Ok((usage, tfs.trouble()))
        })?
    };
    let shown = Shown::new(usage, trouble.clone());
    let lines = describe(&usage).into_iter().chain(warn(trouble));
    output::show(args.json, &shown, lines.map(|(name, value)| format!("{name:>12}  {value}")))
}

fn warn(trouble: Trouble) -> impl Iterator<Item = (&'static str, String)> {
    let refused = trouble.refused.map(|why| format!("nothing can be changed any more: {why}"));
    trouble.met.into_iter().chain(refused).map(|why| ("trouble", why))
}

fn describe(usage: &Usage) -> Vec<(&'static str, String)> {
    let size = |blocks: u64| units::size(blocks * u64::from(usage.block_bytes));
    let avoidance = &usage.avoidance;
    let avoided = 100.0 * avoidance.avoided_chunks as f64 / avoidance.chunks.max(1) as f64;
    let [rate, target] = [avoidance.rate_bytes_per_sec, avoidance.target_bytes_per_sec]
        .map(|rate| units::size(rate as u64));
    vec![
        ("size", format!("{} in blocks of {}", size(usage.blocks), usage.block_bytes)),
        ("ordinary", size(usage.ordinary_blocks())),
        ("records", format!("{} of transparent files", size(usage.records_blocks))),
        (
            "free",
            format!("{} ({} for root only)", size(usage.free_blocks), size(usage.reserved_blocks)),
        ),
        (
            "transparent",
            format!(
                "{} in {}, room for {} more",
                size(usage.transparent_blocks),
                units::counted(usage.transparent_files, "file", "files"),
                size(usage.transparent_room_blocks)
            ),
        ),
        ("overwritten", format!("{} until the next clean", size(usage.overwritten_blocks))),
        ("pinned", format!("{} of files that are open", size(usage.pinned_blocks))),
        (
            "avoided",
            format!(
                "{avoided:.1}% of the chunks, {} free there (ordinary data comes at {rate}/s, \
                 {target}/s may be lost)",
                size(usage.avoided_free_blocks)
            ),
        ),
        (
            "inodes",
            format!("{} of {} free", units::count(usage.free_inodes), units::count(usage.inodes)),
        ),
    ]
}
