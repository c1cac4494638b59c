//! Who the user of this node is, and what belongs to the user: files in the node's directory.
//!
//! | name | what |
//! |---|---|
//! | `identity/user.key` | the user's Ed25519 secret key, 32 bytes |
//! | `identity/groups/NAME` | the public key of a group that the user has made, `atollgroup:KEY`; its secret key follows from the user's, NAME and an epoch |
//! | `identity/lock` | locked (`flock`) while one of these is made |
//! | `shared/NAME` | the shared volume that was joined as NAME: an invitation, `atoll-share:CODE`, or its address, `atoll:KEY`, which the user of this node writes |

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use atoll_env::Env;
use atoll_key::{GroupAddress, GroupId, SecretKey, VolumeAddress, VolumeId, VolumeInvitation};
use atoll_node::{
    DirError, check_name, create_atomically, make_private_dir, read_secret, write_atomically,
};
use rustix::fs::FlockOperation;

/// Why a file of the user's cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {why}")]
pub struct UserError {
    /// What cannot be done, e.g. "the user's key cannot be read".
    pub what: String,
    /// Why.
    pub why: Reason,
}

/// Why something cannot be done with a file of the user's.
#[derive(Debug, thiserror::Error)]
pub enum Reason {
    /// A file of the node's directory is damaged, or the directory cannot be used.
    #[error(transparent)]
    Dir(#[from] DirError),
    /// The system refuses.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The files do not fit together.
    #[error("{0}")]
    Contradiction(&'static str),
}

fn failed(what: &str, why: impl Into<Reason>) -> UserError {
    UserError { what: what.to_owned(), why: why.into() }
}

/// A new secret key.
pub fn new_key(env: &Env) -> SecretKey {
    let words: [[u8; 8]; 4] = std::array::from_fn(|_| env.random_u64().to_be_bytes());
    SecretKey::from_seed(&words.concat().try_into().expect("32 bytes"))
}

fn key_path(dir: &Path) -> PathBuf {
    dir.join("identity").join("user.key")
}

/// The user's key, if one was made.
pub fn key(dir: &Path) -> Result<Option<SecretKey>, UserError> {
    let (what, path) = ("the user's key cannot be read", key_path(dir));
    let Some(bytes) = read_secret(&path).map_err(|error| failed(what, error))? else {
        return Ok(None);
    };
    let seed: [u8; 32] = bytes.try_into().map_err(|bytes: Vec<u8>| {
        let why = format!("it has {} bytes instead of 32", bytes.len());
        failed(what, DirError::Damaged { path: path.clone(), what: why })
    })?;
    Ok(Some(SecretKey::from_seed(&seed)))
}

/// The user's key, made now if there is none.
pub fn key_or_new(dir: &Path, env: &Env) -> Result<SecretKey, UserError> {
    if let Some(key) = key(dir)? {
        return Ok(key);
    }
    let _lock = lock(dir)?;
    // Another command may have made it.
    if let Some(key) = key(dir)? {
        return Ok(key);
    }
    let key = new_key(env);
    create_atomically(&key_path(dir), &key.seed())
        .map_err(|error| failed("the user's key cannot be made", error))?;
    Ok(key)
}

/// Makes the directory, and keeps other commands from making files there until it is dropped.
fn lock(dir: &Path) -> Result<File, UserError> {
    let identity = dir.join("identity");
    let what = format!("cannot lock {}", identity.display());
    make_private_dir(&identity).map_err(|error| failed(&what, error))?;
    let mut options = OpenOptions::new();
    let file = options.create(true).append(true).mode(0o600).open(identity.join("lock"));
    let file = file.map_err(|error| failed(&what, error))?;
    rustix::fs::flock(&file, FlockOperation::LockExclusive)
        .map_err(|error| failed(&what, io::Error::from(error)))?;
    Ok(file)
}

fn groups_directory(dir: &Path) -> PathBuf {
    dir.join("identity").join("groups")
}

/// Whether the user has made a group of this name on this node.
pub fn has_group(dir: &Path, name: &str) -> bool {
    check_name(name).is_ok() && groups_directory(dir).join(name).exists()
}

/// The names of the groups that the user has made on this node.
pub fn groups(dir: &Path) -> Vec<String> {
    names_in(&groups_directory(dir))
}

fn names_in(path: &Path) -> Vec<String> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<String> = names.filter(|name| check_name(name).is_ok()).collect();
    names.sort();
    names
}

/// The public key that is noted for a group of this name.
pub fn noted_group(dir: &Path, name: &str) -> Result<Option<GroupId>, UserError> {
    if !has_group(dir, name) {
        return Ok(None);
    }
    let what = format!("the group {name} cannot be read");
    let path = groups_directory(dir).join(name);
    let text = fs::read_to_string(&path).map_err(|error| failed(&what, error))?;
    let address: GroupAddress = text
        .trim()
        .parse()
        .map_err(|error| failed(&what, DirError::Damaged { path, what: format!("{error}") }))?;
    Ok(Some(address.0))
}

/// Notes the public key of a group that the user has made, in the place of another one.
pub fn note_group(dir: &Path, name: &str, group: GroupId) -> Result<(), UserError> {
    let what = format!("the group {name} cannot be noted");
    let _lock = lock(dir)?;
    let groups = groups_directory(dir);
    make_private_dir(&groups).map_err(|error| failed(&what, error))?;
    let path = groups.join(name);
    let text = format!("{}\n", GroupAddress(group));
    match fs::read_to_string(&path) {
        Ok(noted) if noted == text => return Ok(()),
        Ok(_) => fs::remove_file(&path).map_err(|error| failed(&what, error))?,
        Err(_) => {}
    }
    create_atomically(&path, text.as_bytes()).map_err(|error| failed(&what, error))
}

/// The names of the shared volumes that were joined on this node.
pub fn joined_names(dir: &Path) -> Vec<String> {
    names_in(&dir.join("shared"))
}

/// A shared volume of another node that has a name on this one.
#[derive(Clone, Debug)]
pub struct Joined {
    /// Which one.
    pub volume: VolumeId,
    /// The key of the member by which this node writes it.
    pub user: SecretKey,
    /// Whether that is the key of an invitation, and not of this node's user.
    pub is_invited: bool,
}

impl Joined {
    /// The text that is kept of it.
    fn to_text(&self) -> String {
        match self.is_invited {
            true => VolumeInvitation { volume: self.volume, user: self.user.clone() }.to_text(),
            false => VolumeAddress(self.volume).to_string(),
        }
    }
}

/// The shared volume that was joined under this name.
pub fn joined(dir: &Path, name: &str) -> Result<Option<Joined>, UserError> {
    if check_name(name).is_err() {
        return Ok(None);
    }
    let what = format!("how {name} was joined cannot be read");
    let path = dir.join("shared").join(name);
    let Some(bytes) = read_secret(&path).map_err(|error| failed(&what, error))? else {
        return Ok(None);
    };
    let text = String::from_utf8_lossy(&bytes);
    let damaged =
        |what_is: String| failed(&what, DirError::Damaged { path: path.clone(), what: what_is });
    if let Ok(VolumeAddress(volume)) = text.trim().parse() {
        let user = key(dir)?.ok_or_else(|| {
            failed(&what, Reason::Contradiction("the key of this node's user is gone"))
        })?;
        return Ok(Some(Joined { volume, user, is_invited: false }));
    }
    let invitation: Result<VolumeInvitation, _> = text.trim().parse();
    let VolumeInvitation { volume, user } =
        invitation.map_err(|error| damaged(error.to_string()))?;
    Ok(Some(Joined { volume, user, is_invited: true }))
}

/// Notes a shared volume under a name, in the place of what was joined under it before.
pub fn join(dir: &Path, name: &str, joined: &Joined) -> Result<(), UserError> {
    let what = format!("it cannot be noted that {name} was joined");
    let _lock = lock(dir)?;
    let shared = dir.join("shared");
    make_private_dir(&shared).map_err(|error| failed(&what, error))?;
    let text = format!("{}\n", joined.to_text());
    write_atomically(&shared.join(name), text.as_bytes()).map_err(|error| failed(&what, error))
}

/// Forgets a shared volume that was joined under a name.
pub fn forget_joined(dir: &Path, name: &str) -> Result<(), UserError> {
    let _lock = lock(dir)?;
    fs::remove_file(dir.join("shared").join(name))
        .map_err(|error| failed(&format!("{name} cannot be forgotten"), error))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::sync::Arc;

    use atoll_env::TokioRuntime;

    use super::*;

    /// Two commands that both made a key: one of them would go on with a key that is lost.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_key_is_made_once_and_for_its_owner_only() {
        let temp = tempfile::tempdir().expect("temp");
        let dir = temp.path();
        let env: Env = Arc::new(TokioRuntime::current());
        assert!(key(dir).expect("reads").is_none());
        let made: Vec<[u8; 32]> = std::thread::scope(|scope| {
            let make = || key_or_new(dir, &env).expect("is made").seed();
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(make)).collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        });
        let held = key(dir).expect("reads").expect("was made").seed();
        assert!(made.iter().all(|seed| *seed == held));
        let mode =
            |name: &str| fs::metadata(dir.join(name)).expect("there").permissions().mode() & 0o777;
        assert_eq!((mode("identity"), mode("identity/user.key")), (0o700, 0o600));

        fs::set_permissions(key_path(dir), fs::Permissions::from_mode(0o644)).expect("chmod");
        let told = key(dir).expect_err("others can read it").to_string();
        assert!(told.contains("chmod 600"), "{told}");
        fs::set_permissions(key_path(dir), fs::Permissions::from_mode(0o600)).expect("chmod");
        fs::write(key_path(dir), "short").expect("writes");
        let told = key_or_new(dir, &env).expect_err("damaged").to_string();
        assert!(told.contains("5 bytes instead of 32"), "{told}");
    }

    #[tokio::test]
    async fn groups_and_invitations_are_found_again() {
        let temp = tempfile::tempdir().expect("temp");
        let dir = temp.path();
        let user = SecretKey::from_seed(&[1; 32]);
        assert!(groups(dir).is_empty() && !has_group(dir, "band"));
        for _ in 0..2 {
            note_group(dir, "band", user.group_id()).expect("is noted");
        }
        assert!(groups(dir) == ["band"] && has_group(dir, "band") && !has_group(dir, "../band"));
        assert_eq!(noted_group(dir, "band").expect("reads"), Some(user.group_id()));

        assert!(joined(dir, "work").expect("reads").is_none());
        assert!(joined_names(dir).is_empty());
        let volume = user.volume_id();
        let invited = Joined { volume, user: user.clone(), is_invited: true };
        join(dir, "work", &invited).expect("is kept");
        assert_eq!(joined_names(dir), ["work"]);
        let back = || joined(dir, "work").expect("reads").expect("was kept");
        assert_eq!((back().volume, back().user.seed()), (volume, user.seed()));
        let other = SecretKey::from_seed(&[2; 32]);
        join(dir, "work", &Joined { user: other.clone(), ..invited.clone() }).expect("is replaced");
        assert_eq!((back().user.seed(), back().is_invited), (other.seed(), true));
        // By its address it is the user of this node who writes it.
        let env: Env = Arc::new(TokioRuntime::current());
        let own = key_or_new(dir, &env).expect("is made");
        join(dir, "work", &Joined { user: own.clone(), is_invited: false, ..invited.clone() })
            .expect("is replaced");
        assert_eq!((back().volume, back().user.seed()), (volume, own.seed()));
        assert!(!back().is_invited);
        forget_joined(dir, "work").expect("is forgotten");
        assert!(joined(dir, "work").expect("reads").is_none() && joined_names(dir).is_empty());
        join(dir, "work", &invited).expect("is joined again");
        fs::write(dir.join("shared/work"), "nonsense").expect("writes");
        let told = joined(dir, "work").expect_err("damaged").to_string();
        assert!(told.contains("is damaged"), "{told}");
    }
}
