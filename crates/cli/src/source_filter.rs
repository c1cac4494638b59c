//! Directories that are never published, whatever the options: those of nodes, which hold secret
//! keys and other people's blocks, and mounts of Atoll.

use std::os::fd::BorrowedFd;
use std::path::Path;

use atoll_gateway::fuse;
use atoll_node::PrivateDirectory;
use atoll_volume::owned::SourceFilter;

use crate::failure::{Exit, Failure};

/// Withholds private directories of nodes and mounts of Atoll.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WithoutNodes;

impl SourceFilter for WithoutNodes {
    fn withholds(&self, directory: BorrowedFd<'_>) -> Option<String> {
        PrivateDirectory::of(directory).map(|kind| kind.to_string())
    }

    fn withholds_mount(&self, device: u64) -> Option<String> {
        fuse::is_mount_of_ours(device).then(|| "it is a mount of Atoll".to_owned())
    }
}

/// Fails if `source` is, or lies in, a directory that is never published.
pub(crate) fn check(what: &str, source: &Path) -> Result<(), Failure> {
    let found = atoll_node::enclosing(source).map_err(|error| Failure::io(what, &error))?;
    match found {
        None => Ok(()),
        Some((at, kind)) => Err(Failure::new(Exit::Failed, what)
            .because(format!("{} is never published: {kind}", at.display()))
            .advice("Name a directory that does not lie in it; one that holds it is published without it.")),
    }
}
