//! The blocks of the ring through the local node.
//!
//! Everything received is verified again: not even the own node can pass on wrong bytes.

use atoll_dht::{Blocks, GetError, PutError};
use atoll_env::BoxFuture;
use atoll_key::{BlockHash, Key, SignedBlock};
use bytes::Bytes;

use super::{Client, Inner};
use crate::control::body::{Block, BlockList, HashList, WithPart};
use crate::control::calls::{self, ControlCall};
use crate::control::message;

impl Inner {
    async fn get(&self, hash: BlockHash) -> Result<Bytes, GetError> {
        let bytes = self.fetch::<calls::GetContent>(message::Get { hash: hash.0 }, hash.key());
        let bytes = bytes.await?;
        if BlockHash::of(&bytes) != hash {
            return Err(unavailable(hash.key(), "the local node sent other bytes"));
        }
        Ok(bytes)
    }

    async fn get_signed(&self, key: Key) -> Result<SignedBlock, GetError> {
        let call = message::GetSigned { key: key.0 };
        let bytes = self.fetch::<calls::GetSignedBlock>(call, key).await?;
        let block = SignedBlock::decode(&bytes).map_err(|error| unavailable(key, error))?;
        if block.key() != key {
            return Err(unavailable(key, "the local node sent another block"));
        }
        Ok(block)
    }

    async fn fetch<C>(&self, request: C::Request, key: Key) -> Result<Bytes, GetError>
    where
        C: ControlCall<Reply = Block>,
        C::Error: Into<GetError>,
    {
        match self.call::<C>(request).await {
            Ok(found) => found.map(|WithPart(_, bytes)| bytes).map_err(Into::into),
            Err(error) => Err(unavailable(key, error)),
        }
    }

    /// Makes a call that fails as a put does.
    async fn store<C: ControlCall>(&self, request: C::Request) -> Result<C::Reply, PutError>
    where
        C::Error: Into<PutError>,
    {
        match self.call::<C>(request).await {
            Ok(stored) => stored.map_err(Into::into),
            Err(error) => Err(PutError::Unavailable(error.to_string())),
        }
    }
}

fn unavailable(key: Key, told: impl ToString) -> GetError {
    GetError::Unavailable { key, told: told.to_string() }
}

impl Blocks for Client {
    fn get(&self, hash: BlockHash) -> BoxFuture<'static, Result<Bytes, GetError>> {
        let inner = self.inner.clone();
        Box::pin(async move { inner.get(hash).await })
    }

    fn get_signed(&self, key: Key) -> BoxFuture<'static, Result<SignedBlock, GetError>> {
        let inner = self.inner.clone();
        Box::pin(async move { inner.get_signed(key).await })
    }

    fn put(&self, blocks: Vec<(BlockHash, Bytes)>) -> BoxFuture<'static, Result<(), PutError>> {
        let inner = self.inner.clone();
        Box::pin(async move { inner.store::<calls::Put>(BlockList(blocks)).await.map(drop) })
    }

    fn put_signed(&self, block: SignedBlock) -> BoxFuture<'static, Result<(), PutError>> {
        let inner = self.inner.clone();
        let request = Block::of(block.bytes().clone());
        Box::pin(async move { inner.store::<calls::PutSigned>(request).await.map(drop) })
    }

    fn renew(
        &self,
        hashes: Vec<BlockHash>,
    ) -> BoxFuture<'static, Result<Vec<BlockHash>, PutError>> {
        let inner = self.inner.clone();
        Box::pin(async move {
            inner.store::<calls::Renew>(HashList(hashes)).await.map(|HashList(lacking)| lacking)
        })
    }

    fn renew_or_lack(
        &self,
        hashes: Vec<BlockHash>,
    ) -> BoxFuture<'static, Result<Vec<BlockHash>, PutError>> {
        let inner = self.inner.clone();
        let request = HashList(hashes);
        Box::pin(async move {
            inner.store::<calls::RenewOrLack>(request).await.map(|HashList(lacking)| lacking)
        })
    }
}
