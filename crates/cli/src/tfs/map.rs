//! `atoll tfs map`: where ordinary, transparent, overwritten and free blocks lie (Figure 10 of
//! the paper).

use std::io::IsTerminal;
use std::path::{Path, PathBuf};

use atoll_tfs::map::BlockMap;
use atoll_tfs::stat::map_xattr;
use serde::Serialize;

use super::{ask, device, picture};
use crate::failure::{Exit, Failure};
use crate::output::Output;
use crate::runtime::until_done;

/// Arguments of `atoll tfs map`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll tfs map /mnt/tfs
  atoll tfs map --out map.svg disk.img
  atoll tfs map --json --cells 1000 disk.img")]
pub(super) struct Args {
    /// A mount point, or an image file or block device that is not mounted
    #[arg(value_name = "MNT|DEVICE")]
    of: PathBuf,

    /// Draw a picture: a file whose name ends in .svg or .png
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,

    /// How many columns to draw on the terminal [default: 76, or what a narrower one has]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(8..=400))]
    columns: Option<u16>,

    /// How many rows
    #[arg(long, value_name = "N", default_value_t = 16,
          value_parser = clap::value_parser!(u16).range(1..=400))]
    rows: u16,

    /// Into how many cells to divide the disk with --json
    #[arg(long, value_name = "N", requires = "json", default_value_t = 1000,
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    cells: u32,

    /// One JSON object: for each cell its blocks by state
    #[arg(long, conflicts_with = "out")]
    json: bool,
}

#[derive(Serialize)]
struct Shown {
    block_bytes: u32,
    blocks: u64,
    cell_blocks: u32,
    cells: Vec<ShownCell>,
}

#[derive(Serialize)]
struct ShownCell {
    free: u64,
    allocated: u64,
    transparent: u64,
    allocated_and_overwritten: u64,
    free_and_overwritten: u64,
}

/// Columns drawn unless something else is said.
const WIDTH: u16 = 76;

/// A file to draw into.
#[derive(Clone, Copy)]
enum Kind {
    Svg,
    Png,
}

/// Draws.
pub(super) fn run(args: &Args) -> Result<(), Failure> {
    if let Some(path) = &args.out {
        let kind = kind_of(path)?;
        let map = map(&args.of, (picture::PICTURE_COLUMNS * picture::PICTURE_ROWS) as u32)?;
        let bytes = match kind {
            Kind::Svg => picture::svg(&map).into_bytes(),
            Kind::Png => picture::png(&map),
        };
        return std::fs::write(path, bytes)
            .map_err(|error| Failure::io(format!("cannot write {}", path.display()), &error));
    }
    let mut output = Output::new();
    if args.json {
        output.json(&shown(&map(&args.of, args.cells)?))?;
        return output.flush();
    }
    let colours = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let columns = args.columns.unwrap_or_else(terminal_columns);
    let (columns, rows) = (usize::from(columns), usize::from(args.rows));
    let map = map(&args.of, picture::terminal_cells(columns, rows, colours))?;
    // Our own words and colours; there are no names in it.
    output.bytes(picture::terminal(&map, columns, colours).as_bytes())?;
    output.flush()
}

/// As wide as a line of text, where the terminal is not narrower.
fn terminal_columns() -> u16 {
    let size = rustix::termios::tcgetwinsize(std::io::stdout());
    let columns = size.map_or(0, |size| size.ws_col);
    if columns == 0 { WIDTH } else { columns.clamp(8, WIDTH) }
}

fn kind_of(path: &Path) -> Result<Kind, Failure> {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("svg") => Ok(Kind::Svg),
        Some("png") => Ok(Kind::Png),
        _ => Err(Failure::new(Exit::Usage, format!("cannot draw {}", path.display()))
            .because("its name ends neither in .svg nor in .png")),
    }
}

/// The map of a mounted file system, or of an image.
fn map(of: &Path, cells: u32) -> Result<BlockMap, Failure> {
    if of.is_dir() {
        return map_of_mounted(of, cells);
    }
    until_done(async {
        let tfs = device::mount_image(of, true)?;
        tfs.block_map(cells).map_err(|errno| {
            Failure::new(Exit::Failed, format!("cannot read {}", of.display())).because(errno)
        })
    })
}

fn map_of_mounted(of: &Path, cells: u32) -> Result<BlockMap, Failure> {
    let mut map: Option<BlockMap> = None;
    loop {
        let first = map.as_ref().map_or(0, |map| map.cells.len() as u32);
        let part = ask::ask(of, &map_xattr(cells, first))?;
        if !BlockMap::add_part(&mut map, &part) {
            return Err(ask::nonsense(of));
        }
        match map {
            Some(whole) if whole.is_whole() => return Ok(whole),
            Some(more) if more.cells.len() as u32 > first => map = Some(more),
            _ => return Err(ask::nonsense(of)),
        }
    }
}

fn shown(map: &BlockMap) -> Shown {
    let cells = map.cells.iter().map(|cell| ShownCell {
        free: cell.free,
        allocated: cell.allocated,
        transparent: cell.transparent,
        allocated_and_overwritten: cell.allocated_and_overwritten,
        free_and_overwritten: cell.free_and_overwritten,
    });
    Shown {
        block_bytes: map.block_bytes,
        blocks: map.blocks,
        cell_blocks: map.cell_blocks,
        cells: cells.collect(),
    }
}
