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
use atoll_volume::SpoolDirectory;

use crate::spool::{self, Pending, SpoolOnDisk};

/// Mounts of one volume by one user that may be offline at once.
const MAX_SPOOLS: usize = 16;

const NAME: &str = "name";
const REFUSED: &str = "refused";

/// A spool that this process uses.
pub struct Opened {
    /// For the file system.
    pub directory: Arc<dyn SpoolDirectory>,
    /// Where it is.
    pub path: PathBuf,
}

/// Why a spool cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("its spool {} cannot be used: {error}", path.display())]
pub struct OpenError {
    /// Which one.
    pub path: PathBuf,
    /// What the system says.
    pub error: io::Error,
}

/// A spool that has something, which no mount of this machine uses.
pub struct Left {
    /// Where it is.
    pub path: PathBuf,
    /// Which volume was mounted.
    pub volume: VolumeId,
    /// By which user.
    pub user: UserId,
    /// What was mounted: a name on this node, or an address.
    pub name: String,
}

fn place(node: &Path) -> PathBuf {
    node.join("spool-shared")
}

fn hex(bytes: &[u8; 32]) -> String {
    data_encoding::HEXLOWER.encode(bytes)
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
pub fn open(
    node: &Path,
    (volume, user): (VolumeId, UserId),
    name: &str,
) -> Result<Option<Opened>, OpenError> {
    let start = format!("{}-{}", hex(&volume.0), hex(&user.0));
    let paths = (0..MAX_SPOOLS).map(|n| place(node).join(format!("{start}-{n}")));
    let mut paths: Vec<PathBuf> = paths.collect();
    paths.sort_by_key(|path| spool::files_in(path).0 == 0);
    for path in paths {
        let failed = |error| OpenError { path: path.clone(), error };
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
pub fn note_refused(path: &Path, why: Option<&str>) {
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
pub fn open_left(left: &Left) -> io::Result<Option<Arc<dyn SpoolDirectory>>> {
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
pub fn left(node: &Path) -> Vec<Left> {
    let mut left = all(node);
    left.retain(|spool| {
        let pending = spool::pending_at(&spool.path, &spool.name);
        pending.bytes > 0 && !pending.mounted
    });
    left
}

/// What waits in each spool, of those in which something does.
pub fn pending(node: &Path) -> Vec<Pending> {
    let pending = all(node).into_iter().map(|spool| {
        let pending = spool::pending_at(&spool.path, &spool.name);
        let refused = fs::read_to_string(spool.path.join(REFUSED)).ok();
        Pending { refused: refused.filter(|_| pending.files > 0), ..pending }
    });
    pending.filter(|spool| spool.bytes > 0 || !spool.set_aside.is_empty()).collect()
}

/// What waits in the spools of what was mounted by a name.
pub fn pending_of(node: &Path, name: &str) -> Vec<Pending> {
    pending(node).into_iter().filter(|spool| spool.name == name).collect()
}

/// Removes what waits under a name, of mounts that have ended; how many bytes.
pub fn discard(node: &Path, name: &str) -> io::Result<u64> {
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

/// A spool with files of a volume that wait; with a user, with files that this user has written.
pub fn waiting(node: &Path, volume: VolumeId, user: Option<UserId>) -> Option<Left> {
    let is_its =
        |spool: &Left| spool.volume == volume && user.is_none_or(|user| spool.user == user);
    let mut its = all(node).into_iter().filter(is_its);
    its.find(|spool| spool::files_in(&spool.path).0 > 0)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use bytes::Bytes;

    use super::*;

    const OWNER: (VolumeId, UserId) = (VolumeId([7; 32]), UserId([8; 32]));

    fn opened(node: &Path, owner: (VolumeId, UserId)) -> Arc<dyn SpoolDirectory> {
        open(node, owner, "team").expect("opens").expect("one is free").directory
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
        let waits = |user| waiting(node, OWNER.0, user).map(|spool| spool.name);
        assert_eq!((waits(None), waits(Some(OWNER.1))), (Some("team".into()), Some("team".into())));
        assert_eq!(waits(Some(UserId([9; 32]))), None);
        let refused = || pending_of(node, "team").remove(0).refused;
        assert_eq!(refused(), None);
        let next = open(node, OWNER, "team").expect("opens").expect("one is free");
        note_refused(&next.path, Some("you were removed"));
        assert_eq!(refused().as_deref(), Some("you were removed"));
        note_refused(&next.path, None);
        assert_eq!(refused(), None);
        note_refused(&next.path, Some("you were removed"));
        let next = next.directory;
        assert_eq!(next.read("2.inode".into()).await?, "xy");
        assert_eq!(discard(node, "team")?, 0, "it is used");
        drop(next);
        assert_eq!((discard(node, "other")?, discard(node, "team")?), (0, 5));
        assert!(pending(node).is_empty() && waits(None).is_none());
        let mode = |path: &Path| fs::metadata(path).map(|meta| meta.permissions().mode() & 0o777);
        let path = all(node).remove(0).path;
        assert_eq!((mode(&path)?, mode(&path.join(NAME))?), (0o700, 0o600));
        Ok(())
    }
}
