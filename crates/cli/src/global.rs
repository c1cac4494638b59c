//! The options of every command.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use crate::failure::{Exit, Failure};

/// Options that every command takes, before or after its name.
#[derive(clap::Args, Debug, Clone)]
#[command(next_help_heading = "Options of every command")]
pub(crate) struct Global {
    /// The node's directory [default: $XDG_DATA_HOME/atoll or ~/.local/share/atoll]
    // Not clap's `env`: then every "Usage:" of an error would name --dir as if required.
    #[arg(long, global = true, value_name = "D")]
    #[arg(long_help = "The node's directory, also taken from ATOLL_DIR; by default \
                       $XDG_DATA_HOME/atoll, or ~/.local/share/atoll")]
    dir: Option<PathBuf>,

    /// Say more on standard error (twice: still more)
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,

    /// Show no progress
    #[arg(short, long, global = true)]
    pub quiet: bool,
}

impl Global {
    /// The node's directory, absolute.
    pub(crate) fn dir(&self) -> Result<PathBuf, Failure> {
        let named = self.dir.clone().or_else(|| std::env::var_os("ATOLL_DIR").map(PathBuf::from));
        let dir = match named {
            Some(dir) if dir.as_os_str().is_empty() => {
                return Err(Failure::new(Exit::Usage, "the node's directory has an empty name")
                    .advice("Name one with --dir or ATOLL_DIR."));
            }
            Some(dir) => dir,
            None => atoll_node::default_dir().ok_or_else(|| {
                Failure::new(Exit::Usage, "where is the node's directory?")
                    .because("neither HOME nor XDG_DATA_HOME is set")
                    .advice("Name one with --dir or ATOLL_DIR.")
            })?,
        };
        std::path::absolute(&dir)
            .map_err(|error| Failure::io(format!("cannot find {}", dir.display()), &error))
    }
}

/// Makes a directory below a node's, for its user alone, also where no node has run yet.
pub(crate) fn make_private(directory: &Path, what: &str) -> Result<(), Failure> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(directory);
    made.map_err(|error| {
        Failure::io(format!("{what}: cannot make {}", directory.display()), &error)
    })
}
