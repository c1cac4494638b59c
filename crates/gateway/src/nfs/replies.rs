//! The cache of replies: a change that a client asks for twice is made once.
//!
//! A client that gets no reply in time, or whose connection breaks, sends the same call again; the server may have made the
//! change already, and the second time a `mkdir` would end in "exists", a `remove` in "no such file". So replies of
//! changes are kept, by client, number, credential, procedure and a checksum of the arguments. A call that is still under way when
//! it comes again is answered when that is done; which connection it comes by does not matter, so that one client's
//! several (`nconnect`) share the cache.
//!
//! A change goes on when its connection ends. Bounded: [`MAX_REPLIES_PER_CLIENT`], [`MAX_REPLIES`], [`KEPT_FOR`].

use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::FutureExt;
use tokio::sync::watch;

/// Replies of one client that are kept. Linux has at most 128 calls under way on a connection by default (`tcp_max_slot_table_entries` 65,536 is
/// a bound, not a use); a guess at ten times that.
pub(super) const MAX_REPLIES_PER_CLIENT: usize = 1024;
/// Replies that are kept in all; of some hundred bytes each.
pub(super) const MAX_REPLIES: usize = 16 << 10;
/// For how long. Linux sends a call again after 60 s (`timeo=600`), and once more after 120.
pub(super) const KEPT_FOR: Duration = Duration::from_secs(240);

/// What makes two calls the same.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Identity {
    /// Whose call.
    pub(super) client: IpAddr,
    /// Its number.
    pub(super) xid: u32,
    /// Hash of procedure, credential and arguments.
    pub(super) checksum: [u8; 16],
}

/// The pieces of a reply.
pub(super) type Pieces = Vec<Bytes>;

type Slot = watch::Receiver<Option<Pieces>>;

#[derive(Debug, Default)]
struct State {
    slots: BTreeMap<Identity, Slot>,
    /// The calls of each client in the order in which they came.
    order: BTreeMap<IpAddr, VecDeque<(Instant, Identity)>>,
}

/// The cache.
#[derive(Debug, Default)]
pub(super) struct Replies(Mutex<State>);

impl Replies {
    fn locked(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no holder of this lock panics")
    }

    /// The reply of a call: that of `work`, which is done once for an identity. It goes on if the caller is gone.
    pub(super) async fn once(
        self: &Arc<Replies>,
        identity: Identity,
        work: impl Future<Output = Pieces> + Send + 'static,
    ) -> Option<Pieces> {
        let mut slot = self.begin(identity, work);
        let done = slot.wait_for(Option::is_some).await.ok()?;
        done.clone()
    }

    fn begin(
        self: &Arc<Replies>,
        identity: Identity,
        work: impl Future<Output = Pieces> + Send + 'static,
    ) -> Slot {
        let mut state = self.locked();
        state.drop_old(Instant::now(), identity.client);
        if let Some(slot) = state.slots.get(&identity) {
            return slot.clone();
        }
        let (done, slot) = watch::channel(None);
        state.slots.insert(identity, slot.clone());
        state.order.entry(identity.client).or_default().push_back((Instant::now(), identity));
        drop(state);
        let replies = self.clone();
        let mut change = Box::pin(async move {
            // A change that panics has no reply, and may be tried again.
            let _forget = ForgetUnlessDone { replies, identity };
            done.send_replace(Some(work.await));
        });
        // One that is made at once needs no task of its own.
        if (&mut change).now_or_never().is_none() {
            tokio::spawn(change);
        }
        slot
    }
}

/// Lets a call be made again whose work ended without a reply.
struct ForgetUnlessDone {
    replies: Arc<Replies>,
    identity: Identity,
}

impl Drop for ForgetUnlessDone {
    fn drop(&mut self) {
        let mut state = self.replies.locked();
        if state.slots.get(&self.identity).is_some_and(|slot| slot.borrow().is_none()) {
            state.slots.remove(&self.identity);
        }
    }
}

impl State {
    /// Drops replies that are old or too many; none that is still to be given.
    fn drop_old(&mut self, now: Instant, client: IpAddr) {
        let is_full = self.slots.len() >= MAX_REPLIES;
        let clients: Vec<IpAddr> =
            if is_full { self.order.keys().copied().collect() } else { vec![client] };
        let most = if is_full {
            MAX_REPLIES_PER_CLIENT / 2 / clients.len().max(1)
        } else {
            MAX_REPLIES_PER_CLIENT
        };
        for client in clients {
            let Some(order) = self.order.get_mut(&client) else { continue };
            while let Some((came, identity)) = order.front().copied() {
                let is_old = now.duration_since(came) > KEPT_FOR || order.len() > most;
                let is_done = self.slots.get(&identity).is_none_or(|slot| slot.borrow().is_some());
                if !(is_old && is_done) {
                    break;
                }
                order.pop_front();
                self.slots.remove(&identity);
            }
            if order.is_empty() {
                self.order.remove(&client);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn identity(xid: u32) -> Identity {
        Identity { client: IpAddr::from([127, 0, 0, 1]), xid, checksum: [0; 16] }
    }

    #[tokio::test]
    async fn a_call_that_comes_again_is_answered_and_not_made() {
        let (replies, made) = (Arc::new(Replies::default()), Arc::new(AtomicUsize::new(0)));
        let (release, released) = watch::channel(false);
        let call = |xid| {
            let (made, mut released) = (made.clone(), released.clone());
            replies.once(identity(xid), async move {
                let count = made.fetch_add(1, Ordering::SeqCst);
                released.wait_for(|released| *released).await.unwrap();
                vec![Bytes::from(vec![u8::try_from(count).unwrap()])]
            })
        };
        let (first, again) = (call(1), call(1));
        let after = async {
            tokio::task::yield_now().await;
            release.send(true).unwrap();
        };
        let (first, again, ()) = tokio::join!(first, again, after);
        assert_eq!(first, Some(vec![Bytes::from_static(&[0])]));
        assert_eq!(again, first, "while it was under way");
        assert_eq!(call(1).await, first, "after it was done");
        assert_eq!(call(2).await, Some(vec![Bytes::from_static(&[1])]));
    }

    #[tokio::test]
    async fn a_change_goes_on_without_its_caller_and_the_cache_is_bounded() {
        let replies = Arc::new(Replies::default());
        let slot = replies.begin(identity(0), async { vec![] });
        drop(replies.once(identity(0), async { panic!("made twice") }));
        let mut slot = slot;
        slot.wait_for(Option::is_some).await.unwrap();
        for xid in 1..=u32::try_from(3 * MAX_REPLIES_PER_CLIENT).unwrap() {
            replies.once(identity(xid), async { vec![] }).await;
        }
        assert!(replies.locked().slots.len() <= MAX_REPLIES_PER_CLIENT + 1);
    }
}
