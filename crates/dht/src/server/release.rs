//! `RELEASE`: those who may write what blocks belong to say that they do not need them any more.
//!
//! What is held must say itself what it belongs to: the caller is not believed. Of an inode's content leases end
//! then, no earlier than two days from now; a volume's content is removed some minutes later, unless it is put or renewed
//! (`key::kinds::ReleaseEffect`).

use std::sync::Arc;

use atoll_key::kinds::{Release, ReleaseEffect};
use atoll_key::{BlockKind, Key};
use atoll_net::{Peer, Refusal};
use atoll_store::StoreError;
use bytes::Bytes;

use super::Handle;
use crate::diversion::follow;
use crate::rpc::{Answered, ReleaseBlocks, ReleaseReply, ReleaseStatus};
use crate::server::Server;

/// A refusal's code for a release that was not signed by those who may release the blocks, or not now.
pub(crate) const BAD_RELEASE: u16 = 103;

impl Handle<ReleaseBlocks> for Arc<Server> {
    async fn handle(
        &self,
        _: Peer,
        ReleaseBlocks { release, is_pointed }: ReleaseBlocks,
        _: Vec<Bytes>,
    ) -> Result<Answered<ReleaseBlocks>, Refusal> {
        let bad = |why: String| Refusal::new(BAD_RELEASE, why);
        release.admit(self.env.unix_ms()).map_err(|error| bad(error.to_string()))?;
        release.verify().map_err(|error| bad(error.to_string()))?;
        let keys: Vec<Key> = release.keys().collect();
        let mut statuses = match release.effect() {
            ReleaseEffect::EndsAfter { lease_secs } => {
                shorten_here(self, &release, &keys, lease_secs).await?
            }
            ReleaseEffect::Removed { as_of_unix_secs } => {
                remove_here(self, &release, &keys, as_of_unix_secs).await?
            }
        };
        if !is_pointed {
            let before = statuses.clone();
            follow::release_blocks(self, &release, &keys, &mut statuses).await;
            note_elsewhere(self, &release, &keys, &before, &statuses).await?;
        }
        Ok((ReleaseReply { statuses }, Vec::new()))
    }
}

fn internal(error: StoreError) -> Refusal {
    Refusal::new(Refusal::INTERNAL, error.to_string())
}

/// Has leases of blocks in this node's store end after some days.
async fn shorten_here(
    server: &Server,
    release: &Release,
    keys: &[Key],
    lease_secs: u32,
) -> Result<Vec<ReleaseStatus>, Refusal> {
    let expires_unix_secs = server.expiry(u64::from(lease_secs));
    let mut statuses = Vec::with_capacity(keys.len());
    for key in keys {
        let is_ending = match server.store.info(key).map_err(internal)? {
            None => Some(ReleaseStatus::Lacking),
            Some(held) if held.expires_unix_secs <= expires_unix_secs => {
                Some(ReleaseStatus::Released)
            }
            Some(_) => None,
        };
        let status = match is_ending {
            Some(status) => status,
            None => covered(server, release, key).await.0,
        };
        if is_ending.is_none() && status == ReleaseStatus::Released {
            server.store.shorten(&[*key], expires_unix_secs).map_err(internal)?;
        }
        statuses.push(status);
    }
    Ok(statuses)
}

/// Has blocks in this node's store removed, unless they were put or renewed since.
async fn remove_here(
    server: &Server,
    release: &Release,
    keys: &[Key],
    as_of_unix_secs: u64,
) -> Result<Vec<ReleaseStatus>, Refusal> {
    let (mut statuses, mut released) = (Vec::with_capacity(keys.len()), Vec::new());
    for key in keys {
        let status = match server.releases.is_put_since(key, as_of_unix_secs) {
            true if server.known(key).is_some() => ReleaseStatus::PutSince,
            true => ReleaseStatus::Lacking,
            false => {
                let (status, kind) = covered(server, release, key).await;
                let is_released = status == ReleaseStatus::Released;
                released.extend(kind.filter(|_| is_released).map(|kind| (*key, kind)));
                status
            }
        };
        statuses.push(status);
    }
    record(server, released, as_of_unix_secs).await?;
    Ok(statuses)
}

/// Records that blocks were released.
async fn record(
    server: &Server,
    released: Vec<(Key, BlockKind)>,
    as_of_unix_secs: u64,
) -> Result<(), Refusal> {
    if released.is_empty() {
        return Ok(());
    }
    let remembered_until = server.expiry(server.config.lease.as_secs());
    let recorded = server.releases.record(released, as_of_unix_secs, remembered_until).await;
    recorded.map_err(internal)
}

/// Records what holders of this node's diverted copies have released: its pointers to them are forgotten, and other
/// copies not taken.
async fn note_elsewhere(
    server: &Server,
    release: &Release,
    keys: &[Key],
    before: &[ReleaseStatus],
    after: &[ReleaseStatus],
) -> Result<(), Refusal> {
    let ReleaseEffect::Removed { as_of_unix_secs } = release.effect() else { return Ok(()) };
    let changed = keys.iter().zip(before.iter().zip(after));
    let released = changed.filter(|(_, (before, after))| {
        **before == ReleaseStatus::Lacking && **after == ReleaseStatus::Released
    });
    let pointed = released.filter_map(|(key, _)| Some((*key, server.pointers.pointed(key)?.kind)));
    record(server, pointed.collect(), as_of_unix_secs).await
}

/// Whether a block in this node's store is one that the release may release; its kind, if it is here.
async fn covered(
    server: &Server,
    release: &Release,
    key: &Key,
) -> (ReleaseStatus, Option<BlockKind>) {
    let Some(held) = server.read(key).await else { return (ReleaseStatus::Lacking, None) };
    let status = match release.covers(held.info.kind, &held.bytes) {
        true => ReleaseStatus::Released,
        false => ReleaseStatus::Refused,
    };
    (status, Some(held.info.kind))
}
