//! The blocks of the ring through the local node.
//!
//! Everything received is verified again: not even the own node can pass on wrong bytes.

use atoll_dht::rpc::ReleaseBlocks;
use atoll_dht::{
    Blocks, GetError, HeldBlock, LeaseRenewal, LockGrant, LockLease, LockRefusal, NewBlock,
    PutError, Renewed, RingRoom, Wanted,
};
use atoll_env::BoxFuture;
use atoll_key::kinds::Release;
use atoll_key::{BlockId, Key};

use super::{Client, ClientError, Inner};
use crate::control::blocks::{
    AskReplicas, AskSameSet, AskUses, BlockList, Changed, Get, Outcomes, Renew, Watch, WireId,
};
use crate::control::body::{Json, WithPart};
use crate::control::calls::{self, ControlCall};
use crate::control::message::{Empty, GetFailed, Never};
use crate::status::{ReplicaReport, UsesReport};

impl Inner {
    async fn get(&self, id: BlockId, wanted: Wanted) -> Result<HeldBlock, GetError> {
        let call = Get::new(id, wanted);
        let WithPart(_, bytes) = self.fetch::<calls::Get>(call, id.key).await?;
        let held = HeldBlock::verified(id, bytes)?;
        match id.kind.reaches(held.version, wanted.least()) {
            true => Ok(held),
            false => Err(unavailable(id.key, "the local node sent an older version")),
        }
    }

    async fn watch(&self, id: BlockId, seen: u64) -> Result<Option<HeldBlock>, GetError> {
        let call = Watch { id: id.into(), seen };
        let Changed(block) = self.fetch::<calls::Watch>(call, id.key).await?;
        let held = block.map(|bytes| HeldBlock::verified(id, bytes)).transpose()?;
        match held {
            Some(held) if !id.kind.is_news(held.version, seen) => {
                Err(unavailable(id.key, "the local node sent no newer version"))
            }
            held => Ok(held),
        }
    }

    async fn fetch<C>(&self, request: C::Request, key: Key) -> Result<C::Reply, GetError>
    where
        C: ControlCall<Error = GetFailed>,
    {
        match self.call::<C>(request).await {
            Ok(found) => found.map_err(Into::into),
            Err(error) => Err(unavailable(key, error)),
        }
    }

    /// What became of each of `count` blocks, as `read` has it.
    async fn outcomes<C, T: Clone>(
        &self,
        request: C::Request,
        count: usize,
        read: impl FnOnce(Outcomes, usize) -> Result<Vec<Result<T, PutError>>, atoll_net::Refusal>,
    ) -> Vec<Result<T, PutError>>
    where
        C: ControlCall<Reply = Outcomes, Error = Never>,
    {
        let answer = match self.call::<C>(request).await {
            Ok(Ok(outcomes)) => read(outcomes, count).map_err(|refusal| refusal.to_string()),
            Ok(Err(never)) => Err(ClientError::from(never).to_string()),
            Err(error) => Err(error.to_string()),
        };
        answer.unwrap_or_else(|told| vec![Err(PutError::Unavailable(told)); count])
    }
}

fn unavailable(key: Key, told: impl ToString) -> GetError {
    GetError::Unavailable { key, told: told.to_string() }
}

impl Client {
    /// What each node that should hold some blocks says of them; at most 1,024.
    pub async fn replicas(&self, ids: &[BlockId]) -> Result<ReplicaReport, ClientError> {
        let ids: Vec<WireId> = ids.iter().map(|id| WireId::from(*id)).collect();
        self.ask::<calls::Replicas>(AskReplicas { ids: ids.into() }).await.map(|Json(said)| said)
    }

    /// Which nodes use a mutable block, and the lock that stands where it does.
    pub async fn uses(&self, id: BlockId, lock: Key) -> Result<UsesReport, ClientError> {
        let call = AskUses { id: id.into(), lock: lock.0 };
        self.ask::<calls::Uses>(call).await.map(|Json(said)| said)
    }
}

impl Blocks for Client {
    fn get_block(
        &self,
        id: BlockId,
        wanted: Wanted,
    ) -> BoxFuture<'static, Result<HeldBlock, GetError>> {
        let inner = self.inner.clone();
        Box::pin(async move { inner.get(id, wanted).await })
    }

    fn put_blocks(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        let (inner, count) = (self.inner.clone(), blocks.len());
        let list = BlockList(blocks);
        Box::pin(async move { inner.outcomes::<calls::Put, _>(list, count, Outcomes::put).await })
    }

    fn renew_blocks(
        &self,
        renewal: LeaseRenewal,
    ) -> BoxFuture<'static, Vec<Result<Renewed, PutError>>> {
        let (inner, count) = (self.inner.clone(), renewal.ids.len());
        let renew = Renew::from(renewal);
        Box::pin(
            async move { inner.outcomes::<calls::Renew, _>(renew, count, Outcomes::renewal).await },
        )
    }

    fn release_blocks(&self, release: Release) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        let (inner, count) = (self.inner.clone(), release.keys().len());
        let ask = ReleaseBlocks { release, is_pointed: false };
        Box::pin(
            async move { inner.outcomes::<calls::Release, _>(ask, count, Outcomes::put).await },
        )
    }

    fn watch(
        &self,
        id: BlockId,
        seen: u64,
    ) -> BoxFuture<'static, Result<Option<HeldBlock>, GetError>> {
        let inner = self.inner.clone();
        Box::pin(async move { inner.watch(id, seen).await })
    }

    fn put_in_order(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        let (inner, count) = (self.inner.clone(), blocks.len());
        let list = BlockList(blocks);
        Box::pin(
            async move { inner.outcomes::<calls::PutInOrder, _>(list, count, Outcomes::put).await },
        )
    }

    fn same_set_until(&self, key: Key) -> BoxFuture<'static, Option<Key>> {
        let inner = self.inner.clone();
        Box::pin(async move {
            let said = inner.call::<calls::SameSet>(AskSameSet { key: key.0 }).await;
            said.ok()?.ok()?.until.map(Key)
        })
    }

    fn room(&self) -> BoxFuture<'static, Option<RingRoom>> {
        let inner = self.inner.clone();
        Box::pin(async move {
            let called = inner.call::<calls::Room>(Empty {}).await;
            called.ok().and_then(Result::ok).and_then(Into::into)
        })
    }

    fn lock_lease(&self, ask: LockLease) -> BoxFuture<'static, Result<LockGrant, LockRefusal>> {
        let inner = self.inner.clone();
        Box::pin(async move {
            let called = inner.call::<calls::Lock>(ask.into()).await;
            called.map_err(|error| LockRefusal::NoMajority(error.to_string()))?
        })
    }
}
