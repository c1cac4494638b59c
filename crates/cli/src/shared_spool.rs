//! The spools of shared volumes on disk: `DIR/spool-shared/VOLUME-USER-N`, each with a lock that the mount which
//! uses it holds.
//!
//! A spool belongs to a volume and a user, whose public keys its name has in hexadecimal. A user who mounts a volume
//! several times at once has several. The file `name` says what was mounted, for people and for the replay; the file
//! `refused` says why the ring did not take what is left, when that was tried last.

use std::fs;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use atoll_key::{UserId, VolumeId};
use atoll_node::shell_word;
use atoll_volume::SpoolDirectory;

use crate::failure::{Exit, Failure};
use crate::spool::{self, Pending, SpoolOnDisk};
use crate::units;

/// Mounts of one volume by one user that may be offline at once.
const MAX_SPOOLS: usize = 16;

const NAME: &str = "name";
const REFUSED: &str = "refused";

/// A spool that this process uses.
pub(crate) struct Opened {
    pub(crate) directory: Arc<dyn SpoolDirectory>,
    pub(crate) path: PathBuf,
}

/// A spool that has something, which no mount of this machine uses.
pub(crate) struct Left {
    pub(crate) path: PathBuf,
    pub(crate) volume: VolumeId,
    pub(crate) user: UserId,
    /// What was mounted: a name on this node, or an address.
    pub(crate) name: String,
}

fn place(node: &Path) -> PathBuf {
    node.join("spool-shared")
}

fn hex(bytes: &[u8; 32]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(hex: &str) -> Option<[u8; 32]> {
    let mut bytes = [0; 32];
    if hex.len() != 64 || !hex.is_ascii() {
        return None;
    }
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(bytes)
}

/// The spool for a mount of a user's; `None` if the user has mounted the volume too often. Of several that are
/// free, one that has something.
pub(crate) fn open(
    node: &Path,
    (volume, user): (VolumeId, UserId),
    name: &str,
    what: &str,
) -> Result<Option<Opened>, Failure> {
    let start = format!("{}-{}", hex(&volume.0), hex(&user.0));
    let paths = (0..MAX_SPOOLS).map(|n| place(node).join(format!("{start}-{n}")));
    let mut paths: Vec<PathBuf> = paths.collect();
    paths.sort_by_key(|path| spool::files_in(path).0 == 0);
    for path in paths {
        let failed = |error: io::Error| {
            Failure::io(format!("{what}: its spool {} cannot be used", path.display()), &error)
        };
        let Some(opened) = SpoolOnDisk::open(path.clone()).map_err(failed)? else { continue };
        if let Err(error) = note(&path, NAME, name) {
            // It is told by its address then.
            tracing::debug!("a spool has no name: {error}");
        }
        return Ok(Some(Opened { directory: Arc::new(opened), path }));
    }
    Ok(None)
}

fn note(path: &Path, file: &str, text: &str) -> io::Result<()> {
    use std::io::Write;
    let mut options = fs::OpenOptions::new();
    let mut file =
        options.create(true).write(true).truncate(true).mode(0o600).open(path.join(file))?;
    file.write_all(text.as_bytes())
}

/// Notes why the ring does not take what is in the spool at a path, or that it does. The caller uses the spool.
pub(crate) fn note_refused(path: &Path, why: Option<&str>) {
    let noted = match why {
        Some(why) => note(path, REFUSED, why),
        None => match fs::remove_file(path.join(REFUSED)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        },
    };
    if let Err(error) = noted {
        tracing::debug!("it cannot be noted whether the ring takes what is spooled: {error}");
    }
}

/// The spool at a path; `None` if a mount of this machine has it.
pub(crate) fn open_left(left: &Left) -> io::Result<Option<Arc<dyn SpoolDirectory>>> {
    let opened = SpoolOnDisk::open(left.path.clone())?;
    Ok(opened.map(|spool| Arc::new(spool) as Arc<dyn SpoolDirectory>))
}

fn all(node: &Path) -> Vec<Left> {
    let entries = fs::read_dir(place(node)).into_iter().flatten().flatten();
    let spools = entries.filter_map(|entry| {
        let file = entry.file_name().into_string().ok()?;
        let mut parts = file.split('-');
        let volume = VolumeId(from_hex(parts.next()?)?);
        let user = UserId(from_hex(parts.next()?)?);
        let path = entry.path();
        let name = fs::read_to_string(path.join(NAME)).unwrap_or_default();
        let name = if name.is_empty() { file } else { name };
        Some(Left { path, volume, user, name })
    });
    let mut spools: Vec<Left> = spools.collect();
    spools.sort_by(|a, b| a.path.cmp(&b.path));
    spools
}

/// The spools that have something and that no mount uses.
pub(crate) fn left(node: &Path) -> Vec<Left> {
    let mut left = all(node);
    left.retain(|spool| {
        let pending = spool::pending_at(&spool.path, &spool.name);
        pending.bytes > 0 && !pending.mounted
    });
    left
}

/// What waits in each spool, of those in which something does.
pub(crate) fn pending(node: &Path) -> Vec<Pending> {
    let pending = all(node).into_iter().map(|spool| {
        let pending = spool::pending_at(&spool.path, &spool.name);
        let refused = fs::read_to_string(spool.path.join(REFUSED)).ok();
        Pending { refused: refused.filter(|_| pending.files > 0), ..pending }
    });
    pending.filter(|spool| spool.bytes > 0 || !spool.set_aside.is_empty()).collect()
}

/// What waits in the spools of what was mounted by a name.
pub(crate) fn pending_of(node: &Path, name: &str) -> Vec<Pending> {
    pending(node).into_iter().filter(|spool| spool.name == name).collect()
}

/// What becomes of what waits in these spools, for people; `None` if nothing waits.
pub(crate) fn describe(spools: &[Pending]) -> Option<String> {
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

/// Removes what waits under a name, of mounts that have ended; how many bytes.
pub(crate) fn discard(node: &Path, name: &str) -> io::Result<u64> {
    let mut bytes = 0;
    for spool in all(node).into_iter().filter(|spool| spool.name == name) {
        // Nobody begins to use it meanwhile.
        let Some(_lock) = SpoolOnDisk::open(spool.path.clone())? else { continue };
        bytes += spool::files_in(&spool.path).1;
        spool::remove_files(&spool.path)?;
        note_refused(&spool.path, None);
        for aside in spool::pending_at(&spool.path, name).set_aside {
            fs::remove_dir_all(aside)?;
        }
    }
    Ok(bytes)
}

/// That nothing of a volume, which this node is about to let go of, waits here; with a user, nothing that this user
/// has written.
pub(crate) fn check_empty(
    node: &Path,
    (volume, user): (VolumeId, Option<UserId>),
    what: &str,
) -> Result<(), Failure> {
    let is_its =
        |spool: &Left| spool.volume == volume && user.is_none_or(|user| spool.user == user);
    let mut its = all(node).into_iter().filter(is_its);
    match its.find(|spool| spool::files_in(&spool.path).0 > 0) {
        None => Ok(()),
        Some(Left { name, .. }) => Err(Failure::new(Exit::Failed, what)
            .because("files that are not in the volume wait on this node")
            .advice(format!(
                "`atoll volume recover {}` says more; with --discard it removes them.",
                shell_word(&name)
            ))),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use bytes::Bytes;

    use super::*;

    const OWNER: (VolumeId, UserId) = (VolumeId([7; 32]), UserId([8; 32]));

    fn opened(node: &Path, owner: (VolumeId, UserId)) -> Arc<dyn SpoolDirectory> {
        open(node, owner, "team", "x").expect("opens").expect("one is free").directory
    }

    #[tokio::test]
    async fn each_mount_has_a_spool_and_the_next_one_what_was_left() -> io::Result<()> {
        let temp = tempfile::tempdir()?;
        let node = temp.path();
        let (one, two) = (opened(node, OWNER), opened(node, OWNER));
        two.replace("2.inode".into(), Bytes::from_static(b"xy")).await?;
        two.replace("2.block".into(), Bytes::from_static(b"xyz")).await?;
        assert!(one.list().await?.iter().all(|name| !name.ends_with(".inode")));
        assert!(left(node).is_empty(), "mounts use them");
        assert_eq!(pending_of(node, "team").len(), 1);
        let waits = pending(node);
        assert_eq!((waits.len(), waits[0].files, waits[0].bytes), (1, 1, 5));
        assert!(waits[0].mounted && waits[0].name == "team");
        drop((one, two));
        assert_eq!(left(node).len(), 1);
        assert!(left(node)[0].volume == OWNER.0 && left(node)[0].user == OWNER.1);
        // Another user, and another volume, have nothing to do with it.
        for owner in [(OWNER.0, UserId([9; 32])), (VolumeId([9; 32]), OWNER.1)] {
            let names = opened(node, owner).list().await?;
            assert!(names.iter().all(|name| !name.ends_with(".inode")));
        }
        assert!(check_empty(node, (OWNER.0, None), "x").is_err());
        assert!(check_empty(node, (OWNER.0, Some(OWNER.1)), "x").is_err());
        assert!(check_empty(node, (OWNER.0, Some(UserId([9; 32]))), "x").is_ok());
        let told = || describe(&pending_of(node, "team")).expect("something waits");
        assert!(told().contains("1 file of an earlier mount is not on the ring yet"), "{}", told());
        let next = open(node, OWNER, "team", "x").expect("opens").expect("one is free");
        note_refused(&next.path, Some("you were removed"));
        let said = told();
        assert!(said.contains("does not take it: you were removed. `atoll volume"), "{said}");
        note_refused(&next.path, None);
        assert!(told().contains("the node brings it there"), "{}", told());
        note_refused(&next.path, Some("you were removed"));
        let next = next.directory;
        assert_eq!(next.read("2.inode".into()).await?, "xy");
        assert_eq!(discard(node, "team")?, 0, "it is used");
        drop(next);
        assert_eq!((discard(node, "other")?, discard(node, "team")?), (0, 5));
        assert!(describe(&pending_of(node, "team")).is_none());
        assert!(pending(node).is_empty() && check_empty(node, (OWNER.0, None), "x").is_ok());
        let mode = |path: &Path| fs::metadata(path).map(|meta| meta.permissions().mode() & 0o777);
        let path = all(node).remove(0).path;
        assert_eq!((mode(&path)?, mode(&path.join(NAME))?), (0o700, 0o600));
        Ok(())
    }
}
