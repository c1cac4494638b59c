//! Calls that change something which a second attempt would find changed, and what is known of them after restarts and on other
//! members: a retry is answered as done, and never done twice. Plain state.
//!
//! A call has an identity, [`CallId`]: the client that makes it, and the client's number for it, the same in all attempts. The one
//! change that such a call makes carries it ([`CallOrigin`]) into the journals of all members. A member keeps the last calls of each
//! client that made a change on its disk, in [`DoneCalls`]: a function of the changes that are made there, so it is the same on all
//! members that have made the same changes. A change that was withdrawn was never made, and its call may be made anew.
//!
//! A client says with each call below which number it waits for no answer any more. Calls below are forgotten when the client's next
//! change is made; such a call is refused if it arrives all the same. What else is forgotten, and when, [`DoneCalls`] says.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;

use atoll_key::PeerId;
use atoll_vfs::{FileKind, FileSystem};
use minicbor::{Decode, Encode};

use crate::layout::FileId;

/// The most calls that are kept of a client: twice as many as one has in the air.
const MAX_CALLS_OF_CLIENT: usize = 1024;
/// The most clients of one peer, and the most calls of them: as many clients as a server has sessions of a peer.
const MAX_CLIENTS_OF_PEER: usize = 128;
const MAX_CALLS_OF_PEER: usize = 16_384;
/// The most clients and calls in all; a guess at what may be written at each checkpoint, about 2 MiB.
const MAX_CLIENTS: usize = 4096;
const MAX_CALLS: usize = 65_536;

/// Bytes of a client's record before its calls, and of each call.
const HEAD_BYTES: usize = 16;
const CALL_BYTES: usize = 17;

/// A client of a peer: 8 bytes that say which peer, 8 that say which of its clients. Both are hashes which the server makes from the
/// peer's proven key, so no peer can name a client of another.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Encode, Decode)]
#[cbor(transparent)]
pub struct ClientKey(#[cbor(n(0), with = "minicbor::bytes")] [u8; 16]);

impl ClientKey {
    /// The client that `peer` calls `client`.
    pub fn new(peer: &PeerId, client: &[u8; 16]) -> ClientKey {
        let mut key = [0; 16];
        let of_peer =
            blake3::Hasher::new_derive_key("atoll pool peer 1").update(&peer.0).finalize();
        let mut of_client = blake3::Hasher::new_derive_key("atoll pool client 1");
        let of_client = of_client.update(&peer.0).update(client).finalize();
        key[..8].copy_from_slice(&of_peer.as_bytes()[..8]);
        key[8..].copy_from_slice(&of_client.as_bytes()[..8]);
        ClientKey(key)
    }

    /// The lowest and the highest key that a client of the same peer can have.
    pub(crate) fn of_same_peer(self) -> (ClientKey, ClientKey) {
        let (mut low, mut high) = (self.0, self.0);
        low[8..].fill(0);
        high[8..].fill(u8::MAX);
        (ClientKey(low), ClientKey(high))
    }
}

/// Which call of which client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CallId {
    /// The client.
    pub client: ClientKey,
    /// The client's number for it: one for all attempts.
    pub number: u64,
}

/// The call for which a change is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub struct CallOrigin {
    /// The client.
    #[n(0)]
    pub client: ClientKey,
    /// See [`CallId`].
    #[n(1)]
    pub number: u64,
    /// The client waits for no answer to its calls below this number.
    #[n(2)]
    pub lowest: u64,
}

impl CallOrigin {
    /// Which call it is.
    pub fn id(&self) -> CallId {
        CallId { client: self.client, number: self.number }
    }
}

/// A file system that makes each identified call once, over restarts and on whichever member it runs.
pub trait RemembersCalls: FileSystem {
    /// The file system as this one call sees it: if the call was done before, the method answers so and does nothing. A file that was
    /// created and cannot be opened any more, for it is gone, is answered with [`Handle::NONE`](atoll_vfs::Handle::NONE).
    fn for_call(&self, origin: CallOrigin) -> Arc<dyn FileSystem>;

    /// The file system for a call that `kept` is about: it is dropped when all that the call has begun is done, which may be later
    /// than its answer.
    fn keeping(&self, kept: Arc<dyn Any + Send + Sync>) -> Arc<dyn FileSystem>;

    /// Whether its work has ended on this member: an error that it answers then says nothing about the call.
    fn has_ended(&self) -> bool;
}

/// A call that made a change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DoneCall {
    /// The file that it made, or gave another name.
    pub(crate) file: Option<(FileId, FileKind)>,
}

/// Whether a call has made its change, as far as this member remembers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum KnownCall {
    /// Nothing: it has made no change.
    Unknown,
    Done(DoneCall),
    /// Nothing is known any more, since nobody waits for its answer. It must not be done.
    Forgotten,
}

#[derive(Clone, Default, PartialEq, Eq, Debug)]
struct CallsOfClient {
    /// Calls below are forgotten.
    lowest: u64,
    /// The order of its last change.
    last: u64,
    calls: BTreeMap<u64, DoneCall>,
}

/// The last calls of each client that made a change.
///
/// Kept of a client are those that it waits for, at most [`MAX_CALLS_OF_CLIENT`], beyond which those with the lowest numbers are
/// forgotten and refused. A client whose last change is the oldest is forgotten when there are too many: of the peer that has too many,
/// or, where there are too many in all, of the peer that has the most; so no peer has other peers' calls forgotten while it has more
/// of them itself. A call of a client that was forgotten so is done again if it is retried.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub(crate) struct DoneCalls {
    clients: BTreeMap<ClientKey, CallsOfClient>,
    /// Of all clients.
    calls: usize,
}

impl DoneCalls {
    /// What is known of a call.
    pub(crate) fn find(&self, call: CallId) -> KnownCall {
        let Some(client) = self.clients.get(&call.client) else { return KnownCall::Unknown };
        match client.calls.get(&call.number) {
            Some(done) => KnownCall::Done(*done),
            None if call.number < client.lowest => KnownCall::Forgotten,
            None => KnownCall::Unknown,
        }
    }

    /// The change of this order is made, which a call made. Noting it again changes nothing.
    pub(crate) fn note(&mut self, order: u64, origin: CallOrigin, done: DoneCall) {
        let client = self.clients.entry(origin.client).or_default();
        let before = client.calls.len();
        client.last = client.last.max(order);
        client.lowest = client.lowest.max(origin.lowest);
        client.calls = client.calls.split_off(&client.lowest);
        if origin.number >= client.lowest {
            client.calls.insert(origin.number, done);
        }
        while client.calls.len() > MAX_CALLS_OF_CLIENT
            && let Some((number, _)) = client.calls.pop_first()
        {
            client.lowest = number + 1;
        }
        self.calls = self.calls + client.calls.len() - before;
        self.make_room(origin.client);
    }

    /// Forgets clients until there are few enough, after one has got more calls.
    fn make_room(&mut self, grown: ClientKey) {
        loop {
            let (clients, calls) = self.of_peer(grown);
            if clients <= MAX_CLIENTS_OF_PEER && calls <= MAX_CALLS_OF_PEER {
                break;
            }
            self.forget_oldest(grown);
        }
        while self.clients.len() > MAX_CLIENTS {
            self.forget_oldest_of_largest(|clients, _| clients);
        }
        while self.calls > MAX_CALLS {
            self.forget_oldest_of_largest(|_, calls| calls);
        }
    }

    /// How many clients the peer of a client has, and how many calls they have.
    fn of_peer(&self, client: ClientKey) -> (usize, usize) {
        let (low, high) = client.of_same_peer();
        let all = self.clients.range(low..=high);
        all.fold((0, 0), |(clients, calls), (_, one)| (clients + 1, calls + one.calls.len()))
    }

    /// Forgets the client of the same peer whose last change is the oldest.
    fn forget_oldest(&mut self, client: ClientKey) {
        let (low, high) = client.of_same_peer();
        let oldest = self.clients.range(low..=high).min_by_key(|(key, one)| (one.last, **key));
        if let Some(key) = oldest.map(|(key, _)| *key)
            && let Some(forgotten) = self.clients.remove(&key)
        {
            self.calls -= forgotten.calls.len();
        }
    }

    fn forget_oldest_of_largest(&mut self, size: impl Fn(usize, usize) -> usize) {
        let mut largest: Option<(usize, ClientKey)> = None;
        let mut next = self.clients.keys().next().copied();
        while let Some(first) = next {
            let (clients, calls) = self.of_peer(first);
            let size = size(clients, calls);
            if largest.is_none_or(|(most, _)| size > most) {
                largest = Some((size, first));
            }
            let above =
                (std::ops::Bound::Excluded(first.of_same_peer().1), std::ops::Bound::Unbounded);
            next = self.clients.range(above).next().map(|(key, _)| *key);
        }
        if let Some((_, of_peer)) = largest {
            self.forget_oldest(of_peer);
        }
    }

    /// The records of all clients, by their keys: the lowest number (8 bytes), the order of the last change (8); then of each call its
    /// number (8), its file (8; 0: none) and the file's kind (1). Big-endian.
    pub(crate) fn records(&self) -> impl Iterator<Item = ([u8; 16], Vec<u8>)> + '_ {
        self.clients.iter().map(|(key, client)| {
            let mut bytes = Vec::with_capacity(HEAD_BYTES + CALL_BYTES * client.calls.len());
            bytes.extend(client.lowest.to_be_bytes());
            bytes.extend(client.last.to_be_bytes());
            for (number, DoneCall { file }) in &client.calls {
                let (id, kind) = file.map_or((0, 0), |(id, kind)| (id.0, kind_number(kind)));
                bytes.extend(number.to_be_bytes());
                bytes.extend(id.to_be_bytes());
                bytes.push(kind);
            }
            (key.0, bytes)
        })
    }

    /// Adds the record of a client. None if it is damaged.
    pub(crate) fn add_record(&mut self, key: &[u8], record: &[u8]) -> Option<()> {
        let key = ClientKey(key.try_into().ok()?);
        let (head, calls) = record.split_at_checked(HEAD_BYTES)?;
        let (calls, rest) = calls.as_chunks::<CALL_BYTES>();
        if !rest.is_empty() || calls.len() > MAX_CALLS_OF_CLIENT {
            return None;
        }
        let word = |bytes: &[u8]| Some(u64::from_be_bytes(bytes.try_into().ok()?));
        let mut client = CallsOfClient {
            lowest: word(&head[..8])?,
            last: word(&head[8..])?,
            calls: BTreeMap::new(),
        };
        for call in calls {
            let file = match word(&call[8..16])? {
                0 => None,
                id => Some((FileId(id), *KINDS.get(usize::from(call[16]))?)),
            };
            client.calls.insert(word(&call[..8])?, DoneCall { file });
        }
        self.calls += client.calls.len();
        if let Some(before) = self.clients.insert(key, client) {
            self.calls -= before.calls.len();
        }
        Some(())
    }

    /// # Panics
    /// If what is counted is not what is there, or there is too much.
    #[cfg(test)]
    fn check_invariants(&self) {
        let calls = self.clients.values().map(|client| client.calls.len()).sum::<usize>();
        assert_eq!(self.calls, calls);
        assert!(self.calls <= MAX_CALLS && self.clients.len() <= MAX_CLIENTS);
        for (key, client) in &self.clients {
            assert!(client.calls.len() <= MAX_CALLS_OF_CLIENT);
            assert!(client.calls.keys().all(|number| *number >= client.lowest));
            let (clients, calls) = self.of_peer(*key);
            assert!(clients <= MAX_CLIENTS_OF_PEER && calls <= MAX_CALLS_OF_PEER);
        }
    }
}

/// Kinds by their numbers, in records and in calls over the network.
const KINDS: [FileKind; 7] = [
    FileKind::Regular,
    FileKind::Directory,
    FileKind::Symlink,
    FileKind::Fifo,
    FileKind::Socket,
    FileKind::CharDevice,
    FileKind::BlockDevice,
];

/// The number of a kind.
pub(crate) fn kind_number(kind: FileKind) -> u8 {
    KINDS.iter().position(|known| *known == kind).expect("all kinds have numbers") as u8
}

/// The kind of a number; none for one that no kind has.
pub(crate) fn numbered_kind(number: u8) -> Option<FileKind> {
    KINDS.get(usize::from(number)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(peer: u16, client: u64) -> ClientKey {
        let mut id = [0; 32];
        id[..2].copy_from_slice(&peer.to_be_bytes());
        let mut name = [0; 16];
        name[..8].copy_from_slice(&client.to_be_bytes());
        ClientKey::new(&PeerId(id), &name)
    }

    fn origin(client: ClientKey, number: u64, lowest: u64) -> CallOrigin {
        CallOrigin { client, number, lowest }
    }

    fn made(id: u64) -> DoneCall {
        DoneCall { file: Some((FileId(id), FileKind::Directory)) }
    }

    const NOTHING: DoneCall = DoneCall { file: None };

    fn find(done: &DoneCalls, client: ClientKey, number: u64) -> KnownCall {
        done.check_invariants();
        done.find(CallId { client, number })
    }

    #[test]
    fn a_call_is_known_until_its_client_waits_for_it_no_more_and_then_refused() {
        let (mut done, client) = (DoneCalls::default(), key(1, 1));
        assert_eq!(find(&done, client, 5), KnownCall::Unknown);
        done.note(1, origin(client, 5, 3), made(70));
        done.note(2, origin(client, 7, 3), NOTHING);
        assert_eq!(find(&done, client, 5), KnownCall::Done(made(70)));
        assert_eq!(find(&done, client, 6), KnownCall::Unknown);
        assert_eq!(find(&done, client, 2), KnownCall::Forgotten);
        done.note(3, origin(client, 9, 7), made(71));
        assert_eq!(find(&done, client, 5), KnownCall::Forgotten);
        assert_eq!(find(&done, client, 7), KnownCall::Done(NOTHING));
        // A change that was overtaken by later ones takes nothing back, and is not waited for.
        done.note(4, origin(client, 4, 3), made(72));
        assert_eq!(find(&done, client, 4), KnownCall::Forgotten);
        // It is noted again when a journal is read.
        let before = done.clone();
        done.note(3, origin(client, 9, 7), made(71));
        assert_eq!(done, before);
    }

    #[test]
    fn nobody_names_a_client_of_another_peer() {
        let mut done = DoneCalls::default();
        done.note(1, origin(key(1, 1), 5, 0), made(70));
        assert_eq!(find(&done, key(2, 1), 5), KnownCall::Unknown);
        assert_eq!(find(&done, key(1, 2), 5), KnownCall::Unknown);
        assert_eq!(find(&done, key(1, 1), 5), KnownCall::Done(made(70)));
    }

    #[test]
    fn a_client_that_acknowledges_nothing_keeps_its_last_calls() {
        let (mut done, client) = (DoneCalls::default(), key(1, 1));
        for number in 0..2000 {
            done.note(number, origin(client, number, 0), NOTHING);
        }
        assert_eq!(
            find(&done, client, 2000 - MAX_CALLS_OF_CLIENT as u64),
            KnownCall::Done(NOTHING)
        );
        // Not unknown: it must not be done again.
        assert_eq!(find(&done, client, 1999 - MAX_CALLS_OF_CLIENT as u64), KnownCall::Forgotten);
        done.note(5000, origin(client, u64::MAX, u64::MAX), NOTHING);
        assert_eq!(find(&done, client, u64::MAX), KnownCall::Done(NOTHING));
        assert_eq!(done.calls, 1);
    }

    #[test]
    fn ten_thousand_clients_of_a_peer_forget_none_of_another() {
        let mut done = DoneCalls::default();
        done.note(1, origin(key(1, 1), 5, 0), made(70));
        for client in 0..10_000 {
            done.note(2 + client, origin(key(2, client), 0, 0), NOTHING);
        }
        done.check_invariants();
        assert_eq!(done.clients.len(), 1 + MAX_CLIENTS_OF_PEER);
        assert_eq!(find(&done, key(1, 1), 5), KnownCall::Done(made(70)));
        assert_eq!(find(&done, key(2, 9_999), 0), KnownCall::Done(NOTHING), "the newest stay");
    }

    #[test]
    fn calls_of_a_peer_are_few_and_so_are_all() {
        let mut done = DoneCalls::default();
        let mut order = 0;
        done.note(order, origin(key(1, 1), 5, 0), made(70));
        for peer in 2..8 {
            for client in 0..20 {
                for number in 0..1000 {
                    order += 1;
                    done.note(order, origin(key(peer, client), number, 0), NOTHING);
                }
            }
            done.check_invariants();
        }
        assert!(done.calls > MAX_CALLS - MAX_CALLS_OF_CLIENT, "{}", done.calls);
        assert_eq!(find(&done, key(1, 1), 5), KnownCall::Done(made(70)));
        let mut done = DoneCalls::default();
        done.note(0, origin(key(1, 1), 5, 0), made(70));
        for peer in 2..200 {
            for client in 0..40 {
                order += 1;
                done.note(order, origin(key(peer, client), 0, 0), NOTHING);
            }
        }
        done.check_invariants();
        assert_eq!(done.clients.len(), MAX_CLIENTS);
        assert_eq!(find(&done, key(1, 1), 5), KnownCall::Done(made(70)));
    }

    #[test]
    fn records_read_back_and_damaged_ones_are_none() {
        let mut done = DoneCalls::default();
        for (at, kind) in KINDS.into_iter().enumerate() {
            let file = Some((FileId(70 + at as u64), kind));
            done.note(9, origin(key(1, 1), at as u64, 0), DoneCall { file });
        }
        done.note(10, origin(key(2, 1), u64::MAX, 7), NOTHING);
        let mut again = DoneCalls::default();
        for (key, record) in done.records() {
            assert!(DoneCalls::default().add_record(&key[1..], &record).is_none());
            assert!(DoneCalls::default().add_record(&key, &record[1..]).is_none());
            let mut unknown = record.clone();
            unknown[HEAD_BYTES + 8..HEAD_BYTES + CALL_BYTES].fill(9);
            assert!(DoneCalls::default().add_record(&key, &unknown).is_none());
            again.add_record(&key, &record).unwrap();
        }
        assert_eq!(again, done);
        again.check_invariants();
    }
}
