//! `RELEASE`: a writer of an inode has leases of blocks of its content end sooner.
//!
//! What is held must say itself that it belongs to that inode: the caller is not believed. Nothing is
//! removed, and leases end no earlier than two days from now (`key::kinds::certified::Release`).

use std::sync::Arc;

use atoll_key::Key;
use atoll_key::kinds::certified::Release;
use atoll_net::{Peer, Refusal};
use bytes::Bytes;

use super::Handle;
use crate::diversion::follow;
use crate::rpc::{Answered, ReleaseBlocks, ReleaseReply, ReleaseStatus};
use crate::server::Server;

/// A refusal's code for a release that was not signed by a writer of the inode, or not now.
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
        let mut statuses = Vec::with_capacity(keys.len());
        for key in &keys {
            statuses.push(release_here(self, &release, key).await?);
        }
        if !is_pointed {
            follow::release_blocks(self, &release, &keys, &mut statuses).await;
        }
        Ok((ReleaseReply { statuses }, Vec::new()))
    }
}

/// Has the lease of a block in this node's store end when the release says.
async fn release_here(
    server: &Server,
    release: &Release,
    key: &Key,
) -> Result<ReleaseStatus, Refusal> {
    let internal =
        |error: atoll_store::StoreError| Refusal::new(Refusal::INTERNAL, error.to_string());
    let expires_unix_secs = server.expiry(u64::from(release.lease_secs));
    match server.store.info(key).map_err(internal)? {
        None => return Ok(ReleaseStatus::Lacking),
        Some(held) if held.expires_unix_secs <= expires_unix_secs => {
            return Ok(ReleaseStatus::Released);
        }
        Some(_) => {}
    }
    let Some(held) = server.read(key).await else { return Ok(ReleaseStatus::Lacking) };
    if held.info.kind.inode(&held.bytes) != Some(release.inode()) {
        return Ok(ReleaseStatus::Refused);
    }
    server.store.shorten(&[*key], expires_unix_secs).map_err(internal)?;
    Ok(ReleaseStatus::Released)
}
