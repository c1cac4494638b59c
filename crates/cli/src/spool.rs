//! Text and JSON about spools: the changes of mounts that this machine keeps until the ring has them.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use atoll_key::{UserId, VolumeId};
use atoll_node::shell_word;
use atoll_upkeep::shared_spool::{self, Opened};
use atoll_upkeep::spool;
pub(crate) use atoll_upkeep::spool::{
    Pending, SpoolOnDisk, lock_soon, pending, pending_of, remove, remove_records,
};
use atoll_volume::SpoolDirectory;
use serde::{Serialize, Serializer};

use crate::failure::{Exit, Failure};
use crate::output::json_list;
use crate::units;

/// The spool of a volume; `None` if a mount of this machine has it.
pub(crate) fn open(
    node: &Path,
    name: &str,
    what: &str,
) -> Result<Option<Arc<dyn SpoolDirectory>>, Failure> {
    let opened = spool::open(node, name);
    opened.map_err(|error| unusable(what, &spool::directory(node, name), &error))
}

/// The spool for a mount of a shared volume by a user; `None` if the user has mounted it too
/// often.
pub(crate) fn open_shared(
    node: &Path,
    owner: (VolumeId, UserId),
    name: &str,
    what: &str,
) -> Result<Option<Opened>, Failure> {
    let opened = shared_spool::open(node, owner, name);
    opened.map_err(|failed| unusable(what, &failed.path, &failed.error))
}

fn unusable(what: &str, path: &Path, error: &io::Error) -> Failure {
    Failure::io(format!("{what}: its spool {} cannot be used", path.display()), error)
}

/// Why a spool is not there to be opened.
pub(crate) fn in_use(what: &str) -> Failure {
    Failure::new(Exit::Unavailable, what).because(
        "a mount or an NFS server on this machine writes it, or is about to end, or the node brings to the ring \
             what one has left",
    )
}

/// That nothing of a volume, which this node is about to let go of, waits here.
pub(crate) fn check_empty(node: &Path, name: &str, what: &str) -> Result<(), Failure> {
    let Pending { bytes, set_aside_bytes, mounted, .. } = pending_of(node, name);
    if bytes + set_aside_bytes == 0 {
        return Ok(());
    }
    if mounted && set_aside_bytes == 0 {
        // It removes what the ring has, within a second.
        return Err(Failure::new(Exit::Failed, what)
            .because("a mount writes it, or its process is about to end")
            .advice("Unmount it first."));
    }
    Err(waits(what, "changes that are not in the volume are on this node", name))
}

/// The same of a shared volume; with a user, that nothing waits that this user has written.
pub(crate) fn check_shared_empty(
    node: &Path,
    (volume, user): (VolumeId, Option<UserId>),
    what: &str,
) -> Result<(), Failure> {
    match shared_spool::waiting(node, volume, user) {
        None => Ok(()),
        Some(left) => {
            Err(waits(what, "files that are not in the volume wait on this node", &left.name))
        }
    }
}

fn waits(what: &str, why: &str, name: &str) -> Failure {
    Failure::new(Exit::Failed, what).because(why).advice(format!(
        "`atoll volume recover {}` says more; with --discard it removes them.",
        shell_word(name)
    ))
}

/// A sentence that tells users what happens to the files in the spools of a shared volume; `None` if the spools are empty.
pub(crate) fn describe_shared(spools: &[Pending]) -> Option<String> {
    let files: u64 = spools.iter().map(|spool| spool.files).sum();
    let which = units::counted(files, "file of an earlier mount is", "files of earlier mounts are");
    let them = if files == 1 { "it" } else { "them" };
    if files == 0 {
        return None;
    }
    Some(match spools.iter().find_map(|spool| Some((&spool.name, spool.refused.as_ref()?))) {
        None => {
            format!("{which} not on the ring yet: the node brings {them} there, or the next mount.")
        }
        Some((name, why)) => format!(
            "{which} on this machine only, and the ring does not take {them}: {why}. `atoll volume recover {}` \
             says what to do.",
            shell_word(name)
        ),
    })
}

/// What of a volume is not on the ring, as JSON.
#[derive(Serialize)]
pub(crate) struct JsonPending<'a> {
    name: &'a str,
    bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    files: Option<u64>,
    mounted: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<&'a str>,
    #[serde(flatten, serialize_with = "set_aside_json")]
    set_aside: &'a [PathBuf],
    set_aside_bytes: u64,
}

impl<'a> From<&'a Pending> for JsonPending<'a> {
    fn from(pending: &'a Pending) -> JsonPending<'a> {
        JsonPending {
            name: &pending.name,
            bytes: pending.bytes,
            files: (pending.files > 0).then_some(pending.files),
            mounted: pending.mounted,
            refused: pending.refused.as_deref(),
            set_aside: &pending.set_aside,
            set_aside_bytes: pending.set_aside_bytes,
        }
    }
}

fn set_aside_json<S: Serializer>(paths: &[PathBuf], serializer: S) -> Result<S::Ok, S::Error> {
    json_list("set_aside", paths.iter().map(|path| path.as_os_str().as_bytes()), serializer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_waits_of_a_shared_volume_says_what_becomes_of_it() {
        let mut spool = Pending { name: "team".into(), files: 1, ..Pending::default() };
        let told = |spool: &Pending| {
            describe_shared(std::slice::from_ref(spool)).expect("something waits")
        };
        assert!(told(&spool).contains("1 file of an earlier mount is not on the ring yet"));
        assert!(told(&spool).contains("the node brings it there"), "{}", told(&spool));
        spool.refused = Some("you were removed".into());
        let said = told(&spool);
        assert!(said.contains("does not take it: you were removed. `atoll volume"), "{said}");
        assert!(describe_shared(&[Pending::default()]).is_none() && describe_shared(&[]).is_none());
    }

    #[test]
    fn what_waits_is_told_to_programs() {
        let mut pending = Pending { name: "work".into(), bytes: 7, ..Pending::default() };
        let text = |pending: &Pending| {
            serde_json::to_string(&JsonPending::from(pending)).expect("serialises")
        };
        let own = r#"{"name":"work","bytes":7,"mounted":false,"set_aside":[],"set_aside_bytes":0}"#;
        assert_eq!(text(&pending), own);
        (pending.files, pending.refused) = (2, Some("no".into()));
        let shared = text(&pending);
        assert!(shared.contains(r#""files":2,"mounted":false,"refused":"no","#), "{shared}");
    }
}
