//! Paths in mounted shared volumes, and what they were: `.atoll/history` in the root of a mount.
//!
//! Other members may change the tree at any moment, so only the mount's root is opened by its path, and everything
//! below it from directory to directory ([`crate::beneath`]).

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use atoll_volume::shared::file_state::STATE_XATTR;

use crate::beneath::Directory;
use crate::failure::{Exit, Failure};
use crate::moment::Moment;

/// Where a mounted shared volume shows its old states.
const HISTORY: &str = ".atoll/history";

/// Whether a file or directory is in a mounted shared volume.
pub(crate) fn is_in_shared_mount(path: &Path) -> bool {
    // Without room for the answer this asks for its length.
    rustix::fs::getxattr(path, STATE_XATTR, &mut [0; 0][..]).is_ok()
}

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
    /// Finds the mount of a path, of which nothing need be there any more. The last name is not followed if it is a
    /// symbolic link.
    pub(crate) fn of(path: &Path, what: &str) -> Result<InMount, Failure> {
        let failed = |error: &io::Error| Failure::io(what, error);
        let path = std::path::absolute(path).map_err(|error| failed(&error))?;
        if path.components().any(|part| part == Component::ParentDir) {
            return Err(Failure::new(Exit::Usage, what).because("give the path without `..`"));
        }
        // The deepest directory above it that is there.
        let mut above =
            if path.is_dir() && !path.is_symlink() { path.as_path() } else { parent(&path) };
        while !above.is_dir() {
            above = parent(above);
        }
        let rest = path.strip_prefix(above).expect("it is above");
        let above = fs::canonicalize(above).map_err(|error| failed(&error))?;
        let device = fs::metadata(&above).map_err(|error| failed(&error))?.dev();
        let is_inside = |path: &&Path| fs::metadata(path).is_ok_and(|meta| meta.dev() == device);
        let root = above.ancestors().take_while(is_inside).last().unwrap_or(&above);
        let not_shared = || {
            Failure::new(Exit::Usage, what)
                .because("it is not in a mounted shared volume")
                .advice(
                    "Of a volume that one mount writes, `atoll volume history NAME` lists the old states.",
                )
        };
        let mut below = above.strip_prefix(root).expect("the root is above").to_owned();
        // Joining nothing would leave a slash behind.
        below.extend(rest.components());
        let root = Directory::open(root).map_err(|error| failed(&error))?;
        let is_shared = root.hold(OsStr::new(".")).is_ok_and(|root| root.has_xattr(STATE_XATTR));
        let history = root.below(Path::new(HISTORY)).ok().filter(|_| is_shared);
        let history = history.ok_or_else(not_shared)?;
        Ok(InMount { root, history, below })
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

    /// It in a state that the mount has named, if it is a directory there.
    pub(crate) fn in_state(&self, state: &str) -> io::Result<Directory> {
        self.history.child(OsStr::new(state))?.below(&self.below)
    }
}

fn parent(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new("/"))
}
