//! Sending the node the list of blocks that it keeps alive for a volume.

use std::time::Duration;

use atoll_key::{BlockHash, SignedBlock};
use bytes::Bytes;

use super::{Client, ClientError};
use crate::control::body::WithPart;
use crate::control::calls;
use crate::control::message;
use crate::network::random_seed;

/// The most hashes sent to a manifest at once: 1 MiB.
const KEEP_BATCH: usize = 32 << 10;

impl Client {
    /// Begins the list of blocks that the node is to keep alive for a new version of a
    /// volume. The former list counts until [`Keep::commit`].
    pub fn keep(&self, volume: &str) -> Keep {
        let [a, b, c, d, e, f, g, h, ..] = random_seed();
        Keep {
            client: self.clone(),
            volume: volume.to_owned(),
            session: u64::from_be_bytes([a, b, c, d, e, f, g, h]),
            sent: 0,
            waiting: Vec::new(),
            lease: None,
        }
    }
}

/// A list of blocks to keep alive, being sent to the node. Dropping it abandons it.
///
/// Nothing is lost when the node restarts meanwhile, if the client has patience.
#[derive(Debug)]
pub struct Keep {
    client: Client,
    volume: String,
    session: u64,
    /// Hashes the node has acknowledged.
    sent: u64,
    /// Hashes not sent yet; fewer than [`KEEP_BATCH`] between calls.
    waiting: Vec<u8>,
    lease: Option<Duration>,
}

impl Keep {
    /// The blocks were put for so long, and are to be renewed for so long at a time; `None` for as long as those of the
    /// version before.
    pub fn leased(self, lease: Option<Duration>) -> Keep {
        Keep { lease, ..self }
    }

    /// Adds blocks of the new version.
    pub async fn add(&mut self, hashes: &[BlockHash]) -> Result<(), ClientError> {
        for chunk in hashes.chunks(KEEP_BATCH) {
            self.waiting.extend_from_slice(&message::join_hashes(chunk.iter()));
            while self.waiting.len() >= KEEP_BATCH * 32 {
                let rest = self.waiting.split_off(KEEP_BATCH * 32);
                self.send().await?;
                self.waiting = rest;
            }
        }
        Ok(())
    }

    /// Puts the list in place of the volume's former one, durably: from now on the node
    /// keeps these blocks and this root alive.
    pub async fn commit(mut self, root: &SignedBlock) -> Result<(), ClientError> {
        self.send().await?;
        let call = message::KeepCommit {
            volume: self.volume.clone(),
            session: self.session,
            count: self.sent,
            lease_secs: self.lease.map(|lease| lease.as_secs()),
        };
        let request = WithPart(call, root.bytes().clone());
        self.client.ask::<calls::KeepCommitting>(request).await.map(drop)
    }

    async fn send(&mut self) -> Result<(), ClientError> {
        let call = message::KeepAdd {
            volume: self.volume.clone(),
            session: self.session,
            offset: self.sent,
        };
        let part = Bytes::from(std::mem::take(&mut self.waiting));
        let count = part.len() as u64 / 32;
        self.client.ask::<calls::KeepAdding>(WithPart(call, part)).await?;
        self.sent += count;
        Ok(())
    }
}
