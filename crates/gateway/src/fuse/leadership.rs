//! Which thread reads the kernel's requests: the leader/followers pattern (Schmidt et al. 2000).
//!
//! A process that uses a file system and the thread that serves it take turns: each sleeps while
//! the other works. The kernel gives a request to the thread that has slept longest, so that with
//! several threads reading, each request would wake another one, on another core, with nothing in
//! its cache. Therefore one thread, the *leader*, reads and serves requests as long as it keeps up,
//! and the others, the *followers*, sleep here. One of them, the *watcher*, looks at the leader
//! once a tick:
//!
//! - a leader that has been at the same request since the last tick waits for something (a disk,
//!   a lock): the watcher becomes the leader, and the old one a follower when it is done;
//! - a leader that served a request at each of many ticks has more to do than one thread can:
//!   the watcher reads requests beside it for a while, as a *helper*;
//! - when nothing happens, the watcher sleeps until the leader wakes it.
//!
//! Falling asleep for the few microseconds until the same process asks again costs more than
//! polling for them, above all where an idle core is a virtual machine's to wake. So the leader
//! polls for the next request for a moment before it sleeps in a read, as long as that mostly pays.
//! It does not where tasks wait for a core: it would keep one from them, perhaps from the process
//! that it waits for, and where it sleeps instead, the two take turns on one core, which spares an
//! interrupt to another for each answer.
//!
//! A thread becomes a follower only after its request is answered. When the kernel ends the mount,
//! the thread that learns of it ends, and all others with it.
//!
//! It does not know what requests are.

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// How often the watcher looks: a leader that is blocked is replaced after two ticks at most. A guess: well above
/// what a request takes, well below what people notice.
const TICK: Duration = Duration::from_millis(4);

/// How long the leader polls for the next request before it sleeps: about what being woken costs.
const POLL_FOR: Duration = Duration::from_micros(20);

/// How often in a row polling may be in vain before it is given up.
const MAX_CREDIT: u32 = 8;

/// After so many requests polling is tried all the same.
const TRIED_EVERY: u32 = 256;

/// Ticks in a row at which the leader was serving before it is helped. One that serves a single
/// process is found serving about every second time.
const BUSY_TICKS: u32 = 12;

/// Requests that a helper serves before it is a follower again.
const HELPED_REQUESTS: u32 = 256;

/// Ticks without any request before the watcher sleeps. A guess.
const IDLE_TICKS: u32 = 25;

/// How much of the last ten seconds tasks waited for a core, above which no thread polls,
/// percent. A guess: two processes on two cores and a commit now and then stay below, three do not.
const CROWDED_PERCENT: f64 = 25.0;

/// Ticks between looks at that: one second.
const PRESSURE_TICKS: u32 = 250;

/// Where Linux tells that.
const PRESSURE: &str = "/proc/pressure/cpu";

/// Bits of [`Leadership::word`] that count.
const COUNT_BITS: u32 = 48;

/// The threads of one mount, and which of them leads.
#[derive(Debug, Default)]
pub(super) struct Leadership {
    /// Above [`COUNT_BITS`] the leader, 0 for none yet; below, how often it began and ended a
    /// request: odd while it serves one. Only the leader changes it, and, while it is odd, the
    /// watcher.
    word: AtomicU64,
    /// Where requests come from, to see whether there is one.
    device: OnceLock<OwnedFd>,
    /// What polling has earned lately. Only the leader changes it.
    credit: AtomicU32,
    /// Requests until polling is tried without credit.
    until_tried: AtomicU32,
    /// Tasks wait for a core. Only the watcher changes it.
    crowded: AtomicBool,
    /// The watcher sleeps until the next request.
    asleep: AtomicBool,
    followers: Mutex<Followers>,
    /// Wakes followers.
    woken: Condvar,
    /// Wakes the watcher.
    watch: Condvar,
}

#[derive(Debug, Default)]
struct Followers {
    threads: u64,
    is_watched: bool,
    ended: bool,
}

/// A thread of the mount, until it ends.
struct Member {
    leadership: Arc<Leadership>,
    number: u64,
    /// Requests that it may still serve beside the leader.
    help_left: u32,
}

impl Drop for Member {
    fn drop(&mut self) {
        self.leadership.followers().ended = true;
        self.leadership.woken.notify_all();
        self.leadership.watch.notify_all();
    }
}

thread_local! {
    static MEMBER: RefCell<Option<Member>> = const { RefCell::new(None) };
}

/// A request that is being served. Dropped, the thread goes on to the next, now or once it leads.
#[derive(Debug)]
pub(super) struct Serving<'a> {
    leadership: &'a Leadership,
    thread: u64,
    may_follow: bool,
}

/// What the watcher does after a look at the leader.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verdict {
    Watch,
    Sleep,
    Help,
    Lead,
}

/// What the watcher has seen.
#[derive(Debug)]
struct Watched {
    word: u64,
    busy_ticks: u32,
    idle_ticks: u32,
}

impl Watched {
    fn new(word: u64) -> Watched {
        Watched { word, busy_ticks: 0, idle_ticks: 0 }
    }

    fn look(&mut self, word: u64) -> Verdict {
        let (same, serving) = (word == self.word, is_serving(word));
        self.word = word;
        self.busy_ticks = if serving { self.busy_ticks + 1 } else { 0 };
        self.idle_ticks = if same { self.idle_ticks + 1 } else { 0 };
        match (same, serving) {
            (true, true) => Verdict::Lead,
            (true, false) if self.idle_ticks >= IDLE_TICKS => Verdict::Sleep,
            _ if self.busy_ticks >= BUSY_TICKS => Verdict::Help,
            _ => Verdict::Watch,
        }
    }
}

/// Whether the kernel's text about the pressure on cores says that tasks wait for one. Its first
/// line: `some avg10=0.00 avg60=0.00 avg300=0.00 total=0`.
fn is_crowded(told: &str) -> bool {
    let percent = told.split_ascii_whitespace().find_map(|word| word.strip_prefix("avg10="));
    let percent = percent.and_then(|percent| percent.parse::<f64>().ok());
    percent.is_none_or(|percent| percent > CROWDED_PERCENT)
}

fn is_serving(word: u64) -> bool {
    word & 1 == 1
}

fn leader_of(word: u64) -> u64 {
    word >> COUNT_BITS
}

/// The word after the next beginning or end, by `leader`.
fn next(word: u64, leader: u64) -> u64 {
    let count = (word + 1) & ((1 << COUNT_BITS) - 1);
    leader << COUNT_BITS | count
}

impl Leadership {
    fn followers(&self) -> MutexGuard<'_, Followers> {
        self.followers.lock().expect("no holder of this lock panics")
    }

    /// Begins a request on this thread.
    pub(super) fn begin(self: &Arc<Leadership>) -> Serving<'_> {
        self.begin_as(true)
    }

    /// Begins a part of a request on this thread, which goes on with the other parts afterwards.
    pub(super) fn begin_part(self: &Arc<Leadership>) -> Serving<'_> {
        self.begin_as(false)
    }

    fn begin_as(self: &Arc<Leadership>, may_follow: bool) -> Serving<'_> {
        let thread = self.member();
        let word = self.word.load(Ordering::SeqCst);
        if leader_of(word) == thread || leader_of(word) == 0 {
            // Fails only where another thread became the first leader just now.
            let _ = self.change(word, next(word, thread));
        }
        if self.asleep.load(Ordering::SeqCst) {
            let _followers = self.followers();
            self.asleep.store(false, Ordering::SeqCst);
            self.watch.notify_all();
        }
        Serving { leadership: self, thread, may_follow }
    }

    /// Says where requests come from.
    pub(super) fn read_from(&self, device: OwnedFd) {
        let _ = self.device.set(device);
    }

    /// Polls for the next request, if that pays.
    fn poll_for_next(&self) {
        let Some(device) = self.device.get() else { return };
        if self.crowded.load(Ordering::Relaxed) {
            return;
        }
        let credit = self.credit.load(Ordering::Relaxed);
        let until_tried = self.until_tried.load(Ordering::Relaxed);
        if credit == 0 && until_tried > 0 {
            self.until_tried.store(until_tried - 1, Ordering::Relaxed);
            return;
        }
        self.until_tried.store(TRIED_EVERY, Ordering::Relaxed);
        let came = comes_within(device, POLL_FOR);
        let credit = if came { (credit + 1).min(MAX_CREDIT) } else { credit.saturating_sub(1) };
        self.credit.store(credit, Ordering::Relaxed);
    }

    fn change(&self, from: u64, to: u64) -> bool {
        self.word.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// This thread's number, at first use a new one.
    fn member(self: &Arc<Leadership>) -> u64 {
        MEMBER.with_borrow_mut(|member| match member {
            Some(member) if Arc::ptr_eq(&member.leadership, self) => member.number,
            _ => {
                let mut followers = self.followers();
                followers.threads += 1;
                let number = followers.threads;
                drop(followers);
                *member = Some(Member { leadership: self.clone(), number, help_left: 0 });
                number
            }
        })
    }

    /// Sleeps until this thread is to read requests.
    fn follow(&self, thread: u64) {
        let mut followers = self.followers();
        while !followers.ended {
            if followers.is_watched {
                followers = self.woken.wait(followers).expect("no holder of this lock panics");
                continue;
            }
            followers.is_watched = true;
            let (verdict, mut after) = self.watch(followers, thread);
            after.is_watched = false;
            self.woken.notify_one();
            if verdict == Verdict::Help {
                help(HELPED_REQUESTS);
            }
            return;
        }
    }

    /// Watches until this thread is to read requests: as the leader, or as a helper.
    fn watch<'a>(
        &self,
        mut followers: MutexGuard<'a, Followers>,
        thread: u64,
    ) -> (Verdict, MutexGuard<'a, Followers>) {
        let mut watched = Watched::new(self.word.load(Ordering::SeqCst));
        let mut until_pressure = 0;
        while !followers.ended {
            if until_pressure == 0 {
                // Where it is not told, no thread polls.
                let told = std::fs::read_to_string(PRESSURE).unwrap_or_default();
                self.crowded.store(is_crowded(&told), Ordering::Relaxed);
                until_pressure = PRESSURE_TICKS;
            }
            until_pressure -= 1;
            let waited = self.watch.wait_timeout(followers, TICK);
            followers = waited.expect("no holder of this lock panics").0;
            let word = self.word.load(Ordering::SeqCst);
            match watched.look(word) {
                // Fails if it has ended its request just now.
                Verdict::Lead if self.change(word, next(word, thread)) => {
                    return (Verdict::Lead, followers);
                }
                Verdict::Help => return (Verdict::Help, followers),
                Verdict::Sleep => {
                    followers = self.sleep(followers, word);
                    until_pressure = 0;
                }
                Verdict::Lead | Verdict::Watch => {}
            }
        }
        (Verdict::Lead, followers)
    }

    /// Sleeps until the leader begins a request after `word`: either it sees that the watcher
    /// sleeps, or the watcher sees that it began.
    fn sleep<'a>(
        &self,
        mut followers: MutexGuard<'a, Followers>,
        word: u64,
    ) -> MutexGuard<'a, Followers> {
        self.asleep.store(true, Ordering::SeqCst);
        while self.asleep.load(Ordering::SeqCst)
            && self.word.load(Ordering::SeqCst) == word
            && !followers.ended
        {
            followers = self.watch.wait(followers).expect("no holder of this lock panics");
        }
        self.asleep.store(false, Ordering::SeqCst);
        followers
    }
}

/// Whether a request comes within so long; also if that cannot be told.
fn comes_within(device: &OwnedFd, limit: Duration) -> bool {
    let began = Instant::now();
    loop {
        let mut ready = [PollFd::new(device, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        if poll(&mut ready, Some(&now)) != Ok(0) {
            return true;
        }
        if began.elapsed() >= limit {
            return false;
        }
    }
}

/// Lets this thread serve so many requests beside the leader; whether it may serve one more.
fn help(more: u32) -> bool {
    MEMBER.with_borrow_mut(|member| {
        let Some(member) = member else { return false };
        member.help_left += more;
        let may = member.help_left > 0;
        if more == 0 {
            member.help_left = member.help_left.saturating_sub(1);
        }
        may
    })
}

impl Drop for Serving<'_> {
    fn drop(&mut self) {
        let word = self.leadership.word.load(Ordering::SeqCst);
        let leads = leader_of(word) == self.thread;
        // It fails if the watcher has taken over just now.
        if leads && self.leadership.change(word, next(word, self.thread)) {
            self.leadership.poll_for_next();
            return;
        }
        if self.may_follow && !std::thread::panicking() && !help(0) {
            self.leadership.follow(self.thread);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    #[test]
    fn a_leader_is_watched_replaced_and_helped() {
        let mut watched = Watched::new(next(0, 1));
        let mut word = next(next(0, 1), 1);
        assert_eq!(watched.look(word), Verdict::Watch, "it reads");
        for _ in 1..IDLE_TICKS {
            assert_eq!(watched.look(word), Verdict::Watch);
        }
        assert_eq!(watched.look(word), Verdict::Sleep, "nothing happens");
        word = next(word, 1);
        assert_eq!(watched.look(word), Verdict::Watch, "it serves");
        assert_eq!(watched.look(word), Verdict::Lead, "it serves the same request");
        watched = Watched::new(word);
        for _ in 1..BUSY_TICKS {
            word += 2;
            assert_eq!(watched.look(word), Verdict::Watch, "it serves other requests");
        }
        assert_eq!(watched.look(word + 2), Verdict::Help);
    }

    #[test]
    fn cores_are_crowded_where_tasks_wait_or_nobody_knows() {
        let told = |percent| {
            format!("some avg10={percent} avg60=50.00 avg300=0.00 total=9\nfull avg10=0.00 total=0")
        };
        assert!(!is_crowded(&told("0.00")));
        assert!(!is_crowded(&told("24.99")));
        assert!(is_crowded(&told("49.68")));
        assert!(is_crowded(""), "a kernel without this file");
    }

    /// A thread that does not lead comes back from its first request only when it is to read.
    fn other(leadership: &Arc<Leadership>) -> mpsc::Receiver<()> {
        let (tell, told) = mpsc::channel();
        let leadership = leadership.clone();
        thread::spawn(move || {
            drop(leadership.begin());
            let _ = tell.send(());
        });
        told
    }

    #[test]
    fn followers_sleep_while_the_leader_reads_and_end_with_it() {
        let leadership = Arc::new(Leadership::default());
        let of_leader = leadership.clone();
        let (tell, told) = mpsc::channel::<()>();
        let (ready, led) = mpsc::channel();
        let leader = thread::spawn(move || {
            drop(of_leader.begin());
            ready.send(()).unwrap();
            let _ = told.recv();
        });
        led.recv().unwrap();
        let others = [other(&leadership), other(&leadership), other(&leadership)];
        while leadership.followers().threads < 4 {
            thread::yield_now();
        }
        assert!(others.iter().all(|other| other.try_recv().is_err()), "the leader reads");
        drop(tell);
        leader.join().unwrap();
        for other in others {
            other.recv().unwrap();
        }
    }

    #[test]
    fn each_leader_that_blocks_is_replaced() {
        let leadership = Arc::new(Leadership::default());
        let first = leadership.begin();
        let (tell, told) = mpsc::channel::<()>();
        let (came, coming) = mpsc::channel();
        let second = {
            let leadership = leadership.clone();
            thread::spawn(move || {
                drop(leadership.begin());
                // Leads now, and waits in its second request.
                let _serving = leadership.begin();
                came.send(leader_of(leadership.word.load(Ordering::SeqCst))).unwrap();
                let _ = told.recv();
            })
        };
        assert_eq!(coming.recv().unwrap(), 2);
        other(&leadership).recv().unwrap();
        assert_eq!(leader_of(leadership.word.load(Ordering::SeqCst)), 3);
        drop(tell);
        drop(first);
        second.join().unwrap();
    }
}
