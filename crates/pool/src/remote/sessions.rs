//! The sessions that a server has: what each has open, which numbers it holds, and which replies are kept for it. Plain state.
//!
//! A numbered call of a session is in one of these states: not seen; at work, with those who wait for it; answered, with the reply
//! that is kept; or below [`SessionCall::lowest`](super::wire::SessionCall), which the client waits for no more: its reply is gone,
//! and it is never done again.
//!
//! Numbers are the client's, in all of its sessions: a call that is made once has the number of its first attempt
//! ([`crate::calls`]).
//!
//! Life of a session: it begins with the first call that names it; each call renews it; it ends when its client says so, or after
//! [`SESSION_TIME`] without a call. One that has calls at work does not end by time. What it held is then given back to the file
//! system by the caller of [`SessionTable::end`] and [`SessionTable::end_silent`].

use std::collections::BTreeMap;
use std::time::Duration;

use atoll_env::Instant;
use atoll_key::PeerId;
use atoll_net::Reply;
use atoll_vfs::{Errno, Handle, InodeNumber};
use futures_channel::oneshot;

use super::wire::{Begin, Forgotten, SessionId};
use crate::calls::{CallOrigin, ClientKey};

/// How long a session lasts without a call: as long as kept replies (`POOL.md`, retries).
pub(crate) const SESSION_TIME: Duration = Duration::from_secs(600);
/// The most sessions, and those of one peer: guesses, far beyond a mount for each user of a machine.
const MAX_SESSIONS: usize = 1024;
const MAX_SESSIONS_OF_PEER: usize = 128;
/// The most open files and directories of a session: Linux allows a process 1,024 unless asked, a machine many more.
const MAX_OPENS: usize = 16_384;
/// The most numbers that a session holds: a guess at what a kernel caches.
const MAX_HELD: usize = 1 << 22;
/// The most numbered calls of a session that are at work or whose reply is kept; clients begin fewer.
const MAX_CALLS: usize = 1024;
/// The most bytes of kept replies of a session.
const MAX_KEPT_BYTES: usize = 16 << 20;
/// The most attempts of one call that wait for it.
const MAX_WAITING: usize = 16;

/// An open file or directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct SessionOpen {
    pub(super) inode: InodeNumber,
    pub(super) handle: Handle,
    pub(super) is_directory: bool,
}

/// A call that has a number.
enum NumberedCall {
    /// It is at work, and these attempts wait for its reply.
    AtWork(Vec<oneshot::Sender<Reply>>),
    /// It is done.
    Answered(Reply),
}

/// What becomes of an attempt.
pub(super) enum Attempt {
    /// The first one: do the call, wait for the reply here.
    First(oneshot::Receiver<Reply>),
    /// Another one is at work.
    Again(oneshot::Receiver<Reply>),
    /// It was done before.
    Answered(Reply),
    /// The client does not wait for it any more.
    GivenUp,
    /// Too many calls at once.
    Busy,
}

/// What a session held when it ended.
#[derive(Default, PartialEq, Eq, Debug)]
pub(super) struct Leftover {
    pub(super) opens: Vec<SessionOpen>,
    pub(super) held: Vec<(InodeNumber, u64)>,
}

/// One session.
pub(super) struct ServedSession {
    owner: PeerId,
    client: ClientKey,
    heard: Instant,
    opens: BTreeMap<u64, SessionOpen>,
    last_open: u64,
    /// Lookups by inode.
    held: BTreeMap<u64, u64>,
    calls: BTreeMap<u64, NumberedCall>,
    /// Calls below this are not waited for.
    lowest: u64,
    at_work: usize,
    kept_bytes: usize,
}

fn size(reply: &Reply) -> usize {
    reply.header.len() + reply.parts.iter().map(|part| part.len()).sum::<usize>()
}

impl ServedSession {
    fn new(owner: PeerId, client: &[u8; 16], heard: Instant) -> ServedSession {
        ServedSession {
            client: ClientKey::new(&owner, client),
            owner,
            heard,
            opens: BTreeMap::new(),
            last_open: 0,
            held: BTreeMap::new(),
            calls: BTreeMap::new(),
            lowest: 0,
            at_work: 0,
            kept_bytes: 0,
        }
    }

    /// Drops replies below `lowest`.
    fn acknowledge(&mut self, lowest: u64) {
        self.lowest = self.lowest.max(lowest);
        while let Some(first) = self.calls.first_entry()
            && *first.key() < self.lowest
        {
            match first.get() {
                // When it is done, it goes together with those after it.
                NumberedCall::AtWork(_) => break,
                NumberedCall::Answered(reply) => {
                    self.kept_bytes -= size(reply);
                    first.remove();
                }
            }
        }
    }

    /// Whose session it is.
    pub(super) fn client(&self) -> ClientKey {
        self.client
    }

    /// What a change says of the call that makes it.
    pub(super) fn origin(&self, number: u64) -> CallOrigin {
        CallOrigin { client: self.client, number, lowest: self.lowest.min(number) }
    }

    /// An attempt of a call arrives.
    pub(super) fn attempt(&mut self, number: u64) -> Attempt {
        if number < self.lowest {
            return Attempt::GivenUp;
        }
        let has_room = self.calls.len() < MAX_CALLS && self.kept_bytes < MAX_KEPT_BYTES;
        let (sender, receiver) = oneshot::channel();
        match self.calls.get_mut(&number) {
            Some(NumberedCall::Answered(reply)) => Attempt::Answered(reply.clone()),
            Some(NumberedCall::AtWork(waiting)) => {
                waiting.retain(|sender| !sender.is_canceled());
                if waiting.len() >= MAX_WAITING {
                    return Attempt::Busy;
                }
                waiting.push(sender);
                Attempt::Again(receiver)
            }
            None if !has_room => Attempt::Busy,
            None => {
                self.calls.insert(number, NumberedCall::AtWork(vec![sender]));
                self.at_work += 1;
                Attempt::First(receiver)
            }
        }
    }

    /// A call is done. Returns those who wait for it.
    fn answer(&mut self, number: u64, reply: &Reply) -> Vec<oneshot::Sender<Reply>> {
        let waiting = match self.calls.get_mut(&number) {
            Some(NumberedCall::AtWork(waiting)) => std::mem::take(waiting),
            // The call was of a session of this name that has ended.
            _ => return Vec::new(),
        };
        self.calls.insert(number, NumberedCall::Answered(reply.clone()));
        self.at_work -= 1;
        self.kept_bytes += size(reply);
        self.acknowledge(self.lowest);
        waiting
    }

    /// A call has no answer, nor ever will: those who wait for it hear nothing.
    fn abandon(&mut self, number: u64) {
        if let Some(NumberedCall::AtWork(_)) = self.calls.get(&number) {
            self.calls.remove(&number);
            self.at_work -= 1;
        }
    }

    /// The open file or directory under a number of the session; [`Errno::EBADF`] if it is none of this inode.
    pub(super) fn opened(
        &self,
        inode: u64,
        number: u64,
        is_directory: bool,
    ) -> Result<Handle, Errno> {
        let open = self.opens.get(&number).ok_or(Errno::EBADF)?;
        match (open.inode.0 == inode, open.is_directory == is_directory) {
            (true, true) => Ok(open.handle),
            (true, false) if is_directory => Err(Errno::ENOTDIR),
            (true, false) => Err(Errno::EISDIR),
            (false, _) => Err(Errno::EBADF),
        }
    }

    /// Whether no more can be open; [`Errno::EMFILE`] then.
    pub(super) fn check_opens(&self) -> Result<(), Errno> {
        if self.opens.len() < MAX_OPENS { Ok(()) } else { Err(Errno::EMFILE) }
    }

    /// Keeps what was opened, under the number that this returns.
    pub(super) fn open(&mut self, open: SessionOpen) -> Result<u64, Errno> {
        self.check_opens()?;
        self.last_open += 1;
        self.opens.insert(self.last_open, open);
        Ok(self.last_open)
    }

    /// Takes an open away, for it to be closed.
    pub(super) fn close(
        &mut self,
        inode: u64,
        number: u64,
        is_directory: bool,
    ) -> Result<Handle, Errno> {
        let handle = self.opened(inode, number, is_directory)?;
        self.opens.remove(&number);
        Ok(handle)
    }

    /// Counts a lookup.
    pub(super) fn hold(&mut self, inode: u64) -> Result<(), Errno> {
        if self.held.len() >= MAX_HELD && !self.held.contains_key(&inode) {
            return Err(Errno::ENFILE);
        }
        *self.held.entry(inode).or_default() += 1;
        Ok(())
    }

    /// Takes lookups back: how many of them the session had.
    pub(super) fn forget(&mut self, Forgotten { inode, count }: Forgotten) -> u64 {
        let Some(held) = self.held.get_mut(&inode) else { return 0 };
        let taken = count.min(*held);
        *held -= taken;
        if *held == 0 {
            self.held.remove(&inode);
        }
        taken
    }

    fn into_leftover(self) -> Leftover {
        let held = self.held.into_iter().map(|(inode, count)| (InodeNumber(inode), count));
        Leftover { opens: self.opens.into_values().collect(), held: held.collect() }
    }

    /// # Panics
    /// If what is counted is not what is there.
    fn check_invariants(&self) {
        let answered = self.calls.values().filter_map(|call| match call {
            NumberedCall::Answered(reply) => Some(size(reply)),
            NumberedCall::AtWork(_) => None,
        });
        let (count, bytes) =
            answered.fold((0, 0), |(count, bytes), size| (count + 1, bytes + size));
        assert_eq!(self.kept_bytes, bytes, "bytes of kept replies");
        assert_eq!(self.at_work, self.calls.len() - count, "calls at work");
        assert!(self.held.values().all(|count| *count > 0), "held without a lookup");
        assert!(self.opens.keys().all(|number| (1..=self.last_open).contains(number)));
    }
}

/// See the module.
#[derive(Default)]
pub(super) struct SessionTable {
    sessions: BTreeMap<SessionId, ServedSession>,
}

impl SessionTable {
    /// Begins a session, or finds that it has begun. [`Errno::ENFILE`] if there are too many; [`Errno::EACCES`] if another peer
    /// has one of this name.
    pub(super) fn begin(
        &mut self,
        Begin { session: id, client, lowest }: Begin,
        from: PeerId,
        now: Instant,
    ) -> Result<(), Errno> {
        if let Some(session) = self.sessions.get_mut(&id) {
            if session.owner != from {
                return Err(Errno::EACCES);
            }
            session.heard = now;
            return Ok(());
        }
        let of_peer = self.sessions.values().filter(|session| session.owner == from).count();
        if self.sessions.len() >= MAX_SESSIONS || of_peer >= MAX_SESSIONS_OF_PEER {
            return Err(Errno::ENFILE);
        }
        let mut session = ServedSession::new(from, &client, now);
        session.acknowledge(lowest);
        self.sessions.insert(id, session);
        Ok(())
    }

    /// A peer's session, which this renews. None if it has no such.
    pub(super) fn hear(
        &mut self,
        id: SessionId,
        from: PeerId,
        lowest: u64,
        now: Instant,
    ) -> Option<&mut ServedSession> {
        let session = self.sessions.get_mut(&id).filter(|session| session.owner == from)?;
        session.heard = now;
        session.acknowledge(lowest);
        Some(session)
    }

    /// Whose session it is. None if it has ended.
    pub(super) fn client_of(&self, id: SessionId) -> Option<ClientKey> {
        self.sessions.get(&id).map(ServedSession::client)
    }

    /// A session in which a call is at work. None if it has ended meanwhile.
    pub(super) fn get(&mut self, id: SessionId) -> Option<&mut ServedSession> {
        self.sessions.get_mut(&id)
    }

    /// A call of a session is done. Returns those who wait for it.
    pub(super) fn answer(
        &mut self,
        id: SessionId,
        number: u64,
        reply: &Reply,
        now: Instant,
    ) -> Vec<oneshot::Sender<Reply>> {
        let Some(session) = self.sessions.get_mut(&id) else { return Vec::new() };
        session.heard = now;
        session.answer(number, reply)
    }

    /// A call of a session has no answer, nor ever will.
    pub(super) fn abandon(&mut self, id: SessionId, number: u64) {
        if let Some(session) = self.sessions.get_mut(&id) {
            session.abandon(number);
        }
    }

    /// Ends a peer's session.
    pub(super) fn end(&mut self, id: SessionId, from: PeerId) -> Leftover {
        match self.sessions.get(&id) {
            Some(session) if session.owner == from => {
                self.sessions.remove(&id).map(ServedSession::into_leftover).unwrap_or_default()
            }
            _ => Leftover::default(),
        }
    }

    /// Ends sessions that were not heard of for long.
    pub(super) fn end_silent(&mut self, now: Instant) -> Vec<Leftover> {
        let is_silent = |session: &ServedSession| {
            session.at_work == 0 && now.since(session.heard) >= SESSION_TIME
        };
        let silent: Vec<SessionId> =
            self.sessions.iter().filter(|(_, one)| is_silent(one)).map(|(id, _)| *id).collect();
        let ended = silent.into_iter().filter_map(|id| self.sessions.remove(&id));
        ended.map(ServedSession::into_leftover).collect()
    }

    /// How many sessions there are, and what they have open in all.
    pub(super) fn counts(&self) -> (usize, usize) {
        let opens = self.sessions.values().map(|session| session.opens.len()).sum();
        (self.sessions.len(), opens)
    }

    /// # Panics
    /// If what is counted is not what is there.
    pub(super) fn check_invariants(&self) {
        self.sessions.values().for_each(ServedSession::check_invariants);
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    const ID: SessionId = SessionId([1; 16]);
    const ME: PeerId = PeerId([1; 32]);
    const STRANGER: PeerId = PeerId([2; 32]);

    fn at(secs: u64) -> Instant {
        Instant(0) + Duration::from_secs(secs)
    }

    fn reply(len: usize) -> Reply {
        Reply { header: Bytes::from(vec![0; len]), parts: Vec::new() }
    }

    fn begin(session: SessionId) -> Begin {
        Begin { session, client: [5; 16], lowest: 0 }
    }

    fn table() -> SessionTable {
        let mut table = SessionTable::default();
        table.begin(begin(ID), ME, at(0)).unwrap();
        table
    }

    fn attempt(table: &mut SessionTable, number: u64, lowest: u64) -> Attempt {
        table.hear(ID, ME, lowest, at(0)).unwrap().attempt(number)
    }

    fn answer(table: &mut SessionTable, number: u64, len: usize) -> usize {
        let waiting = table.answer(ID, number, &reply(len), at(0)).len();
        table.check_invariants();
        waiting
    }

    #[test]
    fn a_call_is_done_once_and_its_reply_kept_until_it_is_acknowledged() {
        let mut table = table();
        let first = attempt(&mut table, 5, 5);
        assert!(matches!(first, Attempt::First(_)));
        let again = attempt(&mut table, 5, 5);
        assert!(matches!(again, Attempt::Again(_)));
        assert_eq!(answer(&mut table, 5, 10), 2);
        assert!(matches!(attempt(&mut table, 5, 5), Attempt::Answered(_)));
        assert!(matches!(attempt(&mut table, 5, 6), Attempt::GivenUp));
        // An acknowledgement that is overtaken by a later one takes nothing back.
        assert!(matches!(attempt(&mut table, 5, 5), Attempt::GivenUp));
        table.check_invariants();
    }

    #[test]
    fn a_call_that_nobody_waits_for_leaves_nothing_when_it_is_done() {
        let mut table = table();
        let _first = attempt(&mut table, 0, 0);
        let _other = attempt(&mut table, 1, 0);
        answer(&mut table, 1, 10);
        table.hear(ID, ME, 2, at(0));
        answer(&mut table, 0, 10);
        let session = table.get(ID).unwrap();
        assert!(session.calls.is_empty() && session.kept_bytes == 0 && session.at_work == 0);
    }

    #[test]
    fn calls_that_its_client_waited_for_in_no_earlier_session_are_given_up() {
        let mut table = SessionTable::default();
        table.begin(Begin { lowest: 7, ..begin(ID) }, ME, at(0)).unwrap();
        assert!(matches!(attempt(&mut table, 6, 0), Attempt::GivenUp));
        assert!(matches!(attempt(&mut table, 7, 0), Attempt::First(_)));
        let origin = table.get(ID).unwrap().origin(7);
        assert_eq!((origin.client, origin.number), (ClientKey::new(&ME, &[5; 16]), 7));
        assert_eq!(origin.lowest, 7);
        // A call goes on that is given up while it is at work.
        table.hear(ID, ME, 9, at(0));
        assert_eq!(table.get(ID).unwrap().origin(7).lowest, 7);
    }

    #[test]
    fn a_call_without_an_answer_leaves_nothing() {
        let mut table = table();
        let Attempt::First(mut waiting) = attempt(&mut table, 5, 5) else { panic!("it was seen") };
        table.abandon(ID, 5);
        table.check_invariants();
        assert!(waiting.try_recv().is_err(), "nobody will answer");
        assert_eq!(answer(&mut table, 5, 10), 0);
        table.abandon(ID, 5);
        table.check_invariants();
    }

    #[test]
    fn too_many_calls_are_put_off() {
        let mut table = table();
        let many: Vec<Attempt> =
            (0..MAX_CALLS as u64).map(|number| attempt(&mut table, number, 0)).collect();
        assert!(matches!(attempt(&mut table, 5000, 0), Attempt::Busy));
        answer(&mut table, 0, 10);
        assert!(matches!(attempt(&mut table, 5000, 0), Attempt::Busy), "its reply is kept");
        assert!(matches!(attempt(&mut table, 5000, 1), Attempt::First(_)));
        drop(many);
        answer(&mut table, 1, MAX_KEPT_BYTES);
        assert!(matches!(attempt(&mut table, 5001, 1), Attempt::Busy));
        assert!(matches!(attempt(&mut table, 5001, 2), Attempt::First(_)));
    }

    #[test]
    fn attempts_that_wait_for_one_call_are_few() {
        let mut table = table();
        let waiting: Vec<Attempt> = (0..MAX_WAITING).map(|_| attempt(&mut table, 0, 0)).collect();
        assert!(matches!(attempt(&mut table, 0, 0), Attempt::Busy));
        // Attempts that were given up make room.
        drop(waiting);
        assert!(matches!(attempt(&mut table, 0, 0), Attempt::Again(_)));
    }

    #[test]
    fn a_session_belongs_to_the_peer_that_began_it() {
        let mut table = table();
        assert_eq!(table.begin(begin(ID), STRANGER, at(0)), Err(Errno::EACCES));
        assert!(table.hear(ID, STRANGER, 0, at(0)).is_none());
        table.get(ID).unwrap().hold(7).unwrap();
        assert_eq!(table.end(ID, STRANGER), Leftover::default());
        assert_eq!(table.end(ID, ME).held, [(InodeNumber(7), 1)]);
    }

    #[test]
    fn a_call_of_a_session_that_ended_is_none_of_the_next_one_of_that_name() {
        let mut table = table();
        let _first = attempt(&mut table, 0, 0);
        table.end(ID, ME);
        table.begin(begin(ID), ME, at(0)).unwrap();
        assert_eq!(answer(&mut table, 0, 10), 0);
        assert!(matches!(attempt(&mut table, 0, 0), Attempt::First(_)));
    }

    #[test]
    fn sessions_of_a_peer_are_few() {
        let mut table = SessionTable::default();
        let id = |number: u8| SessionId([number; 16]);
        for number in 0..MAX_SESSIONS_OF_PEER as u8 {
            table.begin(begin(id(number)), ME, at(0)).unwrap();
        }
        assert_eq!(table.begin(begin(id(200)), ME, at(0)), Err(Errno::ENFILE));
        assert_eq!(table.begin(begin(id(0)), ME, at(0)), Ok(()), "one that has begun");
        assert_eq!(table.begin(begin(id(200)), STRANGER, at(0)), Ok(()));
    }

    #[test]
    fn a_silent_session_ends_with_all_it_held_but_not_while_it_works() {
        let mut table = table();
        let session = table.get(ID).unwrap();
        let open = SessionOpen { inode: InodeNumber(7), handle: Handle(3), is_directory: false };
        assert_eq!(session.open(open), Ok(1));
        session.hold(7).unwrap();
        session.hold(7).unwrap();
        let _at_work = session.attempt(0);
        assert!(table.end_silent(at(601)).is_empty(), "a call is at work");
        table.answer(ID, 0, &reply(1), at(601));
        assert!(table.end_silent(at(1200)).is_empty(), "it was heard of");
        let left = Leftover { opens: vec![open], held: vec![(InodeNumber(7), 2)] };
        assert_eq!(table.end_silent(at(1201)), [left]);
        assert!(table.hear(ID, ME, 0, at(1201)).is_none());
    }

    #[test]
    fn a_session_forgets_no_more_than_it_holds() {
        let mut table = table();
        let session = table.get(ID).unwrap();
        session.hold(7).unwrap();
        session.hold(7).unwrap();
        assert_eq!(session.forget(Forgotten { inode: 8, count: 1 }), 0);
        assert_eq!(session.forget(Forgotten { inode: 7, count: 1 }), 1);
        assert_eq!(session.forget(Forgotten { inode: 7, count: u64::MAX }), 1);
        assert_eq!(session.forget(Forgotten { inode: 7, count: 1 }), 0);
        table.check_invariants();
    }

    #[test]
    fn a_handle_is_that_of_its_file() {
        let mut table = table();
        let session = table.get(ID).unwrap();
        let open = SessionOpen { inode: InodeNumber(7), handle: Handle(3), is_directory: false };
        let number = session.open(open).unwrap();
        assert_eq!(session.opened(7, number, false), Ok(Handle(3)));
        assert_eq!(session.opened(8, number, false), Err(Errno::EBADF));
        assert_eq!(session.opened(7, number + 1, false), Err(Errno::EBADF));
        assert_eq!(session.opened(7, number, true), Err(Errno::ENOTDIR));
        assert_eq!(session.close(7, number, false), Ok(Handle(3)));
        assert_eq!(session.close(7, number, false), Err(Errno::EBADF));
        for _ in 0..MAX_OPENS {
            session.open(open).unwrap();
        }
        assert_eq!(session.open(open), Err(Errno::EMFILE));
    }
}
