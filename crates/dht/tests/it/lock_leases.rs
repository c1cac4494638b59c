//! Lock leases: never two holders at a time, whatever happens to the nodes that keep them; refused
//! where half of the nodes are lost; free again soon after a holder has died; had all the time while nodes are killed
//! and started again.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_dht::locks::{LOCK_HOLD, LOCK_LEASE, LOCK_RENEW_EVERY, SETTLE};
use atoll_dht::{Blocks, Dht, LockGrant, LockLease, LockMode, LockRefusal, LockStep};
use atoll_env::{Env, Instant, sleep};
use atoll_key::Key;
use atoll_sim::{HostId, Latency, Loss, SimConfig};
use atoll_store::MemoryStore;

use crate::ring::{MINUTE, ROOMY, Ring, prompt};

pub(crate) const SECOND: Duration = Duration::from_secs(1);

pub(crate) fn key(n: u8) -> Key {
    Key::hashed(*blake3::hash(&[n]).as_bytes())
}

/// A user of one lock at one node.
#[derive(Clone)]
pub(crate) struct User {
    dht: Arc<Dht>,
    key: Key,
    holder: [u8; 16],
    number: u64,
    mode: LockMode,
}

impl User {
    pub(crate) fn new(ring: &Ring, at: usize, key: Key) -> User {
        let dht = ring.members[at].dht.clone();
        User { dht, key, holder: [at as u8; 16], number: 0, mode: LockMode::Exclusive }
    }

    pub(crate) async fn step(&mut self, step: LockStep) -> Result<LockGrant, LockRefusal> {
        self.number += 4;
        let User { key, holder, number, mode, .. } = *self;
        self.dht.lock_lease(LockLease { key, holder, number, step, mode }).await
    }

    /// One request, to its end.
    fn now(&mut self, ring: &Ring, step: LockStep) -> Result<LockGrant, LockRefusal> {
        let mut user = self.clone();
        self.number += 4;
        let asked = async move { user.step(step).await };
        ring.sim.block_on(MINUTE * 2, asked).expect("requests have deadlines")
    }

    fn take(&mut self, ring: &Ring) -> Result<(), LockRefusal> {
        self.now(ring, LockStep::Take).map(drop)
    }

    /// Asks each half second until the lock is granted; how long that took.
    fn wait(&mut self, ring: &Ring) -> Duration {
        let start = ring.sim.now();
        while self.take(ring).is_err() {
            ring.sim.run_for(SECOND / 2);
            assert!(ring.sim.now().since(start) < MINUTE * 5, "seed {}", ring.sim.seed());
        }
        ring.sim.now().since(start)
    }
}

/// What the users of one lock believe, and how often they had it.
#[derive(Default)]
pub(crate) struct Beliefs {
    /// Of each user, until when it has the lock.
    pub until: Vec<Instant>,
    pub had: u64,
    pub lost: u64,
    /// When any of them got it last, and the longest time for which none did.
    pub got_at: Instant,
    pub longest_wait: Duration,
}

impl Beliefs {
    /// A user has the lock until then.
    pub(crate) fn has(&mut self, user: usize, now: Instant, until: Instant) {
        self.until[user] = until;
        let others = self.until.iter().enumerate().filter(|(other, _)| *other != user);
        for (other, its) in others {
            assert!(*its <= now, "{user} got at {now:?} what {other} has until {its:?}");
        }
    }

    /// A user gets the lock.
    pub(crate) fn gets(&mut self, user: usize, now: Instant, until: Instant) {
        self.has(user, now, until);
        self.had += 1;
        self.longest_wait = self.longest_wait.max(now.since(self.got_at));
        self.got_at = now;
    }
}

/// Takes a lock again and again, and holds it for a random time, `held_ms` at most.
pub(crate) async fn use_lock(
    env: Env,
    mut user: User,
    me: usize,
    beliefs: Arc<Mutex<Beliefs>>,
    held_ms: u64,
) {
    let up_to = |ms: u64| Duration::from_millis(env.random_u64() % ms);
    loop {
        let asked = env.now();
        if user.step(LockStep::Take).await.is_err() || env.now() >= asked + LOCK_HOLD {
            sleep(&*env, up_to(1000)).await;
            continue;
        }
        let mut until = asked + LOCK_HOLD;
        beliefs.lock().expect("no panics").gets(me, env.now(), until);
        // Sometimes it sleeps beyond its lease.
        let ends = env.now() + up_to(held_ms);
        let pause = if env.random_u64().is_multiple_of(5) {
            5 * LOCK_RENEW_EVERY
        } else {
            LOCK_RENEW_EVERY
        };
        let is_lost = loop {
            sleep(&*env, pause.min(ends.since(env.now()))).await;
            let asked = env.now();
            if asked >= until {
                break true;
            }
            if asked >= ends {
                break false;
            }
            let renewed = user.step(LockStep::Renew).await.is_ok();
            if env.now() >= until {
                break true;
            }
            if renewed {
                until = asked + LOCK_HOLD;
                beliefs.lock().expect("no panics").has(me, env.now(), until);
            }
        };
        {
            let mut beliefs = beliefs.lock().expect("no panics");
            beliefs.until[me] = beliefs.until[me].min(env.now());
            beliefs.lost += u64::from(is_lost);
        }
        let _ = user.step(LockStep::Release).await;
        sleep(&*env, up_to(500)).await;
    }
}

/// Three users of one lock, while messages are lost, nodes are killed and started again, machines crash and come
/// back, nodes join, and are cut off.
#[test]
fn two_users_never_have_a_lock_at_a_time() {
    let (mut had, mut lost) = (0, 0);
    for seed in 0..12 {
        let sim = SimConfig { seed: 7000 + seed, jitter: 0.5, ..SimConfig::default() };
        let mut ring = Ring::with(sim, prompt(), 7);
        let env = ring.sim.outside();
        let until = vec![Instant::default(); 3];
        let beliefs = Arc::new(Mutex::new(Beliefs { until, ..Beliefs::default() }));
        for at in 0..3 {
            let user = User::new(&ring, at, key(seed as u8));
            env.spawn(Box::pin(use_lock(env.clone(), user, at, beliefs.clone(), 40_000)));
        }
        let mut is_cut = false;
        let pick = |most: usize| (env.random_u64() % most as u64) as usize;
        for _ in 0..40 {
            ring.sim.run_for(Duration::from_millis(env.random_u64() % 30_000));
            let losses = [Loss::None, Loss::Drop { chance: 0.02 }, Loss::Drop { chance: 0.2 }];
            ring.sim.set_loss(losses[pick(3)]);
            // The users' nodes run on: a call of a node that has stopped does not end.
            let other = 3 + pick(ring.members.len() - 3);
            // A node joins through the first one, if the ring lets it.
            let whole = |ring: &Ring| {
                ring.sim.set_loss(Loss::None);
                ring.sim.heal();
                ring.sim.run_for(MINUTE * 2);
            };
            match pick(9) {
                0 | 1 if ring.up().count() > 5 => ring.crash(other),
                2 => {
                    let mut others = 3..ring.members.len();
                    let down = others.find(|at| !ring.sim.is_up(ring.members[*at].host));
                    if let Some(down) = down {
                        whole(&ring);
                        if pick(2) == 0 {
                            ring.members[down].durable.crash_machine();
                        }
                        ring.restart(down);
                    }
                }
                3 if ring.members.len() < 10 => {
                    whole(&ring);
                    ring.join(Arc::new(MemoryStore::new(ROOMY)));
                }
                4 => {
                    let hosts: Vec<HostId> = ring.members.iter().map(|m| m.host).collect();
                    let side: Vec<HostId> =
                        hosts.iter().copied().filter(|_| env.random_u64() % 5 < 2).collect();
                    ring.sim.partition(&[&side]);
                    is_cut = true;
                }
                // One or several, one after another, for some seconds each.
                5..=7 => {
                    ring.sim.set_loss(Loss::None);
                    // The first node, through which they join, may have been cut off.
                    if std::mem::take(&mut is_cut) {
                        whole(&ring);
                    }
                    for _ in 0..1 + pick(4) {
                        let up = |at: &usize| ring.sim.is_up(ring.members[*at].host);
                        let up: Vec<usize> = (3..ring.members.len()).filter(up).collect();
                        let one = up[pick(up.len())];
                        ring.crash(one);
                        ring.sim.run_for(Duration::from_millis(env.random_u64() % 12_000));
                        if pick(3) == 0 {
                            ring.members[one].durable.crash_machine();
                        }
                        ring.restart(one);
                        ring.sim.run_for(Duration::from_millis(env.random_u64() % 6_000));
                    }
                }
                _ => ring.sim.heal(),
            }
        }
        ring.sim.heal();
        let beliefs = beliefs.lock().expect("no user has panicked");
        had += beliefs.had;
        lost += beliefs.lost;
    }
    println!("the locks were had {had} times and lost {lost} times");
    assert!(had > 100 && lost > 10, "had {had} times, lost {lost} times: nothing was tried");
}

/// Replica sets re-form on both sides; only that with more than half of the nodes keeps locks.
#[test]
fn the_smaller_side_of_a_partition_has_no_locks() {
    for (seed, nodes, smaller) in [(1, 5, 2), (2, 5, 2), (3, 11, 5), (4, 11, 5)] {
        let ring = Ring::new(7100 + seed, nodes);
        let hosts: Vec<HostId> = ring.members[..smaller].iter().map(|m| m.host).collect();
        let mut held: Vec<User> = (0..6).map(|n| User::new(&ring, 0, key(n))).collect();
        assert!(held.iter_mut().all(|user| user.take(&ring).is_ok()), "seed {seed}");
        let taken_at = ring.sim.now();
        ring.sim.partition(&[&hosts]);
        let (mut first, mut refused_at) = (None, None);
        while ring.sim.now().since(taken_at) < MINUTE * 2 {
            for n in 0..6 {
                let [mine, theirs] = [1, nodes - 1].map(|at| {
                    let mut user = User { number: 100, ..User::new(&ring, at, key(n)) };
                    let taken = user.take(&ring);
                    user.now(&ring, LockStep::Release).ok();
                    taken
                });
                let now = ring.sim.now();
                if theirs.is_ok() {
                    first = first.or(Some(now));
                    let since = now.since(taken_at);
                    assert!(since >= LOCK_HOLD, "{n} after {since:?}, seed {seed}");
                }
                assert!(mine.is_err(), "seed {seed}: {n} at {:?}", now.since(taken_at));
                if matches!(mine, Err(LockRefusal::NoMajority(_))) {
                    refused_at = refused_at.or(Some(now));
                }
            }
            ring.sim.run_for(SECOND);
        }
        // By now nobody waits for what has changed.
        for n in 0..6 {
            let mut mine = User { number: 200, ..User::new(&ring, 1, key(n)) };
            assert!(
                matches!(mine.take(&ring), Err(LockRefusal::NoMajority(_))),
                "{n}, seed {seed}"
            );
            let mut theirs = User { number: 200, ..User::new(&ring, nodes - 1, key(n)) };
            assert_eq!(theirs.take(&ring), Ok(()), "{n}, seed {seed}");
        }
        assert!(first.is_some() && refused_at.is_some());
        // When the network is whole again, all have them again.
        ring.sim.heal();
        ring.sim.run_for(MINUTE * 2);
        let mut mine = User { number: 300, ..User::new(&ring, 1, key(9)) };
        assert_eq!(mine.take(&ring), Ok(()), "seed {seed}");
    }
}

#[test]
fn a_lock_is_free_again_one_lease_after_its_holder_died() {
    for seed in 0..8 {
        let ring = Ring::new(7200 + seed, 7);
        let key = key(seed as u8);
        let root = ring.root(&key);
        let [holder, other] = {
            let mut others = (0..7).filter(|at| *at != root);
            [others.next(), others.next_back()].map(|at| at.expect("seven nodes"))
        };
        User::new(&ring, holder, key).take(&ring).expect("free");
        ring.sim.crash_silently(ring.members[holder].host);
        let mut waiter = User::new(&ring, other, key);
        let took = waiter.wait(&ring);
        assert!(took > LOCK_LEASE - SECOND, "{took:?}, seed {seed}");
        assert!(took < LOCK_LEASE + 3 * SECOND, "{took:?}, seed {seed}");
    }
}

/// How the nodes that keep a lock are started again, one after another.
#[derive(Clone, Copy, PartialEq)]
enum Restarts {
    /// All of them are killed.
    Killed,
    /// The machines of all but the root crash, which still knows its voters.
    Crashed,
    /// And these nodes are then killed.
    CrashedAndKilled,
}

/// A lock is taken, and the nodes that keep it are started again. How long it was until it could be taken by another user.
fn until_free_after(restarts: Restarts, seed: u64, is_released: bool) -> Duration {
    let mut ring = Ring::new(seed, 6);
    let key = key(seed as u8);
    let set = ring.replica_set(&key);
    let outside: Vec<usize> = (0..6).filter(|at| !set.contains(at)).collect();
    let mut holder = User::new(&ring, outside[0], key);
    holder.take(&ring).expect("free");
    let taken_at = ring.sim.now();
    if is_released {
        holder.now(&ring, LockStep::Release).expect("healthy");
    }
    let root = ring.root(&key);
    for at in set.into_iter().filter(|at| restarts == Restarts::Killed || *at != root) {
        ring.crash(at);
        if restarts != Restarts::Killed {
            ring.members[at].durable.crash_machine();
        }
        ring.restart(at);
        if restarts == Restarts::CrashedAndKilled {
            ring.crash(at);
            ring.restart(at);
        }
        ring.sim.run_for(3 * SECOND);
    }
    User::new(&ring, outside[1], key).wait(&ring);
    ring.sim.now().since(taken_at)
}

/// What the nodes have forgotten they must not grant anew.
#[test]
fn replicas_whose_machines_crash_grant_nothing_before_former_leases_have_ended() {
    for seed in 7300..7306 {
        let took = until_free_after(Restarts::Crashed, seed, false);
        assert!(took >= LOCK_LEASE, "{took:?}, seed {seed}");
        assert!(took < SETTLE * 2, "{took:?}, seed {seed}");
    }
}

#[test]
fn replicas_that_are_killed_know_what_they_have_granted_and_what_was_given_up() {
    for seed in 7300..7306 {
        let took = until_free_after(Restarts::Killed, seed, false);
        assert!(took >= LOCK_LEASE, "{took:?}, seed {seed}");
        assert!(took < LOCK_LEASE + 3 * SECOND, "{took:?}, seed {seed}");
        let took = until_free_after(Restarts::Killed, seed, true);
        assert!(took < LOCK_LEASE - SECOND, "{took:?}, seed {seed}");
    }
}

/// A node whose machine has crashed, and that is then killed, has not learned in between what it had forgotten.
#[test]
fn a_replica_that_is_killed_while_it_waits_goes_on_waiting() {
    for seed in 7700..7706 {
        let took = until_free_after(Restarts::CrashedAndKilled, seed, false);
        assert!(took >= LOCK_LEASE, "{took:?}, seed {seed}");
    }
}

/// Of five nodes, one is killed every ten seconds and started again four seconds later. Locks of several keys are
/// taken all the time, each by two users.
#[test]
fn locks_are_had_while_nodes_are_killed_and_started_again() {
    for (seed, killed, crashes) in
        [(0, &[4][..], false), (1, &[3, 4], false), (2, &[2, 3, 4], false), (3, &[2, 3, 4], true)]
    {
        let mut ring = Ring::new(7800 + seed, 5);
        let env = ring.sim.outside();
        let locks: Vec<Arc<Mutex<Beliefs>>> = (0..8).map(|_| Arc::default()).collect();
        for (n, beliefs) in locks.iter().enumerate() {
            let mut all = beliefs.lock().expect("no panics");
            (all.until, all.got_at) = (vec![Instant::default(); 2], ring.sim.now());
            for at in 0..2 {
                let user = User::new(&ring, at, key(n as u8));
                let used = use_lock(env.clone(), user, at, beliefs.clone(), 3_000);
                env.spawn(Box::pin(used));
            }
        }
        for at in killed.iter().cycle().take(18) {
            ring.sim.run_for(6 * SECOND);
            ring.crash(*at);
            ring.sim.run_for(4 * SECOND);
            if crashes {
                ring.members[*at].durable.crash_machine();
            }
            ring.restart(*at);
        }
        let locks = locks.iter().map(|beliefs| beliefs.lock().expect("no user has panicked"));
        let longest =
            locks.map(|beliefs| beliefs.longest_wait.max(ring.sim.now().since(beliefs.got_at)));
        let longest = longest.max().expect("eight locks");
        println!("{killed:?}: a lock could not be taken for {longest:?}");
        // A node is away for four seconds, and a user may hold the lock for three or die with it.
        assert_eq!(longest < 12 * SECOND, !crashes, "{longest:?}, seed {seed}");
    }
}

/// A holder keeps its lock while the nodes that keep it leave one after another, and others join.
#[test]
fn a_lock_that_is_renewed_outlives_the_nodes_that_granted_it() {
    for seed in 0..4 {
        let mut ring = Ring::new(7400 + seed, 9);
        let key = key(seed as u8);
        let set = ring.replica_set(&key);
        let outside: Vec<usize> = (0..9).filter(|at| !set.contains(at)).collect();
        let (mut holder, mut other) =
            (User::new(&ring, outside[0], key), User::new(&ring, outside[1], key));
        holder.take(&ring).expect("free");
        for at in set {
            ring.crash(at);
            ring.join(Arc::new(MemoryStore::new(ROOMY)));
            for _ in 0..6 {
                ring.sim.run_for(LOCK_RENEW_EVERY);
                let renewed = holder.now(&ring, LockStep::Renew);
                assert!(renewed.is_ok(), "{renewed:?}, seed {seed}");
                assert!(other.take(&ring).is_err(), "seed {seed}");
            }
        }
        ring.sim.run_for(SETTLE);
        holder.now(&ring, LockStep::Release).expect("healthy");
        assert_eq!(other.take(&ring), Ok(()), "seed {seed}");
    }
}

#[test]
fn readers_share_and_a_holder_hears_that_its_lock_is_wanted() {
    let ring = Ring::new(7500, 5);
    let [mut a, mut b, mut c] = [0, 1, 2].map(|at| User::new(&ring, at, key(1)));
    (a.mode, b.mode) = (LockMode::Shared, LockMode::Shared);
    assert_eq!((a.take(&ring), b.take(&ring)), (Ok(()), Ok(())));
    assert_eq!(c.take(&ring), Err(LockRefusal::Held));
    let renewed = a.now(&ring, LockStep::Renew).expect("healthy");
    assert!(renewed.is_wanted);
    a.now(&ring, LockStep::Release).expect("healthy");
    b.mode = LockMode::Exclusive;
    assert_eq!(b.take(&ring), Ok(()), "the only holder that is left");
    b.now(&ring, LockStep::Release).expect("healthy");
    assert_eq!(c.take(&ring), Ok(()));
}

/// As a mutable block is written in one round trip to a replica set that is known.
#[test]
fn a_lock_is_taken_in_one_round_trip() {
    let latency = Duration::from_millis(50);
    let sim = SimConfig { seed: 7600, latency: Latency::Flat(latency), ..SimConfig::default() };
    let ring = Ring::with(sim, prompt(), 40);
    let mut user = User::new(&ring, 3, key(3));
    user.take(&ring).expect("free");
    user.now(&ring, LockStep::Release).expect("healthy");
    let start = ring.sim.now();
    user.take(&ring).expect("free");
    assert_eq!(ring.sim.now().since(start), 2 * latency);
}
