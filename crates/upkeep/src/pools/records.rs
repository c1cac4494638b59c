//! Records of the pools of this node: each pool has a file, `DIR/pools/NAME.json`, which names its directory and, if it has several
//! members, who they are.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use atoll_key::PeerId;
use atoll_net::Peer;
use atoll_node::{check_name, make_private_dir};
use atoll_pool::PoolId;
use data_encoding::HEXLOWER;
use serde::{Deserialize, Serialize};

/// The record of a pool.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct PoolRecord {
    /// The pool's directory on this machine.
    pub dir: PathBuf,
    /// The pool's number ([`PoolId`]), in hexadecimal digits.
    pub pool: String,
    /// On how many machines each file is to be when the pool has several; none for the usual number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copies: Option<u8>,
    /// How many of them must have everything so that changes are taken, when the pool has several machines; none for 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_copies: Option<u8>,
    /// None in a pool of one, which needs no node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<GroupRecord>,
}

/// What a node keeps of a pool of several beside the pool's directory.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct GroupRecord {
    /// Directories down to this level are distributed.
    pub level: u8,
    /// Who knows it may join through this node: 16 bytes in hexadecimal digits. Secret.
    pub token: String,
    /// Until this node belongs to the pool: how it comes to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub joins: Option<JoiningRecord>,
    /// The directory is being given back: the node lets go of it.
    #[serde(default)]
    pub is_leaving: bool,
    /// This node has no files of the pool: its directory is that of its votes (`votes.rs`).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_without_files: bool,
    /// Somebody works with the directory: the node lets go of it meanwhile.
    #[serde(default)]
    pub is_set_down: bool,
}

/// How a node becomes a member.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct JoiningRecord {
    /// The member that gave the code.
    pub member: PeerRecord,
    /// That member's token. Secret.
    pub token: String,
}

/// A node, as text.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct PeerRecord {
    /// Its public key, in hexadecimal digits.
    pub key: String,
    /// The address at which the node listens.
    pub addr: SocketAddr,
}

impl PeerRecord {
    /// The record of a node.
    pub fn of(peer: Peer) -> PeerRecord {
        PeerRecord { key: hex(&peer.id.0), addr: peer.addr }
    }

    /// The node; none if its key is none.
    pub fn peer(&self) -> Option<Peer> {
        Some(Peer { id: PeerId(from_hex(&self.key)?), addr: self.addr })
    }
}

impl PoolRecord {
    /// The pool's number; none if the record is damaged.
    pub fn pool_id(&self) -> Option<PoolId> {
        from_hex(&self.pool)
    }
}

impl GroupRecord {
    /// The secret; none if the record is damaged.
    pub fn token(&self) -> Option<[u8; 16]> {
        from_hex(&self.token)
    }
}

impl JoiningRecord {
    /// The secret; none if the record is damaged.
    pub fn token(&self) -> Option<[u8; 16]> {
        from_hex(&self.token)
    }
}

fn hex(bytes: &[u8]) -> String {
    HEXLOWER.encode(bytes)
}

fn from_hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    HEXLOWER.decode(text.as_bytes()).ok()?.try_into().ok()
}

fn place(dir: &Path) -> PathBuf {
    dir.join("pools")
}

fn path_of(dir: &Path, name: &str) -> PathBuf {
    place(dir).join(format!("{name}.json"))
}

/// The pool of a name, if this node (whose directory is `dir`) has one.
///
/// # Errors
/// If its record cannot be read.
pub fn find(dir: &Path, name: &str) -> io::Result<Option<PoolRecord>> {
    if check_name(name).is_err() {
        return Ok(None);
    }
    let path = path_of(dir, name);
    let bytes = match fs::read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        bytes => bytes?,
    };
    serde_json::from_slice(&bytes).map(Some).map_err(|error| {
        io::Error::new(io::ErrorKind::InvalidData, format!("{}: {error}", path.display()))
    })
}

/// The names of all pools, sorted.
///
/// # Errors
/// If they cannot be listed.
pub fn all(dir: &Path) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(place(dir)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let name = entry?.file_name();
        let name = name.to_str().and_then(|name| name.strip_suffix(".json"));
        names.extend(name.filter(|name| check_name(name).is_ok()).map(str::to_owned));
    }
    names.sort_unstable();
    Ok(names)
}

/// The name of another pool than `name` with this number, if this node has one.
///
/// # Errors
/// If the records cannot be read.
pub fn other_name(dir: &Path, name: &str, pool: &str) -> io::Result<Option<String>> {
    for other in all(dir)? {
        if other != name && find(dir, &other)?.is_some_and(|record| record.pool == pool) {
            return Ok(Some(other));
        }
    }
    Ok(None)
}

/// Makes the directory of the records.
///
/// # Errors
/// If it cannot be made, or is not private.
pub fn make_place(dir: &Path) -> io::Result<()> {
    make_private_dir(&place(dir)).map_err(|error| io::Error::other(error.to_string()))
}

/// Writes a new record; one that exists is [`io::ErrorKind::AlreadyExists`].
///
/// # Errors
/// If it cannot be written.
pub fn add(dir: &Path, name: &str, record: &PoolRecord) -> io::Result<()> {
    make_place(dir)?;
    let beside = write_beside(dir, name, record)?;
    let linked = fs::hard_link(&beside, path_of(dir, name));
    let _ = fs::remove_file(&beside);
    linked
}

/// Writes a record again.
///
/// # Errors
/// If it cannot be written.
pub fn replace(dir: &Path, name: &str, record: &PoolRecord) -> io::Result<()> {
    let beside = write_beside(dir, name, record)?;
    fs::rename(beside, path_of(dir, name))?;
    fs::File::open(place(dir))?.sync_all()
}

fn write_beside(dir: &Path, name: &str, record: &PoolRecord) -> io::Result<PathBuf> {
    let bytes = serde_json::to_vec_pretty(record)?;
    let beside = place(dir).join(format!("{name}.new"));
    fs::write(&beside, bytes)?;
    fs::File::open(&beside)?.sync_all()?;
    Ok(beside)
}

/// Removes a record.
///
/// # Errors
/// If it cannot be removed.
pub fn remove(dir: &Path, name: &str) -> io::Result<()> {
    fs::remove_file(path_of(dir, name))?;
    match fs::remove_dir_all(super::votes_path(dir, name)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    match fs::remove_file(groups_path(dir, name)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn groups_path(dir: &Path, name: &str) -> PathBuf {
    place(dir).join(format!("{name}.groups"))
}

/// The groups of a pool whose directories this node has made.
pub(super) fn groups_made(dir: &Path, name: &str) -> io::Result<BTreeSet<u8>> {
    let text = match fs::read_to_string(groups_path(dir, name)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
        text => text?,
    };
    let damaged = |_| io::Error::new(io::ErrorKind::InvalidData, "the list of groups is damaged");
    text.lines().map(|line| line.parse().map_err(damaged)).collect()
}

/// Keeps that, durably.
pub(super) fn keep_groups_made(dir: &Path, name: &str, made: &BTreeSet<u8>) -> io::Result<()> {
    let beside = place(dir).join(format!("{name}.groups.new"));
    fs::write(&beside, made.iter().map(|group| format!("{group}\n")).collect::<String>())?;
    fs::File::open(&beside)?.sync_all()?;
    fs::rename(beside, groups_path(dir, name))?;
    fs::File::open(place(dir))?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_read_back_and_an_older_one_is_a_pool_of_one() {
        let temp = tempfile::tempdir().unwrap();
        let peer = Peer { id: PeerId([0xab; 32]), addr: ([127, 0, 0, 1], 9).into() };
        let group = GroupRecord {
            level: 1,
            token: hex(&[7; 16]),
            joins: Some(JoiningRecord { member: PeerRecord::of(peer), token: hex(&[8; 16]) }),
            is_leaving: false,
            is_without_files: false,
            is_set_down: false,
        };
        let record = PoolRecord {
            dir: "/srv/home".into(),
            pool: hex(&[1; 16]),
            copies: None,
            min_copies: None,
            group: Some(group),
        };
        add(temp.path(), "home", &record).unwrap();
        assert_eq!(find(temp.path(), "home").unwrap(), Some(record.clone()));
        assert_eq!(
            add(temp.path(), "home", &record).unwrap_err().kind(),
            io::ErrorKind::AlreadyExists
        );
        assert_eq!(record.pool_id(), Some([1; 16]));
        let joins = record.group.unwrap().joins.unwrap();
        assert_eq!((joins.member.peer(), joins.token()), (Some(peer), Some([8; 16])));
        let old = r#"{"dir": "/srv/old", "pool": "00112233445566778899aabbccddeeff"}"#;
        fs::write(path_of(temp.path(), "old"), old).unwrap();
        assert_eq!(find(temp.path(), "old").unwrap().unwrap().group, None);
        assert_eq!(all(temp.path()).unwrap(), ["home", "old"]);
        assert_eq!(find(temp.path(), "none").unwrap(), None);
        let other = |name| other_name(temp.path(), name, &hex(&[1; 16])).unwrap();
        assert_eq!((other("old").as_deref(), other("home")), (Some("home"), None));
        fs::write(path_of(temp.path(), "bad"), "{").unwrap();
        assert!(find(temp.path(), "bad").unwrap_err().to_string().contains("bad.json"));
    }
}
