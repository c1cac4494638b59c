use atoll_key::PeerId;
use atoll_sim::{Sim, SimConfig};
use atoll_vfs::{LockKind, LockRange};

use super::*;
use crate::PoolMembers;
use crate::locks::{CopyOutcome, LockCopy};
use crate::pool_map::PoolMap;

const FILE: InodeNumber = InodeNumber(7);
const SOON: Duration = Duration::from_millis(20);

fn client(peer: u8, number: u8) -> ClientKey {
    ClientKey::new(&PeerId([peer; 32]), &[number; 16])
}

fn exclusive() -> FileLock {
    let range = LockRange { first: 0, last: 9 };
    FileLock { kind: LockKind::Exclusive, range, pid: 1, through: None }
}

/// A keeper, and who wants locks of it.
struct Kept {
    sim: Sim,
    env: Env,
    keeper: Arc<LockKeeper>,
    /// Of a primary; the other member is silent.
    others: Option<Arc<Backups>>,
}

/// What an attempt to take a lock came to.
type Taken = Arc<Mutex<Option<Result<LockOutcome, Errno>>>>;

impl Kept {
    fn alone() -> Kept {
        let sim = Sim::new(SimConfig::default());
        let host = sim.add_host(atoll_sim::HostConfig::default());
        let env = sim.env(host);
        let keeper = LockKeeper::alone(&env);
        Kept { sim, env, keeper, others: None }
    }

    fn of_primary() -> Kept {
        let sim = Sim::new(SimConfig::default());
        let hosts = sim.add_hosts(2, &atoll_sim::HostConfig::default());
        let (env, transport) = (sim.env(hosts[0]), sim.transport(hosts[0]));
        let members = PoolMembers::new(hosts.iter().map(|host| sim.peer(*host)).collect()).unwrap();
        let map = PoolMap::first(&members);
        let others = Arc::new(Backups::new(&env, &transport, [1; 16], &map, 0));
        let keeper = LockKeeper::of_primary(&env, &others, (PoolLocks::default(), 0));
        Kept { sim, env, keeper, others: Some(others) }
    }

    fn begin(&self, client: ClientKey, over: LockSession, owner: u64, waits: bool) -> Taken {
        let (keeper, taken) = (self.keeper.clone(), Taken::default());
        let to = taken.clone();
        self.env.spawn(Box::pin(async move {
            let done = keeper.lock((client, None, over), FILE, owner, exclusive(), waits).await;
            *to.lock().unwrap() = Some(done);
        }));
        self.sim.run_for(SOON);
        taken
    }

    fn unlock(&self, client: ClientKey, owner: u64) {
        let of = (client, self.keeper.state().locks.session_of(client));
        let kept = self.sim.block_on(SOON, self.keeper.keep(of, FILE, owner, &[])).unwrap();
        kept.unwrap();
    }
}

fn taken(one: &Taken) -> Option<Result<LockOutcome, Errno>> {
    *one.lock().unwrap()
}

#[test]
fn nothing_waits_for_members_when_this_one_is_no_primary_any_more() {
    let kept = Kept::of_primary();
    let first = kept.begin(client(1, 1), 0, 5, false);
    assert_eq!(taken(&first), None, "the other member does not know it");
    kept.others.as_ref().unwrap().close();
    kept.sim.run_for(SOON);
    assert_eq!(taken(&first), Some(Err(Errno::EIO)));
    let again = kept.begin(client(1, 1), 0, 5, false);
    assert_eq!(taken(&again), Some(Err(Errno::EIO)), "a retry");
    let of = (client(1, 1), kept.keeper.state().locks.session_of(client(1, 1)));
    let unlocked = kept.sim.block_on(SOON, kept.keeper.keep(of, FILE, 5, &[]));
    assert_eq!(unlocked, Ok(Err(Errno::EIO)));
    let late = kept.begin(client(1, 2), 0, 5, false);
    assert_eq!(taken(&late), Some(Err(Errno::EIO)));
    let later = kept.begin(client(1, 3), 0, 9, true);
    kept.sim.run_for(WAIT_LIMIT);
    assert!(taken(&later).is_some());
    let keeper = Arc::downgrade(&kept.keeper);
    drop(kept.keeper);
    kept.sim.run_for(LOOK_EVERY);
    assert!(keeper.upgrade().is_none(), "no call keeps it");
}

#[test]
fn a_learner_is_told_what_those_know_who_get_the_changes_after_it() {
    let kept = Kept::of_primary();
    let one = client(1, 1);
    kept.begin(one, 0, 5, false);
    // They wait until the first one is known.
    let session = kept.keeper.state().locks.session_of(one).unwrap();
    let holder = LockHolder { client: one, session, owner: 5 };
    {
        let mut state = kept.keeper.state();
        let change = state.locks.keep(FILE, holder, &[]).unwrap().unwrap();
        kept.keeper.note(&mut state, change);
    }
    kept.keeper.end(one);
    kept.sim.run_for(SOON);
    kept.begin(client(2, 1), 0, 5, false);
    let (what, bytes) = kept.keeper.whole();
    let ItemKind::Locks(place) = what else { panic!("these are locks") };
    let mut copy = LockCopy::default();
    assert_eq!(copy.take(1, place, &bytes), Ok(CopyOutcome::Made));
    assert_eq!(copy.counts(), (1, 1));
    let unsent = kept.keeper.state().unsent.clone();
    assert_eq!(unsent.len(), 4);
    for (sequence, change) in (place.sequence + 1..).zip(unsent) {
        let place = LockPlace { sequence, is_whole: false, ..place };
        assert_eq!(copy.take(1, place, &locks::encode(&[change])), Ok(CopyOutcome::Made));
    }
    let (after, _) = copy.for_primary(1);
    assert_eq!(after.counts(), (1, 1));
    let other = after.session_of(client(2, 1)).unwrap();
    let holder = LockHolder { client: client(2, 1), session: other, owner: 5 };
    assert_eq!(after.conflict(FILE, holder, exclusive()), None, "it is its own");
}

/// It was told so by a primary whose members did not know it yet when it died.
#[test]
fn a_client_gets_another_session_after_one_that_is_over_to_it() {
    let kept = Kept::alone();
    let first = kept.begin(client(1, 1), 0, 5, false);
    let Some(Ok(LockOutcome::Done(session))) = taken(&first) else { panic!("it is free") };
    let again = kept.begin(client(1, 1), session - 1, 5, false);
    assert_eq!(taken(&again), Some(Ok(LockOutcome::Done(session))), "this one is not over");
    // Another owner: the locks of before are gone.
    let next = kept.begin(client(1, 1), session, 6, false);
    assert_eq!(taken(&next), Some(Ok(LockOutcome::Done(session + 1))));
    assert_eq!(kept.keeper.counts(), (1, 1));
}

#[test]
fn a_wait_that_another_call_of_its_owner_ends_keeps_its_place() {
    let kept = Kept::alone();
    let [one, two, three] = [1, 2, 3].map(|number| client(1, number));
    kept.begin(one, 0, 5, false);
    let first = kept.begin(two, 0, 5, true);
    let second = kept.begin(three, 0, 5, true);
    kept.keeper.stop_waiting(two, FILE, 5, true);
    kept.sim.run_for(SOON);
    assert_eq!(taken(&first), Some(Err(Errno::EAGAIN)));
    let again = kept.begin(two, 0, 5, true);
    kept.unlock(one, 5);
    kept.sim.run_for(SOON);
    assert!(matches!(taken(&again), Some(Ok(_))) && taken(&second).is_none());
    // An unlock of other bytes leaves it, too; the end of the caller does not.
    let behind = kept.begin(one, 0, 5, true);
    kept.unlock(three, 5);
    kept.sim.run_for(SOON);
    assert_eq!(taken(&second), Some(Err(Errno::EAGAIN)));
    let again = kept.begin(three, 0, 5, true);
    kept.keeper.stop_waiting(one, FILE, 5, false);
    let behind_again = kept.begin(one, 0, 5, true);
    kept.unlock(two, 5);
    kept.sim.run_for(SOON);
    assert!(matches!(taken(&again), Some(Ok(_))) && taken(&behind_again).is_none());
    assert_eq!(taken(&behind), Some(Err(Errno::EAGAIN)));
}

#[test]
fn no_peer_takes_all_places() {
    let kept = Kept::alone();
    kept.begin(client(9, 1), 0, 5, false);
    let mut waiting = Vec::new();
    let mut state = kept.keeper.state();
    let mut wait = |peer: u8, owner: u64| {
        let holder = LockHolder { client: client(peer, owner as u8 % 100), session: 1, owner };
        let place = kept.keeper.begin_wait(&mut state, FILE, holder, exclusive());
        place.map(|place| waiting.push(place)).is_ok()
    };
    for peer in 1..=5 {
        let places = (0..2000).take_while(|owner| wait(peer, *owner)).count();
        assert_eq!(places, if peer < 5 { MAX_WAITING_OF_PEER } else { 0 });
    }
}
