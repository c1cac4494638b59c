//! What each procedure of NFS does (RFC 1813, section 3.3), in calls of a file system.

pub(super) mod attributes;
pub(super) mod directories;
pub(super) mod files;
pub(super) mod names;

use atoll_vfs::Errno;

use super::nfs3::{Attributes, Reply, Status};
use super::service::File;

/// A failure that says nothing but its status.
fn failed<F: Default>(status: Status) -> (Status, F) {
    (status, F::default())
}

/// A failure, with what the file is like.
async fn of<T>(file: &File, outcome: Result<T, Errno>) -> Reply<T, Option<Attributes>> {
    match outcome {
        Ok(value) => Ok(value),
        Err(error) => Err((Status::of(error), file.now().await)),
    }
}
