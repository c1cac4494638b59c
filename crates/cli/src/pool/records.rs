//! Records of the pools of this node (`atoll_upkeep::pools::records`), with failures in words.

use std::io;
use std::path::Path;

use atoll_node::check_name;
use atoll_upkeep::pools::records;

use crate::failure::{Exit, Failure};
use crate::global;
use crate::user;

pub(crate) use atoll_upkeep::pools::records::{GroupRecord, JoiningRecord, PeerRecord, PoolRecord};

fn failed(what: &str) -> impl Fn(io::Error) -> Failure {
    move |error| match error.kind() {
        io::ErrorKind::InvalidData => Failure::new(Exit::Failed, what).because(error),
        _ => Failure::io(what, &error),
    }
}

/// The pool of a name, if this node has one.
pub(crate) fn find(dir: &Path, name: &str, what: &str) -> Result<Option<PoolRecord>, Failure> {
    records::find(dir, name).map_err(failed(what))
}

/// All pools, by name.
pub(super) fn all(dir: &Path) -> Result<Vec<String>, Failure> {
    records::all(dir).map_err(failed("cannot list the pools"))
}

/// Makes the directory of the records.
pub(super) fn make_place(dir: &Path, what: &str) -> Result<(), Failure> {
    // A pool of one needs no node, and its directory may be new.
    global::make_private(dir, what)?;
    records::make_place(dir).map_err(failed(what))
}

/// Writes a new record; a name that is taken is refused.
pub(super) fn add(dir: &Path, name: &str, record: &PoolRecord, what: &str) -> Result<(), Failure> {
    records::add(dir, name, record).map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => taken(name, what),
        _ => failed(what)(error),
    })
}

/// That a name is free.
pub(super) fn check_free(dir: &Path, name: &str, what: &str) -> Result<(), Failure> {
    let refused = |why: String| Err(Failure::new(Exit::Usage, what).because(why));
    if let Err(error) = check_name(name) {
        return refused(error.to_string());
    }
    if name.contains([':', '#', '@']) {
        return refused(
            "a name with ':', '#' or '@' would be taken for an address or a time".into(),
        );
    }
    // The name would lead to the pool, and to the volume no more.
    if dir.join("volumes").join(name).exists() || user::joined(dir, name)?.is_some() {
        return refused(format!("this node has a volume {name}"));
    }
    match find(dir, name, what)? {
        Some(_) => Err(taken(name, what)),
        None => Ok(()),
    }
}

/// That the node has a pool under no other name: it is served once.
pub(super) fn check_other(
    dir: &Path,
    (name, pool): (&str, &str),
    what: &str,
) -> Result<(), Failure> {
    match records::other_name(dir, name, pool).map_err(failed(what))? {
        Some(other) => {
            Err(Failure::new(Exit::Usage, what)
                .because(format!("this node has that pool as {other}")))
        }
        None => Ok(()),
    }
}

/// Writes a record again.
pub(super) fn replace(
    dir: &Path,
    name: &str,
    record: &PoolRecord,
    what: &str,
) -> Result<(), Failure> {
    records::replace(dir, name, record).map_err(failed(what))
}

fn taken(name: &str, what: &str) -> Failure {
    Failure::new(Exit::Usage, what).because(format!("this node has a pool {name}"))
}

/// Removes a record.
pub(super) fn remove(dir: &Path, name: &str, what: &str) -> Result<(), Failure> {
    records::remove(dir, name).map_err(failed(what))
}
