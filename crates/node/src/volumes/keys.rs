//! A volume's keys leave this node, come to it, or are forgotten.
//!
//! **A move** hands the writing of a volume over to another node. The former node marks the volume
//! with a token, lets nothing write it any more, and goes on renewing its leases. The new node
//! imports the keys, has the list of the volume's blocks on disk, and then puts its acceptance
//! on the ring ([`move_acceptance`]). Only when the former node has read that, it forgets the volume. So
//! at every moment at least one node renews the leases; that two do is harmless.

use std::fs;
use std::path::Path;

use atoll_dht::{Blocks, GetError};
use atoll_key::volume_secret::{MoveToken, move_acceptance};
use atoll_key::{SecretKey, VolumeSecret};

use super::Volumes;
use super::on_disk::{Info, check_name};
use crate::control::volume_error::{VolumeError, io_error};
use crate::dir::{self, path_from_bytes, path_to_bytes};
use crate::network::random_seed;

/// How the directory of a volume is called while it is removed, and the volume's name.
pub(super) const OLD_PREFIX: &str = ".old-";

impl Volumes {
    /// All that it takes to write a volume.
    pub(super) fn secret(&self, name: &str) -> Result<VolumeSecret, VolumeError> {
        let info = self.info(name)?;
        Ok(VolumeSecret {
            key: self.key(name)?,
            read_key: self.read_key(name)?,
            name: name.to_owned(),
            source: info.source,
            token: info.move_token,
        })
    }

    /// Takes over a volume whose keys were made elsewhere; whether it is new here. One that was
    /// moved away from here is here again.
    pub(super) fn import(
        &self,
        secret: &VolumeSecret,
        now_unix_secs: u64,
    ) -> Result<bool, VolumeError> {
        let name = &secret.name;
        check_name(name)?;
        let _changing = self.lock();
        let source = secret.source.clone().map(path_from_bytes);
        if !self.path(name).join("key").exists() {
            self.create(
                name,
                &secret.key,
                secret.read_key.as_ref(),
                source.as_deref(),
                now_unix_secs,
            )?;
            return Ok(true);
        }
        if self.key(name)?.seed() != secret.key.seed() {
            return Err(VolumeError::OtherKey { name: name.clone() });
        }
        if let (None, Some(key)) = (self.read_key(name)?, &secret.read_key) {
            self.write_read_key(name, key)?;
        }
        let info = self.info(name)?;
        let source = info.source.or_else(|| source.as_deref().map(path_to_bytes));
        self.write_info(name, &Info { source, move_token: None, ..info })?;
        Ok(false)
    }

    /// Marks a volume as moved to another node, or as not moved; the mark. A volume that has one
    /// keeps it: what was printed before stays good.
    pub(super) fn set_moved(
        &self,
        name: &str,
        is_moved: bool,
    ) -> Result<Option<MoveToken>, VolumeError> {
        let _changing = self.lock();
        let info = self.info(name)?;
        let [token @ .., _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _] = random_seed();
        let move_token = is_moved.then(|| info.move_token.unwrap_or(token));
        self.write_info(name, &Info { move_token, ..info })?;
        Ok(move_token)
    }

    /// Removes a volume from this node, its keys included.
    pub(super) fn forget(&self, name: &str) -> Result<(), VolumeError> {
        let _changing = self.lock();
        self.known(name)?;
        self.remove(name)
    }

    /// Removes a volume unless it has come back since the move of `token`; whether it did.
    pub(super) fn forget_moved(&self, name: &str, token: &MoveToken) -> Result<bool, VolumeError> {
        let _changing = self.lock();
        let is_moved = self.info(name)?.move_token == Some(*token);
        if is_moved {
            self.remove(name)?;
        }
        Ok(is_moved)
    }

    fn remove(&self, name: &str) -> Result<(), VolumeError> {
        let (path, old) = (self.path(name), self.path(&format!("{OLD_PREFIX}{name}")));
        let remove = |old: &Path| match fs::remove_dir_all(old) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            result => result,
        };
        remove(&old)
            .and_then(|()| fs::rename(&path, &old))
            .and_then(|()| dir::sync_parent(&path))
            .and_then(|()| remove(&old))
            .map_err(io_error(&path))
    }
}

/// Whether the node to which a volume was moved has said that it has taken over.
pub(super) async fn is_taken_over(
    blocks: &dyn Blocks,
    key: &SecretKey,
    token: &MoveToken,
) -> Result<bool, GetError> {
    match blocks.get_signed(move_acceptance(key, token).key()).await {
        Ok(_) => Ok(true),
        Err(GetError::NotFound { .. } | GetError::Removed { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use atoll_key::ReadKey;

    use super::*;
    use crate::dir::NodeDir;

    fn volumes() -> (Volumes, NodeDir, tempfile::TempDir) {
        let temp = tempfile::tempdir().expect("temp");
        let dir = NodeDir::at(temp.path());
        dir.prepare().expect("fresh");
        (Volumes::open(&dir).expect("open"), dir, temp)
    }

    fn secret(key: u8) -> VolumeSecret {
        VolumeSecret {
            key: SecretKey::from_seed(&[key; 32]),
            read_key: None,
            name: "docs".into(),
            source: None,
            token: None,
        }
    }

    #[test]
    fn an_import_adds_what_is_lacking_and_replaces_no_key() {
        let (volumes, _, _temp) = volumes();
        let mine = secret(1);
        assert_eq!(volumes.import(&mine, 1), Ok(true));
        assert_eq!(volumes.import(&mine, 1), Ok(false));
        let error = VolumeError::OtherKey { name: "docs".into() };
        assert_eq!(volumes.import(&secret(2), 1), Err(error));
        let read_key = |byte| Some(ReadKey::from_bytes([byte; 32]));
        for (given, source) in [(7, "/srv/a"), (8, "/srv/b")] {
            let source = Some(source.as_bytes().to_vec());
            let whole = VolumeSecret { read_key: read_key(given), source, ..mine.clone() };
            assert_eq!(volumes.import(&whole, 1), Ok(false));
        }
        let kept = volumes.secret("docs").expect("there");
        assert_eq!((kept.key.seed(), kept.read_key), ([1; 32], read_key(7)), "what is here stays");
        assert_eq!(kept.source, Some(b"/srv/a".to_vec()));
        let bad = VolumeSecret { name: "../x".into(), ..secret(1) };
        assert!(matches!(volumes.import(&bad, 1), Err(VolumeError::BadName { .. })));
    }

    #[test]
    fn a_volume_that_was_moved_is_not_opened_until_it_is_back() {
        let (volumes, _, _temp) = volumes();
        let source = Path::new("/srv/a");
        volumes.open_or_create("docs", None, 1).expect("create");
        let token = volumes.set_moved("docs", true).expect("marks");
        assert!(token.is_some());
        assert_eq!(volumes.set_moved("docs", true), Ok(token), "the first text stays good");
        let moved = VolumeError::Moved { name: "docs".into() };
        for source in [None, Some(source)] {
            let opened = volumes.open_or_create("docs", source, 1).map(drop);
            assert_eq!(opened, Err(moved.clone()));
        }
        assert_eq!(volumes.set_source("docs", source), Err(moved));
        let secret = volumes.secret("docs").expect("there");
        assert_eq!(secret.token, token);
        assert_eq!(volumes.import(&secret, 1), Ok(false), "it came back");
        volumes.open_or_create("docs", None, 1).expect("opens");
        volumes.set_moved("docs", true).expect("marks");
        assert_eq!(volumes.set_moved("docs", false), Ok(None));
        volumes.open_or_create("docs", None, 1).expect("opens");
        let former = token.expect("marked");
        assert_eq!(volumes.forget_moved("docs", &former), Ok(false), "it is here again");
        let token = volumes.set_moved("docs", true).expect("marks").expect("a token");
        assert_eq!(volumes.forget_moved("docs", &former), Ok(false), "this is another move");
        assert_eq!(volumes.forget_moved("docs", &token), Ok(true));
    }

    #[test]
    fn nothing_is_left_of_a_forgotten_volume_also_after_a_crash() {
        let (volumes, dir, _temp) = volumes();
        let (first, _) = volumes.open_or_create("docs", None, 1).expect("create");
        volumes.make_read_key("docs").expect("make");
        volumes.forget("docs").expect("forgets");
        assert_eq!(volumes.forget("docs"), Err(VolumeError::Unknown { name: "docs".into() }));
        assert_eq!(fs::read_dir(dir.volumes()).expect("reads").count(), 0);
        let (second, is_new) = volumes.open_or_create("docs", None, 1).expect("create");
        assert!(is_new && first.seed() != second.seed());
        assert_eq!(volumes.read_key("docs"), Ok(None));
        // Renamed, not removed yet.
        fs::rename(dir.volumes().join("docs"), dir.volumes().join(".old-docs")).expect("renames");
        let volumes = Volumes::open(&dir).expect("open");
        assert_eq!(fs::read_dir(dir.volumes()).expect("reads").count(), 0);
        assert_eq!(volumes.names().expect("list"), Vec::<String>::new());
    }
}
