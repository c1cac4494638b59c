//! Calls of one session, attempt by attempt, until there is an answer; and the session, which is begun when there is none.

use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::{Env, Instant, jittered};
use atoll_net::header::{from_header, to_header};
use atoll_net::{CallError, Refusal, Reply, Request};
use atoll_vfs::Errno;
use bytes::Bytes;
use futures_channel::oneshot;
use minicbor::Encode;

use super::super::route::Route;
use super::super::wire::{
    self, Answer, Begin, Begun, CallClass, CallHeader, FileCall, FileReply, Forgotten, SessionCall,
    SessionId,
};
use crate::messages::refused;

/// How long the first attempt of a call may take; each one that brings no answer doubles it. A guess: beyond the round trip of any
/// network, and little of the time that a call has.
const FIRST_LIMIT: Duration = Duration::from_secs(1);
const LAST_LIMIT: Duration = Duration::from_secs(8);
/// How long the client waits after a connection was refused or broke; each further one doubles it.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LAST_PAUSE: Duration = Duration::from_millis(250);
/// The most numbered calls from the lowest that is waited for to the next: below what a server takes.
const WINDOW: u64 = 512;

/// How long a call goes on.
#[derive(Debug)]
pub(super) struct Patience {
    began: Instant,
    /// When the server said last that it is at work.
    heard: AtomicU64,
    quiet: Duration,
    total: Duration,
    errno: Errno,
}

impl Patience {
    pub(super) fn new(now: Instant, class: CallClass) -> Patience {
        let secs = Duration::from_secs;
        let (quiet, total, errno) = match class {
            CallClass::Reads => (secs(10), secs(10), Errno::ETIMEDOUT),
            CallClass::Changes => (secs(30), secs(30), Errno::EIO),
            // A disk may take long for what waits; the server says that it is at it.
            CallClass::Syncs => (secs(30), secs(120), Errno::EIO),
        };
        Patience { began: now, heard: AtomicU64::new(now.0), quiet, total, errno }
    }

    /// What the call fails with when its time is over.
    pub(super) fn errno(&self) -> Errno {
        self.errno
    }

    fn hear(&self, now: Instant) {
        self.heard.store(now.0, Ordering::Relaxed);
    }

    fn left(&self, now: Instant) -> Option<Duration> {
        let heard = Instant(self.heard.load(Ordering::Relaxed));
        let ends = (heard + self.quiet).min(self.began + self.total);
        Some(ends.since(now)).filter(|left| !left.is_zero())
    }
}

/// Why a call of a session has no answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stop {
    /// The file system refused.
    Errno(Errno),
    /// The time is over.
    OutOfTime,
    /// The server does not have the session any more.
    Lost {
        /// Whether the call may have been made.
        possibly_done: bool,
    },
}

impl From<Errno> for Stop {
    fn from(errno: Errno) -> Stop {
        Stop::Errno(errno)
    }
}

/// The numbers of a client's calls, the same in all of its sessions. Plain state.
#[derive(Default, Debug)]
struct CallNumbers {
    next: u64,
    awaited: BTreeSet<u64>,
    waiting: VecDeque<oneshot::Sender<()>>,
}

impl CallNumbers {
    fn lowest(&self) -> u64 {
        self.awaited.first().copied().unwrap_or(self.next)
    }

    /// The next number, unless too many calls wait.
    fn take(&mut self) -> Option<u64> {
        if self.next - self.lowest() >= WINDOW {
            return None;
        }
        self.awaited.insert(self.next);
        self.next += 1;
        Some(self.next - 1)
    }

    /// A call waits no more.
    fn release(&mut self, number: u64) {
        let lowest = self.lowest();
        self.awaited.remove(&number);
        if self.lowest() > lowest {
            // They ask again; what does not fit waits again.
            for waiting in self.waiting.drain(..) {
                // It may have been given up.
                let _ = waiting.send(());
            }
        }
    }
}

/// A session that the server has, or had.
#[derive(Debug)]
pub(super) struct ClientSession {
    /// Counts the sessions of this client, from 1.
    pub(super) serial: u64,
    /// The run of the server that has it.
    boot: u64,
    /// Servers with the same one have all bytes that any of them has answered.
    pub(super) verifier: u64,
    id: SessionId,
}

/// The numbers, shared by the calls that wait.
#[derive(Clone, Default, Debug)]
struct SharedNumbers(Arc<Mutex<CallNumbers>>);

/// A number that a call waits for.
#[derive(Debug)]
pub(super) struct AwaitedNumber {
    numbers: SharedNumbers,
    number: u64,
}

impl Drop for AwaitedNumber {
    fn drop(&mut self) {
        self.numbers.locked().release(self.number);
    }
}

impl SharedNumbers {
    fn locked(&self) -> MutexGuard<'_, CallNumbers> {
        self.0.lock().expect("no holder of this lock panics")
    }

    async fn take(&self) -> AwaitedNumber {
        loop {
            let receiver = {
                let mut numbers = self.locked();
                if let Some(number) = numbers.take() {
                    return AwaitedNumber { numbers: self.clone(), number };
                }
                let (sender, receiver) = oneshot::channel();
                numbers.waiting.push_back(sender);
                receiver
            };
            // Its sender is dropped only after it has sent.
            let _ = receiver.await;
        }
    }
}

/// The way to the server, and the session there.
pub(super) struct Exchange {
    pub(super) env: Env,
    route: Arc<dyn Route>,
    /// Of this client.
    id: [u8; 16],
    numbers: SharedNumbers,
    current: Mutex<Option<Arc<ClientSession>>>,
    begun: AtomicU64,
    beginning: futures_util::lock::Mutex<()>,
}

/// What the last attempt came to, if it brought no answer.
enum Again {
    /// At once.
    Now,
    /// After a pause.
    Later,
}

impl Exchange {
    pub(super) fn new(env: Env, route: Arc<dyn Route>) -> Exchange {
        Exchange {
            id: random_id(&env),
            env,
            route,
            numbers: SharedNumbers::default(),
            current: Mutex::default(),
            begun: AtomicU64::new(0),
            beginning: futures_util::lock::Mutex::new(()),
        }
    }

    /// The session that the server has, unless it has lost it.
    pub(super) fn current_session(&self) -> Option<Arc<ClientSession>> {
        self.current.lock().expect("no holder of this lock panics").clone()
    }

    /// Whether a session is the one that calls are made in.
    pub(super) fn is_current(&self, session: &ClientSession) -> bool {
        self.current_session().is_some_and(|current| current.serial == session.serial)
    }

    /// The write verifier of the server that has the present session.
    pub(super) fn current_verifier(&self) -> Option<u64> {
        self.current_session().map(|session| session.verifier)
    }

    /// The server does not have this session.
    fn lose(&self, session: &ClientSession) {
        let mut current = self.current.lock().expect("no holder of this lock panics");
        if current.as_ref().is_some_and(|current| current.serial == session.serial) {
            *current = None;
        }
    }

    /// The session that the server has; begins one if there is none.
    pub(super) async fn session(&self, patience: &Patience) -> Result<Arc<ClientSession>, Stop> {
        if let Some(session) = self.current_session() {
            return Ok(session);
        }
        let _turn = self.while_patient(patience, self.beginning.lock()).await?;
        if let Some(session) = self.current_session() {
            return Ok(session);
        }
        Ok(self.begin(patience).await?.0)
    }

    /// Waits for something as long as a call goes on.
    pub(super) async fn while_patient<T>(
        &self,
        patience: &Patience,
        wait: impl Future<Output = T>,
    ) -> Result<T, Stop> {
        let left = patience.left(self.env.now()).ok_or(Stop::OutOfTime)?;
        atoll_env::timeout(&*self.env, left, wait).await.map_err(|_| Stop::OutOfTime)
    }

    /// Begins a session, also if there is one.
    pub(super) async fn begin(
        &self,
        patience: &Patience,
    ) -> Result<(Arc<ClientSession>, Begun), Stop> {
        let id = SessionId(random_id(&self.env));
        let mut attempts = Attempts::new(&self.env, patience);
        loop {
            let limit = attempts.limit().ok_or(Stop::OutOfTime)?;
            let lowest = self.numbers.locked().lowest();
            let begin = Begin { session: id, client: self.id, lowest };
            match self.send(wire::BEGIN, &begin, None, limit).await {
                Ok(reply) => match from_header::<Answer<Begun>>(&reply.header) {
                    Ok(Answer::Done(begun)) => {
                        let serial = self.begun.fetch_add(1, Ordering::Relaxed) + 1;
                        let session = Arc::new(ClientSession {
                            serial,
                            boot: begun.boot,
                            verifier: begun.verifier,
                            id,
                        });
                        let mut current =
                            self.current.lock().expect("no holder of this lock panics");
                        *current = Some(session.clone());
                        return Ok((session, begun));
                    }
                    Ok(Answer::Failed(errno)) => return Err(Errno::from_number(errno).into()),
                    Err(_) => return Err(Errno::EPROTO.into()),
                },
                // No file has such a number.
                Err(CallError::Refused(refusal)) if refusal.code == refused::NO_GROUP => {
                    return Err(Errno::ESTALE.into());
                }
                Err(error) => {
                    let again = again_after(&error).ok_or(Stop::Errno(Errno::EPROTO))?;
                    attempts.pause(again).await;
                }
            }
        }
    }

    fn of(&self, session: &ClientSession) -> SessionCall {
        let ClientSession { id, boot, .. } = *session;
        SessionCall { session: id, boot, lowest: self.numbers.locked().lowest() }
    }

    /// A number for a call.
    pub(super) async fn take_number(&self, patience: &Patience) -> Result<AwaitedNumber, Stop> {
        self.while_patient(patience, self.numbers.take()).await
    }

    async fn send<T: Encode<()>>(
        &self,
        method: u16,
        header: &T,
        part: Option<Bytes>,
        limit: Duration,
    ) -> Result<Reply, CallError> {
        let request =
            Request { method, header: to_header(header), parts: part.into_iter().collect() };
        self.route.call(request, limit).await
    }

    /// Has the server make a call, under its number of an earlier session if it has one. It takes lookups back with it that
    /// `forgotten` gives, if it is numbered.
    pub(super) async fn call(
        &self,
        session: &Arc<ClientSession>,
        (call, mut data): (FileCall, Option<Bytes>),
        number: Option<&AwaitedNumber>,
        forgotten: impl FnOnce() -> Vec<Forgotten>,
        patience: &Patience,
    ) -> Result<(FileReply, Option<Bytes>), Stop> {
        let own = match number {
            None if call.is_numbered() => Some(self.take_number(patience).await?),
            _ => None,
        };
        let number = number.or(own.as_ref());
        let mut attempts = Attempts::new(&self.env, patience);
        let mut possibly_done = false;
        let mut header = CallHeader {
            of: self.of(session),
            call,
            forgotten: if number.is_some() { forgotten() } else { Vec::new() }.into(),
            number: number.map(|one| one.number),
        };
        loop {
            if !self.is_current(session) {
                return Err(Stop::Lost { possibly_done });
            }
            let limit = attempts.limit().ok_or(Stop::OutOfTime)?;
            header.of = self.of(session);
            let error = match self.send(wire::CALL, &header, data.clone(), limit).await {
                Ok(reply) => return read_reply(reply),
                Err(error) => error,
            };
            if let CallError::Refused(Refusal { code, .. }) = &error {
                match *code {
                    wire::UNKNOWN_SESSION => {
                        self.lose(session);
                        return Err(Stop::Lost { possibly_done });
                    }
                    wire::ENDED => {
                        self.lose(session);
                        return Err(Stop::Lost { possibly_done: true });
                    }
                    wire::AT_WORK => {
                        possibly_done = true;
                        patience.hear(self.env.now());
                        attempts.heard();
                        if matches!(header.call, FileCall::Write { .. }) {
                            // The server has them.
                            data = None;
                        }
                        continue;
                    }
                    // Before any service has seen the call.
                    Refusal::OVERLOADED | Refusal::UNKNOWN_METHOD => {}
                    _ => possibly_done = true,
                }
            } else {
                possibly_done = true;
            }
            let Some(again) = again_after(&error) else {
                tracing::warn!(%error, "the server of a pool does not understand a call");
                return Err(Errno::EIO.into());
            };
            attempts.pause(again).await;
        }
    }

    /// Tells the server that this client lives.
    pub(super) async fn renew(&self, patience: &Patience) -> Result<(), Stop> {
        let session = self.session(patience).await?;
        let renewed = self.send(wire::RENEW, &self.of(&session), None, FIRST_LIMIT).await;
        if let Err(CallError::Refused(Refusal { code: wire::UNKNOWN_SESSION, .. })) = renewed {
            self.lose(&session);
            self.session(patience).await?;
        }
        Ok(())
    }

    /// The client ends, and its session with it.
    pub(super) fn end(&self) {
        let Some(session) = self.current_session() else { return };
        let request =
            Request { method: wire::END, header: to_header(&self.of(&session)), parts: Vec::new() };
        let ended = self.route.call(request, FIRST_LIMIT);
        self.env.spawn(Box::pin(async move {
            // Without it the session ends by time.
            let _ = ended.await;
        }));
    }
}

fn random_id(env: &Env) -> [u8; 16] {
    let mut id = [0; 16];
    id[..8].copy_from_slice(&env.random_u64().to_be_bytes());
    id[8..].copy_from_slice(&env.random_u64().to_be_bytes());
    id
}

fn read_reply(reply: Reply) -> Result<(FileReply, Option<Bytes>), Stop> {
    let answer = from_header::<Answer<FileReply>>(&reply.header).map_err(|_| Errno::EPROTO)?;
    let mut parts = reply.parts.into_iter();
    match answer {
        Answer::Done(done) => Ok((done, parts.next())),
        Answer::Failed(errno) => Err(Errno::from_number(errno).into()),
    }
}

/// Whether it makes sense to send a call again.
fn again_after(error: &CallError) -> Option<Again> {
    match error {
        CallError::TimedOut => Some(Again::Now),
        CallError::Unreachable(_) => Some(Again::Later),
        CallError::Refused(refusal) => match refusal.code {
            Refusal::MALFORMED | wire::GIVEN_UP => None,
            _ => Some(Again::Later),
        },
        CallError::TooLarge => None,
    }
}

/// The attempts of one call.
struct Attempts<'a> {
    env: &'a Env,
    patience: &'a Patience,
    limit: Duration,
    pause: Duration,
}

impl<'a> Attempts<'a> {
    fn new(env: &'a Env, patience: &'a Patience) -> Attempts<'a> {
        Attempts { env, patience, limit: FIRST_LIMIT, pause: FIRST_PAUSE }
    }

    /// How long the next one may take. None: the time is over.
    fn limit(&self) -> Option<Duration> {
        Some(self.patience.left(self.env.now())?.min(self.limit))
    }

    /// The server has answered, if not with what was asked.
    fn heard(&mut self) {
        self.pause = FIRST_PAUSE;
    }

    async fn pause(&mut self, again: Again) {
        match again {
            Again::Now => self.limit = (2 * self.limit).min(LAST_LIMIT),
            Again::Later => {
                let left = self.patience.left(self.env.now()).unwrap_or_default();
                let pause = jittered(&**self.env, self.pause).min(left);
                atoll_env::sleep(&**self.env, pause).await;
                self.pause = (2 * self.pause).min(LAST_PAUSE);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_number_is_the_first_that_is_waited_for() {
        let mut numbers = CallNumbers::default();
        assert_eq!(numbers.lowest(), 0);
        assert_eq!([numbers.take(), numbers.take(), numbers.take()], [Some(0), Some(1), Some(2)]);
        numbers.release(1);
        assert_eq!(numbers.lowest(), 0);
        numbers.release(0);
        assert_eq!(numbers.lowest(), 2);
        numbers.release(2);
        assert_eq!(numbers.lowest(), 3);
    }

    #[test]
    fn calls_beyond_the_window_wait_for_the_lowest() {
        let mut numbers = CallNumbers::default();
        for number in 0..WINDOW {
            assert_eq!(numbers.take(), Some(number));
        }
        assert_eq!(numbers.take(), None);
        let (sender, mut receiver) = oneshot::channel();
        numbers.waiting.push_back(sender);
        numbers.release(7);
        assert_eq!(receiver.try_recv(), Ok(None), "the lowest is the same");
        numbers.release(0);
        assert_eq!(receiver.try_recv(), Ok(Some(())));
        assert_eq!(numbers.take(), Some(WINDOW));
    }

    #[test]
    fn a_sync_goes_on_while_the_server_is_at_it() {
        let at = |secs| Instant(0) + Duration::from_secs(secs);
        let patience = Patience::new(at(0), CallClass::Syncs);
        assert!(patience.left(at(29)).is_some() && patience.left(at(30)).is_none());
        patience.hear(at(29));
        assert!(patience.left(at(58)).is_some() && patience.left(at(59)).is_none());
        patience.hear(at(119));
        assert_eq!(patience.left(at(119)), Some(Duration::from_secs(1)));
        let patience = Patience::new(at(0), CallClass::Changes);
        patience.hear(at(29));
        assert!(patience.left(at(30)).is_none());
    }
}
