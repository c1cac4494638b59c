//! What only the holder of the administrator's key can do: replace the network's secret,
//! and with it remove nodes.

use std::sync::Arc;
use std::time::Duration;

use atoll_key::{PeerId, SecretKey};
use atoll_net::{Members, TcpTransport};

use super::record::{Content, MAX_REMOVED, Record};
use super::{MAX_OVERLAP, MIN_OVERLAP, Membership};
use crate::dir::{self, DirError, NodeDir};
use crate::network::random_seed;
use crate::status::Rotated;

/// A clock that shows less has never been set: 2026-01-01. Members would count as met after
/// such a record was issued, and lose each other.
const EARLIEST_UNIX_MS: u64 = 1_767_225_600_000;

impl Membership {
    /// Replaces the secret and removes nodes. The new record is on disk, and with the
    /// members that are connected, when this resolves.
    ///
    /// # Errors
    /// For people: this node may not, or the wish makes no sense.
    pub(crate) async fn rotate(
        self: Arc<Self>,
        transport: Arc<TcpTransport>,
        remove: Vec<PeerId>,
        overlap: Duration,
    ) -> Result<Rotated, String> {
        let (members, removed) = (self.clone(), remove.len() as u64);
        let signed = tokio::task::spawn_blocking(move || members.issue(&remove, overlap));
        let former_until_unix_ms = signed.await.map_err(|error| error.to_string())??;
        self.enforce(&transport);
        let (told, connected) = self.tell_all(&transport).await;
        Ok(Rotated {
            epoch: self.network().epoch,
            removed,
            told: told as u64,
            connected: connected as u64,
            former_until_unix_secs: former_until_unix_ms / 1000,
        })
    }

    /// Signs a record and takes it over; until when the former secret is good.
    pub(super) fn issue(&self, remove: &[PeerId], overlap: Duration) -> Result<u64, String> {
        let admin = self.admin_key()?;
        if !(MIN_OVERLAP..=MAX_OVERLAP).contains(&overlap) {
            return Err(format!(
                "the former secret can stay good for {} seconds to {} days",
                MIN_OVERLAP.as_secs(),
                MAX_OVERLAP.as_secs() / 86_400
            ));
        }
        if remove.contains(&self.me) {
            return Err("this node cannot remove itself: stop it and remove its directory".into());
        }
        if remove.len() > MAX_REMOVED {
            return Err(format!("at most {MAX_REMOVED} nodes can be removed"));
        }
        let now = self.env.unix_ms();
        let last = self.lock().record.as_ref().map_or(EARLIEST_UNIX_MS, |r| r.issued_unix_ms);
        if now < last {
            return Err("the clock of this machine is behind: set it first, because members are \
                        told by when they were met"
                .into());
        }
        let before = self.lock().record.as_ref().map(|r| r.removed.clone()).unwrap_or_default();
        let content = Content {
            epoch: self.network().epoch + 1,
            issued_unix_ms: now,
            overlap,
            secret: random_seed(),
            former: self.secrets().current,
            removed: joined(before, remove),
        };
        let record = Record::sign(&admin, content);
        self.take_over(record.bytes())?;
        Ok(record.former_until_unix_ms)
    }

    fn admin_key(&self) -> Result<SecretKey, String> {
        let path = self.dir.admin_key();
        let key = read_key(&path).map_err(|error| error.to_string())?;
        match key.filter(|key| key.public() == self.network.admin) {
            Some(key) => Ok(key),
            None => Err(format!(
                "only the network's administrator can do this, and this node does not hold its \
                 key ({}); run it on the node that made the network",
                path.display()
            )),
        }
    }
}

/// The nodes removed before and now, each once; beyond [`MAX_REMOVED`] the earliest are
/// forgotten.
fn joined(mut removed: Vec<PeerId>, now: &[PeerId]) -> Vec<PeerId> {
    removed.retain(|id| !now.contains(id));
    for id in now {
        if !removed.contains(id) {
            removed.push(*id);
        }
    }
    removed.split_off(removed.len().saturating_sub(MAX_REMOVED))
}

fn read_key(path: &std::path::Path) -> Result<Option<SecretKey>, DirError> {
    let Some(bytes) = dir::read_secret(path)? else { return Ok(None) };
    let seed = bytes.as_slice().try_into().map_err(|_| {
        DirError::damaged(path, format!("it has {} bytes; a key has 32", bytes.len()))
    })?;
    Ok(Some(SecretKey::from_seed(seed)))
}

/// The administrator's key of a network that this node makes; made unless it is there.
pub(crate) fn open_admin_key(dir: &NodeDir) -> Result<SecretKey, DirError> {
    let path = dir.admin_key();
    if let Some(key) = read_key(&path)? {
        return Ok(key);
    }
    let seed = random_seed();
    dir::create_atomically(&path, &seed)?;
    Ok(SecretKey::from_seed(&seed))
}
