//! Records of the pools of this node: each pool has a file, `DIR/pools/NAME.json`, which names its directory.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use atoll_node::check_name;
use serde::{Deserialize, Serialize};

use crate::failure::{Exit, Failure};
use crate::global;
use crate::user;

/// The record of a pool.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub(crate) struct PoolRecord {
    /// The pool's directory on this machine.
    pub(crate) dir: PathBuf,
    /// The pool's number (`atoll_pool::PoolSettings::pool`), in hexadecimal digits.
    pub(crate) pool: String,
}

fn place(dir: &Path) -> PathBuf {
    dir.join("pools")
}

fn path_of(dir: &Path, name: &str) -> PathBuf {
    place(dir).join(format!("{name}.json"))
}

/// The pool of a name, if this node has one.
pub(crate) fn find(dir: &Path, name: &str, what: &str) -> Result<Option<PoolRecord>, Failure> {
    if check_name(name).is_err() {
        return Ok(None);
    }
    let path = path_of(dir, name);
    let bytes = match fs::read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        bytes => bytes.map_err(|error| Failure::io(what, &error))?,
    };
    let record = serde_json::from_slice(&bytes).map_err(|error| {
        Failure::new(Exit::Failed, what).because(format!("{}: {error}", path.display()))
    })?;
    Ok(Some(record))
}

/// All pools, by name.
pub(super) fn all(dir: &Path) -> Result<Vec<String>, Failure> {
    let what = "cannot list the pools";
    let entries = match fs::read_dir(place(dir)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(|error| Failure::io(what, &error))?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let name = entry.map_err(|error| Failure::io(what, &error))?.file_name();
        let name = name.to_str().and_then(|name| name.strip_suffix(".json"));
        names.extend(name.filter(|name| check_name(name).is_ok()).map(str::to_owned));
    }
    names.sort_unstable();
    Ok(names)
}

/// Makes the directory of the records.
pub(super) fn make_place(dir: &Path, what: &str) -> Result<(), Failure> {
    global::make_private(&place(dir), what)
}

/// Writes a new record; a name that is taken is refused.
pub(super) fn add(dir: &Path, name: &str, record: &PoolRecord, what: &str) -> Result<(), Failure> {
    make_place(dir, what)?;
    let bytes = serde_json::to_vec_pretty(record).expect("text and a path");
    let beside = place(dir).join(format!("{name}.new"));
    let written =
        fs::write(&beside, bytes).and_then(|()| fs::hard_link(&beside, path_of(dir, name)));
    let _ = fs::remove_file(&beside);
    written.map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => taken(name, what),
        _ => Failure::io(what, &error),
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

fn taken(name: &str, what: &str) -> Failure {
    Failure::new(Exit::Usage, what).because(format!("this node has a pool {name}"))
}

/// Removes a record.
pub(super) fn remove(dir: &Path, name: &str, what: &str) -> Result<(), Failure> {
    fs::remove_file(path_of(dir, name)).map_err(|error| Failure::io(what, &error))
}
