//! `atoll man`: the manual, made from the same tree as the help.

use std::fs;
use std::path::PathBuf;

use clap::CommandFactory;
use clap_mangen::Man;

use crate::arguments::Arguments;
use crate::failure::Failure;
use crate::output::Output;

/// Arguments of `atoll man`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll man | man -l -
  atoll man ~/.local/share/man/man1 && man atoll-publish")]
pub struct Args {
    /// Write one page per command into this directory, which is made if need be
    #[arg(value_name = "DIR")]
    into: Option<PathBuf>,
}

/// Prints or writes the pages.
pub fn run(args: &Args) -> Result<(), Failure> {
    let Some(dir) = &args.into else {
        let mut page = Vec::new();
        Man::new(Arguments::command()).render(&mut page).expect("a Vec takes everything");
        let mut output = Output::new();
        output.bytes(&page)?;
        return output.flush();
    };
    let failed = |error: std::io::Error| {
        Failure::io(format!("cannot write the manual into {}", dir.display()), &error)
    };
    fs::create_dir_all(dir).map_err(failed)?;
    clap_mangen::generate_to(Arguments::command(), dir).map_err(failed)
}
