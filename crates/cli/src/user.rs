//! The user of this node for commands: files in the node's directory, and what to say if they
//! cannot be used.

use std::path::PathBuf;

use atoll_node::ClientError;
pub(crate) use atoll_upkeep::user::{
    Joined, forget_joined, groups, has_group, join, joined, joined_names, key, key_or_new, new_key,
};
use atoll_upkeep::user::{Reason, UserError};

use crate::connection;
use crate::failure::{Exit, Failure};
use crate::global::Global;

/// The node's directory, which must be there: it is made by `atoll up` alone.
pub(crate) fn directory(global: &Global) -> Result<PathBuf, Failure> {
    let dir = global.dir()?;
    match dir.is_dir() {
        true => Ok(dir),
        false => Err(connection::failure(ClientError::NoNode { dir })),
    }
}

impl From<UserError> for Failure {
    fn from(UserError { what, why }: UserError) -> Failure {
        match why {
            Reason::Io(error) => Failure::io(what, &error),
            Reason::Dir(_) | Reason::Contradiction(_) => {
                Failure::new(Exit::Failed, what).because(why)
            }
        }
    }
}
