//! `atoll tfs mkfs`: a new file system.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use atoll_tfs::mkfs::{MkfsError, MkfsOptions, mkfs};

use super::device;
use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::messages::note;
use crate::units;

/// Arguments of `atoll tfs mkfs`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll tfs mkfs --size 20GiB disk.img
  atoll tfs mkfs --label data /dev/sdb1

Only its owner may read and write a new image file (mode 0600).")]
pub(super) struct Args {
    /// An image file, made if it does not exist, or a block device
    #[arg(value_name = "DEVICE")]
    device: PathBuf,

    /// How large an image to make
    #[arg(long, value_name = "SIZE", value_parser = units::parse_size, allow_negative_numbers = true)]
    size: Option<u64>,

    /// Size of a block: 1KiB, 2KiB or 4KiB
    #[arg(long, value_name = "SIZE", default_value = "4KiB", value_parser = units::parse_size)]
    block_size: u64,

    /// One inode for so much room: each transparent file takes one
    #[arg(long, value_name = "SIZE", default_value = "8KiB", value_parser = units::parse_size)]
    bytes_per_inode: u64,

    /// Percent of the blocks kept for root
    #[arg(long, value_name = "PERCENT", default_value_t = 5)]
    reserved: u32,

    /// The file system's name, up to 16 bytes
    #[arg(long, value_name = "NAME", default_value = "")]
    label: String,

    /// Overwrite what is there
    #[arg(long)]
    force: bool,
}

/// Makes it.
pub(super) fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let is_new = !args.device.exists();
    let prepare = is_new || args.size.is_some();
    let prepared = if prepare { prepare_image(args, is_new) } else { Ok(()) };
    let made = prepared.and_then(|()| make(args, is_new, global.quiet));
    if made.is_err() && is_new {
        let _ = std::fs::remove_file(&args.device);
    }
    let len_bytes = made?;
    if !global.quiet {
        note!("made a file system of {} on {}", units::size(len_bytes), args.device.display());
    }
    Ok(())
}

fn what(path: &Path) -> String {
    format!("cannot make a file system on {}", path.display())
}

/// Permissions of a new image file: who reads it reads all files in it.
const IMAGE_MODE: u32 = 0o600;

/// Makes the image file, or lengthens it; a file of zeros that takes no room.
fn prepare_image(args: &Args, is_new: bool) -> Result<(), Failure> {
    let usage = |why: &str| Failure::new(Exit::Usage, what(&args.device)).because(why);
    let Some(size) = args.size else {
        return Err(usage("it does not exist").advice("--size SIZE makes an image file."));
    };
    if !is_new {
        let kind = std::fs::metadata(&args.device).map_err(|e| Failure::io(what(&args.device), &e));
        if !kind?.is_file() {
            return Err(usage("only an image file can be given a size"));
        }
        if !args.force {
            return Err(usage("it exists").advice("--force overwrites it."));
        }
    }
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(args.force).mode(IMAGE_MODE);
    let image = options.open(&args.device).and_then(|file| file.set_len(size));
    image.map_err(|error| Failure::io(what(&args.device), &error))
}

/// Returns how large it is.
fn make(args: &Args, is_new: bool, quiet: bool) -> Result<u64, Failure> {
    let device = device::open(&args.device, false)?;
    if !is_new && !args.force && !is_zero(&*device)? {
        return Err(Failure::new(Exit::Usage, what(&args.device))
            .because("there is something on it")
            .advice("--force overwrites it."));
    }
    let number = |bytes: u64| u32::try_from(bytes).unwrap_or(u32::MAX);
    let owner = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    let (uuid, random) = (device::random()?, device::random()?);
    let made = device::watched("making", quiet, |progress| {
        let options = MkfsOptions {
            block_bytes: number(args.block_size),
            bytes_per_inode: number(args.bytes_per_inode.max(args.block_size)),
            reserved_percent: args.reserved,
            label: args.label.clone(),
            uuid,
            random,
            now_unix_secs: device::now_unix_secs(),
            root_owner: owner,
            is_blank: is_new || (args.size.is_some() && args.force),
            progress,
        };
        mkfs(&device, &options)
    });
    made.map_err(|error| {
        let exit = match error {
            MkfsError::Options(_) | MkfsError::Size(_) => Exit::Usage,
            MkfsError::Records(_) | MkfsError::Io(_) => Exit::Failed,
        };
        Failure::new(exit, what(&args.device)).because(error)
    })?;
    Ok(device.len_bytes())
}

/// Whether the first 64 KiB, where file systems and partition tables begin, are all zeros.
fn is_zero(device: &dyn atoll_tfs::device::Device) -> Result<bool, Failure> {
    let mut start = vec![0; device.len_bytes().min(64 << 10) as usize];
    device.read_at(0, &mut start).map_err(|error| Failure::io("cannot read the device", &error))?;
    Ok(start.iter().all(|byte| *byte == 0))
}
