//! Which pool a call is about: a node may have members of several.
//!
//! The header of every call of the family [`FAMILY`] begins with the 16 bytes that name the pool.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use atoll_env::BoxFuture;
use atoll_net::{Peer, Refusal, Reply, Request, Service};
use bytes::Bytes;

/// The upper byte of the methods of pools.
pub const FAMILY: u8 = 0x05;

/// What names a pool ([`crate::PoolSettings::pool`]).
pub type PoolId = [u8; 16];

/// A header for the members of a pool.
pub fn addressed(pool: &PoolId, header: &[u8]) -> Bytes {
    Bytes::from([pool, header].concat())
}

/// The pool that a request is about, which then lacks it; none if it does not say.
pub(crate) fn take_pool(request: &mut Request) -> Option<PoolId> {
    let pool = *request.header.first_chunk()?;
    request.header = request.header.slice(pool.len()..);
    Some(pool)
}

/// Hands calls to the members of pools that this node has.
#[derive(Default)]
pub struct PoolRouter {
    members: Mutex<BTreeMap<PoolId, Arc<dyn Service>>>,
}

impl PoolRouter {
    fn members(&self) -> MutexGuard<'_, BTreeMap<PoolId, Arc<dyn Service>>> {
        self.members.lock().expect("no holder of this lock panics")
    }

    /// Calls about this pool go to `member` from now on.
    pub fn add(&self, pool: PoolId, member: Arc<dyn Service>) {
        self.members().insert(pool, member);
    }

    /// Calls about this pool are refused from now on.
    pub fn remove(&self, pool: &PoolId) {
        self.members().remove(pool);
    }
}

impl Service for PoolRouter {
    fn handle(
        &self,
        from: Peer,
        mut request: Request,
    ) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let member = take_pool(&mut request).map(|pool| self.members().get(&pool).cloned());
        match member {
            Some(Some(member)) => member.handle(from, request),
            Some(None) => refuse(Refusal::OVERLOADED, "this node has no member of that pool now"),
            None => refuse(Refusal::MALFORMED, "the call names no pool"),
        }
    }
}

fn refuse(code: u16, why: &'static str) -> BoxFuture<'static, Result<Reply, Refusal>> {
    Box::pin(async move { Err(Refusal::new(code, why)) })
}
