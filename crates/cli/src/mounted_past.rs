//! Paths in mounted shared volumes, and what they were: `.atoll/history` in the root of a mount.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use atoll_volume::shared::file_state::STATE_XATTR;

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
    root: PathBuf,
    /// The path below that.
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
        if !root.join(HISTORY).is_dir() {
            return Err(Failure::new(Exit::Usage, what)
                .because("it is not in a mounted shared volume")
                .advice(
                    "Of a volume that one mount writes, `atoll volume history NAME` lists the old states.",
                ));
        }
        let mut below = above.strip_prefix(root).expect("the root is above").to_owned();
        // Joining nothing would leave a slash behind.
        below.extend(rest.components());
        Ok(InMount { root: root.to_owned(), below })
    }

    /// Where it is in the state of a time, if that is kept.
    pub(crate) fn then(&self, at: Moment, what: &str) -> Result<PathBuf, Failure> {
        let state = self.root.join(HISTORY).join(at.to_string());
        match fs::symlink_metadata(&state) {
            Ok(_) => Ok(state.join(&self.below)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(Failure::new(Exit::NotFound, what)
                    .because(at.why_nothing_is_kept())
                    .advice(format!("`ls {}` lists what is.", self.root.join(HISTORY).display())))
            }
            Err(error) => Err(Failure::io(what, &error)),
        }
    }

    /// Where it is in the newest state that has it.
    pub(crate) fn newest_then(&self) -> io::Result<Option<PathBuf>> {
        let mut states = Vec::new();
        for state in fs::read_dir(self.root.join(HISTORY))? {
            states.push(state?.path());
        }
        states.sort();
        let mut found = states.into_iter().rev().map(|state| state.join(&self.below));
        Ok(found.find(|path| fs::symlink_metadata(path).is_ok()))
    }
}

fn parent(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new("/"))
}
