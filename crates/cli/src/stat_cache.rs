//! The stat cache of a published volume, `DIR/stat-cache/NAME`: the files that publishes have read.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

fn path(node: &Path, name: &str) -> PathBuf {
    node.join("stat-cache").join(name)
}

/// The file for publishes of a volume; `None` if nothing can be remembered here.
pub(crate) fn prepare(node: &Path, name: &str) -> Option<PathBuf> {
    let path = path(node, name);
    let made = fs::DirBuilder::new().mode(0o700).create(path.parent()?);
    match made {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            tracing::warn!("all files are read, now and next time: {}: {error}", path.display());
            None
        }
        _ => Some(path),
    }
}

/// Removes the file of a volume that this node has forgotten.
pub(crate) fn remove(node: &Path, name: &str) {
    // A file that cannot be removed belongs to no volume any more and does no harm.
    let path = path(node, name);
    let _ = fs::remove_file(path.with_file_name(format!(".new-{name}")));
    let _ = fs::remove_file(path);
}
