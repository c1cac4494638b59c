//! The volumes published from this node: their names, keys and sources.
//!
//! Each is a directory `volumes/NAME`:
//!
//! | file | what |
//! |---|---|
//! | `key` | the volume's secret key, 32 bytes, written once |
//! | `read-key` | what readers of an encrypted volume need, as text; only if it is encrypted |
//! | `info` | CBOR map: 0 source directory (bytes; absent if none), 1 when it was made (s), 2 token of its move (see [`crate::volumes::keys`]), 3 lease of its blocks (s; absent: the network's) |
//! | `manifest` | the blocks to keep alive; see [`crate::volumes::manifest`] |
//! | `kept` | when that was last done; see [`Kept`] |
//! | `manifest.SESSION` | a manifest being written |
//!
//! A volume appears all at once: it is made under a name beginning with a dot, which no
//! volume may have, and renamed. It goes all at once too, renamed before it is removed.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use atoll_dht::{MAX_LEASE, MIN_VOLUME_LEASE};
use atoll_key::volume_secret::MoveToken;
use atoll_key::{BlockHash, ReadKey, SecretKey, SignedBlock};
use minicbor::{Decode, Encode};

use super::keys::OLD_PREFIX;
use super::manifest::{Manifest, PartialManifest};
use crate::control::message::join_hashes;
use crate::control::volume_error::{VolumeError, io_error};
use crate::dir::{self, DirError, NodeDir, path_from_bytes, path_to_bytes};
use crate::network::random_seed;

/// Hashes of a list of this node's own that are written at once: 2 MiB.
const ADOPTED_AT_ONCE: usize = 1 << 16;

/// The longest name of a volume, bytes.
pub const MAX_NAME_BYTES: usize = 100;

/// When a volume's blocks were last kept alive, and with what result.
///
/// A pass over a large volume may take longer than the machine runs at a time, so how far it
/// has come is kept too.
///
/// CBOR map: 0 when the last finished pass began, seconds since 1970; 1 version of the root; 2
/// blocks lost; 3 why the last attempt was not finished; 4 when that was; 5 the pass under way.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct Kept {
    #[n(0)]
    pub refreshed_unix_secs: u64,
    #[n(1)]
    pub root_version: u64,
    #[n(2)]
    pub lost_blocks: u64,
    #[n(3)]
    pub trouble: Option<String>,
    #[n(4)]
    pub tried_unix_secs: u64,
    #[n(5)]
    pub pass: Option<RenewalPass>,
}

/// A pass over a manifest that has begun and not ended.
///
/// CBOR map: 0 hashes of the manifest behind it, 1 when it began in seconds since 1970, 2 blocks
/// of these that the ring has lost, 3 blocks of these that could not be renewed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct RenewalPass {
    #[n(0)]
    pub next: u64,
    #[n(1)]
    pub began_unix_secs: u64,
    #[n(2)]
    pub lost_blocks: u64,
    #[n(3)]
    pub failed_blocks: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct Info {
    #[cbor(n(0), with = "minicbor::bytes")]
    pub(super) source: Option<Vec<u8>>,
    #[n(1)]
    pub(super) created_unix_secs: u64,
    #[cbor(n(2), with = "minicbor::bytes")]
    pub(super) move_token: Option<MoveToken>,
    /// For how long the blocks of the manifest were put, and are renewed at a time.
    #[n(3)]
    pub(super) lease_secs: Option<u64>,
}

/// The node's volumes. Methods block on the disk.
#[derive(Debug)]
pub(crate) struct Volumes {
    dir: PathBuf,
    /// Held while something is replaced.
    changing: Mutex<()>,
}

impl Volumes {
    /// The volumes in `dir`; what a crash left half made is cleared away.
    pub(crate) fn open(dir: &NodeDir) -> Result<Volumes, DirError> {
        let volumes = Volumes { dir: dir.volumes(), changing: Mutex::new(()) };
        dir::make_private_dir(&volumes.dir)?;
        for entry in
            fs::read_dir(&volumes.dir).map_err(DirError::io("cannot read", &volumes.dir))?
        {
            let path = entry.map_err(DirError::io("cannot read", &volumes.dir))?.path();
            let is_unfinished = |name: &OsStr| {
                [".new-", OLD_PREFIX].iter().any(|p| name.as_bytes().starts_with(p.as_bytes()))
            };
            if path.file_name().is_some_and(is_unfinished) {
                fs::remove_dir_all(&path).map_err(DirError::io("cannot clear", path))?;
            } else {
                PartialManifest::clear_old(&path);
            }
        }
        Ok(volumes)
    }

    /// The names, sorted.
    pub(crate) fn names(&self) -> Result<Vec<String>, DirError> {
        let entries = fs::read_dir(&self.dir).map_err(DirError::io("cannot read", &self.dir))?;
        let mut names: Vec<String> = entries
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter(|name| check_name(name).is_ok() && self.path(name).join("key").exists())
            .collect();
        names.sort();
        Ok(names)
    }

    /// The key of volume `name`, made now if there is none; whether it was. A volume
    /// that has a source is opened only for that.
    pub(crate) fn open_or_create(
        &self,
        name: &str,
        source: Option<&Path>,
        now_unix_secs: u64,
    ) -> Result<(SecretKey, bool), VolumeError> {
        check_name(name)?;
        let _changing = self.lock();
        if self.path(name).join("key").exists() {
            self.unmoved(name)?;
            self.bind_source(name, source)?;
            return Ok((self.key(name)?, false));
        }
        let key = SecretKey::from_seed(&random_seed());
        self.create(name, &key, None, source, now_unix_secs)?;
        Ok((key, true))
    }

    /// The secret key of a volume.
    pub(crate) fn key(&self, name: &str) -> Result<SecretKey, VolumeError> {
        check_name(name)?;
        let path = self.path(name).join("key");
        let bytes =
            dir::read_secret(&path)?.ok_or_else(|| VolumeError::Unknown { name: name.into() })?;
        let seed = bytes.as_slice().try_into().map_err(|_| {
            DirError::damaged(path, format!("it has {} bytes; a key has 32", bytes.len()))
        })?;
        Ok(SecretKey::from_seed(seed))
    }

    /// The read key of a volume, if it is encrypted. Its file is text with a checksum, as
    /// behind the `#` of an address: damage is noticed, and a reader can be given the file's text.
    pub(crate) fn read_key(&self, name: &str) -> Result<Option<ReadKey>, VolumeError> {
        self.known(name)?;
        let path = self.path(name).join("read-key");
        let Some(text) = dir::read_secret(&path)? else { return Ok(None) };
        let text = String::from_utf8_lossy(&text);
        let key = ReadKey::from_text(text.trim_end());
        Ok(Some(key.map_err(|error| DirError::damaged(path, error))?))
    }

    /// The read key of a volume, made and on disk now if there was none.
    pub(crate) fn make_read_key(&self, name: &str) -> Result<ReadKey, VolumeError> {
        let _changing = self.lock();
        if let Some(key) = self.read_key(name)? {
            return Ok(key);
        }
        let key = ReadKey::from_bytes(random_seed());
        self.write_read_key(name, &key)?;
        Ok(key)
    }

    pub(super) fn write_read_key(&self, name: &str, key: &ReadKey) -> Result<(), VolumeError> {
        let path = self.path(name).join("read-key");
        Ok(dir::create_atomically(&path, read_key_text(key).as_bytes())?)
    }

    /// The volume is not encrypted any more.
    pub(crate) fn forget_read_key(&self, name: &str) -> Result<(), VolumeError> {
        self.known(name)?;
        let _changing = self.lock();
        let path = self.path(name).join("read-key");
        match fs::remove_file(&path).and_then(|()| dir::sync_parent(&path)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(io_error(&path)(error)),
            _ => Ok(()),
        }
    }

    /// The volume, which must be there, is published from `source` from now on.
    pub(crate) fn set_source(&self, name: &str, source: &Path) -> Result<(), VolumeError> {
        let _changing = self.lock();
        let info = self.unmoved(name)?;
        self.write_source(name, info, source)
    }

    /// Whether mounts write the volume: it is published from no directory.
    pub(super) fn is_mounted(&self, name: &str) -> Result<bool, VolumeError> {
        Ok(self.info(name)?.source.is_none())
    }

    /// The manifest of a volume, if it has been published.
    pub(crate) fn manifest(&self, name: &str) -> Result<Option<Manifest>, VolumeError> {
        Ok(Manifest::open(&self.path(name).join("manifest"))?)
    }

    /// When a volume's blocks were last kept alive. A damaged record counts as never.
    pub(crate) fn kept(&self, name: &str) -> Kept {
        let path = self.path(name).join("kept");
        let bytes = dir::read_small(&path).ok().flatten().unwrap_or_default();
        minicbor::decode(&bytes).unwrap_or_default()
    }

    /// Records `kept`, unless another root has been published since it began. Of a newer root of
    /// a mount, the blocks that were not renewed with the former have been put since.
    pub(crate) fn set_kept(&self, name: &str, kept: &Kept) -> Result<(), VolumeError> {
        let _changing = self.lock();
        let Some(present) = self.manifest(name)? else { return Ok(()) };
        if present.root().version == kept.root_version {
            return self.write_kept(name, kept);
        }
        if !self.is_mounted(name)? || kept.pass.is_some() || kept.trouble.is_some() {
            return Ok(());
        }
        let newer = self.kept(name);
        let refreshed_unix_secs = kept.refreshed_unix_secs.max(newer.refreshed_unix_secs);
        self.write_kept(name, &Kept { refreshed_unix_secs, pass: None, ..newer })
    }

    /// Appends hashes (32 bytes each) to the manifest that `session` is writing.
    pub(crate) fn keep_add(
        &self,
        name: &str,
        session: u64,
        offset: u64,
        hashes: &[u8],
    ) -> Result<(), VolumeError> {
        self.known(name)?;
        let _changing = self.lock();
        PartialManifest::at(&self.path(name), session).add(offset, hashes)
    }

    /// Puts what `session` wrote, `count` hashes, in place of the volume's manifest.
    pub(crate) fn keep_commit(
        &self,
        name: &str,
        session: u64,
        count: u64,
        root: &SignedBlock,
        now_unix_secs: u64,
    ) -> Result<(), VolumeError> {
        let _changing = self.lock();
        self.commit(name, session, count, root, now_unix_secs)
    }

    /// The blocks of the manifest have all been put or renewed for so long, and are renewed for so long from now on.
    pub(crate) fn set_lease(
        &self,
        name: &str,
        lease: Duration,
        now_unix_secs: u64,
    ) -> Result<(), VolumeError> {
        let _changing = self.lock();
        let info = self.info(name)?;
        let lease_secs = Some(lease.min(MAX_LEASE).max(MIN_VOLUME_LEASE).as_secs());
        if info.lease_secs == lease_secs {
            return Ok(());
        }
        self.write_info(name, &Info { lease_secs, ..info })?;
        let kept = self.kept(name);
        if kept.refreshed_unix_secs == 0 {
            return Ok(());
        }
        // All that is there gets the new lease, the root too.
        let began_unix_secs = now_unix_secs;
        let pass = Some(RenewalPass { began_unix_secs, ..RenewalPass::default() });
        self.write_kept(name, &Kept { pass, ..kept })
    }

    /// How long the blocks of a volume are kept at a time, if that was chosen.
    pub(crate) fn lease(&self, name: &str) -> Result<Option<Duration>, VolumeError> {
        Ok(self.info(name)?.lease_secs.map(Duration::from_secs))
    }

    /// Puts a list that this node has made in place of the volume's manifest, unless the volume
    /// has been unpublished meanwhile.
    pub(crate) fn adopt(
        &self,
        name: &str,
        session: u64,
        root: &SignedBlock,
        blocks: &[BlockHash],
        now_unix_secs: u64,
    ) -> Result<(), VolumeError> {
        let mut offset = 0;
        for hashes in blocks.chunks(ADOPTED_AT_ONCE) {
            self.keep_add(name, session, offset, &join_hashes(hashes.iter()))?;
            offset += hashes.len() as u64;
        }
        let _changing = self.lock();
        if self.manifest(name)?.is_none() {
            PartialManifest::at(&self.path(name), session).discard();
            return Err(VolumeError::Unpublished { name: name.to_owned() });
        }
        self.commit(name, session, offset, root, now_unix_secs)
    }

    fn commit(
        &self,
        name: &str,
        session: u64,
        count: u64,
        root: &SignedBlock,
        now_unix_secs: u64,
    ) -> Result<(), VolumeError> {
        let key = self.key(name)?;
        if root.key() != key.volume_id().root_key() {
            return Err(VolumeError::WrongRoot { why: "it is signed by another key".into() });
        }
        let path = self.path(name).join("manifest");
        if let Some(present) = Manifest::open(&path)? {
            let held = present.root().version;
            if present.root() == root {
                PartialManifest::at(&self.path(name), session).discard();
                return Ok(()); // the answer to the first attempt was lost
            }
            if held > root.version {
                return Err(VolumeError::Superseded { offered: root.version, held });
            }
        }
        PartialManifest::at(&self.path(name), session).commit(count, root, &path)?;
        let mut kept = Kept {
            refreshed_unix_secs: now_unix_secs,
            root_version: root.version,
            ..Kept::default()
        };
        // A publish has renewed what it took over. A mount has only put what is new: the renewal
        // is due when it was, or now if this node renewed nothing of the volume yet.
        if self.is_mounted(name)? {
            let before = self.kept(name);
            let is_first = before.refreshed_unix_secs == 0;
            if !is_first {
                kept.refreshed_unix_secs = before.refreshed_unix_secs;
            }
            if before.pass.is_some() || (is_first && count > 0) {
                let began_unix_secs = now_unix_secs;
                kept.pass = Some(RenewalPass { began_unix_secs, ..RenewalPass::default() });
            }
        }
        self.write_kept(name, &kept)
    }

    /// Stops keeping a volume alive: its blocks go when their leases run out. Its key
    /// stays, so that it can be published again under the same address.
    pub(crate) fn unpublish(&self, name: &str) -> Result<(), VolumeError> {
        self.known(name)?;
        let _changing = self.lock();
        let path = self.path(name).join("manifest");
        match fs::remove_file(&path).and_then(|()| dir::sync_parent(&path)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(VolumeError::Unpublished { name: name.to_owned() })
            }
            result => result.map_err(io_error(&path)),
        }
    }

    fn write_kept(&self, name: &str, kept: &Kept) -> Result<(), VolumeError> {
        let bytes = minicbor::to_vec(kept).expect("a vector takes all that is written");
        Ok(dir::write_atomically(&self.path(name).join("kept"), &bytes)?)
    }

    /// Makes `source` the volume's directory, or says which one is.
    fn bind_source(&self, name: &str, source: Option<&Path>) -> Result<(), VolumeError> {
        let Some(source) = source else { return Ok(()) };
        let info = self.info(name)?;
        match info.source.clone().map(path_from_bytes) {
            Some(present) if present == source => Ok(()),
            Some(present) => Err(VolumeError::NameTaken {
                name: name.into(),
                source_dir: present.display().to_string(),
            }),
            None => self.write_source(name, info, source),
        }
    }

    fn write_source(&self, name: &str, info: Info, source: &Path) -> Result<(), VolumeError> {
        self.write_info(name, &Info { source: Some(path_to_bytes(source)), ..info })
    }

    pub(super) fn write_info(&self, name: &str, info: &Info) -> Result<(), VolumeError> {
        Ok(dir::write_atomically(&self.path(name).join("info"), &info.encode())?)
    }

    /// What is known of a volume, which may be written from here.
    fn unmoved(&self, name: &str) -> Result<Info, VolumeError> {
        let info = self.info(name)?;
        match info.move_token {
            Some(_) => Err(VolumeError::Moved { name: name.into() }),
            None => Ok(info),
        }
    }

    pub(super) fn create(
        &self,
        name: &str,
        key: &SecretKey,
        read_key: Option<&ReadKey>,
        source: Option<&Path>,
        now_unix_secs: u64,
    ) -> Result<(), VolumeError> {
        let made = self.dir.join(format!(".new-{name}"));
        let info = Info {
            source: source.map(path_to_bytes),
            created_unix_secs: now_unix_secs,
            move_token: None,
            lease_secs: None,
        };
        dir::make_private_dir(&made)?;
        dir::write_atomically(&made.join("key"), &key.seed())?;
        if let Some(key) = read_key {
            dir::write_atomically(&made.join("read-key"), read_key_text(key).as_bytes())?;
        }
        dir::write_atomically(&made.join("info"), &info.encode())?;
        let path = self.path(name);
        fs::rename(&made, &path)
            .and_then(|()| dir::sync_parent(&path))
            .map_err(DirError::io("cannot create", path))?;
        Ok(())
    }

    pub(super) fn info(&self, name: &str) -> Result<Info, VolumeError> {
        self.known(name)?;
        let path = self.path(name).join("info");
        let bytes = dir::read_small(&path)?.unwrap_or_default();
        Ok(minicbor::decode(&bytes).map_err(|error| DirError::damaged(path, error))?)
    }

    pub(super) fn known(&self, name: &str) -> Result<(), VolumeError> {
        check_name(name)?;
        if self.path(name).join("key").exists() {
            return Ok(());
        }
        Err(VolumeError::Unknown { name: name.into() })
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

fn read_key_text(key: &ReadKey) -> String {
    format!("{}\n", key.to_text())
}

impl Info {
    fn encode(&self) -> Vec<u8> {
        minicbor::to_vec(self).expect("a vector takes all that is written")
    }
}

/// When the leases of a volume refreshed at `refreshed_unix_secs` end.
pub(crate) fn lease_end(refreshed_unix_secs: u64, lease: Duration) -> u64 {
    if refreshed_unix_secs == 0 { 0 } else { refreshed_unix_secs.saturating_add(lease.as_secs()) }
}

/// The name of a volume published from `source` when none is given: the directory's.
pub(crate) fn name_of(source: &Path) -> Result<String, VolumeError> {
    let bad = |why: &str| VolumeError::BadName {
        name: source.display().to_string(),
        why: why.to_owned(),
    };
    let name = source.file_name().ok_or_else(|| bad("the directory has no name of its own"))?;
    let name = name.to_str().ok_or_else(|| bad("it is not UTF-8"))?;
    check_name(name)?;
    Ok(name.to_owned())
}

/// Checks that a name can be a volume's: it is a file's name in the node's directory.
///
/// # Errors
/// If it cannot.
pub fn check_name(name: &str) -> Result<(), VolumeError> {
    let why = if name.is_empty() {
        "it is empty"
    } else if name.len() > MAX_NAME_BYTES {
        "it is longer than 100 bytes"
    } else if name.starts_with('.') {
        "it begins with a dot"
    } else if name.contains('/') || name.chars().any(char::is_control) {
        "it has a slash or a control character"
    } else {
        return Ok(());
    };
    Err(VolumeError::BadName { name: name.into(), why: why.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volumes() -> (Volumes, NodeDir, tempfile::TempDir) {
        let temp = tempfile::tempdir().expect("temp");
        let dir = NodeDir::at(temp.path());
        dir.prepare().expect("fresh");
        (Volumes::open(&dir).expect("open"), dir, temp)
    }

    #[test]
    fn a_name_belongs_to_the_directory_it_was_made_for() {
        let (volumes, _, _temp) = volumes();
        let (a, b) = (Path::new("/srv/a"), Path::new("/srv/b"));
        let (key, is_new) = volumes.open_or_create("docs", Some(a), 1).expect("create");
        assert!(is_new);
        let (again, is_new) = volumes.open_or_create("docs", Some(a), 2).expect("open");
        assert!(!is_new && again.seed() == key.seed());
        let error = volumes.open_or_create("docs", Some(b), 3).map(|_| ()).expect_err("taken");
        assert!(error.to_string().contains("/srv/a"), "{error}");
        assert_eq!(volumes.names().expect("list"), ["docs"]);
    }

    #[test]
    fn a_volume_made_without_a_directory_takes_the_first() {
        let (volumes, _, _temp) = volumes();
        volumes.open_or_create("docs", None, 1).expect("create");
        volumes.open_or_create("docs", Some(Path::new("/srv/a")), 1).expect("takes it");
        assert_eq!(volumes.info("docs").expect("read").source, Some(b"/srv/a".to_vec()));
    }

    #[test]
    fn a_read_key_stays_until_it_is_forgotten() {
        let (volumes, dir, _temp) = volumes();
        assert!(matches!(volumes.make_read_key("docs"), Err(VolumeError::Unknown { .. })));
        volumes.open_or_create("docs", None, 1).expect("create");
        assert_eq!(volumes.read_key("docs"), Ok(None));
        let key = volumes.make_read_key("docs").expect("make");
        let reopened = Volumes::open(&dir).expect("open");
        assert_eq!(reopened.make_read_key("docs"), Ok(key.clone()), "it is made once");
        assert_eq!(reopened.read_key("docs"), Ok(Some(key.clone())));
        volumes.open_or_create("other", None, 1).expect("create");
        assert_ne!(volumes.make_read_key("other"), Ok(key));
        let path = dir.volumes().join("docs/read-key");
        let text = fs::read_to_string(&path).expect("written");
        fs::write(&path, text.replace(&text[5..9], "aaaa")).expect("damages");
        let error = volumes.read_key("docs").expect_err("damaged");
        assert!(error.to_string().contains("read-key"), "{error}");
        volumes.forget_read_key("docs").expect("forget");
        volumes.forget_read_key("docs").expect("again");
        assert_eq!(volumes.read_key("docs"), Ok(None));
    }

    #[test]
    fn names_that_are_paths_or_hidden_are_refused() {
        let (volumes, _, _temp) = volumes();
        let long = "n".repeat(MAX_NAME_BYTES + 1);
        for name in ["", ".", "..", ".new-x", "a/b", "../x", "a\0b", "a\nb", &long] {
            let refused = volumes.open_or_create(name, None, 1);
            assert!(matches!(refused, Err(VolumeError::BadName { .. })), "{name:?}");
            assert!(matches!(volumes.key(name), Err(VolumeError::BadName { .. })), "{name:?}");
            let add = volumes.keep_add(name, 1, 0, &[]);
            assert!(matches!(add, Err(VolumeError::BadName { .. })), "{name:?}");
        }
        volumes.open_or_create("Fotos von früher (1)", None, 1).expect("a fine name");
    }

    #[test]
    fn a_volume_is_named_after_its_directory() {
        assert_eq!(name_of(Path::new("/usr/include")).as_deref(), Ok("include"));
        assert!(name_of(Path::new("/")).is_err());
        assert!(name_of(Path::new("/home/a/.config")).is_err());
        assert!(name_of(OsStr::from_bytes(b"/srv/\xff").as_ref()).is_err());
    }

    #[test]
    fn a_volume_half_made_by_a_crash_is_made_anew() {
        let (volumes, dir, _temp) = volumes();
        let half = dir.volumes().join(".new-docs");
        fs::create_dir(&half).expect("mkdir");
        fs::write(half.join("key"), b"half").expect("write");
        drop(volumes);
        let volumes = Volumes::open(&dir).expect("open");
        assert!(!half.exists());
        assert_eq!(volumes.names().expect("list"), Vec::<String>::new());
        volumes.open_or_create("docs", None, 1).expect("create");
    }

    /// A crash may leave any prefix of a session's file, under any state of `manifest`:
    /// until the rename, the former version is the one that is kept.
    #[test]
    fn a_crash_before_the_commit_keeps_the_former_manifest() {
        let (volumes, dir, _temp) = volumes();
        let (key, _) = volumes.open_or_create("docs", Some(Path::new("/docs")), 1).expect("create");
        let root = |version| SignedBlock::sign(&key, b"", version, b"");
        volumes.keep_add("docs", 1, 0, &[[1; 32], [2; 32]].concat()).expect("add");
        volumes.keep_commit("docs", 1, 2, &root(1), 5).expect("commit");
        volumes.keep_add("docs", 2, 0, &[[3; 32], [4; 32], [5; 32]].concat()).expect("add");
        let session = dir.volumes().join("docs").join("manifest.0000000000000002");
        let whole = fs::read(&session).expect("written");
        for len in [0, 5, 8, 30, whole.len()] {
            fs::write(&session, &whole[..len]).expect("as after a crash");
            let reopened = Volumes::open(&dir).expect("open");
            let kept = reopened.manifest("docs").expect("open").expect("is there");
            kept.check().expect("whole");
            assert_eq!((kept.count(), kept.root().version), (2, 1), "{len}");
            let has = len.saturating_sub(8) as u64 / 32;
            let commit = reopened.keep_commit("docs", 2, 3, &root(2), 6);
            if has < 3 {
                assert_eq!(commit, Err(VolumeError::Gap { has, expected: 3 }), "{len}");
            } else {
                assert_eq!(commit, Ok(()));
            }
        }
        let kept = volumes.manifest("docs").expect("open").expect("is there");
        assert_eq!((kept.count(), kept.root().version), (3, 2));
        assert_eq!(volumes.kept("docs").refreshed_unix_secs, 6);
    }

    #[test]
    fn a_refresh_of_an_older_version_is_not_recorded() {
        let (volumes, _, _temp) = volumes();
        let (key, _) = volumes.open_or_create("docs", None, 1).expect("create");
        for (session, version) in [(1, 1), (2, 2)] {
            let root = SignedBlock::sign(&key, b"", version, b"");
            volumes.keep_commit("docs", session, 0, &root, 100 + version).expect("commit");
        }
        let stale = Kept { root_version: 1, lost_blocks: 9, ..Kept::default() };
        volumes.set_kept("docs", &stale).expect("ignored");
        assert_eq!(volumes.kept("docs").lost_blocks, 0);
        let present = Kept { root_version: 2, lost_blocks: 9, ..Kept::default() };
        volumes.set_kept("docs", &present).expect("recorded");
        assert_eq!(volumes.kept("docs").lost_blocks, 9);
    }
}
