//! Paths in mounted shared volumes, and what they were: `.atoll/history` in the root of a mount.
//!
//! Other members may change the tree at any moment, so only the mount's root is opened by its path, and everything
//! below it from directory to directory ([`crate::beneath`]).

use std::ffi::OsStr;
use std::io;
use std::path::{Component, Path, PathBuf};

use crate::beneath::Directory;
use crate::failure::{Exit, Failure};
use crate::moment::Moment;
use crate::user_path::{self, PathInMount};

/// Where a mounted shared volume shows its old states.
const HISTORY: &str = ".atoll/history";

/// A path in a mounted shared volume.
pub(crate) struct InMount {
    /// Where the volume is mounted.
    root: Directory,
    /// Its old states.
    history: Directory,
    /// The path below the root.
    below: PathBuf,
}

impl InMount {
    /// Finds the mount of a path, of which nothing need be there any more. No link in a mount is followed.
    pub(crate) fn of(path: &Path, what: &str) -> Result<InMount, Failure> {
        let found = user_path::find_in_mount(path).map_err(|error| Failure::io(what, &error))?;
        let not_shared = || {
            Failure::new(Exit::Usage, what)
                .because("it is not in a mounted shared volume")
                .advice(
                    "Of a volume that one mount writes, `atoll volume history NAME` lists the old states.",
                )
        };
        let PathInMount { root, below } = found.ok_or_else(not_shared)?;
        // Above what is not there, nothing can be found.
        if below.components().any(|part| part == Component::ParentDir) {
            return Err(Failure::new(Exit::Usage, what).because("give the path without `..`"));
        }
        let history = root.below(Path::new(HISTORY)).map_err(|_| not_shared())?;
        Ok(InMount { root, history, below })
    }

    /// The path below the root of the mount.
    pub(crate) fn path(&self) -> &Path {
        &self.below
    }

    /// A path of the mount as the user would name it.
    pub(crate) fn shown(&self, below: &Path) -> PathBuf {
        self.root.path().join(below)
    }

    /// A directory of the mount.
    pub(crate) fn directory(&self, below: &Path) -> io::Result<Directory> {
        self.root.below(below)
    }

    /// The directory that the path is in, and its name there; `None` for the root of the mount.
    pub(crate) fn place(&self) -> Option<io::Result<(Directory, &OsStr)>> {
        let (above, name) = (self.below.parent()?, self.below.file_name()?);
        Some(self.root.below(above).map(|directory| (directory, name)))
    }

    /// The directory that it was in at a time, if the state of that is kept.
    pub(crate) fn then(&self, at: Moment, what: &str) -> Result<io::Result<Directory>, Failure> {
        match self.history.child(OsStr::new(&at.to_string())) {
            Ok(state) => Ok(state.below(parent(&self.below))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let history = self.root.path_of(OsStr::new(HISTORY));
                Err(Failure::new(Exit::NotFound, what)
                    .because(at.why_nothing_is_kept())
                    .advice(format!("`ls {}` lists what is.", history.display())))
            }
            Err(error) => Err(Failure::io(what, &error)),
        }
    }

    /// A directory of the mount in a state that it has named.
    pub(crate) fn in_state(&self, state: &str, below: &Path) -> io::Result<Directory> {
        self.history.child(OsStr::new(state))?.below(below)
    }
}

fn parent(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new(""))
}
